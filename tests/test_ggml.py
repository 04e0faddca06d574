"""ggml's block layouts, value by value against loops written from the layout, and against MLX where MLX reads the type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny

from mlxnb_engine import ggml
from mlxnb_engine.headers import GGML_TYPES

NUMBER = {name: number for number, (name, _, _) in GGML_TYPES.items()}
SIZE = {name: (count, size) for name, count, size in GGML_TYPES.values()}
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,)}
"""Where the float16 scales are; random bytes there would be infinities."""


def random_blocks(kind: str, count: int = 6) -> np.ndarray:
    rng = np.random.default_rng(NUMBER[kind])
    raw = rng.integers(0, 256, (count, SIZE[kind][1])).astype(np.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = rng.normal(0, 0.01, count).astype(np.float16).view(np.uint8).reshape(count, 2)
    return raw


def half(raw: np.ndarray, at: int) -> float:
    return float(raw[at : at + 2].copy().view(np.float16)[0])


def loop_q5_0(b: np.ndarray) -> list[float]:
    bits = int.from_bytes(b[2:6].tobytes(), "little")
    low = [int(b[6 + i]) & 15 if i < 16 else int(b[6 + i - 16]) >> 4 for i in range(32)]
    return [half(b, 0) * ((low[i] | ((bits >> i & 1) << 4)) - 16) for i in range(32)]


def loop_q5_1(b: np.ndarray) -> list[float]:
    bits = int.from_bytes(b[4:8].tobytes(), "little")
    low = [int(b[8 + i]) & 15 if i < 16 else int(b[8 + i - 16]) >> 4 for i in range(32)]
    return [half(b, 0) * (low[i] | ((bits >> i & 1) << 4)) + half(b, 2) for i in range(32)]


def loop_q2_k(b: np.ndarray) -> list[float]:
    out = []
    for i in range(256):
        pair, value = int(b[i // 16]), int(b[16 + 32 * (i // 128) + i % 32]) >> (2 * (i % 128 // 32)) & 3
        out.append(half(b, 80) * (pair & 15) * value - half(b, 82) * (pair >> 4))
    return out


def six_bits(b: np.ndarray, j: int) -> tuple[int, int]:
    s = [int(x) for x in b[4:16]]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def loop_k(b: np.ndarray, values: int, fifth: int | None) -> list[float]:
    out = []
    for i in range(256):
        scale, minimum = six_bits(b, i // 32)
        byte = int(b[values + 32 * (i // 64) + i % 32])
        value = byte >> 4 if i // 32 % 2 else byte & 15
        if fifth is not None:
            value |= (int(b[fifth + i % 32]) >> (i // 32) & 1) << 4
        out.append(half(b, 0) * scale * value - half(b, 2) * minimum)
    return out


def loop_q6_k(b: np.ndarray) -> list[float]:
    out = []
    for i in range(256):
        part, quarter, at = i // 128, i % 128 // 32, i % 32
        byte = int(b[64 * part + 32 * (quarter % 2) + at])
        value = (byte >> 4 if quarter >= 2 else byte & 15) | (int(b[128 + 32 * part + at]) >> (2 * quarter) & 3) << 4
        out.append(half(b, 208) * int(b[192 + i // 16].view(np.int8)) * (value - 32))
    return out


LOOPS: dict[str, Callable[[np.ndarray], list[float]]] = {
    "Q5_0": loop_q5_0,
    "Q5_1": loop_q5_1,
    "Q2_K": loop_q2_k,
    "Q4_K": lambda b: loop_k(b, 16, None),
    "Q5_K": lambda b: loop_k(b, 48, 16),
    "Q6_K": loop_q6_k,
}


@pytest.mark.parametrize("kind", LOOPS)
def test_every_value_is_where_the_layout_says(kind: str) -> None:
    raw = random_blocks(kind)
    found = ggml.unpack(kind, raw.tobytes(), (3, 2 * SIZE[kind][0]))
    expected = np.array([LOOPS[kind](block) for block in raw]).reshape(found.shape)
    assert found.dtype == np.float32 and np.abs(expected).max() > 0.01
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


def by_mlx(path: Path, kind: str, raw: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.setitem(tiny._GGML_TYPES, kind, NUMBER[kind])
    monkeypatch.setattr(tiny, "_blocks", lambda array, wanted: raw.tobytes())
    shape = (len(raw), SIZE[kind][0])
    path.write_bytes(tiny.gguf_bytes({"general.architecture": "llama"}, {"t.weight": (np.zeros(shape, np.float32), kind)}))
    arrays = mx.load(str(path))
    if "t.scales" in arrays:
        scales, biases = (arrays[f"t.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        return np.array(mx.dequantize(arrays["t.weight"], scales, biases, 32, int(kind[1])))
    return np.array(arrays["t.weight"].astype(mx.float32))


@pytest.mark.parametrize(("kind", "precision"), [("Q4_0", 0), ("Q4_1", 0), ("Q8_0", 0), ("Q2_K", 1e-3), ("Q6_K", 1e-3)])
def test_mlx_reads_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, precision: float) -> None:
    """Where MLX is right, in float32 to the bit and in its float16 up to rounding."""
    raw = random_blocks(kind)
    ours = ggml.unpack(kind, raw.tobytes(), (len(raw), SIZE[kind][0]))
    theirs = by_mlx(tmp_path / "m.gguf", kind, raw, monkeypatch)
    assert np.abs(ours - theirs).max() <= (precision or 1e-6) * np.abs(ours).max()


def test_mlx_misreads_q4_k_which_is_why_it_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary: the day this fails, MLX has mended it and Q4_K may be read natively."""
    raw = random_blocks("Q4_K")
    ours = ggml.unpack("Q4_K", raw.tobytes(), (len(raw), 8, 32))
    theirs = by_mlx(tmp_path / "m.gguf", "Q4_K", raw, monkeypatch).reshape(ours.shape)
    wrong = np.abs(ours - theirs).max(axis=(0, 2)) > 0.01 * np.abs(ours).max()
    assert wrong.tolist() == [False, True] * 4


def test_floats_are_read_exactly() -> None:
    values = np.array([0.0, -0.0, 1.0, -2.5, 3e-5, 65504.0, np.inf], np.float32)
    assert np.array_equal(ggml.unpack("F32", values.tobytes(), (7,)), values)
    assert np.array_equal(ggml.unpack("F16", values.astype(np.float16).tobytes(), (7,)), values.astype(np.float16).astype(np.float32))
    upper = (np.array([1.0, -3.0, 1e38, 1e-38], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    expected = (upper.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(ggml.unpack("BF16", upper.tobytes(), (4,)), expected), "wider than float16, so not through it"
