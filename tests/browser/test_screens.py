"""Pictures of every view from a real notebook, in both themes and two widths, kept in test-output/. Each must look as it should:
nothing sticks out, is cut off, overlaps, is too faint or too small, or has colours of its own. The checks are in looks.js."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from .eyes import show, wait_rest, wait_words
from .lab import SIZE, Lab, Notebook
from .server import ROOT

GALLERY = ROOT / "tests" / "browser" / "answers.json"
LOOKS = Path(__file__).with_name("looks.js").read_text("utf-8")
WIDTHS = (900, 1400)
SLOW = "import scripted; scripted.use(scripted.forks, step_s=0.004)"
NAMES = tuple(json.loads(GALLERY.read_text("utf-8")))
ITEMS = "words = ['short', 'everything', 'right-to-left']\nfailing = ['short', 'fail']"

# What a view has to show before its picture is taken, by a name for the file.
ANSWERS: Mapping[str, str] = {
    "answer": "%%mlx\neverything",
    "formulas": "%%mlx\nformulas",
    "tokens": "%%mlx --view tokens --logprobs 4\neverything",
    "raw": "%%mlx --view raw\neverything",
    "samples": "%%mlx -n 3\neverything",
    "each": "%%mlx --each words\n{{ item }}",
    "sweep": "%%mlx --sweep temp=0,.7,1\nshort",
    "chat": "import mlxnb\nchat = mlxnb.load().chat(system='Be brief.')\nfor name in ('short', 'everything'): chat.send(name)\nchat.show()",
    "playground": "playground = mlxnb.playground('everything', max_tokens=400)\nNone",
    "loom": "%%mlx -n 6 --view loom\nforks",
}
TIDE = "Once the tide had gone out, the lighthouse keeper walked down to the rocks. " * 3
ENGINE: Mapping[str, str] = {
    "stepper": "import mlxnb\nstepper = mlxnb.stepper('the sea', temp=0.8, top_p=0.9, seed=11)\nstepper.forward(6); stepper.changed()",
    "monitor": "monitor = mlxnb.monitor()\nNone",
    "cache": f"lm = mlxnb.load()\nfor word in ('one', 'two'): lm.generate({TIDE!r} + word, n=2, max_tokens=80)\nmlxnb.cache_map()\nNone",
    # The tiny model would end at once: without its end-of-text tokens the rows live long enough to be seen.
    "monitored": "lm = mlxnb.load()\nlm.generate('the sea', n=4, max_tokens=700, logit_bias={317: -100, 318: -100, 319: -100})\nNone",
}


@pytest.fixture
def looking(lab: Lab) -> Iterator[Lab]:
    """The page with looks.js, without the file browser; afterwards as it was."""
    lab.page.evaluate(LOOKS)
    lab.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    yield lab
    lab.page.evaluate("() => window.jupyterapp.shell.expandLeft()")
    lab.theme(False)
    lab.page.set_viewport_size(SIZE)


def look(notebook: Notebook, cells: Mapping[str, int], prefix: str = "", widths: Sequence[int] = WIDTHS) -> None:
    """Each cell in both themes and all widths: a picture, and no fault."""
    lab, found = notebook.lab, {}
    for dark in (False, True):
        lab.theme(dark)
        theme = "dark" if dark else "light"
        for width in widths:
            lab.page.set_viewport_size({"width": width, "height": 2200})
            for name, cell in cells.items():
                node = show(notebook, cell)
                faults = lab.page.evaluate("([node, dark]) => window.__looks.faults(node, dark)", [node, dark])
                lab.shot(f"{prefix}{name}-{width}-{theme}", node)
                if faults:
                    found[f"{name} {width} {theme}"] = faults
    assert found == {}, json.dumps(found, indent=1, ensure_ascii=False)


def shown(lab: Lab, cells: Mapping[str, str], kernel: str = "python3", setup: str = "") -> Notebook:
    notebook = lab.new([*cells.values()], kernel, setup=setup, name="screens")
    notebook.run_all()
    return notebook


def settle(notebook: Notebook, cells: Mapping[str, str]) -> None:
    for cell in range(len(cells)):
        wait_rest(notebook, cell)


def test_every_view_of_answers_looks_right_in_both_themes_and_widths(looking: Lab) -> None:
    notebook = shown(looking, ANSWERS, setup=f"{SLOW}\n{ITEMS}")
    settle(notebook, ANSWERS)
    places = {name: cell for cell, name in enumerate(ANSWERS)}
    looking.until(lambda: show(notebook, places["formulas"]).query_selector("math"))
    show(notebook, places["loom"]).query_selector_all("[role=treeitem]")[1].click()  # a path is chosen, and can be read
    look(notebook, places)
    assert looking.watch.faults() == []


def test_the_views_of_the_engine_look_right_in_both_themes_and_widths(looking: Lab, tiny_kernel: str) -> None:
    notebook = shown(looking, ENGINE, tiny_kernel)
    settle(notebook, ENGINE)
    wait_words(notebook, 1, "batch fill")
    wait_words(notebook, 2, "share")
    look(notebook, {"stepper": 0, "monitor": 1, "cache": 2})
    assert looking.watch.faults() == []


def test_the_story_of_a_token_looks_right_and_its_focus_is_seen(looking: Lab) -> None:
    notebook = looking.new(["%%mlx --view tokens --logprobs 4\neverything"], setup=SLOW, name="story")
    notebook.run(0)
    notebook.wait_end(0)
    for dark in (False, True):
        looking.theme(dark)
        node = show(notebook, 0)
        token = node.query_selector(".mlxnb-tok:nth-of-type(4)")
        token.focus()
        looking.page.keyboard.press("ArrowRight")
        popover = looking.page.wait_for_selector(".mlxnb-pop")
        focused = "const e = document.activeElement, { outlineStyle, outlineWidth } = getComputedStyle(e)"
        name, style, width = looking.page.evaluate(f"() => {{ {focused}; return [e.className, outlineStyle, parseFloat(outlineWidth)]; }}")
        assert "mlxnb-tok" in name and style != "none" and width >= 2
        assert looking.page.evaluate("([node, dark]) => window.__looks.faults(node, dark)", [node, dark]) == []
        assert looking.page.evaluate("(node) => window.__looks.faint(node)", popover) == []
        looking.shot(f"story-{'dark' if dark else 'light'}")
        looking.page.keyboard.press("Escape")


def test_the_checks_find_what_they_are_for(looking: Lab) -> None:
    notebook = looking.new(["%%mlx\nshort"], setup=SLOW)
    notebook.run(0)
    notebook.wait_end(0)
    node = show(notebook, 0)
    looking.page.wait_for_selector("[aria-label='Run again']")  # the view that stays: it is live again
    spoil = """(node) => {
      const view = node.querySelector(".mlxnb"), add = (style, text, tag = "div") => {
        const e = view.appendChild(document.createElement(tag));
        e.style.cssText = style; e.textContent = text;
      };
      view.style.background = "#fffffe"; view.style.overflow = "visible";
      add("color: #aaa; background: #fff", "too faint");
      add("width: 60px; overflow: hidden; white-space: nowrap", "a text that is cut off at its side");
      add("width: 3000px", "sticks out");
      add("height: 40px; background: #fff; width: 200px", "");
      add("height: 10px; min-height: 0; padding: 0; line-height: 8px", "small", "button");
      add("margin-top: -20px", "drawn over the one before");
    }"""
    looking.page.evaluate(spoil, node)
    looking.theme(True)
    found = dict(looking.page.evaluate("(node) => window.__looks.faults(node, true)", node))
    assert set(found) == {"overflowing", "clipped", "collisions", "faint", "foreign", "small", "glaring"}


@pytest.mark.tier("N")
@pytest.mark.parametrize("options", ["", "--view tokens --logprobs 4", "-n 3"], ids=["answer", "tokens", "compare"])
def test_every_kind_of_answer_looks_right_in_every_view(looking: Lab, options: str) -> None:
    kind = {"": "answer", "-n 3": "compare"}.get(options, "tokens")
    notebook = looking.new([f"%%mlx {options}\n{name}" for name in NAMES], setup=SLOW, name=kind)
    notebook.run_all()
    for cell in range(len(NAMES)):
        notebook.wait_end(cell)
    look(notebook, {f"{kind}-{name}": cell for cell, name in enumerate(NAMES)}, widths=(600, *WIDTHS))


@pytest.mark.tier("N")
def test_every_view_looks_right_in_a_narrow_window(looking: Lab) -> None:
    notebook = shown(looking, ANSWERS, setup=f"{SLOW}\n{ITEMS}")
    settle(notebook, ANSWERS)
    look(notebook, {name: cell for cell, name in enumerate(ANSWERS)}, widths=(600,))


@pytest.mark.tier("N")
def test_every_state_of_a_run_looks_right(looking: Lab) -> None:
    """While it loads, streams, waits; stopped, cut, failed, empty; a chat that is empty, edited, refused."""
    setup = "\n".join(
        [
            "import scripted",
            "from fake_client import Failure",
            "from mlxnb_engine.errors import RequestError",
            "error = RequestError('The context of this model is full at 8,192 tokens.', 'Start a new chat, or shorten the prompt.')",
            "failures = [Failure(error, text='fail', after=5)]",
            "answer = ['one ', 'two ', 'three ', 'four '] * 10",
            "scripted.use(lambda request, index: answer, hold=9, failures=failures, load=[('download', 63_000_000, 92_000_000)])",
        ]
    )
    cells = {
        "failed": "%%mlx --bg\nfail",
        "streaming": "%%mlx --bg\nstream",
        "streaming-samples": "%%mlx --bg -n 3\nstream",
        "stopped": "%%mlx --bg -o stopped\nstop",
        "limit": "%%mlx --max-tokens 8\nlimit",
        "chat-empty": "import mlxnb\nempty = mlxnb.load().chat()\nempty.show()",
        "chat-streaming": "chat = mlxnb.load().chat()\nchat.show()\nchat.send('stream', wait=False)\nNone",
        "playground-empty": "mlxnb.playground()\nNone",
    }
    notebook = shown(looking, cells, setup=setup)
    notebook.call("stopped.cancel()")
    places = {name: cell for cell, name in enumerate(cells)}
    said = {"failed": "full at 8,192", "stopped": "stopped after", "limit": "cut at the limit", "chat-streaming": "streaming"}
    for name, words in said.items():
        wait_words(notebook, places[name], words)
    look(notebook, places)
    notebook.call("scripted.client().release()")
