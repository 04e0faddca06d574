"""What crosses between kernel and views, declared once: `scripts/protocol.py` writes TypeScript from it, `problem` checks with it.

Types are TypedDicts. A record is plain JSON; a number that JSON has not is the text "inf", "-inf" or "nan", and an integer that
a double cannot hold is its decimal text. Additions keep a schema's number; a change of meaning gets a new one.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

RUN_SCHEMA = "mlxnb.run/1"
GROUP_SCHEMA = "mlxnb.group/1"
CHAT_SCHEMA = "mlxnb.chat/1"
PLAYGROUND_SCHEMA = "mlxnb.playground/1"
STEPPER_SCHEMA = "mlxnb.stepper/1"
MONITOR_SCHEMA = "mlxnb.monitor/1"
HISTORY_SCHEMA = "mlxnb.history/1"
LOOM_SCHEMA = "mlxnb.loom/1"
CACHE_SCHEMA = "mlxnb.cache/1"
RUN_MIME = "application/vnd.mlxnb.run.v1+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
STATUS_TARGET = "mlxnb.status"
SESSION_TARGET = "mlxnb.session"

MAX_MESSAGE_BYTES = 64 * 1024
"""A larger message of a front end is refused."""
MAX_TABLE_BYTES = 64 * 1024
"""Packed token tables of one output; larger ones lose their alternatives, then their tokens, with a note."""
ALPHABET = "".join(chr(code) for code in range(33, 127) if chr(code) not in '"\\')
"""Digits of a packed number: 64 that end it, then 28 that go on."""

Number = float | Literal["inf", "-inf", "nan"]
Origin = Literal["sampled", "filled", "echo", "drafted", "forced"]
Status = Literal["waiting", "loading", "prefill", "running", "done", "stopped", "failed"]
ViewKind = Literal["run", "compare", "chat", "monitor", "playground", "stepper", "loom", "cache"]


# -- records ---------------------------------------------------------------------------------------------------------------


class Alternative(TypedDict):
    """One of the likeliest tokens at a position. masked: why it could not be chosen."""

    id: int
    text: str
    logprob: Number
    masked: NotRequired[str]


class TokenRecord(TypedDict):
    """One produced token. t: seconds since submit. logprob, rank, top: only where captured. by_hand: a person chose it."""

    id: int
    text: str
    origin: Origin
    t: Number
    logprob: NotRequired[Number]
    rank: NotRequired[int | None]
    top: NotRequired[list[Alternative]]
    by_hand: NotRequired[bool]


class PackedTimes(TypedDict):
    """Seconds = running sum of `steps` times `unit`."""

    unit: float
    steps: str


class PackedScores(TypedDict):
    """Per token: 0 for not captured, else 1 + round(-logprob / unit). rank: 0 for unknown, else rank + 1."""

    unit: float
    logprob: str
    rank: str


class PackedTop(TypedDict):
    """Alternatives of all tokens in one row: how many each token has, which distinct token, 1 + round(-logprob / unit)."""

    unit: float
    count: str
    index: str
    logprob: str


class PackedTokens(TypedDict):
    """A token table by columns. Numbers are digits of ALPHABET (see `packing.py`).

    ids, lengths: of each distinct token; its text is cut from `texts` by length in code points. index: which one each token
    is. origin: [name, how many], in order. by_hand: gaps between chosen positions.
    """

    form: Literal[1]
    count: int
    ids: str
    lengths: str
    texts: str
    index: str
    t: PackedTimes
    origin: list[tuple[str, int]]
    by_hand: NotRequired[str]
    scores: NotRequired[PackedScores]
    top: NotRequired[PackedTop]


class Seed(TypedDict):
    value: int | str | None
    explicit: bool | None


class ErrorRecord(TypedDict):
    kind: str
    message: str
    hint: str


class TimingRecord(TypedDict):
    """Seconds since submit; null while it has not happened."""

    started: Number | None
    first_token: Number | None
    ended: Number | None


class Phase(TypedDict):
    kind: str
    phase: NotRequired[str]
    t: Number
    until: Number
    done: NotRequired[int]
    total: NotRequired[int]


class Turn(TypedDict):
    role: str
    content: str


class PromptRecord(TypedDict):
    messages: list[Turn] | None
    text: str | None
    prefill: str


class RunRecord(TypedDict):
    """One answer. text: null if it is exactly the texts of the packed tokens. tokens: null if dropped, `tokens_note` says why."""

    schema: Literal["mlxnb.run/1"]
    id: str
    status: Status
    stopping: NotRequired[bool]
    model: str
    labels: dict[str, Any]
    text: str | None
    tokens: list[TokenRecord] | PackedTokens | None
    tokens_note: NotRequired[str]
    usage: dict[str, Any]
    seed: Seed
    finish_reason: str | None
    stop: str | None
    error: ErrorRecord | None
    timing: TimingRecord
    phases: list[Phase]
    request: dict[str, Any]
    prompt: PromptRecord
    key: NotRequired[str]
    view: NotRequired[str]


class GroupRecord(TypedDict):
    """Several runs that belong together. labels: a heading for each."""

    schema: Literal["mlxnb.group/1"]
    runs: list[RunRecord]
    labels: NotRequired[list[str]]
    key: NotRequired[str]
    view: NotRequired[str]


# -- messages --------------------------------------------------------------------------------------------------------------


class DeltaItem(TypedDict):
    """What a run gained. at: tokens before these; text_at: UTF-16 units of text before; status: fields that changed."""

    key: str
    run: int
    at: int
    tokens: list[TokenRecord]
    text_at: int
    text: str
    status: NotRequired[dict[str, Any]]


class DeltaMessage(TypedDict):
    """ack: false if this message is not to be acknowledged."""

    type: Literal["delta"]
    seq: int
    items: list[DeltaItem]
    ack: NotRequired[bool]


class StatusMessage(TypedDict):
    """The engine at one moment, on the status comm."""

    type: Literal["status"]
    status: dict[str, Any]


class AckMessage(TypedDict):
    """A front end drew message `seq`; frame_ms: how long its slowest frame took since the one before."""

    type: Literal["ack"]
    seq: int
    frame_ms: float


class CommandMessage(TypedDict):
    """A wish of a person. key: the view's, or "" for the kernel itself. Always answered with the same id."""

    type: Literal["command"]
    id: str
    key: str
    name: str
    args: dict[str, Any]


class AnswerMessage(TypedDict):
    type: Literal["answer"]
    id: str
    ok: bool
    result: NotRequired[Any]
    error: NotRequired[str]


# -- commands: the arguments of each, by name ------------------------------------------------------------------------------


class Empty(TypedDict):
    pass


class StopArgs(TypedDict):
    run: NotRequired[int]


class BranchArgs(TypedDict):
    """token: an id to put at position `at`; left out, the position is drawn anew."""

    run: int
    at: int
    token: NotRequired[int | None]


class UnloadArgs(TypedDict):
    model: NotRequired[str]


class AssetArgs(TypedDict):
    name: str


class CompleteArgs(TypedDict):
    """text: the whole cell; cursor: position in it, in code points."""

    text: str
    cursor: int


class SendArgs(TypedDict):
    text: str


class EditArgs(TypedDict):
    """turn: id of a user turn; `text` is asked in its place, as a branch beside it."""

    turn: str
    text: str


class TurnArgs(TypedDict):
    """turn: id of an answer; its question is asked again, as a branch beside it. Left out: the last one."""

    turn: NotRequired[str]


class TreeArgs(TypedDict):
    """turn: of the tree; what leads to it is copied into a chat of its own."""

    turn: str


class GoArgs(TreeArgs):
    """The next message is asked after this turn or, unless `exact`, at the end of the newest branch through it."""

    exact: NotRequired[bool]


class PlaygroundArgs(TypedDict):
    """settings: sampling options by the names of `generate`. mode: with the chat template, or the raw text. The run before is stopped."""

    prompt: str
    mode: NotRequired[Literal["chat", "text"]]
    settings: NotRequired[dict[str, Any]]


class StepArgs(TypedDict):
    count: NotRequired[int]


class ChooseArgs(TypedDict):
    id: int


class RowArgs(TypedDict):
    """id: of a row, as the status names it."""

    id: str


class SettingsArgs(TypedDict):
    settings: dict[str, Any]


class PlaceArgs(TypedDict):
    """A place in a loom: the first `at` tokens of run `run`, then `token`, an alternative that no run took."""

    run: int
    at: int
    token: NotRequired[int | None]


class LoomMarkArgs(PlaceArgs):
    mark: Literal["kept", "pruned"]
    on: bool


class LoomMoreArgs(PlaceArgs):
    """tokens: how many more at most. rows: how many continuations, each with a seed of its own."""

    tokens: NotRequired[int]
    rows: NotRequired[int]


class LoomExpandArgs(PlaceArgs):
    """The `width` likeliest tokens at each of `depth` levels. ids: instead of the likeliest at the first one."""

    width: int
    depth: int
    ids: NotRequired[list[int]]


class BlockArgs(TypedDict):
    """edge: id of a run of blocks in a cache map; block: which of them, from 0."""

    edge: str
    block: int


COMMANDS: dict[str, type] = {
    "stop": StopArgs,
    "snapshot": Empty,
    "regenerate": StopArgs,
    "branch": BranchArgs,
    "chat.send": SendArgs,
    "chat.edit": EditArgs,
    "chat.regenerate": TurnArgs,
    "chat.reset": Empty,
    "chat.go": GoArgs,
    "chat.fork": TreeArgs,
    "playground.run": PlaygroundArgs,
    "stepper.step": StepArgs,
    "stepper.choose": ChooseArgs,
    "stepper.undo": StepArgs,
    "stepper.reset": Empty,
    "stepper.set": SettingsArgs,
    "stepper.run": Empty,
    "loom.mark": LoomMarkArgs,
    "loom.more": LoomMoreArgs,
    "loom.expand": LoomExpandArgs,
    "loom.peek": PlaceArgs,
    "loom.chat": PlaceArgs,
    "cache.text": BlockArgs,
    "monitor.stop": RowArgs,
    "stop_all": Empty,
    "unload": UnloadArgs,
    "status": Empty,
    "history": Empty,
    "outputs": Empty,
    "sources": Empty,
    "complete": CompleteArgs,
    "asset": AssetArgs,
}

RECORDS: tuple[type, ...] = (
    *(Alternative, TokenRecord, PackedTimes, PackedScores, PackedTop, PackedTokens, Seed, ErrorRecord, TimingRecord, Phase),
    *(Turn, PromptRecord, RunRecord, GroupRecord),
)
MESSAGES: tuple[type, ...] = (DeltaItem, DeltaMessage, StatusMessage, AckMessage, CommandMessage, AnswerMessage)


# -- checking --------------------------------------------------------------------------------------------------------------


def problem(kind: Any, value: Any, where: str = "value") -> str | None:
    """What is wrong with a JSON value of this type, in words, or None. Unknown fields of a TypedDict are wrong too."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return None
    if kind is None or kind is type(None):
        return None if value is None else f"{where} is not null"
    if origin is Literal:
        return (
            None if any(type(value) is type(each) and value == each for each in typing.get_args(kind)) else f"{where} is not a known word"
        )
    if origin in (typing.Union, types.UnionType):
        found = [problem(each, value, where) for each in typing.get_args(kind)]
        return None if None in found else found[0]
    if origin is list:
        return _items(typing.get_args(kind)[0], value, where)
    if origin is tuple:
        return _pair(typing.get_args(kind), value, where)
    if origin is dict:
        return None if isinstance(value, dict) and all(isinstance(name, str) for name in value) else f"{where} is not an object"
    if typing.is_typeddict(kind):
        return _fields(kind, value, where)
    return _scalar(kind, value, where)


def _scalar(kind: Any, value: Any, where: str) -> str | None:
    if kind is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    elif kind is int:
        good = isinstance(value, int) and not isinstance(value, bool)
    else:
        good = isinstance(value, kind)
    return None if good else f"{where} is not {'a number' if kind in (int, float) else 'text' if kind is str else 'true or false'}"


def _items(kind: Any, value: Any, where: str) -> str | None:
    if not isinstance(value, list):
        return f"{where} is not a list"
    return next((found for i, item in enumerate(value) if (found := problem(kind, item, f"{where}[{i}]"))), None)


def _pair(kinds: tuple[Any, ...], value: Any, where: str) -> str | None:
    if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
        return f"{where} is not a list of {len(kinds)}"
    return next((found for i, kind in enumerate(kinds) if (found := problem(kind, value[i], f"{where}[{i}]"))), None)


def _fields(kind: Any, value: Any, where: str) -> str | None:
    if not isinstance(value, Mapping):
        return f"{where} is not an object"
    known = fields(kind)
    for name in value:
        if name not in known:
            return f"{where} has the unknown field {str(name)[:40]!r}"
    for name, (hint, required) in known.items():
        if name not in value:
            if required:
                return f"{where} has no {name!r}"
        elif found := problem(hint, value[name], f"{where}.{name}"):
            return found
    return None


_FIELDS: dict[Any, dict[str, tuple[Any, bool]]] = {}


def fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Name -> (type, required) of a TypedDict."""
    if kind not in _FIELDS:
        hints = typing.get_type_hints(kind, include_extras=True)
        _FIELDS[kind] = {name: _unwrapped(hint) for name, hint in hints.items()}
    return _FIELDS[kind]


def _unwrapped(hint: Any) -> tuple[Any, bool]:
    optional = typing.get_origin(hint) is NotRequired
    return (typing.get_args(hint)[0], False) if optional else (hint, True)


def command_problem(name: str, args: Any) -> str | None:
    """What is wrong with a command of a front end, or None."""
    if name not in COMMANDS:
        return f"There is no command {name[:40]!r}."
    found = problem(COMMANDS[name], args, "args")
    return f"{found}." if found else None


def json_schema(kind: Any) -> dict[str, Any]:
    """The same as a JSON schema (draft 2020-12), for other tools."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if kind is None or kind is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [json_schema(each) for each in args]}
    if origin is list:
        return {"type": "array", "items": json_schema(args[0])}
    if origin is tuple:
        return {"type": "array", "prefixItems": [json_schema(each) for each in args], "minItems": len(args), "maxItems": len(args)}
    if origin is dict:
        return {"type": "object"}
    if typing.is_typeddict(kind):
        known = fields(kind)
        return {
            "type": "object",
            "properties": {name: json_schema(hint) for name, (hint, _) in known.items()},
            "required": [name for name, (_, required) in known.items() if required],
            "additionalProperties": False,
        }
    return {"type": {str: "string", int: "integer", float: "number", bool: "boolean"}[kind]}
