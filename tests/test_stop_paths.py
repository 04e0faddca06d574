"""Stop reaches a real kernel while a cell runs: on the control channel, and on a subshell where the kernel has them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipykernel
import pytest
from jupyter_client.manager import start_new_kernel

from mlxnb.schema import RUN_MIME

ROOT = Path(__file__).resolve().parent.parent

SETUP = """
import sys
sys.path[:0] = {paths!r}
import mlxnb_widgets, pathlib
mlxnb_widgets.STATIC = pathlib.Path({static!r})
from fake_client import FakeClient
from mlxnb import runtime
%load_ext mlxnb
early = sorted({{"ipywidgets", "anywidget"}} & set(sys.modules))
fake = FakeClient(hold=2)
runtime.use(lambda config: fake)
print("early", early)
"""


class Kernel:
    """One kernel and what it published."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self.client = client
        self.seen: list[dict[str, Any]] = []

    def run(self, code: str) -> str:
        return str(self.client.execute(code))

    def until(self, wanted: Any, seconds: float = 30.0) -> dict[str, Any]:
        """The first message, seen already or still to come, for which `wanted` is true."""
        deadline = time.monotonic() + seconds
        for message in self.seen:
            if wanted(message):
                return message
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            self.seen.append(message)
            if wanted(message):
                return message
        raise AssertionError("the kernel did not say it")

    def idle(self, parent: str) -> None:
        self.until(lambda m: m["parent_header"].get("msg_id") == parent and m["content"].get("execution_state") == "idle")

    def send(self, channel: Any, kind: str, content: dict[str, Any], **header: Any) -> str:
        message = self.client.session.msg(kind, content)
        message["header"].update(header)
        channel.send(message)
        return str(message["header"]["msg_id"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    static = tmp_path_factory.mktemp("static")
    (static / "loader.js").write_text("export default {}")
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        made = Kernel(manager, client)
        paths = [str(ROOT / name) for name in ("tests", "engine", "widgets", ".")]
        made.idle(made.run(SETUP.format(paths=paths, static=str(static))))
        yield made
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def started(kernel: Kernel, word: str) -> tuple[str, str, str]:
    """Run a cell that waits; its message id, the key of its view and the comm of the session."""
    cell = kernel.run(f"%%mlx\n{word} two three four")
    view = kernel.until(
        lambda m: (
            m["msg_type"] == "comm_open"
            and m["parent_header"]["msg_id"] == cell
            and m["content"]["data"].get("state", {}).get("kind") == "run"
        )
    )["content"]["data"]["state"]
    kernel.until(lambda m: m["msg_type"] == "display_data" and m["parent_header"]["msg_id"] == cell)
    return cell, view["key"], view["session"].removeprefix("IPY_MODEL_")


def stop(key: str, session: str, name: str) -> dict[str, Any]:
    content = {"type": "command", "id": name, "key": key, "name": "stop", "args": {}}
    return {"comm_id": session, "data": {"method": "custom", "content": content}}


def ended_as_stopped(kernel: Kernel, cell: str, word: str, name: str) -> None:
    answer = kernel.until(lambda m: m["msg_type"] == "comm_msg" and m["content"]["data"].get("content", {}).get("id") == name)
    assert answer["content"]["data"]["content"]["ok"]
    kernel.idle(cell)
    last = [m["content"]["data"] for m in kernel.seen if m["msg_type"] == "update_display_data" and m["parent_header"]["msg_id"] == cell][
        -1
    ]
    assert last["text/plain"] == f"{word} two " and last[RUN_MIME]["status"] == "stopped"
    kernel.run(f"print('after {word}')")
    kernel.until(lambda m: m["msg_type"] == "stream" and f"after {word}" in m["content"]["text"])


def test_loading_the_extension_imports_no_widgets(kernel: Kernel) -> None:
    said = kernel.until(lambda m: m["msg_type"] == "stream" and "early" in m["content"]["text"])
    assert said["content"]["text"].strip() == "early []"


def test_stop_is_answered_on_the_control_channel_while_the_cell_runs(kernel: Kernel) -> None:
    cell, key, session = started(kernel, "control")
    kernel.send(kernel.client.control_channel, "comm_msg", stop(key, session, "by-control"))
    ended_as_stopped(kernel, cell, "control", "by-control")


def test_stop_is_answered_on_a_subshell_while_the_cell_runs(kernel: Kernel) -> None:
    info = kernel.client.kernel_info(reply=True, timeout=30)["content"]
    if "kernel subshells" not in info.get("supported_features", []):
        assert int(ipykernel.__version__.split(".")[0]) < 7  # it has the control channel and the interrupt
        return
    kernel.send(kernel.client.control_channel, "create_subshell_request", {})
    subshell = ""
    while not subshell:
        subshell = kernel.client.get_control_msg(timeout=30)["content"].get("subshell_id", "")
    cell, key, session = started(kernel, "subshell")
    kernel.send(kernel.client.shell_channel, "comm_msg", stop(key, session, "by-subshell"), subshell_id=subshell)
    ended_as_stopped(kernel, cell, "subshell", "by-subshell")


def test_a_channel_that_the_front_end_opens_completes_and_stops_all(kernel: Kernel) -> None:
    opened = {"comm_id": "front", "target_name": "mlxnb.session", "data": {}}
    kernel.send(kernel.client.shell_channel, "comm_open", opened)
    ask = {"type": "command", "id": "c", "key": "", "name": "complete", "args": {"text": "%%mlx --te", "cursor": 10}}
    kernel.send(kernel.client.shell_channel, "comm_msg", {"comm_id": "front", "data": ask})
    answer = kernel.until(lambda m: m["msg_type"] == "comm_msg" and m["content"]["data"].get("id") == "c")["content"]["data"]
    assert answer["ok"] and "--temp" in answer["result"]["matches"] and (answer["result"]["start"], answer["result"]["end"]) == (6, 10)
    cell, _, _ = started(kernel, "all")
    every = {"type": "command", "id": "s", "key": "", "name": "stop_all", "args": {}}
    kernel.send(kernel.client.control_channel, "comm_msg", {"comm_id": "front", "data": every})
    kernel.idle(cell)


@pytest.mark.parametrize("how", ["button", "interrupt"])
def test_a_cell_that_is_stopped_in_a_long_step_ends_at_once_and_its_answer_is_shown_when_the_step_is_over(kernel: Kernel, how: str) -> None:
    kernel.idle(kernel.run("import time; fake._between = lambda: len(fake.generations[-1].read()) > 2 and time.sleep(1.5)"))
    cell, key, session = started(kernel, how)
    kernel.until(lambda m: f'{how} "' in json.dumps(m["content"]))  # the first word of the answer is shown, in whatever form
    if how == "button":
        kernel.send(kernel.client.control_channel, "comm_msg", stop(key, session, "in-a-step"))
    else:
        kernel.manager.interrupt_kernel()
    began = time.monotonic()
    kernel.idle(cell)
    assert time.monotonic() - began < 1.0
    assert not [m for m in kernel.seen if stays(m, how)]
    ended = kernel.until(lambda m: stays(m, how))
    assert ended["content"]["data"][RUN_MIME]["status"] == "stopped"
    kernel.idle(kernel.run("fake._between = None"))
    kernel.idle(kernel.run("assert _mlx.status == 'stopped'"))


def stays(message: dict[str, Any], word: str) -> bool:
    """The bundle that stays of the answer that begins with this word."""
    data = message["content"].get("data", {})
    return message["msg_type"] == "update_display_data" and RUN_MIME in data and data["text/plain"].startswith(word)
