"""GGUF metadata and names become exactly the model that the same weights are in a Hugging Face folder."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import tiny

from mlxnb_engine import gguf
from mlxnb_engine.errors import ModelError
from mlxnb_engine.headers import Header, TensorSpan, read_gguf


def header(path: Path) -> Header:
    raw = path.read_bytes()
    return read_gguf(io.BytesIO(raw), len(raw))


@pytest.mark.parametrize("family", gguf.ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_configuration_is_that_of_the_folder(tmp_path: Path, family: str, tied: bool) -> None:
    settings = {"tie_word_embeddings": tied, "rope_theta": 5e5, "rms_norm_eps": 2.0**-20, "max_position_embeddings": 512}
    model = gguf.describe(header(tiny.write_gguf(tmp_path / "m.gguf", family, **settings)))
    expected = tiny.config_of(family, **settings)
    shared = set(model.config) & set(expected)
    assert shared >= {"hidden_size", "num_hidden_layers", "head_dim", "tie_word_embeddings", "vocab_size", "rope_theta", "rms_norm_eps"}
    assert {key: model.config[key] for key in shared} == {key: expected[key] for key in shared}
    assert model.config.get("rope_traditional", False) == (family == "llama")


@pytest.mark.parametrize("family", gguf.ARCHITECTURES)
def test_every_tensor_has_the_name_it_has_in_the_folder(tmp_path: Path, family: str) -> None:
    model = gguf.describe(header(tiny.write_gguf(tmp_path / "m.gguf", family)))
    assert {".".join(pair) for pair in model.modules.values()} == set(tiny.weights_of(tiny.config_of(family)))


def test_the_label_names_the_type_of_most_bytes(tmp_path: Path) -> None:
    model = gguf.describe(header(tiny.write_gguf(tmp_path / "m.gguf", kind="Q4_1", embedding_kind="Q8_0")))
    assert model.label == "Q4_1"
    assert model.kinds["token_embd.weight"] == "Q8_0" and model.kinds["output_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"general.architecture": None}, "None"),
        ({"llama.expert_count": 8}, "mixture"),
        ({"llama.block_count": 3}, "3 layers"),
        ({"llama.block_count": 99_999}, "99999 layers"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.block_count": "2"}, "block_count"),
        ({"llama.attention.head_count": [4, 4]}, "head_count"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.attention.head_count": 8}, "attn_q"),
        ({"llama.attention.head_count_kv": 4}, "attn_k"),
        ({"llama.embedding_length": 128}, "token_embd"),
        ({"llama.feed_forward_length": 64}, "ffn_gate"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "epsilon"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon"),
        ({"llama.rope.freq_base": -1.0}, "freq_base"),
        ({"llama.rope.freq_base": True}, "freq_base"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, "original_context_length"),
        ({"llama.context_length": True}, "context_length"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused_by_name(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        gguf.describe(header(tiny.write_gguf(tmp_path / "m.gguf", metadata=change)))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, {"type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 1024,
            },
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
    ],
)
def test_position_scaling_is_read_from_metadata(tmp_path: Path, change: dict[str, Any], expected: Any) -> None:
    assert gguf.describe(header(tiny.write_gguf(tmp_path / "m.gguf", metadata=change))).config["rope_scaling"] == expected


def test_a_tensor_that_is_not_of_the_architecture_is_named(tmp_path: Path) -> None:
    good = header(tiny.write_gguf(tmp_path / "m.gguf"))
    for name in ("blk.0.attn_sinks.weight", "blk.0.ffn_gate_exps.weight", "rope_factors_long.weight", "token_embd", "blk.x.attn_q.weight"):
        span = TensorSpan(name, "F32", (16,), 0, 64)
        with pytest.raises(ModelError, match=name):
            gguf.describe(Header("gguf", {**good.tensors, name: span}, good.metadata))


def test_a_tensor_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = header(tiny.write_gguf(tmp_path / "m.gguf"))
    for kind in ("Q3_K", "IQ4_XS", "MXFP4", "I8"):
        span = TensorSpan("blk.0.attn_q.weight", kind, (64, 64), 0, 64)
        with pytest.raises(ModelError, match=kind):
            gguf.describe(Header("gguf", {**good.tensors, span.name: span}, good.metadata))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    good = header(tiny.write_gguf(tmp_path / "m.gguf"))
    for name in ("token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"):
        with pytest.raises(ModelError, match=name):
            gguf.describe(Header("gguf", {k: v for k, v in good.tensors.items() if k != name}, good.metadata))


@pytest.mark.parametrize(("factor", "original", "base", "head_dim"), [(8.0, 8192, 5e5, 128), (32.0, 8192, 5e5, 64), (4.0, 2048, 1e4, 16)])
def test_llama3_scaling_is_recognised_from_its_divisors(factor: float, original: int, base: float, head_dim: int) -> None:
    """The divisors are computed here by Llama 3's published rule, branch by branch."""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * base ** (2 * i / head_dim)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original / 1:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    found = gguf.llama3_scaling(divisors, base, head_dim)
    assert (found["factor"], found["original_max_position_embeddings"], found["rope_type"]) == (factor, original, "llama3")
    for wrong in (divisors[:-1], [*divisors[:-1], divisors[-1] * 1.5, 1.0], [d * 2 for d in divisors], []):
        with pytest.raises(ModelError, match="not known"):
            gguf.llama3_scaling(wrong, base, head_dim)
