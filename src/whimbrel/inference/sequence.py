"""Requests to the engine, the events it returns, and the state of a sequence in between."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError
from whimbrel.inference.block_manager import BlockManager, BlockTable
from whimbrel.inference.sampling import History, SampleRNG, SamplingParams

if TYPE_CHECKING:
    from whimbrel.inference.speculative import Draft, Proposal

__all__ = ["Event", "FinishReason", "Logprob", "Request", "Sequence", "as_token_ids", "as_token_set"]

FinishReason = Literal["stop", "length", "error"]


class Logprob(NamedTuple):
    """The log-probability of a token, and the most likely tokens at its position."""

    logprob: float | None
    """None for the first token of a prompt."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how to continue it."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    """Maximum number of new tokens; the context length limits it too. With 0 the prompt is only scored; its last token
    is then never fed to the model, so it may be one token longer than the context."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    """Random seed; None for a different one each time."""
    n: int = 1
    """Number of samples; they share the blocks of the prompt."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sample; they are not part of it."""
    logprobs: int | None = None
    """Return the log-probability of each new token, and of this many top tokens."""
    prompt_logprobs: int | None = None
    """Return the log-probability of each prompt token, and of this many top tokens."""
    prompt_logprobs_start: int = 0
    """First prompt token whose log-probability is computed; it is None for those before."""
    draft: Draft | None = None
    """Proposes tokens that the model verifies (speculative decoding); requires n = 1."""
    num_draft_tokens: int = 4
    """Maximum number of tokens proposed per step."""
    adapter: str | None = None
    """Name of the adapter to use; None for the base model."""
    context_shift: bool = False
    """Continue past the context: when it is full, keep the newest half of it and prefill that again. Otherwise the
    sequence ends there. Prompts longer than the context keep their newest tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        if not self.prompt_ids:
            raise RequestError("prompt_ids: expected at least one token, got an empty prompt")
        minimums = {"max_new_tokens": 0, "n": 1, "logprobs": 0, "prompt_logprobs": 0, "num_draft_tokens": 1}
        minimums |= {"prompt_logprobs_start": 0}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise RequestError(f"{name}: expected at least {minimum}, got {value}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise RequestError(f"seed: expected an integer from 0 to 2**63 - 1, got {self.seed}")
        if self.draft is not None and self.n > 1:
            raise RequestError(f"draft: expected n = 1 with speculative decoding, got n = {self.n}")


class Event(NamedTuple):
    """An update of one sample of a request: a new token, prompt log-probabilities, or its end."""

    request_id: int
    """The id returned by `add_request`."""
    sample: int
    """0 to n - 1."""
    token: int | None = None
    """The sampled token; None if the prompt was scored, or if a stop token ended the sample."""
    logprob: float | None = None
    """Log-probability of the token, if requested."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at its position, with their log-probabilities."""
    finish_reason: FinishReason | None = None
    """Set on the sample's last event: a stop token was sampled, the length limit was reached, or the logits were not
    finite (`error`)."""
    prompt: tuple[Logprob, ...] | None = None
    """Log-probabilities of the prompt's tokens, if requested: once per request, on its first sample, before the first
    token."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence in the engine: its tokens, and the block table of those whose keys and values are already stored.

    Tokens that are not stored yet are pending. Once the last one has been processed, the next token is sampled. So a
    new prompt, a prompt that is partly prefilled, a sequence that is decoding and one that was preempted only differ
    in how many tokens are pending.
    """

    request_id: int
    """In order of arrival."""
    request: Request
    block_table: BlockTable
    tokens: list[int]
    """The prompt and the sampled tokens; without the last token of a prompt that is only scored."""
    samples: list[int]
    """Samples of the request that this sequence represents: all of them until the prompt is prefilled, then one."""
    logprobs: list[Logprob]
    """Log-probabilities of the prompt's tokens computed so far."""
    rng: SampleRNG
    context_length: int
    max_length: int
    """Number of tokens at which the sequence is complete."""
    start: int
    """Index of the first token in the context; above 0 after a context shift."""
    draft: Draft | None = None
    """Proposes draft tokens for this sequence only."""
    proposal: Proposal | None = None
    """Draft tokens to verify in the next step."""
    has_wide_nucleus: bool = False
    """Whether `Sampler.draw` failed, so that tokens cannot be sampled ahead."""

    @classmethod
    def from_request(
        cls, request: Request, request_id: int, manager: BlockManager, context_length: int, adapter: int = 0
    ) -> Sequence:
        """A sequence with all tokens pending; `adapter` is the index of the request's adapter."""
        tokens = list(request.prompt_ids)
        if request.max_new_tokens == 0 and len(tokens) > 1:
            tokens.pop()
        max_length = len(tokens) + request.max_new_tokens
        return cls(
            request_id=request_id,
            request=request,
            block_table=BlockTable(manager, adapter),
            tokens=tokens,
            samples=list(range(request.n)),
            logprobs=[Logprob(None)] * max(1, min(request.prompt_logprobs_start, len(request.prompt_ids))),
            rng=SampleRNG(request.seed),
            context_length=context_length,
            max_length=max_length if request.context_shift else min(max_length, context_length),
            start=max(0, len(tokens) - context_length),
            draft=None if request.draft is None else request.draft.new_sequence(),
        )

    def split(self) -> list[Sequence]:
        """One sequence per sample, this one first: they share the blocks stored so far and have separate RNGs."""
        self.samples, others = self.samples[:1], self.samples[1:]
        return [self, *(self._fork(sample) for sample in others)]

    def remove_sample(self, sample: int) -> None:
        """Drop one of several samples, before any token is sampled; the RNG becomes the RNG of the first one left."""
        self.samples.remove(sample)
        self.rng = SampleRNG(self.request.seed, self.sample)

    def _fork(self, sample: int) -> Sequence:
        return Sequence(
            request_id=self.request_id,
            request=self.request,
            block_table=self.block_table.fork(),
            tokens=self.tokens[:],
            samples=[sample],
            logprobs=self.logprobs,
            rng=SampleRNG(self.request.seed, sample),
            context_length=self.context_length,
            max_length=self.max_length,
            start=self.start,
        )

    def append(self, token: int) -> None:
        """Add a sampled token; shift the context if it no longer fits."""
        self.tokens.append(token)
        if len(self.tokens) - self.start > self.context_length and not self.is_complete:
            self.block_table.release()
            self.start = len(self.tokens) - max(1, self.context_length // 2)

    def advance(self, count: int, *, cache: bool) -> None:
        """Record that `count` pending tokens were stored; `cache` adds full blocks to the prefix cache."""
        table = self.block_table
        table.advance(self.tokens, table.num_tokens + count, start=self.start, cache=cache)

    def next_tokens(self, count: int) -> list[int]:
        """The first `count` tokens of those pending and proposed."""
        first = self.start + self.block_table.num_tokens
        tokens = self.tokens[first : first + count]
        if len(tokens) < count and self.proposal is not None:
            tokens += self.proposal.tokens[: count - len(tokens)]
        return tokens

    @property
    def sample(self) -> int:
        return self.samples[0]

    @property
    def priority(self) -> tuple[int, int]:
        """Smaller for sequences that arrived earlier."""
        return self.request_id, self.sample

    @property
    def num_pending(self) -> int:
        """Tokens that are not stored yet."""
        return len(self.tokens) - self.start - self.block_table.num_tokens

    @property
    def num_proposed(self) -> int:
        """Draft tokens to verify in the next step."""
        return 0 if self.proposal is None else len(self.proposal.tokens)

    @property
    def num_sampled(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def history(self) -> History:
        """The tokens that penalties count."""
        return History(self.tokens, len(self.request.prompt_ids))

    @property
    def is_complete(self) -> bool:
        """Whether the sequence has reached its length limit."""
        return len(self.tokens) >= self.max_length

    @property
    def steps_left(self) -> int:
        """Steps until the length limit or the next context shift."""
        left = self.max_length - len(self.tokens)
        return min(left, self.context_length - (len(self.tokens) - self.start) + 1)

    @property
    def supports_multi_step(self) -> bool:
        """Whether several steps can run without the host: without penalties, bias, log-probabilities or a draft."""
        request, sampling = self.request, self.request.sampling
        if sampling.has_penalties or sampling.logit_bias or self.has_wide_nucleus:
            return False
        prompt_reported = request.prompt_logprobs is None or self.num_sampled > 0
        supported = request.logprobs is None and request.draft is None and len(self.samples) == 1
        return supported and prompt_reported and not self.is_complete

    @property
    def unscored(self) -> range:
        """Positions whose logits are still needed to score the prompt."""
        if self.request.prompt_logprobs is None:
            return range(0)
        return range(len(self.logprobs) - 1, len(self.request.prompt_ids) - 1)


def as_token_ids(prompt: abc.Sequence[int] | Tensor, vocab_size: int) -> list[int]:
    """A prompt as a list of ints; raises RequestError unless it is a non-empty 1-D list of valid token ids."""
    try:
        ids = torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"prompt_ids: expected a flat list of token ids, got {prompt!r:.60}") from error
    if ids.dim() != 1 or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise RequestError(
            f"prompt_ids: expected a flat, non-empty list of token ids, got shape {tuple(ids.shape)} of {ids.dtype}"
        )
    tokens: list[int] = ids.tolist()
    unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if unknown is not None:
        raise RequestError(f"prompt_ids: expected token ids from 0 to {vocab_size - 1}, got {unknown}")
    return tokens


def as_token_set(tokens: int | abc.Iterable[int] | None) -> frozenset[int]:
    """Normalize one token id, several or None to a set."""
    return frozenset([tokens] if isinstance(tokens, int) else tokens or ())
