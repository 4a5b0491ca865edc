"""Beam search: the likeliest texts, not the likeliest tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError
from whimbrel.cache import DynamicCache
from whimbrel.inference.decode import checked_prompt, checked_stops, decode_one, prefill
from whimbrel.inference.sampling import check_numbers
from whimbrel.models import GPT

__all__ = ["Beam", "beam_search"]

MOST_BEAMS = 1024
"""Texts that are searched side by side, at most."""


class Beam(NamedTuple):
    """A text that beam search found."""

    score: float
    """Its log-probability, divided by its length to the power of the length penalty."""
    tokens: list[int]
    """What follows the prompt; an end-of-text token counts in the score, and is left out."""


def beam_search(
    model: GPT,
    prompt_ids: Sequence[int] | Tensor,
    *,
    beams: int = 4,
    max_new_tokens: int = 256,
    length_penalty: float = 1.0,
    eos_id: int | Collection[int] | None = None,
    cache: str = "none",
) -> list[Beam]:
    """The best `beams` texts that follow a prompt, best first.

    At each step the `beams` likeliest unfinished texts go on. A length penalty above 0 favours longer texts: 1 compares
    them by their mean log-probability, 0 by its sum. The search ends when no text under way, were it to end now, would
    be among the best. It gives what `transformers` does by `num_beams` and `length_penalty`.
    """
    ids, stops = checked_prompt(model, prompt_ids), checked_stops(eos_id)
    if not 1 <= beams <= MOST_BEAMS:
        raise RequestError(f"beams = {beams} must be from 1 to {MOST_BEAMS}: each is a text of its own in memory")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens = {max_new_tokens} must be at least 1")
    context = model.config.context_length
    if len(ids) + max_new_tokens - 1 > context:
        raise RequestError(
            f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones: beam search stays within the model's "
            f"context of {context}, lower max_new_tokens"
        )
    store = DynamicCache(model.config, codec=cache)
    logits_BV = prefill(model, torch.tensor([ids]), store)
    running, finished = [Beam(0.0, [])], list[Beam]()
    for length in range(1, max_new_tokens + 1):
        found = _likeliest(logits_BV, running, beams * max(2, 1 + len(stops)))
        ends = [token in stops or length == max_new_tokens for _, _, token in found]
        for (total, row, token), end in list(zip(found, ends, strict=True))[:beams]:
            if end:
                tokens = running[row].tokens + ([] if token in stops else [token])
                finished.append(Beam(total / length**length_penalty, tokens))
        finished = sorted(finished, key=lambda beam: -beam.score)[:beams]
        going = [candidate for candidate, end in zip(found, ends, strict=True) if not end][:beams]
        best = going[0][0] / length**length_penalty if going else -torch.inf
        if not going or (len(finished) == beams and best <= finished[-1].score):
            break
        running = [Beam(total, [*running[row].tokens, token]) for total, row, token in going]
        store.reorder([row for _, row, _ in going])
        logits_BV = decode_one(model, torch.tensor([token for _, _, token in going]), store)
    return finished


def _likeliest(logits_BV: Tensor, running: Sequence[Beam], count: int) -> list[tuple[float, int, int]]:
    """The `count` likeliest ways to go on: log-probability of the text, row it goes on from, token."""
    check_numbers(logits_BV)
    so_far_B1 = torch.tensor([[beam.score] for beam in running], device=logits_BV.device)
    totals_BV = logits_BV.float().log_softmax(-1) + so_far_B1
    values, places = totals_BV.flatten().topk(min(count, totals_BV.numel()))
    vocab_size = logits_BV.size(1)
    return [
        (value, place // vocab_size, place % vocab_size)
        for value, place in zip(values.tolist(), places.tolist(), strict=True)
    ]
