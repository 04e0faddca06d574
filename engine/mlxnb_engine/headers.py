"""Strict checks of safetensors and GGUF headers, and of paths, before anything else reads a model file.

Pure: a file in, a description or ModelError out. No MLX, no file is opened here. Work and memory are bounded by the header's size.
"""

from __future__ import annotations

import json
import os
import struct
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .errors import ModelError

MAX_SAFETENSORS_HEADER = 100_000_000
MAX_DIM = 2**31 - 1  # MLX keeps a dimension in 32 bits
MAX_DIMS = 16
MAX_GGUF_TENSORS = 100_000
MAX_GGUF_KEYS = 10_000
MAX_GGUF_KEY = 65_535
MAX_GGUF_NAME = 256
MAX_GGUF_STRING = 16 * 2**20
MAX_GGUF_ARRAY = 8_000_000

# Both name kinds, dtype -> bytes. Types below one byte are not read by MLX, so they count as unknown.
SAFETENSORS_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
# number, name, elements per block, bytes per block
_GGML = (
    "0 F32 1 4, 1 F16 1 2, 2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34, 9 Q8_1 32 36, "
    "10 Q2_K 256 84, 11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210, 15 Q8_K 256 292, "
    "16 IQ2_XXS 256 66, 17 IQ2_XS 256 74, 18 IQ3_XXS 256 98, 19 IQ1_S 256 50, 20 IQ4_NL 32 18, 21 IQ3_S 256 110, "
    "22 IQ2_S 256 82, 23 IQ4_XS 256 136, 24 I8 1 1, 25 I16 1 2, 26 I32 1 4, 27 I64 1 8, 28 F64 1 8, 29 IQ1_M 256 56, "
    "30 BF16 1 2, 34 TQ1_0 256 54, 35 TQ2_0 256 66, 39 MXFP4 32 17"
)
GGML_TYPES = {int(n): (name, int(block), int(size)) for n, name, block, size in (entry.split() for entry in _GGML.split(", "))}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4
_DAMAGED = "The file is damaged or not what its name says; fetch it again."


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor. shape: row-major, outermost first. start, stop: byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a checked file says of itself. metadata: str values for safetensors, Python values for GGUF."""

    format: str
    tensors: Mapping[str, TensorSpan]
    metadata: Mapping[str, Any]

    @property
    def parameters(self) -> int:
        """Number of stored elements (packed ones count as stored)."""
        return sum(_product(span.shape) for span in self.tensors.values())


# -- safetensors ---------------------------------------------------------------------------------------------------


def read_safetensors(file: BinaryIO, size: int) -> Header:
    """Check a safetensors file of `size` bytes and describe it. Raises ModelError for anything doubtful.

    Accepts: a header of at most 100 MB without duplicate keys, known types, extents that tile the rest of the file exactly.
    """
    cursor = _Cursor(file, size)
    length = cursor.number("<Q")
    if length > min(MAX_SAFETENSORS_HEADER, size - 8):
        _refuse(f"its header claims {length} bytes")
    table = _json_object(cursor.take(length))
    metadata = table.pop("__metadata__", None)
    if metadata is None:  # absent, or null as MLX itself writes it
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse("its metadata is not a table of strings")
    base = 8 + length
    spans = [_safetensors_span(name, entry, base) for name, entry in table.items()]
    at = base
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if span.start != at:
            _refuse(f"tensor {span.name!r} {'overlaps another' if span.start < at else 'leaves a hole'}")
        at = span.stop
    if at != size:
        _refuse(f"it has {size} bytes where the header asks for {at}")
    return Header("safetensors", {span.name: span for span in spans}, metadata)


def _json_object(raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            _refuse("its header has a duplicate key")
        return table

    def no_constant(word: str) -> NoReturn:
        _refuse(f"its header has {word}")

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise _refusal("its header is not valid JSON") from error
    if not isinstance(table, dict):
        _refuse("its header is not a table")
    return table


def _safetensors_span(name: str, entry: Any, base: int) -> TensorSpan:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"} or not _is_text(name):
        _refuse(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_BYTES:
        _refuse(f"tensor {name!r} has the unknown type {dtype!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_count(dim, MAX_DIM) for dim in shape):
        _refuse(f"tensor {name!r} has a bad shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(at, 2**63 - 1) for at in offsets):
        _refuse(f"tensor {name!r} has bad offsets")
    if offsets[1] - offsets[0] != _product(shape) * SAFETENSORS_BYTES[dtype]:
        _refuse(f"tensor {name!r} has a size that does not fit its shape")
    return TensorSpan(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


# -- GGUF ----------------------------------------------------------------------------------------------------------


def read_gguf(file: BinaryIO, size: int) -> Header:
    """Check a little-endian GGUF file (version 2 or 3) of `size` bytes and describe it. Raises ModelError for anything doubtful.

    Accepts: bounded counts and strings, flat arrays, known tensor types, aligned extents inside the file without overlap.
    """
    cursor = _Cursor(file, size)
    if cursor.take(4) != b"GGUF":
        _refuse("it does not start with the GGUF mark")
    if (version := cursor.number("<I")) not in (2, 3):
        _refuse(f"its GGUF version is {version}; 2 and 3 are supported")
    tensor_count, key_count = cursor.number("<Q"), cursor.number("<Q")
    if tensor_count > MAX_GGUF_TENSORS or key_count > MAX_GGUF_KEYS:
        _refuse(f"it claims {tensor_count} tensors and {key_count} keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text(MAX_GGUF_KEY)
        kind = cursor.number("<I")
        if key in metadata:
            _refuse(f"key {key!r} appears twice")
        if key == "general.alignment" and kind != _UINT32:
            _refuse("its alignment is not a number")
        metadata[key] = _gguf_value(cursor, key, kind)
    alignment = metadata.get("general.alignment", 32)
    if not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
        _refuse(f"its alignment is {alignment}")
    entries = [_gguf_tensor(cursor, alignment) for _ in range(tensor_count)]
    base = -(-cursor.at // alignment) * alignment
    spans = [TensorSpan(e.name, e.dtype, e.shape, base + e.start, base + e.stop) for e in entries]
    tensors = {span.name: span for span in spans}
    if len(tensors) != len(spans):
        _refuse("two tensors have the same name")
    at = base
    for span in sorted(spans, key=lambda span: span.start):
        if span.start < at or span.stop > size:
            _refuse(f"tensor {span.name!r} {'overlaps another' if span.start < at else 'ends beyond the file'}")
        at = span.stop
    return Header("gguf", tensors, metadata)


def _gguf_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text(MAX_GGUF_STRING)
    if kind != _ARRAY:
        return cursor.scalar(kind, key)
    inner, count = cursor.number("<I"), cursor.number("<Q")
    if inner == _STRING:
        if count > min(MAX_GGUF_ARRAY, cursor.left // 8):
            _refuse(f"key {key!r} claims {count} strings")
        return [cursor.text(MAX_GGUF_STRING) for _ in range(count)]
    if inner not in _SCALARS:
        _refuse(f"key {key!r} is an array of type {inner}")
    code = _SCALARS[inner]
    if count > min(MAX_GGUF_ARRAY, cursor.left // struct.calcsize(code)):
        _refuse(f"key {key!r} claims {count} values")
    values = list(struct.unpack(f"<{count}{code[1]}", cursor.take(count * struct.calcsize(code))))
    return [_bool(value, key) for value in values] if inner == _BOOL else values


def _gguf_tensor(cursor: _Cursor, alignment: int) -> TensorSpan:
    """One entry; its start and stop are still relative to the data section."""
    name = cursor.text(MAX_GGUF_NAME)
    rank = cursor.number("<I")
    if not 1 <= rank <= 4 or not _is_text(name):
        _refuse(f"tensor {name!r} has {rank} dimensions")
    dims = [cursor.number("<Q") for _ in range(rank)]
    kind, start = cursor.number("<I"), cursor.number("<Q")
    if kind not in GGML_TYPES:
        _refuse(f"tensor {name!r} has the unknown type {kind}")
    dtype, block, block_bytes = GGML_TYPES[kind]
    if not all(1 <= dim <= MAX_DIM for dim in dims) or dims[0] % block:
        _refuse(f"tensor {name!r} has the impossible shape {dims}")
    if start % alignment:
        _refuse(f"tensor {name!r} is not aligned")
    return TensorSpan(name, dtype, tuple(reversed(dims)), start, start + _product(dims) // block * block_bytes)


class _Cursor:
    """Reads a file forwards and never past `size`, whatever a length field says."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self.at = file, size, 0

    @property
    def left(self) -> int:
        return self._size - self.at

    def take(self, count: int) -> bytes:
        raw = self._file.read(count) if count <= self.left else b""
        if len(raw) != count:
            _refuse("it ends too early")
        self.at += count
        return raw

    def number(self, code: str) -> int:
        return int(struct.unpack(code, self.take(struct.calcsize(code)))[0])

    def text(self, limit: int) -> str:
        length = self.number("<Q")
        if length > limit:
            _refuse(f"it has a string of {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _refusal("it has a string that is not UTF-8") from error

    def scalar(self, kind: int, key: str) -> Any:
        if kind not in _SCALARS:
            _refuse(f"key {key!r} has the unknown type {kind}")
        code = _SCALARS[kind]
        value = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return _bool(value, key) if kind == _BOOL else value


def _bool(value: int, key: str) -> bool:
    if value not in (0, 1):
        _refuse(f"key {key!r} has a truth value of {value}")
    return bool(value)


def _product(dims: Iterable[int]) -> int:
    """Exact: Python integers do not wrap."""
    total = 1
    for dim in dims:
        total *= dim
    return total


def _is_count(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _is_text(name: str) -> bool:
    """A name that any other reader sees the same way: not empty, no NUL, no lone surrogate."""
    return bool(name) and "\0" not in name and not any(0xD800 <= ord(c) <= 0xDFFF for c in name)


def _refusal(reason: str) -> ModelError:
    return ModelError(f"The model file was refused: {reason}.", _DAMAGED)


def _refuse(reason: str) -> NoReturn:
    raise _refusal(reason)


# -- paths ---------------------------------------------------------------------------------------------------------


def confine(root: Path, relative: str | os.PathLike[str]) -> Path:
    """`root / relative` with every symlink resolved; ModelError if that is not inside `root` (or is `root` itself).

    A symlink may point anywhere inside `root`. For a hub cache, whose snapshots link to ../../blobs, root is the repository's folder.
    The answer holds for the moment of asking: who can write inside `root` can change it afterwards.
    """
    text = os.fspath(relative)
    plain = unicodedata.normalize("NFKC", text)  # so that a dot in disguise counts as a dot
    parts = plain.replace("\\", "/").split("/")
    if not _is_text(text) or parts[0] == "" or parts[0].startswith("~") or ".." in parts or ":" in parts[0]:
        hint = "A file of the model names it; do not use this model."
        raise ModelError(f"The path {text!r} is not a plain path inside its folder.", hint)
    try:
        base = Path(root).resolve(strict=True)
        path = (base / text).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        hint = "Check that the folder exists and that no link loops."
        raise ModelError(f"The path {text!r} cannot be resolved: {error}.", hint) from error
    if path == base or not path.is_relative_to(base):
        raise ModelError(f"The path {text!r} leads out of {base}.", "A link points out of the model's folder; copy the file into it.")
    return path
