"""The prefix cache as a person sees it: `cache_info`, `cache_clear` and `cache_flush`, and their words for `%mlx cache` and the CLI.

With a running engine they speak to it; without one to the directory alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxnb_engine import upkeep
from mlxnb_engine.errors import RequestError

from . import describe, runtime

FLUSH_S = 30.0


def cache_info() -> dict[str, Any]:
    """What the prefix cache holds: `memory` (None before the first model), `disk`, and `models`, one entry per model and setup.

    Sizes are bytes (`mlxnb_engine.upkeep.info` lists the fields). Reads only; no step is waited for.
    """
    here = runtime.current()
    return here.cache_info() if here is not None else upkeep.info(runtime.config())


def cache_clear(model: str | None = None) -> dict[str, Any]:
    """Forget everything, or what is kept of one model, in memory and on disk: `files`, `disk_bytes` and `memory_bytes` that went.

    Other kernels that use the same folder lose it too, and compute it again. Raises RequestError if nothing is kept of the model.
    """
    here = runtime.current()
    return here.cache_clear(model) if here is not None else upkeep.clear(runtime.config(), model)


def cache_flush(timeout_s: float = FLUSH_S) -> dict[str, Any]:
    """Have all that is kept in memory on disk. `ok` says that a restart will find it; else the counts say what is missing."""
    here = runtime.current()
    return here.cache_flush(timeout_s) if here is not None else upkeep.flush(runtime.config(), None, timeout_s)


# -- words -----------------------------------------------------------------------------------------------------------------


def info_lines(info: Mapping[str, Any]) -> list[str]:
    memory, disk = info["memory"], info["disk"]
    lines = [f"memory   {_memory(memory)}", f"disk     {_disk(disk)}", f"         {disk['folder']}"]
    if disk["problem"]:
        lines.append(f"         it cannot be read: {disk['problem']}")
    elif disk["budget_bytes"]:
        floor = f"nothing more is saved below {describe.size(disk['floor_bytes'])} of free space"
        lines.append(f"         {describe.size(disk['free_bytes'])} free; {floor}")
    if memory and memory["queued_bytes"]:
        lines.append(f"waiting  {describe.size(memory['queued_bytes'])} to be written")
    if disk["damaged_files"]:
        count = disk["damaged_files"]
        lines.append(f"damaged  {count} file{'s' * (count != 1)} set aside, {describe.size(disk['damaged_bytes'])}")
    rows = [_row(model) for model in info["models"]]
    return [*lines, "", *describe.table(("model", "setup", "memory", "disk", "blocks", "last used"), rows)] if rows else lines


def _memory(memory: Mapping[str, Any] | None) -> str:
    if memory is None:
        return "no engine has loaded a model here"
    used, budget = describe.size(memory["used_bytes"]), describe.size(memory["budget_bytes"])
    return f"{used} of {budget}, {_blocks(memory['blocks'])}"


def _disk(disk: Mapping[str, Any]) -> str:
    used = describe.size(disk["used_bytes"])
    if not disk["budget_bytes"]:
        return f"off; {used} from before, {_blocks(disk['blocks'])}" if disk["blocks"] else "off"
    return f"{used} of {describe.size(disk['budget_bytes'])}, {_blocks(disk['blocks'])}"


def _blocks(count: int) -> str:
    return f"{count:,} block{'s' * (count != 1)} of 64 tokens"


def _row(model: Mapping[str, Any]) -> tuple[str, ...]:
    """setup: the beginning of the namespace. One model has several if its type, the BLAS or MLX differs."""
    return (
        model["model"] or "?",
        model["namespace"][:8],
        describe.size(model["memory_bytes"]) if model["memory_blocks"] else "",
        describe.size(model["disk_bytes"]) if model["disk_blocks"] else "",
        str(max(model["memory_blocks"], model["disk_blocks"])),
        _ago(model["idle_s"]) if model["idle_s"] is not None else "",
    )


def _ago(seconds: float) -> str:
    for length, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if (count := int(seconds // length)) >= 1:
            return f"{count} {name}{'s' * (count != 1)} ago"
    return "just now"


def question(info: Mapping[str, Any], model: str | None) -> str:
    """What `clear` would delete. Raises RequestError if there is nothing of this model."""
    chosen = info["models"] if model is None else upkeep.chosen(info["models"], model)
    size = describe.size(sum(part["disk_bytes"] + part["memory_bytes"] for part in chosen))
    what = f"all that is kept of {model}" if model is not None else "the whole prefix cache"
    shared = info["disk"]["processes"] > 1
    return f"This deletes {what}: {size}." + (" Other kernels use this folder too." if shared else "")


def cleared(gone: Mapping[str, Any]) -> str:
    if not gone["files"] and not gone["memory_bytes"]:
        return "Nothing was kept."
    memory = f" and {describe.size(gone['memory_bytes'])} in memory" if gone["memory_bytes"] else ""
    return f"Deleted {gone['files']:,} file{'s' * (gone['files'] != 1)}, {describe.size(gone['disk_bytes'])}{memory}."


def flushed(receipt: Mapping[str, Any]) -> str:
    """Raises RequestError if something is not on disk."""
    count = receipt["published"]
    done = f"{count:,} block{'s' * (count != 1)} saved since the last time" if count else "nothing was left to save"
    if receipt["ok"]:
        return f"On disk: {done}."
    lost = {
        "pending": "not written yet",
        "failed": "failed to be written",
        "dropped": "not taken (the disk or its budget is full, or saving is off)",
        "missing": "evicted again",
        "unsaved": "only in memory",
    }
    parts = [f"{receipt[name]:,} {words}" for name, words in lost.items() if receipt[name]]
    done = done[0].upper() + done[1:]
    raise RequestError(f"Not all is on disk: {'; '.join(parts)}.", f"{done}. `%mlx cache` shows the folder and its budget.")


def clear_words(words: Sequence[str]) -> tuple[str | None, bool]:
    """(model, whether --yes was given) of `clear [MODEL] [--yes]`. Raises RequestError for more."""
    names = [word for word in words if word != "--yes"]
    if len(names) > 1 or any(name.startswith("-") for name in names):
        usage = "It is: %mlx cache clear [MODEL] [--yes]. A name with spaces needs quotes."
        raise RequestError(f"{names[-1]!r} is one word too many.", usage)
    return (names[0] if names else None), "--yes" in words
