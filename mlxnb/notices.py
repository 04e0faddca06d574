"""What the engine wants to say once in a kernel: a line of plain text below the first answer, not again after a reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxnb_engine.client import CompletionClient

_told: set[str] = set()


def tell(client: CompletionClient) -> None:
    """Print the note on this engine's BLAS, if it has one that this kernel has not shown yet. Known once the engine has started."""
    note = str((client.status().get("backend") or {}).get("blas_note") or "")
    if note and note not in _told:
        from .sanitize import visible_text

        _told.add(note)
        print(visible_text(f"mlxnb: {note}"))
