"""The identity of a model by content only: sha256 over tagged, length-prefixed fields.

Components (reliability 3.1): config bytes, shard names and sizes, shard contents, tokenizer files, added and special tokens,
chat-template bytes, and the state layout per layer. A name, a path or a load order is never an identity.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import Cancelled, ModelError
from .types import StateSpec

Progress = Callable[[str, int, int], None]
"""(phase, bytes done, bytes in all or 0 if unknown). Called from the thread that works."""
Cancel = Callable[[], bool]
"""True once the person no longer wants it."""

_CHUNK = 4 * 2**20
_REMEMBERED = 1000
_HEX = re.compile(r"[0-9a-f]{64}")


class FileIdentity(NamedTuple):
    """What tells one state of a file from another without reading it. A change that keeps all five is not seen."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Of the file behind `path`, links followed. Raises ModelError if it cannot be looked at."""
        try:
            found = os.stat(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.", "Check that the file is there and readable.") from error
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file as the fingerprint sees it. name: relative to the model's folder. digest: sha256 of its bytes."""

    name: str
    size: int
    digest: str


def digest_fields(fields: Iterable[tuple[str, bytes]]) -> str:
    """sha256 over (tag, value) pairs, each length-prefixed, so that no two lists of fields share their bytes."""
    state = hashlib.sha256()
    for tag, value in fields:
        for part in (tag.encode("utf-8"), value):
            state.update(len(part).to_bytes(8, "big"))
            state.update(part)
    return state.hexdigest()


def content_fingerprint(
    config: bytes,
    shards: Sequence[Shard],
    tokenizer_files: Mapping[str, bytes],
    special_tokens: Sequence[str],
    template: str | None,
    weights: str,
) -> str:
    """Components 1 to 6, and how the weights were brought into memory ("float32 (from Q4_1)"): that changes the scores too.

    The order of shards and files does not matter; the order of special tokens does. No template differs from an empty one.
    """
    fields: list[tuple[str, bytes]] = [("config", config)]
    for shard in sorted(shards, key=lambda shard: shard.name):
        fields += [("shard.name", shard.name.encode()), ("shard.size", b"%d" % shard.size), ("shard.sha256", shard.digest.encode())]
    for name in sorted(tokenizer_files):
        fields += [("tokenizer.name", name.encode()), ("tokenizer.file", tokenizer_files[name])]
    fields += [("special", token.encode("utf-8", "surrogatepass")) for token in special_tokens]
    if template is not None:
        fields.append(("template", template.encode("utf-8", "surrogatepass")))
    fields.append(("weights", weights.encode()))
    return digest_fields(fields)


def with_layout(content: str, layout: Sequence[StateSpec], overrides: str = "") -> str:
    """Component 7 added: the model fingerprint proper. overrides: position overrides in force, as text, "" if none."""
    fields = [("content", content.encode()), ("positions", overrides.encode())]
    fields += [("layer", json.dumps(astuple(spec)).encode()) for spec in layout]
    return digest_fields(fields)


class ShardDigests:
    """sha256 of large files, remembered by `FileIdentity` in one JSON file.

    Owner: any thread, one lock per instance; several processes may share the file (the last writer wins, a loss costs a re-read).
    Invariant: a damaged or foreign memory is an empty one, never an error.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._lock = threading.Lock()

    def digest(self, path: Path, progress: Progress | None = None, cancelled: Cancel | None = None) -> str:
        """Of the file's bytes; reads it only if it is not remembered.

        Raises Cancelled, and ModelError if the file changes while it is read or cannot be read.
        """
        identity = FileIdentity.of(path)
        key = ":".join(map(str, identity))
        with self._lock:
            known = self._read().get(key)
        if known is not None:
            return known
        found = _sha256(path, identity.size, progress, cancelled)
        if FileIdentity.of(path) != identity:
            raise ModelError(f"{path} changed while it was read.", "Wait until whatever writes it has finished, then try again.")
        with self._lock:
            self._write({**self._read(), key: found})
        return found

    def _read(self) -> dict[str, str]:
        try:
            table = json.loads(self._memory.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(table, dict):
            return {}
        return {key: value for key, value in table.items() if isinstance(value, str) and _HEX.fullmatch(value)}

    def _write(self, table: dict[str, str]) -> None:
        """Atomically, newest entries last and bounded. A full or read-only disk only means no memory."""
        kept = dict(list(table.items())[-_REMEMBERED:])
        temporary = None
        try:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._memory.parent, prefix=f".{self._memory.name}.")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file)
            os.replace(temporary, self._memory)
        except OSError:
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)


def _sha256(path: Path, size: int, progress: Progress | None, cancelled: Cancel | None) -> str:
    state, done = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            # Never more than the size it had: a file that keeps growing must not keep us here.
            while done < size and (chunk := file.read(min(_CHUNK, size - done))):
                if cancelled is not None and cancelled():
                    raise Cancelled("Checking the model file was cancelled.")
                state.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress("hash", done, size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", "Check that the file is there and readable.") from error
    return state.hexdigest()
