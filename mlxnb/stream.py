"""`Stream`: what the views of one key have been told of its runs, so that each delta says only what is new.

Owner: the publisher thread mostly; a lock makes any thread safe. Invariant: `records()` is exactly what the items so far add
up to, so that a snapshot and the deltas around it fit together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .record import plain, record, saved, token_record
from .run import Run

FACTS_S = 1.0
PROGRESS_S = 0.25


@dataclass
class Told:
    """One run as far as it was told. units: UTF-16 length of the text; `at`: when its facts were last looked at."""

    tokens: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    units: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    mark: tuple[Any, ...] = ()
    at: float = float("-inf")


class Stream:
    """key: the views' name. runs: in the order of their index in the record."""

    def __init__(self, key: str, runs: Iterable[Run], clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.runs: list[Run] = list(runs)
        self._clock = clock
        self._lock = threading.RLock()
        self._told = [Told() for _ in self.runs]

    def add(self, run: Run) -> int:
        """Follow one more run; its index."""
        with self._lock:
            self.runs.append(run)
            self._told.append(Told())
            return len(self.runs) - 1

    def replace(self, runs: Iterable[Run]) -> None:
        """Follow these runs from now on. Runs that stay where they were are not told again."""
        with self._lock:
            fresh = list(runs)
            known = {id(run): told for run, told in zip(self.runs, self._told, strict=True)}
            self.runs, self._told = fresh, [known.get(id(run), Told()) for run in fresh]

    def items(self) -> tuple[list[dict[str, Any]], bool]:
        """DeltaItems of what is new, and whether a view must take a snapshot because a text got shorter."""
        with self._lock:
            made = [self._item(index, run, told) for index, (run, told) in enumerate(zip(self.runs, self._told, strict=True))]
        return [item for item, _ in made if item is not None], any(shorter for _, shorter in made)

    def _item(self, index: int, run: Run, told: Told) -> tuple[dict[str, Any] | None, bool]:
        facts = self._new_facts(run, told)
        tokens = [token_record(token) for token in run.tokens[len(told.tokens) :]]
        whole = plain(run.text)
        shorter = len(whole) < len(told.text)
        if shorter:
            told.text, told.units = whole, units(whole)
        text = whole[len(told.text) :]
        if not (tokens or text or facts):
            return None, shorter
        item = {"key": self.key, "run": index, "at": len(told.tokens), "tokens": plain(tokens), "text_at": told.units, "text": text}
        if facts:
            item["status"] = facts
        told.tokens += item["tokens"]
        told.text, told.units = whole, told.units + units(text)
        return item, shorter

    def _new_facts(self, run: Run, told: Told) -> dict[str, Any]:
        """Fields that changed. They cost more than tokens, so between changes of status they are looked at now and then."""
        now, mark = self._clock(), (run.status, run.stopping)
        wait = PROGRESS_S if mark[0] in ("waiting", "loading", "prefill") else FACTS_S
        if mark == told.mark and (now - told.at < wait or mark[0] in ("done", "stopped", "failed")):
            return {}
        told.mark, told.at = mark, now
        facts = saved({**run.facts(), "tokens": None})
        del facts["tokens"]
        changed = {name: value for name, value in facts.items() if told.facts.get(name) != value or name not in told.facts}
        told.facts = facts
        return changed

    def records(self) -> list[dict[str, Any]]:
        """The record of each run as far as it was told; tokens not packed yet."""
        with self._lock:
            found = []
            for run, told in zip(self.runs, self._told, strict=True):
                if not told.facts:
                    told.facts = run.facts()
                found.append(record(run.request, {**told.facts, "text": told.text, "tokens": list(told.tokens)}))
            return found

    @property
    def done(self) -> bool:
        return all(run.done for run in self.runs)


def units(text: str) -> int:
    """Length in UTF-16 units, as JavaScript counts."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def packed(stream: Stream) -> list[dict[str, Any]]:
    """The record of each run as far as it was told, in the form that a view takes."""
    runs = stream.records()
    return list(saved({"runs": runs})["runs"]) if runs else []
