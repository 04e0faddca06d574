"""Interrupted runs: what is noted of a row while it runs, and how a later one becomes its rest.

    admitted -> noted now and then -> complete: forgotten
                                   -> stopped: kept, in memory and on disk -> resumed: the same key, noted on -> ...
                                   -> the process is gone: on disk          -> resumed by another one

A row draws by its position, so whatever was drawn after the last note is drawn again, the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .cache import shelf
from .cache.shelf import Shelf
from .cache.stopped import Stopped
from .config import RuntimeConfig
from .errors import RequestError
from .events import TokenRecord
from .types import CompletionRequest, Continued, Left, PreparedPrompt, Resumed, SamplingSpec

MOST_KEPT = 64
MOST_STATE_BYTES = 2**26
"""Of runs that were stopped in this kernel, so many can be resumed, and their state is kept as far as it fits."""
_WHAT = {
    "model": "the model, the type of its weights, or what it is computed with",
    "prompt": "the prompt",
    "stops": "the stop strings",
    "limits": "max_tokens or the context limit",
    "sampling": "the sampling settings",
    "seed": "the seed",
}


def folder(config: RuntimeConfig) -> Path:
    """Where the records lie: with the prefix cache's files."""
    return config.prefix_dir / "resume"


def policy_of(
    prompt: PreparedPrompt, request: CompletionRequest, sampling: SamplingSpec, seed: int, *, model: str, context: int
) -> tuple[tuple[str, str], ...]:
    """Digests of all that decides what a row draws, by what it is. seed: counts only where it was asked for.

    request, sampling: resolved with the model's own defaults. model: names its weights, and what decides the bits of their results.
    """
    values: dict[str, Any] = {
        "model": model,
        "prompt": prompt.ids,
        "stops": request.stop,
        "limits": [request.max_tokens, context],
        "sampling": dataclasses.asdict(replace(sampling, seed=None)),
        "seed": None if sampling.seed is None else seed,
    }
    return tuple((what, hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()) for what, value in values.items())


def check(resumed: Resumed, policy: tuple[tuple[str, str], ...]) -> None:
    """Raise RequestError if a run would go on under another policy than the one it began with."""
    if resumed.policy == policy:
        return
    now, then = dict(policy), dict(resumed.policy)
    changed = [_WHAT.get(what, what) for what in (*now, *(then.keys() - now.keys())) if now.get(what) != then.get(what)]
    raise RequestError(
        f"The interrupted answer cannot go on: changed since then: {'; '.join(changed)}.",
        "Set it back and resume again, or ask anew: another setting would give another answer.",
    )


class Resumes:
    """An engine's interrupted runs.

    Owner: engine thread. shelf: their records on disk; None if nothing is to be written. Invariant: at most MOST_KEPT runs, the
    state of which has at most MOST_STATE_BYTES.
    """

    def __init__(self, shelf: Shelf | None = None) -> None:
        self._shelf = shelf
        self._stopped: OrderedDict[str, Stopped] = OrderedDict()

    @classmethod
    def start(cls, config: RuntimeConfig, disk: bool, notice: Callable[[str], None]) -> Resumes:
        """disk: whether the prefix cache has files; without, the records have none either."""
        return cls(Shelf(folder(config), notice) if disk else None)

    def note(self, stopped: Stopped) -> None:
        """It can be resumed from here; a later note of the same run replaces this one."""
        if stopped.ended:
            self._stopped.pop(stopped.key, None)
            self._stopped[stopped.key] = stopped
            self._trim()
        if self._shelf is not None:
            self._shelf.put(stopped)

    def _trim(self) -> None:
        while len(self._stopped) > MOST_KEPT:
            self.forget(next(iter(self._stopped)))
        left_bytes = MOST_STATE_BYTES
        for key, stopped in reversed(list(self._stopped.items())):
            nbytes = stopped.left.nbytes if stopped.left is not None else 0
            if nbytes > left_bytes:
                self._stopped[key] = stopped.without_state()
            else:
                left_bytes -= nbytes

    def forget(self, key: str) -> None:
        """It is complete."""
        self._stopped.pop(key, None)
        if self._shelf is not None:
            self._shelf.drop(key)

    def adopt(self, key: str) -> None:
        """This engine goes on with a run that another one may have left behind."""
        if self._shelf is not None:
            self._shelf.adopt(key)

    def whole(self, request: CompletionRequest) -> CompletionRequest:
        """The rest of a run with all that is known of it here: a token that was drawn and not shown any more, state to take up."""
        if request.resumed is None:
            return request
        known = self._stopped.get(request.resumed.key)
        if known is None:
            return request
        shown, drawn = ([token.id for token in tokens] for tokens in (request.continuation, known.request.continuation))
        if drawn[: len(shown)] != shown:
            return request
        return replace(request, continuation=known.request.continuation, resumed=replace(request.resumed, left=known.left))

    def close(self, timeout_s: float) -> None:
        """Write what waits to be written. Idempotent."""
        self._stopped.clear()
        if self._shelf is not None:
            self._shelf.close(timeout_s)


class Trail:
    """One row's identity over its interruptions, and what is noted of it.

    Owner: engine thread. ticket: what a run needs to be the rest of this one. request: what the row was asked, with what it goes on
    from. model: its name, for people.
    """

    def __init__(self, request: CompletionRequest, ticket: Resumed, model: str, keeper: Resumes) -> None:
        self.request, self.ticket, self._model, self._keeper = request, ticket, model, keeper
        self._left = request.resumed.left if request.resumed is not None else None

    def note(self, tokens: Sequence[Continued], left: Left | None, *, ended: bool, prompt: tuple[int, int]) -> None:
        """tokens: all so far. left: state of a part of them; None leaves it at what was noted before. prompt: how many of its tokens
        came from the prefix cache, and of these from disk."""
        if left is not None and left.length < len(self.ticket.prompt) + len(tokens):
            self._left = left
        resumed = replace(self.ticket, left=self._left, cached_tokens=prompt[0], ssd_tokens=prompt[1])
        request = replace(self.request, samples=1, continuation=tuple(tokens), resumed=resumed)
        self._keeper.note(Stopped(request, self._model, int(time.time()), ended))

    def forget(self) -> None:
        self._keeper.forget(self.ticket.key)


def ticket_of(request: CompletionRequest, prompt: PreparedPrompt, seed: int, policy: tuple[tuple[str, str], ...]) -> Resumed:
    """What a row is known by from its admission on: its own, or that of the run whose rest it is."""
    if request.resumed is not None:
        return replace(request.resumed, left=None)
    explicit, given = request.sampling.seed is not None, len(request.continuation)
    return Resumed(uuid.uuid4().hex, seed, explicit, policy, prompt.ids, prompt.stable, given)


# -- for people: any thread, without an engine -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A run that a process which is gone left behind. tokens: so far. at: seconds since 1970. request: goes on from there."""

    key: str
    model: str
    at: int
    tokens: int
    request: CompletionRequest


def interrupted(config: RuntimeConfig) -> list[Interrupted]:
    """What can be resumed of kernels that are gone, newest first. Damaged records are set aside."""
    root = folder(config)
    newest: dict[str, Stopped] = {}
    for found in shelf.waiting(root):
        if found.key not in newest and (one := shelf.read(root, found)) is not None:
            newest[one.key] = one
    return [Interrupted(key, one.model, one.at, len(one.request.continuation), one.request) for key, one in newest.items()]


def clear(config: RuntimeConfig) -> int:
    """Delete what kernels that are gone left behind; how many files."""
    return shelf.clear(folder(config))


def continued(records: Sequence[TokenRecord]) -> tuple[Continued, ...]:
    """A run's tokens as what another goes on from."""
    return tuple(map(Continued.of, records))
