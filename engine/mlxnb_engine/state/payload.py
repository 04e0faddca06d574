"""State as values of their own: what of a row can be kept after it, sent to disk, and put into another row.

    cut(slots, row, start, stop)   K/V of these tokens, every layer that attends          a block or a tail
    snapshot(slots, row)           recurrent state after the row's last token             an attachment
    paste(slots, row, pieces, ...) an empty row becomes one that has consumed those tokens

Layers that share another's K/V have none of their own here. Arrays of cuts and snapshots are lazy: evaluate them before they are
kept, and before the row's next step is submitted, or that step copies the buffers that they still refer to (P1, P77).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..types import StateSpec
from .slots import SlotRow, Slots
from .spec import BLOCK_TOKENS, MLX_DTYPES

Part = tuple[int, str]
"""(index in the model's state specs, "k" | "v" | "state.<i>")."""
_NUMPY = {"bfloat16": "uint16"}


class PartSpec(NamedTuple):
    """One layer's share of a payload. shape: without the row axis; K and V of a block are [kv_heads, tokens, dim].

    stack: which array of the payload it lies in, with others of its shape that are always wanted together. A model of 32 layers so
    keeps one array per block, not 64, and hands it to the device in one piece.
    """

    layer: int
    part: str
    dtype: str
    shape: tuple[int, ...]
    stack: int


class Piece(NamedTuple):
    """The first `tokens` tokens of a payload that was cut at position `start`."""

    start: int
    tokens: int
    payload: StatePayload


class StatePayload:
    """Immutable state by layer and part: each stack [parts, *shape] holds its parts in the order of the layout, contiguous.

    Owner: the engine thread, which makes and drops it. Nothing in it is ever written to.
    """

    __slots__ = ("nbytes", "parts", "stacks")

    def __init__(self, parts: tuple[PartSpec, ...], stacks: Sequence[mx.array]) -> None:
        """Raises ValueError for stacks that are not of this layout."""
        self.parts, self.stacks = parts, tuple(stacks)
        self.nbytes = sum(array.nbytes for array in self.stacks)
        first = {part.stack: part for part in reversed(parts)}
        counts = Counter(part.stack for part in parts)
        wanted = [((counts[i], *first[i].shape), MLX_DTYPES[first[i].dtype]) for i in sorted(first)]
        if [(array.shape, array.dtype) for array in self.stacks] != wanted:
            raise ValueError("state of another layout: its layers, shapes or types are not this model's")

    def tensors(self) -> dict[Part, mx.array]:
        """Views by layer and part, in the order of the layout (`block_parts`, `attachment_parts`)."""
        left = [iter(stack) for stack in self.stacks]
        return {(part.layer, part.part): next(left[part.stack]) for part in self.parts}

    def arrays(self) -> list[mx.array]:
        return list(self.stacks)

    def to_host(self) -> list[np.ndarray[Any, Any]]:
        """C-contiguous copies in the order of the layout; bfloat16 as uint16. The arrays must be evaluated. Engine thread only."""
        left = [iter(np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)) for a in self.stacks]
        return [next(left[part.stack]) for part in self.parts]

    @classmethod
    def from_host(cls, parts: tuple[PartSpec, ...], buffers: Iterable[Any]) -> StatePayload:
        """Evaluated copies of these C-contiguous buffers, one per part. Raises ValueError if one has not its part's size."""
        stacked: dict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
        for spec, buffer in zip(parts, buffers, strict=True):
            dtype = np.dtype(_NUMPY.get(spec.dtype, spec.dtype))
            flat = np.frombuffer(buffer, dtype) if memoryview(buffer).nbytes else np.empty(0, dtype)
            stacked[spec.stack].append(flat.reshape(spec.shape))
        halves = {part.stack for part in parts if part.dtype == "bfloat16"}
        arrays = [mx.array(np.stack(stacked[i])) for i in sorted(stacked)]
        made = cls(parts, [a.view(mx.bfloat16) if i in halves else a for i, a in enumerate(arrays)])
        mx.eval(made.arrays())
        return made


def evaluate(payloads: Iterable[StatePayload]) -> None:
    """Compute what is still lazy of these; they stand for themselves then. Raises what the device raises."""
    mx.eval([array for payload in payloads for array in payload.arrays()])


@lru_cache(maxsize=256)
def block_parts(specs: tuple[StateSpec, ...], tokens: int) -> tuple[PartSpec, ...]:
    """The layout of what `cut` gives for so many tokens. Layers of one shape and window are stacked."""
    stacks: dict[tuple[Any, ...], int] = {}
    return tuple(
        PartSpec(layer, name, spec.dtype, shape, stacks.setdefault((shape, spec.dtype, spec.window), len(stacks)))
        for layer, spec in _attending(specs)
        for name, shape in (("k", (spec.kv_heads, tokens, spec.key_dim)), ("v", (spec.kv_heads, tokens, spec.value_dim)))
    )


@lru_cache(maxsize=16)
def attachment_parts(specs: tuple[StateSpec, ...]) -> tuple[PartSpec, ...]:
    """The layout of what `snapshot` gives; empty for a model without recurrent layers."""
    arrays = [(layer, i, a) for layer, spec in enumerate(specs) if spec.kind == "recurrent" for i, a in enumerate(spec.arrays)]
    return tuple(PartSpec(layer, f"state.{i}", a.dtype, a.shape, at) for at, (layer, i, a) in enumerate(arrays))


def _attending(specs: Sequence[StateSpec]) -> list[tuple[int, StateSpec]]:
    """(index in the specs, spec) of the layers that hold K/V, in the order of a group's buffers."""
    return [(layer, spec) for layer, spec in enumerate(specs) if spec.kind in ("full", "sliding")]


def cut(slots: Slots, row: SlotRow, start: int, stop: int) -> StatePayload:
    """The K/V of positions start..stop of a row, lazy. At most 64 positions of one block, all of them still held."""
    parts = block_parts(slots.specs, stop - start)
    stacks: dict[int, list[mx.array]] = defaultdict(list)
    for part, (buffers, i) in zip(parts, _buffers(slots, row), strict=True):
        at = _slot(start, buffers[i], row)
        stacks[part.stack].append(buffers[i][row.index, :, at : at + stop - start])
    return StatePayload(parts, [mx.stack(stacks[i]) for i in sorted(stacks)])


def _buffers(slots: Slots, row: SlotRow) -> list[tuple[list[mx.array], int]]:
    """(list, index in it) of the row's buffers, in the order of `block_parts`."""
    return [(buffers, i) for i in range(len(slots.attention)) for buffers in (row.home.keys, row.home.values)]


def _slot(position: int, buffer: mx.array, row: SlotRow) -> int:
    """Where a position lies: a ring (smaller than its class) is of whole blocks, so a block never wraps."""
    size = buffer.shape[2]
    return position % size if size < row.home.capacity else position


def snapshot(slots: Slots, row: SlotRow) -> StatePayload:
    """The row's recurrent state, lazy: valid exactly at the row's length. Raises ValueError before its first token."""
    state = slots.recurrent.read(row)
    arrays = [array for layer in state for array in layer]
    if any(array is None for array in arrays):
        raise ValueError("the row has no recurrent state yet")
    return StatePayload(attachment_parts(slots.specs), [mx.contiguous(array) for array in arrays if array is not None])


def paste(slots: Slots, row: SlotRow, pieces: Sequence[Piece], state: StatePayload | None) -> None:
    """Make an empty row one that has consumed the tokens of these pieces: copies, evaluated on return.

    pieces: adjoining from position 0 on, each but the last of a whole block. A sliding layer gets only what it can still see, and
    the last piece in full, since its block will be cut again. state: recurrent state right after the last token.
    Raises ValueError, before any change, for payloads of another layout; whatever else fails leaves the row empty.
    """
    specs = slots.specs
    length = sum(piece.tokens for piece in pieces)
    wanted, parts = attachment_parts(specs), block_parts(specs, BLOCK_TOKENS)
    for piece in pieces:
        _require(piece.payload, specs, piece.tokens)
    if wanted and (state is None or state.parts != wanted):
        raise ValueError("recurrent layers have no state of this layout to go on from")
    windows = {part.stack: specs[part.layer].window for part in parts}
    buffers = _buffers(slots, row)
    try:
        for stack, window in windows.items():
            first = 0 if window is None else max(0, length - window + 1)
            seen = [p for p in pieces if p.start + p.tokens > first or p.tokens < BLOCK_TOKENS]
            _paste(row, stack, seen, [at for part, at in zip(parts, buffers, strict=True) if part.stack == stack])
        if state is not None and wanted:
            arrays = iter(state.arrays())
            slots.recurrent.write(row, [[next(arrays) for _ in spec.arrays] for spec in slots.recurrent.specs])
        mx.eval(slots.arrays(), [a for layer in slots.recurrent.read(row) for a in layer if a is not None])
    except BaseException:
        slots.recurrent.forget(row)
        raise
    row.length = length


def _paste(row: SlotRow, stack: int, pieces: Sequence[Piece], places: Sequence[tuple[list[mx.array], int]]) -> None:
    """Write one stack of these pieces into its buffers, neighbours in one write. In a ring later ones come over earlier ones."""
    runs: list[tuple[int, list[mx.array]]] = []
    end = -1
    for piece in pieces:
        array = piece.payload.stacks[stack]
        buffers, i = places[0]  # those of a stack have one size
        at = _slot(piece.start, buffers[i], row)
        if at != end:
            runs.append((at, []))
        runs[-1][1].append(array if array.shape[2] == piece.tokens else array[:, :, : piece.tokens])
        end = at + piece.tokens
    for start, arrays in runs:
        whole = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2)
        for (buffers, i), one in zip(places, whole, strict=True):
            buffer = buffers[i]
            buffer[row.index, :, start : start + one.shape[1]] = one
            buffers[i] = buffer


def _require(payload: StatePayload, specs: tuple[StateSpec, ...], tokens: int) -> None:
    """tokens: how many it must hold at least."""
    held = payload.parts[0].shape[1] if payload.parts and len(payload.parts[0].shape) == 3 else 0
    if payload.parts != block_parts(specs, held) or (payload.parts and held < tokens):
        raise ValueError("state of another layout: its layers, shapes or types are not this model's")
