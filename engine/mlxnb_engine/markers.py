"""Markers: the added tokens that text must not turn into, and the encoder that has them taken out."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from .errors import RequestError

if TYPE_CHECKING:
    import tokenizers

Place = Literal["first", "later", "inner"]

# From this many characters on, encode through the batch call, which lets other threads run meanwhile.
LONG_TEXT = 16_384


def check_text(text: object) -> str:
    """The text itself. Raises RequestError unless it is a str that UTF-8 can hold."""
    if not isinstance(text, str):
        raise RequestError(f"A text is expected, not {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text has a lone surrogate, U+{ord(text[error.start]):04X}, at position {error.start}.",
            "It is half of a character and has no UTF-8 form; remove it.",
        ) from None
    return text


def run(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Encode without BOS or EOS; a long text through the batch call, since the single one keeps every other thread waiting."""
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=False)
    return backend.encode_batch([text], add_special_tokens=False)[0]


def span(encoding: tokenizers.Encoding, index: int) -> tuple[int, int]:
    """First and past-the-last character of one token of an encoding."""
    chars: tuple[int, int] | None = encoding.token_to_chars(index)
    if chars is None:
        raise RuntimeError(f"token {index} of {len(encoding.ids)} has no place in its text")
    return chars


def is_structural(content: str) -> bool:
    """White space and single characters carry no structure, whatever a vocabulary calls them."""
    return len(content) > 1 and bool(content.replace("\u2581", " ").strip())


class Markers:
    """The texts of all markers, searched in time linear in the text whatever their number."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self._heads = frozenset(t[:k] for t in self.texts for k in range(1, len(t)))
        self._tails = frozenset(t[k:] for t in self.texts for k in range(1, len(t)))
        self._longest = max(map(len, self.texts), default=0)
        # The lookahead finds overlapping occurrences too, as it consumes nothing.
        self._starts = re.compile(f"(?={_pattern(self.texts)})", re.DOTALL) if self.texts else None

    def find(self, text: str) -> int | None:
        """Start of the first marker in the text."""
        found = self._starts.search(text) if self._starts else None
        return found.start() if found else None

    def find_last(self, text: str) -> int | None:
        """Start of the last marker in the last 64 Ki characters of the text."""
        base = max(0, len(text) - 65_536)
        starts = [found.start() for found in self._starts.finditer(text, base)] if self._starts else []
        return starts[-1] if starts else None

    def breaks(self, text: str) -> list[int]:
        """A position inside each occurrence, and inside each that text before or after this one could complete.

        The ends count with and without outer white space, as templates often trim.
        """
        places = {found.start() + 1 for found in self._starts.finditer(text)} if self._starts else set()
        left, right = len(text) - len(text.lstrip()), len(text.rstrip())
        for start, end in {(0, len(text)), (left, right)}:
            for k in range(1, min(self._longest, end - start + 1)):
                if text[end - k : end] in self._heads:
                    places.add(end - k + 1)
                if text[start : start + k] in self._tails:
                    places.add(start + k - 1)
        return sorted(places)


def _pattern(texts: Iterable[str]) -> str:
    """A regular expression that matches where one of the texts starts: a trie, so that alternatives are not tried one by one."""
    words = sorted(texts)
    # A text that begins with another one adds nothing to where one starts.
    kept: list[str] = []
    for word in words:
        if not kept or not word.startswith(kept[-1]):
            kept.append(word)
    return _branch(kept, 0)


def _branch(words: list[str], depth: int) -> str:
    if len(words) == 1:
        return re.escape(words[0][depth:])
    shared = depth
    while words[0][shared] == words[-1][shared]:
        shared += 1
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[shared], []).append(word)
    choices = "|".join(_branch(group, shared) for group in groups.values())
    return f"{re.escape(words[0][depth:shared])}(?:{choices})"


class PlainEncoder:
    """The backend with its markers taken out: encodes text as text.

    A vocabulary may hold a marker as an ordinary entry as well (`</s>` in a unigram model, whole words with `ignore_merges`), so
    the ids are checked, and the text of a marker that still came out is cut in the middle and encoded again.
    """

    def __init__(self, backend: tokenizers.Tokenizer, spec: dict[str, Any], added: Mapping[int, Any], markers: frozenset[int]) -> None:
        self._spec = spec
        self.unknown_id = _unknown_id(spec)
        # Characters that the vocabulary lacks are <unk>, which text may thus always be.
        self.forbidden = markers - {self.unknown_id}
        self._kept = {token.content: i for i, token in added.items() if i not in markers}
        self.matches_normalized = bool(spec.get("normalizer")) and any(added[i].normalized for i in markers)
        self._variants: dict[str, tuple[tokenizers.Tokenizer, dict[int, int]]] = {}

    def encode(self, text: str, place: Place) -> list[int]:
        """Ids of one section. place: "first" of its text or "later", behind a marker: some tokenizers put a space before either;
        "inner": right behind other ids, where none does."""
        if not text:
            return []
        ids: list[int] = []
        pending: list[tuple[str, Place]] = [(text, place)]
        while pending:
            piece, variant = pending.pop()
            backend, renamed = self._variant(variant)
            encoding = run(backend, piece)
            found = [renamed.get(i, i) for i in encoding.ids] if renamed else encoding.ids
            if self.forbidden.isdisjoint(found):
                ids += found
                continue
            cuts = [_middle(*span(encoding, i)) for i, token in enumerate(found) if token in self.forbidden]
            edges = [0, *dict.fromkeys(cuts), len(piece)]
            pieces: list[tuple[str, Place]] = [(piece[a:b], variant if a == 0 else "inner") for a, b in itertools.pairwise(edges) if a < b]
            pending += reversed(pieces)
        return ids

    def _variant(self, name: Place) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        if name not in self._variants:
            import tokenizers as tk

            spec = dict(self._spec)
            spec["added_tokens"] = [token for token in spec.get("added_tokens") or () if token["content"] in self._kept]
            spec["post_processor"] = None
            if name != "first":
                spec["pre_tokenizer"] = _without_prefix(spec.get("pre_tokenizer"), inner=name == "inner")
            if name == "inner":
                spec["normalizer"] = _without_prefix(spec.get("normalizer"), inner=True)
            backend = tk.Tokenizer.from_str(json.dumps(spec))
            here = {content: backend.token_to_id(content) for content in self._kept}
            renamed = {i: self._kept[content] for content, i in here.items() if i is not None and i != self._kept[content]}
            self._variants[name] = (backend, renamed)
        return self._variants[name]


def _unknown_id(spec: Mapping[str, Any]) -> int | None:
    model = spec["model"]
    number, text = model.get("unk_id"), model.get("unk_token")
    if number is None and text is not None:
        number = (model.get("vocab") or {}).get(text)
    return number if isinstance(number, int) else None


def _middle(start: int, end: int) -> int:
    if end - start < 2:
        raise RequestError(
            f"The character at position {start} of a text is a control token of this model and has no other form.",
            "Remove it from the text.",
        )
    return (start + end) // 2


def _without_prefix(step: Any, inner: bool) -> Any:
    """A copy of a normaliser or pre-tokeniser that puts no space before a section that follows another one.

    Metaspace "first" marks the start of a text only; "always", Prepend and add_prefix_space mark each section between markers, but
    not the pieces (`inner`) into which we cut a section.
    """
    if not isinstance(step, dict):
        return step
    kind = step.get("type")
    if kind == "Sequence":
        name = "normalizers" if "normalizers" in step else "pretokenizers"
        return {**step, name: [kept for part in step[name] if (kept := _without_prefix(part, inner)) is not None]}
    if kind == "Metaspace" and (inner or step.get("prepend_scheme") == "first"):
        return {**step, "prepend_scheme": "never"}
    if kind == "ByteLevel" and inner:
        return {**step, "add_prefix_space": False}
    return None if kind == "Prepend" and inner else step
