"""A conversation is a tree: where a turn goes, what replaces it, what is stale, and that nothing unfinished enters it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_client import Failure, FakeClient
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_live import until

from mlxnb.api import LanguageModel
from mlxnb.chat import Chat
from mlxnb.chatnames import CHATS, Chats
from mlxnb.chattree import tree_text
from mlxnb.chatview import turn_records
from mlxnb.conversation import MAX_TURNS, START, Conversation, Turn
from mlxnb_engine.errors import Cancelled, ModelError, RequestError
from mlxnb_engine.types import Generated, Message


@pytest.fixture
def client() -> Iterator[FakeClient]:
    made = FakeClient()
    yield made
    made.close()


@pytest.fixture
def model(client: FakeClient) -> LanguageModel:
    return LanguageModel("fake", None, client)


@pytest.fixture(autouse=True)
def no_chats() -> Iterator[None]:
    yield
    CHATS.clear()


class Notebook:
    """Cells of one notebook, each with an id and a prompt, run against one chat."""

    def __init__(self, model: LanguageModel, tree: Conversation) -> None:
        self.model, self.tree, self.count = model, tree, 0

    def run(self, cell: str, text: str, **more: Any) -> Turn:
        self.count += 1
        self.tree.ask(text, self.submit, cell=cell, count=self.count, **more).result()
        assert self.tree.head is not None
        return self.tree.head

    def submit(self, told: list[Message]) -> Any:
        return self.model.submit(self.model.request(told, {}))


@pytest.fixture
def notebook(model: LanguageModel) -> Notebook:
    return Notebook(model, Conversation("garden"))


def shape(tree: Conversation) -> list[tuple[str, str | None, str, bool]]:
    """(id, the id of what stands where its parent stood, question, stale) of every turn."""
    return [(turn.id, turn.parent.id if turn.parent else None, turn.question, turn.stale) for turn in tree.turns]


def asked(client: FakeClient) -> list[str]:
    """What the newest request told the model, system message included."""
    return [message.content for message in client.requests[-1].messages or ()]


# -- where a turn goes -----------------------------------------------------------------------------------------------------


def test_a_cell_that_runs_first_goes_after_the_head(notebook: Notebook, client: FakeClient) -> None:
    notebook.run("a", "one")
    notebook.run("b", "two")
    assert shape(notebook.tree) == [("t1", None, "one", False), ("t2", "t1", "two", False)]
    assert asked(client) == ["one", "one ", "two"]
    first, second = notebook.tree.turns
    assert (second.answer, second.cell, second.count, second.model, second.finish, second.tokens) == ("two ", "b", 2, "fake", "stop", 1)
    assert second.seed == second.run.seed and second.generated == Generated((1,), 0)  # type: ignore[union-attr, arg-type]
    assert second.path == [first, second]


def test_a_cell_that_runs_again_replaces_its_turn_where_it_stands_and_marks_what_follows(notebook: Notebook, client: FakeClient) -> None:
    for cell, text in (("a", "one"), ("b", "two"), ("c", "three")):
        notebook.run(cell, text)
    old = notebook.tree.turns
    new = notebook.run("b", "two again")
    assert shape(notebook.tree) == [("t1", None, "one", False), ("t2", "t1", "two again", False), ("t3", "t2", "three", True)]
    assert asked(client) == ["one", "one ", "two again"]
    assert notebook.tree.head is new and new.parent is old[0]
    assert old[2].path == list(old), "a stale turn keeps the answers that it follows"


def test_stale_turns_are_never_told_to_a_model(notebook: Notebook, client: FakeClient) -> None:
    for cell, text in (("a", "one"), ("b", "two"), ("c", "three"), ("a", "one again")):
        notebook.run(cell, text)
    notebook.run("d", "four")
    assert asked(client) == ["one again", "one again ", "four"]
    count = len(client.requests)
    with pytest.raises(RequestError, match=r"t2 is stale: it follows an earlier answer of turn t1.*cell \[2\].*fork garden t2"):
        notebook.run("c", "three again")
    with pytest.raises(RequestError, match="t3 is stale"):
        notebook.run("e", "five", after="t3")
    with pytest.raises(RequestError, match="t2 is stale"):
        notebook.tree.go_to("t2")
    assert len(client.requests) == count


def test_whoever_asks_among_stale_turns_is_told_a_way_that_needs_no_cell(notebook: Notebook) -> None:
    chat = Chat(notebook.model, {}, notebook.tree)
    for cell, text in (("a", "one"), ("b", "two"), ("c", "three"), ("b", "two again")):
        notebook.run(cell, text)
    with pytest.raises(RequestError, match=r"t3 is stale: it follows an earlier answer of turn t2.*--after t1.*fork garden t3"):
        chat.regenerate("t3")
    assert chat.regenerate("t2").done and notebook.tree.head is not None and notebook.tree.head.parent is notebook.tree.turn("t1")
    notebook.run("a", "one again")
    with pytest.raises(RequestError, match="t2 is stale.*--after start"):
        chat.send("x", after="t2")
    notebook.tree.rename("")
    with pytest.raises(RequestError, match=r"t2 is stale.*after='start'.*fork\('t2'\)"):
        chat.send("x", after="t2")


def test_running_the_cells_again_in_order_brings_everything_up_to_date(notebook: Notebook) -> None:
    cells = [("a", "one"), ("b", "two"), ("c", "three")]
    for cell, text in cells:
        notebook.run(cell, text)
    fresh = shape(notebook.tree)
    for cell, text in cells:
        notebook.run(cell, text)
    assert shape(notebook.tree) == fresh and notebook.tree.history == notebook.tree.turns
    assert [turn.count for turn in notebook.tree.turns] == [4, 5, 6]


def test_a_restart_and_run_all_makes_the_same_tree(model: LanguageModel) -> None:
    """With branches and a fork of cells in it; what differs is only what was drawn anew."""

    def run_all() -> list[Any]:
        CHATS.clear()
        here = Notebook(model, CHATS.open("garden"))
        here.run("a", "one", system="Be brief.")
        here.run("b", "two")
        here.run("c", "two in other words", after="t1")
        here.run("d", "three")
        other = CHATS.fork(here.tree, "t2", "shade")
        Notebook(model, other).run("e", "in the fork")
        return [shape(here.tree), tree_text(here.tree), shape(other), tree_text(other)]

    assert run_all() == run_all()


def test_a_branch_is_asked_after_any_turn_or_before_the_first(notebook: Notebook, client: FakeClient) -> None:
    notebook.run("a", "one")
    notebook.run("b", "two")
    notebook.run("c", "other two", after="t1")
    assert asked(client) == ["one", "one ", "other two"]
    notebook.run("d", "anew", after=START)
    assert asked(client) == ["anew"]
    assert shape(notebook.tree) == [
        ("t1", None, "one", False),
        ("t2", "t1", "two", False),
        ("t3", "t1", "other two", False),
        ("t4", None, "anew", False),
    ]
    for wrong in ("t9", "", "2", "garden"):
        with pytest.raises(RequestError, match="has no turn"):
            notebook.run("e", "x", after=wrong)


def test_a_cell_may_move_its_turn_but_not_behind_itself(notebook: Notebook) -> None:
    for cell, text in (("a", "one"), ("b", "two"), ("c", "three")):
        notebook.run(cell, text)
    with pytest.raises(RequestError, match="t3 comes after this cell's own turn t2"):
        notebook.run("b", "two", after="t3")
    with pytest.raises(RequestError, match="own turn t2"):
        notebook.run("b", "two", after="t2")
    notebook.run("b", "two", after=START)
    assert shape(notebook.tree) == [("t1", None, "one", False), ("t2", None, "two", False), ("t3", "t2", "three", True)]


def test_the_same_cell_has_a_turn_in_each_chat_of_its_own(model: LanguageModel) -> None:
    """Two notebooks that were copied have the same cell ids; so has a cell whose line names another chat than before."""
    one, other = Notebook(model, Conversation("one")), Notebook(model, Conversation("other"))
    one.run("a", "first")
    other.run("a", "second")
    one.run("a", "third")
    assert shape(one.tree) == [("t1", None, "third", False)] and shape(other.tree) == [("t1", None, "second", False)]


def test_a_turn_of_no_cell_replaces_none(notebook: Notebook) -> None:
    notebook.run("", "one")
    notebook.run("", "one")
    assert shape(notebook.tree) == [("t1", None, "one", False), ("t2", "t1", "one", False)]


def test_replaced_turns_are_kept_only_while_something_answers_them(notebook: Notebook) -> None:
    for cell, text in (("a", "one"), ("b", "two"), ("a", "one'"), ("a", "one''")):
        notebook.run(cell, text)
    assert [turn.question for turn in notebook.tree.history] == ["one", "two", "one''"]
    notebook.run("b", "two'")
    assert [turn.question for turn in notebook.tree.history] == ["one''", "two'"]


# -- system messages -------------------------------------------------------------------------------------------------------


def test_a_system_message_holds_from_its_turn_on_and_only_on_its_branch(notebook: Notebook, client: FakeClient) -> None:
    notebook.run("a", "one", system="S1", default_system="ignored")
    notebook.run("b", "two", default_system="ignored")
    assert asked(client)[0] == "S1"
    notebook.run("c", "three", system="S2")
    notebook.run("d", "four")
    assert asked(client)[0] == "S2"
    notebook.run("e", "aside", after="t1")
    assert asked(client)[0] == "S1"
    notebook.run("f", "silent", system="")
    assert (client.requests[-1].messages or ())[0].role == "user"


def test_a_notebooks_own_system_message_is_kept_with_the_turn_that_used_it(notebook: Notebook, client: FakeClient) -> None:
    notebook.run("a", "one", default_system="D")
    notebook.run("b", "two", default_system="changed since")
    assert asked(client)[0] == "D" and [turn.system for turn in notebook.tree.turns] == ["D", None]


# -- what does not enter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["failed", "stopped", "refused"])
def test_a_turn_without_a_complete_answer_leaves_everything_as_it_was(how: str) -> None:
    client, held = FakeClient(failures=[Failure(ModelError("broken"), text="bad")]), FakeClient(hold=1)
    here = Notebook(LanguageModel("fake", None, client), Conversation("garden"))
    here.run("a", "one")
    here.run("b", "two")
    if how == "stopped":
        here.model = LanguageModel("fake", None, held)
    before, head = shape(here.tree), here.tree.head
    for cell in ("a", "c"):  # in place of a turn, and as a new one
        if how == "refused":
            with pytest.raises(RequestError, match="empty"):
                here.run(cell, "  ")
            continue
        run = here.tree.ask("bad one two", here.submit, cell=cell)
        if how == "stopped":
            run.cancel()
        with pytest.raises((ModelError, Cancelled)):
            run.result()
        assert shape(here.tree) == before and here.tree.head is head and here.tree.writing is None
        assert here.tree.last is not None and here.tree.last.run is run, "what there is of it can still be seen"
    assert here.tree.turns == here.tree.history
    client.close()
    held.close()


def test_a_run_that_resumes_a_stopped_answer_completes_its_turn(notebook: Notebook, client: FakeClient) -> None:
    notebook.run("a", "one")
    held = FakeClient(hold=1)
    stopped = notebook.tree.ask(
        "two words", lambda told: LanguageModel("fake", None, held).submit(notebook.model.request(told, {})), cell="b"
    )
    stopped.cancel()
    assert stopped.wait(5) and len(notebook.tree.turns) == 1
    resumed = notebook.submit([Message("user", "two words")])
    notebook.tree.resumed(resumed)
    assert resumed.wait(5)
    assert shape(notebook.tree) == [("t1", None, "one", False), ("t2", "t1", "two words", False)]
    assert notebook.tree.turns[1].answer == "two words " and notebook.tree.turns[1].cell == "b"
    with pytest.raises(RequestError, match="no unanswered question"):
        notebook.tree.resumed(resumed)
    held.close()


def test_a_resumed_run_finds_its_question_though_nobody_looked_since(notebook: Notebook) -> None:
    held = FakeClient(hold=1)
    stopped = notebook.tree.ask("two words", lambda told: LanguageModel("fake", None, held).submit(notebook.model.request(told, {})))
    stopped.cancel()
    assert stopped.wait(5) and stopped.on_resume is not None
    stopped.on_resume(notebook.submit([Message("user", "two words")]))
    until(lambda: [turn.answer for turn in notebook.tree.turns] == ["two words "])
    late = notebook.tree.ask("other", notebook.submit).result()
    assert late.on_resume is not None
    stopped.on_resume(late)
    assert notebook.tree.turns[-1].question == "other", "another question was asked since: nothing changes"
    held.close()


def test_a_question_waits_for_the_end_of_an_answer_that_was_told_to_stop() -> None:
    client = FakeClient(lambda request, index: ["a ", "b ", "c "], between=lambda: time.sleep(0.3))
    here = Notebook(LanguageModel("fake", None, client), Conversation("garden"))
    first = here.tree.ask("one", here.submit)
    until(lambda: first.token_count == 1)
    first.cancel()
    assert first.stopping
    here.tree.ask("two", here.submit).result()
    assert first.finish_reason == "cancelled" and [turn.question for turn in here.tree.turns] == ["two"]
    client.close()


def test_the_record_of_a_view_looks_at_the_tree_as_often_for_many_turns_as_for_few(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    history = Conversation.history.fget
    assert history is not None

    def counted(tree: Conversation) -> Any:
        nonlocal looks
        looks += 1
        return history(tree)

    monkeypatch.setattr(Conversation, "history", property(counted))
    seen = []
    for count in (4, 40):
        tree = Conversation()
        tree.begin([Message(("user", "assistant")[i % 2], "x") for i in range(2 * count)])  # type: ignore[arg-type]
        looks = 0
        assert len(turn_records(tree, [])) == 2 * count and tree.newest(tree.turns[0]) is tree.head
        seen.append(looks)
    assert seen[0] == seen[1]


def test_a_second_answer_at_once_is_refused_in_words_that_help() -> None:
    client = FakeClient(hold=1)
    model = LanguageModel("fake", None, client)
    here = Notebook(model, Conversation("garden"))
    run = here.tree.ask("one two", here.submit, cell="a")
    hint = f"%mlx wait {run.request.id}.*%mlx cancel {run.request.id}.*%mlx fork garden"
    for act in (
        lambda: here.tree.ask("more", here.submit, cell="b"),
        lambda: here.tree.ask("more", here.submit, cell="a"),
        lambda: here.tree.go_to(START),
        lambda: here.tree.begin([]),
        lambda: Conversation().copy_into(here.tree),
        lambda: here.tree.resumed(run),
    ):
        with pytest.raises(RequestError, match=f"still being written.*{hint}"):
            act()
    assert len(client.requests) == 1
    with pytest.raises(RequestError, match=r"run\.wait\(\).*fork"):
        chat = Chat(model, {})
        chat.stream("one two")
        chat.send("more")
    client.release()
    assert run.wait(5)
    here.run("b", "more")
    assert shape(here.tree) == [("t1", None, "one two", False), ("t2", "t1", "more", False)]
    client.close()


def test_many_threads_that_ask_at_once_get_one_answer_and_refusals(model: LanguageModel) -> None:
    here = Notebook(model, Conversation("garden"))
    outcomes: list[str] = []
    gate = threading.Barrier(8)

    def ask(number: int) -> None:
        gate.wait()
        for _ in range(20):
            try:
                here.tree.ask(f"q{number}", here.submit, cell=f"c{number}").result()
                outcomes.append("done")
            except RequestError as error:
                # A cell whose place follows one that another thread ran again meanwhile is refused as well.
                assert "still being written" in error.message or "is stale" in error.message, error
                outcomes.append("refused")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 160 and outcomes.count("done") > 0
    turns = here.tree.turns
    assert len({turn.cell for turn in turns}) == len(turns) == len({turn.id for turn in turns}) <= 8
    assert all(turn.parent is None or turn.parent in here.tree.history for turn in here.tree.history)


def test_a_submit_that_raises_changes_nothing(notebook: Notebook) -> None:
    told: list[int] = []
    notebook.tree.changed.append(lambda: told.append(1))

    def submit(messages: list[Message]) -> Any:
        raise ModelError("no engine")

    with pytest.raises(ModelError):
        notebook.tree.ask("x", submit, cell="a")
    assert notebook.tree.last is None and notebook.tree.writing is None and told == []


def test_a_full_conversation_takes_no_more(notebook: Notebook) -> None:
    notebook.tree.begin([Message(("user", "assistant")[i % 2], "x") for i in range(2 * MAX_TURNS)])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="4,096 turns already.*`%mlx reset garden`"):
        notebook.run("a", "x")
    assert not notebook.tree.turns[-1].stale and len(tree_text(notebook.tree).splitlines()) == MAX_TURNS + 2


# -- forks -----------------------------------------------------------------------------------------------------------------


def test_a_fork_begins_with_the_same_turns_and_lives_its_own_life(notebook: Notebook, client: FakeClient) -> None:
    chats = Chats()
    chats.add(notebook.tree)
    for cell, text in (("a", "one"), ("b", "two"), ("c", "three")):
        notebook.run(cell, text)
    fork = chats.fork(notebook.tree, "t2")
    assert fork.name == "garden-2" and [turn.question for turn in fork.turns] == ["one", "two"]
    assert fork.turns[0].generated == notebook.tree.turns[0].generated and fork.session != notebook.tree.session
    Notebook(notebook.model, fork).run("a", "in the fork")
    assert asked(client) == ["one", "one ", "two", "two ", "in the fork"], "no cell of the first chat is one of the fork"
    assert len(notebook.tree.turns) == 3 and chats.names == ["garden", "garden-2"]
    assert chats.fork(notebook.tree).name == "garden-3" and chats.fork(fork).name == "garden-4"


def test_a_fork_that_is_made_again_is_brought_up_to_date(notebook: Notebook) -> None:
    """Its cell runs again with all the others, and finds the fork of the time before."""
    chats = Chats()
    notebook.run("a", "one")
    notebook.run("b", "two")
    fork = chats.fork(notebook.tree, "t2", "shade")
    Notebook(notebook.model, fork).run("x", "there")
    assert chats.fork(notebook.tree, "t2", "shade") is fork
    assert (
        shape(fork) == [("t1", None, "one", False), ("t2", "t1", "two", False), ("t3", "t2", "there", False)] and fork.head is fork.turns[1]
    )
    notebook.run("b", "two again")
    chats.fork(notebook.tree, "t2", "shade")
    assert shape(fork) == [("t1", None, "one", False), ("t2", "t1", "two again", False), ("t3", "t2", "there", True)]
    chats.open("mine")
    Notebook(notebook.model, chats.find("mine")).run("a", "x")
    for name in ("mine", "a b", "", "-x"):
        with pytest.raises(RequestError):
            chats.fork(notebook.tree, None, name)
    with pytest.raises(RequestError, match="already"):
        chats.fork(fork, None, "shade")


def test_a_fork_of_stale_turns_keeps_the_thread_that_they_belong_to(notebook: Notebook) -> None:
    for cell, text in (("a", "one"), ("b", "two"), ("c", "three"), ("a", "one again")):
        notebook.run(cell, text)
    kept = Chats().fork(notebook.tree, "t3")
    assert shape(kept) == [("t1", None, "one", False), ("t2", "t1", "two", False), ("t3", "t2", "three", False)]


def test_names_are_short_words_and_the_nearest_is_named() -> None:
    chats = Chats()
    for name in ("garden", "a", "Ünï-1.x_y", "9", "x" * 64):
        assert chats.open(name) is chats.open(name)
    for name in ("", " ", "a b", "-c", "--all", "_x", "x" * 65, "a/b", "..", "a\n", None, 7):
        with pytest.raises(RequestError, match="no name of a chat"):
            chats.open(name)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="Did you mean 'garden'"):
        chats.find("gardne")
    assert Chats().fresh_name("") == "chat-1"


# -- drawing ---------------------------------------------------------------------------------------------------------------


def test_the_tree_is_drawn_with_its_branches_head_cells_and_stale_turns(notebook: Notebook) -> None:
    notebook.run("a", "one", system="Be brief.")
    notebook.run("b", "two")
    notebook.run("c", "three")
    notebook.run("d", "aside", after="t1")
    notebook.run("e", "more aside")
    notebook.run("b", "two again")
    notebook.run("f", "four")
    notebook.run("g", "another beginning", after=START)
    notebook.tree.go_to("t6")
    assert tree_text(notebook.tree).splitlines() == [
        "garden · 7 turns · 1 stale · head t6",
        "● System: Be brief.",
        "├─○ t7  another beginning  [8]",
        "● t1  one                  [1]",
        "├─○ t4  aside              [4]",
        "│ ○ t5  more aside         [5]",
        "● t2  two again            [6]",
        "├─◌ t3  three              [3]  stale",
        "● t6  four                 [7]  head",
        "A stale turn answers an earlier version of a turn before it: run its cell again, or fork it to keep it.",
    ]
    assert tree_text(Conversation("x")) == "x · 0 turns\n● Start"


# -- any order of anything ---------------------------------------------------------------------------------------------------


class Everything(RuleBasedStateMachine):
    """Cells run in any order, stop, branch, fork and reset; the rules hold at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.client = FakeClient(answer=lambda request, index: [f"a{len(self.client.requests)} "])
        self.notebook = Notebook(LanguageModel("fake", None, self.client), Conversation("garden"))
        self.chats = Chats()

    @initialize()
    def begin(self) -> None:
        self.chats.add(self.notebook.tree)

    @rule(cell=st.sampled_from("abcd"), after=st.sampled_from([None, None, START, "t1", "t2", "t3"]), text=st.sampled_from(["x", "y"]))
    def run(self, cell: str, after: str | None, text: str) -> None:
        before = self.notebook.tree.history
        place = next((turn for turn in self.notebook.tree.turns if turn.cell == cell), None)
        try:
            turn = self.notebook.run(cell, text, after=after)
        except RequestError:
            assert self.notebook.tree.history == before
            return
        assert not turn.stale and (place is None or turn.id == place.id)
        told = [message.content for message in self.client.requests[-1].messages or ()]
        assert told == [word for one in turn.path[:-1] for word in (one.question, one.answer)] + [text]

    @precondition(lambda self: self.notebook.tree.turns)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.notebook.tree.turns))
        made = self.chats.fork(self.notebook.tree, turn)
        assert [(one.question, one.answer) for one in made.turns] == [(one.question, one.answer) for one in turn.path]
        assert not any(one.stale for one in made.turns)

    @precondition(lambda self: self.notebook.tree.turns)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.notebook.tree.turns))
        if turn.stale:
            with pytest.raises(RequestError):
                self.notebook.tree.go_to(turn)
        else:
            self.notebook.tree.go_to(turn)

    @rule()
    def reset(self) -> None:
        self.notebook.tree.reset()
        assert self.notebook.tree.history == ()

    @invariant()
    def holds(self) -> None:
        tree = self.notebook.tree
        history = tree.history
        assert tree.head is None or (tree.head in tree.turns and not tree.head.stale)
        assert len({turn.id for turn in tree.turns}) == len(tree.turns)
        for number, turn in enumerate(history):
            assert turn.parent is None or turn.parent in history[:number]
            if turn.replaced_by is not None:
                assert any(other.parent is turn for other in history), "kept for nobody"
        drawn = tree_text(tree).splitlines()
        assert sum(" stale" in line[-6:] for line in drawn) == sum(turn.stale for turn in tree.turns)

    def teardown(self) -> None:
        self.client.close()


Everything.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestEverything = Everything.TestCase
