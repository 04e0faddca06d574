"""Going on from a run's own tokens, and looking into one choice: the engine's side of branching and of the Stepper."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import write_model

from mlxnb.api import LanguageModel, load
from mlxnb.run import Run
from mlxnb_engine.client import LocalClient
from mlxnb_engine.config import resolve
from mlxnb_engine.errors import MlxnbError, RequestError

SAMPLED = {"temp": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3, "presence_penalty": 0.4, "seed": 11}


@pytest.fixture(scope="module")
def client(tiny_model: Path) -> Iterator[LocalClient]:
    client = LocalClient(resolve({}, {"blas": "none", "model": str(tiny_model), "prefix_disk_bytes": 0}))
    yield client
    client.close()


@pytest.fixture(scope="module")
def lm(client: LocalClient, tiny_model: Path) -> LanguageModel:
    return load(str(tiny_model), client=client)


def generate(lm: LanguageModel, **options: object) -> Run:
    run = lm.generate("Name the colours.", max_tokens=24, **{**SAMPLED, **options})  # type: ignore[arg-type]
    assert isinstance(run, Run)
    return run


def ids(run: Run) -> list[int]:
    return [token.id for token in run.tokens]


@pytest.mark.parametrize("at", [0, 1, 7, 23, 24])
def test_a_branch_with_the_runs_own_tokens_repeats_the_run(lm: LanguageModel, client: LocalClient, at: int) -> None:
    run = generate(lm)
    again = run.branch(at, client=client)
    again.wait()
    assert (ids(again), again.text, again.seed, again.finish_reason) == (ids(run), run.text, run.seed, run.finish_reason)
    assert again.usage["completion_tokens"] == 24 and again.usage.get("continued_tokens", 0) == at


def test_a_branch_from_a_chosen_token_keeps_what_came_before_and_marks_the_hand(lm: LanguageModel, client: LocalClient) -> None:
    run = generate(lm)
    other = next(i for i in range(40, 200) if i != ids(run)[9])
    branch = run.branch(9, other, client=client)
    branch.wait()
    assert ids(branch)[:10] == [*ids(run)[:9], other]
    assert [t.by_hand for t in branch.tokens] == [False] * 9 + [True] + [False] * (len(branch.tokens) - 10)
    assert branch.text == "".join(branch) and len(branch.tokens) == 24
    twice = branch.branch(12, client=client)
    twice.wait()
    assert ids(twice) == ids(branch) and twice.tokens[9].by_hand, "a branch of a branch forgot the hand"


def test_a_stop_string_ends_a_branch_where_it_ended_the_run(lm: LanguageModel, client: LocalClient) -> None:
    whole = generate(lm).text
    stop = whole[len(whole) // 2 :][:3]
    stopped = generate(lm, stop=[stop])
    assert stopped.finish_reason == "stop" and len(stopped.tokens) > 2
    for at in range(len(stopped.tokens)):
        branch = stopped.branch(at, client=client)
        branch.wait()
        assert (branch.text, branch.finish_reason) == (stopped.text, "stop"), f"branch at {at}"


@pytest.mark.parametrize("at, token", [(-1, None), (25, None), (True, None), (1.0, None), (3, -1), (3, "x")])
def test_an_impossible_branch_is_refused_before_any_work(lm: LanguageModel, client: LocalClient, at: object, token: object) -> None:
    with pytest.raises(RequestError):
        generate(lm).branch(at, token, client=client)  # type: ignore[arg-type]


def test_a_branch_to_an_id_outside_the_vocabulary_fails_alone(lm: LanguageModel, client: LocalClient) -> None:
    branch = generate(lm).branch(2, 100_000, client=client)
    branch.wait()
    with pytest.raises(MlxnbError, match="100000"):
        branch.raise_for_error()
    assert generate(lm).finish_reason == "length", "the engine did not survive"


def test_every_inspected_step_chooses_what_the_run_chose(lm: LanguageModel) -> None:
    run = generate(lm)
    for position in (0, 1, 5, 20):
        step = lm.inspect("Name the colours.", ids(run)[:position], candidates=45, **SAMPLED)  # type: ignore[arg-type]
        assert (step["position"], step["chosen"]) == (position, ids(run)[position])
        alive = [c for c in step["candidates"] if c["dropped_by"] is None]
        winner = max(alive, key=lambda c: c["scaled"] + c["noise"])
        assert winner["id"] == step["chosen"], "the largest of score plus noise must win"
        assert sum(c["probability"] for c in alive) == pytest.approx(1, abs=1e-3), "top-k 40 leaves at most 40 candidates"
        assert step["stages"] == ["score", "penalised", "logprob", "top_p", "top_k", "scaled", "probability", "noise"]
        assert step["vocab"] == 320 and step["coin"] is None
        assert step["left"]["top_k"] == len(alive) <= 40 and 0 < step["mass"]["top_k"] <= step["mass"]["top_p"] <= 1.0001
        best = step["candidates"][0]
        assert best["penalised"] - step["logsumexp"] == pytest.approx(best["logprob"], abs=1e-4)
        for candidate in step["candidates"]:
            if candidate["dropped_by"]:
                assert candidate[candidate["dropped_by"]] is None and candidate["probability"] == 0


def test_penalties_show_in_the_stage_after_them(lm: LanguageModel) -> None:
    window = list(range(40, 60))  # the penalty looks at the last 20 tokens: these, and none of the prompt
    step = lm.inspect("Name the colours.", window, candidates=50, repetition_penalty=2.0)
    listed = {c["id"] for c in step["candidates"]}
    changed = {c["id"] for c in step["candidates"] if c["score"] != c["penalised"]}
    assert len(changed) > 2 and changed == listed & set(window)
    assert step["stages"] == ["score", "penalised", "logprob"], "a greedy choice has no filters and no noise"


def test_the_coin_of_xtc_says_whether_it_struck(lm: LanguageModel) -> None:
    for seed in range(4):
        step = lm.inspect("Name the colours.", temp=1.0, xtc_probability=0.5, xtc_threshold=0.0, seed=seed, candidates=50)
        struck = any(c["dropped_by"] == "xtc" for c in step["candidates"])
        assert (step["coin"] <= 0.5) == struck


def test_settings_in_force_are_those_that_the_loaded_model_prefers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "opinionated", "llama")
    told = {"do_sample": True, "temperature": 0.6, "top_p": 0.25, "top_k": "many", "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(told))
    with contextlib.closing(LocalClient(resolve({}, {"blas": "none", "model": str(folder), "prefix_disk_bytes": 0}))) as own:
        lm = load(str(folder), client=own)
        request = lm.request("Hi", {"min_p": 0.1})
        lm.generate("Hi", max_tokens=1)
        assert own.status()["models"][0]["defaults"] == {"temp": 0.6, "top_p": 0.25}
        found = lm.in_force(request)
    assert (found["temp"], found["top_p"], found["top_k"], found["min_p"]) == (0.6, 0.25, 0, 0.1)


def test_the_status_says_who_sits_where_and_how_they_ended(lm: LanguageModel, client: LocalClient) -> None:
    def rows(name: str) -> list[dict[str, object]]:
        status = client.status()
        return status["ended"] if name == "ended" else status["models"][0][name]  # type: ignore[no-any-return]

    group = lm.generate("Count the boats of the harbour, all of them.", n=3, max_tokens=600, wait=False, logit_bias={317: -1e9, 319: -1e9})
    for run in group:  # type: ignore[union-attr]
        run.generation.read(6, 20)
    seen = []
    for _ in range(200):
        seen = rows("slots")
        if len(seen) == 3 and all(row["phase"] == "running" for row in seen):
            break
        time.sleep(0.02)
    assert sorted(str(row["slot"]) for row in seen) == ["0", "1", "2"] and {str(row["label"]) for row in seen} == {
        "Count the boats of the harbour, all of t"
    }
    assert all(int(str(row["kv_bytes"])) > 0 and int(str(row["tokens"])) > int(str(row["prompt_tokens"])) for row in seen)
    before = client.status()["models"][0]["tokens"]
    for run in group:  # type: ignore[union-attr]
        run.cancel()
        run.wait()
    for _ in range(200):
        if not rows("slots"):
            break
        time.sleep(0.02)
    ended = {row["id"]: row["how"] for row in rows("ended")}
    assert {ended[run.id] for run in group} == {"stopped"}  # type: ignore[union-attr]
    assert all(float(str(row["from"])) > 0 for row in seen)
    assert client.status()["models"][0]["tokens"] >= before > 0 and client.status()["memory"]["active_bytes"] > 0


def test_a_row_too_short_to_be_seen_at_work_says_when_it_was(lm: LanguageModel, client: LocalClient) -> None:
    began = time.monotonic()
    run = lm.generate("One.", max_tokens=1)
    over = time.monotonic()
    for _ in range(200):
        if found := [row for row in client.status()["ended"] if row["id"] == run.id]:  # type: ignore[union-attr]
            break
        time.sleep(0.02)
    (end,) = found
    assert (end["how"], end["label"]) == ("done", "One.") and began - 0.01 <= end["from"] <= end["to"] <= over + 0.01
