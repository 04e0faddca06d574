"""Own CUDA kernels and what is built around them: their source run on the CPU, joint projections, fused and compiled steps."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import cuda_on_cpu
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cuda_on_cpu import bfloat16, wide
from rig import GREEDY, Recorder, Rig, assert_same, graph_of, model_of, prompt, solo

from mlxnb_engine.admission import Entry, RowSpec
from mlxnb_engine.cuda import attention, linear
from mlxnb_engine.methods.compiled import CompiledSteps
from mlxnb_engine.methods.window import GroupLimits, WindowGroup
from mlxnb_engine.scheduler import Scheduler
from mlxnb_engine.state import layer
from mlxnb_engine.state.spec import Geometry

BUCKETS = Geometry(bucketed=True)
COMPILED = Geometry(bucketed=True, compiled=True)
FUSED = Geometry(bucketed=True, fused=True)


# -- kernels ---------------------------------------------------------------------------------------------------------


def _attend(folder: Path, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, lengths: list[int], window: int = 0, chunk: int = 64):
    """What `attention.attend` would launch; queries [B, heads, L, D]. bfloat16 bits in and out."""
    rows, heads, width, dim = queries.shape
    kv_heads, chunks = keys.shape[1], -(-keys.shape[2] // chunk)
    per_head = heads // kv_heads * width
    group = min(4, per_head)
    constants = {"D": dim, "G": heads // kv_heads, "ROWS": group, "THREADS": 64, "CHUNK": chunk, "KEYS": 3, "WINDOW": window}
    scale = dim**-0.5
    header = attention._HEADER + f"constexpr float SCALE = {scale * 1.4426950408889634!r}f;\n"
    inputs = {"q": queries, "k": keys, "v": values, "lengths": np.array(lengths, np.int32)}
    out = np.full((rows, width, heads, dim), 0x7FC0, np.uint16)
    parts = {"sums_out": np.full((*out.shape[:3], chunks, dim), np.nan, np.float32)}
    parts["stats_out"] = np.full((*out.shape[:3], chunks, 2), np.nan, np.float32)
    whole = chunks == 1
    source = attention._SOURCE.replace("STORE", attention._WHOLE if whole else attention._PART)
    grid = (chunks, kv_heads, rows * -(-per_head // group))
    cuda_on_cpu.run(folder, source, header, inputs, {"out": out} if whole else parts, constants, grid, 64)
    if not whole:
        inputs = {"sums": parts["sums_out"], "stats": parts["stats_out"], "lengths": inputs["lengths"]}
        joined = folder / "join"
        joined.mkdir()
        cuda_on_cpu.run(joined, attention._JOIN, "", inputs, {"out": out}, {"D": dim, "CHUNK": chunk}, (heads, width, rows), dim)
    return out.transpose(0, 2, 1, 3)


def _exact(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, lengths: list[int], window: int = 0) -> np.ndarray:
    """The same in float64."""
    rows, heads, width, dim = queries.shape
    per = heads // keys.shape[1]
    out = np.zeros(queries.shape)
    for r, h, i in np.ndindex(rows, heads, width):
        last = lengths[r] + i
        first = max(0, last - window + 1) if window else 0
        scores = wide(keys[r, h // per, first : last + 1]) @ wide(queries[r, h, i]) * dim**-0.5
        weights = np.exp(scores - scores.max())
        out[r, h, i] = weights / weights.sum() @ wide(values[r, h // per, first : last + 1])
    return out


def _state(seed: int, rows: int, kv_heads: int, capacity: int, dim: int, ends: list[int]) -> list[np.ndarray]:
    """Keys and values of rows that end at `ends`, NaN in every byte beyond: what the kernel must never use."""
    rng = np.random.default_rng(seed)
    both = [bfloat16(rng.normal(size=(rows + 1, kv_heads, capacity, dim))) for _ in range(2)]
    for buffer in both:
        for row, end in enumerate([*ends, 0]):
            buffer[row, :, end:] = 0x7FC0
    return both


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dim", "capacity", "lengths", "window"),
    [
        (4, 1, 1, 64, 64, [0, 37, 63], 0),  # one chunk, four query heads to a K/V head
        (2, 2, 3, 64, 128, [61, 5], 0),  # a window over the edge of a chunk
        (6, 2, 5, 64, 192, [150, 3], 0),  # more query rows than a block takes, three chunks
        (2, 1, 2, 128, 128, [90], 17),  # a sliding layer: the first chunk is out of sight
    ],
)
def test_the_attention_kernel_attends_each_row_to_its_own_end(
    tmp_path: Path, heads: int, kv_heads: int, width: int, dim: int, capacity: int, lengths: list[int], window: int
) -> None:
    keys, values = _state(1, len(lengths), kv_heads, capacity, dim, [n + width for n in lengths])
    # As a model's RoPE leaves them: heads and positions transposed.
    queries = bfloat16(np.random.default_rng(2).normal(size=(len(lengths), width, heads, dim)) * 2).transpose(0, 2, 1, 3)
    got = wide(_attend(tmp_path, queries, keys, values, lengths, window))
    want = _exact(queries, keys, values, lengths, window)
    assert np.abs(got - want).max() < 2**-8 * max(1.0, np.abs(want).max())


def test_the_attention_kernel_gives_a_window_the_bits_of_single_positions(tmp_path: Path) -> None:
    width, start = 6, 61  # over the edge of a chunk
    keys, values = _state(3, 1, 1, 128, 64, [start + width])
    queries = bfloat16(np.random.default_rng(4).normal(size=(1, 3, width, 64)))
    whole = _attend(tmp_path, queries, keys, values, [start])
    for i in range(width):
        folder = tmp_path / str(i)
        folder.mkdir()
        one = _attend(folder, np.ascontiguousarray(queries[:, :, i : i + 1]), keys, values, [start + i])
        assert one.tobytes() == np.ascontiguousarray(whole[:, :, i : i + 1]).tobytes(), i


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 32), (3, 448, 64), (8, 192, 96)])
def test_the_projection_kernel_is_a_product_whose_rows_keep_their_bits(tmp_path: Path, rows: int, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(5)
    x, weight = bfloat16(rng.normal(size=(rows, inputs))), bfloat16(rng.normal(size=(outputs, inputs)))
    constants = {"TILES": 2, "THREADS": 64, "DEPTH": 64}

    def product(name: str, part: np.ndarray) -> np.ndarray:
        folder, out = tmp_path / name, np.full((len(part), outputs), 0x7FC0, np.uint16)
        folder.mkdir()
        given = {"x": part, "w": weight}
        cuda_on_cpu.run(folder, linear._SOURCE, linear._HEADER, given, {"out": out}, constants, (outputs // 32, 1, 1), 64)
        return out

    got = product("all", x)
    want = wide(x) @ wide(weight).T
    assert np.abs(wide(got) - want).max() < 2**-7 * np.abs(want).max()
    assert product("last", x[-1:]).tobytes() == got[-1:].tobytes()


# -- joint projections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_joint_projections_change_no_score(family: str, blas_mode: str) -> None:
    ids = mx.array([prompt(9)], mx.int32)
    plain, joined = model_of(family), model_of(family)
    linear.install(joined)
    kinds = [type(m) for _, m in joined.named_modules()]
    assert (linear.Joint in kinds) == (family != "phi3") and nn.Linear not in kinds
    assert_same_scores(plain(ids), joined(ids), exact=blas_mode == "none")


def assert_same_scores(a: mx.array, b: mx.array, *, exact: bool) -> None:
    assert mx.array_equal(a, b) if exact else mx.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_joint_projection_serves_its_layers_in_any_order_and_keeps_nothing() -> None:
    layers = [nn.Linear(8, n) for n in (4, 6)]
    want = [layer.weight for layer in layers]
    bias = [layer.bias for layer in layers]
    model = nn.Module()
    model.gate_proj, model.up_proj = layers
    linear.install(model)
    x, y = mx.random.normal((2, 3, 8)), mx.random.normal((1, 8))
    for first, second in ((model.up_proj, model.gate_proj), (model.gate_proj, model.up_proj)):
        a, b = first(x), second(x)
        up, gate = (a, b) if first is model.up_proj else (b, a)
        assert mx.allclose(gate, x @ want[0].T + bias[0], atol=1e-5) and mx.allclose(up, x @ want[1].T + bias[1], atol=1e-5)
        assert model.gate_proj._held is None, "an input outlives its forward"
    assert mx.allclose(model.up_proj(x), x @ want[1].T + bias[1], atol=1e-5)
    assert mx.allclose(model.up_proj(y), y @ want[1].T + bias[1], atol=1e-5), "what another input left behind was used"
    assert mx.allclose(model.up_proj(y), y @ want[1].T + bias[1], atol=1e-5), "a part that was taken is computed again"


# -- fused steps -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The kernel's place taken by MLX's own attention over the same arguments. Shapes of the queries it saw."""
    seen = []

    def attend(queries: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, scale: float, window: int | None) -> mx.array:
        rows, _, width, _ = queries.shape
        seen.append(queries.shape)
        mask = mx.arange(keys.shape[2]) <= (lengths[:rows, None] + mx.arange(width))[:, None, :, None]
        return mx.fast.scaled_dot_product_attention(queries, keys[:rows], values[:rows], scale=scale, mask=mask)

    monkeypatch.setattr(attention, "serves", lambda *_: True)
    monkeypatch.setattr(layer.attention, "attend", attend)
    return seen


def test_a_fused_step_hands_each_class_to_the_kernel(fused: list[tuple[int, ...]]) -> None:
    rig = Rig(graph_of(), FUSED)
    lengths = (5, 70, 9, 64)
    rows = [rig.ask(prompt(n), 20) for n in lengths]
    rig.run()
    for n, row in zip(lengths, rows, strict=True):
        assert_same(row, solo(graph_of(), BUCKETS, prompt(n), 20))
    assert {shape[2] for shape in fused} >= {1} and max(shape[2] for shape in fused) <= attention.MAX_WIDTH
    assert any(shape[0] == 2 for shape in fused), "no step had two rows of a class"


# -- compiled steps --------------------------------------------------------------------------------------------------


def _run(family: str, geometry: Geometry) -> tuple[list[Recorder], CompiledSteps | None]:
    """Five rows that join and leave one another, read one by one; a bare scheduler, since the rig's graph keeps scores."""
    rig = Rig(graph_of(family))
    group = WindowGroup(graph_of(family), GroupLimits(32, "after", geometry))
    scheduler = Scheduler(group, max_rows=3, prefill_chunk=32, max_kv_bytes=None)
    readers = [Recorder(rig, tokens) for tokens in (40, 9, 25, 31, 12)]
    rig.group = group
    for i, reader in enumerate(readers):
        spec: Any = RowSpec(reader, GREEDY, 0, reader.max_tokens, 4096)
        scheduler.submit(Entry(prompt(30 + 17 * i), deque([spec])))  # type: ignore[arg-type]
    while scheduler.tick():
        scheduler.check()
    return readers, group._compiled


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_steps_are_the_plain_ones(family: str) -> None:
    plain, nothing = _run(family, BUCKETS)
    compiled, steps = _run(family, COMPILED)
    assert nothing is None and steps is not None and len(steps._functions) >= 3
    for a, b in zip(plain, compiled, strict=True):
        assert a.ids == b.ids and len(a.ids) == a.max_tokens and a.end == b.end == "length"
        for (k, v), (k2, v2) in zip(a.state, b.state, strict=True):
            assert k.tobytes() == k2.tobytes() and v.tobytes() == v2.tobytes()


def test_a_geometry_is_compiled_once_it_lasts() -> None:
    rig = Rig(graph_of())
    group = WindowGroup(graph_of(), GroupLimits(32, "after", COMPILED))
    scheduler = Scheduler(group, max_rows=1, prefill_chunk=32, max_kv_bytes=None)
    reader: Any = Recorder(rig, 30)
    rig.group = group
    scheduler.submit(Entry(prompt(5), deque([RowSpec(reader, GREEDY, 0, 30, 4096)])))  # type: ignore[arg-type]
    found = []
    while scheduler.tick():
        found.append(len(group._compiled._functions))  # type: ignore[union-attr]
    assert 0 in found[:2] and set(found) == {0, 1}, "one row of one class has one geometry"
    assert found.index(1) >= 3


def test_a_compiled_step_leaves_nothing_behind_that_pins_the_state() -> None:
    """A live reference to a state array turns the next step into a copy of it (P1)."""
    group = WindowGroup(graph_of(), GroupLimits(64, "after", COMPILED))
    reader: Any = Recorder(Rig(graph_of()), 10**6)
    scheduler = Scheduler(group, max_rows=1, prefill_chunk=64, max_kv_bytes=None)
    scheduler.submit(Entry(prompt(2000), deque([RowSpec(reader, GREEDY, 0, 10**6, 10**6)])))  # type: ignore[arg-type]
    while not group.active or group.steps < 8:
        scheduler.tick()
    group._drain()
    held = group.kv_bytes
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(6):
        group.advance()
    group._drain()
    assert mx.get_peak_memory() - before < held / 2
    group.dispose(RuntimeError("the test is over"))
