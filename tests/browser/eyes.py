"""Looking at outputs that may be scrolled away: JupyterLab lays out, and even attaches, only what is near the window."""

from __future__ import annotations

from typing import Any

from .lab import Notebook


def words(notebook: Notebook, cell: int) -> str:
    """The text of an output, also while it is scrolled away."""
    return str(notebook.page.evaluate("(args) => window.__nb.outputNode(...args).textContent", [notebook.path, cell]))


def wait_words(notebook: Notebook, cell: int, text: str) -> None:
    notebook.lab.until(lambda: text in words(notebook, cell))


def wait_rest(notebook: Notebook, cell: int) -> None:
    """Until no answer in this output lives."""
    script = "(args) => !window.__nb.outputNode(...args).querySelector('.mlxnb-live')"
    notebook.lab.until(lambda: notebook.page.evaluate(script, [notebook.path, cell]))


def show(notebook: Notebook, cell: int) -> Any:
    """The output, scrolled to and laid out."""
    notebook.page.evaluate("([path, cell]) => window.__nb.select(path, cell).content.scrollToItem(cell)", [notebook.path, cell])
    node = notebook.output(cell)
    node.scroll_into_view_if_needed()
    notebook.page.wait_for_timeout(60)  # two frames: what was out of sight is laid out now
    return node
