"""Generated answers: how they end, truncated prompts, metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.evaluate import GENERATIVE_TASKS, GenerationOptions
from whimbrel.evaluate.generation import Answer, evaluate_answers, generate_answers, split_stops
from whimbrel.inference import generate

PROMPTS = ("To be", "or not", "That is the question")


def test_answers_are_greedy_and_cut_at_stop_strings(scorer):
    answers = generate_answers(scorer, PROMPTS, (), max_new_tokens=12, batch_size=2)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = generate(scorer.model, scorer.encode_prompt(prompt), max_new_tokens=12, temperature=0)
        assert (answer.text, answer.num_tokens) == (scorer.tokenizer.decode(ids), 12)
        assert (answer.finish_reason, answer.truncated) == ("length", False)
    stop = answers[0].text[3:5]
    [answer] = generate_answers(scorer, PROMPTS[:1], (stop,), max_new_tokens=12)
    assert (answer.text, answer.finish_reason) == (answers[0].text.split(stop)[0], "stop")


def test_stop_tokens_end_answers(scorer):
    """A model that generates a stop token ended the answer itself."""
    ids = generate(scorer.model, scorer.encode_prompt(PROMPTS[0]), max_new_tokens=12, temperature=0)
    ending = replace(scorer, eos_ids=frozenset({ids[4]}))
    [answer] = generate_answers(ending, PROMPTS[:1], (), max_new_tokens=12)
    first = ids.index(ids[4])
    assert (answer.text, answer.finish_reason) == (scorer.tokenizer.decode(ids[:first]), "eos")
    assert answer.num_tokens == first


def test_long_prompts_are_truncated_on_the_left(scorer):
    long = "To be or not to be " * 20
    ids = scorer.encode_prompt(long)
    [answer] = generate_answers(scorer, [long], (), max_new_tokens=10)
    expected = generate(scorer.model, ids[-54:], max_new_tokens=10, temperature=0)
    assert (answer.truncated, answer.text) == (True, scorer.tokenizer.decode(expected))
    with pytest.raises(
        ConfigError, match="max_new_tokens: expected less than the model's context of 64 tokens, got 64"
    ):
        generate_answers(scorer, [long], (), max_new_tokens=64)


def test_options_are_checked():
    with pytest.raises(ConfigError, match="max_new_tokens: expected at least 1, got 0"):
        GenerationOptions(max_new_tokens=0)
    with pytest.raises(ConfigError, match="stop: expected non-empty strings"):
        GenerationOptions(stop=["a", ""])


def test_special_tokens_are_stop_tokens(scorer):
    eot = scorer.tokenizer.eot_token
    assert split_stops(scorer.tokenizer, ["a", eot, "b"]) == (["a", "b"], frozenset({scorer.tokenizer.eot_id}))


def test_metrics_of_answers():
    task = GENERATIVE_TASKS["gsm8k"]
    items = [task.item({"question": "?", "answer": f"so\n#### {number:,}"}) for number in (1200, 7, 7, 5)]
    texts = ("= 1200.\n#### 1,200.", "the answer is 7", "#### 7 and 8", "none")
    reasons = ("eos", "eos", "stop", "length")
    answers = [Answer(text, reason, 3, truncated=False) for text, reason in zip(texts, reasons, strict=True)]
    metrics, samples = evaluate_answers(task, items, answers)
    assert {name: value for name, (value, _) in metrics.items()} == {
        "exact_match_strict": 0.5,
        "exact_match_flexible": 0.5,
        "ended": 0.5,
    }
    assert metrics["ended"].stderr == pytest.approx(3**-0.5 / 2)
    assert [sample["exact_match_strict"] for sample in samples] == [1, 0, 1, 0]
    assert [sample["exact_match_flexible"] for sample in samples] == [1, 1, 0, 0]
    assert samples[3]["extracted"] == {"exact_match_strict": "[invalid]", "exact_match_flexible": "[invalid]"}
    assert (samples[0]["answer"], samples[0]["output"]) == ("so\n#### 1,200", texts[0])
