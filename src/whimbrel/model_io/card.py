"""The model card: what a directory holds, how it came about, how good it is, how to open it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whimbrel import __version__
from whimbrel.base.progress import format_bytes
from whimbrel.config import dump_toml
from whimbrel.model_io.measure import Finalized

__all__ = ["model_card"]

FRONT = """---
library_name: {library}
pipeline_tag: text-generation
tags:
{tags}
---
"""


def model_card(title: str, model_type: str, result: Finalized, settings: Mapping[str, Any] | None) -> str:
    """`README.md`, in the form that model hubs read. `settings` are those of the run that trained it."""
    quantized = result.recipe is not None
    ours = quantized or model_type == "whimbrel"
    tags = ["whimbrel", *([str(result.recipe)] if quantized else [])]
    parts = [
        FRONT.format(library="whimbrel" if ours else "transformers", tags="\n".join(f"- {tag}" for tag in tags)),
        f"# {title}\n\n{_what(model_type, result)}\n",
        f"## Weights\n\n{_weights(result)}\n",
        f"## Loss on held-out text\n\n{_loss(result)}\n",
        f"## How to load it\n\n{_load(ours=ours)}\n",
        "## Licence\n\nNone is given here: that is for whoever publishes the model to say.\n",
    ]
    if settings:
        parts.insert(-1, f"## How it was trained\n\n```toml\n{dump_toml(settings)}```\n")
    return "\n".join(parts)


def _what(model_type: str, result: Finalized) -> str:
    quantized = f", its linear layers quantised as `{result.recipe}`" if result.recipe else ""
    return (
        f"A causal language model of the type `{model_type}` with {result.parameters:,} parameters{quantized}. "
        f"Written by whimbrel {__version__}."
    )


def _weights(result: Finalized) -> str:
    before, after = result.before, result.after
    rows = [
        "| | before | after |",
        "|---|---|---|",
        f"| format | {before.format} | {after.format} |",
        f"| bytes | {before.bytes:,} | {after.bytes:,} |",
        f"| that is | {format_bytes(before.bytes)} | {format_bytes(after.bytes)} |",
    ]
    if result.left:
        rows += ["", f"Plain, besides embeddings and norms: {', '.join(f'`{name}`' for name in result.left)}."]
    return "\n".join(rows)


def _loss(result: Finalized) -> str:
    before, after = result.before.measured, result.after.measured
    if before is None or after is None:
        return "Not measured."
    change = after.perplexity / before.perplexity - 1
    return "\n".join(
        [
            f"Mean over {before.tokens:,} tokens of {before.text}, in sequences of {before.length}.",
            "",
            "| | before | after | change |",
            "|---|---|---|---|",
            f"| loss | {before.loss:.4f} | {after.loss:.4f} | {after.loss - before.loss:+.4f} |",
            f"| perplexity | {before.perplexity:.3f} | {after.perplexity:.3f} | {change:+.2%} |",
        ]
    )


def _load(*, ours: bool) -> str:
    teach = "import whimbrel.hf  # teaches transformers this kind of model\n" if ours else ""
    return (
        "```python\nimport whimbrel\n\nmodel = whimbrel.load_model(PATH)\n```\n\n"
        f"or\n\n```python\n{teach}from transformers import AutoModelForCausalLM\n\n"
        "model = AutoModelForCausalLM.from_pretrained(PATH)\n```\n\n"
        'or `whimbrel generate PATH "text"`.'
    )
