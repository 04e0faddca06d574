"""Language models in Jupyter: one engine inside the kernel, every cell a client of its shared batch.

    %load_ext mlxnb

    %%mlx
    Why is the sky blue?

Importing this package, and loading the extension, loads neither MLX nor any model: that happens on the engine's own thread
at the first prompt. Public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

_PUBLIC = {
    "load": "mlxnb.api",
    "chats": "mlxnb.chat",
    "monitor": "mlxnb.views",
    "cache_clear": "mlxnb.caching",
    "cache_flush": "mlxnb.caching",
    "cache_info": "mlxnb.caching",
    "cache_map": "mlxnb.cacheview",
    "interrupted": "mlxnb.resuming",
    "loom": "mlxnb.loomview",
    "playground": "mlxnb.playgroundview",
    "stepper": "mlxnb.stepperview",
    "widget": "mlxnb.hosted",
    "Run": "mlxnb.run",
    "RunGroup": "mlxnb.run",
    "MlxnbError": "mlxnb_engine.errors",
    "RequestError": "mlxnb_engine.errors",
    "CapacityExceeded": "mlxnb_engine.errors",
    "ModelError": "mlxnb_engine.errors",
    "Cancelled": "mlxnb_engine.errors",
    "EngineDead": "mlxnb_engine.errors",
}
__all__ = [
    "Cancelled",
    "CapacityExceeded",
    "EngineDead",
    "MlxnbError",
    "ModelError",
    "RequestError",
    "Run",
    "RunGroup",
    "__version__",
    "cache_clear",
    "cache_flush",
    "cache_info",
    "cache_map",
    "chats",
    "interrupted",
    "load",
    "load_ipython_extension",
    "loom",
    "monitor",
    "playground",
    "stepper",
    "unload_ipython_extension",
    "widget",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext mlxnb`: register `%%mlx`, `%mlx` and their completion. Starts no engine."""
    from .magic import install

    install(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext mlxnb`, and the first half of `%reload_ext mlxnb`: stop the engine and take the magics out. At most 5 s."""
    from .magic import uninstall

    uninstall(shell)
