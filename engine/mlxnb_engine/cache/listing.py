"""What the cache directory holds, as last seen: the names that are ours, sizes, ages. The directory is the index; this is its copy.

    root/v1/<namespace hex>/<first 2 hex of key>/<key hex>.kv      one block per file
    root/tmp/<pid>-<uuid>/     root/quarantine/     root/lock      outside the listed tree

A name that is not ours is not listed, not counted and never deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from .blocks import RECORD_FORMAT
from .files import FileOps, Found

RECORD = re.compile(r"[0-9a-f]{64}\.kv")
TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp")
HOME = re.compile(r"[0-9]{1,10}-[0-9a-f]{32}")
BAD_RECORD = re.compile(r"[0-9a-f]{64}-[0-9a-f]{32}\.kv")
_FORMAT = re.compile(r"v[1-9][0-9]{0,5}")
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_FANOUT = re.compile(r"[0-9a-f]{2}")
_COARSEST_NS = 2 * 10**9
"""Some file systems keep times to 2 s only: a folder changed that shortly before it was listed may have changed again since."""


def record_path(namespace: bytes, key: bytes) -> str:
    """Path of a record, relative to the root."""
    name = key.hex()
    return f"v{RECORD_FORMAT}/{namespace.hex()}/{name[:2]}/{name}.kv"


@dataclass(slots=True)
class Entry:
    """A record on disk. parent (None for a first block), index, attached: of its block; None and 0 until this process learns them.

    synced: this process has made its name durable, or seen that it was.
    """

    size: int
    mtime_ns: int
    parent: bytes | None = None
    index: int = 0
    attached: bool | None = None
    synced: bool = False


@dataclass(slots=True)
class _Folder:
    """One directory as listed. changed_ns: its own mtime then, -1 if that does not prove that nothing changed since."""

    changed_ns: int = -1
    folders: tuple[str, ...] = ()
    entries: dict[str, Entry] = field(default_factory=dict)


class Listing:
    """All records under one root by path relative to it, and the bytes of all files of ours.

    Owner: the I/O thread; `get` may be asked by any.
    Invariant: record_bytes is the sum of the sizes of the entries.
    """

    def __init__(self, root: str, files: FileOps, wall_ns: Callable[[], int]) -> None:
        self._root, self._files, self._wall_ns = root, files, wall_ns
        self._folders: dict[str, _Folder] = {}
        self._shunned: set[str] = set()
        self._alone = False
        self.record_bytes = 0
        self.other_bytes = 0
        """Temporary and quarantined files, of all processes."""

    def get(self, path: str) -> Entry | None:
        home, _, name = path.rpartition("/")
        folder = self._folders.get(home)
        return folder.entries.get(name) if folder is not None and path not in self._shunned else None

    def items(self) -> Iterator[tuple[str, Entry]]:
        for home, folder in self._folders.items():
            for name, entry in folder.entries.items():
                yield f"{home}/{name}", entry

    def namespaces(self) -> set[str]:
        """Hex of those with at least one record of this format."""
        homes = (home.split("/") for home, folder in self._folders.items() if folder.entries)
        return {parts[1] for parts in homes if parts[0] == f"v{RECORD_FORMAT}"}

    def add(self, path: str, entry: Entry) -> None:
        """A record was written here. One that was there before is gone."""
        self.discard(path)
        self._shunned.discard(path)
        home, _, name = path.rpartition("/")
        self._folders.setdefault(home, _Folder()).entries[name] = entry
        self.record_bytes += entry.size

    def discard(self, path: str) -> None:
        """No record is here any more."""
        home, _, name = path.rpartition("/")
        gone = self._folders[home].entries.pop(name, None) if home in self._folders else None
        self.record_bytes -= gone.size if gone is not None else 0

    def shun(self, path: str) -> None:
        """Something bad is here and could not be moved away: as if it were not, until a record replaces it."""
        self._shunned.add(path)

    def refresh(self) -> None:
        """See what other processes did. Raises OSError, and is then as before or part of the way.

        Every folder is looked at, and listed if it changed. While no other process is here, or came and went, that is left out.
        """
        was_alone, self._alone = self._alone, False
        nobody_moved = self._list("tmp") is None
        homes = [name for name in self._folders["tmp"].folders if HOME.fullmatch(name)]
        if not (nobody_moved and was_alone):
            self._walk()
        self.recount()
        self._alone = len(homes) <= 1

    def recount(self) -> None:
        """Count temporary and quarantined files anew. Raises OSError."""
        homes = [name for name in self._folders["tmp"].folders if HOME.fullmatch(name)]
        temporary = sum(self._file_bytes(f"tmp/{home}", TEMPORARY) for home in homes)
        self.other_bytes = temporary + self._file_bytes("quarantine", BAD_RECORD)

    def check(self) -> None:
        """Raise AssertionError if the sums do not add up."""
        total = sum(entry.size for _, entry in self.items())
        if total != self.record_bytes or self.other_bytes < 0:
            raise AssertionError(f"{self.record_bytes} bytes counted, {total} listed, {self.other_bytes} others")

    def _walk(self) -> None:
        seen = set()
        for version in self._below("", _FORMAT):
            for namespace in self._below(version, _NAMESPACE):
                for home in self._below(namespace, _FANOUT):
                    seen.add(home)
                    self._records(home)
        for home in [home for home, folder in self._folders.items() if folder.entries and home not in seen]:
            self._replace(home, {})

    def _below(self, home: str, pattern: re.Pattern[str]) -> list[str]:
        """Our folders directly below this one."""
        try:
            self._list(home)
        except FileNotFoundError:
            return []
        return [f"{home}/{name}" if home else name for name in self._folders[home].folders if pattern.fullmatch(name)]

    def _records(self, home: str) -> None:
        try:
            found = self._list(home)
        except FileNotFoundError:
            found = []
        if found is None:
            return
        old, fresh = self._folders[home].entries if home in self._folders else {}, {}
        for name, kind, size, mtime_ns in found:
            if kind == "file" and RECORD.fullmatch(name) and home.endswith("/" + name[:2]):
                known = old.get(name)
                if known is None or known.size != size:
                    known = Entry(size, mtime_ns)
                elif known.mtime_ns != mtime_ns:  # used by another process, or replaced by a record that is as good
                    known = replace(known, mtime_ns=mtime_ns, synced=False)
                fresh[name] = known
        self._replace(home, fresh)

    def _replace(self, home: str, entries: dict[str, Entry]) -> None:
        folder = self._folders.setdefault(home, _Folder())
        self.record_bytes += sum(e.size for e in entries.values()) - sum(e.size for e in folder.entries.values())
        folder.entries = entries

    def _list(self, home: str) -> list[Found] | None:
        """What is in this folder, None if it is proven to be what it was; `folders` is as of now either way."""
        path, now = f"{self._root}/{home}".rstrip("/"), self._wall_ns()
        changed_ns = self._files.look(path).mtime_ns
        folder = self._folders.setdefault(home, _Folder())
        if changed_ns == folder.changed_ns:
            return None
        found = self._files.list(path)
        folder.folders = tuple(entry.name for entry in found if entry.kind == "dir")
        folder.changed_ns = changed_ns if changed_ns < now - _COARSEST_NS else -1
        return found

    def _file_bytes(self, home: str, pattern: re.Pattern[str]) -> int:
        try:
            found = self._files.list(f"{self._root}/{home}")
        except FileNotFoundError:
            return 0
        return sum(entry.size for entry in found if entry.kind == "file" and pattern.fullmatch(entry.name))
