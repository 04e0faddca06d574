"""A `Chat` as a view: go on, edit a question, ask for another answer, move through the tree, in one cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from IPython.core.getipython import get_ipython

from mlxnb_engine.errors import RequestError

from .chatnames import CHATS
from .chattree import heading, rows, tree_text
from .conversation import COMPLETE, Asked, Conversation, Turn
from .frontend import Handler, Session
from .record import plain
from .run import Run
from .sanitize import bundle, el, markdown_to_html, preformatted, text
from .schema import CHAT_SCHEMA
from .stream import packed
from .views import OpenView

if TYPE_CHECKING:
    from mlxnb_widgets._base import View

    from .chat import Chat

NAMES = {"system": "System", "user": "You", "assistant": "Model"}
NEW = "new"
"""In place of a turn's id: the question that is being answered, or whose answer failed or was stopped."""
Tab = Literal["chat", "tree"]


@dataclass(frozen=True, slots=True)
class Shown:
    """What stands in the view, top to bottom: turns that a model is told, a question without a complete answer, stale turns."""

    path: Sequence[Turn]
    asked: Asked | None
    stale: Sequence[Turn]

    @classmethod
    def of(cls, tree: Conversation) -> Shown:
        head, last = tree.head, tree.last
        if last is not None and last.run.finish_reason not in COMPLETE:
            return cls(last.parent.path if last.parent is not None else [], last, [])
        path = head.path if head is not None else []
        return cls(path, None, _kept_aside(tree, path))

    @property
    def runs(self) -> list[Run]:
        found = [turn.run for turn in self.path if turn.run is not None]
        return found if self.asked is None else [*found, self.asked.run]


def _kept_aside(tree: Conversation, path: Sequence[Turn]) -> list[Turn]:
    """The newest stale turns that went on from earlier answers in the places of this path."""
    places = [turn.id for turn in path]
    found: list[Turn] = []
    for turn in tree.turns if places else ():
        chain = turn.path if turn.stale else []
        if len(chain) > len(places) and [one.id for one in chain[: len(places)]] == places and len(chain) - len(places) >= len(found):
            found = chain[len(places) :]
    return found


class ChatView(OpenView):
    """A turn of the tree stands as a question `t1.q` and an answer `t1.a`. tab: what is open at first."""

    def __init__(self, chat: Chat, shell: Any = None, session: Session | None = None, tab: Tab = "chat") -> None:
        self.chat = chat
        self.tab = tab
        super().__init__(shell, _widget, session)
        self.stream.replace(Shown.of(chat.tree).runs)
        chat.tree.changed.append(self._take_over)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "chat.send": lambda args: self._ask(args["text"], None),
            "chat.edit": self._edit,
            "chat.regenerate": self._again,
            "chat.reset": lambda args: self._after(self.chat.reset),
            "chat.go": self._go,
            "chat.fork": self._fork,
        }

    def close(self) -> None:
        if self._take_over in self.chat.tree.changed:
            self.chat.tree.changed.remove(self._take_over)
        super().close()

    # -- record ----------------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        tree = self.chat.tree
        return {"schema": CHAT_SCHEMA, "key": self.key, "epoch": self.epoch, "name": tree.name, "model": self.chat.model} | {
            "tab": self.tab,
            "turns": turn_records(tree, self.stream.runs),
            "tree": tree_records(tree),
            "runs": packed(self.stream),
            "error": None,
        }

    def bundle(self) -> dict[str, Any]:
        return tree_bundle(self.chat.tree) if self.tab == "tree" else chat_bundle(self.chat)

    def _take_over(self) -> None:
        if self.abandoned:
            self.close()
            return
        self.replace_runs(Shown.of(self.chat.tree).runs)

    def ended(self) -> None:
        self.stream.replace(Shown.of(self.chat.tree).runs)

    # -- commands --------------------------------------------------------------------------------------------------------

    def _after(self, act: Callable[[], object]) -> dict[str, Any]:
        act()
        return self.record()

    def _ask(self, words: str, after: Turn | str | None, **options: Any) -> dict[str, Any]:
        if not words.strip():
            raise RequestError("The message is empty.", "Write something first.")
        return self._after(lambda: self.chat.send(words, wait=False, after=after, **options))

    def _edit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The question in other words, as a branch beside the first."""
        turn = self._turn(args["turn"], "q")
        return self._ask(args["text"], self.chat.tree.beside(turn), **_system_of(turn))

    def _again(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Another answer to the same question, beside the first."""
        shown = Shown.of(self.chat.tree)
        turn = self._turn(args["turn"], "a") if "turn" in args else shown.asked or (shown.path[-1] if shown.path else None)
        if turn is None:
            raise RequestError("There is no answer yet.", "Send a message first.")
        return self._ask(turn.question, self.chat.tree.beside(turn), **_system_of(turn))

    def _go(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Go on from a turn, or from the end of the newest branch through it."""
        tree = self.chat.tree
        turn = tree.turn(args["turn"])
        return self._after(lambda: tree.go_to(turn if args.get("exact") else tree.newest(turn)))

    def _fork(self, args: Mapping[str, Any]) -> dict[str, Any]:
        made = CHATS.fork(self.chat.tree, args["turn"])
        words = f"{made.name} begins with the turns up to here. A cell with %%mlx -c {made.name} goes on with it."
        return {**self.record(), "note": words}

    def _turn(self, name: str, part: str) -> Turn | Asked:
        """The turn that a question (q) or an answer (a) of this view belongs to."""
        found, dot, kind = name.partition(".")
        if dot and kind == part:
            asked = Shown.of(self.chat.tree).asked
            if found == NEW and asked is not None:
                return asked
            turn = next((one for one in self.chat.turns if one.id == found), None)
            if turn is not None:
                return turn
        raise RequestError(f"There is no such turn {name[:20]!r}.", "The conversation has changed meanwhile.")


def _system_of(turn: Turn | Asked) -> dict[str, str]:
    """A turn beside one that gave a system message gives the same."""
    return {} if turn.system is None else {"system": turn.system}


def turn_records(tree: Conversation, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The turns as a view takes them: a question has its text, an answer the index of its run or, without one, its text.

    others: the turns that stand beside this one, itself included, in order: for a question those that ask something else, for an
    answer those that answer the same.
    """
    shown = Shown.of(tree)
    index = {id(run): number for number, run in enumerate(runs)}
    system = tree.system_after(shown.path[-1] if shown.path else None)
    if shown.asked is not None and shown.asked.system is not None:
        system = shown.asked.system
    families = tree.families()
    found: list[dict[str, Any]] = []
    if system:
        found.append({"id": "system", "role": "system", "text": plain(system), "run": None})
    for turn in shown.path:
        found += _pair(turn.id, turn, index.get(id(turn.run)), _beside(families, turn))
    if shown.asked is not None:
        found += _pair(NEW, shown.asked, index.get(id(shown.asked.run)), _beside(families, shown.asked))
    for turn in shown.stale:
        found += _pair(turn.id, turn, None, ([], []), stale=True)
    return found


def _pair(name: str, turn: Turn | Asked, run: int | None, others: tuple[list[str], list[str]], stale: bool = False) -> list[dict[str, Any]]:
    cell = f"[{turn.count}]" if turn.count is not None else ""
    answer = turn.answer if isinstance(turn, Turn) else turn.run.answer
    common = {"turn": name, "stale": stale}
    return [
        {"id": f"{name}.q", "role": "user", "text": plain(turn.question), "run": None, "cell": cell, "others": others[0], **common},
        {"id": f"{name}.a", "role": "assistant", "text": plain(answer) if run is None else "", "run": run, "others": others[1], **common},
    ]


def _beside(families: Mapping[Turn | None, Sequence[Turn]], turn: Turn | Asked) -> tuple[list[str], list[str]]:
    """(other questions in this place, other answers to this question), by turn; each list has this turn too, or is empty."""
    name = turn.id if isinstance(turn, Turn) else NEW
    place = turn.place if isinstance(turn, Asked) else None
    beside = [(one.id, one.question) for one in families.get(turn.parent, ()) if one is not place]
    beside += [] if isinstance(turn, Turn) else [(NEW, turn.question)]
    answers = [one for one, question in beside if question == turn.question]
    questions: dict[str, str] = {}
    for one, question in beside:
        questions[question] = name if question == turn.question else one
    return (list(questions.values()) if len(questions) > 1 else [], answers if len(answers) > 1 else [])


def tree_records(tree: Conversation) -> list[dict[str, Any]]:
    """The rows of the tree, as `chattree.rows`."""
    return [
        {"id": row.turn.id, "parent": row.parent, "lines": list(row.lines), "branch": row.branch, "text": plain(row.turn.question[:200])}
        | {"cell": f"[{row.turn.count}]" if row.turn.count is not None else "", "tokens": row.turn.tokens}
        | {"stale": row.stale, "on_path": row.on_path, "head": row.head}
        for row in rows(tree)
    ]


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


def tree_bundle(tree: Conversation) -> dict[str, Any]:
    """The tree as sanitised HTML and as text."""
    drawing = tree_text(tree)
    return bundle(el("div", "run", el("div", "card_head", heading(tree)), preformatted(drawing.partition("\n")[2])), drawing)


def _widget(**traits: Any) -> View:
    from mlxnb_widgets.chat import ChatWidget

    return ChatWidget(**traits)


def show(chat: Chat) -> None:
    """In the current cell; a plain script shows nothing."""
    shell = get_ipython()
    if shell is not None:
        ChatView(chat, shell).show()
