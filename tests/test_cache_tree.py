"""`PrefixCache`: what is taken, kept, evicted and counted; C6 compares it with a model that is a dictionary of prefixes."""

from __future__ import annotations

import gc
import itertools
import json
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mlxnb_engine.cache import blocks, nodes
from mlxnb_engine.cache.blocks import BOOKKEEPING_BYTES, Block, Reuse, T, Tail, block_key, chain, root_key
from mlxnb_engine.cache.pending import PendingPrefixes
from mlxnb_engine.cache.tree import Lease, PrefixCache
from mlxnb_engine.errors import EngineDead

A, B = b"a" * 32, b"b" * 32
WHOLE, TRIM = Reuse(trimmable=False), Reuse()
UNIT = BOOKKEEPING_BYTES + 100
"""Bytes of a block or tail here, unless said otherwise."""


@dataclass(eq=False)
class State:
    """A payload: what it would restore, so that a wrong one shows."""

    says: object = None
    nbytes: int = 100


class Spilled:
    """The tier behind: what it was offered, in order, and whether it takes it."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.takes: Callable[[Block], bool] = lambda block: True

    def __call__(self, block: Block, namespace: bytes) -> bool:
        self.blocks.append(block)
        return self.takes(block)

    @property
    def ends(self) -> list[tuple[int, int]]:
        """(first id, end) of each block."""
        return [(block.ids[0], block.end) for block in self.blocks]


def ids_of(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def cut(ids: tuple[int, ...], namespace: bytes = A, attached: tuple[int, ...] = (), nbytes: int = 100) -> list[Block]:
    """The whole blocks of these ids, saying which tokens they stand for. attached: the ends that carry an attachment."""
    made, parent = [], root_key(namespace)
    for index in range(len(ids) // T):
        end = index * T + T
        attachment = State(("after", ids[:end]), 10) if end in attached else None
        made.append(Block.following(parent, index, ids[end - T : end], State(ids[:end], nbytes), attachment))
        parent = made[-1].key
    return made


def end_of(ids: tuple[int, ...], namespace: bytes = A, nbytes: int = 100) -> Tail:
    keys = [root_key(namespace), *chain(namespace, ids)]
    return Tail(keys[-1], ids[len(ids) // T * T :], State(ids, nbytes))


def fill(cache: PrefixCache, ids: tuple[int, ...], namespace: bytes = A, **more: Any) -> list[Block]:
    made = cut(ids, namespace, **more)
    kept = [cache.put(block, namespace) for block in made]
    assert all(kept)
    if len(ids) % T:
        assert cache.put_tail(end_of(ids, namespace), namespace)
    return made


@pytest.fixture
def spilled() -> Spilled:
    return Spilled()


@pytest.fixture
def cache(spilled: Spilled) -> Iterator[PrefixCache]:
    """Room for ten blocks."""
    cache = PrefixCache(budget_bytes=10 * UNIT, spill=spilled)
    yield cache
    cache.check()


def restores(lease: Lease) -> tuple[int, ...]:
    """The ids whose state the lease gives back, from what its payloads say."""
    for place, block in enumerate(lease.blocks):
        assert block.index == place
        assert isinstance(block.payload, State)
        assert isinstance(block.payload.says, tuple)
        assert len(block.payload.says) == block.end
    held = [*lease.blocks] if lease.part is None else [*lease.blocks, lease.part]
    assert len(lease.blocks) == lease.length // T and (lease.part is None) == (lease.length % T == 0)
    return held[-1].payload.says[: lease.length] if held else ()  # type: ignore[union-attr,index,no-any-return]


def takes(cache: PrefixCache, ids: tuple[int, ...], reuse: Reuse = TRIM, namespace: bytes = A) -> int:
    """Tokens a take covers; the state is that of exactly these ids, and at least one id is left to run."""
    expected = cache.can_take(ids, namespace, reuse)
    with cache.take(ids, namespace, reuse) as lease:
        assert restores(lease) == ids[: lease.length]
        assert lease.length == expected < max(1, len(ids))
        return lease.length


# -- take -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, T - 1, T, T + 1, 2 * T, 2 * T + 1, 3 * T, 3 * T + 1, 3 * T + 5])
def test_a_known_prompt_is_taken_but_for_its_last_token(cache: PrefixCache, length: int) -> None:
    ids = ids_of(0, 3 * T + 5)
    fill(cache, ids)
    assert takes(cache, ids[:length]) == length - 1


def test_other_state_ends_at_a_block_end_with_an_attachment(cache: PrefixCache) -> None:
    ids = ids_of(0, 3 * T)
    fill(cache, ids, attached=(T, 3 * T))
    for length, expected in [(T, 0), (T + 1, T), (2 * T + 1, T), (3 * T, T), (3 * T + 1, 3 * T)]:
        asked = (*ids, 7)[:length]
        assert takes(cache, asked, WHOLE) == expected
        with cache.take(asked, A, WHOLE) as lease:
            assert (lease.attachment is not None) == (expected > 0)
            if expected:
                assert lease.attachment.says == ("after", ids[:expected])


def test_other_state_without_an_attachment_is_a_miss(cache: PrefixCache) -> None:
    fill(cache, ids_of(0, 3 * T))
    assert takes(cache, ids_of(0, 3 * T + 1), WHOLE) == 0


def test_an_edited_history_falls_back_to_the_common_prefix(cache: PrefixCache) -> None:
    ids = ids_of(0, 3 * T + 5)
    fill(cache, ids, attached=(T,))
    for place in (0, 1, T - 1, T, T + 30, 3 * T - 1, 3 * T, 3 * T + 4):
        edited = (*ids[:place], 9999, *ids[place + 1 :], 1, 2, 3)
        assert takes(cache, edited) == place
        assert takes(cache, edited, WHOLE) == (T if place >= T else 0)


def test_the_longest_of_several_branches_wins(cache: PrefixCache) -> None:
    stem = ids_of(0, T)
    fill(cache, stem + ids_of(500, T))
    fill(cache, stem + ids_of(500, 10) + ids_of(900, 20))
    assert takes(cache, stem + ids_of(500, 5) + ids_of(0, 9)) == T + 5
    assert takes(cache, stem + ids_of(500, 10) + ids_of(900, 3) + ids_of(0, 9)) == T + 13
    assert takes(cache, stem + ids_of(500, 12) + ids_of(0, 9)) == T + 12


def test_an_encoded_chain_is_not_taken_below_its_minimum(cache: PrefixCache) -> None:
    ids = ids_of(0, 3 * T)
    fill(cache, ids, attached=(T, 2 * T))
    for reuse in (Reuse(minimum_offset=2 * T), Reuse(False, 2 * T)):
        assert takes(cache, ids[: 2 * T], reuse) == 0
        assert takes(cache, ids[: 2 * T + 1], reuse) == 2 * T
    assert takes(cache, ids[: 2 * T], Reuse(minimum_offset=2 * T - 1)) == 2 * T - 1


def test_a_take_leaves_the_donor_and_serves_two_borrowers_at_once(cache: PrefixCache) -> None:
    ids = ids_of(0, 2 * T + 9)
    made = fill(cache, ids)
    before = cache.describe_tree()
    one, other = cache.take(ids, A, TRIM), cache.take(ids, A, TRIM)
    assert one.blocks == other.blocks == tuple(made)
    assert one.part is other.part is not None
    one.close()
    assert restores(other) == ids[:-1]
    other.close()
    assert cache.describe_tree() == before
    assert takes(cache, ids) == len(ids) - 1


def test_a_miss_is_an_empty_lease(cache: PrefixCache) -> None:
    with cache.take(ids_of(0, 100), A, TRIM) as lease:
        assert (lease.length, lease.blocks, lease.part, lease.attachment, lease.key) == (0, (), None, None, root_key(A))


def test_a_lease_names_the_parent_of_the_next_block(cache: PrefixCache) -> None:
    ids = ids_of(0, 2 * T + 9)
    fill(cache, ids)
    for length, whole in [(T, 0), (T + 1, 1), (2 * T + 9, 2)]:
        with cache.take(ids[:length], A, TRIM) as lease:
            assert lease.key == [root_key(A), *chain(A, ids)][whole]


def test_a_lease_tells_which_blocks_a_sliding_layer_needs(cache: PrefixCache) -> None:
    ids = ids_of(0, 4 * T + 1)
    fill(cache, ids)
    with cache.take(ids, A, TRIM) as lease:
        assert lease.needed(None) == lease.blocks
        assert [len(lease.needed(window)) for window in (1, 2, T + 1, T + 2, 1000)] == [0, 1, 1, 2, 4]
    with cache.take(ids[:-20], A, TRIM) as lease:
        assert lease.length == 3 * T + T - 20
        assert [len(lease.needed(window)) for window in (1, T - 19, T - 18, 1000)] == [0, 0, 1, 3]


def test_the_session_decides_only_between_equally_long_candidates(cache: PrefixCache) -> None:
    stem = ids_of(0, T)
    fill(cache, stem)
    mine, theirs = stem + ids_of(500, 10) + (1,), stem + ids_of(500, 10) + (2,)
    for session, ids in (("mine", mine), ("theirs", theirs)):
        assert cache.put_tail(end_of(ids), A, session)
    for session, ids in (("theirs", theirs), ("mine", mine), ("theirs", theirs), ("mine", mine)):
        with cache.take(stem + ids_of(500, 10) + (3, 4), A, TRIM, session) as lease:
            assert lease.length == T + 10
            assert lease.part is not None and lease.part.ids == ids[T:]
    with cache.take((*mine, 5), A, TRIM, "theirs") as lease:
        assert lease.length == T + 11


def test_can_take_changes_nothing(cache: PrefixCache) -> None:
    fill(cache, ids_of(0, 2 * T))
    fill(cache, ids_of(500, 2 * T))
    before = cache.stats(), cache.describe_tree()
    assert cache.can_take(ids_of(0, 2 * T), A, TRIM) == 2 * T - 1
    assert cache.can_take(ids_of(0, 2 * T), B, TRIM) == 0
    assert (cache.stats(), cache.describe_tree()) == before


# -- put ------------------------------------------------------------------------------------------------------------------


def test_a_second_publisher_keeps_the_first_block_and_refreshes_it(cache: PrefixCache, spilled: Spilled) -> None:
    first = fill(cache, ids_of(0, T))
    fill(cache, ids_of(500, T))
    again = cut(ids_of(0, T))
    assert again[0].key == first[0].key
    assert cache.put(again[0], A)
    assert cache.stats()["namespaces"][A.hex()]["blocks"] == 2
    with cache.take(ids_of(0, T + 1), A, TRIM) as lease:
        assert lease.blocks[0] is first[0]
    assert cache.put(again[0], A)
    fill(cache, ids_of(900, 9 * T))
    assert spilled.ends == [(500, T)]


def test_a_second_publisher_adds_a_missing_attachment_and_replaces_none(cache: PrefixCache) -> None:
    ids = ids_of(0, T + 1)
    fill(cache, ids[:T])
    with cache.take(ids, A, TRIM) as lease:
        with_it = cut(ids, attached=(T,))[0]
        assert cache.put(with_it, A)
        cache.check()
        assert lease.attachment is None, "a lease changed under its holder"
    with cache.take(ids, A, WHOLE) as lease:
        assert lease.length == T and lease.attachment is with_it.attachment
    assert cache.put(cut(ids, attached=(T,))[0], A)
    with cache.take(ids, A, WHOLE) as lease:
        assert lease.attachment is with_it.attachment


def test_an_attachment_without_room_goes_to_the_spill_and_the_block_stays(spilled: Spilled) -> None:
    cache = PrefixCache(budget_bytes=UNIT + 5, spill=spilled)
    bare, full = cut(ids_of(0, T))[0], cut(ids_of(0, T), attached=(T,))[0]
    assert cache.put(bare, A) and cache.put(full, A)
    cache.check()
    assert takes(cache, ids_of(0, T + 1)) == T
    assert takes(cache, ids_of(0, T + 1), WHOLE) == 0
    assert spilled.blocks == [full]


def test_a_child_without_its_parent_is_not_kept(cache: PrefixCache, spilled: Spilled) -> None:
    made = cut(ids_of(0, 3 * T))
    assert not cache.put(made[1], A)
    assert spilled.blocks == [made[1]], "the disk may have the parent"
    assert cache.put(made[0], A) and not cache.put(made[2], A) and cache.put(made[1], A) and cache.put(made[2], A)
    assert not cache.put_tail(end_of(ids_of(0, 4 * T + 1)), A)
    assert cache.stats()["refused"] == 3
    assert takes(cache, ids_of(0, 4 * T + 2)) == 3 * T


def test_a_block_that_does_not_follow_from_its_parent_is_refused(cache: PrefixCache) -> None:
    first, second = fill(cache, ids_of(0, 2 * T))
    third = Block.following(second.key, 2, ids_of(500, T), State())
    for wrong in (
        replace(third, ids=ids_of(501, T)),
        replace(third, parent=first.key),
        replace(third, index=3),
        replace(third, index=0),
        replace(first, index=1),
    ):
        with pytest.raises(ValueError, match="block"):
            cache.put(wrong, A)
    with pytest.raises(ValueError, match="namespace"):
        cache.put(first, B)
    assert cache.stats()["namespaces"][A.hex()]["blocks"] == 2
    assert cache.put(third, A)


def test_eight_samples_of_one_prompt_keep_its_blocks_once(cache: PrefixCache) -> None:
    for _ in range(8):
        fill(cache, ids_of(0, 3 * T + 7))
    assert cache.stats()["used_bytes"] == 4 * UNIT


# -- tails ----------------------------------------------------------------------------------------------------------------


def tails_of(cache: PrefixCache) -> list[list[int]]:
    return sorted(node["ids"] for node in cache.describe_tree()["nodes"] if node["kind"] == "tail")


def test_a_longer_tail_replaces_its_own_strict_prefixes_only(cache: PrefixCache) -> None:
    stem = ids_of(0, T)
    fill(cache, stem)
    for rest in ((1,), (1, 2, 3), (1, 2, 4), (9,), (1, 2), (1, 2, 3)):
        assert cache.put_tail(end_of(stem + rest), A)
        cache.check()
    assert tails_of(cache) == [[1, 2, 3], [1, 2, 4], [9]]
    assert cache.put_tail(end_of((1, 2)), A), "the same ids under another parent are another tail"
    assert tails_of(cache) == [[1, 2], [1, 2, 3], [1, 2, 4], [9]]


def test_the_first_of_two_equal_tails_is_kept(cache: PrefixCache) -> None:
    one, other = end_of((1, 2, 3)), end_of((1, 2, 3))
    assert cache.put_tail(one, A) and cache.put_tail(other, A)
    with cache.take((1, 2, 3, 4), A, TRIM) as lease:
        assert lease.part is one


def test_a_block_replaces_the_tails_it_continues(cache: PrefixCache) -> None:
    ids = ids_of(0, 2 * T)
    fill(cache, ids[: T + 9])
    assert cache.put_tail(end_of((*ids[:T], 77)), A)
    fill(cache, ids)
    assert tails_of(cache) == [[77]]
    assert cache.put_tail(end_of(ids[: T + 20]), A), "it is in the block"
    assert tails_of(cache) == [[77]]


def test_a_leased_tail_that_is_replaced_counts_until_its_lease_closes(cache: PrefixCache) -> None:
    assert cache.put_tail(end_of((1, 2, 3)), A)
    lease = cache.take((1, 2, 3, 4), A, TRIM)
    assert cache.put_tail(end_of((1, 2, 3, 4, 5)), A)
    cache.check()
    assert cache.stats()["used_bytes"] == 2 * UNIT
    assert restores(lease) == (1, 2, 3)
    lease.close()
    assert cache.stats()["used_bytes"] == UNIT
    assert takes(cache, ids_of(1, 6)) == 5


def test_a_tail_is_evicted_but_never_spilled(cache: PrefixCache, spilled: Spilled) -> None:
    assert cache.put_tail(end_of((1, 2, 3)), A)
    fill(cache, ids_of(500, 10 * T))
    assert (takes(cache, (1, 2, 3, 4)), spilled.blocks, cache.stats()["evictions"]) == (0, [], 1)


# -- room -----------------------------------------------------------------------------------------------------------------


def test_leaves_go_before_their_parents_and_the_oldest_first(cache: PrefixCache, spilled: Spilled) -> None:
    fill(cache, ids_of(0, 3 * T))
    fill(cache, ids_of(500, 3 * T))
    fill(cache, ids_of(900, 3 * T))
    takes(cache, ids_of(0, 3 * T + 1))
    fill(cache, ids_of(2000, 6 * T))
    # Ten blocks: one was free. An ancestor that the disk lacks is offered first, but stays in RAM.
    assert spilled.ends == [(500, T), (564, 2 * T), (628, 3 * T), (900, T), (964, 2 * T), (1028, 3 * T)]
    assert takes(cache, ids_of(0, 3 * T + 1)) == 3 * T
    assert takes(cache, ids_of(500, 3 * T + 1)) == 0
    assert takes(cache, ids_of(900, 3 * T + 1)) == T
    assert cache.stats()["evictions"] == 5


def test_the_end_of_a_use_keeps_its_whole_chain_young(cache: PrefixCache) -> None:
    fill(cache, ids_of(0, 4 * T))
    fill(cache, ids_of(500, 4 * T))
    takes(cache, ids_of(0, 2 * T + 1))  # marks its second block only
    fill(cache, ids_of(900, 6 * T))
    # Two leaves of the first went (older than what was used later), two of the second; the used half outlives the rest.
    assert takes(cache, ids_of(0, 4 * T + 1)) == 2 * T
    assert takes(cache, ids_of(500, 4 * T + 1)) == 2 * T


def test_a_leased_chain_stays_and_the_newcomer_goes_without(cache: PrefixCache, spilled: Spilled) -> None:
    ids = ids_of(0, 10 * T)
    fill(cache, ids)
    with cache.take((*ids, 1), A, TRIM) as lease:
        assert lease.length == 10 * T
        newcomer = cut(ids_of(5000, T))[0]
        assert not cache.put(newcomer, A)
        assert not cache.put_tail(end_of((1, 2)), A)
        assert spilled.blocks == [newcomer] and cache.stats()["evictions"] == 0
        cache.check()
    assert cache.put(newcomer, A)
    assert takes(cache, (*ids, 1)) == 9 * T


def test_a_chain_that_fills_the_budget_does_not_eat_itself(cache: PrefixCache, spilled: Spilled) -> None:
    fill(cache, ids_of(9000, 2 * T))
    made = cut(ids_of(0, 12 * T))
    assert [cache.put(block, A) for block in made] == [True] * 10 + [False] * 2
    assert spilled.blocks[2:] == made, "what did not fit was offered after its ancestors"
    assert takes(cache, ids_of(0, 12 * T)) == 10 * T


def test_a_block_larger_than_the_budget_is_spilled_and_nothing_evicted(cache: PrefixCache, spilled: Spilled) -> None:
    fill(cache, ids_of(0, 2 * T))
    giant = Block.following(root_key(A), 0, ids_of(500, T), State(nbytes=10 * UNIT))
    assert not cache.put(giant, A)
    assert spilled.blocks == [giant]
    assert (takes(cache, ids_of(0, 2 * T + 1)), cache.stats()["evictions"]) == (2 * T, 0)


def test_nothing_is_kept_without_a_budget_or_a_spill() -> None:
    cache = PrefixCache(budget_bytes=0)
    assert not cache.put(cut(ids_of(0, T))[0], A)
    assert takes(cache, ids_of(0, T + 1)) == 0
    cache.check()


def test_blocks_without_any_state_are_not_free(spilled: Spilled) -> None:
    """A purely recurrent model keeps nothing in most blocks; their number is bounded all the same."""
    cache = PrefixCache(budget_bytes=10 * BOOKKEEPING_BYTES, spill=spilled)
    for first in range(0, 2000, 100):
        fill(cache, ids_of(first, T), nbytes=0)
    assert cache.stats()["namespaces"][A.hex()]["blocks"] == 10


def test_a_block_that_got_an_attachment_is_spilled_again(spilled: Spilled) -> None:
    cache = PrefixCache(budget_bytes=3 * UNIT + 10, spill=spilled)
    fill(cache, ids_of(0, 2 * T))
    fill(cache, ids_of(500, T))
    fill(cache, ids_of(900, T))
    assert spilled.ends == [(0, T), (T, 2 * T)], "the parent too, though it stays in RAM"
    assert cache.put(cut(ids_of(0, T), attached=(T,))[0], A)
    fill(cache, ids_of(2000, 3 * T))
    assert spilled.ends[2:] == [(500, T), (900, T), (0, T)]
    assert spilled.blocks[0].attachment is None and spilled.blocks[-1].attachment is not None


def test_a_refused_parent_is_offered_again_and_its_child_is_not(cache: PrefixCache, spilled: Spilled) -> None:
    spilled.takes = lambda block: block.index == 0
    fill(cache, ids_of(0, 3 * T))
    fill(cache, ids_of(500, 10 * T))
    assert [end for first, end in spilled.ends] == [T, 2 * T, 2 * T]
    assert cache.stats()["spilled"] == 1 and cache.stats()["spill_refused"] == 2


def test_a_spill_that_raises_costs_the_block_and_nothing_else(cache: PrefixCache, spilled: Spilled) -> None:
    def fails(block: Block) -> bool:
        raise OSError("disk on fire")

    spilled.takes = fails
    fill(cache, ids_of(0, T))
    fill(cache, ids_of(500, 10 * T))
    assert cache.stats()["spill_failures"] == 1
    assert takes(cache, ids_of(500, 10 * T + 1)) == 10 * T


def test_payloads_are_let_go_at_once_without_the_garbage_collector() -> None:
    cache = PrefixCache(budget_bytes=4 * UNIT)
    states: list[weakref.ref[State]] = []

    def publish(first: int, rest: int) -> None:
        ids = ids_of(first, 2 * T + rest)
        for value in (*cut(ids), end_of(ids)):
            states.append(weakref.ref(value.payload))  # type: ignore[arg-type]
            assert cache.put_tail(value, A) if isinstance(value, Tail) else cache.put(value, A)

    def alive() -> list[bool]:
        return [state() is not None for state in states]

    gc.collect()
    gc.disable()
    try:
        publish(0, 3)
        publish(0, 4)  # replaces the tail; its blocks are there already
        assert alive() == [True, True, False, False, False, True]
        states.clear()
        publish(500, 3)
        lease = cache.take(ids_of(500, 2 * T + 4), A, TRIM)
        cache.drop(A)
        assert alive() == [True, True, True], "leased"
        lease.close()
        assert alive() == [False] * 3
        publish(0, 3)
        publish(500, 3)
        assert alive()[3:] == [True, False, False, True, True, True], "two of the first were evicted"
        cache.close()
        assert not any(alive())
    finally:
        gc.enable()


# -- collisions -----------------------------------------------------------------------------------------------------------


def weak_hash(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    strong = blocks._hash

    def weak(parts: Any) -> bytes:
        return (int.from_bytes(strong(parts)[:4], "big") % 2**bits).to_bytes(32, "big")

    monkeypatch.setattr(blocks, "_hash", weak)


def test_an_equal_key_with_other_ids_is_a_miss(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_hash", lambda parts: bytes(31) + bytes([len(list(parts)) == 3]))
    one, other = ids_of(0, T), ids_of(500, T)
    assert block_key(root_key(A), one) == block_key(root_key(A), other)
    fill(cache, one)
    assert takes(cache, (*other, 1)) == 0
    assert not cache.put(cut(other)[0], A)
    assert cache.stats()["collisions"] == 1
    assert takes(cache, (*one, 1)) == T


def collide(trials: int) -> int:
    """Publish and take at random under a weak hash; returns how many collisions there were. Every take must be exact."""
    draw = random.Random(1)
    cache = PrefixCache(budget_bytes=20 * UNIT)
    for _ in range(trials):
        namespace = draw.choice((A, B))
        ids = tuple(token for _ in range(draw.randrange(1, 4)) for token in (draw.randrange(4),) * T)
        for block in cut(ids, namespace):
            if not cache.put(block, namespace):
                break
        takes(cache, (*ids, 1), TRIM, namespace)
        cache.check()
    return int(cache.stats()["collisions"])


def test_no_state_crosses_a_hash_that_collides_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weak_hash(monkeypatch, 5)
    assert collide(500) > 100


def test_the_collision_test_sees_a_cache_that_trusts_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trusting(nodes.Root):
        def longest(self, ids: Any, reuse: Reuse, session: str | None) -> Any:
            found: list[nodes.Node] = []
            for key in chain(self.namespace, ids[: len(ids) - 1]):
                child = (found[-1] if found else self.top).children.get(key)
                if child is None:
                    break
                found.append(child)
            return len(found) * T, found

    weak_hash(monkeypatch, 5)
    monkeypatch.setattr("mlxnb_engine.cache.tree.Root", Trusting)
    with pytest.raises(AssertionError):
        collide(500)


# -- namespaces and life ---------------------------------------------------------------------------------------------------


def test_namespaces_share_a_budget_and_nothing_else(cache: PrefixCache) -> None:
    fill(cache, ids_of(0, 2 * T))
    assert takes(cache, ids_of(0, 2 * T), namespace=B) == 0
    fill(cache, ids_of(0, 2 * T), B)
    assert cache.stats()["used_bytes"] == 4 * UNIT
    cache.drop(A)
    assert takes(cache, ids_of(0, 2 * T + 1)) == 0
    assert takes(cache, ids_of(0, 2 * T + 1), namespace=B) == 2 * T
    cache.drop(b"never seen")


def test_what_is_dropped_under_a_lease_counts_until_it_closes(cache: PrefixCache, spilled: Spilled) -> None:
    ids = ids_of(0, 3 * T)
    fill(cache, ids)
    lease = cache.take(ids[: 2 * T + 1], A, TRIM)
    cache.drop(A)
    cache.check()
    assert cache.stats()["used_bytes"] == 2 * UNIT == cache.stats()["leased_bytes"]
    fill(cache, ids)
    cache.check()
    assert restores(lease) == ids[: 2 * T]
    lease.close()
    lease.close()
    assert cache.stats()["used_bytes"] == 3 * UNIT and not spilled.blocks
    cache.clear()
    assert cache.stats()["used_bytes"] == 0 == len(cache.stats()["namespaces"])


def test_a_closed_cache_is_empty_and_takes_no_more() -> None:
    cache = PrefixCache(budget_bytes=10 * UNIT)
    fill(cache, ids_of(0, T))
    cache.close()
    cache.close()
    for use in (
        lambda: cache.take((1,), A, TRIM),
        lambda: cache.put(cut(ids_of(0, T))[0], A),
        lambda: cache.put_tail(end_of((1,)), A),
    ):
        with pytest.raises(EngineDead):
            use()
    assert cache.can_take(ids_of(0, T + 1), A, TRIM) == cache.stats()["used_bytes"] == 0


def test_closing_with_an_open_lease_is_an_error_after_everything_is_released() -> None:
    cache = PrefixCache(budget_bytes=10 * UNIT)
    fill(cache, ids_of(0, 2 * T))
    lease = cache.take(ids_of(0, T + 1), A, TRIM)
    with pytest.raises(RuntimeError, match="1 leases are open"):
        cache.close()
    assert cache.stats()["used_bytes"] == UNIT
    lease.close()
    assert cache.stats()["used_bytes"] == 0
    cache.close()


# -- views and check --------------------------------------------------------------------------------------------------------


def test_stats_and_the_tree_are_json_and_say_what_is_there(cache: PrefixCache) -> None:
    fill(cache, ids_of(0, 2 * T + 3), attached=(T,))
    fill(cache, (*ids_of(0, T), *ids_of(500, T)))
    fill(cache, ids_of(0, T), B)
    cache.put(cut(ids_of(0, T), B)[0], B, "a chat")
    lease = cache.take(ids_of(0, 2 * T), A, TRIM)
    takes(cache, (9, 9, 9))
    stats = json.loads(json.dumps(cache.stats()))
    assert stats == {
        "budget_bytes": 10 * UNIT,
        "used_bytes": 5 * UNIT + 10,
        "leased_bytes": 2 * UNIT + 10,
        "leases": 1,
        "hits": 1,
        "misses": 1,
        "hit_tokens": 2 * T - 1,
        "asked_tokens": 2 * T + 3,
        "evictions": 0,
        "spilled": 0,
        "spill_refused": 0,
        "spill_failures": 0,
        "refused": 0,
        "collisions": 0,
        "namespaces": {
            A.hex(): {"blocks": 3, "tails": 1, "bytes": 4 * UNIT + 10, "hits": 1, "misses": 1},
            B.hex(): {"blocks": 1, "tails": 0, "bytes": UNIT, "hits": 0, "misses": 0},
        },
    }
    tree = json.loads(json.dumps(cache.describe_tree()))
    shape = [(node["kind"], node["start"], node["parent"], node["leases"], node["attachment"]) for node in tree["nodes"]]
    assert shape == [
        ("block", 0, None, 1, True),
        ("block", T, 0, 1, False),
        ("block", 0, None, 0, False),
        ("block", T, 0, 0, False),
        ("tail", 2 * T, 1, 0, False),
    ]
    assert tree["nodes"][2]["namespace"] == B.hex() and tree["nodes"][2]["session"] == "a chat"
    assert tree["nodes"][1]["key"] == chain(A, ids_of(0, 2 * T))[1].hex() and tree["nodes"][4]["ids"] == [128, 129, 130]
    lease.close()


def test_a_bounded_view_keeps_the_latest_with_their_parents(cache: PrefixCache) -> None:
    fill(cache, ids_of(0, 4 * T))
    fill(cache, ids_of(500, 4 * T))
    takes(cache, ids_of(0, 3 * T + 1))
    for limit in range(10):
        tree = cache.describe_tree(limit)
        assert (len(tree["nodes"]), tree["left_out"]) == (min(limit, 8), 8 - min(limit, 8))
        for place, node in enumerate(tree["nodes"]):
            assert node["start"] == 0 if node["parent"] is None else node["start"] == tree["nodes"][node["parent"]]["start"] + T
            assert node["parent"] is None or node["parent"] < place
        assert [node["ids"][0] for node in tree["nodes"][:3]] == [0, T, 2 * T][:limit]


def test_other_threads_may_look_while_the_engine_works() -> None:
    cache, done, problems = PrefixCache(budget_bytes=6 * UNIT), threading.Event(), []

    def look() -> None:
        try:
            while not done.is_set():
                json.dumps([cache.stats(), cache.describe_tree(5)])
                cache.check()
        except BaseException as error:
            problems.append(error)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(150):
        fill(cache, ids_of(turn % 7 * 1000, 3 * T + 5))
        takes(cache, ids_of(turn % 5 * 1000, 3 * T))
        if turn % 50 == 49:
            cache.drop(A)
    done.set()
    for reader in readers:
        reader.join(30)
    assert not problems


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda cache, node: setattr(cache, "_used", cache._used - 1), "used bytes"),
        (lambda cache, node: setattr(cache, "budget_bytes", UNIT), "used bytes"),
        (lambda cache, node: setattr(cache, "_leased", 1), "leased bytes"),
        (lambda cache, node: setattr(node, "leases", 1), "leases"),
        (lambda cache, node: cache._leases.clear(), "leases"),
        (lambda cache, node: node.parent.children.clear(), "used bytes"),
        (lambda cache, node: setattr(cache._roots[A], "tails", 2), "namespace 61616161"),
        (lambda cache, node: setattr(cache._roots[A], "nbytes", 0), "namespace 61616161"),
        (lambda cache, node: cache._roots[A].blocks.popitem(), "namespace 61616161"),
        (lambda cache, node: cache._ages.discard(node), "ages"),
        (lambda cache, node: setattr(node, "used", 99), "ages"),
    ],
)
def test_check_sees_what_does_not_add_up(break_it: Callable[[PrefixCache, nodes.Node], object], named: str) -> None:
    cache = PrefixCache(budget_bytes=10 * UNIT)
    made = fill(cache, ids_of(0, 2 * T))
    fill(cache, (*ids_of(0, T), 7, 8))
    lease = cache.take(ids_of(0, T + 1), A, TRIM)
    cache.check()
    break_it(cache, cache._roots[A].blocks[made[1].key])
    with pytest.raises(RuntimeError, match=named):
        cache.check()
    del lease


# -- requests that share a prefix -------------------------------------------------------------------------------------------


def test_one_request_makes_a_shared_prefix_and_the_others_wait_for_it() -> None:
    pending = PendingPrefixes()
    stem, mine, theirs = [b"0", b"1"], [b"2"], [b"3", b"4"]
    assert pending.announce("first", stem + mine) is None
    assert pending.announce("second", stem + theirs) == "first"
    assert pending.maker(theirs) is None, "who waits has announced nothing"
    pending.published(b"0")
    assert pending.announce("second", [b"1", *theirs]) == "first"
    pending.published(b"1")
    assert pending.announce("second", theirs) is None, "nothing is shared any more: go"
    assert pending.announce("first", mine) is None, "its own announcement stops nobody but others"
    assert (pending.maker(mine), pending.maker(theirs), pending.maker([])) == ("first", "second", None)


def test_whoever_waited_for_a_request_that_ended_goes_on() -> None:
    pending = PendingPrefixes()
    assert pending.announce("first", [b"0", b"1"]) is None
    assert pending.announce("second", [b"0", b"1", b"2"]) == "first"
    pending.published(b"0")
    pending.withdraw("first")
    pending.withdraw("first")
    assert pending.announce("second", [b"1", b"2"]) is None
    assert pending.announce("first", [b"1"]) == "second"
    pending.withdraw("second")
    assert len(pending) == 0


def test_a_later_block_that_is_announced_stays_with_its_maker() -> None:
    pending = PendingPrefixes()
    assert pending.announce("first", [b"1"]) is None
    assert pending.announce("second", [b"0", b"1", b"2"]) is None, "the first block, evicted since, is nobody's"
    assert [pending.maker([key]) for key in (b"0", b"1", b"2")] == ["second", "first", "second"]
    pending.withdraw("second")
    assert pending.maker([b"1"]) == "first"


# -- C6: random operations against a dictionary --------------------------------------------------------------------------------


Place = tuple[bytes, tuple[int, ...]]
"""Namespace and all the ids up to the end of a block or tail."""
Home = tuple[bytes, str | None]
"""Namespace and session."""


@dataclass(eq=False)
class Entry:
    value: Block | Tail
    parent: Entry | None
    used: int = 0
    leases: int = 0
    session: str | None = None
    stored: bool = False

    @property
    def nbytes(self) -> int:
        return self.value.nbytes

    @property
    def attachment(self) -> Any:
        return self.value.attachment if isinstance(self.value, Block) else None

    def line(self) -> list[Entry]:
        """It and its ancestors, deepest first."""
        return [self, *(self.parent.line() if self.parent is not None else [])]


def above(place: Place) -> Place:
    return place[0], place[1][: (len(place[1]) - 1) // T * T]


@dataclass
class Model:
    """What must be there, by whole prefixes. A use stamps an entry and all its ancestors; the oldest of what has nothing below it
    and no lease goes first. left: replaced or dropped under a lease. offered: to the tier behind, with what it carried.
    """

    budget: int
    entries: dict[Place, Entry] = field(default_factory=dict)
    left: set[Entry] = field(default_factory=set)
    offered: list[tuple[Any, Any]] = field(default_factory=list)
    now: int = 0

    def below(self, place: Place) -> list[Place]:
        return [other for other in self.entries if other != place and above(other) == place]

    def used(self) -> int:
        return sum(entry.nbytes for entry in (*self.entries.values(), *self.left))

    def touch(self, entry: Entry, session: str | None) -> None:
        self.now += 1
        entry.session = session or entry.session
        for other in entry.line():
            other.used = self.now

    def fits(self, nbytes: int, keep: Entry | None) -> bool:
        line = keep.line() if keep is not None else []
        held = [entry for entry in self.entries.values() if entry.leases or entry in line]
        return sum(entry.nbytes for entry in (*held, *self.left)) + nbytes <= self.budget

    def offer(self, entry: Entry) -> None:
        if isinstance(entry.value, Block):
            for each in reversed([*itertools.takewhile(lambda other: not other.stored, entry.line())]):
                self.offered.append((each.value.payload, each.attachment))
                each.stored = True

    def remove(self, place: Place) -> Entry:
        entry = self.entries.pop(place)
        if entry.leases:
            self.left.add(entry)
        return entry

    def evict(self) -> None:
        gone = []
        while self.used() > self.budget:
            free = [place for place, entry in self.entries.items() if not entry.leases and not self.below(place)]
            gone.append(self.remove(min(free, key=lambda place: self.entries[place].used)))
        for entry in gone:
            self.offer(entry)

    def put(self, place: Place, value: Block | Tail, session: str | None) -> bool:
        parent, known = self.entries.get(above(place)), self.entries.get(place)
        new = Entry(value, parent)
        if isinstance(value, Tail):
            longer = [other for other in self.below(above(place)) if other[1][: len(place[1])] == place[1]]
            known = self.entries[longer[0]] if longer else None
        if known is not None:
            self.touch(known, session)
            if isinstance(value, Block) and value.attachment is not None and known.attachment is None:
                if not self.fits(value.attachment.nbytes, known):
                    self.offer(new)
                    return True
                known.value, known.stored = replace(known.value, attachment=value.attachment), False  # type: ignore[call-arg]
                self.evict()
            return True
        if (parent is None and above(place)[1]) or not self.fits(value.nbytes, parent):
            self.offer(new)
            return False
        for other in self.below(above(place)):
            if isinstance(self.entries[other].value, Tail) and place[1][: len(other[1])] == other[1]:
                self.remove(other)
        self.entries[place] = new
        self.touch(new, session)
        self.evict()
        return True

    def longest(self, namespace: bytes, ids: tuple[int, ...], reuse: Reuse) -> int:
        asked, best = ids[: len(ids) - 1], 0
        for (home, held), entry in self.entries.items():
            if home == namespace and reuse.trimmable:
                pairs = zip(held, asked, strict=False)
                best = max(best, next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(asked))))
            elif home == namespace and entry.attachment is not None and asked[: len(held)] == held:
                best = max(best, len(held))
        return best if best >= reuse.minimum_offset else 0


def tokens(kinds: tuple[int, ...], rest: int = 0) -> tuple[int, ...]:
    """Whole patterns, but of the last only the first `rest` if that is not 0. They begin alike, so that prompts part within one."""
    whole = tuple(token for kind in kinds for token in [9] * 20 + [kind] * 44)
    return whole[: len(whole) - T + rest] if rest else whole


# One draw each: drawing is most of the time that this takes.
chains = st.sampled_from([kinds for count in (1, 2, 3) for kinds in itertools.product((1, 2), repeat=count)])
rests = st.sampled_from([1, 19, 20, 21, 40, 63])
homes = st.sampled_from([(A, None), (A, None), (A, "one"), (A, "two"), (B, None)])
sizes = st.sampled_from([0, 0, 1, 1000, 2 * BOOKKEEPING_BYTES])
ends = st.sampled_from([(), (T,), (2 * T,), (3 * T,), (T, 2 * T), (T, 2 * T, 3 * T)])
reuses = st.sampled_from([TRIM, TRIM, WHOLE, WHOLE, Reuse(True, 20), Reuse(True, 2 * T), Reuse(False, 2 * T)])


class CacheMachine(RuleBasedStateMachine):
    """Random takes, puts, closes and drops on both; after each, all that can be seen must be equal."""

    cache_class: type[PrefixCache] = PrefixCache

    def __init__(self) -> None:
        super().__init__()
        self.spilled = Spilled()
        self.cache = self.cache_class(budget_bytes=9 * BOOKKEEPING_BYTES, spill=self.spilled)
        self.model = Model(9 * BOOKKEEPING_BYTES)
        self.leases: list[tuple[Lease, list[Entry], tuple[int, ...]]] = []

    @rule(home=homes, kinds=chains, nbytes=sizes, attached=ends)
    def publish(self, home: Home, kinds: tuple[int, ...], nbytes: int, attached: tuple[int, ...]) -> None:
        (namespace, session), ids = home, tokens(kinds)
        for block in cut(ids, namespace, attached, nbytes):
            kept = self.cache.put(block, namespace, session)
            assert kept == self.model.put((namespace, ids[: block.end]), block, session)
            if not kept:
                break

    @rule(home=homes, kinds=chains, rest=rests, nbytes=sizes)
    def publish_tail(self, home: Home, kinds: tuple[int, ...], rest: int, nbytes: int) -> None:
        (namespace, session), ids = home, tokens(kinds, rest)
        tail = end_of(ids, namespace, nbytes)
        assert self.cache.put_tail(tail, namespace, session) == self.model.put((namespace, ids), tail, session)

    @rule(home=homes, kinds=chains)
    def publish_the_last_block_only(self, home: Home, kinds: tuple[int, ...]) -> None:
        (namespace, session), ids = home, tokens(kinds)
        block = cut(ids, namespace)[-1]
        assert self.cache.put(block, namespace, session) == self.model.put((namespace, ids), block, session)

    @precondition(lambda self: len(self.leases) < 4)
    @rule(home=homes, kinds=chains, rest=st.sampled_from([0, 1, 19, 20, 21, 40, 63]), reuse=reuses)
    def take(self, home: Home, kinds: tuple[int, ...], rest: int, reuse: Reuse) -> None:
        (namespace, session), asked = home, tokens(kinds, rest)
        length = self.model.longest(namespace, asked, reuse)
        assert self.cache.can_take(asked, namespace, reuse) == length
        lease = self.cache.take(asked, namespace, reuse, session)
        assert lease.length == length < len(asked)
        whole = length // T * T
        entries = [self.model.entries[namespace, asked[:end]] for end in range(T, whole + 1, T)]
        if lease.part is not None:
            places = self.model.below((namespace, asked[:whole]))
            ways = [self.model.entries[place] for place in places if place[1][:length] == asked[:length]]
            mine = [entry for entry in ways if entry.session == session]
            entries += [entry for entry in mine or ways if entry.value.payload is lease.part.payload]
        if entries:
            self.model.touch(entries[-1], session)
        for entry in entries:
            entry.leases += 1
        self.leases.append((lease, entries, asked[:length]))
        self.same_state(*self.leases[-1])

    def same_state(self, lease: Lease, entries: list[Entry], ids: tuple[int, ...]) -> None:
        held = [value for value in (*lease.blocks, lease.part) if value is not None]
        assert [value.payload for value in held] == [entry.value.payload for entry in entries]
        assert restores(lease) == ids

    @precondition(lambda self: self.leases)
    @rule(place=st.integers(0, 3))
    def close(self, place: int) -> None:
        lease, entries, ids = self.leases.pop(place % len(self.leases))
        self.same_state(lease, entries, ids)
        lease.close()
        lease.close()
        for entry in entries:
            entry.leases -= 1
            if not entry.leases:
                self.model.left.discard(entry)

    @precondition(lambda self: self.model.now % 8 == 7)
    @rule(home=homes)
    def drop(self, home: Home) -> None:
        namespace, _ = home
        self.cache.drop(namespace)
        for place in [place for place in self.model.entries if place[0] == namespace]:
            self.model.remove(place)

    @invariant()
    def all_that_can_be_seen_is_equal(self) -> None:
        self.cache.check()
        tree = self.cache.describe_tree(1000)["nodes"]
        places: list[Place] = []
        for node in tree:
            stem = () if node["parent"] is None else places[node["parent"]][1]
            places.append((bytes.fromhex(node["namespace"]), (*stem, *node["ids"])))
        seen = {place: (node["bytes"], node["leases"], node["attachment"]) for place, node in zip(places, tree, strict=True)}
        must = {place: (entry.nbytes, entry.leases, entry.attachment is not None) for place, entry in self.model.entries.items()}
        assert len(seen) == len(places) and seen == must
        assert self.cache.stats()["used_bytes"] == self.model.used() <= self.model.budget
        assert [(block.payload, block.attachment) for block in self.spilled.blocks] == self.model.offered

    def teardown(self) -> None:
        for lease, *_ in self.leases:
            lease.close()
        self.cache.check()
        self.cache.close()
        assert self.cache.stats()["used_bytes"] == 0


def c6(machine: type[CacheMachine], examples: int, steps: int, **more: Any) -> None:
    wanted = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck), **more)
    run_state_machine_as_test(machine, settings=wanted)  # type: ignore[no-untyped-call]


def test_c6_random_operations_agree_with_a_dictionary(pytestconfig: pytest.Config) -> None:
    c6(CacheMachine, *{"P": (200, 50), "N": (2000, 100), "R": (10_000, 100)}[str(pytestconfig.getoption("--tier"))])


class Consuming(PrefixCache):
    """Takes what it leases out of the tree."""

    def take(self, *args: Any, **more: Any) -> Lease:
        lease = super().take(*args, **more)
        if lease._nodes and not any(lease._nodes[-1].below()):
            self._unlink(lease._nodes[-1])
        return lease


class Greedy(PrefixCache):
    """Leaves nothing to run."""

    def take(self, ids: Any, *args: Any, **more: Any) -> Lease:
        return super().take((*ids, 0), *args, **more)


class EvictsInner(PrefixCache):
    """Frees bytes where it finds them."""

    def _evict(self, leaving: list[nodes.Node]) -> None:
        while self._used > self.budget_bytes:
            self._unlink(next(n for root in self._roots.values() for n in root.nodes() if not n.leases))


class Optimist(PrefixCache):
    """Believes that all that is there could go."""

    def _fits(self, nbytes: int, keep: nodes.Node) -> bool:
        return nbytes <= self.budget_bytes


def ignores_leases(node: nodes.Node) -> bool:
    return node.linked and node.parent is not None and not (node.children or node.tails)


@pytest.mark.parametrize("broken", [Consuming, Greedy, EvictsInner, Optimist, "evicts what is leased"])
def test_c6_sees_a_broken_cache(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenMachine(CacheMachine):
        cache_class = PrefixCache if isinstance(broken, str) else broken

    if isinstance(broken, str):
        monkeypatch.setattr(nodes.Node, "evictable", property(ignores_leases))
    with pytest.raises((AssertionError, RuntimeError, LookupError)):
        c6(BrokenMachine, 200, 50, phases=[Phase.generate], report_multiple_bugs=False)
