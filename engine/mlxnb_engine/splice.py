"""Where earlier answers stand in a rendered prompt, and how far the ids by which a model wrote them spell that text.

Text only: a template may trim, wrap, reorder or drop an answer. Ids are taken over only where they spell exactly what stands
there, so nothing comes back that the template left out, and the prompt's text is the same with them as without.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .tokenizer import Tokenizer
from .types import Generated

T = TypeVar("T")
LEAD_IDS = 8
"""The space that a SentencePiece encoder puts before a text lies within so many ids."""


@dataclass(frozen=True, slots=True)
class Splice:
    """`ids` stand for the characters [start, end) of a rendering."""

    start: int
    end: int
    ids: tuple[int, ...]


class Memo:
    """What was worked out of earlier texts, so that a conversation costs what is new in it.

    Any thread. budget: characters and ids that the keys and values may have together; the least recently used go first.
    """

    def __init__(self, budget: int = 2 << 20) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self._held = 0

    def get(self, key: Hashable, weight: int, make: Callable[[], T]) -> T:
        """The value of this key, made if it is not there. Equal keys must make equal values of one type."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key][0]  # type: ignore[return-value]
        value = make()
        with self._lock:
            if key not in self._known and weight <= self._budget:
                self._known[key] = value, weight
                self._held += weight
            while self._held > self._budget:
                self._held -= self._known.popitem(last=False)[1][1]
        return value


def marker_of(mark: str, number: int) -> str:
    """What stands for content `number` in the second rendering. mark: a character that nothing else holds."""
    return f"{mark}{number}{mark}"


def places(rendered: str, marked: str, mark: str, contents: Sequence[str]) -> list[tuple[int, int]]:
    """Where each content stands in `rendered`, found by `marked`, a rendering in which content i is `marker_of(mark, i)`.

    Ends early where the two renderings cannot be laid side by side: contents that the template dropped, repeated or reordered,
    or that change what it writes around them.
    """
    parts = re.split(f"{mark}([0-9]+){mark}", marked)
    around = parts[::2]
    if parts[1::2] != [str(i) for i in range(len(contents))] or not rendered.startswith(around[0]):
        return []
    found: list[tuple[int, int]] = []
    at = len(around[0])
    for content, after in zip(contents, around[1:], strict=True):
        last = len(found) + 1 == len(contents)
        end = at + len(content)
        if last:
            end = len(rendered) - len(after)
        elif not (rendered.startswith(content, at) and rendered.startswith(after, end)):
            end = rendered.find(after, at)
        if end < at or not rendered.startswith(after, end):
            break
        found.append((at, end))
        at = end + len(after)
    return found


def splice(
    tokenizer: Tokenizer, memo: Memo, rendered: str, place: tuple[int, int], content: str, generated: Generated, nonce: str
) -> Splice | None:
    """The ids that may stand for this answer, whole or as far as its text goes; None where they spell something else.

    rendered: with `nonce` characters, which count as nothing. place: of the answer in it. content: all of the answer.
    """
    kept = rendered[slice(*place)].replace(nonce, "")
    if len(kept) <= generated.start or not content.startswith(kept):
        return None
    ids, lead = memo.get(("usable", generated.ids), len(generated.ids), lambda: _usable(tokenizer, generated.ids))
    if not ids:
        return None
    lead = 0 if generated.start else lead
    start = _after(rendered, place[0], generated.start, nonce)
    text = rendered[start - lead : start] + kept[generated.start :]
    count, chars = memo.get(("spelled", ids, text), len(ids) + len(text), lambda: _spelled(tokenizer, ids, text))
    if chars <= lead:
        return None
    return Splice(start - lead, _after(rendered, start, chars - lead, nonce), ids[:count])


def _usable(tokenizer: Tokenizer, generated: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The ids without an end token, and how many spaces they write that the reader of an answer did not see.

    None of them if one writes no text: a special token could not be seen, nor an id of another vocabulary.
    """
    ids = list(generated)
    while ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    if any(i in tokenizer.special_ids or not tokenizer.token_bytes(i) for i in ids):
        return (), 0
    first = ids[:LEAD_IDS]
    return tuple(ids), len(tokenizer.decode(first)) - len(tokenizer.decode(first, start=True))


def _spelled(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> tuple[int, int]:
    """How many of the ids, and of the characters, agree. (0, 0) if they differ before either ends.

    An id that goes on beyond the end of the text (a stop string within it, trimmed white space) does not count.
    """
    decoder = tokenizer.stream()
    count = chars = at = 0
    for number, token in enumerate(ids, 1):
        piece = decoder.push(token)
        if not text.startswith(piece, at):
            return (count, chars) if piece.startswith(text[at:]) else (0, 0)
        at += len(piece)
        if not decoder.pending:
            count, chars = number, at
    rest = decoder.flush()
    if rest and text.startswith(rest, at):
        return len(ids), at + len(rest)
    return (count, chars) if not rest or at == len(text) else (0, 0)


def _after(text: str, start: int, count: int, nonce: str) -> int:
    """The position `count` characters on, nonces not counted."""
    end = start + count
    while (missing := count - (end - start - text.count(nonce, start, end))) > 0:
        end += missing
    return end
