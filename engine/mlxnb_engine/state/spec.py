"""Geometry of the buffers: which shapes a step may use, and the protocol of a group's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

BLOCK_TOKENS = 64
MLX_DTYPES = {name: getattr(mx, name) for name in ("float32", "float16", "bfloat16", "int32", "uint32", "int64")}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes that a step may take on this backend.

    width_multiple: every window is padded to a multiple of this many tokens. A BLAS whose products agree only for such
        widths (measured by `qualify.strict_geometry`) then computes every row with the same bits, whatever its neighbours.
    bucketed: attention reads a class's whole capacity, so that shapes repeat; the mask does the rest. Otherwise it reads
        the longest row's extent (a lone row's exact extent, without a mask).
    first_rung, skipped_rungs: capacities are first_rung * 2^k without the skipped ones.
    fused: windows of few positions attend through `cuda.attention`, each row over its own length, where the layers allow it.
    compiled: decode steps whose shapes repeat run as compiled functions (`methods.compiled`); needs `bucketed`.
    """

    width_multiple: int = 1
    bucketed: bool = False
    first_rung: int = BLOCK_TOKENS
    skipped_rungs: tuple[int, ...] = ()
    fused: bool = False
    compiled: bool = False

    def capacity_for(self, tokens: int) -> int:
        """The smallest allowed capacity that holds `tokens`."""
        rung = self.first_rung
        while rung < tokens or rung in self.skipped_rungs:
            rung *= 2
        return rung

    def width_for(self, tokens: int) -> int:
        """`tokens` (>= 1) rounded up to an allowed window width."""
        return -(-tokens // self.width_multiple) * self.width_multiple

    def reach_for(self, tokens: int) -> int:
        """Positions that a row touches on its way to `tokens`: its last step writes a whole window, padding included."""
        return tokens - 1 + self.width_for(1)

    def extent_for(self, lengths: Sequence[int], width: int, capacity: int) -> int:
        """Attended length of one class in a step: covers every row's `length + width`, at most `capacity`."""
        if self.bucketed:
            return capacity
        longest = max(lengths) + width
        return longest if len(lengths) == 1 else min(capacity, -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS)


class State(Protocol):
    """What a group holds per row: `slots.Slots` for rows that share a step, `lone.LoneState` for one that does not.

    `rows()` is the batch order; a row is a handle with a `length` that only its group's steps raise.
    """

    caches: list[Any]

    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def bytes_per_row(self) -> int: ...
    def rows(self) -> Sequence[Any]: ...
    def bytes_for(self, tokens: Sequence[int]) -> int: ...
    def growth(self, tokens: Sequence[int]) -> int: ...
    def add(self, tokens: int) -> Any: ...
    def join(self, other: Any, row: Any, tokens: int) -> Any: ...
    def retire(self, row: Any) -> None: ...
    def reserve(self, width: int) -> None: ...
    def begin(self, width: int, real: Sequence[int] | None = None) -> object: ...
    def end(self) -> None: ...
    def arrays(self) -> list[mx.array]: ...
    def clear(self) -> None: ...
    def check(self) -> None: ...
