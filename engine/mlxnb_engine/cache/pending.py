"""Prefix-aware admission: of requests that share an uncached prefix one prefills, the others wait for its blocks."""

from __future__ import annotations

from collections.abc import Sequence


class PendingPrefixes:
    """Which request is about to compute which blocks.

    Owner: engine thread; not thread-safe. Invariant: a key has one maker, the first to announce it. A maker never waits (it
    announces at the moment it starts), so waiting has no cycles. Lifetime of an announcement: until `published` or `withdraw`;
    a maker that ends in any way, failed and cancelled included, withdraws, and whoever waited asks again.
    """

    def __init__(self) -> None:
        self._makers: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._makers)

    def maker(self, keys: Sequence[bytes]) -> str | None:
        """Who is about to compute the first of these keys: waiting for it gains a block at least. None: nobody.

        keys: of the blocks that the asker lacks, in order of the chain. The first decides, since no block is of use without it.
        """
        return self._makers.get(keys[0]) if keys else None

    def announce(self, owner: str, keys: Sequence[bytes]) -> str | None:
        """Become the maker of these keys, unless another is the maker of the first: then nothing changes and it is named.

        A later key that is already another's stays with it.
        """
        other = self.maker(keys)
        if other is not None and other != owner:
            return other
        for key in keys:
            self._makers.setdefault(key, owner)
        return None

    def published(self, key: bytes) -> None:
        """The block is there, or never will be: nobody needs to wait for it."""
        self._makers.pop(key, None)

    def withdraw(self, owner: str) -> None:
        """Forget all that this request announced and has not published. Idempotent."""
        self._makers = {key: maker for key, maker in self._makers.items() if maker != owner}
