"""The Python API does what the magic does: one request per prompt, typed refusals, nothing left running behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from fake_client import Failure, FakeClient

from mlxnb import runtime
from mlxnb.api import Chat, LanguageModel, load
from mlxnb.ask import OPTION_NAMES, ROLES, UnknownOption, build_request
from mlxnb.run import Run, RunGroup
from mlxnb_engine import policy
from mlxnb_engine.errors import Cancelled, ModelError, RequestError
from mlxnb_engine.types import Message


@pytest.fixture
def made() -> Iterator[Any]:
    clients: list[FakeClient] = []

    def make(**options: Any) -> tuple[FakeClient, LanguageModel]:
        client = FakeClient(**options)
        clients.append(client)
        return client, LanguageModel("fake", None, client)

    yield make
    for client in clients:
        client.close()


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_string_becomes_one_user_message_and_options_reach_the_request() -> None:
    sampling = {"temp": 0.5, "seed": 4, "logit_bias": {7: -1.0}, "logprobs": 2}
    request = build_request("Hi", {"system": "S", "n": 3, "stop": "END", "prefill": "P", "thinking": False, **sampling})
    assert request.messages == (Message("system", "S"), Message("user", "Hi"))
    assert (request.samples, request.stop, request.prefill, request.thinking, request.text) == (3, ("END",), "P", False, None)
    spec = request.sampling
    assert (spec.temp, spec.seed, spec.logit_bias, spec.logprobs) == (0.5, 4, ((7, -1.0),), 2)
    assert "temp" not in request.open_fields and "top_p" in request.open_fields


def test_without_options_a_request_has_the_policys_defaults_and_leaves_the_model_its_own() -> None:
    request, defaults = build_request("Hi", {}), policy.resolve()
    assert request.max_tokens == defaults.values["max_tokens"]
    assert request.sampling == defaults.sampling()
    assert set(request.open_fields) == set(defaults.open_fields)


def test_every_option_is_a_setting_of_the_policy_or_of_the_prompt() -> None:
    assert set(OPTION_NAMES) - {"n", "template"} <= set(policy.DEFAULTS)
    assert set(policy.DEFAULTS) - set(OPTION_NAMES) == {"model", "dtype", "samples"}


def test_a_raw_completion_sends_the_text_byte_for_byte() -> None:
    text = "Once {upon} a $time\r\n"
    request = build_request(text, {"template": False})
    assert (request.text, request.messages) == (text, None)


@pytest.mark.parametrize(
    "prompt, options, says",
    [
        ("x", {"temperature": 1}, "no option 'temperature'"),
        ("x", {"max_token": 5}, "'max_tokens'"),
        ("x", {"zzz": 5}, "Options are n, system"),
        ("x", {"temp": -1}, "temp=-1 is out of range"),
        ("x", {"n": 0}, "samples=0"),
        ("x", {"stop": 3}, "stop=3"),
        ("x", {"stop": ["a", ""]}, "stop string is empty"),
        ("x", {"logit_bias": "abc"}, "logit_bias"),
        ("x", {"system": 3}, "system is int"),
        ("x", {"prefill": None}, "prefill is NoneType"),
        ("x", {"template": False, "system": "S"}, "no system message"),
        ([{"role": "user", "content": "x"}], {"template": False}, "takes a string"),
        (3, {}, "not int"),
        ({"role": "user", "content": "x"}, {}, "not dict"),
        ([], {}, "empty"),
        (["x"], {}, "Message 0 is str"),
        ([{"role": "user"}], {}, "Message 0 has no 'content'"),
        ([{"role": "user", "content": "x"}, {"role": "bot", "content": "x"}], {}, "Message 1 has the role 'bot'"),
        ([{"role": "user", "content": ["x"]}], {}, "The content of message 0 is list"),
        ([{"role": "user", "content": "x", "name": "n"}], {}, "'name'"),
        ([{"role": "system", "content": "x"}], {"system": "y"}, "two system messages"),
    ],
)
def test_bad_input_is_refused_with_its_reason_and_what_to_do(prompt: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_request(prompt, options)
    assert says in str(caught.value)
    assert caught.value.hint


def test_a_wrong_keyword_is_a_type_error_too_and_names_the_nearest(made: Any) -> None:
    _, lm = made()
    with pytest.raises(TypeError, match="Did you mean 'top_p'"):
        lm.generate("x", topp=0.5)
    with pytest.raises(UnknownOption):
        lm.chat(topp=0.5)
    assert "tool" in ROLES


# -- one prompt --------------------------------------------------------------------------------------------------------


def test_generate_waits_and_gives_a_run_or_a_group(made: Any) -> None:
    client, lm = made()
    run = lm.generate("one two")
    assert isinstance(run, Run) and run.done and run.text == "one two "
    group = lm.generate("one two", n=3, seed=4)
    assert isinstance(group, RunGroup) and [run.seed for run in group] == [4, 5, 6]
    assert [run.labels for run in group] == [{"sample": 0}, {"sample": 1}, {"sample": 2}]
    assert isinstance(lm.generate("one", n=1), RunGroup), "the caller who says n gets a group whatever n is"
    assert len(client.requests) == 3


def test_generate_without_waiting_returns_at_once(made: Any) -> None:
    client, lm = made(hold=1)
    run = lm.generate("one two", wait=False)
    assert not run.done
    client.release()
    assert run.wait(5)


def test_a_failed_run_raises_its_error_and_keeps_what_it_had(made: Any) -> None:
    _, lm = made(failures=[Failure(ModelError("no finite score", "try float32"))])
    with pytest.raises(ModelError, match="no finite score") as caught:
        lm.generate("one two three")
    assert caught.value.run.text == "one "  # type: ignore[attr-defined]


def test_a_group_raises_only_if_all_of_it_failed(made: Any) -> None:
    _, lm = made(failures=[Failure(ModelError("one row"), index=1), Failure(ModelError("all"), text="doomed")])
    group = lm.generate("fine", n=3)
    assert [run.finish_reason for run in group] == ["stop", "error", "stop"] and len(group.errors) == 1
    with pytest.raises(ModelError, match="all"):
        lm.generate("doomed", n=2)


def test_an_interrupt_stops_the_rows_of_this_call_and_no_other(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, lm = made(hold=1)
    other = lm.generate("other one", wait=False)
    calls: list[int] = []
    real = Run.wait

    def wait(self: Run, timeout: float | None = None) -> bool:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(self, timeout)

    monkeypatch.setattr(Run, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        lm.generate("mine two", n=2)
    assert [generation.cancel_requested for generation in client.generations] == [False, True, True]
    client.release()
    assert real(other, 5) and other.finish_reason == "stop"


def test_stream_yields_pieces_as_they_come(made: Any) -> None:
    _, lm = made()
    run = lm.stream("one two three")
    assert list(run) == ["one ", "two ", "three "]
    with pytest.raises(RequestError, match="A stream is one answer"):
        lm.stream("x", n=2)


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_agenerate_never_blocks_the_loop_and_many_run_together(made: Any) -> None:
    client, lm = made(hold=1)

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(lm.agenerate(f"p{i} end")) for i in range(40)]
        while len(client.generations) < 40:
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        client.release()
        return await asyncio.wait_for(asyncio.gather(*tasks), 10)

    runs = asyncio.run(main())
    assert [run.text for run in runs] == [f"p{i} end " for i in range(40)]


def test_cancelling_a_task_stops_its_run(made: Any) -> None:
    client, lm = made(hold=1)

    async def main() -> None:
        task = asyncio.create_task(lm.agenerate("one two", n=2))
        while not client.generations:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert all(generation.cancel_requested for generation in client.generations)
    assert all(generation.wait(5) is not None for generation in client.generations)


def test_agenerate_raises_the_typed_error(made: Any) -> None:
    _, lm = made(failures=[Failure(ModelError("broken"))])
    with pytest.raises(ModelError, match="broken"):
        asyncio.run(lm.agenerate("one two"))


# -- many prompts ------------------------------------------------------------------------------------------------------


def test_each_prompt_of_a_batch_restarts_at_the_seed(made: Any) -> None:
    _, lm = made()
    group = lm.batch(["a", "b"], n=2, seed=9)
    assert [(run.labels["prompt"], run.labels["sample"], run.seed) for run in group] == [
        ("a", 0, 9),
        ("a", 1, 10),
        ("b", 0, 9),
        ("b", 1, 10),
    ]
    assert list(group.to_frame()["prompt"]) == ["a", "a", "b", "b"]


def test_a_batch_is_checked_whole_before_anything_is_sent(made: Any) -> None:
    client, lm = made()
    with pytest.raises(RequestError, match="not int"):
        lm.batch(["a", 3])
    with pytest.raises(RequestError, match="not one string"):
        lm.batch("abc")
    assert client.requests == []
    assert len(lm.batch([])) == 0


def test_a_refusal_in_the_middle_of_a_batch_takes_back_what_was_sent(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, lm = made(hold=0)
    real = client.submit

    def submit(request: Any) -> Any:
        if len(client.requests) == 2:
            raise RequestError("The queue is full.", "Send less.")
        return real(request)

    monkeypatch.setattr(client, "submit", submit)
    with pytest.raises(RequestError, match="queue is full"):
        lm.batch(["a", "b", "c"])
    assert [generation.cancel_requested for generation in client.generations] == [True, True]


def test_one_bad_prompt_of_a_batch_does_not_cost_the_others(made: Any) -> None:
    _, lm = made(failures=[Failure(ModelError("too long"), text="bad", after=0)])
    group = lm.batch(["good", "bad"])
    assert [run.finish_reason for run in group] == ["stop", "error"]


# -- chat --------------------------------------------------------------------------------------------------------------


def test_a_chat_remembers_its_turns_in_order(made: Any) -> None:
    client, lm = made()
    chat = lm.chat(system="Be short.", temp=0.5)
    chat.send("one")
    chat.send("two", temp=0.9)
    assert [(m.role, m.content) for m in client.requests[1].messages] == [
        ("system", "Be short."),
        ("user", "one"),
        ("assistant", "one "),
        ("user", "two"),
    ]
    assert [request.sampling.temp for request in client.requests] == [0.5, 0.9]
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be short."}]


@pytest.mark.parametrize("how", ["failed", "stopped"])
def test_a_failed_or_stopped_turn_leaves_the_chat_as_it_was_and_can_be_sent_again(made: Any, how: str) -> None:
    failures = [Failure(ModelError("broken"), text="again")] if how == "failed" else []
    client, lm = made(failures=failures, hold=None if how == "failed" else 1)
    chat = lm.chat()
    if how == "stopped":
        client.release()
    chat.send("one")
    before = chat.messages
    if how == "failed":
        with pytest.raises(ModelError):
            chat.send("again please")
        client._failures = ()
    else:
        client._released.clear()
        run = chat.stream("again please")
        run.cancel()
        assert run.wait(5)
        with pytest.raises(Cancelled):
            run.raise_for_error()
        client.release()
    assert chat.messages == before
    assert chat.send("again please").done
    assert [m["content"] for m in chat.messages] == ["one", "one ", "again please", "again please "]


def test_a_streamed_turn_enters_the_chat_once_it_is_complete(made: Any) -> None:
    client, lm = made(hold=1)
    chat = lm.chat()
    run = chat.stream("one two", prefill="P:")
    assert len(chat) == 0
    with pytest.raises(RequestError, match="still being written"):
        chat.send("next")
    client.release()
    assert "".join(run) == "one two "
    assert chat.messages[-1] == {"role": "assistant", "content": "P:one two "}


def test_a_chat_takes_one_answer_and_text_only(made: Any) -> None:
    _, lm = made()
    chat = lm.chat()
    with pytest.raises(RequestError, match="one answer"):
        chat.send("x", n=2)
    with pytest.raises(RequestError, match="not text"):
        chat.send(3)
    assert isinstance(chat, Chat) and len(chat) == 0


def test_resetting_a_chat_stops_the_turn_being_written(made: Any) -> None:
    _, lm = made(hold=1)
    chat = lm.chat()
    run = chat.stream("one two")
    chat.reset()
    assert run.wait(5) and run.finish_reason == "cancelled" and chat.messages == []


# -- the model ---------------------------------------------------------------------------------------------------------


def test_load_waits_for_the_model_and_unload_frees_it(made: Any) -> None:
    client, _ = made(models=())
    lm = load("tiny", client=client)
    assert (lm.name, lm.info["name"]) == ("tiny", "tiny")
    assert lm.unload() == ["tiny"]
    assert lm.info == {}


def test_load_uses_the_kernels_one_client_by_default(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = made()
    monkeypatch.setattr(runtime, "client", lambda: client)
    assert load("tiny").generate("a").text == "a "


def test_a_model_that_cannot_be_loaded_says_so(made: Any) -> None:
    client, _ = made()
    with pytest.raises(RequestError, match="There is no model 'missing-one'"):
        load("missing-one", client=client)


def test_a_finished_call_leaves_no_thread_behind(made: Any) -> None:
    _, lm = made()
    asyncio.run(lm.agenerate("one"))
    for thread in threading.enumerate():
        if thread.name == "mlxnb-await":
            thread.join(5)
    assert not any(thread.name == "mlxnb-await" for thread in threading.enumerate())


# -- what a newcomer types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [3, b"m", ["m"], object()])
def test_a_models_name_that_is_no_text_is_refused(made: Any, name: Any) -> None:
    client, _ = made()
    with pytest.raises(RequestError, match="text or a path, not"):
        load(name, client=client)


def test_a_models_name_may_be_a_path_and_a_wrong_dtype_is_refused(made: Any, tmp_path: Any) -> None:
    client, _ = made()
    assert load(tmp_path, client=client).name == str(tmp_path)
    with pytest.raises(RequestError, match="float32, bfloat16"):
        load("tiny", "int3", client=client)


@pytest.mark.parametrize("prompt", ["", " \n", [{"role": "user", "content": "x"}, {"role": "user", "content": ""}]])
def test_an_empty_prompt_is_refused_as_in_a_cell(made: Any, prompt: Any) -> None:
    client, lm = made()
    for ask in (lm.generate, lm.stream, lambda text: lm.batch(["x", text])):
        with pytest.raises(RequestError, match="prompt is empty"):
            ask(prompt)
    if isinstance(prompt, str):
        with pytest.raises(RequestError, match="prompt is empty"):
            lm.chat(system="S").send(prompt)
    assert not client.requests
    assert build_request(" ", {"template": False}).text == " ", "white space is a text to go on from"


@pytest.mark.parametrize(
    "name, says",
    [
        ("samples", "is n."),
        ("no_template", "template=False"),
        ("temperature", "is temp."),
        ("max_new_tokens", "is max_tokens."),
        ("model", "mlxnb.load(NAME)"),
        ("dtype", "dtype=TYPE"),
        ("each", "batch("),
        ("bg", "wait=False"),
    ],
)
def test_a_name_from_elsewhere_is_told_what_it_is_here(made: Any, name: str, says: str) -> None:
    client, lm = made()
    asks: list[Any] = [partial(lm.generate, "x"), partial(lm.stream, "x"), partial(lm.batch, ["x"]), lm.chat]
    for ask in asks:
        with pytest.raises(UnknownOption) as caught:
            ask(**{name: 2})
        assert says in caught.value.hint
    assert not client.requests


def test_copies_of_one_model_in_two_types_are_told_apart(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = made()
    copies = [{"name": "fake", "weights": weights} for weights in ("float32", "bfloat16 (from Q4_1)")]
    monkeypatch.setattr(client, "status", lambda: {"models": copies})
    assert LanguageModel("fake", "bfloat16", client).info["weights"].startswith("bfloat16")
    assert LanguageModel("fake", None, client).info["weights"] == "float32"


def test_an_interrupt_at_the_start_of_a_load_stops_it(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxnb_engine.session import Generation

    client, _ = made()
    generation = Generation(build_request("x", {}))
    monkeypatch.setattr(client, "load", lambda model, dtype: generation)

    def interrupted(self: Run, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        load("tiny", client=client)
    assert generation.cancel_requested
    assert len(caught.value._render_traceback_()) == 1  # type: ignore[attr-defined]


def test_a_batch_of_something_that_is_no_list_is_refused(made: Any) -> None:
    _, lm = made()
    for prompts in (None, 3):
        with pytest.raises(RequestError, match="list of prompts"):
            lm.batch(prompts)
