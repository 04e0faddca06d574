"""The front end of this kernel: one session carries what all running cells gained, and takes the commands of their views.

Deltas of all views leave together, at most 20 messages a second, fewer while the front end is slow to draw them; each view's
own trait gets a snapshot about once a second, so that a reload recovers. anywidget is imported when the first view is shown.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import queue
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mlxnb_engine.errors import MlxnbError

from . import kernelside
from .comm import Channel, StatusBeat, listen, welcome_status
from .routing import KernelRoute
from .schema import WIDGET_MIME, command_problem

if TYPE_CHECKING:
    from mlxnb_widgets._base import View
    from mlxnb_widgets.dispatch import Command
    from mlxnb_widgets.session import SessionWidget

FASTEST_S, SLOWEST_S = 0.05, 0.25
SLOW_FRAME_MS = 24.0
ACK_S = 0.2
"""An acknowledgement is asked for this often: each costs the kernel as much as a message does."""
SNAPSHOT_S = 1.0
SNAPSHOT_SHARE = 200.0
"""All views together wait this many times what a snapshot takes to make, so that they stay cheap however many and long they are."""
UNANSWERED = 40
"""Acknowledgements that are still waited for; older ones are given up."""
DEAF_S = 3.0
"""No front end has ever answered within this: live views do not work there, and plain HTML takes over."""
KNOCK_S = 0.25
"""Until a front end has answered it is asked this often, also by a view that has nothing to say: what comes before it listens is lost."""
KEPT = 64
"""Finished outputs that still take commands."""
QUEUED = 64
WORKER_IDLE_S = 5.0

Handler = Callable[[Mapping[str, Any]], Any]
"""Does a command; called on the worker thread. Returns the JSON result; raises MlxnbError with words for a person."""


class Source(Protocol):
    """Something that views follow by key. `at_once` names commands that only set a flag: they run in the comm's thread."""

    key: str
    commands: Mapping[str, Handler]
    at_once: frozenset[str]

    @property
    def done(self) -> bool: ...


class Pace:
    """When the next delta message may leave: 50 ms after the last, up to 250 ms while the front end does not keep up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.interval_s = FASTEST_S
        self.due = float("-inf")
        self._sent: OrderedDict[int, float] = OrderedDict()
        self._asked = float("-inf")
        self._lock = threading.Lock()
        self.heard = False
        self.first_sent: float | None = None

    def sent(self, seq: int, messages: int = 1) -> bool:
        """Message `seq` leaves; whether it is to be acknowledged. messages: how many leave with it, each takes an interval."""
        with self._lock:
            now = self._clock()
            self.first_sent = now if self.first_sent is None else self.first_sent
            if self._sent and self._late(next(iter(self._sent.values()))):
                self._slower()
            wanted = not self.heard or now - self._asked >= ACK_S
            if wanted:
                self._asked = now
                self._sent[seq] = now
            while len(self._sent) > UNANSWERED:
                self._sent.popitem(last=False)
            self.due = now + self.interval_s * messages
            return wanted

    def acked(self, seq: int, frame_ms: float) -> None:
        """A front end drew message `seq`. One that was never sent, or is acknowledged again, changes nothing."""
        with self._lock:
            at = self._sent.get(seq)
            if at is None:
                return
            self.heard = True
            for earlier in [known for known in self._sent if known <= seq]:
                del self._sent[earlier]
            if frame_ms > SLOW_FRAME_MS or self._late(at):
                self._slower()
            else:
                self.interval_s = max(FASTEST_S, self.interval_s * 0.9)

    def _late(self, sent_at: float) -> bool:
        return self._clock() - sent_at > 2 * self.interval_s + 0.1

    def _slower(self) -> None:
        self.interval_s = min(SLOWEST_S, self.interval_s * 1.3)

    def knocks(self) -> bool:
        """Whether it is time to ask if anybody is there. Ends with the first answer, or when none can be hoped for."""
        with self._lock:
            return not self.heard and not self.deaf and self._clock() - self._asked >= KNOCK_S

    @property
    def deaf(self) -> bool:
        """Messages went out long enough ago, and nobody has ever answered."""
        return not self.heard and self.first_sent is not None and self._clock() - self.first_sent > DEAF_S


class Worker:
    """One thread that does commands one after another, started by the first and ended when idle."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(QUEUED)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], None]) -> bool:
        """Whether there was room for it. Never blocks."""
        with self._lock:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mlxnb-commands", daemon=True)
                self._thread.start()
        return True

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=WORKER_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            job()


class Session:
    """The views of one kernel. `put`, `flush` and `receive` from any thread.

    Invariant: every checked command gets exactly one answer, with its id, on the channel it came by.
    """

    def __init__(self, shell: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        from mlxnb_widgets.dispatch import Dispatcher

        self.shell = shell
        self.pace = Pace(clock)
        self.beat = StatusBeat()
        self.sources: OrderedDict[str, Source] = OrderedDict()
        self.widget: SessionWidget | View | None = None
        self._clock = clock
        self._lock = threading.RLock()
        self._outbox: list[dict[str, Any]] = []
        self._snapshots = 0
        self._channels: list[Channel] = []
        self._seq = itertools.count(1)
        self._numbers = itertools.count(1)
        self._name = uuid.uuid4().hex[:8]
        self._worker = Worker()
        self._dispatch = Dispatcher(command_problem, self._act, self.pace.acked)
        self._kernel = kernelside.handlers(self)

    # -- sources -----------------------------------------------------------------------------------------------------

    def new_key(self) -> str:
        """Unlike any key of another kernel: saved outputs may ask for theirs."""
        return f"{self._name}-{next(self._numbers)}"

    def add(self, source: Source) -> None:
        """Take commands for this source. The oldest finished ones are forgotten beyond KEPT, but none that a person works with."""
        with self._lock:
            self.sources[source.key] = source
            over = [key for key, known in self.sources.items() if known.done and not getattr(known, "stays_open", False)]
            for key in over[: max(0, len(self.sources) - KEPT)]:
                if key != source.key:
                    del self.sources[key]

    def close_views(self) -> None:
        """Leave what stays in the place of every view that is open: a view whose kernel is gone shows an error."""
        for source in list(self.sources.values()):
            close = getattr(source, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):  # the front end may be gone before us
                    close()

    def forget(self, key: str) -> None:
        with self._lock:
            self.sources.pop(key, None)

    # -- to the front end --------------------------------------------------------------------------------------------

    def reference(self) -> str:
        """How a view's trait names the session widget; made at first need, in the thread of the cell."""
        with self._lock:
            if self.widget is None or self.widget.comm is None:
                from mlxnb_widgets.session import SessionWidget

                self.widget = SessionWidget(receive=self.receive)
            return f"IPY_MODEL_{self.widget.model_id}"

    def adopt(self, view: View) -> None:
        """A view of this session was made."""

    def put(self, items: list[dict[str, Any]]) -> None:
        with self._lock:
            self._outbox += items

    @property
    def living(self) -> int:
        """How many sources have not ended."""
        return sum(not source.done for source in list(self.sources.values()))

    def claim_snapshot(self) -> bool:
        """Whether a view may send its snapshot now: one does between two messages of deltas."""
        with self._lock:
            if self._snapshots:
                return False
            self._snapshots = 1
            return True

    def flush(self, now_please: bool = False) -> None:
        """Send what was put as one message, if it is time. Never raises for a front end that is gone."""
        with self._lock:
            if not (now_please or self._clock() >= self.pace.due):
                return
            snapshots, self._snapshots = self._snapshots, 0
            if not self._outbox and not (self.widget is not None and self.living and self.pace.knocks()):
                return
            items, self._outbox = self._outbox, []
            seq = next(self._seq)
            quiet = {} if self.pace.sent(seq, 1 + snapshots) else {"ack": False}
            if self.widget is not None and not is_closed(self.widget):
                self.widget.send({"type": "delta", "seq": seq, "items": items, **quiet})
            self._channels = [channel for channel in self._channels if not channel.closed]
            for channel in self._channels:
                theirs = [item for item in items if item["key"] in channel.keys]
                if theirs:
                    channel.send({"type": "delta", "seq": seq, "items": theirs, **quiet})

    def welcome(self, channel: Channel) -> None:
        """A front end opened a comm of ours. It has our extension, and so the views."""
        self.pace.heard = True
        with self._lock:
            self._channels.append(channel)
        channel.attach(self._from_channel)
        if channel.status:
            welcome_status(self, channel)

    def _from_channel(self, content: Any, channel: Channel) -> None:
        key = content.get("key") if isinstance(content, dict) else None
        if isinstance(key, str) and key in self.sources:
            channel.keys.add(key)
        self.receive(content, channel.send)

    # -- from the front end ------------------------------------------------------------------------------------------

    def receive(self, content: Any, send: Callable[[dict[str, Any]], None]) -> None:
        """Any value that came as a message. Checks and enqueues; never raises, never blocks."""
        self.pace.heard = True
        self._dispatch(content, send)

    def _act(self, command: Command) -> None:
        source = self.sources.get(command.key) if command.key else None
        if command.key and source is None:
            command.refuse("This output is not of this kernel any more. Run its cell again.")
            return
        handlers = source.commands if source is not None else self._kernel
        handler = handlers.get(command.name)
        if handler is None:
            command.refuse(f"{command.name!r} is not a command here.")
        elif command.name in (source.at_once if source is not None else kernelside.AT_ONCE):
            _do(command, handler)
        elif not self._worker.put(lambda: _do(command, handler)):
            command.refuse("The kernel is busy with earlier commands. Try again in a moment.")


class OwnSession(Session):
    """The session of one view, whose widget carries its own messages: for hosts where a widget may not speak through another."""

    def reference(self) -> str:
        return ""

    def adopt(self, view: View) -> None:
        self.widget = view


def is_closed(widget: View | SessionWidget) -> bool:
    """Whether nobody hears this widget any more: it was closed, or its comm was from outside, as marimo does when a cell runs again."""
    comm = widget.comm
    return comm is None or getattr(comm, "_closed", False) is True


def _do(command: Command, handler: Handler) -> None:
    """Run it and answer."""
    try:
        try:
            result = handler(command.args)
        except MlxnbError as error:
            command.refuse(" ".join(part for part in (error.message, error.hint) if part))
        except Exception as problem:
            command.refuse(f"That failed: {type(problem).__name__}: {problem}")
        else:
            command.answer(result)
    except Exception:  # the comm is closed: nobody is left to tell
        pass


def close_views(shell: Any) -> None:
    """For the end of the extension: views need its engine."""
    session: Session | None = getattr(shell, _SESSION, None)
    if session is not None:
        session.close_views()


_SESSION = "_mlxnb_session"
_making = threading.Lock()


def session_of(shell: Any) -> Session:
    """The one session of this shell."""
    with _making:
        session: Session | None = getattr(shell, _SESSION, None)
        if session is None:
            session = Session(shell)
            setattr(shell, _SESSION, session)
            atexit.register(session.close_views)
            listen(shell)  # also where nobody loaded the extension: views of the Python API are found and stopped by the page, too
        return session


class Presence:
    """One view's widget and the output it stands in: shown, fed with snapshots, and replaced by what stays.

    Any thread, once shown. route: None where a host shows the widget itself. make: makes the widget from its traits. model_id:
    the widget's, also after its end, by which a page that was loaded again finds the output of a view that is no more.
    """

    def __init__(self, session: Session, route: KernelRoute | None, make: Callable[..., View]) -> None:
        self.session = session
        self.route = route
        self.widget: View | None = None
        self.model_id: str | None = None
        self._make = make
        self._lock = threading.Lock()
        self._next_snapshot = 0.0

    def show(self, key: str, snapshot: Mapping[str, Any], fallback: Mapping[str, Any], **traits: Any) -> None:
        """Put the live view into the output. fallback: the other forms of the same output, for who cannot show views."""
        reference = self.session.reference()
        self.widget = self._make(receive=self.session.receive, key=key, session=reference, record=dict(snapshot), **traits)
        self.session.adopt(self.widget)
        view = self.widget.reference()
        self.model_id = view["model_id"]
        if self.route is not None:
            self.route.send({WIDGET_MIME: view, **fallback})
        self._next_snapshot = time.monotonic() + SNAPSHOT_S

    def snapshot(self, make: Callable[[], Mapping[str, Any]], now_please: bool = False) -> None:
        """Put a snapshot into the trait if it is time. make: builds it; how long that takes stretches the pause."""
        with self._lock:
            began = time.monotonic()
            if not self.open or not (now_please or (began >= self._next_snapshot and self.session.claim_snapshot())):
                return
            assert self.widget is not None
            self.widget.record = dict(make())
            now = time.monotonic()
            self._next_snapshot = now + max(SNAPSHOT_S, SNAPSHOT_SHARE * (now - began) * self.session.living)

    def replace(self, data: Mapping[str, Any]) -> None:
        """Put what stays into the output, then close the view."""
        if self.route is not None:
            self.route.send(data)
        self.close()

    @property
    def open(self) -> bool:
        """Whether there is a widget that somebody may see."""
        return self.widget is not None and not is_closed(self.widget)

    def close(self) -> None:
        with self._lock:
            widget, self.widget = self.widget, None
        if widget is not None:
            if not is_closed(widget):
                widget.state = "final"
            widget.close()
