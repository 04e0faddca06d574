"""`RuntimeConfig`: every setting of the engine, frozen at bind. `resolve` is the only reader of the environment."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import RequestError

Source = Literal["default", "env", "override"]

BLAS_MODES = ("auto", "mkl", "mkl-strict", "openblas", "none")
DTYPES = ("float32", "bfloat16", "float16", "file")
PREFIX = "MLXNB_"
CPU_PREFILL_CHUNK = 128
DEVICE_PREFILL_CHUNK = 2048
MOST_PREFIX_CACHE_BYTES = 4 * 2**30
MOST_PREFIX_DISK_BYTES = 20 * 2**30
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class ConfigEntry(NamedTuple):
    """One line of `describe()`. source: "default", "env" or "override"."""

    field: str
    value: Any
    source: Source


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """All limits and choices of one engine. Sizes in bytes, lengths in tokens; None means "decide for me".

    blas: auto, mkl, mkl-strict, openblas, none, or the path of a library. model: None is the embedded default.
    prefill_chunk: None is 128 on CPU, 2048 elsewhere (`chunk_for`). dtype: None is the policy of the loader.
    min_width, attention_extent: geometry of a window step; None is resolved from the backend.
    prefix_cache_bytes: memory for the state of finished work; None is an eighth of what the weights leave, 0 keeps nothing.
    prefix_disk_bytes, prefix_disk_dir: files of it that outlive the kernel; None is a tenth of the disk, and a folder in `cache_dir`.
    layout_bytes: on a CPU, for transposed copies of weights that steps of one row read; None is up to 1 GiB or 1/16 of the memory, 0 none.
    sliding_ring: sliding layers keep a ring of what they see instead of all tokens: less memory, a gather per layer and step.
    unknown_env: MLXNB_* variables that mean nothing here, shown by `mlxnb doctor`.
    Made by `resolve` only, which checks every range.
    """

    blas: str = "auto"
    model: str | None = None
    cache_dir: Path = Path()
    max_rows: int = 8
    max_kv_bytes: int | None = None
    prefix_cache_bytes: int | None = None
    prefix_disk_bytes: int | None = None
    prefix_disk_dir: Path | None = None
    context_limit: int | None = None
    prefill_chunk: int | None = None
    resident_models: int = 2
    offline: bool = False
    dtype: str | None = None
    min_width: int | None = None
    attention_extent: str | None = None
    submit_order: str = "auto"
    layout_bytes: int | None = None
    sliding_ring: bool = False
    unknown_env: tuple[str, ...] = ()
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)

    def describe(self) -> list[ConfigEntry]:
        """Every setting with its value and where that came from, in declaration order."""
        return [ConfigEntry(name, getattr(self, name), self.sources.get(name, "default")) for name in _READERS]

    def prefix_cache_for(self, free_bytes: int) -> int:
        """Bytes of the prefix cache where the weights have left so many."""
        share = max(0, min(free_bytes // 8, MOST_PREFIX_CACHE_BYTES))
        return share if self.prefix_cache_bytes is None else self.prefix_cache_bytes

    def prefix_disk_for(self, disk_bytes: int) -> int:
        """Bytes of the prefix cache's files on a disk of this size. Without the part in memory there are none."""
        if self.prefix_cache_bytes == 0:
            return 0
        return min(disk_bytes // 10, MOST_PREFIX_DISK_BYTES) if self.prefix_disk_bytes is None else self.prefix_disk_bytes

    @property
    def prefix_dir(self) -> Path:
        """Where those files lie."""
        return self.prefix_disk_dir or self.cache_dir / "prefix"

    def chunk_for(self, *, cpu: bool) -> int:
        """Tokens of one prefill chunk on this backend. Source: attention over 512 tokens is slower than 4 x 128 on CPU."""
        return self.prefill_chunk or (CPU_PREFILL_CHUNK if cpu else DEVICE_PREFILL_CHUNK)

    @property
    def models_dir(self) -> Path:
        """Where fetched models of our own lie."""
        return self.cache_dir / "models"


def resolve(env: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None) -> RuntimeConfig:
    """Defaults < environment < overrides, each value checked.

    env: os.environ unless given. An empty variable counts as unset. Raises RequestError for an unknown override
    (naming the nearest setting) and for a value out of range.
    """
    env = os.environ if env is None else env
    overrides = {} if overrides is None else overrides
    for name in overrides:
        if name not in _READERS:
            raise RequestError(f"There is no setting {name!r}.", _nearest(name, tuple(_READERS)))
    values: dict[str, Any] = {"cache_dir": _default_cache_dir(env)}
    sources: dict[str, Source] = dict.fromkeys(_READERS, "default")
    for name, read in _READERS.items():
        variable, raw = _from_env(name, env)
        if raw is not None:
            values[name], sources[name] = read(variable, raw), "env"
        if name in overrides:
            values[name], sources[name] = read(name, overrides[name]), "override"
    known = {PREFIX + name.upper() for name in _READERS} | {"MLXNB_NO_FRONTEND"}  # the last one speaks to the build
    unknown = tuple(sorted(key for key in env if key.startswith(PREFIX) and key not in known))
    return RuntimeConfig(**values, unknown_env=unknown, sources=sources)


def _from_env(name: str, env: Mapping[str, str]) -> tuple[str, str | None]:
    variable = PREFIX + name.upper()
    if raw := env.get(variable, "").strip():
        return variable, raw
    if name == "offline" and (raw := env.get("HF_HUB_OFFLINE", "").strip()):
        return "HF_HUB_OFFLINE", raw
    return variable, None


def _default_cache_dir(env: Mapping[str, str]) -> Path:
    """The user's cache directory by the habit of the platform; the home directory comes from `env` too."""
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "mlxnb"
    base = env.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if base.startswith("/") else home / ".cache") / "mlxnb"


def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(known)}."


# -- readers: (name for messages, raw value) -> checked value ------------------------------------------------------


def _bad(name: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{name}={value!r} is out of range.", f"It must be {rule}.")


def _whole(low: int, high: int, *, none: bool = False) -> Callable[[str, Any], int | None]:
    rule = f"a whole number from {low} to {high}" + (", or None" if none else "")

    def read(name: str, value: Any) -> int | None:
        if none and _is_none(value):
            return None
        number = int(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,19}", value.strip()) else value
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise _bad(name, value, rule)
        return number

    return read


def _size_or_off(name: str, value: Any) -> int | None:
    off = value in ("0", "off") or (isinstance(value, int) and not isinstance(value, bool) and value == 0)
    return 0 if off else _size(name, value)


def _size(name: str, value: Any) -> int | None:
    if _is_none(value):
        return None
    number = value
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,18})\s*([kmgt]?i?)b?", value.strip().lower())):
        number = int(match[1]) * _UNITS[match[2]] if match[2] in _UNITS else value
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 2**63:
        raise _bad(name, value, "a number of bytes above 0 such as 4000000000, '4GB' or '4GiB', or None")
    return number


def _one_of(*words: str, none: bool = False) -> Callable[[str, Any], str | None]:
    def read(name: str, value: Any) -> str | None:
        if none and _is_none(value):
            return None
        if not isinstance(value, str) or value not in words:
            raise RequestError(f"{name}={value!r} is not a choice.", f"Choose one of: {', '.join(words)}.")
        return value

    return read


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise _bad(name, value, "true or false")


def _blas(name: str, value: Any) -> str:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(text, str) or not text or "\0" in text or not (text in BLAS_MODES or "/" in text):
        raise RequestError(f"{name}={value!r} is not a choice.", f"Choose one of: {', '.join(BLAS_MODES)}, or give the path of a library.")
    return text


def _text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise _bad(name, value, "a model name or a path")
    return value


def _folder(name: str, value: Any) -> Path:
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise _bad(name, value, "the path of a folder")
    try:
        return Path(value).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise _bad(name, value, "the path of a folder") from error


def _is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "auto"))


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "blas": _blas,
    "model": _text,
    "cache_dir": _folder,
    "max_rows": _whole(1, 256),
    "max_kv_bytes": _size,
    "prefix_cache_bytes": _size_or_off,
    "prefix_disk_bytes": _size_or_off,
    "prefix_disk_dir": _folder,
    "context_limit": _whole(1, 2**31 - 1, none=True),
    "prefill_chunk": _whole(1, 65536, none=True),
    "resident_models": _whole(1, 16),
    "offline": _flag,
    "dtype": _one_of(*DTYPES, none=True),
    "min_width": _whole(1, 64, none=True),
    "attention_extent": _one_of("exact", "bucket", none=True),
    "submit_order": _one_of("auto", "before", "after"),
    "layout_bytes": _size_or_off,
    "sliding_ring": _flag,
}
assert set(_READERS) == {f.name for f in fields(RuntimeConfig)} - {"unknown_env", "sources"}
