"""Measures on the running backend what must never be assumed: exact geometries and the cheaper submission order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from .graph import ModelGraph
from .state.families import Family
from .state.slots import Slots
from .state.spec import BLOCK_TOKENS, Geometry

SubmitOrder = Literal["before", "after"]
Product = Callable[[mx.array, mx.array], mx.array]

_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 31, 32, 40, 64, 100, 128, 200, 512)
_MULTIPLES = (1, 2, 4, 8, 16)
_NEAR_TIE = 1.5
_FIRST_RUNG = 3 * BLOCK_TOKENS
_RUNGS = tuple(_FIRST_RUNG << k for k in range(6))


@dataclass(frozen=True, slots=True)
class StrictVerdict:
    """geometry: the least restrictive one in which every measured product was bit-equal, or None if none was."""

    geometry: Geometry | None
    note: str


def strict_geometry(shapes: Iterable[tuple[int, int]], head_dims: Iterable[int], product: Product = mx.matmul) -> StrictVerdict:
    """Find window widths and capacities for which products do not depend on the number of rows or on zero padding.

    shapes: (outputs, inputs) of the model's dense matrices. head_dims: attention head widths.
    product: the operation under test, [.., M, K] x [.., K, N]; a test passes one whose sum order depends on M.
    A row of a product is compared, byte for byte, between every width that is a multiple of the candidate; probabilities
    times values also between every pair of capacities (rungs 192 * 2^k; a rung that differs is skipped).
    """
    key = mx.random.key(7)
    for multiple in _MULTIPLES:
        widths = [w for w in _WIDTHS if w % multiple == 0]
        if all(_rows_agree(key, outputs, inputs, widths, product) for outputs, inputs in sorted(shapes)) and all(
            _scores_agree(key, dim, widths, product) for dim in set(head_dims)
        ):
            skipped = _bad_rungs(key, multiple, set(head_dims), product)
            if len(skipped) < len(_RUNGS) - 2:
                first = next(r for r in _RUNGS if r not in skipped)
                geometry = Geometry(multiple, True, first, tuple(r for r in skipped if r > first))
                return StrictVerdict(geometry, f"windows in multiples of {multiple}, skipped capacities {list(skipped) or 'none'}")
    return StrictVerdict(None, "no multiple of window widths with a set of capacities gave the same bits for every batch")


def _rows_agree(key: mx.array, outputs: int, inputs: int, widths: list[int], product: Product) -> bool:
    # A projection over the vocabulary is sliced: the sum order of a column does not depend on how many columns there are
    # beyond the kernel's blocking, and 4096 of them are many blocks.
    keys = mx.random.split(key)
    weight = mx.random.normal((min(outputs, 4096), inputs), key=keys[0])
    x = mx.random.normal((widths[-1], inputs), key=keys[1])
    mx.eval(weight, x)
    widest = product(x, weight.T)
    return all(bool(mx.array_equal(product(x[-w:], weight.T), widest[-w:])) for w in widths[:-1])


def _scores_agree(key: mx.array, dim: int, widths: list[int], product: Product) -> bool:
    keys = mx.random.split(key)
    k = mx.random.normal((1, 2, _RUNGS[2], dim), key=keys[0])
    q = mx.random.normal((1, 2, widths[-1], dim), key=keys[1])
    mx.eval(k, q)
    widest = product(q, k.swapaxes(-1, -2))
    probs = mx.softmax(widest, axis=-1)
    for extent in (r for r in _RUNGS if r <= _RUNGS[2]):
        summed = product(probs[..., :extent], k[:, :, :extent])
        for w in widths:
            if not mx.array_equal(product(q[:, :, -w:], k[:, :, :extent].swapaxes(-1, -2)), widest[:, :, -w:, :extent]):
                return False
            if not mx.array_equal(product(probs[:, :, -w:, :extent], k[:, :, :extent]), summed[:, :, -w:]):
                return False
    return True


def _bad_rungs(key: mx.array, multiple: int, dims: set[int], product: Product) -> tuple[int, ...]:
    """Capacities at which probabilities times values differs from the result at a larger one that is kept, over the same keys."""
    bad: set[int] = set()
    keys = mx.random.split(key)
    for dim in dims:
        values = mx.random.normal((1, 2, _RUNGS[-1], dim), key=keys[0])
        probs = mx.random.uniform(shape=(1, 2, 4 * multiple, _RUNGS[-1]), key=keys[1])
        mx.eval(values, probs)
        # From the largest down: one odd capacity in the middle must not disqualify the smaller ones.
        for extent in reversed(_RUNGS[:-1]):
            own = product(probs[..., :extent], values[:, :, :extent])
            for wider in (r for r in _RUNGS if r > extent and r not in bad):
                padded = mx.pad(probs[..., :extent], [(0, 0), (0, 0), (0, 0), (0, wider - extent)])
                for w in (multiple, 4 * multiple):
                    if not mx.array_equal(product(padded[:, :, :w], values[:, :, :wider]), own[:, :, :w]):
                        bad.add(extent)
    return tuple(sorted(bad))


def weight_first(vocab: int, width: int, rounds: int = 3) -> bool:
    """Whether four rows are projected onto the vocabulary faster as `(W x^T)^T` than as `x W^T`, measured on this BLAS.

    MKL on AMD takes half the time for a `[49152, 576]` matrix; the two round differently, so an exact BLAS is not asked.
    """
    weight = mx.zeros((vocab, width))
    x = mx.zeros((4, width))
    mx.eval(weight, x)
    forms: tuple[Callable[[], mx.array], ...] = (lambda: x @ weight.T, lambda: mx.contiguous((weight @ x.T).T))
    costs: list[list[float]] = [[], []]
    for _ in range(rounds):
        for form, cost in zip(forms, costs, strict=True):
            started = time.perf_counter()
            mx.eval(form())
            cost.append(time.perf_counter() - started)
    return min(costs[1]) < 0.9 * min(costs[0])


def submit_order(rounds: int = 4) -> SubmitOrder:
    """Whether step s+1 should be submitted before or after step s is read, by measured cost at capacity 256 and 8192.

    A submitted step pins the buffers that it reads. On the CPU backend an append then copies the whole buffer (P77), which
    costs ever more with capacity; on a GPU submitting first keeps the queue full, which this small chain does not show: a near tie
    goes to "before".
    """
    cost = {order: sum(_chain_cost(order, capacity, rounds) for capacity in (256, 8192)) for order in ("before", "after")}
    return "before" if cost["before"] <= _NEAR_TIE * cost["after"] else "after"


def _chain_cost(order: str, capacity: int, rounds: int) -> float:
    """Seconds per step of a small pipelined chain: append at one position, reduce, and read the previous result."""
    buffers = [mx.zeros((2, 4, capacity, 64)) for _ in range(4)]
    token = mx.zeros((2,))
    mx.eval(buffers, token)
    flight = None
    costs = []
    for step in range(rounds + 1):
        started = time.perf_counter()
        positions = mx.full((2, 1, 1, 1), step, mx.int32)
        source = token if flight is None else flight
        for i, buffer in enumerate(buffers):
            row = mx.broadcast_to(source[:, None, None, None], (2, 4, 1, 64))
            buffers[i] = mx.put_along_axis(buffer, positions, row, axis=2)
        # The extent is constant: what is compared is the cost of the append, not of attending.
        built = sum((b[:, :, :256].sum(axis=(1, 2, 3)) for b in buffers), start=mx.zeros((2,)))
        if order == "before":
            mx.async_eval(built, *buffers)
        if flight is not None:
            flight.tolist()
        if order == "after":
            mx.async_eval(built, *buffers)
        flight = built
        if step:
            costs.append(time.perf_counter() - started)
    mx.eval(flight, *buffers)
    return statistics.median(costs)


def shared_if_exact(model: nn.Module, config: Mapping[str, Any]) -> ModelGraph | None:
    """The model bound for shared batches if two ragged rows of it score as each alone, else None.

    For modules that `families` does not know. Rows of 7 and 3 tokens are read in one padded window and take two more steps
    together; scores may differ by rounding (2 % of the largest score, far below what a wrong mask or offset does), nothing more.
    """
    try:
        graph = ModelGraph(model, config, assume=Family(note="unknown module: passed the parity check"))
        prompts = [[(5 * i + 3) % graph.vocab_size for i in range(n)] for n in (7, 3)]
        alone = [_scores(graph, [ids])[0] for ids in prompts]
        together = _scores(graph, prompts)
    except Exception:
        return None  # whatever a foreign module raises here, it runs alone
    close = all(float(mx.abs(a - b).max()) <= 0.02 * float(mx.abs(a).max()) for a, b in zip(alone, together, strict=True))
    return graph if close else None


def _scores(graph: ModelGraph, prompts: list[list[int]]) -> list[mx.array]:
    """float32 [3, V] per row: after its prompt and after each of two more tokens."""
    slots = Slots(graph.specs, Geometry(), split=graph.family.split, wide_masks=graph.wide_masks)
    rows = [slots.add(len(ids) + 2) for ids in prompts]
    width, out = max(map(len, prompts)), []
    for real, windows in ((list(map(len, prompts)), prompts), *[([1] * len(rows), [[11 + step]] * len(rows)) for step in range(2)]):
        width = max(real)
        slots.reserve(width)
        order = [rows.index(row) for row in slots.rows()]
        slots.begin(width, [real[i] for i in order])
        ids = mx.array([windows[i] + [0] * (width - real[i]) for i in order], mx.int32)
        scores = graph.forward(ids, slots.caches, [at * width + real[i] - 1 for at, i in enumerate(order)]).logits
        slots.end()
        mx.eval(scores, slots.arrays())
        out.append(scores.astype(mx.float32)[mx.array([order.index(i) for i in range(len(rows))])])
        for row, n in zip(rows, real, strict=True):
            row.length += n
    return [mx.stack([step[i] for step in out]) for i in range(len(rows))]
