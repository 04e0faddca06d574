"""Runs to what a person sees: HTML and plain text, as pure functions of the record. No thread, no kernel, no state but a cache."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from mlxnb_engine import events as ev
from mlxnb_engine.errors import RequestError

from . import record
from .record import short_value
from .run import LoadRun, Run, RunGroup
from .sanitize import (
    ORIGIN_UNDERLINES,
    SafeHtml,
    bundle,
    el,
    join,
    markdown_to_html,
    meter,
    preformatted,
    text,
    token_span,
    underline_sample,
)
from .schema import RUN_MIME

View = Literal["answer", "tokens", "raw", "loom", "none"]
VIEWS: tuple[str, ...] = get_args(View)
MAX_CARDS = 12
"""More answers than this are a table that scrolls, not cards."""
MAX_TOKEN_SPANS = 4000
"""A token costs about 250 bytes of HTML; beyond this many the rest of a token view is plain text."""
STOP_HINT = "interrupt the kernel to stop"
DEFAULT_MODEL = "the default model"
"""The name of a model that nobody named, until the engine says which it is."""

_PHASES = {
    "look up": "Looking up",
    "wait": "Waiting for another kernel to fetch",
    "download": "Downloading",
    "unpack": "Unpacking",
    "hash": "Checking",
    "loading weights": "Loading",
}
_ORIGIN_NAMES = {"sampled": "sampled", "filled": "asserted fill", "echo": "echo", "drafted": "draft", "forced": "forced"}


def check_view(view: str) -> View:
    """Raises RequestError for an unknown view."""
    if view not in VIEWS:
        raise RequestError(f"There is no view {view!r}.", f"Views are {', '.join(VIEWS)}.")
    return view  # type: ignore[return-value]


# -- figures -------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """74 ms, 9.8 s, 3 min 05 s: never more digits than mean something."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}\u2009ms"
    if seconds < 59.95:
        return f"{seconds:.1f}\u2009s"
    whole = round(seconds)
    return f"{whole // 60}\u2009min {whole % 60:02d}\u2009s"


def size(count: float) -> str:
    """Bytes in decimal units, as registries and disks state them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f}\u2009{unit}" if unit in ("B", "kB") or count >= 99.95 else f"{count:.3g}\u2009{unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _left(done: float, total: float, spent_s: float) -> str:
    """Time left at the mean speed so far; "" before that means anything."""
    if spent_s < 0.5 or not 0 < done < total:
        return ""
    return f"{duration(spent_s * (total - done) / done)} left"


# -- progress ------------------------------------------------------------------------------------------------------------


def progress_facts(run: Run) -> tuple[str, list[str], float]:
    """What a run that has no text yet is doing: a word, figures, and a fraction in [0, 1]."""
    now = run.progress
    if isinstance(now, ev.LoadProgress):
        word = _PHASES.get(now.phase, now.phase.capitalize() or "Loading")
        figures = [size(now.done) + (f" of {size(now.total)}" if now.total else "")] if now.done or now.total else []
        speed = now.done / (now.t - run.phase_start) if now.t - run.phase_start >= 0.5 else 0.0
        figures += [f"{size(speed)}/s"] if speed else []
        left = _left(now.done, now.total, now.t - run.phase_start)
        return f"{word} {run.model or DEFAULT_MODEL}", figures + ([left] if left else []), now.done / now.total if now.total else 0.0
    if isinstance(now, ev.PrefillProgress):
        left = _left(now.done, now.total, now.t - run.phase_start)
        figures = [f"{now.done:,} of {now.total:,} tokens", *([left] if left else [])]
        return "Reading the prompt", figures, now.done / now.total if now.total else 0.0
    return "Waiting", [duration(run.elapsed_s)], 0.0


def progress_line(run: Run) -> str:
    """The same as one line of plain text."""
    word, figures, _ = progress_facts(run)
    return " · ".join([word, *figures])


def _progress_html(run: Run, stop_hint: str) -> SafeHtml:
    word, figures, fraction = progress_facts(run)
    facts = [el("span", "fact", figure) for figure in figures]
    head = el("div", "bar", el("span", "state", el("span", "dot"), word), *facts, el("span", "hint", stop_hint))
    return join([head, meter(fraction)])


# -- footer --------------------------------------------------------------------------------------------------------------


def facts(run: Run) -> list[tuple[str, str]]:
    """Label and figure of what the footer says, in its order. A fact that is not known is absent."""
    found: list[tuple[str, str]] = []
    usage = run.usage
    if isinstance(usage.get("prompt_tokens"), int):
        found.append(("prompt", f"{usage['prompt_tokens']:,}{_reused(usage.get('prompt_tokens_details'))}"))
    found.append(("answer", f"{run.token_count:,}\u2009tokens"))
    speed = run.tokens_per_second
    if speed is not None:
        found.append(("speed", f"{speed:.3g}\u2009tok/s" if speed < 999.5 else f"{speed:,.0f}\u2009tok/s"))
    first = run.timing.first_token
    if first is not None:
        found.append(("TTFT", duration(first)))
    if run.done:
        found.append(("total", duration(run.elapsed_s)))
    if run.seed is not None and _seed_matters(run):
        found.append(("seed", str(run.seed)))
    declined = usage.get("execution", {}).get("declined") if isinstance(usage.get("execution"), dict) else None
    if declined:
        found.append(("declined", ", ".join(map(str, declined))))
    return found


def _reused(details: object) -> str:
    """How much of the prompt was not computed, in words; "" for none of it."""
    known = details if isinstance(details, dict) else {}
    cached, disk = known.get("cached_tokens"), known.get("ssd_tokens")
    if not isinstance(cached, int) or cached <= 0:
        return ""
    source = f", {disk:,} of them from the SSD" if isinstance(disk, int) and disk > 0 else ""
    return f" ({cached:,} cached{source})"


def _seed_matters(run: Run) -> bool:
    """A greedy answer draws nothing. Where the model itself may set a temperature, only a seed that somebody chose is shown."""
    sampling = run.request.sampling
    return sampling.temp > 0 or ("temp" in run.request.open_fields and sampling.seed is not None)


def status_word(run: Run) -> str:
    """One word on how it is going or how it ended."""
    status = run.status
    if run.stopping:
        return "stopping"
    if status == "done":
        if isinstance(run, LoadRun):
            return "loaded"
        return {"stop": "complete", "length": "length limit reached"}.get(run.finish_reason or "", run.finish_reason or "complete")
    return {"stopped": "stopped", "failed": "failed", "running": "streaming", "prefill": "reading the prompt"}.get(status, status)


def _status_html(run: Run) -> SafeHtml:
    status, word = run.status, status_word(run)
    if status == "failed":
        return el("span", "error", word)
    if status == "stopped":
        return el("span", "warn", word)
    if status == "done":
        return el("span", "state", word)
    return el("span", "state", el("span", "dot"), word)


def _footer(run: Run, short: bool = False, stop_hint: str = "") -> SafeHtml:
    parts = [] if short else _chip(run)
    parts.append(_status_html(run))
    for label, figure in facts(run):
        if not (short and label in ("prompt", "TTFT", "seed", "declined")):
            parts.append(el("span", "fact", f"{label} ", el("span", "figure", figure)))
    if stop_hint and not run.done:
        parts.append(el("span", "hint", stop_hint))
    return el("div", "foot", *parts)


def _chip(run: Run) -> list[SafeHtml]:
    return [el("span", "chip", run.model, title=run.model)] if run.model else []


def _problem(run: Run) -> SafeHtml:
    error = run.error
    if error is None:
        return join([])
    head = el("strong", None, type(error).__name__)
    hint = [el("div", "hint", error.hint)] if error.hint else []
    return el("div", "problem", head, " ", error.message, *hint)


# -- bodies --------------------------------------------------------------------------------------------------------------


def _token_title(token: ev.TokenRecord) -> str:
    lines = [f"token {token.id} · {_ORIGIN_NAMES.get(token.origin, token.origin)} · {duration(token.t)}"]
    if token.logprob is not None:
        rank = f" · rank {token.rank + 1}" if token.rank is not None else ""
        lines.append(f"p {math.exp(min(0.0, token.logprob)):.3f}{rank}")
    lines += [f"{math.exp(min(0.0, other.logprob)):.3f}  {other.text!r}" for other in token.top]
    return "\n".join(lines)


def _tokens_html(run: Run) -> SafeHtml:
    tokens = run.tokens
    spans = []
    for token in tokens[:MAX_TOKEN_SPANS]:
        doubt = None if token.logprob is None else 1.0 - math.exp(min(0.0, token.logprob))
        spans.append(token_span(token.text, token.origin, _token_title(token), doubt))
    spans.append(text("".join(token.text for token in tokens[MAX_TOKEN_SPANS:])))
    used = [origin for origin in ORIGIN_UNDERLINES if any(token.origin == origin for token in tokens)]
    legend: list[SafeHtml | str] = [el("span", "fact", underline_sample(origin, _ORIGIN_NAMES[origin])) for origin in used]
    if any(token.logprob is not None for token in tokens):
        legend.append(el("span", "fact", "the stronger the amber, the less likely the token"))
    return join([el("div", "legend", *legend), el("div", "tokens", *spans)])


def _body(run: Run, view: View) -> SafeHtml:
    if view == "tokens":
        return _tokens_html(run)
    if view == "raw":
        return preformatted(run.answer)
    return el("div", "answer", markdown_to_html(run.answer))


class Renderer:
    """Renders one run or group again and again, remembering the bodies that did not change.

    Owner: one thread at a time. `changed()` is cheap and tells whether `html()` would give anything new.
    """

    def __init__(self, target: Run | RunGroup, view: str = "answer", *, stop_hint: str = STOP_HINT, errors: bool = True) -> None:
        """stop_hint: how to stop what runs. errors: False if whoever shows this raises the error of a failed run as well."""
        self.target = target
        self.key = ""
        """Under which the kernel knows this output, if it takes commands for it."""
        self.view = check_view(view)
        self.stop_hint = stop_hint
        self.errors = errors
        self._bodies: dict[int, tuple[tuple[int, int], SafeHtml]] = {}
        self._shown: object = None

    @property
    def runs(self) -> list[Run]:
        return [self.target] if isinstance(self.target, Run) else list(self.target)

    def changed(self) -> bool:
        """Whether something to show happened since the last call that said so."""
        state = [self._state(run) for run in self.runs]
        if state == self._shown:
            return False
        self._shown = state
        return True

    @staticmethod
    def _state(run: Run) -> tuple[Any, ...]:
        return (run.status, run.stopping, run.token_count, len(run.text), run.progress)

    def _body_of(self, index: int, run: Run) -> SafeHtml:
        key = (len(run.text), run.token_count)
        known = self._bodies.get(index)
        if known is None or known[0] != key:
            known = (key, _body(run, self.view))
            self._bodies[index] = known
        return known[1]

    def html(self) -> SafeHtml:
        if self.view == "none":
            return join([])
        if isinstance(self.target, Run):
            return self._run(self.target)
        if len(self.target) > MAX_CARDS:
            return self._table(self.target)
        return self._cards(self.target)

    def _run(self, run: Run) -> SafeHtml:
        if isinstance(run, LoadRun) and run.done:
            return el("div", "run", self._problem(run), el("div", "bar", _status_html(run), el("span", "fact", load_line(run))))
        started = bool(run.text) or run.done
        if not started:
            return el("div", "run", _progress_html(run, self.stop_hint))
        body = self._body_of(0, run) if run.answer or run.tokens else _nothing(run)
        return el("div", "run", body, self._problem(run), _footer(run, stop_hint=self.stop_hint))

    def _problem(self, run: Run) -> SafeHtml:
        return _problem(run) if self.errors else join([])

    def _cards(self, group: RunGroup) -> SafeHtml:
        cards = []
        for index, run in enumerate(group):
            body = self._body_of(index, run) if run.text else _nothing(run) if run.done else el("span", "waiting", progress_line(run))
            head = el("div", "card_head", label_of(run, index))
            cards.append(el("div", "card", head, el("div", "card_body", body), self._problem(run), _footer(run, True)))
        return el("div", "run", el("div", "grid", *cards), self._summary(group))

    def _table(self, group: RunGroup) -> SafeHtml:
        names = list(dict.fromkeys(str(name) for run in group for name in run.labels)) or ["#"]
        head = [el("th", "th", name) for name in (*names, "answer", "tokens", "seconds", "end")]
        lines = []
        for index, run in enumerate(group):
            labels = {str(name): value for name, value in run.labels.items()} or {"#": index + 1}
            cells = [el("td", "td", short_value(labels.get(name, ""))) for name in names]
            cells.append(el("td", "td_text", run.answer if run.text else "" if run.done else progress_line(run), self._problem(run)))
            cells += [el("td", "td_number", f"{run.token_count:,}"), el("td", "td_number", f"{run.elapsed_s:.1f}")]
            lines.append(el("tr", None, *cells, el("td", "td", _status_html(run))))
        table = el("table", "table", el("thead", None, el("tr", None, *head)), el("tbody", None, *lines))
        return el("div", "run", el("div", "scroll", table), self._summary(group))

    def _summary(self, group: RunGroup) -> SafeHtml:
        if not len(group):
            return el("div", "foot", "no runs")
        count, over = sum(run.token_count for run in group), sum(run.done for run in group)
        elapsed = max(run.elapsed_s for run in group)
        parts = [*_chip(group[0]), el("span", "state", f"{over} of {len(group)}")]
        failed, stopped = (sum(run.status == status for run in group) for status in ("failed", "stopped"))
        parts += [el("span", "error", f"{failed} failed")] if failed else []
        parts += [el("span", "warn", f"{stopped} stopped")] if stopped else []
        parts.append(el("span", "fact", "answers ", el("span", "figure", f"{count:,}\u2009tokens")))
        if elapsed > 0 and count:
            parts.append(el("span", "fact", "all rows ", el("span", "figure", f"{count / elapsed:.3g}\u2009tok/s")))
        parts.append(el("span", "fact", "total ", el("span", "figure", duration(elapsed))))
        if over < len(group):
            parts.append(el("span", "hint", self.stop_hint))
        return el("div", "foot", *parts)

    def plain(self) -> str:
        """The answer itself; of a group every answer under its label."""
        if self.view == "none":
            return ""
        if isinstance(self.target, Run):
            return plain_run(self.target, self.errors)
        return "\n\n".join(f"[{label_of(run, index)}]\n{plain_run(run, self.errors)}" for index, run in enumerate(self.target))

    def mime(self, saved: bool = False) -> dict[str, Any]:
        """What the output shows now. saved: it stays, so the record goes with it, for views that open without a kernel."""
        shown: dict[str, Any] = dict(bundle(self.html(), self.plain()))
        if saved and self.view != "none" and not isinstance(self.target, LoadRun):
            extra = {"view": self.view, **({"key": self.key} if self.key else {})}
            shown[RUN_MIME] = record.saved(self.target.to_dict(), extra)
        return shown

    def retarget(self, target: Run | RunGroup) -> None:
        """Show this target from now on: the same one with more runs."""
        self.target = target
        self._bodies.clear()
        self._shown = None


def _nothing(run: Run) -> SafeHtml:
    """An empty answer says so: nothing at all would look like a fault of the notebook."""
    return el("span", "waiting", "" if run.status == "failed" else "(no text)")


def load_line(run: Run) -> str:
    return f"{run.model or DEFAULT_MODEL} · {duration(run.elapsed_s)}"


def plain_run(run: Run, errors: bool = True) -> str:
    """The answer; while there is none the progress; with the reason after it if it failed and `errors` asks for that."""
    error = run.error if errors else None
    if error is not None:
        return "\n\n".join(part for part in (run.answer, f"{type(error).__name__}: {error}") if part)
    if isinstance(run, LoadRun) and run.done:
        return f"{status_word(run)}: {load_line(run)}"
    return run.answer if run.text or run.done else progress_line(run)


def label_of(run: Run, index: int) -> str:
    """The labels as a heading: `temp 0.7, sample 2`."""
    return record.label_of(run.labels, index)


def run_bundle(run: Run, view: str = "answer") -> dict[str, Any]:
    return Renderer(run, view).mime(saved=run.done)


def group_bundle(group: RunGroup, view: str = "answer") -> dict[str, Any]:
    return Renderer(group, view).mime(saved=group.done)
