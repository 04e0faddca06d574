"""`mlxnb.widget`: one widget with a channel of its own, for hosts without IPython; a host may close it under our feet."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient
from test_live import Comm, apply, ask, client, command, shell, until
from test_routing import Shell

import mlxnb
import mlxnb_widgets
from mlxnb import hosted, views
from mlxnb.api import LanguageModel
from mlxnb.packing import unpack
from mlxnb.playgroundview import Playground
from mlxnb.run import Run, RunGroup
from mlxnb.schema import DeltaMessage, problem
from mlxnb_engine.errors import RequestError

__all__ = ["client", "shell"]


@pytest.fixture(autouse=True)
def host(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Widgets can be shown, and there is no IPython, whatever another test has left."""
    for module in (hosted, views):
        monkeypatch.setattr(module, "get_ipython", lambda: None)
    yield


@pytest.fixture
def model(client: FakeClient) -> LanguageModel:
    return LanguageModel("fake", None, client)


def comm_of(view: Any) -> Comm:
    return next(one for one in Comm.made if one.comm_id == view.model_id)


def ours() -> list[Comm]:
    return [one for one in Comm.made if "kind" in (one.sent[0] or {}).get("state", {})]


def record_of(here: Comm) -> dict[str, Any]:
    """What the front end has: the newest snapshot."""
    return [data["state"]["record"] for data in here.sent if "record" in data.get("state", {})][-1]


def test_a_chat_is_one_widget_that_speaks_for_itself(client: FakeClient, model: LanguageModel) -> None:
    chat = model.chat(system="Be brief.")
    here = comm_of(mlxnb.widget(chat))
    state = here.sent[0]["state"]
    assert (state["kind"], state["session"], ours()) == ("chat", "", [here])
    answer = command(here, state["key"], "chat.send", text="one two three")
    assert answer["ok"] and answer["result"]["schema"] == "mlxnb.chat/1"
    until(lambda: any(item["tokens"] for message in here.custom("delta") for item in message["items"]))
    client.release()
    until(lambda: record_of(here)["runs"] and record_of(here)["runs"][0]["status"] == "done")
    assert [m["content"] for m in chat.messages] == ["Be brief.", "one two three", "one two three "]
    assert all(problem(DeltaMessage, message) is None for message in here.custom("delta"))
    assert "export" in command(here, "", "asset", name="loader.js")["result"]["text"]


def test_the_deltas_of_a_run_add_up_and_it_can_be_branched_after_its_end(client: FakeClient, model: LanguageModel) -> None:
    run = model.generate("one two three", wait=False)
    assert isinstance(run, Run)
    here = comm_of(mlxnb.widget(run, view="tokens"))
    state = here.sent[0]["state"]
    assert (state["kind"], state["setting"]) == ("run", {"view": "tokens"})
    client.release()
    until(lambda: record_of(here)["status"] == "done")
    first = state["record"]
    tokens = unpack(first["tokens"]) if first["tokens"] else []
    drawn = {**first, "tokens": tokens, "text": "".join(token["text"] for token in tokens)}
    for message in here.custom("delta"):
        for item in message["items"]:
            apply(drawn, item)
    assert (drawn["text"], drawn["status"]) == ("one two three ", "done")
    answer = command(here, state["key"], "branch", run=0, at=1)
    assert answer["ok"] and answer["result"]["run"] == 1
    until(lambda: len(record_of(here).get("runs", ())) == 2 and all(one["status"] == "done" for one in record_of(here)["runs"]))
    assert command(here, state["key"], "regenerate")["result"]["run"] == 2
    until(lambda: [one["status"] for one in record_of(here)["runs"]] == ["done"] * 3)


def test_a_group_is_a_comparison(client: FakeClient) -> None:
    here = comm_of(mlxnb.widget(RunGroup(ask(client, samples=3))))
    assert here.sent[0]["state"]["kind"] == "compare" and len(record_of(here)["runs"]) == 3
    assert command(here, here.sent[0]["state"]["key"], "stop", run=1)["ok"]
    until(lambda: [one["status"] for one in record_of(here)["runs"]][1] == "stopped")
    client.release()
    until(lambda: [one["status"] for one in record_of(here)["runs"]] == ["done", "stopped", "done"])


def test_a_widget_that_its_host_closed_is_told_nothing_more(client: FakeClient, model: LanguageModel) -> None:
    chat = model.chat()
    old = comm_of(mlxnb.widget(chat))
    chat.send("one two three", wait=False)
    until(lambda: old.custom("delta"))
    old._closed = True  # type: ignore[attr-defined]  # as marimo does when the cell runs again
    told = len(old.sent)
    new = comm_of(mlxnb.widget(chat))
    client.release()
    until(lambda: record_of(new)["runs"][0]["status"] == "done")
    chat.send("four", wait=False)
    until(lambda: len(record_of(new)["runs"]) == 2 and len(chat) == 4)
    assert len(old.sent) == told
    assert len(chat.changed) == 1, "the view of the closed widget has gone"


def test_views_of_every_kind_have_a_widget_outside_of_ipython_and_one_at_a_time(client: FakeClient, model: LanguageModel) -> None:
    monitor = mlxnb.monitor()
    first = comm_of(mlxnb.widget(monitor))
    assert record_of(first)["state"] == "ready"
    second = comm_of(mlxnb.widget(monitor))
    assert first.closed and not second.closed
    ask(client)
    until(lambda: record_of(second)["models"][0]["rows"] == 1)
    playground = comm_of(mlxnb.widget(Playground(model, "one two", {})))
    assert command(playground, playground.sent[0]["state"]["key"], "playground.run", prompt="three")["ok"]


def test_what_has_no_widget_is_told_in_words(shell: Shell, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no widget of str"):
        mlxnb.widget("text")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="shown in its cell"):
        mlxnb.widget(views.Monitor(shell))
    assert tmp_path == mlxnb_widgets.STATIC
    (tmp_path / "loader.js").unlink()
    with pytest.raises(RequestError, match="not here"):
        mlxnb.widget(mlxnb.monitor())


@pytest.mark.parametrize("first", ["mlxnb.stepperview", "mlxnb.playgroundview", "mlxnb.hosted", "mlxnb.views", "mlxnb.api"])
def test_a_public_name_is_what_it_says_whichever_module_was_imported_first(first: str) -> None:
    """A module of the same name as a function would stand in its place once anything has imported it."""
    names = [name for name in mlxnb.__all__ if not name.startswith("__")]
    code = f"import types, {first}, mlxnb; print([n for n in {names} if isinstance(getattr(mlxnb, n), types.ModuleType)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
    modules = {path.stem for path in Path(mlxnb.__file__).parent.glob("*.py")}
    assert not modules & set(names), "such a module"
    assert len(list(itertools.chain(names))) > 10
