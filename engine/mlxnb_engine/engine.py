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
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from . import blas
from . import events as ev
from .config import RuntimeConfig
from .errors import Cancelled, EngineDead, MlxnbError, ModelError, RequestError
from .locate import canonical
from .session import Generation

if TYPE_CHECKING:
    from .binding import Backend, Resident
    from .loader import Located

State = Literal["starting", "ready", "stopping", "stopped", "dead"]
_LONG_TEXT = 1_000_000
_PROGRESS_EVERY_S = 0.2
_PREDECESSOR_S = 10.0


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
        self._memory: Callable[[], dict[str, int]] | None = None
        self._live: list[Work] = []
        self._last_advance = time.monotonic()
        self._stop_asked = threading.Event()
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
        answer: Future[list[str]] = Future()

        def act() -> None:
            try:
                answer.set_result(self._unload(name))
            except Exception as error:
                answer.set_exception(error)

        self._post(act, None)
        while not wait([answer], 1.0).done:
            if not self._thread.is_alive() and not answer.done():
                raise self._obituary()
        return answer.result()

    def wake(self) -> None:
        self._mail.put(lambda: None)

    def stop(self, timeout_s: float) -> bool:
        """Cancel everything and end the thread within timeout_s; whether it ended."""
        self._stop_asked.set()
        if self.state in ("starting", "ready"):
            self.state = "stopping"
        self.wake()
        self._text_jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def status(self) -> dict[str, Any]:
        """Plain numbers read without a lock: each is right by itself, and no step is waited for."""
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
            "last_advance_s": round(time.monotonic() - self._last_advance, 3),
            "limits": {
                "max_rows": self.config.max_rows,
                "max_kv_bytes": self.config.max_kv_bytes,
                "context_limit": self.config.context_limit,
                "prefill_chunk": self.config.prefill_chunk,
                "resident_models": self.config.resident_models,
            },
        }

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
            busy = False
            while not self._stop_asked.is_set():
                self._read_mail(block=not busy)
                busy = self._turn()
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

    def _read_mail(self, block: bool) -> None:
        try:
            action = self._mail.get(block=block)
            while True:
                action()
                action = self._mail.get_nowait()
        except queue.Empty:
            return

    def _turn(self) -> bool:
        """One bounded advance for each resident model; False when there is nothing to do."""
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
        return busy

    def _check(self) -> None:
        from . import binding

        for lane in self._lanes:
            if lane.resident is not None:
                lane.resident.scheduler.check()
        binding.trim_memory()

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
            self._attempt(lambda: self._read_mail(block=False))
        for lane in self._lanes:
            resident, lane.resident = lane.resident, None
            if resident is not None:
                self._attempt(lambda r=resident: r.close(end))  # type: ignore[misc]
        resident = None
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
            resident = binding.Resident(loaded, self.config, self._backend)
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
        preparer = resident.preparer  # a job that lies about must not keep the model and its arrays alive
        size = len(request.text or "") + sum(len(m.content) for m in request.messages or ())

        def prepare() -> None:
            try:
                prompt = preparer.prepare(request)
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
