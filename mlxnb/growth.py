"""`Growth`: an expansion of a loom by the likeliest tokens, level by level. What a level lacks is asked for in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlxnb_engine.errors import RequestError

from .run import Run
from .trie import Node, Place, Trie

MAX_PLACES = 512
MAX_WIDTH = 16
MAX_DEPTH = 8


class Grower(Protocol):
    """What is grown: a `Loom`."""

    @property
    def trie(self) -> Trie: ...
    def ids(self, place: Place) -> list[int]: ...
    def look(self, places: Sequence[Place], width: int) -> list[Run]: ...
    def open(self, node: Node, ids: Sequence[int]) -> list[Place]: ...


def check_size(first: int, width: int, depth: int) -> None:
    """first: branches of the first level, each level after it has `width` for each. Raises RequestError for what is too much."""
    if not (1 <= width <= MAX_WIDTH and 1 <= first <= MAX_WIDTH and 1 <= depth <= MAX_DEPTH):
        raise RequestError(f"Width {width}, depth {depth} cannot be.", f"Give a width of 1 to {MAX_WIDTH} and a depth of 1 to {MAX_DEPTH}.")
    places = [first * sum(width**level for level in range(levels)) for levels in range(MAX_DEPTH + 1)]
    if places[depth] > MAX_PLACES:
        most = max(levels for levels in range(MAX_DEPTH + 1) if places[levels] <= MAX_PLACES)
        hint = f"The limit is {MAX_PLACES}; a depth of {most} gives {places[most]:,}."
        raise RequestError(f"Width {width}, depth {depth} would be {places[depth]:,} places.", hint)


@dataclass(eq=False)
class Growth:
    """An expansion under way. frontier: places whose alternatives become branches next. depth: levels to go, 0 once it is done.

    ids: those to take at the first level, instead of the likeliest. asked: the rows that look at this level. error: what ended
    it before its time; what is open so far stays.
    """

    frontier: list[Place]
    width: int
    depth: int
    ids: tuple[int, ...] = ()
    asked: list[Run] = field(default_factory=list)
    error: Exception | None = None

    def advance(self, loom: Grower) -> None:
        """Open what is known, a level at a time; ask for the rest. Call it again when the rows that were asked have ended."""
        while self.depth and all(run.done for run in self.asked):
            trie = loom.trie
            found = [(place, trie.find(loom.ids(place))) for place in self.frontier]
            known = [node for _, node in found if node is not None and node.next]
            unknown = [place for place, node in found if node is None or not node.next]
            if unknown and not self.asked:
                self.asked = loom.look(unknown, self.width)
                continue
            # One that was looked at and is not known has ended or failed: nothing grows there.
            self.frontier = [place for node in known for place in loom.open(node, self._chosen(node))]
            self.depth -= 1 if self.frontier else self.depth
            self.asked, self.ids = [], ()

    def _chosen(self, node: Node) -> list[int]:
        known = [one.id for one in node.next]
        return [token for token in self.ids if token in known] or known[: self.width]
