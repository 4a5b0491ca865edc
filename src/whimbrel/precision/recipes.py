"""One table of recipes, and three verbs that go by it: prepare a model for training, finalize it, load into it.

A recipe says what the linear layers of a model are while it is trained and what their weights are afterwards. Whatever
they are meanwhile, parameters keep their names and identity, and checkpoints hold them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from whimbrel.base.errors import PrecisionError
from whimbrel.config import not_one_of
from whimbrel.precision import ao
from whimbrel.precision.amp import PrecisionPlan
from whimbrel.precision.formats import FORMATS, WeightFormat
from whimbrel.precision.linears import HEAD, Choice, choose_linears
from whimbrel.precision.swap import materialise_, quantize_
from whimbrel.precision.weight import QuantizedWeight

__all__ = [
    "Needs",
    "RECIPES",
    "Recipe",
    "finalize",
    "find_recipe",
    "load_into",
    "prepare",
    "recipe_names",
    "with_embeddings",
]

logger = logging.getLogger(__name__)

Kind = Literal["amp", "compute", "qat", "ptq"]
ARGUMENTS: dict[Kind, str] = {
    "amp": "mixed_precision",
    "compute": "fp8_recipe",
    "qat": "qat_recipe",
    "ptq": "weights",
}
"""What a recipe of each kind is asked for by."""
Reader = Callable[[nn.Module], object]
"""Gives the parameters of a model their numbers, one tensor at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a machine must have for a recipe."""

    torchao: bool = False
    """The extra `lowbit`."""
    capability: tuple[int, int] | None = None
    """The least compute capability of a GPU."""
    instead: str = ""
    """What an older GPU can do."""
    products: tuple[torch.dtype, ...] = ()
    """What products may come out as on a GPU; empty: as anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What becomes of a model's linear layers: while it is trained, afterwards, and when weights are read into it."""

    name: str
    kind: Kind
    train: Literal["autocast", "float8", "fake-quantised", "trainable"] | None = None
    """How linears compute in training, or that their weights are stored in the format and moved by chance."""
    finalize: WeightFormat | None = None
    """The format of the weights afterwards; None: plain."""
    load: WeightFormat | None = None
    """The format that plain weights get as they are read; None: they stay plain."""
    skip: tuple[str, ...] = HEAD
    """Layers that are left out unless asked for, by the end of their name."""
    embeddings: bool = False
    """Whether the token embedding is quantised too, and a head that is tied to it."""
    needs: Needs = Needs()

    @property
    def label(self) -> str:
        """What was asked for, as messages call it."""
        return f"{ARGUMENTS[self.kind]} = {self.name}"


def _fp8(name: str, *products: torch.dtype) -> Recipe:
    needs = Needs(torchao=True, capability=(8, 9), instead="mixed_precision = bf16", products=products)
    return Recipe(name=name, kind="compute", train="float8", needs=needs)


def _qat(name: str, form: WeightFormat) -> Recipe:
    needs = Needs(torchao=True)
    return Recipe(name=name, kind="qat", train="fake-quantised", finalize=form, load=form, needs=needs)


def _ptq(form: WeightFormat, train: Literal["trainable"] | None = None) -> Recipe:
    needs = Needs(capability=(8, 9), instead="weights = int8") if form.codes == "fp8" else Needs()
    return Recipe(name=form.name, kind="ptq", train=train, finalize=form, load=form, needs=needs)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="bf16", kind="amp", train="autocast", skip=()),
        Recipe(name="fp16", kind="amp", train="autocast", skip=()),
        _fp8("tensorwise"),
        _fp8("rowwise", torch.bfloat16),
        _fp8("rowwise_with_gw_hp", torch.bfloat16),
        _qat("int8-dynamic-act-int4-weight", FORMATS["int8-dynamic-act-int4-weight"]),
        _qat("int4-weight-only", FORMATS["int4"]),
        _ptq(FORMATS["int8"], "trainable"),
        _ptq(FORMATS["int8-dynamic"]),
        _ptq(FORMATS["int4"]),
        _ptq(FORMATS["fp8"]),
    )
}
"""Every recipe by its name."""


def recipe_names(kind: Kind) -> tuple[str, ...]:
    """The recipes of a kind."""
    return tuple(recipe.name for recipe in RECIPES.values() if recipe.kind == kind)


def with_embeddings(recipe: str | Recipe) -> Recipe:
    """A recipe that quantises the token embedding and the head too."""
    recipe = find_recipe(recipe)
    if recipe.kind != "ptq":
        raise PrecisionError(
            f"{recipe.label} leaves embedding and head plain, as they were trained: leave the option out"
        )
    return replace(recipe, embeddings=True, skip=())


def find_recipe(name: str | Recipe) -> Recipe:
    """The recipe of this name."""
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        raise PrecisionError(not_one_of("recipe", name, RECIPES))
    return RECIPES[name]


def prepare(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    device: torch.device | str | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    alignment: int | None = None,
    skip: Iterable[str] | None = None,
) -> Choice:
    """Make linears what they are while the recipe trains; says which were taken and why others were not.

    `device` is where the model will be trained (None: where it is) and `precision` under which autocast. Under fp8,
    layers with a dimension that is no multiple of `alignment` (16) are left out. `skip` replaces the recipe's own.
    """
    recipe = find_recipe(recipe)
    if alignment is not None and recipe.kind != "compute":
        raise PrecisionError(f"alignment = {alignment} is for fp8 recipes, not for {recipe.label}: leave it out")
    place = torch.device(device) if device is not None else next(iter(model.parameters())).device
    if recipe.kind == "amp":
        PrecisionPlan("bf16" if recipe.name == "bf16" else "fp16", place)  # refuses a device that cannot
        return Choice({}, {})
    if recipe.train is None:
        raise PrecisionError(
            f"{recipe.label} is for a model that is trained already: finalize it, or train with one of "
            f"{', '.join(recipe_names('qat'))}"
        )
    _check_untouched(model, recipe)
    skip = recipe.skip if skip is None else skip
    form = recipe.finalize
    if recipe.needs.torchao:
        ao.require(recipe.label)
    if form is not None and recipe.train == "trainable":
        return quantize_(model, form, skip=skip, trainable=True)
    emulate = _emulates(recipe, place)
    alignment = alignment or ao.ALIGNMENT
    if form is None and place.type == "cuda":
        _check_products(model, recipe, precision, alignment)
    choice = choose_linears(model, recipe.label, lambda linear: _unfit(linear, form, alignment), skip=skip)
    if form is not None:
        _check_whole(choice, recipe)
    linears = choice.taken.values()
    made = ao.to_float8(linears, recipe.name, emulate=emulate) if form is None else ao.to_fake_quantized(linears, form)
    _put(model, made)
    return choice


def finalize(model: nn.Module, recipe: str | Recipe, *, skip: Iterable[str] | None = None) -> nn.Module:
    """Make the model what the recipe ends as: plain linears, or linears with quantised weights.

    One that was trained with fake-quantised linears has those quantised; a plain one, all but the recipe's `skip`.
    That given replaces either.
    """
    recipe = find_recipe(recipe)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    stand_ins = {name for name, linear in linears.items() if ao.is_stand_in(linear)}
    _put(model, {linears[name]: ao.plain_linear(linears[name]) for name in stand_ins})
    if recipe.finalize is None or _has(model, recipe.finalize):
        return model
    if skip is None:
        skip = () if stand_ins else recipe.skip
    _emulates(recipe, next(iter(model.parameters())).device)
    quantize_(model, recipe.finalize, skip=skip, only=stand_ins or None, embeddings=recipe.embeddings)
    return model


def load_into(
    model: nn.Module, reader: Reader, recipe: str | Recipe, *, device: torch.device | str = "cpu"
) -> nn.Module:
    """Fill a model that is on the meta device: no more than one weight of it is ever plain.

    The skeleton gets the recipe's format and memory on `device`, then `reader` copies numbers into its parameters,
    which quantise what they take.
    """
    recipe = find_recipe(recipe)
    if any(parameter.device.type != "meta" for parameter in model.parameters()):
        raise PrecisionError(
            f"{recipe.label} is loaded into a model without numbers of its own: build it under torch.device('meta')"
        )
    _emulates(recipe, torch.device(device))
    if recipe.load is not None:
        quantize_(model, recipe.load, skip=recipe.skip, embeddings=recipe.embeddings)
    materialise_(model, device)
    reader(model)
    return model


def _put(model: nn.Module, made: Mapping[nn.Linear, nn.Linear]) -> None:
    """Put each in the place of the other, or in all its places."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Linear) and module in made:
            model.set_submodule(name, made[module])


def _has(model: nn.Module, form: WeightFormat) -> bool:
    """Whether the weights have this format already, as trained ones have."""
    weights = (weight for weight in model.parameters() if isinstance(weight, QuantizedWeight))
    return any(weight.format == form.fitted(weight.format.shape_of(weight.codes)) for weight in weights)


def _check_untouched(model: nn.Module, recipe: Recipe) -> None:
    if isinstance(model, nn.Linear):
        raise PrecisionError(
            f"{recipe.label} exchanges layers inside of a model, and this is a bare layer: wrap it in one"
        )
    for name, module in model.named_modules():
        if ao.is_stand_in(module) or isinstance(getattr(module, "weight", None), QuantizedWeight):
            kind = type(module).__name__ if ao.is_stand_in(module) else "linear with quantised weights"
            raise PrecisionError(
                f"{recipe.label} is for a plain model, and {name} is a {kind} already: finalize the model first "
                "(whimbrel.precision.finalize), or give a plain one"
            )


def _emulates(recipe: Recipe, device: torch.device) -> bool:
    """Refuse a GPU that has no products of fp8; whether they are to be emulated, as on a CPU, is the answer."""
    needs = recipe.needs
    if needs.capability is None or device.type == "meta":
        return False
    if device.type == "cpu":
        _tell_of_emulation(recipe.label)
        return True
    if device.type != "cuda":
        raise PrecisionError(f"{recipe.label} does not run on {device.type}: use {needs.instead}")
    found = torch.cuda.get_device_capability(device)
    if found < needs.capability:
        raise PrecisionError(
            f"{recipe.label} needs a GPU of compute capability {'.'.join(map(str, needs.capability))}, and this one "
            f"has {'.'.join(map(str, found))}: use {needs.instead}"
        )
    return False


@functools.cache
def _tell_of_emulation(label: str) -> None:
    """Once in a program: a model may be prepared, quantised and loaded again in one."""
    logger.warning("%s is emulated on a CPU: the numbers are those of fp8, the speed is not", label)


def _check_products(model: nn.Module, recipe: Recipe, precision: str, alignment: int) -> None:
    """Refuse what products of fp8 on a GPU cannot take or give."""
    if alignment % ao.ALIGNMENT:
        raise PrecisionError(
            f"fp8_dim_alignment = {alignment}: products of fp8 on a GPU need multiples of {ao.ALIGNMENT}, so give one"
        )
    weights = next(iter(model.parameters())).dtype
    products = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, weights)
    if recipe.needs.products and products not in recipe.needs.products:
        raise PrecisionError(
            f"{recipe.label} gives bfloat16 on a GPU and products here are {str(products).removeprefix('torch.')}: use "
            "mixed_precision = bf16 (train.precision), or fp8_recipe = tensorwise"
        )


def _check_whole(choice: Choice, recipe: Recipe) -> None:
    """Refuse to round weights of 16 bits in training: what is found in those differs from what is stored afterwards."""
    for name, linear in choice.taken.items():
        if linear.weight.dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"{recipe.label} rounds weights of fp32, and those of {name} are of {linear.weight.dtype}: train fp32 "
                "weights under autocast (train.precision = bf16), or call model.float() first"
            )


def _unfit(linear: nn.Linear, form: WeightFormat | None, alignment: int) -> str | None:
    """Why a linear cannot be one of fp8, or of what becomes `form`."""
    shape = tuple(linear.weight.shape)
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, not a plain linear"
    if form is not None:
        return form.unfit(shape)
    if any(size % alignment for size in shape):
        return f"its shape {shape} is no multiple of fp8_dim_alignment = {alignment}"
    return None
