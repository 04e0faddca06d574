"""What a generation tells its readers: an append-only, numbered log with exactly one terminal event.

Every event is frozen and JSON-able (`to_dict`). `seq` grows by one within a generation, from 0; `t` is seconds of a
monotonic clock since the request was submitted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

Origin = Literal["sampled", "filled", "echo", "drafted", "forced"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the likeliest tokens at a position. logprob: nats, after processors, before the filters."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One produced token.

    text: the token's own bytes decoded on their own (U+FFFD where a character is split over tokens). t: seconds since submit.
    logprob, rank (0 = likeliest), top: only if the request captures log probabilities. by_hand: a person chose it, whatever
    its origin says. explained: the stages of the choice (`sampling.ExplainData`), if the request asks for them.
    """

    id: int
    text: str
    origin: Origin
    t: float
    logprob: float | None = None
    rank: int | None = None
    top: tuple[Alternative, ...] = ()
    by_hand: bool = False
    explained: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Event:
    seq: int
    t: float
    kind: ClassVar[str] = "event"
    terminal: ClassVar[bool] = False

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, slots=True)
class LoadProgress(Event):
    """The model is being fetched, hashed or loaded. total is 0 when unknown; unit is bytes."""

    phase: str
    done: int
    total: int
    kind: ClassVar[str] = "load"


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The row was admitted. seed: the one in force, explicit or drawn.

    cached_tokens: of the prompt's, taken from the prefix cache instead of computed; ssd_tokens: of those, read from disk.
    """

    model: str
    prompt_tokens: int
    seed: int
    seed_explicit: bool
    cached_tokens: int = 0
    ssd_tokens: int = 0
    kind: ClassVar[str] = "started"


@dataclass(frozen=True, slots=True)
class PrefillProgress(Event):
    """done of total prompt tokens are in the state. cached_tokens, ssd_tokens: of those done, as in `Started`."""

    done: int
    total: int
    cached_tokens: int = 0
    ssd_tokens: int = 0
    kind: ClassVar[str] = "prefill"


@dataclass(frozen=True, slots=True)
class Tokens(Event):
    """New tokens. text is what became visible: it lags the tokens while a character or a stop string is undecided."""

    tokens: tuple[TokenRecord, ...]
    text: str
    kind: ClassVar[str] = "tokens"


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """Complete. reason: "stop" or "length". stop: the stop string that matched, if one did. text: all visible text."""

    reason: str
    text: str
    usage: dict[str, Any]
    stop: str | None = None
    kind: ClassVar[str] = "finished"
    terminal: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """error: kind of the typed error (errors.ERROR_KINDS). text: what had been produced."""

    error: str
    message: str
    hint: str
    text: str
    usage: dict[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "failed"
    terminal: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    """Stopped by a person or by shutdown. text: what had been produced."""

    text: str
    usage: dict[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "cancelled"
    terminal: ClassVar[bool] = True
