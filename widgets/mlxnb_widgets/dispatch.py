"""`Dispatcher`: what a front end may say, checked before anyone acts on it. No widget and no kernel needed.

A message is hostile until it passed: its size, its shape, its command's arguments. What fails has no effect, and if it is a
command with a readable id it gets an error answer with that id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_NAME = 64
_COMMAND = {"type", "id", "key", "name", "args"}
_ACK = {"type", "seq", "frame_ms"}

Send = Callable[[dict[str, Any]], None]
"""Sends one message to the front end that spoke."""


@dataclass(frozen=True, slots=True)
class Command:
    """A checked wish. `answer` or `refuse` must be called once; each sends the answer with this id."""

    id: str
    key: str
    name: str
    args: dict[str, Any]
    send: Send

    def answer(self, result: Any = None) -> None:
        self.send({"type": "answer", "id": self.id, "ok": True, "result": result})

    def refuse(self, error: str) -> None:
        self.send({"type": "answer", "id": self.id, "ok": False, "error": error})


class Dispatcher:
    """Takes any value as a message, from any thread, and never raises.

    check: (command name, arguments) -> what is wrong, or None. act: takes a checked command; it only enqueues.
    on_ack: takes (seq, frame_ms).
    """

    def __init__(
        self, check: Callable[[str, Any], str | None], act: Callable[[Command], None], on_ack: Callable[[int, float], None]
    ) -> None:
        self._check = check
        self._act = act
        self._on_ack = on_ack

    def __call__(self, content: Any, send: Send) -> None:
        """One message. `send` reaches whoever sent it."""
        if not isinstance(content, dict):
            return
        try:
            if content.get("type") == "ack":
                self._ack(content)
            elif _name(content.get("id")):
                self._command(content, send)
        except Exception as problem:  # a fault of ours must not cost the front end its answer
            _tell(send, content.get("id"), f"The kernel could not handle this: {type(problem).__name__}.")

    def _ack(self, content: dict[str, Any]) -> None:
        seq, frame_ms = content.get("seq"), content.get("frame_ms")
        whole = isinstance(seq, int) and not isinstance(seq, bool) and seq >= 0
        number = isinstance(frame_ms, (int, float)) and not isinstance(frame_ms, bool) and math.isfinite(frame_ms) and frame_ms >= 0
        if whole and number and set(content) <= _ACK:
            self._on_ack(int(str(seq)), float(str(frame_ms)))

    def _command(self, content: dict[str, Any], send: Send) -> None:
        found = self._problem(content)
        if found:
            _tell(send, content["id"], found)
            return
        self._act(Command(content["id"], content["key"], content["name"], content["args"], send))

    def _problem(self, content: dict[str, Any]) -> str | None:
        if larger_than(content, MAX_BYTES):
            return f"The message is too large: the limit is {MAX_BYTES // 1024} kB."
        if content.get("type") != "command" or not set(content) <= _COMMAND:
            return "This is not a command."
        if not isinstance(content.get("key"), str) or len(content["key"]) > MAX_NAME:
            return "The command has no key."
        if not _name(content.get("name")):
            return "The command has no name."
        if not isinstance(content.get("args"), dict):
            return "The command has no arguments."
        return self._check(content["name"], content["args"])


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME


def _tell(send: Send, command_id: Any, error: str) -> None:
    if not _name(command_id):
        return
    try:
        send({"type": "answer", "id": command_id, "ok": False, "error": error})
    except Exception:  # the front end is gone: nobody is left to tell
        pass


def larger_than(value: Any, limit: int) -> bool:
    """Whether a JSON value takes more than `limit` bytes as text, or is nested too deep. Stops counting there."""
    left = limit
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                left -= 2 + 2 * len(item)
                below += item.keys()
                below += item.values()
            elif isinstance(item, (list, tuple)):
                left -= 2 + len(item)
                below += item
            elif isinstance(item, str):
                left -= 2 + (len(item) if len(item) > left else len(item.encode("utf-8", "replace")))
            elif isinstance(item, (bytes, bytearray, memoryview)):
                left -= len(item)
            else:
                left -= 1 if item is None or isinstance(item, (bool, float)) else max(1, item.bit_length() // 4)
            if left < 0:
                return True
        level = below
        if not level:
            return False
    return True
