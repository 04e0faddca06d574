"""What enters a group: one prompt and the rows that start from it. Values only; the group fills in its own state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from .delivery import RowConsumer
from .types import Left, SamplingSpec, TokenId


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What a group needs to run one row.

    max_tokens: tokens to produce at most, >= 1. limit: positions the row may ever hold (the context length).
    exempt: ids that XTC never drops. start: output positions that the prompt's end already holds (a continued run).
    """

    consumer: RowConsumer
    sampling: SamplingSpec
    seed: int
    max_tokens: int
    limit: int
    exempt: tuple[int, ...] = ()
    start: int = 0


@dataclass(eq=False, slots=True)
class Entry:
    """One prompt on its way in, and the rows that will start from it: the samples of a request share one prefill.

    done: prompt tokens in the state. state: the group's own handle of that state. chunk: tokens of one prefill window at most;
    0 leaves it to the group. stable: leading ids that a later turn keeps. session: whose state the prefix cache prefers among
    equals. known: tokens that the cache would give, as last seen; cached: those it gave, of which ssd_tokens came from disk.
    prefix: the group's own handle of what it takes from the cache and gives to it.
    steps_from: of an interrupted row's rest, ids from here on were computed one at a time, and are again where they are not kept;
    None: in any windows. left: state that the interrupted row left behind.
    """

    ids: tuple[TokenId, ...]
    rows: deque[RowSpec]
    done: int = 0
    state: Any = None
    chunk: int = 0
    stable: int = 0
    session: str | None = None
    known: int = 0
    cached: int = 0
    ssd_tokens: int = 0
    prefix: Any = None
    steps_from: int | None = None
    left: Left | None = None

    @property
    def target(self) -> int:
        """Tokens to prefill: all but the last, which becomes the pending token of the row's first step."""
        return len(self.ids) - 1

    @property
    def replaying(self) -> bool:
        """What comes next was once a step of one token."""
        return self.steps_from is not None and self.steps_from <= self.done < self.target

    @property
    def unread(self) -> int:
        """Tokens that are still to be computed, as far as is known."""
        return self.target - max(self.done, self.known)

    @property
    def final_tokens(self) -> int:
        """Positions that the longest of its rows may come to hold."""
        return max(min(len(self.ids) + spec.max_tokens - spec.start, spec.limit) for spec in self.rows)

    def drop_cancelled(self) -> None:
        """Take out the rows whose reader asked to stop, and tell them."""
        for spec in [s for s in self.rows if s.consumer.cancelled]:
            self.rows.remove(spec)
            notify(spec.consumer, spec.consumer.cancel)

    def fail(self, error: BaseException) -> None:
        """End every row that has not joined."""
        while self.rows:
            spec = self.rows.popleft()
            notify(spec.consumer, lambda s=spec: s.consumer.fail(error))


class Notification(Protocol):
    def __call__(self) -> object: ...


def notify(consumer: RowConsumer, action: Notification) -> None:
    """Call a consumer; one that raises ends its own row and harms nobody else.

    BaseException here and wherever a row's fault is caught: a panic in a native library (tokenizers) is no Exception.
    """
    try:
        action()
    except BaseException as error:
        try:
            consumer.fail(error)
        except BaseException:
            return
