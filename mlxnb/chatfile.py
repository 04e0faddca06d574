"""Conversations as JSON: written for `%mlx export`, read back from files that anybody may have made."""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from pathlib import Path
from typing import Any, Literal, NoReturn, TypedDict

from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import MAX_SEED, Generated, TokenId

from .chatnames import check_name
from .conversation import MAX_TURNS, Conversation, Turn
from .schema import problem

SCHEMA = "mlxnb.conversation/1"
MAX_BYTES = 16 << 20
_ID = re.compile(r"t[1-9][0-9]{0,5}")
_HINT = "`%mlx export CHAT FILE` writes one."


class GeneratedFile(TypedDict):
    """ids: of the answer's tokens. start: characters of the answer before what they wrote."""

    ids: list[int]
    start: int


class TurnFile(TypedDict):
    """A turn. parent, replaced_by: indices of turns, an earlier and a later one. seed: in decimal."""

    id: str
    parent: int | None
    replaced_by: int | None
    question: str
    answer: str
    system: str | None
    cell: str
    count: int | None
    model: str
    seed: str | None
    finish: Literal["stop", "length"]
    tokens: int
    generated: GeneratedFile | None


class ConversationFile(TypedDict):
    """head: index of a turn."""

    schema: Literal["mlxnb.conversation/1"]
    name: str
    system: str | None
    head: int | None
    turns: list[TurnFile]


# -- writing -----------------------------------------------------------------------------------------------------------------


def to_json(chat: Conversation) -> str:
    """All of its turns, parents first, one on a line."""
    turns, head = chat.history, chat.head
    index = {id(turn): number for number, turn in enumerate(turns)}
    frame = {"schema": SCHEMA, "name": chat.name, "system": chat.system, "head": None if head is None else index[id(head)]}
    lines = [json.dumps(_turn_file(turn, index), ensure_ascii=False) for turn in turns]
    body = "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
    return json.dumps(frame, ensure_ascii=False)[:-1] + f', "turns": {body}}}\n'


def _last(turn: Turn) -> Turn:
    while turn.replaced_by is not None:
        turn = turn.replaced_by
    return turn


def _turn_file(turn: Turn, index: dict[int, int]) -> TurnFile:
    generated = turn.generated
    return {
        "id": turn.id,
        "parent": None if turn.parent is None else index[id(turn.parent)],
        "replaced_by": None if turn.replaced_by is None else index[id(_last(turn))],
        "question": turn.question,
        "answer": turn.answer,
        "system": turn.system,
        "cell": turn.cell,
        "count": turn.count,
        "model": turn.model,
        "seed": None if turn.seed is None else str(turn.seed),
        "finish": "length" if turn.finish == "length" else "stop",
        "tokens": turn.tokens,
        "generated": None if generated is None else {"ids": list(generated.ids), "start": generated.start},
    }


def export(chat: Conversation, path: str | os.PathLike[str]) -> None:
    """Write it to a file, whole or not at all. Raises RequestError if the file holds something else, or cannot be written."""
    target = _path(path)
    data = to_json(chat).encode("utf-8", "surrogatepass")
    if len(data) > MAX_BYTES:
        raise RequestError(f"The conversation takes {len(data) >> 20} MiB, more than {MAX_BYTES >> 20}.", "Fork a part of it.")
    if os.path.exists(target) and not _is_ours(target):
        raise RequestError(f"{target} is no conversation of mlxnb, and is left alone.", "Choose another name, or move it away.")
    temporary = target.with_name(f".{target.name[:40]}.{uuid.uuid4().hex}")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror}.", "Choose another place.") from error


def _path(path: str | os.PathLike[str]) -> Path:
    """Raises RequestError for what can name no file."""
    try:
        found = Path(path).expanduser()
        if b"\0" in os.fsencode(found):
            raise ValueError("It has a null character.")
    except (RuntimeError, ValueError) as error:  # the home of nobody, half a character
        raise RequestError(f"{str(path)[:200]!r} is no path: {error}", "Choose another place.") from error
    return found


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(64).startswith(b'{"schema": "mlxnb.conversation/')
    except OSError:
        return False


# -- reading -----------------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Conversation:
    """The conversation in a file. Raises RequestError for a file that is none, is too large, or cannot be read."""
    source = _path(path)
    try:
        # A pipe or a device would never end; without O_NONBLOCK opening a pipe waits for its writer.
        descriptor = os.open(source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise RequestError(f"{source} is not a file.", _HINT)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error.strerror}.", _HINT) from error
    try:
        return from_json(data)
    except RequestError as error:
        raise RequestError(f"{source}: {error.message}", error.hint) from error


def from_json(text: str | bytes) -> Conversation:
    """The conversation that `to_json` wrote. Raises RequestError that says what is wrong with any other text."""
    if len(text) > MAX_BYTES:
        _refuse(f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        value = json.loads(text, parse_constant=lambda name: _refuse(f"it has the number {name}"))
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        _refuse(f"it is not JSON ({type(error).__name__})")
    if isinstance(value, dict) and value.get("schema") != SCHEMA and str(value.get("schema"))[:19] == SCHEMA[:19]:
        _refuse(f"its form is {str(value['schema'])[:40]!r}, and this version reads {SCHEMA!r}")
    found = problem(ConversationFile, value, "it")
    if found is not None:
        _refuse(found)
    return _conversation(value)


def _refuse(what: str) -> NoReturn:
    raise RequestError(f"This is no conversation of mlxnb: {what}.", _HINT)


def _conversation(value: ConversationFile) -> Conversation:
    records = value["turns"]
    if len(records) > MAX_TURNS:
        _refuse(f"it has more than {MAX_TURNS:,} turns")
    _check_texts([value["name"], value["system"], *(item for record in records for item in record.values())])
    if value["name"]:
        check_name(value["name"])
    turns: list[Turn] = []
    for number, record in enumerate(records):
        turns.append(_turn(record, number, turns))
        # Places are counted from t1 and none is ever dropped: a larger one would make the next ones longer than any that is read.
        if turns[-1].number > len(records):
            _refuse(f"turn {number} has the id {record['id']!r}, and there are {len(records):,} turns")
    for number, record in enumerate(records):
        by = record["replaced_by"]
        if by is None:
            continue
        if not number < by < len(turns) or records[by]["replaced_by"] is not None or records[by]["id"] != record["id"]:
            _refuse(f"turn {number} is replaced by a turn that cannot be")
        turns[number].replaced_by = turns[by]
    standing = [turn.id for turn in turns if turn.replaced_by is None]
    if len(set(standing)) < len(standing):
        _refuse("two turns have the same id")
    _check_paths(turns)
    head = value["head"]
    if head is not None and not (0 <= head < len(turns) and not turns[head].stale):
        _refuse("its head is no turn that can be one")
    chat = Conversation(value["name"], value["system"])
    chat.restore(turns, None if head is None else turns[head])
    return chat


def _check_paths(turns: list[Turn]) -> None:
    """No turn is asked after one of its own id. One walk through the tree, down and up again."""
    below: dict[int, list[Turn]] = {}
    for turn in turns:
        below.setdefault(id(turn.parent), []).append(turn)
    above: set[str] = set()
    waiting = [(turn, True) for turn in below.get(id(None), ())]
    while waiting:
        turn, down = waiting.pop()
        if not down:
            above.remove(turn.id)
            continue
        if turn.id in above:
            _refuse(f"turn {turn.id} is asked after itself")
        above.add(turn.id)
        waiting += [(turn, False), *((child, True) for child in below.get(id(turn), ()))]


def _turn(record: TurnFile, number: int, before: list[Turn]) -> Turn:
    parent, seed, generated = record["parent"], record["seed"], record["generated"]
    if not _ID.fullmatch(record["id"]):
        _refuse(f"turn {number} has the id {record['id'][:20]!r}")
    if parent is not None and not 0 <= parent < number:
        _refuse(f"turn {number} is asked after a turn that does not stand before it")
    if seed is not None and not (re.fullmatch(r"[0-9]{1,20}", seed) and int(seed) <= MAX_SEED):
        _refuse(f"turn {number} has a seed that is none")
    counts = [record["tokens"], *([] if record["count"] is None else [record["count"]])]
    if generated is not None:
        counts += [generated["start"], *generated["ids"]]
    if not all(0 <= count < 2**31 for count in counts):
        _refuse(f"turn {number} has a number out of range")
    return Turn(
        id=record["id"],
        parent=None if parent is None else before[parent],
        question=record["question"],
        answer=record["answer"],
        cell=record["cell"],
        count=record["count"],
        system=record["system"],
        generated=None if generated is None else Generated(tuple(map(TokenId, generated["ids"])), generated["start"]),
        model=record["model"],
        seed=None if seed is None else int(seed),
        finish=record["finish"],
        tokens=record["tokens"],
    )


def _check_texts(values: list[Any]) -> None:
    for value in values:
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                _refuse("it has half of a character")
