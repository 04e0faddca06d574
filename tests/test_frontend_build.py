"""What builds the front end: only what has changed, with whichever node there is, and never with an asset missing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
WIDGETS = ("assets.json", *re.findall(r'one\("src/[^"]+", "([^"]+\.js)"', (ROOT / "widgets" / "build.mjs").read_text("utf-8")))
LAB = ("package.json", "static/remoteEntry.1.js", "static/style.js", "schemas/mlxnb/plugin.json", "schemas/mlxnb/package.json.orig")


@pytest.fixture
def frontend() -> ModuleType:
    spec = importlib.util.spec_from_file_location("frontend_under_test", ROOT / "scripts" / "frontend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A source tree with one file of each kind."""
    for name in ("package.json", "package-lock.json", "tsconfig.json", "build.mjs", "src/a.ts"):
        write(tmp_path / "widgets" / name, name)
    for name in (
        "package.json",
        "package-lock.json",
        "rspack.config.js",
        "install.json",
        "src/b.ts",
        "style/base.css",
        "schema/plugin.json",
    ):
        write(tmp_path / "labextension" / name, name)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


class Builder:
    """In place of node: writes what a build writes, but for `omit`, and notes what it was asked to do."""

    def __init__(self, frontend: ModuleType, monkeypatch: pytest.MonkeyPatch, omit: Sequence[str] = ()) -> None:
        self.did: list[str] = []
        self.omit = set(omit)
        self.status = 0
        made = frontend.Node("a stand-in", self.node, self.npm)
        monkeypatch.setattr(frontend, "some_node", lambda: made)

    def node(self, words: Sequence[str], folder: Path) -> int:
        self.did.append(f"build {folder.name}")
        output = folder / "mlxnb_widgets" / "static" if folder.name == "widgets" else folder / "dist"
        for name in set(WIDGETS if folder.name == "widgets" else LAB) - self.omit:
            write(output / name, f"{name} of {sorted(path.read_text() for path in (folder / 'src').rglob('*.ts'))}")
        return self.status

    def npm(self, words: Sequence[str], folder: Path) -> int:
        assert words[0] == "ci" and "--ignore-scripts" in words
        self.did.append(f"install {folder.name}")
        (folder / "node_modules").mkdir(exist_ok=True)
        return self.status


ALL = ["install widgets", "build widgets", "install labextension", "build labextension"]


def test_a_second_build_does_nothing(frontend: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(frontend, monkeypatch)
    frontend.build(checkout)
    assert builder.did == ALL
    frontend.build(checkout)
    assert builder.did == ALL
    assert frontend.requirements(checkout) == []


def test_the_extension_holds_the_views_bundle_where_the_loader_looks(
    frontend: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Builder(frontend, monkeypatch)
    frontend.build(checkout)
    static = checkout / "labextension" / "dist" / "static" / "mlxnb"
    assert {path.name for path in static.iterdir()} == set(WIDGETS)
    assert (static / "bundle.js").read_text() == (checkout / "widgets" / "mlxnb_widgets" / "static" / "bundle.js").read_text()
    assert (checkout / "labextension" / "dist" / "install.json").exists()


@pytest.mark.parametrize(
    ("path", "did"),
    [
        pytest.param("widgets/src/a.ts", ["build widgets", "build labextension"], id="a view: both, for the extension holds the bundle"),
        pytest.param("widgets/src/deep/new.ts", ["build widgets", "build labextension"], id="a new file"),
        pytest.param("labextension/src/b.ts", ["build labextension"], id="the extension only"),
        pytest.param("labextension/schema/plugin.json", ["build labextension"], id="a setting"),
        pytest.param("widgets/mlxnb_widgets/static/bundle.js", ["build widgets"], id="an output that was tampered with"),
        pytest.param("labextension/package-lock.json", ["install labextension", "build labextension"], id="a lock file"),
        pytest.param("labextension/tests/x.test.ts", [], id="a test"),
    ],
)
def test_what_has_changed_is_built_again(
    frontend: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, path: str, did: list[str]
) -> None:
    builder = Builder(frontend, monkeypatch)
    frontend.build(checkout)
    builder.did.clear()
    write(checkout / path, "something else")
    frontend.build(checkout)
    assert builder.did == did


def test_a_lost_output_is_built_again(frontend: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(frontend, monkeypatch)
    frontend.build(checkout)
    builder.did.clear()
    (checkout / "labextension" / "dist" / "static" / "style.js").unlink()
    frontend.build(checkout)
    assert builder.did == ["build labextension"]


@pytest.mark.parametrize("asset", [*WIDGETS, *LAB])
def test_a_build_that_leaves_an_asset_out_fails_and_names_it(
    frontend: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, asset: str
) -> None:
    Builder(frontend, monkeypatch, omit=[asset])
    with pytest.raises(frontend.BuildError) as error:
        frontend.build(checkout)
    assert asset.replace("remoteEntry.1", "remoteEntry.*") in str(error.value)
    with pytest.raises(frontend.BuildError):  # and again: a failed build leaves no stamp behind
        frontend.build(checkout)


def test_an_empty_asset_counts_as_missing(frontend: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(frontend, monkeypatch, omit=["bundle.js"])
    write(checkout / "widgets" / "mlxnb_widgets" / "static" / "bundle.js", "")
    with pytest.raises(frontend.BuildError, match=r"bundle\.js"):
        frontend.build(checkout)
    assert builder.did == ALL[:2]


def test_a_build_that_fails_is_an_error_whatever_it_left(frontend: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(frontend, monkeypatch)
    builder.status = 1
    with pytest.raises(frontend.BuildError, match="npm could not install"):
        frontend.build(checkout)
    write(checkout / "widgets" / "node_modules" / ".mlxnb-installed", frontend.hashlib.sha256(b"package-lock.json").hexdigest() + "\n")
    with pytest.raises(frontend.BuildError, match="Building widgets failed"):
        frontend.build(checkout)


def test_every_file_that_the_widgets_build_writes_is_required(frontend: ModuleType) -> None:
    assert sorted(frontend.ASSETS) == sorted(WIDGETS) and len(WIDGETS) > 5


# -- which node ------------------------------------------------------------------------------------------------------------


def a_node(folder: Path, version: str, npm: bool = True) -> None:
    for name in ("node", *(["npm"] if npm else [])):
        write(folder / name, f"#!/bin/sh\necho {version}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("version", "npm", "taken"),
    [("v20.11.0", True, True), ("v24.1.0", True, True), ("v18.20.4", True, False), ("v22.0.0", False, False), ("what?", True, False)],
)
def test_the_systems_node_is_taken_if_it_is_new_enough_and_has_npm(
    frontend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, npm: bool, taken: bool
) -> None:
    a_node(tmp_path / "bin", version, npm)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = frontend.system_node()
    assert (found is not None) == taken
    if found is not None:
        assert version in found.label


def test_without_a_node_the_package_is_required_and_the_line_to_type_is_said(
    frontend: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(frontend, "packaged_node", lambda: None)
    assert frontend.requirements(checkout) == [frontend.NODE_PACKAGE]
    with pytest.raises(frontend.BuildError, match="pip install"):
        frontend.build(checkout)


# -- the build hook --------------------------------------------------------------------------------------------------------


def hook(checkout: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run hatch_build.py's hook over a tree, as hatchling does, in a process of its own; prints the build data it made."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[2]); import hatch_build\n"
        "hook = hatch_build.FrontEndHook(sys.argv[1], {}, None, None, '', 'wheel')\n"
        "print(json.dumps({'needs': hook.dependencies()}))\n"
        "data = {'artifacts': [], 'shared_data': {}}\nhook.initialize('standard', data)\nprint(json.dumps(data))"
    )
    words = [sys.executable, "-c", code, str(checkout), str(ROOT)]
    return subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False)


def test_the_hook_stops_the_packaging_when_an_asset_is_missing(checkout: Path, tmp_path: Path) -> None:
    write(checkout / "scripts" / "frontend.py", (ROOT / "scripts" / "frontend.py").read_text("utf-8"))
    a_node(tmp_path / "bin", "v22.0.0")  # it builds nothing at all, and says that all is well
    for part in ("widgets", "labextension"):
        (checkout / part / "node_modules").mkdir()
    done = hook(checkout, {"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin", "MLXNB_NO_FRONTEND": ""})
    assert done.returncode == 1 and "without: loader.js" in done.stderr and "MLXNB_NO_FRONTEND=1" in done.stderr, done.stderr


def test_the_hook_needs_nothing_and_adds_nothing_when_it_is_switched_off(checkout: Path) -> None:
    write(checkout / "scripts" / "frontend.py", (ROOT / "scripts" / "frontend.py").read_text("utf-8"))
    done = hook(checkout, {"PATH": "/nonexistent", "MLXNB_NO_FRONTEND": "1"})
    needs, said, data = done.stdout.splitlines()
    assert json.loads(needs) == {"needs": []} and json.loads(data) == {"artifacts": [], "shared_data": {}}
    assert "MLXNB_NO_FRONTEND is set" in said


# -- the link --------------------------------------------------------------------------------------------------------------


def test_a_link_takes_the_place_of_an_older_copy(frontend: ModuleType, checkout: Path, tmp_path: Path) -> None:
    output = checkout / "labextension" / "dist"
    write(output / "package.json", "{}")
    place = tmp_path / "venv" / "share" / "jupyter" / "labextensions" / "mlxnb"
    write(place / "package.json", "an older copy")
    for _ in range(2):
        assert frontend.link(tmp_path / "venv", checkout) == place
        assert place.resolve() == output.resolve()
    place.unlink()
    place.symlink_to(tmp_path / "gone")
    frontend.link(tmp_path / "venv", checkout)
    assert place.resolve() == output.resolve()
