"""The `mlxnb` command: exit codes, sentences instead of tracebacks, progress, and notebooks that stream in a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

from mlxnb import cli, demo
from mlxnb_engine.errors import ModelError, RequestError

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "01_quickstart.ipynb"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def child_env() -> dict[str, str]:
    roots = [str(ROOT), str(ROOT / "engine"), str(ROOT / "widgets")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "PYTHONUNBUFFERED": "1"}


# -- arguments, errors, exit codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["dance"], ["doctor", "--nonsense"]])
def test_wrong_usage_exits_with_2_and_says_what_there_is(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: mlxnb" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("mlxnb ")


def test_help_of_the_command_and_of_each_part_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["doctor", "--help"], ["fetch", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 0 and "usage: mlxnb" in capsys.readouterr().out


def test_a_typed_error_is_one_sentence_with_its_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(settings: object, name: str | None = None) -> Path:
        raise ModelError("There is no such model.", "Look at the spelling.")

    monkeypatch.setattr(cli, "fetch_model", fail)
    assert cli.main(["fetch", "no/model"]) == 1
    said = capsys.readouterr()
    assert said.err == "mlxnb: There is no such model.\n  -> Look at the spelling.\n" and said.out == ""


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(settings: object, name: str | None = None) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "fetch_model", interrupted)
    assert cli.main(["fetch"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_a_bad_setting_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLXNB_MAX_ROWS", "many")
    assert cli.main(["fetch"]) == 1
    assert "MLXNB_MAX_ROWS" in capsys.readouterr().err


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_doctor_exits_by_what_it_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: bool, code: int) -> None:
    from mlxnb import doctor

    answer: dict[str, Any] = {"version": "1", "device": "gpu", "gflops": 1.0, "blas": "mkl", "blas_path": None, "blas_note": ""}
    monkeypatch.setattr(doctor, "probe_backend", lambda blas: answer if good else {"error": "broken"})
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is good


def test_python_dash_m_runs_the_command() -> None:
    argv = [sys.executable, "-m", "mlxnb", "dance"]
    done = subprocess.run(argv, env=child_env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "usage: mlxnb" in done.stderr and "Traceback" not in done.stderr


def test_help_names_the_magic_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert " %load_ext mlxnb" in capsys.readouterr().out


def test_a_demo_of_a_notebook_that_is_not_there_says_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetched(settings: object, name: str | None = None) -> Path:
        raise AssertionError("a model was fetched for nothing")

    monkeypatch.setattr(cli, "fetch_model", fetched)
    assert cli.main(["demo", str(tmp_path / "nosuch.ipynb")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("mlxnb: There is no notebook")


def test_the_demo_without_a_name_is_the_quickstart_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, Path | None]] = []

    def run(notebook: Path, output: Path, screen: Any = None, folder: Path | None = None) -> tuple[Path, Path, bool]:
        seen.append((notebook, folder))
        return notebook, notebook, True

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(cli, "fetch_model", lambda settings, name=None: Path())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", str(QUICKSTART)]) == 0
    assert seen == [(QUICKSTART, tmp_path), (QUICKSTART, QUICKSTART.parent)]


def test_no_hint_of_what_the_shell_runs_too_speaks_of_cells() -> None:
    for name in ("fetch", "hub", "locate", "loader", "template"):
        source = (ROOT / "engine" / "mlxnb_engine" / f"{name}.py").read_text("utf-8")
        assert "the cell" not in source.lower(), name


# -- progress ------------------------------------------------------------------------------------------------------------


def test_progress_on_a_pipe_is_a_line_at_each_tenth() -> None:
    out = io.StringIO()
    line = cli.ProgressLine(out, lambda: 0.0)
    for done in range(1001):
        line("download", done * 10**5, 10**8)
    line.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 11 and "100.0 of 100.0 MB" in lines[-1] and "\r" not in out.getvalue()


def test_progress_in_a_terminal_redraws_one_line_and_says_how_long() -> None:
    out, now = FakeTerminal(), [0.0]
    line = cli.ProgressLine(out, lambda: now[0])
    for step in range(101):
        now[0] = step * 0.05
        line("download", step * 10**6, 10**8)
    line("hash", 5, 0)
    line.close()
    line.close()
    text = out.getvalue()
    assert 40 <= text.count("\r\x1b[K") <= 60, "about one redraw in a tenth of a second"
    assert "s left" in text and text.count("\n") == 2


# -- cells on a screen ---------------------------------------------------------------------------------------------------


def update(printer: demo.CellPrinter, text: str, display_id: str = "a") -> None:
    printer.message("update_display_data", {"data": {"text/plain": text}, "transient": {"display_id": display_id}})


def test_a_growing_answer_is_written_once_without_its_progress_lines() -> None:
    out = io.StringIO()
    printer = demo.CellPrinter(out)
    printer.begin("%%mlx\nWhy?", 3)
    for text in ("Waiting · 3 ms", "Loading weights ", "Loading SmolLM2 · 40 MB of 98 MB", "Unpack ", "Be"):
        update(printer, text)
        assert out.getvalue().endswith("Why?\n"), "none of these has been seen to grow"
    for text in ("Because", "Because of", "Because of light."):
        update(printer, text)
        assert out.getvalue().endswith(text)
    printer.end()
    assert out.getvalue() == "\nIn [3]: %%mlx\n      | Why?\nBecause of light.\n"


def test_a_group_is_written_whole_at_its_end() -> None:
    out = io.StringIO()
    printer = demo.CellPrinter(out)
    printer.begin("x", 1)
    update(printer, "[sample 1]\nWaiting · 3 ms\n\n[sample 2]\nWaiting · 3 ms")
    update(printer, "[sample 1]\nOn\n\n[sample 2]\nTw")
    update(printer, "[sample 1]\nOne\n\n[sample 2]\nTwo")
    printer.end()
    assert out.getvalue().partition("\n")[2] == "In [1]: x\n[sample 1]\nOne\n\n[sample 2]\nTwo\n"


def test_a_text_that_changed_in_its_middle_is_written_again_whole() -> None:
    out = io.StringIO()
    printer = demo.CellPrinter(out)
    printer.begin("x", 1)
    for text in ("one", "one two", "one three", "one three four"):
        update(printer, text)
    printer.end()
    assert out.getvalue().endswith("one two\none three four\n")


def test_a_terminal_shows_passing_lines_and_wipes_them() -> None:
    out = FakeTerminal()
    printer = demo.CellPrinter(out)
    printer.begin("x", 1)
    update(printer, "Loading M · 1 MB of 2 MB")
    assert out.getvalue().endswith("Loading M · 1 MB of 2 MB\x1b[0m")
    update(printer, "Done")
    printer.end()
    assert out.getvalue().endswith("\r\x1b[KDone\n") and out.getvalue().count("\n") == 3


def test_a_failed_cell_shows_its_answer_before_the_error() -> None:
    out = io.StringIO()
    printer = demo.CellPrinter(out)
    printer.begin("x", 1)
    for text in ("half an", "half an answer\n"):
        update(printer, text)
    update(printer, "[sample 1]\nheld", "group")
    printer.message("error", {"ename": "ModelError", "evalue": "no", "traceback": ["ModelError: no"]})
    printer.end()
    assert out.getvalue().endswith("half an answer\n[sample 1]\nheld\nModelError: no\n")


def test_a_model_cannot_steer_the_terminal() -> None:
    for out in (io.StringIO(), FakeTerminal()):
        printer = demo.CellPrinter(out)
        printer.begin("x \x1b[2J", 1)
        for text in ("\x1b]0;owned\x07", "\x1b]0;owned\x07\x1b[2J answer"):
            update(printer, text)
        printer.message("stream", {"name": "stdout", "text": "\x1b[31mred\x9b"})
        printer.message("error", {"traceback": ["\x1b[31mBad\x1b[0m \x1b[2J"]})
        printer.end()
        shown = out.getvalue()
        for own in ("\r\x1b[K", "\x1b[1m", "\x1b[2m", "\x1b[0m"):
            shown = shown.replace(own, "")
        assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r"}, shown


def test_a_screen_that_knows_only_ascii_gets_question_marks() -> None:
    raw = io.BytesIO()
    printer = demo.CellPrinter(io.TextIOWrapper(raw, encoding="ascii"))
    printer.begin("print('naïve')", 1)
    update(printer, "café")
    printer.end()
    assert b"caf?\n" in raw.getvalue()


# -- whole notebooks, without a model ------------------------------------------------------------------------------------


def book(tmp_path: Path, *cells: str) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = tmp_path / "book.ipynb"
    nbformat.write(made, str(path))
    return path


class Arrivals(io.StringIO):
    """Remembers when each piece was written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.pieces.append((time.monotonic(), text))
        return super().write(text)


STREAMING = """
import time
from IPython.display import display
kernel = get_ipython().kernel
print("stdin allowed:", kernel._allow_stdin)
try:
    input("your name? ")
except EOFError:
    print("nobody answers")
handle = display({"text/plain": "one"}, raw=True, display_id=True)
for text in ("one two", "one two three"):
    time.sleep(0.2)
    handle.update({"text/plain": text}, raw=True)
"""


def test_a_notebook_streams_and_is_kept_as_notebook_and_page(tmp_path: Path) -> None:
    screen = Arrivals()
    executed, page, good = demo.run(book(tmp_path, STREAMING, "import sys; print(sys.executable)"), tmp_path / "out", screen)
    assert good
    shown = screen.getvalue()
    assert "stdin allowed: True" in shown and "nobody answers" in shown
    assert "one two three\n" in shown and shown.count("two") - STREAMING.count("two") == 1
    when = {text: at for at, text in screen.pieces}
    assert when["one two"] < when[" three"], "the answer came piece by piece"
    kept = nbformat.read(str(executed), as_version=4)
    assert kept.cells[0].outputs[-1]["data"]["text/plain"] == "one two three"
    assert kept.cells[1].outputs[0]["text"].strip() == sys.executable, "the kernel is this environment's"
    html = page.read_text("utf-8")
    assert "one two three" in html and 'src="http' not in html and "src='http" not in html


def test_a_cell_that_fails_ends_the_run_and_what_ran_is_kept(tmp_path: Path) -> None:
    screen = io.StringIO()
    executed, page, good = demo.run(book(tmp_path, "print('before')", "1 / 0", "print('never')"), tmp_path / "out", screen)
    assert not good and page.exists()
    assert "ZeroDivisionError" in screen.getvalue() and "never" not in screen.getvalue()
    assert nbformat.read(str(executed), as_version=4).cells[1].outputs[0]["ename"] == "ZeroDivisionError"


def test_a_kernel_that_dies_is_a_typed_error(tmp_path: Path) -> None:
    from mlxnb_engine.errors import EngineDead

    with pytest.raises(EngineDead, match=r"It said: out of luck\..*doctor"):
        demo.run(book(tmp_path, "import os; os.write(2, b'out of luck'); os._exit(3)"), tmp_path / "out", io.StringIO())


BAD_CELL = '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{}]}'


@pytest.mark.parametrize("content", [None, "", "not json", "[]", "{}", BAD_CELL])
def test_something_that_is_no_notebook_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "x.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError) as error:
        demo.run(path, tmp_path / "out", io.StringIO())
    assert "x.ipynb" in error.value.message and "\n" not in str(error.value) and error.value.hint


def test_an_output_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="--output"):
        demo.run(book(tmp_path, "1"), tmp_path / "file" / "out", io.StringIO())


def start_demo(tmp_path: Path, *cells: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "mlxnb", "demo", str(book(tmp_path, *cells)), "--output", str(tmp_path / "out")]
    env = {**child_env(), "MLXNB_MODEL": "not/needed"}
    return subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupt_at(process: subprocess.Popen[str], start: str, after_s: float = 0.0) -> tuple[str, str]:
    """Send Ctrl-C once a line begins with `start`; that line and what the process said on stderr."""
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith(start))
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    return line, process.communicate(timeout=60)[1]


def test_ctrl_c_during_a_cell_ends_the_demo_cleanly_and_leaves_no_kernel(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "import os, time; print('pid', os.getpid(), flush=True); time.sleep(120)")
    line, errors = interrupt_at(process, "pid ")
    assert process.returncode == 130, errors
    assert errors.strip() == "mlxnb: stopped"
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[1]), 0)


@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.5])
def test_ctrl_c_while_the_kernel_starts_ends_the_demo_cleanly(tmp_path: Path, after_s: float) -> None:
    process = start_demo(tmp_path, "import time; time.sleep(120)")
    _, errors = interrupt_at(process, "Running ", after_s)
    # Python dies of the signal itself if that came inside an import's exec(), although main() handled it; a shell sees 130 too.
    assert process.returncode in (130, -signal.SIGINT), errors
    assert errors.strip() == "mlxnb: stopped"


# -- the quickstart, on the real model -----------------------------------------------------------------------------------


def test_the_quickstart_is_stored_without_outputs() -> None:
    kept = nbformat.read(str(QUICKSTART), as_version=nbformat.NO_CONVERT)
    nbformat.validate(kept)
    assert (kept.nbformat, kept.nbformat_minor) == (4, 5) and kept.metadata.kernelspec.name == "python3"
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert len({cell.id for cell in kept.cells}) == len(kept.cells)


def test_the_demo_answers_every_question_of_the_quickstart(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "mlxnb", "demo", str(QUICKSTART), "--output", str(tmp_path)]
    done = subprocess.run(argv, env=child_env(), cwd=tmp_path, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    kept = nbformat.read(str(tmp_path / QUICKSTART.name), as_version=4)
    asked = [cell for cell in kept.cells if cell.cell_type == "code" and cell.source.startswith("%%mlx")]
    assert len(asked) >= 5
    for cell in asked:
        (output,) = [o for o in cell.outputs if o.output_type == "display_data"]
        answer = output["data"]["text/plain"]
        assert answer.strip() and answer.strip().splitlines()[-1] in done.stdout, cell.source
    noise = [o["text"] for cell in kept.cells if cell.cell_type == "code" for o in cell.outputs if o.get("name") == "stderr"]
    assert not noise, noise
    assert (tmp_path / "01_quickstart.html").stat().st_size > 10_000
