"""Generated tiny models: seeded random weights in a real Hugging Face folder or a real GGUF file. Needs no MLX.

Every tensor depends only on (seed, its name, its shape), so a folder and a GGUF file of one family and seed hold the same model.
No weight is zero: an unused tensor or a skipped layer changes the logits.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3")
VOCAB = 320
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS, IM_START, IM_END = 317, 318, 319
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "the capital of france is paris and the answer to the question is that there are four of them. user system assistant you are a "
    "helpful friend. one two three, name the colours of the rainbow in order: red orange yellow green blue. What is it? The sea is "
    "wide and the night is still; when the wind comes in, we all listen to the other side of the water."
)
Tensors = dict[str, np.ndarray]


# -- tokenizer -----------------------------------------------------------------------------------------------------


def byte_alphabet() -> dict[int, str]:
    """byte -> printable character, as byte-level BPE vocabularies write bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    for extra, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + extra)
    return table


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """(320 tokens in id order, their merges): 256 bytes, 61 merges learnt from a fixed sentence, 3 special tokens."""
    table = byte_alphabet()
    words = [[table[b] for b in word.encode()] for word in re.findall(r" ?[A-Za-z]+|[^A-Za-z ]", _CORPUS)]
    tokens = [table[b] for b in range(256)]
    merges: list[tuple[str, str]] = []
    while len(tokens) < VOCAB - len(SPECIALS):
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append((left, right))
        tokens.append(left + right)
        words = [_merge(word, left, right) for word in words]
    return [*tokens, *SPECIALS], merges


def _merge(word: list[str], left: str, right: str) -> list[str]:
    out: list[str] = []
    for piece in word:
        if out and out[-1] == left and piece == right:
            out[-1] = left + right
        else:
            out.append(piece)
    return out


def _tokenizer_json() -> dict[str, Any]:
    tokens, merges = vocabulary()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": EOS + i, "content": text, **flags} for i, text in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens) if i < EOS},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


# -- weights -------------------------------------------------------------------------------------------------------


def config_of(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model: 2 layers, hidden 64, 4 heads of 16 with 2 K/V heads, context 4096."""
    assert family in FAMILIES, family
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [{"phi3": "Phi3ForCausalLM"}.get(family, f"{family.capitalize()}ForCausalLM")],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "bos_token_id": EOS,
        "eos_token_id": IM_END,
        "pad_token_id": EOS,
        "torch_dtype": "float32",
    }
    return {**config, **overrides}


def weights_of(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Hugging Face names to float32 tensors."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    family, out = config["model_type"], {}

    def linear(name: str, rows: int, cols: int, bias: bool = False) -> None:
        out[f"{name}.weight"] = noise(seed, f"{name}.weight", (rows, cols), 1.6 / cols**0.5)
        if bias:
            out[f"{name}.bias"] = noise(seed, f"{name}.bias", (rows,), 0.3)

    def norm(name: str, size: int) -> None:
        out[f"{name}.weight"] = 1 + noise(seed, f"{name}.weight", (size,), 0.2)

    out["model.embed_tokens.weight"] = noise(seed, "model.embed_tokens.weight", (config["vocab_size"], hidden), 0.5)
    for i in range(layers):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        if family == "phi3":
            linear(f"{at}.qkv_proj", q + 2 * kv, hidden)
            linear(f"{mlp}.gate_up_proj", 2 * inner, hidden)
        else:
            for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                linear(f"{at}.{name}", rows, hidden, bias=family == "qwen2")
            linear(f"{mlp}.gate_proj", inner, hidden)
            linear(f"{mlp}.up_proj", inner, hidden)
        if family == "qwen3":
            norm(f"{at}.q_norm", config["head_dim"])
            norm(f"{at}.k_norm", config["head_dim"])
        linear(f"{at}.o_proj", hidden, q)
        linear(f"{mlp}.down_proj", hidden, inner)
        norm(f"model.layers.{i}.input_layernorm", hidden)
        norm(f"model.layers.{i}.post_attention_layernorm", hidden)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden)
    return out


def noise(seed: int, name: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Normal float32 values without a zero, that depend on seed, name and shape alone."""
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).normal(0.0, scale, shape).astype(np.float32)
    return np.where(values == 0, np.float32(scale), values)


# -- Hugging Face folder -------------------------------------------------------------------------------------------


def write_model(path: Path, family: str = "llama", *, seed: int = 0, dtype: str = "F32", shards: int = 1, **config_overrides: Any) -> Path:
    """Write config, weights, tokenizer, template and generation config into `path`; returns it.

    dtype: F32, F16 or BF16. shards: number of weight files; above 1 an index is written too.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = config_of(family, **config_overrides)
    tensors = weights_of(config, seed)
    if shards == 1:
        (path / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
    else:
        names, index = list(tensors), {}
        for i in range(shards):
            part, file = names[i::shards], f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            (path / file).write_bytes(safetensors_bytes({name: tensors[name] for name in part}, dtype))
            index.update(dict.fromkeys(part, file))
        write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    write_json(path / "config.json", config)
    write_json(path / "tokenizer.json", _tokenizer_json())
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "bos_token": SPECIALS[0],
            "eos_token": SPECIALS[2],
            "pad_token": SPECIALS[0],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHATML,
        },
    )
    write_json(path / "generation_config.json", {"bos_token_id": EOS, "eos_token_id": [IM_END, EOS]})
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def safetensors_bytes(tensors: Mapping[str, np.ndarray], dtype: str = "F32", metadata: Mapping[str, str] | None = None) -> bytes:
    """One safetensors file. A uint32 tensor keeps its type, every other becomes `dtype`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "mlx"})}
    blobs, at = [], 0
    for name, array in tensors.items():
        kind = "U32" if array.dtype == np.uint32 else dtype
        blob = array.tobytes() if kind == "U32" else _cast(array, kind)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def _cast(array: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    return array.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


# -- GGUF ----------------------------------------------------------------------------------------------------------

_GGML_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    kind: str = "F32",
    embedding_kind: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write one GGUF file: llama, qwen2 or qwen3. `kind`: type of the matrices (F32, F16, Q4_0, Q4_1, Q8_0); vectors are F32.

    metadata: keys to add or replace; a value of None drops the key. extra: further float32 tensors by their GGUF names.
    """
    config = config_of(family, **config_overrides)
    tensors = {}
    for name, array in weights_of(config, seed).items():
        stem, _, leaf = name.rpartition(".")
        if family == "llama" and (heads := {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(stem.split(".")[-1])):
            array = interleave_rope(array, config[heads])
        of = "F32" if array.ndim == 1 else (embedding_kind or kind) if "embed" in stem else kind
        tensors[f"{gguf_name(stem)}.{leaf}"] = (array, of)
    tensors |= {name: (array, "F32") for name, array in (extra or {}).items()}
    fields = {**_gguf_metadata(config), **(metadata or {})}
    Path(path).write_bytes(gguf_bytes({k: v for k, v in fields.items() if v is not None}, tensors))
    return Path(path)


def gguf_name(stem: str) -> str:
    """GGUF name of a Hugging Face module path."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{_GGUF_NAMES[match[2]]}"
    return _GGUF_TOP[stem]


def interleave_rope(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as GGUF's llama architecture stores them: the two halves of each head interleaved."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    tokens, merges = vocabulary()
    arch = config["model_type"]
    return {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        "general.alignment": 32,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * EOS + [3] * len(SPECIALS),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": EOS,
        "tokenizer.ggml.eos_token_id": IM_END,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]) -> bytes:
    """One GGUF version 3 file. Metadata: str, bool, int (uint32), float (float32) and lists of str or int (int32)."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [_string(key), _value(value)]
    blobs, at = [], 0
    for name, (array, kind) in tensors.items():
        blob = _blocks(array, kind)
        head += [_string(name), struct.pack("<I", array.ndim), struct.pack(f"<{array.ndim}Q", *reversed(array.shape))]
        head.append(struct.pack("<IQ", _GGML_TYPES[kind], at))
        blobs.append(blob + b"\0" * (-len(blob) % 32))
        at += len(blobs[-1])
    start = b"".join(head)
    return start + b"\0" * (-len(start) % 32) + b"".join(blobs)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(item) for item in value)
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def _blocks(array: np.ndarray, kind: str) -> bytes:
    """Encode the last axis in blocks of 32: Q4_0 (scale; 4 bits - 8), Q4_1 (scale, minimum; 4 bits), Q8_0 (scale; 8 bits)."""
    if kind in ("F32", "F16"):
        return _cast(array, kind)
    x = array.reshape(-1, 32).astype(np.float32)
    if kind == "Q8_0":
        d = (np.abs(x).max(axis=1, keepdims=True) / 127).astype(np.float16)
        q = np.clip(np.round(x / d.astype(np.float32)), -127, 127).astype(np.int8)
        return np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=1).tobytes()
    if kind == "Q4_0":
        peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
        parts = [(peak / -8).astype(np.float16)]
        q = np.clip(np.round(x / parts[0].astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    else:
        low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
        parts = [((high - low) / 15).astype(np.float16), low.astype(np.float16)]
        q = np.clip(np.round((x - parts[1].astype(np.float32)) / parts[0].astype(np.float32)), 0, 15).astype(np.uint8)
    nibbles = q[:, :16] | (q[:, 16:] << 4)
    return np.concatenate([*(part.view(np.uint8) for part in parts), nibbles], axis=1).tobytes()
