"""`ChatTemplate`: messages to text by a model's own Jinja template, which is untrusted code and runs under limits that bind."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .errors import ModelError, RequestError
from .types import Message

# Names under which templates take the switch for reasoning.
THINKING_NAMES = ("enable_thinking", "thinking")
START_S = 60.0
CLOSE_S = 0.5
_HEADER_BYTES = 8
_BOOT = (
    "import json, sys; line = json.loads(sys.stdin.buffer.raw.readline()); sys.path[:] = line[0];"
    "from mlxnb_engine.template_worker import serve; serve(line[1])"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may use.

    cpu_s: processor seconds. wall_s: seconds in all, wider so that a busy machine fails nobody. output_bytes: UTF-8 bytes of output
    beyond what the messages hold. memory_bytes: address space above that of the idle process (Linux).
    """

    cpu_s: float = 1.0
    wall_s: float = 10.0
    output_bytes: int = 1 << 20
    memory_bytes: int = 512 << 20


class RenderProcess:
    """A child process that renders templates, started when first needed and again after a limit ended it.

    Why a process: Jinja's sandbox bounds neither time nor memory, and one C call inside a template (`"a" * 10**9`, a filter, the
    comparison of two nested lists) cannot be stopped by any check in this process: it would hold the interpreter, and with it the
    notebook and all running rows. A process can be limited by the kernel and killed. Cost: about 0.2 s once, 0.2 ms per rendering.
    Owner: this module, one per kernel; any thread may call it, one at a time. It exits with its parent.
    """

    def __init__(self, memory_bytes: int = Limits().memory_bytes) -> None:
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, request: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
        """Send a request and wait for its reply. Raises ModelError if a limit ended the process or it cannot start."""
        data = json.dumps({**request, "cpu_s": limits.cpu_s}).encode()
        with self._lock:
            process = self._running()
            try:
                assert process.stdin is not None and process.stdout is not None
                _write(process.stdin, len(data).to_bytes(_HEADER_BYTES, "little") + data)
                return _read_frame(process.stdout, time.monotonic() + limits.wall_s, _reply_bytes(request))
            except (OSError, EOFError, TimeoutError) as error:
                raise _ended(self._kill(), error, limits) from None
            except BaseException:
                # An interrupt leaves half a conversation on the pipes: the next call starts afresh.
                self._kill()
                raise

    def close(self) -> None:
        """End the process, also in the middle of a call, which then fails. Idempotent; a later call starts it again."""
        if self._lock.acquire(timeout=CLOSE_S):
            try:
                self._kill()
            finally:
                self._lock.release()
        elif (process := self._process) is not None:
            process.kill()

    def forget(self) -> None:
        """In a child after a fork: process, pipes and a lock that another thread may hold belong to the parent."""
        self._lock = threading.Lock()
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [str(Path(__file__).resolve().parent.parent), *(p for p in sys.path if p)]
        try:
            # Its own session, so that an interrupt of the notebook does not reach it; -P keeps the current folder off its path.
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise ModelError(f"The process for chat templates cannot start: {error}.", "Check that Python can start itself.") from error
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, json.dumps([paths, self._memory_bytes]).encode() + b"\n")
            _read_frame(process.stdout, time.monotonic() + START_S, 1 << 16)
        except (OSError, EOFError, TimeoutError) as error:
            code = self._kill()
            raise ModelError(
                f"The process for chat templates did not start (exit code {code}).", "Check that jinja2 3.1.6 or newer is installed."
            ) from error
        except BaseException:
            self._kill()
            raise
        return process

    def _kill(self) -> int | None:
        """End the process and collect it; its exit code, negative for a signal, or None if there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.returncode


_SHARED = RenderProcess()
atexit.register(_SHARED.close)
os.register_at_fork(after_in_child=_SHARED.forget)


def _write(pipe: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def _read_frame(pipe: IO[bytes], deadline: float, most_bytes: int) -> dict[str, Any]:
    """One reply. Raises TimeoutError at the deadline, EOFError if the process ended or sends something that is no reply."""
    size = int.from_bytes(_read(pipe, _HEADER_BYTES, deadline), "little")
    if size > most_bytes:
        raise EOFError(f"a reply of {size} bytes")
    reply = json.loads(_read(pipe, size, deadline))
    if not isinstance(reply, dict):
        raise EOFError("not a reply")
    return reply


def _read(pipe: IO[bytes], count: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while count:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe.fileno(), min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _reply_bytes(request: Mapping[str, Any]) -> int:
    """The longest honest reply: JSON writes a byte of output as six at most."""
    return 6 * int(request.get("output_bytes", 1 << 20)) + (1 << 16)


def _ended(code: int | None, error: Exception, limits: Limits) -> ModelError:
    if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
        return ModelError(
            f"The chat template ran for more than {limits.cpu_s:g} s and was stopped.",
            "It may be broken or hostile: use --no-template, or another model.",
        )
    return ModelError(f"The process for chat templates ended (exit code {code}).", "Try again, or leave the template out (--no-template).")


class ChatTemplate:
    """A model's chat template, rendered in a process of its own under `Limits`.

    Owner: the loaded model; immutable; any thread may render. Its text is the scaffolding plus the contents of the messages; which
    characters are content is for `PromptPreparer` to know. Errors: RequestError if the template refuses the conversation
    (`raise_exception`, a system message in a template without one), ModelError if the template itself is at fault.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        limits: Limits = Limits(),
        process: RenderProcess | None = None,
    ) -> None:
        if not isinstance(source, str) or not source:
            raise ModelError("This model has no chat template.", "Use --no-template to give it plain text.")
        self.source = source
        self._tokens = {name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None}
        self._limits = limits
        self._process = process or _SHARED
        self._variables: frozenset[str] | None = None

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set. The first use parses it; raises ModelError if that fails."""
        if self._variables is None:
            reply = self._call({"source": self.source, "variables": True})
            self._variables = frozenset(reply["names"])
        return self._variables

    def thinking_values(self, thinking: bool | None) -> dict[str, bool]:
        """The values that switch reasoning on or off. Raises RequestError if this template has no such switch."""
        if thinking is None:
            return {}
        names = [name for name in THINKING_NAMES if name in self.variables]
        if not names:
            raise RequestError("The chat template of this model has no switch for thinking.", "Leave --thinking away.")
        return dict.fromkeys(names, thinking)

    def render(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **values: Any,
    ) -> str:
        """Text of the messages. values: further variables of the template. Raises RequestError or ModelError (see the class)."""
        turns = [{"role": m.role, "content": m.content} if isinstance(m, Message) else dict(m) for m in messages]
        given = {
            "messages": turns,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
            **values,
        }
        size = len(json.dumps([turns, tools]))
        request = {"source": self.source, "values": given, "output_bytes": self._limits.output_bytes + size}
        return str(self._call(request, roles={str(turn.get("role")) for turn in turns})["text"])

    def _call(self, request: Mapping[str, Any], roles: Iterable[str] = ()) -> dict[str, Any]:
        reply = self._process.call(request, self._limits)
        error, message = reply.get("error"), str(reply.get("message", ""))
        if error is None:
            return reply
        if error == "raised":
            hint = "Leave the system message away." if "system" in roles and "system" in message.lower() else "Change the conversation."
            raise RequestError(f"The chat template of this model refuses: {message}", hint)
        what = {
            "limit": "goes over its limits",
            "syntax": "has a syntax error",
            "unsafe": "tries something that is not allowed",
        }.get(error, "failed")
        raise ModelError(f"The chat template of this model {what}: {message}.", "Use --no-template, or another model.")
