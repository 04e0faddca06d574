"""`Rows`: the runs of one output, and the commands of its view that stop them or add to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mlxnb_engine.errors import RequestError

from . import runtime
from .frontend import Handler
from .record import group_record, label_of, saved
from .run import Run, RunGroup
from .stream import Stream

MAX_ROWS = 64
"""Rows that one output may gain by branching."""


class Rows:
    """The runs of one output, those that were asked for first.

    Owner: the worker thread adds rows, any thread reads. extra: of its record, such as `key` and `view`. grown: called after
    rows were added, with the new target.
    """

    def __init__(self, key: str, target: Run | RunGroup, extra: Mapping[str, str], grown: Callable[[RunGroup], None]) -> None:
        runs = [target] if isinstance(target, Run) else list(target)
        self.stream = Stream(key, runs)
        self._asked = len(runs)
        self._one = isinstance(target, Run)
        self._extra = dict(extra)
        self._grown = grown

    @property
    def commands(self) -> Mapping[str, Handler]:
        return {
            "stop": self._stop,
            "snapshot": lambda args: {"record": self.snapshot()},
            "branch": self._branch,
            "regenerate": self._regenerate,
        }

    def snapshot(self) -> dict[str, Any]:
        """The record as far as it was told, as a view takes it."""
        runs = self.stream.records()
        if self._one:
            return saved(runs[0], self._extra)
        return saved(group_record(runs, [label_of(run["labels"], index) for index, run in enumerate(runs)]), self._extra)

    def _run(self, args: Mapping[str, Any]) -> Run:
        index, runs = args.get("run", 0), self.stream.runs
        if not 0 <= index < len(runs):
            raise RequestError(f"There is no run {index} in this output.", f"It has {len(runs)}.")
        return runs[index]

    def _stop(self, args: Mapping[str, Any]) -> None:
        if "run" in args:
            self._run(args).cancel()
        else:
            for run in self.stream.runs:
                run.cancel()

    def _branch(self, args: Mapping[str, Any]) -> dict[str, Any]:
        run = self._run(args)
        self._require_room()
        return self._grow([run.branch(args["at"], args.get("token"))])

    def _regenerate(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Ask again with a new seed: one run, or all that the cell asked for."""
        runs = [self._run(args)] if "run" in args else self.stream.runs[: self._asked]
        self._require_room(len(runs))
        return self._grow([self._again(run) for run in runs])

    def _again(self, run: Run) -> Run:
        sampling = replace(run.request.sampling, seed=None)
        request = replace(run.request, id=runtime.new_request_id(), samples=1, sampling=sampling, continuation=(), resumed=None)
        return Run(runtime.client().submit(request)[0], {**run.labels, "again": len(self.stream.runs)})

    def _require_room(self, more: int = 1) -> None:
        if len(self.stream.runs) + more > self._asked + MAX_ROWS:
            raise RequestError(f"This output has {len(self.stream.runs)} answers already.", "Run the cell again for more.")

    def _grow(self, runs: list[Run]) -> dict[str, Any]:
        """Add rows. The record is a group from now on."""
        target = RunGroup([*self.stream.runs, *runs])
        self._one = False
        added = [self.stream.add(run) for run in runs]
        self._grown(target)
        return {"run": added[0], "record": self.snapshot()}
