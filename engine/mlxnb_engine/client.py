"""`CompletionClient`: the one door to an engine. Importing this file loads neither MLX nor transformers."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .config import RuntimeConfig
from .errors import EngineDead
from .session import Generation
from .types import CompletionRequest, RequestId

if TYPE_CHECKING:
    from .engine import Engine


class CompletionClient(Protocol):
    """Submit semantic requests, read events, cancel. Any thread; no method returns an array."""

    def submit(self, request: CompletionRequest) -> list[Generation]:
        """Queue one request; one Generation per sample, at once. Raises RequestError for bad input."""
        ...

    def cancel(self, generation_ids: list[str] | None = None) -> int:
        """Ask these rows (None: all) to stop; how many were still alive."""
        ...

    def live(self) -> list[Generation]:
        """The rows that have not ended, oldest first."""
        ...

    def load(self, model: str, dtype: str | None = None) -> Generation:
        """Load a model without a prompt; the log ends with Finished when it is resident."""
        ...

    def unload(self, model: str | None = None) -> list[str]:
        """Drop idle resident models (None: all); the names dropped. Raises RequestError if one is in use."""
        ...

    def status(self) -> dict[str, Any]:
        """A JSON-able snapshot: state, models, rows, queue, kv_bytes, limits, backend. Never waits for a step."""
        ...

    def cache_info(self) -> dict[str, Any]:
        """What the prefix cache holds, in memory and on disk (`upkeep.info`)."""
        ...

    def describe_cache(self, limit: int = 256) -> dict[str, Any] | None:
        """The tree of the prefix cache in memory (`Engine.describe_cache`); None if there is none."""
        ...

    def cached_text(self, namespace: str, ids: Sequence[int]) -> str | None:
        """The text of ids of a namespace (hex) of that tree; None if no model of it is loaded."""
        ...

    def cache_clear(self, model: str | None = None) -> dict[str, Any]:
        """Forget everything, or what is kept of one model (`upkeep.clear`). Raises RequestError if nothing is kept of it."""
        ...

    def cache_flush(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Have all that is kept in memory on disk (`upkeep.flush`)."""
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel everything and stop the engine within timeout_s. Idempotent."""
        ...


class LocalClient:
    """An engine in this process. It starts with the first request, and a dead one is replaced by the next.

    Owner: whoever made it; any thread may use it. After a fork the child has no engine and every call raises EngineDead.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._closed = False
        self._generations: list[Generation] = []
        self._loads = 0
        atexit.register(self.close)

    def submit(self, request: CompletionRequest) -> list[Generation]:
        self._require_own_process()
        request.validate()
        generations = [Generation(request, i) for i in range(request.samples)]
        self._send(request, generations, load_only=False)
        return generations

    def load(self, model: str, dtype: str | None = None) -> Generation:
        self._require_own_process()
        with self._lock:
            self._loads += 1
            number = self._loads
        request = CompletionRequest(RequestId(f"load-{number}"), model, text="", max_tokens=0, dtype=dtype)
        generation = Generation(request)
        self._send(request, [generation], load_only=True)
        return generation

    def cancel(self, generation_ids: list[str] | None = None) -> int:
        self._require_own_process()
        with self._lock:
            live = [g for g in self._generations if not g.done]
        wanted = [g for g in live if generation_ids is None or g.id in generation_ids or g.request.id in generation_ids]
        for generation in wanted:
            generation.cancel()
        return len(wanted)

    def live(self) -> list[Generation]:
        """The rows that have not ended, oldest first."""
        self._require_own_process()
        with self._lock:
            self._generations = [g for g in self._generations if not g.done]
            return list(self._generations)

    def unload(self, model: str | None = None) -> list[str]:
        engine = self._running()
        return engine.unload(model) if engine is not None else []

    def status(self) -> dict[str, Any]:
        self._require_own_process()
        with self._lock:
            engine = self._engine
        if engine is None:
            return {"state": "closed" if self._closed else "not started", "backend": None, "models": [], "loading": [], "limits": {}}
        return {**engine.status(), "live": [g.id for g in self.live()]}

    def cache_info(self) -> dict[str, Any]:
        from . import upkeep

        return upkeep.info(self.config, self._running())

    def describe_cache(self, limit: int = 256) -> dict[str, Any] | None:
        engine = self._running()
        return engine.describe_cache(limit) if engine is not None else None

    def cached_text(self, namespace: str, ids: Sequence[int]) -> str | None:
        engine = self._running()
        return engine.cached_text(namespace, ids) if engine is not None else None

    def cache_clear(self, model: str | None = None) -> dict[str, Any]:
        from . import upkeep

        return upkeep.clear(self.config, model, self._running())

    def cache_flush(self, timeout_s: float = 30.0) -> dict[str, Any]:
        from . import upkeep

        return upkeep.flush(self.config, self._running(), timeout_s)

    def _running(self) -> Engine | None:
        self._require_own_process()
        with self._lock:
            return self._engine if self._engine is not None and self._engine.alive else None

    def close(self, timeout_s: float = 5.0) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            engine, self._engine = self._engine, None
        atexit.unregister(self.close)
        if engine is None:
            return
        engine.stop(timeout_s)
        for generation in self._generations:
            # Only what a stuck engine left behind; whoever reads it gets an end all the same.
            generation.fail(EngineDead("The engine was closed."))

    def _send(self, request: CompletionRequest, generations: list[Generation], load_only: bool) -> None:
        from .engine import Work

        with self._lock:
            engine = self._ready_engine()
            self._generations = [g for g in self._generations if not g.done] + generations
        engine.submit(request.model, request.dtype or self.config.dtype, Work(generations, load_only))

    def _ready_engine(self) -> Engine:
        from .engine import Engine

        if self._closed:
            raise EngineDead("This engine was closed.", "Reload the extension or restart the kernel to start another.")
        if self._engine is None or not self._engine.alive:
            self._engine = Engine(self.config, self._engine)
        return self._engine

    def _require_own_process(self) -> None:
        """Before any lock: one that another thread held during the fork is never released in the child."""
        if os.getpid() != self._pid:
            raise EngineDead("This process is a fork of the one that holds the engine.", "Start a new process, or ask the parent.")
