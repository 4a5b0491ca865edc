"""`finalize_model`: from a checkpoint to the directory that is published, quantised or not, with what it cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whimbrel import __version__
from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_directory
from whimbrel.model_io.card import model_card
from whimbrel.model_io.copies import write_copy
from whimbrel.model_io.directory import CONFIG, GENERATION, describe, load_model
from whimbrel.model_io.measure import Finalized, Measure, Weights
from whimbrel.model_io.quantized import format_of, weight_recipe
from whimbrel.model_io.sources import model_directory
from whimbrel.model_io.tables import read_table, write_table
from whimbrel.models import GPT
from whimbrel.precision import QuantizedWeight, finalize

__all__ = ["finalize_model"]

CARD, RECORD, CHAT_TEMPLATE = "README.md", "finalize.json", "chat_template.jinja"


def finalize_model(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: str | None = None,
    embeddings: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    chat_template: str | None = None,
    generation: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    measure: Measure | None = None,
) -> Finalized:
    """Write the model of a run, a checkpoint or a model directory as a directory to publish, whole or not at all.

    `recipe` quantises its linears, and with `embeddings` its embedding and head, after `dtype` has converted it.
    `generation` is added to its generation settings, and `settings`, of the run that trained it, to its model card.
    `measure` is asked for the loss of the model as it was and of the one that was written, as it is read back from its
    files.
    """
    chosen = None if recipe is None else weight_recipe("quantize", recipe, embeddings=embeddings)
    if embeddings and chosen is None:
        raise ConfigError("--quantize-embeddings uses the format of --quantize: set it too, such as --quantize int8")
    directory = model_directory(source)
    if directory.is_file():
        raise ConfigError(f"{directory} is a file: finalize takes a run, a checkpoint or a model directory")
    held = describe(directory).form
    if chosen is not None and held not in (None, chosen.finalize):
        raise ConfigError(
            f"{directory} holds {held.name} weights: quantise the plain model that they were made from, or what "
            "`whimbrel export` makes of them"
        )
    with atomic_directory(out) as folder:
        model = load_model(directory, device=device)
        before = _weights(directory, model, measure)
        if dtype is not None:
            model.to(dtype)
        if chosen is not None:
            finalize(model, chosen)
        write_copy(directory, model, folder)
        _write_manners(folder, chat_template, generation or {})
        form, parameters = format_of(model), model.num_parameters()
        left = () if form is None else _plain_linears(model)
        del model
        after = _weights(folder, load_model(folder, device=device), measure)
        result = Finalized(None if form is None else recipe or form.name, parameters, before, after, left)
        write_table(folder / RECORD, {"whimbrel": __version__, **asdict(result)})
        card = model_card(Path(out).name, str(read_table(folder / CONFIG).get("model_type")), result, settings)
        (folder / CARD).write_text(card, encoding="utf-8")
    return result


def _weights(directory: Path, model: GPT, measure: Measure | None) -> Weights:
    form, dtype = format_of(model), str(model.token_embedding.weight.dtype).removeprefix("torch.")
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return Weights(
        dtype if form is None else f"{form.name}, {dtype}", size, None if measure is None else measure(model)
    )


def _write_manners(folder: Path, chat_template: str | None, generation: Mapping[str, Any]) -> None:
    """How to talk with the model, and how it draws its words."""
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    if generation:
        held = read_table(folder / GENERATION) if (folder / GENERATION).is_file() else {}
        write_table(folder / GENERATION, held | dict(generation))


def _plain_linears(model: GPT) -> tuple[str, ...]:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return tuple(name for name, linear in linears.items() if not isinstance(linear.weight, QuantizedWeight))
