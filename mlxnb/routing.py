"""Routes: how an output reaches the cell that asked for it, whichever thread sends it and whichever cell runs by then.

ipykernel's own routing of a thread's output moved between cells in several versions. So the executing cell's request is
captured when an output is first published, and our own messages carry it. After that cell ended they carry the request of
the cell that runs now, because nbclient drops a message whose parent is not the running cell; the `display_id` finds the output.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from IPython.core.getipython import get_ipython


class Route(Protocol):
    """One output of one cell, under one display id. `send` may be called from the thread that `threaded` allows."""

    threaded: bool

    def send(self, data: Mapping[str, Any]) -> None:
        """Show this MIME bundle in place of the one before. Never raises for a kernel that is shutting down."""
        ...


class CellClock:
    """Which cells of this shell are executing, by message id, and the request of the newest.

    Owner: the shell's threads write (IPython's pre_execute and post_execute), any thread reads.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._lock = threading.Lock()
        self._running: dict[str, Mapping[str, Any]] = {}
        self._newest: Mapping[str, Any] = {}
        shell.events.register("pre_execute", self._began)
        shell.events.register("post_execute", self._ended)

    def parent(self) -> Mapping[str, Any]:
        """The request of the cell that runs in the calling thread. Marks it as running."""
        parent: Mapping[str, Any] = self._shell.kernel.get_parent("shell") or {}
        with self._lock:
            self._newest = parent
            if message_id(parent):
                self._running[message_id(parent)] = parent
        return parent

    def _began(self) -> None:
        # A comm's message also fires the hooks, on any thread: it is no cell, and outputs must not go to it.
        if message_type(self._shell.kernel.get_parent("shell") or {}) == "execute_request":
            self.parent()

    def _ended(self) -> None:
        parent = self._shell.kernel.get_parent("shell") or {}
        with self._lock:
            self._running.pop(message_id(parent), None)

    def current(self, owner: Mapping[str, Any]) -> Mapping[str, Any]:
        """The owner while its cell runs, else the newest running cell, else the newest that ran."""
        with self._lock:
            if message_id(owner) in self._running or not self._newest:
                return owner
            return next(reversed(self._running.values()), self._newest)


def message_type(parent: Mapping[str, Any]) -> str:
    header = parent.get("header") or {}
    return str(header.get("msg_type", ""))


def _cell_id(parent: Mapping[str, Any]) -> str:
    return str((parent.get("metadata") or {}).get("cellId") or "")


def cell_id(shell: Any) -> str:
    """The notebook's own id of the executing cell (in VS Code the address of its document); "" where it tells none."""
    kernel = getattr(shell, "kernel", None)
    return _cell_id(kernel.get_parent("shell") or {}) if kernel is not None else ""


def message_id(parent: Mapping[str, Any]) -> str:
    header = parent.get("header") or {}
    return str(header.get("msg_id", ""))


class KernelRoute:
    """Our own messages on the kernel's IOPub channel. Any thread: the IOPub thread's socket queues what it is given."""

    threaded = True

    def __init__(self, shell: Any, clock: CellClock) -> None:
        self._publisher = shell.display_pub
        self._clock = clock
        self._owner = clock.parent()
        self._lock = threading.Lock()
        self._shown = False
        self.display_id = uuid.uuid4().hex
        self.cell_id = _cell_id(self._owner)
        """The notebook's own id of the cell, where the front end tells it."""
        sys.stdout.flush()  # what the cell printed before stays before

    def send(self, data: Mapping[str, Any]) -> None:
        content = {"data": dict(data), "metadata": {}, "transient": {"display_id": self.display_id}}
        with self._lock:
            kind = "update_display_data" if self._shown else "display_data"
            # The first message makes the output, so it must name the cell that owns it.
            parent = self._clock.current(self._owner) if self._shown else self._owner
            self._publisher.session.send(self._publisher.pub_socket, kind, content, parent=dict(parent), ident=self._publisher.topic)
            self._shown = True


class PlainRoute:
    """Through IPython's own publisher, for `%%capture` and front ends without ipykernel. Only in the cell's own thread."""

    threaded = False

    def __init__(self, shell: Any) -> None:
        self._publisher = shell.display_pub
        self._display_id = uuid.uuid4().hex
        self._shown = False

    def send(self, data: Mapping[str, Any]) -> None:
        self._publisher.publish(data=dict(data), metadata={}, transient={"display_id": self._display_id}, update=self._shown)
        self._shown = True


_CLOCK_NAME = "_mlxnb_cell_clock"


def clock_of(shell: Any) -> CellClock:
    """The one clock of this shell; registers its callbacks the first time."""
    clock = getattr(shell, _CLOCK_NAME, None)
    if clock is None:
        clock = CellClock(shell)
        setattr(shell, _CLOCK_NAME, clock)
    return clock


def is_terminal(shell: Any) -> bool:
    """IPython in a terminal, embedded or not."""
    return any(kind.__name__ == "TerminalInteractiveShell" for kind in type(shell).__mro__)


def is_batch(shell: Any) -> bool:
    """Nobody is there to answer or to watch: nbclient, papermill and nbconvert execute with `allow_stdin` false."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    content = (kernel.get_parent("shell") or {}).get("content") or {}
    return not content.get("allow_stdin", True)


def route_here(shell: Any = None) -> Route | None:
    """A new route to the output of the executing cell; None where there is no IPython, or a terminal that draws itself."""
    shell = shell if shell is not None else get_ipython()
    if shell is None or is_terminal(shell):
        return None
    publisher = getattr(shell, "display_pub", None)
    kernel = getattr(shell, "kernel", None)
    if kernel is not None and all(getattr(publisher, name, None) is not None for name in ("session", "pub_socket")):
        return KernelRoute(shell, clock_of(shell))
    return PlainRoute(shell)
