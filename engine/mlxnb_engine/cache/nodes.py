"""The places of the prefix cache's tree, the walk that finds how much of a prompt is there, and which leaf goes first.

Root(namespace) --key--> block 0 --key--> block 1 --key--> block 2 --ids--> tail (1 to 63 tokens)
                                    |--key--> block 1'
                                    |--ids--> tail'
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

from .blocks import Block, Payload, Reuse, T, Tail, block_key, root_key


@dataclass(eq=False, slots=True)
class Node:
    """A place in the tree. value, parent: None for the top.

    used: tick of the last use that ended here, or in what has been below it since. Unique among linked nodes.
    linked: it can be found. False once evicted, superseded or dropped; a leased one is counted until its last lease closes.
    stored: the spill callback has accepted it, so that descendants may follow it there.
    """

    value: Block | Tail | None
    parent: Node | None
    root: Root
    children: dict[bytes, Node] = field(default_factory=dict)
    tails: dict[tuple[int, ...], Node] = field(default_factory=dict)
    leases: int = 0
    used: int = 0
    session: str | None = None
    linked: bool = False
    stored: bool = False

    @property
    def block(self) -> Block | None:
        return self.value if isinstance(self.value, Block) else None

    @property
    def ids(self) -> tuple[int, ...]:
        return self.value.ids if self.value is not None else ()

    @property
    def nbytes(self) -> int:
        return self.value.nbytes if self.value is not None else 0

    @property
    def attachment(self) -> Payload | None:
        return self.value.attachment if isinstance(self.value, Block) else None

    @property
    def end(self) -> int:
        """Tokens up to the end of this block; 0 for the top. Not for tails."""
        return self.value.end if isinstance(self.value, Block) else 0

    @property
    def evictable(self) -> bool:
        return self.linked and self.parent is not None and not (self.leases or self.children or self.tails)

    def below(self) -> Iterator[Node]:
        return chain(self.children.values(), self.tails.values())

    def common(self, ids: Sequence[int]) -> int:
        """How many leading ids are its own."""
        pairs = zip(self.ids, ids, strict=False)
        return next((place for place, (own, other) in enumerate(pairs) if own != other), min(len(self.ids), len(ids)))


class Ages:
    """The evictable nodes, least recently used first.

    An inner node is as young as the youngest that was ever below it (`Root.remove`), so it is enough to mark the end of what is
    used: a use costs the same at any depth.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, Node] = {}
        self._ticks: list[int] = []  # a heap; a tick that is no key of _leaves is passed over
        self._now = 0

    def use(self, node: Node) -> None:
        self.discard(node)
        self._now += 1
        node.used = self._now
        self.add(node)

    def add(self, node: Node) -> None:
        """If it is evictable: it may be the next to go."""
        if node.evictable:
            self._leaves[node.used] = node
            heapq.heappush(self._ticks, node.used)
            if len(self._ticks) > 2 * len(self._leaves) + 64:
                self._ticks = sorted(self._leaves)

    def discard(self, node: Node) -> None:
        if self._leaves.get(node.used) is node:
            del self._leaves[node.used]

    def oldest(self) -> Node:
        """Raises IndexError if there is none."""
        while self._ticks[0] not in self._leaves:
            heapq.heappop(self._ticks)
        return self._leaves[self._ticks[0]]

    def adds_up(self, nodes: Sequence[Node]) -> bool:
        """Are the evictable ones of these, and no others, in it?"""
        leaves = {node.used: node for node in nodes if node.evictable}
        return self._leaves == leaves and len(leaves) == sum(n.evictable for n in nodes) and leaves.keys() <= set(self._ticks)


class Root:
    """One namespace of the tree.

    blocks: the nodes of whole blocks by key, `top` among them under the root key. nbytes: of what is linked. largest: bytes of the
    largest node there has been.
    Invariant: no tail is a prefix of another tail or block under the same parent.
    """

    def __init__(self, namespace: bytes) -> None:
        self.namespace, self.key = namespace, root_key(namespace)
        self.top = Node(None, None, self, linked=True)
        self.blocks = {self.key: self.top}
        self.tails = self.nbytes = self.largest = self.hits = self.misses = 0

    def add(self, node: Node) -> None:
        """Make a node findable under its parent, which is there and has nothing in this place."""
        assert node.parent is not None and node.value is not None
        if isinstance(node.value, Block):
            node.parent.children[node.value.key] = self.blocks[node.value.key] = node
        else:
            node.parent.tails[node.value.ids] = node
            self.tails += 1
        node.linked = True
        self.nbytes += node.nbytes
        self.largest = max(self.largest, node.nbytes)

    def attach(self, node: Node, attachment: Payload) -> None:
        """Give a block the attachment that it lacks. Who has the block already keeps it as it was."""
        assert node.block is not None
        node.value = replace(node.block, attachment=attachment)
        node.stored = False  # what was stored lacks it
        self.nbytes += attachment.nbytes
        self.largest = max(self.largest, node.nbytes)

    def remove(self, leaf: Node) -> None:
        assert leaf.parent is not None and leaf.value is not None
        if isinstance(leaf.value, Block):
            del leaf.parent.children[leaf.value.key], self.blocks[leaf.value.key]
        else:
            del leaf.parent.tails[leaf.value.ids]
            self.tails -= 1
        leaf.linked = False
        leaf.parent.used = max(leaf.parent.used, leaf.used)
        self.nbytes -= leaf.nbytes

    def remove_all(self) -> list[Node]:
        """Take out every node; returned, parents first. No node leads to one below it then: none waits for the collector."""
        nodes = list(self.nodes())
        for node in [self.top, *nodes]:
            node.children, node.tails, node.linked = {}, {}, node is self.top
        self.blocks, self.tails, self.nbytes = {self.key: self.top}, 0, 0
        return nodes

    def nodes(self) -> Iterator[Node]:
        """Every node but the top, parents first."""
        todo = list(self.top.below())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.below())

    def aged(self) -> list[tuple[Node, int]]:
        """Every node but the top with the tick of its last use, what is below it included; parents first."""
        nodes = list(self.nodes())
        ages = {node: node.used for node in [self.top, *nodes]}
        for node in reversed(nodes):
            assert node.parent is not None
            ages[node.parent] = max(ages[node.parent], ages[node])
        return [(node, ages[node]) for node in nodes]

    def longest(self, ids: Sequence[int], reuse: Reuse, session: str | None) -> tuple[int, list[Node]]:
        """The longest usable prefix of at most len(ids) - 1 tokens: its length, and the nodes that hold it.

        These are its whole blocks from the first on and, if it ends within one, last the block or tail in which it ends.
        """
        limit, node, key = len(ids) - 1, self.top, self.key
        nodes: list[Node] = []
        while node.end + T <= limit:
            want = tuple(ids[node.end : node.end + T])
            key = block_key(key, want)
            child = node.children.get(key)
            if child is None or child.ids != want:
                break
            nodes.append(child)
            node = child
        length = node.end
        if reuse.trimmable:
            rest = tuple(ids[length : min(limit, length + T)])
            best = max(node.below(), key=lambda other: (other.common(rest), other.session == session), default=None)
            if best is not None and (more := best.common(rest)):
                nodes.append(best)
                length += more
        else:
            while nodes and nodes[-1].attachment is None:
                nodes.pop()
            length = nodes[-1].end if nodes else 0
        return (length, nodes) if length >= reuse.minimum_offset else (0, [])

    def adds_up(self) -> bool:
        """Do counts, bytes, keys and places agree, and does the invariant hold?"""
        nodes = list(self.nodes())
        blocks = [self.top, *(node for node in nodes if node.block is not None)]
        keys = {node.block.key if node.block is not None else self.key: node for node in blocks}
        return (
            self.nbytes == sum(node.nbytes for node in nodes)
            and self.tails == len(nodes) + 1 - len(blocks)
            and self.blocks == keys
            and all(node.linked and node.parent is not None for node in nodes)
            and all(node.parent is None or node.end == node.parent.end + T for node in blocks)
            and all(below.parent is node for node in blocks for below in node.below())
            and all(a != b[: len(a)] for node in blocks for a, b in pairwise(sorted(x.ids for x in node.below())))
        )


class Seen(NamedTuple):
    """What a node was at some moment, without its state: that must be let go of on the engine thread."""

    place: int
    parent: int
    namespace: bytes
    key: bytes | None
    start: int
    ids: tuple[int, ...]
    nbytes: int
    attachment: bool
    leases: int
    session: str | None
    stored: bool


def youngest(roots: Iterable[Root], limit: int) -> tuple[list[Seen], int]:
    """The `limit` most recently used blocks and tails of these, each after its parent, and how many there are besides."""
    aged = [pair for root in roots for pair in root.aged()]
    aged.sort(key=lambda pair: -pair[1])  # stable, and a parent is as young as the youngest below it: it stays before that
    return [_seen(node) for node, _ in aged[:limit]], max(0, len(aged) - limit)


def _seen(node: Node) -> Seen:
    key = node.block.key if node.block is not None else None
    start = node.parent.end if node.parent is not None else 0
    about = (node.nbytes, node.attachment is not None, node.leases, node.session, node.stored)
    return Seen(id(node), id(node.parent), node.root.namespace, key, start, node.ids, *about)


def describe(chosen: Iterable[Seen]) -> list[dict[str, Any]]:
    """These nodes, JSON-able. parent: place among them, None under a root. start: tokens before it."""
    places: dict[int, int] = {}
    nodes = []
    for seen in chosen:
        places[seen.place] = len(places)
        nodes.append(
            {
                "parent": places.get(seen.parent),
                "namespace": seen.namespace.hex(),
                "kind": "block" if seen.key is not None else "tail",
                "key": seen.key.hex() if seen.key is not None else None,
                "start": seen.start,
                "ids": list(seen.ids),
                "bytes": seen.nbytes,
                "attachment": seen.attachment,
                "leases": seen.leases,
                "session": seen.session,
                "stored": seen.stored,
            }
        )
    return nodes
