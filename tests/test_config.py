"""Settings: precedence, ranges, sources, unknown names."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from mlxnb_engine.config import RuntimeConfig, resolve
from mlxnb_engine.errors import RequestError


def test_defaults_need_no_environment() -> None:
    config = resolve(env={"HOME": "/home/ada"})
    assert (config.blas, config.model, config.max_rows, config.resident_models, config.offline) == ("auto", None, 8, 2, False)
    assert (config.max_kv_bytes, config.context_limit, config.prefill_chunk, config.dtype) == (None, None, None, None)
    assert (config.min_width, config.attention_extent, config.submit_order, config.unknown_env) == (None, None, "auto", ())
    assert {entry.source for entry in config.describe()} == {"default"}


def test_an_override_beats_the_environment_and_says_so() -> None:
    config = resolve(env={"HOME": "/h", "MLXNB_MAX_ROWS": "4", "MLXNB_BLAS": "none"}, overrides={"max_rows": 2})
    table = {entry.field: entry for entry in config.describe()}
    assert (table["max_rows"].value, table["max_rows"].source) == (2, "override")
    assert (table["blas"].value, table["blas"].source) == ("none", "env")
    assert table["dtype"].source == "default"
    assert list(table) == [f.name for f in dataclasses.fields(RuntimeConfig) if f.name not in ("unknown_env", "sources")]


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert resolve(env={"HOME": "/h"}).cache_dir == Path("/h/.cache/mlxnb")
    assert resolve(env={"HOME": "/h", "XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/mlxnb")
    assert resolve(env={"HOME": "/h", "XDG_CACHE_HOME": "x"}).cache_dir == Path("/h/.cache/mlxnb")
    assert resolve(env={"HOME": "/h", "MLXNB_CACHE_DIR": "/c"}).cache_dir == Path("/c")
    assert resolve(env={"HOME": "/h", "MLXNB_CACHE_DIR": "/c"}).models_dir == Path("/c/models")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert resolve(env={"HOME": "/h", "XDG_CACHE_HOME": "/x"}).cache_dir == Path("/h/Library/Caches/mlxnb")


def test_a_misspelt_setting_names_the_nearest_one() -> None:
    with pytest.raises(RequestError, match="'max_rows'"):
        resolve(env={}, overrides={"max_row": 3})
    with pytest.raises(RequestError, match="Known are"):
        resolve(env={}, overrides={"zzzzzz": 3})
    for hidden in ("unknown_env", "sources"):
        with pytest.raises(RequestError):
            resolve(env={}, overrides={hidden: ()})


def test_an_unknown_variable_is_collected_not_fatal() -> None:
    config = resolve(env={"HOME": "/h", "MLXNB_MODLE": "x", "MLXNB_BLAS": "none", "OTHER": "1"})
    assert config.unknown_env == ("MLXNB_MODLE",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_rows", v) for v in (0, -1, 257, True, 1.5, "x", "", "1e3", None, "9" * 30)],
        *[("max_kv_bytes", v) for v in (0, -5, "0", "4 parsecs", 1.0, True, 2**63, "4QB")],
        *[("context_limit", v) for v in (0, -1, 2**31, "many")],
        *[("prefill_chunk", v) for v in (0, 65537, "big")],
        *[("resident_models", v) for v in (0, 17)],
        *[("offline", v) for v in ("maybe", 1, None)],
        *[("dtype", v) for v in ("float64", 32, "")],
        *[("min_width", v) for v in (0, 65)],
        *[("attention_extent", v) for v in ("round", 1)],
        *[("submit_order", v) for v in ("never", None)],
        *[("blas", v) for v in ("mlk", "", None, 3, "/a\0b")],
        *[("model", v) for v in ("", "a\0b", 3)],
        *[("cache_dir", v) for v in ("", "a\0b", 3, None)],
        *[("prefix_disk_dir", v) for v in ("", "a\0b", 3)],
        *[("prefix_disk_bytes", v) for v in (-1, False, True, "much", 2**63)],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        resolve(env={}, overrides={name: value})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_kv_bytes", "4GB", 4 * 10**9),
        ("max_kv_bytes", "2 GiB", 2 * 2**30),
        ("max_kv_bytes", "512m", 512 * 10**6),
        ("max_kv_bytes", "none", None),
        ("prefix_disk_bytes", "0", 0),
        ("prefix_disk_bytes", "off", 0),
        ("prefix_disk_bytes", "20GiB", 20 * 2**30),
        ("prefix_disk_bytes", "auto", None),
        ("prefix_disk_dir", "/scratch/p", Path("/scratch/p")),
        ("prefill_chunk", "64", 64),
        ("prefill_chunk", None, None),
        ("blas", "/opt/lib/libx.so", "/opt/lib/libx.so"),
        ("blas", Path("/opt/libx.so"), "/opt/libx.so"),
        ("dtype", "bfloat16", "bfloat16"),
        ("attention_extent", "bucket", "bucket"),
        ("min_width", 4, 4),
    ],
)
def test_a_value_is_read_from_its_usual_spellings(name: str, value: object, expected: object) -> None:
    assert getattr(resolve(env={}, overrides={name: value}), name) == expected


def test_a_bad_variable_is_named_as_the_variable() -> None:
    with pytest.raises(RequestError, match="MLXNB_MAX_ROWS"):
        resolve(env={"MLXNB_MAX_ROWS": "lots"})
    assert resolve(env={"MLXNB_MAX_ROWS": " "}).max_rows == 8


def test_offline_is_also_read_from_the_hub_variable() -> None:
    assert resolve(env={"HF_HUB_OFFLINE": "1"}).offline
    assert not resolve(env={"HF_HUB_OFFLINE": "1", "MLXNB_OFFLINE": "0"}).offline
    assert not resolve(env={"HF_HUB_OFFLINE": "1"}, overrides={"offline": False}).offline


def test_the_prefill_chunk_depends_on_the_backend_unless_set() -> None:
    assert (resolve(env={}).chunk_for(cpu=True), resolve(env={}).chunk_for(cpu=False)) == (128, 2048)
    assert resolve(env={}, overrides={"prefill_chunk": 7}).chunk_for(cpu=True) == 7


def test_the_config_is_frozen_and_reads_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXNB_MAX_ROWS", "3")
    config = resolve()
    monkeypatch.setenv("MLXNB_MAX_ROWS", "5")
    assert config.max_rows == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_rows = 4  # type: ignore[misc]


def test_the_disk_cache_takes_a_tenth_of_its_disk_unless_it_is_told_otherwise() -> None:
    chosen = resolve(env={"HOME": "/h"})
    assert chosen.prefix_dir == Path("/h/.cache/mlxnb/prefix")
    assert chosen.prefix_disk_for(50 * 10**9) == 5 * 10**9 and chosen.prefix_disk_for(10**13) == 20 * 2**30
    elsewhere = resolve(env={"HOME": "/h", "MLXNB_PREFIX_DISK_DIR": "/s", "MLXNB_PREFIX_DISK_BYTES": "1MB"})
    assert elsewhere.prefix_dir == Path("/s") and elsewhere.prefix_disk_for(10**13) == 10**6
    assert resolve(env={}, overrides={"prefix_disk_bytes": 0}).prefix_disk_for(10**13) == 0
    assert resolve(env={}, overrides={"prefix_cache_bytes": 0}).prefix_disk_for(10**13) == 0, "memory off: nothing comes to the disk"
