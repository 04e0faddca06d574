"""The process in which chat templates run: a loop over frames on standard input and output. It imports Jinja and nothing of ours.

A frame is a length (8 bytes, little-endian) and that much JSON. A request names a template `source` and either asks for its
`variables` or gives the `values` to render it with; the reply has `text` or `names`, or `error` and `message`.
What is covered: Jinja's immutable sandbox against reaching Python's internals, processor time, memory (Linux), output and file
size. What is not: a hole in that sandbox runs code with the user's rights, in a process that holds no model and no conversation.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

HEADER = struct.Struct("<Q")
PARENT_CHECK_S = 30.0
# A single product that is larger than this is refused at once; smaller ones are left to the limits of the process.
PRODUCT_ITEMS = 1 << 22
POWER_BITS = 1 << 16


class LimitExceeded(Exception):
    """The template asks for more output, or for a larger value, than it may have."""


class Raised(jinja2.TemplateError):
    """The template called raise_exception."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PublicNamespace(Namespace):
    """Jinja's `namespace()` without underscore names, which have no place in a template."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _check_public(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox with the names that chat templates expect, which are those of Hugging Face's."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
        self.filters["tojson"] = _tojson
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=PublicNamespace)
        self.globals["dict"] = lambda *args, **values: dict(*args, **values)
        self.globals.pop("lipsum", None)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse a product or power that is huge: either would run to its end inside one instruction."""
        for count, item in ((left, right), (right, left)):
            if operator == "*" and isinstance(count, int) and hasattr(item, "__len__") and count * len(item) > PRODUCT_ITEMS:
                raise LimitExceeded(f"a product of {count * len(item):,} items")
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > POWER_BITS:
            raise LimitExceeded("a power with too many digits")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: object) -> None:
    raise Raised(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return Environment().from_string(source)


def _render(source: str, values: dict[str, Any], output_bytes: int) -> str:
    pieces: list[str] = []
    size = 0
    for piece in _compiled(source).generate(values):
        size += len(piece.encode("utf-8", "surrogatepass"))
        if size > output_bytes:
            raise LimitExceeded(f"more than {output_bytes:,} bytes of output")
        pieces.append(piece)
    return "".join(pieces)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request; every failure of the template becomes an `error`."""
    try:
        if request.get("variables"):
            syntax = Environment().parse(request["source"])
            return {"names": sorted(jinja2.meta.find_undeclared_variables(syntax))}
        return {"text": _render(request["source"], request["values"], request["output_bytes"])}
    except Raised as error:
        return {"error": "raised", "message": str(error)}
    except LimitExceeded as error:
        return {"error": "limit", "message": str(error)}
    except (MemoryError, RecursionError, OverflowError) as error:
        return {"error": "limit", "message": f"too much memory or nesting ({type(error).__name__})"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except SecurityError as error:
        return {"error": "unsafe", "message": str(error)}
    except Exception as error:
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"}


def read_exactly(descriptor: int, count: int, parent: int) -> bytes | None:
    """Bytes from a pipe; None at its end, or once the parent process is gone."""
    parts: list[bytes] = []
    while count:
        if not select.select([descriptor], [], [], PARENT_CHECK_S)[0]:
            if os.getppid() != parent:
                return None
            continue
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _limit_memory(memory_bytes: int) -> None:
    """Cap the address space at what is mapped now plus memory_bytes where the system can (Linux), and written files at nothing."""
    try:
        with open("/proc/self/statm", "rb") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    except (OSError, ValueError):
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(memory_bytes: int) -> None:
    """Answer frames until the input ends. A request that uses more than its `cpu_s` ends the process by SIGPROF."""
    source, sink = sys.stdin.fileno(), sys.stdout.fileno()
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit_memory(memory_bytes)
    _send(sink, {"ready": True})
    while (header := read_exactly(source, HEADER.size, parent)) is not None:
        body = read_exactly(source, HEADER.unpack(header)[0], parent)
        if body is None:
            return
        request = json.loads(body)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sink, reply)


def _send(sink: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode()
    view = memoryview(HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(sink, view) :]
