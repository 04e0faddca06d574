"""W10: what eight live answers on the screen cost the engine, against the same answers with `--view none`.

    python engine/benchmarks/rendering.py [--front client|browser] [--minutes 4] [--out DIR] [--go-on]

One kernel, the default model, eight `%%mlx --bg` cells at once, with views and without in the order ABBA. Both arms have the same
prompts and seeds, and so the same tokens. Counted are the tokens of all rows while all eight decode, by the times that the engine
gave them: the ratio of a round is tokens per second with views over tokens per second without. Rounds go on until the half-width
of the 95 % interval of their mean is below 1 %, or the minutes are over; --go-on adds to the rounds of an earlier run. A round in
which other processes of the machine took more than 3 % of it is kept in the output and counted nowhere.

--front client: no page; a small process reads the messages and acknowledges each as a page does, one frame later. What is left
is what publishing itself costs the kernel. --front browser: JupyterLab and a Chromium that draws, on the same machine: it takes
processor time from a BLAS that wants all of it, which on few cores costs more than publishing. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from machine import facts

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = 8
FRAME_MS = 16.7
POLL_S = 0.5
DISTURBED = 0.03
BEGINNINGS = (
    "Once upon a time, in a village by the sea, there lived",
    "The history of bread begins long before the first towns, when",
    "To grow tomatoes on a small balcony, you first need",
    "My grandfather kept bees for forty years, and he used to say",
    "The light of a star takes so long to reach us that",
    "In the winter of that year the river froze, and the children",
    "A good chair is harder to make than a good table, because",
    "When the train stopped between two stations, the passengers",
)

# Runs in the kernel. `rate`: (tokens of all rows, seconds) from the moment every row has a token to the end of the first, by the
# engine's own times. `busy`: processor seconds of each kind of thread since the last call.
PROBE = """
import json, threading, time
_before = {}
def _busy():
    spent = {}
    for thread in threading.enumerate():
        try:
            now = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        except (AttributeError, OSError):
            continue
        kind = thread.name if thread.name.startswith("mlxnb") else thread.name.split("-")[0].split(" ")[0]
        name = (thread.ident, thread.native_id)
        spent[kind] = spent.get(kind, 0.0) + now - _before.get(name, 0.0)
        _before[name] = now
    return spent
def _rate(runs):
    times = [[run.generation._t0 + token.t for token in run.tokens] for run in runs]
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    return {"tokens": sum(begin < t <= end for row in times for t in row), "seconds": end - begin, "counts": [len(t) for t in times],
            "busy": _busy(), "shown": sorted({run.status for run in runs})}
"""

# Quantiles of Student's t, 97.5 %, by degrees of freedom.
T975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09)


class Front(Protocol):
    """A front end with one kernel."""

    def run(self, cells: list[str]) -> None:
        """Execute the cells one after another; each ends at once."""
        ...

    def rest(self, seconds: float) -> None:
        """Let time pass as this front end does: reading, acknowledging, drawing."""
        ...

    def ask(self, code: str) -> str:
        """What the code prints."""
        ...

    def messages(self) -> int:
        """Messages seen so far, status messages left out."""
        ...


def kernel_env() -> dict[str, str]:
    from mlxnb_engine.config import resolve

    return {"MLXNB_BLAS": os.environ.get("MLXNB_BLAS", "auto"), "MLXNB_CACHE_DIR": str(resolve().cache_dir)}


class Client:
    """A kernel and a reader that draws nothing. Frames are parsed only where an acknowledgement is due."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder), env={**os.environ, **kernel_env()})
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)
        self._due: list[tuple[float, str, int]] = []
        self._count = 0

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, cells: list[str]) -> None:
        for cell in cells:
            self._finish(self._client.execute(cell))

    def ask(self, code: str) -> str:
        content = self._finish(self._client.execute("", user_expressions={"it": code}))
        return str(ast.literal_eval(content["user_expressions"]["it"]["data"]["text/plain"]))

    def _finish(self, request: str) -> dict[str, Any]:
        while True:
            self._read(0.02)
            with contextlib.suppress(Exception):  # queue.Empty: not yet
                reply = self._client.get_shell_msg(timeout=0)
                if reply["parent_header"].get("msg_id") == request:
                    if reply["content"]["status"] != "ok":
                        raise RuntimeError(f"{reply['content'].get('ename')}: {reply['content'].get('evalue')}")
                    return dict(reply["content"])

    def rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._read(left)

    def messages(self) -> int:
        return self._count

    def _read(self, wait_s: float) -> None:
        """Take in one message, or acknowledge what is due."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, comm, seq = self._due.pop(0)
            data = {"method": "custom", "content": {"type": "ack", "seq": seq, "frame_ms": FRAME_MS}}
            self._client.shell_channel.send(self._client.session.msg("comm_msg", {"comm_id": comm, "data": data}))
        if self._due:
            wait_s = min(wait_s, self._due[0][0] - now)
        socket = self._client.iopub_channel.socket
        if not socket.poll(max(0, math.ceil(1000 * wait_s))):
            return
        frames = socket.recv_multipart()
        header, content = frames[frames.index(b"<IDS|MSG>") + 2], frames[frames.index(b"<IDS|MSG>") + 5]
        self._count += b'"status"' not in header
        if b'"comm_msg"' in header and b'"delta"' in content:
            parsed = json.loads(content)
            told = parsed["data"].get("content") or {}
            if told.get("type") == "delta" and told.get("ack") is not False:
                self._due.append((time.monotonic() + FRAME_MS / 1000, parsed["comm_id"], told["seq"]))


class Browser:
    """JupyterLab and a headless Chromium, as the browser tests start them."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        from browser.conftest import FLAGS
        from browser.lab import SIZE, Lab, Watch
        from browser.server import JupyterServer
        from playwright.sync_api import sync_playwright

        self._server = JupyterServer(folder)
        kernel = self._server.kernel("bench", "Benchmark", kernel_env())
        self._playwright = sync_playwright().start()
        self._chromium = self._playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
        context = self._chromium.new_context(viewport=SIZE, locale="en-GB", timezone_id="UTC")
        lab = Lab(context.new_page(), self._server, Watch(context, self._server.url), folder)
        lab.load()
        self._kernel = kernel
        self._lab = lab
        self._notebook: Any = None

    def close(self) -> None:
        self._chromium.close()
        self._playwright.stop()
        self._server.close()

    def run(self, cells: list[str]) -> None:
        """The cells stand in one notebook: those of both arms, and whatever prepares them."""
        if self._notebook is None:
            self._notebook = self._lab.new([*cells_of(True), *cells_of(False)], self._kernel)
            self._place = {cell: number for number, cell in enumerate((*cells_of(True), *cells_of(False)))}
        for cell in cells:
            if cell in self._place:
                self._notebook.run(self._place[cell])
            else:
                self._notebook.call(cell)

    def ask(self, code: str) -> str:
        return str(self._notebook.call(f"print({code})"))

    def rest(self, seconds: float) -> None:
        self._lab.page.wait_for_timeout(1000 * seconds)

    def messages(self) -> int:
        return sum(kind != "status" for kind in self._notebook.messages()["kinds"])


def chromium() -> str:
    import subprocess

    find = ["sh", str(ROOT / "scripts" / "chromium.sh"), "find"]
    return subprocess.run(find, capture_output=True, text=True, check=True, env={**os.environ, "PYTHON": sys.executable}).stdout.strip()


TOKENS = 64


def cells_of(views: bool) -> list[str]:
    """Eight background cells; the rows of cell i are `_row_i`."""
    view = "" if views else " --view none"
    return [
        f"%%mlx --bg --no-template --temp 0.7 --seed {i} --max-tokens {TOKENS} -o _row_{i}{view}\n{text}"
        for i, text in enumerate(BEGINNINGS)
    ]


class Machine:
    """Processor time of this machine, and of this benchmark with all its children, since it was made."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._began = time.monotonic()
        self._total, self._own = self._spent()

    def _spent(self) -> tuple[float, float]:
        times = self._psutil.cpu_times()
        total = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = 0.0
        for process in (self._psutil.Process(), *self._psutil.Process().children(recursive=True)):
            with contextlib.suppress(self._psutil.Error):  # it has just ended
                own += sum(process.cpu_times()[:2])
        return total, own

    def others(self) -> float:
        """The share of the machine that went to others, 0 to 1."""
        total, own = self._spent()
        spent = (total - self._total) - (own - self._own)
        return max(0.0, spent / ((time.monotonic() - self._began) * self._psutil.cpu_count()))


def arm(front: Front, views: bool) -> dict[str, Any]:
    """One run of all rows. tokens and seconds while all decode, messages per second, processor time of the kernel's threads.

    others: the share of the machine that other processes took meanwhile.
    """
    before, began, machine = front.messages(), time.monotonic(), Machine()
    front.ask("json.dumps(_busy())")
    front.run(cells_of(views))
    rows = "[" + ", ".join(f"_row_{i}" for i in range(ROWS)) + "]"
    while front.ask(f"all(row.done for row in {rows})").strip() != "True":
        front.rest(POLL_S)
    front.rest(0.3)  # what stays of the views
    found: dict[str, Any] = json.loads(front.ask(f"json.dumps(_rate({rows}))"))
    took = time.monotonic() - began
    if found["seconds"] <= 0 or min(found["counts"]) < TOKENS // 2:
        raise RuntimeError(f"the rows were too short to compare: {found['counts']} of {TOKENS} tokens")
    found["messages_per_s"] = (front.messages() - before) / took
    found["elapsed_s"] = took
    found["others"] = machine.others()
    return found


def rate(found: dict[str, Any]) -> float:
    return float(found["tokens"] / found["seconds"])


def round_of(front: Front) -> dict[str, Any]:
    """With, without, without, with; says if the four did not give the same numbers of tokens."""
    runs = [arm(front, views) for views in (True, False, False, True)]
    if len({tuple(r["counts"]) for r in runs}) != 1:
        print("  the arms gave answers of different lengths: " + str([r["counts"] for r in runs]), flush=True)
    ratio = (rate(runs[0]) + rate(runs[3])) / (rate(runs[1]) + rate(runs[2]))
    return {"ratio": ratio, "with": [runs[0], runs[3]], "without": [runs[1], runs[2]]}


def quiet(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rounds that count."""
    return [r for r in rounds if max(run["others"] for run in (*r["with"], *r["without"])) <= DISTURBED]


def interval(ratios: list[float]) -> tuple[float, float]:
    """The mean and the half-width of its 95 % interval (infinite for fewer than two)."""
    if len(ratios) < 2:
        return (ratios[0] if ratios else math.nan), math.inf
    mean = statistics.mean(ratios)
    t = T975[len(ratios) - 2] if len(ratios) - 2 < len(T975) else 2.05
    return mean, t * statistics.stdev(ratios) / math.sqrt(len(ratios))


def summary(everything: list[dict[str, Any]]) -> dict[str, Any]:
    rounds = quiet(everything)
    if not rounds:
        return {"ratio": None, "rounds": 0, "disturbed": len(everything)}
    mean, half = interval([r["ratio"] for r in rounds])
    shown = [run for r in rounds for run in r["with"]]
    hidden = [run for r in rounds for run in r["without"]]
    kinds = sorted({kind for run in shown for kind in run["busy"]})

    def share(runs: list[dict[str, Any]], kind: str) -> float:
        return sum(run["busy"].get(kind, 0.0) for run in runs) / sum(run["elapsed_s"] for run in runs)

    return {
        "ratio": mean,
        "half_width": half,
        "rounds": len(rounds),
        "disturbed": len(everything) - len(rounds),
        "with_tok_s": statistics.median(map(rate, shown)),
        "without_tok_s": statistics.median(map(rate, hidden)),
        "messages_per_s": statistics.median(run["messages_per_s"] for run in shown),
        "cpu_share_with": {kind: round(share(shown, kind), 4) for kind in kinds},
        "cpu_share_without": {kind: round(share(hidden, kind), 4) for kind in kinds},
    }


@contextlib.contextmanager
def opened(kind: str) -> Iterator[Front]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        front = Browser(Path(scratch)) if kind == "browser" else Client(Path(scratch))
        try:
            yield front
        finally:
            front.close()


def main() -> None:
    global TOKENS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front", choices=("client", "browser"), default="client")
    parser.add_argument("--minutes", type=float, default=4.0, help="no new round begins after this")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--half-width", type=float, default=0.01)
    parser.add_argument("--go-on", action="store_true", help="add to the rounds in the output folder")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    options = parser.parse_args()
    TOKENS = options.tokens
    path = options.out / "rendering.json"
    results: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"facts": facts("mlx", "mlxnb", "ipykernel", "jupyterlab", "anywidget")}
    )
    name = f"{options.front}, {TOKENS} tokens"
    rounds: list[dict[str, Any]] = results.get(name, {}).get("runs", []) if options.go_on else []
    with opened(options.front) as front:
        front.run(["%load_ext mlxnb", PROBE])
        for views in (False, True):  # loads the model, and the page's scripts
            print(f"  warm-up: {rate(arm(front, views)):.1f} tok/s", flush=True)
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            rounds.append(round_of(front))
            ratios = [r["ratio"] for r in quiet(rounds)]
            mean, half = interval(ratios)
            note = "" if quiet(rounds[-1:]) else " (disturbed, does not count)"
            print(f"  round {len(rounds)}: {rounds[-1]['ratio']:.4f}{note}; so far {mean:.4f} +- {half:.4f}", flush=True)
            if len(ratios) >= 3 and half < options.half_width:
                break
        blas = json.loads(front.ask("json.dumps(__import__('mlxnb.runtime', fromlist=['x']).client().status()['backend'])"))
    results[name] = {"id": "W10", "aim": 0.97, "backend": blas, **summary(rounds), "runs": rounds}
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1))
    told = {key: value for key, value in results[name].items() if key != "runs"}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
