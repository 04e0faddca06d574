"""Find a fast CPU BLAS and load it before MLX, whose Linux CPU wheel links a slow reference one.

How it works: MLX calls `cblas_*` through the dynamic linker, which asks the global scope before MLX's own dependencies.
A library loaded with RTLD_GLOBAL before MLX therefore serves MLX. Once MLX is loaded the choice stands for the process.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import ModelError

_CBWR_BRANCHES = (("AVX512", 0x1000C), ("AVX2", 0x1000A))  # MKL_CBWR_<branch> | MKL_CBWR_STRICT
_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
_OPENBLAS_SUBFOLDERS = ("openblas-pthread", "openblas-openmp", "openblas-serial", "openblas", "")
_LATE = "MLX was loaded before mlxnb, so its BLAS could not be chosen. To choose one, restart the kernel and load mlxnb first."

_lock = threading.Lock()
_chosen: BlasChoice | None = None
_first_mode = ""


@dataclass(frozen=True, slots=True)
class BlasChoice:
    """What MLX's CPU matrix products run on.

    name: mkl, openblas, reference, accelerate, custom or preloaded. strict: mkl-strict was asked for.
    cbwr_branch: MKL's reproducible branch in force, None if refused (not an Intel CPU) or not asked for.
    geometry_invariant: True if a row of a product does not depend on how many rows there are, None if nobody knows.
    note: one sentence for a person, "" if there is nothing to say.
    """

    name: str
    path: str | None = None
    strict: bool = False
    note: str = ""
    geometry_invariant: bool | None = None
    cbwr_branch: str | None = None


def preload(mode: str = "auto") -> BlasChoice:
    """Load the library that `mode` names, once per process; later calls return the first choice, and say so if they asked for another.

    mode: auto, mkl, mkl-strict, openblas, none, or a path. Call before anything imports MLX.
    Raises ModelError if a library was named and cannot be had.
    """
    global _chosen, _first_mode
    with _lock:
        if _chosen is None:
            _chosen, _first_mode = _too_late(mode) if "mlx.core" in sys.modules else _choose(mode), mode
        if mode not in ("auto", _first_mode):
            return replace(_chosen, note=f"This process already computes with BLAS {_chosen.name}; blas={mode!r} needs a new kernel.")
        return _chosen


def _too_late(mode: str) -> BlasChoice:
    """MLX is loaded: what it computes with by now, or a refusal of a library that was named."""
    if sys.platform == "darwin":
        return BlasChoice("accelerate")
    found = _global_blas()
    if mode not in ("auto", "none") and found is None:
        raise ModelError(f"MLX was loaded before mlxnb, so blas={mode!r} comes too late.", "Restart the kernel and load mlxnb first.")
    return BlasChoice("preloaded", found, note=_LATE) if found else BlasChoice("reference", note=_LATE, geometry_invariant=True)


def _choose(mode: str) -> BlasChoice:
    if sys.platform == "darwin":
        note = "" if mode in ("auto", "none") else f"On macOS MLX always uses Accelerate; blas={mode!r} has no effect."
        return BlasChoice("accelerate", note=note)
    if (found := _global_blas()) is not None:
        wanted = mode not in ("auto",)
        note = f"A BLAS was already loaded into this process: {found}." + (f" blas={mode!r} has no effect." if wanted else "")
        return BlasChoice("preloaded", found, note=note)
    if mode == "none":
        return BlasChoice("reference", geometry_invariant=True)
    if mode in ("mkl", "mkl-strict"):
        choice = _first(_mkl_paths(), "mkl", strict=mode == "mkl-strict")
        return choice or _missing("MKL was not found.", "Install it with: pip install mkl (x86-64 only), or choose blas=auto.")
    if mode == "openblas":
        return _first(_openblas_paths(), "openblas") or _missing(
            "OpenBLAS was not found.", "Install it (Debian, Ubuntu: apt install libopenblas0), or choose blas=auto."
        )
    if mode == "auto":
        return _first(_mkl_paths(), "mkl") or _first(_openblas_paths(), "openblas") or _slow()
    return _first(iter([Path(mode)]), "custom") or _missing(
        f"{mode} is not a BLAS library that can be loaded.", "Give the path of a shared library that exports cblas_sgemm."
    )


def _slow() -> BlasChoice:
    note = "No fast BLAS was found, so matrix products run on one slow thread. Install one with: pip install mkl (x86-64), or OpenBLAS."
    return BlasChoice("reference", note=note, geometry_invariant=True)


def _missing(message: str, hint: str) -> BlasChoice:
    raise ModelError(message, hint)


def _first(paths: Iterator[Path], name: str, *, strict: bool = False) -> BlasChoice | None:
    """Load the first library that exists, loads and has cblas_sgemm; it stays loaded for the life of the process."""
    for path in paths:
        try:
            handle = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            _ = handle.cblas_sgemm
        except (OSError, AttributeError, ValueError):
            continue
        choice = BlasChoice(name, str(path), strict=strict, geometry_invariant=None if name == "custom" else False)
        return _with_strict(choice, handle) if strict else choice
    return None


def _with_strict(choice: BlasChoice, handle: ctypes.CDLL) -> BlasChoice:
    """Ask MKL for the widest branch that gives the same bits for any number of rows. Only before MKL's first product.

    Measured: Intel CPUs accept one (0); an AMD EPYC refuses both (-3), and MKL runs as if it had not been asked.
    """
    for branch, code in _CBWR_BRANCHES:
        if handle.MKL_CBWR_Set(ctypes.c_int(code)) == 0:
            return replace(choice, cbwr_branch=branch, geometry_invariant=True)
    note = "This CPU has no reproducible MKL branch; windows are padded to fixed shapes instead."
    return replace(choice, note=note)


def _mkl_paths() -> Iterator[Path]:
    yield from _versions(Path(sys.prefix) / "lib", "libmkl_rt.so")
    try:
        files = importlib.metadata.distribution("mkl").files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    folders = {Path(str(file.locate())).resolve().parent for file in files if file.name.startswith("libmkl_rt.so")}
    for folder in (*sorted(folders), Path("/opt/intel/oneapi/mkl/latest/lib"), *map(Path, _SYSTEM_FOLDERS)):
        yield from _versions(folder, "libmkl_rt.so")


def _openblas_paths() -> Iterator[Path]:
    """Only `libopenblas.so*`: the builds with 64-bit integers have other names and would be called wrongly."""
    yield from _versions(Path(sys.prefix) / "lib", "libopenblas.so")
    for base in _SYSTEM_FOLDERS:
        for sub in _OPENBLAS_SUBFOLDERS:
            yield from _versions(Path(base) / sub, "libopenblas.so")
    if name := ctypes.util.find_library("openblas"):
        yield Path(name)


def _versions(folder: Path, stem: str) -> list[Path]:
    """`stem` with any version suffix in `folder`, newest version first."""

    def version(path: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", path.name[len(stem) :]))

    try:
        return sorted(folder.glob(f"{stem}*"), key=version, reverse=True)
    except OSError:
        return []


def _global_blas() -> str | None:
    """The file that serves `cblas_sgemm` to the whole process, None if no library in the global scope has it.

    Linux reads it off /proc/self/maps. It sees what was loaded with LD_PRELOAD or RTLD_GLOBAL, not MLX's own reference BLAS.
    """
    try:
        symbol = ctypes.CDLL(None).cblas_sgemm
        address = ctypes.cast(symbol, ctypes.c_void_p).value or 0
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except (AttributeError, OSError):
        return None
    for line in lines:
        span, _, rest = line.partition(" ")
        low, _, high = span.partition("-")
        if int(low, 16) <= address < int(high, 16):
            return rest.split(maxsplit=4)[-1].strip()
    return "an unnamed library"
