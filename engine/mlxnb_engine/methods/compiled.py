"""Steps as compiled functions: state in, state out, one function per geometry.

Building the graph of a step anew takes the host a third to a half of a decode step on a fast device. A compiled function replays what
it recorded. Shapes must repeat, so attention reads whole buckets or the kernel of `cuda.attention`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..graph import ModelGraph, Scores
from ..state.slots import Slots

_PATIENCE = 4
"""Steps in a row that a geometry lasts before it is compiled: recording one costs some ten ordinary steps."""
_KEPT = 16
Key = tuple[Any, ...]
Function = Callable[[mx.array, list[mx.array], list[mx.array]], tuple[list[mx.array], list[mx.array]]]


class CompiledSteps:
    """Forwards of one group. Owner: its group. Holds up to 16 recorded graphs, which hold the model's weights and no state."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._functions: OrderedDict[Key, Function] = OrderedDict()
        self._slots: Slots | None = None
        self._last: Key | None = None
        self._repeats = 0

    def forward(self, slots: Slots, ids: mx.array, positions: Sequence[int], multiple: int) -> Scores:
        """As `ModelGraph.forward` for the step that `slots.begin` captured; the state arrays of `slots` are replaced."""
        function = self._function(slots, ids, positions, multiple)
        if function is None:
            return self._graph.forward(ids, slots.caches, positions, multiple)
        step, self._slots = slots.current, slots
        try:
            scored, state = function(ids, [span.base for span in step.spans], slots.arrays())
        finally:
            self._slots, slots.step = None, step
        slots.replace_arrays(state)
        return Scores(scored[0], scored[1] if len(scored) > 1 else None)

    def _function(self, slots: Slots, ids: mx.array, positions: Sequence[int], multiple: int) -> Function | None:
        """The function for this geometry, or None while it has not lasted."""
        step = slots.current
        if step.real is not None or not slots.replaceable:
            return None
        spans = tuple((span.home.capacity, span.home.slots, span.stop - span.start) for span in step.spans)
        key = (ids.shape, tuple(positions), multiple, step.fused, spans)
        self._repeats = self._repeats + 1 if key == self._last else 1
        self._last = key
        if key not in self._functions and self._repeats >= _PATIENCE:
            self._functions[key] = mx.compile(self._recorder(positions, multiple))
            if len(self._functions) > _KEPT:
                self._functions.popitem(last=False)
        if key in self._functions:
            self._functions.move_to_end(key)
        return self._functions.get(key)

    def _recorder(self, positions: Sequence[int], multiple: int) -> Function:
        """Runs once per geometry, over placeholders that it puts into the slots for as long as it runs."""

        def record(ids: mx.array, bases: list[mx.array], state: list[mx.array]) -> tuple[list[mx.array], list[mx.array]]:
            slots = self._slots
            assert slots is not None
            slots.replace_arrays(state)
            slots.step = slots.current.over(bases)
            scores = self._graph.forward(ids, slots.caches, positions, multiple)
            slots.end()
            return [scores.logits] if scores.hidden is None else [scores.logits, scores.hidden], slots.arrays()

        return record
