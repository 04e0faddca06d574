"""Angles shared by the layers of a step give the bits of each layer's own rotary embedding."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxnb_engine.rotary import SharedAngles


class Model(nn.Module):
    """Two layers' rotary embeddings."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.first, self.second = nn.RoPE(64, **how), nn.RoPE(64, **how)  # type: ignore[arg-type]


OFFSETS = [0, 7, 4000, mx.array([3, 900, 17], mx.int32)]


@pytest.mark.modes("none", "mkl-strict", "mkl")
@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize("offset", OFFSETS, ids=["start", "near", "far", "rows"])
@pytest.mark.parametrize(("base", "scale"), [(10000.0, 1.0), (500000.0, 0.25)])
@pytest.mark.parametrize("width", [1, 5])
def test_shared_angles_give_the_same_bits(traditional: bool, offset: int | mx.array, base: float, scale: float, width: int) -> None:
    own, shared = Model(traditional=traditional, base=base, scale=scale), Model(traditional=traditional, base=base, scale=scale)
    SharedAngles(shared)
    for heads in (2, 5):
        x = mx.random.normal((3, width, heads, 64), key=mx.random.key(heads)).transpose(0, 2, 1, 3)
        want = np.array(own.first(x, offset=offset)).tobytes()
        assert np.array(shared.first(x, offset=offset)).tobytes() == want
        assert np.array(shared.second(x, offset=offset)).tobytes() == want


def test_another_offset_width_or_base_takes_other_angles() -> None:
    own, shared = Model(), Model()
    shared.second.base = own.second.base = 500.0
    SharedAngles(shared)
    rows = mx.array([1, 2], mx.int32)
    for width, offset in ((1, 5), (1, 6), (2, 6), (1, rows), (1, mx.array([2, 1], mx.int32)), (1, 6)):
        x = mx.random.normal((2, 3, width, 64), key=mx.random.key(1))
        for name in ("first", "second"):
            assert mx.array_equal(getattr(shared, name)(x, offset=offset), getattr(own, name)(x, offset=offset)), (name, width, offset)


ODD = {"bf16": mx.ones((1, 2, 3, 64), mx.bfloat16), "partial": mx.ones((1, 2, 3, 80)), "3-D": mx.ones((2, 3, 64))}


@pytest.mark.parametrize("x", ODD.values(), ids=ODD)
def test_what_is_not_plain_stays_with_mlx(x: mx.array) -> None:
    own, shared = Model(), Model()
    SharedAngles(shared)
    assert mx.array_equal(shared.first(x, offset=3), own.first(x, offset=3)) and shared.first(x).dtype == x.dtype


def test_layers_of_one_step_compute_their_angles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    rope = mx.fast.rope
    monkeypatch.setattr(mx.fast, "rope", lambda *args, **how: (calls.append(1), rope(*args, **how))[1])
    model = Model()
    SharedAngles(model)
    for offset in (4, 5):
        for module in (model.first, model.second, model.first):
            module(mx.ones((1, 2, 1, 64)), offset=offset)
    assert len(calls) == 2
