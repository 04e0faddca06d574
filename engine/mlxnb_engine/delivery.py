"""From token ids to what readers see: text, stop strings, end of sequence, length, usage. One `Delivery` per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from . import events as ev
from .errors import Cancelled, EngineDead
from .resume import Trail, continued
from .session import Generation
from .stopping import StopMatcher
from .tokenizer import Tokenizer
from .types import Continued, FinishReason, Left, PreparedPrompt, TokenId


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token as the sampler chose it. logprobs: (chosen, rank, alternatives) if the row captures them."""

    id: TokenId
    logprobs: tuple[float, int, list[tuple[int, float]]] | None = None
    explained: dict[str, Any] | None = None


class RowConsumer(Protocol):
    """What a group needs of the reader's side of a row. A consumer that raises ends its own row only."""

    @property
    def cancelled(self) -> bool: ...
    def reused(self, tokens: int, ssd_tokens: int) -> None: ...
    def admit(self) -> None: ...
    def prefilled(self, done: int, total: int) -> None: ...
    def deliver(self, token: Drawn) -> FinishReason | None: ...
    def finish(self, reason: FinishReason) -> None: ...
    def cancel(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def note(self, left: Left | None, undelivered: Drawn | None = None, *, ended: bool = False) -> None: ...


_LABEL_CHARS = 40
_NOTE_EVERY_S = 5.0
"""A prompt that is read for long is noted as often; a running row is noted by its group."""


@dataclass(eq=False, slots=True)
class _Counts:
    produced: int = 0
    steps: int = 0
    declined: list[str] = field(default_factory=list)


class Delivery:
    """The writing end of one `Generation`.

    Owner: engine thread. Invariant: after `finish`, `cancel` or `fail` nothing more is delivered. EOS is counted, never
    delivered; text is held back while a character or a stop string is undecided.
    """

    def __init__(
        self, generation: Generation, prompt: PreparedPrompt, tokenizer: Tokenizer, model: str, seed: int, trail: Trail | None = None
    ) -> None:
        """trail: by which the run can be resumed; None if it cannot. Its request is the one that counts."""
        request = trail.request if trail is not None else generation.request
        self.generation, self._trail, self._noted_at = generation, trail, generation.now
        self._given, self._resumed = request.continuation, request.resumed
        generation.ticket = trail.ticket if trail is not None else None
        self.prompt_tokens = len(prompt.ids)
        self._tokenizer = tokenizer
        # The first token of a chat answer begins a text; a raw completion or a prefilled answer goes on within one.
        self._decoder = tokenizer.stream(start=request.messages is not None and not request.prefill)
        self._matcher = StopMatcher(request.stop)
        self._max_tokens = request.max_tokens
        self._model, self._seed = model, seed
        self._visible: list[str] = []
        self._counts = _Counts()
        self.cached_tokens = self.ssd_tokens = 0
        self._regained = 0
        if self._resumed is not None:
            self.cached_tokens, self.ssd_tokens = self._resumed.cached_tokens, self._resumed.ssd_tokens
        self._admitted: float | None = None
        self._matched: str | None = None

    @property
    def label(self) -> str:
        """The beginning of what was asked, for a person."""
        request = self.generation.request
        asked = request.text if request.text is not None else request.messages[-1].content if request.messages else ""
        return " ".join(asked[:200].split())[:_LABEL_CHARS]

    @property
    def cancelled(self) -> bool:
        """True also for a row that ended some other way (its consumer failed, the client was closed): nobody reads it any more."""
        return self.generation.cancel_requested or self.generation.done

    def reused(self, tokens: int, ssd_tokens: int) -> None:
        """So many leading tokens come from the prefix cache, `ssd_tokens` of them from disk. Before `admit`.

        The samples of a request share one prefill, and each reports what that took: `prompt_tokens` counts the prompt for each, too.
        """
        if self._resumed is not None:
            self._regained = tokens
            return  # its prompt was read, and counted, before it was interrupted
        self.cached_tokens = min(tokens, self.prompt_tokens)  # a continued run takes some of its own answer as well
        self.ssd_tokens = min(ssd_tokens, self.cached_tokens)

    def admit(self) -> None:
        """The row got a place: tell readers its seed and prompt length."""
        if self._admitted is not None:
            return
        self._admitted = self.generation.now
        explicit = self.generation.request.sampling.seed is not None
        explicit = explicit if self._resumed is None else self._resumed.explicit
        cached, ssd = self.cached_tokens, self.ssd_tokens
        self.generation.emit(lambda s, t: ev.Started(s, t, self._model, self.prompt_tokens, self._seed, explicit, cached, ssd))
        self._replay()

    def _replay(self) -> None:
        """Show the tokens that this run goes on from, so that its text and its token list are whole."""
        shown = self._given
        if not shown:
            return
        if self._resumed is not None and shown[-1].id in self._tokenizer.eos_ids:
            shown = shown[:-1]  # drawn when the run was stopped; an end of text is counted, never delivered
        text, self._matched = self._matcher.push("".join(self._decoder.push(c.id) for c in shown))
        self._visible.append(text)
        self._counts.produced = len(self._given)
        self._counts.steps = 0 if self._resumed is None else len(self._given) - self._resumed.given
        records = tuple(map(self._replayed, shown))
        self.generation.emit(lambda s, t: ev.Tokens(s, t, records, text))

    def _replayed(self, token: Continued) -> ev.TokenRecord:
        text, origin = self._tokenizer.token_text(token.id), cast(ev.Origin, token.origin)
        return ev.TokenRecord(token.id, text, origin, self.generation.now, token.logprob, token.rank, token.top, token.by_hand)

    @property
    def settled(self) -> FinishReason | None:
        """The reason if the row is over before its first draw: nothing left to produce, EOS or a stop string already there."""
        if self._matched is not None or (self._given and self._given[-1].id in self._tokenizer.eos_ids):
            return "stop"
        return "length" if self._counts.produced >= self._max_tokens else None

    def note(self, left: Left | None, undelivered: Drawn | None = None, *, ended: bool = False) -> None:
        """The run can be resumed from here. left: state of a part of its tokens. undelivered: drawn when the row had been cancelled."""
        if self._trail is None or (self.generation.done and not ended):
            return
        self._noted_at = self.generation.now
        tokens = [token for event in self.generation.read() if isinstance(event, ev.Tokens) for token in event.tokens]
        if undelivered is not None:
            tokens.append(self._record(undelivered))
        self._trail.note(continued(tokens), left, ended=ended, prompt=(self.cached_tokens, self.ssd_tokens))

    def prefilled(self, done: int, total: int) -> None:
        cached, ssd = self.cached_tokens, self.ssd_tokens
        self.generation.emit(lambda s, t: ev.PrefillProgress(s, t, done, total, cached, ssd))
        if self.generation.now - self._noted_at >= _NOTE_EVERY_S:
            self.note(None)

    def deliver(self, token: Drawn) -> FinishReason | None:
        """Take one produced token; the reason if the row ends here (the caller then calls `finish`)."""
        self._counts.produced += 1
        self._counts.steps += 1
        if token.id in self._tokenizer.eos_ids:
            if token.explained is not None:  # who asks how a token was chosen wants to see this choice too
                ending = self._record(token)
                self.generation.emit(lambda s, t: ev.Tokens(s, t, (ending,), ""))
            return "stop"
        text, self._matched = self._matcher.push(self._decoder.push(token.id))
        record = self._record(token)
        self.generation.emit(lambda s, t: ev.Tokens(s, t, (record,), text))
        self._visible.append(text)
        if self._matched is not None:
            return "stop"
        return "length" if self._counts.produced >= self._max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """Deliver what was held back and end the row."""
        if self.generation.done:
            return
        if self._matched is None:
            self._flush()
            if self._matched is not None:
                reason = "stop"  # a stop string that had waited for a longer one to overtake it
        usage = self._usage(reason)
        text = "".join(self._visible)
        self.generation.end(lambda s, t: ev.Finished(s, t, reason, text, usage, self._matched))
        if self._trail is not None:
            self._trail.forget()

    def cancel(self) -> None:
        """End the row as cancelled, keeping its text."""
        if self.generation.done:
            return
        self._flush()
        text, usage = "".join(self._visible), self._usage("cancelled")
        self.generation.end(lambda s, t: ev.Cancelled(s, t, text, usage))
        self.note(None, ended=True)

    def fail(self, error: BaseException) -> None:
        ended = self.generation.fail(error, "".join(self._visible), self._usage("error"))
        if not ended or self._trail is None:
            return
        # A run that was resumed may have failed by what was computed beside it: its record is all that is left of it.
        if self._resumed is not None or isinstance(error, Cancelled | EngineDead):
            self.note(None, ended=True)
        else:
            self._trail.forget()

    def _flush(self) -> None:
        """Readers that only append deltas must end with the same text as the terminal event carries."""
        rest, self._matched = self._matcher.push(self._decoder.flush())
        if self._matched is None:
            rest += self._matcher.flush()
            self._matched = self._matcher.matched  # a match that waited for a longer one is decided here
        if rest:
            self.generation.emit(lambda s, t: ev.Tokens(s, t, (), rest))
            self._visible.append(rest)

    def _record(self, token: Drawn) -> ev.TokenRecord:
        text, now = self._tokenizer.token_text(token.id), self.generation.now
        if token.explained is not None:
            for candidate in token.explained["candidates"]:
                candidate["text"] = self._tokenizer.token_text(candidate["id"])
        if token.logprobs is None:
            return ev.TokenRecord(token.id, text, "sampled", now, explained=token.explained)
        chosen, rank, top = token.logprobs
        alternatives = tuple(ev.Alternative(i, self._tokenizer.token_text(i), p) for i, p in top)
        return ev.TokenRecord(token.id, text, "sampled", now, chosen, rank, alternatives, explained=token.explained)

    def _usage(self, reason: FinishReason) -> dict[str, Any]:
        timing, now = self.generation.timing, self.generation.now
        phases: Mapping[str, float | None] = {
            "queued_s": self._admitted,
            "first_token_s": timing.first_token,
            "total_s": now,
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, **({"ssd_tokens": n} if (n := self.ssd_tokens) else {})},
            "completion_tokens": self._counts.produced,
            **({"continued_tokens": n} if (n := len(self._given) if self._resumed is None else self._resumed.given) else {}),
            **({"resumed": {"tokens": len(self._given), "cached_tokens": self._regained}} if self._resumed is not None else {}),
            "finish_reason": reason,
            "execution": {
                "proposers": [],
                "declined": self._counts.declined,
                "codec": "bf16",
                "append_width": 1,
                "steps": self._counts.steps,
            },
            "timing": {k: round(v, 6) for k, v in phases.items() if v is not None},
        }
