"""Records of interrupted runs: exact both ways, hostile files refused and set aside, one owner at a time (9.4, C4's kind)."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import stat
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxnb_engine import resume
from mlxnb_engine.cache import shelf as shelf_module
from mlxnb_engine.cache import stopped as stopped_module
from mlxnb_engine.cache.record import BadRecord
from mlxnb_engine.cache.shelf import Shelf, read, waiting
from mlxnb_engine.cache.stopped import Stopped, decode, encode
from mlxnb_engine.events import Alternative
from mlxnb_engine.methods.checkpoints import BYTES_PER_S, Checkpoints, Note
from mlxnb_engine.resume import Resumes
from mlxnb_engine.types import CompletionRequest, Continued, Generated, HlgSpec, Left, Message, RequestId, Resumed, SamplingSpec, TokenId


def ids(*numbers: int) -> Any:
    return tuple(map(TokenId, numbers))


def views(*sizes: int) -> tuple[memoryview, ...]:
    return tuple(memoryview(random.Random(size).randbytes(size)) for size in sizes)


def stopped(number: int = 0, **changes: Any) -> Stopped:
    """changes: of the request."""
    top = (Alternative(4, "\ufffd", -0.25), Alternative(9, "a \u2028\0", -3.0000001))
    tokens = (Continued(TokenId(4), "sampled", False, -0.25, 0, top), Continued(TokenId(9), by_hand=True), Continued(TokenId(2)))
    left = Left(64, 71, views(700, 1400), views(0, 33))
    policy = (("model", "a" * 64), ("seed", "0" * 64))
    resumed = Resumed(f"{number:032x}", 2**64 - 1, False, policy, ids(*range(70)), 60, 1, 12, 4, left)
    answered = Message("assistant", "x", Generated(ids(1, 2), 3))
    messages = (Message("system", "lone \ud800 surrogate"), Message("user", 'quotes " \\ \n'), answered)
    sampling = SamplingSpec(temp=0.1 + 0.2, logit_bias=((3, -100.0), (5, 1e-9)), hlg=HlgSpec(width=math.inf, gain=None), logprobs=2)
    fields: dict[str, Any] = {"messages": messages, "stop": ("\n\n", "é"), "sampling": sampling, "thinking": False, "session": "s1"}
    fields |= {"open_fields": ("min_p",), "continuation": tokens, "resumed": resumed, "max_tokens": 99, "dtype": "bfloat16"}
    return Stopped(CompletionRequest(RequestId("c7"), "owner/name", **{**fields, **changes}), "name", 1_700_000_000, True)


def same(one: Stopped, other: Stopped) -> bool:
    return encode(one) == encode(other) and one.without_state() == other.without_state() and bytes_of(one) == bytes_of(other)


def bytes_of(one: Stopped) -> Any:
    left = one.left
    return None if left is None else (left.start, left.length, [bytes(part) for part in (*left.tail, *left.recurrent)])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"messages": None, "text": ""},
        {"continuation": (), "resumed": Resumed("f" * 32, 0, True, (), ids(5))},
        {"sampling": SamplingSpec()},
    ],
)
def test_a_run_comes_back_as_it_was(changes: dict[str, Any]) -> None:
    for one in (stopped(**changes), stopped(**changes).without_state()):
        raw = encode(one)
        back = decode(raw)
        assert same(back, one) and back.request == one.request if one.left is None else same(back, one)
        assert decode(bytearray(raw)).key == one.key


# -- hostile bytes ---------------------------------------------------------------------------------------------------------


def resealed(raw: bytes, header: bytes) -> bytes:
    """The record with another header, its length and hash put right."""
    length = int.from_bytes(raw[12:16], "little")
    prelude = struct.pack("<8sII", raw[:8], 1, len(header))
    return prelude + header + hashlib.sha256(prelude + header).digest() + raw[16 + length + 32 :]


def mutant(rng: random.Random, raw: bytes, other: bytes) -> tuple[bytes, bool]:
    """(a damaged record, whether its header was sealed again)."""
    kind, out = rng.randrange(7), bytearray(raw)
    at = rng.randrange(len(out))
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[at:]
    elif kind == 2:
        out += rng.randbytes(rng.randrange(1, 99))
    elif kind == 3:
        count = rng.randrange(1, 400)
        out[at : at + count] = other[at : at + count]
    elif kind == 4:
        out[at : at + 8] = b"\xff" * 8
    else:
        header = bytearray(raw[16 : 16 + int.from_bytes(raw[12:16], "little")])
        for _ in range(rng.choice((1, 1, 2, 9))):
            place = rng.randrange(len(header))
            if kind == 5:
                header[place] = rng.choice(b'0123456789abcdef"[]{},:-.eE ntf\\')
            else:
                header[place : place + rng.randrange(3)] = rng.choice((b"", b"1e999", b"null", b"-1", b"true", b"[" * 2000, b"NaN", b'"'))
        return resealed(raw, bytes(header)), True
    return bytes(out), False


def accepted_but_different(trials: int, read_one: Any = decode) -> tuple[int, int]:
    """(mutants that were accepted though damaged, or though they do not say in full what they came back as; mutants refused)."""
    rng = random.Random(5)
    files = [encode(one) for one in (stopped(1), stopped(2).without_state(), stopped(3, messages=None, text="hello"))]
    wrong = refused = 0
    for _ in range(trials):
        raw, other = rng.sample(files, 2)
        bad, sealed = mutant(rng, raw, other)
        try:
            back = read_one(bad)
        except BadRecord:
            refused += 1
            continue
        wrong += bad != raw and (not sealed or encode(back) != bad)
    return wrong, refused


def test_a_damaged_or_foreign_record_is_never_taken_for_another_run() -> None:
    """A header that is changed and sealed again may say something else; it must say it in full, or it is refused."""
    wrong, refused = accepted_but_different(5000)
    assert wrong == 0 and refused > 4000


def test_the_fuzzer_catches_a_reader_without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: checksums that are not compared, and a header that is not compared with what it decodes to."""

    def careless(raw: bytes) -> Stopped:
        length = int.from_bytes(raw[12:16], "little")
        if raw[:8] != stopped_module.MAGIC:
            raise BadRecord("no record")
        try:
            return stopped_module._stopped(json.loads(raw[16 : 16 + length]), memoryview(raw)[48 + length :])
        except Exception as error:
            raise BadRecord(str(error)) from error

    monkeypatch.setattr(stopped_module.xxhash, "xxh3_128_hexdigest", lambda part: "0" * 32)
    assert accepted_but_different(500, careless)[0] > 50


def changed(**path: Any) -> bytes:
    """A record whose header differs in one value, sealed again. path: names joined by __."""
    raw = encode(stopped(1))
    header = json.loads(raw[16 : 16 + int.from_bytes(raw[12:16], "little")])
    for names, value in path.items():
        *way, last = names.split("__")
        place = header
        for name in way:
            place = place[name]
        place[last] = value
    return resealed(raw, json.dumps(header, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"resumed__prompt": [-1]},
        {"resumed__prompt": []},
        {"resumed__prompt": [2**31]},
        {"resumed__prompt": [True]},
        {"resumed__given": 4},
        {"resumed__stable": 71},
        {"resumed__seed": 2**64},
        {"resumed__key": "../" + "a" * 29},
        {"resumed__policy": [["model", "x"]]},
        {"left__length": 200},
        {"left__start": 63},
        {"left__start": 0},
        {"left__tail": []},
        {"left": None},
        {"request__messages": [{"role": "root", "content": "", "generated": None}]},
        {"request__text": "both"},
        {"request__max_tokens": -1},
        {"request__stop": [""]},
        {"request__thinking": 1},
        {"request__sampling__temp": "1"},
        {"request__sampling__top_p": 2},
        {"request__sampling__logit_bias": [[1]]},
        {"request__sampling__hlg__width": "-inf"},
        {"tokens": [[1, "invented", False, None, None, []]]},
        {"tokens": {}},
        {"at": 1.5},
        {"ended": 0},
        {"more": 1},
        {"request__more": 1},
    ],
)
def test_a_value_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadRecord):
        decode(changed(**change))


def test_what_the_changes_start_from_is_accepted() -> None:
    """Negative control of the test before."""
    assert same(decode(changed()), stopped(1))
    assert decode(changed(model="other")).model == "other"


@pytest.mark.parametrize("raw", [b"", b"mlxnb-rs", b"mlxnb-rs\1\0\0\0\xff\xff\xff\xff" + bytes(99), b"mlxnb-kv" + bytes(99), b"[" * 10**6])
def test_bytes_that_are_no_record_are_refused(raw: bytes) -> None:
    with pytest.raises(BadRecord):
        decode(raw)


# -- the folder ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "prefix" / "resume"


def settle(shelf: Shelf) -> None:
    """Wait until it has done what it was asked: a job of its own comes last."""
    last = replace(stopped(0xEEE).without_state(), at=time.time_ns())
    shelf.put(last)
    path = Path(shelf._at(last.key, "run"))
    for _ in range(2000):
        if path.exists() and decode(path.read_bytes()).at == last.at:
            path.unlink()
            return
        time.sleep(0.005)
    raise AssertionError("the shelf does nothing")


def no_notice(text: str) -> None:
    raise AssertionError(text)


def keys(root: Path) -> list[int]:
    return sorted(int(one.key, 16) for one in waiting(root))


def test_a_run_belongs_to_its_process_until_that_is_gone(root: Path) -> None:
    shelf = Shelf(root, no_notice)
    shelf.put(stopped(1))
    shelf.put(replace(stopped(1), at=5))
    shelf.put(stopped(2).without_state())
    settle(shelf)
    assert waiting(root) == [], "another kernel would go on with what this one is at"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} | {stat.S_IMODE(root.stat().st_mode) & 0o077}
    assert modes == {0o600, 0}, "others could read what was asked"
    shelf.close()
    assert keys(root) == [1, 2]
    newest = next(one for one in (read(root, found) for found in waiting(root)) if one is not None and one.key == stopped(1).key)
    assert newest.at == 5, "the newest note of a run is the one that counts"
    later = Shelf(root, no_notice)
    later.adopt(stopped(1).key)
    settle(later)
    assert keys(root) == [2] and len(list(root.glob("*.run"))) == 2
    later.drop(stopped(1).key)
    settle(later)
    later.close()
    assert keys(root) == [2] and len(list(root.glob("*.run"))) == 1


@pytest.mark.parametrize("noted", [False, True])
def test_a_run_that_is_complete_at_once_takes_the_record_of_its_first_owner_along(root: Path, noted: bool) -> None:
    shelf = Shelf(root, no_notice)
    shelf.put(stopped(1))
    settle(shelf)
    shelf.close()
    later = Shelf(root, no_notice)
    with later._changed:
        thread = later._thread = threading.Thread(target=later._run, daemon=True)  # starts when all is asked for
    later.adopt(stopped(1).key)
    if noted:
        later.put(stopped(1))
    later.drop(stopped(1).key)
    thread.start()
    settle(later)
    later.close()
    assert list(root.glob("*.run")) == []


def test_two_kernels_may_go_on_with_the_same_run(root: Path) -> None:
    shelf = Shelf(root, no_notice)
    shelf.put(stopped(1))
    settle(shelf)
    shelf.close()
    both = [Shelf(root, no_notice) for _ in range(2)]
    for one in both:
        one.adopt(stopped(1).key)
        one.put(replace(stopped(1), at=9))
        settle(one)
    both[0].drop(stopped(1).key)
    settle(both[0])
    both[0].close()
    assert waiting(root) == [] and len(list(root.glob("*.run"))) == 1, "the record of the one that still runs was deleted"
    both[1].close()
    assert keys(root) == [1]


def test_a_damaged_record_is_set_aside_and_the_others_are_read(root: Path) -> None:
    shelf = Shelf(root, no_notice)
    for number in (1, 2):
        shelf.put(stopped(number))
    settle(shelf)
    shelf.close()
    path, good = (Path(shelf._at(stopped(number).key, "run")) for number in (1, 2))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    os.symlink(good, shelf._at(f"{9:032x}", "run"))
    Path(shelf._at(f"{8:032x}", "run")).write_bytes(good.read_bytes())
    os.mkfifo(shelf._at(f"{7:032x}", "run"))
    found = [one for one in (read(root, one) for one in waiting(root)) if one is not None]
    assert [one.key for one in found] == [stopped(2).key], "a record under another name, a link or a pipe was taken"
    assert path.with_suffix(".bad").exists() and not path.exists() and keys(root) == [2]


def test_old_and_surplus_records_go_and_what_is_not_ours_stays(root: Path) -> None:
    shelf = Shelf(root, no_notice)
    for number in range(1, 6):
        shelf.put(replace(stopped(number), at=number))
        settle(shelf)
    shelf.close()
    (root / "notes.txt").write_text("mine")
    Path(shelf._at(f"{4:032x}", "tmp")).write_text("half")
    for path, age in ((shelf._at(f"{1:032x}", "run"), 20 * 86_400), (shelf._at(f"{4:032x}", "tmp"), 2 * 86_400)):
        os.utime(path, (time.time() - age, time.time() - age))
    files = shelf_module.PosixFiles()
    shelf_module.sweep(str(root), files)
    assert keys(root) == [2, 3, 4, 5] and not list(root.glob("*.tmp"))
    held = Shelf(root, no_notice)
    held.adopt(stopped(3).key)
    settle(held)
    shelf_module.sweep(str(root), files, most=1)
    assert keys(root) == [5] and len(list(root.glob("*.run"))) == 2, "a run that a living process holds was deleted"
    assert shelf_module.clear(root) == 1 and keys(root) == [] and (root / "notes.txt").exists()
    held.close()
    assert keys(root) == [3]


def test_a_folder_that_takes_nothing_costs_the_record_and_says_so_once(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    notices: list[str] = []
    shelf = Shelf(blocked / "resume", notices.append)
    for number in range(3):
        shelf.put(stopped(number))
    shelf.close()
    assert len(notices) == 1 and str(blocked) in notices[0]
    assert waiting(blocked / "resume") == []


def test_nothing_is_made_for_runs_that_end_by_themselves(root: Path) -> None:
    shelf = Shelf(root, no_notice)
    shelf.drop(stopped(1).key)
    shelf.close()
    assert not root.exists() and shelf._thread is None


def test_state_that_is_too_large_for_a_record_costs_the_state_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_module, "MAX_FILE", len(encode(stopped(1))) - 1)
    shelf = Shelf(root, no_notice)
    shelf.put(stopped(1))
    settle(shelf)
    shelf.close()
    (found,) = waiting(root)
    back = read(root, found)
    assert back is not None and back.left is None and back == stopped(1).without_state()


def test_a_large_state_takes_no_room_from_those_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = stopped().left.nbytes  # type: ignore[union-attr]
    monkeypatch.setattr(resume, "MOST_STATE_BYTES", 2 * nbytes)
    resumes, large = Resumes(), Left(64, 71, views(2 * nbytes + 1), ())
    resumed = replace(stopped(4).resumed, left=large)
    for one in (stopped(1), stopped(2), stopped(3), stopped(4, resumed=resumed)):
        resumes.note(one)
    kept = {int(key, 16): one.left is not None for key, one in resumes._stopped.items()}
    assert kept == {1: False, 2: True, 3: True, 4: False}


def test_clearing_takes_what_was_set_aside_or_half_written_too(root: Path) -> None:
    shelf, held = Shelf(root, no_notice), Shelf(root, no_notice)
    for one, number in ((shelf, 1), (held, 2)):
        one.put(stopped(number))
        settle(one)
    shelf.close()
    mine = [Path(shelf._at(f"{number:032x}", ending)) for number, ending in ((3, "bad"), (4, "tmp"))]
    theirs = Path(held._at(f"{5:032x}", "tmp"))
    for path in (*mine, theirs):
        path.write_text("what was asked")
    assert shelf_module.clear(root) == 3
    assert not any(path.exists() for path in mine) and theirs.exists(), "a living process was about to name that file"
    held.close()
    assert keys(root) == [2]


def test_what_a_record_says_besides_its_state_counts_for_the_rate() -> None:
    tokens = tuple(Continued(TokenId(i), "sampled", False, -0.123456789012345, 3, ()) for i in range(100_000, 101_000))
    resumed = Resumed("f" * 32, 0, True, (), ids(*range(100_000, 101_000)))
    one = stopped(messages=None, text="word " * 1000, continuation=tokens, resumed=resumed)
    row = SimpleNamespace(slot=SimpleNamespace(length=2000), spec=SimpleNamespace(sampling=SamplingSpec()))
    checkpoints = Checkpoints((), clock=lambda: 0.0)
    checkpoints.copy([Note(row, 0, 0, None, None)])
    counted = checkpoints._next * BYTES_PER_S
    assert len(encode(one)) <= counted <= 4 * len(encode(one))
