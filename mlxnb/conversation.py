"""`Conversation`: a tree of turns, each tied to the cell that made it. Rules and values; no engine, no display.

    t1 -- t2 -- t3          the head is t3: the next turn is asked after it
      \\-- t4                asked after t1, in a branch of its own

A cell that runs again replaces its own turn where it stands. What was asked after the old answer is kept, stale: it stands in
the tree and is never told to a model again, until its own cell ran again or it was copied into a conversation of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import Generated, Message

if TYPE_CHECKING:
    from .run import Run

START = "start"
"""In place of a turn: before the first one."""
COMPLETE = ("stop", "length")
MAX_TURNS = 4096
STOP_S = 5.0
"""The longest that a question waits for the end of an answer that was told to stop."""
_numbers = itertools.count(1)


@dataclass(eq=False, slots=True)
class Turn:
    """A question with its complete answer.

    id: names its place in the tree; an answer that replaces another one keeps it. parent: the turn it was asked after, None at
    the start. cell, count: which cell asked ("" for none), and its number when it did. system: the system message given with
    it, which holds for what is asked after it. generated: the ids of the answer. model, seed, finish, tokens: of its run, which
    is None for a turn that was read from a file. replaced_by: what stands in its place now.
    Owner: its Conversation. Immutable but for replaced_by, which is set once.
    """

    id: str
    parent: Turn | None
    question: str
    answer: str
    cell: str = ""
    count: int | None = None
    system: str | None = None
    generated: Generated | None = None
    model: str = ""
    seed: int | None = None
    finish: str = "stop"
    tokens: int = 0
    run: Run | None = None
    replaced_by: Turn | None = None

    @property
    def path(self) -> list[Turn]:
        """The turns from the first to this one."""
        found: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def stale(self) -> bool:
        """Whether it answers something that was since replaced, itself included."""
        return any(turn.replaced_by is not None for turn in self.path)

    @property
    def number(self) -> int:
        return int(self.id[1:])

    def says_the_same(self, other: Turn) -> bool:
        return (self.question, self.answer, self.system) == (other.question, other.answer, other.system)

    def __repr__(self) -> str:
        return f"<Turn {self.id}{' stale' if self.stale else ''}: {short(self.question)!r}>"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question on its way into the tree. place: the turn it replaces, if its cell has one already."""

    question: str
    parent: Turn | None
    place: Turn | None
    run: Run
    cell: str
    count: int | None
    system: str | None


class Conversation:
    """Turns by their order. Any thread; one answer is written at a time.

    Invariant: only complete answers are in it; a failed or stopped one leaves everything as it was. The head is never stale. A
    replaced turn is kept exactly as long as another one answers it.
    name: "" for one that nobody can ask for by name. system: the system message where no turn gave one. last: the newest question
    with its run, whatever became of it. changed: called after a question was asked, or turns were moved or dropped. session: what
    tells it from others to the prefix cache; a hint only.
    """

    def __init__(self, name: str = "", system: str | None = None) -> None:
        self.rename(name)
        self.system = system
        self.last: Asked | None = None
        self.changed: list[Callable[[], object]] = []
        self._lock = threading.RLock()
        self._turns: list[Turn] = []  # replaced ones too, as they came: parents first, and what was replaced before what did it
        self._head: Turn | None = None
        self._open: Asked | None = None

    def rename(self, name: str) -> None:
        self.name = name
        self.session = name or f"chat {next(_numbers)}"

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn that stands in its place, stale ones too, in the order in which the places came to be."""
        return tuple(sorted((turn for turn in self.history if turn.replaced_by is None), key=lambda turn: turn.number))

    @property
    def history(self) -> tuple[Turn, ...]:
        """The same and the replaced turns that others answer, in the order in which they were answered: parents first."""
        with self._lock:
            self._settle()
            return tuple(self._turns)

    @property
    def head(self) -> Turn | None:
        """The turn after which the next one is asked; None at the start."""
        with self._lock:
            self._settle()
            return self._head

    @property
    def writing(self) -> Asked | None:
        """The question that is being answered."""
        with self._lock:
            self._settle()
            return self._open

    def turn(self, name: Turn | str) -> Turn:
        """The turn in this place. Raises RequestError that names those there are."""
        turns = self.turns
        found = next((turn for turn in turns if turn is name or turn.id == name), None)
        if found is None:
            known = ", ".join(turn.id for turn in turns[-8:])
            shown = name.id if isinstance(name, Turn) else str(name)[:40]
            hint = f"It has {'... ' if len(turns) > 8 else ''}{known}." if turns else "It has no turn yet."
            raise RequestError(f"{self._title} has no turn {shown!r}.", hint)
        return found

    def beside(self, turn: Turn | Asked) -> Turn | str:
        """The place to ask from for another answer beside this one: what it was asked after, or START.

        Raises RequestError for a turn that stands among stale ones.
        """
        parent = turn.parent
        if parent is None:
            return START
        if parent.stale:
            shown = turn if isinstance(turn, Turn) else parent
            raise RequestError(f"Turn {shown.id} is stale: {_why(shown)}.", self._way_out(shown))
        return parent

    def children(self, turn: Turn | None) -> list[Turn]:
        """The turns that were asked right after this one, None for the start, oldest first."""
        return self.families().get(turn, [])

    def families(self) -> dict[Turn | None, list[Turn]]:
        """`children` of every turn that has some, at once."""
        found: dict[Turn | None, list[Turn]] = {}
        for turn in self.turns:
            found.setdefault(turn.parent, []).append(turn)
        return found

    def newest(self, turn: Turn) -> Turn:
        """The end of the newest branch through this turn."""
        families = self.families()
        while turn in families:
            turn = families[turn][-1]
        return turn

    def system_after(self, turn: Turn | None) -> str | None:
        """The system message in force after this turn: the last one given on the way to it, else the conversation's own."""
        path = turn.path if turn is not None else []
        return next((one.system for one in reversed(path) if one.system is not None), self.system)

    def messages(self, turn: Turn | None, system: str | None = None) -> list[Message]:
        """What a model is told of the turns up to this one. system: instead of the one in force."""
        opening = system if system is not None else self.system_after(turn)
        told = [Message("system", opening)] if opening else []
        for one in turn.path if turn is not None else []:
            told += [Message("user", one.question), Message("assistant", one.answer, one.generated)]
        return told

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        submit: Callable[[list[Message]], Run],
        *,
        cell: str = "",
        count: int | None = None,
        after: Turn | str | None = None,
        system: str | None = None,
        default_system: str | None = None,
    ) -> Run:
        """Ask, and keep question and answer once that is complete.

        submit: sends all messages and gives the run; what it raises leaves the conversation as it was. cell: the key of the cell
        that asks; one that has a turn here replaces it. after: another place than the cell's own, else the head: a turn or START.
        system: the system message from here on. default_system: the same where there is none yet.
        Raises RequestError while an answer is being written, and for a place among stale turns.
        """
        self._let_stop()
        with self._lock:
            self._require_idle()
            parent, place = self._place(cell, after)
            if len(self._turns) >= MAX_TURNS:
                raise RequestError(f"{self._title} has {MAX_TURNS:,} turns already.", self._fresh())
            if system is None and self.system_after(parent) is None:
                system = default_system
            run = submit([*self.messages(parent, system), Message("user", question)])
            self._open = self.last = Asked(question, parent, place, run, cell, count, system)
            run.on_resume = lambda rest: self._went_on(run, rest)
        self.tell()
        return run

    def _went_on(self, run: Run, rest: Run) -> None:
        """A stopped answer was resumed: it still answers its question, unless another one was asked since."""
        with self._lock:
            self._settle()
            last = self.last is not None and self.last.run is run and self._open is None
        if last:
            self.resumed(rest)
            rest.on_resume = lambda further: self._went_on(rest, further)

    def resumed(self, run: Run) -> None:
        """Let this run answer the last question, whose own was stopped or failed."""
        with self._lock:
            self._require_idle()
            if self.last is None or self.last.run.finish_reason in COMPLETE:
                raise RequestError(f"{self._title} has no unanswered question.", "Ask one.")
            self._open = self.last = replace(self.last, run=run)
        self.tell()

    def _place(self, cell: str, after: Turn | str | None) -> tuple[Turn | None, Turn | None]:
        """(the turn to ask after, the turn to replace)."""
        mine = self._of(cell) if cell else None
        if after is not None:
            parent = None if after == START else self.turn(after)
        else:
            parent = current(mine.parent) if mine is not None else self._head
        if parent is None:
            return None, mine
        if mine is not None and any(turn.id == mine.id for turn in parent.path):
            raise RequestError(f"Turn {parent.id} comes after this cell's own turn {mine.id}.", "Ask in a new cell.")
        if parent.stale:
            raise RequestError(f"Turn {parent.id} is stale: {_why(parent)}.", self._way_out(parent))
        return parent, mine

    def _of(self, cell: str) -> Turn | None:
        """The turn of this cell."""
        return next((turn for turn in self._turns if turn.cell == cell and turn.replaced_by is None), None)

    def _way_out(self, turn: Turn) -> str:
        """The cell of a turn may be gone from its notebook, so there is always a way without it."""
        again = f"Run its cell [{turn.count}] again first" if turn.count is not None else "Ask it again first"
        stands = next((one.id for one in reversed(turn.path) if not one.stale), START)
        after = f"--after {stands}" if self.name else f"after={stands!r}"
        copy = f"`%mlx fork {self.name} {turn.id}`" if self.name else f"fork({turn.id!r})"
        return f"{again}, ask with {after}, or go on from a copy: {copy}."

    def _fresh(self) -> str:
        return f"Start another one, or `%mlx reset {self.name}`." if self.name else "Start another one, or reset() this one."

    def _settle(self) -> None:
        """Take in the answer that was being written, once it is over."""
        with self._lock:
            asked = self._open
            if asked is None or not asked.run.done:
                return
            self._open = None
            if asked.run.finish_reason in COMPLETE:
                self._head = self._put(_answered(asked), asked.place)

    def _put(self, turn: Turn, place: Turn | None) -> Turn:
        """Put a turn where another one stands, or into a new place."""
        turn.id = place.id if place is not None else f"t{1 + max((other.number for other in self._turns), default=0)}"
        self._turns.append(turn)
        if place is not None:
            place.replaced_by = turn
            self._prune()
        return turn

    def _prune(self) -> None:
        """Forget replaced turns that no other one answers. Backwards, so that one pass finds those before them too."""
        answered: set[int] = set()
        kept: list[Turn] = []
        for turn in reversed(self._turns):
            if turn.replaced_by is None or id(turn) in answered:
                kept.append(turn)
                answered.add(id(turn.parent))
        self._turns = kept[::-1]

    # -- changing ----------------------------------------------------------------------------------------------------

    def go_to(self, turn: Turn | str) -> None:
        """Make this turn the head; START is before the first. Raises RequestError for a stale one."""
        self._let_stop()
        with self._lock:
            self._require_idle()
            found = None if turn == START else self.turn(turn)
            if found is not None and found.stale:
                raise RequestError(f"Turn {found.id} is stale: {_why(found)}.", self._way_out(found))
            self._head, self.last = found, None
        self.tell()

    def begin(self, messages: Sequence[Message]) -> None:
        """Take these as the first turns: questions and answers by turns, maybe a system message before them.

        Raises RequestError for other messages, and for a conversation that has turns.
        """
        told = list(messages)
        system = told.pop(0).content if told and told[0].role == "system" else None
        if len(told) % 2 or any(message.role != ("user", "assistant")[i % 2] for i, message in enumerate(told)):
            raise RequestError("A conversation is questions and answers by turns.", "Give user and assistant messages, an answer last.")
        with self._lock:
            self._require_idle()
            if self._turns:
                raise RequestError(f"{self._title} has turns already.", "Begin another one.")
            for question, answer in zip(told[::2], told[1::2], strict=True):
                self._head = self._put(Turn("", self._head, question.content, answer.content, generated=answer.generated), None)
            self.system = system if system is not None else self.system
        self.tell()

    def copy_into(self, other: Conversation, turn: Turn | str | None = None) -> None:
        """Put the turns up to this one (None: the head) at the beginning of another conversation, whose head is then its copy.

        What an earlier copy put there stays if it says the same, else it is replaced like a turn whose cell ran again. A stale
        turn is copied with the answers that it follows, and is not stale there.
        """
        end = self.head if turn is None else self.turn(turn)
        path = end.path if end is not None else []
        with other._lock:
            other._require_idle()
            other.system = self.system
            parent: Turn | None = None
            for number, source in enumerate(path):
                cell = f"fork {number}"
                old = other._of(cell)
                if old is not None and old.parent is parent and old.says_the_same(source):
                    parent = old
                else:
                    parent = other._put(replace(source, id="", parent=parent, cell=cell, replaced_by=None), old)
            other._head, other.last = parent, None
        other.tell()

    def restore(self, turns: Sequence[Turn], head: Turn | None) -> None:
        """Hold these turns and no others, parents first; the replaced ones among them know by what."""
        with self._lock:
            self._require_idle()
            self._turns = list(turns)
            self._head, self.last = head, None
            self._prune()
        self.tell()

    def reset(self) -> None:
        """Forget every turn, stop one that is being written, keep the system message."""
        with self._lock:
            if self._open is not None:
                self._open.run.cancel()
            self._turns = []
            self._head = self._open = self.last = None
        self.tell()

    def tell(self) -> None:
        for changed in list(self.changed):
            changed()

    # -- saying no ---------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"The chat {self.name!r}" if self.name else "This chat"

    def _let_stop(self) -> None:
        """Wait for the end of an answer that was told to stop. Without the lock: whoever reads does not wait."""
        asked = self.writing
        if asked is not None and asked.run.stopping:
            asked.run.wait(STOP_S)

    def _require_idle(self) -> None:
        self._settle()
        if self._open is None:
            return
        row = self._open.run.request.id
        hint = f"Wait for it (`%mlx wait {row}`), stop it (`%mlx cancel {row}`), or ask in a copy: `%mlx fork {self.name}`."
        raise RequestError(
            f"The last answer of {self._title[0].lower()}{self._title[1:]} is still being written.",
            hint if self.name else "Wait for it with run.wait(), stop it with run.cancel(), or ask in a fork.",
        )


def _answered(asked: Asked) -> Turn:
    run = asked.run
    ids = tuple(token.id for token in run.tokens)
    return Turn(
        id="",
        parent=asked.parent,
        question=asked.question,
        answer=run.answer,
        cell=asked.cell,
        count=asked.count,
        system=asked.system,
        generated=Generated(ids, len(run.request.prefill)) if ids else None,  # type: ignore[arg-type]
        model=run.model,
        seed=run.seed,
        finish=run.finish_reason or "",
        tokens=run.token_count,
        run=run,
    )


def current(turn: Turn | None) -> Turn | None:
    """What stands in the place of this turn."""
    while turn is not None and turn.replaced_by is not None:
        turn = turn.replaced_by
    return turn


def _why(turn: Turn) -> str:
    old = next(one for one in turn.path if one.replaced_by is not None)
    return f"it follows an earlier answer of turn {old.id}" if old is not turn else "it was replaced"


def short(text: str, most: int = 48) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[: most - 3] + "..."
