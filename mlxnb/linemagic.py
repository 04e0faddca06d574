"""`%mlx <command>`: what a cell with one line does. Each command is one function; those of chats are in chatmagic.py."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxnb_engine import events as ev
from mlxnb_engine import policy
from mlxnb_engine.errors import RequestError

from . import chatmagic, describe, notices, options, runtime
from .interrupts import Guard, say_instead

if TYPE_CHECKING:
    from mlxnb_engine.session import Generation

    from .magic import MLXMagics
    from .run import Run

PROGRESS_S = 0.25
CACHE_ACTIONS = ("info", "map", "clear", "flush")
_say = describe.say


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the line magic. usage: its words after the name."""

    name: str
    usage: str
    help: str
    act: Callable[[MLXMagics, list[str]], None]


def run(magics: MLXMagics, line: str) -> None:
    """Carry out one line. Raises RequestError that names the nearest command."""
    words = options.split(line)
    if not words or words[0] in ("-h", "--help"):
        _help(magics, [])
        return
    command = COMMANDS.get(words[0])
    if command is None:
        raise _unknown(words[0], len(words))
    if words[1:2] in (["-h"], ["--help"]):
        _say(f"%mlx {command.name} {command.usage}".rstrip(), f"  {command.help}")
        return
    command.act(magics, words[1:])


def _unknown(word: str, count: int) -> RequestError:
    close = difflib.get_close_matches(word.lower(), COMMANDS, n=1, cutoff=0.6)
    shown = word if len(word) <= 40 else word[:37] + "..."
    if close and count <= 2:
        hint = f"Did you mean `%mlx {close[0]}`?"
    else:
        hint = "`%mlx help` lists them. To ask a model, start a cell with %%mlx and write the prompt below it."
    return RequestError(f"There is no command `%mlx {shown}`.", hint)


def _at_most(words: Sequence[str], count: int, usage: str) -> None:
    if len(words) > count:
        raise RequestError(f"{words[count]!r} is one word too many.", f"It is: %mlx {usage}")


# -- status ----------------------------------------------------------------------------------------------------------------


def _status(magics: MLXMagics, words: list[str]) -> None:
    _at_most(words, 0, "status")
    here = runtime.current()
    state = here.status() if here is not None else {}
    lines = describe.engine_lines(state)
    limits = state.get("limits") or {}
    if limits:
        lines.append("limits   " + ", ".join(f"{name} {'auto' if value is None else value}" for name, value in limits.items()))
    lines += describe.loading_lines(state.get("loading"))
    models = state.get("models") or []
    rows = [describe.model_row(model) for model in models]
    lines += ["", *describe.table(("model", "weights", "rows", "queue", "KV"), rows), *describe.kept_lines(models)] if models else []
    live = [run for run in _known_runs(magics) if not run.done]
    if live:
        running = [(run.id, "stopping" if run.stopping else run.status, str(run.token_count), describe.short(run.prompt)) for run in live]
        lines += ["", *describe.table(("running", "", "tokens", "prompt"), running)]
    lines += ["", "`%mlx config` lists every setting and where it comes from."]
    _say(*lines)


def _known_runs(magics: MLXMagics) -> list[Run]:
    return [run for shown in magics.background for run in shown.runs]


# -- models ----------------------------------------------------------------------------------------------------------------


def _load(magics: MLXMagics, words: list[str]) -> None:
    name, dtype = _load_words(words)
    layer = magics.notebook_layer()
    client = runtime.client()
    with Guard(client.cancel) as guard:
        generation = client.load(name if name is not None else layer.get("model", ""), dtype or layer.get("dtype"))
        progress = _Progress(generation)
        try:
            guard.wait([generation], progress.poll)
        finally:
            progress.end()
    generation.raise_for_error()
    weights = generation.terminal.usage.get("weights", "") if isinstance(generation.terminal, ev.Finished) else ""
    _say(f"Loaded {describe.described(client.status(), generation.request.model, weights)}.")
    notices.tell(client)


def _load_words(words: list[str]) -> tuple[str | None, str | None]:
    name: str | None = None
    dtype: str | None = None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag == "--dtype":
            if not equals:
                value = rest.pop(0) if rest else ""
            dtype = options.read_value(options.BY_NAME["dtype"], "--dtype", value)
        elif word.startswith("-"):
            raise RequestError(f"`%mlx load` has no option {word}.", "It is: %mlx load [NAME] [--dtype TYPE]")
        elif name is not None:
            raise RequestError(f"{word!r} is one word too many.", "A name with spaces needs quotes.")
        else:
            name = word
    return name, dtype


class _Progress:
    """One line that is written over while a model loads, at most four times a second."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._seen = 0
        self._width = 0

    def poll(self) -> None:
        """Show the newest event; blocks for up to PROGRESS_S."""
        import time

        events = self._generation.read(self._seen, PROGRESS_S)
        self._seen += len(events)
        news = [event for event in events if isinstance(event, ev.LoadProgress)]
        if news:
            part = f" {describe.size(news[-1].done)} of {describe.size(news[-1].total)}" if news[-1].total else ""
            self._write(f"{news[-1].phase}{part}")
        if events and not self._generation.done:
            time.sleep(PROGRESS_S)

    def _write(self, text: str) -> None:
        from .sanitize import visible_text

        shown = visible_text(text)
        print("\r" + shown.ljust(self._width), end="", flush=True)
        self._width = len(shown)

    def end(self) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="", flush=True)


def _unload(magics: MLXMagics, words: list[str]) -> None:
    _at_most(words, 1, "unload [NAME]")
    here = runtime.current()
    before = here.status() if here is not None else {}
    gone = here.unload(words[0] if words else None) if here is not None else []
    after = here.status() if here is not None else {}
    if words and not gone:
        raise RequestError(f"{words[0]!r} is not loaded.", _near_model(words[0]))
    if not gone and after.get("models"):
        raise RequestError("Every model that is loaded is in use.", "Wait for its cells, or stop them: %mlx cancel all.")
    _say(f"Unloaded {describe.gone(gone, before, after)}." if gone else "No model was loaded.")


def _near_model(name: str) -> str:
    from .insert import near

    loaded = describe.resident_models()
    return near(name, loaded, 0.4) or (f"Loaded: {', '.join(loaded)}." if loaded else "No model is loaded.")


def _models(magics: MLXMagics, words: list[str]) -> None:
    _at_most(words, 0, "models")
    here = runtime.current()
    loaded = (here.status().get("models") or []) if here is not None else []
    head = ("loaded", "weights", "rows", "queue", "KV")
    lines = describe.table(head, [describe.model_row(model) for model in loaded]) if loaded else ["No model is loaded."]
    disk = [(name, "" if count is None else describe.size(count)) for name, count in describe.models_on_disk()]
    lines += ["", *(describe.table(("on disk", ""), disk) if disk else ["No model is on disk; the first prompt fetches the default one."])]
    lines += ["", f"default  {magics.notebook_layer().get('model') or 'the embedded model'}; change it: %mlx config model=NAME"]
    _say(*lines)


# -- running answers -------------------------------------------------------------------------------------------------------


def _cancel(magics: MLXMagics, words: list[str]) -> None:
    here = runtime.current()
    if not words or words == ["all"]:
        count = here.cancel(None) if here is not None else 0
        _say(f"Stopped {count} running answer{'s' * (count != 1)}." if count else "Nothing is running.")
        return
    count = here.cancel(sorted({*words, *(row.id for row in _live(words))})) if here is not None else 0
    if not count:
        raise RequestError(f"No running answer is called {' or '.join(words)}.", _running())
    _say(f"Stopped {count} running answer{'s' * (count != 1)}.")


def _live(words: Sequence[str]) -> list[Generation]:
    """The rows at work that these words name, one by one or by their request: of cells, of Python, of views."""
    here = runtime.current()
    return [row for row in (here.live() if here is not None else ()) if row.id in words or row.request.id in words]


def _running() -> str:
    here = runtime.current()
    known = ", ".join(dict.fromkeys(row.request.id for row in (here.live() if here is not None else ())))
    return f"Running: {known}." if known else "Nothing is running."


def _wait(magics: MLXMagics, words: list[str]) -> None:
    """Wait for background cells, or for what is named, make sure outputs are final, and raise the error of one that failed."""
    from .magic import raise_failures
    from .routing import is_terminal
    from .run import Run
    from .terminal import print_result

    wanted = [shown for shown in magics.background if not words or set(words) & {r.request.id for r in shown.runs}]
    runs = [run for shown in wanted for run in shown.runs]
    shown_here = {run.id for run in runs}
    runs += [Run(row) for row in _live(words) if row.id not in shown_here]
    if words and not runs:
        raise RequestError(f"No running answer is called {' or '.join(words)}.", _running())
    terminal = is_terminal(magics.shell)
    # An interrupt here ends the waiting, not the answers: they belong to other cells. A second one stops everything.
    with Guard(runtime.client().cancel if runs else lambda: None) as guard:
        try:
            guard.wait([run.generation for run in runs], cancel=False)
        except KeyboardInterrupt as stop:
            say_instead(stop, "KeyboardInterrupt: no longer waiting; the answers go on, `%mlx cancel` stops them.")
            raise
        for shown in wanted:
            shown.publication.finish()
            if terminal:
                print_result(shown.result, shown.publication.view, errors=len(runs) > 1)
    magics.background = [shown for shown in magics.background if shown not in wanted]
    if not runs:
        _say("Nothing is running in the background.")
        return
    stopped = [run for run in runs if run.finish_reason == "cancelled" and run.generation.cancel_requested]  # the person's own wish
    raise_failures([run for run in runs if run not in stopped], shown=terminal)
    done = len(runs) - len(stopped)
    parts = [f"{done} answer{'s' * (done != 1)} done"] if done or not stopped else []
    _say(", ".join([*parts, *([f"{len(stopped)} stopped"] if stopped else [])]) + ".")


def _resume(magics: MLXMagics, words: list[str]) -> None:
    """Go on with what was interrupted: the one there is, or those that are named."""
    from . import resuming

    found = resuming.interrupted(magics.asked)
    if not words and len(found) != 1:
        _say(*resuming.lines(found))
        return
    chosen = found if not words or words == ["all"] else resuming.chosen(found, words)
    if not chosen:
        _say(*resuming.lines([]))
        return
    magics.ask(options.Cell({}), lambda client: resuming.resume_all(chosen, client))


# -- cache, doctor, config, help --------------------------------------------------------------------------------------------------


def _cache(magics: MLXMagics, words: list[str]) -> None:
    from . import caching

    action, rest = (words[0], words[1:]) if words else ("info", [])
    if action == "info":
        _at_most(rest, 0, "cache info")
        _say(*caching.info_lines(caching.cache_info()))
    elif action == "map":
        from .cacheview import cache_map

        _at_most(rest, 0, "cache map")
        cache_map()
    elif action == "clear":
        model, sure = caching.clear_words(rest)
        if sure:
            _say(caching.cleared(caching.cache_clear(model)))
            return
        again = " ".join(["%mlx cache clear", *([shlex.quote(model)] if model is not None else []), "--yes"])
        _say(caching.question(caching.cache_info(), model), f"To do it: {again}")
    elif action == "flush":
        _at_most(rest, 0, "cache flush")
        _say(caching.flushed(caching.cache_flush()))
    else:
        close = difflib.get_close_matches(action, CACHE_ACTIONS, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]!r}?" if close else f"It can: {', '.join(CACHE_ACTIONS)}."
        raise RequestError(f"`%mlx cache` cannot {action}.", hint)


def _doctor(magics: MLXMagics, words: list[str]) -> None:
    _at_most(words, 0, "doctor")
    from . import doctor

    # The model of this notebook's cells, wherever it was named.
    settings = dataclasses.replace(runtime.config(), model=magics.notebook_layer().get("model"))
    _say(doctor.render(doctor.report(settings)))


def _config(magics: MLXMagics, words: list[str]) -> None:
    """Show or change settings. All changes of a line are checked before the first is made."""
    if not words:
        _say(*_config_lines(magics))
        return
    from .magic import NOTEBOOK_FIELDS, check_setting

    notebook: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    settings = [entry.field for entry in runtime.config().describe()]
    for word in words:
        key, equals, text = word.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        known = [*NOTEBOOK_FIELDS, *(field for field in settings if field not in NOTEBOOK_FIELDS)]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise RequestError(f"There is no setting {key!r}.", f"Did you mean {close[0]!r}?" if close else "`%mlx config` lists them all.")
        if not equals:
            raise RequestError(f"{key} needs a value.", f"Write {name}=VALUE, or {name}= to unset it.")
        target = notebook if name in NOTEBOOK_FIELDS else engine
        target[name] = (check_setting(name, text) if target is notebook else text) if text else None
    running = runtime.override(engine) if engine else False
    for name, value in notebook.items():
        setattr(magics, name, value)
    changed = [f"{name} = {'not set' if value is None else value}" for name, value in {**notebook, **engine}.items()]
    note = ["The running engine keeps its own; %reload_ext mlxnb starts one with the new settings."] if running else []
    _say(*changed, *note)


def _config_lines(magics: MLXMagics) -> list[str]:
    from .magic import NOTEBOOK_FIELDS

    chosen = policy.resolve(notebook=magics.notebook_layer())
    rows = [(name, _shown(chosen.values[name]), _source(chosen, name)) for name in NOTEBOOK_FIELDS if name in policy.DEFAULTS]
    rows.append(("view", magics.view or "answer", "notebook" if magics.view else "default"))
    engine = [
        (entry.field, _shown(entry.value), {"env": "environment", "override": "notebook"}.get(entry.source, entry.source))
        for entry in runtime.config().describe()
        if entry.field not in NOTEBOOK_FIELDS
    ]
    tables = [*describe.table(("cells", "value", "from"), rows), "", *describe.table(("engine", "value", "from"), engine)]
    return [*tables, "", "Change: %mlx config temp=0.7 max_tokens=200     Unset: %mlx config temp="]


def _source(chosen: policy.Policy, name: str) -> str:
    if name == "model" and runtime.config().model:
        return "environment"
    return "default, or the model's own" if name in chosen.open_fields else chosen.source[name]


def _shown(value: Any) -> str:
    return "-" if value is None or value == "" else describe.short(str(value))


def _help(magics: MLXMagics, words: list[str]) -> None:
    if words and words[0] in COMMANDS:
        command = COMMANDS[words[0]]
        _say(f"%mlx {command.name} {command.usage}".rstrip(), f"  {command.help}")
        return
    if words and words[0] == "options":
        print(options.help_text())
        return
    if words:
        raise RequestError(f"There is no help on {words[0]!r}.", f"There is on: options, {', '.join(COMMANDS)}.")
    _say(
        "Ask a model: a cell that begins with %%mlx, the prompt below it. `%%mlx --help` lists the options.",
        "",
        *(f"  %mlx {f'{command.name} {command.usage}':<30}{command.help}".rstrip() for command in COMMANDS.values()),
    )


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command("status", "", "the engine, its models and what is running", _status),
        Command("load", "[NAME] [--dtype TYPE]", "load a model before the first prompt", _load),
        Command("unload", "[NAME]", "free an idle model, or all", _unload),
        Command("models", "", "models in memory and on disk", _models),
        Command("cancel", "[ID ...|all]", "stop running answers", _cancel),
        Command("wait", "[ID ...]", "wait for --bg cells", _wait),
        Command("resume", "[ID ...|all]", "go on with interrupted answers", _resume),
        Command("chats", "", "the conversations of `%%mlx -c NAME`", chatmagic.list_chats),
        Command("show", "CHAT", "its tree of turns", chatmagic.show),
        Command("fork", "CHAT [TURN] [--as NEW]", "a chat of its own up to a turn", chatmagic.fork),
        Command("reset", "CHAT", "forget its turns", chatmagic.reset),
        Command("export", "CHAT FILE", "write it as JSON", chatmagic.export),
        Command("import", "FILE [--as NAME]", "read what export wrote", chatmagic.import_),
        Command("cache", "[info|map|clear [MODEL]|flush]", "what is kept of earlier prompts; its map; forget it; save it", _cache),
        Command("doctor", "", "what is wrong here, and how to fix it", _doctor),
        Command("config", "[KEY=VALUE ...]", "settings for later cells and for the engine", _config),
        Command("help", "[options|COMMAND]", "this text", _help),
    )
}
