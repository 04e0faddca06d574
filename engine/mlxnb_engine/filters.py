"""Pure score arithmetic of the sampler: penalties, truncation filters, keyed noise and the HLG tone curves.

Every function maps `[R, V]` arrays (rows, vocabulary) to `[R, V]` arrays and treats each row alone; a parameter that
may differ between rows is a column `[R, 1]`. Nothing here evaluates an array, draws from MLX's global random state or
changes an argument. The filters keep the numbers of mlx-lm 0.32.2 `sample_utils`, which is their oracle in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

NEG_INF = -math.inf
SMALLEST_UNIFORM = 2.0**-126
MAX_GAIN_FLOAT16 = 100.0
HLG_A = 0.17883277
HLG_B = 0.28466892
HLG_C = 0.55991073


def column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    """One parameter per row, `[R, 1]`."""
    return mx.array(list(values), dtype=dtype)[:, None]


# --- penalties. ids: `[R, W]` history, newest last; lengths: how many trailing ids of a row are real; sizes: how many of them
# the penalty looks at, 0 is all. A row with the neutral strength, or without history, keeps its bits. --------------------


def repetition(x: mx.array, ids: mx.array, lengths: Sequence[int], strengths: Sequence[float], sizes: Sequence[int]) -> mx.array:
    """`x*p if x < 0 else x/p`, once per distinct token; 1 is neutral."""
    if all(p == 1 for p in strengths):
        return x
    p = column([p if n else 1.0 for p, n in zip(strengths, lengths, strict=True)], x.dtype)
    at, _ = _window(ids, lengths, sizes)
    seen = mx.take_along_axis(x, at, axis=1)
    return mx.put_along_axis(x, at, mx.where(seen < 0, seen * p, seen / p), axis=1)


def presence(x: mx.array, ids: mx.array, lengths: Sequence[int], strengths: Sequence[float], sizes: Sequence[int]) -> mx.array:
    """Subtract once per distinct token; 0 is neutral."""
    if not any(strengths):
        return x
    p = column([p if n else 0.0 for p, n in zip(strengths, lengths, strict=True)], x.dtype)
    at, _ = _window(ids, lengths, sizes)
    return mx.put_along_axis(x, at, mx.take_along_axis(x, at, axis=1) - p, axis=1)


def frequency(x: mx.array, ids: mx.array, lengths: Sequence[int], strengths: Sequence[float], sizes: Sequence[int]) -> mx.array:
    """Subtract per occurrence, one subtraction each: multiplying by a count would round differently from mlx-lm."""
    if not any(strengths):
        return x
    at, real = _window(ids, lengths, sizes)
    return x.at[mx.arange(x.shape[0])[:, None], at].subtract(mx.where(real, column(strengths, x.dtype), 0.0))


def _window(ids: mx.array, lengths: Sequence[int], sizes: Sequence[int]) -> tuple[mx.array, mx.array]:
    """The ids a penalty looks at, and which columns are real. Other columns repeat the row's newest id, so that all writes
    to one score carry the same value and their order does not matter."""
    width = ids.shape[1]
    starts = [width - min(n, size or n) for n, size in zip(lengths, sizes, strict=True)]
    real = mx.arange(width)[None] >= mx.array(starts)[:, None]
    return mx.where(real, ids, ids[:, -1:]), real


# --- filters --------------------------------------------------------------------------------------------------------


def top_p(logprobs: mx.array, mass: mx.array) -> mx.array:
    """Keep a token iff the mass of strictly likelier tokens is below `mass` times the total; ties with the last kept stay.

    mass: float32 column. One full sort. At least the likeliest token is kept, even if `mass` underflows to 0.
    """
    ascending = mx.sort(logprobs, axis=-1)
    p = mx.exp(ascending.astype(mx.float32))
    above = mx.cumsum(p, axis=-1, reverse=True, inclusive=False)
    total = above[:, :1] + p[:, :1]
    dropped = (above >= mass * total).sum(axis=-1, keepdims=True)
    # A row without mass would count V dropped tokens, and an index out of range reads foreign memory.
    dropped = mx.minimum(dropped, logprobs.shape[-1] - 1)
    return mx.where(logprobs < mx.take_along_axis(ascending, dropped, axis=-1), NEG_INF, logprobs)


def min_p(logprobs: mx.array, log_ratio: mx.array, keep: int) -> mx.array:
    """Keep `l >= max(l) + log_ratio`, and always the `keep` likeliest. log_ratio: column of ln(min_p)."""
    remove = logprobs < mx.max(logprobs, axis=-1, keepdims=True) + log_ratio
    if keep > 1:
        best = mx.argpartition(logprobs, kth=-keep, axis=-1)[:, -keep:]
        remove = mx.put_along_axis(remove, best, mx.array(False), axis=-1)
    return mx.where(remove, NEG_INF, logprobs)


def xtc(logprobs: mx.array, apply: mx.array, threshold: mx.array, exempt: mx.array | None) -> mx.array:
    """Exclude top choices: drop every token with `p > min{p : p > threshold}` in the rows where `apply` is true.

    apply: bool column, one coin per row. exempt: `[R, V]` bool of ids that are never dropped, or None.
    """
    p = mx.softmax(logprobs, axis=-1)
    least = mx.where(p > threshold, p, math.inf).min(axis=-1, keepdims=True)
    drop = mx.logical_and(p > least, apply)
    if exempt is not None:
        drop = mx.logical_and(drop, mx.logical_not(exempt))
    return mx.where(drop, NEG_INF, logprobs)


def top_k(logprobs: mx.array, k: int) -> mx.array:
    """Keep exactly the `k` likeliest, 0 < k < V."""
    best = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, :k]
    return mx.put_along_axis(mx.full(logprobs.shape, NEG_INF, logprobs.dtype), best, mx.take_along_axis(logprobs, best, axis=-1), axis=-1)


def scale(kept: mx.array, gains: Sequence[float]) -> mx.array:
    """`kept` times each row's gain, in the dtype of the scores.

    In float16 a large gain would push even the best score to -inf and leave nothing to draw, so such rows use float32.
    """
    if kept.dtype != mx.float16 or max(gains) <= MAX_GAIN_FLOAT16:
        return kept * column(gains, kept.dtype)
    wide = column(gains)
    narrow = kept * column([min(gain, MAX_GAIN_FLOAT16) for gain in gains], mx.float16)
    return mx.where(wide > MAX_GAIN_FLOAT16, kept.astype(mx.float32) * wide, narrow.astype(mx.float32))


def likeliest(logprobs: mx.array, k: int) -> mx.array:
    """Ids `[R, k]` uint32 of the k likeliest tokens, in no order; of ties at the edge the lowest ids. 0 <= k <= V <= 2^23."""
    rows, size = logprobs.shape
    if k == 0:
        return mx.zeros((rows, 0), dtype=mx.uint32)
    edge = -mx.partition(-logprobs, kth=k - 1, axis=1)[:, k - 1 : k]
    # Above the edge first, then ties at the edge by id: whole numbers that float32 holds exactly.
    tied = mx.where(logprobs == edge, mx.arange(size, 0, -1).astype(mx.float32), 0.0)
    order = mx.where(logprobs > edge, float(size + 1), tied)
    # Gathered, not sliced: a slice would keep the [R, V] index buffer alive as long as the k ids.
    return mx.take(mx.argpartition(-order, kth=k - 1, axis=1), mx.arange(k), axis=1)


def gumbel(keys: mx.array, size: int) -> mx.array:
    """Standard Gumbel noise `[R, size]` in float32, row r from `keys[r]` alone.

    Adding it to scores and taking the argmax draws from their softmax. Bit for bit the noise inside
    `mx.random.categorical` of a 1-D array, except at u = 0, where -inf would let a masked token win over the only
    token left. A `[1, V]` input must not be handed to `categorical`: MLX 0.32.4 draws differently there.
    """
    u = mx.vmap(lambda key: mx.random.uniform(shape=(size,), key=key))(keys)
    return -mx.log(-mx.log(mx.maximum(u, SMALLEST_UNIFORM)))


# --- HLG (semantics section 3; after the hybrid log-gamma curves of ITU-R BT.2100) -----------------------------------


def anchor_max(logprobs: mx.array, offset: mx.array) -> mx.array:
    """mu = max(l) - offset, as a column."""
    return mx.max(logprobs, axis=-1, keepdims=True).astype(mx.float32) - offset


def anchor_entropy(logprobs: mx.array) -> mx.array:
    """mu = -H, the expected log probability, as a column. Tokens of probability 0 contribute 0."""
    wide = logprobs.astype(mx.float32)
    return mx.where(wide == NEG_INF, 0.0, mx.exp(wide) * wide).sum(axis=-1, keepdims=True)


def anchor_median(logprobs: mx.array) -> mx.array:
    """mu = log probability of the token at which the likeliest tokens together reach half the mass, as a column."""
    ascending = mx.sort(logprobs.astype(mx.float32), axis=-1)
    p = mx.exp(ascending)
    reach = mx.cumsum(p, axis=-1, reverse=True)
    half = 0.5 * reach[:, :1]
    last = (reach >= half).sum(axis=-1, keepdims=True) - 1
    return mx.take_along_axis(ascending, mx.maximum(last, 0), axis=-1)


def tone_curve(logprobs: mx.array, mu: mx.array, gain: mx.array, width: mx.array, toe: mx.array, head: mx.array) -> mx.array:
    """Three-part HLG curve of `z = l - mu`: linear with slope `gain` for |z| <= width, logarithmic beyond.

        z < -w: -m*w - m*bt*ln(1 + (-z - w)/bt)      z > w: m*w + m*bh*ln(1 + (z - w)/bh)

    All parameters are float32 columns with finite width and toe, head > 0. Strictly monotone up to rounding;
    -inf stays -inf. Returns float32.
    """
    z = logprobs.astype(mx.float32) - mu
    low = -gain * width - gain * toe * mx.log1p((-z - width) / toe)
    high = gain * width + gain * head * mx.log1p((z - width) / head)
    return mx.where(z < -width, low, mx.where(z > width, high, gain * z))


def hlg_oetf(logprobs: mx.array) -> mx.array:
    """Literal HLG OETF as logits: `ln v` with `P = p / p_max`; `v = sqrt(3P)` up to 1/12, else `a*ln(12P - b) + c`. float32."""
    relative = _below_max(logprobs)
    p = mx.exp(relative)
    linear = 0.5 * (relative + math.log(3.0))
    return mx.where(p <= 1.0 / 12.0, linear, mx.log(HLG_A * mx.log(12.0 * p - HLG_B) + HLG_C))


def hlg_gamma(peak_luminance: float) -> float:
    """System gamma for a nominal peak luminance in cd/m2: `1.2 + 0.42 * log10(Lw / 1000)`."""
    return 1.2 + 0.42 * math.log10(peak_luminance / 1000.0)


def hlg_eotf(logprobs: mx.array, gamma: float) -> mx.array:
    """HLG EOTF as logits `gamma * lnE`, with `e = p / p_max`. float32.

    `lnE = 2*ln(e) - ln 3` up to e = 1/2, else `ln((exp((e - c)/a) + b)/12)`.
    """
    relative = _below_max(logprobs)
    e = mx.exp(relative)
    bright = mx.log((mx.exp((e - HLG_C) / HLG_A) + HLG_B) / 12.0)
    return gamma * mx.where(e <= 0.5, 2.0 * relative - math.log(3.0), bright)


def hlg_chain(logprobs: mx.array, gamma: float, alpha: float = 1.0) -> mx.array:
    """Full chain `alpha * OETF^gamma` as logits: `ln(alpha) + gamma * ln v`. alpha > 0. float32."""
    return math.log(alpha) + gamma * hlg_oetf(logprobs)


def _below_max(logprobs: mx.array) -> mx.array:
    """`ln(p / p_max)` in float32."""
    wide = logprobs.astype(mx.float32)
    return wide - mx.max(wide, axis=-1, keepdims=True)
