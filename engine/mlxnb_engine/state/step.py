"""The shapes, offsets and masks of one step, captured before any write and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Span:
    """One capacity class's part of a step: batch rows start..stop, attending `extent` positions.

    home: the class (`slots.CapacityClass`). base: int32 [slots], the rows' lengths, 0 for a free slot. positions: int32
    [slots, 1, L, 1], where the window lands. shortest: the least length of its rows; a sliding layer reads nothing that even this
    row no longer sees.
    """

    home: Any
    start: int
    stop: int
    extent: int
    base: mx.array
    positions: mx.array
    shortest: int

    @property
    def lengths(self) -> mx.array:
        """int32 [rows]."""
        rows = self.stop - self.start
        return self.base if rows == self.base.shape[0] else self.base[:rows]

    def first(self, window: int | None) -> int:
        """The first position that a layer of this window reads: `lo = max(0, min(n) - W + 1)`."""
        return 0 if window is None else max(0, self.shortest - window + 1)


def landing(base: mx.array, width: int) -> mx.array:
    """int32 [slots, 1, L, 1]: the positions of a window behind these lengths."""
    return (base[:, None] + mx.arange(width, dtype=mx.int32))[:, None, :, None]


def in_batch_order(spans: Sequence[Span]) -> mx.array:
    """int32 [B]: the lengths of all rows, without a trip over the host."""
    parts = [span.lengths for span in spans]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


class Step:
    """One step of `width` positions per row.

    offset: RoPE offset, an int for a lone row, else int32 [B]. It never moves during the forward. exact: a lone row over its
    exact extent. wide_masks: masks get an extra axis for grouped heads (gemma2). fused: layers attend through `cuda.attention`, which
    needs no mask. real: true widths, None if all fill the step.
    """

    def __init__(
        self, spans: tuple[Span, ...], width: int, offset: int | mx.array, *, exact: bool, bucketed: bool, wide_masks: bool, fused: bool
    ) -> None:
        self.spans, self.width, self.offset, self.exact, self.fused = spans, width, offset, exact, fused
        self._bucketed, self._wide = bucketed, wide_masks
        self.real: tuple[int, ...] | None = None
        self._masks: dict[tuple[int, int, int | None], mx.array | str | None] = {}
        self._lengths: mx.array | None = None

    @property
    def by_span(self) -> bool:
        """Layers attend span by span, through the dispatch of `attention.py`."""
        return self.fused or len(self.spans) > 1

    def over(self, bases: Sequence[mx.array]) -> Step:
        """The same step over other length arrays, one per span: what a compiled function sees in place of this step's own."""
        pairs = zip(self.spans, bases, strict=True)
        spans = tuple(replace(span, base=base, positions=landing(base, self.width)) for span, base in pairs)
        flags = {"exact": self.exact, "bucketed": self._bucketed, "wide_masks": self._wide, "fused": self.fused}
        return Step(spans, self.width, in_batch_order(spans), **flags)

    def fill(self, real: Sequence[int]) -> None:
        """Say how many of the step's positions are each row's own, in batch order; the rest is padding."""
        self.real = None if all(n == self.width for n in real) else tuple(real)
        self._lengths = None if self.real is None else mx.array(self.real, mx.int32)

    def narrow(self, width: int, real: Sequence[int]) -> None:
        """Replay: recurrent layers see a window of `width` of which each row keeps `real`. Attention has run and is not asked again."""
        self.width = width
        self.fill(real)

    @property
    def lengths(self) -> mx.array | None:
        """int32 [B]: the true widths, as mlx-lm's recurrent layers ask for them; None if no row has padding."""
        return self._lengths

    def reads(self, span: Span, window: int | None) -> int:
        """The first position a layer reads. Bucketed shapes repeat, so they always start at 0."""
        return 0 if self._bucketed else span.first(window)

    def mask(self, span: Span, window: int | None, layer_window: int | None, return_array: bool = False) -> mx.array | str | None:
        """Bool [rows, 1, L, extent - lo]: query i of a row of length n sees key j iff j <= n + i (and j > n + i - window).

        window: of the mask. layer_window: of the layer that reads, which decides `lo`. A lone row over its exact extent needs
        none at L = 1 and plain "causal" while no query has a key to drop.
        """
        low = self.reads(span, layer_window)
        if self.exact and not return_array and (window is None or span.extent - low <= window):
            return None if self.width == 1 else "causal"
        key = (span.start, low, window)
        if key not in self._masks:
            query = (span.lengths[:, None] + mx.arange(self.width))[:, None, :, None]
            cols = mx.arange(low, span.extent)
            seen = cols <= query
            seen = seen if window is None else seen & (cols > query - window)
            self._masks[key] = seen[:, None] if self._wide else seen
        return self._masks[key]
