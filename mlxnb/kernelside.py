"""Commands of a front end to the kernel itself rather than to one output: stop all, unload, status, completion, scripts.

Nothing here may touch a user's objects beyond reading names, and nothing runs code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import RequestError

from . import runtime
from .comm import engine_status

if TYPE_CHECKING:
    from .frontend import Session

AT_ONCE = frozenset({"stop_all", "sources"})
MAX_COMPLETIONS = 200
_WORD = re.compile(r"""[^ \t\n`!@#$^&*()=+\[{\]}\\|;:'",<>?]*$""")
"""What a completion would replace: back to the last of IPython's delimiters."""


def handlers(session: Session) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """The commands with an empty key."""
    return {
        "stop_all": _stop_all,
        "unload": _unload,
        "status": lambda args: engine_status(),
        "history": lambda args: session.beat.past.record(),
        "outputs": lambda args: outputs(session),
        "sources": lambda args: sources(session),
        "complete": lambda args: complete(session.shell, args["text"], args["cursor"]),
        "asset": _asset,
    }


def _stop_all(args: Mapping[str, Any]) -> int:
    here = runtime.current()
    return here.cancel() if here is not None else 0


def _unload(args: Mapping[str, Any]) -> list[str]:
    here = runtime.current()
    return here.unload(args.get("model")) if here is not None else []


def _asset(args: Mapping[str, Any]) -> dict[str, str]:
    from mlxnb_widgets import asset

    try:
        return {"text": asset(args["name"])}
    except LookupError:
        raise RequestError(f"There is no script {args['name'][:60]!r}.") from None


def outputs(session: Session) -> list[dict[str, Any]]:
    """What outputs of this kernel show that are finished or stay open, newest last: for a notebook that was loaded again before it
    was saved."""
    found = []
    for source in list(session.sources.values()):
        output = getattr(source, "output", None)
        if output is not None and (source.done or getattr(source, "stays_open", False)):
            found.append(output())
    return [made for made in found if made is not None]


def sources(session: Session) -> list[dict[str, Any]]:
    """Every output that takes commands, with its cell: what a front end can stop, or branch after the end. open: it stays a live view."""
    outputs = [source for source in list(session.sources.values()) if hasattr(source, "cell_id")]
    return [
        {
            "key": one.key,
            "cell_id": one.cell_id,
            "model_id": getattr(one, "model_id", None),
            "done": one.done,
            "open": getattr(one, "stays_open", False),
        }
        for one in outputs
    ]


def complete(shell: Any, text: str, cursor: int) -> dict[str, Any]:
    """Completions inside `%%mlx` and `%mlx` at this place, without IPython's own; positions in code points."""
    from IPython.core.completer import CompletionContext

    from .magic import installed

    here = installed(shell)
    cursor = min(max(0, cursor), len(text))
    if here is None:
        return {"matches": [], "start": cursor, "end": cursor}
    before = text[:cursor].split("\n")
    word = _WORD.search(before[-1]).group()  # type: ignore[union-attr]  # it matches nothing at least
    context = CompletionContext(
        token=word, full_text=text, cursor_position=len(before[-1]), cursor_line=len(before) - 1, limit=MAX_COMPLETIONS
    )
    matches = [match.text for match in here.completer.match(context)["completions"]]
    return {"matches": matches[:MAX_COMPLETIONS], "start": cursor - len(word), "end": cursor}
