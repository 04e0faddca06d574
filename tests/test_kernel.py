"""The kernel "Python (MLX)": it starts, has the extension, loads no model, and is installed and removed cleanly."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from mlxnb import cli, kernel
from mlxnb_engine.errors import RequestError

ROOT = Path(__file__).resolve().parent.parent
START_S = 120


class Running:
    """A kernel that was started from an installed kernelspec, in a folder of its own."""

    def __init__(self, prefix: Path, folder: Path) -> None:
        kernel.install(prefix)
        specs = KernelSpecManager(kernel_dirs=[str(prefix / "share" / "jupyter" / "kernels")], ensure_native_kernel=False)
        self.manager = KernelManager(kernel_name=kernel.NAME, kernel_spec_manager=specs)
        paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "engine", ROOT / "widgets"))
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": paths, "IPYTHONDIR": str(folder / "ipython")})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_S)

    def ask(self, code: str) -> str:
        """What a cell printed; fails with its traceback if it raised."""
        printed: list[str] = []

        def note(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self.client.execute_interactive(code, timeout=START_S, output_hook=note)
        assert reply["content"]["status"] == "ok", "\n".join(reply["content"].get("traceback", []))
        return "".join(printed)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("notebooks")
    # Names that a kernel imports on its way: found here first, they would keep it from starting.
    for shadow in ("json", "pathlib", "shutil", "tempfile", "ipykernel", "traitlets"):
        (folder / f"{shadow}.py").write_text("raise RuntimeError('a file of the notebook folder stood in for a module')\n")
    (folder / "my_module.py").write_text("ANSWER = 42\n")
    started = Running(tmp_path_factory.mktemp("prefix"), folder)
    yield started
    started.close()


def test_the_kernel_has_the_magics_and_no_model(running: Running) -> None:
    code = (
        "import sys\nfrom mlxnb import runtime\nheavy = {'mlx', 'mlx_lm', 'transformers', 'tokenizers'}\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & heavy), runtime.current())"
    )
    assert running.ask("%%mlx --help").startswith("%%mlx [options]")
    assert running.ask(code) == "[] None\n"


def test_the_check_for_heavy_modules_sees_one_that_is_loaded(running: Running) -> None:
    assert (
        running.ask("import sys, types\nsys.modules['mlx'] = types.ModuleType('mlx')\nprint('mlx' in sys.modules)\ndel sys.modules['mlx']")
        == "True\n"
    )


def test_the_kernel_is_ipython_for_a_front_end_and_says_what_it_adds(running: Running) -> None:
    info = running.client.kernel_info(reply=True, timeout=START_S)["content"]
    assert info["implementation"] == "ipython" and info["language_info"]["name"] == "python"
    assert info["banner"].rstrip().endswith("%mlx help says the rest.")


def test_the_notebooks_folder_can_be_imported_from_but_shadows_nothing_at_start(running: Running) -> None:
    assert running.ask("import my_module\nprint(my_module.ANSWER)") == "42\n"


def test_a_cell_is_known_by_the_id_that_the_front_end_gave_it(running: Running) -> None:
    """The same request over the wire, with and without the notebook's id of the cell."""
    told: list[str] = []
    for metadata in ({"cellId": "c0ffee-1"}, {}):
        content = {"code": "from mlxnb.routing import cell_id\nprint(repr(cell_id(get_ipython())))", "silent": False}
        message = running.client.session.msg("execute_request", content, metadata=metadata)
        running.client.shell_channel.send(message)
        while (reply := running.client.get_iopub_msg(timeout=START_S))["parent_header"].get("msg_id") != message["header"]["msg_id"] or (
            reply["msg_type"] != "status" or reply["content"]["execution_state"] != "idle"
        ):
            told += [reply["content"]["text"]] if reply["msg_type"] == "stream" else []
        running.client.get_shell_msg(timeout=START_S)
    assert "".join(told) == "'c0ffee-1'\n''\n"


# -- installation ----------------------------------------------------------------------------------------------------------


def test_install_writes_this_python_and_remove_takes_it_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernel", "install", "--prefix", str(tmp_path)]) == 0
    folder = tmp_path / "share" / "jupyter" / "kernels" / "mlxnb"
    assert capsys.readouterr().out == f'kernel "Python (MLX)": {folder}\n'
    described = json.loads((folder / "kernel.json").read_text("utf-8"))
    assert described["argv"][0] == sys.executable and described["argv"][-4:] == ["-m", "mlxnb.kernel", "-f", "{connection_file}"]
    assert described["display_name"] == kernel.DISPLAY_NAME
    assert described["metadata"].items() >= get_kernel_dict()["metadata"].items()  # what this ipykernel can do, ours can
    assert {path.name for path in folder.iterdir()} == {"kernel.json", "logo-svg.svg"}
    assert cli.main(["kernel", "install", "--prefix", str(tmp_path)]) == 0  # again: it is replaced
    assert cli.main(["kernel", "remove", "--prefix", str(tmp_path)]) == 0
    assert not folder.exists()
    assert cli.main(["kernel", "remove", "--prefix", str(tmp_path)]) == 1
    assert "There is no kernel mlxnb" in capsys.readouterr().err


def test_install_goes_to_the_users_folder_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    assert kernel.install() == tmp_path / "kernels" / "mlxnb" == kernel.place(None)
    assert kernel.remove() == tmp_path / "kernels" / "mlxnb"


def test_remove_leaves_a_kernel_that_is_not_ours(tmp_path: Path) -> None:
    folder = kernel.place(tmp_path)
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps({"argv": ["other"], "display_name": "x", "language": "y"}))
    with pytest.raises(RequestError, match="not a kernel of mlxnb"):
        kernel.remove(tmp_path)
    assert (folder / "kernel.json").exists()


def test_install_where_nothing_can_be_written_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "share").write_text("a file where a folder belongs")
    with pytest.raises(RequestError, match="could not be written"):
        kernel.install(tmp_path)


def test_two_places_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["kernel", "install", "--user", "--prefix", str(tmp_path)])
    assert error.value.code == 2
