"""From a name to a model in memory: the same model whatever it is stored as, and one clear sentence for whatever cannot be loaded."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten

from mlxnb_engine import ggml, hub, loader, zoo
from mlxnb_engine.config import RuntimeConfig, resolve
from mlxnb_engine.errors import Cancelled, MlxnbError, ModelError, RequestError
from mlxnb_engine.loader import Loaded, Located, list_local_models, load, locate

IDS = [318, 72, 105, 10, 256, 260, 33, 7]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RuntimeConfig:
    """Own cache folders, so that nothing of this machine is seen."""
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path / "hub")
    return resolve(env={}, overrides={"cache_dir": tmp_path / "cache"})


def find(name: str | Path | None, config: RuntimeConfig) -> Located:
    return locate(None if name is None else str(name), config, lambda *step: None, lambda: False)


def loaded(name: str | Path, config: RuntimeConfig, dtype: str | None = None) -> Loaded:
    return load(find(name, config), config, dtype)


def logits(model: Loaded) -> np.ndarray:
    return np.array(model.model(mx.array([IDS]))[0].astype(mx.float32))


# -- the same model whatever it is stored as -----------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_folder_gives_the_scores_that_mlx_lm_gives(tmp_path: Path, config: RuntimeConfig, family: str) -> None:
    from mlx_lm.utils import load_model

    path = tiny.write_model(tmp_path / "m", family)
    ours = loaded(path, config)
    theirs, _ = load_model(path)
    assert np.array_equal(logits(ours), np.array(theirs(mx.array([IDS]))[0]))
    info = ours.info
    assert (info.source, info.family, info.weights, info.layers, info.vocab_size) == ("directory", family, "float32", 2, tiny.VOCAB)
    assert info.parameters == sum(array.size for array in tiny.weights_of(tiny.config_of(family)).values())
    assert info.weight_bytes == 4 * info.parameters and info.context_length == 4096 and info.has_template
    assert info.defaults["eos_token_id"] == [tiny.IM_END, tiny.EOS]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_gives_the_scores_of_the_same_weights_in_a_folder(tmp_path: Path, config: RuntimeConfig, family: str, tied: bool) -> None:
    settings = {"tie_word_embeddings": tied, "rope_theta": 5e5}
    folder = loaded(tiny.write_model(tmp_path / "m", family, **settings), config)
    single = loaded(tiny.write_gguf(tmp_path / "m.gguf", family, **settings), config)
    assert np.abs(logits(folder) - logits(single)).max() < 1e-4
    assert single.info.weights == "float32" and single.info.source == "gguf"
    assert single.info.parameters == folder.info.parameters
    text = "What is the capital of france?"
    assert single.tokenizer.encode(text) == folder.tokenizer.encode(text)
    assert single.tokenizer.chat_template == folder.tokenizer.chat_template == tiny.CHATML
    assert single.template is not None and single.template.source == tiny.CHATML


def test_rows_of_q_and_k_that_are_not_reordered_give_other_scores(
    tmp_path: Path, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    folder = loaded(tiny.write_model(tmp_path / "m"), config)
    monkeypatch.setattr(tiny, "interleave_rope", lambda rows, heads: rows)
    assert np.abs(logits(folder) - logits(loaded(tiny.write_gguf(tmp_path / "m.gguf"), config))).max() > 0.01


def test_llama3_divisors_in_a_gguf_scale_positions_as_the_folder_does(tmp_path: Path, config: RuntimeConfig) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    folder = loaded(tiny.write_model(tmp_path / "m", rope_scaling=scaling), config)
    divisors = []
    for i in range(8):
        wavelength = 2 * math.pi * 10_000.0 ** (i / 8)
        smooth = min(max((2048 / wavelength - 1) / 3, 0), 1)
        divisors.append(1 / ((1 - smooth) / 8 + smooth))
    single = loaded(tiny.write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.array(divisors, np.float32)}), config)
    plain = loaded(tiny.write_gguf(tmp_path / "p.gguf"), config)
    assert np.abs(logits(folder) - logits(single)).max() < 1e-4
    assert np.abs(logits(folder) - logits(plain)).max() > 1e-4


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_give_the_same_scores_unpacked_and_packed(tmp_path: Path, config: RuntimeConfig, kind: str) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", kind=kind, embedding_kind="Q8_0")
    dense, packed = loaded(path, config), loaded(path, config, "file")
    assert (dense.info.weights, packed.info.weights) == (f"float32 (from {kind})", kind)
    assert np.abs(logits(dense) - logits(packed)).max() < 1e-4
    assert packed.info.weight_bytes < dense.info.weight_bytes / 2
    assert packed.info.parameters == dense.info.parameters
    layer = packed.model.model.layers[0].mlp.up_proj
    assert isinstance(layer, nn.QuantizedLinear) and layer.bits == int(kind[1]) and layer.scales.dtype == mx.float32
    assert packed.model.model.embed_tokens.bits == 8


def test_unpacking_is_exact(tmp_path: Path, config: RuntimeConfig) -> None:
    """Against scale * q + minimum computed here from the file's bytes; in float16 it would be off by its rounding."""
    path = tiny.write_gguf(tmp_path / "m.gguf", kind="Q4_1")
    located = find(path, config)
    span = located.headers[located.path].tensors["blk.0.ffn_up.weight"]
    blocks = np.frombuffer(path.read_bytes()[span.start : span.stop], np.uint8).reshape(-1, 20)
    scale, low = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    found = np.array(load(located, config).model.model.layers[0].mlp.up_proj.weight)
    assert np.array_equal(found, (scale * nibbles + low).reshape(span.shape))


def test_a_type_that_mlx_misreads_is_unpacked_by_us(tmp_path: Path, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model of Q4_K blocks. Its values are those of `ggml`, whose own tests check the layout."""
    plain = tiny._blocks

    def random_blocks(array: np.ndarray, kind: str) -> bytes:
        if kind != "Q4_K":
            return plain(array, kind)
        raw = np.random.default_rng(array.size).integers(0, 256, (array.size // 256, 144)).astype(np.uint8)
        raw[:, :4] = np.frombuffer(np.array([0.002, 0.001], np.float16).tobytes(), np.uint8)
        return raw.tobytes()

    monkeypatch.setattr(tiny, "_blocks", random_blocks)
    monkeypatch.setitem(tiny._GGML_TYPES, "Q4_K", 12)
    path = tiny.write_gguf(tmp_path / "m.gguf", kind="Q4_K", hidden_size=256, intermediate_size=256, head_dim=64)
    located = find(path, config)
    model = load(located, config)
    span = located.headers[path].tensors["blk.1.ffn_down.weight"]
    expected = ggml.unpack("Q4_K", path.read_bytes()[span.start : span.stop], span.shape)
    assert np.array_equal(np.array(model.model.model.layers[1].mlp.down_proj.weight), expected)
    norm = tiny.weights_of(tiny.config_of(hidden_size=256, intermediate_size=256, head_dim=64))["model.norm.weight"]
    assert np.array_equal(np.array(model.model.model.norm.weight), norm)
    assert model.info.weights == "float32 (from Q4_K)"
    stored = load(located, config, "file")
    assert stored.info.weights == "float16 (from Q4_K)" and stored.model.model.norm.weight.dtype == mx.float16
    assert np.isfinite(logits(model)).all()


def quantised_folder(path: Path, bits: int) -> Path:
    """A folder as mlx-lm's converter writes it."""
    from mlx_lm.utils import load_model

    tiny.write_model(path)
    model, settings = load_model(path)
    nn.quantize(model, group_size=32, bits=bits)
    model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    tiny.write_json(path / "config.json", {**settings, "quantization": {"group_size": 32, "bits": bits}})
    return path


def test_a_quantised_folder_becomes_dense_on_cpu_and_says_so(tmp_path: Path, config: RuntimeConfig) -> None:
    path = quantised_folder(tmp_path / "m", 4)
    dense, packed = loaded(path, config), loaded(path, config, "file")
    assert (dense.info.weights, packed.info.weights) == ("float32 (from 4-bit)", "4-bit")
    assert not any(hasattr(module, "bits") for _, module in dense.model.named_modules())
    assert all(array.dtype == mx.float32 for _, array in tree_flatten(dense.model.parameters()))
    assert np.abs(logits(dense) - logits(packed)).max() < 1e-4
    assert dense.info.parameters == packed.info.parameters == loaded(tiny.write_model(tmp_path / "p"), config).info.parameters


@pytest.mark.parametrize(
    ("stored", "dtype", "label"),
    [
        ("F32", None, "float32"),
        ("BF16", None, "float32 (from bfloat16)"),
        ("F16", None, "float32 (from float16)"),
        ("BF16", "file", "bfloat16"),
        ("F16", "file", "float16"),
        ("F32", "bfloat16", "bfloat16 (from float32)"),
        ("F16", "bfloat16", "bfloat16 (from float16)"),
    ],
)
def test_the_dtype_policy_of_a_folder(tmp_path: Path, config: RuntimeConfig, stored: str, dtype: str | None, label: str) -> None:
    model = loaded(tiny.write_model(tmp_path / "m", dtype=stored), config, dtype)
    assert model.info.weights == label
    wanted = getattr(mx, label.split(" ")[0])
    assert {array.dtype for _, array in tree_flatten(model.model.parameters())} == {wanted}


def test_weights_that_do_not_fit_as_float32_stay_as_stored(tmp_path: Path, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, single = tiny.write_model(tmp_path / "m", dtype="BF16"), tiny.write_gguf(tmp_path / "m.gguf", kind="Q4_0")
    half = tiny.write_gguf(tmp_path / "h.gguf", kind="F16")
    need = 4 * loaded(folder, config).info.parameters
    monkeypatch.setattr(loader, "memory_bytes", lambda: math.ceil(need / 0.6) + 1)
    assert loaded(folder, config).info.weights == "float32 (from bfloat16)"
    monkeypatch.setattr(loader, "memory_bytes", lambda: math.floor(need / 0.6) - 1)
    assert loaded(folder, config).info.weights == "bfloat16"
    assert loaded(single, config).info.weights == "Q4_0"
    assert loaded(half, config).info.weights == "float16"
    assert loaded(half, dataclasses.replace(config, dtype="float32")).info.weights == "float32 (from float16)"
    assert loaded(half, dataclasses.replace(config, dtype="float32"), "bfloat16").info.weights == "bfloat16 (from float16)"


def test_the_memory_of_this_machine_is_a_sane_number() -> None:
    assert 2**28 < loader.memory_bytes() < 2**50


def test_an_unknown_dtype_is_a_request_error(tmp_path: Path, config: RuntimeConfig) -> None:
    with pytest.raises(RequestError, match="float64"):
        loaded(tiny.write_model(tmp_path / "m"), config, "float64")


def test_a_sharded_folder_is_one_model(tmp_path: Path, config: RuntimeConfig) -> None:
    whole, parts = tiny.write_model(tmp_path / "w"), tiny.write_model(tmp_path / "p", shards=3)
    assert np.array_equal(logits(loaded(whole, config)), logits(loaded(parts, config)))
    assert len(find(parts, config).shards) == 3


def test_every_array_is_evaluated_so_that_another_thread_can_use_the_model(tmp_path: Path, config: RuntimeConfig) -> None:
    """Llama 3 scaling keeps its frequencies in an array that is no parameter; left lazy it fails on any other thread."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path = tiny.write_model(tmp_path / "m", rope_scaling=scaling)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        model = pool.submit(loaded, path, config).result()
        there = pool.submit(logits, model).result()
        assert np.array_equal(logits(model), there)
        pool.submit(mx.clear_streams).result()


# -- identity ------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_contents_not_of_names(tmp_path: Path, config: RuntimeConfig) -> None:
    one = tiny.write_gguf(tmp_path / "one.gguf")
    (tmp_path / "elsewhere").mkdir()
    two = Path(shutil.copy(one, tmp_path / "elsewhere" / "two.gguf"))
    prints = [loaded(path, config).info.fingerprint for path in (one, two)]
    assert prints[0] == prints[1]
    others = [
        loaded(one, config, "bfloat16"),
        loaded(tiny.write_gguf(tmp_path / "seed.gguf", seed=1), config),
        loaded(tiny.write_gguf(tmp_path / "eps.gguf", rms_norm_eps=1e-6), config),
        loaded(tiny.write_gguf(tmp_path / "t.gguf", metadata={"tokenizer.chat_template": "{{ messages }}"}), config),
        loaded(tiny.write_gguf(tmp_path / "b.gguf", metadata={"tokenizer.ggml.bos_token_id": 318}), config),
        loaded(tiny.write_model(tmp_path / "m"), config),
    ]
    assert len({prints[0], *(other.info.fingerprint for other in others)}) == 7


def test_a_file_that_changes_between_the_check_and_the_load_is_refused(tmp_path: Path, config: RuntimeConfig) -> None:
    path = tiny.write_model(tmp_path / "m")
    located = find(path, config)
    (path / "model-extra.safetensors").write_bytes(tiny.safetensors_bytes({"x": np.ones(2, np.float32)}))
    with pytest.raises(ModelError, match="changed"):
        load(located, config)
    (path / "model-extra.safetensors").unlink()
    load(located, config)
    os.utime(path / "model.safetensors", ns=(1, 1))
    with pytest.raises(ModelError, match="changed"):
        load(located, config)


def test_a_file_that_changes_during_the_load_is_refused(tmp_path: Path, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf")
    located = find(path, config)
    original = mx.load

    def meddle(*args: Any, **kwargs: Any) -> Any:
        os.utime(path, ns=(1, 1))
        return original(*args, **kwargs)

    monkeypatch.setattr(mx, "load", meddle)
    with pytest.raises(ModelError, match="changed"):
        load(located, config)


# -- refusals ------------------------------------------------------------------------------------------------------


def edit(path: Path, **changes: Any) -> None:
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**settings, **changes}.items() if value is not None}))


def test_code_that_a_model_brings_is_never_run(tmp_path: Path, config: RuntimeConfig) -> None:
    path = tiny.write_model(tmp_path / "m")
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit(path / "config.json", model_file="evil.py", auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(ModelError, match="own code"):
        find(path, config)
    edit(path / "config.json", model_file=None)
    loaded(path, config)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.pth", "weights.npz", "model.ckpt"])
def test_formats_that_run_code_are_refused(tmp_path: Path, config: RuntimeConfig, file: str) -> None:
    path = tiny.write_model(tmp_path / "m")
    (path / "model.safetensors").rename(path / file)
    with pytest.raises(ModelError, match="run code"):
        find(path, config)
    with pytest.raises(ModelError, match="run code"):
        find(path / file, config)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"num_hidden_layers": "two"}, "layers"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "layers"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "no_such_family"}, "no_such_family"),
        ({"model_type": "../../evil"}, "could not be loaded"),
        ({"hidden_size": 128}, "could not be loaded"),
        ({"hidden_size": None}, "could not be loaded"),
        ({"vocab_size": 10**12}, "could not be loaded"),
        ({"num_hidden_layers": 3}, "could not be loaded"),
        ({"num_attention_heads": 0, "head_dim": None}, "could not be loaded"),
        ({"quantization": {"bits": 99, "group_size": 32}}, None),
        ({"quantization": "yes"}, "could not be loaded"),
        ({"rope_scaling": {"type": "unknown"}}, "could not be loaded"),
    ],
)
def test_a_configuration_that_does_not_fit_is_a_model_error(
    tmp_path: Path, config: RuntimeConfig, changes: dict[str, Any], word: str | None
) -> None:
    path = tiny.write_model(tmp_path / "m")
    edit(path / "config.json", **changes)
    if word is None:  # nothing in the file is packed, so the setting has nothing to act on
        assert loaded(path, config).info.weights == "float32"
        return
    with pytest.raises(ModelError, match=word) as caught:
        loaded(path, config)
    assert caught.value.hint


def test_damaged_files_are_model_errors_and_the_next_model_loads(tmp_path: Path, config: RuntimeConfig) -> None:
    good = tiny.write_gguf(tmp_path / "good.gguf")
    raw = good.read_bytes()
    for i, bad in enumerate((b"", raw[:100], raw[: len(raw) // 2], raw[:-1], b"GGUF" + bytes(60), raw[:200] + b"\xff" * 50 + raw[250:])):
        (tmp_path / f"bad{i}.gguf").write_bytes(bad)
        with pytest.raises(ModelError):
            loaded(tmp_path / f"bad{i}.gguf", config)
    folder = tiny.write_model(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    for bad in (b"", whole[:-1], whole + b"x", bytes(8) + whole[8:]):
        (folder / "model.safetensors").write_bytes(bad)
        with pytest.raises(ModelError, match="refused"):
            loaded(folder, config)
    for file, text in (("config.json", "{"), ("config.json", "[]"), ("config.json", "[" * 100_000), ("config.json", "\udcff")):
        (folder / file).write_text(text, errors="surrogateescape")
        with pytest.raises(ModelError, match="config.json"):
            loaded(folder, config)
    assert loaded(good, config).info.layers == 2


def test_a_missing_tensor_is_a_model_error(tmp_path: Path, config: RuntimeConfig) -> None:
    path = tiny.write_model(tmp_path / "m")
    weights = tiny.weights_of(tiny.config_of())
    del weights["model.layers.1.mlp.up_proj.weight"]
    (path / "model.safetensors").write_bytes(tiny.safetensors_bytes(weights))
    with pytest.raises(ModelError, match="up_proj"):
        loaded(path, config)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, config: RuntimeConfig) -> None:
    other = tiny.write_model(tmp_path / "other", seed=1)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        path = tiny.write_model(tmp_path / f"m-{file}")
        (path / file).unlink()
        (path / file).symlink_to(other / file)
        with pytest.raises(ModelError, match="leads out"):
            find(path, config)


@pytest.mark.parametrize("target", ["../evil.safetensors", "/etc/passwd", "a\0b", "model-9.safetensors", 3])
def test_an_index_names_only_files_that_are_there(tmp_path: Path, config: RuntimeConfig, target: Any) -> None:
    path = tiny.write_model(tmp_path / "m", shards=2)
    (tmp_path / "evil.safetensors").write_bytes(b"x")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = target
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError):
        find(path, config)


def test_a_missing_shard_is_named(tmp_path: Path, config: RuntimeConfig) -> None:
    path = tiny.write_model(tmp_path / "m", shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00003"):
        find(path, config)


# -- names ---------------------------------------------------------------------------------------------------------


def test_a_misspelt_path_names_the_nearest_one(tmp_path: Path, config: RuntimeConfig) -> None:
    tiny.write_gguf(tmp_path / "little.gguf")
    tiny.write_model(tmp_path / "bigger-model")
    for wrong, right in (("litle.gguf", "little.gguf"), ("biger-model", "bigger-model")):
        with pytest.raises(ModelError, match="no file or folder") as caught:
            find(tmp_path / wrong, config)
        assert str(tmp_path / right) in caught.value.hint


@pytest.mark.parametrize(
    "name",
    [
        "no such model",
        "x",
        "a/b/c",
        "~nobody-here/x",
        "/no/where",
        "a\0b",
        "x" * 5000,
        "../..",
        "/dev/null",
        "\ud800",
        "C:\\models\\x",
        "?",
    ],
)
def test_a_name_that_means_nothing_is_one_sentence(name: str, config: RuntimeConfig) -> None:
    with pytest.raises(ModelError) as caught:
        find(name, dataclasses.replace(config, offline=True))
    assert caught.value.hint and len(caught.value.message) < 400


def test_other_files_and_empty_folders_are_explained(tmp_path: Path, config: RuntimeConfig) -> None:
    path = tiny.write_model(tmp_path / "m")
    with pytest.raises(ModelError, match="by itself") as caught:
        find(path / "model.safetensors", config)
    assert str(path) in caught.value.hint
    (path / "model.safetensors").rename(path / "weights.safetensors")
    with pytest.raises(ModelError, match=r"weights\.safetensors"):
        find(path, config)
    (path / "weights.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        find(path, config)
    tiny.write_model(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        find(path, config)


def test_the_configured_model_is_the_default(tmp_path: Path, config: RuntimeConfig) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf")
    chosen = dataclasses.replace(config, model=str(path))
    assert find(None, chosen).path == find("", chosen).path == path


def test_checking_can_be_cancelled(tmp_path: Path, config: RuntimeConfig) -> None:
    path = tiny.write_model(tmp_path / "m")
    with pytest.raises(Cancelled):
        locate(str(path), config, lambda *step: None, lambda: True)


# -- the hub's cache -----------------------------------------------------------------------------------------------

REVISION = "0123456789abcdef0123456789abcdef01234567"


def hub_model(name: str, **settings: Any) -> Path:
    """A repository as the hub library keeps it: blobs, and a snapshot that links to them."""
    root = hub.repo_folder(name)
    written = tiny.write_model(root / "written", **settings)
    for folder in ("blobs", "refs", f"snapshots/{REVISION}"):
        (root / folder).mkdir(parents=True)
    (root / "refs" / "main").write_text(REVISION)
    for i, file in enumerate(sorted(written.iterdir())):
        file.rename(root / "blobs" / str(i))
        (root / "snapshots" / REVISION / file.name).symlink_to(f"../../blobs/{i}")
    written.rmdir()
    return root / "snapshots" / REVISION


def test_a_cached_repository_loads_without_the_network(config: RuntimeConfig) -> None:
    snapshot = hub_model("ada/tiny-llama", shards=2)
    offline = dataclasses.replace(config, offline=True)
    model = loaded("ada/tiny-llama", offline)
    assert (model.info.name, model.info.source, model.info.path) == ("ada/tiny-llama", "hub", str(snapshot))
    assert loaded(snapshot, offline).info.fingerprint == model.info.fingerprint
    assert [found.name for found in list_local_models(config)] == ["ada/tiny-llama"]


def test_a_snapshot_that_links_out_of_its_repository_is_refused(tmp_path: Path, config: RuntimeConfig) -> None:
    snapshot = hub_model("ada/tiny-llama")
    other = tiny.write_model(tmp_path / "other")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other / "model.safetensors")
    with pytest.raises(ModelError, match="leads out"):
        find("ada/tiny-llama", config)


def test_an_incomplete_repository_is_not_taken_for_a_model(config: RuntimeConfig) -> None:
    snapshot = hub_model("ada/tiny-llama", shards=2)
    next(snapshot.glob("model-*.safetensors")).unlink()
    assert list_local_models(config) == []
    with pytest.raises(ModelError, match="not on this machine, and offline"):
        find("ada/tiny-llama", dataclasses.replace(config, offline=True))


def test_a_misspelt_repository_names_the_one_that_is_here(config: RuntimeConfig) -> None:
    hub_model("ada/tiny-llama")
    with pytest.raises(ModelError) as caught:
        find("ada/tiny-lama", dataclasses.replace(config, offline=True))
    assert "'ada/tiny-llama'" in caught.value.hint


class FakeHub:
    """Stands for huggingface_hub: one repository, or an error. Files arrive in two pieces through the progress bar."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: Path | None, error: Exception | None = None) -> None:
        import huggingface_hub

        self.files, self.error, self.calls = files, error, 0
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, name: str, files_metadata: bool) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        assert self.files is not None
        sizes = {file.name: file.stat().st_size for file in self.files.iterdir()}
        siblings = [type("Sibling", (), {"rfilename": name, "size": size}) for name, size in sizes.items()]
        return type("Info", (), {"sha": REVISION, "siblings": siblings})

    def snapshot_download(
        self, name: str, *, revision: str, cache_dir: Path, allow_patterns: list[str], tqdm_class: Any, max_workers: int
    ) -> str:
        assert self.files is not None
        snapshot = cache_dir / f"models--{name.replace('/', '--')}" / "snapshots" / revision
        snapshot.mkdir(parents=True, exist_ok=True)
        counter, bar = tqdm_class(total=len(allow_patterns)), tqdm_class(total=0, unit="B", unit_scale=True, desc="x")
        for file in allow_patterns:
            size = (self.files / file).stat().st_size
            bar.total = (bar.total or 0) + size
            bar.update(size // 2)
            shutil.copy(self.files / file, snapshot / file)
            bar.update(size - size // 2)
            counter.update(1)
            bar.refresh()
        return str(snapshot)


def test_a_repository_is_fetched_once_with_progress(tmp_path: Path, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tiny.write_model(tmp_path / "there", shards=2)
    (files / "evil.py").write_text("raise SystemExit")
    (files / "pytorch_model.bin").write_bytes(b"x")
    fake = FakeHub(monkeypatch, files)
    seen: list[tuple[str, int, int]] = []
    located = locate("ada/new", config, lambda *step: seen.append(step), lambda: False)
    downloads = [step for step in seen if step[0] == "download"]
    assert downloads[-1][1] == downloads[-1][2] > 0
    assert not list(located.path.glob("*.py")) and not list(located.path.glob("*.bin"))
    assert find("ada/new", dataclasses.replace(config, offline=True)).path == located.path
    assert fake.calls == 1


def test_fetching_a_repository_can_be_cancelled_and_taken_up_again(
    tmp_path: Path, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHub(monkeypatch, tiny.write_model(tmp_path / "there"))
    seen: list[str] = []
    with pytest.raises(Cancelled):
        locate("ada/new", config, lambda phase, *_: seen.append(phase), lambda: seen.count("download") >= 3)
    assert list_local_models(config) == []
    assert find("ada/new", config).kind == "hub"


def test_each_failure_of_the_hub_is_one_sentence(tmp_path: Path, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    # Which HTTP library the hub's own library stands on changed between its versions.
    http = importlib.import_module(errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
    response = http.Response(404, request=http.Request("GET", "https://hub.test"))
    cases: list[tuple[Exception, str]] = [
        (http.ConnectError("no route"), "could not be reached"),
        (ConnectionResetError(104, "reset"), "could not be reached"),
        (errors.RepositoryNotFoundError("404", response=response), "no model"),
        (errors.GatedRepoError("403", response=response), "permission"),
        (errors.LocalEntryNotFoundError("x"), "could not be reached"),
        (OSError(28, "No space left on device"), "No space left"),
    ]
    for error, word in cases:
        FakeHub(monkeypatch, None, error)
        with pytest.raises(ModelError, match=word) as caught:
            find("ada/new", config)
        assert caught.value.hint and "\n" not in str(caught.value)
    for file, word in (("pytorch_model.bin", "run code"), ("m.Q4_K_M.gguf", "only GGUF")):
        folder = tmp_path / file
        folder.mkdir()
        (folder / file).write_bytes(b"x")
        FakeHub(monkeypatch, folder)
        with pytest.raises(ModelError, match=word) as caught:
            find("ada/new", config)
        assert caught.value.hint


def test_local_models_are_listed_with_their_sizes(tmp_path: Path, config: RuntimeConfig) -> None:
    assert list_local_models(config) == []
    config.models_dir.mkdir(parents=True)
    own = tiny.write_gguf(config.models_dir / "own.gguf")
    snapshot = hub_model("ada/tiny-llama")
    listed = {model.name: (model.kind, model.size_bytes) for model in list_local_models(config)}
    assert listed == {
        str(own): ("gguf", own.stat().st_size),
        "ada/tiny-llama": ("hub", (snapshot / "model.safetensors").stat().st_size),
    }
    for name in listed:
        assert find(name, dataclasses.replace(config, offline=True)).shards


# -- what importing does -------------------------------------------------------------------------------------------


def python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_mlx_lm_does_not_lower_the_limit_of_open_files() -> None:
    limits = "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE); original = resource.setrlimit\n"
    verdict = "\nprint(resource.getrlimit(resource.RLIMIT_NOFILE) == before, resource.setrlimit is original)"
    assert python(limits + "from mlxnb_engine.loader import import_mlx_lm; import_mlx_lm()" + verdict) == "True True"
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 4096:
        assert python(limits + "import mlx_lm.utils" + verdict) == "False True", "negative control: mlx-lm alone lowers it"


def test_the_guard_lets_other_limits_and_higher_ones_through() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    core = resource.getrlimit(resource.RLIMIT_CORE)
    with zoo._open_files_kept():
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, soft), hard))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
        resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
        assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
    resource.setrlimit(resource.RLIMIT_CORE, core)


def test_without_a_backend_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['mlx.core'] = None\n"
        "from mlxnb_engine.errors import ModelError\n"
        "try:\n    import mlxnb_engine.loader\nexcept ModelError as error:\n    print(error)"
    )
    said = python(code)
    assert "mlxnb[cpu]" in said and "mlxnb[cuda13]" in said


def test_finding_a_model_loads_no_mlx(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys\nfrom mlxnb_engine.config import resolve\nfrom mlxnb_engine.locate import locate\n"
        f"found = locate({str(path)!r}, resolve(overrides={{'cache_dir': {str(tmp_path / 'c')!r}}}), lambda *s: None, lambda: False)\n"
        "print(found.kind, len(found.shards), 'mlx' in sys.modules, 'transformers' in sys.modules)"
    )
    assert python(code) == "gguf 1 False False"


def test_errors_of_loading_are_typed(tmp_path: Path, config: RuntimeConfig) -> None:
    """Anything that can be wrong with a model is one of our errors, so the engine can tell the cell and live on."""
    for name in ("missing.gguf", "", str(tmp_path)):
        with pytest.raises(MlxnbError):
            loaded(name or str(tmp_path / "none"), dataclasses.replace(config, offline=True))
