"""Notebook widgets of mlxnb: one class per view, JSON traits only. They hold no run and no engine; `mlxnb.live` feeds them.

Importing this package imports neither anywidget nor ipywidgets; the modules of the views do.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["STATIC", "asset", "available"]

STATIC = Path(__file__).parent / "static"
"""Built from widgets/src; absent in a source tree where nobody ran the build."""
LOADER = "loader.js"


def available() -> bool:
    """Whether live views can be shown from here: the scripts are built, and anywidget is installed."""
    return (STATIC / LOADER).is_file() and importlib.util.find_spec("anywidget") is not None


def asset(name: str) -> str:
    """The text of a built script, by its plain file name. Raises LookupError for any other name."""
    if not STATIC.is_dir() or name not in {path.name for path in STATIC.iterdir() if path.is_file()}:
        raise LookupError(name)
    return (STATIC / name).read_text(encoding="utf-8")
