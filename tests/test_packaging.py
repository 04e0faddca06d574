"""What is shipped: the wheel's files, the wheel at work outside the repository, the set-up script, the Makefile's promises."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "labextension"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
DATA = f"mlxnb-{VERSION}.data/data/share/jupyter/"
SETUP = ROOT / "scripts" / "setup.sh"
PACKAGES = {"mlxnb": ROOT / "mlxnb", "mlxnb_engine": ROOT / "engine" / "mlxnb_engine", "mlxnb_widgets": ROOT / "widgets" / "mlxnb_widgets"}


def run(*argv: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=540, check=False)


def clean_env() -> dict[str, str]:
    """The environment without what would let a child find the checkout."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def built(what: str, folder: Path, env: Mapping[str, str]) -> Path:
    """The wheel or sdist of this checkout. The front end is built by the hook, unless it is built already."""
    done = run(sys.executable, "-m", "build", f"--{what}", "--no-isolation", "--outdir", folder, ROOT, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("mlxnb-*")
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("dist"), clean_env())


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(wheel, tmp_path_factory.mktemp("fresh") / "venv")


def installed(wheel: Path, folder: Path) -> Path:
    """Python of a new environment with the wheel installed. Dependencies are borrowed by path from the running one, behind
    the new site-packages; a path in a .pth file brings modules, but not the editable install that lies beside them."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    done = pip(python, "install", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (site / "borrowed.pth").write_text("\n".join(dict.fromkeys(borrowed)) + "\n")
    return python


def pip(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "pip", "--python", python, *words, cwd=python.parent, env=clean_env())


# -- the wheel -----------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_every_package_file_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc",)
    }
    info = {name for name in names if ".dist-info/" in name}
    expected |= {f"{DATA}kernels/mlxnb/{path.name}" for path in (ROOT / "mlxnb" / "kernelspec").iterdir()}
    dist = ROOT / "labextension" / "dist"
    expected |= {f"{DATA}labextensions/mlxnb/{path.relative_to(dist).as_posix()}" for path in dist.rglob("*") if path.is_file()}
    expected |= {f"mlxnb/examples/{path.name}" for path in (ROOT / "examples").glob("*.ipynb")}
    assert names - info == expected
    assert {name.partition("/")[2] for name in info} == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert all(f"{package}/py.typed" in names for package in PACKAGES)


def test_the_wheel_lists_every_asset_of_the_front_end(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    widgets = {name.rpartition("/")[2] for name in names if name.startswith("mlxnb_widgets/static/")}
    assert {"loader.js", "bundle.js", "highlight.js", "chart.js", "diff.js", "assets.json"} <= widgets
    place = f"{DATA}labextensions/mlxnb/"
    described = json.loads(archive.read(f"{place}package.json"))
    entry = described["jupyterlab"]["_build"]
    assert f"{place}{entry['load']}" in names and entry["extension"] and entry["mimeExtension"] and entry["style"]
    assert f"{place}schemas/mlxnb/plugin.json" in names and f"{place}install.json" in names
    assert f"{DATA}kernels/mlxnb/kernel.json" in names
    for name in widgets:  # one bundle in two places: the extension serves what the widgets were built for
        assert archive.read(f"{place}static/mlxnb/{name}") == archive.read(f"mlxnb_widgets/static/{name}"), name


def test_a_wheel_without_the_front_end_says_so_and_has_none(tmp_path: Path) -> None:
    names = zipfile.ZipFile(built("wheel", tmp_path, {**clean_env(), "MLXNB_NO_FRONTEND": "1", "PATH": "/nonexistent"})).namelist()
    assert not [name for name in names if "/static/" in name or "labextensions" in name]
    assert "mlxnb_widgets/__init__.py" in names and f"{DATA}kernels/mlxnb/kernel.json" in names


def test_the_source_archive_has_what_builds_the_front_end_and_nothing_that_was_built(tmp_path: Path) -> None:
    with tarfile.open(built("sdist", tmp_path, clean_env())) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"hatch_build.py", "scripts/frontend.py", "scripts/setup.sh", "widgets/build.mjs", "widgets/src/bundle.tsx"}
    needed |= {f"{part}/{file}" for part in ("widgets", "labextension") for file in ("package.json", "package-lock.json", "tsconfig.json")}
    needed |= {
        f"labextension/{path.relative_to(LAB).as_posix()}" for folder in ("src", "style", "schema") for path in (LAB / folder).iterdir()
    }
    assert needed <= names, needed - names
    assert not [name for name in names if "node_modules" in name or "/static/" in name or name.startswith("labextension/dist")]


def test_jupyterlab_finds_the_extension_and_the_kernel_and_uninstalling_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    python = installed(wheel, tmp_path / "venv")
    env = {key: value for key, value in clean_env().items() if not key.startswith("JUPYTER")} | {"HOME": str(tmp_path), "NO_COLOR": "1"}
    listed = run(python, "-m", "jupyterlab.labextensions", "list", cwd=tmp_path, env=env)
    lines = re.sub(r"\x1b\[\d*m", "", listed.stdout + listed.stderr).splitlines()
    ours = [line.strip() for line in lines if re.match(r"\s+mlxnb ", line)]
    assert ours == [f"mlxnb v{VERSION} enabled OK (python, mlxnb)"], lines
    assert not [line for line in lines if re.search("warn|error|invalid|incompatible|X$", line, re.IGNORECASE)], lines
    kernels = json.loads(run(python, "-m", "jupyter_client.kernelspecapp", "list", "--json", cwd=tmp_path, env=env).stdout)["kernelspecs"]
    assert kernels["mlxnb"]["spec"]["display_name"] == "Python (MLX)"
    assert Path(kernels["mlxnb"]["resource_dir"]).is_relative_to(tmp_path)

    removed = pip(python, "uninstall", "--yes", "mlxnb")
    assert removed.returncode == 0, removed.stdout + removed.stderr
    left = [path for path in (tmp_path / "venv").rglob("*") if "mlxnb" in path.name.lower()]
    assert left == []


def test_the_licence_in_the_wheel_is_the_whole_apache_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    text = archive.read(name).decode()
    assert text == (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_wheel_brings_no_mlx_backend_to_linux_by_itself(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    ours = re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)
    linux = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
    mac = {"platform_system": "Darwin", "sys_platform": "darwin", "platform_machine": "arm64"}

    def wanted(texts: list[str], machine: dict[str, str], extra: str = "") -> set[str]:
        needs = [Requirement(text) for text in texts]
        found = {need for need in needs if need.marker is None or need.marker.evaluate({**machine, "extra": extra})}
        return {need.name + "".join(f"[{e}]" for e in sorted(need.extras)) for need in found}

    theirs = importlib.metadata.requires("mlx-lm") or []
    assert not {name for name in wanted(ours, linux) | wanted(theirs, linux) if name.startswith("mlx") and name != "mlx-lm"}
    assert "mlx" in wanted(ours, mac)
    assert {"mlx[cpu]", "mkl"} <= wanted(ours, linux, "cpu")
    assert "mlx[cuda13]" in wanted(ours, linux, "cuda13")
    assert "mkl" not in wanted(ours, {**linux, "platform_machine": "aarch64"}, "cpu")


SMOKE = """
import sys
import mlxnb, mlxnb_engine, mlxnb_widgets
from IPython.core.interactiveshell import InteractiveShell
print(mlxnb.__file__, mlxnb_engine.__file__, mlxnb_widgets.__file__, sep="\\n")
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "mlxnb")
shell.run_cell_magic("mlx", "--max-tokens 12 --seed 1 -o answer", "What is the capital of France?")
run = shell.user_ns["answer"]
print("ANSWER", run.finish_reason, repr(run.text))
"""


def test_the_wheel_installed_elsewhere_loads_the_extension_and_answers(fresh_python: Path, tmp_path: Path) -> None:
    done = run(fresh_python, "-c", SMOKE, cwd=tmp_path, env=clean_env())
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for line, package in zip(lines, PACKAGES, strict=False):
        assert line.startswith(str(fresh_python.parent.parent)) and line.endswith(f"/{package}/__init__.py"), line
    assert re.search(r"^ANSWER (stop|length) .*Paris", done.stdout, re.MULTILINE), done.stdout
    assert "Traceback" not in done.stderr, done.stderr


def test_the_command_of_the_wheel_runs_and_finds_its_own_version(fresh_python: Path, tmp_path: Path) -> None:
    done = run(fresh_python.parent / "mlxnb", "--version", cwd=tmp_path, env=clean_env())
    assert (done.returncode, done.stdout) == (0, f"mlxnb {VERSION}\n"), done.stderr


def test_the_wheel_brings_the_quickstart_that_the_demo_runs(wheel: Path, fresh_python: Path, tmp_path: Path) -> None:
    inside = zipfile.ZipFile(wheel).read("mlxnb/examples/01_quickstart.ipynb")
    assert inside == (ROOT / "examples" / "01_quickstart.ipynb").read_bytes()
    code = "from mlxnb import demo; print(demo.quickstart()); demo.read(demo.quickstart())"
    done = run(fresh_python, "-c", code, cwd=tmp_path, env=clean_env())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(fresh_python.parent.parent)) and done.stdout.endswith("mlxnb/examples/01_quickstart.ipynb\n")


def test_an_editable_install_gets_no_copy_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy among the installed packages would grow old, and be a second mlxnb for Python."""
    monkeypatch.setenv("MLXNB_NO_FRONTEND", "1")
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["FrontEndHook"](str(ROOT), {}, None, None, "", "wheel")
    for version, copied in (("editable", False), ("standard", True)):
        build_data: dict[str, dict[str, str]] = {"force_include": {}, "force_include_editable": {}}
        hook.initialize(version, build_data)
        assert bool(build_data["force_include"]) is copied and not build_data["force_include_editable"]


def test_the_readme_promises_no_package_index() -> None:
    """Until the first release: what it tells a newcomer to type must work today."""
    lines = re.findall(r"^pip install (.*?)\s*(?:#|$)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert lines and all(line.startswith('".[') for line in lines), lines
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {name for line in lines for name in re.findall(r"\w+", line)} <= set(extras)


def test_the_borrowed_environment_lets_nothing_of_the_checkout_through(fresh_python: Path, tmp_path: Path) -> None:
    """The negative control of the two tests above: without the wheel, none of our packages can be imported."""
    hide = "import sys; from importlib.util import find_spec; sys.path[:] = [p for p in sys.path if not p.startswith(sys.prefix)]"
    done = run(fresh_python, "-c", f"{hide}; print([find_spec(p) for p in {list(PACKAGES)}])", cwd=tmp_path, env=clean_env())
    assert done.stdout == "[None, None, None]\n", done.stdout + done.stderr


# -- the set-up script on other machines ---------------------------------------------------------------------------------

LINUX = {"uname": 'case "$1" in -m) echo x86_64;; *) echo Linux;; esac', "getconf": "echo glibc 2.36"}
MAC = {"uname": 'case "$1" in -m) echo arm64;; *) echo Darwin;; esac', "sw_vers": "echo 14.5"}
SMI = 'echo "%s"'
PYENV_SHIM = "echo pyenv: python3.13: command not found >&2; exit 127"
PYTHON_GOOD = 'case "$2" in *version_info*) echo %s;; esac'
PYTHON_OLD = 'case "$2" in *version_info*) echo 3.9; exit 1;; esac'
PYTHON_NO_VENV = 'case "$2" in *version_info*) echo 3.12;; *) exit 1;; esac'


class Machine:
    """A PATH of stand-ins: each command is a shell script, and nothing else can be found but what the script needs."""

    def __init__(self, folder: Path, commands: Mapping[str, str]) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        for name in ("head", "sed"):
            (self.folder / name).symlink_to(next(p for p in (Path("/usr/bin") / name, Path("/bin") / name) if p.exists()))
        for name, body in commands.items():
            path = self.folder / name
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run("/bin/sh", SETUP, *words, cwd=self.folder, env={"PATH": str(self.folder)})


@pytest.mark.parametrize(
    ("commands", "backend"),
    [
        pytest.param(LINUX, "cpu", id="linux"),
        pytest.param({**LINUX, "nvidia-smi": SMI % "580.65.06"}, "cuda13", id="gpu"),
        pytest.param({**LINUX, "nvidia-smi": SMI % "535.104"}, "cpu", id="old driver"),
        pytest.param({**LINUX, "nvidia-smi": "echo No devices were found; exit 6"}, "cpu", id="no device"),
        pytest.param({**LINUX, "getconf": "echo glibc 2.35"}, "cpu", id="oldest glibc"),
        pytest.param({**LINUX, "getconf": "echo glibc 3.1"}, "cpu", id="future glibc"),
        pytest.param(MAC, "metal", id="mac"),
        pytest.param({**MAC, "sw_vers": "echo 26.1"}, "metal", id="new mac"),
    ],
)
def test_the_backend_follows_from_the_machine(tmp_path: Path, commands: Mapping[str, str], backend: str) -> None:
    done = Machine(tmp_path, commands).ask("backend")
    assert (done.returncode, done.stdout) == (0, f"{backend}\n"), done.stderr


@pytest.mark.parametrize(
    ("commands", "word"),
    [
        pytest.param({**LINUX, "getconf": "echo glibc 2.31"}, "glibc 2.31", id="old glibc"),
        pytest.param({**LINUX, "getconf": "exit 1"}, "musl", id="musl"),
        pytest.param({**LINUX, "uname": 'case "$1" in -m) echo riscv64;; *) echo Linux;; esac'}, "riscv64", id="riscv"),
        pytest.param({**MAC, "sw_vers": "echo 13.6"}, "13.6", id="old mac"),
        pytest.param({"uname": 'case "$1" in -m) echo x86_64;; *) echo Darwin;; esac'}, "Intel", id="intel mac"),
        pytest.param({"uname": 'case "$1" in -m) echo x86_64;; *) echo Darwin;; esac', "sysctl": "echo 1"}, "Rosetta", id="rosetta"),
        pytest.param({"uname": 'case "$1" in -m) echo x86_64;; *) echo MINGW64_NT-10.0;; esac'}, "WSL 2", id="windows"),
        pytest.param({"uname": 'case "$1" in -m) echo amd64;; *) echo FreeBSD;; esac'}, "FreeBSD", id="bsd"),
    ],
)
def test_another_machine_is_told_in_one_sentence(tmp_path: Path, commands: Mapping[str, str], word: str) -> None:
    done = Machine(tmp_path, commands).ask("backend")
    assert done.returncode == 1 and done.stdout == ""
    assert word in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("commands", "chosen"),
    [
        pytest.param({"python3.14": PYTHON_GOOD % "3.14", "python3.11": PYTHON_GOOD % "3.11"}, "python3.14", id="newest first"),
        pytest.param({"python3.13": PYENV_SHIM, "python3.12": PYTHON_GOOD % "3.12"}, "python3.12", id="shim that only prints"),
        pytest.param({"python3.12": PYTHON_NO_VENV, "python3.11": PYTHON_GOOD % "3.11"}, "python3.11", id="one without venv"),
        pytest.param({"python3": PYTHON_GOOD % "3.12"}, "python3", id="plain python3"),
    ],
)
def test_the_first_python_that_works_is_chosen(tmp_path: Path, commands: Mapping[str, str], chosen: str) -> None:
    machine = Machine(tmp_path, commands)
    done = machine.ask("python")
    assert (done.returncode, done.stdout.strip()) == (0, str(machine.folder / chosen)), done.stderr


@pytest.mark.parametrize(
    ("commands", "word"),
    [
        pytest.param({}, "No Python 3.11 or newer", id="none"),
        pytest.param({"python3": PYTHON_OLD, "python3.12": PYENV_SHIM}, "No Python 3.11 or newer", id="old"),
        pytest.param({"python3": PYTHON_NO_VENV, "apt-get": "true"}, "type: sudo apt-get install -y python3.12-venv", id="debian"),
        pytest.param({"python3": PYTHON_NO_VENV}, "no venv and ensurepip modules", id="elsewhere"),
    ],
)
def test_without_a_python_that_works_the_line_to_type_is_printed(tmp_path: Path, commands: Mapping[str, str], word: str) -> None:
    done = Machine(tmp_path, commands).ask("python")
    assert done.returncode == 1 and done.stdout == ""
    assert word in done.stderr and done.stderr.count("\n") == 1, done.stderr


# -- the Makefile --------------------------------------------------------------------------------------------------------


def test_make_alone_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    done = run("make", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for target in set(phony.split()) - {"help"}:
        assert re.search(rf"^make {target} ", done.stdout, re.MULTILINE), target


def test_make_uses_the_environment_it_is_given(tmp_path: Path) -> None:
    for target, ending in (("demo", 'bin/mlxnb" demo'), ("lab", 'bin/jupyter" lab'), ("test", 'bin/python" -m pytest')):
        done = run("make", "-n", target, f"VENV={tmp_path}/v", cwd=ROOT)
        assert done.returncode == 0 and f"{tmp_path}/v/{ending}" in done.stdout, done.stdout + done.stderr
        assert ".venv" not in done.stdout


def test_the_makefile_uses_nothing_newer_than_gnu_make_3_81() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for newer in (".ONESHELL", "$(file ", "!=", "::=", "&:", "$(intcmp", "$(let ", ".EXTRA_PREREQS", "undefine"):
        assert newer not in makefile, newer


# -- the front end's own packages --------------------------------------------------------------------------------------------

PROJECTS = [ROOT / "widgets", LAB]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_an_npm_project_is_pinned_and_of_this_version(project: Path) -> None:
    described = json.loads((project / "package.json").read_text("utf-8"))
    lock = json.loads((project / "package-lock.json").read_text("utf-8"))
    assert described["version"] == lock["version"] == VERSION
    wanted = {**described.get("dependencies", {}), **described.get("devDependencies", {})}
    assert wanted and all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values()), wanted
    assert {name: lock["packages"][f"node_modules/{name}"]["version"] for name in wanted} == wanted


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_lock_file_names_no_registry_and_every_package_has_its_hash(project: Path) -> None:
    lock = json.loads((project / "package-lock.json").read_text("utf-8"))["packages"]
    assert not [name for name, entry in lock.items() if "resolved" in entry]
    assert not [name for name, entry in lock.items() if name and "integrity" not in entry]
    assert len(lock) > 50


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_no_npm_script_calls_npm_which_the_packaged_node_cannot_do(project: Path) -> None:
    scripts = json.loads((project / "package.json").read_text("utf-8")).get("scripts", {})
    assert not [script for script in scripts.values() if re.search(r"\b(npm|npx|yarn|jlpm|pnpm)\b", script)], scripts


def test_the_demo_runs_without_the_front_end_and_without_node(tmp_path: Path) -> None:
    done = run("make", "-n", "demo", f"VENV={tmp_path}/v", cwd=ROOT)
    assert done.returncode == 0 and "frontend" not in done.stdout and "node" not in done.stdout, done.stdout
    assert 'MLXNB_NO_FRONTEND=1 "$venv/bin/python" -m pip install' in SETUP.read_text("utf-8")
    for target in ("lab", "test", "check"):
        assert "setup.sh frontend" in run("make", "-n", target, f"VENV={tmp_path}/v", cwd=ROOT).stdout, target


# -- the documents -------------------------------------------------------------------------------------------------------

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def test_every_setting_and_its_variable_is_documented() -> None:
    from mlxnb_engine import config

    text = (ROOT / "docs" / "settings.md").read_text("utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \| `(MLXNB_\w+)`", text, re.MULTILINE))
    assert documented == {entry.field: config.PREFIX + entry.field.upper() for entry in config.resolve({"HOME": "/"}).describe()}
    for mode in config.BLAS_MODES:
        assert f"\n| `{mode}` |" in text, mode


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_links_to_exists(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text("utf-8")):
        if "://" not in link:
            assert (document.parent / link).exists(), link


def test_the_options_in_the_readme_and_the_quickstart_exist() -> None:
    from mlxnb import options

    known = {flag for option in options.OPTIONS for flag in option.flags}
    text = (ROOT / "README.md").read_text("utf-8") + (ROOT / "examples" / "01_quickstart.ipynb").read_text("utf-8")
    used = {flag for line in re.findall(r"%%mlx (.*)", text) for flag in re.findall(r"(?<!\S)--?[a-z][\w-]*", line)}
    assert len(used) >= 10 and used - known <= {"--help"}, used - known
