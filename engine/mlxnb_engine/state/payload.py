"""State as values of their own: what of a row can be kept after it, sent to disk, and put into another row.

    cut(slots, row, start, stop)   K/V of these tokens, every layer that attends          a block or a tail
    snapshot(slots, row)           recurrent state after the row's last token             an attachment
    paste(slots, row, pieces, ...) an empty row becomes one that has consumed those tokens

Layers that share another's K/V have none of their own here. Arrays of cuts and snapshots are lazy: evaluate them before they are
kept, and before the row's next step is submitted, or that step copies the buffers that they still refer to (P1, P77).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """One array of a payload. shape: without the row axis; K and V of a block are [kv_heads, tokens, dim]."""

    layer: int
    part: str
    dtype: str
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """The first `tokens` tokens of a payload that was cut at position `start`."""

    start: int
    tokens: int
    payload: StatePayload


class StatePayload:
    """Immutable arrays by layer and part, each contiguous and without the row axis.

    Owner: the engine thread, which makes and drops it. Nothing in it is ever written to.
    """

    __slots__ = ("_tensors", "nbytes")

    def __init__(self, tensors: Mapping[Part, mx.array]) -> None:
        self._tensors = dict(tensors)
        self.nbytes = sum(array.nbytes for array in self._tensors.values())

    def tensors(self) -> Mapping[Part, mx.array]:
        """In the order of the layout (`block_parts`, `attachment_parts`)."""
        return self._tensors

    def arrays(self) -> list[mx.array]:
        return list(self._tensors.values())

    def to_host(self) -> list[np.ndarray[Any, Any]]:
        """C-contiguous copies in the order of the layout; bfloat16 as uint16. The arrays must be evaluated. Engine thread only."""
        return [np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a) for a in self._tensors.values()]

    @classmethod
    def from_host(cls, parts: Sequence[PartSpec], buffers: Iterable[Any]) -> StatePayload:
        """Evaluated copies of these C-contiguous buffers, one per part. Raises ValueError if one has not its part's size."""
        tensors = {}
        for spec, buffer in zip(parts, buffers, strict=True):
            dtype = np.dtype(_NUMPY.get(spec.dtype, spec.dtype))
            flat = np.frombuffer(buffer, dtype) if memoryview(buffer).nbytes else np.empty(0, dtype)
            array = mx.array(flat.reshape(spec.shape))
            tensors[spec.layer, spec.part] = array.view(mx.bfloat16) if spec.dtype == "bfloat16" else array
        made = cls(tensors)
        mx.eval(made.arrays())
        return made


def evaluate(payloads: Iterable[StatePayload]) -> None:
    """Compute what is still lazy of these; they stand for themselves then. Raises what the device raises."""
    mx.eval([array for payload in payloads for array in payload.arrays()])


def block_parts(specs: Sequence[StateSpec], tokens: int) -> tuple[PartSpec, ...]:
    """The layout of what `cut` gives for so many tokens."""
    return tuple(
        PartSpec(layer, name, spec.dtype, (spec.kv_heads, tokens, dim))
        for layer, spec in _attending(specs)
        for name, dim in (("k", spec.key_dim), ("v", spec.value_dim))
    )


def attachment_parts(specs: Sequence[StateSpec]) -> tuple[PartSpec, ...]:
    """The layout of what `snapshot` gives; empty for a model without recurrent layers."""
    return tuple(
        PartSpec(layer, f"state.{i}", array.dtype, array.shape)
        for layer, spec in enumerate(specs)
        if spec.kind == "recurrent"
        for i, array in enumerate(spec.arrays)
    )


def _attending(specs: Sequence[StateSpec]) -> list[tuple[int, StateSpec]]:
    """(index in the specs, spec) of the layers that hold K/V, in the order of a group's buffers."""
    return [(layer, spec) for layer, spec in enumerate(specs) if spec.kind in ("full", "sliding")]


def cut(slots: Slots, row: SlotRow, start: int, stop: int) -> StatePayload:
    """The K/V of positions start..stop of a row, lazy. At most 64 positions of one block, all of them still held."""
    tensors: dict[Part, mx.array] = {}
    for i, (layer, _) in enumerate(_attending(slots.specs)):
        for name, buffer in (("k", row.home.keys[i]), ("v", row.home.values[i])):
            at = _slot(start, buffer, row)
            tensors[layer, name] = mx.contiguous(buffer[row.index, :, at : at + stop - start])
    return StatePayload(tensors)


def _slot(position: int, buffer: mx.array, row: SlotRow) -> int:
    """Where a position lies: a ring (smaller than its class) is of whole blocks, so a block never wraps."""
    size = buffer.shape[2]
    return position % size if size < row.home.capacity else position


def snapshot(slots: Slots, row: SlotRow) -> StatePayload:
    """The row's recurrent state, lazy: valid exactly at the row's length. Raises ValueError before its first token."""
    state = slots.recurrent.read(row)
    parts = attachment_parts(slots.specs)
    arrays = [array for layer in state for array in layer]
    if any(array is None for array in arrays):
        raise ValueError("the row has no recurrent state yet")
    pairs = zip(parts, arrays, strict=True)
    return StatePayload({(part.layer, part.part): mx.contiguous(array[0]) for part, array in pairs if array is not None})


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
        _require(piece.payload, parts, piece.tokens)
    if wanted:
        if state is None:
            raise ValueError("recurrent layers have no state to go on from")
        _require(state, wanted)
    try:
        for i, (layer, spec) in enumerate(_attending(specs)):
            first = 0 if spec.window is None else max(0, length - spec.window + 1)
            seen = [p for p in pieces if p.start + p.tokens > first or p.tokens < BLOCK_TOKENS]
            for name, buffers in (("k", row.home.keys), ("v", row.home.values)):
                buffers[i] = _pasted(buffers[i], row, seen, (layer, name))
        if state is not None and wanted:
            arrays = iter(state.arrays())
            slots.recurrent.write(row, [[next(arrays)[None] for _ in spec.arrays] for spec in slots.recurrent.specs])
        mx.eval(slots.arrays(), [a for layer in slots.recurrent.read(row) for a in layer if a is not None])
    except BaseException:
        slots.recurrent.forget(row)
        raise
    row.length = length


def _pasted(buffer: mx.array, row: SlotRow, pieces: Sequence[Piece], part: Part) -> mx.array:
    """The buffer with one layer's K or V of these pieces, neighbours in one write. In a ring later ones come over earlier ones."""
    runs: list[tuple[int, list[mx.array]]] = []
    end = -1
    for piece in pieces:
        array = piece.payload.tensors()[part]
        at = _slot(piece.start, buffer, row)
        if at != end:
            runs.append((at, []))
        runs[-1][1].append(array if array.shape[1] == piece.tokens else array[:, : piece.tokens])
        end = at + piece.tokens
    for start, arrays in runs:
        whole = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=1)
        buffer[row.index, :, start : start + whole.shape[1]] = whole
    return buffer


def _require(payload: StatePayload, parts: Sequence[PartSpec], tokens: int | None = None) -> None:
    """tokens: how many of a block's it must hold at least; None for an attachment, whose shapes are given."""
    have = payload.tensors()
    right = [(part.layer, part.part) for part in parts] == list(have)
    for part in parts if right else ():
        array = have[part.layer, part.part]
        shape = part.shape if tokens is None else (part.shape[0], array.shape[1], part.shape[2])
        right = right and array.shape == shape and array.dtype == MLX_DTYPES[part.dtype] and (tokens is None or tokens <= array.shape[1])
    if not right:
        raise ValueError("state of another layout: its layers, shapes or types are not this model's")
