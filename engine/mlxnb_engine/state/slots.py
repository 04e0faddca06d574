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

from ..cuda import attention
from ..errors import ModelError
from ..types import StateSpec
from ..zoo import CacheList
from .layer import ClassesView, LayerCache
from .recurrent import RecurrentLayers
from .spec import MLX_DTYPES, Geometry
from .step import Span, Step, in_batch_order, landing
from .windowed import Ring


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
    slots: int
    keys: list[mx.array]
    values: list[mx.array]
    rows: list[SlotRow] = field(default_factory=list)
    used: int = 0

    def drop(self) -> None:
        """Let go of every buffer now: rows and their class refer to each other, so reference counts alone never would."""
        self.keys.clear()
        self.values.clear()
        self.rows.clear()


class Slots:
    """State of the rows of one group, all layers.

    split: rows of different capacity live in classes of their own; otherwise all share one class, which grows with the longest
    (for models that bypass the attention dispatch). wide_masks: see `Step`. ring: sliding layers keep a ring for steps up to this
    width (`windowed.py`) instead of all tokens. replaceable: the state is K/V buffers and nothing else.
    Owner: engine thread. Invariant: `rows()` is the batch order; a row's length never exceeds its class's capacity.
    Lifetime: with its group; `clear()` drops every buffer.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        geometry: Geometry,
        tight: bool = False,
        *,
        split: bool = True,
        wide_masks: bool = False,
        ring: int | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.geometry = geometry
        self._tight = tight  # classes hold no free slot: they grow and shrink by one, at the cost of a copy
        self._split, self._wide_masks = split, wide_masks
        self._ring = Ring(ring) if ring is not None else None
        self.classes: list[CapacityClass] = []
        self.step: Step | None = None
        self.attention = tuple(spec for spec in self.specs if spec.kind in ("full", "sliding"))
        plain = split and self._ring is None and all(attention.serves(s.key_dim, s.value_dim, s.dtype) for s in self.attention)
        self._fused = geometry.fused and plain
        self.replaceable = split and self._ring is None and len(self.attention) == len(self.specs)
        self.recurrent = RecurrentLayers([spec for spec in self.specs if spec.kind == "recurrent"])
        self.caches = self._bind()

    def _bind(self) -> list[Any]:
        """One cache per object of `make_prompt_cache(model)`, nested as there."""
        attention, recurrent = iter(range(len(self.attention))), iter(self.recurrent.caches)
        flat: list[Any] = []
        for spec in self.specs:
            if spec.kind == "recurrent":
                flat.append(next(recurrent))
            else:
                flat.append(LayerCache(self, -1 if spec.kind == "unused" else next(attention), spec.window))
        self._layer_caches = [cache for cache in flat if isinstance(cache, LayerCache)]
        nested: dict[int, list[Any]] = {}
        for i, (spec, cache) in enumerate(zip(self.specs, flat, strict=True)):
            nested.setdefault(spec.place[0] if spec.place else i, []).append((len(spec.place) > 1, cache))
        return [CacheList(*(c for _, c in group)) if group[0][0] else group[0][1] for group in nested.values()]

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
        return sum(_token_bytes(spec) for spec in self.attention)

    def _slot_bytes(self, capacity: int) -> int:
        """Bytes of one slot of a class, all layers."""
        return sum(self._places(spec, capacity) * _token_bytes(spec) for spec in self.attention)

    def _places(self, spec: StateSpec, capacity: int) -> int:
        """Positions that a layer's buffer has in a class: its ring's, where that is smaller."""
        if self._ring is None or spec.window is None or not self._ring.holds(spec.window, capacity):
            return capacity
        return self._ring.size(spec.window)

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a row takes whatever its length: its recurrent state."""
        return self.recurrent.bytes_per_row

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, free slots included, and of the recurrent state of the rows."""
        held = sum(self._slot_bytes(home.capacity) * home.slots for home in self.classes)
        return held + len(self.rows()) * self.recurrent.bytes_per_row

    def bytes_for(self, tokens: Sequence[int]) -> int:
        """Bytes of a state that holds rows of these lengths and no other."""
        capacities = [self.geometry.capacity_for(max(n, 1)) for n in tokens]
        if capacities and not self._split:
            capacities = [max(capacities)] * len(capacities)
        return sum(map(self._slot_bytes, capacities)) + len(capacities) * self.recurrent.bytes_per_row

    def growth(self, tokens: Sequence[int]) -> int:
        """Bytes that rows of these lengths would add, if classes hold no free slot."""
        if self._split or not self.classes:
            return self.bytes_for(tokens)
        home, rows = self.classes[0], len(self.classes[0].rows)
        widest = max([home.capacity, *(self.geometry.capacity_for(max(n, 1)) for n in tokens)])
        added = (rows + len(tokens)) * self._slot_bytes(widest) - home.slots * self._slot_bytes(home.capacity)
        return added + len(tokens) * self.recurrent.bytes_per_row

    def add(self, tokens: int) -> SlotRow:
        """A new empty row in the smallest class that holds `tokens`."""
        home = self._class(self.geometry.capacity_for(max(tokens, 1)))
        return self._occupy(home, 0)

    def retire(self, row: SlotRow) -> None:
        """Free the row's slot; the last row of its class moves into the hole."""
        if row.home.rows[row.index] is not row:
            raise RuntimeError("a row was retired twice")
        self.recurrent.forget(row)
        self._vacate(row)

    def _vacate(self, row: SlotRow) -> None:
        home, hole, last = row.home, row.index, len(row.home.rows) - 1
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
        home.slots = last if self._tight else home.slots
        home.used = min(home.used, home.slots)
        if moved is not row:
            home.rows[hole] = moved
            moved.index = hole

    def join(self, other: Slots, row: SlotRow, tokens: int) -> SlotRow:
        """Copy a row of another group's slots into this one, in a class that holds `tokens`; the donor is untouched."""
        home = self._class(self.geometry.capacity_for(max(tokens, row.length, 1)))
        new = self._occupy(home, row.length)
        self._copy(row, new)
        self.recurrent.write(new, other.recurrent.read(row))
        return new

    def extract(self, row: SlotRow) -> list[tuple[mx.array, mx.array]]:
        """Contiguous, evaluated copies of the row's K/V per attention layer, `[1, kv_heads, length, dim]`; of a ring what it holds."""
        out = []
        for spec, k, v in zip(self.attention, row.home.keys, row.home.values, strict=True):
            held = mx.arange(max(0, row.length - k.shape[2]), row.length) % k.shape[2] if spec.window else slice(row.length)
            out.append(tuple(mx.contiguous(buffer[row.index : row.index + 1, :, held]) for buffer in (k, v)))
        mx.eval(out)
        return out

    def extract_recurrent(self, row: SlotRow) -> list[list[mx.array | None]]:
        """Contiguous, evaluated copies of the row's recurrent state per layer; valid exactly at the row's length."""
        out = [[None if a is None else mx.contiguous(a) for a in layer] for layer in self.recurrent.read(row)]
        mx.eval([a for layer in out for a in layer if a is not None])
        return out

    def arrays(self) -> list[mx.array]:
        """Every state array, for explicit submission with a step."""
        held = [array for home in self.classes for array in (*home.keys, *home.values)]
        return held + self.recurrent.arrays()

    def replace_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Take these for `arrays()`, what a compiled step made of the state; only where `replaceable`."""
        left = iter(arrays)
        for home in self.classes:
            home.keys, home.values = [next(left) for _ in home.keys], [next(left) for _ in home.values]

    def clear(self) -> None:
        """Drop every row and buffer."""
        for home in self.classes:
            home.drop()
        self.classes.clear()
        self.recurrent.clear()
        self.step = None
        self.end()

    def end(self) -> None:
        """The step's graph is built: no view of a buffer may outlive it."""
        for cache in self._layer_caches:
            cache.forget_view()

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

    def begin(self, width: int, real: Sequence[int] | None = None) -> Step:
        """Capture offsets and shapes for one step in which every row has a window of `width` positions.

        real: how many of them are each row's own, in batch order (all, if left out); the rest is padding.
        Raises ModelError before any device write if a row lacks capacity (call `reserve` first).
        """
        spans, start = [], 0
        rows = self.rows()
        lengths = [row.length for row in rows]
        for home in self.classes:
            mine = [row.length for row in home.rows]
            if max(mine) + width > home.capacity:
                raise ModelError(f"A step of {width} would write beyond capacity {home.capacity}.")
            free = [0] * (home.slots - len(mine))
            base = mx.array(mine + free, mx.int32)
            extent = self.geometry.extent_for(mine, width, home.capacity)
            spans.append(Span(home, start, start + len(mine), extent, base, landing(base, width), min(mine)))
            start += len(mine)
        lone, bucketed = len(lengths) == 1, self.geometry.bucketed
        offset: int | mx.array = lengths[0] if lone else mx.array(lengths, mx.int32)
        if self.geometry.compiled:
            offset = in_batch_order(spans)
        flags = {"exact": lone and not bucketed, "bucketed": bucketed, "wide_masks": self._wide_masks}
        step = Step(tuple(spans), width, offset, **flags, fused=self._fused and width <= attention.MAX_WIDTH)
        step.fill(real or [width] * len(rows))
        self.recurrent.align(rows)
        self.step = self.recurrent.step = step
        if self._ring is not None:
            if width > self._ring.slack:
                raise ModelError(f"A step of {width} is wider than the {self._ring.slack} that the rings of sliding layers take.")
            self._ring.begin(step)
        return step

    def mask(
        self, span: Span, window: int | None, layer_window: int | None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask of one class's part of the step, for a layer of `layer_window` (see `Step.mask`)."""
        if self._ring is not None and self._ring.holds(layer_window, span.home.capacity):
            assert window is not None and layer_window is not None
            return self._ring.mask(span, window, layer_window, self._wide_masks)
        return self.current.mask(span, window, layer_window, return_array)

    def append(self, layer: int, keys: mx.array, values: mx.array, window: int | None) -> tuple[Any, Any]:
        """Scatter a window's K/V `[B, kv_heads, L, dim]` at each row's length; returns what the layer attends."""
        step = self.current
        parts = []
        for span in step.spans:
            home = span.home
            ring = self._ring if self._ring is not None and self._ring.holds(window, home.capacity) else None
            places = span.positions if ring is None or window is None else ring.slots_of(span, window)
            home.keys[layer] = _write(home.keys[layer], span, places, keys)
            home.values[layer] = _write(home.values[layer], span, places, values)
            both = (home.keys[layer], home.values[layer])
            if ring is not None and window is not None:
                parts.append((ring.read(both[0], span, window), ring.read(both[1], span, window)))
                continue
            if step.fused:
                parts.append(both)
                continue
            count, low = span.stop - span.start, step.reads(span, window)
            parts.append((both[0][:count, :, low : span.extent], both[1][:count, :, low : span.extent]))
        if not step.by_span:
            return parts[0]
        view = ClassesView(self, step, parts, window)
        return view, view

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _class(self, capacity: int) -> CapacityClass:
        for home in self.classes:
            if home.capacity == capacity or not self._split:
                if home.capacity < capacity:
                    self._stretch(home, capacity)
                return home
        home = CapacityClass(capacity, 1, *self._buffers(1, capacity))
        self.classes.append(home)
        self.classes.sort(key=lambda c: c.capacity)
        return home

    def _stretch(self, home: CapacityClass, capacity: int) -> None:
        """Give every slot of a class more room. A ring keeps its size: until it was needed, positions and slots were the same."""
        for i, spec in enumerate(self.attention):
            more = self._places(spec, capacity) - home.keys[i].shape[2]
            if more:
                room = (home.slots, spec.kv_heads, more)
                home.keys[i] = mx.concatenate([home.keys[i], mx.zeros((*room, spec.key_dim), home.keys[i].dtype)], axis=2)
                home.values[i] = mx.concatenate([home.values[i], mx.zeros((*room, spec.value_dim), home.values[i].dtype)], axis=2)
        home.capacity = capacity

    def _buffers(self, slots: int, capacity: int) -> tuple[list[mx.array], list[mx.array]]:
        def zeros(spec: StateSpec, dim: int) -> mx.array:
            return mx.zeros((slots, spec.kv_heads, self._places(spec, capacity), dim), MLX_DTYPES[spec.dtype])

        return [zeros(spec, spec.key_dim) for spec in self.attention], [zeros(spec, spec.value_dim) for spec in self.attention]

    def _occupy(self, home: CapacityClass, length: int) -> SlotRow:
        if len(home.rows) == home.slots:
            more = 1 if self._tight else home.slots
            keys, values = self._buffers(more, home.capacity)
            home.slots += more
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
                held = min(n, buffer.shape[2], old[i].shape[2])  # a ring is copied as it lies: both have one size
                buffer[target.index, :, :held] = old[i][source.index, :, :held]
                new[i] = buffer

    def _promote(self, row: SlotRow, tokens: int) -> None:
        """Move a row into the class that holds `tokens`, keeping its handle (and with it its recurrent state)."""
        home = self._class(self.geometry.capacity_for(tokens))
        if home is row.home:
            return  # the only class, and it has grown
        moved = self._occupy(home, row.length)
        self._copy(row, moved)
        stale = SlotRow(row.length, row.home, row.index)
        row.home.rows[row.index] = stale
        self._vacate(stale)
        row.home, row.index = moved.home, moved.index
        row.home.rows[row.index] = row


def _token_bytes(spec: StateSpec) -> int:
    size: int = MLX_DTYPES[spec.dtype].size
    return spec.kv_heads * (spec.key_dim + spec.value_dim) * size


def _write(buffer: mx.array, span: Span, places: mx.array, window: mx.array) -> mx.array:
    """Scatter this span's rows at their places; free slots receive zeros, which a joiner overwrites."""
    mine = window[span.start : span.stop] if window.shape[0] != span.stop - span.start else window
    free = buffer.shape[0] - mine.shape[0]
    if free:
        mine = mx.concatenate([mine, mx.zeros((free, *mine.shape[1:]), mine.dtype)])
    return mx.put_along_axis(buffer, places, mine, axis=2)
