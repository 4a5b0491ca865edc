"""Beam search: the most likely sequences instead of the most likely tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError
from whimbrel.inference.block_manager import BlockTable
from whimbrel.inference.engine import Engine, EngineConfig
from whimbrel.inference.model_runner import Chunk
from whimbrel.inference.sampling import check_finite
from whimbrel.inference.sequence import as_token_ids, as_token_set
from whimbrel.models import GPT

__all__ = ["Beam", "beam_search"]

MAX_BEAMS = 1024


class Beam(NamedTuple):
    """A sequence found by beam search."""

    score: float
    """Log-probability of the sequence divided by length ** length_penalty."""
    tokens: list[int]
    """Tokens after the prompt. An end-of-text token contributes to the score but is not included."""


def beam_search(
    model: GPT | Engine,
    prompt_ids: Sequence[int] | Tensor,
    *,
    num_beams: int = 4,
    max_new_tokens: int = 256,
    length_penalty: float = 1.0,
    stop_ids: int | Collection[int] | None = None,
    kv_cache_dtype: str | None = None,
    adapter: str | None = None,
) -> list[Beam]:
    """The best `num_beams` continuations of a prompt, best first.

    Each step extends the `num_beams` most likely unfinished sequences. A length penalty above 0 favors longer
    sequences: 1 compares mean log-probabilities, 0 sums. The search ends when no unfinished sequence, if it ended now,
    would be among the best. Results match `num_beams` and `length_penalty` in transformers. Beams share the blocks of
    their common prefix (copy on write). An `Engine` is searched with its own block pool and decode step, and
    `kv_cache_dtype` must be None; `adapter` is one of its adapters.
    """
    engine = model if isinstance(model, Engine) else None
    config = model.config if isinstance(model, GPT) else model.model.config
    ids, stop_set = as_token_ids(prompt_ids, config.vocab_size), as_token_set(stop_ids)
    if not 1 <= num_beams <= MAX_BEAMS:
        raise RequestError(f"num_beams: expected 1 to {MAX_BEAMS}, got {num_beams}")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    length = len(ids) + max_new_tokens - 1  # the last token is never fed back to the model
    if length > config.context_length:
        raise RequestError(
            f"max_new_tokens: expected at most {max(0, config.context_length + 1 - len(ids))} after a prompt of "
            f"{len(ids)} tokens (beam search stays within the context), got {max_new_tokens}"
        )
    if isinstance(model, GPT):
        blocks = num_beams * (-(-length // EngineConfig().block_size) + 1) + 1
        engine = Engine(
            model,
            EngineConfig(
                max_batch=num_beams, num_blocks=blocks, kv_cache_dtype=kv_cache_dtype or "none", prefix_cache=False
            ),
        )
    elif kv_cache_dtype is not None:
        raise RequestError(f"kv_cache_dtype: expected None with an engine, which has its own, got {kv_cache_dtype!r}")
    assert engine is not None
    if num_beams > engine.config.max_batch:
        raise RequestError(f"num_beams: expected at most {engine.config.max_batch} (max_batch), got {num_beams}")
    tables = [BlockTable(engine.pool, engine.adapter_index(adapter))]
    try:
        return _search(engine, tables, ids, num_beams, max_new_tokens, length_penalty, stop_set)
    finally:
        for table in tables:
            table.release()


def _search(
    engine: Engine,
    tables: list[BlockTable],
    ids: list[int],
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float,
    stop_ids: frozenset[int],
) -> list[Beam]:
    """`tables` holds the block tables of the running beams at all times, so that the caller can release them."""
    tables[0].reserve(len(ids))
    [logits_BV] = engine.runner.prefill([Chunk(tables[0], ids)], [[len(ids) - 1]])
    tables[0].num_tokens = len(ids)
    running, finished = [Beam(0.0, [])], list[Beam]()
    for length in range(1, max_new_tokens + 1):
        # Enough candidates that `num_beams` of them continue even if every sequence could end in every stop token.
        candidates = _best_candidates(logits_BV, running, num_beams * max(2, 1 + len(stop_ids)))
        ends = [token in stop_ids or length == max_new_tokens for _, _, token in candidates]
        for (total, row, token), end in list(zip(candidates, ends, strict=True))[:num_beams]:
            if end:
                tokens = running[row].tokens + ([] if token in stop_ids else [token])
                finished.append(Beam(total / length**length_penalty, tokens))
        finished = sorted(finished, key=lambda beam: -beam.score)[:num_beams]
        kept = [candidate for candidate, end in zip(candidates, ends, strict=True) if not end][:num_beams]
        best = kept[0][0] / length**length_penalty if kept else -torch.inf
        if not kept or (len(finished) == num_beams and best <= finished[-1].score):
            break
        running = [Beam(total, [*running[row].tokens, token]) for total, row, token in kept]
        forks = [tables[row].fork() for _, row, _ in kept]
        for table in tables:
            table.release()
        tables[:] = forks
        for table in tables:
            table.reserve(1)
        logits_BV = engine.runner.decode(
            [Chunk(table, [beam.tokens[-1]]) for table, beam in zip(tables, running, strict=True)]
        )
        for table in tables:
            table.num_tokens += 1
    return finished


def _best_candidates(logits_BV: Tensor, running: Sequence[Beam], count: int) -> list[tuple[float, int, int]]:
    """The `count` most likely continuations: (log-probability of the sequence, row it continues, token)."""
    check_finite(logits_BV)
    scores_B1 = torch.tensor([[beam.score] for beam in running], device=logits_BV.device)
    totals_BV = logits_BV.float().log_softmax(-1) + scores_B1
    values, indices = totals_BV.flatten().topk(min(count, totals_BV.numel()))
    vocab_size = logits_BV.size(1)
    return [
        (value, index // vocab_size, index % vocab_size)
        for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]
