"""Rows of a batch against the same rows alone and against mlx-lm itself: ids, hidden rows, state, bit for bit (G13, G14, G26, G30)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from rig import G26, GREEDY, Recorder, Rig, assert_same, differences, geometries, graph_of, mlx_lm_run, prompt, solo
from tiny import FAMILIES

from mlxnb_engine.state.slots import Slots, Step
from mlxnb_engine.state.spec import Geometry
from mlxnb_engine.types import HlgSpec, SamplingSpec

both_modes = pytest.mark.modes("none", "mkl-strict")
LENGTHS = (1, 5, 63, 64, 65, 130, 190, 700)
"""Around the edges of the smallest capacity classes, of prefill windows and of one another."""


def tokens_for(i: int) -> int:
    """Different for each row, so that rows retire one by one, from the middle of the batch too."""
    return (9, 14, 6, 11, 17, 8, 12, 7)[i]


@both_modes
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_batch_equal_the_same_rows_alone_and_mlx_lm(family: str, blas_mode: str) -> None:
    graph = graph_of(family)
    for geometry in geometries(graph, blas_mode):
        for count in (1, 2, 4, 8):
            picked = range(8) if count == 8 else random.Random(f"{family}{count}").sample(range(8), count)
            rig = Rig(graph, geometry, "before" if count == 4 else "after")
            rows = {}
            for delay, i in enumerate(picked):
                rows[i] = rig.ask(prompt(LENGTHS[i]), tokens_for(i))
                rig.tick(delay)
            rig.run()
            for i, row in rows.items():
                assert_same(row, solo(graph, geometry, prompt(LENGTHS[i]), tokens_for(i)))


@both_modes
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_gives_the_tokens_of_mlx_lm(family: str, blas_mode: str) -> None:
    graph = graph_of(family)
    for geometry in geometries(graph, blas_mode):
        for i, length in enumerate(LENGTHS):
            ours, theirs = solo(graph, geometry, prompt(length), tokens_for(i)), mlx_lm_run(graph, prompt(length), tokens_for(i))
            assert ours.ids == theirs.ids, f"{family} at {length}: {ours.ids} != {theirs.ids}"
            assert ours.consumed == [*prompt(length), *ours.ids[:-1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_has_the_scores_and_state_bytes_of_mlx_lm(family: str) -> None:
    graph = graph_of(family)
    for geometry in (Geometry(), Geometry(bucketed=True)):
        for i, length in enumerate(LENGTHS):
            ours, theirs = solo(graph, geometry, prompt(length), tokens_for(i)), mlx_lm_run(graph, prompt(length), tokens_for(i))
            normalised = [np.array(x - mx.logsumexp(x, keepdims=True)).tobytes() for x in ours.logits()]
            assert normalised == theirs.logprobs, f"scores at {length}"
            assert [(k.tobytes(), v.tobytes()) for k, v in ours.state] == theirs.state, f"state at {length}"


@both_modes
def test_rows_that_outgrow_their_class_during_decoding_keep_their_bytes(blas_mode: str) -> None:
    graph = graph_of()
    for geometry in geometries(graph, blas_mode):
        rung = geometry.first_rung
        lengths = (rung - 7, rung - 5, 2 * rung - 6, 9)
        rig = Rig(graph, geometry)
        rows = [rig.ask(prompt(n), 12) for n in lengths]
        crossed, several = set(), 0
        while rig.tick():
            several += len(rig.group.slots.classes) > 1 and rig.group.active > 1
            crossed |= {(i, rig.row(r).slot.home.capacity) for i, r in enumerate(rows) if r.scores and not r.ends}
        for i in range(3):
            assert len({c for j, c in crossed if j == i}) == 2, f"row {i} never changed its class: {sorted(crossed)}"
        assert several > 3, "no step spanned several classes"
        for row, n in zip(rows, lengths, strict=True):
            assert_same(row, solo(graph, geometry, prompt(n), 12))


@both_modes
def test_a_retirement_in_the_middle_moves_the_last_row_and_changes_none(blas_mode: str) -> None:
    graph = graph_of()
    for geometry in geometries(graph, blas_mode):
        rig = Rig(graph, geometry)
        lengths = (20, 21, 22, 23)
        tokens = (4, 20, 7, 20)
        rows = [rig.ask(prompt(n), t) for n, t in zip(lengths, tokens, strict=True)]
        places: dict[int, set[int]] = {i: set() for i in range(4)}
        while rig.tick():
            for i, row in enumerate(rows):
                if row.scores and not row.ends:
                    places[i].add(rig.row(row).slot.index)
        assert len(places[3]) > 1, f"no row was moved: {places}"
        for row, n, t in zip(rows, lengths, tokens, strict=True):
            assert_same(row, solo(graph, geometry, prompt(n), t))


def test_a_batch_order_remembered_across_a_retirement_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of P6: rows in the order in which they came, as if slots never moved."""
    graph, seen = graph_of(), []

    def in_order_of_arrival(self: Slots) -> list:
        rows = [row for home in self.classes for row in home.rows]
        seen.extend(row for row in rows if row not in seen)
        return [row for row in seen if row in rows]

    want = [solo(graph, Geometry(), prompt(n), t) for n, t in ((20, 4), (21, 20), (22, 20))]
    monkeypatch.setattr(Slots, "rows", in_order_of_arrival)
    rig = Rig(graph)
    rows = [rig.ask(prompt(n), t) for n, t in ((20, 4), (21, 20), (22, 20))]
    rig.run()
    assert not differences(rows[0], want[0])
    assert any(differences(row, ref) for row, ref in zip(rows[1:], want[1:], strict=True))


def test_a_mask_of_the_longest_row_for_all_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of P14: every row sees as far as its longest neighbour."""
    want = [solo(graph_of(), Geometry(), prompt(n), 5) for n in (20, 40)]
    mask = Step.mask

    def widest(self: Step, *args: Any) -> object:
        seen = mask(self, *args)
        return mx.broadcast_to(seen.any(axis=0, keepdims=True), seen.shape) if isinstance(seen, mx.array) else seen

    monkeypatch.setattr(Step, "mask", widest)
    rig = Rig(graph_of())
    rows = [rig.ask(prompt(n), 5) for n in (20, 40)]
    rig.run()
    assert not differences(rows[1], want[1]) and differences(rows[0], want[0])


# -- sampling ------------------------------------------------------------------------------------------------------------

_SPECS = (
    G26,
    GREEDY,
    replace(G26, logprobs=3),
    SamplingSpec(temp=1.0, min_p=0.05, top_k=20, frequency_penalty=0.3),
    replace(GREEDY, logit_bias=((7, 2.5), (9, -3.0)), logprobs=2),
    SamplingSpec(temp=0.8, xtc_probability=0.5, xtc_threshold=0.05),
    SamplingSpec(temp=0.7, hlg=HlgSpec(width=2.0)),
    replace(G26, repetition_context_size=0, temp=1.3),
)


@both_modes
def test_seeded_rows_with_penalties_draw_the_same_beside_any_neighbours(blas_mode: str) -> None:
    graph = graph_of("qwen3")
    for geometry in geometries(graph, blas_mode):
        wanted = [solo(graph, geometry, prompt(n), 16, G26, 2**63 + i) for i, n in enumerate(LENGTHS)]
        for count in (2, 4, 8):
            rig = Rig(graph, geometry)
            rows = []
            for i in range(count):
                rows.append(rig.ask(prompt(LENGTHS[i]), 16, G26, 2**63 + i))
                rig.tick(i % 3)
            rig.run()
            for row, want in zip(rows, wanted, strict=False):
                assert_same(row, want)
    assert len({tuple(w.ids) for w in wanted}) == 8


@both_modes
def test_rows_of_eight_different_settings_share_a_step_and_draw_as_if_alone(blas_mode: str) -> None:
    graph = graph_of("llama")
    for geometry in geometries(graph, blas_mode):
        rig = Rig(graph, geometry)
        rows = [rig.ask(prompt(n, 3), 30, spec, 40 + i) for i, (n, spec) in enumerate(zip(LENGTHS, _SPECS, strict=True))]
        rig.run()
        for i, (row, n, spec) in enumerate(zip(rows, LENGTHS, _SPECS, strict=True)):
            want = solo(graph, geometry, prompt(n, 3), 30, spec, 40 + i)
            assert_same(row, want)
            assert (row.logprobs[0] is not None) == (spec.logprobs is not None)
    assert max(shape[0] for shape in rig.watched.steps) == 8


# -- samples of one request ------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("length", [1, 150])
@pytest.mark.parametrize("max_rows", [8, 2])
def test_the_samples_of_one_prompt_share_its_prefill_and_equal_separate_runs(length: int, max_rows: int, blas_mode: str) -> None:
    graph = graph_of("phi3")
    for geometry in geometries(graph, blas_mode):
        rig = Rig(graph, geometry, max_rows=max_rows)
        other = rig.ask(prompt(33), 25)
        rig.tick(2)
        before = len(rig.watched.windows)
        rows = rig.ask_many(prompt(length), 10, [(G26, 5 + i) for i in range(5)])
        rig.run()
        assert len(rig.watched.windows) - before == -(-(length - 1) // 64), "the prompt was run more than once"
        assert_same(other, solo(graph, geometry, prompt(33), 25))
        for i, row in enumerate(rows):
            assert_same(row, solo(graph, geometry, prompt(length), 10, G26, 5 + i))


# -- many random batches -----------------------------------------------------------------------------------------------------


@both_modes
def test_random_workloads_with_joins_cancels_and_stops_never_change_a_row(blas_mode: str, scale: int) -> None:
    graph = graph_of()
    for trial in range(6 * scale):
        rng = random.Random(trial)
        geometry = rng.choice(geometries(graph, blas_mode))
        rig = Rig(graph, geometry, rng.choice(("before", "after")), max_rows=rng.choice((2, 5, 8)), chunk=rng.choice((16, 64)))
        asked: list[tuple[Recorder, int, int]] = []
        for i in range(12):
            length, seed = rng.choice((1, 2, 17, 60, 63, 64, 100, 190)), rng.randrange(3)
            stop = rng.choice((None, None, rng.randrange(1, 12)))
            asked.append((rig.ask(prompt(length), 12, G26, seed, stop_after=stop), length, seed))
            rig.tick(rng.randrange(4))
            if i % 4 == 3:
                rng.choice(asked)[0].cancelled = True
        rig.run()
        for row, length, seed in asked:
            want = solo(graph, geometry, prompt(length), 12, G26, seed)
            assert row.end in ("length", "stop", "cancelled"), (trial, row.end)
            assert row.ids == want.ids[: len(row.ids)], (trial, length, seed)
            assert row.hidden()[: len(row.ids)] == want.hidden()[: len(row.ids)], (trial, length, seed)
            if row.end == "length":
                assert_same(row, want)
