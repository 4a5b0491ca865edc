"""Generative evaluation: greedy answers from the inference engine, compared with the correct ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from whimbrel.base.errors import ConfigError
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.evaluate.records import Item
from whimbrel.evaluate.scoring import Scorer
from whimbrel.evaluate.tasks import Estimate, GenerativeTask, mean
from whimbrel.inference import LLM, EngineConfig, Request, SamplingParams
from whimbrel.tokenization import Tokenizer

__all__ = ["Answer", "GenerationOptions", "evaluate_answers", "generate_answers", "split_stops"]

ENDED = "ended"
"""Metric: the share of answers that the model ended itself, with EOS or the end-of-turn token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How answers are generated; decoding is greedy."""

    max_new_tokens: int = 256
    stop: Sequence[str] | None = None
    """Stop strings that replace the task's."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if self.stop is not None and not all(self.stop):
            raise ConfigError("stop: expected non-empty strings, got an empty one")


class Answer(NamedTuple):
    """A generated answer."""

    text: str
    """Up to the stop string or stop token."""
    finish_reason: Literal["eos", "stop", "length"]
    """`eos` if the model ended it with a stop token, `stop` if a stop string did."""
    num_tokens: int
    truncated: bool
    """Whether the prompt was truncated on the left to leave space for the answer."""


def split_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[list[str], frozenset[int]]:
    """Stop strings, without those that are a special token, and the ids of the latter.

    Generated text does not contain special tokens, so `<|im_end|>` can only be found as a token.
    """
    special = {
        token.content: token_id
        for token_id, token in tokenizer.pipeline.get_added_tokens_decoder().items()
        if token.special
    }
    return [stop for stop in stops if stop not in special], frozenset(
        special[stop] for stop in stops if stop in special
    )


def generate_answers(
    scorer: Scorer,
    prompts: Sequence[str],
    stops: Sequence[str],
    *,
    max_new_tokens: int,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> list[Answer]:
    """Greedy continuations of prompts, up to a stop string, EOS, or `max_new_tokens`, as in lm-eval.

    A prompt that does not leave space for `max_new_tokens` in the model's context is truncated on the left. `progress`
    counts answers.
    """
    max_prompt = scorer.model.config.context_length - max_new_tokens
    if max_prompt < 1:
        raise ConfigError(
            f"max_new_tokens: expected less than the model's context of {scorer.model.config.context_length} tokens, "
            f"got {max_new_tokens}"
        )
    progress = progress or NoProgress()
    strings, ids = split_stops(scorer.tokenizer, stops)
    stop_ids = ids | scorer.eos_ids | {scorer.tokenizer.eot_id}
    encoded = [scorer.encode_prompt(prompt) for prompt in prompts]
    requests = [
        Request(
            prompt_ids=tuple(prompt[-max_prompt:]),
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(temperature=0.0),
            stop_ids=stop_ids,
        )
        for prompt in encoded
    ]
    # The KV cache is allocated for this many sequences of the full context.
    max_batch = min(batch_size or EngineConfig().max_batch, len(requests))
    llm = LLM(scorer.model, scorer.tokenizer, max_batch=max_batch)
    progress.start(len(requests), "answers")
    try:
        outputs = llm.complete(requests, [strings] * len(requests), progress=progress)
        progress.finish()
    finally:
        progress.close()
    answers = []
    for prompt, output in zip(encoded, outputs, strict=True):
        [completion] = output.outputs
        finish_reason: Literal["eos", "stop", "length"] = "length"
        if completion.finish_reason == "stop":
            finish_reason = "stop" if completion.hit_stop_string else "eos"
        answers.append(
            Answer(completion.text or "", finish_reason, len(completion.tokens), truncated=len(prompt) > max_prompt)
        )
    return answers


def evaluate_answers(
    task: GenerativeTask, items: Sequence[Item], answers: Sequence[Answer]
) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """The metrics of generated answers, and a record of each. `items` are those before formatting."""
    samples, values = [], {name: [0.0] * len(items) for name in (*task.filters, ENDED)}
    for index, (item, answer) in enumerate(zip(items, answers, strict=True)):
        _, reference = task.example(item)
        extracted = {name: extract(answer.text) for name, extract in task.filters.items()}
        for name, text in extracted.items():
            values[name][index] = float(task.normalize(text) == task.normalize(reference))
        values[ENDED][index] = float(answer.finish_reason == "eos")
        samples.append(
            {
                "answer": reference,
                "output": answer.text,
                "extracted": extracted,
                "finish_reason": answer.finish_reason,
                "tokens": answer.num_tokens,
                **{name: value[index] for name, value in values.items()},
            }
        )
    return {name: mean(value) for name, value in values.items()}, samples
