"""Other versions of ipykernel, without another environment: a folder made by `pip install --target` that a kernel's path begins with."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from .server import ROOT, JupyterServer

CACHE = ROOT / "test-output" / "overlays"
OLDEST = "6.31.0"
OTHERS = ("7.1.0", "7.3.0", "7.4.0")
INSTALLED = importlib.metadata.version("ipykernel")
ALL = (INSTALLED, *(version for version in (OLDEST, *OTHERS) if version != INSTALLED))
VERSIONS = [version if version in (INSTALLED, OLDEST) else pytest.param(version, marks=pytest.mark.tier("N")) for version in ALL]
"""As parameters of a test: the environment's own and the oldest on every push, those between in the long run."""
MOSTLY_LONG = [INSTALLED, *(pytest.param(version, marks=pytest.mark.tier("N")) for version in ALL[1:])]
"""The environment's own on every push, all others in the long run."""

# What each needs beyond the environment's own packages (the environment has a current ipykernel and all it depends on).
EXTRA: dict[str, Sequence[str]] = {
    "6.31.0": ("nest-asyncio",),
    "7.1.0": ("nest-asyncio",),
    "7.3.0": ("nest-asyncio",),
    "7.4.0": ("nest-asyncio2",),
}


def overlay(version: str) -> Path:
    """The folder with this version, made at first use. Raises RuntimeError with pip's words if it cannot be had."""
    folder = CACHE / f"ipykernel-{version}"
    if not (folder / "ipykernel" / "_version.py").exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        wanted = [f"ipykernel=={version}", *EXTRA[version]]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command = [*pip, "--no-deps", "--target", str(partial), *wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"pip could not install {' '.join(wanted)}:\n{done.stderr[-2000:]}")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return folder


def kernel_of(server: JupyterServer, version: str, env: Mapping[str, str] | None = None) -> str:
    """The name of a kernel that runs this version of ipykernel, with these variables on top."""
    if version == INSTALLED and not env:
        return "python3"
    paths = [server.env["PYTHONPATH"]] if version == INSTALLED else [str(overlay(version)), server.env["PYTHONPATH"]]
    name = f"ipykernel-{version}" + ("-" + "-".join(sorted(env)).lower().replace("_", "-") if env else "")
    return server.kernel(name, name, {**(env or {}), "PYTHONPATH": os.pathsep.join(paths)})
