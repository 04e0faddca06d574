"""What was interrupted and can be gone on with: answers that were stopped in this kernel, and those that kernels which are gone left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from mlxnb_engine import resume
from mlxnb_engine.errors import RequestError

from . import describe, runtime
from .ask import prompt_text
from .run import Run

if TYPE_CHECKING:
    from mlxnb_engine.client import CompletionClient

_LEAST = 4
_taken: dict[str, tuple[resume.Interrupted, Run | None]] = {}
"""By key, the records from which this kernel went on, and by which runs; None for one that was given back."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An answer that was interrupted. id: what `%mlx resume` calls it. key: names it in whichever kernel. tokens: drawn so far.

    when: as local time, "" in this kernel. alike: other names that it answers to. give_back: lets it be resumed once more.
    """

    id: str
    key: str
    model: str
    prompt: str
    tokens: int
    when: str
    alike: tuple[str, ...]
    go_on: Callable[[CompletionClient], Run]
    give_back: Callable[[], None]

    def resume(self, client: CompletionClient | None = None) -> Run:
        """Its rest, as a run of the whole answer. Raises RequestError if it was resumed already."""
        return self.go_on(client if client is not None else runtime.client())


def interrupted(runs: Sequence[Run] = ()) -> list[Interrupted]:
    """What can be resumed: of `runs` those that were stopped, then what kernels that are gone left behind, newest first."""
    here = [_of_run(run) for run in runs if run.resumable]
    known = {one.key for one in here} | {key for key in _taken if _went_on(key)}
    records = {one.key: one for one in resume.interrupted(runtime.config())}
    records |= {key: one for key, (one, _) in _taken.items() if key not in records}  # the record of one that failed is this kernel's
    return here + [_of_record(one) for key, one in records.items() if key not in known]


def _of_run(run: Run) -> Interrupted:
    key = run.generation.ticket.key if run.generation.ticket is not None else ""
    name = run.request.id if run.request.samples == 1 else run.id
    acts = partial(_resume_run, run), partial(_give_back_run, run)
    return Interrupted(name, key, run.model, run.prompt, run.token_count, "", (run.id, run.request.id), *acts)


def _resume_run(run: Run, client: CompletionClient) -> Run:
    return run.resume(client=client)


def _give_back_run(run: Run) -> None:
    rest = run.resumed_by
    if rest is not None:  # whoever followed the rest follows what goes on from here next
        run.on_resume, run.resumed_by = rest.on_resume, None


def _of_record(record: resume.Interrupted) -> Interrupted:
    when = time.strftime("%d %b %H:%M", time.localtime(record.at))
    prompt = prompt_text(record.request)
    acts = partial(_resume_record, record), partial(_give_back_record, record)
    return Interrupted(record.key[:8], record.key, record.model, prompt, record.tokens, when, (), *acts)


def _resume_record(record: resume.Interrupted, client: CompletionClient) -> Run:
    if _went_on(record.key):
        raise RequestError("This answer was resumed already.", "`%mlx resume` lists what is left.")
    run = Run(client.submit(replace(record.request, id=runtime.new_request_id()))[0])
    _taken[record.key] = record, run
    return run


def _give_back_record(record: resume.Interrupted) -> None:
    _taken[record.key] = record, None


def _went_on(key: str) -> bool:
    run = _taken[key][1] if key in _taken else None
    return run is not None and run.finish_reason != "error"


def chosen(found: Sequence[Interrupted], words: Sequence[str]) -> list[Interrupted]:
    """Those that these words name: an id, a request's for all its samples, or the beginning of a key. Raises RequestError."""
    picked: list[Interrupted] = []
    for word in words:
        these = [one for one in found if word in (one.id, *one.alike) or (len(word) >= _LEAST and one.key.startswith(word))]
        if not these:
            known = ", ".join(one.id for one in found)
            raise RequestError(f"No interrupted answer is called {word}.", f"There are: {known}." if known else "There is none.")
        picked += [one for one in these if one not in picked]
    return picked


def resume_all(found: Sequence[Interrupted], client: CompletionClient) -> list[Run]:
    """Go on with all of these, or with none: a refusal stops those before it, and they can be resumed again."""
    runs: list[Run] = []
    try:
        for one in found:
            runs.append(one.resume(client))
    except BaseException:
        for one, run in zip(found, runs, strict=False):
            run.cancel()
            one.give_back()
        raise
    return runs


def lines(found: Sequence[Interrupted]) -> list[str]:
    """The list, for a person."""
    if not found:
        return ["Nothing was interrupted that could be resumed."]
    rows = [(one.id, one.when or "this kernel", one.model, str(one.tokens), describe.short(one.prompt)) for one in found]
    table = describe.table(("interrupted", "when", "model", "tokens", "prompt"), rows)
    return [*table, "", "Go on with one: %mlx resume ID     With all: %mlx resume all"]
