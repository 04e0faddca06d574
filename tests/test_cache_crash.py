"""What is on disk after a crash, a kill, a fault or a crowd: the right bytes or a miss, and receipts that hold (C1, C2, C3, C5).

Every harness is shown broken parts: a writer in place, one without fsync, one that ignores the write count, one without the
parent rule, a receipt before the directory sync, a shared temporary name, a reader without checksums.
"""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from cache_rig import SIM_ROOT, Disk, Folder, SimFiles, chain_of, content, flush, layout_of, names_of, restored

from mlxnb_engine.cache import record, store
from mlxnb_engine.cache.blocks import Block
from mlxnb_engine.cache.files import FileOps
from mlxnb_engine.cache.listing import record_path
from mlxnb_engine.cache.record import BlockName
from mlxnb_engine.cache.restore import Want
from mlxnb_engine.cache.store import Store
from mlxnb_engine.cache.writer import Writer

LAYOUT = layout_of()
ONE = LAYOUT.most_bytes
CROWD = Path(__file__).with_name("cache_crowd.py")
CHAINS, DEEP = 6, 4


# -- C1 and C5: processes that are killed ------------------------------------------------------------------------------


def crowd(root: Path, *words: object, timeout_s: float = 120.0) -> dict[str, Any]:
    command = [sys.executable, str(CROWD), str(words[0]), str(root / "cache"), *map(str, words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    print(found)
    assert isinstance(found, dict)
    return found


def test_c1_a_writer_killed_at_any_moment_leaves_no_torn_record_and_keeps_what_it_promised(tmp_path: Path, scale: int) -> None:
    count = {1: 200, 10: 1000, 50: 5000}[scale]
    found = crowd(tmp_path, "kills", count, 1, "right", timeout_s=count)
    wrong = {name: found[name] for name in ("torn", "lost", "over budget", "over budget at reopen", "not swept", "ended by itself")}
    assert not any(wrong.values()), wrong
    assert found["flushed"] > count / 20 and found["records"] > count, "hardly anything was written: the test shows nothing"
    hit = found["phases"]
    assert all(hit.get(phase, 0) > 0 for phase in ("open", "put", "flush", "scan", "evict")), hit


def test_c1_sees_a_writer_that_writes_in_place(tmp_path: Path) -> None:
    assert crowd(tmp_path, "kills", 200, 2, "in place")["torn"] > 0


def is_sound(found: dict[str, Any]) -> None:
    wrong = {name: found[name] for name in ("torn", "wrong", "errors", "over budget", "lock late", "survivor stuck")}
    assert not any(wrong.values()), wrong


def test_two_processes_on_one_directory_one_killed_while_writing_and_the_other_goes_on(tmp_path: Path) -> None:
    found = crowd(tmp_path, "crowd", 2, 5, 0.15, 1, "right")
    is_sound(found)
    survivor = found["survivor"]
    assert found["kills"] >= 10 and survivor["restored"] > 10 and survivor["published"] > 10, found


@pytest.mark.tier("N")
def test_c5_four_processes_live_on_one_directory_and_one_is_killed_every_two_seconds(tmp_path: Path, scale: int) -> None:
    seconds = {10: 600, 50: 3600}[scale]
    found = crowd(tmp_path, "crowd", 4, seconds, 2.0, 1, "right", timeout_s=seconds + 120)
    is_sound(found)
    assert found["kills"] > seconds / 4 and found["operations"] > 40_000


def test_c5_sees_a_shared_temporary_name(tmp_path: Path) -> None:
    assert crowd(tmp_path, "crowd", 3, 30, 0.05, 2, "shared name")["torn"] > 0


def test_c5_sees_a_writer_in_place_and_its_readers_count_that_as_a_miss(tmp_path: Path) -> None:
    found = crowd(tmp_path, "crowd", 3, 30, 0.05, 3, "in place")
    assert found["torn"] > 0 and found["wrong"] == 0


def test_c5_sees_a_reader_without_checksums(tmp_path: Path) -> None:
    assert crowd(tmp_path, "crowd", 3, 30, 0.05, 4, "in place, no checksums")["wrong"] > 0


# -- a life of one process on a simulated disk -------------------------------------------------------------------------


@lru_cache(maxsize=1)
def chains() -> tuple[tuple[Block, ...], ...]:
    """Each chain once without attachments, once with them at every other block."""
    plain = [tuple(chain_of(LAYOUT, number, DEEP)) for number in range(CHAINS)]
    return (*plain, *(tuple(chain_of(LAYOUT, number, DEEP, ends=range(0, DEEP, 2))) for number in range(CHAINS)))


@lru_cache(maxsize=1)
def contents() -> dict[tuple[bytes, bool], object]:
    """(key, with an attachment) -> the one right content."""
    return {(block.key, block.attachment is not None): content(block) for chain in chains() for block in chain}


ALL_NAMES = names_of([block for chain in chains()[:CHAINS] for block in chain])


@dataclass
class Life:
    """One process's work: saves in all orders, flushes, restores, evictions if the budget is small, clearing if it `clears`.

    promised: keys whose receipt said that they are durable, and that nobody has evicted since.
    """

    files: SimFiles
    budget_bytes: int
    seed: int
    store_type: type[Store] = Store
    writer_type: type[Writer] = Writer
    clears: bool = False
    promised: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.disk = Disk(SIM_ROOT, self.budget_bytes, self.files, store_type=self.store_type)
        self.writer = self.writer_type(self.disk.store, 2**30, self.disk.said.append, self.disk.clock)
        self.writer.label(LAYOUT.namespace, "a model")

    def live(self, steps: int) -> None:
        rng = random.Random(self.seed)
        for _ in range(steps):
            chain = rng.choice(chains())
            what = rng.random()
            if self.clears and what < 0.05:
                self.writer.label(LAYOUT.namespace, f"model {rng.randrange(3)}")
                self.writer.clear(rng.choice((None, LAYOUT.namespace)))
                self.writer.work()
            elif what < 0.55:
                for block in chain[: rng.randint(1, DEEP)]:
                    self.writer.save(LAYOUT, block)
                self.writer.work()
            elif what < 0.8:
                self.flush()
            else:
                self.read(names_of(chain))
        self.flush()

    def flush(self) -> None:
        published = flush(self.writer).published
        for name in ALL_NAMES:
            if name.key in published:
                self.files.unlinked.discard(path_of(name))
        self.promised |= published

    def read(self, names: tuple[BlockName, ...]) -> None:
        for block in restored(self.writer, LAYOUT, Want(names)) or ():
            assert is_right(block), "wrong bytes came back"

    @property
    def kept(self) -> set[bytes]:
        """What must be there whatever happens to the machine now."""
        return {name.key for name in ALL_NAMES if name.key in self.promised and path_of(name) not in self.files.unlinked}


def path_of(name: BlockName) -> str:
    return f"{SIM_ROOT}/{record_path(LAYOUT.namespace, name.key)}"


def is_right(block: Block) -> bool:
    return content(block) == contents()[block.key, block.attachment is not None]


def found_after(files: SimFiles) -> tuple[set[bytes], int, Disk]:
    """A new process on this disk: the keys it can read, how many of them have wrong bytes, and it. Its budget evicts nothing."""
    disk = Disk(SIM_ROOT, 2**30, files)
    there, wrong = set(), 0
    for name in ALL_NAMES:
        block = disk.store.load(LAYOUT, name)
        if block is not None:
            there.add(name.key)
            wrong += not is_right(block)
    return there, wrong, disk


# -- C2 ----------------------------------------------------------------------------------------------------------------


class Recorder(SimFiles):
    """Before each operation, `each` may look at what a crash at this moment would leave. A write takes a page of 1 KiB at most."""

    each: Callable[[], None] = staticmethod(lambda: None)

    def _call(self, name: str) -> int | str | None:
        self.each()
        return super()._call(name)

    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[:1024])


class NoSync(Recorder):
    def sync(self, fd: int) -> None:
        self._call("sync")


class EarlyReceipt(Store):
    """Says "durable" once the records have their names."""

    def sync(self, records: Any) -> tuple[set[bytes], set[bytes]]:
        return {key for _, key in records}, set()


def crash_states(
    states: int, seed: int, files_type: type[Recorder] = Recorder, store_type: type[Store] = Store, draws: int = 3
) -> Counter[str]:
    """Lives until so many crash states were looked at: `draws` of them before every operation that changes the disk."""
    found: Counter[str] = Counter()
    rng = random.Random(seed)
    while found["states"] < states:
        budget_bytes = rng.choice((8 * ONE, 13 * ONE, 2**30))
        files = files_type()
        life = Life(files, budget_bytes, rng.getrandbits(32), store_type, clears=rng.random() < 0.5)

        def look(files: SimFiles = files, life: Life = life, budget_bytes: int = budget_bytes) -> None:
            if not pending(files.root):
                return  # as after the sync before: looked at already
            for _ in range(draws):
                after = files.after_crash(rng)
                there, wrong, disk = found_after(after)
                found["states"] += 1
                found["wrong"] += wrong
                found["lost"] += len(life.kept - there)
                found["records"] += len(there)
                fresh = chains()[CHAINS + rng.randrange(CHAINS)][0]
                found["stuck"] += disk.store.publish(LAYOUT, fresh) not in ("published", "kept")
                back = disk.store.load(LAYOUT, record.name_of(fresh))
                found["stuck"] += back is None or not is_right(back)
                disk.store.check()
                disk.store.close()
                found["over budget"] += Disk(SIM_ROOT, budget_bytes, after).store.used_bytes > budget_bytes

        files.each = look  # type: ignore[method-assign]
        try:
            life.live(12)
        except AssertionError:  # the life itself read wrong bytes
            found["wrong"] += 1
        found["lives"] += 1
        found["promised"] += len(life.promised)
    print(dict(found))
    return found


def pending(folder: Folder) -> bool:
    """Whether a crash now may leave something else than what processes see."""
    if folder.changes:
        return True
    return any(pending(node) if isinstance(node, Folder) else bool(node.writes) for node in folder.entries.values())


def test_c2_a_crash_leaves_old_new_or_a_miss_and_receipts_hold(scale: int) -> None:
    found = crash_states({1: 2_000, 10: 20_000, 50: 100_000}[scale], seed=1)
    assert (found["wrong"], found["lost"], found["over budget"], found["stuck"]) == (0, 0, 0, 0)
    assert found["promised"] > 20 and found["records"] > found["states"] and found["lives"] > 1


def test_c2_sees_a_receipt_before_the_directory_sync() -> None:
    assert crash_states(300, seed=2, store_type=EarlyReceipt)["lost"] > 0


def test_c2_sees_a_writer_without_fsync() -> None:
    found = crash_states(300, seed=3, files_type=NoSync)
    assert found["lost"] > 0 and found["wrong"] == 0  # checksums make it a miss


def test_c2_sees_a_reader_without_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_verify", lambda parts, sums: None)
    assert crash_states(300, seed=4, files_type=NoSync)["wrong"] > 0


# -- C3 ----------------------------------------------------------------------------------------------------------------

CODES = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EINTR)
SEED, STEPS = 1, 9
"""Of a life that makes about 220 calls, and evicts if the budget is tight."""


class Trusting(Writer):
    """Takes and writes a block whatever became of its parent."""

    def _follows(self, namespace: bytes, block: Block) -> bool:
        return True

    def _drop_after(self, key: bytes) -> None:
        pass


class TrustingStore(Store):
    def _follows(self, layout: record.Layout, block: Block) -> bool:
        return True


def faulty(
    faults: dict[int, int | str], budget_bytes: int = 2**30, store_type: type[Store] = Store, writer_type: type[Writer] = Writer
) -> Counter[str]:
    """One life with these faults at these calls, then what is wrong with what it leaves."""
    files = SimFiles()
    files.faults = faults
    found: Counter[str] = Counter()
    life = Life(files, budget_bytes, SEED, store_type, writer_type, clears=budget_bytes < 2**30)
    try:
        life.live(STEPS)
    except AssertionError:
        found["wrong"] += 1
    found["evicted"] = sum(path.endswith(".kv") for path in files.unlinked)
    files.faults = {}
    found["raised"] = sum("had a problem" in said for said in life.disk.said)
    life.writer.check()
    life.disk.store.check()
    found["over budget"] = life.disk.store.used_bytes > budget_bytes
    found["set aside"] = len(files._folder(f"{SIM_ROOT}/quarantine").entries) if life.disk.store.usable else 0

    # The process goes on: a chain of its own is saved and read, as soon as a pause for a full disk is over.
    life.disk.clock.now += 1000
    fresh = chain_of(LAYOUT, 99, 2)
    if life.disk.store.usable:
        for block in fresh:
            life.writer.save(LAYOUT, block)
        life.writer.work()
        back = restored(life.writer, LAYOUT, Want(names_of(fresh))) or []
        found["stuck"] = [content(block) for block in back] != [content(block) for block in fresh]

    for end, after in (("crash", files.after_crash(random.Random(str(faults)))), ("kill", files.after_kill())):
        there, wrong, _ = found_after(after)
        found["wrong"] += wrong
        found["lost"] += len(life.kept - there)
        if end == "kill" and budget_bytes == 2**30:  # nothing was lost with unsynced folders, nothing evicted
            found["orphans"] += sum(name.index > 0 and name.key in there and name.parent not in there for name in ALL_NAMES)
    return found


def every_fault(codes: Sequence[int], budget_bytes: int = 2**30, **parts: Any) -> Counter[str]:
    """A life for each call and each of these errors; and one for each write that takes half."""
    clean = SimFiles()
    Life(clean, budget_bytes, SEED, clears=budget_bytes < 2**30).live(STEPS)
    total: Counter[str] = Counter()
    for call, name in enumerate(clean.log, 1):
        for fault in (*codes, *(["short"] if name == "write" else [])):
            total.update(faulty({call: fault}, budget_bytes, **parts) | Counter(runs=1))
    print(dict(total))
    return total


def is_clean(found: Counter[str]) -> None:
    wrong = {name: found[name] for name in ("wrong", "lost", "orphans", "raised", "over budget", "set aside", "stuck")}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize(("budget_bytes", "codes"), [(2**30, CODES[::2]), (8 * ONE, CODES[1::2])], ids=["ample", "tight"])
def test_c3_a_fault_at_any_call_costs_a_block_and_nothing_else(budget_bytes: int, codes: Sequence[int], scale: int) -> None:
    found = every_fault(codes if scale == 1 else CODES, budget_bytes)
    is_clean(found)
    assert found["runs"] > 300 and (found["evicted"] > found["runs"]) == (budget_bytes < 2**30), found


@pytest.mark.tier("N")
def test_c3_pairs_of_faults(scale: int) -> None:
    rng = random.Random(5)
    total: Counter[str] = Counter()
    for _ in range({10: 1_000, 50: 5_000}[scale]):
        total.update(faulty({rng.randint(1, 210): rng.choice((*CODES, "short")) for _ in range(2)}))
    is_clean(total)


def test_c3_sees_a_writer_that_ignores_the_write_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_once(files: FileOps, fd: int, data: bytes) -> None:
        files.write(fd, memoryview(data))

    monkeypatch.setattr(store, "write_all", write_once)
    assert every_fault(())["lost"] > 0


def test_c3_sees_a_writer_without_the_parent_rule() -> None:
    assert every_fault((errno.EIO,), store_type=TrustingStore, writer_type=Trusting)["orphans"] > 0
