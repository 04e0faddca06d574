"""The loom: answers merged by tokens, grown by hand. The tree alone, over the tiny engine, and through the commands of its view."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient
from test_live import ask, client, command, session_comm, shell, until
from test_routing import Shell
from test_views import trait

from mlxnb import loomview
from mlxnb.api import LanguageModel
from mlxnb.display import publish
from mlxnb.growth import MAX_PLACES, Growth
from mlxnb.loomview import Loom, weave
from mlxnb.record import size
from mlxnb.run import Run, RunGroup
from mlxnb.schema import RUN_MIME, WIDGET_MIME
from mlxnb.trie import Place, Row, Trie, chains, cuts, outline
from mlxnb_engine.client import LocalClient
from mlxnb_engine.config import resolve
from mlxnb_engine.errors import RequestError
from mlxnb_engine.events import Alternative, TokenRecord

__all__ = ["client", "shell"]


def tokens(words: str, p: float | None = None, top: tuple[Alternative, ...] = ()) -> list[TokenRecord]:
    logprob = None if p is None else math.log(p)
    return [TokenRecord(ord(w[0]), w, "sampled", 0.1 * i, logprob, 0, top if i == 0 else ()) for i, w in enumerate(words.split("|"))]


def sample(words: str, **more: Any) -> tuple[list[TokenRecord], Row, bool]:
    return tokens(words, **more), Row(), True


# -- the tree alone --------------------------------------------------------------------------------------------------------


def test_what_answers_share_is_there_once_and_counted() -> None:
    trie = Trie.of([sample("a|b|c"), sample("a|b|d"), sample("a|x"), sample("a|b|c")])
    assert trie.size == 5 and trie.root.samples == 4
    a = trie.root.kids[ord("a")]
    b = a.kids[ord("b")]
    assert (a.samples, b.samples, b.kids[ord("c")].samples, a.kids[ord("x")].samples) == (4, 3, 2, 1)
    assert [("".join(n.text for n in leaf.path), leaf.samples) for leaf in trie.leaves()] == [("abc", 2), ("abd", 1), ("ax", 1)]
    assert b.place == Place(0, 2) and a.kids[ord("x")].place == Place(2, 2)


def test_an_answer_that_is_the_beginning_of_another_ends_where_it_ends() -> None:
    trie = Trie.of([sample("a|b"), sample("a|b|c")])
    assert ["".join(node.text for node in leaf.path) for leaf in trie.leaves()] == ["ab", "abc"]
    assert [["".join(n.text for n in chain) for chain in chains(trie.root)]] == [["ab"]]


def test_a_continuation_counts_from_where_it_was_given_and_a_probe_only_shows_what_could_come() -> None:
    known = (Alternative(ord("b"), "b", -0.1), Alternative(ord("z"), "z", -3.0))
    trie = Trie.of([sample("a|b"), (tokens("a|b|c"), Row("more", 2), True), (tokens("a|y"), Row("probe", 1), False)])
    a = trie.root.kids[ord("a")]
    b = a.kids[ord("b")]
    assert (a.samples, a.rows, b.samples, b.rows, b.kids[ord("c")].rows) == (1, 0, 1, 0, 1)
    assert ord("y") not in a.kids
    probed = [*tokens("a"), TokenRecord(ord("y"), "y", "sampled", 0.1, -1.0, 1, known)]
    trie = Trie.of([sample("a|b"), (probed, Row("probe", 1), False)])
    assert trie.root.kids[ord("a")].next == known
    # What no run captured for its own token is known from the alternatives of another.
    trie = Trie.of([(probed, Row("probe", 1), False), sample("a|b")])
    assert trie.root.kids[ord("a")].kids[ord("b")].logprob == -0.1


@pytest.mark.parametrize(
    ("pieces", "text", "ends"),
    [
        (["a", " b"], "a b", [1, 3]),
        ([" a", " b"], "a b", [1, 3]),  # the first token's space is not shown
        (["x", "\ufffd", "\ufffd", "\ufffd", "y"], "x海y", [1, 1, 1, 2, 3]),
        (["x", "\ufffd", "\ufffd"], "x海", [1, 1, 2]),
        (["a", " END"], "a", [1, 1]),  # a stop string was taken off
        ([], "", []),
        (["a", "", "b"], "ab", [1, 1, 2]),
    ],
)
def test_a_text_is_cut_where_its_tokens_end(pieces: list[str], text: str, ends: list[int]) -> None:
    assert cuts([TokenRecord(i, piece, "sampled", 0.0) for i, piece in enumerate(pieces)], text) == ends


def test_the_outline_says_how_many_went_where_and_what_it_leaves_out() -> None:
    lines = outline(Trie.of([sample("a|b|c", p=0.5), sample("a|b|d", p=0.5), sample("q|r", p=0.25)]))
    assert lines[0] == "├─ 2× p 0.50  ab" and lines[1].strip("│├└─ ").startswith("1× p 0.50  c") and lines[-1] == "└─ 1× p 0.25  qr ■"
    many = Trie.of([sample(f"{chr(200 + i)}|x") for i in range(100)])
    assert len(outline(many, most=10)) == 11 and outline(many, most=10)[-1] == "(90 more)"


# -- over the tiny engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LocalClient]:
    made = LocalClient(resolve({}, {"blas": "none", "model": str(tiny_model)}))
    yield made
    made.close()


@pytest.fixture(scope="module")
def lm(engine: LocalClient, tiny_model: Path) -> LanguageModel:
    return LanguageModel(str(tiny_model), None, engine)


def woven(lm: LanguageModel, engine: LocalClient, **options: Any) -> Loom:
    group = lm.generate("the sea", n=6, seed=3, max_tokens=8, logprobs=8, **{"temp": 0.7, "top_k": 3, **options})
    assert isinstance(group, RunGroup)
    return weave(group, client=engine)


def ids(run: Run) -> list[int]:
    return [token.id for token in run.tokens]


def test_every_sample_is_a_path_and_the_counts_add_up(lm: LanguageModel, engine: LocalClient) -> None:
    view = woven(lm, engine)
    assert sum(path.samples for path in view.paths) == 6
    assert {path.text for path in view.paths} == set(view.runs.texts)
    assert view.trie.size < sum(len(run.tokens) for run in view.runs)
    assert all(path.logprob is not None and path.logprob < 0 for path in view.paths)


def test_going_on_from_a_cut_end_is_what_the_run_would_have_done(lm: LanguageModel, engine: LocalClient) -> None:
    view = woven(lm, engine)
    place = Place(2, len(view.runs[2].tokens))
    (more,) = view.more(place, tokens=6)
    longer = lm.generate("the sea", n=6, seed=3, max_tokens=14, temp=0.7, top_k=3)
    assert isinstance(longer, RunGroup) and ids(more) == ids(longer[2])
    assert view.rows[-1] == Row("more", place.at) and more.usage["continued_tokens"] == place.at


def test_several_rows_from_one_place_share_its_beginning_and_differ_after_it(lm: LanguageModel, engine: LocalClient) -> None:
    view = woven(lm, engine, temp=1.5, top_k=0)
    rows = view.more(Place(0, 3), tokens=8, rows=4)
    assert {tuple(ids(run)[:3]) for run in rows} == {tuple(ids(view.runs[0])[:3])}
    assert len({run.seed for run in view.runs}) == 10 and len({tuple(ids(run)) for run in rows}) > 1
    assert sum(path.samples for path in view.paths) == 6 and sum(path.rows for path in view.paths) == 4


def test_expanding_opens_the_likeliest_tokens_level_by_level(lm: LanguageModel, engine: LocalClient) -> None:
    view = woven(lm, engine)
    place = Place(0, 2)
    before = len(view.runs)
    view.expand(place, width=3, depth=1)
    assert len(view.runs) == before and view.opened[-1][0].at == 2, "what the samples captured needs no row"
    first = view.opened[-1][1]
    assert list(first) == [one.id for one in view.alternatives(place)[:3]]
    view.expand(place, width=2, depth=3, ids=first[:2])
    levels = view.opened[1:]
    assert [len(chosen) for _, chosen in levels] == [2] * 7, "1 + 2 + 4 places were opened"
    reached = {(*ids(view.runs[where.run])[: where.at], token) for where, chosen in levels for token in chosen}
    start = tuple(ids(view.runs[0])[:2])
    assert len(reached) == 14 and all(path[:2] == start for path in reached)
    for path in reached:  # each is what the model itself finds likeliest there
        found = [c["id"] for c in lm.inspect("the sea", path[:-1], candidates=4, temp=0.7)["candidates"][:2]]
        assert path[-1] in found or path[2] == path[-1]


def test_an_expansion_that_would_be_too_large_is_refused_and_says_what_is_not(lm: LanguageModel, engine: LocalClient) -> None:
    view = woven(lm, engine)
    with pytest.raises(RequestError, match="4,680 places") as caught:
        view.expand(Place(0, 1), width=8, depth=4)
    assert caught.value.hint == f"The limit is {MAX_PLACES}; a depth of 2 gives 72."
    for wrong in ({"width": 0, "depth": 1}, {"width": 99, "depth": 1}, {"width": 2, "depth": 0}):
        with pytest.raises(RequestError):
            view.expand(Place(0, 1), **wrong)
    for where in (Place(99, 0), Place(0, 99), 99, "x"):
        with pytest.raises(RequestError):
            view.more(where)  # type: ignore[arg-type]
    assert len(view.runs) == 6


def test_looking_beyond_an_end_tells_what_could_come_there(lm: LanguageModel, engine: LocalClient) -> None:
    view = woven(lm, engine)
    end = Place(0, len(view.runs[0].tokens))
    assert view.alternatives(end) == ()
    view._peek(end)
    until(lambda: view.stream.done)
    found = view.alternatives(end)
    assert len(found) == 8 and [one.logprob for one in found] == sorted((one.logprob for one in found), reverse=True)
    assert len(view.paths) == len({path.text for path in view.paths}) and view.rows[-1].kind == "probe"


def test_pruning_hides_a_path_and_stops_what_writes_there(lm: LanguageModel, engine: LocalClient) -> None:
    view = woven(lm, engine)
    paths = view.paths
    gone = paths[0]
    long = view.more(gone.place, tokens=4000, wait=False)[0]
    until(lambda: len(long.tokens) > gone.place.at + 2)
    view.prune(gone.place)
    long.wait(30)
    assert long.status == "stopped" and len(long.tokens) > gone.place.at
    assert gone.text not in {path.text for path in view.paths} and len(view.paths) == len(paths) - 1
    view.prune(gone.place, on=False)
    assert len(view.paths) == len(paths)
    view.keep(1)
    assert [view.text(place) for place in view.kept] == [view.paths[1].text]


def test_a_path_becomes_a_conversation(lm: LanguageModel, engine: LocalClient) -> None:
    view = woven(lm, engine)
    chat = view.to_chat(0)
    assert [m["content"] for m in chat.messages] == ["the sea", view.paths[0].text]
    run = chat.send("and then?", max_tokens=4)
    assert run.request.messages is not None and len(run.request.messages) == 3


def test_a_loom_is_of_one_prompt(lm: LanguageModel, engine: LocalClient) -> None:
    group = lm.batch(["the sea", "the moon"], max_tokens=2)
    with pytest.raises(RequestError, match="one prompt"):
        weave(group, client=engine)


def test_the_record_of_a_large_loom_is_bounded(lm: LanguageModel, engine: LocalClient) -> None:
    long = "the tide " * 300
    group = lm.generate(long, n=8, seed=1, max_tokens=96, temp=1.2, logprobs=20)
    view = weave(group, client=engine)  # type: ignore[arg-type]
    view.expand(0, width=4, depth=3)
    view.stream.items()
    record = view.record()
    assert len(record["runs"]) == len(view.rows) == len(record["rows"]) > 20
    assert size(record) < 320 * 1024 and json.dumps(record).count("the tide the tide") < 400, "the prompt is there once"


# -- the view --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(shell: Shell, lm: LanguageModel, engine: LocalClient) -> Iterator[Loom]:
    group = lm.generate("the sea", n=4, seed=3, max_tokens=6, logprobs=8, temp=0.7, top_k=3)
    view = weave(group, shell, client=engine)  # type: ignore[arg-type]
    view.show()
    yield view
    view.close()


def test_the_view_grows_by_commands_and_tells_each_time(shown: Loom) -> None:
    first = trait("loom")
    assert first["schema"] == "mlxnb.loom/1" and [row["kind"] for row in first["rows"]] == ["sample"] * 4
    assert first["runs"][0]["prompt"]["messages"][-1]["content"] == "the sea" and first["runs"][1]["prompt"]["messages"] is None
    answer = command(session_comm(), shown.key, "loom.more", run=1, at=2, tokens=3, rows=2)
    assert answer["ok"] and len(answer["result"]["runs"]) == 6
    until(lambda: (found := trait("loom")) and len(found["runs"]) == 6 and all(run["status"] == "done" for run in found["runs"]))
    kept = command(session_comm(), shown.key, "loom.mark", run=1, at=2, mark="kept", on=True)["result"]
    assert kept["kept"] == [{"run": 1, "at": 2, "token": None}] and kept["epoch"] > answer["result"]["epoch"]
    assert command(session_comm(), shown.key, "loom.mark", run=1, at=2, mark="kept", on=False)["result"]["kept"] == []


def test_an_expansion_goes_on_by_itself_while_the_view_is_told(shown: Loom) -> None:
    assert command(session_comm(), shown.key, "loom.expand", run=0, at=1, width=2, depth=3)["ok"]
    until(lambda: trait("loom")["growing"] == 0 and len(trait("loom")["opened"]) == 7)
    rows = [row["kind"] for row in trait("loom")["rows"]]
    assert 4 <= rows.count("probe") <= 6 and rows.count("sample") == 4


def test_a_waiting_expansion_and_the_thread_that_tells_the_view_do_not_meet(shown: Loom, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = 0, 0
    advance = Growth.advance

    def slow(growth: Growth, loom: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.06)  # longer than the other thread rests
        advance(growth, loom)
        inside -= 1

    monkeypatch.setattr(Growth, "advance", slow)
    shown.expand(Place(0, 1), width=2, depth=3)
    assert most == 1 and len(shown.opened) == 7 and not shown._growing


@pytest.mark.parametrize("wait", [True, False])
def test_an_expansion_that_fills_the_loom_says_so_and_keeps_what_it_opened(
    shown: Loom, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    monkeypatch.setattr(loomview, "MAX_RUNS", 7)
    if wait:
        with pytest.raises(RequestError, match="has [5-7] rows already"):
            shown.expand(Place(0, 1), width=2, depth=4)
    else:
        shown.expand(Place(0, 1), width=2, depth=4, wait=False)
    until(lambda: trait("loom")["growing"] == 0 and "rows already" in trait("loom")["note"])
    assert shown.opened and len(shown.runs) <= 7
    monkeypatch.undo()
    shown.expand(Place(1, 1), width=2, depth=1)
    assert trait("loom")["note"] == ""


def test_rows_that_are_refused_take_those_before_them_back(lm: LanguageModel, engine: LocalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    view = woven(lm, engine)
    submitted: list[Any] = []
    submit = engine.submit

    def third_fails(request: Any) -> Any:
        if len(submitted) == 2:
            raise RequestError("Full.", "Wait.")
        submitted.extend(made := submit(request))
        return made

    monkeypatch.setattr(engine, "submit", third_fails)
    with pytest.raises(RequestError, match="Full"):
        view.more(Place(0, 2), tokens=500, rows=4)
    assert len(submitted) == 2 and all(one.cancel_requested for one in submitted)
    assert len(view.runs) == len(view.rows) == 6


def test_what_a_page_may_not_ask_is_refused_in_words(shown: Loom) -> None:
    for name, args in (
        ("loom.more", {"run": 9, "at": 0}),
        ("loom.more", {"run": 0, "at": 77}),
        ("loom.more", {"run": 0, "at": 1, "rows": 1000}),
        ("loom.expand", {"run": 0, "at": 1, "width": 16, "depth": 8}),
        ("loom.mark", {"run": 0, "at": 1, "mark": "burnt", "on": True}),
        ("loom.expand", {"run": 0, "at": 1}),
        ("loom.peek", {"run": -1, "at": 0}),
    ):
        answer = command(session_comm(), shown.key, name, **args)
        assert answer["ok"] is False and answer["error"], name
    assert len(shown.rows) == 4


def test_a_path_goes_into_a_variable_that_is_free(shown: Loom, shell: Shell) -> None:
    shell.user_ns = {"loom_chat": "mine"}
    shell.push = shell.user_ns.update  # type: ignore[attr-defined]
    told = command(session_comm(), shown.key, "loom.chat", run=0, at=3)["result"]
    assert told == {"name": "loom_chat_2", "tokens": 3} and shell.user_ns["loom_chat"] == "mine"
    assert shell.user_ns["loom_chat_2"].messages[0]["content"] == "the sea"


def test_a_closed_loom_leaves_its_tree_for_every_reader(shown: Loom, shell: Shell) -> None:
    shown.close()
    data = shell.messages()[-1][2]["data"]
    assert WIDGET_MIME not in data and data[RUN_MIME]["schema"] == "mlxnb.loom/1"
    assert data["text/plain"].startswith("the sea\n") and "×" in data["text/plain"] and "<script" not in data["text/html"]


def test_a_cell_may_ask_for_a_loom_and_batch_execution_gets_its_end(shell: Shell, client: FakeClient) -> None:
    client.release()
    group = RunGroup(ask(client, "one two", samples=3))
    publication = publish(group, view="loom", shell=shell)
    assert publication.finish() and trait("loom")["rows"] == [{"kind": "sample", "given": 0}] * 3
    until(lambda: all(run["status"] == "done" for run in trait("loom")["runs"]))
    sent = [content["data"] for kind, _, content in shell.messages() if kind == "display_data"]
    assert len(sent) == 1 and WIDGET_MIME in sent[0] and sent[0][RUN_MIME]["schema"] == "mlxnb.loom/1"
    shell.run("B", allow_stdin=False)
    batch = RunGroup(ask(client, "one two", samples=2))
    assert publish(batch, view="loom", shell=shell).finish()
    last = shell.messages()[-1][2]["data"]
    assert WIDGET_MIME not in last and last[RUN_MIME]["runs"][0]["status"] == "done" and "one two" in last["text/plain"]


def test_a_cell_of_many_prompts_is_no_loom_and_none_of_them_goes_on(shell: Shell, client: FakeClient) -> None:
    runs = [*ask(client, "one"), *ask(client, "two")]
    with pytest.raises(RequestError, match="one prompt"):
        publish(RunGroup(runs), view="loom", shell=shell)
    with pytest.raises(RequestError, match="no answer"):
        weave(RunGroup([]), client=client)
    client.release()
