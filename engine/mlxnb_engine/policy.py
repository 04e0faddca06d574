"""`Policy`: what a request asks for, resolved once from four layers: built-in < model < notebook < cell.

Pure values, no clock, no I/O. The three layers that are known when a cell runs are resolved by `resolve`; the model's own
defaults are known only once it is loaded, so the fields that no other layer chose travel as `CompletionRequest.open_fields`
and the engine fills them with `with_model`. That way the first cell and the tenth get the same settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from .errors import RequestError
from .types import CompletionRequest, HlgSpec, SamplingSpec

Layer = Literal["default", "model", "notebook", "cell"]

_HLG = {f"hlg_{f.name}": f.default for f in fields(HlgSpec)}
# `explain` is asked for by `client.inspect`, not a setting of a cell.
_SAMPLING = {f.name: f.default for f in fields(SamplingSpec) if f.name not in ("hlg", "explain")}
_REQUEST: dict[str, Any] = {
    "model": "",
    "dtype": None,
    "system": None,
    "prefill": "",
    "thinking": None,
    "samples": 1,
    "max_tokens": 512,
    "stop": (),
}
DEFAULTS: Mapping[str, Any] = {**_REQUEST, **_SAMPLING, **_HLG}
"""Every field of a policy with its built-in value. `model` "" is the default model of the engine."""

SWEEPABLE: tuple[str, ...] = ("max_tokens", *(name for name in _SAMPLING if name not in ("logit_bias", "logprobs")), *_HLG)

_FROM_GENERATION_CONFIG = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
_NEEDS_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
MODEL_FIELDS = frozenset(_FROM_GENERATION_CONFIG.values())
"""What a model's files may set: nothing that changes which text is asked for or how much of it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Resolved values and, for each, the layer that chose it. Invariant: both have exactly the names of `DEFAULTS`."""

    values: Mapping[str, Any]
    source: Mapping[str, Layer]

    def sampling(self) -> SamplingSpec:
        """The part that the sampler reads. HLG is on iff a layer gave one of its settings."""
        return _spec({name: self.values[name] for name in (*_SAMPLING, *_HLG)}, any(self.source[name] != "default" for name in _HLG))

    @property
    def open_fields(self) -> tuple[str, ...]:
        """Fields left to the model's own defaults."""
        return tuple(name for name in sorted(MODEL_FIELDS) if self.source[name] == "default")


def resolve(
    *,
    model: Mapping[str, Any] | None = None,
    notebook: Mapping[str, Any] | None = None,
    cell: Mapping[str, Any] | None = None,
) -> Policy:
    """Later layers win, field by field. A layer has only what it sets.

    Raises RequestError for a name that is no field, for a value out of range in whichever layer it is, and for an HLG curve in
    the cell when no layer sets a temperature (greedy choice would ignore it); what a model's
    files say is untrusted and merely ignored if it is wrong.
    """
    values = dict(DEFAULTS)
    source: dict[str, Layer] = dict.fromkeys(DEFAULTS, "default")
    layers: tuple[tuple[Layer, Mapping[str, Any]], ...] = (
        ("model", model_layer(model or {})),
        ("notebook", notebook or {}),
        ("cell", cell or {}),
    )
    for layer, given in layers:
        for name, value in given.items():
            check(name, value)
            values[name], source[name] = value, layer
    if source["temp"] == "default" and any(source[name] == "cell" for name in _HLG):
        raise RequestError("An HLG curve shapes sampling, and nothing here sets a temperature.", "Add one: --temp 0.7 (temp=0.7).")
    return Policy(values, source)


def check(name: str, value: Any) -> None:
    """Raise RequestError if this is no field or the value is out of range on its own."""
    if name not in DEFAULTS:
        close = difflib.get_close_matches(name, DEFAULTS, n=1, cutoff=0.5)
        raise RequestError(f"There is no setting {name!r}.", f"Did you mean {close[0]!r}?" if close else "See `%mlx config`.")
    if name in _HLG:
        _check_hlg(name, value)
    elif name in _SAMPLING:
        _spec({name: value}, hlg=False).validate()
    elif name == "max_tokens" and not (_whole(value) and value >= 0):
        raise RequestError(f"max_tokens={value!r} is out of range.", "It must be a whole number >= 0.")
    elif name == "samples" and not (_whole(value) and 1 <= value <= 256):
        raise RequestError(f"samples={value!r} is out of range.", "Ask for 1 to 256 samples.")
    elif name in ("model", "prefill") and not isinstance(value, str):
        raise RequestError(f"{name}={value!r} is no text.", "Give a string.")
    elif name in ("dtype", "system") and not (value is None or isinstance(value, str)):
        raise RequestError(f"{name}={value!r} is no text.", "Give a string, or None.")
    elif name == "thinking" and not (value is None or isinstance(value, bool)):
        raise RequestError(f"thinking={value!r} is out of range.", "It must be on, off or None.")


def model_layer(defaults: Mapping[str, Any], only: Collection[str] = MODEL_FIELDS) -> dict[str, Any]:
    """The valid part of what a model says about sampling, in our names.

    defaults: our own names, or those of a `generation_config.json`, where `do_sample: false` switches the temperature and the
    filters off. Unknown names and values out of range are left out.
    """
    layer: dict[str, Any] = {}
    for name, value in defaults.items():
        field = _FROM_GENERATION_CONFIG.get(name, name)
        if field not in only or field not in MODEL_FIELDS or value is None:
            continue
        if name in _NEEDS_SAMPLING and defaults.get("do_sample") is False:
            continue
        try:
            check(field, value)
        except RequestError:
            continue
        layer[field] = value
    return layer


def prefill_chunk(default: int, *, heads: int, context: int, fused: bool) -> int:
    """Tokens of one prefill window of a request, resolved when it is admitted.

    default: the backend's chunk. heads: query heads. context: positions that the prompt will hold. fused: whether attention of
    this head width never materialises its scores; otherwise the chunk is halved, not below 8, until the 16-bit scores
    `heads * chunk * context * 2` take at most 2^30 bytes. It never looks at free memory and never refuses.
    """
    chunk = default
    while not fused and chunk > 8 and heads * chunk * context * 2 > 2**30:
        chunk //= 2
    return chunk


def with_model(request: CompletionRequest, defaults: Mapping[str, Any]) -> CompletionRequest:
    """The request with its open fields taken from the model. Called once by the engine, when the model is loaded."""
    layer = model_layer(defaults, request.open_fields)
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **layer), open_fields=())


def _spec(values: Mapping[str, Any], hlg: bool) -> SamplingSpec:
    curve = HlgSpec(**{name.removeprefix("hlg_"): values[name] for name in _HLG}) if hlg else None
    return SamplingSpec(**{name: value for name, value in values.items() if name in _SAMPLING}, hlg=curve)


def _check_hlg(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    rules: dict[str, tuple[bool, str]] = {
        "hlg_gain": (value is None or (number and 0 < value < math.inf), "a number > 0"),
        "hlg_width": (number and value >= 0, "a number >= 0, in nats"),
        "hlg_toe": (number and math.isfinite(value), "a finite number; <= 0 switches the toe off"),
        "hlg_head": (number and math.isfinite(value), "a finite number; <= 0 switches the head off"),
        "hlg_anchor": (value in ("max", "entropy", "median"), "max, entropy or median"),
        "hlg_offset": (number and math.isfinite(value), "a finite number, in nats"),
    }
    good, rule = rules[name]
    if not good:
        raise RequestError(f"{name}={value!r} is out of range.", f"It must be {rule}.")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
