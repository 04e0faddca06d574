"""An explicit limit on K/V bytes: it binds at every moment, and everything that was accepted finishes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rig import G26, GREEDY, Recorder, Rig, assert_same, graph_of, prompt, solo

from mlxnb_engine.errors import CapacityExceeded
from mlxnb_engine.state.slots import SlotRow, Slots
from mlxnb_engine.state.spec import Geometry

PLAIN = Geometry()


def _over_the_limit(monkeypatch: pytest.MonkeyPatch, rig: Rig, limit: int) -> list[int]:
    """Bytes of every moment at which the group's buffers exceeded the limit, the middle of a join included."""
    found, occupy = [], Slots._occupy

    def watched(self: Slots, *args: Any) -> SlotRow:
        row, group = occupy(self, *args), rig.group
        known = [group.slots, *(p.slots for p, _ in group.ready), *([group.preparation.slots] if group.preparation else [])]
        held = group.kv_bytes + (0 if any(s is self for s in known) else self.nbytes)
        if held > limit:
            found.append(held)
        return row

    monkeypatch.setattr(Slots, "_occupy", watched)
    return found


def _tight_workload(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng, graph = random.Random(seed), graph_of()
    geometry = rng.choice((PLAIN, Geometry(bucketed=True), Geometry(4, True), Geometry(4, True, 192)))
    limit = Rig(graph, geometry).group.bytes_for([rng.choice((60, 128, 200))]) * rng.choice((1, 2, 3, 4, 6))
    rig = Rig(graph, geometry, max_kv_bytes=limit, max_rows=rng.choice((2, 8)), chunk=rng.choice((16, 64, 512)))
    rows: list[tuple[Recorder, int, int, int]] = []
    with monkeypatch.context() as patch:
        found = _over_the_limit(patch, rig, limit)
        for _ in range(12):
            length = rng.choice((1, 2, 17, 41, 59, 61, 63, 64, 100, 125))
            # Many of them end at the very edge of a class.
            edge = next(edge for edge in (64, 128, 192) if edge > length) - length + rng.randrange(-2, 2)
            tokens = edge if 0 < edge < 25 else rng.choice((2, 9))
            samples = rng.choice((1, 1, 1, 3))
            try:
                made = rig.ask_many(prompt(length), tokens, [(G26, i) for i in range(samples)])
            except CapacityExceeded:
                assert rig.group.bytes_for([length + tokens]) * min(2, samples) > limit
                continue
            rows += [(row, length, tokens, i) for i, row in enumerate(made)]
            rig.tick(rng.randrange(3))
            if rng.random() < 0.2:
                rng.choice(rows)[0].cancelled = True
        rig.run(4000)
    assert not found, f"{max(found)} bytes, and the limit is {limit}"
    for row, length, tokens, i in rows:
        want = solo(graph, PLAIN, prompt(length), tokens, G26, i)
        assert row.end in ("length", "cancelled") and row.ids == want.ids[: len(row.ids)], (seed, length, tokens, row.end)


def test_buffers_never_exceed_their_limit_and_everything_finishes(monkeypatch: pytest.MonkeyPatch, scale: int) -> None:
    for seed in range(12 * scale):
        _tight_workload(monkeypatch, seed)


def test_a_limit_that_ignores_the_padding_of_the_last_step_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, graph = Geometry(4, True), graph_of()

    def ends_within_the_limit(tokens: int) -> bool:
        limit = Rig(graph, geometry).group.bytes_for([40 + tokens])
        rig = Rig(graph, geometry, max_kv_bytes=limit)
        with monkeypatch.context() as patch:
            found = _over_the_limit(patch, rig, limit)
            rig.ask(prompt(40), tokens)
            while rig.scheduler.tick():
                pass
        return not found

    assert all(ends_within_the_limit(tokens) for tokens in range(20, 27))
    monkeypatch.setattr(Geometry, "reach_for", Geometry.width_for)
    assert not ends_within_the_limit(24)


def test_a_request_that_could_not_run_even_alone_is_refused_at_once() -> None:
    rig = Rig(graph_of(), max_kv_bytes=Rig(graph_of()).group.bytes_for([64]))
    with pytest.raises(CapacityExceeded, match="max_kv_bytes"):
        rig.ask(prompt(60), 5)
    with pytest.raises(CapacityExceeded):
        rig.ask_many(prompt(20), 5, [(GREEDY, 0), (GREEDY, 1)])
    row = rig.ask(prompt(60), 4)
    rig.run()
    assert_same(row, solo(graph_of(), PLAIN, prompt(60), 4))
