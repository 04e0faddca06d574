"""One engine per kernel process: made at first use, replaced when dead, closed at exit within a bound, absent after fork."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import EngineDead, RequestError
from mlxnb_engine.types import RequestId

if TYPE_CHECKING:
    from mlxnb_engine.client import CompletionClient
    from mlxnb_engine.config import RuntimeConfig

CLOSE_S = 5.0
_ENDED = ("dead", "stopping", "stopped", "closed")

_lock = threading.RLock()
_client: CompletionClient | None = None
_pid: int | None = None
_orphan = False
"""Whether this is a child of a process whose engine had MLX at work: its threads and locks did not come along."""
_overrides: dict[str, Any] = {}
_numbers = itertools.count(1)


def client() -> CompletionClient:
    """The engine of this kernel. Any thread; makes it at first use (which loads no model), anew if it died.

    After a fork from a process whose engine ran, EngineDead."""
    global _client, _pid
    if _orphan:
        raise EngineDead(
            "This process was forked from a kernel with a running engine, and MLX does not survive that.",
            "Use a fresh process: subprocess, or multiprocessing with the 'spawn' method.",
        )
    with _lock:
        here = current()
        if here is None or here.status().get("state") in _ENDED:
            if here is not None:
                with contextlib.suppress(Exception):  # it is dead already; its rows have their terminal events
                    here.close(CLOSE_S)
            _client, _pid = _make(config()), os.getpid()
        assert _client is not None
        return _client


def current() -> CompletionClient | None:
    """The engine if there is one in this process; never makes one."""
    return _client if _pid == os.getpid() else None


def _local(settings: RuntimeConfig) -> CompletionClient:
    # Lazy: the engine loads MLX, and must not before the BLAS is chosen.
    from mlxnb_engine.client import LocalClient

    return LocalClient(settings)


_make: Callable[[RuntimeConfig], CompletionClient] = _local


def close(timeout_s: float = CLOSE_S) -> None:
    """Stop the engine of this process, if any, within timeout_s. Idempotent; the next `client()` starts a fresh one."""
    global _client, _pid
    with _lock:
        here, _client, _pid = current(), None, None
    if here is not None:
        here.close(timeout_s)


def use(make: Callable[[RuntimeConfig], CompletionClient]) -> None:
    """Replace how engines are made (another client of the protocol); the present one is closed."""
    global _make
    close()
    _make = make


def config() -> RuntimeConfig:
    """The settings that the next engine gets: defaults < environment < `%mlx config`."""
    from mlxnb_engine.config import resolve

    return resolve(overrides=_overrides)


def override(changes: Mapping[str, Any]) -> bool:
    """Set engine settings of this kernel, all or none; None takes one back. Raises RequestError for a bad one.

    True if an engine already runs: its settings are frozen, and the new ones count from the next one.
    """
    from mlxnb_engine.config import resolve

    if "blas" in changes and "mlx.core" in sys.modules:
        raise RequestError("The BLAS is chosen before MLX loads, and MLX is loaded.", "Restart the kernel and set it in the first cell.")
    with _lock:
        wanted = {name: value for name, value in {**_overrides, **changes}.items() if value is not None}
        resolve(overrides=wanted)
        _overrides.clear()
        _overrides.update(wanted)
        return current() is not None


def new_request_id() -> RequestId:
    """A short id, unique in this kernel, that a person can type: c1, c2, ..."""
    return RequestId(f"c{next(_numbers)}")


def resident_models() -> list[str]:
    """Names of the models in memory, without starting an engine."""
    here = current()
    return [str(model.get("name")) for model in here.status().get("models") or []] if here is not None else []


def models_on_disk() -> list[str]:
    """Model repositories in the cache of huggingface_hub that have a snapshot, and GGUF files in the working directory."""
    from pathlib import Path

    found: list[str] = []
    with contextlib.suppress(ImportError, OSError):
        from huggingface_hub.constants import HF_HUB_CACHE

        for folder in Path(HF_HUB_CACHE).glob("models--*--*"):
            if any(folder.glob("snapshots/*/config.json")):
                found.append(folder.name.removeprefix("models--").replace("--", "/"))
    with contextlib.suppress(OSError):
        found += [f"./{path.name}" for path in Path().glob("*.gguf")]
    return sorted(found)


def _after_fork() -> None:
    """The child has no engine thread: forget the engine without closing it, and a lock that another thread may hold."""
    global _lock, _client, _pid, _orphan
    _orphan = _client is not None and "mlx.core" in sys.modules
    _lock, _client, _pid = threading.RLock(), None, None


def _at_exit() -> None:
    with contextlib.suppress(Exception):  # nobody is left to read a traceback
        close(CLOSE_S)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
