"""`{{ }}`: what is inserted, and that everything else passes byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxnb import insert
from mlxnb.insert import Expression, parse
from mlxnb_engine.errors import RequestError

NAMES: dict[str, Any] = {"x": 3, "name": "Ann", "In": ["", "a", "b"], "Out": {2: "two"}, "d": {"key": 1}, "_hidden": 5}


def filled(text: str, **more: Any) -> str:
    return insert.insert(parse(text), {**NAMES, **more})


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "",
        "\n\n",
        "ends with a newline\n",
        "CRLF\r\nand CR\rand LF\n",
        '{"a": {"b": {"c": [1, {"d": 2}]}}}',
        'print(f"{x!r:>{width}} {y}")',
        "{% if a %}{# note #}{%- endif -%}",
        "$HOME ${HOME} $(ls) `ls` !ls %ls {In[3]}",
        "}} {  {} }{ } closing only }}",
        "# line statement\n## comment",
        "nul \0, lone surrogate \ud800, bidi \u202e, BOM \ufeff",
        "\\{\\{ backslashes \\\\ \\n",
        "tail {",
    ],
)
def test_text_without_double_braces_passes_byte_for_byte(text: str) -> None:
    assert filled(text) == text


@given(st.text(max_size=200))
def test_any_text_without_double_braces_is_itself(text: str) -> None:
    text = text.replace("{{", "{ {")
    assert filled(text) == text


@given(st.lists(st.text(max_size=30).map(lambda s: s.replace("{", "")), min_size=1, max_size=6))
def test_the_text_around_expressions_is_kept(parts: list[str]) -> None:
    assert filled("{{ x }}".join(parts)) == "3".join(parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a {{ x }} b", "a 3 b"),
        ("{{x}}{{name}}", "3Ann"),
        ("{{ In[1] }}{{ Out[2] }}", "atwo"),
        ('{{ {"a": 1}["a"] }}', "1"),
        ('{{ {"a": {"b": 2}}["a"]["b"] }}', "2"),
        ('{{ {"a": {"b": 2}} }}', "{'a': {'b': 2}}"),
        ('{{ "}}" }}', "}}"),
        ('{{ "{{" }}', "{{"),
        ('{{ \'}}\' ~ "\\"}}" }}', '}}"}}'),
        ("{{ [x, (x + 1)] | join('-') }}", "3-4"),
        ("{{ name.upper() }} {{ len(name) }} {{ '%.2f' % x }}", "ANN 3 3.00"),
        ("{{ nope | default('none given') }}", "none given"),
        ("{{\n  x\n}}", "3"),
        ("{{ _hidden }}", "5"),
        ("{{ x }}\r\n", "3\r\n"),
        ("{ {{ x }} }", "{ 3 }"),
        ("$ {{ x }}$", "$ 3$"),
        ("{{ None }}", "None"),
    ],
)
def test_expressions_are_replaced_by_their_value(text: str, expected: str) -> None:
    assert filled(text) == expected


def test_an_inserted_value_is_not_read_again() -> None:
    assert filled("{{ v }}", v="{{ x }} {% if %}\r\n") == "{{ x }} {% if %}\r\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("one\ntwo {{ nmae }}", ("`nmae`", "line 2", "not defined", "`name`")),
        ("{{ zzzqqq }}", ("`zzzqqq`", "not defined", "earlier cell")),
        ("{{ d.kye }}", ("kye", "`key`")),
        ("{{ d['kez'] }}", ("kez", "`key`")),
        ("{{ Out[9] }}", ("Out[9]", "9")),
        ("{{ name[99] }}", ("name[99]", "99")),
        ("{{ 1/0 }}", ("1/0", "ZeroDivisionError")),
        ("{{ }}", ("nothing between", "--raw-text")),
        ("a\n\n{{ x", ("line 3", "no matching", "--raw-text")),
        ("{{ (x }}", ("no matching",)),
        ("{{ x +}}", ("not an expression",)),
        ("{{{ x }}}", ("not an expression", "--raw-text")),
        ("{{ import os }}", ("not an expression",)),
        ("{{ x.__class__ }}", ("__class__", "unsafe")),
        ("{{ ''.__class__.__mro__ }}", ("unsafe",)),
        ("{{ __import__('os') }}", ("__import__", "not defined")),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", ("not an expression",)),
    ],
)
def test_a_faulty_expression_names_itself(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        filled(text)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_value_that_cannot_be_text_is_a_request_error() -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError("no text")

    with pytest.raises(RequestError, match="cannot be shown as text: ValueError: no text"):
        filled("{{ broken }}", broken=Broken())


def test_an_interrupt_in_an_expression_is_not_swallowed() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        filled("{{ stop() }}", stop=stop)


def test_lines_are_counted_over_literals_and_expressions() -> None:
    parts = parse("a\n{{ x }}\n{{\nname\n}}\n{{ d }}")
    assert [part.line for part in parts if isinstance(part, Expression)] == [2, 3, 6]


def test_names_in_lists_what_the_expressions_read() -> None:
    assert insert.names_in(parse("{{ a.b }} c {{ d[e] | join(f) }} {{ 'g' }} {{ h + }}")) == {"a", "d", "e", "f"}


def test_ten_megabytes_pass_unchanged() -> None:
    text = ("{ } $x \r\n" * 8 + "é") * 130_000
    assert len(text) > 9_000_000
    assert filled(text) == text
    assert filled(text + "{{ x }}") == text + "3"
    with pytest.raises(RequestError, match="no matching"):
        filled("{{" + "(" * 5_000_000)
