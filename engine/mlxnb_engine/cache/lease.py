"""`Lease`: what `PrefixCache.take` gives to a borrower."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .blocks import Block, Payload, T, Tail, first_seen, root_key
from .nodes import Node

if TYPE_CHECKING:
    from .tree import PrefixCache


class Lease:
    """Blocks promised to stay until `close()`, and how many of their tokens are meant.

    length: tokens covered, 0 for a miss. blocks: the whole ones, from the first on. part: a block or tail of which the first
    `length - 64 * len(blocks)` tokens follow them; None if the lease ends at a block end. key: that of the last whole block (of
    the root, if there is none): the parent of the next one.
    Lifetime: closed by whoever took it, once its copies are evaluated; then it lets go of the blocks. Nothing in it may be
    written to.
    """

    def __init__(self, cache: PrefixCache, namespace: bytes, length: int, nodes: list[Node]) -> None:
        self.length = length
        self.blocks: tuple[Block, ...] = tuple(node.block for node in nodes[: length // T] if node.block is not None)
        self.part: Block | Tail | None = nodes[-1].value if length % T else None
        self.key = self.blocks[-1].key if self.blocks else root_key(namespace)
        self._cache, self._nodes = cache, nodes

    @property
    def attachment(self) -> Payload | None:
        """State right after the last token, if the lease ends at a block end that has one."""
        return self.blocks[-1].attachment if self.blocks and self.part is None else None

    def needed(self, window: int | None) -> tuple[Block, ...]:
        """The whole blocks that a layer must get back. window: tokens a sliding layer sees, None for one that sees all."""
        return self.blocks[first_seen(self.length, window) :]

    def close(self) -> None:
        """Give the promise back. Idempotent."""
        self._cache._release(self)
        self.blocks, self.part, self._nodes = (), None, []

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
