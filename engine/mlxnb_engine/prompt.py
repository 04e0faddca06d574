"""`PromptPreparer`: a request's messages or raw text to ids, in which no content ever becomes a control token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, takewhile
from typing import Any

from .errors import CapacityExceeded, RequestError
from .markers import check_text
from .template import ChatTemplate
from .tokenizer import Tokenizer
from .types import CompletionRequest, Message, PreparedPrompt, TokenId

ROLES = ("system", "user", "assistant", "tool")
# What a later turn may begin with, to see how much of this prompt stays: text, and white space that could merge with the scaffolding.
PROBES = ("A", "\n\nA")
# Private-use characters; one that no content holds marks the places where no marker may form.
NONCES = tuple(chr(c) for c in chain(range(0xE000, 0xE100), range(0xF0000, 0xF0100)))


class PromptPreparer:
    """Coordinates template and tokenizer; holds no syntax of either.

    Rules: the template's own text is encoded with markers on, every content (and the prefill) with markers off. For content without
    a marker that is exactly the encoding of the whole rendering, as in mlx-lm. Exactly one BOS: the template's, else ours if the
    tokenizer adds one. Raw text is the caller's own scaffolding: markers on.
    How: a nonce character goes into each place where content could form a marker (`Tokenizer.breaks`), through the template, and
    out again while encoding (`encode_broken`). So a template may trim, reorder or repeat content; it only cannot see markers in it.
    The exception is what a model wrote itself: see `_turns`.
    Owner: the loaded model; immutable; any thread.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, context_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._context_tokens = context_tokens

    def prepare(self, request: CompletionRequest) -> PreparedPrompt:
        """Ids, stable boundary and text. Raises RequestError for what cannot be a prompt, CapacityExceeded for what cannot fit."""
        parts = [m.content for m in request.messages] if request.messages is not None else [request.text or ""]
        for part in (*parts, request.prefill):
            check_text(part)
        if request.messages is None:
            return self._raw(request)
        return self._chat(request.messages, request)

    def _check_size(self, text: str) -> None:
        """Refuse at once what is surely too long, rather than encode megabytes first."""
        limit = self._context_tokens
        if limit is not None and len(text) > limit and self._tokenizer.fewest_tokens(text) > limit:
            raise CapacityExceeded(
                f"The prompt has {len(text):,} characters, and the context is {limit:,} tokens.",
                "Shorten the prompt, or what {{ }} inserts.",
            )

    def _raw(self, request: CompletionRequest) -> PreparedPrompt:
        if request.thinking is not None:
            raise RequestError("Raw text has no switch for thinking.", "Leave --thinking away, or drop --no-template.")
        text = (request.text or "") + request.prefill
        self._check_size(text)
        ids = self._tokenizer.encode(text, control=True)
        if self._tokenizer.add_bos and ids[:1] != [self._tokenizer.bos_id]:
            ids = self._with_bos(ids)
        if not ids:
            raise RequestError("The prompt is empty.", "Write at least one character.")
        return PreparedPrompt(tuple(map(TokenId, ids)), len(ids), text)

    def _with_bos(self, ids: list[int]) -> list[int]:
        """One BOS in front if the tokenizer adds one and the template gave none. Content cannot hold one."""
        bos = self._tokenizer.bos_id
        return [bos, *ids] if self._tokenizer.add_bos and bos is not None and bos not in ids else ids

    def _chat(self, messages: Sequence[Message], request: CompletionRequest) -> PreparedPrompt:
        if self._template is None:
            raise RequestError("This model has no chat template.", "Use --no-template to give it plain text, or a model made for chat.")
        if not messages:
            raise RequestError("The conversation is empty.", "Give at least one message.")
        for message in messages:
            if message.role not in ROLES:
                raise RequestError(f"The role {message.role!r} is unknown.", f"Roles are {', '.join(ROLES)}.")
        values: dict[str, Any] = {**self._template.thinking_values(request.thinking)}
        nonce = self._nonce(messages, request.prefill)
        turns = self._turns(messages, nonce, values)
        prefill = self._break(request.prefill, nonce)
        rendered = self._template.render(turns, **values) + prefill
        self._check_size(rendered)
        ids = self._with_bos(self._tokenizer.encode_broken(rendered, nonce))
        if not ids:
            raise RequestError("The chat template made an empty prompt.", "Write something, or use --no-template.")
        stable = self._stable(rendered, ids, [self._appended(turns, prefill, probe, values) for probe in PROBES], nonce)
        return PreparedPrompt(tuple(map(TokenId, ids)), stable, rendered.replace(nonce, ""))

    # -- content -------------------------------------------------------------------------------------------------

    def _nonce(self, messages: Sequence[Message], prefill: str) -> str:
        assert self._template is not None
        used = (*(m.content for m in messages), prefill, self._template.source)
        for nonce in NONCES:
            if not any(nonce in text for text in used):
                return nonce
        raise RequestError(f"The conversation uses {len(NONCES)} private-use characters, which leaves none for us.", "Remove some.")

    def _break(self, content: str, nonce: str, keep: frozenset[str] = frozenset()) -> str:
        """Content with a nonce inside each possible marker; `keep` names markers that may stay whole."""
        places = [0, *self._tokenizer.breaks(content, keep), len(content)]
        return nonce.join(content[a:b] for a, b in pairwise(places)) if len(places) > 2 else content

    def _turns(self, messages: Sequence[Message], nonce: str, values: dict[str, Any]) -> list[dict[str, str]]:
        """The messages with their contents broken, as the template gets them.

        A template may look into the assistant's earlier answers for marks of its own, to drop old reasoning say (`</think>`). If
        breaking those changes what the template makes of them, then the assistant's answers, and only they, keep the markers that
        are no special tokens and that the template itself names: text which the model wrote, read as the model's template means it.
        """
        assert self._template is not None
        broken = [{"role": m.role, "content": self._break(m.content, nonce)} for m in messages]
        named = frozenset(x for x in self._tokenizer.structural_markers if x in self._template.source)
        if not any(m.role == "assistant" and x in m.content for m in messages for x in named):
            return broken
        open_turns = [
            {"role": m.role, "content": self._break(m.content, nonce, named)} if m.role == "assistant" else turn
            for m, turn in zip(messages, broken, strict=True)
        ]
        same = self._rendered_text(broken, nonce, values) == self._rendered_text(open_turns, nonce, values)
        return broken if same else open_turns

    def _rendered_text(self, turns: Sequence[Mapping[str, str]], nonce: str, values: dict[str, Any]) -> str:
        assert self._template is not None
        return self._template.render(turns, **values).replace(nonce, "")

    # -- the stable boundary ---------------------------------------------------------------------------------------

    def _appended(self, turns: list[dict[str, str]], prefill: str, probe: str, values: dict[str, Any]) -> str | None:
        """The rendering once an answer and a next question are there; None if the template does not allow them."""
        assert self._template is not None
        more = [{"role": "assistant", "content": prefill + probe}, {"role": "user", "content": "A"}]
        try:
            return self._template.render([*turns, *more], **values)
        except RequestError:
            return None

    def _stable(self, rendered: str, ids: list[int], later: Sequence[str | None], nonce: str) -> int:
        """How many leading ids every later rendering keeps; 0 if one cannot be made.

        Only the text from the last common marker on is encoded again: what precedes a marker does not depend on what follows it.
        """
        stable = len(ids)
        for other in later:
            if other is None:
                return 0
            common = _common_length(rendered, other)
            cut = self._tokenizer.last_marker(rendered[:common])
            tail = self._tokenizer.encode_broken(rendered[cut:], nonce)
            if ids[len(ids) - len(tail) :] == tail:
                kept, new = len(ids) - len(tail), self._tokenizer.encode_broken(other[cut:], nonce)
            else:
                kept, tail, new = 0, ids, self._with_bos(self._tokenizer.encode_broken(other, nonce))
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tail, new, strict=False)))
            stable = min(stable, kept + same)
        return stable


def _common_length(a: str, b: str) -> int:
    """Length of the longest common prefix, by halving: comparisons of slices, not of characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
