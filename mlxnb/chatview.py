"""A `Chat` as a view: go on, edit a question, ask for another answer, in one cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from mlxnb_engine.errors import RequestError

from .frontend import Handler, Session
from .record import plain
from .run import Run
from .sanitize import bundle, el, markdown_to_html, text
from .schema import CHAT_SCHEMA
from .stream import packed
from .views import OpenView

if TYPE_CHECKING:
    from mlxnb_widgets._base import View

    from .api import Chat

NAMES = {"system": "System", "user": "You", "assistant": "Model"}


class ChatView(OpenView):
    """Turns are named t0, t1, ... in order, the system message left out: an even one asks, an odd one answers."""

    def __init__(self, chat: Chat, shell: Any = None, session: Session | None = None) -> None:
        self.chat = chat
        super().__init__(shell, _widget, session)
        self.stream.replace(self._runs())
        chat.changed.append(self._take_over)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "chat.send": lambda args: self._ask(args["text"]),
            "chat.edit": self._edit,
            "chat.regenerate": self._again,
            "chat.reset": lambda args: self._answered(self.chat.reset),
        }

    def close(self) -> None:
        if self._take_over in self.chat.changed:
            self.chat.changed.remove(self._take_over)
        super().close()

    # -- record ----------------------------------------------------------------------------------------------------------

    def _runs(self) -> list[Run]:
        """The run of every answer, and at the end one that is not part of the conversation (yet)."""
        self.chat._settle()
        runs, last = list(self.chat.answers), self.chat.last
        return [*runs, last[1]] if last is not None and last[1] not in runs else runs

    def record(self) -> dict[str, Any]:
        return {"schema": CHAT_SCHEMA, "key": self.key, "epoch": self.epoch, "name": "", "model": self.chat.model} | {
            "turns": turns(self.chat, self.stream.runs),
            "runs": packed(self.stream),
            "error": None,
        }

    def bundle(self) -> dict[str, Any]:
        return chat_bundle(self.chat)

    def _take_over(self) -> None:
        if self.abandoned:
            self.close()
            return
        self.replace_runs(self._runs())

    def ended(self) -> None:
        self.stream.replace(self._runs())

    # -- commands --------------------------------------------------------------------------------------------------------

    def _answered(self, act: Any) -> dict[str, Any]:
        act()
        return self.record()

    def _ask(self, words: str) -> dict[str, Any]:
        if not words.strip():
            raise RequestError("The message is empty.", "Write something first.")
        return self._answered(lambda: self.chat.send(words, wait=False))

    def _edit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        index = self._turn(args["turn"], 0)
        if not args["text"].strip():
            raise RequestError("The message is empty.", "Write something first.")
        self.chat.back(index)
        return self._ask(args["text"])

    def _again(self, args: Mapping[str, Any]) -> dict[str, Any]:
        questions = [turn["text"] for turn in turns(self.chat, self.stream.runs) if turn["role"] == "user"]
        if not questions:
            raise RequestError("There is no answer yet.", "Send a message first.")
        index = self._turn(args["turn"], 1) if "turn" in args else len(questions) - 1
        self.chat.back(index)
        return self._ask(questions[index])

    def _turn(self, name: str, odd: int) -> int:
        """Which question or answer a turn's name means."""
        number = int(name[1:]) if name[:1] == "t" and name[1:].isascii() and name[1:].isdigit() and len(name) < 8 else -1
        if not 0 <= number < 2 * len(self.stream.runs) or number % 2 != odd:
            raise RequestError(f"There is no such turn {name[:20]!r}.", "The conversation has changed meanwhile.")
        return number // 2


def turns(chat: Chat, runs: list[Run]) -> list[dict[str, Any]]:
    """The turns as a view takes them: a question has its text, an answer the index of its run."""
    found: list[dict[str, Any]] = []
    if chat.system:
        found.append({"id": "system", "role": "system", "text": plain(chat.system), "run": None})
    for index, run in enumerate(runs):
        found.append({"id": f"t{2 * index}", "role": "user", "text": plain(run.prompt), "run": None})
        found.append({"id": f"t{2 * index + 1}", "role": "assistant", "text": "", "run": index})
    return found


def chat_bundle(chat: Chat) -> dict[str, Any]:
    """The conversation as sanitised HTML and as text."""
    messages = chat.messages
    parts = []
    for message in messages:
        said = markdown_to_html(message["content"]) if message["role"] == "assistant" else text(message["content"])
        parts += [el("div", "card_head", NAMES.get(message["role"], message["role"])), el("div", "answer", said)]
    if not messages:
        parts.append(el("span", "waiting", "(no messages yet)"))
    words = "\n\n".join(f"{NAMES.get(message['role'], message['role'])}:\n{message['content']}" for message in messages)
    return bundle(el("div", "run", *parts), words or repr(chat))


def _widget(**traits: Any) -> View:
    from mlxnb_widgets.chat import ChatWidget

    return ChatWidget(**traits)


def show(chat: Chat) -> None:
    """In the current cell; a plain script shows nothing."""
    shell = get_ipython()
    if shell is not None:
        ChatView(chat, shell).show()
