"""`cache_map`: the prefix cache in the current cell. Who shares which blocks, where they lie, what left and what it saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import RequestError

from . import runtime
from .cachemap import MAX_NODES, CacheModel
from .describe import size
from .frontend import Handler, Session
from .record import plain
from .sanitize import bundle, el, preformatted
from .schema import CACHE_SCHEMA
from .views import OpenView

if TYPE_CHECKING:
    from mlxnb_widgets._base import View

EVERY_S = 2.0
"""Between two looks while rows run: the engine's status comes once a second, and for a tree that is often."""
LOOK_SHARE = 25.0
"""And this many times as long as the last look took: a large tree must not cost the rows their time."""


class CacheMap(OpenView):
    """The cache as it was told last. It looks again while the engine's counts of it change, at a low rate, and at a wish.

    Any thread; one at a time reads the engine.
    """

    def __init__(self, shell: Any = None, session: Session | None = None) -> None:
        self.model = CacheModel(self._decode)
        self._looking = threading.Lock()
        self._facts: dict[str, Any] = {"state": "not started"}
        self._seen: Any = None
        self._next_look = 0.0
        super().__init__(shell, _widget, session)
        self.look()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "cache.text": lambda args: {"text": self.text(args["edge"], args["block"])},
            "snapshot": lambda args: {"record": self._fresh()},
        }

    # -- looking ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def _decode(namespace: str, ids: Sequence[int]) -> str:
        here = runtime.current()
        return (here.cached_text(namespace, ids) if here is not None else None) or ""

    def look(self, disk: bool = True) -> None:
        """Ask the engine now. disk: also what lies in the folder, which takes longer than what lies in memory."""
        here = runtime.current()
        found = here.describe_cache(MAX_NODES) if here is not None else None
        stored = here.cache_info() if found is not None and disk and here is not None else None
        with self._looking:
            if found is None:
                self._facts = {"state": "not started" if here is None or not here.status().get("models") else "off"}
                return
            self.model.take(found["tree"])
            self._facts = {**_facts(found), "disk": _disk(stored) if stored is not None else self._facts.get("disk")}

    def text(self, edge: str, block: int) -> str:
        """The text of one block of an edge. Raises RequestError if it has left the cache."""
        with self._looking:
            try:
                return self.model.text(edge, block)
            except LookupError:
                raise RequestError("This block has left the cache.", "Run the cell that used it again.") from None

    def _fresh(self) -> dict[str, Any]:
        self.look()
        return self.record()

    def shown(self) -> None:
        self.session.beat.add(self._tell)

    def _tell(self, status: dict[str, Any]) -> bool:
        """One beat of the engine: look if its cache has changed since, but not at every one of many beats in a row."""
        presence = self._presence
        if presence is None or presence.widget is None or not presence.open:
            return False
        cache = status.get("cache")
        now = time.monotonic()
        if cache != self._seen and (now >= self._next_look or not _busy(status)):
            self._seen = cache
            self.look(disk=not _busy(status))
            took = time.monotonic() - now
            self._next_look = now + took + max(EVERY_S, LOOK_SHARE * took)
            self.epoch += 1
            presence.widget.record = self.record()
        return True

    # -- record ----------------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        with self._looking:
            return {"schema": CACHE_SCHEMA, "key": self.key, "epoch": self.epoch, **self._facts, **self.model.record()}

    def bundle(self) -> dict[str, Any]:
        record = self.record()
        said = "\n".join(_lines(record))
        return bundle(el("div", "run", preformatted(said)), said)


def _busy(status: Mapping[str, Any]) -> bool:
    return any(model.get("rows") or model.get("queue") for model in status.get("models") or [])


def _facts(found: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and counts. found: of `describe_cache`."""
    stats = found["stats"]
    rooms = stats["namespaces"].values()
    return {
        "state": "ready",
        "models": sorted({plain(name) for name in found.get("models", {}).values()}),
        "ram": {
            "used": stats["used_bytes"],
            "budget": stats["budget_bytes"],
            "leased": stats["leased_bytes"],
            "blocks": sum(room["blocks"] for room in rooms),
            "tails": sum(room["tails"] for room in rooms),
        },
        "counts": {name: stats[name] for name in ("hits", "misses", "hit_tokens", "asked_tokens", "evictions", "spilled", "refused")},
    }


def _disk(info: Mapping[str, Any]) -> dict[str, Any] | None:
    """Sizes of the SSD tier, None where it is off. info: of `cache_info`."""
    disk, memory = info["disk"], info["memory"]
    if not disk["budget_bytes"]:
        return None
    pending = memory["queued_bytes"] if memory else 0
    return {"used": disk["used_bytes"], "budget": disk["budget_bytes"], "records": disk["blocks"], "pending": pending}


def _lines(record: Mapping[str, Any]) -> list[str]:
    """The map as text."""
    if record["state"] != "ready":
        return ["prefix cache: off" if record["state"] == "off" else "prefix cache: no engine is running"]
    ram, counts = record["ram"], record["counts"]
    share = counts["hit_tokens"] / counts["asked_tokens"] if counts["asked_tokens"] else 0.0
    lines = [
        f"prefix cache  {size(ram['used'])} of {size(ram['budget'])} in RAM, {ram['blocks']} blocks",
        f"from cache    {counts['hit_tokens']:,} of {counts['asked_tokens']:,} prompt tokens ({share:.0%})",
        f"evictions     {counts['evictions']:,}",
    ]
    depth: list[int] = []
    for edge in record["edges"]:
        depth.append(0 if edge["parent"] is None else depth[edge["parent"]] + 1)
        who = ", ".join(edge["users"]) or " ".join(edge["head"].split())[:40]
        tail = f" + {edge['tail']} tokens" if edge["tail"] else ""
        lines.append(f"{'  ' * min(depth[-1], 12)}- {edge['blocks']} blocks{tail}  {edge['shares']} share  {size(edge['bytes'])}  {who}")
    out = record["left_out"]
    return [*lines, f"({out['blocks']:,} blocks more)"] if out["blocks"] else lines


def _widget(**traits: Any) -> View:
    from mlxnb_widgets.cache import CacheWidget

    return CacheWidget(**traits)


def cache_map() -> CacheMap:
    """Show what the engine's prefix cache holds in the current cell, live: which chats and cells share which blocks."""
    view = CacheMap()
    view.show()
    return view
