"""`%%mlx` and `%mlx`: from a cell to requests, then show, wait, store. Parsing, planning and showing live in other files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from traitlets import TraitError, TraitType

from mlxnb_engine import policy
from mlxnb_engine.errors import Cancelled, MlxnbError, RequestError, error_from

from . import comm, notices, options, runtime
from .interrupts import Guard, say_instead
from .trie import LOGPROBS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from mlxnb_engine.client import CompletionClient
    from mlxnb_engine.session import Generation

    from .cell import Planned
    from .complete import Completer
    from .display import Publication
    from .run import Run, RunGroup

MOST_ASKED = 64
"""Runs of earlier cells that are remembered in case they are resumed."""
STOPPED_S = 0.25
"""How long a stopped cell waits for its last tokens where nothing can be shown after it, as in a terminal."""

NOTEBOOK_FIELDS = tuple(name for name in (*policy.DEFAULTS, "view") if name not in ("prefill", "samples", "stop", "logit_bias", "logprobs"))
"""What `%config MLXMagics.<name>` and `%mlx config <name>=` set for every later cell."""


class Setting(TraitType[Any, Any]):
    """A default for later cells: None (not set), a value, or its text as on the option line. Checked like an option."""

    default_value = None
    allow_none = True

    def __init__(self, name: str) -> None:
        super().__init__(None, allow_none=True, help=options.BY_NAME[name].help, config=True)

    def validate(self, obj: Any, value: Any) -> Any:
        try:
            return check_setting(str(self.name), value)
        except RequestError as error:
            raise TraitError(str(error)) from None


def check_setting(name: str, value: Any) -> Any:
    """The value of a notebook setting; text is read as on the option line. Raises RequestError."""
    option = options.BY_NAME[name]
    if isinstance(value, str):
        return options.read_value(option, name, value)
    if option.choices and name not in policy.DEFAULTS:
        raise RequestError(f"{name}={value!r} is not a choice.", f"Choose one of: {', '.join(option.choices)}.")
    if name in policy.DEFAULTS:
        policy.check(name, value)
    return value


@dataclass(frozen=True, slots=True)
class Shown:
    """A result and its display, of a cell that did not wait."""

    result: Run | RunGroup
    publication: Publication

    @property
    def runs(self) -> list[Run]:
        return runs_of(self.result)


@magics_class
class MLXMagics(Magics):
    """Defaults for every `%%mlx` cell of this notebook; an option on the cell wins.

    Owner: the shell. background: cells started with --bg that nobody has waited for; raw_cell: the text of the running cell.
    asked: the runs of the last cells that may yet be stopped and resumed, newest last.
    """

    if TYPE_CHECKING:
        shell: InteractiveShell
        view: str | None
    for _name in NOTEBOOK_FIELDS:
        vars()[_name] = Setting(_name)
    del _name

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.background: list[Shown] = []
        self.asked: list[Run] = []
        self.raw_cell = ""

    def notebook_layer(self) -> dict[str, Any]:
        """The policy layer of this notebook. MLXNB_MODEL names the model before `%config` does, for runs of others' notebooks."""
        layer = {name: getattr(self, name) for name in NOTEBOOK_FIELDS if name != "view" and getattr(self, name) is not None}
        from_env = runtime.config().model
        return {**layer, "model": from_env} if from_env else layer

    @no_var_expand
    @line_cell_magic
    def mlx(self, line: str, cell: str | None = None) -> None:
        with plainly():
            if cell is not None:
                self._cell(line, cell)
            else:
                from . import linemagic

                linemagic.run(self, line)

    mlx.__doc__ = options.help_text() + "\n\n`%mlx help` lists the commands of the line magic."

    def _cell(self, line: str, cell: str) -> None:
        from .routing import is_terminal

        parsed = options.parse(line)
        if parsed.get("help"):
            print(options.help_text())
            return
        body = typed_body(cell, self.raw_cell, is_terminal(self.shell))
        if not body.strip() and not (body and parsed.get("no_template")):
            print(options.USAGE)
            raise RequestError("This cell has no prompt.", "Write it below the %%mlx line; `%%mlx --help` lists the options.")
        if (parsed.get("view") or self.view) == "loom":
            parsed = options.Cell({"logprobs": LOGPROBS, **parsed.given})
        from .cell import plan

        planned = plan(parsed, body, self.notebook_layer(), self.shell.user_ns)
        if "chat" not in parsed.given:
            self.ask(parsed, lambda client: submit_all(client, planned))
            return
        from . import chatmagic

        self.ask(parsed, lambda client: [chatmagic.ask(self, client, parsed, body, planned[0])])

    def ask(self, parsed: options.Cell, submit: Callable[[CompletionClient], list[Run]]) -> None:
        """Submit all requests of a cell at once, show them, and wait unless it is a background cell."""
        from .display import publish
        from .routing import is_batch, is_terminal
        from .run import RunGroup

        client = runtime.client()
        batch, terminal = is_batch(self.shell), is_terminal(self.shell)
        background = bool(parsed.get("bg")) and not batch
        with Guard(client.cancel) as guard:
            runs = submit(client)
            generations = [run.generation for run in runs]
            self.asked = [run for run in self.asked if run.resumable or not run.done][-MOST_ASKED:] + runs
            try:
                result: Run | RunGroup = runs[0] if len(runs) == 1 else RunGroup(runs)
                self._store(result, parsed.get("out"))
                view = parsed.get("view") or self.view or "answer"
                hint = cancel_hint(runs, terminal) if background else None
                # A cell that waits raises the error of its one answer, which shows it.
                errors = background or len(runs) > 1
                publication = publish(result, view=view, background=background, shell=self.shell, stop_hint=hint, errors=errors)
            except BaseException:
                cancel_all(generations)
                raise
            if background and not guard.interrupted:
                # In a terminal the answer of one that has ended is still to be printed.
                self.background = [shown for shown in self.background if terminal or not shown.result.done]
                self.background.append(Shown(result, publication))
                return
            ended = self._wait(guard, generations, publication)
        notices.tell(client)
        raise_failures(runs, shown=view != "none" and not batch)
        if not ended:
            raise Cancelled("The request was cancelled.")

    @staticmethod
    def _wait(guard: Guard, generations: list[Generation], publication: Publication) -> bool:
        """Whether the rows ended. Those that were stopped in a long step do so soon; what they wrote is shown then."""
        late = publication.outlives_cell
        try:
            ended = guard.wait(generations, leave=late)
        except KeyboardInterrupt as stop:
            publication.finish(0.0 if late else STOPPED_S)
            show_plainly(stop, "KeyboardInterrupt: stopped; what was written so far is in `_mlx`.")
            raise
        publication.finish(5.0 if ended else 0.0)
        return ended

    def _store(self, result: Run | RunGroup, name: str | None) -> None:
        """Before waiting, so that a stopped or failed cell leaves what it has."""
        self.shell.user_ns["_mlx"] = result
        self.shell.user_ns_hidden["_mlx"] = result
        if name:
            self.shell.push({name: result})


def submit_all(client: CompletionClient, planned: Sequence[Planned]) -> list[Run]:
    """Submit every request, all or none: a refusal takes back those before it."""
    from .run import Run

    runs: list[Run] = []
    try:
        for plan in planned:
            several = plan.request.samples > 1
            for generation in client.submit(plan.request):
                runs.append(Run(generation, {**plan.labels, **({"sample": generation.index} if several else {})}))
    except BaseException:
        cancel_all([run.generation for run in runs])
        raise
    return runs


def cancel_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.cancel()


def runs_of(result: Run | RunGroup) -> list[Run]:
    from .run import Run

    return [result] if isinstance(result, Run) else list(result)


def cancel_hint(runs: Sequence[Run], terminal: bool) -> str:
    """How to stop the answers of a background cell, by the ids that a person can type."""
    ids = list(dict.fromkeys(run.request.id for run in runs))
    words = " ".join(ids if len(ids) <= 3 else ids[:2] + ["..."])
    stop = f"`%mlx cancel {words}` stops {'it' if len(runs) == 1 else 'them'}"
    if len(ids) > 3:
        stop = "`%mlx cancel all` stops everything that runs"
    wait = f"`%mlx wait {words}` prints {'it' if len(runs) == 1 else 'them'}" if len(ids) <= 3 else "`%mlx wait` prints them"
    return f"{wait}, {stop}" if terminal else stop


def raise_failures(runs: Sequence[Run], shown: bool = False) -> None:
    """Raise the typed error of the first run that failed, or was cancelled from elsewhere; say how many of a group did.

    shown: each answer of a group stands above with its own error, so that the one raised for all repeats none.
    """
    for run in runs:
        try:
            run.raise_for_error()
        except MlxnbError as error:
            if len(runs) == 1:
                raise
            bad = sum(run.finish_reason in ("error", "cancelled") for run in runs)
            count = f"{bad} of {len(runs)} answers did not end well" + ("; the others are kept." if bad < len(runs) else ".")
            whole = error_from(error.kind, f"{count} The first: {error.message}", error.hint)
            if shown:
                show_plainly(whole, f"{type(whole).__name__}: {count}")
            raise whole from None


# -- the text of a cell ----------------------------------------------------------------------------------------------------


def typed_body(cell: str, raw_cell: str, terminal: bool = False) -> str:
    r"""The prompt as it was typed. IPython ends every cell with a line end: one "\n" goes unless the person typed it.

    raw_cell: the text of the executing cell, if known. terminal: there a blank line submits a cell, so none at its end is
    part of the prompt, and the same prompt gets the same answer as in a notebook.
    """
    if terminal:
        return cell.rstrip("\n")
    return cell[:-1] if cell.endswith("\n") and not (cell != "\n" and raw_cell.endswith(cell)) else cell


_FIRST_LINE = re.compile(r"%%mlx(?=\s|$)")


def take_cell(lines: list[str]) -> list[str]:
    """Input transformation of a `%%mlx` cell, before IPython's own.

    IPython would strip `>>> ` and `In [1]: ` from the first lines of a prompt, and refuse `%%mlx --help` for its empty body.
    """
    start = next((number for number, text in enumerate(lines) if text.strip()), 0)
    if not lines or not _FIRST_LINE.match(lines[start]):
        return lines
    line = lines[start].removeprefix("%%mlx").strip()
    body = "".join(lines[start + 1 :]) or "\n"
    return [f"get_ipython().run_cell_magic('mlx', {line!r}, {body!r})\n"]


# IPython asks transformations without side effects whether a cell is complete; this one would hide the `%%`.
take_cell.has_side_effects = True  # type: ignore[attr-defined]


# -- errors ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """A typed error or an interrupt inside is shown in its own words, without a traceback, and still stops "run all"."""
    try:
        yield
    except MlxnbError as error:
        if not hasattr(error, "_render_traceback_"):
            show_plainly(error, f"{type(error).__name__}: {error}")
        raise
    except KeyboardInterrupt as stop:
        if not hasattr(stop, "_render_traceback_"):
            show_plainly(stop, "KeyboardInterrupt: stopped.")
        raise


def show_plainly(error: BaseException, text: str) -> None:
    """Make IPython render this one exception as `text`. Its words may quote a file or a model: control characters show."""
    from .sanitize import visible_text

    shown = visible_text(text)
    error.args = tuple(visible_text(arg) if isinstance(arg, str) else arg for arg in error.args)
    say_instead(error, shown)


# -- the extension ---------------------------------------------------------------------------------------------------------

_KEY = "_mlxnb_installed"


@dataclass(frozen=True, slots=True)
class Installed:
    """What `install` put into a shell, so that `uninstall` takes out the same objects. Stays with the shell over a reload."""

    magics: MLXMagics
    completer: Completer
    hooks: _Hooks


def install(shell: InteractiveShell) -> None:
    """Register everything with this shell. Twice is once; settings survive a reload."""
    from .complete import Completer

    before: Installed | None = getattr(shell, _KEY, None)
    uninstall(shell, stop_engine=False)
    magics = before.magics if before is not None else MLXMagics(shell)
    here = Installed(magics, Completer(magics), _Hooks(magics))
    setattr(shell, _KEY, here)
    configurables: list[Any] = shell.configurables
    if magics not in configurables:
        configurables.append(magics)
    shell.register_magics(magics)
    shell.input_transformers_cleanup.insert(0, take_cell)
    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(here.completer.match)
    shell.events.register("pre_run_cell", here.hooks.before)
    shell.events.register("post_run_cell", here.hooks.after)
    comm.listen(shell)


def uninstall(shell: InteractiveShell, stop_engine: bool = True) -> None:
    """Undo `install`; with stop_engine also stop the engine, within 5 s."""
    here: Installed | None = getattr(shell, _KEY, None)
    if here is not None:
        for event, callback in (("pre_run_cell", here.hooks.before), ("post_run_cell", here.hooks.after)):
            with contextlib.suppress(ValueError):
                shell.events.unregister(event, callback)
        if shell.Completer is not None:
            with contextlib.suppress(ValueError):
                shell.Completer.custom_matchers.remove(here.completer.match)
        configurables: list[Any] = shell.configurables
        configurables[:] = [entry for entry in configurables if entry is not here.magics]
    while take_cell in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(take_cell)
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("mlx", None)
    if stop_engine:
        comm.close_views(shell)
        runtime.close()


def installed(shell: Any) -> Installed | None:
    """What stands in this shell now, if anything."""
    here: Installed | None = getattr(shell, _KEY, None)
    return here


class _Hooks:
    """Keeps the text of the executing cell for `typed_body`."""

    def __init__(self, magics: MLXMagics) -> None:
        self._magics = magics

    def before(self, info: Any) -> None:
        self._magics.raw_cell = info.raw_cell or ""

    def after(self, result: Any) -> None:
        self._magics.raw_cell = ""
