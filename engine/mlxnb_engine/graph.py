"""`ModelGraph`: an mlx-lm module as ids + state to scores, with the projection run only where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .errors import ModelError
from .rotary import SharedAngles
from .state import attention, families
from .state.replay import MixerCalls
from .state.slots import Slots
from .state.spec import Geometry
from .types import ArraySpec, StateKind, StateSpec
from .zoo import ArraysCache, CacheList, make_prompt_cache


@dataclass(frozen=True, slots=True)
class Scores:
    """Lazy result of one forward. logits: [R, V] at the asked positions; hidden: [R, H], what the projection read."""

    logits: mx.array
    hidden: mx.array | None


class _Head:
    """Stands in front of the vocabulary projection: picks the needed positions, and may multiply the other way round.

    P15: projecting a whole prompt before slicing its last position costs gigabytes. The models are unmodified: the class of
    their projection module is swapped for a subclass that asks here first. weight_first: several rows are projected as
    `(W x^T)^T`, which some BLAS libraries do faster for a tall W (`qualify.weight_first`) and with other roundings.
    """

    def __init__(self, weight_first: bool) -> None:
        self.index: mx.array | None = None
        self.hidden: mx.array | None = None
        self._weight_first = weight_first

    def pick(self, x: mx.array) -> mx.array:
        if self.index is None:
            return x
        self.hidden = x.reshape(-1, x.shape[-1])[self.index]
        return self.hidden[None]

    def attach(self, module: nn.Module) -> None:
        head, base = self, type(module)
        name = "as_linear" if hasattr(base, "as_linear") else "__call__"
        project: Callable[[Any, mx.array], mx.array] = getattr(base, name)
        plain = isinstance(module, (nn.Linear, nn.Embedding)) and "bias" not in module and module.weight.dtype == mx.float32
        turned = self._weight_first and plain

        def call(module: Any, x: mx.array) -> mx.array:
            x = head.pick(x)
            if turned and x.shape[0] == 1 and x.shape[1] > 1:
                return mx.contiguous((module.weight @ x[0].T).T)[None]
            return project(module, x)

        module.__class__ = type(base.__name__, (base,), {name: call})


class _ProbeCache:
    """Learns what an attention layer stores and which window its mask asks for, from shapes alone."""

    offset = 0

    def __init__(self, window: int | None = None) -> None:
        self.stored: tuple[mx.array, mx.array] | None = None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.size = self.window = window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str:
        if window_size is not None and self.window is not None:
            self.window = max(self.window, window_size)
        return mx.ones((N, N), mx.bool_) if return_array else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.stored = self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self.stored is not None
        return self.stored


class ModelGraph:
    """One loaded mlx-lm model, bound for shared batches.

    Owner: engine thread. Invariant: `specs` describe the objects of `make_prompt_cache(model)`, in order, those inside a
    CacheList one by one. family: how rows may share a step; `assume` replaces what the table says of the module. weight_first: see `_Head`.
    Raises ModelError at construction for a model that is refused.
    """

    def __init__(
        self, model: nn.Module, config: Mapping[str, Any], assume: families.Family | None = None, *, weight_first: bool = False
    ) -> None:
        attention.install()
        self.model = model
        self.module = module_name(model)
        objects = make_prompt_cache(model)
        self.family = assume or families.admit(self.module, [type(c).__name__ for c in _flat(objects)], config)
        if mx.default_device().type == mx.DeviceType.cpu:
            SharedAngles(model)
        self._head = _Head(weight_first)
        if self.family.mode == "lone":
            self.specs: tuple[StateSpec, ...] = ()
            self.vocab_size = int(model(mx.zeros((1, 2), mx.int32), cache=objects).shape[-1])
        else:
            self.vocab_size, self.specs = _probe(model, objects)
        heads = int(config.get("num_attention_heads") or 0)
        self.wide_masks = self.family.wide_masks and any(heads > spec.kv_heads > 0 for spec in self.specs)
        self._picks = self._bind_head()
        if self.family.mode != "lone" and self.family.split and not self._splits():
            self.family = replace(self.family, split=False)
        self.mixers = MixerCalls(model) if any(spec.kind == "recurrent" for spec in self.specs) else None

    def forward(self, ids: mx.array, caches: Sequence[Any], positions: Sequence[int], multiple: int = 1) -> Scores:
        """One lazy forward over ids [B, L].

        positions: flat indices b * L + i to project, at least one; padded (by repetition) to a multiple of `multiple` rows
        for the projection's shape, and cut again.
        """
        count = len(positions)
        padded = list(positions) + [positions[-1]] * (-count % multiple)
        self._head.index = mx.array(padded, mx.int32)
        try:
            out = self.model(ids, cache=list(caches))
        finally:
            self._head.index = None
        hidden, self._head.hidden = self._head.hidden, None
        if not self._picks:
            out = out.reshape(-1, out.shape[-1])[mx.array(padded, mx.int32)][None]
        return Scores(out[0][:count], None if hidden is None else hidden[:count])

    def feed(self, ids: mx.array, caches: Sequence[Any]) -> None:
        """One lazy forward whose scores nobody needs: evaluate the state arrays, and the projection is never run."""
        self.model(ids, cache=list(caches))

    def _splits(self) -> bool:
        """A step over two capacity classes can be built (nothing is computed): a checkpoint may use what its family's table entry did
        not foresee, attention sinks say."""
        slots = Slots(self.specs, Geometry(), wide_masks=self.wide_masks)
        for tokens in (1, 2 * slots.geometry.first_rung):
            slots.add(tokens)
        slots.begin(1)
        try:
            self.feed(mx.zeros((2, 1), mx.int32), slots.caches)
        except Exception:
            return False
        finally:
            slots.clear()
        return True

    def _bind_head(self) -> bool:
        for path, module in self.model.named_modules():
            # A block's own matrix may happen to be as wide as the vocabulary: blocks are numbered, the head is not.
            if hasattr(module, "as_linear") or (self._projects(module) and not any(c.isdigit() for c in path.split("."))):
                self._head.attach(module)
        self._head.index = mx.array([1], mx.int32)
        try:
            out = self.model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(self.model))
        finally:
            self._head.index = self._head.hidden = None
        return bool(out.shape[1] == 1)

    def _projects(self, module: nn.Module) -> bool:
        """A linear layer onto the vocabulary, whatever its name (`lm_head`, `embed_out`, `output`, ...)."""
        weight = module.get("weight")
        return isinstance(module, (nn.Linear, nn.QuantizedLinear)) and isinstance(weight, mx.array) and weight.shape[0] == self.vocab_size

    def projection_shapes(self) -> set[tuple[int, int]]:
        """(outputs, inputs) of every dense matrix, for `qualify.strict_geometry`."""
        shapes = set()
        for _, module in self.model.named_modules():
            weight = module.get("weight")
            if isinstance(weight, mx.array) and weight.ndim == 2 and not hasattr(module, "bits"):
                shapes.add((int(weight.shape[0]), int(weight.shape[1])))
        return shapes


def module_name(model: nn.Module) -> str:
    """The mlx-lm module that defines this model, as `families` names it."""
    return type(model).__module__.rsplit(".", 1)[-1]


def _flat(objects: Sequence[Any]) -> list[Any]:
    """Cache objects, those inside a CacheList in its place."""
    return [child for one in objects for child in (one.caches if isinstance(one, CacheList) else (one,))]


def _probe(model: nn.Module, objects: Sequence[Any]) -> tuple[int, tuple[StateSpec, ...]]:
    """Vocabulary size and the state of each cache object, from the shapes of an unevaluated two-token forward."""
    places = [(i,) if not isinstance(one, CacheList) else (i, j) for i, one in enumerate(objects) for j in range(_children(one))]
    probes = [one if isinstance(one, ArraysCache) else _ProbeCache(getattr(one, "max_size", None)) for one in _flat(objects)]
    left = iter(probes)
    nested = [CacheList(*(next(left) for _ in one.caches)) if isinstance(one, CacheList) else next(left) for one in objects]
    out = model(mx.zeros((1, 2), mx.int32), cache=nested)
    _share_windows(probes)
    return int(out.shape[-1]), tuple(_spec(probe, place) for probe, place in zip(probes, places, strict=True))


def _share_windows(probes: Sequence[Any]) -> None:
    """One mask serves all sliding layers of a size, and its request may be wider than their rings (plamo3)."""
    sliding = [probe for probe in probes if getattr(probe, "window", None) is not None]
    for probe in sliding:
        probe.window = max(other.window for other in sliding if other.size == probe.size)


def _children(one: Any) -> int:
    return len(one.caches) if isinstance(one, CacheList) else 1


def _spec(probe: Any, place: tuple[int, ...]) -> StateSpec:
    if isinstance(probe, ArraysCache):
        arrays = tuple(ArraySpec(tuple(a.shape[1:]), _dtype(a)) for a in probe.cache if a is not None)
        if len(arrays) != len(probe.cache):
            raise ModelError(f"Layer {place[0]} left part of its state empty in a probe forward (unknown_state_signature).")
        return StateSpec("recurrent", 0, 0, 0, "", arrays=arrays, place=place)
    if probe.stored is None:
        return StateSpec("unused", 0, 0, 0, "", place=place)
    keys, values = probe.stored
    kind: StateKind = "full" if probe.window is None else "sliding"
    return StateSpec(kind, int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]), _dtype(keys), probe.window, place=place)


def _dtype(array: mx.array) -> str:
    return str(array.dtype).rsplit(".", 1)[-1]
