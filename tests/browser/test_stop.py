"""Stop, on each version of ipykernel: the answer so far is kept, the cell ends, the next one works. Latency is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .lab import Lab, Notebook
from .overlays import INSTALLED, OLDEST, OTHERS, kernel_of

VERSIONS = [
    INSTALLED,
    *(
        pytest.param(version, marks=() if version == OLDEST else pytest.mark.tier("N"))
        for version in (OLDEST, *OTHERS)
        if version != INSTALLED
    ),
]

HELD = "import scripted; scripted.use(scripted.marked, hold=%d)"
AFTER = "%%mlx\nsecond question"

# From the request to the kernel's idle, and to the word on the screen, in ms of the page's clock.
STOP = """
async ([path, cell, how]) => {
  const nb = window.__nb, kernel = nb.kernel(path), begin = performance.now();
  const idle = new Promise((resolve) => {
    const seen = (_, status) => { if (status === "idle") { kernel.statusChanged.disconnect(seen); resolve(performance.now() - begin); } };
    kernel.statusChanged.connect(seen);
  });
  const shown = new Promise((resolve) => {
    const node = nb.outputNode(path, cell);
    const look = () => { if (/stopped/i.test(node.innerText)) { observer.disconnect(); resolve(performance.now() - begin); } };
    const observer = new MutationObserver(look);
    observer.observe(nb.cell(path, cell).node, { subtree: true, childList: true, characterData: true });
    look();
  });
  if (how === "interrupt") await kernel.interrupt();
  else if (how === "button") {
    const all = [...nb.outputNode(path, cell).querySelectorAll("button")];
    const buttons = all.filter((b) => /stop/i.test(b.textContent + b.title + b.ariaLabel));
    if (!buttons.length) throw new Error("no Stop button in the output: " + nb.outputNode(path, cell).innerHTML.slice(0, 300));
    buttons[0].click();
  } else await nb.app().commands.execute(how);
  return {
    shown_ms: Math.round(await nb.within(shown, "the word stopped", 10000)),
    idle_ms: Math.round(await nb.within(idle, "an idle kernel", 10000)),
  };
}
"""


def stop(notebook: Notebook, cell: int, how: str) -> dict[str, int]:
    found: dict[str, int] = notebook.page.evaluate(STOP, [notebook.path, cell, how])
    return found


def version_of(notebook: Notebook) -> str:
    return notebook.call("import ipykernel; print(ipykernel.__version__)").strip()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_interrupt_stops_the_cell_keeps_its_text_and_the_next_cell_works(lab: Lab, figures: Callable[..., None], version: str) -> None:
    notebook = lab.new(["%%mlx\nred question", AFTER], kernel_of(lab.server, version), HELD % 5, name="stop")
    assert version_of(notebook) == version
    notebook.start(0)
    notebook.wait_text(0, "red4")
    took = stop(notebook, 0, "interrupt")
    notebook.wait_idle(0)
    notebook.wait_end(0)
    notebook.wait_text(0, "stopped")
    assert "red0 red1 red2 red3 red4" in notebook.text(0)
    assert [out["output_type"] for out in notebook.outputs(0)] == ["display_data", "error"]
    assert notebook.call("print(_mlx.status, len(_mlx.tokens))").split() == ["stopped", "5"]
    notebook.call("scripted.client().release()")
    notebook.run(1)
    notebook.wait_text(1, "second39")
    figures(f"stop by interrupt, ipykernel {version}, decode", **took)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_interrupt_before_the_first_token_ends_the_cell(lab: Lab, figures: Callable[..., None], version: str) -> None:
    notebook = lab.new(["%%mlx\nred question", AFTER], kernel_of(lab.server, version), HELD % 0, name="stop")
    notebook.start(0)
    notebook.wait_text(0, "Reading the prompt")
    took = stop(notebook, 0, "interrupt")
    notebook.wait_idle(0)
    assert notebook.call("print(_mlx.status, len(_mlx.tokens))").split() == ["stopped", "0"]
    notebook.call("scripted.client().release()")
    notebook.run(1)
    notebook.wait_text(1, "second39")
    figures(f"stop by interrupt, ipykernel {version}, prefill", **took)


def test_an_interrupt_stops_this_cell_and_no_other(lab: Lab) -> None:
    notebook = lab.new(["%%mlx --bg\nblue question", "%%mlx\nred question"], setup=HELD % 3)
    notebook.run(0)
    notebook.start(1)
    notebook.wait_text(1, "red2")
    stop(notebook, 1, "interrupt")
    notebook.wait_idle(1)
    notebook.call("scripted.client().release()")
    notebook.wait_text(0, "blue39")
    assert "stopped" in notebook.text(1) and "stopped" not in notebook.text(0)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("how", ["button", "mlxnb:stop", "mlxnb:stop-all"])
def test_stop_ends_the_running_cell_without_losing_its_text(lab: Lab, figures: Callable[..., None], version: str, how: str) -> None:
    """The button goes by the comm (an interrupt where no comm is answered during a cell), the commands by their own channel."""
    notebook = lab.new(["%%mlx\nred question", AFTER], kernel_of(lab.server, version), HELD % 5, name="stop")
    notebook.start(0)
    notebook.wait_text(0, "red4")
    took = stop(notebook, 0, how)
    notebook.wait_idle(0)
    notebook.wait_end(0)
    assert notebook.call("print(_mlx.status, len(_mlx.tokens))").split() == ["stopped", "5"]
    notebook.wait_text(0, "red0 red1 red2 red3 red4")
    notebook.call("scripted.client().release()")
    notebook.run(1)
    notebook.wait_text(1, "second39")
    figures(f"stop by {how}, ipykernel {version}, decode", **took)


def test_the_button_stops_a_background_answer_and_no_other(lab: Lab) -> None:
    notebook = lab.new(["%%mlx --bg\nblue question", "%%mlx --bg\nred question"], setup=HELD % 3)
    for cell, colour in enumerate(("blue", "red")):
        notebook.run(cell)
        notebook.wait_text(cell, f"{colour}2")
    stop(notebook, 1, "button")
    notebook.call("scripted.client().release()")
    notebook.wait_text(0, "blue39")
    assert notebook.call("print(_mlx.status)").strip() == "stopped"
