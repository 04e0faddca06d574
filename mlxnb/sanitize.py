"""The only producer of HTML: model text in, `SafeHtml` out. Nothing else in the project may name the HTML media type.

Model text, tool results, error text, file and model names are all hostile: JupyterLab puts the HTML of a live cell into
the page and runs its scripts. Two ways in, both here: `markdown_to_html` (Markdown with raw HTML off, then a sanitiser
with our own lists) and `el`/`text` (our own chrome: fixed tags and styles around escaped text).

Covered: scripts, handlers, remote images, style, ids and `data-*`, URL schemes other than http, https and mailto, and
the TeX macros by which MathJax makes links, styles and classes; also where the HTML is put into a Markdown file. Not covered:
where an allowed link leads once clicked.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, final

import nh3
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

MAX_MARKDOWN_CHARS = 200_000
"""A longer answer is shown as it is, preformatted: rendering it would hold the interpreter for seconds."""

TAGS = frozenset(
    ("p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre", "blockquote")
    + ("ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a", "span")
)
ATTRIBUTES: dict[str, set[str]] = {"a": {"href", "title"}, "ol": {"start"}, "code": {"class"}}
URL_SCHEMES = frozenset({"http", "https", "mailto"})
_LANGUAGE = re.compile(r"language-[A-Za-z0-9_+#.\-]{1,32}")
_CLEAN_CONTENT = {"script", "style"}


@final
class SafeHtml:
    """HTML that may be shown as it is. Made only in this file; immutable; `str()` gives the markup."""

    __slots__ = ("_markup",)
    _markup: str

    def __init__(self, markup: str, *, _key: object) -> None:
        if _key is not _KEY:
            raise TypeError("SafeHtml is made by mlxnb.sanitize only; pass text through el() or markdown_to_html().")
        object.__setattr__(self, "_markup", markup)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("SafeHtml is immutable")

    def __str__(self) -> str:
        return self._markup

    def __repr__(self) -> str:
        return f"SafeHtml({self._markup!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SafeHtml) and other._markup == self._markup

    def __hash__(self) -> int:
        return hash(self._markup)

    def __len__(self) -> int:
        return len(self._markup)


_KEY = object()


def _safe(markup: str) -> SafeHtml:
    return SafeHtml(markup, _key=_KEY)


# -- plain text --------------------------------------------------------------------------------------------------------

_LINE_ENDS = re.compile(r"\r\n?")
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)


def visible_text(value: str) -> str:
    """The same text with every control character except newline and tab made visible.

    A terminal then obeys no escape sequence, and text direction cannot be overridden. CR and CRLF become LF; C0 controls
    become their control pictures; C1, bidi and tag characters become <U+XXXX>; a lone surrogate becomes U+FFFD.
    """
    return _UNSEEN.sub(_picture, _LINE_ENDS.sub("\n", value))


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else f"<U+{code:04X}>"


# -- Markdown of a model -------------------------------------------------------------------------------------------------

_TEX_DENIED = re.compile(
    r"\\(?=(?:href|url|require|autoload|class|style|cssId|data|html\w*|Html\w*|unicode|includegraphics|mmlToken|bbox|action|toggle"
    r"|csname|def|edef|gdef|xdef|let|newcommand|renewcommand|providecommand|newenvironment|renewenvironment|DeclareMathOperator"
    r"|DeclarePairedDelimiter\w*|texttip|tooltip|mathtip|colorbox|fcolorbox|enclose|input|write|special|char)(?![A-Za-z]))"
)
"""TeX macros that make links, styles, classes or new macros. MathJax reads no macro across an element, so one breaks it."""


def _broken_macros(escaped: str) -> str:
    return _TEX_DENIED.sub(r"<span>\\</span>", escaped)


def _inert(value: str) -> str:
    """Escaped text that MathJax does not read as a formula: each delimiter stands in an element of its own.

    Denied macros are broken here too: a brace left open in a formula can make MathJax read on into the text after it.
    """
    return _broken_macros(_DELIMITER.sub(r"<span>\g<0></span>", html.escape(value, quote=False)))


_DELIMITER = re.compile(r"\$+|\\(?=[\[\]()]|begin\b|(?:eq)?ref\b)")


_MATH = re.compile(
    r"\$\$(?P<a>(?:[^$\\]|\\.)+?)\$\$|\\\[(?P<b>.+?)\\\]|\\\((?P<c>.+?)\\\)"
    # One dollar: no blank just inside and no letter, digit or dollar just after, so that "$5 and $10" stays money.
    r"|\$(?P<d>(?=[^\s$])(?:[^$\\\n]|\\.){0,400}?(?<=[^\s\\]))\$(?![0-9A-Za-z$])",
    re.DOTALL,
)
_TEXT_COMMAND = re.compile(r"\\(?:text\w*|math(?:rm|it|bf)|operatorname|mbox)\*?\s*\{[^{}]*\}", re.ASCII)
_APART = r"[^A-Za-z\\{}_^=+*/<>|]+"
_PROSE = re.compile(rf"(?<![\\A-Za-z])(?:[a-z]{{2,}}{_APART}[a-z]{{3,}}|[a-z]{{3,}}{_APART}[a-z]{{2,}})|^[\d.,]+\s+[a-z]{{2,}}", re.ASCII)
_MAX_MATH_CHARS, _MAX_MATH_LINES = 4000, 100


def _is_prose(content: str) -> bool:
    """Two dollars with words between them are money or a sentence."""
    return _PROSE.search(_TEXT_COMMAND.sub("", content)) is not None


def _math_rule(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] not in "$\\":
        return False
    found = _MATH.match(state.src, state.pos, min(state.posMax, state.pos + _MAX_MATH_CHARS))
    if found is None or "`" in found.group() or not any(part and part.strip() for part in found.groups()):
        return False
    if found["d"] is not None:
        before = state.src[state.pos - 1 : state.pos]
        if (before.isascii() and before.isalnum()) or before == "$" or _is_prose(found["d"]):
            return False
    if not silent:
        state.push("math", "", 0).content = found.group()
    state.pos = found.end()
    return True


def _math_block_rule(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A formula with lines of its own: its lines are TeX, so none begins a list or a heading."""

    def line_of(line: int) -> str:
        return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()

    lines: list[str] = []
    opening = line_of(start)[:2]
    if opening not in ("$$", "\\[") or state.sCount[start] - state.blkIndent >= 4:
        return False
    closing = "$$" if opening == "$$" else "\\]"
    for line in range(start, min(end, start + _MAX_MATH_LINES)):
        lines.append(line_of(line))
        if not lines[-1] or "`" in lines[-1] or state.sCount[line] < state.blkIndent:
            return False
        at = lines[-1].find(closing, 0 if len(lines) > 1 else 2)
        if at >= 0:
            break
    else:
        return False
    source = "\n".join(lines)
    if at != len(lines[-1]) - 2 or len(source) > _MAX_MATH_CHARS or not source[2:-2].strip():
        return False
    if not silent:
        token = state.push("math_block", "", 0)
        token.content, token.map, token.block = source, [start, start + len(lines)], True
        state.line = start + len(lines)
    return True


_DEEP = 90
"""markdown-it drops what is nested deeper than its limit. No text of a model may vanish, so just before that it becomes plain."""


def _deep_rule(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    if state.level < _DEEP:
        return False
    if not silent:
        state.push("deep", "", 0).content = state.getLines(start, end, 0, False)
    state.line = end
    return True


def _empty_rule(state: StateCore) -> None:
    """An empty block is its mark as text: "42." alone is an answer and no list, "#" no heading. A list counts as empty as a whole."""
    found: list[Token] = []
    at = 0
    while at < len(state.tokens):
        first = state.tokens[at]
        length, marks = _empty_at(state.tokens, at)
        if length:
            found.append(Token("paragraph_open", "p", 1, map=first.map, level=first.level, block=True))
            found.append(Token("inline", "", 0, map=first.map, level=first.level + 1, block=True, content=marks, children=[]))
            found.append(Token("paragraph_close", "p", -1, level=first.level, block=True))
        else:
            found.append(first)
        at += length or 1
    state.tokens = found


def _empty_at(tokens: list[Token], start: int) -> tuple[int, str]:
    """How many tokens the empty block that begins here has, 0 if there is none, and the marks it was written with."""
    first, following = tokens[start], tokens[start + 1 : start + 2]
    if first.type == "blockquote_open" and following[0].type == "blockquote_close":
        return 2, ">"
    if first.type == "heading_open" and first.markup.startswith("#") and not following[0].content:
        return 3, first.markup
    if first.type not in ("ordered_list_open", "bullet_list_open"):
        return 0, ""
    marks, at = [], start + 1
    while tokens[at].type == "list_item_open" and tokens[at + 1].type == "list_item_close":
        marks.append(tokens[at].info + tokens[at].markup)
        at += 2
    whole = tokens[at].type == first.type.replace("open", "close")
    return (at + 1 - start, "\n".join(marks)) if whole else (0, "")


def _render_deep(renderer: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    return f"<p>{_inert(tokens[index].content)}</p>"


def _render_math(renderer: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    return _broken_macros(html.escape(tokens[index].content, quote=False))


def _render_math_block(renderer: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    return f"<p>{_render_math(renderer, tokens, index, options, env)}</p>\n"


def _render_text(renderer: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    return _inert(tokens[index].content)


def _render_image(renderer: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    """An image is its alternative text, in an element of its own so that it cannot complete a macro before it. Nothing is fetched."""
    return f"<span>{_inert(renderer.renderInlineAsText(tokens[index].children or [], options, env) or 'image')}</span>"


@cache
def _markdown() -> MarkdownIt:
    md = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    md.options["maxNesting"] = _DEEP + 10
    md.block.ruler.before("table", "deep", _deep_rule)
    md.add_render_rule("deep", _render_deep)
    md.core.ruler.after("block", "empty", _empty_rule)
    md.inline.ruler.before("escape", "math", _math_rule)
    md.block.ruler.before("fence", "math_block", _math_block_rule, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    md.add_render_rule("math", _render_math)
    md.add_render_rule("math_block", _render_math_block)
    md.add_render_rule("text", _render_text)
    md.add_render_rule("image", _render_image)
    return md


def _attribute(tag: str, name: str, value: str) -> str | None:
    if tag == "code" and name == "class":
        return value if _LANGUAGE.fullmatch(value) else None
    if tag == "ol" and name == "start":
        return value if value.isascii() and value.isdigit() and len(value) < 10 else None
    return value


def _clean(markup: str) -> str:
    return nh3.clean(
        markup,
        tags=set(TAGS),
        clean_content_tags=_CLEAN_CONTENT,
        attributes={tag: set(names) for tag, names in ATTRIBUTES.items()},
        attribute_filter=_attribute,
        strip_comments=True,
        link_rel="noopener noreferrer",
        generic_attribute_prefixes=set(),
        url_schemes=set(URL_SCHEMES),
        url_relative="deny",
    )


def markdown_to_html(value: str) -> SafeHtml:
    """Markdown of any text, sanitised. Always the whole text so far, never a delta. Any string is fine; nothing raises.

    Above MAX_MARKDOWN_CHARS, or where Markdown itself fails, the text is shown preformatted.
    """
    seen = visible_text(value)
    if len(seen) > MAX_MARKDOWN_CHARS:
        return preformatted(seen)
    try:
        return _safe(_clean(_markdown().render(seen)))
    except (RecursionError, ValueError):  # a pathological nesting must not cost the reader the answer
        return preformatted(seen)


# -- our own chrome ------------------------------------------------------------------------------------------------------

Tag = Literal["div", "span", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "strong"]
_CHROME_TAGS = frozenset(Tag.__args__)  # type: ignore[attr-defined]

_INK_2 = "color-mix(in srgb, currentColor 68%, transparent)"
_LINE = "1px solid color-mix(in srgb, currentColor 16%, transparent)"
_FILL = "color-mix(in srgb, currentColor 10%, transparent)"
_ACCENT = "var(--jp-brand-color1, #3c5cdd)"
_UI = "var(--jp-ui-font-family, system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif)"
_MONO = "var(--jp-code-font-family, ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace)"
_SMALL = f"font-family:{_UI};font-size:12px;line-height:18px;font-variant-numeric:tabular-nums;color:{_INK_2}"

STYLES: dict[str, str] = {
    # Ink and hairlines derive from the surrounding text colour, so that light, dark and any theme outside JupyterLab all work.
    "run": "margin:2px 0",
    "answer": "max-width:88ch;overflow-wrap:anywhere",
    "bar": f"{_SMALL};display:flex;flex-wrap:wrap;align-items:center;gap:2px 12px;padding:0 0 6px",
    "foot": f"{_SMALL};display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 14px;margin-top:8px;padding-top:6px;border-top:{_LINE}",
    "chip": f"font-size:11px;line-height:16px;padding:0 5px;border:{_LINE};border-radius:3px;white-space:nowrap;"
    "max-width:40ch;overflow:hidden;text-overflow:ellipsis",
    "fact": "white-space:nowrap",
    "figure": "font-weight:600;color:currentColor",
    "state": "white-space:nowrap",
    "warn": "white-space:nowrap;font-weight:600;color:var(--jp-warn-color0, #b87503)",
    "error": "white-space:nowrap;font-weight:600;color:var(--jp-error-color1, #e0484d)",
    "dot": "display:inline-block;width:7px;height:7px;border-radius:50%;background:var(--jp-success-color1, #2f8f5b);margin-right:6px",
    "waiting": f"{_SMALL};display:inline",
    "problem": f"font-family:{_UI};font-size:13px;line-height:20px;margin-top:8px;padding:4px 10px;"
    "border-left:3px solid var(--jp-error-color1, #e0484d);overflow-wrap:anywhere",
    "hint": f"color:{_INK_2}",
    "meter": f"height:4px;border-radius:2px;background:{_FILL};overflow:hidden;max-width:88ch",
    "code": f"font-family:{_MONO};font-size:11px",
    "raw": f"font-family:{_MONO};font-size:13px;line-height:20px;white-space:pre-wrap;overflow-wrap:anywhere;margin:0;background:none",
    "tokens": f"font-family:{_MONO};font-size:13px;line-height:30px;white-space:pre-wrap;overflow-wrap:anywhere",
    "legend": f"{_SMALL};display:flex;flex-wrap:wrap;gap:2px 14px;padding-bottom:4px",
    "grid": "display:grid;gap:8px;grid-template-columns:repeat(auto-fit,minmax(max(240px,calc((100% - 16px)/3)),1fr))",
    "card": f"display:flex;flex-direction:column;min-width:0;border:{_LINE};border-radius:5px;padding:8px 12px",
    "card_head": f"font-family:{_UI};font-size:13px;line-height:20px;font-weight:600;padding-bottom:4px;overflow-wrap:anywhere",
    "card_body": "flex:1 1 auto;min-width:0;overflow-wrap:anywhere",
    "scroll": "max-height:520px;overflow:auto",
    "table": f"font-family:{_UI};font-size:12px;line-height:18px;border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%",
    "th": f"text-align:left;font-weight:400;color:{_INK_2};padding:3px 8px;border-bottom:{_LINE};white-space:nowrap;vertical-align:bottom",
    "td": f"text-align:left;padding:4px 8px;border-bottom:{_LINE};vertical-align:top;white-space:nowrap",
    "td_number": f"text-align:right;padding:4px 8px;border-bottom:{_LINE};vertical-align:top;white-space:nowrap",
    "td_text": f"text-align:left;padding:4px 8px;border-bottom:{_LINE};vertical-align:top;white-space:pre-wrap;"
    "overflow-wrap:anywhere;min-width:28ch",
}
"""Every style our chrome may use, by name. Model text never reaches this table."""

ORIGIN_UNDERLINES: dict[str, str] = {
    "sampled": "1px solid var(--mlxnb-o-sampled, #5478ee)",
    "filled": "3px solid var(--mlxnb-o-fill, #cc7226)",
    "echo": "4px double var(--mlxnb-o-echo, #a866c9)",
    "drafted": "2px dashed var(--mlxnb-o-draft, #4f9474)",
    "forced": "2px dotted var(--mlxnb-o-forced, #a8872a)",
}
"""Underline of a token by origin. The pattern differs as well as the hue, so colour is never the only sign."""


def text(value: str) -> SafeHtml:
    """Escaped text that stays text: controls visible, no formula."""
    return _safe(_inert(visible_text(value)))


def join(parts: Iterable[SafeHtml]) -> SafeHtml:
    return _safe("".join(_markup(part) for part in parts))


def el(tag: Tag, style: str | None, *parts: SafeHtml | str, title: str = "") -> SafeHtml:
    """One element of our own chrome. style: a name of STYLES, or None. A `str` part is text and gets escaped.

    Raises KeyError for a tag or style that is not in the fixed lists.
    """
    if tag not in _CHROME_TAGS:
        raise KeyError(f"no chrome tag {tag!r}")
    css = f' style="{STYLES[style]}"' if style is not None else ""
    hover = f' title="{_quoted(title)}"' if title else ""
    inner = "".join(_markup(text(part) if isinstance(part, str) else part) for part in parts)
    return _safe(f"<{tag}{css}{hover}>{inner}</{tag}>")


def meter(fraction: float) -> SafeHtml:
    """A progress bar. fraction is clamped to [0, 1]."""
    percent = round(100 * min(1.0, max(0.0, fraction)), 1)
    return _safe(f'<div style="{STYLES["meter"]}"><div style="height:100%;width:{percent}%;background:{_ACCENT}"></div></div>')


def token_span(value: str, origin: str, title: str = "", doubt: float | None = None) -> SafeHtml:
    """One token: underline by origin; background by doubt in [0, 1] (0, or None for not captured: no colour)."""
    line = ORIGIN_UNDERLINES.get(origin, ORIGIN_UNDERLINES["sampled"])
    css = f"border-bottom:{line};padding-bottom:3px;margin-right:1px"
    if doubt is not None and doubt >= 0.05:
        css += f";background:rgba(245,163,58,{round(0.55 * min(1.0, doubt), 2)});border-radius:2px"
    inner = _inert(_whitespace_marks(visible_text(value)))
    hover = f' title="{_quoted(title)}"' if title else ""
    return _safe(f'<span style="{css}"{hover}>{inner}</span>')


def underline_sample(origin: str, name: str) -> SafeHtml:
    """The name of an origin with its underline, for a legend."""
    return token_span(name, origin)


def preformatted(value: str) -> SafeHtml:
    """Text exactly as it is, in a <pre>."""
    # A newline right after <pre> is dropped by HTML parsers; ours keeps the answer's own first newline.
    return _safe(f'<pre style="{STYLES["raw"]}">\n{_inert(visible_text(value))}</pre>')


def bundle(markup: SafeHtml, plain: str) -> dict[str, str]:
    """The MIME bundle of a static output: sanitised HTML, and plain text with controls made visible.

    Raises TypeError for markup that is not SafeHtml.
    """
    return {"text/plain": visible_text(plain), "text/html": _unbroken(_markup(markup))}


_BLANK_LINE = re.compile(r"(?<=\n)([ \t]*)\n")


def _unbroken(markup: str) -> str:
    """The same markup without a blank line. nbconvert puts our HTML into Markdown, where a blank line would end it: the rest of
    a code block would be read as Markdown, images and all."""
    return _BLANK_LINE.sub(r"\1&#10;", markup)


def _markup(part: SafeHtml) -> str:
    if type(part) is not SafeHtml:
        raise TypeError(f"{type(part).__name__} is not SafeHtml")
    return part._markup


def _quoted(value: str) -> str:
    return html.escape(visible_text(value), quote=True)


def _whitespace_marks(value: str) -> str:
    """A token that is only white space would be invisible: say what it is."""
    if value.strip(" \n\t") or not value:
        return value
    return value.replace(" ", "\u2423").replace("\t", "\u21e5").replace("\n", "\u21b5\n")
