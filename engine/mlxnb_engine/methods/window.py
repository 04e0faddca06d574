"""The window step: every row of a group feeds a window of tokens, one forward decides, each row keeps what it kept.

Ordinary decode is a window of one. The next step is built from the unread register of the last one; whether it is submitted
before or after that register is read depends on the backend (`qualify.submit_order`):

    build s+1 (lazy, from register s) -> [submit] -> read s -> [submit] -> deliver s

A change of membership (join, retire, cancel) needs the register read and delivered first: `_drain`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from ..admission import Entry, RowSpec, notify
from ..delivery import Drawn
from ..errors import ModelError
from ..graph import ModelGraph, Scores
from ..qualify import SubmitOrder
from ..sampling import SamplingSession, Selection, select
from ..state.lone import LoneState
from ..state.slots import Slots
from ..state.spec import Geometry, State
from ..types import FinishReason, TokenId
from .checkpoints import Checkpoints
from .compiled import CompiledSteps
from .reuse import Chain, Cut, PrefixReuse


@dataclass(eq=False, slots=True)
class Row:
    """One running sequence.

    slot: the handle that its group's state gave it. pending: the next token to consume, on the host at every safe point.
    chain: what it gives to the prefix cache; None if nothing (more). noted_at: when it was last noted, by the clock of the
    checkpoints. left_chain, undelivered: of a cancelled row, where it stood, and a token that was drawn and not delivered.
    Invariant at a safe point: len(consumed) == slot.length.
    """

    spec: RowSpec
    sampler: SamplingSession
    slot: Any
    consumed: list[TokenId]
    pending: TokenId
    drawn: int = 0
    ended: bool = False
    chain: Chain | None = None
    noted_at: float | None = None
    cancelled: bool = False
    left_chain: Chain | None = None
    undelivered: Drawn | None = None


@dataclass(eq=False, slots=True)
class Preparation:
    """Entries that share one ragged prefill, in slots of their own until they join."""

    entries: list[Entry]
    slots: State


@dataclass(eq=False, slots=True)
class _Flight:
    """A submitted step whose register is not read yet. `rows` is its batch order."""

    rows: list[Row]
    selection: Selection


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """prefill_chunk: tokens of one prefill window, over all its rows. tight: K/V memory is limited, so rows start in the
    class of their final length and classes grow by one slot, not by doubling. ring: sliding layers keep no more than they see."""

    prefill_chunk: int
    submit: SubmitOrder
    geometry: Geometry = field(default_factory=Geometry)
    tight: bool = False
    ring: bool = False


class WindowGroup:
    """Rows that share buffers and one forward.

    Owner: engine thread. Each `advance*` is one bounded unit of work; between them is a safe point.
    Lifetime: `dispose()` ends every row and drops every array.
    """

    def __init__(
        self, graph: ModelGraph, limits: GroupLimits, reuse: PrefixReuse | None = None, checkpoints: Checkpoints | None = None
    ) -> None:
        """reuse: the group's side of the prefix cache; None computes everything anew. checkpoints: None if no row is noted."""
        self.graph, self.limits, self.reuse, self.checkpoints = graph, limits, reuse, checkpoints
        self.slots = self._new_slots()
        self._compiled = CompiledSteps(graph) if limits.geometry.compiled else None
        self.rows: list[Row] = []
        self.preparation: Preparation | None = None
        self.ready: deque[tuple[Preparation, Entry]] = deque()
        self.steps = 0
        self.tokens = 0
        self.read_tokens = 0
        self._flight: _Flight | None = None

    def _new_slots(self) -> State:
        family = self.graph.family
        if family.mode == "lone":
            return LoneState(self.graph.model)
        limits = self.limits
        widest = limits.geometry.width_for(limits.prefill_chunk) if limits.ring else None
        return Slots(
            self.graph.specs, limits.geometry, limits.tight, split=family.split, wide_masks=self.graph.wide_masks, ring=widest
        )

    @property
    def shares_prefill(self) -> bool:
        """Several prompts may be read in one ragged window."""
        return self.graph.family.mode == "ragged"

    def _tokens_to_hold(self, entry: Entry, now: int) -> int:
        return self.limits.geometry.reach_for(entry.final_tokens if self.limits.tight else now)

    # -- what the scheduler asks -------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return len(self.rows)

    @property
    def preparing(self) -> bool:
        return self.preparation is not None

    def next_ready(self) -> Entry | None:
        """The prepared entry that joins next. Rows that were cancelled meanwhile are dropped, wherever they wait."""
        for prep, entry in tuple(self.ready):
            entry.drop_cancelled()
            if not entry.rows:
                self.ready.remove((prep, entry))
                self._release_staged(prep)
        return self.ready[0][1] if self.ready else None

    def _release_staged(self, prep: Preparation) -> None:
        """Drop the buffers of a preparation that nobody waits for any more, unless the group adopted them."""
        if all(other is not prep for other, _ in self.ready) and prep.slots is not self.slots:
            prep.slots.clear()

    @property
    def waiting_rows(self) -> int:
        """Rows whose prompt is being prepared or is ready, and that have not joined."""
        return sum(len(entry.rows) for entry in self.staged())

    def staged(self) -> list[Entry]:
        """Entries being prepared, then those that are ready to join."""
        preparing = self.preparation.entries if self.preparation else []
        return [*preparing, *(entry for _, entry in self.ready)]

    def in_batch_order(self) -> list[Row]:
        by_slot = {id(row.slot): row for row in self.rows}
        return [by_slot[id(slot)] for slot in self.slots.rows()]

    @property
    def kv_bytes(self) -> int:
        """Bytes of all buffers, those of rows being prepared included."""
        staged = {id(p.slots): p.slots for p, _ in self.ready}
        if self.preparation is not None:
            staged[id(self.preparation.slots)] = self.preparation.slots
        return self.slots.nbytes + sum(slots.nbytes for slots in staged.values())

    def bytes_for(self, tokens: Sequence[int]) -> int:
        """State bytes of rows of these lengths while they are prepared, apart from the running ones."""
        return self.slots.bytes_for([self.limits.geometry.reach_for(max(n, 1)) for n in tokens])

    def growth(self, tokens: Sequence[int]) -> int:
        """State bytes that rows of these lengths add when they join."""
        return self.slots.growth([self.limits.geometry.reach_for(max(n, 1)) for n in tokens])

    # -- preparing rows ----------------------------------------------------------------------------------------------

    def can_claim(self, entry: Entry) -> bool:
        """Whether no other entry is computing what this one lacks first."""
        return self.reuse is None or self.reuse.can_claim(entry)

    def claim(self, entry: Entry, followers: Sequence[Entry]) -> None:
        """The entry is about to be prepared; `followers` wait behind it."""
        if self.reuse is not None:
            self.reuse.claim(entry, followers)

    def prepare(self, entries: list[Entry]) -> None:
        """Begin to prefill these entries together, from where the prefix cache leaves off. At most one preparation at a time."""
        assert self.preparation is None
        slots = self._new_slots()
        for entry in entries:
            entry.state = slots.add(self._tokens_to_hold(entry, entry.target + 1))
        for entry in entries:
            if self.reuse is not None:
                self.reuse.open(slots, entry)
            for spec in entry.rows:
                if entry.cached:
                    notify(spec.consumer, partial(spec.consumer.reused, entry.cached, entry.ssd_tokens))
                notify(spec.consumer, spec.consumer.admit)
        self.preparation = Preparation(entries, slots)

    def advance_preparation(self) -> None:
        """One prefill window for the entries being prepared; finished ones become ready. Cancelled ones are dropped."""
        prep = self.preparation
        if prep is None:
            return
        self._drop_cancelled_entries(prep)
        open_entries = [e for e in prep.entries if e.done < e.target]
        if open_entries:
            try:
                self._prefill_window(prep, open_entries)
            except BaseException as error:
                self._fail_preparation(prep, error)
                return
        if all(e.done >= e.target for e in prep.entries):
            self.ready.extend((prep, entry) for entry in prep.entries)
            self._release(prep.entries)
            self.preparation = None

    def _release(self, entries: Sequence[Entry]) -> None:
        """Whoever waits for their blocks asks again."""
        if self.reuse is not None:
            for entry in entries:
                self.reuse.release(entry)

    def _prefill_window(self, prep: Preparation, open_entries: list[Entry]) -> None:
        by_slot = {id(e.state): e for e in prep.entries}
        order = [by_slot[id(slot)] for slot in prep.slots.rows()]
        chunk = min(e.chunk or self.limits.prefill_chunk for e in order)
        room = max(1, chunk // len(order))
        if not self.graph.family.windows:
            room -= order[0].done % room  # cut where a prompt that was read from its first token on is cut
        stops = {id(e): self._stop(e) for e in order}
        if any(e.replaying for e in open_entries):
            # As they were first computed, one token at a time; in a window of their own, when nobody reads a prompt beside them.
            reading = [e for e in open_entries if not e.replaying]
            stops |= {id(e): e.done for e in open_entries if e.replaying} if reading else {id(e): e.done + 1 for e in open_entries}
            open_entries = reading or open_entries
        width = self.limits.geometry.width_for(min(room, max(stops[id(e)] - e.done for e in open_entries)))
        prep.slots.reserve(width)
        order = [by_slot[id(slot)] for slot in prep.slots.rows()]
        most = width if self.graph.family.windows else room  # a padded window must not reach over a cut
        real = [min(most, stops[id(e)] - e.done) for e in order]
        ids = [_padded(e.ids[e.done : e.done + n], width, e.ids[e.done]) for e, n in zip(order, real, strict=True)]
        prep.slots.begin(width, real)
        self.graph.feed(mx.array(ids, mx.int32), prep.slots.caches)
        prep.slots.end()
        mx.eval(prep.slots.arrays())
        for entry, n in zip(order, real, strict=True):
            entry.state.length += n
            entry.done += n
            self.read_tokens += n
            if self.reuse is not None:
                self.reuse.filled(prep.slots, entry, n)
            if n:
                for spec in entry.rows:
                    notify(spec.consumer, lambda s=spec, e=entry: s.consumer.prefilled(e.done, e.target))

    def _stop(self, entry: Entry) -> int:
        """Where the entry's next prefill window ends at the latest."""
        stop = self.reuse.stop(entry) if self.reuse is not None else entry.target
        return stop if entry.steps_from is None or entry.replaying else min(stop, entry.steps_from)

    def _drop_cancelled_entries(self, prep: Preparation) -> None:
        for entry in list(prep.entries):
            entry.drop_cancelled()
            if not entry.rows:
                prep.entries.remove(entry)
                prep.slots.retire(entry.state)
                self._release([entry])
        if not prep.entries:
            self.preparation = None

    def _fail_preparation(self, prep: Preparation, error: BaseException) -> None:
        self.preparation = None
        prep.slots.clear()
        self._release(prep.entries)
        for entry in prep.entries:
            entry.fail(error)

    def join_ready(self, places: int) -> int:
        """Let up to `places` rows of the first ready entry join. A safe point: drains the register."""
        entry = self.next_ready()
        if entry is None or places <= 0:
            return 0
        try:
            self._drain()
        except BaseException as error:
            self.fail_active(error)
        prep, joined = self.ready[0][0], 0
        while entry.rows and joined < places:
            self.join(prep, entry)
            joined += 1
        if not entry.rows:
            self.ready.popleft()
            self._release_staged(prep)
        return joined

    def join(self, prep: Preparation, entry: Entry) -> None:
        """Let the next row of a prepared entry run here. The register is read."""
        tokens = self._tokens_to_hold(entry, len(entry.ids))
        spec = entry.rows.popleft()
        try:
            sampler = SamplingSession(spec.sampling, spec.seed, self.graph.vocab_size, spec.exempt)
            sampler.skip(spec.start)
            sampler.seed_history(entry.ids[:-1])
        except BaseException as error:
            notify(spec.consumer, partial(spec.consumer.fail, error))  # a closure would tie the error to this frame
            return
        if len(prep.slots.rows()) == 1 and not entry.rows and not self.slots.rows():
            # A prepared row entering an empty group is adopted without a copy.
            self.slots, slot = prep.slots, entry.state
        else:
            slot = self.slots.join(prep.slots, entry.state, tokens)
        chain = self.reuse.fork(entry) if self.reuse is not None else None
        self.rows.append(Row(spec, sampler, slot, list(entry.ids[:-1]), entry.ids[-1], drawn=spec.start, chain=chain))

    # -- decoding ----------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """One step of the running rows; False if there is none. Fails every row of a step whose forward fails."""
        try:
            self._retire_ended()
            if self._flight is None:
                if not self.rows:
                    return False
                self._flight = self._build(None)
                self._submit(self._flight)
            else:
                self._advance_flight(self._flight)
        except BaseException as error:
            self.fail_active(error)
        return True

    def _advance_flight(self, flight: _Flight) -> None:
        if any(self._last_draw(row) for row in flight.rows):
            self._drain()
            return
        cuts = self._due(flight.rows)  # of the state that the step in flight leaves, before the next one replaces it
        notes = self.checkpoints.due(self.slots, flight.rows) if self.checkpoints is not None else []
        following = self._build(flight)
        if self.limits.submit == "before":
            try:
                mx.async_eval([array for cut in cuts for array in cut.arrays()], [array for note in notes for array in note.arrays()])
            except Exception:  # no room for the copies, say: these rows go on, and keep nothing more
                cuts, notes = [], []
                self._give_up(flight.rows)
            self._submit(following)
        drawn = self._read(flight)
        self._keep(cuts, flight.rows, drawn)
        copied = self.checkpoints.copy(notes) if self.checkpoints is not None else []
        if self.limits.submit == "after":
            self._submit(following)
        for row, token in zip(flight.rows, drawn, strict=True):
            row.consumed.append(row.pending if token is None else token.id)
        self._flight = following
        self._deliver(flight.rows, drawn)
        Checkpoints.tell(copied)

    @staticmethod
    def _last_draw(row: Row) -> bool:
        """The token in flight is the row's last, so a further step would be wasted on it."""
        return row.drawn >= row.spec.max_tokens or row.slot.length + 1 > row.spec.limit

    def _build(self, previous: _Flight | None) -> _Flight:
        """One lazy decode step over all rows, fed from host tokens or from the unread register of `previous`."""
        geometry = self.limits.geometry
        width = geometry.width_for(1)
        self.slots.reserve(width)
        rows = self.in_batch_order()
        tokens = self._feed_tokens(rows, previous)
        self.slots.begin(width, [1] * len(rows))
        ids = tokens[:, None] if width == 1 else mx.broadcast_to(tokens[:, None], (len(rows), width))
        positions = [i * width for i in range(len(rows))]
        scores = self._forward(ids, positions)
        self.slots.end()
        for row in rows:
            row.slot.length += 1
            row.drawn += 1
        self.steps += 1
        return _Flight(rows, select([row.sampler for row in rows], scores.logits))

    def _forward(self, ids: mx.array, positions: list[int]) -> Scores:
        multiple = self.limits.geometry.width_multiple
        if self._compiled is not None and isinstance(self.slots, Slots):
            return self._compiled.forward(self.slots, ids, positions, multiple)
        return self.graph.forward(ids, self.slots.caches, positions, multiple)

    def _feed_tokens(self, rows: list[Row], previous: _Flight | None) -> mx.array:
        """int32 [B]: the pending token of each row. It enters sampler history here, as it becomes model input."""
        if previous is None:
            for row in rows:
                row.consumed.append(row.pending)
                row.sampler.commit_ids([row.pending])
            return mx.array([row.pending for row in rows], mx.int32)
        register = previous.selection.tokens
        place = {id(row): i for i, row in enumerate(previous.rows)}
        order = [place[id(row)] for row in rows]
        for row, i in zip(rows, order, strict=True):
            if row.sampler.needs_history:
                row.sampler.commit_device(register, i)
        if order != list(range(len(order))):
            register = register[mx.array(order, mx.int32)]
        return register.astype(mx.int32)

    def _due(self, rows: Sequence[Row]) -> list[Cut]:
        return self.reuse.due(self.slots, rows) if self.reuse is not None else []

    def _keep(self, cuts: Sequence[Cut], rows: Sequence[Row], drawn: Sequence[Drawn | None]) -> None:
        """Publish what the step that was just read has filled, before the next one is submitted: it would have to copy the buffers."""
        for row, token in zip(rows, drawn, strict=True):
            if token is None and row.chain is not None:
                row.chain.open = False  # nothing of a row from its failed step on
        if cuts and self.reuse is not None:
            self.reuse.keep(cuts)

    @staticmethod
    def _give_up(rows: Sequence[Row]) -> None:
        for row in rows:
            if row.chain is not None:
                row.chain.open = False

    def _submit(self, flight: _Flight) -> None:
        # Every state array explicitly: a pending token that is a constant has no graph edge to the state (P17).
        chosen = flight.selection
        extra = [array for data in (chosen.logprobs, chosen.explained) if data is not None for array in data.arrays()]
        mx.async_eval(chosen.tokens, chosen.finite, *extra, *self.slots.arrays())

    def _read(self, flight: _Flight) -> list[Drawn | None]:
        """The drawn tokens on the host; None for a row without a finite score. Native dtype, no new operation (P18)."""
        chosen = flight.selection
        tokens: list[Any] = chosen.tokens.tolist()
        finite: list[Any] = chosen.finite.tolist()
        out: list[Drawn | None] = []
        for i, (token, good) in enumerate(zip(tokens, finite, strict=True)):
            logprobs = chosen.logprobs.read(i) if good and chosen.logprobs is not None else None
            explained = chosen.explained.read(i) if good and chosen.explained is not None else None
            out.append(Drawn(TokenId(token), logprobs, explained) if good else None)
        return out

    def _drain(self) -> None:
        """Read and deliver the step in flight without building another; afterwards every pending token is on the host."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        drawn = self._read(flight)
        for row, token in zip(flight.rows, drawn, strict=True):
            if token is not None:
                row.pending = token.id
                row.undelivered = token if row.ended else None
        self._keep(self._due(flight.rows), flight.rows, drawn)
        self._deliver(flight.rows, drawn)

    def _deliver(self, rows: list[Row], drawn: list[Drawn | None]) -> None:
        for row, token in zip(rows, drawn, strict=True):
            if row.ended:
                continue
            if token is None:
                self._end(row, None, ModelError("The model produced no finite score for this row.", "Try another dtype or prompt."))
                continue
            self.tokens += 1
            try:
                reason = row.spec.consumer.deliver(token)
            except BaseException as error:
                self._end(row, None, error)
                continue
            if reason is None and row.slot.length + 1 > row.spec.limit and self._flight is None:
                reason = "length"
            if reason is not None:
                self._end(row, reason)

    def _end(self, row: Row, reason: FinishReason | None, error: BaseException | None = None) -> None:
        row.ended = True
        row.cancelled = reason == "cancelled"
        row.left_chain = row.chain if row.cancelled else None
        row.chain = row.chain if reason in ("stop", "length") else None
        consumer = row.spec.consumer
        if reason is None:
            failure = error or RuntimeError("ended without a reason")
            notify(consumer, lambda: consumer.fail(failure))
        elif reason == "cancelled":
            notify(consumer, consumer.cancel)
        else:
            notify(consumer, lambda: consumer.finish(reason))

    def _retire_ended(self) -> None:
        """Apply cancels and free the slots of ended rows, at a safe point."""
        for row in self.rows:
            if not row.ended and row.spec.consumer.cancelled:
                self._end(row, "cancelled")
        if not any(row.ended for row in self.rows):
            return
        self._drain()
        ended = [row for row in self.rows if row.ended]
        for row in ended:
            if self.reuse is not None:
                self.reuse.settle(self.slots, row)
            if self.checkpoints is not None and row.cancelled:
                self.checkpoints.stopped(self.slots, row)
        for row in ended:
            self.rows.remove(row)
            self.slots.retire(row.slot)
            row.sampler.dispose()

    # -- failure -----------------------------------------------------------------------------------------------------

    def fail_active(self, error: BaseException) -> None:
        """Fail every running row and drop their state; nothing of the failed step is published."""
        self._flight = None
        rows, self.rows = self.rows, []
        self.slots.clear()
        self.slots = self._new_slots()
        for row in rows:
            if not row.ended:
                self._end(row, None, error)
            row.sampler.dispose()

    def dispose(self, error: BaseException) -> None:
        """End everything with this error and drop every array. Idempotent."""
        self.fail_active(error)
        staged = self.staged()
        buffers = [prep.slots for prep in (self.preparation, *(prep for prep, _ in self.ready)) if prep is not None]
        self.preparation = None
        self.ready.clear()
        self._release(staged)
        for entry in staged:
            entry.fail(error)
        for slots in (*buffers, self.slots):
            slots.clear()

    def check(self) -> None:
        """Raise RuntimeError unless rows, slots and consumed ids add up (safe points only)."""
        self.slots.check()
        if {id(row.slot) for row in self.rows} != {id(slot) for slot in self.slots.rows()}:
            raise RuntimeError("rows and slots differ")
        if self._flight is None:
            for row in self.rows:
                if len(row.consumed) != row.slot.length:
                    raise RuntimeError(f"a row consumed {len(row.consumed)} ids but holds {row.slot.length}")


def _padded(ids: Sequence[TokenId], width: int, filler: TokenId) -> list[TokenId]:
    """ids, right-padded to `width`. Padding lands beyond the kept length and is overwritten later."""
    return [*ids, *([ids[-1] if ids else filler] * (width - len(ids)))]
