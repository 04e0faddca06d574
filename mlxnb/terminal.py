"""Runs in a terminal: a `rich` live view where the terminal can, plain streaming text where it cannot."""

from __future__ import annotations

import math
import sys
from typing import Any, TextIO

from .display import Screen
from .render import Renderer, facts, label_of, plain_run, progress_line, status_word
from .run import Run, RunGroup
from .sanitize import visible_text

LIVE_LINES = 12
"""Lines of a growing answer that the live view shows; the whole answer is printed at the end, where it can scroll."""


DOUBTFUL = 0.5
"""A token less likely than this stands out in the token view."""


def footer(run: Run) -> str:
    name = [run.model] if run.model else []
    return " · ".join([*name, status_word(run), *(f"{label} {figure}" for label, figure in facts(run))])


def token_line(run: Run) -> str:
    """The tokens with a bar between them, so that one sees where they end."""
    return "|".join(token.text for token in run.tokens)


class PlainScreen:
    """Text as it comes, for a dumb terminal or a pipe. One run streams; runs of a group are printed whole, each when it ends.

    Invariant: what was written is never written again; control characters of a model never reach the terminal.
    """

    threaded = True

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._written = 0
        self._printed: set[int] = set()

    def draw(self, renderer: Renderer, final: bool) -> None:
        if isinstance(renderer.target, Run):
            self._stream(renderer.target, renderer, final)
        else:
            for index, run in enumerate(renderer.runs):
                if run.done and index not in self._printed:
                    self._printed.add(index)
                    error = f"\n{type(run.error).__name__}: {run.error}" if run.error is not None and renderer.errors else ""
                    answer = token_line(run) + error if renderer.view == "tokens" else plain_run(run, renderer.errors)
                    self._put(f"[{label_of(run, index)}]\n{answer}\n({footer(run)})\n\n")

    def _stream(self, run: Run, renderer: Renderer, final: bool) -> None:
        answer = token_line(run) if renderer.view == "tokens" else run.answer
        seen = visible_text(answer) if run.text or final else ""
        fresh, self._written = seen[self._written :], max(self._written, len(seen))
        if final:
            error = run.error if renderer.errors else None
            problem = f"\n{type(error).__name__}: {error}" if error is not None else ""
            fresh += f"{problem}\n({footer(run)})\n"
        self._put(fresh)

    def _put(self, value: str) -> None:
        if value:
            encoding = getattr(self._out, "encoding", None) or "utf-8"
            self._out.write(visible_text(value).encode(encoding, "replace").decode(encoding))
            self._out.flush()

    def close(self) -> None:
        pass


class RichScreen:
    """A live region at the bottom of the terminal, replaced at the end by the whole answer as Markdown.

    Markdown is drawn without hyperlinks, so a link shows where it leads.
    """

    threaded = True

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out)
        self._live = Live(console=self._console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._started = False

    def draw(self, renderer: Renderer, final: bool) -> None:
        from rich.console import Group
        from rich.text import Text

        if final:
            self._stop()
            self._console.print(self._final(renderer))
            return
        if not self._started:
            self._started = True
            self._live.start()
        parts: list[Any] = []
        for index, run in enumerate(renderer.runs):
            if renderer.target is not run:
                parts.append(Text(visible_text(label_of(run, index)), style="bold"))
            parts.append(Text("\n".join(visible_text(run.answer).split("\n")[-LIVE_LINES:]) if run.text else ""))
            parts.append(Text(visible_text(footer(run) if run.text else progress_line(run)), style="dim"))
        self._live.update(Group(*parts), refresh=True)

    @staticmethod
    def _final(renderer: Renderer) -> Any:
        from rich.console import Group
        from rich.markdown import Markdown
        from rich.text import Text

        parts: list[Any] = []
        for index, run in enumerate(renderer.runs):
            if renderer.target is not run:
                parts.append(Text(visible_text(label_of(run, index)), style="bold"))
            if renderer.view == "tokens":
                parts.append(RichScreen._tokens(run))
            elif renderer.view == "raw":
                parts.append(Text(visible_text(run.answer)))
            else:
                parts.append(Markdown(visible_text(run.answer), hyperlinks=False))
            if run.error is not None and renderer.errors:
                parts.append(Text(visible_text(f"{type(run.error).__name__}: {run.error}"), style="bold red"))
            parts.append(Text(visible_text(footer(run)), style="dim"))
        return Group(*parts)

    @staticmethod
    def _tokens(run: Run) -> Any:
        """Every token between dim bars; one that was doubtful, if its probability was captured, in yellow with its share."""
        from rich.text import Text

        line = Text()
        for index, token in enumerate(run.tokens):
            line.append("|" if index else "", style="dim")
            share = None if token.logprob is None else math.exp(min(0.0, token.logprob))
            doubtful = share is not None and share < DOUBTFUL
            line.append(visible_text(token.text), style="yellow" if doubtful else "")
            line.append(f"({share:.0%})" if doubtful else "", style="dim")
        return line

    def _stop(self) -> None:
        if self._started:
            self._started = False
            self._live.stop()

    def close(self) -> None:
        self._stop()


class QuietScreen:
    """For a run in the background of a terminal: one line now, one line at the end, so that the prompt stays usable."""

    threaded = True

    def __init__(self, out: TextIO) -> None:
        self._plain = PlainScreen(out)
        self._announced = False

    def draw(self, renderer: Renderer, final: bool) -> None:
        if not self._announced:
            self._announced = True
            self._plain._put(f"Running in the background: {', '.join(run.id for run in renderer.runs)}; {renderer.stop_hint}.\n")
        if final:
            for run in renderer.runs:
                self._plain._put(f"\n{run.id} ended: {status_word(run)}\n")

    def close(self) -> None:
        pass


def terminal_screen(background: bool = False, out: TextIO | None = None) -> Screen:
    """The best screen this terminal can do."""
    out = out if out is not None else sys.stdout
    if background:
        return QuietScreen(out)
    try:
        if not out.isatty():
            return PlainScreen(out)
        screen = RichScreen(out)
        return PlainScreen(out) if screen._console.is_dumb_terminal else screen
    except Exception:  # a closed or strange stdout, or a rich that cannot start there
        return PlainScreen(out)


def print_result(target: Run | RunGroup, view: str, errors: bool, out: TextIO | None = None) -> None:
    """Print a target that has ended, as a cell that had waited for it would."""
    if view == "none":
        return
    screen = terminal_screen(out=out)
    try:
        screen.draw(Renderer(target, view, errors=errors), True)
    finally:
        screen.close()
