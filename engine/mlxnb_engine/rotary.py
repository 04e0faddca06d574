"""Rotary embedding on the CPU backend, with the angles of a step computed once for all layers.

MLX has no CPU kernel for `mx.fast.rope`: it runs some 15 small operations, and two thirds of them compute cosines and sines that are
the same in every layer. They are taken here from one call of the module itself on pairs (1, 0), which it rotates to (cos, sin):

    x1 * cos - x2 * sin  =  x * [cos, cos] + swapped(x) * [-sin, sin]      (equal in bits: a - b is a + (-b), and + commutes)
    x1 * sin + x2 * cos
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Key = tuple[Any, ...]


@dataclass(slots=True)
class _Angles:
    """The tables of the last step of one kind of module. offset is compared by identity: one array serves a whole step."""

    key: Key
    offset: int | mx.array
    cosines: mx.array
    sines: mx.array


class SharedAngles:
    """Swaps the class of a model's plain `nn.RoPE` modules for one that takes its tables from here. Results are equal in bits.

    Owner: a `ModelGraph`. Holds the tables of the last step, a few kilobytes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._last: dict[Key, _Angles] = {}
        for _, module in model.named_modules():
            if type(module) is nn.RoPE:
                module.__class__ = self._sharing(nn.RoPE)

    def _sharing(self, base: type[nn.RoPE]) -> type[nn.RoPE]:
        angles = self

        def call(module: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
            if x.dtype != mx.float32 or x.ndim != 4 or x.shape[-1] != module.dims:
                return base.__call__(module, x, offset=offset)
            return angles._rotate(module, base, x, offset)

        return type("SharedRoPE", (base,), {"__call__": call})

    def _rotate(self, module: Any, base: type[nn.RoPE], x: mx.array, offset: int | mx.array) -> mx.array:
        key = (module.dims, module.traditional, module.base, module.scale)
        found = self._last.get(key)
        shape = (x.shape[0] if isinstance(offset, mx.array) and offset.ndim else 1, x.shape[2])
        if found is None or found.key != shape or not _same(found.offset, offset):
            found = self._last[key] = _Angles(shape, offset, *_tables(module, base, shape, offset))
        return x * found.cosines + _swapped(x, module.traditional) * found.sines


def _same(a: int | mx.array, b: int | mx.array) -> bool:
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _tables(module: Any, base: type[nn.RoPE], shape: tuple[int, int], offset: int | mx.array) -> tuple[mx.array, mx.array]:
    """[cos, cos] and [-sin, sin], each `[1 or B, 1, L, dims]` in the module's own order of pairs."""
    rows, width = shape
    half = module.dims // 2
    axis = -1 if module.traditional else -2
    pair = mx.array([1.0, 0.0]) if module.traditional else mx.array([1.0, 0.0])[:, None]
    probe = mx.broadcast_to(pair, (rows, 1, width, half, 2) if module.traditional else (rows, 1, width, 2, half))
    turned = base.__call__(module, probe.reshape(rows, 1, width, module.dims), offset=offset).reshape(probe.shape)
    cosine, sine = mx.split(turned, 2, axis=axis)
    flat = (rows, 1, width, module.dims)
    return mx.concatenate([cosine, cosine], axis=axis).reshape(flat), mx.concatenate([-sine, sine], axis=axis).reshape(flat)


def _swapped(x: mx.array, traditional: bool) -> mx.array:
    """Each pair with its members exchanged."""
    pairs = x.reshape(*x.shape[:-1], -1, 2) if traditional else x.reshape(*x.shape[:-1], 2, -1)
    return (pairs[..., ::-1] if traditional else pairs[..., ::-1, :]).reshape(x.shape)
