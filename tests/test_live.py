"""The live path: deltas that fit together, paced for all cells at once, commands that are checked, outputs that stay."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comm
import pytest
from fake_client import FakeClient
from test_display import Clock, end, log, say
from test_routing import Shell

import mlxnb_widgets
from mlxnb import display, runtime
from mlxnb.comm import Channel, StatusBeat, listen
from mlxnb.display import publish
from mlxnb.frontend import DEAF_S, FASTEST_S, KEPT, SLOWEST_S, SNAPSHOT_SHARE, Pace, Session, Worker, session_of
from mlxnb.packing import unpack
from mlxnb.routing import CellClock
from mlxnb.run import Run, RunGroup
from mlxnb.schema import COMMANDS, RUN_MIME, SESSION_TARGET, STATUS_TARGET, WIDGET_MIME, DeltaMessage, problem
from mlxnb.stream import Stream
from mlxnb_engine import events as ev
from mlxnb_engine.types import CompletionRequest, Message, RequestId
from mlxnb_widgets.dispatch import MAX_BYTES, Dispatcher, larger_than
from mlxnb_widgets.reply import reply_where_asked


class Comm:
    """What a widget or a front end's channel sends and receives by; remembers everything."""

    made: list[Comm] = []
    kernel = object()

    def __init__(self, target_name: str = "comm", data: Any = None, comm_id: str | None = None, **rest: Any) -> None:
        self.target_name, self.comm_id, self.sent = target_name, comm_id or f"comm{len(Comm.made)}", [data]
        self.closed = False
        self.heard: Callable[[Any], None] = lambda message: None
        Comm.made.append(self)

    def _reply_subshell_for(self, data: Any, default: Any) -> Any:
        return "the shell that last published"

    def on_msg(self, callback: Callable[[Any], None]) -> None:
        self.heard = self._msg_callback = callback

    def on_close(self, callback: Callable[[Any], None]) -> None:
        self.gone = callback

    def send(self, data: Any = None, **rest: Any) -> None:
        assert not self.closed
        self.sent.append(json.loads(json.dumps(data)))

    def close(self, **rest: Any) -> None:
        self.closed = True

    def custom(self, kind: str) -> list[dict[str, Any]]:
        """Custom messages of this type that were sent, whether by a widget or plain."""
        bodies = [data["content"] if data.get("method") == "custom" else data for data in self.sent if data]
        return [body for body in bodies if body.get("type") == kind]

    def say(self, content: Any) -> None:
        """What a front end sends to a widget."""
        self.heard({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Shell]:
    """A shell whose front end shows widgets, and a publisher of its own."""
    (tmp_path / "loader.js").write_text("export default {}")
    monkeypatch.setattr(mlxnb_widgets, "STATIC", tmp_path)
    monkeypatch.setattr(comm, "create_comm", Comm)
    publisher = display.Publisher()
    monkeypatch.setattr(display, "_PUBLISHER", publisher)
    Comm.made.clear()
    made = Shell()
    made.run("A")
    yield made
    publisher.stop()


@pytest.fixture
def client() -> Iterator[FakeClient]:
    made = FakeClient(hold=2)
    runtime.use(lambda config: made)
    runtime.client()
    yield made
    runtime.close()
    runtime.use(runtime._local)


def ask(client: FakeClient, text: str = "one two three", **fields: Any) -> list[Run]:
    request = CompletionRequest(RequestId(f"r{len(client.requests)}"), "fake", messages=(Message("user", text),), **fields)
    return [Run(generation, {"sample": generation.index}) for generation in client.submit(request)]


def until(true: Callable[[], Any], seconds: float = 5.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return found


def session_comm() -> Comm:
    return next(one for one in Comm.made if one.sent[0] and one.sent[0]["state"].get("kind") == "session")


def command(here: Comm, key: str, name: str, /, **args: Any) -> dict[str, Any]:
    """Send a command as a view does, and wait for its one answer."""
    sent = f"{name}{random.random()}"
    here.say({"type": "command", "id": sent, "key": key, "name": name, "args": args})
    return until(lambda: next((answer for answer in here.custom("answer") if answer["id"] == sent), None))


def apply(record: dict[str, Any], item: dict[str, Any]) -> None:
    """A delta into a plain run record, as the view does it."""
    assert item["at"] <= len(record["tokens"]) and item["text_at"] <= len(record["text"])
    record["tokens"] += item["tokens"][len(record["tokens"]) - item["at"] :]
    record["text"] += item["text"][len(record["text"]) - item["text_at"] :]
    record.update(item.get("status", {}))


# -- deltas --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_deltas_from_any_moment_on_add_up_to_the_record(seed: int) -> None:
    random_ = random.Random(seed)
    generation = log()
    run, stream = Run(generation), Stream("k", [])
    stream.add(run)
    shown = {**run.to_dict(), "tokens": [], "text": ""}
    said = ""
    for _ in range(40):
        for _ in range(random_.randrange(4)):
            piece = random_.choice(["a ", "bc", "\u00e9", "d\n"])
            said += piece
            say(generation, piece)
        items, shorter = stream.items()
        assert not shorter
        for item in items:
            assert problem(DeltaMessage, {"type": "delta", "seq": 1, "items": [json.loads(json.dumps(item))]}) is None
            apply(shown, item)
        if random_.random() < 0.2:
            assert stream.records()[0]["text"] == shown["text"] and stream.records()[0]["tokens"] == shown["tokens"]
    end(generation, said)
    for item in stream.items()[0]:
        apply(shown, item)
    final = run.to_dict()
    assert {name: shown[name] for name in final} == final
    assert stream.items() == ([], False)


def test_text_positions_count_as_javascript_does() -> None:
    generation = log()
    stream = Stream("k", [Run(generation)])
    say(generation, "\U0001f600")
    stream.items()
    say(generation, "x")
    assert stream.items()[0][0]["text_at"] == 2


def test_a_run_without_news_is_not_looked_at_and_a_wish_to_stop_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    generation = log()
    say(generation, "one ")
    stream = Stream("k", [Run(generation)], clock)
    assert [item["text"] for item in stream.items()[0]] == ["one "]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_absorb", lambda self: pytest.fail("it looked at a run that had no news"))
        assert stream.items() == ([], False)
    say(generation, "two ")
    assert [item["text"] for item in stream.items()[0]] == ["two "]
    generation.cancel()
    assert [item["status"]["stopping"] for item in stream.items()[0]] == [True]
    clock.now += 60  # its facts are due, and are the same
    assert stream.items() == ([], False)


def test_a_text_that_got_shorter_asks_for_a_snapshot() -> None:
    generation = log()
    stream = Stream("k", [Run(generation)])
    say(generation, "shown too early")
    stream.items()
    end(generation, "shown")
    assert stream.items()[1] is True and stream.records()[0]["text"] == "shown"


# -- pace ----------------------------------------------------------------------------------------------------------------


def test_the_pace_slows_down_for_a_slow_front_end_and_recovers() -> None:
    clock = Clock()
    pace = Pace(clock)
    for seq in range(60):
        pace.sent(seq)
        pace.acked(seq, 60.0)
        clock.now += pace.interval_s
    assert pace.interval_s == SLOWEST_S
    for seq in range(60, 160):
        pace.sent(seq)
        pace.acked(seq, 8.0)
        clock.now += pace.interval_s
    assert pace.interval_s == FASTEST_S


def test_a_front_end_that_does_not_answer_gets_the_slowest_pace_and_counts_as_deaf_only_if_it_never_did() -> None:
    clock = Clock()
    silent, once = Pace(clock), Pace(clock)
    once.sent(0)
    once.acked(0, 1.0)
    for seq in range(1, 40):
        silent.sent(seq)
        once.sent(seq)
        clock.now += 0.25
    assert silent.interval_s == once.interval_s == SLOWEST_S
    assert clock.now - 100 > DEAF_S and silent.deaf and not once.deaf


def test_an_acknowledgement_of_what_was_never_sent_changes_nothing() -> None:
    pace = Pace(Clock())
    pace.acked(99, 1000.0)
    assert not pace.heard and pace.interval_s == FASTEST_S


def test_until_somebody_was_heard_every_message_asks_for_an_acknowledgement() -> None:
    """The first ones may be lost while the page loads its scripts."""
    clock = Clock()
    pace = Pace(clock)
    assert [pace.sent(seq) for seq in range(3)] == [True, True, True]
    pace.acked(1, 8.0)
    assert [pace.sent(seq) for seq in range(3, 6)] == [False, False, False]


def test_any_message_of_a_front_end_tells_that_somebody_is_there(shell: Shell) -> None:
    for heard in (
        lambda session: session.receive({"type": "command"}, lambda message: None),
        lambda session: session.receive(None, lambda m: None),
    ):
        session = Session()
        assert not session.pace.heard
        heard(session)
        assert session.pace.heard


def test_a_page_that_asks_for_the_state_of_a_view_is_there(shell: Shell, client: FakeClient) -> None:
    publish(ask(client)[0], background=True, shell=shell)
    view = next(one for one in Comm.made if one.comm_id == shell.messages()[0][2]["data"][WIDGET_MIME]["model_id"])
    before = len(view.sent)
    assert not session_of(shell).pace.heard
    view.heard({"content": {"data": {"method": "request_state"}}, "buffers": []})
    assert session_of(shell).pace.heard and view.sent[before]["state"]["kind"] == "run"
    client.release()


def test_an_acknowledgement_is_asked_for_a_few_times_a_second_however_many_messages_leave() -> None:
    clock = Clock()
    pace = Pace(clock)
    wanted = []
    for seq in range(200):
        wanted.append(pace.sent(seq))
        if wanted[-1]:
            pace.acked(seq, 8.0)
        clock.now += 0.05
    assert wanted[0] and 38 <= sum(wanted) <= 50 and pace.interval_s == FASTEST_S


def test_the_snapshots_of_all_views_together_take_a_bounded_share_of_the_time(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxnb.frontend.SNAPSHOT_S", 0.01)
    client = FakeClient(answer=lambda asked, index: ["word "] * 10_000, step_s=0.01)
    took = 0.002
    made: list[float] = []

    def slowly(self: Stream) -> list[dict[str, Any]]:
        made.append(time.monotonic())
        time.sleep(took)
        return records(self)

    records = Stream.records
    try:
        publications = [publish(ask(client, max_tokens=10_000)[0], background=True, shell=shell) for _ in range(4)]
        monkeypatch.setattr(Stream, "records", slowly)
        time.sleep(0.2)
        made.clear()
        time.sleep(3.0)
        count = len(made)
    finally:
        client.close()
    assert all(publication.finish(5.0) for publication in publications)
    assert 1 <= count <= 3.0 / (took * SNAPSHOT_SHARE) + 4, count


def test_eight_cells_at_once_send_at_most_twenty_messages_a_second(shell: Shell) -> None:
    client = FakeClient(answer=lambda asked, index: ["word "] * 10_000, step_s=0.004)
    try:
        for _ in range(8):
            publish(ask(client, max_tokens=10_000)[0], background=True, shell=shell)
        hub = session_comm()

        def counted() -> int:
            views = sum(len(one.sent) - 1 for one in Comm.made if one is not hub)
            return views + len(hub.custom("delta"))

        until(lambda: hub.custom("delta"))
        before, began = counted(), time.monotonic()
        time.sleep(2.2)
        rate = (counted() - before) / (time.monotonic() - began)
        keys = {item["key"] for message in hub.custom("delta") for item in message["items"]}
    finally:
        client.close()
    assert rate <= 20.5, f"{rate:.1f} messages a second"
    assert len(keys) == 8


# -- one output ------------------------------------------------------------------------------------------------------------


def test_a_run_is_a_live_view_and_then_the_static_bundle_under_the_same_display_id(shell: Shell, client: FakeClient) -> None:
    run = ask(client)[0]
    publication = publish(run, shell=shell)
    first = shell.messages()[0][2]
    assert set(first["data"]) == {WIDGET_MIME, RUN_MIME, "text/html", "text/plain"}
    assert first["data"][RUN_MIME]["status"] not in ("done", "stopped", "failed")
    view = next(one for one in Comm.made if one.comm_id == first["data"][WIDGET_MIME]["model_id"])
    state = view.sent[0]["state"]
    assert state["kind"] == "run" and state["state"] == "live" and state["session"] == f"IPY_MODEL_{session_comm().comm_id}"
    client.release()
    assert publication.finish(5.0)
    kind, parent, last = shell.messages()[-1]
    assert (kind, parent, last["transient"]) == ("update_display_data", "A", first["transient"])
    assert set(last["data"]) == {RUN_MIME, "text/html", "text/plain"} and view.closed
    assert [t["text"] for t in unpack(last["data"][RUN_MIME]["tokens"])] == ["one ", "two ", "three "]
    assert last["data"]["text/plain"] == "one two three "
    deltas = session_comm().custom("delta")
    assert deltas and all(problem(DeltaMessage, message) is None for message in deltas)


def test_the_output_is_made_while_its_cell_runs_however_busy_the_views_of_others_are(shell: Shell, client: FakeClient) -> None:
    session_of(shell).pace.due = float("inf")
    publish(ask(client)[0], background=True, shell=shell)
    assert [kind for kind, _, _ in shell.messages()] == ["display_data"]
    session_of(shell).pace.due = 0.0
    client.release()


def test_a_group_is_a_compare_view_with_all_its_rows_in_one_message(shell: Shell, client: FakeClient) -> None:
    publish(RunGroup(ask(client, samples=3)), background=True, shell=shell)
    client.release()
    view = next(one for one in Comm.made if one.sent[0]["state"].get("kind") == "compare")
    assert len(view.sent[0]["state"]["record"]["runs"]) == 3
    until(lambda: {item["run"] for message in session_comm().custom("delta") for item in message["items"]} == {0, 1, 2})


def test_a_trait_recovers_a_view_that_was_loaded_again(shell: Shell, client: FakeClient) -> None:
    run = ask(client)[0]
    publish(run, background=True, shell=shell)
    view = next(one for one in Comm.made if one.sent[0]["state"].get("kind") == "run")
    until(lambda: run.token_count == 2)
    given = lambda: [d["state"]["record"] for d in view.sent if d["state"].get("record", {}).get("tokens")]  # noqa: E731
    until(lambda: given() and [t["text"] for t in unpack(given()[-1]["tokens"])] == ["one ", "two "])
    key = view.sent[0]["state"]["key"]
    answer = command(session_comm(), key, "snapshot")
    assert answer["ok"] and len(unpack(answer["result"]["record"]["tokens"])) == 2


def test_where_no_front_end_ever_answers_plain_html_takes_over(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxnb.frontend.DEAF_S", 0.2)
    slow = FakeClient(answer=lambda asked, index: ["word "] * 40, step_s=0.02)
    try:
        publication = publish(ask(slow)[0], background=True, shell=shell)
        until(lambda: any(WIDGET_MIME not in content["data"] for _, _, content in shell.messages()))
        assert publication.finish(5.0)
    finally:
        slow.close()
    kinds = [(WIDGET_MIME in content["data"], RUN_MIME in content["data"]) for _, _, content in shell.messages()]
    assert kinds[0] == (True, True) and kinds[-1] == (False, True) and (False, False) in kinds


def test_a_view_that_has_nothing_to_say_yet_is_plain_html_where_nobody_answers(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that there is came with the view itself, so no delta follows that could be acknowledged."""
    monkeypatch.setattr("mlxnb.frontend.DEAF_S", 0.3)
    held = FakeClient(hold=0)
    try:
        publication = publish(ask(held)[0], background=True, shell=shell)
        until(lambda: any(WIDGET_MIME not in content["data"] for _, _, content in shell.messages()))
        held.release()
        assert publication.finish(5.0)
    finally:
        held.close()


def test_a_view_that_has_nothing_to_say_yet_stays_where_a_page_answers_the_knock(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxnb.frontend.DEAF_S", 0.5)
    monkeypatch.setattr("mlxnb.frontend.KNOCK_S", 0.05)
    monkeypatch.setattr("mlxnb.frontend.ACK_S", 0.05)
    held = FakeClient(hold=0)
    try:
        publication = publish(ask(held)[0], background=True, shell=shell)
        hub = session_comm()
        knocks = lambda: [message for message in hub.custom("delta") if not message["items"]]  # noqa: E731
        until(lambda: len(knocks()) >= 3)  # the first ones are lost while the page loads
        assert all(problem(DeltaMessage, message) is None for message in knocks())
        hub.heard({"content": {"data": {"method": "custom", "content": {"type": "ack", "seq": knocks()[-1]["seq"], "frame_ms": 16.0}}}})
        count = len(knocks())
        time.sleep(0.8)
        assert len(knocks()) <= count + 1, "who was heard is not asked again"
        assert all(WIDGET_MIME in content["data"] for _, _, content in shell.messages())
        held.release()
        assert publication.finish(5.0)
    finally:
        held.close()


def test_without_the_scripts_or_in_batch_or_captured_there_is_no_widget(shell: Shell, client: FakeClient, tmp_path: Path) -> None:
    (tmp_path / "loader.js").unlink()
    assert not mlxnb_widgets.available()
    publish(ask(client)[0], background=True, shell=shell)
    (tmp_path / "loader.js").write_text("")
    shell.run("B", allow_stdin=False)
    publish(ask(client)[0], background=True, shell=shell)
    shell.display_pub.session = None
    shell.display_pub.publish = lambda **message: None
    shell.run("C")
    publish(ask(client)[0], background=True, shell=shell)
    assert Comm.made == []


def test_a_widget_that_cannot_be_made_costs_nothing_but_the_view(shell: Shell, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**traits: Any) -> Any:
        raise ImportError("anywidget of another age")

    monkeypatch.setattr("mlxnb.live._widget", broken)
    client.release()
    publication = publish(ask(client)[0], background=True, shell=shell)
    assert publication.finish(5.0)
    assert shell.messages()[-1][2]["data"]["text/plain"] == "one two three "


# -- commands --------------------------------------------------------------------------------------------------------------


def shown(shell: Shell, client: FakeClient, **fields: Any) -> tuple[list[Run], str, Comm, display.Publication]:
    runs = ask(client, **fields)
    publication = publish(runs[0] if len(runs) == 1 else RunGroup(runs), background=True, shell=shell)
    key = next(reversed(session_of(shell).sources))
    return runs, key, session_comm(), publication


def test_stop_takes_effect_in_the_thread_of_the_comm_and_may_name_one_row(shell: Shell, client: FakeClient) -> None:
    runs, key, hub, _ = shown(shell, client, samples=3)
    hub.say({"type": "command", "id": "s", "key": key, "name": "stop", "args": {"run": 1}})
    assert [run.generation.cancel_requested for run in runs] == [False, True, False]
    assert hub.custom("answer")[-1] == {"type": "answer", "id": "s", "ok": True, "result": None}
    assert command(hub, key, "stop")["ok"] and all(run.generation.cancel_requested for run in runs)
    assert not command(hub, key, "stop", run=7)["ok"]


def test_a_branch_adds_a_row_to_the_same_output_while_it_lives(shell: Shell, client: FakeClient) -> None:
    runs, key, hub, publication = shown(shell, client)
    until(lambda: runs[0].token_count == 2)
    answer = command(hub, key, "branch", run=0, at=1, token=42)
    assert answer["ok"] and answer["result"]["run"] == 1 and answer["result"]["record"]["schema"] == "mlxnb.group/1"
    assert [c.id for c in client.requests[-1].continuation] == [1, 42]
    until(lambda: any(item["run"] == 1 for message in hub.custom("delta") for item in message["items"]))
    client.release()
    assert publication.finish(5.0)
    assert len(shell.messages()[-1][2]["data"][RUN_MIME]["runs"]) == 2


def test_after_the_end_a_front_end_with_a_channel_may_still_branch_and_the_bundle_is_made_again(shell: Shell, client: FakeClient) -> None:
    client.release()
    publication = publish(ask(client)[0], background=True, shell=shell)
    key = next(reversed(session_of(shell).sources))
    assert publication.finish(5.0)
    saved_once = len(shell.messages())
    channel = Comm(SESSION_TARGET)
    session_of(shell).welcome(Channel(channel))
    channel.heard({"content": {"data": {"type": "command", "id": "b", "key": key, "name": "branch", "args": {"run": 0, "at": 1}}}})
    assert until(lambda: channel.custom("answer"))[0]["ok"]
    until(lambda: len(shell.messages()) > saved_once)
    assert len(shell.messages()[-1][2]["data"][RUN_MIME]["runs"]) == 2
    assert any(item["run"] == 1 for message in channel.custom("delta") for item in message["items"])


def test_run_again_draws_a_new_seed(shell: Shell, client: FakeClient) -> None:
    _, key, hub, _ = shown(shell, client, samples=2)
    assert command(hub, key, "regenerate", run=1)["result"]["run"] == 2
    assert command(hub, key, "regenerate")["result"]["run"] == 3
    assert [request.sampling.seed for request in client.requests[1:]] == [None, None, None]
    assert [request.samples for request in client.requests[1:]] == [1, 1, 1]


def test_an_error_of_the_kernel_is_an_answer_in_words(shell: Shell, client: FakeClient) -> None:
    _, key, hub, _ = shown(shell, client)
    answer = command(hub, key, "branch", run=0, at=999)
    assert not answer["ok"] and "at=999" in answer["error"]
    assert "not of this kernel" in command(hub, "other-1", "stop")["error"]
    assert "not a command here" in command(hub, key, "chat.send", text="x")["error"]


def test_a_page_finds_the_place_of_a_view_that_is_no_more_by_the_view_itself(shell: Shell, client: FakeClient) -> None:
    _, _, hub, publication = shown(shell, client)
    (view,) = [data[WIDGET_MIME]["model_id"] for _, _, content in shell.messages() if WIDGET_MIME in (data := content["data"])]
    assert [(one["model_id"], one["done"]) for one in command(hub, "", "sources")["result"]] == [(view, False)]
    client.release()
    assert publication.finish(5.0)
    assert [(one["model_id"], one["done"]) for one in command(hub, "", "sources")["result"]] == [(view, True)]
    assert [one["model_id"] for one in command(hub, "", "outputs")["result"]] == [view]


def test_commands_to_the_kernel_itself(shell: Shell, client: FakeClient, tmp_path: Path) -> None:
    runs, key, hub, publication = shown(shell, client)
    assert command(hub, "", "status")["result"]["state"] == "ready"
    assert command(hub, "", "asset", name="loader.js")["result"]["text"].startswith("export")
    for name in ("../secret", "x.js", "/etc/passwd", ""):
        assert not command(hub, "", "asset", name=name)["ok"]
    assert command(hub, "", "outputs")["result"] == []
    assert command(hub, "", "stop_all")["result"] == 1 and runs[0].generation.cancel_requested
    assert publication.finish(5.0)
    kept = command(hub, "", "outputs")["result"]
    assert [(one["key"], RUN_MIME in one["data"]) for one in kept] == [(key, True)]


def test_finished_outputs_beyond_the_newest_are_forgotten() -> None:
    class Old:
        commands: dict[str, Any] = {}
        at_once: frozenset[str] = frozenset()

        def __init__(self, key: str, done: bool = True) -> None:
            self.key, self.done = key, done

    session = Session()
    live = Old("live", done=False)
    session.add(live)
    for number in range(KEPT + 20):
        session.add(Old(str(number)))
    assert len(session.sources) <= KEPT and "live" in session.sources and str(KEPT + 19) in session.sources


def test_commands_that_come_faster_than_they_are_done_are_refused_not_piled_up() -> None:
    worker, blocked, done = Worker(), threading.Event(), []
    assert worker.put(blocked.wait)
    taken = [worker.put(lambda: done.append(1)) for _ in range(200)]
    assert not all(taken)
    blocked.set()
    until(lambda: len(done) == sum(taken))


# -- hostile messages --------------------------------------------------------------------------------------------------------


def anything(random_: random.Random, depth: int = 0) -> Any:
    kind = random_.randrange(9 if depth < 4 else 6)
    if kind < 6:
        return random_.choice(
            [None, True, -1, 2**70, 0.5, float("nan"), "", "x" * random_.randrange(80), "\ud800", "command", "ack", "stop"]
        )
    if kind == 6:
        return [anything(random_, depth + 1) for _ in range(random_.randrange(4))]
    return {
        random_.choice(["type", "id", "key", "name", "args", "method", "state", "run", "at"]): anything(random_, depth + 1)
        for _ in range(5)
    }


def mutated(random_: random.Random, key: str) -> Any:
    """A command that is nearly right."""
    name = random_.choice([*COMMANDS, "eval", "__class__", ""])
    message: dict[str, Any] = {"type": "command", "id": f"i{random_.random()}", "key": key, "name": name, "args": {}}
    for _ in range(random_.randrange(1, 3)):
        message[random_.choice([*message, "more"])] = anything(random_)
    return message


def test_five_hundred_hostile_messages_do_nothing_and_break_nothing(shell: Shell, client: FakeClient, scale: int) -> None:
    runs, key, hub, publication = shown(shell, client)
    view = next(one for one in Comm.made if one.sent[0]["state"].get("kind") == "run")
    traits = view.sent[0]["state"]
    random_ = random.Random(20)
    asked = len(client.requests)
    for number in range(500 * scale):
        content = anything(random_) if number % 2 else mutated(random_, random_.choice(["nobody", "", 7]))
        if isinstance(content, dict) and content.get("name") in ("stop_all", "unload") and content.get("key") == "":
            continue  # a right one
        target = random_.choice([hub, view])
        data = random_.choice(
            [{"method": "custom", "content": content}, {"method": "update", "state": {"record": {}, "_esm": "evil()", "key": "x"}}, content]
        )
        target.heard({"content": {"data": data}, "buffers": []})
    assert len(client.requests) == asked and not runs[0].generation.cancel_requested
    assert command(hub, key, "snapshot")["ok"]
    assert not any("evil" in json.dumps(sent) for sent in view.sent)
    assert view.sent[0]["state"]["_esm"] == traits["_esm"]
    client.release()
    assert publication.finish(5.0)


def answers_to(content: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    answers: list[dict[str, Any]] = []
    acted: list[Any] = []
    Dispatcher(lambda name, args: None, acted.append, lambda seq, ms: acted.append((seq, ms)))(content, answers.append)
    return answers, acted


GOOD = {"type": "command", "id": "7", "key": "k", "name": "stop", "args": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"type": "comand"},
        {"key": None},
        {"key": "k" * 65},
        {"name": ""},
        {"name": 3},
        {"args": []},
        {"args": {"x": "y" * MAX_BYTES}},
        {"args": {"x": ["\u00e9"] * (MAX_BYTES // 3)}},
        {"extra": 1},
    ],
)
def test_a_wrong_command_with_an_id_gets_one_error_answer_and_no_effect(change: dict[str, Any]) -> None:
    answers, acted = answers_to({**GOOD, **change})
    assert acted == [] and [(a["id"], a["ok"]) for a in answers] == [("7", False)]
    assert len(answers_to(GOOD)[1]) == 1


def test_deep_nesting_is_refused_without_recursion() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    answers, acted = answers_to({**GOOD, "args": {"x": deep}})
    assert acted == [] and not answers[0]["ok"]
    assert larger_than({"a": "b" * 10}, 10) and not larger_than({"a": "b" * 10}, 40)


@pytest.mark.parametrize(
    "content",
    [
        {"type": "ack", "seq": -1, "frame_ms": 1},
        {"type": "ack", "seq": True, "frame_ms": 1},
        {"type": "ack", "seq": 1, "frame_ms": float("nan")},
        {"type": "ack", "seq": 1, "frame_ms": 1, "x": 1},
    ],
)
def test_a_wrong_acknowledgement_has_no_effect(content: dict[str, Any]) -> None:
    assert answers_to(content) == ([], [])
    assert answers_to({"type": "ack", "seq": 1, "frame_ms": 16.5})[1] == [(1, 16.5)]


def test_a_fault_of_ours_is_still_an_answer() -> None:
    def broken(command: Any) -> None:
        raise ZeroDivisionError

    answers: list[dict[str, Any]] = []
    Dispatcher(lambda name, args: None, broken, lambda seq, ms: None)(GOOD, answers.append)
    assert answers == [{"type": "answer", "id": "7", "ok": False, "error": "The kernel could not handle this: ZeroDivisionError."}]


# -- comms -----------------------------------------------------------------------------------------------------------------


def test_messages_of_a_comm_go_to_the_subshell_that_they_name_where_the_kernel_would_route_them_elsewhere() -> None:
    one = Comm()
    reply_where_asked(one)
    assert one._reply_subshell_for({}, "asked") == "asked"
    plain: Any = object()
    reply_where_asked(plain)
    reply_where_asked(None)


def test_every_comm_of_ours_is_routed_so(shell: Shell, client: FakeClient) -> None:
    publish(ask(client)[0], background=True, shell=shell)
    Channel(Comm(STATUS_TARGET))
    ours = [one for one in Comm.made if not one.sent[0] or "kind" in one.sent[0]["state"]]
    assert len(ours) == 3 and all(one._reply_subshell_for({}, "asked") == "asked" for one in ours)


def test_a_finished_run_leaves_no_comm_behind(shell: Shell, client: FakeClient) -> None:
    client.release()
    for _ in range(3):
        assert publish(ask(client)[0], shell=shell).finish(5.0)
    open_now = [one.sent[0]["state"].get("kind", "layout") for one in Comm.made if not one.closed]
    assert sorted(open_now) in (["layout", "session"], ["session"], [])


def test_the_hooks_of_a_comm_message_are_not_taken_for_a_cell(shell: Shell) -> None:
    clock = CellClock(shell)
    owner = clock.parent()
    shell.request = {"header": {"msg_id": "c", "msg_type": "comm_msg"}}
    shell.events.fire("pre_execute")
    shell.events.fire("post_execute")
    assert clock.current({"header": {"msg_id": "gone"}})["header"]["msg_id"] == owner["header"]["msg_id"]


class Manager:
    def __init__(self) -> None:
        self.targets: dict[str, Any] = {}
        self.comms: dict[str, Any] = {}

    def register_target(self, name: str, callback: Any) -> None:
        self.targets[name] = callback


def test_a_front_end_that_opens_our_target_gets_answers_and_the_status(shell: Shell, client: FakeClient) -> None:
    shell.kernel.comm_manager, shell.kernel.control_handlers = Manager(), {}
    listen(shell)
    listen(shell)
    runtime.client()
    here = Comm(STATUS_TARGET)
    shell.kernel.comm_manager.targets[STATUS_TARGET](here, {})
    assert here.custom("status")[0]["status"]["state"] == "ready" and "t" in here.custom("status")[0]["status"]
    here.heard({"content": {"data": {"type": "command", "id": "1", "key": "", "name": "stop_all", "args": {}}}})
    assert here.custom("answer") == [{"type": "answer", "id": "1", "ok": True, "result": 0}]
    here.heard(None)
    here.heard({"content": []})


def test_on_the_control_channel_only_our_comms_are_answered(shell: Shell, client: FakeClient) -> None:
    manager = shell.kernel.comm_manager = Manager()
    handlers: dict[str, Any] = {}
    shell.kernel.control_handlers = handlers
    listen(shell)
    _, key, hub, _ = shown(shell, client)
    heard: list[Any] = []
    other = Comm("someone.else")
    other.on_msg(heard.append)
    manager.comms = {hub.comm_id: hub, "other": other}
    stop = {"method": "custom", "content": {"type": "command", "id": "c", "key": key, "name": "stop", "args": {}}}
    for message in ({"content": {"comm_id": "other", "data": {}}}, {"content": {"comm_id": ["x"]}}, {}, {"content": None}):
        handlers["comm_msg"](None, None, message)
    assert heard == []
    handlers["comm_msg"](None, None, {"content": {"comm_id": hub.comm_id, "data": stop}, "buffers": []})
    assert hub.custom("answer")[-1]["ok"] and client.generations[0].cancel_requested


def test_the_status_is_told_while_it_changes_and_its_thread_ends_with_its_listeners() -> None:
    state = {"rows": 0, "t": 0.0}

    def read() -> dict[str, Any]:
        state["t"] += 1
        return dict(state)

    told: list[Any] = []
    beat = StatusBeat(read, 0.01)
    wanted = [True]

    def broken(status: dict[str, Any]) -> bool:
        if len(told) > 1:
            raise OSError
        return True

    beat.add(broken)
    beat.add(lambda status: (told.append(status["rows"]), wanted[0])[1])
    until(lambda: len(told) == 3)
    time.sleep(0.1)
    assert told == [0, 0, 0]  # at once, at the first beat, and once more as nothing changed; then silence
    state["rows"] = 3
    until(lambda: told[-1] == 3)
    wanted[0] = False
    state["rows"] = 4
    until(lambda: beat._thread is None)
    assert told == [0, 0, 0, 3, 4]


def test_a_cancelled_run_says_so_in_its_last_delta(shell: Shell, client: FakeClient) -> None:
    runs, _, hub, publication = shown(shell, client)
    runs[0].cancel()
    assert publication.finish(5.0)
    statuses = [
        item["status"]["status"] for message in hub.custom("delta") for item in message["items"] if "status" in item.get("status", {})
    ]
    assert statuses[-1] == "stopped"
    assert isinstance(runs[0].generation.terminal, ev.Cancelled)
