"""A reference for the engine: one request at a time, the complete sequence through the model for every token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from whimbrel.inference import Engine, Event, History, Request, SampleRNG, sample
from whimbrel.models import GPT, GPTConfig

SMALL = {"context_length": 48, "vocab_size": 40, "num_layers": 2, "embd_size": 32, "num_heads": 4, "init_std": 0.3}


def small_model(**settings: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, "tied_head": False, **settings}))


@torch.inference_mode()
def generate_alone(model: GPT, request: Request, number: int = 0) -> list[int | str]:
    """The tokens of one sample, followed by its finish reason."""
    tokens, rng = list(request.prompt_ids), SampleRNG(request.seed, number)
    output: list[int | str] = []
    for _ in range(min(request.max_new_tokens, model.config.context_length - len(tokens))):
        logits = model(torch.tensor([tokens])).logits[:, -1]
        key = 0 if request.sampling.greedy else rng.key()
        token = int(sample(logits, [request.sampling], [key], [History(tokens, len(request.prompt_ids))]))
        if token in request.stop_ids:
            return [*output, "stop"]
        tokens.append(token)
        output.append(token)
    return [*output, "length"]


def outputs(events: Iterable[Event]) -> dict[tuple[int, int], list[int | str]]:
    """The tokens of each (request, sample), followed by its finish reason."""
    found: dict[tuple[int, int], list[int | str]] = defaultdict(list)
    for event in events:
        found[event.request_id, event.sample] += [
            part for part in (event.token, event.finish_reason) if part is not None
        ]
    return dict(found)


def run(engine: Engine) -> list[Event]:
    """Step until the engine is idle; returns all events."""
    events = []
    while engine.busy:
        events += engine.step()
    return events
