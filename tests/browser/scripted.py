"""Runs inside the kernels of the browser tests: a scripted engine in place of a model. `use(...)` is a test's first line."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_client import Answer, FakeClient, prompt_of
from xss_payloads import PAYLOADS

from mlxnb_engine.events import TokenRecord
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest

WORDS = "the light of the sun is made of many colours and the air scatters the short waves more than the long ones so that".split()


class Speaker(FakeClient):
    """Tokens as a vocabulary has them: the same text is the same token, however often it comes."""

    def __init__(self, answer: Answer, **options: Any) -> None:
        self._vocabulary: dict[str, int] = {}
        super().__init__(answer, **options)

    def _record(self, generation: Generation, position: int, piece: str, t: float) -> TokenRecord:  # type: ignore[override]
        made = super()._record(generation, position, piece, t)
        number = self._vocabulary.setdefault(piece, 100 + 7 * len(self._vocabulary))
        # Of the alternatives the first is the token itself, and the others are less likely each.
        top = tuple(replace(one, id=number if rank == 0 else 50_000 + rank) for rank, one in enumerate(made.top))
        return replace(made, id=number, top=top)


def use(answer: Answer, **options: Any) -> None:
    """Every later cell of this kernel asks a `Speaker` that answers so."""
    from IPython.core.getipython import get_ipython

    from mlxnb import runtime

    runtime.use(lambda settings: Speaker(answer, **options))
    shell = get_ipython()
    if "mlx" not in shell.magics_manager.magics["cell"]:
        shell.run_line_magic("load_ext", "mlxnb")


def client() -> FakeClient:
    from mlxnb import runtime

    made = runtime.client()
    assert isinstance(made, FakeClient)
    return made


def release_when(name: str) -> None:
    """Let held rows go on once a file of this name is in the working directory: a way in while a cell is running."""

    def wait() -> None:
        while not Path(name).exists():
            time.sleep(0.05)
        client().release()

    threading.Thread(target=wait, daemon=True).start()


def number_in(request: CompletionRequest) -> int:
    found = re.search(r"\d+", prompt_of(request))
    assert found is not None, "the prompt of a scripted test names a number"
    return int(found.group())


def payload(request: CompletionRequest, index: int) -> Iterable[str]:
    """Payload number N of the prompt, in two pieces so that it is also shown half."""
    text = PAYLOADS[number_in(request)][1]
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def cut(numbers: Iterable[int]) -> Answer:
    """Payload number N, those in `numbers` one byte a token. As from the engine, a character is there with its last byte."""
    chosen = frozenset(numbers)

    def answer(request: CompletionRequest, index: int) -> Iterable[str]:
        if number_in(request) not in chosen:
            return payload(request, index)
        pieces: list[str] = []
        for character in PAYLOADS[number_in(request)][1]:
            pieces += [""] * (len(character.encode("utf-8", "surrogatepass")) - 1) + [character]
        return pieces

    return answer


def in_step(answer: Answer, **options: Any) -> None:
    """`use`, and every token of every row is on the screen, acknowledged by the page, before the next one comes."""
    from mlxnb import display, frontend

    frontend.FASTEST_S = frontend.SLOWEST_S = 0.005
    frontend.ACK_S = 0.0
    display.SHORTEST_WAIT_S = 0.02  # hundreds of rows are looked at each time
    frontend.ACK_S = 0.0
    use(answer, between=wait_until_drawn, **options)


def wait_until_drawn(timeout_s: float = 30.0) -> None:
    from IPython.core.getipython import get_ipython

    from mlxnb import display, frontend

    session = frontend.session_of(get_ipython())
    display._PUBLISHER.wake()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        streams = [source._rows.stream for source in list(session.sources.values()) if not source.done]  # type: ignore[attr-defined]
        told = all(len(known.tokens) == run.token_count for one in streams for run, known in zip(one.runs, one._told, strict=True))
        if told and not session._outbox and not session.pace._sent:
            return
        time.sleep(0.01)
    raise TimeoutError("the page did not draw what it was sent")


def words(request: CompletionRequest, index: int) -> Iterable[str]:
    """As many words as the prompt says, each numbered, so that a stray or lost one shows: `12:the `."""
    return [f"{n}:{word} " for n, word in zip(range(number_in(request)), itertools.cycle(WORDS), strict=False)]


def plain_words(request: CompletionRequest, index: int) -> Iterable[str]:
    """As many words as the prompt says, of the usual length of a token."""
    return [f"{word} " for _, word in zip(range(number_in(request)), itertools.cycle(WORDS), strict=False)]


def marked(request: CompletionRequest, index: int) -> Iterable[str]:
    """Forty pieces that carry the prompt's first word: `red0 red1 ...`."""
    mark = prompt_of(request).split()[0]
    return [f"{mark}{n} " for n in range(40)]


def gallery(request: CompletionRequest, index: int) -> Iterable[str]:
    """The sample answer that the prompt names, in pieces as a tokenizer would cut it."""
    answers = json.loads(Path(__file__).with_name("answers.json").read_text("utf-8"))
    return re.findall(r"\s?\S{1,6}|\s", answers[prompt_of(request).strip()])


FORKS = (
    "found a bottle wedged between two stones, its cork sealed with green wax.",
    "found a bottle wedged between two stones, and inside it a map of the harbour.",
    "found the boat already gone.",
    "walked down to the rocks and counted the seals.",
    "found a bottle wedged between two stones, its cork sealed with green wax.",
    "walked down to the rocks with a lantern in each hand, as every night since the storm, and waited for the bell that never rang.",
)


def forks(request: CompletionRequest, index: int) -> Iterable[str]:
    """Samples that have their beginnings in common, for the prompt `forks`; else as `gallery`."""
    if prompt_of(request).strip() != "forks":
        return gallery(request, index)
    return re.findall(r"\s?\S+", FORKS[index % len(FORKS)])


def run_payloads(numbers: Iterable[int], options: str = "") -> None:
    """Ask for these payloads in this cell, each in an output of its own."""
    from IPython.core.getipython import get_ipython

    for number in numbers:
        get_ipython().run_cell_magic("mlx", options, f"{number}")
