"""Which token: one `SamplingSession` per row, and `select`, which draws for all rows of a step at once.

A row's draw depends on its scores, its own committed history and the key of (seed, step); never on its neighbours, the
batch size or MLX's global random state. Everything `select` returns is lazy: nothing here reads a value from the device.
Order (semantics section 3): logit bias, repetition, presence, frequency; normalise; top-p, min-p, XTC, top-k; scale; draw.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from . import filters
from .errors import ModelError, RequestError
from .types import MAX_SEED, HlgSpec, SamplingSpec

GOLDEN = 0x9E3779B97F4A7C15
MAX_GAIN = 1e30
"""Largest 1/T in use: the product with a float32 or bfloat16 log probability stays finite."""

Anchor = Literal["max", "entropy", "median"]


def draw_seed() -> int:
    """A fresh 64-bit seed from the operating system; the clock would give rows started together one stream (P35)."""
    return secrets.randbits(64)


def row_seed(seed: int, sample_index: int) -> int:
    """Seed of sample `sample_index` of a request that names a seed; sample 0 reproduces the single run."""
    return (seed + sample_index) & MAX_SEED


def step_key_bits(seed: int, step: int) -> int:
    """The 64 bits that address the draw of output position `step` (from 0)."""
    return (seed ^ ((step + 1) * GOLDEN)) & MAX_SEED


def step_key(seed: int, step: int) -> mx.array:
    """The key of one draw, equal to `mx.random.key(step_key_bits(seed, step))`."""
    return _key_rows([step_key_bits(seed, step)])[0]


def _key_rows(bits: Sequence[int]) -> mx.array:
    """Keys `[R, 2]` uint32 of 64-bit integers, built in one call; row r is `mx.random.key(bits[r])`."""
    return mx.array([[b >> 32, b & 0xFFFFFFFF] for b in bits], dtype=mx.uint32)


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rows of one vectorised draw have in common; rows of different kinds are drawn apart.

    The counts k are part of it: how a partition breaks ties depends on k, so a shared k keeps a row's result its own.
    """

    greedy: bool
    bias: bool
    history: Literal["none", "recent", "all"]
    top_p: bool
    min_p: int
    """0 is off, else min_tokens_to_keep."""
    xtc: bool
    top_k: int
    curve: Anchor | None
    logprobs: int | None
    explain: int = 0


class TokenHistory:
    """The newest tokens a row consumed, on the device, oldest first. Host ids and unread register elements mix freely.

    Owner: its session, on the engine thread. Invariant: `len()` == tokens kept <= limit (None: all tokens).
    A commit costs O(1); reading folds what came since the last read into the device array.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._fresh: deque[int | tuple[mx.array, int]] = deque(maxlen=limit)
        self._ids: mx.array | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, entries: Sequence[int | tuple[mx.array, int]]) -> None:
        self._fresh.extend(entries)
        self._count += len(entries)
        if self._limit is not None:
            self._count = min(self._count, self._limit)

    def read(self, width: int) -> mx.array:
        """All kept ids, `[width]` uint32, right-aligned behind zeros; width >= len(self) and >= 1."""
        if self._fresh:
            parts = [] if self._ids is None else [self._ids]
            host: list[int] = []
            for entry in self._fresh:
                if isinstance(entry, int):
                    host.append(entry)
                    continue
                if host:
                    parts.append(mx.array(host, dtype=mx.uint32))
                    host = []
                register, index = entry
                parts.append(register[index : index + 1].astype(mx.uint32))
            if host:
                parts.append(mx.array(host, dtype=mx.uint32))
            self._fresh.clear()
            joined = mx.concatenate(parts)
            self._ids = joined[joined.shape[0] - self._count :]
        missing = width - self._count
        if self._ids is None:
            return mx.zeros((width,), dtype=mx.uint32)
        return mx.concatenate([mx.zeros((missing,), dtype=mx.uint32), self._ids]) if missing else self._ids


class SamplingSession:
    """One row's sampler: settings, seed, position and the history its penalties see.

    Owner: engine thread. Lifetime: from admission of the row to `dispose`. A token enters history when it becomes model
    input, by exactly one of `seed_history`, `commit_ids`, `commit_device`; a sample that is replaced or rejected never does.
    """

    def __init__(self, spec: SamplingSpec, seed: int, vocab_size: int, exempt_ids: Sequence[int] = ()) -> None:
        """exempt_ids: special ids that XTC never drops. Raises RequestError for settings this vocabulary cannot serve."""
        spec.validate()
        _check_vocabulary(spec, vocab_size, exempt_ids)
        if spec.hlg is not None:
            _check_curve(spec.hlg)
        if not 0 <= seed <= MAX_SEED:
            raise RequestError(f"seed={seed!r} is out of range.", "It must be in [0, 2^64).")
        self.spec = spec
        self.seed = seed
        self.vocab_size = vocab_size
        self.step = 0
        self.kind = _kind(spec, vocab_size)
        self._exempt_ids = tuple(exempt_ids)
        self._history: TokenHistory | None = None
        self._disposed = False
        if self.kind.history != "none":
            self._history = TokenHistory(None if self.kind.history == "all" else max(size for _, size in _penalties(spec)))

    @property
    def is_plain_greedy(self) -> bool:
        """Argmax of the scores as they come: no processor and no metadata."""
        return self.independent and not self.kind.bias

    @property
    def independent(self) -> bool:
        """Greedy whose choice at a position depends on that position's scores alone."""
        return self.kind.greedy and not self.needs_history and not self.captures_logprobs and not self.kind.explain

    @property
    def captures_logprobs(self) -> bool:
        return self.spec.logprobs is not None

    @property
    def needs_history(self) -> bool:
        return self.kind.history != "none"

    def seed_history(self, ids: Sequence[int]) -> None:
        """Add prompt ids that the model consumed; several calls append."""
        self.commit_ids(ids)

    def commit_ids(self, ids: Sequence[int]) -> None:
        """Add host-known tokens that became model input. Raises ModelError for an id outside the scores' vocabulary.

        An unchecked id would index out of range, which MLX does not report (P3).
        """
        if self._history is None or not len(ids):
            return
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ModelError(
                f"Token ids reach from {min(ids)} to {max(ids)}, but the model scores {self.vocab_size} tokens.",
                "Tokenizer and weights do not belong together: load the model with its own tokenizer, or switch penalties off.",
            )
        self._history.extend([int(i) for i in ids])

    def commit_device(self, register: mx.array, index: int) -> None:
        """Add the token `register[index]`, sampled but not read back yet, that became model input."""
        if register.ndim != 1 or not 0 <= index < register.shape[0]:
            raise IndexError(f"index {index} into a register of shape {tuple(register.shape)}")
        if self._history is not None:
            self._history.extend([(register, index)])

    def skip(self, count: int) -> None:
        """Advance past asserted positions: a draw is addressed by its position alone."""
        if count < 0:
            raise ValueError(f"cannot skip {count} positions")
        self.step += count

    def dispose(self) -> None:
        """Release the history's arrays; idempotent. A disposed session draws no more."""
        self._history = None
        self._disposed = True


def _penalties(spec: SamplingSpec) -> list[tuple[float, int]]:
    """(strength, context size) of each penalty that changes a score."""
    table = (
        (spec.repetition_penalty, 1.0, spec.repetition_context_size),
        (spec.presence_penalty, 0.0, spec.presence_context_size),
        (spec.frequency_penalty, 0.0, spec.frequency_context_size),
    )
    return [(value, size) for value, neutral, size in table if value is not None and value != neutral]


def _kind(spec: SamplingSpec, vocab_size: int) -> Kind:
    greedy = spec.temp == 0
    sizes = [size for _, size in _penalties(spec)]
    return Kind(
        greedy=greedy,
        bias=bool(spec.logit_bias),
        history="none" if not sizes else "all" if 0 in sizes else "recent",
        top_p=not greedy and spec.hlg is None and spec.top_p < 1,
        min_p=0 if greedy or spec.min_p == 0 else spec.min_tokens_to_keep,
        xtc=not greedy and spec.xtc_probability > 0,
        top_k=0 if greedy or spec.hlg is not None or spec.top_k == vocab_size else spec.top_k,
        curve=None if greedy or spec.hlg is None else spec.hlg.anchor,
        logprobs=None if spec.logprobs is None else min(spec.logprobs, vocab_size),
        explain=min(spec.explain, vocab_size),
    )


def _check_vocabulary(spec: SamplingSpec, vocab_size: int, exempt_ids: Sequence[int]) -> None:
    for name, value in (("top_k", spec.top_k), ("min_tokens_to_keep", spec.min_tokens_to_keep)):
        if value > vocab_size:
            raise RequestError(f"{name}={value} is more than the {vocab_size} tokens of this model.", "Give a smaller number.")
    ids = [token for token, _ in spec.logit_bias]
    if len(set(ids)) < len(ids):
        raise RequestError("logit_bias names a token twice.", "Give each token id one number.")
    for token in (*ids, *exempt_ids):
        if not 0 <= token < vocab_size:
            raise RequestError(f"Token id {token} is not in this model's vocabulary.", f"Ids go from 0 to {vocab_size - 1}.")


def _check_curve(hlg: HlgSpec) -> None:
    rules = (
        ("gain", hlg.gain is None or 0 < hlg.gain <= MAX_GAIN, "a number > 0, or left away for 1/T"),
        ("width", hlg.width >= 0, "a number >= 0; inf makes the curve a plain temperature"),
        ("toe", math.isfinite(hlg.toe), "a finite number"),
        ("head", math.isfinite(hlg.head), "a finite number"),
        ("anchor", hlg.anchor in ("max", "entropy", "median"), "max, entropy or median"),
        ("offset", math.isfinite(hlg.offset), "a finite number"),
    )
    for name, good, rule in rules:
        if not good:
            raise RequestError(f"hlg {name}={getattr(hlg, name)!r} is out of range.", f"It must be {rule}.")


# --- selection ------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Lazy results for the rows of one kind, in the order of `rows`."""

    rows: list[int]
    tokens: mx.array
    finite: mx.array
    captured: Captured | None
    stages: Explained | None


Stages = dict[str, mx.array]
"""Scores of some candidates `[g, c]` after each stage of the choice, in order; "ids" are the candidates."""


class Explained(NamedTuple):
    """stages: as above. totals: one number per row `[g]`: "vocab", "logsumexp", "coin", and per filter "<name> left", "<name> mass"."""

    stages: Stages
    totals: Stages


class Captured(NamedTuple):
    """Log probability data of g rows: chosen `[g]`, rank `[g]`, ids and logprobs of the alternatives `[g, k]`."""

    chosen: mx.array
    rank: mx.array
    top_ids: mx.array
    top_logprobs: mx.array


@dataclass(slots=True, eq=False)
class LogprobData:
    """Log probabilities after processors, before temperature and filters, of the rows that capture them.

    It owns small arrays only, never a view of `[R, V]`. Evaluate `arrays()` with the step; `read` then copies to the host.
    Dropping the object releases everything.
    """

    _groups: list[tuple[list[int], Captured]]
    _host: dict[int, tuple[float, int, list[tuple[int, float]]]] | None = field(default=None, init=False)

    def arrays(self) -> list[mx.array]:
        return [array for _, captured in self._groups for array in captured]

    def read(self, row: int) -> tuple[float, int, list[tuple[int, float]]] | None:
        """(logprob of the chosen token, its rank with 0 the likeliest, alternatives likeliest first), None if not captured.

        Ties are ranked alike and listed by id. Tokens of probability 0 are no alternatives, so fewer than k may come.
        """
        if self._host is None:
            self._host = {}
            for rows, captured in self._groups:
                columns: list[Any] = [array.tolist() for array in captured]
                for index, chosen, rank, ids, values in zip(rows, *columns, strict=True):
                    pairs = [(i, v) for i, v in zip(ids, values, strict=True) if v > -math.inf]
                    self._host[index] = (chosen, rank, sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
        return self._host.get(row)


@dataclass(slots=True, eq=False)
class ExplainData:
    """Every stage of the choice for the likeliest tokens and the chosen one: what the Stepper shows. Small arrays only."""

    _groups: list[tuple[list[int], Explained]]

    def arrays(self) -> list[mx.array]:
        return [array for _, explained in self._groups for columns in explained for array in columns.values()]

    def read(self, row: int) -> dict[str, Any] | None:
        """{"stages": names in order, "candidates": [{"id", stage: score, ..., "dropped_by"}], "vocab", "logsumexp", "coin" (XTC's
        draw in [0, 1), else None), "left", "mass": {filter: tokens kept, their probability before the filters}}.

        Scores are nats; a dropped candidate has None from the stage named by "dropped_by" on. "probability" is that of the
        final draw, "noise" the keyed Gumbel noise; the largest of "scaled" + "noise" wins. Greedy rows have neither.
        """
        for rows, explained in self._groups:
            if row in rows:
                at = rows.index(row)
                columns, totals = ({name: array[at].tolist() for name, array in part.items()} for part in explained)
                return _explanation(columns) | _totals(totals)
        return None


def _totals(values: dict[str, Any]) -> dict[str, Any]:
    filters_on = [name for name in FILTERS if f"{name} left" in values]
    return {
        "vocab": values["vocab"],
        "logsumexp": values["logsumexp"],
        "coin": values.get("coin"),
        "left": {name: values[f"{name} left"] for name in filters_on},
        "mass": {name: values[f"{name} mass"] for name in filters_on},
    }


def _explanation(columns: dict[str, Any]) -> dict[str, Any]:
    ids, order = columns.pop("ids"), list(columns)
    candidates: dict[int, dict[str, Any]] = {}
    for i, token in enumerate(ids):
        values = {name: columns[name][i] for name in order}
        gone = next((name for name in order if name in FILTERS and values[name] == -math.inf), None)
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        candidates.setdefault(token, {"id": token, **finite, "dropped_by": gone})
    likeliest_first = sorted(candidates.values(), key=lambda c: (c["logprob"] is None, -(c["logprob"] or 0.0), c["id"]))
    return {"stages": order, "candidates": likeliest_first}


FILTERS = ("top_p", "min_p", "xtc", "top_k")


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """One drawn token per row, all lazy.

    tokens: `[R]` uint32. finite: `[R]` bool; False means that the row has no finite normalised score, a ModelError of
    that row alone; its token is then 0. logprobs, explained: None if no row asks for them.
    """

    tokens: mx.array
    finite: mx.array
    logprobs: LogprobData | None
    explained: ExplainData | None = None


def select(sessions: Sequence[SamplingSession], scores: mx.array) -> Selection:
    """Draw one token per row at `session.step`, then advance each step by one.

    scores: `[R, V]` f32, bf16 or f16, row r for sessions[r]; not changed. Raises ValueError for another shape, before
    any session advances. Queues device work only; never waits for it.
    """
    if scores.ndim != 2 or scores.shape[0] != len(sessions) or not sessions:
        raise ValueError(f"{len(sessions)} sessions need scores of shape [rows, vocabulary], not {tuple(scores.shape)}")
    kinds: dict[Kind, list[int]] = {}
    for row, session in enumerate(sessions):
        if session._disposed:
            raise ValueError(f"the session of row {row} is disposed")
        if session.vocab_size != scores.shape[1]:
            raise ValueError(f"row {row} was set up for {session.vocab_size} tokens, but gets {scores.shape[1]} scores")
        kinds.setdefault(session.kind, []).append(row)
    groups = [_draw(kind, rows, [sessions[r] for r in rows], scores) for kind, rows in kinds.items()]
    for session in sessions:
        session.step += 1
    captured = [(group.rows, group.captured) for group in groups if group.captured is not None]
    logprobs = LogprobData(captured) if captured else None
    staged = [(group.rows, group.stages) for group in groups if group.stages is not None]
    explained = ExplainData(staged) if staged else None
    if len(groups) == 1:
        return Selection(groups[0].tokens, groups[0].finite, logprobs, explained)
    order = [row for group in groups for row in group.rows]
    back = mx.array(sorted(range(len(order)), key=order.__getitem__), dtype=mx.uint32)
    tokens = mx.concatenate([group.tokens for group in groups])[back]
    return Selection(tokens, mx.concatenate([group.finite for group in groups])[back], logprobs, explained)


def _draw(kind: Kind, rows: list[int], sessions: list[SamplingSession], scores: mx.array) -> _Group:
    x = scores if len(rows) == scores.shape[0] else scores[mx.array(rows, dtype=mx.uint32)]
    trace: Stages = {"score": x}
    if kind.bias:
        x = _add_bias(x, sessions)
    if kind.history != "none":
        x = _penalise(x, sessions)
    total = mx.logsumexp(x, axis=-1, keepdims=True)
    # The sum is finite exactly if some normalised score is, and then none is NaN: any NaN or +inf ends up in the sum.
    finite = mx.isfinite(total)[:, 0]
    logprobs = x - total
    trace |= {"penalised": x, "logprob": logprobs}
    if kind.greedy:
        tokens = mx.argmax(logprobs, axis=-1)
    else:
        tokens = _sample(kind, sessions, logprobs, trace)
    tokens = mx.where(finite, tokens, mx.array(0, dtype=mx.uint32))
    captured = None if kind.logprobs is None else _capture(logprobs, tokens, kind.logprobs)
    stages = None if not kind.explain else _explain(trace, total, tokens, kind.explain)
    return _Group(rows, tokens, finite, captured, stages)


def _explain(trace: Stages, logsumexp: mx.array, tokens: mx.array, k: int) -> Explained:
    """The trace at the k likeliest tokens, as the model scored them and after the penalties, and the drawn one. float32."""
    rows, vocab = trace["score"].shape
    totals = {"vocab": mx.full((rows,), vocab), "logsumexp": logsumexp[:, 0].astype(mx.float32)}
    if (coin := trace.pop("coin", None)) is not None:
        totals["coin"] = coin
    likelihood = mx.exp(trace["logprob"].astype(mx.float32))
    for name in (name for name in FILTERS if name in trace):
        kept = trace[name] > -math.inf
        totals |= {f"{name} left": kept.sum(axis=1), f"{name} mass": mx.where(kept, likelihood, 0.0).sum(axis=1)}
    likeliest = [filters.likeliest(trace[name], k).astype(mx.uint32) for name in ("score", "logprob")]
    ids = mx.concatenate([*likeliest, tokens[:, None]], axis=1)
    wide = {name: mx.take_along_axis(values, ids, axis=1).astype(mx.float32) for name, values in trace.items()}
    return Explained({"ids": ids, **wide}, totals)


def _sample(kind: Kind, sessions: list[SamplingSession], logprobs: mx.array, trace: Stages) -> mx.array:
    """Filters, scale and one keyed draw per row. Each stage is noted in `trace`, lazily: unread, it costs nothing."""
    dtype = logprobs.dtype
    specs = [session.spec for session in sessions]
    keys = _key_rows([step_key_bits(session.seed, session.step) for session in sessions])
    kept = logprobs
    if kind.top_p:
        kept = trace["top_p"] = filters.top_p(kept, filters.column([s.top_p for s in specs]))
    if kind.min_p:
        kept = trace["min_p"] = filters.min_p(kept, filters.column([math.log(s.min_p) for s in specs], dtype), kind.min_p)
    if kind.xtc:
        both = mx.vmap(mx.random.split)(keys)
        coin = mx.vmap(lambda key: mx.random.uniform(key=key))(both[:, 0])
        keys = both[:, 1]
        if kind.explain:
            trace["coin"] = coin
        apply = coin[:, None] <= filters.column([s.xtc_probability for s in specs])
        kept = trace["xtc"] = filters.xtc(kept, apply, filters.column([s.xtc_threshold for s in specs], dtype), _exempt(sessions))
    if kind.top_k:
        kept = trace["top_k"] = filters.top_k(kept, kind.top_k)
    gains = [_gain(spec) for spec in specs]
    scaled = filters.scale(kept, gains)
    if kind.curve is not None:
        scaled = _tone(kind.curve, specs, gains, logprobs, kept, scaled)
    noise = filters.gumbel(keys, logprobs.shape[1])
    if kind.explain:
        wide = scaled.astype(mx.float32)
        trace |= {"scaled": scaled, "probability": mx.softmax(wide, axis=-1), "noise": noise}
    return mx.argmax(noise + scaled, axis=-1)


def _gain(spec: SamplingSpec) -> float:
    if spec.hlg is not None and spec.hlg.gain is not None:
        return spec.hlg.gain
    return 1.0 / max(spec.temp, 1.0 / MAX_GAIN)


def _tone(anchor: Anchor, specs: list[SamplingSpec], gains: list[float], logprobs: mx.array, kept: mx.array, plain: mx.array) -> mx.array:
    """The HLG curve over `kept`; rows whose curve is degenerate take `plain`, which is the bits of a temperature."""
    curves = [s.hlg or HlgSpec() for s in specs]
    flat = [math.isinf(c.width) or c.toe <= 0 or c.head <= 0 for c in curves]
    if all(flat):
        return plain
    if anchor == "max":
        mu = filters.anchor_max(logprobs, filters.column([c.offset for c in curves]))
    else:
        mu = filters.anchor_entropy(logprobs) if anchor == "entropy" else filters.anchor_median(logprobs)
    width = filters.column([0.0 if f else c.width for f, c in zip(flat, curves, strict=True)])
    toe = filters.column([1.0 if f else c.toe for f, c in zip(flat, curves, strict=True)])
    head = filters.column([1.0 if f else c.head for f, c in zip(flat, curves, strict=True)])
    curved = filters.tone_curve(kept, mu, filters.column(gains), width, toe, head)
    return mx.where(mx.array(flat)[:, None], plain.astype(mx.float32), curved) if any(flat) else curved


def _exempt(sessions: list[SamplingSession]) -> mx.array | None:
    """`[R, V]` bool of the ids that XTC must not drop, or None if no row names any."""
    pairs = [(row, token) for row, session in enumerate(sessions) for token in session._exempt_ids]
    if not pairs:
        return None
    rows, tokens = (mx.array(column, dtype=mx.uint32) for column in zip(*pairs, strict=True))
    return mx.zeros((len(sessions), sessions[0].vocab_size), dtype=mx.uint32).at[rows, tokens].add(1) > 0


# --- processors -----------------------------------------------------------------------------------------------------


def _add_bias(x: mx.array, sessions: list[SamplingSession]) -> mx.array:
    entries = [(row, token, bias) for row, session in enumerate(sessions) for token, bias in session.spec.logit_bias]
    rows, tokens, values = zip(*entries, strict=True)
    return x.at[mx.array(rows, dtype=mx.uint32), mx.array(tokens, dtype=mx.uint32)].add(mx.array(values, dtype=mx.float32))


def _penalise(x: mx.array, sessions: list[SamplingSession]) -> mx.array:
    histories = [session._history for session in sessions if session._history is not None]
    lengths = [len(history) for history in histories]
    width = max(lengths)
    if not width:
        return x
    ids = mx.stack([history.read(width) for history in histories])
    specs = [session.spec for session in sessions]
    x = filters.repetition(x, ids, lengths, [s.repetition_penalty or 1.0 for s in specs], [s.repetition_context_size for s in specs])
    x = filters.presence(x, ids, lengths, [s.presence_penalty or 0.0 for s in specs], [s.presence_context_size for s in specs])
    return filters.frequency(x, ids, lengths, [s.frequency_penalty or 0.0 for s in specs], [s.frequency_context_size for s in specs])


# --- log probabilities ----------------------------------------------------------------------------------------------


def _capture(logprobs: mx.array, tokens: mx.array, k: int) -> Captured:
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=1)
    rank = (logprobs > chosen).sum(axis=1)
    best = filters.likeliest(logprobs, k)
    values = mx.take_along_axis(logprobs, best, axis=1).astype(mx.float32)
    return Captured(chosen[:, 0].astype(mx.float32), rank, best, values)
