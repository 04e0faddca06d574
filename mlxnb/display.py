"""`publish`: runs become outputs of their cell, live and then static. One publisher thread per kernel feeds them all."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from IPython.core.getipython import get_ipython

from .render import STOP_HINT, Renderer, check_view
from .routing import Route, is_batch, is_terminal, route_here
from .run import Run, RunGroup
from .sanitize import bundle, preformatted

INTERVAL_S = 0.25
"""At most four updates a second for each display: every one replaces the whole output."""
RENDER_SHARE = 5.0
"""An update waits at least this many times what the last one took to render, so that showing stays cheap beside decoding."""
LONGEST_INTERVAL_S = 5.0
IDLE_S = 5.0
"""The thread ends after this long without a display; the next display starts a new one."""


class Screen(Protocol):
    """Where a rendered target goes. `draw` replaces what was there; `close` comes once, after the last `draw`."""

    threaded: bool

    def draw(self, renderer: Renderer, final: bool) -> None: ...
    def close(self) -> None: ...


class CellScreen:
    """The output area of a cell."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self.threaded = route.threaded

    def draw(self, renderer: Renderer, final: bool) -> None:
        self._route.send(renderer.mime())

    def close(self) -> None:
        pass


class Publication:
    """One target being shown. `finish` makes sure that its last state is on the screen.

    Owner: the publisher thread draws (or, for a screen that is bound to the cell's thread, the caller of `finish`).
    Invariant: after the final draw, which happens once, nothing more is drawn.
    """

    def __init__(self, renderer: Renderer, screen: Screen | None, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._renderer = renderer
        self._screen = screen
        self._quiet = quiet
        self._clock = clock
        self._drawing = threading.Lock()
        self._over = threading.Event()
        self._next = 0.0
        self.updates = 0
        self.problem: Exception | None = None
        if screen is None:
            self._over.set()

    @property
    def view(self) -> str:
        return self._renderer.view

    @property
    def over(self) -> bool:
        """Whether the final state has been drawn."""
        return self._over.is_set()

    def step(self, now_please: bool = False) -> float:
        """Draw if something changed and it is time (or `now_please`); seconds until it makes sense to ask again.

        The end of the target is drawn at once. A failure to render falls back to plain text and never leaves this method.
        """
        with self._drawing:
            if self._over.is_set():
                return LONGEST_INTERVAL_S
            final = self._renderer.target.done
            now = self._clock()
            if not final and not now_please and (self._quiet or now < self._next):
                return INTERVAL_S if self._quiet else min(INTERVAL_S, self._next - now)
            if final or self._renderer.changed():
                self._draw(final)
                took = self._clock() - now
                self._next = now + min(LONGEST_INTERVAL_S, max(INTERVAL_S, RENDER_SHARE * took))
            return INTERVAL_S

    def _draw(self, final: bool) -> None:
        assert self._screen is not None
        self.updates += 1
        try:
            self._screen.draw(self._renderer, final)
        except Exception as problem:  # the answer matters more than its looks, and other displays more than this one
            self.problem = problem
            final = final or self._renderer.target.done
            self._fall_back()
        if final:
            try:
                self._screen.close()
            finally:
                self._over.set()

    def _fall_back(self) -> None:
        route = getattr(self._screen, "_route", None)
        if route is None:
            return
        try:
            plain = self._renderer.plain()
            route.send(bundle(preformatted(plain), plain))
        except Exception as problem:
            self.problem = problem

    def finish(self, timeout_s: float = 5.0) -> bool:
        """Wait until the final state is on the screen; whether it is.

        Call it when the target is over (or was cancelled and is about to be). On a time-out the display stays live and gets
        its final state when the target ends. An interrupt while waiting loses nothing.
        """
        if self._screen is None or self.over:
            return True
        if not self._screen.threaded:
            self._renderer.target.wait(timeout_s)
            self.step()
            return self.over
        deadline = self._clock() + timeout_s
        self._renderer.target.wait(timeout_s)
        _PUBLISHER.wake()
        if self._renderer.target.done:
            return self._over.wait(max(0.5, deadline - self._clock()))
        self.step(now_please=True)
        return self.over


class Publisher:
    """The one thread that draws. Started by the first display, ends when idle or at exit.

    Owner: `add` and `wake` from any thread. Invariant: a publication is in the list until its final draw.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._woken = False
        self._stopped = False
        self._live: list[Publication] = []
        self._thread: threading.Thread | None = None

    def add(self, publication: Publication) -> None:
        with self._news:
            self._live.append(publication)
            self._woken = True
            self._news.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="mlxnb-display", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Look at every display now."""
        with self._news:
            self._woken = True
            self._news.notify_all()

    def stop(self) -> None:
        """Draw what has ended and end the thread, within a second. For the exit of the process."""
        with self._news:
            self._stopped = True
            self._news.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _work(self) -> None:
        wait_s = 0.0
        while True:
            with self._news:
                self._news.wait_for(lambda: self._woken or self._stopped, wait_s if self._live else IDLE_S)
                if self._stopped or not (self._woken or self._live):
                    self._thread = None
                    return
                self._woken = False
                live = list(self._live)
            wait_s = min((publication.step() for publication in live), default=IDLE_S)
            with self._news:
                self._live = [publication for publication in self._live if not publication.over]


_PUBLISHER = Publisher()
atexit.register(_PUBLISHER.stop)


def publish(
    target: Run | RunGroup,
    *,
    view: str = "answer",
    background: bool = False,
    shell: Any = None,
    stop_hint: str | None = None,
    errors: bool = True,
) -> Publication:
    """Show a run or a group in the executing cell and keep it up to date until it ends.

    background: nobody will wait in this cell, so something is shown at once even where interim updates are off.
    stop_hint: how to stop it, if not as usual. errors: False where the cell raises the error of the target, which shows it.
    Batch execution gets the final bundle only; a terminal gets its own live view; outside IPython nothing is shown.
    Raises RequestError for an unknown view.
    """
    hint = stop_hint or ("its cancel() stops it" if background else STOP_HINT)
    renderer = Renderer(target, check_view(view), stop_hint=hint, errors=errors)
    shell = shell if shell is not None else get_ipython()
    if view == "none" or shell is None:
        return Publication(renderer, None, quiet=True)
    quiet = is_batch(shell)
    publication = Publication(renderer, _screen(target, shell, background), quiet)
    screen = publication._screen
    if screen is None:
        return publication
    if background and (quiet or not screen.threaded):
        screen.draw(renderer, target.done)
    elif not quiet and screen.threaded:
        publication.step()  # in the cell's own thread, so that the output stands where the cell made it
    if screen.threaded and not publication.over:
        _PUBLISHER.add(publication)
    return publication


def _screen(target: Run | RunGroup, shell: Any, background: bool) -> Screen | None:
    if is_terminal(shell):
        from .terminal import terminal_screen

        return terminal_screen(background)
    route = route_here(shell)
    return None if route is None else CellScreen(route)
