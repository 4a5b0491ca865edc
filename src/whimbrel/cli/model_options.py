"""Options shared by the commands that load a model, and the sampling parameters built from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from whimbrel.inference import Draft, SamplingParams
    from whimbrel.model_io import GenerationConfig

__all__ = [
    "Cache",
    "Compile",
    "Device",
    "DraftModel",
    "MaxNewTokens",
    "MinP",
    "Model",
    "ParseSpecial",
    "RepetitionPenalty",
    "Seed",
    "StopStrings",
    "Temperature",
    "TokenizerPath",
    "TopK",
    "TopP",
    "Weights",
    "draft_factory",
    "sampling_params",
]

Model = Annotated[Path, typer.Argument(help="A run (its newest checkpoint), a model directory, or a llama2.c .bin.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(help="Maximum number of tokens to generate. (default: the model's, or 256)")
]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 is greedy decoding. (default: the model's, or 0.8)")
]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0 disables it.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the most likely tokens with this total probability.")]
MinP = Annotated[
    float | None, typer.Option(help="Sample from tokens with at least this fraction of the highest probability.")
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Values above 1 penalize tokens that occurred before. (default: the model's, or 1)"),
]
StopStrings = Annotated[list[str] | None, typer.Option(help="Stop string: generation ends before it; can be repeated.")]
DraftModel = Annotated[
    str | None,
    typer.Option(help="Speculative decoding: a smaller model with the same tokenizer, or 'ngram' for prompt lookup."),
]
Weights = Annotated[
    str | None, typer.Option(help="Quantize an unquantized model while loading: int8, int8-dynamic, int4 or fp8.")
]
Cache = Annotated[str, typer.Option(help="KV cache dtype: none (the model's), fp8, int8 or int4.")]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile the decode step: slower startup (up to minutes), faster generation."),
]
ParseSpecial = Annotated[
    bool,
    typer.Option(
        "--parse-special/--no-parse-special",
        help="Parse special tokens in the text, such as <|im_start|>, or treat them as plain text.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed for sampling.")]
Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu. (default: the fastest available)")]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="Use this tokenizer instead of the model's; required for a llama2.c .bin.")
]

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 256}
"""Used if neither an option nor the model's generation_config.json sets them."""


def sampling_params(generation_config: GenerationConfig, **options: Any) -> tuple[SamplingParams, int]:
    """Return SamplingParams and max_new_tokens. Options that are None fall back to the model, then to DEFAULTS."""
    from whimbrel.inference import SamplingParams

    settings = DEFAULTS | dict(generation_config.sampling)
    if generation_config.max_new_tokens is not None:
        settings["max_new_tokens"] = generation_config.max_new_tokens
    settings |= {name: value for name, value in options.items() if value is not None}
    max_new_tokens = settings.pop("max_new_tokens")
    return SamplingParams(**settings), max_new_tokens


def draft_factory(draft: str | None, device: str | None) -> Callable[[], Draft | None]:
    """Return a function that creates the draft of a sequence: None, an n-gram lookup, or a model loaded once."""
    from whimbrel.inference import ModelDraft, NgramDraft
    from whimbrel.model_io import load_model
    from whimbrel.train.device import choose_device

    if draft is None:
        return lambda: None
    if draft == "ngram":
        return NgramDraft
    model_draft = ModelDraft(load_model(draft, device=choose_device(device)))
    return lambda: model_draft
