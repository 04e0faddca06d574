"""`Chat`: a conversation with a model, from Python. Whatever the cells of `%%mlx -c NAME` do, it does, on the same tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import Message

from .ask import Options, check_names, checked_text
from .chatnames import CHATS
from .conversation import START, Conversation, Turn

if TYPE_CHECKING:
    from .api import LanguageModel
    from .run import Run


class Chat:
    """A `Conversation` and what answers it: a model and options. Any thread; one answer at a time.

    Only a complete answer enters it, together with its question; a failed or stopped turn leaves it as it was. Several may hold
    the same tree. tree: the turns themselves.
    """

    def __init__(self, model: LanguageModel, options: Mapping[str, Any], tree: Conversation | None = None) -> None:
        check_names(options)
        self._model = model
        self._options = dict(options)
        system = self._options.pop("system", None)
        if tree is None:
            tree = Conversation(system=system)
        elif system is not None:
            tree.system = system
        self.tree = tree

    # -- asking ------------------------------------------------------------------------------------------------------

    def send(self, text: str, *, wait: bool = True, after: Turn | str | None = None, **options: Unpack[Options]) -> Run:
        """Ask, and keep question and answer once it is complete. wait: False returns at once.

        after: the turn to ask after, or "start"; None is the head. A `system` holds from this turn on. Raises the typed error of a
        failed turn; the same text may be sent again.
        """
        merged: dict[str, Any] = {**self._options, **options}
        if merged.get("n", 1) != 1:
            raise RequestError("A turn of a chat is one answer.", "Use model.generate(chat.messages, n=...) to compare answers.")
        system = merged.pop("system", None)
        question = checked_text(text, "The message")

        def submit(messages: list[Message]) -> Run:
            return self._model.submit(replace(self._model.request(messages, merged), session=self.tree.session))

        run = self.tree.ask(question, submit, after=after, system=system)
        return run.result() if wait else run

    def stream(self, text: str, *, after: Turn | str | None = None, **options: Unpack[Options]) -> Run:
        """`send` without waiting: iterate over the run; the turn is kept once it is complete."""
        return self.send(text, wait=False, after=after, **options)

    def after(self, turn: Turn | str) -> Place:
        """A place in the tree to ask from: `chat.after("t2").send("...")` begins a branch there."""
        return Place(self, turn if turn == START else self.tree.turn(turn))

    def regenerate(self, turn: Turn | str | None = None, *, wait: bool = True, **options: Unpack[Options]) -> Run:
        """Another answer to the question of this turn (None: the head), beside the one there is."""
        old = self.tree.head if turn is None else self.tree.turn(turn)
        if old is None:
            raise RequestError("There is no answer yet.", "Send a message first.")
        if old.system is not None:
            options = {"system": old.system, **options}
        return self.send(old.question, wait=wait, after=self.tree.beside(old), **options)

    # -- the tree ----------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn, those of other branches and stale ones included, in the order in which their places came to be."""
        return self.tree.turns

    @property
    def head(self) -> Turn | None:
        """The turn after which the next one is asked; None at the start."""
        return self.tree.head

    @head.setter
    def head(self, turn: Turn | str) -> None:
        self.tree.go_to(turn)

    def fork(self, turn: Turn | str | None = None, name: str | None = None) -> Chat:
        """A chat of its own that begins with the turns up to this one (None: the head). name: to go on with by `%%mlx -c NAME`."""
        if name is None and not self.tree.name:
            made = Conversation()
            self.tree.copy_into(made, turn)
        else:
            made = CHATS.fork(self.tree, turn, name)
        return Chat(self._model, self._options, made)

    def begin(self, messages: Sequence[Message]) -> None:
        """Take these as the first turns of an empty chat: questions and answers by turns, with the ids of answers if known."""
        self.tree.begin(messages)

    def reset(self) -> None:
        """Forget every turn, stop one that is being written, keep the system message."""
        self.tree.reset()

    @property
    def changed(self) -> list[Callable[[], object]]:
        """Called after a question was asked, or turns were moved or dropped."""
        return self.tree.changed

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the head, system message first."""
        return [{"role": message.role, "content": message.content} for message in self.tree.messages(self.tree.head)]

    # -- keeping it --------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """All turns as JSON, with the ids of their answers; `from_json` makes the chat of it again."""
        from .chatfile import to_json

        return to_json(self.tree)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, for `LanguageModel.read_chat`. One that holds something else is left alone: RequestError."""
        from .chatfile import export

        export(self.tree, path)

    @classmethod
    def from_json(cls, model: LanguageModel, text: str | bytes, **options: Unpack[Options]) -> Chat:
        """The chat that `to_json` wrote, without its name. Raises RequestError for any other text."""
        from .chatfile import from_json

        tree = from_json(text)
        tree.rename("")
        return cls(model, options, tree)

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """ "" for one that only Python holds."""
        return self.tree.name

    @property
    def system(self) -> str | None:
        """The system message where no turn gave one."""
        return self.tree.system

    @system.setter
    def system(self, text: str | None) -> None:
        self.tree.system = None if text is None else checked_text(text, "system")

    @property
    def model(self) -> str:
        """The name of the model, as far as it is known."""
        return self._model.name or str(self._model.info.get("name", ""))

    def show(self) -> None:
        """Show the conversation in the current cell, live: one can go on with it there."""
        from .chatview import show

        show(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from .chatview import chat_bundle

        return chat_bundle(self)

    def __len__(self) -> int:
        """Questions and answers up to the head."""
        head = self.tree.head
        return 2 * len(head.path) if head is not None else 0

    def __repr__(self) -> str:
        return f"<Chat{f' {self.name}' if self.name else ''} with {self._model.name or 'the default model'}, {len(self)} messages>"


def chats() -> list[str]:
    """The names of this kernel's conversations: `mlxnb.load().chat(NAME)` goes on with one."""
    return CHATS.names


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a chat to ask from."""

    chat: Chat
    turn: Turn | str

    def send(self, text: str, *, wait: bool = True, **options: Unpack[Options]) -> Run:
        """As `Chat.send`, after this turn."""
        return self.chat.send(text, wait=wait, after=self.turn, **options)

    def stream(self, text: str, **options: Unpack[Options]) -> Run:
        """As `Chat.stream`, after this turn."""
        return self.chat.stream(text, after=self.turn, **options)
