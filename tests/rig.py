"""A bare execution core for tests: one scheduler and group over a generated model, and a record of everything that passed through it.

No engine thread, no text: a `Recorder` stands where the delivery of a request would, and a `Watched` graph between group and model.
"""

from __future__ import annotations

import functools
import hashlib
import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tiny import VOCAB, write_model

from mlxnb_engine.admission import Entry, RowSpec
from mlxnb_engine.delivery import Drawn
from mlxnb_engine.graph import ModelGraph, Scores
from mlxnb_engine.methods.reuse import PrefixReuse, Shared
from mlxnb_engine.methods.window import GroupLimits, Row, WindowGroup
from mlxnb_engine.qualify import strict_geometry
from mlxnb_engine.scheduler import Scheduler
from mlxnb_engine.state.spec import Geometry
from mlxnb_engine.types import FinishReason, Left, SamplingSpec

GREEDY = SamplingSpec()
G26 = SamplingSpec(temp=0.6, top_p=0.95, presence_penalty=0.2, repetition_penalty=1.05)


# -- models ------------------------------------------------------------------------------------------------------------


def model_of(family: str = "llama", **overrides: Any) -> nn.Module:
    """A fresh tiny model of this family with the weights that `tiny.write_model` gives it."""
    with tempfile.TemporaryDirectory() as folder:
        model: nn.Module = load_model(write_model(Path(folder), family, **overrides))[0]
        mx.eval(model.parameters())
    return model


@functools.cache
def graph_of(family: str = "llama") -> ModelGraph:
    """One shared graph per family: tests that change weights build their own."""
    return ModelGraph(model_of(family), {})


def geometries(graph: ModelGraph, blas: str) -> list[Geometry]:
    """The geometries in which this BLAS gives every row the same bits whatever its neighbours."""
    return [_measured(graph)] if blas == "mkl-strict" else [Geometry(), Geometry(bucketed=True)]


@functools.cache
def _measured(graph: ModelGraph) -> Geometry:
    verdict = strict_geometry(graph.projection_shapes(), {spec.key_dim for spec in graph.specs})
    assert verdict.geometry is not None, verdict.note
    return verdict.geometry


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Seeded ids; the last two of the vocabulary stay free for tests that give them a meaning."""
    rng = random.Random(f"{length}/{seed}")
    return tuple(rng.randrange(VOCAB - 2) for _ in range(length))


# -- what is recorded --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Recorder:
    """A row's reader. stop_after: it answers "stop" at that many tokens, before max_tokens; raise_at: it raises there."""

    rig: Rig
    max_tokens: int
    stop_after: int | None = None
    raise_at: int | None = None
    cancelled: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    admitted: int = 0
    cached: int = 0
    ssd: int = 0
    progress: list[tuple[int, int]] = field(default_factory=list)
    state: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    scores: list[tuple[int, Scores, int]] = field(default_factory=list)
    notes: list[tuple[list[int], Left | None, Drawn | None, bool]] = field(default_factory=list)

    def reused(self, tokens: int, ssd_tokens: int) -> None:
        self.cached, self.ssd = tokens, ssd_tokens

    def admit(self) -> None:
        self.admitted += 1

    def prefilled(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def deliver(self, token: Drawn) -> FinishReason | None:
        assert not self.ends, "delivered after the end"
        self.rig.log.append(("deliver", len(self.ids)))
        if self.raise_at == len(self.ids):
            raise RuntimeError("the reader broke")
        self.ids.append(token.id)
        self.logprobs.append(token.logprobs)
        if self.stop_after is not None and len(self.ids) >= self.stop_after:
            return "stop"
        return "length" if len(self.ids) >= self.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        self._end(reason)
        row = next(row for row in self.rig.group.rows if row.spec.consumer is self)
        self.consumed = list(row.consumed)
        self.state = self.rig.state_of(row)

    def cancel(self) -> None:
        self._end("cancelled")

    def fail(self, error: BaseException) -> None:
        self._end(error)

    def note(self, left: Left | None, undelivered: Drawn | None = None, *, ended: bool = False) -> None:
        self.notes.append((list(self.ids), left, undelivered, ended))

    def _end(self, what: Any) -> None:
        assert not self.ends, f"ended twice: {self.ends} and {what!r}"
        self.ends.append(what)

    @property
    def end(self) -> Any:
        return self.ends[0] if self.ends else None

    def hidden(self) -> list[bytes]:
        """The row that entered the projection at each of its steps, as bytes."""
        return [np.array(scores.hidden[i]).tobytes() for _, scores, i in self.scores]  # type: ignore[index]

    def logits(self) -> list[mx.array]:
        return [scores.logits[i] for _, scores, i in self.scores]


class Watched:
    """The graph as a group sees it, with a record of every forward. `fault` may replace the scores of one."""

    def __init__(self, rig: Rig, graph: ModelGraph) -> None:
        self.rig, self.graph = rig, graph
        self.specs, self.vocab_size = graph.specs, graph.vocab_size
        self.model, self.family, self.wide_masks = graph.model, graph.family, graph.wide_masks
        self.windows: list[tuple[int, ...]] = []
        self.steps: list[tuple[int, ...]] = []
        self.fault: Callable[[list[Row], Scores], Scores] | None = None

    def feed(self, ids: mx.array, caches: Sequence[Any]) -> None:
        self.windows.append(ids.shape)
        self.graph.feed(ids, caches)

    def forward(self, ids: mx.array, caches: Sequence[Any], positions: Sequence[int], multiple: int = 1) -> Scores:
        self.rig.log.append(("build", len(self.steps)))
        self.steps.append(ids.shape)
        scores = self.graph.forward(ids, caches, positions, multiple)
        rows = self.rig.batch()
        if self.fault is not None:
            scores = self.fault(rows, scores)
        for i, row in enumerate(rows):
            consumer: Any = row.spec.consumer
            consumer.scores.append((row.slot.length, scores, i))
        return scores


class Rig:
    """A group and its scheduler. log: ("build" | "submit" | "read" | "deliver", index) in order of occurrence.

    shared: a prefix cache, which several rigs may share; each graph has its own namespace there.
    """

    def __init__(
        self,
        graph: ModelGraph,
        geometry: Geometry | None = None,
        submit: str = "after",
        *,
        max_rows: int = 8,
        chunk: int = 64,
        max_kv_bytes: int | None = None,
        ring: bool = False,
        shared: Shared | None = None,
        exact: bool = True,
    ) -> None:
        self.log: list[tuple[str, int]] = []
        self.recorders: list[Recorder] = []
        self.watched = Watched(self, graph)
        limits = GroupLimits(chunk, submit, geometry or Geometry(), max_kv_bytes is not None, ring)  # type: ignore[arg-type]
        self.namespace = hashlib.sha256(str(id(graph)).encode()).digest()
        self.reuse = None
        if shared is not None:
            self.reuse = PrefixReuse(shared, lambda cut: self.namespace, graph.specs, graph.family, chunk=chunk, exact=exact)
        self.group = WindowGroup(self.watched, limits, self.reuse)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.group, max_rows=max_rows, prefill_chunk=chunk, max_kv_bytes=max_kv_bytes)
        for name in ("submit", "read"):
            setattr(self.group, f"_{name}", self._logged(name, getattr(self.group, f"_{name}")))

    def _logged(self, name: str, action: Callable[[Any], Any]) -> Callable[[Any], Any]:
        seen = iter(range(10**9))

        def call(flight: Any) -> Any:
            self.log.append((name, next(seen)))
            return action(flight)

        return call

    def ask(self, ids: Sequence[int], tokens: int, sampling: SamplingSpec = GREEDY, seed: int = 0, **how: Any) -> Recorder:
        """Submit one row. how: `limit`, and fields of the Recorder."""
        return self.ask_many(ids, tokens, [(sampling, seed)], **how)[0]

    def ask_many(self, ids: Sequence[int], tokens: int, rows: Sequence[tuple[SamplingSpec, int]], **how: Any) -> list[Recorder]:
        """Submit one prompt for several rows, as the samples of one request."""
        limit, stable = how.pop("limit", 4096), how.pop("stable", len(ids))
        made = [Recorder(self, tokens, **how) for _ in rows]
        specs = (RowSpec(c, sampling, seed, tokens, limit) for c, (sampling, seed) in zip(made, rows, strict=True))
        self.scheduler.submit(Entry(tuple(ids), deque(specs), stable=stable))  # type: ignore[arg-type]
        self.recorders += made
        return made

    def tick(self, times: int = 1) -> bool:
        more = True
        for _ in range(times):
            more = self.scheduler.tick()
            self.scheduler.check()
        return more

    def run(self, most: int = 20_000) -> Rig:
        """Tick until nothing is left; fails if that never happens."""
        for _ in range(most):
            if not self.tick():
                assert self.scheduler.idle and not self.group.slots.rows()
                return self
        raise AssertionError(f"still busy after {most} ticks: {self.group.active} rows, {self.group.waiting_rows} waiting")

    def batch(self) -> list[Row]:
        """Running rows in batch order."""
        by_slot = {id(row.slot): row for row in self.group.rows}
        return [by_slot[id(slot)] for slot in self.group.slots.rows()]

    def row(self, recorder: Recorder) -> Row:
        return next(row for row in self.group.rows if row.spec.consumer is recorder)

    def state_of(self, row: Row) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.array(k), np.array(v)) for k, v in self.group.slots.extract(row.slot)]


# -- references --------------------------------------------------------------------------------------------------------


@functools.cache
def solo(
    graph: ModelGraph, geometry: Geometry, ids: tuple[int, ...], tokens: int, sampling: SamplingSpec = GREEDY, seed: int = 0
) -> Recorder:
    """The same row with no neighbour, ever."""
    rig = Rig(graph, geometry)
    alone = rig.ask(ids, tokens, sampling, seed)
    rig.run()
    assert alone.end == "length", alone.end
    return alone


@dataclass(frozen=True)
class Reference:
    """What mlx-lm itself gives. logprobs: bytes per step. state: per layer K and V of `len(ids) - 1 + tokens` positions."""

    ids: list[int]
    logprobs: list[bytes]
    state: list[tuple[bytes, bytes]]


@functools.cache
def mlx_lm_run(graph: ModelGraph, ids: tuple[int, ...], tokens: int) -> Reference:
    """Greedy decoding by mlx-lm's own loop over the same module."""
    cache = make_prompt_cache(graph.model)
    steps = generate_step(mx.array(ids), graph.model, max_tokens=tokens, sampler=lambda x: mx.argmax(x, axis=-1), prompt_cache=cache)
    out = [(int(token), np.array(logprobs).tobytes()) for token, logprobs in steps]
    held = len(ids) - 1 + tokens
    state = [tuple(np.array(part[:, :, :held]).tobytes() for part in (c.keys, c.values)) for c in cache]
    return Reference([t for t, _ in out], [p for _, p in out], state)  # type: ignore[arg-type]


def differences(got: Recorder, want: Recorder) -> list[str]:
    """What of a row differs from another run of it, in words; empty if ids, log probabilities, hidden rows and state agree."""
    out = []
    if got.ids != want.ids:
        out.append(f"ids {got.ids} != {want.ids}")
    if got.logprobs != want.logprobs:
        out.append("log probabilities")
    mine, theirs = got.hidden(), want.hidden()
    if mine != theirs:
        first = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), "count")
        out.append(f"hidden rows from step {first} ({len(mine)} and {len(theirs)} steps)")
    if len(got.state) != len(want.state):
        out.append(f"{len(got.state)} layers of state, not {len(want.state)}")
    for layer, (a, b) in enumerate(zip(got.state, want.state, strict=False)):
        for name, x, y in zip("KV", a, b, strict=True):
            if x.tobytes() != y.tobytes():
                out.append(f"{name} of layer {layer}: {x.shape} and {y.shape}")
    return out


def assert_same(got: Recorder, want: Recorder) -> None:
    found = differences(got, want)
    assert not found, "; ".join(found) + f"; ended {got.end!r} and {want.end!r}"
