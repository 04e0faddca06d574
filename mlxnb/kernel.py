"""The kernel "Python (MLX)": IPython's kernel with mlxnb loaded, and its installation. No model is loaded before a prompt."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir):
    # A file of the notebook's folder must not stand in for a module that the kernel needs. IPython puts the folder back.
    del sys.path[0]

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxnb_engine.errors import RequestError

if TYPE_CHECKING:
    from jupyter_client.kernelspec import KernelSpecManager

NAME = "mlxnb"
DISPLAY_NAME = "Python (MLX)"
EXTENSION = "mlxnb"
RESOURCES = Path(__file__).parent / "kernelspec"
"""Data files of the wheel too: share/jupyter/kernels/mlxnb."""


def main(argv: list[str] | None = None) -> None:
    """Run the kernel until it is shut down. argv: `-f CONNECTION_FILE` and any option of ipykernel."""
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelapp import IPKernelApp
    from traitlets import List, Type, Unicode

    class MLXKernel(IPythonKernel):
        """IPython's kernel under a banner of its own; for a front end it stays an IPython kernel."""

        @property
        def banner(self) -> str:
            text = "Python (MLX): %%mlx sends a cell to a language model, %mlx help says the rest.\n"
            return f"{super().banner}{text}"

    class MLXKernelApp(IPKernelApp):
        """Starts the kernel and has IPython load mlxnb; should that fail, the traceback is logged and Python works."""

        kernel_class = Type(MLXKernel, klass=IPythonKernel, config=True)
        default_extensions = List(Unicode(), ["storemagic", EXTENSION])  # IPython's own, and ours

    MLXKernelApp.launch_instance(argv)


# -- installation ----------------------------------------------------------------------------------------------------------


def spec(python: str) -> dict[str, Any]:
    """The kernelspec for one Python executable, so that any JupyterLab on the machine can start it."""
    described: dict[str, Any] = json.loads((RESOURCES / "kernel.json").read_text("utf-8"))
    described["argv"][0] = python
    from ipykernel.kernelspec import get_kernel_dict

    # What the installed ipykernel can do, such as encryption, is not known to the data file of a wheel.
    described["metadata"] |= get_kernel_dict().get("metadata", {})
    return described


def install(prefix: Path | None = None, python: str = sys.executable) -> Path:
    """Write the kernelspec for this Python; where it lies. prefix: None is the user's own folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / NAME
        shutil.copytree(RESOURCES, folder)
        (folder / "kernel.json").write_text(json.dumps(spec(python), indent=1) + "\n", "utf-8")
        try:
            placed = _specs().install_kernel_spec(str(folder), NAME, user=prefix is None, prefix=None if prefix is None else str(prefix))
        except OSError as error:
            raise RequestError(f"The kernel could not be written: {error}.", "Choose another place with --user or --prefix.") from error
    return Path(placed)


def remove(prefix: Path | None = None) -> Path:
    """Delete what `install` wrote there; where it lay. Raises RequestError if there is none, or if it is not ours."""
    folder = place(prefix)
    if not (folder / "kernel.json").is_file():
        raise RequestError(f"There is no kernel {NAME} in {folder.parent}.", "`jupyter kernelspec list` shows where it is.")
    if "mlxnb.kernel" not in json.loads((folder / "kernel.json").read_text("utf-8")).get("argv", []):
        raise RequestError(f"{folder} is not a kernel of mlxnb.", "Remove it with: jupyter kernelspec remove mlxnb")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise RequestError(f"The kernel could not be removed: {error}.", "It may belong to another user.") from error
    return folder


def place(prefix: Path | None) -> Path:
    """The folder of the kernelspec in the user's folder (None) or under a prefix."""
    if prefix is None:
        return Path(_specs().user_kernel_dir) / NAME
    return prefix / "share" / "jupyter" / "kernels" / NAME


def _specs() -> KernelSpecManager:
    from jupyter_client.kernelspec import KernelSpecManager

    return KernelSpecManager()


if __name__ == "__main__":
    main()
