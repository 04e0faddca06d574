"""Cells that stream side by side, re-runs, reloads and saved notebooks, with a scripted engine whose every word is numbered."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from .lab import Lab, Notebook
from .overlays import MOSTLY_LONG, kernel_of

COLOURS = ("red", "green", "blue")
SLOW = "import scripted; scripted.use(scripted.marked, step_s=0.02)"
HELD = "import scripted; scripted.use(scripted.marked, hold=12)"


def words_of(text: str, mark: str) -> list[str]:
    return re.findall(rf"\b{mark}\d+\b", text)


def strangers_in(notebook: Notebook, cell: int, mark: str) -> list[str]:
    return [other for other in COLOURS if other != mark and words_of(notebook.text(cell), other)]


@pytest.mark.parametrize("version", MOSTLY_LONG)
def test_three_background_cells_stream_at_once_each_in_its_own_output(lab: Lab, version: str) -> None:
    setup = "import scripted; scripted.use(scripted.marked, step_s=0.02, hold=30)"
    notebook = lab.new([f"%%mlx --bg\n{colour} question" for colour in COLOURS], kernel_of(lab.server, version), setup)
    for cell in range(3):
        notebook.run(cell)
    history: list[list[int]] = []

    def look() -> list[int]:
        history.append([len(words_of(notebook.text(cell), colour)) for cell, colour in enumerate(COLOURS)])
        return history[-1]

    lab.until(lambda: min(look()) == 30)
    notebook.call("scripted.client().release()")
    lab.until(lambda: look() and all(notebook.ended(cell) for cell in range(3)))
    look()
    fewer = [(a, b) for a, b in itertools.pairwise(history) if any(now < before for before, now in zip(a, b, strict=True))]
    assert fewer == [], "text never goes away"
    assert any(all(0 < count < 40 for count in now) for now in history), "all three were on the screen unfinished at one time"
    for cell, colour in enumerate(COLOURS):
        assert words_of(notebook.text(cell), colour) == [f"{colour}{n}" for n in range(40)]
        assert strangers_in(notebook, cell, colour) == []
        assert len(notebook.outputs(cell)) == 1


@pytest.mark.parametrize("version", MOSTLY_LONG)
def test_a_re_run_shows_no_token_of_the_run_it_replaces(lab: Lab, version: str) -> None:
    notebook = lab.new(["%%mlx --bg\nred question", "%%mlx --bg\nblue question"], kernel_of(lab.server, version), SLOW)
    for cell in range(2):
        notebook.run(cell)
    notebook.wait_text(0, "red3")
    change = "([path, text]) => window.__nb.cell(path, 0).model.sharedModel.setSource(text)"
    lab.page.evaluate(change, [notebook.path, "%%mlx --bg\ngreen question"])
    notebook.run(0)

    def over() -> bool:
        assert strangers_in(notebook, 0, "green") == [], notebook.text(0)
        return notebook.ended(0) and notebook.ended(1)

    lab.until(over)
    lab.page.wait_for_timeout(400)  # the replaced run has ended by now, with nowhere to show it
    assert words_of(notebook.text(0), "green") == [f"green{n}" for n in range(40)]
    assert words_of(notebook.text(1), "blue") == [f"blue{n}" for n in range(40)]
    assert len(notebook.outputs(0)) == 1


@pytest.mark.parametrize("version", MOSTLY_LONG)
def test_a_reload_in_the_middle_of_a_run_loses_nothing(lab: Lab, version: str) -> None:
    (lab.server.notebooks / "go").unlink(missing_ok=True)
    setup = "import scripted; scripted.use(scripted.marked, hold=12); scripted.release_when('go')"
    notebook = lab.new(["%%mlx\nred question"], kernel_of(lab.server, version), setup)
    notebook.start(0)
    notebook.wait_text(0, "red11")
    notebook.save()
    lab.reload()
    again = lab.open(notebook.path, kernel_of(lab.server, version))
    (lab.server.notebooks / "go").touch()
    again.wait_text(0, "red39")
    assert again.call("print(_mlx.text)").split() == [f"red{n}" for n in range(40)]
    assert len(again.outputs(0)) == 1


@pytest.mark.parametrize("version", MOSTLY_LONG)
def test_a_background_answer_streams_on_after_a_reload(lab: Lab, version: str) -> None:
    notebook = lab.new(["%%mlx --bg\nred question"], kernel_of(lab.server, version), HELD)
    notebook.run(0)
    notebook.wait_text(0, "red11")
    notebook.save()
    lab.reload()
    again = lab.open(notebook.path, kernel_of(lab.server, version))
    again.wait_text(0, "red11")
    again.call("scripted.client().release()")
    again.wait_text(0, "red39")
    again.wait_end(0)
    assert words_of(again.text(0), "red") == [f"red{n}" for n in range(40)]
    assert len(again.outputs(0)) == 1


def test_an_answer_that_was_taken_away_after_a_reload_does_not_come_back(lab: Lab) -> None:
    """The others of the notebook are put right all the same, which tells that the page has looked."""
    setup = "import scripted; scripted.use(scripted.marked, hold=12)"
    notebook = lab.new(["%%mlx --bg\nred question", "%%mlx --bg\nblue question"], setup=setup)
    for cell, colour in enumerate(("red", "blue")):
        notebook.run(cell)
        notebook.wait_text(cell, f"{colour}11")
    notebook.save()
    lab.reload()
    again = lab.open(notebook.path, "python3")
    again.wait_text(1, "blue11")
    lab.page.evaluate("([path]) => window.__nb.cell(path, 0).model.outputs.clear()", [notebook.path])
    again.call("scripted.client().release()")
    again.wait_end(1)
    assert again.outputs(0) == []


def test_a_reopened_notebook_shows_text_and_figures_without_a_kernel(lab: Lab) -> None:
    notebook = lab.new(["%%mlx\nred question", "%%mlx -n 3\nblue question", "%%mlx --view tokens --logprobs 3\ngreen question"], setup=SLOW)
    notebook.run_all()
    again = notebook.reopened()
    assert again.status() == "none"
    for cell, colour in enumerate(("red", "blue", "green")):
        again.wait_text(cell, f"{colour}39")
        text = again.text(cell)
        assert len(words_of(text, colour)) >= 40, text
        assert "not found" not in text.lower() and "error" not in text.lower()
        assert re.search(r"tok/s|tokens", text)


def test_a_saved_notebook_has_the_answer_as_plain_text_and_no_widget(lab: Lab) -> None:
    notebook = lab.new(["%%mlx\nred question"], setup=SLOW)
    notebook.run(0)
    saved = notebook.save()
    output = saved["cells"][0]["outputs"][0]
    assert "".join(output["data"]["text/plain"]).split() == [f"red{n}" for n in range(40)]
    assert "application/vnd.jupyter.widget-view+json" not in output["data"]
    assert not saved["metadata"].get("widgets")


@pytest.mark.parametrize("tool", ["nbconvert", "papermill"])
def test_batch_execution_gives_full_answers_and_no_widget(lab: Lab, tmp_path: Path, tool: str) -> None:
    source, target = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    cells = ["import scripted; scripted.use(scripted.marked)", "%%mlx\nred question", "%%mlx --bg\nblue question", "%mlx wait"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, source)
    arguments = {
        "nbconvert": ["-m", "nbconvert", "--to", "notebook", "--execute", str(source), "--output", str(target)],
        "papermill": ["-m", "papermill", str(source), str(target), "--no-progress-bar"],
    }[tool]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=180, env={**os.environ, **lab.server.env})
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text("utf-8"))
    for cell, colour in ((1, "red"), (2, "blue")):
        shown = [out for out in found["cells"][cell]["outputs"] if "data" in out]
        assert len(shown) == 1
        assert "".join(shown[0]["data"]["text/plain"]).split() == [f"{colour}{n}" for n in range(40)]
        assert "application/vnd.jupyter.widget-view+json" not in shown[0]["data"]
