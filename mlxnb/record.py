"""The RunRecord: a run as plain JSON values, the form that is stored and that views draw. Data only, never HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mlxnb_engine import events as ev
from mlxnb_engine.types import CompletionRequest

from .packing import exact_integers, pack
from .schema import GROUP_SCHEMA, MAX_TABLE_BYTES, RUN_SCHEMA


def record(request: CompletionRequest, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A record of this request with these facts about its run. A number that JSON has not is "inf", "-inf" or "nan".

    facts: `tokens` are made by `token_record`, and plain already.
    """
    plainly = {key: value if key == "tokens" else plain(value) for key, value in facts.items()}
    return {"schema": RUN_SCHEMA, **plainly, **asked(request)}


def asked(request: CompletionRequest) -> dict[str, Any]:
    """The part of a record that never changes: the options and the prompt."""
    return {"request": plain(request_options(request)), "prompt": plain(_prompt_record(request))}


def request_options(request: CompletionRequest) -> dict[str, Any]:
    """The options of a request as JSON values, prompt left out. Of tokens it goes on from only how many: they are in the run."""
    options = asdict(replace(request, messages=None, text=None, continuation=(), resumed=None))
    for name in ("messages", "text", "prefill", "id", "continuation", "resumed", "session"):
        options.pop(name)
    if request.resumed is not None:
        options["resumed"] = len(request.continuation)
    given = len(request.continuation) if request.resumed is None else request.resumed.given
    if given:
        options["continued"] = given
    return options


def _prompt_record(request: CompletionRequest) -> dict[str, Any]:
    messages = None if request.messages is None else [{"role": m.role, "content": m.content} for m in request.messages]
    return {"messages": messages, "text": request.text, "prefill": request.prefill}


def token_record(token: ev.TokenRecord) -> dict[str, Any]:
    """A token in plain values, without the fields that were not captured."""
    record: dict[str, Any] = {"id": token.id, "text": _without_surrogates(token.text), "origin": token.origin, "t": round(token.t, 6)}
    if token.by_hand:
        record["by_hand"] = True
    if token.logprob is not None:
        top = [{"id": one.id, "text": _without_surrogates(one.text), "logprob": plain(one.logprob)} for one in token.top]
        record |= {"logprob": plain(token.logprob), "rank": token.rank, "top": top}
    return record


def group_record(runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> dict[str, Any]:
    """The record of several runs. labels: a heading for each."""
    return {"schema": GROUP_SCHEMA, "runs": list(runs), "labels": [plain(label) for label in labels]}


TOO_LARGE = "The tokens were too many to save with this output: more than {} kB."
NO_ALTERNATIVES = "The alternatives of each token were too many to save with this output."


def saved(record: Mapping[str, Any], extra: Mapping[str, str] | None = None, budget: int = MAX_TABLE_BYTES) -> dict[str, Any]:
    """A run or group record as it goes into a notebook file or a view: token tables packed, exact in JavaScript.

    extra: `key` and `view`. budget: bytes for the tables of all its runs, in equal shares. A table over its share loses its
    alternatives, then goes altogether, and `tokens_note` says so.
    """
    runs = record.get("runs")
    if runs is None:
        return {**_packed(record, budget), **(extra or {})}
    share = budget // max(1, len(runs))
    return {**record, "runs": [_packed(run, share) for run in runs], **(extra or {})}


def _packed(record: Mapping[str, Any], budget: int) -> dict[str, Any]:
    tokens = record["tokens"]
    rest = {name: value if name in ("text", "prompt") else exact_integers(value) for name, value in record.items() if name != "tokens"}
    if not tokens:
        return {**rest, "tokens": tokens}
    table, note = pack(tokens), ""
    if size(table) > budget and "top" in table:
        table, note = pack(tokens, alternatives=False), NO_ALTERNATIVES
    if size(table) > budget:
        return {**rest, "tokens": None, "tokens_note": TOO_LARGE.format(budget // 1024)}
    if "".join(token["text"] for token in tokens) == record["text"]:
        rest["text"] = None  # the table has it
    return {**rest, "tokens": table, **({"tokens_note": note} if note else {})}


def size(value: Any) -> int:
    """Bytes as JSON in UTF-8."""
    return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def label_of(labels: Mapping[str, Any], index: int) -> str:
    """The labels of a run as a heading: `temp 0.7, sample 2`. The index of an item is for the frame; its other columns tell it here."""
    labels = {name: value for name, value in labels.items() if name != "index"} or labels
    return ", ".join(f"{name} {short_value(value)}" for name, value in labels.items()) or f"sample {index}"


def short_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    shown = str(value).replace("\n", " ")
    return shown if len(shown) <= 60 else shown[:57] + "..."


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
    if value.isascii():
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value
