"""`FakeClient`: a `CompletionClient` without a model. Real `Generation` objects, scripted events, one worker thread.

Everything a reader of events may meet can be scripted: loading, prefill, tokens, a failure after some tokens, a row that
waits (`hold`), a cancel at any stage, a dead engine. It emits what the real engine emits, in the same order.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxnb_engine import events as ev
from mlxnb_engine import upkeep
from mlxnb_engine.config import resolve
from mlxnb_engine.errors import EngineDead, MlxnbError, RequestError
from mlxnb_engine.session import Generation
from mlxnb_engine.types import MAX_SEED, CompletionRequest, RequestId

Answer = Callable[[CompletionRequest, int], Iterable[str]]


def prompt_of(request: CompletionRequest) -> str:
    """The text that reaches the model: the last message, or the raw text."""
    return request.messages[-1].content if request.messages is not None else (request.text or "")


def echo(request: CompletionRequest, index: int) -> list[str]:
    """The default script: the first words of the prompt, back again."""
    return [word + " " for word in prompt_of(request)[:200].split()] or ["(nothing)"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Row `index` of a request whose prompt contains `text` fails with `error` after `after` tokens."""

    error: MlxnbError
    text: str = ""
    index: int | None = None
    after: int = 1


@dataclass
class _Row:
    generation: Generation
    pieces: list[str]
    prompt_tokens: int
    sent: int = 0
    started: bool = False


class FakeClient:
    """Serves every row in turn, one token each, from its own thread.

    answer: token texts of a row. load: (phase, done, total) events before the start. hold: rows stop after this many
    tokens until `release()`; cancel still works. step_s, between: a pause, and what is called, after each token of all rows.
    Invariant: each accepted row gets exactly one terminal event.
    """

    def __init__(
        self,
        answer: Answer = echo,
        *,
        load: Sequence[tuple[str, int, int]] = (),
        failures: Sequence[Failure] = (),
        hold: int | None = None,
        step_s: float = 0.0,
        between: Callable[[], object] | None = None,
        models: Sequence[str] = ("fake",),
    ) -> None:
        self.requests: list[CompletionRequest] = []
        self.generations: list[Generation] = []
        self.closed = 0
        self.cancels: list[list[str] | None] = []
        self._answer = answer
        self._load = tuple(load)
        self._failures = tuple(failures)
        self._hold = hold
        self._step_s = step_s
        self._between = between
        self._models = list(models)
        self._released = threading.Event()
        self._mail: queue.Queue[_Row | None] = queue.Queue()
        self._dead = False
        self._thread = threading.Thread(target=self._work, name="fake-engine", daemon=True)
        self._thread.start()

    # -- CompletionClient ----------------------------------------------------------------------------------------

    def submit(self, request: CompletionRequest) -> list[Generation]:
        request.validate()
        if self._dead or self.closed:
            raise EngineDead("The engine is closed.")
        self.requests.append(request)
        made = [Generation(request, index) for index in range(request.samples)]
        words = max(1, len(prompt_of(request).split()))
        for generation in made:
            generation.on_cancel(lambda: self._mail.put(None))
            self.generations.append(generation)
            self._mail.put(_Row(generation, list(self._answer(request, generation.index)), words))
        return made

    def cancel(self, generation_ids: list[str] | None = None) -> int:
        self.cancels.append(generation_ids)
        alive = [g for g in self.generations if not g.done and (generation_ids is None or g.id in generation_ids)]
        for generation in alive:
            generation.cancel()
        return len(alive)

    def live(self) -> list[Generation]:
        return [generation for generation in self.generations if not generation.done]

    def load(self, model: str, dtype: str | None = None) -> Generation:
        generation = Generation(CompletionRequest(RequestId(f"load-{model}"), model, text="", dtype=dtype))
        if model.startswith("missing"):
            generation.fail(RequestError(f"There is no model {model!r}.", "See `%mlx models`."))
            return generation
        for phase, done, total in self._load:
            generation.emit(lambda seq, t, p=phase, d=done, n=total: ev.LoadProgress(seq, t, p, d, n))  # type: ignore[misc]
        if model not in self._models:
            self._models.append(model)
        generation.emit(lambda seq, t: ev.Finished(seq, t, "stop", "", {}))
        return generation

    def unload(self, model: str | None = None) -> list[str]:
        gone = [name for name in self._models if model in (None, name)]
        if model is not None and not gone:
            raise RequestError(f"{model!r} is not loaded.", "See `%mlx models`.")
        self._models = [name for name in self._models if name not in gone]
        return gone

    def status(self) -> dict[str, Any]:
        live = sum(not g.done for g in self.generations)
        return {
            "state": "dead" if self._dead else "ready",
            "backend": {"device": "cpu", "blas": "none", "mlx": "0.0-fake"},
            "models": [
                {"name": name, "weights": "float32", "rows": live, "queue": 0, "kv_bytes": 4096 * live, "parameters": 135_000_000}
                for name in self._models
            ],
            "limits": {"max_rows": 8, "max_kv_bytes": None},
            "loading": None,
        }

    def cache_info(self) -> dict[str, Any]:
        return upkeep.info(resolve())

    def cache_clear(self, model: str | None = None) -> dict[str, Any]:
        return upkeep.clear(resolve(), model)

    def cache_flush(self, timeout_s: float = 30.0) -> dict[str, Any]:
        return upkeep.flush(resolve(), None, timeout_s)

    def describe_cache(self, limit: int = 256) -> dict[str, Any] | None:
        return None

    def cached_text(self, namespace: str, ids: Sequence[int]) -> str | None:
        return None

    def close(self, timeout_s: float = 5.0) -> None:
        self.closed += 1
        self.cancel()
        self._mail.put(None)
        self._thread.join(timeout_s)

    # -- what a test may do ----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let held rows go on."""
        self._released.set()
        self._mail.put(None)

    def die(self) -> None:
        """What an engine does when it stops: fail what lives, refuse what comes."""
        self._dead = True
        self._mail.put(None)
        for generation in self.generations:
            generation.fail(EngineDead("The engine stopped."))

    # -- the worker ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        rows: list[_Row] = []
        pause = threading.Event()
        while not self._dead and not (self.closed and not rows):
            idle = all(self._waits(row) for row in rows)
            try:
                while True:
                    mail = self._mail.get(block=idle)
                    idle = False
                    if mail is not None:
                        rows.append(mail)
            except queue.Empty:
                pass
            rows = [row for row in rows if not self._advance(row)]
            if self._between is not None:
                self._between()
            if self._step_s:
                pause.wait(self._step_s)

    def _waits(self, row: _Row) -> bool:
        held = self._hold is not None and not self._released.is_set() and row.started and row.sent >= self._hold
        return held and not row.generation.cancel_requested

    def _advance(self, row: _Row) -> bool:
        """One event of this row; True when it ended."""
        generation = row.generation
        if generation.done:
            return True
        text = "".join(row.pieces[: row.sent])
        usage = self._usage(row)
        if generation.cancel_requested:
            generation.emit(lambda seq, t: ev.Cancelled(seq, t, text, {**usage, "finish_reason": "cancelled"}))
            return True
        if not row.started:
            self._start(row)
            return False
        failure = self._failure(row)
        if failure is not None:
            generation.fail(failure, text, {**usage, "finish_reason": "error"})
            return True
        if self._waits(row):
            return False
        limit = min(len(row.pieces), generation.request.max_tokens)
        if row.sent >= limit:
            reason = "stop" if limit == len(row.pieces) else "length"
            generation.emit(lambda seq, t: ev.Finished(seq, t, reason, text, {**usage, "finish_reason": reason}))
            return True
        piece = row.pieces[row.sent]
        row.sent += 1
        generation.emit(lambda seq, t: ev.Tokens(seq, t, (self._record(generation, row.sent, piece, t),), piece))
        return False

    def _start(self, row: _Row) -> None:
        generation, request = row.generation, row.generation.request
        row.started = True
        for phase, done, total in self._load:
            generation.emit(lambda seq, t, p=phase, d=done, n=total: ev.LoadProgress(seq, t, p, d, n))  # type: ignore[misc]
        seed = request.sampling.seed
        explicit = seed is not None
        value = ((seed or 0) + generation.index) & MAX_SEED if explicit else random.getrandbits(64)
        length = row.prompt_tokens
        generation.emit(lambda seq, t: ev.Started(seq, t, request.model, length, value, explicit))
        generation.emit(lambda seq, t: ev.PrefillProgress(seq, t, length, length))

    @staticmethod
    def _record(generation: Generation, position: int, piece: str, t: float) -> ev.TokenRecord:
        k = generation.request.sampling.logprobs
        if k is None:
            return ev.TokenRecord(position, piece, "sampled", t)
        top = tuple(ev.Alternative(position + i, piece if i == 0 else f"alt{i}", -0.5 - i) for i in range(k))
        return ev.TokenRecord(position, piece, "sampled", t, -0.5, 0, top)

    def _failure(self, row: _Row) -> MlxnbError | None:
        for failure in self._failures:
            here = failure.text in prompt_of(row.generation.request) and failure.index in (None, row.generation.index)
            if here and row.sent >= failure.after:
                return failure.error
        return None

    @staticmethod
    def _usage(row: _Row) -> dict[str, Any]:
        return {"prompt_tokens": row.prompt_tokens, "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens": row.sent}
