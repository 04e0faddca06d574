"""Attention of a few query positions per row over slot buffers.

MLX 0.32 has no fused CUDA kernel for one position with a mask: scores are materialised, and each K/V head is copied once per query
head. This kernel reads a row's keys and values once, up to the row's own length, so that a step costs what its rows hold, not what
their buffers could hold, and has the same shapes at every step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

MAX_WIDTH = 16
"""Query positions per row. Wider windows are bound by arithmetic and go to MLX's kernels."""
_CHUNK = 512
"""Keys of one block, at fixed positions: how a row's sums are split depends on nothing else."""
_THREADS = 256
_KEYS = 3
"""Keys that a team loads before it needs the first: more would take registers that a second block needs."""
_ROWS = 4
_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")

_HEADER = """
struct alignas(16) Eight { uint32_t words[4]; };

template <typename T>
__device__ void widen(const Eight& packed, float* out) {
  const T* values = reinterpret_cast<const T*>(packed.words);
  #pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = static_cast<float>(values[i]);
}
"""

# Block: one chunk of keys, one K/V head, ROWS query rows of one batch row. A team of D / 8 lanes takes one key at a time, 16 bytes per
# lane, and keeps a running maximum, sum and weighted values for each query row; the teams are combined at the end.
_SOURCE = """
constexpr int LANES = D / 8, TEAMS = THREADS / LANES, WARPS = THREADS / 32;
constexpr float LEAST = -1e30f;

const int width = q_shape[2], queries = G * width, groups = (queries + ROWS - 1) / ROWS;
const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
const int head = blockIdx.y, row = blockIdx.z / groups, group = blockIdx.z % groups;
const int length = lengths[row], total = length + width;
const int first = blockIdx.x * CHUNK, last = min(total, first + CHUNK);
if (first >= total) return;

const int64_t slot = (static_cast<int64_t>(row) * gridDim.y + head) * k_shape[2];
const T* key_row = k + slot * D + lane * 8;
const T* value_row = v + slot * D + lane * 8;

float query[ROWS][8], sums[ROWS][8], most[ROWS], weight[ROWS];
int newest[ROWS];
#pragma unroll
for (int r = 0; r < ROWS; ++r) {
  const int at = group * ROWS + r, g = at / width, i = at % width;
  most[r] = LEAST, weight[r] = 0.f, newest[r] = -1;
  #pragma unroll
  for (int e = 0; e < 8; ++e) query[r][e] = sums[r][e] = 0.f;
  if (at < queries) {
    const T* from = q + row * q_strides[0] + (head * G + g) * q_strides[1] + i * q_strides[2] + lane * 8;
    widen<T>(*reinterpret_cast<const Eight*>(from), query[r]);
    #pragma unroll
    for (int e = 0; e < 8; ++e) query[r][e] *= SCALE;
    newest[r] = length + i;
  }
}

for (int start = first; start < last; start += TEAMS * KEYS) {
  const int base = start + team;
  Eight keys[KEYS], values[KEYS];
  #pragma unroll
  for (int u = 0; u < KEYS; ++u) {
    const int at = min(base + u * TEAMS, last - 1) * D;
    keys[u] = *reinterpret_cast<const Eight*>(key_row + at);
    values[u] = *reinterpret_cast<const Eight*>(value_row + at);
  }
  float score[ROWS][KEYS];
  #pragma unroll
  for (int u = 0; u < KEYS; ++u) {
    float wide[8];
    widen<T>(keys[u], wide);
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float dot = 0.f;
      #pragma unroll
      for (int e = 0; e < 8; ++e) dot += query[r][e] * wide[e];
      score[r][u] = dot;
    }
  }
  #pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      #pragma unroll
      for (int u = 0; u < KEYS; ++u) score[r][u] += __shfl_xor_sync(0xffffffffu, score[r][u], step);
    }
  }
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float higher = most[r];
    bool seen[KEYS];
    #pragma unroll
    for (int u = 0; u < KEYS; ++u) {
      const int at = base + u * TEAMS;
      seen[u] = at <= newest[r] && (WINDOW == 0 || at > newest[r] - WINDOW) && at < last;
      if (seen[u]) higher = fmaxf(higher, score[r][u]);
    }
    const float shrink = exp2f(most[r] - higher);
    most[r] = higher;
    weight[r] *= shrink;
    #pragma unroll
    for (int e = 0; e < 8; ++e) sums[r][e] *= shrink;
    #pragma unroll
    for (int u = 0; u < KEYS; ++u) {
      score[r][u] = seen[u] ? exp2f(score[r][u] - higher) : 0.f;
      weight[r] += score[r][u];
    }
  }
  #pragma unroll
  for (int u = 0; u < KEYS; ++u) {
    float wide[8];
    widen<T>(values[u], wide);
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      #pragma unroll
      for (int e = 0; e < 8; ++e) sums[r][e] += score[r][u] * wide[e];
    }
  }
}

// The teams of a warp, then the warps.
#pragma unroll
for (int step = LANES; step < 32; step *= 2) {
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float higher = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], step));
    const float shrink = exp2f(most[r] - higher);
    most[r] = higher;
    weight[r] *= shrink;
    weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], step);
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
      sums[r][e] *= shrink;
      sums[r][e] += __shfl_xor_sync(0xffffffffu, sums[r][e], step);
    }
  }
}
__shared__ float all_most[WARPS][ROWS], all_weight[WARPS][ROWS], all_sums[WARPS][ROWS][D];
const int warp = threadIdx.x / 32;
if (threadIdx.x % 32 < LANES) {
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (lane == 0) all_most[warp][r] = most[r], all_weight[warp][r] = weight[r];
    #pragma unroll
    for (int e = 0; e < 8; ++e) all_sums[warp][r][lane * 8 + e] = sums[r][e];
  }
}
__syncthreads();
for (int at = threadIdx.x; at < ROWS * D; at += THREADS) {
  const int r = at / D, d = at % D, query_at = group * ROWS + r;
  if (query_at >= queries) break;
  float higher = LEAST, total_weight = 0.f, value = 0.f;
  #pragma unroll
  for (int w = 0; w < WARPS; ++w) higher = fmaxf(higher, all_most[w][r]);
  #pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float shrink = exp2f(all_most[w][r] - higher);
    total_weight += all_weight[w][r] * shrink;
    value += all_sums[w][r][d] * shrink;
  }
  const int64_t place = (static_cast<int64_t>(row) * width + query_at % width) * gridDim.y * G + head * G + query_at / width;
  STORE
}
"""

_WHOLE = "out[place * D + d] = static_cast<T>(value / total_weight);"
_PART = """
  const int64_t part = place * gridDim.x + blockIdx.x;
  sums_out[part * D + d] = value;
  if (d == 0) stats_out[part * 2] = higher, stats_out[part * 2 + 1] = total_weight;
"""

# Block: one query row, D threads; its chunks in order.
_JOIN = """
const int row = blockIdx.z, chunks = (lengths[row] + gridDim.y + CHUNK - 1) / CHUNK;
const int64_t place = (static_cast<int64_t>(row) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
const int64_t start = place * stats_shape[3];
float higher = -1e30f, total_weight = 0.f, value = 0.f;
for (int c = 0; c < chunks; ++c) higher = fmaxf(higher, stats[(start + c) * 2]);
for (int c = 0; c < chunks; ++c) {
  const float shrink = exp2f(stats[(start + c) * 2] - higher);
  total_weight += stats[(start + c) * 2 + 1] * shrink;
  value += sums[(start + c) * D + threadIdx.x] * shrink;
}
out[place * D + threadIdx.x] = static_cast<T>(value / total_weight);
"""


def serves(key_dim: int, value_dim: int, dtype: str) -> bool:
    """Whether `attend` takes K/V of these widths."""
    return key_dim == value_dim and key_dim in _DIMS and dtype in _DTYPES


def attend(queries: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, scale: float, window: int | None = None) -> mx.array:
    """Causal attention of `queries` [B, heads, L, D], L <= MAX_WIDTH, row r at positions lengths[r] .. lengths[r] + L - 1.

    keys, values: whole buffers [slots, kv_heads, capacity, D]; slot r holds row r, the window's own keys included. What lies beyond a
    row's window is never read. lengths: int32 [B or more]. window: positions a query sees, None is all. Returns [B, heads, L, D].
    """
    rows, heads, width, dim = queries.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    per_head = heads // kv_heads * width
    group = min(_ROWS, per_head)
    chunks = -(-capacity // _CHUNK)
    call: dict[str, Any] = {
        "inputs": [queries, keys, values, lengths],
        "template": [
            ("T", queries.dtype), ("D", dim), ("G", heads // kv_heads), ("ROWS", group), ("THREADS", _THREADS), ("CHUNK", _CHUNK),
            ("KEYS", _KEYS), ("WINDOW", window or 0),
        ],
        "grid": (chunks * _THREADS, kv_heads, rows * -(-per_head // group)),
        "threadgroup": (_THREADS, 1, 1),
    }  # fmt: skip
    shape = (rows, width, heads, dim)
    if chunks == 1:
        (out,) = _kernel(scale, True)(**call, output_shapes=[shape], output_dtypes=[queries.dtype])
        return out.transpose(0, 2, 1, 3)
    sums, stats = _kernel(scale, False)(
        **call, output_shapes=[(rows, width, heads, chunks, dim), (rows, width, heads, chunks, 2)], output_dtypes=[mx.float32] * 2
    )
    (out,) = _joiner()(
        inputs=[sums, stats, lengths],
        template=[("T", queries.dtype), ("D", dim), ("CHUNK", _CHUNK)],
        grid=(heads * dim, width, rows),
        threadgroup=(dim, 1, 1),
        output_shapes=[shape],
        output_dtypes=[queries.dtype],
    )
    return out.transpose(0, 2, 1, 3)


@lru_cache(maxsize=16)
def _kernel(scale: float, whole: bool) -> Any:
    # Scores are in units of log2, so that exp2 gives the weights.
    return mx.fast.cuda_kernel(
        name="mlxnb_attend" if whole else "mlxnb_attend_part",
        input_names=["q", "k", "v", "lengths"],
        output_names=["out"] if whole else ["sums_out", "stats_out"],
        source=_SOURCE.replace("STORE", _WHOLE if whole else _PART),
        header=_HEADER + f"constexpr float SCALE = {scale * 1.4426950408889634!r}f;\n",
        ensure_row_contiguous=False,
    )


@lru_cache(maxsize=1)
def _joiner() -> Any:
    names = ["sums", "stats", "lengths"]
    return mx.fast.cuda_kernel(name="mlxnb_attend_join", input_names=names, output_names=["out"], source=_JOIN)
