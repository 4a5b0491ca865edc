"""`generate` for one prompt, `generate_batch` for several, with samples, scores and stop strings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from whimbrel.base.errors import RequestError
from whimbrel.inference.decode import Text, checked_prompt, checked_stops, decode_n
from whimbrel.inference.detokenizer import TextStream
from whimbrel.inference.sampling import SampleRNG, SamplingParams
from whimbrel.inference.sequence import Logprob
from whimbrel.models import GPT
from whimbrel.tokenization import Tokenizer

__all__ = ["Completion", "generate", "generate_batch"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What followed a prompt."""

    tokens: list[int]
    """Neither the prompt nor the token that ended it is among them; those that spell a stop string are."""
    finish: Literal["stop", "length"]
    """`stop` where a stop token or string ended it."""
    text: str | None
    """Up to the stop string; None where no tokenizer was given."""
    scores: list[Logprob]
    """How likely each token was to the model itself, where `logprobs` were asked for."""


def generate(
    model: GPT,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
    stops: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    cache: str = "none",
) -> list[int]:
    """The tokens that follow a prompt; the prompt and the end-of-text token that stopped it are left out.

    Temperature 0 is greedy. The same seed gives the same tokens. `stops` are strings, found in the text that
    `tokenizer` makes of the tokens. Text may run past the model's context: it then goes on from the newest half of
    what it holds. `cache` is how keys and values are stored: as they are (none), or coded (fp8, int8, int4).
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
    )
    [[completion]] = generate_batch(
        model,
        [prompt_ids],
        sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        eos_id=eos_id,
        stops=stops,
        tokenizer=tokenizer,
        cache=cache,
    )
    return completion.tokens


def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int] | Tensor],
    sampling: SamplingParams | None = None,
    *,
    n: int = 1,
    max_new_tokens: int = 256,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
    stops: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    logprobs: int | None = None,
    cache: str = "none",
) -> list[list[Completion]]:
    """`n` samples of what follows each prompt, all drawn side by side; a prompt is read once for all of its samples.

    A prompt's completions are the same beside any others: the first is what `generate` gives for the same seed.
    `logprobs` scores every token, with that many of the likeliest beside it.
    """
    if n < 1:
        raise RequestError(f"n = {n} must be at least 1")
    if logprobs is not None and logprobs < 0:
        raise RequestError(f"logprobs = {logprobs} must be at least 0: leave it out for none")
    if stops and tokenizer is None:
        raise RequestError("stop strings are found in text: pass tokenizer too, or stop at tokens by eos_id")
    if not prompts:
        raise RequestError("no prompts: give at least one")
    sampling = sampling or SamplingParams()
    sampling.check_vocabulary(model.config.vocab_size)
    checked, stop_ids = [checked_prompt(model, prompt) for prompt in prompts], checked_stops(eos_id)
    texts = [
        Text(
            list(ids),
            sampling,
            SampleRNG(seed, number),
            stop_ids,
            words=None if tokenizer is None else TextStream(tokenizer, ids, stops),
        )
        for ids in checked
        for number in range(n)
    ]
    for _ in decode_n(model, texts, max_new_tokens, logprobs=logprobs, cache=cache):
        pass  # the texts take in what is drawn
    done = [_completion(text) for text in texts]
    return [done[start : start + n] for start in range(0, len(done), n)]


def _completion(text: Text) -> Completion:
    written = None if text.words is None else "".join(text.pieces) + text.words.flush()
    assert text.finish is not None
    return Completion(text.ids[text.prompt :], text.finish, written, text.scores)
