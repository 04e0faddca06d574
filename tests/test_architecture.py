"""The layer map and the bans of the code base, checked over the syntax tree; each rule is shown a wrong file it must catch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("engine/mlxnb_engine", "mlxnb", "widgets/mlxnb_widgets")

# module or package -> (layer, lines we expect a file to stay under). A file imports its own layer or lower.
# A package's row covers its files; a row of its own, such as draft.lookup, goes first.
HOUSE_MAP: dict[str, tuple[int, int]] = {
    "mlxnb_engine": (0, 40),
    "mlxnb_engine.errors": (0, 80),
    "mlxnb_engine.types": (0, 300),
    "mlxnb_engine.events": (0, 150),
    "mlxnb_engine.config": (0, 250),
    "mlxnb_engine.blas": (0, 200),
    "mlxnb_engine.policy": (1, 200),
    "mlxnb_engine.template": (1, 300),
    "mlxnb_engine.template_worker": (1, 200),
    "mlxnb_engine.vocabulary": (1, 300),
    "mlxnb_engine.markers": (1, 200),
    "mlxnb_engine.detokenizer": (1, 200),
    "mlxnb_engine.tokenizer": (1, 250),
    "mlxnb_engine.prompt": (1, 250),
    "mlxnb_engine.splice": (1, 200),
    "mlxnb_engine.stopping": (1, 200),
    "mlxnb_engine.fingerprint": (1, 150),
    "mlxnb_engine.fetch": (1, 300),
    "mlxnb_engine.hub": (1, 200),
    "mlxnb_engine.locate": (1, 260),
    "mlxnb_engine.loader": (1, 310),
    "mlxnb_engine.layouts": (1, 150),
    "mlxnb_engine.zoo": (1, 100),
    "mlxnb_engine.rotary": (1, 150),
    "mlxnb_engine.headers": (1, 320),
    "mlxnb_engine.gguf": (1, 300),
    "mlxnb_engine.ggml": (1, 250),
    "mlxnb_engine.filters": (1, 250),
    "mlxnb_engine.sampling": (1, 400),
    "mlxnb_engine.grammar": (1, 250),
    "mlxnb_engine.cuda": (1, 300),  # kernels: MLX and nothing of ours
    "mlxnb_engine.state": (2, 400),
    "mlxnb_engine.graph": (2, 300),  # it puts the attention dispatch of state/ in place around each forward
    "mlxnb_engine.cache": (3, 400),
    "mlxnb_engine.methods": (4, 400),
    "mlxnb_engine.fill": (4, 350),
    "mlxnb_engine.draft": (4, 300),
    "mlxnb_engine.qualify": (4, 200),
    "mlxnb_engine.planner": (4, 200),
    "mlxnb_engine.scheduler": (4, 400),
    "mlxnb_engine.session": (4, 250),
    "mlxnb_engine.delivery": (4, 200),
    "mlxnb_engine.admission": (4, 150),
    "mlxnb_engine.binding": (4, 200),
    "mlxnb_engine.resume": (4, 200),
    "mlxnb_engine.engine": (4, 400),
    "mlxnb_engine.upkeep": (5, 250),
    "mlxnb_engine.client": (5, 250),
    "mlxnb_engine.remote": (5, 250),
    "mlxnb_widgets": (5, 120),
    "mlxnb_widgets.dispatch": (5, 150),
    "mlxnb": (6, 400),
    "mlxnb.schema": (6, 450),  # declarations
}
FUNCTION_LINES = 60
PARAMETERS = 8

# Tighter than the layers: these files may import from these layers of ours only; those never import from these packages.
ONLY = {
    "mlxnb_engine.fill": (0, 1),
    "mlxnb_engine.draft.lookup": (0, 1),
}
NEVER: dict[str, tuple[str, ...]] = {
    "mlxnb_engine.scheduler": tuple(f"mlxnb_engine.{x}" for x in ("state", "cache", "methods", "sampling", "filters")),
    "mlxnb": tuple(f"mlxnb_engine.{x}" for x in ("state", "cache", "methods", "sampling", "graph", "scheduler", "fill", "draft")),
}
WIDGETS_MAY = ("mlxnb_widgets", "mlxnb_engine.events", "mlxnb_engine.types")

MLX_NAMES = (
    "graph zoo layouts rotary cuda loader sampling filters state methods.window "
    "methods.compiled draft.model draft.mtp qualify binding engine"
)
MLX_FILES = tuple(f"mlxnb_engine.{name}" for name in MLX_NAMES.split())
MLX_PACKAGES = ("mlx", "mlx_lm")
UNSAFE_MODULES = ("pickle", "marshal", "dill", "shelve", "cloudpickle", "_pickle")
ENVIRONMENT_NAMES = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
MARKUP = ("text/html", "text/markdown")


# -- reading a file ------------------------------------------------------------------------------------------------


def within(module: str, name: str) -> bool:
    """Is `module` this name or something inside it?"""
    return module == name or module.startswith(name + ".")


def row(module: str) -> str | None:
    """The longest row of the house map that covers this module. `mlxnb_engine` itself covers only its __init__."""
    names = [name for name in HOUSE_MAP if within(module, name) and (name != "mlxnb_engine" or module == name)]
    return max(names, key=len, default=None)


@dataclass(frozen=True)
class Import:
    """top_level: it runs when the module is imported; not inside a function, and not for type checkers only."""

    target: str
    line: int
    top_level: bool


class Source:
    """One parsed file. module: its dotted name, as imports see it."""

    def __init__(self, module: str, text: str, is_package: bool = False) -> None:
        self.module = module
        self.text = text
        self.tree = ast.parse(text)
        self.package = module if is_package else module.rpartition(".")[0]
        lazy = {id(n) for part in (*self.functions(), *self._for_types_only()) for n in ast.walk(part)}
        self.imports = [i for node in ast.walk(self.tree) for i in self._targets(node, id(node) not in lazy)]

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

    def _for_types_only(self) -> Iterator[ast.If]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield node

    def _targets(self, node: ast.AST, top_level: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, top_level)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = self.package.split(".")
                parent = parent[: len(parent) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, top_level)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value, node.lineno, top_level)

    def ours(self) -> Iterator[tuple[Import, str]]:
        """Imports of our own packages with the row of the house map they lead to."""
        for found in self.imports:
            if found.target.split(".")[0] in ("mlxnb", "mlxnb_engine", "mlxnb_widgets"):
                name = row(found.target) or row(found.target.rpartition(".")[0])
                if name is not None:
                    yield found, name

    def strings(self) -> Iterator[ast.Constant]:
        """String constants that are not docstrings or other bare expressions."""
        prose = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                yield node


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def our_files() -> list[Source]:
    found = []
    for folder in SOURCES:
        root = ROOT / folder
        for path in sorted(root.rglob("*.py")):
            parts = (root.name, *path.relative_to(root).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            found.append(Source(".".join(parts[:-1] if is_package else parts), path.read_text("utf-8"), is_package))
    return found


# -- the rules: Source -> what is wrong with it --------------------------------------------------------------------


def imports_point_down(source: Source) -> Iterator[str]:
    mine = row(source.module)
    if mine is None:
        yield "is not in HOUSE_MAP: give it a layer and a size"
        return
    layer = HOUSE_MAP[mine][0]
    for found, name in source.ours():
        if HOUSE_MAP[name][0] > layer:
            yield f"line {found.line}: layer {layer} imports {found.target} of layer {HOUSE_MAP[name][0]}"


def narrow_files_stay_narrow(source: Source) -> Iterator[str]:
    for found, name in source.ours():
        for who, layers in ONLY.items():
            if within(source.module, who) and not within(found.target, who) and HOUSE_MAP[name][0] not in layers:
                yield f"line {found.line}: imports {found.target}; it holds ids only, so layers 0 and 1"
        for who, banned in NEVER.items():
            if within(source.module, who) and any(within(found.target, b) for b in banned):
                yield f"line {found.line}: imports {found.target}, where arrays and row state live"
        if within(source.module, "mlxnb_widgets") and not any(within(found.target, w) for w in WIDGETS_MAY):
            yield f"line {found.line}: widgets import events and types only, not {found.target}"
        if within(source.module, "mlxnb") and within(found.target, "mlxnb_widgets") and found.top_level:
            yield f"line {found.line}: widgets are imported lazily, inside a function"


def mlx_stays_in_its_files(source: Source) -> Iterator[str]:
    if not any(within(source.module, name) for name in MLX_FILES):
        for found in source.imports:
            if any(within(found.target, package) for package in MLX_PACKAGES):
                yield f"line {found.line}: imports {found.target}; MLX may be imported only in: {MLX_NAMES}"


def client_is_lazy(source: Source) -> Iterator[str]:
    if source.module in ("mlxnb_engine.client", "mlxnb_engine.remote", "mlxnb_engine.session"):
        for found in source.imports:
            if found.top_level and any(within(found.target, name) for name in MLX_FILES):
                yield f"line {found.line}: imports {found.target} at module level, which loads MLX before blas.py had its say"


def only_config_reads_the_environment(source: Source) -> Iterator[str]:
    if source.module == "mlxnb_engine.config":
        return
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ENVIRONMENT_NAMES
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            yield f"line {node.lineno}: os.{node.attr}; only config.py reads the environment"
    for found in source.imports:
        if found.target in tuple(f"os.{name}" for name in ENVIRONMENT_NAMES):
            yield f"line {found.line}: {found.target}; only config.py reads the environment"


def nothing_unpickles(source: Source) -> Iterator[str]:
    for found in source.imports:
        if found.target.split(".")[0] in UNSAFE_MODULES:
            yield f"line {found.line}: imports {found.target}, which runs code from data"
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        ):
            yield f"line {node.value.lineno}: allow_pickle, which runs code from data"


def only_the_loader_loads(source: Source) -> Iterator[str]:
    if source.module == "mlxnb_engine.loader":
        return
    names = {"mx"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names |= {a.asname for a in node.names if a.name == "mlx.core" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "mlx":
            names |= {a.asname or a.name for a in node.names if a.name == "core"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) in names | {"mlx.core"}:
            yield f"line {node.lineno}: {ast.unparse(node)}; files are validated in loader.py first"
    for found in source.imports:
        if found.target == "mlx.core.load":
            yield f"line {found.line}: mlx.core.load; files are validated in loader.py first"


def the_engine_uses_threads_only(source: Source) -> Iterator[str]:
    if within(source.module, "mlxnb_engine") and source.module not in ("mlxnb_engine.client", "mlxnb_engine.remote"):
        for found in source.imports:
            if found.target.split(".")[0] == "asyncio":
                yield f"line {found.line}: asyncio below the client"


def only_the_sanitizer_makes_markup(source: Source) -> Iterator[str]:
    if source.module == "mlxnb.sanitize":
        return
    for node in source.strings():
        for kind in MARKUP:
            if kind in str(node.value):
                yield f"line {node.lineno}: {kind!r}; take the bundle or the name from mlxnb/sanitize.py"
    for found in source.imports:
        if found.target.startswith("IPython.") and found.target.rpartition(".")[2] in (
            "HTML",
            "Markdown",
            "display_html",
            "display_markdown",
        ):
            yield f"line {found.line}: {found.target} outside mlxnb/sanitize.py"
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("HTML", "Markdown")
            and ast.unparse(node.value) in ("display", "IPython.display")
        ):
            yield f"line {node.lineno}: {ast.unparse(node)} outside mlxnb/sanitize.py"


Rule = Callable[[Source], Iterator[str]]

# rule -> wrong files it must catch, each as (module, text).
RULES: dict[Rule, list[tuple[str, str]]] = {
    imports_point_down: [
        ("mlxnb_engine.types", "from .policy import Policy"),
        ("mlxnb_engine.template", "from .state.slots import Slots"),
        ("mlxnb_engine.state.slots", "from ..methods import window"),
        ("mlxnb_engine.engine", "from mlxnb_engine import client"),
        ("mlxnb_engine.fetch", "def f():\n    import mlxnb.magic"),
        ("mlxnb_engine.loader", "import importlib\nimportlib.import_module('mlxnb_engine.scheduler')"),
        ("mlxnb_engine.utils", "x = 1"),
    ],
    narrow_files_stay_narrow: [
        ("mlxnb_engine.fill.rows", "from ..state import slots"),
        ("mlxnb_engine.draft.lookup", "from ..session import Generation"),
        ("mlxnb_engine.scheduler", "from .sampling import SamplingSession"),
        ("mlxnb_engine.scheduler", "from .state.spec import RowState"),
        ("mlxnb.display", "from mlxnb_engine.methods import window"),
        ("mlxnb_widgets.monitor", "from mlxnb_engine.client import CompletionClient"),
        ("mlxnb.display", "import mlxnb_widgets"),
    ],
    mlx_stays_in_its_files: [
        ("mlxnb_engine.scheduler", "import mlx.core as mx"),
        ("mlxnb_engine.tokenizer", "def f():\n    from mlx_lm.tokenizer_utils import load_tokenizer"),
        ("mlxnb.api", "from mlx import core"),
        ("mlxnb.doctor", "__import__('mlx.core')"),
    ],
    client_is_lazy: [("mlxnb_engine.client", "from .engine import Engine")],
    only_config_reads_the_environment: [
        ("mlxnb.runtime", "import os\nos.environ['X'] = '1'"),
        ("mlxnb_engine.loader", "import os\nx = os.getenv('HOME')"),
        ("mlxnb_engine.blas", "from os import environ"),
    ],
    nothing_unpickles: [
        ("mlxnb_engine.cache.record", "import pickle"),
        ("mlxnb.history", "def f():\n    from marshal import loads"),
        ("mlxnb_engine.loader", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    ],
    only_the_loader_loads: [
        ("mlxnb_engine.graph", "import mlx.core as mx\nmx.load('x.gguf')"),
        ("mlxnb_engine.graph", "import mlx.core as metal\nread = metal.load"),
        ("mlxnb_engine.state.slots", "from mlx.core import load"),
        ("mlxnb_engine.state.slots", "from mlx import core\ncore.load('x')"),
        ("mlxnb_engine.qualify", "import mlx.core\nmlx.core.load('x')"),
    ],
    the_engine_uses_threads_only: [("mlxnb_engine.engine", "def f():\n    import asyncio")],
    only_the_sanitizer_makes_markup: [
        ("mlxnb.display", "bundle = {'text/html': text}"),
        ("mlxnb.display", "def f(text):\n    return f'text/markdown {text}'"),
        ("mlxnb.api", "from IPython.display import HTML"),
        ("mlxnb.api", "from IPython import display\ndisplay.Markdown('x')"),
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    files = our_files()
    assert len(files) > 10
    broken = [f"{source.module}: {what}" for source in files for what in rule(source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [pytest.param(rule, *wrong, id=f"{rule.__name__}-{i}") for rule, all_wrong in RULES.items() for i, wrong in enumerate(all_wrong)],
)
def test_the_rule_catches_a_wrong_file(rule: Rule, module: str, text: str) -> None:
    assert list(rule(Source(module, text))), f"{rule.__name__} let this pass in {module}:\n{text}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_lets_an_honest_file_pass(rule: Rule) -> None:
    prose = '"""Says text/html and os.environ in prose only."""'
    text = f"{prose}\nfrom .errors import ModelError\nimport os\nos.getpid()\ndef load(x):\n    return x.load()"
    assert not list(rule(Source("mlxnb_engine.headers", text)))


# -- fresh processes -----------------------------------------------------------------------------------------------


def heavy_modules_after(statement: str) -> list[str]:
    """Which of MLX and transformers a fresh Python has loaded after this statement."""
    heavy = {"mlx", "mlx_lm", "transformers", "tokenizers"}
    code = f"import sys\n{statement}\nprint(*sorted({{m.split('.')[0] for m in sys.modules}} & {heavy}))"
    paths = [str(ROOT), str(ROOT / "engine"), str(ROOT / "widgets")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "statement", ["import mlxnb", "import mlxnb_engine.client", "import mlxnb.magic", "import mlxnb.cli", "import mlxnb_widgets"]
)
def test_importing_our_packages_loads_neither_mlx_nor_transformers(statement: str) -> None:
    assert heavy_modules_after(statement) == []


def test_the_import_check_sees_mlx_when_it_is_loaded() -> None:
    assert heavy_modules_after("import mlx.core") == ["mlx"]


# -- sizes: printed, not enforced ----------------------------------------------------------------------------------


def oversized(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    name = row(source.module)
    if name is not None and lines > HOUSE_MAP[name][1]:
        yield f"{source.module}: {lines} lines, expected {HOUSE_MAP[name][1]}"
    for function in source.functions():
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        arguments = function.args
        count = sum(len(group) for group in (arguments.posonlyargs, arguments.args, arguments.kwonlyargs))
        if length > FUNCTION_LINES:
            yield f"{source.module}.{function.name}: {length} lines, expected {FUNCTION_LINES}"
        if count > PARAMETERS:
            yield f"{source.module}.{function.name}: {count} parameters, expected {PARAMETERS}"


def test_sizes_are_counted_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Source("mlxnb_engine.errors", "def f(a, b, c, d, e, f, g, h, i):\n" + "    x = 1\n" * 90)
    assert len(list(oversized(wrong))) == 3
    found = [what for source in our_files() for what in oversized(source)]
    if found:
        with capsys.disabled():
            print("\nlarger than expected (not an error):", *found, sep="\n  ")
