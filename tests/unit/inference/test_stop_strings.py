"""Stop strings, independent of how the text is split into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.base.errors import RequestError
from whimbrel.inference.detokenizer import StopStrings


def passed(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    through = StopStrings(stops)
    shown = [through.push(piece) for piece in pieces]
    return [*shown, through.flush()], through.found


def first_to_end(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that completes first, searched character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


@given(
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_stop_string_that_ends_first(pieces, stops):
    shown, met = passed(pieces, stops)
    whole = "".join(pieces)
    before = first_to_end(whole, stops)
    assert met == (before is not None)
    assert "".join(shown) == (whole if before is None else before)


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=5))
def test_only_prefixes_of_stop_strings_are_held_back(text, stop):
    through, shown = StopStrings([stop]), ""
    for end, letter in enumerate(text, 1):
        shown += through.push(letter)
        if through.found:
            break
        held = text[len(shown) : end]
        assert stop.startswith(held)
        assert not any(stop.startswith(text[start:end]) for start in range(len(shown)))


def test_text_is_emitted_as_soon_as_it_is_safe():
    assert passed(["one\n", "\nH", "uman: yes"], ["\n\nHuman:"]) == (["one", "", "", ""], True)
    assert passed(["one\n", "\nHu", "go\n"], ["\n\nHuman:"]) == (["one", "", "\n\nHugo", "\n"], False)
    assert passed(["a", "b"], []) == (["a", "b", ""], False)


def test_no_text_follows_a_stop_string():
    assert passed(["a.b", "c.", "d"], ["."]) == (["a", "", "", ""], True)


@pytest.mark.parametrize("stops", ["end", [""], ["end", ""]])
def test_empty_stop_strings_are_rejected(stops):
    with pytest.raises(RequestError, match="non-empty strings"):
        StopStrings(stops)
