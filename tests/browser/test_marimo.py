"""marimo: no IPython and no Jupyter comm. A chat and an answer as widgets of their own, in its real servers, for a real browser."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .server import SOURCES, START_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

APP = """
import marimo

app = marimo.App()


@app.cell
def _():
    import marimo as mo
    import mlxnb
    import scripted
    from mlxnb import runtime
    if runtime.current() is None:
        runtime.use(lambda settings: scripted.Speaker(scripted.marked, step_s=0.02))
    lm = mlxnb.load("fake")
    return lm, mlxnb, mo


@app.cell
def _(lm, mlxnb, mo):
    chat = lm.chat()
    mo.ui.anywidget(mlxnb.widget(chat))
    return


@app.cell
def _(lm, mlxnb, mo):
    run = lm.generate("red question", wait=False)
    mo.ui.anywidget(mlxnb.widget(run))
    return
"""
BOX = ".mlxnb-ch-new textarea"
WAIT_MS = 60_000


@contextmanager
def serving(mode: str, folder: Path) -> Iterator[str]:
    """The address of `marimo run` or `marimo edit` with the app above; its kernels end with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = folder / "app.py"
    app.write_text(APP, "utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MARIMO", "MLXNB_", "JUPYTER", "IPYTHON"))}
    env |= {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "MARIMO_SKIP_UPDATE_CHECK": "1"}
    command = [sys.executable, "-m", "marimo", mode, "--headless", "--no-token", "--host", "127.0.0.1", "--port", str(port), str(app)]
    log = folder / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text("utf-8", "replace")[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/"
        assert "Traceback" not in log.read_text("utf-8", "replace"), log.read_text("utf-8", "replace")[-3000:]
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(5)


@contextmanager
def page_at(browser: Browser, url: str) -> Iterator[Page]:
    """A page of marimo. At the end it must not have failed: no exception, and no error on the console."""
    page = browser.new_page(viewport={"width": 1100, "height": 1400})
    page.set_default_timeout(WAIT_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(error.stack or error.message))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    try:
        page.goto(url, wait_until="commit")
        yield page
        assert wrong == []
    finally:
        page.close()


def ask(page: Page, text: str) -> None:
    page.locator(BOX).fill(text)
    page.locator(BOX).press("Enter")


def view_with(page: Page, text: str) -> Any:
    """The one view that shows this, once it does. marimo puts each into a shadow root, which only locators look into."""
    view = page.locator(".mlxnb-root", has_text=text)
    view.wait_for()
    assert view.count() == 1
    return view


def test_a_chat_and_an_answer_work_in_a_marimo_app(browser: Browser, tmp_path: Path, artifacts: Path) -> None:
    with serving("run", tmp_path) as url, page_at(browser, url) as page:
        page.locator(BOX).wait_for()
        for mark in ("blue", "green"):
            ask(page, f"{mark} question")
            words = " ".join(f"{mark}{n}" for n in range(40))
            view_with(page, words)
        assert page.locator(".mlxnb-ch-who").count() == 4
        answer = view_with(page, "red39")
        answer.locator("button[aria-label='Run again']").click()
        deadline = time.monotonic() + WAIT_MS / 1000
        while answer.inner_text().count("red39") != 2:  # two answers beside each other
            assert time.monotonic() < deadline, answer.inner_text()
            page.wait_for_timeout(50)
        page.screenshot(path=str(artifacts / "marimo-run.png"))


@pytest.mark.tier("N")
def test_a_cell_of_marimo_that_runs_again_replaces_its_view_while_it_streams(browser: Browser, tmp_path: Path, artifacts: Path) -> None:
    with serving("edit", tmp_path) as url, page_at(browser, url) as page:
        page.locator(".cm-editor").nth(2).wait_for()
        page.wait_for_timeout(1000)  # its buttons are drawn before they are of use
        page.locator("[data-testid=run-button]").last.click()
        page.locator(BOX).wait_for()
        ask(page, "blue question")
        view_with(page, "blue3")
        page.locator(".cm-content").nth(1).click()
        page.keyboard.press("Control+Enter")
        page.locator(".mlxnb-ch-empty").wait_for()
        ask(page, "green question")
        view_with(page, " ".join(f"green{n}" for n in range(40)))
        assert "blue" not in page.locator(".mlxnb-root", has=page.locator(BOX)).inner_text()
        view_with(page, "red39")
        page.screenshot(path=str(artifacts / "marimo-edit.png"))


@pytest.mark.tier("N")
def test_two_visitors_of_an_app_have_a_chat_each_over_one_engine(browser: Browser, tmp_path: Path) -> None:
    with serving("run", tmp_path) as url, page_at(browser, url) as one, page_at(browser, url) as other:
        for page, mark in ((one, "blue"), (other, "green")):
            page.locator(BOX).wait_for()
            ask(page, f"{mark} question")
        for page, mark, stranger in ((one, "blue", "green"), (other, "green", "blue")):
            view_with(page, " ".join(f"{mark}{n}" for n in range(40)))
            assert page.locator(".mlxnb-root", has_text=stranger).count() == 0
