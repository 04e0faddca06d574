"""`mlxnb demo`: run a notebook on a real model in the terminal, each answer as it streams; keep the result as notebook and page."""

from __future__ import annotations

import asyncio
import atexit
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TextIO

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter

from mlxnb_engine.errors import EngineDead, RequestError

from .sanitize import visible_text

PLAIN = "text/plain"
END_OF_INPUT = "\x04"
# One with several answers has "[label]" heads and grows in its middle; one that waits is a line as "Loading NAME · 40 MB of 98 MB".
_PROGRESS = re.compile(r"(?:Waiting|Reading|Loading|Checking|Downloading)\b[^\n]*\Z|\w[^\n]* · [^\n]*\Z")
_GROUP = re.compile(r"\[[^\n]*\]\n")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def quickstart() -> Path:
    """The example notebook: inside the installed package, beside the packages in a checkout."""
    here = Path(__file__).resolve().parent
    places = [folder / "examples" / "01_quickstart.ipynb" for folder in (here, here.parent)]
    return next((path for path in places if path.is_file()), places[0])


def run(notebook: Path, output: Path, screen: TextIO | None = None, folder: Path | None = None) -> tuple[Path, Path, bool]:
    """Execute `notebook` in a kernel of this environment, print it to `screen`, write it into `output`.

    folder: where its code runs; by default where the notebook lies.
    Gives the executed notebook, the HTML page and whether every cell succeeded. A cell that fails ends the run; what was
    done until then is written all the same. Raises RequestError for a notebook that cannot be read or a folder that cannot
    be written, EngineDead if the kernel dies, KeyboardInterrupt when interrupted.
    """
    book = read(notebook)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{output} cannot be made: {error.strerror}.", "Name another folder with --output.") from error
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = StreamingClient(book, manager, CellPrinter(screen or sys.stdout), folder or notebook.resolve().parent)
    good = True
    with tempfile.TemporaryFile() as log:  # the kernel's own warnings belong in no cell
        try:
            asyncio.run(client.execute_and_close(log))
        except CellExecutionError:
            good = False
        except (DeadKernelError, asyncio.CancelledError) as error:
            if client.interrupted:
                raise KeyboardInterrupt from None
            log.seek(0)
            last = log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            message = " ".join(["The kernel ended before the notebook did.", *(f"It said: {line}." for line in last)])
            raise EngineDead(message, "`mlxnb doctor` tells what may be wrong.") from error
    executed, page = output / notebook.name, output / f"{notebook.stem}.html"
    nbformat.write(book, str(executed))
    # Nothing is fetched when the page is opened: no MathJax, no require.js.
    body, _ = HTMLExporter(mathjax_url="", require_js_url="", jquery_url="").from_notebook_node(book)
    page.write_text(body, encoding="utf-8")
    return executed, page, good


def read(notebook: Path) -> Any:
    """The notebook, checked. Raises RequestError."""
    try:
        book = nbformat.read(str(notebook), as_version=4)
        nbformat.validate(book)
    except FileNotFoundError as error:
        raise RequestError(f"There is no notebook {notebook}.", "Give the path of an .ipynb file: mlxnb demo NOTEBOOK") from error
    except (OSError, ValueError, AttributeError, KeyError, nbformat.ValidationError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"{notebook} is not a notebook that can be read: {reason}", "Open and save it in JupyterLab once.") from error
    return book


class CellPrinter:
    """Writes cells and their outputs to a terminal or a pipe, and a growing answer as it grows.

    Owner: one thread. Invariant: what was written of an output is a prefix of its newest text; if the text stops
    extending it (a progress line that became an answer, a group that grows in its middle), the rest waits for `end`.
    """

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._live = screen.isatty()
        self._texts: dict[str, str] = {}  # by display id: newest text and what of it was written
        self._written: dict[str, str] = {}
        self._passing = False

    def begin(self, source: str, number: int) -> None:
        """Show the source of a cell that starts."""
        self._texts.clear()
        self._written.clear()
        lines = source.strip().splitlines() or [""]
        head = f"In [{number}]: "
        marked = [(head if index == 0 else " " * (len(head) - 2) + "| ") + line for index, line in enumerate(lines)]
        self._put("\n" + self._styled("1", visible_text("\n".join(line.rstrip() for line in marked))) + "\n")

    def message(self, kind: str, content: Mapping[str, Any]) -> None:
        """Show one message of the kernel."""
        if kind in ("display_data", "update_display_data", "execute_result"):
            text = content.get("data", {}).get(PLAIN)
            display_id = (content.get("transient") or {}).get("display_id")
            if text and display_id:
                self._grow(display_id, text)
            elif text:
                self._write(f"{text}\n")
        elif kind == "stream":
            self._write(content.get("text", ""))
        elif kind == "error":
            self.end()  # what the cell had shown comes before why it failed
            trace = "\n".join(content.get("traceback") or [f"{content.get('ename')}: {content.get('evalue')}"])
            self._write(_ANSI.sub("", trace) + "\n")

    def end(self) -> None:
        """The cell is over or failed: write what was held back."""
        self._clear_passing()
        for display_id, text in self._texts.items():
            done = self._written.get(display_id, "")
            rest = text[len(done) :] if text.startswith(done) else "\n" + text
            self._write(rest if text.endswith("\n") else rest + "\n")
        self._texts.clear()
        self._written.clear()

    def _grow(self, display_id: str, text: str) -> None:
        before, self._texts[display_id] = self._texts.get(display_id, ""), text
        done = self._written.get(display_id, "")
        if not done and (_PROGRESS.match(text) or _GROUP.match(text) or not before or not text.startswith(before)):
            self._pass(text)  # not an answer, or not seen to grow yet
        elif text.startswith(done) and len(text) > len(done):
            self._write(text[len(done) :])
            self._written[display_id] = text

    def _pass(self, text: str) -> None:
        """A line that is overwritten by what comes next; only a terminal can do that."""
        if self._live:
            width = max(10, shutil.get_terminal_size().columns - 1)
            line = " ".join(text.split())
            shown = line if len(line) <= width else line[: width - 1] + "…"
            self._put("\r\x1b[K" + self._styled("2", visible_text(shown)))
            self._passing = True

    def _clear_passing(self) -> None:
        if self._passing:
            self._put("\r\x1b[K")
            self._passing = False

    def _write(self, text: str) -> None:
        """The only way for a cell's text to the screen: a model must not be able to steer the terminal."""
        self._clear_passing()
        self._put(visible_text(text))

    def _put(self, text: str) -> None:
        encoding = self._screen.encoding or "utf-8"
        self._screen.write(text.encode(encoding, "replace").decode(encoding))
        self._screen.flush()

    def _styled(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._live else text


class StreamingClient(NotebookClient):
    """nbclient that shows each message as it comes, and says that somebody watches.

    A kernel that is told `allow_stdin=False` runs in batch mode, where mlxnb sends only finished answers. So stdin is
    allowed here and every question is answered with the end of input: `input()` raises EOFError instead of waiting.
    """

    def __init__(self, book: Any, manager: AsyncKernelManager, printer: CellPrinter, folder: Path) -> None:
        super().__init__(book, km=manager, timeout=None, resources={"metadata": {"path": str(folder)}})
        self.interrupted = False
        self._printer = printer
        self._questions: asyncio.Task[None] | None = None
        self.on_notebook_start = self._started
        self.on_notebook_complete = self._completed
        self.on_cell_execute = self._begin_cell
        self.on_cell_executed = self._end_cell

    async def execute_and_close(self, log: IO[bytes]) -> None:
        """Run every cell; the kernel is gone afterwards, whatever happened. log: takes the kernel's own stderr."""
        try:
            await self.async_execute(cleanup_kc=True, stderr=log)
        finally:
            atexit.unregister(self._cleanup_kernel)
            if self.km is not None and self.km.has_kernel:
                await ensure_async(self.km.shutdown_kernel(now=True))

    async def async_start_new_kernel(self, **kwargs: Any) -> None:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            self.interrupted = True
            task.cancel()

        # In place of nbclient's handler, which ends the kernel and then waits until it notices.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        await super().async_start_new_kernel(**kwargs)

    def _started(self, notebook: Any) -> None:
        assert self.kc is not None
        self.kc.allow_stdin = True
        self._questions = asyncio.create_task(self._decline_questions())

    def _completed(self, notebook: Any) -> None:
        if self._questions is not None:
            self._questions.cancel()

    async def _decline_questions(self) -> None:
        while self.kc is not None:
            message = await self.kc.stdin_channel.get_msg(timeout=None)
            if message["msg_type"] == "input_request":
                self.kc.input(END_OF_INPUT)

    def _begin_cell(self, cell: Any, cell_index: int) -> None:
        self._printer.begin(cell.source, self.code_cells_executed + 1)

    def _end_cell(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        self._printer.end()

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        self._printer.message(msg["msg_type"], msg["content"])
        return super().process_message(msg, cell, cell_index)
