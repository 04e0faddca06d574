"""Saved answers in readers that are not Jupyter: HTML and Markdown by nbconvert, from the bundle that stays in a notebook."""

from __future__ import annotations

import re

import nbformat
import pytest
from markdown_it import MarkdownIt
from nbconvert.exporters import HTMLExporter, MarkdownExporter
from test_display import end, log, say
from test_sanitize import CHROME_TAGS, TEXT_TAGS, faults
from xss_payloads import PAYLOADS

from mlxnb import sanitize
from mlxnb.render import MAX_CARDS, group_bundle, run_bundle
from mlxnb.run import Run, RunGroup

ANSWER = "A list:\n\n- one\n- two\n\n```python\nx = 1\n\ny = x < 2 & 3\n```\n\nand the end."
CARRIERS = (
    "{}",
    "Before.\n\n{}\n\nAfter.",
    "```\ncode\n\n{}\n\nmore\n```",
    "    code\n\n    {}\n\n    more",
    "- item\n\n  ```\n  a\n\n  {}\n  ```",
)
VIEWS = ("answer", "tokens", "raw", "cards", "table")


def answered(text: str) -> Run:
    generation = log()
    say(generation, text)
    end(generation, text)
    return Run(generation)


def bundle_of(text: str, view: str) -> dict[str, object]:
    if view in ("cards", "table"):
        return group_bundle(RunGroup([answered(text)] * (1 if view == "cards" else MAX_CARDS + 1)))
    return run_bundle(answered(text), view)


def notebook_of(bundles: list[dict[str, object]]) -> nbformat.NotebookNode:
    outputs = [nbformat.v4.new_output("display_data", bundle) for bundle in bundles]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%%mlx\nq", outputs=[output]) for output in outputs])
    nbformat.validate(made)
    return made


def as_markdown(texts: list[str], view: str) -> str:
    """What a reader of the exported Markdown file makes of it, raw HTML allowed."""
    body, _ = MarkdownExporter().from_notebook_node(notebook_of([bundle_of(text, view) for text in texts]))
    return MarkdownIt("commonmark", {"html": True}).render(body)


def hostile(every: int) -> list[str]:
    """Payloads of each kind together, and each so-manieth alone, where they may stand in an answer."""
    chosen = [payload for kind, payload in PAYLOADS if kind.endswith("together")] + [payload for _, payload in PAYLOADS[::every]]
    return [carrier.replace("{}", payload) for payload in chosen for carrier in CARRIERS]


def active(markup: str) -> list[str]:
    return faults(markup, TEXT_TAGS | CHROME_TAGS, chrome=True)


@pytest.mark.parametrize("view", VIEWS)
def test_an_exported_page_has_the_whole_answer_and_no_widget(view: str) -> None:
    body, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook_of([bundle_of(ANSWER, view)]))
    shown = re.sub(r"<[^>]*>", "", body[body.index("<body") :]).replace("&#10;", "\n")
    for line in ("one", "two", "x = 1", "y = x &lt; 2 &amp; 3", "and the end."):
        assert line in shown
    assert "widget-view" not in body and "not found" not in shown.lower()


@pytest.mark.parametrize("view", VIEWS)
def test_an_exported_markdown_file_has_the_whole_answer(view: str) -> None:
    found = as_markdown([ANSWER], view)
    for line in ("one", "two", "x = 1", "y = x &lt; 2 &amp; 3", "and the end."):
        assert line in found
    assert "<p><" not in found.replace("<p><br", ""), "our HTML goes through as it is"


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_of_an_answer_is_active_in_an_exported_markdown_file(view: str) -> None:
    assert active(as_markdown(hostile(60 if view == "table" else 6), view)) == []


def test_the_check_catches_html_with_blank_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the HTML is as safe by itself, and what follows a blank line in it is read as Markdown."""
    monkeypatch.setattr(sanitize, "_unbroken", lambda markup: markup)
    assert any("tag img" in fault for fault in active(as_markdown(hostile(60), "raw")))


def test_text_without_its_blank_lines_is_the_same_text_in_a_browser() -> None:
    lines = "a\n\nb\n \n\t\n\n\nc\n"
    markup = sanitize.bundle(sanitize.preformatted(lines), lines)["text/html"]
    inside = markup[markup.index(">\n") + 2 : markup.index("</pre>")]
    assert inside.replace("&#10;", "\n") == lines
    assert not re.search(r"\n[ \t]*\n", markup)
