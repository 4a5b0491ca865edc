"""Chat templates for training: text, ids and masks are those of transformers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import (
    CHATML_GENERATION,
    GENERATION_TEMPLATES,
    PREFIX_TEMPLATES,
    SPECIAL,
    THINKING_GENERATION,
    TOOL_CHAT,
    WEATHER,
)

from whimbrel.tokenization import (
    BUILTIN_TEMPLATES,
    Chat,
    ChatTemplate,
    Tokenizer,
    apply_builtin_template,
    train_tokenizer,
)

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))

# Words with spaces, newlines, several scripts, parts of special tokens and Jinja syntax.
WORDS = st.sampled_from(
    [
        "Hi",
        " ",
        "  ",
        "\n",
        "don't",
        "日本",
        "é",
        "🐦",
        "👩‍👩‍👧",
        "\u2028",
        "<|im_",
        "</",
        "[INST",
        "{{ x }}",
        "{% if %}",
        "1234",
        "\t",
    ]
)
TEXT = st.lists(WORDS, min_size=1, max_size=12).map("".join).map(lambda text: f"a{text}")


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": draw(TEXT)}, {"role": "assistant", "content": draw(TEXT)}]
    return messages


@functools.cache
def bpe() -> Tokenizer:
    """A BPE with merges of words, spaces, newlines and parts of characters."""
    return train_tokenizer(["aHi  don't\n\n日本 é 🐦 user\nassistant model\n"] * 9, 330, min_frequency=1)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return byte_tokenizer(SPECIAL)
    return bpe().with_special_tokens(SPECIAL, eot_token="</s>")


def hf_tokenizer(tokenizer: Tokenizer, source: str, **names: str) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.pipeline).from_str(tokenizer.to_json()), chat_template=source, **names or NAMES
    )


def train(template: ChatTemplate, tokenizer: Tokenizer, *chats: Chat, train_on: str = "assistant") -> list[Any]:
    return list(template.encode_for_training(tokenizer, chats, train_on))


@pytest.mark.parametrize("name", PREFIX_TEMPLATES)
def test_rendering_and_ids_equal_transformers(name: str, tokenizer: Tokenizer) -> None:
    source = PREFIX_TEMPLATES[name]
    ours, theirs = ChatTemplate(source, NAMES), hf_tokenizer(tokenizer, source)

    @SETTINGS
    @given(conversations(), st.booleans())
    def check(messages: list[dict[str, Any]], with_tools: bool) -> None:
        tools = WEATHER if with_tools and "tools" in source else None
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
            assert ours.render(messages, tools=tools, add_generation_prompt=prompt) == expected
        [tokens] = train(ours, tokenizer, Chat(messages, tools))
        assert tokens.ids.tolist() == ours.encode(tokenizer, messages, tools=tools, add_generation_prompt=False)
        if tools is None:  # whose description contains a special token, which transformers parses
            assert tokens.ids.tolist() == theirs.apply_chat_template(messages)["input_ids"]

    check()


@pytest.mark.parametrize("name", GENERATION_TEMPLATES)
def test_masks_of_generation_blocks_equal_transformers(name: str, tokenizer: Tokenizer) -> None:
    source = GENERATION_TEMPLATES[name]
    ours, theirs = ChatTemplate(source, NAMES), hf_tokenizer(tokenizer, source)

    @SETTINGS
    @given(st.lists(conversations(), min_size=1, max_size=3))
    def check(batch: list[list[dict[str, Any]]]) -> None:
        results = train(ours, tokenizer, *map(Chat, batch))
        for messages, tokens in zip(batch, results, strict=True):
            expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            assert tokens.ids.tolist() == expected["input_ids"]
            assert tokens.mask.astype(int).tolist() == expected["assistant_masks"]
            assert tokens.terminated

    check()


def test_prefixes_and_generation_blocks_give_the_same_masks(tokenizer: Tokenizer) -> None:
    with_blocks, without = ChatTemplate(CHATML_GENERATION), ChatTemplate(PREFIX_TEMPLATES["chatml"])

    @SETTINGS
    @given(conversations(), st.sampled_from(["assistant", "last"]))
    def check(messages: list[dict[str, Any]], train_on: str) -> None:
        [blocks] = train(with_blocks, tokenizer, Chat(messages), train_on=train_on)
        [prefixes] = train(without, tokenizer, Chat(messages), train_on=train_on)
        assert np.array_equal(blocks.ids, prefixes.ids)
        assert np.array_equal(blocks.mask, prefixes.mask)
        assert blocks.turn_ends == prefixes.turn_ends

    check()


def test_generation_blocks_of_a_template_that_changes_earlier_turns(tokenizer: Tokenizer) -> None:
    ours, theirs = ChatTemplate(THINKING_GENERATION), hf_tokenizer(tokenizer, THINKING_GENERATION)
    messages = []
    for word in ("Hi", "日本", "don't"):
        answer = f"<think>{word}?</think>\n\n{word}!"
        messages += [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    [tokens] = train(ours, tokenizer, Chat(messages))
    assert tokens.ids.tolist() == expected["input_ids"]
    assert tokens.mask.astype(int).tolist() == expected["assistant_masks"]
    supervised = ["Hi!<|im_end|>日本!<|im_end|>", "<think>don't?</think>\n\ndon't!<|im_end|>"]
    assert tokenizer.decode(tokens.ids[tokens.mask]) == "".join(supervised)
    [tokens] = train(ours, tokenizer, Chat(messages), train_on="last")
    assert tokens.ids.tolist() == expected["input_ids"]
    assert tokenizer.decode(tokens.ids[tokens.mask]) == supervised[1]


def test_tool_calls_and_reasoning_render_as_in_transformers(tokenizer: Tokenizer) -> None:
    source = PREFIX_TEMPLATES["qwen-tools"]
    ours, theirs = ChatTemplate(source), hf_tokenizer(tokenizer, source)
    expected = theirs.apply_chat_template(TOOL_CHAT, tools=WEATHER, tokenize=False)
    assert ours.render(TOOL_CHAT, tools=WEATHER, add_generation_prompt=False) == expected
    [tokens] = train(ours, tokenizer, Chat(TOOL_CHAT, WEATHER))
    assert tokenizer.decode(tokens.ids) == expected
    supervised = tokenizer.decode(tokens.ids[tokens.mask])
    call = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call><|im_end|>'
    assert supervised in (f"{call}Sunny ☀️.<|im_end|>", f"{call[1:]}Sunny ☀️.<|im_end|>")

    thoughts = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m | tojson }}{% endfor %}"
    ours, theirs = ChatTemplate(thoughts), hf_tokenizer(tokenizer, thoughts)
    for field in ("reasoning_content", "thinking", "reasoning"):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", field: "Hm", "content": "Yes"}]
        assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_builtin_templates_render_as_in_transformers(name: str, tmp_path) -> None:
    template, tokenizer = apply_builtin_template(name, bpe())
    tokenizer.save(tmp_path)
    template.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tokenizer.vocab_size

    @SETTINGS
    @given(conversations())
    def check(messages: list[dict[str, Any]]) -> None:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert template.render(messages, add_generation_prompt=prompt) == expected
        [tokens] = train(template, tokenizer, Chat(messages))
        assert tokens.ids.tolist() == theirs.apply_chat_template(messages)["input_ids"]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        end = BUILTIN_TEMPLATES[name].end_of_turn
        supervised = tokenizer.decode(tokens.ids[tokens.mask])
        assert [part.strip() for part in supervised.split(end)] == [*(answer.strip() for answer in answers), ""]
        assert tokens.ids[tokens.mask][-1] == tokenizer.eot_id
        assert tokens.terminated

    check()
    if name == "chatml":
        expected = theirs.apply_chat_template(TOOL_CHAT, tools=WEATHER, tokenize=False)
        assert template.render(TOOL_CHAT, tools=WEATHER, add_generation_prompt=False) == expected
        assert '"arguments": {"city": "Zürich", "days": 2}}' in expected
