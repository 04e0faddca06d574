"""R5 and R2 of the scheduler: random histories on a virtual clock, its limits, and broken schedulers that the harness must catch."""

from __future__ import annotations

import random
from collections import deque

import pytest
from engine_rig import Clock, FakeGroup, Faults, Interleaving, Recorder, StubGraph, final_only_group, stub_group

from mlxnb_engine.admission import Entry, RowSpec, notify
from mlxnb_engine.errors import CapacityExceeded, ModelError
from mlxnb_engine.scheduler import Scheduler
from mlxnb_engine.types import SamplingSpec, TokenId


def entry(clock: Clock, prompt: int, max_tokens: int = 3, samples: int = 1) -> tuple[Entry, list[Recorder]]:
    recorders = [Recorder(clock, max_tokens) for _ in range(samples)]
    rows = deque(RowSpec(r, SamplingSpec(), 1, max_tokens, 1000) for r in recorders)
    return Entry(tuple(TokenId(1) for _ in range(prompt)), rows), recorders


def scheduler(clock: Clock, *, max_rows: int = 4, chunk: int = 8, max_kv_bytes: int | None = None) -> tuple[Scheduler, FakeGroup]:
    group = FakeGroup(chunk, Faults())
    return Scheduler(group, max_rows=max_rows, prefill_chunk=chunk, max_kv_bytes=max_kv_bytes), group


def run(plan: Scheduler, clock: Clock, ticks: int = 200) -> int:
    for n in range(ticks):
        clock.now += 1
        plan.check()
        if not plan.tick():
            return n
    raise AssertionError(f"not idle after {ticks} ticks")


def first(recorder: Recorder, call: str) -> float:
    return next(t for t, name in recorder.calls if name == call)


# -- random histories ------------------------------------------------------------------------------------------------


def test_random_histories_keep_every_promise(scale: int) -> None:
    rows = ends = refused = cancelled = failed = 0
    for seed in range(2000 * scale):
        case = Interleaving(seed)
        assert case.run() == [], f"seed {seed}"
        recorders = [r for s in case.submitted for r in s.recorders]
        rows += len(recorders)
        ends += sum(len(r.ends) for r in recorders)
        refused += case.refused
        cancelled += sum(r.ends == ["cancel"] for r in recorders)
        failed += sum(r.ends == ["fail"] for r in recorders)
    assert rows == ends
    assert min(refused, cancelled, failed) > 100 * scale, "the histories must reach refusals, cancels and failures"


def test_random_histories_over_a_method_that_delivers_only_at_the_end_keep_every_promise(scale: int) -> None:
    """G3: the same suite over the other kind of method."""
    late = 0
    for seed in range(400 * scale):
        case = Interleaving(seed, make_group=final_only_group)
        assert case.run() == [], f"seed {seed}"
        for row in (r for s in case.submitted for r in s.recorders if r.ends == ["finish"] and len(r.tokens) > 1):
            times = [t for t, call in row.calls if call == "deliver"]
            late += len(set(times)) == 1
    assert late > 50 * scale


class RevivesCancelled(Scheduler):
    """Tells a queued row that it was cancelled, and runs it all the same."""

    def _drop_cancelled(self) -> None:
        for item in self.queue:
            for spec in item.rows:
                if spec.consumer.cancelled:
                    notify(spec.consumer, spec.consumer.cancel)


class FinishesAfterCancel(Scheduler):
    """Sends Finished to a row that it has just cancelled."""

    def _drop_cancelled(self) -> None:
        gone = [spec for item in self.queue for spec in item.rows if spec.consumer.cancelled]
        super()._drop_cancelled()
        for spec in gone:
            spec.consumer.finish("stop")


class IgnoresCancel(Scheduler):
    """Looks at the flag only once a row has left the queue."""

    def _drop_cancelled(self) -> None:
        return


class IgnoresMaxRows(Scheduler):
    def _joinable(self) -> int:
        return 100

    def _admit(self) -> None:
        kept, self._max_rows = self._max_rows, 100
        super()._admit()
        self._max_rows = kept


class IgnoresMaxKvBytes(Scheduler):
    def _fits(self, entries: list[Entry]) -> bool:
        return True

    def _joinable(self) -> int:
        return self._max_rows - self.group.active


class NewestFirst(Scheduler):
    def _admit(self) -> None:
        self.queue.reverse()
        super()._admit()
        self.queue.reverse()


class OvertakesTheHead(Scheduler):
    """Lets a small request pass a large one that has to wait."""

    def _admit(self) -> None:
        super()._admit()
        if self.queue and not self.group.preparing:
            self.queue.rotate(-1)
            super()._admit()
            self.queue.rotate(1)


class ForgetsTheQueue(Scheduler):
    def fail_all(self, error: Exception) -> None:
        self.queue = deque()
        self.group.dispose(error)


class NeverRefuses(Scheduler):
    def submit(self, item: Entry) -> None:
        self.queue.append(item)


BROKEN = (
    RevivesCancelled,
    FinishesAfterCancel,
    IgnoresCancel,
    IgnoresMaxRows,
    IgnoresMaxKvBytes,
    NewestFirst,
    OvertakesTheHead,
    ForgetsTheQueue,
    NeverRefuses,
)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda c: c.__name__)
def test_a_broken_scheduler_is_caught(broken: type[Scheduler]) -> None:
    caught = sum(bool(Interleaving(seed, broken).run()) for seed in range(150))
    assert caught >= 3, f"{broken.__name__} was caught in {caught} of 150 histories"


def test_random_histories_of_the_real_group_keep_every_promise(scale: int) -> None:
    """The engine's own window group over a graph without weights; a K/V limit of 2, 4 or 10 slots of 64 positions."""
    ends: list[str] = []
    for seed in range(120 * scale):
        case = Interleaving(seed, make_group=stub_group, capacity_unit=26)
        assert case.run() == [], f"seed {seed}"
        ends += [end for s in case.submitted for r in s.recorders for end in r.ends]
    assert min(ends.count(kind) for kind in ("finish", "cancel", "fail")) > 50 * scale


@pytest.mark.parametrize("broken", [IgnoresCancel, IgnoresMaxRows, IgnoresMaxKvBytes], ids=lambda c: c.__name__)
def test_a_broken_scheduler_is_caught_with_the_real_group(broken: type[Scheduler]) -> None:
    caught = sum(bool(Interleaving(seed, broken, stub_group, capacity_unit=26).run()) for seed in range(40))
    assert caught >= 2, f"{broken.__name__} was caught in {caught} of 40 histories"


@pytest.mark.parametrize("geometry", [(1, False, 64), (4, True, 64), (4, True, 192), (8, True, 64)], ids=str)
def test_a_row_that_fits_the_byte_limit_exactly_never_outgrows_it(geometry: tuple[int, bool, int]) -> None:
    """Windows padded to a multiple must not carry the last positions of a row into the next capacity class."""
    from mlxnb_engine.methods.window import GroupLimits, WindowGroup
    from mlxnb_engine.state.spec import Geometry

    for total in range(geometry[2] - 10, geometry[2] + 5):
        for max_tokens, limit in ((1, 1000), (2, 1000), (30, 1000), (500, total)):
            clock = Clock()
            group = WindowGroup(StubGraph(), GroupLimits(128, "after", Geometry(*geometry), tight=True))  # type: ignore[arg-type]
            plan = Scheduler(group, max_rows=8, prefill_chunk=128, max_kv_bytes=group.bytes_for([total]))
            row = Recorder(clock, max_tokens)
            prompt = total - min(max_tokens, 30)
            plan.submit(Entry(tuple([TokenId(2)] * prompt), deque([RowSpec(row, SamplingSpec(), 1, max_tokens, limit)])))
            run(plan, clock, 1200)
            assert row.ends == ["finish"] and len(row.tokens) == min(max_tokens, limit - prompt + 1)


def test_short_rows_in_a_wide_shared_window_stay_within_the_byte_limit() -> None:
    from mlxnb_engine.methods.window import GroupLimits, WindowGroup

    for slots in range(2, 14):
        clock = Clock()
        group = WindowGroup(StubGraph(), GroupLimits(1024, "after", tight=True))  # type: ignore[arg-type]
        plan = Scheduler(group, max_rows=8, prefill_chunk=1024, max_kv_bytes=slots * group.bytes_for([1]) * 4)
        rows = [Recorder(clock, 3) for _ in range(5)]
        for row, prompt in zip(rows, (5, 200, 7, 130, 3), strict=True):
            plan.submit(Entry(tuple([TokenId(2)] * prompt), deque([RowSpec(row, SamplingSpec(), 1, 3, 1000)])))
        run(plan, clock)
        assert [row.ends for row in rows] == [["finish"]] * 5


def test_prepared_buffers_are_released_at_once_without_the_garbage_collector() -> None:
    """Slots and their rows refer to each other: the K/V of a row that joined by copy would wait for a collection, on any thread."""
    import gc

    import mlx.core as mx

    from mlxnb_engine.methods.window import GroupLimits, WindowGroup

    def round_trip(graph: StubGraph, group: WindowGroup, cancel: bool) -> None:
        clock = Clock()
        plan = Scheduler(group, max_rows=8, prefill_chunk=8192, max_kv_bytes=None)
        rows = [Recorder(clock, 4) for _ in range(3)]
        for row in rows:
            plan.submit(Entry(tuple([TokenId(2)] * 1500), deque([RowSpec(row, SamplingSpec(), 1, 4, 3000)])))
        plan.tick()
        if cancel:
            for row in rows[1:]:
                row.request_cancel()
        run(plan, clock)

    gc.collect()
    gc.disable()
    try:
        for faults in (Faults(), Faults(forward=frozenset(range(2, 100, 3))), Faults(prefill=frozenset(range(1, 100, 2)))):
            graph = StubGraph(faults)
            group = WindowGroup(graph, GroupLimits(8192, "after"))  # type: ignore[arg-type]
            for cancel in (False, True):
                before = mx.get_active_memory()
                for _ in range(6):
                    round_trip(graph, group, cancel)
                mx.synchronize()
                assert mx.get_active_memory() - before < 4096, (faults, cancel)
    finally:
        gc.enable()


def test_a_cancel_is_honoured_at_once_among_many_that_are_ready() -> None:
    for victim in range(8):
        clock = Clock()
        plan = Scheduler(stub_group(random.Random(1), 64, Faults()), max_rows=8, prefill_chunk=64, max_kv_bytes=None)
        rows = [Recorder(clock, 30) for _ in range(8)]
        for row in rows:
            plan.submit(Entry((TokenId(2), TokenId(2)), deque([RowSpec(row, SamplingSpec(), 1, 30, 1000)])))
        plan.tick()
        rows[victim].request_cancel()
        plan.tick()
        assert rows[victim].ends == ["cancel"]
        run(plan, clock)
        assert [len(r.tokens) for r in rows if r is not rows[victim]] == [30] * 7


def test_a_row_that_cannot_join_fails_alone() -> None:
    clock = Clock()
    plan = Scheduler(stub_group(random.Random(1), 64, Faults()), max_rows=8, prefill_chunk=64, max_kv_bytes=None)
    rows = [Recorder(clock, 5) for _ in range(3)]
    # The second has a prompt id beyond the scores' vocabulary and a penalty that would index with it.
    for row, ids, penalty in zip(rows, ((2, 2), (2, 99, 2), (2, 2)), (None, 1.5, None), strict=True):
        spec = SamplingSpec(repetition_penalty=penalty)
        plan.submit(Entry(tuple(map(TokenId, ids)), deque([RowSpec(row, spec, 1, 5, 1000)])))
    run(plan, clock)
    assert [r.ends for r in rows] == [["finish"], ["fail"], ["finish"]]
    assert isinstance(rows[1].error, ModelError)


# -- rules -----------------------------------------------------------------------------------------------------------


def test_admission_is_first_come_first_served_and_the_head_of_the_line_blocks() -> None:
    clock = Clock()
    plan, _ = scheduler(clock, max_kv_bytes=100)
    running, (r0,) = entry(clock, 30, 10)
    large, (r1,) = entry(clock, 60, 10)
    small, (r2,) = entry(clock, 2, 1)
    for item in (running, large, small):
        plan.submit(item)
    run(plan, clock)
    assert first(r0, "finish") < first(r1, "admit") <= first(r2, "admit"), "the small request must not overtake the large one"


def test_a_lone_request_starts_at_once() -> None:
    clock = Clock()
    plan, _ = scheduler(clock)
    item, (row,) = entry(clock, 3)
    plan.submit(item)
    run(plan, clock)
    assert first(row, "admit") == 1
    assert first(row, "deliver") <= 2


def test_a_late_request_joins_a_running_group_at_the_next_safe_point() -> None:
    clock = Clock()
    plan, _ = scheduler(clock)
    long, (r0,) = entry(clock, 3, 40)
    plan.submit(long)
    for _ in range(10):
        clock.now += 1
        plan.tick()
    late, (r1,) = entry(clock, 3, 5)
    plan.submit(late)
    run(plan, clock)
    assert first(r1, "admit") == 11
    assert first(r1, "deliver") == 12
    assert len(r0.tokens) == 40 and len(r1.tokens) == 5


def test_a_running_group_takes_a_step_between_the_prefill_windows_of_a_joiner() -> None:
    clock = Clock()
    plan, group = scheduler(clock, chunk=8)
    running, (r0,) = entry(clock, 1, 60)
    plan.submit(running)
    for _ in range(3):
        clock.now += 1
        plan.tick()
    joiner, (r1,) = entry(clock, 8 * 10 + 1, 2)
    plan.submit(joiner)
    before = len(r0.tokens)
    while not r1.tokens:
        clock.now += 1
        plan.tick()
    assert len(r0.tokens) - before >= 10, "ten windows of prefill must leave room for ten steps"
    assert group.windows >= 10


def test_short_prompts_share_one_prefill_window_and_long_ones_do_not() -> None:
    clock = Clock()
    plan, group = scheduler(clock, max_rows=8, chunk=16)
    short = [entry(clock, 5)[0] for _ in range(4)]
    for item in short:
        plan.submit(item)
    plan.tick()
    assert group.windows == 1
    run(plan, clock)
    windows = group.windows
    for item in (entry(clock, 20)[0], entry(clock, 20)[0]):
        plan.submit(item)
    run(plan, clock)
    assert group.windows - windows >= 4


def test_max_rows_binds_and_the_rest_waits_in_order() -> None:
    clock = Clock()
    plan, group = scheduler(clock, max_rows=3, chunk=64)
    rows = []
    for _ in range(10):
        item, (row,) = entry(clock, 2, 5)
        plan.submit(item)
        rows.append(row)
    seen = 0
    while not plan.idle:
        clock.now += 1
        plan.tick()
        seen = max(seen, group.active)
        assert group.active + group.waiting_rows <= 3
    assert seen == 3
    assert [first(r, "finish") for r in rows] == sorted(first(r, "finish") for r in rows)


def test_the_samples_of_one_request_share_a_prefill_and_wait_for_places() -> None:
    clock = Clock()
    plan, group = scheduler(clock, max_rows=2, chunk=64)
    item, rows = entry(clock, 9, 4, samples=5)
    plan.submit(item)
    run(plan, clock)
    assert group.windows == 1
    assert [len(r.tokens) for r in rows] == [4] * 5


def test_a_request_that_cannot_fit_even_alone_is_refused_with_a_way_out() -> None:
    clock = Clock()
    plan, _ = scheduler(clock, max_kv_bytes=20)
    item, (row,) = entry(clock, 18, 3)
    with pytest.raises(CapacityExceeded, match="max_kv_bytes") as caught:
        plan.submit(item)
    assert caught.value.hint
    assert row.calls == [] and plan.idle
    fits, _ = entry(clock, 17, 3)
    plan.submit(fits)
    run(plan, clock)


def test_an_absurd_number_of_waiting_requests_is_not_refused_without_a_limit() -> None:
    clock = Clock()
    plan, _ = scheduler(clock, max_rows=2, chunk=4096)
    item, (row,) = entry(clock, 4, 10**9)
    row.stop_at = 2
    plan.submit(item)
    run(plan, clock)
    assert row.ends == ["finish"] and len(row.tokens) == 2


def test_a_cancel_frees_the_place_for_the_next_in_line() -> None:
    clock = Clock()
    plan, _ = scheduler(clock, max_rows=1)
    endless, (r0,) = entry(clock, 2, 10**6)
    waiting, (r1,) = entry(clock, 2, 2)
    plan.submit(endless)
    plan.submit(waiting)
    for _ in range(20):
        plan.tick()
    assert not r1.calls
    r0.request_cancel()
    run(plan, clock)
    assert r0.ends == ["cancel"] and r1.ends == ["finish"]


def test_failing_everything_ends_queued_prepared_and_running_rows_once() -> None:
    clock = Clock()
    plan, _ = scheduler(clock, max_rows=2, chunk=2)
    rows = []
    for _ in range(6):
        item, (row,) = entry(clock, 9, 50)
        plan.submit(item)
        rows.append(row)
    for _ in range(7):
        plan.tick()
    plan.fail_all(ModelError("over"))
    plan.fail_all(ModelError("over again"))
    assert [r.ends for r in rows] == [["fail"]] * 6
    assert plan.idle and str(rows[0].error) == "over"


class BrokenRelease(FakeGroup):
    def dispose(self, error: Exception) -> None:
        super().dispose(error)
        raise RuntimeError("the buffers would not go")


def test_a_group_that_fails_to_release_does_not_keep_the_queue_waiting() -> None:
    clock = Clock()
    group = BrokenRelease(8, Faults())
    plan = Scheduler(group, max_rows=1, prefill_chunk=8, max_kv_bytes=None)
    rows = []
    for _ in range(4):
        item, (row,) = entry(clock, 2, 50)
        plan.submit(item)
        rows.append(row)
    plan.tick()
    with pytest.raises(RuntimeError, match="would not go"):
        plan.fail_all(ModelError("over"))
    assert [r.ends for r in rows] == [["fail"]] * 4


class Overfull(FakeGroup):
    @property
    def active(self) -> int:
        return 9

    @property
    def kv_bytes(self) -> int:
        return 10**6


@pytest.mark.parametrize("limits", [{"max_rows": 8, "max_kv_bytes": None}, {"max_rows": 9, "max_kv_bytes": 10**5}])
def test_check_raises_when_a_limit_is_broken(limits: dict[str, int | None]) -> None:
    plan = Scheduler(Overfull(8, Faults()), prefill_chunk=8, **limits)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="max_"):
        plan.check()


def test_the_harness_is_deterministic() -> None:
    a, b = Interleaving(7), Interleaving(7)
    a.run(), b.run()
    assert [[r.calls for r in s.recorders] for s in a.submitted] == [[r.calls for r in s.recorders] for s in b.submitted]
    assert random.Random(7).random() != random.Random(8).random()
