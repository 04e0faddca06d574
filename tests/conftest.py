"""Test tiers, BLAS modes and shared fixtures.

One process has one BLAS, so `make test` runs pytest once per mode: the reference BLAS ("none", the exact oracle, every test
that names no mode), "mkl-strict" (exact and fast, the real model) and "mkl" (fast, where a wrong append arithmetic fails).
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

MODES = ("none", "mkl-strict", "mkl")
TIERS = ("P", "N", "R")
PREFIX_DIR = "MLXNB_PREFIX_DISK_DIR"
_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="P", help="P: every push; N: long; R: before a release")
    parser.addoption("--blas", choices=MODES, default="none", help="the CPU BLAS of this run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tier(name): run from this tier on (N or R)")
    config.addinivalue_line("markers", "modes(*names): the BLAS modes this test runs in; default: none")
    # Every push tries the same examples, so that red means a change broke something; the long tiers draw new ones.
    settings.register_profile("push", derandomize=True)
    if config.getoption("--tier") == "P":
        settings.load_profile("push")
    # Blocks of the tests, and of the kernels that they start, never lie in the user's own cache folder.
    config.prefix_root = tempfile.mkdtemp(prefix="mlxnb-prefix-")  # type: ignore[attr-defined]
    os.environ[PREFIX_DIR] = os.path.join(config.prefix_root, "session")  # type: ignore[attr-defined]
    _redirect_prefix_dir()
    from mlxnb_engine import blas

    mode = config.getoption("--blas")
    config.blas_choice = blas.preload(mode)  # type: ignore[attr-defined]


def _redirect_prefix_dir() -> None:
    """A test may resolve settings without the environment, and so name the user's own folder: that becomes the test's, too."""
    from mlxnb_engine.config import RuntimeConfig, resolve

    own = [settings.cache_dir / "prefix" for settings in (resolve({}), resolve())]
    real = RuntimeConfig.prefix_dir

    def redirected(settings: RuntimeConfig) -> Path:
        folder: Path = real.fget(settings)  # type: ignore[attr-defined,misc]
        return Path(os.environ[PREFIX_DIR]) if folder in own else folder

    RuntimeConfig.prefix_dir = property(redirected)  # type: ignore[method-assign,assignment]


def pytest_unconfigure(config: pytest.Config) -> None:
    os.environ.pop(PREFIX_DIR, None)
    shutil.rmtree(getattr(config, "prefix_root", ""), ignore_errors=True)


@pytest.fixture(autouse=True)
def prefix_dir(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the prefix cache of this test lies on disk: a folder of its own, so that no test finds what another has kept."""
    folder = Path(pytestconfig.prefix_root) / str(next(_numbers))  # type: ignore[attr-defined]
    monkeypatch.setenv(PREFIX_DIR, str(folder))
    return folder


def pytest_report_header(config: pytest.Config) -> str:
    choice = config.blas_choice  # type: ignore[attr-defined]
    return f"mlxnb: tier {config.getoption('--tier')}, BLAS {choice.name} ({choice.note or choice.path or 'as linked'})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, mode = TIERS.index(config.getoption("--tier")), config.getoption("--blas")
    kept, dropped = [], []
    for item in items:
        needs = item.get_closest_marker("tier")
        modes = item.get_closest_marker("modes")
        runs = tier >= (TIERS.index(needs.args[0]) if needs else 0) and mode in (modes.args if modes else ("none",))
        (kept if runs else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session")
def blas_mode(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--blas"))


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> int:
    """How many times the P tier's number of trials: 1, 10 or 50."""
    return {"P": 1, "N": 10, "R": 50}[str(pytestconfig.getoption("--tier"))]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a generated tiny llama: seeded weights, byte-level tokenizer, ChatML template."""
    from tiny import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")
