"""Conversations in files: what was written comes back the same, and no other file comes in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient
from hypothesis import given, settings
from hypothesis import strategies as st
from test_conversation import Notebook, shape

from mlxnb import chatfile
from mlxnb.api import LanguageModel
from mlxnb.chat import Chat
from mlxnb.chatfile import MAX_BYTES, export, from_json, read, to_json
from mlxnb.chatnames import CHATS
from mlxnb.chattree import tree_text
from mlxnb.conversation import Conversation
from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import Message


@pytest.fixture
def model() -> Iterator[LanguageModel]:
    client = FakeClient()
    yield LanguageModel("fake", None, client)
    client.close()
    CHATS.clear()


@pytest.fixture
def garden(model: LanguageModel) -> Conversation:
    """Branches, a stale turn with the answer that it follows, ids, a system message, and text of every kind."""
    here = Notebook(model, Conversation("garden", "Be brief."))
    here.run("a", "one")
    here.run("b", 'two "quoted"\n\t\\ \u2028 été 你好 🙂')
    here.run("c", "three", system="Now long.")
    here.run("d", "aside", after="t1")
    here.run("a", "one again")
    here.run("b", "two again")
    return here.tree


def test_what_was_written_comes_back_the_same(garden: Conversation) -> None:
    text = to_json(garden)
    again = from_json(text)
    assert to_json(again) == text and tree_text(again) == tree_text(garden) and shape(again) == shape(garden)
    for old, new in zip(garden.history, again.history, strict=True):
        same = ("id", "question", "answer", "cell", "count", "system", "generated", "model", "seed", "finish", "tokens", "stale")
        assert [getattr(old, name) for name in same] == [getattr(new, name) for name in same]
    assert garden.head is not None and again.head is not None and again.messages(again.head) == garden.messages(garden.head)
    assert [turn.path[0].question for turn in again.turns if turn.id == "t3"] == ["one"], "stale turns keep the answers that they follow"


def test_a_conversation_that_was_read_goes_on(garden: Conversation, model: LanguageModel) -> None:
    chat = Chat.from_json(model, to_json(garden))
    assert (chat.name, chat.messages[0]["content"]) == ("", "Be brief.")
    chat.send("more")
    assert [m["content"] for m in chat.messages[-4:]] == ["two again", "two again ", "more", "more "]
    notebook = Notebook(model, from_json(to_json(garden)))
    notebook.run("c", "three again")
    assert not any(turn.stale for turn in notebook.tree.turns if turn.id != "t4"), "its cells are still known"


def test_files_are_written_whole_and_only_over_our_own(garden: Conversation, model: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "garden.json"
    chat = Chat(model, {}, garden)
    chat.export(path)
    first = path.read_bytes()
    assert first.decode() == to_json(garden) == chat.to_json()
    chat.send("more")
    export(garden, path)
    assert path.read_bytes() != first and [one.name for one in tmp_path.iterdir()] == ["garden.json"]
    assert shape(model.read_chat(path, "kept").tree) == shape(garden) and CHATS.names == ["kept"]
    with pytest.raises(RequestError, match="already"):
        model.read_chat(path, "kept")
    for content in (b"", b"print(1)\n", b'{"schema": "other"}'):
        other = tmp_path / "other"
        other.write_bytes(content)
        with pytest.raises(RequestError, match="left alone"):
            export(garden, other)
        assert other.read_bytes() == content
    with pytest.raises(RequestError, match="left alone"):
        export(garden, tmp_path)
    with pytest.raises(RequestError, match="cannot be written"):
        export(garden, tmp_path / "none" / "x.json")


def test_a_failed_write_leaves_the_old_file(garden: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "garden.json"
    export(garden, path)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RequestError, match="No space left"):
        export(garden, path)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["garden.json"]


# -- files that anybody may have made ----------------------------------------------------------------------------------------


def turn(**more: Any) -> dict[str, Any]:
    plain = {"id": "t1", "parent": None, "replaced_by": None, "question": "q", "answer": "a", "system": None, "cell": "", "count": 1}
    return {**plain, "model": "m", "seed": "7", "finish": "stop", "tokens": 3, "generated": None, **more}


def whole(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"schema": "mlxnb.conversation/1", "name": "garden", "system": None, "head": None, "turns": list(turns), **more}


HOSTILE: dict[str, Any] = {
    "no object": [],
    "nothing": {},
    "another schema": {**whole(), "schema": "mlxnb.chat/1"},
    "a later version": {**whole(), "schema": "mlxnb.conversation/2"},
    "an unknown field": whole(more=1),
    "a missing field": {k: v for k, v in whole().items() if k != "head"},
    "turns that are none": whole(7),
    "a name that is a path": whole(name="../../x"),
    "a name with a line end": whole(name="a\n%mlx"),
    "a turn that follows itself": whole(turn(parent=0)),
    "a turn that follows a later one": whole(turn(parent=1), turn(id="t2")),
    "a negative parent": whole(turn(), turn(id="t2", parent=-1)),
    "a parent that is true": whole(turn(), turn(id="t2", parent=True)),
    "two turns of one id": whole(turn(), turn()),
    "an id with a path": whole(turn(id="t1/../x")),
    "an id of another form": whole(turn(id="1")),
    "an id beyond the places there are": whole(turn(), turn(id="t3", parent=0)),
    "an id after which the next would be too long": whole(turn(id="t999999")),
    "a path with one id twice": whole(turn(replaced_by=2), turn(id="t2", parent=0), turn(parent=1)),
    "an id that is huge": whole(turn(id="t" + "9" * 500)),
    "a head that is not there": whole(turn(), head=1),
    "a head that is negative": whole(turn(), head=-1),
    "a stale head": whole(turn(replaced_by=1), turn(), head=0),
    "a turn replaced by itself": whole(turn(replaced_by=0)),
    "a turn replaced by an earlier one": whole(turn(), turn(replaced_by=0)),
    "a turn replaced by one that is replaced": whole(turn(replaced_by=1), turn(replaced_by=2), turn()),
    "a turn replaced by another place": whole(turn(replaced_by=1), turn(id="t2")),
    "a seed that is too large": whole(turn(seed=str(2**64))),
    "a seed that is a number": whole(turn(seed=7)),
    "a seed of digits that are none of ours": whole(turn(seed="٣")),
    "negative ids": whole(turn(generated={"ids": [-1], "start": 0})),
    "ids beyond any vocabulary": whole(turn(generated={"ids": [2**31], "start": 0})),
    "ids that are text": whole(turn(generated={"ids": ["1"], "start": 0})),
    "ids that are fractions": whole(turn(generated={"ids": [1.0], "start": 0})),
    "a negative start": whole(turn(generated={"ids": [1], "start": -1})),
    "a huge count": whole(turn(count=10**40)),
    "an end that is none": whole(turn(finish="error")),
    "half a character": whole(turn(answer="\ud800")),
    "half a character in the name of a cell": whole(turn(cell="\udfff")),
    "too many turns": whole(*(turn(id=f"t{i + 1}") for i in range(4097))),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_file_that_mlxnb_did_not_write_is_refused_in_words(how: str) -> None:
    with pytest.raises(RequestError) as caught:
        from_json(json.dumps(HOSTILE[how]))
    assert caught.value.hint and len(caught.value.message) < 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garden",
        '{"schema": "mlxnb.conversation/1"',
        '{"schema": "mlxnb.conversation/1", "name": NaN}',
        "[" * 100_000,
        '{"a":' * 100_000,
        json.dumps(whole(turn())).replace('"tokens": 3', '"tokens": 1e999'),
        json.dumps(whole(turn())).replace('"tokens": 3', '"tokens": ' + "9" * 10_000),
        b"\xff\xfe\x00",
        b"\x80",
    ],
)
def test_what_is_no_json_is_refused_too(text: str | bytes) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="no conversation of mlxnb"):
        from_json(text)
    assert time.monotonic() - began < 1.0


def test_the_honest_file_beside_the_hostile_ones_is_read() -> None:
    honest = whole(
        turn(replaced_by=2), turn(id="t2", parent=0), turn(), turn(id="t3", parent=2, generated={"ids": [5], "start": 0}), head=3
    )
    tree = from_json(json.dumps(honest))
    assert shape(tree) == [("t1", None, "q", False), ("t2", "t1", "q", True), ("t3", "t1", "q", False)]
    assert tree.head is not None and tree.head.id == "t3" and from_json(to_json(tree)).turns


def test_what_is_no_file_or_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    pipe, large, missing = tmp_path / "pipe", tmp_path / "large", tmp_path / "missing"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for path, says in ((pipe, "is not a file"), (tmp_path, "cannot be read|is not a file"), (large, "16 MiB"), (missing, "No such file")):
        with pytest.raises(RequestError, match=says):
            read(path)
    with pytest.raises(RequestError, match="is not a file"):
        read("/dev/zero")


@pytest.mark.parametrize("path", ["~nosuchuser/x.json", "a\0b", "half \ud800"])
def test_what_can_name_no_file_is_refused_in_words(garden: Conversation, path: str) -> None:
    for act in (lambda: export(garden, path), lambda: read(path)):
        with pytest.raises(RequestError, match="is no path"):
            act()


def test_a_folder_that_nobody_may_look_into_is_refused_in_words(
    garden: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*args: Any, **more: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(RequestError, match="cannot be written: Permission denied"):
        export(garden, tmp_path / "x.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ids", "start", "schema", "x"]), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_one_field_changed_to_anything_is_refused_or_read_as_it_stands(data: st.DataObject) -> None:
    value = whole(turn(), turn(id="t2", parent=0, generated={"ids": [1, 2], "start": 0}), head=1)
    where = data.draw(st.sampled_from([value, value["turns"][0], value["turns"][1], value["turns"][1]["generated"]]))
    where[data.draw(st.sampled_from([*where]))] = data.draw(JSON)
    try:
        tree = from_json(json.dumps(value))
    except RequestError:
        return
    written = json.loads(to_json(tree))
    assert written == value


def test_the_largest_honest_file_can_be_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Conversation("big")
    tree.begin([Message(("user", "assistant")[i % 2], "x" * 100) for i in range(2000)])  # type: ignore[arg-type]
    export(tree, tmp_path / "big.json")
    assert len(read(tmp_path / "big.json").turns) == 1000
    monkeypatch.setattr(chatfile, "MAX_BYTES", 1000)
    with pytest.raises(RequestError, match="Fork a part"):
        export(tree, tmp_path / "big.json")
    assert (tmp_path / "big.json").stat().st_size > 1000
