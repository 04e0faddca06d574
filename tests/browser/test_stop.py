"""Stop, on each version of ipykernel: the answer so far is kept, the cell ends, the next one works. Latency is reported."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator

import pytest

from mlxnb_engine.config import resolve

from .lab import SIZE, Lab, Notebook, Watch
from .overlays import ALL, OLDEST, VERSIONS, kernel_of
from .server import JupyterServer

HELD = "import scripted; scripted.use(scripted.marked, hold=%d)"
AFTER = "%%mlx\nsecond question"

# From the request to the end of the cell (the kernel's idle for the very request: a comm's message has an idle of its own) and
# to a word of it on the screen, in ms of the page's clock.
STOP = """
async ([path, cell, how]) => {
  const nb = window.__nb, kernel = nb.kernel(path), runs = nb.waiting(path, cell);
  const request = runs ? nb.cell(path, cell).outputArea.future.msg.header.msg_id : null;
  const begin = performance.now(), since = () => Math.round(performance.now() - begin);
  const idle = !runs ? null : new Promise((resolve) => {
    const seen = (_, message) => {
      const { header, parent_header, content } = message;
      if (header.msg_type !== "status" || content.execution_state !== "idle" || parent_header.msg_id !== request) return;
      kernel.iopubMessage.disconnect(seen);
      resolve(since());
    };
    kernel.iopubMessage.connect(seen);
  });
  const shown = new Promise((resolve) => {
    const node = nb.outputNode(path, cell);
    const look = () => { if (/stopped/i.test(node.innerText)) { observer.disconnect(); resolve(since()); } };
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
  return { shown_ms: await nb.within(shown, "the word stopped", 10000), idle_ms: await nb.within(idle, "the end of the cell", 10000) };
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


# -- without the JupyterLab extension ------------------------------------------------------------------------------------


@pytest.fixture
def bare(lab: Lab) -> Iterator[Lab]:
    """A page to which nothing of our JupyterLab extension is served: its views and their Stop have the widget's comm alone."""
    context = lab.page.context.browser.new_context(viewport=SIZE)
    watch = Watch(context, lab.server.url)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.route("**/lab/extensions/mlxnb/**", lambda route: route.abort())
    alone = Lab(page, lab.server, watch, lab.shots)
    alone.load()
    assert not page.evaluate("() => window.__nb.app().commands.hasCommand('mlxnb:stop')")
    yield alone
    alone.close_all()
    context.close()


def button(notebook: Notebook, cell: int) -> bool:
    script = "([path, cell]) => [...window.__nb.outputNode(path, cell).querySelectorAll('button')].some((b) => /stop/i.test(b.textContent))"
    return bool(notebook.page.evaluate(script, [notebook.path, cell]))


@pytest.mark.tier("N")
@pytest.mark.parametrize("version", ALL)
def test_without_the_extension_an_interrupt_stops_and_so_does_the_button_where_the_kernel_has_subshells(
    bare: Lab, figures: Callable[..., None], version: str
) -> None:
    """The first answer of a page is plain HTML on a kernel without subshells: its cell is over before the view's script comes."""
    cells = ["%%mlx\nred question", "%%mlx\nblue question", AFTER]
    notebook = bare.new(cells, kernel_of(bare.server, version), HELD % 5, name="bare")
    for cell, mark in enumerate(("red", "blue")):
        notebook.start(cell)
        notebook.wait_text(cell, f"{mark}4")
        how = "interrupt" if version == OLDEST or cell == 1 else "button"
        if version == OLDEST and cell == 0:
            assert not button(notebook, cell) and "interrupt the kernel" in notebook.text(cell)
        if version == OLDEST and cell == 1:
            bare.until(lambda: button(notebook, 1))
            bare.page.locator("button:visible", has_text="Stop").first.click()
            notebook.wait_text(cell, "to stop now, interrupt the kernel", 10)
            assert notebook.executing(cell), "the kernel reads it after the cell"
        took = stop(notebook, cell, how)
        notebook.wait_idle(cell)
        notebook.wait_end(cell)
        assert notebook.call("print(_mlx.status, len(_mlx.tokens))").split() == ["stopped", "5"]
        notebook.wait_text(cell, f"{mark}0 {mark}1 {mark}2 {mark}3 {mark}4")
        figures(f"stop by {how} without the extension, ipykernel {version}, decode", **took)
    notebook.call("scripted.client().release()")
    notebook.run(2)
    notebook.wait_text(2, "second39")


# -- the real model ------------------------------------------------------------------------------------------------------

LONG = "The sea is wide and old stories say that a small boat can cross it when the wind is kind to those who wait. " * 120
TIMES = 3


@pytest.fixture(scope="module")
def real(server: JupyterServer) -> dict[str, str]:
    """Variables of a kernel that has the default model on the best BLAS here."""
    return {"MLXNB_BLAS": "auto", "MLXNB_CACHE_DIR": str(resolve().cache_dir)}


@pytest.mark.tier("N")
@pytest.mark.parametrize("version", ALL)
def test_the_real_engine_stops_in_the_middle_of_prefill_and_of_decoding_by_each_path(
    lab: Lab, figures: Callable[..., None], real: dict[str, str], version: str
) -> None:
    """A step or a window of the prompt is in flight here, which a scripted engine never has."""
    cells = [f"%%mlx --max-tokens 400\n{LONG}", "%%mlx --max-tokens 2000 --no-template\nOnce upon a time", "%%mlx --max-tokens 4\nhello"]
    notebook = lab.new(cells, kernel_of(lab.server, version, real), "%load_ext mlxnb", name="real")
    notebook.run(2)
    notebook.wait_end(2)
    for phase, cell, sign in (("prefill", 0, "reading the prompt"), ("decode", 1, "streaming")):
        for how in ("interrupt", "button", "mlxnb:stop"):
            runs = []
            for _ in range(TIMES):
                notebook.start(cell)
                notebook.wait_text(cell, sign)
                lab.until(lambda cell=cell: phase_of(notebook, cell) > (0 if cell == 0 else 8))
                runs.append(stop(notebook, cell, how))
                notebook.wait_idle(cell)
                notebook.wait_end(cell)
                status, count = notebook.call("print(_mlx.status, len(_mlx.tokens))").split()
                assert status == "stopped" and (int(count) == 0 if cell == 0 else 8 <= int(count) < 2000)
                record = notebook.record(cell)
                assert record is not None and record["status"] == "stopped"
            medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            figures(f"stop by {how}, ipykernel {version}, {phase}, default model", **medians, runs=runs)
    notebook.run(2)
    notebook.wait_end(2)
    assert notebook.call("print(_mlx.status)").strip() == "done"


def phase_of(notebook: Notebook, cell: int) -> int:
    """How far the answer of a cell is: tokens of the prompt that are read, or tokens that are there; from the words of its view."""
    found = re.search(r"(?:reading the prompt|streaming)\D*([\d,]+)", notebook.text(cell))
    return int(found[1].replace(",", "")) if found else 0
