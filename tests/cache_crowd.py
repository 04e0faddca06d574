"""Processes that share a cache directory and are killed at random moments: what C1 and C5 run, and the broken parts they must catch.

A process of its own, with one thread: it forks the workers, stops them all to look, and looks with a store of its own.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]

from cache_rig import Clock, Disk, Posix, chain_of, file_bytes, is_right, layout_of, names_of, records_in, restored  # noqa: E402

from mlxnb_engine.cache import record  # noqa: E402
from mlxnb_engine.cache.blocks import Block  # noqa: E402
from mlxnb_engine.cache.home import Home  # noqa: E402
from mlxnb_engine.cache.record import BadRecord, BlockName  # noqa: E402
from mlxnb_engine.cache.restore import Want  # noqa: E402
from mlxnb_engine.cache.store import Store  # noqa: E402
from mlxnb_engine.cache.writer import Writer  # noqa: E402

LAYOUT = layout_of(width=128)
"""Records of 64 KiB and a header."""
DEEP = 4
BUDGET = 16 * LAYOUT.most_bytes
POOL = 12
"""Chains that a crowd shares: three times what the budget holds."""
PAGE, PAGE_S = 8192, 5e-5
PHASES = ("elsewhere", "open", "put", "evict", "scan", "flush", "restore")
PHASE, OPERATIONS, PUBLISHED, RESTORED, WRONG, ERRORS, STARTED, FLUSHED, FIELDS = range(9)
"""Places of one worker on the board. STARTED, FLUSHED: number after that of the newest chain begun, and made durable."""


# -- broken parts ------------------------------------------------------------------------------------------------------


class Slow(Posix):
    """A write takes a page at most, and its time, so that there are many moments within a record."""

    def write(self, fd: int, data: memoryview) -> int:
        time.sleep(PAGE_S)
        return super().write(fd, data[:PAGE])


class InPlace(Store):
    """Writes under the final name."""

    def _write(self, path: str, data: bytes) -> None:
        self._make_dirs(os.path.dirname(self._at(path)))
        fd = os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(fd, len(data))
            for at in range(0, len(data), PAGE):
                time.sleep(PAGE_S)
                os.write(fd, data[at : at + PAGE])
        finally:
            os.close(fd)


class Truncating(Slow):
    """Opens a temporary file whether or not another process has it open."""

    def create_excl(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


class Parts:
    """What the workers are made of. kind: "right", or what is wrong with it."""

    def __init__(self, kind: str) -> None:
        self.store: type[Store] = InPlace if kind.startswith("in place") else Store
        self.files: type[Posix] = Truncating if kind == "shared name" else Slow
        if kind == "shared name":
            Home.temporary = lambda self: f"{self._root}/tmp/shared.tmp"  # type: ignore[method-assign]
        if kind == "in place, no checksums":
            record._verify = lambda parts, sums: None

    def start(self, root: Path, board: Board) -> Writer:
        store = self.store(root, BUDGET, self.files(), _silent)
        for owner, name, phase in (
            (store, "open", "open"),
            (store, "publish", "put"),
            (store, "sync", "flush"),
            (store, "load", "restore"),
            (store._listing, "refresh", "scan"),
            (store._budget, "make_room", "evict"),
        ):
            setattr(owner, name, _told(board, PHASES.index(phase), getattr(owner, name)))
        writer = Writer(store, 2**30, _silent)
        writer.start()
        return writer


def _silent(text: str) -> None:
    pass


def _told(board: Board, phase: int, call: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*arguments: Any, **named: Any) -> Any:
        before, board[PHASE] = board[PHASE], phase
        try:
            return call(*arguments, **named)
        finally:
            board[PHASE] = before

    return inner


# -- the workers -------------------------------------------------------------------------------------------------------


class Board:
    """One worker's numbers, in memory that outlives it."""

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * FIELDS)).cast("Q")

    def __getitem__(self, place: int) -> int:
        return self._cells[place]

    def __setitem__(self, place: int, value: int) -> None:
        self._cells[place] = value


@lru_cache(maxsize=64)
def chain(number: int) -> tuple[Block, ...]:
    return tuple(chain_of(LAYOUT, number, DEEP, ends=(DEEP - 1,) if number % 2 else ()))


def writes_on(root: Path, parts: Parts, board: Board, seed: int) -> None:
    """C1: chain after chain from number `seed` on, each flushed."""
    writer = parts.start(root, board)
    for number in range(seed, seed + 1000):
        board[STARTED] = number + 1
        for block in chain(number):
            writer.save(LAYOUT, block)
        if writer.flush(30.0).ok:
            board[FLUSHED] = number + 1
        board[OPERATIONS] += 1


def lives_on(root: Path, parts: Parts, board: Board, seed: int) -> None:
    """C5: puts, flushes, restores and reopenings in random order, all on the same few chains; what comes back is compared."""
    rng = random.Random(seed)
    writer = parts.start(root, board)
    while True:
        blocks = chain(rng.randrange(POOL))
        what = rng.random()
        if what < 0.6:
            board[PUBLISHED] += sum(writer.save(LAYOUT, block) for block in blocks[: rng.randint(1, DEEP)])
        elif what < 0.7:
            writer.flush(30.0)
        elif what < 0.98:
            names = names_of(blocks)
            restoring = writer.restore(LAYOUT, Want(names), 2**30, 30.0)
            while not restoring.done:
                time.sleep(0.0005)
            for index, block in (restoring.result.blocks if restoring.result is not None else {}).items():
                board[RESTORED] += 1
                board[WRONG] += not is_right(LAYOUT, names[index], block)
        else:
            writer.close(30.0)
            writer = parts.start(root, board)
        writer.keep(LAYOUT, names_of(blocks))
        board[OPERATIONS] += 1


def spawn(work: Callable[[Path, Parts, Board, int], None], root: Path, parts: Parts, board: Board, seed: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work(root, parts, board, seed)
    except BaseException:
        board[ERRORS] += 1
        raise
    finally:
        os._exit(0)


# -- what is on disk ---------------------------------------------------------------------------------------------------


def torn(paths: list[Path], name_of: Callable[[str], BlockName | None]) -> int:
    """Visible records that are not, byte for byte, what their name promises. Nobody may write meanwhile."""
    bad = 0
    for path in paths:
        name = name_of(path.stem)
        try:
            bad += name is None or not is_right(LAYOUT, name, record.decode(path.read_bytes(), LAYOUT, name))
        except BadRecord:
            bad += 1
    return bad


def kills(root: Path, count: int, seed: int, kind: str) -> dict[str, Any]:
    """C1: one writer at a time, killed; then everything is looked at, and a store opens the directory. Ends early for a broken one."""
    rng = random.Random(seed)
    parts = Parts(kind)
    known: dict[str, BlockName] = {}
    found: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    durable: list[int] = []
    unit_s = 0.0
    for trial in range(count + 1):
        board = Board()
        first = 1000 * trial
        start = time.monotonic()
        child = spawn(writes_on, root, parts, board, first)
        if trial == 0:  # how long it takes here to begin, to write a chain and to flush it
            _moves(board, 0, 30.0)
            unit_s = time.monotonic() - start
        else:
            time.sleep(rng.uniform(0.0, 3 * unit_s))
        os.kill(child, signal.SIGKILL)
        found["ended by itself"] += os.waitpid(child, 0)[1] != signal.SIGKILL
        phases[PHASES[board[PHASE]]] += 1
        for number in range(first, board[STARTED]):
            known |= {block.key.hex(): record.name_of(block) for block in chain(number)}
        found["records"] += len(paths := records_in(root))
        found["torn"] += torn(paths, known.get)
        found["over budget"] += file_bytes(root) > BUDGET + LAYOUT.most_bytes
        found["left behind"] += sum(1 for _ in root.glob("tmp/*/*.tmp"))
        durable = [*durable, *range(max(first, board[FLUSHED] - 2), board[FLUSHED])][-2:]
        found["flushed"] += max(0, board[FLUSHED] - first)
        if kind != "right":
            if found["torn"]:
                break
            continue
        disk = Disk(root, BUDGET, Posix(), Clock())
        found["over budget at reopen"] += disk.store.used_bytes > BUDGET
        found["not swept"] += len(list(root.glob("tmp/*"))) != 1
        for number in durable:
            back = restored(disk.writer(), LAYOUT, Want(names_of(chain(number)))) or []
            found["lost"] += len(back) != DEEP or not all(is_right(LAYOUT, record.name_of(block), block) for block in back)
        disk.store.check()
        disk.store.close()
    return {**found, "torn": found["torn"], "lost": found["lost"], "phases": dict(phases)}


def crowd(root: Path, workers: int, seconds: float, kill_every_s: float, seed: int, kind: str) -> dict[str, Any]:
    """C5: some processes, one of which is killed now and then, all but the first. Numbers of all, and of the first.

    Ends early once a broken kind has shown itself.
    """
    rng = random.Random(seed)
    parts = Parts(kind)
    names = {block.key.hex(): record.name_of(block) for number in range(POOL) for block in chain(number)}
    found: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    boards = [Board() for _ in range(workers)]
    children = [spawn(lives_on, root, parts, board, rng.getrandbits(32)) for board in boards]
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            time.sleep(rng.uniform(0.5, 1.5) * kill_every_s)
            with _stopped(children):
                found["records"] += len(paths := records_in(root))
                found["torn"] += torn(paths, names.get)
                found["over budget"] += file_bytes(root) > BUDGET + workers * LAYOUT.most_bytes
                victim = rng.randrange(1, workers)
                os.kill(children[victim], signal.SIGKILL)
                os.waitpid(children[victim], 0)
                phases[PHASES[boards[victim][PHASE]]] += 1
            found["kills"] += 1
            found["lock late"] += not _lock_is_had(root, 1.0)
            before = boards[0][OPERATIONS]
            children[victim] = spawn(lives_on, root, parts, boards[victim], rng.getrandbits(32))
            found["survivor stuck"] += not _moves(boards[0], before, 30.0)
            shown = sum(board[WRONG] for board in boards) if kind == "in place, no checksums" else found["torn"]
            if kind != "right" and shown:
                break
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    total = {name: sum(board[place] for board in boards) for name, place in _COUNTED.items()}
    survivor = {name: boards[0][place] for name, place in _COUNTED.items()}
    zeros = dict.fromkeys(("torn", "over budget", "lock late", "survivor stuck"), 0)
    return {**zeros, **found, **total, "survivor": survivor, "phases": dict(phases)}


_COUNTED = {"operations": OPERATIONS, "published": PUBLISHED, "restored": RESTORED, "wrong": WRONG, "errors": ERRORS}


@contextlib.contextmanager
def _stopped(children: list[int]) -> Iterator[None]:
    for child in children:
        os.kill(child, signal.SIGSTOP)
    for child in children:
        os.waitpid(child, os.WUNTRACED)
    yield
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGCONT)


def _lock_is_had(root: Path, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while (lock := Posix().lock(str(root / "lock"))) is None:
        if time.monotonic() > until:
            return False
        time.sleep(0.0005)
    Posix().unlock(lock)
    return True


def _moves(board: Board, before: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while board[OPERATIONS] == before and time.monotonic() < until:
        time.sleep(0.001)
    return board[OPERATIONS] != before


def main(words: list[str]) -> None:
    root = Path(words[1])
    root.mkdir(parents=True, exist_ok=True)
    if words[0] == "kills":
        print(json.dumps(kills(root, int(words[2]), int(words[3]), words[4])))
    elif words[0] == "crowd":
        print(json.dumps(crowd(root, int(words[2]), float(words[3]), float(words[4]), int(words[5]), words[6])))


if __name__ == "__main__":
    main(sys.argv[1:])
