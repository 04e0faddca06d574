"""Slotted, right-padded K/V buffers in capacity classes, one length per row.

Per layer and class: K `[slots, kv_heads, capacity, key_dim]` and V alike. The rows of a class sit in slots 0..b-1, and a
step's batch order is class by class, smallest first:

    class 64:   slot 0  slot 1  |  class 256:  slot 0  (slot 1 free)
    batch row:  0       1       |              2

Append is a scatter at each row's own length, rollback lowers a length, join writes a free slot, retire moves the last slot
into the hole. Projections run over all rows of a step, attention per class, so that one long row inflates neither its
neighbours' memory nor their attention. A row that outgrows its class moves up by one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..errors import ModelError
from ..types import StateSpec
from .spec import Geometry

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(eq=False, slots=True)
class SlotRow:
    """Handle of one row's state. Only `Slots` changes it; holders never remember an index.

    length: positions whose K/V are in the state.
    """

    length: int
    home: CapacityClass
    index: int


@dataclass(eq=False, slots=True)
class CapacityClass:
    """The buffers of one capacity. `rows[i]` lives in slot i.

    Invariant: every byte beyond a row's length is finite. used: slots that ever held a row; the next row of such a slot finds
    it zeroed beyond its own length, whatever the last one left there (a mask does not stop a NaN in V).
    """

    capacity: int
    keys: list[mx.array]
    values: list[mx.array]
    rows: list[SlotRow] = field(default_factory=list)
    used: int = 0

    @property
    def slots(self) -> int:
        return int(self.keys[0].shape[0])

    def drop(self) -> None:
        """Let go of every buffer now: rows and their class refer to each other, so reference counts alone never would."""
        self.keys.clear()
        self.values.clear()
        self.rows.clear()


@dataclass(frozen=True, slots=True)
class Span:
    """One class's part of a step: batch rows start..stop, attending `extent` positions."""

    home: CapacityClass
    start: int
    stop: int
    extent: int
    lengths: mx.array
    positions: mx.array


class Step:
    """The shapes, offsets and masks of one step, captured before any write and shared by all layers.

    offset: RoPE offset, an int for a lone row, else int32 [B]. It never moves during the forward.
    """

    def __init__(self, spans: tuple[Span, ...], width: int, offset: int | mx.array, exact: bool) -> None:
        self.spans = spans
        self.width = width
        self.offset = offset
        self.exact = exact
        self._masks: dict[tuple[int, int | None], mx.array | str | None] = {}

    def mask(self, span: Span, window: int | None) -> mx.array | str | None:
        """Bool [rows, 1, L, extent]: query i of a row of length n sees key j iff j <= n + i (and j > n + i - window).

        A lone row over its exact extent needs none at L = 1 and plain "causal" otherwise.
        """
        if self.exact and window is None:
            return None if self.width == 1 else "causal"
        key = (span.start, window)
        if key not in self._masks:
            query = (span.lengths[:, None] + mx.arange(self.width))[:, None, :, None]
            cols = mx.arange(span.extent)
            seen = cols <= query
            self._masks[key] = seen if window is None else seen & (cols > query - window)
        return self._masks[key]


class _ClassesView:
    """Captured K/V of a step whose rows live in several classes (`attention.AttentionView`)."""

    def __init__(self, step: Step, parts: list[tuple[mx.array, mx.array]], window: int | None) -> None:
        self._step, self._parts, self._window = step, parts, window

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        out = [
            mx.fast.scaled_dot_product_attention(
                queries[span.start : span.stop], keys, values, scale=scale, mask=self._step.mask(span, self._window)
            )
            for span, (keys, values) in zip(self._step.spans, self._parts, strict=True)
        ]
        return mx.concatenate(out, axis=0)


class LayerCache:
    """mlx-lm's cache protocol over one layer of the slots. Truthy, stateless: the step is in `slots.step`."""

    group_size = 64

    def __init__(self, slots: Slots, layer: int, window: int | None) -> None:
        self._slots, self._layer, self._window = slots, layer, window

    @property
    def offset(self) -> int | mx.array:
        return self._slots.current.offset

    @property
    def bits(self) -> int:
        """Present only when a step spans several classes: it routes attention to `attention._dispatch`."""
        if len(self._slots.current.spans) == 1:
            raise AttributeError("bits")
        return 16

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        step = self._slots.current
        if len(step.spans) > 1:
            return None
        mask = step.mask(step.spans[0], window_size)
        if return_array and isinstance(mask, str):
            return mx.arange(step.spans[0].extent) <= (mx.arange(N) + step.offset)[:, None]
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        return self._slots.append(self._layer, keys, values, self._window)


class Slots:
    """State of the rows of one group, all layers.

    Owner: engine thread. Invariant: `rows()` is the batch order; a row's length never exceeds its class's capacity.
    Lifetime: with its group; `clear()` drops every buffer.
    """

    def __init__(self, specs: Sequence[StateSpec], geometry: Geometry, tight: bool = False) -> None:
        self.specs = tuple(specs)
        self.geometry = geometry
        self._tight = tight  # classes hold no free slot: they grow and shrink by one, at the cost of a copy
        self.classes: list[CapacityClass] = []
        self.step: Step | None = None
        self.caches = [LayerCache(self, i, spec.window) for i, spec in enumerate(self.specs)]

    # -- rows ------------------------------------------------------------------------------------------------------

    def rows(self) -> list[SlotRow]:
        """All rows in batch order."""
        return [row for home in self.classes for row in home.rows]

    @property
    def current(self) -> Step:
        assert self.step is not None, "no step is being built"
        return self.step

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one row, all layers."""
        return sum(s.kv_heads * (s.key_dim + s.value_dim) * _DTYPES[s.dtype].size for s in self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, free slots included."""
        return sum(home.capacity * home.slots for home in self.classes) * self.bytes_per_token

    def add(self, tokens: int) -> SlotRow:
        """A new empty row in the smallest class that holds `tokens`."""
        home = self._class(self.geometry.capacity_for(max(tokens, 1)))
        return self._occupy(home, 0)

    def retire(self, row: SlotRow) -> None:
        """Free the row's slot; the last row of its class moves into the hole."""
        home, hole, last = row.home, row.index, len(row.home.rows) - 1
        if home.rows[hole] is not row:
            raise RuntimeError("a row was retired twice")
        moved = home.rows.pop()
        if not home.rows:
            self.classes.remove(home)
            home.drop()
            return
        for buffers in (home.keys, home.values):
            for i, buffer in enumerate(buffers):
                if hole != last:
                    buffer[hole] = buffer[last]
                buffers[i] = mx.contiguous(buffer[:last]) if self._tight else buffer
        home.used = min(home.used, home.slots)
        if moved is not row:
            home.rows[hole] = moved
            moved.index = hole

    def join(self, other: Slots, row: SlotRow, tokens: int) -> SlotRow:
        """Copy a row of another group's slots into this one, in a class that holds `tokens`; the donor is untouched."""
        home = self._class(self.geometry.capacity_for(max(tokens, row.length, 1)))
        new = self._occupy(home, row.length)
        self._copy(row, new)
        return new

    def extract(self, row: SlotRow) -> list[tuple[mx.array, mx.array]]:
        """Contiguous, evaluated copies of the row's K/V per layer, `[1, kv_heads, length, dim]`."""
        out = [
            (mx.contiguous(k[row.index : row.index + 1, :, : row.length]), mx.contiguous(v[row.index : row.index + 1, :, : row.length]))
            for k, v in zip(row.home.keys, row.home.values, strict=True)
        ]
        mx.eval(out)
        return out

    def arrays(self) -> list[mx.array]:
        """Every state array, for explicit submission with a step."""
        return [array for home in self.classes for array in (*home.keys, *home.values)]

    def clear(self) -> None:
        """Drop every row and buffer."""
        for home in self.classes:
            home.drop()
        self.classes.clear()
        self.step = None

    def check(self) -> None:
        """Raise RuntimeError unless rows, slots and lengths agree."""
        for home in self.classes:
            for i, row in enumerate(home.rows):
                if row.home is not home or row.index != i or not 0 <= row.length <= home.capacity:
                    raise RuntimeError(f"slot {i} of class {home.capacity} does not match its row")
            if len(home.rows) > home.slots:
                raise RuntimeError(f"class {home.capacity} has {len(home.rows)} rows in {home.slots} slots")

    # -- steps -----------------------------------------------------------------------------------------------------

    def reserve(self, width: int) -> None:
        """Move up every row that a window of this width would carry beyond its capacity."""
        for row in self.rows():
            if row.length + width > row.home.capacity:
                self._promote(row, row.length + width)

    def begin(self, width: int) -> Step:
        """Capture offsets and shapes for one step in which every row has a window of `width` positions.

        Raises ModelError before any device write if a row lacks capacity (call `reserve` first).
        """
        spans, start = [], 0
        lengths = [row.length for row in self.rows()]
        for home in self.classes:
            mine = [row.length for row in home.rows]
            if max(mine) + width > home.capacity:
                raise ModelError(f"A step of {width} would write beyond capacity {home.capacity}.")
            free = [0] * (home.slots - len(mine))
            base = mx.array(mine + free, mx.int32)
            positions = (base[:, None] + mx.arange(width, dtype=mx.int32))[:, None, :, None]
            extent = self.geometry.extent_for(mine, width, home.capacity)
            spans.append(Span(home, start, start + len(mine), extent, base[: len(mine)], positions))
            start += len(mine)
        lone = len(lengths) == 1
        offset = lengths[0] if lone else mx.array(lengths, mx.int32)
        self.step = Step(tuple(spans), width, offset, exact=lone and not self.geometry.bucketed)
        return self.step

    def append(self, layer: int, keys: mx.array, values: mx.array, window: int | None) -> tuple[Any, Any]:
        """Scatter a window's K/V `[B, kv_heads, L, dim]` at each row's length; returns what the layer attends."""
        step = self.current
        parts = []
        for span in step.spans:
            home = span.home
            home.keys[layer] = _write(home.keys[layer], span, keys)
            home.values[layer] = _write(home.values[layer], span, values)
            count = span.stop - span.start
            parts.append((home.keys[layer][:count, :, : span.extent], home.values[layer][:count, :, : span.extent]))
        if len(parts) == 1:
            return parts[0]
        view = _ClassesView(step, parts, window)
        return view, view

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _class(self, capacity: int) -> CapacityClass:
        for home in self.classes:
            if home.capacity == capacity:
                return home
        home = CapacityClass(capacity, *self._buffers(1, capacity))
        self.classes.append(home)
        self.classes.sort(key=lambda c: c.capacity)
        return home

    def _buffers(self, slots: int, capacity: int) -> tuple[list[mx.array], list[mx.array]]:
        keys = [mx.zeros((slots, s.kv_heads, capacity, s.key_dim), _DTYPES[s.dtype]) for s in self.specs]
        values = [mx.zeros((slots, s.kv_heads, capacity, s.value_dim), _DTYPES[s.dtype]) for s in self.specs]
        return keys, values

    def _occupy(self, home: CapacityClass, length: int) -> SlotRow:
        if len(home.rows) == home.slots:
            keys, values = self._buffers(1 if self._tight else home.slots, home.capacity)
            home.keys = [mx.concatenate(pair) for pair in zip(home.keys, keys, strict=True)]
            home.values = [mx.concatenate(pair) for pair in zip(home.values, values, strict=True)]
        row = SlotRow(length, home, len(home.rows))
        if row.index < home.used:
            self._scrub(row)
        home.rows.append(row)
        home.used = max(home.used, len(home.rows))
        return row

    def _scrub(self, row: SlotRow) -> None:
        """Zero a slot that held another row, beyond what this one is about to write."""
        for buffers in (row.home.keys, row.home.values):
            for i, buffer in enumerate(buffers):
                buffer[row.index, :, row.length :] = 0
                buffers[i] = buffer

    def _copy(self, source: SlotRow, target: SlotRow) -> None:
        n = source.length
        if n == 0:
            return
        for old, new in ((source.home.keys, target.home.keys), (source.home.values, target.home.values)):
            for i, buffer in enumerate(new):
                buffer[target.index, :, :n] = old[i][source.index, :, :n]
                new[i] = buffer

    def _promote(self, row: SlotRow, tokens: int) -> None:
        """Move a row into the class that holds `tokens`, keeping its handle."""
        moved = self._occupy(self._class(self.geometry.capacity_for(tokens)), row.length)
        self._copy(row, moved)
        stale = SlotRow(row.length, row.home, row.index)
        row.home.rows[row.index] = stale
        self.retire(stale)
        row.home, row.index = moved.home, moved.index
        row.home.rows[row.index] = row


def _write(buffer: mx.array, span: Span, window: mx.array) -> mx.array:
    """Scatter this span's rows at their positions; free slots receive zeros, which a joiner overwrites."""
    mine = window[span.start : span.stop] if window.shape[0] != span.stop - span.start else window
    free = buffer.shape[0] - mine.shape[0]
    if free:
        mine = mx.concatenate([mine, mx.zeros((free, *mine.shape[1:]), mine.dtype)])
    return mx.put_along_axis(buffer, span.positions, mine, axis=2)
