"""What a person may ask of the prefix cache: how much there is, to forget it, to have it on disk. With or without an engine.

Any thread. Everything that is returned is JSON-able. Without an engine the directory alone is looked at or changed.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from . import resume
from .cache import labels
from .cache.budget import floor_of
from .cache.files import PosixFiles
from .cache.listing import BAD_RECORD, HOME, Listing
from .cache.store import Store
from .config import RuntimeConfig
from .errors import RequestError

if TYPE_CHECKING:
    from .engine import Engine

CLEAR_S = 30.0
_NO_LIMIT = 2**63 - 1
_SHORTEST_PREFIX = 6
_QUEUE_WAIT_S = 0.01


def info(config: RuntimeConfig, engine: Engine | None = None) -> dict[str, Any]:
    """Sizes in bytes. Reads the directory, and changes nothing there; no step is waited for.

    memory: {budget_bytes, used_bytes, blocks, tails, queued_bytes}, None without an engine that has loaded a model.
    disk: {folder, budget_bytes (0: off), used_bytes, blocks, damaged_files, damaged_bytes, temporary_bytes, free_bytes,
    floor_bytes (of free space, below which nothing is saved), processes, problem}.
    models: [{model ("" if nobody noted its name), namespace, memory_bytes, memory_blocks, disk_bytes, disk_blocks,
    idle_s (since the last use on disk, None if it is not there)}], the largest first.
    """
    shared = engine.shared if engine is not None else None
    disk, stored = _disk(config)
    names = labels.read(PosixFiles(), str(config.prefix_dir))
    memory: dict[str, Any] | None = None
    resident: dict[str, Any] = {}
    if shared is not None:
        stats = shared.cache.stats()
        resident = stats["namespaces"]
        names |= {namespace.hex(): label for namespace, label in dict(shared.labels).items()}
        memory = {
            "budget_bytes": stats["budget_bytes"],
            "used_bytes": stats["used_bytes"],
            "blocks": sum(part["blocks"] for part in resident.values()),
            "tails": sum(part["tails"] for part in resident.values()),
            "queued_bytes": shared.disk.writer.queued_bytes if shared.disk is not None else 0,
        }
    models = []
    for namespace in resident.keys() | stored.keys():
        here, there = resident.get(namespace, {}), stored.get(namespace, Counter())
        models.append(
            {
                "model": names.get(namespace, ""),
                "namespace": namespace,
                "memory_bytes": here.get("bytes", 0),
                "memory_blocks": here.get("blocks", 0),
                "disk_bytes": there["bytes"],
                "disk_blocks": there["blocks"],
                "idle_s": max(0.0, round(time.time() - there["used_ns"] / 1e9, 1)) if there["blocks"] else None,
            }
        )
    models = [model for model in models if model["memory_blocks"] or model["disk_blocks"] or model["memory_bytes"]]
    models.sort(key=lambda model: (-model["disk_bytes"] - model["memory_bytes"], model["namespace"]))
    return {"memory": memory, "disk": disk, "models": models}


def clear(config: RuntimeConfig, model: str | None = None, engine: Engine | None = None) -> dict[str, Any]:
    """Forget everything, or what is kept of one model: its name as `info` gives it, or the beginning of a namespace.

    Everything: also the interrupted answers of kernels that are gone. {files, disk_bytes, memory_bytes}: what went. Raises
    RequestError for a model of which nothing is kept, and if another process keeps the directory locked.
    """
    kept = info(config, engine)["models"]
    parts = kept if model is None else chosen(kept, model)
    gone = {"files": 0, "disk_bytes": 0, "memory_bytes": sum(part["memory_bytes"] for part in parts)}
    if model is None:
        gone["files"] += resume.clear(config)
    wanted = [None] if model is None else [bytes.fromhex(part["namespace"]) for part in parts]
    shared = engine.shared if engine is not None else None
    if engine is not None and shared is not None:
        cache = shared.cache
        for namespace in wanted:
            engine.ask(cache.clear if namespace is None else partial(cache.drop, namespace))
    with _Emptier(config, engine) as empty:
        for namespace in wanted:
            went = empty(namespace)
            if went is None:
                raise RequestError(f"{config.prefix_dir} cannot be cleared now.", "Another process keeps it locked: try again in a moment.")
            gone["files"] += went[0]
            gone["disk_bytes"] += went[1]
    return gone


def flush(config: RuntimeConfig, engine: Engine | None, timeout_s: float) -> dict[str, Any]:
    """Have every block that is kept in memory on disk, synced. Without an engine there is nothing to do.

    {ok, published, dropped, failed, pending, missing, unsaved}: numbers of blocks, as in `writer.Receipt`; unsaved: blocks in memory
    that the disk does not take. ok: a restart finds every whole block that is kept now.
    """
    until = time.monotonic() + timeout_s
    counts = dict.fromkeys(("published", "dropped", "failed", "pending", "missing", "unsaved"), 0)
    shared = engine.shared if engine is not None else None
    if engine is None or shared is None:
        return {"ok": True, **counts}
    disk = shared.disk
    if disk is None:
        counts["unsaved"] = engine.ask(lambda: shared.cache.unsaved)
        return {"ok": not counts["unsaved"], **counts}
    engine.ask(disk.begin_flush)
    while engine.ask(disk.flush_some) and time.monotonic() < until:
        if disk.queue_full:
            time.sleep(_QUEUE_WAIT_S)
    receipt = disk.writer.flush(max(0.0, until - time.monotonic()))
    counts |= {name: len(getattr(receipt, name)) for name in ("published", "dropped", "failed", "pending", "missing")}
    counts["unsaved"] = engine.ask(lambda: shared.cache.unsaved)
    return {"ok": receipt.ok and not counts["unsaved"], **counts}


def _disk(config: RuntimeConfig) -> tuple[dict[str, Any], dict[str, Counter[str]]]:
    """The directory as a whole, and what is in it by namespace."""
    root, files = config.prefix_dir, PosixFiles()
    near = next(path for path in (root, *root.parents) if path.exists())
    disk: dict[str, Any] = {"folder": str(root), "budget_bytes": config.prefix_disk_for(shutil.disk_usage(near).total)}
    listing = Listing(str(root), files, time.time_ns)
    stored: dict[str, Counter[str]] = {}
    problem, damaged, processes = "", [], 0
    if root.exists():
        try:
            listing.refresh()
            damaged = [found for found in files.list(f"{root}/quarantine") if found.kind == "file" and BAD_RECORD.fullmatch(found.name)]
            processes = sum(found.kind == "dir" and HOME.fullmatch(found.name) is not None for found in files.list(f"{root}/tmp"))
        except OSError as error:
            problem = error.strerror or str(error)
    for path, entry in listing.items():
        part = stored.setdefault(path.split("/")[1], Counter())
        part["blocks"] += 1
        part["bytes"] += entry.size
        part["used_ns"] = max(part["used_ns"], entry.mtime_ns)
    space, damaged_bytes = files.space(str(near)), sum(found.size for found in damaged)
    disk |= {
        "used_bytes": listing.record_bytes + listing.other_bytes,
        "blocks": sum(part["blocks"] for part in stored.values()),
        "damaged_files": len(damaged),
        "damaged_bytes": damaged_bytes,
        "temporary_bytes": max(0, listing.other_bytes - damaged_bytes),
        "free_bytes": space.free,
        "floor_bytes": floor_of(space),
        "processes": processes,
        "problem": problem,
    }
    return disk, stored


def chosen(kept: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """The entries of `info` that this names: a model, or the beginning of a namespace. Raises RequestError if none is."""
    found = [part for part in kept if part["model"] == model]
    if not found and len(model) >= _SHORTEST_PREFIX:
        found = [part for part in kept if part["namespace"].startswith(model.lower())]
    if found:
        return found
    known = list(dict.fromkeys(part["model"] or part["namespace"][:8] for part in kept))
    raise RequestError(f"Nothing is kept of {model!r}.", f"Kept: {', '.join(known)}." if known else "Nothing is kept at all.")


class _Emptier:
    """Deletes records, through the engine's own store if it has one, so that it knows."""

    def __init__(self, config: RuntimeConfig, engine: Engine | None) -> None:
        shared = engine.shared if engine is not None else None
        self._disk = shared.disk if shared is not None else None
        self._there = config.prefix_dir.exists()
        self._store = Store(config.prefix_dir, _NO_LIMIT, PosixFiles(), lambda text: None)

    def __enter__(self) -> _Emptier:
        if self._disk is None and self._there:
            self._store.open()
        return self

    def __call__(self, namespace: bytes | None) -> tuple[int, int] | None:
        """Files and bytes that went; None if it could not be done."""
        if not self._there:
            return 0, 0
        if self._disk is None:
            return self._store.clear(namespace)
        clear = self._disk.writer.clear(namespace)
        return clear.gone if clear.gate.acquire(timeout=CLEAR_S) else None

    def __exit__(self, *_: object) -> None:
        self._store.close()
