"""The default model for real: fetched by the kernel itself if it is not there yet, and one answer in JupyterLab on the fast BLAS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxnb_engine import fetch
from mlxnb_engine.config import resolve

from .lab import Lab

FETCH_S = 300.0


@pytest.mark.modes("mkl")
def test_the_default_model_answers_and_its_answer_opens_again(lab: Lab, blas_mode: str, figures: Callable[..., None]) -> None:
    settings = resolve()
    env = {"MLXNB_CACHE_DIR": str(settings.cache_dir), "MLXNB_BLAS": blas_mode}
    kernel = lab.server.kernel("default-model", "Default model", env)
    notebook = lab.new(["%%mlx --max-tokens 48 --seed 1\nWhat is the capital of France?", "%mlx status"], kernel, "%load_ext mlxnb")
    notebook.start(0)
    notebook.wait_text(0, "Paris", FETCH_S)
    notebook.wait_end(0)
    record = notebook.record(0)
    assert record is not None and record["status"] == "done" and record["usage"]["completion_tokens"] > 3
    assert record["model"] == fetch.EMBEDDED_NAME and fetch.default_model_path(settings).stat().st_size == fetch.DEFAULT.size
    tokens = notebook.call("print(''.join(token.text for token in _mlx.tokens) == _mlx.text, _mlx.usage['completion_tokens'])").split()
    assert tokens == ["True", str(record["usage"]["completion_tokens"])]
    notebook.run(1)
    notebook.wait_text(1, blas_mode)
    lab.shot("default-model", notebook.output(0))
    figures("the default model in JupyterLab", timing=record["timing"], tokens=record["usage"]["completion_tokens"])
    again = notebook.reopened()
    again.wait_text(0, "Paris")
