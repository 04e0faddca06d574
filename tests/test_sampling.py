"""The sampler against mlx-lm, row by row: processors, filters, greedy, keys, history and log probabilities (G25-G28, G30)."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils as reference

from mlxnb_engine import filters, sampling
from mlxnb_engine.errors import ModelError, RequestError
from mlxnb_engine.sampling import SamplingSession, draw_seed, row_seed, select, step_key
from mlxnb_engine.types import HlgSpec, SamplingSpec

INF, NAN = math.inf, math.nan
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
G26 = SamplingSpec(temp=0.6, top_p=0.95, presence_penalty=0.2, repetition_penalty=1.05)


@pytest.fixture(autouse=True, scope="module")
def uncompiled_reference() -> Iterator[None]:
    """mlx-lm compiles its filters for every new parameter, which takes seconds; the numbers are the same without."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def scores_of(rows: int, size: int, seed: int, dtype: mx.Dtype = mx.float32, spread: float = 3.0) -> mx.array:
    return (mx.random.normal((rows, size), key=mx.random.key(seed)) * spread).astype(dtype)


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and mx.array_equal(a, b, equal_nan=True).item()


def session(spec: SamplingSpec, seed: int, size: int, history: Sequence[int] = (), step: int = 0) -> SamplingSession:
    made = SamplingSession(spec, seed, size)
    made.seed_history(history)
    made.skip(step)
    return made


def processed(x: mx.array, spec: SamplingSpec, history: Sequence[int]) -> mx.array:
    """mlx-lm's processors over one row `[1, V]`."""
    chain = reference.make_logits_processors(
        dict(spec.logit_bias),
        spec.repetition_penalty,
        spec.repetition_context_size,
        spec.presence_penalty,
        spec.presence_context_size,
        spec.frequency_penalty,
        spec.frequency_context_size,
    )
    logits, tokens = x + mx.zeros_like(x), mx.array(list(history), dtype=mx.uint32)
    for process in chain:
        logits = process(tokens, logits)
    return logits


def expected(x: mx.array, spec: SamplingSpec, history: Sequence[int], seed: int, step: int) -> int:
    """What mlx-lm draws for one row `[1, V]`, with our key in place of its global random state."""
    logits = processed(x, spec, history)
    lp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if spec.temp == 0:
        return reference.greedy_sampler(lp).item()
    key = mx.random.key((seed ^ ((step + 1) * 0x9E3779B97F4A7C15)) % 2**64)
    if 0 < spec.top_p < 1:
        lp = reference.apply_top_p(lp, spec.top_p)
    if spec.min_p:
        lp = reference.apply_min_p(lp, spec.min_p, spec.min_tokens_to_keep)
    if spec.xtc_probability > 0:
        first, key = mx.random.split(key)
        heads = mx.random.uniform(key=first).item() <= np.float32(spec.xtc_probability)
        if heads:
            lp = reference.apply_xtc(lp, 1.0, spec.xtc_threshold, [])
    if spec.top_k:
        lp = reference.apply_top_k(lp, spec.top_k)
    return mx.random.categorical((lp * (1.0 / spec.temp))[0], key=key).item()


def draw(sessions: Sequence[SamplingSession], x: mx.array) -> list[int]:
    return select(sessions, x).tokens.tolist()


# --- G25: equality with mlx-lm ---------------------------------------------------------------------------------------

SIZE = 41


@st.composite
def specs(make: st.DrawFn) -> SamplingSpec:
    def maybe(off: float | None, *values: float) -> float | None:
        return make(st.sampled_from([off, off, *values]))

    contexts = st.sampled_from([0, 1, 3, 20])
    return SamplingSpec(
        temp=make(st.sampled_from([0.0, 0.1, 0.6, 1.0, 1.7])),
        top_p=maybe(1.0, 0.1, 0.5, 0.95),
        top_k=maybe(0, 1, 5, SIZE - 1),
        min_p=maybe(0.0, 0.05, 0.5, 1.0),
        min_tokens_to_keep=make(st.sampled_from([1, 3, SIZE])),
        xtc_probability=maybe(0.0, 0.5, 1.0),
        xtc_threshold=make(st.sampled_from([0.0, 0.1, 0.5])),
        repetition_penalty=maybe(None, 1.0, 0.7, 1.3),
        repetition_context_size=make(contexts),
        presence_penalty=maybe(None, 0.0, 0.3, -1.1),
        presence_context_size=make(contexts),
        frequency_penalty=maybe(None, 0.0, 0.17, -0.4),
        frequency_context_size=make(contexts),
        logit_bias=make(st.sampled_from([(), (), ((7, 1.3),), ((0, -100.0), (SIZE - 1, 2.2))])),
        logprobs=make(st.sampled_from([None, None, 0, 4])),
    )


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(specs(), st.lists(st.integers(0, SIZE - 1), max_size=30), st.integers(0, 2**64 - 1)), min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    step=st.integers(0, 5000),
    data=st.integers(0, 2**32),
)
def test_every_row_of_a_mixed_batch_equals_mlx_lm_on_that_row_alone(rows, dtype, step, data) -> None:
    x = scores_of(len(rows), SIZE, data, dtype)
    x[:, 5] = x[:, 9]
    sessions = [session(spec, seed, SIZE, history, step) for spec, history, seed in rows]
    chosen = select(sessions, x)
    assert chosen.tokens.dtype == mx.uint32 and all(chosen.finite.tolist())
    want = [expected(x[r : r + 1], spec, history, seed, step) for r, (spec, history, seed) in enumerate(rows)]
    assert chosen.tokens.tolist() == want
    assert [s.step for s in sessions] == [step + 1] * len(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4, 1023, 4096])
def test_processors_change_the_same_bits_as_mlx_lm(size: int, dtype: mx.Dtype) -> None:
    history = [random.Random(size).randrange(size) for _ in range(50)] + [3, 3, 1]
    for spec in (
        SamplingSpec(repetition_penalty=1.13),
        SamplingSpec(presence_penalty=0.37, presence_context_size=2),
        SamplingSpec(frequency_penalty=0.11, frequency_context_size=0),
        SamplingSpec(
            repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3, repetition_context_size=0, frequency_context_size=7
        ),
        SamplingSpec(logit_bias=((2, 1.7), (0, -3.1)), presence_penalty=1.1),
    ):
        x = scores_of(2, size, 1, dtype)
        rows = [session(spec, 0, size, history), session(spec, 0, size, history[:3])]
        got = sampling._add_bias(x, rows) if spec.logit_bias else x
        got = sampling._penalise(got, rows) if rows[0].needs_history else got
        for r, ids in enumerate((history, history[:3])):
            assert same(got[r : r + 1], processed(x[r : r + 1], spec, ids)), (spec, r)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4, 31, 1025, 4096])
def test_filters_keep_the_same_bits_as_mlx_lm(size: int, dtype: mx.Dtype) -> None:
    x = scores_of(3, size, size, dtype, spread=2.0)
    lp = x - mx.logsumexp(x, axis=-1, keepdims=True)
    k, keep = max(1, size // 3), min(size, 5)
    p = filters.column
    on, half = mx.array([[True]] * 3), p([0.1] * 3, dtype)
    for ours, theirs in (
        (filters.top_p(lp, p([0.6] * 3)), lambda row: reference.apply_top_p(row, 0.6)),
        (filters.min_p(lp, p([math.log(0.2)] * 3, dtype), 1), lambda row: reference.apply_min_p(row, 0.2)),
        (filters.min_p(lp, p([math.log(0.9)] * 3, dtype), keep), lambda row: reference.apply_min_p(row, 0.9, keep)),
        (filters.top_k(lp, k), lambda row: reference.apply_top_k(row, k)),
        (filters.xtc(lp, on, half, None), lambda row: reference.apply_xtc(row, 1.0, 0.1, [])),
    ):
        assert same(ours, mx.concatenate([theirs(lp[r : r + 1]) for r in range(3)]))


def test_top_p_keeps_every_token_tied_with_the_last_kept_one() -> None:
    lp = mx.log(mx.array([[0.4, 0.2, 0.2, 0.2]]))
    kept = filters.top_p(lp, filters.column([0.5]))
    assert [v > -INF for v in kept[0].tolist()] == [True, True, True, True]
    assert [v > -INF for v in filters.top_p(lp, filters.column([0.39]))[0].tolist()] == [True, False, False, False]


def test_top_p_drops_a_token_once_the_likelier_ones_reach_the_mass_exactly() -> None:
    lp = mx.log(mx.array([[0.25, 0.5, 0.125, 0.125]]))
    assert mx.exp(lp).tolist() == [[0.25, 0.5, 0.125, 0.125]], "the boundary of this test is no longer exact"
    for mass, kept in ((0.5, [False, True, False, False]), (0.75, [True, True, False, False]), (0.76, [True] * 4)):
        assert [v > -INF for v in filters.top_p(lp, filters.column([mass]))[0].tolist()] == kept
        assert same(filters.top_p(lp, filters.column([mass])), reference.apply_top_p(lp, mass))


def test_a_top_p_that_underflows_keeps_the_likeliest_token_and_reads_nothing_beyond_the_row() -> None:
    x = scores_of(2, 33, 5)
    best = mx.argmax(x, axis=-1).tolist()
    assert draw([session(SamplingSpec(temp=1.0, top_p=1e-60), s, 33) for s in (1, 2)], x) == best
    assert (filters.top_p(mx.full((1, 5), -INF), filters.column([0.5])) == -INF).all().item()


def test_xtc_never_drops_exempt_ids_and_tosses_one_coin_per_row() -> None:
    x = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]] * 64))
    spec = SamplingSpec(temp=1.0, xtc_probability=1.0, xtc_threshold=0.1, top_k=1)
    plain = [SamplingSession(spec, s, 4) for s in range(32)]
    exempt = [SamplingSession(spec, s, 4, exempt_ids=[0]) for s in range(32)]
    assert draw(plain + exempt, x) == [2] * 32 + [0] * 32
    half = replace(spec, xtc_probability=0.5)
    tokens = draw([SamplingSession(half, s, 4) for s in range(64)], x)
    assert set(tokens) == {0, 2} and 16 < tokens.count(0) < 48


def test_with_xtc_off_the_stream_is_that_of_a_sampler_without_xtc() -> None:
    x = scores_of(4, 97, 8)
    base = SamplingSpec(temp=0.9, top_p=0.9)
    other = replace(base, xtc_probability=0.0, xtc_threshold=0.3)
    for step in range(20):
        rows, others = ([session(spec, s, 97, step=step) for s in range(4)] for spec in (base, other))
        lp = x - mx.logsumexp(x, axis=-1, keepdims=True)
        kept = [reference.apply_top_p(lp[r : r + 1], 0.9)[0] * (1.0 / 0.9) for r in range(4)]
        want = [mx.random.categorical(kept[s], key=step_key(s, step)).item() for s in range(4)]
        assert draw(rows, x) == draw(others, x) == want


def test_noise_equals_the_categorical_draw_bit_for_bit_and_does_not_depend_on_the_batch() -> None:
    for size in (1, 2, 31, 1023, 4097):
        x, keys = scores_of(5, size, 3), mx.stack([step_key(s, 4) for s in range(5)])
        noise = filters.gumbel(keys, size)
        solo = [mx.random.categorical(x[r], key=keys[r]).item() for r in range(5)]
        assert mx.argmax(noise + x, axis=-1).tolist() == solo
        assert all(same(filters.gumbel(keys[r : r + 1], size)[0], noise[r]) for r in range(5))


def test_draws_follow_the_softmax_of_the_scaled_scores() -> None:
    p, count = np.array([0.1, 0.2, 0.3, 0.4]), 4000
    spec = SamplingSpec(temp=2.0)
    x = mx.broadcast_to(2.0 * mx.log(mx.array(p.astype(np.float32))), (count, 4))
    seen = np.bincount(draw([SamplingSession(spec, row_seed(99, i), 4) for i in range(count)], x), minlength=4) / count
    assert np.abs(seen - p).max() < 0.035, f"{seen} against {p}: beyond 4 standard deviations"


# --- keys and seeds --------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**64 - 1), step=st.integers(0, 2**40))
def test_a_step_key_is_the_key_of_seed_and_position_in_64_bit_arithmetic(seed: int, step: int) -> None:
    want = mx.random.key((seed ^ (((step + 1) * 0x9E3779B97F4A7C15) % 2**64)) % 2**64)
    assert same(step_key(seed, step), want)


def test_default_seeds_of_64_rows_started_together_are_distinct_and_use_all_64_bits() -> None:
    seeds = {draw_seed() for _ in range(64)}
    assert len(seeds) == 64 and min(seeds) >= 0 and 2**56 < max(seeds) < 2**64
    x = mx.zeros((64, 4096))
    assert len(set(draw([SamplingSession(SamplingSpec(temp=1.0), s, 4096) for s in seeds], x))) > 55


def test_sample_zero_reproduces_the_single_run_and_the_last_seed_wraps() -> None:
    assert [row_seed(7, i) for i in range(3)] == [7, 8, 9]
    assert row_seed(2**64 - 1, 1) == 0


def test_draws_ignore_and_leave_alone_the_global_random_state() -> None:
    x, spec = scores_of(2, 64, 1), replace(G26, xtc_probability=0.5)
    runs = []
    for seed in (1, 2):
        mx.random.seed(seed)
        before = [s + 0 for s in mx.random.state]
        runs.append(draw([SamplingSession(spec, 5, 64), SamplingSession(spec, 6, 64)], x))
        assert all(same(a, b) for a, b in zip(before, mx.random.state, strict=True))
    assert runs[0] == runs[1]


# --- G26: batch independence -----------------------------------------------------------------------------------------


def generate(seeds: Sequence[int], spec: SamplingSpec, steps: int, commit: str) -> list[list[int]]:
    """A toy model whose scores depend on the row's last token; each row starts from a prompt of its own."""
    size = 301
    table = scores_of(size, size, 77, spread=2.0)
    rows = [session(spec, seed, size, [seed % size, 5, 5]) for seed in seeds]
    register = mx.array([seed % size for seed in seeds], dtype=mx.uint32)
    out: list[mx.array] = []
    for _ in range(steps):
        x = table[register]
        for r, row in enumerate(rows):
            row.commit_device(register, r) if commit == "device" else row.commit_ids([register[r].item()])
        chosen = select(rows, x)
        out.append(chosen.tokens)
        register = chosen.tokens
    return [list(column) for column in zip(*[tokens.tolist() for tokens in out], strict=True)]


@pytest.mark.parametrize(
    "spec", [G26, replace(G26, frequency_penalty=0.3, frequency_context_size=0, xtc_probability=0.5, top_k=40, logprobs=3)]
)
def test_seeded_rows_give_the_same_ids_in_batches_of_1_2_4_and_8(spec: SamplingSpec) -> None:
    seeds = [11, 2**63 + 5, 12, 99, 3, 4, 5, 6]
    solo = [generate([seed], spec, 30, "device")[0] for seed in seeds]
    assert len({tuple(ids) for ids in solo}) == 8
    for count in (2, 4, 8):
        assert generate(seeds[:count], spec, 30, "device") == solo[:count]
    assert generate(seeds[::-1], spec, 30, "device") == solo[::-1]


def test_a_greedy_row_a_sampled_row_and_a_broken_row_do_not_disturb_each_other() -> None:
    x = scores_of(5, 127, 9)
    kinds = [SamplingSpec(), G26, SamplingSpec(temp=1.0, top_k=3), replace(SamplingSpec(), logprobs=2), SamplingSpec(temp=0.7, top_p=0.5)]
    solo = [draw([session(spec, 40 + r, 127, [1, 2])], x[r : r + 1])[0] for r, spec in enumerate(kinds)]
    for bad in range(5):
        for poison in (NAN, INF, -INF):
            y = mx.where(mx.arange(5)[:, None] == bad, poison, x)
            chosen = select([session(spec, 40 + r, 127, [1, 2]) for r, spec in enumerate(kinds)], y)
            assert chosen.finite.tolist() == [r != bad for r in range(5)]
            assert [t for r, t in enumerate(chosen.tokens.tolist()) if r != bad] == [t for r, t in enumerate(solo) if r != bad]
            assert chosen.tokens.tolist()[bad] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_finite_normalised_score_are_flagged_under_every_setting(dtype: mx.Dtype) -> None:
    rows = [[1, NAN, 3, 2, 0], [NAN] * 5, [-INF] * 5, [1, INF, 2, 0, 0], [INF, INF, -INF, 0, 0], [-INF, -INF, 1, -INF, -INF]]
    x = mx.array(rows).astype(dtype)
    for spec in (
        SamplingSpec(),
        replace(G26, min_p=0.1, min_tokens_to_keep=2, xtc_probability=1.0, top_k=2, logprobs=2),
        SamplingSpec(temp=1.0, hlg=HlgSpec(width=1.0, anchor="median")),
        SamplingSpec(temp=1.0, hlg=HlgSpec(width=1.0, anchor="entropy")),
    ):
        chosen = select([session(spec, s, 5, [0, 1]) for s in range(6)], x)
        assert chosen.finite.tolist() == [False] * 5 + [True]
        assert chosen.tokens.tolist() == [0] * 5 + [2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tiny_temperature_draws_the_likeliest_token_instead_of_token_zero(dtype: mx.Dtype) -> None:
    x = scores_of(8, 1000, 2, dtype, spread=0.3)
    x[:, 500] = 3.0
    for temp in (1e-300, 1e-40, 1e-9, 1e-4):
        assert draw([SamplingSession(SamplingSpec(temp=temp), s, 1000) for s in range(8)], x) == [500] * 8


def test_a_cold_float16_row_does_not_change_its_neighbour() -> None:
    x, warm = scores_of(2, 500, 4, mx.float16), SamplingSpec(temp=0.7)
    for seed in range(20):
        solo = draw([SamplingSession(warm, seed, 500)], x[:1])
        both = draw([SamplingSession(warm, seed, 500), SamplingSession(SamplingSpec(temp=1e-5), 1, 500)], x)
        assert both[0] == solo[0] == expected(x[:1], warm, [], seed, 0)


def test_noise_of_minus_infinity_cannot_let_a_masked_token_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.random, "uniform", lambda shape=(), key=None: mx.zeros(shape) + 0 * key[0])
    x = mx.where(mx.arange(9)[None] == 6, 0.0, mx.full((1, 9), -INF))
    assert draw([SamplingSession(SamplingSpec(temp=1.0), 3, 9)], x) == [6]


# --- G28: greedy -----------------------------------------------------------------------------------------------------


def normalised_argmax(x: mx.array) -> list[int]:
    """The definition, in numpy after the dtype-rounded subtraction: NaN is -inf, ties go to the lowest id."""
    lp = np.array((x - mx.logsumexp(x, axis=-1, keepdims=True)).astype(mx.float32))
    return np.argmax(np.where(np.isnan(lp), -np.inf, lp), axis=-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 4, 31, 127, 1023, 1024, 1025, 4096, 248320, 262144])
def test_greedy_is_the_argmax_of_the_rounded_normalised_scores(size: int, dtype: mx.Dtype) -> None:
    x = scores_of(2, size, size, dtype)
    poisoned = mx.concatenate([x, x, x])
    poisoned[2, size // 2] = NAN
    poisoned[3, size // 3] = INF
    poisoned[4] = mx.where(mx.arange(size) < size - 1, -INF, poisoned[4])
    poisoned[5] = -INF
    layouts: list[mx.array] = [
        poisoned,
        mx.repeat(poisoned, 2, axis=1)[:, ::2],
        mx.contiguous(poisoned.T).T,
        poisoned[::-1],
        mx.zeros((2, size), dtype),
    ]
    for layout in layouts:
        chosen = select([SamplingSession(SamplingSpec(), s, size) for s in range(layout.shape[0])], layout)
        assert chosen.tokens.tolist() == normalised_argmax(layout)


def test_rounding_makes_ties_that_raw_argmax_lacks_and_they_go_to_the_lowest_id() -> None:
    x = mx.array([[0, 1e-8, 0, 0]])
    assert mx.argmax(x, axis=-1).item() == 1, "the control no longer tells the two operations apart"
    assert draw([SamplingSession(SamplingSpec(), 0, 4)], x) == [0]
    row = session(SamplingSpec(presence_penalty=1.0), 0, 4, [0])
    assert draw([row], mx.array([[1.0, 1e-8, 0, 0]])) == [0]


def test_greedy_ignores_seed_filters_and_curve() -> None:
    x = scores_of(3, 50, 6)
    spec = SamplingSpec(top_p=0.1, top_k=2, min_p=0.5, xtc_probability=1.0, hlg=HlgSpec(width=0.1))
    rows = [SamplingSession(spec, s, 50) for s in range(3)]
    assert draw(rows, x) == mx.argmax(x, axis=-1).tolist() and all(r.is_plain_greedy and r.independent for r in rows)


# --- G27: history ----------------------------------------------------------------------------------------------------


def test_device_commits_give_the_same_draws_as_host_commits() -> None:
    for size in (0, 1, 20):
        spec = replace(G26, presence_context_size=size, frequency_penalty=0.4)
        assert generate([1, 2, 3], spec, 40, "device") == generate([1, 2, 3], spec, 40, "host")


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.sampled_from(["seed", "ids", "device", "read"]), st.lists(st.integers(0, 16), max_size=6)), max_size=12),
    limit=st.sampled_from([0, 1, 5, 20]),
)
def test_history_holds_every_consumed_token_once_and_in_order(chunks, limit: int) -> None:
    spec = SamplingSpec(presence_penalty=0.5, presence_context_size=limit)
    row, consumed = SamplingSession(spec, 1, 17), []
    history = row._history
    assert history is not None
    for how, ids in chunks:
        if how == "read":
            history.read(len(history) + 1)
            continue
        if how == "device":
            register = mx.array([*ids, 0], dtype=mx.uint32)
            for index in range(len(ids)):
                row.commit_device(register, index)
        else:
            (row.seed_history if how == "seed" else row.commit_ids)(ids)
        consumed += ids
    kept = consumed[-limit:] if limit else consumed
    assert len(history) == len(kept)
    assert history.read(len(kept) + 2).tolist() == [0, 0, *kept]


def test_a_sample_that_never_becomes_input_leaves_no_trace() -> None:
    """A replaced in-flight sample and rejected proposals are simply not committed; a draw by itself adds nothing."""
    spec = SamplingSpec(temp=0.8, presence_penalty=5.0, repetition_penalty=2.0, repetition_context_size=0)
    x = scores_of(1, 30, 1)
    row, clean = session(spec, 9, 30, [1, 2]), session(spec, 9, 30, [1, 2])
    for _ in range(5):
        select([row], x)
    clean.skip(5)
    for s in (row, clean):
        s.commit_ids([7])
    assert draw([row], x) == draw([clean], x)
    assert row._history is not None and row._history.read(3).tolist() == [1, 2, 7]


def test_a_committed_token_changes_the_next_draw() -> None:
    x = mx.array([[3.0, 2.9, 0.0, 0.0]])
    row = session(SamplingSpec(presence_penalty=1.0), 0, 4)
    first = select([row], x)
    row.commit_device(first.tokens, 0)
    assert first.tokens.tolist() == [0] and draw([row], x) == [1]


def test_skipped_positions_advance_the_stream_as_drawn_ones_do() -> None:
    x = scores_of(1, 200, 3)
    drawn, filled = SamplingSession(SamplingSpec(temp=1.0), 5, 200), SamplingSession(SamplingSpec(temp=1.0), 5, 200)
    ids = [draw([drawn], x)[0] for _ in range(6)]
    filled.skip(3)
    assert [draw([filled], x)[0] for _ in range(3)] == ids[3:] and len(set(ids)) > 1
    with pytest.raises(ValueError):
        filled.skip(-1)


def test_history_ids_beyond_the_vocabulary_are_refused_before_they_reach_the_device() -> None:
    row = session(SamplingSpec(presence_penalty=1.0), 0, 10)
    for ids in ([10], [-1], [0, 99]):
        with pytest.raises(ModelError):
            row.commit_ids(ids)
    for register, index in ((mx.zeros((2,), mx.uint32), 2), (mx.zeros((2,), mx.uint32), -1), (mx.zeros((1, 2), mx.uint32), 0)):
        with pytest.raises(IndexError):
            row.commit_device(register, index)


def test_rows_of_different_history_lengths_are_penalised_together_as_alone() -> None:
    spec = replace(G26, temp=0.0, frequency_penalty=0.9, presence_context_size=0)
    histories = [[], [3], list(range(25)), [0] * 100, [49, 0]]
    x = scores_of(5, 50, 12, spread=0.2)
    together = sampling._penalise(x, [session(spec, 0, 50, h) for h in histories])
    for r, h in enumerate(histories):
        assert same(together[r : r + 1], processed(x[r : r + 1], spec, h))


# --- G30: log probabilities ------------------------------------------------------------------------------------------


def capture(rows: Sequence[SamplingSession], x: mx.array):
    chosen = select(rows, x)
    data = chosen.logprobs
    assert data is not None
    mx.eval(chosen.tokens, *data.arrays())
    return chosen.tokens.tolist(), [data.read(r) for r in range(len(rows))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_in_a_batch_equal_solo_and_the_definition(dtype: mx.Dtype) -> None:
    x = scores_of(6, 211, 3, dtype)
    kinds = [replace(G26, logprobs=k) if k is not None else G26 for k in (0, 3, None, 3, 50)] + [SamplingSpec(logprobs=5)]
    tokens, got = capture([session(s, r, 211, [4, 4, 9]) for r, s in enumerate(kinds)], x)
    assert got[2] is None
    for r, spec in enumerate(kinds):
        if spec.logprobs is None:
            continue
        assert capture([session(spec, r, 211, [4, 4, 9])], x[r : r + 1]) == ([tokens[r]], [got[r]])
        logits = processed(x[r : r + 1], spec, [4, 4, 9])
        lp = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0].astype(mx.float32).tolist()
        best = sorted(range(211), key=lambda i: (-lp[i], i))[: spec.logprobs]
        assert got[r] == (lp[tokens[r]], sum(v > lp[tokens[r]] for v in lp), [(i, lp[i]) for i in best])


def test_alternatives_at_a_tie_are_the_lowest_ids_and_impossible_tokens_are_left_out() -> None:
    x = mx.array([[1.0] * 40, [-INF] * 20 + [0.0] * 2 + [-INF] * 18])
    _, (tied, masked) = capture([SamplingSession(SamplingSpec(logprobs=4), 0, 40) for _ in range(2)], x)
    assert [i for i, _ in tied[2]] == [0, 1, 2, 3] and tied[1] == 0
    assert [i for i, _ in masked[2]] == [20, 21]


@pytest.mark.parametrize("count", [1, 2])
def test_an_unconsumed_lookahead_holds_no_arrays_and_captured_data_does_not_pin_the_scores(count: int) -> None:
    size = 262144
    rows = [session(replace(G26, logprobs=5), s, size, [1, 2]) for s in range(count)]
    gc.collect()
    base = mx.get_active_memory()
    chosen = select(rows, scores_of(count, size, 1))
    data = chosen.logprobs
    mx.eval(chosen.tokens, chosen.finite, *data.arrays())
    assert mx.get_active_memory() - base < 16384, "a result keeps a vocabulary-sized buffer alive"
    lookahead = select(rows, scores_of(count, size, 2))
    mx.eval(lookahead.tokens, lookahead.finite, *lookahead.logprobs.arrays())
    held = scores_of(count, size, 2)
    mx.eval(held)
    assert mx.get_active_memory() - base >= count * size * 4, "the control no longer sees a held buffer"
    del chosen, data, lookahead, held
    gc.collect()
    assert mx.get_active_memory() - base < 4096
    for row in rows:
        row.dispose()
        row.dispose()
    gc.collect()
    assert mx.get_active_memory() <= base


# --- contracts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 8), (8,), (2, 8), (0, 8)])
def test_scores_of_another_shape_are_refused_and_no_session_advances(shape: tuple[int, ...]) -> None:
    row = session(replace(G26, logit_bias=((1, 1.0),)), 0, 8)
    with pytest.raises(ValueError, match="rows, vocabulary"):
        select([row], mx.zeros(shape))
    assert row.step == 0
    with pytest.raises(ValueError, match="9 scores"):
        select([row], mx.zeros((1, 9)))
    row.dispose()
    with pytest.raises(ValueError, match="disposed"):
        select([row], mx.zeros((1, 8)))


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(top_k=9),
        SamplingSpec(min_tokens_to_keep=9),
        SamplingSpec(logit_bias=((8, 1.0),)),
        SamplingSpec(logit_bias=((3, 1.0), (3, 2.0))),
        SamplingSpec(temp=-1.0),
        SamplingSpec(hlg=HlgSpec(width=-1.0)),
        SamplingSpec(hlg=HlgSpec(width=NAN)),
        SamplingSpec(hlg=HlgSpec(gain=0.0)),
        SamplingSpec(hlg=HlgSpec(toe=INF)),
        SamplingSpec(hlg=HlgSpec(offset=NAN)),
    ],
)
def test_settings_this_vocabulary_cannot_serve_are_request_errors(spec: SamplingSpec) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingSession(spec, 0, 8)
    assert caught.value.hint or "logit_bias" in caught.value.message
    with pytest.raises(RequestError):
        SamplingSession(SamplingSpec(), 2**64, 8)
    with pytest.raises(RequestError):
        SamplingSession(SamplingSpec(), 0, 8, exempt_ids=[8])


def test_top_k_of_the_whole_vocabulary_is_off() -> None:
    x = scores_of(1, 8, 1)
    assert draw([SamplingSession(SamplingSpec(temp=1.0, top_k=8), 3, 8)], x) == draw([SamplingSession(SamplingSpec(temp=1.0), 3, 8)], x)


def test_a_draw_reads_nothing_from_the_device_and_does_not_change_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    x = scores_of(2, 64, 1)
    before = np.array(x)
    full = replace(G26, min_p=0.1, min_tokens_to_keep=2, xtc_probability=0.5, top_k=9, logprobs=3, logit_bias=((2, 1.0),), hlg=None)
    rows = [session(full, 1, 64, [1, 2]), session(replace(full, hlg=HlgSpec(width=1.0, anchor="median")), 1, 64)]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a draw waited for the device")

    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, refuse)
    mx.enable_compile()
    try:
        with pytest.raises(Exception, match="compile"):
            mx.compile(lambda scores: scores + scores[0, 0].item())(x)  # the control: tracing forbids a read
        tokens = mx.compile(lambda scores: select(rows, scores).tokens)(x)
    finally:
        mx.disable_compile()
    assert tokens.shape == (2,) and np.array_equal(np.array(x), before)


def test_only_rows_that_use_top_p_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_shapes: list[tuple[int, ...]] = []
    genuine: Callable[..., mx.array] = mx.sort
    monkeypatch.setattr(mx, "sort", lambda a, axis=-1: sorted_shapes.append(tuple(a.shape)) or genuine(a, axis=axis))
    x = scores_of(8, 64, 1)
    draw([SamplingSession(SamplingSpec(temp=0.7), s, 64) for s in range(8)], x)
    draw([SamplingSession(SamplingSpec(), s, 64) for s in range(8)], x)
    assert sorted_shapes == []
    mixed = [SamplingSpec(temp=0.7, top_p=0.9 if s in (2, 5) else 1.0) for s in range(8)]
    draw([SamplingSession(spec, s, 64) for s, spec in enumerate(mixed)], x)
    assert sorted_shapes == [(2, 64)]
