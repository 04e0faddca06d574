"""`loom`: a tree of continuations. Answers merged by their tokens, grown anywhere by rows of the shared batch."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import RequestError
from mlxnb_engine.events import Alternative
from mlxnb_engine.types import MAX_SEED, MAX_TOP_LOGPROBS, CompletionRequest, Continued, Generated, Message, TokenId

from . import runtime
from .ask import Prompt
from .frontend import Handler, Session
from .growth import Growth, check_size
from .live import usable
from .record import plain, saved
from .routing import Route
from .run import Run, RunGroup, finish_all
from .sanitize import bundle, el, preformatted
from .schema import LOOM_SCHEMA
from .trie import LOGPROBS, Node, Place, Row, Trie, cuts, outline
from .views import OpenView

if TYPE_CHECKING:
    from mlxnb_engine.client import CompletionClient
    from mlxnb_widgets._base import View

    from .api import LanguageModel
    from .chat import Chat

SAMPLES = 8
MAX_RUNS = 256
MAX_TABLE_BYTES = 192 * 1024
"""Token tables of one loom, which a saved notebook holds. Beyond it alternatives go first, with a note."""

Where = Place | int


@dataclass(frozen=True, slots=True)
class Path:
    """One way through the tree. text: of the answer. samples, rows: who went there. logprob: of all its tokens, None if not captured."""

    place: Place
    text: str
    samples: int
    rows: int
    ended: bool
    logprob: float | None


class Loom(OpenView):
    """Runs of one prompt as a tree, with what a person kept, pruned and opened in it.

    Owner: the worker thread changes it, the cell's thread made it, the publisher thread lets expansions go on. Any thread reads.
    Invariant: `rows` has one entry for each run of the stream, in the same order. One thread at a time lets expansions go on.
    note: why the last expansion ended before its time, "" if it did not.
    """

    def __init__(self, runs: Sequence[Run], client: CompletionClient, shell: Any = None, session: Session | None = None) -> None:
        if len({(run.request.messages, run.request.text) for run in runs}) != 1:
            raise RequestError("A loom is of one prompt.", "Leave --each away, or show each answer with another view.")
        self._client = client
        self.rows: list[Row] = [Row()] * len(runs)
        self.kept: list[Place] = []
        self.pruned: list[Place] = []
        self.opened: list[tuple[Place, tuple[int, ...]]] = []
        self._growing: list[Growth] = []
        self._advancing = threading.Lock()
        self.note = ""
        super().__init__(shell, _widget, session)
        self.stream.replace(list(runs))

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "loom.mark": lambda args: self._done(lambda: self._mark(_place(args), args["mark"], args["on"])),
            "loom.more": lambda args: self._done(lambda: self.more(_place(args), args.get("tokens", 64), args.get("rows", 1), wait=False)),
            "loom.expand": lambda args: self._done(
                lambda: self.expand(_place(args), args["width"], args["depth"], ids=args.get("ids", ()), wait=False)
            ),
            "loom.peek": lambda args: self._done(lambda: self._peek(_place(args))),
            "loom.chat": lambda args: self._leave_chat(_place(args)),
        }

    def _done(self, act: Any) -> dict[str, Any]:
        act()
        self.epoch += 1
        self.changed()
        return self.record()

    # -- what it is ------------------------------------------------------------------------------------------------------

    @property
    def runs(self) -> RunGroup:
        return RunGroup(self.stream.runs)

    @property
    def trie(self) -> Trie:
        """The tree as it is now."""
        stops = [run.finish_reason == "stop" for run in self.stream.runs]
        return Trie.of((run.tokens, row, ended) for run, row, ended in zip(self.stream.runs, self.rows, stops, strict=False))

    @property
    def paths(self) -> list[Path]:
        """Every way through the tree, the ones most samples took first; pruned ones left out."""
        trie = self.trie
        gone = [self.ids(place) for place in self.pruned]
        found = []
        for node in trie.leaves():
            ids = node.ids
            if any(ids[: len(prefix)] == prefix for prefix in gone):
                continue
            shares = [one.logprob for one in node.path]
            total = math.fsum(share for share in shares if share is not None) if None not in shares else None
            found.append(Path(node.place, self.text(node.place), node.samples, node.rows, bool(node.ends), total))
        return found

    def place(self, where: Where) -> Place:
        """where: a place, or the number of one of `paths`. Raises RequestError for what is not there."""
        if isinstance(where, int) and not isinstance(where, bool):
            paths = self.paths
            if not 0 <= where < len(paths):
                raise RequestError(f"There is no path {where}.", f"This loom has {len(paths)}.")
            return paths[where].place
        if not isinstance(where, Place) or not 0 <= where.run < len(self.stream.runs):
            raise RequestError(f"{where!r} is no place of this loom.", "Take one from `paths`.")
        if not 0 <= where.at <= len(self.stream.runs[where.run].tokens):
            raise RequestError(f"Run {where.run} has no position {where.at}.", f"It has {len(self.stream.runs[where.run].tokens)} tokens.")
        return where

    def ids(self, place: Place) -> list[int]:
        """The answer's ids up to this place."""
        ids = [token.id for token in self.stream.runs[place.run].tokens[: place.at]]
        return ids if place.token is None else [*ids, place.token]

    def text(self, where: Where) -> str:
        """The answer up to this place."""
        place = self.place(where)
        run = self.stream.runs[place.run]
        tokens, whole = run.tokens, run.text
        ends = cuts(tokens, whole)
        whole = whole if place.at == len(tokens) else whole[: ends[place.at - 1]] if place.at else ""
        if place.token is None:
            return whole
        return whole + next((one.text for one in self.alternatives(replace(place, token=None)) if one.id == place.token), "")

    def alternatives(self, where: Where) -> tuple[Alternative, ...]:
        """The likeliest next tokens after this place, as far as somebody looked; () if nobody did (`expand` looks)."""
        node = self.trie.find(self.ids(self.place(where)))
        return node.next if node is not None else ()

    # -- what a person does ----------------------------------------------------------------------------------------------

    def keep(self, where: Where, on: bool = True) -> None:
        """Mark this place, or take the mark away."""
        self._done(lambda: self._mark(self.place(where), "kept", on))

    def prune(self, where: Where, on: bool = True) -> None:
        """Hide what follows this place and stop what still runs there; the runs keep their text. on=False brings it back."""
        self._done(lambda: self._mark(self.place(where), "pruned", on))

    def _mark(self, place: Place, mark: str, on: bool) -> None:
        place = self.place(place)
        ids = self.ids(place)
        marked = self.kept if mark == "kept" else self.pruned
        marked[:] = [known for known in marked if self.ids(known) != ids]
        if on:
            marked.append(place)
        if on and mark == "pruned":
            for run in self.stream.runs:
                if not run.done and [token.id for token in run.tokens[: len(ids)]] == ids:
                    run.cancel()

    def more(self, where: Where, tokens: int = 64, rows: int = 1, *, wait: bool = True) -> list[Run]:
        """Go on from this place: `rows` continuations of at most `tokens` tokens, as rows of one batch. Returns their runs.

        One row from where a run was cut goes on as that run would have; otherwise each row has a seed of its own.
        """
        place = self.place(where)
        if not 1 <= tokens <= 100_000 or not 1 <= rows <= 64:
            raise RequestError(f"tokens={tokens}, rows={rows} is out of range.", "Ask for 1 to 64 rows of at least one token.")
        source = self.stream.runs[place.run]
        cut = place.token is None and place.at == len(source.tokens) and source.done and source.finish_reason != "stop"
        given = len(self.ids(place))
        seeds = [source.seed] if rows == 1 and cut else [self._seed(k) for k in range(rows)]
        sampling = [replace(source.request.sampling, seed=seed) for seed in seeds]
        requests = [replace(self._request(place), sampling=one, max_tokens=given + tokens) for one in sampling]
        runs = self._submit(requests, Row("more", given), "more")
        if wait:
            finish_all(runs)
        return runs

    def expand(self, where: Where, width: int = 3, depth: int = 1, *, ids: Sequence[int] = (), wait: bool = True) -> None:
        """Open this place by its `width` likeliest tokens, each of them again, `depth` levels deep.

        ids: tokens to take at the first level instead. What is not known yet is one step of one row each, a level at a time, all
        rows of a level in one batch. Raises RequestError for more places than `growth.MAX_PLACES`, and for more rows than a loom
        holds; what was opened before stays.
        """
        place = self.place(where)
        check_size(len(ids) or width, width, depth)
        growth = Growth([place], width, depth, tuple(ids))
        self.note = ""
        growth.advance(self)
        if growth.depth:
            self._growing.append(growth)
            self.watch()
        while wait and growth in self._growing:
            finish_all(growth.asked)
            self._go_on()
        if wait and growth.error is not None:
            raise growth.error
        if wait:
            self.epoch += 1
            self.changed()

    def _peek(self, place: Place) -> None:
        """Find out what could come after this place."""
        place = self.place(place)
        if not self.alternatives(place):
            self.look([place], LOGPROBS)

    def to_chat(self, where: Where) -> Chat:
        """A conversation that goes on from this path: its prompt, then the path as the answer. Of a raw text, that text is the question."""
        place = self.place(where)
        request = self.stream.runs[place.run].request
        answer = request.prefill + self.text(place)
        asked = request.messages if request.messages is not None else (Message("user", request.text or ""),)
        system = asked[0].content if asked and asked[0].role == "system" else None
        chat = self.model.chat(system=system) if system is not None else self.model.chat()
        written = Generated(tuple(TokenId(token) for token in self.ids(place)), len(request.prefill))
        chat.begin([*asked[system is not None :], Message("assistant", answer, written)])
        return chat

    def _leave_chat(self, place: Place) -> dict[str, Any]:
        """Put the conversation into a variable of the notebook that is free."""
        if self.shell is None:
            raise RequestError("There is no notebook to put it into.", "Call to_chat() and keep what it returns.")
        chat = self.to_chat(place)
        names = ("loom_chat", *(f"loom_chat_{number}" for number in range(2, 1000)))
        name = next(name for name in names if name not in self.shell.user_ns)
        self.shell.push({name: chat})
        return {"name": name, "tokens": len(self.ids(place))}

    @property
    def model(self) -> LanguageModel:
        from .api import LanguageModel

        request = self.stream.runs[0].request
        return LanguageModel(request.model, request.dtype, self._client)

    # -- rows ------------------------------------------------------------------------------------------------------------

    def _request(self, place: Place) -> CompletionRequest:
        """The request of this run, going on from this place."""
        run = self.stream.runs[place.run]
        kept = tuple(Continued(TokenId(token.id), token.origin, token.by_hand) for token in run.tokens[: place.at])
        kept += () if place.token is None else (Continued(TokenId(place.token), by_hand=True),)
        return replace(run.request, id=runtime.new_request_id(), samples=1, continuation=kept, resumed=None)

    def _probe(self, place: Place, width: int) -> CompletionRequest:
        """One step from this place that tells the likeliest tokens, the end of text too."""
        request = self._request(place)
        known = min(MAX_TOP_LOGPROBS, max(width, request.sampling.logprobs or 0))
        sampling = replace(request.sampling, seed=self._seed(), logprobs=known, explain=1)
        return replace(request, sampling=sampling, max_tokens=len(request.continuation) + 1, stop=())

    def _seed(self, more: int = 0) -> int:
        """One that no row has: samples have the first seed and those that follow it."""
        return ((self.stream.runs[0].seed or 0) + len(self.stream.runs) + more) & MAX_SEED

    def _submit(self, requests: Sequence[CompletionRequest], row: Row, label: str) -> list[Run]:
        if len(self.stream.runs) + len(requests) > MAX_RUNS:
            raise RequestError(f"This loom has {len(self.stream.runs)} rows already.", "Run the cell again for another one.")
        runs: list[Run] = []
        try:
            for request in requests:
                runs.append(Run(self._client.submit(request)[0], {"loom": label}))
        except BaseException:  # all or none
            for run in runs:
                run.cancel()
            raise
        for run in runs:
            self.rows.append(replace(row, given=len(run.request.continuation)))
            self.stream.add(run)
        self.epoch += 1
        self.changed()
        self.watch()
        return runs

    def look(self, places: Sequence[Place], width: int) -> list[Run]:
        """One step from each of these places, to learn the likeliest tokens after it."""
        return self._submit([self._probe(place, width) for place in places], Row("probe"), "look")

    def open(self, node: Node, ids: Sequence[int]) -> list[Place]:
        """Let these alternatives after a node be branches; their places."""
        self.opened.append((node.place, tuple(ids)))
        return [replace(node.place, token=token) for token in ids]

    def _go_on(self) -> None:
        with self._advancing:
            for growth in list(self._growing):
                try:
                    growth.advance(self)
                except Exception as error:  # a full loom, an engine that is gone
                    growth.error, growth.depth = error, 0
                    self.note = f"Not all of this expansion was opened. {error}"
                if not growth.depth:
                    self._growing.remove(growth)
                    self.epoch += 1
                    self.changed()

    def step(self, now_please: bool = False) -> float:
        self._go_on()
        return super().step(now_please)

    @property
    def done(self) -> bool:
        return super().done and not self._growing

    # -- record ----------------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        first = self.stream.runs[0].request
        asked = self.stream.records()
        runs = list(saved({"runs": asked}, budget=MAX_TABLE_BYTES)["runs"]) if asked else []
        empty = {"messages": None, "text": None, "prefill": ""}
        # The prompt is the same for all: once is enough.
        rest = [{**run, "prompt": empty, "request": {"max_tokens": run["request"].get("max_tokens")}} for run in runs[1:]]
        return {
            "schema": LOOM_SCHEMA,
            "key": self.key,
            "epoch": self.epoch,
            "model": self.stream.runs[0].model,
            "runs": [*runs[:1], *rest],
            "rows": [{"kind": row.kind, "given": row.given} for row in self.rows],
            "kept": [_told(place) for place in self.kept],
            "pruned": [_told(place) for place in self.pruned],
            "opened": [{**_told(place), "ids": list(ids)} for place, ids in self.opened],
            "growing": len(self._growing),
            "note": plain(self.note),
            "temp": plain(first.sampling.temp),
        }

    def bundle(self) -> dict[str, Any]:
        run = self.stream.runs[0]
        lines = [plain(run.prompt), *(plain(line) for line in outline(self.trie))]
        said = "\n".join(lines)
        return bundle(el("div", "run", preformatted(said)), said)


def _place(args: Mapping[str, Any]) -> Place:
    return Place(args["run"], args["at"], args.get("token"))


def _told(place: Place) -> dict[str, Any]:
    return {"run": place.run, "at": place.at, "token": place.token}


def _widget(**traits: Any) -> View:
    from mlxnb_widgets.loom import LoomWidget

    return LoomWidget(**traits)


class LoomScreen:
    """Where a cell that asked for a loom shows its answers: the view itself, which stays open after their end.

    Owner: as a Screen. quiet: batch execution. There, and where no live view can be, only the end is shown.
    """

    def __init__(self, target: Run | RunGroup, route: Route, shell: Any, quiet: bool) -> None:
        self.view = weave(target, shell)
        self.threaded = route.threaded
        self._route, self._shown = route, False
        self._live = not quiet and usable(route)

    def draw(self, renderer: object, final: bool) -> None:
        if self._live and not self._shown:
            self._shown = True
            self.view.show()
        elif final and not self._live:
            self._route.send(self.view.stays())

    def close(self) -> None:
        pass


def weave(target: Run | RunGroup, shell: Any = None, *, client: CompletionClient | None = None, session: Session | None = None) -> Loom:
    """A loom of these answers, not shown yet. Raises RequestError if they are not of one prompt."""
    runs = [target] if isinstance(target, Run) else list(target)
    if not runs:
        raise RequestError("There is no answer to begin with.", "Ask for at least one.")
    return Loom(runs, client if client is not None else runtime.client(), shell, session)


def loom(prompt: Prompt, *, model: LanguageModel | str | None = None, **options: Any) -> Loom:
    """Show a tree of continuations of this prompt in the current cell, at once and live.

    model: a LanguageModel, or a name. options: as of `generate`; n samples (8), logprobs alternatives kept at each token (8),
    temp (1: what the model itself finds likely; at 0 all samples would be the same). Raises RequestError for a wrong one.
    """
    from .api import open_model

    lm = open_model(model)
    answers = lm.generate(prompt, wait=False, **{"n": SAMPLES, "logprobs": LOGPROBS, "temp": 1.0, **options})
    view = weave(answers, client=lm._client)
    view.show()
    return view
