"""Token tables small enough for a notebook file: columns of numbers as short text. Pure functions; `unpack` undoes `pack`.

A number is written in digits of ALPHABET: below 64 one digit; else the number less 64 goes on, its remainder by 28 first. A
notebook file puts every item of a list on a line of its own, so columns are text. Times and log probabilities are rounded
(a 1/60 of the usual step, 0.001 nats); the rounding of times does not add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .schema import ALPHABET

ENDS, GOES_ON = 64, 28
_VALUE = {digit: value for value, digit in enumerate(ALPHABET)}
_SCORE_UNIT = 0.001
_LARGEST = 2**53 - 1


def write_numbers(values: Iterable[int]) -> str:
    """Whole numbers >= 0 as one text."""
    out: list[str] = []
    for value in values:
        while value >= ENDS:
            value -= ENDS
            out.append(ALPHABET[ENDS + value % GOES_ON])
            value //= GOES_ON
        out.append(ALPHABET[value])
    return "".join(out)


def read_numbers(text: str) -> list[int]:
    """The numbers of a text. Raises ValueError for a text that `write_numbers` did not make."""
    out: list[int] = []
    pending: list[int] = []
    for digit in text:
        value = _VALUE.get(digit, -1)
        if value >= ENDS:
            pending.append(value - ENDS)
            continue
        if value < 0 or len(pending) > 16:
            raise ValueError("not a packed number")
        for rest in reversed(pending):
            value = value * GOES_ON + rest + ENDS
        pending.clear()
        out.append(value)
    if pending:
        raise ValueError("a packed number is cut off")
    return out


def pack(tokens: Sequence[Mapping[str, Any]], alternatives: bool = True) -> dict[str, Any]:
    """The token records as columns (schema.PackedTokens). alternatives: False leaves the `top` of every token out."""
    tops = [token.get("top") or () for token in tokens] if alternatives else []
    distinct = Counter((token["id"], token["text"]) for token in tokens)
    for top in tops:
        distinct.update((other["id"], other["text"]) for other in top)
    order = [pair for pair, _ in distinct.most_common()]
    place = {pair: index for index, pair in enumerate(order)}
    packed: dict[str, Any] = {
        "form": 1,
        "count": len(tokens),
        "ids": write_numbers(token_id for token_id, _ in order),
        "lengths": write_numbers(len(text) for _, text in order),
        "texts": "".join(text for _, text in order),
        "index": write_numbers(place[token["id"], token["text"]] for token in tokens),
        "t": _times([token["t"] for token in tokens]),
        "origin": _runs([token["origin"] for token in tokens]),
    }
    chosen = [position for position, token in enumerate(tokens) if token.get("by_hand")]
    if chosen:
        packed["by_hand"] = write_numbers(here - before for here, before in zip(chosen, [0, *chosen], strict=False))
    if any("logprob" in token for token in tokens):
        packed["scores"] = {
            "unit": _SCORE_UNIT,
            "logprob": write_numbers(_score(token.get("logprob")) for token in tokens),
            "rank": write_numbers(0 if token.get("rank") is None else token["rank"] + 1 for token in tokens),
        }
    if any(tops):
        packed["top"] = {
            "unit": _SCORE_UNIT,
            "count": write_numbers(map(len, tops)),
            "index": write_numbers(place[other["id"], other["text"]] for top in tops for other in top),
            "logprob": write_numbers(_score(other["logprob"]) for top in tops for other in top),
        }
    return packed


def _score(logprob: Any) -> int:
    if logprob is None:
        return 0
    value = float(logprob)
    return 1 if value > 0 or math.isnan(value) else 1 + round(min(-value, 1e6) / _SCORE_UNIT)


def _times(times: Sequence[Any]) -> dict[str, Any]:
    seconds = [float(t) if isinstance(t, (int, float)) and math.isfinite(t) else 0.0 for t in times]
    gaps = sorted(max(0.0, here - before) for here, before in zip(seconds[1:], seconds, strict=False))
    unit = float(f"{max(1e-4, gaps[len(gaps) * 9 // 10] / 60 if gaps else 1e-3):.2e}")
    steps, reached = [], 0
    for t in seconds:
        step = max(0, round(t / unit) - reached)
        reached += step
        steps.append(step)
    return {"unit": unit, "steps": write_numbers(steps)}


def _runs(names: Sequence[str]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return runs


def unpack(packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Token records again, with the rounding that `pack` made. Raises ValueError for a table that is damaged."""
    try:
        return _unpack(packed)
    except (KeyError, IndexError, TypeError, AttributeError) as problem:
        raise ValueError("a packed token table is damaged") from problem


def _unpack(packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    if packed["form"] != 1 or not isinstance(packed["texts"], str):
        raise ValueError("a packed token table of another version")
    distinct, start = [], 0
    for token_id, length in zip(read_numbers(packed["ids"]), read_numbers(packed["lengths"]), strict=True):
        distinct.append((token_id, packed["texts"][start : start + length]))
        start += length
    origins = [name for name, count in packed["origin"] for _ in range(count)]
    tokens: list[dict[str, Any]] = []
    reached = 0
    columns = zip(read_numbers(packed["index"]), read_numbers(packed["t"]["steps"]), origins, strict=True)
    for index, step, origin in columns:
        reached += step
        token_id, text = distinct[index]
        tokens.append({"id": token_id, "text": text, "origin": origin, "t": round(reached * packed["t"]["unit"], 6)})
    if "by_hand" in packed:
        position = 0
        for gap in read_numbers(packed["by_hand"]):
            position += gap
            tokens[position]["by_hand"] = True
    if "scores" in packed:
        scores = packed["scores"]
        for token, score, rank in zip(tokens, read_numbers(scores["logprob"]), read_numbers(scores["rank"]), strict=True):
            if score:
                token |= {"logprob": _nats(score, scores["unit"]), "rank": rank - 1 if rank else None, "top": []}
    if "top" in packed:
        top = packed["top"]
        pairs = iter(zip(read_numbers(top["index"]), read_numbers(top["logprob"]), strict=True))
        for token, count in zip(tokens, read_numbers(top["count"]), strict=True):
            if count:
                here = [next(pairs) for _ in range(count)]
                token["top"] = [{"id": distinct[i][0], "text": distinct[i][1], "logprob": _nats(score, top["unit"])} for i, score in here]
    return tokens


def _nats(score: int, unit: float) -> float:
    return -round((score - 1) * unit, 6) + 0.0


def exact_integers(value: Any) -> Any:
    """The same JSON value with integers that a double cannot hold as text: a front end would round them, and save them rounded."""
    if isinstance(value, bool) or not isinstance(value, (int, Mapping, list, tuple)):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST else str(value)
    if isinstance(value, Mapping):
        return {name: exact_integers(item) for name, item in value.items()}
    return [exact_integers(item) for item in value]
