"""The four kinds of failure a caller can see. A cache problem is a miss, never an error."""

from __future__ import annotations


class MlxnbError(Exception):
    """Base of every typed error. `message` says what happened, `hint` what to do next."""

    kind = "error"

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} {hint}".strip())


class RequestError(MlxnbError, ValueError):
    """The request cannot be served as asked: bad input, unknown option, over an explicit limit."""

    kind = "request"


class CapacityExceeded(RequestError):
    """The request does not fit an explicit limit (`context_limit`, `max_kv_bytes`), even alone."""

    kind = "capacity"


class ModelError(MlxnbError, RuntimeError):
    """This model or file is at fault: missing, damaged, unsupported, or it produced no finite score."""

    kind = "model"


class Cancelled(MlxnbError):
    """The request was cancelled; what it had produced is kept in its record."""

    kind = "cancelled"


class EngineDead(MlxnbError, RuntimeError):
    """The engine stopped. The next request starts a fresh one; conversations are kept."""

    kind = "engine"


ERROR_KINDS: dict[str, type[MlxnbError]] = {
    cls.kind: cls for cls in (RequestError, CapacityExceeded, ModelError, Cancelled, EngineDead)
}


def error_from(kind: str, message: str, hint: str = "") -> MlxnbError:
    """Rebuild the typed error that a `Failed` event carries as text."""
    return ERROR_KINDS.get(kind, MlxnbError)(message, hint)
