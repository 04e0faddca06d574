"""An interrupted run <-> the bytes of one file. Pure and strict: no I/O, no MLX, and a file chooses no class and no code path.

    prelude      magic (8 bytes) | format u32 | header length u32                                        little-endian
    header       canonical JSON: the request, the tokens so far, whose run it is, sizes and checksums of the state
    header hash  sha256 over prelude and header
    payload      the arrays of the state, one behind the other; the file ends where the last one ends

It holds what was asked and what was answered so far in plain text, besides their ids: whoever may read the file may read both.
What is decoded encodes to the very same bytes, or it is refused. xxh3-128 finds damage in the payload; nothing here protects from
somebody with this user's rights. Sizes and types of the state are compared with the running model's own by whoever takes it up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, get_args

import xxhash

from ..errors import RequestError
from ..events import Alternative, Origin
from ..types import MAX_SEED, CompletionRequest, Continued, Generated, HlgSpec, Left, Message, RequestId, Resumed, Role, SamplingSpec
from .record import BadRecord, Bytes

MAGIC = b"mlxnb-rs"
FORMAT = 1
MAX_HEADER = 2**26
MAX_FILE = 2**28
_PRELUDE = struct.Struct("<8sII")
_HASH_BYTES = 32
_KEY = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ROLES = get_args(Role)
_ORIGINS = get_args(Origin)
_ANCHORS = ("max", "entropy", "median")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stopped:
    """A run that was interrupted, or would have been had its process ended at that moment.

    request: goes on from there when it is submitted; its `resumed` says whose rest it is. model: its name, for people. at: seconds
    since 1970. ended: the run was stopped; else it was still running when this was noted.
    """

    request: CompletionRequest
    model: str
    at: int
    ended: bool

    def __post_init__(self) -> None:
        if self.request.resumed is None:
            raise ValueError("a request that is the rest of no run")

    @property
    def resumed(self) -> Resumed:
        assert self.request.resumed is not None
        return self.request.resumed

    @property
    def key(self) -> str:
        return self.resumed.key

    @property
    def left(self) -> Left | None:
        return self.resumed.left

    def without_state(self) -> Stopped:
        """The same, to be computed again."""
        resumed = dataclasses.replace(self.resumed, left=None)
        return dataclasses.replace(self, request=dataclasses.replace(self.request, resumed=resumed))


def encode(stopped: Stopped) -> bytes:
    """Its record. Raises ValueError for what a record cannot hold."""
    head = _head(stopped)
    left = stopped.left
    size = len(head) + (left.nbytes if left is not None else 0)
    if len(head) > MAX_HEADER or size > MAX_FILE:
        raise ValueError(f"a record of {size:,} bytes, its header of {len(head):,}")
    return b"".join([head, *((*left.tail, *left.recurrent) if left is not None else ())])


def decode(raw: Bytes) -> Stopped:
    """The run in these bytes; its state is views of them. Raises BadRecord unless every byte is as it must be."""
    view = memoryview(raw)
    header, start = _header(view)
    try:
        fields = json.loads(header)
        stopped = _stopped(_fields(fields, "at", "ended", "left", "model", "request", "resumed", "tokens"), view[start:])
        same = _head(stopped) == view[:start]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, RequestError) as error:
        raise BadRecord(f"its header is no interrupted run: {error}") from error
    if not same:
        raise BadRecord("its header is not written as it must be")
    return stopped


# -- bytes -------------------------------------------------------------------------------------------------------------


def _head(stopped: Stopped) -> bytes:
    header = _json(_plain(stopped))
    prelude = _PRELUDE.pack(MAGIC, FORMAT, len(header))
    return prelude + header + hashlib.sha256(prelude + header).digest()


def _header(view: memoryview) -> tuple[bytes, int]:
    """The header, and where the payload starts, once prelude and hash are right."""
    if not _PRELUDE.size <= len(view) <= MAX_FILE:
        raise BadRecord(f"it has {len(view)} bytes")
    magic, number, length = _PRELUDE.unpack(view[: _PRELUDE.size])
    if magic != MAGIC or number != FORMAT:
        raise BadRecord("it is no record of an interrupted run in this format")
    stop = _PRELUDE.size + length
    if length > MAX_HEADER or stop + _HASH_BYTES > len(view):
        raise BadRecord("it ends within the header")
    if hashlib.sha256(view[:stop]).digest() != view[stop : stop + _HASH_BYTES]:
        raise BadRecord("the header does not match its hash")
    return bytes(view[_PRELUDE.size : stop]), stop + _HASH_BYTES


def _json(value: object) -> bytes:
    """Canonical: the same value gives the same bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


# -- writing -----------------------------------------------------------------------------------------------------------


def _plain(stopped: Stopped) -> dict[str, Any]:
    request, resumed = stopped.request, stopped.resumed
    return {
        "at": stopped.at,
        "ended": stopped.ended,
        "left": _plain_left(stopped.left),
        "model": stopped.model,
        "request": {
            "dtype": request.dtype,
            "id": request.id,
            "max_tokens": request.max_tokens,
            "messages": None if request.messages is None else [_plain_message(m) for m in request.messages],
            "model": request.model,
            "open_fields": list(request.open_fields),
            "prefill": request.prefill,
            "sampling": _plain_sampling(request.sampling),
            "session": request.session,
            "stop": list(request.stop),
            "text": request.text,
            "thinking": request.thinking,
        },
        "resumed": {
            "cached_tokens": resumed.cached_tokens,
            "explicit": resumed.explicit,
            "given": resumed.given,
            "key": resumed.key,
            "policy": [list(pair) for pair in resumed.policy],
            "prompt": list(resumed.prompt),
            "seed": resumed.seed,
            "ssd_tokens": resumed.ssd_tokens,
            "stable": resumed.stable,
        },
        "tokens": [_plain_token(token) for token in request.continuation],
    }


def _plain_left(left: Left | None) -> dict[str, Any] | None:
    if left is None:
        return None
    tail, recurrent = ([[part.nbytes, xxhash.xxh3_128_hexdigest(part)] for part in parts] for parts in (left.tail, left.recurrent))
    return {"length": left.length, "recurrent": recurrent, "start": left.start, "tail": tail}


def _plain_message(message: Message) -> dict[str, Any]:
    made = message.generated
    generated = None if made is None else {"ids": list(made.ids), "start": made.start}
    return {"content": message.content, "generated": generated, "role": message.role}


def _plain_sampling(spec: SamplingSpec) -> dict[str, Any]:
    plain = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    plain["logit_bias"] = [list(pair) for pair in spec.logit_bias]
    if spec.hlg is not None:
        curve = dataclasses.asdict(spec.hlg)
        plain["hlg"] = curve | {"width": "inf" if curve["width"] == math.inf else curve["width"]}
    return plain


def _plain_token(token: Continued) -> list[Any]:
    top = [[one.id, one.text, one.logprob] for one in token.top]
    return [token.id, token.origin, token.by_hand, token.logprob, token.rank, top]


# -- reading: anything may be wrong with what comes from a file ----------------------------------------------------------


def _stopped(header: Mapping[str, Any], payload: memoryview) -> Stopped:
    left = None if header["left"] is None else _left(header["left"], payload)
    if left is None and payload.nbytes:
        raise ValueError("bytes behind its end")
    resumed = _resumed(header["resumed"], left)
    tokens = tuple(_token(token) for token in _list(header["tokens"]))
    request = _request(header["request"], tokens, resumed)
    if not 0 <= resumed.given <= len(tokens) or not 0 <= resumed.stable <= len(resumed.prompt):
        raise ValueError("counts that do not fit")
    if left is not None and not left.length < len(resumed.prompt) + len(tokens):
        raise ValueError("state of more tokens than there are")
    return Stopped(request, _text(header["model"]), _whole(header["at"]), _flag(header["ended"]))


def _left(value: Any, payload: memoryview) -> Left:
    fields = _fields(value, "length", "recurrent", "start", "tail")
    start, length = _whole(fields["start"]), _whole(fields["length"])
    if start % 64 or not 0 <= length - start <= 64:
        raise ValueError(f"state from {start} to {length}")
    at, parts = 0, []
    for entry in (*_list(fields["tail"]), *_list(fields["recurrent"])):
        nbytes, digest = _list(entry, 2)
        part = payload[at : at + _whole(nbytes)]
        if part.nbytes != nbytes or xxhash.xxh3_128_hexdigest(part) != digest:
            raise ValueError("state that does not match its checksum")
        parts.append(part)
        at += nbytes
    if at != payload.nbytes:
        raise ValueError("bytes behind its end")
    own = len(fields["tail"])
    return Left(start, length, tuple(parts[:own]), tuple(parts[own:]))


def _resumed(value: Any, left: Left | None) -> Resumed:
    names = ("cached_tokens", "explicit", "given", "key", "policy", "prompt", "seed", "ssd_tokens", "stable")
    fields = _fields(value, *names)
    policy = tuple((_text(name), _matching(_DIGEST, digest)) for name, digest in (_list(pair, 2) for pair in _list(fields["policy"])))
    prompt = _ids(fields["prompt"])
    if not prompt or _whole(fields["seed"]) > MAX_SEED:
        raise ValueError("no prompt, or no seed")
    counts = {name: _whole(fields[name]) for name in ("given", "cached_tokens", "ssd_tokens", "stable")}
    return Resumed(_matching(_KEY, fields["key"]), fields["seed"], _flag(fields["explicit"]), policy, prompt, left=left, **counts)


def _request(value: Any, tokens: tuple[Continued, ...], resumed: Resumed) -> CompletionRequest:
    names = ("dtype", "id", "max_tokens", "messages", "model", "open_fields", "prefill")
    fields = _fields(value, *names, "sampling", "session", "stop", "text", "thinking")
    request = CompletionRequest(
        id=RequestId(_text(fields["id"])),
        model=_text(fields["model"]),
        messages=_maybe(lambda found: tuple(_message(m) for m in _list(found)), fields["messages"]),
        text=_maybe(_text, fields["text"]),
        prefill=_text(fields["prefill"]),
        thinking=_maybe(_flag, fields["thinking"]),
        max_tokens=_whole(fields["max_tokens"]),
        stop=tuple(_text(stop) for stop in _list(fields["stop"])),
        sampling=_sampling(fields["sampling"]),
        dtype=_maybe(_text, fields["dtype"]),
        open_fields=tuple(_text(name) for name in _list(fields["open_fields"])),
        continuation=tokens,
        resumed=resumed,
        session=_maybe(_text, fields["session"]),
    )
    request.validate()
    return request


def _message(value: Any) -> Message:
    fields = _fields(value, "content", "generated", "role")
    made = _maybe(lambda found: _fields(found, "ids", "start"), fields["generated"])
    generated = None if made is None else Generated(_ids(made["ids"]), _whole(made["start"]))
    role: Any = _one_of(_ROLES, fields["role"])
    return Message(role, _text(fields["content"]), generated)


def _sampling(value: Any) -> SamplingSpec:
    fields = dict(_fields(value, *(field.name for field in dataclasses.fields(SamplingSpec))))
    fields["logit_bias"] = tuple((_whole(token), _number(bias)) for token, bias in (_list(pair, 2) for pair in _list(fields["logit_bias"])))
    fields["hlg"] = _maybe(_curve, fields["hlg"])
    return SamplingSpec(**fields)  # `request.validate` looks at the numbers


def _curve(value: Any) -> HlgSpec:
    fields = _fields(value, *(field.name for field in dataclasses.fields(HlgSpec)))
    width = math.inf if fields["width"] == "inf" else _number(fields["width"])
    numbers = {name: _number(fields[name]) for name in ("toe", "head", "offset")}
    anchor: Any = _one_of(_ANCHORS, fields["anchor"])
    return HlgSpec(gain=_maybe(_number, fields["gain"]), width=width, anchor=anchor, **numbers)


def _token(value: Any) -> Continued:
    token, origin, by_hand, logprob, rank, top = _list(value, 6)
    alternatives = tuple(Alternative(_id(i), _text(text), _number(p)) for i, text, p in (_list(one, 3) for one in _list(top)))
    captured = _maybe(_number, logprob), _maybe(_whole, rank)
    return Continued(_id(token), _one_of(_ORIGINS, origin), _flag(by_hand), *captured, alternatives)


def _fields(value: Any, *names: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        _refuse(value, f"an object of {', '.join(names)}")
    return value


def _list(value: Any, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        _refuse(value, "a list" if length is None else f"a list of {length}")
    return value


def _maybe(read: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else read(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        _refuse(value, "a whole number")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        _refuse(value, "a number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(value, "true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _refuse(value, "text")
    return value


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        _refuse(value, "a name in hex")
    return value


def _one_of(words: Iterable[str], value: Any) -> str:
    if value not in words:
        _refuse(value, "one of some words")
    return str(value)


def _id(value: Any) -> Any:
    if _whole(value) >= 2**31:
        _refuse(value, "a token id")
    return value


def _ids(value: Any) -> tuple[Any, ...]:
    return tuple(_id(one) for one in _list(value))


def _refuse(value: Any, wanted: str) -> NoReturn:
    raise ValueError(f"{str(value)[:40]!r} where there must be {wanted}")
