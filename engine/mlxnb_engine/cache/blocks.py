"""Identity of cached state: namespace, hash chain, immutable blocks and tails. The one key builder of RAM and disk.

    field(x) = u64le(len(x)) + x
    h[0]     = sha256(field("mlxnb/root/1")  + field(namespace))
    h[i+1]   = sha256(field("mlxnb/block/1") + field(h[i]) + field(ids of block i as u32le))      the key of block i

A key says which tokens, after which tokens, of which model in which encoding. Whoever finds a block by its key still compares
the stored ids: a collision is a miss.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..fingerprint import digest_fields

T = 64
"""Tokens of a block. Blocks start at multiples of it."""
RECORD_FORMAT = 1
"""Version of the record on disk (`record.py`)."""
KEY_BYTES = 32
BOOKKEEPING_BYTES = 4096
"""What a block or tail costs besides its payload: ids, keys, its place in the tree (about 3.5 KB in CPython). Counted, or blocks
of a purely recurrent model, most of which hold no state at all, would be free and without number."""

_ROOT = b"mlxnb/root/1"
_BLOCK = b"mlxnb/block/1"

Phase = Literal["raw", "encoded"]
"""A delayed codec has two chains: as computed, and as encoded once the row is past `start`. Any other codec has "encoded" only."""


class Payload(Protocol):
    """Encoded state that this layer keeps and never looks into. Whoever made it releases it where its arrays live."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter in force, by content. digest: sha256 of its weights and config, None if they cannot be read."""

    digest: str | None
    scale: float


@dataclass(frozen=True, slots=True)
class Namespace:
    """What state belongs to besides its tokens: components 1 to 14 of reliability 3.1, and on what it was computed. None in any: it
    cannot be read.

    fingerprint: components 1 to 7 (`fingerprint.with_layout`). adapters: in order. codec: its name per layer.
    delayed_start: tokens before a delayed codec converts, 0 if it does not wait. companion: identity of what is stored with the
    target's state (a draft model's or MTP's own state), "" if nothing is. numerics: what decides the bits of a computation besides
    its operands (device, BLAS mode, MLX version). Without it, processes that share a directory would mix state of a backend that
    promises equal bits with state of one that does not.
    """

    fingerprint: str | None
    codec: tuple[str, ...] | None
    adapters: tuple[Adapter, ...] | None = ()
    delayed_start: int | None = 0
    phase: Phase | None = "encoded"
    companion: str | None = ""
    block_tokens: int = T
    record_format: int = RECORD_FORMAT
    numerics: str | None = ""

    def digest(self) -> bytes | None:
        """32 bytes that name it in RAM and on disk; None if a component cannot be read: then nothing is reused or stored."""
        if self.adapters is None or self.codec is None:
            return None
        fields: list[tuple[str, bytes | None]] = [("fingerprint", _text(self.fingerprint))]
        for adapter in self.adapters:
            fields += [("adapter", _text(adapter.digest)), ("scale", struct.pack("<d", adapter.scale))]
        fields += [("codec", _text(name)) for name in self.codec]
        fields += [
            ("delayed_start", _text(self.delayed_start)),
            ("phase", _text(self.phase)),
            ("companion", _text(self.companion)),
            ("block_tokens", _text(self.block_tokens)),
            ("record_format", _text(self.record_format)),
            ("numerics", _text(self.numerics)),
        ]
        known = [(tag, value) for tag, value in fields if value is not None]
        return bytes.fromhex(digest_fields(known)) if len(known) == len(fields) else None


def _text(value: str | int | None) -> bytes | None:
    return None if value is None else str(value).encode()


def _hash(parts: Iterable[bytes]) -> bytes:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def root_key(namespace: bytes) -> bytes:
    """h[0]: the parent key of a namespace's first blocks. namespace: `Namespace.digest()`."""
    return _hash((_ROOT, namespace))


def block_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """Key of the block of these 64 ids after `parent`. Raises ValueError for another number of ids, or ids outside u32."""
    if len(ids) != T:
        raise ValueError(f"a block has {T} ids, not {len(ids)}")
    try:
        packed = struct.pack(f"<{T}I", *ids)
    except struct.error as error:
        raise ValueError(f"an id of a block is no unsigned 32-bit number: {error}") from error
    return _hash((_BLOCK, parent, packed))


def chain(namespace: bytes, ids: Sequence[int]) -> list[bytes]:
    """Keys of the whole blocks of these ids, first to last: len(ids) // 64 of them."""
    keys, parent = [], root_key(namespace)
    for start in range(0, len(ids) - T + 1, T):
        parent = block_key(parent, ids[start : start + T])
        keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """64 consecutive tokens' encoded state of all layers. Made when its last token has been consumed; never changes.

    index: i for the tokens [64 i, 64 (i + 1)). payload: every layer's encoded K/V of these tokens.
    attachment: recurrent and companion state right after the last of them, or None; usable only by who ends exactly there.
    Whether `key` belongs to `parent` and `ids` is not checked here: `following` makes it so, and readers compare ids.
    """

    key: bytes
    parent: bytes
    index: int
    ids: tuple[int, ...]
    payload: Payload
    attachment: Payload | None = None

    def __post_init__(self) -> None:
        if len(self.ids) != T or self.index < 0 or len(self.key) != KEY_BYTES or len(self.parent) != KEY_BYTES:
            raise ValueError(f"no block: index {self.index}, {len(self.ids)} ids, keys of {len(self.key)} and {len(self.parent)} bytes")

    @classmethod
    def following(cls, parent: bytes, index: int, ids: Sequence[int], payload: Payload, attachment: Payload | None = None) -> Block:
        """The block of these ids after `parent` (a root key for index 0), with its key."""
        return cls(block_key(parent, ids), parent, index, tuple(ids), payload, attachment)

    @property
    def end(self) -> int:
        """Tokens from the start of the sequence to the end of this block."""
        return (self.index + 1) * T

    @property
    def nbytes(self) -> int:
        return BOOKKEEPING_BYTES + self.payload.nbytes + (self.attachment.nbytes if self.attachment is not None else 0)


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The 1 to 63 ids after the last whole block, with their encoded state. RAM only, trimmable state only."""

    parent: bytes
    ids: tuple[int, ...]
    payload: Payload

    def __post_init__(self) -> None:
        if not 1 <= len(self.ids) < T or len(self.parent) != KEY_BYTES:
            raise ValueError(f"no tail: {len(self.ids)} ids after a key of {len(self.parent)} bytes")

    @property
    def nbytes(self) -> int:
        return BOOKKEEPING_BYTES + self.payload.nbytes


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where a model's state may be taken up again.

    trimmable: after any token, since shorter prefixes are recovered by a length; else only at a block end with an attachment.
    minimum_offset: at this many tokens or later (`minimum_reusable_offset` of an encoded chain).
    """

    trimmable: bool = True
    minimum_offset: int = 0


def first_seen(length: int, window: int | None) -> int:
    """Index of the first block that a layer needs so that tokens from `length` on can be computed.

    window: tokens a sliding layer sees, the asking one included; None for a layer that sees all. The token at `length` sees
    [length - window + 1, length], so blocks before that are dead to this layer. No block is needed: length // 64 rounded up.
    """
    if window is None:
        return 0
    first = max(0, length - window + 1)
    return first // T if first < length else -(-length // T)
