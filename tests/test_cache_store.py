"""The owner of the cache directory: what is where, what is read, what goes, and that trouble is a miss. Planning a restore too."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from cache_rig import (
    AMPLE,
    SIM_ROOT,
    Clock,
    Disk,
    Posix,
    SimFiles,
    block_of,
    chain_of,
    content,
    file_bytes,
    layout_of,
    names_of,
    records_in,
)
from hypothesis import given
from hypothesis import strategies as st

from mlxnb_engine.cache import budget, labels, listing, record, store
from mlxnb_engine.cache.blocks import RECORD_FORMAT, Block, T
from mlxnb_engine.cache.files import Space
from mlxnb_engine.cache.home import Home
from mlxnb_engine.cache.listing import record_path
from mlxnb_engine.cache.record import Layout
from mlxnb_engine.cache.restore import Want, ends, restore

LAYOUT = layout_of()
CHILD = Path(__file__).with_name("cache_child.py")
ONE = layout_of(attached=False).most_bytes
"""Bytes of a record without an attachment, and up to 400 more: the digits of its ids."""


def put(disk: Disk, blocks: list[Block], layout: Layout = LAYOUT) -> list[str]:
    return [disk.store.publish(layout, block) for block in blocks]


def loaded(disk: Disk, blocks: list[Block], layout: Layout = LAYOUT) -> list[bool]:
    """Which of these are read back; what is read must be exactly what was put."""
    found = [disk.store.load(layout, name) for name in names_of(blocks)]
    for block, back in zip(blocks, found, strict=True):
        assert back is None or content(back) == content(block)
    return [back is not None for back in found]


def path_of(disk: Disk, block: Block, layout: Layout = LAYOUT) -> Path:
    return disk.root / record_path(layout.namespace, block.key)


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    return {str(p.relative_to(root)): (s.st_ino, s.st_size, s.st_mtime_ns) for p in sorted(root.rglob("*")) if (s := p.lstat())}


# -- publish and read ----------------------------------------------------------------------------------------------


def test_blocks_come_back_after_a_restart(tmp_path: Path) -> None:
    blocks = chain_of(LAYOUT, 1, 5, ends=(2, 4))
    first = Disk(tmp_path / "deep" / "cache")
    assert put(first, blocks) == ["published"] * 5
    assert loaded(first, blocks) == [True] * 5
    first.store.check()
    first.store.close()
    again = Disk(first.root)
    assert loaded(again, blocks) == [True] * 5
    assert [again.store.attached(LAYOUT, name) for name in names_of(blocks)] == [False, False, True, False, True]
    assert again.store.used_bytes == file_bytes(again.root)
    assert first.said == again.said == []


def test_files_lie_where_the_format_says_and_are_private(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    block = chain_of(LAYOUT, 1, 1)[0]
    put(disk, [block])
    key = block.key.hex()
    assert records_in(disk.root) == [disk.root / f"v{RECORD_FORMAT}" / LAYOUT.namespace.hex() / key[:2] / f"{key}.kv"]
    homes = list((disk.root / "tmp").iterdir())
    assert len(homes) == 1 and re.fullmatch(rf"{os.getpid()}-[0-9a-f]{{32}}", homes[0].name)
    for path in [disk.root, *disk.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    disk.store.close()
    assert list((disk.root / "tmp").iterdir()) == []


def test_a_key_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 2)
    put(disk, blocks)
    inodes = [path_of(disk, block).stat().st_ino for block in blocks]
    assert put(disk, blocks) == ["kept", "kept"]
    assert [path_of(disk, block).stat().st_ino for block in blocks] == inodes


def test_an_attachment_that_is_missing_is_added_and_never_taken_away(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    plain, full = chain_of(LAYOUT, 1, 1)[0], chain_of(LAYOUT, 1, 1, ends=(0,))[0]
    assert put(disk, [plain, full, plain, full]) == ["published", "published", "kept", "kept"]
    assert loaded(disk, [full]) == [True]
    disk.store.check()
    assert disk.store.used_bytes == file_bytes(disk.root)
    again = Disk(disk.root)  # it does not know yet what the record holds
    assert put(again, [plain, full]) == ["kept", "kept"]


def test_a_child_without_its_parent_is_not_written(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 3)
    assert put(disk, [blocks[1], blocks[0], blocks[2], blocks[1], blocks[2]]) == [
        "refused",
        "published",
        "refused",
        "published",
        "published",
    ]


def test_a_block_of_another_layout_raises_and_leaves_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    with pytest.raises(ValueError):
        disk.store.publish(layout_of(width=8), chain_of(LAYOUT, 1, 1)[0])
    disk.store.check()
    assert file_bytes(disk.root) == 0


def test_namespaces_never_cross(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    other = layout_of(seed=1)
    mine, theirs = chain_of(LAYOUT, 1, 2), chain_of(other, 1, 2)
    put(disk, mine)
    assert loaded(disk, theirs, other) == [False, False]
    path_of(disk, theirs[0], other).parent.mkdir(parents=True)
    shutil.copy(path_of(disk, mine[0]), path_of(disk, theirs[0], other))
    again = Disk(disk.root)
    assert loaded(again, theirs, other) == [False, False] and loaded(again, mine) == [True, True]


# -- what is wrong is a miss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "foreign", "empty"])
def test_a_damaged_record_is_set_aside_and_can_be_written_again(tmp_path: Path, damage: str) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 3)
    put(disk, blocks)
    path = path_of(disk, blocks[1])
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[-3] ^= 1
    elif damage == "cut":
        del raw[-1:]
    elif damage == "grow":
        raw += bytes(10_000)
    elif damage == "foreign":
        raw = bytearray(path_of(disk, blocks[2]).read_bytes())
    else:
        raw.clear()
    path.write_bytes(raw)
    assert loaded(disk, blocks) == [True, False, True]
    assert not path.exists() and len(list((disk.root / "quarantine").iterdir())) == 1
    assert len(disk.said) == 1 and "damaged" in disk.said[0]
    disk.store.check()
    assert put(disk, [blocks[1]]) == ["published"]
    assert loaded(disk, blocks) == [True] * 3


def test_the_quarantine_is_bounded_and_loses_the_oldest(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 20)
    put(disk, blocks)
    for block in blocks:
        path_of(disk, block).write_bytes(bytes(ONE))
    assert not any(loaded(disk, blocks))
    kept = sorted(path.name[:64] for path in (disk.root / "quarantine").iterdir())
    assert kept == sorted(block.key.hex() for block in blocks[-budget.QUARANTINE_FILES :])
    disk.store.check()
    assert disk.store.used_bytes == file_bytes(disk.root)
    disk.store._budget.trim_quarantine(most_bytes=3 * ONE)
    assert len(list((disk.root / "quarantine").iterdir())) == 3


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.ENFILE, None])
def test_trouble_while_reading_is_a_miss_and_deletes_nothing(tmp_path: Path, code: int | None) -> None:
    class Trouble(Posix):
        on = False

        def read(self, path: str, most_bytes: int) -> tuple[int, bytearray]:
            if self.on:
                raise MemoryError if code is None else OSError(code, os.strerror(code))
            return super().read(path, most_bytes)

    files = Trouble()
    disk = Disk(tmp_path / "cache", files=files)
    blocks = chain_of(LAYOUT, 1, 2, ends=(1,))
    put(disk, blocks)
    disk = Disk(disk.root, files=files)
    files.on = True
    before = snapshot(disk.root)
    assert loaded(disk, blocks) == [False, False]
    assert not disk.store.attached(LAYOUT, names_of(blocks)[1])
    assert snapshot(disk.root) == before
    files.on = False
    assert loaded(disk, blocks) == [True, True]


def test_a_file_that_vanished_is_a_miss_and_its_key_is_free_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 2)
    put(disk, blocks)
    path_of(disk, blocks[0]).unlink()
    shutil.rmtree(path_of(disk, blocks[1]).parent)
    assert loaded(disk, blocks) == [False, False]
    assert put(disk, blocks) == ["published", "published"]
    assert loaded(disk, blocks) == [True, True]


def test_a_link_or_a_pipe_with_the_name_of_a_record_is_not_read(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 2)
    put(disk, blocks)
    outside = tmp_path / "outside"
    shutil.copy(path_of(disk, blocks[0]), outside)
    for block in blocks:
        path_of(disk, block).unlink()
    path_of(disk, blocks[0]).symlink_to(outside)
    os.mkfifo(path_of(disk, blocks[1]))
    start = time.monotonic()
    assert loaded(disk, blocks) == [False, False]  # listed as files, which they no longer are
    assert not any(Disk(disk.root).store.listed(LAYOUT.namespace, block.key) for block in blocks)
    assert time.monotonic() - start < 5 and outside.exists()


def test_a_bad_record_that_cannot_be_moved_counts_as_absent_until_replaced(tmp_path: Path) -> None:
    class Stuck(Posix):
        on = False

        def rename(self, source: str, target: str) -> None:
            if self.on:
                raise OSError(errno.EIO, "")
            super().rename(source, target)

    files = Stuck()
    disk = Disk(tmp_path / "cache", files=files)
    block = chain_of(LAYOUT, 1, 1)[0]
    put(disk, [block])
    path_of(disk, block).write_bytes(bytes(ONE))
    files.on = True
    assert loaded(disk, [block]) == [False] and path_of(disk, block).exists()
    assert not disk.store.listed(LAYOUT.namespace, block.key)
    files.on = False
    assert put(disk, [block]) == ["published"] and loaded(disk, [block]) == [True]
    disk.store.check()
    assert disk.store.used_bytes == file_bytes(disk.root)


# -- opening -------------------------------------------------------------------------------------------------------


def test_names_that_are_not_ours_are_neither_counted_nor_touched(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    put(disk, chain_of(LAYOUT, 1, 3))
    disk.store.close()
    root, v1, ns = disk.root, disk.root / "v1", disk.root / "v1" / LAYOUT.namespace.hex()
    key = uuid.uuid4().hex * 2
    foreign = [
        root / "notes.txt",
        root / "v01" / LAYOUT.namespace.hex() / key[:2] / f"{key}.kv",
        root / "models" / "weights.safetensors",
        v1 / "readme",
        v1 / ("A" * 64) / key[:2] / f"{key}.kv",
        ns / "abc" / f"{key}.kv",
        ns / key[:2] / f"{key}.kv.bak",
        ns / key[:2] / f"{key.upper()}X.kv",
        ns / ("00" if key[:2] != "00" else "01") / f"{key}.kv",
        root / "tmp" / "mine" / "x",
        root / "tmp" / f"12-{uuid.uuid4().hex}" / "not a temporary file",
        root / "quarantine" / "evidence.kv",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    (ns / "ff").mkdir(exist_ok=True)
    (ns / "ff" / f"ff{key[2:]}.kv").symlink_to(root / "notes.txt")
    tight = Disk(root, budget_bytes=1)
    assert records_in(root) and all(path.is_symlink() or path in foreign for path in records_in(root))
    assert all(path.read_bytes() == b"x" * 1000 for path in foreign)
    assert tight.store.used_bytes == 0


def test_temporary_folders_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    living = Disk(tmp_path / "cache")
    dead = tmp_path / "cache" / "tmp" / f"999999-{uuid.uuid4().hex}"
    bare = tmp_path / "cache" / "tmp" / f"999998-{uuid.uuid4().hex}"
    dead.mkdir()
    bare.mkdir()
    (dead / "owner").touch()
    (dead / f"{uuid.uuid4().hex}.tmp").write_bytes(bytes(5000))
    mine = next((tmp_path / "cache" / "tmp").glob(f"{os.getpid()}-*")) / f"{uuid.uuid4().hex}.tmp"
    mine.write_bytes(bytes(700))
    second = Disk(tmp_path / "cache")
    assert not dead.exists() and not bare.exists() and mine.exists()
    assert second.store.used_bytes == 700
    living.store.close()


def off(disk: Disk, *words: str) -> None:
    """This store is a miss for everything, and has said so once."""
    block = chain_of(LAYOUT, 1, 1)[0]
    assert not disk.store.usable and len(disk.said) == 1 and all(word in disk.said[0] for word in words)
    assert put(disk, [block]) == ["refused"] and loaded(disk, [block]) == [False]
    disk.store.close()
    assert len(disk.said) == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["make_dir", "lock", "list"])
def test_without_a_usable_directory_there_is_one_warning_and_no_error(code: int, call: str) -> None:
    files = SimFiles()

    def broken(*_: object) -> object:
        raise OSError(code, os.strerror(code))

    setattr(files, call, broken)
    off(Disk(SIM_ROOT, files=files), "memory only", os.strerror(code))


@pytest.mark.parametrize("how", ["unsupported", "does nothing"])
def test_without_working_locks_blocks_stay_in_memory(tmp_path: Path, how: str) -> None:
    class NoLocks(Posix):
        def lock(self, path: str) -> int | None:
            if how == "unsupported":
                raise OSError(errno.ENOTSUP, "")
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

        def unlock(self, lock: int) -> None:
            os.close(lock)

    off(Disk(tmp_path / "cache", files=NoLocks()), "no working file locks")


def test_a_file_in_the_place_of_the_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    off(Disk(tmp_path / "cache"), "memory only")
    assert (tmp_path / "cache").read_text() == "a file"


def test_a_lock_that_is_held_elsewhere_does_not_stop_anybody_for_long(tmp_path: Path) -> None:
    class Ticking(Clock):
        def __call__(self) -> float:
            self.now += 0.2
            return self.now

    disk = Disk(tmp_path / "cache", budget_bytes=3 * ONE, clock=Ticking())
    put(disk, chain_of(LAYOUT, 1, 3))
    new = chain_of(LAYOUT, 2, 1)
    lock = Posix().lock(str(disk.root / "lock"))
    assert lock is not None
    start = time.monotonic()
    assert put(disk, new) == ["refused"]  # no eviction, no room
    off(Disk(disk.root, clock=Ticking()), "lock")
    assert time.monotonic() - start < 5
    Posix().unlock(lock)
    assert put(disk, new) == ["published"] and file_bytes(disk.root) <= 3 * ONE


def test_a_cold_namespace_beside_a_warm_one_is_mentioned_once(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    put(disk, chain_of(LAYOUT, 1, 2))
    assert disk.said == []
    other = layout_of(seed=9)
    for _ in range(2):
        restore(disk.store, other, Want(record.names(other.namespace, list(range(2 * T)))), 2**30, lambda: True)
    put(disk, chain_of(other, 1, 1), other)
    assert len(disk.said) == 1 and "none for this model" in disk.said[0]
    again = Disk(disk.root)
    restore(again.store, other, Want(names_of(chain_of(other, 1, 1))), 2**30, lambda: True)
    assert again.said == []


# -- budget and recency --------------------------------------------------------------------------------------------


def test_the_budget_covers_all_namespaces_and_holds_after_every_publish(tmp_path: Path) -> None:
    layouts = [layout_of(seed=i) for i in range(3)]
    disk = Disk(tmp_path / "cache", budget_bytes=20 * ONE)
    for round_number in range(4):
        for layout in layouts:
            for block in chain_of(layout, round_number, 5):
                assert disk.store.publish(layout, block) == "published"
                assert file_bytes(disk.root) <= 20 * ONE
                disk.store.check()
    assert len(records_in(disk.root)) >= 15


def test_the_budget_holds_at_reopen(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    put(disk, chain_of(LAYOUT, 1, 12))
    disk.store.close()
    again = Disk(disk.root, budget_bytes=5 * ONE)
    assert again.store.used_bytes == file_bytes(disk.root) <= 5 * ONE
    assert len(records_in(disk.root)) >= 4


def test_quarantine_and_temporary_files_count(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache", budget_bytes=6 * ONE)
    other = Disk(disk.root, budget_bytes=6 * ONE)
    blocks = chain_of(LAYOUT, 1, 6)
    put(disk, blocks[:2])
    path_of(disk, blocks[1]).write_bytes(bytes(ONE))
    loaded(disk, blocks[1:2])
    temporary = next((disk.root / "tmp").glob(f"{other.store._home._name}")) / f"{uuid.uuid4().hex}.tmp"
    temporary.write_bytes(bytes(3 * ONE))
    assert put(disk, blocks[1:3]) == ["published", "published"]  # the bad record went first
    assert list((disk.root / "quarantine").iterdir()) == [] and temporary.exists()
    assert loaded(disk, blocks[:3]) == [True, True, True]
    put(disk, blocks[3:])
    assert file_bytes(disk.root) <= 6 * ONE and temporary.exists()


def test_a_record_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache", budget_bytes=ONE - 500)
    assert put(disk, chain_of(LAYOUT, 1, 1)) == ["refused"]
    assert file_bytes(disk.root) == 0


def test_leaves_go_before_parents_and_old_chains_before_new_ones(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    old, new = chain_of(LAYOUT, 1, 4), chain_of(LAYOUT, 2, 4)
    put(disk, old)
    disk.store.settle()
    put(disk, new)
    disk.store.settle()
    gone = []
    everything = {block.key: (chain, block.index) for chain, blocks in (("old", old), ("new", new)) for block in blocks}
    while records_in(disk.root):
        there = {path.stem for path in records_in(disk.root)}
        disk.store._budget.evict(disk.store.used_bytes - 1, frozenset)
        gone += [everything[bytes.fromhex(key)] for key in there - {path.stem for path in records_in(disk.root)}]
    assert gone == [("old", 3), ("old", 2), ("old", 1), ("old", 0), ("new", 3), ("new", 2), ("new", 1), ("new", 0)]


def test_use_stamps_the_whole_chain_with_now_minus_its_depth(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 4)
    put(disk, blocks)
    disk.store.settle()
    for block in blocks:
        os.utime(path_of(disk, block), ns=(10**18, 10**18))
    before = time.time_ns()
    disk.store.keep(LAYOUT, names_of(blocks)[:3])
    disk.store.settle()
    stamps = [path_of(disk, block).stat().st_mtime_ns for block in blocks]
    assert stamps[0] >= before and stamps[3] == 10**18
    assert [stamps[0] - stamp for stamp in stamps[:3]] == [0, 1000, 2000]


def test_a_chain_longer_than_the_budget_keeps_its_beginning(tmp_path: Path) -> None:
    """Its oldest blocks are its root, and a new block needs all before it: neither may go to make room for it."""
    blocks, other = chain_of(LAYOUT, 1, 12), chain_of(LAYOUT, 2, 3)
    disk = Disk(tmp_path / "cache", budget_bytes=sum(len(record.encode(block, LAYOUT)) for block in blocks[:8]) + 100)
    put(disk, other)
    disk.store.settle()
    assert put(disk, blocks) == ["published"] * 8 + ["refused"] * 4
    assert loaded(disk, blocks) == [True] * 8 + [False] * 4 and not any(loaded(disk, other))
    assert put(disk, blocks[8:]) == ["refused"] * 4  # and trying again does not eat it up
    assert loaded(disk, blocks) == [True] * 8 + [False] * 4


def test_old_formats_go_first_and_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Disk(tmp_path / "cache")
    old, new = chain_of(LAYOUT, 1, 3), chain_of(LAYOUT, 2, 3)
    put(first, old)
    first.store.close()
    for module in (budget, listing, store):
        monkeypatch.setattr(module, "RECORD_FORMAT", RECORD_FORMAT + 1)
    disk = Disk(first.root)
    assert loaded(disk, old) == [False] * 3 and put(disk, new) == ["published"] * 3
    disk.store.settle()
    later = time.time_ns() + 10**9
    for path in first.root.glob(f"v{RECORD_FORMAT}/*/*/*.kv"):
        os.utime(path, ns=(later, later))
    assert disk.store.used_bytes == file_bytes(disk.root)
    disk.store._budget.evict(3 * ONE, frozenset)
    assert loaded(disk, new) == [True] * 3 and len(records_in(disk.root)) == 3


def test_a_record_that_another_process_has_used_since_is_not_the_oldest(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    first, second = chain_of(LAYOUT, 1, 1), chain_of(LAYOUT, 2, 1)
    put(disk, first)
    disk.store.settle()
    put(disk, second)
    disk.store.settle()
    later = time.time_ns() + 10**9
    os.utime(path_of(disk, first[0]), ns=(later, later))
    disk.store._budget.evict(disk.store.used_bytes - 1, frozenset)
    assert loaded(disk, first) == [True] and loaded(disk, second) == [False]


def test_what_other_processes_store_and_evict_is_seen(tmp_path: Path) -> None:
    one, two = Disk(tmp_path / "cache"), Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 4)
    assert put(one, blocks[:3]) == ["published"] * 3
    two.store.look_again()
    assert loaded(two, blocks[:3]) == [True] * 3 and put(two, blocks[2:]) == ["kept", "published"]
    assert two.store.used_bytes == file_bytes(tmp_path / "cache")
    two.store._budget.evict(0, frozenset)
    one.store.look_again()
    assert one.store.used_bytes == 0 and loaded(one, blocks) == [False] * 4
    one.store.check()
    two.store.check()


def test_two_processes_keep_one_budget(tmp_path: Path) -> None:
    """Neither lists the whole tree again; both must still see what the other writes."""
    disks = [Disk(tmp_path / "cache", budget_bytes=10 * ONE) for _ in range(2)]
    for number in range(12):
        for disk in disks:
            put(disk, chain_of(LAYOUT, 100 * number + disks.index(disk), 2))
            assert file_bytes(disk.root) <= 10 * ONE


# -- disk full -----------------------------------------------------------------------------------------------------


class Full(SimFiles):
    """ENOSPC while `full`; each write that was tried is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.tried, self.code = False, 0, errno.ENOSPC

    def write(self, fd: int, data: memoryview) -> int:
        if self.full:
            self.tried += 1
            super().write(fd, data[:10])
            raise OSError(self.code, os.strerror(self.code))
        return super().write(fd, data)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_tried_twice_and_then_left_alone_for_ever_longer(code: int) -> None:
    files = Full()
    files.code = code
    disk = Disk(SIM_ROOT, files=files)
    old, blocks = chain_of(LAYOUT, 1, 20), chain_of(LAYOUT, 2, 3)
    put(disk, old)
    files.full = True
    for pause in (60, 120, 240, 480, 600, 600, 600):
        files.tried = 0
        assert put(disk, blocks[:1]) == ["failed"] and files.tried == 2
        disk.clock.now += pause - 1
        assert put(disk, blocks[:1]) == ["refused"] and files.tried == 2
        disk.clock.now += 1
    assert sum("is full" in text for text in disk.said) == 1
    assert not [name for name in files._folder(f"{SIM_ROOT}/tmp/{disk.store._home._name}").entries if name != "owner"]
    assert 4 <= sum(loaded(disk, old)) < 20  # each failure evicted a little, and what is left can be read
    files.full = False
    assert put(disk, blocks) == ["published"] * 3
    files.full = True
    assert put(disk, chain_of(LAYOUT, 3, 1)) == ["failed"]
    disk.clock.now += 60
    files.full = False
    assert put(disk, chain_of(LAYOUT, 3, 1)) == ["published"]  # a write that works ends the doubling
    disk.store.check()


def test_an_eviction_that_makes_room_is_enough() -> None:
    files = Full()
    disk = Disk(SIM_ROOT, files=files)
    put(disk, chain_of(LAYOUT, 1, 8))
    unlink = files.unlink

    def unlink_frees(path: str) -> None:
        unlink(path)
        files.full = files.full and not path.endswith(".kv")

    files.full, files.unlink = True, unlink_frees  # type: ignore[method-assign]
    assert put(disk, chain_of(LAYOUT, 2, 2)) == ["published", "published"]
    assert files.tried == 1 and disk.said == []


def test_nothing_is_written_below_the_floor_of_free_space() -> None:
    assert budget.floor_of(Space(0, 2**40)) == 10 * 2**30 and budget.floor_of(Space(0, 2**36)) == 2**36 // 20
    files = SimFiles()
    disk = Disk(SIM_ROOT, files=files)
    blocks = chain_of(LAYOUT, 1, 3)
    put(disk, blocks[:1])
    files.space_left = Space(10 * 2**30 + 100, 2**40)
    assert put(disk, blocks[1:]) == ["refused", "refused"] and len(disk.said) == 1
    assert loaded(disk, blocks[:1]) == [True]
    files.space_left = AMPLE
    assert put(disk, blocks[1:]) == ["published", "published"] and len(disk.said) == 1


def test_a_failed_fsync_is_not_tried_again_on_the_same_file() -> None:
    files = SimFiles()
    disk = Disk(SIM_ROOT, files=files)
    block = chain_of(LAYOUT, 1, 1)[0]
    real, synced = files.sync, []

    def sync(fd: int) -> None:
        synced.append(files._open[fd])
        raise OSError(errno.EIO, "")

    files.sync = sync  # type: ignore[method-assign]
    assert put(disk, [block]) == ["failed"] and len(synced) == 1
    files.sync = real  # type: ignore[method-assign]
    assert put(disk, [block]) == ["published"] and loaded(disk, [block]) == [True]
    assert len([path for path in files.unlinked if path.endswith(".tmp")]) == 1


# -- durability ----------------------------------------------------------------------------------------------------


def records(blocks: list[Block]) -> list[tuple[bytes, bytes]]:
    return [(LAYOUT.namespace, block.key) for block in blocks]


def test_sync_covers_every_folder_from_the_record_up_once() -> None:
    files = SimFiles()
    disk = Disk(SIM_ROOT, files=files)
    blocks = chain_of(LAYOUT, 1, 3)
    put(disk, blocks)
    files.log.clear()
    durable, gone = disk.store.sync(records(blocks))
    assert durable == {block.key for block in blocks} and gone == set()
    assert files.log.count("sync_dir") == len({block.key[:1] for block in blocks}) + 4 and files.log.count("barrier") == 1
    files.log.clear()
    assert disk.store.sync(records(blocks)) == (durable, set())
    assert "sync_dir" not in files.log and "barrier" not in files.log


def test_a_folder_whose_sync_failed_is_not_trusted_when_a_later_one_works() -> None:
    files = SimFiles()
    disk = Disk(SIM_ROOT, files=files)
    blocks = chain_of(LAYOUT, 1, 2)
    put(disk, blocks)
    real = files.sync_dir

    def sync_dir(path: str) -> None:
        if path.endswith(f"/{blocks[0].key.hex()[:2]}"):
            raise OSError(errno.EIO, "")
        real(path)

    files.sync_dir = sync_dir  # type: ignore[method-assign]
    assert disk.store.sync(records(blocks)) == (set(), set())  # the child is not durable without its parent
    files.sync_dir = real  # type: ignore[method-assign]
    assert disk.store.sync(records(blocks)) == (set(), set())
    assert loaded(disk, blocks) == [True, True]


@pytest.mark.parametrize("call", ["sync_dir", "barrier"])
def test_a_passing_failure_of_a_sync_is_made_good_by_the_next(call: str) -> None:
    files = SimFiles()
    disk = Disk(SIM_ROOT, files=files)
    blocks = chain_of(LAYOUT, 1, 2)
    put(disk, blocks)
    real = getattr(files, call)

    def broken(_: str) -> None:
        raise OSError(errno.EMFILE, "")

    setattr(files, call, broken)
    assert disk.store.sync(records(blocks)) == (set(), set())
    setattr(files, call, real)
    assert disk.store.sync(records(blocks)) == ({block.key for block in blocks}, set())


def test_sync_says_what_is_gone_with_all_that_needs_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 4)
    put(disk, blocks)
    path_of(disk, blocks[1]).unlink()
    durable, gone = disk.store.sync(records(blocks))
    assert durable == {blocks[0].key} and gone == {block.key for block in blocks[1:]}


# -- fork ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_touches_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(CHILD), "fork", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr[-2000:]


def test_the_exclusive_lock_is_free_for_others_after_a_fork_while_it_was_held(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    home = Home(str(tmp_path), Posix(), time.monotonic)
    with home.exclusive(1.0) as locked:
        assert locked
        duplicate = [os.dup(int(fd)) for fd in os.listdir("/proc/self/fd") if _leads_to(int(fd), tmp_path / "lock")]
        assert duplicate  # as a forked child would have it
    lock = Posix().lock(str(tmp_path / "lock"))
    assert lock is not None
    Posix().unlock(lock)
    for fd in duplicate:
        os.close(fd)


def _leads_to(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


# -- planning a restore --------------------------------------------------------------------------------------------


@given(
    st.lists(st.booleans(), max_size=12),
    st.sampled_from([None, 0, 1, 2, 64, 65, 130, 500]),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 300),
)
def test_a_restore_may_end_exactly_where_all_that_a_layer_sees_is_there(
    present: list[bool], window: int | None, trimmable: bool, beyond: int, least: int
) -> None:
    names = record.names(LAYOUT.namespace, list(range(len(present) * T)))
    want = Want(names, beyond=beyond, window=window, trimmable=trimmable, least_tokens=least)

    def usable(end: int) -> bool:
        """By single tokens: the one at `end * T` and all later ones see so far back."""
        low = 0 if window is None else max(0, end * T - window + 1)
        needed = {at // T for at in range(low, end * T)} | (set() if trimmable else {end - 1})
        return all(present[index] for index in needed)

    right = [end for end in range(len(present), beyond, -1) if end * T >= least and usable(end)]
    assert list(ends(want, present)) == right


def read_back(disk: Disk, want: Want, limit_bytes: int = 2**30) -> tuple[int, list[int]] | None:
    found = restore(disk.store, LAYOUT, want, limit_bytes, lambda: True)
    for index, block in found.blocks.items() if found is not None else ():
        assert content(block) == content(block_of(LAYOUT, want.names[index], block.attachment is not None))
    return (found.end, sorted(found.blocks)) if found is not None else None


def test_the_longest_usable_chain_is_restored(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 8, ends=(2, 5))
    names = names_of(blocks)
    put(disk, blocks[:7])
    assert read_back(disk, Want(names)) == (7, [0, 1, 2, 3, 4, 5, 6])
    assert read_back(disk, Want(names, trimmable=False)) == (6, [0, 1, 2, 3, 4, 5])
    assert read_back(disk, Want(names, held=frozenset({0, 1}))) == (7, [2, 3, 4, 5, 6])
    assert read_back(disk, Want(names, held=frozenset({0, 1, 7}))) == (8, [2, 3, 4, 5, 6])
    assert read_back(disk, Want(names, held=frozenset(range(6)), trimmable=False)) == (6, [5])  # for its attachment alone
    assert read_back(disk, Want(names, held=frozenset(range(6)), held_ends=frozenset({5}), trimmable=False)) == (6, [])
    assert read_back(disk, Want(names, window=65)) == (7, [6])
    assert read_back(disk, Want(names, window=66)) == (7, [5, 6])
    assert read_back(disk, Want(names, window=0, trimmable=False)) == (6, [5])
    assert read_back(disk, Want(names, beyond=7)) is None
    assert read_back(disk, Want(names, beyond=6, trimmable=False)) is None
    assert read_back(disk, Want(names, least_tokens=7 * T + 1)) is None
    assert read_back(disk, Want(names), limit_bytes=int(3.5 * ONE)) == (3, [0, 1, 2])
    assert read_back(disk, Want(())) is None


def test_a_bad_record_makes_the_plan_shorter(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 6, ends=(1, 3, 5))
    names = names_of(blocks)
    put(disk, blocks)
    raw = bytearray(path_of(disk, blocks[4]).read_bytes())
    raw[-1] ^= 1
    path_of(disk, blocks[4]).write_bytes(raw)
    assert read_back(disk, Want(names, trimmable=False)) == (4, [0, 1, 2, 3])
    assert not path_of(disk, blocks[4]).exists()
    path_of(disk, blocks[2]).unlink()
    assert read_back(disk, Want(names, trimmable=False)) == (2, [0, 1])
    assert read_back(disk, Want(names, window=2)) == (6, [5])  # only the window's blocks are needed
    path_of(disk, blocks[0]).write_bytes(b"")
    assert read_back(disk, Want(names)) is None


def test_a_record_is_used_up_by_its_restore_and_may_then_go(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 3)
    put(disk, blocks)
    found = restore(disk.store, LAYOUT, Want(names_of(blocks)), 2**30, lambda: True)
    shutil.rmtree(disk.root)
    assert found is not None and [content(found.blocks[i]) for i in range(3)] == [content(block) for block in blocks]


def test_nobody_waiting_ends_a_restore(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    blocks = chain_of(LAYOUT, 1, 5)
    put(disk, blocks)
    answers = iter([True, True, True, False, False])
    assert restore(disk.store, LAYOUT, Want(names_of(blocks)), 2**30, lambda: next(answers)) is None


def test_a_name_goes_with_what_it_names_and_comes_with_the_next_block(tmp_path: Path) -> None:
    disk, blocks = Disk(tmp_path), chain_of(LAYOUT, 1, 2)
    other = layout_of(1).namespace
    for namespace, name in ((LAYOUT.namespace, "org/big"), (other, "org/small")):
        disk.store.label(namespace, name)
    disk.store.publish(LAYOUT, blocks[0])
    disk.store.clear(LAYOUT.namespace)
    assert labels.read(disk.files, str(tmp_path)) == {other.hex(): "org/small"}
    disk.store.clear()
    assert list((tmp_path / "names").iterdir()) == []
    disk.store.publish(LAYOUT, blocks[0])
    assert labels.read(disk.files, str(tmp_path)) == {LAYOUT.namespace.hex(): "org/big"}
