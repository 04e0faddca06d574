"""`Scheduler`: when, and which rows. FIFO admission, one bounded advance of each kind per tick. No MLX here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from .admission import Entry
from .errors import CapacityExceeded

_FORESEEN = 64
"""Entries of the queue whose prompts an entry is compared with when it starts."""


class Group(Protocol):
    """Rows that share buffers and one forward, as the scheduler sees them."""

    @property
    def active(self) -> int: ...
    @property
    def waiting_rows(self) -> int: ...
    @property
    def preparing(self) -> bool: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def shares_prefill(self) -> bool: ...
    def bytes_for(self, tokens: Sequence[int]) -> int: ...
    def growth(self, tokens: Sequence[int]) -> int: ...
    def can_claim(self, entry: Entry) -> bool: ...
    def claim(self, entry: Entry, followers: Sequence[Entry]) -> None: ...
    def prepare(self, entries: list[Entry]) -> None: ...
    def advance_preparation(self) -> None: ...
    def next_ready(self) -> Entry | None: ...
    def join_ready(self, places: int) -> int: ...
    def advance(self) -> bool: ...
    def dispose(self, error: BaseException) -> None: ...
    def check(self) -> None: ...


class Scheduler:
    """Admission and turns of one group.

    Owner: engine thread. Invariant: rows running + rows being prepared <= max_rows, except the later samples of one
    request, which wait with their prompt's state until a place is free; live K/V buffers <= max_kv_bytes if that is set.
    """

    def __init__(self, group: Group, *, max_rows: int, prefill_chunk: int, max_kv_bytes: int | None) -> None:
        self.group = group
        self.queue: deque[Entry] = deque()
        self._max_rows, self._chunk, self._max_kv_bytes = max_rows, prefill_chunk, max_kv_bytes

    @property
    def idle(self) -> bool:
        group = self.group
        return not self.queue and not group.active and not group.waiting_rows and not group.preparing

    @property
    def waiting(self) -> bool:
        """Prompts are queued and nothing else is under way: what the first of them waits for comes from elsewhere."""
        group = self.group
        return bool(self.queue) and not (group.active or group.waiting_rows or group.preparing)

    def submit(self, entry: Entry) -> None:
        """Queue one prompt. Raises CapacityExceeded if it could not run even alone."""
        if self._max_kv_bytes is not None:
            need = self.group.bytes_for([entry.final_tokens]) * (1 if len(entry.rows) == 1 else 2)
            if need > self._max_kv_bytes:
                raise CapacityExceeded(
                    f"This request needs {need:,} bytes of K/V, and max_kv_bytes is {self._max_kv_bytes:,}.",
                    "Lower max_tokens, shorten the prompt, or raise max_kv_bytes.",
                )
        self.queue.append(entry)

    def tick(self) -> bool:
        """One prefill window and one decode step at most; False if there was nothing to do."""
        self._drop_cancelled()
        while self.group.join_ready(self._joinable()):
            pass  # all that have a place join at this one safe point
        self._admit()
        prepared = self.group.preparing
        if prepared:
            self.group.advance_preparation()
        stepped = self.group.advance()
        return prepared or stepped or not self.idle

    def _drop_cancelled(self) -> None:
        for entry in self.queue:
            entry.drop_cancelled()
        if any(not entry.rows for entry in self.queue):
            self.queue = deque(entry for entry in self.queue if entry.rows)

    def _joinable(self) -> int:
        """How many rows of the first ready entry may join now."""
        places = self._max_rows - self.group.active
        entry = self.group.next_ready()
        if self._max_kv_bytes is None or entry is None:
            return places
        if self.group.active == 0 and len(entry.rows) == 1:
            return 1  # adopted without a copy
        room = self._max_kv_bytes - self.group.kv_bytes
        fitting = (n for n in range(min(places, len(entry.rows)), 0, -1) if self.group.growth([entry.final_tokens] * n) <= room)
        return next(fitting, 0)

    def _admit(self) -> None:
        """Start to prepare the head of the queue, with followers short enough to share its prefill window.

        Who lacks a block that another is about to compute waits for it, and everybody behind it: FIFO.
        """
        if self.group.preparing or not self.queue:
            return
        places = self._max_rows - self.group.active - self.group.waiting_rows
        taken: list[Entry] = []
        while self.queue and places > 0 and self.group.can_claim(self.queue[0]) and self._fits([*taken, self.queue[0]]):
            entry = self.queue.popleft()
            self.group.claim(entry, tuple(self.queue)[:_FORESEEN])
            taken.append(entry)
            places -= len(entry.rows)
        if taken:
            self.group.prepare(taken)

    def _fits(self, entries: Sequence[Entry]) -> bool:
        if len(entries) > 1 and not self.group.shares_prefill:
            return False
        widest = max(e.unread for e in entries)
        if len(entries) > 1 and len(entries) * widest > min(e.chunk or self._chunk for e in entries):
            return False
        if self._max_kv_bytes is None:
            return True
        if self.group.waiting_rows:
            # Samples that wait for room come first: what was prepared behind them could hold the very bytes they wait for.
            return False
        # A prepared row exists twice while it joins, unless it is adopted by an empty group. All rows of a prefill window take its width.
        alone = len(entries) == 1 and len(entries[0].rows) == 1 and not self.group.active
        lengths = [max(e.final_tokens, e.target - e.unread + widest) for e in entries]
        need = self.group.bytes_for(lengths) + (0 if alone else self.group.growth(lengths))
        return self.group.kv_bytes + need <= self._max_kv_bytes

    def fail_all(self, error: BaseException) -> None:
        """End every row, queued ones included."""
        queued, self.queue = list(self.queue), deque()
        try:
            self.group.dispose(error)
        finally:
            for entry in queued:
                entry.fail(error)

    def check(self) -> None:
        """Raise RuntimeError unless what must add up does."""
        if self.group.active > self._max_rows:
            raise RuntimeError(f"{self.group.active} rows run, and max_rows is {self._max_rows}")
        if self._max_kv_bytes is not None and self.group.kv_bytes > self._max_kv_bytes:
            raise RuntimeError(f"K/V buffers hold {self.group.kv_bytes} bytes, and max_kv_bytes is {self._max_kv_bytes}")
        self.group.check()
