"""From a model's name to checked files on this disk. No MLX: it runs off the engine thread, before anything reads a weight."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import fetch, headers, hub
from .config import RuntimeConfig
from .errors import Cancelled, ModelError
from .fingerprint import Cancel, FileIdentity, Progress, Shard
from .headers import Header, confine

Kind = Literal["embedded", "gguf", "directory", "hub"]
_CODE_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".npy", ".npz", ".pkl", ".h5", ".msgpack")
_READ_TOO = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt")
_MAX_JSON = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Located:
    """Checked files of one model. path: the GGUF file or the folder. root: where every link must end.

    headers: of each weight file. identities: of each weight file when it was checked; `recheck` compares them.
    """

    kind: Kind
    path: Path
    name: str
    root: Path = Path()
    headers: Mapping[Path, Header] = field(default_factory=dict)
    identities: Mapping[Path, FileIdentity] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        return self.kind in ("embedded", "gguf")

    def replaced(self) -> bool:
        """Whether other weights lie under this name by now. Files that are gone do not count: what is loaded still stands for them."""
        return any(path.exists() and FileIdentity.of(path) != known for path, known in self.identities.items())

    def recheck(self) -> None:
        """Raise ModelError unless the weight files are still the ones that were checked, no fewer and no more."""
        now = {self.path} if self.is_gguf else set(_weight_files(self.path))
        if now != set(self.headers) or any(FileIdentity.of(path) != known for path, known in self.identities.items()):
            raise ModelError(
                f"The files of {self.name} changed while it was loaded.", "Wait until whatever writes them is done; run again."
            )


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model on this machine, as `-m NAME` takes it. size_bytes: of its weights."""

    name: str
    kind: Kind
    path: Path
    size_bytes: int


def locate(name: str | None, config: RuntimeConfig, progress: Progress, cancelled: Cancel) -> Located:
    """Find, fetch if need be, hash and check the files of a model.

    name: None or "" is `config.model`, and without that the embedded default; else a .gguf file, a folder, or a hub repository
    "owner/name". Raises Cancelled, and ModelError with one sentence and the next step.
    """
    located, files = _unread(*_find(name or config.model, config, progress, cancelled))
    return _check(located, files, config, progress, cancelled)


def canonical(name: str, config: RuntimeConfig) -> str:
    """One name for one model: a path by what it really is, the default as "". Anything else, a hub name or nonsense, as it is."""
    name = name or config.model or ""
    if name.lower() in ("", "default", fetch.EMBEDDED_NAME.lower()):
        return ""
    path = _as_path(name)
    return str(path.resolve()) if path is not None and path.exists() else name


def look(name: str, config: RuntimeConfig) -> Located | None:
    """What `locate` would say of a model without the network and without reading its weights; None: it would be fetched.

    The result has no digests. Raises ModelError.
    """
    kind, path, shown = _place(name, config)
    if path is None and config.offline:
        raise ModelError(f"{shown} is not on this machine, and offline is set.", f"Unset it once. {_near(name, config)}".strip())
    if path is None:
        return None
    located, files = _unread(kind, path, shown)
    if kind != "embedded":  # that one is fetched anew if it is damaged
        read = [_read_header(file, FileIdentity.of(file).size, gguf=located.is_gguf) for file in files]
        _check_layers(located, sum(len(header.tensors) for header in read))
    return located


def _unread(kind: Kind, path: Path, shown: str) -> tuple[Located, list[Path]]:
    """A model and its weight files, checked as far as names and small files go."""
    if kind in ("embedded", "gguf"):
        return Located(kind, path, shown, path.parent), [path]
    root = path.parent.parent if path.parent.name == "snapshots" else path
    files = _weight_files(path)
    _refuse_code_formats(path, files, shown)
    for file in (*files, *(file for pattern in _READ_TOO for file in path.glob(pattern))):
        confine(root, file.relative_to(root))
        if file.exists() and not file.is_file():
            hint = "Fetch the model again; reading a pipe or a device could wait for ever."
            raise ModelError(f"{file.name} in {shown} is not a regular file.", hint)
    settings = _settings(path, shown)
    _check_index(path, root, files, shown)
    return Located(kind, path, shown, root, config=settings), files


def list_local_models(config: RuntimeConfig) -> list[LocalModel]:
    """Models that need no network: the default once it is fetched, GGUF files in our folder, complete ones in the hub's cache."""
    default = fetch.default_model_path(config)
    found = [LocalModel(fetch.EMBEDDED_NAME, "embedded", default, default.stat().st_size)] if default.is_file() else []
    for path in sorted(config.models_dir.glob("*.gguf")):
        if path != default and path.is_file():
            found.append(LocalModel(str(path), "gguf", path, path.stat().st_size))
    for name in hub.cached_names():
        if (snapshot := hub.cached_snapshot(name)) is not None:
            size = sum(path.stat().st_size for path in _weight_files(snapshot) if path.is_file())
            found.append(LocalModel(name, "hub", snapshot, size))
    return found


# -- which files ---------------------------------------------------------------------------------------------------


def _find(name: str | None, config: RuntimeConfig, progress: Progress, cancelled: Cancel) -> tuple[Kind, Path, str]:
    kind, path, shown = _place(name, config)
    if kind == "embedded":
        path = fetch.ensure_default_model(config, progress, cancelled)
    elif path is None:
        path = hub.ensure_snapshot(shown, config.offline, progress, cancelled, lambda: _near(shown, config))
    return kind, path, shown


def _place(name: str | None, config: RuntimeConfig) -> tuple[Kind, Path | None, str]:
    """Which kind of model a name means and where it lies; None if it has to be fetched."""
    if name is None or name.lower() in ("default", fetch.EMBEDDED_NAME.lower()):
        default = fetch.default_model_path(config)
        return "embedded", default if default.is_file() else None, fetch.EMBEDDED_NAME
    path = _as_path(name)
    if path is not None and path.is_dir():
        return "directory", path.absolute(), name
    if path is not None and path.is_file():
        return "gguf", _gguf_file(path, name), name
    if hub.REPO_NAME.fullmatch(name) and not _means_a_path(name):
        return "hub", hub.cached_snapshot(name), name
    kind = "file or folder" if _means_a_path(name) else "model"
    raise ModelError(
        f"There is no {kind} {name[:200]!r}.",
        f"{_near(name, config)} A model is a .gguf file, a folder, or a hub name such as owner/name.".strip(),
    )


def _as_path(name: str) -> Path | None:
    """The path that `name` would be, None if it cannot be one (NUL, over-long, unknown user)."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError):
        return None
    return path if "\0" not in name else None


def _means_a_path(name: str) -> bool:
    if name.startswith(("/", ".", "~")) or name.lower().endswith(".gguf") or name.count("/") > 1:
        return True
    path = _as_path(name)
    return path is not None and "/" in name and path.parent.is_dir()


def _gguf_file(path: Path, name: str) -> Path:
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return path.absolute()
    if suffix in _CODE_FORMATS:
        raise ModelError(f"{name} can run code when it is opened, so it is not read.", "Use a .gguf file, or a folder with safetensors.")
    hint = f"Give its folder: -m {path.parent}." if suffix == ".safetensors" else "Give a .gguf file or a model's folder."
    raise ModelError(f"{name} is not a model that can be loaded by itself.", hint)


def _near(name: str, config: RuntimeConfig) -> str:
    """'Did you mean ...?' over names on this machine: models, and what lies beside a misspelt path."""
    known = {model.name: model.name for model in list_local_models(config)}
    path = _as_path(name)
    if path is not None and path.parent.is_dir():
        try:
            beside = [p for p in path.parent.iterdir() if p.suffix.lower() == ".gguf" or (p / "config.json").is_file()]
        except OSError:
            beside = []
        known |= {str(p): str(p) for p in beside}
    for full in list(known):
        known.setdefault(full.rpartition("/")[2], full)
    asked = [str(path) if path is not None else name, name.rpartition("/")[2]]
    close = [match for one in asked for match in difflib.get_close_matches(one, known, n=2, cutoff=0.6)]
    names = list(dict.fromkeys(known[match] for match in close))[:3]
    return f"Did you mean {' or '.join(map(repr, names))}?" if names else ""


def _weight_files(folder: Path) -> list[Path]:
    """Exactly the files that mlx-lm reads."""
    return sorted(folder.glob("model*.safetensors"))


def _refuse_code_formats(folder: Path, files: list[Path], name: str) -> None:
    if files:
        return
    if any(path.suffix.lower() in _CODE_FORMATS for path in folder.iterdir()):
        raise ModelError(
            f"{name} has no safetensors weights, only files that can run code when they are opened.", "Use a safetensors version of it."
        )
    others = sorted(path.name for path in folder.glob("*.safetensors")) or sorted(path.name for path in folder.glob("*.gguf"))
    if others:
        hint = f"Give the file itself: -m {folder / others[0]}." if others[0].endswith(".gguf") else "Rename it to model.safetensors."
        raise ModelError(f"{name} has no model*.safetensors, but {others[0]}.", hint)
    raise ModelError(f"The folder {name} has no weights (model*.safetensors).", "Give a model's folder: config.json, weights, tokenizer.")


# -- what is in them -----------------------------------------------------------------------------------------------


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object of bounded size. Raises ModelError."""
    hint = "The model's folder is damaged; fetch it again."
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_JSON + 1)
        value = json.loads(raw.decode("utf-8")) if len(raw) <= _MAX_JSON else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} of {name} cannot be read: {error}.", hint) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} of {name} is not a JSON object.", hint)
    return value


def _settings(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ModelError(f"The folder {name} has no config.json.", "Give a model's folder: config.json, weights, tokenizer.")
    settings = read_json(folder / "config.json", name)
    if "model_file" in settings:
        raise ModelError(f"{name} asks to run its own code ({settings['model_file']!r}), which is never done.", "Choose another model.")
    if not isinstance(settings.get("model_type"), str):
        raise ModelError(f"config.json of {name} names no model_type.", "Give a folder in the Hugging Face layout.")
    return settings


def _check_index(folder: Path, root: Path, files: list[Path], name: str) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    table = read_json(index, name).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise ModelError(f"The weight index of {name} is damaged.", "Fetch the model again.")
    present = {file.name for file in files}
    for file in sorted(set(table.values())):
        confine(root, (folder / file).relative_to(root) if not file.startswith("/") else file)
        if file not in present:
            raise ModelError(f"{name} is incomplete: {file[:200]!r} is missing.", "Fetch the model again.")


def _check(located: Located, files: list[Path], config: RuntimeConfig, progress: Progress, cancelled: Cancel) -> Located:
    """Read every header, then every byte for the digest; the file must stay the same from before to after."""
    found: dict[Path, Header] = {}
    identities: dict[Path, FileIdentity] = {}
    shards = []
    digests = fetch.digests(config)
    for path in files:
        if cancelled():
            raise Cancelled("Loading the model was cancelled.")
        identities[path] = FileIdentity.of(path)
        found[path] = _read_header(path, identities[path].size, gguf=located.is_gguf)
        shards.append(Shard(path.name, identities[path].size, digests.digest(path, progress, cancelled)))
    _check_layers(located, sum(len(header.tensors) for header in found.values()))
    checked = Located(located.kind, located.path, located.name, located.root, found, identities, tuple(shards), located.config)
    checked.recheck()
    return checked


def _read_header(path: Path, size: int, *, gguf: bool) -> Header:
    try:
        with open(path, "rb") as file:
            return headers.read_gguf(file, size) if gguf else headers.read_safetensors(file, size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", "Check that the file is there and readable.") from error
    except ModelError as error:
        raise ModelError(f"{path.name}: {error.message}", error.hint) from error


def _check_layers(located: Located, tensors: int) -> None:
    """A configuration may not ask for more layers than there are tensors: building them would never end."""
    for part in (located.config, located.config.get("text_config")):
        layers = part.get("num_hidden_layers", 0) if isinstance(part, dict) else 0
        if not isinstance(layers, int) or layers > tensors:
            raise ModelError(
                f"config.json of {located.name} says {layers!r} layers, and the weights have {tensors} tensors.", "Fetch it again."
            )
