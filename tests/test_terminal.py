"""A terminal shows the same runs from the same events, and obeys no escape sequence that a model writes."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from fake_client import FakeClient
from xss_payloads import PAYLOADS

from mlxnb.display import publish
from mlxnb.render import Renderer
from mlxnb.run import Run, RunGroup
from mlxnb.terminal import LIVE_LINES, PlainScreen, QuietScreen, RichScreen, footer, print_result, terminal_screen
from mlxnb_engine import events as ev
from mlxnb_engine.errors import ModelError
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, RequestId

OUR_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Tty(io.StringIO):
    """A terminal of 100 columns that remembers what was written."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def log() -> Generation:
    return Generation(CompletionRequest(RequestId("r"), "m", text="p"))


def say(target: Generation, *pieces: str) -> None:
    for piece in pieces:
        target.emit(lambda seq, t, p=piece: ev.Tokens(seq, t, (ev.TokenRecord(7, p, "sampled", t),), p))


def end(target: Generation, text: str) -> None:
    target.emit(lambda seq, t: ev.Finished(seq, t, "stop", text, {"completion_tokens": 2}))


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Tty:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Tty()


def test_plain_streaming_writes_each_piece_once_and_ends_with_a_footer() -> None:
    out, generation = io.StringIO(), log()
    run = Run(generation)
    renderer, screen = Renderer(run), PlainScreen(out)
    screen.draw(renderer, False)
    assert out.getvalue() == ""
    for piece in ("one ", "two\r", "\nthree"):
        say(generation, piece)
        screen.draw(renderer, False)
    end(generation, "one two\r\nthree")
    screen.draw(renderer, True)
    assert out.getvalue() == f"one two\nthree\n({footer(run)})\n"


def test_plain_streaming_prints_each_answer_of_a_group_whole_when_it_ends() -> None:
    out, logs = io.StringIO(), [log(), log()]
    renderer, screen = Renderer(RunGroup(Run(one, {"n": i}) for i, one in enumerate(logs))), PlainScreen(out)
    say(logs[0], "half")
    screen.draw(renderer, False)
    assert out.getvalue() == ""
    end(logs[1], "second")
    screen.draw(renderer, False)
    end(logs[0], "first")
    screen.draw(renderer, True)
    assert re.findall(r"\[n \d\]\n\w+", out.getvalue()) == ["[n 1]\nsecond", "[n 0]\nfirst"]


def test_no_payload_reaches_a_plain_terminal_as_a_control() -> None:
    for _, payload in PAYLOADS:
        out, generation = io.StringIO(), log()
        say(generation, payload)
        generation.fail(ModelError(payload, payload), payload)
        PlainScreen(out).draw(Renderer(Run(generation)), True)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", out.getvalue()), payload


@pytest.mark.parametrize("view", ["answer", "tokens", "raw"])
def test_no_payload_reaches_a_rich_terminal_as_a_control(tty: Tty, view: str) -> None:
    for _, payload in PAYLOADS[-17:] + PAYLOADS[::9]:
        generation = log()
        say(generation, payload)
        renderer, screen = Renderer(Run(generation, {payload: payload}), view), RichScreen(tty)
        screen.draw(renderer, False)
        generation.fail(ModelError(payload, payload), payload)
        screen.draw(renderer, True)
        screen.close()
    written = OUR_ESCAPES.sub("", tty.getvalue())
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", written)
    assert "\x1b]" not in tty.getvalue(), "an operating system command, such as a hyperlink or a window title"


def test_the_live_view_shows_the_last_lines_and_the_end_shows_all(tty: Tty) -> None:
    generation = log()
    renderer, screen = Renderer(Run(generation)), RichScreen(tty)
    lines = [f"- line{i}" for i in range(LIVE_LINES + 10)]
    say(generation, "\n".join(lines))
    screen.draw(renderer, False)
    live = tty.getvalue()
    assert lines[-1] in live and lines[0] + "\n" not in live and "streaming" in live
    end(generation, "\n".join(lines))
    screen.draw(renderer, True)
    screen.close()
    final = OUR_ESCAPES.sub("", tty.getvalue()[len(live) :])
    assert all(f"line{i}" in final for i in range(len(lines))) and "complete" in final


def test_a_link_in_a_terminal_shows_where_it_leads(tty: Tty) -> None:
    generation = log()
    end(generation, "[safe](https://evil.example)")
    RichScreen(tty).draw(Renderer(Run(generation)), True)
    assert "https://evil.example" in tty.getvalue()


def test_the_screen_fits_the_terminal(tty: Tty, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(terminal_screen(out=tty), RichScreen)
    assert isinstance(terminal_screen(out=io.StringIO()), PlainScreen)
    assert isinstance(terminal_screen(background=True, out=tty), QuietScreen)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(terminal_screen(out=tty), PlainScreen)
    closed = Tty()
    closed.close()
    monkeypatch.setattr(closed, "isatty", lambda: 1 / 0)
    assert isinstance(terminal_screen(out=closed), PlainScreen)


def test_a_background_run_says_two_lines() -> None:
    out, generation = io.StringIO(), log()
    renderer, screen = Renderer(Run(generation)), QuietScreen(out)
    screen.draw(renderer, False)
    say(generation, "secret")
    screen.draw(renderer, False)
    end(generation, "secret")
    screen.draw(renderer, True)
    assert out.getvalue().splitlines()[0] == f"Running in the background: r.0; {renderer.stop_hint}."
    assert "r.0 ended: complete" in out.getvalue() and "secret" not in out.getvalue()


def test_a_narrow_encoding_does_not_break_the_stream() -> None:
    raw = io.BytesIO()
    out, generation = io.TextIOWrapper(raw, encoding="ascii"), log()
    end(generation, "caf\u00e9 \u2603")
    PlainScreen(out).draw(Renderer(Run(generation)), True)
    assert raw.getvalue().startswith(b"caf? ?")


def test_publish_in_a_terminal_streams_and_finishes(capsys: pytest.CaptureFixture[str]) -> None:
    shell = type("TerminalInteractiveShell", (SimpleNamespace,), {})()
    client = FakeClient()
    try:
        run = Run(client.submit(CompletionRequest(RequestId("t"), "m", text="one two"))[0])
        publication = publish(run, shell=shell)
        assert run.wait(5) and publication.finish(5)
    finally:
        client.close()
    assert capsys.readouterr().out.startswith("one two \n(m · complete")


@pytest.mark.parametrize("rich", [True, False])
def test_the_token_view_shows_where_tokens_end_and_which_were_doubtful(tty: Tty, rich: bool) -> None:
    out = tty if rich else io.StringIO()
    generation = log()
    for text, logprob in (("Be", -0.1), ("cause", -2.3)):
        generation.emit(lambda s, t, x=text, p=logprob: ev.Tokens(s, t, (ev.TokenRecord(7, x, "sampled", t, p),), x))
    screen = RichScreen(out) if rich else PlainScreen(out)
    screen.draw(Renderer(Run(generation), "tokens"), False)
    end(generation, "Because")
    screen.draw(Renderer(Run(generation), "tokens"), True)
    screen.close()
    shown = OUR_ESCAPES.sub("", out.getvalue())
    assert "Be|cause" in shown and ("cause(10%)" in shown) is rich and "Be(" not in shown


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_an_error_that_the_cell_raises_is_printed_once(tty: Tty, rich: bool, count: int) -> None:
    out = tty if rich else io.StringIO()
    logs = [log() for _ in range(count)]
    for generation in logs:
        say(generation, "half")
        generation.fail(ModelError("no finite score"), "half")
    runs = [Run(generation) for generation in logs]
    target = runs[0] if count == 1 else RunGroup(runs)
    for errors in (False, True):
        screen = RichScreen(out) if rich else PlainScreen(out)
        screen.draw(Renderer(target, errors=errors), True)
        screen.close()
        assert "half" in out.getvalue()
        assert out.getvalue().count("no finite score") == (count if errors else 0)


def test_a_result_that_has_ended_can_be_printed_later(tty: Tty) -> None:
    generation = log()
    end(generation, "the answer")
    print_result(Run(generation), "none", errors=True, out=tty)
    assert tty.getvalue() == ""
    print_result(Run(generation), "answer", errors=True, out=tty)
    assert "the answer" in tty.getvalue() and "complete" in tty.getvalue()
