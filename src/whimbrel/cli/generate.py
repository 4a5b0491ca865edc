"""`whimbrel generate MODEL "text"`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from whimbrel.base.errors import ConfigError
from whimbrel.cli.model_options import (
    Cache,
    Compile,
    Device,
    DraftModel,
    MaxNewTokens,
    MinP,
    Model,
    ParseSpecial,
    RepetitionPenalty,
    Seed,
    Stops,
    Temperature,
    TokenizerPath,
    TopK,
    TopP,
    Weights,
    draft_factory,
    sampling_params,
)
from whimbrel.cli.terminal import print_text

__all__ = ["generate"]


def generate(
    model: Model,
    text: Annotated[str, typer.Argument(help="What to go on from; nothing starts a new text.")] = "",
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stops = None,
    n: Annotated[int, typer.Option("--n", help="Write this many texts.")] = 1,
    beams: Annotated[
        int | None, typer.Option(help="Draw nothing, but search for the likeliest texts, this many side by side.")
    ] = None,
    draft: DraftModel = None,
    parse_special: ParseSpecial = True,
    past_end: Annotated[
        bool, typer.Option("--past-end", help="Do not stop at the end of a text: begin another.")
    ] = False,
    weights: Weights = None,
    cache: Cache = "none",
    compile: Compile = False,  # noqa: A002
    seed: Seed = None,
    device: Device = None,
    tokenizer: TokenizerPath = None,
) -> None:
    """Write on from a text, as it is drawn.

    What is not given is as the model's generation_config.json says, where that draws at all.
    """
    from whimbrel.inference import LLM, encode_prompt, stream_text
    from whimbrel.model_io import open_model
    from whimbrel.train.device import choose_device

    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn |= {"repetition_penalty": repetition_penalty}
    _check(n, beams, draft, **drawn, seed=seed)
    opened = open_model(model, tokenizer)
    defaults = opened.generation_config
    prompt = encode_prompt(opened.tokenizer, text, parse_special=parse_special, bos_id=defaults.bos_token_id)
    sampling, most = sampling_params(defaults, **drawn, max_new_tokens=max_new_tokens)
    llm = LLM(
        opened,
        device=choose_device(device),
        quantize=weights,
        cache=cache,
        compile=compile,
        max_batch=max(n, beams or 1),
    )
    stops = stop or ()
    texts: Iterable[Iterable[str]]
    if beams is not None:
        found = llm.beam_search(prompt, beams=beams, max_new_tokens=most, ignore_eos=past_end)
        texts = [stream_text(opened.tokenizer, prompt, beam.tokens, stops) for beam in found[:n]]
    elif n > 1:
        [output] = llm.generate(
            [prompt], sampling, n=n, max_new_tokens=most, seed=seed, stop=stops, ignore_eos=past_end
        )
        texts = [[completion.text or ""] for completion in output.outputs]
    else:
        texts = [
            llm.stream(
                prompt, sampling, max_new_tokens=most, seed=seed, stop=stops, ignore_eos=past_end,
                draft=draft_factory(draft, device)(),
            )
        ]  # fmt: skip
    for number, pieces in enumerate(texts):
        print_text("\n" * bool(number) + text)
        for piece in pieces:
            print_text(piece)
        print()


def _check(n: int, beams: int | None, draft: str | None, **drawn: float | None) -> None:
    """Refuse options that would mean nothing beside each other."""
    if n < 1:
        raise ConfigError(f"--n {n} must be at least 1")
    if n > 1 and draft is not None:
        raise ConfigError("--draft goes ahead of one text: leave it or --n out")
    if beams is None:
        return
    beside = [name for name, value in {**drawn, "draft": draft}.items() if value is not None]
    if beside:
        raise ConfigError(f"--beams searches and draws nothing: leave --{beside[0].replace('_', '-')} out")
    if n > beams:
        raise ConfigError(f"--n {n} texts of --beams {beams}: search with more beams, or write fewer texts")
