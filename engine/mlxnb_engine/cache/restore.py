"""Restoring a prefix from disk: a plan without side effects, then reads that hold good for all of it or are a miss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .blocks import Block, T, first_seen
from .record import BlockName, Layout
from .store import Store


@dataclass(frozen=True, slots=True)
class Want:
    """What a prompt could reuse. names: its whole blocks, first to last; at most those within all but its last token.

    held, held_ends: indices of blocks, and of attachments, that are in RAM under a lease. beyond: blocks that RAM alone offers;
    a restore that ends no later is of no use. window: tokens that every layer with K/V sees at most, None if one sees all.
    trimmable: state may be taken up without an attachment. least_tokens: nor before this many tokens.
    """

    names: tuple[BlockName, ...]
    held: frozenset[int] = frozenset()
    held_ends: frozenset[int] = frozenset()
    beyond: int = 0
    window: int | None = None
    trimmable: bool = True
    least_tokens: int = 0

    def first(self, end: int) -> int:
        """Index of the first block that has to be there so that a restore may end after `end` blocks; `end` if none has."""
        first = first_seen(end * T, self.window)
        return first if self.trimmable else min(first, end - 1)

    def to_read(self, end: int) -> list[int]:
        """Indices of the blocks to read for it: what is needed, state or attachment, and not in RAM."""
        lacking = {index for index in range(self.first(end), end) if index not in self.held}
        if not self.trimmable and end - 1 not in self.held_ends:
            lacking.add(end - 1)
        return sorted(lacking)


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """end: blocks from the first on that may now be taken up. blocks: those of them that were read, by index, verified."""

    end: int
    blocks: dict[int, Block]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())


def ends(want: Want, present: Sequence[bool]) -> Iterator[int]:
    """Where a restore may end, in blocks, deepest first, as far as blocks decide. present: by index, on disk or in RAM.

    Full attention asks for every block from the first; a sliding window only for those that it reaches back to from the end.
    """
    run, runs = 0, [0]
    for there in present:
        run = run + 1 if there else 0
        runs.append(run)
    for end in range(len(present), max(want.beyond, -(-want.least_tokens // T) - 1), -1):
        if runs[end] >= end - want.first(end):
            yield end


def restore(store: Store, layout: Layout, want: Want, limit_bytes: int, alive: Callable[[], bool]) -> Restored | None:
    """Read the longest usable chain; None if there is none of use, or once `alive` says that nobody waits any more.

    limit_bytes: of RAM that is set aside; what would need more ends earlier. A block that turns out bad, gone or unreadable
    makes a new plan with a shorter end; what was read before and still counts is not read again. I/O thread.
    """
    store.greet(layout)
    store.look_again()
    read: dict[int, Block] = {}
    lost: set[int] = set()
    while alive():
        end = _plan(store, layout, want, lost, limit_bytes)
        if end is None:
            return None
        for index in want.to_read(end):
            if index not in read:
                block = store.load(layout, want.names[index]) if alive() else None
                if block is None:
                    lost.add(index)
                    break
                read[index] = block
        else:
            wanted = want.to_read(end)
            if not want.trimmable and end - 1 in read and read[end - 1].attachment is None:
                lost.add(end - 1)  # another process has replaced the record since its header was read
                continue
            store.keep(layout, want.names[:end])
            return Restored(end, {index: read[index] for index in wanted})
    return None


def _plan(store: Store, layout: Layout, want: Want, lost: set[int], limit_bytes: int) -> int | None:
    sizes = [store.size(layout, name) if index not in lost else None for index, name in enumerate(want.names)]
    for end in ends(want, [size is not None or index in want.held for index, size in enumerate(sizes)]):
        reads = want.to_read(end)
        if any(sizes[index] is None for index in reads) or sum(sizes[index] or 0 for index in reads) > limit_bytes:
            continue
        at_end = want.names[end - 1]
        if want.trimmable or end - 1 in want.held_ends or store.attached(layout, at_end):
            return end
    return None


class Restoring:
    """A restore under way. Any thread may ask; `result` counts once `done`, and then never changes.

    At the deadline, or on `cancel`, it is done and a miss: what the I/O thread still brings is let go of.
    """

    def __init__(self, deadline: float, clock: Callable[[], float], on_done: Callable[[], None]) -> None:
        self._deadline, self._clock, self._on_done = deadline, clock, on_done
        self._lock = threading.Lock()
        self._result: Restored | None = None
        self._done = False

    @property
    def done(self) -> bool:
        with self._lock:
            self._done = self._done or self._clock() >= self._deadline
            return self._done

    @property
    def result(self) -> Restored | None:
        """What was read; None is a miss, or not done yet."""
        return self._result

    def cancel(self) -> None:
        """Nobody wants it any more. A result that is there already is let go of too."""
        with self._lock:
            self._done, self._result = True, None

    def finish(self, result: Restored | None) -> None:
        """Here it is, from the I/O thread, or None from a closing one. Dropped if it is too late."""
        if not self.done:
            with self._lock:
                if not self._done:
                    self._result, self._done = result, True
        self._on_done()
