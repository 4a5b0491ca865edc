"""Prompts: read within bounds, and a text that cannot fit is not cut into tokens at all."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")


from whimbrel.server.errors import ApiError
from whimbrel.server.prompts import Prompt, PromptReader
from whimbrel.server.served import Served
from whimbrel.server.tokens import TokenTexts
from whimbrel.tokenization import Tokenizer


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


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters each call of the tokenizer is given."""
    seen: list[int] = []
    prompts, ids = Tokenizer.encode_prompts, Tokenizer._ids

    def encode_prompts(self, texts, **options):
        seen.extend(map(len, texts))
        return prompts(self, texts, **options)

    def encode_ids(self, text):
        seen.append(len(text))
        return ids(self, text)

    monkeypatch.setattr(Tokenizer, "encode_prompts", encode_prompts)
    monkeypatch.setattr(Tokenizer, "_ids", encode_ids)
    return seen


@pytest.fixture(scope="module")
def normalizing(served: Served) -> PromptReader:
    """Reads with a normalizer, which may shorten a text."""
    content = json.loads(served.tokenizer.to_json()) | {"normalizer": {"type": "NFC"}}
    tokenizer = Tokenizer.from_json(json.dumps(content), "<|endoftext|>")
    return replace(served.reader, tokenizer=tokenizer, texts=TokenTexts(tokenizer))


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_text_of_too_many_characters_is_refused_before_it_is_encoded(served: Served, encoded: list[int]):
    with pytest.raises(ApiError, match="has 385 characters"):
        served.reader.read(["x" * (3 * 128 + 1)], 3)
    assert encoded == []


def test_a_normalizer_does_not_lift_the_limit_of_characters(normalizing: PromptReader, encoded: list[int]):
    assert len(normalizing.read(["e\u0301" * 3], 3)[0].ids) == 3  # 6 characters that become 3
    encoded.clear()
    for refused in (
        lambda: normalizing.read(["x" * 4_000_000], 100),
        lambda: normalizing.converse(said("x" * 4_000_000), 100),
    ):
        with pytest.raises(ApiError, match="has 4000000 characters"):
            refused()
    assert encoded == []


@pytest.mark.parametrize("text", ["<|endoftext|>" * 300_000, "a b" * 1_300_000, "é" * 2_000_000])
def test_of_a_text_that_is_too_long_only_the_beginning_is_encoded(
    served: Served, normalizing: PromptReader, encoded: list[int], text: str
):
    most = 2000
    text = text[: most * 128]  # as long as the limit of characters allows
    for reader in (served.reader, normalizing):
        for refused in (partial(reader.read, [text], most), partial(reader.converse, said(text), most)):
            encoded.clear()
            with pytest.raises(ApiError, match="the longest prompt here has 2000 tokens") as error:
                refused()
            assert error.value.code == "context_length_exceeded"
            assert 0 < sum(encoded) < len(text) / 4


def test_a_text_of_long_tokens_is_encoded_whole(served: Served):
    text = ("-" * 64 + "\n") * 40
    prompt = served.reader.read([text], 100)[0]
    assert (prompt.text, list(prompt.ids)) == (text, served.tokenizer.encode(text))
    assert len(text) > 16 * len(prompt.ids) > 16


def test_strange_ids_and_half_characters(served: Served):
    with pytest.raises(ApiError, match="the token id 50257: ids run from 0 to 50256"):
        served.reader.read([[50257]], 3)
    with pytest.raises(ApiError, match=r"the token id 1{60}\.\.\.: ids run") as refused:
        served.reader.read([[int("1" * 4000)]], 3)
    assert len(str(refused.value)) < 200
    with pytest.raises(ApiError, match="half a surrogate pair at character 1"):
        served.reader.read(["a\ud800"], 3)


def test_a_conversation_is_as_long_as_its_text(served: Served):
    prompt = served.reader.converse(said("Hello"), 50)
    assert served.tokenizer.decode(prompt.ids).endswith("User: Hello\nAssistant:")
    with pytest.raises(ApiError, match="messages has"):
        served.reader.converse(said("Hello"), 2)
