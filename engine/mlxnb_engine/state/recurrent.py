"""Recurrent layers: one state per row, advanced by each row's true window width.

The arrays of a layer are stacked `[B, ...]` in batch order. Membership changes between steps: `align` brings the stack into the
order of the next step, so a layer never sees a free slot. Before its first token a row has no state (None, as in mlx-lm); next to
rows that have one, it starts from zeros, which every family in the table treats alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..types import StateSpec
from ..zoo import ArraysCache
from .spec import MLX_DTYPES
from .step import Step

State = list[mx.array | None]


class RecurrentCache(ArraysCache):  # type: ignore[misc]
    """mlx-lm's cache protocol over one recurrent layer. `lengths` is the step's, and no layer moves it."""

    def __init__(self, layers: RecurrentLayers, size: int) -> None:
        self.cache: State = [None] * size
        self.left_padding = None
        self._layers = layers

    @property
    def lengths(self) -> mx.array | None:
        return self._layers.current.lengths

    def advance(self, N: int) -> None:
        """A step's widths belong to all layers: mlx-lm's own method would subtract once per layer from one shared array."""

    def make_mask(self, N: int) -> mx.array | None:
        lengths = self.lengths
        return None if lengths is None else mx.arange(N) < lengths[:, None]


class RecurrentLayers:
    """The recurrent state of the rows of one group, all layers.

    Owner: its `Slots`. Invariant: `order` names the rows of the stacked arrays; `loose` holds rows that joined since.
    """

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self.specs = tuple(specs)
        self.caches = [RecurrentCache(self, len(spec.arrays)) for spec in self.specs]
        self.order: list[Any] = []
        self.loose: dict[int, list[State]] = {}
        self.step: Step | None = None

    @property
    def current(self) -> Step:
        assert self.step is not None, "no step is being built"
        return self.step

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row's state, all layers."""
        return sum(MLX_DTYPES[a.dtype].size * _count(a.shape) for spec in self.specs for a in spec.arrays)

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.cache if array is not None]

    def align(self, rows: Sequence[Any]) -> None:
        """Stack the state in the order of `rows`: drop those that retired, take in those that joined."""
        if len(rows) == len(self.order) and all(a is b for a, b in zip(rows, self.order, strict=True)):
            return
        parts = [self.read(row) for row in rows]
        for layer, cache in enumerate(self.caches):
            cache.cache = [_stack([part[layer][i] for part in parts], spec) for i, spec in enumerate(self.specs[layer].arrays)]
        self.order = list(rows)
        for row in rows:
            self.loose.pop(id(row), None)

    def read(self, row: Any) -> list[State]:
        """The row's state per layer, each array `[1, ...]`, by reference; None where it has none yet."""
        if id(row) in self.loose:
            return self.loose[id(row)]
        at = next((i for i, other in enumerate(self.order) if other is row), None)
        if at is None:
            return [[None] * len(spec.arrays) for spec in self.specs]
        return [[None if a is None else a[at : at + 1] for a in cache.cache] for cache in self.caches]

    def write(self, row: Any, state: list[State]) -> None:
        """Give a row this state from its next step on. The row's place in the stack, if it has one, is forgotten."""
        if any(row is other for other in self.order):
            self.align([other for other in self.order if other is not row])
        self.loose[id(row)] = state

    def forget(self, row: Any) -> None:
        self.loose.pop(id(row), None)
        if any(row is other for other in self.order):
            self.align([other for other in self.order if other is not row])

    def snapshot(self) -> list[State]:
        """References to the stacked state: nothing mutates these arrays, a step replaces them."""
        return [list(cache.cache) for cache in self.caches]

    def restore(self, snapshot: list[State]) -> None:
        for cache, state in zip(self.caches, snapshot, strict=True):
            cache.cache = list(state)

    def clear(self) -> None:
        self.order, self.loose, self.step = [], {}, None
        for cache in self.caches:
            cache.cache = [None] * len(cache.cache)


def _stack(parts: list[mx.array | None], spec: Any) -> mx.array | None:
    if all(part is None for part in parts):
        return None
    zeros = mx.zeros((1, *spec.shape), MLX_DTYPES[spec.dtype])
    return mx.concatenate([zeros if part is None else part for part in parts])


def _count(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
