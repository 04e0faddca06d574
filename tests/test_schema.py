"""The schema of records and messages: one declaration, and everything real agrees with it."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fake_client import Failure, FakeClient
from hypothesis import given
from hypothesis import strategies as st

from mlxnb.packing import exact_integers, pack, read_numbers, unpack, write_numbers
from mlxnb.record import NO_ALTERNATIVES, saved, size
from mlxnb.run import Run, RunGroup
from mlxnb.schema import (
    ALPHABET,
    COMMANDS,
    MESSAGES,
    RECORDS,
    RUN_MIME,
    GroupRecord,
    Number,
    RunRecord,
    command_problem,
    json_schema,
    problem,
)
from mlxnb_engine import events as ev
from mlxnb_engine.errors import ModelError
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, Continued, Message, RequestId, SamplingSpec, TokenId

ROOT = Path(__file__).resolve().parent.parent


def request(text: str = "one two three", **fields: Any) -> CompletionRequest:
    return CompletionRequest(RequestId("r"), "fake", messages=(Message("user", text),), **fields)


def runs(client: FakeClient, *requests: CompletionRequest) -> list[Run]:
    found = [Run(generation, {"n": generation.index}) for each in requests for generation in client.submit(each)]
    for run in found:
        run.wait(5.0)
    return found


def test_the_committed_typescript_is_what_the_schema_says() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "protocol.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_real_records_of_every_kind_of_end_are_valid_and_json() -> None:
    client = FakeClient(failures=[Failure(ModelError("no", "hint"), "fails")], load=[("download", 1, 2)])
    try:
        scored = request("a b c", sampling=SamplingSpec(logprobs=3, seed=7))
        found = runs(client, request(), request("it fails now"), scored, request(max_tokens=1))
        held = Run(FakeClient(hold=0).submit(request())[0])
        continued = request(continuation=(Continued(TokenId(3)), Continued(TokenId(4), by_hand=True)))
        found += [held, *runs(client, continued)]
    finally:
        client.close()
    for run in found:
        for record in (run.to_dict(), saved(run.to_dict(), {"key": "k", "view": "answer"}), json.loads(json.dumps(run.to_dict()))):
            assert problem(RunRecord, record, "record") is None
            jsonschema.validate(json.loads(json.dumps(record)), json_schema(RunRecord))
    group = RunGroup(found).to_dict()
    assert problem(GroupRecord, group) is None and problem(GroupRecord, saved(group)) is None
    assert len(group["labels"]) == len(found) and "continuation" not in found[-1].to_dict()["request"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema": "mlxnb.run/2"}, "schema"),
        ({"status": "melting"}, "status"),
        ({"tokens": [{"id": "x", "text": "", "origin": "sampled", "t": 0}]}, "tokens"),
        ({"surprise": 1}, "surprise"),
        ({"timing": None}, "timing"),
        ({"phases": [{"kind": "load", "t": "soon", "until": 0}]}, "phases"),
    ],
)
def test_a_record_that_is_wrong_is_told_so(change: dict[str, Any], word: str) -> None:
    client = FakeClient()
    try:
        record = runs(client, request())[0].to_dict() | change
    finally:
        client.close()
    assert word in str(problem(RunRecord, record, "record"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, json_schema(RunRecord))


def test_a_number_that_json_has_not_is_only_fine_as_its_name() -> None:
    assert problem(Number, math.inf) and problem(Number, math.nan) and problem(Number, True)
    assert problem(Number, "inf") is None and problem(Number, 3) is None


def test_every_declared_type_has_a_json_schema_and_commands_check_their_arguments() -> None:
    for kind in (*RECORDS, *MESSAGES, *COMMANDS.values()):
        jsonschema.Draft202012Validator.check_schema(json_schema(kind))
    assert command_problem("stop", {}) is None and command_problem("branch", {"run": 0, "at": 3, "token": None}) is None
    for name, args in (("stop", {"run": "0"}), ("branch", {"run": 0}), ("branch", {"run": True, "at": 1}), ("stop", {"x": 1}), ("rm", {})):
        assert command_problem(name, args)


# -- packing -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**53)))
def test_packed_numbers_come_back(numbers: list[int]) -> None:
    assert read_numbers(write_numbers(numbers)) == numbers


@given(st.text(alphabet=ALPHABET + ' "\\\n\u00e9', max_size=30))
def test_any_text_gives_numbers_or_a_value_error(text: str) -> None:
    try:
        numbers = read_numbers(text)
    except ValueError:
        return
    assert write_numbers(numbers) == text


def table(count: int, top: int = 0, seed: int = 1, texts: int = 900) -> list[dict[str, Any]]:
    """Tokens as a model of this size would say them: common ones far more often than rare ones."""
    random_ = random.Random(seed)
    words = [f" {'aeioustrnl'[i % 10] * (1 + i % 6)}" for i in range(texts)]
    t, found = 0.2, []
    for _ in range(count):
        t += 0.01 + random_.random() * 0.002
        index = int(random_.paretovariate(0.6)) % texts
        token = {"id": index * 50, "text": words[index], "origin": "sampled", "t": round(t, 6)}
        if top:
            token |= {"logprob": -random_.random(), "rank": 0}
            token["top"] = [{"id": i * 50, "text": words[i], "logprob": -i - random_.random()} for i in random_.sample(range(texts), top)]
        found.append(token)
    return found


def test_a_packed_table_comes_back_with_its_rounding_only() -> None:
    tokens = table(300, top=4)
    tokens[7]["origin"] = "forced"
    tokens[9]["by_hand"] = tokens[20]["by_hand"] = True
    tokens[11]["text"] = "\U0001f600\ufffd\n"
    tokens[12].pop("logprob"), tokens[12].pop("rank"), tokens[12].pop("top")
    tokens[13]["logprob"] = "-inf"
    tokens[14]["rank"] = None
    back = unpack(json.loads(json.dumps(pack(tokens))))
    for before, after in zip(tokens, back, strict=True):
        for name in ("id", "text", "origin", "by_hand", "rank"):
            assert before.get(name) == after.get(name)
        assert after["t"] == pytest.approx(before["t"], abs=0.0003)
        if "logprob" in before and before["logprob"] != "-inf":
            assert after["logprob"] == pytest.approx(before["logprob"], abs=0.0006)
            assert [(o["id"], o["text"]) for o in before["top"]] == [(o["id"], o["text"]) for o in after["top"]]
    assert "logprob" not in back[12] and back[13]["logprob"] == -1e6


def test_rounded_times_do_not_drift() -> None:
    tokens = table(5000)
    assert unpack(pack(tokens))[-1]["t"] == pytest.approx(tokens[-1]["t"], abs=0.0003)


@pytest.mark.parametrize("name", ["ids", "lengths", "texts", "index", "t", "origin", "form", "count"])
def test_a_damaged_table_is_a_value_error(name: str) -> None:
    packed = pack(table(20, top=2))
    for damage in (None, "\\", 3, [], {"unit": "x"}):
        if name == "count" or (name == "texts" and isinstance(damage, str)):
            continue
        with pytest.raises(ValueError):
            unpack({**packed, name: damage})


def record_of(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": "mlxnb.run/1", "text": "".join(token["text"] for token in tokens), "tokens": tokens, "prompt": {}}


def test_a_table_that_is_too_large_loses_its_alternatives_and_then_its_tokens_with_a_note() -> None:
    small, middle, large = (saved(record_of(tokens)) for tokens in (table(500, top=5), table(5000, top=8), table(40_000)))
    assert "tokens_note" not in small and len(unpack(small["tokens"])[3]["top"]) == 5
    assert middle["tokens_note"] == NO_ALTERNATIVES and unpack(middle["tokens"])[3]["top"] == []
    assert large["tokens"] is None and "too many" in large["tokens_note"] and large["text"]
    assert max(size(one["tokens"]) for one in (small, middle)) <= 64 * 1024


def test_the_text_is_left_out_only_where_the_tokens_have_it_exactly() -> None:
    tokens = table(10)
    assert saved(record_of(tokens))["text"] is None
    shorter = {**record_of(tokens), "text": "stopped here"}
    assert saved(shorter)["text"] == "stopped here"


def test_a_group_shares_one_budget() -> None:
    group = {"schema": "mlxnb.group/1", "labels": [], "runs": [record_of(table(2000, seed=i)) for i in range(20)]}
    assert sum(size(run["tokens"]) for run in saved(group)["runs"] if run["tokens"]) <= 64 * 1024


def test_integers_that_javascript_would_round_become_text() -> None:
    assert exact_integers({"a": [2**53, 5, True, {"b": -(2**60)}]}) == {"a": ["9007199254740992", 5, True, {"b": str(-(2**60))}]}
    client = FakeClient()
    try:
        record = runs(client, request(sampling=SamplingSpec(seed=2**64 - 1)))[0].to_dict()
    finally:
        client.close()
    assert record["seed"]["value"] == 2**64 - 1
    assert saved(record)["seed"]["value"] == saved(record)["request"]["sampling"]["seed"] == str(2**64 - 1)


def growth(tokens: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Bytes that the answer of these tokens adds to a notebook file, and its record."""
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    text = "".join(token["text"] for token in tokens)
    log = Generation(request(max_tokens=len(tokens)))
    log.emit(lambda seq, t: ev.Started(seq, t, "fake", 9, 2**63, False))
    for token in tokens:
        log.emit(lambda seq, t, x=token: ev.Tokens(seq, t, (ev.TokenRecord(x["id"], x["text"], "sampled", x["t"]),), x["text"]))
    log.emit(lambda seq, t: ev.Finished(seq, t, "length", text, {"prompt_tokens": 9, "completion_tokens": len(tokens)}))
    bundle = Run(log)._repr_mimebundle_()
    empty = new_notebook(cells=[new_code_cell("x")])
    full = new_notebook(cells=[new_code_cell("x", outputs=[new_output("display_data", bundle)])])
    return len(nbformat.writes(full).encode()) - len(nbformat.writes(empty).encode()), bundle[RUN_MIME]


def prose() -> list[dict[str, Any]]:
    """5,000 tokens of English in paragraphs, in pieces as long as a tokenizer's: 4.7 characters, 700 of them different."""
    licence = (Path(__file__).parent.parent / "LICENSE").read_text("utf-8")
    paragraphs = "\n\n".join(" ".join(part.split()) for part in licence.split("\n\n"))
    pieces = re.findall(r"\s?\S{1,6}|\s", 3 * paragraphs)[:5000]
    ids = {piece: 3 * number for number, piece in enumerate(dict.fromkeys(pieces))}
    random_, t, found = random.Random(2), 0.0, []
    for piece in pieces:
        t += random_.gauss(0.05, 0.004)
        found.append({"id": ids[piece], "text": piece, "origin": "sampled", "t": t})
    return found


@pytest.mark.parametrize("tokens", [table(5000, texts=3000), prose()], ids=["a wide vocabulary", "prose"])
def test_five_thousand_tokens_grow_a_notebook_by_at_most_80_kb(tokens: list[dict[str, Any]]) -> None:
    grew, record = growth(tokens)
    assert sum(len(token["text"]) for token in tokens) > 20_000 and len(unpack(record["tokens"])) == 5000
    assert grew <= 80_000


def test_an_answer_without_any_repetition_costs_its_text_twice_and_no_table_over_its_limit() -> None:
    words = [f" {'aeioustrnl'[i % 10]}{i:05d}" for i in range(5000)]
    tokens = [{"id": 7 * i, "text": word, "origin": "sampled", "t": 0.05 * i} for i, word in enumerate(words)]
    grew, record = growth(tokens)
    assert record["tokens"] is None and "64 kB" in record["tokens_note"]
    assert grew <= 3 * sum(map(len, words)) + 4096


def test_the_fixture_of_the_typescript_reader_is_what_the_kernel_writes() -> None:
    """widgets/tests/unpack.test.ts reads it; `python tests/test_schema.py` writes it anew."""
    assert json.loads(FIXTURE.read_text(encoding="utf-8")) == fixture()


FIXTURE = ROOT / "widgets" / "tests" / "packed.json"


def fixture() -> dict[str, Any]:
    tokens = table(40, top=2, texts=30)
    tokens[7]["origin"], tokens[9]["by_hand"] = "forced", True
    tokens[11]["text"] = "\U0001f600\u00e9\n"
    for name in ("logprob", "rank", "top"):
        tokens[12].pop(name)
    record = saved(record_of(tokens))
    return {"record": record, "tokens": unpack(record["tokens"]), "text": "".join(token["text"] for token in tokens)}


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(fixture(), ensure_ascii=False) + "\n", encoding="utf-8")
