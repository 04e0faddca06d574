"""What a group takes from the prefix cache before it computes, and what it gives to it afterwards.

    claim    the blocks that a prompt is about to compute are announced; who lacks them too waits
    open     take a lease, paste its state into the empty row, close the lease
    filled   after a prefill window: publish whole blocks, attachments where they are due, the tail at the end of the prompt
    due/keep around a decode step: cut the blocks that it filled, publish them once they are evaluated
    settle   the row ended well: publish its tail, or the attachment of its last whole block

A cache problem is a miss: whatever fails here ends what the row publishes, never the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..admission import Entry
from ..cache import blocks
from ..cache.blocks import Block, Payload, Reuse, T, Tail
from ..cache.lease import Lease
from ..cache.pending import PendingPrefixes
from ..cache.record import BlockName
from ..cache.tree import PrefixCache
from ..state import payload
from ..state.families import Family
from ..state.payload import Piece, StatePayload
from ..state.spec import MLX_DTYPES
from ..types import StateSpec, TokenId
from .disk import Ask, Disk, Fetch

LEAST_ATTACHED = 256
"""A prompt leaves recurrent state behind from this many tokens on: a state may be as large as the K/V of hundreds of them."""


class Namespaces(Protocol):
    def __call__(self, chunk: int) -> bytes | None:
        """The namespace of state that is read in chunks of so many tokens, 0 where that changes nothing. None: it has none."""
        ...


@dataclass(frozen=True, slots=True)
class Shared:
    """What all groups of an engine have in common.

    disk: what stands behind the cache, None if nothing does. labels: namespace -> what people call its model.
    """

    cache: PrefixCache
    pending: PendingPrefixes = field(default_factory=PendingPrefixes)
    disk: Disk | None = None
    labels: dict[bytes, str] = field(default_factory=dict)

    def introduce(self, namespace: bytes, label: str, specs: Sequence[StateSpec], codec: Sequence[str]) -> None:
        """State of this namespace is about to come; codec: per layer."""
        self.labels[namespace] = label
        if self.disk is not None:
            self.disk.bind(namespace, label, specs, codec)

    def close(self, within_s: float) -> None:
        """Save what the disk still takes in this time, then release everything. Raises RuntimeError if a row left a lease open."""
        if self.disk is not None:
            self.disk.close(within_s)
        self.cache.close()


@dataclass(eq=False, slots=True)
class Chain:
    """Where a row stands in the tree.

    key: of its last whole block there, or of the root. blocks: how many there are up to it. open: False once something was not
    kept: nothing that follows has a place then. last, state: the last block, and recurrent state right after it if that is still
    to be stored.
    """

    namespace: bytes
    key: bytes
    session: str | None
    blocks: int = 0
    open: bool = True
    last: Block | None = None
    state: StatePayload | None = None


@dataclass(eq=False, slots=True)
class Prefix:
    """An entry as the cache sees it, from claim to join. keys: of its prompt's whole blocks. marks: where an attachment is due.

    asked: whether the disk was asked for what memory lacks; fetch: its answer, while that is under way or waits to be taken.
    seen: `PrefixCache.changes` when the entry's share of it was last looked up.
    """

    owner: str
    namespace: bytes
    keys: list[bytes]
    chain: Chain
    marks: set[int] = field(default_factory=set)
    asked: bool = False
    fetch: Fetch | None = None
    seen: int = -1

    def names(self, ids: Sequence[TokenId]) -> list[BlockName]:
        """Of the whole blocks of the prompt that has these ids."""
        parents = [blocks.root_key(self.namespace), *self.keys]
        return [BlockName(key, parents[i], i, tuple(ids[i * T : (i + 1) * T])) for i, key in enumerate(self.keys)]


@dataclass(frozen=True, slots=True)
class Cut:
    """A block that a row has just filled, lazy. state: recurrent state right after it."""

    chain: Chain
    ids: tuple[TokenId, ...]
    payload: StatePayload
    state: StatePayload | None

    def arrays(self) -> list[Any]:
        return [*self.payload.arrays(), *(self.state.arrays() if self.state is not None else ())]


class PrefixReuse:
    """One group's side of the engine's prefix cache.

    exact: equal tokens give equal bits on this backend whatever the shapes of the steps. Then a warm run has the bits of a cold one,
    also for families whose one-token steps or chunk borders take another arithmetic: of these only prompts are kept, cut where
    a cold run would cut them. Elsewhere everything is kept.
    slots, in every call: the `Slots` of the rows in question (a group that runs one row per forward keeps nothing).
    failures: copies that could not be made; each was a miss.
    Owner: engine thread. Holds no lease between two calls, and no announcement of an entry that was released.
    """

    def __init__(
        self, shared: Shared, namespaces: Namespaces, specs: Sequence[StateSpec], family: Family, *, chunk: int, exact: bool
    ) -> None:
        self._cache, self._pending, self._disk, self._namespaces = shared.cache, shared.pending, shared.disk, namespaces
        self._specs, self._chunk = tuple(specs), chunk
        attached = _bytes(payload.attachment_parts(self._specs))
        self.reuse = Reuse(trimmable=not attached)
        self._cheap = attached <= _bytes(payload.block_parts(self._specs, T))
        self._delicate = exact and not family.windows
        self._by_chunk = exact and family.fixed_chunks
        self._owners = 0
        self.failures = 0

    # -- admission ---------------------------------------------------------------------------------------------------

    def can_claim(self, entry: Entry) -> bool:
        """Whether nobody else is computing the first block that this entry lacks, and the disk brings no more of it. Notes how much
        of its prompt is there already."""
        prefix = self._prefix(entry)
        if prefix is None:
            return True
        if prefix.seen != self._cache.changes:  # asked again at each step while the entry waits
            prefix.seen = self._cache.changes
            entry.known = self._cache.can_take(entry.ids, prefix.namespace, self.reuse)
        if self._pending.maker(prefix.keys[entry.known // T :]) not in (None, prefix.owner):
            return False
        if self._disk is not None and not prefix.asked:
            prefix.asked = True
            # Behind state that was left, blocks need no attachment.
            reuse = self.reuse if entry.left is None else Reuse()
            prefix.fetch = self._disk.fetch(Ask(entry, prefix.names(entry.ids), prefix.namespace, reuse))
        return prefix.fetch is None or prefix.fetch.ready

    def claim(self, entry: Entry, followers: Iterable[Entry]) -> None:
        """Announce what this entry will compute. followers: those behind it; where their prompts part from its own will be kept."""
        prefix = self._prefix(entry)
        if prefix is None:
            return
        self._pending.announce(prefix.owner, prefix.keys[entry.known // T :])
        if not self.reuse.trimmable:
            others = [other for follower in followers if (other := self._prefix(follower)) is not None]
            prefix.marks |= {T * _common(prefix.keys, other.keys) for other in others}

    def release(self, entry: Entry) -> None:
        """It computes no more of its prompt, however that ended. Idempotent."""
        if entry.prefix is not None:
            self._pending.withdraw(entry.prefix.owner)
            if entry.prefix.fetch is not None:
                entry.prefix.fetch.close()

    def _prefix(self, entry: Entry) -> Prefix | None:
        """Made once per entry; None if its state has no identity."""
        if entry.prefix is None:
            namespace = self._namespaces((entry.chunk or self._chunk) if self._by_chunk else 0)
            if namespace is None:
                return None
            self._owners += 1
            keys = blocks.chain(namespace, entry.ids[: entry.target])
            chain = Chain(namespace, blocks.root_key(namespace), entry.session)
            entry.prefix = Prefix(f"{id(self):x}.{self._owners}", namespace, keys, chain)
        prefix: Prefix = entry.prefix
        return prefix

    # -- preparing ---------------------------------------------------------------------------------------------------

    def open(self, slots: Any, entry: Entry) -> None:
        """Give an empty row the longest prefix of its prompt that is kept; `entry.done` and `entry.cached` say how much that was."""
        prefix = self._prefix(entry)
        if prefix is None:
            return
        length = self._take_up(slots, entry, prefix) or self._take(slots, entry, prefix)
        entry.done = entry.cached = length
        if self._disk is not None and length >= T:
            self._disk.keep(prefix.namespace, prefix.names(entry.ids)[: length // T])
        if prefix.fetch is not None:
            entry.ssd_tokens = prefix.fetch.tokens(length)
            prefix.fetch.close()
        prefix.marks = self._marks(entry, prefix) if not self.reuse.trimmable else set()

    def _take(self, slots: Any, entry: Entry, prefix: Prefix) -> int:
        """Put the longest usable prefix into the row; its length."""
        length = self._most(entry)
        while True:
            with self._cache.take(entry.ids[: length + 1], prefix.namespace, self.reuse, entry.session) as lease:
                length = self._usable(lease.length, entry)
                if length == lease.length or self.reuse.trimmable:
                    return self._paste(slots, entry, prefix, lease, length)

    def _paste(self, slots: Any, entry: Entry, prefix: Prefix, lease: Lease, length: int) -> int:
        """Put the first tokens of a lease into the row; how many there were put."""
        if length:
            try:
                payload.paste(slots, entry.state, _pieces(lease, length), _state(lease.attachment))
            except Exception:
                length, self.failures = 0, self.failures + 1
        if length >= T:
            prefix.chain.blocks, prefix.chain.key = length // T, lease.blocks[length // T - 1].key
        return length

    def _take_up(self, slots: Any, entry: Entry, prefix: Prefix) -> int:
        """Put the state that an interrupted row left into this one, if the blocks before its tail are all here; its length, or 0."""
        left = entry.left
        if left is None or not 0 < left.length <= entry.target:
            return 0
        whole, rest = left.start // T, left.length - left.start
        with self._cache.hold(entry.ids[: left.start + 1], prefix.namespace) as lease:
            if len(lease.blocks) < whole:
                return 0
            try:
                pieces = _pieces(lease, left.start)
                if rest:
                    pieces.append(Piece(left.start, rest, StatePayload.from_host(payload.block_parts(self._specs, rest), left.tail)))
                parts = payload.attachment_parts(self._specs)
                state = StatePayload.from_host(parts, left.recurrent) if parts else None
                payload.paste(slots, entry.state, pieces, state)
            except Exception:
                self.failures += 1
                return 0
            if whole:
                prefix.chain.blocks, prefix.chain.key = whole, lease.blocks[whole - 1].key
        return left.length

    def _read_to(self, entry: Entry) -> int:
        """How many tokens of an entry are read in windows; it draws what follows, or did so before it was interrupted."""
        return entry.target if not self._delicate or entry.steps_from is None else entry.steps_from

    def _most(self, entry: Entry) -> int:
        """How many tokens may be taken. Where a cold run would read its last token in a window of one, nobody else's will do."""
        chunk, target = entry.chunk or self._chunk, self._read_to(entry)
        return target - 1 if self._delicate and chunk > 1 and target % chunk == 1 else target

    def _usable(self, length: int, entry: Entry) -> int:
        """One token less where a window of one token would follow, which a cold run would have read in a wider one."""
        return length - 1 if self._splits_one_off(length, entry) else length

    def _splits_one_off(self, at: int, entry: Entry) -> bool:
        """Whether a cut here leaves one token of a window by itself, where that takes another arithmetic than in the window."""
        chunk = entry.chunk or self._chunk
        start = at // chunk * chunk  # windows are cut at multiples of the chunk
        return self._delicate and at > start and 1 in (at - start, min(start + chunk, self._read_to(entry)) - at)

    def _marks(self, entry: Entry, prefix: Prefix) -> set[int]:
        """Where prefill ends a chunk, so that recurrent state can be kept: before what later prompts may change, and where this or
        a waiting prompt parts from another."""
        grid = math.lcm(T, entry.chunk or self._chunk) if self._by_chunk else T
        stable = min(entry.target, entry.stable) // grid * grid
        parting = self._cache.can_take(entry.ids, prefix.namespace, Reuse())
        wanted = {mark // grid * grid for mark in (*prefix.marks, parting)} | ({stable} if stable >= LEAST_ATTACHED else set())
        return {mark for mark in wanted if entry.done < mark <= entry.target and not self._splits_one_off(mark, entry)}

    @staticmethod
    def stop(entry: Entry) -> int:
        """Where the entry's next prefill window ends at the latest."""
        marks = entry.prefix.marks if entry.prefix is not None else ()
        return min((mark for mark in marks if mark > entry.done), default=entry.target)

    def filled(self, slots: Any, entry: Entry, width: int) -> None:
        """A window has brought the entry to `entry.done` tokens, evaluated. width: how many of them were its own."""
        prefix = entry.prefix
        if prefix is None or not width or not prefix.chain.open:
            return
        chain = prefix.chain
        if self._delicate and width == 1 and (entry.chunk or self._chunk) > 1:
            chain.open = False  # other arithmetic than in the wider window of a longer prompt
            self.release(entry)
            return
        wanted = any(not spec.consumer.cancelled for spec in entry.rows)
        due = entry.done in prefix.marks or (self._cheap and entry.done % T == 0)
        self.keep(self._cuts(slots, entry.state, chain, entry.ids, entry.done, attached=wanted and due))
        self._store_state(chain)
        if wanted and entry.done == entry.target:
            self._put_tail(slots, entry.state, chain, entry.ids[: entry.done])
        if not chain.open:
            self.release(entry)

    def fork(self, entry: Entry) -> Chain | None:
        """The chain of a row that starts from this entry; None if what it generates is not kept."""
        return replace(entry.prefix.chain) if entry.prefix is not None and not self._delicate else None

    # -- running -----------------------------------------------------------------------------------------------------

    def due(self, slots: Any, rows: Iterable[Any]) -> list[Cut]:
        """Cuts of the blocks that the step which was built last has filled, lazy; `rows`: of the window step."""
        cuts: list[Cut] = []
        for row in rows:
            chain: Chain | None = row.chain
            if chain is not None and chain.open and row.slot.length // T > chain.blocks:
                cuts += self._cuts(slots, row.slot, chain, row.consumed, row.slot.length, attached=not self.reuse.trimmable)
        return cuts

    def _cuts(self, slots: Any, slot: Any, chain: Chain, ids: Sequence[TokenId], length: int, *, attached: bool) -> list[Cut]:
        """attached: with the recurrent state, if the row stands at the end of the last of these blocks."""
        cuts = []
        try:
            for end in range((chain.blocks + 1) * T, length + 1, T):
                state = payload.snapshot(slots, slot) if attached and end == length and not self.reuse.trimmable else None
                cuts.append(Cut(chain, tuple(ids[end - T : end]), payload.cut(slots, slot, end - T, end), state))
        except Exception:
            self._give_up([chain])
        return cuts

    def _give_up(self, chains: Iterable[Chain]) -> None:
        """What should have been kept of these rows is not, and so nothing that follows it."""
        self.failures += 1
        for chain in chains:
            chain.open = False

    def keep(self, cuts: Sequence[Cut]) -> None:
        """Evaluate these and publish them, in order."""
        cuts = [cut for cut in cuts if cut.chain.open]
        if not cuts:
            return
        try:
            payload.evaluate([part for cut in cuts for part in (cut.payload, cut.state) if part is not None])
        except Exception:
            self._give_up(cut.chain for cut in cuts)
            return
        for cut in cuts:
            if cut.chain.open:
                self._put(cut)

    def _put(self, cut: Cut) -> None:
        chain = cut.chain
        block = Block.following(chain.key, chain.blocks, cut.ids, cut.payload, cut.state if self._cheap else None)
        chain.open = self._cache.put(block, chain.namespace, chain.session)
        self._pending.published(block.key)
        if chain.open:
            chain.key, chain.blocks, chain.last = block.key, block.index + 1, block
            chain.state = None if self._cheap else cut.state

    def _store_state(self, chain: Chain) -> None:
        """Put the recurrent state that waits for it with its block."""
        if chain.state is not None and chain.last is not None:
            self._cache.put(replace(chain.last, attachment=chain.state), chain.namespace, chain.session)
            chain.state = None

    def _put_tail(self, slots: Any, slot: Any, chain: Chain, ids: Sequence[TokenId]) -> None:
        """Put the 1 to 63 ids behind the last whole block, where state can be taken up within one."""
        rest = tuple(ids[chain.blocks * T :])
        if not self.reuse.trimmable or not chain.open or not 0 < len(rest) < T:
            return
        try:
            held = payload.cut(slots, slot, chain.blocks * T, len(ids))
            payload.evaluate([held])
        except Exception:
            self._give_up([chain])
            return
        self._cache.put_tail(Tail(chain.key, rest, held), chain.namespace, chain.session)

    def settle(self, slots: Any, row: Any) -> None:
        """A row of the window step has ended well, and all that it consumed is in the state, evaluated."""
        chain: Chain | None = row.chain
        if chain is not None:
            self._store_state(chain)
            self._put_tail(slots, row.slot, chain, row.consumed)


def _pieces(lease: Lease, length: int) -> list[Piece]:
    """The first `length` tokens of a lease as what `paste` takes."""
    held: list[Block | Tail] = [*lease.blocks, *([lease.part] if lease.part is not None else [])]
    pieces = []
    for index, value in enumerate(held):
        tokens = min(T, length - index * T)
        state = _state(value.payload)
        if tokens > 0 and state is not None:
            pieces.append(Piece(index * T, tokens, state))
    return pieces


def _state(held: Payload | None) -> StatePayload | None:
    if held is not None and not isinstance(held, StatePayload):
        raise TypeError(f"a {type(held).__name__} is no state of a row")
    return held


def _bytes(parts: Sequence[payload.PartSpec]) -> int:
    return sum(math.prod(part.shape) * MLX_DTYPES[part.dtype].size for part in parts)


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading keys are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
