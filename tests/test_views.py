"""Views that stay open: chat, playground, stepper and monitor, driven by the commands that their scripts send."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient
from test_live import Comm, client, command, session_comm, shell, until
from test_routing import Shell

from mlxnb import frontend, views
from mlxnb.api import Chat, LanguageModel
from mlxnb.chatnames import CHATS
from mlxnb.chatview import ChatView
from mlxnb.history import KEPT, LABELS, History
from mlxnb.playgroundview import Playground
from mlxnb.schema import RUN_MIME, WIDGET_MIME
from mlxnb.stepperview import Stepper, step_record
from mlxnb_engine.client import LocalClient
from mlxnb_engine.config import resolve
from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import Message

__all__ = ["client", "shell"]


@pytest.fixture
def model(client: FakeClient) -> LanguageModel:
    return LanguageModel("fake", None, client)


def view_comm(kind: str) -> Comm:
    return next(one for one in reversed(Comm.made) if one.sent[0] and one.sent[0]["state"].get("kind") == kind)


def trait(kind: str) -> dict[str, Any]:
    """The newest record that the front end was given."""
    here = view_comm(kind)
    updates = [data["state"]["record"] for data in here.sent[1:] if data["method"] == "update" and "record" in data["state"]]
    return (updates or [here.sent[0]["state"]["record"]])[-1]


def settled(kind: str) -> dict[str, Any]:
    """The record once none of its runs lives."""
    return until(lambda: (found := trait(kind)) and all(run["status"] in ("done", "stopped", "failed") for run in found["runs"]) and found)


# -- chat ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_chats() -> Iterator[None]:
    yield
    CHATS.clear()


@pytest.fixture
def chat(shell: Shell, client: FakeClient, model: LanguageModel) -> Iterator[ChatView]:
    client.release()
    view = ChatView(model.chat(system="Be brief."), shell)
    view.show()
    yield view


def said(record: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(turn["role"], turn["text"] if turn["run"] is None else turn["run"]) for turn in record["turns"]]


def test_a_chat_goes_on_in_its_view_and_the_object_has_it(chat: ChatView) -> None:
    answer = command(session_comm(), chat.key, "chat.send", text="hello there")
    assert answer["ok"] and answer["result"]["schema"] == "mlxnb.chat/1" and answer["result"]["epoch"] == 1
    record = settled("chat")
    assert said(record) == [("system", "Be brief."), ("user", "hello there"), ("assistant", 0)]
    assert [m["content"] for m in chat.chat.messages] == ["Be brief.", "hello there", "hello there "]
    command(session_comm(), chat.key, "chat.send", text="more")
    until(lambda: len(chat.chat) == 4)
    assert said(settled("chat"))[-2:] == [("user", "more"), ("assistant", 1)]


def test_an_edited_question_is_a_branch_beside_the_first(chat: ChatView) -> None:
    for text in ("one", "two"):
        command(session_comm(), chat.key, "chat.send", text=text)
        until(lambda: chat.stream.done)
    assert command(session_comm(), chat.key, "chat.edit", turn="t1.q", text="other")["ok"]
    until(lambda: len(chat.chat) == 2)
    record = settled("chat")
    assert chat.chat.messages[1]["content"] == "other" and said(record)[1:] == [("user", "other"), ("assistant", 0)]
    assert [turn["others"] for turn in record["turns"][1:]] == [["t1", "t3"], []]
    assert [(row["id"], row["on_path"], row["head"]) for row in record["tree"]] == [
        ("t1", False, False),
        ("t2", False, False),
        ("t3", True, True),
    ]
    for turn in ("t1.a", "t8.q", "tx", "", "t-2.q", "system", "new.q", "t1"):
        assert not command(session_comm(), chat.key, "chat.edit", turn=turn, text="x")["ok"]
    assert chat.chat.messages[1]["content"] == "other"
    back = command(session_comm(), chat.key, "chat.go", turn="t1")["result"]
    assert said(back)[1:] == [("user", "one"), ("assistant", 0), ("user", "two"), ("assistant", 1)]
    exact = command(session_comm(), chat.key, "chat.go", turn="t1", exact=True)["result"]
    assert said(exact)[1:] == [("user", "one"), ("assistant", 0)] and chat.chat.head is chat.chat.turns[0]


def test_another_answer_stands_beside_the_first(chat: ChatView, client: FakeClient) -> None:
    command(session_comm(), chat.key, "chat.send", text="one")
    until(lambda: len(chat.chat) == 2)
    assert command(session_comm(), chat.key, "chat.regenerate")["ok"]
    until(lambda: len(chat.chat.turns) == 2 and len(client.requests) == 2)
    assert client.requests[0].messages == client.requests[1].messages
    record = settled("chat")
    assert [turn["others"] for turn in record["turns"][1:]] == [[], ["t1", "t2"]] and record["turns"][2]["turn"] == "t2"
    assert command(session_comm(), chat.key, "chat.regenerate", turn="t1.a")["ok"]
    until(lambda: len(chat.chat.turns) == 3)
    assert len(chat.chat) == 2 and not command(session_comm(), chat.key, "chat.regenerate", turn="t1.q")["ok"]


def test_a_fork_from_the_view_has_a_name_that_cells_can_use(chat: ChatView) -> None:
    command(session_comm(), chat.key, "chat.send", text="one")
    until(lambda: len(chat.chat) == 2)
    answer = command(session_comm(), chat.key, "chat.fork", turn="t1")
    assert answer["ok"] and CHATS.names == ["chat-1"] and "-c chat-1" in answer["result"]["note"]
    assert [turn.question for turn in CHATS.find("chat-1").turns] == ["one"]
    assert not command(session_comm(), chat.key, "chat.fork", turn="t9")["ok"]


def test_stale_turns_stand_below_those_that_are_told_and_can_be_kept(shell: Shell, client: FakeClient, model: LanguageModel) -> None:
    client.release()
    view = ChatView(model.chat("garden"), shell)
    tree = view.chat.tree

    def ask(cell: str, text: str) -> None:
        tree.ask(text, lambda told: model.submit(model.request(told, {})), cell=cell, count=len(tree.turns) + 1).result()

    for cell, text in (("a", "one"), ("b", "two"), ("c", "three"), ("a", "one again")):
        ask(cell, text)
    record = view.record()
    assert [(turn["text"], turn["stale"]) for turn in record["turns"] if turn["role"] == "user"] == [
        ("one again", False),
        ("two", True),
        ("three", True),
    ]
    assert [turn["text"] for turn in record["turns"] if turn["stale"] and turn["role"] == "assistant"] == ["two ", "three "]
    assert "garden-2" in view.commands["chat.fork"]({"turn": "t3"})["note"]
    kept = CHATS.find("garden-2")
    assert [turn.question for turn in kept.turns] == ["one", "two", "three"] and not any(turn.stale for turn in kept.turns)


def test_a_branch_that_is_stopped_can_be_asked_again_or_left(shell: Shell, client: FakeClient, model: LanguageModel) -> None:
    view = ChatView(model.chat(), shell)
    view.show()
    view.chat.tree.begin([Message("user", "one"), Message("assistant", "1")])
    view.chat.send("one two three", wait=False, after="start")
    record = view.record()
    assert [(turn["turn"], turn["others"]) for turn in record["turns"]] == [("new", ["t1", "new"]), ("new", [])]
    assert not command(session_comm(), view.key, "chat.go", turn="t1")["ok"], "an answer is being written"
    assert command(session_comm(), view.key, "stop")["ok"]
    record = settled("chat")
    assert record["runs"][0]["status"] == "stopped" and len(view.chat.turns) == 1
    assert command(session_comm(), view.key, "chat.go", turn="t1")["ok"]
    assert [turn["text"] for turn in trait("chat")["turns"]] == ["one", "1"]


def test_a_turn_from_python_shows_in_the_view_and_a_second_one_at_once_is_refused(
    shell: Shell, client: FakeClient, model: LanguageModel
) -> None:
    view = ChatView(model.chat(), shell)
    view.show()
    view.chat.send("one two three", wait=False)
    until(lambda: trait("chat")["turns"])
    answer = command(session_comm(), view.key, "chat.send", text="too soon")
    assert not answer["ok"] and "still being written" in answer["error"]
    assert command(session_comm(), view.key, "stop")["ok"]
    record = settled("chat")
    assert record["runs"][0]["status"] == "stopped" and len(view.chat) == 0 and len(record["turns"]) == 2
    assert command(session_comm(), view.key, "chat.reset")["result"]["turns"] == []


def test_closing_a_chat_leaves_its_text(chat: ChatView, shell: Shell) -> None:
    command(session_comm(), chat.key, "chat.send", text="hello <b>")
    until(lambda: len(chat.chat) == 2)
    chat.close()
    data = shell.messages()[-1][2]["data"]
    assert WIDGET_MIME not in data and "hello <b>" in data["text/plain"] and "<b>" not in data["text/html"]
    assert not command(session_comm(), chat.key, "chat.send", text="x")["ok"]
    assert isinstance(chat.chat, Chat) and "hello" in chat.chat._repr_mimebundle_()["text/html"]


# -- playground ------------------------------------------------------------------------------------------------------------


def test_a_change_in_the_playground_stops_the_answer_before_it(shell: Shell, client: FakeClient, model: LanguageModel) -> None:
    view = Playground(model, "one two three four", {"temp": 0.5}, shell)
    first = view.ask(view.prompt, view.mode, view.settings)
    view.show()
    answer = command(session_comm(), view.key, "playground.run", prompt="other words here", settings={"temp": 1.0, "max_tokens": 2})
    assert answer["ok"] and answer["result"]["settings"]["temp"] == 1.0 and answer["result"]["epoch"] == 2
    assert first.generation.cancel_requested and client.requests[-1].sampling.temp == 1.0
    client.release()
    assert settled("playground")["prompt"] == "other words here" and len(trait("playground")["runs"]) == 1


class Opinionated(LanguageModel):
    """A model whose files say how it likes to be sampled."""

    @property
    def info(self) -> dict[str, Any]:
        return {"name": "fake", "defaults": {"temp": 0.9, "top_p": 0.25}}


def test_the_playground_shows_what_is_in_force_with_what_the_model_prefers(shell: Shell, client: FakeClient) -> None:
    view = Playground(Opinionated("fake", None, client), "one two", {"top_k": 4}, shell)
    shown = view.record()["settings"]
    assert {name: shown[name] for name in ("temp", "top_p", "top_k", "min_p", "max_tokens", "seed")} == {
        "temp": 0.7,  # of the playground itself
        "top_p": 0.25,
        "top_k": 4,
        "min_p": 0.0,
        "max_tokens": 128,
        "seed": 0,
    }
    view.ask("one two", "chat", view.settings)
    assert "top_p" in client.requests[-1].open_fields and "top_p" not in view.settings


def test_wrong_settings_are_refused_in_words_and_the_answer_goes_on(shell: Shell, client: FakeClient, model: LanguageModel) -> None:
    view = Playground(model, "one two three", {}, shell)
    run = view.ask(view.prompt, view.mode, view.settings)
    view.show()
    for settings in ({"temp": -1}, {"tmep": 1}, {"top_p": "x"}, {"max_tokens": 1.5}, {"template": False}, {"n": 4}):
        answer = command(session_comm(), view.key, "playground.run", prompt="x", settings=settings)
        assert answer["ok"] is False and answer["error"], settings
    assert view.prompt == "one two three" and not run.generation.cancel_requested and len(client.requests) == 1


# -- stepper ---------------------------------------------------------------------------------------------------------------


class Inspected(LanguageModel):
    """A model whose next tokens are known: candidates 10, 11, 12 at every position, the likeliest chosen, ended after five."""

    def inspect(self, prompt: Any, tokens: Any = (), *, candidates: int = 20, **options: Any) -> dict[str, Any]:
        self.asked = (list(tokens), options)
        if len(tokens) >= 5:
            raise RequestError("The answer so far has ended: there is no next token.", "Take back its last token.")
        listed = [
            {"id": 10 + i, "text": f"w{i}", "score": 5.0 - i, "penalised": 5.0 - i, "logprob": math.log(p), "dropped_by": gone}
            for i, (p, gone) in enumerate([(0.6, None), (0.3, None), (0.05, "top_p")])
        ]
        totals = {"vocab": 100, "logsumexp": 5.5, "coin": None, "left": {"top_p": 2}, "mass": {"top_p": 0.9}}
        return {"position": len(tokens), "text": "", "chosen": 10, "seed": 0, "stages": ["score"], "candidates": listed, **totals}


@pytest.fixture
def stepper(shell: Shell, client: FakeClient) -> Stepper:
    client.release()
    view = Stepper(Inspected("fake", None, client), "hi", {"top_p": 0.8}, shell)
    view.look()
    view.show()
    return view


def test_a_step_takes_the_drawn_token_a_choice_the_given_one_and_undo_takes_back(stepper: Stepper) -> None:
    record = command(session_comm(), stepper.key, "stepper.step", count=2)["result"]
    assert [token["id"] for token in record["past"]] == [10, 10] and record["step"]["position"] == 2
    record = command(session_comm(), stepper.key, "stepper.choose", id=12)["result"]
    assert record["past"][-1] | {"probability": 0} == {
        "id": 12,
        "text": "w2",
        "how": "hand",
        "probability": 0,
        "rank": 2,
        "dropped_by": "top_p",
    }
    assert not command(session_comm(), stepper.key, "stepper.choose", id=99)["ok"]
    record = command(session_comm(), stepper.key, "stepper.undo", count=2)["result"]
    assert [token["id"] for token in record["past"]] == [10] and record["status"] == "ready"
    assert trait("stepper") == json.loads(json.dumps(record))


def test_the_end_and_a_failure_are_told_apart(stepper: Stepper) -> None:
    record = command(session_comm(), stepper.key, "stepper.step", count=50)["result"]
    assert (record["status"], record["step"], len(record["past"])) == ("done", None, 5)
    assert command(session_comm(), stepper.key, "stepper.undo")["result"]["status"] == "ready"


def test_settings_of_the_stepper_are_checked_and_used(stepper: Stepper) -> None:
    assert command(session_comm(), stepper.key, "stepper.set", settings={"temp": 0.5})["result"]["settings"]["temp"] == 0.5
    assert stepper.model.asked[1]["temp"] == 0.5  # type: ignore[attr-defined]
    for settings in ({"temp": "hot"}, {"n": 3}, {"system": "x"}):
        assert not command(session_comm(), stepper.key, "stepper.set", settings=settings)["ok"]
    assert stepper.settings["temp"] == 0.5 and "n" not in stepper.settings


def test_the_stepper_shows_what_is_in_force_with_what_the_model_prefers(shell: Shell, client: FakeClient) -> None:
    class Both(Opinionated, Inspected): ...

    view = Stepper(Both("fake", None, client), "hi", {"min_p": 0.1}, shell)
    view.look()
    record = view.record()
    shown = record["settings"]
    assert (shown["temp"], shown["top_p"], shown["min_p"], shown["top_k"], shown["seed"]) == (0.9, 0.25, 0.1, 0, 0)
    assert {stage["name"]: stage["rule"] for stage in record["step"]["stages"]}["top_p"] == "0.25"
    assert "top_p" not in view.model.asked[1]  # type: ignore[attr-defined]


def test_going_on_as_a_run_keeps_what_was_chosen(stepper: Stepper, client: FakeClient) -> None:
    command(session_comm(), stepper.key, "stepper.choose", id=12)
    record = command(session_comm(), stepper.key, "stepper.run")["result"]
    assert record["status"] == "done" and [c.id for c in client.requests[-1].continuation] == [12]


def test_a_step_says_what_each_rule_leaves() -> None:
    found = Inspected("fake", None, None).inspect("hi")  # type: ignore[arg-type]
    step = step_record(found, {"top_p": 0.8, "temp": 0.5}, 0.01)
    left = {stage["name"]: (stage["left"], stage["mass"]) for stage in step["stages"]}
    whole, cut = (100, 1.0), (2, 0.9)
    assert left == {"model": whole, "penalties": whole, "top_p": cut, "min_p": cut, "xtc": cut, "top_k": cut, "temperature": cut}
    assert (step["vocab"], step["logsumexp"], step["coin"]) == (100, 5.5, None)
    assert [stage["rule"] for stage in step["stages"]] == ["", "", "0.8", "off", "off", "off", "T = 0.5"]


def test_the_stepper_shows_what_the_engine_really_does(tiny_model: Path, shell: Shell) -> None:
    client = LocalClient(resolve({}, {"blas": "none"}))
    try:
        view = Stepper(LanguageModel(str(tiny_model), None, client), "hi", {"temp": 0.8, "top_p": 0.9, "seed": 3}, shell)
        view.look()
        view.forward(3)
        step = view.step_now
        assert step is not None and step["vocab"] == 320 and 0 < step["stages"][2]["left"] < 320
        drawn = max((c for c in step["candidates"] if c["kept"]), key=lambda c: c["noise"])
        assert drawn["probability_after"] > 0
        run = view.model.generate("hi", temp=0.8, top_p=0.9, seed=3, max_tokens=3)
        assert [token.id for token in view.past] == [token.id for token in run.tokens]
    finally:
        client.close()


# -- monitor ---------------------------------------------------------------------------------------------------------------


def test_the_monitor_has_the_status_and_can_stop_a_row(shell: Shell, client: FakeClient) -> None:
    view = views.Monitor(shell)
    view.show()
    assert trait("monitor")["state"] == "ready"
    from test_live import ask

    run = ask(client)[0]
    assert command(session_comm(), view.key, "monitor.stop", id=run.id)["ok"] and client.cancels == [[run.id]]
    until(lambda: trait("monitor")["t"] > view_comm("monitor").sent[0]["state"]["record"]["t"])
    view.close()
    assert "fake" in shell.messages()[-1][2]["data"]["text/plain"]


def test_views_show_what_stays_where_there_are_no_widgets(shell: Shell, client: FakeClient, model: LanguageModel) -> None:
    shell.run("B", allow_stdin=False)
    for view in (views.Monitor(shell), ChatView(model.chat(), shell), Playground(model, "x", {}, shell)):
        view.show()
        data = shell.messages()[-1][2]["data"]
        assert set(data) == {RUN_MIME, "text/html", "text/plain"}
        assert data[RUN_MIME]["schema"] == view.record()["schema"] and data[RUN_MIME]["key"] == view.key
    assert not [one for one in Comm.made if one.sent[0]]


def test_an_open_view_takes_commands_however_many_answers_ended_since(shell: Shell, chat: ChatView) -> None:
    class Over:
        done, commands, at_once = True, {}, frozenset()

        def __init__(self, key: str) -> None:
            self.key = key

    for number in range(frontend.KEPT + 5):
        chat.session.add(Over(f"o{number}"))
    assert len(chat.session.sources) == frontend.KEPT
    assert command(session_comm(), chat.key, "chat.send", text="still there?")["ok"]


def test_a_view_that_a_page_lost_can_be_put_back_with_what_it_holds_now(shell: Shell, client: FakeClient, chat: ChatView) -> None:
    command(session_comm(), chat.key, "chat.send", text="hello there")
    until(lambda: chat.stream.done)
    outputs = command(session_comm(), "", "outputs")["result"]
    assert [(one["key"], one["model_id"]) for one in outputs] == [(chat.key, chat._presence.model_id)]
    data = outputs[0]["data"]
    assert data[WIDGET_MIME]["model_id"] == chat._presence.model_id and data[WIDGET_MIME]["mlxnb_key"] == chat.key
    assert data[RUN_MIME]["schema"] == "mlxnb.chat/1" and said(data[RUN_MIME])[1] == ("user", "hello there")
    assert "hello there" in data["text/html"]
    chat.close()
    assert command(session_comm(), "", "outputs")["result"] == []


def test_what_stays_of_a_closed_view_has_its_record_for_pages_without_a_kernel(shell: Shell, chat: ChatView) -> None:
    command(session_comm(), chat.key, "chat.send", text="hello there")
    until(lambda: chat.stream.done)
    chat.close()
    data = shell.messages()[-1][2]["data"]
    assert WIDGET_MIME not in data and said(data[RUN_MIME])[1:] == [("user", "hello there"), ("assistant", 0)]
    assert data[RUN_MIME]["runs"][0]["status"] == "done"


# -- the monitor's past ----------------------------------------------------------------------------------------------------


def status_at(t: float, rows: list[str], waiting: list[str] = [], ended: list[tuple[str, str]] = [], **model: Any) -> dict[str, Any]:  # noqa: B006
    slots = [{"slot": n, "id": row, "label": f"[{row}]", "phase": "prefill" if n else "running", "tokens": 5} for n, row in enumerate(rows)]
    wait = [{"id": row, "label": f"[{row}]", "why": "memory"} for row in waiting]
    one = {"name": "m", "rows": len(rows), "queue": len(wait), "steps": 3, "tokens": 40, "slots": slots, "waiting": wait, **model}
    return {"state": "ready", "t": t, "models": [one], "ended": [{"id": row, "how": how} for row, how in ended]}


def test_the_past_of_the_engine_is_kept_small_and_tells_each_end_once() -> None:
    past = History()
    past.note(status_at(1.0, ["a", "b"], ["c"]))
    past.note(status_at(2.0, ["b"], ended=[("a", "stopped")]))
    past.note(status_at(3.0, [], ended=[("a", "stopped"), ("b", "done")]))
    found = past.record()
    assert found["labels"] == {"a": "[a]", "b": "[b]", "c": "[c]"}
    ends = [[], [["a", "stopped", None, None]], [["b", "done", None, None]]]
    assert [moment["ended"] for moment in found["moments"]] == ends
    first = found["moments"][0]["models"][0]
    assert first == {"rows": 2, "queue": 1, "steps": 3, "tokens": 40, "slots": [[0, "a", 0], [1, "b", 1]], "waiting": ["c"]}
    past.clear()
    assert past.record()["moments"] == []


def test_a_row_that_no_moment_saw_at_work_has_left_its_time_and_its_name() -> None:
    past = History()
    past.note(status_at(1.0, []))
    short = {"id": "x", "how": "done", "label": "[x] short", "from": 1.2, "to": 1.25}
    past.note({**status_at(2.0, []), "ended": [short]})
    past.note({**status_at(3.0, []), "ended": [short]})
    found = past.record()
    assert [moment["ended"] for moment in found["moments"]] == [[], [["x", "done", 1.2, 1.25]], []]
    assert found["labels"]["x"] == "[x] short"


def test_the_past_is_bounded_however_long_the_engine_works() -> None:
    past = History()
    for number in range(3 * KEPT):
        past.note(status_at(float(number), [f"row-{number}-{slot}" for slot in range(8)], ended=[(f"row-{number - 1}-0", "done")]))
    found = past.record()
    assert len(found["moments"]) == KEPT and found["moments"][-1]["t"] == 3 * KEPT - 1
    named = {row[1] for moment in found["moments"] for row in moment["models"][0]["slots"]}
    assert named <= set(found["labels"]) and len(found["labels"]) <= 2 * len(named) + LABELS
    busy = History()
    for number in range(KEPT):
        busy.note(status_at(float(number), [f"row-{slot}" for slot in range(8)]))
    assert len(json.dumps(busy.record())) < 600_000


def test_a_monitor_asks_for_the_past_that_the_kernel_kept(shell: Shell, client: FakeClient) -> None:
    from mlxnb import runtime

    runtime.client()
    view = views.Monitor(shell)
    view.show()
    answer = command(session_comm(), view.key, "history")["result"]
    assert answer["schema"] == "mlxnb.history/1" and len(answer["moments"]) >= 1
    assert command(session_comm(), "", "history")["result"]["moments"] == answer["moments"]
    json.dumps(answer)
