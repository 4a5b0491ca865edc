"""`whimbrel generate MODEL [PROMPT]`."""

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
    StopStrings,
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
    text: Annotated[
        str, typer.Argument(help="The prompt; without one, a new text is generated.", metavar="PROMPT")
    ] = "",
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: StopStrings = None,
    n: Annotated[int, typer.Option("--n", help="Number of completions.")] = 1,
    beams: Annotated[int | None, typer.Option(help="Use beam search with this many beams instead of sampling.")] = None,
    draft: DraftModel = None,
    parse_special: ParseSpecial = True,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue generating after the end-of-text token.")
    ] = False,
    weights: Weights = None,
    cache: Cache = "none",
    compile: Compile = False,  # noqa: A002
    seed: Seed = None,
    device: Device = None,
    tokenizer: TokenizerPath = None,
) -> None:
    """Continue a prompt, streaming the output.

    Sampling options default to the model's generation_config.json.
    """
    from whimbrel.inference import LLM, encode_prompt, stream_text
    from whimbrel.model_io import open_model
    from whimbrel.train.device import choose_device

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {"repetition_penalty": repetition_penalty}
    _check_combination(n, beams, draft, **options, seed=seed)
    opened = open_model(model, tokenizer)
    defaults = opened.generation_config
    prompt = encode_prompt(opened.tokenizer, text, parse_special=parse_special, bos_id=defaults.bos_token_id)
    sampling, limit = sampling_params(defaults, **options, max_new_tokens=max_new_tokens)
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
        best = llm.beam_search(prompt, beams=beams, max_new_tokens=limit, ignore_eos=ignore_eos)
        texts = [stream_text(opened.tokenizer, prompt, beam.tokens, stops) for beam in best[:n]]
    elif n > 1:
        [output] = llm.generate(
            [prompt], sampling, n=n, max_new_tokens=limit, seed=seed, stop=stops, ignore_eos=ignore_eos
        )
        texts = [[completion.text or ""] for completion in output.outputs]
    else:
        texts = [
            llm.stream(
                prompt, sampling, max_new_tokens=limit, seed=seed, stop=stops, ignore_eos=ignore_eos,
                draft=draft_factory(draft, device)(),
            )
        ]  # fmt: skip
    for index, pieces in enumerate(texts):
        print_text("\n" * bool(index) + text)
        for piece in pieces:
            print_text(piece)
        print()


def _check_combination(n: int, beams: int | None, draft: str | None, **sampling: float | None) -> None:
    if n < 1:
        raise ConfigError(f"expected --n of at least 1, got {n}")
    if n > 1 and draft is not None:
        raise ConfigError("--draft cannot be combined with --n: omit one of them")
    if beams is None:
        return
    conflicting = [name for name, value in {**sampling, "draft": draft}.items() if value is not None]
    if conflicting:
        option = conflicting[0].replace("_", "-")
        raise ConfigError(f"--{option} cannot be combined with --beams: omit one of them")
    if n > beams:
        raise ConfigError(f"expected --n of at most --beams {beams}, got {n}: use more beams")
