"""The disk cache of a whole engine: over restarts and kills, cleared, flushed, told about, switched off, and out of everybody's way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_rig import records_in
from engine_rig import ask, client_of, engine_of, finish, on_engine, settle, token_ids
from tiny import write_model

from mlxnb_engine import upkeep
from mlxnb_engine.cache.blocks import T
from mlxnb_engine.cache.files import PosixFiles
from mlxnb_engine.client import LocalClient
from mlxnb_engine.errors import RequestError

CHILD = Path(__file__).with_name("cache_child.py")
LONG = "the sea is wide and the night is still; when the wind comes in, we all listen. " * 12
OTHER = "red orange yellow green blue, and the answer is that there are four of them. " * 12


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def clients(tiny_model: Path, cache: Path) -> Iterator[Any]:
    """Makes engines on one cache folder; each is closed in the end."""
    made: list[LocalClient] = []

    def start(model: Path = tiny_model, **settings: Any) -> LocalClient:
        made.append(client_of(model, settings.pop("cache_dir", cache), **settings))
        return made[-1]

    yield start
    for client in made:
        client.close()


def answer(client: LocalClient, text: str, tokens: int = 20) -> tuple[list[int], dict[str, Any]]:
    """ids and usage."""
    (log,) = finish(client.submit(ask(text, tokens)))
    return token_ids(log), log[-1].usage  # type: ignore[attr-defined]


def cached(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["prompt_tokens_details"]
    return details["cached_tokens"], details.get("ssd_tokens", 0)


# -- restarts ----------------------------------------------------------------------------------------------------------


class Kernel:
    """A process with an engine that answers these and then closes, or flushes and lives on."""

    def __init__(self, model: Path, cache: Path, end: str, *texts: str) -> None:
        words = [sys.executable, str(CHILD), "asks", str(model), str(cache), end, *texts]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found = json.loads(self.process.stdout.readline())
        assert isinstance(found, dict)
        return found

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.wait(60.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.parametrize("end", ["close", "flush"])
def test_a_restart_of_the_kernel_reuses_every_whole_block(end: str, tiny_model: Path, cache: Path, clients: Any) -> None:
    """G70: after an orderly end, and after a flush that succeeded and then SIGKILL. The answers are the same."""
    first = Kernel(tiny_model, cache, end, LONG, OTHER)
    said = [first.line() for _ in range(2)]
    if end == "flush":
        assert first.line()["ok"]
    first.end(kill=end == "flush")
    again = clients()
    for text, before in zip((LONG, OTHER), said, strict=True):
        ids, usage = answer(again, text, 70)
        length = before["usage"]["prompt_tokens"]
        assert cached(before["usage"])[1] == 0 and cached(usage) == ((length - 1) // T * T,) * 2
        assert ids == before["ids"] and len(ids) == 70


def test_a_kernel_killed_without_a_flush_leaves_what_had_been_written(tiny_model: Path, cache: Path, clients: Any) -> None:
    first = Kernel(tiny_model, cache, "wait", LONG)
    before = first.line()
    until = time.monotonic() + 30
    while len(records_in(cache / "prefix")) < 6 and time.monotonic() < until:
        time.sleep(0.01)
    first.end(kill=True)
    ids, usage = answer(clients(), LONG, 70)
    assert ids == before["ids"] and cached(usage)[1] >= 5 * T


def test_two_kernels_share_a_folder_and_one_is_killed_while_it_writes(tiny_model: Path, cache: Path, clients: Any) -> None:
    """The other one answers as if it were alone, and takes up what the dead one had finished."""
    texts = [f"{number} {LONG}" for number in range(6)]
    victim = Kernel(tiny_model, cache, "wait", *texts)
    survivor = clients()
    mine = [answer(survivor, text, 70) for text in texts[:2]]
    theirs = [victim.line() for _ in range(3)]
    victim.process.send_signal(signal.SIGKILL)
    victim.end()
    mine += [answer(survivor, text, 70) for text in texts[2:]]
    assert [ids for ids, _ in mine[:3]] == [one["ids"] for one in theirs]
    assert cached(mine[2][1])[1] >= T, "nothing of the dead kernel's work was found"
    assert survivor.cache_flush()["ok"]
    alone = clients(prefix_cache_bytes=0)
    assert [answer(alone, text, 70)[0] for text in texts] == [ids for ids, _ in mine]


# -- flush, info, clear ------------------------------------------------------------------------------------------------


def test_flush_says_what_is_on_disk_and_info_counts_it(clients: Any, cache: Path, tiny_model: Path) -> None:
    client = clients()
    assert client.cache_flush() == {"ok": True, **dict.fromkeys(("published", "dropped", "failed", "pending", "missing", "unsaved"), 0)}
    assert client.cache_info()["memory"] is None
    answer(client, LONG)
    receipt = client.cache_flush()
    files = records_in(cache / "prefix")
    assert receipt["ok"] and receipt["published"] == len(files) >= 6
    info = client.cache_info()
    size = sum(path.stat().st_size for path in files)
    assert info["disk"]["blocks"] == info["memory"]["blocks"] == len(files) and info["disk"]["used_bytes"] == size
    assert info["disk"]["processes"] == 1 and info["disk"]["problem"] == "" and info["memory"]["queued_bytes"] == 0
    (model,) = info["models"]
    assert model["model"] == client.status()["models"][0]["name"] and model["disk_bytes"] == size and 0 <= model["idle_s"] < 60
    client.close()
    assert upkeep.info(client.config)["models"][0] | {"idle_s": 0} == model | {"idle_s": 0, "memory_bytes": 0, "memory_blocks": 0}
    assert json.loads(json.dumps(info)) == info


def test_clear_forgets_everything_or_one_model_in_memory_and_on_disk(clients: Any, cache: Path, tmp_path: Path, tiny_model: Path) -> None:
    other_model = write_model(tmp_path / "other", "qwen3")
    client = clients()
    name = str(other_model)
    first, _ = answer(client, LONG)
    finish(client.submit(ask(LONG, 20, model=name)))
    assert client.cache_flush()["ok"]
    models = {part["model"]: part for part in client.cache_info()["models"]}
    mine, theirs = client.status()["models"][0]["name"], client.status()["models"][1]["name"]
    with pytest.raises(RequestError, match="Nothing is kept of 'nobody'") as nobody:
        client.cache_clear("nobody")
    assert mine in str(nobody.value) and theirs in str(nobody.value)
    gone = client.cache_clear(theirs)
    assert gone == {"files": models[theirs]["disk_blocks"], **{f"{k}_bytes": models[theirs][f"{k}_bytes"] for k in ("disk", "memory")}}
    assert [part["model"] for part in client.cache_info()["models"]] == [mine]
    assert cached(answer(client, LONG)[1])[0] > 0
    gone = client.cache_clear()
    assert gone["files"] >= 6 and records_in(cache / "prefix") == [] and client.cache_info()["models"] == []
    again, usage = answer(client, LONG)
    assert cached(usage) == (0, 0) and again == first
    assert client.cache_flush()["ok"] and len(records_in(cache / "prefix")) >= 6, "it is kept again"
    client.close()
    gone = upkeep.clear(client.config, client.cache_info()["models"][0]["namespace"][:8])
    assert gone["files"] >= 6 and records_in(cache / "prefix") == [] and list((cache / "prefix" / "tmp").iterdir()) == []


def test_clearing_while_rows_run_hurts_none_of_them(clients: Any) -> None:
    client = clients()
    want, _ = answer(client, LONG, 300)
    client.cache_clear()
    rows = client.submit(ask(LONG, 300))
    for _ in range(20):
        client.cache_clear()
        time.sleep(0.02)
    (log,) = finish(rows)
    assert token_ids(log) == want
    on_engine(client, engine_of(client).shared.cache.check)


def test_eight_threads_ask_stop_flush_clear_and_look_at_once(clients: Any) -> None:
    """R6: no deadlock, every row ends, and everything adds up afterwards."""
    client = clients(prefix_cache_bytes=2**20)
    want, _ = answer(client, LONG, 30)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(12):
                what = rng.random()
                if what < 0.5:
                    (row,) = client.submit(ask(LONG, 30))
                    if rng.random() < 0.3:
                        time.sleep(rng.random() * 0.02)
                        row.cancel()
                    last = row.wait(60.0)
                    assert last is not None
                    assert last.kind == "cancelled" or token_ids(row.read()) == want
                elif what < 0.7:
                    client.cache_flush(rng.random() * 0.2)
                elif what < 0.8:
                    client.cache_clear()
                else:
                    client.cache_info()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive(), "it hangs"
    assert failures == []
    settle(client)
    shared = engine_of(client).shared
    on_engine(client, shared.cache.check)
    shared.disk.writer.check()
    assert shared.cache.stats()["leases"] == 0 and shared.disk.failures == 0


def test_a_folder_that_another_process_keeps_locked_is_not_cleared_by_half(clients: Any, cache: Path) -> None:
    client = clients()
    answer(client, LONG)
    assert client.cache_flush()["ok"]
    client.close()
    before = records_in(cache / "prefix")
    lock = PosixFiles().lock(str(cache / "prefix" / "lock"))
    assert lock is not None
    store_wait = pytest.MonkeyPatch()
    store_wait.setattr("mlxnb_engine.cache.store.OPEN_WAIT_S", 0.1)
    with pytest.raises(RequestError, match="cannot be cleared now"):
        upkeep.clear(client.config)
    store_wait.undo()
    PosixFiles().unlock(lock)
    assert records_in(cache / "prefix") == before
    assert upkeep.clear(client.config)["files"] == len(before)


# -- what people are told, and switches --------------------------------------------------------------------------------


def test_a_cold_model_on_a_warm_folder_is_mentioned_once(clients: Any, tmp_path: Path) -> None:
    client = clients()
    answer(client, LONG)
    client.close()
    other = clients(write_model(tmp_path / "other", "qwen3"))
    for _ in range(2):
        answer(other, LONG)
        assert other.cache_flush()["ok"]
    assert [note for note in other.status()["notices"] if "none for this model" in note] == other.status()["notices"]
    assert len(other.status()["notices"]) == 1


def test_an_unusable_folder_is_one_warning_and_memory_works(clients: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    client = clients(prefix_disk_dir=tmp_path / "file" / "prefix")
    answer(client, LONG)
    assert cached(answer(client, LONG)[1])[0] > 400
    assert len(client.status()["notices"]) == 1 and "Blocks stay in memory only" in client.status()["notices"][0]
    receipt = client.cache_flush()
    assert not receipt["ok"] and receipt["unsaved"] >= 6


@pytest.mark.parametrize("settings", [{"prefix_disk_bytes": 0}, {"prefix_cache_bytes": 0}], ids=str)
def test_switched_off_it_touches_no_file(settings: dict[str, Any], clients: Any, cache: Path) -> None:
    client = clients(**settings)
    answer(client, LONG)
    assert not (cache / "prefix").exists()
    assert (cached(answer(client, LONG)[1])[0] > 400) == ("prefix_disk_bytes" in settings)
    assert client.cache_info()["disk"]["budget_bytes"] == 0
    assert client.cache_flush()["ok"] == ("prefix_cache_bytes" in settings), "what is kept in memory only is not on disk"
    assert client.cache_clear()["files"] == 0


# -- out of the way ----------------------------------------------------------------------------------------------------


class Stuck:
    """Every write waits until `free` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.free, self.reached = threading.Event(), threading.Event()
        real = getattr(PosixFiles, call)

        def wait(files: PosixFiles, *arguments: Any) -> Any:
            self.reached.set()
            self.free.wait(60.0)
            return real(files, *arguments)

        monkeypatch.setattr(PosixFiles, call, wait)


@pytest.mark.parametrize("call", ["write", "sync"])
def test_answers_do_not_wait_for_a_disk_that_hangs_and_neither_does_the_end(
    call: str, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = clients()
    answer(client, "warm up")
    stuck = Stuck(monkeypatch, call)
    try:
        ids, _ = answer(client, LONG, 100)
        assert stuck.reached.wait(10.0) and len(ids) == 100
        assert cached(answer(client, LONG)[1])[0] > 400
        receipt = client.cache_flush(0.3)
        assert not receipt["ok"] and receipt["pending"] > 0
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 5.0
    finally:
        stuck.free.set()


def test_a_prompt_waits_for_a_disk_that_hangs_only_so_long(clients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxnb_engine.methods.disk.FETCH_S", 0.5)
    first = clients()
    want, _ = answer(first, LONG)
    first.close()
    client = clients()
    answer(client, "warm up")
    stuck = Stuck(monkeypatch, "read")
    try:
        used = time.process_time()
        row = client.submit(ask(LONG, 20))
        assert stuck.reached.wait(10.0)
        neighbour, _ = answer(clients(), "another engine answers meanwhile")
        (log,) = finish(row)
        assert token_ids(log) == want and len(neighbour) == 20
        assert time.process_time() - used < 60.0
    finally:
        stuck.free.set()


def test_the_engine_sleeps_while_it_waits_for_the_disk(clients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxnb_engine.methods.disk.FETCH_S", 2.0)
    first = clients()
    answer(first, LONG)
    first.close()
    client = clients()
    answer(client, "warm up")
    turns = []
    engine = engine_of(client)
    real = engine._turn
    engine._turn = lambda: (turns.append(time.monotonic()), real())[1]
    stuck = Stuck(monkeypatch, "read")
    try:
        row = client.submit(ask(LONG, 2))
        assert stuck.reached.wait(10.0)
        before = len(turns)
        time.sleep(0.5)
        assert len(turns) - before < 100, "it turned all the time"
        stuck.free.set()
        finish(row)
    finally:
        stuck.free.set()


def test_an_idle_engine_does_not_turn(clients: Any) -> None:
    client = clients()
    answer(client, LONG)
    assert client.cache_flush()["ok"]
    engine = engine_of(client)
    turns = []
    real = engine._turn
    engine._turn = lambda: (turns.append(1), real())[1]
    time.sleep(0.3)
    before = len(turns)
    time.sleep(0.5)
    assert len(turns) - before <= 1


def test_no_test_lies_in_the_folder_of_a_person(prefix_dir: Path, pytestconfig: pytest.Config) -> None:
    from mlxnb_engine.config import resolve

    assert resolve().prefix_dir == resolve({}).prefix_dir == prefix_dir and str(prefix_dir).startswith(pytestconfig.prefix_root)  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-c", "from mlxnb_engine.config import resolve; print(resolve().prefix_dir)"],
        env={**os.environ, "PYTHONPATH": str(CHILD.parent.parent / "engine")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(prefix_dir)
