"""Models of several kinds of layer as files on disk, through the whole engine: located, loaded, bound, run next to each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
import zoo
from mlx.utils import tree_flatten
from tiny import write_json, write_model

from mlxnb_engine.client import LocalClient
from mlxnb_engine.config import resolve
from mlxnb_engine.types import CompletionRequest, RequestId

KINDS = {"gemma3_text": "ragged", "lfm2": "ragged", "mamba2": "prefill alone", "deepseek_v3": "prefill alone", "gpt_bigcode": "lone"}
PROMPTS = ("the sea is wide", "one two three, name the colours of the rainbow in order: red orange yellow green blue", "a")


def write_zoo_model(path: Path, name: str) -> Path:
    """A directory as the hub would give it: the zoo's weights and config with the tiny tokenizer."""
    write_model(path)
    model, config = zoo.build(name, vocab_size=320)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    write_json(path / "config.json", config)
    return path


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LocalClient]]:
    folder = write_zoo_model(tmp_path_factory.mktemp(request.param) / "model", request.param)
    client = LocalClient(resolve(env={}, overrides={"blas": "none", "model": str(folder), "prefill_chunk": 16, "prefix_disk_bytes": 0}))
    yield request.param, client
    client.close()


def ask(client: LocalClient, names: list[str], prompts: tuple[str, ...], samples: int = 1) -> list[list[int]]:
    """Ids of each row, all requests submitted at once."""
    rows = []
    for name, text in zip(names, prompts, strict=True):
        rows += client.submit(CompletionRequest(RequestId(name), "", text=text, max_tokens=12, samples=samples))
    for row in rows:
        row.wait(60)
        row.raise_for_error()
    return [[t.id for e in row.read() for t in getattr(e, "tokens", ())] for row in rows]


def test_requests_next_to_each_other_are_answered_as_each_alone(kind: tuple[str, LocalClient]) -> None:
    _, client = kind
    alone = [ask(client, [f"alone {i}"], (prompt,))[0] for i, prompt in enumerate(PROMPTS)]
    assert ask(client, [f"together {i}" for i in range(3)], PROMPTS) == alone
    assert all(len(ids) > 0 for ids in alone)
    assert ask(client, ["samples"], PROMPTS[:1], samples=3) == [alone[0]] * 3


def test_the_status_says_how_its_rows_share_a_step(kind: tuple[str, LocalClient]) -> None:
    name, client = kind
    ask(client, ["any"], PROMPTS[:1])
    [model] = client.status()["models"]
    assert model["family"] and model["step_mode"] == KINDS[name]
