"""`ModelGraph`: an mlx-lm module as ids + state to scores, with the projection run only where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .errors import ModelError
from .state import attention, families
from .types import StateSpec


@dataclass(frozen=True, slots=True)
class Scores:
    """Lazy result of one forward. logits: [R, V] at the asked positions; hidden: [R, H], what the projection read."""

    logits: mx.array
    hidden: mx.array | None


class _HeadGather:
    """Picks the needed positions in front of the vocabulary projection.

    P15: projecting a whole prompt before slicing its last position costs gigabytes. The models are unmodified: the class of
    their projection module is swapped for a subclass that calls this first.
    """

    def __init__(self) -> None:
        self.index: mx.array | None = None
        self.hidden: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if self.index is None:
            return x
        self.hidden = x.reshape(-1, x.shape[-1])[self.index]
        return self.hidden[None]

    def attach(self, module: nn.Module) -> None:
        gather, base = self, type(module)
        if hasattr(base, "as_linear"):

            def as_linear(module: Any, x: mx.array) -> mx.array:
                return base.as_linear(module, gather(x))

            members: dict[str, Callable[..., mx.array]] = {"as_linear": as_linear}
        else:

            def call(module: Any, x: mx.array) -> mx.array:
                return base.__call__(module, gather(x))

            members = {"__call__": call}
        module.__class__ = type(base.__name__, (base,), members)


class _ProbeCache:
    """Learns what a layer stores, from shapes alone."""

    offset = 0

    def __init__(self) -> None:
        self.stored: tuple[mx.array, mx.array] | None = None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.stored = (keys, values)
        return keys, values


class ModelGraph:
    """One loaded mlx-lm model, bound for shared batches.

    Owner: engine thread. Invariant: `specs[i]` describes the state of `make_prompt_cache(model)[i]`.
    Raises ModelError at construction for a model that cannot share a batch exactly.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        attention.install()
        self.model = model
        self.module = type(model).__module__.rsplit(".", 1)[-1]
        kinds = [type(cache).__name__ for cache in make_prompt_cache(model)]
        families.admit(self.module, kinds, config)
        self.vocab_size, self.specs = _probe(model, len(kinds))
        self._gather = _HeadGather()
        self._gathers = self._bind_head()

    def forward(self, ids: mx.array, caches: Sequence[Any], positions: Sequence[int], multiple: int = 1) -> Scores:
        """One lazy forward over ids [B, L].

        positions: flat indices b * L + i to project, at least one; padded (by repetition) to a multiple of `multiple` rows
        for the projection's shape, and cut again.
        """
        count = len(positions)
        padded = list(positions) + [positions[-1]] * (-count % multiple)
        self._gather.index = mx.array(padded, mx.int32)
        try:
            out = self.model(ids, cache=list(caches))
        finally:
            self._gather.index = None
        hidden, self._gather.hidden = self._gather.hidden, None
        if not self._gathers:
            out = out.reshape(-1, out.shape[-1])[mx.array(padded, mx.int32)][None]
        return Scores(out[0][:count], None if hidden is None else hidden[:count])

    def feed(self, ids: mx.array, caches: Sequence[Any]) -> None:
        """One lazy forward whose scores nobody needs: evaluate the state arrays, and the projection is never run."""
        self.model(ids, cache=list(caches))

    def _bind_head(self) -> bool:
        for path, module in self.model.named_modules():
            if hasattr(module, "as_linear") or path.rsplit(".", 1)[-1] == "lm_head":
                self._gather.attach(module)
        self._gather.index = mx.array([1], mx.int32)
        try:
            out = self.model(mx.zeros((1, 2), mx.int32), cache=[_ProbeCache() for _ in self.specs])
        finally:
            self._gather.index = self._gather.hidden = None
        return bool(out.shape[1] == 1)

    def projection_shapes(self) -> set[tuple[int, int]]:
        """(outputs, inputs) of every dense matrix, for `qualify.strict_geometry`."""
        shapes = set()
        for _, module in self.model.named_modules():
            weight = module.get("weight")
            if isinstance(weight, mx.array) and weight.ndim == 2 and not hasattr(module, "bits"):
                shapes.add((int(weight.shape[0]), int(weight.shape[1])))
        return shapes


def _probe(model: nn.Module, layers: int) -> tuple[int, tuple[StateSpec, ...]]:
    """Vocabulary size and per-layer state, from the shapes of an unevaluated two-token forward."""
    caches = [_ProbeCache() for _ in range(layers)]
    out = model(mx.zeros((1, 2), mx.int32), cache=caches)
    specs = []
    for i, cache in enumerate(caches):
        if cache.stored is None:
            raise ModelError(f"Layer {i} stored no K/V in a probe forward (unknown_state_signature).")
        keys, values = cache.stored
        dtype = str(keys.dtype).rsplit(".", 1)[-1]
        specs.append(StateSpec("full", int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]), dtype))
    return int(out.shape[-1]), tuple(specs)
