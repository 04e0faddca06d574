"""The engine over a tiny model: requests, seeds, hostile input, cancel, faults, races, several models. Real `LocalClient` throughout."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rig import WAIT_S, answer_ids, ask, client_of, engine_of, finish, ids_of, log_problems, on_engine, settle, token_ids
from no_pickle import no_pickle, seen  # noqa: F401 (an autouse fixture)
from tiny import write_model

from mlxnb_engine import events as ev
from mlxnb_engine.client import LocalClient
from mlxnb_engine.errors import EngineDead, MlxnbError, ModelError, RequestError
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, Message, RequestId, SamplingSpec

CHUNK = 8


@pytest.fixture(scope="module")
def client(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    made = client_of(tiny_model, tmp_path_factory.mktemp("cache"), prefill_chunk=CHUNK)
    yield made
    made.close()


@pytest.fixture
def resident(client: LocalClient) -> Iterator[Any]:
    """The loaded model, idle before and after."""
    finish([client.load("")])
    yield settle(client)
    settle(client)


@pytest.fixture
def fresh(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., LocalClient]]:
    """Clients of their own, closed at the end."""
    made: list[LocalClient] = []

    def make(model: Path = tiny_model, **settings: Any) -> LocalClient:
        made.append(client_of(model, tmp_path / "cache", prefill_chunk=CHUNK, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- one request ---------------------------------------------------------------------------------------------------------


def test_a_request_tells_its_story_in_order(client: LocalClient, resident: Any) -> None:
    (log,) = finish(client.submit(ask("The capital of France is the answer", 12, seed=3)))
    kinds = [e.kind for e in log]
    assert kinds == sorted(kinds, key=["load", "started", "prefill", "tokens", "finished"].index)
    started = next(e for e in log if isinstance(e, ev.Started))
    assert started.seed == 3 and started.seed_explicit and started.prompt_tokens > 10
    done = [e.done for e in log if isinstance(e, ev.PrefillProgress)]
    assert done == sorted(set(done)) and done[-1] == started.prompt_tokens - 1 and len(done) >= 2
    end = log[-1]
    assert isinstance(end, ev.Finished) and end.reason == "length" and len(token_ids(log)) == 12
    assert end.usage["prompt_tokens"] == started.prompt_tokens and end.usage["completion_tokens"] == 12


def test_a_chat_request_is_answered(client: LocalClient, resident: Any) -> None:
    request = CompletionRequest(RequestId("chat"), "", messages=(Message("user", "What is it?"),), max_tokens=5)
    (log,) = finish(client.submit(request))
    assert isinstance(log[-1], ev.Finished)


def test_no_tokens_asked_for_is_an_empty_answer(client: LocalClient, resident: Any) -> None:
    steps = resident.group.steps
    (log,) = finish(client.submit(ask("x", 0)))
    assert [e.kind for e in log if e.kind != "load"] == ["started", "finished"]
    end = log[-1]
    assert isinstance(end, ev.Finished) and (end.reason, end.text, end.usage["completion_tokens"]) == ("length", "", 0)
    assert resident.group.steps == steps


def test_one_token_asked_for_is_one_token(client: LocalClient, resident: Any) -> None:
    long = answer_ids(client, ask("one two three", 6))
    assert answer_ids(client, ask("one two three", 1)) == long[:1]


def test_a_stop_string_ends_the_row(client: LocalClient, resident: Any) -> None:
    (full,) = client.submit(ask("one two", 30))
    (log,) = finish([full])
    text = log[-1].to_dict()["text"]
    stop = text[5:8]
    (cut,) = finish(client.submit(ask("one two", 30, stop=(stop,))))
    end = cut[-1]
    assert isinstance(end, ev.Finished)
    assert (end.reason, end.stop, end.text) == ("stop", stop, text[: text.find(stop)])


def test_log_probabilities_come_with_each_token(client: LocalClient, resident: Any) -> None:
    (log,) = finish(client.submit(ask("one two", 5, logprobs=3)))
    tokens = [t for e in log if isinstance(e, ev.Tokens) for t in e.tokens]
    assert len(tokens) == 5
    for token in tokens:
        assert token.rank == 0 and token.top[0].id == token.id and len(token.top) == 3
        assert token.logprob is not None and token.logprob <= 0 and math.isclose(token.top[0].logprob, token.logprob)


def test_a_late_request_emits_each_token_once_and_disturbs_nobody(client: LocalClient, resident: Any) -> None:
    alone = [answer_ids(client, ask(text, 60)) for text in ("one two", "red orange yellow")]
    (first,) = client.submit(ask("one two", 60))
    first.read(8, WAIT_S)
    (second,) = client.submit(ask("red orange yellow", 60))
    finish([first, second])
    assert [ids_of(first), ids_of(second)] == alone


# -- seeds -----------------------------------------------------------------------------------------------------------------


def test_a_seeded_row_draws_the_same_alone_and_in_a_batch_of_eight(client: LocalClient, resident: Any) -> None:
    texts = ["a", "the sea", "name the colours", "is", "when the wind comes in", "one two three four", "Q", "in order:"]
    how = {"temp": 0.9, "top_p": 0.95, "presence_penalty": 0.2, "repetition_penalty": 1.05}
    alone = [answer_ids(client, ask(text, 20, seed=11, **how)) for text in texts]
    together = [client.submit(ask(text, 20, seed=11, **how))[0] for text in texts]
    finish(together)
    assert [ids_of(row) for row in together] == alone
    assert len({tuple(ids) for ids in alone}) == 8


def test_every_request_starts_again_at_the_seed_and_only_samples_count_up(client: LocalClient, resident: Any) -> None:
    one = [answer_ids(client, ask("the sea", 15, temp=1.0, seed=seed)) for seed in (40, 41, 42)]
    again = [client.submit(ask("the sea", 15, temp=1.0, seed=40))[0] for _ in range(3)]
    samples = client.submit(ask("the sea", 15, temp=1.0, seed=40, samples=3))
    finish([*again, *samples])
    assert [ids_of(row) for row in again] == [one[0]] * 3
    assert [ids_of(row) for row in samples] == one
    assert len({tuple(ids) for ids in one}) == 3
    assert [next(e.seed for e in row.read() if isinstance(e, ev.Started)) for row in samples] == [40, 41, 42]


def test_rows_without_a_seed_get_their_own_and_can_be_repeated_by_it(client: LocalClient, resident: Any) -> None:
    rows = client.submit(ask("the sea", 15, temp=1.0, samples=4))
    finish(rows)
    started = [next(e for e in row.read() if isinstance(e, ev.Started)) for row in rows]
    assert len({e.seed for e in started}) == 4 and not any(e.seed_explicit for e in started)
    assert answer_ids(client, ask("the sea", 15, temp=1.0, seed=started[2].seed)) == ids_of(rows[2])


def test_the_seed_wraps_at_64_bits(client: LocalClient, resident: Any) -> None:
    rows = client.submit(ask("the sea", 6, temp=1.0, seed=2**64 - 1, samples=2))
    finish(rows)
    assert ids_of(rows[1]) == answer_ids(client, ask("the sea", 6, temp=1.0, seed=0))


# -- hostile input ---------------------------------------------------------------------------------------------------------

HOSTILE: dict[str, tuple[CompletionRequest, str]] = {
    "lone surrogate": (ask("a \ud800 b"), "request"),
    "lone surrogate in a message": (CompletionRequest(RequestId("h1"), "", messages=(Message("user", "\udfff"),)), "request"),
    "empty text": (ask(""), "request"),
    "no messages": (CompletionRequest(RequestId("h2"), "", messages=()), "request"),
    "unknown role": (CompletionRequest(RequestId("h3"), "", messages=(Message("robot", "x"),)), "request"),  # type: ignore[arg-type]
    "longer than the context": (ask("one two " * 5000), "capacity"),
    "top_k above the vocabulary": (ask("x", top_k=10**6, temp=1.0), "request"),
    "bias of an unknown token": (ask("x", logit_bias=((10**6, 1.0),)), "request"),
    "unknown model": (ask("x", model="/no/such/folder"), "model"),
    "a model name with NUL": (ask("x", model="a\0b"), "model request"),
    "a model name that climbs": (ask("x", model="../../../etc"), "model request"),
    "thinking without a switch": (CompletionRequest(RequestId("h4"), "", messages=(Message("user", "x"),), thinking=True), "request"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_a_typed_error_with_a_hint_and_harms_nobody(client: LocalClient, resident: Any, name: str) -> None:
    request, kinds = HOSTILE[name]
    alone = answer_ids(client, ask("one two", 40))
    (neighbour,) = client.submit(ask("one two", 40))
    neighbour.read(4, WAIT_S)
    (log,) = finish(client.submit(request))
    end = log[-1]
    assert isinstance(end, ev.Failed), end
    assert end.error in ("request", "capacity") if kinds == "request" else end.error in kinds, end
    assert end.message and end.hint, end
    assert "Traceback" not in end.message and "Error:" not in end.message, end.message
    finish([neighbour])
    assert ids_of(neighbour) == alone
    assert client.status()["state"] == "ready"


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temp": -1.0},
    "nan": {"temp": math.nan},
    "top_p": {"top_p": 0.0},
    "max_tokens": {"max_tokens": -1},
    "samples": {"samples": 0},
    "many samples": {"samples": 10**6},
    "empty stop": {"stop": ("",)},
    "seed": {"seed": 2**64},
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_what_needs_no_model_to_see_is_refused_at_submit(client: LocalClient, resident: Any, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        client.submit(ask("x", **BAD_FIELDS[name]))
    assert caught.value.hint
    assert client.live() == []


def test_nul_and_direction_marks_are_text(client: LocalClient, resident: Any) -> None:
    assert len(answer_ids(client, ask("a\0b\u202e\u2066 \x1b[31m", 4))) == 4


def test_ten_megabytes_are_refused_while_others_keep_running(client: LocalClient, resident: Any) -> None:
    (neighbour,) = client.submit(ask("one two", 3500))
    neighbour.read(4, WAIT_S)
    rows = client.submit(ask("the sea is wide " * 650_000))
    (log,) = finish(rows)
    end = log[-1]
    assert isinstance(end, ev.Failed) and end.error == "capacity" and "context" in end.message
    assert not neighbour.done, "the neighbour must still be running, and was"
    count = len(neighbour.read())
    assert neighbour.read(count, WAIT_S), "and it goes on"
    neighbour.cancel()
    finish([neighbour])


def test_a_context_limit_binds_and_ends_a_long_answer(fresh: Callable[..., LocalClient]) -> None:
    small = fresh(context_limit=32)
    (log,) = finish(small.submit(ask("one two", 500)))
    end = log[-1]
    assert isinstance(end, ev.Finished) and end.reason == "length"
    assert end.usage["prompt_tokens"] + end.usage["completion_tokens"] == 33, "32 positions, and the token drawn at the last"
    (log,) = finish(small.submit(ask("one two three four five " * 8)))
    assert isinstance(log[-1], ev.Failed) and log[-1].error == "capacity"


def test_max_kv_bytes_refuses_what_cannot_fit_and_serves_the_rest_in_turn(fresh: Callable[..., LocalClient]) -> None:
    # 2 layers of K and V, 2 heads of 16 floats: 512 bytes a position, 64 positions at least.
    small = fresh(max_kv_bytes=4 * 64 * 512)
    rows = [small.submit(ask(f"row {i}", 20))[0] for i in range(7)]
    (refused,) = finish(small.submit(ask("one", 400)))
    assert isinstance(refused[-1], ev.Failed) and refused[-1].error == "capacity" and "max_kv_bytes" in refused[-1].message
    peak = 0
    while not all(row.done for row in rows):
        peak = max(peak, *(model["kv_bytes"] for model in small.status()["models"]), 0)
        rows[-1].wait(0.001)
    assert 0 < peak <= 4 * 64 * 512
    assert all(isinstance(log[-1], ev.Finished) for log in finish(rows))
    settle(small)


def test_settings_bound_at_the_start_stand_whatever_happens_to_them(fresh: Callable[..., LocalClient], tiny_model: Path) -> None:
    bound = fresh(context_limit=64)
    before = answer_ids(bound, ask("one two", 10))
    with pytest.raises(AttributeError):
        bound.config.context_limit = 8  # type: ignore[misc]
    (tiny_model / "unrelated").write_text("a new file beside the weights")
    assert answer_ids(bound, ask("one two", 10)) == before
    (tiny_model / "unrelated").unlink()


# -- cancel (R4, counted in advances) -----------------------------------------------------------------------------------------


class TickWatch:
    """Acts between two ticks of the scheduler, on the engine thread, and counts ticks from there to the victim's end."""

    def __init__(self, resident: Any, victim: Generation, phase: str) -> None:
        self.resident, self.victim, self.phase = resident, victim, phase
        self.ticks_after_cancel: int | None = None
        self._tick = resident.scheduler.tick

    def _phase(self) -> str:
        group = self.resident.group
        if any(spec.consumer.generation is self.victim for e in self.resident.scheduler.queue for spec in e.rows):
            return "queued"
        if group.preparation and any(s.consumer.generation is self.victim for e in group.preparation.entries for s in e.rows):
            return "preparing"
        if any(s.consumer.generation is self.victim for _, e in group.ready for s in e.rows):
            return "ready"
        if any(row.spec.consumer.generation is self.victim for row in group.rows):
            return "decoding"
        return "elsewhere"

    def __call__(self) -> bool:
        if self.ticks_after_cancel is None and self._phase() == self.phase:
            self.victim.cancel()
            self.ticks_after_cancel = 0
        more = bool(self._tick())
        if self.ticks_after_cancel is not None and not self.victim.done:
            self.ticks_after_cancel += 1
        return more


def cancelled_after(client: LocalClient, resident: Any, phase: str) -> int:
    """Ticks beyond the first that a cancel in this phase takes."""
    companions, victims = [ask("one two", 4000)], [ask("the sea is wide and the night is still; when the wind comes", 4000)]
    if phase == "queued":
        companions = [ask("one two", 4000, samples=8)]
    if phase == "ready":
        companions, victims = [], [ask("the sea", 4000, samples=9)]

    def submit() -> list[Generation]:
        # On the engine thread, so that the watch stands before the first tick that sees the victim.
        rows = [row for request in companions for row in client.submit(request)]
        watched = client.submit(victims[0])
        watch = TickWatch(resident, watched[-1], phase)
        resident.scheduler.tick = watch
        watches.append(watch)
        return [*rows, *watched]

    watches: list[TickWatch] = []
    rows = on_engine(client, submit)
    victim = watches[0].victim
    assert isinstance(victim.wait(WAIT_S), ev.Cancelled)
    count = watches[0].ticks_after_cancel
    for row in rows:
        row.cancel()
    finish(rows)
    del resident.scheduler.tick
    settle(client)
    assert count is not None, f"the victim was never {phase}"
    return count


@pytest.mark.parametrize("phase", ["queued", "preparing", "ready", "decoding"])
def test_a_cancel_is_honoured_within_one_advance(client: LocalClient, resident: Any, phase: str) -> None:
    assert cancelled_after(client, resident, phase) == 0


def test_a_cancel_looked_at_only_between_prompts_is_caught(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxnb_engine.delivery import Delivery

    class BetweenPrompts:
        def __get__(self, row: Delivery, owner: object = None) -> bool:
            return row.generation.cancel_requested and row._counts.produced % 50 == 49

    monkeypatch.setattr(Delivery, "cancelled", BetweenPrompts())
    assert cancelled_after(client, resident, "decoding") > 40


def test_a_row_whose_text_is_still_being_encoded_can_be_cancelled(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reached = threading.Event(), threading.Event()
    prepare = type(resident.preparer).prepare

    def slow(self: Any, request: CompletionRequest) -> Any:
        if request.text == "slow":
            reached.set()
            assert gate.wait(WAIT_S)
        return prepare(self, request)

    monkeypatch.setattr(type(resident.preparer), "prepare", slow)
    (row,) = client.submit(ask("slow"))
    assert reached.wait(WAIT_S)
    with pytest.raises(RequestError, match="in use"):
        client.unload("")
    row.cancel()
    assert isinstance(row.wait(WAIT_S), ev.Cancelled), "it need not wait for the tokenizer"
    gate.set()
    settle(client)
    assert log_problems(row.read()) == []


def test_cancel_by_name_stops_that_request_and_no_other(client: LocalClient, resident: Any) -> None:
    victim, other = ask("one", 3000, samples=2), ask("two", 30)
    rows, (kept,) = client.submit(victim), client.submit(other)
    assert client.cancel([victim.id]) == 2
    logs = finish([*rows, kept])
    assert [log[-1].kind for log in logs] == ["cancelled", "cancelled", "finished"]
    assert client.cancel() == 0 and client.cancel([victim.id]) == 0


# -- faults (R8, G6) ---------------------------------------------------------------------------------------------------------


class At:
    """Calls through to `action`, except for call number k, which raises."""

    def __init__(self, action: Callable[..., Any], k: int) -> None:
        self.action, self.k, self.calls = action, k, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.k:
            raise ZeroDivisionError(f"injected at call {self.k}")
        return self.action(*args, **kwargs)


def three_rows(client: LocalClient) -> list[Generation]:
    return on_engine(client, lambda: [client.submit(ask(text, 25))[0] for text in ("one", "the sea", "red orange")])


@pytest.mark.parametrize("k", [1, 2, 3, 7, 20])
def test_a_forward_that_raises_fails_the_rows_of_its_step_and_the_next_request_is_served(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    alone = answer_ids(client, ask("one", 25))
    with monkeypatch.context() as patch:
        patch.setattr(resident.group.graph, "forward", At(resident.group.graph.forward, k))
        logs = finish(three_rows(client))
    ends = [log[-1] for log in logs]
    assert any(isinstance(e, ev.Failed) for e in ends)
    for log, end in zip(logs, ends, strict=True):
        assert isinstance(end, ev.Finished) or (isinstance(end, ev.Failed) and "injected" in end.message)
        assert len(token_ids(log)) < 25 or isinstance(end, ev.Finished)
    settle(client)
    assert answer_ids(client, ask("one", 25)) == alone


@pytest.mark.parametrize("k", [1, 2])
def test_a_prefill_that_raises_fails_what_was_being_prepared_and_not_what_runs(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    alone = answer_ids(client, ask("one", 200))
    (running,) = client.submit(ask("one", 200))
    running.read(5, WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(resident.group.graph, "feed", At(resident.group.graph.feed, k))
        (log,) = finish(client.submit(ask(f"{k} times the sea is wide and the night is still", 5)))  # not read before
    assert isinstance(log[-1], ev.Failed) and "injected" in log[-1].message
    finish([running])
    assert ids_of(running) == alone


@pytest.mark.parametrize("k", [1, 2, 9])
def test_a_sampler_that_raises_fails_its_step_and_the_engine_lives(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    from mlxnb_engine.methods import window

    with monkeypatch.context() as patch:
        patch.setattr(window, "select", At(window.select, k))
        logs = finish(three_rows(client))
    assert any(isinstance(log[-1], ev.Failed) for log in logs)
    settle(client)
    assert len(answer_ids(client, ask("one", 5))) == 5


@pytest.mark.parametrize("k", [1, 2, 9])
def test_a_reader_that_raises_fails_its_own_row_alone(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    alone = [answer_ids(client, ask(text, 25)) for text in ("one", "red orange")]
    rows = on_engine(client, lambda: _with_broken_reader(client, k))
    logs = finish(rows)
    assert [log[-1].kind for log in logs] == ["finished", "failed", "finished"]
    assert [ids_of(rows[0]), ids_of(rows[2])] == alone
    assert len(ids_of(rows[1])) < 25


def _with_broken_reader(client: LocalClient, k: int) -> list[Generation]:
    rows = three_rows_now(client)
    rows[1].emit = At(rows[1].emit, k)  # type: ignore[method-assign]
    return rows


def three_rows_now(client: LocalClient) -> list[Generation]:
    return [client.submit(ask(text, 25))[0] for text in ("one", "the sea", "red orange")]


@pytest.mark.parametrize("k", [1, 2, 17])
def test_a_tokenizer_that_raises_fails_one_row_alone(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    alone = {text: answer_ids(client, ask(text, 25)) for text in ("one", "the sea", "red orange")}
    with monkeypatch.context() as patch:
        patch.setattr(resident.tokenizer, "token_text", At(resident.tokenizer.token_text, k))
        rows = three_rows(client)
        logs = finish(rows)
    assert sorted(log[-1].kind for log in logs) == ["failed", "finished", "finished"]
    for row, log in zip(rows, logs, strict=True):
        mine = alone[row.request.text or ""]
        assert token_ids(log) == (mine if isinstance(log[-1], ev.Finished) else mine[: len(token_ids(log))])


def test_a_prompt_that_cannot_be_prepared_fails_alone(client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = answer_ids(client, ask("one", 30))
    encode = type(resident.tokenizer).encode

    def broken(self: Any, text: str, **how: Any) -> Any:
        if text == "boom":
            raise ZeroDivisionError("injected")
        return encode(self, text, **how)

    with monkeypatch.context() as patch:
        patch.setattr(type(resident.tokenizer), "encode", broken)
        rows = [client.submit(ask(text, 30))[0] for text in ("one", "boom", "one")]
        logs = finish(rows)
    assert [log[-1].kind for log in logs] == ["finished", "failed", "finished"]
    assert ids_of(rows[0]) == ids_of(rows[2]) == alone


def test_a_row_without_a_finite_score_fails_alone_and_its_slot_is_clean(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    from mlxnb_engine.graph import Scores

    texts = ("one", "the sea", "red orange")
    alone = [answer_ids(client, ask(text, 25)) for text in texts]
    real = resident.group.graph.forward
    rows: list[Generation] = []
    with monkeypatch.context() as patch:

        def forward(ids: Any, caches: Any, positions: Any, multiple: int = 1) -> Scores:
            scores = real(ids, caches, positions, multiple)
            batch = [row for slot in resident.group.slots.rows() for row in resident.group.rows if row.slot is slot]
            bad = [row.spec.consumer.generation is rows[1] and row.drawn == 6 for row in batch]
            return Scores(mx.where(mx.array(bad)[:, None], mx.array(float("nan")), scores.logits), scores.hidden)

        patch.setattr(resident.group.graph, "forward", forward)
        rows.extend(on_engine(client, lambda: three_rows_now(client)))
        logs = finish(rows)
    assert [log[-1].kind for log in logs] == ["finished", "failed", "finished"]
    failed = logs[1][-1]
    assert isinstance(failed, ev.Failed) and failed.error == "model" and "finite" in failed.message and failed.hint
    assert ids_of(rows[1]) == alone[1][:6]
    assert [ids_of(rows[0]), ids_of(rows[2])] == [alone[0], alone[2]]
    settle(client)
    assert answer_ids(client, ask("the sea", 25)) == alone[1]


@pytest.mark.parametrize("where", ["tick", "check"])
def test_a_failing_loop_ends_every_row_once_and_the_next_request_starts_a_fresh_engine(
    fresh: Callable[..., LocalClient], where: str
) -> None:
    client = fresh(max_rows=2)
    alone = answer_ids(client, ask("one", 10))
    resident = settle(client)
    old = engine_of(client)
    rows: list[Generation] = []

    def arrange() -> None:
        if where == "tick":
            resident.scheduler.tick = At(resident.scheduler.tick, 6)
        else:
            resident.scheduler.check = At(resident.scheduler.check, 1)
        rows.extend(row for text in ("one", "two", "three", "four") for row in client.submit(ask(text, 12 if where == "check" else 500)))

    on_engine(client, arrange)
    old._thread.join(WAIT_S)
    assert old.state == "dead" and client.status()["state"] == "dead" and "injected" in client.status()["error"]
    logs = finish(rows)
    if where == "tick":
        assert [log[-1].kind for log in logs] == ["failed"] * 4
        with pytest.raises(EngineDead, match="injected"):
            rows[0].raise_for_error()
    assert answer_ids(client, ask("one", 10)) == alone
    assert engine_of(client) is not old and client.status()["state"] == "ready"


def test_a_death_that_forgets_the_rows_would_be_noticed(fresh: Callable[..., LocalClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of R8: the loop fails, and nobody tells the rows."""
    from mlxnb_engine.binding import Resident
    from mlxnb_engine.engine import Work

    client = fresh()
    answer_ids(client, ask("one", 2))
    resident, engine = settle(client), engine_of(client)
    monkeypatch.setattr(Work, "fail", lambda self, error: None)
    monkeypatch.setattr(Resident, "close", lambda self, error: None)

    def arrange() -> list[Generation]:
        resident.scheduler.tick = At(resident.scheduler.tick, 3)
        return client.submit(ask("one", 500))

    (row,) = on_engine(client, arrange)
    engine._thread.join(WAIT_S)
    assert engine.state == "dead" and row.wait(0.05) is None
    monkeypatch.undo()
    client.close()
    assert row.done, "closing the client ends even those"


def _die(client: LocalClient) -> tuple[Any, weakref.ref[Any]]:
    """Let the engine fail in mid-step; it, and its model as far as anybody still holds that."""
    resident, engine = settle(client), engine_of(client)
    rows: list[Generation] = []

    def arrange() -> None:
        resident.group._read = At(resident.group._read, 5)
        resident.group.fail_active = At(resident.group.fail_active, 1)
        rows.extend(client.submit(ask("one", 500)))

    on_engine(client, arrange)
    engine._thread.join(WAIT_S)
    finish(rows)
    return engine, weakref.ref(resident.group.graph.model)


def test_a_dead_engine_holds_no_model(fresh: Callable[..., LocalClient]) -> None:
    client = fresh()
    answer_ids(client, ask("one", 4))
    engine, model = _die(client)
    gc.collect()
    assert engine.state == "dead" and engine.error is not None and engine.error.__traceback__ is not None
    assert model() is None, "an error's traceback or a queued job keeps the weights alive"


@pytest.mark.parametrize("broken", ["dispose", "first resident", "backend"])
def test_closing_attempts_every_release_and_keeps_the_first_error(
    fresh: Callable[..., LocalClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    from mlxnb_engine import binding

    client = fresh()
    other = write_model(tmp_path / "other", seed=5)
    finish([client.load(""), client.load(str(other))])
    first, second = on_engine(client, lambda: [lane.resident for lane in engine_of(client)._lanes])
    rows = [row for _ in range(3) for row in client.submit(ask("one", 3000))]
    rows += client.submit(ask("one", 3000, model=str(other)))
    rows[-1].read(4, WAIT_S)
    if broken == "dispose":
        monkeypatch.setattr(first.group, "dispose", At(first.group.dispose, 1))
    elif broken == "first resident":
        monkeypatch.setattr(first.group, "fail_active", At(first.group.fail_active, 1))
    else:
        monkeypatch.setattr(binding, "stop_backend", At(binding.stop_backend, 1))
    engine = engine_of(client)
    client.close()
    assert not engine._thread.is_alive() and engine.state == "stopped"
    assert isinstance(engine.error, ZeroDivisionError)
    assert [log[-1].kind for log in finish(rows)] == ["cancelled"] * 4
    assert second.group.kv_bytes == 0 and second.group.active == 0
    monkeypatch.undo()
    if broken == "backend":
        return
    first.scheduler.fail_all(EngineDead("again"))
    assert first.group.kv_bytes == 0 and first.group.active == 0


# -- races (R6) ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_", [0, 1, 2])
def test_eight_threads_race_submit_cancel_status_unload_and_close(fresh: Callable[..., LocalClient], scale: int, round_: int) -> None:
    client = fresh(max_rows=4)
    answer_ids(client, ask("one", 2))
    rows: list[Generation] = []
    errors: list[BaseException] = []
    gate = threading.Barrier(8)

    def work(number: int) -> None:
        rng = random.Random(number * 31 + round_)
        gate.wait(30)
        for step in range(25 * scale):
            try:
                _one_call(client, rng, rows, closing=number == 0 and step == 20 * scale)
            except EngineDead:
                continue
            except RequestError as error:
                assert "in use" in str(error) or "No model" in str(error)
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "deadlock"
    client.close()
    assert errors == []
    assert len(rows) > 20
    for row in rows:
        assert row.wait(30) is not None, "a row never ended"
        assert log_problems(row.read()) == []


def _one_call(client: LocalClient, rng: random.Random, rows: list[Generation], closing: bool) -> None:
    if closing:
        client.close()
        return
    choice = rng.random()
    if choice < 0.4:
        made = client.submit(ask("one two", rng.choice((0, 1, 5, 40)), samples=rng.choice((1, 1, 3))))
        rows.extend(made)
        if rng.random() < 0.3:
            made[0].read(2, 0.05)
            made[0].cancel()
    elif choice < 0.6:
        client.cancel([row.id for row in rng.sample(rows, min(3, len(rows)))])
    elif choice < 0.85:
        status = client.status()
        assert status["state"] in ("starting", "ready", "stopping", "stopped", "closed", "not started")
    elif choice < 0.95:
        client.live()
    else:
        client.unload()


PLAIN = {dict, list, tuple, str, int, float, bool, type(None)}


def types_in(value: Any) -> set[type]:
    """Every type met in a value and what it contains."""
    inside: list[Any] = list(value) if isinstance(value, (list, tuple)) else []
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    return {type(value)}.union(*map(types_in, inside))


def crossings(client: LocalClient, log: list[ev.Event]) -> set[type]:
    """Types of all that left the engine, other than plain values."""
    return types_in([client.status(), *[e.to_dict() for e in log]]) - PLAIN


def test_nothing_that_leaves_the_engine_holds_an_array(client: LocalClient, resident: Any) -> None:
    (log,) = finish(client.submit(ask("one two", 10, temp=0.8, logprobs=2)))
    assert crossings(client, log) == set()


def test_a_lazy_array_handed_over_with_a_token_is_caught(client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    from mlxnb_engine.delivery import Delivery, Drawn

    deliver = Delivery.deliver
    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "deliver", lambda self, token: deliver(self, Drawn(token.id, (mx.array(-1.0) * 2, 0, []))))  # type: ignore[arg-type]
        (log,) = finish(client.submit(ask("one two", 4)))
    assert crossings(client, log) == {mx.array}


def test_every_mlx_call_of_a_request_is_made_on_the_engine_thread(
    client: LocalClient, resident: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxnb_engine.methods import window

    threads: set[str] = set()

    def spy(action: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            return action(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("forward", "feed"):
            patch.setattr(resident.group.graph, name, spy(getattr(resident.group.graph, name)))
        patch.setattr(window, "select", spy(window.select))
        rows = client.submit(ask("the sea is wide and the night", 8, samples=3))
        finish(rows)
    assert threads == {"mlxnb-engine"}


# -- models ----------------------------------------------------------------------------------------------------------------------


def test_two_models_answer_side_by_side_and_the_least_recently_used_makes_room(
    fresh: Callable[..., LocalClient], tmp_path: Path
) -> None:
    client = fresh(resident_models=2)
    b, c = (str(write_model(tmp_path / name, seed=seed)) for name, seed in (("b", 5), ("c", 6)))
    first = answer_ids(client, ask("one two", 10))
    second = answer_ids(client, ask("one two", 10, model=b))
    assert first != second
    assert answer_ids(client, ask("one two", 10)) == first, "the default model was used last"
    answer_ids(client, ask("one two", 10, model=c))
    names = [m["name"] for m in client.status()["models"]]
    assert len(names) == 2 and not any(Path(n).name == "b" or n == b for n in names)
    assert answer_ids(client, ask("one two", 10, model=b)) == second, "it comes back when it is asked for"


def test_groups_take_turns_one_advance_each(fresh: Callable[..., LocalClient], tmp_path: Path) -> None:
    client = fresh()
    other = str(write_model(tmp_path / "other", seed=5))
    finish([client.load(""), client.load(other)])
    turns: list[int] = []

    def arrange() -> list[Generation]:
        for number, lane in enumerate(engine_of(client)._lanes):
            tick = lane.resident.scheduler.tick

            def spy(number: int = number, tick: Callable[[], bool] = tick) -> bool:
                more = tick()
                if more:
                    turns.append(number)
                return more

            lane.resident.scheduler.tick = spy
        return [*client.submit(ask("one", 60)), *client.submit(ask("one", 60, model=other))]

    finish(on_engine(client, arrange))
    both = turns[turns.index(1) if turns[0] == 0 else turns.index(0) :]
    alternating = both[: 2 * min(both.count(0), both.count(1)) - 2]
    assert len(alternating) > 60
    assert all(a != b for a, b in itertools.pairwise(alternating))


def test_a_third_model_waits_until_one_of_two_busy_ones_is_idle(fresh: Callable[..., LocalClient], tmp_path: Path) -> None:
    client = fresh(resident_models=2)
    b, c = (str(write_model(tmp_path / name, seed=seed)) for name, seed in (("b", 5), ("c", 6)))
    finish([client.load(""), client.load(b)])
    (busy_a,), (busy_b,) = client.submit(ask("one", 4000)), client.submit(ask("one", 4000, model=b))
    busy_a.read(4, WAIT_S), busy_b.read(4, WAIT_S)
    (waiting,) = client.submit(ask("one", 5, model=c))
    for _ in range(2000):
        if on_engine(client, lambda: any(lane.located for lane in engine_of(client)._lanes)):
            break
    on_engine(client, lambda: None)
    assert not any(isinstance(e, ev.Started) for e in waiting.read()) and not busy_a.done and not busy_b.done
    busy_b.cancel()
    finish([waiting])
    assert not busy_a.done
    assert [len(client.status()["models"])] == [2]
    busy_a.cancel()
    finish([busy_a, busy_b])


def test_a_model_that_waits_for_room_can_be_cancelled(fresh: Callable[..., LocalClient], tmp_path: Path) -> None:
    client = fresh(resident_models=1)
    (busy,) = client.submit(ask("one", 4000))
    busy.read(4, WAIT_S)
    (waiting,) = client.submit(ask("one", 5, model=str(write_model(tmp_path / "b", seed=5))))
    waiting.read(0, WAIT_S)
    waiting.cancel()
    assert isinstance(waiting.wait(WAIT_S), ev.Cancelled)
    assert not busy.done
    busy.cancel()
    finish([busy, waiting])
    assert len(answer_ids(client, ask("one", 3))) == 3


def test_a_model_in_use_is_not_unloaded_and_an_idle_one_lets_go_of_its_weights(
    fresh: Callable[..., LocalClient], tiny_model: Path
) -> None:
    client = fresh()
    assert client.unload() == []
    (busy,) = client.submit(ask("one", 4000))
    busy.read(4, WAIT_S)
    with pytest.raises(RequestError, match="in use"):
        client.unload("")
    with pytest.raises(RequestError, match="in use"):
        client.unload()
    busy.cancel()
    finish([busy])
    model = weakref.ref(settle(client).group.graph.model)
    (name,) = client.unload("")
    assert Path(name).name == tiny_model.name
    gc.collect()
    assert model() is None
    assert client.status()["models"] == []
    with pytest.raises(RequestError, match="No model"):
        client.unload("nonsense")
    assert len(answer_ids(client, ask("one", 3))) == 3


def test_loading_without_a_prompt_ends_with_what_was_loaded(fresh: Callable[..., LocalClient]) -> None:
    client = fresh()
    (log,) = finish([client.load("")])
    end = log[-1]
    assert isinstance(end, ev.Finished) and end.usage["weight_bytes"] > 0 and end.usage["model"]
    (again,) = finish([client.load("")])
    assert len(client.status()["models"]) == 1 and isinstance(again[-1], ev.Finished)


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("[]")


def _wrong_shape(folder: Path) -> None:
    write_model(folder, hidden_size=64, intermediate_size=96)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 128'))


@pytest.mark.parametrize(
    "damage", [_no_config, _broken_config, _truncated, _garbage, _no_weights, _no_tokenizer, _wrong_shape], ids=lambda f: f.__name__
)
def test_a_damaged_model_is_a_typed_error_and_the_other_goes_on(
    client: LocalClient, resident: Any, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = write_model(tmp_path / "damaged", seed=9)
    damage(folder)
    (neighbour,) = client.submit(ask("one two", 30))
    rows = client.submit(ask("x", model=str(folder), samples=2))
    logs = finish([*rows, neighbour])
    for log in logs[:2]:
        end = log[-1]
        assert isinstance(end, ev.Failed) and end.error in ("model", "request") and end.message and end.hint, end
    assert isinstance(logs[2][-1], ev.Finished)
    assert client.status()["loading"] == []
    with pytest.raises((ModelError, RequestError)):
        rows[0].raise_for_error()


# -- the client ------------------------------------------------------------------------------------------------------------------


def test_a_closed_client_refuses_with_a_reason(fresh: Callable[..., LocalClient]) -> None:
    client = fresh()
    (row,) = client.submit(ask("one", 4000))
    row.read(4, WAIT_S)
    client.close()
    client.close()
    (log,) = finish([row])
    assert isinstance(log[-1], ev.Cancelled) and token_ids(log)
    with pytest.raises(EngineDead) as caught:
        client.submit(ask("one"))
    assert caught.value.hint and isinstance(caught.value, MlxnbError)
    assert client.status()["state"] == "closed" and client.unload() == [] and client.cancel() == 0 and client.live() == []


def test_a_client_that_never_started_can_be_closed(fresh: Callable[..., LocalClient]) -> None:
    client = fresh()
    assert client.status()["state"] == "not started"
    client.close()


def test_a_log_outlives_its_engine(fresh: Callable[..., LocalClient]) -> None:
    client = fresh()
    (row,) = client.submit(ask("one", 5))
    finish([row])
    before = row.read()
    client.close()
    assert row.read() == before and list(row.events()) == before


# -- no pickle (S5) ---------------------------------------------------------------------------------------------------------------


def test_the_watch_for_pickles_sees_one() -> None:
    import no_pickle as watch

    pickle.loads(pickle.dumps(SamplingSpec))
    assert seen() == ["mlxnb_engine.types.SamplingSpec"]
    watch.watch()


def test_an_engine_that_could_not_start_says_why_every_time(fresh: Callable[..., LocalClient], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mode: str) -> None:
        raise ModelError("There is no such BLAS.", "Choose blas=auto.")

    monkeypatch.setattr("mlxnb_engine.blas.preload", refuse)
    client = fresh()
    for _ in range(2):
        row = client.submit(ask("hi"))[0]
        assert row.wait(WAIT_S) is not None
        end = row.terminal
        assert isinstance(end, ev.Failed) and (end.error, end.message) == ("model", "There is no such BLAS."), end
    assert "no such BLAS" in client.status()["error"]


# -- what a hostile or unlucky person found -----------------------------------------------------------------------------------


class Panic(BaseException):
    """As a native library raises it: no Exception."""


def test_a_panic_in_the_tokenizer_fails_its_own_request_only(fresh: Callable[..., LocalClient], monkeypatch: pytest.MonkeyPatch) -> None:
    client = fresh()
    assert len(answer_ids(client, ask("warm", 2))) == 2
    preparer = engine_of(client)._lanes[0].resident.preparer
    real = preparer.prepare

    def prepare(request: CompletionRequest) -> Any:
        if request.text == "bomb":
            raise Panic("stack exhausted")
        return real(request)

    monkeypatch.setattr(type(preparer), "prepare", lambda self, request: prepare(request))
    (bad,), (good,) = client.submit(ask("bomb", 2)), client.submit(ask("fine", 2))
    finish([bad, good])
    assert isinstance(bad.terminal, ev.Failed) and "Panic" in bad.terminal.message
    assert isinstance(good.terminal, ev.Finished)
    assert client.unload("") and client.status()["state"] == "ready", "the model stayed in use"


@pytest.mark.parametrize("where", ["mlxnb_engine.loader.load", "mlxnb_engine.binding.ModelGraph"])
def test_a_panic_while_loading_harms_no_other_model(
    fresh: Callable[..., LocalClient], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    client = fresh()
    (neighbour,) = client.submit(ask("one", 300))
    neighbour.read(4, WAIT_S)

    def explode(*args: Any, **more: Any) -> None:
        raise Panic("bad charsmap")

    monkeypatch.setattr(where, explode)
    (victim,) = client.submit(ask("two", 2, model=str(write_model(tmp_path / "other", seed=3))))
    finish([victim, neighbour])
    assert isinstance(victim.terminal, ev.Failed) and isinstance(neighbour.terminal, ev.Finished)
    assert client.status()["state"] == "ready"


def test_one_model_under_several_spellings_is_loaded_once(fresh: Callable[..., LocalClient], tiny_model: Path) -> None:
    client = fresh()
    spellings = ["", str(tiny_model), f"{tiny_model}/", f"{tiny_model}/../{tiny_model.name}"]
    for spelling in spellings:
        assert answer_ids(client, ask("same", 3, model=spelling))
    assert len(client.status()["models"]) == 1


def test_an_explicit_dtype_does_not_leak_into_requests_that_name_none(fresh: Callable[..., LocalClient]) -> None:
    client = fresh()
    other = client.load("", "bfloat16")
    assert isinstance(other.wait(WAIT_S), ev.Finished)
    assert answer_ids(client, ask("plain", 2))
    weights = sorted(model["weights"] for model in client.status()["models"])
    assert len(weights) == 2 and weights[0].startswith("bfloat16") and weights[1].startswith("float32")


def test_new_weights_under_the_same_path_are_loaded(fresh: Callable[..., LocalClient], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", seed=1)
    client = fresh(folder)
    first = answer_ids(client, ask("hello there", 8))
    assert answer_ids(client, ask("hello there", 8)) == first
    write_model(folder, seed=2)
    second = answer_ids(client, ask("hello there", 8))
    assert second != first and len(client.status()["models"]) == 1
    assert second == answer_ids(fresh(folder), ask("hello there", 8))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json", "tokenizer.json"])
def test_a_pipe_in_a_model_folder_is_refused_and_never_read(fresh: Callable[..., LocalClient], tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "piped")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    client = fresh()
    (row,) = client.submit(ask("x", 2, model=str(folder)))
    finish([row])
    assert isinstance(row.terminal, ev.Failed) and row.terminal.error == "model", row.terminal
    assert answer_ids(client, ask("others", 2))


@pytest.mark.parametrize("damage", ["id", "added id", "growth"])
def test_a_tokenizer_bomb_is_refused_before_the_library_sees_it(
    fresh: Callable[..., LocalClient], tmp_path: Path, damage: str
) -> None:
    folder = write_model(tmp_path / "bomb")
    spec = json.loads((folder / "tokenizer.json").read_text())
    if damage == "id":
        spec["model"]["vocab"]["zzz"] = 2**31
    elif damage == "added id":
        spec["added_tokens"][0]["id"] = 2**40
    else:
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
        spec["normalizer"] = {"type": "Sequence", "normalizers": [step] * 10}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (row,) = fresh().submit(ask("aaaaaaaaaa", 2, model=str(folder)))
    finish([row])
    assert isinstance(row.terminal, ev.Failed) and "tokenizer" in row.terminal.message.lower(), row.terminal


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ("x" * 20_000,)},
        {"stop": tuple(f"s{i}" for i in range(300))},
        {"temp": 10**400},
        {"top_p": -(10**400)},
        {"logit_bias": ((3, 10**400),)},
        {"logit_bias": ((3, 1e300),)},
        {"repetition_context_size": 10**30},
        {"repetition_penalty": 1e-300},
        {"presence_penalty": -1e300},
    ],
    ids=str,
)
def test_numbers_and_stops_beyond_sense_are_refused_at_submit(client: LocalClient, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        client.submit(ask("x", 2, **fields))
