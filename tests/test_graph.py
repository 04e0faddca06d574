"""The model as ids and state to scores: what is projected, which models are taken, whose attention is replaced (G20, P11, P12, P15)."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache
from rig import G26, GREEDY, Rig, graph_of, model_of, prompt
from tiny import FAMILIES, VOCAB

from mlxnb_engine import qualify
from mlxnb_engine.graph import ModelGraph
from mlxnb_engine.state import attention
from mlxnb_engine.state.slots import Slots
from mlxnb_engine.state.spec import Geometry
from mlxnb_engine.types import StateSpec

Kind = Callable[[], nn.Module]


def quantised(**overrides: Any) -> nn.Module:
    model = model_of("llama", **overrides)
    nn.quantize(model, group_size=32, bits=4)
    return model


HEADS: dict[str, Kind] = {
    "untied": lambda: model_of("llama"),
    "tied": lambda: model_of("llama", tie_word_embeddings=True),
    "quantised": quantised,
    "quantised and tied": lambda: quantised(tie_word_embeddings=True),
    "phi3": lambda: model_of("phi3"),
}


# -- the projection (G20, P15) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_gathering_before_the_projection_equals_gathering_after_it(head: str) -> None:
    model = HEADS[head]()
    ids = mx.array([prompt(9), prompt(9, 1)], mx.int32)
    full = model(ids, cache=make_prompt_cache(model)).reshape(18, VOCAB)
    mx.eval(full)
    graph = ModelGraph(model, {})
    for positions, multiple in (([8, 17], 1), ([0], 1), ([3, 3, 12], 4), (list(range(18)), 4)):
        scores = graph.forward(ids, make_prompt_cache(model), positions, multiple)
        assert scores.logits.shape == (len(positions), VOCAB)
        assert scores.hidden is not None and scores.hidden.shape == (len(positions), 64)
        assert mx.array_equal(scores.logits, full[mx.array(positions)]), positions


@pytest.mark.modes("none", "mkl")
@pytest.mark.parametrize("head", HEADS)
def test_the_projection_may_be_multiplied_the_other_way_round(head: str) -> None:
    """Only a plain float32 matrix and only for several rows; scores agree to rounding."""
    plain, turned = ModelGraph(HEADS[head](), {}), ModelGraph(HEADS[head](), {}, weight_first=True)
    ids = mx.array([prompt(9), prompt(9, 1)], mx.int32)
    for positions in ([8], [8, 17], [3, 3, 12]):
        want, got = (graph.forward(ids, make_prompt_cache(graph.model), positions).logits for graph in (plain, turned))
        assert got.shape == want.shape and mx.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seconds", [(1.0, 0.5, True), (1.0, 0.95, False), (0.5, 1.0, False)])
def test_the_order_of_the_projection_is_the_faster_one_by_a_margin(seconds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = [0.0], itertools.cycle([0.0, seconds[0], 0.0, seconds[1]])

    def now() -> float:
        clock[0] += next(times)
        return clock[0]

    monkeypatch.setattr(qualify.time, "perf_counter", now)
    assert qualify.weight_first(64, 8) is seconds[2]


def _recording(model: nn.Module, entered: list[tuple[int, ...]]) -> ModelGraph:
    """A graph over this model that notes the shape of whatever enters the projection's own arithmetic."""
    head = model.lm_head
    kind = type(head)

    def call(self: Any, x: mx.array) -> mx.array:
        entered.append(x.shape)
        return kind.__call__(self, x)

    head.__class__ = type("Recording", (kind,), {"__call__": call})
    graph = ModelGraph(model, {})
    entered.clear()
    return graph


@pytest.mark.parametrize("multiple", [1, 4])
def test_exactly_the_needed_rows_enter_the_projection(multiple: int) -> None:
    entered: list[tuple[int, ...]] = []
    rig = Rig(_recording(model_of(), entered), Geometry(multiple, multiple > 1))
    for n in (5, 70, 9, 33, 12):
        rig.ask(prompt(n), 7)
    batches = []
    fault = rig.watched.graph.forward

    def forward(*args: Any) -> Any:
        entered.clear()
        scores = fault(*args)
        batches.append((len(rig.group.rows), list(entered)))
        return scores

    rig.watched.graph.forward = forward  # type: ignore[method-assign]
    rig.run()
    assert max(count for count, _ in batches) == 5
    for count, shapes in batches:
        assert shapes == [(1, -(-count // multiple) * multiple, 64)]


class _WideVocabulary:
    """A model whose projection is by far its largest tensor: evaluating it shows in the bytes taken."""

    def __init__(self) -> None:
        self.graph = ModelGraph(model_of("llama", vocab_size=20_000, tie_word_embeddings=True), {})
        self.window_bytes = 64 * 20_000 * 4

    def taken_by_prefill(self) -> int:
        rig = Rig(self.graph)
        rig.ask(prompt(130), 1)
        rig.scheduler._admit()
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        while rig.group.preparing:
            rig.group.advance_preparation()
        mx.synchronize()
        assert rig.watched.windows == [(1, 64), (1, 64), (1, 1)]
        return mx.get_peak_memory() - before


def test_prefill_projects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = _WideVocabulary()
    assert wide.taken_by_prefill() < wide.window_bytes / 4
    # Negative control: the scores of a window are evaluated.
    monkeypatch.setattr(ModelGraph, "feed", lambda self, ids, caches: mx.eval(self.model(ids, cache=list(caches))))
    assert wide.taken_by_prefill() > wide.window_bytes


def test_a_forward_that_raises_leaves_the_graph_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, ids = ModelGraph(model_of(), {}), mx.array([prompt(4)])
    want = graph.forward(ids, make_prompt_cache(graph.model), [3]).logits
    with pytest.raises(ValueError, match="no room"):
        graph.forward(ids, _failing(), [3])
    assert graph.model(ids, cache=make_prompt_cache(graph.model)).shape == (1, 4, VOCAB), "the gather was left switched on"
    assert mx.array_equal(graph.forward(ids, make_prompt_cache(graph.model), [3]).logits, want)


def _failing() -> list[Any]:
    class Cache:
        offset = 0

        def make_mask(self, *args: Any, **kwargs: Any) -> None:
            return None

        def update_and_fetch(self, *args: Any) -> Any:
            raise ValueError("no room")

    return [Cache(), Cache()]


# -- what a layer stores -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_of_each_layer_is_learnt_from_the_model(family: str) -> None:
    graph = graph_of(family)
    assert graph.specs == tuple(StateSpec("full", 2, 16, 16, "float32", place=(i,)) for i in range(2))
    assert graph.vocab_size == VOCAB
    assert graph.module == {"mistral": "llama"}.get(family, family)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_half_precision_rows_of_a_batch_equal_the_same_rows_alone(kind: str, dtype: str) -> None:
    graph = ModelGraph(model_of("qwen3", dtype=kind), {})
    assert {spec.dtype for spec in graph.specs} == {dtype}
    runs = []
    for together in (True, False):
        rigs = [Rig(graph) for _ in range(1 if together else 4)]
        rows = [rigs[i % len(rigs)].ask(prompt(n), 9, G26 if n % 2 else GREEDY, n) for i, n in enumerate((1, 63, 64, 130))]
        for rig in rigs:
            rig.run()
        runs.append([(row.ids, [np.array(h.view(mx.uint16)).tobytes() for h in row.logits()]) for row in rows])
    assert runs[0] == runs[1]


def test_the_shapes_of_dense_matrices_are_those_of_the_model() -> None:
    assert graph_of().projection_shapes() == {(VOCAB, 64), (64, 64), (32, 64), (128, 64), (64, 128)}
    assert ModelGraph(quantised(), {}).projection_shapes() == set()


# -- how rows may share a step: the rest is in test_zoo.py ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_rows_whose_rope_depends_on_their_length_run_alone(name: str) -> None:
    assert ModelGraph(model_of(), {"rope_scaling": {name: "dynamic", "factor": 2.0}}).family.mode == "lone"


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.0}, {"rope_type": "llama3", "factor": 8.0}])
def test_static_rope_scaling_is_taken(scaling: dict[str, Any] | None) -> None:
    assert ModelGraph(model_of(), {"rope_scaling": scaling}).family.mode == "ragged"


# -- the attention dispatch (P11) -------------------------------------------------------------------------------------------------


def test_mlx_lms_own_quantised_caches_keep_their_attention() -> None:
    model = model_of("llama", head_dim=32)
    ModelGraph(model, {})

    def tokens() -> list[int]:
        steps = generate_step(mx.array(prompt(40)), model, max_tokens=12, kv_bits=4, kv_group_size=32, quantized_kv_start=0)
        return [int(token) for token, _ in steps]

    attention.install()
    attention.install()
    ours, replaced = tokens(), base.quantized_scaled_dot_product_attention
    assert replaced is attention._dispatch
    try:
        base.quantized_scaled_dot_product_attention = replaced._mlxnb_original
        assert getattr(replaced._mlxnb_original, "_mlxnb_original", None) is None, "installing twice wrapped the wrapper"
        assert tokens() == ours
    finally:
        base.quantized_scaled_dot_product_attention = replaced


def test_installing_again_after_a_reload_keeps_one_level() -> None:
    original = base.quantized_scaled_dot_product_attention._mlxnb_original
    try:
        fresh = importlib.reload(attention)
        fresh.install()
        assert base.quantized_scaled_dot_product_attention is fresh._dispatch
        assert fresh._dispatch._mlxnb_original is original  # type: ignore[attr-defined]
    finally:
        attention.install()


def test_a_layer_routes_to_the_dispatch_only_while_a_step_spans_several_classes() -> None:
    slots = Slots(graph_of().specs, Geometry())
    slots.add(10)
    slots.begin(1)
    assert not hasattr(slots.caches[0], "bits")
    slots.add(100)
    slots.begin(1)
    assert hasattr(slots.caches[0], "bits") and len(slots.current.spans) == 2
