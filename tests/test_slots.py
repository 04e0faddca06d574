"""Slotted state: bytes through join, move, growth and retirement, offsets, bounds, garbage, memory (G14, G16-G19, P1-P6, P14, P77)."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from rig import Rig, assert_same, differences, graph_of, prompt, solo

from mlxnb_engine.errors import ModelError
from mlxnb_engine.rotary import SharedAngles
from mlxnb_engine.state import slots as slots_module
from mlxnb_engine.state.layer import LayerCache
from mlxnb_engine.state.slots import SlotRow, Slots
from mlxnb_engine.state.spec import Geometry
from mlxnb_engine.types import StateSpec

SPECS = (StateSpec("full", 2, 8, 4, "float32"), StateSpec("full", 1, 16, 16, "float16"))
PLAIN = Geometry()


class Ledger:
    """What each row must hold, kept in NumPy beside the slots: per layer K and V `[kv_heads, length, dim]`."""

    def __init__(self, slots: Slots, seed: int = 0) -> None:
        self.slots, self.random = slots, np.random.default_rng(seed)
        self.held: dict[SlotRow, list[list[np.ndarray]]] = {}

    def add(self, tokens: int) -> SlotRow:
        row = self.slots.add(tokens)
        self.held[row] = [[np.zeros((s.kv_heads, 0, d), s.dtype) for d in (s.key_dim, s.value_dim)] for s in self.slots.specs]
        return row

    def step(self, width: int, kept: Callable[[SlotRow], int] | None = None) -> list[Any]:
        """Append a window of `width` to every row; each keeps all of it, or `kept(row)`. Returns what each layer attends."""
        rows, views = self.slots.rows(), []
        self.slots.begin(width)
        for layer, spec in enumerate(self.slots.specs):
            window = [
                self.random.normal(size=(len(rows), spec.kv_heads, width, d)).astype(spec.dtype) for d in (spec.key_dim, spec.value_dim)
            ]
            views.append(self.slots.caches[layer].update_and_fetch(mx.array(window[0]), mx.array(window[1])))
            for i, row in enumerate(rows):
                n = width if kept is None else kept(row)
                self.held[row][layer] = [np.concatenate([a, w[i, :, :n]], 1) for a, w in zip(self.held[row][layer], window, strict=True)]
        for row in rows:
            row.length += width if kept is None else kept(row)
        return views

    def wrong(self) -> list[str]:
        """Rows whose bytes are not what they must be."""
        out = []
        for row in self.slots.rows():
            for layer, (got, want) in enumerate(zip(self.slots.extract(row), self.held[row], strict=True)):
                out += [f"layer {layer} of {row.length}" for a, b in zip(got, want, strict=True) if np.array(a[0]).tobytes() != b.tobytes()]
        return out


def _shuffle(seed: int, tight: bool) -> list[str]:
    """A random life of a group: rows come, are joined from elsewhere, grow, keep a part of a window, move and leave."""
    rng = random.Random(seed)
    ledger = Ledger(Slots(SPECS, Geometry(first_rung=8), tight), seed)
    slots = ledger.slots
    for _ in range(60):
        action = rng.random()
        rows = slots.rows()
        if action < 0.2 and len(rows) < 6:
            ledger.add(rng.randrange(1, 20))
        elif action < 0.35 and len(rows) < 6:
            other = Ledger(Slots(SPECS, PLAIN), rng.randrange(10**6))
            row = other.add(1)
            other.step(rng.randrange(1, 30))
            ledger.held[slots.join(other.slots, row, rng.choice((1, 40)))] = other.held[row]
            assert not other.wrong(), "the donor changed"
        elif action < 0.5 and rows:
            row = rng.choice(rows)
            slots.retire(row)
            del ledger.held[row]
        elif rows:
            width = rng.choice((1, 1, 1, 5))
            slots.reserve(width)
            kept = {id(row): rng.randrange(width + 1) for row in rows}
            ledger.step(width, None if rng.random() < 0.7 else lambda row, kept=kept: kept[id(row)])
        slots.check()
        if found := ledger.wrong():
            return found
    return []


@pytest.mark.parametrize("tight", [False, True])
def test_bytes_survive_joins_growth_moves_partial_keeps_and_retirements(tight: bool, scale: int) -> None:
    for seed in range(8 * scale):
        assert _shuffle(seed, tight) == [], f"seed {seed}"


def test_a_slot_index_remembered_across_compaction_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of P6: the moved row keeps the index it had."""
    retire = Slots.retire

    def forgetful(self: Slots, row: SlotRow) -> None:
        before = {other: other.index for other in self.rows()}
        retire(self, row)
        for other in self.rows():
            other.index = before[other]

    monkeypatch.setattr(Slots, "retire", forgetful)
    monkeypatch.setattr(Slots, "check", lambda self: None)
    assert any(_shuffle(seed, False) for seed in range(8))


def test_check_names_a_row_that_is_not_where_it_says() -> None:
    ledger = Ledger(Slots(SPECS, PLAIN))
    first, _ = ledger.add(5), ledger.add(5)
    ledger.slots.check()
    first.index = 1
    with pytest.raises(RuntimeError, match="does not match"):
        ledger.slots.check()
    with pytest.raises(RuntimeError, match="twice"):
        ledger.slots.retire(SlotRow(0, first.home, 0))


# -- bounds (G16, P3) ------------------------------------------------------------------------------------------------------


def test_a_step_beyond_capacity_raises_before_anything_is_written() -> None:
    ledger = Ledger(Slots(SPECS, PLAIN))
    ledger.add(64)
    ledger.add(70)
    ledger.step(63)
    before = list(ledger.slots.arrays())
    with pytest.raises(ModelError, match="beyond capacity 64"):
        ledger.step(2)
    assert all(a is b for a, b in zip(before, ledger.slots.arrays(), strict=True))
    assert not ledger.wrong()
    ledger.step(1)
    assert not ledger.wrong()


def _bounds_checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every scatter compares its positions with its buffer; one out of range is recorded and not executed."""
    write, found = slots_module._write, []

    def checked(buffer: mx.array, span: Any, places: mx.array, window: mx.array) -> mx.array:
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= buffer.shape[2]:
            found.append(f"positions {low}..{high} of {buffer.shape[2]}")
            return buffer
        return write(buffer, span, places, window)

    monkeypatch.setattr(slots_module, "_write", checked)
    return found


def test_no_scatter_of_a_busy_group_leaves_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _bounds_checked(monkeypatch)
    for geometry in (PLAIN, Geometry(4, True, 64)):
        rig = Rig(graph_of(), geometry)
        for n in (3, 60, 61, 62, 63, 64, 127, 128):
            rig.ask(prompt(n), 8)
            rig.tick(1)
        rig.run()
        assert all(row.end == "length" for row in rig.recorders)
    assert not found


def test_a_group_that_forgets_to_grow_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of P3: nobody reserves and nobody refuses."""
    found = _bounds_checked(monkeypatch)
    monkeypatch.setattr(Slots, "reserve", lambda self, width: None)
    begin = Slots.begin

    def careless(self: Slots, width: int, real: Any = None) -> Any:
        capacities = [home.capacity for home in self.classes]
        for home in self.classes:
            home.capacity += 1000
        step = begin(self, width, real)
        for home, capacity in zip(self.classes, capacities, strict=True):
            home.capacity = capacity
        return step

    monkeypatch.setattr(Slots, "begin", careless)
    rig = Rig(graph_of())
    rig.ask(prompt(62), 8)
    for _ in range(5):
        rig.scheduler.tick()
    assert set(found) == {"positions 64..64 of 64"}


# -- offsets and captured views (G18, G19, P5) --------------------------------------------------------------------------------


def test_q_and_k_of_all_layers_read_one_captured_offset_that_never_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[int, list[Any]] = {}
    original = LayerCache.offset.fget  # type: ignore[attr-defined]

    def offset(self: LayerCache) -> Any:
        value = original(self)
        if self._slots.step is not None and not isinstance(value, int):
            read.setdefault(id(self._slots.step), [self._slots.step, mx.array(value)]).append(value)
        return value

    monkeypatch.setattr(LayerCache, "offset", property(offset))
    rig = Rig(graph_of())
    for n in (5, 70, 9):
        rig.ask(prompt(n), 6)
    rig.run()
    assert len(read) >= 6
    for step, copy, *seen in read.values():
        assert len(seen) >= 4 and all(value is step.offset for value in seen), "Q and K of two layers"
        assert mx.array_equal(copy, step.offset), "an offset moved after it was captured"


def test_an_offset_advanced_in_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of P5. The angles that layers share would hide it: each layer makes its own here."""
    monkeypatch.setattr(SharedAngles, "_rotate", lambda self, module, base, x, offset: base.__call__(module, x, offset=offset))
    want = [solo(graph_of(), PLAIN, prompt(n), 6) for n in (5, 20)]
    append = Slots.append

    def moving(self: Slots, *args: Any) -> Any:
        out = append(self, *args)
        step = self.current
        if not isinstance(step.offset, int):
            step.offset += step.width
        return out

    monkeypatch.setattr(Slots, "append", moving)
    rig = Rig(graph_of())
    rows = [rig.ask(prompt(n), 6) for n in (5, 20)]
    rig.run()
    assert all(differences(row, ref) for row, ref in zip(rows, want, strict=True))


def test_a_view_captured_before_later_writes_attends_what_it_captured() -> None:
    ledger = Ledger(Slots((StateSpec("full", 2, 8, 8, "float32"),), PLAIN))
    ledger.add(10)
    ledger.add(70)
    ledger.step(3)
    queries = mx.random.normal((2, 2, 1, 8), key=mx.random.key(0))
    [(view, _)] = ledger.step(1)
    held = [[np.array(part) for part in ledger.held[row][0]] for row in ledger.slots.rows()]
    for _ in range(3):
        ledger.step(1)
    ledger.slots.retire(ledger.slots.rows()[0])
    out = np.array(view.attend(queries, 0.5))
    for i, (keys, values) in enumerate(held):
        scores = 0.5 * np.array(queries)[i] @ keys.swapaxes(1, 2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = weights / weights.sum(-1, keepdims=True) @ values
        assert np.abs(out[i] - want).max() < 1e-5


# -- garbage (G17) -------------------------------------------------------------------------------------------------------------


def _fill_beyond_lengths(slots: Slots, value: float) -> None:
    for home in slots.classes:
        lengths = mx.array([row.length for row in home.rows] + [0] * (home.slots - len(home.rows)))
        beyond = mx.arange(home.capacity)[None, None, :, None] >= lengths[:, None, None, None]
        for buffers in (home.keys, home.values):
            buffers[:] = [mx.where(beyond, value, buffer) for buffer in buffers]


@pytest.mark.parametrize("value", [3e30, -3e30])
@pytest.mark.parametrize("bucketed", [False, True])
def test_large_finite_garbage_beyond_every_length_changes_nothing(value: float, bucketed: bool) -> None:
    geometry, filled = Geometry(bucketed=bucketed), 0
    rig = Rig(graph_of(), geometry)
    rows = [rig.ask(prompt(n), t) for n, t in ((5, 20), (60, 14), (80, 9), (33, 17))]
    while rig.tick():
        _fill_beyond_lengths(rig.group.slots, value)
        filled += bool(rig.group.slots.classes)
        if rig.group.preparation is not None:
            _fill_beyond_lengths(rig.group.preparation.slots, value)
    assert filled > 15
    for row, (n, t) in zip(rows, ((5, 20), (60, 14), (80, 9), (33, 17)), strict=True):
        assert_same(row, solo(graph_of(), geometry, prompt(n), t))


# -- memory (P1, P2, P77) -----------------------------------------------------------------------------------------


def test_one_long_row_does_not_inflate_its_short_neighbours() -> None:
    def bytes_of(*tokens: int) -> int:
        slots = Slots(SPECS, PLAIN)
        for n in tokens:
            slots.add(n)
        held = sum(array.nbytes for array in slots.arrays())
        assert held == slots.nbytes
        return held

    assert bytes_of(4000, *[200] * 7) < 1.3 * (bytes_of(4000) + bytes_of(*[200] * 7))


def test_an_extracted_row_pins_nothing_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept_alive() -> tuple[int, int]:
        gc.collect()
        before = mx.get_active_memory()
        ledger = Ledger(Slots(SPECS, Geometry(first_rung=1024)))
        rows = [ledger.add(1) for _ in range(4)]
        ledger.step(64)
        out = ledger.slots.extract(rows[1])
        own = sum(part.nbytes for pair in out for part in pair)
        del rows
        ledger.slots.clear()
        del ledger
        gc.collect()
        return mx.get_active_memory() - before, own

    held, own = kept_alive()
    assert held <= own + 4096 * 4, f"{held} bytes live for {own}"

    def as_slice(self: Slots, row: SlotRow) -> list[tuple[mx.array, mx.array]]:
        at = row.index
        out = [
            (k[at : at + 1, :, : row.length], v[at : at + 1, :, : row.length]) for k, v in zip(row.home.keys, row.home.values, strict=True)
        ]
        mx.eval(out)
        return out

    monkeypatch.setattr(Slots, "extract", as_slice)  # negative control of P2
    held, own = kept_alive()
    assert held > 8 * own


def _largest_step(submit: str, hold_a_slice: bool = False) -> tuple[int, int]:
    """(bytes that the hungriest of some decode steps allocated at once, bytes of one K buffer of one layer)."""
    rig = Rig(graph_of(), Geometry(first_rung=8192), submit)
    for n in (5, 9):
        rig.ask(prompt(n), 40)
    rig.tick(6)
    assert rig.group.active == 2
    taken, held = [], []
    for _ in range(8):
        if hold_a_slice:
            held = [buffer[:1, :, :4] for buffer in rig.group.slots.arrays()]
            mx.eval(held)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        rig.tick()
        mx.synchronize()
        taken.append(mx.get_peak_memory() - before)
    assert len(rig.watched.steps) > 8
    return max(taken), rig.group.slots.classes[0].keys[0].nbytes


def test_a_decode_step_allocates_no_copy_of_a_buffer() -> None:
    taken, buffer = _largest_step("after")
    assert taken < buffer / 2, f"{taken} bytes for a step over buffers of {buffer}"


def test_a_live_slice_that_turns_appends_into_copies_would_be_noticed() -> None:
    """Negative control of P1."""
    taken, buffer = _largest_step("after", hold_a_slice=True)
    assert taken > 0.9 * buffer
