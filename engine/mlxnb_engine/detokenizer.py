"""Ids back to text: how a vocabulary entry spells its bytes, and decoders that take one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

REPLACEMENT = "\ufffd"
WINDOW_IDS = 8
MAX_UNDECIDED_IDS = 16


@cache
def alphabet_bytes() -> dict[str, int]:
    """Printable character -> byte, as byte-level BPE vocabularies write bytes (the GPT-2 table).

    The 188 printable bytes of Latin-1 stand for themselves; the other 68, in order, for U+0100 and up.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class PieceRules:
    """What one vocabulary entry means in bytes, on its own.

    byte_level: each character stands for one byte. byte_fallback: `<0x41>` is the byte 0x41. replaces: text for text, in order.
    dropped_spaces: leading spaces that the encoder puts before a text and a decoder of a whole text drops again.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replaces: tuple[tuple[str, str], ...] = ()
    dropped_spaces: int = 0

    @classmethod
    def from_decoder(cls, spec: Mapping[str, Any] | None) -> PieceRules | None:
        """Rules of the `decoder` of a tokenizer.json; None where the bytes of an entry depend on its neighbours."""
        steps = _flat(spec)
        kinds = [step.get("type") for step in steps]
        if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
            return cls(byte_level=True)
        if not steps or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return None
        replaces: list[tuple[str, str]] = []
        dropped = 0
        for i, step in enumerate(steps):
            if step["type"] == "Replace":
                if "String" not in step["pattern"]:
                    return None
                replaces.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Metaspace":
                replaces.append((step.get("replacement", "\u2581"), " "))
                dropped = 0 if step.get("prepend_scheme", "always") == "never" else 1
            elif step["type"] == "Strip":
                # Before Fuse a Strip works on every token, which is another decoder than ours.
                if "Fuse" not in kinds[:i] or step.get("content") != " " or step.get("stop"):
                    return None
                dropped = int(step.get("start", 0))
        return cls(byte_fallback="ByteFallback" in kinds, replaces=tuple(replaces), dropped_spaces=dropped)

    def spell(self, piece: str) -> bytes:
        """Bytes of one entry. A byte-level entry with a character outside the alphabet stands for itself."""
        if self.byte_level:
            table = alphabet_bytes()
            codes = [table.get(c) for c in piece]
            return piece.encode("utf-8", "replace") if None in codes else bytes(c for c in codes if c is not None)
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replaces:
            piece = piece.replace(old, new)
        return piece.encode("utf-8", "replace")


def _flat(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    if spec.get("type") == "Sequence":
        return [step for part in spec["decoders"] for step in _flat(part)]
    return [spec]


class IncrementalDecoder:
    """Text of a growing list of ids, O(1) per token: the bytes of each id through an incremental UTF-8 decoder.

    Owner: one row, one thread. Invariant: the texts returned so far plus `flush()` are `Tokenizer.decode` of the same ids.
    Lossless: a leading space stays; bytes of an unfinished character wait; bytes that no character can hold become U+FFFD.
    """

    def __init__(self, spell: Callable[[int], bytes], hidden: frozenset[int], dropped_spaces: int = 0) -> None:
        self._spell = spell
        self._hidden = hidden
        self._dropped_spaces = dropped_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completed, often empty."""
        if token in self._hidden:
            return ""
        data = self._spell(token)
        if self._dropped_spaces and data:
            spaces = len(data) - len(data.lstrip(b" "))
            data = data[min(spaces, self._dropped_spaces) :]
            # The dropped prefix lies at the very start: the first other byte ends the search.
            self._dropped_spaces = 0 if data else self._dropped_spaces - spaces
        return self._utf8.decode(data)

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character wait."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """The rest: an unfinished character as U+FFFD. The decoder may be used again after it."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class WindowedDecoder(IncrementalDecoder):
    """The same for a decoder whose text of an entry depends on its neighbours: decode a short window, deliver what is new.

    Each text delivered is final. `Tokenizer.decode` runs the ids through this class too, so the invariant holds by construction;
    against decoding everything at once it is exact for decoders that look at most a few tokens back (word pieces, suffixes).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int]) -> None:
        super().__init__(lambda _: b"", hidden)
        self._decode = decode
        self._ids: list[int] = []
        self._shown = ""
        self._undecided = False

    @property
    def pending(self) -> bool:
        return self._undecided

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        undecided = text.endswith(REPLACEMENT) or not text.startswith(self._shown)
        self._undecided = undecided and len(self._ids) < MAX_UNDECIDED_IDS
        return "" if self._undecided else self._deliver(text)

    def flush(self) -> str:
        text = self._deliver(self._decode(self._ids)) if self._ids else ""
        self._ids, self._shown, self._undecided = [], "", False
        return text

    def _deliver(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._shown = text
        if len(self._ids) > WINDOW_IDS:
            self._ids = self._ids[-WINDOW_IDS // 2 :]
            self._shown = self._decode(self._ids)
        return new
