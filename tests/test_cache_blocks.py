"""Keys of cached state: the written formula, all components, ambiguous fields, and what a block is."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxnb_engine import fingerprint
from mlxnb_engine.cache import blocks
from mlxnb_engine.cache.blocks import (
    Adapter,
    Block,
    Namespace,
    Reuse,
    T,
    Tail,
    block_key,
    chain,
    first_seen,
    root_key,
)
from mlxnb_engine.cache.tree import PrefixCache
from mlxnb_engine.fingerprint import Shard, content_fingerprint, digest_fields, with_layout
from mlxnb_engine.types import StateSpec

IDS = list(range(1000, 1000 + 3 * T + 5))


@dataclasses.dataclass(frozen=True)
class Payload:
    nbytes: int = 100


# -- the chain ---------------------------------------------------------------------------------------------------------


def field(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def test_keys_are_those_of_the_written_formula() -> None:
    namespace = bytes(range(32))
    key = hashlib.sha256(field(b"mlxnb/root/1") + field(namespace)).digest()
    assert root_key(namespace) == key
    for place, found in enumerate(chain(namespace, IDS)):
        ids = b"".join(struct.pack("<I", token) for token in IDS[place * T : place * T + T])
        key = hashlib.sha256(field(b"mlxnb/block/1") + field(key) + field(ids)).digest()
        assert found == key
    assert place == 2


def test_keys_on_disk_stay_what_they_are() -> None:
    """Pinned values: a change of the key builder makes every stored block unreachable, so it needs a new record format."""
    namespace = Namespace("ab" * 32, ("bf16", "kv4"), (Adapter("cd" * 32, 2.0),), 512, "raw", "draft").digest()
    assert namespace is not None
    assert namespace.hex() == "aa626d07f8134c34d61dfa1a116b52d493a41b78a9baabc924924a3a25bbe570"
    assert chain(namespace, range(T))[0].hex() == "ac07cc47296f574a429920148824e334186c4aa01b09a84f6d9c7d4d8a2a2810"


@pytest.mark.parametrize("length", [0, 1, T - 1, T, T + 1, 3 * T - 1, 3 * T])
def test_only_whole_blocks_have_keys(length: int) -> None:
    assert len(chain(b"n" * 32, range(length))) == length // T


def test_a_key_depends_on_every_token_before_it() -> None:
    keys = chain(b"n" * 32, IDS)
    for place in range(3 * T):
        changed = [*IDS]
        changed[place] += 1
        same = [a == b for a, b in zip(keys, chain(b"n" * 32, changed), strict=True)]
        assert same == [block < place // T for block in range(3)]


@pytest.mark.parametrize("ids", [[-1] * T, [2**32] * T, [1.5] * T, [1] * (T - 1), [1] * (T + 1), []])
def test_ids_that_make_no_block_have_no_key(ids: list[Any]) -> None:
    with pytest.raises(ValueError):
        block_key(b"p" * 32, ids)


# -- I1: the fourteen components ------------------------------------------------------------------------------------------

SPEC = StateSpec("full", 2, 16, 16, "bfloat16", place=(0,))
WEIGHTS = bytes(100)
MODEL: dict[str, Any] = {
    "config": b'{"model_type": "llama"}',
    "shard": ("a.safetensors", WEIGHTS),
    "tokenizer": {"tokenizer.json": b"{}"},
    "special": ("<s>", "</s>"),
    "template": "{{ x }}",
    "layout": (SPEC, SPEC),
    "overrides": "",
    "codec": ("bf16", "bf16"),
    "adapters": (Adapter("a" * 64, 1.0), Adapter("b" * 64, 1.0)),
    "delayed_start": 0,
    "phase": "encoded",
    "companion": "",
    "block_tokens": T,
    "record_format": 1,
    "numerics": "1 cpu reference mlx 0",
}
# component of reliability 3.1 -> what is changed
CHANGES: dict[str, dict[str, Any]] = {
    "1 config": {"config": b'{"model_type": "llamb"}'},
    "2 shard name": {"shard": ("b.safetensors", WEIGHTS)},
    "2 shard size": {"shard": ("a.safetensors", WEIGHTS + b"\0")},
    "3 one weight byte": {"shard": ("a.safetensors", WEIGHTS[:-1] + b"\1")},
    "4 tokenizer": {"tokenizer": {"tokenizer.json": b"{ }"}},
    "5 special tokens": {"special": ("</s>", "<s>")},
    "6 template": {"template": "{{ y }}"},
    "7 layout": {"layout": (SPEC, dataclasses.replace(SPEC, kind="sliding", window=32))},
    "7 positions": {"overrides": "rope_theta=1e6"},
    "8 adapter reloaded under its old name": {"adapters": (Adapter("c" * 64, 1.0), Adapter("b" * 64, 1.0))},
    "8 adapter scale": {"adapters": (Adapter("a" * 64, 1.5), Adapter("b" * 64, 1.0))},
    "8 adapter order": {"adapters": (Adapter("b" * 64, 1.0), Adapter("a" * 64, 1.0))},
    "8 no adapter": {"adapters": ()},
    "9 codec of a layer": {"codec": ("bf16", "kv4")},
    "10 delayed start": {"delayed_start": 512},
    "11 phase": {"phase": "raw"},
    "12 companion": {"companion": "d" * 64},
    "13 block size": {"block_tokens": 32},
    "14 record format": {"record_format": 2},
    "15 device": {"numerics": "1 cuda mlx 0"},
    "15 BLAS": {"numerics": "1 cpu mkl mlx 0"},
}


def namespace_of(**changes: Any) -> bytes:
    m = {**MODEL, **changes}
    name, data = m["shard"]
    shards = [Shard(name, len(data), hashlib.sha256(data).hexdigest())]
    content = content_fingerprint(m["config"], shards, m["tokenizer"], m["special"], m["template"], "bfloat16")
    names = ("codec", "adapters", "delayed_start", "phase", "companion", "block_tokens", "record_format", "numerics")
    parts = {part: m[part] for part in names}
    digest = Namespace(with_layout(content, m["layout"], m["overrides"]), **parts).digest()
    assert digest is not None
    return digest


def crossings() -> set[str]:
    """Changes after which blocks of the unchanged model are still found."""
    cache, parent = PrefixCache(budget_bytes=2**20), root_key(namespace_of())
    for index in range(3):
        block = Block.following(parent, index, IDS[index * T : index * T + T], Payload(), Payload())
        assert cache.put(block, namespace_of())
        parent = block.key
    assert cache.can_take(IDS, namespace_of(), Reuse()) == 3 * T, "unchanged: a hit"
    ways = (Reuse(), Reuse(trimmable=False))
    return {what for what, change in CHANGES.items() if any(cache.can_take(IDS, namespace_of(**change), way) for way in ways)}


def test_a_change_of_any_component_finds_nothing() -> None:
    assert {what.split()[0] for what in CHANGES} == {str(n) for n in range(1, 16)}
    assert crossings() == set()


@pytest.mark.parametrize(
    ("tag", "seen"),
    [
        ("config", {"1 config"}),
        ("shard.name", {"2 shard name"}),
        ("shard.sha256", {"3 one weight byte"}),
        ("tokenizer.file", {"4 tokenizer"}),
        ("special", {"5 special tokens"}),
        ("template", {"6 template"}),
        ("layer", {"7 layout"}),
        ("positions", {"7 positions"}),
        ("adapter", {"8 adapter reloaded under its old name", "8 adapter order"}),
        ("scale", {"8 adapter scale"}),
        ("codec", {"9 codec of a layer"}),
        ("delayed_start", {"10 delayed start"}),
        ("phase", {"11 phase"}),
        ("companion", {"12 companion"}),
        ("block_tokens", {"13 block size"}),
        ("record_format", {"14 record format"}),
        ("numerics", {"15 device", "15 BLAS"}),
    ],
)
def test_the_component_test_sees_a_builder_that_drops_one(tag: str, seen: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(fields: Iterable[tuple[str, bytes]]) -> str:
        return digest_fields(pair for pair in fields if pair[0] != tag)

    monkeypatch.setattr(blocks, "digest_fields", forgetful)
    monkeypatch.setattr(fingerprint, "digest_fields", forgetful)
    assert crossings() == seen


@pytest.mark.parametrize(
    "unreadable",
    [
        {"fingerprint": None},
        {"codec": None},
        {"adapters": None},
        {"adapters": (Adapter("a" * 64, 1.0), Adapter(None, 1.0))},
        {"delayed_start": None},
        {"phase": None},
        {"companion": None},
        {"numerics": None},
    ],
)
def test_a_component_that_cannot_be_read_means_no_namespace(unreadable: dict[str, Any]) -> None:
    readable: dict[str, Any] = {"fingerprint": "f" * 64, "codec": ("bf16",)}
    assert Namespace(**readable).digest() is not None
    assert Namespace(**{**readable, **unreadable}).digest() is None


# -- I2: ambiguous fields -------------------------------------------------------------------------------------------------


def ambiguous() -> list[Namespace]:
    """Every way to spread a few short strings over the fields: many are one string once they are joined."""
    words = ("", "a", "aa", "ab", "b")
    lists = [tuple(x) for n in range(3) for x in itertools.product(words, repeat=n)]
    adapters = [tuple(Adapter(word, 1.0) for word in x) for x in lists[:12]]
    parts = itertools.product(words, lists, adapters, words)
    return [Namespace(name, codec, held, companion=companion) for name, codec, held, companion in parts]


def shared_keys(names: list[Namespace]) -> int:
    return len(names) - len({name.digest() for name in names})


def test_no_two_ways_to_spread_strings_over_fields_share_a_key() -> None:
    names = ambiguous()
    assert len(names) == len(set(names)) > 5000
    assert shared_keys(names) == 0


def plain(fields: Iterable[tuple[str, bytes]]) -> str:
    return hashlib.sha256(b"".join(value for _, value in fields)).hexdigest()


def without_tags(fields: Iterable[tuple[str, bytes]]) -> str:
    return hashlib.sha256(b"".join(field(value) for _, value in fields)).hexdigest()


def without_lengths(fields: Iterable[tuple[str, bytes]]) -> str:
    return hashlib.sha256(b"".join(tag.encode() + value for tag, value in fields)).hexdigest()


def test_the_ambiguity_test_sees_plain_concatenation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "digest_fields", plain)
    assert shared_keys(ambiguous()) > 1000


@pytest.mark.parametrize(
    ("one", "other", "broken"),
    [
        (Namespace("f", ("a", "b")), Namespace("f", ("acodecb",)), without_lengths),
        (Namespace("f", ("a", "\0" * 8)), Namespace("f", (), (Adapter("a", 0.0),)), without_tags),
    ],
)
def test_tags_and_lengths_are_both_needed(
    one: Namespace, other: Namespace, broken: Callable[[Iterable[tuple[str, bytes]]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one.digest() != other.digest()
    monkeypatch.setattr(blocks, "digest_fields", broken)
    assert one.digest() == other.digest(), "the control found nothing"


# -- blocks and tails -----------------------------------------------------------------------------------------------------


def test_a_block_knows_its_key_its_end_and_its_bytes() -> None:
    parent = root_key(b"n" * 32)
    block = Block.following(parent, 0, IDS[:T], Payload(100), Payload(11))
    assert (block.key, block.end, block.ids) == (chain(b"n" * 32, IDS)[0], T, tuple(IDS[:T]))
    bare = dataclasses.replace(block, attachment=None)
    assert block.nbytes - bare.nbytes == 11
    assert bare.nbytes == 100 + blocks.BOOKKEEPING_BYTES == Tail(parent, (1,), Payload(100)).nbytes


def test_blocks_and_tails_do_not_change() -> None:
    for value in (Block.following(b"p" * 32, 0, IDS[:T], Payload()), Tail(b"p" * 32, (1,), Payload())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.payload = Payload()  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong", [{"ids": tuple(IDS[: T - 1])}, {"index": -1}, {"key": b"short"}, {"parent": b""}, {"ids": tuple(IDS[: T + 1])}]
)
def test_what_is_no_block_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no block"):
        dataclasses.replace(Block.following(b"p" * 32, 0, IDS[:T], Payload()), **wrong)


@pytest.mark.parametrize("ids", [(), tuple(range(T))])
def test_a_tail_has_1_to_63_ids(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no tail"):
        Tail(b"p" * 32, ids, Payload())


@given(st.integers(0, 5 * T), st.one_of(st.none(), st.integers(1, 6 * T)))
def test_a_sliding_layer_needs_the_blocks_that_its_window_overlaps(length: int, window: int | None) -> None:
    """By definition: the query at `length` sees key j iff length - window < j <= length (`Step.mask`)."""
    seen = [j for j in range(length) if window is None or j > length - window]
    assert {j // T for j in seen} == set(range(first_seen(length, window), -(-length // T)))
