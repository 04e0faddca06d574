"""Where one decode step of the default model goes on this CPU: `python engine/benchmarks/step_profile.py [--batch 1] [--out FILE]`.

Counted: the operations of a step's graph, ours and mlx-lm's. Measured apart, over the model's own matrices (so that none stays in a
cache): its products, the projection onto the vocabulary in both orders, what one small operation costs, and building the graph.
The parts overlap in a real step; they say which lever is long, not what their sum is.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# ruff: noqa: E402
from mlxnb_engine import blas

choice = blas.preload("auto")

import mlx.core as mx
from machine import facts
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxnb_engine import loader
from mlxnb_engine.config import resolve
from mlxnb_engine.graph import ModelGraph
from mlxnb_engine.sampling import SamplingSession, select
from mlxnb_engine.state.slots import Slots
from mlxnb_engine.state.spec import Geometry
from mlxnb_engine.types import SamplingSpec

PROMPT = list(range(100, 132))


def load() -> Any:
    config = resolve()
    return loader.load(loader.locate(None, config, lambda *_: None, lambda: False), config, None)


def operations(outputs: list[mx.array]) -> Counter[str]:
    """Primitives of the graph behind these arrays, by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        return Counter(re.findall(r'label ="(\w+)", shape=rectangle', file.read_text()))


class OurStep:
    """Steps of our window group's graph, without scheduler and delivery."""

    def __init__(self, loaded: Any, batch: int) -> None:
        self.graph = ModelGraph(loaded.model, loaded.model_config)
        self.slots = Slots(self.graph.specs, Geometry())
        self.rows = [self.slots.add(200) for _ in range(batch)]
        self.sessions = [SamplingSession(SamplingSpec(), 0, self.graph.vocab_size, ()) for _ in range(batch)]
        self._window([PROMPT] * batch)
        mx.eval(self.slots.arrays())

    def _window(self, ids: list[list[int]]) -> mx.array:
        width = len(ids[0])
        self.slots.begin(width)
        scores = self.graph.forward(mx.array(ids), self.slots.caches, [b * width + width - 1 for b in range(len(ids))])
        self.slots.end()
        for row in self.rows:
            row.length += width
        return scores.logits

    def build(self) -> list[mx.array]:
        chosen = select(self.sessions, self._window([[5]] * len(self.rows)))
        return [chosen.tokens, chosen.finite, *self.slots.arrays()]


class TheirStep:
    """Steps as mlx-lm's `generate_step` builds them; one row or a batch of equal rows."""

    def __init__(self, loaded: Any, batch: int) -> None:
        self.model, self.cache = loaded.model, make_prompt_cache(loaded.model)
        self.batch = batch
        self.model(mx.array([PROMPT] * batch), cache=self.cache)
        mx.eval([c.state for c in self.cache])

    def build(self) -> list[mx.array]:
        logits = self.model(mx.array([[5]] * self.batch), cache=self.cache)[:, -1, :]
        return [mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)]


def milliseconds(action: Callable[[], Any], rounds: int = 7) -> float:
    out = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        out.append((time.perf_counter() - started) * 1e3)
    return statistics.median(out)


def cost_of(step: Any) -> dict[str, float]:
    """Medians over steps: building the graph, and building and evaluating it."""

    def whole() -> None:
        mx.eval(step.build())

    building = []
    for _ in range(7):
        started = time.thread_time()
        outputs = step.build()
        building.append((time.thread_time() - started) * 1e3)
        mx.eval(outputs)
    return {"build_ms": statistics.median(building), "step_ms": milliseconds(whole)}


def products(model: Any, batch: int) -> dict[str, float]:
    """All matrices of the layers once, and the projection onto the vocabulary in both orders."""
    matrices = [w for name, w in tree_flatten(model.parameters()) if w.ndim == 2 and "layers" in name]
    head = max((w for _, w in tree_flatten(model.parameters()) if w.ndim == 2), key=lambda w: w.shape[0])
    inputs = {w.shape[1]: mx.random.normal((batch, w.shape[1])) for w in (*matrices, head)}
    mx.eval(list(inputs.values()))
    return {
        "layers_ms": milliseconds(lambda: mx.eval([inputs[w.shape[1]] @ w.T for w in matrices])),
        "head_ms": milliseconds(lambda: mx.eval(inputs[head.shape[1]] @ head.T)),
        "head_weight_first_ms": milliseconds(lambda: mx.eval(mx.contiguous((head @ inputs[head.shape[1]].T).T))),
    }


def small_operation_us(count: int = 3000) -> float:
    x = mx.zeros((1, 576))
    mx.eval(x)

    def chain() -> None:
        y = x
        for _ in range(count):
            y = y + x
        mx.eval(y)

    return milliseconds(chain, 3) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ours, theirs = OurStep(load(), options.batch), TheirStep(load(), options.batch)
    result: dict[str, Any] = {"facts": facts("mlx", "mlx-lm", "mlxnb"), "blas": choice.name, "batch": options.batch}
    for name, step in (("mlxnb", ours), ("mlx-lm", theirs)):
        counted = operations(step.build())
        result[name] = {"operations": counted.total(), "by_kind": dict(counted.most_common(12)), **cost_of(step)}
    result["products"] = products(ours.graph.model, options.batch)
    result["small_operation_us"] = small_operation_us()
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
