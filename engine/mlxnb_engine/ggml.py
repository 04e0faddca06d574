"""ggml's block layouts to float32, with numpy. Pure: bytes in, values out. Exact: no step rounds to fewer bits than float32.

MLX reads F32, F16, Q4_0, Q4_1 and Q8_0 well. Its reader turns BF16 and the K types into float16, takes for every second
sub-block of Q4_K the scale of the one before (seen in 0.32.4), and fails on the others; so those come through here.
A block of a K type has 256 values in sub-blocks of 16 or 32 with their own small scales.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .headers import GGML_TYPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def unpack(kind: str, raw: bytes | memoryview | Bytes, shape: tuple[int, ...]) -> Floats:
    """The values of one tensor. raw: its bytes in the file. KeyError for a type that is not in UNPACKERS."""
    data = np.frombuffer(raw, np.uint8)
    blocks = data.reshape(-1, _BLOCK_BYTES[kind])
    return UNPACKERS[kind](blocks).reshape(shape)


def _half(blocks: Bytes, at: int) -> Floats:
    """[n, 1]: the float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, w] to [n, 2w]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """[n, 32] of 0 or 16: bit i of the 4 bytes at `at` belongs to value i."""
    bits: Bytes = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits * np.uint8(16)


def _q5_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (values.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(blocks: Bytes) -> Floats:
    """16 bytes (scale in the low half, minimum in the high half), 64 bytes of 2-bit values, scale of scales, scale of minima."""
    pairs, packed = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    values = ((packed >> shifts) & 3).reshape(-1, 16, 16).astype(np.float32)
    scale, minimum = _half(blocks, 80) * (pairs & 15), _half(blocks, 82) * (pairs >> 4)
    return scale[:, :, None] * values - minimum[:, :, None]


def _six_bit_pairs(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K, [n, 8, 1] each.

    12 bytes hold 16 numbers of 6 bits: the first four of each kind in the low 6 bits of bytes 0-3 and 4-7; of the last four the low
    4 bits in bytes 8-11, and the upper 2 bits on top of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimum = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return (_half(blocks, 0) * scale)[:, :, None], (_half(blocks, 2) * minimum)[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    """Every 32 packed bytes hold two sub-blocks: low halves, then high halves."""
    scale, minimum = _six_bit_pairs(blocks)
    values = _nibbles(blocks[:, 16:144].reshape(-1, 32)).reshape(-1, 8, 32)
    return scale * values.astype(np.float32) - minimum


def _q5_k(blocks: Bytes) -> Floats:
    """As Q4_K; bit s of byte i of the 32 bytes in front is the fifth bit of value i of sub-block s."""
    scale, minimum = _six_bit_pairs(blocks)
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1) << 4
    values = _nibbles(blocks[:, 48:176].reshape(-1, 32)).reshape(-1, 8, 32) | fifth
    return scale * values.astype(np.float32) - minimum


def _q6_k(blocks: Bytes) -> Floats:
    """128 bytes of low halves, 64 bytes of upper 2 bits, 16 signed scales, the scale of scales. Halves of 128 values."""
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return scale[:, :, None] * values


UNPACKERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_BLOCK_BYTES = {name: size for name, _, size in GGML_TYPES.values()}
