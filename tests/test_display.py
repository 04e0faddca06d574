"""What a person sees while a run lives, and what stays: paced, safe, complete, one final bundle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_client import FakeClient
from test_routing import Shell
from test_sanitize import CHROME_TAGS, TEXT_TAGS, faults
from xss_payloads import PAYLOADS

from mlxnb import display, render
from mlxnb.display import INTERVAL_S, RENDER_SHARE, CellScreen, Publication, Publisher, publish
from mlxnb.render import MAX_CARDS, VIEWS, Renderer, duration, label_of, progress_line, size
from mlxnb.run import LoadRun, Run, RunGroup
from mlxnb.sanitize import STYLES
from mlxnb.schema import RUN_MIME
from mlxnb_engine import events as ev
from mlxnb_engine.errors import ModelError, RequestError
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, RequestId, SamplingSpec


def log(model: str = "m", prefill: str = "", clock: Any = None, **fields: Any) -> Generation:
    request = CompletionRequest(RequestId("r"), model, text="p", prefill=prefill, **fields)
    return Generation(request) if clock is None else Generation(request, 0, clock)


def say(target: Generation, *pieces: str, origin: Any = "sampled", **fields: Any) -> None:
    for piece in pieces:

        def make(seq: int, t: float, text: str = piece) -> ev.Event:
            return ev.Tokens(seq, t, (ev.TokenRecord(7, text, origin, t, **fields),), text)

        target.emit(make)


def end(target: Generation, text: str, reason: str = "stop") -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "execution": {"declined": []}}
    target.emit(lambda seq, t: ev.Finished(seq, t, reason, text, usage))


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """Remembers what was drawn; `costs` makes drawing slow on the clock."""

    def __init__(self, clock: Clock, costs: float = 0.0, threaded: bool = True) -> None:
        self.drawn: list[tuple[dict[str, str], bool]] = []
        self.closed = 0
        self.threaded = threaded
        self._clock, self._costs = clock, costs

    def draw(self, renderer: Renderer, final: bool) -> None:
        self.drawn.append((renderer.mime(), final))
        self._clock.now += self._costs

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shell() -> Iterator[Shell]:
    made = Shell()
    made.run("A")
    yield made


# -- pacing ------------------------------------------------------------------------------------------------------------


def test_a_display_draws_at_most_four_times_a_second_and_never_the_same_twice(clock: Clock) -> None:
    generation, screen = log(), Screen(clock)
    publication = Publication(Renderer(Run(generation)), screen, False, clock)
    for tick in range(1000):
        if tick < 500:
            say(generation, "x ")
        publication.step()
        clock.now += 0.01
    assert 18 <= len(screen.drawn) <= 21, f"{len(screen.drawn)} draws in the five seconds of a growing text, none in the five after"
    assert not any(final for _, final in screen.drawn)


def test_slow_rendering_is_done_less_often(clock: Clock) -> None:
    generation, screen = log(), Screen(clock, costs=0.2)
    publication = Publication(Renderer(Run(generation)), screen, False, clock)
    began = clock.now
    while clock.now < began + 12:
        say(generation, "x ")
        publication.step()
        clock.now += 0.01
    share = 0.2 * len(screen.drawn) / (clock.now - began)
    assert share <= 1 / RENDER_SHARE + 0.02, f"rendering took {share:.0%} of the time"


def test_the_end_is_drawn_at_once_and_exactly_once(clock: Clock) -> None:
    generation, screen = log(), Screen(clock)
    publication = Publication(Renderer(Run(generation)), screen, False, clock)
    say(generation, "a")
    publication.step()
    end(generation, "ab")
    publication.step()
    for _ in range(5):
        clock.now += 1
        publication.step()
    assert [final for _, final in screen.drawn] == [False, True]
    assert screen.drawn[-1][0]["text/plain"] == "ab"
    assert (screen.closed, publication.over, publication.finish()) == (1, True, True)


def test_batch_execution_gets_the_final_bundle_only(clock: Clock) -> None:
    generation, screen = log(), Screen(clock)
    publication = Publication(Renderer(Run(generation)), screen, True, clock)
    say(generation, "a")
    for _ in range(10):
        publication.step()
        clock.now += 1
    assert screen.drawn == []
    end(generation, "a")
    publication.step()
    assert [final for _, final in screen.drawn] == [True]


def test_finish_shows_a_run_that_would_not_end_in_time_as_stopping() -> None:
    generation, screen = log(), Screen(Clock())
    publication = Publication(Renderer(Run(generation)), screen, False)
    say(generation, "half")
    publication.step()
    generation.cancel()
    assert publication.finish(0.01) is False
    assert "stopping" in screen.drawn[-1][0]["text/html"]
    generation.emit(lambda seq, t: ev.Cancelled(seq, t, "half"))
    publication.step()
    assert publication.over and "stopped" in screen.drawn[-1][0]["text/html"]


def test_a_screen_bound_to_its_thread_is_drawn_by_finish(clock: Clock) -> None:
    generation, screen = log(), Screen(clock, threaded=False)
    publication = Publication(Renderer(Run(generation)), screen, True)
    end(generation, "a")
    assert publication.finish(1.0)
    assert [final for _, final in screen.drawn] == [True]


def test_a_rendering_that_fails_still_shows_the_answer_as_text(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(value: str) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(render, "markdown_to_html", broken)
    generation = log()
    end(generation, "**kept**")
    publication = publish(Run(generation), shell=shell)
    assert publication.finish(2.0)
    assert isinstance(publication.problem, ValueError)
    assert shell.messages()[-1][2]["data"]["text/plain"] == "**kept**"


# -- the one thread ------------------------------------------------------------------------------------------------------


def test_all_runs_of_a_kernel_share_one_publisher_thread(shell: Shell) -> None:
    client = FakeClient(hold=1)
    try:
        request = CompletionRequest(RequestId("g"), "m", text="one two three", samples=4)
        publications = [publish(Run(generation), background=True, shell=shell) for generation in client.submit(request)]
        assert sum(thread.name == "mlxnb-display" for thread in threading.enumerate()) == 1
        client.release()
        assert all(publication.finish(5.0) for publication in publications)
    finally:
        client.close()
    by_display: dict[str, str] = {}
    for _, parent, content in shell.messages():
        assert parent == "A"
        by_display[content["transient"]["display_id"]] = content["data"]["text/plain"]
    assert sorted(by_display.values()) == ["one two three "] * 4


def test_one_failing_screen_does_not_stop_the_others(clock: Clock) -> None:
    class Broken(Screen):
        def draw(self, renderer: Renderer, final: bool) -> None:
            raise OSError("gone")

    publisher, logs = Publisher(), [log(), log()]
    screens = [Broken(clock), Screen(clock)]
    publications = [Publication(Renderer(Run(one)), screen, False) for one, screen in zip(logs, screens, strict=True)]
    for one in logs:
        end(one, "x")
    for publication in publications:
        publisher.add(publication)
    assert all(publication._over.wait(5) for publication in publications)
    publisher.stop()
    assert isinstance(publications[0].problem, OSError)
    assert screens[1].drawn[-1][1]


def test_an_idle_publisher_ends_and_starts_again(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(display, "IDLE_S", 0.01)
    publisher = Publisher()
    for _ in range(2):
        generation, screen = log(), Screen(clock)
        end(generation, "x")
        publication = Publication(Renderer(Run(generation)), screen, False)
        publisher.add(publication)
        thread = publisher._thread
        assert publication._over.wait(5)
        if thread is not None:
            thread.join(5)
            assert not thread.is_alive()
    assert publisher._live == []


# -- publish ---------------------------------------------------------------------------------------------------------------


def test_the_output_stands_where_the_cell_made_it_before_there_is_text(shell: Shell) -> None:
    generation = log()
    generation.emit(lambda seq, t: ev.LoadProgress(seq, t, "download", 3_000_000, 12_000_000))
    publication = publish(Run(generation), shell=shell)
    kind, parent, content = shell.messages()[0]
    assert (kind, parent) == ("display_data", "A")
    assert content["data"]["text/plain"] == "Downloading m · 3\u2009MB of 12\u2009MB"
    assert render.STOP_HINT in content["data"]["text/html"] and "width:25.0%" in content["data"]["text/html"]
    end(generation, "x")
    assert publication.finish(2.0)


def test_a_batch_cell_gets_one_output(shell: Shell) -> None:
    shell.run("B", allow_stdin=False)
    generation = log()
    say(generation, "a")
    publication = publish(Run(generation), shell=shell)
    assert shell.messages() == []
    end(generation, "ab")
    assert publication.finish(2.0)
    assert [(kind, content["data"]["text/plain"]) for kind, _, content in shell.messages()] == [("display_data", "ab")]


def test_a_background_cell_in_batch_has_its_output_before_it_ends(shell: Shell) -> None:
    shell.run("B", allow_stdin=False)
    generation = log()
    publication = publish(Run(generation), background=True, shell=shell)
    shell.end()
    shell.run("C", allow_stdin=False)
    end(generation, "late")
    assert publication.finish(2.0)
    assert [(kind, parent) for kind, parent, _ in shell.messages()] == [("display_data", "B"), ("update_display_data", "C")]


def test_no_view_shows_nothing_and_an_unknown_one_is_refused(shell: Shell) -> None:
    generation = log()
    assert publish(Run(generation), view="none", shell=shell).finish()
    assert shell.messages() == []
    with pytest.raises(RequestError, match="There is no view 'anwser'"):
        publish(Run(generation), view="anwser", shell=shell)


# -- what it says ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "none"])
def test_no_payload_is_active_in_any_view_of_a_run_or_group(view: str) -> None:
    tags = TEXT_TAGS | CHROME_TAGS
    for _, payload in PAYLOADS:
        generation = log(model=payload, prefill=payload)
        say(generation, payload, payload, logprob=-1.0, rank=3, top=(ev.Alternative(1, payload, -2.0),), origin=payload)
        generation.fail(ModelError(payload, payload), payload)
        run = Run(generation, {payload: payload})
        for target in (run, RunGroup([run, run]), RunGroup([run] * (MAX_CARDS + 1))):
            bundle = Renderer(target, view).mime()
            assert faults(bundle["text/html"], tags, chrome=True) == [], payload
            assert "\x1b" not in bundle["text/plain"]


def test_plain_text_is_the_answer_itself_with_its_prefill() -> None:
    generation = log(prefill="Sure: ")
    end(generation, "**yes**\n")
    assert Renderer(Run(generation)).plain() == "Sure: **yes**\n"


def test_the_footer_says_model_counts_speed_first_token_end_and_seed() -> None:
    clock = Clock()
    generation = log(clock=clock, sampling=SamplingSpec(temp=0.7))
    generation.emit(lambda seq, t: ev.Started(seq, t, "SmolLM", 9, 7, True))
    clock.now += 0.074
    say(generation, "a")
    clock.now += 0.5
    say(generation, "b")
    clock.now += 0.5
    say(generation, "c")
    end(generation, "abc", "length")
    facts = dict(render.facts(Run(generation)))
    assert facts["prompt"] == "9" and facts["TTFT"] == "74\u2009ms" and facts["speed"] == "2\u2009tok/s"
    assert facts["seed"] == "7" and facts["total"] == "1.1\u2009s" and facts["answer"] == "4\u2009tokens"
    html = Renderer(Run(generation)).mime()["text/html"]
    assert "SmolLM" in html and "length limit reached" in html


@pytest.mark.parametrize(
    ("cached", "disk", "said"), [(0, 0, "400"), (384, 0, "400 (384 cached)"), (384, 64, "400 (384 cached, 64 of them from the SSD)")]
)
def test_the_footer_says_what_of_the_prompt_was_not_computed_while_it_runs_and_after(cached: int, disk: int, said: str) -> None:
    generation = log()
    generation.emit(lambda seq, t: ev.Started(seq, t, "SmolLM", 400, 7, True, cached, disk))
    run = Run(generation)
    assert dict(render.facts(run))["prompt"] == said
    details = {"cached_tokens": cached, **({"ssd_tokens": disk} if disk else {})}
    generation.emit(lambda seq, t: ev.Finished(seq, t, "stop", "", {"prompt_tokens": 400, "prompt_tokens_details": details}))
    assert dict(render.facts(run))["prompt"] == said


@pytest.mark.parametrize(
    "sampling, open_fields, shown",
    [
        (SamplingSpec(), ("temp",), False),  # nobody chose anything: 20 digits that mean nothing to a greedy answer
        (SamplingSpec(seed=5), (), False),
        (SamplingSpec(temp=0.7), (), True),
        (SamplingSpec(seed=5), ("temp",), True),  # the model may have a temperature of its own
    ],
)
def test_the_footer_shows_a_seed_only_where_it_may_matter(sampling: SamplingSpec, open_fields: tuple[str, ...], shown: bool) -> None:
    generation = log(sampling=sampling, open_fields=open_fields)
    generation.emit(lambda seq, t: ev.Started(seq, t, "m", 9, 12345678901234567890, False))
    end(generation, "x")
    run = Run(generation)
    assert ("seed" in dict(render.facts(run))) is shown
    assert run.seed == 12345678901234567890


def test_a_background_display_says_how_to_stop_it_and_not_to_interrupt(shell: Shell) -> None:
    runs = [Run(log()) for _ in range(2)]
    for target in (runs[0], RunGroup(runs)):
        publish(target, background=True, shell=shell, stop_hint="`%mlx cancel c1` stops it")
        html = shell.messages()[-1][2]["data"]["text/html"]
        assert "`%mlx cancel c1` stops it" in html and render.STOP_HINT not in html
    before = len(shell.messages())
    publish(runs[0], background=True, shell=shell)
    own = next(content for kind, _, content in shell.messages()[before:] if kind == "display_data")  # the others go on being drawn
    assert "cancel() stops it" in own["data"]["text/html"]
    for run in runs:
        end(run.generation, "x")


def test_plain_html_says_how_to_stop_as_long_as_there_is_something_to_stop() -> None:
    generation = log()
    renderer = Renderer(Run(generation))
    assert render.STOP_HINT in str(renderer.html())  # no text yet
    say(generation, "half")
    assert render.STOP_HINT in str(renderer.html())
    end(generation, "half")
    assert render.STOP_HINT not in str(renderer.html())


def test_an_error_that_the_cell_raises_is_not_in_its_display_too() -> None:
    generation = log(model="")
    say(generation, "half")
    generation.fail(ModelError("no finite score", "try float32"), "half")
    run = Run(generation)
    for target in (run, RunGroup([run, run]), RunGroup([run] * (MAX_CARDS + 1))):
        bundle = Renderer(target, errors=False).mime()
        for text in bundle.values():
            assert "half" in text and "no finite score" not in text and "try float32" not in text
        assert ">failed<" in bundle["text/html"]
        assert "no finite score" in Renderer(target).mime()["text/plain"]


def test_a_model_without_a_name_has_no_empty_chip() -> None:
    generation = log(model="")
    generation.emit(lambda seq, t: ev.LoadProgress(seq, t, "download", 1, 2))
    assert progress_line(Run(generation)).startswith("Downloading the default model")
    generation.fail(ModelError("gone"), "")
    named = log(model="m")
    end(named, "x")
    for one, chips in ((generation, False), (named, True)):
        for target in (Run(one), RunGroup([Run(one), Run(one)])):
            assert (STYLES["chip"] in Renderer(target).mime()["text/html"]) is chips


@pytest.mark.parametrize(
    "outcome, word",
    [("stop", "complete"), ("length", "length limit reached"), ("cancel", "stopped"), ("fail", "failed")],
)
def test_every_ending_is_said_in_a_word(outcome: str, word: str) -> None:
    generation = log()
    say(generation, "half")
    if outcome == "cancel":
        generation.emit(lambda seq, t: ev.Cancelled(seq, t, "half"))
    elif outcome == "fail":
        generation.fail(ModelError("no finite score", "try float32"), "half")
    else:
        end(generation, "half", outcome)
    bundle = Renderer(Run(generation)).mime()
    assert f">{word}<" in bundle["text/html"] and "half" in bundle["text/html"]
    assert ("no finite score" in bundle["text/plain"] and "try float32" in bundle["text/html"]) == (outcome == "fail")


def test_an_answer_without_text_says_so() -> None:
    generation = log()
    end(generation, "")
    assert "(no text)" in Renderer(Run(generation)).mime()["text/html"]


def test_progress_says_how_much_how_fast_and_how_long() -> None:
    clock = Clock()
    generation = log(clock=clock)
    run = Run(generation)
    assert progress_line(run) == "Waiting · 0\u2009ms"
    generation.emit(lambda seq, t: ev.LoadProgress(seq, t, "download", 0, 100_000_000))
    clock.now += 10
    generation.emit(lambda seq, t: ev.LoadProgress(seq, t, "download", 25_000_000, 100_000_000))
    assert progress_line(run) == "Downloading m · 25\u2009MB of 100\u2009MB · 2.5\u2009MB/s · 30.0\u2009s left"
    generation.emit(lambda seq, t: ev.PrefillProgress(seq, t, 1536, 2310))
    assert progress_line(run) == "Reading the prompt · 1,536 of 2,310 tokens"


def test_a_few_answers_are_cards_and_many_are_a_table() -> None:
    def group(count: int) -> RunGroup:
        runs = []
        for index in range(count):
            generation = log()
            end(generation, f"answer {index}")
            runs.append(Run(generation, {"temp": index / 10}))
        return RunGroup(runs)

    few, many = Renderer(group(3)).mime(), Renderer(group(MAX_CARDS + 1)).mime()
    assert "display:grid" in few["text/html"] and "<table" not in few["text/html"] and "temp 0.2" in few["text/html"]
    assert "<table" in many["text/html"] and all(f"answer {index}" in many["text/html"] for index in range(MAX_CARDS + 1))
    assert few["text/plain"].startswith("[temp 0]\nanswer 0\n\n[temp 0.1]\nanswer 1")
    assert "3 of 3" in few["text/html"]
    assert "no runs" in Renderer(RunGroup([])).mime()["text/html"]


def test_the_token_view_tells_origins_apart_and_shows_probabilities_only_if_captured() -> None:
    plain, scored = log(), log()
    say(plain, "a")
    say(plain, "b", origin="drafted")
    end(plain, "ab")
    say(scored, " ", logprob=-0.6931, rank=0, top=(ev.Alternative(8, "z", -2.0),))
    end(scored, " ")
    bare = Renderer(Run(plain), "tokens").mime()["text/html"]
    assert "1px solid" in bare and "2px dashed" in bare and ">draft<" in bare and "amber" not in bare
    rich = Renderer(Run(scored), "tokens").mime()["text/html"]
    assert "p 0.500 · rank 1" in rich and "0.135" in rich and "\u2423" in rich and "amber" in rich


def test_only_what_changed_is_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []
    real = render.markdown_to_html

    def counting(value: str) -> Any:
        rendered.append(value)
        return real(value)

    monkeypatch.setattr(render, "markdown_to_html", counting)
    logs = [log(), log()]
    end(logs[0], "done")
    renderer = Renderer(RunGroup([Run(one) for one in logs]))
    say(logs[1], "a")
    renderer.html()
    say(logs[1], "b")
    renderer.html()
    renderer.html()
    assert rendered == ["done", "a", "ab"]


def test_loading_ends_with_one_line() -> None:
    generation = log(model="SmolLM")
    end(generation, "")
    assert Renderer(LoadRun(generation)).plain().startswith("loaded: SmolLM · ")
    failed = log(model="nope")
    failed.fail(RequestError("There is no model 'nope'.", "See %mlx models."))
    assert "There is no model" in Renderer(LoadRun(failed)).mime()["text/html"]


@pytest.mark.parametrize(
    "seconds, text",
    [(0.0, "0 ms"), (0.0744, "74 ms"), (0.9996, "1.0 s"), (9.84, "9.8 s"), (59.97, "1 min 00 s"), (185, "3 min 05 s")],
)
def test_durations_have_no_more_digits_than_mean_something(seconds: float, text: str) -> None:
    assert duration(seconds).replace("\u2009", " ") == text


@pytest.mark.parametrize("count, text", [(0, "0 B"), (999, "999 B"), (1500, "2 kB"), (4_100_000, "4.1 MB"), (2.28e9, "2.28 GB")])
def test_sizes_are_decimal_and_short(count: float, text: str) -> None:
    assert size(count).replace("\u2009", " ") == text


def test_a_label_is_short_and_readable() -> None:
    run = Run(log(), {"temp": 0.7000000001, "prompt": "x" * 100, "sample": 2})
    assert label_of(run, 0) == f"temp 0.7, prompt {'x' * 57}..., sample 2"


def test_the_cell_screen_sends_the_whole_bundle(shell: Shell) -> None:
    from mlxnb.routing import route_here

    generation = log()
    end(generation, "x")
    CellScreen(route_here(shell)).draw(Renderer(Run(generation)), True)  # type: ignore[arg-type]
    assert set(shell.messages()[0][2]["data"]) == {"text/plain", "text/html", RUN_MIME}
    assert INTERVAL_S >= 0.25
    assert Run(log()).request.sampling == SamplingSpec()
