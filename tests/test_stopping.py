"""Stop strings: the incremental matcher against the plain definition on the whole text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxnb_engine.stopping import StopMatcher


def definition(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the earliest occurrence of a stop string, and the longest that starts there."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def run(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    visible = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        visible += text
        if stop is not None:
            assert matcher.matched == stop
            return visible, stop
    visible += matcher.flush()
    return visible, matcher.matched


texts = st.text(alphabet="ab\n", max_size=24)
stop_sets = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=400, deadline=None)
@given(texts, stop_sets, st.lists(st.integers(0, 24), max_size=8))
def test_any_split_of_a_text_gives_what_the_whole_text_gives(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert run(pieces, stops) == definition(text, stops)


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("xxabcd", ("bc", "abcd")),
        ("xxabcx", ("bc", "abcd")),
        ("xab", ("ab", "abc")),
        ("xabc", ("ab", "abc")),
        ("aaab", ("aab",)),
        ("one\n\ntwo", ("\n\n", "\n")),
        ("no stop here", ("###",)),
        ("", ("x",)),
        ("été STOP", ("STOP", "é S")),
        ("aabaabaac", ("aabaac", "abaaba")),
    ],
)
def test_every_two_cuts_of_a_telling_text_agree_with_the_definition(text: str, stops: tuple[str, ...]) -> None:
    for a in range(len(text) + 1):
        for b in range(a, len(text) + 1):
            assert run([text[:a], text[a:b], text[b:]], stops) == definition(text, stops), (a, b)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(("</end>",))
    assert matcher.push("hello <") == ("hello ", None)
    assert matcher.push("/e") == ("", None)
    assert matcher.push("xtra") == ("</extra", None)
    assert matcher.flush() == ""


def test_held_text_stays_shorter_than_the_longest_stop() -> None:
    matcher = StopMatcher(("aaaaab", "ba"))
    shown = sum(len(matcher.push("a")[0]) for _ in range(1000))
    assert shown >= 1000 - 5


def test_nothing_is_visible_after_a_match() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("a END b") == ("a ", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.flush() == ""


def test_a_match_that_waited_for_a_longer_one_is_named_at_the_end() -> None:
    matcher = StopMatcher(("ab", "abc"))
    assert matcher.push("xab") == ("x", None)
    assert matcher.flush() == ""
    assert matcher.matched == "ab"


def test_without_stops_text_passes_at_once() -> None:
    matcher = StopMatcher(())
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))


def test_a_matcher_that_looks_at_one_piece_at_a_time_is_caught() -> None:
    """Negative control: without held text the same comparison fails."""

    def per_piece(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
        shown = ""
        for piece in pieces:
            text, stop = definition(piece, stops)
            shown += text
            if stop:
                return shown, stop
        return shown, None

    text, stops = "one STOP two", ("STOP",)
    wrong = [a for a in range(len(text)) if per_piece([text[:a], text[a:]], stops) != definition(text, stops)]
    assert wrong == [5, 6, 7]
