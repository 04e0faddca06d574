"""`Delivery`: ids to visible text, stop strings, end of sequence, length and usage, on a tokenizer of bytes."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from engine_rig import BYTE_EOS, ByteTokenizer, Clock, log_problems, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxnb_engine import events as ev
from mlxnb_engine.delivery import Delivery, Drawn
from mlxnb_engine.errors import EngineDead, ModelError
from mlxnb_engine.resume import Resumes, Trail
from mlxnb_engine.session import Generation
from mlxnb_engine.types import CompletionRequest, Continued, PreparedPrompt, RequestId, Resumed, SamplingSpec, TokenId


def delivery(stop: tuple[str, ...] = (), max_tokens: int = 1000, seed: int | None = None, clock: Clock | None = None) -> Delivery:
    request = CompletionRequest(RequestId("r"), "m", text="p", max_tokens=max_tokens, stop=stop, sampling=SamplingSpec(seed=seed))
    prompt = PreparedPrompt((TokenId(1), TokenId(2), TokenId(3)), 3, "p")
    return Delivery(Generation(request, 0, clock or Clock()), prompt, ByteTokenizer(), "a model", 77)  # type: ignore[arg-type]


def feed(row: Delivery, data: bytes, eos: bool = False) -> str:
    """Deliver byte by byte as a group would; finish with the reason given, or by length when the bytes run out."""
    row.admit()
    for token in [*data, *([BYTE_EOS] if eos else [])]:
        reason = row.deliver(Drawn(TokenId(token)))
        if reason is not None:
            row.finish(reason)
            return reason
    row.finish("length")
    return "length"


def end_of(row: Delivery) -> ev.Finished:
    log = row.generation.read()
    assert log_problems(log) == []
    end = log[-1]
    assert isinstance(end, ev.Finished)
    return end


def definition(text: str, stops: tuple[str, ...]) -> str:
    """The text before the earliest occurrence of a stop string."""
    return text[: min([text.find(s) for s in stops if s in text], default=len(text))]


# -- end of sequence, length ---------------------------------------------------------------------------------------------


def test_eos_is_counted_and_not_delivered() -> None:
    row = delivery()
    assert feed(row, b"abc", eos=True) == "stop"
    end = end_of(row)
    assert (end.text, end.reason, end.stop) == ("abc", "stop", None)
    assert token_ids(row.generation.read()) == list(b"abc")
    assert end.usage["completion_tokens"] == 4 and end.usage["finish_reason"] == "stop"


def test_eos_as_the_first_token_gives_an_empty_answer() -> None:
    row = delivery(max_tokens=1)
    assert feed(row, b"", eos=True) == "stop"
    assert end_of(row).text == "" and end_of(row).usage["completion_tokens"] == 1


def test_eos_at_the_last_allowed_token_is_a_stop() -> None:
    row = delivery(max_tokens=3)
    assert feed(row, b"ab", eos=True) == "stop"


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_a_row_ends_by_length_at_exactly_max_tokens(limit: int) -> None:
    row = delivery(max_tokens=limit)
    assert feed(row, b"abcdefghij") == "length"
    end = end_of(row)
    assert end.text == "abcdefghij"[:limit] and end.reason == "length" and end.usage["completion_tokens"] == limit


# -- stop strings and held-back text -----------------------------------------------------------------------------------


def test_a_stop_string_across_token_boundaries_is_never_shown() -> None:
    row = delivery(stop=("\nUser:",))
    assert feed(row, b"fine.\nUser: and more") == "stop"
    end = end_of(row)
    assert (end.text, end.reason, end.stop) == ("fine.", "stop", "\nUser:")
    assert "\n" not in "".join(e.text for e in row.generation.read() if isinstance(e, ev.Tokens))
    assert end.usage["completion_tokens"] == len(b"fine.\nUser:")


def test_text_that_only_began_like_a_stop_string_is_shown_in_the_end() -> None:
    row = delivery(stop=("STOP",))
    feed(row, b"a STO", eos=True)
    assert (end_of(row).text, end_of(row).stop) == ("a STO", None)


def test_a_match_that_waited_for_a_longer_one_counts_when_the_text_ends() -> None:
    for eos in (False, True):
        row = delivery(stop=("ab", "abcd"))
        feed(row, b"x abc", eos=eos)
        end = end_of(row)
        assert (end.text, end.reason, end.stop) == ("x ", "stop", "ab")
        assert end.usage["finish_reason"] == "stop"


def test_a_cancelled_row_shows_what_it_had_held_back_but_no_stop_string() -> None:
    row = delivery(stop=("STOP",))
    row.admit()
    for byte in "né STO".encode()[:-1]:
        row.deliver(Drawn(TokenId(byte)))
    row.cancel()
    row.cancel()
    row.finish("stop")
    log = row.generation.read()
    assert log_problems(log) == []
    assert isinstance(log[-1], ev.Cancelled) and log[-1].text == "né ST" and log[-1].usage["finish_reason"] == "cancelled"


def test_a_character_split_over_tokens_waits_for_its_last_byte() -> None:
    row = delivery()
    row.admit()
    texts = []
    for byte in "é😀".encode():
        row.deliver(Drawn(TokenId(byte)))
        last = row.generation.read()[-1]
        assert isinstance(last, ev.Tokens)
        texts.append(last.text)
        assert last.tokens[0].text == "�"
    assert texts == ["", "é", "", "", "", "😀"]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    row = delivery()
    feed(row, b"ok " + "é".encode()[:1])
    assert end_of(row).text == "ok �"


stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab\né", max_size=20), stops, st.booleans())
def test_the_deltas_add_up_to_the_text_before_the_first_stop_string(text: str, stop: tuple[str, ...], eos: bool) -> None:
    row = delivery(stop=stop)
    feed(row, text.encode(), eos=eos)
    end = end_of(row)
    assert end.text == definition(text, stop)
    assert (end.stop is not None) == any(s in text for s in stop)
    assert end.reason == ("stop" if eos or end.stop is not None else "length")


class ForgetsTheRest(Delivery):
    """Ends without delivering what was held back: the log check must see it."""

    def _flush(self) -> None:
        self._visible.append(self._decoder.flush() + self._matcher.flush())  # and no event


def test_the_log_check_sees_text_that_was_never_delivered() -> None:
    good = delivery(stop=("STOP",))
    row = ForgetsTheRest(good.generation, PreparedPrompt((TokenId(1),), 1, "p"), ByteTokenizer(), "m", 1)  # type: ignore[arg-type]
    feed(row, b"a STO", eos=True)
    assert "the deltas do not add up to the terminal text" in log_problems(row.generation.read())


# -- one end -----------------------------------------------------------------------------------------------------------


def test_a_failed_row_keeps_its_text_and_takes_no_more() -> None:
    row = delivery()
    row.admit()
    row.deliver(Drawn(TokenId(97)))
    row.fail(ModelError("no finite score", "hint"))
    row.finish("stop")
    row.cancel()
    row.fail(ModelError("again"))
    end = row.generation.terminal
    assert isinstance(end, ev.Failed) and end.text == "a" and end.error == "model" and end.message == "no finite score"
    assert end.usage["finish_reason"] == "error" and end.usage["completion_tokens"] == 1
    assert log_problems(row.generation.read()) == []
    with pytest.raises(RuntimeError, match="event after"):
        row.deliver(Drawn(TokenId(97)))


@pytest.mark.parametrize("resumed", [True, False])
def test_a_resumed_row_that_fails_can_be_resumed_once_more(resumed: bool) -> None:
    ticket = Resumed("f" * 32, 7, False, (), (TokenId(1), TokenId(2), TokenId(3)))
    request = CompletionRequest(RequestId("r"), "m", text="p", max_tokens=100)
    if resumed:
        request = replace(request, continuation=(Continued(TokenId(97)),), resumed=ticket)
    prompt, keeper = PreparedPrompt(ticket.prompt, 3, "p"), Resumes()
    trail = Trail(request, ticket, "a model", keeper)
    row = Delivery(Generation(request, 0, Clock()), prompt, ByteTokenizer(), "a model", 7, trail)  # type: ignore[arg-type]
    row.admit()
    row.deliver(Drawn(TokenId(98)))
    row.note(None)
    row.fail(ModelError("another row's step failed"))
    kept = [[token.id for token in one.request.continuation] for one in keeper._stopped.values()]
    assert kept == ([[97, 98]] if resumed else [])


def test_what_could_not_be_delivered_is_no_part_of_the_text() -> None:
    row = delivery()
    row.admit()
    row.deliver(Drawn(TokenId(97)))
    emit, calls = row.generation.emit, []

    def broken(make: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("no reader")
        return emit(make)

    row.generation.emit = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no reader"):
        row.deliver(Drawn(TokenId(98)))
    row.fail(OSError("no reader"))
    assert log_problems(row.generation.read()) == [] and row.generation.read()[-1].to_dict()["text"] == "a"


def test_a_row_that_somebody_else_ended_counts_as_cancelled() -> None:
    row = delivery()
    assert not row.cancelled
    row.admit()
    row.deliver(Drawn(TokenId(97)))
    row.generation.fail(EngineDead("closed"))
    assert row.generation.read()[-1].to_dict()["text"] == "a", "what was shown stays part of the record"
    assert row.cancelled, "the group must let go of it at its next safe point"
    row.cancel()
    assert log_problems(row.generation.read()) == []


def test_a_row_can_be_ended_from_outside_at_any_moment() -> None:
    for _ in range(40):
        row = delivery(stop=("zz",))
        row.admit()

        def close(row: Delivery = row) -> None:
            row.generation.read(2, 30.0)
            row.generation.fail(EngineDead("closed"))

        thread = threading.Thread(target=close)
        thread.start()
        try:
            for i in range(5000):
                row.deliver(Drawn(TokenId(97 + i % 26)))
            row.finish("length")
        except RuntimeError as error:
            row.fail(error)
        thread.join(30)
        log = row.generation.read()
        assert [e.terminal for e in log].count(True) == 1 and log[-1].terminal


# -- what is reported ----------------------------------------------------------------------------------------------------


def test_started_says_the_seed_and_whether_it_was_asked_for() -> None:
    for seed in (None, 5):
        row = delivery(seed=seed)
        row.admit()
        row.admit()
        (started,) = row.generation.read()
        assert isinstance(started, ev.Started)
        assert (started.model, started.prompt_tokens, started.seed, started.seed_explicit) == ("a model", 3, 77, seed is not None)


def test_log_probabilities_become_alternatives_with_their_text() -> None:
    row = delivery()
    row.admit()
    row.deliver(Drawn(TokenId(97), (-0.5, 1, [(98, -0.25), (97, -0.5)])))
    row.deliver(Drawn(TokenId(98)))
    tokens = [t for e in row.generation.read() if isinstance(e, ev.Tokens) for t in e.tokens]
    assert (tokens[0].logprob, tokens[0].rank) == (-0.5, 1)
    assert tokens[0].top == (ev.Alternative(98, "b", -0.25), ev.Alternative(97, "a", -0.5))
    assert (tokens[1].logprob, tokens[1].rank, tokens[1].top) == (None, None, ())
    assert all(t.origin == "sampled" for t in tokens)


def test_usage_adds_up() -> None:
    clock = Clock()
    row = delivery(clock=clock)
    clock.now = 1.0
    row.admit()
    row.prefilled(2, 2)
    for i, byte in enumerate(b"abcd"):
        clock.now = 2.0 + i
        row.deliver(Drawn(TokenId(byte)))
    clock.now = 9.0
    row.deliver(Drawn(TokenId(BYTE_EOS)))
    row.finish("stop")
    end = end_of(row)
    usage = end.usage
    assert usage["prompt_tokens"] == 3 and usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens"] == len(token_ids(row.generation.read())) + 1
    assert usage["execution"]["steps"] == usage["completion_tokens"]
    assert usage["execution"]["proposers"] == [] and usage["execution"]["declined"] == []
    assert usage["finish_reason"] == end.reason
    assert usage["timing"] == {"queued_s": 1.0, "first_token_s": 2.0, "total_s": 9.0}
    assert json.loads(json.dumps(usage)) == usage
