"""The option line of `%%mlx`: one table of options, and the parser, the help text and the completions made from it.

argparse is not used: its messages name the program, not the fix, and it refuses values that begin with a dash.
"""

from __future__ import annotations

import difflib
import keyword
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxnb_engine import policy
from mlxnb_engine.errors import RequestError

from .chatnames import check_name

VIEWS = ("answer", "tokens", "raw", "loom", "none")
DTYPES = ("float32", "bfloat16", "float16", "file")
ANCHORS = ("max", "entropy", "median")
MAX_POINTS = 1024


@dataclass(frozen=True, slots=True)
class Option:
    """One option. name: its field in `Cell.given`. read: value text -> value; None for a switch without a value.

    repeat: may be given several times; the values are collected in a list. choices: words to complete.
    """

    name: str
    flags: tuple[str, ...]
    group: str
    help: str
    metavar: str = ""
    read: Callable[[str], Any] | None = None
    repeat: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sweep:
    """One axis of a grid: a field and its values."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A parsed option line. given: what was written and nothing else, checked, by field name."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    def policy_layer(self) -> dict[str, Any]:
        """The fields that the engine's policy knows."""
        return {name: value for name, value in self.given.items() if name in policy.DEFAULTS}


# -- readers: value text -> value; ValueError says what was expected -----------------------------------------------------


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _int(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,40}", text):
        raise ValueError("a whole number")
    return int(text)


def _maybe(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() in ("none", "off") else read(text)


def _text(text: str) -> str:
    return text


def _nonempty(text: str) -> str:
    if not text.strip():
        raise ValueError("a name")
    return text


def _word(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"{', '.join(words[:-1])} or {words[-1]}")
        return text

    return read


def _switch(text: str) -> bool:
    return _word("on", "off")(text) == "on"


def _name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ValueError("the name of a Python variable")
    return text


def _unescape(text: str) -> str:
    r"""`\n`, `\t`, `\r`, `\\`, `\xHH`, `\uHHHH` as in a Python string; any other backslash stays."""
    plain = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}

    def one(match: re.Match[str]) -> str:
        code = match[1]
        return plain[code] if code in plain else chr(int(code[1:], 16))

    return re.sub(r"\\(n|t|r|0|\\|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})", one, text)


def _stop(text: str) -> str:
    value = _unescape(text)
    if not value:
        raise ValueError("at least one character")
    return value


def _logit_bias(text: str) -> tuple[tuple[int, float], ...]:
    """`11=2.5,50256=-100` or `{"11": 2.5}`: token id and what is added to its score. The quotes of JSON may be missing."""
    try:
        pairs = [re.split("[=:]", part, maxsplit=1) for part in text.strip().strip("{}").split(",")]
        biases = tuple((int(token.strip().strip("\"'")), float(bias)) for token, bias in pairs)
        if any(token < 0 or not math.isfinite(bias) for token, bias in biases):
            raise ValueError
        return biases
    except ValueError:
        raise ValueError("token ids with a number each, as in 11=2.5,50256=-100 or '{\"11\": 2.5}' in quotes") from None


def _sweep(text: str) -> Sweep:
    """`temp=0,.7,1` or `temp=0:1:0.25` (start:end:step, the end included)."""
    key, equals, values = text.partition("=")
    name = key.strip().lstrip("-").replace("-", "_")
    if not equals:
        raise ValueError("an option and its values, as in temp=0,.7,1 or temp=0:1:0.25")
    if name not in policy.SWEEPABLE:
        close = _closest(name, policy.SWEEPABLE)
        hint = f"Did you mean {close!r}?" if close else "Any sampling option with single values can be, such as temp or top_p."
        raise RequestError(f"{key!r} cannot be swept.", hint)
    option = BY_NAME[name]
    read = option.read
    assert read is not None
    found: list[Any] = []
    for part in values.split(","):
        for value in _range(part.strip(), read):
            policy.check(name, value)
            found.append(value)
        if len(found) > MAX_POINTS:
            raise ValueError(f"at most {MAX_POINTS} values")
    return Sweep(name, tuple(found))


def _range(part: str, read: Callable[[str], Any]) -> list[Any]:
    if ":" not in part:
        return [read(part)]
    bounds = part.split(":")
    if len(bounds) not in (2, 3):
        raise ValueError("a range start:end:step, as in 0:1:0.25")
    start, end = _float(bounds[0]), _float(bounds[1])
    step = _float(bounds[2]) if len(bounds) == 3 else 1.0
    # NaN fails every comparison, so the good case is what is asked for.
    if not (abs(start) < 1e300 and abs(end) < 1e300 and step > 0 and end >= start and (end - start) / step < MAX_POINTS):
        raise ValueError(f"a range start:end:step with end >= start, step > 0 and at most {MAX_POINTS} values")
    count = int((end - start) / step + 1e-9) + 1
    # 12 significant digits hide the binary noise of 0.1 + 0.2 from labels and columns.
    return [read(f"{start + i * step:.12g}") for i in range(count)]


def _number(name: str, metavar: str, text: str, *, whole: bool = False, none: bool = False, group: str = "sampling") -> Option:
    read = _int if whole else _float
    return Option(name, ("--" + name.replace("_", "-"),), group, text, metavar, _maybe(read) if none else read)


_EACH_HELP = """a list, Series or DataFrame: one prompt per {{ item }}; quote a list written here: '["Oslo", "Rome"]'"""

_CHAT_HELP = "go on with this conversation; a cell that runs again replaces its own turn"

OPTIONS: tuple[Option, ...] = (
    Option("model", ("-m", "--model"), "model", "a repository name, a directory or a GGUF file", "NAME", _nonempty),
    Option("dtype", ("--dtype",), "model", "weights in memory; by default what fits", "TYPE", _word(*DTYPES), choices=DTYPES),
    Option("chat", ("-c", "--chat"), "conversation", _CHAT_HELP, "NAME", check_name),
    Option("after", ("--after",), "conversation", "ask after this turn of the chat (see %mlx show), or start", "TURN", _nonempty),
    Option("system", ("--system",), "conversation", "system message, {{ }} included", "TEXT", _text),
    Option("prefill", ("--prefill",), "conversation", "how the answer begins, {{ }} included", "TEXT", _text),
    Option("no_template", ("--no-template",), "conversation", "raw completion, for base models"),
    Option("thinking", ("--thinking",), "conversation", "for models that can", "on|off", _switch, choices=("on", "off")),
    _number("max_tokens", "N", "longest answer (512)", whole=True),
    _number("temp", "T", "0 is greedy (0, or the model's own default)"),
    _number("top_p", "P", "keep the likeliest tokens of mass P; 1 is off"),
    _number("top_k", "K", "keep the K likeliest; 0 is off", whole=True),
    _number("min_p", "P", "keep tokens of at least P times the best; 0 is off"),
    _number("min_tokens_to_keep", "N", "what --min-p never drops (1)", whole=True),
    _number("xtc_probability", "P", "how often the likeliest tokens are left out; 0 is off"),
    _number("xtc_threshold", "P", "XTC leaves out tokens above P, all but the last (0.1)"),
    _number("repetition_penalty", "X", "divide scores of tokens seen; 1 or none is off", none=True),
    _number("repetition_context_size", "N", "how many tokens back (20); 0 is all", whole=True),
    _number("presence_penalty", "X", "subtract once per token seen", none=True),
    _number("presence_context_size", "N", "how many tokens back (20); 0 is all", whole=True),
    _number("frequency_penalty", "X", "subtract per occurrence", none=True),
    _number("frequency_context_size", "N", "how many tokens back (20); 0 is all", whole=True),
    Option("logit_bias", ("--logit-bias",), "sampling", "add to scores: 11=2.5,50256=-100 or '{\"11\": 2.5}'", "BIAS", _logit_bias),
    _number("hlg_gain", "M", "tone curve instead of temperature: slope (1/temp)", none=True),
    _number("hlg_width", "W", "tone curve: half width of the straight part, nats"),
    _number("hlg_toe", "B", "tone curve: softness below (1)"),
    _number("hlg_head", "B", "tone curve: softness above (1)"),
    Option("hlg_anchor", ("--hlg-anchor",), "sampling", "tone curve: its middle", "WORD", _word(*ANCHORS), choices=ANCHORS),
    _number("hlg_offset", "X", "tone curve: offset of the middle below the maximum, nats"),
    _number("seed", "S", "same seed, same answer; sample i of -n uses S + i", whole=True, none=True),
    Option("stop", ("--stop",), "sampling", r"end before this text; \n and \t are understood; repeatable", "TEXT", _stop, repeat=True),
    Option("samples", ("-n", "--samples"), "many at once", "that many answers", "N", _int),
    Option("each", ("--each",), "many at once", _EACH_HELP, "VAR", _nonempty),
    Option("sweep", ("--sweep",), "many at once", "temp=0,.7,1 or temp=0:1:0.25; several make a grid", "KEY=VALUES", _sweep, repeat=True),
    Option("out", ("-o", "--out"), "result", "variable for the result (always in _mlx)", "NAME", _name),
    _number("logprobs", "K", "log probabilities of each token and its K likeliest rivals", whole=True, group="result"),
    Option("view", ("--view",), "result", "how it is shown (answer)", "VIEW", _word(*VIEWS), choices=VIEWS),
    Option("bg", ("--bg",), "result", "return at once; the answer goes on in its cell"),
    Option("raw_text", ("--raw-text",), "result", "leave {{ }} in the prompt alone"),
    Option("help", ("-h", "--help"), "result", "this text"),
)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
BY_FLAG: Mapping[str, Option] = {flag: option for option in OPTIONS for flag in option.flags}

# -- words -----------------------------------------------------------------------------------------------------------------

# Quoting as in a shell, except that outside quotes a backslash before an ordinary character stays: `--stop \n` is two
# characters for `_unescape`, not the letter n.
_PIECE = re.compile(r"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>[\s"'\\])|(?P<plain>[^\s'"\\]+|\\)""", re.DOTALL)
_SPACE = re.compile(r"\s*")


def split(line: str) -> list[str]:
    """The words of an option line. Raises RequestError for a quote that is never closed."""
    words: list[str] = []
    at = _match_end(_SPACE, line, 0)
    while at < len(line):
        pieces: list[str] = []
        while at < len(line) and not line[at].isspace():
            match = _PIECE.match(line, at)
            if match is None:
                raise RequestError(
                    f"The quote {line[at]} at column {at + 1} of the option line is never closed: {line[at : at + 30]!r}.",
                    "Close it, or put a lone quote inside the other kind of quotes.",
                )
            pieces.append(_piece(match))
            at = match.end()
        words.append("".join(pieces))
        at = _match_end(_SPACE, line, at)
    return words


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _piece(match: re.Match[str]) -> str:
    if match.lastgroup == "double":
        return re.sub(r"\\([\"\\])", r"\1", match["double"])
    assert match.lastgroup is not None
    return match[match.lastgroup]


# -- parsing ---------------------------------------------------------------------------------------------------------------


def parse(line: str) -> Cell:
    """Read and check an option line. Raises RequestError that names the option, what it expects and the nearest name."""
    words = split(line)
    given: dict[str, Any] = {}
    at = 0
    while at < len(words):
        option, flag, inline = _option(words[at])
        at += 1
        if option.read is None:
            if inline is not None:
                raise RequestError(f"{flag} takes no value, but got {inline!r}.", f"Write just {flag}.")
            value: Any = True
        else:
            if inline is None:
                if at == len(words):
                    raise RequestError(f"{flag} needs a value: {flag} {option.metavar}.", f"It is: {option.help}.")
                inline, at = words[at], at + 1
                if inline in BY_FLAG:
                    raise RequestError(
                        f"{flag} needs a value, but the next word is the option {inline}.", f"If {inline} is the value: {flag}={inline}."
                    )
            value = read_value(option, flag, inline)
        if option.repeat:
            given.setdefault(option.name, []).append(value)
        elif option.name in given:
            raise RequestError(f"{flag} is given twice.", "Keep one of them." + _sweep_hint(option))
        else:
            given[option.name] = value
    return Cell(_checked(given))


def read_value(option: Option, flag: str, text: str) -> Any:
    """The value of an option from its text, range included. Raises RequestError."""
    assert option.read is not None
    try:
        value = option.read(text)
    except RequestError:
        raise
    except ValueError as error:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise RequestError(f"{flag} got {shown!r}.", f"It must be {error}.") from None
    if option.name in policy.DEFAULTS and not option.repeat:
        policy.check(option.name, value)
    return value


def _sweep_hint(option: Option) -> str:
    return f" For several values: --sweep {option.name}=..." if option.name in policy.SWEEPABLE else ""


def _option(word: str) -> tuple[Option, str, str | None]:
    """(option, the flag as written, the value after `=` or right behind a short flag)."""
    if word in BY_FLAG:
        return BY_FLAG[word], word, None
    if word.startswith("--"):
        flag, equals, value = word.partition("=")
        if equals and flag in BY_FLAG:
            return BY_FLAG[flag], flag, value
        raise _unknown(flag)
    short = word[:2]
    if short in BY_FLAG and BY_FLAG[short].read is not None:
        return BY_FLAG[short], short, word[2:].removeprefix("=")
    if word.startswith("-") and len(word) > 1:
        raise _unknown(word)
    shown = word if len(word) <= 40 else word[:37] + "..."
    raise RequestError(
        f"{shown!r} on the %%mlx line is not an option.",
        "The prompt goes on the lines below; a value with spaces needs quotes.",
    )


def _unknown(flag: str) -> RequestError:
    known = {known.lstrip("-"): known for known in BY_FLAG if known.startswith("--")}
    name = flag.lower().lstrip("-").replace("_", "-")
    close = _closest(name, known) if len(name) > 1 else None
    hint = f"Did you mean {known[close]}? " if close else ""
    return RequestError(f"There is no option {flag if len(flag) <= 40 else flag[:37] + '...'}.", hint + "`%%mlx --help` lists them all.")


def _closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a wrong one most likely stands for: one begins with the other, or few letters differ."""
    names = list(known)
    related = [other for other in names if len(name) > 2 and (other.startswith(name) or name.startswith(other))]
    close = related or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return close[0] if close else None


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Rules that concern more than one option."""
    if "stop" in given:
        given["stop"] = tuple(dict.fromkeys(given["stop"]))
    swept = [sweep.name for sweep in given.get("sweep", ())]
    for name in swept:
        flag = BY_NAME[name].flags[-1]
        if swept.count(name) > 1:
            raise RequestError(f"{name} is swept twice.", f"Put all its values in one: --sweep {name}=...")
        if name in given:
            raise RequestError(f"{flag} is both given and swept.", "Keep one of them.")
    if given.get("no_template"):
        for name in ("system", "thinking"):
            if name in given:
                raise RequestError(f"--{name} has no effect with --no-template.", "Leave one of them out.")
    if "chat" in given:
        several = [f for f, many in (("--samples", given.get("samples", 1) != 1), ("--each", "each" in given), ("--sweep", swept)) if many]
        if several:
            raise RequestError(f"A turn of a chat is one answer, and {several[0]} asks for several.", "Leave one of them out.")
        if given.get("no_template"):
            raise RequestError("A chat needs the chat template, which --no-template leaves out.", "Leave one of them out.")
    elif "after" in given:
        raise RequestError("--after names a turn of a chat, and no chat is given.", "Add it: -c NAME.")
    if given.get("raw_text") and "each" in given:
        raise RequestError("--each fills {{ }} in the prompt, which --raw-text switches off.", "Leave one of them out.")
    return given


# -- help ------------------------------------------------------------------------------------------------------------------

USAGE = """\
%%mlx [options]
The prompt, as many lines as you like. {{ name }} inserts a notebook variable.
"""


def help_text() -> str:
    """Usage and every option, grouped, at most 100 columns."""
    lines = [USAGE.rstrip()]
    for group in dict.fromkeys(option.group for option in OPTIONS):
        lines += ["", group]
        for option in OPTIONS:
            if option.group == group:
                head = f"  {', '.join(option.flags)} {option.metavar}".rstrip()
                body = textwrap.wrap(option.help, 62)
                lines.append(f"{head:<36}  {body[0]}" if len(head) <= 36 else f"{head}\n{'':<36}  {body[0]}")
                lines += [f"{'':<36}  {rest}" for rest in body[1:]]
    return "\n".join(lines)
