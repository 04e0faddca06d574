"""`Shelf`: the folder of interrupted runs, shared by all kernels of a user, and the thread that writes to it.

    root/<owner>.lock           locked by one process's shelf while that lives
    root/<owner>-<key>.run      the newest record of a run of it (`stopped.py`): temporary file, fsync, rename
    root/<owner>-<key>.bad      a record that was refused, set aside

A run whose owner's lock nobody holds was left by a process that is gone: whoever wants to may go on with it, and renames its record.
Should two do so at once, both come to the same answer. A problem with the folder costs the record, never the run.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .budget import floor_of
from .files import FileOps, PosixFiles, write_all
from .home import attempt
from .record import BadRecord
from .stopped import MAX_FILE, Stopped, decode, encode

KEPT_S = 14 * 86_400.0
"""What nobody went on with is deleted after so long."""
MOST_LEFT = 64
"""Records of processes that are gone: of more, the oldest are deleted."""
CLOSE_S = 2.0
_YOUNG_S = 3600.0
_OURS = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.(run|bad|tmp)|([0-9a-f]{32})\.(lock)")


class Found(NamedTuple):
    """A file of ours. ending: "run", "bad", "tmp" or "lock"; of the last, key is "". mtime_ns: when it was written."""

    owner: str
    key: str
    ending: str
    mtime_ns: int

    @property
    def name(self) -> str:
        return f"{self.owner}-{self.key}.{self.ending}" if self.key else f"{self.owner}.{self.ending}"


class Shelf:
    """One process's side of the folder.

    Owner: any thread hands in jobs, and none waits for them; its own thread, started by the first job, does all I/O. Of several
    jobs for a run that wait, only the last is done. notice: gets one sentence if runs cannot be written. After a fork the child's
    copy does nothing.
    Lifetime: `close` writes what waits, within a time, and lets go of the lock.
    """

    def __init__(self, root: Path, notice: Callable[[str], None], files: FileOps | None = None) -> None:
        self._root, self._notice, self._files = str(root), notice, files or PosixFiles()
        self._owner, self._pid = uuid.uuid4().hex, os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._jobs: dict[str, Stopped | bool] = {}  # True: take it over, False: delete it
        self._known: set[str] = set()  # runs of which there is, or will be, a record
        self._foreign: set[str] = set()  # of these, such whose record still has another owner
        self._thread: threading.Thread | None = None
        self._open = True
        self._lock: int | None = None
        self._said = False

    # -- any thread --------------------------------------------------------------------------------------------------

    def put(self, stopped: Stopped) -> None:
        """Write this, in place of what there is of the same run."""
        self._ask(stopped.key, stopped)

    def adopt(self, key: str) -> None:
        """This process goes on with that run."""
        self._ask(key, True)

    def drop(self, key: str) -> None:
        """The run is complete: delete what there is of it."""
        self._ask(key, False)

    def _ask(self, key: str, job: Stopped | bool) -> None:
        if self._pid != os.getpid():
            return
        with self._changed:
            unneeded = key not in self._known if job is False else job is True and key in self._known
            if not self._open or unneeded:
                return
            if job is False:
                self._known.discard(key)
            else:
                self._known.add(key)
            if job is True:
                self._foreign.add(key)
            self._jobs.pop(key, None)
            self._jobs[key] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mlxnb-resume-io", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Idempotent. What the disk does not take in this time is lost."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._open = False
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout_s)

    # -- its own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guarded(self._prepare)
        while (job := self._next()) is not None:
            key, what = job
            if self._lock is None:
                continue
            if key in self._foreign:
                self._guarded(partial(self._take_over, key))
            if isinstance(what, Stopped):
                self._guarded(partial(self._write, what))
            elif not what:
                attempt(self._files.unlink, self._at(key, "run"))
        if self._lock is not None:
            attempt(self._files.unlock, self._lock)

    def _next(self) -> tuple[str, Stopped | bool] | None:
        """The job that has waited longest; None once closed and nothing is left."""
        with self._changed:
            while not self._jobs and self._open:
                self._changed.wait()
            if not self._jobs:
                return None
            key = next(iter(self._jobs))
            return key, self._jobs.pop(key)

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError, MemoryError) as error:
            if not self._said:
                self._said = True
                why = (error.strerror if isinstance(error, OSError) else "") or str(error)
                self._notice(f"An answer that is interrupted cannot be resumed in another kernel: {self._root} takes no record ({why}).")

    def _prepare(self) -> None:
        missing = [self._root]
        while not os.path.isdir(parent := os.path.dirname(missing[-1])):
            missing.append(parent)
        for folder in reversed(missing):
            attempt(self._files.make_dir, folder)
        if self._files.look(self._root).kind != "dir":
            raise OSError(errno.ENOTDIR, "it is no folder of its own")
        self._lock = self._files.lock(f"{self._root}/{self._owner}.lock")
        sweep(self._root, self._files)

    def _write(self, stopped: Stopped) -> None:
        try:
            raw = encode(stopped)
        except ValueError:  # its state is too large for a record
            raw = encode(stopped.without_state())
        space = self._files.space(self._root)
        if space.free - len(raw) < floor_of(space):
            raw = encode(stopped.without_state())
        path, temporary = self._at(stopped.key, "run"), self._at(stopped.key, "tmp")
        try:
            fd = self._files.create_excl(temporary)
            try:
                write_all(self._files, fd, raw)
                self._files.sync(fd)
            finally:
                self._files.close(fd)
            self._files.rename(temporary, path)
        except BaseException:
            attempt(self._files.unlink, temporary)
            raise
        self._files.sync_dir(self._root)

    def _take_over(self, key: str) -> None:
        self._foreign.discard(key)
        for one in waiting(self._root, self._files):
            if one.key == key:  # another kernel may be faster
                attempt(self._files.rename, f"{self._root}/{one.name}", self._at(key, "run"))

    def _at(self, key: str, ending: str) -> str:
        return f"{self._root}/{self._owner}-{key}.{ending}"


# -- anybody's: no thread, no lock kept ----------------------------------------------------------------------------------


def waiting(root: Path | str, files: FileOps | None = None) -> list[Found]:
    """The records of processes that are gone, newest first. [] if there is no such folder, or it cannot be read."""
    files = files or PosixFiles()
    try:
        found = _listed(str(root), files)
        gone = _gone(str(root), {one.owner for one in found if one.ending == "run"}, files)
    except OSError:
        return []
    return sorted((one for one in found if one.ending == "run" and one.owner in gone), key=lambda one: (-one.mtime_ns, one.key))


def read(root: Path | str, found: Found, files: FileOps | None = None) -> Stopped | None:
    """The run of this record; None if it is gone, or damaged: then it is set aside, and not read again."""
    files, path = files or PosixFiles(), f"{root}/{found.name}"
    try:
        size, raw = files.read(path, MAX_FILE + 1)
        if size != len(raw):
            raise BadRecord(f"it has {size} bytes")
        stopped = decode(raw)
        if stopped.key != found.key:
            raise BadRecord("it is the record of another run")
    except (OSError, MemoryError):
        return None
    except BadRecord:
        attempt(files.rename, path, f"{root}/{found._replace(ending='bad').name}")
        return None
    return stopped


def sweep(root: str, files: FileOps, most: int = MOST_LEFT, kept_s: float = KEPT_S) -> None:
    """Delete what processes that are gone left too long ago, or too much of. A name that is not ours is left alone. Raises OSError."""
    now_ns = time.time_ns()
    found = _listed(root, files)
    gone = _gone(root, {one.owner for one in found}, files)
    runs = sorted((one for one in found if one.ending == "run" and one.owner in gone), key=lambda one: -one.mtime_ns)
    kept = {one for one in runs[:most] if now_ns - one.mtime_ns <= kept_s * 1e9}
    needed = {one.owner for one in kept}
    for one in found:
        # A lock that is young may be about to be taken.
        young = now_ns - one.mtime_ns <= (kept_s if one.ending == "bad" else _YOUNG_S) * 1e9
        stays = one in kept if one.ending == "run" else young or (one.ending == "lock" and one.owner in needed)
        if one.owner in gone and not stays:
            attempt(files.unlink, f"{root}/{one.name}")


def clear(root: Path | str, files: FileOps | None = None) -> int:
    """Delete every record that processes which are gone left, those set aside and half written too; how many files."""
    files = files or PosixFiles()
    try:
        # Locks hold nothing of anybody's, and a young one may be about to be taken: `sweep` deletes them.
        found = [one for one in _listed(str(root), files) if one.key]
        gone = _gone(str(root), {one.owner for one in found}, files)
    except OSError:
        return 0
    return sum(attempt(files.unlink, f"{root}/{one.name}") for one in found if one.owner in gone)


def _listed(root: str, files: FileOps) -> list[Found]:
    """Every file of ours."""
    matches = ((_OURS.fullmatch(found.name), found.mtime_ns) for found in files.list(root) if found.kind == "file")
    return [
        Found(match[1], match[2], match[3], mtime_ns) if match[1] else Found(match[4], "", match[5], mtime_ns)
        for match, mtime_ns in matches
        if match is not None
    ]


def _gone(root: str, owners: Iterable[str], files: FileOps) -> set[str]:
    """Those whose lock nobody holds."""
    gone = set()
    for owner in owners:
        lock = files.lock(f"{root}/{owner}.lock")
        if lock is not None:
            files.unlock(lock)
            gone.add(owner)
    return gone
