"""`Lab` and `Notebook`: the page of a browser with JupyterLab in it, as the tests speak of it. `watch.js` is its other half."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import nbformat

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page, Request, Route, ViewportSize

    from .server import JupyterServer

WATCH = Path(__file__).with_name("watch.js")
START_S = 90.0
CELL_S = 60.0
SIZE: ViewportSize = {"width": 1400, "height": 1000}
RUN_MIME = "application/vnd.mlxnb.run.v1+json"

# What a page of JupyterLab asks its own server for: the application, its extensions, and the API. Anything else, even on the
# same server, was caused by what the page shows.
OWN_PATHS = ("/api/", "/lab/api/", "/static/", "/lab/extensions/", "/lab/tree/", "/lab/workspaces/", "/kernelspecs/")
OWN_EXACT = ("/lab", "/login", "/favicon.ico", "/metrics", "/custom/custom.css")


class Watch:
    """Everything that a page asked for or ran since `reset`. Invariant: no request leaves this machine, it is refused here."""

    def __init__(self, context: BrowserContext, home: str) -> None:
        self.home = urlsplit(home)
        self.requests: list[tuple[str, str]] = []
        self.dialogs: list[str] = []
        self.console: list[str] = []
        self.problems: list[str] = []
        context.add_init_script(path=str(WATCH))
        context.on("request", self._note)
        context.on("page", self._listen)
        context.route(lambda url: not self._at_home(url), lambda route: route.abort())

    def _listen(self, page: Page) -> None:
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(error.stack or error.message))
        page.on("websocket", lambda socket: self.requests.append(("websocket", socket.url)))

    def _note(self, request: Request) -> None:
        self.requests.append((request.resource_type, request.url))

    def _at_home(self, url: str) -> bool:
        parts = urlsplit(url)
        return parts.scheme in ("data", "blob", "about", "file") or parts.netloc == self.home.netloc

    def reset(self) -> None:
        for found in (self.requests, self.dialogs, self.console, self.problems):
            found.clear()

    def faults(self) -> list[str]:
        """Exceptions that nobody caught, less those of other extensions (the widget manager's, where a notebook has no kernel)."""
        return [stack for stack in self.problems if "/lab/extensions/@jupyter-widgets/" not in stack]

    def strangers(self) -> list[str]:
        """Requests that the application itself does not make: to another host, or for an address that the content named."""
        found = []
        for kind, url in self.requests:
            parts = urlsplit(url)
            if parts.scheme in ("data", "blob", "about"):
                # The application's own icons are data: too; scripts and frames of that kind are not.
                if kind in ("script", "document") and parts.scheme != "about":
                    found.append(f"{kind} {url[:120]}")
            elif not self._at_home(url) or not _own(kind, parts.path):
                found.append(f"{kind} {url[:120]}")
        return found


def _own(kind: str, path: str) -> bool:
    if kind in ("image", "media", "document"):
        return path.startswith(("/static/", "/lab/extensions/", "/lab/tree", "/kernelspecs/")) or path == "/lab"
    return path.startswith(OWN_PATHS) or path in OWN_EXACT


def ran(page: Page) -> list[str]:
    """What the traps of every frame of the page have caught."""
    caught: list[str] = []
    for frame in page.frames:
        with contextlib.suppress(Exception):  # a frame may be gone, or of a kind that has no scripts
            caught += frame.evaluate("() => window.__watch ? window.__watch.ran : []")
    return caught


class Lab:
    """One page with JupyterLab. Notebooks are opened in it side by side; `restart` loads the page anew."""

    def __init__(self, page: Page, server: JupyterServer, watch: Watch, shots: Path) -> None:
        self.page = page
        self.server = server
        self.watch = watch
        self.shots = shots
        self._names = 0
        self._restored = False
        self._spoiled = False

    def load(self) -> None:
        self.page.goto(f"{self.server.url}lab?reset&token={self.server.token}", wait_until="commit")
        self._ready()

    def reload(self) -> None:
        self._restored = True
        self.page.reload(wait_until="commit")
        self._ready()

    def fresh(self) -> None:
        """Load the page anew, without what is on it."""
        self._spoiled = False
        self.close_all()
        self.load()
        self.watch.reset()

    def spoil(self) -> None:
        """A control has left its marks: the next test gets a fresh page."""
        self._spoiled = True

    def begin(self) -> None:
        """For a test to begin on: nothing was asked for or run yet."""
        if self._spoiled:
            self.fresh()
        self.watch.reset()
        self.page.evaluate("() => window.__watch.forget()")

    def _ready(self) -> None:
        self.page.wait_for_function("() => window.jupyterapp && window.__nb", timeout=1000 * START_S)
        self.page.evaluate("() => window.__nb.within(window.jupyterapp.restored, 'the layout')")

    def until(self, done: Callable[[], object], timeout_s: float = CELL_S) -> None:
        """Look again and again, 40 ms apart, until `done()`; AssertionError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"still waiting after {timeout_s:.0f} s"
            self.page.wait_for_timeout(40)

    def theme(self, dark: bool) -> None:
        name = "JupyterLab Dark" if dark else "JupyterLab Light"
        self.page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
        self.page.wait_for_function("(dark) => (document.body.dataset.jpThemeLight === 'false') === dark", arg=dark)

    def write(self, cells: Sequence[str], name: str | None = None, metadata: dict[str, Any] | None = None) -> str:
        """A new notebook file with these code cells; its path."""
        self._names += 1
        path = f"{name or 'notebook'}-{self._names}.ipynb"
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=metadata or {})
        nbformat.write(notebook, self.server.notebooks / path)
        return path

    def untrusted(self, path: str) -> str:
        """A copy of a saved notebook that the server never signed; its path."""
        content = json.loads((self.server.notebooks / path).read_text("utf-8"))
        content["metadata"]["copied"] = time.time_ns()  # the signature is over the content
        for cell in content["cells"]:
            cell["metadata"].pop("trusted", None)
        (self.server.notebooks / f"untrusted-{path}").write_text(json.dumps(content), "utf-8")
        return f"untrusted-{path}"

    def trust(self, path: str) -> None:
        """Sign a notebook file, as running its cells would."""
        command = [sys.executable, "-m", "nbformat.sign", str(self.server.notebooks / path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.server.env)
        assert done.returncode == 0, done.stderr

    def open(self, path: str, kernel: str | None = None) -> Notebook:
        self.page.evaluate("([path, kernel]) => window.__nb.open(path, kernel)", [path, kernel])
        return Notebook(self, path)

    def new(self, cells: Sequence[str], kernel: str = "python3", setup: str = "", name: str | None = None) -> Notebook:
        """A new notebook, open, with a kernel in which `setup` has run."""
        notebook = self.open(self.write(cells, name), kernel)
        if setup:
            notebook.call(setup)
        return notebook

    def close_all(self) -> None:
        """Shut every kernel down and close every notebook; the page stays."""
        self.page.evaluate("(looks) => window.__nb.closeAll(looks)", 3 if self._restored else 1)
        self._restored = False

    def shot(self, name: str, clip: Any = None) -> Path:
        path = self.shots / f"{name}.png"
        (clip or self.page).screenshot(path=str(path), animations="disabled")
        return path

    @contextlib.contextmanager
    def scripts_changed(self, old: str, new: str) -> Iterator[list[int]]:
        """The page, loaded anew, gets our bundle with `new` in place of `old`; yields how often that stood there, per load."""
        places: list[int] = []

        def serve(route: Route) -> None:
            text = route.fetch().text()
            places.append(text.count(old))
            route.fulfill(body=text.replace(old, new), content_type="text/javascript")

        address = re.compile(r"/mlxnb/static/mlxnb/bundle\.js")
        self.page.route(address, serve)
        self.fresh()
        try:
            yield places
        finally:
            self.page.unroute(address)
            self.spoil()

    @contextlib.contextmanager
    def frames(self) -> Iterator[list[float]]:
        """Frame times in ms of what happens inside; filled at the end."""
        times: list[float] = []
        self.page.evaluate("() => window.__watch.startFrames()")
        yield times
        times += self.page.evaluate("() => window.__watch.stopFrames()")


class Notebook:
    """An open notebook. Cells are named by position."""

    def __init__(self, lab: Lab, path: str) -> None:
        self.lab = lab
        self.page = lab.page
        self.path = path

    def _js(self, name: str, *args: Any) -> Any:
        return self.page.evaluate(f"(args) => window.__nb.{name}(...args)", [self.path, *args])

    @property
    def file(self) -> Path:
        return self.lab.server.notebooks / self.path

    def call(self, code: str) -> str:
        """Run code in the kernel outside the notebook; what it printed. Raises AssertionError if it failed."""
        reply = self._js("call", code)
        assert reply["status"] == "ok", reply["error"]
        return str(reply["out"])

    def run(self, cell: int, wait: bool = True) -> None:
        self._js("run", cell, wait)

    def run_all(self) -> None:
        for cell in range(self._js("count_cells")):
            self.run(cell)

    def start(self, cell: int) -> None:
        """Run without waiting for the end."""
        self.run(cell, wait=False)

    def executing(self, cell: int) -> bool:
        return bool(self._js("waiting", cell))

    def outputs(self, cell: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._js("outputs", cell)
        return found

    def text(self, cell: int) -> str:
        return str(self._js("text", cell))

    def status(self) -> str:
        return str(self._js("status"))

    def messages(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = self._js("messages")
        return found

    def output(self, cell: int) -> Any:
        """An element handle of the output area."""
        return self.page.evaluate_handle("(args) => window.__nb.outputNode(...args)", [self.path, cell]).as_element()

    def record(self, cell: int) -> dict[str, Any] | None:
        """The record that is saved with the output; None while there is none."""
        for output in self.outputs(cell):
            found = output.get("data", {}).get(RUN_MIME)
            if found is not None:
                return dict(found)
        return None

    def ended(self, cell: int) -> bool:
        """The static bundle is in place of the live view, of every answer in the cell's output."""
        return bool(self._js("ended", cell))

    def wait_end(self, cell: int, timeout_s: float = CELL_S) -> None:
        self.lab.until(lambda: self.ended(cell), timeout_s)

    def wait_text(self, cell: int, text: str, timeout_s: float = CELL_S) -> None:
        self.page.wait_for_function(
            "([path, cell, text]) => window.__nb.text(path, cell).toLowerCase().includes(text.toLowerCase())",
            arg=[self.path, cell, text],
            timeout=1000 * timeout_s,
        )

    def wait_idle(self, cell: int, timeout_s: float = CELL_S) -> None:
        self.page.wait_for_function(
            "([path, cell]) => !window.__nb.waiting(path, cell)", arg=[self.path, cell], timeout=1000 * timeout_s, polling=50
        )

    def interrupt(self) -> None:
        self._js("interrupt")

    def save(self) -> dict[str, Any]:
        """Save; the file as JSON."""
        self._js("save")
        saved: dict[str, Any] = json.loads(self.file.read_text("utf-8"))
        return saved

    def close(self, shutdown: bool = True) -> None:
        self._js("close", shutdown)

    def reopened(self, kernel: str | None = None) -> Notebook:
        """Save, shut down, close, open again."""
        self.save()
        self.close(shutdown=True)
        return self.lab.open(self.path, kernel)

    @property
    def trusted(self) -> bool:
        script = "(path) => { const cells = window.__nb.panel(path).content.model.cells; return [...cells].every((c) => c.trusted); }"
        return bool(self.page.evaluate(script, self.path))
