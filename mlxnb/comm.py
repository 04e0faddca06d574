"""Comms of this kernel that a front end opens, and the paths on which they are answered while a cell runs.

Three things make an answer possible during a cell: subshells (ipykernel 7, replies routed by `reply_where_asked` on 7.4), the
control channel (any version, for comms that are ours), and the kernel's own interrupt. Every callback here may run on another
thread: it only checks and enqueues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import runtime
from .history import History
from .schema import SESSION_TARGET, STATUS_TARGET

if TYPE_CHECKING:
    from .frontend import Session

STATUS_S = 1.0
_LISTENS = "_mlxnb_listens"


def listen(shell: Any) -> None:
    """Let front ends open our comm targets in this kernel. Twice is once; without a kernel nothing happens."""
    kernel = getattr(shell, "kernel", None)
    manager = getattr(kernel, "comm_manager", None)
    if manager is None or getattr(shell, _LISTENS, False):
        return
    setattr(shell, _LISTENS, True)

    def opened(comm: Any, message: Any) -> None:
        from .frontend import session_of

        session_of(shell).welcome(Channel(comm))

    for target in (SESSION_TARGET, STATUS_TARGET):
        manager.register_target(target, opened)
    _answer_on_control(kernel, manager)


def close_views(shell: Any) -> None:
    """Close the views of this shell, if it ever had any."""
    if getattr(shell, _LISTENS, False):
        from . import frontend

        frontend.close_views(shell)


def _answer_on_control(kernel: Any, manager: Any) -> None:
    """Take `comm_msg` on the control channel too, which has a thread of its own in every version; only for our comms."""
    handlers = getattr(kernel, "control_handlers", None)
    if not isinstance(handlers, dict) or "comm_msg" in handlers:
        return

    def handle(stream: Any, ident: Any, message: Any) -> None:
        content = message.get("content") if isinstance(message, dict) else None
        comm_id = content.get("comm_id") if isinstance(content, dict) else None
        comm = manager.comms.get(comm_id) if isinstance(comm_id, str) else None
        callback = getattr(comm, "_msg_callback", None)
        if callback is not None and _ours(comm, callback):
            callback(message)  # not `handle_msg`: that fires the shell's hooks of a cell's begin and end

    handlers["comm_msg"] = handle


def _ours(comm: Any, callback: Callable[..., Any]) -> bool:
    if getattr(comm, "target_name", None) in (SESSION_TARGET, STATUS_TARGET):
        return True
    owner = type(getattr(callback, "__self__", None))
    return owner.__module__.partition(".")[0] == "mlxnb_widgets"


class Channel:
    """A comm that a front end opened. Its messages are the plain envelope; `keys` are those it asked about.

    Owner: the session; any thread sends.
    """

    def __init__(self, comm: Any) -> None:
        from mlxnb_widgets.reply import reply_where_asked

        self._comm = comm
        self.status = comm.target_name == STATUS_TARGET
        self.keys: set[str] = set()
        self.closed = False
        reply_where_asked(comm)

    def attach(self, receive: Callable[[Any, Channel], None]) -> None:
        def message(raw: Any) -> None:
            content = raw.get("content") if isinstance(raw, dict) else None
            receive(content.get("data") if isinstance(content, dict) else None, self)

        def gone(raw: Any) -> None:
            self.closed = True

        self._comm.on_msg(message)
        self._comm.on_close(gone)

    def send(self, message: dict[str, Any]) -> None:
        if not self.closed:
            self._comm.send(data=message)


def engine_status() -> dict[str, Any]:
    """What the engine says of itself now, with the time; never starts one."""
    here = runtime.current()
    status = here.status() if here is not None else {"state": "not started", "models": [], "loading": [], "limits": {}}
    return {**status, "t": round(time.monotonic(), 3)}


class StatusBeat:
    """Tells listeners the engine's status once a second while it changes; one thread while anyone listens.

    Silent while nothing changes: a message each second would keep an idle kernel from ever being culled. past: what was told,
    as long as somebody listens.
    """

    def __init__(self, read: Callable[[], dict[str, Any]] = engine_status, period_s: float = STATUS_S) -> None:
        self._read = read
        self._period_s = period_s
        self.past = History()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[dict[str, Any]], bool]] = []
        self._thread: threading.Thread | None = None

    def add(self, listener: Callable[[dict[str, Any]], bool]) -> None:
        """listener: takes a status, and returns whether it wants more. Called once at once, from the caller's thread."""
        status = self._read()
        if not listener(status):
            return
        with self._lock:
            self._listeners.append(listener)
            if self._thread is None:
                self.past.note(status)
                self._thread = threading.Thread(target=self._work, name="mlxnb-status", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        last: Any = None
        moved = False
        pause = threading.Event()
        while True:
            pause.wait(self._period_s)
            try:
                status = self._read()
            except Exception:  # an engine that is being closed; the next beat tells
                continue
            lasting = {name: value for name, value in status.items() if name not in ("t", "last_advance_s")}
            # What comes to rest is told once more: a speed is the difference of two moments.
            news, moved, last = moved or lasting != last, lasting != last, lasting
            if news:
                self.past.note(status)
            with self._lock:
                listeners = list(self._listeners)
            gone = [listener for listener in listeners if news and not _told(listener, status)]
            with self._lock:
                self._listeners = [listener for listener in self._listeners if listener not in gone]
                if not self._listeners:
                    self._thread = None
                    self.past.clear()  # what comes now is not seen, so the next picture begins afresh
                    return


def _told(listener: Callable[[dict[str, Any]], bool], status: dict[str, Any]) -> bool:
    try:
        return listener(status)
    except Exception:  # one broken front end must not silence the others
        return False


def welcome_status(session: Session, channel: Channel) -> None:
    """Send the status to a channel that was opened for it, as long as it is open."""

    def tell(status: dict[str, Any]) -> bool:
        channel.send({"type": "status", "status": status})
        return not channel.closed

    session.beat.add(tell)
