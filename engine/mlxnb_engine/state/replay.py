"""A window of which only a prefix is kept: attention layers lower a length, recurrent layers start again from before the window.

A recurrent state after k of w tokens is not in the state after w. It is computed again from the state before the window, by the
layers that own such state alone: their inputs for the kept tokens are known from the window itself, so nothing else of the model
runs. For this the class of every submodule that takes a `cache` is swapped for one that notes its call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..zoo import CacheList
from .recurrent import RecurrentCache
from .slots import Slots

Call = tuple[nn.Module, dict[str, Any]]


class MixerCalls:
    """The innermost call of each recurrent layer in one forward, by the identity of its cache.

    Owner: a `ModelGraph`. Between windows nothing is noted and nothing held.
    """

    def __init__(self, model: nn.Module) -> None:
        self._calls: dict[int, Call] | None = None
        for _, module in model.named_modules():
            signature = inspect.signature(type(module).__call__)
            if module is not model and "cache" in signature.parameters:
                self._attach(module, signature)

    def _attach(self, module: nn.Module, signature: inspect.Signature) -> None:
        note, base = self._note, type(module)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(self, signature, args, kwargs)
            return base.__call__(self, *args, **kwargs)

        module.__class__ = type(base.__name__, (base,), {"__call__": call})

    def _note(self, module: nn.Module, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._calls is None:
            return
        given = signature.bind(module, *args, **kwargs).arguments
        cache = given.get("cache")
        for one in cache.caches if isinstance(cache, CacheList) else (cache,):
            if isinstance(one, RecurrentCache):
                self._calls[id(one)] = (module, dict(given))  # an inner call comes after the one around it

    def listen(self) -> None:
        self._calls = {}

    def take(self) -> dict[int, Call]:
        calls, self._calls = self._calls or {}, None
        return calls


class WindowTransaction:
    """One window step that may keep a prefix of each row's window: begin, run the forward, `resolve` once.

    Owner: the window step. Covers every layer. The rows' lengths and recurrent states change at `resolve`, together.
    """

    def __init__(self, slots: Slots, mixers: MixerCalls | None) -> None:
        self._slots, self._mixers = slots, mixers
        self._before = slots.recurrent.snapshot()
        if mixers is not None:
            mixers.listen()

    def resolve(self, kept: Sequence[int]) -> None:
        """Keep the first `kept[i]` tokens of batch row i's window, at least one and at most its true width.

        Lazy: the caller evaluates the state arrays. Raises ValueError for a count that the window does not have.
        """
        slots, step = self._slots, self._slots.current
        rows = slots.rows()
        real = step.real or (step.width,) * len(rows)
        if len(kept) != len(rows) or any(not 1 <= k <= n for k, n in zip(kept, real, strict=False)):
            raise ValueError(f"windows of {list(real)} tokens cannot keep {list(kept)}")
        calls = self._mixers.take() if self._mixers is not None else {}
        if slots.recurrent.specs and tuple(kept) != tuple(real):
            slots.recurrent.restore(self._before)
            self._replay(calls, kept)
        for row, k in zip(rows, kept, strict=True):
            row.length += k

    def _replay(self, calls: dict[int, Call], kept: Sequence[int]) -> None:
        step, width = self._slots.current, max(kept)
        full = step.width
        step.narrow(width, kept)
        for cache in self._slots.recurrent.caches:
            module, given = calls[id(cache)]
            arguments = {name: _cut(value, full, width) for name, value in given.items() if name != "self"}
            if "mask" in inspect.signature(type(module).__mro__[1].__call__).parameters:
                arguments["mask"] = cache.make_mask(width)
            module(**arguments)


def _cut(value: Any, full: int, width: int) -> Any:
    """The first `width` tokens of an input `[B, full, ...]`; anything else as it is."""
    return value[:, :width] if isinstance(value, mx.array) and value.ndim > 2 and value.shape[1] == full else value
