"""`LiveScreen`: a run or a group as a live view in its cell, then as the static bundle that stays.

While it lives, the publisher thread asks the stream for what is new and puts it into the session's next message. Where no
front end answers, the same output goes on as plain HTML. After the end the output still takes `branch` and `regenerate`
from front ends that hold a channel: its new rows stream, and the bundle is made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .frontend import Handler, Presence, Session
from .render import Renderer
from .routing import KernelRoute
from .rows import Rows
from .run import Run, RunGroup

if TYPE_CHECKING:
    from mlxnb_widgets._base import View


class LiveScreen:
    """One output. A Screen for the publisher, and the source of its view's commands.

    Owner: the cell's thread draws first, then the publisher thread; the worker thread adds rows. again: called after a row
    was added, with the new target; whether drawing goes on is for the publication to know.
    """

    threaded = True
    at_once = frozenset({"stop"})

    def __init__(self, session: Session, route: KernelRoute, renderer: Renderer) -> None:
        self.key = renderer.key = session.new_key()
        self.again: Callable[[RunGroup], None] = lambda target: None
        self._session = session
        self._route = route
        self._renderer = renderer
        self._rows = Rows(self.key, renderer.target, {"key": self.key, "view": renderer.view}, self._grown)
        self.commands: Mapping[str, Handler] = self._rows.commands
        self._presence = Presence(session, route, _widget)
        self._shown = False
        self._plain = False
        session.add(self)

    # -- what the publication asks -------------------------------------------------------------------------------------

    def pace(self) -> float | None:
        """When the next draw is due, on the monotonic clock; None for the publication's own pace."""
        return None if self._plain else self._session.pace.due

    def draw(self, renderer: Renderer, final: bool) -> None:
        if final:
            if self._shown:
                self._tell(now_please=True)
            self._shown = True
            self._presence.replace(renderer.mime(saved=True))
        elif self._plain:
            self._route.send(renderer.mime())
        elif not self._shown:
            self._show(renderer)
        elif self._presence.widget is not None and self._session.pace.deaf:
            self._plain = True
            self._presence.replace(renderer.mime())
        else:
            self._tell()

    def close(self) -> None:
        self._presence.close()

    def _show(self, renderer: Renderer) -> None:
        self._shown = True
        self._rows.stream.items()  # the first snapshot has them
        fallback = renderer.mime(saved=True)
        kind = "run" if isinstance(renderer.target, Run) else "compare"
        try:
            self._presence.show(self.key, self._rows.snapshot(), fallback, kind=kind, setting={"view": renderer.view})
        except Exception:  # anywidget of another age, no comm: an answer without a view is still an answer
            self._plain = True
            self._presence.close()
            self._route.send(fallback)

    def _tell(self, now_please: bool = False) -> None:
        items, shorter = self._rows.stream.items()
        self._session.put(items)
        if now_please:
            self._session.flush(now_please=True)
        else:
            self._presence.snapshot(self._rows.snapshot, now_please=shorter)

    def _grown(self, target: RunGroup) -> None:
        self.again(target)
        with contextlib.suppress(Exception):  # a view that is gone needs no snapshot
            self._presence.snapshot(self._rows.snapshot, now_please=True)

    # -- what stays ----------------------------------------------------------------------------------------------------

    def output(self) -> dict[str, Any]:
        """What stays of this output, and where it stands."""
        data = self._renderer.mime(saved=True)
        route = self._route
        return {"key": self.key, "cell_id": route.cell_id, "display_id": route.display_id, "model_id": self.model_id, "data": data}

    @property
    def model_id(self) -> str | None:
        return self._presence.model_id

    @property
    def cell_id(self) -> str | None:
        return self._route.cell_id

    @property
    def done(self) -> bool:
        return self._renderer.target.done


def _widget(**traits: Any) -> View:
    from mlxnb_widgets.run import RunWidget

    return RunWidget(**traits)


def usable(route: Any) -> bool:
    """Whether a live view can be shown on this route."""
    from mlxnb_widgets import available

    return isinstance(route, KernelRoute) and available()
