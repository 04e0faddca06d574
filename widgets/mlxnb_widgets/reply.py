"""`reply_where_asked`: a comm whose messages are answered while a cell runs, on every ipykernel with subshells."""

from __future__ import annotations

from typing import Any


def reply_where_asked(comm: Any) -> None:
    """Let messages of a front end go to the subshell they name.

    ipykernel 7.4 sends a comm's messages to the shell that last published on it, which for a running cell is the main
    shell: a stop would wait for the cell's end. The name is private, so it is replaced only where it exists.
    """
    if callable(getattr(comm, "_reply_subshell_for", None)):
        comm._reply_subshell_for = lambda data, default: default
