"""Prompt and options of a Python call to one validated request. Pure; every refusal names what to write instead."""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, get_args

from mlxnb_engine import policy
from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import CompletionRequest, Message, RequestId, Role

Prompt = str | Sequence[Mapping[str, str] | Message]
ROLES: tuple[str, ...] = get_args(Role)


class Options(TypedDict, total=False):
    """What `generate` and its siblings take. Left out: the model's own default, else the built-in one.

    n: samples of one prompt, as rows of one batch. template: False sends the prompt as raw text. prefill: start of the answer.
    thinking: None leaves it to the chat template. logprobs: also keep the k likeliest tokens at each position.
    """

    n: int
    system: str | None
    template: bool
    prefill: str
    thinking: bool | None
    max_tokens: int
    stop: str | Sequence[str]
    seed: int | None
    logprobs: int | None
    temp: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float | None
    repetition_context_size: int
    presence_penalty: float | None
    presence_context_size: int
    frequency_penalty: float | None
    frequency_context_size: int
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    hlg_gain: float | None
    hlg_width: float
    hlg_toe: float
    hlg_head: float
    hlg_anchor: str
    hlg_offset: float


OPTION_NAMES: tuple[str, ...] = tuple(Options.__annotations__)
_ELSEWHERE = {
    "samples": "In Python it is n.",
    "no_template": "In Python it is template=False.",
    "temperature": "It is temp.",
    "max_new_tokens": "It is max_tokens.",
    "top_logprobs": "It is logprobs.",
    "model": "Another model: mlxnb.load(NAME).",
    "dtype": "The type of the weights: mlxnb.load(NAME, dtype=TYPE).",
    "each": "Many prompts: batch([...]).",
    "sweep": "Several values: one call for each, with wait=False.",
    "bg": "To return at once: wait=False.",
    "chat": "In Python: mlxnb.load().chat(NAME).send(...).",
    "after": "In Python: chat.after(TURN).send(...).",
    "view": "How it is shown: run.show(VIEW).",
}
"""Names that mean something in a cell or in another library, and what takes their place here."""


class UnknownOption(RequestError, TypeError):
    """A keyword that no call takes. Also a TypeError, as Python's own would be."""


def build_request(prompt: Prompt, options: Mapping[str, Any]) -> CompletionRequest:
    """One validated request of a prompt and options (names of `Options`, `model`, `dtype`). Raises RequestError."""
    given = dict(options)
    model, dtype = given.pop("model", ""), given.pop("dtype", None)
    check_names(given)
    template, system = given.pop("template", True), given.pop("system", None)
    prefill = checked_text(given.pop("prefill", ""), "prefill")
    cell = {"samples" if name == "n" else name: _value(name, value) for name, value in given.items()}
    chosen = policy.resolve(cell=cell)
    text = None if template else _raw_text(prompt, system)
    request = CompletionRequest(
        id=RequestId(uuid.uuid4().hex[:12]),
        model=model,
        messages=_messages(prompt, system) if template else None,
        text=text,
        prefill=prefill,
        thinking=chosen.values["thinking"],
        samples=chosen.values["samples"],
        max_tokens=chosen.values["max_tokens"],
        stop=chosen.values["stop"],
        sampling=chosen.sampling(),
        dtype=dtype,
        open_fields=tuple(sorted(chosen.open_fields)),
    )
    request.validate()
    return request


def check_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTION_NAMES:
            near = difflib.get_close_matches(name, OPTION_NAMES, n=1, cutoff=0.5)
            guess = f"Did you mean {near[0]!r}?" if near else f"Options are {', '.join(OPTION_NAMES)}."
            raise UnknownOption(f"There is no option {name!r}.", _ELSEWHERE.get(name, guess))


def _value(name: str, value: Any) -> Any:
    """An option in the shape the policy expects."""
    if name == "stop":
        strings = (value,) if isinstance(value, str) else value
        if not isinstance(strings, Sequence) or not all(isinstance(item, str) for item in strings):
            raise RequestError(f"stop={value!r} is not a string or a list of strings.", 'For example stop=["\\n\\n"].')
        return tuple(strings)
    if name == "logit_bias":
        try:
            return tuple(sorted(dict(value or ()).items()))
        except (TypeError, ValueError):
            raise RequestError(f"logit_bias={value!r} is not a mapping of token ids to numbers.", "For example {42: -100.0}.") from None
    return value


def _messages(prompt: Prompt, system: str | None) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        turns = [Message("user", prompt)]
    elif isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Mapping)):
        turns = [_message(item, index) for index, item in enumerate(prompt)]
    else:
        raise RequestError(
            f"A prompt is a string or a list of messages, not {type(prompt).__name__}.", 'A message is {"role": "user", "content": "..."}.'
        )
    if not turns:
        raise RequestError("The list of messages is empty.", 'Give at least {"role": "user", "content": "..."}.')
    if system is not None:
        if turns[0].role == "system":
            raise RequestError("There are two system messages.", "Give either system= or a first message with role 'system'.")
        turns.insert(0, Message("system", checked_text(system, "system")))
    if not turns[-1].content.strip():
        raise RequestError("The prompt is empty.", "Write what the model should answer.")
    return tuple(turns)


def _message(item: Any, index: int) -> Message:
    """One message of a list, checked. Raises RequestError that names its place."""
    generated = item.generated if isinstance(item, Message) else None
    if isinstance(item, Message):
        item = {"role": item.role, "content": item.content}
    if not isinstance(item, Mapping):
        raise RequestError(f"Message {index} is {type(item).__name__}, not a dict.", 'A message is {"role": "user", "content": "..."}.')
    for name in ("role", "content"):
        if name not in item:
            raise RequestError(f"Message {index} has no {name!r}.", 'A message is {"role": "user", "content": "..."}.')
    extra = [name for name in item if name not in ("role", "content")]
    if extra:
        raise RequestError(f"Message {index} has {extra[0]!r}, which is not understood.", "A message has 'role' and 'content' only.")
    role = item["role"]
    if role not in ROLES:
        raise RequestError(f"Message {index} has the role {role!r}.", f"Roles are {', '.join(ROLES)}.")
    return Message(role, checked_text(item["content"], f"The content of message {index}"), generated)


def _raw_text(prompt: Prompt, system: str | None) -> str:
    if system is not None:
        raise RequestError("A raw completion has no system message.", "Leave system away, or template=False.")
    if not isinstance(prompt, str):
        raise RequestError("A raw completion takes a string.", "Leave template=False away to send messages.")
    return prompt


def checked_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{what} is {type(value).__name__}, not text.", "Convert it with str().")
    return value


def prompt_text(request: CompletionRequest) -> str:
    return request.text if request.text is not None else request.messages[-1].content if request.messages else ""
