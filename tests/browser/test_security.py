"""S1 and S2 in a real browser: hostile answers run nothing and fetch nothing, live, reopened, trusted or not, and in exported HTML.

Every payload is an answer of a scripted engine, shown by the real path. Then every element of the output gets every event
that an inline handler could wait for. The negative controls show that the same check catches one bad renderer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from xss_payloads import PAYLOADS

from .lab import Lab, Notebook, ran

SETUP = "import scripted; scripted.use(scripted.payload)"
PER_CELL = 45
"""JupyterLab shows at most 50 outputs of a cell."""
STARTS = range(0, len(PAYLOADS), PER_CELL)
WHOLE = [number for number, (kind, _) in enumerate(PAYLOADS) if kind.endswith("together")]

HTML_ONLY = """
import mlxnb_widgets, mlxnb.render
mlxnb_widgets.available = lambda: False
whole = mlxnb.render.Renderer.mime
mlxnb.render.Renderer.mime = lambda self, saved=False: whole(self)
"""
FORMS = {"views": SETUP, "html": HTML_ONLY + SETUP}
"""What JupyterLab shows of an answer: our views, or, where they are not to be had, the HTML made in Python."""

UNSAFE = HTML_ONLY + """
import scripted, mlxnb.sanitize as sanitize
from markdown_it import MarkdownIt
raw = MarkdownIt("commonmark", {"html": True})
mlxnb.render.markdown_to_html = lambda text: sanitize._safe(raw.render(text))
"""


def cell_for(first: int, options: str = "") -> str:
    return f"scripted.run_payloads({first}, {first + PER_CELL}, {options!r})"


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
    """Every payload answered once, live: what was suspicious then, and the notebook file that came of it."""

    path: str
    live: list[str]


def answer_all(lab: Lab, form: str) -> Answered:
    lab.watch.reset()
    notebook = lab.new([cell_for(first) for first in STARTS], setup=FORMS[form], name="payloads")
    notebook.run_all()
    assert len(PAYLOADS) >= 150 and shown(notebook) == len(PAYLOADS)
    if form == "views":
        for cell in range(len(STARTS)):
            notebook.wait_end(cell)
    live = look(lab, notebook, len(STARTS))
    notebook.save()
    lab.close_all()
    return Answered(notebook.path, live)


@pytest.fixture(scope="module", params=FORMS)
def answered(lab_page: Lab, request: pytest.FixtureRequest) -> Answered:
    return answer_all(lab_page, request.param)


def shown(notebook: Notebook) -> int:
    return sum(len([out for out in notebook.outputs(cell) if out["output_type"] == "display_data"]) for cell in range(len(STARTS)))


def test_hostile_answers_do_nothing_live(answered: Answered) -> None:
    assert answered.live == []


def test_hostile_answers_do_nothing_in_a_reopened_notebook(lab: Lab, answered: Answered) -> None:
    again = lab.open(answered.path)
    assert again.trusted and shown(again) == len(PAYLOADS)
    assert look(lab, again, len(STARTS)) == []


@pytest.mark.tier("N")
def test_hostile_answers_do_nothing_in_a_notebook_that_nobody_trusts(lab: Lab, answered: Answered) -> None:
    again = lab.open(lab.untrusted(answered.path))
    assert not again.trusted and shown(again) == len(PAYLOADS)
    assert look(lab, again, len(STARTS)) == []


def export(lab: Lab, source: Path, target: Path) -> tuple[str, ...]:
    """Write what `jupyter nbconvert --to html` does; the addresses that its own template loads from."""
    from nbconvert.exporters import HTMLExporter

    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=lab.server.env)
    assert done.returncode == 0, done.stderr
    traits = HTMLExporter.class_traits()
    return tuple(str(trait.default_value) for name, trait in traits.items() if name.endswith("_url") and trait.default_value)


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
    cell = f"for n in {WHOLE}: scripted.run_payloads(n, n + 1, {options!r})"
    notebook = lab.new([cell], setup=SETUP)
    notebook.run(0)
    assert len(notebook.outputs(0)) == len(WHOLE)
    assert look(lab, notebook, 1) == []
    again = notebook.reopened()
    assert look(lab, again, 1) == []


def test_a_hostile_answer_cut_anywhere_does_nothing_while_it_streams(lab: Lab, scale: int) -> None:
    """S2: one character a token, an update at each; every prefix of the payload is on the screen once."""
    single = [number for number in range(len(PAYLOADS)) if number not in WHOLE]
    count = 30 if scale == 1 else len(single)
    chosen = [single[round(i * (len(single) - 1) / (count - 1))] for i in range(count)]
    setup = """
import scripted, mlxnb.display as display
display.INTERVAL_S, display.RENDER_SHARE = 0.0, 0.0
scripted.use(scripted.characters, step_s=0.004)
"""
    per_cell = [chosen[i : i + 30] for i in range(0, len(chosen), 30)]
    notebook = lab.new([f"for n in {numbers}: scripted.run_payloads(n, n + 1)" for numbers in per_cell], setup=setup)
    notebook.run_all()
    characters = sum(len(PAYLOADS[n][1]) for n in chosen)
    updates = notebook.messages()["kinds"].count("update_display_data") + notebook.messages()["kinds"].count("comm_msg")
    assert updates > characters / 20, "the stream was shown in pieces"
    assert look(lab, notebook, len(per_cell)) == []


def test_the_check_catches_a_renderer_that_lets_html_through(lab: Lab) -> None:
    """Negative control: Markdown with raw HTML on and no sanitiser, by the same path."""
    notebook = lab.new([f"for n in {WHOLE}: scripted.run_payloads(n, n + 1)"], setup=UNSAFE + SETUP)
    notebook.run(0)
    found = look(lab, notebook, 1)
    assert any("alert(" in text for text in found), found[:20]
    assert any("evil.example" in text and not text.startswith(("element", "handler", "image", "address")) for text in found), found[:20]
    lab.fresh()


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
    assert any(text.startswith("alert(1)") for text in look(lab, notebook, 1))
    lab.fresh()

