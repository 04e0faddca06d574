"""`%%mlx -c NAME` and the commands of chats, in a real IPython shell: cells are told apart by the notebook's own ids."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_client import Failure, FakeClient
from IPython.core.interactiveshell import InteractiveShell
from test_complete import words
from test_magic import engine, refused, run, shell

import mlxnb
from mlxnb import chatmagic, runtime
from mlxnb.api import LanguageModel
from mlxnb.chatnames import CHATS
from mlxnb.routing import cell_id
from mlxnb_engine.client import LocalClient
from mlxnb_engine.config import resolve
from mlxnb_engine.errors import ModelError, RequestError

__all__ = ["engine", "shell"]
Make = Callable[..., FakeClient]


@pytest.fixture(autouse=True)
def no_chats() -> Iterator[None]:
    yield
    CHATS.clear()


class Notebook:
    """Cells with ids, as a front end tells them with each request."""

    def __init__(self, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shell, self.cell = shell, ""
        monkeypatch.setattr(chatmagic, "cell_id", lambda shell: self.cell)

    def run(self, cell: str, text: str) -> Any:
        self.cell = cell
        return run(self.shell, text)

    def refused(self, cell: str, text: str, kind: Any = RequestError) -> str:
        self.cell = cell
        return str(refused(self.shell, text, kind))


@pytest.fixture
def notebook(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(shell, monkeypatch)


def told(client: FakeClient) -> list[str]:
    return [message.content for message in client.requests[-1].messages or ()]


def printed(capsys: pytest.CaptureFixture[str], shell: InteractiveShell, line: str) -> str:
    capsys.readouterr()
    run(shell, line)
    return capsys.readouterr().out


def shape(name: str) -> list[tuple[str, str, bool]]:
    return [(turn.id, turn.question, turn.stale) for turn in CHATS.find(name).turns]


# -- cells -----------------------------------------------------------------------------------------------------------------


def test_cells_go_on_with_a_chat_and_one_that_runs_again_replaces_its_turn(notebook: Notebook, engine: Make) -> None:
    client = engine()
    notebook.run("a", "%%mlx -c garden --system 'Be brief.'\none")
    notebook.run("b", "%%mlx --chat garden\ntwo")
    assert told(client) == ["Be brief.", "one", "one ", "two"]
    assert [request.session for request in client.requests] == ["garden", "garden"]
    notebook.run("a", "%%mlx -c garden --system 'Be brief.'\none again")
    assert told(client) == ["Be brief.", "one again"] and shape("garden") == [("t1", "one again", False), ("t2", "two", True)]
    assert "t2" not in [turn.id for turn in CHATS.find("garden").head.path]  # type: ignore[union-attr]
    notebook.run("b", "%%mlx -c garden\ntwo")
    assert told(client) == ["Be brief.", "one again", "one again ", "two"] and not any(stale for _, _, stale in shape("garden"))


def test_the_history_carries_the_ids_of_its_answers(notebook: Notebook, engine: Make) -> None:
    client = engine()
    notebook.run("a", "%%mlx -c garden --prefill 'So, '\none two")
    notebook.run("b", "%%mlx -c garden\nmore")
    first = client.requests[1].messages[1]  # type: ignore[index]
    assert first.content == "So, one two " and first.generated is not None and (first.generated.ids, first.generated.start) == ((1, 2), 4)


def test_after_begins_a_branch(notebook: Notebook, engine: Make) -> None:
    client = engine()
    for cell, line in (("a", ""), ("b", ""), ("c", "--after t1"), ("d", "--after start")):
        notebook.run(cell, f"%%mlx -c garden {line}\n{cell}")
    assert told(client) == ["d"] and shape("garden") == [("t1", "a", False), ("t2", "b", False), ("t3", "c", False), ("t4", "d", False)]
    assert "has no turn 't9'" in notebook.refused("e", "%%mlx -c garden --after t9\nx")
    assert "-c NAME" in notebook.refused("e", "%%mlx --after t1\nx")


def test_without_ids_of_cells_the_prompt_and_the_chat_tell_them_apart(shell: InteractiveShell, engine: Make) -> None:
    engine()
    shell.user_ns["x"] = 1
    for line in ("one", "two {{ x }}", "one"):
        run(shell, f"%%mlx -c garden\n{line}")
    assert shape("garden") == [("t1", "one", False), ("t2", "two 1", True)]
    shell.user_ns["x"] = 2
    run(shell, "%%mlx -c garden\ntwo {{ x }}")
    run(shell, "%%mlx -c other\none")
    assert shape("garden") == [("t1", "one", False), ("t2", "two 2", False)] and shape("other") == [("t1", "one", False)]


@pytest.mark.parametrize("where", ["is_batch", "is_terminal"])
def test_where_no_cell_runs_again_equal_prompts_are_turns_of_their_own(
    shell: InteractiveShell, engine: Make, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(chatmagic, where, lambda shell: True)
    client = engine(failures=[Failure(ModelError("Broken.", "Fix it."), "bad")])
    for line in ("one", "more", "two", "more"):
        run(shell, f"%%mlx -c garden\n{line}")
    assert shape("garden") == [("t1", "one", False), ("t2", "more", False), ("t3", "two", False), ("t4", "more", False)]
    assert told(client) == ["one", "one ", "more", "more ", "two", "two ", "more"]
    for _ in range(2):  # what failed is asked again in the same place
        refused(shell, "%%mlx -c garden\nbad", ModelError)
        assert told(client)[-3:] == ["more", "more ", "bad"] and len(shape("garden")) == 4


def test_the_id_of_a_cell_is_read_from_its_request() -> None:
    def asked(metadata: Any) -> Any:
        return SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda channel: {"metadata": metadata}))

    address = "vscode-notebook-cell:/home/ada/garden.ipynb#W0sZmlsZQ%3D%3D"
    assert [cell_id(asked(it)) for it in ({"cellId": "a1"}, {"cellId": address}, {}, None, {"cellId": None})] == ["a1", address, "", "", ""]
    assert cell_id(SimpleNamespace()) == ""


def test_two_kernels_know_nothing_of_each_others_chats(notebook: Notebook, engine: Make) -> None:
    """The same notebook twice, ids and all: what tells them apart is that each kernel has its own chats."""
    engine()
    notebook.run("a", "%%mlx -c garden\none")
    kept = {"garden": CHATS.find("garden")}
    CHATS.clear()
    notebook.run("a", "%%mlx -c garden\nother")
    assert shape("garden") == [("t1", "other", False)] and [turn.question for turn in kept["garden"].turns] == ["one"]


def test_restart_and_run_all_makes_the_same_trees(notebook: Notebook, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine()
    cells = [
        ("a", "%%mlx -c garden --system S\none"),
        ("b", "%%mlx -c garden\ntwo"),
        ("c", "%mlx fork garden t1 --as shade"),
        ("d", "%%mlx -c shade\nthree"),
        ("e", "%%mlx -c garden --after t1\nfour"),
    ]

    def all_of_it() -> dict[str, Any]:
        for cell, text in cells:
            notebook.run(cell, text)
        return {name: shape(name) for name in CHATS.names}

    fresh = all_of_it()
    assert fresh == {
        "garden": [("t1", "one", False), ("t2", "two", False), ("t3", "four", False)],
        "shade": [("t1", "one", False), ("t2", "three", False)],
    }
    assert all_of_it() == fresh, "without a restart"
    CHATS.clear()
    assert all_of_it() == fresh


@pytest.mark.parametrize("line", ["-n 2", "--each xs", "--sweep temp=0,1", "--no-template"])
def test_a_turn_is_one_answer(notebook: Notebook, engine: Make, line: str) -> None:
    client = engine()
    notebook.shell.user_ns["xs"] = [1]
    assert "Leave one of them out" in notebook.refused("a", f"%%mlx -c garden {line}\n{{{{ 1 }}}}")
    assert client.requests == [] and CHATS.names == []


def test_the_notebooks_own_system_message_holds_where_a_chat_has_none(notebook: Notebook, engine: Make) -> None:
    client = engine()
    run(notebook.shell, "%config MLXMagics.system = 'D'")
    notebook.run("a", "%%mlx -c garden\none")
    run(notebook.shell, "%config MLXMagics.system = 'E'")
    notebook.run("b", "%%mlx -c garden\ntwo")
    assert told(client)[0] == "D"
    notebook.run("c", "%%mlx -c garden --system F\nthree")
    assert told(client)[0] == "F"


def test_a_failed_cell_leaves_the_chat_and_shows_what_it_had(notebook: Notebook, engine: Make) -> None:
    engine(failures=[Failure(ModelError("no finite score"), text="bad")])
    notebook.run("a", "%%mlx -c garden\none")
    notebook.refused("b", "%%mlx -c garden\nbad words", ModelError)
    assert shape("garden") == [("t1", "one", False)] and notebook.shell.user_ns["_mlx"].text == "bad "
    notebook.refused("a", "%%mlx -c garden\nbad one", ModelError)
    assert shape("garden") == [("t1", "one", False)]
    notebook.run("b", "%%mlx -c garden\ngood")
    assert shape("garden") == [("t1", "one", False), ("t2", "good", False)]


def test_background_cells_of_one_chat_take_turns(notebook: Notebook, engine: Make) -> None:
    client = engine(hold=1)
    notebook.run("a", "%%mlx -c garden --bg\none two")
    said = notebook.refused("b", "%%mlx -c garden --bg\nmore")
    row = client.requests[0].id
    assert "still being written" in said and f"%mlx wait {row}" in said and f"%mlx cancel {row}" in said and "%mlx fork garden" in said
    notebook.run("c", "%%mlx -c other --bg\nelsewhere too")
    client.release()
    run(notebook.shell, "%mlx wait")
    notebook.run("b", "%%mlx -c garden\nmore")
    assert shape("garden") == [("t1", "one two", False), ("t2", "more", False)] and shape("other") == [("t1", "elsewhere too", False)]


def test_what_python_asks_is_waited_for_and_stopped_by_its_name_too(
    notebook: Notebook, engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    client = engine(hold=1)
    chat = LanguageModel("fake", None, client).chat("garden")
    asked = chat.send("one two", wait=False)
    row = asked.request.id
    assert f"%mlx wait {row}" in notebook.refused("a", "%%mlx -c garden\nmore")
    assert f"Running: {row}." in notebook.refused("x", "%mlx wait nobody")
    assert "Stopped 1 running answer." in printed(capsys, notebook.shell, f"%mlx cancel {row}")
    other = chat.send("three four", wait=False)
    later = threading.Timer(0.2, client.release)
    later.start()
    assert "1 answer done." in printed(capsys, notebook.shell, f"%mlx wait {other.request.id}")
    assert other.done and shape("garden") == [("t1", "three four", False)]
    assert "Nothing is running" in notebook.refused("x", f"%mlx wait {row}")


def test_a_chat_that_was_read_from_a_file_chooses_no_model(
    notebook: Notebook, engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    notebook.run("a", "%%mlx -c garden\none")
    path = tmp_path / "g.json"
    run(notebook.shell, f"%mlx export garden {path}")
    value = json.loads(path.read_text())
    value["turns"][0]["model"] = "anybody/model"
    path.write_text(json.dumps(value))
    run(notebook.shell, f"%mlx import {path} --as kept")
    models: list[str] = []
    monkeypatch.setattr("mlxnb.chatview.ChatView.show", lambda view: models.append(view.chat._model.name))
    for name in ("garden", "kept"):
        run(notebook.shell, f"%mlx show {name}")
    assert models == [CHATS.find("garden").turns[0].model, ""]


def test_a_chat_of_cells_is_one_of_python_too(notebook: Notebook, engine: Make) -> None:
    client = engine()
    notebook.run("a", "%%mlx -c garden\none")
    chat = LanguageModel("fake", None, client).chat("garden", temp=0.5)
    chat.send("two")
    chat.after("t1").send("aside")
    assert told(client) == ["one", "one ", "aside"] and client.requests[-1].session == "garden" and mlxnb.chats() == ["garden"]
    chat.head = "t2"
    notebook.run("b", "%%mlx -c garden\nthree")
    assert told(client) == ["one", "one ", "two", "two ", "three"]
    assert [turn.id for turn in chat.turns] == ["t1", "t2", "t3", "t4"] and len(chat.messages) == 6
    fork = chat.fork("t2", "shade")
    fork.send("there")
    assert shape("shade") == [("t1", "one", False), ("t2", "two", False), ("t3", "there", False)]
    with pytest.raises(RequestError, match="no name of a chat"):
        LanguageModel("fake", None, client).chat("a b")


# -- commands ----------------------------------------------------------------------------------------------------------------


def test_chats_and_their_trees_are_listed(notebook: Notebook, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine()
    assert "There is no chat yet" in printed(capsys, notebook.shell, "%mlx chats")
    for cell, text in (("a", "one"), ("b", "two"), ("a", "one again")):
        notebook.run(cell, f"%%mlx -c garden -m fake\n{text}")
    notebook.run("c", "%%mlx -c other\nelsewhere")
    table = printed(capsys, notebook.shell, "%mlx chats").splitlines()
    assert [line.split()[:4] for line in table] == [
        ["chat", "turns", "stale", "head"],
        ["garden", "2", "1", "t1"],
        ["other", "1", "t1", "elsewhere"],
    ]
    drawing = printed(capsys, notebook.shell, "%mlx show garden")
    assert "● t1  one again" in drawing and "└─◌ t2  two" in drawing and drawing.count("stale") >= 2 and "head" in drawing


def test_the_tree_is_shown_as_html_without_any_markup_of_ours_being_theirs(notebook: Notebook, engine: Make) -> None:
    from mlxnb.chatview import tree_bundle

    engine()
    notebook.run("a", "%%mlx -c garden --system '<b>x</b>'\n<script>alert(1)</script> $a$")
    bundle = tree_bundle(CHATS.find("garden"))
    assert set(bundle) == {"text/plain", "text/html"}
    assert "<script" not in bundle["text/html"] and "&lt;script" in bundle["text/html"] and "<b>x" not in bundle["text/html"]
    assert "<script>alert(1)</script>" in bundle["text/plain"]


def test_fork_reset_export_and_import(
    notebook: Notebook, engine: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = engine()
    monkeypatch.chdir(tmp_path)
    notebook.run("a", "%%mlx -c garden\none")
    notebook.run("b", "%%mlx -c garden\ntwo")
    assert "garden-2 goes on after turn t2" in printed(capsys, notebook.shell, "%mlx fork garden")
    assert "shade goes on after turn t1" in printed(capsys, notebook.shell, "%mlx fork garden t1 --as=shade")
    assert "2 turns written to g.json" in printed(capsys, notebook.shell, "%mlx export garden g.json")
    assert json.loads((tmp_path / "g.json").read_text())["schema"] == "mlxnb.conversation/1"
    assert "garden is empty; 2 turns forgotten" in printed(capsys, notebook.shell, "%mlx reset garden")
    assert shape("garden") == []
    assert "already" in notebook.refused("x", "%mlx import g.json")
    assert "again: 2 turns read" in printed(capsys, notebook.shell, "%mlx import g.json --as again")
    notebook.run("b", "%%mlx -c again\ntwo again")
    assert told(client) == ["one", "one ", "two again"] and shape("again") == [("t1", "one", False), ("t2", "two again", False)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("show", "show CHAT"),
        ("show nobody", "There is no chat 'nobody'"),
        ("show gardne", "Did you mean 'garden'?"),
        ("show garden x", "one word too many"),
        ("fork", "fork CHAT [TURN] [--as NEW]"),
        ("fork garden t9", "has no turn 't9'"),
        ("fork garden --as", "no name of a chat"),
        ("fork garden --to x", "There is no --to"),
        ("fork garden t1 t2", "one word too many"),
        ("fork garden --as garden", "already"),
        ("reset", "reset CHAT"),
        ("export garden", "export CHAT FILE"),
        ("import nowhere.json", "cannot be read"),
        ("chats x", "one word too many"),
    ],
)
def test_a_command_that_cannot_be_says_what_can(notebook: Notebook, engine: Make, line: str, says: str) -> None:
    engine()
    notebook.run("a", "%%mlx -c garden\none")
    assert says in notebook.refused("b", f"%mlx {line}")


def test_names_and_turns_are_completed(notebook: Notebook, engine: Make) -> None:
    engine()
    for cell, text in (("a", "one"), ("b", "two")):
        notebook.run(cell, f"%%mlx -c garden\n{text}")
    notebook.run("c", "%%mlx -c grove\nthree")
    ip = notebook.shell
    assert words(ip, "%%mlx -c g") == ["garden", "grove"] and words(ip, "%%mlx --chat gr") == ["grove"]
    assert words(ip, "%%mlx -c garden --after ") == ["start", "t1", "t2"] and words(ip, "%%mlx --chat=grove --after t") == ["t1"]
    assert words(ip, "%mlx show g") == ["garden", "grove"] and words(ip, "%mlx fork garden t") == ["t1", "t2"]
    assert words(ip, "%mlx fork garden t1 --") == ["--as"] and words(ip, "%mlx reset gr") == ["grove"]


# -- the real engine -----------------------------------------------------------------------------------------------------------


def test_over_a_real_engine_each_prompt_begins_with_what_was_consumed(notebook: Notebook, tiny_model: Path) -> None:
    """Ids of a tiny model with random weights: its text hardly ever encodes to the ids that it drew."""
    runtime.use(lambda settings: LocalClient(resolve({}, {"blas": "none", "model": str(tiny_model)})))
    prepared: list[Any] = []
    texts = ["What is it?", "And then?", "Why?", "And the sea?"]
    from mlxnb_engine.prompt import PromptPreparer

    real = PromptPreparer.prepare

    def prepare(self: PromptPreparer, request: Any) -> Any:
        prepared.append(real(self, request))
        return prepared[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptPreparer, "prepare", prepare)
        consumed: tuple[int, ...] = ()
        for number, text in enumerate(texts):
            answer = notebook.run(f"cell {number}", f"%%mlx -c garden --temp 1.2 --seed {number} --max-tokens 40\n{text}")
            prompt = prepared[-1]
            assert prompt.ids[: len(consumed)] == consumed, "what the last row consumed begins this prompt"
            assert prompt.spliced == sum(turn.tokens for turn in CHATS.find("garden").turns[:-1])
            assert answer.usage["prompt_tokens"] == len(prompt.ids)
            ids = tuple(token.id for token in answer.tokens)
            consumed = prompt.ids + ids
        model = mlxnb.load(str(tiny_model))
        model.generate([*model.chat("garden").messages, {"role": "user", "content": "x"}], max_tokens=1)
        assert prepared[-1].spliced == 0 and prepared[-1].ids[: len(consumed)] != consumed, "the fixture does diverge"
