"""What the verbs that open a model have in common: options, the model they name, how its tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from whimbrel.inference import Draft, SamplingParams
    from whimbrel.models import GPT
    from whimbrel.tokenization import Tokenizer

__all__ = [
    "Cache",
    "Device",
    "DraftModel",
    "MinP",
    "Model",
    "MostTokens",
    "Opened",
    "ParseSpecial",
    "RepetitionPenalty",
    "Seed",
    "Stops",
    "Temperature",
    "TokenizerPath",
    "TopK",
    "TopP",
    "Weights",
    "draft_maker",
    "open_model",
]

Model = Annotated[Path, typer.Argument(help="A run (its newest checkpoint), a model directory, or a llama2.c .bin.")]
MostTokens = Annotated[
    int | None, typer.Option(help="How many tokens to write at most. (default: the model's own, or 256)")
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Above 1 is wilder, below 1 tamer, 0 takes the likeliest. (default: the model's own, or 0.8)"),
]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0 turns it off.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")]
MinP = Annotated[float | None, typer.Option(help="Draw from tokens at least this part as likely as the likeliest.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1, tokens seen before become less likely. (default: the model's own, or 1)")
]
Stops = Annotated[list[str] | None, typer.Option(help="End the text before this string; may be given several times.")]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="Go faster by guessing ahead: a smaller model of the same tokens, or 'ngram' for the text itself."
    ),
]
Weights = Annotated[
    str | None, typer.Option(help="Quantise a plain model as it is read: int8, int8-dynamic, int4 or fp8.")
]
Cache = Annotated[str, typer.Option(help="How keys and values are stored: none (as they are), fp8, int8 or int4.")]
ParseSpecial = Annotated[
    bool,
    typer.Option(
        "--parse-special/--no-parse-special",
        help="Parse special tokens in the text, such as <|im_start|>, or treat them as plain text.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="The same seed writes the same text.")]
Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu; the fastest there is when not given.")]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="A tokenizer other than the model's own; a llama2.c .bin has none.")
]

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 256}
"""What holds where neither the command line nor the model says otherwise."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that was found, its words, and what its directory says of writing; the weights are not read yet."""

    source: Path
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    bos_id: int
    """The token that replaces an empty prompt."""
    settings: dict[str, Any]

    def load(self, device: str | None, weights: str | None) -> GPT:
        """The model itself."""
        from whimbrel.model_io import load_model
        from whimbrel.train.device import choose_device

        return load_model(self.source, device=choose_device(device), weights=weights)

    def drawing(self, **given: Any) -> tuple[SamplingParams, int]:
        """How tokens are drawn and how many at most: as given, else as the model says, else as is usual."""
        from whimbrel.inference import SamplingParams

        asked = DEFAULTS | self.settings | {name: value for name, value in given.items() if value is not None}
        most = asked.pop("max_new_tokens")
        return SamplingParams(**asked), most


def open_model(model: Path, tokenizer: Path | None) -> Opened:
    """Find a model and its tokenizer."""
    from whimbrel.model_io import (
        SpecialTokens,
        generation_settings,
        model_directory,
        model_tokenizer,
        special_tokens,
    )

    source = model_directory(model)
    words = model_tokenizer(source, tokenizer)
    special = special_tokens(source) if source.is_dir() else SpecialTokens()
    own = generation_settings(source) if source.is_dir() else {}
    return Opened(source, words, frozenset(special.eos_ids or (words.eot_id,)), special.opener(words), own)


def draft_maker(draft: str | None, device: str | None) -> Callable[[], Draft | None]:
    """What makes a draft for each text: none, one that looks into the text, or always the same smaller model."""
    from whimbrel.inference import ModelDraft, NgramDraft
    from whimbrel.model_io import load_model
    from whimbrel.train.device import choose_device

    if draft is None:
        return lambda: None
    if draft == "ngram":
        return NgramDraft
    smaller = ModelDraft(load_model(draft, device=choose_device(device)))
    return lambda: smaller
