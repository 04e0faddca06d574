"""What a result was measured on. Loads neither MLX nor a BLAS."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def facts(*packages: str) -> dict[str, Any]:
    """Date, processor, Python, system, and the versions of these packages."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    when = time.strftime("%Y-%m-%d")
    versions = {name: version(name) for name in packages}
    return {"when": when, "python": platform.python_version(), "system": platform.platform(), "cpu": cpu, **versions}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
