"""`%%mlx` and `%mlx` in a real IPython shell over a scripted engine: from the text of a cell to requests, results and errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
from fake_client import Failure, FakeClient, prompt_of
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from mlxnb import magic, runtime
from mlxnb.run import Run, RunGroup
from mlxnb_engine import events as ev
from mlxnb_engine.errors import Cancelled, EngineDead, MlxnbError, ModelError, RequestError
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, Message, RequestId, SamplingSpec

Make = Callable[..., FakeClient]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """The one shell of this process, with the extension freshly loaded and no variables."""
    ip = InteractiveShell.instance()
    ip.reset(new_session=False)
    ip.config.pop("MLXMagics", None)
    made = runtime._make
    if hasattr(ip, magic._KEY):
        delattr(ip, magic._KEY)
    ip.extension_manager.loaded.discard("mlxnb")
    ip.extension_manager.load_extension("mlxnb")
    yield ip
    ip.extension_manager.unload_extension("mlxnb")
    runtime.use(made)


@pytest.fixture
def engine(shell: InteractiveShell) -> Make:
    """Makes the scripted engine that this shell's next cells use."""

    def make(*args: Any, **more: Any) -> FakeClient:
        client = FakeClient(*args, **more)
        runtime.use(lambda settings: client)
        return client

    return make


def run(shell: InteractiveShell, cell: str) -> Any:
    """Run a cell that must succeed; what it stored."""
    result = shell.run_cell(cell)
    assert result.success, result.error_in_exec or result.error_before_exec
    return shell.user_ns.get("_mlx")


def refused(shell: InteractiveShell, cell: str, kind: type[MlxnbError] = RequestError) -> MlxnbError:
    """Run a cell that must fail with a typed error; that error."""
    result: ExecutionResult = shell.run_cell(cell)
    assert isinstance(result.error_in_exec, kind), result.error_in_exec or result.error_before_exec
    return result.error_in_exec


# -- the text of a cell ----------------------------------------------------------------------------------------------------


BODIES = [
    "Why is the sky blue?",
    "two\nlines",
    "a typed newline at the end\n",
    "\nleading and trailing\n\n",
    '{"a": {"b": [1, {"c": 2}]}}',
    'print(f"{x!r:>{width}} {In[3]}")',
    "$HOME ${HOME} {HOME} `ls` !ls ?what what?",
    "%time 1\n%%bash\nls",
    "{% if x %}{# c #}",
    ">>> prompt = 1\n... more",
    "In [3]: x\n   ...: y",
    "    indented\n\ttabbed  ",
    "CRLF\r\nCR\rand form feed \x0c and \x85 and \u2028 ends",
    "nul \0 byte",
    "lone surrogate \ud800 and \udfff",
    "quotes ''' \"\"\" \\ \\n \\u0041 \\N{DASH}",
    "emoji 👩‍👩‍👧 and e\u0301",
    "# a comment?",
    "ends with a question?",
]


@pytest.mark.parametrize("body", BODIES)
def test_the_body_reaches_the_model_byte_for_byte(shell: InteractiveShell, engine: Make, body: str) -> None:
    client = engine()
    run(shell, f"%%mlx\n{body}")
    assert prompt_of(client.requests[-1]) == body


def test_braces_stay_with_raw_text(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    run(shell, "%%mlx --raw-text\n{{ x }} {{")
    assert prompt_of(client.requests[-1]) == "{{ x }} {{"


def test_a_ten_megabyte_cell_reaches_the_model_whole(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    body = "0123456789 {x} $y\n" * 580_000
    run(shell, "%%mlx\n" + body)
    assert len(body) > 10_000_000
    assert prompt_of(client.requests[-1]) == body


def test_blank_lines_before_the_magic_and_crlf_after_it_are_fine(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    run(shell, "\n\n%%mlx --temp .5\r\nhi\r\n")
    assert prompt_of(client.requests[-1]) == "hi\r\n"
    assert client.requests[-1].sampling.temp == 0.5


def test_a_body_that_comes_from_other_code_loses_one_newline_only(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    run(shell, "%%time\n%%mlx\nnested")
    shell.run_cell_magic("mlx", "", "called\n\n")
    assert [prompt_of(request) for request in client.requests] == ["nested", "called\n"]


def test_the_option_line_is_not_expanded_by_ipython(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    shell.user_ns["x"] = "expanded"
    run(shell, "%%mlx --system '$x {x}'\nhi")
    assert client.requests[-1].messages == (Message("system", "$x {x}"), Message("user", "hi"))


def test_variables_are_inserted_in_the_body_the_system_text_and_the_prefill(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    shell.user_ns.update(topic="rain", In=["", "x = 1"])
    run(shell, "%%mlx --system 'You know {{ topic }}.' --prefill '{{ topic }}:'\nTell of {{ topic }} and {{ In[1] }}.")
    request = client.requests[-1]
    assert request.messages == (Message("system", "You know rain."), Message("user", "Tell of rain and x = 1."))
    assert request.prefill == "rain:"


@pytest.mark.parametrize("cell", ["%%mlx", "%%mlx\n", "%%mlx\n  \n\n", "%%mlx --temp 1"])
def test_an_empty_body_is_an_error_with_useful_text(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    client = engine()
    error = refused(shell, cell)
    assert "no prompt" in str(error) and "below the %%mlx line" in str(error)
    assert "The prompt, as many lines" in capsys.readouterr().out
    assert not client.requests


def test_white_space_is_a_prompt_for_a_raw_completion(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    run(shell, "%%mlx --no-template\n  \n")
    assert client.requests[-1].text == "  \n" and client.requests[-1].messages is None


@pytest.mark.parametrize("cell", ["%%mlx --help", "%%mlx -h\n", "%%mlx --help\nsome prompt", "%mlx?", "%%mlx?"])
def test_help_in_every_form_shows_the_options_and_asks_nothing(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    client = engine()
    assert shell.run_cell(cell).success
    out = capsys.readouterr().out
    assert "--max-tokens" in out and "--sweep" in out
    assert not client.requests


# -- requests and results ----------------------------------------------------------------------------------------------------


def test_options_become_the_request(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    run(
        shell,
        "%%mlx -m org/m --dtype float16 --system sys --prefill pre --thinking off --max-tokens 9 --temp .7 --top-p .9 --top-k 4"
        " --min-p .1 --seed 5 --stop '\\n' --logit-bias 3=1 --logprobs 2 --xtc-probability .5 --presence-penalty 1 --hlg-width 2\nhi",
    )
    request = client.requests[-1]
    assert request.messages == (Message("system", "sys"), Message("user", "hi"))
    assert (request.model, request.dtype, request.prefill, request.thinking, request.max_tokens) == ("org/m", "float16", "pre", False, 9)
    assert request.stop == ("\n",)
    spec = request.sampling
    assert (spec.temp, spec.top_p, spec.top_k, spec.min_p, spec.seed, spec.logprobs) == (0.7, 0.9, 4, 0.1, 5, 2)
    assert spec.logit_bias == ((3, 1.0),) and spec.xtc_probability == 0.5 and spec.presence_penalty == 1.0
    assert spec.hlg is not None and spec.hlg.width == 2.0
    assert request.open_fields == ("repetition_penalty",)


def test_a_single_answer_is_a_run_in_the_named_variable_and_in_mlx(shell: InteractiveShell, engine: Make) -> None:
    engine()
    result = run(shell, "%%mlx -o answer\nhi there")
    assert isinstance(result, Run) and result is shell.user_ns["answer"]
    assert result.text == "hi there " and result.done


def test_samples_are_one_request_and_a_group_with_sample_numbers(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    group = run(shell, "%%mlx -n 3 --seed 7\nhi")
    assert isinstance(group, RunGroup) and len(client.requests) == 1
    assert [one.labels for one in group] == [{"sample": 0}, {"sample": 1}, {"sample": 2}]
    assert [one.seed for one in group] == [7, 8, 9]


def test_each_item_and_each_point_of_the_grid_restarts_at_the_seed(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    shell.user_ns["words"] = ["sun", "moon"]
    group = run(shell, "%%mlx --each words --sweep temp=0,1 --sweep top_k=1:2 -n 2 --seed 3\n{{ index }}: {{ item }}")
    assert len(client.requests) == 8 and len(group) == 16
    assert [prompt_of(request) for request in client.requests] == ["0: sun"] * 4 + ["1: moon"] * 4
    grid = [(request.sampling.temp, request.sampling.top_k) for request in client.requests]
    assert grid == [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)] * 2
    assert [one.seed for one in group] == [3, 4] * 8
    assert group[5].labels == {"item": "sun", "temp": 1.0, "top_k": 1, "sample": 1}


def test_all_rows_are_submitted_before_any_is_awaited(shell: InteractiveShell, engine: Make) -> None:
    client = engine(hold=0)
    shell.user_ns["words"] = list("abcdef")
    run(shell, "%%mlx --bg --each words\n{{ item }}")
    assert len(client.requests) == 6 and not any(generation.done for generation in client.generations)
    client.release()
    run(shell, "%mlx wait")


def test_a_frame_gives_its_columns_as_names_and_as_columns_of_the_result(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    shell.user_ns["df"] = pandas.DataFrame({"city": ["Rome", "Oslo"], "n o": [1, 2]}, index=["r", "o"])
    group = run(shell, "%%mlx --each df\n{{ index }} {{ city }} {{ item['n o'] }}")
    assert [prompt_of(request) for request in client.requests] == ["r Rome 1", "o Oslo 2"]
    assert list(group.to_frame()["city"]) == ["Rome", "Oslo"]


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        (pandas.Series(["a", "b"], index=[10, 20]), ["10 a", "20 b"]),
        (("a", "b"), ["0 a", "1 b"]),
        ((letter for letter in "ab"), ["0 a", "1 b"]),
        ([{"item": "own"}], ["0 own"]),
    ],
)
def test_each_takes_anything_with_items(shell: InteractiveShell, engine: Make, value: Any, prompts: list[str]) -> None:
    client = engine()
    shell.user_ns["v"] = value
    run(shell, "%%mlx --each v\n{{ index }} {{ item }}")
    assert [prompt_of(request) for request in client.requests] == prompts


def test_each_takes_an_expression(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    shell.user_ns["v"] = ["a", "b", "c"]
    run(shell, "%%mlx --each v[1:]\n{{ item }}")
    assert [prompt_of(request) for request in client.requests] == ["b", "c"]


def test_one_item_is_still_one_run(shell: InteractiveShell, engine: Make) -> None:
    engine()
    shell.user_ns["v"] = ["a"]
    assert isinstance(run(shell, "%%mlx --each v\n{{ item }}"), Run)


@pytest.mark.parametrize(
    ("value", "body", "words"),
    [
        (["a"], "no item here", ("does not use the items", "{{ item }}")),
        ([{"q": 1}], "no item here", ("{{ item }} or {{ q }}",)),
        ([], "{{ item }}", ("empty",)),
        ("text", "{{ item }}", ("is a str", "[v]")),
        ({"a": 1}, "{{ item }}", ("is a dict",)),
        (3, "{{ item }}", ("is a int",)),
        (iter(int, 1), "{{ item }}", ("more than 10000",)),
        (["a"], "{{ itm }}", ("`itm`", "`item`")),
    ],
)
def test_a_wrong_each_says_what_to_write(shell: InteractiveShell, engine: Make, value: Any, body: str, words: tuple[str, ...]) -> None:
    client = engine()
    shell.user_ns["v"] = value
    extra = " {{ item }}" if "itm" in body else ""
    error = refused(shell, f"%%mlx --each v\n{body}{extra}")
    for word in words:
        assert word in str(error), str(error)
    assert not client.requests


def test_an_unknown_each_variable_names_near_matches(shell: InteractiveShell, engine: Make) -> None:
    engine()
    shell.user_ns["questions"] = ["a"]
    assert "`questions`" in str(refused(shell, "%%mlx --each question\n{{ item }}"))


def test_too_many_rows_are_refused_before_any_is_submitted(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    assert "10000" in str(refused(shell, "%%mlx --sweep temp=0:1:.01 --sweep top_p=.01:1:.01\nhi"))
    assert "12800 answers" in str(refused(shell, "%%mlx -n 256 --sweep top_k=1:50\nhi"))
    assert not client.requests


def test_a_fault_in_a_later_item_submits_nothing(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    shell.user_ns["v"] = [1, 0]
    assert "ZeroDivisionError" in str(refused(shell, "%%mlx --each v\n{{ 1 / item }}"))
    assert not client.requests


def test_a_refusal_by_the_engine_takes_back_the_rows_before_it(shell: InteractiveShell, engine: Make) -> None:
    client = engine(hold=0)
    submit = client.submit

    def second_is_refused(request: Any) -> Any:
        if client.requests:
            raise RequestError("The context is too short.", "Shorten the prompt.")
        return submit(request)

    client.submit = second_is_refused  # type: ignore[method-assign]
    shell.user_ns["v"] = ["a", "b"]
    assert "context is too short" in str(refused(shell, "%%mlx --each v\n{{ item }}"))
    end = client.generations[0].wait(5)
    assert end is not None and end.kind == "cancelled"


# -- errors --------------------------------------------------------------------------------------------------------------------


def test_an_error_is_shown_as_its_words_without_a_traceback(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    engine()
    refused(shell, "%%mlx --tmp 1\nhi")
    shown = capsys.readouterr().out
    assert shown.strip() == "RequestError: There is no option --tmp. Did you mean --temp? `%%mlx --help` lists them all."


def test_control_characters_in_an_error_do_not_reach_the_terminal(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    engine(failures=[Failure(ModelError("File \x1b[31mred\x07 \ud800.", "Look."))])
    error = refused(shell, "%%mlx\nhi", ModelError)
    out = capsys.readouterr().out
    for text in (out, str(error)):
        assert "\x1b" not in text and "\x07" not in text
        text.encode("utf-8")


def test_a_failed_run_raises_its_typed_error_and_keeps_what_it_wrote(shell: InteractiveShell, engine: Make) -> None:
    engine(failures=[Failure(ModelError("No finite score.", "Try float32."), after=2)])
    error = refused(shell, "%%mlx -o r\none two three", ModelError)
    assert "Try float32." in str(error)
    assert shell.user_ns["r"].text == "one two " and shell.user_ns["_mlx"] is shell.user_ns["r"]


def test_a_failed_row_leaves_the_others_of_its_group_whole(shell: InteractiveShell, engine: Make) -> None:
    engine(failures=[Failure(ModelError("No finite score."), index=1)])
    error = refused(shell, "%%mlx -n 3 -o g\none two three", ModelError)
    assert "1 of 3 answers" in str(error) and "No finite score." in str(error)
    assert [one.text for one in shell.user_ns["g"]] == ["one two three ", "one ", "one two three "]


def test_a_dead_engine_is_replaced_at_the_next_cell(shell: InteractiveShell) -> None:
    made: list[FakeClient] = []

    def make(settings: Any) -> FakeClient:
        made.append(FakeClient(hold=None))
        return made[-1]

    runtime.use(make)
    run(shell, "%%mlx\nfirst")
    run(shell, "%%mlx\nsecond")
    assert len(made) == 1
    made[0].die()
    assert run(shell, "%%mlx\nthird").text == "third "
    assert len(made) == 2


def test_an_engine_that_dies_under_a_cell_ends_it_with_a_typed_error(shell: InteractiveShell, engine: Make) -> None:
    client = engine(hold=1)
    submit = client.submit

    def then_die(request: Any) -> Any:
        made = submit(request)
        client.die()
        return made

    client.submit = then_die  # type: ignore[method-assign]
    refused(shell, "%%mlx\nhi there", EngineDead)


def test_an_error_of_the_engine_is_shown_once(shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine(failures=[Failure(ModelError("No finite score.", "Try float32."))])
    for cell, count in (("%%mlx\none two", 1), ("%%mlx --view none\none two", 1), ("%%mlx -n 2\none two", 2)):
        error = refused(shell, cell, ModelError)
        assert "No finite score." in str(error) and "Try float32." in str(error)
        assert shell.user_ns["_mlx"].wait(0)
        assert capsys.readouterr().out.count("No finite score.") == count, "once for each answer that failed"


def test_an_error_in_batch_execution_stays_whole_in_the_log(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nbclient reports the traceback of the error and none of the displays."""
    monkeypatch.setattr("mlxnb.routing.is_batch", lambda shell: True)
    engine(failures=[Failure(ModelError("No finite score."))])
    error = refused(shell, "%%mlx -n 2\none two", ModelError)
    assert any("No finite score." in line for line in error._render_traceback_())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "cell",
    ["%%mlx\n{{ nothing }}", "%%mlx --each v\n{{ item }}", "%%mlx --each v --system '{{ item }}'\n{{ nothing }}"],
)
def test_a_prompt_that_is_empty_once_filled_in_is_refused(shell: InteractiveShell, engine: Make, cell: str) -> None:
    client = engine()
    shell.user_ns.update(nothing=" ", v=["a", ""])
    error = refused(shell, cell)
    assert "empty" in str(error) and ("--each" not in cell or "--each v" in str(error))
    assert not client.requests


def test_a_list_without_quotes_is_told_to_get_some(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    error = refused(shell, """%%mlx --each ["Oslo","Rome"]\n{{ item }}""")
    assert "`Oslo` is not defined" in str(error)
    example = error.hint.partition(": ")[2].removesuffix(".")
    run(shell, f"%%mlx {example}\n{{{{ item }}}}")
    assert [prompt_of(request) for request in client.requests] == ["Oslo", "Rome"]


def test_answers_can_be_joined_back_to_the_frame_they_came_from(shell: InteractiveShell, engine: Make) -> None:
    engine()
    frame = pandas.DataFrame({"city": ["Rome", "Oslo", "Bonn"]}, index=[7, 3, 5])
    shell.user_ns.update(df=frame, s=frame["city"], own=frame.assign(index=["x", "y", "z"]), some=frame[frame["city"] != "Oslo"])
    for name in ("df", "s"):
        result = run(shell, f"%%mlx --each {name} -n 2\n{{{{ item }}}}").to_frame()
        assert list(result["index"]) == [7, 7, 3, 3, 5, 5]
    joined = frame.join(run(shell, "%%mlx --each some\n{{ city }}").to_frame().set_index("index")["text"])
    assert joined["text"].fillna("none").tolist() == ["Rome ", "none", "Bonn "]
    result = run(shell, "%%mlx --each own\n{{ index }}").to_frame()
    assert list(result["index"]) == ["x", "y", "z"] and list(result["index_"]) == [7, 3, 5]


# -- background, cancel, wait ----------------------------------------------------------------------------------------------------


def test_a_background_cell_returns_at_once_and_wait_ends_it(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    client = engine(hold=1)
    result = run(shell, "%%mlx --bg -o b\none two")
    assert not result.done and shell.user_ns["b"] is result
    run(shell, "%mlx status")
    assert result.request.id in capsys.readouterr().out
    client.release()
    run(shell, "%mlx wait")
    assert result.done and result.text == "one two "
    run(shell, "%mlx wait")
    assert "Nothing is running" in capsys.readouterr().out


def test_a_foreground_cell_runs_beside_a_background_one(shell: InteractiveShell, engine: Make) -> None:
    client = engine(hold=3)
    background = run(shell, "%%mlx --bg\none two three four")
    foreground = run(shell, "%%mlx\nhi")
    assert foreground.done and not background.done
    client.release()
    run(shell, f"%mlx wait {background.request.id}")
    assert background.done


def test_a_background_cell_waits_where_nobody_watches(shell: InteractiveShell, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch execution saves the outputs when the last cell ends, so each cell runs to its end."""
    engine(step_s=0.005)
    monkeypatch.setattr("mlxnb.routing.is_batch", lambda shell: True)
    assert run(shell, "%%mlx --bg\none two three").done


def test_cancel_by_id_stops_that_cell_only(shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine(hold=1)
    first = run(shell, "%%mlx --bg -n 2\none two")
    second = run(shell, "%%mlx --bg\none two")
    run(shell, f"%mlx cancel {first[0].request.id}")
    assert "Stopped 2 running answers." in capsys.readouterr().out
    assert first.wait(5) and not second.done
    assert [one.finish_reason for one in first] == ["cancelled", "cancelled"]
    run(shell, "%mlx cancel all")
    assert second.wait(5) and second.text == "one "
    assert "c999" in str(refused(shell, "%mlx cancel c999"))


def test_wait_raises_the_error_of_a_background_cell_once(shell: InteractiveShell, engine: Make) -> None:
    engine(failures=[Failure(ModelError("No finite score."))])
    run(shell, "%%mlx --bg\none two")
    refused(shell, "%mlx wait", ModelError)
    run(shell, "%mlx wait")


def test_a_cancel_of_ones_own_is_shown_as_stopping_and_is_no_error_of_wait(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    client = engine()

    def slow(request: CompletionRequest) -> list[Generation]:
        """One token, and an engine that has not noticed yet what is asked of it."""
        client.generations.append(Generation(request))
        client.generations[-1].emit(lambda seq, t: ev.Tokens(seq, t, (ev.TokenRecord(7, "one", "sampled", t),), "one"))
        return client.generations[-1:]

    client.submit = slow  # type: ignore[method-assign]
    first, second = (run(shell, "%%mlx --bg\none two") for _ in range(2))
    run(shell, f"%mlx cancel {first.id}")
    capsys.readouterr()
    run(shell, "%mlx status")
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [first.id, "stopping"] in lines and [second.id, "running"] in lines
    first.generation.emit(lambda seq, t: ev.Cancelled(seq, t, "one"))
    second.generation.emit(lambda seq, t: ev.Finished(seq, t, "stop", "one", {}))
    run(shell, "%mlx wait")
    assert "1 answer done, 1 stopped." in capsys.readouterr().out


def test_wait_for_answers_that_were_all_cancelled_says_so(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    engine(hold=1)
    run(shell, "%%mlx --bg -n 2\none two")
    run(shell, "%mlx cancel all")
    run(shell, "%mlx wait")
    assert capsys.readouterr().out.endswith("2 stopped.\n")


def test_a_row_that_somebody_else_stopped_is_still_an_error_of_wait(shell: InteractiveShell, engine: Make) -> None:
    engine(hold=1)
    result = run(shell, "%%mlx --bg\none two")
    result.generation.fail(Cancelled("The model was unloaded."))
    refused(shell, "%mlx wait", Cancelled)


@pytest.mark.parametrize(
    ("count", "requests", "says"),
    [(1, 1, "`%mlx cancel c0` stops it"), (3, 1, "`%mlx cancel c0` stops them"), (3, 3, "`%mlx cancel c0 c1 c2` stops them")],
)
def test_a_background_cell_names_its_own_ids_to_stop_it(count: int, requests: int, says: str) -> None:
    runs = [Run(Generation(CompletionRequest(RequestId(f"c{i % requests}"), "m", text="x"))) for i in range(count)]
    assert magic.cancel_hint(runs, terminal=False) == says
    assert magic.cancel_hint(runs, terminal=True).startswith("`%mlx wait c0")


def test_a_background_cell_of_many_requests_has_a_short_hint(shell: InteractiveShell, engine: Make) -> None:
    runs = [Run(Generation(CompletionRequest(RequestId(f"c{i}"), "m", text="x"))) for i in range(500)]
    for terminal in (False, True):
        assert len(magic.cancel_hint(runs, terminal)) < 100


def test_the_display_of_a_background_cell_says_how_to_stop_that_cell(shell: InteractiveShell, engine: Make) -> None:
    client = engine(hold=0)
    result = run(shell, "%%mlx --bg\none two")
    magics = shell.magics_manager.registry["MLXMagics"]
    hint = magics.background[-1].publication._renderer.stop_hint
    assert hint == f"`%mlx cancel {result.request.id}` stops it"
    run(shell, hint.split("`")[1])
    assert result.wait(5)
    client.release()


# -- a terminal ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    """The same shell, taken for one in a terminal."""
    for module in ("routing", "display"):
        monkeypatch.setattr(f"mlxnb.{module}.is_terminal", lambda shell: True)
    return shell


def test_a_terminal_and_a_notebook_send_the_same_prompt(terminal: InteractiveShell, engine: Make) -> None:
    client = engine()
    for body in ("Why?\n", "Why?\n\n", "Why?"):
        run(terminal, f"%%mlx\n{body}")
    run(terminal, "%%mlx\n\nfirst\n\nlast  \n\n")
    assert [prompt_of(request) for request in client.requests] == ["Why?"] * 3 + ["\nfirst\n\nlast  "]


def test_an_embedded_terminal_is_a_terminal() -> None:
    from IPython.terminal.interactiveshell import TerminalInteractiveShell

    from mlxnb.routing import is_terminal

    class Embedded(TerminalInteractiveShell):
        """As IPython's own shell that `embed()` starts."""

    assert is_terminal(Embedded.__new__(Embedded))
    assert not is_terminal(InteractiveShell.__new__(InteractiveShell))


def test_wait_prints_background_answers_in_a_terminal_once(
    terminal: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    client = engine(hold=1)
    first = run(terminal, "%%mlx --bg\nfirst answer")
    client.release()
    assert first.wait(5)
    second = run(terminal, "%%mlx --bg\nsecond answer")
    assert f"`%mlx wait {second.request.id}` prints it" in capsys.readouterr().out
    run(terminal, "%mlx wait")
    out = capsys.readouterr().out
    assert out.count("first answer") == 1 and out.count("second answer") == 1 and "2 answers done." in out
    run(terminal, "%mlx wait")
    assert "answer" not in capsys.readouterr().out


def test_wait_in_a_terminal_shows_an_error_once(terminal: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine(failures=[Failure(ModelError("No finite score."))])
    run(terminal, "%%mlx --bg\none two")
    refused(terminal, "%mlx wait", ModelError)
    out = capsys.readouterr().out
    assert out.count("No finite score.") == 1 and "one" in out


# -- line commands -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ("%%mlx", "status", "cancel")),
        ("help", ("%mlx wait",)),
        ("help options", ("--max-tokens",)),
        ("help cancel", ("stop running answers",)),
        ("wait --help", ("wait for --bg cells",)),
        ("status", ("not started",)),
        ("models", ("No model is loaded", "default", "on disk")),
        ("unload", ("No model was loaded",)),
        ("cancel", ("Nothing is running",)),
        ("wait", ("Nothing is running",)),
        ("config", ("max_tokens", "512", "max_rows", "temp=0.7", "from")),
        ("status", ("`%mlx config` lists every setting",)),
    ],
)
def test_line_commands_answer_without_starting_an_engine(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], line: str, words: tuple[str, ...]
) -> None:
    def no_engine(settings: Any) -> FakeClient:
        raise AssertionError("an engine was started")

    runtime.use(no_engine)
    run(shell, f"%mlx {line}")
    out = capsys.readouterr().out
    for word in words:
        assert word in out, out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stats", ("%mlx status",)),
        ("What is 2+2?", ("no command", "%%mlx")),
        ("--temp 1", ("no command", "%%mlx")),
        ("load a b", ("one word too many",)),
        ("load --fast", ("no option --fast",)),
        ("load m --dtype int3", ("--dtype",)),
        ("status now", ("one word too many",)),
        ("help sampling", ("no help",)),
        ("config tmp=1", ("'tmp'", "'temp'")),
        ("config temp", ("temp=VALUE",)),
        ("config temp=-1", ("temp",)),
        ("config max_rows=none", ("max_rows",)),
        ("config view=weave", ("view", "answer")),
        ("wait c99", ("c99",)),
        ("cancel 'open", ("never closed",)),
    ],
)
def test_a_wrong_line_command_names_the_right_one(shell: InteractiveShell, engine: Make, line: str, words: tuple[str, ...]) -> None:
    engine()
    error = refused(shell, f"%mlx {line}")
    for word in words:
        assert word in str(error), str(error)
    assert error.hint


def test_load_status_and_unload_go_through_the_engine(shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    client = engine(load=[("download", 10, 100), ("load", 1, 2)])
    run(shell, "%mlx load org/other --dtype float16")
    assert "Loaded org/other: float32, 135 M parameters" in capsys.readouterr().out
    run(shell, "%mlx status")
    out = capsys.readouterr().out
    assert "ready · cpu · BLAS none" in out and "org/other" in out and "max_rows 8" in out
    run(shell, "%mlx unload org/other")
    assert [model["name"] for model in client.status()["models"]] == ["fake"]
    assert "not loaded" in str(refused(shell, "%mlx unload org/other"))
    assert "no model" in str(refused(shell, "%mlx load missing/x"))


def test_unload_shows_that_a_model_is_in_use(shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    client = engine()
    run(shell, "%%mlx\nhi")

    def in_use(model: str | None = None) -> list[str]:
        raise RequestError("fake is in use.", "Wait for its cells, or cancel them: %mlx cancel all.")

    client.unload = in_use  # type: ignore[method-assign]
    for line in ("%mlx unload", "%mlx unload fake"):
        assert "in use" in str(refused(shell, line))
    client.unload = lambda model=None: []  # type: ignore[method-assign]
    assert "in use" in str(refused(shell, "%mlx unload")), "a model that stays is not no model"
    assert "No model was loaded" not in capsys.readouterr().out


def test_unload_says_which_copies_it_dropped(shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    client = engine()
    run(shell, "%%mlx\nhi")
    models = [{"name": "fake", "weights": weights} for weights in ("float32", "bfloat16 (from Q4_1)")]

    def drop(model: str | None = None) -> list[str]:
        gone = [entry["name"] for entry in models]
        models.clear()
        return gone

    client.status = lambda: {"state": "ready", "models": list(models)}  # type: ignore[method-assign]
    client.unload = drop  # type: ignore[method-assign]
    capsys.readouterr()
    run(shell, "%mlx models")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fake")]
    assert len(rows) == 2 and "float32" in rows[0] and "bfloat16" in rows[1]
    run(shell, "%mlx unload fake")
    assert "Unloaded fake (float32), fake (bfloat16 (from Q4_1))." in capsys.readouterr().out


def test_a_note_on_the_blas_is_in_the_status_and_below_the_first_answer_only(
    shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxnb.notices._told", set())
    client = engine()
    status = client.status
    note = "MLX was loaded \x1b[2J before mlxnb."
    client.status = lambda: {**status(), "backend": {"device": "cpu", "blas_note": note}}  # type: ignore[method-assign]
    said = []
    for cell in ("%%mlx\nhi", "%%mlx\nhi", "%mlx load fake", "%mlx status", "import mlxnb; lm = mlxnb.load()"):
        run(shell, cell)
        out = capsys.readouterr().out
        assert "\x1b" not in out
        said.append(out.count("MLX was loaded"))
    assert said == [1, 0, 0, 1, 0]
    for cell in ("%mlx load fake", "import mlxnb; lm = mlxnb.load()"):
        monkeypatch.setattr("mlxnb.notices._told", set())
        run(shell, cell)
        assert capsys.readouterr().out.count("mlxnb: MLX was loaded") == 1


def test_models_on_disk_are_listed_before_an_engine_starts(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlxnb_engine import fetch

    monkeypatch.setenv("MLXNB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    run(shell, "%mlx models")
    assert "No model is on disk" in capsys.readouterr().out
    default = fetch.default_model_path(runtime.config())
    default.parent.mkdir(parents=True)
    default.write_bytes(b"x" * 5000)
    (tmp_path / "own.gguf").touch()
    run(shell, "%mlx models")
    out = capsys.readouterr().out
    assert "on disk" in out and f"{fetch.EMBEDDED_NAME}  5\u2009kB" in out and "./own.gguf" in out


def test_doctor_in_a_notebook_looks_at_the_model_of_its_cells(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%mlx config model=nosuch")
    run(shell, "%mlx doctor")
    out = capsys.readouterr().out
    assert "There is no model 'nosuch' (set with %mlx config)" in out and "to put right" in out


def test_status_shows_whatever_an_engine_tells(shell: InteractiveShell, engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    client = engine()
    run(shell, "%%mlx\nhi")
    for state in (
        {"state": "starting", "backend": None, "models": [], "limits": {}, "loading": []},
        {"state": "ready", "loading": [{"name": "a\x1b[2Jb", "phase": "download", "done": 5, "total": 100}], "models": [{"name": "m"}]},
        {"state": "ready", "error": "broken", "loading": "soon"},
    ):
        client.status = lambda state=state: state  # type: ignore[method-assign]
        run(shell, "%mlx status")
        out = capsys.readouterr().out
        assert str(state["state"]) in out and "\x1b" not in out


# -- settings ------------------------------------------------------------------------------------------------------------------------


def test_config_sets_defaults_that_a_cell_overrides(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    run(shell, "%mlx config temp=.5 max-tokens=7 system='Be brief.' repetition_penalty=1.1 thinking=off")
    run(shell, "%%mlx --max-tokens 9\nhi")
    request = client.requests[-1]
    assert (request.sampling.temp, request.max_tokens, request.thinking) == (0.5, 9, False)
    assert request.messages == (Message("system", "Be brief."), Message("user", "hi"))
    run(shell, "%mlx config temp= system= repetition_penalty= thinking=")
    run(shell, "%%mlx\nhi")
    assert client.requests[-1].sampling == SamplingSpec() and client.requests[-1].max_tokens == 7
    assert client.requests[-1].messages == (Message("user", "hi"),)


def test_percent_config_is_the_same_settings(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    run(shell, "%config MLXMagics.temp = 0.25")
    run(shell, "%config MLXMagics.model = 'org/own'")
    run(shell, "%%mlx\nhi")
    assert client.requests[-1].sampling.temp == 0.25 and client.requests[-1].model == "org/own"
    shell.run_cell("%config MLXMagics.temp = -3")
    assert shell.magics_manager.registry["MLXMagics"].temp == 0.25


def test_one_wrong_setting_of_a_line_changes_none(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    refused(shell, "%mlx config temp=.5 top_p=7")
    refused(shell, "%mlx config temp=.5 max_rows=0")
    run(shell, "%%mlx\nhi")
    assert client.requests[-1].sampling == SamplingSpec()


def test_the_environment_names_the_model_before_the_notebook_and_the_cell_before_both(
    shell: InteractiveShell, engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = engine()
    run(shell, "%mlx config model=notebook")
    monkeypatch.setenv("MLXNB_MODEL", "environment")
    run(shell, "%%mlx\nhi")
    run(shell, "%%mlx -m cell\nhi")
    monkeypatch.delenv("MLXNB_MODEL")
    run(shell, "%%mlx\nhi")
    assert [request.model for request in client.requests] == ["environment", "cell", "notebook"]


def test_engine_settings_reach_the_next_engine(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def make(settings: Any) -> FakeClient:
        seen.append(settings)
        return FakeClient()

    runtime.use(make)
    run(shell, "%mlx config max_rows=3 max_kv_bytes=1GB")
    run(shell, "%%mlx\nhi")
    assert (seen[-1].max_rows, seen[-1].max_kv_bytes) == (3, 10**9)
    capsys.readouterr()
    run(shell, "%mlx config max_rows=")
    assert "%reload_ext" in capsys.readouterr().out
    run(shell, "%reload_ext mlxnb")
    run(shell, "%%mlx\nhi")
    assert (seen[-1].max_rows, seen[-1].max_kv_bytes) == (8, 10**9)
    run(shell, "%mlx config max_kv_bytes=")


# -- the extension -------------------------------------------------------------------------------------------------------------------


def test_reloading_closes_the_engine_and_registers_everything_once(shell: InteractiveShell, engine: Make) -> None:
    client = engine()
    run(shell, "%%mlx\nhi")
    run(shell, "%mlx config temp=.5")
    before = (len(shell.Completer.custom_matchers), len(shell.input_transformers_cleanup), len(shell.configurables))
    for _ in range(3):
        run(shell, "%reload_ext mlxnb")
    assert client.closed == 1
    assert (len(shell.Completer.custom_matchers), len(shell.input_transformers_cleanup), len(shell.configurables)) == before
    other = engine()
    run(shell, "%%mlx\nhi")
    assert other.requests[-1].sampling.temp == 0.5


def test_unloading_takes_everything_out(shell: InteractiveShell, engine: Make) -> None:
    engine()
    run(shell, "%unload_ext mlxnb")
    assert shell.find_cell_magic("mlx") is None and shell.find_line_magic("mlx") is None
    assert magic.take_cell not in shell.input_transformers_cleanup
    run(shell, "%load_ext mlxnb")
    assert run(shell, "%%mlx\nhi").text == "hi "


def test_a_cell_of_several_lines_is_not_finished_in_a_terminal_before_a_blank_line(shell: InteractiveShell) -> None:
    assert shell.input_transformer_manager.check_complete("%%mlx\nWhy")[0] == "incomplete"
    assert shell.input_transformer_manager.check_complete("%%mlx\nWhy\n\n")[0] == "complete"


def test_importing_and_loading_the_extension_loads_no_heavy_package() -> None:
    heavy = ["mlx", "mlx_lm", "transformers", "numpy", "pydantic", "jinja2", "markdown_it", "nh3", "ipywidgets", "rich", "huggingface_hub"]
    code = f"""
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
before = set(sys.modules)
import mlxnb
print(sorted(name for name in sys.modules if name.startswith("mlxnb")), mlxnb.__version__)
shell.extension_manager.load_extension("mlxnb")
fresh = set(sys.modules) - before
print([name for name in {heavy!r} if name in fresh])
print(mlxnb.Run.__name__, mlxnb.RequestError.__name__, "Run" in dir(mlxnb))
try:
    mlxnb.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], env=_env(), capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "['mlxnb'] 0.1.0"
    assert lines[1] == "[]", f"loading the extension imported {lines[1]}"
    assert lines[2] == "Run RequestError True"
    assert "nothing" in lines[3]


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# -- one engine per process ------------------------------------------------------------------------------------------------------------


def test_a_forked_child_has_no_engine_and_does_not_close_its_parents() -> None:
    code = """
import os, sys
from fake_client import FakeClient
from mlxnb import runtime
made = []
runtime.use(lambda settings: made.append(FakeClient()) or made[-1])
first = runtime.client()
pid = os.fork()
if pid == 0:
    assert runtime.current() is None
    assert runtime.client() is not first and len(made) == 2
    runtime.close()
    os._exit(0 if first.closed == 0 else 3)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert runtime.client() is first and first.closed == 0
import atexit
atexit.register(lambda: print("closed", first.closed))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=_env(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_engine_is_closed_at_exit_without_a_traceback() -> None:
    code = """
import atexit
from fake_client import FakeClient
client = FakeClient(hold=0)
atexit.register(lambda: print("closed", client.closed))
from mlxnb import runtime
runtime.use(lambda settings: client)
from mlxnb_engine.types import CompletionRequest, RequestId
generation = runtime.client().submit(CompletionRequest(RequestId("r"), "fake", text="x"))[0]
atexit.register(lambda: print("before", client.closed))
"""
    done = subprocess.run([sys.executable, "-c", code], env=_env(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["before", "0", "closed", "1"])


def test_a_child_forked_beside_a_running_engine_is_told_and_does_not_hang() -> None:
    code = """
import os, sys, types
sys.modules["mlx.core"] = types.ModuleType("mlx.core")
from fake_client import FakeClient
from mlxnb import EngineDead, runtime
runtime.use(lambda settings: FakeClient())
runtime.client()
pid = os.fork()
if pid == 0:
    try:
        runtime.client()
    except EngineDead as error:
        os._exit(0 if "spawn" in str(error) else 4)
    os._exit(5)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert runtime.current() is not None
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=_env(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
