"""Interrupts: the first stops this cell's requests, a second within a second stops all, a late one changes nothing.

The cell waits on a lock in the main thread, so that KeyboardInterrupt gets through (an awaited wait is interrupted only at
its end). Everywhere else, from before the first submit until the partial answer is published, the signal is only noted: a
storm of signals cannot lose a submitted row or cut a publication short. For a second after an interrupt `Tail` takes the
signals, since one that hits the kernel while it sends the reply would leave the cell running for ever.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mlxnb_engine.session import Generation

GRACE_S = 0.1
"""How long a cell that is stopped waits for the step in flight. A window of a long prompt takes longer; its row ends after the cell."""
LOOK_S = 0.01
STUCK_S = 1.0
"""After this long without a look at it an interrupt is raised wherever the thread is, as in a write that blocks."""
DOUBLE_S = 1.0

_last_interrupt = float("-inf")


def say_instead(error: BaseException, text: str) -> None:
    """Make IPython show this one exception as `text` instead of a traceback. Elsewhere nothing changes."""
    error._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]


class Tail:
    """The handler after an interrupted cell. Within DOUBLE_S a signal stops all answers and raises nothing; a later one puts
    the handler from before the cell back and goes to it. (A kernel sets its own for the next cell anyway.)
    """

    def __init__(self, before: Any, cancel_all: Callable[[], object]) -> None:
        self.before = before
        self._cancel_all = cancel_all

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _last_interrupt
        now = time.monotonic()
        if now - _last_interrupt < DOUBLE_S:
            # A handler may run while this thread holds any lock, so what takes locks runs on a thread of its own; and
            # `Thread.start` takes locks itself.
            _thread.start_new_thread(self._cancel_all, ())
            return
        signal.signal(signal.SIGINT, self.before)
        if callable(self.before):
            self.before(number, frame)
        else:
            signal.raise_signal(signal.SIGINT)


class Guard:
    """Owns SIGINT while one cell submits and waits. Main thread only has signals; elsewhere it waits and nothing else.

    cancel_all: what a second interrupt does. Invariant: KeyboardInterrupt leaves this object only from `wait`, at most
    once; after the `with` block the handler from before is back, behind a `Tail` if there was an interrupt.
    """

    def __init__(self, cancel_all: Callable[[], object]) -> None:
        self._cancel_all = cancel_all
        self._pending = 0
        self._seen = 0
        self._raising = False
        self._first = 0.0
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> Self:
        # A handler that is not Python's (None) could not be put back.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not None:
            before = signal.signal(signal.SIGINT, self._on_signal)
            self._before = before.before if isinstance(before, Tail) else before
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._raising = False
        if self._installed and signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, Tail(self._before, self._cancel_all) if self._pending else self._before)
        self._act()

    @property
    def interrupted(self) -> bool:
        return self._pending > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Raised here it could break a lock half taken, so `_look` raises it: it looks every LOOK_S.
        now = time.monotonic()
        self._first = self._first if self._pending else now
        self._pending += 1
        if self._raising and now - self._first > STUCK_S:
            self._raising = False
            raise KeyboardInterrupt

    def wait(
        self, generations: Sequence[Generation], poll: Callable[[], object] | None = None, cancel: bool = True, leave: bool = False
    ) -> bool:
        """Block until all have ended; whether they have.

        On an interrupt: cancel these, give the step in flight GRACE_S, then KeyboardInterrupt.
        poll: called again and again instead of a plain wait, until all have ended (to print progress); it should block a
        little while. cancel: False for a cell that only waits for answers of other cells. leave: return as soon after a stop
        from elsewhere (a button, a command) as after an interrupt, though the engine may still be at the step in flight.
        """
        try:
            try:
                self._raising = True
                return self._look(generations, poll, leave)
            finally:
                self._raising = False
        except KeyboardInterrupt:
            # Without a handler of ours (not the main thread's default) the signal was not counted.
            self._pending = max(self._pending, 1)
            self._stop(generations if cancel else ())
            raise

    def _look(self, generations: Sequence[Generation], poll: Callable[[], object] | None, leave: bool) -> bool:
        """Wait in small pieces; whether all ended. With `leave` False GRACE_S after all that live were asked to stop."""
        asked: float | None = None
        for generation in generations:
            while True:
                if self._pending:
                    raise KeyboardInterrupt
                if generation.done:
                    break
                if poll is not None:
                    poll()
                else:
                    generation.wait(LOOK_S)
                if not all(other.cancel_requested or other.done for other in generations):
                    asked = None
                elif asked is None:
                    asked = time.monotonic()
                elif leave and time.monotonic() - asked >= GRACE_S:
                    return False
        return True

    def _stop(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            generation.cancel()
        self._act()
        deadline = time.monotonic() + GRACE_S
        for generation in generations:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            generation.wait(left)
        self._act()

    def _act(self) -> None:
        """Take note of the interrupts since the last look; two of them less than DOUBLE_S apart stop everything."""
        global _last_interrupt
        fresh = self._pending - self._seen
        if not fresh:
            return
        self._seen = self._pending
        now = time.monotonic()
        double = fresh > 1 or now - _last_interrupt < DOUBLE_S
        _last_interrupt = now
        if double:
            self._cancel_all()
