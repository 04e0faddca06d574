"""Views that stay open: the base of chat, playground and stepper, and the engine monitor."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from mlxnb_engine.errors import RequestError

from . import runtime
from .comm import engine_status
from .frontend import Handler, Presence, Session, session_of
from .live import usable
from .routing import KernelRoute, is_batch, route_here
from .run import Run
from .sanitize import bundle, el, preformatted
from .stream import Stream

if TYPE_CHECKING:
    from mlxnb_widgets._base import View

LOOK_S = 0.05
REST_S = 5.0


class OpenView:
    """A view that a person works with, over runs that come and go.

    Any thread. Invariant: a view gets a snapshot whenever its runs were replaced; `epoch` counts those, so that a late one is
    recognised. `done` as a source: its runs are over. make: makes the widget of this kind of view.
    """

    at_once = frozenset({"stop"})

    def __init__(self, shell: Any, make: Callable[..., View]) -> None:
        self.shell = shell if shell is not None else get_ipython()
        self.session: Session = session_of(self.shell)
        self.key = self.session.new_key()
        self.commands: Mapping[str, Handler] = {
            "snapshot": lambda args: {"record": self.record()},
            "stop": self._stop,
            **self.handlers(),
        }
        self.epoch = 0
        self.stream = Stream(self.key, ())
        self._make = make
        self._presence: Presence | None = None
        self._followed = False
        self.session.add(self)

    # -- what each view says -------------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Handler]:
        return {}

    def record(self) -> dict[str, Any]:
        raise NotImplementedError

    def bundle(self) -> dict[str, Any]:
        """What is shown where no live view can be, and what stays."""
        raise NotImplementedError

    # -- showing -------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """In the current cell. Where live views cannot be shown, what it would hold now."""
        route = route_here(self.shell)
        if route is None:
            return
        if not isinstance(route, KernelRoute) or is_batch(self.shell) or not usable(route):
            route.send(self.bundle())
            return
        self._presence = Presence(self.session, route, self._make)
        try:
            self.stream.items()
            self._presence.show(self.key, self.record(), self.bundle())
        except Exception:  # as LiveScreen: no view is no reason for no output
            self._presence.close()
            self._presence = None
            route.send(self.bundle())
        self.watch()

    def close(self) -> None:
        """Leave what stays in the output; the view takes no more commands."""
        self.session.forget(self.key)
        presence, self._presence = self._presence, None
        if presence is not None:
            presence.replace(self.bundle())

    def replace_runs(self, runs: list[Run]) -> None:
        self.epoch += 1
        self.stream.replace(runs)
        self.changed()
        self.watch()

    def changed(self) -> None:
        """Give the view a snapshot now."""
        presence = self._presence
        if presence is not None:
            with contextlib.suppress(Exception):  # a front end that is gone
                presence.snapshot(self.record, now_please=True)

    # -- for the publisher thread --------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Let the publisher thread stream the runs until they are over."""
        if self._presence is not None and not self._followed and not self.stream.done:
            from .display import follow

            self._followed = True
            follow(self, self.session.flush)

    @property
    def done(self) -> bool:
        return self.stream.done

    @property
    def over(self) -> bool:
        return not self._followed

    def step(self, now_please: bool = False) -> float:
        done = self.stream.done
        try:
            items, shorter = self.stream.items()
            self.session.put(items)
            if done:
                self._followed = False
                self.ended()
                self.changed()
            elif self._presence is not None:
                self._presence.snapshot(self.record, now_please=shorter)
        except Exception:  # one view must not stop the displays of the others
            self._followed = not done
        return LOOK_S

    def ended(self) -> None:
        """All runs are over."""

    # -- commands ------------------------------------------------------------------------------------------------------

    def _stop(self, args: Mapping[str, Any]) -> None:
        for run in self.stream.runs:
            run.cancel()


# -- the engine ------------------------------------------------------------------------------------------------------------


class Monitor(OpenView):
    """The engine over time: rows in their slots, speed, memory. Its record is a status, sent while it changes."""

    def __init__(self, shell: Any = None) -> None:
        super().__init__(shell, _monitor)
        self._numbers = itertools.count()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "monitor.stop": lambda args: self._engine().cancel([args["id"]]),
            "stop_all": lambda args: self._engine().cancel(),
            "unload": lambda args: self._engine().unload(args.get("model")),
        }

    @staticmethod
    def _engine() -> Any:
        here = runtime.current()
        if here is None:
            raise RequestError("No engine is running.", "It starts with the first prompt.")
        return here

    def record(self) -> dict[str, Any]:
        return engine_status()

    def show(self) -> None:
        super().show()
        if self._presence is not None:
            self.session.beat.add(self._tell)

    def _tell(self, status: dict[str, Any]) -> bool:
        presence = self._presence
        if presence is None or presence.widget is None:
            return False
        presence.widget.record = status
        return True

    def bundle(self) -> dict[str, Any]:
        status = engine_status()
        lines = [f"engine {status.get('state')}"]
        for model in status.get("models") or []:
            lines.append(f"{model.get('name')} · {model.get('rows', 0)} rows · {model.get('queue', 0)} waiting")
        plain = "\n".join(lines)
        return bundle(el("div", "run", preformatted(plain)), plain)


def _monitor(**traits: Any) -> View:
    from mlxnb_widgets.monitor import MonitorWidget

    return MonitorWidget(**traits)


def monitor() -> Monitor:
    """Show the engine over time in the current cell."""
    view = Monitor(_shell())
    view.show()
    return view


def _shell() -> Any:
    """The shell that views are shown in. Raises RequestError outside of IPython."""
    shell = get_ipython()
    if shell is None:
        raise RequestError("Views need a notebook.", "Use Run and Chat as they are in a plain script.")
    return shell
