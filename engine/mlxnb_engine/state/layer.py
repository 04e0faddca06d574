"""mlx-lm's cache protocol over one attention layer of a group's slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cuda import attention
from .step import Span, Step

if TYPE_CHECKING:
    from .slots import Slots


class ClassesView:
    """Captured K/V of a step whose layers attend span by span (`attention.AttentionView`): whole buffers, if it is fused."""

    def __init__(self, slots: Slots, step: Step, parts: list[tuple[mx.array, mx.array]], window: int | None) -> None:
        self._slots, self._step, self._parts, self._window = slots, step, parts, window

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        spans = list(zip(self._step.spans, self._parts, strict=True))
        if len(spans) == 1:
            return self._part(*spans[0], queries, scale)
        return mx.concatenate([self._part(span, kv, queries[span.start : span.stop], scale) for span, kv in spans], axis=0)

    def _part(self, span: Span, kv: tuple[mx.array, mx.array], queries: mx.array, scale: float) -> mx.array:
        if self._step.fused:
            return attention.attend(queries, *kv, span.base, scale, self._window)
        return mx.fast.scaled_dot_product_attention(queries, *kv, scale=scale, mask=self._slots.mask(span, self._window, self._window))


class LayerCache:
    """mlx-lm's cache protocol over one attention layer of the slots. Truthy; the step is in `slots.step`."""

    group_size = 64

    def __init__(self, slots: Slots, layer: int, window: int | None) -> None:
        self._slots, self._layer, self._window = slots, layer, window
        self._view: tuple[Any, Any] | None = None

    @property
    def offset(self) -> int | mx.array:
        return self._slots.current.offset

    @property
    def bits(self) -> int:
        """Present only when a step attends span by span: it routes attention to `attention._dispatch`."""
        if not self._slots.current.by_span:
            raise AttributeError("bits")
        return 16

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        step = self._slots.current
        if step.by_span:
            return None  # each span sees to it when it attends
        return self._slots.mask(step.spans[0], window_size or self._window, self._window, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._view = self._slots.append(self._layer, keys, values, self._window)
        return self._view

    def keys_and_values(self) -> tuple[Any, Any]:
        """What this step's append returned, for layers that share another layer's K/V."""
        assert self._view is not None, "read before the layer that owns it appended"
        return self._view

    @property
    def keys(self) -> mx.array:
        """The buffer itself, for modules that tie the evaluation of one cache to another's."""
        return self._slots.classes[0].keys[self._layer]

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        """Nothing to do: every state array is submitted with its step (P17), and storing `tied` would cost a copy of the buffer."""

    @property
    def values(self) -> mx.array:
        return self._slots.classes[0].values[self._layer]

    @values.setter
    def values(self, tied: mx.array) -> None:
        """As `keys`."""

    def forget_view(self) -> None:
        """Let go of the step's view: a live slice of a buffer turns the next append into a copy of all of it (P1)."""
        self._view = None
