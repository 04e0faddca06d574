"""The disk behind the prefix cache at work: what comes back has the bits of a run that never stopped, and nobody waits for it (G68-G72)."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cache_rig
import pytest
from cache_rig import Posix, file_bytes, flush, records_in
from rig import Recorder
from test_reuse import Reusing, all_kinds, graph_of, ids_of, unlike

from mlxnb_engine.cache.blocks import BOOKKEEPING_BYTES, T
from mlxnb_engine.methods import disk as disk_module
from mlxnb_engine.methods.disk import Disk
from mlxnb_engine.methods.reuse import Shared

ROOMY = 2**28


class Quick(Posix):
    """Nothing crashes here, so nothing is synced."""

    def sync(self, fd: int) -> None:
        pass

    def sync_dir(self, path: str) -> None:
        pass


class Kernel:
    """One process's life: a cache in memory, a disk whose I/O thread works between two ticks, and a rig over one model.

    works: whether the I/O thread does its jobs; if not, it hangs.
    """

    def __init__(
        self, kind: str, root: Path, memory_bytes: int = ROOMY, files: Any = None, budget_bytes: int = 2**30, **options: Any
    ) -> None:
        self.home = cache_rig.Disk(root, budget_bytes, files if files is not None else Quick())
        self.disk = Disk(memory_bytes, self.home.writer(), lambda: None, self.home.clock)
        self.rig = Reusing(kind, Shared(self.disk.cache, disk=self.disk), **options)
        graph = graph_of(kind)
        self.disk.bind(self.rig.namespace, kind, graph.specs, [spec.dtype for spec in graph.specs])
        self.works = True
        self.rests: list[float | None] = []
        tick = self.rig.tick

        def with_disk(times: int = 1) -> bool:
            more = False
            for _ in range(times):
                more = tick()
                if self.works:
                    self.disk.writer.work()
                self.rests.append(self.disk.advance(True))
            return more

        self.rig.tick = with_disk  # type: ignore[method-assign]

    def turn(self, ids: Sequence[int], tokens: int = 4, **how: Any) -> Recorder:
        return self.rig.turn(ids, tokens, **how)

    def flush(self) -> Any:
        self.disk.begin_flush()
        while self.disk.flush_some():
            self.disk.writer.work()
        return flush(self.disk.writer)

    def stop(self) -> None:
        """An orderly end; everything adds up."""
        self.disk.cache.check()
        self.disk.close(5.0)
        self.disk.cache.close()
        self.home.store.close()
        assert self.disk.failures == 0 and self.rig.reuse is not None and self.rig.reuse.failures == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def kernels(root: Path) -> Iterator[Any]:
    """Makes kernels on one folder; each is stopped in the end."""
    made: list[Kernel] = []

    def start(kind: str = "full", **options: Any) -> Kernel:
        made.append(Kernel(kind, options.pop("root", root), **options))
        return made[-1]

    yield start
    for kernel in made:
        kernel.stop()


# -- a restart ---------------------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("submit", ["before", "after"])
def test_a_restart_reuses_every_whole_block_with_the_bits_of_a_cold_run(kind: str, submit: str, kernels: Any) -> None:
    """G68, G70: a prompt that continues another one, in a new process; state and the tokens that follow."""
    first = kernels(kind, submit=submit)
    prompt = ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    longer = (*prompt, *ids_of(70, "more"))
    again = kernels(kind, submit=submit)
    warm = again.turn(longer, 6)
    assert again.disk.cache.stats()["used_bytes"] > 0
    expected = 256
    assert (warm.cached, warm.ssd) == (expected, expected), f"{warm.cached} cached, {warm.ssd} of them from disk"
    assert again.rig.read == len(longer) - 1 - expected, "more was read than was missing"
    assert unlike(again.rig, warm, longer) == []


@all_kinds
def test_what_the_disk_gives_has_the_bits_of_what_memory_gives(kind: str, kernels: Any, root: Path) -> None:
    """G68: against the clone from memory, not against a cold prefill; two continuations each."""
    prompt = ids_of(321)
    longer = (*prompt, *ids_of(90, "more"))
    first = kernels(kind)
    first.turn(prompt, 80)
    assert first.flush().ok
    again = kernels(kind, root=Path(shutil.copytree(root, root.with_name("copy"), ignore=shutil.ignore_patterns("tmp"))))
    clone, back = first.turn(longer, 5), again.turn(longer, 5)
    assert back.cached == back.ssd == back.cached // T * T and clone.cached >= back.cached >= 256
    assert clone.ids == back.ids and clone.hidden()[-5:] == back.hidden()[-5:]
    assert first.rig.recurrent[clone] == again.rig.recurrent[back]
    specs = [spec for spec in graph_of(kind).specs if spec.kind in ("full", "sliding")]
    for spec, a, b in zip(specs, clone.state, back.state, strict=True):
        seen = min(a[0].shape[2], spec.window - 1 if spec.window is not None else a[0].shape[2])
        assert [x[:, :, -seen:].tobytes() for x in a] == [x[:, :, -seen:].tobytes() for x in b]


def test_the_comparison_sees_a_byte_that_came_back_wrong(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    real = disk_module.StatePayload.from_host

    def wrong(parts: Any, buffers: Any) -> Any:
        spoilt = [bytearray(buffer) for buffer in buffers]
        for buffer in spoilt:
            buffer[-3] ^= 64
        return real(parts, spoilt)

    monkeypatch.setattr(disk_module.StatePayload, "from_host", wrong)
    again = kernels()
    warm = again.turn(prompt)
    assert warm.ssd == 256 and unlike(again.rig, warm, prompt) != []


def test_generated_tokens_come_back_too(kernels: Any) -> None:
    first, prompt = kernels(), ids_of(100)
    row = first.turn(prompt, 150)
    assert first.flush().ok
    following = (*prompt, *row.ids, *ids_of(10, "next"))
    again = kernels()
    warm = again.turn(following)
    assert warm.ssd == (100 + 150 - 1) // T * T and unlike(again.rig, warm, following) == []


@pytest.mark.parametrize("length", [64, 65, 128, 129, 192])
def test_the_last_token_of_a_prompt_is_run(length: int, kernels: Any) -> None:
    first, prompt = kernels(), ids_of(200)
    first.turn(prompt)
    assert first.flush().ok
    again = kernels()
    assert again.turn(prompt[:length]).cached == (length - 1) // T * T


def test_memory_is_asked_first_and_the_disk_only_for_what_it_lacks(kernels: Any) -> None:
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    again = kernels()
    assert again.turn(prompt[:130]).ssd == 128
    row = again.turn(prompt)
    assert (row.cached, row.ssd) == (256, 128), "the first two blocks were in memory"
    row = again.turn(prompt)
    assert (row.cached, row.ssd) == (299, 0)


def test_blocks_that_came_from_disk_are_not_written_again(kernels: Any, root: Path) -> None:
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    before = {path: path.stat().st_ino for path in records_in(root)}
    again = kernels()
    again.turn(prompt)
    receipt = again.flush()
    assert receipt.ok and receipt.published == frozenset() and again.disk.cache.unsaved == 0
    assert {path: path.stat().st_ino for path in records_in(root)} == before


# -- damage, deletion, cancellation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "gone"])
def test_a_damaged_record_shortens_what_comes_back_and_no_row_notices(damage: str, kernels: Any, root: Path) -> None:
    """G69."""
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    first.turn(ids_of(300, "other"))
    assert first.flush().ok
    chain = first.disk.cache.hold(prompt, first.rig.namespace)
    victim, spare = (next(root.glob(f"v1/*/*/{block.key.hex()}.kv")) for block in (chain.blocks[2], chain.blocks[0]))
    chain.close()
    raw = bytearray(victim.read_bytes())
    if damage == "cut":
        victim.write_bytes(raw[:-7])
    elif damage == "flip":
        raw[-100] ^= 1
        victim.write_bytes(raw)
    elif damage == "foreign":
        shutil.copy(spare, victim)
    else:
        victim.unlink()
    again = kernels()
    warm = again.turn(prompt)
    assert warm.cached == warm.ssd == 2 * T and unlike(again.rig, warm, prompt) == []
    assert again.flush().ok and again.home.store.listed(again.rig.namespace, bytes.fromhex(victim.stem)), "it was not written anew"


def test_deleting_the_files_after_they_were_read_changes_nothing(kernels: Any, root: Path) -> None:
    """G71."""
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    again = kernels()
    row = again.rig.ask(prompt, 4)
    while not again.disk._fetches or again.disk._fetches[0].restoring is not None:
        again.rig.tick()
    for path in records_in(root):
        path.write_bytes(b"\xff" * path.stat().st_size)
        path.unlink()
    again.rig.run()
    assert row.ssd == 256 and unlike(again.rig, row, prompt) == []


def test_a_row_that_is_cancelled_while_its_state_is_read_lets_go_of_everything(kernels: Any) -> None:
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    again = kernels()
    again.works = False
    row = again.rig.ask(prompt, 4)
    again.rig.tick(3)
    assert again.disk._fetches and again.disk.cache.stats()["leases"] == 1 and not row.admitted
    row.cancelled = True
    again.rig.tick(2)
    assert not again.disk._fetches and again.disk.cache.stats()["leases"] == 0
    again.works = True  # its late result is let go of
    again.rig.run()
    assert not row.admitted and not row.ids and again.disk.cache.stats()["namespaces"][again.rig.namespace.hex()]["blocks"] == 0
    assert again.turn(prompt).ssd == 256


@pytest.mark.parametrize("when", ["reading", "building", "ready"])
def test_forgetting_everything_while_blocks_are_fetched_is_a_miss(when: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    monkeypatch.setattr(disk_module, "TURN_BYTES", 1)  # a block per turn
    again = kernels(max_rows=1)
    again.works = when != "reading"
    neighbour = again.rig.ask(ids_of(10, "neighbour"), 30)
    again.rig.tick(3)
    row = again.rig.ask(prompt, 4)
    while not again.disk._fetches or (again.works and not again.disk._fetches[0].indices):
        again.rig.tick()
    while when == "ready" and not again.disk._fetches[0].ready:
        again.rig.tick()
    again.disk.cache.clear()
    again.works = True
    again.rig.run()
    assert row.end == neighbour.end == "length" and unlike(again.rig, row, prompt) == []
    assert again.disk.cache.stats()["leases"] == 0


def test_a_disk_that_hangs_costs_one_prompt_its_patience_and_the_next_none(kernels: Any) -> None:
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    again = kernels()
    again.works = False
    row = again.rig.ask(prompt, 4)
    again.rig.tick(50)
    assert not row.admitted
    again.home.clock.now += disk_module.FETCH_S + 0.1
    again.rig.run()
    assert row.cached == 0 and unlike(again.rig, row, prompt) == []
    other = ids_of(200, "other")
    assert again.turn(other).end == "length", "it would tick for ever if it waited for the disk"
    again.works = True
    again.home.clock.now += disk_module.PAUSE_S
    third = ids_of(200, "third")
    first.turn(third)
    assert first.flush().ok
    assert again.turn(third).ssd == 192


def test_running_rows_go_on_while_another_waits_for_the_disk(kernels: Any) -> None:
    first, prompt = kernels(), ids_of(300)
    first.turn(prompt)
    assert first.flush().ok
    again = kernels()
    again.works = False
    neighbour = again.rig.ask(ids_of(20, "neighbour"), 60)
    again.rig.tick(5)
    row = again.rig.ask(prompt, 4)
    before = len(neighbour.ids)
    again.rig.tick(30)
    assert len(neighbour.ids) >= before + 29 and not row.admitted
    again.works = True
    again.rig.run()
    assert row.ssd == 256 and unlike(again.rig, row, prompt) == []
    assert unlike(again.rig, neighbour, ids_of(20, "neighbour")) == []


def test_what_one_turn_copies_is_bounded(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, prompt = kernels(), ids_of(700)
    first.turn(prompt)
    assert first.flush().ok
    one = first.disk.cache.stats()["used_bytes"] // 10
    monkeypatch.setattr(disk_module, "TURN_BYTES", 2 * one)
    again = kernels()
    row = again.rig.ask(prompt, 4)
    counts = []
    while not row.admitted:
        again.rig.tick()
        counts.append(again.disk.cache.stats()["namespaces"].get(again.rig.namespace.hex(), {}).get("blocks", 0))
    grown = [b - a for a, b in itertools.pairwise([0, *counts])]
    assert max(grown) <= 3 and sum(grown) == 10, counts
    assert 0.0 in again.rests, "the engine was not told to come back at once"
    again.rig.run()
    assert row.ssd == 640


def interleave(kernel: Kernel, known: Sequence[tuple[int, ...]], seed: int) -> list[str]:
    """R5: submit, cancel, clear, hang, time-out and restore in random order, on a virtual clock; what does not add up afterwards."""
    rng = random.Random(seed)
    rows: list[tuple[Recorder, tuple[int, ...], bool]] = []
    for _ in range(rng.randint(15, 40)):
        what = rng.random()
        if what < 0.25:
            ids = (*rng.choice(known)[: rng.choice((66, 130, 200))], rng.randrange(90))
            rows.append((kernel.rig.ask(ids, 3), ids, False))
        elif what < 0.35 and rows:
            at = rng.randrange(len(rows))
            row, ids, gone = rows[at]
            if row.end is None:
                row.cancelled, rows[at] = True, (row, ids, True)
        elif what < 0.45:
            kernel.works = not kernel.works
        elif what < 0.5:
            kernel.home.clock.now += rng.choice((1.0, disk_module.FETCH_S + 1, disk_module.LONGEST_PAUSE_S + 1))
        elif what < 0.53:
            kernel.disk.cache.clear()
        else:
            kernel.rig.tick()
            kernel.disk.cache.check()
    kernel.works = True
    kernel.rig.run()
    kernel.rig.tick()
    found = []
    for row, ids, gone in rows:
        if gone:
            found += [f"a cancelled row went on: {row.end}, {row.ids}"] if row.end == "length" or len(row.ids) > 2 else []
        elif row.end != "length" or unlike(kernel.rig, row, ids):
            found.append(f"{row.end}: {unlike(kernel.rig, row, ids)}")
        if len(row.ends) > 1:
            found.append(f"{len(row.ends)} ends")
    if kernel.disk._fetches or kernel.disk.cache.stats()["leases"]:
        found.append(f"{len(kernel.disk._fetches)} fetches and {kernel.disk.cache.stats()['leases']} leases are left")
    kernel.disk.cache.check()
    kernel.disk.writer.check()
    return found


def test_r5_any_order_of_restores_cancels_and_time_outs_ends_every_row_right(kernels: Any, scale: int) -> None:
    first, known = kernels(), [ids_of(200, number) for number in range(3)]
    for prompt in known:
        first.turn(prompt)
    assert first.flush().ok
    for seed in range(25 * scale):
        assert interleave(kernels(), known, seed) == [], f"seed {seed}"


def test_r5_sees_a_fetch_that_keeps_its_lease(kernels: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, known = kernels(), [ids_of(200, number) for number in range(3)]
    for prompt in known:
        first.turn(prompt)
    assert first.flush().ok
    real = disk_module.Fetch.close

    def forgetful(fetch: Any) -> None:
        if not fetch.ready:  # who cancels while it is being read
            fetch.leases = []
        real(fetch)

    broken = [Kernel("full", root) for _ in range(12)]
    with monkeypatch.context() as patch:
        patch.setattr(disk_module.Fetch, "close", forgetful)
        assert any("leases are left" in line for seed, kernel in enumerate(broken) for line in interleave(kernel, known, seed))


# -- memory pressure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "hybrid"])
@pytest.mark.parametrize("early", [True, False], ids=["saved early", "saved when it leaves"])
def test_pressure_changes_neither_answers_nor_what_is_kept(
    kind: str, early: bool, tmp_path: Path, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G72: memory for about five blocks against memory for all."""
    roomy, tight = kernels(kind, root=tmp_path / "roomy"), kernels(kind, root=tmp_path / "tight")
    layout = disk_module.Form.of(bytes(32), graph_of(kind).specs, ["x"]).layout
    one = BOOKKEEPING_BYTES + sum(part.nbytes for part in (*layout.tensors, *(layout.attachment or ())))
    tight.disk.cache.budget_bytes = 5 * one
    if not early:
        monkeypatch.setattr(tight.disk.cache, "save_some", lambda most_bytes: False)
    for _ in range(2):
        for number in range(4):
            a, b = roomy.turn(ids_of(250, number), 20), tight.turn(ids_of(250, number), 20)
            assert a.ids == b.ids and a.end == b.end == "length"
    monkeypatch.undo()
    assert tight.disk.cache.stats()["evictions"] > 0 and tight.disk.cache.stats()["used_bytes"] <= 5 * one
    assert roomy.flush().ok and tight.flush().ok
    kept = [{path.stem for path in records_in(kernel.home.root)} for kernel in (roomy, tight)]
    assert kept[0] == kept[1] and len(kept[0]) >= 16


def test_a_block_larger_than_memory_goes_straight_to_disk(kernels: Any) -> None:
    first, prompt = kernels(memory_bytes=5000), ids_of(300)
    first.turn(prompt)
    first.disk.writer.work()
    assert first.disk.cache.stats()["used_bytes"] == 0
    assert len(records_in(first.home.root)) >= 1, "G67: an oversized block spills"


def test_ten_long_conversations_fit_a_small_memory(kernels: Any) -> None:
    """Each turn reads its new ids and at most 64 tokens again, whether its history is in memory or on disk."""
    one = BOOKKEEPING_BYTES + sum(p.nbytes for p in disk_module.Form.of(bytes(32), graph_of("full").specs, ["x"]).layout.tensors)
    kernel = kernels(memory_bytes=12 * one)
    chats = [ids_of(40, number) for number in range(5)]
    for turn in range(8):
        for number, ids in enumerate(chats):
            before = kernel.rig.read
            row = kernel.turn(ids, 20)
            new = 40 if turn == 0 else 15 + 1
            assert kernel.rig.read - before <= new + T, f"turn {turn} of chat {number} read {kernel.rig.read - before} tokens"
            chats[number] = (*ids, *row.ids, *ids_of(15, (turn, number)))
            assert kernel.disk.cache.stats()["used_bytes"] <= 12 * one
    assert kernel.disk.cache.stats()["evictions"] > 0


# -- flush and trouble -------------------------------------------------------------------------------------------------


class Broken(Quick):
    """Writes fail with `code` while that is set."""

    code: int | None = None

    def write(self, fd: int, data: memoryview) -> int:
        if self.code is not None:
            raise OSError(self.code, os.strerror(self.code))
        return super().write(fd, data)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_flush_on_a_broken_disk_says_so_and_the_next_one_makes_it_good(code: int, kernels: Any) -> None:
    files = Broken()
    kernel, prompt = kernels(files=files), ids_of(300)
    files.code = code
    row = kernel.turn(prompt)
    assert row.end == "length" and unlike(kernel.rig, row, prompt) == []
    assert not kernel.flush().ok
    files.code = None
    kernel.home.clock.now += 3600
    receipt = kernel.flush()
    assert receipt.ok and kernel.disk.cache.unsaved == 0
    again = kernels()
    assert again.turn(prompt).ssd == 256


def test_a_flush_does_not_tell_of_blocks_that_nobody_keeps_any_more(kernels: Any) -> None:
    files = Broken()
    kernel = kernels(files=files)
    files.code = errno.EIO
    kernel.turn(ids_of(300))
    kernel.disk.cache.clear()
    files.code = None
    kernel.home.clock.now += 3600
    assert kernel.flush().ok and kernel.disk.cache.unsaved == 0


def test_a_chain_that_was_cleared_away_is_no_trouble_of_the_disk(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels()
    copied: list[Any] = []
    real = disk_module.Form.to_host
    monkeypatch.setattr(disk_module.Form, "to_host", lambda form, block: copied.append(block) or real(form, block))
    kernel.turn(ids_of(300))
    assert kernel.flush().ok and len(copied) == 4
    kernel.disk.writer.clear(None)
    kernel.disk.writer.work()
    assert not kernel.disk.spill(copied[2], kernel.rig.namespace) and len(copied) == 4
    assert kernel.disk.spill(copied[0], kernel.rig.namespace), "saving paused since a row went on behind what was cleared"


def test_a_pause_wakes_an_idle_engine_when_it_ends(kernels: Any, root: Path) -> None:
    files = Broken()
    kernel = kernels(files=files)
    files.code = errno.EIO
    kernel.turn(ids_of(300), 400, limit=8192)
    rest_s = kernel.disk.advance(False)
    assert rest_s is not None and 0 < rest_s <= disk_module.LONGEST_PAUSE_S and records_in(root) == []
    files.code = None
    kernel.home.clock.now += max(rest_s, 60.0)
    for _ in range(20):
        kernel.disk.advance(False)
        kernel.disk.writer.work()
    assert kernel.disk.advance(False) is None and len(records_in(root)) >= 10


def test_a_full_disk_does_not_make_the_engine_copy_the_same_blocks_for_ever(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Broken()
    kernel = kernels(files=files)
    copies: list[int] = []
    real = disk_module.Form.to_host
    monkeypatch.setattr(disk_module.Form, "to_host", lambda form, block: copies.append(block.index) or real(form, block))
    files.code = errno.ENOSPC
    kernel.turn(ids_of(300), 400, limit=8192)
    assert len(copies) <= 12, copies


def test_a_budget_smaller_than_a_chain_keeps_its_beginning_and_flush_is_honest(kernels: Any, root: Path) -> None:
    first, prompt = kernels(budget_bytes=6 * 40_000), ids_of(900)
    first.turn(prompt, limit=8192)
    receipt = first.flush()
    kept = len(records_in(root))
    assert 0 < kept < 14 and not receipt.ok and file_bytes(root) <= 6 * 40_000
    again = kernels(budget_bytes=6 * 40_000)
    row = again.turn(prompt, limit=8192)
    assert row.ssd == kept * T and unlike(again.rig, row, prompt) == []


def test_without_a_usable_folder_everything_stays_in_memory(kernels: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kernel, prompt = kernels(root=tmp_path / "file" / "cache"), ids_of(300)
    kernel.turn(prompt)
    assert kernel.turn(prompt).cached == 299 and len(kernel.home.said) == 1
    assert not kernel.flush().ok


def test_state_that_no_record_can_hold_is_kept_in_memory_only(kernels: Any, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr("mlxnb_engine.cache.record.MAX_HEADER", 100)
    kernel, prompt = kernels(), ids_of(300)
    kernel.turn(prompt)
    assert kernel.turn(prompt).cached == 299
    kernel.flush()
    assert records_in(root) == [] and kernel.disk.cache.unsaved == 4
