"""torchao, in the one file that imports it: when it is first needed, and without what it says meanwhile.

Its linears stand in for plain ones over the same parameters: names, identity and checkpoints stay as they were.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
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


def to_float8(linears: Iterable[nn.Linear], recipe: str, *, emulate: bool) -> dict[nn.Linear, nn.Linear]:
    """For each linear one that runs its products in fp8, or computes what those would give."""
    float8 = _torchao("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    plain = list(linears)
    made = float8.convert_to_float8_training(nn.ModuleList(plain), config=config)
    for stand_in, linear in zip(made, plain, strict=True):
        kind: Any = type(stand_in)
        stand_in.__class__ = _fitted(kind)
        stand_in.divides_tokens = (
            not emulate and config.cast_config_input_for_grad_weight.scaling_type.value != "disabled"
        )
        stand_in.train(linear.training)
    return dict(zip(plain, made, strict=True))


def to_fake_quantized(linears: Iterable[nn.Linear], form: WeightFormat) -> dict[nn.Linear, nn.Linear]:
    """For each linear one that computes with weights, and tokens, that are rounded as `form` will round them."""
    qat = _torchao("torchao.quantization.qat")
    whole = {"scale_precision": None}  # that of the numbers themselves
    tokens = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, **whole)
    made = {}
    for linear in linears:
        group = form.fitted(linear.weight.shape).group
        settings = {
            "activation_config": None if form.activations is None else tokens,
            "weight_config": qat.IntxFakeQuantizeConfig(_INT4, group_size=group, is_symmetric=True, **whole),
        }
        made[linear] = _instead(linear, partial(qat.FakeQuantizedLinear, **settings))
    return made


def is_stand_in(module: nn.Module) -> bool:
    """Whether this is a linear of torchao's; it need not be installed to say no."""
    return isinstance(module, nn.Linear) and any(cls.__module__.startswith("torchao.") for cls in type(module).mro())


def plain_linear(linear: nn.Linear) -> nn.Linear:
    """A plain linear over the same parameters."""
    return _instead(linear, nn.Linear)


def _instead(linear: nn.Linear, kind: Callable[..., nn.Linear]) -> nn.Linear:
    """Another kind of linear over the same parameters; no numbers are drawn for it."""
    made = kind(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
    made.weight, made.bias = linear.weight, linear.bias
    return made.train(linear.training)


@cache
def _fitted(cls: Any) -> Any:
    """A subclass that heeds autocast on a CPU too, works in inference mode, and names a batch that it cannot take.

    Tokens are the inner dimension of a weight's gradient, which on a GPU must divide where that is a product of fp8.
    """

    def forward(self: Any, x: Tensor) -> Any:
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # there torch hands its tensors operations that they do not know, instead of what those are made of
            with torch.inference_mode(mode=False), torch.no_grad():
                return cls.forward(self, x)
        if self.divides_tokens and torch.is_grad_enabled() and (tokens := x.numel() // x.shape[-1]) % ALIGNMENT:
            raise PrecisionError(
                f"a batch of {tokens} tokens is no multiple of {ALIGNMENT}, which the weight gradients of this "
                "fp8_recipe need on a GPU: choose other batches or lengths, or rowwise_with_gw_hp"
            )
        return cls.forward(self, x)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


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
