"""Adapter for torchao, imported only here and only when needed, with its warnings suppressed.

Its linear layers replace ours with the same parameters, so names, identity and checkpoints do not change.
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

__all__ = ["FP8_ALIGNMENT", "is_torchao_linear", "require_torchao", "to_fake_quantized", "to_float8", "to_linear"]

NOISY_LOGGERS = ("torchao", "torch.utils._pytree")
"""They log warnings on import: kernels for other machines, types registered twice."""
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
FP8_ALIGNMENT = 16
"""The inner dimension of an fp8 matmul on a GPU must be a multiple of this."""


def require_torchao(what: str) -> None:
    """Raise `MissingExtraError` for `what` if torchao is not installed."""
    try:
        _torchao("torchao")
    except ModuleNotFoundError as error:
        if error.name != "torchao":
            raise
        raise MissingExtraError(what, "torchao", "lowbit") from error


def to_float8(linears: Iterable[nn.Linear], recipe: str, *, emulate: bool) -> dict[nn.Linear, nn.Linear]:
    """Map each linear layer to one that computes in fp8 (emulated if `emulate`), with the same parameters."""
    float8 = _torchao("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    originals = list(linears)
    converted = float8.convert_to_float8_training(nn.ModuleList(originals), config=config)
    for layer, original in zip(converted, originals, strict=True):
        cls: Any = type(layer)
        layer.__class__ = _patched(cls)
        layer.needs_aligned_tokens = (
            not emulate and config.cast_config_input_for_grad_weight.scaling_type.value != "disabled"
        )
        layer.train(original.training)
    return dict(zip(originals, converted, strict=True))


def to_fake_quantized(linears: Iterable[nn.Linear], weight_format: WeightFormat) -> dict[nn.Linear, nn.Linear]:
    """Map each linear layer to one for QAT, which fake-quantizes weights and activations to `weight_format`."""
    qat = _torchao("torchao.quantization.qat")
    scales = {"scale_precision": None}  # None: the dtype of the values
    tokens = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, **scales)
    converted = {}
    for linear in linears:
        group_size = weight_format.fit_to(linear.weight.shape).group_size
        settings = {
            "activation_config": None if weight_format.activations is None else tokens,
            "weight_config": qat.IntxFakeQuantizeConfig(_INT4, group_size=group_size, is_symmetric=True, **scales),
        }
        converted[linear] = _replace(linear, partial(qat.FakeQuantizedLinear, **settings))
    return converted


def is_torchao_linear(module: nn.Module) -> bool:
    """Works without torchao installed."""
    return isinstance(module, nn.Linear) and any(cls.__module__.startswith("torchao.") for cls in type(module).mro())


def to_linear(linear: nn.Linear) -> nn.Linear:
    """An `nn.Linear` with the same parameters."""
    return _replace(linear, nn.Linear)


def _replace(linear: nn.Linear, cls: Callable[..., nn.Linear]) -> nn.Linear:
    """Convert to another linear class with the same parameters, without consuming random numbers."""
    layer = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
    layer.weight, layer.bias = linear.weight, linear.bias
    return layer.train(linear.training)


@cache
def _patched(cls: Any) -> Any:
    """A subclass that supports autocast on CPU and inference mode, and explains unsupported batch sizes.

    The number of tokens is the inner dimension of the weight gradient, so on a GPU it must be aligned if that is an fp8
    matmul.
    """

    def forward(self: Any, x: Tensor) -> Any:
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # torch does not decompose composite ops in inference mode, and torchao tensors lack them
            with torch.inference_mode(mode=False), torch.no_grad():
                return cls.forward(self, x)
        if self.needs_aligned_tokens and torch.is_grad_enabled() and (x.numel() // x.shape[-1]) % FP8_ALIGNMENT:
            raise PrecisionError(
                f"fp8_recipe: expected a multiple of {FP8_ALIGNMENT} tokens per batch on a GPU, got "
                f"{x.numel() // x.shape[-1]}: change the batch size or sequence length, or use rowwise_with_gw_hp"
            )
        return cls.forward(self, x)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _torchao(name: str) -> Any:
    with _quietly():
        return importlib.import_module(name)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress warnings and log messages."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
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
