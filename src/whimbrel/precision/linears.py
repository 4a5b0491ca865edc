"""Which linear layers of a model a recipe takes, and why it leaves out the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import nn

from whimbrel.base.errors import PrecisionError

__all__ = ["Choice", "HEAD", "choose_linears", "token_embedding"]

HEAD = ("lm_head",)
"""What is left out unless it is asked for: the last layer, whose errors nothing evens out."""

COMPUTED = (
    "its weight is computed from other parameters (a parametrization, weight norm, spectral norm or pruning): remove "
    "that first"
)
"""Why a layer without a `weight` parameter is skipped: the computed weight would overwrite a replacement."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The linear layers that are taken, by name, and the reason for each that is not."""

    taken: dict[str, nn.Linear]
    left: dict[str, str]


def token_embedding(model: nn.Module) -> nn.Embedding:
    """The table that a model looks tokens up in; ours and those of transformers name it."""
    named = getattr(model, "get_input_embeddings", None)
    table = getattr(model, "token_embedding", None) if named is None else named()
    if not isinstance(table, nn.Embedding):
        raise PrecisionError(
            f"this {type(model).__name__} does not say which its token embedding is: give it get_input_embeddings()"
        )
    return table


def choose_linears(
    model: nn.Module,
    what: str,
    unfit: Callable[[nn.Linear], str | None],
    *,
    skip: Iterable[str] = HEAD,
    only: Collection[str] | None = None,
    tied: bool = False,
) -> Choice:
    """The linear layers for `what`, a recipe; says once which were left out. None at all is an error.

    Each is told with its reason; that some do not fit, which nobody asked for, is a warning.
    `skip` names layers by the end of their name; lm_head is also what a Hugging Face model calls its own. `only`
    names, in full, those that may be taken. One whose weight is an embedding's too is never taken; with `tied`, where
    the caller takes the embedding, it is not reported as left out.
    """
    named = getattr(model, "get_output_embeddings", None)
    head = None if named is None else named()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    ends = tuple(skip)
    taken, left, unfitting = {}, {}, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if "weight" not in module._parameters:
            left[name] = COMPUTED
            unfitting.append(name)
        elif tied and id(module.weight) in embeddings:
            continue  # it becomes what the embedding does
        elif id(module.weight) in embeddings:
            left[name] = "its weight is the embedding's too"
        elif any(name == end or name.endswith(f".{end}") for end in ends) or (module is head and HEAD[0] in ends):
            left[name] = "it is left out by its name"
        elif only is not None and name not in only:
            left[name] = "it was not trained for it"
        elif (reason := unfit(module)) is not None:
            left[name] = reason
            unfitting.append(name)
        else:
            taken[name] = module
    for name, reason in left.items():
        logger.info("%s leaves out %s: %s", what, name, reason)
    if not taken:
        found = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:3]) or "it has no linear layer"
        raise PrecisionError(f"{what} finds no linear layer in this {type(model).__name__} that it can take ({found})")
    if unfitting:
        first, count = unfitting[0], len(unfitting)
        logger.warning("%s leaves %d of %d linear layers plain, first %s: %s", what, count, count + len(taken), first,
                       left[first])  # fmt: skip
    return Choice(taken, left)
