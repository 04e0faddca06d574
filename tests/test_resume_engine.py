"""Stopped answers and killed kernels over the real engine: the same text, tokens, counts; records that come and go (G74, 9.4)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_rig import NO_EOS, WAIT_S, ask, client_of, finish, on_engine, settle
from IPython.core.interactiveshell import InteractiveShell
from test_magic import refused, shell  # noqa: F401 (a fixture)
from test_magic import run as run_cell

from mlxnb import resuming, runtime
from mlxnb.run import Run
from mlxnb_engine import events as ev
from mlxnb_engine import resume, upkeep
from mlxnb_engine.client import LocalClient
from mlxnb_engine.errors import Cancelled, CapacityExceeded, ModelError, RequestError
from mlxnb_engine.methods import checkpoints
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, TokenId

PROMPT = "Name the colours of the rainbow in order, and then those of the sea at night when the wind is still, all of them. "
TOKENS = 160
SAMPLED: dict[str, Any] = {"temp": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.4, "logprobs": 2}
HERE = Path(__file__).resolve().parent


@pytest.fixture
def client(tiny_model: Path, tmp_path: Path) -> Iterator[LocalClient]:
    made = client_of(tiny_model, tmp_path / "cache")
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    """An engine that keeps nothing, for runs that nobody interrupts."""
    made = client_of(tiny_model, tmp_path_factory.mktemp("plain"), prefix_cache_bytes=0)
    yield made
    made.close()


def request_of(**changes: Any) -> CompletionRequest:
    return ask(PROMPT, TOKENS, **{**SAMPLED, **changes})


def stop_after(client: LocalClient, request: CompletionRequest, tokens: int, index: int = 0) -> Run:
    """A run that is stopped once it has so many tokens; it must not be over by then."""
    run = Run(client.submit(request)[index])
    while len(run.tokens) < tokens:
        assert not run.done, run
        time.sleep(0.001)
    run.cancel()
    assert run.wait(WAIT_S) and run.finish_reason == "cancelled", run
    return run


def facts(run: Run) -> dict[str, Any]:
    """All that a run says but times, and how it was computed."""
    usage = {name: value for name, value in run.usage.items() if name not in ("timing", "resumed")}
    tokens = [(t.id, t.text, t.origin, t.logprob, t.rank, t.top, t.by_hand) for t in run.tokens]
    return {"text": run.text, "tokens": tokens, "usage": usage, "reason": run.finish_reason, "seed": run.seed, "prompt": run.prompt}


def whole(plain: LocalClient, request: CompletionRequest, seed: int | None) -> Run:
    run = Run(plain.submit(replace(request, samples=1, sampling=replace(request.sampling, seed=seed)))[0])
    finish([run.generation])
    return run


def begins_with(rest: Run, stopped: Run) -> bool:
    return [t.id for t in rest.tokens][: len(stopped.tokens)] == [t.id for t in stopped.tokens]


def records(cache: Path) -> list[Path]:
    return list((cache / "prefix" / "resume").glob("*.run"))


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("after", [1, 70])
def test_a_stopped_answer_goes_on_to_what_it_would_have_been(
    client: LocalClient, plain: LocalClient, tmp_path: Path, seed: int | None, after: int
) -> None:
    stopped = stop_after(client, request_of(seed=seed), after)
    settle(client)
    rest = stopped.resume(client=client)
    assert rest.wait(WAIT_S)
    assert facts(rest) == facts(whole(plain, stopped.request, stopped.seed))
    assert begins_with(rest, stopped) and rest.generation.read()[-1].kind == "finished"
    assert rest.to_dict()["seed"]["explicit"] is (seed is not None), "a seed that was drawn was taken for one that was asked for"
    resumed = rest.usage["resumed"]
    assert len(stopped.tokens) <= resumed["tokens"] <= len(stopped.tokens) + 1
    assert resumed["cached_tokens"] == rest.usage["prompt_tokens"] + resumed["tokens"] - 1, "something was computed twice"
    client.close()
    assert records(tmp_path / "cache") == [], "a complete run left its record"


def test_an_answer_may_be_stopped_and_resumed_again_and_again(client: LocalClient, plain: LocalClient) -> None:
    request = request_of()
    run = stop_after(client, request, 10)
    for tokens in (11, 50, 51, 120):
        again = run.resume(client=client)
        while len(again.tokens) < tokens:
            time.sleep(0.001)
        again.cancel()
        assert again.wait(WAIT_S) and again.finish_reason == "cancelled" and again.seed == run.seed
        run = again
    rest = run.resume(client=client)
    assert rest.wait(WAIT_S) and facts(rest) == facts(whole(plain, request, run.seed))


def test_samples_are_resumed_each_with_its_own_seed_beside_others(client: LocalClient, plain: LocalClient) -> None:
    request = request_of(seed=9, samples=4)
    runs = [Run(generation) for generation in client.submit(request)]
    while any(len(run.tokens) < 20 for run in runs):
        time.sleep(0.001)
    for run in runs[1:]:
        run.cancel()
    assert all(run.wait(WAIT_S) for run in runs[1:])
    rests = [run.resume(client=client) for run in runs[1:]]
    for i, run in enumerate([runs[0], *rests]):
        assert run.wait(WAIT_S)
        assert facts(run) == facts(whole(plain, request, 9 + i)), f"sample {i}"


def test_stop_strings_limits_and_ends_of_text_are_met_where_the_whole_answer_meets_them(client: LocalClient, plain: LocalClient) -> None:
    text = whole(plain, replace(request_of(seed=3), max_tokens=TOKENS // 3), 3).text
    changes: tuple[dict[str, Any], ...] = ({"stop": (text[-9:-6],)}, {}, {"endless": False, "temp": 0.0})
    for change in changes:
        request = replace(request_of(seed=3, **change), max_tokens=TOKENS // 3)
        want = whole(plain, request, 3)
        for after in sorted({0, len(want.tokens) // 2, max(0, len(want.tokens) - 2)}):
            generation = client.submit(request)[0]
            run = Run(generation)
            while len(run.tokens) < after and not run.done:
                time.sleep(0.0005)
            run.cancel()
            assert run.wait(WAIT_S)
            rest = run.resume(client=client) if run.resumable else run
            assert rest.wait(WAIT_S)
            got, wanted = facts(rest), facts(want)
            for one in (got, wanted):  # an earlier round has left its prompt in the cache
                one["usage"].pop("prompt_tokens_details")
            assert got == wanted, (change, after)


def test_a_run_that_had_not_begun_is_asked_again(client: LocalClient, plain: LocalClient) -> None:
    generations = client.submit(request_of(seed=2))
    generations[0].cancel()
    run = Run(generations[0])
    assert run.wait(WAIT_S)
    rest = run.resume(client=client)
    assert rest.wait(WAIT_S) and facts(rest) == facts(whole(plain, run.request, 2))


@pytest.mark.parametrize("reason", ["alive", "complete", "failed", "twice"])
def test_what_cannot_be_resumed_says_why(client: LocalClient, reason: str) -> None:
    if reason == "failed":
        run = Run(client.submit(ask(PROMPT, 5, logit_bias=((10**6, 1.0),), endless=False))[0])
        run.wait(WAIT_S)
    elif reason == "twice":
        run = stop_after(client, request_of(), 3)
        run.resume(client=client)
    else:
        run = Run(client.submit(ask(PROMPT, 3 if reason == "complete" else 2000))[0])
        if reason == "complete":
            run.wait(WAIT_S)
    words = {"alive": "still at work", "complete": "is complete", "failed": "failed", "twice": "resumed already"}[reason]
    with pytest.raises(RequestError, match=words):
        run.resume(client=client)


def test_another_policy_is_an_error_and_never_another_answer(client: LocalClient, tiny_model: Path, tmp_path: Path) -> None:
    stopped = stop_after(client, request_of(seed=4), 20)
    settle(client)
    ticket = stopped.generation.ticket
    assert ticket is not None
    rest = replace(stopped.request, resumed=ticket, continuation=resume.continued(stopped.tokens))
    sampling = rest.sampling
    changes: dict[str, CompletionRequest] = {
        "max_tokens": replace(rest, max_tokens=TOKENS + 1),
        "stop strings": replace(rest, stop=("x",)),
        "sampling": replace(rest, sampling=replace(sampling, temp=0.8)),
        "the prompt": replace(rest, resumed=replace(ticket, prompt=(*ticket.prompt[:-1], TokenId(7)))),
        "the seed": replace(rest, resumed=replace(ticket, seed=5)),
    }
    for what, request in changes.items():
        (row,) = client.submit(replace(request, id=runtime.new_request_id()))
        assert row.wait(WAIT_S) is not None
        with pytest.raises(RequestError, match=what):
            row.raise_for_error()
    for what, settings in {"context limit": {"context_limit": 900}, "the model": {"dtype": "bfloat16"}}.items():
        with contextlib.closing(client_of(tiny_model, tmp_path / what, **settings)) as other:
            (row,) = other.submit(replace(rest, id=runtime.new_request_id()))
            assert row.wait(WAIT_S) is not None
            with pytest.raises(RequestError, match=what):
                row.raise_for_error()
    with contextlib.closing(client_of(tiny_model, tmp_path / "elsewhere", context_limit=900)) as other:
        refused_rest = stopped.resume(client=other)
        assert refused_rest.wait(WAIT_S) and refused_rest.finish_reason == "error" and stopped.resumable
    again = stopped.resume(client=client)
    assert again.wait(WAIT_S) and again.finish_reason == "length", "the right policy was refused too"


def test_the_state_of_many_stopped_runs_is_bounded(client: LocalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MOST_KEPT", 3)
    monkeypatch.setattr(resume, "MOST_STATE_BYTES", 1)
    runs = [stop_after(client, request_of(seed=i), 3) for i in range(5)]
    settle(client)

    def kept() -> list[Any]:
        return [one.left for one in client._engine._resumes._stopped.values()]  # type: ignore[union-attr]

    assert on_engine(client, kept) == [None] * 3
    rests = [run.resume(client=client) for run in runs]
    assert all(rest.wait(WAIT_S) and rest.finish_reason == "length" for rest in rests)
    settle(client)
    assert on_engine(client, kept) == []


def test_a_branch_of_a_resumed_run_is_a_run_of_its_own_and_reuses_what_is_before_it(client: LocalClient) -> None:
    stopped = stop_after(client, request_of(seed=6), 110)
    rest = stopped.resume(client=client)
    assert rest.wait(WAIT_S)
    settle(client)
    at = 100
    branch = rest.branch(at, client=client)
    assert branch.wait(WAIT_S) and [t.id for t in branch.tokens] == [t.id for t in rest.tokens]
    assert "resumed" not in branch.usage and branch.usage["continued_tokens"] == at
    assert [t.logprob for t in branch.tokens] == [t.logprob for t in rest.tokens], "a branch forgot what was captured before it"
    before = on_engine(client, lambda: client._engine._lanes[0].resident.group.read_tokens)  # type: ignore[union-attr]
    other = rest.branch(at, next(i for i in range(40, 99) if i != rest.tokens[at].id), client=client)
    assert other.wait(WAIT_S)
    read = on_engine(client, lambda: client._engine._lanes[0].resident.group.read_tokens) - before  # type: ignore[union-attr]
    assert read <= 1, f"{read} tokens before the branch were computed again"


# -- another kernel ----------------------------------------------------------------------------------------------------------


def killed(tiny_model: Path, cache: Path, *seed: str) -> None:
    """A kernel that dies by SIGKILL in the middle of an answer that it has noted; while it lives nobody else may resume it."""
    command = [sys.executable, str(HERE / "resume_child.py"), str(tiny_model), str(cache), PROMPT, "800", *seed]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        said = child.stdout.readline().strip()
        assert said == "noted", said
        assert resume.interrupted(settings(tiny_model, cache)) == []
        time.sleep(0.1)
    finally:
        child.kill()
        child.wait()


def settings(model: Path, cache: Path, **changes: Any) -> Any:
    from mlxnb_engine import config

    return config.resolve({}, {"blas": "none", "model": str(model), "cache_dir": cache, "offline": True, **changes})


@pytest.mark.parametrize("seed", [("8",), ()])
def test_an_answer_of_a_killed_kernel_goes_on_in_another_one(
    tiny_model: Path, tmp_path: Path, plain: LocalClient, seed: tuple[str, ...]
) -> None:
    cache = tmp_path / "cache"
    killed(tiny_model, cache, *seed)
    (found,) = resume.interrupted(settings(tiny_model, cache))
    assert found.tokens > 0 and found.request.text == PROMPT
    for limit, words, kind in (("context_limit", "context limit", RequestError), ("max_kv_bytes", "max_kv_bytes", CapacityExceeded)):
        with contextlib.closing(client_of(tiny_model, cache, **{limit: 2000})) as other:
            (row,) = other.submit(replace(found.request, id=runtime.new_request_id()))
            assert row.wait(WAIT_S) is not None
            with pytest.raises(kind, match=words):
                row.raise_for_error()
            time.sleep(0.1)
            assert [one.key for one in resume.interrupted(settings(tiny_model, cache))] == [found.key], "a refusal cost the record"
    with contextlib.closing(client_of(tiny_model, cache, max_rows=2)) as later:
        rest = Run(later.submit(replace(found.request, id=runtime.new_request_id()))[0])
        assert rest.wait(4 * WAIT_S)
        assert rest.finish_reason == "length", rest.error
        assert resume.interrupted(settings(tiny_model, cache)) == []
    asked = ask(PROMPT, 800, temp=0.9, presence_penalty=0.4, logprobs=2)
    assert facts(rest) == facts(whole(plain, asked, rest.seed))
    assert rest.to_dict()["seed"]["explicit"] is bool(seed) and records(cache) == []


def test_a_record_whose_rest_failed_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    record = resume.Interrupted("f" * 32, "m", 5, 3, ask(PROMPT, 5))
    on_disk = [record]
    monkeypatch.setattr(resuming, "_taken", {})
    monkeypatch.setattr(resume, "interrupted", lambda config: on_disk)
    generation = Generation(record.request, 0, time.monotonic)

    class Client:
        def submit(self, request: CompletionRequest) -> list[Generation]:
            on_disk.clear()  # its record is this kernel's now
            return [generation]

    (offered,) = resuming.interrupted()
    offered.resume(Client())  # type: ignore[arg-type]
    assert resuming.interrupted() == []
    generation.fail(ModelError("a step failed"))
    assert [one.key for one in resuming.interrupted()] == [record.key]


def test_a_late_refusal_leaves_those_before_it_to_be_resumed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [resume.Interrupted(letter * 32, "m", 5, 3, ask(PROMPT, 5)) for letter in "ab"]
    monkeypatch.setattr(resuming, "_taken", {})
    monkeypatch.setattr(resume, "interrupted", lambda config: records)
    stopped = Run(Generation(ask(PROMPT, 5), 0, time.monotonic))
    stopped.generation.emit(lambda seq, t: ev.Cancelled(seq, t, "", {}))
    told: list[Run] = []
    stopped.on_resume = told.append
    made: list[Generation] = []

    class Client:
        room = 2

        def submit(self, request: CompletionRequest) -> list[Generation]:
            if len(made) == self.room:
                raise RequestError("Full.", "Wait.")
            made.append(Generation(request, 0, time.monotonic))
            return made[-1:]

    found = resuming.interrupted([stopped])
    assert len(found) == 3
    with pytest.raises(RequestError, match="Full"):
        resuming.resume_all(found, Client())  # type: ignore[arg-type]
    assert all(one.cancel_requested for one in made) and stopped.resumable
    assert [one.key for one in resuming.interrupted([stopped])] == [one.key for one in found]
    Client.room = 9
    assert len(resuming.resume_all(found, Client())) == 3 and len(told) == 2  # type: ignore[arg-type]
    assert resuming.interrupted([stopped]) == []


def test_clearing_the_cache_forgets_what_was_asked(tiny_model: Path, tmp_path: Path) -> None:
    killed(tiny_model, tmp_path / "cache")
    assert len(resume.interrupted(settings(tiny_model, tmp_path / "cache"))) == 1
    upkeep.clear(settings(tiny_model, tmp_path / "cache"))
    assert records(tmp_path / "cache") == []


def test_without_files_of_the_prefix_cache_no_record_is_written(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "EVERY_S", 0.0)
    for change in ({"prefix_disk_bytes": 0}, {"prefix_cache_bytes": 0}):
        cache = tmp_path / next(iter(change))
        with contextlib.closing(client_of(tiny_model, cache, **change)) as client:
            rest = stop_after(client, request_of(), 40).resume(client=client)
            assert rest.wait(WAIT_S) and rest.finish_reason == "length"
        assert not (cache / "prefix").exists(), change


# -- in a notebook -----------------------------------------------------------------------------------------------------------

CELL = f"%%mlx --max-tokens 160 --temp 0.9 --logit-bias '{json.dumps({str(i): b for i, b in NO_EOS})}'"


class StopsSoon:
    """An engine's client that stops the next answer once it has some tokens, as a stop button would."""

    def __init__(self, client: LocalClient, tokens: int = 30) -> None:
        self._client, self._tokens, self.armed = client, tokens, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit(self, request: CompletionRequest) -> Any:
        generations = self._client.submit(request)
        if self.armed:
            for run in map(Run, generations):
                while len(run.tokens) < self._tokens:
                    time.sleep(0.001)
                run.cancel()
        return generations


@pytest.fixture
def stopping(shell: InteractiveShell, client: LocalClient) -> StopsSoon:  # noqa: F811
    made = StopsSoon(client)
    runtime.use(lambda config: made)  # type: ignore[arg-type, return-value]
    runtime.override({"cache_dir": str(client.config.cache_dir), "prefix_disk_dir": str(client.config.prefix_dir)})
    return made


@pytest.fixture(autouse=True)
def settings_back() -> Iterator[None]:
    yield
    runtime.override({"cache_dir": None, "prefix_disk_dir": None})


def test_a_stopped_cell_is_resumed_by_the_line_magic(
    shell: InteractiveShell, stopping: StopsSoon, plain: LocalClient, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    run_cell(shell, "%mlx resume")
    assert "Nothing was interrupted" in capsys.readouterr().out
    refused(shell, f"{CELL}\n{PROMPT}", Cancelled)
    stopped: Run = shell.user_ns["_mlx"]
    stopping.armed = False
    rest = run_cell(shell, "%mlx resume")
    assert rest is not stopped and rest.done and stopped.resumed_by is rest
    assert (rest.finish_reason, begins_with(rest, stopped)) == ("length", True)
    asked = replace(stopped.request, sampling=replace(stopped.request.sampling, seed=stopped.seed))
    assert rest.text == whole(plain, asked, stopped.seed).text
    capsys.readouterr()
    run_cell(shell, "%mlx resume")
    assert "Nothing was interrupted" in capsys.readouterr().out


def test_several_stopped_answers_are_listed_and_resumed_by_name(
    shell: InteractiveShell, stopping: StopsSoon, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    refused(shell, f"{CELL} -n 2\n{PROMPT}", Cancelled)
    group = shell.user_ns["_mlx"]
    refused(shell, f"{CELL}\nAnother question about the sea", Cancelled)
    single: Run = shell.user_ns["_mlx"]
    stopping.armed = False
    capsys.readouterr()
    run_cell(shell, "%mlx resume")
    shown = capsys.readouterr().out
    assert all(name in shown for name in (group[0].id, group[1].id, single.request.id, "Another question", "this kernel"))
    error = refused(shell, "%mlx resume nothing")
    assert single.request.id in error.hint
    rests = run_cell(shell, f"%mlx resume {group[0].request.id}")
    assert len(rests) == 2 and all(rest.finish_reason == "length" for rest in rests)
    assert begins_with(run_cell(shell, "%mlx resume"), single)


def test_a_stopped_turn_of_a_chat_gets_its_whole_answer(shell: InteractiveShell, stopping: StopsSoon) -> None:  # noqa: F811
    from mlxnb.chatnames import CHATS

    refused(shell, f"{CELL} -c tale\n{PROMPT}", Cancelled)
    assert not CHATS.find("tale").turns
    stopping.armed = False
    rest = run_cell(shell, "%mlx resume")
    (turn,) = CHATS.find("tale").turns
    assert turn.answer == rest.answer and turn.finish == "length"


def test_a_fresh_kernel_lists_and_resumes_what_a_killed_one_left(
    shell: InteractiveShell, stopping: StopsSoon, client: LocalClient, tiny_model: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    stopping.armed = False
    killed(tiny_model, client.config.cache_dir, "8")
    refused(shell, "%mlx resume zzzz")
    capsys.readouterr()
    found = resume.interrupted(client.config)
    rest = run_cell(shell, f"%mlx resume {found[0].key[:8]}")
    assert rest.finish_reason == "length" and rest.token_count == 800 and rest.seed == 8 and rest.prompt == PROMPT
    run_cell(shell, "%mlx resume")
    assert "Nothing was interrupted" in capsys.readouterr().out
