"""Supervised tokens of conversations: which are masked, where turns end, and which templates are refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import (
    CHATML,
    CHATML_GENERATION,
    GENERATION_TEMPLATES,
    PREFIX_TEMPLATES,
    SPECIAL,
    THINKING,
    WEATHER,
)
from tokenizers.processors import TemplateProcessing

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.tokenization import (
    BUILTIN_TEMPLATES,
    DEFAULT_CHAT_TEMPLATE,
    Chat,
    ChatTemplate,
    Tokenizer,
    apply_builtin_template,
    load_chat_template,
    load_tokenizer,
    template_sandbox,
    train_tokenizer,
)

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(SPECIAL)


def supervised(template: ChatTemplate, tokenizer: Tokenizer, chat: Chat, train_on: str = "assistant") -> list[str]:
    """The text of each supervised part."""
    [tokens] = template.encode_for_training(tokenizer, [chat], train_on)
    if isinstance(tokens, RequestError):
        raise tokens
    parts = np.split(tokens.ids, np.flatnonzero(np.diff(tokens.mask)) + 1)
    return [tokenizer.decode(part) for part in parts[0 if tokens.mask[0] else 1 :: 2]]


@pytest.mark.parametrize("name", PREFIX_TEMPLATES)
def test_answers_are_supervised_with_the_token_that_ends_them(name: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(PREFIX_TEMPLATES[name], NAMES)
    end = {"llama-3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}.get(name, "<|im_end|>")
    space = " " if name == "mistral" else ""
    answers = [f"{space}Eins.{end}", f"{space}Zwei.{end}"]
    assert supervised(template, tokenizer, Chat(MESSAGES)) == answers
    assert supervised(template, tokenizer, Chat(MESSAGES), "last") == answers[1:]
    rendered = template.render(MESSAGES, add_generation_prompt=False)
    assert supervised(template, tokenizer, Chat(MESSAGES), "all") == [rendered]
    for train_on in ("assistant", "all"):
        [tokens] = template.encode_for_training(tokenizer, [Chat(MESSAGES)], train_on)
        assert tokens.terminated
        turns = [tokenizer.decode(tokens.ids[:turn_end]) for turn_end in tokens.turn_ends]
        assert [turn.endswith(answer) for turn, answer in zip(turns, answers, strict=True)] == [True, True]
        assert all(rendered.startswith(turn) for turn in turns)


@pytest.mark.parametrize("source", [CHATML, CHATML_GENERATION])
def test_only_chosen_messages_are_supervised(source: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(source)
    assert supervised(template, tokenizer, Chat(MESSAGES, supervised=(3,))) == ["Zwei.<|im_end|>"]
    assert supervised(template, tokenizer, Chat(MESSAGES, supervised=(1,))) == ["Eins.<|im_end|>"]
    assert supervised(template, tokenizer, Chat(MESSAGES, supervised=(1,)), "last") == ["Eins.<|im_end|>"]
    with pytest.raises(RequestError, match="expected an assistant turn"):
        supervised(template, tokenizer, Chat(MESSAGES, supervised=(0, 2)))


def test_special_tokens_in_messages_are_plain_text_and_do_not_end_a_turn(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": "a<|im_end|>\n"}]
    for source in (CHATML, CHATML_GENERATION):
        template = ChatTemplate(source)
        assert supervised(template, tokenizer, Chat(messages)) == ["a<|im_end|>\n<|im_end|>"]
        [tokens] = template.encode_for_training(tokenizer, [Chat(messages)])
        assert tokens.ids.tolist() == template.encode(tokenizer, messages, add_generation_prompt=False)
        assert list(tokens.ids).count(tokenizer.pipeline.token_to_id("<|im_end|>")) == 2


def test_templates_that_change_earlier_turns_need_train_on_last(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(THINKING)
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>Hm</think>\nEins."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>So</think>\nZwei."},
        {"role": "user", "content": "Three?"},
    ]
    with pytest.raises(RequestError, match='differently once later ones follow: set train_on = "last"'):
        supervised(template, tokenizer, Chat(messages))
    assert supervised(template, tokenizer, Chat(messages), "last") == ["<think>So</think>\nZwei.<|im_end|>"]
    [tokens] = template.encode_for_training(tokenizer, [Chat(messages)], "last")
    assert tokenizer.decode(tokens.ids) == template.render(messages[:4], add_generation_prompt=False)
    assert supervised(template, tokenizer, Chat(messages[:2])) == ["<think>Hm</think>\nEins.<|im_end|>"]


def test_a_generation_prompt_that_answers_do_not_start_with_is_refused(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(CHATML.replace("assistant\\n", "assistant\\n<think>\\n"))
    with pytest.raises(RequestError, match="differently from its generation prompt.*generation"):
        supervised(template, tokenizer, Chat(MESSAGES), "last")


def test_generation_blocks_may_be_in_macros_but_not_transformed(tokenizer: Tokenizer) -> None:
    block = "{% generation %}{{ m.content }}</s>{% endgeneration %}"
    macro = (
        "{% macro turn(m) %}<s>{{ m.role }}:{% if m.role == 'assistant' %}" + block + "{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    )
    assert supervised(ChatTemplate(macro), tokenizer, Chat(MESSAGES)) == ["Eins.</s>", "Zwei.</s>"]
    with pytest.raises(RequestError, match="transforms the output of a {% generation %} block"):
        supervised(ChatTemplate(macro.replace("turn(m) }}", "turn(m) | length }}")), tokenizer, Chat(MESSAGES))
    empty = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(RequestError, match="nothing to train on"):
        supervised(ChatTemplate(empty), tokenizer, Chat(MESSAGES))


def test_a_template_without_a_special_token_at_the_end_is_reported(tokenizer: Tokenizer) -> None:
    [tokens] = DEFAULT_CHAT_TEMPLATE.encode_for_training(tokenizer, [Chat(MESSAGES)])
    assert not tokens.terminated
    assert tokenizer.decode(tokens.ids[tokens.mask]) == " Eins.\n Zwei.\n"
    without_end = CHATML_GENERATION.replace(
        "message.content + '<|im_end|>' }}\n        {%- end", "message.content }}{% end"
    )
    [tokens] = ChatTemplate(without_end).encode_for_training(tokenizer, [Chat(MESSAGES)])
    assert tokenizer.decode(tokens.ids[tokens.mask]) == "Eins.Zwei."
    assert not tokens.terminated


def test_answers_that_start_within_a_token_are_reported() -> None:
    bpe = train_tokenizer(["Bot: Eins. Zwei."] * 9, 290, min_frequency=1).with_special_tokens(["</s>"])
    source = (
        "{% for m in messages %}{{ 'Bot: ' if m.role == 'assistant' }}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Bot: ' }}{% endif %}"
    )
    [tokens] = ChatTemplate(source).encode_for_training(bpe, [Chat(MESSAGES)])
    assert bpe.decode(tokens.ids[tokens.mask]) == " Eins.</s> Zwei.</s>"
    assert not tokens.aligned
    [tokens] = ChatTemplate(source.replace("Bot: ", "Bot:\\n")).encode_for_training(bpe, [Chat(MESSAGES)])
    assert bpe.decode(tokens.ids[tokens.mask]) == "Eins.</s>Zwei.</s>"
    assert tokens.aligned


def test_the_tokenizer_adds_bos_if_the_template_does_not(tokenizer: Tokenizer) -> None:
    opening = Tokenizer.from_json(tokenizer.to_json(), "</s>")
    bos = opening.pipeline.token_to_id("<s>")
    opening.pipeline.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    messages = [{"role": "user", "content": "<s>?"}, *MESSAGES[1:]]
    [tokens] = DEFAULT_CHAT_TEMPLATE.encode_for_training(opening, [Chat(messages)])
    assert tokens.ids.tolist() == DEFAULT_CHAT_TEMPLATE.encode(opening, messages, add_generation_prompt=False)
    assert tokens.ids.tolist().count(bos) == 1
    assert opening.decode(tokens.ids[tokens.mask]) == " Eins.\n Zwei.\n"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (Chat([{"role": "user", "content": "hi"}]), "expected an assistant turn"),
        (Chat([]), "at least one message"),
        (Chat([{"role": "assistant", "content": "hi"}]), "expected a message before the first assistant turn"),
        (Chat(MESSAGES, WEATHER), "does not support tools"),
        (Chat([*MESSAGES, {"role": "user", "content": "\ud800"}]), "lone surrogate"),
        (Chat([{"role": "user", "content": object()}, *MESSAGES[1:]]), "JSON values"),
        (Chat([{"role": "user"}, *MESSAGES[1:]]), "no attribute 'content'"),
    ],
)
def test_a_bad_conversation_does_not_affect_its_batch(chat: Chat, message: str, tokenizer: Tokenizer) -> None:
    good = Chat(MESSAGES)
    template = ChatTemplate(CHATML)
    first, bad, last = template.encode_for_training(tokenizer, [good, chat, good])
    assert isinstance(bad, RequestError)
    assert re.search(message, str(bad))
    assert np.array_equal(first.ids, last.ids)
    assert first.mask.any()


def test_batches_give_the_same_tokens_as_single_conversations(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    chats = [Chat([{"role": "user", "content": f"{n} <|im_end|>" * (n % 3)}, *MESSAGES[1:]]) for n in range(20)]
    for source in (*PREFIX_TEMPLATES.values(), *GENERATION_TEMPLATES.values()):
        template = ChatTemplate(source, NAMES)
        monkeypatch.setattr("whimbrel.tokenization.chat_template.BATCH_CHATS", 256)
        together = list(template.encode_for_training(tokenizer, iter(chats)))
        monkeypatch.setattr("whimbrel.tokenization.chat_template.BATCH_CHATS", 3)
        for one, other in zip(together, template.encode_for_training(tokenizer, iter(chats)), strict=True):
            assert np.array_equal(one.ids, other.ids)
            assert np.array_equal(one.mask, other.mask)


@pytest.mark.skipif(not template_sandbox.Path("/proc/self/statm").exists(), reason="limits are enforced on Linux only")
def test_limits_apply_to_each_rendering_of_a_batch(tokenizer: Tokenizer) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages[0].content == 'loop' %}" + loops + "{% endif %}" + CHATML)
    looping = Chat([{"role": "user", "content": "loop"}, *MESSAGES[1:]])
    first, bad, last = template.encode_for_training(tokenizer, [Chat(MESSAGES), looping, Chat(MESSAGES)])
    assert isinstance(bad, RequestError)
    assert "2 s of CPU time" in str(bad)
    assert np.array_equal(first.ids, last.ids)


def test_one_round_trip_per_batch(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    template, calls = ChatTemplate(CHATML), []
    exchange = template_sandbox.TemplateSandbox._exchange

    def counting(self: Any, message: bytes, count: int) -> Any:
        calls.append(count)
        return exchange(self, message, count)

    monkeypatch.setattr(template_sandbox.TemplateSandbox, "_exchange", counting)
    assert len(list(template.encode_for_training(tokenizer, [Chat(MESSAGES)] * 300))) == 300
    assert calls == [256, 44]


def test_tools_of_a_prompt_cannot_inject_special_tokens(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(PREFIX_TEMPLATES["qwen-tools"])
    ids = template.encode(tokenizer, MESSAGES[:1], tools=WEATHER)
    assert "“Zürich” <|im_end|>." in tokenizer.decode(ids)
    assert ids.count(tokenizer.pipeline.token_to_id("<|im_end|>")) == 2
    with pytest.raises(RequestError, match="does not support tools"):
        ChatTemplate(CHATML).encode(tokenizer, MESSAGES, tools=WEATHER)


# Built-in templates


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_a_builtin_template_extends_the_tokenizer_and_survives_saving(name: str, tmp_path) -> None:
    base = byte_tokenizer()
    template, tokenizer = apply_builtin_template(name, base)
    builtin = BUILTIN_TEMPLATES[name]
    assert tokenizer.eot_token == builtin.end_of_turn
    assert tokenizer.bos_token == base.eot_token
    assert tokenizer.vocab_size == base.vocab_size + len(builtin.special_tokens)
    ids = [tokenizer.pipeline.token_to_id(token) for token in builtin.special_tokens]
    assert ids == list(range(base.vocab_size, tokenizer.vocab_size))
    assert tokenizer.encode("plain <|im_end|></s>") == base.encode("plain <|im_end|></s>")
    assert base.vocab_size == 257

    tokenizer.save(tmp_path)
    template.save(tmp_path)
    loaded, loaded_template = load_tokenizer(tmp_path), load_chat_template(tmp_path)
    assert (loaded.fingerprint, loaded.bos_id) == (tokenizer.fingerprint, tokenizer.bos_id)
    ids = template.encode(tokenizer, MESSAGES)
    assert loaded_template.encode(loaded, MESSAGES) == ids
    assert tokenizer.eot_id in ids
    if name != "chatml":
        with pytest.raises(RequestError, match="does not support tools"):
            template.encode(tokenizer, MESSAGES, tools=WEATHER)
        with pytest.raises(RequestError, match="chatml"):
            template.render([*MESSAGES, {"role": "tool", "content": "3"}])


def test_adding_special_tokens_keeps_existing_ones() -> None:
    base = byte_tokenizer(["</s>", "<|im_end|>"])
    extended = base.with_special_tokens(["<|im_end|>", "<|x|>", "<|im_end|>"])
    assert extended.vocab_size == base.vocab_size + 1
    assert extended.pipeline.token_to_id("<|im_end|>") == base.pipeline.token_to_id("<|im_end|>")
    assert (extended.eot_token, extended.bos_token) == ("</s>", "</s>")
    assert base.with_special_tokens([]).fingerprint == base.fingerprint
    with pytest.raises(ConfigError, match="visible characters"):
        base.with_special_tokens([" "])
    with pytest.raises(ConfigError, match="unknown template 'x' .*chatml"):
        apply_builtin_template("x", base)


def test_spans_cover_the_text_of_each_token() -> None:
    tokenizer = byte_tokenizer(["</s>"])
    text = "a🐦 </s>"
    [literal] = tokenizer.encode_with_spans([text], parse_special=False)
    assert literal.ids.tolist() == tokenizer.encode(text)
    assert literal.spans.tolist() == [[0, 1], *[[1, 2]] * 4, *([i, i + 1] for i in range(2, 7))]
    [parsed] = tokenizer.encode_with_spans([text])
    assert parsed.spans.tolist()[-1] == [3, 7]
    assert [span[0] for span in parsed.spans.tolist()] == tokenizer.encode_prompt(text).offsets
