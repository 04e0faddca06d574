"""Conversations from cells: `%%mlx -c NAME`, and the commands of `%mlx` that list, draw, fork, reset and keep them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import Message

from . import describe, runtime
from .chatnames import CHATS, check_name
from .conversation import Conversation, short
from .routing import cell_id, is_batch, is_terminal

if TYPE_CHECKING:
    from mlxnb_engine.client import CompletionClient

    from .cell import Planned
    from .magic import MLXMagics
    from .options import Cell
    from .run import Run


def ask(magics: MLXMagics, client: CompletionClient, parsed: Cell, body: str, planned: Planned) -> Run:
    """Ask what this cell plans in its conversation. body: the prompt as it was typed. Raises RequestError as `Conversation.ask`."""
    from .magic import submit_all

    chat = CHATS.open(parsed.given["chat"])
    messages = planned.request.messages or ()
    system = messages[0].content if messages[0].role == "system" else None
    given = "system" in parsed.given

    def submit(told: list[Message]) -> Run:
        request = replace(planned.request, messages=tuple(told), session=chat.session)
        return submit_all(client, [replace(planned, request=request)])[0]

    return chat.ask(
        messages[-1].content,
        submit,
        cell=cell_key(magics.shell, chat, body),
        count=magics.shell.execution_count,
        after=parsed.get("after"),
        system=system if given else None,
        default_system=system,
    )


def cell_key(shell: object, chat: Conversation, body: str) -> str:
    """What makes this cell the same when it runs again: the notebook's own id of it, else what it asks in which chat.

    "" where no cell runs again: nbclient and papermill run each one once, and what is typed in a terminal is new each time.
    """
    known = cell_id(shell)
    if known:
        return f"cell {known}"
    if is_batch(shell) or is_terminal(shell):
        return ""
    return "prompt " + hashlib.sha256(f"{chat.name}\0{body}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


# -- commands ----------------------------------------------------------------------------------------------------------------


def list_chats(magics: MLXMagics, words: list[str]) -> None:
    _words(words, 0, 0, "chats")
    rows = [_row(chat) for chat in CHATS]
    if not rows:
        describe.say("There is no chat yet. A cell that begins with `%%mlx -c NAME` makes one.")
        return
    describe.say(*describe.table(("chat", "turns", "stale", "head", "model", "last question"), rows))


def _row(chat: Conversation) -> tuple[str, ...]:
    turns, head = chat.turns, chat.head
    stale = sum(turn.stale for turn in turns)
    writing = " (writing)" if chat.writing is not None else ""
    shown = (head.id, head.model, short(head.question)) if head is not None else ("-", "", "")
    return (chat.name, f"{len(turns)}{writing}", str(stale or ""), *shown)


def show(magics: MLXMagics, words: list[str]) -> None:
    """A live view on its tree where the notebook has one, else the tree as text."""
    _words(words, 1, 1, "show CHAT")
    from .api import LanguageModel
    from .chat import Chat
    from .chattree import tree_text
    from .chatview import ChatView

    tree = CHATS.find(words[0])
    if is_terminal(magics.shell):
        describe.say(tree_text(tree))
        return
    layer = magics.notebook_layer()
    name = str(layer.get("model") or (tree.head.model if tree.head is not None and tree.head.run is not None else ""))
    model = LanguageModel(name, layer.get("dtype"), runtime.client())
    ChatView(Chat(model, {}, tree), magics.shell, tab="tree").show()


def fork(magics: MLXMagics, words: list[str]) -> None:
    words, name = _named(words, "fork CHAT [TURN] [--as NEW]")
    _words(words, 1, 2, "fork CHAT [TURN] [--as NEW]")
    made = CHATS.fork(CHATS.find(words[0]), words[1] if len(words) > 1 else None, name)
    at = f"turn {made.head.id}: {short(made.head.question)}" if made.head is not None else "its start"
    describe.say(f"{made.name} goes on after {at}", f"`%%mlx -c {made.name}` asks there.")


def reset(magics: MLXMagics, words: list[str]) -> None:
    _words(words, 1, 1, "reset CHAT")
    chat = CHATS.find(words[0])
    count = len(chat.turns)
    chat.reset()
    describe.say(f"{chat.name} is empty; {_turns(count)} forgotten.")


def export(magics: MLXMagics, words: list[str]) -> None:
    _words(words, 2, 2, "export CHAT FILE")
    from .chatfile import export as write

    chat = CHATS.find(words[0])
    write(chat, words[1])
    describe.say(f"{chat.name}: {_turns(len(chat.turns))} written to {words[1]}.")


def import_(magics: MLXMagics, words: list[str]) -> None:
    words, name = _named(words, "import FILE [--as NAME]")
    _words(words, 1, 1, "import FILE [--as NAME]")
    from .chatfile import read

    chat = read(words[0])
    chat.rename(name or chat.name or CHATS.fresh_name(""))
    CHATS.add(chat)
    describe.say(f"{chat.name}: {_turns(len(chat.turns))} read.", f"`%%mlx -c {chat.name}` goes on with it.")


def _turns(count: int) -> str:
    return f"{count} turn{'s' * (count != 1)}"


def _named(words: list[str], usage: str) -> tuple[list[str], str | None]:
    """(the other words, the name after --as)."""
    rest, name = [], None
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if flag == "--as" and name is None:
            if not equals:
                value = waiting.pop(0) if waiting else ""
            name = check_name(value)
        elif word.startswith("--"):
            raise RequestError(f"There is no {word} here.", f"It is: %mlx {usage}")
        else:
            rest.append(word)
    return rest, name


def _words(words: list[str], least: int, most: int, usage: str) -> None:
    if len(words) < least:
        raise RequestError(f"`%mlx {usage.split()[0]}` needs more.", f"It is: %mlx {usage}")
    if len(words) > most:
        raise RequestError(f"{words[most]!r} is one word too many.", f"It is: %mlx {usage}")
