"""The prefix cache through the whole engine: usage, events, status, settings, unloading, and models that keep nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rig import answer_ids, ask, client_of, engine_of, finish, on_engine, residents, settle
from test_zoo_engine import write_zoo_model
from tiny import write_model

from mlxnb import describe
from mlxnb_engine import config
from mlxnb_engine import events as ev
from mlxnb_engine.cache.blocks import T
from mlxnb_engine.client import LocalClient
from mlxnb_engine.types import CompletionRequest, Message, RequestId, SamplingSpec

TEXT = "the sea is wide and the night is still; " * 6


@pytest.fixture
def client(tiny_model: Path, tmp_path: Path) -> Iterator[LocalClient]:
    made = client_of(tiny_model, tmp_path, prefix_disk_bytes=0)
    yield made
    if made._engine is not None and made._engine.alive:
        settle(made)
        on_engine(made, lambda: engine_of(made).shared.cache.check())
    made.close()


def served(client: LocalClient, text: str, tokens: int = 8, **fields: Any) -> list[ev.Event]:
    (log,) = finish(client.submit(ask(text, tokens, **fields)))
    assert isinstance(log[-1], ev.Finished), log[-1]
    return log


def cached(log: list[ev.Event]) -> int:
    usage: dict[str, Any] = log[-1].usage  # type: ignore[attr-defined]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_usage_and_events_say_what_came_from_the_cache(client: LocalClient) -> None:
    first, second = served(client, TEXT), served(client, TEXT + "and?")
    length = next(e.prompt_tokens for e in second if isinstance(e, ev.Started))
    assert cached(first) == 0 and T <= cached(second) < length
    (started,) = [e for e in second if isinstance(e, ev.Started)]
    assert (started.cached_tokens, started.ssd_tokens) == (cached(second), 0)
    progress = [e for e in second if isinstance(e, ev.PrefillProgress)]
    assert {e.cached_tokens for e in progress} == {cached(second)} and progress[0].done > cached(second)
    assert second[-1].usage["prompt_tokens"] == length  # type: ignore[attr-defined]  # unchanged by reuse
    assert first[-1].usage["completion_tokens"] == second[-1].usage["completion_tokens"]  # type: ignore[attr-defined]


def test_every_sample_reports_what_their_one_prefill_took(client: LocalClient) -> None:
    served(client, TEXT)
    logs = finish(client.submit(ask(TEXT, 5, samples=4, temp=1.0, seed=3)))
    assert {cached(log) for log in logs} == {cached(logs[0])} and cached(logs[0]) >= T


def test_the_same_request_answers_the_same_with_and_without_the_cache(tiny_model: Path, tmp_path: Path, client: LocalClient) -> None:
    off = client_of(tiny_model, tmp_path, prefix_cache_bytes=0)
    for text in (TEXT, TEXT + "x", TEXT[:150], TEXT):
        how = {"temp": 0.9, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.1}
        assert answer_ids(client, ask(text, 40, **how)) == answer_ids(off, ask(text, 40, **how))
    status = off.status()
    assert status["cache"] is None and status["models"][0]["reuse"] == "nothing: the prefix cache is off"
    off.close()


def test_a_chat_takes_up_its_last_turn_where_the_template_keeps_it(client: LocalClient) -> None:
    def turn(*contents: str) -> list[ev.Event]:
        roles = ("user", "assistant") * len(contents)
        messages = tuple(Message(role, text) for role, text in zip(roles, contents, strict=False))  # type: ignore[arg-type]
        sampling = SamplingSpec(logit_bias=((256, -100.0), (257, -100.0)))
        (log,) = finish(client.submit(CompletionRequest(RequestId(f"c{len(contents)}"), "", messages, max_tokens=6, sampling=sampling)))
        return log

    first = turn(TEXT)
    said = first[-1].text  # type: ignore[attr-defined]
    second = turn(TEXT, said, "go on")
    length = next(e.prompt_tokens for e in first if isinstance(e, ev.Started))
    assert cached(second) >= length - 1, "the whole first prompt is reused"


def test_a_continued_run_counts_no_token_of_its_answer_as_prompt(client: LocalClient) -> None:
    log = served(client, TEXT, 80)
    tokens = [t for e in log if isinstance(e, ev.Tokens) for t in e.tokens]
    from mlxnb_engine.types import Continued

    again = served(client, TEXT, 90, continuation=tuple(Continued(t.id) for t in tokens))
    usage = again[-1].usage  # type: ignore[attr-defined]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


def test_rows_in_the_status_say_what_was_cached(client: LocalClient) -> None:
    served(client, TEXT)
    (row,) = client.submit(ask(TEXT, 2000))
    row.read(6, 60.0)

    def slots() -> Any:
        residents(client)[0]._detailed_at = 0.0
        residents(client)[0].note()
        return residents(client)[0].describe()["slots"]

    (slot,) = on_engine(client, slots)
    assert slot["phase"] == "running" and T <= slot["cached_tokens"] < slot["prompt_tokens"]
    row.cancel()
    finish([row])


def test_the_status_has_the_figures_of_the_cache_and_the_budget_is_the_setting(tiny_model: Path, tmp_path: Path) -> None:
    client = client_of(tiny_model, tmp_path, prefix_cache_bytes="3MiB", prefix_disk_bytes=0)
    served(client, TEXT)
    served(client, TEXT)
    stats = client.status()["cache"]
    assert stats["budget_bytes"] == 3 * 2**20 and 0 < stats["used_bytes"] <= 3 * 2**20
    assert (stats["hits"], stats["misses"], stats["leases"]) == (1, 1, 0)
    (space,) = stats["namespaces"].values()
    assert space["blocks"] >= 1 and space["bytes"] == stats["used_bytes"]
    client.close()


@pytest.mark.parametrize(("free", "want"), [(2**30, 2**27), (2**40, 4 * 2**30), (-5, 0)])
def test_the_default_budget_is_an_eighth_of_what_is_left_and_at_most_4_gib(free: int, want: int) -> None:
    assert config.resolve({}, {}).prefix_cache_for(free) == want
    assert config.resolve({"MLXNB_PREFIX_CACHE_BYTES": "7GiB"}, {}).prefix_cache_for(free) == 7 * 2**30
    assert config.resolve({"MLXNB_PREFIX_CACHE_BYTES": "0"}, {}).prefix_cache_for(free) == 0
    assert config.resolve({}, {"prefix_cache_bytes": 0}).prefix_cache_for(free) == 0


def test_an_unloaded_model_finds_its_prefixes_when_it_comes_back_and_another_does_not(tiny_model: Path, tmp_path: Path) -> None:
    """G73: other weights, other namespace, same ids."""
    other = write_model(tmp_path / "other", "llama", seed=99)
    client = client_of(tiny_model, tmp_path, prefix_disk_bytes=0, resident_models=2)
    served(client, TEXT)
    assert cached(served(client, TEXT, model=str(other))) == 0
    client.unload()
    assert client.status()["models"] == []
    assert cached(served(client, TEXT)) >= T and cached(served(client, TEXT, model=str(other))) >= T
    assert len(client.status()["cache"]["namespaces"]) == 2
    client.close()


def test_a_closed_engine_leaves_no_array_and_no_lease(tiny_model: Path, tmp_path: Path) -> None:
    client = client_of(tiny_model, tmp_path, prefix_disk_bytes=0)
    served(client, TEXT)
    cache = engine_of(client).shared.cache
    client.close()
    stats = cache.stats()
    assert (stats["used_bytes"], stats["leases"], stats["namespaces"]) == (0, 0, {})


def test_a_model_whose_rows_run_alone_says_that_it_keeps_nothing(tmp_path: Path) -> None:
    client = client_of(write_zoo_model(tmp_path / "lone", "gpt_bigcode"), tmp_path, prefix_disk_bytes=0)
    first, again = served(client, TEXT), served(client, TEXT)
    assert cached(first) == cached(again) == 0
    (model,) = client.status()["models"]
    why = "nothing: each of its rows runs alone, in caches that are not cut into blocks"
    assert model["step_mode"] == "lone" and model["reuse"] == why
    assert describe.kept_lines([model, {"reuse": "any prefix"}]) == [f"kept     {model['name']}: {why}"]
    client.close()


def test_state_of_another_backend_is_in_another_namespace() -> None:
    from mlxnb_engine.binding import Backend
    from mlxnb_engine.blas import BlasChoice

    choices = [
        BlasChoice("reference", geometry_invariant=True),
        BlasChoice("mkl", "/a"),
        BlasChoice("mkl", "/a", strict=True, cbwr_branch="AVX2"),
        BlasChoice("mkl", "/a", strict=True, cbwr_branch="AVX512"),
        BlasChoice("openblas", "/a"),
    ]
    backends = [Backend("cpu", "1", choice, "after") for choice in choices]
    backends += [Backend("cpu", "2", choices[0], "after")]
    backends += [Backend(device, "1", choices[0], "after") for device in ("cuda", "metal")]
    assert len({b.numerics for b in backends}) == len(backends)
    assert [b.exact for b in backends] == [True, False, True, True, False, True, False, False]
    same = Backend("cpu", "1", BlasChoice("mkl", "/elsewhere", note="a word"), "before")
    assert same.numerics == backends[1].numerics, "a path or an order of submission decides no bits"
