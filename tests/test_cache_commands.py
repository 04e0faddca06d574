"""`%mlx cache`, `mlxnb cache` and `mlxnb.cache_*` on a directory without an engine: what they say, what they delete, what they ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_rig import Disk, chain_of, layout_of, records_in
from fake_client import FakeClient
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import mlxnb
from mlxnb import caching, cli, magic, runtime
from mlxnb_engine.errors import RequestError

BIG, SMALL = layout_of(seed=1, width=64), layout_of(seed=2)
NOT_LABELLED = layout_of(seed=3)


@pytest.fixture
def filled(prefix_dir: Path) -> Path:
    """A directory with blocks of two models that have names and of one that has none."""
    disk = Disk(prefix_dir)
    for layout, label, blocks in ((BIG, "org/big", 6), (SMALL, "org/small \x1b[2J", 3), (NOT_LABELLED, "", 1)):
        for block in chain_of(layout, 1, blocks):
            assert disk.store.publish(layout, block) == "published"
        if label:
            disk.store.label(layout.namespace, label)
    disk.store.close()
    return prefix_dir


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    ip = InteractiveShell.instance()
    ip.reset(new_session=False)
    made = runtime._make
    if hasattr(ip, magic._KEY):
        delattr(ip, magic._KEY)
    ip.extension_manager.loaded.discard("mlxnb")
    ip.extension_manager.load_extension("mlxnb")
    yield ip
    ip.extension_manager.unload_extension("mlxnb")
    runtime.use(made)


@pytest.fixture
def line(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs one line that must succeed; what it printed."""

    def run(text: str) -> str:
        result = shell.run_cell(text)
        assert result.success, result.error_in_exec
        return capsys.readouterr().out

    return run


def refused(shell: InteractiveShell, text: str) -> str:
    error = shell.run_cell(text).error_in_exec
    assert isinstance(error, RequestError), error
    return str(error)


# -- info ------------------------------------------------------------------------------------------------------------------


def test_the_magic_shows_the_folder_its_budget_and_each_model(filled: Path, line: Callable[[str], str]) -> None:
    said = line("%mlx cache")
    assert line("%mlx cache info") == said
    rows = said.splitlines()
    assert rows[0] == "memory   no engine has loaded a model here"
    assert rows[1].startswith("disk     ") and "10 blocks of 64 tokens" in rows[1] and rows[2].strip() == str(filled)
    assert "free; nothing more is saved below" in rows[3]
    table = rows[rows.index("") + 1 :]
    assert table[0].split() == ["model", "setup", "memory", "disk", "blocks", "last", "used"]
    assert [row.split()[0] for row in table[1:]] == ["org/big", "org/small", "?"], "the largest comes first"
    assert BIG.namespace.hex()[:8] in table[1] and table[1].rstrip().endswith("just now")
    assert "\x1b" not in said, "a model's name is not ours"


def test_an_empty_or_unreadable_folder_is_said_in_words(
    prefix_dir: Path, line: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "0 blocks of 64 tokens" in line("%mlx cache") and not prefix_dir.exists(), "looking makes no folder"
    monkeypatch.setenv("MLXNB_PREFIX_DISK_BYTES", "0")
    assert "disk     off\n" in line("%mlx cache")
    prefix_dir.mkdir(parents=True)
    (prefix_dir / "tmp").write_text("")
    assert "it cannot be read" in line("%mlx cache")


def test_looking_changes_nothing(filled: Path, line: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> list[tuple[str, int, int]]:
        return [(str(path), (s := path.lstat()).st_ino, s.st_mtime_ns) for path in sorted(filled.rglob("*"))]

    monkeypatch.setenv("MLXNB_PREFIX_DISK_BYTES", "100")  # far below what is there
    before = seen()
    line("%mlx cache")
    assert mlxnb.cache_info()["disk"]["blocks"] == 10
    assert cli.main(["cache"]) == 0
    assert seen() == before


def test_files_that_were_set_aside_show(filled: Path, line: Callable[[str], str]) -> None:
    (filled / "quarantine" / f"{'ab' * 32}-{'cd' * 16}.kv").write_bytes(bytes(5000))
    assert "damaged  1 file set aside, 5" in line("%mlx cache")
    line("%mlx cache clear --yes")
    assert "damaged" not in line("%mlx cache") and list((filled / "quarantine").iterdir()) == []


def test_ages_are_given_in_the_largest_unit() -> None:
    ages = [0, 59, 60, 119, 3_600, 7_300, 86_400, 864_000]
    assert [caching._ago(age) for age in ages] == [
        *["just now"] * 2, *["1 minute ago"] * 2, "1 hour ago", "2 hours ago", "1 day ago", "10 days ago"
    ]  # fmt: skip


# -- clear -----------------------------------------------------------------------------------------------------------------


def test_the_magic_asks_before_it_deletes(filled: Path, line: Callable[[str], str]) -> None:
    said = line("%mlx cache clear")
    assert "This deletes the whole prefix cache" in said and "To do it: %mlx cache clear --yes" in said
    assert len(records_in(filled)) == 10
    said = line("%mlx cache clear org/big")
    assert "all that is kept of org/big" in said and "%mlx cache clear org/big --yes" in said
    assert len(records_in(filled)) == 10


def test_one_model_or_one_setup_or_all_can_be_deleted(filled: Path, line: Callable[[str], str]) -> None:
    assert line("%mlx cache clear org/big --yes").startswith("Deleted 6 files, ")
    assert {path.parts[-3] for path in records_in(filled)} == {SMALL.namespace.hex(), NOT_LABELLED.namespace.hex()}
    assert line(f"%mlx cache clear {NOT_LABELLED.namespace.hex()[:8]} --yes").startswith("Deleted 1 file, ")
    assert line("%mlx cache clear --yes").startswith("Deleted 3 files, ")
    assert records_in(filled) == [] and line("%mlx cache clear --yes") == "Nothing was kept.\n"


def test_a_mistake_names_what_there_is(filled: Path, shell: InteractiveShell) -> None:
    assert "org/big" in refused(shell, "%mlx cache clear org/bog --yes")
    assert "Did you mean 'clear'?" in refused(shell, "%mlx cache clean")
    assert "clear, flush" in refused(shell, "%mlx cache zzz")
    assert "one word too many" in refused(shell, "%mlx cache clear a b")
    assert "one word too many" in refused(shell, "%mlx cache clear --force")
    assert "one word too many" in refused(shell, "%mlx cache info all")
    assert len(records_in(filled)) == 10


def test_what_is_not_ours_stays(filled: Path, line: Callable[[str], str]) -> None:
    mine = filled / "v1" / BIG.namespace.hex() / "notes.txt"
    mine.write_text("a person's own")
    line("%mlx cache clear --yes")
    assert mine.read_text() == "a person's own"


# -- flush, and the words of a receipt -------------------------------------------------------------------------------------


def test_without_an_engine_there_is_nothing_to_flush(line: Callable[[str], str]) -> None:
    assert line("%mlx cache flush") == "On disk: nothing was left to save.\n"


def test_a_receipt_that_is_not_good_is_an_error_that_says_what_is_missing() -> None:
    good: dict[str, Any] = {"ok": True, "published": 3, "dropped": 0, "failed": 0, "pending": 0, "missing": 0, "unsaved": 0}
    assert caching.flushed(good) == "On disk: 3 blocks saved since the last time."
    with pytest.raises(RequestError) as error:
        caching.flushed({**good, "ok": False, "failed": 2, "unsaved": 1})
    assert "2 failed to be written; 1 only in memory" in str(error.value) and "3 blocks saved" in str(error.value)


# -- the Python API and the command line -----------------------------------------------------------------------------------


def test_what_the_magic_does_the_api_does(filled: Path) -> None:
    assert mlxnb.cache_info()["models"][0]["model"] == "org/big"
    assert mlxnb.cache_clear("org/big")["files"] == 6
    assert mlxnb.cache_flush()["ok"]
    assert mlxnb.cache_clear()["files"] == 4 and mlxnb.cache_info()["models"] == []


def test_a_running_engine_is_asked(shell: InteractiveShell) -> None:
    client = FakeClient()
    runtime.use(lambda settings: client)
    runtime.client()
    asked: list[object] = []
    client.cache_info = lambda: asked.append("info") or {"models": []}  # type: ignore[method-assign,func-returns-value]
    client.cache_clear = lambda model=None: asked.append(model) or {}  # type: ignore[method-assign,func-returns-value]
    client.cache_flush = lambda timeout_s=0.0: asked.append(timeout_s) or {}  # type: ignore[method-assign,func-returns-value]
    mlxnb.cache_info(), mlxnb.cache_clear("m"), mlxnb.cache_flush(7.0)
    assert asked == ["info", "m", 7.0]


def test_the_command_line_shows_and_deletes(filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["cache"]) == 0
    said = capsys.readouterr().out
    assert cli.main(["cache", "info"]) == 0
    assert capsys.readouterr().out == said and "org/big" in said and "\x1b" not in said
    assert cli.main(["cache", "info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disk"]["blocks"] == 10
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    assert cli.main(["cache", "clear"]) == 1
    assert "Nothing was deleted" in capsys.readouterr().err and len(records_in(filled)) == 10
    assert cli.main(["cache", "clear", "nobody", "--yes"]) == 1
    assert "Kept: org/big" in capsys.readouterr().err
    assert cli.main(["cache", "clear", "org/big", "--yes"]) == 0
    assert "Deleted 6 files" in capsys.readouterr().out and len(records_in(filled)) == 4
    assert cli.main(["cache", "flush"]) == 0


@pytest.mark.parametrize(("typed", "left"), [("y", 0), ("", 10), ("n", 10)])
def test_the_command_line_asks_a_person(
    typed: str, left: int, filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: typed)
    assert cli.main(["cache", "clear"]) == (0 if left == 0 else 1)
    assert len(records_in(filled)) == left


def test_the_command_loads_no_mlx(filled: Path) -> None:
    code = "import sys; from mlxnb import cli; cli.main(['cache']); print('mlx' in sys.modules or 'mlx.core' in sys.modules)"
    root = Path(__file__).resolve().parent.parent
    paths = os.pathsep.join(str(root / part) for part in ("", "engine", "widgets"))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False" and "org/big" in done.stdout


def test_what_the_disk_has_to_say_is_printed_once_in_a_kernel(
    shell: InteractiveShell, line: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxnb.notices._told", set())
    client = FakeClient()
    runtime.use(lambda settings: client)
    status, notices = client.status, ["The disk is nearly full \x1b[2J."]
    client.status = lambda: {**status(), "notices": list(notices)}  # type: ignore[method-assign]
    said = [line("%%mlx\nhi"), line("%%mlx\nhi")]
    notices.append("A damaged cache file was set aside.")
    said.append(line("%%mlx\nhi"))
    assert [text.count("mlxnb: ") for text in said] == [1, 0, 1]
    assert "mlxnb: The disk is nearly full" in said[0] and "\x1b" not in said[0] and "set aside" in said[2]


# -- completion ------------------------------------------------------------------------------------------------------------


def test_actions_and_what_is_kept_are_completed(filled: Path, shell: InteractiveShell) -> None:
    def offered(text: str) -> list[str]:
        with provisionalcompleter():
            return [found.text for found in shell.Completer.completions(text, len(text))]

    assert offered("%mlx ca") and "cache" in "".join(offered("%mlx cac"))
    assert {"info", "clear", "flush"} <= set(offered("%mlx cache "))
    assert "org/big" in offered("%mlx cache clear org/b") and "--yes" in offered("%mlx cache clear --")
