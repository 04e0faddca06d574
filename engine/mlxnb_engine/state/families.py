"""What is known of each mlx-lm model module: how its rows may share a step, and which modules are refused with a reason.

The table is what `tests/test_zoo.py` proves on tiny models of every module; `docs/models.md` shows it. A module that is not listed
runs alone until it has passed the parity check at bind (`qualify.shares_batch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ModelError

StepMode = Literal["ragged", "prefill alone", "lone"]
"""ragged: windows of any widths share a step. prefill alone: a prompt is read by itself, rows decode together (modules that ignore
padding, or whose one-token step takes another arithmetic than a wider one). lone: one row per forward."""


@dataclass(frozen=True, slots=True)
class Family:
    """How rows of one module share a step.

    split: attention goes through the dispatch of `attention.py` and needs nothing else of the mask, so rows of different capacity
        classes may share a step; else all rows live in one class. `ModelGraph` tries it on each model.
    padded: a window may be wider than a row's own tokens. False for modules that ignore lengths.
    wide_masks: masks need an axis for grouped heads where there are more heads than K/V heads (gemma2).
    fixed_chunks: where a prompt is cut into chunks changes bits, so cuts follow from the position alone.
    windows: a window of several tokens has the bits of single steps on an invariant backend, so rows may verify and append.
    note: one line for `docs/models.md` and the status.
    """

    mode: StepMode = "ragged"
    split: bool = True
    padded: bool = True
    wide_masks: bool = False
    fixed_chunks: bool = False
    windows: bool = True
    note: str = ""


_PLAIN = Family()
_WHOLE = Family(split=False, note="attention bypasses the dispatch: all rows in one capacity class")
_LATENT = Family(
    "prefill alone", split=False, windows=False, note="latent attention takes another arithmetic for one token than for several"
)
_EQUAL = Family(
    "prefill alone", padded=False, windows=False, note="ignores padding: prompts are read alone; exact on the reference BLAS only"
)
_SSD = Family("prefill alone", fixed_chunks=True, windows=False, note="where a prompt is cut changes bits: cuts follow from the position")
UNKNOWN = Family("lone", windows=False, note="not in the table: alone until it passes the parity check")

FAMILIES: dict[str, Family] = {}


def _list(family: Family, names: str) -> None:
    FAMILIES.update(dict.fromkeys(names.split(), family))


_list(
    _PLAIN,
    "Klear apertus bailing_moe cohere dbrx deepseek deepseek_v2 dots1 ernie4_5 ernie4_5_moe exaone gemma glm glm4 glm4_moe gpt2 gpt_neox "
    "gptj granite granitemoe helium hunyuan hunyuan_v1_dense internlm2 internlm3 lille-130m llama llama4_text mimo minicpm minicpm3 "
    "minimax mistral3 mixtral nanbeige nanochat nemotron nemotron-nas olmo2 olmoe openelm phi3 phimoe pixtral qwen qwen2 qwen2_moe "
    "qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open starcoder2 telechat3 youtu_llm",
)
_list(
    _PLAIN,  # sliding layers
    "afmoe cohere2 exaone4 exaone_moe gemma3 gemma3_text gemma3n iquestloopcoder laguna mellum ministral3 muse_glimmer olmo3 plamo3 "
    "spark2_5 step3p5",
)
_list(_PLAIN, "qwen3_next qwen3_5 qwen3_5_moe lfm2 lfm2-vl lfm2_moe gear")  # recurrent layers
_list(_WHOLE, "phi phixtral plamo stablelm talkie gemma4 gemma4_text gpt_oss mimo_v2_flash")
_list(_SSD, "falcon_h1 granitemoehybrid mamba2 nemotron_h")
_list(replace(_SSD, split=False), "plamo2")
_list(replace(_WHOLE, wide_masks=True), "gemma2")
_list(
    _LATENT,
    "deepseek_v3 kimi_k25 kimi_vl glm4_moe_lite mistral4 longcat_flash kimi_linear kimi_k3 bailing_moe_v3 deepseek_v32 glm_moe_dsa",
)
_list(_EQUAL, "jamba mamba rwkv7 olmo_hybrid baichuan_m1 bailing_moe_linear")
_list(replace(_EQUAL, split=False, fixed_chunks=True), "bailing_hybrid")
for _names, _why in {
    "afm7 minimax_m3_vl": "takes positions from the length of its buffer",
    "gpt_bigcode llama4": "takes one position for all rows",
    "recurrent_gemma": "treats a row without state apart from a row of zeros",
    "longcat_flash_ngram": "keeps a state that grows with the first tokens",
}.items():
    _list(Family("lone", windows=False, note=_why), _names)

REFUSED: dict[str, str] = {
    "phi3small": "mlx-lm adds its boolean mask to the scores, so that it is not causal",
    "deepseek_v41": "its layers keep a cache of their own kind (unknown_state_signature)",
}
"""Modules that mlx-lm itself gets wrong, or whose state has no place here."""

UNTRIED: dict[str, str] = {
    "bitnet": "its linear layers run on Metal only",
    "muse_spark": "its attention runs on Metal only",
    "olmo": "it needs the package ai2-olmo",
    "prism_hadamard_qwen35": "it needs weights and a manifest of its own",
}
"""Modules without a tiny model in the tests: alone until they pass the parity check."""

KNOWN_CACHES = frozenset({"KVCache", "RotatingKVCache", "ArraysCache", "CacheList"})
LONE_CACHES = KNOWN_CACHES | {"ConcatenateKVCache", "ChunkedKVCache"}


def admit(module: str, cache_kinds: Sequence[str], config: Mapping[str, Any]) -> Family:
    """The family of this module. Raises ModelError, before any work, for one that is refused.

    cache_kinds: class names of the objects of `make_prompt_cache(model)`, those inside a CacheList included.
    """
    if module in REFUSED:
        raise ModelError(f"Models of family {module!r} are refused: {REFUSED[module]}.", "Use a checkpoint of another family.")
    family = FAMILIES.get(module, UNKNOWN)
    strange = sorted(set(cache_kinds) - (LONE_CACHES if family.mode == "lone" else KNOWN_CACHES))
    if strange:
        raise ModelError(
            f"This {module} model keeps state of a kind that is not supported ({', '.join(strange)}; unknown_state_signature).",
            "Use a checkpoint of another family.",
        )
    if _dynamic_rope(config) and module not in _STATIC_NTK:
        return Family("lone", windows=False, note="dynamic NTK RoPE depends on the length of the row: alone")
    return family


_STATIC_NTK = frozenset({"hunyuan", "hunyuan_v1_dense"})
"""Their "dynamic" scaling by alpha does not look at the length."""


def _dynamic_rope(config: Mapping[str, Any]) -> bool:
    scaling = config.get("rope_scaling") or {}
    return isinstance(scaling, Mapping) and (scaling.get("type") or scaling.get("rope_type")) == "dynamic"
