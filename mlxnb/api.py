"""The Python API: `load` gives a `LanguageModel`. Whatever the magic does, these calls do, over the same client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Unpack

from mlxnb_engine import policy
from mlxnb_engine.client import CompletionClient
from mlxnb_engine.config import DTYPES
from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import CompletionRequest, Continued, Message, TokenId

from . import notices
from .ask import Options, Prompt, build_request, check_names, checked_text, prompt_text
from .run import LoadRun, Run, RunGroup, finish_all, stop_all


def load(name: str | os.PathLike[str] | None = None, dtype: str | None = None, *, client: CompletionClient | None = None) -> LanguageModel:
    """Load a model and wait until it is resident. None: the default model.

    name: a repository of the Hugging Face Hub, a directory, a GGUF file. dtype: overrides the type of the weights.
    In a notebook a progress line shows. An interrupt stops the load. Raises RequestError or ModelError with what to do next.
    """
    from .runtime import client as shared

    model = _model_name(name)
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype={dtype!r} is not a choice.", f"Choose one of: {', '.join(DTYPES)}.")
    engine = client if client is not None else shared()
    run = LoadRun(engine.load(model, dtype))
    try:
        soon = run.wait(0.3)
    except KeyboardInterrupt as stop:
        stop_all([run], stop)
        raise
    if not soon:
        _show_load(run)
    run.result()
    if _in_ipython():
        notices.tell(engine)
    return LanguageModel(model, dtype, engine)


def _model_name(name: object) -> str:
    shown = os.fspath(name) if isinstance(name, os.PathLike) else name
    if shown is None or isinstance(shown, str):
        return shown or ""
    raise RequestError(f"A model's name is text or a path, not {type(shown).__name__}.", 'For example load("owner/name").')


def _in_ipython() -> bool:
    """Whether IPython runs here, so that somebody reads what is printed; it is not imported to find out."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def open_model(model: LanguageModel | str | None) -> LanguageModel:
    """A model by name over the kernel's engine, without waiting for its load."""
    from .runtime import client as shared

    return model if isinstance(model, LanguageModel) else LanguageModel(model or "", None, shared())


def _show_load(run: LoadRun) -> None:
    try:
        from .display import publish
    except ImportError:  # no IPython: a plain script waits in silence
        return
    publication = publish(run)
    try:
        finish_all([run])
    except KeyboardInterrupt:
        publication.finish(0.0 if publication.outlives_cell else 1.0)
        raise
    publication.finish(1.0)


class LanguageModel:
    """A model by name, over the kernel's engine. It holds no weights: an unloaded model loads again at the next call."""

    def __init__(self, name: str, dtype: str | None, client: CompletionClient) -> None:
        self.name = name
        self.dtype = dtype
        self._client = client

    # -- one prompt --------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, *, wait: bool = True, **options: Unpack[Options]) -> Run | RunGroup:
        """Answer a prompt: a Run, or a RunGroup for `n` > 1.

        wait: False returns at once. An interrupt stops its rows and is raised again. A failed run raises its typed error;
        of a group the failed rows are in `errors`, and only if all failed is the first one raised.
        """
        request = self.request(prompt, options)
        runs = self._submit(request, {})
        target = runs[0] if len(runs) == 1 and "n" not in options else RunGroup(runs)
        return _settled(target) if wait else target

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Run:
        """A Run at once; `for piece in run` gives its text as it comes."""
        if options.get("n", 1) != 1:
            raise RequestError("A stream is one answer.", "Use generate(..., wait=False) for n > 1 and iterate over each run.")
        return self._submit(self.request(prompt, options), {})[0]

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Run | RunGroup:
        """`generate` for asyncio: never blocks the event loop. Cancelling the task stops its rows."""
        target = self.generate(prompt, wait=False, **options)
        await _ended(target)
        return _checked(target)

    def inspect(self, prompt: Prompt, tokens: Sequence[int] = (), *, candidates: int = 20, **options: Unpack[Options]) -> dict[str, Any]:
        """How the next token would be chosen after `prompt` and the answer so far (`tokens`, ids): one step, every stage of it.

        Returns {"position", "text" (of the answer so far), "chosen" (id), "seed", "stages", "candidates"}; a candidate has "id",
        "text" and its score at each stage, and "dropped_by" names the filter that dropped it (`sampling.ExplainData.read`).
        """
        request = self.request(prompt, options)
        sampling = replace(request.sampling, explain=candidates)
        kept = tuple(Continued(TokenId(int(token))) for token in tokens)
        request = replace(request, sampling=sampling, continuation=kept, max_tokens=len(kept) + 1, samples=1, stop=())
        run = _settled(self._submit(request, {})[0])
        assert isinstance(run, Run)
        if len(run.tokens) <= len(kept):
            raise RequestError("The answer so far has ended: there is no next token.", "Take back its last token.")
        last = run.tokens[len(kept)]
        text = "".join(token.text for token in run.tokens[: len(kept)])
        return {"position": len(kept), "text": text, "chosen": last.id, "seed": run.seed, **(last.explained or {})}

    # -- many prompts ------------------------------------------------------------------------------------------------

    def batch(self, prompts: Iterable[Prompt], *, wait: bool = True, **options: Unpack[Options]) -> RunGroup:
        """Answer many prompts in one batch, in order. Each prompt starts at the seed again, so each answer is what it would be alone.

        Every prompt is checked before any is sent.
        """
        if isinstance(prompts, str):
            raise RequestError("batch() takes a list of prompts, not one string.", "Use generate(prompt) for one prompt.")
        if not isinstance(prompts, Iterable):
            raise RequestError(f"batch() takes a list of prompts, not {type(prompts).__name__}.", 'For example ["2+2?", "3*3?"].')
        requests = [self.request(prompt, options) for prompt in prompts]
        runs: list[Run] = []
        try:
            for request in requests:
                runs += self._submit(request, {"prompt": prompt_text(request)})
        except BaseException:
            for run in runs:
                run.cancel()
            raise
        group = RunGroup(runs)
        if wait and runs:
            _settled(group)
        return group

    def chat(self, **options: Unpack[Options]) -> Chat:
        """A conversation; `options` (`system` above all) hold for all its turns unless a turn says otherwise."""
        return Chat(self, options)

    # -- the model itself --------------------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """What the engine says of this model: name, weights, parameters, rows. {} while it is not resident."""
        models = self._client.status().get("models", [])
        named = [model for model in models if self.name in (model.get("name"), model.get("path"))]
        if self.dtype is not None:  # there may be copies of one model in several types
            named = [model for model in named if str(model.get("weights", "")).startswith(self.dtype)] or named
        chosen = named or (models[:1] if not self.name else [])
        return dict(chosen[0]) if chosen else {}

    def unload(self) -> list[str]:
        """Free its memory; the names dropped. Raises RequestError while it answers."""
        name = self.name or self.info.get("name")
        return self._client.unload(name) if name else []

    def request(self, prompt: Prompt, options: Mapping[str, Any]) -> CompletionRequest:
        """The request that these options make, validated. Raises RequestError (UnknownOption for a wrong keyword)."""
        check_names(options)
        return build_request(prompt, {**options, "model": self.name, "dtype": self.dtype})

    def in_force(self, request: CompletionRequest) -> dict[str, Any]:
        """The settings by which this request is answered, by the names of `Options`: given, else the model's own, else ours.

        A model that is not loaded yet has not said its own.
        """
        resolved = policy.with_model(request, self.info.get("defaults", {}))
        return {**asdict(replace(resolved.sampling, hlg=None)), "max_tokens": resolved.max_tokens, "thinking": resolved.thinking}

    def _submit(self, request: CompletionRequest, labels: Mapping[str, Any]) -> list[Run]:
        generations = self._client.submit(request)
        many = len(generations) > 1
        return [Run(one, {**labels, **({"sample": one.index} if many else {})}) for one in generations]

    def __repr__(self) -> str:
        return f"<LanguageModel {self.name or self.info.get('name', 'default')}>"


class Chat:
    """A linear conversation kept as text. Any thread; one answer at a time.

    Invariant: only a complete answer enters it, together with its question; a failed or stopped turn leaves it as it was.
    answers: the run of each answer in it. last: the newest question with its run, whatever became of it. changed: called
    after a turn was begun or taken back.
    """

    def __init__(self, model: LanguageModel, options: Mapping[str, Any]) -> None:
        check_names(options)
        self._model = model
        self._options = dict(options)
        self._turns: list[Message] = []
        self._open: tuple[Message, Run] | None = None
        self._lock = threading.RLock()
        self.answers: list[Run] = []
        self.last: tuple[Message, Run] | None = None
        self.changed: list[Callable[[], object]] = []
        self.system: str | None = self._options.pop("system", None)

    def send(self, text: str, *, wait: bool = True, **options: Unpack[Options]) -> Run:
        """Ask, and keep question and answer once it is complete. wait: False returns at once.

        Raises the typed error of a failed turn; the same text may be sent again.
        """
        with self._lock:
            self._settle()
            if self._open is not None:
                raise RequestError("The last answer is still being written.", "Wait for it with run.wait(), or stop it with run.cancel().")
            merged: dict[str, Any] = {**self._options, **options}
            if merged.get("n", 1) != 1:
                raise RequestError("A turn of a chat is one answer.", "Use model.generate(chat.messages, n=...) to compare answers.")
            system = merged.pop("system", None)
            question = Message("user", checked_text(text, "The message"))
            opening = [Message("system", chosen)] if (chosen := system if system is not None else self.system) else []
            run = self._model.stream([*opening, *self._turns, question], **merged)
            self._open = (question, run)
            self.last = self._open
        self._tell()
        if wait:
            try:
                run.result()
            finally:
                self._settle()
        return run

    def stream(self, text: str, **options: Unpack[Options]) -> Run:
        """`send` without waiting: iterate over the run; the turn is kept once it is complete."""
        return self.send(text, wait=False, **options)

    def _settle(self) -> None:
        with self._lock:
            if self._open is not None and self._open[1].done:
                (question, run), self._open = self._open, None
                if run.finish_reason in ("stop", "length"):
                    self._turns += [question, Message("assistant", run.answer)]
                    self.answers.append(run)

    def _tell(self) -> None:
        for changed in list(self.changed):
            changed()

    def back(self, turns: int) -> None:
        """Keep only the first `turns` questions with their answers. Raises RequestError while an answer is being written."""
        with self._lock:
            self._settle()
            if self._open is not None:
                raise RequestError("The last answer is still being written.", "Wait for it, or stop it.")
            del self._turns[2 * turns :], self.answers[turns:]
            self.last = None
        self._tell()

    def show(self) -> None:
        """Show the conversation in the current cell, live: one can go on with it there."""
        from .chatview import show

        show(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from .chatview import chat_bundle

        return chat_bundle(self)

    @property
    def model(self) -> str:
        """The name of the model, as far as it is known."""
        return self._model.name or str(self._model.info.get("name", ""))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, system message first."""
        self._settle()
        opening = [Message("system", self.system)] if self.system else []
        return [{"role": turn.role, "content": turn.content} for turn in (*opening, *self._turns)]

    def reset(self) -> None:
        """Forget every turn, stop one that is being written, keep the system message."""
        with self._lock:
            if self._open is not None:
                self._open[1].cancel()
            self._open = self.last = None
            self._turns.clear()
            self.answers.clear()
        self._tell()

    def __len__(self) -> int:
        self._settle()
        return len(self._turns)

    def __repr__(self) -> str:
        return f"<Chat with {self._model.name or 'the default model'}, {len(self)} messages>"


# -- waiting -------------------------------------------------------------------------------------------------------------


def _runs(target: Run | RunGroup) -> list[Run]:
    return [target] if isinstance(target, Run) else list(target)


def _settled(target: Run | RunGroup) -> Run | RunGroup:
    finish_all(_runs(target))
    return _checked(target)


def _checked(target: Run | RunGroup) -> Run | RunGroup:
    """The target, unless all of it failed or was stopped: then the first error is raised."""
    if all(run.finish_reason in ("error", "cancelled") for run in _runs(target)):
        target.raise_for_error()
    return target


async def _ended(target: Run | RunGroup) -> None:
    """Wait for the end from an event loop. One short-lived thread waits, so that no default pool can run dry."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    def watch() -> None:
        target.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=watch, name="mlxnb-await", daemon=True).start()
    try:
        await ended
    except asyncio.CancelledError:
        target.cancel()
        raise
