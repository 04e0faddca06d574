"""Rows of a model that runs one row per forward: each in a lane of its own, and the lanes step in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..admission import Entry
from ..graph import ModelGraph
from ..state.spec import State
from .checkpoints import Checkpoints
from .window import GroupLimits, Preparation, Row, WindowGroup


class Turns:
    """A group whose rows never share a step (the scheduler's `Group`).

    Owner: engine thread. Invariant: a lane is a `WindowGroup` with one row; `_reader` prepares prompts and runs none.
    """

    shares_prefill = False
    reuse = None
    """Rows in mlx-lm's own caches are not cut into blocks: their layouts are as many as these models. Nothing of them is kept."""

    def __init__(self, graph: ModelGraph, limits: GroupLimits, checkpoints: Checkpoints | None = None) -> None:
        self.graph, self.limits, self.checkpoints = graph, limits, checkpoints
        self._reader = WindowGroup(graph, limits)
        self._lanes: deque[WindowGroup] = deque()
        self._past = (0, 0)  # steps and tokens so far

    # -- what the scheduler asks -------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return sum(lane.active for lane in self._lanes)

    @property
    def preparing(self) -> bool:
        return self._reader.preparing

    @property
    def waiting_rows(self) -> int:
        return self._reader.waiting_rows

    @property
    def kv_bytes(self) -> int:
        return self._reader.kv_bytes + sum(lane.kv_bytes for lane in self._lanes)

    def bytes_for(self, tokens: Sequence[int]) -> int:
        return self._reader.bytes_for(tokens)

    def growth(self, tokens: Sequence[int]) -> int:
        return self._reader.growth(tokens)

    def can_claim(self, entry: Entry) -> bool:
        return self._reader.can_claim(entry)

    def claim(self, entry: Entry, followers: Sequence[Entry]) -> None:
        self._reader.claim(entry, followers)

    def prepare(self, entries: list[Entry]) -> None:
        self._reader.prepare(entries)

    def advance_preparation(self) -> None:
        self._reader.advance_preparation()

    def next_ready(self) -> Entry | None:
        return self._reader.next_ready()

    def join_ready(self, places: int) -> int:
        """Give up to `places` rows of the first ready entry a lane each."""
        entry = self.next_ready()
        if entry is None or places <= 0:
            return 0
        prep, joined = self._reader.ready[0][0], 0
        while entry.rows and joined < places:
            lane = WindowGroup(self.graph, self.limits, checkpoints=self.checkpoints)
            lane.join(prep, entry)
            joined += 1
            if lane.rows:
                self._lanes.append(lane)
        if not entry.rows:
            self._reader.ready.popleft()
            self._release(prep)
        return joined

    def _release(self, prep: Preparation) -> None:
        if all(lane.slots is not prep.slots for lane in self._lanes):
            prep.slots.clear()

    def advance(self) -> bool:
        """One step of the lane whose turn it is; False if there is none."""
        if not self._lanes:
            return False
        lane = self._lanes.popleft()
        before = (lane.steps, lane.tokens)
        lane.advance()
        self._past = (self._past[0] + lane.steps - before[0], self._past[1] + lane.tokens - before[1])
        if lane.rows:
            self._lanes.append(lane)
        return True

    # -- what the engine shows ---------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        return [row for lane in self._lanes for row in lane.rows]

    @property
    def slots(self) -> State:
        return self._reader.slots

    @property
    def steps(self) -> int:
        return self._past[0]

    @property
    def tokens(self) -> int:
        return self._past[1]

    def in_batch_order(self) -> list[Row]:
        return self.rows

    def staged(self) -> list[Entry]:
        return self._reader.staged()

    # -- failure -----------------------------------------------------------------------------------------------------

    def fail_active(self, error: BaseException) -> None:
        lanes, self._lanes = self._lanes, deque()
        for lane in lanes:
            lane.fail_active(error)

    def dispose(self, error: BaseException) -> None:
        """End everything with this error and drop every array. Idempotent."""
        self.fail_active(error)
        self._reader.dispose(error)

    def check(self) -> None:
        """Raise RuntimeError unless every lane adds up."""
        for lane in (self._reader, *self._lanes):
            lane.check()
        if any(lane.active > 1 for lane in self._lanes) or self._reader.active:
            raise RuntimeError("a lane has more rows than one")
