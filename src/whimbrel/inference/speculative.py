"""Speculative decoding: a draft proposes a few tokens, the model verifies them in one pass.

Proposals are accepted or rejected such that the output has exactly the distribution of the model; greedy output is
identical. The quality of the draft only determines the speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError
from whimbrel.inference.block_manager import BlockTable
from whimbrel.inference.model_runner import Chunk, ModelRunner
from whimbrel.inference.paged_cache import BlockPool
from whimbrel.inference.sampling import History, SampleRNG, SamplingParams, distribution, gumbel_max
from whimbrel.models import GPT

__all__ = ["Draft", "ModelDraft", "NgramDraft", "Proposal", "verify"]

BLOCK_SIZE = 16
"""Tokens per block of a draft model's KV cache."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for the model to verify."""

    tokens: list[int]
    probabilities: Tensor | None = None
    """(tokens, vocabulary): the distributions they were sampled from; None if they were not sampled."""


class Draft(Protocol):
    """Proposes tokens. The draft of a request is a template: every sequence gets its own from `new_sequence`."""

    def new_sequence(self) -> Draft:
        """A draft with the same settings for one sequence, which shares no state with other sequences."""

    def propose(self, history: History, count: int, sampling: SamplingParams, rng: SampleRNG) -> Proposal:
        """Propose at most `count` tokens after `history`, which extends the history of the previous call."""


class NgramDraft:
    """Proposes what followed the last n-gram when it occurred before (prompt lookup decoding)."""

    def __init__(self, max_ngram: int = 3) -> None:
        if max_ngram < 1:
            raise RequestError(f"max_ngram: expected at least 1, got {max_ngram}")
        self._max_ngram = max_ngram
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._indexed = 0

    def new_sequence(self) -> NgramDraft:
        """A draft that has not seen any tokens."""
        return NgramDraft(self._max_ngram)

    def propose(self, history: History, count: int, sampling: SamplingParams, rng: SampleRNG) -> Proposal:
        """The tokens after the last occurrence of the longest n-gram that occurred before."""
        ids = history.tokens
        for end in range(self._indexed, len(ids)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._next[tuple(ids[end - size : end])] = end
        self._indexed = len(ids)
        ngrams = (tuple(ids[-size:]) for size in range(min(self._max_ngram, len(ids)), 0, -1))
        index = next((self._next[ngram] for ngram in ngrams if ngram in self._next), len(ids))
        return Proposal(list(ids[index : index + count]))


class ModelDraft:
    """Proposes tokens sampled from a smaller model with the same vocabulary.

    The KV cache of the draft model is allocated at the first proposal. Tokens that were accepted are not processed
    again: only what follows the longest common prefix with the tokens processed before.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self._context_length = model.config.context_length
        self._processed: list[int] = []
        self._start = 0

    def new_sequence(self) -> ModelDraft:
        """A draft with the same model and its own KV cache."""
        return ModelDraft(self.model)

    @cached_property
    def _runner_and_table(self) -> tuple[ModelRunner, BlockTable]:
        weight, num_blocks = self.model.token_embedding.weight, -(-self._context_length // BLOCK_SIZE) + 1
        pool = BlockPool(self.model.config, num_blocks, BLOCK_SIZE, dtype=weight.dtype, device=weight.device)
        table = BlockTable(pool)
        table.reserve(self._context_length)
        return ModelRunner(self.model, pool), table

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def propose(self, history: History, count: int, sampling: SamplingParams, rng: SampleRNG) -> Proposal:
        """Tokens sampled from the draft model one after the other."""
        ids = history.tokens
        count = min(count, self._context_length - 1)
        if len(ids) - self._start + count - 1 > self._context_length:
            self._start = len(ids) - max(1, (self._context_length - count) // 2)
        tokens, probabilities = list(ids), list[Tensor]()
        for _ in range(count):
            logits_1V = self._next_logits(tokens[self._start :])
            probabilities.append(distribution(logits_1V, [sampling], [History(tokens, history.prompt_length)]))
            tokens.append(int(gumbel_max(probabilities[-1], [0 if sampling.greedy else rng.key()])))
        return Proposal(tokens[len(ids) :], torch.cat(probabilities)) if probabilities else Proposal([])

    def _next_logits(self, ids: list[int]) -> Tensor:
        """The logits (1, V) after `ids`."""
        runner, table = self._runner_and_table
        shared = min(_common_prefix_length(self._processed, ids), len(ids) - 1)
        del self._processed[shared:]
        table.num_tokens = shared
        new = ids[shared:]
        [logits_1V] = runner.prefill([Chunk(table, new)], [[len(new) - 1]])
        self._processed += new
        return logits_1V


def _common_prefix_length(first: list[int], second: list[int]) -> int:
    """Number of tokens that both lists start with."""
    if second[: len(first)] == first:
        return len(first)
    return next((index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))


def verify(
    logits_TV: Tensor, proposal: Proposal, history: History, sampling: SamplingParams, rng: SampleRNG
) -> list[int]:
    """The accepted tokens and one more: a replacement for the first rejected token, or a token after the last.

    `logits_TV` are the model's logits before each proposed token and after the last one. A token with probability q in
    the draft and p in the model is accepted with probability min(1, p / q); after a rejection the token is sampled
    from max(0, p - q), normalized. The result is distributed as p (Leviathan et al., 2022).
    """
    tokens = proposal.tokens
    histories = [History([*history.tokens, *tokens[:index]], history.prompt_length) for index in range(len(tokens) + 1)]
    target_TV = distribution(logits_TV, [sampling] * len(histories), histories)
    for index, token in enumerate(tokens):
        p_V, q_V = target_TV[index], _draft_distribution(proposal, index, target_TV[index])
        if rng.uniform() * q_V[token] >= p_V[token]:
            residual_V = (p_V - q_V).clamp(min=0)
            residual_V = residual_V / residual_V.sum() if residual_V.any() else p_V
            return [*tokens[:index], int(gumbel_max(residual_V[None], [rng.key()]))]
    return [*tokens, int(gumbel_max(target_TV[-1:], [rng.key()]))]


def _draft_distribution(proposal: Proposal, index: int, like_V: Tensor) -> Tensor:
    if proposal.probabilities is not None:
        return proposal.probabilities[index].to(like_V.device)
    return torch.zeros_like(like_V).index_fill(0, torch.tensor([proposal.tokens[index]], device=like_V.device), 1.0)
