"""`PrefixCache`: blocks and tails in RAM. What may be taken, what is kept, and what goes when there is no room."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import EngineDead
from .blocks import Block, Payload, Reuse, T, Tail, block_key, root_key
from .lease import Lease
from .nodes import Ages, Node, Root, describe, youngest

Spill = Callable[[Block, bytes], bool]
"""(block, namespace) -> it is stored or queued. Called on the thread that caused it, with no lock of the cache held, parents
before children; after a refusal descendants are not offered. It must not call back into the cache."""


@dataclass(slots=True)
class _Counts:
    """hit_tokens: covered by leases. refused: not kept, for want of room or a parent. collisions: equal key, other ids."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    asked_tokens: int = 0
    evictions: int = 0
    spilled: int = 0
    spill_refused: int = 0
    spill_failures: int = 0
    refused: int = 0
    collisions: int = 0


class PrefixCache:
    """Radix tree of immutable 64-token blocks in RAM under one byte budget, with a spill callback behind it.

    Owner: engine thread, which alone takes, puts, closes leases and drops, since payloads are released there. `stats`,
    `describe_tree` and `check` may be called from any thread.
    Invariant: used bytes == sum of nbytes <= budget_bytes. A block with a resident child or a lease is not evicted; what then
    finds no room is not kept. Every resident block is reachable from its root.
    Lifetime: built with the engine; after close() nothing is kept, and taking or putting raises EngineDead.
    """

    def __init__(self, *, budget_bytes: int, spill: Spill | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._spill = spill
        self._lock = threading.Lock()
        self._roots: dict[bytes, Root] = {}
        self._ages = Ages()
        self._leases: set[Lease] = set()
        self._unsaved: dict[Node, None] = {}  # blocks to offer to `spill` before they have to go, in the order they came
        self._used = self._leased = 0  # bytes: of all that is counted; of that, under a lease
        self._counts = _Counts()
        self._closed = False
        self.changes = 0
        """Grows with all that could change how much of a prompt is kept: whoever asked before it grew need not ask again."""

    # -- take ----------------------------------------------------------------------------------------------------------

    def can_take(self, ids: Sequence[int], namespace: bytes, reuse: Reuse) -> int:
        """Tokens that `take` would cover now. Changes nothing, not even ages."""
        with self._lock:
            root = self._roots.get(namespace)
            return root.longest(ids, reuse, None)[0] if root is not None else 0

    def take(self, ids: Sequence[int], namespace: bytes, reuse: Reuse, session: str | None = None) -> Lease:
        """Lease the longest usable prefix of these ids; the tree keeps it too.

        ids: n >= 1 prompt ids. The lease covers at most n - 1 tokens, so that one is always run. A miss is an empty lease.
        session: whose state is preferred among equally long candidates; it never makes one longer. Raises EngineDead after
        close(). Source: comparing ids after the key hit, GeeeekExplorer/nano-vllm block_manager.py::can_allocate.
        """
        with self._lock:
            root = self._root(namespace)
            length, nodes = root.longest(ids, reuse, session)
            for counts in (self._counts, root):
                counts.hits += length > 0
                counts.misses += length == 0
            self._counts.hit_tokens += length
            self._counts.asked_tokens += len(ids)
            return self._lease(root, length, nodes, session)

    def hold(self, ids: Sequence[int], namespace: bytes) -> Lease:
        """Lease the whole blocks of these ids that are here, usable or not, while others are being fetched. Counts as no hit."""
        with self._lock:
            root = self._root(namespace)
            length, nodes = root.longest(ids, Reuse(), None)
            whole = length // T
            return self._lease(root, whole * T, nodes[:whole], None)

    def _lease(self, root: Root, length: int, nodes: list[Node], session: str | None) -> Lease:
        lease = Lease(self, root.namespace, length, nodes)
        if nodes:
            self._touch(nodes[-1], session)
        for node in nodes:
            self._leased += node.nbytes if not node.leases else 0
            node.leases += 1
            self._ages.discard(node)
        self._leases.add(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        with self._lock:
            if lease not in self._leases:
                return
            self._leases.discard(lease)
            for node in lease._nodes:
                node.leases -= 1
                if not node.leases:
                    self._leased -= node.nbytes
                    self._used -= node.nbytes if not node.linked else 0
                    self._ages.add(node)

    # -- put -----------------------------------------------------------------------------------------------------------

    def put(self, block: Block, namespace: bytes, session: str | None = None) -> bool:
        """Keep a block whose arrays are evaluated. True: it is resident, now or already. False: put none of its descendants.

        A second publisher of a key keeps the first block, refreshes its age and adds an attachment that it lacks. A block that
        finds no parent or no room goes to `spill` instead. Raises ValueError for a block that does not follow from its namespace
        and parent, EngineDead after close(); nothing is kept then.
        """
        if block.key != block_key(block.parent, block.ids) or (block.parent == root_key(namespace)) != (block.index == 0):
            raise ValueError(f"block {block.index} has not the key that follows from its namespace, parent and ids")
        leaving: list[Node] = []
        with self._lock:
            root = self._root(namespace)
            kept = self._put(Node(block, root.blocks.get(block.parent), root), block, session, leaving)
        self._offer(leaving)
        return kept

    def put_stored(self, block: Block, namespace: bytes, session: str | None = None) -> bool:
        """`put` of a block that was read from where `spill` writes to: it need not be offered there again."""
        kept = self.put(block, namespace, session)
        node = self._roots[namespace].blocks.get(block.key)
        if kept and node is not None and (node.attachment is None or block.attachment is not None):
            node.stored = True
            self._unsaved.pop(node, None)
        return kept

    def _put(self, node: Node, block: Block, session: str | None, leaving: list[Node]) -> bool:
        """leaving: gets what is to be spilled."""
        present = node.root.blocks.get(block.key)
        if present is not None:
            if present.parent is not node.parent or present.ids != block.ids:
                self._counts.collisions += 1
                return False
            self._touch(present, session)
            if not self._attach(present, block.attachment, leaving):
                leaving.append(node)
            return True
        if node.parent is not None and node.parent.end != block.index * T:
            raise ValueError(f"block {block.index} follows one that ends at {node.parent.end} tokens")
        if node.parent is None or not self._fits(block.nbytes, node.parent):
            self._counts.refused += 1
            leaving.append(node)
            return False
        self._link(node, session, leaving)
        return True

    def _attach(self, present: Node, attachment: Payload | None, leaving: list[Node]) -> bool:
        """Give it to a block, just used, that has none. False: there is no room for it."""
        if attachment is None or present.attachment is not None or present.block is None:
            return True
        if not self._fits(attachment.nbytes, present):
            return False
        present.root.attach(present, attachment)
        self.changes += 1
        self._unsaved[present] = None
        self._used += attachment.nbytes
        self._leased += attachment.nbytes if present.leases else 0
        self._evict(leaving)
        return True

    def put_tail(self, tail: Tail, namespace: bytes, session: str | None = None) -> bool:
        """Keep the part-filled end of a trimmable row. It replaces its own strict prefixes under the same parent.

        True: its tokens are resident, in it, a longer tail or a block. Tails are never spilled. Raises EngineDead after close().
        """
        leaving: list[Node] = []
        with self._lock:
            root = self._root(namespace)
            parent = root.blocks.get(tail.parent)
            longer = next((x for x in parent.below() if x.common(tail.ids) == len(tail.ids)), None) if parent is not None else None
            if longer is not None:
                self._touch(longer, session)
                return True
            if parent is None or not self._fits(tail.nbytes, parent):
                self._counts.refused += 1
                return False
            self._link(Node(tail, parent, root), session, leaving)
        self._offer(leaving)
        return True

    # -- room ----------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes for blocks if all went that may go."""
        return self.budget_bytes - self._leased

    def _fits(self, nbytes: int, keep: Node) -> bool:
        """Could so many bytes be added if all went but leased blocks, `keep` and its ancestors?"""
        most = self._leased + keep.end // T * keep.root.largest
        if min(self._used, most) + nbytes <= self.budget_bytes:  # nearly always, and then depth costs nothing
            return True
        held, node = self._leased, keep
        while node.parent is not None and not node.leases:  # a lease holds all ancestors too, and they are counted already
            held, node = held + node.nbytes, node.parent
        return held + nbytes <= self.budget_bytes

    def _evict(self, leaving: list[Node]) -> None:
        """Evict leaves, oldest first, until the budget holds. What `_fits` kept has just been used, so it is not reached."""
        while self._used > self.budget_bytes:
            node = self._ages.oldest()
            self._unlink(node)
            self._counts.evictions += 1
            if node.block is not None:
                leaving.append(node)

    def _link(self, node: Node, session: str | None, leaving: list[Node]) -> None:
        """Put a node that fits under its parent, in place of the tails that it continues."""
        parent = node.parent
        assert parent is not None
        for known in [known for known in parent.tails if node.ids[: len(known)] == known]:
            self._unlink(parent.tails[known])
        self._ages.discard(parent)
        node.root.add(node)
        self.changes += 1
        if node.block is not None:
            self._unsaved[node] = None
        self._used += node.nbytes
        self._touch(node, session)
        self._evict(leaving)

    def _unlink(self, leaf: Node) -> None:
        """Nobody finds it from now on. Its bytes count until the last lease on it closes."""
        assert leaf.parent is not None
        self._ages.discard(leaf)
        self._unsaved.pop(leaf, None)
        leaf.root.remove(leaf)
        self.changes += 1
        self._ages.add(leaf.parent)
        self._used -= leaf.nbytes if not leaf.leases else 0

    def _touch(self, node: Node, session: str | None) -> None:
        self._ages.use(node)
        node.session = session if session is not None else node.session

    def save_some(self, most_bytes: int) -> bool:
        """Offer blocks to the spill callback before they have to go, about so many bytes of them; whether more wait.

        What it refuses waits no longer, and is offered again when it leaves.
        """
        left = most_bytes
        while self._unsaved and left > 0:
            node = next(iter(self._unsaved))
            left -= node.nbytes
            self._offer([node])
            self._unsaved.pop(node, None)
        return bool(self._unsaved)

    @property
    def unsaved(self) -> int:
        """Blocks that the spill callback has not accepted."""
        return sum(node.block is not None and not node.stored for root in self._roots.values() for node in root.nodes())

    def save_all(self) -> None:
        """Every block is to be offered, parents first, also what was accepted before: it may be gone there by now."""
        for node in [node for root in self._roots.values() for node in root.nodes() if node.block is not None]:
            node.stored = False
            self._unsaved[node] = None

    def _offer(self, leaving: list[Node]) -> None:
        """Hand blocks to the spill callback, each after those of its ancestors that it has not accepted yet."""
        for last in leaving if self._spill is not None else ():
            path: list[Node] = []
            node: Node | None = last
            while node is not None and node.block is not None and not node.stored:
                path.append(node)
                node = node.parent
            for node in reversed(path):
                node.stored = self._accepted(node)
                self._unsaved.pop(node, None)
                if not node.stored:
                    break

    def _accepted(self, node: Node) -> bool:
        assert self._spill is not None and node.block is not None
        try:
            accepted = bool(self._spill(node.block, node.root.namespace))
        except Exception:  # a cache problem is a miss, never an error of the row that caused the eviction
            self._counts.spill_failures += 1
            return False
        self._counts.spilled += accepted
        self._counts.spill_refused += not accepted
        return accepted

    # -- life ----------------------------------------------------------------------------------------------------------

    def _root(self, namespace: bytes) -> Root:
        if self._closed:
            raise EngineDead("The prefix cache is closed.", "Run the cell again: the next request starts a fresh engine.")
        if namespace not in self._roots:
            self._roots[namespace] = Root(namespace)
        return self._roots[namespace]

    def drop(self, namespace: bytes) -> None:
        """Forget a namespace; nothing is spilled. What is under a lease is not found any more, and counted until that closes."""
        with self._lock:
            root = self._roots.pop(namespace, None)
            self.changes += 1
            for node in root.remove_all() if root is not None else ():
                self._used -= node.nbytes if not node.leases else 0
                self._ages.discard(node)
                self._unsaved.pop(node, None)

    def clear(self) -> None:
        """Forget everything. Nothing is spilled."""
        for namespace in list(self._roots):
            self.drop(namespace)

    def close(self) -> None:
        """Release everything. Raises RuntimeError, after that, if a lease is still open."""
        self._closed = True
        self.clear()
        if self._leases:
            raise RuntimeError(f"{len(self._leases)} leases are open while the prefix cache closes")

    # -- views ---------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """A JSON-able snapshot: sizes in bytes, counts since the start, and per namespace (hex) what is resident."""
        with self._lock:
            return {
                "budget_bytes": self.budget_bytes,
                "used_bytes": self._used,
                "leased_bytes": self._leased,
                "leases": len(self._leases),
                **asdict(self._counts),
                "namespaces": {
                    root.namespace.hex(): {
                        "blocks": len(root.blocks) - 1,
                        "tails": root.tails,
                        "bytes": root.nbytes,
                        "hits": root.hits,
                        "misses": root.misses,
                    }
                    for root in self._roots.values()
                },
            }

    def describe_tree(self, limit: int = 256) -> dict[str, Any]:
        """The `limit` most recently used blocks and tails, JSON-able, each after its parent.

        parent: place in `nodes`, None under a root. start: tokens before it. left_out: how many nodes there are besides.
        """
        with self._lock:
            chosen, left_out = youngest(self._roots.values(), limit)
        # Without the lock: what costs the time is the text, and a put must not wait for it.
        return {"nodes": describe(chosen), "left_out": left_out}

    def check(self) -> None:
        """Raise RuntimeError unless bytes, leases and places in the tree add up."""
        with self._lock:
            linked = [node for root in self._roots.values() for node in root.nodes()]
            held = Counter(node for lease in self._leases for node in lease._nodes)
            outside = [node for node in held if not node.linked]
            claims = {
                "used bytes": self._used == sum(node.nbytes for node in linked + outside) <= self.budget_bytes,
                "leased bytes": self._leased == sum(node.nbytes for node in held),
                "leases": all(node.leases == held[node] for node in linked + outside),
                "leased blocks": not any(n.block is not None and self._roots.get(n.root.namespace) is n.root for n in outside),
                "ages": self._ages.adds_up(linked),
                **{f"namespace {root.namespace.hex()[:8]}": root.adds_up() for root in self._roots.values()},
            }
        wrong = [claim for claim, holds in claims.items() if not holds]
        if wrong:
            raise RuntimeError(f"the prefix cache does not add up: {', '.join(wrong)}")
