"""The HLG tone curve and its literal transfer functions (G29)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxnb_engine import filters
from mlxnb_engine.filters import column
from mlxnb_engine.sampling import SamplingSession, select
from mlxnb_engine.types import HlgSpec, SamplingSpec

INF = math.inf
DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def logprobs_of(rows: int, size: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    x = (mx.random.normal((rows, size), key=mx.random.key(seed)) * 3).astype(dtype)
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def curve(lp: mx.array, mu: float, gain: float, width: float, toe: float, head: float) -> mx.array:
    return filters.tone_curve(lp, column([mu]), *(column([v]) for v in (gain, width, toe, head)))


def draws(spec: SamplingSpec, x: mx.array, seeds: int) -> list[int]:
    rows = [SamplingSession(spec, seed, x.shape[1]) for seed in range(seeds)]
    return select(rows, mx.broadcast_to(x, (seeds, x.shape[1]))).tokens.tolist()


def scalar_curve(lp: float, mu: float, m: float, w: float, bt: float, bh: float) -> float:
    """The three parts as semantics section 3 writes them, in 64-bit Python."""
    z = lp - mu
    if z < -w:
        return -m * w - m * bt * math.log(1 + (-z - w) / bt)
    return m * w + m * bh * math.log(1 + (z - w) / bh) if z > w else m * z


POSITIVE = st.floats(0.05, 5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), mu=st.floats(-12, 0), gain=POSITIVE, width=st.floats(0, 6), toe=POSITIVE, head=POSITIVE)
def test_the_curve_is_its_formula_is_monotone_and_keeps_the_argmax_and_minus_infinity(seed, mu, gain, width, toe, head) -> None:
    lp = mx.sort(logprobs_of(1, 200, seed), axis=-1)
    lp[0, :3] = -INF
    out = curve(lp, mu, gain, width, toe, head)
    values = np.array(out)[0]
    want = [scalar_curve(v, mu, gain, width, toe, head) for v in lp[0, 3:].tolist()]
    assert np.allclose(values[3:], want, rtol=2e-5, atol=2e-5)
    assert (values[:3] == -np.inf).all() and np.isfinite(values[3:]).all()
    assert (np.diff(values[3:]) >= -1e-5).all() and values[199] == values.max()


def test_the_curve_compresses_both_ends_and_leaves_the_middle_linear() -> None:
    lp = mx.array([[-20.0, -10.0, -5.0, -4.0, -3.0, -0.1]])
    out = curve(lp, -4.0, 2.0, 1.0, 1.0, 1.0)[0].tolist()
    assert out[2:5] == [-2.0, 0.0, 2.0]
    assert out[1] - out[0] < 2.0 * 10 and out[5] - out[4] < 2.0 * 2.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("anchor", ["max", "entropy", "median"])
def test_degenerate_curves_are_bit_exact_to_temperature(anchor, dtype: mx.Dtype) -> None:
    x = logprobs_of(1, 307, 4, dtype)
    plain = SamplingSpec(temp=0.8)
    for flat in (HlgSpec(width=INF), HlgSpec(width=1.0, toe=0.0), HlgSpec(width=1.0, head=-1.0), HlgSpec(gain=1 / 0.8)):
        spec = replace(plain, hlg=replace(flat, anchor=anchor))
        assert draws(spec, x, 40) == draws(plain, x, 40)
    assert draws(replace(plain, hlg=HlgSpec(width=0.1, toe=0.1, head=0.1, anchor=anchor)), x, 40) != draws(plain, x, 40)


def test_a_degenerate_row_beside_a_curved_one_keeps_its_bits() -> None:
    x, plain = logprobs_of(2, 307, 4, mx.bfloat16), SamplingSpec(temp=0.8)
    for seed in range(40):
        flat = SamplingSession(replace(plain, hlg=HlgSpec()), seed, 307)
        curved = SamplingSession(replace(plain, hlg=HlgSpec(width=0.5)), seed, 307)
        together = select([flat, curved], x).tokens.tolist()
        solo = [
            select([SamplingSession(spec, seed, 307)], x[r : r + 1]).tokens.item()
            for r, spec in enumerate((plain, replace(plain, hlg=HlgSpec(width=0.5))))
        ]
        assert together == solo


def test_the_curve_skips_top_p_and_top_k_but_not_min_p_and_greedy_ignores_it() -> None:
    x = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    hlg = HlgSpec(width=1.0, anchor="entropy")
    base = SamplingSpec(temp=1.0, hlg=hlg)
    assert draws(replace(base, top_p=0.1, top_k=1), x, 200) == draws(base, x, 200)
    assert set(draws(base, x, 200)) == {0, 1, 2, 3}
    assert set(draws(replace(base, min_p=0.9), x, 200)) == {0}
    assert set(draws(replace(base, temp=0.0), x, 5)) == {0}


def test_the_anchors_are_the_offset_maximum_the_mean_logprob_and_the_logprob_at_half_the_mass() -> None:
    p = [0.3, 0.15, 0.15, 0.4, 0.0]
    lp = mx.log(mx.array([p]))
    assert filters.anchor_max(lp, column([1.5])).item() == pytest.approx(math.log(0.4) - 1.5)
    assert filters.anchor_entropy(lp).item() == pytest.approx(sum(q * math.log(q) for q in p if q))
    assert filters.anchor_median(lp).item() == pytest.approx(math.log(0.3))
    assert filters.anchor_median(mx.log(mx.array([[0.6, 0.4]]))).item() == pytest.approx(math.log(0.6))


def test_the_anchor_is_taken_before_the_filters_mask_anything() -> None:
    x = mx.log(mx.array([[0.3, 0.28, 0.22, 0.2]]))
    spec = SamplingSpec(temp=1.0, min_p=0.9, hlg=HlgSpec(width=0.0, toe=0.05, head=0.05, anchor="entropy"))
    seen: list[list[float]] = []
    genuine: Callable[..., mx.array] = filters.tone_curve

    def spy(lp: mx.array, mu: mx.array, *rest: mx.array) -> mx.array:
        seen.append([mu[0].item(), filters.anchor_entropy(lp)[0].item()])
        return genuine(lp, mu, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "tone_curve", spy)
        assert set(draws(spec, x, 50)) <= {0, 1}
    unmasked, masked = filters.anchor_entropy(x).item(), seen[0][1]
    assert seen[0][0] == pytest.approx(unmasked) and abs(unmasked - masked) > 0.1


def test_a_gain_replaces_one_over_the_temperature() -> None:
    x = logprobs_of(1, 100, 2)
    hlg = HlgSpec(width=0.7, gain=2.0)
    assert draws(SamplingSpec(temp=9.0, hlg=hlg), x, 40) == draws(SamplingSpec(temp=0.5, hlg=replace(hlg, gain=None)), x, 40)


# --- literal transfer functions --------------------------------------------------------------------------------------

A, B, C = 0.17883277, 0.28466892, 0.55991073
P = [1e-9, 1e-4, 0.02, 1 / 12 - 1e-6, 1 / 12 + 1e-6, 0.2, 0.5, 0.500001, 0.75, 1.0]


def oetf(p: float) -> float:
    return math.sqrt(3 * p) if p <= 1 / 12 else A * math.log(12 * p - B) + C


def eotf(e: float) -> float:
    return e * e / 3 if e <= 0.5 else (math.exp((e - C) / A) + B) / 12


def test_the_literal_curves_match_their_formulas_and_undo_each_other() -> None:
    lp = mx.log(mx.array([P])) - 2.5  # any common factor: only p / p_max counts
    assert np.allclose(np.array(filters.hlg_oetf(lp))[0], [math.log(oetf(p)) for p in P], rtol=1e-5, atol=2e-6)
    assert np.allclose(np.array(filters.hlg_eotf(lp, 1.3))[0], [1.3 * math.log(eotf(p)) for p in P], rtol=1e-5, atol=2e-6)
    back = filters.hlg_eotf(filters.hlg_oetf(lp), 1.0)
    assert np.allclose(np.array(back)[0], np.log(P), rtol=1e-4, atol=1e-4)


def test_the_chain_is_alpha_times_the_oetf_to_the_gamma() -> None:
    lp = mx.log(mx.array([P]))
    gamma = filters.hlg_gamma(400.0)
    assert gamma == pytest.approx(1.2 + 0.42 * math.log10(0.4)) and filters.hlg_gamma(1000.0) == 1.2
    want = [math.log(0.7 * oetf(p) ** gamma) for p in P]
    assert np.allclose(np.array(filters.hlg_chain(lp, gamma, 0.7))[0], want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["oetf", "eotf", "chain"])
def test_the_literal_curves_are_monotone_keep_the_argmax_and_minus_infinity(name: str) -> None:
    lp = mx.sort(logprobs_of(1, 500, 3), axis=-1)
    lp[0, 0] = -INF
    transform = {"oetf": filters.hlg_oetf, "eotf": lambda v: filters.hlg_eotf(v, 1.2), "chain": lambda v: filters.hlg_chain(v, 1.2)}[name]
    out = np.array(transform(lp))[0]
    assert out[0] == -np.inf and np.isfinite(out[1:]).all()
    assert (np.diff(out[1:]) >= -1e-6).all() and out[-1] == out.max()
