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

from .record import asked, plain, saved, token_record
from .run import Run
from .schema import RUN_SCHEMA

FACTS_S = 5.0
"""Between changes of status a running answer has no news but its tokens, which tell how many they are."""
PROGRESS_S = 0.25


@dataclass
class Told:
    """One run as far as it was told, in plain values.

    units: UTF-16 length of the text. at: when its facts were last looked at. seen: how many events it had, and whether it was
    asked to stop; without a change there is no news.
    """

    tokens: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    units: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    mark: tuple[Any, ...] = ()
    at: float = float("-inf")
    seen: tuple[int, bool] = (-1, False)


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
        seen = (run.generation.count, run.generation.cancel_requested)
        if seen == told.seen and not self._due(told):
            return None, False
        told.seen = seen
        facts = self._new_facts(run, told)
        tokens = [token_record(token) for token in run.tokens[len(told.tokens) :]]
        whole = plain(run.text)
        shorter = len(whole) < len(told.text)
        if shorter:
            told.text, told.units = whole, units(whole)
        text = whole[len(told.text) :]
        if not (tokens or text or facts):
            return None, shorter
        item = {"key": self.key, "run": index, "at": len(told.tokens), "tokens": tokens, "text_at": told.units, "text": text}
        if facts:
            item["status"] = facts
        told.tokens += item["tokens"]
        told.text, told.units = whole, told.units + units(text)
        return item, shorter

    def _new_facts(self, run: Run, told: Told) -> dict[str, Any]:
        """Fields that changed. They cost more than tokens, so between changes of status they are looked at now and then."""
        mark = (run.status, run.stopping)
        if mark == told.mark and not self._due(told):
            return {}
        told.mark, told.at = mark, self._clock()
        facts = saved({**run.facts(), "tokens": None})
        del facts["tokens"]
        changed = {name: value for name, value in facts.items() if told.facts.get(name) != value or name not in told.facts}
        told.facts = facts
        return changed

    def _due(self, told: Told) -> bool:
        """Whether its facts are to be looked at though its status is the same."""
        status = told.mark[0] if told.mark else "waiting"
        if status in ("done", "stopped", "failed"):
            return False
        return self._clock() - told.at >= (PROGRESS_S if status in ("waiting", "loading", "prefill") else FACTS_S)

    def records(self) -> list[dict[str, Any]]:
        """The record of each run as far as it was told; tokens not packed yet."""
        with self._lock:
            found = []
            for run, told in zip(self.runs, self._told, strict=True):
                told.facts = told.facts or run.facts()
                told.asked = told.asked or asked(run.request)
                found.append({"schema": RUN_SCHEMA, **told.facts, "text": told.text, "tokens": list(told.tokens), **told.asked})
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
