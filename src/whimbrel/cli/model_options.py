"""Options shared by the commands that load a model, and what is built from them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from whimbrel.inference import LLM, Draft, SamplingParams
    from whimbrel.model_io import GenerationConfig, ModelSource

__all__ = [
    "Base",
    "Compile",
    "Device",
    "GenerationOptions",
    "KVCacheDtype",
    "Model",
    "ParseSpecial",
    "Quantize",
    "TokenizerPath",
    "with_generation_options",
]

Model = Annotated[
    Path,
    typer.Argument(
        help="A run (its newest checkpoint), a model or adapter directory, owner/name on the Hugging Face Hub, or a "
        "llama2.c .bin."
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(help="Base model of an adapter, if it has moved since training."),
]
Quantize = Annotated[
    str | None, typer.Option(help="Quantize an unquantized model while loading: int8, int8-dynamic, int4 or fp8.")
]
KVCacheDtype = Annotated[str, typer.Option(help="KV cache dtype: none (the model's dtype), fp8, int8 or int4.")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the decode step: startup is slower (up to minutes), but generation is faster."
    ),
]
ParseSpecial = Annotated[
    bool,
    typer.Option(
        "--parse-special/--no-parse-special",
        help="Parse special tokens in the text, such as <|im_start|>, or treat them as plain text.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu. (default: the fastest available)")]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="Use this tokenizer instead of the model's; required for a llama2.c .bin.")
]

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 256}
"""Used if neither an option nor the model's generation_config.json sets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """The options of `generate` and `chat`. Sampling options that are None default to the model's."""

    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens to generate. (default: the model's, or 256)")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy decoding. (default: the model's, or 0.8)")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0 disables it.")] = None
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens with at least this fraction of the highest probability.")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Values above 1 penalize tokens that have already occurred. (default: the model's, or 1)"),
    ] = None
    stop: Annotated[list[str] | None, typer.Option(help="End generation before this string; can be repeated.")] = None
    draft: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding: a smaller model with the same tokenizer, or 'ngram' for prompt lookup."
        ),
    ] = None
    quantize: Quantize = None
    kv_cache_dtype: KVCacheDtype = "none"
    compile: Compile = False
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.")] = None
    device: Device = None
    tokenizer: TokenizerPath = None
    base: Base = None

    @property
    def sampling(self) -> dict[str, float | None]:
        """The sampling options by name."""
        return {name: getattr(self, name) for name in SAMPLING_OPTIONS}

    def sampling_params(self, generation_config: GenerationConfig) -> tuple[SamplingParams, int]:
        """SamplingParams and max_new_tokens. Options that are None fall back to the model, then to DEFAULTS."""
        from whimbrel.inference import SamplingParams

        options = self.sampling | {"max_new_tokens": self.max_new_tokens}
        settings = DEFAULTS | dict(generation_config.sampling)
        if generation_config.max_new_tokens is not None:
            settings["max_new_tokens"] = generation_config.max_new_tokens
        settings |= {name: value for name, value in options.items() if value is not None}
        max_new_tokens = settings.pop("max_new_tokens")
        return SamplingParams(**settings), max_new_tokens

    def load_llm(self, opened: ModelSource, max_batch: int) -> LLM:
        """Load the weights for generating `max_batch` sequences at once."""
        from whimbrel.inference import LLM
        from whimbrel.train.device import choose_device

        device = choose_device(self.device)
        return LLM(
            opened,
            device=device,
            quantize=self.quantize,
            kv_cache_dtype=self.kv_cache_dtype,
            compile=self.compile,
            max_batch=max_batch,
        )

    def load_draft(self) -> Draft | None:
        """The draft of `--draft`: an n-gram lookup, or a model."""
        from whimbrel.inference import ModelDraft, NgramDraft
        from whimbrel.model_io import load_model
        from whimbrel.train.device import choose_device

        if self.draft is None:
            return None
        if self.draft == "ngram":
            return NgramDraft()
        return ModelDraft(load_model(self.draft, device=choose_device(self.device)))


def with_generation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of `GenerationOptions` as options; it receives them as one argument, `options`."""
    shared = fields(GenerationOptions)

    @functools.wraps(command)
    def run(*arguments: Any, **values: Any) -> None:
        options = {field.name: values.pop(field.name) for field in shared if field.name in values}
        command(*arguments, **values, options=GenerationOptions(**options))

    signature = inspect.signature(command, eval_str=True)
    hints = get_type_hints(GenerationOptions, include_extras=True)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
    parameters += [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in shared
    ]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what Typer reads
    return run
