"""`stepper`: one token at a time, with what every rule of the engine does to its rivals. Each step is one request."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import MlxnbError, RequestError

from .ask import Prompt
from .frontend import Handler
from .playgroundview import SETTINGS, settings_in_force
from .record import plain
from .sanitize import bundle, el, preformatted
from .schema import STEPPER_SCHEMA
from .views import OpenView

if TYPE_CHECKING:
    from mlxnb_widgets._base import View

    from .api import LanguageModel

MAX_STEPS = 64
CANDIDATES = 20
_FILTERS = ("top_p", "min_p", "xtc", "top_k")


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token of the answer so far. by_hand: a person took it. probability, rank: among all, before the filters."""

    id: int
    text: str
    by_hand: bool
    probability: float | None
    rank: int | None
    dropped_by: str | None


class Stepper(OpenView):
    """The answer so far and the next choice.

    Owner: the worker thread changes it, after the cell's thread made it. Invariant: `step` is the choice after `past`.
    """

    def __init__(self, model: LanguageModel, prompt: Prompt, options: Mapping[str, Any], shell: Any = None) -> None:
        self.model = model
        self.prompt = prompt
        self.fixed = {name: value for name, value in options.items() if name not in SETTINGS}
        self.settings = {"seed": 0, **{name: value for name, value in options.items() if name in SETTINGS}}
        self.past: list[Chosen] = []
        self.step_now: dict[str, Any] | None = None
        self.status, self.finish = "waiting", ""
        self.error: MlxnbError | None = None
        self._changing = threading.RLock()
        super().__init__(shell, _widget)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "stepper.step": lambda args: self._told(lambda: self.forward(args.get("count", 1))),
            "stepper.choose": lambda args: self._told(lambda: self.choose(args["id"])),
            "stepper.undo": lambda args: self._told(lambda: self.undo(args.get("count", 1))),
            "stepper.reset": lambda args: self._told(lambda: self.undo(len(self.past))),
            "stepper.set": lambda args: self._told(lambda: self.set(args["settings"])),
            "stepper.run": lambda args: self._told(self.run_on),
        }

    def _told(self, act: Any) -> dict[str, Any]:
        with self._changing:
            act()
            self.epoch += 1
            self.changed()
            return self.record()

    # -- what a person does ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Work out the next choice. An error stays in the record, with its hint; what was chosen so far is kept."""
        began = time.monotonic()
        try:
            found = self.model.inspect(
                self.prompt, [token.id for token in self.past], candidates=CANDIDATES, **{**self.fixed, **self.settings}
            )
        except RequestError as error:
            self.step_now = None
            ended = bool(self.past) and "ended" in error.message
            self.status, self.finish = ("done", "stop") if ended else ("failed", "")
            self.error = None if ended else error
        except MlxnbError as error:
            self.step_now, self.status, self.error = None, "failed", error
        else:
            self.step_now = step_record(found, self.in_force(), time.monotonic() - began)
            self.status, self.finish, self.error = "ready", "", None

    def forward(self, count: int = 1) -> None:
        """Take what the engine drew, up to `count` times."""
        for _ in range(min(max(0, count), MAX_STEPS)):
            if self.step_now is None:
                break
            self._take(self.step_now["chosen"], by_hand=False)

    def choose(self, token: int) -> None:
        """Take this candidate instead. Raises RequestError for one that is not listed."""
        if self.step_now is None or token not in {candidate["id"] for candidate in self.step_now["candidates"]}:
            raise RequestError(f"Token {token} is not among the candidates.", "Choose one that is listed.")
        self._take(token, by_hand=token != self.step_now["chosen"])

    def _take(self, token: int, by_hand: bool) -> None:
        assert self.step_now is not None
        listed = self.step_now["candidates"]
        rank = next(index for index, candidate in enumerate(listed) if candidate["id"] == token)
        one = listed[rank]
        known = rank if rank < CANDIDATES else None  # further down stand only those that a penalty pushed there
        self.past.append(Chosen(token, one["text"], by_hand, _probability(one["logprob"]), known, one["dropped_by"]))
        self.look()

    def undo(self, count: int = 1) -> None:
        """Take back the last `count` tokens."""
        if count > 0:
            del self.past[max(0, len(self.past) - count) :]
        self.look()

    def set(self, settings: Mapping[str, Any]) -> None:
        """Change how the next token is chosen. Raises RequestError for a wrong setting, and keeps the old ones."""
        wrong = [name for name in settings if name not in SETTINGS]
        if wrong:
            raise RequestError(f"{wrong[0][:40]!r} is not a setting of the stepper.", f"Settings are {', '.join(SETTINGS)}.")
        merged = {**self.settings, **settings}
        self.model.request(self.prompt, {**self.fixed, **merged})
        self.settings = merged
        self.look()

    def run_on(self) -> None:
        """Let the engine go on by itself to its end, and take all of it."""
        from mlxnb_engine.types import Continued, TokenId

        request = self.model.request(self.prompt, {**self.fixed, **self.settings})
        kept = tuple(Continued(TokenId(token.id), by_hand=token.by_hand) for token in self.past)
        run = self.model._submit(replace(request, continuation=kept, samples=1), {})[0]
        self.status = "working"
        self.changed()
        run.result()
        for token in run.tokens[len(kept) :]:
            self.past.append(
                Chosen(token.id, token.text, False, None if token.logprob is None else math.exp(token.logprob), token.rank, None)
            )
        self.step_now, self.status, self.finish = None, "done", run.finish_reason or ""

    def in_force(self) -> dict[str, Any]:
        """What was set, and for the rest what the model or the engine takes, so that the stages tell the truth."""
        return settings_in_force(self.model, self.prompt, {**self.fixed, **self.settings}, self.settings)

    # -- record ----------------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        error = self.error
        return {
            "schema": STEPPER_SCHEMA,
            "key": self.key,
            "epoch": self.epoch,
            "status": self.status,
            "model": self.model.name or str(self.model.info.get("name", "")),
            "error": {"kind": error.kind, "message": error.message, "hint": error.hint} if error is not None else None,
            "finish_reason": self.finish,
            "settings": plain(self.in_force()),
            "past": [_past(token) for token in self.past],
            "step": plain(self.step_now),
        }

    def bundle(self) -> dict[str, Any]:
        words = "".join(token.text for token in self.past)
        lines = [words, ""] if words else []
        for candidate in (self.step_now or {}).get("candidates", []):
            share = _probability(candidate["logprob"])
            lines.append(f"{share:.3f}  {candidate['text']!r}" if share is not None else f"       {candidate['text']!r}")
        said = "\n".join(lines) or "(no step yet)"
        return bundle(el("div", "run", preformatted(said)), said)


def _past(token: Chosen) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": plain(token.text),
        "how": "hand" if token.by_hand else "drawn",
        "probability": token.probability,
        "rank": token.rank,
        "dropped_by": token.dropped_by,
    }


def _probability(logprob: Any) -> float | None:
    return math.exp(min(0.0, logprob)) if isinstance(logprob, (int, float)) else None


def step_record(found: Mapping[str, Any], settings: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The step of a stepper record, from what `LanguageModel.inspect` gives."""
    return {
        **{name: found.get(name) for name in ("position", "text", "vocab", "logsumexp", "chosen", "coin")},
        "seconds": round(seconds, 4),
        "stages": stages(found, settings),
        "candidates": [_candidate(one) for one in found.get("candidates", []) if one.get("logprob") is not None],
    }


def _candidate(one: Mapping[str, Any]) -> dict[str, Any]:
    dropped = one.get("dropped_by")
    return {
        "id": one["id"],
        "text": one.get("text", ""),
        "logit": one.get("score"),
        "penalised": one.get("penalised"),
        "logprob": one["logprob"],
        "kept": dropped is None,
        "dropped_by": dropped,
        "probability_after": one.get("probability"),
        "noise": one.get("noise"),
        "seen": int(one.get("penalised") != one.get("score")),
    }


def stages(found: Mapping[str, Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each rule in the engine's order, with how many tokens it leaves and their share before the filters."""
    left, mass = found.get("vocab"), 1.0
    rows = [{"name": name, "rule": "", "left": left, "mass": mass} for name in ("model", "penalties")]
    for name in _FILTERS:
        left, mass = found.get("left", {}).get(name, left), found.get("mass", {}).get(name, mass)
        rows.append({"name": name, "rule": _rule(name, settings), "left": left, "mass": mass})
    temp = settings.get("temp")
    rule = f"T = {temp:g}" if isinstance(temp, (int, float)) and temp > 0 else "greedy"
    return [*rows, {"name": "temperature", "rule": rule, "left": left, "mass": mass}]


def _rule(name: str, settings: Mapping[str, Any]) -> str:
    value = settings.get("xtc_probability" if name == "xtc" else name)
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else "off"


def _widget(**traits: Any) -> View:
    from mlxnb_widgets.stepper import StepperWidget

    return StepperWidget(**traits)


def stepper(prompt: Prompt, *, model: LanguageModel | str | None = None, **options: Any) -> Stepper:
    """Show the choice of the next token in the current cell, to step, choose by hand and undo.

    model: a LanguageModel, or a name. options: as of `generate`. Raises RequestError for a wrong one.
    """
    from .api import open_model

    view = Stepper(open_model(model), prompt, options)
    view.model.request(prompt, {**view.fixed, **view.settings})
    view.look()
    view.show()
    return view
