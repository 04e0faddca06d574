"""Every kind of layer in the shared batch: what `state/families.py` says of each mlx-lm module, on a tiny random model of it.

A row next to others must give the ids, hidden rows, scores and state bytes that it gives alone, and alone it must give mlx-lm's ids.
Tier P runs one or two modules of each kind, tier N all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zoo
from mlx_lm.generate import generate_step
from rig import GREEDY, Recorder, Rig, differences, geometries

from mlxnb_engine.errors import ModelError
from mlxnb_engine.graph import ModelGraph
from mlxnb_engine.methods.turns import Turns
from mlxnb_engine.methods.window import GroupLimits
from mlxnb_engine.qualify import shared_if_exact
from mlxnb_engine.scheduler import Scheduler
from mlxnb_engine.state import families, recurrent, windowed
from mlxnb_engine.state.replay import WindowTransaction
from mlxnb_engine.state.slots import Slots
from mlxnb_engine.state.spec import Geometry

PUSHED = frozenset(
    "llama qwen2 phi3 gemma2 gemma3n gpt_oss plamo3 deepseek_v3 falcon_h1 lfm2 qwen3_next rwkv7 nemotron_h nanbeige nemotron-nas".split()
)
LENGTHS = (5, 37, 1, 70, 21)
TOKENS = 7
CHUNK = 16
NUMERIC = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Sparse attention over more keys than it selects: rows agree to 2e-6, not in bits (engine-facts 8.1)."""


def each(names: Sequence[str], pushed: frozenset[str] = PUSHED) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in pushed else pytest.mark.tier("N")) for n in names])


SHARED = sorted(n for n, f in families.FAMILIES.items() if f.mode != "lone")
LONE = sorted(n for n, f in families.FAMILIES.items() if f.mode == "lone")


@functools.lru_cache(maxsize=4)
def graph(name: str) -> ModelGraph:
    return ModelGraph(*zoo.build(name))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"zoo {length}/{seed}")
    return tuple(rng.randrange(96) for _ in range(length))


class ZooRig(Rig):
    """A rig whose rows leave their recurrent state too."""

    def state_of(self, row: Any) -> list[Any]:
        layers = self.group.slots.extract_recurrent(row.slot)  # type: ignore[attr-defined]
        extra = [(np.array([]) if a is None else np.array(a),) * 2 for layer in layers for a in layer]
        return [*super().state_of(row), *extra]


def alone(model: ModelGraph, geometry: Geometry, ids: tuple[int, ...]) -> Recorder:
    rig = ZooRig(model, geometry, chunk=CHUNK)
    row = rig.ask(ids, TOKENS)
    rig.run()
    assert row.end == "length", row.end
    return row


def found(model: ModelGraph, geometry: Geometry, orders: Sequence[Sequence[int]]) -> list[str]:
    """What differs from each row alone, over these batches of LENGTHS; later rows join late, earlier ones retire."""
    want = [alone(model, geometry, prompt(n)) for n in LENGTHS]
    out = []
    for order in orders:
        rig = ZooRig(model, geometry, chunk=CHUNK)
        rows = []
        for k, i in enumerate(order):
            rows.append((i, rig.ask(prompt(LENGTHS[i]), TOKENS)))
            if k % 2:
                rig.tick(2)
        rig.run()
        for i, row in rows:
            wrong = [f"end {row.end!r}"] if row.end != "length" else _differences(row, want[i])
            out += [f"row of {LENGTHS[i]} in {[LENGTHS[j] for j in order]}: {what}" for what in wrong]
    return out


def _differences(row: Recorder, want: Recorder) -> list[str]:
    if want.scores[0][1].hidden is not None:
        return differences(row, want)
    return [] if row.ids == want.ids and all(map(mx.array_equal, row.logits(), want.logits())) else ["scores"]


ORDERS = ((0, 1), (1, 2, 3), (0, 1, 2, 3, 4))


@pytest.mark.modes("none", "mkl-strict")
@each([n for n in SHARED if n not in NUMERIC and families.FAMILIES[n].padded])
def test_rows_of_a_ragged_batch_are_those_of_each_row_alone(name: str, blas_mode: str) -> None:
    model = graph(name)
    for geometry in geometries(model, blas_mode):
        assert not found(model, geometry, ORDERS)


@each([n for n in SHARED if not families.FAMILIES[n].padded])
def test_rows_that_take_no_padding_are_those_of_each_row_alone(name: str) -> None:
    """On the reference BLAS: strict MKL may need padded windows, which these modules would read as tokens."""
    assert not found(graph(name), Geometry(), ORDERS)


@each(sorted(NUMERIC))
def test_sparse_attention_agrees_to_rounding(name: str) -> None:
    model = graph(name)
    want = [alone(model, Geometry(), prompt(n)) for n in (9, 40)]
    rig = ZooRig(model, chunk=CHUNK)
    rows = [rig.ask(prompt(n), TOKENS) for n in (9, 40)]
    rig.run()
    for row, ref in zip(rows, want, strict=True):
        assert row.ids == ref.ids
        assert max(float(mx.abs(a - b).max()) for a, b in zip(row.logits(), ref.logits(), strict=True)) < 1e-4


@each([n for n in SHARED if n not in NUMERIC])
def test_a_row_gives_the_ids_of_mlx_lm(name: str) -> None:
    """Rings are replaced by full buffers with window masks: a ring's key order moves the last bits (engine-facts 8.3)."""
    model = graph(name)
    for n in (5, 37):
        row = alone(model, Geometry(), prompt(n))
        cache = zoo.flat_caches(model.model)
        steps = generate_step(mx.array(prompt(n)), model.model, max_tokens=TOKENS, prompt_cache=cache, prefill_step_size=CHUNK)
        assert row.ids == [int(token) for token, _ in steps]


@each(LONE, frozenset({"llama4", "recurrent_gemma"}))
def test_rows_of_a_lone_family_take_turns_and_give_the_ids_of_mlx_lm(name: str) -> None:
    model = graph(name)
    rig = TurnsRig(model)
    rows = [rig.ask(prompt(n), TOKENS) for n in (5, 37)]
    twins = rig.ask_many(prompt(12), TOKENS, [(GREEDY, 0)] * 2)
    rig.run()
    for row, n in zip([*rows, *twins], (5, 37, 12, 12), strict=True):
        steps = generate_step(mx.array(prompt(n)), model.model, max_tokens=TOKENS, prefill_step_size=CHUNK)
        assert row.end == "length" and row.ids == [int(token) for token, _ in steps]
    assert rig.most_active == 4, "rows that wait for each other's end do not take turns"


class TurnsRig(Rig):
    """A rig over `Turns`: nothing of a shared step to look at, only rows."""

    def __init__(self, model: ModelGraph) -> None:
        self.log, self.recorders, self.most_active = [], [], 0
        self.group = Turns(model, GroupLimits(CHUNK, "after"))  # type: ignore[assignment]
        self.scheduler = Scheduler(self.group, max_rows=8, prefill_chunk=CHUNK, max_kv_bytes=None)

    def tick(self, times: int = 1) -> bool:
        more = super().tick(times)
        self.most_active = max(self.most_active, self.group.active)
        return more

    def state_of(self, row: Any) -> list[Any]:
        return []


# -- rings (G23) ----------------------------------------------------------------------------------------------------------------

SLIDING = [n for n in zoo.sliding() if n in SHARED]


@each(SLIDING)
def test_rows_in_rings_have_the_bits_of_rows_in_full_buffers(name: str) -> None:
    """Prompts and answers many times as long as a ring: late joins, retirements, classes, and each row's own full buffer."""
    model = graph(name)
    lengths = (5, 200, 150)
    want = {n: alone(model, Geometry(), prompt(n)) for n in lengths}
    for order in (lengths, lengths[1:]):
        rig = ZooRig(model, chunk=CHUNK, ring=True)
        rows = [(n, rig.ask(prompt(n), TOKENS)) for n in order]
        rig.run()
        assert any(spec.window for spec in model.specs)
        for n, row in rows:
            assert row.end == "length" and row.ids == want[n].ids and row.hidden() == want[n].hidden()


@each([n for n in SLIDING if families.FAMILIES[n].windows])
def test_a_window_in_rings_keeps_any_prefix(name: str) -> None:
    model = graph(name)
    for rows in (1, 3):
        plan = _plan(random.Random(f"ring {name}{rows}"), rows, ragged=True)
        plan = plan[:1] * 12 + plan[1:]  # beyond the ring of 64
        got = _run(model, plan, range(rows), ring=32)
        for row in range(rows):
            flat = _run(model, _kept_only(plan), [row])[row]
            scores = sum(kept for step in plan for r, (_, kept) in step.items() if r == row)
            assert got[row][:scores] == flat[:scores], f"row {row} of {rows}"


def test_rings_take_less_memory_and_a_step_wider_than_they_take_is_refused() -> None:
    model = graph("gemma3")
    full, ring = (Slots(model.specs, Geometry(), ring=slack) for slack in (None, 16))
    for slots in (full, ring):
        slots.add(500)
    assert ring.nbytes < 0.7 * full.nbytes
    with pytest.raises(ModelError, match="wider than the 16"):
        ring.begin(17)


def test_a_ring_without_slack_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the padding of a wide step overwrites what its first query still sees."""
    model = graph("gemma3")
    want = alone(model, Geometry(), prompt(200))
    monkeypatch.setattr(windowed.Ring, "size", lambda self, window: window)
    rig = ZooRig(model, chunk=CHUNK, ring=True)
    row = rig.ask(prompt(200), TOKENS)
    rig.run()
    assert row.hidden() != want.hidden()


# -- windows of which a prefix is kept (G15, G54, I5) --------------------------------------------------------------------------


def _window(model: ModelGraph, slots: Slots, windows: dict[Any, list[int]], kept: dict[Any, int] | None) -> dict[Any, mx.array]:
    """One window step over every row; keeps a prefix of each if asked. Returns the scores at each row's kept positions."""
    width = max(map(len, windows.values()))
    slots.reserve(width)
    rows = slots.rows()
    slots.begin(width, [len(windows[row]) for row in rows])
    ids = mx.array([windows[row] + [77] * (width - len(windows[row])) for row in rows], mx.int32)
    transaction = WindowTransaction(slots, model.mixers)
    keep = [len(windows[row]) if kept is None else kept[row] for row in rows]
    positions = [b * width + i for b, k in enumerate(keep) for i in range(k)]
    scores = model.forward(ids, slots.caches, positions).logits
    slots.end()
    transaction.resolve(keep)
    mx.eval(scores, slots.arrays())
    ends = np.cumsum([0, *keep])
    return {row: scores[int(a) : int(b)] for row, a, b in zip(rows, ends, ends[1:], strict=False)}


def _slots(model: ModelGraph, ring: int | None = None) -> Slots:
    return Slots(model.specs, Geometry(), split=model.family.split, wide_masks=model.wide_masks, ring=ring)


Plan = list[dict[int, tuple[list[int], int]]]


def _run(model: ModelGraph, plan: Plan, rows: Sequence[int], ring: int | None = None) -> dict[int, list[bytes]]:
    """Feed each named row its windows of the plan (ids, kept). Scores at kept positions, then the state, as bytes."""
    slots = _slots(model, ring)
    handles = {row: slots.add(80) for row in rows}
    seen: dict[int, list[bytes]] = {row: [] for row in rows}
    for step in plan:
        windows = {handles[row]: step[row][0] for row in rows}
        scores = _window(model, slots, windows, {handles[row]: step[row][1] for row in rows})
        for row in rows:
            seen[row] += [np.array(one).tobytes() for one in scores[handles[row]]]
    for row in rows:
        parts = [part for pair in slots.extract(handles[row]) for part in pair]
        parts += [a for layer in slots.extract_recurrent(handles[row]) for a in layer if a is not None]
        seen[row] += [np.array(part).tobytes() for part in parts]
    return seen


def _plan(rng: random.Random, rows: int, ragged: bool) -> Plan:
    """A prompt, then verify windows with rejected tails, then single tokens."""

    def window(width: int) -> tuple[list[int], int]:
        return [rng.randrange(96) for _ in range(width)], rng.randint(1, width)

    prompts = {row: [rng.randrange(96) for _ in range(rng.choice((3, 11, 20)) if ragged else 11)] for row in range(rows)}
    plan = [{row: (ids, len(ids)) for row, ids in prompts.items()}]
    for _ in range(3):
        width = rng.choice((2, 4, 5))
        plan.append({row: window(rng.choice((1, 2, 5)) if ragged else width) for row in range(rows)})
        plan.append({row: window(1) for row in range(rows)})
    return plan


def _kept_only(plan: Plan) -> Plan:
    return [{row: (ids[:k], k) for row, (ids, k) in step.items()} for step in plan]


WINDOWED = [n for n in SHARED if families.FAMILIES[n].windows and n not in NUMERIC]


@each(WINDOWED)
def test_a_window_of_which_a_prefix_is_kept_is_a_window_of_that_prefix(name: str) -> None:
    """Ragged widths, junk beyond what is kept, B = 1, 2, 3 and 4: scores at kept positions and all state, against each row alone."""
    model = graph(name)
    for rows in (1, 2, 3, 4):
        plan = _plan(random.Random(f"{name}{rows}"), rows, ragged=True)
        got = _run(model, plan, range(rows))
        for row in range(rows):
            assert got[row] == _run(model, _kept_only(plan), [row])[row], f"row {row} of {rows}"


REPLAYED = "bailing_moe_v3 falcon_h1 granitemoehybrid kimi_k3 kimi_linear mamba2 nemotron_h plamo2".split()


@each(REPLAYED, frozenset({"falcon_h1", "nemotron_h"}))
def test_a_replayed_recurrent_state_is_that_of_a_window_of_the_kept_tokens(name: str) -> None:
    """Where the width of a window changes bits, windows of one arithmetic are compared: keep k of 5 against a window of k."""
    model = graph(name)
    first, then = prompt(11), prompt(5, 1)
    count = sum(len(spec.arrays) for spec in model.specs)
    for kept in (1, 2, 4) if model.family.fixed_chunks else (2, 4):
        full = _run(model, [{0: (list(first), 11)}, {0: (list(then), kept)}], [0])[0]
        only = _run(model, [{0: (list(first), 11)}, {0: (list(then[:kept]), kept)}], [0])[0]
        assert full[-count:] == only[-count:], f"keep {kept}"


@each(["lfm2"])
def test_a_rollback_that_keeps_the_advanced_state_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: only lengths are lowered."""
    model = graph(name)
    plan = _plan(random.Random(1), 2, ragged=True)
    want = _run(model, _kept_only(plan), [0])[0]
    monkeypatch.setattr(WindowTransaction, "_replay", lambda *_: None)
    assert _run(model, plan, range(2))[0] != want


@pytest.mark.parametrize("kept", [[0, 1], [1, 3], [1]])
def test_a_window_keeps_at_least_one_token_and_no_more_than_it_has(kept: list[int]) -> None:
    slots = _slots(graph("llama"))
    for _ in range(2):
        slots.add(10)
    slots.begin(2, [2, 2])
    with pytest.raises(ValueError, match="cannot keep"):
        WindowTransaction(slots, None).resolve(kept)
    assert [row.length for row in slots.rows()] == [0, 0]


# -- negative controls ---------------------------------------------------------------------------------------------------------


def test_padding_that_advances_a_recurrent_state_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent.RecurrentCache, "lengths", property(lambda self: None))
    assert found(ModelGraph(*zoo.build("qwen3_next")), Geometry(), [(0, 1, 2)]) or _shared_prefill_differs("qwen3_next")


def _shared_prefill_differs(name: str) -> bool:
    """Two short prompts of unequal length share one padded window."""
    model = ModelGraph(*zoo.build(name))
    want = [alone(model, Geometry(), prompt(n)) for n in (3, 7)]
    rig = ZooRig(model, chunk=CHUNK)
    rows = [rig.ask(prompt(n), TOKENS) for n in (3, 7)]
    rig.run()
    return any(_differences(row, ref) for row, ref in zip(rows, want, strict=True))


@pytest.mark.parametrize("name", ["lfm2", "gemma3", "llama"])
def test_short_prompts_of_unequal_length_share_a_window(name: str) -> None:
    assert not _shared_prefill_differs(name)


def test_a_family_declared_ragged_by_mistake_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "rwkv7", families.Family())
    assert _shared_prefill_differs("rwkv7")


def test_a_window_one_token_short_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelGraph(*zoo.build("gemma3"))
    model.specs = tuple(dataclasses.replace(s, window=s.window - 1) if s.window else s for s in model.specs)
    row = alone(model, Geometry(), prompt(37))
    steps = generate_step(mx.array(prompt(37)), model.model, max_tokens=TOKENS, prompt_cache=zoo.flat_caches(model.model))
    want = alone(ModelGraph(*zoo.build("gemma3")), Geometry(), prompt(37))
    assert row.ids != [int(token) for token, _ in steps] or differences(row, want)


# -- the table -----------------------------------------------------------------------------------------------------------------


def test_the_table_knows_every_module_and_at_least_110_share_a_batch() -> None:
    assert set(families.UNTRIED) == set(zoo.NOT_BUILT)
    known = set(families.FAMILIES) | set(families.REFUSED) | set(families.UNTRIED)
    assert known == set(zoo.modules())
    assert len(SHARED) >= 110


@pytest.mark.parametrize("name", sorted(families.REFUSED))
def test_a_refused_module_is_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = zoo.build(name)
    monkeypatch.setattr(type(model), "__call__", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(ModelError, match=name):
        ModelGraph(model, config)


@pytest.mark.parametrize(("name", "shares"), [("llama", True), ("lfm2", True), ("rwkv7", False), ("gpt_bigcode", False)])
def test_an_unknown_module_shares_a_batch_only_if_it_passes_the_parity_check(name: str, shares: bool) -> None:
    assert (shared_if_exact(*zoo.build(name)) is not None) == shares


def test_an_unknown_module_is_alone_and_an_unknown_kind_of_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = zoo.build("llama")
    monkeypatch.delitem(families.FAMILIES, "llama")
    assert ModelGraph(model, config).family is families.UNKNOWN
    with pytest.raises(ModelError, match="unknown_state_signature"):
        families.admit("novel", ["KVCache", "HolographicCache"], {})


def test_the_page_of_models_is_the_table() -> None:
    root = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location("model_table", root / "scripts" / "model_table.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PLACE.read_text("utf-8") == script.page(), "run: python scripts/model_table.py"
