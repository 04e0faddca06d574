"""Transposed copies of weights for steps of one row: which are made, that only such steps read them, and what they may cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from rig import model_of, prompt

from mlxnb_engine import layouts
from mlxnb_engine.graph import ModelGraph


def faster(*shapes: tuple[int, ...], share: float = 0.5) -> layouts.Timer:
    """A timer by which the copy of these shapes takes `share` of the time, and that of any other as long as the weight itself."""

    def timed(weights: Sequence[mx.array], turned: Sequence[mx.array]) -> tuple[float, float]:
        assert [w.shape for w in weights] == [t.shape[::-1] for t in turned]
        return 1.0, share if weights[0].shape in shapes else 1.0

    return timed


def scores(model: nn.Module, ids: Sequence[Sequence[int]]) -> mx.array:
    rows = mx.array(ids, mx.int32)
    return ModelGraph(model, {}).forward(rows, make_prompt_cache(model), [rows.size - 1]).logits


@pytest.mark.modes("none", "mkl")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_step_of_one_row_reads_the_copies_and_agrees_to_rounding(family: str, tied: bool) -> None:
    plain, model = (model_of(family, tie_word_embeddings=tied) for _ in range(2))
    shapes = {m.weight.shape for _, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    copied = layouts.install(model, 2**30, faster(*shapes))
    weights = [m.weight for _, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    assert copied == sum(w.nbytes for w in weights)
    assert mx.allclose(scores(model, [[7]]), scores(plain, [[7]]), rtol=1e-4, atol=1e-4)


def test_only_one_row_reads_the_copy() -> None:
    """The copy is made wrong on purpose: whoever reads it shows it."""
    layer = nn.Linear(8, 4)
    x = mx.arange(32, dtype=mx.float32).reshape(1, 4, 8)
    kept = layer.weight
    layouts.install(nn.Sequential(layer), 2**20, faster((4, 8)))
    layer.weight = mx.zeros_like(kept)
    assert mx.array_equal(layer(x), mx.broadcast_to(layer.bias, (1, 4, 4)))
    assert mx.allclose(layer(x[:, 2:3]), x[:, 2:3] @ kept.T + layer.bias, rtol=1e-4, atol=1e-4)
    assert layer(x[:, :1]).shape == (1, 1, 4)


def test_windows_of_several_rows_keep_their_bits() -> None:
    plain, model = model_of("llama"), model_of("llama")
    shapes = {m.weight.shape for _, m in model.named_modules() if isinstance(m, nn.Linear)}
    layouts.install(model, 2**30, faster(*shapes))
    assert mx.array_equal(ModelGraph(model, {}).forward(mx.array([prompt(9)]), make_prompt_cache(model), [7, 8]).logits,
                          ModelGraph(plain, {}).forward(mx.array([prompt(9)]), make_prompt_cache(plain), [7, 8]).logits)


def test_the_budget_goes_to_what_gains_most() -> None:
    def timed(weights: Sequence[mx.array], turned: Sequence[mx.array]) -> tuple[float, float]:
        return 1.0, {(4, 8): 0.8, (16, 8): 0.4, (2, 8): 0.9}[weights[0].shape]

    def net() -> tuple[nn.Module, list[str]]:
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 16), nn.Linear(8, 2))
        return model, [type(layer).__call__.__module__ for layer in model.layers]

    for budget, copied in ((0, set()), (511, {0}), (512, {1}), (639, {1}), (640, {0, 1}), (2**20, {0, 1})):
        model, before = net()
        spent = layouts.install(model, budget, timed)
        after = [type(layer).__call__.__module__ for layer in model.layers]
        assert {i for i in range(3) if after[i] != before[i]} == copied
        assert spent == sum((128, 512)[i] for i in copied) <= budget


@pytest.mark.parametrize("other", [nn.QuantizedLinear, nn.Conv1d])
def test_other_layers_and_types_are_left_alone(other: Any) -> None:
    layer = nn.QuantizedLinear(64, 32) if other is nn.QuantizedLinear else nn.Conv1d(4, 4, 3)
    half = nn.Linear(8, 4)
    half.set_dtype(mx.bfloat16)
    model = nn.Sequential(layer, half)
    assert layouts.install(model, 2**30, lambda *_: (1.0, 0.1)) == 0
    assert type(half) is nn.Linear and type(layer) is other


def test_copies_are_no_parameters() -> None:
    model = model_of("llama")
    before = {name for name, _ in tree_flatten(model.parameters())}
    layouts.install(model, 2**30, lambda *_: (1.0, 0.1))
    assert {name for name, _ in tree_flatten(model.parameters())} == before


def test_both_layouts_are_timed_over_more_than_one_round() -> None:
    weight = mx.random.normal((64, 32))
    plain_s, turned_s = layouts.seconds([weight], [mx.contiguous(weight.T)])
    assert 0 < plain_s < 60 and 0 < turned_s < 60
