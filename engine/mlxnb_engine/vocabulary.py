"""Where a tokenizer comes from: the metadata of a GGUF file, or a Hugging Face folder. Both give a `Vocabulary`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ModelError

if TYPE_CHECKING:
    import tokenizers

# tokenizer.ggml.token_type, as the GGUF specification numbers it.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2")
_BPE_WITH_BOS = ("llama-bpe", "llama3", "llama-v3")

MAX_VOCABULARY = 2**22
MAX_GROWTH = 64.0
"""How many times longer a normalizer may make a text."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A backend tokenizer with the facts that it does not hold itself.

    eos_ids: every id that ends an answer. eos_id: the one that templates call `eos_token`.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    chat_template: str | None
    eos_id: int | None = None


def read_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Build the tokenizer of GGUF metadata given as Python values. Raises ModelError naming what is missing or unknown."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = [int(x) for x in metadata.get("tokenizer.ggml.token_type") or ()] or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"The GGUF file has {len(tokens)} tokens but {len(types)} token types.", "The file is damaged; fetch it again.")
    model = metadata.get("tokenizer.ggml.model")
    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    if model == "gpt2":
        backend = _byte_level(metadata, tokens, pre)
    elif model == "llama":
        backend = _sentencepiece(metadata, tokens, types)
    else:
        raise ModelError(f"The tokenizer model {model!r} of this GGUF file is not supported.", "Supported are 'gpt2' and 'llama'.")
    _add_special(backend, tokens, types)
    ids = {name: _id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(
        backend=backend,
        bos_id=ids["bos"],
        eos_ids=frozenset(x for name in ("eos", "eot", "eom") if (x := ids[name]) is not None),
        add_bos=ids["bos"] is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _BPE_WITH_BOS)),
        chat_template=template if isinstance(template, str) and template else None,
        eos_id=ids["eos"],
    )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if values is None or isinstance(values, str) or not len(values) or not all(isinstance(x, str) for x in values):
        raise ModelError(f"The GGUF file has no usable {key}.", "Convert the model again with its tokenizer.")
    return list(values)


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not 0 <= int(value) < count:
        raise ModelError(f"The {name} token id {int(value)} is outside the {count} tokens of the GGUF file.", "Fetch the file again.")
    return int(value)


def _ids_by_text(tokens: Sequence[str]) -> dict[str, int]:
    """First id of each text: a later duplicate can never be encoded, only decoded."""
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        ids.setdefault(token, i)
    return ids


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    import tokenizers as tk

    merges = [(left, right) for left, _, right in (x.partition(" ") for x in _strings(metadata, "tokenizer.ggml.merges"))]
    split = {
        "smollm": [tk.pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)],
        "gpt-2": [_bytes(use_regex=True)],
        "qwen2": [_split(_QWEN2), _bytes(use_regex=False)],
    } | {name: [_split(_LLAMA3), _bytes(use_regex=False)] for name in _BPE_WITH_BOS}
    if pre not in split:
        raise ModelError(f"The pre-tokenizer {pre!r} of this GGUF file is not supported.", f"Supported are {', '.join(PRE_TOKENIZERS)}.")
    try:
        backend = tk.Tokenizer(tk.models.BPE(vocab=_ids_by_text(tokens), merges=merges, ignore_merges=pre in _BPE_WITH_BOS))
    except Exception as error:
        raise ModelError(f"The merges of this GGUF file do not fit its tokens: {error}.", "The file is damaged; fetch it again.") from error
    backend.pre_tokenizer = tk.pre_tokenizers.Sequence(split[pre])
    backend.decoder = tk.decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = tk.normalizers.NFC()
    return backend


def _bytes(use_regex: bool) -> Any:
    import tokenizers as tk

    return tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> Any:
    import tokenizers as tk

    return tk.pre_tokenizers.Split(tk.Regex(pattern), behavior="isolated", invert=False)


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: of all neighbours whose join is an entry, the one with the highest score is joined first.

    Equal to merges ranked by the score of what they produce, each entry split in every way that leaves two entries.
    """
    import tokenizers as tk

    scores = [float(x) for x in metadata.get("tokenizer.ggml.scores") or ()]
    if len(scores) != len(tokens):
        raise ModelError(f"The GGUF file has {len(tokens)} tokens but {len(scores)} scores.", "The file is damaged; fetch it again.")
    ids = _ids_by_text(tokens)
    joinable = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token in joinable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in joinable and right in joinable:
                ranked.append((-scores[ids[token]], ids[left], ids[right], (left, right)))
    ranked.sort()
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    model = tk.models.BPE(vocab=ids, merges=[pair for *_, pair in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tk.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = tk.normalizers.Replace(" ", "\u2581")
    backend.normalizer = tk.normalizers.Sequence([tk.normalizers.Prepend("\u2581"), spaces] if prefix else [spaces])
    steps = [tk.decoders.Replace("\u2581", " "), tk.decoders.ByteFallback(), tk.decoders.Fuse()]
    backend.decoder = tk.decoders.Sequence([*steps, tk.decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _add_special(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    import tokenizers as tk

    for kinds, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        # An unknown token that byte-level models never produce is still no text for a reader.
        chosen = [t for t, kind in zip(tokens, types, strict=True) if kind in kinds and t]
        added = [tk.AddedToken(t, special=special, normalized=False) for t in dict.fromkeys(chosen)]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


# -- Hugging Face folders -----------------------------------------------------------------------------------------


def read_directory(path: Path, eos_ids: Iterable[int] | None) -> Vocabulary:
    """Read tokenizer.json, or what a SentencePiece folder converts to, with BOS, EOS and template from the JSON files beside it."""
    config = _json(path / "tokenizer_config.json")
    backend = _backend(path)
    _complete_added(backend, config)
    bos_id = _token_id(backend, config.get("bos_token"))
    eos = frozenset(int(i) for i in eos_ids) if eos_ids is not None else frozenset(_eos_ids(path, backend, config))
    explicit = config.get("add_bos_token")
    if isinstance(explicit, bool):
        add_bos = explicit and bos_id is not None
    else:
        first = backend.encode("", add_special_tokens=True).ids[:1]
        add_bos = bos_id is not None and first == [bos_id]
    return Vocabulary(backend, bos_id, eos, add_bos, _chat_template(path, config), _token_id(backend, config.get("eos_token")))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}.", "The model folder is damaged; fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object.", "The model folder is damaged; fetch it again.")
    return value


def _check_spec(spec: dict[str, Any]) -> None:
    """Refuse what would make the library reserve memory without bound: ids far above any vocabulary, texts that multiply.

    Raises ModelError. The library itself checks the rest.
    """
    model = spec.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = [token.get("id") for token in spec.get("added_tokens") or [] if isinstance(token, dict)]
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else []), *added]
    if any(isinstance(i, int) and not 0 <= i < MAX_VOCABULARY for i in ids):
        raise ModelError("The tokenizer has token ids far beyond any vocabulary.", "The model folder is damaged; fetch it again.")
    growth = 1.0
    for step in _steps(spec.get("normalizer")):
        if step.get("type") == "Replace" and isinstance(step.get("content"), str):
            growth *= max(1.0, len(step["content"]) / max(1, len(_literal(step.get("pattern")))))
    if growth > MAX_GROWTH:
        raise ModelError("The tokenizer's normalizer multiplies the length of a text.", "Such a model cannot be served safely.")


def _steps(normalizer: Any, depth: int = 0) -> list[dict[str, Any]]:
    if not isinstance(normalizer, dict) or depth > 32:
        return []
    inner = normalizer.get("normalizers")
    nested = [step for one in inner for step in _steps(one, depth + 1)] if isinstance(inner, list) else []
    return [normalizer, *nested]


def _literal(pattern: Any) -> str:
    """What a Replace looks for, "" for a regular expression, which may match a single character."""
    return pattern["String"] if isinstance(pattern, dict) and isinstance(pattern.get("String"), str) else ""


def _backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers as tk

    try:
        if (path / "tokenizer.json").is_file():
            _check_spec(_json(path / "tokenizer.json"))
            return tk.Tokenizer.from_file(str(path / "tokenizer.json"))
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        backend = getattr(slow, "backend_tokenizer", None)
    except ModelError:
        raise
    except BaseException as error:  # a panic in the library is no Exception
        raise ModelError(f"The tokenizer in {path.name} cannot be loaded: {error}", "A folder with a tokenizer.json works.") from error
    if not isinstance(backend, tk.Tokenizer):
        raise ModelError(f"The tokenizer in {path.name} has no fast form.", "Convert it to a tokenizer.json first.")
    return tk.Tokenizer.from_str(backend.to_str())


def _complete_added(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens that only tokenizer_config.json knows, and make the named ones special, as transformers does."""
    import tokenizers as tk

    decoder = config.get("added_tokens_decoder")
    for entry in decoder.values() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and backend.token_to_id(entry["content"]) is None:
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
            token = tk.AddedToken(entry["content"], **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    extra = config.get("additional_special_tokens")
    named = [config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")] + (extra if isinstance(extra, list) else [])
    for content in (_content(value) for value in named):
        if content and content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([tk.AddedToken(content, special=True, normalized=False)])


def _content(value: Any) -> str | None:
    """A token is written as its text or as an object that holds it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _token_id(backend: tokenizers.Tokenizer, value: Any) -> int | None:
    content = _content(value)
    return None if content is None else backend.token_to_id(content)


def _eos_ids(path: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> Iterator[int]:
    """Every EOS id that one of the configurations names."""
    model = _json(path / "config.json")
    text = model.get("text_config")
    for source in (_json(path / "generation_config.json"), model, text if isinstance(text, dict) else {}):
        value = source.get("eos_token_id")
        yield from (i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and not isinstance(i, bool))
    named = _token_id(backend, config.get("eos_token"))
    if named is not None:
        yield named


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """A chat_template.jinja, else chat_template.json, else the field of tokenizer_config.json; of several the one named "default"."""
    try:
        return (path / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ModelError(f"chat_template.jinja cannot be read: {error}.", "The model folder is damaged; fetch it again.") from error
    value = _json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        value = next((x.get("template") for x in value if isinstance(x, dict) and x.get("name") == "default"), None)
    return value if isinstance(value, str) and value else None
