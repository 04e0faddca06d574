"""`publish`: runs become outputs of their cell, live and then static. One publisher thread per kernel feeds them all."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from IPython.core.getipython import get_ipython

from .render import STOP_HINT, Renderer, check_view
from .routing import KernelRoute, Route, is_batch, is_terminal, route_here
from .run import LoadRun, Run, RunGroup
from .sanitize import bundle, preformatted

INTERVAL_S = 0.25
"""At most four updates a second for each display: every one replaces the whole output."""
RENDER_SHARE = 5.0
"""An update waits at least this many times what the last one took to render, so that showing stays cheap beside decoding."""
LONGEST_INTERVAL_S = 5.0
SHORTEST_WAIT_S = 0.05
"""A live view is looked at this often; when something leaves is for its session to say."""
IDLE_S = 5.0
"""The thread ends after this long without a display; the next display starts a new one."""


class Screen(Protocol):
    """Where a rendered target goes. `draw` replaces what was there; `close` comes once, after the last `draw`."""

    threaded: bool

    def draw(self, renderer: Renderer, final: bool) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Paced(Protocol):
    """A screen that knows itself when it is due: a time of the monotonic clock, or None for the publication's own pace."""

    def pace(self) -> float | None: ...


@runtime_checkable
class Growing(Protocol):
    """A screen whose target may get more runs; it calls `again` with the new target."""

    again: Callable[[RunGroup], None]
    threaded: bool

    def draw(self, renderer: Renderer, final: bool) -> None: ...
    def close(self) -> None: ...


class CellScreen:
    """The output area of a cell."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self.threaded = route.threaded

    def draw(self, renderer: Renderer, final: bool) -> None:
        self._route.send(renderer.mime(saved=final))

    def close(self) -> None:
        pass


class Step(Protocol):
    """What the publisher thread looks at: `step` never raises, and says in how many seconds to ask again."""

    @property
    def over(self) -> bool: ...
    def step(self, now_please: bool = False) -> float: ...


class Publication:
    """One target being shown. `finish` makes sure that its last state is on the screen.

    Owner: the publisher thread draws (or, for a screen that is bound to the cell's thread, the caller of `finish`).
    Invariant: after the final draw, which happens once, nothing more is drawn.
    """

    def __init__(self, renderer: Renderer, screen: Screen | None, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._renderer = renderer
        self._awaited = renderer.target
        self._screen = screen
        self._paced = screen if isinstance(screen, Paced) else None  # asking a protocol costs more than looking at a view
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

    @property
    def outlives_cell(self) -> bool:
        """Whether the end can still be drawn when the cell is over: in a notebook that somebody watches."""
        return not self._quiet and isinstance(getattr(self._screen, "_route", None), KernelRoute)

    def step(self, now_please: bool = False) -> float:
        """Draw if something changed and it is time (or `now_please`); seconds until it makes sense to ask again.

        The end of the target is drawn at once. A failure to render falls back to plain text and never leaves this method.
        """
        with self._drawing:
            if self._over.is_set():
                return LONGEST_INTERVAL_S
            final = self._renderer.target.done
            now = self._clock()
            live = self._paced.pace() if self._paced is not None else None
            due = self._next if live is None else live
            if not final and not now_please and (self._quiet or now < due):
                return INTERVAL_S if self._quiet else min(INTERVAL_S, due - now)
            if final or live is not None or self._renderer.changed():
                self._draw(final)
                took = self._clock() - now
                self._next = now + min(LONGEST_INTERVAL_S, max(INTERVAL_S, RENDER_SHARE * took))
            return INTERVAL_S if live is None else SHORTEST_WAIT_S

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
            self._awaited.wait(timeout_s)
            self.step()
            return self.over
        deadline = self._clock() + timeout_s
        self._awaited.wait(timeout_s)
        _PUBLISHER.wake()
        if self._renderer.target.done:
            return self._over.wait(max(0.5, deadline - self._clock()))
        self.step(now_please=True)
        return self.over

    def extend(self, target: RunGroup) -> bool:
        """Show this target instead, which has more runs; False if the final state was drawn already."""
        with self._drawing:
            self._renderer.retarget(target)
            return not self._over.is_set()


class Publisher:
    """The one thread that draws. Started by the first display, ends when idle or at exit.

    Owner: `add` and `wake` from any thread. Invariant: a publication is in the list until its final draw.
    """

    def __init__(self) -> None:
        # No Condition: an interrupt of the main thread within one could leave its lock held, and the publisher waiting for good.
        self._lock = threading.RLock()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopped = False
        self._live: list[Step] = []
        self._flushes: list[Callable[[], object]] = []
        self._thread: threading.Thread | None = None

    def add(self, publication: Step) -> None:
        with self._lock:
            self._live.append(publication)
            self._news.put(None)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="mlxnb-display", daemon=True)
                self._thread.start()

    def after(self, flush: Callable[[], object]) -> None:
        """Call this after each round of draws, once however often it is asked for."""
        with self._lock:
            if flush not in self._flushes:
                self._flushes.append(flush)

    def wake(self) -> None:
        """Look at every display now."""
        self._news.put(None)

    def stop(self) -> None:
        """Draw what has ended and end the thread, within a second. For the exit of the process."""
        self._stopped = True
        self._news.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _work(self) -> None:
        wait_s = 0.0
        while True:
            woken = self._woken(wait_s if self._live else IDLE_S)
            with self._lock:
                if self._stopped or not (woken or self._live):
                    self._thread = None
                    return
                live, flushes = list(self._live), list(self._flushes)
            wait_s = min((publication.step() for publication in live), default=IDLE_S)
            for flush in flushes:
                try:
                    flush()
                except Exception:  # a front end that went away must not stop the displays of the others
                    pass
            with self._lock:
                self._live = [publication for publication in self._live if not publication.over]

    def _woken(self, wait_s: float) -> bool:
        """Wait at most this long to be woken; whether that was so. However often, it counts once."""
        woken = False
        try:
            self._news.get(timeout=max(wait_s, 0.0))
            woken = True
            while True:
                self._news.get_nowait()
        except queue.Empty:
            return woken


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
    screen = _screen(renderer, shell, background, quiet)
    publication = Publication(renderer, screen, quiet)
    if screen is None:
        return publication
    if background and (quiet or not screen.threaded):
        screen.draw(renderer, target.done)
    elif not quiet and screen.threaded:
        publication.step(now_please=True)  # in the cell's own thread, whatever the pace: an output made after its cell is lost
    if isinstance(screen, Growing):
        _let_grow(screen, publication)
    if screen.threaded and not publication.over:
        _PUBLISHER.add(publication)
    return publication


def _let_grow(screen: Growing, publication: Publication) -> None:
    """Rows that are added while it lives join it; later ones get a publication of their own on the same screen."""
    now = publication

    def again(target: RunGroup) -> None:
        nonlocal now
        if not now.extend(target):
            now = Publication(now._renderer, screen, quiet=False)
            _PUBLISHER.add(now)

    screen.again = again


def _screen(renderer: Renderer, shell: Any, background: bool, quiet: bool) -> Screen | None:
    if is_terminal(shell):
        from .terminal import terminal_screen

        return terminal_screen(background)
    route = route_here(shell)
    if route is None:
        return None
    target = renderer.target
    if renderer.view == "loom" and not isinstance(target, LoadRun):
        from .loomview import LoomScreen

        return LoomScreen(target, route, shell, quiet)
    if not quiet and not isinstance(target, LoadRun) and isinstance(route, KernelRoute):
        from .live import usable

        if usable(route):
            return _live_screen(renderer, shell, route)
    return CellScreen(route)


def _live_screen(renderer: Renderer, shell: Any, route: KernelRoute) -> Screen:
    """A live view, whose later rows are shown by a publication of their own once this one is over."""
    from .frontend import session_of
    from .live import LiveScreen

    session = session_of(shell)
    screen = LiveScreen(session, route, renderer)
    _PUBLISHER.after(session.flush)
    return screen


def follow(step: Step, flush: Callable[[], object] | None) -> None:
    """Let the publisher thread look at this until it is over, and flush after each round; None if the step itself does."""
    if flush is not None:
        _PUBLISHER.after(flush)
    _PUBLISHER.add(step)
