"""The record: round trips, every way in which a file can be wrong, and C4, the fuzzer in a child process."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cache_rig import block_of, chain_of, content, ids_of, layout_of, names_of
from hypothesis import given
from hypothesis import strategies as st

from mlxnb_engine.cache import record
from mlxnb_engine.cache.blocks import RECORD_FORMAT, Block, T, chain, root_key
from mlxnb_engine.cache.record import MAGIC, BadRecord, BlockName, Layout, Tensors, TensorSpec

LAYOUT = layout_of()
BLOCKS = chain_of(LAYOUT, seed=1, blocks=3, ends=(1,))
NAMES = names_of(BLOCKS)
RAW = [record.encode(block, LAYOUT) for block in BLOCKS]


def header_of(raw: bytes) -> dict[str, object]:
    (length,) = struct.unpack_from("<I", raw, 12)
    found = json.loads(raw[16 : 16 + length])
    assert isinstance(found, dict)
    return found


def sealed(header: bytes, payload: bytes, format_version: int = RECORD_FORMAT) -> bytes:
    """A file with this header, its hash right: made by hand."""
    head = MAGIC + struct.pack("<II", format_version, len(header)) + header
    head += hashlib.sha256(head).digest()
    return head + bytes(-len(head) % 64) + payload


def payload_of(raw: bytes) -> bytes:
    (length,) = struct.unpack_from("<I", raw, 12)
    return raw[-(-(48 + length) // 64) * 64 :]


def edited(raw: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    header = header_of(raw)
    change(header)
    return sealed(json.dumps(header, sort_keys=True, separators=(",", ":")).encode(), payload_of(raw))


# -- accepted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(3))
def test_a_block_comes_back_byte_for_byte(index: int) -> None:
    found = record.decode(RAW[index], LAYOUT, NAMES[index])
    assert content(found) == content(BLOCKS[index])
    assert (found.attachment is not None) == (index == 1)


def test_the_tensors_that_come_back_are_views_of_what_was_read() -> None:
    raw = bytearray(RAW[0])
    part = record.decode(raw, LAYOUT, NAMES[0]).payload.parts[0]  # type: ignore[attr-defined]
    before = bytes(part)
    raw[raw.index(before)] ^= 1
    assert bytes(part) != before


def test_the_file_is_as_the_format_says() -> None:
    """Read here by the letter of the design, with a parser, which the code under test does not have."""
    for raw, block in zip(RAW, BLOCKS, strict=True):
        magic, version, length = struct.unpack_from("<8sII", raw)
        assert (magic, version) == (MAGIC, RECORD_FORMAT) and length <= record.MAX_HEADER
        text = raw[16 : 16 + length]
        header = json.loads(text)
        assert json.dumps(header, sort_keys=True, separators=(",", ":")).encode() == text
        assert hashlib.sha256(raw[: 16 + length]).digest() == raw[16 + length : 48 + length]
        keys = "attachment codec ids index key layout namespace parent tensors".split()
        assert list(header) == keys
        assert header["ids"] == list(block.ids) and header["index"] == block.index
        assert [header["key"], header["parent"]] == [block.key.hex(), block.parent.hex()]
        assert header["namespace"] == LAYOUT.namespace.hex() and header["codec"] == LAYOUT.codec.hex()
        table = header["tensors"]
        if block.attachment is not None:
            assert header["attachment"]["length"] == 2 * T and header["attachment"]["scalars"] == {"offset": 0}
            table = table + header["attachment"]["tensors"]
        start = at = -(-(48 + length) // 64) * 64
        assert not any(raw[48 + length : start])
        parts = [part for payload in (block.payload, block.attachment) if isinstance(payload, Tensors) for part in payload.parts]
        for entry, part in zip(table, parts, strict=True):
            assert entry["offset"] % 64 == 0 and start + entry["offset"] >= at
            assert not any(raw[at : start + entry["offset"]])
            at = start + entry["offset"] + entry["nbytes"]
            assert raw[start + entry["offset"] : at] == part
            assert record.xxhash.xxh3_128_hexdigest(part) == entry["xxh3"]
        assert at == len(raw)


def test_names_have_the_keys_of_the_chain() -> None:
    ids = ids_of(3, 5)[:-7]
    names = record.names(LAYOUT.namespace, ids)
    assert [name.key for name in names] == chain(LAYOUT.namespace, ids) and len(names) == 4
    assert names[0].parent == root_key(LAYOUT.namespace) and [name.index for name in names] == [0, 1, 2, 3]
    assert [token for name in names for token in name.ids] == ids[: 4 * T]


@given(
    st.lists(st.tuples(st.sampled_from(sorted(record.DTYPE_BYTES)), st.lists(st.integers(0, 5), max_size=4)), max_size=6),
    st.lists(st.tuples(st.sampled_from(sorted(record.DTYPE_BYTES)), st.lists(st.integers(0, 5), max_size=4)), max_size=3),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_any_layout_round_trips(tensors: list[object], state: list[object], index: int, attached: bool) -> None:
    def specs(found: list[object]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(i, "k.scales", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(found))  # type: ignore[misc]

    layout = Layout(LAYOUT.namespace, LAYOUT.codec, specs(tensors), specs(state), (("a", 3), ("b", 2**40)))
    first = record.names(layout.namespace, ids_of(index, 1))[0]
    name = BlockName(first.key, first.parent, index, first.ids)
    block = block_of(layout, name, attached)
    raw = record.encode(block, layout)
    assert len(raw) <= layout.most_bytes
    assert content(record.decode(raw, layout, name)) == content(block)
    assert record.has_attachment(raw[: layout.most_header_bytes], len(raw), layout, name) is attached


def test_numpy_arrays_are_taken_as_they_lie() -> None:
    layout = layout_of(width=2, layers=1, attached=False)
    name = record.names(layout.namespace, ids_of(0, 1))[0]
    arrays = [np.arange(T * 2, dtype=np.uint16).reshape(1, T, 2) + i for i in range(2)]
    block = Block(name.key, name.parent, 0, name.ids, Tensors.of(arrays))
    found = record.decode(record.encode(block, layout), layout, name)
    assert [np.frombuffer(part, np.uint16).tolist() for part in found.payload.parts] == [a.ravel().tolist() for a in arrays]  # type: ignore[attr-defined]


# -- refused -------------------------------------------------------------------------------------------------------


def refused(raw: bytes, name: BlockName = NAMES[0], layout: Layout = LAYOUT) -> None:
    with pytest.raises(BadRecord):
        record.decode(raw, layout, name)


def test_every_flipped_bit_of_the_header_and_padding_is_refused() -> None:
    (length,) = struct.unpack_from("<I", RAW[1], 12)
    start = len(RAW[1]) - len(payload_of(RAW[1]))
    assert start >= 48 + length
    for at in range(start):
        raw = bytearray(RAW[1])
        raw[at] ^= 1 << at % 8
        refused(bytes(raw), NAMES[1])


def test_every_flipped_byte_of_the_payload_is_refused() -> None:
    for at in range(len(RAW[1]) - len(payload_of(RAW[1])), len(RAW[1])):
        raw = bytearray(RAW[1])
        raw[at] ^= 0x40
        refused(bytes(raw), NAMES[1])


def test_every_truncation_and_extension_is_refused() -> None:
    for count in [*range(0, len(RAW[1]), 7), len(RAW[1]) - 1]:
        refused(RAW[1][:count], NAMES[1])
    for extra in (b"\0", b"x", bytes(64), RAW[1]):
        refused(RAW[1] + extra, NAMES[1])


def test_a_record_is_only_good_for_its_own_block() -> None:
    for raw in RAW:
        for name in NAMES:
            if raw is not RAW[name.index]:
                refused(raw, name)
    other_ids = (NAMES[0].ids[0] + 1, *NAMES[0].ids[1:])
    refused(RAW[0], BlockName(NAMES[0].key, NAMES[0].parent, 0, other_ids))  # a collision of keys
    refused(RAW[0], BlockName(NAMES[0].key, NAMES[1].key, 0, NAMES[0].ids))
    refused(RAW[1], BlockName(NAMES[1].key, NAMES[1].parent, 2, NAMES[1].ids))


def variants() -> list[Layout]:
    """Layouts that differ from LAYOUT in one thing, with the same number of bytes where that is possible."""
    n, c, tensors, state, scalars = LAYOUT.namespace, LAYOUT.codec, LAYOUT.tensors, LAYOUT.attachment, LAYOUT.scalars
    assert state is not None
    k = tensors[0]
    return [
        Layout(bytes(32), c, tensors, state, scalars),
        Layout(n, bytes(32), tensors, state, scalars),
        Layout(n, c, (TensorSpec(k.layer, "z", k.dtype, k.shape), *tensors[1:]), state, scalars),
        Layout(n, c, (TensorSpec(k.layer, k.part, "float16 ".strip(), k.shape), *tensors[1:]), state, scalars),
        Layout(n, c, (TensorSpec(9, k.part, k.dtype, k.shape), *tensors[1:]), state, scalars),
        Layout(n, c, (TensorSpec(k.layer, k.part, k.dtype, (T, 1, k.shape[2])), *tensors[1:]), state, scalars),
        Layout(n, c, tensors[::-1], state, scalars),
        Layout(n, c, tensors, state, (("offset", 1),)),
        Layout(n, c, tensors, state, (("offsex", 0),)),
        Layout(n, c, tensors, (state[1], state[0]), scalars),
        Layout(n, c, tensors, None),
    ]


@pytest.mark.parametrize("number", range(11))
def test_a_record_of_another_layout_is_refused(number: int) -> None:
    other = variants()[number]
    assert other.digest != LAYOUT.digest or (other.namespace, other.codec) != (LAYOUT.namespace, LAYOUT.codec)
    refused(RAW[1], NAMES[1], other)
    # and where every other field is made to fit, so that only the digest of the layout can tell
    if other.digest != LAYOUT.digest:
        refused(edited(RAW[0], lambda header: header.update(layout=other.digest.hex())))


def by_hand() -> dict[str, bytes]:
    """Files that somebody made to look right: header hash and sizes fit unless that is the point."""
    raw, header = RAW[1], header_of(RAW[1])
    text = raw[16 : 16 + struct.unpack_from("<I", raw, 12)[0]]
    body = payload_of(raw)

    def table(change: Callable[[list[dict[str, object]]], object]) -> bytes:
        return edited(raw, lambda h: void(change(h["tensors"])))  # type: ignore[arg-type]

    def void(_: object) -> None:
        return None

    def cut(new: bytes) -> bytes:
        """This header in a file of the right size."""
        return (sealed(new, b"") + body + bytes(len(raw)))[: len(raw)]

    size = len(text)
    nested = b"[" * (size // 2) + b"]" * (size - size // 2)
    found = {
        "empty": b"",
        "magic only": MAGIC,
        "other magic": b"mlxnb-kw" + raw[8:],
        "format 0": sealed(text, body, 0),
        "format 2": sealed(text, body, 2),
        "format 2^32 - 1": sealed(text, body, 2**32 - 1),
        "header length 0": raw[:12] + struct.pack("<I", 0) + raw[16:],
        "header length 2^32 - 1": raw[:12] + struct.pack("<I", 2**32 - 1) + raw[16:],
        "header length over the limit": raw[:12] + struct.pack("<I", record.MAX_HEADER + 1) + raw[16:],
        "header ends at the end": raw[:12] + struct.pack("<I", len(raw) - 48) + raw[16:],
        "zeros": bytes(len(raw)),
        "ones": b"\xff" * len(raw),
        "deep nesting": cut(nested),
        "many lists": cut(b"[" + b"[],"[: size - 2] * (size // 3 - 1) + b"]" * (size - 1 - 3 * (size // 3 - 1))),
        "a huge number": cut(b"1" * size),
        "not UTF-8": cut(b"\xff\xfe" * (size // 2) + b"x" * (size % 2)),
        "spaces": sealed(json.dumps(header, sort_keys=True).encode(), body),
        "unsorted": sealed(json.dumps(dict(reversed(header.items())), separators=(",", ":")).encode(), body),
        "duplicate key": sealed(b'{"index":1,' + text[1:], body),
        "unknown key": edited(raw, lambda h: h.update(zz=1)),
        "index as text": edited(raw, lambda h: h.update(index="1")),
        "index as float": sealed(text.replace(b'"index":1,', b'"index":1.0,'), body),
        "index as truth": sealed(text.replace(b'"index":1,', b'"index":true,'), body),
        "index -0": sealed(text.replace(b'"index":1,', b'"index":-0,'), body),
        "index 2^64 + 1": edited(raw, lambda h: h.update(index=2**64 + 1)),
        "one id more": edited(raw, lambda h: h.update(ids=[*NAMES[1].ids, 0])),
        "another id": edited(raw, lambda h: h.update(ids=[*NAMES[1].ids[:-1], 7])),
        "upper case key": edited(raw, lambda h: h.update(key=NAMES[1].key.hex().upper())),
        "no attachment in the header": edited(raw, lambda h: h.update(attachment=None)),
        "attachment at another length": edited(raw, lambda h: h["attachment"].update(length=3 * T)),  # type: ignore[attr-defined]
        "another scalar": edited(raw, lambda h: h["attachment"].update(scalars={"offset": 999})),  # type: ignore[attr-defined]
        "negative dims": table(lambda t: t[0].update(shape=[-1, T, -4])),
        "dims that wrap": table(lambda t: t[0].update(shape=[2**32, 2**32, 4])),
        "overlap": table(lambda t: t[1].update(offset=0)),
        "offset beyond the file": table(lambda t: t[1].update(offset=2**40)),
        "negative offset": table(lambda t: t[1].update(offset=-64)),
        "offset that wraps": table(lambda t: t[1].update(offset=2**64)),
        "a hole": table(lambda t: t[3].update(offset=2**12)),
        "nbytes 0": table(lambda t: t[0].update(nbytes=0)),
        "a tensor less": table(lambda t: t.pop()),
        "a tensor twice": table(lambda t: t.append(dict(t[0]))),
        "another dtype": table(lambda t: t[0].update(dtype="float16")),
        "a class by name": table(lambda t: t[0].update(part="os.system")),
        "checksum of another": table(lambda t: t[0].update(xxh3=t[1]["xxh3"])),
        "checksum empty": table(lambda t: t[0].update(xxh3="")),
        "checksum upper case": table(lambda t: t[0].update(xxh3=str(t[0]["xxh3"]).upper())),
        "payload of another block": raw[: len(raw) - len(body)] + payload_of(RAW[1])[::-1],
        "header of another block": (sealed(RAW[0][16 : 16 + struct.unpack_from("<I", RAW[0], 12)[0]], b"") + body)[: len(raw)],
    }
    return found


def test_files_made_by_hand_are_refused() -> None:
    """And with them what a parser of JSON would choke on: there is none."""
    files = by_hand()
    assert len(files) >= 40
    for what, raw in files.items():
        try:
            record.decode(raw, LAYOUT, NAMES[1])
        except BadRecord:
            continue
        pytest.fail(f"accepted: {what}")


def test_a_header_alone_tells_of_the_attachment() -> None:
    for raw, name in zip(RAW, NAMES, strict=True):
        start = raw[: LAYOUT.most_header_bytes]
        assert record.has_attachment(start, len(raw), LAYOUT, name) is (name.index == 1)
        with pytest.raises(BadRecord):
            record.has_attachment(start, len(raw) - 1, LAYOUT, name)
        with pytest.raises(BadRecord):
            record.has_attachment(start[:100], len(raw), LAYOUT, name)


def test_what_is_no_block_of_the_layout_is_not_encoded() -> None:
    block, other = BLOCKS[1], layout_of(seed=5)
    assert isinstance(block.payload, Tensors)
    name = NAMES[1]
    short = Tensors(block.payload.parts[1:])
    wrong = [
        Block(name.key, name.parent, 1, name.ids, short, block.attachment),
        Block(name.key, name.parent, 1, name.ids, Tensors((memoryview(b"x"), *block.payload.parts[1:]))),
        Block(bytes(32), name.parent, 1, name.ids, block.payload),
        Block(name.key, name.parent, 1, name.ids, block.payload, Tensors(())),
        Block(name.key, name.parent, 1, name.ids, block.attachment or short, block.payload),
    ]
    for bad in wrong:
        with pytest.raises(ValueError):
            record.encode(bad, LAYOUT)
    with pytest.raises(ValueError):
        record.encode(block, layout_of(attached=False))
    assert record.encode(block, other)  # a layout of the same shape: its namespace is the caller's word


def test_a_layout_that_no_record_could_hold_is_refused() -> None:
    n, c = LAYOUT.namespace, LAYOUT.codec
    many = tuple(TensorSpec(i, "k", "uint8", (1,)) for i in range(12_000))
    large = (TensorSpec(0, "k", "uint8", (2**31 - 1, 4)), TensorSpec(0, "v", "uint8", (64,)))
    for wrong in (
        lambda: Layout(n[:-1], c, ()),
        lambda: Layout(n, b"", ()),
        lambda: Layout(n, c, many),
        lambda: Layout(n, c, large),
        lambda: Layout(n, c, (), None, (("a", 1),)),
        lambda: Layout(n, c, (), (), (("a", 1), ("a", 2))),
        lambda: Layout(n, c, (), (), (("a", True),)),
        lambda: Layout(n, c, (), (), (('"', 1),)),
        lambda: TensorSpec(0, "k", "float8", (1,)),
        lambda: TensorSpec(0, '"', "uint8", (1,)),
        lambda: TensorSpec(-1, "k", "uint8", (1,)),
        lambda: TensorSpec(0, "k", "uint8", (-1,)),
        lambda: TensorSpec(0, "k", "uint8", (2**31 - 1, 2**31 - 1, 2**31 - 1)),
    ):
        with pytest.raises(ValueError):
            wrong()


# -- C4 ------------------------------------------------------------------------------------------------------------

CHILD = Path(__file__).with_name("cache_child.py")


def fuzz(count: int, seed: int, checksums: bool) -> dict[str, float]:
    """Decode `count` mutants and the files made by hand, in a process of its own that ends if it hangs, crashes or grows."""
    words = [sys.executable, str(CHILD), "fuzz", str(count), str(seed), "with" if checksums else "without"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60 + count / 50, check=False)
    assert done.returncode == 0, f"the fuzzer ended with {done.returncode}: {done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_c4_no_mutant_is_accepted_as_something_else(scale: int) -> None:
    found = fuzz({1: 5_000, 10: 100_000, 50: 1_000_000}[scale], seed=1, checksums=True)
    print(found)
    assert found["different"] == 0
    assert found["slowest_s"] < 1.0 and found["memory_ratio"] < 2.0
    assert found["refused"] + found["same"] == found["mutants"]
    assert found["refused"] > 0.9 * found["mutants"]


def test_c4_catches_a_decoder_without_checksums() -> None:
    assert fuzz(400, seed=2, checksums=False)["different"] > 20
