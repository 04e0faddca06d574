"""The window step: order of events, joins, ends, cancels, failures, sampler history (G6, G8, G9, G17, G21, G24, G27)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from rig import G26, GREEDY, Recorder, Rig, assert_same, differences, graph_of, model_of, prompt, solo

from mlxnb_engine.errors import ModelError
from mlxnb_engine.graph import ModelGraph, Scores
from mlxnb_engine.methods import window
from mlxnb_engine.sampling import SamplingSession
from mlxnb_engine.state.slots import Slots
from mlxnb_engine.state.spec import Geometry

PLAIN = Geometry()


def alone(length: int, tokens: int, *sampling: Any) -> Recorder:
    return solo(graph_of(), PLAIN, prompt(length), tokens, *sampling)


# -- order (G8, P19) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("submit", ["before", "after"])
def test_the_next_step_is_built_and_submitted_before_the_last_one_is_delivered(submit: str) -> None:
    rig = Rig(graph_of(), submit=submit)
    rig.ask(prompt(5), 6)
    rig.run()
    want: list[tuple[str, int]] = [("build", 0), ("submit", 0)]
    for step in range(5):
        middle = [("submit", step + 1), ("read", step)]
        want += [("build", step + 1), *(middle if submit == "before" else middle[::-1]), ("deliver", step)]
    assert rig.log == [*want, ("read", 5), ("deliver", 5)]


@pytest.mark.parametrize("submit", ["before", "after"])
def test_delivery_never_lags_more_than_one_step_behind(submit: str) -> None:
    rig = Rig(graph_of(), submit=submit)
    rows = [rig.ask(prompt(n), 9 + n % 5) for n in (5, 40, 18)]
    while rig.tick():
        for row in rows:
            assert len(row.scores) - len(row.ids) <= 1
    assert all(len(row.scores) == len(row.ids) for row in rows)


# -- joining (G9) ----------------------------------------------------------------------------------------------------------


def test_a_lone_request_starts_at_once() -> None:
    rig = Rig(graph_of())
    row = rig.ask(prompt(5), 3)
    rig.tick()
    assert rig.watched.windows == [(1, 4)], "the first tick prefills"
    rig.tick()
    assert rig.watched.steps == [(1, 1)], "the second decodes"
    rig.tick()
    assert len(row.ids) == 1, "the third delivers"


@pytest.mark.parametrize("submit", ["before", "after"])
def test_a_late_join_emits_each_token_once(submit: str) -> None:
    rig = Rig(graph_of(), submit=submit)
    first = rig.ask(prompt(20), 20)
    rig.tick(7)
    held = len(first.ids)
    late = rig.ask(prompt(30), 8)
    rig.tick(3)
    assert held and len(late.scores) >= 1, "the late row did not join at the next safe point"
    rig.run()
    assert_same(first, alone(20, 20))
    assert_same(late, alone(30, 8))


def test_prefill_and_decoding_take_turns() -> None:
    rig = Rig(graph_of(), chunk=16)
    first = rig.ask(prompt(5), 30)
    rig.tick(4)
    late = rig.ask(prompt(100), 4)
    before = len(first.ids)
    rig.tick(7)
    assert rig.watched.windows[1:] == [(1, 16)] * 6 + [(1, 3)]
    assert late.progress == [(16, 99), (32, 99), (48, 99), (64, 99), (80, 99), (96, 99), (99, 99)]
    assert len(first.ids) == before + 7, "the running row waited for the prompt"


def test_short_prompts_share_one_prefill_window() -> None:
    rig = Rig(graph_of(), chunk=64)
    rows = [rig.ask(prompt(n), 5) for n in (9, 14, 3, 60)]
    rig.run()
    assert rig.watched.windows[0] == (3, 13), "three short prompts fit one window, the fourth does not"
    for row, n in zip(rows, (9, 14, 3, 60), strict=True):
        assert_same(row, alone(n, 5))


# -- what is computed ------------------------------------------------------------------------------------------------------


def test_n_tokens_cost_n_forwards_and_no_more_alone_or_in_a_batch() -> None:
    for length, tokens in ((1, 1), (1, 7), (65, 1), (66, 4), (130, 3)):
        rig = Rig(graph_of())
        row = rig.ask(prompt(length), tokens)
        rig.run()
        assert len(rig.watched.steps) == tokens == len(row.ids)
        assert len(rig.watched.windows) == -(-(length - 1) // 64)
    rig = Rig(graph_of())
    rows = [rig.ask(prompt(10), n) for n in (3, 9, 6)]
    rig.run()
    assert len(rig.watched.steps) == 9
    assert [len(row.scores) for row in rows] == [3, 9, 6]


def test_token_zero_is_consumed_exactly_once_and_alone() -> None:
    rig = Rig(graph_of())
    row = rig.ask(prompt(12), 6)
    rig.run()
    assert rig.watched.steps == [(1, 1)] * 6, "a decode step consumes one token"
    assert row.consumed == [*prompt(12), *row.ids[:5]]
    # The state is that of these ids and no others, each at its position.
    whole = Rig(graph_of())
    again = whole.ask(row.consumed, 1)
    whole.run()
    assert [(k.tobytes(), v.tobytes()) for k, v in again.state] == [(k.tobytes(), v.tobytes()) for k, v in row.state]


def test_reading_the_register_creates_nothing_on_the_device() -> None:
    def peak_of(reader: Callable[[Rig, Any], Any]) -> int:
        rig, grown = Rig(graph_of(), submit="before"), []
        original = rig.group._read

        def read(flight: Any) -> Any:
            assert flight.selection.tokens.dtype == mx.uint32
            mx.synchronize()
            mx.reset_peak_memory()
            out = reader(rig, original)(flight)
            grown.append(mx.get_peak_memory())  # stays 0 until something is allocated
            return out

        rig.group._read = read  # type: ignore[method-assign]
        rig.ask(prompt(5), 6)
        rig.ask(prompt(9), 6)
        rig.run()
        assert len(grown) >= 6
        return max(grown)

    def casting(rig: Rig, original: Any) -> Any:
        def read(flight: Any) -> Any:
            flight.selection.tokens.astype(mx.int32).tolist()
            return original(flight)

        return read

    assert peak_of(lambda rig, original: original) == 0
    assert peak_of(casting) > 0, "the harness does not notice a cast"


# -- ends ------------------------------------------------------------------------------------------------------------------


def test_the_context_limit_ends_a_row_with_length() -> None:
    for length, limit in ((10, 16), (1, 4), (64, 64), (60, 70)):
        rig = Rig(graph_of())
        row, beside = rig.ask(prompt(length), 500, limit=limit), rig.ask(prompt(7), 20)
        rig.run()
        tokens = limit - length + 1  # the last token is drawn at the last position and never consumed
        assert row.end == "length"
        assert len(row.ids) == tokens == len(row.scores)
        assert len(row.consumed) == limit
        assert row.ids == alone(length, tokens).ids
        assert_same(beside, alone(7, 20))


def test_a_stop_ends_the_row_and_nothing_follows() -> None:
    rig = Rig(graph_of())
    row, beside = rig.ask(prompt(10), 20, stop_after=4), rig.ask(prompt(11), 9)
    rig.run()
    assert (row.end, row.ids) == ("stop", alone(10, 20).ids[:4])
    assert_same(beside, alone(11, 9))


def test_a_reader_that_raises_ends_its_own_row_only() -> None:
    rig = Rig(graph_of())
    broken, beside = rig.ask(prompt(10), 20, raise_at=3), rig.ask(prompt(11), 9)
    rig.run()
    assert isinstance(broken.end, RuntimeError)
    assert len(broken.ids) == 3
    assert_same(beside, alone(11, 9))


# -- cancel ----------------------------------------------------------------------------------------------------------------


def _cancelled(rig: Rig, row: Recorder, others: list[tuple[Recorder, int, int]]) -> None:
    """Cancel, run on, and show that it ended once, cleanly, and that no other row noticed."""
    before = list(row.ids)
    row.cancelled = True
    rig.run()
    assert row.ends == ["cancelled"]
    assert len(row.ids) - len(before) <= 1
    for other, length, tokens in others:
        assert_same(other, alone(length, tokens))
    assert rig.group.kv_bytes == 0
    assert not rig.group.ready and not rig.group.preparing


def test_cancel_while_queued_never_starts_the_row() -> None:
    rig = Rig(graph_of(), max_rows=1)
    first, waiting, third = rig.ask(prompt(5), 8), rig.ask(prompt(9), 8), rig.ask(prompt(6), 4)
    rig.tick(3)
    assert not waiting.admitted
    _cancelled(rig, waiting, [(first, 5, 8), (third, 6, 4)])
    assert not waiting.admitted and rig.watched.windows == [(1, 4), (1, 5)]


def test_cancel_while_preparing_stops_the_prefill() -> None:
    rig = Rig(graph_of(), chunk=8)
    running, preparing = rig.ask(prompt(5), 12), None
    rig.tick(3)
    preparing = rig.ask(prompt(60), 8)
    rig.tick(2)
    assert preparing.progress == [(8, 59), (16, 59)]
    _cancelled(rig, preparing, [(running, 5, 12)])
    assert preparing.progress[-1] == (16, 59)


def test_cancel_of_one_of_several_in_a_shared_prefill_leaves_the_others() -> None:
    rig = Rig(graph_of(), chunk=48)
    rows = [rig.ask(prompt(n), 6) for n in (12, 16, 10)]
    rig.scheduler._admit()
    assert len(rig.group.preparation.entries) == 3  # type: ignore[union-attr]
    _cancelled(rig, rows[0], [(rows[1], 16, 6), (rows[2], 10, 6)])


def test_cancel_while_ready_and_of_samples_that_wait_for_a_place() -> None:
    rig = Rig(graph_of(), max_rows=1)
    samples = rig.ask_many(prompt(20), 5, [(GREEDY, i) for i in range(4)])
    rig.tick(4)
    assert [bool(s.scores) for s in samples] == [True, False, False, False]
    samples[2].cancelled = True
    _cancelled(rig, samples[1], [(samples[0], 20, 5), (samples[3], 20, 5)])
    assert samples[2].ends == ["cancelled"] and not samples[2].scores


@pytest.mark.parametrize("submit", ["before", "after"])
def test_cancel_while_running(submit: str) -> None:
    for ticks in range(2, 9):
        rig = Rig(graph_of(), submit=submit)
        rows = [rig.ask(prompt(n), 10) for n in (5, 6, 7)]
        rig.tick(ticks)
        _cancelled(rig, rows[1], [(rows[0], 5, 10), (rows[2], 7, 10)])
        assert rows[1].ids == alone(6, 10).ids[: len(rows[1].ids)]


# -- history (G27, P31, P35) -------------------------------------------------------------------------------------------------


class _Audited(SamplingSession):
    """A session that keeps everything that was ever committed to it, in order."""

    made: list[_Audited] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.commits: list[int | tuple[mx.array, int]] = []
        self.made.append(self)

    def commit_ids(self, ids: Any) -> None:
        self.commits += [int(i) for i in ids]
        super().commit_ids(ids)

    def commit_device(self, register: mx.array, index: int) -> None:
        self.commits.append((register, index))
        super().commit_device(register, index)

    def history(self) -> list[int]:
        return [c if isinstance(c, int) else int(c[0][c[1]].item()) for c in self.commits]


def test_every_consumed_token_enters_history_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "SamplingSession", _Audited)
    monkeypatch.setattr(_Audited, "made", [])
    rig = Rig(graph_of(), max_rows=4)
    rows = []
    for i, (length, tokens) in enumerate(((5, 20), (1, 9), (33, 14), (62, 11), (8, 6), (20, 12))):
        rows.append(rig.ask(prompt(length), tokens, G26, 60 + i))
        rig.tick(2)
    rig.run()
    by_seed = {session.seed: session for session in _Audited.made}
    for i, row in enumerate(rows):
        assert row.end == "length"
        assert by_seed[60 + i].history() == row.consumed == [*row.consumed[: -len(row.ids) + 1 or None], *row.ids[:-1]]
    assert any(isinstance(c, tuple) for session in _Audited.made for c in session.commits), "no token came from the device"


# -- failures (G6, G17, P4) ----------------------------------------------------------------------------------------------------


def test_a_forward_that_raises_fails_all_rows_of_the_step_and_the_group_lives_on() -> None:
    rig = Rig(graph_of())
    rows = [rig.ask(prompt(n), 10) for n in (5, 6)]

    def broken(_: Any, scores: Scores) -> Scores:
        if len(rig.watched.steps) == 5:
            raise MemoryError("no room")
        return scores

    rig.watched.fault = broken
    rig.run()
    assert [type(row.end) for row in rows] == [MemoryError, MemoryError]
    # What had been read was delivered, nothing of the failed step and nothing twice.
    for row, n in zip(rows, (5, 6), strict=True):
        assert row.ids == alone(n, 10).ids[: len(row.ids)]
    assert rig.group.kv_bytes == 0
    after = rig.ask(prompt(6), 10)
    rig.run()
    assert_same(after, alone(6, 10))


def test_a_row_without_a_finite_score_fails_alone() -> None:
    for step in (0, 1, 4):
        rig = Rig(graph_of())
        rows = [rig.ask(prompt(n), 10) for n in (5, 6, 7)]

        def fault(batch: Any, scores: Scores, rig: Rig = rig, victim: Recorder = rows[1], step: int = step) -> Scores:
            bad = [row.spec.consumer is victim and len(victim.scores) >= step for row in batch]
            return replace(scores, logits=mx.where(mx.array(bad)[:, None], mx.nan, scores.logits))

        rig.watched.fault = fault
        rig.run()
        assert isinstance(rows[1].end, ModelError) and len(rows[1].ids) == step
        assert rows[1].ids == alone(6, 10).ids[:step]
        assert_same(rows[0], alone(5, 10))
        assert_same(rows[2], alone(7, 10))


NAN_ID = 319


def _poisonable() -> ModelGraph:
    """A model in which one token turns everything that follows it, its own K/V included, into NaN."""
    model = model_of()
    model.model.embed_tokens.weight[NAN_ID] = mx.nan
    mx.eval(model.parameters())
    return ModelGraph(model, {})


def _successors_of_a_poisoned_slot(graph: ModelGraph, length: int, stop_after: int | None, cancel: bool = False) -> list[str]:
    """Poison a slot whose neighbours live, end its row, and compare the rows that come into the slot with their solo runs."""
    never = replace(GREEDY, logit_bias=((NAN_ID, -1e9),))
    always = replace(GREEDY, logit_bias=((NAN_ID, 1e9),))
    rig = Rig(graph)
    beside = [rig.ask(prompt(n), 60, never) for n in (3, 66)]
    rig.tick(3)
    victim = rig.ask(prompt(length), 50, always, stop_after=stop_after)
    while not victim.scores:
        rig.tick()
    if cancel:
        rig.tick()
        victim.cancelled = True
    while not victim.ends:
        rig.tick()
    heirs = [rig.ask(prompt(n), 5, never) for n in (6, 67)]
    rig.run()
    assert victim.ids == [NAN_ID]
    assert type(victim.end) is ModelError if stop_after is None and not cancel else victim.end in ("stop", "cancelled")
    rows = [*zip(beside, (3, 66), (60, 60), strict=True), *zip(heirs, (6, 67), (5, 5), strict=True)]
    return [d for row, n, tokens in rows for d in differences(row, solo(graph, PLAIN, prompt(n), tokens, never))]


# Prompt lengths: well inside class 64; NaN written at its last position, so that the row is promoted before it is read.
@pytest.mark.parametrize("length", [9, 63])
@pytest.mark.parametrize(("stop_after", "cancel"), [(None, False), (1, False), (None, True)], ids=["failed", "stopped", "cancelled"])
def test_a_slot_that_held_nan_serves_its_next_row_cleanly(length: int, stop_after: int | None, cancel: bool) -> None:
    assert _successors_of_a_poisoned_slot(_poisonable(), length, stop_after, cancel) == []


def test_a_slot_handed_over_with_its_nan_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of P4: no slot is ever zeroed."""
    monkeypatch.setattr(Slots, "_scrub", lambda self, row: None, raising=True)
    assert _successors_of_a_poisoned_slot(_poisonable(), 9, None)


def test_an_end_of_the_group_ends_every_row_once_wherever_it_is() -> None:
    rig = Rig(graph_of(), max_rows=2, chunk=8)
    rig.ask(prompt(5), 30)
    rig.tick(3)
    rig.ask_many(prompt(6), 5, [(GREEDY, 0), (GREEDY, 1)])
    rig.tick(3)
    rig.ask(prompt(80), 5)
    rig.tick(1)
    closing = RuntimeError("closing")
    rig.scheduler.fail_all(closing)
    rig.scheduler.fail_all(closing)
    assert [row.ends for row in rig.recorders] == [[closing]] * 4
    assert rig.group.kv_bytes == 0 and not rig.tick()
