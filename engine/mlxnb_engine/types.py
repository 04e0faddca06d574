"""Frozen values that cross threads and layers. No MLX, no text processing, no defaults policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

from .errors import RequestError
from .events import Alternative, TokenRecord

RequestId = NewType("RequestId", str)
TokenId = NewType("TokenId", int)

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
StateKind = Literal["full", "sliding", "recurrent", "unused"]

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 50
MAX_STOPS = 256
MAX_STOP_CHARS = 16_384
"""Stop strings are looked for on the engine thread, at every character."""
LARGEST_SCORE = 1e30
"""Biases and penalties beyond it would leave float32 no finite score."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The ids by which a model wrote an answer, since encoding its text anew may give others.

    ids: in order, without the end-of-text token. start: characters of the content before what they wrote (a prefill). Of the
    text they spell the content has all, or its beginning where a stop string cut it.
    """

    ids: tuple[TokenId, ...]
    start: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation as text. generated: how the model wrote it; messages that say the same are equal without it."""

    role: Role
    content: str
    generated: Generated | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class HlgSpec:
    """Hybrid log-gamma tone curve in place of temperature (semantics section 3). All in nats.

    gain: slope m of the middle part, None is 1/T. width: half width w of the linear part.
    toe, head: softness of the lower and upper part. anchor: what mu is measured from; offset: for "max".
    """

    gain: float | None = None
    width: float = math.inf
    toe: float = 1.0
    head: float = 1.0
    anchor: Literal["max", "entropy", "median"] = "max"
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How one row chooses tokens. Names and meanings are mlx-lm's; 0 or None switches a filter off."""

    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()
    hlg: HlgSpec | None = None
    seed: int | None = None
    logprobs: int | None = None
    """None: not captured. k >= 0: the chosen token's log probability and the k likeliest alternatives."""
    explain: int = 0
    """0: off. k >= 1: every stage of the choice (scores, penalties, filters, scale, noise) for the k likeliest tokens."""

    def validate(self) -> None:
        """Raise RequestError naming the first field that is out of range (vocabulary checks come later)."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("temp", _finite(self.temp) and self.temp >= 0, "a number >= 0"),
            ("top_p", _finite(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]; 1 switches it off"),
            ("top_k", _whole(self.top_k) and self.top_k >= 0, "a whole number >= 0; 0 switches it off"),
            ("min_p", _finite(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]"),
            ("min_tokens_to_keep", _whole(self.min_tokens_to_keep) and self.min_tokens_to_keep >= 1, "a whole number >= 1"),
            ("xtc_probability", _finite(self.xtc_probability) and 0 <= self.xtc_probability <= 1, "in [0, 1]"),
            ("xtc_threshold", _finite(self.xtc_threshold) and 0 <= self.xtc_threshold <= 0.5, "in [0, 0.5]"),
            ("repetition_penalty", _optional(self.repetition_penalty, least=1e-6, most=1e6), "a number from 1e-6 to 1e6"),
            ("presence_penalty", _optional(self.presence_penalty), "a number from -1e6 to 1e6"),
            ("frequency_penalty", _optional(self.frequency_penalty), "a number from -1e6 to 1e6"),
            ("explain", _whole(self.explain) and 0 <= self.explain <= MAX_TOP_LOGPROBS, f"in [0, {MAX_TOP_LOGPROBS}]"),
            ("seed", self.seed is None or (_whole(self.seed) and 0 <= self.seed <= MAX_SEED), "in [0, 2^64)"),
            (
                "logprobs",
                self.logprobs is None or (_whole(self.logprobs) and 0 <= self.logprobs <= MAX_TOP_LOGPROBS),
                f"in [0, {MAX_TOP_LOGPROBS}]",
            ),
        )
        for name, good, rule in checks:
            if not good:
                raise RequestError(f"{name}={getattr(self, name)!r} is out of range.", f"It must be {rule}.")
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            if not _whole(getattr(self, name)) or not 0 <= getattr(self, name) < 2**31:
                raise RequestError(f"{name}={getattr(self, name)!r} is out of range.", "It must be in [0, 2^31); 0 means all.")
        for token, bias in self.logit_bias:
            if not _whole(token) or token < 0 or not _finite(bias):
                raise RequestError(
                    f"logit_bias {token!r}: {bias!r} is not a token id with a number.",
                    "Numbers go from -1e30 to 1e30; -100 all but bans a token.",
                )


def _finite(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and -LARGEST_SCORE <= x <= LARGEST_SCORE


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _optional(x: float | None, least: float = -1e6, most: float = 1e6) -> bool:
    return x is None or (_finite(x) and least <= x <= most)


@dataclass(frozen=True, slots=True)
class Continued:
    """A token that an earlier run produced, or (by_hand) that a person chose, and that this run goes on from.

    logprob, rank, top: as that run captured them (`events.TokenRecord`).
    """

    id: TokenId
    origin: str = "sampled"
    by_hand: bool = False
    logprob: float | None = None
    rank: int | None = None
    top: tuple[Alternative, ...] = ()

    @classmethod
    def of(cls, token: TokenRecord) -> Continued:
        return cls(TokenId(token.id), token.origin, token.by_hand, token.logprob, token.rank, token.top)


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """State that a row left behind when it was interrupted, as host bytes: nothing of it is computed again.

    length: tokens that it had consumed. start: of those, in whole blocks of the prefix cache. tail: K and V of the others, 64 at
    most, per layer. recurrent: recurrent state right after them. Both in the order of the model's own layout.
    """

    start: int
    length: int
    tail: tuple[memoryview, ...]
    recurrent: tuple[memoryview, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.tail, *self.recurrent))


@dataclass(frozen=True, slots=True)
class Resumed:
    """What makes a run that goes on from tokens the same run that was interrupted.

    key: names the run over all its interruptions, 32 hex digits. seed: the one in force; explicit: whether it was asked for.
    policy: (what, digest) pairs of all that decides what is drawn; going on under another one is refused.
    prompt: its ids, of which `stable` outlast the answer. given: of the tokens those that the run itself went on from.
    cached_tokens, ssd_tokens: what of its prompt it had taken from the prefix cache. left: state to take up; None: compute it.
    """

    key: str
    seed: int
    explicit: bool
    policy: tuple[tuple[str, str], ...]
    prompt: tuple[TokenId, ...]
    stable: int = 0
    given: int = 0
    cached_tokens: int = 0
    ssd_tokens: int = 0
    left: Left | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One semantic request, as the notebook or the Python API states it. It becomes `samples` rows.

    Exactly one of `messages` (chat template applied) and `text` (raw completion) is set.
    prefill: start of the assistant's answer, part of the prompt. thinking: None leaves the template's default.
    stop: text stop strings; they may span token boundaries and are never delivered.
    continuation: produced tokens to go on from; they count towards max_tokens, and the draws that follow are those of their
        own positions, so that a run continued from its own tokens repeats itself.
    resumed: the run that these tokens are of was interrupted, and this one is the rest of it.
    open_fields: sampling fields that nobody chose; the engine fills them from the model's defaults (`policy.with_model`).
    session: the conversation that this belongs to. A hint for the prefix cache among equally good candidates: it changes neither
        content nor namespace.
    """

    id: RequestId
    model: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    prefill: str = ""
    thinking: bool | None = None
    samples: int = 1
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    dtype: str | None = None
    open_fields: tuple[str, ...] = ()
    continuation: tuple[Continued, ...] = ()
    resumed: Resumed | None = None
    session: str | None = None

    def validate(self) -> None:
        """Raise RequestError for anything wrong that needs no model to see."""
        if (self.messages is None) == (self.text is None):
            raise RequestError("A request has either messages or text.", "Give exactly one of them.")
        if not _whole(self.samples) or not 1 <= self.samples <= 256:
            raise RequestError(f"samples={self.samples!r} is out of range.", "Ask for 1 to 256 samples.")
        if not _whole(self.max_tokens) or self.max_tokens < 0:
            raise RequestError(f"max_tokens={self.max_tokens!r} is out of range.", "It must be a whole number >= 0.")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("A stop string is empty.", "Give at least one character, or leave --stop away.")
        if len(self.stop) > MAX_STOPS or sum(map(len, self.stop)) > MAX_STOP_CHARS:
            raise RequestError(
                f"{len(self.stop)} stop strings of {sum(map(len, self.stop)):,} characters are too many.",
                f"Give at most {MAX_STOPS}, of {MAX_STOP_CHARS:,} characters together.",
            )
        self.sampling.validate()


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Ids of one prompt.

    stable: how many leading ids the template keeps when an answer and another question are added. spliced: how many are ids
    that a model wrote in an earlier turn, put back as they were.
    """

    ids: tuple[TokenId, ...]
    stable: int
    text: str
    spliced: int = 0


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a recurrent layer's state, per row: shape without the row axis, MLX dtype name."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State of one mlx-lm cache object, learnt from a probe forward.

    kind: "full" and "sliding" hold K and V per token, "recurrent" holds `arrays` per row, "unused" nothing: the model never
    writes it. key_dim, value_dim: last axis of K and V. dtype: MLX dtype name. window: None, or tokens a sliding layer sees.
    place: where the object sits in `make_prompt_cache(model)`: its index, and within a CacheList its index there.
    """

    kind: StateKind
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None
    arrays: tuple[ArraySpec, ...] = ()
    place: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a person may want to know of a loaded model. Sizes in bytes.

    name: the name it was asked for. source: "embedded", "gguf", "directory" or "hub". weights: e.g. "float32 (from Q4_1)".
    """

    name: str
    source: str
    path: str
    family: str
    weights: str
    parameters: int
    weight_bytes: int
    layers: int
    vocab_size: int
    context_length: int
    fingerprint: str
    has_template: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)
