"""`Store`: the owner of the cache directory. Publish, read, recency, budget, quarantine, sweep, disk-full mode.

    publish   reserve -> temporary file -> write -> fsync -> rename -> listing       a reader sees the old file, the new one, or none
    read      open -> fstat -> read -> `record.decode`                               anything else than the exact block is a miss

Any number of processes share a directory: they read and publish without a lock, since names are content keys and rename is
atomic. Sweep and eviction hold `flock` on root/lock. A cache problem is a miss, never an error. What it does not cover: a file
system whose fsync or flock lies, and somebody with this user's rights who changes the directory on purpose.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from . import labels, record
from .blocks import RECORD_FORMAT, Block
from .budget import FULL, PAUSE_S, Budget, Pause, Spare
from .files import FileOps, write_all
from .home import Home, attempt
from .listing import Entry, Listing, record_path
from .record import BadRecord, BlockName, Layout

Outcome = Literal["published", "kept", "refused", "failed"]
"""kept: a record that does as well is there. refused: not tried, since disk, budget or parent do not allow it. failed: I/O error."""

OPEN_WAIT_S = 10.0
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EINTR, errno.ENOENT)


class Store:
    """One process's hold on a cache directory, over all namespaces.

    Owner: the I/O thread; `usable`, `listed` and `has` may be asked by any. After a fork the child's copy is dead.
    Invariant: file bytes of all processes, temporary and quarantined ones included, <= budget_bytes before each publish; several
    processes that publish at once exceed it by at most one record each. Reserved bytes are 0 between calls.
    Lifetime: `open` once, `close` once; in between no call raises for I/O. If `open` finds no usable directory, every call is
    a miss, and `notice` got one sentence that says why.
    """

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        files: FileOps,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._root, self._files, self._notice, self._clock, self._wall_ns = str(root.absolute()), files, notice, clock, wall_ns
        self._listing = Listing(self._root, files, wall_ns)
        self._home = Home(self._root, files, clock)
        self._budget = Budget(budget_bytes, self._root, self._listing, self._home, files, self.settle)
        self._pause = Pause(clock)
        self._known: set[str] = set()  # folders that exist
        self._distrusted: set[str] = set()  # folders whose sync failed
        self._fresh: dict[bytes, bytes] = {}  # key -> namespace of records used last in their chain since the last `settle`
        self._greeted: set[bytes] = set()
        self._names: dict[bytes, str] = {}
        self._said: set[str] = set()

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the directory: sweep what dead processes left, list it, bring it within the budget."""
        try:
            self._make_dirs(self._root)
            for folder in (f"v{RECORD_FORMAT}", "tmp", "quarantine"):
                self._make_dirs(self._at(folder))
            with self._home.exclusive(OPEN_WAIT_S) as locked:
                if not locked:
                    raise OSError(errno.ETIMEDOUT, "another process keeps its lock")
                self._home.enter()
                self._budget.make_room(self._budget.limit_bytes)
        except OSError as error:
            why = "its file system has no working file locks" if error.errno in _NO_LOCKS else error.strerror or str(error)
            self._say("off", f"Nothing is cached on disk: {self._root} cannot be used ({why}). Blocks stay in memory only.")
            self.close()

    def close(self) -> None:
        """Give the directory back. Idempotent; in a forked child nothing happens."""
        if self.usable:
            self.settle()
            self._home.leave()

    @property
    def usable(self) -> bool:
        """Whether there is a directory, and this is the process that opened it."""
        return self._home.present

    def greet(self, layout: Layout) -> None:
        """Say so if the directory holds blocks and none for this namespace: a silently cold cache is hard to notice."""
        if self.usable and layout.namespace not in self._greeted:
            self._greeted.add(layout.namespace)
            stored = self._listing.namespaces()
            if stored and layout.namespace.hex() not in stored:
                self._say("cold", f"{self._root} holds blocks, but none for this model as it is set up now: its first prompts start cold.")

    def label(self, namespace: bytes, text: str) -> None:
        """Note what people call it, to be shown by `labels.read`."""
        self._names[namespace] = text
        self._name(namespace)

    def _name(self, namespace: bytes) -> None:
        if self.usable and namespace in self._names:
            attempt(labels.write, self._files, self._root, self._home.temporary(), namespace, self._names[namespace])

    def clear(self, namespace: bytes | None = None) -> tuple[int, int] | None:
        """Delete a namespace's records, or everything: files and bytes that went; None if the directory cannot be changed now."""
        try:
            return self._budget.clear(namespace) if self.usable else None
        except OSError:
            return None

    @property
    def used_bytes(self) -> int:
        return self._budget.used_bytes

    def check(self) -> None:
        """Raise AssertionError if something does not add up. Between calls only."""
        self._listing.check()
        if self._budget.reserved_bytes:
            raise AssertionError(f"{self._budget.reserved_bytes} bytes are still reserved")

    # -- publish -----------------------------------------------------------------------------------------------------

    def listed(self, namespace: bytes, key: bytes) -> bool:
        """Whether a record is there, as far as this process knows."""
        return self._listing.get(record_path(namespace, key)) is not None

    def has(self, namespace: bytes, block: Block) -> bool:
        """Whether a record is known to be there that does as well as one of this block."""
        entry = self._listing.get(record_path(namespace, block.key))
        return entry is not None and (block.attachment is None or bool(entry.attached))

    def publish(self, layout: Layout, block: Block) -> Outcome:
        """Write the record of a block unless it is there; an attachment that the record lacks replaces it.

        Raises ValueError if it is no block of this layout.
        """
        if not self.usable:
            return "refused"
        name, path = record.name_of(block), record_path(layout.namespace, block.key)
        self.greet(layout)
        if self._listing.get(path) is not None and (block.attachment is None or self.attached(layout, name)):
            self.keep(layout, (name,))
            return "kept"
        if not self._pause.over or not self._follows(layout, block):
            return "refused"
        data = record.encode(block, layout)

        def ancestors() -> set[str]:
            return {path for path, _ in self._with_ancestors([(layout.namespace, block.parent)]).values()}

        try:
            if not self._budget.reserve(len(data), ancestors) or not self._follows(layout, block):
                return "refused"
            if not self._budget.disk_allows(len(data)):
                self._say("floor", f"The disk of {self._root} is nearly full: no more blocks are saved until there is room.")
                return "refused"
            self._put(path, data, ancestors)
        except OSError as error:
            return self._full() if error.errno in FULL else "failed"
        finally:
            self._budget.release()
        self._pause.end()
        self._listing.add(path, Entry(len(data), self._wall_ns(), attached=block.attachment is not None))
        self.keep(layout, (name,))
        if not block.index:
            self._name(layout.namespace)  # whoever cleared the directory since took it away
        return "published"

    def keep(self, layout: Layout, names: Sequence[BlockName]) -> None:
        """The chain of these blocks, root first, is in use: `settle` will stamp what is there of it."""
        for name in names if self.usable else ():
            path = record_path(layout.namespace, name.key)
            if (entry := self._listing.get(path)) is not None:
                _learn(entry, name)
                self._fresh.pop(name.parent, None)
                self._fresh[name.key] = layout.namespace

    def _follows(self, layout: Layout, block: Block) -> bool:
        return not block.index or self.listed(layout.namespace, block.parent)

    def _put(self, path: str, data: bytes, spare: Spare) -> None:
        """A full disk is tried once more, after an eviction."""
        try:
            self._write(path, data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._budget.evict(self.used_bytes - len(data), spare)
            self._write(path, data)

    def _write(self, path: str, data: bytes) -> None:
        """The file is whole and synced before it gets its name. A sync that failed is not tried again: the file is deleted."""
        temporary = self._home.temporary()
        try:
            fd = self._files.create_excl(temporary)
            try:
                write_all(self._files, fd, data)
                self._files.sync(fd)
            finally:
                self._files.close(fd)
            self._rename(temporary, path)
        except OSError:
            attempt(self._files.unlink, temporary)
            raise

    def _rename(self, temporary: str, path: str) -> None:
        target = self._at(path)
        folder = os.path.dirname(target)
        try:
            if folder not in self._known:
                self._make_dirs(folder)
            self._files.rename(temporary, target)
        except FileNotFoundError:  # somebody removed the folder
            self._known.clear()
            self._make_dirs(folder)
            self._files.rename(temporary, target)

    def _full(self) -> Outcome:
        self._pause.begin()
        self._say("full", f"The disk of {self._root} is full: saving blocks pauses for {PAUSE_S:.0f} s, and longer if it stays full.")
        return "failed"

    # -- read --------------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """See what other processes have stored or evicted."""
        if self.usable:
            attempt(self._listing.refresh)

    def size(self, layout: Layout, name: BlockName) -> int | None:
        """Bytes of its record, None if none is listed."""
        entry = self._listing.get(record_path(layout.namespace, name.key))
        return entry.size if entry is not None else None

    def load(self, layout: Layout, name: BlockName) -> Block | None:
        """The block of this name, every byte checked; None is a miss. A bad record is moved away, other trouble changes nothing."""
        found = self._read(layout, name, layout.most_bytes + 1)
        if found is None:
            return None
        entry, size, raw = found
        try:
            if size != len(raw):
                raise BadRecord(f"it has {size} bytes and {len(raw)} could be read")
            block = record.decode(raw, layout, name)
        except BadRecord as error:
            self._quarantine(layout, name, error)
            return None
        _learn(entry, name)
        entry.attached = block.attachment is not None
        return block

    def attached(self, layout: Layout, name: BlockName) -> bool:
        """Whether its record carries an attachment, by its header; False if there is no good one."""
        known = self._listing.get(record_path(layout.namespace, name.key))
        if known is None or layout.attachment is None:
            return False
        if known.attached is None:
            found = self._read(layout, name, layout.most_header_bytes)
            if found is None:
                return False
            try:
                known.attached = record.has_attachment(found[2], found[1], layout, name)
            except BadRecord as error:
                self._quarantine(layout, name, error)
                return False
        return known.attached

    def _read(self, layout: Layout, name: BlockName, most_bytes: int) -> tuple[Entry, int, bytearray] | None:
        path = record_path(layout.namespace, name.key)
        entry = self._listing.get(path)
        if not self.usable or entry is None:
            return None
        try:
            return entry, *self._files.read(self._at(path), most_bytes)
        except FileNotFoundError:
            self._listing.discard(path)
        except (OSError, MemoryError):
            pass  # no sign of damage: the record stays
        return None

    def _quarantine(self, layout: Layout, name: BlockName, why: BadRecord) -> None:
        path, kept = record_path(layout.namespace, name.key), self._at(f"quarantine/{name.key.hex()}-{uuid.uuid4().hex}.kv")
        self._say("bad", f"A damaged cache file was set aside and counts as absent: {why}.")
        try:
            self._files.rename(self._at(path), kept)
        except FileNotFoundError:
            self._listing.discard(path)
            return
        except OSError:
            self._listing.shun(path)
            return
        self._listing.discard(path)
        attempt(self._files.stamp, kept, self._wall_ns())
        attempt(self._budget.trim_quarantine)

    # -- recency and durability --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Stamp the chains used since the last time with "now minus depth in microseconds", so that leaves go before parents."""
        fresh, self._fresh = self._fresh if self.usable else {}, {}
        now = self._wall_ns()
        for path, entry in self._with_ancestors((namespace, key) for key, namespace in fresh.items()).values():
            if entry is not None:
                entry.mtime_ns = now - entry.index * 1000
                attempt(self._files.stamp, self._at(path), entry.mtime_ns)

    def sync(self, records: Iterable[tuple[bytes, bytes]]) -> tuple[set[bytes], set[bytes]]:
        """Make these (namespace, key) durable, with their ancestors as far as those are known.

        Returns the keys that are now, and those that are gone, themselves or an ancestor of theirs; of any other it cannot be said.
        """
        self.settle()
        nodes = self._with_ancestors(records)
        unsynced = [(path, entry) for path, entry in nodes.values() if entry is not None and not entry.synced]
        folders = {folder for path, _ in unsynced for folder in self._above(path)}
        bad = {folder for folder in sorted(folders, key=len, reverse=True) if not self._sync_dir(folder)}
        if folders and not attempt(self._files.barrier, self._at("lock")):
            bad = folders
        for path, entry in unsynced:
            entry.synced = bad.isdisjoint(self._above(path))
        there: dict[bytes | None, bool] = {None: True}  # key -> durable
        for key, (path, node) in nodes.items():
            if node is not None and node.parent in there and attempt(self._files.look, self._at(path)):
                there[key] = node.synced and there[node.parent]
        return {key for key, durable in there.items() if durable and key is not None}, nodes.keys() - there.keys()

    def _with_ancestors(self, records: Iterable[tuple[bytes, bytes]]) -> dict[bytes, tuple[str, Entry | None]]:
        """key -> (path, entry if listed) of these and of all known before them, parents first."""
        found: dict[bytes, tuple[str, Entry | None]] = {}
        for namespace, key in records:
            trail: list[tuple[bytes, tuple[str, Entry | None]]] = []
            at: bytes | None = key
            while at is not None and at not in found:
                path = record_path(namespace, at)
                entry = self._listing.get(path)
                trail.append((at, (path, entry)))
                at = entry.parent if entry is not None else None
            found.update(reversed(trail))
        return found

    def _sync_dir(self, folder: str) -> bool:
        """After a failed sync a later one that works proves nothing about what was there: such a folder is not trusted again."""
        if folder in self._distrusted:
            return False
        try:
            self._files.sync_dir(folder)
        except OSError as error:
            if error.errno not in _PASSING:
                self._distrusted.add(folder)
            return False
        return True

    # -- small ones --------------------------------------------------------------------------------------------------

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._notice(text)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _above(self, path: str) -> Iterator[str]:
        """The folders whose names lead to this record, the one that holds the root included."""
        folder = self._at(path)
        while len(folder) > len(self._root):
            folder = os.path.dirname(folder)
            yield folder
        yield os.path.dirname(self._root)

    def _make_dirs(self, folder: str) -> None:
        """This folder and those above it, as far as they are missing. NotADirectoryError if a name below the root is something else."""
        if folder in self._known:
            return
        try:
            try:
                self._files.make_dir(folder)
            except FileNotFoundError:
                self._make_dirs(os.path.dirname(folder))
                self._files.make_dir(folder)
        except FileExistsError:
            if folder.startswith(self._root + "/") and self._files.look(folder).kind != "dir":
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", folder) from None
        self._known.add(folder)


def _learn(entry: Entry, name: BlockName) -> None:
    entry.parent, entry.index = name.parent if name.index else None, name.index
