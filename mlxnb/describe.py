"""An engine's status and the models of this machine as lines of text, for `%mlx status`, `models`, `load` and `unload`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from . import runtime


def say(*lines: str) -> None:
    """Print; names of models, chats and files are not ours, so control characters show."""
    from .sanitize import visible_text

    print(visible_text("\n".join(lines)))


def engine_lines(state: Mapping[str, Any]) -> list[str]:
    if not state:
        return ["engine   not started; the first %%mlx cell starts it"]
    backend = state.get("backend") or {}
    facts = [str(state.get("state", "unknown"))]
    facts += [f"{label}{backend[key]}" for key, label in (("device", ""), ("blas", "BLAS "), ("mlx", "MLX ")) if backend.get(key)]
    problem = f" ({state['error']})" if state.get("error") else ""
    note = [f"blas     {backend['blas_note']}"] if backend.get("blas_note") else []
    return ["engine   " + " · ".join(facts) + problem, *note]


def loading_lines(loading: Any) -> list[str]:
    entries = loading if isinstance(loading, list) else [loading] if loading else []
    lines = []
    for entry in entries:
        if isinstance(entry, dict):
            done, total = entry.get("done") or 0, entry.get("total") or 0
            part = f" {size(done)} of {size(total)}" if total else ""
            lines.append(f"loading  {entry.get('name') or 'the default model'}: {entry.get('phase', '')}{part}")
        else:
            lines.append(f"loading  {entry}")
    return lines


def model_row(model: Mapping[str, Any]) -> tuple[str, ...]:
    kv = model.get("kv_bytes")
    return (
        str(model.get("name") or "the default model"),
        str(model.get("weights", "")),
        str(model.get("rows", "")),
        str(model.get("queue", "")),
        size(kv) if isinstance(kv, (int, float)) else "",
    )


def kept_lines(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of which models not every prefix is kept for later prompts, and why."""
    kept = [(model.get("name") or "the default model", model.get("reuse", "any prefix")) for model in models]
    return [f"kept     {name}: {reuse}" for name, reuse in kept if reuse != "any prefix"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]


def size(count: float) -> str:
    from .render import size

    return size(count)


def short(text: str) -> str:
    line = " ".join(text[:200].split())
    return line if len(line) <= 48 else line[:45] + "..."


def described(state: Mapping[str, Any], name: str, weights: str = "") -> str:
    """The model of this name, of its copies the one with these weights, with what a person may want to know of it."""
    models = [model for model in state.get("models") or [] if not name or model.get("name") == name]
    model = next((model for model in models if weights and model.get("weights") == weights), models[-1] if models else {})
    facts = [str(model["weights"])] if model.get("weights") else []
    if isinstance(model.get("parameters"), int):
        facts.append(f"{model['parameters'] / 1e6:,.0f} M parameters")
    if isinstance(model.get("weight_bytes"), int):
        facts.append(size(model["weight_bytes"]))
    if model.get("context_length"):
        facts.append(f"context of {model['context_length']:,} tokens")
    return (str(model.get("name") or name) or "the default model") + (": " + ", ".join(facts) if facts else "")


def gone(names: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What was unloaded, each with its weights, since copies of one model in several types have one name.

    names: what the engine says it dropped; it has the last word if the two snapshots do not agree with it.
    """

    def copies(state: Mapping[str, Any]) -> Counter[tuple[str, str]]:
        return Counter((str(model.get("name")), str(model.get("weights", ""))) for model in state.get("models") or [])

    dropped = list((copies(before) - copies(after)).elements())
    if sorted(name for name, _ in dropped) != sorted(names):
        return ", ".join(name or "the default model" for name in names)
    return ", ".join((name or "the default model") + (f" ({weights})" if weights else "") for name, weights in dropped)


def resident_models() -> list[str]:
    """Names of the models in memory, each once."""
    return list(dict.fromkeys(runtime.resident_models()))


def models_on_disk() -> list[tuple[str, int | None]]:
    """Models that need no network, as `-m` takes them, with the bytes of their weights where known; also GGUF files right here."""
    from mlxnb_engine.locate import list_local_models

    known: list[tuple[str, int | None]] = [(model.name, model.size_bytes) for model in list_local_models(runtime.config())]
    return known + [(name, None) for name in runtime.models_on_disk() if name.startswith("./")]
