"""Processes of their own for the tests of the disk cache: the record fuzzer, and one that forks."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]

from cache_rig import Posix, chain_of, is_right, layout_of, names_of  # noqa: E402

from mlxnb_engine.cache import record  # noqa: E402
from mlxnb_engine.cache.restore import Want  # noqa: E402
from mlxnb_engine.cache.store import Store  # noqa: E402
from mlxnb_engine.cache.writer import Receipt, Writer  # noqa: E402

# -- C4 ----------------------------------------------------------------------------------------------------------------


def mutant(rng: random.Random, files: list[bytes], which: int) -> bytes:
    """One damaged file: bits, bytes and ranges of header or payload, splices, cuts and additions."""
    raw = bytearray(files[which])
    header = 48 + int.from_bytes(raw[12:16], "little")
    kind = rng.randrange(9)
    low, high = (0, header) if rng.random() < 0.5 else (header, len(raw))
    if kind == 0:
        at = rng.randrange(low, high)
        raw[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        for _ in range(rng.randrange(1, 20)):
            raw[rng.randrange(low, high)] = rng.randrange(256)
    elif kind == 2:
        at = rng.randrange(low, high)
        count = min(rng.randrange(1, 512), len(raw) - at)
        raw[at : at + count] = rng.choice((bytes(count), b"\xff" * count, rng.randbytes(count)))
    elif kind == 3:
        other = rng.choice(files)
        at, count = rng.randrange(min(len(raw), len(other))), rng.randrange(1, 4096)
        raw[at : at + count] = other[at : at + count]
    elif kind == 4:
        del raw[rng.randrange(len(raw)) :]
    elif kind == 5:
        raw += rng.randbytes(rng.randrange(1, 300))
    elif kind == 6:
        at, to, count = rng.randrange(low, high), rng.randrange(len(raw)), rng.randrange(1, 200)
        raw[to : to + count] = raw[at : at + count]
    elif kind == 7:  # a header changed with its hash put right
        at = rng.randrange(16, header - 32)
        raw[at] = rng.choice(b'0123456789abcdef"[]{},:-.e')
        raw[header - 32 : header] = record.hashlib.sha256(raw[: header - 32]).digest()
    else:
        at = rng.randrange(0, 16)
        raw[at] = rng.choice((0, 1, 255, rng.randrange(256)))
    return bytes(raw)


def fuzz(count: int, seed: int, checksums: bool) -> dict[str, Any]:
    """Decode mutants. same: what came out is what the file's name promises; different: it is not."""
    if not checksums:
        record._verify = lambda parts, sums: None
    rng = random.Random(seed)
    layout = layout_of(width=16)
    blocks = chain_of(layout, seed=seed, blocks=6, ends=(1, 4, 5))
    names, files = names_of(blocks), [record.encode(block, layout) for block in blocks]
    found: dict[str, Any] = {"mutants": 0, "refused": 0, "same": 0, "different": 0, "slowest_s": 0.0, "memory_ratio": 0.0}

    def judge(raw: bytes, name: record.BlockName, lay: record.Layout, watch_memory: bool) -> None:
        if watch_memory:
            tracemalloc.start()
        start = time.perf_counter()
        try:
            block = record.decode(raw, lay, name)
        except record.BadRecord:
            outcome = "refused"
        else:
            outcome = "same" if is_right(lay, name, block) else "different"
        found["slowest_s"] = max(found["slowest_s"], time.perf_counter() - start)
        if watch_memory:
            found["memory_ratio"] = max(found["memory_ratio"], tracemalloc.get_traced_memory()[1] / max(len(raw), 2**16))
            tracemalloc.stop()
        found["mutants"] += 1
        found[outcome] += 1

    for number in range(count):
        which = rng.randrange(len(files))
        judge(mutant(rng, files, which), names[which], layout, number % 100 == 0)
    if checksums:
        from test_cache_record import LAYOUT, NAMES, by_hand

        for raw in by_hand().values():
            judge(raw, NAMES[1], LAYOUT, True)
    return found


# -- fork --------------------------------------------------------------------------------------------------------------


def forked(root: Path) -> str:
    """Store, writer, fork: what the child does must leave the files, the locks and the parent as they are."""
    said: list[str] = []
    store = Store(root / "cache", 2**30, Posix(), said.append)
    writer = Writer(store, 2**30, said.append)
    writer.start()
    layout = layout_of()
    blocks = chain_of(layout, 1, 4, ends=(3,))
    for block in blocks[:3]:
        assert writer.save(layout, block)
    assert writer.flush(20.0).ok

    def seen() -> list[tuple[str, int, int]]:
        return [(str(p), s.st_ino, s.st_mtime_ns) for p in sorted(root.rglob("*")) if (s := p.lstat())]

    before = seen()
    child = os.fork()
    if child == 0:
        try:
            names = names_of(blocks)
            assert not writer.save(layout, blocks[3])
            restoring = writer.restore(layout, Want(names), 2**30, 60.0)
            assert restoring.done and restoring.result is None
            writer.keep(layout, names)
            assert writer.flush(1.0) == writer.close() == Receipt()
            assert not store.usable and store.publish(layout, blocks[3]) == "refused" and store.load(layout, names[0]) is None
            store.settle()
            store.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "the child did something"
    assert seen() == before, "the child changed the files"
    lock = Posix().lock(str(root / "cache" / "tmp" / store._home._name / "owner"))
    assert lock is None, "the child gave the parent's lock away"
    assert writer.save(layout, blocks[3]) and writer.close().ok and said == []
    return "ok"


# -- a kernel's life ---------------------------------------------------------------------------------------------------


def asks(model: str, cache: str, end: str, words: list[str]) -> None:
    """Ask a model for each of these, print what came as one JSON line each; then close, flush and wait for a kill, or just wait."""
    from engine_rig import NO_EOS, client_of

    from mlxnb_engine import blas
    from mlxnb_engine.events import Finished
    from mlxnb_engine.types import CompletionRequest, RequestId, SamplingSpec

    blas.preload("none")
    client = client_of(Path(model), Path(cache))
    sampling = SamplingSpec(temp=0.0, logit_bias=NO_EOS)
    for number, text in enumerate(words):
        row = client.submit(CompletionRequest(RequestId(f"r{number}"), model, text=text, max_tokens=70, sampling=sampling))[0]
        last = row.wait(60.0)
        assert isinstance(last, Finished), last
        ids = [token.id for event in row.read() if event.kind == "tokens" for token in event.tokens]  # type: ignore[attr-defined]
        print(json.dumps({"ids": ids, "usage": last.usage}), flush=True)
    if end == "close":
        client.close()
    elif end == "flush":
        print(json.dumps(client.cache_flush()), flush=True)
    if end != "close":
        time.sleep(60.0)


def main(words: list[str]) -> None:
    if words[0] == "fuzz":
        print(json.dumps(fuzz(int(words[1]), int(words[2]), words[3] == "with")))
    elif words[0] == "fork":
        print(forked(Path(words[1])))
    elif words[0] == "asks":
        asks(words[1], words[2], words[3], words[4:])


if __name__ == "__main__":
    main(sys.argv[1:])
