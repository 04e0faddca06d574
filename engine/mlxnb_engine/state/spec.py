"""Geometry of the buffers: which shapes a step may use. Pure values, no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes that a step may take on this backend.

    width_multiple: every window is padded to a multiple of this many tokens. A BLAS whose products agree only for such
        widths (measured by `qualify.strict_geometry`) then computes every row with the same bits, whatever its neighbours.
    bucketed: attention reads a class's whole capacity, so that shapes repeat; the mask does the rest. Otherwise it reads
        the longest row's extent (a lone row's exact extent, without a mask).
    first_rung, skipped_rungs: capacities are first_rung * 2^k without the skipped ones.
    """

    width_multiple: int = 1
    bucketed: bool = False
    first_rung: int = BLOCK_TOKENS
    skipped_rungs: tuple[int, ...] = ()

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
