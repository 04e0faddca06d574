"""One tiny random model of every `mlx_lm.models` module: what the engine's capability table is tested on. Needs MLX.

Weights depend only on (seed, parameter name, shape) and none is zero. Sizes are small, proportions are not: grouped heads, several
experts with fewer chosen, windows of 8 tokens, both kinds of layer in every hybrid, so that a test prompt of 30 tokens reaches
every branch of a model's code.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache
from tiny import noise

Config = dict[str, Any]

NOT_BUILT = {
    "bitnet": "its linear layers run on Metal only",
    "muse_spark": "its attention runs on Metal only",
    "olmo": "importing it ends the process unless ai2-olmo is installed",
    "prism_hadamard_qwen35": "wants 2-bit weights and the manifest of its own pack",
}
"""Module -> why there is no tiny model of it."""

WINDOW = 8
SFSF = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

BASE: Config = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_qkv_bias": True,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "sliding_window": WINDOW,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    # gated delta
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
"""What most modules share. `from_dict` takes the keys that a module knows and drops the rest."""

_GRANITE = {"logits_scaling": 2.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.5, "residual_multiplier": 0.7}
_GROUPED = {"n_routed_experts": 8, "num_experts": 8, "n_group": 4, "topk_group": 2}
_DSA = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 12}
_LONGCAT = {
    "num_layers": 2,
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
_KDA = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
_LFM = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [1, 3],
}
_YARN = {**_ROPE, "rope_type": "yarn", "type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_QUERY_SCALE = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}

FULL_ATTENTION: dict[str, Config] = {
    "Klear": {},
    "afm7": {"hidden_dim": 32, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "apertus": {"post_norm": True, "qk_norm": True},
    "bailing_moe": {"topk_group": 1},
    "cohere": {"layer_norm_bias": True},
    "dbrx": {
        "d_model": 32,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {},
    "dots1": {"scoring_func": "noaux_tc"},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_layer_start_index": 1, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone": {"num_layers": 4},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"rope_scaling": None, "partial_rotary_factor": 0.5, **_GROUPED},
    "gpt2": {"n_ctx": 4096, "n_positions": 4096, "n_embd": 32, "n_head": 4, "n_layer": 4, "num_key_value_heads": 4},
    "gpt_bigcode": {"n_positions": 4096, "n_embd": 32, "n_inner": 48, "n_head": 4, "n_layer": 4, "num_key_value_heads": 1},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": {"n_positions": 4096, "n_embd": 32, "n_head": 4, "n_layer": 4, "rotary_dim": 4},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "helium": {},
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 10.0},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 10.0}},
    "internlm2": {},
    "internlm3": {"qkv_bias": True},
    "lille-130m": {"block_size": 4096, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 4},
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 1, 0]},
    "mimo": {"num_nextn_predict_layers": 0},
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 4.0},
    "minimax": {"rotary_dim": 4},
    "mistral3": {"model_type": "mistral"},
    "mixtral": {},
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
        ],
        "num_hidden_layers": 5,
    },
    "olmo2": {},
    "olmoe": {},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phi3small": {
        "vocab_size": 100352,  # it writes to the scores of ids up to this one
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
        "dense_attention_every_n_layers": 2,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "rope_scaling": {"long_factor": [1.5, 2.0, 2.5, 3.0], "short_factor": [1.0] * 4, "long_mscale": 1.2, "short_mscale": 1.1},
        "original_max_position_embeddings": 2048,
    },
    "phixtral": {"num_vocab": 96, "model_dim": 32, "num_heads": 4, "num_layers": 4, "rotary_dim": 4},
    "pixtral": {},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 8, "num_key_value_heads": 4, "intermediate_size": 96},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen2_vl": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "seed_oss": {"attention_out_bias": True},
    "smollm3": {},
    "solar_open": {"partial_rotary_factor": 0.5, **_GROUPED},
    "stablelm": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "starcoder2": {},
    "talkie": {"num_key_value_heads": 4},
    "telechat3": {},
}
"""Plain attention over all tokens."""

LATENT: dict[str, Config] = {
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "group_limited_greedy", **_GROUPED},
    "deepseek_v3": _GROUPED,
    "deepseek_v32": {**_GROUPED, **_DSA},
    "glm4_moe_lite": {**_GROUPED, "num_nextn_predict_layers": 0},
    "glm_moe_dsa": {**_GROUPED, **_DSA, "rope_parameters": _ROPE, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "kimi_k25": _GROUPED,
    "kimi_vl": _GROUPED,
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "minicpm3": {
        "dim_model_base": 16,
        "scale_depth": 1.4,
        "scale_emb": 4.0,
        "num_key_value_heads": 4,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.5, 2.0],
            "short_factor": [1.0, 1.0],
            "original_max_position_embeddings": 2048,
        },
    },
    "mistral4": {**_GROUPED, "rope_parameters": {**_YARN, **_QUERY_SCALE}, "head_dim": 12},
    "youtu_llm": {},
}
"""Attention over a compressed latent, in some with a sparse index."""

SLIDING: dict[str, Config] = {
    "afmoe": {"layer_types": SFSF, "num_dense_layers": 1},
    "cohere2": {"layer_norm_bias": True, "sliding_window_pattern": 2},
    "deepseek_v41": {
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": [0, 2, 2, 2],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 4,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 6,
        "rms_norm_eps": 1e-6,
    },
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": _ROPE},
    "exaone_moe": {"layer_types": SFSF, "is_moe_layer": [False, True, True, True], **_GROUPED},
    "gemma3": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8.0},
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8.0},
    "gemma3n": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 96,
        "rope_local_base_freq": 1000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 4,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 4,
    },
    "gemma4": {
        "num_hidden_layers": 6,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "gpt_oss": {"layer_types": SFSF},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "laguna": {
        "layer_types": SFSF,
        "num_attention_heads_per_layer": [4, 8, 4, 8],
        "qkv_bias": True,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "partial_rotary_factor": 0.5}},
    },
    "llama": {"layer_types": SFSF},
    "llama4": {
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "rope_scaling": None,
        "floor_scale": 16,
        "num_experts_per_tok": 1,
    },
    "mellum": {"layer_types": SFSF, "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "head_dim": 12,
        "swa_head_dim": 12,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.34,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        **_GROUPED,
    },
    "minimax_m3_vl": {
        "dense_intermediate_size": 48,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 8,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 3,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 0, 1],
        },
    },
    "ministral3": {"layer_types": SFSF, "rope_parameters": {**_ROPE, **_QUERY_SCALE}},
    "muse_glimmer": {"layer_types": SFSF},
    "olmo3": {"layer_types": SFSF},
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "spark2_5": {
        "layer_types": SFSF,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "partial_rotary_factor": 0.5}},
    },
    "step3p5": {
        "layer_types": SFSF,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
        "partial_rotary_factors": [1.0, 0.5, 1.0, 0.5],
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 16,
        "swiglu_limits": [0, 0, 7.0, 7.0],
    },
}
"""Layers with a window or another limit on what they see, beside full ones."""

RECURRENT: dict[str, Config] = {
    "baichuan_m1": {
        "sliding_window_layers": [1, 3],
        "conv_window": 2,
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 4,
    },
    "bailing_hybrid": {**_GROUPED, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_linear": {**_GROUPED, "layer_group_size": 2, "group_norm_size": 2, "partial_rotary_factor": 0.5},
    "bailing_moe_v3": {**_GROUPED, "layer_group_size": 2},
    "falcon_h1": {
        **_MAMBA2,
        "mamba_d_ssm": 32,
        "mamba_chunk_size": 16,
        "mamba_rms_norm": True,
    },
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "granitemoehybrid": {**_GRANITE, **_MAMBA2, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "num_experts": 8,
        "num_expert_group": 4,
        "topk_group": 2,
        "linear_attn_config": {**_KDA, "gate_lower_bound": -5.0},
        "hidden_act": "situ",
        "activation_situ_beta": 2.0,
        "attn_res_block_size": 2,
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": 16,
        "latent_moe_use_norm": True,
    },
    "kimi_linear": {"num_experts": 8, "num_expert_group": 4, "topk_group": 2, "linear_attn_config": _KDA, "model_max_length": 4096},
    "lfm2": _LFM,
    "lfm2-vl": _LFM,
    "lfm2_moe": {**_LFM, "use_expert_bias": True, "num_dense_layers": 1},
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4},
    "mamba2": {
        "num_heads": 8,
        "intermediate_size": 64,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "M", "E", "*"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 16,
        **_GROUPED,
    },
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2},
    "plamo2": {"hidden_size_per_head": 8, "mamba_num_heads": 4, "mamba_d_state": 8, "mamba_step": 2},
    "qwen3_5": {"num_experts": 0, "full_attention_interval": 2, "head_dim": 16},
    "qwen3_5_moe": {"full_attention_interval": 2, "head_dim": 16},
    "qwen3_next": {"full_attention_interval": 2, "head_dim": 16, "partial_rotary_factor": 0.25},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 4, "v_low_rank_dim": 4, "gate_low_rank_dim": 4, "decay_low_rank_dim": 4},
}
"""Layers with a state of fixed size: state-space, gated delta, linear attention, short convolutions; most beside attention."""

TABLE: dict[str, Config] = {**FULL_ATTENTION, **LATENT, **SLIDING, **RECURRENT}

NESTED = frozenset(
    "gemma3 gemma3n gemma4 kimi_k25 kimi_k3 kimi_vl lfm2-vl llama4 minimax_m3_vl mistral3 pixtral qwen2_vl qwen3_5 qwen3_5_moe "
    "qwen3_vl qwen3_vl_moe".split()
)
"""Modules whose text model is described by `text_config`."""


def modules() -> list[str]:
    """Every module of `mlx_lm.models` that defines or re-exports a `Model`, by reading its source: importing some ends the process."""
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    return sorted(m.name for m in pkgutil.iter_modules([str(root)]) if _defines_model(root / f"{m.name}.py"))


def _defines_model(path: Path) -> bool:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            return True
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == "Model" for alias in node.names):
            return True
    return False


def names() -> list[str]:
    """The modules that have a tiny model here."""
    return sorted(TABLE)


def config(name: str, **overrides: Any) -> Config:
    """config.json of the tiny model of a module; `overrides` go to its text model."""
    text = copy.deepcopy({**BASE, "model_type": name, "torch_dtype": "float32", **TABLE[name], **overrides})
    if name not in NESTED:
        return text
    return {"model_type": name, "torch_dtype": "float32", "vocab_size": text["vocab_size"], "text_config": text}


def build(name: str, seed: int = 0, **overrides: Any) -> tuple[nn.Module, Config]:
    """The evaluated float32 model of a module, and its config."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    # Its own copy: some modules write into the nested dictionaries they are given.
    model = module.Model(module.ModelArgs.from_dict(config(name, **overrides)))
    model.update(tree_unflatten([(path, _weight(seed, path, array)) for path, array in tree_flatten(model.parameters())]))
    model.eval()
    # All of the module, not its parameters: rope tables hang off it too and would stay bound to this thread.
    mx.eval(model)
    return model, config(name, **overrides)


def _weight(seed: int, path: str, array: mx.array) -> mx.array:
    """Random values for one parameter, of the size that keeps activations near 1."""
    shape = tuple(array.shape)
    if array.ndim == 0:
        # afm7 rounds K and V to multiples of its scale: at 1.0, its start value, little of them would be left.
        mean = 0.03 if "quant" in path else array.item()
        scale = 0.1 * abs(mean)
    elif array.ndim == 1:
        mean, scale = (1.0, 0.2) if "norm" in path and path.endswith("weight") else (0.0, 0.3)
        if path.endswith(("correction_bias", "expert_bias", "router_bias")):
            scale = 0.1  # more would choose the same experts for every token
    elif "embed" in path or "wte" in path:
        mean, scale = 0.0, 0.5
    else:
        fan_in = shape[-1] if shape[-1] > 1 else shape[-2]
        mean, scale = 0.0, 1.6 / fan_in**0.5
    return mx.array(np.asarray(mean + noise(seed, path, shape, scale), dtype=np.float32))


def sliding() -> list[str]:
    """Modules some of whose layers keep a ring in mlx-lm, as their tables here say."""
    return sorted(name for name in TABLE if name in SLIDING or name in ("gear", "baichuan_m1", "recurrent_gemma"))


def flat_caches(model: nn.Module) -> list[Any]:
    """mlx-lm's caches with every ring replaced by a buffer of all tokens.

    Windows are then masks alone. This is the oracle for sliding layers: a ring's keys lie in an order that depends on how its tokens
    came, which moves the last bits of the scores.
    """

    def flat(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(flat(child) for child in cache.caches))
        return KVCache() if isinstance(cache, RotatingKVCache) else cache

    return [flat(cache) for cache in make_prompt_cache(model)]
