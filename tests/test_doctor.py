"""`mlxnb doctor` names what is wrong and how to put it right, and never fails itself."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxnb import doctor
from mlxnb_engine import config, fetch

GOOD = {"version": "0.32.4", "device": "cpu", "blas": "mkl", "blas_path": "/x/libmkl_rt.so.3", "blas_note": "", "gflops": 90.0}


def look(tmp_path: Path, env: dict[str, str] | None = None, backend: dict[str, Any] = GOOD) -> dict[str, Any]:
    settings = config.resolve({"HOME": str(tmp_path), "MLXNB_CACHE_DIR": str(tmp_path / "cache"), **(env or {})})
    return doctor.report(settings, lambda blas: backend)


def finding(result: dict[str, Any], name: str) -> dict[str, str]:
    (found,) = [f for f in result["findings"] if f["name"] == name]
    return found


def test_a_report_is_json_and_its_text_says_that_all_is_well(tmp_path: Path) -> None:
    result = look(tmp_path)
    assert json.loads(json.dumps(result)) == result
    assert result["ok"], result["findings"]
    text = doctor.render(result)
    assert text.endswith("Nothing stands in the way.")
    assert "MLX 0.32.4 on cpu" in text and "max_rows" in text


def test_a_machine_without_a_backend_is_told_which_extras_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in doctor.BACKENDS else "1")
    result = look(tmp_path, backend={"error": "ImportError: libmlx.so: cannot open shared object file"})
    assert not result["ok"]
    found = finding(result, "backend")
    assert found["level"] == "bad" and "libmlx.so" in found["text"]
    text = doctor.render(result)
    assert "to put right before mlxnb can work" in text and "mlxnb[cpu]" in text and "mlxnb[cuda13]" in text


def test_two_backends_in_one_environment_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4", "mlx": "0.32.4"}
    monkeypatch.setattr(doctor, "_version", lambda name: here.get(name))
    found = [f for f in look(tmp_path)["findings"] if f["name"] == "backend" and f["level"] == "bad"]
    assert len(found) == 1 and "mlx-cpu and mlx-cuda-13" in found[0]["text"] and "pip uninstall" in found[0]["fix"]


def test_a_slow_blas_is_a_warning_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    for note in ("No fast BLAS was found.", ""):
        found = finding(look(tmp_path, backend={**GOOD, "blas": "reference", "blas_path": None, "blas_note": note}), "blas")
        assert found["level"] == "warn" and found["fix"]


def test_a_cache_folder_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = look(tmp_path, {"MLXNB_CACHE_DIR": str(tmp_path / "file" / "cache")})
    found = finding(result, "cache folder")
    assert found["level"] == "bad" and "MLXNB_CACHE_DIR" in found["fix"] and not result["ok"]


def test_looking_does_not_make_the_cache_folder(tmp_path: Path) -> None:
    look(tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("free", "level"), [(doctor.NO_DISK_BYTES - 1, "bad"), (doctor.LOW_DISK_BYTES - 1, "warn"), (10**12, "ok")])
def test_a_full_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})())
    found = finding(look(tmp_path), "cache folder")
    assert found["level"] == level and bool(found["fix"]) == (level != "ok")


def test_a_low_limit_of_open_files_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 256))
    found = finding(look(tmp_path), "open files")
    assert found["level"] == "warn" and "ulimit -n" in found["fix"]
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert finding(look(tmp_path), "open files")["level"] == "ok"


def test_little_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_memory_bytes", lambda: doctor.GIB)
    assert finding(look(tmp_path), "memory")["level"] == "warn"


def test_a_misspelt_variable_is_named_with_its_nearest(tmp_path: Path) -> None:
    found = finding(look(tmp_path, {"MLXNB_MAX_ROW": "3"}), "variable")
    assert found["level"] == "warn" and "MLXNB_MAX_ROW means nothing" in found["text"] and "MLXNB_MAX_ROWS" in found["fix"]


def test_a_setting_out_of_range_is_bad_and_the_rest_is_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXNB_MAX_ROWS", "0")
    result = doctor.report(probe=lambda blas: GOOD)
    found = finding(result, "settings")
    assert found["level"] == "bad" and "MLXNB_MAX_ROWS" in found["text"] and not result["ok"]
    assert finding(result, "backend")["level"] == "ok"


def test_a_missing_default_model_is_bad_only_when_it_cannot_be_fetched(tmp_path: Path) -> None:
    assert finding(look(tmp_path), "default model")["level"] == "ok"
    found = finding(look(tmp_path, {"MLXNB_OFFLINE": "1"}), "default model")
    assert found["level"] == "bad" and "mlxnb fetch" in found["fix"]
    path = fetch.default_model_path(config.resolve({"HOME": "/", "MLXNB_CACHE_DIR": str(tmp_path / "cache")}))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 7)
    result = look(tmp_path, {"MLXNB_OFFLINE": "1"})
    assert finding(result, "default model")["level"] == "ok"
    assert [(m["name"], m["bytes"]) for m in result["models"] if m["source"] == "embedded"] == [(fetch.EMBEDDED_NAME, 7)]


def test_models_on_disk_are_listed_with_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--someone--small-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x" * 3000)
    (hub / "models--someone--small-model" / "refs").mkdir()
    (hub / "models--someone--small-model" / "refs" / "main").write_text("abc")
    (hub / "models--someone--half-fetched" / "snapshots").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    result = look(tmp_path)
    (model,) = result["models"]
    assert model["name"] == "someone/small-model" and model["source"] == "hub" and model["bytes"] == 3000
    assert "someone/small-model (0 MiB)" in doctor.render(result)


def test_a_version_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=9999", "nothing-like-this>=1", "packaging>=1", "mkl>=1; extra == 'cpu'", "winreg-thing; platform_system == 'Windows'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: wanted)
    found = finding(look(tmp_path), "packages")
    assert found["level"] == "bad" and "numpy>=9999 (here: " in found["text"] and "nothing-like-this>=1 (here: missing)" in found["text"]
    assert found["fix"].endswith('"numpy>=9999" "nothing-like-this>=1"'), "mlxnb itself may not be on an index"
    assert "packaging" not in found["text"] and "mkl" not in found["text"] and "winreg" not in found["text"]


def test_the_probe_loads_mlx_in_another_process_only() -> None:
    before = "mlx.core" in sys.modules
    answer = doctor.probe_backend("auto")
    assert answer["device"] in ("cpu", "gpu") and answer["gflops"] > 0, answer
    assert ("mlx.core" in sys.modules) == before


def test_a_blas_that_cannot_be_had_gets_the_remedy_of_that_setting_and_not_of_mlx(tmp_path: Path) -> None:
    answer = doctor.probe_backend("/nonexistent/library.so")
    assert "is not a BLAS library" in answer["error"]
    result = look(tmp_path, backend=answer)
    found = finding(result, "blas")
    assert found["level"] == "bad" and "cblas_sgemm" in found["fix"] and "einstall" not in found["fix"] and not result["ok"]
    assert [f for f in result["findings"] if f["name"] == "backend"] == []


def test_a_probe_that_fails_gives_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE", "raise ImportError('libmlx.so is gone')")
    assert doctor.probe_backend("auto")["error"] == "ImportError: libmlx.so is gone"


# -- the model that a setting names --------------------------------------------------------------------------------------


def test_a_model_that_is_nowhere_is_bad(tmp_path: Path) -> None:
    for name in ("nosuch", "./nosuch.gguf", str(tmp_path / "none")):
        result = look(tmp_path, {"MLXNB_MODEL": name})
        found = finding(result, "default model")
        assert found["level"] == "bad" and name in found["text"] and "MLXNB_MODEL" in found["text"] and found["fix"]
        assert "to put right" in doctor.render(result)


def test_a_repository_that_is_not_here_is_bad_only_when_it_cannot_be_fetched(tmp_path: Path) -> None:
    found = finding(look(tmp_path, {"MLXNB_MODEL": "other/model"}), "default model")
    assert found["level"] == "ok" and "not on disk yet" in found["text"]
    found = finding(look(tmp_path, {"MLXNB_MODEL": "other/model", "MLXNB_OFFLINE": "1"}), "default model")
    assert found["level"] == "bad" and "offline" in found["text"]
    assert finding(look(tmp_path, {"MLXNB_MODEL": fetch.EMBEDDED_NAME}), "default model")["level"] == "ok"


def test_a_model_on_disk_is_looked_into(tmp_path: Path, tiny_model: Path) -> None:
    found = finding(look(tmp_path, {"MLXNB_MODEL": str(tiny_model)}), "default model")
    assert found["level"] == "ok" and "not on disk" not in found["text"]
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    assert "no weights" in finding(look(tmp_path, {"MLXNB_MODEL": str(broken)}), "default model")["text"]
    (broken / "model.safetensors").write_bytes(b"not a header")
    assert finding(look(tmp_path, {"MLXNB_MODEL": str(broken)}), "default model")["level"] == "bad"
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    assert finding(look(tmp_path, {"MLXNB_MODEL": str(tmp_path / "x.gguf")}), "default model")["level"] == "bad"


def test_a_probe_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.3)
    assert "did not answer" in doctor.probe_backend("auto")["error"]


def test_a_probe_that_crashes_without_a_word_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE", "import os; os.abort()")
    assert "code -6" in doctor.probe_backend("auto")["error"]
