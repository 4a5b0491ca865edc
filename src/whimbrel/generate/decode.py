"""Text token by token: read the prompt once, then one token at a time over the cache."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError
from whimbrel.cache import DynamicCache
from whimbrel.generate.sampling import Draws, Sampling, sample
from whimbrel.models import GPT, KVStore

_Context = contextlib.AbstractContextManager[object]

__all__ = ["decode_n", "decode_one", "generate", "prefill", "stream"]


def generate(
    model: GPT,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
) -> list[int]:
    """The tokens that follow a prompt; the prompt and the end-of-text token that stopped it are left out.

    Temperature 0 is greedy. The same seed gives the same tokens. Text may run past the model's context: it then goes on
    from the newest half of what it holds.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    return list(stream(model, prompt_ids, sampling, max_new_tokens=max_new_tokens, seed=seed, eos_id=eos_id))


def stream(
    model: GPT,
    prompt_ids: Sequence[int] | Tensor,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
) -> Iterator[int]:
    """`generate`, handing out each token as it is drawn. What is asked is checked at once, not at the first token."""
    ids = _checked_prompt(prompt_ids, model.config.vocab_size)
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens = {max_new_tokens} must be at least 1")
    sampling.check_vocabulary(model.config.vocab_size)
    stops = {eos_id} if isinstance(eos_id, int) else set(eos_id or ())
    return decode_n(model, ids, max_new_tokens, sampling, Draws(seed), stops)


def decode_n(
    model: GPT, ids: list[int], count: int, sampling: Sampling, draws: Draws, stops: Collection[int] = ()
) -> Iterator[int]:
    """Up to `count` tokens after `ids`, fewer where one of `stops` is drawn; `ids` grows by what is drawn."""
    context = model.config.context_length
    cache = DynamicCache()
    logits = prefill(model, ids[-context:], cache)
    for drawn in range(1, count + 1):
        token = int(sample(logits[None], [sampling], [draws.uniform()], [ids]))
        if token in stops:
            return
        ids.append(token)
        yield token
        if drawn == count:
            return
        if cache.get_seq_length() < context:
            logits = decode_one(model, token, cache)
        else:
            cache = DynamicCache()
            logits = prefill(model, ids[-max(1, context // 2) :], cache)


def prefill(model: GPT, ids: Sequence[int], cache: KVStore) -> Tensor:
    """Read `ids` into an empty cache; the logits of what comes next."""
    device = model.lm_head.weight.device
    with torch.inference_mode(), _eager():
        logits = model(torch.tensor([ids], device=device), cache=cache, logits_to_keep=1).logits
    next_V: Tensor = logits[0, -1]
    return next_V


def decode_one(model: GPT, token: int, cache: KVStore) -> Tensor:
    """Read one more token; the logits of what comes next."""
    return prefill(model, [token], cache)


def _eager() -> _Context:
    """Run compiled blocks as they are written: every new length would cost a model in training another compilation."""
    compiling = "torch._dynamo" in sys.modules
    return cast(_Context, torch.compiler.set_stance("force_eager")) if compiling else contextlib.nullcontext()


def _checked_prompt(prompt_ids: Sequence[int] | Tensor, vocab_size: int) -> list[int]:
    prompt = torch.as_tensor(prompt_ids, device="cpu")
    if prompt.dim() != 1 or prompt.numel() == 0 or prompt.is_floating_point():
        raise RequestError(f"prompt_ids of shape {tuple(prompt.shape)} must be a flat, non-empty list of token ids")
    ids: list[int] = prompt.tolist()
    strange = next((i for i in ids if not 0 <= i < vocab_size), None)
    if strange is not None:
        raise RequestError(f"token id {strange} is outside the model's vocabulary: ids run from 0 to {vocab_size - 1}")
    return ids
