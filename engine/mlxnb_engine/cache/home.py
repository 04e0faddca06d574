"""One process's place in a shared cache directory: its own temporary folder, whose lock says that it lives, and the common lock."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .files import FileOps
from .listing import HOME, TEMPORARY

_POLL_S = 0.01


class Home:
    """root/tmp/<pid>-<uuid>/ with a locked file `owner` in it; and `flock` on root/lock.

    Owner: the I/O thread; `present` may be asked by any. A forked child's copy is not present and does nothing.
    Lifetime: `enter` once, `leave` once. A process that dies leaves its folder to the next `sweep`, and its locks to nobody.
    """

    def __init__(self, root: str, files: FileOps, clock: Callable[[], float]) -> None:
        self._root, self._files, self._clock = root, files, clock
        self._pid = os.getpid()
        self._name = f"{self._pid}-{uuid.uuid4().hex}"
        self._path = f"{root}/tmp/{self._name}"
        self._owner: int | None = None

    @property
    def present(self) -> bool:
        return self._owner is not None and self._pid == os.getpid()

    def enter(self) -> None:
        """Make the folder. Under the exclusive lock, or it might be swept before it is locked. OSError, ENOLCK if locks do nothing."""
        self._files.make_dir(self._path)
        self._owner = self._files.lock(f"{self._path}/owner")
        second = self._files.lock(f"{self._path}/owner")
        if second is not None:
            self._files.unlock(second)
        if second is not None or self._owner is None:
            raise OSError(errno.ENOLCK, "a lock did not keep a second one away")

    def leave(self) -> None:
        """Remove the folder, as far as it goes. Idempotent."""
        owner = self._owner
        if owner is not None and self.present:
            self._owner = None
            attempt(self._files.unlink, f"{self._path}/owner")
            attempt(self._files.remove_dir, self._path)
            attempt(self._files.unlock, owner)

    def temporary(self) -> str:
        """A path for a new temporary file."""
        return f"{self._path}/{uuid.uuid4().hex}.tmp"

    @contextmanager
    def exclusive(self, wait_s: float) -> Iterator[bool]:
        """Hold the lock that sweep and eviction need; False if it could not be had in this time. OSError if it cannot be at all."""
        deadline = self._clock() + wait_s
        while (lock := self._files.lock(f"{self._root}/lock")) is None and self._clock() < deadline:
            time.sleep(_POLL_S)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                attempt(self._files.unlock, lock)

    def sweep(self) -> None:
        """Remove the temporary folders of processes that are gone. Under the exclusive lock. OSError if they cannot be listed."""
        for found in self._files.list(f"{self._root}/tmp"):
            if found.kind == "dir" and HOME.fullmatch(found.name) and found.name != self._name:
                attempt(self._sweep, f"{self._root}/tmp/{found.name}")

    def _sweep(self, home: str) -> None:
        lock = self._files.lock(f"{home}/owner")
        if lock is None:
            return
        try:
            for found in self._files.list(home):
                if found.kind == "file" and TEMPORARY.fullmatch(found.name):
                    self._files.unlink(f"{home}/{found.name}")
            self._files.unlink(f"{home}/owner")
            self._files.remove_dir(home)
        finally:
            self._files.unlock(lock)


def attempt(call: Callable[..., object], *arguments: object) -> bool:
    """Make this call of `FileOps` where its failure costs time only; whether it worked."""
    try:
        call(*arguments)
    except OSError:
        return False
    return True
