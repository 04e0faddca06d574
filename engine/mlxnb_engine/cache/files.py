"""`FileOps`: every call that the disk tier makes to the file system, and its one real implementation.

The tests have others: one fails at its k-th call, one forgets at a crash what was not synced. Anything may raise OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import Literal, NamedTuple, Protocol

_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


class Found(NamedTuple):
    """What a name leads to, links not followed. kind: "other" is a link or anything else that is not ours to touch."""

    name: str
    kind: Literal["file", "dir", "other"]
    size: int
    mtime_ns: int


class Space(NamedTuple):
    """Bytes of a file system: free to this user, and in all."""

    free: int
    total: int


class FileOps(Protocol):
    """Paths are absolute. One call is one operation: nothing here retries, cleans up or decides."""

    def make_dir(self, path: str) -> None:
        """mkdir, only for this user. FileExistsError if the name is taken."""

    def create_excl(self, path: str) -> int:
        """A new file to write to, only for this user; a descriptor. FileExistsError if the name is taken."""
        ...

    def write(self, fd: int, data: memoryview) -> int:
        """Write some of it, at least a byte; how many."""
        ...

    def sync(self, fd: int) -> None: ...
    def close(self, fd: int) -> None: ...

    def rename(self, source: str, target: str) -> None:
        """Atomic; a file at `target` is replaced."""

    def sync_dir(self, path: str) -> None:
        """Make the names in this folder durable, as far as fsync does."""

    def barrier(self, path: str) -> None:
        """What was synced before is beyond the drive's own cache when this returns. path: any file of the same drive."""

    def unlink(self, path: str) -> None: ...

    def remove_dir(self, path: str) -> None:
        """rmdir: only if it is empty."""

    def look(self, path: str) -> Found:
        """lstat."""
        ...

    def list(self, path: str) -> list[Found]:
        """What is in this folder, in no order. A name that goes away meanwhile is left out."""
        ...

    def read(self, path: str, most_bytes: int) -> tuple[int, bytearray]:
        """Size of a regular file and its first `most_bytes` bytes at most, in a buffer of the caller's own. MemoryError too."""
        ...

    def stamp(self, path: str, mtime_ns: int) -> None:
        """Set the modification time."""

    def space(self, path: str) -> Space: ...

    def lock(self, path: str) -> int | None:
        """Take the exclusive lock on this file (made if absent): a descriptor, or None if another holds it. Never waits."""
        ...

    def unlock(self, lock: int) -> None: ...


def write_all(files: FileOps, fd: int, data: bytes) -> None:
    """Every byte of it: one write may take only some."""
    left = memoryview(data)
    while left:
        count = files.write(fd, left)
        if count <= 0:
            raise OSError(errno.EIO, "a write took nothing")
        left = left[count:]


class PosixFiles:
    """The real one, for Linux and macOS."""

    def make_dir(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def create_excl(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def barrier(self, path: str) -> None:
        # On Linux fsync reaches the drive. On macOS it stops at the drive's cache, which this empties, for all files at once.
        full_sync = getattr(fcntl, "F_FULLFSYNC", None)
        if full_sync is None:
            return
        fd = os.open(path, os.O_RDONLY | _OPEN)
        try:
            fcntl.fcntl(fd, full_sync)
        finally:
            os.close(fd)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_dir(self, path: str) -> None:
        os.rmdir(path)

    def look(self, path: str) -> Found:
        return _found(os.path.basename(path), os.lstat(path))

    def list(self, path: str) -> list[Found]:
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    found.append(_found(entry.name, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
        return found

    def read(self, path: str, most_bytes: int) -> tuple[int, bytearray]:
        # O_NONBLOCK: opening a pipe that has taken the name of a record must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            buffer = bytearray(min(status.st_size, most_bytes))
            at = 0
            with memoryview(buffer) as view:
                while at < len(buffer) and (count := os.readv(fd, [view[at:]])):
                    at += count
            del buffer[at:]
            return status.st_size, buffer
        finally:
            os.close(fd)

    def stamp(self, path: str, mtime_ns: int) -> None:
        os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    def space(self, path: str) -> Space:
        status = os.statvfs(path)
        return Space(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)

    def lock(self, path: str) -> int | None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return fd

    def unlock(self, lock: int) -> None:
        # Closing alone would leave it with a process forked meanwhile, which has the descriptor too.
        try:
            fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)


def _found(name: str, status: os.stat_result) -> Found:
    kind: Literal["file", "dir", "other"] = "other"
    if stat.S_ISREG(status.st_mode):
        kind = "file"
    elif stat.S_ISDIR(status.st_mode):
        kind = "dir"
    return Found(name, kind, status.st_size, status.st_mtime_ns)
