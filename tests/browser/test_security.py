"""S1 and S2 in a real browser: hostile answers run nothing and fetch nothing, live, reopened, trusted or not, and in exported HTML.

Every payload is an answer of a scripted engine, shown by the real path: in our views 150 of them (tier N: all), one byte a token,
so that every prefix was drawn; as HTML all of them. Then every inline handler in the output gets every
event that it could wait for. The negative controls show that the same check catches one bad renderer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from xss_payloads import PAYLOADS

from .lab import Lab, Notebook, ran

SETUP = "import scripted; scripted.use(scripted.payload)"
IN_STEP = "import scripted; scripted.in_step(scripted.cut(%s), hold=0)"
PER_CELL = 45
"""JupyterLab shows at most 50 outputs of a cell."""
WHOLE = [number for number, (kind, _) in enumerate(PAYLOADS) if kind.endswith("together")]
SINGLE = [number for number in range(len(PAYLOADS)) if number not in WHOLE]

HTML_ONLY = """
import mlxnb_widgets, mlxnb.render
mlxnb_widgets.available = lambda: False
whole = mlxnb.render.Renderer.mime
mlxnb.render.Renderer.mime = lambda self, saved=False: whole(self)
"""
QUICK = """
import mlxnb.display, scripted
mlxnb.display.INTERVAL_S = mlxnb.display.RENDER_SHARE = 0.0
scripted.use(scripted.cut(%s), step_s=0.004)
"""
DRAWN = {"views": ".mlxnb-answer-text", "html": ".jp-RenderedHTMLCommon"}
"""What JupyterLab shows of an answer, our views or, where they are not to be had, the HTML made in Python; and what each output
must have one of, so that nothing is found safe because it was not drawn."""

UNSAFE = (
    HTML_ONLY
    + """
import scripted, mlxnb.sanitize as sanitize
from markdown_it import MarkdownIt
raw = MarkdownIt("commonmark", {"html": True})
mlxnb.render.markdown_to_html = lambda text: sanitize._safe(raw.render(text))
"""
)
STRIPS = (
    HTML_ONLY
    + """
import re, scripted, mlxnb.sanitize as sanitize
strip = lambda text: re.sub("<[^>]*>", "", text)
mlxnb.render.markdown_to_html = lambda text: sanitize._safe("".join(map(strip, %s)))
"""
)


def cells_for(numbers: Sequence[int], options: str = "", per_cell: int = PER_CELL) -> list[str]:
    """Cells that ask for these payloads, each in an output of its own."""
    return [f"scripted.run_payloads({list(numbers[at : at + per_cell])}, {options!r})" for at in range(0, len(numbers), per_cell)]


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """So many of them, from all over the list."""
    return [numbers[round(i * (len(numbers) - 1) / (count - 1))] for i in range(count)]


def look(lab: Lab, notebook: Notebook, cells: int, own: str = "") -> list[str]:
    """Everything suspicious about the outputs: markup, scripts that ran, requests, dialogs."""
    lab.page.wait_for_timeout(300)  # a fetch or a handler that markup started is seen by now
    found: list[str] = []
    for cell in range(cells):
        node = notebook.output(cell)
        found += lab.page.evaluate("([node, own]) => window.__watch.suspects(node, own)", [node, own])
        lab.page.evaluate("(node) => window.__watch.provoke(node)", node)
    lab.page.wait_for_timeout(300)
    return found + verdict(lab)


def verdict(lab: Lab) -> list[str]:
    ids = "#document, #Jupyter, #x, [id=jp-main-dock-panel] ~ [id=jp-main-dock-panel]"
    clobbered = lab.page.evaluate("(ids) => [...document.querySelectorAll(ids)].map((e) => 'id ' + e.outerHTML.slice(0, 120))", ids)
    return clobbered + ran(lab.page) + [f"dialog {text}" for text in lab.watch.dialogs] + lab.watch.strangers()


@dataclass(frozen=True)
class Answered:
    """Payloads answered once, live: what was suspicious then, and the notebook file that came of it."""

    form: str
    path: str
    cells: int
    count: int
    live: list[str]


def answer_all(lab: Lab, form: str, numbers: Sequence[int], cut: Sequence[int]) -> Answered:
    """cut: payloads that come one byte a token; each is on the screen before the next one comes (in our views)."""
    lab.begin()
    step = form == "views"
    setup = IN_STEP % list(cut) if step else f"{HTML_ONLY}{SETUP if not cut else QUICK % list(cut)}"
    cells = cells_for(numbers, "--bg" if step else "")
    notebook = lab.new(cells, setup=setup, name="payloads")
    notebook.run_all()
    if step:
        notebook.call("scripted.client().release()")
        for cell in range(len(cells)):
            notebook.wait_end(cell, 240)
    require_cut(notebook, form, cut)
    live = look(lab, notebook, len(cells))
    made = Answered(form, notebook.path, len(cells), len(numbers), live)
    assert made.count >= 150
    require_drawn(notebook, made)
    notebook.save()
    lab.close_all()
    return made


@pytest.fixture(scope="module", params=DRAWN)
def answered(lab_page: Lab, request: pytest.FixtureRequest, scale: int) -> Answered:
    every = range(len(PAYLOADS))
    if scale > 1:
        return answer_all(lab_page, request.param, every, SINGLE)
    some = spread(SINGLE, 150)
    return answer_all(lab_page, "views", some, some) if request.param == "views" else answer_all(lab_page, "html", every, ())


def require_cut(notebook: Notebook, form: str, cut: Sequence[int]) -> None:
    """The stream was shown in pieces: one message for each byte of the longest, or, as HTML, updates all the time."""
    sizes = [len(PAYLOADS[n][1].encode("utf-8", "surrogatepass")) for n in cut]
    kinds = notebook.messages()["kinds"]
    if form == "views":
        assert kinds.count("comm_msg") >= max(sizes)
    elif cut:
        assert kinds.count("update_display_data") > sum(sizes) / 20


def require_drawn(notebook: Notebook, made: Answered) -> None:
    """Every output is in the page, in the form that is looked at."""
    count = "([node, drawn]) => [...node.querySelectorAll('.jp-OutputArea-child')].filter((one) => one.querySelector(drawn)).length"
    outputs = [notebook.output(cell) for cell in range(made.cells)]
    notebook.lab.until(lambda: sum(notebook.page.evaluate(count, [one, DRAWN[made.form]]) for one in outputs) == made.count, 20)


def reopened(lab: Lab, made: Answered, path: str) -> Notebook:
    again = lab.open(path)
    require_drawn(again, made)
    return again


def test_hostile_answers_do_nothing_live(answered: Answered) -> None:
    assert answered.live == []


def test_hostile_answers_do_nothing_in_a_reopened_notebook(lab: Lab, answered: Answered) -> None:
    again = reopened(lab, answered, answered.path)
    assert again.trusted
    assert look(lab, again, answered.cells) == []


@pytest.mark.tier("N")
def test_hostile_answers_do_nothing_in_a_notebook_that_nobody_trusts(lab: Lab, answered: Answered) -> None:
    again = reopened(lab, answered, lab.untrusted(answered.path))
    assert not again.trusted
    assert look(lab, again, answered.cells) == []


def test_a_notebook_that_nobody_trusts_shows_the_views_with_their_tokens(lab: Lab) -> None:
    """The saved record is rendered by the extension, which declares it safe; the HTML beside it is not what is seen."""
    number = next(number for number, (_, text) in enumerate(PAYLOADS) if "<img src=x onerror=alert(1)>" in text)
    notebook = lab.new(cells_for([number], "--logprobs 3"), setup=SETUP)
    notebook.run(0)
    notebook.wait_end(0)
    notebook.save()
    notebook.close()
    again = lab.open(lab.untrusted(notebook.path))
    tab = again.output(0).wait_for_selector("[role=tab] >> text=Tokens")
    assert not again.trusted
    tab.click()
    tokens = again.output(0).wait_for_selector(".mlxnb-tok") and again.output(0).query_selector_all(".mlxnb-tok")
    assert "".join(token.text_content() for token in tokens) == PAYLOADS[number][1]
    tokens[0].focus()
    lab.page.wait_for_selector("text=alt1")  # what else the token could have been
    assert look(lab, again, 1) == []


def export(lab: Lab, source: Path, target: Path) -> tuple[str, ...]:
    """Write what `jupyter nbconvert --to html` does; the addresses that its own template loads from."""
    from nbconvert.exporters import HTMLExporter

    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=lab.server.env)
    assert done.returncode == 0, done.stderr
    traits = HTMLExporter.class_traits()
    return tuple(str(trait.default_value) for name, trait in traits.items() if name.endswith("_url") and trait.default_value)


@pytest.mark.tier("N")
def test_hostile_answers_do_nothing_in_exported_html(lab: Lab, answered: Answered, tmp_path: Path) -> None:
    own = export(lab, lab.server.notebooks / answered.path, tmp_path / "payloads.html")
    page = lab.page.context.new_page()
    try:
        lab.watch.reset()
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((tmp_path / "payloads.html").as_uri())
        page.wait_for_timeout(500)
        assert page.evaluate("() => document.body.innerText.length") > 5000
        page.evaluate("() => window.__watch.provoke(document.body)")
        page.wait_for_timeout(300)
        home = (tmp_path / "payloads.html").as_uri()
        assert [url for url in requests if not url.startswith((*own, "data:", home))] == []
        assert ran(page) == [] and lab.watch.dialogs == []
    finally:
        page.close()


MANY = pytest.param("-n 13", marks=pytest.mark.tier("N"))


@pytest.mark.parametrize("options", ["--view tokens --logprobs 3", "--view raw", "-n 2", MANY])
def test_hostile_answers_do_nothing_in_any_other_view(lab: Lab, options: str) -> None:
    notebook = lab.new(cells_for(WHOLE, options), setup=SETUP)
    notebook.run(0)
    assert len(notebook.outputs(0)) == len(WHOLE)
    assert look(lab, notebook, 1) == []
    again = notebook.reopened()
    assert look(lab, again, 1) == []


# -- negative controls -------------------------------------------------------------------------------------------------------


def scripts_that_ran(found: list[str]) -> bool:
    return any(text.startswith("alert(") for text in found)


def test_the_check_catches_a_renderer_that_lets_html_through(lab: Lab) -> None:
    """Negative control of S1: Markdown with raw HTML on and no sanitiser, by the same path."""
    notebook = lab.new(cells_for(WHOLE), setup=UNSAFE + SETUP)
    notebook.run(0)
    found = look(lab, notebook, 1)
    assert scripts_that_ran(found), found[:20]
    assert any("evil.example" in text and not text.startswith(("element", "handler", "image", "address")) for text in found), found[:20]
    lab.spoil()


@pytest.mark.parametrize(("parts", "caught"), [("text", True), ("[text]", False)], ids=["each-delta", "whole-text"])
def test_the_check_catches_a_filter_that_sees_each_delta_alone(lab: Lab, parts: str, caught: bool) -> None:
    """Negative control of S2: what removes tags from a whole text removes none from the pieces of it."""
    number = next(number for number, (_, text) in enumerate(PAYLOADS) if text == "<img src=x onerror=alert(1)>")
    notebook = lab.new(cells_for([number]), setup=STRIPS % parts + f"scripted.use(scripted.cut([{number}]))")
    notebook.run(0)
    assert scripts_that_ran(look(lab, notebook, 1)) is caught


def test_the_check_catches_a_view_that_takes_text_for_markup(lab: Lab) -> None:
    """Negative control of S1 and S2 in the views: our own bundle, in which every `textContent` is `innerHTML`."""
    with lab.scripts_changed(".textContent=", ".innerHTML=") as places:
        answer = "['`<img src=x', ' onerror=alert(1)>`']"
        notebook = lab.new(["%%mlx\nred question"], setup=f"import scripted; scripted.use(lambda request, index: {answer})")
        notebook.run(0)
        notebook.wait_end(0)
        found = look(lab, notebook, 1)
        assert places and places[0] > 5
        assert scripts_that_ran(found) and any(text.startswith("image") for text in found), found


def test_the_check_catches_markup_that_only_fetches(lab: Lab) -> None:
    """Negative control: an image and nothing else, as our HTML would hold it if images were allowed."""
    markup = '<p><img src="https://evil.example/track.png"></p>'
    notebook = lab.new([f"from IPython.display import HTML; HTML({json.dumps(markup)})"])
    notebook.run(0)
    found = look(lab, notebook, 1)
    assert "image https://evil.example/track.png" in found, found


def test_the_check_catches_a_handler_that_waits_for_the_pointer(lab: Lab) -> None:
    markup = '<b onpointerenter="alert(1)">x</b>'
    notebook = lab.new([f"from IPython.display import HTML; HTML({json.dumps(markup)})"])
    notebook.run(0)
    assert scripts_that_ran(look(lab, notebook, 1))
