"""Checked files to a model in memory: the only caller of `mx.load`. Engine thread only.

`locate` finds and checks the files without MLX; importing this module imports MLX, so choose the BLAS before.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import ggml, gguf
from .config import DTYPES, RuntimeConfig
from .errors import MlxnbError, ModelError, RequestError
from .fingerprint import content_fingerprint
from .headers import TensorSpan
from .locate import LocalModel, Located, list_local_models, locate, read_json
from .template import ChatTemplate
from .tokenizer import Tokenizer
from .types import ModelInfo

try:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
except ImportError as error:
    raise ModelError(
        f"No MLX backend is installed ({error}).", "Install one: pip install 'mlxnb[cpu]', or 'mlxnb[cuda13]' for an NVIDIA GPU."
    ) from error

__all__ = ["Loaded", "LocalModel", "Located", "import_mlx_lm", "list_local_models", "load", "locate", "memory_bytes"]

FLOAT32_SHARE = 0.6
"""On CPU the weights become float32 if that takes at most this share of memory: 16-bit products there are far slower."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model")
_FLOATS = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_STORED_AS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_UNKNOWN_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Loaded:
    """One model in memory. Belongs to the engine thread; tokenizer and template may be used by any."""

    model: Any
    model_config: dict[str, Any]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    info: ModelInfo


def load(located: Located, config: RuntimeConfig, dtype: str | None = None) -> Loaded:
    """Build the model of checked files and evaluate every array of it.

    dtype: float32, bfloat16, float16, "file" (as stored), or None for `config.dtype` and else the policy: as stored on a GPU; on CPU
    float32 if that fits, else as stored. Raises RequestError for another dtype, ModelError if the files do not make a model.
    """
    dtype = dtype or config.dtype
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype={dtype!r} is not a choice.", f"Choose one of: {', '.join(DTYPES)}.")
    import_mlx_lm()
    located.recheck()
    try:
        model, settings, weights = _from_gguf(located, dtype) if located.is_gguf else _from_folder(located, dtype)
        # Not `model.parameters()`: that leaves out arrays such as RoPE frequencies, which then belong to this thread's stream.
        mx.eval(model)
    except MlxnbError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise ModelError(f"{located.name} could not be loaded: {reason}.", "Its files do not fit a model that mlx-lm knows.") from error
    located.recheck()
    tokenizer = _tokenizer(located)
    source = tokenizer.chat_template
    template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token) if source else None
    return Loaded(model, settings, tokenizer, template, _describe(located, model, settings, tokenizer, weights))


# -- GGUF ----------------------------------------------------------------------------------------------------------


def _from_gguf(located: Located, dtype: str | None) -> tuple[nn.Module, dict[str, Any], str]:
    header = located.headers[located.path]
    described = gguf.describe(header)
    target = _target(dtype, header.parameters)
    settings = dict(described.config)
    if (factors := header.tensors.get(gguf.ROPE_FACTORS)) is not None:
        values = _unpack(_mapped(located.path), factors).tolist()
        settings["rope_scaling"] = gguf.llama3_scaling(values, settings["rope_theta"], settings["head_dim"])
    keep = target is None and described.native
    packed = {name: gguf.PACKED_BITS[kind] for name, kind in described.kinds.items() if keep and kind in gguf.PACKED_BITS}
    module = importlib.import_module(f"mlx_lm.models.{settings['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(settings))
    if packed:
        bits = {described.modules[name][0]: count for name, count in packed.items()}

        def choose(path: str, module: nn.Module) -> bool | dict[str, int]:
            return {"group_size": gguf.GROUP_SIZE, "bits": bits[path]} if path in bits else False

        nn.quantize(model, class_predicate=choose)
    plain = target or _stored_dtype(set(described.kinds.values()), packed=bool(packed))
    weights = _native_weights(located.path, described, plain, packed) if described.native else _other_weights(located, described, plain)
    model.eval()
    model.load_weights(weights, strict=True)
    stored = _STORED_AS.get(described.label, described.label)
    return model, settings, _label(stored, None if packed else _dtype_name(plain))


def _native_weights(path: Path, described: gguf.GgufModel, dtype: mx.Dtype, packed: Mapping[str, int]) -> list[tuple[str, mx.array]]:
    """What MLX reads itself, under mlx-lm's names; `packed` tensors stay so, the rest becomes dense in `dtype`."""
    arrays: dict[str, mx.array] = mx.load(str(path), format="gguf")
    weights: list[tuple[str, mx.array]] = []
    for name, (module, leaf) in described.modules.items():
        weights += _native(arrays, name, f"{module}.{leaf}", described.kinds[name], dtype, keep=name in packed)
    return weights


def _other_weights(located: Located, described: gguf.GgufModel, dtype: mx.Dtype) -> list[tuple[str, mx.array]]:
    """All tensors of a file that MLX does not read rightly, dense. One at a time, so that only one is in float32 too many."""
    raw = _mapped(located.path)
    weights: list[tuple[str, mx.array]] = []
    for name, (module, leaf) in described.modules.items():
        array = mx.array(_unpack(raw, located.headers[located.path].tensors[name])).astype(dtype)
        mx.eval(array)
        weights.append((f"{module}.{leaf}", array))
    return weights


def _mapped(path: Path) -> ggml.Bytes:
    return np.memmap(path, np.uint8, mode="r")


def _unpack(raw: ggml.Bytes, span: TensorSpan) -> ggml.Floats:
    return ggml.unpack(span.dtype, raw[span.start : span.stop], span.shape)


def _stored_dtype(kinds: set[str], *, packed: bool) -> mx.Dtype:
    """What the unpacked arrays of a file that is loaded as stored become: one dtype, so that no step converts weights.

    Beside packed matrices on CPU that is float32, because 16-bit products of packed matrices are unusable there.
    """
    if (packed and _on_cpu()) or kinds == {"F32"}:
        return mx.float32
    return mx.bfloat16 if kinds <= {"F32", "BF16"} else mx.float16


def _native(arrays: Mapping[str, mx.array], name: str, path: str, kind: str, dtype: mx.Dtype, *, keep: bool) -> list[tuple[str, mx.array]]:
    """One tensor under its mlx-lm name. keep: stay packed, with scales in the activations' dtype; else a dense array."""
    if kind not in gguf.PACKED_BITS:
        return [(path, arrays[name].astype(dtype))]
    stem, module = name.removesuffix(".weight"), path.removesuffix(".weight")
    scales, biases = (arrays[f"{stem}.{part}"] for part in ("scales", "biases"))
    if keep:
        return [(path, arrays[name]), (f"{module}.scales", scales.astype(dtype)), (f"{module}.biases", biases.astype(dtype))]
    # In float32 the unpacking is exact; in the stored float16 it would round.
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return [(path, mx.dequantize(arrays[name], scales, biases, gguf.GROUP_SIZE, gguf.PACKED_BITS[kind]).astype(dtype))]


# -- Hugging Face folders ------------------------------------------------------------------------------------------


def _from_folder(located: Located, dtype: str | None) -> tuple[nn.Module, dict[str, Any], str]:
    from mlx_lm.utils import dequantize_model, load_model

    model, settings = load_model(located.path, lazy=True, strict=True)
    stored, bits = _stored(model)
    target = _target(dtype, _dense_parameters(model))
    if target is None:
        if bits and _on_cpu():
            model.set_dtype(mx.float32)  # scales and norms; packed words are whole numbers and stay
        return model, settings, stored
    if bits:
        model.set_dtype(mx.float32)
        model = dequantize_model(model)
    model.set_dtype(target)
    return model, settings, _label(stored, _dtype_name(target))


def _stored(model: nn.Module) -> tuple[str, int | None]:
    """("4-bit" or the dtype of most elements, bits of the packed layers or None)."""
    bits = [module.bits for _, module in model.named_modules() if hasattr(module, "bits")]
    if bits:
        common = max(set(bits), key=bits.count)
        return f"{common}-bit", common
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        sizes[_dtype_name(array.dtype)] = sizes.get(_dtype_name(array.dtype), 0) + array.size
    return max(sizes, key=lambda name: sizes[name]), None


# -- what both share -----------------------------------------------------------------------------------------------


def _target(dtype: str | None, parameters: int) -> mx.Dtype | None:
    """The dense dtype to load into, None for "as stored"."""
    if dtype is not None:
        return _FLOATS.get(dtype)
    return mx.float32 if _on_cpu() and 4 * parameters <= FLOAT32_SHARE * memory_bytes() else None


def _on_cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]


def _label(stored: str, target: str | None) -> str:
    """What `status` says: "float32 (from Q4_1)", or just the format if nothing was converted."""
    return stored if target is None or target == stored else f"{target} (from {stored})"


def _dense_parameters(model: nn.Module) -> int:
    """Weights as the model means them: a packed layer counts what it unpacks to, without scales."""
    total = 0
    for _, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, mx.array) and not name.startswith("_") and name not in ("scales", "biases"):
                packed = name == "weight" and hasattr(module, "bits")
                total += value.size * 32 // module.bits if packed else value.size
    return total


def memory_bytes() -> int:
    """Memory this process may use: of the machine, or of its control group on Linux if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):
            continue  # no such file, or "max"
    return total


def _tokenizer(located: Located) -> Tokenizer:
    if located.is_gguf:
        return Tokenizer.from_gguf(located.headers[located.path].metadata)
    return Tokenizer.from_directory(located.path)


def _describe(located: Located, model: nn.Module, settings: Mapping[str, Any], tokenizer: Tokenizer, weights: str) -> ModelInfo:
    text = settings.get("text_config") if isinstance(settings.get("text_config"), dict) else {}
    merged: dict[str, Any] = {**(text or {}), **settings}
    parameters = tree_flatten(model.parameters())
    return ModelInfo(
        name=located.name,
        source=located.kind,
        path=str(located.path),
        family=str(settings["model_type"]),
        weights=weights,
        parameters=_dense_parameters(model),
        weight_bytes=sum(array.nbytes for _, array in parameters),
        layers=len(model.layers),
        vocab_size=int(merged.get("vocab_size", tokenizer.vocab_size)),
        context_length=_context(merged),
        fingerprint=_fingerprint(located, settings, tokenizer, weights),
        has_template=tokenizer.chat_template is not None,
        defaults=_defaults(located),
    )


def _context(settings: Mapping[str, Any]) -> int:
    for key in _CONTEXT_KEYS:
        value = settings.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return _UNKNOWN_CONTEXT


def _defaults(located: Located) -> dict[str, Any]:
    """generation_config.json as it is; the policy takes from it what it understands."""
    path = located.path / "generation_config.json"
    return {} if located.is_gguf or not path.is_file() else read_json(path, located.name)


def _fingerprint(located: Located, settings: Mapping[str, Any], tokenizer: Tokenizer, weights: str) -> str:
    files = {"identity": tokenizer.identity}
    if located.is_gguf:
        config = repr(sorted(settings.items())).encode()
    else:
        config = (located.path / "config.json").read_bytes()
        files |= {name: path.read_bytes() for name in _TOKENIZER_FILES if (path := located.path / name).is_file()}
    special = [f"{token}:{tokenizer.token_text(token)}" for token in sorted(tokenizer.special_ids)]
    # A name is no identity: of a single file only its contents count, of several their roles matter.
    shards = [type(s)("model", s.size, s.digest) for s in located.shards] if len(located.shards) == 1 else located.shards
    return content_fingerprint(config, shards, files, special, tokenizer.chat_template, weights)


def import_mlx_lm() -> None:
    """Import what loading needs of mlx-lm (`zoo` keeps it from lowering the limit of open files)."""
    importlib.import_module("mlxnb_engine.zoo")
