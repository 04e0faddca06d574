"""`Budget`: how many bytes the cache directory may have, who goes when it is full, and when nothing is written at all."""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable, Collection

from . import labels
from .blocks import RECORD_FORMAT
from .files import FileOps, Space
from .home import Home, attempt
from .listing import BAD_RECORD, Listing

QUARANTINE_FILES = 16
QUARANTINE_BYTES = 2**30
FLOOR_BYTES = 10 * 2**30
FLOOR_SHARE = 20
PAUSE_S = 60.0
LONGEST_PAUSE_S = 600.0
LOCK_WAIT_S = 1.0
_SLACK = 32  # evict this share of the budget more than is needed, so as not to sort the listing for each record
Spare = Callable[[], Collection[str]]
"""Paths that an eviction must leave. It would be no use to make room for a block by deleting its ancestors."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class Budget:
    """File bytes of all processes and namespaces, temporary and quarantined files included, against one limit.

    Owner: the I/O thread. Invariant: used_bytes <= limit_bytes after each `reserve` that returned True; several processes that
    reserve at once exceed it by at most one record each. settle: writes the stamps that are due, so that eviction sees them.
    """

    def __init__(self, limit_bytes: int, root: str, listing: Listing, home: Home, files: FileOps, settle: Callable[[], None]) -> None:
        self.limit_bytes = limit_bytes
        self._root, self._listing, self._home, self._files, self._settle = root, listing, home, files, settle
        self.reserved_bytes = 0

    @property
    def used_bytes(self) -> int:
        """As last seen, and what is reserved."""
        return self._listing.record_bytes + self._listing.other_bytes + self.reserved_bytes

    def reserve(self, size: int, spare: Spare) -> bool:
        """Set these bytes aside until `release`; False if there is no room and none could be made. Raises OSError."""
        if size > self.limit_bytes:
            return False
        self._listing.refresh()
        if self.used_bytes + size > self.limit_bytes:
            self.evict(self.limit_bytes - size - self.limit_bytes // _SLACK, spare)
        if self.used_bytes + size > self.limit_bytes:
            return False
        self.reserved_bytes = size
        return True

    def release(self) -> None:
        """What was reserved is a listed record by now, or never will be. Idempotent."""
        self.reserved_bytes = 0

    def disk_allows(self, size: int) -> bool:
        """Whether so much can be written without going below min(10 GiB, 5 %) of free space. Raises OSError."""
        space = self._files.space(self._root)
        return space.free - size >= floor_of(space)

    def evict(self, goal_bytes: int, spare: Spare) -> None:
        """Delete until no more than this is used, or as far as it goes; nothing while another process keeps the lock. Raises OSError."""
        with self._home.exclusive(LOCK_WAIT_S) as locked:
            if locked:
                self.make_room(goal_bytes, spare)

    def make_room(self, goal_bytes: int, spare: Spare = frozenset) -> None:
        """Under the lock: sweep, then bad records go, then old formats, then the records used longest ago. Raises OSError."""
        self._settle()
        self._home.sweep()
        self._listing.refresh()
        if self.used_bytes > goal_bytes and self._listing.other_bytes:
            self.trim_quarantine(0, 0)
        if self.used_bytes <= goal_bytes:
            return
        spared = spare()
        heap = [(_is_current(path), entry.mtime_ns, path) for path, entry in self._listing.items() if path not in spared]
        heapq.heapify(heap)
        while heap and self.used_bytes > goal_bytes:
            current, known_ns, path = heapq.heappop(heap)
            try:
                used_ns = self._files.look(f"{self._root}/{path}").mtime_ns
                if used_ns > known_ns:  # another process has used it since
                    heapq.heappush(heap, (current, used_ns, path))
                    continue
                self._files.unlink(f"{self._root}/{path}")
            except FileNotFoundError:
                pass
            except OSError:
                continue
            self._listing.discard(path)

    def clear(self, namespace: bytes | None) -> tuple[int, int] | None:
        """Delete what is kept of a namespace and its name, or of all with what was set aside: records and bytes that went. Raises OSError.

        None: another process keeps the lock. Leaves go before parents, so that what an interruption leaves can be used.
        """
        with self._home.exclusive(LOCK_WAIT_S) as locked:
            if not locked:
                return None
            self._settle()
            self._home.sweep()
            self._listing.refresh()
            before, files = self.used_bytes, 0
            mine = (pair for pair in self._listing.items() if namespace is None or namespace.hex() in pair[0].split("/"))
            for path, _ in sorted(mine, key=lambda pair: pair[1].mtime_ns):
                if attempt(self._files.unlink, f"{self._root}/{path}"):
                    self._listing.discard(path)
                    files += 1
            labels.forget(self._files, self._root, namespace)
            if namespace is None:
                self.trim_quarantine(0, 0)
            return files, before - self.used_bytes

    def trim_quarantine(self, most_files: int = QUARANTINE_FILES, most_bytes: int = QUARANTINE_BYTES) -> None:
        """Delete the oldest until no more than this is left. Raises OSError."""
        folder = f"{self._root}/quarantine"
        found = [f for f in self._files.list(folder) if f.kind == "file" and BAD_RECORD.fullmatch(f.name)]
        total = 0
        for count, file in enumerate(sorted(found, key=lambda f: f.mtime_ns, reverse=True), 1):
            total += file.size
            if count > most_files or total > most_bytes:
                attempt(self._files.unlink, f"{folder}/{file.name}")
        self._listing.recount()


class Pause:
    """Disk-full mode: no writing for 60 s after a full disk, then for twice as long each time, up to 10 min, until a write works."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: float | None = None
        self._length_s = PAUSE_S

    @property
    def over(self) -> bool:
        return self._until is None or self._clock() >= self._until

    def begin(self) -> None:
        self._until = self._clock() + self._length_s
        self._length_s = min(2 * self._length_s, LONGEST_PAUSE_S)

    def end(self) -> None:
        """A write worked."""
        self._until, self._length_s = None, PAUSE_S


def floor_of(space: Space) -> int:
    """Free bytes below which nothing is written."""
    return min(FLOOR_BYTES, space.total // FLOOR_SHARE)


def _is_current(path: str) -> bool:
    return int(path[1 : path.index("/")]) >= RECORD_FORMAT
