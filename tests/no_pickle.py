"""S5: a fixture that fails a test during which anything, anywhere in the process, looked up a class for unpickling.

Import `no_pickle` into a test module and it watches each of its tests. Audit hooks cannot be taken away, so one is installed once
and records while a test runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

_seen: list[str] = []
_installed = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        _seen.append(".".join(map(str, arguments)))


def watch() -> None:
    """Begin a record."""
    global _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True
    _seen.clear()


def seen() -> list[str]:
    """module.name of each class looked up since `watch`."""
    return list(_seen)


@pytest.fixture(autouse=True)
def no_pickle() -> Iterator[None]:
    watch()
    yield
    assert seen() == [], "unpickled during this test"
