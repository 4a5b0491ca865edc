"""Choices: text, log-probabilities and offsets as tokens arrive."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")


from tokenizers import AddedToken

from whimbrel.inference import Event, Logprob
from whimbrel.server.served_model import Prompt, ServedModel
from whimbrel.server.streaming import Choice, Delta, PromptContext
from whimbrel.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer_with_turns() -> Tokenizer:
    """GPT-2's tokenizer with a special token that does not end a sequence, 50257."""
    tokenizer = Tokenizer.from_json(load_tokenizer("gpt2").to_json())
    tokenizer.pipeline.add_special_tokens([AddedToken("<|turn|>", special=True)])
    return Tokenizer.from_json(tokenizer.to_json())


def generate(
    served: ServedModel, text: str, *, stops=(), echo=False, finish="length", prompt="So"
) -> tuple[list[Delta], Choice]:
    ids = tuple(served.tokenizer.encode(prompt))
    context = PromptContext(
        Prompt(prompt, ids), stops, echo, [Logprob(None), *[Logprob(-2.0)] * (len(ids) - 1)] if echo else ()
    )
    choice = Choice(0, context, served.tokenizer, with_logprobs=True)
    return add_all(choice, served.tokenizer.encode(text), finish), choice


def add_all(choice: Choice, tokens: list[int], finish="length") -> list[Delta]:
    events = [Event(0, 0, token, -1.0) for token in tokens[:-1]]
    return [choice.add(event) for event in [*events, Event(0, 0, tokens[-1], -1.0, finish_reason=finish)]]


def concatenate(deltas: list[Delta]) -> Delta:
    total = Delta()
    for delta in deltas:
        total.extend(delta)
    return total


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("text", [" it goes", " naïve 北京 🙂!", "…🙂🙂"])
def test_deltas_concatenate_to_the_text_and_offsets_match_the_tokens(served: ServedModel, text: str, echo: bool):
    deltas, choice = generate(served, text, echo=echo)
    total = concatenate(deltas)
    assert total.text == ("So" if echo else "") + text
    assert total.finish == choice.finish == "length"
    joined_bytes = b"".join(served.token_texts.to_bytes(entry.token) for entry in total.tokens)
    assert joined_bytes.decode() == total.text
    complete = "So" + text
    for entry in total.tokens:
        name = served.token_texts.to_text(entry.token)
        assert complete.startswith(name, entry.offset) or name.startswith("bytes:")


def test_a_logprob_is_sent_together_with_its_text(served: ServedModel):
    deltas, _ = generate(served, " one two three four", stops=[" two three five"])
    assert [(delta.text, len(delta.tokens)) for delta in deltas] == [
        (" one", 1),
        ("", 0),
        ("", 0),
        (" two three four", 3),
    ]


def test_tokens_of_a_stop_string_are_left_out_of_text_and_logprobs(served: ServedModel):
    deltas, choice = generate(served, " one two three four", stops=[" two thr"])
    total = concatenate(deltas)
    assert (total.text, total.finish, len(total.tokens)) == (" one", "stop", 1)
    assert choice.num_tokens == 3
    assert not deltas[-1]


def test_a_stop_token_adds_no_text(served: ServedModel):
    context = PromptContext(Prompt("So", (2396,)), (), echo=False)
    choice = Choice(0, context, served.tokenizer, with_logprobs=True)
    assert choice.add(Event(0, 0, finish_reason="stop")) == Delta("", [], "stop")
    assert choice.num_tokens == 0


@pytest.mark.parametrize("stops", [(), (" three",)])
def test_tokens_without_text_have_logprobs_and_offsets(tokenizer_with_turns: Tokenizer, stops):
    one, two, three = tokenizer_with_turns.encode(" one two three")
    turn, past = 50257, 60000
    choice = Choice(
        0, PromptContext(Prompt("So", (2396,)), stops, echo=False), tokenizer_with_turns, with_logprobs=True
    )
    deltas = add_all(choice, [turn, one, turn, past, two, turn, three])
    scored = [(one, 2), (turn, 6), (past, 6), (two, 6), (turn, 10)]
    if not stops:
        scored.append((three, 10))
    total = concatenate(deltas)
    assert total.text == (" one two" if stops else " one two three")
    assert [(entry.token, entry.offset) for entry in total.tokens] == [(turn, 2), *scored]
    assert [len(delta.tokens) for delta in deltas] == [1, 1, 1, 1, 1, 1, 0 if stops else 1]


def test_a_token_without_text_inside_a_stop_string_is_left_out(tokenizer_with_turns: Tokenizer):
    one, two, three = tokenizer_with_turns.encode(" one two three")
    context = PromptContext(Prompt("So", (2396,)), ["e two three", " four"], echo=False)
    total = concatenate(
        add_all(Choice(0, context, tokenizer_with_turns, with_logprobs=True), [one, 50257, two, 50257, three])
    )
    assert (total.text, [entry.token for entry in total.tokens]) == (" on", [one])
    total = concatenate(
        add_all(Choice(0, context, tokenizer_with_turns, with_logprobs=True), [one, 50257, two, 50257, two])
    )
    assert (total.text, [entry.offset for entry in total.tokens]) == (" one two two", [2, 6, 6, 10, 10])


def test_tokens_of_one_character_are_sent_together(tokenizer_with_turns: Tokenizer):
    first, *others = tokenizer_with_turns.encode("🐦")
    deltas = add_all(
        Choice(0, PromptContext(Prompt("", (2396,)), (), echo=False), tokenizer_with_turns, with_logprobs=True),
        [first, 50257, *others],
    )
    assert not any(deltas[:-1])
    assert (deltas[-1].text, [entry.offset for entry in deltas[-1].tokens]) == ("🐦", [0] * (len(others) + 2))


def test_an_end_of_text_token_that_does_not_stop_counts_as_its_replacement(tokenizer_with_turns: Tokenizer):
    one, two = tokenizer_with_turns.encode(" one two")
    choice = Choice(0, PromptContext(Prompt("So", (2396,)), (), echo=False), tokenizer_with_turns, with_logprobs=True)
    total = concatenate(add_all(choice, [one, tokenizer_with_turns.eot_id, two]))
    assert (total.text, [entry.offset for entry in total.tokens]) == (" one\n\n two", [2, 6, 8])


def test_offsets_of_an_echoed_prompt_refer_to_its_text(sentencepiece: Tokenizer):
    ids = tuple(sentencepiece.pipeline.encode("ab é ab").ids)
    assert [sentencepiece.pipeline.id_to_token(token) for token in ids[:2]] == ["<s>", "▁ab"]
    for prompt, offsets in (
        (Prompt("ab é ab", ids, tuple(sentencepiece.encode_prompt("ab é ab").offsets)), [0, 0, 2, 3, 3, 4]),
        (Prompt("<s> ab é ab", ids), [0, 3, 6, 7, 7, 8]),
    ):
        choice = Choice(
            0, PromptContext(prompt, (), True, [Logprob(-1.0)] * len(ids)), sentencepiece, with_logprobs=True
        )
        echo_delta = concatenate(add_all(choice, [sentencepiece.pipeline.token_to_id("b")]))
        assert echo_delta.text == prompt.text + "b"
        assert [entry.offset for entry in echo_delta.tokens] == [*offsets, len(prompt.text)]


def test_offsets_of_special_tokens_in_an_echoed_prompt(tokenizer_with_turns: Tokenizer):
    text = "So<|turn|> it<|turn|> goes"
    ids, offsets = tokenizer_with_turns.encode_prompt(text)
    assert len(ids) == 5
    context = PromptContext(Prompt(text, tuple(ids), tuple(offsets)), (), True, [Logprob(-1.0)] * 5)
    echo_delta = concatenate(
        add_all(Choice(0, context, tokenizer_with_turns, with_logprobs=True), tokenizer_with_turns.encode(" on"))
    )
    assert echo_delta.text == text + " on"
    assert [entry.offset for entry in echo_delta.tokens] == [0, 2, 10, 13, 21, len(text)]
