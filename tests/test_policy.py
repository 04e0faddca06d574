"""Layers of settings: later ones win field by field, and every value knows its layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxnb_engine import policy
from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import CompletionRequest, HlgSpec, RequestId, SamplingSpec


def request(**more: Any) -> CompletionRequest:
    return CompletionRequest(RequestId("r"), "m", text="x", **more)


def test_without_layers_the_policy_is_the_built_in_one() -> None:
    chosen = policy.resolve()
    assert chosen.sampling() == SamplingSpec()
    assert set(chosen.source.values()) == {"default"}
    assert chosen.open_fields == tuple(sorted(policy.MODEL_FIELDS))
    defaults = request()
    for name in ("max_tokens", "samples", "stop", "prefill", "thinking", "dtype"):
        assert chosen.values[name] == getattr(defaults, name)


def test_the_cell_wins_over_the_notebook_and_that_over_the_model() -> None:
    chosen = policy.resolve(model={"temp": 0.1, "top_p": 0.8, "min_p": 0.02}, notebook={"temp": 0.2, "top_p": 0.9}, cell={"temp": 0.3})
    assert (chosen.values["temp"], chosen.source["temp"]) == (0.3, "cell")
    assert (chosen.values["top_p"], chosen.source["top_p"]) == (0.9, "notebook")
    assert (chosen.values["min_p"], chosen.source["min_p"]) == (0.02, "model")
    assert (chosen.values["top_k"], chosen.source["top_k"]) == (0, "default")
    assert chosen.open_fields == ("repetition_penalty", "top_k")


def test_a_cell_can_take_a_notebook_setting_back_to_none() -> None:
    chosen = policy.resolve(notebook={"repetition_penalty": 1.3}, cell={"repetition_penalty": None})
    assert chosen.sampling().repetition_penalty is None
    assert "repetition_penalty" not in chosen.open_fields


_LAYER = st.fixed_dictionaries(
    {}, optional={"temp": st.floats(0, 2), "top_p": st.floats(0.01, 1), "top_k": st.integers(0, 99), "max_tokens": st.integers(0, 99)}
)


@given(_LAYER, _LAYER)
def test_resolving_is_a_union_in_which_the_later_layer_wins(notebook: dict[str, Any], cell: dict[str, Any]) -> None:
    chosen = policy.resolve(notebook=notebook, cell=cell)
    for name in policy.DEFAULTS:
        expected = cell.get(name, notebook.get(name, policy.DEFAULTS[name]))
        assert chosen.values[name] == expected
        assert chosen.source[name] == ("cell" if name in cell else "notebook" if name in notebook else "default")


@pytest.mark.parametrize("layer", ["notebook", "cell"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temp", -1),
        ("temp", math.nan),
        ("temp", True),
        ("top_p", 0),
        ("top_k", 1.5),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("samples", 0),
        ("thinking", "on"),
        ("model", 3),
        ("model", None),
        ("system", b"bytes"),
        ("dtype", 16),
        ("seed", 2**64),
        ("logprobs", 51),
        ("hlg_gain", -1),
        ("hlg_width", math.nan),
        ("hlg_anchor", "middle"),
        ("hlg_offset", math.inf),
        ("hlg_toe", "soft"),
    ],
)
def test_a_value_out_of_range_is_refused_in_either_layer(layer: str, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        policy.resolve(**{layer: {name: value}})


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="'tmp'.*'temp'"):
        policy.resolve(cell={"tmp": 1})


def test_hlg_is_on_once_one_of_its_settings_is_given() -> None:
    assert policy.resolve(cell={"temp": 1.0}).sampling().hlg is None
    assert policy.resolve(cell={"hlg_width": 2.0, "temp": 0.7}).sampling().hlg == HlgSpec(width=2.0)


def test_an_hlg_curve_that_greedy_choice_would_ignore_is_refused() -> None:
    with pytest.raises(RequestError, match="--temp"):
        policy.resolve(cell={"hlg_gain": 0.3})
    assert policy.resolve(notebook={"temp": 0.7}, cell={"hlg_gain": 0.3}).sampling().hlg == HlgSpec(gain=0.3)
    assert policy.resolve(cell={"hlg_gain": 0.3, "temp": 0.0}).sampling().temp == 0.0, "a sweep may include greedy"


def test_the_model_fills_only_fields_that_nobody_chose() -> None:
    chosen = policy.resolve(notebook={"top_p": 0.5}, cell={"temp": 0.0})
    asked = request(sampling=chosen.sampling(), open_fields=chosen.open_fields)
    told = policy.with_model(asked, {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True})
    assert (told.sampling.temp, told.sampling.top_p, told.sampling.top_k) == (0.0, 0.5, 20)
    assert told.open_fields == () and policy.with_model(told, {"top_k": 7}) == told


def test_a_request_without_open_fields_is_left_alone_by_the_model() -> None:
    asked = request(sampling=SamplingSpec(temp=0.0))
    assert policy.with_model(asked, {"temperature": 0.6, "top_k": 20}) == asked


def test_the_first_cell_and_a_later_one_get_the_same_settings() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.01}
    before_load = policy.resolve(cell={"top_k": 5})
    late = policy.with_model(request(sampling=before_load.sampling(), open_fields=before_load.open_fields), defaults)
    assert late.sampling == policy.resolve(model=defaults, cell={"top_k": 5}).sampling()


def test_do_sample_false_switches_temperature_and_filters_off_but_not_the_penalty() -> None:
    layer = policy.model_layer({"temperature": 0.6, "top_k": 50, "repetition_penalty": 1.1, "do_sample": False})
    assert layer == {"repetition_penalty": 1.1}


@given(
    st.dictionaries(
        st.sampled_from([*policy.MODEL_FIELDS, "temperature", "max_length", "eos_token_id", "seed"]), st.none() | st.floats() | st.text()
    )
)
def test_whatever_a_model_file_says_the_result_is_valid(defaults: dict[str, Any]) -> None:
    asked = request(open_fields=policy.resolve().open_fields)
    told = policy.with_model(asked, defaults)
    told.validate()
    untouched = dataclasses.replace(told, sampling=asked.sampling, open_fields=asked.open_fields)
    assert untouched == asked


@pytest.mark.parametrize(("context", "chunk"), [(10_398, 2048), (78_678, 256), (131_072, 128), (1, 2048), (10**9, 8)])
def test_a_prefill_window_shrinks_where_scores_are_materialised(context: int, chunk: int) -> None:
    assert policy.prefill_chunk(2048, heads=24, context=context, fused=False) == chunk
    assert policy.prefill_chunk(2048, heads=24, context=context, fused=True) == 2048
