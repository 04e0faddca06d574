"""The real default model in the shared batch: exact on mkl-strict and on the reference BLAS, and sound on the fast BLAS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_rig import engine_of, finish, on_engine, token_ids

from mlxnb_engine import qualify
from mlxnb_engine.client import LocalClient
from mlxnb_engine.config import resolve
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, Message, RequestId, SamplingSpec

WORDS = "the sea is wide and old stories say that a small boat can cross it when the wind is kind to those who wait ".split()
LENGTHS = (5, 41, 190, 12, 33, 70, 7, 20)
SEEDED = SamplingSpec(temp=0.6, top_p=0.95, presence_penalty=0.2, repetition_penalty=1.05, seed=7)


@pytest.fixture(scope="module")
def client(blas_mode: str) -> Iterator[LocalClient]:
    client = LocalClient(resolve(overrides={"blas": blas_mode}))
    yield client
    client.close()


def story(words: int) -> str:
    return " ".join(WORDS[(i * i + words) % len(WORDS)] for i in range(words))


def send(client: LocalClient, words: int, tokens: int, sampling: SamplingSpec) -> Generation:
    return client.submit(CompletionRequest(RequestId(f"w{words}"), "", text=story(words), max_tokens=tokens, sampling=sampling))[0]


def ids_of(row: Generation) -> list[int]:
    return token_ids(row.read())


def alone(client: LocalClient, words: int, tokens: int, sampling: SamplingSpec) -> list[int]:
    row = send(client, words, tokens, sampling)
    finish([row])
    return ids_of(row)


@pytest.mark.modes("mkl-strict")
@pytest.mark.parametrize("sampling", [SamplingSpec(), SEEDED], ids=["greedy", "seeded"])
def test_a_row_of_a_ragged_batch_with_late_joins_gives_the_ids_it_gives_alone(client: LocalClient, sampling: SamplingSpec) -> None:
    solo = [alone(client, words, 6 + words % 4, sampling) for words in LENGTHS]
    rows = []
    for i, words in enumerate(LENGTHS):
        rows.append(send(client, words, 6 + words % 4, sampling))
        if i % 3 == 2:
            rows[i - 2].read(6, 20)  # the next ones join a batch that is already decoding
    finish(rows)
    assert [ids_of(row) for row in rows] == solo
    assert max(len(ids) for ids in solo) >= 6


@pytest.mark.modes("none")
def test_greedy_ids_of_the_real_model_equal_mlx_lm(client: LocalClient) -> None:
    rows = [send(client, words, 6, SamplingSpec()) for words in (5, 23)]
    finish(rows)

    def reference() -> list[list[int]]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        resident = engine_of(client)._lanes[0].resident
        assert resident is not None
        prompts = [resident.preparer.prepare(row.request).ids for row in rows]
        model = resident.group.graph.model
        return [[int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=6)] for ids in prompts]

    assert [ids_of(row) for row in rows] == on_engine(client, reference)


@pytest.mark.modes("mkl")
def test_the_fast_blas_is_sensitive_to_geometry_and_its_answers_are_still_right(client: LocalClient) -> None:
    questions = ["What is the capital of France?", "What is 2+2?"] * 4
    rows = [
        row
        for i, question in enumerate(questions)
        for row in client.submit(CompletionRequest(RequestId(f"q{i}"), "", (Message("user", question),), max_tokens=24))
    ]
    finish(rows)
    texts = [row.terminal.text for row in rows]  # type: ignore[union-attr]
    assert all("Paris" in text for text in texts[::2]), texts
    assert all("4" in text for text in texts[1::2]), texts


@pytest.mark.modes("mkl")
def test_plain_mkl_does_not_pass_for_exact_with_windows_of_one() -> None:
    verdict = qualify.strict_geometry([(576, 576), (1536, 576)], {64})
    assert verdict.geometry is None or verdict.geometry.width_multiple > 1, verdict.note
