"""Puts the example notebooks into the wheel, as mlxnb/examples, so that `mlxnb demo` needs no clone.

An editable install gets no copy: there the demo reads the one in the checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Examples(BuildHookInterface):  # type: ignore[type-arg]
    """Run by hatchling when it builds the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: "standard" or "editable"."""
        if version == "standard":
            for notebook in sorted(Path(self.root, "examples").glob("*.ipynb")):
                build_data["force_include"][str(notebook)] = f"mlxnb/examples/{notebook.name}"
