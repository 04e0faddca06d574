"""The `mlxnb` command: doctor, fetch, demo, kernel, cache. Typed errors become one sentence; nothing here imports MLX."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from mlxnb_engine import config
from mlxnb_engine.errors import MlxnbError, RequestError

OUTPUT_DIR = "demo-output"
REDRAW_S = 0.1
BAR_WIDTH = 24


class ProgressLine:
    """`(phase, done, total)` as one line that redraws itself; on a pipe, a line at each tenth.

    Owner: one thread at a time. Lifetime: `close` ends the line; it may be called twice.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._live = out.isatty()
        self._phase = ""
        self._began = self._drawn = 0.0
        self._tenth = -1
        self._open = False

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self._clock()
        if phase != self._phase:
            self.close()
            self._phase, self._began, self._drawn, self._tenth = phase, now, 0.0, -1
        tenth = 10 * done // total if total else 0
        whole = bool(total) and done >= total
        if self._live and (now - self._drawn >= REDRAW_S or whole):
            self._drawn = now
            self._out.write(f"\r\x1b[K{self._line(done, total, now)}")
            self._open = True
        elif not self._live and tenth > self._tenth:
            self._tenth = tenth
            self._out.write(self._line(done, total, now) + "\n")
        self._out.flush()

    def _line(self, done: int, total: int, now: float) -> str:
        if not total:
            return f"  {self._phase}" + (f"  {done / 1e6:.1f} MB" if done else "")
        filled = min(BAR_WIDTH, BAR_WIDTH * done // total)
        spent = now - self._began
        left = f"  {spent * (total - done) / done:.0f} s left" if 0 < done < total and spent > 1 else ""
        return f"  {self._phase:<10} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done / 1e6:.1f} of {total / 1e6:.1f} MB{left}"

    def close(self) -> None:
        if self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 good, 1 something is wrong, 2 wrong usage, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except MlxnbError as error:
        print(f"mlxnb: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  -> {error.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmlxnb: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `mlxnb doctor | head`
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlxnb", description="Language models in Jupyter. In a notebook: %load_ext mlxnb")
    parser.add_argument("--version", action="version", version=f"mlxnb {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine has, what is wrong and how to fix it")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    doctor.set_defaults(command=_doctor)

    fetch = commands.add_parser("fetch", help="download a model so that its first use needs no network")
    fetch.add_argument("name", nargs="?", metavar="NAME", help="a Hugging Face repository; without it, the default model")
    fetch.set_defaults(command=_fetch)

    demo = commands.add_parser("demo", help="run a notebook here and show each answer as it streams")
    demo.add_argument("notebook", nargs="?", metavar="NOTEBOOK", help="default: the quickstart that comes with mlxnb")
    demo.add_argument("--output", metavar="FOLDER", default=OUTPUT_DIR, help="where the results go (default: %(default)s)")
    demo.set_defaults(command=_demo)
    _add_kernel(commands)
    _add_cache(commands)
    return parser


def _add_kernel(commands: Any) -> None:
    kernel = commands.add_parser("kernel", help='install or remove the Jupyter kernel "Python (MLX)" of this Python')
    actions = kernel.add_subparsers(required=True, metavar="ACTION")
    for name, what, command in (("install", "for this user", _kernel_install), ("remove", "from this user's folder", _kernel_remove)):
        action = actions.add_parser(name, help=f"{name} it; without an option, {what}")
        where = action.add_mutually_exclusive_group()
        where.add_argument("--user", action="store_true", help="the user's own folder (the default)")
        where.add_argument("--sys-prefix", action="store_true", help="the environment of this Python")
        where.add_argument("--prefix", metavar="FOLDER", type=Path, help="FOLDER/share/jupyter/kernels")
        action.set_defaults(command=command)


def _add_cache(commands: Any) -> None:
    cache = commands.add_parser("cache", help="the prefix cache on disk: what is there, and how to be rid of it")
    actions = cache.add_subparsers(metavar="ACTION")
    info = actions.add_parser("info", help="sizes, by model (what `mlxnb cache` alone does)")
    for parser in (cache, info):
        parser.add_argument("--json", action="store_true", help="the same as JSON")
        parser.set_defaults(command=_cache_info)
    clear = actions.add_parser("clear", help="delete it, or what is kept of one model")
    clear.add_argument("model", nargs="?", metavar="MODEL", help="its name, or the beginning of its setup, as info shows them")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(command=_cache_clear)
    flush = actions.add_parser("flush", help="nothing to do here: kernels save theirs by themselves, or by %%mlx cache flush")
    flush.set_defaults(command=_cache_flush)


def _version() -> str:
    try:
        return importlib.metadata.version("mlxnb")
    except importlib.metadata.PackageNotFoundError:
        return "(from source)"


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    result = doctor.report()
    print(json.dumps(result, indent=2) if arguments.json else doctor.render(result))
    return 0 if result["ok"] else 1


def _fetch(arguments: argparse.Namespace) -> int:
    print(f"{arguments.name or 'default model'}: {fetch_model(config.resolve(), arguments.name)}")
    return 0


def fetch_model(settings: config.RuntimeConfig, name: str | None = None) -> Path:
    """Have the model (None: the default one) on disk, with a progress line on stderr; where it lies."""
    from mlxnb_engine import fetch, locate

    line = ProgressLine(sys.stderr)
    try:
        if name is None:
            return fetch.ensure_default_model(settings, line, _never)
        return locate.locate(name, settings, line, _never).path
    finally:
        line.close()


def _never() -> bool:
    return False


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from . import demo
    except ModuleNotFoundError as error:
        raise RequestError(f"The demo needs {error.name}, which is not installed.", 'Install it with: pip install "mlxnb[lab]"') from error
    notebook = Path(arguments.notebook) if arguments.notebook else demo.quickstart()
    demo.read(notebook)  # a wrong name is said before anything is fetched
    settings = config.resolve()
    if settings.model is None:
        fetch_model(settings)
    print(f"Running {notebook}; the first answer waits until the model is loaded.", flush=True)
    # The quickstart may lie among installed packages, which is no place to work in.
    folder = notebook.resolve().parent if arguments.notebook else Path.cwd()
    executed, page, good = demo.run(notebook, Path(arguments.output), folder=folder)
    print(f"\n{'Done.' if good else 'A cell failed; what ran until then is kept.'}\n  notebook  {executed}\n  web page  {page}")
    return 0 if good else 1


def _prefix(arguments: argparse.Namespace) -> Path | None:
    return Path(sys.prefix) if arguments.sys_prefix else arguments.prefix


def _kernel_install(arguments: argparse.Namespace) -> int:
    from . import kernel

    print(f'kernel "{kernel.DISPLAY_NAME}": {kernel.install(_prefix(arguments))}')
    return 0


def _kernel_remove(arguments: argparse.Namespace) -> int:
    from . import kernel

    print(f"removed {kernel.remove(_prefix(arguments))}")
    return 0


def _cache_info(arguments: argparse.Namespace) -> int:
    from . import caching
    from .sanitize import visible_text

    info = caching.cache_info()
    print(json.dumps(info, indent=2) if arguments.json else visible_text("\n".join(caching.info_lines(info))))
    return 0


def _cache_clear(arguments: argparse.Namespace) -> int:
    from . import caching
    from .sanitize import visible_text

    print(visible_text(caching.question(caching.cache_info(), arguments.model)))
    if not arguments.yes and not _agreed():
        raise RequestError("Nothing was deleted.", "Answer y, or add --yes.")
    print(caching.cleared(caching.cache_clear(arguments.model)))
    return 0


def _agreed() -> bool:
    if not sys.stdin.isatty():
        return False
    return input("Go on? [y/N] ").strip().lower() in ("y", "yes")


def _cache_flush(arguments: argparse.Namespace) -> int:
    from . import caching

    print(caching.flushed(caching.cache_flush()))
    return 0
