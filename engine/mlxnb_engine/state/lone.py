"""State of one row in mlx-lm's own caches, for models whose rows cannot share a step: one row per forward, exactly as mlx-lm runs it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..types import StateSpec
from ..zoo import make_prompt_cache

_CACHE_STEP = 256
"""mlx-lm's caches grow by this many tokens."""


@dataclass(eq=False, slots=True)
class LoneRow:
    """Handle of the row. length: positions in its state. home, index: what `Slots` rows have too."""

    length: int
    home: LoneState
    index: int = 0


class LoneState:
    """The state of at most one row (see `spec.State`).

    Owner: engine thread. Lifetime: with its row; a second row takes a copy (`join`).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.caches: list[Any] = make_prompt_cache(model)
        self.specs: tuple[StateSpec, ...] = ()
        self._row: LoneRow | None = None
        self._step_bytes = self._measure()

    def _measure(self) -> int:
        """Bytes of the state after its first tokens, from shapes alone: what every further step of a cache can add at most."""
        probe = make_prompt_cache(self._model)
        self._model(mx.zeros((1, 2), mx.int32), cache=probe)
        return sum(array.nbytes for array in _arrays(probe))

    def rows(self) -> list[LoneRow]:
        return [self._row] if self._row is not None else []

    @property
    def capacity(self) -> int:
        """Tokens that fit before the next growth."""
        length = self._row.length if self._row else 0
        return -(-max(length, 1) // _CACHE_STEP) * _CACHE_STEP

    @property
    def bytes_per_token(self) -> int:
        return -(-self._step_bytes // _CACHE_STEP)

    @property
    def bytes_per_row(self) -> int:
        """Counted per token here."""
        return 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def bytes_for(self, tokens: Sequence[int]) -> int:
        """Bytes that rows of these lengths take at most, each in a state of its own."""
        return sum(-(-max(n, 1) // _CACHE_STEP) * self._step_bytes for n in tokens)

    def growth(self, tokens: Sequence[int]) -> int:
        return self.bytes_for(tokens)

    def add(self, tokens: int) -> LoneRow:
        """The one row, empty."""
        assert self._row is None, "a lone model runs one row per forward"
        self._row = LoneRow(0, self)
        return self._row

    def join(self, other: LoneState, row: LoneRow, tokens: int) -> LoneRow:
        """Become a copy of another state's row. mlx-lm's arrays are copied when either side writes first."""
        assert self._row is None, "a lone model runs one row per forward"
        self.caches = copy.deepcopy(other.caches)
        self._row = LoneRow(row.length, self)
        return self._row

    def retire(self, row: LoneRow) -> None:
        if self._row is not row:
            raise RuntimeError("a row was retired twice")
        self.clear()

    def reserve(self, width: int) -> None:
        """mlx-lm's caches grow by themselves."""

    def begin(self, width: int, real: Sequence[int] | None = None) -> None:
        """One step of `width` tokens, all of them the row's own."""
        assert real is None or list(real) == [width], "a lone model takes no padding"

    def end(self) -> None:
        """Nothing outlives a step here."""

    def arrays(self) -> list[mx.array]:
        return _arrays(self.caches)

    def extract(self, row: LoneRow) -> list[tuple[mx.array, mx.array]]:
        """Nothing here has the layout of a block, so nothing of it is ever shared."""
        return []

    def clear(self) -> None:
        self._row = None
        self.caches = make_prompt_cache(self._model)

    def check(self) -> None:
        """One row at most: there is nothing to add up."""


def _arrays(caches: list[Any]) -> list[mx.array]:
    return [leaf for cache in caches for _, leaf in tree_flatten(_state(cache)) if isinstance(leaf, mx.array)]


def _state(cache: Any) -> Any:
    """Raw members: the `state` of some mlx-lm caches fails before the first token, and cuts the slack that is held."""
    if hasattr(cache, "caches"):
        return [_state(child) for child in cache.caches]
    return [value for value in vars(cache).values() if isinstance(value, (mx.array, list, tuple))]
