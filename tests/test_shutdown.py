"""R9: however a process with a live engine ends, it ends soon, with its own exit code and without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WATCHDOG_S = 60.0

PRELUDE = """
import os, sys, threading, time
from pathlib import Path
from engine_rig import answer_ids, ask, client_of, engine_of, finish, on_engine, residents
from mlxnb_engine import events as ev
from mlxnb_engine.errors import EngineDead
MODEL, CACHE = Path(sys.argv[1]), Path(sys.argv[2])
client = client_of(MODEL, CACHE, prefill_chunk=8)

def decoding():
    (row,) = client.submit(ask("one two", 4000))
    while not any(isinstance(e, ev.Tokens) for e in row.read()):
        row.read(len(row.read()), 30)
    return row

def closed_in(seconds):
    started = time.monotonic()
    client.close()
    took = time.monotonic() - started
    assert took < seconds, f"close took {took:.1f} s"
"""


def run(tmp_path: Path, model: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(body), encoding="utf-8")
    paths = [str(ROOT / part) for part in ("tests", "engine", ".")] + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", str(script), str(model), str(tmp_path / "cache")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )


def quiet(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What of a process's end is not as promised, in words."""
    out = [] if done.returncode == 0 else [f"exit code {done.returncode}"]
    for word in ("Traceback", "terminate called", "Fatal Python error", "Exception ignored", "Exception in thread", "leaked"):
        if word in done.stderr:
            out.append(f"{word!r} on stderr: {done.stderr[-1500:]}")
    return out


ENDS = {
    "the script ends while a row decodes": "decoding()",
    "the script ends while a model loads": "client.load('')",
    "the script ends while a row is queued": "decoding(); [client.submit(ask('one', 400, samples=8)) for _ in range(3)]",
    "the script ends idle": "answer_ids(client, ask('one', 3))",
    "the engine was never started": "pass",
    "sys.exit in the middle": "decoding(); sys.exit(0)",
    "closed by hand": "row = decoding(); closed_in(5); assert isinstance(row.terminal, ev.Cancelled), row.terminal",
    "closed twice, and then at exit": "row = decoding(); closed_in(5); closed_in(1)",
    "closed by two threads at once": """
        decoding()
        threads = [threading.Thread(target=client.close) for _ in range(2)]
        [t.start() for t in threads]
        [t.join(20) for t in threads]
        assert not any(t.is_alive() for t in threads)
        """,
    "a reader thread waits for ever": "row = decoding(); threading.Thread(target=lambda: list(row.events()), daemon=True).start()",
    "a thread of the user's goes on after main": """
        row = decoding()
        threading.Thread(target=lambda: (row.read(60, 30), row.cancel(), row.wait(30))).start()
        """,
    "two clients": "decoding(); client = client_of(MODEL, CACHE); decoding()",
    "the engine died before": """
        row = decoding()
        def broken():
            raise ZeroDivisionError("injected")
        residents(client)[0].scheduler.tick = broken
        finish([row])
        assert client.status()["state"] == "dead"
        """,
    "it died and was replaced": """
        row = decoding()
        def broken():
            raise ZeroDivisionError("injected")
        residents(client)[0].scheduler.tick = broken
        finish([row])
        decoding()
        """,
    "close with a stuck text thread": """
        answer_ids(client, ask("one", 2))
        preparer = type(residents(client)[0].preparer)
        reached = threading.Event()
        preparer.prepare = lambda self, request: (reached.set(), time.sleep(1000))
        (row,) = client.submit(ask("one"))
        assert reached.wait(30)
        closed_in(5)
        assert isinstance(row.terminal, ev.Cancelled), row.terminal
        """,
    "close with a stuck locate thread": """
        from mlxnb_engine import loader
        reached = threading.Event()
        loader.locate = lambda *args: (reached.set(), time.sleep(1000))
        (row,) = client.submit(ask("one"))
        assert reached.wait(30)
        closed_in(5)
        assert isinstance(row.terminal, ev.Cancelled), row.terminal
        """,
    "close with a stuck engine thread": """
        row = decoding()
        reached = threading.Event()
        residents(client)[0].scheduler.tick = lambda: (reached.set(), time.sleep(1000))
        assert reached.wait(30)
        started = time.monotonic()
        client.close(1.0)
        assert time.monotonic() - started < 5
        assert isinstance(row.terminal, ev.Failed) and row.terminal.error == "engine", row.terminal
        """,
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_cleanly_when(tiny_model: Path, tmp_path: Path, how: str) -> None:
    assert quiet(run(tmp_path, tiny_model, ENDS[how])) == []


def test_an_unhandled_exception_shows_itself_and_nothing_of_ours(tiny_model: Path, tmp_path: Path) -> None:
    done = run(tmp_path, tiny_model, "decoding()\nraise KeyError('the user made a mistake')")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and "the user made a mistake" in done.stderr
    assert "mlxnb_engine" not in done.stderr and "terminate called" not in done.stderr


FORK = """
    from mlxnb_engine.types import CompletionRequest, Message, RequestId
    chat = lambda name: CompletionRequest(RequestId(name), "", messages=(Message("user", "hi"),), max_tokens=3)
    finish(client.submit(chat("before")))
    row = decoding()
    child = os.fork()
    if child == 0:
        refused = []
        calls = (
            lambda: client.submit(ask("one")),
            lambda: client.load(""),
            client.cancel,
            client.live,
            client.status,
            client.unload,
        )
        for call in calls:
            try:
                call()
            except EngineDead as error:
                refused.append(error)
        client.close()
        sys.exit(0 if len(refused) == len(calls) and all(e.hint for e in refused) else 7)
    started = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        assert time.monotonic() - started < 30, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0, status
    assert not row.done or isinstance(row.terminal, ev.Finished)
    logs = finish([*client.submit(ask("one", 5)), *client.submit(chat("after"))])
    assert all(isinstance(log[-1], ev.Finished) for log in logs)
"""


def test_a_forked_child_has_no_engine_and_says_so(tiny_model: Path, tmp_path: Path) -> None:
    assert quiet(run(tmp_path, tiny_model, FORK)) == []


HELD = """
    decoding()
    client._lock.acquire()
    child = os.fork()
    if child == 0:
        try:
            client.submit(ask("one"))
        except EngineDead:
            sys.exit(0)
        sys.exit(7)
    client._lock.release()
    started = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - started > 20:
            os.kill(child, 9)
            raise AssertionError("the child hangs on a lock that was held during the fork")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0, status
"""


def test_a_lock_that_was_held_during_the_fork_does_not_hang_the_child(tiny_model: Path, tmp_path: Path) -> None:
    assert quiet(run(tmp_path, tiny_model, HELD)) == []


def test_a_join_without_a_time_out_is_caught(tiny_model: Path, tmp_path: Path) -> None:
    """Negative control: the same stuck engine thread, waited for without a bound."""
    body = """
        decoding()
        engine, reached = engine_of(client), threading.Event()
        residents(client)[0].scheduler.tick = lambda: (reached.set(), time.sleep(1000))
        assert reached.wait(30)
        engine.stop = lambda timeout_s: engine._thread.join()
        threading.Timer(5.5, lambda: os._exit(42)).start()
        closed_in(5)
        os._exit(0)
        """
    assert run(tmp_path, tiny_model, body).returncode == 42


def test_a_traceback_at_exit_is_caught(tiny_model: Path, tmp_path: Path) -> None:
    body = """
        import atexit
        decoding()
        atexit.register(lambda: 1 / 0)
        """
    assert quiet(run(tmp_path, tiny_model, body))
