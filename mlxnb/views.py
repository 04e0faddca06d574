"""Views that stay open: the base of chat, playground and stepper, and the engine monitor.

In IPython they are shown in the current cell. Elsewhere, as in marimo, `widget` makes one widget of a view, for the host to show.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from mlxnb_engine.errors import RequestError

from . import runtime
from .comm import engine_status
from .frontend import Handler, OwnSession, Presence, Session, session_of
from .live import usable
from .routing import KernelRoute, is_batch, route_here
from .run import Run
from .sanitize import bundle, el, preformatted
from .schema import MONITOR_SCHEMA, RUN_MIME, WIDGET_MIME
from .stream import Stream

if TYPE_CHECKING:
    from mlxnb_widgets._base import View

LOOK_S = 0.05
REST_S = 5.0


class OpenView:
    """A view that a person works with, over runs that come and go.

    Any thread. Invariant: a view gets a snapshot whenever its runs were replaced; `epoch` counts those, so that a late one is
    recognised. `done` as a source: its runs are over. make: makes the widget of this kind of view. shell: None where there is
    no IPython; the view has a session of its own then.
    """

    at_once = frozenset({"stop"})

    def __init__(self, shell: Any, make: Callable[..., View], session: Session | None = None) -> None:
        self.shell = shell if shell is not None else get_ipython()
        self.session: Session = session or (session_of(self.shell) if self.shell is not None else OwnSession())
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
        self._following = threading.Lock()
        self.session.add(self)

    # -- what each view says -------------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Handler]:
        return {}

    def record(self) -> dict[str, Any]:
        raise NotImplementedError

    def bundle(self) -> dict[str, Any]:
        """The same as HTML and text."""
        raise NotImplementedError

    def stays(self) -> dict[str, Any]:
        """What is shown where no live view can be. The record goes with it, for views that open without a kernel."""
        items, _ = self.stream.items()  # a record has what was told
        self.session.put(items)
        record = self.record()
        return {**self.bundle(), RUN_MIME: record}

    # -- showing -------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """In the current cell. Where live views cannot be shown, what it would hold now."""
        route = route_here(self.shell)
        if route is None:
            return
        if not isinstance(route, KernelRoute) or is_batch(self.shell) or not usable(route):
            route.send(self.stays())
            return
        self._presence = Presence(self.session, route, self._make)
        try:
            self.stream.items()
            self._presence.show(self.key, self.record(), self.stays(), **self.traits())
            self.shown()
        except Exception:  # as LiveScreen: no view is no reason for no output
            self._presence.close()
            self._presence = None
            route.send(self.stays())
        self.watch()

    def widget(self) -> View:
        """This view as one widget, for a host that shows widgets by itself, such as marimo; the one before is closed.

        Raises RequestError for a view that is shown in a cell.
        """
        if not isinstance(self.session, OwnSession):
            raise RequestError("This view is shown in its cell already.", "Make another one, or use widget() with its chat or run.")
        if self._presence is not None:
            self._presence.close()
        self._presence = Presence(self.session, None, self._make)
        self.stream.items()
        self._presence.show(self.key, self.record(), {}, **self.traits())
        self.shown()
        self.watch()
        assert self._presence.widget is not None
        return self._presence.widget

    def traits(self) -> dict[str, Any]:
        """Of the widget, beside those that every view has."""
        return {}

    def shown(self) -> None:
        """A widget was made."""

    @property
    def abandoned(self) -> bool:
        """Whether the widget was closed from outside, as a host does when the cell runs again."""
        return self._presence is not None and not self._presence.open

    def close(self) -> None:
        """Leave what stays in the output; the view takes no more commands."""
        self.session.forget(self.key)
        presence, self._presence = self._presence, None
        if presence is not None:
            presence.replace(self.stays())

    @property
    def cell_id(self) -> str | None:
        """Of the cell it was shown in; None where it was not."""
        route = self._presence.route if self._presence is not None else None
        return route.cell_id if route is not None else None

    @property
    def model_id(self) -> str | None:
        return self._presence.model_id if self._presence is not None else None

    def output(self) -> dict[str, Any] | None:
        """The view in its output, and where that stands; None where it is in none."""
        presence = self._presence
        if presence is None or presence.route is None or presence.widget is None:
            return None
        data = {WIDGET_MIME: presence.widget.reference(), **self.stays()}
        where = {"cell_id": self.cell_id, "display_id": presence.route.display_id}
        return {"key": self.key, **where, "model_id": self.model_id, "data": data}

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
        """Let the publisher thread stream the runs until they are over. One that is over already has an end to tell, too."""
        from .display import follow

        with self._following:
            if self._presence is None or self._followed or not self.stream.runs:
                return
            self._followed = True
        follow(self, None if isinstance(self.session, OwnSession) else self.session.flush)

    @property
    def done(self) -> bool:
        return self.stream.done

    @property
    def stays_open(self) -> bool:
        """Somebody may work with it, also while no run is under way."""
        return self._presence is not None and self._presence.open

    @property
    def over(self) -> bool:
        return not self._followed

    def step(self, now_please: bool = False) -> float:
        done = self.done
        try:
            items, shorter = self.stream.items()
            self.session.put(items)
            if isinstance(self.session, OwnSession):
                self.session.flush(now_please=done)
            if done:
                self.ended()
                self.changed()
                with self._following:
                    self._followed = not self.done  # a run may have been added meanwhile
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
            "history": lambda args: self.session.beat.past.record(),
        }

    @staticmethod
    def _engine() -> Any:
        here = runtime.current()
        if here is None:
            raise RequestError("No engine is running.", "It starts with the first prompt.")
        return here

    def record(self, status: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"schema": MONITOR_SCHEMA, "key": self.key, **(engine_status() if status is None else status)}

    def shown(self) -> None:
        self.session.beat.add(self._tell)

    def _tell(self, status: dict[str, Any]) -> bool:
        presence = self._presence
        if presence is None or presence.widget is None or not presence.open:
            return False
        presence.widget.record = self.record(status)
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
    view = Monitor()
    view.show()
    return view
