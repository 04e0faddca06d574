"""The commands of the JupyterLab extension, in a real JupyterLab: each does what it says while cells run."""

from __future__ import annotations

from typing import Any

from .lab import Lab, Notebook

SLOW = "import scripted; scripted.use(scripted.words, step_s=0.05)"
BUSY = "import time\nfor _ in range(600):\n    time.sleep(0.1)"


def command(notebook: Notebook, name: str, cell: int) -> None:
    """Make a cell the active one and run a command, as a shortcut does."""
    script = "async ([path, cell, name]) => { window.__nb.select(path, cell); await window.__nb.app().commands.execute(name); }"
    notebook.page.evaluate(script, [notebook.path, cell, name])


def status_item(lab: Lab) -> str:
    return str(lab.page.locator(".mlxnb-status-item").inner_text())


def complete(lab: Lab, notebook: Notebook, cell: int, position: dict[str, int]) -> None:
    script = """([path, cell, position]) => { const panel = window.__nb.select(path, cell); panel.content.mode = "edit";
        const editor = panel.content.widgets[cell].editor; editor.focus(); editor.setCursorPosition(position); }"""
    lab.page.evaluate(script, [notebook.path, cell, position])
    lab.page.keyboard.press("Tab")


def source(lab: Lab, notebook: Notebook, cell: int) -> str:
    return str(lab.page.evaluate("([path, cell]) => window.__nb.cell(path, cell).model.sharedModel.getSource()", [notebook.path, cell]))


def test_stop_ends_the_background_answer_of_its_cell_while_another_cell_is_busy(lab: Lab) -> None:
    notebook = lab.new(["%%mlx --bg\n400", "%%mlx --bg\n400", BUSY], setup=SLOW)
    notebook.run(0)
    notebook.run(1)
    lab.until(lambda: "2 rows" in status_item(lab), 20)
    notebook.start(2)
    command(notebook, "mlxnb:stop", 0)
    notebook.wait_text(0, "stopped", 5)
    assert notebook.executing(2), "a stop of one cell leaves the others alone"
    assert "stopped" not in notebook.text(1)
    command(notebook, "mlxnb:stop-all", 2)
    notebook.wait_text(1, "stopped", 5)
    assert notebook.executing(2), "answers are stopped, not Python"
    command(notebook, "mlxnb:stop", 2)  # a cell of Python alone: the kernel's interrupt
    notebook.wait_idle(2, 10)


def test_a_finished_answer_can_be_asked_again_from_its_output(lab: Lab) -> None:
    notebook = lab.new(["%%mlx\n12"], setup=SLOW)
    notebook.run(0)
    notebook.wait_end(0)
    again = notebook.page.locator(".mlxnb-output button[aria-label='Run again']")
    again.wait_for(timeout=10_000)
    again.click()

    def texts() -> list[Any]:
        record = notebook.record(0) or {}
        return [run["id"] for run in record.get("runs", ())]

    lab.until(lambda: len(texts()) == 2, 20)
    lab.until(lambda: notebook.text(0).count("11:") >= 2, 20)


def test_a_lost_answer_is_restored_in_its_cell_and_only_once(lab: Lab) -> None:
    """As after a reload of the page before the notebook was saved: the kernel has the answer, the cell has not."""
    notebook = lab.new(["%%mlx\n12", "1"], setup=SLOW)
    notebook.run(0)
    notebook.wait_end(0)
    lab.until(lambda: "idle" in status_item(lab), 20)
    lab.page.evaluate("([path]) => window.__nb.cell(path, 0).model.outputs.clear()", [notebook.path])
    assert "11:" not in notebook.text(0)
    for _ in range(2):
        command(notebook, "mlxnb:repair-outputs", 1)
        notebook.wait_text(0, "11:", 10)
        assert [len(notebook.outputs(cell)) for cell in (0, 1)] == [1, 0]


def test_variables_are_completed_in_braces_while_the_kernel_is_busy(lab: Lab) -> None:
    notebook = lab.new(["my_reading = 7", "%%mlx\n😀 {{ my_rea", BUSY, "%%mlx\n3"], setup=SLOW)
    notebook.run(0)
    notebook.run(3)
    lab.until(lambda: "idle" in status_item(lab), 20)
    notebook.start(2)
    lab.until(lambda: notebook.executing(2), 10)
    complete(lab, notebook, 1, {"line": 1, "column": len("😀 {{ my_rea") + 1})
    shown = "() => [...document.querySelectorAll('.jp-Completer')].map((e) => e.innerText).join()"
    lab.until(lambda: "my_reading" in source(lab, notebook, 1) + str(lab.page.evaluate(shown)), 10)
    assert notebook.executing(2)
    notebook.interrupt()


def test_the_engine_is_shown_beside_the_notebook_while_a_cell_is_busy(lab: Lab) -> None:
    notebook = lab.new(["%%mlx --bg\n400", BUSY], setup=SLOW)
    notebook.run(0)
    lab.until(lambda: "1 row" in status_item(lab), 20)
    notebook.start(1)
    command(notebook, "mlxnb:show-engine", 0)
    view = lab.page.locator(".mlxnb-engine .mlxnb")
    view.wait_for(timeout=10_000)
    lab.shot("engine-beside-notebook")
    command(notebook, "mlxnb:stop-all", 0)
    lab.until(lambda: "idle" in view.inner_text().lower(), 10)
    notebook.interrupt()
