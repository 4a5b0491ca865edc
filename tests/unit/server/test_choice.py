"""A text as it grows: what may be sent, and the scores that go with it."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")


from tokenizers import AddedToken

from whimbrel.inference import Event, Logprob
from whimbrel.server.choice import Choice, Piece, Source
from whimbrel.server.prompts import Prompt
from whimbrel.server.served import Served
from whimbrel.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def talking() -> Tokenizer:
    """GPT-2's tokenizer with a special token that ends nothing, 50257."""
    tokenizer = Tokenizer.from_json(load_tokenizer("gpt2").to_json())
    tokenizer.pipeline.add_special_tokens([AddedToken("<|turn|>", special=True)])
    return Tokenizer.from_json(tokenizer.to_json())


def grow(
    served: Served, text: str, *, stops=(), echo=False, finish="length", prompt="So"
) -> tuple[list[Piece], Choice]:
    ids = tuple(served.tokenizer.encode(prompt))
    source = Source(
        Prompt(prompt, ids), stops, echo, [Logprob(None), *[Logprob(-2.0)] * (len(ids) - 1)] if echo else ()
    )
    choice = Choice(0, source, served.tokenizer, scored=True)
    return take(choice, served.tokenizer.encode(text), finish), choice


def take(choice: Choice, tokens: list[int], finish="length") -> list[Piece]:
    events = [Event(0, 0, token, -1.0) for token in tokens[:-1]]
    return [choice.take(event) for event in [*events, Event(0, 0, tokens[-1], -1.0, finish_reason=finish)]]


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
    choice = Choice(0, source, served.tokenizer, scored=True)
    assert choice.take(Event(0, 0, finish_reason="stop")) == Piece("", [], "stop")
    assert choice.tokens == 0


@pytest.mark.parametrize("stops", [(), (" three",)])
def test_tokens_that_the_text_leaves_out_are_scored_where_they_stand_and_at_once(talking: Tokenizer, stops):
    one, two, three = talking.encode(" one two three")
    turn, past = 50257, 60000
    choice = Choice(0, Source(Prompt("So", (2396,)), stops, echo=False), talking, scored=True)
    pieces = take(choice, [turn, one, turn, past, two, turn, three])
    scored = [(one, 2), (turn, 6), (past, 6), (two, 6), (turn, 10)]
    if not stops:
        scored.append((three, 10))
    whole = joined(pieces)
    assert whole.text == (" one two" if stops else " one two three")
    assert [(entry.token, entry.offset) for entry in whole.scored] == [(turn, 2), *scored]
    assert [len(piece.scored) for piece in pieces] == [1, 1, 1, 1, 1, 1, 0 if stops else 1]


def test_a_token_without_text_amid_a_stop_string_goes_with_it(talking: Tokenizer):
    one, two, three = talking.encode(" one two three")
    asked = Source(Prompt("So", (2396,)), ["e two three", " four"], echo=False)
    whole = joined(take(Choice(0, asked, talking, scored=True), [one, 50257, two, 50257, three]))
    assert (whole.text, [entry.token for entry in whole.scored]) == (" on", [one])
    whole = joined(take(Choice(0, asked, talking, scored=True), [one, 50257, two, 50257, two]))
    assert (whole.text, [entry.offset for entry in whole.scored]) == (" one two two", [2, 6, 6, 10, 10])


def test_a_character_is_scored_whole_also_around_a_token_without_text(talking: Tokenizer):
    first, *others = talking.encode("🐦")
    pieces = take(Choice(0, Source(Prompt("", (2396,)), (), echo=False), talking, scored=True), [first, 50257, *others])
    assert not any(pieces[:-1])
    assert (pieces[-1].text, [entry.offset for entry in pieces[-1].scored]) == ("🐦", [0] * (len(others) + 2))


def test_an_end_of_text_that_is_no_end_is_as_long_as_what_stands_for_it(talking: Tokenizer):
    one, two = talking.encode(" one two")
    choice = Choice(0, Source(Prompt("So", (2396,)), (), echo=False), talking, scored=True)
    whole = joined(take(choice, [one, talking.eot_id, two]))
    assert (whole.text, [entry.offset for entry in whole.scored]) == (" one\n\n two", [2, 6, 8])


def test_an_echoed_prompt_is_scored_where_it_stands_in_its_own_text(sentencepiece: Tokenizer):
    ids = tuple(sentencepiece.pipeline.encode("ab é ab").ids)
    assert [sentencepiece.pipeline.id_to_token(token) for token in ids[:2]] == ["<s>", "▁ab"]
    for prompt, offsets in (
        (Prompt("ab é ab", ids, tuple(sentencepiece.encode_prompt("ab é ab").offsets)), [0, 0, 2, 3, 3, 4]),
        (Prompt("<s> ab é ab", ids), [0, 3, 6, 7, 7, 8]),
    ):
        choice = Choice(0, Source(prompt, (), True, [Logprob(-1.0)] * len(ids)), sentencepiece, scored=True)
        echoed = joined(take(choice, [sentencepiece.pipeline.token_to_id("b")]))
        assert echoed.text == prompt.text + "b"
        assert [entry.offset for entry in echoed.scored] == [*offsets, len(prompt.text)]


def test_an_echoed_prompt_with_special_tokens_is_scored_where_they_stand(talking: Tokenizer):
    text = "So<|turn|> it<|turn|> goes"
    ids, offsets = talking.encode_prompt(text)
    assert len(ids) == 5
    source = Source(Prompt(text, tuple(ids), tuple(offsets)), (), True, [Logprob(-1.0)] * 5)
    echoed = joined(take(Choice(0, source, talking, scored=True), talking.encode(" on")))
    assert echoed.text == text + " on"
    assert [entry.offset for entry in echoed.scored] == [0, 2, 10, 13, 21, len(text)]
