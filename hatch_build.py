"""Build hook: a wheel brings the example notebooks, so that `mlxnb demo` needs no clone, and the front end, built here from its
sources. MLXNB_NO_FRONTEND=1 leaves the front end out.

hatchling drops a data folder that does not exist without a word, so scripts/frontend.py fails if an asset is missing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "MLXNB_NO_FRONTEND"


def wanted() -> bool:
    return os.environ.get(SWITCH, "").lower() not in ("1", "true", "yes", "on")


class FrontEndHook(BuildHookInterface):
    """Builds widgets/ and labextension/, and adds what came of it to the wheel."""

    PLUGIN_NAME = "custom"

    @property
    def _root(self) -> Path:
        return Path(self.root).resolve()

    def dependencies(self) -> list[str]:
        """node as a Python package, where the front end must be built and the system has no node that is new enough."""
        return frontend(self.root).requirements(self._root) if wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: "standard" or "editable". An editable installation uses the checkout's files; `make` links the extension."""
        if version == "standard":  # an editable installation reads those of the checkout: a copy would grow old
            for notebook in sorted(self._root.glob("examples/*.ipynb")):
                build_data["force_include"][str(notebook)] = f"mlxnb/examples/{notebook.name}"
        tools = frontend(self.root)
        if not wanted():
            tools.say(f"{SWITCH} is set: no front end in this build; outputs are plain HTML")
            return
        try:
            tools.build(self._root)
        except tools.BuildError as error:
            raise SystemExit(f"mlxnb: {error}\nmlxnb: to build without the front end, set {SWITCH}=1") from None
        if version == "standard":
            widgets, labextension = tools.parts(self._root)
            build_data["artifacts"].append(f"/{widgets.output.relative_to(self._root).as_posix()}/")
            source = labextension.output.relative_to(self._root).as_posix()
            build_data["shared_data"][source] = f"share/jupyter/labextensions/{tools.NAME}"


def frontend(root: str) -> ModuleType:
    """scripts/frontend.py, which is no package."""
    spec = importlib.util.spec_from_file_location("mlxnb_frontend", Path(root) / "scripts" / "frontend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
