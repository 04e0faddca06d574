"""The option line: what it accepts, and that every mistake is named with its fix."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxnb import options
from mlxnb.options import Sweep, parse
from mlxnb_engine import policy
from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import SamplingSpec


def given_by(line: str) -> dict[str, object]:
    return dict(parse(line).given)


def test_an_empty_line_gives_nothing() -> None:
    assert given_by("   ") == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-n 4", {"samples": 4}),
        ("-n4 -o out", {"samples": 4, "out": "out"}),
        ("--samples=2 --temp=.7", {"samples": 2, "temp": 0.7}),
        ("-m org/name --dtype bfloat16", {"model": "org/name", "dtype": "bfloat16"}),
        ("--thinking off --no-template", None),
        ("--thinking on --bg --raw-text", {"thinking": True, "bg": True, "raw_text": True}),
        ("--prefill '- item' --system \"it's\"", {"prefill": "- item", "system": "it's"}),
        ("--prefill=--x", {"prefill": "--x"}),
        ("--stop --- --stop x", {"stop": ("---", "x")}),
        ("--repetition-penalty none --top-k 40", {"repetition_penalty": None, "top_k": 40}),
        ("--hlg-width inf --hlg-anchor median", {"hlg_width": float("inf"), "hlg_anchor": "median"}),
        ("--logprobs 0 --view raw", {"logprobs": 0, "view": "raw"}),
        ("--each rows", {"each": "rows"}),
        ("--system ''", {"system": ""}),
    ],
)
def test_options_are_read_as_written(line: str, expected: dict[str, object] | None) -> None:
    if expected is None:
        with pytest.raises(RequestError, match="no effect"):
            parse(line)
    else:
        assert given_by(line) == expected


@pytest.mark.parametrize("written", [r"--stop \n", r'--stop "\n"', r"--stop '\n'", r"--stop=\n"])
def test_a_stop_escape_means_a_newline_however_it_is_quoted(written: str) -> None:
    assert given_by(written) == {"stop": ("\n",)}


def test_stop_understands_python_escapes_and_keeps_other_backslashes() -> None:
    assert given_by(r"--stop '\t\x41\u00e9\\n\d'") == {"stop": ("\tAé\\n\\d",)}


@pytest.mark.parametrize("text", ["11=2.5,50256=-100", "11:2.5, 50256:-100", '{"11": 2.5, "50256": -100}', "{11:2.5,50256:-100}"])
def test_logit_bias_is_read_in_every_form(text: str) -> None:
    assert given_by(f"--logit-bias '{text}'") == {"logit_bias": ((11, 2.5), (50256, -100.0))}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tmp 1", ("--tmp", "--temp")),
        ("--temperature 1", ("--temperature", "Did you mean --temp?")),
        ("--top_p 1", ("Did you mean --top-p?",)),
        ("--max 1", ("Did you mean --max-tokens?",)),
        ("-c 'a b'", ("'a b'", "no name of a chat", "garden-2")),
        ("-c --bg", ("--bg",)),
        ("-c x -n 2", ("one answer", "--samples")),
        ("-c x --each y", ("one answer", "--each")),
        ("-c x --sweep temp=0,1", ("one answer", "--sweep")),
        ("-c x --no-template", ("chat template",)),
        ("--after t1", ("no chat", "-c NAME")),
        ("--schema x", ("no option --schema", "--help")),
        ("-x", ("no option -x", "--help")),
        ("--temp", ("--temp needs a value",)),
        ("--temp --bg", ("--temp needs a value", "--bg")),
        ("--temp warm", ("--temp", "'warm'", "a number")),
        ("--temp -1", ("temp=-1.0", ">= 0")),
        ("--temp nan", ("temp", "out of range")),
        ("--top-k 1.5", ("--top-k", "whole number")),
        ("--top-p 0", ("top_p", "(0, 1]")),
        ("-n 0", ("samples=0", "1 to 256")),
        ("-n 257", ("samples=257", "1 to 256")),
        ("--max-tokens -1", ("max_tokens=-1", ">= 0")),
        ("--seed 18446744073709551616", ("seed", "2^64")),
        ("--logprobs 51", ("logprobs", "50")),
        ("--view tokns", ("--view", "tokens", "none")),
        ("--thinking maybe", ("--thinking", "on or off")),
        ("--dtype int4", ("--dtype", "bfloat16")),
        ("--stop ''", ("--stop", "at least one character")),
        ("--logit-bias a=1", ("--logit-bias", "token ids")),
        ("--logit-bias -1=1", ("--logit-bias", "token ids")),
        ("--logit-bias 1=inf", ("--logit-bias", "token ids")),
        ("--hlg-gain 0", ("hlg_gain", "> 0")),
        ("--bg=yes", ("--bg takes no value",)),
        ("--temp 1 --temp 2", ("--temp is given twice", "--sweep temp")),
        ("-o for", ("-o", "Python variable")),
        ("-o a.b", ("-o", "Python variable")),
        ("--each q --raw-text", ("--raw-text", "Leave one")),
        ("tell me a joke", ("'tell'", "lines below")),
        ('--system "open', ("column 10", "never closed")),
        ("--system don't", ("never closed",)),
        ("--sweep temp", ("--sweep", "temp=0,.7,1")),
        ("--sweep tmp=1", ("'tmp' cannot be swept", "'temp'")),
        ("--sweep stop=a,b", ("cannot be swept",)),
        ("--sweep temp=0:1:0", ("start:end:step", "step > 0")),
        ("--sweep temp=0:1:nan", ("start:end:step",)),
        ("--sweep temp=0:1e9:.001", ("1024",)),
        ("--sweep temp=0,-1", ("temp=-1.0",)),
        ("--sweep temp=1 --temp 2", ("--temp", "both given and swept")),
        ("--sweep temp=1 --sweep temp=2", ("temp is swept twice",)),
    ],
)
def test_a_mistake_is_named_with_what_to_do(line: str, words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        parse(line)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert caught.value.hint, "an error without a next step"
    assert len(str(caught.value)) < 400


def test_a_sweep_takes_lists_and_ranges_with_the_end_included() -> None:
    assert given_by("--sweep temp=0,.7,1 --sweep top-p=.5:.9:.2 --sweep top_k=1:3")["sweep"] == [
        Sweep("temp", (0.0, 0.7, 1.0)),
        Sweep("top_p", (0.5, 0.7, 0.9)),
        Sweep("top_k", (1, 2, 3)),
    ]


def test_a_range_has_no_binary_noise() -> None:
    (sweep,) = given_by("--sweep temp=0:1:0.1")["sweep"]  # type: ignore[misc]
    assert sweep.values == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@given(st.text(st.characters(blacklist_characters="\\", blacklist_categories=("Cs",)), max_size=60))
def test_words_are_split_as_a_shell_splits_them(line: str) -> None:
    if any(c.isspace() and c not in " \t\r\n" for c in line):
        return  # a shell does not take other white space for a separator; IPython's lines do not hold it
    try:
        expected = shlex.split(line)
    except ValueError:
        with pytest.raises(RequestError, match="never closed"):
            options.split(line)
        return
    assert options.split(line) == expected


@given(st.lists(st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=20), max_size=5))
def test_words_quoted_for_a_shell_come_back(words: list[str]) -> None:
    assert options.split(" ".join(shlex.quote(word) for word in words)) == words


@given(st.text(max_size=80))
def test_no_option_line_raises_anything_but_a_request_error(line: str) -> None:
    try:
        parse(line)
    except RequestError:
        pass


def test_every_sampling_field_has_an_option_and_every_option_is_in_the_help() -> None:
    engine_fields = set(policy.DEFAULTS)
    assert engine_fields <= set(options.BY_NAME), engine_fields - set(options.BY_NAME)
    assert {name for name in SamplingSpec.__slots__ if name not in ("hlg", "explain")} <= set(options.BY_NAME)
    text = options.help_text()
    for flag in options.BY_FLAG:
        assert flag in text
    assert max(map(len, text.splitlines())) <= 100


def test_options_of_later_milestones_are_refused_not_ignored() -> None:
    for flag in (
        "--tools",
        "--schema",
        "--regex",
        "--kv",
        "--draft",
        "--fill",
        "--adapter",
        "--image",
        "--into",
        "--choice",
    ):
        with pytest.raises(RequestError, match="There is no option"):
            parse(f"{flag} x")


def test_every_example_of_a_value_in_the_help_can_be_typed_as_it_stands() -> None:
    quoted = {"each": """'["Oslo", "Rome"]'""", "logit_bias": """'{"11": 2.5}'"""}
    for name, example in quoted.items():
        assert example in options.BY_NAME[name].help
        assert parse(f"{options.BY_NAME[name].flags[-1]} {example}").given[name]
    for option in options.OPTIONS:
        bare = option.help
        for example in quoted.values():
            bare = bare.replace(example, "")
        assert '"' not in bare, f"{option.name}: a double quote outside single ones does not survive the option line"
