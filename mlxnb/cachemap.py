"""`collapse`: the prefix cache's tree as runs of blocks, small enough for a picture. Pure: no engine, no view.

describe_tree: block - block - block - block        edges: [3 blocks] -+- [1 block]
                             \\- block - tail                           \\- [1 block and a tail]
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from .record import plain

MAX_NODES = 16_384
"""Blocks that are asked of the engine, the most recently used."""
MAX_EDGES = 160
MAX_USERS = 60
USERS_NAMED = 4
HEAD_IDS = 24
GONE_KEPT = 40

Decode = Callable[[str, Sequence[int]], str]
"""(namespace, ids) -> text."""


@dataclass(eq=False, slots=True)
class Edge:
    """A run of blocks that nothing branches off, and the part-filled one at its end. ids: of each of them.

    at: blocks before it. parts: how many of its first ids its siblings have in common with it, which is less than a block.
    shares: how many users there are in it and below; users: their names, in order of last use.
    """

    id: str
    parent: int | None
    namespace: str
    at: int
    ids: list[Sequence[int]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    parts: int = 0
    tail: int = 0
    bytes: int = 0
    users: list[str] = field(default_factory=list)
    nameless: int = 0

    @property
    def blocks(self) -> int:
        return len(self.states)

    @property
    def shares(self) -> int:
        return max(1, len(self.users) + self.nameless)


def collapse(nodes: Sequence[Mapping[str, Any]]) -> list[Edge]:
    """nodes: of `PrefixCache.describe_tree`, each after its parent. The edges in the same order, each after its parent."""
    below: list[list[int]] = [[] for _ in nodes]
    roots: list[int] = []
    for place, node in enumerate(nodes):
        (roots if node["parent"] is None else below[node["parent"]]).append(place)
    edges: list[Edge] = []
    ends: list[int] = []
    todo: list[tuple[int, int | None]] = [(place, None) for place in reversed(roots)]
    while todo:
        place, parent = todo.pop()
        edge, last = _edge(nodes, below, place, parent)
        todo += [(kid, len(edges)) for kid in reversed(below[last])]
        edges.append(edge)
        ends.append(last)
    _name(nodes, edges, ends, below)
    _part(edges)
    return edges


def _part(edges: Iterable[Edge]) -> None:
    """Find where siblings part: what they say before that does not tell them apart."""
    families: dict[tuple[str, int | None], list[Edge]] = {}
    for edge in edges:
        families.setdefault((edge.namespace, edge.parent), []).append(edge)
    for family in families.values():
        family.sort(key=lambda edge: tuple(edge.ids[0]))  # then the longest common beginning is with a neighbour
        for one, other in pairwise(family):
            pairs = enumerate(zip(one.ids[0], other.ids[0], strict=False))
            common = next((place for place, (a, b) in pairs if a != b), min(len(one.ids[0]), len(other.ids[0])))
            one.parts, other.parts = max(one.parts, common), max(other.parts, common)


def _edge(nodes: Sequence[Mapping[str, Any]], below: Sequence[Sequence[int]], place: int, parent: int | None) -> tuple[Edge, int]:
    """The edge that begins here, and its last node."""
    first = nodes[place]
    edge = Edge(_id(first), parent, first["namespace"], first["start"] // 64)
    while True:
        node = nodes[place]
        edge.ids.append(node["ids"])
        edge.bytes += node["bytes"]
        if node["session"] is not None and node["session"] not in edge.users:
            edge.users.append(node["session"])
        if node["kind"] == "tail":
            edge.tail = len(node["ids"])
        else:
            edge.states.append({(0, 0): "r", (0, 1): "s", (1, 0): "l", (1, 1): "m"}[bool(node["leases"]), bool(node["stored"])])
        if len(below[place]) != 1:
            return edge, place
        (place,) = below[place]


def _id(node: Mapping[str, Any]) -> str:
    return str(node["key"])[:24] if node["key"] else f"t{node['start']}-{hash(tuple(node['ids'])) & 0xFFFFFFFFFF:x}"


def _name(nodes: Sequence[Mapping[str, Any]], edges: Sequence[Edge], ends: Sequence[int], below: Sequence[Sequence[int]]) -> None:
    """Who uses an edge uses those before it, too."""
    for edge, last in zip(edges, ends, strict=True):
        edge.nameless = int(not below[last] and not edge.users and nodes[last]["session"] is None)
    for edge in reversed(edges):
        if edge.parent is not None:
            above = edges[edge.parent]
            above.users += [user for user in edge.users if user not in above.users]
            above.nameless += edge.nameless


def packed_states(states: Iterable[str]) -> str:
    """ "rrrs" as "r3s1"."""
    return "".join(f"{state}{sum(1 for _ in run)}" for state, run in groupby(states))


class CacheModel:
    """The cache as it was told last, and what left it since this began to look. Owner: the view, behind its lock."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self.edges: list[Edge] = []
        self.gone: list[dict[str, Any]] = []
        self._held: dict[str, tuple[str | None, bool]] | None = None
        self._heads: dict[str, str] = {}
        self._out = (0, 0)
        self._left_out = 0

    def take(self, tree: Mapping[str, Any], clock: Callable[[], float] = time.time) -> None:
        """tree: of `describe_tree`."""
        nodes = tree["nodes"]
        self.edges = collapse(nodes)
        self._left_out = tree["left_out"]
        held = {node["key"]: (node["session"], node["stored"]) for node in nodes if node["key"] is not None}
        whole = not tree["left_out"]
        if whole and self._held is not None:
            lost = [self._held[key] for key in self._held.keys() - held.keys()]
            if lost:
                self._note(lost, clock())
        self._held = held if whole else None  # of a part nobody knows whether it left or was not told

    def _note(self, lost: Sequence[tuple[str | None, bool]], now: float) -> None:
        users = [user for user, _ in Counter(user for user, _ in lost if user).most_common(USERS_NAMED)]
        moment = {"t": time.strftime("%H:%M:%S", time.localtime(now)), "blocks": len(lost), "stored": sum(stored for _, stored in lost)}
        self.gone = [{**moment, "users": [plain(user) for user in users]}, *self.gone[: GONE_KEPT - 1]]

    def text(self, edge_id: str, block: int) -> str:
        """The text of one block. Raises LookupError if it is not there any more."""
        edge = next((edge for edge in self.edges if edge.id == edge_id), None)
        if edge is None or not 0 <= block < len(edge.ids):
            raise LookupError(edge_id)
        return plain(self._decode(edge.namespace, edge.ids[block]))

    def record(self) -> dict[str, Any]:
        """The edges, at most MAX_EDGES, and the users of all of them."""
        shown = self._chosen()
        places = {id(edge): place for place, edge in enumerate(shown)}
        roots = list(dict.fromkeys(edge.namespace for edge in shown))
        return {
            "edges": [self._edge_record(edge, places, roots) for edge in shown],
            "users": self._users(),
            "gone": self.gone,
            "left_out": {
                "edges": len(self.edges) - len(shown),
                "blocks": self._left_out + sum(len(edge.ids) for edge in self.edges) - sum(len(edge.ids) for edge in shown),
            },
        }

    def _chosen(self) -> list[Edge]:
        """The first are the most recently used, with those that they hang from; in order."""
        if len(self.edges) <= MAX_EDGES:
            return self.edges
        # A level at a time: a parent is chosen before what hangs from it.
        depth: list[int] = []
        for edge in self.edges:
            depth.append(0 if edge.parent is None else depth[edge.parent] + 1)
        first = sorted(range(len(self.edges)), key=lambda place: (depth[place], place))[:MAX_EDGES]
        return [self.edges[place] for place in sorted(first)]

    def _edge_record(self, edge: Edge, places: Mapping[int, int], roots: Sequence[str]) -> dict[str, Any]:
        return {
            "id": edge.id,
            "parent": None if edge.parent is None else places[id(self.edges[edge.parent])],
            "root": roots.index(edge.namespace),
            "at": edge.at,
            "blocks": edge.blocks,
            "tail": edge.tail,
            "bytes": edge.bytes,
            "states": packed_states(edge.states),
            "users": [plain(user) for user in edge.users[:USERS_NAMED]],
            "user_count": len(edge.users),
            "shares": edge.shares,
            "head": self._head(edge),
        }

    def _head(self, edge: Edge) -> str:
        """Its first words that tell it from its siblings; they change with these."""
        key = f"{edge.id}.{edge.parts}"
        if key not in self._heads:
            if len(self._heads) > 4 * MAX_EDGES:
                self._heads.clear()
            said = plain(self._decode(edge.namespace, edge.ids[0][edge.parts : edge.parts + HEAD_IDS]))[:160]
            self._heads[key] = f"…{said}" if edge.parts and said else said
        return self._heads[key]

    def _users(self) -> list[dict[str, Any]]:
        """Of every user what it shares with others, and what would be free without it; the largest first."""
        found: dict[str, dict[str, Any]] = {}
        for edge in self.edges:
            for user in edge.users:
                known = found.setdefault(user, {"name": plain(user), "shared": 0, "own": 0, "blocks": 0, "stored": 0})
                known["shared" if edge.shares > 1 else "own"] += edge.bytes
                known["blocks"] += len(edge.ids)
                known["stored"] += sum(state in "sm" for state in edge.states)
        return sorted(found.values(), key=lambda user: -(user["own"] + user["shared"]))[:MAX_USERS]
