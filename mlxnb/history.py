"""`History`: what the engine said of itself over the last while, kept small, for a monitor that was opened or loaded again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from .schema import HISTORY_SCHEMA

KEPT = 1800
"""Moments kept. The status is told once a second while it changes, so this is half an hour of work, and any time of rest."""
LABELS = 1000
"""Labels of rows that are kept before those that no moment names any more are looked for."""

Moment = dict[str, Any]


class History:
    """Statuses reduced to what a picture over time needs. Any thread.

    A moment: t; models: for each its rows, queue, steps and tokens so far, its slots as [slot, id, whether the prompt is being
    read], and the ids that wait; ended: [id, how, from, to] of rows that ended since the moment before, which may have been too
    short for any moment to have them in a slot. Labels of ids stand apart, once.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._lock = threading.Lock()
        self._moments: deque[Moment] = deque(maxlen=kept)
        self._labels: dict[str, str] = {}
        self._most_labels = LABELS
        self._ended: frozenset[str] = frozenset()

    def note(self, status: Mapping[str, Any]) -> None:
        """Keep this status as the newest moment."""
        ended = {str(row.get("id")): row for row in status.get("ended") or []}
        fresh = [row for name, row in ended.items() if name not in self._ended]
        with self._lock:
            for row in fresh:
                self._labels.setdefault(str(row.get("id")), str(row.get("label", ""))[:80])
            moment = {
                "t": status.get("t"),
                "models": [self._model(model) for model in status.get("models") or []],
                "ended": [[str(row.get("id")), str(row.get("how")), row.get("from"), row.get("to")] for row in fresh],
            }
            self._ended = frozenset(ended)
            self._moments.append(moment)
            if len(self._labels) > self._most_labels:
                self._forget_rows()

    def clear(self) -> None:
        with self._lock:
            self._moments.clear()
            self._labels.clear()

    def record(self) -> dict[str, Any]:
        """As JSON values, oldest moment first."""
        with self._lock:
            return {"schema": HISTORY_SCHEMA, "labels": dict(self._labels), "moments": list(self._moments)}

    def _model(self, model: Mapping[str, Any]) -> dict[str, Any]:
        slots, waiting = model.get("slots"), model.get("waiting") or []
        for row in [*(slots or []), *waiting]:
            self._labels[str(row.get("id"))] = str(row.get("label", ""))[:80]
        places = None if slots is None else [[row.get("slot"), str(row.get("id")), int(row.get("phase") == "prefill")] for row in slots]
        return {
            "rows": model.get("rows", 0),
            "queue": model.get("queue", 0) + model.get("preparing", 0),
            "steps": model.get("steps", 0),
            "tokens": model.get("tokens"),
            "slots": places,
            "waiting": [str(row.get("id")) for row in waiting],
        }

    def _forget_rows(self) -> None:
        """Drop the labels of rows that no moment has any more."""
        seen = {row[1] for moment in self._moments for model in moment["models"] for row in model["slots"] or []}
        seen |= {row for moment in self._moments for model in moment["models"] for row in model["waiting"]}
        seen |= {end[0] for moment in self._moments for end in moment["ended"]}
        self._labels = {row: label for row, label in self._labels.items() if row in seen}
        self._most_labels = max(LABELS, 2 * len(self._labels))
