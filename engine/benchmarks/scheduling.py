"""W14 and the long-row item: the engine's own cost per step, without a model's weights in the way."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from mlxnb_engine import blas

blas.preload("auto")  # before the first import of mlx

# ruff: noqa: E402
import mlx.core as mx
from mlx_lm.models import llama

from mlxnb_engine.admission import Entry, RowSpec
from mlxnb_engine.delivery import Drawn
from mlxnb_engine.graph import ModelGraph, Scores
from mlxnb_engine.methods.window import GroupLimits, Row, WindowGroup
from mlxnb_engine.sampling import SamplingSession
from mlxnb_engine.scheduler import Scheduler
from mlxnb_engine.state.families import Family
from mlxnb_engine.types import SamplingSpec, StateSpec, TokenId


class Sink:
    """A consumer that only counts."""

    cancelled = False

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def reused(self, tokens: int, ssd_tokens: int) -> None: ...
    def admit(self) -> None: ...
    def prefilled(self, done: int, total: int) -> None: ...
    def finish(self, reason: str) -> None: ...
    def cancel(self) -> None: ...
    def fail(self, error: BaseException) -> None:
        raise error

    def deliver(self, token: Drawn) -> Any:
        self.left -= 1
        return "length" if self.left <= 0 else None


class NullGraph:
    """A model of no layers' work: scores are a constant. What remains is the engine."""

    vocab_size = 8
    specs = (StateSpec("full", 1, 8, 8, "float32"),)
    family, wide_masks = Family(split=True), False

    def forward(self, ids: mx.array, caches: Any, positions: Any, multiple: int = 1) -> Scores:
        return Scores(mx.zeros((len(positions), self.vocab_size)), None)

    def feed(self, ids: mx.array, caches: Any) -> None: ...


def step_cost(batch: int, steps: int = 300) -> float:
    """Milliseconds per step of a full batch with a null graph: scheduler, window step, sampling and delivery."""
    group = WindowGroup(NullGraph(), GroupLimits(2048, "after"))  # type: ignore[arg-type]
    scheduler = Scheduler(group, max_rows=batch, prefill_chunk=2048, max_kv_bytes=None)
    for _ in range(batch):
        sink: Any = Sink(steps + 50)
        scheduler.submit(Entry((1, 2), deque([RowSpec(sink, SamplingSpec(), 0, steps + 50, 10**6)])))  # type: ignore[arg-type]
    while group.active < batch:
        scheduler.tick()
    costs = []
    for _ in range(steps):
        started = time.perf_counter()
        scheduler.tick()
        costs.append(time.perf_counter() - started)
    return statistics.median(costs) * 1e3


def curve(rounds: int) -> dict[int, float]:
    """Milliseconds per step by batch width: the median of the rounds."""
    widths = (1, 2, 4, 8, 16, 32, 64)
    costs = [{b: step_cost(b) for b in widths} for _ in range(rounds)]
    return {b: statistics.median(c[b] for c in costs) for b in widths}


def _decode(graph: ModelGraph, lengths: list[int], steps: int) -> tuple[float, int]:
    """(median seconds per decode step, K/V bytes) of rows that already hold `lengths` tokens."""
    group = WindowGroup(graph, GroupLimits(128, "after"))
    for length in lengths:
        slot = group.slots.add(length + steps + 2)
        slot.length = length  # what the state holds does not matter to the cost, and zeros are finite
        sink: Any = Sink(10**9)
        sampler = SamplingSession(SamplingSpec(), 0, graph.vocab_size)
        ids = [TokenId(1)] * length
        group.rows.append(Row(RowSpec(sink, SamplingSpec(), 0, 10**9, 10**6), sampler, slot, ids, TokenId(1)))
    costs = []
    for _ in range(steps):
        started = time.perf_counter()
        group.advance()
        costs.append(time.perf_counter() - started)
    return statistics.median(costs[2:]), group.kv_bytes


def long_row(rounds: int, steps: int = 8) -> dict[str, Any]:
    """One 16k-token row beside seven 200-token rows, against the two kept apart: memory and time per step."""
    config = {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 8, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5, "vocab_size": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    model = llama.Model(llama.ModelArgs(**config))
    mx.eval(model)
    graph = ModelGraph(model, config)
    runs = []
    for _ in range(rounds):
        together, apart = _decode(graph, [16_000] + [200] * 7, steps), [_decode(graph, [16_000], steps), _decode(graph, [200] * 7, steps)]
        runs.append((together[0] / sum(t for t, _ in apart), together[1] / sum(b for _, b in apart)))
    return {
        "id": "long row",
        "title": "16k-token row beside seven 200-token rows",
        "time_ratio": statistics.median(t for t, _ in runs),
        "memory_ratio": statistics.median(b for _, b in runs),
    }


if __name__ == "__main__":
    for rows, cost in curve(3).items():
        print(f"B={rows:3d}  {cost:.3f} ms per step")
    print(long_row(3))
