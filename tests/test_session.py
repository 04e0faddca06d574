"""`Generation`: an append-only log with one terminal event, many readers, and ends that race."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from engine_rig import Clock, log_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxnb_engine import events as ev
from mlxnb_engine.errors import ERROR_KINDS, Cancelled, EngineDead, MlxnbError, RequestError
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, RequestId

WATCHDOG_S = 30.0


def generation(clock: Callable[[], float] | None = None) -> Generation:
    request = CompletionRequest(RequestId("r"), "m", text="hello")
    return Generation(request, 2, clock) if clock else Generation(request, 2)


def word(text: str) -> Callable[[int, float], ev.Event]:
    return lambda seq, t: ev.Tokens(seq, t, (), text)


def finished(text: str = "") -> Callable[[int, float], ev.Event]:
    return lambda seq, t: ev.Finished(seq, t, "stop", text, {})


def together(*work: Callable[[], None]) -> None:
    """Run these at once, each in its own thread, and raise what one of them raised; a watchdog bounds the wait."""
    gate = threading.Barrier(len(work))
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        gate.wait(WATCHDOG_S)
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


# -- the log ---------------------------------------------------------------------------------------------------------


def test_seq_is_the_position_in_the_log() -> None:
    row = generation()
    for i in range(5):
        assert row.emit(word(str(i))).seq == i
    row.end(finished("01234"))
    log = row.read()
    assert [e.seq for e in log] == list(range(6))
    assert log_problems(log) == []


def test_nothing_follows_the_terminal_event() -> None:
    row = generation()
    row.end(finished())
    with pytest.raises(RuntimeError, match="event after Finished"):
        row.emit(word("late"))
    assert not row.end(finished("again")) and not row.fail(EngineDead("late"))
    assert row.read() == [row.terminal]


def test_a_maker_that_raises_leaves_the_log_as_it_was() -> None:
    row = generation()

    def broken(seq: int, t: float) -> ev.Event:
        raise ValueError("no event")

    with pytest.raises(ValueError, match="no event"):
        row.emit(broken)
    assert row.read() == []
    assert row.emit(word("a")).seq == 0


def test_every_reader_sees_the_whole_log_at_its_own_pace() -> None:
    row = generation()
    seen: dict[str, list[ev.Event]] = {}

    def write() -> None:
        for i in range(400):
            row.emit(word(f"{i} "))
        row.end(finished("".join(f"{i} " for i in range(400))))

    def follow(name: str) -> Callable[[], None]:
        def job() -> None:
            seen[name] = list(row.events())

        return job

    def page(name: str, most: int) -> Callable[[], None]:
        def job() -> None:
            mine: list[ev.Event] = []
            while not (mine and mine[-1].terminal):
                mine += row.read(len(mine), 1.0)[:most]
            seen[name] = mine

        return job

    together(write, follow("a"), follow("b"), follow("c"), page("d", 1), page("e", 7), page("f", 1000))
    log = row.read()
    assert len(log) == 401 and log_problems(log) == []
    assert set(seen) == set("abcdef")
    assert all(mine == log for mine in seen.values())
    assert list(row.events(400)) == [row.terminal], "a reader may start anywhere"


def test_a_reader_that_stops_reading_holds_up_nobody() -> None:
    row = generation()
    stuck = row.events()
    row.emit(word("a"))
    assert next(stuck).seq == 0
    for _ in range(1000):
        row.emit(word("b"))
    row.end(finished("a" + 1000 * "b"))
    assert [e.seq for e in stuck] == list(range(1, 1002))


def test_what_was_read_is_not_changed_by_later_events() -> None:
    row = generation()
    row.emit(word("a"))
    before = row.read()
    row.emit(word("b"))
    before.clear()
    assert len(row.read()) == 2 and len(row.read(1)) == 1 and row.read(2) == []


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_read_and_wait_give_up_at_their_time_out() -> None:
    row = generation()
    assert row.read(0) == [] and row.read(0, 0.01) == [] and row.wait(0.01) is None
    row.emit(word("a"))
    assert row.read(1, 0.01) == [] and row.wait(0.0) is None and not row.done


def test_a_waiting_reader_is_woken_by_the_next_event() -> None:
    row = generation()
    got: list[ev.Event] = []
    ended: list[ev.Event | None] = []

    def first_event() -> None:
        got.extend(row.read(0, WATCHDOG_S))

    def end() -> None:
        ended.append(row.wait(WATCHDOG_S))

    def write() -> None:
        row.emit(word("a"))
        row.end(finished("a"))

    together(first_event, end, write)
    assert got and got[0].seq == 0
    assert ended == [row.terminal]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_of_many_threads_that_end_a_row_exactly_one_does() -> None:
    for _ in range(60):
        row = generation()
        won: list[str] = []

        def attempt(name: str, row: Generation = row, won: list[str] = won) -> Callable[[], None]:
            def job() -> None:
                ended = row.end(finished(name)) if name < "d" else row.fail(EngineDead(name), name)
                if ended:
                    won.append(name)

            return job

        together(*(attempt(name) for name in "abcdef"))
        log = row.read()
        assert len(won) == 1 and len(log) == 1
        assert won[0] == log[0].to_dict()["text"]


def test_a_writer_that_loses_the_race_against_an_end_is_told_so() -> None:
    for _ in range(30):
        row = generation()
        written: list[str] = []

        def write(row: Generation = row, written: list[str] = written) -> None:
            try:
                for i in range(10_000):
                    row.emit(word("x"))
                    written.append("x")
                    if i == 9_999:
                        row.end(finished())
            except RuntimeError:
                return

        def stop(row: Generation = row) -> None:
            row.read(3, WATCHDOG_S)
            row.fail(EngineDead("closed"))

        together(write, stop)
        log = row.read()
        assert [e.terminal for e in log] == [False] * len(written) + [True]


def test_the_log_check_sees_a_broken_log() -> None:
    good = [ev.Started(0, 0.0, "m", 1, 2, True), ev.Tokens(1, 0.1, (), "a"), ev.Finished(2, 0.2, "stop", "a", {})]
    assert log_problems(good) == []
    late = ev.Cancelled(3, 0.3, "a")
    broken = {
        "two ends": [*good, late],
        "event after the end": [*good, ev.Tokens(3, 0.3, (), "")],
        "no end": good[:2],
        "a gap": [good[0], ev.Tokens(2, 0.1, (), "a"), ev.Finished(3, 0.2, "stop", "a", {})],
        "lost text": [good[0], ev.Finished(1, 0.2, "stop", "a", {})],
        "started twice": [good[0], ev.Started(1, 0.0, "m", 1, 2, True), ev.Finished(2, 0.2, "stop", "", {})],
        "time": [ev.Started(0, 5.0, "m", 1, 2, True), ev.Finished(1, 0.2, "stop", "", {})],
    }
    for name, log in broken.items():
        assert log_problems(log), name


class LeakyEnd(Generation):
    """Ends without looking whether it had ended: what `end` must never do."""

    def end(self, make: Callable[[int, float], ev.Event]) -> bool:
        self._log.append(make(len(self._log), 0.0))
        return True


def test_the_race_test_would_catch_an_end_that_does_not_look() -> None:
    row = LeakyEnd(CompletionRequest(RequestId("r"), "m", text="hello"))
    row.end(finished())
    row.end(finished())
    assert "2 terminal events" in log_problems(row.read())


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_an_error_comes_back_with_its_type_its_message_and_its_hint(kind: str) -> None:
    row = generation()
    error = ERROR_KINDS[kind]("It broke.", "Do this.")
    assert row.fail(error, "so far", {"completion_tokens": 2})
    end = row.terminal
    if isinstance(error, Cancelled):
        assert isinstance(end, ev.Cancelled) and end.text == "so far" and end.usage == {"completion_tokens": 2}
        with pytest.raises(Cancelled):
            row.raise_for_error()
        return
    assert isinstance(end, ev.Failed) and end.text == "so far" and end.usage == {"completion_tokens": 2}
    with pytest.raises(ERROR_KINDS[kind]) as caught:
        row.raise_for_error()
    assert type(caught.value) is ERROR_KINDS[kind]
    assert (caught.value.message, caught.value.hint) == ("It broke.", "Do this.")


def test_an_unforeseen_error_keeps_its_name() -> None:
    row = generation()
    row.fail(ZeroDivisionError("division by zero"))
    with pytest.raises(MlxnbError, match="ZeroDivisionError: division by zero"):
        row.raise_for_error()


def test_a_row_that_lives_or_finished_raises_nothing() -> None:
    row = generation()
    row.raise_for_error()
    row.end(finished())
    row.raise_for_error()


def test_a_request_error_is_a_value_error_too() -> None:
    assert issubclass(RequestError, ValueError)


# -- cancel and time ---------------------------------------------------------------------------------------------------


def test_cancel_asks_and_wakes_and_changes_nothing_by_itself() -> None:
    row = generation()
    row.cancel()
    woken: list[int] = []
    row.on_cancel(lambda: woken.append(1))
    row.cancel()
    row.cancel()
    assert row.cancel_requested and len(woken) == 2 and not row.done and row.read() == []


def test_times_are_counted_from_the_submit() -> None:
    clock = Clock()
    clock.now = 100.0
    row = generation(clock)
    clock.now = 101.0
    row.emit(lambda s, t: ev.Started(s, t, "m", 3, 1, False))
    clock.now = 103.5
    row.emit(word("a"))
    clock.now = 104.0
    row.emit(word("b"))
    clock.now = 109.0
    assert row.now == 9.0 and row.timing.ended is None
    row.end(finished("ab"))
    clock.now = 500.0
    assert (row.timing.started, row.timing.first_token, row.timing.ended) == (1.0, 3.5, 9.0)
    assert row.id == "r.2"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["word", "load", "start", "prefill", "cancel", "end", "fail"]), max_size=14))
def test_any_order_of_calls_leaves_a_log_that_json_can_carry(calls: list[str]) -> None:
    row = generation()
    ended = False
    record = ev.TokenRecord(1, "a\u2028\x00", "sampled", 0.5, -0.1, 0, (ev.Alternative(1, "a", -0.1),))
    makers: dict[str, Callable[[int, float], ev.Event]] = {
        "word": lambda s, t: ev.Tokens(s, t, (record,), "a"),
        "load": lambda s, t: ev.LoadProgress(s, t, "locating", 1, 0),
        "start": lambda s, t: ev.Started(s, t, "m", 1, 2**64 - 1, True),
        "prefill": lambda s, t: ev.PrefillProgress(s, t, 1, 2),
    }
    for call in calls:
        if call == "cancel":
            row.cancel()
        elif call in ("end", "fail"):
            assert (row.end(finished()) if call == "end" else row.fail(ValueError("x"))) is not ended
            ended = True
        elif ended:
            with pytest.raises(RuntimeError):
                row.emit(makers[call])
        else:
            row.emit(makers[call])
    log = row.read()
    assert row.done is ended and [e.seq for e in log] == list(range(len(log)))
    assert [json.loads(json.dumps(e.to_dict()))["kind"] for e in log] == [e.kind for e in log]


# -- interrupts --------------------------------------------------------------------------------------------------------------


class _Flaky(Generation):
    """Waits as a Condition does, its lock shared with the writer: the control."""

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request)
        self._writing = self._news = threading.Condition()  # type: ignore[assignment]

    def wait(self, timeout_s: float | None = None) -> ev.Event | None:
        with self._news:
            self._news.wait_for(lambda: self.done, timeout_s)
        return self.terminal


def _interrupted_at(row: Generation, line: int) -> BaseException | None:
    """Wait, and be interrupted before the line-th line of Python that the wait runs; what it raised, None if it runs fewer."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal left
        left -= event == "line"
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        row.wait(0.001)
    except BaseException as error:
        return error
    finally:
        sys.settrace(before)
    return None


def _faults(make: Callable[[], Generation]) -> list[str]:
    """What goes wrong if the wait is interrupted at each of its lines in turn: another error, or a writer that is stuck."""
    faults = []
    for line in range(1, 1000):
        row = make()
        raised = _interrupted_at(row, line)
        if raised is None:
            assert line > 10
            return faults
        if not isinstance(raised, KeyboardInterrupt):
            faults.append(f"line {line}: {raised!r}")
        writer = threading.Thread(target=row.emit, args=(finished("done"),), daemon=True)
        writer.start()
        writer.join(0.5)
        if writer.is_alive():
            faults.append(f"line {line}: the writer is stuck")
    raise AssertionError("the wait never ended")


def test_a_wait_interrupted_anywhere_raises_that_and_leaves_the_log_to_its_writer() -> None:
    assert _faults(generation) == []


def test_a_wait_that_an_interrupt_can_break_is_caught() -> None:
    assert _faults(lambda: _Flaky(generation().request))


def test_waits_that_time_out_leave_nothing_behind() -> None:
    row = generation()
    for _ in range(20):
        assert row.wait(0.0001) is None and row.read(0, 0.0001) == []
    assert row._waiters == []
