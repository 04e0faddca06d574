"""The I/O thread: its order, its bounded queue, honest receipts, deadlines, and an end that is bounded whatever the disk does."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_rig import (
    SIM_ROOT,
    Disk,
    Posix,
    SimFiles,
    block_of,
    chain_of,
    content,
    flush,
    layout_of,
    names_of,
    restored,
)

from mlxnb_engine.cache import writer as writer_module
from mlxnb_engine.cache.blocks import Block
from mlxnb_engine.cache.restore import Restored, Restoring, Want
from mlxnb_engine.cache.store import Store
from mlxnb_engine.cache.writer import Receipt, Writer

LAYOUT = layout_of()
SIZE = chain_of(LAYOUT, 1, 1)[0].nbytes


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "cache")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Writer]:
    """A writer with its thread, on a real folder."""
    said: list[str] = []
    writer = Writer(Store(tmp_path / "cache", 2**30, Posix(), said.append), 2**30, said.append)
    writer.start()
    yield writer
    writer.close()
    writer.check()
    assert said == []


def save(writer: Writer, blocks: list[Block]) -> list[bool]:
    return [writer.save(LAYOUT, block) for block in blocks]


def keys(blocks: list[Block]) -> frozenset[bytes]:
    return frozenset(block.key for block in blocks)


# -- round trip ----------------------------------------------------------------------------------------------------


def test_a_restart_reuses_every_block_after_a_flush_that_succeeded(live: Writer, tmp_path: Path) -> None:
    """G68, G70, for the bytes."""
    blocks = chain_of(LAYOUT, 1, 10, ends=(4, 9))
    assert all(save(live, blocks))
    receipt = live.flush(20.0)
    assert receipt.ok and receipt == Receipt(published=keys(blocks))
    assert live.flush(20.0) == Receipt()
    assert live.close() == Receipt()
    again = Disk(tmp_path / "cache").writer()
    found = restored(again, LAYOUT, Want(names_of(blocks)))
    assert found is not None and [content(block) for block in found] == [content(block) for block in blocks]


def test_a_restore_reports_on_the_io_thread_and_may_be_awaited(live: Writer) -> None:
    blocks = chain_of(LAYOUT, 1, 3)
    save(live, blocks)
    live.flush(20.0)
    done = threading.Event()
    where: list[str] = []
    restoring = live.restore(
        LAYOUT, Want(names_of(blocks)), 2**30, 60.0, lambda: (where.append(threading.current_thread().name), done.set())
    )  # type: ignore[func-returns-value, arg-type]
    assert done.wait(20.0) and where == ["mlxnb-cache-io"]
    assert restoring.done and restoring.result is not None and restoring.result.end == 3
    assert restoring.result.nbytes == sum(block.nbytes for block in blocks)


def test_close_makes_what_was_queued_durable(live: Writer, tmp_path: Path) -> None:
    blocks = chain_of(LAYOUT, 1, 20)
    save(live, blocks)
    assert live.close() == Receipt(published=keys(blocks))
    assert not live.save(LAYOUT, blocks[0]) and live.restore(LAYOUT, Want(names_of(blocks)), 2**30, 60.0).done
    assert live.close() == Receipt()
    assert not live._thread.is_alive() and list((tmp_path / "cache" / "tmp").iterdir()) == []


# -- order ---------------------------------------------------------------------------------------------------------


def test_restores_go_before_budget_work_and_that_before_saves(disk: Disk) -> None:
    writer = disk.writer()
    old = chain_of(LAYOUT, 1, 2)
    save(writer, old)
    writer.work()
    order: list[str] = []
    for name in ("publish", "keep", "load"):
        real = getattr(disk.store, name)
        setattr(disk.store, name, lambda *a, name=name, real=real: (order.append(name), real(*a))[1])
    save(writer, chain_of(LAYOUT, 2, 2))
    writer.keep(LAYOUT, names_of(old))
    restoring = writer.restore(LAYOUT, Want(names_of(old)), 2**30, 60.0)
    writer.work()
    assert restoring.result is not None
    calls = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert calls[:3] == ["load", "keep", "publish"] and order.count("load") == order.count("publish") == 2


def test_a_restore_does_not_wait_for_the_queue_of_saves(disk: Disk) -> None:
    writer = disk.writer()
    old = chain_of(LAYOUT, 1, 2)
    save(writer, old)
    writer.work()
    published: list[bytes] = []
    real = disk.store.publish
    restoring: list[Restoring] = []

    def publish(layout: object, block: Block) -> str:
        if not published:
            restoring.append(writer.restore(LAYOUT, Want(names_of(old)), 2**30, 60.0, lambda: published.append(b"restored")))
        published.append(block.key)
        return real(LAYOUT, block)

    disk.store.publish = publish  # type: ignore[assignment, method-assign]
    new = chain_of(LAYOUT, 2, 4)
    save(writer, new)
    writer.work()
    assert published == [new[0].key, b"restored", *(block.key for block in new[1:])]


def test_parents_are_written_before_children_whatever_comes_between(disk: Disk) -> None:
    writer = disk.writer()
    order: list[bytes] = []
    real = disk.store.publish
    disk.store.publish = lambda layout, block: (order.append(block.key), real(layout, block))[1]  # type: ignore[method-assign]
    blocks, full = chain_of(LAYOUT, 1, 5), chain_of(LAYOUT, 1, 5, ends=(1, 3))
    save(writer, blocks)
    save(writer, [full[3], full[1]])
    writer.check()
    writer.work()
    assert order == [block.key for block in blocks]
    assert [disk.store.attached(LAYOUT, name) for name in names_of(blocks)] == [False, True, False, True, False]


# -- the queue -----------------------------------------------------------------------------------------------------


def test_overflow_refuses_the_incoming_block_and_its_descendants_and_no_other(disk: Disk) -> None:
    writer = disk.writer(queue_bytes=5 * SIZE + SIZE // 2)
    first, second = chain_of(LAYOUT, 1, 7), chain_of(LAYOUT, 2, 2)
    assert save(writer, first) == [True] * 5 + [False] * 2
    assert save(writer, second) == [False, False]
    assert writer.queued_bytes == 5 * SIZE
    writer.check()
    writer.work()
    assert writer.queued_bytes == 0
    assert save(writer, [first[6]]) == [False]  # its parent was refused
    receipt = flush(writer)
    assert receipt == Receipt(published=keys(first[:5]), dropped=keys(first[5:] + second)) and not receipt.ok
    assert save(writer, first[5:]) == [True, True]
    assert flush(writer) == Receipt(published=keys(first[5:]))


def test_a_block_that_gains_an_attachment_counts_once(disk: Disk) -> None:
    plain, full = chain_of(LAYOUT, 1, 2), chain_of(LAYOUT, 1, 2, ends=(0,))
    writer = disk.writer(queue_bytes=2 * SIZE + full[0].nbytes - SIZE)
    assert save(writer, plain) == [True, True] and save(writer, [full[0], plain[0], full[0]]) == [True] * 3
    assert writer.queued_bytes == SIZE + full[0].nbytes
    tight = Disk(disk.root.parent / "tight").writer(queue_bytes=2 * SIZE)
    save(tight, plain)
    assert save(tight, [full[0]]) == [True] and tight.queued_bytes == 2 * SIZE  # no room for it: the block stays as it was
    for each in (writer, tight):
        assert flush(each) == Receipt(published=keys(plain))
        each.check()


def test_the_block_being_written_still_counts(disk: Disk) -> None:
    writer = disk.writer(queue_bytes=SIZE)
    seen: list[object] = []
    real = disk.store.publish

    def publish(layout: object, block: Block) -> str:
        seen.append((writer.queued_bytes, writer.save(LAYOUT, chain_of(LAYOUT, 2, 1)[0])))
        return real(LAYOUT, block)

    disk.store.publish = publish  # type: ignore[assignment, method-assign]
    save(writer, chain_of(LAYOUT, 1, 1))
    writer.work()
    assert seen == [(SIZE, False)] and writer.queued_bytes == 0


def test_an_orphan_is_not_queued(disk: Disk) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 3)
    assert save(writer, [blocks[1], blocks[2]]) == [False, False] and writer.queued_bytes == 0
    assert flush(writer) == Receipt(dropped=keys(blocks[1:]))


# -- failure -------------------------------------------------------------------------------------------------------


def failing(disk: Disk, bad: set[bytes], how: object) -> None:
    """Make the store answer so, or raise it, for these keys."""
    real = disk.store.publish

    def publish(layout: object, block: Block) -> object:
        if block.key in bad:
            if isinstance(how, Exception):
                raise how
            return how
        return real(LAYOUT, block)

    disk.store.publish = publish  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("how", ["failed", "refused", RuntimeError("a bug"), ValueError("no block")])
def test_a_write_that_fails_drops_its_queued_descendants_only(disk: Disk, how: object) -> None:
    writer = disk.writer()
    blocks, other = chain_of(LAYOUT, 1, 5), chain_of(LAYOUT, 2, 3)
    failing(disk, {blocks[2].key}, how)
    for pair in zip(blocks, [*other, *other[:2]], strict=True):
        save(writer, list(pair))
    receipt = flush(writer)
    writer.check()
    assert receipt.published == keys(blocks[:2] + other)
    if how == "refused":
        assert (receipt.failed, receipt.dropped) == (frozenset(), keys(blocks[2:]))
    else:
        assert (receipt.failed, receipt.dropped) == (keys(blocks[2:3]), keys(blocks[3:]))
    assert not receipt.ok and flush(writer).ok
    assert sum("had a problem" in text for text in disk.said) == isinstance(how, Exception)


def test_a_failed_attachment_leaves_the_descendants_of_its_block(disk: Disk) -> None:
    writer = disk.writer()
    plain, full = chain_of(LAYOUT, 1, 3), chain_of(LAYOUT, 1, 3, ends=(0,))
    save(writer, plain[:1])
    assert flush(writer).ok
    failing(disk, {full[0].key}, "failed")
    save(writer, [full[0], *plain[1:]])
    assert flush(writer) == Receipt(published=keys(plain[1:]), failed=keys(plain[:1]))


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), OSError(errno.EIO, "")])
def test_a_restore_that_raises_is_a_miss_and_the_thread_lives(disk: Disk, error: Exception) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 2)
    save(writer, blocks)
    writer.work()
    real = disk.store.load

    def load(*_: object) -> None:
        raise error

    disk.store.load = load  # type: ignore[assignment, method-assign]
    assert restored(writer, LAYOUT, Want(names_of(blocks))) is None
    disk.store.load = real  # type: ignore[method-assign]
    found = restored(writer, LAYOUT, Want(names_of(blocks)))
    assert found is not None and len(found) == 2 and len(disk.said) == 1


def test_a_callback_that_raises_does_not_end_the_thread(disk: Disk) -> None:
    writer = disk.writer()

    def broken() -> None:
        raise RuntimeError("a bug")

    writer.restore(LAYOUT, Want(names_of(chain_of(LAYOUT, 1, 1))), 2**30, 60.0, broken)
    save(writer, chain_of(LAYOUT, 1, 1))
    assert flush(writer).ok and len(disk.said) == 1


def test_without_a_directory_everything_is_a_miss_and_the_receipt_says_so() -> None:
    files = SimFiles()
    files.faults = dict.fromkeys(range(1, 4), errno.EROFS)
    said: list[str] = []
    writer = Writer(Store(SIM_ROOT, 2**30, files, said.append), 2**30, said.append)
    writer.start()
    blocks = chain_of(LAYOUT, 1, 3)
    accepted = save(writer, blocks)
    receipt = writer.flush(20.0)
    assert not receipt.ok and receipt.dropped == keys(blocks) and receipt.published == frozenset()
    assert save(writer, blocks) == [False] * 3 and accepted in ([True] * 3, [False] * 3, [True, False, False], [True, True, False])
    assert writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 60.0).done
    assert writer.close().dropped == keys(blocks) and len(said) == 1


# -- receipts ------------------------------------------------------------------------------------------------------


def test_a_failed_sync_fails_what_it_should_have_made_durable() -> None:
    files = SimFiles()
    disk = Disk(SIM_ROOT, files=files)
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 3)
    save(writer, blocks)
    writer.work()
    real = files.sync_dir

    def sync_dir(path: str) -> None:
        raise OSError(errno.EIO, path)

    files.sync_dir = sync_dir  # type: ignore[method-assign]
    assert flush(writer) == Receipt(failed=keys(blocks))
    files.sync_dir = real  # type: ignore[method-assign]
    save(writer, blocks)
    assert flush(writer) == Receipt(failed=keys(blocks))  # a sync that works after one that failed proves nothing


def test_what_was_evicted_before_the_flush_is_missing_and_so_is_what_follows_it(disk: Disk) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 4)
    save(writer, blocks)
    writer.work()
    next(disk.root.glob(f"v1/*/*/{blocks[2].key.hex()}.kv")).unlink()
    assert flush(writer) == Receipt(published=keys(blocks[:2]), missing=keys(blocks[2:]))


def test_a_flush_that_runs_out_of_time_says_what_is_pending_and_forgets_nothing(disk: Disk) -> None:
    writer = disk.writer(queue_bytes=4 * SIZE)
    blocks = chain_of(LAYOUT, 1, 5)
    assert save(writer, blocks) == [True] * 4 + [False]
    early = writer.flush(0.0)
    assert early == Receipt(dropped=keys(blocks[4:]), pending=keys(blocks[:4])) and not early.ok
    writer.work()
    assert writer.flush(0.0).pending == keys(blocks[:4])  # written, and not synced
    assert flush(writer) == Receipt(published=keys(blocks[:4]), dropped=keys(blocks[4:]))
    assert flush(writer) == Receipt()


def test_a_flush_does_not_wait_for_what_comes_after_it(disk: Disk) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 4)
    save(writer, blocks[:2])
    asked = writer.ask_flush()
    save(writer, blocks[2:])
    order: list[str] = []
    real, sync = disk.store.publish, disk.store.sync
    disk.store.publish = lambda layout, block: (order.append(str(block.index)), real(layout, block))[1]  # type: ignore[method-assign]
    disk.store.sync = lambda records: (order.append("sync"), sync(records))[1]  # type: ignore[method-assign]
    writer.work()
    assert order == ["0", "1", "sync", "2", "3"]
    assert writer.receipt(asked) == Receipt(published=keys(blocks[:2]))
    assert flush(writer) == Receipt(published=keys(blocks[2:]))


def test_a_block_that_was_dropped_and_then_written_is_published(disk: Disk) -> None:
    writer = disk.writer(queue_bytes=SIZE)
    blocks = chain_of(LAYOUT, 1, 2)
    assert save(writer, blocks) == [True, False]
    writer.work()
    assert save(writer, blocks[1:]) == [True]
    assert flush(writer) == Receipt(published=keys(blocks))


def test_a_late_flush_does_not_hide_what_nobody_was_told(disk: Disk) -> None:
    """The flush whose caller gave up must not use up the report that a block was dropped."""
    writer = disk.writer(queue_bytes=SIZE)
    blocks = chain_of(LAYOUT, 1, 2)
    save(writer, blocks)
    asked = writer.ask_flush()
    assert writer.receipt(asked).pending == keys(blocks[:1])
    writer.work()
    assert flush(writer) == Receipt(published=keys(blocks[:1]), dropped=keys(blocks[1:]))


def test_what_was_synced_on_the_way_is_remembered_no_longer(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SYNC_EVERY", 4)
    writer, blocks = disk.writer(), chain_of(LAYOUT, 1, 10)
    save(writer, blocks)
    writer.work()
    assert len(writer._fates) < 4
    assert flush(writer) == Receipt(published=keys(blocks[8:]))
    again = chain_of(LAYOUT, 2, 5)
    monkeypatch.setattr(disk.store, "_sync_dir", lambda folder: False)
    save(writer, again)
    assert flush(writer) == Receipt(failed=keys(again)), "a sync that nobody asked for and that failed was not told of"


def test_of_many_blocks_that_were_dropped_the_receipt_tells_with_a_few(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MOST_FATES", 5)
    writer = disk.writer(queue_bytes=2 * SIZE)
    blocks = chain_of(LAYOUT, 1, 2)
    assert save(writer, blocks) == [True, True]
    for seed in range(2, 30):
        assert save(writer, chain_of(LAYOUT, seed, 1)) == [False]
    writer.work()
    receipt = flush(writer)
    assert receipt.published == keys(blocks) and len(receipt.dropped) == 3 and not receipt.ok


# -- deadlines and ends --------------------------------------------------------------------------------------------


def test_a_restore_past_its_deadline_is_a_miss_and_its_late_result_is_let_go(disk: Disk) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 2)
    save(writer, blocks)
    writer.work()
    restoring = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 5.0)
    assert not restoring.done and restoring.result is None
    disk.clock.now += 5.0
    assert restoring.done and restoring.result is None
    reads: list[object] = []
    disk.store.load = lambda *a: reads.append(a)  # type: ignore[method-assign]
    writer.work()
    assert restoring.result is None and reads == []  # nobody waits: nothing is read
    restoring.finish(Restored(2, dict(enumerate(blocks))))
    assert restoring.result is None


def test_a_result_in_time_stays_after_the_deadline(disk: Disk) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 2)
    save(writer, blocks)
    restoring = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 5.0)
    assert restoring.result is None  # not stored yet when the plan is made
    writer.work()
    again = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 5.0)
    writer.work()
    disk.clock.now += 100
    assert again.done and again.result is not None
    again.cancel()
    assert again.done and again.result is None


def test_a_cancelled_restore_reads_nothing(disk: Disk) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 2)
    save(writer, blocks)
    writer.work()
    restoring = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 60.0)
    restoring.cancel()
    reads: list[object] = []
    disk.store.load = lambda *a: reads.append(a)  # type: ignore[method-assign]
    writer.work()
    assert restoring.done and restoring.result is None and reads == []


class Stuck(Posix):
    """A disk on which one kind of call hangs until the test lets go."""

    def __init__(self, call: str) -> None:
        self.free, self.reached = threading.Event(), threading.Event()
        real: Callable[..., object] = getattr(self, call)

        def hang(*arguments: object) -> object:
            self.reached.set()
            assert self.free.wait(60.0)
            return real(*arguments)

        setattr(self, call, hang)


@pytest.mark.parametrize("call", ["sync", "read", "list", "sync_dir"])
def test_close_is_bounded_while_the_disk_hangs(tmp_path: Path, call: str) -> None:
    blocks = chain_of(LAYOUT, 1, 3)
    if call == "read":
        ready = Disk(tmp_path / "cache")
        assert [ready.store.publish(LAYOUT, block) for block in blocks] == ["published"] * 3
        ready.store.close()
    files, said = Stuck(call), list[str]()
    writer = Writer(Store(tmp_path / "cache", 2**30, files, said.append), 2**30, said.append)
    writer.start()
    restoring = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 60.0)
    if call != "read":
        save(writer, blocks)
    assert call == "sync_dir" or files.reached.wait(20.0)  # that one hangs in the flush of `close` itself
    start = time.monotonic()
    receipt = writer.close(1.0)
    assert time.monotonic() - start < 5.0
    assert (
        receipt.ok == (call == "read")
        and receipt.published == frozenset()
        and receipt.pending == (frozenset() if call == "read" else keys(blocks))
    )
    late = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 60.0)
    assert late.done and late.result is None
    files.free.set()
    writer._thread.join(20.0)
    assert not writer._thread.is_alive() and restoring.done and said == []


def test_a_restore_is_a_miss_for_its_caller_while_the_disk_hangs(tmp_path: Path) -> None:
    blocks = chain_of(LAYOUT, 1, 3)
    ready = Disk(tmp_path / "cache")
    for block in blocks:
        ready.store.publish(LAYOUT, block)
    files, said = Stuck("read"), list[str]()
    writer = Writer(Store(tmp_path / "cache", 2**30, files, said.append), 2**30, said.append)
    writer.start()
    restoring = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 0.1)
    assert files.reached.wait(20.0)
    time.sleep(0.15)
    assert restoring.done and restoring.result is None
    files.free.set()
    later = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 60.0)
    for _ in range(2000):
        if later.done:
            break
        time.sleep(0.01)
    assert restoring.result is None and later.result is not None and later.result.end == 3
    assert writer.close().ok


def test_a_writer_that_never_started_closes_at_once(disk: Disk) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 2)
    save(writer, blocks)
    restoring = writer.restore(LAYOUT, Want(names_of(blocks)), 2**30, 60.0)
    start = time.monotonic()
    assert writer.close() == Receipt(pending=keys(blocks)) and time.monotonic() - start < 1.0
    assert restoring.done and restoring.result is None


def test_many_threads_may_use_it_at_once(live: Writer) -> None:
    """No deadlock, every block durable, every restore exact."""
    wrong: list[str] = []

    def use(seed: int) -> None:
        blocks = chain_of(LAYOUT, seed, 6, ends=(5,))
        for block in blocks:
            if not live.save(LAYOUT, block):
                wrong.append(f"{seed}: block {block.index} was refused")
        live.keep(LAYOUT, names_of(blocks))
        receipt = live.flush(30.0)
        if receipt.dropped or receipt.failed or receipt.pending or receipt.missing:
            wrong.append(f"{seed}: {receipt}")
        restoring = live.restore(LAYOUT, Want(names_of(blocks)), 2**30, 30.0)
        while not restoring.done:
            time.sleep(0.002)
        found = restoring.result
        if found is None or found.end != 6 or any(content(found.blocks[b.index]) != content(b) for b in blocks):
            wrong.append(f"{seed}: restored {found and found.end}")

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)


def test_stamps_are_written_once_the_queue_is_empty(disk: Disk) -> None:
    writer = disk.writer()
    blocks = chain_of(LAYOUT, 1, 3)
    save(writer, blocks)
    writer.work()
    stamps = [next(disk.root.glob(f"v1/*/*/{block.key.hex()}.kv")).stat().st_mtime_ns for block in blocks]
    assert [stamps[0] - stamp for stamp in stamps] == [0, 1000, 2000]


def test_chains_in_use_are_remembered_within_a_bound(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxnb_engine.cache.writer.MOST_CHAINS", 3)
    writer = disk.writer()
    for seed in range(5):
        writer.keep(LAYOUT, names_of(chain_of(LAYOUT, seed, 1)))
    writer.keep(LAYOUT, names_of(chain_of(LAYOUT, 2, 1)))
    last = [names_of(chain_of(LAYOUT, seed, 1))[0].key for seed in (3, 4, 2)]
    assert list(writer._chains) == last


def test_bytes_of_a_block_do_not_depend_on_who_asks(disk: Disk) -> None:
    """A child process and this one must agree on what is right: the content follows from the key alone."""
    name = names_of(chain_of(LAYOUT, 1, 1))[0]
    assert content(block_of(LAYOUT, name)) == content(chain_of(LAYOUT, 1, 1)[0])
