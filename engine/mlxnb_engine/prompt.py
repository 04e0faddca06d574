"""`PromptPreparer`: a request's messages or raw text to ids, in which no content ever becomes a control token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice, pairwise, takewhile
from typing import Any

from .errors import CapacityExceeded, RequestError
from .markers import check_text
from .splice import Memo, Splice, marker_of, places, splice
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
    The exceptions are for what a model wrote itself: see `_turns`, and `_splices`, which puts its own ids back.
    Owner: the loaded model; any thread. It only remembers what it has encoded.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, context_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._context_tokens = context_tokens
        self._memo = Memo()

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
        nonce, mark = self._nonces(messages, request.prefill)
        turns = self._turns(messages, nonce, values)
        prefill = self._break(request.prefill, nonce)
        rendered = self._template.render(turns, **values) + prefill
        self._check_size(rendered)
        # White space at the end of a prefill goes, with a template that trims, if nothing follows it.
        probes = PROBES if request.prefill == request.prefill.rstrip() else (*PROBES, "")
        later = [self._appended(turns, prefill, probe, values) for probe in probes]
        splices: list[Splice] = []
        if later[0] is not None and any(m.generated is not None for m in messages):
            body = rendered[: len(rendered) - len(prefill)]
            splices = self._splices(messages, turns, body, _common_length(body, later[0]), (nonce, mark), values)
        ids = self._encode(rendered, splices, nonce)
        if not ids:
            raise RequestError("The chat template made an empty prompt.", "Write something, or use --no-template.")
        stable = self._stable(rendered, ids, later, splices, nonce)
        spliced = sum(len(one.ids) for one in splices)
        return PreparedPrompt(tuple(map(TokenId, ids)), stable, rendered.replace(nonce, ""), spliced)

    # -- content -------------------------------------------------------------------------------------------------

    def _nonces(self, messages: Sequence[Message], prefill: str) -> tuple[str, str]:
        """Two characters that nothing in this prompt holds."""
        assert self._template is not None
        used = (*(m.content for m in messages), prefill, self._template.source)
        free = list(islice((nonce for nonce in NONCES if not any(nonce in text for text in used)), 2))
        if len(free) < 2:
            raise RequestError(f"The conversation uses {len(NONCES)} private-use characters, which leaves none for us.", "Remove some.")
        return free[0], free[1]

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

    # -- answers as their model wrote them ---------------------------------------------------------------------------

    def _splices(
        self,
        messages: Sequence[Message],
        turns: Sequence[Mapping[str, str]],
        body: str,
        kept: int,
        nonces: tuple[str, str],
        values: dict[str, Any],
    ) -> list[Splice]:
        """The earlier answers whose own ids may stand for their text, in order.

        body: the rendering without a prefill. kept: how much of it will still stand before the new answer once that is an earlier
        one (a switch for reasoning may not). The template is rendered once more with a mark for each answer and for the last
        message, which shows where it put them. An answer that it changed (old reasoning dropped, say), or that it introduces in
        other words than a new one, could not reuse what was computed for it: it stays plain text.
        """
        assert self._template is not None
        nonce, mark = nonces
        last = len(messages) - 1
        marks = [i for i, m in enumerate(messages) if i == last or (m.role == "assistant" and m.generated is not None)]
        marked = [dict(turn) for turn in turns]
        for number, index in enumerate(marks):
            marked[index]["content"] = marker_of(mark, number)
        try:
            again = self._template.render(marked, **values)
        except RequestError:  # a template that looks into what an answer says
            return []
        spots = places(body, again, mark, [turns[index]["content"] for index in marks])
        if len(spots) < len(marks):
            return []
        opening = body[spots[-1][1] : kept]
        found: list[Splice] = []
        for spot, message in zip(spots, (messages[index] for index in marks), strict=True):
            if message.role != "assistant" or message.generated is None:
                continue
            one = splice(self._tokenizer, self._memo, body, spot, message.content, message.generated, nonce)
            if one is not None and body.endswith(opening, found[-1].end if found else 0, min(one.start, spot[0])):
                found.append(one)
        return found

    def _encode(self, text: str, splices: Sequence[Splice], nonce: str) -> list[int]:
        """Ids of a rendering, BOS in front, with these stretches as their models wrote them."""
        ids: list[int] = []
        at = 0
        for one in splices:
            ids += self._piece(text[at : one.start], nonce, at)
            ids += one.ids
            at = one.end
        return self._with_bos([*ids, *self._piece(text[at:], nonce, at)])

    def _piece(self, text: str, nonce: str, at: int) -> Sequence[int]:
        """Ids of a piece that begins at this position of its text; behind the start it follows a marker or spliced ids."""
        encode = self._tokenizer.encode_after if at else self._tokenizer.encode_broken
        return self._memo.get(("piece", text, nonce, at > 0), 2 * len(text), lambda: tuple(encode(text, nonce)))

    # -- the stable boundary ---------------------------------------------------------------------------------------

    def _appended(self, turns: list[dict[str, str]], prefill: str, probe: str, values: dict[str, Any]) -> str | None:
        """The rendering once an answer and a next question are there; None if the template does not allow them."""
        assert self._template is not None
        more = [{"role": "assistant", "content": prefill + probe}, {"role": "user", "content": "A"}]
        try:
            return self._template.render([*turns, *more], **values)
        except RequestError:
            return None

    def _stable(self, rendered: str, ids: list[int], later: Sequence[str | None], splices: Sequence[Splice], nonce: str) -> int:
        """How many leading ids every later rendering keeps; 0 if one cannot be made.

        Only the text from the last common marker or spliced answer on is encoded again: what precedes either does not depend on
        what follows it.
        """
        stable = len(ids)
        for other in later:
            if other is None:
                return 0
            common = _common_length(rendered, other)
            both = [one for one in splices if one.end <= common]
            cut = max(self._tokenizer.last_marker(rendered[:common]), both[-1].end if both else 0)
            tail = list(self._piece(rendered[cut:], nonce, cut)) if both == list(splices) else None
            if tail is not None and ids[len(ids) - len(tail) :] == tail:
                kept, new = len(ids) - len(tail), list(self._piece(other[cut:], nonce, cut))
            else:
                kept, tail, new = 0, ids, self._encode(other, both, nonce)
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
