"""Tiny tokenizers of every kind the text layer knows, trained in milliseconds on a few sentences. Needs no file and no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers as tk

from mlxnb_engine.tokenizer import Tokenizer
from mlxnb_engine.vocabulary import Vocabulary

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
STRUCTURAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL]")
SPM_SPECIALS = ("<unk>", "<s>", "</s>")
CORPUS = (
    "the capital of France is Paris, and the answer to the question is four. user system assistant You are a helpful friend.\n"
    "one two three 123 4567; What is it? The sea is wide and the night is still.\n\n  when the wind comes, we listen <b>there</b>!\n"
    "été naïve Straße 你好 世界 🙂 | im_start im_end think tool_call\n"
) * 3
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _added(texts: tuple[str, ...], special: bool) -> list[tk.AddedToken]:
    return [tk.AddedToken(text, special=special, normalized=False) for text in texts]


def _trained(backend: tk.Tokenizer, alphabet: list[str], specials: tuple[str, ...], size: int = 420) -> tk.Tokenizer:
    trainer = tk.trainers.BpeTrainer(vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    return backend


@cache
def byte_level_spec() -> str:
    """Byte-level BPE with chat markers, three of them special, and an added run of white space, as JSON."""
    backend = tk.Tokenizer(tk.models.BPE())
    backend.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = tk.decoders.ByteLevel()
    _trained(backend, tk.pre_tokenizers.ByteLevel.alphabet(), SPECIALS)
    backend.add_special_tokens(_added(SPECIALS, True))
    backend.add_tokens(_added((*STRUCTURAL, "\t\t"), False))
    return str(backend.to_str())


@cache
def spm_spec(legacy: bool) -> str:
    """SentencePiece-like BPE with byte fallback. legacy: a space before every section, else before the text only."""
    letters = sorted(set(CORPUS.replace(" ", "\u2581")) - {"你", "🙂"})
    backend = tk.Tokenizer(tk.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = tk.normalizers.Replace(" ", "\u2581")
    _trained(backend, letters, (*SPM_SPECIALS, *(f"<0x{i:02X}>" for i in range(256))), 640)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in SPM_SPECIALS]
    backend = tk.Tokenizer.from_str(json.dumps(spec))
    steps = [tk.decoders.Replace("\u2581", " "), tk.decoders.ByteFallback(), tk.decoders.Fuse(), tk.decoders.Strip(" ", 1, 0)]
    backend.decoder = tk.decoders.Sequence(steps)
    if legacy:
        backend.normalizer = tk.normalizers.Sequence([tk.normalizers.Prepend("\u2581"), tk.normalizers.Replace(" ", "\u2581")])
    else:
        backend.normalizer = None
        backend.pre_tokenizer = tk.pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    backend.add_tokens(_added(STRUCTURAL, False))
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = tk.processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return str(backend.to_str())


@cache
def whole_words_spec() -> str:
    """Byte-level with ignore_merges and no splitting: a text that is a vocabulary entry is that entry, markers included."""
    spec = json.loads(byte_level_spec())
    spec["model"]["ignore_merges"] = True
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    for i, text in enumerate(STRUCTURAL):
        spec["model"]["vocab"][text] = len(spec["model"]["vocab"])
        assert i >= 0
    by_text = spec["model"]["vocab"]
    spec["added_tokens"] = [{**t, "id": by_text[t["content"]]} for t in spec["added_tokens"] if t["content"] in by_text]
    return json.dumps(spec)


@cache
def unigram_spec() -> str:
    """Unigram with Metaspace, whose vocabulary holds `<s>` and `</s>` as pieces."""
    letters = [(c, -6.0) for c in sorted(set(CORPUS.replace(" ", "\u2581")) | set("</>[]{}"))]
    words = [("\u2581the", -2.0), ("\u2581is", -2.5), ("an", -3.0), ("\u2581", -3.0)]
    backend = tk.Tokenizer(
        tk.models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *words, *letters], unk_id=0, byte_fallback=False)
    )
    backend.pre_tokenizer = tk.pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
    backend.decoder = tk.decoders.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
    backend.add_special_tokens(_added(SPM_SPECIALS, True))
    backend.add_tokens(_added(STRUCTURAL, False))
    return str(backend.to_str())


@cache
def word_piece_spec() -> str:
    """WordPiece: the text of a piece depends on its place, so this takes the windowed decoder."""
    entries = ["[UNK]", "[CLS]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), "the", "##ing", "."]
    backend = tk.Tokenizer(tk.models.WordPiece({x: i for i, x in enumerate(entries)}, unk_token="[UNK]"))
    backend.pre_tokenizer = tk.pre_tokenizers.Whitespace()
    backend.decoder = tk.decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(_added(("[CLS]",), True))
    return str(backend.to_str())


SPECS: dict[str, Callable[[], str]] = {
    "byte_level": byte_level_spec,
    "spm_legacy": lambda: spm_spec(True),
    "spm_metaspace": lambda: spm_spec(False),
    "whole_words": whole_words_spec,
    "unigram": unigram_spec,
}


def backend(kind: str) -> tk.Tokenizer:
    """A fresh backend, for what a test wants to compare with."""
    return tk.Tokenizer.from_str(SPECS[kind]())


@cache
def tokenizer(kind: str = "byte_level", add_bos: bool | None = None) -> Tokenizer:
    """A tokenizer of one kind of SPECS. The SentencePiece kinds add BOS unless told otherwise."""
    made = backend(kind)
    spm = made.token_to_id("<s>") is not None
    bos, eos = ("<s>", "</s>") if spm else ("<|endoftext|>", "<|im_end|>")
    return Tokenizer(
        Vocabulary(
            backend=made,
            bos_id=made.token_to_id(bos),
            eos_ids=frozenset({made.token_to_id(eos)}),
            add_bos=spm if add_bos is None else add_bos,
            chat_template=CHATML,
        )
    )


def write_folder(path: Path, kind: str = "byte_level", **config: Any) -> Path:
    """A Hugging Face folder with tokenizer.json and tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(SPECS[kind](), "utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return path


def gguf_metadata(kind: str = "byte_level", **more: Any) -> dict[str, Any]:
    """GGUF metadata of the byte-level or the legacy SentencePiece tokenizer, as Python values."""
    spec = json.loads(SPECS[kind]())
    vocabulary: dict[str, int] = dict(spec["model"]["vocab"])
    added = {t["content"]: t for t in spec["added_tokens"]}
    for text, token in added.items():
        vocabulary.setdefault(text, token["id"])
    tokens = sorted(vocabulary, key=lambda t: vocabulary[t])
    types = [(3 if added[t]["special"] else 4) if t in added else 6 if t.startswith("<0x") else 1 for t in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    bos, eos = ("<s>", "</s>") if "<s>" in vocabulary else ("<|endoftext|>", "<|im_end|>")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if "<s>" in vocabulary else "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": vocabulary[bos],
        "tokenizer.ggml.eos_token_id": vocabulary[eos],
        "tokenizer.chat_template": CHATML,
    }
    if "<s>" in vocabulary:
        # An entry's score falls with the rank of the first merge that makes it, as in files converted from SentencePiece.
        rank = {left + right: i for i, (left, right) in reversed(list(enumerate(m.split(" ") for m in merges)))}
        metadata["tokenizer.ggml.scores"] = [-float(rank.get(t, 0)) for t in tokens]
        metadata["tokenizer.ggml.token_type"][vocabulary["<unk>"]] = 2
        del metadata["tokenizer.ggml.pre"]
    return metadata | more
