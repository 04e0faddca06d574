"""The Python API: `load` gives a `LanguageModel`. Whatever the magic does, these calls do, over the same client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Unpack

from mlxnb_engine import policy
from mlxnb_engine.client import CompletionClient
from mlxnb_engine.config import DTYPES
from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import CompletionRequest, Continued, TokenId

from . import notices
from .ask import Options, Prompt, build_request, check_names, prompt_text
from .chat import Chat
from .chatnames import CHATS
from .run import LoadRun, Run, RunGroup, finish_all, stop_all

if TYPE_CHECKING:
    from .loomview import Loom


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

    def chat(self, name: str | None = None, /, **options: Unpack[Options]) -> Chat:
        """A conversation; `options` (`system` above all) hold for all its turns unless a turn says otherwise.

        name: the one that `%%mlx -c NAME` goes on with, made if there is none; None for a new one without a name.
        """
        return Chat(self, options, None if name is None else CHATS.open(name))

    def read_chat(self, path: str | os.PathLike[str], name: str | None = None, **options: Unpack[Options]) -> Chat:
        """The chat in a file that `Chat.export` wrote. name: to go on with it by `%%mlx -c NAME`; None leaves it to Python."""
        from .chatfile import read

        tree = read(path)
        tree.rename(name or "")
        if name is not None:
            CHATS.add(tree)
        return Chat(self, options, tree)

    def loom(self, prompt: Prompt, **options: Unpack[Options]) -> Loom:
        """Show a tree of continuations of this prompt in the current cell (`mlxnb.loom`)."""
        from .loomview import loom

        return loom(prompt, model=self, **options)

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

    def submit(self, request: CompletionRequest) -> Run:
        """Send a request of one sample."""
        return self._submit(request, {})[0]

    def _submit(self, request: CompletionRequest, labels: Mapping[str, Any]) -> list[Run]:
        generations = self._client.submit(request)
        many = len(generations) > 1
        return [Run(one, {**labels, **({"sample": one.index} if many else {})}) for one in generations]

    def __repr__(self) -> str:
        return f"<LanguageModel {self.name or self.info.get('name', 'default')}>"


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
