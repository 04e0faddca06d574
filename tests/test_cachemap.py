"""The cache map: the tree of a real `PrefixCache` as runs of blocks, bounded and named, and the view that tells it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient
from test_cache_tree import UNIT, A, B, State
from test_live import client, command, session_comm, shell, until
from test_routing import Shell
from test_views import trait

from mlxnb import runtime
from mlxnb.api import LanguageModel
from mlxnb.cachemap import MAX_EDGES, CacheModel, collapse, packed_states
from mlxnb.cacheview import CacheMap
from mlxnb.schema import RUN_MIME, WIDGET_MIME
from mlxnb_engine.cache.blocks import Block, Reuse, T, Tail, root_key
from mlxnb_engine.cache.tree import PrefixCache
from mlxnb_engine.client import LocalClient
from mlxnb_engine.config import resolve

__all__ = ["client", "shell"]


def fill(cache: PrefixCache, ids: Sequence[int], session: str | None = None, namespace: bytes = A, tail: int = 0) -> None:
    """Put the whole blocks of these ids, then a tail of so many more."""
    key = root_key(namespace)
    for index in range(len(ids) // T):
        block = Block.following(key, index, tuple(ids[index * T : (index + 1) * T]), State(), None)
        assert cache.put(block, namespace, session)
        key = block.key
    if tail:
        assert cache.put_tail(Tail(key, tuple(range(9000, 9000 + tail)), State()), namespace, session)


def words(blocks: int, start: int = 0) -> list[int]:
    return list(range(start, start + blocks * T))


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(budget_bytes=10**9, spill=lambda block, namespace: True)


def told(cache: PrefixCache, limit: int = 10_000) -> dict[str, Any]:
    return cache.describe_tree(limit)


def test_blocks_that_nothing_branches_off_are_one_edge(cache: PrefixCache) -> None:
    shared = words(5)
    fill(cache, shared + words(3, 1000), "garden", tail=11)
    fill(cache, shared + words(2, 2000), "drier-bed")
    fill(cache, words(4, 5000), "lab", B)
    edges = collapse(told(cache)["nodes"])
    found = {(edge.at, edge.blocks, edge.tail, edge.shares, tuple(sorted(edge.users))) for edge in edges}
    assert found == {
        (0, 5, 0, 2, ("drier-bed", "garden")),
        (5, 3, 11, 1, ("garden",)),
        (5, 2, 0, 1, ("drier-bed",)),
        (0, 4, 0, 1, ("lab",)),
    }
    assert sum(edge.bytes for edge in edges) == cache.stats()["used_bytes"] == 15 * UNIT
    assert all(edge.parent is None or edge.parent < place for place, edge in enumerate(edges))


def test_blocks_are_marked_that_a_row_uses_and_that_are_stored(cache: PrefixCache) -> None:
    small = PrefixCache(budget_bytes=4 * UNIT, spill=lambda block, namespace: True)
    fill(small, words(3))
    lease = small.take([*words(2), 7, 7], A, Reuse())
    assert [packed_states(edge.states) for edge in collapse(told(small)["nodes"])] == ["l2r1"]
    fill(small, words(2, 700))  # for want of room the last block goes, spilled after its ancestors
    assert sorted(packed_states(edge.states) for edge in collapse(told(small)["nodes"])) == ["m2", "r2"]
    lease.close()


def test_users_without_a_name_count_once_for_each_end(cache: PrefixCache) -> None:
    for start in (1000, 2000, 3000):
        fill(cache, words(2) + words(1, start))
    (first, *rest) = collapse(told(cache)["nodes"])
    assert first.shares == 3 and first.users == [] and [edge.shares for edge in rest] == [1, 1, 1]


def test_what_leaves_is_noted_with_whose_it_was_and_whether_it_is_stored() -> None:
    cache = PrefixCache(budget_bytes=4 * UNIT, spill=lambda block, namespace: block.index == 0)
    model = CacheModel(lambda namespace, ids: "")
    fill(cache, words(3), "old")
    model.take(told(cache))
    fill(cache, words(3, 5000), "new")
    model.take(told(cache), lambda: 0.0)
    (gone,) = model.record()["gone"]
    assert (gone["blocks"], gone["users"]) == (2, ["old"]) and gone["stored"] in (0, 1)
    model.take(told(cache, limit=2))  # a part of the tree: what is not told has not left
    model.take(told(cache, limit=1))
    assert len(model.record()["gone"]) == 1


def test_a_block_is_read_only_when_somebody_asks(cache: PrefixCache) -> None:
    asked: list[int] = []

    def decode(namespace: str, ids: Sequence[int]) -> str:
        assert namespace == A.hex()
        asked.append(len(ids))
        return f"{ids[0]}.."

    model = CacheModel(decode)
    fill(cache, words(40), "garden", tail=5)
    model.take(told(cache))
    (edge,) = model.record()["edges"]
    assert asked == [24] and edge["head"] == "0.." and edge["tail"] == 5
    assert model.text(edge["id"], 3) == f"{3 * T}.." and model.text(edge["id"], 40) == "9000.."
    for edge_id, block in ((edge["id"], 41), (edge["id"], -1), ("nowhere", 0)):
        with pytest.raises(LookupError):
            model.text(edge_id, block)
    model.record()
    assert asked == [24, T, 5], "a head is read once"


def test_branches_are_told_apart_by_what_they_do_not_have_in_common(cache: PrefixCache) -> None:
    model = CacheModel(lambda namespace, ids: " ".join(map(str, ids)))
    shared, start = words(1), words(1, 500)[:40]
    for other in (7000, 8000, 9000):
        fill(cache, [*shared, *start, *range(other, other + 24)], str(other))
    model.take(told(cache))
    first, *rest = model.record()["edges"]
    assert first["head"].startswith("0 1 2") and {edge["head"].split()[0] for edge in rest} == {"…7000", "…8000", "…9000"}


def test_ten_thousand_blocks_are_told_in_time_and_in_bounds() -> None:
    cache = PrefixCache(budget_bytes=10**9)
    shared = words(100)
    for user in range(500):
        fill(cache, shared + words(19 + user % 3, 100_000 + 7_000 * user), f"chat {user % 90}", tail=1 + user % 60)
    model = CacheModel(lambda namespace, ids: "some words " * 4)
    began = time.perf_counter()
    model.take(told(cache, 16_384))
    record = model.record()
    took = time.perf_counter() - began
    assert sum(len(edge.ids) for edge in model.edges) > 10_000
    assert len(record["edges"]) == MAX_EDGES and record["left_out"]["edges"] == len(model.edges) - MAX_EDGES > 0
    shown = sum(edge["blocks"] + bool(edge["tail"]) for edge in record["edges"])
    assert record["left_out"]["blocks"] + shown == sum(len(edge.ids) for edge in model.edges)
    assert all(edge["parent"] is None or edge["parent"] < place for place, edge in enumerate(record["edges"]))
    assert len(json.dumps(record)) < 96 * 1024 and took < 2.0, f"{took:.2f} s"


# -- the view --------------------------------------------------------------------------------------------------------------


class Caching(FakeClient):
    """A client with a prefix cache: fake payloads in a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(budget_bytes=64 * UNIT)

    def status(self) -> dict[str, Any]:
        return {**super().status(), "cache": self.cache.stats()}

    def describe_cache(self, limit: int = 256) -> dict[str, Any] | None:
        return {"stats": self.cache.stats(), "tree": self.cache.describe_tree(limit), "models": {A.hex(): "fake"}}

    def cache_info(self) -> dict[str, Any]:
        disk = {"budget_bytes": 1000, "used_bytes": 10, "blocks": 2}
        return {"memory": {"queued_bytes": 0}, "disk": disk, "models": []}

    def cached_text(self, namespace: str, ids: Sequence[int]) -> str | None:
        return f"from {ids[0]}" if namespace == A.hex() else None


@pytest.fixture
def caching(shell: Shell) -> Iterator[Caching]:
    made = Caching()
    runtime.use(lambda settings: made)
    runtime.client()
    yield made
    runtime.close()


def test_the_map_follows_the_cache_and_reads_a_block_on_request(shell: Shell, caching: Caching) -> None:
    fill(caching.cache, words(3), "garden")
    view = CacheMap(shell)
    view.show()
    first = trait("cache")
    assert first["schema"] == "mlxnb.cache/1" and first["state"] == "ready" and first["models"] == ["fake"]
    (edge,) = first["edges"]
    assert (edge["blocks"], edge["users"], edge["head"]) == (3, ["garden"], "from 0")
    assert first["disk"] == {"used": 10, "budget": 1000, "records": 2, "pending": 0}
    assert command(session_comm(), view.key, "cache.text", edge=edge["id"], block=1)["result"] == {"text": f"from {T}"}
    assert "left the cache" in command(session_comm(), view.key, "cache.text", edge="x", block=1)["error"]
    fill(caching.cache, words(2) + words(1, 900), "fork")
    until(lambda: len(trait("cache")["edges"]) == 3, 10.0)
    assert trait("cache")["epoch"] > first["epoch"] and {user["name"] for user in trait("cache")["users"]} == {"garden", "fork"}
    view.close()
    data = shell.messages()[-1][2]["data"]
    assert WIDGET_MIME not in data and data[RUN_MIME]["edges"] and "garden" in data["text/plain"]


def test_an_unchanged_cache_is_told_once(shell: Shell, caching: Caching) -> None:
    fill(caching.cache, words(3), "garden")
    view = CacheMap(shell)
    view.show()
    before = view.epoch
    for _ in range(5):
        assert view._tell(caching.status())
    assert view.epoch <= before + 1
    view.close()


def test_without_an_engine_or_a_cache_it_says_so(shell: Shell, client: FakeClient) -> None:
    view = CacheMap(shell)
    assert view.record()["state"] in ("off", "not started") and "prefix cache" in view.bundle()["text/plain"]


def test_the_map_of_a_real_engine_names_its_model_and_reads_its_blocks(tiny_model: Path, shell: Shell, tmp_path: Path) -> None:
    client = LocalClient(resolve({}, {"blas": "none", "model": str(tiny_model), "cache_dir": str(tmp_path)}))
    runtime.use(lambda settings: client)
    try:
        runtime.client()
        lm = LanguageModel(str(tiny_model), None, client)
        said = "The sea at night keeps its own light. " * 6
        for question in ("Why?", "Since when?"):
            lm.generate(f"{said} {question}", max_tokens=3)
        view = CacheMap(shell)
        record = view.record()
        assert record["state"] == "ready" and len(record["models"]) == 1
        first, *rest = record["edges"]
        assert first["blocks"] >= 3 and first["shares"] == 2 and {edge["parent"] for edge in rest} == {0}
        assert view.text(first["id"], 1) in said * 2 and "<|im_start|>" in view.text(first["id"], 0)
        assert record["counts"]["hit_tokens"] >= 3 * T
    finally:
        runtime.close()
