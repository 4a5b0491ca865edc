"""Encoding of prompts and conversations within limits, and the text of single tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")


from whimbrel.base.errors import RequestError
from whimbrel.inference import PromptLimits
from whimbrel.inference.detokenizer import Detokenizer
from whimbrel.server.errors import ApiError
from whimbrel.server.served_model import Prompt, ServedModel, TokenTexts
from whimbrel.tokenization import Tokenizer, load_tokenizer, train_tokenizer


def test_prompts_of_text_and_of_token_ids(served: ServedModel):
    ids = tuple(served.tokenizer.encode("Once upon"))
    assert served.encode_prompts(["Once upon", [*ids], "", [50256]], 10) == [
        Prompt("Once upon", ids, (0, 4)),
        Prompt("Once upon", ids),
        Prompt("", (50256,), (0,)),
        Prompt("<|endoftext|>", (50256,)),
    ]


def test_special_tokens_in_a_text_prompt_are_parsed_unless_parse_special_is_false(served: ServedModel):
    text = "a<|endoftext|>b"
    assert served.encode_prompts([text], 10) == [Prompt(text, (64, 50256, 65), (0, 1, 14))]
    [literal] = served.encode_prompts([text], 10, parse_special=False)
    assert literal.ids == tuple(served.tokenizer.encode(text))
    assert 50256 not in literal.ids
    user_message = served.encode_chat([{"role": "user", "content": text}], 50)
    assert 50256 not in user_message.ids[1:]


def test_an_empty_prompt_becomes_the_bos_token(served: ServedModel):
    model = replace(served, bos_id=7)
    assert model.encode_prompts([""], 10) == [Prompt("", (7,), (0,))]


@pytest.mark.parametrize("prompt", ["a b c d", [1, 2, 3, 4], "x" * 10_000])
def test_a_prompt_over_the_limit_is_rejected(served: ServedModel, prompt):
    with pytest.raises(ApiError, match="maximum prompt length is 3 tokens") as excinfo:
        served.encode_prompts([prompt], 3)
    assert (excinfo.value.param, excinfo.value.code) == ("prompt", "context_length_exceeded")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of characters of each tokenizer call."""
    calls: list[int] = []
    prompts, ids = Tokenizer.encode_prompts, Tokenizer._encode

    def encode_prompts(self, texts, **options):
        calls.extend(map(len, texts))
        return prompts(self, texts, **options)

    def encode_ids(self, text):
        calls.append(len(text))
        return ids(self, text)

    monkeypatch.setattr(Tokenizer, "encode_prompts", encode_prompts)
    monkeypatch.setattr(Tokenizer, "_encode", encode_ids)
    return calls


@pytest.fixture(scope="module")
def normalizing(served: ServedModel) -> ServedModel:
    """A tokenizer with a normalizer, which may shorten a text."""
    content = json.loads(served.tokenizer.to_json()) | {"normalizer": {"type": "NFC"}}
    tokenizer = Tokenizer.from_json(json.dumps(content), "<|endoftext|>")
    return replace(served, tokenizer=tokenizer)


def user_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_text_of_too_many_characters_is_rejected_before_encoding(served: ServedModel, encoded: list[int]):
    with pytest.raises(ApiError, match="has 385 characters"):
        served.encode_prompts(["x" * (3 * 128 + 1)], 3)
    assert encoded == []


def test_the_character_limit_also_applies_with_a_normalizer(normalizing: ServedModel, encoded: list[int]):
    assert len(normalizing.encode_prompts(["e\u0301" * 3], 3)[0].ids) == 3  # 6 characters that become 3
    encoded.clear()
    for encode in (
        lambda: normalizing.encode_prompts(["x" * 4_000_000], 100),
        lambda: normalizing.encode_chat(user_message("x" * 4_000_000), 100),
    ):
        with pytest.raises(ApiError, match="has 4000000 characters"):
            encode()
    assert encoded == []


@pytest.mark.parametrize("text", ["<|endoftext|>" * 300_000, "a b" * 1_300_000, "é" * 2_000_000])
def test_only_the_beginning_of_a_text_over_the_limit_is_encoded(
    served: ServedModel, normalizing: ServedModel, encoded: list[int], text: str
):
    max_tokens = 2000
    text = text[: max_tokens * 128]  # as long as the limit of characters allows
    for model in (served, normalizing):
        for encode in (
            partial(model.encode_prompts, [text], max_tokens),
            partial(model.encode_chat, user_message(text), max_tokens),
        ):
            encoded.clear()
            with pytest.raises(ApiError, match="maximum prompt length is 2000 tokens") as error:
                encode()
            assert error.value.code == "context_length_exceeded"
            assert 0 < sum(encoded) < len(text) / 4


def test_a_text_of_long_tokens_is_encoded_completely(served: ServedModel):
    text = ("-" * 64 + "\n") * 40
    prompt = served.encode_prompts([text], 100)[0]
    assert (prompt.text, list(prompt.ids)) == (text, served.tokenizer.encode(text))
    assert len(text) > 16 * len(prompt.ids) > 16


def limits(complete: int, truncated: int) -> PromptLimits:
    return PromptLimits(complete, truncated, complete)


def test_the_end_of_a_long_text_is_kept_from_the_start_of_a_word(served: ServedModel):
    text = "The whimbrel flies thousands of kilometres without a stop."
    [complete] = served.encode_prompts([text], 20, truncate_to=limits(20, 5))
    assert (complete.text, complete.dropped) == (text, 0)
    [end] = served.encode_prompts([text], 20, truncate_to=limits(8, 5))
    assert end == Prompt(text[-15:], tuple(served.tokenizer.encode("without a stop.")), (0, 7, 9, 14), len(text) - 15)
    [ids] = served.encode_prompts([[1, 2, 3, 4]], 20, truncate_to=limits(3, 2))
    assert (ids.ids, ids.dropped) == ((3, 4), 2)


@pytest.mark.parametrize("text", ["☃" * 100, "☃ " * 100, "-" * 6400, "\U0001f9a2" * 100, "<|endoftext|>" * 50])
@pytest.mark.parametrize("max_tokens", [4, 7, 30])
def test_the_end_of_any_text_fits_and_is_not_empty(served: ServedModel, text: str, max_tokens: int):
    [prompt] = served.encode_prompts([text], 90, truncate_to=limits(45, max_tokens))
    assert max_tokens // 2 < len(prompt.ids) <= max_tokens
    assert text == text[: prompt.dropped] + prompt.text


def test_only_the_end_of_a_text_far_over_the_limit_is_encoded(served: ServedModel, encoded: list[int]):
    [prompt] = served.encode_prompts(["so " * 1_000_000 + "the end"], 100, truncate_to=limits(100, 50))
    assert prompt.text.endswith("so the end")
    assert len(prompt.ids) == 50
    assert sum(encoded) < 20_000


def test_a_text_whose_last_character_does_not_fit_is_rejected(served: ServedModel):
    with pytest.raises(ApiError, match="maximum prompt length is 1 token"):
        served.encode_prompts(["\U0001f9a2" * 2], 3, truncate_to=limits(1, 1))


def chat(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"number {index}"} for index, role in enumerate(roles)]


def test_the_oldest_messages_are_dropped(served: ServedModel):
    messages = chat("system", "assistant", *("user", "assistant", "tool", "assistant") * 3, "user")
    length = len(served.encode_chat(messages, 128).ids)
    for budget in range(length, 10, -1):
        prompt = served.encode_chat(messages, 128, truncate_to=PromptLimits(length - 1, budget, 20))
        kept = [messages[0], *messages[1 + prompt.dropped :]]
        assert prompt.dropped in (1, 5, 9, 13)
        assert prompt.ids == served.encode_chat(kept, 128).ids
        assert len(prompt.ids) <= max(budget, 20)
        longer = [messages[0], *messages[1 + prompt.dropped - 4 :]]
        assert prompt.dropped == 1 or len(served.encode_chat(longer, 128).ids) > budget
    assert served.encode_chat(messages, 128, truncate_to=limits(length, 5)).dropped == 0


@pytest.mark.parametrize("roles", [("user",), ("system", "user"), ("user", "assistant", "user"), ("system",)])
def test_the_last_message_is_never_dropped(served: ServedModel, roles: tuple[str, ...]):
    with pytest.raises(ApiError, match="messages has") as error:
        served.encode_chat(chat(*roles), 4, truncate_to=PromptLimits(4, 3, 4))
    assert error.value.code == "context_length_exceeded"


def test_invalid_token_ids_and_lone_surrogates_are_rejected(served: ServedModel):
    with pytest.raises(ApiError, match="from 0 to 50256 .*got 50257"):
        served.encode_prompts([[50257]], 3)
    with pytest.raises(ApiError, match=r"got 1{60}\.\.\.") as excinfo:
        served.encode_prompts([[int("1" * 4000)]], 3)
    assert len(str(excinfo.value)) < 200
    with pytest.raises(RequestError, match="prompt: .* lone surrogate at character 1"):
        served.encode_prompts(["a\ud800"], 3)


def test_a_conversation_is_limited_by_its_rendered_length(served: ServedModel):
    prompt = served.encode_chat(user_message("Hello"), 50)
    assert served.tokenizer.decode(prompt.ids).endswith("User: Hello\nAssistant:")
    with pytest.raises(ApiError, match="messages has"):
        served.encode_chat(user_message("Hello"), 2)


TEXT = "Hello naïve 北京 🙂 <|endoftext|>"


def test_bytes_of_byte_level_tokens():
    tokenizer = load_tokenizer("gpt2")
    texts = TokenTexts(tokenizer)
    assert b"".join(texts.to_bytes(token) for token in tokenizer.encode(TEXT)) == TEXT.encode()
    assert texts.to_text(50256) == "<|endoftext|>"
    assert texts.to_bytes(60000) == b""
    assert texts.max_bytes == 128
    [halved] = [token for token in tokenizer.encode("🙂") if texts.to_bytes(token) == b"\x99\x82"][:1]
    assert texts.to_text(halved) == r"bytes:\x99\x82"


def test_bytes_of_sentencepiece_tokens(sentencepiece: Tokenizer):
    texts = TokenTexts(sentencepiece)
    assert b"".join(texts.to_bytes(token) for token in sentencepiece.encode("ab é")) == " ab é".encode()
    assert texts.to_text(3 + 0xC3) == r"bytes:\xc3"
    assert texts.to_text(1) == "<s>"


def test_unused_ids_are_not_decoded(monkeypatch: pytest.MonkeyPatch):
    content = json.loads(train_tokenizer(["a b"], 257).to_json())
    content["model"]["vocab"]["zz"] = 100_000
    calls = []
    token_bytes = Detokenizer.token_bytes
    monkeypatch.setattr(Detokenizer, "token_bytes", lambda self, token: calls.append(token) or token_bytes(self, token))
    tokenizer = Tokenizer.from_json(json.dumps(content))
    TokenTexts(tokenizer)
    assert tokenizer.vocab_size == 100_001
    assert len(set(calls)) == len(tokenizer.pipeline.get_vocab())
