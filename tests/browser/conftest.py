"""One Chromium and one JupyterLab for all browser tests. Package scope: Playwright's event loop must not outlive them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .lab import SIZE, Lab, Watch
from .server import ROOT, JupyterServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --disable-extensions --force-color-profile=srgb"
).split() + ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


@pytest.fixture(scope="package")
def artifacts() -> Path:
    """Screenshots and figures of the last run; not in git."""
    folder = ROOT / "test-output"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="package")
def figures(artifacts: Path) -> Iterator[Callable[..., None]]:
    """`figures(name, **values)` adds to test-output/figures.json. Reported, not asserted: this machine is shared."""
    path = artifacts / "figures.json"

    def add(name: str, **values: Any) -> None:
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        known[name] = values
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")

    yield add


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    found = subprocess.run(
        ["sh", str(ROOT / "scripts" / "chromium.sh"), "find"], capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}
    )
    if found.returncode:
        pytest.fail(found.stderr.strip(), pytrace=False)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found.stdout.strip(), headless=True, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    running = JupyterServer(tmp_path_factory.mktemp("lab"), {"MLXNB_BLAS": "none"})
    yield running
    running.close()


@pytest.fixture(scope="package")
def tiny_kernel(server: JupyterServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A kernel whose default model is the generated tiny one: a real engine, answers of no meaning."""
    from tiny import write_model

    model = write_model(tmp_path_factory.mktemp("model") / "tiny-llama", "llama")
    return server.kernel("tiny", "Tiny", {"MLXNB_MODEL": str(model), "MLXNB_BLAS": "none"})


@pytest.fixture(scope="package")
def watch_and_page(browser: Browser, server: JupyterServer) -> Iterator[tuple[Watch, Any]]:
    context = browser.new_context(viewport=SIZE, reduced_motion="reduce", locale="en-GB", timezone_id="UTC")
    watch = Watch(context, server.url)
    page = context.new_page()
    page.set_default_timeout(60_000)
    yield watch, page
    context.close()


@pytest.fixture(scope="package")
def lab_page(watch_and_page: tuple[Watch, Any], server: JupyterServer, artifacts: Path) -> Lab:
    watch, page = watch_and_page
    lab = Lab(page, server, watch, artifacts)
    lab.load()
    return lab


@pytest.fixture
def lab(lab_page: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The page with nothing open. A test that fails leaves a picture of what was on it."""
    lab_page.begin()
    yield lab_page
    if getattr(request.node, "failed_call", False):
        lab_page.shot(f"failed-{request.node.name[:80]}")
    lab_page.close_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" and report.failed:
        item.failed_call = True  # type: ignore[attr-defined]
    return report
