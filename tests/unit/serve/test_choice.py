"""A text as it grows: what may be sent, and the scores that go with it."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")


from whimbrel.generate import Event, Score
from whimbrel.serve.choice import Choice, Piece, Source
from whimbrel.serve.prompts import Prompt
from whimbrel.serve.served import Served


def grow(
    served: Served, text: str, *, stops=(), echo=False, finish="length", prompt="So"
) -> tuple[list[Piece], Choice]:
    ids = tuple(served.tokenizer.encode(prompt))
    source = Source(Prompt(prompt, ids), stops, echo, [Score(None), *[Score(-2.0)] * (len(ids) - 1)] if echo else ())
    choice = Choice(0, source, served.tokenizer, served.texts, scored=True)
    tokens = served.tokenizer.encode(text)
    events = [Event(0, 0, token, -1.0) for token in tokens[:-1]]
    events.append(Event(0, 0, tokens[-1], -1.0, finish=finish))
    return [choice.take(event) for event in events], choice


def joined(pieces: list[Piece]) -> Piece:
    whole = Piece()
    for piece in pieces:
        whole.extend(piece)
    return whole


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("text", [" it goes", " naïve 北京 🙂!", "…🙂🙂"])
def test_pieces_make_the_text_and_scores_stand_where_tokens_begin(served: Served, text: str, echo: bool):
    pieces, choice = grow(served, text, echo=echo)
    whole = joined(pieces)
    assert whole.text == ("So" if echo else "") + text
    assert whole.finish == choice.finish == "length"
    spelled = b"".join(served.texts.bytes_of(entry.token) for entry in whole.scored)
    assert spelled.decode() == whole.text
    complete = "So" + text
    for entry in whole.scored:
        name = served.texts.name_of(entry.token)
        assert complete.startswith(name, entry.offset) or name.startswith("bytes:")


def test_a_score_is_sent_with_its_text_and_not_before(served: Served):
    pieces, _ = grow(served, " one two three four", stops=[" two three five"])
    assert [(piece.text, len(piece.scored)) for piece in pieces] == [
        (" one", 1),
        ("", 0),
        ("", 0),
        (" two three four", 3),
    ]


def test_tokens_of_a_stop_string_are_neither_text_nor_scored(served: Served):
    pieces, choice = grow(served, " one two three four", stops=[" two thr"])
    whole = joined(pieces)
    assert (whole.text, whole.finish, len(whole.scored)) == (" one", "stop", 1)
    assert choice.tokens == 3
    assert not pieces[-1]


def test_a_stop_token_adds_nothing(served: Served):
    source = Source(Prompt("So", (2396,)), (), echo=False)
    choice = Choice(0, source, served.tokenizer, served.texts, scored=True)
    assert choice.take(Event(0, 0, finish="stop")) == Piece("", [], "stop")
    assert choice.tokens == 0
