"""Dense projections on CUDA: projections of one input joined into one product, and a kernel of our own for few rows.

MLX sets cuBLAS up anew for each product of more than one row, and that costs the host more than the device needs for the product
itself: fewer products, and none through cuBLAS where a step has up to eight rows. The kernel adds every row up in the same order, so
that its sums do not depend on how many rows share a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections that read the same input, in the order of the joint weight."""
MAX_ROWS = 8
"""Rows that `project` takes: one tile of the tensor cores."""
_THREADS, _DEPTH, _TILES = 256, 64, 2
"""Source: the fastest of six settings over Llama-8B's matrices on an H200; they differed by 5 %."""
_DTYPES = (mx.bfloat16, mx.float16)

_HEADER = """
struct alignas(16) Eight { uint32_t words[4]; };

template <typename T>
__device__ Eight stream(const T* from) {
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(from));
  return {raw.x, raw.y, raw.z, raw.w};
}

template <typename T>
__device__ void multiply(float (&sums)[4], const Eight& low, const Eight& high, const Eight& cols, int at);

#define MULTIPLY(T, NAME) \\
template <> \\
__device__ void multiply<T>(float (&sums)[4], const Eight& low, const Eight& high, const Eight& cols, int at) { \\
  asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \\
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \\
      : "r"(low.words[at]), "r"(high.words[at]), "r"(low.words[at + 1]), "r"(high.words[at + 1]), \\
        "r"(cols.words[at]), "r"(cols.words[at + 1])); \\
}
MULTIPLY(__nv_bfloat16, "bf16")
MULTIPLY(__half, "f16")
"""

# Block: 16 * TILES outputs by up to 8 rows. Its warps share the inputs out among them, DEPTH at a time, and their sums are added in
# order. A lane loads 8 consecutive inputs of a weight row and of an activation row; which of them the tensor core calls k = 0, 1, ...
# does not matter to a sum, as long as both sides agree. The next inputs are on their way while these are multiplied.
_SOURCE = """
constexpr int WARPS = THREADS / 32, HALVES = DEPTH / 32;
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = lane / 4, part = lane % 4;
const int rows = x_shape[0], inputs = x_shape[1], outputs = w_shape[0], first = blockIdx.x * 16 * TILES;
const T* weight = w + static_cast<int64_t>(first + pair) * inputs + part * 8;
const T* from = x + static_cast<int64_t>(pair) * inputs + part * 8;

float sums[TILES][4];
#pragma unroll
for (int t = 0; t < TILES; ++t) sums[t][0] = sums[t][1] = sums[t][2] = sums[t][3] = 0.f;

Eight low[2][TILES][HALVES], high[2][TILES][HALVES], cols[2][HALVES];
auto load = [&](int k, int to) {
  #pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    #pragma unroll
    for (int t = 0; t < TILES; ++t) {
      low[to][t][h] = stream<T>(weight + static_cast<int64_t>(t * 16) * inputs + k + h * 32);
      high[to][t][h] = stream<T>(weight + static_cast<int64_t>(t * 16 + 8) * inputs + k + h * 32);
    }
    cols[to][h] = Eight{0, 0, 0, 0};
    if (pair < rows) cols[to][h] = *reinterpret_cast<const Eight*>(from + k + h * 32);
  }
};
auto add = [&](int of) {
  #pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    #pragma unroll
    for (int t = 0; t < TILES; ++t) {
      multiply<T>(sums[t], low[of][t][h], high[of][t][h], cols[of][h], 0);
      multiply<T>(sums[t], low[of][t][h], high[of][t][h], cols[of][h], 2);
    }
  }
};
constexpr int STRIDE = WARPS * DEPTH;
int k = warp * DEPTH;
if (k < inputs) load(k, 0);
for (; k < inputs; k += 2 * STRIDE) {
  if (k + STRIDE < inputs) load(k + STRIDE, 1);
  add(0);
  if (k + STRIDE < inputs) {
    if (k + 2 * STRIDE < inputs) load(k + 2 * STRIDE, 0);
    add(1);
  }
}

__shared__ float all[TILES][WARPS][16][9];
#pragma unroll
for (int t = 0; t < TILES; ++t) {
  #pragma unroll
  for (int e = 0; e < 4; ++e) all[t][warp][pair + e / 2 * 8][part * 2 + e % 2] = sums[t][e];
}
__syncthreads();
for (int at = threadIdx.x; at < 16 * TILES * rows; at += THREADS) {
  const int output = at % (16 * TILES), row = at / (16 * TILES);
  float total = 0.f;
  #pragma unroll
  for (int s = 0; s < WARPS; ++s) total += all[output / 16][s][output % 16][row];
  out[static_cast<int64_t>(row) * outputs + first + output] = static_cast<T>(total);
}
"""


def serves(rows: int, weight: mx.array) -> bool:
    """Whether `project` takes this many rows of this weight [outputs, inputs]."""
    return rows <= MAX_ROWS and weight.shape[0] % (16 * _TILES) == 0 and weight.shape[1] % _DEPTH == 0 and weight.dtype in _DTYPES


def project(x: mx.array, weight: mx.array) -> mx.array:
    """`x @ weight.T` for x [..., inputs] of at most MAX_ROWS rows, sums in float32; a row's bits do not depend on the others."""
    outputs, inputs = weight.shape
    rows = x.size // inputs
    (out,) = _kernel()(
        inputs=[x.reshape(rows, inputs), weight],
        template=[("T", x.dtype), ("TILES", _TILES), ("THREADS", _THREADS), ("DEPTH", _DEPTH)],
        grid=(outputs // (16 * _TILES) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )
    return out.reshape(*x.shape[:-1], outputs)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    return mx.fast.cuda_kernel(name="mlxnb_project", input_names=["x", "w"], output_names=["out"], source=_SOURCE, header=_HEADER)


def multiply(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """A dense layer, by whichever product suits the number of rows."""
    if x.dtype == weight.dtype and serves(x.size // weight.shape[1], weight):
        out = project(x, weight)
        return out if bias is None else out + bias
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


class Single(nn.Linear):  # type: ignore[misc]
    """A dense layer that goes through `multiply`."""

    def __call__(self, x: mx.array) -> mx.array:
        return multiply(x, self["weight"], self.get("bias"))


class Joint(nn.Module):  # type: ignore[misc]
    """The first of several dense layers that read one input: it computes all of them and hands the others their part.

    Holds an input and its results only between the first and the last of the calls of one forward.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = mx.concatenate([layer["weight"] for layer in layers])
        if "bias" in layers[0]:
            self.bias = mx.concatenate([layer["bias"] for layer in layers])
        ends, end = [], 0
        for layer in layers:
            end += layer["weight"].shape[0]
            ends.append(end)
        self._ends = ends
        self._held: tuple[mx.array, dict[int, mx.array]] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        return self.part(x, 0)

    def part(self, x: mx.array, index: int) -> mx.array:
        if self._held is None or self._held[0] is not x or index not in self._held[1]:
            out = multiply(x, self["weight"], self.get("bias"))
            self._held = (x, dict(enumerate(mx.split(out, self._ends[:-1], axis=-1))))
        parts = self._held[1]
        taken = parts.pop(index)
        if not parts:
            self._held = None
        return taken


class Follower(nn.Module):  # type: ignore[misc]
    """One of the other layers of a `Joint`."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self._joint = (joint,)  # in a tuple: not a child of its own
        self._index = index

    def __call__(self, x: mx.array) -> mx.array:
        return self._joint[0].part(x, self._index)


def install(model: nn.Module) -> None:
    """Join what reads the same input, and let every dense layer of `model` go through `multiply`. Takes the memory of one layer more
    while it runs."""
    for _, module in model.named_modules():
        for names in TOGETHER:
            layers = [module.get(name) for name in names]
            if all(type(layer) is nn.Linear for layer in layers) and _alike(layers):
                joint = Joint(layers)
                mx.eval(joint.parameters())
                module.update_modules({name: Follower(joint, i) if i else joint for i, name in enumerate(names)})
    for _, module in model.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = Single


def _alike(layers: Sequence[Any]) -> bool:
    kinds = {(layer["weight"].shape[1], layer["weight"].dtype, "bias" in layer) for layer in layers}
    return len(kinds) == 1
