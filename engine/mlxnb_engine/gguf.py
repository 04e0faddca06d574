"""GGUF of llama-family models: metadata to an mlx-lm configuration, tensor names to mlx-lm's. No MLX, no arrays.

Covered: llama, qwen2, qwen3 with full attention and dense feed-forward, and the tensor types of `ggml.UNPACKERS`. A file of
NATIVE types can stay packed; every other is unpacked. Anything else is a ModelError that names it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import ModelError
from .ggml import UNPACKERS
from .headers import Header, TensorSpan

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PACKED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
GROUP_SIZE = 32
"""Elements that share a scale in every type of PACKED_BITS."""
NATIVE = frozenset({"F32", "F16", *PACKED_BITS})
"""Types that `mx.load` reads rightly; why not the others is told in `ggml.py`."""
ROPE_FACTORS = "rope_freqs.weight"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """How one checked GGUF file becomes an mlx-lm model.

    config: for mlx_lm.models.<model_type>.ModelArgs. modules: GGUF tensor name -> (module path, "weight" or "bias").
    kinds: GGUF tensor name -> ggml type name. label: the type most bytes are stored in, e.g. "Q4_1".
    """

    config: dict[str, Any]
    modules: Mapping[str, tuple[str, str]]
    kinds: Mapping[str, str]
    label: str

    @property
    def native(self) -> bool:
        """True if `mx.load` may read the file."""
        return NATIVE.issuperset(self.kinds.values())


def describe(header: Header) -> GgufModel:
    """Configuration and names of a checked header. Raises ModelError naming the architecture, key or tensor at fault."""
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        _unsupported(f"This GGUF file has the architecture {arch!r}", f"Supported are {', '.join(ARCHITECTURES)}.")
    for span in header.tensors.values():
        if span.dtype not in UNPACKERS:
            _unsupported(f"Tensor {span.name} has the type {span.dtype}", f"Choose a file of one of: {', '.join(UNPACKERS)}.")
    modules = {name: _module(name) for name in header.tensors if name != ROPE_FACTORS}
    config = _config(arch, header)
    _check_shapes(config, header.tensors)
    size = Counter[str]()
    for span in header.tensors.values():
        size[span.dtype] += span.stop - span.start
    return GgufModel(config, modules, {name: header.tensors[name].dtype for name in modules}, size.most_common(1)[0][0])


def _module(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    stem = None
    if match and match[1] is None:
        stem = _TOP.get(match[2])
    elif match and match[2] in _BLOCK:
        stem = f"model.layers.{int(match[1])}.{_BLOCK[match[2]]}"
    if match is None or stem is None:
        _unsupported(f"This GGUF file has the unexpected tensor {name!r}", "Its architecture is a variant that is not supported yet.")
    return stem, match[3]


def _config(arch: str, header: Header) -> dict[str, Any]:
    read = _Reader(arch, header.metadata)
    if read.whole("expert_count", 0, 0, 10**6):
        _unsupported("This GGUF file is a mixture of experts", "Use the model's Hugging Face folder instead.")
    heads = read.whole("attention.head_count", None, 1, 65_536)
    hidden = read.whole("embedding_length", None, 1, 2**24)
    head_dim = read.whole("attention.key_length", hidden // heads, 1, 65_536)
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.whole(key, head_dim, 1, 65_536) != head_dim:
            _unsupported(f"{arch}.{key} differs from the head size {head_dim}", "Use the model's Hugging Face folder instead.")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        _unsupported("This GGUF file has no token_embd.weight", "It is an adapter or a part of a model; choose the whole model.")
    config = {
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": read.whole("feed_forward_length", None, 1, 2**26),
        "num_hidden_layers": read.whole("block_count", None, 1, 100_000),
        "num_attention_heads": heads,
        "num_key_value_heads": read.whole("attention.head_count_kv", heads, 1, 65_536),
        "head_dim": head_dim,
        "max_position_embeddings": read.whole("context_length", None, 1, 2**31 - 1),
        "rms_norm_eps": read.real("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": read.real("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(read),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": embedding.shape[0],
    }
    if arch == "llama":
        # Its q and k rows are stored for interleaved rotation.
        config["rope_traditional"] = True
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    return config


def _rope_scaling(read: _Reader) -> dict[str, Any] | None:
    kind = read.metadata.get(f"{read.arch}.rope.scaling.type", "none")
    factor = read.real("rope.scaling.factor", 1.0)
    if kind == "none":
        linear = read.real("rope.scale_linear", 1.0)
        return None if linear == 1.0 else {"type": "linear", "factor": linear}
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if kind == "yarn":
        original = read.whole("rope.scaling.original_context_length", None, 1, 2**31 - 1)
        return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    _unsupported(f"This GGUF file has the position scaling {kind!r}", "Use the model's Hugging Face folder instead.")


def llama3_scaling(factors: Sequence[float], base: float, head_dim: int) -> dict[str, Any]:
    """The `rope_scaling` that makes these per-frequency divisors (tensor rope_freqs.weight). ModelError if none does.

    Converters store the divisors of Llama 3's rule instead of its settings; its low and high factors are 1 and 4 in every
    published model, and the original context is one of a few, so the rule is found by trying them.
    """
    factor = max(factors, default=1.0)
    for original in (8192, 4096, 2048, 16384, 32768):
        expected = []
        for i in range(head_dim // 2):
            wavelength = 2 * math.pi * base ** (2 * i / head_dim)
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            clipped = min(max(smooth, 0.0), 1.0)
            expected.append(1 / ((1 - clipped) / factor + clipped))
        if len(factors) == len(expected) and all(abs(a - b) <= 1e-3 * b for a, b in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    _unsupported("This GGUF file scales positions by a rule that is not known", "Use the model's Hugging Face folder instead.")


def _check_shapes(config: Mapping[str, Any], tensors: Mapping[str, TensorSpan]) -> None:
    """Metadata may not ask for more than the file holds: a model is only built for shapes that are really there."""
    blocks = {int(match[1]) for name in tensors if (match := _NAME.fullmatch(name)) and match[1] is not None}
    if blocks != set(range(config["num_hidden_layers"])):
        _unsupported(f"This GGUF file says {config['num_hidden_layers']} layers but has {len(blocks)}", "Fetch the whole file again.")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    expected = {"token_embd.weight": (config["vocab_size"], hidden), "output_norm.weight": (hidden,)}
    for i in blocks:
        for name, shape in (
            ("attn_q", (q, hidden)),
            ("attn_k", (kv, hidden)),
            ("attn_v", (kv, hidden)),
            ("attn_output", (hidden, q)),
            ("ffn_gate", (inner, hidden)),
            ("ffn_up", (inner, hidden)),
            ("ffn_down", (hidden, inner)),
        ):
            expected[f"blk.{i}.{name}.weight"] = shape
    for name, shape in expected.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            has = "is missing" if found is None else f"has the shape {found.shape}"
            _unsupported(f"Tensor {name} {has} where {shape} is needed", "The file is damaged or not of this architecture.")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed reads of `<arch>.<key>`: ModelError for a missing key without a default and for a wrong type or range."""

    arch: str
    metadata: Mapping[str, Any]

    def whole(self, key: str, default: int | None, low: int, high: int) -> int:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            _unsupported(
                f"{self.arch}.{key} is {_short(value)} in this GGUF file", "The file is damaged or of a variant not supported yet."
            )
        return value

    def real(self, key: str, default: float) -> float:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            _unsupported(
                f"{self.arch}.{key} is {_short(value)} in this GGUF file", "The file is damaged or of a variant not supported yet."
            )
        return float(value)


def _short(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]


def _unsupported(message: str, hint: str) -> NoReturn:
    raise ModelError(f"{message}.", hint)
