"""What the tests of the disk cache share: a small layout, chains of blocks with known bytes, and file systems that misbehave."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxnb_engine.cache import record
from mlxnb_engine.cache.blocks import Block, T
from mlxnb_engine.cache.files import FileOps, Found, PosixFiles, Space
from mlxnb_engine.cache.record import BlockName, Layout, Tensors, TensorSpec
from mlxnb_engine.cache.restore import Want
from mlxnb_engine.cache.store import Store
from mlxnb_engine.cache.writer import Receipt, Writer

AMPLE = Space(2**50, 2**50)
SIM_ROOT = Path("/home/cache")
"""Where a cache is in a simulated file system."""


def layout_of(seed: int = 0, width: int = 4, layers: int = 2, attached: bool = True) -> Layout:
    """K and V of so many layers, `width` elements per token; a recurrent layer's state as the attachment."""
    namespace, codec = (random.Random(f"{seed} {what}").randbytes(32) for what in ("namespace", "codec"))
    tensors = tuple(TensorSpec(layer, part, "bfloat16", (1, T, width)) for layer in range(layers) for part in ("k", "v"))
    state = (TensorSpec(layers, "state.0", "float32", (3, 5)), TensorSpec(layers, "state.1", "float16", (7,)))
    return Layout(namespace, codec, tensors, state if attached else None, (("offset", 0),) if attached else ())


def ids_of(seed: int, blocks: int) -> list[int]:
    rng = random.Random(f"ids {seed}")
    return [rng.randrange(50_000) for _ in range(blocks * T)]


def block_of(layout: Layout, name: BlockName, attached: bool = False) -> Block:
    """The one right content of this block: its bytes follow from its key."""
    rng = random.Random(name.key)
    tensors = Tensors.of(rng.randbytes(spec.nbytes) for spec in layout.tensors)
    state = Tensors.of(rng.randbytes(spec.nbytes) for spec in layout.attachment or ())
    return Block(name.key, name.parent, name.index, name.ids, tensors, state if attached else None)


def chain_of(layout: Layout, seed: int, blocks: int, ends: Sequence[int] = ()) -> list[Block]:
    """A chain of blocks; those at the indices `ends` carry an attachment."""
    return [block_of(layout, name, name.index in ends) for name in record.names(layout.namespace, ids_of(seed, blocks))]


def names_of(blocks: Sequence[Block]) -> tuple[BlockName, ...]:
    return tuple(record.name_of(block) for block in blocks)


def content(block: Block) -> tuple[object, ...]:
    parts = [payload.parts for payload in (block.payload, block.attachment) if isinstance(payload, Tensors)]
    return block.key, block.parent, block.index, block.ids, block.attachment is not None, [bytes(p) for part in parts for p in part]


def is_right(layout: Layout, name: BlockName, found: Block) -> bool:
    """Whether a block that was read has exactly the bytes that were computed for this name."""
    return content(found) == content(block_of(layout, name, found.attachment is not None))


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Posix(PosixFiles):
    """The real one on a disk that is never full, whatever this machine's is."""

    def space(self, path: str) -> Space:
        return AMPLE


@dataclass
class Disk:
    """A store with what it said, opened."""

    root: Path
    budget_bytes: int = 2**30
    files: FileOps = field(default_factory=Posix)
    clock: Clock = field(default_factory=Clock)
    store_type: type[Store] = Store

    def __post_init__(self) -> None:
        self.said: list[str] = []
        wall_ns = self.files.wall_ns if isinstance(self.files, SimFiles) else time.time_ns
        self.store = self.store_type(self.root, self.budget_bytes, self.files, self.said.append, self.clock, wall_ns)
        self.store.open()

    def writer(self, queue_bytes: int = 2**30) -> Writer:
        """A writer whose thread is not started: `work` does its jobs."""
        return Writer(self.store, queue_bytes, self.said.append, self.clock)


def records_in(root: Path) -> list[Path]:
    return sorted(root.glob("v*/*/*/*.kv"))


def file_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.name not in ("lock", "owner"))


def flush(writer: Writer) -> Receipt:
    """Of a writer that is not started."""
    asked = writer.ask_flush()
    writer.work()
    return writer.receipt(asked)


def restored(writer: Writer, layout: Layout, want: Want, limit_bytes: int = 2**40) -> list[Block] | None:
    """By a writer that is not started: the blocks read, in order."""
    restoring = writer.restore(layout, want, limit_bytes, 60.0)
    writer.work()
    assert restoring.done
    return None if restoring.result is None else [restoring.result.blocks[i] for i in sorted(restoring.result.blocks)]


# -- a file system in memory ------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The machine stops here. No handler of the code under test may see it."""


@dataclass(eq=False)
class File:
    """data: as processes see it. durable: as of the last sync. writes since then are pending: (offset, bytes)."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    mtime_ns: int = 0


@dataclass(eq=False)
class Folder:
    """entries: as processes see it. durable: as of the last sync_dir. changes since then are pending: (name, node or None)."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[tuple[str, File | Folder | None]] = field(default_factory=list)
    mtime_ns: int = 0


class SimFiles:
    """`FileOps` in memory that knows what is durable. Calls are counted and may fail, be cut short, or be the last before a crash.

    Nothing is durable before its sync: data by `sync`, a name by `sync_dir` of the folder it is in, and so on up to the root.
    fault: (number of the call, what happens): an errno, or "short" for a write that takes half.
    """

    def __init__(self, root: Folder | None = None) -> None:
        home = {"home": Folder()}
        self.root = root if root is not None else Folder(dict(home), dict(home))
        self.calls = 0
        self.log: list[str] = []
        self.crash_at = -1
        self.faults: dict[int, int | str] = {}
        self.space_left = AMPLE
        self.unlinked: set[str] = set()
        self._open: dict[int, File] = {}
        self._locks: dict[int, str] = {}
        self._next_fd = 100
        self._ns = 10**18

    # bookkeeping

    def _call(self, name: str) -> int | str | None:
        self.calls += 1
        self.log.append(name)
        if self.calls > self.crash_at > 0:
            raise Crash
        fault = self.faults.get(self.calls)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        return fault

    def _tick(self) -> int:
        self._ns += 10**6
        return self._ns

    def wall_ns(self) -> int:
        return self._ns + 10**12  # long after every stamp, so that an unchanged folder is known to be

    def _node(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for part in path.strip("/").split("/"):
            if not isinstance(node, Folder):
                raise NotADirectoryError(errno.ENOTDIR, path)
            if part not in node.entries:
                raise FileNotFoundError(errno.ENOENT, path)
            node = node.entries[part]
        return node

    def _folder(self, path: str) -> Folder:
        node = self._node(path) if path.strip("/") else self.root
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, path)
        return node

    def _set(self, path: str, node: File | Folder | None) -> None:
        home, _, name = path.rpartition("/")
        folder = self._folder(home)
        if node is None:
            del folder.entries[name]
        else:
            folder.entries[name] = node
        folder.changes.append((name, node))
        folder.mtime_ns = self._tick()

    def _free(self, path: str) -> None:
        home, _, name = path.rpartition("/")
        if name in self._folder(home).entries:
            raise FileExistsError(errno.EEXIST, path)

    # FileOps

    def make_dir(self, path: str) -> None:
        self._call("make_dir")
        self._free(path)
        self._set(path, Folder(mtime_ns=self._tick()))

    def create_excl(self, path: str) -> int:
        self._call("create_excl")
        self._free(path)
        return self._opened(path)

    def _opened(self, path: str) -> int:
        file = File(mtime_ns=self._tick())
        self._set(path, file)
        self._next_fd += 1
        self._open[self._next_fd] = file
        return self._next_fd

    def write(self, fd: int, data: memoryview) -> int:
        short = self._call("write") == "short"
        taken = bytes(data[: max(1, len(data) // 2)] if short else data)
        file = self._open[fd]
        file.writes.append((len(file.data), taken))
        file.data += taken
        file.mtime_ns = self._tick()
        return len(taken)

    def sync(self, fd: int) -> None:
        self._call("sync")
        file = self._open[fd]
        file.durable, file.writes = bytes(file.data), []

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)  # the descriptor is gone even if close fails
        self._call("close")

    def rename(self, source: str, target: str) -> None:
        self._call("rename")
        node = self._node(source)
        self._folder(target.rpartition("/")[0])
        self._set(target, node)
        self._set(source, None)

    def sync_dir(self, path: str) -> None:
        self._call("sync_dir")
        folder = self._folder(path)
        folder.durable, folder.changes = dict(folder.entries), []

    def barrier(self, path: str) -> None:
        self._call("barrier")
        self._node(path)

    def unlink(self, path: str) -> None:
        self._call("unlink")
        self._node(path)
        self._set(path, None)
        self.unlinked.add(path)

    def remove_dir(self, path: str) -> None:
        self._call("remove_dir")
        if self._folder(path).entries:
            raise OSError(errno.ENOTEMPTY, path)
        self._set(path, None)

    def look(self, path: str) -> Found:
        self._call("look")
        return _found(path.rpartition("/")[2], self._node(path))

    def list(self, path: str) -> list[Found]:
        self._call("list")
        return [_found(name, node) for name, node in self._folder(path).entries.items()]

    def read(self, path: str, most_bytes: int) -> tuple[int, bytearray]:
        self._call("read")
        file = self._node(path)
        assert isinstance(file, File)
        return len(file.data), file.data[:most_bytes]

    def stamp(self, path: str, mtime_ns: int) -> None:
        self._call("stamp")
        self._node(path).mtime_ns = mtime_ns

    def space(self, path: str) -> Space:
        self._call("space")
        return self.space_left

    def lock(self, path: str) -> int | None:
        self._call("lock")
        if path in self._locks.values():
            return None
        try:
            self._node(path)
        except FileNotFoundError:
            self._open.pop(self._opened(path))
        self._next_fd += 1
        self._locks[self._next_fd] = path
        return self._next_fd

    def unlock(self, lock: int) -> None:
        self._locks.pop(lock)
        self._call("unlock")

    # what a crash leaves

    def after_crash(self, rng: random.Random) -> SimFiles:
        """The disk as it may be found: of what was not synced, each operation was written, dropped or trashed."""
        return SimFiles(_settled(self.root, rng, {}))

    def after_kill(self) -> SimFiles:
        """The process is gone, the machine is not: everything is as it was seen."""
        return SimFiles(self.root)


def _found(name: str, node: File | Folder) -> Found:
    return Found(name, "file", len(node.data), node.mtime_ns) if isinstance(node, File) else Found(name, "dir", 0, node.mtime_ns)


def _settled(folder: Folder, rng: random.Random, files: dict[int, File]) -> Folder:
    entries = dict(folder.durable)
    for name in {name for name, _ in folder.changes}:
        seen = [folder.durable.get(name), *(node for changed, node in folder.changes if changed == name)]
        node = rng.choice((seen[-1], rng.choice(seen)))
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node
    kept: dict[str, File | Folder] = {}
    for name, node in entries.items():
        if isinstance(node, Folder):
            kept[name] = _settled(node, rng, files)
        else:
            kept[name] = files.setdefault(id(node), _settled_file(node, rng))
    return Folder(dict(kept), kept, mtime_ns=folder.mtime_ns)


def _settled_file(file: File, rng: random.Random) -> File:
    data = bytearray(file.durable)
    for offset, written in file.writes:
        fate = rng.choice(("written", "written", "dropped", "trashed"))
        if fate != "dropped":
            data.extend(bytes(max(0, offset + len(written) - len(data))))
            data[offset : offset + len(written)] = written if fate == "written" else rng.randbytes(len(written))
    return File(data, bytes(data), [], file.mtime_ns)
