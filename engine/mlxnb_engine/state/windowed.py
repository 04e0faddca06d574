"""Sliding layers. Reference: a buffer of all tokens, read from `lo`, with the window as a mask (`step.Step.mask`).

The ring is a memory option with the same bits: a buffer of R >= W + L - 1 positions, L the widest step, where position p lies in slot
p mod R. What a step may see is never overwritten by it, padding included, so any prefix of a window may be kept. Keys are read back in
the order of their positions: attention adds them up in the order of the reference (engine-facts 8.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from .spec import BLOCK_TOKENS
from .step import Span, Step


@dataclass(slots=True)
class Ring:
    """The rings of one step's sliding layers. slack: the widest step that they take. Tables are made once per step and span."""

    slack: int
    _step: Step | None = None
    _tables: dict[tuple[int, int, str], mx.array] = field(default_factory=dict)

    def size(self, window: int) -> int:
        """Slots of a ring, in whole blocks. A block that has just filled is all there, however small the window."""
        return -(-(max(window, BLOCK_TOKENS) + self.slack - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    def holds(self, window: int | None, capacity: int) -> bool:
        """Whether a layer of this window has a ring in a class of this capacity: only where that is smaller."""
        return window is not None and self.size(window) < capacity

    def begin(self, step: Step) -> None:
        self._step, self._tables = step, {}

    def slots_of(self, span: Span, window: int) -> mx.array:
        """int32 [slots, 1, L, 1]: where the span's window lands."""
        return self._table(span, window, "write", lambda: span.positions % self.size(window))

    def positions(self, span: Span, window: int) -> mx.array:
        """int32 [rows, R']: the positions that a step reads, ascending; negative ones do not exist."""
        return self._table(span, window, "read", lambda: span.lengths[:, None] + self._offsets(span, window))

    def _offsets(self, span: Span, window: int) -> mx.array:
        step = self._current
        before = min(span.shortest, window - 1) if step.exact else window - 1
        return mx.arange(-before, step.width, dtype=mx.int32)

    def read(self, buffer: mx.array, span: Span, window: int) -> mx.array:
        """[rows, heads, R', dim]: the span's keys or values in the order of their positions."""
        rows = span.stop - span.start
        index = self._table(span, window, "order", lambda: (self.positions(span, window) % self.size(window))[:, None, :, None])
        return mx.take_along_axis(buffer[:rows], index, axis=2)

    def mask(self, span: Span, window: int, layer_window: int, wide: bool) -> mx.array | str | None:
        """As `Step.mask`, over the positions that `read` gives."""
        step = self._current
        if step.exact and span.shortest + step.width <= window:
            return None if step.width == 1 else "causal"
        if step.exact and step.width == 1 and window == layer_window:
            return None  # exactly the window is read

        def make() -> mx.array:
            keys = self.positions(span, layer_window)[:, None, None, :]
            query = (span.lengths[:, None] + mx.arange(step.width))[:, None, :, None]
            seen = (keys >= 0) & (keys <= query) & (keys > query - window)
            return seen[:, None] if wide else seen

        return self._table(span, window, "mask", make)

    def _table(self, span: Span, window: int, what: str, make: Callable[[], mx.array]) -> mx.array:
        key = (span.start, window, what)
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    @property
    def _current(self) -> Step:
        assert self._step is not None, "no step is being built"
        return self._step
