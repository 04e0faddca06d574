"""Test tiers, BLAS modes and shared fixtures.

One process has one BLAS, so `make test` runs pytest once per mode: the reference BLAS ("none", the exact oracle, every test
that names no mode), "mkl-strict" (exact and fast, the real model) and "mkl" (fast, where a wrong append arithmetic fails).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

MODES = ("none", "mkl-strict", "mkl")
TIERS = ("P", "N", "R")


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
    from mlxnb_engine import blas

    mode = config.getoption("--blas")
    config.blas_choice = blas.preload(mode)  # type: ignore[attr-defined]


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
