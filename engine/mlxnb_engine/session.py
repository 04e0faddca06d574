"""`Generation`: one row as its readers see it. Life cycle, event log, cancel flag; it assumes nothing about steps."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import events as ev
from .errors import Cancelled, MlxnbError, error_from
from .types import CompletionRequest, Resumed


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since submit at which a phase ended; None while it has not."""

    started: float | None = None
    first_token: float | None = None
    ended: float | None = None


class Generation:
    """Append-only event log of one row, with any number of readers, each at its own pace.

    Owner: the engine side writes (`emit`), any thread reads (`events`, `read`, `wait`) or asks to stop (`cancel`).
    Invariant: `seq` is the position in the log; exactly one terminal event, and nothing after it.
    Lifetime: made at submit, usable after the engine is gone.
    """

    def __init__(self, request: CompletionRequest, index: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.request = request
        self.index = index
        self._clock = clock
        self._t0 = clock()
        self._log: list[ev.Event] = []
        # Not a Condition: KeyboardInterrupt may strike anywhere in one, and leave its lock held for good.
        self._writing = threading.RLock()
        self._waiters: list[_thread.LockType] = []
        self._cancel = False
        self._on_cancel: Callable[[], None] | None = None
        self._timing = Timing()
        self.ticket: Resumed | None = None
        """What another run needs to be the rest of this one, should it be stopped; None before it is admitted."""

    # -- engine side ---------------------------------------------------------------------------------------------

    def emit(self, make: Callable[[int, float], ev.Event]) -> ev.Event:
        """Append the event that `make(seq, t)` returns. Raises RuntimeError after the terminal event."""
        with self._writing:
            if self._log and self._log[-1].terminal:
                raise RuntimeError(f"{self.id}: event after {type(self._log[-1]).__name__}")
            event = make(len(self._log), self._clock() - self._t0)
            self._note(event)  # first: readers take no lock, and who sees the end reads its times
            self._log.append(event)
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.release()
            return event

    def end(self, make: Callable[[int, float], ev.Event]) -> bool:
        """Append a terminal event unless the row already ended; whether this call ended it. Any thread."""
        with self._writing:
            if self._log and self._log[-1].terminal:
                return False
            self.emit(make)
            return True

    def _note(self, event: ev.Event) -> None:
        timing = self._timing
        if isinstance(event, ev.Started):
            self._timing = Timing(event.t, timing.first_token, None)
        elif isinstance(event, ev.Tokens) and timing.first_token is None:
            self._timing = Timing(timing.started, event.t, None)
        elif event.terminal:
            self._timing = Timing(timing.started, timing.first_token, event.t)

    def on_cancel(self, wake: Callable[[], None]) -> None:
        """Called once by the client: how to wake the engine after `cancel`."""
        self._on_cancel = wake

    @property
    def cancel_requested(self) -> bool:
        return self._cancel

    # -- reader side ---------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return f"{self.request.id}.{self.index}"

    @property
    def count(self) -> int:
        """How many events there are. Takes no lock, so looking for news is cheap."""
        return len(self._log)

    @property
    def submitted_at(self) -> float:
        """When it was submitted, on its clock: what the times of its events are counted from."""
        return self._t0

    @property
    def now(self) -> float:
        """Seconds since submit."""
        return self._clock() - self._t0

    @property
    def timing(self) -> Timing:
        return self._timing

    @property
    def terminal(self) -> ev.Event | None:
        """The terminal event, or None while the row lives."""
        last = self._log[-1:]
        return last[0] if last and last[0].terminal else None

    @property
    def done(self) -> bool:
        return self.terminal is not None

    def cancel(self) -> None:
        """Ask the engine to drop this row at its next safe point. Idempotent, any thread, never blocks."""
        self._cancel = True
        if self._on_cancel is not None:
            self._on_cancel()

    def read(self, since: int = 0, timeout_s: float | None = 0.0) -> list[ev.Event]:
        """Events from `since` on. Waits up to timeout_s (None: for ever) if there is none yet; [] on time-out."""
        if timeout_s != 0.0:
            self._wait_for(lambda: len(self._log) > since, timeout_s)
        return self._log[since:]

    def _wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Block until this holds, which only an event can bring about. Holds no lock that `emit` needs, wherever it is interrupted."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            left = -1.0 if deadline is None else deadline - time.monotonic()
            if deadline is not None and left <= 0:
                return
            waiter = _thread.allocate_lock()
            waiter.acquire()
            self._waiters.append(waiter)
            # An event before this line is seen here; one after it finds the waiter.
            if ready():
                return
            if not waiter.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
                with contextlib.suppress(ValueError):  # an event came just now and took it out
                    self._waiters.remove(waiter)

    def events(self, since: int = 0) -> Iterator[ev.Event]:
        """Yield events as they come, up to and with the terminal one."""
        while True:
            for event in self.read(since, None):
                yield event
                since += 1
                if event.terminal:
                    return

    def wait(self, timeout_s: float | None = None) -> ev.Event | None:
        """Block until the terminal event; None on time-out. May be interrupted by KeyboardInterrupt."""
        self._wait_for(lambda: self.done, timeout_s)
        return self.terminal

    def raise_for_error(self) -> None:
        """Raise the typed error of a `Failed` or `Cancelled` end; nothing while it lives or after `Finished`."""
        end = self.terminal
        if isinstance(end, ev.Failed):
            raise error_from(end.error, end.message, end.hint)
        if isinstance(end, ev.Cancelled):
            raise Cancelled("The request was cancelled.")

    def fail(self, error: BaseException, text: str | None = None, usage: dict[str, Any] | None = None) -> bool:
        """End with this error (`Cancelled` ends as cancelled); False if the row had already ended. text: None is what was shown."""

        def shown() -> str:
            return text if text is not None else "".join(e.text for e in self._log if isinstance(e, ev.Tokens))

        if isinstance(error, Cancelled):
            return self.end(lambda seq, t: ev.Cancelled(seq, t, shown(), usage or {}))
        typed = error if isinstance(error, MlxnbError) else None
        kind = typed.kind if typed else "model"
        message = typed.message if typed else f"{type(error).__name__}: {error}"
        hint = typed.hint if typed else ""
        return self.end(lambda seq, t: ev.Failed(seq, t, kind, message, hint, shown(), usage or {}))
