"""Sliding layers in rings against full buffers: memory and step time. `python engine/benchmarks/ring.py [--context 4096]`

A gemma-3-like stack with random weights (five sliding layers to one full, window 512), one row of `--context` tokens, decode steps in
interleaved rounds. The ring is `MLXNB_SLIDING_RING`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

# ruff: noqa: E402
from mlxnb_engine import blas

blas.preload("auto")

import mlx.core as mx
from machine import facts
from mlx_lm.models import gemma3_text

from mlxnb_engine.graph import ModelGraph
from mlxnb_engine.state.slots import Slots
from mlxnb_engine.state.spec import Geometry

CONFIG = {
    "model_type": "gemma3_text",
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 64,
}
CHUNK = 128


class Arm:
    """One row in its own slots."""

    def __init__(self, graph: ModelGraph, context: int, ring: int | None) -> None:
        self.graph, self.slots = graph, Slots(graph.specs, Geometry(), ring=ring)
        self.row = self.slots.add(context + 200)
        for start in range(0, context, CHUNK):
            self._feed([(start + i) % 4096 for i in range(CHUNK)])

    def _feed(self, ids: list[int]) -> None:
        self.slots.begin(len(ids))
        self.graph.feed(mx.array([ids]), self.slots.caches)
        self.slots.end()
        mx.eval(self.slots.arrays())
        self.row.length += len(ids)

    def step_ms(self) -> float:
        started = time.perf_counter()
        self._feed([7])
        return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(CONFIG))
    mx.eval(model)
    graph = ModelGraph(model, CONFIG)
    full, ring = Arm(graph, options.context, None), Arm(graph, options.context, CHUNK)
    costs: list[tuple[float, float]] = [(full.step_ms(), ring.step_ms()) for _ in range(options.rounds)][2:]
    result: dict[str, Any] = {
        "facts": facts("mlx", "mlx-lm", "mlxnb"),
        "context": options.context,
        "full_bytes": full.slots.nbytes,
        "ring_bytes": ring.slots.nbytes,
        "memory_ratio": ring.slots.nbytes / full.slots.nbytes,
        "step_time_ratio": statistics.median(b / a for a, b in costs),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
