"""Conversations: prompts, prefix reuse, dropped turns."""

from __future__ import annotations

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.models import add_noise

from whimbrel.base.errors import RequestError
from whimbrel.inference import LLM, Conversation, NgramDraft, SamplingParams, generate
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import ChatTemplate, Tokenizer

TEMPLATE = ChatTemplate(
    "{% for message in messages %}<turn>{{ message.role[0] }}:{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>a:{% endif %}"
)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(("<end>", "<turn>"))


@pytest.fixture(scope="module")
def model() -> GPT:
    """Generates letters only, one byte each, so that its answers are tokenized as they were generated."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(context_length=120, vocab_size=258, num_layers=2, embd_size=32, num_heads=2))
    return add_noise(model, 0.3)


@pytest.fixture
def letters_only(tokenizer) -> SamplingParams:
    letters = {tokenizer.encode(letter)[0] for letter in "abcdefgh"}
    return SamplingParams(temperature=0, logit_bias={token: -1e4 for token in range(258) if token not in letters})


def conversation(
    model: GPT, tokenizer: Tokenizer, sampling: SamplingParams = GREEDY, **options: object
) -> Conversation:
    return Conversation(LLM(model, tokenizer, block_size=1), TEMPLATE, sampling, **{"max_new_tokens": 12} | options)


def test_each_turn_prefills_only_new_tokens(model, tokenizer, letters_only, forward_sizes):
    chat = conversation(model, tokenizer, letters_only, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, words in enumerate(("Hello", "And you?", "Why?")):
        messages.append({"role": "user", "content": words})
        forward_sizes.clear()
        pieces, forgotten = chat.ask(words)
        answer = "".join(pieces)
        # All but the last token of the previous turn are cached.
        new = len(TEMPLATE.encode(tokenizer, messages)) if turn == 0 else 1 + 3 + len(words) + 3
        assert forward_sizes == [new, *[1] * 11]
        assert forgotten == 0
        expected = generate(
            model,
            TEMPLATE.encode(tokenizer, messages),
            max_new_tokens=12,
            temperature=0,
            logit_bias=letters_only.logit_bias,
        )
        assert answer == tokenizer.decode(expected)
        assert len(answer) == 12
        messages.append({"role": "assistant", "content": answer})
    assert chat.messages == messages[1:]


def test_a_draft_does_not_change_the_answers(model, tokenizer, letters_only):
    plain, guessed = conversation(model, tokenizer, letters_only), conversation(model, tokenizer, letters_only)
    for words in ("one one one", "two"):
        assert list(plain.ask(words).pieces) == list(guessed.ask(words, NgramDraft()).pieces)
    assert plain.messages == guessed.messages


def test_reset_forgets_all_messages(model, tokenizer):
    chat = conversation(model, tokenizer, system="x")
    first = "".join(chat.ask("Hello").pieces)
    chat.reset()
    assert chat.messages == []
    assert "".join(chat.ask("Hello").pieces) == first


def test_a_stopped_answer_stays_in_the_conversation(model, tokenizer, letters_only):
    chat = conversation(model, tokenizer, letters_only)
    pieces = chat.ask("Hello").pieces
    said = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[1] == {"role": "assistant", "content": said}
    whole = conversation(model, tokenizer, letters_only)
    whole.messages = list(chat.messages)
    assert "".join(chat.ask("More").pieces) == "".join(whole.ask("More").pieces)


def test_an_answer_stopped_before_its_first_token_is_empty(model, tokenizer, letters_only):
    alternating = (
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    chat = Conversation(LLM(model, tokenizer), ChatTemplate(alternating), letters_only, max_new_tokens=4)
    chat.ask("Hello").pieces.close()
    assert chat.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ""}]
    late = chat.ask("Well?").pieces
    assert len("".join(chat.ask("Hm.").pieces)) == 4  # before the previous one has started
    chat.reset()
    assert len("".join(late)) == 4
    assert chat.messages == []


def test_answers_end_at_stop_strings_and_eos(model, tokenizer, letters_only):
    text = "".join(conversation(model, tokenizer, letters_only).ask("Hello").pieces)
    stop = text[4:6]
    chat = conversation(model, tokenizer, letters_only, stop=[stop])
    assert "".join(chat.ask("Hello").pieces) == text[: text.index(stop)] == chat.messages[1]["content"]
    template = ChatTemplate(TEMPLATE.source, stop_strings=[stop])
    taught = Conversation(LLM(model, tokenizer), template, letters_only, max_new_tokens=12, stop=["never"])
    assert "".join(taught.ask("Hello").pieces) == text[: text.index(stop)]
    done = SamplingParams(temperature=0, logit_bias={tokenizer.eot_id: 1e4})
    assert "".join(conversation(model, tokenizer, done, stop_ids=None).ask("Hello").pieces) == ""
    ending = conversation(model, tokenizer, letters_only, stop_ids=tokenizer.encode(text[3]))
    assert "".join(ending.ask("Hello").pieces) == text[: text.index(text[3])]


def test_old_turns_are_dropped_until_half_the_context_is_free(model, tokenizer, letters_only, forward_sizes):
    chat = conversation(model, tokenizer, letters_only, system="S")
    forgot = []
    for turn in range(12):
        answer = chat.ask(f"message {turn:02}")
        forgot.append(answer.num_dropped)
        list(answer.pieces)
        assert chat.messages[0]["role"] == "user"
    # A turn has 28 tokens: four and a new one exceed the context of 120; one fits in half of it.
    assert forgot == [0, 0, 0, 0, 6, 0, 0, 6, 0, 0, 6, 0]
    assert chat.messages[-2]["content"] == "message 11"


def test_a_message_that_does_not_fit_is_rejected_and_forgotten(model, tokenizer):
    chat = conversation(model, tokenizer)
    list(chat.ask("Hello").pieces)
    before = list(chat.messages)
    with pytest.raises(RequestError, match="at most 108 tokens .*120.*, got 206"):
        chat.ask("x" * 200)
    assert chat.messages == before
    longest = conversation(model, tokenizer)
    assert len("".join(longest.ask("x" * 102).pieces)) > 0


def test_the_longest_system_prompt_leaves_space_for_a_message(model, tokenizer):
    assert len("".join(conversation(model, tokenizer, system="x" * 98).ask("?").pieces)) > 0


def test_a_seed_reproduces_a_conversation_and_turns_differ(model, tokenizer):
    def answers_with_seed(seed: int | None) -> list[str]:
        chat, answers = conversation(model, tokenizer, SamplingParams(temperature=2.0), seed=seed), []
        for _ in range(2):
            answers.append("".join(chat.ask("Hello").pieces))
            chat.reset()
        return answers

    assert answers_with_seed(1) == answers_with_seed(1) != answers_with_seed(2)
    assert answers_with_seed(1)[0] != answers_with_seed(1)[1]
    last = answers_with_seed(2**63 - 1)
    assert last[0] != last[1] == answers_with_seed(0)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected .* got 0"),
        ({"stop": [""]}, "non-empty strings"),
        ({"seed": -1}, "seed: expected .* got -1"),
        (
            {"system": "x" * 99},
            "system prompt .*at most 108 tokens .*, got 109",
        ),
        ({"system": "\ud800"}, "lone surrogate"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_first_turn(model, tokenizer, options, message):
    with pytest.raises(RequestError, match=message):
        conversation(model, tokenizer, **options)
