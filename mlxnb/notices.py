"""What the engine wants to say once in a kernel: a line of plain text below the first answer, not again after a reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxnb_engine.client import CompletionClient

_told: set[str] = set()


def tell(client: CompletionClient) -> None:
    """Print what the engine notes on its BLAS and on the disk cache, each sentence once in a kernel. Known once it has started."""
    status = client.status()
    notes = [(status.get("backend") or {}).get("blas_note") or "", *(status.get("notices") or ())]
    for note in [str(note) for note in notes if note and note not in _told]:
        from .sanitize import visible_text

        _told.add(note)
        print(visible_text(f"mlxnb: {note}"))
