"""`Writer`: the one I/O thread of the cache. Restores go before budget work, and that before saves; nobody ever waits for a save.

save    -> queued -> published | kept       in the order of the queue, parents before children
                 \\-> refused | failed, and then what was queued after it in its chain is dropped
flush   -> when all that was queued before it is done: sync of the folders, then a receipt
restore -> verified bytes, or a miss; past its deadline a miss whatever comes later
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from .blocks import Block
from .record import BlockName, Layout
from .restore import Restoring, Want, restore
from .store import Outcome, Store

Fate = Literal["published", "dropped", "failed"]
CLOSE_S = 5.0
MOST_CHAINS = 1000
"""Chains that wait for their stamps. More are forgotten: that changes only which blocks go first."""
SYNC_EVERY = 1000
"""After so many blocks were written they are synced without anybody's asking; what is durable then is remembered no longer."""
MOST_FATES = 10_000
"""Blocks of which the next receipt tells: of more, the first that were not written are left out, and the others still tell of it."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of the blocks handed in since the last receipt, as keys; without those that were synced in between.

    published: on disk, synced, their ancestors too. dropped: not tried (queue or budget full, no parent, disk off). failed: by an
    I/O error, the sync's included. pending: not done in time. missing: published, and already gone again, or an ancestor is.
    """

    published: frozenset[bytes] = frozenset()
    dropped: frozenset[bytes] = frozenset()
    failed: frozenset[bytes] = frozenset()
    pending: frozenset[bytes] = frozenset()
    missing: frozenset[bytes] = frozenset()

    @property
    def ok(self) -> bool:
        """Everything is durable. An empty receipt is one too: nothing was handed in."""
        return not (self.dropped or self.failed or self.pending or self.missing)


class _Save(NamedTuple):
    number: int
    layout: Layout
    block: Block


class _Read(NamedTuple):
    restoring: Restoring
    layout: Layout
    want: Want
    limit_bytes: int


class Flush:
    """One caller's wait. number: of the last save that it is about. gate: opens once `receipt` is there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.covered: dict[bytes, tuple[bytes, Fate]] = {}
        self.receipt: Receipt | None = None
        self.gate = threading.Lock()
        self.gate.acquire()


class Clear:
    """One caller's wish to empty a namespace, or all. gate: opens once `gone` counts: (files, bytes), None if it could not be done."""

    def __init__(self, namespace: bytes | None) -> None:
        self.namespace = namespace
        self.gone: tuple[int, int] | None = None
        self.gate = threading.Lock()
        self.gate.acquire()


class Writer:
    """Owner of the I/O thread, and through it of the store. Its methods may be called from any thread, and none does I/O.

    Invariant: queued_bytes is the sum over the queue and the block being written, <= queue_bytes; when a block is queued, its
    parent is stored, being written, or before it in the queue. An exception ends its job, as a miss or a failed save, and never
    the thread.
    Lifetime: `start`, then `close`, which is bounded even if a system call hangs. After a fork the child's copy does nothing.
    """

    def __init__(self, store: Store, queue_bytes: int, notice: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.queue_bytes, self.queued_bytes = queue_bytes, 0
        self._store, self._notice, self._clock = store, notice, clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._reads: deque[_Read] = deque()
        self._chains: dict[bytes, tuple[Layout, Sequence[BlockName]]] = {}
        self._saves: dict[bytes, _Save] = {}
        self._flushes: deque[Flush] = deque()
        self._clears: deque[Clear] = deque()
        self._labels: dict[bytes, str] = {}
        self._fates: dict[bytes, tuple[bytes, Fate]] = {}  # key -> (namespace, what became of it) since the last receipt
        self._unsynced = 0  # blocks written since the last sync
        self._writing: _Save | None = None
        self._number = 0
        self._unsettled = False  # there are stamps to write
        self._off = False  # the store found no usable directory
        self._open = True  # new work is taken
        self._stop = False  # the thread is to end after the job at hand
        self._said = False
        self._thread = threading.Thread(target=self._run, name="mlxnb-cache-io", daemon=True)

    # -- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the store, on the I/O thread; blocks that come meanwhile are queued."""
        self._thread.start()

    def save(self, layout: Layout, block: Block) -> bool:
        """Queue a block whose payloads are `Tensors`. False: it is not queued, so hand in none of its descendants."""
        if not self._here:
            return False
        key, namespace = block.key, layout.namespace
        with self._lock:
            queued = self._saves.get(key)
            if queued is not None and (block.attachment is None or queued.block.attachment is not None):
                return True
            growth = block.nbytes - (queued.block.nbytes if queued is not None else 0)
            room = self.queued_bytes + growth <= self.queue_bytes
            if self._off or not self._open or not room or not self._follows(namespace, block):
                if queued is None:
                    self._note(key, namespace, "dropped")
                return queued is not None
            self._number += 1
            # A block that gains its attachment while it waits keeps its place: its descendants are queued behind it.
            self._saves[key] = _Save(queued.number if queued is not None else self._number, layout, block)
            self._fates.pop(key, None)
            self.queued_bytes += growth
        self._bell.put(None)
        return True

    def can_save(self, nbytes: int) -> bool:
        """Whether the queue has room for a block of this size."""
        return self._here and self._open and not self._off and self.queued_bytes + nbytes <= self.queue_bytes

    def has(self, namespace: bytes, block: Block) -> bool:
        """Whether a record that does as well as one of this block is there or on its way: no need to hand it in."""
        if not self._here:
            return False
        with self._lock:
            queued = self._saves.get(block.key)
            if queued is not None and (block.attachment is None or queued.block.attachment is not None):
                return True
        return self._store.has(namespace, block)

    def follows(self, namespace: bytes, block: Block) -> bool:
        """Whether its parent is stored or on its way; if not, `save` refuses it."""
        with self._lock:
            return self._follows(namespace, block)

    def lost(self, key: bytes) -> bool:
        """Whether this block was handed in, and dropped or failed since the last receipt."""
        with self._lock:
            return self._fates.get(key, _NO_FATE)[1] in ("dropped", "failed")

    def forgive(self) -> None:
        """All that is kept is about to be handed in again: what was not stored, or is gone by now, counts only if that fails too."""
        with self._lock:
            self._fates = {key: fate for key, fate in self._fates.items() if fate[1] == "published" and self._store.listed(fate[0], key)}

    def label(self, namespace: bytes, text: str) -> None:
        """Note, some time, what people call this namespace."""
        if self._here:
            with self._lock:
                self._labels[namespace] = text
            self._bell.put(None)

    def clear(self, namespace: bytes | None) -> Clear:
        """Forget what is queued of a namespace, or all, and delete its records; wait by the gate if you want to."""
        clear = Clear(namespace)
        with self._lock:
            taken = self._here and self._open and not self._off
            if taken:
                self._clears.append(clear)
        if taken:
            self._bell.put(None)
        else:
            clear.gate.release()
        return clear

    def keep(self, layout: Layout, names: Sequence[BlockName]) -> None:
        """This chain, root first, is in use: what is stored of it stays longest."""
        if not names or not self._here:
            return
        with self._lock:
            self._chains.pop(names[-1].key, None)
            self._chains[names[-1].key] = (layout, names)
            if len(self._chains) > MOST_CHAINS:
                del self._chains[next(iter(self._chains))]
        self._bell.put(None)

    def restore(
        self, layout: Layout, want: Want, limit_bytes: int, deadline_s: float, on_done: Callable[[], None] = lambda: None
    ) -> Restoring:
        """Read what this prompt could reuse, at most `limit_bytes`: the caller has set them aside. on_done: on the I/O thread.

        deadline_s: from now; a caller that has waited so long goes on without.
        """
        restoring = Restoring(self._clock() + deadline_s, self._clock, on_done)
        taken = False
        if self._here:
            with self._lock:
                taken = self._open and not self._off
                if taken:
                    self._reads.append(_Read(restoring, layout, want, limit_bytes))
        if taken:
            self._bell.put(None)
        else:
            restoring.finish(None)
        return restoring

    def flush(self, timeout_s: float) -> Receipt:
        """Wait until all that was handed in before is durable, or is known not to be. Holds nothing while it waits."""
        if not self._here:
            return Receipt()
        flush = self.ask_flush()
        flush.gate.acquire(timeout=max(0.0, timeout_s))
        return self.receipt(flush)

    def ask_flush(self) -> Flush:
        """A flush to wait for by its gate; then ask for its `receipt`."""
        with self._lock:
            flush = Flush(self._number)
            self._flushes.append(flush)
        self._bell.put(None)
        return flush

    def receipt(self, flush: Flush) -> Receipt:
        """That of a flush, done or not. What a done one reports is not reported again."""
        with self._lock:
            if flush.receipt is not None:
                for key, fate in flush.covered.items():
                    if self._fates.get(key) is fate:
                        del self._fates[key]
                return flush.receipt
            if flush in self._flushes:
                self._flushes.remove(flush)
            waiting = [save for save in (*self._saves.values(), self._writing) if save is not None and save.number <= flush.number]
            pending = {save.block.key for save in waiting} | _of(self._fates, "published")  # those are not synced
            return Receipt(frozenset(), _of(self._fates, "dropped"), _of(self._fates, "failed"), frozenset(pending))

    def close(self, timeout_s: float = CLOSE_S) -> Receipt:
        """Take no more, flush, end the thread; within the time-out, whatever the disk does. Idempotent: later ones are empty."""
        if not self._here:
            return Receipt()
        until = time.monotonic() + timeout_s
        with self._lock:
            was_open, self._open = self._open, False
            reads, self._reads = self._reads, deque()
            clears, self._clears = self._clears, deque()
        for read in reads:
            read.restoring.finish(None)
        for clear in clears:
            clear.gate.release()
        if not was_open:
            return Receipt()
        receipt = self.flush(0.8 * timeout_s if self._thread.is_alive() else 0.0)
        with self._lock:
            self._stop = True
        self._bell.put(None)
        if self._thread.is_alive():
            self._thread.join(max(0.0, until - time.monotonic()))
        return receipt

    def check(self) -> None:
        """Raise AssertionError if the queue does not add up."""
        with self._lock:
            saves = [*self._saves.values(), *([self._writing] if self._writing is not None else [])]
            total = sum(save.block.nbytes for save in saves)
            if total != self.queued_bytes or total > self.queue_bytes:
                raise AssertionError(f"{self.queued_bytes} bytes counted, {total} queued, {self.queue_bytes} allowed")
            place = {key: at for at, key in enumerate(self._saves)}
            if any(place.get(save.block.parent, -1) > place[key] for key, save in self._saves.items()):
                raise AssertionError("a child is queued before its parent")

    @property
    def _here(self) -> bool:
        return self._pid == os.getpid()

    def _follows(self, namespace: bytes, block: Block) -> bool:
        """Whether its parent is stored or on its way."""
        writing = self._writing is not None and self._writing.block.key == block.parent
        return block.index == 0 or writing or block.parent in self._saves or self._store.listed(namespace, block.parent)

    # -- the I/O thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guard(self._store.open)
        self._off = not self._store.usable
        while not self._stop:
            self.work()
            self._bell.get()
        self._guard(self._store.close)

    def work(self) -> None:
        """Do the jobs that are there, in their order. For the I/O thread, and for a test that has not started it."""
        while (job := self._next()) is not None:
            self._guard(job)

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._stop:
                return None
            if self._reads:
                return partial(self._restore, self._reads.popleft())
            if self._clears:
                return partial(self._clear, self._clears.popleft())
            if self._labels:
                return partial(self._store.label, *self._labels.popitem())
            if self._chains:
                chains, self._chains = self._chains, {}
                return partial(self._keep, chains)
            first = next(iter(self._saves.values()), None)
            if self._flushes and (first is None or first.number > self._flushes[0].number):
                return partial(self._sync, self._flushes.popleft())
            if self._unsynced >= SYNC_EVERY:
                return self._sync_unasked
            if first is not None:
                self._writing = self._saves.pop(first.block.key)
                return partial(self._publish, first)
            if self._unsettled:
                self._unsettled = False
                return self._store.settle
            return None

    def _restore(self, read: _Read) -> None:
        result = None
        try:
            result = restore(self._store, read.layout, read.want, read.limit_bytes, lambda: self._open and not read.restoring.done)
            self._unsettled = self._unsettled or result is not None
        finally:
            read.restoring.finish(result)

    def _clear(self, clear: Clear) -> None:
        with self._lock:
            for key, save in list(self._saves.items()):
                if clear.namespace in (None, save.layout.namespace):
                    del self._saves[key]
                    self.queued_bytes -= save.block.nbytes
            self._fates = {key: fate for key, fate in self._fates.items() if clear.namespace not in (None, fate[0])}
        try:
            clear.gone = self._store.clear(clear.namespace)
        finally:
            clear.gate.release()

    def _keep(self, chains: dict[bytes, tuple[Layout, Sequence[BlockName]]]) -> None:
        for layout, names in chains.values():
            self._store.keep(layout, names)
        self._unsettled = True

    def _publish(self, save: _Save) -> None:
        outcome: Outcome = "failed"
        try:
            outcome = self._store.publish(save.layout, save.block)
        finally:
            key, namespace = save.block.key, save.layout.namespace
            with self._lock:
                self._writing, self._unsettled = None, True
                self.queued_bytes -= save.block.nbytes
                if outcome in ("published", "kept"):
                    self._note(key, namespace, "published")
                    self._unsynced += 1
                else:
                    self._note(key, namespace, "failed" if outcome == "failed" else "dropped")
                    if key not in self._saves and not self._store.listed(namespace, key):
                        self._drop_after(key)

    def _drop_after(self, key: bytes) -> None:
        """The block of this key will not be stored: nor will what is queued of its descendants. They stand in order."""
        gone = {key}
        for child, save in list(self._saves.items()):
            if save.block.parent in gone:
                gone.add(child)
                del self._saves[child]
                self.queued_bytes -= save.block.nbytes
                self._note(child, save.layout.namespace, "dropped")

    def _note(self, key: bytes, namespace: bytes, fate: Fate) -> None:
        self._fates.pop(key, None)
        self._fates[key] = (namespace, fate)
        if len(self._fates) > MOST_FATES:
            del self._fates[next((k for k, (_, what) in self._fates.items() if what != "published"), next(iter(self._fates)))]

    def _sync_unasked(self) -> None:
        """What this makes durable needs no later sync; of anything else the next receipt tells."""
        with self._lock:
            self._unsynced = 0
            written = {key: fate for key, fate in self._fates.items() if fate[1] == "published"}
        durable, _ = self._store.sync([(namespace, key) for key, (namespace, _) in written.items()])
        with self._lock:
            for key in written.keys() & durable:
                if self._fates.get(key) is written[key]:
                    del self._fates[key]

    def _sync(self, flush: Flush) -> None:
        with self._lock:
            self._unsynced = 0
            flush.covered = dict(self._fates)
        written = {key: namespace for key, (namespace, fate) in flush.covered.items() if fate == "published"}
        durable, gone = set[bytes](), set[bytes]()
        try:
            durable, gone = self._store.sync([(namespace, key) for key, namespace in written.items()])
        finally:
            failed = _of(flush.covered, "failed") | (written.keys() - durable - gone)
            published, missing = frozenset(written.keys() & durable), frozenset(written.keys() & gone)
            flush.receipt = Receipt(published, _of(flush.covered, "dropped"), failed, frozenset(), missing)
            flush.gate.release()

    def _guard(self, job: Callable[[], object]) -> None:
        """Whatever goes wrong in one job, the next is done; the first time it is said."""
        try:
            job()
        except Exception as error:
            if not self._said:
                self._said = True
                self._notice(f"The disk cache had a problem and goes on: {type(error).__name__}: {error}.")


_NO_FATE: tuple[bytes, Fate | None] = (b"", None)


def _of(fates: dict[bytes, tuple[bytes, Fate]], wanted: Fate) -> frozenset[bytes]:
    return frozenset(key for key, (_, fate) in fates.items() if fate == wanted)
