"""What the engine's tests share: a byte tokenizer, recording consumers, a group of fake rows, faults, and checks of event logs.

Nothing here loads MLX when imported.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny import EOS, IM_END

from mlxnb_engine import config
from mlxnb_engine import events as ev
from mlxnb_engine.admission import Entry, RowSpec, notify
from mlxnb_engine.client import LocalClient
from mlxnb_engine.delivery import Drawn
from mlxnb_engine.detokenizer import IncrementalDecoder
from mlxnb_engine.errors import CapacityExceeded, ModelError
from mlxnb_engine.scheduler import Group, Scheduler
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, FinishReason, RequestId, SamplingSpec, TokenId

# -- event logs ------------------------------------------------------------------------------------------------------


def log_problems(events: Sequence[ev.Event]) -> list[str]:
    """R2: what is wrong with the whole log of a row that ended; empty if nothing is."""
    problems = [f"event {i} has seq {e.seq}" for i, e in enumerate(events) if e.seq != i]
    ends = [i for i, e in enumerate(events) if e.terminal]
    if len(ends) != 1:
        problems.append(f"{len(ends)} terminal events")
    if ends and ends[0] != len(events) - 1:
        problems.append(f"{len(events) - 1 - ends[0]} events after the terminal one")
    times = [e.t for e in events]
    if times != sorted(times):
        problems.append("time runs backwards")
    if len([e for e in events if isinstance(e, ev.Started)]) > 1:
        problems.append("started twice")
    shown = "".join(e.text for e in events if isinstance(e, ev.Tokens))
    if ends and shown != getattr(events[ends[0]], "text"):  # noqa: B009 (only terminal events have it)
        problems.append("the deltas do not add up to the terminal text")
    return problems


def token_ids(events: Iterable[ev.Event]) -> list[int]:
    return [token.id for e in events if isinstance(e, ev.Tokens) for token in e.tokens]


# -- text ------------------------------------------------------------------------------------------------------------

BYTE_EOS = 256


class ByteTokenizer:
    """Token i is the byte i; 256 ends the text. What `Delivery` needs of a tokenizer."""

    eos_ids = frozenset({BYTE_EOS})

    def stream(self, *, start: bool = False) -> IncrementalDecoder:
        return IncrementalDecoder(lambda i: bytes([i]) if i < 256 else b"", self.eos_ids)

    def token_text(self, token: int) -> str:
        return bytes([token]).decode("utf-8", "replace") if token < 256 else ""


# -- scheduling on fakes -----------------------------------------------------------------------------------------------


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A row's consumer that writes down every call. stop_at, raise_at: after this many tokens."""

    def __init__(self, clock: Clock, max_tokens: int, stop_at: int | None = None, raise_at: int | None = None) -> None:
        self.clock, self.max_tokens, self.stop_at, self.raise_at = clock, max_tokens, stop_at, raise_at
        self.calls: list[tuple[float, str]] = []
        self.tokens: list[int] = []
        self.cancel_requested_at: float | None = None
        self.error: BaseException | None = None

    def note(self, call: str) -> None:
        self.calls.append((self.clock(), call))

    @property
    def cancelled(self) -> bool:
        return self.cancel_requested_at is not None

    def request_cancel(self) -> None:
        if self.cancel_requested_at is None:
            self.cancel_requested_at = self.clock()

    def admit(self) -> None:
        self.note("admit")

    def prefilled(self, done: int, total: int) -> None:
        self.note("prefilled")

    def deliver(self, token: Drawn) -> FinishReason | None:
        self.note("deliver")
        self.tokens.append(token.id)
        if len(self.tokens) == self.raise_at:
            raise RuntimeError("this consumer broke")
        if len(self.tokens) == self.stop_at:
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        self.note("finish")

    def cancel(self) -> None:
        self.note("cancel")

    def fail(self, error: BaseException) -> None:
        self.error = error.with_traceback(None)  # its frames hold the group
        self.note("fail")

    ENDS = ("finish", "cancel", "fail")

    @property
    def ends(self) -> list[str]:
        return [call for _, call in self.calls if call in self.ENDS]

    @property
    def done(self) -> bool:
        return bool(self.ends)

    @property
    def ended_at(self) -> float:
        return next(t for t, call in self.calls if call in self.ENDS)

    def problems(self) -> list[str]:
        names = [call for _, call in self.calls]
        if len(self.ends) != 1:
            return [f"{len(self.ends)} terminal notifications: {self.ends}"]
        if names[-1] != self.ends[0]:
            return [f"{names[-1]} after {self.ends[0]}"]
        return []


@dataclass(eq=False)
class FakeRow:
    spec: RowSpec
    bytes: int
    ended: bool = False


@dataclass(frozen=True)
class Faults:
    """Steps (counted over prefill windows and decode steps apart) that raise, and draws without a finite score."""

    forward: frozenset[int] = frozenset()
    prefill: frozenset[int] = frozenset()
    nan: frozenset[int] = frozenset()


class FakeGroup:
    """The membership rules of a group without arrays: one byte of K/V per position."""

    def __init__(self, chunk: int, faults: Faults) -> None:
        self.chunk, self.faults = chunk, faults
        self.rows: list[FakeRow] = []
        self.preparation: list[Entry] | None = None
        self.ready: deque[Entry] = deque()
        self.steps = self.windows = 0

    @property
    def active(self) -> int:
        return len(self.rows)

    @property
    def preparing(self) -> bool:
        return self.preparation is not None

    @property
    def staged(self) -> list[Entry]:
        return [*(self.preparation or []), *self.ready]

    @property
    def waiting_rows(self) -> int:
        return sum(len(e.rows) for e in self.staged)

    @property
    def kv_bytes(self) -> int:
        return sum(r.bytes for r in self.rows) + sum(int(e.state) for e in self.staged)

    shares_prefill = True

    def bytes_for(self, tokens: Sequence[int]) -> int:
        return sum(tokens)

    growth = bytes_for

    def can_claim(self, entry: Entry) -> bool:
        return True

    def claim(self, entry: Entry, followers: Sequence[Entry]) -> None:
        """Nothing is shared here."""

    def prepare(self, entries: list[Entry]) -> None:
        assert self.preparation is None
        for entry in entries:
            entry.state = entry.final_tokens
            for spec in entry.rows:
                notify(spec.consumer, spec.consumer.admit)
        self.preparation = entries

    def advance_preparation(self) -> None:
        entries = self.preparation
        if entries is None:
            return
        for entry in list(entries):
            entry.drop_cancelled()
            if not entry.rows:
                entries.remove(entry)
        if not entries:
            self.preparation = None
            return
        self.windows += 1
        if self.windows in self.faults.prefill:
            self.preparation = None
            for entry in entries:
                entry.fail(ModelError("prefill failed"))
            return
        for entry in entries:
            entry.done = min(entry.target, entry.done + max(1, self.chunk // len(entries)))
        if all(e.done >= e.target for e in entries):
            self.ready.extend(entries)
            self.preparation = None

    def next_ready(self) -> Entry | None:
        for entry in list(self.ready):
            entry.drop_cancelled()
            if not entry.rows:
                self.ready.remove(entry)
        return self.ready[0] if self.ready else None

    def join_ready(self, places: int) -> int:
        entry, joined = self.next_ready(), 0
        while entry is not None and entry.rows and joined < places:
            spec = entry.rows.popleft()
            if not entry.rows:
                self.ready.remove(entry)
            self.rows.append(FakeRow(spec, entry_bytes(entry, spec)))
            joined += 1
        return joined

    def advance(self) -> bool:
        for row in self.rows:
            if not row.ended and row.spec.consumer.cancelled:
                row.ended = True
                notify(row.spec.consumer, row.spec.consumer.cancel)
        self.rows = [row for row in self.rows if not row.ended]
        if not self.rows:
            return False
        self.steps += 1
        if self.steps in self.faults.forward:
            self._fail_rows(ModelError("forward failed"))
            return True
        for i, row in enumerate(self.rows):
            self._draw(row, poisoned=i == 0 and self.steps in self.faults.nan)
        return True

    def _draw(self, row: FakeRow, poisoned: bool) -> None:
        consumer = row.spec.consumer
        try:
            if poisoned:
                raise ModelError("no finite score")
            reason = consumer.deliver(Drawn(TokenId(self.steps % 7)))
        except Exception as error:
            failure = error
            row.ended = True
            notify(consumer, lambda: consumer.fail(failure))
            return
        if reason is not None:
            row.ended = True
            notify(consumer, lambda: consumer.finish(reason))

    def _fail_rows(self, error: Exception) -> None:
        rows, self.rows = self.rows, []
        for row in rows:
            if not row.ended:
                notify(row.spec.consumer, lambda r=row: r.spec.consumer.fail(error))

    def dispose(self, error: Exception) -> None:
        self._fail_rows(error)
        staged, self.preparation = self.staged, None
        self.ready.clear()
        for entry in staged:
            entry.fail(error)

    def check(self) -> None:
        if any(not e.rows for e in self.ready):
            raise RuntimeError("an entry without rows is ready")


class FinalOnlyGroup(FakeGroup):
    """The other kind of method: it works for as many steps as its row has tokens, and delivers them all at the last one."""

    def __init__(self, chunk: int, faults: Faults) -> None:
        super().__init__(chunk, faults)
        self._worked: dict[int, int] = {}

    def _draw(self, row: FakeRow, poisoned: bool) -> None:
        done = self._worked.get(id(row), 0) + 1
        self._worked[id(row)] = done
        if poisoned or done >= row.spec.max_tokens:
            del self._worked[id(row)]
            for _ in range(done):
                super()._draw(row, poisoned)
                if row.ended:
                    return


def entry_bytes(entry: Entry, spec: RowSpec) -> int:
    return min(len(entry.ids) + spec.max_tokens, spec.limit)


# -- random interleavings ------------------------------------------------------------------------------------------------

MakeGroup = Callable[[random.Random, int, Faults], Group]
MakeScheduler = Callable[..., Scheduler]


def fake_group(rng: random.Random, chunk: int, faults: Faults) -> Group:
    return FakeGroup(chunk, faults)


def final_only_group(rng: random.Random, chunk: int, faults: Faults) -> Group:
    return FinalOnlyGroup(chunk, faults)


def fake_ids(rng: random.Random, length: int) -> tuple[TokenId, ...]:
    return tuple(TokenId(rng.randrange(16)) for _ in range(length))


@dataclass(eq=False)
class Submitted:
    entry: Entry
    recorders: list[Recorder]


@dataclass
class Interleaving:
    """One random history of submits, cancels, failures and ticks, and everything that was wrong with it.

    check_cancel: each cancel is honoured by the tick after it. A tick is one unit of virtual time.
    """

    seed: int
    make_scheduler: MakeScheduler = Scheduler
    make_group: MakeGroup = fake_group
    make_ids: Callable[[random.Random, int], tuple[TokenId, ...]] = fake_ids
    capacity_unit: int = 1
    problems: list[str] = field(default_factory=list)
    submitted: list[Submitted] = field(default_factory=list)
    refused: int = 0

    def run(self) -> list[str]:
        rng = self.rng = random.Random(self.seed)
        self.clock = Clock()
        self.max_rows = rng.choice((1, 2, 3, 4, 8))
        self.max_bytes = rng.choice((None, None, 40, 90, 200))
        if self.max_bytes is not None:
            self.max_bytes *= self.capacity_unit
        chunk = rng.choice((4, 8, 16))
        self.faults = Faults(self._steps(), self._steps(), self._steps())
        self.group = self.make_group(rng, chunk, self.faults)
        self.scheduler = self.make_scheduler(self.group, max_rows=self.max_rows, prefill_chunk=chunk, max_kv_bytes=self.max_bytes)
        try:
            self._history()
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        return self.problems

    def _steps(self) -> frozenset[int]:
        return frozenset(self.rng.sample(range(1, 30), 2)) if self.rng.random() < 0.3 else frozenset()

    def _history(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(10, 40)):
            choice = rng.random()
            if choice < 0.35:
                self._submit()
            elif choice < 0.5:
                self._cancel()
            else:
                for _ in range(rng.randrange(1, 4)):
                    self._tick()
        if rng.random() < 0.15:
            self.scheduler.fail_all(ModelError("shut down"))
        else:
            ticks = 0
            while not self.scheduler.idle:
                self._tick()
                ticks += 1
                if ticks > 4000:
                    self.problems.append("not idle after 4000 ticks")
                    return
            self._tick()
            self.scheduler.check()
        self._judge()

    def _submit(self) -> None:
        rng = self.rng
        samples = rng.choice((1, 1, 1, 2, 3, 9))
        ids = self.make_ids(rng, rng.choice((1, 2, 5, 9, 20)))
        recorders, rows = [], deque[RowSpec]()
        for _ in range(samples):
            max_tokens = rng.choice((1, 2, 5, 12))
            recorder = Recorder(
                self.clock,
                max_tokens,
                stop_at=rng.choice((None, None, 1, 3)),
                raise_at=rng.choice((None, None, None, None, 2)),
            )
            recorders.append(recorder)
            rows.append(RowSpec(recorder, SamplingSpec(), 1, max_tokens, 1000))
        entry = Entry(ids, rows)
        need = self.group.bytes_for([entry.final_tokens]) * (1 if samples == 1 else 2)
        must_refuse = self.max_bytes is not None and need > self.max_bytes
        try:
            self.scheduler.submit(entry)
        except CapacityExceeded:
            self.refused += 1
            if not must_refuse:
                self.problems.append(f"refused {need} bytes of {self.max_bytes}")
            if any(r.calls for r in recorders):
                self.problems.append("a refused row was notified")
            return
        if must_refuse:
            self.problems.append(f"accepted {need} bytes of {self.max_bytes}")
        self.submitted.append(Submitted(entry, recorders))

    def _cancel(self) -> None:
        live = [r for s in self.submitted for r in s.recorders if not r.done]
        if live:
            self.rng.choice(live).request_cancel()

    def _tick(self) -> None:
        self.clock.now += 1
        self.scheduler.tick()
        self.scheduler.check()
        if self.group.active > self.max_rows:
            self.problems.append(f"{self.group.active} rows run, max_rows is {self.max_rows}")
        running = {id(row.spec.consumer) for row in self.group.rows}  # type: ignore[attr-defined]
        prepared = sum(
            self._admitted(s) and any(not r.done for r in s.recorders) and not any(r.tokens or id(r) in running for r in s.recorders)
            for s in self.submitted
        )
        if self.group.active + prepared > self.max_rows:
            self.problems.append(f"{self.group.active} rows run and {prepared} are prepared, max_rows is {self.max_rows}")
        if self.max_bytes is not None and self.group.kv_bytes > self.max_bytes:
            self.problems.append(f"{self.group.kv_bytes} bytes of K/V, the limit is {self.max_bytes}")
        for recorder in (r for s in self.submitted for r in s.recorders):
            if recorder.cancel_requested_at is not None and not recorder.done and self.clock.now > recorder.cancel_requested_at:
                self.problems.append("a cancel was not honoured by the next tick")

    @staticmethod
    def _admitted(submitted: Submitted) -> bool:
        return any(call == "admit" for r in submitted.recorders for _, call in r.calls)

    def _judge(self) -> None:
        for item in self.submitted:
            for recorder in item.recorders:
                self.problems += recorder.problems()
        admitted = [self._admitted_at(s) for s in self.submitted if self._admitted(s)]
        if admitted != sorted(admitted):
            self.problems.append("requests were admitted out of order")
        if self.group.active or self.group.waiting_rows or self.group.kv_bytes or self.scheduler.queue:
            self.problems.append("something is left behind at idle")

    @staticmethod
    def _admitted_at(submitted: Submitted) -> float:
        return min(t for r in submitted.recorders for t, call in r.calls if call == "admit")



# -- a real group without a model ----------------------------------------------------------------------------------------

POISON = 15


class StubGraph:
    """Scores without weights: the next token is the last one plus 2, modulo 16, and after token 15 no score is finite.

    One layer of real K/V slots with two float32 numbers a position. So rows that begin even never end by themselves, and rows that
    begin odd fail by NaN. faults: forwards (counted) that raise.
    """

    vocab_size = 16

    def __init__(self, faults: Faults = Faults()) -> None:
        from mlxnb_engine.state.families import Family
        from mlxnb_engine.types import StateSpec

        self.specs = (StateSpec("full", 1, 1, 1, "float32"),)
        self.family, self.wide_masks = Family(split=True), False
        self.faults, self.forwards, self.feeds = faults, 0, 0

    def forward(self, ids: Any, caches: Sequence[Any], positions: Sequence[int], multiple: int = 1) -> Any:
        import mlx.core as mx

        from mlxnb_engine.graph import Scores

        self.forwards += 1
        if self.forwards in self.faults.forward:
            raise RuntimeError("forward failed")
        self._write(ids, caches)
        last = ids.reshape(-1)[mx.array(list(positions), mx.int32)]
        scores = mx.where(mx.arange(16)[None] == ((last + 2) % 16)[:, None], 5.0, 0.0)
        return Scores(mx.where((last == POISON)[:, None], mx.array(float("nan")), scores), None)

    def feed(self, ids: Any, caches: Sequence[Any]) -> None:
        self.feeds += 1
        if self.feeds in self.faults.prefill:
            raise RuntimeError("prefill failed")
        self._write(ids, caches)

    @staticmethod
    def _write(ids: Any, caches: Sequence[Any]) -> None:
        import mlx.core as mx

        state = ids.astype(mx.float32)[:, None, :, None]
        caches[0].update_and_fetch(state, state)

    def projection_shapes(self) -> set[tuple[int, int]]:
        return {(16, 16)}


def stub_group(rng: random.Random, chunk: int, faults: Faults) -> Group:
    """The engine's own window group over `StubGraph`, in either submission order, with loose or tight buffers."""
    from mlxnb_engine.methods.window import GroupLimits, WindowGroup

    limits = GroupLimits(chunk, rng.choice(("before", "after")), tight=True)
    return WindowGroup(StubGraph(faults), limits)  # type: ignore[arg-type]


# -- a real engine over a tiny model ---------------------------------------------------------------------------------------

NO_EOS = ((EOS, -100.0), (IM_END, -100.0))
"""Logit biases that keep the tiny model from ending a row by itself."""

WAIT_S = 60.0


def client_of(model: Path, cache: Path, **settings: Any) -> LocalClient:
    return LocalClient(config.resolve({}, {"blas": "none", "model": str(model), "cache_dir": cache, "offline": True, **settings}))


_numbers = itertools.count()


def ask(text: str, max_tokens: int = 8, *, model: str = "", endless: bool = True, **fields: Any) -> CompletionRequest:
    """A raw-text request. endless: it never draws an end of sequence. Fields of the sampling spec may be given directly."""
    names = set(SamplingSpec.__dataclass_fields__)
    sampling = {k: fields.pop(k) for k in list(fields) if k in names}
    if endless:
        sampling.setdefault("logit_bias", NO_EOS)
    identity = RequestId(f"q{next(_numbers)}")
    return CompletionRequest(identity, model, text=text, max_tokens=max_tokens, sampling=SamplingSpec(**sampling), **fields)


def finish(generations: Iterable[Generation]) -> list[list[ev.Event]]:
    """Wait for each row to end; its whole log, checked."""
    logs = []
    for row in generations:
        assert row.wait(WAIT_S) is not None, f"{row.id} never ended: {row.read()[-3:]}"
        log = row.read()
        assert log_problems(log) == [], row.id
        logs.append(log)
    return logs


def ids_of(generation: Generation) -> list[int]:
    return token_ids(generation.read())


def answer_ids(client: LocalClient, request: CompletionRequest) -> list[int]:
    """The ids of a request's first row, which must finish."""
    (log, *_) = finish(client.submit(request))
    assert isinstance(log[-1], ev.Finished), log[-1]
    return token_ids(log)


def engine_of(client: LocalClient) -> Any:
    assert client._engine is not None
    return client._engine


def on_engine(client: LocalClient, action: Callable[[], Any]) -> Any:
    """Run this on the engine thread, between two turns, and give its result."""
    answer: Future[Any] = Future()

    def act() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:
            answer.set_exception(error)

    engine_of(client)._post(act, None)
    return answer.result(WAIT_S)


def residents(client: LocalClient) -> list[Any]:
    return [lane.resident for lane in engine_of(client)._lanes if lane.resident is not None]


def settle(client: LocalClient) -> Any:
    """Wait until the engine is idle; its one resident, whose accounts must add up."""
    for _ in range(int(WAIT_S / 0.005)):
        if on_engine(client, lambda: all(lane.idle for lane in engine_of(client)._lanes)):
            break
        time.sleep(0.005)
    else:
        raise AssertionError(f"never idle: {client.status()}")

    def audit() -> None:
        for resident in residents(client):
            resident.scheduler.check()
            group = resident.group
            left = (group.active, group.waiting_rows, len(group.ready), len(group.slots.rows()), group.kv_bytes)
            if any(left) or resident.scheduler.queue:
                raise RuntimeError(f"left behind at idle: {left}")

    on_engine(client, audit)
    found = residents(client)
    return found[0] if found else None
