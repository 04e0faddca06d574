"""R1: many requests with cancels at random moments leave nothing behind. R3: a cancelled row leaves no trace in its neighbours."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rig import WAIT_S, answer_ids, ask, client_of, engine_of, log_problems, on_engine, residents, settle
from no_pickle import no_pickle  # noqa: F401 (an autouse fixture)
from rig import GREEDY, Recorder, Rig, graph_of, prompt

from mlxnb_engine import events as ev
from mlxnb_engine.client import LocalClient
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, Message, RequestId, SamplingSpec

TEXTS = ("one", "the sea is wide", "name the colours of the rainbow in order: red orange yellow", "Q " * 60)


@pytest.fixture
def client(tiny_model: Path, tmp_path: Path) -> Iterator[LocalClient]:
    made = client_of(tiny_model, tmp_path / "cache", prefill_chunk=16, max_rows=4)
    yield made
    made.close()


# -- R1 --------------------------------------------------------------------------------------------------------------


def request(rng: random.Random, number: int) -> CompletionRequest:
    sampling: dict[str, Any] = rng.choice(({}, {"temp": 0.8, "top_p": 0.9}, {"temp": 1.0, "presence_penalty": 0.5}, {"logprobs": 2}))
    stop = rng.choice(((), ("e",), ("\n", "in the")))
    if rng.random() < 0.1:
        identity, spec = RequestId(f"chat-{number}"), SamplingSpec(**sampling)
        return CompletionRequest(identity, "", messages=(Message("user", rng.choice(TEXTS)),), max_tokens=6, stop=stop, sampling=spec)
    tokens = rng.choice((0, 1, 4, 12, 30))
    return ask(rng.choice(TEXTS), tokens, stop=stop, samples=rng.choice((1, 1, 1, 1, 3)), endless=rng.random() < 0.7, **sampling)


class Crowd:
    """Keeps some requests in flight and cancels three in ten: at once, after a few events, or once the row decodes."""

    def __init__(self, client: LocalClient, seed: int) -> None:
        self.client, self.rng = client, random.Random(seed)
        self.live: list[Generation] = []
        self.doomed: list[tuple[Generation, int]] = []
        self.counts: dict[str, int] = {}
        self.problems: list[str] = []
        self.phases: dict[str, int] = {}

    def serve(self, requests: int) -> None:
        for number in range(requests):
            rows = self.client.submit(request(self.rng, number))
            self.live += rows
            if self.rng.random() < 0.3:
                self.doomed += [(row, self.rng.choice((0, 0, 2, 3, 5, 9))) for row in rows]
            self._cancel_some()
            while len(self.live) > 12:
                self._cancel_some()
                self.live[0].wait(0.002)
                self._reap()
        for row, _ in self.doomed:
            self._cancel(row)
        self.doomed.clear()
        for row in self.live:
            assert row.wait(WAIT_S) is not None, f"{row.id} never ended"
        self._reap()

    def _cancel_some(self) -> None:
        ready = [row for row, events in self.doomed if len(row.read()) >= events]
        for row in ready:
            self._cancel(row)
        self.doomed = [(row, events) for row, events in self.doomed if row not in ready]

    def _cancel(self, row: Generation) -> None:
        log = row.read()
        phase = log[-1].kind if log else "queued"
        self.phases[phase] = self.phases.get(phase, 0) + 1
        row.cancel()

    def _reap(self) -> None:
        for row in [row for row in self.live if row.done]:
            log = row.read()
            self.problems += log_problems(log)
            self.counts[log[-1].kind] = self.counts.get(log[-1].kind, 0) + 1
            self.live.remove(row)


def measure(client: LocalClient) -> dict[str, int]:
    """What must not grow, measured at idle after a collection. The prefix cache, which is to grow up to its budget, is emptied."""
    import mlx.core as mx

    settle(client)
    remembered = len(engine_of(client)._live) + len(client.live())
    on_engine(client, lambda: engine_of(client).shared.cache.clear())
    gc.collect()
    on_engine(client, mx.synchronize)
    return {
        "memory": on_engine(client, mx.get_active_memory),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0,
        "generations": sum(isinstance(o, Generation) for o in gc.get_objects()),
        "remembered": remembered,
    }


def growth(before: dict[str, int], after: dict[str, int], requests: int) -> list[str]:
    """R1's limits: 1 MiB of active memory per 1000 requests, one thread, descriptor or generation not at all."""
    found = [f"{name}: {before[name]} -> {after[name]}" for name in ("threads", "descriptors") if after[name] > before[name]]
    if after["memory"] - before["memory"] > 2**20 * max(1.0, requests / 1000):
        found.append(f"memory: {before['memory']} -> {after['memory']}")
    if after["generations"] > before["generations"] + 2 or after["remembered"] > 1:
        found.append(f"generations: {before['generations']} -> {after['generations']}, remembered {after['remembered']}")
    return found


def test_a_crowd_of_requests_with_cancels_leaves_nothing_behind(client: LocalClient, scale: int) -> None:
    warm = Crowd(client, 1)
    warm.serve(60)
    before = measure(client)
    crowd = Crowd(client, 2)
    crowd.serve(500 * scale)
    after = measure(client)
    assert crowd.problems == warm.problems == []
    assert growth(before, after, 500 * scale) == []
    assert crowd.counts["finished"] > 300 * scale and crowd.counts["cancelled"] > 40 * scale
    assert set(crowd.counts) == {"finished", "cancelled"}
    assert {"queued", "tokens"} <= set(crowd.phases), crowd.phases
    # Nothing of 500 histories shows in what the engine computes.
    fresh = answer_ids(client, ask("one", 10))
    assert fresh == answer_ids(client, ask("one", 10))


def test_prepared_buffers_that_are_never_released_are_caught(client: LocalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    Crowd(client, 1).serve(20)
    before = measure(client)
    kept: list[Any] = []
    monkeypatch.setattr(residents(client)[0].group, "_release_staged", lambda prep: kept.extend(prep.slots.arrays()))
    Crowd(client, 3).serve(60)
    assert [line.split(":")[0] for line in growth(before, measure(client), 60)] == ["memory"]
    on_engine(client, kept.clear)


def test_a_leaked_slot_a_leaked_thread_and_a_leaked_log_are_caught(client: LocalClient) -> None:
    import mlx.core as mx

    Crowd(client, 1).serve(20)
    before = measure(client)
    kept: list[Any] = [on_engine(client, lambda: mx.zeros((2**19,), mx.float32) + 1)]
    on_engine(client, lambda: mx.eval(kept[0]))
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    kept += client.submit(ask("one", 2, samples=5))
    for row in kept[1:]:
        row.wait(WAIT_S)
    with open(os.devnull) as extra:
        found = growth(before, measure(client), 20)
        assert extra.fileno() > 0
    stop.set()
    on_engine(client, kept.clear)
    assert {line.split(":")[0] for line in found} == {"threads", "descriptors", "memory", "generations"}, found


def test_the_engine_itself_notices_a_leaked_slot_as_soon_as_it_is_idle(client: LocalClient) -> None:
    answer = answer_ids(client, ask("one", 3))
    resident, engine = settle(client), engine_of(client)
    on_engine(client, lambda: resident.group.slots.add(5) and None)
    engine._thread.join(WAIT_S)
    assert engine.state == "dead" and "rows and slots differ" in str(engine.error)
    assert answer_ids(client, ask("one", 3)) == answer


# -- R3 --------------------------------------------------------------------------------------------------------------

MIXED = SamplingSpec(temp=0.9, top_p=0.9, repetition_penalty=1.1)


def play(seed: int, batch: int, victim: bool, *, leak: bool = False) -> list[Recorder]:
    """One schedule of `batch` survivors, with or without a row that is cancelled after a random number of ticks.

    leak: the victim's last token is written into its neighbours' next input, the fault that R3 must see.
    """
    rng = random.Random(seed)
    rig = Rig(graph_of(), max_rows=batch + 1, chunk=rng.choice((8, 64)))
    delays = [0, *(rng.randrange(6) for _ in range(batch - 1))]
    lengths = [rng.randrange(2, 90) for _ in range(batch)]
    tokens = [rng.randrange(10, 40) for _ in range(batch)]
    victim_at, victim_length, cancel_after = rng.randrange(6), rng.randrange(2, 90), rng.randrange(12)
    rows: list[Recorder] = []
    gone: Recorder | None = None
    for tick in range(7 + cancel_after):
        if victim and tick == victim_at:
            gone = rig.ask(prompt(victim_length, 99), 500, MIXED, 5)
        for i in (i for i, delay in enumerate(delays) if delay == tick):
            rows.append(rig.ask(prompt(lengths[i], i), tokens[i], (GREEDY, MIXED)[i % 2], i))
        if gone is not None and tick == victim_at + cancel_after:
            if leak and rig.group.rows and rig.group._flight is not None:
                rig.group._drain()
                for row in rig.group.rows:
                    row.pending = gone.ids[-1] if gone.ids else 7  # type: ignore[assignment]
            gone.cancelled = True
        rig.tick()
    if gone is not None:
        gone.cancelled = True
    rig.run()
    assert gone is None or gone.end == "cancelled"
    return rows


def traces(rows: list[Recorder]) -> list[tuple[list[int], list[bytes]]]:
    """Ids and bytes of the final state of each row."""
    return [(row.ids, [part.tobytes() for layer in row.state for part in layer]) for row in rows]


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_survivors_of_a_cancel_equal_the_schedule_without_the_victim(batch: int, scale: int) -> None:
    for seed in range({2: 14, 4: 10, 8: 6}[batch] * scale):
        with_victim, without = play(seed, batch, True), play(seed, batch, False)
        assert all(row.end == "length" for row in with_victim), f"seed {seed}"
        assert traces(with_victim) == traces(without), f"seed {seed}"


def test_a_token_that_leaks_to_a_neighbour_is_caught() -> None:
    caught = sum(traces(play(seed, 4, True, leak=True)) != traces(play(seed, 4, False)) for seed in range(8))
    assert caught >= 3, f"caught {caught} of 8"


def test_a_cancelled_engine_row_leaves_its_neighbours_ids_as_they_were(client: LocalClient) -> None:
    texts = ("one", "the sea is wide", "red orange")
    alone = [answer_ids(client, ask(text, 80, temp=0.9, seed=4)) for text in texts]
    for events in (0, 2, 4, 20):
        rows = [client.submit(ask(text, 80, temp=0.9, seed=4))[0] for text in texts]
        (victim,) = client.submit(ask("name the colours of the rainbow", 3000, temp=0.9, seed=4))
        victim.read(events, WAIT_S)
        victim.cancel()
        assert isinstance(victim.wait(WAIT_S), ev.Cancelled)
        assert [row.wait(WAIT_S) and [t.id for e in row.read() if isinstance(e, ev.Tokens) for t in e.tokens] for row in rows] == alone
