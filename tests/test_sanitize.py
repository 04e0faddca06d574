"""Nothing that a model writes may run or fetch. The checker below parses the HTML; it is shown an unsafe renderer it must catch."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from xss_payloads import PAYLOADS

from mlxnb import sanitize
from mlxnb.sanitize import SafeHtml, bundle, el, join, markdown_to_html, meter, preformatted, text, token_span, visible_text

TEXT_TAGS = {"p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre", "blockquote", "a", "span"}
TEXT_TAGS |= {"ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td"}
CHROME_TAGS = {"div", "span", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "strong"}
TEXT_ATTRIBUTES = {"a": {"href", "title", "rel"}, "ol": {"start"}, "code": {"class"}}
MACROS = re.compile(r"\\(href|url|require|class|style|cssId|data|bbox|mmlToken|unicode|def|let|csname|newcommand|colorbox)(?![A-Za-z])")
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Reader(HTMLParser):
    """Collects what a browser would act on, and the text that MathJax would read as one string (it reads across <br> only)."""

    def __init__(self, tags: set[str], chrome: bool) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.strings = [""]
        self._tags, self._chrome, self._code = tags, chrome, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self._tags:
            self.faults.append(f"tag {tag}")
        for name, value in attrs:
            self._attribute(tag, name, value or "")
        if tag in ("pre", "code"):
            self._code += 1
        if tag == "br":
            self.strings[-1] += "\n"  # so does MathJax
        else:
            self.strings.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("pre", "code"):
            self._code -= 1
        self.strings.append("")

    def _attribute(self, tag: str, name: str, value: str) -> None:
        if self._chrome and name in ("style", "title"):
            if name == "style" and re.search(r"url|expression|import|position|[<>\"\\]", value):
                self.faults.append(f"style {value}")
            return
        if name not in TEXT_ATTRIBUTES.get(tag, set()):
            self.faults.append(f"attribute {tag}[{name}]")
        if name == "href" and urlsplit(value.strip()).scheme.lower() not in ("http", "https", "mailto"):
            self.faults.append(f"url {value}")
        if name == "class" and not re.fullmatch(r"language-[\w+#.\-]{1,32}", value):
            self.faults.append(f"class {value}")

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.strings[-1] += data

    def handle_comment(self, data: str) -> None:
        self.faults.append(f"comment {data}")

    def handle_decl(self, decl: str) -> None:
        self.faults.append(f"declaration {decl}")

    handle_pi = unknown_decl = handle_decl


def faults(markup: str, tags: set[str] = TEXT_TAGS, chrome: bool = False) -> list[str]:
    """What is wrong with this markup; [] if a browser would run and fetch nothing."""
    reader = Reader(tags, chrome)
    reader.feed(markup)
    reader.close()
    found = reader.faults + [f"macro {m.group()}" for string in reader.strings for m in MACROS.finditer(string)]
    return found + [f"control {c!r}" for c in UNSEEN.findall(markup)]


def test_the_corpus_has_at_least_150_payloads() -> None:
    assert len(set(PAYLOADS)) >= 150


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in PAYLOADS}))
def test_no_payload_survives_as_markdown(kind: str) -> None:
    for _, payload in (item for item in PAYLOADS if item[0] == kind):
        for carrier in ("{}", "Text before.\n\n{}\n\nText after.", "- item {}", "> {}", "**{}**", "| a |\n|---|\n| {} |", "$x$ {} $y$"):
            value = carrier.replace("{}", payload)
            assert faults(str(markdown_to_html(value))) == [], value


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in PAYLOADS}))
def test_no_payload_survives_in_our_own_chrome(kind: str) -> None:
    for _, payload in (item for item in PAYLOADS if item[0] == kind):
        whole = join(
            [
                preformatted(payload),
                token_span(payload, payload, title=payload, doubt=0.5),
                el("div", "foot", payload, el("span", "fact", payload, title=payload)),
                text(payload),
            ]
        )
        assert faults(str(whole), CHROME_TAGS, chrome=True) == [], payload


def test_every_prefix_of_a_streamed_payload_is_safe() -> None:
    for _, payload in PAYLOADS[::5]:
        for end in range(1, len(payload) + 1):
            assert faults(str(markdown_to_html(payload[:end]))) == [], payload[:end]


def test_the_checker_catches_raw_html_without_a_sanitiser() -> None:
    unsafe = MarkdownIt("commonmark", {"html": True})
    caught = {kind for kind, payload in PAYLOADS if faults(unsafe.render(payload))}
    assert {"script", "handler", "svg or math", "style", "fetch", "form", "jupyterlab", "tex", "terminal"} <= caught
    share = sum(bool(faults(unsafe.render(payload))) for _, payload in PAYLOADS) / len(PAYLOADS)
    assert share > 0.6, f"the unsafe renderer was caught on only {share:.0%}"


def test_the_checker_catches_an_allowed_remote_image_and_a_script_link() -> None:
    assert faults('<img src="https://evil.example/x">') == ["tag img", "attribute img[src]"]
    assert faults('<a href="javascript:alert(1)">x</a>') == ["url javascript:alert(1)"]
    assert faults("<p>$\\hr<br>ef$ \\href{x}</p>") == ["macro \\href"]


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>\"'`&;:/\\()[]{}!$*_#|-=\n \tahrefscript\x00\x1b\ud800\u202e"), max_size=120))
def test_no_random_text_makes_anything_active(value: str) -> None:
    assert faults(str(markdown_to_html(value))) == []
    assert faults(str(preformatted(value)), CHROME_TAGS, chrome=True) == []


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_preformatted_and_plain_text_keep_every_visible_character(value: str) -> None:
    reader = Reader(CHROME_TAGS, chrome=True)
    body = str(preformatted(value)).split(">\n", 1)[1].removesuffix("</pre>")
    reader.feed(body)
    reader.close()
    assert "".join(reader.strings) == visible_text(value)
    assert visible_text(visible_text(value)) == visible_text(value)


def test_markdown_keeps_what_answers_are_made_of() -> None:
    shown = str(
        markdown_to_html(
            "# T\n\n*a* **b** ~~c~~ `d`\n\n- e\n\n3. f\n\n| g |\n|---|\n| h |\n\n```python\ni\n```\n\n[j](https://k.example 'l')"
        )
    )
    for piece in (
        "<h1>T</h1>",
        "<em>a</em>",
        "<strong>b</strong>",
        "<s>c</s>",
        "<code>d</code>",
        "<li>e</li>",
        '<ol start="3">',
        "<th>g</th>",
    ):
        assert piece in shown
    assert '<code class="language-python">i' in shown
    assert '<a href="https://k.example" title="l" rel="noopener noreferrer">j</a>' in shown


@pytest.mark.parametrize("mark", ["42.", "1)", "-", "*", "#", "##", "007."])
def test_an_empty_block_is_its_mark_as_text(mark: str) -> None:
    assert str(markdown_to_html(mark)) == f"<p>{mark}</p>\n"
    assert f"<p>{mark}</p>" in str(markdown_to_html(f"> {mark}")) and "<p>&gt;</p>" in str(markdown_to_html(">"))
    assert str(markdown_to_html("1.\n2.")) == "<p>1.<br>\n2.</p>\n"
    assert "<li></li>" in str(markdown_to_html("1. a\n2."))


def test_html_in_an_answer_is_shown_as_text() -> None:
    assert "&lt;b&gt;x&lt;/b&gt;" in str(markdown_to_html("<b>x</b>"))
    assert "&lt;think&gt;" in str(markdown_to_html("<think>so</think>"))


def test_an_image_becomes_its_alternative_text() -> None:
    assert str(markdown_to_html("![a *cat*](https://evil.example/x.png)")) == "<p><span>a cat</span></p>\n"


def test_formulas_stay_whole_and_money_stays_text() -> None:
    shown = str(markdown_to_html("It costs $5 and $10. Let $x_{i} * y_{j} * z$ be \\(a_1 \\{b\\}\\) and\n\n$$\nE = mc^2\n$$"))
    assert "$x_{i} * y_{j} * z$" in shown
    assert "\\(a_1 \\{b\\}\\)" in shown
    assert "$$\nE = mc^2\n$$" in shown
    assert "<span>$</span>5 and <span>$</span>10" in shown


def test_control_characters_are_visible_in_plain_text() -> None:
    assert visible_text("a\x1b[31mb\x00\x7f\x9b\u202e") == "a\u241b[31mb\u2400\u2421<U+009B><U+202E>"
    assert visible_text("one\r\ntwo\rthree\n\tfour") == "one\ntwo\nthree\n\tfour"
    assert visible_text("\ud800x") == "\ufffdx"


def test_safe_html_cannot_be_made_elsewhere_or_changed() -> None:
    with pytest.raises(TypeError):
        SafeHtml("<script>", _key=object())
    with pytest.raises(TypeError):
        SafeHtml("<script>")  # type: ignore[call-arg]
    made = text("x")
    with pytest.raises(AttributeError):
        made._markup = "<script>"  # type: ignore[misc]
    with pytest.raises(TypeError):
        bundle("<script>", "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        join(["<script>"])  # type: ignore[list-item]


def test_chrome_takes_only_its_own_tags_and_styles() -> None:
    with pytest.raises(KeyError):
        el("script", None, "x")  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        el("div", "background:url(x)", "x")
    assert str(el("div", None, "<b>", el("span", None, "&"))) == "<div>&lt;b&gt;<span>&amp;</span></div>"


def test_a_bundle_is_html_and_plain_text_with_controls_visible() -> None:
    made = bundle(text("<x>"), "a\x1bb")
    assert made == {"text/plain": "a\u241bb", "text/html": "&lt;x&gt;"}


@pytest.mark.parametrize("fraction, width", [(-1.0, "0.0%"), (0.5, "50.0%"), (7.0, "100.0%")])
def test_a_meter_stays_inside_its_frame(fraction: float, width: str) -> None:
    assert f"width:{width}" in str(meter(fraction))


@pytest.mark.parametrize(
    "value", ["[" * 20_000, ">" * 20_000, "*a_ " * 10_000, "![[" * 8_000, "`" * 999 + "a" * 999, "$a" * 20_000, "\\(a" * 8_000]
)
def test_deep_or_open_constructs_render_to_something_safe(value: str) -> None:
    assert faults(str(markdown_to_html(value))) == []


def test_a_very_long_answer_is_preformatted_and_complete() -> None:
    value = "**word** " * (sanitize.MAX_MARKDOWN_CHARS // 9 + 10)
    assert str(markdown_to_html(value)) == str(preformatted(value))


@pytest.mark.parametrize("mark", ["> ", ">", "- ", "1. ", "> - "])
@pytest.mark.parametrize("depth", [5, 25, 80, 120, 1000])
def test_no_text_vanishes_however_deep_it_is_nested(mark: str, depth: int) -> None:
    html = str(markdown_to_html(mark * depth + "treasure\n\nafter"))
    assert "treasure" in html and "after" in html


CASES = json.loads((Path(__file__).parent / "math_cases.json").read_text("utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:40])
def test_a_formula_is_what_both_sides_say_it_is(case: dict[str, Any]) -> None:
    found = []
    for token in sanitize._markdown().parse(visible_text(case["text"])):
        found += [token.content] if token.type == "math_block" else []
        found += [child.content for child in token.children or [] if child.type == "math"]
    assert found == case["math"]


def test_a_formula_stays_readable_source_in_html() -> None:
    assert str(markdown_to_html("Let\n$$\na < b\n- c\n$$\nbe")) == "<p>Let</p>\n<p>$$\na &lt; b\n- c\n$$</p>\n<p>be</p>\n"
    assert str(markdown_to_html("costs $5 and $6")) == "<p>costs <span>$</span>5 and <span>$</span>6</p>\n"
