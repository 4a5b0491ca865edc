"""torchao, in the one file that imports it: when it is first needed, and without what it says meanwhile.

Its linears stand in for plain ones over the same parameters: names, identity and checkpoints stay as they were.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from whimbrel.base.errors import MissingExtraError, PrecisionError
from whimbrel.precision.formats import WeightFormat

__all__ = ["ALIGNMENT", "is_stand_in", "plain_linear", "require", "to_fake_quantized", "to_float8"]

TALKATIVE = ("torchao", "torch.utils._pytree")
"""Who logs while it is imported: of kernels that are not for this machine, and of types it need not register."""
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
ALIGNMENT = 16
"""What the inner dimension of an fp8 product on a GPU must divide by."""


def require(what: str) -> None:
    """Import it, or say that `what` needs it."""
    try:
        _torchao("torchao")
    except ModuleNotFoundError as error:
        if error.name != "torchao":
            raise
        raise MissingExtraError(what, "torchao", "lowbit") from error


def to_float8(model: nn.Module, names: Collection[str], recipe: str, *, emulate: bool) -> None:
    """Have the linears of these names run their products in fp8, or compute what those would give."""
    float8 = _torchao("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    modes = {name: model.get_submodule(name).training for name in names}
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)
    for name, training in modes.items():
        linear: Any = model.get_submodule(name)
        kind: Any = type(linear)
        linear.__class__ = _fitted(kind)
        linear.train(training)


def to_fake_quantized(model: nn.Module, names: Collection[str], form: WeightFormat) -> None:
    """Have the linears of these names compute with weights, and tokens, that are rounded as `form` will round them."""
    qat = _torchao("torchao.quantization.qat")
    whole = {"scale_precision": None}  # that of the numbers themselves
    tokens = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, **whole)
    weights = qat.IntxFakeQuantizeConfig(_INT4, group_size=form.group, is_symmetric=True, **whole)
    for name in names:
        linear: Any = model.get_submodule(name)
        stand_in = qat.FakeQuantizedLinear(
            linear.in_features, linear.out_features, linear.bias is not None,
            activation_config=None if form.activations is None else tokens, weight_config=weights,
            device="meta", dtype=linear.weight.dtype,
        )  # fmt: skip
        model.set_submodule(name, _with_parameters(stand_in, linear))


def is_stand_in(module: nn.Module) -> bool:
    """Whether this is a linear of torchao's; it need not be installed to say no."""
    return isinstance(module, nn.Linear) and any(cls.__module__.startswith("torchao.") for cls in type(module).mro())


def plain_linear(linear: nn.Linear) -> nn.Linear:
    """A plain linear over the same parameters."""
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
    return _with_parameters(plain, linear)


def _with_parameters(linear: nn.Linear, other: nn.Linear) -> nn.Linear:
    linear.weight, linear.bias = other.weight, other.bias
    return linear.train(other.training)


@cache
def _fitted(cls: Any) -> Any:
    """A subclass whose inputs fit: on a CPU it heeds autocast, on a GPU it names a batch that backward cannot take."""

    def forward(self: Any, x: Tensor) -> Any:
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        if x.device.type == "cuda" and torch.is_grad_enabled() and self.linear_mm_config.grad_weight.emulate is False:
            _check_tokens(self, x)
        return cls.forward(self, x)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _check_tokens(linear: Any, x: Tensor) -> None:
    """Tokens are the inner dimension of the weight's gradient, where that is a product of fp8."""
    tokens, scaling = x.numel() // x.shape[-1], linear.config.cast_config_input_for_grad_weight.scaling_type
    if tokens % ALIGNMENT and scaling.value != "disabled":
        raise PrecisionError(
            f"a batch of {tokens} tokens is no multiple of {ALIGNMENT}, which the weight gradients of this fp8_recipe "
            "need on a GPU: choose other batches or lengths, or rowwise_with_gw_hp"
        )


def _torchao(name: str) -> Any:
    """One of its modules."""
    with _quietly():
        return importlib.import_module(name)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Inside, nothing is warned about and those who would log do not; filters of warnings are as before afterwards."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
