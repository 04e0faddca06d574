"""Interrupts: real SIGINT at this process, and at a real kernel. The scripted engine never ends a held row by itself."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient
from IPython.core.interactiveshell import InteractiveShell

from mlxnb import interrupts, runtime
from mlxnb.interrupts import Guard, Tail
from mlxnb_engine import events as ev
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, RequestId

CANCELLED, FINISHED = "cancelled", "finished"


@pytest.fixture(autouse=True)
def no_recent_interrupt() -> Iterator[None]:
    """Each test begins long after any interrupt, and must leave the handler as it found it, but for a tail."""
    interrupts._last_interrupt = float("-inf")
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert before is (after.before if isinstance(after, Tail) else after)


def request(name: str, text: str = "one two three") -> CompletionRequest:
    return CompletionRequest(RequestId(name), "fake", text=text)


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def later(act: Callable[[], None], when: Callable[[], bool]) -> threading.Thread:
    """Do something from another thread as soon as a condition holds."""

    def work() -> None:
        pause = threading.Event()
        while not when():
            pause.wait(0.002)
        act()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def has_token(generation: Generation) -> Callable[[], bool]:
    return lambda: any(isinstance(event, ev.Tokens) for event in generation.read())


def end_of(generation: Generation) -> str:
    end = generation.wait(10)
    assert end is not None, f"{generation.id} has no end"
    return end.kind


# -- the guard ---------------------------------------------------------------------------------------------------------------


def test_an_interrupt_cancels_these_rows_and_no_other() -> None:
    client = FakeClient(hold=1)
    (other,), (mine,) = client.submit(request("other")), client.submit(request("mine"))
    with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
        later(interrupt, has_token(mine))
        guard.wait([mine])
    assert end_of(mine) == CANCELLED and not other.cancel_requested
    client.release()
    assert end_of(other) == FINISHED
    client.close()


def test_without_an_interrupt_nothing_happens() -> None:
    client = FakeClient()
    rows = client.submit(request("a"))
    with Guard(client.cancel) as guard:
        guard.wait(rows)
    assert end_of(rows[0]) == FINISHED and client.cancels == []
    client.close()


def test_a_second_interrupt_within_a_second_cancels_all() -> None:
    client = FakeClient(hold=1)
    (other,), (mine,) = client.submit(request("other")), client.submit(request("mine"))
    with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
        later(interrupt, has_token(mine))
        try:
            guard.wait([mine])
        finally:
            interrupt()  # while the partial answer is being published: noted, not raised
    assert (end_of(mine), end_of(other)) == (CANCELLED, CANCELLED)
    client.close()


def test_two_interrupted_cells_within_a_second_are_a_double_interrupt() -> None:
    client = FakeClient(hold=1)
    (other,) = client.submit(request("other"))
    for name, expected in (("first", False), ("second", True)):
        (mine,) = client.submit(request(name))
        with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
            later(interrupt, has_token(mine))
            guard.wait([mine])
        assert other.cancel_requested is expected
    client.close()


def test_two_interrupts_more_than_a_second_apart_are_two_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(hold=1)
    (other,) = client.submit(request("other"))
    for name in ("first", "second"):
        (mine,) = client.submit(request(name))
        interrupts._last_interrupt -= 2.0
        with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
            later(interrupt, has_token(mine))
            guard.wait([mine])
    assert not other.cancel_requested
    client.close()


def test_a_late_interrupt_changes_nothing() -> None:
    client = FakeClient(hold=2)
    (other,) = client.submit(request("other"))
    mine = client.submit(request("mine", "word"))
    with Guard(client.cancel) as guard:
        guard.wait(mine)
        interrupt()
    assert end_of(mine[0]) == FINISHED and not other.cancel_requested
    client.close()


def test_an_interrupt_before_the_wait_is_kept_for_it_and_loses_no_row() -> None:
    client = FakeClient(hold=1)
    with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
        interrupt()
        rows = client.submit(request("mine"))
        assert guard.interrupted
        guard.wait(rows)
    assert end_of(rows[0]) == CANCELLED
    client.close()


def test_the_row_may_outlive_the_grace_of_a_tenth_of_a_second() -> None:
    """A row whose step in flight takes long: the cell gets its prompt back, the row ends at its next safe point."""
    row = Generation(request("slow"))
    with pytest.raises(KeyboardInterrupt), Guard(lambda: None) as guard:
        later(interrupt, lambda: True)
        guard.wait([row])
    assert row.cancel_requested and not row.done


def test_a_cell_that_only_waits_for_others_cancels_none_at_the_first_interrupt() -> None:
    client = FakeClient(hold=1)
    rows = client.submit(request("background"))
    with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
        later(interrupt, has_token(rows[0]))
        guard.wait(rows, cancel=False)
    assert not rows[0].cancel_requested
    client.close()


def test_a_storm_of_interrupts_raises_once_and_leaves_the_handler_as_it_was() -> None:
    client = FakeClient(hold=1)
    for number in range(5):
        stop = threading.Event()
        raised = 0

        def storm(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                interrupt()
                stop.wait(0.001)

        with Guard(client.cancel) as guard:
            rows = client.submit(request(f"r{number}"))
            thread = threading.Thread(target=storm, daemon=True)
            thread.start()
            try:
                guard.wait(rows)
            except KeyboardInterrupt:
                raised += 1
            end_of(rows[0])  # stands for publishing: it must not be cut short
            stop.set()
            thread.join()
        assert raised == 1 and end_of(rows[0]) == CANCELLED
    client.close()


def test_a_signal_right_after_a_stopped_cell_raises_nothing_and_stops_all() -> None:
    client = FakeClient(hold=1)
    (other,), (mine,) = client.submit(request("other")), client.submit(request("mine"))
    with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
        later(interrupt, has_token(mine))
        guard.wait([mine])
    assert not other.cancel_requested
    interrupt()
    assert end_of(other) == CANCELLED
    client.close()


def test_a_second_after_a_stopped_cell_signals_reach_the_old_handler_again() -> None:
    client = FakeClient(hold=1)
    (other,), (mine,) = client.submit(request("other")), client.submit(request("mine"))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
        later(interrupt, has_token(mine))
        guard.wait([mine])
    interrupts._last_interrupt -= 2.0
    with pytest.raises(KeyboardInterrupt):
        interrupt()
        threading.Event().wait(1)
    assert signal.getsignal(signal.SIGINT) is before and not other.cancel_requested
    client.close()


def test_outside_the_main_thread_a_guard_waits_and_leaves_signals_alone() -> None:
    client = FakeClient()
    seen: list[str] = []

    def work() -> None:
        with Guard(client.cancel) as guard:
            rows = client.submit(request("r"))
            guard.wait(rows)
            seen.append(end_of(rows[0]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [FINISHED]
    client.close()


def test_a_stop_from_elsewhere_lets_a_cell_go_that_may_leave_while_the_step_in_flight_goes_on() -> None:
    step_over = threading.Event()
    client = FakeClient(between=lambda: has_token(client.generations[0])() and step_over.wait(10))
    rows = client.submit(request("a"))
    with Guard(client.cancel) as guard:
        later(client.cancel, has_token(rows[0]))
        assert guard.wait(rows, leave=True) is False
    assert rows[0].cancel_requested and not rows[0].done
    step_over.set()
    assert end_of(rows[0]) == CANCELLED
    client.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_is_raised_where_python_drops_it_still_stops_the_cell() -> None:
    """An exception of a finaliser goes nowhere; a handler may run in any."""
    client = FakeClient(hold=1)
    rows = client.submit(request("a"))

    class Dropped:
        def __del__(self) -> None:
            interrupt()

    dropped = [Dropped()]
    with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
        guard.wait(rows, poll=lambda: dropped.clear() if has_token(rows[0])() else time.sleep(0.01))
    assert end_of(rows[0]) == CANCELLED
    client.close()


def test_a_cell_does_not_leave_while_one_of_its_rows_goes_on() -> None:
    client = FakeClient(hold=1)
    (stopped,), (other,) = client.submit(request("stopped")), client.submit(request("other"))
    with Guard(client.cancel) as guard:
        later(stopped.cancel, has_token(stopped))
        later(client.release, lambda: stopped.done)
        assert guard.wait([stopped, other], leave=True) is True
    assert (end_of(stopped), end_of(other)) == (CANCELLED, FINISHED)
    client.close()


# -- a cell --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    ip = InteractiveShell.instance()
    made = runtime._make
    ip.extension_manager.loaded.discard("mlxnb")
    ip.extension_manager.load_extension("mlxnb")
    yield ip
    ip.extension_manager.unload_extension("mlxnb")
    runtime.use(made)


def test_a_stopped_cell_shows_its_partial_answer_keeps_it_and_raises(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(hold=2)
    runtime.use(lambda settings: client)
    other = client.submit(request("other"))[0]
    later(interrupt, lambda: len(client.generations) > 1 and len(client.generations[1].read()) >= 4)
    result = shell.run_cell("%%mlx -o partial\none two three")
    out = capsys.readouterr().out
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert shell.user_ns["partial"].text == "one two " and shell.user_ns["partial"].finish_reason == "cancelled"
    assert "one two" in out and "KeyboardInterrupt: stopped" in out and "Traceback" not in out
    assert not other.cancel_requested
    client.release()
    assert shell.run_cell("%%mlx\nnext").success and shell.user_ns["_mlx"].text == "next "


def test_an_interrupt_of_wait_leaves_background_answers_running(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(hold=1)
    runtime.use(lambda settings: client)
    shell.run_cell("%%mlx --bg\none two")
    later(interrupt, lambda: interrupts.signal.getsignal(signal.SIGINT).__class__.__name__ == "method")
    capsys.readouterr()
    assert isinstance(shell.run_cell("%mlx wait").error_in_exec, KeyboardInterrupt)
    out = capsys.readouterr().out.strip()
    assert "KeyboardInterrupt: no longer waiting; the answers go on" in out and len(out.splitlines()) == 1, out
    client.release()
    assert shell.run_cell("%mlx wait").success
    assert shell.user_ns["_mlx"].text == "one two "


@pytest.mark.parametrize("call", ["lm.generate('one two')", "list(lm.stream('one two'))", "%mlx load slow"])
def test_an_interrupted_call_shows_one_line_and_no_stack(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], call: str) -> None:
    from mlxnb.api import LanguageModel

    client = FakeClient(hold=1)
    runtime.use(lambda settings: client)
    waiting = Generation(request("slow"))
    client.load = lambda model, dtype=None: waiting  # type: ignore[method-assign]
    shell.user_ns["lm"] = LanguageModel("fake", None, client)
    if call.startswith("%"):
        later(interrupt, lambda: signal.getsignal(signal.SIGINT).__class__.__name__ == "method")
    else:
        later(interrupt, lambda: bool(client.generations) and has_token(client.generations[0])())
    result = shell.run_cell(call)
    out = capsys.readouterr().out.strip()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert len(out.splitlines()) == 1 and out.startswith("KeyboardInterrupt: stopped"), out


# -- a kernel (R7) --------------------------------------------------------------------------------------------------------------


SETUP = """
import sys
sys.path[:0] = {paths!r}
from fake_client import FakeClient
from mlxnb import runtime
runtime.use(lambda settings: FakeClient(lambda request, index: ["word "] * 100_000, load=[("load", 1, 2)], step_s=0.002))
%load_ext mlxnb
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    paths = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in (".", "engine"))]
    try:
        reply = client.execute_interactive(SETUP.format(paths=paths), timeout=60)
        assert reply["content"]["status"] == "ok", reply["content"]
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_interrupts_at_random_moments_end_the_cell_and_hit_no_later_one(kernel: Any, scale: int) -> None:
    """R7. Singles, doubles and storms; the negative controls are the next two tests."""
    manager, client = kernel
    draw = random.Random(7)
    for number in range(20 * scale):
        message = client.execute("%%mlx -o r --max-tokens 100000\nsay something", store_history=False, stop_on_error=False)
        _until_shown(client, message)
        time.sleep(draw.choice((0.0, 0.001, 0.01, 0.05, 0.1)))
        for _ in range(draw.choice((1, 1, 1, 2, 20))):
            os.kill(manager.provisioner.pid, signal.SIGINT)
            time.sleep(draw.choice((0.0, 0.001, 0.02)))
        reply = client.get_shell_msg(timeout=10)
        while reply["parent_header"].get("msg_id") != message:
            reply = client.get_shell_msg(timeout=10)
        assert reply["content"]["status"] == "error", (number, reply["content"])
        assert reply["content"]["ename"] == "KeyboardInterrupt", (number, reply["content"])
        check = client.execute_interactive(
            "%%mlx -o after --max-tokens 3\nsay something", timeout=30, store_history=False, stop_on_error=False
        )
        assert check["content"]["status"] == "ok", (number, check["content"])
    done = client.execute_interactive(
        "assert after.text == 'word word word ' and not any(not g.done for g in runtime.client().generations)", timeout=30
    )
    assert done["content"]["status"] == "ok", done["content"]


def test_the_kernel_test_would_notice_a_guard_without_its_tail() -> None:
    """Negative control of R7, in this process: without the tail, the second signal of a storm escapes the cell."""
    client = FakeClient(hold=1)
    (mine,) = client.submit(request("mine"))
    with pytest.raises(KeyboardInterrupt), Guard(client.cancel) as guard:
        later(interrupt, has_token(mine))
        guard.wait([mine])
    tail = signal.getsignal(signal.SIGINT)
    assert isinstance(tail, Tail)
    signal.signal(signal.SIGINT, tail.before)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
        threading.Event().wait(1)
    client.close()


def test_the_kernel_test_would_notice_a_guard_that_cancels_the_newest_request(kernel: Any) -> None:
    """Negative control of R7: with a broken guard a background answer is hit by the interrupt of another cell."""
    manager, client = kernel
    broken = """
from mlxnb import interrupts
from mlxnb.interrupts import Guard
interrupts._last_interrupt = float("-inf")
kept = Guard._stop
Guard._stop = lambda self, generations: runtime.client().generations[-1].cancel()
from mlxnb_engine.types import CompletionRequest, RequestId
import threading, time
count = len(runtime.client().generations)
def newer():
    global newest
    while len(runtime.client().generations) == count:
        time.sleep(0.01)
    newest = runtime.client().submit(CompletionRequest(RequestId("newer"), "fake", text="x", max_tokens=100_000))[0]
threading.Thread(target=newer, daemon=True).start()
"""
    assert client.execute_interactive(broken, timeout=30)["content"]["status"] == "ok"
    message = client.execute("%%mlx -o r --max-tokens 100000\nsay something", store_history=False, stop_on_error=False)
    _until_shown(client, message)
    time.sleep(0.5)
    os.kill(manager.provisioner.pid, signal.SIGINT)
    while client.get_shell_msg(timeout=10)["parent_header"].get("msg_id") != message:
        pass
    probe = "Guard._stop = kept; hit, missed = newest.cancel_requested, not r.generation.cancel_requested; runtime.client().cancel()"
    reply = client.execute_interactive(probe + "; assert hit and missed", timeout=30)
    assert reply["content"]["status"] == "ok", reply["content"]


def _until_shown(client: Any, message: str) -> None:
    """Until the cell shows something. Before that the signal may hit the kernel's own code, which loses the reply."""
    while True:
        news = client.get_iopub_msg(timeout=10)
        mine = news["parent_header"].get("msg_id") == message
        if mine and news["msg_type"] == "display_data":
            return
