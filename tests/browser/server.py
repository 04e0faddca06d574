"""`JupyterServer`: JupyterLab and Notebook 7 on 127.0.0.1 with a folder, a home, settings, kernels and extensions of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 120.0
SOURCES = (ROOT, ROOT / "engine", ROOT / "widgets", ROOT / "tests", ROOT / "tests" / "browser")

SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False, "renameUntitledFileOnSave": False},
    "@jupyterlab/notebook-extension:tracker": {"kernelShutdown": False, "recordTiming": False},
}


def shared_data() -> Path:
    """The folder `share/jupyter` of the environment that JupyterLab is installed in, which need not be this one's prefix."""
    distribution = importlib.metadata.distribution("jupyterlab")
    for file in distribution.files or ():
        if file.as_posix().endswith("share/jupyter/lab/static/index.html"):
            return Path(str(distribution.locate_file(file))).resolve().parent.parent.parent
    raise RuntimeError("This installation of JupyterLab has no application folder: reinstall the package jupyterlab.")


def our_labextensions() -> list[Path]:
    """Folders of prebuilt extensions that the checkout has built: each holds a package.json with a `jupyterlab` entry."""
    found = []
    for package in sorted((ROOT / "labextension").glob("**/package.json")):
        if "node_modules" in package.parts:
            continue
        described = json.loads(package.read_text("utf-8"))
        if "_build" in (described.get("jupyterlab") or {}):
            found.append(package.parent)
    return found


class JupyterServer:
    """Owner: the session's fixture. Everything it and its kernels write stays under `root`; `close` ends it with its kernels."""

    def __init__(self, root: Path, env: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.notebooks = root / "notebooks"
        self.data = root / "jupyter" / "data"
        self.token = secrets.token_hex(16)
        for name in ("notebooks", "home", "jupyter/data", "jupyter/config", "jupyter/runtime", "ipython"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._write_settings()
        self._link_extensions()
        self.env = {**self._environment(), **(env or {})}
        self.kernel("python3", "Python 3")
        self._log = root / "server.log"
        self._process = self._start()
        self.url = self._wait_until_up()

    def _environment(self) -> dict[str, str]:
        drop = ("JUPYTER", "IPYTHON", "MLXNB_", "JPY_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        config = self.root / "jupyter" / "config"
        return {
            **env,
            "HOME": str(self.root / "home"),
            "JUPYTER_DATA_DIR": str(self.data),
            "JUPYTER_CONFIG_DIR": str(config),
            "JUPYTER_RUNTIME_DIR": str(self.root / "jupyter" / "runtime"),
            "JUPYTER_PATH": str(shared_data()),
            "JUPYTER_NO_CONFIG": "",
            "JUPYTERLAB_SETTINGS_DIR": str(config / "lab" / "user-settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(config / "lab" / "workspaces"),
            "IPYTHONDIR": str(self.root / "ipython"),
            "PYTHONPATH": os.pathsep.join([*map(str, SOURCES), env.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _write_settings(self) -> None:
        for name, values in SETTINGS.items():
            package, _, plugin = name.partition(":")
            path = self.root / "jupyter" / "config" / "lab" / "user-settings" / package / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values), "utf-8")

    def _link_extensions(self) -> None:
        for built in our_labextensions():
            name = json.loads((built / "package.json").read_text("utf-8"))["name"]
            link = self.data / "labextensions" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(built, target_is_directory=True)

    def kernel(self, name: str, title: str, env: Mapping[str, str] | None = None, argv: list[str] | None = None) -> str:
        """Declare a kernel that runs this Python with these variables on top; returns its name."""
        folder = self.data / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "argv": argv or [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": title,
            "language": "python",
            "metadata": {"debugger": False},
            "env": {**self._kernel_paths(), **(env or {})},
        }
        (folder / "kernel.json").write_text(json.dumps(spec), "utf-8")
        return name

    def _kernel_paths(self) -> dict[str, str]:
        return {"PYTHONPATH": self.env["PYTHONPATH"]}

    def _start(self) -> subprocess.Popen[bytes]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--app-dir={shared_data() / 'lab'}"]
        extensions = {"jupyterlab": True, "notebook": True, "jupyter_lsp": False, "jupyter_server_terminals": False}
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": port,
            "ServerApp.root_dir": str(self.notebooks),
            "IdentityProvider.token": self.token,
            "ServerApp.open_browser": False,
            "ServerApp.jpserver_extensions": repr(extensions),
            "LabApp.expose_app_in_browser": True,
            "JupyterNotebookApp.expose_app_in_browser": True,
            "LabApp.extension_manager": "readonly",
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            "LabApp.news_url": "None",
            "MappingKernelManager.shutdown_wait_time": 2,
        }
        command += [f"--{name}={value}" for name, value in options.items()]
        log = self._log.open("wb")
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(command, env=self.env, cwd=self.root, start_new_session=True, **streams)

    def _wait_until_up(self) -> str:
        """The port is what the server says: another process may have taken the one that was free."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            for file in (self.root / "jupyter" / "runtime").glob("jpserver-*.json"):
                try:
                    url = str(json.loads(file.read_text("utf-8"))["url"])
                    urllib.request.urlopen(f"{url}api/status?token={self.token}", timeout=5).close()
                    return url
                except (OSError, ValueError, urllib.error.URLError):
                    pass
            time.sleep(0.2)
        self.close()
        raise RuntimeError("JupyterLab did not start:\n" + self._log.read_text("utf-8", "replace")[-4000:])

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def close(self) -> None:
        """End the server; it ends its kernels. After 10 s its whole process group is killed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(5)
