"""`{{ expression }}`: notebook variables in a prompt. Everything between the expressions passes byte for byte.

Only an expression itself is given to Jinja (its sandboxed `compile_expression`); a whole template would have its line ends
rewritten, its last newline dropped, and `{%` and `{#` read as markup.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import RequestError

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

LITERAL_HINT = 'Write {{ "{{" }} for two braces, or use --raw-text to switch insertion off.'
_BUILTINS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        *(abs, all, any, bool, dict, divmod, enumerate, filter, float, format, frozenset, int, len, list, map, max, min),
        *(range, repr, reversed, round, set, sorted, str, sum, tuple, zip),
    )
}
# One step inside an expression: a string, a bracket, or anything else up to the next of those.
_STEP = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[][(){}]|[^][(){}'"]+|['"]""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Expression:
    """What stands between the braces, and the line of the prompt on which it begins (from 1)."""

    source: str
    line: int


Part = str | Expression


def parse(text: str) -> list[Part]:
    """Split a prompt into literal text and expressions. Raises RequestError for `{{` that is never closed."""
    parts: list[Part] = []
    at, line = 0, 1
    while (start := text.find("{{", at)) >= 0:
        line += text.count("\n", at, start)
        end = _end(text, start + 2)
        if end is None:
            raise RequestError(f"`{{{{` on line {line} of the prompt has no matching `}}}}`.", LITERAL_HINT)
        if start > at:
            parts.append(text[at:start])
        parts.append(Expression(text[start + 2 : end].strip(), line))
        line += text.count("\n", start, end)
        at = end + 2
    if at < len(text):
        parts.append(text[at:])
    return parts


def _end(text: str, at: int) -> int | None:
    """Position of the `}}` that closes an expression beginning at `at`: outside strings and brackets."""
    depth = 0
    while match := _STEP.match(text, at):
        step = match.group()
        if step in ("(", "[", "{"):
            depth += 1
        elif step == "}" and depth == 0:
            return at if text.startswith("}}", at) else None
        elif step in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                return None
        at = match.end()
    return None


def insert(parts: Iterable[Part], namespace: Mapping[str, Any]) -> str:
    """The text with every expression replaced by `str` of its value. Raises RequestError that names the expression."""
    return "".join(part if isinstance(part, str) else _text(part, namespace) for part in parts)


def _text(expression: Expression, namespace: Mapping[str, Any]) -> str:
    value = evaluate(expression.source, namespace, f" on line {expression.line} of the prompt")
    try:
        return str(value)
    except Exception as error:
        raise RequestError(f"The value of {_shown(expression.source)} cannot be shown as text: {_reason(error)}.") from error


def evaluate(source: str, namespace: Mapping[str, Any], where: str = "") -> Any:
    """The value of one expression over the notebook's variables and the plain built-in functions.

    where: how an error names its place. Raises RequestError if it is no expression, if a name is unknown (near matches
    listed) or if evaluating it fails. It runs in the kernel, with what its author may do anyway; the sandbox keeps it an
    expression, without private attributes.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.runtime import Undefined

    if not source:
        raise RequestError(f"There is nothing between the braces of `{{{{ }}}}`{where}.", LITERAL_HINT)
    try:
        compiled = _compiled(source)
    except (TemplateError, SyntaxError, ValueError, RecursionError) as error:
        raise RequestError(f"{_shown(source)}{where} is not an expression: {_reason(error)}.", LITERAL_HINT) from error
    try:
        value = compiled({**_BUILTINS, **namespace})
        if isinstance(value, Undefined):
            str(value)  # raises the error of the missing name
        return value
    except TemplateError as error:
        raise _missing(source, error, namespace, where) from error
    except Exception as error:
        raise RequestError(f"{_shown(source)}{where} failed: {_reason(error)}.") from error


def undefined(values: Iterable[Any]) -> str | None:
    """The name of the first value that is an unknown name: a list may hold one without failing."""
    from jinja2.runtime import Undefined

    return next((str(value._undefined_name) for value in values if isinstance(value, Undefined)), None)


def names_in(parts: Iterable[Part]) -> set[str]:
    """Every variable that the expressions read."""
    from jinja2 import meta
    from jinja2.exceptions import TemplateError

    found: set[str] = set()
    for part in parts:
        if isinstance(part, Expression):
            try:
                found |= meta.find_undeclared_variables(_environment().parse("{{ " + part.source + " }}"))
            except (TemplateError, RecursionError):
                continue  # `evaluate` names the fault
    return found


@lru_cache(maxsize=1)
def _environment() -> SandboxedEnvironment:
    from jinja2 import StrictUndefined
    from jinja2.exceptions import UndefinedError
    from jinja2.sandbox import SandboxedEnvironment
    from jinja2.utils import missing as nothing

    class Missing(StrictUndefined):
        """Tells its error which name was missing, and of what."""

        __slots__ = ()

        def __init__(self, hint: str | None = None, obj: Any = nothing, name: str | None = None, exc: Any = UndefinedError) -> None:
            def make(message: str) -> Exception:
                error: Any = exc(message)
                error.missing, error.owner = name, obj
                return error

            super().__init__(hint, obj, name, make)  # type: ignore[arg-type]

    return SandboxedEnvironment(undefined=Missing)


@lru_cache(maxsize=256)
def _compiled(source: str) -> Any:
    return _environment().compile_expression(source, undefined_to_none=False)


def _missing(source: str, error: Exception, namespace: Mapping[str, Any], where: str) -> RequestError:
    from jinja2.utils import missing as nothing

    name, owner = getattr(error, "missing", None), getattr(error, "owner", nothing)
    if not isinstance(name, str) or owner is not nothing:
        keys = [str(key) for key in owner if isinstance(key, str)] if isinstance(owner, Mapping) else []
        hint = near(name, keys) if isinstance(name, str) else ""
        return RequestError(f"{_shown(source)}{where} failed: {_reason(error)}.", hint)
    known = [key for key in namespace if not key.startswith("_")]
    return RequestError(f"`{name}` in {_shown(source)}{where} is not defined.", near(name, known) or "Define it in an earlier cell.")


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ "Did you mean `a` or `b`?", or "" if nothing is close."""
    table = {key.lower(): key for key in known}
    close = [f"`{table[key]}`" for key in difflib.get_close_matches(name.lower(), table, n=3, cutoff=cutoff)]
    return f"Did you mean {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}?" if close else ""


def _shown(source: str) -> str:
    return "`{{ " + (source if len(source) <= 80 else source[:77] + "...") + " }}`"


def _reason(error: BaseException) -> str:
    message = str(error).rstrip(".") or type(error).__name__
    return message if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {message}"
