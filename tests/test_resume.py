"""An interrupted row and its rest come to what the row would have come to alone: ids, log probabilities, hidden rows, state (G74)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import test_cache_disk
import test_zoo
from rig import G26, GREEDY, Recorder, differences
from test_cache_disk import kernels, root  # noqa: F401 (fixtures)
from test_reuse import KINDS, Reusing, graph_of, ids_of, shared_of

from mlxnb_engine.admission import Entry, RowSpec
from mlxnb_engine.cache.blocks import T
from mlxnb_engine.methods import checkpoints as checkpoints_module
from mlxnb_engine.methods.checkpoints import Checkpoints
from mlxnb_engine.methods.reuse import Shared
from mlxnb_engine.types import Left, SamplingSpec

TOKENS = 72
SAMPLED = replace(G26, logprobs=3, frequency_penalty=0.1)
SEED = 7


class Life(Reusing):
    """One kernel: rows that are noted, and rests of rows."""

    def __init__(self, kind: str, shared: Shared | None, **options: Any) -> None:
        super().__init__(kind, shared, **options)
        self.group.checkpoints = Checkpoints(graph_of(kind).specs)

    def begin(self, ids: Sequence[int], sampling: SamplingSpec = SAMPLED, seed: int = SEED) -> Recorder:
        return self.ask(ids, TOKENS, sampling, seed)

    def stop(self, row: Recorder, after: int) -> None:
        """Cancel it once it runs and has delivered so many tokens."""
        while len(row.ids) < after or all(other.spec.consumer is not row for other in self.group.rows):
            self.tick()
        row.cancelled = True
        while row.end is None:
            self.tick()

    def rest(self, ids: Sequence[int], before: Recorder, sampling: SamplingSpec = SAMPLED, seed: int = SEED, **changes: Any) -> Recorder:
        """The rest of a row that was stopped, as the engine submits it."""
        _, left, undelivered, ended = before.notes[-1]
        assert ended
        drawn = [*before.ids, *([undelivered.id] if undelivered is not None else [])]
        row = Recorder(self, TOKENS)
        row.ids, row.logprobs = drawn, [*before.logprobs, *([undelivered.logprobs] if undelivered is not None else [])]
        spec = RowSpec(row, sampling, seed, TOKENS, 4096, start=len(drawn))
        exact = graph_of(self.kind).family.windows
        how = {"left": left, "steps_from": None if exact else len(ids) - 1, "stable": len(ids), **changes}
        self.scheduler.submit(Entry((*ids, *drawn), deque([spec]), **how))
        self.recorders.append(row)
        return row


@functools.cache
def whole(kind: str, ids: tuple[int, ...], sampling: SamplingSpec = SAMPLED, seed: int = SEED) -> tuple[Recorder, list[bytes]]:
    """The row that nobody interrupts, alone, without a cache; and its recurrent state at the end."""
    rig = Reusing(kind)
    row = rig.ask(ids, TOKENS, sampling, seed)
    rig.run()
    assert row.end == "length"
    return row, rig.recurrent[row]


def unlike(rig: Life, row: Recorder, ids: Sequence[int], sampling: SamplingSpec = SAMPLED, seed: int = SEED) -> list[str]:
    """How the end of a resumed row differs from that of the whole one. Of sliding layers, what they still see is compared."""
    want, recurrent = whole(rig.kind, tuple(ids), sampling, seed)
    found = [line for line in differences(row, want) if not line.startswith(("K of", "V of", "hidden"))]
    hidden = want.hidden()
    if row.hidden() != hidden[len(hidden) - len(row.scores) :]:
        found.append("hidden rows")
    if rig.recurrent[row] != recurrent:
        found.append("recurrent state")
    if row.consumed != want.consumed:
        found.append("consumed ids")
    specs = [spec for spec in graph_of(rig.kind).specs if spec.kind in ("full", "sliding")]
    for layer, (spec, mine, theirs) in enumerate(zip(specs, row.state, want.state, strict=True)):
        for name, x, y in zip("KV", mine, theirs, strict=True):
            n = min(x.shape[2], y.shape[2], y.shape[2] if spec.window is None else spec.window - 1)
            if x[:, :, x.shape[2] - n :].tobytes() != y[:, :, y.shape[2] - n :].tobytes():
                found.append(f"{name} of layer {layer}")
    return found


MOST = ("full", "sliding, wide", "ring", "hybrid", "hybrid, float state", "recurrent, cut by position", "latent")
KEEPING = tuple(kind for kind in MOST if kind not in ("recurrent, cut by position", "latent"))
"""Of the others nothing that was drawn is kept where bits are promised: their rests are computed again, a token at a time."""


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize(("after", "submit"), [(0, "after"), (37, "after"), (59, "before")])
def test_a_row_that_was_stopped_and_resumed_is_the_row_that_was_not(kind: str, after: int, submit: str) -> None:
    """37 tokens behind 90 end in a block, 59 near its end; both submission orders; penalties, filters, captured log probabilities."""
    shared, ids = shared_of(), ids_of(90, kind)
    rig = Life(kind, shared, submit=submit)
    before = rig.begin(ids)
    rig.stop(before, after)
    read = rig.read
    row = rig.rest(ids, before)
    rig.run()
    assert unlike(rig, row, ids) == []
    if kind in KEEPING:
        assert rig.read == read and row.cached == len(ids) + len(before.ids) - (before.notes[-1][2] is None), "something was computed twice"
    assert rig.reuse is not None and rig.reuse.failures == 0 and rig.group.checkpoints.failures == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", MOST)
def test_state_that_is_lost_is_computed_again_as_it_was_computed(kind: str) -> None:
    """Another kernel without a cache on disk, and one that has the blocks but not the tail."""
    ids = ids_of(90, kind)
    shared = shared_of()
    rig = Life(kind, shared)
    before = rig.begin(ids)
    rig.stop(before, 50)
    for other in (Life(kind, None), Life(kind, shared_of())):
        row = other.rest(ids, before)
        other.run()
        assert unlike(other, row, ids) == [] and row.cached == 0
    row = rig.rest(ids, before, left=None)
    rig.run()
    assert unlike(rig, row, ids) == []


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_the_rest_of_a_rest_is_a_rest(kind: str) -> None:
    ids = ids_of(100, kind)
    rig = Life(kind, shared_of())
    row = rig.begin(ids)
    for after in (3, 30, 31, 66):
        rig.stop(row, after)
        row = rig.rest(ids, row)
    rig.run()
    assert unlike(rig, row, ids) == []


@pytest.mark.parametrize("kind", ["full", "sliding, wide", "hybrid"])
@pytest.mark.parametrize("rows", [2, 4])
def test_rows_that_run_beside_others_are_stopped_and_resumed_as_alone(kind: str, rows: int) -> None:
    rig = Life(kind, shared_of())
    prompts = [ids_of(40 + 30 * i, i) for i in range(rows)]
    how = [(SAMPLED if i % 2 else GREEDY, SEED + i) for i in range(rows)]
    begun = [rig.begin(ids, *one) for ids, one in zip(prompts, how, strict=True)]
    for i in range(0, rows, 2):
        rig.stop(begun[i], 20 + i)
    rests = {i: rig.rest(prompts[i], begun[i], *how[i]) for i in range(0, rows, 2)}
    rig.run()
    for i, ids in enumerate(prompts):
        assert unlike(rig, rests.get(i, begun[i]), ids, *how[i]) == [], f"row {i}"


@pytest.mark.parametrize("kind", ["full", "hybrid"])
@pytest.mark.parametrize("submit", ["before", "after"])
def test_what_was_noted_on_the_way_gives_the_same_row_too(kind: str, submit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is killed leaves the last note: tokens are missing behind it, and are drawn again."""
    monkeypatch.setattr(checkpoints_module, "EVERY_S", 0.0)
    monkeypatch.setattr(checkpoints_module, "BYTES_PER_S", 1e18)
    ids = ids_of(90, kind)
    rig = Life(kind, shared_of(), submit=submit)
    row = rig.begin(ids)
    rig.run()
    assert unlike(rig, row, ids) == [], "noting a row changed it"
    assert len(row.notes) > 60 and all(not ended for *_, ended in row.notes)
    for tokens, left, _, _ in (row.notes[0], row.notes[20], row.notes[-1]):
        assert left is not None and left.length == len(ids) + len(tokens) - 1
        noted = Recorder(rig, TOKENS, ids=tokens, logprobs=row.logprobs[: len(tokens)], notes=[(tokens, left, None, True)])
        again = rig.rest(ids, noted)
        rig.run()
        assert unlike(rig, again, ids) == [] and again.cached == left.length


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_another_seed_or_a_lost_history_is_seen_by_the_comparison(kind: str) -> None:
    """Negative control: each part of what a rest is made of counts."""
    ids = ids_of(90, kind)
    rig = Life(kind, shared_of())
    before = rig.begin(ids)
    rig.stop(before, 30)
    seeded = rig.rest(ids, before, seed=SEED + 1)
    rig.run()
    assert any(line.startswith("ids") for line in unlike(rig, seeded, ids))
    _, left, undelivered, _ = before.notes[-1]
    assert left is not None
    for part in ("tail", *(("recurrent",) if kind == "hybrid" else ())):
        bent = [bytearray(one) for one in getattr(left, part)]
        bent[0][: len(bent[0]) // 2] = bytes(len(bent[0]) // 2)
        wrong: Left = replace(left, **{part: tuple(map(memoryview, bent))})
        row = rig.rest(ids, replace_note(before, wrong, undelivered))
        rig.run()
        assert unlike(rig, row, ids) != [], part


def replace_note(row: Recorder, left: Left, undelivered: Any) -> Recorder:
    return Recorder(row.rig, TOKENS, ids=row.ids, logprobs=row.logprobs, notes=[(row.ids, left, undelivered, True)])


def test_state_of_another_layout_is_a_miss() -> None:
    ids = ids_of(90)
    rig = Life("full", shared_of())
    before = rig.begin(ids)
    rig.stop(before, 30)
    _, left, undelivered, _ = before.notes[-1]
    assert left is not None
    shorter = replace(left, tail=tuple(part[:-4] for part in left.tail))
    for wrong in (replace(left, tail=left.tail[:-1]), shorter, replace(left, length=10**6)):
        row = rig.rest(ids, replace_note(before, wrong, undelivered))
        rig.run()
        assert unlike(rig, row, ids) == []


@pytest.mark.parametrize("kind", ["full", "sliding, wide", "hybrid", "hybrid, float state"])
def test_another_kernel_takes_up_a_rest_from_its_record_and_the_blocks_on_disk(
    kind: str, kernels: Any, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """Whole blocks come from the prefix cache's files, attachment or not; tail and recurrent state from the note."""
    monkeypatch.setattr(test_cache_disk, "Reusing", Life)
    ids = ids_of(150, kind)
    first = kernels(kind)
    before = first.rig.begin(ids)
    first.rig.stop(before, 40)
    assert first.flush().ok
    other = kernels(kind)
    row = other.rig.rest(ids, before)
    other.rig.run()
    assert unlike(other.rig, row, ids) == []
    assert row.cached == len(ids) + 40 and row.ssd == row.cached // T * T and other.rig.read == 0


def test_a_row_that_runs_alone_in_its_lane_is_noted_by_its_tokens_and_computed_again() -> None:
    graph = test_zoo.graph(test_zoo.LONE[0])
    ids = ids_of(37)

    def begun(start: Sequence[int] = (), steps_from: int | None = None) -> tuple[Any, Recorder]:
        rig = test_zoo.TurnsRig(graph)
        rig.group.checkpoints = Checkpoints(graph.specs)
        row = Recorder(rig, 24, ids=list(start))
        spec = RowSpec(row, replace(SAMPLED, logprobs=None), SEED, 24, 4096, start=len(start))
        rig.scheduler.submit(Entry((*ids, *start), deque([spec]), stable=len(ids), steps_from=steps_from))
        rig.recorders.append(row)
        return rig, row

    rig, want = begun()
    rig.run()
    rig, before = begun()
    while len(before.ids) < 9:
        rig.tick()
    before.cancelled = True
    rig.run()
    ((delivered, left, undelivered, ended),) = before.notes
    assert left is None and ended and undelivered is not None and delivered == before.ids
    rig, row = begun([*before.ids, undelivered.id], len(ids) - 1)
    rig.run()
    assert row.ids == want.ids


def test_drawn_tokens_read_as_a_prompt_are_seen_by_the_comparison() -> None:
    """Negative control: of this family a window of several tokens has other bits than as many steps."""
    ids = ids_of(90)
    rig = Life("latent", None)
    before = rig.begin(ids)
    rig.stop(before, 50)
    row = rig.rest(ids, before, steps_from=None)
    rig.run()
    assert unlike(rig, row, ids) != []


@pytest.mark.modes("mkl")
@pytest.mark.parametrize("kind", ["full", "hybrid", "latent"])
def test_on_a_fast_blas_a_lone_row_goes_on_with_the_same_bits_from_what_it_left_and_from_nothing(kind: str) -> None:
    """There the bits of a token depend on how many are computed with it: state is taken up as it was, or computed as it was."""
    ids = ids_of(90, kind)
    rig = Life(kind, shared_of(), exact=False)
    before = rig.begin(ids)
    rig.stop(before, 50)
    again = rig.rest(ids, before, steps_from=len(ids) - 1)
    rig.run()
    assert unlike(rig, again, ids) == [] and again.cached > len(ids) + 49
    other = Life(kind, shared_of(), exact=False)
    lost = other.rest(ids, before, steps_from=len(ids) - 1)
    other.run()
    assert unlike(other, lost, ids) == [] and lost.cached == 0


def test_every_kind_is_covered() -> None:
    assert set(MOST) <= set(KINDS)
