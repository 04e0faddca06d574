"""A model's identity: every component counts, names and order do not, digests are remembered only while the file is the same."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxnb_engine import fingerprint
from mlxnb_engine.errors import Cancelled, ModelError
from mlxnb_engine.fingerprint import FileIdentity, Shard, ShardDigests, content_fingerprint, digest_fields, with_layout
from mlxnb_engine.types import StateSpec

BASE: dict[str, Any] = {
    "config": b'{"model_type": "llama"}',
    "shards": [Shard("a.safetensors", 10, "0" * 64), Shard("b.safetensors", 20, "1" * 64)],
    "tokenizer_files": {"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"},
    "special_tokens": ["<s>", "</s>"],
    "template": "{{ x }}",
    "weights": "float32",
}
SPEC = StateSpec("full", 2, 16, 16, "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"config": b'{"model_type":"llama"}'},
        {"shards": BASE["shards"][:1]},
        {"shards": [dataclasses.replace(BASE["shards"][0], name="c.safetensors"), BASE["shards"][1]]},
        {"shards": [dataclasses.replace(BASE["shards"][0], size=11), BASE["shards"][1]]},
        {"shards": [dataclasses.replace(BASE["shards"][0], digest="2" * 64), BASE["shards"][1]]},
        {"tokenizer_files": {"tokenizer.json": b"{ }", "tokenizer_config.json": b"[]"}},
        {"tokenizer_files": {"tokenizer.json": b"[]", "tokenizer_config.json": b"{}"}},
        {"tokenizer_files": {}},
        {"special_tokens": ["</s>", "<s>"]},
        {"special_tokens": ["<s></s>"]},
        {"template": "{{ y }}"},
        {"template": ""},
        {"template": None},
        {"weights": "float32 (from Q4_1)"},
    ],
)
def test_every_component_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert content_fingerprint(**{**BASE, **change}) != content_fingerprint(**BASE)


def test_the_order_of_files_does_not_matter() -> None:
    turned = {
        **BASE,
        "shards": list(reversed(BASE["shards"])),
        "tokenizer_files": dict(reversed(BASE["tokenizer_files"].items())),
    }
    assert content_fingerprint(**turned) == content_fingerprint(**BASE)


@pytest.mark.parametrize(
    "change", [{"kind": "sliding"}, {"kv_heads": 4}, {"key_dim": 32}, {"value_dim": 32}, {"dtype": "bfloat16"}, {"window": 512}]
)
def test_every_part_of_the_layout_changes_the_fingerprint(change: dict[str, Any]) -> None:
    content = content_fingerprint(**BASE)
    other = dataclasses.replace(SPEC, **change)
    plain = with_layout(content, [SPEC, SPEC])
    assert len({plain, with_layout(content, [SPEC, other]), with_layout(content, [other, SPEC]), with_layout(content, [SPEC])}) == 4
    assert with_layout(content, [SPEC, SPEC], "rope_theta=5e5") != plain
    assert with_layout("0" * 64, [SPEC, SPEC]) != plain


@given(
    st.lists(st.tuples(st.text(max_size=4), st.binary(max_size=4)), max_size=4),
    st.lists(st.tuples(st.text(max_size=4), st.binary(max_size=4)), max_size=4),
)
def test_two_field_lists_share_a_digest_only_if_they_are_equal(one: list[tuple[str, bytes]], two: list[tuple[str, bytes]]) -> None:
    assert (digest_fields(one) == digest_fields(two)) == (one == two)


def test_moving_a_boundary_between_fields_changes_the_digest() -> None:
    """Negative control: a digest over joined bytes cannot tell these apart."""
    one, two = [("a", b"bc"), ("d", b"")], [("a", b"b"), ("cd", b"")]
    assert "".join(t + v.decode() for t, v in one) == "".join(t + v.decode() for t, v in two)
    assert digest_fields(one) != digest_fields(two)


# -- remembered digests --------------------------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(100_000))
    return path


def reads(digests: ShardDigests, path: Path) -> tuple[str, int]:
    """(digest, how many bytes were read for it)."""
    seen: list[int] = [0]
    return digests.digest(path, lambda phase, done, total: seen.append(done)), max(seen)


def test_a_file_is_hashed_once_and_remembered_over_restarts(tmp_path: Path, shard: Path) -> None:
    expected = hashlib.sha256(shard.read_bytes()).hexdigest()
    memory = tmp_path / "cache" / "digests.json"
    assert reads(ShardDigests(memory), shard) == (expected, 100_000)
    assert reads(ShardDigests(memory), shard) == (expected, 0)
    assert [path.name for path in memory.parent.iterdir()] == ["digests.json"], "no temporary file stays"


def test_a_moved_file_keeps_its_digest_and_a_changed_one_does_not(tmp_path: Path, shard: Path) -> None:
    digests = ShardDigests(tmp_path / "digests.json")
    first, _ = reads(digests, shard)
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    second, count = reads(digests, shard)
    assert second != first and count == 100_000
    (tmp_path / "link").symlink_to(shard)
    assert reads(digests, tmp_path / "link") == (second, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 3}', "[" * 100_000, '{"%s": "short"}', '{"%s": "' + "Z" * 64 + '"}'])
def test_a_damaged_memory_is_an_empty_one(tmp_path: Path, shard: Path, text: str) -> None:
    memory = tmp_path / "digests.json"
    memory.write_text(text.replace("%s", ":".join(map(str, FileIdentity.of(shard)))))
    assert reads(ShardDigests(memory), shard) == (hashlib.sha256(shard.read_bytes()).hexdigest(), 100_000)
    assert reads(ShardDigests(memory), shard)[1] == 0


def test_a_memory_that_cannot_be_written_costs_only_a_second_read(tmp_path: Path, shard: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    digests = ShardDigests(tmp_path / "file" / "digests.json")
    assert reads(digests, shard) == reads(digests, shard) == (hashlib.sha256(shard.read_bytes()).hexdigest(), 100_000)


def test_the_memory_is_bounded(tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_REMEMBERED", 3)
    digests = ShardDigests(tmp_path / "digests.json")
    for i in range(6):
        path = tmp_path / f"s{i}"
        path.write_bytes(bytes([i]))
        digests.digest(path)
    assert len(digests._read()) == 3
    assert reads(digests, tmp_path / "s5")[1] == 0 and reads(digests, tmp_path / "s0")[1] == 1


def test_hashing_can_be_cancelled(tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_CHUNK", 1000)
    done: list[int] = []
    with pytest.raises(Cancelled):
        ShardDigests(tmp_path / "d.json").digest(shard, lambda phase, at, total: done.append(at), lambda: len(done) >= 3)
    assert done == [1000, 2000, 3000] and not (tmp_path / "d.json").exists()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, shard: Path) -> None:
    def meddle(phase: str, done: int, total: int) -> None:
        with open(shard, "ab") as file:
            file.write(b"more")

    with pytest.raises(ModelError, match="changed while"):
        ShardDigests(tmp_path / "d.json").digest(shard, meddle)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        ShardDigests(tmp_path / "d.json").digest(tmp_path / "none")
