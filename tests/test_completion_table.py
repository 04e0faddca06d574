"""The table that completes `%%mlx` options without a kernel: it is the one that scripts/option_table.py writes today."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from mlxnb import linemagic, options

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "labextension" / "src" / "options.ts"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("option_table", ROOT / "scripts" / "option_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[dict[str, object]]:
    found = re.search(rf"export const {name}: [^=]*= (\[.*?\n\]);", PLACE.read_text("utf-8"), re.DOTALL)
    assert found is not None, name
    return [json.loads(line.rstrip(",")) for line in found[1].splitlines()[1:-1]]


def test_the_committed_table_is_what_the_script_makes_of_the_options(script: ModuleType) -> None:
    assert PLACE.read_text("utf-8") == script.table(), "run: python scripts/option_table.py"
    assert script.main(["--check"]) == 0


def test_the_check_sees_an_option_that_was_added_since(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options, "OPTIONS", (*options.OPTIONS, options.Option("new", ("--new",), "result", "a new one")))
    assert script.main(["--check"]) == 1
    monkeypatch.setattr(script, "PLACE", tmp_path / "options.ts")
    assert script.main([]) == 0 and '"--new"' in script.PLACE.read_text("utf-8")


def test_the_table_has_every_flag_value_and_command() -> None:
    table = {flag for row in rows("OPTIONS") for flag in row["flags"]}  # type: ignore[attr-defined]
    assert table == set(options.BY_FLAG) and len(table) > 30
    for row, option in zip(rows("OPTIONS"), options.OPTIONS, strict=True):
        assert bool(row["metavar"]) == (option.read is not None), option.name
        assert row["choices"] == list(option.choices)
    assert [row["name"] for row in rows("COMMANDS")] == list(linemagic.COMMANDS)
