"""A second, transposed copy of some weights, read by steps of one row: a BLAS may take half the time for it.

Such a step is bound by how fast weights are read, and MKL's product of one row with a `[49152, 576]` matrix reads 5.7 GB/s in the
layout that `nn.Linear` keeps and 11 GB/s in the other (AMD EPYC). For several rows the first layout is the faster one, so both are
kept. The sums are formed in another order: asked only where the number of rows changes bits anyway (`binding._graph`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

_SAMPLE_BYTES = 64 * 2**20
"""Weights of one shape that are timed: more than caches hold."""
_LEAST_GAIN = 0.85
"""Share of the time below which a copy is worth its memory."""

Timer = Callable[[Sequence[mx.array], Sequence[mx.array]], tuple[float, float]]
"""(weights, their transposed copies) -> seconds of one row times all of the first, and of the second."""


class _Shape(NamedTuple):
    """Weights of one shape for which the copy is faster. share: its time, as a part of the other's."""

    modules: list[nn.Module]
    nbytes: int
    share: float


def install(model: nn.Module, budget_bytes: int, timed: Timer | None = None) -> int:
    """Copy what gains by it, most gained first, while the copies stay within budget_bytes; returns the bytes copied.

    Only plain float32 `nn.Linear` and `nn.Embedding` (as the projection) take part. The models are unmodified: the class of a module
    is swapped for a subclass. timed: how the two layouts are timed; a test gives its own.
    """
    timed, spent = timed or seconds, 0
    by_shape: dict[tuple[int, ...], list[nn.Module]] = defaultdict(list)
    for module in {id(m): m for _, m in model.named_modules()}.values():
        if type(module) in (nn.Linear, nn.Embedding) and module.weight.dtype == mx.float32:
            by_shape[module.weight.shape].append(module)
    shapes = [_measured(modules, timed) for modules in by_shape.values()]
    for shape in sorted((s for s in shapes if s.share < _LEAST_GAIN), key=lambda s: s.share):
        if spent + shape.nbytes <= budget_bytes:
            spent += shape.nbytes
            for module in shape.modules:
                _swap(module)
    return spent


def _measured(modules: list[nn.Module], timed: Timer) -> _Shape:
    nbytes = int(modules[0].weight.nbytes)
    sample = [module.weight for module in modules[: -(-_SAMPLE_BYTES // nbytes)]]
    turned = [mx.contiguous(weight.T) for weight in sample]
    mx.eval(sample, turned)
    plain_s, turned_s = timed(sample, turned)
    return _Shape(modules, nbytes * len(modules), turned_s / plain_s)


def seconds(weights: Sequence[mx.array], turned: Sequence[mx.array], rounds: int = 3) -> tuple[float, float]:
    """The fastest of some rounds, in turns, of one row times all weights in each layout."""
    x = mx.zeros((1, 1, weights[0].shape[1]))
    mx.eval(x)
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for form, products in enumerate(([x @ w.T for w in weights], [x @ w for w in turned])):
            started = time.perf_counter()
            mx.eval(products)
            best[form] = min(best[form], time.perf_counter() - started)
    return best[0], best[1]


def _swap(module: nn.Module) -> None:
    base = type(module)
    name = "as_linear" if base is nn.Embedding else "__call__"
    usual: Callable[[Any, mx.array], mx.array] = getattr(base, name)
    turned = mx.contiguous(module.weight.T)
    mx.eval(turned)

    def call(module: Any, x: mx.array) -> mx.array:
        if x.size != x.shape[-1]:
            return usual(module, x)
        return mx.addmm(module.bias, x, turned) if "bias" in module else x @ turned

    module.__class__ = type(base.__name__, (base,), {name: call})
