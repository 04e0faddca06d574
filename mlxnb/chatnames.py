"""`Chats`: the conversations of this kernel by name, as `%%mlx -c NAME` asks for them."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Iterator

from mlxnb_engine.errors import RequestError

from .conversation import Conversation, Turn

_NAME = re.compile(r"[^\W_][\w.-]{0,63}")


class Chats:
    """The conversations of this kernel by name. Any thread. They live as long as it: running the cells again makes them anew."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._named: dict[str, Conversation] = {}

    def __iter__(self) -> Iterator[Conversation]:
        with self._lock:
            return iter(list(self._named.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._named

    @property
    def names(self) -> list[str]:
        return [chat.name for chat in self]

    def open(self, name: str) -> Conversation:
        """The conversation of this name, made if there is none. Raises RequestError for what cannot be a name."""
        check_name(name)
        with self._lock:
            return self._named.setdefault(name, Conversation(name))

    def find(self, name: str) -> Conversation:
        """The conversation of this name. Raises RequestError that names the nearest."""
        with self._lock:
            if name in self._named:
                return self._named[name]
        close = difflib.get_close_matches(name, self.names, n=1, cutoff=0.5)
        known = f"Chats: {', '.join(self.names)}." if self.names else "The first cell with `%%mlx -c NAME` makes one."
        raise RequestError(f"There is no chat {name[:40]!r}.", f"Did you mean {close[0]!r}?" if close else known)

    def add(self, chat: Conversation) -> None:
        """Give a conversation its place by its name. Raises RequestError if there is one already."""
        check_name(chat.name)
        with self._lock:
            if chat.name in self._named:
                raise RequestError(f"There is a chat {chat.name!r} already.", "Give another name with --as.")
            self._named[chat.name] = chat

    def clear(self) -> None:
        """Forget all of them; who holds one keeps it."""
        with self._lock:
            self._named.clear()

    def fork(self, source: Conversation, turn: Turn | str | None = None, name: str | None = None) -> Conversation:
        """A conversation that begins as `source` up to this turn. name: None makes one; that of an earlier fork brings it up to date.

        Raises RequestError for the name of a conversation that has a life of its own.
        """
        with self._lock:
            chosen = self.fresh_name(source.name) if name is None else check_name(name)
            other = self._named.get(chosen)
            if other is source or (other is not None and other.turns and not any(one.cell == "fork 0" for one in other.turns)):
                raise RequestError(f"There is a chat {chosen!r} already.", "Give another name with --as.")
            made = other or Conversation(chosen)
            source.copy_into(made, turn)
            self._named[chosen] = made
            return made

    def fresh_name(self, name: str) -> str:
        """garden -> garden-2, garden-3, ...: the first that is free."""
        stem = re.sub(r"-\d{1,6}$", "", name)[:56] or "chat"
        number = 2 if name else 1
        while f"{stem}-{number}" in self._named:
            number += 1
        return f"{stem}-{number}"


def check_name(name: str) -> str:
    """The name itself. Raises RequestError unless it is a short word that an option line and a file name can hold."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{str(name)[:40]!r} is no name of a chat.", "Letters, digits, - _ and . make one, for example: garden-2.")
    return name


CHATS = Chats()
"""Those of this kernel."""
