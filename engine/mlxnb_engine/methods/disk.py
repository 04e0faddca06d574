"""The disk behind the prefix cache as the engine thread sees it: copies one way, arrays the other, and never a wait.

    save    block -> host bytes -> the writer's queue       a little per turn, and whatever still leaves memory unsaved
    fetch   the I/O thread reads what a prompt lacks -> verified bytes -> arrays -> blocks in memory, a little per turn
            reading -> building -> ready        or, at any point, a miss: then the prompt is computed

A row changes only when it takes its lease, after all that was fetched for it is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..admission import Entry
from ..cache.blocks import Block, Reuse, T
from ..cache.files import PosixFiles
from ..cache.lease import Lease
from ..cache.record import BlockName, Layout, Tensors, TensorSpec
from ..cache.restore import Restoring, Want
from ..cache.store import Store
from ..cache.tree import PrefixCache
from ..cache.writer import Receipt, Writer
from ..fingerprint import digest_fields
from ..state import payload
from ..state.payload import PartSpec, StatePayload
from ..types import StateSpec

FETCH_S = 5.0
"""A prompt waits so long for the disk, then it is computed."""
TURN_BYTES = 2**22
IDLE_BYTES = 2**26
"""What one turn copies at most, to or from the host: while rows run, and while none does."""
QUEUE_BYTES = 2**28
"""Host copies of blocks that wait to be written."""
CLOSE_S = 1.5
"""Of the time for closing, so much is left to write what is queued."""
POLL_S = 0.02
PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Nothing is saved for so long after a refusal, and nothing fetched after a time-out; each time twice as long."""


@dataclass(frozen=True, slots=True)
class Form:
    """What blocks of one namespace look like on disk and in memory."""

    layout: Layout
    parts: tuple[PartSpec, ...]
    attachment: tuple[PartSpec, ...]

    @classmethod
    def of(cls, namespace: bytes, specs: Sequence[StateSpec], codec: Sequence[str]) -> Form:
        """Raises ValueError if a record could not hold such blocks."""
        parts, attachment = payload.block_parts(tuple(specs), T), payload.attachment_parts(tuple(specs))
        tensors, state = (tuple(TensorSpec(p.layer, p.part, p.dtype, tuple(p.shape)) for p in some) for some in (parts, attachment))
        digest = bytes.fromhex(digest_fields([("codec", name.encode()) for name in codec]))
        return cls(Layout(namespace, digest, tensors, state or None), parts, attachment)

    def to_host(self, block: Block) -> Block:
        """The block with bytes of its own instead of arrays."""
        held, state = _arrays(block.payload), _arrays(block.attachment)
        assert held is not None
        return replace(block, payload=Tensors.of(held.to_host()), attachment=Tensors.of(state.to_host()) if state is not None else None)

    def from_host(self, block: Block) -> Block:
        """The other way round. Raises ValueError for bytes of another form, and whatever the device raises."""
        held, state = block.payload, block.attachment
        if not isinstance(held, Tensors) or not isinstance(state, Tensors | None):
            raise ValueError("no host bytes")
        made = StatePayload.from_host(self.parts, held.parts)
        return replace(block, payload=made, attachment=StatePayload.from_host(self.attachment, state.parts) if state else None)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt that may lack something. names: its whole blocks within all but its last token. entry.known: what memory alone offers."""

    entry: Entry
    names: Sequence[BlockName]
    namespace: bytes
    reuse: Reuse

    @property
    def alive(self) -> bool:
        """Whether anybody still waits for it."""
        return any(not spec.consumer.cancelled for spec in self.entry.rows)


class Fetch:
    """What the disk gives to one prompt. `close` it once its row has taken what it wants, or wants nothing any more.

    ready: nothing more comes. indices: of the blocks that came.
    """

    def __init__(self, form: Form, ask: Ask, lease: Lease, restoring: Restoring, deadline: float) -> None:
        self.form, self.ask, self.deadline = form, ask, deadline
        self.restoring: Restoring | None = restoring
        self.left: list[Block] = []
        self.leases = [lease]
        self.indices: set[int] = set()
        self.ready = False

    def tokens(self, length: int) -> int:
        """How many of the first `length` tokens came from disk."""
        return sum(min(T, length - index * T) for index in self.indices if index * T < length)

    def close(self) -> None:
        """Idempotent."""
        if self.restoring is not None:
            self.restoring.cancel()
        leases, self.leases, self.left, self.restoring, self.ready = self.leases, [], [], None, True
        for lease in leases:
            lease.close()


class Disk:
    """One engine's disk tier, and the cache in memory before it.

    Owner: engine thread. No method waits for I/O. wake: makes the engine turn; it is called on the I/O thread.
    Invariant: a lease is held here only for a prompt that waits for its place.
    Lifetime: `start`; `close` before the prefix cache's. The writer has its own end.
    """

    def __init__(self, memory_bytes: int, writer: Writer, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.writer, self.cache = writer, PrefixCache(budget_bytes=memory_bytes, spill=self.spill)
        self._wake, self._clock = wake, clock
        self._forms: dict[bytes, Form | None] = {}
        self._fetches: list[Fetch] = []
        self._save_pause, self._fetch_pause = _Pause(clock), _Pause(clock)
        self.failures = 0

    @classmethod
    def start(cls, root: Path, disk_bytes: int, memory_bytes: int, wake: Callable[[], None], notice: Callable[[str], None]) -> Disk:
        """With a writer of its own on this directory. notice: gets what people should know, on any thread."""
        writer = Writer(Store(root, disk_bytes, PosixFiles(), notice), QUEUE_BYTES, notice)
        writer.start()
        return cls(memory_bytes, writer, wake)

    def bind(self, namespace: bytes, label: str, specs: Sequence[StateSpec], codec: Sequence[str]) -> None:
        """From now on blocks of this namespace are saved and fetched. label: what people call it."""
        try:
            self._forms[namespace] = Form.of(namespace, specs, codec)
        except ValueError:
            self._forms[namespace] = None  # no record could hold it
        else:
            self.writer.label(namespace, label)

    # -- saving ------------------------------------------------------------------------------------------------------

    def spill(self, block: Block, namespace: bytes) -> bool:
        """The prefix cache's callback: copy a block and queue it. False: it is not on its way, so its descendants cannot be."""
        form = self._forms.get(namespace)
        if form is None or self.writer.has(namespace, block):
            return form is not None
        if self._save_pause.on or not self.writer.can_save(block.nbytes):
            return False
        if not self.writer.follows(namespace, block):
            if self.writer.lost(block.parent):  # else the chain was cleared away, and nothing is wrong with the disk
                self._save_pause.note(False)
            return False
        saved = self.writer.save(form.layout, form.to_host(block))
        self._save_pause.note(saved)
        return saved

    def keep(self, namespace: bytes, names: Sequence[BlockName]) -> None:
        """This chain is in use: on disk it stays longest."""
        form = self._forms.get(namespace)
        if form is not None:
            self.writer.keep(form.layout, names)

    # -- fetching ----------------------------------------------------------------------------------------------------

    def fetch(self, ask: Ask) -> Fetch | None:
        """Begin to bring what this prompt lacks; None if nothing can come."""
        form = self._forms.get(ask.namespace)
        if form is None or len(ask.names) <= ask.entry.known // T or self._fetch_pause.on:
            return None
        lease = self.cache.hold(ask.entry.ids, ask.namespace)
        held = range(len(lease.blocks))
        ends = frozenset(index for index in held if lease.blocks[index].attachment is not None)
        # The tree has no gaps, a block is kept only behind its parent: so all are asked for, whatever a layer's window is.
        want = Want(tuple(ask.names), frozenset(held), ends, ask.entry.known // T, None, ask.reuse.trimmable, ask.reuse.minimum_offset)
        restoring = self.writer.restore(form.layout, want, self.cache.room, FETCH_S, self._wake)
        fetch = Fetch(form, ask, lease, restoring, self._clock() + FETCH_S)
        self._fetches.append(fetch)
        return fetch

    # -- turns -------------------------------------------------------------------------------------------------------

    def advance(self, busy: bool) -> float | None:
        """Copy a bounded amount. In how many seconds there may be more to do; 0: now, None: not before something else happens."""
        most = TURN_BYTES if busy else IDLE_BYTES
        for fetch in self._fetches:
            most -= self._further(fetch, most)
        self._fetches = [fetch for fetch in self._fetches if fetch.leases]
        if self._save_pause.just_ended():
            self.cache.save_all()  # what was accepted before may be gone
        full = self.queue_full
        saving = not self._save_pause.on and self.cache.save_some(0 if full else most)
        if any(fetch.left for fetch in self._fetches) or (saving and not full):
            return 0.0
        if saving or any(not fetch.ready for fetch in self._fetches):
            return POLL_S
        return self._save_pause.rest_s if not busy else None

    def _further(self, fetch: Fetch, most_bytes: int) -> int:
        """Take a fetch one bounded step on; bytes that it copied."""
        if not fetch.ask.alive:
            fetch.close()
        if fetch.restoring is not None and fetch.restoring.done:
            result, fetch.restoring = fetch.restoring.result, None
            self._fetch_pause.note(result is not None or self._clock() < fetch.deadline)
            fetch.left = [result.blocks[index] for index in sorted(result.blocks)] if result is not None else []
        if fetch.restoring is not None or fetch.ready:
            return 0
        copied = 0
        while fetch.left and copied < most_bytes:
            block = fetch.left.pop(0)
            copied += block.nbytes
            if not self._built(fetch, block):
                fetch.left = []
        if not fetch.left:
            fetch.leases.append(self.cache.hold(fetch.ask.entry.ids, fetch.ask.namespace))  # until the row has its place
            fetch.ready = True
        return copied

    def _built(self, fetch: Fetch, block: Block) -> bool:
        """Put one block into memory. One that finds no room there or cannot be made ends the fetch; what came before counts."""
        try:
            if not self.cache.put_stored(fetch.form.from_host(block), fetch.ask.namespace, fetch.ask.entry.session):
                return False
        except Exception:
            self.failures += 1
            return False
        fetch.indices.add(block.index)
        return True

    # -- life --------------------------------------------------------------------------------------------------------

    def begin_flush(self) -> None:
        """Everything in memory is to be saved, also what was refused before."""
        self._save_pause.end()
        self.writer.forgive()
        self.cache.save_all()

    def flush_some(self) -> bool:
        """Towards a flush: queue a bounded amount, as far as there is room; whether something is left."""
        return self.cache.save_some(0 if self.queue_full else IDLE_BYTES)

    @property
    def queue_full(self) -> bool:
        """Half of the queue is for what leaves memory."""
        return self.writer.queued_bytes * 2 > self.writer.queue_bytes

    def close(self, within_s: float) -> Receipt:
        """Let go of what is being fetched, save what the queue takes, and end the writer; in this time, whatever the disk does."""
        until = self._clock() + within_s
        fetches, self._fetches = self._fetches, []
        for fetch in fetches:
            fetch.close()
        while self._clock() < until - CLOSE_S and self.flush_some():
            time.sleep(0.005)
        return self.writer.close(max(0.2, until - self._clock() - 0.5))


class _Pause:
    """After trouble nothing is tried for a while, each time for twice as long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._length_s = clock, PAUSE_S
        self._until: float | None = None

    @property
    def on(self) -> bool:
        return self._until is not None and self._clock() < self._until

    @property
    def rest_s(self) -> float | None:
        """For how long it goes on; None if it is over."""
        return max(0.0, self._until - self._clock()) if self._until is not None and self.on else None

    def just_ended(self) -> bool:
        """True once after each."""
        ended = self._until is not None and not self.on
        self._until = None if ended else self._until
        return ended

    def note(self, worked: bool) -> None:
        if worked:
            self._length_s = PAUSE_S
        elif not self.on:
            self._until = self._clock() + self._length_s
            self._length_s = min(2 * self._length_s, LONGEST_PAUSE_S)

    def end(self) -> None:
        self._until = None


def _arrays(held: Any) -> StatePayload | None:
    if held is not None and not isinstance(held, StatePayload):
        raise TypeError(f"a {type(held).__name__} is no state of a row")
    return held
