"""`Tokenizer`: encode, decode, metadata and incremental decode over the `tokenizers` library. It knows no roles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from .detokenizer import IncrementalDecoder, PieceRules, WindowedDecoder
from .markers import Markers, PlainEncoder, check_text, is_structural, run, span
from .vocabulary import Vocabulary, read_directory, read_gguf

# NFC makes one character of at most this many.
MOST_COMPOSED = 4


class Tokenizer:
    """Text to ids and back.

    A **marker** is an added token that text must not turn into: every special token, and every other added token (`<think>`, tool
    tags) except white space and single characters, which carry no structure. With `control=False` no text becomes a marker.
    Owner: the loaded model; any thread may call it. Nothing here adds BOS or EOS.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self._eos_id = vocabulary.eos_id
        self.add_bos = vocabulary.add_bos
        self.chat_template = vocabulary.chat_template
        self._spec: dict[str, Any] = json.loads(self._backend.to_str())
        self._added = dict(self._backend.get_added_tokens_decoder())
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.marker_ids = frozenset(i for i, token in self._added.items() if token.special or is_structural(token.content))
        self.markers = Markers(self._added[i].content for i in self.marker_ids)
        self._rules = PieceRules.from_decoder(self._spec.get("decoder"))
        self._spelled: dict[int, bytes] = {}
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._plain = PlainEncoder(self._backend, self._spec, self._added, self.marker_ids)

    @classmethod
    def from_directory(cls, path: Path, eos_ids: Iterable[int] | None = None) -> Tokenizer:
        """The tokenizer of a Hugging Face folder. eos_ids: instead of those that the folder's configurations name."""
        return cls(read_directory(Path(path), eos_ids))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that GGUF metadata, as Python values, describes."""
        return cls(read_gguf(metadata))

    # -- metadata ------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> bytes:
        """Canonical bytes of vocabulary, merges, added tokens and BOS/EOS facts, for the model fingerprint."""
        facts = [self.bos_id, sorted(self.eos_ids), self._eos_id, self.add_bos]
        return json.dumps([self._spec, facts], sort_keys=True, separators=(",", ":")).encode()

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_id is None else self._backend.id_to_token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        """What templates call `eos_token`: the one that the files name, else the lowest EOS id."""
        chosen = self._eos_id if self._eos_id is not None else min(self.eos_ids, default=None)
        return None if chosen is None else self._backend.id_to_token(chosen)

    # -- encode --------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Ids of a text. control: markers in it count as markers (template scaffolding). Raises RequestError for lone surrogates."""
        check_text(text)
        if control:
            return list(run(self._backend, text).ids)
        return self._plain.encode(text, "first")

    def fewest_tokens(self, text: str) -> int:
        """How many tokens this text has at least, without encoding it; 0 where the tokenizer may drop or join any amount of text."""
        return len(text) // (MOST_COMPOSED * self._longest_bytes) if self._keeps_text else 0

    @cached_property
    def _longest_bytes(self) -> int:
        return max([1, *(len(self.token_bytes(i)) for i in range(self.vocab_size))])

    @cached_property
    def _keeps_text(self) -> bool:
        normalizer = self._spec.get("normalizer") or {"type": "NFC"}
        steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
        safe = all(x["type"] in ("NFC", "Prepend") or (x["type"] == "Replace" and x["pattern"].get("String") == " ") for x in steps)
        whole = self._rules is not None and (self._rules.byte_level or self._rules.byte_fallback)
        return safe and whole and not any(self._added[i].lstrip or self._added[i].rstrip for i in self.marker_ids)

    def encode_broken(self, text: str, nonce: str) -> list[int]:
        """Ids of a text with markers on, where `nonce` characters vanish and no marker may span one.

        The backend first cuts a text at its markers and encodes the sections between them. We do the same, minus the markers that
        a nonce breaks; a section keeps its merges across the places where a nonce stood. Without a nonce it is `encode(control=True)`.
        """
        check_text(text)
        if nonce not in text:
            return list(run(self._backend, text).ids)
        encoding = run(self._backend, text)
        ids: list[int] = []
        done = 0
        for i, token in enumerate(encoding.ids):
            if token in self._plain.forbidden:
                start, end = span(encoding, i)
                if nonce not in text[start:end]:
                    ids += self._plain.encode(text[done:start].replace(nonce, ""), "later" if done else "first")
                    ids.append(token)
                    done = end
        return ids + self._plain.encode(text[done:].replace(nonce, ""), "later" if done else "first")

    def encode_after(self, text: str, nonce: str) -> list[int]:
        """`encode_broken` of a text that goes on right behind other ids, so that nothing is put before it."""
        found = self.markers.find(text)
        start = len(text) if found is None else found
        head = self._plain.encode(check_text(text[:start]).replace(nonce, ""), "inner")
        return head + self.encode_broken(text[start:], nonce) if found is not None else head

    def breaks(self, text: str, keep: frozenset[str] = frozenset()) -> list[int]:
        """Where to put a nonce into content so that no marker can form in it or with its neighbours: ascending positions.

        keep: markers, none of them special, that may form all the same.
        """
        places = self._markers_except(keep & self.structural_markers).breaks(text)
        if self._plain.matches_normalized and self._forms_marker(text):
            return list(range(1, len(text)))
        return places

    @cached_property
    def structural_markers(self) -> frozenset[str]:
        """Texts of the markers that are no special tokens, such as `<think>` or a tool tag."""
        return frozenset(self._added[i].content for i in self.marker_ids - self.special_ids)

    def _markers_except(self, keep: frozenset[str]) -> Markers:
        return Markers(self.markers.texts - keep) if keep else self.markers

    def last_marker(self, text: str) -> int:
        """Start of the last marker near the end of a text; 0 if there is none."""
        return self.markers.find_last(text) or 0

    def _forms_marker(self, text: str) -> bool:
        """True if normalisation (say, wide letters to ASCII) makes a marker that `Markers` cannot see in the raw text."""
        check_text(text)
        return self.markers.find(text) is None and not self._plain.forbidden.isdisjoint(run(self._backend, text).ids)

    # -- decode --------------------------------------------------------------------------------------------------

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this id stands for on its own; none for an id without an entry (padded vocabularies)."""
        data = self._spelled.get(token)
        if data is None:
            data = self._spelled[token] = self._spell(token)
        return data

    def _spell(self, token: int) -> bytes:
        added = self._added.get(token)
        piece: str | None = added.content if added else self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if piece is None:
            return b""
        if self._rules is None:
            return str(self._backend.decode([token], skip_special_tokens=False)).encode("utf-8", "replace")
        if added and (added.special or self._rules.byte_level):
            return piece.encode("utf-8", "replace")
        return self._rules.spell(piece)

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with U+FFFD where a character is split over tokens."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, start: bool = False) -> str:
        """Text of these ids. Special tokens give none; other added tokens are shown.

        start: the ids begin a text, so the space that a SentencePiece encoder put before it is dropped, and
        `decode(encode(x), start=True) == x`. Without it they continue one, and a leading space is text.
        """
        decoder = self.stream(start=start)
        return "".join([decoder.push(token) for token in ids]) + decoder.flush()

    def stream(self, *, start: bool = False) -> IncrementalDecoder:
        """A decoder for one growing list of ids; its texts add up to `decode` of them."""
        if self._rules is None:
            backend = self._backend
            return WindowedDecoder(lambda ids: str(backend.decode(ids, skip_special_tokens=False)), self.special_ids)
        return IncrementalDecoder(self.token_bytes, self.special_ids, self._rules.dropped_spaces if start else 0)
