"""Completion in `%%mlx` cells and `%mlx` lines, as one context matcher of IPython: options, their values, variables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from mlxnb_engine import policy
from mlxnb_engine.errors import RequestError

from . import describe, options, runtime
from .chatnames import CHATS
from .conversation import START

if TYPE_CHECKING:
    from .magic import MLXMagics

_CELL = re.compile(r"\s*%%mlx(\s|$)")
_LINE = re.compile(r"\s*%mlx\s+(?P<words>.*)", re.DOTALL)
_NOT_OFFERED = ("In", "Out", "exit", "quit", "get_ipython", "open")


class Completer:
    """Answers IPython's completer; holds no state of its own. It never starts an engine or runs the notebook's code."""

    def __init__(self, magics: MLXMagics) -> None:
        self._magics = magics
        # Bound once: the completer's list is searched by identity when the extension is unloaded.
        self.match = context_matcher(identifier="mlxnb.complete", priority=100)(lambda context: self._match(context))

    def _match(self, context: CompletionContext) -> SimpleMatcherResult:
        words = self._words(context)
        found = [SimpleCompletion(word, type="mlxnb") for word in dict.fromkeys(words) if word.startswith(context.token)]
        return SimpleMatcherResult(completions=found, suppress=bool(found), matched_fragment=context.token, ordered=True)

    def _words(self, context: CompletionContext) -> Iterable[str]:
        before = context.text_until_cursor
        lines = context.full_text.split("\n")
        first = next((number for number, line in enumerate(lines) if line.strip()), 0)
        if _CELL.match(lines[first]):
            text = "\n".join([*lines[first : context.cursor_line], before])
            if _in_braces(text):
                return self._variables(lines[first])
            return self._option_words(before) if context.cursor_line == first else ()
        line = _LINE.fullmatch(before)
        return self._command_words(line["words"]) if line else ()

    # -- %%mlx -------------------------------------------------------------------------------------------------------

    def _option_words(self, before: str) -> Iterable[str]:
        """Before a space an option or, after an option that takes one, its values."""
        words = before.split()
        last = "" if before[-1:].isspace() else words.pop()
        flag, equals, _ = last.partition("=")
        if equals and flag in options.BY_FLAG:
            return self._values(options.BY_FLAG[flag], words)
        previous = options.BY_FLAG.get(words[-1]) if words else None
        if previous is not None and previous.read is not None:
            return self._values(previous, words)
        if not words:
            return ()  # the name of the magic itself
        used = {options.BY_FLAG[word.partition("=")[0]].name for word in words if word.partition("=")[0] in options.BY_FLAG}
        return [option.flags[-1] for option in options.OPTIONS if option.repeat or option.name not in used] if _is_flag(last) else ()

    def _values(self, option: options.Option, words: list[str]) -> Iterable[str]:
        """words: the option line before this one."""
        if option.choices:
            return option.choices
        if option.name == "model":
            return [*describe.resident_models(), *_disk_names()]
        if option.name == "chat":
            return CHATS.names
        if option.name == "after":
            return [START, *(turn for name in words for turn in _turn_ids(name.removeprefix("--chat=").removeprefix("-c")))]
        if option.name == "each":
            return [name for name in self._names() if _is_list(self._magics.shell.user_ns[name])]
        if option.name == "sweep":
            return [name + "=" for name in policy.SWEEPABLE]
        return ()

    def _variables(self, option_line: str) -> Iterable[str]:
        """Names for `{{ }}`: what --each brings first, then the notebook's variables."""
        return [*self._item_names(option_line), *self._names(), "In[", "Out["]

    def _item_names(self, option_line: str) -> list[str]:
        try:
            source = options.parse(option_line.strip().removeprefix("%%mlx")).get("each")
        except RequestError:
            return []
        if source is None:
            return []
        value = self._magics.shell.user_ns.get(source)
        columns: Any = getattr(value, "columns", ())
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            columns = value[0]
        return ["item", "index", *(name for name in map(str, columns) if name.isidentifier())]

    def _names(self) -> list[str]:
        shell = self._magics.shell
        hidden = {name for name in shell.user_ns_hidden if shell.user_ns.get(name) is shell.user_ns_hidden[name]}
        return sorted(name for name in shell.user_ns if not name.startswith("_") and name not in hidden and name not in _NOT_OFFERED)

    # -- %mlx --------------------------------------------------------------------------------------------------------

    def _command_words(self, text: str) -> Iterable[str]:
        from .linemagic import COMMANDS  # with all that the commands need; `%load_ext` does without

        words = text.split()
        if not text[-1:].isspace() and words:
            words.pop()
        if not words:
            return COMMANDS
        return {
            "cache": lambda: _cache_words(words),
            "load": lambda: [*_disk_names(), "--dtype"] if words[-1] != "--dtype" else options.DTYPES,
            "unload": describe.resident_models,
            "show": lambda: CHATS.names if len(words) == 1 else (),
            "reset": lambda: CHATS.names if len(words) == 1 else (),
            "export": lambda: CHATS.names if len(words) == 1 else (),
            "fork": lambda: CHATS.names if len(words) == 1 else [*(_turn_ids(words[1]) if len(words) == 2 else ()), "--as"],
            "cancel": lambda: ["all", *self._running()],
            "wait": self._running,
            "resume": lambda: ["all", *_interrupted(self._magics)],
            "config": self._settings,
            "help": lambda: ["options", *COMMANDS],
        }.get(words[0], lambda: ())()

    def _running(self) -> list[str]:
        return list(dict.fromkeys(run.request.id for shown in self._magics.background for run in shown.runs if not run.done))

    def _settings(self) -> list[str]:
        from .magic import NOTEBOOK_FIELDS

        return [f"{name}=" for name in dict.fromkeys([*NOTEBOOK_FIELDS, *(entry.field for entry in runtime.config().describe())])]


def _interrupted(magics: MLXMagics) -> list[str]:
    from .resuming import interrupted

    return [one.id for one in interrupted(magics.asked)]


def _turn_ids(name: str) -> list[str]:
    """The turns of a chat; none if there is no chat of this name."""
    return [turn.id for turn in CHATS.find(name).turns] if name in CHATS else []


def _cache_words(words: list[str]) -> Iterable[str]:
    from .caching import cache_info
    from .linemagic import CACHE_ACTIONS

    if len(words) == 1:
        return CACHE_ACTIONS
    return [*(part["model"] or part["namespace"][:8] for part in cache_info()["models"]), "--yes"] if words[1] == "clear" else ()


def _disk_names() -> list[str]:
    return [name for name, _ in describe.models_on_disk()]


def _in_braces(text: str) -> bool:
    """Whether the cursor, at the end of the text, is inside `{{ }}`."""
    start = text.rfind("{{")
    return start >= 0 and "}}" not in text[start:]


def _is_flag(word: str) -> bool:
    return not word or word.startswith("-")


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (hasattr(value, "index") and (hasattr(value, "columns") or hasattr(value, "to_list")))
