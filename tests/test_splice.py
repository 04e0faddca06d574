"""Answers as their model wrote them: earlier ids come back where their text stands, and nothing else does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny_tokenizer as tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prompt import PAIRS, TEMPLATES, common, controls, preparer

from mlxnb_engine.prompt import PromptPreparer
from mlxnb_engine.splice import marker_of, places
from mlxnb_engine.template import ChatTemplate
from mlxnb_engine.tokenizer import Tokenizer
from mlxnb_engine.types import CompletionRequest, Generated, Message, PreparedPrompt, RequestId, TokenId

# What models of several families write around an answer: an end-of-turn token of their own, white space trimmed or put there,
# the answer's reasoning dropped from all but the newest turn.
FAMILIES = {
    "chatml": TEMPLATES["chatml"],
    "llama3": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_end|>\n\n' + m.content | trim + '<|endoftext|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\n\n' }}{% endif %}"
    ),
    "qwen3": (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}"
        "{% if '</think>' in c and loop.index0 < ns.last %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "mistral": TEMPLATES["bos"],
    "words": TEMPLATES["words"],
}


def made(family: str, kind: str = "byte_level") -> PromptPreparer:
    tokenizer = tiny.tokenizer(kind)
    return PromptPreparer(tokenizer, ChatTemplate(FAMILIES[family], tokenizer.bos_token, tokenizer.eos_token))


def told(*turns: str | Message, **more: Any) -> CompletionRequest:
    """A request of these turns, questions and answers in turn."""
    roles = ("user", "assistant")
    messages = [x if isinstance(x, Message) else Message(roles[i % 2], x) for i, x in enumerate(turns)]  # type: ignore[arg-type]
    return CompletionRequest(RequestId("r"), "m", messages=tuple(messages), **more)


def answer(tokenizer: Tokenizer, ids: list[int], prefill: str = "", text: str | None = None) -> Message:
    """What a model wrote by these ids, as the row's reader saw it."""
    shown = tokenizer.decode(ids, start=not prefill) if text is None else text
    return Message("assistant", prefill + shown, Generated(tuple(map(TokenId, ids)), len(prefill)))


def split(tokenizer: Tokenizer, text: str) -> list[int]:
    """Other ids than the encoder's for this text: each character on its own."""
    ids = [i for char in text for i in tokenizer.encode_after(char, "\ue000")]
    assert tokenizer.decode(ids) == text and ids != tokenizer.encode(text), "no divergence to test"
    return ids


def plain(preparer: PromptPreparer, request: CompletionRequest) -> PreparedPrompt:
    bare = tuple(Message(m.role, m.content) for m in request.messages or ())
    return preparer.prepare(CompletionRequest(RequestId("r"), "m", messages=bare, prefill=request.prefill))


# -- the ids come back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3"])
def test_an_answer_whose_text_encodes_to_other_ids_keeps_its_own(family: str) -> None:
    """The fixture of byte-pair divergence: what the row consumed is a prefix of the next prompt, token for token."""
    preparer, tokenizer = made(family), tiny.tokenizer()
    first = preparer.prepare(told("What is it?"))
    ids = split(tokenizer, "the answer is four.")
    request = told("What is it?", answer(tokenizer, ids), "and then?")
    second = preparer.prepare(request)
    assert second.ids[: len(first.ids) + len(ids)] == first.ids + tuple(ids) and second.spliced == len(ids)
    bare = plain(preparer, request)
    assert second.text == bare.text and second.ids != bare.ids and bare.spliced == 0
    assert controls(tokenizer, second.ids) == controls(tokenizer, bare.ids)


@pytest.mark.parametrize("family", ["mistral", "words"])
def test_an_answer_that_is_introduced_in_other_words_than_it_was_is_encoded_plainly(family: str) -> None:
    """These put a space before an answer that the model did not write, so nothing computed for it could be used."""
    preparer, tokenizer = made(family), tiny.tokenizer()
    request = told("What is it?", answer(tokenizer, split(tokenizer, "the answer")), "and then?")
    assert preparer.prepare(request) == plain(preparer, request)


def test_ids_that_are_the_encoders_own_change_nothing() -> None:
    for family in FAMILIES:
        preparer, tokenizer = made(family), tiny.tokenizer()
        text = "the answer is four."
        request = told("What is it?", answer(tokenizer, tokenizer.encode_after(text, "\ue000")), "and then?")
        assert preparer.prepare(request).ids == plain(preparer, request).ids, family


@pytest.mark.parametrize(("kind", "family"), [("spm_legacy", "mistral"), ("spm_metaspace", "mistral")])
def test_the_space_that_a_template_writes_for_the_model_is_not_doubled(kind: str, family: str) -> None:
    """A SentencePiece model writes the space before its answer, its reader drops it, and the template puts it there again."""
    preparer, tokenizer = made(family, kind), tiny.tokenizer(kind)
    first = preparer.prepare(told("What is it?"))
    ids = tokenizer.encode_after(" ", "\ue000") + split(tokenizer, "the answer")
    told_back = answer(tokenizer, ids)
    assert told_back.content == "the answer"
    second = preparer.prepare(told("What is it?", told_back, "and then?"))
    assert second.ids[: len(first.ids) + len(ids)] == first.ids + tuple(ids)


def test_a_space_that_the_template_does_not_write_is_not_brought_back() -> None:
    preparer, tokenizer = made("chatml", "spm_legacy"), tiny.tokenizer("spm_legacy")
    ids = tokenizer.encode_after(" ", "\ue000") + split(tokenizer, "the answer")
    request = told("What is it?", answer(tokenizer, ids), "and then?")
    assert preparer.prepare(request) == plain(preparer, request)


def test_many_turns_keep_theirs_and_a_later_prompt_begins_with_the_earlier() -> None:
    preparer, tokenizer = made("chatml"), tiny.tokenizer()
    turns: list[str | Message] = ["What is it?"]
    seen: tuple[TokenId, ...] = ()
    for number in range(6):
        prompt = preparer.prepare(told(*turns))
        assert prompt.ids[: len(seen)] == seen
        ids = split(tokenizer, f"the answer is {number}")
        seen = prompt.ids + tuple(map(TokenId, ids))
        turns += [answer(tokenizer, ids), f"and {number}?"]


def test_a_prefill_is_the_prompts_and_what_follows_it_the_models() -> None:
    preparer, tokenizer = made("chatml"), tiny.tokenizer()
    first = preparer.prepare(told("What is it?", prefill="It is "))
    ids = split(tokenizer, "the answer")
    second = preparer.prepare(told("What is it?", answer(tokenizer, ids, "It is "), "why?"))
    assert second.ids[: len(first.ids) + len(ids)] == first.ids + tuple(ids)


def test_the_end_token_that_a_model_wrote_gives_way_to_the_templates() -> None:
    """Counted or not, of whatever kind: the template says how a turn ends."""
    preparer, tokenizer = made("llama3"), tiny.tokenizer()
    ids = split(tokenizer, "the answer")
    (end,) = tokenizer.eos_ids
    whole = preparer.prepare(told("x", answer(tokenizer, ids), "y"))
    assert preparer.prepare(told("x", answer(tokenizer, [*ids, end]), "y")) == whole
    at = whole.ids.index(ids[0], 3)
    assert tokenizer.token_text(whole.ids[at + len(ids)]) == "<|endoftext|>"


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(PAIRS), st.integers(0, 2**32), st.integers(1, 12), st.sampled_from(["", "Well, "]))
def test_any_ids_leave_the_text_as_it_is_and_the_boundary_holds(pair: tuple[str, str], seed: int, count: int, prefill: str) -> None:
    kind, name = pair
    preparer, tokenizer = preparer_of(kind, name), tiny.tokenizer(kind)
    rng = random.Random(seed)
    usable = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    ids = [rng.choice(usable) for _ in range(count)]
    first = preparer.prepare(told("What is it?", prefill=prefill))
    request = told("What is it?", answer(tokenizer, ids, prefill), "and then?")
    second, bare = preparer.prepare(request), plain(preparer, request)
    assert second.text == bare.text
    assert common(first, second) >= first.stable
    assert second.spliced <= count
    if kind == "byte_level":  # the others mark the start of a section with a space
        assert b"".join(map(tokenizer.token_bytes, second.ids)).decode("utf-8", "replace") == second.text
    third = preparer.prepare(told("What is it?", answer(tokenizer, ids, prefill), "and then?", "good", "and now?"))
    assert common(second, third) >= second.stable


def preparer_of(kind: str, name: str) -> PromptPreparer:
    return preparer(kind, name)


# -- and only there ------------------------------------------------------------------------------------------------------


def test_reasoning_that_the_template_drops_stays_dropped() -> None:
    """The fixture of stripped thinking, on a template that keeps it in the newest turn only."""
    preparer, tokenizer = made("qwen3"), tiny.tokenizer()
    thought = tokenizer.encode("<think>\nlong thoughts\n</think>\n\n", control=True)
    ids = thought + split(tokenizer, "four.")
    prompt = preparer.prepare(told("2+2?", answer(tokenizer, ids), "and then?"))
    assert "thoughts" not in prompt.text and prompt.spliced == 0
    assert not {tokenizer.encode(x, control=True)[0] for x in ("<think>", "</think>")} & set(prompt.ids)
    # The turns around it keep their ids.
    plain_ids = split(tokenizer, "the answer")
    both = preparer.prepare(told("x", answer(tokenizer, plain_ids), "2+2?", answer(tokenizer, ids), "y", answer(tokenizer, plain_ids), "z"))
    assert both.spliced == 2 * len(plain_ids) and "thoughts" not in both.text


def test_markers_that_a_model_wrote_come_back_as_it_wrote_them() -> None:
    preparer, tokenizer = made("chatml"), tiny.tokenizer()
    ids = tokenizer.encode("<think>\nhm\n</think>\n\nfour.", control=True)
    kept = preparer.prepare(told("2+2?", answer(tokenizer, ids), "y"))
    assert kept.spliced == len(ids) and tokenizer.encode("<think>", control=True)[0] in kept.ids
    assert tokenizer.encode("<think>", control=True)[0] not in plain(preparer, told("2+2?", answer(tokenizer, ids), "y")).ids


def test_a_question_that_quotes_an_answer_is_still_text() -> None:
    """Its words are the same, its place is not: the ids go to the answer alone, whatever else says the same."""
    preparer, tokenizer = made("chatml"), tiny.tokenizer()
    ids = split(tokenizer, "the answer")
    prompt = preparer.prepare(told("the answer", answer(tokenizer, ids), "the answer"))
    positions = [i for i in range(len(prompt.ids)) if prompt.ids[i : i + len(ids)] == tuple(ids)]
    assert len(positions) == 1 and prompt.spliced == len(ids)
    hostile = tokenizer.encode("<think>", control=True)
    quoted = preparer.prepare(told("<think>", answer(tokenizer, hostile), "<think>"))
    assert quoted.ids.count(TokenId(hostile[0])) == 1


def test_white_space_that_the_template_trims_costs_only_itself() -> None:
    preparer, tokenizer = made("llama3"), tiny.tokenizer()
    ids = split(tokenizer, "the answer")
    space = tokenizer.encode_after("\n", "\ue000")
    prompt = preparer.prepare(told("x", answer(tokenizer, ids + space), "y"))
    assert prompt.spliced == len(ids)
    before = preparer.prepare(told("x", answer(tokenizer, space + ids), "y"))
    assert before.spliced == 0, "what was computed stood behind a white space that is no longer there"


def test_a_stop_string_cuts_the_ids_where_it_cuts_the_text() -> None:
    preparer, tokenizer = made("chatml"), tiny.tokenizer()
    ids = split(tokenizer, "the ans") + tokenizer.encode_after("wer", "\ue000")
    request = told("x", answer(tokenizer, ids, text="the answ"), "y")
    prompt = preparer.prepare(request)
    assert 0 < prompt.spliced < len(ids) and prompt.text == plain(preparer, request).text
    assert "the answ<|im_end|>" in prompt.text


WRONG = {
    "edited": lambda t, ids: Message("assistant", "the answer!", Generated(tuple(ids))),
    "replaced": lambda t, ids: Message("assistant", "no", Generated(tuple(ids))),
    "a special token inside": lambda t, ids: answer(t, [*ids[:3], min(t.special_ids - t.eos_ids), *ids[3:]]),
    "only the end token": lambda t, ids: answer(t, [*t.eos_ids]),
    "an id that is no token": lambda t, ids: answer(t, [*ids, t.vocab_size + 7]),
    "a negative id": lambda t, ids: answer(t, [*ids, -1]),
    "a start beyond the text": lambda t, ids: Message("assistant", "the answer", Generated(tuple(ids), 99)),
    "no ids": lambda t, ids: Message("assistant", "the answer", Generated(())),
    "another tokenizer's": lambda t, ids: Message("assistant", "the answer", Generated(tuple(i + 1 for i in ids))),
}


@pytest.mark.parametrize("how", WRONG)
def test_ids_that_do_not_spell_the_answer_are_left_out(how: str) -> None:
    preparer, tokenizer = made("chatml"), tiny.tokenizer()
    wrong = WRONG[how](tokenizer, split(tokenizer, "the answer"))
    request = told("x", wrong, "y")
    prompt, bare = preparer.prepare(request), plain(preparer, request)
    if how == "edited":  # its beginning is still what the model wrote
        assert prompt.text == bare.text and prompt.spliced == len(wrong.generated.ids)
    else:
        assert prompt == bare


def test_the_ids_of_a_question_mean_nothing() -> None:
    preparer, tokenizer = made("chatml"), tiny.tokenizer()
    ids = split(tokenizer, "the answer")
    request = told(Message("user", "the answer", Generated(tuple(map(TokenId, ids)))))
    assert preparer.prepare(request) == plain(preparer, request)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages | reverse %}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content }}|{{ m.content }};{% endfor %}",
        "{{ messages[0].content }}{% if messages | length > 1 %}{{ messages[-1].content }}{% endif %}",
        "{% for m in messages %}{% if m.content | length > 7 %}long: {% endif %}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }};{% endfor %}",
        (
            "{% for m in messages %}{% if m.role == 'assistant' and 'the' not in m.content %}{{ raise_exception('no') }}{% endif %}"
            "{{ m.content }};{% endfor %}"
        ),
    ],
)
def test_a_template_that_does_more_than_place_an_answer_gets_plain_text(source: str) -> None:
    tokenizer = tiny.tokenizer()
    preparer = PromptPreparer(tokenizer, ChatTemplate(source))
    ids = split(tokenizer, "the answer")
    request = told("x", answer(tokenizer, ids), "y", answer(tokenizer, ids), "z")
    prompt, bare = preparer.prepare(request), plain(preparer, request)
    assert prompt.text == bare.text
    assert prompt.ids == bare.ids


def test_places_lie_where_the_marks_did() -> None:
    m = "\ue001"
    marked = f"a{marker_of(m, 0)}b{marker_of(m, 1)}c"
    assert places("aXXbYc", marked, m, ["XX", "Y"]) == [(1, 3), (4, 5)]
    assert places("aXbYc", marked, m, ["XX", "Y"]) == [(1, 2), (3, 4)], "shortened by the template"
    assert places("aXXbbYc", marked, m, ["XXb", "Y"]) == [(1, 4), (5, 6)], "the separator occurs in the content"
    for rendered in ("zXXbYc", "", "a"):
        assert places(rendered, marked, m, ["XX", "Y"]) == []
    assert places("aXXbYz", marked, m, ["XX", "Y"]) == [(1, 3)]
    assert places("aXXb", f"a{marker_of(m, 1)}b{marker_of(m, 0)}", m, ["XX", "Y"]) == []


def test_a_switch_for_reasoning_costs_no_earlier_ids() -> None:
    """The switch writes its own words before the new answer only; earlier answers stand behind the same opening as before."""
    preparer, tokenizer = preparer_of("byte_level", "reasoning"), tiny.tokenizer()
    ids = split(tokenizer, "the answer")
    for thinking in (None, True, False):
        prompt = preparer.prepare(told("x", answer(tokenizer, ids), "y", thinking=thinking))
        assert prompt.spliced == len(ids), thinking
