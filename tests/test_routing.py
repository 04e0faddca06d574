"""An output stays with the cell that made it, whichever thread sends it and whichever cell runs by then."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from jupyter_client.manager import start_new_kernel
from jupyter_client.session import Session

from mlxnb.routing import CellClock, KernelRoute, PlainRoute, clock_of, is_batch, is_terminal, route_here


class Events:
    """IPython's callbacks, fired by hand."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Any]] = {"pre_execute": [], "post_execute": []}

    def register(self, name: str, callback: Any) -> None:
        self.callbacks[name].append(callback)

    def fire(self, name: str) -> None:
        for callback in self.callbacks[name]:
            callback()


class Socket:
    """What the IOPub thread's socket looks like to a session: it takes the parts of a message from any thread."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[bytes]]] = []

    def send_multipart(self, parts: list[bytes], *args: Any, **kwargs: Any) -> None:
        self.sent.append((threading.current_thread().name, parts))


class Shell:
    """A kernel's shell with a real session and one request at a time."""

    def __init__(self) -> None:
        self.session, self.socket, self.events = Session(key=b"k"), Socket(), Events()
        self.display_pub = SimpleNamespace(session=self.session, pub_socket=self.socket, topic=b"display_data")
        self.request: dict[str, Any] = {}
        self.kernel = SimpleNamespace(get_parent=lambda channel=None: self.request)

    def run(self, name: str, allow_stdin: bool = True) -> None:
        """Begin a cell."""
        self.request = {"header": {"msg_id": name, "msg_type": "execute_request"}, "content": {"allow_stdin": allow_stdin}}
        self.events.fire("pre_execute")

    def end(self) -> None:
        self.events.fire("post_execute")

    def messages(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(type, parent's id, content) of everything sent, as a front end decodes it."""
        found, reader = [], Session(key=b"k")
        for _, parts in self.socket.sent:
            _, frames = reader.feed_identities(parts)
            message = reader.deserialize(frames)
            found.append((message["msg_type"], message["parent_header"].get("msg_id"), message["content"]))
        return found


@pytest.fixture
def shell() -> Shell:
    return Shell()


def test_two_cells_that_stream_at_once_keep_their_own_parents(shell: Shell) -> None:
    shell.run("A")
    first = route_here(shell)
    first.send({"text/plain": "a0"})
    shell.run("B")  # a subshell: A still runs
    second = route_here(shell)
    second.send({"text/plain": "b0"})
    for route, text in ((first, "a1"), (second, "b1")):
        thread = threading.Thread(target=route.send, args=({"text/plain": text},), name="sender")
        thread.start()
        thread.join()
    sent = [(kind, parent, content["data"]["text/plain"]) for kind, parent, content in shell.messages()]
    assert sent == [
        ("display_data", "A", "a0"),
        ("display_data", "B", "b0"),
        ("update_display_data", "A", "a1"),
        ("update_display_data", "B", "b1"),
    ]
    ids = [content["transient"]["display_id"] for _, _, content in shell.messages()]
    assert ids[0] == ids[2] != ids[1] == ids[3]
    assert [name for name, _ in shell.socket.sent[2:]] == ["sender", "sender"]


def test_after_its_cell_ended_an_update_names_the_running_cell(shell: Shell) -> None:
    shell.run("A")
    route = route_here(shell)
    route.send({"text/plain": "0"})
    shell.end()
    route.send({"text/plain": "between"})
    shell.run("B")
    route.send({"text/plain": "1"})
    shell.run("C")
    shell.end()
    route.send({"text/plain": "2"})
    assert [(kind, parent) for kind, parent, _ in shell.messages()] == [
        ("display_data", "A"),
        ("update_display_data", "A"),
        ("update_display_data", "B"),
        ("update_display_data", "B"),
    ]


def test_a_clock_made_inside_a_running_cell_knows_that_cell(shell: Shell) -> None:
    shell.request = {"header": {"msg_id": "A"}}
    clock = CellClock(shell)
    owner = clock.parent()
    assert clock.current(owner) is owner
    shell.end()
    shell.run("B")
    assert clock.current(owner) == shell.request


def test_a_shell_has_one_clock_however_many_routes(shell: Shell) -> None:
    shell.run("A")
    assert clock_of(shell) is clock_of(shell)
    route_here(shell), route_here(shell)
    assert len(shell.events.callbacks["pre_execute"]) == 1


def test_a_first_message_that_failed_is_still_a_first_message(shell: Shell) -> None:
    shell.run("A")
    route = route_here(shell)
    good, shell.display_pub.session = shell.session, SimpleNamespace(send=lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        route.send({"text/plain": "lost"})
    shell.display_pub.session = good
    route.send({"text/plain": "0"})
    assert [kind for kind, _, _ in shell.messages()] == ["display_data"]


def test_a_captured_cell_gets_its_output_through_the_capture(shell: Shell) -> None:
    shell.run("A")
    shell.display_pub = CapturingDisplayPublisher()
    route = route_here(shell)
    assert isinstance(route, PlainRoute) and not route.threaded
    route.send({"text/plain": "0"})
    route.send({"text/plain": "1"})
    outputs = shell.display_pub.outputs
    assert [(output["data"], output["update"]) for output in outputs] == [({"text/plain": "0"}, False), ({"text/plain": "1"}, True)]
    assert outputs[0]["transient"] == outputs[1]["transient"]
    assert shell.socket.sent == []


def test_there_is_no_route_in_a_terminal_or_outside_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxnb.routing.get_ipython", lambda: None)  # another test may have left a shell
    terminal = type("TerminalInteractiveShell", (), {})()
    assert is_terminal(terminal)
    assert route_here(terminal) is None
    assert route_here(None) is None


def test_batch_is_what_the_cells_own_request_says(shell: Shell) -> None:
    shell.run("A", allow_stdin=False)
    assert is_batch(shell)
    shell.run("B", allow_stdin=True)
    assert not is_batch(shell)
    assert not is_batch(SimpleNamespace())


def test_a_kernel_route_may_be_used_by_many_threads_at_once(shell: Shell) -> None:
    shell.run("A")
    route = route_here(shell)
    assert isinstance(route, KernelRoute)
    threads = [threading.Thread(target=route.send, args=({"text/plain": str(i)},)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = [kind for kind, _, _ in shell.messages()]
    assert sorted(kinds) == ["display_data"] + ["update_display_data"] * 15
    assert kinds[0] == "display_data"


SETUP = """
import sys
sys.path[:0] = {paths!r}
from fake_client import FakeClient
from mlxnb.api import LanguageModel
from mlxnb.display import publish
client = FakeClient(hold=1)
lm = LanguageModel("fake", None, client)
"""


def test_in_a_real_kernel_background_cells_keep_their_output_while_others_run() -> None:
    manager, client = start_new_kernel(kernel_name="python3", extra_arguments=["--HistoryManager.enabled=False"])
    try:
        outputs: list[dict[str, Any]] = []

        def cell(code: str) -> str:
            """Execute; the cell's message id, once it is idle."""
            message_id: str = client.execute(code, allow_stdin=True)
            while True:
                message = client.get_iopub_msg(timeout=60)
                if message["msg_type"] in ("display_data", "update_display_data", "stream", "error"):
                    outputs.append(message)
                ours = message["parent_header"].get("msg_id") == message_id
                if ours and message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    return message_id

        cell(SETUP.format(paths=[path for path in sys.path if path]))
        first = cell("a = publish(lm.generate('alpha one', wait=False), background=True)")
        second = cell("b = publish(lm.generate('beta two', wait=False), background=True)")
        third = cell("client.release(); print(a.finish(30), b.finish(30))")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    made = [(m["msg_type"], m["parent_header"]["msg_id"]) for m in outputs if m["msg_type"] == "display_data"]
    assert made == [("display_data", first), ("display_data", second)]
    by_display: dict[str, list[dict[str, Any]]] = {}
    for message in outputs:
        if message["msg_type"].endswith("display_data"):
            by_display.setdefault(message["content"]["transient"]["display_id"], []).append(message)
    assert [messages[-1]["content"]["data"]["text/plain"] for messages in by_display.values()] == ["alpha one ", "beta two "]
    assert {messages[-1]["parent_header"]["msg_id"] for messages in by_display.values()} == {third}, "nbclient would drop the last update"
    assert [m["content"].get("text") for m in outputs if m["msg_type"] in ("stream", "error")] == ["True True\n"]
