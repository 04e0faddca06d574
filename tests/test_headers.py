"""Model files and paths before anything trusts them: what is accepted, what is refused, and that nothing crashes or hangs."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlxnb_engine import headers
from mlxnb_engine.errors import ModelError
from mlxnb_engine.headers import Header, confine, read_gguf, read_safetensors

WEIGHTS = {"a.weight": np.ones((2, 3), np.float32), "b": np.ones((4,), np.float32), "none": np.ones((0, 5), np.float32)}
SAFE = tiny.safetensors_bytes(WEIGHTS)
GGUF = tiny.gguf_bytes(
    {"general.architecture": "llama", "a.number": 3, "a.float": 0.5, "a.flag": True, "a.words": ["x", "é"], "a.ids": [1, 2, 3]},
    {"one": (np.ones((4, 32), np.float32), "Q4_0"), "two": (np.ones((5,), np.float32), "F32")},
)


def safe(raw: bytes) -> Header:
    return read_safetensors(io.BytesIO(raw), len(raw))


def gguf(raw: bytes) -> Header:
    return read_gguf(io.BytesIO(raw), len(raw))


# -- accepted ------------------------------------------------------------------------------------------------------


def test_a_valid_safetensors_file_is_described() -> None:
    header = safe(SAFE)
    assert {name: (span.dtype, span.shape, span.stop - span.start) for name, span in header.tensors.items()} == {
        "a.weight": ("F32", (2, 3), 24),
        "b": ("F32", (4,), 16),
        "none": ("F32", (0, 5), 0),
    }
    assert header.metadata == {"format": "mlx"} and header.parameters == 10
    assert max(span.stop for span in header.tensors.values()) == len(SAFE)


def test_a_file_that_mlx_wrote_is_accepted(tmp_path: Path) -> None:
    """MLX writes null for absent metadata."""
    import mlx.core as mx

    for i, metadata in enumerate((None, {}, {"a": "b"})):
        mx.save_safetensors(str(tmp_path / f"{i}.safetensors"), {"x": mx.ones((2, 3), mx.bfloat16), "y": mx.array(1.0)}, metadata)
        header = safe((tmp_path / f"{i}.safetensors").read_bytes())
        assert header.metadata == (metadata or {})
        assert {name: (span.dtype, span.shape) for name, span in header.tensors.items()} == {"x": ("BF16", (2, 3)), "y": ("F32", ())}


def test_a_valid_gguf_file_is_described() -> None:
    header = gguf(GGUF)
    assert header.metadata == {
        "general.architecture": "llama",
        "a.number": 3,
        "a.float": 0.5,
        "a.flag": True,
        "a.words": ["x", "é"],
        "a.ids": [1, 2, 3],
    }
    one, two = header.tensors["one"], header.tensors["two"]
    assert (one.dtype, one.shape, one.stop - one.start) == ("Q4_0", (4, 32), 4 * 18)
    assert (two.dtype, two.shape, two.stop - two.start) == ("F32", (5,), 20)
    assert np.frombuffer(GGUF[two.start : two.stop], np.float32).tolist() == [1.0] * 5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_generated_folder_is_accepted(tmp_path: Path, family: str) -> None:
    for file in tiny.write_model(tmp_path, family, shards=2).glob("*.safetensors"):
        assert safe(file.read_bytes()).parameters > 0


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_every_generated_gguf_is_accepted(tmp_path: Path, kind: str) -> None:
    header = gguf(tiny.write_gguf(tmp_path / "m.gguf", kind=kind).read_bytes())
    assert header.tensors["blk.1.ffn_up.weight"].dtype == kind


# -- refused: safetensors ------------------------------------------------------------------------------------------


def packed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **extra: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


BIG = 2**63
SAFE_ATTACKS: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01\x02",
    "length beyond the file": packed({}, length=100),
    "length near 2^64": packed({}, length=2**64 - 1),
    "length over the limit": packed({}, length=headers.MAX_SAFETENSORS_HEADER + 1),
    "not JSON": packed(b"{"),
    "not UTF-8": packed(b"\xff\xfe{}"),
    "a list": packed([]),
    "a number": packed(3),
    "pickle": packed(b"\x80\x04K\x01."),
    "deep nesting": packed(b"[" * 200_000),
    "deep objects": packed(b'{"a":' * 100_000),
    "a number of 10000 digits": packed(b'{"a": ' + b"9" * 10_000 + b"}"),
    "NaN": packed(b'{"a": NaN}'),
    "Infinity in a shape": packed(b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 0]}}'),
    "duplicate tensor": packed(
        b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"
    ),
    "duplicate inner key": packed(b'{"a": {"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "duplicate by escape": packed(
        b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "\\u0061": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "entry is a list": packed({"a": [1]}),
    "missing offsets": packed({"a": {"dtype": "F32", "shape": [2]}}),
    "extra key": packed({"a": entry(more=1)}, bytes(8)),
    "unknown type": packed({"a": entry("F33")}, bytes(8)),
    "type is a list": packed({"a": entry(["F32"])}, bytes(8)),
    "negative dim": packed({"a": entry(shape=[-2])}, bytes(8)),
    "two negative dims": packed({"a": entry(shape=[-1, -2])}, bytes(8)),
    "float dim": packed({"a": entry(shape=[2.0])}, bytes(8)),
    "boolean dim": packed({"a": entry("U8", [True], [0, 1])}, b"x"),
    "dim beyond 32 bits": packed({"a": entry("U8", [2**32, 0], [0, 0])}),
    "product wraps to 8 bytes": packed({"a": entry("U8", [2**31, 2**31, 4], [0, 8])}, bytes(8)),
    "product wraps to 0": packed({"a": entry("U8", [2**30, 2**30, 16], [0, 0])}),
    "too many dims": packed({"a": entry("U8", [1] * 17, [0, 1])}, b"x"),
    "shape is text": packed({"a": entry(shape="22")}, bytes(8)),
    "three offsets": packed({"a": entry(offsets=[0, 8, 8])}, bytes(8)),
    "reversed offsets": packed({"a": entry(offsets=[8, 0])}, bytes(8)),
    "negative offset": packed({"a": entry(offsets=[-8, 0])}, bytes(8)),
    "huge offsets": packed({"a": entry(offsets=[BIG, BIG + 8])}, bytes(8)),
    "size does not fit": packed({"a": entry(offsets=[0, 4])}, bytes(4)),
    "hole at the start": packed({"a": entry(offsets=[4, 12])}, bytes(12)),
    "hole between": packed({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
    "overlap": packed({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
    "same extent twice": packed({"a": entry(), "b": entry()}, bytes(8)),
    "extent beyond the file": packed({"a": entry()}, bytes(7)),
    "bytes after the end": packed({"a": entry()}, bytes(9)),
    "empty name": packed({"": entry()}, bytes(8)),
    "NUL in a name": packed({"a\0b": entry()}, bytes(8)),
    "lone surrogate in a name": packed({"\ud800": entry()}, bytes(8)),
    "metadata of numbers": packed({"__metadata__": {"a": 1}}),
    "metadata is a list": packed({"__metadata__": []}),
    "a GGUF": GGUF,
    "a zip, as torch writes": b"PK\x03\x04" + bytes(64),
}


@pytest.mark.parametrize("name", SAFE_ATTACKS)
def test_a_doubtful_safetensors_file_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="refused"):
        safe(SAFE_ATTACKS[name])


# -- refused: GGUF -------------------------------------------------------------------------------------------------


def head(tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def filled(start: bytes, data: int) -> bytes:
    return start + bytes(-len(start) % 32 + data)


GGUF_ATTACKS: dict[str, bytes] = {
    "empty": b"",
    "wrong mark": head(magic=b"GGML"),
    "version 1": head(version=1),
    "version 4": head(version=4),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "cut after the version": head()[:10],
    "endless tensors": head(tensors=2**63),
    "endless keys": head(keys=2**64 - 1),
    "keys that are not there": head(keys=3),
    "tensors that are not there": head(tensors=3),
    "key of 2^63 bytes": head(keys=1) + struct.pack("<Q", 2**63),
    "key over the limit": head(keys=1) + struct.pack("<Q", 70_000) + bytes(70_000),
    "value string beyond the file": head(keys=1) + key(b"k", 8, struct.pack("<Q", 1000)),
    "value string over the limit": head(keys=1) + key(b"k", 8, struct.pack("<Q", 2**40)),
    "key not UTF-8": head(keys=1) + key(b"\xff", 4, bytes(4)),
    "value not UTF-8": head(keys=1) + key(b"k", 8, struct.pack("<Q", 1) + b"\xff"),
    "unknown value type": head(keys=1) + key(b"k", 13, bytes(8)),
    "truth value 2": head(keys=1) + key(b"k", 7, b"\x02"),
    "array of truth values 2": head(keys=1) + key(b"k", 9, struct.pack("<IQ", 7, 1) + b"\x02"),
    "endless array": head(keys=1) + key(b"k", 9, struct.pack("<IQ", 4, 2**62)),
    "endless strings": head(keys=1) + key(b"k", 9, struct.pack("<IQ", 8, 2**62)),
    "array over the limit": head(keys=1) + key(b"k", 9, struct.pack("<IQ", 0, headers.MAX_GGUF_ARRAY + 1)),
    "nested array": head(keys=1) + key(b"k", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 1) + bytes(4)),
    "array of unknown type": head(keys=1) + key(b"k", 9, struct.pack("<IQ", 99, 1) + bytes(8)),
    "duplicate key": head(keys=2) + key(b"k", 4, bytes(4)) * 2,
    "alignment 0": head(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 0)),
    "alignment 24": head(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 24)),
    "alignment 2^31": head(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 2**31)),
    "alignment as text": head(keys=1) + key(b"general.alignment", 8, struct.pack("<Q", 2) + b"32"),
    "alignment as 64 bits": head(keys=1) + key(b"general.alignment", 10, struct.pack("<Q", 32)),
    "no dims": filled(head(tensors=1) + tensor(dims=()), 32),
    "five dims": filled(head(tensors=1) + tensor(dims=(1, 1, 1, 1, 1)), 32),
    "2^32 - 1 dims": head(tensors=1) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**32 - 1),
    "zero dim": filled(head(tensors=1) + tensor(dims=(0,)), 32),
    "dim beyond 32 bits": filled(head(tensors=1) + tensor(dims=(2**32 + 8,)), 32),
    "product wraps": filled(head(tensors=1) + tensor(dims=(2**30, 2**30, 16)), 32),
    "unknown tensor type": filled(head(tensors=1) + tensor(kind=4), 32),
    "type 2^32 - 1": filled(head(tensors=1) + tensor(kind=2**32 - 1), 32),
    "row is no whole block": filled(head(tensors=1) + tensor(dims=(33,), kind=2), 64),
    "unaligned": filled(head(tensors=1) + tensor(offset=8), 64),
    "beyond the file": filled(head(tensors=1) + tensor(), 31),
    "offset near 2^64": filled(head(tensors=1) + tensor(offset=2**64 - 32), 64),
    "overlap": filled(head(tensors=2) + tensor(b"a", (16,)) + tensor(b"b", (8,), 0, 32), 64),
    "same extent twice": filled(head(tensors=2) + tensor(b"a") + tensor(b"b"), 64),
    "same name twice": filled(head(tensors=2) + tensor(b"a") + tensor(b"a", (8,), 0, 32), 64),
    "empty name": filled(head(tensors=1) + tensor(b""), 32),
    "NUL in a name": filled(head(tensors=1) + tensor(b"a\0b"), 32),
    "name over the limit": filled(head(tensors=1) + tensor(b"a" * 300), 32),
    "a safetensors file": SAFE,
}


@pytest.mark.parametrize("name", GGUF_ATTACKS)
def test_a_doubtful_gguf_file_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="refused"):
        gguf(GGUF_ATTACKS[name])


def test_the_attacks_differ_from_good_files_only_in_the_attack() -> None:
    """Negative control: the builders used above make files that are accepted."""
    assert safe(packed({"a": entry(), "b": entry(offsets=[8, 16])}, bytes(16))).parameters == 4
    assert gguf(filled(head(tensors=2) + tensor(b"a") + tensor(b"b", (8,), 0, 32), 64)).parameters == 16
    assert gguf(head(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 64))).metadata["general.alignment"] == 64
    assert gguf(head(keys=1) + key(b"k", 9, struct.pack("<IQ", 7, 2) + b"\x00\x01")).metadata["k"] == [False, True]


def test_a_claimed_size_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Watched(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            asked.append(-1 if count is None else count)
            return super().read(count)

    for reader, attacks in ((read_safetensors, SAFE_ATTACKS), (read_gguf, GGUF_ATTACKS)):
        for raw in attacks.values():
            with pytest.raises(ModelError):
                reader(Watched(raw), len(raw))
    assert min(asked) >= 0 and max(asked) <= max(len(raw) for raw in (*SAFE_ATTACKS.values(), *GGUF_ATTACKS.values()))


# -- fuzz ----------------------------------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    raw = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "number", "copy"]))
        if kind == "flip" and raw:
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[at : at + draw(st.integers(1, 40))]
        elif kind == "insert":
            raw[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif kind == "number":
            raw[at : at + 8] = struct.pack("<Q", draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])))
        else:
            raw[at:at] = raw[at : at + draw(st.integers(1, 60))]
    return bytes(raw)


def survives(reader: Callable[[bytes], Header], raw: bytes) -> None:
    """Either a refusal, or a description whose extents lie inside the file and do not overlap."""
    try:
        header = reader(raw)
    except ModelError:
        return
    at = 0
    for span in sorted(header.tensors.values(), key=lambda span: (span.start, span.stop)):
        assert at <= span.start <= span.stop <= len(raw), span
        at = span.stop


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(SAFE))
@example(SAFE)
def test_no_mutation_of_a_safetensors_file_escapes_the_check(raw: bytes) -> None:
    survives(safe, raw)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(GGUF))
@example(GGUF)
def test_no_mutation_of_a_gguf_file_escapes_the_check(raw: bytes) -> None:
    survives(gguf, raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"GGUF\x03\0\0\0", struct.pack("<Q", 40) + b"{"]))
def test_noise_is_refused_or_described(raw: bytes, start: bytes) -> None:
    survives(safe, start + raw)
    survives(gguf, start + raw)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8).filter(
            lambda n: n != "__metadata__"
        ),
        st.lists(st.integers(0, 4), max_size=4),
        max_size=5,
    )
)
def test_every_well_formed_safetensors_file_is_accepted(shapes: dict[str, list[int]]) -> None:
    header = safe(tiny.safetensors_bytes({name: np.ones(shape, np.float32) for name, shape in shapes.items()}))
    assert {name: list(span.shape) for name, span in header.tensors.items()} == shapes


# -- S4: paths -----------------------------------------------------------------------------------------------------

INSIDE = ["model.safetensors", "sub/part.safetensors", "./model.safetensors", "sub/./part.safetensors", "in", "loop-in/part.safetensors"]
INSIDE += [
    "SUB/case",
    "missing.safetensors",
    "sub/missing/deep",
    "..hidden",
    "a..b",
    "...",
    "snapshots/rev/model.safetensors",
    "ü.json",
    "sub//part.safetensors",
]
OUTSIDE = [
    "..",
    "../x",
    "../root-evil/file",
    "sub/../../x",
    "sub/..",
    "sub/../model.safetensors",
    "models--x/../..",
    "a/../../../etc/passwd",
]
OUTSIDE += [
    "/",
    "/etc/passwd",
    "//etc/passwd",
    "/..",
    "~",
    "~/x",
    "~root/x",
    "~\\x",
    "",
    ".",
    "./",
    "./.",
    "sub\\..\\..\\x",
    "..\\x",
    "\\x",
]
OUTSIDE += [
    "C:/x",
    "C:\\x",
    "file:x",
    "a\0b",
    "\0",
    "../\0",
    "model\ud800",
    "\uff0e\uff0e/x",
    "\u2025/x",
    "sub/\u2025/\u2025/x",
    "\uff0fetc/passwd",
]
OUTSIDE += [
    "out",
    "out/",
    "out-dir/secret",
    "out-relative",
    "out-chain",
    "loop",
    "loop/x",
    "sub/up/x",
    "ROOT-link/secret",
    "to-root",
    "dangling-out",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """root/ with good files and all kinds of links; beside it root-evil/ and a folder whose name differs only in case."""
    base = tmp_path / "root"
    for folder in (base / "sub", base / "blobs", base / "snapshots" / "rev", tmp_path / "root-evil", tmp_path / "Other"):
        folder.mkdir(parents=True)
    for file in (base / "model.safetensors", base / "sub/part.safetensors", base / "blobs/abc", tmp_path / "root-evil/file"):
        file.write_text("x")
    (tmp_path / "Other/secret").write_text("x")
    links = {
        "in": "sub/part.safetensors",
        "loop-in": "sub",
        "snapshots/rev/model.safetensors": "../../blobs/abc",
        "out": str(tmp_path / "root-evil/file"),
        "out-dir": str(tmp_path / "Other"),
        "out-relative": "../root-evil/file",
        "out-chain": "out",
        "loop": "loop",
        "sub/up": "../..",
        "ROOT-link": "../Other",
        "to-root": ".",
        "dangling-out": "../nowhere",
    }
    for name, target in links.items():
        (base / name).symlink_to(target)
    return base


@pytest.mark.parametrize("relative", INSIDE)
def test_a_path_inside_the_folder_is_resolved(root: Path, relative: str) -> None:
    path = confine(root, relative)
    assert path == path.resolve() and root.resolve() in path.parents


@pytest.mark.parametrize("relative", OUTSIDE)
def test_a_path_that_leaves_the_folder_is_refused(root: Path, relative: str) -> None:
    with pytest.raises(ModelError):
        confine(root, relative)


def test_the_path_cases_are_sixty_and_a_prefix_check_fails_them(root: Path) -> None:
    """Negative control: comparing text instead of resolving lets several of them out."""
    assert len(INSIDE) + len(OUTSIDE) >= 60 and len(set(INSIDE + OUTSIDE)) == len(INSIDE + OUTSIDE)

    def prefix_check(relative: str) -> bool:
        return os.path.normpath(f"{root}/{relative}").startswith(str(root))

    fooled = [relative for relative in OUTSIDE if "\0" not in relative and prefix_check(relative)]
    assert {"../root-evil/file", "out", "out-dir/secret", "sub/up/x"} <= set(fooled)


def test_a_root_that_is_a_link_is_resolved_first(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert confine(tmp_path / "alias", "model.safetensors") == root.resolve() / "model.safetensors"
    with pytest.raises(ModelError):
        confine(tmp_path / "no such folder", "x")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    relative=st.lists(st.sampled_from(["..", ".", "sub", "up", "in", "out", "~", "", "loop", "x\u2025", "out-dir", "/"]), max_size=5).map(
        "/".join
    )
)
def test_no_mixture_of_parts_leaves_the_folder(root: Path, relative: str) -> None:
    try:
        path = confine(root, relative)
    except ModelError:
        return
    assert root.resolve() in Path(os.path.realpath(path)).parents, relative
