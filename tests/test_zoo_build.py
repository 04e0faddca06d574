"""The zoo is legal: each tiny model runs, uses what its module is about, and agrees with itself through mlx-lm's own caches.

Nothing here tests the engine. It guards the ground that the tests of every kind of layer stand on: a configuration with an idle
window, a single expert or an unused weight would let a wrong engine pass.
"""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zoo
import zoo_census
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

IDS = mx.array([[(7 * i * i + 3 * i + 1) % 96 for i in range(40)]])
CUTS = (0, 17, 30, *range(31, 41))
"""Two chunks, both longer than a window, then single tokens."""

PUSHED = "deepseek_v3 falcon_h1 gemma2 gemma3n gpt_oss lfm2 llama longcat_flash_ngram minimax_m3_vl plamo3 qwen3_next rwkv7".split()
"""One or two of each family, for every push; all of them in the long tier."""

every_module = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PUSHED else pytest.mark.tier("N")) for name in zoo.names()]
)

CHUNKS_ROUND = frozenset(
    "bailing_hybrid bailing_moe_v3 deepseek_v3 deepseek_v32 deepseek_v41 falcon_h1 glm4_moe_lite glm_moe_dsa granitemoehybrid kimi_k25 "
    "kimi_k3 kimi_linear kimi_vl longcat_flash longcat_flash_ngram mamba2 mistral4 nemotron_h plamo2".split()
)
"""Whose bits depend on how a prompt is cut: state-space duality, latent attention with another arithmetic for one token, sparse indices."""

OWN_CLASSES = {"deepseek_v41": {"LayerCache"}, "llama4": {"ChunkedKVCache", "KVCache"}, "minimax_m3_vl": {"KVCache"}}
PURE_RECURRENT = {"mamba", "mamba2", "rwkv7"}

IDLE = {
    "apertus": ("act_fn.eps",),
    "gemma3n": ("layers.4.self_attn.k_", "layers.4.self_attn.v_", "layers.5.self_attn.k_", "layers.5.self_attn.v_"),
    "kimi_k3": ("layers.0.self_attention_res_",),
}
"""Weights that mlx-lm makes and never uses: layers that share K/V have their own projections, the first layer has no earlier block."""


ROUTED = frozenset(
    "Klear afmoe bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 deepseek deepseek_v2 deepseek_v3 deepseek_v32 "
    "deepseek_v41 dots1 ernie4_5_moe exaone_moe gemma4_text glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoehybrid "
    "hunyuan jamba kimi_k25 kimi_k3 kimi_linear kimi_vl laguna lfm2_moe llama4 longcat_flash longcat_flash_ngram mellum "
    "mimo_v2_flash minimax minimax_m3_vl mistral4 mixtral nemotron_h olmoe phimoe phixtral qwen2_moe qwen3_5_moe qwen3_moe "
    "qwen3_next qwen3_vl_moe solar_open step3p5".split()
)
"""Mixtures of experts."""


def scores(model: Any, caches: Sequence[Any], cuts: Sequence[int] = (0, 40)) -> mx.array:
    """[40, 96]: the prompt fed piece by piece."""
    return mx.concatenate([model(IDS[:, a:b], cache=caches)[0, :, :96] for a, b in itertools.pairwise(cuts)])


def apart(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max().item())


def test_every_module_of_mlx_lm_is_built_or_named_with_a_reason() -> None:
    assert set(zoo.modules()) == set(zoo.names()) | set(zoo.NOT_BUILT)
    assert not set(zoo.names()) & set(zoo.NOT_BUILT)
    assert len(zoo.TABLE) == sum(map(len, (zoo.FULL_ATTENTION, zoo.LATENT, zoo.SLIDING, zoo.RECURRENT))), "a module is in two families"


@pytest.mark.parametrize("name", ["bitnet", "muse_spark"])
@pytest.mark.skipif(mx.metal.is_available(), reason="the claim is about machines without Metal")
def test_the_modules_left_out_for_metal_do_not_run_without_it(name: str) -> None:
    sizes = {**zoo.BASE, "hidden_size": 512, "head_dim": 128}
    muse = {
        "rope_parameters": {"rope_theta": 1e4},
        "layer_rope_theta": [1e4, 0, 1e4, 0],
        "layer_types": zoo.SFSF,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.2,
        "post_norm_eps": 1e-8,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    }
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({**sizes, "model_type": name, "text_config": {**sizes, **muse}}))
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        mx.eval(model(IDS, cache=make_prompt_cache(model)))


def test_a_hadamard_pack_is_wanted_before_anything_is_built() -> None:
    module = importlib.import_module("mlx_lm.models.prism_hadamard_qwen35")
    with pytest.raises(ValueError, match="Hadamard pack"):
        module.ModelArgs.from_dict({"model_type": "prism_hadamard_qwen35", "text_config": zoo.BASE})


@pytest.mark.tier("N")
def test_importing_olmo_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", "import mlx_lm.models.olmo; print('alive')"], capture_output=True, text=True, check=False)
    assert (done.returncode, "ai2-olmo" in done.stdout + done.stderr, "alive" in done.stdout) == (1, True, False)


def test_weights_depend_on_the_seed_and_none_is_zero() -> None:
    def weights(seed: int) -> dict[str, mx.array]:
        return dict(tree_flatten(zoo.build("gpt_oss", seed)[0].parameters()))

    first, again, other = weights(0), weights(0), weights(1)
    for path, array in first.items():
        assert array.dtype == mx.float32, path
        assert mx.array_equal(array, again[path]), path
        assert not mx.any(array == 0), path
        assert not mx.any(array == other[path]), path


def test_a_model_does_not_write_into_the_table() -> None:
    before = zoo.config("gemma3")
    zoo.build("gemma3")[1]["text_config"]["vocab_size"] = 0
    assert zoo.config("gemma3") == before


@every_module
def test_a_tiny_model_runs_and_its_chunks_agree_with_one_forward(name: str) -> None:
    model, _ = zoo.build(name)
    whole = scores(model, make_prompt_cache(model))
    assert whole.shape == (40, 96)
    assert mx.all(mx.isfinite(whole)), "scores that are not finite"
    assert 0.1 < mx.std(whole).item() < 10, "scores too flat or too sharp to compare"
    assert apart(whole, scores(model, zoo.flat_caches(model))) == 0

    own, flat = scores(model, make_prompt_cache(model), CUTS), scores(model, zoo.flat_caches(model), CUTS)
    if name == "phi3small":
        assert apart(whole, flat) > 1e-3, "phi3small has become causal: say so in the table"
    else:
        assert apart(whole, flat) <= (1e-4 if name in CHUNKS_ROUND else 0)
    if name == "plamo3":
        assert apart(own, flat) > 1e-3, "plamo3's ring now keeps as many keys as its mask: say so in the table"
    else:
        assert apart(own, flat) <= 1e-3, "a ring of mlx-lm, in its own order of keys, is far from the window mask"


@every_module
def test_a_tiny_model_has_the_kinds_of_layer_of_its_family(name: str) -> None:
    model, _ = zoo.build(name)
    leaves = [cache for _, cache in zoo_census.leaves(make_prompt_cache(model))]
    kinds = {type(cache).__name__ for cache in leaves}
    if name in OWN_CLASSES:
        assert kinds == OWN_CLASSES[name]
    elif name in zoo.SLIDING:
        assert kinds == {"KVCache", "RotatingKVCache"}
    elif name in zoo.RECURRENT:
        assert "ArraysCache" in kinds and (len(kinds) > 1) == (name not in PURE_RECURRENT)
    elif name == "longcat_flash_ngram":
        assert kinds == {"ArraysCache", "KVCache"}
    else:
        assert kinds == {"KVCache"}
    assert all(cache.max_size < 17 for cache in leaves if hasattr(cache, "max_size")), "a window that a test prompt does not fill"


@every_module
def test_every_weight_of_a_tiny_model_moves_its_scores(name: str) -> None:
    """By its gradient, or where that is zero (a weight that only chooses) or not defined by being exchanged."""
    idle = _without_effect(name, _without_gradient(zoo.build(name)[0]))
    expected = IDLE.get(name, ())
    assert all(any(part in path for part in expected) for path in idle), idle
    assert all(any(part in path for path in idle) for part in expected), f"in use now: {expected}"


def _without_gradient(model: Any) -> list[str]:
    weights = model.parameters()
    direction = mx.random.normal((40, 96), key=mx.random.key(0))

    def loss(candidate: Any) -> mx.array:
        model.update(candidate)
        return (scores(model, make_prompt_cache(model)) * direction).sum()

    try:
        gradients = dict(tree_flatten(mx.grad(loss)(weights)))
    except ValueError as error:  # deepseek_v41: no gradient through its choices and its rounding
        assert "VJP" in str(error), error
        gradients = {}
    return [path for path, _ in tree_flatten(weights) if path not in gradients or not mx.any(gradients[path] != 0)]


def _without_effect(name: str, paths: Sequence[str]) -> list[str]:
    """Those of the weights whose values of another seed give the same scores."""

    def run(exchanged: dict[str, mx.array]) -> mx.array:
        model, _ = zoo.build(name)  # a fresh one: some modules prepare constants in their first forward
        model.update(tree_unflatten(list(exchanged.items())))
        return scores(model, make_prompt_cache(model))

    before = run({})
    others = dict(tree_flatten(zoo.build(name, seed=1)[0].parameters()))
    return [path for path in paths if mx.array_equal(before, run({path: others[path]}))]


@every_module
def test_the_router_of_a_tiny_model_chooses_by_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, set[tuple[int, ...]]] = {}
    call = SwitchLinear.__call__

    def recorded(layer: SwitchLinear, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        chosen.setdefault(id(layer), set()).update(map(tuple, np.sort(np.array(indices).reshape(-1, indices.shape[-1]), axis=-1).tolist()))
        return call(layer, x, indices, *args, **kwargs)

    monkeypatch.setattr(SwitchLinear, "__call__", recorded)
    model, _ = zoo.build(name)
    experts = [module for path, module in model.named_modules() if isinstance(module, SwitchLinear) and not path.endswith("o_a_proj")]
    assert bool(experts) == (name in ROUTED)
    for i in range(6):
        model(IDS[:, i : i + 12], cache=make_prompt_cache(model))
    for layer in experts:
        assert len(chosen[id(layer)]) > 1, f"all tokens go to {chosen[id(layer)]}"


@pytest.mark.parametrize(
    ("name", "place", "expected"),
    [
        ("plamo3", "0", {"max_size": 8, "masks": [[1, 9, False], [20, 9, False]]}),
        ("deepseek_v3", "1", {"kv": {"heads": 1, "key": 16, "value_heads": 1, "value": 4, "dtype": "bfloat16"}, "masks": []}),
        ("minimax_m3_vl", "1.1", {"kv": {"heads": 1, "key": 8, "value_heads": 1, "value": 0, "dtype": "bfloat16"}}),
        (
            "qwen3_next",
            "0",
            {"arrays": [[[1, 3, 64], "bfloat16"], [[1, 4, 8, 8], "float32"]], "users": ["model", "model.layers.0.linear_attn"]},
        ),
        ("rwkv7", "3", {"members": ["[]", "[]="]}),
        ("nemotron-nas", "2", {"users": []}),
    ],
)
def test_the_census_tells_what_a_module_asks_of_its_caches(name: str, place: str, expected: dict[str, Any]) -> None:
    facts = zoo_census.census(name)
    assert {key: facts["objects"][place].get(key) for key in expected} == expected
    assert f"{name}: {facts['layers']} layers, {facts['caches']} caches" in zoo_census.describe(facts)


def test_the_census_sees_that_caches_and_layers_differ_in_number() -> None:
    facts = {name: zoo_census.census(name) for name in ("gemma3n", "nanbeige", "llama")}
    assert {name: (f["layers"], f["caches"]) for name, f in facts.items()} == {"gemma3n": (6, 4), "nanbeige": (4, 8), "llama": (4, 4)}
    shared = facts["gemma3n"]["objects"]["2"]["users"]
    assert [path.rsplit("layers.")[-1] for path in shared] == ["2.self_attn", "4.self_attn"]
    assert "NOT ONE PER LAYER" in zoo_census.describe(facts["gemma3n"])
    assert "NOT ONE PER LAYER" not in zoo_census.describe(facts["llama"])
