"""`finalize_model`: convert a checkpoint to a publishable directory, optionally quantized, with a model card."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whimbrel import __version__
from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_directory, format_bytes
from whimbrel.config import dump_toml
from whimbrel.model_io.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_INFO, adapter_vocab_size, base_reference
from whimbrel.model_io.hub import is_hub_id
from whimbrel.model_io.load import load_model, read_config
from whimbrel.model_io.locate import ModelLocation
from whimbrel.model_io.save import TOKENIZER_FILES, copy_model, copy_text_files, exportable_location
from whimbrel.model_io.weights import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    WEIGHTS,
    format_of,
    read_json,
    weight_recipe,
    write_json,
)
from whimbrel.models import GPT
from whimbrel.models.held_out_loss import perplexity
from whimbrel.models.lora import merge_lora
from whimbrel.precision import QuantizedWeight, dequantize_, finalize
from whimbrel.tokenization.chat_template import TEMPLATE_DIRECTORY, TEMPLATE_FILE

__all__ = [
    "MODEL_CARD",
    "PUBLISHED",
    "FinalizeResult",
    "HeldOutResult",
    "WeightsInfo",
    "finalize_adapter",
    "finalize_model",
]

MODEL_CARD, SUMMARY = "README.md", "finalize.json"
PUBLISHED = (
    MODEL_CARD, SUMMARY, CONFIG, GENERATION_CONFIG, WEIGHTS, INDEX, "model-*-of-*.safetensors", ADAPTER_CONFIG,
    ADAPTER_WEIGHTS, BASE_INFO, *TOKENIZER_FILES, TEMPLATE_FILE, f"{TEMPLATE_DIRECTORY}/*.jinja",
)  # fmt: skip
"""Files of a published model. Others, such as the optimizer state of a checkpoint, stay local."""


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """The mean loss of a model on held-out text."""

    loss: float
    num_tokens: int
    sequence_length: int
    """The text is evaluated in sequences of this length; later tokens of a sequence have more context."""
    dataset: str
    """Name of the evaluation text."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity(self.loss)


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """Format, size and held-out loss of the weights in a directory."""

    format: str
    """The dtype, and the quantization format if there is one."""
    num_bytes: int
    held_out: HeldOutResult | None

    def to_json(self) -> dict[str, Any]:
        """The entry in `finalize.json`."""
        held_out = self.held_out
        measured = None if held_out is None else {
            "loss": held_out.loss, "tokens": held_out.num_tokens, "length": held_out.sequence_length,
            "text": held_out.dataset,
        }  # fmt: skip
        return {"format": self.format, "bytes": self.num_bytes, "measured": measured}


@dataclass(frozen=True, slots=True)
class FinalizeResult:
    """Summary of what `finalize_model` wrote, also saved as `finalize.json`."""

    recipe: str | None
    """The quantization recipe; None if the model is unquantized."""
    num_parameters: int
    before: WeightsInfo
    after: WeightsInfo
    unquantized: tuple[str, ...]
    """Linear layers of a quantized model that are not quantized."""

    def to_json(self) -> dict[str, Any]:
        """The content of `finalize.json`."""
        return {
            "recipe": self.recipe,
            "parameters": self.num_parameters,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "left": self.unquantized,
        }


def finalize_model(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    recipe: str | None = None,
    embeddings: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    base: str | os.PathLike[str] | None = None,
    chat_template: str | None = None,
    generation: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    evaluate: Callable[[GPT], HeldOutResult] | None = None,
) -> FinalizeResult:
    """Write a publishable model directory from a run, checkpoint or model directory, atomically.

    An adapter is merged with its base model.

    Args:
        name: The model's name in the model card; default: the name of the directory.
        recipe: Quantize the linear layers, and with `embeddings` also the token embedding and the head.
        dtype: Convert the weights first.
        base: The base model of an adapter, if it has moved since training.
        generation: Fields to add to `generation_config.json`.
        settings: The config of the training run, for the model card.
        evaluate: Computes the held-out loss; called with the source model and with the result reloaded from disk.
    """
    quantization = None if recipe is None else weight_recipe("quantize", recipe, embeddings=embeddings)
    if embeddings and quantization is None:
        raise ConfigError("embeddings needs a recipe such as int8 (--quantize-embeddings needs --quantize)")
    location = exportable_location(source, base)
    stored_format = None if location.is_adapter else read_config(location.directory).weight_format
    if quantization is not None and stored_format not in (None, quantization.finalize):
        raise ConfigError(
            f"{location.directory} is already quantized as {stored_format.name}: quantize the original model, or "
            "dequantize it first with `whimbrel export`"
        )
    with atomic_directory(out) as directory:
        model = load_model(source, base=base, device=device, merge=False)
        before = _weights_info(location.num_bytes, model, evaluate)
        if location.is_adapter:
            merge_lora(model)
            dequantize_(model)
        if dtype is not None:
            model.to(dtype)
        if quantization is not None:
            finalize(model, quantization)
        copy_model(location, model, directory)
        _replace_text_files(directory, chat_template, generation)
        weight_format, num_parameters = format_of(model), model.num_parameters()
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        dense = tuple(name for name, linear in linears.items() if not isinstance(linear.weight, QuantizedWeight))
        unquantized = () if weight_format is None else dense
        del model, linears
        reloaded = load_model(directory, device=device)
        after = _weights_info(ModelLocation(directory).num_bytes, reloaded, evaluate)
        applied = None if weight_format is None else recipe or weight_format.name
        result = FinalizeResult(applied, num_parameters, before, after, unquantized)
        write_json(directory / SUMMARY, {"whimbrel": __version__, **result.to_json()})
        model_type = str(read_json(directory / CONFIG).get("model_type"))
        card = model_card(name or Path(out).name, model_type, result, settings)
        (directory / MODEL_CARD).write_text(card, encoding="utf-8")
    return result


def finalize_adapter(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    base: str | os.PathLike[str] | None = None,
    chat_template: str | None = None,
    generation: Mapping[str, Any] | None = None,
) -> ModelLocation:
    """Write the adapter of a run or checkpoint as a PEFT directory with tokenizer, chat template and model card.

    The directory appears atomically. `name` is for the model card; default: the name of the directory. Returns the
    location of the original adapter.
    """
    location = exportable_location(source, base)
    if location.base is None:
        raise ConfigError(f"expected a run or directory with adapters, got {source}")
    with atomic_directory(out) as directory:
        table = read_json(location.directory / ADAPTER_CONFIG)
        base_model = table.get("base_model_name_or_path")
        if base is not None or not base_model or Path(base_model).exists():  # otherwise, it is a Hub id
            base_model, revision = base_reference(location.base.directory)
            table |= {"base_model_name_or_path": base_model, "revision": revision}
        write_json(directory / ADAPTER_CONFIG, table)
        for file in (ADAPTER_WEIGHTS, BASE_INFO):
            if (location.directory / file).is_file():
                shutil.copyfile(location.directory / file, directory / file)
        base_vocab_size = read_config(location.root).config.vocab_size
        copy_text_files(location, directory, base_vocab_size)
        _replace_text_files(directory, chat_template, generation)
        needed = adapter_vocab_size(directory)
        resize = f"model.resize_token_embeddings({needed})  # for the special tokens added in training\n"
        resize = resize if needed > base_vocab_size else ""
        title = name or Path(out).name
        card = ADAPTER_CARD.format(name=title, path=shlex.quote(title), base=base_model, resize=resize)
        (directory / MODEL_CARD).write_text(card, encoding="utf-8")
    return location


def _replace_text_files(directory: Path, chat_template: str | None, generation: Mapping[str, Any] | None) -> None:
    if chat_template is not None:
        (directory / TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")
    if generation:
        file = directory / GENERATION_CONFIG
        write_json(file, (read_json(file) if file.is_file() else {}) | dict(generation))


ADAPTER_CARD = """---
library_name: peft
base_model: {base}
pipeline_tag: text-generation
tags:
- lora
- whimbrel
---

# {name}

A LoRA adapter of `{base}`.

## Usage

`whimbrel chat {path}`, or

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base}")
{resize}model = PeftModel.from_pretrained(model, "{name}")
```
"""


def _weights_info(num_bytes: int, model: GPT, evaluate: Callable[[GPT], HeldOutResult] | None) -> WeightsInfo:
    weight_format, dtype = format_of(model), str(model.token_embedding.weight.dtype).removeprefix("torch.")
    return WeightsInfo(
        dtype if weight_format is None else f"{weight_format.name}, {dtype}",
        num_bytes,
        None if evaluate is None else evaluate(model),
    )


FRONT_MATTER = """---
library_name: {library}{base}
pipeline_tag: text-generation
tags:
{tags}
---
"""


def model_card(title: str, model_type: str, result: FinalizeResult, settings: Mapping[str, Any] | None) -> str:
    """The `README.md` that the Hub displays; `settings` are the config of the training run.

    `title` is also the directory or Hub id in the usage examples.
    """
    quantized = result.recipe is not None
    needs_whimbrel = quantized or model_type == "whimbrel"
    library = "whimbrel" if needs_whimbrel else "transformers"
    tags = ["whimbrel", *([str(result.recipe)] if quantized else [])]
    source = (settings or {}).get("model", {}).get("path")
    base = f"\nbase_model: {source}" if source is not None and is_hub_id(source) else ""
    linears = f" Linear layers are quantized as `{result.recipe}`." if quantized else ""
    parts = [
        FRONT_MATTER.format(library=library, base=base, tags="\n".join(f"- {tag}" for tag in tags)),
        f"# {title}\n\nA causal language model of type `{model_type}` with {result.num_parameters:,} parameters."
        f"{linears} Written by whimbrel {__version__}.\n",
        f"## Weights\n\n{_weights_section(result)}\n",
        f"## Held-out loss\n\n{_loss_section(result)}\n",
        f"## Usage\n\n{_usage_section(title, needs_whimbrel=needs_whimbrel)}\n",
        "## License\n\nNot specified.\n",
    ]
    if settings:
        parts.insert(-1, f"## Training\n\n```toml\n{dump_toml(settings)}```\n")
    return "\n".join(parts)


def _weights_section(result: FinalizeResult) -> str:
    before, after = result.before, result.after
    rows = [
        "| | before | after |",
        "|---|---|---|",
        f"| format | {before.format} | {after.format} |",
        f"| size | {format_bytes(before.num_bytes)} | {format_bytes(after.num_bytes)} |",
        f"| bytes | {before.num_bytes:,} | {after.num_bytes:,} |",
    ]
    if result.unquantized:
        names = ", ".join(f"`{name}`" for name in result.unquantized)
        rows += ["", f"Not quantized, besides embeddings and norms: {names}."]
    return "\n".join(rows)


def _loss_section(result: FinalizeResult) -> str:
    before, after = result.before.held_out, result.after.held_out
    if before is None or after is None:
        return "Not measured."
    change = after.perplexity / before.perplexity - 1
    return "\n".join(
        [
            f"Mean over {before.num_tokens:,} tokens of {before.dataset}, in sequences of {before.sequence_length}.",
            "",
            "| | before | after | change |",
            "|---|---|---|---|",
            f"| loss | {before.loss:.4f} | {after.loss:.4f} | {after.loss - before.loss:+.4f} |",
            f"| perplexity | {before.perplexity:.3f} | {after.perplexity:.3f} | {change:+.2%} |",
        ]
    )


def _usage_section(name: str, *, needs_whimbrel: bool) -> str:
    register = "import whimbrel.hf  # registers the model with transformers\n" if needs_whimbrel else ""
    return (
        f'```python\nimport whimbrel\n\nmodel = whimbrel.load_model("{name}")\n```\n\n'
        f"or\n\n```python\n{register}from transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n```\n\n'
        f'or `whimbrel generate {shlex.quote(name)} "prompt"`.'
    )
