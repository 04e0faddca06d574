"""The engine: one thread that owns MLX, a mailbox, and a turn for each resident model.

    Starting -> Ready -> Stopping -> Stopped        any failure of the loop itself: -> Dead

Other threads post closures to the mailbox, read generations, and read `status`. Downloading, hashing and tokenizing run on
threads of their own, which never touch an array. Importing this file does not load MLX: the BLAS library goes first.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from . import blas
from . import events as ev
from .config import RuntimeConfig
from .errors import Cancelled, EngineDead, MlxnbError, ModelError, RequestError
from .locate import canonical
from .session import Generation
from .types import PreparedPrompt

if TYPE_CHECKING:
    from .binding import Backend, Resident
    from .cache.tree import PrefixCache
    from .loader import Located
    from .methods.reuse import Shared
    from .resume import Resumes

T = TypeVar("T")
State = Literal["starting", "ready", "stopping", "stopped", "dead"]
_LONG_TEXT = 1_000_000
_PROGRESS_EVERY_S = 0.2
_PREDECESSOR_S = 10.0
_CLOSE_S = 2.0
"""An engine that died by itself saves what it has kept for so long."""
_RESUMES_S = 0.5
"""What the disk takes in this time of the runs that a stop interrupts can be resumed."""
_CHECK_SHARE = 100
"""The prefix cache is checked for at most one part in so many of the time."""


@dataclass(frozen=True, slots=True)
class Work:
    """The rows of one request, or (load_only) the log of a bare load."""

    generations: list[Generation]
    load_only: bool = False

    def alive(self) -> bool:
        return any(not g.done for g in self.generations)

    def settle_cancelled(self) -> None:
        """End the rows whose reader asked to stop; the engine holds nothing for them yet."""
        for generation in self.generations:
            if generation.cancel_requested:
                generation.fail(Cancelled("The request was cancelled."))

    def fail(self, error: BaseException) -> None:
        for generation in self.generations:
            generation.fail(error)


@dataclass(eq=False, slots=True)
class Lane:
    """One model by name: being located, waiting for room, or resident."""

    key: str
    name: str
    dtype: str | None
    work: list[Work] = field(default_factory=list)
    located: Located | None = None
    source: Located | None = None
    resident: Resident | None = None
    preparing: list[Work] = field(default_factory=list)
    last_used: float = 0.0
    progress: tuple[str, int, int] = ("locating", 0, 0)

    @property
    def idle(self) -> bool:
        return not self.work and not self.preparing and (self.resident is None or self.resident.scheduler.idle)


class Engine:
    """See the module. Any thread may call `submit`, `load`, `unload`, `status`, `wake` and `stop`.

    Owner of all MLX work: its own thread. Lifetime: one start; a dead or stopped engine is replaced, not revived.
    Invariant: every generation handed to `submit` gets exactly one terminal event, whatever happens to the thread.
    """

    def __init__(self, config: RuntimeConfig, predecessor: Engine | None = None) -> None:
        """predecessor: a dead or stopping engine, whose last MLX call is awaited before the first one here."""
        self.config = config
        self.state: State = "starting"
        self.error: BaseException | None = None
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lanes: list[Lane] = []
        self._backend: Backend | None = None
        self._shared: Shared | None = None
        self._resumes: Resumes | None = None
        self._notices: list[str] = []
        self._checked = (float("-inf"), 0.0)
        self._memory: Callable[[], dict[str, int]] | None = None
        self._live: list[Work] = []
        self._last_advance = time.monotonic()
        self._stop_asked = threading.Event()
        self._stop_by: float | None = None
        self._predecessor: threading.Thread | None = predecessor._thread if predecessor is not None else None
        self._text_jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread = threading.Thread(target=self._run, name="mlxnb-engine", daemon=True)
        self._text_thread = threading.Thread(target=self._run_text_jobs, name="mlxnb-text", daemon=True)
        self._thread.start()
        self._text_thread.start()

    # -- any thread --------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.state in ("starting", "ready") and not self._stop_asked.is_set() and self._thread.is_alive()

    def submit(self, name: str, dtype: str | None, work: Work) -> None:
        for generation in work.generations:
            generation.on_cancel(self.wake)
        self._post(lambda: self._accept(name, dtype, work), work)

    def unload(self, name: str | None) -> list[str]:
        """Drop idle resident models; blocks until done. Raises RequestError if the named one is in use or not resident."""
        return self.ask(lambda: self._unload(name))

    @property
    def shared(self) -> Shared | None:
        """The prefix cache and its disk, once the first model is loaded; None if it is off."""
        return self._shared

    def ask(self, act: Callable[[], T]) -> T:
        """Have the engine thread do this between two advances, and wait for what comes of it. Raises what it raises, or EngineDead."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(act())
            except Exception as error:
                answer.set_exception(error)

        self._post(run, None)
        while not wait([answer], 1.0).done:
            if not self._thread.is_alive() and not answer.done():
                raise self._obituary()
        return answer.result()

    def wake(self) -> None:
        self._mail.put(lambda: None)

    def stop(self, timeout_s: float) -> bool:
        """Cancel everything, save what is kept, and end the thread within timeout_s; whether it ended."""
        self._stop_by = time.monotonic() + timeout_s
        self._stop_asked.set()
        if self.state in ("starting", "ready"):
            self.state = "stopping"
        self.wake()
        self._text_jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def status(self) -> dict[str, Any]:
        """Plain numbers, each right by itself; no step is waited for. Those of the cache are read under its lock, which is held briefly."""
        lanes = list(self._lanes)
        return {
            "state": self.state,
            "error": str(self.error) if self.error else None,
            "backend": self._backend.describe() if self._backend else None,
            "models": [resident.describe() for resident in [lane.resident for lane in lanes] if resident is not None],
            "loading": [
                {"name": lane.name, "phase": lane.progress[0], "done": lane.progress[1], "total": lane.progress[2]}
                for lane in lanes
                if lane.resident is None
            ],
            "ended": [end for lane in lanes if lane.resident is not None for end in lane.resident.ended],
            "memory": self._memory() if self._memory else None,
            "cache": self._shared.cache.stats() if self._shared is not None else None,
            "notices": list(self._notices),
            "last_advance_s": round(time.monotonic() - self._last_advance, 3),
            "limits": {
                "max_rows": self.config.max_rows,
                "max_kv_bytes": self.config.max_kv_bytes,
                "context_limit": self.config.context_limit,
                "prefill_chunk": self.config.prefill_chunk,
                "resident_models": self.config.resident_models,
            },
        }

    def describe_cache(self, limit: int) -> dict[str, Any] | None:
        """What the prefix cache keeps in memory: `stats`, `tree` (the `limit` most recently used, `PrefixCache.describe_tree`) and
        `models`, their names by namespace (hex). None without a cache."""
        shared = self._shared
        if shared is None:
            return None
        models = {namespace.hex(): label for namespace, label in dict(shared.labels).items()}
        return {"stats": shared.cache.stats(), "tree": shared.cache.describe_tree(limit), "models": models}

    def cached_text(self, namespace: str, ids: Sequence[int]) -> str | None:
        """The text of these ids, control tokens shown, by the model that this namespace (hex) is of; None if that is not loaded."""
        name = self._shared.labels.get(bytes.fromhex(namespace)) if self._shared is not None else None
        residents = [lane.resident for lane in list(self._lanes)]
        found = next((one for one in residents if one is not None and one.info.name == name), None)
        if found is None:
            return None
        words = found.tokenizer
        runs = groupby(ids, key=words.special_ids.__contains__)
        return "".join("".join(map(words.token_text, run)) if special else words.decode(run) for special, run in runs)

    def _post(self, action: Callable[[], None], work: Work | None) -> None:
        if not self.alive:
            if work is None:
                raise self._obituary()
            work.fail(self._obituary())
            return
        self._mail.put(action)
        if work is not None and not self.alive:
            # It stopped between the check and the put: nobody would read the mailbox.
            work.fail(self._obituary())

    def _obituary(self) -> MlxnbError:
        """Why no request can be served: the typed error that ended the engine, if that is what happened."""
        if isinstance(self.error, MlxnbError):
            return self.error
        return EngineDead("The engine has stopped.", "Run the cell again to start a fresh one.")

    # -- engine thread: the loop ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._predecessor is not None:
                self._predecessor.join(_PREDECESSOR_S)
                self._predecessor = None
            choice = blas.preload(self.config.blas)
            self._start(choice)
            self.state = "ready"
            rest_s: float | None = None
            while not self._stop_asked.is_set():
                self._read_mail(rest_s)
                rest_s = self._turn()
        except BaseException as error:
            self.error = error
            self.state = "dead"
            _forget_locals(error)
        finally:
            self._finish()

    def _start(self, choice: blas.BlasChoice) -> None:
        try:
            from . import binding
        except ImportError as error:
            if (error.name or "mlx").split(".")[0] != "mlx":
                raise  # a fault of ours or of another library, not a missing backend
            raise ModelError(
                f"No MLX backend is installed ({error}).", "Install one: pip install 'mlxnb[cpu]' or 'mlxnb[cuda13]'."
            ) from error
        self._backend = binding.start_backend(self.config, choice)
        self._memory = binding.memory

    def _read_mail(self, rest_s: float | None) -> None:
        """Do what others asked for; wait so long for the first, None: until there is one."""
        try:
            action = self._mail.get(timeout=rest_s)
            while True:
                action()
                action = self._mail.get_nowait()
        except queue.Empty:
            return

    def _turn(self) -> float | None:
        """One bounded advance for each resident model; in how many seconds the next is due, None if there is nothing to do."""
        busy = False
        for lane in list(self._lanes):
            self._settle(lane)
            if lane.resident is None:
                self._try_bind(lane)
            elif lane.resident.scheduler.tick():
                busy = True
                lane.last_used = time.monotonic()
            if lane.resident is not None:
                lane.resident.note()
        self._last_advance = time.monotonic()
        if any(lane.located for lane in self._lanes) and any(lane.resident and lane.idle for lane in self._lanes):
            busy = True  # a model waits for the room that one gave up in this turn
        if not busy:
            self._live = [work for work in self._live if work.alive()]
            self._check()
        if self._shared is None or self._shared.disk is None:
            return 0.0 if busy else None
        rest_s = self._shared.disk.advance(busy)
        # Rows that wait for nothing but the disk are no reason to turn; it wakes the engine when it has something.
        waits = busy and rest_s is not None and all(r.scheduler.waiting or r.scheduler.idle for r in self._residents())
        return rest_s if waits or not busy else 0.0

    def _residents(self) -> list[Resident]:
        return [lane.resident for lane in self._lanes if lane.resident is not None]

    def _check(self) -> None:
        from . import binding

        for lane in self._lanes:
            if lane.resident is not None:
                lane.resident.scheduler.check()
        if self._shared is not None:
            self._check_cache(self._shared.cache)
        binding.trim_memory()

    def _check_cache(self, cache: PrefixCache) -> None:
        """It walks every block, so not at each of many short rests in a row."""
        started, (last, cost_s) = time.monotonic(), self._checked
        if started - last >= _CHECK_SHARE * cost_s:
            cache.check()
            self._checked = (started, time.monotonic() - started)

    def _finish(self) -> None:
        """Give every live row its terminal event, drop every array, make the last MLX call."""
        died = self.error
        end: MlxnbError = Cancelled("The engine was stopped.")
        if isinstance(died, MlxnbError):
            end = died
        elif died is not None:
            end = EngineDead(f"The engine failed: {type(died).__name__}: {died}", "Run the cell again; a fresh engine starts.")
        if self.state != "dead":
            self.state = "stopped"
        # Requests posted while the loop ended register themselves, to be failed with the rest.
        while not self._mail.empty():
            self._attempt(lambda: self._read_mail(0.0))
        for lane in self._lanes:
            resident, lane.resident = lane.resident, None
            if resident is not None:
                self._attempt(lambda r=resident: r.close(end))  # type: ignore[misc]
        resident = None
        if self._resumes is not None:
            self._attempt(lambda resumes=self._resumes: resumes.close(_RESUMES_S))  # type: ignore[misc]
        if self._shared is not None:
            within_s = _CLOSE_S if self._stop_by is None else self._stop_by - time.monotonic()
            self._attempt(lambda shared=self._shared: shared.close(within_s))  # type: ignore[misc]
        for work in self._live:
            work.fail(end)
        self._lanes.clear()
        self._text_jobs.put(None)
        if self._backend is not None:
            from . import binding

            self._attempt(binding.stop_backend)

    def _attempt(self, release: Callable[[], None]) -> None:
        """One release of many: whatever it raises, the others follow. The first error is kept for `status`."""
        try:
            release()
        except BaseException as error:
            _forget_locals(error)
            self.error = self.error or error

    # -- engine thread: models -----------------------------------------------------------------------------------------

    def _accept(self, name: str, dtype: str | None, work: Work) -> None:
        self._live = [other for other in self._live if other.alive()] + [work]
        if not self.alive:
            return  # _finish fails it
        lane = self._lane(canonical(name, self.config), name, dtype)
        lane.last_used = time.monotonic()
        if lane.resident is None:
            lane.work.append(work)
        else:
            self._dispatch(lane, lane.resident, work)

    def _lane(self, key: str, name: str, dtype: str | None) -> Lane:
        """The lane of this model in this dtype; a new one if its files were replaced and nobody uses the old weights."""
        for lane in self._lanes:
            if (lane.key, lane.dtype) != (key, dtype):
                continue
            if lane.source is None or not lane.idle or not lane.source.replaced():
                return lane
            self._release(lane)
            break
        lane = Lane(key, name, dtype)
        self._lanes.append(lane)
        self._find(lane)
        return lane

    def _find(self, lane: Lane) -> None:
        threading.Thread(target=self._locate, args=(lane,), name="mlxnb-locate", daemon=True).start()

    def _locate(self, lane: Lane) -> None:
        """Own thread: download, hash and validate the model's files; no array is touched."""
        last = 0.0

        def progress(phase: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            changed = phase != lane.progress[0]
            lane.progress = (phase, done, total)
            if changed or now - last >= _PROGRESS_EVERY_S or done == total:
                last = now
                self._tell(lane, phase, done, total)

        def cancelled() -> bool:
            return self.state not in ("starting", "ready") or not any(
                not g.cancel_requested for work in list(lane.work) for g in work.generations
            )

        try:
            from .loader import locate

            located = locate(lane.name or None, self.config, progress, cancelled)
        except BaseException as error:
            failure = error
            self._mail.put(lambda: self._drop(lane, failure))
        else:
            self._mail.put(lambda: setattr(lane, "located", located))

    @staticmethod
    def _tell(lane: Lane, phase: str, done: int, total: int) -> None:
        for work in list(lane.work):
            for generation in work.generations:
                try:
                    generation.emit(lambda s, t: ev.LoadProgress(s, t, phase, done, total))
                except RuntimeError:
                    continue  # it ended meanwhile

    def _settle(self, lane: Lane) -> None:
        for work in (*lane.work, *lane.preparing):
            work.settle_cancelled()
        lane.work = [work for work in lane.work if work.alive()]

    def _drop(self, lane: Lane, error: BaseException) -> None:
        self._settle(lane)
        if isinstance(error, Cancelled) and lane.work:
            self._find(lane)  # somebody asked for this model again while its download was being cancelled
            return
        for work in lane.work:
            work.fail(error)
        lane.work.clear()
        if lane in self._lanes:
            self._lanes.remove(lane)

    def _try_bind(self, lane: Lane) -> None:
        """Load a located model once there is room for it; a busy neighbour makes it wait."""
        if lane.located is None:
            return
        if not lane.work:
            self._lanes.remove(lane)
            return
        if not self._make_room():
            return
        from . import binding, loader

        self._tell(lane, "loading weights", 0, 0)
        try:
            loaded = loader.load(lane.located, self.config, lane.dtype)
            assert self._backend is not None
            if self._shared is None:
                self._shared = binding.prefix_cache(self.config, self.wake, self._notices.append)
            if self._resumes is None:
                self._resumes = binding.resumes(self.config, self._shared, self._notices.append)
            resident = binding.Resident(loaded, self.config, self._backend, self._shared, self._resumes)
        except BaseException as error:
            self._drop(lane, error)
            return
        lane.resident, lane.source, lane.located = resident, lane.located, None
        waiting, lane.work = lane.work, []
        for work in waiting:
            self._dispatch(lane, resident, work)
        self.wake()

    def _make_room(self) -> bool:
        """Unload the least recently used idle model if the limit of resident ones is reached."""
        resident = [lane for lane in self._lanes if lane.resident is not None]
        while len(resident) >= self.config.resident_models:
            idle = [lane for lane in resident if lane.idle]
            if not idle:
                return False
            oldest = min(idle, key=lambda lane: lane.last_used)
            self._release(oldest)
            resident.remove(oldest)
        return True

    def _release(self, lane: Lane) -> None:
        assert lane.resident is not None
        lane.resident.close(Cancelled("The model was unloaded."))
        self._lanes.remove(lane)
        lane.resident = None

    def _unload(self, name: str | None) -> list[str]:
        resident = [lane for lane in self._lanes if lane.resident is not None]
        chosen = [
            lane
            for lane in resident
            if name is None or (lane.resident and name == lane.resident.info.name) or lane.key == canonical(name, self.config)
        ]
        if name is not None and not chosen:
            known = ", ".join(lane.resident.info.name for lane in resident if lane.resident) or "none"
            raise RequestError(f"No model {name!r} is loaded.", f"Loaded: {known}.")
        busy = [lane.resident.info.name for lane in chosen if lane.resident and not lane.idle]
        if busy and (name is not None or len(busy) == len(chosen)):
            raise RequestError(f"{', '.join(busy)} is in use.", "Wait for its cells, or cancel them: %mlx cancel all.")
        names = [lane.resident.info.name for lane in chosen if lane.resident and lane.idle]
        for lane in [lane for lane in chosen if lane.idle]:
            self._release(lane)
        return names

    # -- engine thread: prompts ----------------------------------------------------------------------------------------

    def _dispatch(self, lane: Lane, resident: Resident, work: Work) -> None:
        """Hand a request's text to the text thread; it comes back as ids."""
        if work.load_only:
            info = resident.info
            usage = {"model": info.name, "weights": info.weights, "weight_bytes": info.weight_bytes}
            for generation in work.generations:
                generation.end(lambda s, t: ev.Finished(s, t, "stop", "", usage))
            return
        lane.preparing.append(work)
        request = work.generations[0].request
        resumed = request.resumed
        preparer = resident.preparer  # a job that lies about must not keep the model and its arrays alive
        size = len(request.text or "") + sum(len(m.content) for m in request.messages or ())

        def prepare() -> None:
            try:
                # The rest of a run goes on from the very ids that it began with: a template may say what day it is.
                prompt = preparer.prepare(request) if resumed is None else PreparedPrompt(resumed.prompt, resumed.stable, "")
            except BaseException as error:
                failure = error
                self._mail.put(lambda: self._prepared(lane, work, failure))
            else:
                self._mail.put(lambda: self._prepared(lane, work, prompt))

        if size > _LONG_TEXT:
            # A text that takes seconds to tokenize must not hold up the others, at the price of its place in the queue.
            threading.Thread(target=prepare, name="mlxnb-text-long", daemon=True).start()
        else:
            self._text_jobs.put(prepare)

    def _prepared(self, lane: Lane, work: Work, outcome: Any) -> None:
        lane.preparing.remove(work)
        work.settle_cancelled()
        living = [g for g in work.generations if not g.done]
        resident = lane.resident
        if not living or resident is None:
            return
        if isinstance(outcome, BaseException):
            work.fail(outcome)
            return
        try:
            resident.admit(living, outcome)
        except BaseException as error:
            work.fail(error)

    def _run_text_jobs(self) -> None:
        while (job := self._text_jobs.get()) is not None:
            job()
            del job


def _forget_locals(error: BaseException | None) -> None:
    """Drop the local variables of an error's frames: they hold arrays, which must go on this thread and now."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
