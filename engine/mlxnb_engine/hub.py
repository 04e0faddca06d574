"""Models of the Hugging Face hub: what is complete in its local cache, and fetching what is not. No MLX, off the engine thread."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import Cancelled, ModelError
from .fingerprint import Cancel, Progress

REPO_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
_WANTED = re.compile(r"(model.*\.safetensors|.*\.json|.*\.jinja|tokenizer\.model|.*\.tiktoken)")
"""Files at the top of a repository that a model may need. No Python: code of a model is never fetched or run."""


def hush_progress() -> None:
    """Keep the hub's progress library from printing into a cell that the notebook has no widgets for its bars.

    Call it before the first import of huggingface_hub or transformers: the warning comes with their import.
    """
    warnings.filterwarnings("ignore", message="IProgress not found")


def cache_folder() -> Path:
    """The hub library's own cache, where other programs keep their models too."""
    hush_progress()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(name: str) -> Path:
    """The folder of one repository in the cache: `blobs/` and, linking into it, `snapshots/<revision>/`."""
    return cache_folder() / f"models--{name.replace('/', '--')}"


def cached_snapshot(name: str) -> Path | None:
    """The folder of the newest revision of `name` if every file of it is here, else None."""
    folder = repo_folder(name)
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if re.fullmatch(r"[0-9a-f]{1,64}", revision) and is_complete(snapshot) else None


def cached_names() -> list[str]:
    """Names of all complete models in the cache, sorted."""
    try:
        folders = sorted(cache_folder().glob("models--*--*"))
    except OSError:
        return []
    names = (folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    return [name for name in names if REPO_NAME.fullmatch(name) and cached_snapshot(name) is not None]


def is_complete(folder: Path) -> bool:
    """A configuration, and every weight file that the index names (or at least one if there is no index)."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(path.is_file() for path in folder.glob("model*.safetensors"))
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return bool(named) and all((folder / str(file)).is_file() for file in set(named))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def ensure_snapshot(name: str, offline: bool, progress: Progress, cancelled: Cancel, near: Callable[[], str]) -> Path:
    """The complete local folder of repository `name`, fetched if need be.

    near: a sentence with similar names that are on this machine, for the error messages. Raises Cancelled and ModelError.
    """
    if (found := cached_snapshot(name)) is not None:
        return found
    if offline:
        raise ModelError(f"{name} is not on this machine, and offline is set.", f"Unset offline (HF_HUB_OFFLINE) once. {near()}".strip())
    from huggingface_hub import HfApi, snapshot_download

    progress("look up", 0, 0)
    try:
        info = HfApi().model_info(name, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or () if _WANTED.fullmatch(file.rfilename)}
        _check_files(name, files, [file.rfilename for file in info.siblings or ()])
        total = sum(files.values())
        _check_space(name, total)
        path = snapshot_download(
            name,
            revision=info.sha,
            cache_dir=cache_folder(),
            allow_patterns=sorted(files),
            tqdm_class=_bar(progress, cancelled, total),
            max_workers=4,
        )
        if cached_snapshot(name) is None:
            _remember(name, info.sha)
    except (Cancelled, ModelError):
        raise
    except Exception as error:
        raise _explained(name, error, near) from error
    if not is_complete(Path(path)):
        raise ModelError(f"{name} is still incomplete after fetching it.", "Try again; what has arrived is kept.")
    return Path(path)


def _check_files(name: str, files: Iterable[str], everything: Iterable[str]) -> None:
    if any(file.endswith(".safetensors") for file in files):
        return
    if any(file.endswith(".gguf") for file in everything):
        raise ModelError(f"{name} has only GGUF files.", "Download one of them and give its path: -m FILE.gguf.")
    raise ModelError(
        f"{name} has no safetensors weights (model*.safetensors).",
        "Files such as .bin and .pt can run code when opened and are not read; choose a safetensors version of the model.",
    )


def _check_space(name: str, total: int) -> None:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < total:
        raise ModelError(
            f"{name} needs {total / 1e9:.1f} GB of disk, and {folder} has {free / 1e9:.1f} GB left.",
            "Free some space, or move the cache with HF_HOME.",
        )


def _bar(progress: Progress, cancelled: Cancel, total: int) -> Any:
    """A silent progress bar class for the hub library that reports bytes and stops when the person does.

    The library may count the same bytes in two bars, received and written: the fuller one is reported.
    """
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._bytes = kwargs.get("unit") == "B"
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if cancelled():
                raise Cancelled("Fetching the model was cancelled.")
            self._done += int(n or 0)
            if self._bytes:
                progress("download", max(0, min(self._done, total)), total)

    return Bar


def _remember(name: str, revision: str | None) -> None:
    """A download by revision writes no `refs/main`; without it the model would not be found offline."""
    reference = repo_folder(name) / "refs" / "main"
    if revision:
        reference.parent.mkdir(parents=True, exist_ok=True)
        fresh = reference.with_name(f".main.{os.getpid()}")
        fresh.write_text(revision, encoding="utf-8")
        os.replace(fresh, reference)


def _explained(name: str, error: Exception, near: Callable[[], str]) -> ModelError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"{name} needs its owner's permission.", f"Ask for it on https://huggingface.co/{name}, then: hf auth login.")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return ModelError(f"There is no model {name!r} on the hub, or it is private.", f"Check the spelling. {near()}".strip())
    if isinstance(error, OSError) and error.errno is not None and error.strerror and not isinstance(error, ConnectionError):
        return ModelError(f"{name} could not be stored: {error.strerror}.", "Check the space and the rights of the cache folder.")
    return ModelError(
        f"{name} is not on this machine, and the hub could not be reached ({type(error).__name__}).",
        f"Check the network and try again. {near()}".strip(),
    )
