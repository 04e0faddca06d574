"""What of running rows is noted, and when, so that an interrupted one can be resumed: state as host bytes, beside the step.

Between two steps a row's K/V behind its last published block, and its recurrent state, are cut like a block: lazy before the next
step is built, evaluated before it is submitted. What is noted less often than tokens come is drawn again, the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..admission import notify
from ..cache.blocks import T
from ..state import payload
from ..state.payload import StatePayload
from ..types import Left, StateSpec

EVERY_S = 5.0
"""A row is noted at most so often, and not before it has run so long."""
BYTES_PER_S = 2**21
"""All rows together copy, and have written to disk, at most so much on the average."""
TOKEN_BYTES, ALTERNATIVE_BYTES = 64, 48
"""About what a record says of one token, and of one of its alternatives, besides the state."""


@dataclass(frozen=True, slots=True)
class Note:
    """A row's state after `length` tokens, lazy; None: it is to be computed again."""

    row: Any
    start: int
    length: int
    tail: StatePayload | None
    recurrent: StatePayload | None

    def payloads(self) -> list[StatePayload]:
        return [part for part in (self.tail, self.recurrent) if part is not None]

    def arrays(self) -> list[Any]:
        return [array for part in self.payloads() for array in part.arrays()]

    def copied(self) -> Left:
        """Evaluated, as host bytes."""
        payload.evaluate(self.payloads())
        tail, recurrent = (tuple(map(_bytes, part.to_host())) if part is not None else () for part in (self.tail, self.recurrent))
        return Left(self.start, self.length, tail, recurrent)


class Checkpoints:
    """The notes of one group's rows.

    Owner: engine thread. specs: the model's; rows in every call: of the window step, whose consumers take notes. A row that gives
    nothing to the prefix cache is noted by its tokens alone, since nobody would have the blocks before its tail.
    failures: copies that could not be made; the note is without state then.
    """

    def __init__(self, specs: Sequence[StateSpec], clock: Callable[[], float] = time.monotonic) -> None:
        self._recurrent = any(spec.kind == "recurrent" for spec in specs)
        self._clock, self._next = clock, 0.0
        self.failures = 0

    def due(self, slots: Any, rows: Sequence[Any]) -> list[Note]:
        """Of the state that the step built last leaves: one row's at most, the one that has waited longest."""
        now = self._clock()
        for row in rows:
            if row.noted_at is None:
                row.noted_at = now
        if now < self._next:
            return []
        row = min((row for row in rows if not row.ended), key=lambda row: row.noted_at, default=None)
        if row is None or now - row.noted_at < EVERY_S:
            return []
        row.noted_at = now
        return [self._note(slots, row, row.chain)]

    def copy(self, notes: Sequence[Note]) -> list[tuple[Any, Left | None]]:
        """Host bytes of these, before the next step is submitted."""
        copied = [(note.row, self._copy(note)) for note in notes]
        if copied:
            state = sum(left.nbytes for _, left in copied if left is not None)
            self._next = self._clock() + (state + sum(_said_bytes(note.row) for note in notes)) / BYTES_PER_S
        return copied

    @staticmethod
    def tell(copied: Sequence[tuple[Any, Left | None]]) -> None:
        """The tokens of the step that these are from have been delivered."""
        for row, left in copied:
            if not row.ended:
                notify(row.spec.consumer, partial(row.spec.consumer.note, left))

    def stopped(self, slots: Any, row: Any) -> None:
        """A row was cancelled, and the step that was in flight has been read: its last token was drawn and not delivered."""
        left = self._copy(self._note(slots, row, row.left_chain))
        notify(row.spec.consumer, partial(row.spec.consumer.note, left, row.undelivered, ended=True))

    def _note(self, slots: Any, row: Any, chain: Any) -> Note:
        """chain: where the row stands in the prefix cache, None if nowhere."""
        length = row.slot.length
        start = chain.blocks * T if chain is not None and chain.open else length + 1
        if not 0 <= length - start <= T:
            return Note(row, 0, 0, None, None)
        try:
            tail = payload.cut(slots, row.slot, start, length) if length > start else None
            recurrent = payload.snapshot(slots, row.slot) if self._recurrent else None
        except Exception:
            self.failures += 1
            return Note(row, 0, 0, None, None)
        return Note(row, start, length, tail, recurrent)

    def _copy(self, note: Note) -> Left | None:
        if not note.length:
            return None
        try:
            return note.copied()
        except Exception:
            self.failures += 1
            return None


def _said_bytes(row: Any) -> int:
    """About how much the record of a row has besides its state: the prompt, and each token so far."""
    return int(row.slot.length) * (TOKEN_BYTES + ALTERNATIVE_BYTES * (row.spec.sampling.logprobs or 0))


def _bytes(array: Any) -> memoryview:
    view = memoryview(array)
    return view.cast("B") if view.nbytes else memoryview(b"")
