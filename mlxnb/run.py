"""`Run` and `RunGroup`: what a cell or a call gives back. A live view over event logs; it computes nothing itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, overload

from mlxnb_engine import events as ev
from mlxnb_engine.errors import EngineDead, MlxnbError, RequestError, error_from
from mlxnb_engine.session import Generation, Timing
from mlxnb_engine.types import MAX_SEED, CompletionRequest, Continued, TokenId

from .interrupts import say_instead
from .record import group_record, label_of, plain, record, token_record

if TYPE_CHECKING:
    import pandas

    from mlxnb_engine.client import CompletionClient

STATUSES = ("waiting", "loading", "prefill", "running", "done", "stopped", "failed")


class Run:
    """One answer: a view over a Generation that may still be growing, and its request.

    Any thread may read. Each property first takes in what the log gained since the last look, so reading costs what is new.
    Invariant: once `done`, nothing changes any more. `text` is what the model produced; `answer` has the prefill before it.
    labels: what tells this run from its siblings (a column of an item, a swept value, a sample number).
    resumed_by: the run that went on from this one, once there is one. on_resume: is told of it.
    """

    def __init__(self, generation: Generation, labels: Mapping[str, Any] | None = None) -> None:
        self.generation = generation
        self.labels: dict[str, Any] = dict(labels or {})
        self.resumed_by: Run | None = None
        self.on_resume: Callable[[Run], object] | None = None
        self._lock = threading.RLock()
        self._cursor = 0
        self._pieces: list[str] = []
        self._tokens: list[ev.TokenRecord] = []
        self._phases: dict[tuple[str, str], dict[str, Any]] = {}
        self._load: ev.LoadProgress | None = None
        self._prefill: ev.PrefillProgress | None = None
        self._started: ev.Started | None = None
        self._end: ev.Finished | ev.Failed | ev.Cancelled | None = None

    # -- taking in the log -------------------------------------------------------------------------------------------

    def _absorb(self) -> None:
        with self._lock:
            if self._end is not None:
                return
            for event in self.generation.read(self._cursor):
                self._cursor += 1
                self._take(event)

    def _take(self, event: ev.Event) -> None:
        if isinstance(event, ev.Tokens):
            self._tokens.extend(event.tokens)
            if event.text:
                self._pieces.append(event.text)
        elif isinstance(event, ev.LoadProgress):
            self._load = event
            self._note(event, event.phase, done=event.done, total=event.total)
        elif isinstance(event, ev.Started):
            self._started = event
            self._note(event)
        elif isinstance(event, ev.PrefillProgress):
            self._prefill = event
            self._note(event, done=event.done, total=event.total)
        elif isinstance(event, (ev.Finished, ev.Failed, ev.Cancelled)):
            self._end = event
            self._pieces = [event.text]
            self._note(event)

    def _note(self, event: ev.Event, phase: str = "", **figures: Any) -> None:
        """Keep one timeline entry per phase: `t` is when it began, `until` the last news of it."""
        entry = self._phases.setdefault((event.kind, phase), {"kind": event.kind, **({"phase": phase} if phase else {}), "t": event.t})
        entry["until"] = event.t
        entry.update(figures)

    # -- going on from it --------------------------------------------------------------------------------------------

    def branch(self, at: int, token: int | None = None, *, client: CompletionClient | None = None) -> Run:
        """Go on from position `at` as a new row: the tokens before it are kept, and `token`, if given, stands there.

        at: 0 to len(tokens). token: an id, for example of an alternative; None draws that position anew. The draws that
        follow use this run's seed at their own positions, so a branch with the run's own token repeats the run.
        Raises RequestError for a position or an id that cannot be.
        """
        kept = self.tokens
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at <= len(kept):
            raise RequestError(f"at={at!r} is not a position of this run.", f"It has {len(kept)} tokens: give 0 to {len(kept)}.")
        if token is not None and (not isinstance(token, int) or isinstance(token, bool) or token < 0):
            raise RequestError(f"token={token!r} is not a token id.", "Take one from run.tokens[i].id or an alternative's id.")
        continuation = tuple(map(Continued.of, kept[:at]))
        if token is not None:
            continuation += (Continued(TokenId(token), by_hand=True),)
        from . import runtime

        request = replace(
            self.request,
            id=runtime.new_request_id(),
            samples=1,
            sampling=replace(self.request.sampling, seed=self.seed),
            continuation=continuation,
            resumed=None,
        )
        engine = client if client is not None else runtime.client()
        return Run(engine.submit(request)[0], {**self.labels, "branch": at})

    @property
    def resumable(self) -> bool:
        """It was stopped, or its engine was, and nothing went on from it yet, or what did failed."""
        stopped = self.finish_reason == "cancelled" or isinstance(self.error, EngineDead)
        return stopped and (self.resumed_by is None or self.resumed_by.finish_reason == "error")

    def resume(self, *, client: CompletionClient | None = None) -> Run:
        """Go on with a stopped run, as a new run of the same answer: what has been drawn is kept, what follows is what would have come.

        Its text, tokens and counts are those of the whole answer. Where the engine still has the state nothing is computed again.
        Raises RequestError for a run that is at work, complete, failed or resumed already; the new run fails with one if the model or
        a limit is no longer what it was, since the answer would be another one.
        """
        if not self.resumable:
            raise RequestError(*self._why_not())
        from . import runtime

        request = replace(self.request, id=runtime.new_request_id(), samples=1)
        ticket, base = self.generation.ticket, request.sampling.seed
        if ticket is not None:
            request = replace(request, continuation=tuple(map(Continued.of, self.tokens)), resumed=ticket)
        elif base is not None:  # it had not begun
            request = replace(request, sampling=replace(request.sampling, seed=(base + self.generation.index) & MAX_SEED))
        engine = client if client is not None else runtime.client()
        self.resumed_by = run = Run(engine.submit(request)[0], self.labels)
        run.on_resume = self.on_resume
        if self.on_resume is not None:
            self.on_resume(run)
        return run

    def _why_not(self) -> tuple[str, str]:
        if not self.done:
            return "This answer is still at work.", "Wait for it, or stop it with cancel()."
        if self.resumed_by is not None and self.resumed_by.finish_reason != "error":
            return "This answer was resumed already.", f"The run that went on is {self.resumed_by.id}: run.resumed_by."
        if self.finish_reason == "error":
            return "This answer failed.", "Ask again: run.error says what was wrong."
        return "This answer is complete.", "To write another end from some token on: run.branch(at)."

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.generation.id

    @property
    def request(self) -> CompletionRequest:
        return self.generation.request

    @property
    def model(self) -> str:
        self._absorb()
        return self._started.model if self._started else self.request.model

    @property
    def prompt(self) -> str:
        """The raw text, or the content of the last message of the prompt."""
        if self.request.text is not None:
            return self.request.text
        return self.request.messages[-1].content if self.request.messages else ""

    @property
    def text(self) -> str:
        """What the model has produced so far, stop strings left out."""
        with self._lock:
            self._absorb()
            if len(self._pieces) > 1:
                self._pieces = ["".join(self._pieces)]
            return self._pieces[0] if self._pieces else ""

    @property
    def answer(self) -> str:
        """The assistant's whole turn: the prefill the caller gave, then `text`."""
        return self.request.prefill + self.text

    @property
    def tokens(self) -> list[ev.TokenRecord]:
        with self._lock:
            self._absorb()
            return list(self._tokens)

    @property
    def token_count(self) -> int:
        """Tokens produced. Counts an end-of-text token that has no record, once the run is over."""
        with self._lock:
            self._absorb()
            counted = self._end.usage.get("completion_tokens") if self._end else None
            return counted if isinstance(counted, int) else len(self._tokens)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation with this answer as its last turn. [] for a raw completion, which has no turns."""
        if self.request.messages is None:
            return []
        turns = [{"role": m.role, "content": m.content} for m in self.request.messages]
        return [*turns, {"role": "assistant", "content": self.answer}]

    @property
    def usage(self) -> dict[str, Any]:
        """The engine's counts (semantics section 11); while the run lives, the counts known so far."""
        with self._lock:
            self._absorb()
            if self._end is not None and self._end.usage:
                return dict(self._end.usage)
            known: dict[str, Any] = {"completion_tokens": len(self._tokens)}
            if self._started is not None:
                started = self._started
                known["prompt_tokens"] = started.prompt_tokens
                disk = {"ssd_tokens": started.ssd_tokens} if started.ssd_tokens else {}
                known["prompt_tokens_details"] = {"cached_tokens": started.cached_tokens, **disk}
            if self.finish_reason is not None:
                known["finish_reason"] = self.finish_reason
            return known

    @property
    def seed(self) -> int | None:
        """The seed in force, explicit or drawn; None until the row was admitted without an explicit one."""
        self._absorb()
        return self._started.seed if self._started else self.request.sampling.seed

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "cancelled" or "error"; None while it lives."""
        self._absorb()
        if isinstance(self._end, ev.Finished):
            return self._end.reason
        if isinstance(self._end, ev.Cancelled):
            return "cancelled"
        return "error" if isinstance(self._end, ev.Failed) else None

    @property
    def status(self) -> str:
        """One of STATUSES."""
        self._absorb()
        if self._end is not None:
            return {"finished": "done", "cancelled": "stopped", "failed": "failed"}[self._end.kind]
        if self._tokens:
            return "running"
        if self._prefill is not None:
            return "prefill"
        if self._started is not None:
            return "running"
        return "loading" if self._load is not None else "waiting"

    @property
    def stopping(self) -> bool:
        """Asked to stop, and not over yet."""
        return self.generation.cancel_requested and not self.done

    @property
    def progress(self) -> ev.LoadProgress | ev.PrefillProgress | None:
        """The latest news of loading or prefill, while that is what is going on."""
        status = self.status
        return self._load if status == "loading" else self._prefill if status == "prefill" else None

    @property
    def phase_start(self) -> float:
        """Seconds since submit at which the phase of `progress` began."""
        now = self.progress
        if now is None:
            return 0.0
        phase = now.phase if isinstance(now, ev.LoadProgress) else ""
        return float(self._phases[(now.kind, phase)]["t"])

    @property
    def timing(self) -> Timing:
        return self.generation.timing

    @property
    def elapsed_s(self) -> float:
        """Seconds from submit to the end, or to now."""
        end = self.generation.timing.ended
        return end if end is not None else self.generation.now

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed after the first token that this run drew itself; None before there are two of them."""
        with self._lock:
            self._absorb()
            drawn = self._tokens[len(self.request.continuation) :]
            if len(drawn) < 2:
                return None
            span = drawn[-1].t - drawn[0].t
            return (len(drawn) - 1) / span if span > 0 else None

    @property
    def timeline(self) -> list[dict[str, Any]]:
        """What happened when: phases (`kind`, `t`, `until`) and every token (`kind` "token", `t`, `id`), in order of time."""
        with self._lock:
            self._absorb()
            tokens = [{"kind": "token", "t": token.t, "id": token.id, "origin": token.origin} for token in self._tokens]
            return sorted([*(dict(entry) for entry in self._phases.values()), *tokens], key=lambda entry: entry["t"])

    @property
    def done(self) -> bool:
        self._absorb()
        return self._end is not None

    @property
    def error(self) -> MlxnbError | None:
        """The typed error of a failed run; None otherwise, also for a stopped one."""
        self._absorb()
        if isinstance(self._end, ev.Failed):
            return error_from(self._end.error, self._end.message, self._end.hint)
        return None

    # -- what one can do ---------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the engine to stop this run; what it has produced is kept. Idempotent, never blocks."""
        self.generation.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is over or `timeout` seconds passed; whether it is over. Never raises the run's error."""
        try:
            return self.generation.wait(timeout) is not None
        except KeyboardInterrupt as stop:
            say_instead(stop, "KeyboardInterrupt: no longer waiting; the answer goes on, `cancel()` stops it.")
            raise

    def result(self) -> Run:
        """Wait for the end and raise the typed error of a failed run. An interrupt stops the run and is raised again."""
        finish_all([self])
        self.raise_for_error()
        return self

    def raise_for_error(self) -> None:
        """Raise the typed error of a failed run, or Cancelled for a stopped one; nothing while it lives or once it is complete.

        The error's `run` is this run, so that what it had produced stays within reach.
        """
        try:
            self.generation.raise_for_error()
        except MlxnbError as error:
            error.run = self  # type: ignore[attr-defined]
            raise

    def __iter__(self) -> Iterator[str]:
        """Yield pieces of text as they come, from the beginning. Ends quietly for a stopped run, raises for a failed one.

        An interrupt while waiting for a piece stops the run. Leaving the loop early does not: `cancel()` does.
        """
        sent = 0
        try:
            for event in self.generation.events():
                if isinstance(event, ev.Tokens) and event.text:
                    sent += len(event.text)
                    yield event.text
                elif isinstance(event, (ev.Finished, ev.Failed, ev.Cancelled)) and len(event.text) > sent:
                    yield event.text[sent:]
        except KeyboardInterrupt as stop:
            stop_all([self], stop)
            raise
        error = self.error
        if error is not None:
            raise error

    def show(self, view: str = "answer") -> None:
        """Show this run in the current cell: view is "answer", "tokens", "raw", "loom" or "none". Live if it still runs."""
        show(self, view)

    # -- as data -----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """The fields of the record that may change while it lives; text and tokens left out."""
        with self._lock:
            self._absorb()
            end = self._end
            known = {
                "id": self.id,
                "status": self.status,
                "stopping": self.stopping,
                "model": self.model,
                "labels": self.labels,
                "usage": self.usage,
                "seed": {"value": self.seed, "explicit": self._started.seed_explicit if self._started else None},
                "finish_reason": self.finish_reason,
                "stop": end.stop if isinstance(end, ev.Finished) else None,
                "error": {"kind": end.error, "message": end.message, "hint": end.hint} if isinstance(end, ev.Failed) else None,
                "timing": asdict(self.timing),
                "phases": list(self._phases.values()),
            }
            return {name: plain(value) for name, value in known.items()}

    def to_dict(self) -> dict[str, Any]:
        """The RunRecord: plain JSON values, schema "mlxnb.run/1".

        A number that JSON has not is the string "inf", "-inf" or "nan".
        """
        with self._lock:
            facts = self.facts()
            return record(self.request, {**facts, "text": self.text, "tokens": [token_record(token) for token in self._tokens]})

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"<Run {self.id} {self.status}, {self.token_count} tokens: {text!r}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from .render import run_bundle

        return run_bundle(self)


class LoadRun(Run):
    """The loading of a model without a prompt: the same log, another last line."""


class RunGroup(Sequence[Run]):
    """Several runs that belong together: samples of a prompt, items of `--each`, points of a sweep. In order of submission."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = tuple(runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> RunGroup: ...
    def __getitem__(self, index: int | slice) -> Run | RunGroup:
        return RunGroup(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @property
    def texts(self) -> list[str]:
        return [run.text for run in self]

    @property
    def done(self) -> bool:
        return all(run.done for run in self)

    @property
    def errors(self) -> list[MlxnbError]:
        return [error for run in self if (error := run.error) is not None]

    def cancel(self) -> None:
        for run in self:
            run.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until all are over or `timeout` seconds passed; whether all are over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for run in self:
            run.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self.done

    def raise_for_error(self) -> None:
        """Raise the first typed error, in order of the runs."""
        for run in self:
            run.raise_for_error()

    def show(self, view: str = "answer") -> None:
        show(self, view)

    def to_frame(self) -> pandas.DataFrame:
        """One line per run: its labels, then text, finish_reason, prompt_tokens, completion_tokens, seed, seconds, error.

        A label with the name of one of these columns gets a trailing underscore. Needs pandas.
        """
        import pandas

        return pandas.DataFrame([_line(run) for run in self])

    def to_dict(self) -> dict[str, Any]:
        """The group record: the RunRecord and the heading of each run."""
        return group_record([run.to_dict() for run in self], [label_of(run.labels, index) for index, run in enumerate(self)])

    def __repr__(self) -> str:
        return f"<RunGroup of {len(self)}, {sum(run.done for run in self)} done>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from .render import group_bundle

        return group_bundle(self)


def show(target: Run | RunGroup, view: str) -> None:
    from .display import publish  # it needs IPython, which a plain script may lack

    live = not target.done
    publication = publish(target, view=view, background=live)
    if not live:
        publication.finish()


def _line(run: Run) -> dict[str, Any]:
    error = run.error
    facts = {
        "text": run.text,
        "finish_reason": run.finish_reason,
        "prompt_tokens": run.usage.get("prompt_tokens"),
        "completion_tokens": run.token_count,
        "seed": run.seed,
        "seconds": round(run.elapsed_s, 3),
        "error": error.message if error else None,
    }
    return {(f"{name}_" if name in facts else str(name)): value for name, value in run.labels.items()} | facts


def finish_all(runs: Iterable[Run]) -> None:
    """Wait for all runs in the calling thread. Never raises a run's own error.

    An interrupt stops every one of these runs, gives the step in flight 0.1 s to end, and is raised again.
    """
    waited = list(runs)
    try:
        for run in waited:
            run.wait()
    except KeyboardInterrupt as stop:
        stop_all(waited, stop)
        raise


def stop_all(runs: Sequence[Run], stop: KeyboardInterrupt) -> None:
    """Stop these runs because of an interrupt, give the step in flight 0.1 s to end, and spare the person our own stack."""
    say_instead(stop, "KeyboardInterrupt: stopped; what was written so far is kept.")
    for run in runs:
        run.cancel()
    deadline = time.monotonic() + 0.1
    for run in runs:
        run.generation.wait(max(0.0, deadline - time.monotonic()))
