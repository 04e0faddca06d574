"""The JupyterLab extension in a real JupyterLab: it is listed and loads clean, colours prompts, completes while busy, shows the engine."""

from __future__ import annotations

import re
import subprocess
import sys

from .lab import Lab
from .server import our_labextensions, shared_data

HELD = "import scripted; scripted.use(scripted.marked, hold=3)"


def test_jupyter_labextension_list_shows_it_enabled_and_compatible(lab: Lab) -> None:
    assert our_labextensions(), "the extension is built: see scripts/setup.sh frontend"
    command = [sys.executable, "-m", "jupyterlab.labextensions", "list", f"--app-dir={shared_data() / 'lab'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=lab.server.env)
    line = next((text for text in (done.stdout + done.stderr).splitlines() if re.search(r"\bmlxnb\b", text)), "")
    assert "enabled" in line and "OK" in line, done.stdout + done.stderr


def test_the_page_loads_without_an_error_of_ours(lab: Lab) -> None:
    lab.fresh()
    lab.new(["1"], setup=HELD)
    lab.page.wait_for_timeout(500)
    said = [text for text in lab.watch.console if not text.startswith(("log", "debug", "info"))]
    assert [text for text in lab.watch.faults() + said if "mlxnb" in text.lower()] == []


def test_the_words_of_a_prompt_are_not_coloured_as_python(lab: Lab) -> None:
    notebook = lab.new(["%%mlx --temp 0.7\nimport the class for while {{ name }} if return", "import os  # python"], setup=HELD)
    script = """
    ([path, cell]) => [...window.__nb.cell(path, cell).node.querySelectorAll(".cm-line")].map(
      (line) => [...line.querySelectorAll("span")].map((span) => [span.textContent, span.className]))"""
    lab.page.wait_for_timeout(500)
    prompt = lab.page.evaluate(script, [notebook.path, 0])
    python = lab.page.evaluate(script, [notebook.path, 1])
    assert any(text == "import" for text, _ in python[0]), "Python cells keep their colours"
    words = [text for text, _ in prompt[1]]
    assert not {"import", "class", "for", "while", "return"} & set(words), words
    assert any("name" in text for text in words), "{{ name }} is marked"
    lab.shot("cell-prompt", lab.page.evaluate_handle("([path]) => window.__nb.cell(path, 0).node", [notebook.path]).as_element())


def test_the_status_item_names_the_model_and_its_rows(lab: Lab) -> None:
    notebook = lab.new(["%%mlx --bg\nred question"], setup=HELD)
    notebook.run(0)
    notebook.wait_text(0, "red2")
    bar = lab.page.locator("#jp-main-statusbar")
    lab.until(lambda: re.search(r"fake", bar.inner_text()) and re.search(r"\b1 row", bar.inner_text()), 15)
    lab.shot("status-item", bar)
    notebook.call("scripted.client().release()")
    lab.until(lambda: "idle" in bar.inner_text().lower(), 15)


def test_options_are_completed_while_the_kernel_is_busy(lab: Lab) -> None:
    notebook = lab.new(["%%mlx\nred question", "%%mlx --max"], setup=HELD)
    notebook.start(0)
    notebook.wait_text(0, "red2")
    lab.page.evaluate(
        """([path]) => { const nb = window.__nb, panel = nb.select(path, 1); panel.content.mode = "edit";
        const editor = panel.content.widgets[1].editor; editor.focus(); editor.setCursorPosition({ line: 0, column: 11 }); }""",
        [notebook.path],
    )
    lab.page.keyboard.press("Tab")
    source = """([path]) => window.__nb.cell(path, 1).model.sharedModel.getSource()
        + [...document.querySelectorAll(".jp-Completer")].map((e) => e.innerText)"""
    lab.until(lambda: "max-tokens" in lab.page.evaluate(source, [notebook.path]), 10)
    assert notebook.executing(0)
    notebook.interrupt()
