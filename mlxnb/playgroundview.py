"""`playground`: a prompt with sliders, whose answer comes anew in the shared batch when something is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import RequestError

from .ask import OPTION_NAMES, Prompt
from .frontend import Handler
from .record import plain
from .run import Run
from .sanitize import bundle, el, markdown_to_html, text
from .schema import PLAYGROUND_SCHEMA
from .stream import packed
from .views import OpenView

if TYPE_CHECKING:
    from mlxnb_widgets._base import View

    from .api import LanguageModel

DEFAULTS: dict[str, Any] = {"temp": 0.7, "max_tokens": 128, "seed": 0}
SETTINGS = tuple(name for name in OPTION_NAMES if name not in ("n", "system", "template", "prefill", "stop", "logit_bias", "thinking"))


def settings_in_force(model: LanguageModel, prompt: Prompt, options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the views with the values that these options lead to. given: those that a person set, kept as they are."""
    found = model.in_force(model.request(prompt, options))
    return {**{name: value for name, value in found.items() if name in SETTINGS}, **given}


class Playground(OpenView):
    """One prompt, one answer at a time: a change stops the answer before it. The view waits for a pause in the changes."""

    def __init__(self, model: LanguageModel, prompt: str, options: Mapping[str, Any], shell: Any = None) -> None:
        self.model = model
        self.prompt = prompt
        self.mode = "chat" if options.get("template", True) else "text"
        self.fixed = {name: value for name, value in options.items() if name not in SETTINGS and name != "template"}
        self.settings = {**DEFAULTS, **{name: value for name, value in options.items() if name in SETTINGS}}
        super().__init__(shell, _widget)

    def handlers(self) -> Mapping[str, Handler]:
        return {"playground.run": self._run}

    @property
    def run(self) -> Run | None:
        """The answer shown now."""
        return self.stream.runs[0] if self.stream.runs else None

    def in_force(self) -> dict[str, Any]:
        """What was set, and for the rest what the model or the engine takes: a slider shows what its answer comes from."""
        options = {**self.fixed, **self.settings, "template": self.mode != "text"}
        return settings_in_force(self.model, self.prompt or "?", options, self.settings)

    def record(self) -> dict[str, Any]:
        return {
            "schema": PLAYGROUND_SCHEMA,
            "key": self.key,
            "epoch": self.epoch,
            "model": self.model.name or str(self.model.info.get("name", "")),
            "mode": self.mode,
            "prompt": plain(self.prompt),
            "settings": plain(self.in_force()),
            "runs": packed(self.stream),
            "error": None,
        }

    def bundle(self) -> dict[str, Any]:
        run = self.run
        answer = run.answer if run is not None else ""
        return bundle(
            el("div", "run", el("div", "card_head", text(self.prompt)), el("div", "answer", markdown_to_html(answer))),
            "\n\n".join(part for part in (self.prompt, answer) if part),
        )

    def _run(self, args: Mapping[str, Any]) -> dict[str, Any]:
        wrong = [name for name in args.get("settings") or {} if name not in SETTINGS]
        if wrong:
            raise RequestError(f"{wrong[0][:40]!r} is not a setting of the playground.", f"Settings are {', '.join(SETTINGS)}.")
        settings = {**self.settings, **(args.get("settings") or {})}
        self.ask(args["prompt"], args.get("mode", self.mode), settings)
        return self.record()

    def ask(self, prompt: str, mode: str, settings: Mapping[str, Any]) -> Run:
        """Answer this prompt, in place of the answer before. Raises RequestError and keeps what was, for bad settings."""
        run = self.model.stream(prompt, **{**self.fixed, **settings, "template": mode != "text"})
        before = self.run
        self.prompt, self.mode, self.settings = prompt, mode, dict(settings)
        self.replace_runs([run])
        if before is not None:
            before.cancel()
        return run


def _widget(**traits: Any) -> View:
    from mlxnb_widgets.playground import PlaygroundWidget

    return PlaygroundWidget(**traits)


def playground(prompt: str = "", *, model: LanguageModel | str | None = None, **options: Any) -> Playground:
    """Show a prompt with sliders in the current cell; with a prompt its first answer begins at once.

    model: a LanguageModel, or a name. options: as of `generate`. Raises RequestError for a wrong one.
    """
    from .api import open_model

    view = Playground(open_model(model), prompt, options)
    if prompt:
        view.ask(view.prompt, view.mode, view.settings)
    view.show()
    return view
