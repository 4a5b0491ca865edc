"""Low-precision recipes: `prepare` a model for training, `finalize` it afterwards, or `load_into` a new one.

A recipe specifies how the linear layers of a model compute during training and how their weights are stored afterwards.
Parameters keep their names and identity throughout, so checkpoints do not depend on the recipe.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

from whimbrel.base.errors import PrecisionError
from whimbrel.config import not_one_of
from whimbrel.precision.formats import FORMATS, WeightFormat
from whimbrel.precision.numerics import MixedPrecision
from whimbrel.precision.quantize import DEFAULT_SKIP, LayerSelection, materialize_, quantize_, select_linears
from whimbrel.precision.torchao import (
    FP8_ALIGNMENT,
    is_torchao_linear,
    require_torchao,
    to_fake_quantized,
    to_float8,
    to_linear,
)
from whimbrel.precision.weight import QuantizedWeight

__all__ = [
    "RECIPES",
    "Recipe",
    "Requirements",
    "finalize",
    "find_recipe",
    "load_into",
    "prepare",
    "recipe_names",
    "with_embeddings",
]

logger = logging.getLogger(__name__)

Kind = Literal["amp", "fp8", "qat", "ptq"]
SETTING_BY_KIND: dict[Kind, str] = {
    "amp": "mixed_precision",
    "fp8": "fp8_recipe",
    "qat": "qat_recipe",
    "ptq": "quantize",
}
"""The setting that selects a recipe of each kind."""
MAX_SLOW_WIDTH = 1024
"""`tensorwise` was measured to be slower than bf16 at width 768, and faster at 4096."""
Reader = Callable[[nn.Module], object]
"""Loads the parameters of a model, one tensor at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Hardware and software requirements of a recipe."""

    torchao: bool = False
    """Whether torchao (the `lowbit` extra) must be installed."""
    capability: tuple[int, int] | None = None
    """Minimum compute capability of a GPU."""
    alternative: str = ""
    """The setting to suggest for an older GPU."""
    output_dtypes: tuple[torch.dtype, ...] = ()
    """Supported output dtypes of matmuls on a GPU; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How linear layers compute in training, and how their weights are stored after training and when loaded."""

    name: str
    kind: Kind
    train: Literal["autocast", "float8", "delayed", "fake-quantized", "trainable"] | None = None
    """`trainable`: weights are stored quantized and updated with stochastic rounding. `delayed`: the model has its own
    implementation (`TrainsInDelayedFp8`)."""
    finalize: WeightFormat | None = None
    """Weight format after training; None: unquantized."""
    load: WeightFormat | None = None
    """Weight format when loaded; None: unquantized."""
    skip: tuple[str, ...] = DEFAULT_SKIP
    """Suffixes of the names of layers to skip."""
    embeddings: bool = False
    """Whether to quantize the token embedding and an output layer tied to it."""
    requirements: Requirements = Requirements()

    @property
    def label(self) -> str:
        """The recipe as the user set it, for messages."""
        return f"{SETTING_BY_KIND[self.kind]} = {self.name}"


@runtime_checkable
class TrainsInDelayedFp8(Protocol):
    """A model that computes MLPs and head in fp8 itself, with delayed scaling."""

    def set_delayed_fp8(self, *, enabled: bool) -> None:
        """Raise PrecisionError if the model does not support it."""


def _fp8(name: str, *output_dtypes: torch.dtype) -> Recipe:
    requirements = Requirements(
        torchao=True, capability=(8, 9), alternative="mixed_precision = bf16", output_dtypes=output_dtypes
    )
    return Recipe(name=name, kind="fp8", train="float8", requirements=requirements)


def _qat(name: str, weight_format: WeightFormat) -> Recipe:
    requirements = Requirements(torchao=True)
    return Recipe(
        name=name,
        kind="qat",
        train="fake-quantized",
        finalize=weight_format,
        load=weight_format,
        requirements=requirements,
    )


def _ptq(weight_format: WeightFormat, train: Literal["trainable"] | None = None) -> Recipe:
    fp8 = weight_format.codes == "fp8"
    requirements = Requirements(capability=(8, 9), alternative="quantize = int8") if fp8 else Requirements()
    return Recipe(
        name=weight_format.name,
        kind="ptq",
        train=train,
        finalize=weight_format,
        load=weight_format,
        requirements=requirements,
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="bf16", kind="amp", train="autocast", skip=()),
        Recipe(name="fp16", kind="amp", train="autocast", skip=()),
        _fp8("tensorwise"),
        _fp8("rowwise", torch.bfloat16),
        _fp8("rowwise_with_gw_hp", torch.bfloat16),
        Recipe(
            name="delayed",
            kind="fp8",
            train="delayed",
            requirements=Requirements(capability=(8, 9), alternative="mixed_precision = bf16"),
        ),
        _qat("int8-dynamic-act-int4-weight", FORMATS["int8-dynamic-act-int4-weight"]),
        _qat("int4-weight-only", FORMATS["int4"]),
        _ptq(FORMATS["int8"], "trainable"),
        _ptq(FORMATS["int8-dynamic"]),
        _ptq(FORMATS["int4"]),
        _ptq(FORMATS["fp8"]),
    )
}
"""All recipes by name."""


def recipe_names(kind: Kind) -> tuple[str, ...]:
    """Names of the recipes of a kind."""
    return tuple(recipe.name for recipe in RECIPES.values() if recipe.kind == kind)


def with_embeddings(recipe: str | Recipe) -> Recipe:
    """A post-training recipe that also quantizes the token embedding and the output layer."""
    recipe = find_recipe(recipe)
    if recipe.kind != "ptq":
        raise PrecisionError(
            f"{recipe.label} does not quantize the embedding and the output layer, which were trained unquantized: "
            "omit quantize_embeddings"
        )
    return replace(recipe, embeddings=True, skip=())


def find_recipe(name: str | Recipe) -> Recipe:
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
    fp8_dim_alignment: int | None = None,
    skip: Iterable[str] | None = None,
) -> LayerSelection:
    """Convert linear layers for training; returns the selected layers, and why others were skipped.

    `device` is the training device (None: the model's), `precision` the autocast dtype. fp8 recipes skip layers
    with a dimension that is not a multiple of `fp8_dim_alignment` (16). `skip` overrides the recipe's.
    """
    recipe = find_recipe(recipe)
    if fp8_dim_alignment is not None and recipe.kind != "fp8":
        raise PrecisionError(f"fp8_dim_alignment = {fp8_dim_alignment} has no effect with {recipe.label}: remove it")
    target = torch.device(device) if device is not None else next(iter(model.parameters())).device
    if recipe.kind == "amp":
        MixedPrecision("bf16" if recipe.name == "bf16" else "fp16", target)  # raises if unsupported
        return LayerSelection({}, {})
    if recipe.train is None:
        raise PrecisionError(
            f"{recipe.label} quantizes a trained model: use finalize, or train with one of "
            f"{', '.join(recipe_names('qat'))}"
        )
    _check_unconverted(model, recipe)
    if recipe.train == "delayed":
        return _prepare_delayed(model, recipe, target, precision, fp8_dim_alignment)
    skip = recipe.skip if skip is None else skip
    weight_format = recipe.finalize
    if recipe.requirements.torchao:
        require_torchao(recipe.label)
    if weight_format is not None and recipe.train == "trainable":
        return quantize_(model, weight_format, skip=skip, trainable=True)
    _check_device(recipe, target)
    alignment = fp8_dim_alignment or FP8_ALIGNMENT
    if weight_format is None and target.type == "cuda":
        _check_fp8_on_gpu(model, recipe, precision, alignment)
    reason = functools.partial(_unsupported_reason, weight_format=weight_format, alignment=alignment)
    selection = select_linears(model, recipe.label, reason, skip=skip)
    if weight_format is not None:
        _check_fp32_weights(selection, recipe)
    linears = selection.selected.values()
    if weight_format is None and target.type == "cuda":
        _warn_if_narrow(selection, recipe)
    converted = (
        to_float8(linears, recipe.name, emulate=_is_emulated(recipe, target))
        if weight_format is None
        else to_fake_quantized(linears, weight_format)
    )
    _replace_linears(model, converted)
    return selection


def finalize(model: nn.Module, recipe: str | Recipe, *, skip: Iterable[str] | None = None) -> nn.Module:
    """Convert a trained model to its final form: standard linear layers, quantized if the recipe says so.

    After QAT, the layers that were fake-quantized are quantized; otherwise all layers except the recipe's `skip`. The
    argument `skip` overrides both.
    """
    recipe = find_recipe(recipe)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    trained = {name for name, linear in linears.items() if is_torchao_linear(linear)}
    _replace_linears(model, {linears[name]: to_linear(linears[name]) for name in trained})
    if isinstance(model, TrainsInDelayedFp8):
        model.set_delayed_fp8(enabled=False)
    if recipe.finalize is None or _is_quantized_as(model, recipe.finalize):
        return model
    if skip is None:
        skip = () if trained else recipe.skip
    _check_device(recipe, next(iter(model.parameters())).device)
    quantize_(model, recipe.finalize, skip=skip, only=trained or None, embeddings=recipe.embeddings)
    return model


def load_into(
    model: nn.Module, reader: Reader, recipe: str | Recipe, *, device: torch.device | str = "cpu"
) -> nn.Module:
    """Load weights into a model on the meta device, quantizing one tensor at a time.

    The model is converted to the recipe's weight format and allocated on `device`; `reader` then copies weights in,
    quantizing each.
    """
    recipe = find_recipe(recipe)
    if any(parameter.device.type != "meta" for parameter in model.parameters()):
        raise PrecisionError(
            f"{recipe.label}: expected a model on the meta device: build it under torch.device('meta')"
        )
    _check_device(recipe, torch.device(device))
    if recipe.load is not None:
        quantize_(model, recipe.load, skip=recipe.skip, embeddings=recipe.embeddings)
    materialize_(model, device)
    reader(model)
    return model


def _prepare_delayed(
    model: nn.Module, recipe: Recipe, device: torch.device, precision: str, alignment: int | None
) -> LayerSelection:
    """Let a model compute in fp8 itself, on a GPU; returns the linear layers that do."""
    if not isinstance(model, TrainsInDelayedFp8):
        raise PrecisionError(
            f"{recipe.label}: expected a GPT, got {type(model).__name__}: use fp8_recipe = tensorwise, or omit it"
        )
    if alignment not in (None, FP8_ALIGNMENT):
        raise PrecisionError(f"fp8_dim_alignment = {alignment} has no effect with {recipe.label}: remove it")
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "an AMD GPU" if device.type == "cuda" else device.type
        raise PrecisionError(
            f"{recipe.label} is not supported on {kind}, it needs an NVIDIA GPU: use {recipe.requirements.alternative}"
        )
    _check_device(recipe, device)
    if precision != "bf16":
        raise PrecisionError(
            f"{recipe.label}: expected bf16 autocast, got {precision}: use mixed_precision = bf16 (train.precision)"
        )
    model.set_delayed_fp8(enabled=True)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    selected = {name: linear for name, linear in linears.items() if ".mlp." in name or name == "lm_head"}
    skipped = dict.fromkeys(linears.keys() - selected.keys(), "projections of attention are computed in bf16")
    return LayerSelection(selected, skipped)


def _warn_if_narrow(selection: LayerSelection, recipe: Recipe) -> None:
    """Warn about layers that torchao's fp8 makes slower."""
    width = max(min(linear.weight.shape) for linear in selection.selected.values())
    if width <= MAX_SLOW_WIDTH:
        logger.warning(
            "%s: layers of width %d are probably slower than in bf16 (GPT-2 124M on an H200: 478k instead of 533k "
            "tokens/s): use mixed_precision = bf16, or for a GPT-2 fp8_recipe = delayed",
            recipe.label,
            width,
        )


def _replace_linears(model: nn.Module, converted: Mapping[nn.Linear, nn.Linear]) -> None:
    """Replace layers wherever they occur."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Linear) and module in converted:
            model.set_submodule(name, converted[module])


def _is_quantized_as(model: nn.Module, weight_format: WeightFormat) -> bool:
    """Whether weights are already in this format, as after training with `trainable` weights."""
    weights = (weight for weight in model.parameters() if isinstance(weight, QuantizedWeight))
    return any(weight.format == weight_format.fit_to(weight.format.weight_shape(weight.codes)) for weight in weights)


def _check_unconverted(model: nn.Module, recipe: Recipe) -> None:
    if isinstance(model, nn.Linear):
        raise PrecisionError(
            f"{recipe.label}: expected a model that contains linear layers, got a Linear: wrap it in a module"
        )
    for name, module in model.named_modules():
        if is_torchao_linear(module) or isinstance(getattr(module, "weight", None), QuantizedWeight):
            kind = type(module).__name__ if is_torchao_linear(module) else "Linear with quantized weights"
            raise PrecisionError(
                f"{recipe.label}: expected an unconverted model, but {name} is a {kind}: call "
                "whimbrel.precision.finalize first"
            )


def _is_emulated(recipe: Recipe, device: torch.device) -> bool:
    return recipe.requirements.capability is not None and device.type == "cpu"


def _check_device(recipe: Recipe, device: torch.device) -> None:
    """Raise for a device that does not support the recipe; warn if fp8 is emulated there."""
    minimum, alternative = recipe.requirements.capability, recipe.requirements.alternative
    if minimum is None or device.type == "meta":
        return
    if _is_emulated(recipe, device):
        _warn_about_emulation(recipe.label)
        return
    if device.type != "cuda":
        raise PrecisionError(f"{recipe.label} is not supported on {device.type}: use {alternative}")
    capability = torch.cuda.get_device_capability(device)
    if capability < minimum:
        raise PrecisionError(
            f"{recipe.label}: expected a GPU of compute capability {'.'.join(map(str, minimum))} or higher, got "
            f"{'.'.join(map(str, capability))}: use {alternative}"
        )


@functools.cache
def _warn_about_emulation(label: str) -> None:
    """Warn once per process."""
    logger.warning("%s is emulated on a CPU: same results as fp8, without its speed", label)


def _check_fp8_on_gpu(model: nn.Module, recipe: Recipe, precision: str, alignment: int) -> None:
    """Raise for alignments and dtypes that fp8 matmuls on a GPU do not support."""
    if alignment % FP8_ALIGNMENT:
        raise PrecisionError(
            f"fp8_dim_alignment: expected a multiple of {FP8_ALIGNMENT} for fp8 on a GPU, got {alignment}"
        )
    weights = next(iter(model.parameters())).dtype
    output = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, weights)
    if recipe.requirements.output_dtypes and output not in recipe.requirements.output_dtypes:
        raise PrecisionError(
            f"{recipe.label} on a GPU: expected bfloat16 outputs, got {str(output).removeprefix('torch.')}: use "
            "mixed_precision = bf16 (train.precision), or fp8_recipe = tensorwise"
        )


def _check_fp32_weights(selection: LayerSelection, recipe: Recipe) -> None:
    """Raise for 16-bit weights: scales computed from them in training differ from those stored afterwards."""
    for name, linear in selection.selected.items():
        if linear.weight.dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"{recipe.label}: expected fp32 weights, got {linear.weight.dtype} in {name}: train fp32 weights under "
                "autocast (train.precision = bf16), or call model.float() first"
            )


def _unsupported_reason(linear: nn.Linear, weight_format: WeightFormat | None, alignment: int) -> str | None:
    """Why a layer cannot be converted to `weight_format`, or without one to fp8."""
    shape = tuple(linear.weight.shape)
    if type(linear) is not nn.Linear:
        return f"expected nn.Linear, got the subclass {type(linear).__name__}"
    if weight_format is not None:
        return weight_format.unsupported_reason(shape)
    if any(size % alignment for size in shape):
        return f"expected dimensions in multiples of fp8_dim_alignment = {alignment}, got {shape}"
    return None
