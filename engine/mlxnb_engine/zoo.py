"""mlx-lm's model zoo, imported once and without its side effects. The only way in this package to what it shares between modules.

Importing mlx-lm lowers the limit of open files to 2048, the hard limit too (mlx-lm#1589), and takes one or two seconds: only the
engine thread comes here.
"""

from __future__ import annotations

import importlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from . import hub


@contextmanager
def _open_files_kept() -> Iterator[None]:
    """While inside, `resource.setrlimit` cannot lower RLIMIT_NOFILE; every other call works as always."""
    original = resource.setrlimit

    def guarded(which: int, limits: tuple[int, int]) -> None:
        if which == resource.RLIMIT_NOFILE:
            soft, hard = resource.getrlimit(which)
            if _below(limits[0], soft) or _below(limits[1], hard):
                return
        original(which, limits)

    resource.setrlimit = guarded
    try:
        yield
    finally:
        resource.setrlimit = original


def _below(wanted: int, current: int) -> bool:
    if resource.RLIM_INFINITY in (wanted, current):
        return wanted != resource.RLIM_INFINITY
    return wanted < current


hub.hush_progress()
with _open_files_kept():
    importlib.import_module("mlx_lm.utils")
    from mlx_lm.models import base
    from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

__all__ = ["ArraysCache", "CacheList", "base", "make_prompt_cache"]
