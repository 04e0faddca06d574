"""`LiveScreen`: a run or a group as a live view in its cell, then as the static bundle that stays.

While it lives, the publisher thread asks the stream for what is new and puts it into the session's next message. Where no
front end answers, the same output goes on as plain HTML. After the end the output still takes `branch` and `regenerate`
from front ends that hold a channel: its new rows stream, and the bundle is made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import RequestError

from . import runtime
from .frontend import Handler, Presence, Session
from .record import group_record, label_of, saved
from .render import Renderer
from .routing import KernelRoute
from .run import Run, RunGroup
from .stream import Stream

if TYPE_CHECKING:
    from mlxnb_widgets._base import View

MAX_ROWS = 64
"""Rows that one output may gain by branching."""


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
        self.commands: Mapping[str, Handler] = {
            "stop": self._stop,
            "snapshot": lambda args: {"record": self.snapshot()},
            "branch": self._branch,
            "regenerate": self._regenerate,
        }
        self._session = session
        self._route = route
        self._renderer = renderer
        self._stream = Stream(self.key, renderer.runs)
        self._presence = Presence(session, route, _widget)
        self._asked = len(self._stream.runs)
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
        self._stream.items()  # the first snapshot has them
        fallback = renderer.mime()
        kind = "run" if isinstance(renderer.target, Run) else "compare"
        try:
            self._presence.show(self.key, self.snapshot(), fallback, kind=kind, setting={"view": renderer.view})
        except Exception:  # anywidget of another age, no comm: an answer without a view is still an answer
            self._plain = True
            self._presence.close()
            self._route.send(fallback)

    def _tell(self, now_please: bool = False) -> None:
        items, shorter = self._stream.items()
        self._session.put(items)
        if now_please:
            self._session.flush(now_please=True)
        else:
            self._presence.snapshot(self.snapshot, now_please=shorter)

    # -- records -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The record as far as it was told, as a view takes it."""
        runs = self._stream.records()
        extra = {"key": self.key, "view": self._renderer.view}
        if isinstance(self._renderer.target, Run):
            return saved(runs[0], extra)
        return saved(group_record(runs, [label_of(run["labels"], index) for index, run in enumerate(runs)]), extra)

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

    # -- commands ------------------------------------------------------------------------------------------------------

    def _run(self, args: Mapping[str, Any]) -> Run:
        index, runs = args.get("run", 0), self._stream.runs
        if not 0 <= index < len(runs):
            raise RequestError(f"There is no run {index} in this output.", f"It has {len(runs)}.")
        return runs[index]

    def _stop(self, args: Mapping[str, Any]) -> None:
        if "run" in args:
            self._run(args).cancel()
        else:
            for run in self._stream.runs:
                run.cancel()

    def _branch(self, args: Mapping[str, Any]) -> dict[str, Any]:
        run = self._run(args)
        self._require_room()
        return self._grow([run.branch(args["at"], args.get("token"))])

    def _regenerate(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Ask again with a new seed: one run, or all that the cell asked for."""
        runs = [self._run(args)] if "run" in args else self._stream.runs[: self._asked]
        self._require_room(len(runs))
        return self._grow([self._again(run) for run in runs])

    def _again(self, run: Run) -> Run:
        sampling = replace(run.request.sampling, seed=None)
        request = replace(run.request, id=runtime.new_request_id(), samples=1, sampling=sampling, continuation=())
        return Run(runtime.client().submit(request)[0], {**run.labels, "again": len(self._stream.runs)})

    def _require_room(self, more: int = 1) -> None:
        if len(self._stream.runs) + more > self._asked + MAX_ROWS:
            raise RequestError(f"This output has {len(self._stream.runs)} answers already.", "Run the cell again for more.")

    def _grow(self, runs: list[Run]) -> dict[str, Any]:
        """Add rows. The record is a group from now on."""
        target = RunGroup([*self._stream.runs, *runs])
        added = [self._stream.add(run) for run in runs]
        self.again(target)
        with contextlib.suppress(Exception):  # a view that is gone needs no snapshot
            self._presence.snapshot(self.snapshot, now_please=True)
        return {"run": added[0], "record": self.snapshot()}


def _widget(**traits: Any) -> View:
    from mlxnb_widgets.run import RunWidget

    return RunWidget(**traits)


def usable(route: Any) -> bool:
    """Whether a live view can be shown on this route."""
    from mlxnb_widgets import available

    return isinstance(route, KernelRoute) and available()
