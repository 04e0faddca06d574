"""The RunRecord: a run as plain JSON values, the form that is stored and that views draw. Data only, never HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mlxnb_engine import events as ev
from mlxnb_engine.types import CompletionRequest

SCHEMA = "mlxnb.run/1"


def record(request: CompletionRequest, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A record of this request with these facts about its run. A number that JSON has not is "inf", "-inf" or "nan"."""
    whole = {"schema": SCHEMA, **facts, "request": request_options(request), "prompt": _prompt_record(request)}
    return {key: plain(value) for key, value in whole.items()}


def request_options(request: CompletionRequest) -> dict[str, Any]:
    """The options of a request as JSON values, prompt left out."""
    options = asdict(request)
    for name in ("messages", "text", "prefill", "id"):
        options.pop(name)
    return options


def _prompt_record(request: CompletionRequest) -> dict[str, Any]:
    messages = None if request.messages is None else [{"role": m.role, "content": m.content} for m in request.messages]
    return {"messages": messages, "text": request.text, "prefill": request.prefill}


def token_record(token: ev.TokenRecord) -> dict[str, Any]:
    """A token without the fields that were not captured."""
    record: dict[str, Any] = {"id": token.id, "text": token.text, "origin": token.origin, "t": round(token.t, 6)}
    if token.logprob is not None:
        record |= {"logprob": token.logprob, "rank": token.rank, "top": [asdict(alternative) for alternative in token.top]}
    return record


def plain(value: Any) -> Any:
    """A JSON value of anything: mappings, sequences and scalars as they are, an array scalar by `item()`, the rest as text."""
    if value is None or isinstance(value, (bool, int, str)):
        return _without_surrogates(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {_without_surrogates(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return plain(item())
    return _without_surrogates(str(value))


def _without_surrogates(value: str) -> str:
    """A lone surrogate cannot be encoded as UTF-8, so it would break the notebook file."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
