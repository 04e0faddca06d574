"""Notebook widgets of mlxnb. Holds nothing yet: cell output is sanitised HTML and plain text until the live views arrive.

It is a package of its own already so that an install, its import names and the layer test do not change when they do.
"""

from __future__ import annotations

__all__: list[str] = []
