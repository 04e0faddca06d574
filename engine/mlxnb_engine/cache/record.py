"""One block <-> the bytes of one file. Pure and strict: no I/O, no MLX, and no parser ever sees what a file says.

    prelude      magic (8 bytes) | format u32 | header length u32                                        little-endian
    header       canonical JSON: sorted keys, no spaces, integers and hex only
    header hash  sha256 over prelude and header
    payload      zeros to a multiple of 64, then the tensors in table order with zeros between them to the same multiple;
                 the attachment's follow the block's; the file ends where the last one ends

Whoever reads a block knows its ids, and so its key, parent and index, and the running model's layout: every byte of the header
but the checksums. So a reader builds the header it expects and compares. Nothing from a file chooses a class, a size, an offset
or a code path. xxh3-128 finds damage in the payload; it is no security boundary. sha256 covers keys and headers.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from .blocks import KEY_BYTES, RECORD_FORMAT, Block, T, block_key, root_key

Bytes = bytes | bytearray | memoryview

MAGIC = b"mlxnb-kv"
MAX_HEADER = 2**20
MAX_FILE = 2**33
"""No layout asks for more bytes than this in one file (8 GiB)."""
ALIGNMENT = 64

# dtype name as MLX spells it -> bytes of an element
DTYPE_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
}
_PRELUDE = struct.Struct("<8sII")
_HASH_BYTES = 32
_SUM = "?" * 32  # holds the place of a checksum; "?" is in no name, number or hex of ours
_NAME = re.compile(r"[a-z0-9_.]{1,64}")
_MAX_NUMBER = 2**63 - 1


class BadRecord(Exception):
    """These bytes are not the record of that block of this model. The message says why."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a block. part: what it is within its layer, such as "k" or "v.scales". shape: row-major, no row axis."""

    layer: int
    part: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        good = all(_whole(dim) and dim < 2**31 for dim in (self.layer, *self.shape)) and len(self.shape) <= 8
        if not good or self.dtype not in DTYPE_BYTES or not _NAME.fullmatch(self.part) or self.nbytes > MAX_FILE:
            raise ValueError(f"no tensor of a record: {self.layer}, {self.part!r}, {self.dtype!r}, {self.shape}")

    @property
    def nbytes(self) -> int:
        total = DTYPE_BYTES[self.dtype]
        for dim in self.shape:
            total *= dim  # exact: Python integers do not wrap
        return total


@dataclass(frozen=True)
class Layout:
    """What the running model declares of every block: the only thing that a record is read by.

    namespace: `Namespace.digest()`. codec: 32 bytes that identify the codec policy, its tables included. tensors: of each block.
    attachment: of a block that carries one; None if this model has none. scalars: whole numbers that go with an attachment.
    Raises ValueError if a record of it would not fit the format.
    """

    namespace: bytes
    codec: bytes
    tensors: tuple[TensorSpec, ...]
    attachment: tuple[TensorSpec, ...] | None = None
    scalars: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.namespace) != KEY_BYTES or len(self.codec) != KEY_BYTES:
            raise ValueError(f"no digests: a namespace of {len(self.namespace)} bytes and a codec of {len(self.codec)}")
        names = [name for name, _ in self.scalars]
        if len(set(names)) != len(names) or not all(_NAME.fullmatch(n) and _whole(v) for n, v in self.scalars):
            raise ValueError(f"no scalars of a record: {self.scalars}")
        if self.scalars and self.attachment is None:
            raise ValueError("scalars belong to an attachment, and this layout has none")
        if self.most_header_bytes > MAX_HEADER or self.most_bytes > MAX_FILE:
            raise ValueError(f"records of this layout would have headers of {self.most_header_bytes} and {self.most_bytes} bytes")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that identify the tensor tables and scalars."""
        return hashlib.sha256(_json([self.table.decode(), self.attachment_table.decode(), dict(self.scalars)])).digest()

    @cached_property
    def table(self) -> bytes:
        """The tensor table of the header as JSON, its checksums open."""
        return _table(self.tensors, self.spans)

    @cached_property
    def attachment_table(self) -> bytes:
        """That of the attachment; null if this model has none."""
        return b"null" if self.attachment is None else _table(self.attachment, self.spans[len(self.tensors) :])

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each tensor within the payload, the attachment's last."""
        found, at = [], 0
        for spec in (*self.tensors, *(self.attachment or ())):
            at = _aligned(at)
            found.append((at, at + spec.nbytes))
            at += spec.nbytes
        return tuple(found)

    def count(self, attached: bool) -> int:
        """Number of tensors in a record with or without the attachment."""
        return len(self.spans) if attached else len(self.tensors)

    @cached_property
    def _largest(self) -> _Form:
        widest = BlockName(bytes(KEY_BYTES), bytes(KEY_BYTES), 2**32, (2**32 - 1,) * T)
        return _Form(self, widest, self.attachment is not None)

    @cached_property
    def most_header_bytes(self) -> int:
        """No prelude, header and hash of this layout have more bytes together."""
        return self._largest.start

    @cached_property
    def most_bytes(self) -> int:
        """No record of this layout has more."""
        return self._largest.size


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block without its state: what a reader asks for."""

    key: bytes
    parent: bytes
    index: int
    ids: tuple[int, ...]


def names(namespace: bytes, ids: Sequence[int]) -> tuple[BlockName, ...]:
    """Names of the whole blocks of these ids, first to last."""
    found, parent = [], root_key(namespace)
    for index in range(len(ids) // T):
        part = tuple(ids[index * T : (index + 1) * T])
        found.append(BlockName(block_key(parent, part), parent, index, part))
        parent = found[-1].key
    return tuple(found)


def name_of(block: Block) -> BlockName:
    return BlockName(block.key, block.parent, block.index, block.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """Host bytes of a block's tensors, or of an attachment's, in the order of the layout. A `Payload` of the disk tier."""

    parts: tuple[memoryview, ...]

    @classmethod
    def of(cls, buffers: Iterable[Any]) -> Tensors:
        """From C-contiguous buffers (bytes, numpy arrays), which are not copied and must not change."""
        views = (memoryview(buffer) for buffer in buffers)
        return cls(tuple(view.cast("B") if view.nbytes else memoryview(b"") for view in views))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def encode(block: Block, layout: Layout) -> bytes:
    """The record of a block whose payload and attachment are `Tensors`. Raises ValueError if it is no block of this layout."""
    attached = block.attachment is not None
    if attached and layout.attachment is None:
        raise ValueError("the block has an attachment and its layout has none")
    specs = (*layout.tensors, *((layout.attachment or ()) if attached else ()))
    parts = [part for payload in (block.payload, block.attachment) if payload is not None for part in _parts_of(payload)]
    if [part.nbytes for part in parts] != [spec.nbytes for spec in specs] or len(_parts_of(block.payload)) != len(layout.tensors):
        raise ValueError(f"tensors of {[p.nbytes for p in parts]} bytes; the layout asks for {[s.nbytes for s in specs]}")
    if block.key != block_key(block.parent, block.ids):
        raise ValueError("the key of the block is not that of its parent and ids")
    form = _Form(layout, name_of(block), attached)
    head = form.head([xxhash.xxh3_128_hexdigest(part).encode() for part in parts])
    out: list[Bytes] = [head, bytes(form.start - len(head))]
    at = 0
    for part, (start, stop) in zip(parts, layout.spans, strict=False):
        out += [bytes(start - at), part]
        at = stop
    return b"".join(out)


def decode(raw: Bytes, layout: Layout, name: BlockName) -> Block:
    """The block in these bytes; its `Tensors` are views of them. Raises BadRecord unless every byte is as it must be."""
    view = memoryview(raw)
    form, sums = _checked(view, len(view), layout, name)
    payload = view[form.start :]
    parts, at = [], 0
    for number, (start, stop) in enumerate(layout.spans[: form.count]):
        if any(payload[at:start]):
            raise BadRecord(f"the padding before tensor {number} is not zero")
        parts.append(payload[start:stop])
        at = stop
    _verify(parts, sums)
    own = len(layout.tensors)
    attachment = Tensors(tuple(parts[own:])) if form.attached else None
    return Block(name.key, name.parent, name.index, name.ids, Tensors(tuple(parts[:own])), attachment)


def has_attachment(start: Bytes, size: int, layout: Layout, name: BlockName) -> bool:
    """Whether the record that starts with these bytes, in a file of `size`, carries the attachment. Raises BadRecord.

    start: the file's first `layout.most_header_bytes` bytes, or all of it. The payload is not looked at.
    """
    return _checked(memoryview(start), size, layout, name)[0].attached


# -- the parts ---------------------------------------------------------------------------------------------------------


class _Form:
    """Every byte of one block's record but checksums and tensors: a writer fills it in, a reader compares with it.

    pieces: the header, cut where the checksums go. own, count: tensors of the block, and in all. start: where the payload starts.
    size: of the file.
    """

    def __init__(self, layout: Layout, name: BlockName, attached: bool) -> None:
        self.attached, self.own, self.count = attached, len(layout.tensors), layout.count(attached)
        middle: dict[str, Any] = {
            "codec": layout.codec.hex(),
            "ids": name.ids,
            "index": name.index,
            "key": name.key.hex(),
            "layout": layout.digest.hex(),
            "namespace": layout.namespace.hex(),
            "parent": name.parent.hex(),
        }
        with_it = (name.index + 1) * T, _json(dict(layout.scalars)), layout.attachment_table
        attachment = b'{"length":%d,"scalars":%b,"tensors":%b}' % with_it if attached else b"null"
        header = b'{"attachment":%b,%b,"tensors":%b}' % (attachment, _json(middle)[1:-1], layout.table)
        self.pieces = header.split(_SUM.encode())
        self.prelude = _PRELUDE.pack(MAGIC, RECORD_FORMAT, len(header))
        self.header_stop = _PRELUDE.size + len(header)
        self.start = _aligned(self.header_stop + _HASH_BYTES)
        self.size = self.start + (layout.spans[self.count - 1][1] if self.count else 0)

    def head(self, sums: Sequence[bytes]) -> bytes:
        """Prelude, header and header hash with these checksums, in the order of the payload, in their places."""
        in_header = (*sums[self.own :], *sums[: self.own], b"")  # "attachment" sorts before "tensors"
        header = b"".join(piece for pair in zip(self.pieces, in_header, strict=True) for piece in pair)
        return self.prelude + header + hashlib.sha256(self.prelude + header).digest()

    def sums(self, header: bytes) -> list[bytes]:
        """The checksums, in the order of the payload, of a header of the right length that is otherwise this one. Raises BadRecord."""
        found, at = [], 0
        for piece in self.pieces:
            if header[at : at + len(piece)] != piece:
                raise BadRecord(f"the header differs from this block's between bytes {at} and {at + len(piece)}")
            at += len(piece) + len(_SUM)
            found.append(header[at - len(_SUM) : at])
        attachments = self.count - self.own
        return found[attachments : self.count] + found[:attachments]


def _checked(view: memoryview, size: int, layout: Layout, name: BlockName) -> tuple[_Form, list[bytes]]:
    """The form of this record and the checksums it states, once prelude, sizes, header and its hash are what they must be."""
    forms = [_Form(layout, name, attached) for attached in ((False,) if layout.attachment is None else (False, True))]
    form = next((form for form in forms if form.size == size), None)
    if form is None:
        raise BadRecord(f"it has {size} bytes where this block has {' or '.join(str(form.size) for form in forms)}")
    if len(view) < form.header_stop + _HASH_BYTES:
        raise BadRecord("it ends within the header")
    if view[: _PRELUDE.size] != form.prelude:
        raise BadRecord("the prelude is not that of this block's record")
    stated = view[form.header_stop : form.header_stop + _HASH_BYTES]
    if hashlib.sha256(view[: form.header_stop]).digest() != stated:
        raise BadRecord("the header does not match its hash")
    sums = form.sums(bytes(view[_PRELUDE.size : form.header_stop]))
    if any(view[form.header_stop + _HASH_BYTES : min(form.start, len(view))]):
        raise BadRecord("the padding after the header is not zero")
    return form, sums


def _verify(parts: Sequence[memoryview], sums: Sequence[bytes]) -> None:
    for number, (part, stated) in enumerate(zip(parts, sums, strict=True)):
        if xxhash.xxh3_128_hexdigest(part).encode() != stated:
            raise BadRecord(f"tensor {number} does not match its checksum")


def _parts_of(payload: object) -> tuple[memoryview, ...]:
    if not isinstance(payload, Tensors):
        raise ValueError(f"a record holds host bytes, not {type(payload).__name__}")
    return payload.parts


def _table(specs: Sequence[TensorSpec], spans: Sequence[tuple[int, int]]) -> bytes:
    return _json(
        [
            {"dtype": s.dtype, "layer": s.layer, "nbytes": s.nbytes, "offset": start, "part": s.part, "shape": s.shape, "xxh3": _SUM}
            for s, (start, _) in zip(specs, spans, strict=False)
        ]
    )


def _json(value: object) -> bytes:
    """Canonical: the same value gives the same bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER
