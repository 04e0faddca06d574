"""Completion through IPython's own completer: options, values, variables, commands, and silence elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest
from fake_client import FakeClient
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from mlxnb import runtime


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell with a few variables; no model on disk but one GGUF file in the working directory."""
    ip = InteractiveShell.instance()
    ip.reset(new_session=False)
    made = runtime._make
    ip.extension_manager.loaded.discard("mlxnb")
    ip.extension_manager.load_extension("mlxnb")
    ip.user_ns.update(question="q", questions=["a"], frame=pandas.DataFrame({"city": [1], "not a name": [2]}), _private=1, number=3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MLXNB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").touch()
    yield ip
    ip.extension_manager.unload_extension("mlxnb")
    runtime.use(made)


def offered(shell: InteractiveShell, text: str) -> list[str]:
    """What is offered at `|` (the end if there is none), as the notebook asks for it."""
    at = text.index("|") if "|" in text else len(text)
    code = text.replace("|", "", 1)
    with provisionalcompleter():
        return [code[: found.start] + found.text for found in shell.Completer.completions(code, at)]


def words(shell: InteractiveShell, text: str) -> list[str]:
    """The same, without the part before the word."""
    head = text.partition("|")[0].rpartition(" ")[0].rpartition("\n")[0]
    return [full[len(head) :].split()[-1] for full in offered(shell, text)]


def test_an_option_is_completed_and_keeps_what_stands_before(shell: InteractiveShell) -> None:
    assert offered(shell, "%%mlx --max-t") == ["%%mlx --max-tokens"]
    assert offered(shell, "%%mlx --max-t|\nprompt") == ["%%mlx --max-tokens"]


def test_every_option_is_offered_but_those_already_given(shell: InteractiveShell) -> None:
    found = words(shell, "%%mlx -n 2 --temp=1 --stop x --|")
    assert "--top-p" in found and "--stop" in found
    assert "--temp" not in found and "--samples" not in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%%mlx --view |", ["answer", "tokens", "raw", "loom", "none"]),
        ("%%mlx --view t|", ["tokens"]),
        ("%%mlx --thinking o|", ["on", "off"]),
        ("%%mlx --view=r|", ["--view=raw"]),
        ("%%mlx --dtype bf|", ["bfloat16"]),
        ("%%mlx -m |", ["./tiny.gguf"]),
        ("%%mlx --sweep xtc_p|", ["xtc_probability="]),
        ("%%mlx --each q|", ["questions"]),
        ("%%mlx --each f|", ["frame"]),
        ("%mlx un|", ["unload"]),
        ("%mlx load |", ["./tiny.gguf", "--dtype"]),
        ("%mlx load x --dtype f|", ["float32", "float16", "file"]),
        ("%mlx config max_r|", ["max_rows="]),
        ("%mlx config hlg_t|", ["hlg_toe="]),
        ("%mlx help opt|", ["options"]),
    ],
)
def test_values_are_completed(shell: InteractiveShell, text: str, expected: list[str]) -> None:
    assert words(shell, text) == expected


def test_models_in_memory_are_offered_without_starting_an_engine(shell: InteractiveShell) -> None:
    assert runtime.current() is None
    offered(shell, "%%mlx -m |")
    assert runtime.current() is None
    client = FakeClient(models=["org/loaded"])
    runtime.use(lambda settings: client)
    runtime.client()
    assert words(shell, "%%mlx -m org/|") == ["org/loaded"]
    assert words(shell, "%mlx unload |") == ["org/loaded"]


def test_models_on_disk_are_found_by_their_snapshot(shell: InteractiveShell, tmp_path: Path) -> None:
    for name, whole in (("models--org--good", True), ("models--org--partial", False)):
        folder = tmp_path / "hub" / name / "snapshots" / "abc"
        folder.mkdir(parents=True)
        if whole:
            (folder / "config.json").touch()
    assert runtime.models_on_disk() == ["./tiny.gguf", "org/good"]


def test_variables_are_offered_inside_braces_only(shell: InteractiveShell) -> None:
    assert words(shell, "%%mlx\nAnswer {{ quest|") == ["question", "questions"]
    assert words(shell, "%%mlx --system 'x {{ numb|") == ["number"]
    assert "_private" not in words(shell, "%%mlx\n{{ |")
    assert "question" not in words(shell, "%%mlx\n{{ number }} quest|")


def test_items_of_each_come_first_inside_braces(shell: InteractiveShell) -> None:
    assert words(shell, "%%mlx --each frame\nName {{ |")[:3] == ["item", "index", "city"]


def test_running_background_cells_are_offered_to_cancel_and_wait(shell: InteractiveShell) -> None:
    client = FakeClient(hold=1)
    runtime.use(lambda settings: client)
    assert shell.run_cell("%%mlx --bg\none two").success
    name = client.requests[0].id
    assert words(shell, "%mlx wait |") == [name]
    assert words(shell, "%mlx cancel |") == ["all", name]
    client.release()


def test_other_cells_are_left_to_ipython(shell: InteractiveShell) -> None:
    assert "mlxnb" not in {found.type for found in _found(shell, "quest")}
    assert "mlxnb" not in {found.type for found in _found(shell, "%%time\n--max")}
    assert any(found.text.endswith("mlx") for found in _found(shell, "%%ml"))


def _found(shell: InteractiveShell, code: str) -> list[object]:
    with provisionalcompleter():
        return list(shell.Completer.completions(code, len(code)))  # type: ignore[arg-type]
