"""Tokenizer: round trips, incremental decoding, no control ids from text, GGUF and folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
import tokenizers as tk
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxnb_engine.detokenizer import PieceRules, alphabet_bytes
from mlxnb_engine.errors import ModelError, RequestError
from mlxnb_engine.markers import LONG_TEXT, Markers
from mlxnb_engine.tokenizer import Tokenizer
from mlxnb_engine.vocabulary import Vocabulary

KINDS = tuple(tiny.SPECS)
LOSSLESS = ("byte_level", "spm_legacy", "spm_metaspace", "whole_words")
NONCE = "\ue000"
TEXTS = (
    "",
    " ",
    "the answer is 42",
    "  two leading spaces",
    "trailing space ",
    "line\n\nline\tend\t\t",
    "été naïve 你好 🙂🙂",
    "nul \x00 byte",
    "mixed <b>tags</b> | and | bars",
    "\u202eright to left\u202c",
)
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40)


def kept(kind: str, text: str) -> str:
    """What an encoding holds: Metaspace puts a space in front only where there is none, so it cannot tell " x" from "x"."""
    return text.removeprefix(" ") if kind == "spm_metaspace" else text


# -- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", TEXTS)
def test_encoding_then_decoding_gives_the_text_back(kind: str, text: str) -> None:
    tokenizer = tiny.tokenizer(kind)
    assert tokenizer.decode(tokenizer.encode(text), start=True) == kept(kind, text)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LOSSLESS), any_text)
def test_any_text_survives_the_round_trip(kind: str, text: str) -> None:
    tokenizer = tiny.tokenizer(kind)
    assert tokenizer.decode(tokenizer.encode(text), start=True) == kept(kind, text)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), st.booleans(), st.lists(st.integers(0, 700), max_size=40))
def test_streamed_pieces_add_up_to_decode_for_any_ids(kind: str, start: bool, ids: list[int]) -> None:
    tokenizer = tiny.tokenizer(kind)
    decoder = tokenizer.stream(start=start)
    assert "".join(decoder.push(i) for i in ids) + decoder.flush() == tokenizer.decode(ids, start=start)
    visible = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids)
    if not start:
        assert tokenizer.decode(ids) == visible.decode("utf-8", "replace")


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(LOSSLESS), any_text)
def test_decoding_agrees_with_the_library(kind: str, text: str) -> None:
    tokenizer, backend = tiny.tokenizer(kind), tiny.backend(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, start=True) == backend.decode(ids, skip_special_tokens=True)


def test_a_character_split_over_tokens_waits_until_it_is_whole() -> None:
    tokenizer = tiny.tokenizer()
    table = {value: key for key, value in alphabet_bytes().items()}
    ids = [tiny.backend("byte_level").token_to_id(table[byte]) for byte in "🦆".encode()]
    decoder = tokenizer.stream()
    assert [decoder.push(i) for i in ids] == ["", "", "", "🦆"]
    assert [decoder.push(i) for i in ids[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd"
    assert [tokenizer.token_text(i) for i in ids[:1]] == ["\ufffd"]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_continuation_keeps_its_leading_space(kind: str) -> None:
    tokenizer = tiny.tokenizer(kind)
    ids = tokenizer.encode("is Paris")
    space = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] == b" " and tokenizer.token_bytes(i).strip())
    assert tokenizer.stream().push(space).startswith(" ")
    assert tokenizer.decode([space, *ids]).startswith(" ")
    assert not tokenizer.decode([space, *ids], start=True).startswith(" ") or kind in ("byte_level", "whole_words")


def test_special_tokens_are_not_shown_and_other_added_tokens_are() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode("a<think>b<|im_end|>", control=True)
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.token_text(ids[-1]) == "<|im_end|>"


def test_an_id_without_an_entry_is_no_text() -> None:
    tokenizer = tiny.tokenizer()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_a_decoder_that_looks_at_neighbours_streams_what_it_decodes() -> None:
    backend = tk.Tokenizer.from_str(tiny.word_piece_spec())
    tokenizer = Tokenizer(Vocabulary(backend, None, frozenset(), False, None))
    ids = tokenizer.encode("the singing thing is . the end of abc") * 3
    decoder = tokenizer.stream()
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids) == backend.decode(ids)
    assert sum(map(bool, pieces)) == len(ids)


@pytest.mark.parametrize(
    ("spec", "known"),
    [
        (None, False),
        ({"type": "ByteLevel"}, True),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, True),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, False),
        ({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"}]}, False),
        ({"type": "Replace", "pattern": {"Regex": "x"}, "content": " "}, False),
    ],
)
def test_only_decoders_whose_entries_stand_alone_are_spelled_by_bytes(spec: dict[str, Any] | None, known: bool) -> None:
    assert (PieceRules.from_decoder(spec) is not None) is known


# -- encode: no text becomes a marker --------------------------------------------------------------------------------


def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """All markers but the unknown token, which any character outside a vocabulary is."""
    return frozenset(i for i in tokenizer.marker_ids if tokenizer.token_text(i) != "<unk>")


def hostile_texts(tokenizer: Tokenizer) -> list[str]:
    texts = sorted(tokenizer.markers.texts)
    return [y for x in texts for y in (x, x * 3, f"a {x} b", f" {x}", f"{x}\n", x[:2] + x + x[2:], f"{x} {texts[0]}", f"<{x}>")]


@pytest.mark.parametrize("kind", KINDS)
def test_no_marker_in_text_becomes_its_id(kind: str) -> None:
    tokenizer = tiny.tokenizer(kind)
    texts = hostile_texts(tokenizer)
    assert len(texts) >= 40
    for text in texts:
        ids = tokenizer.encode(text)
        assert control_ids(tokenizer).isdisjoint(ids), (text, ids)
        if kind != "unigram":
            assert tokenizer.decode(ids, start=True) == kept(kind, text)


@pytest.mark.parametrize("kind", KINDS)
def test_with_control_on_every_marker_becomes_its_id(kind: str) -> None:
    """Negative control for the test above: the same texts do hold markers."""
    tokenizer = tiny.tokenizer(kind)
    for text in sorted(tokenizer.markers.texts):
        assert not tokenizer.marker_ids.isdisjoint(tokenizer.encode(f"a{text}b", control=True)), text


@pytest.mark.parametrize("kind", ["whole_words", "unigram"])
def test_taking_out_added_tokens_alone_is_not_enough_where_entries_spell_markers(kind: str) -> None:
    """Negative control: without the check of the ids these two vocabularies give markers away."""
    spec = json.loads(tiny.SPECS[kind]())
    naive = tk.Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))
    tokenizer = tiny.tokenizer(kind)
    leaks = [t for t in tokenizer.markers.texts if not tokenizer.marker_ids.isdisjoint(naive.encode(t).ids)]
    assert leaks


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.sampled_from(["<s>", "</s>", "<think>", "<|im_", "start|>", "<|im_end|>", "[TOOL]", " ", "a", "<", "é"])),
)
def test_no_mixture_of_marker_pieces_becomes_a_marker(kind: str, pieces: list[str]) -> None:
    tokenizer = tiny.tokenizer(kind)
    assert control_ids(tokenizer).isdisjoint(tokenizer.encode("".join(pieces)))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(KINDS), any_text)
def test_text_without_markers_is_encoded_as_the_library_does(kind: str, text: str) -> None:
    expected = tiny.backend(kind).encode(text, add_special_tokens=False).ids
    tokenizer = tiny.tokenizer(kind)
    if tokenizer.markers.find(text) is None:
        assert tokenizer.encode(text) == tokenizer.encode(text, control=True) == expected


def test_white_space_tokens_are_no_markers() -> None:
    tokenizer = tiny.tokenizer()
    run = tiny.backend("byte_level").token_to_id("\t\t")
    assert run not in tokenizer.marker_ids
    assert run in tokenizer.encode("a\t\tb")


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.sampled_from(["the answer", "<think>", " ", "\n", "é", "</s>", "<|im_end|>", "is 4", "<"]), max_size=8),
    st.data(),
)
def test_a_nonce_that_breaks_no_marker_changes_no_id(kind: str, pieces: list[str], data: st.DataObject) -> None:
    """The sections between markers keep their merges and their leading-space rule on the slower path."""
    tokenizer = tiny.tokenizer(kind)
    text = "".join(pieces)
    inside = {p for s in range(len(text)) for t in tokenizer.markers.texts if text.startswith(t, s) for p in range(s + 1, s + len(t))}
    free = [p for p in range(len(text) + 1) if p not in inside]
    places = data.draw(st.lists(st.sampled_from(free), max_size=5, unique=True))
    broken = "".join(NONCE * places.count(i) + text[i : i + 1] for i in range(len(text) + 1))
    assert tokenizer.encode_broken(broken, NONCE) == tokenizer.encode(text, control=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_marker_is_text_and_a_whole_one_is_a_marker(kind: str) -> None:
    tokenizer = tiny.tokenizer(kind)
    for text in sorted(tokenizer.markers.texts - {"<unk>"}):
        marker = tokenizer.encode(text, control=True)[-1]
        ids = tokenizer.encode_broken(f"x{text}y{text[0]}{NONCE}{text[1:]}z", NONCE)
        assert ids.count(marker) == 1
        assert set(ids) & control_ids(tokenizer) == {marker}


def test_a_marker_matched_after_normalisation_is_broken_too() -> None:
    backend = tiny.backend("byte_level")
    backend.normalizer = tk.normalizers.NFKC()
    backend.add_tokens([tk.AddedToken("<role>", normalized=True)])
    tokenizer = Tokenizer(Vocabulary(backend, None, frozenset(), False, None))
    wide = "\uff1crole\uff1e"
    marker = backend.token_to_id("<role>")
    assert marker in tokenizer.encode(wide, control=True)
    assert marker not in tokenizer.encode(wide)
    places = tokenizer.breaks(wide)
    broken = "".join((NONCE if i in places else "") + c for i, c in enumerate(wide))
    assert marker not in tokenizer.encode_broken(broken, NONCE)


def test_a_single_character_control_token_is_refused_rather_than_passed() -> None:
    backend = tiny.backend("byte_level")
    backend.add_special_tokens([tk.AddedToken("a", special=True, normalized=False)])
    tokenizer = Tokenizer(Vocabulary(backend, None, frozenset(), False, None))
    with pytest.raises(RequestError, match="control token"):
        tokenizer.encode("xay")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ab<|", min_size=2, max_size=5), max_size=6),
    st.text("ab<|", min_size=1, max_size=12),
    st.text("ab<|", max_size=5),
    st.text("ab<|", max_size=5),
)
def test_no_marker_forms_across_the_ends_of_broken_content(words: list[str], content: str, before: str, after: str) -> None:
    markers = Markers(words)
    places = markers.breaks(content)
    broken = "".join((NONCE if i in places else "") + c for i, c in enumerate(content)) + (NONCE if len(content) in places else "")
    whole = before + broken + after
    for word in words:
        for start in range(len(whole)):
            if whole.startswith(word, start):
                end = start + len(word)
                assert end <= len(before) or start >= len(before) + len(broken), (word, whole)


def test_marker_search_finds_the_first_and_the_last() -> None:
    markers = Markers(["<a>", "<ab>", "<a><"])
    assert markers.find("x<ab> <a>") == 1
    assert markers.find_last("x<ab> <a> y") == 6
    assert markers.find("nothing") is None
    assert Markers([]).find("x") is None


def test_lone_surrogates_are_refused() -> None:
    for control in (False, True):
        with pytest.raises(RequestError, match=r"U\+D800"):
            tiny.tokenizer().encode("a\ud800", control=control)


def test_a_long_text_gives_the_ids_of_the_short_path() -> None:
    tokenizer, text = tiny.tokenizer(), "the answer is 4. "
    long = text * (LONG_TEXT // len(text) + 2)
    assert tokenizer.encode(long) == tiny.backend("byte_level").encode(long, add_special_tokens=False).ids


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(KINDS), st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.integers(1, 60))
def test_the_lower_bound_of_tokens_is_one(kind: str, text: str, times: int) -> None:
    tokenizer = tiny.tokenizer(kind)
    assert tokenizer.fewest_tokens(text * times) <= len(tokenizer.encode(text * times))
    assert (tokenizer.fewest_tokens("a" * 10_000) > 0) is (kind != "unigram")


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
def test_many_markers_in_one_text_cost_no_recursion(kind: str) -> None:
    tokenizer = tiny.tokenizer(kind)
    ids = tokenizer.encode("</s><|im_end|>" * 2000)
    assert control_ids(tokenizer).isdisjoint(ids)


# -- sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte_level", "spm_legacy"])
def test_a_gguf_vocabulary_encodes_like_the_original(kind: str) -> None:
    tokenizer = Tokenizer.from_gguf(tiny.gguf_metadata(kind))
    original = tiny.tokenizer(kind)
    for text in (*TEXTS, tiny.CORPUS):
        assert tokenizer.encode(text) == original.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text), start=True) == text
    assert tokenizer.special_ids == original.special_ids
    assert tokenizer.bos_id == original.bos_id
    assert tokenizer.eos_ids == original.eos_ids
    assert tokenizer.add_bos is original.add_bos
    assert tokenizer.chat_template == tiny.CHATML


def test_smollm_splits_every_digit() -> None:
    tokenizer = Tokenizer.from_gguf(tiny.gguf_metadata(**{"tokenizer.ggml.pre": "smollm"}))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("123 4567")] == ["1", "2", "3", " ", "4", "5", "6", "7"]


@pytest.mark.parametrize(("pre", "longest"), [("qwen2", 1), ("llama-bpe", 3)])
def test_the_regexes_limit_runs_of_digits(pre: str, longest: int) -> None:
    metadata = tiny.gguf_metadata(**{"tokenizer.ggml.pre": pre})
    digits = [
        len(t) for t in (Tokenizer.from_gguf(metadata).token_text(i) for i in range(len(metadata["tokenizer.ggml.tokens"]))) if t.isdigit()
    ]
    tokenizer = Tokenizer.from_gguf(metadata)
    pieces = [tokenizer.token_text(i) for i in tokenizer.encode("1234567")]
    assert "".join(pieces) == "1234567"
    assert max(map(len, pieces)) <= longest
    assert max(digits) >= 1


def test_an_unknown_pre_tokenizer_is_named() -> None:
    with pytest.raises(ModelError, match="'mystery'"):
        Tokenizer.from_gguf(tiny.gguf_metadata(**{"tokenizer.ggml.pre": "mystery"}))


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.model": "t5"},
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.merges": ["zz qq"]},
        {"tokenizer.ggml.eos_token_id": 10**6},
    ],
)
def test_damaged_gguf_metadata_is_a_model_error(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        Tokenizer.from_gguf(tiny.gguf_metadata(**change))


def test_every_end_token_of_gguf_counts() -> None:
    tokenizer = Tokenizer.from_gguf(tiny.gguf_metadata(**{"tokenizer.ggml.eot_token_id": 0}))
    assert tokenizer.eos_ids == {0, tiny.backend("byte_level").token_to_id("<|im_end|>")}


def test_a_folder_gives_the_ids_of_its_tokenizer_json(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template="T")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 11, "text_config": {"eos_token_id": 12}}))
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.encode("the answer") == tiny.tokenizer().encode("the answer")
    assert tokenizer.eos_ids == {7, 9, 11, 12, tiny.backend("byte_level").token_to_id("<|im_end|>")}
    assert Tokenizer.from_directory(folder, eos_ids=[3]).eos_ids == {3}
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == "T"
    assert tokenizer.add_bos is False
    assert tokenizer.bos_token == "<|endoftext|>"


@pytest.mark.parametrize(("explicit", "expected"), [({}, True), ({"add_bos_token": False}, False), ({"add_bos_token": True}, True)])
def test_bos_follows_the_post_processor_unless_the_folder_says_otherwise(tmp_path: Path, explicit: dict[str, Any], expected: bool) -> None:
    folder = tiny.write_folder(tmp_path, "spm_legacy", bos_token={"content": "<s>"}, eos_token="</s>", **explicit)
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.add_bos is expected
    assert tokenizer.bos_id not in tokenizer.encode("the answer")


def test_a_named_template_file_comes_first_and_lists_give_their_default(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    folder = tiny.write_folder(tmp_path, chat_template=several)
    assert Tokenizer.from_directory(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_directory(folder).chat_template == "J"


def test_tokens_that_only_the_configuration_knows_are_added(tmp_path: Path) -> None:
    decoder = {"9000": {"content": "<|extra|>", "special": True}}
    tokenizer = Tokenizer.from_directory(tiny.write_folder(tmp_path, added_tokens_decoder=decoder, pad_token="<think>"))
    assert "<|extra|>" in tokenizer.markers.texts
    assert "<think>" not in tokenizer.structural_markers
    assert tokenizer.marker_ids.isdisjoint(tokenizer.encode("<|extra|><think>"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_folder_is_a_model_error(tmp_path: Path, name: str) -> None:
    folder = tiny.write_folder(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(ModelError):
        Tokenizer.from_directory(folder)


def test_identity_changes_with_every_part_and_only_then() -> None:
    base = tiny.gguf_metadata()
    same = Tokenizer.from_gguf(tiny.gguf_metadata()).identity
    assert Tokenizer.from_gguf(base).identity == same
    types = list(base["tokenizer.ggml.token_type"])
    types[types.index(4)] = 3
    changes: list[dict[str, Any]] = [
        {"tokenizer.ggml.merges": base["tokenizer.ggml.merges"][:-1]},
        {"tokenizer.ggml.tokens": [*base["tokenizer.ggml.tokens"][:-1], "other"]},
        {"tokenizer.ggml.token_type": types},
        {"tokenizer.ggml.eos_token_id": 0},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.pre": "smollm"},
    ]
    assert len({same, *(Tokenizer.from_gguf(base | change).identity for change in changes)}) == len(changes) + 1


def test_importing_the_text_layer_loads_no_heavy_package() -> None:
    code = (
        "import sys, mlxnb_engine.prompt, mlxnb_engine.stopping;"
        "sys.exit(sum(n in sys.modules for n in ('mlx', 'mlx_lm', 'transformers', 'tokenizers', 'jinja2')))"
    )
    path = [p for p in sys.path if p]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], check=False)
    assert done.returncode == 0
