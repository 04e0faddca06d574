"""The BLAS that MLX gets: chosen before MLX loads, reported truthfully, never guessed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxnb_engine import blas
from mlxnb_engine.blas import BlasChoice
from mlxnb_engine.errors import ModelError

# Runs in a fresh process: MLX must not be loaded yet. Prints what preload says and what the products really do.
PROBE = """
import json, sys
from dataclasses import asdict
from mlxnb_engine import blas
if "late" in sys.argv: import mlx.core
choice = blas.preload(sys.argv[1])
again = blas.preload("none")
assert "late" in sys.argv or "mlx.core" not in sys.modules
import mlx.core as mx
a, b = mx.random.normal((9, 96), key=mx.random.key(1)), mx.random.normal((96, 160), key=mx.random.key(2))
whole, exact = a @ b, (a[:, :, None] * b[None]).sum(axis=1)
print(json.dumps({
    **asdict(choice), "again": [again.name, again.path, again.note], "served_by": blas._global_blas(),
    "error": mx.abs(whole - exact).max().item(),
    "rows_equal": all(mx.array_equal((a[:n] @ b), whole[:n]).item() for n in range(1, 10)),
}))
"""


def probe(*args: str) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", PROBE, *args], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process in which nothing was chosen and MLX seems not loaded. No real library is loaded by these tests."""
    monkeypatch.setattr(blas, "_chosen", None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_global_blas", lambda: None)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    yield monkeypatch


def test_auto_serves_mlx_with_the_library_it_names() -> None:
    said = probe("auto")
    assert said["error"] < 1e-3
    if sys.platform == "darwin":
        assert said["name"] == "accelerate"
    elif said["name"] == "reference":
        assert said["served_by"] is None and "pip install mkl" in said["note"]
    else:
        assert said["served_by"] is not None and Path(said["served_by"]).samefile(said["path"])
        assert said["again"][:2] == [said["name"], said["path"]], "the first choice holds for the process"
        assert "needs a new kernel" in said["again"][2], "a later, different wish must not be dropped in silence"


def test_the_reference_gives_each_row_the_same_bits_in_any_company() -> None:
    said = probe("none")
    assert said["error"] < 1e-3
    if sys.platform != "darwin":
        assert (said["name"], said["geometry_invariant"], said["served_by"]) == ("reference", True, None)
        assert said["rows_equal"]


def test_a_choice_that_calls_itself_invariant_is() -> None:
    strict = ["mkl-strict"] if sys.platform == "linux" and next(blas._mkl_paths(), None) is not None else []
    for mode in ("none", "auto", *strict):
        said = probe(mode)
        assert said["error"] < 1e-3
        assert said["rows_equal"] or not said["geometry_invariant"], said
        assert (said["cbwr_branch"] is None) or said["geometry_invariant"], said
        assert said["strict"] == (mode == "mkl-strict")


def test_a_late_call_says_that_it_was_too_late() -> None:
    if sys.platform == "darwin":
        assert probe("auto", "late")["name"] == "accelerate"
        return
    said = probe("auto", "late")
    assert said["name"] == "reference" and "restart the kernel" in said["note"] and said["served_by"] is None


@pytest.mark.parametrize("mode", ["mkl", "mkl-strict", "openblas", "/some/blas.so"])
def test_a_library_that_is_named_too_late_is_refused(fresh: pytest.MonkeyPatch, mode: str) -> None:
    fresh.setitem(sys.modules, "mlx.core", sys)
    with pytest.raises(ModelError, match="too late"):
        blas.preload(mode)
    assert blas.preload("none").note, "and what runs instead is said"


@pytest.mark.parametrize(
    ("mode", "word"),
    [("mkl", "pip install mkl"), ("mkl-strict", "pip install mkl"), ("openblas", "libopenblas0"), ("/no/such.so", "/no/such.so")],
)
def test_a_named_library_that_is_missing_is_an_error_with_a_next_step(fresh: pytest.MonkeyPatch, mode: str, word: str) -> None:
    fresh.setattr(blas, "_mkl_paths", lambda: iter(()))
    fresh.setattr(blas, "_openblas_paths", lambda: iter(()))
    with pytest.raises(ModelError, match=word):
        blas.preload(mode)
    assert blas.preload("none").name == "reference", "a failed choice must not stick"


def test_auto_without_any_library_is_the_reference_with_a_note(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(blas, "_mkl_paths", lambda: iter(()))
    fresh.setattr(blas, "_openblas_paths", lambda: iter(()))
    assert blas.preload("auto") == blas._slow()
    assert "Install one" in blas._slow().note


class _Library:
    """Stands for a loaded MKL: accepts some branches only, and remembers what it was asked."""

    cblas_sgemm = object()

    def __init__(self, accepted: tuple[int, ...]) -> None:
        self.accepted, self.asked = accepted, []  # type: ignore[var-annotated]

    def MKL_CBWR_Set(self, code: Any) -> int:  # noqa: N802
        self.asked.append(code.value)
        return 0 if code.value in self.accepted else -3


@pytest.mark.parametrize(
    ("accepted", "branch", "asked"),
    [((0x1000C, 0x1000A), "AVX512", [0x1000C]), ((0x1000A,), "AVX2", [0x1000C, 0x1000A]), ((), None, [0x1000C, 0x1000A])],
)
def test_strict_takes_the_widest_branch_the_cpu_accepts(accepted: tuple[int, ...], branch: str | None, asked: list[int]) -> None:
    library = _Library(accepted)
    choice = blas._with_strict(BlasChoice("mkl", "/x", strict=True, geometry_invariant=False), library)  # type: ignore[arg-type]
    assert (choice.cbwr_branch, choice.strict, library.asked) == (branch, True, asked)
    assert choice.geometry_invariant is (branch is not None)
    assert bool(choice.note) is (branch is None)


def test_a_library_without_cblas_is_passed_over(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"\x7fELF not really")
    good = _Library(())

    def load(path: str, mode: int) -> Any:
        if path == "/good.so":
            return good
        if path == "/other.so":
            return object()
        raise OSError(path)

    fresh.setattr(blas.ctypes, "CDLL", load)
    paths = [tmp_path / "broken.so", Path("/other.so"), Path("/good.so")]
    choice = blas._first(iter(paths), "openblas")
    assert choice is not None and choice.path == "/good.so"
    assert blas._first(iter(paths[:2]), "openblas") is None


def test_a_blas_that_is_already_loaded_is_reported_as_what_it_is(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(blas, "_global_blas", lambda: "/lib/mine.so")
    for mode in ("auto", "none", "mkl"):
        fresh.setattr(blas, "_chosen", None)
        choice = blas.preload(mode)
        assert (choice.name, choice.path, choice.geometry_invariant) == ("preloaded", "/lib/mine.so", None)
        assert ("no effect" in choice.note) == (mode != "auto")


def test_macos_always_has_accelerate(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(sys, "platform", "darwin")
    assert blas.preload("mkl").name == "accelerate"
    assert "no effect" in blas.preload("mkl").note


def test_newer_versions_come_first(tmp_path: Path) -> None:
    for name in ("libmkl_rt.so.2", "libmkl_rt.so.10", "libmkl_rt.so", "libmkl_core.so.3"):
        (tmp_path / name).touch()
    assert [path.name for path in blas._versions(tmp_path, "libmkl_rt.so")] == ["libmkl_rt.so.10", "libmkl_rt.so.2", "libmkl_rt.so"]
    assert blas._versions(tmp_path / "missing", "libmkl_rt.so") == []
