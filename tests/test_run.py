"""A Run says at every moment what its event log says, costs what is new, and ends as plain data."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest
from fake_client import Failure, FakeClient
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxnb.record import plain
from mlxnb.run import STATUSES, LoadRun, Run, RunGroup, finish_all
from mlxnb.schema import RUN_MIME
from mlxnb_engine import events as ev
from mlxnb_engine.errors import Cancelled, ModelError
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, Message, RequestId, SamplingSpec


def generation(text: str | None = None, **options: Any) -> Generation:
    messages = None if text is not None else (Message("system", "Be short."), Message("user", "Why?"))
    return Generation(CompletionRequest(RequestId("r1"), "m", messages=messages, text=text, **options))


def say(log: Generation, *pieces: str) -> None:
    for piece in pieces:
        log.emit(lambda seq, t, p=piece: ev.Tokens(seq, t, (ev.TokenRecord(7, p, "sampled", t),), p))


def start(log: Generation, seed: int = 5) -> None:
    log.emit(lambda seq, t: ev.Started(seq, t, "m", 11, seed, False))


def finish(log: Generation, text: str, reason: str = "stop", **usage: Any) -> None:
    log.emit(lambda seq, t: ev.Finished(seq, t, reason, text, {"completion_tokens": 3, "finish_reason": reason, **usage}))


def test_text_grows_with_the_log_and_ends_as_the_terminal_event_says() -> None:
    log = generation()
    run = Run(log)
    assert (run.text, run.done, run.status, run.finish_reason) == ("", False, "waiting", None)
    start(log)
    say(log, "Be", "cause")
    assert (run.text, run.token_count, run.seed) == ("Because", 2, 5)
    finish(log, "Because.")
    assert (run.text, run.done, run.status, run.finish_reason, run.token_count) == ("Because.", True, "done", "stop", 3)


def test_reading_costs_only_what_is_new() -> None:
    log = generation()
    run = Run(log)
    asked: list[int] = []
    read = log.read

    def counting(since: int = 0, timeout_s: float | None = 0.0) -> list[ev.Event]:
        asked.append(since)
        return read(since, timeout_s)

    log.read = counting  # type: ignore[method-assign]
    for count in range(50):
        say(log, "x")
        assert run.text == "x" * (count + 1)
        assert len(run._pieces) == 1
    assert asked == list(range(50))
    finish(log, "x" * 50)
    assert run.done
    seen = len(asked)
    assert run.text == "x" * 50 and run.usage and run.tokens
    assert len(asked) == seen, "a finished run reads its log again"


def test_every_phase_has_its_status_and_progress() -> None:
    log = generation()
    run = Run(log)
    seen = [run.status]
    log.emit(lambda seq, t: ev.LoadProgress(seq, t, "download", 5, 10))
    seen.append(run.status)
    assert isinstance(run.progress, ev.LoadProgress)
    log.emit(lambda seq, t: ev.PrefillProgress(seq, t, 128, 300))
    seen.append(run.status)
    assert isinstance(run.progress, ev.PrefillProgress)
    say(log, "a")
    seen.append(run.status)
    assert run.progress is None
    log.emit(lambda seq, t: ev.Cancelled(seq, t, "a"))
    seen.append(run.status)
    assert seen == ["waiting", "loading", "prefill", "running", "stopped"]
    assert set(seen) <= set(STATUSES)


def test_messages_are_the_prompt_and_the_whole_turn_with_its_prefill() -> None:
    log = generation(prefill="Sure: ")
    finish(log, "yes")
    run = Run(log)
    assert run.answer == "Sure: yes"
    assert run.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Sure: yes"},
    ]
    assert (run.prompt, Run(generation(text="Once")).prompt, Run(generation(text="Once")).messages) == ("Why?", "Once", [])


def test_iterating_yields_exactly_the_text_from_any_number_of_readers() -> None:
    log = generation()
    run = Run(log)
    read: list[list[str]] = [[], []]

    def reader(mine: list[str]) -> None:
        mine.extend(run)

    threads = [threading.Thread(target=reader, args=(mine,)) for mine in read]
    for thread in threads:
        thread.start()
    say(log, "a", "", "b")
    finish(log, "abc")  # the last piece was held back and comes with the end
    for thread in threads:
        thread.join(5)
    assert read == [["a", "b", "c"], ["a", "b", "c"]]
    assert list(run) == ["a", "b", "c"]


def test_iterating_a_failed_run_raises_and_a_stopped_one_ends_quietly() -> None:
    failed, stopped = generation(), generation()
    say(failed, "a")
    failed.fail(ModelError("no finite score", "try float32"), "a")
    say(stopped, "b")
    stopped.emit(lambda seq, t: ev.Cancelled(seq, t, "b"))
    pieces = []
    with pytest.raises(ModelError, match="no finite score"):
        for piece in Run(failed):
            pieces.append(piece)
    assert pieces == ["a"]
    assert list(Run(stopped)) == ["b"]


def test_an_interrupt_while_iterating_stops_the_run() -> None:
    log = generation()

    def interrupted(since: int = 0) -> Any:
        raise KeyboardInterrupt
        yield

    log.events = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(Run(log))
    assert log.cancel_requested


def test_leaving_a_loop_early_leaves_the_run_alone() -> None:
    log = generation()
    say(log, "a", "b")
    for _ in Run(log):
        break
    assert not log.cancel_requested


def test_a_typed_error_carries_its_run() -> None:
    log = generation()
    say(log, "half")
    log.emit(lambda seq, t: ev.Cancelled(seq, t, "half"))
    run = Run(log)
    with pytest.raises(Cancelled) as caught:
        run.raise_for_error()
    assert caught.value.run is run  # type: ignore[attr-defined]
    assert run.error is None
    assert run.finish_reason == "cancelled"


def test_an_interrupt_while_waiting_stops_every_row_and_is_raised_again() -> None:
    logs = [generation(), generation()]
    runs = [Run(log) for log in logs]
    real_wait, waits = logs[0].wait, []

    def wait(timeout_s: float | None = None) -> ev.Event | None:
        waits.append(timeout_s)
        if len(waits) == 1:
            raise KeyboardInterrupt
        return real_wait(timeout_s)

    logs[0].wait = wait  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        finish_all(runs)
    assert [log.cancel_requested for log in logs] == [True, True]
    assert waits[1] is not None and waits[1] <= 0.1


def test_usage_is_complete_at_the_end_and_honest_before() -> None:
    log = generation()
    run = Run(log)
    start(log)
    say(log, "a", "b")
    assert run.usage == {"prompt_tokens": 11, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
    finish(log, "ab", prompt_tokens=11, prompt_tokens_details={"cached_tokens": 0})
    assert run.usage["prompt_tokens_details"] == {"cached_tokens": 0}
    bare = generation()
    bare.fail(ModelError("x"))
    assert Run(bare).usage == {"completion_tokens": 0, "finish_reason": "error"}


def test_the_timeline_is_in_order_of_time_and_has_every_token() -> None:
    log = generation()
    for done in (1, 5, 9):
        log.emit(lambda seq, t, d=done: ev.LoadProgress(seq, t, "hash", d, 9))
    start(log)
    say(log, "a", "b")
    finish(log, "ab")
    line = Run(log).timeline
    assert [entry["kind"] for entry in line] == ["load", "started", "token", "token", "finished"]
    assert [entry["t"] for entry in line] == sorted(entry["t"] for entry in line)
    assert line[0]["done"] == 9 and line[0]["until"] >= line[0]["t"]


def test_a_record_is_strict_json_whatever_the_request_holds() -> None:
    sampling = SamplingSpec(temp=0.7, seed=2**64 - 1, logprobs=2, logit_bias=((3, 1.5),))
    log = generation(prefill="P", stop=("\n",), sampling=sampling, samples=2)
    start(log)
    token = ev.TokenRecord(9, "\ud800x", "sampled", 0.25, -0.5, 0, (ev.Alternative(9, "x", -math.inf),))
    log.emit(lambda seq, t: ev.Tokens(seq, t, (token,), "\ud800x"))
    log.emit(lambda seq, t: ev.Finished(seq, t, "stop", "\ud800x", {"completion_tokens": 1}, "\n"))
    record = Run(log, {"temp": 0.7, "what": object(), "nan": math.nan}).to_dict()
    back = json.loads(json.dumps(record, allow_nan=False).encode("utf-8"))
    assert back == record
    assert record["schema"] == "mlxnb.run/1"
    assert record["tokens"] == [
        {
            "id": 9,
            "text": "\ufffdx",
            "origin": "sampled",
            "t": 0.25,
            "logprob": -0.5,
            "rank": 0,
            "top": [{"id": 9, "text": "x", "logprob": "-inf"}],
        }
    ]
    assert record["prompt"]["prefill"] == "P" and record["prompt"]["messages"][1] == {"role": "user", "content": "Why?"}
    assert record["request"]["sampling"]["logit_bias"] == [[3, 1.5]] and record["request"]["stop"] == ["\n"]
    assert (record["status"], record["stop"], record["labels"]["nan"]) == ("done", "\n", "nan")


def test_a_record_of_a_failed_run_says_why_and_keeps_the_text() -> None:
    log = generation()
    say(log, "half")
    log.fail(ModelError("no finite score", "try float32"), "half")
    record = Run(log).to_dict()
    assert record["error"] == {"kind": "model", "message": "no finite score", "hint": "try float32"}
    assert (record["text"], record["status"], record["finish_reason"]) == ("half", "failed", "error")


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner) | st.frozensets(st.integers())


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(), containers, max_leaves=12))
def test_plain_makes_strict_json_of_any_value(value: Any) -> None:
    json.dumps(plain(value), allow_nan=False).encode("utf-8")


def test_a_group_is_a_sequence_and_becomes_a_frame() -> None:
    client = FakeClient(failures=[Failure(ModelError("broken row"), index=1)])
    try:
        request = CompletionRequest(RequestId("g"), "m", text="one two three", samples=3, sampling=SamplingSpec(seed=4))
        group = RunGroup(Run(one, {"temp": 0.5, "text": one.index}) for one in client.submit(request))
        assert group.wait(5)
    finally:
        client.close()
    assert (len(group), group[-1] is group[2], len(group[:2]), isinstance(group[:2], RunGroup)) == (3, True, 2, True)
    frame = group.to_frame()
    assert list(frame.columns) == [
        "temp",
        "text_",
        "text",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "seed",
        "seconds",
        "error",
    ]
    assert list(frame["seed"]) == [4, 5, 6]
    assert list(frame["finish_reason"]) == ["stop", "error", "stop"]
    assert frame["error"][1] == "broken row" and frame["error"].isna().tolist() == [True, False, True]
    assert [type(error) for error in group.errors] == [ModelError]
    with pytest.raises(ModelError):
        group.raise_for_error()


def test_waiting_for_a_group_gives_up_after_the_time_given() -> None:
    group = RunGroup([Run(generation()), Run(generation())])
    assert group.wait(0.01) is False
    group.cancel()
    assert all(run.generation.cancel_requested and run.stopping for run in group)


@pytest.mark.parametrize("kind", [Run, LoadRun])
def test_a_run_shows_itself_as_html_and_as_the_answer(kind: type[Run]) -> None:
    log = generation()
    say(log, "**x**")
    finish(log, "**x**")
    bundle = kind(log)._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"} | (set() if kind is LoadRun else {RUN_MIME})
    assert kind is LoadRun or (bundle["text/plain"] == "**x**" and "<strong>x</strong>" in bundle["text/html"])
    assert "Run r1.0" in repr(Run(log))


def _interrupted(log: Generation, name: str) -> None:
    def interrupt(*args: Any) -> Any:
        setattr(log, name, real)
        raise KeyboardInterrupt

    real = getattr(log, name)
    setattr(log, name, interrupt)


@pytest.mark.parametrize(
    ("name", "act", "stops"),
    [
        ("wait", lambda run: run.result(), True),
        ("wait", lambda run: finish_all([run]), True),
        ("events", lambda run: list(run), True),
        ("wait", lambda run: run.wait(), False),
        ("wait", lambda run: RunGroup([run]).wait(), False),
    ],
)
def test_an_interrupt_is_shown_in_one_line_wherever_one_waits(name: str, act: Any, stops: bool) -> None:
    log = generation()
    _interrupted(log, name)
    with pytest.raises(KeyboardInterrupt) as caught:
        act(Run(log))
    (line,) = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert line.startswith("KeyboardInterrupt: ") and ("stopped" in line) is stops
    assert log.cancel_requested is stops
