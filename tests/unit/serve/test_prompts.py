"""Prompts: read within bounds, and a text that cannot fit is not cut into tokens at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")


from whimbrel.serve.errors import ApiError
from whimbrel.serve.prompts import Prompt
from whimbrel.serve.served import Served


def test_texts_and_ids(served: Served):
    ids = tuple(served.tokenizer.encode("Once upon"))
    assert served.reader.read(["Once upon", [*ids], "", [50256]], 10) == [
        Prompt("Once upon", ids, (0, 4)),
        Prompt("Once upon", ids),
        Prompt("", (50256,), (0,)),
        Prompt("<|endoftext|>", (50256,)),
    ]


def test_special_tokens_in_a_text_are_parsed_unless_told_otherwise(served: Served):
    text = "a<|endoftext|>b"
    assert served.reader.read([text], 10) == [Prompt(text, (64, 50256, 65), (0, 1, 14))]
    [literal] = served.reader.read([text], 10, parse_special=False)
    assert literal.ids == tuple(served.tokenizer.encode(text))
    assert 50256 not in literal.ids
    said = served.reader.converse([{"role": "user", "content": text}], 50)
    assert 50256 not in said.ids[1:]


def test_an_empty_text_is_the_bos_token_of_the_model(served: Served):
    named = replace(served, bos_id=7)
    assert named.reader.read([""], 10) == [Prompt("", (7,), (0,))]


@pytest.mark.parametrize("prompt", ["a b c d", [1, 2, 3, 4], "x" * 10_000])
def test_a_prompt_that_is_too_long(served: Served, prompt):
    with pytest.raises(ApiError, match="the longest prompt here has 3 tokens") as refused:
        served.reader.read([prompt], 3)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")


def test_a_text_that_no_tokenizer_can_shorten_is_refused_uncut(served: Served, monkeypatch):
    monkeypatch.setattr(type(served.tokenizer), "pipeline", None, raising=False)
    with pytest.raises(ApiError, match="has 385 characters"):
        served.reader.read(["x" * (3 * 128 + 1)], 3)


def test_strange_ids_and_half_characters(served: Served):
    with pytest.raises(ApiError, match="the token id 50257: ids run from 0 to 50256"):
        served.reader.read([[50257]], 3)
    with pytest.raises(ApiError, match=r"the token id 1{60}\.\.\.: ids run") as refused:
        served.reader.read([[int("1" * 4000)]], 3)
    assert len(str(refused.value)) < 200
    with pytest.raises(ApiError, match="half a surrogate pair at character 1"):
        served.reader.read(["a\ud800"], 3)


def test_a_conversation_is_as_long_as_its_text(served: Served):
    said = [{"role": "user", "content": "Hello"}]
    prompt = served.reader.converse(said, 50)
    assert served.tokenizer.decode(prompt.ids).endswith("User: Hello\nAssistant:")
    with pytest.raises(ApiError, match="messages has"):
        served.reader.converse(said, 2)
