"""Run the blocks of a GPT with hand-written forward and backward passes (`ops.fused_block`) where they apply.

They apply to training a GPT-2 in bf16 on a GPU, and replace compiled blocks there. With `fp8_recipe = delayed`, MLPs
and head run in fp8 (`ops.fused_block_fp8`, `ops.cross_entropy_fp8`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from whimbrel.base.errors import PrecisionError
from whimbrel.models.config import GPTConfig
from whimbrel.models.layers import MLP, Attention, Block, Mask, Norm
from whimbrel.ops import fused_block
from whimbrel.ops.fp8 import ALIGNMENT, E4M3, DelayedScaling, Fp8, cast_weights
from whimbrel.ops.fused_block_fp8 import MLP_CASTS, Fp8MLP, project_mlp_fp8

__all__ = [
    "can_fuse",
    "delayed_scaling",
    "fused_blocks",
    "head_cast",
    "is_unmodified",
    "unsupported_setting",
    "why_not_fused",
]

MAX_WIDTH = 1024
"""The norm kernels have a row in the registers of one program; they were not measured with wider rows."""


def can_fuse(config: GPTConfig, modules: Iterable[nn.Module], x: Tensor) -> bool:
    """Whether `fused_blocks` computes what these blocks and the final norm compute for the residual stream `x`."""
    return why_not_fused(config, modules, x) is None


def why_not_fused(config: GPTConfig, modules: Iterable[nn.Module], x: Tensor) -> str | None:
    """What `fused_blocks` expects, and what it would get instead; None if it applies."""
    if torch.compiler.is_compiling():
        return "expected blocks that are not part of a compiled graph, got train.compile_scope = model"
    # A simulated tensor, as in a memory prediction, is of another type. The kernels are for NVIDIA GPUs.
    if type(x) is not Tensor or not x.is_cuda or torch.version.hip is not None:
        return f"expected an NVIDIA GPU, got {x.device.type}"
    if x.dtype is not torch.bfloat16:
        return f"expected bf16 autocast (train.precision), got {str(x.dtype).removeprefix('torch.')}"
    if not x.requires_grad:
        return "expected trainable embeddings, got frozen ones"
    if (setting := unsupported_setting(config)) is not None:
        return f"expected the architecture of GPT-2, got {setting}"
    if not is_unmodified(modules):
        return "expected plain blocks, got hooks, adapters, recomputation, or quantized, sharded or frozen weights"
    return None


def delayed_scaling(config: GPTConfig) -> DelayedScaling:
    """The scales of the MLPs of all blocks and of the head; raises for an unsupported model."""
    setting = unsupported_setting(config)
    sizes = ("embd_size", "intermediate_size", "padded_vocab_size")
    unaligned = [f"{name} = {getattr(config, name)}" for name in sizes if getattr(config, name) % ALIGNMENT]
    if setting is not None or unaligned:
        expected = "the architecture of GPT-2" if setting is not None else f"sizes in multiples of {ALIGNMENT}"
        raise PrecisionError(
            f"fp8_recipe = delayed: expected {expected}, got {setting or unaligned[0]}: use fp8_recipe = "
            "tensorwise, or omit it"
        )
    return DelayedScaling([*MLP_CASTS * config.num_layers, E4M3])


def head_cast(config: GPTConfig) -> int:
    """The number of the input of the head in `delayed_scaling`."""
    return len(MLP_CASTS) * config.num_layers


def unsupported_setting(config: GPTConfig) -> str | None:
    """The setting of a config that `fused_blocks` does not support, if any."""
    supported = {
        "norm": ("layer",),
        "norm_affine": (True,),
        "position": ("learned",),
        "qk_norm": ("none",),
        "activation": ("gelu", "gelu_tanh"),
        "gated_mlp": (False,),
        "bias": ("all",),
        "embedding_skip": (False,),
        "value_embeddings": (0,),
        "dropout": (0.0,),
    }
    for name, values in supported.items():
        if getattr(config, name) not in values:
            return f"{name} = {getattr(config, name)}"
    if config.kv_heads != config.num_heads:
        return f"num_kv_heads = {config.kv_heads}"
    return f"embd_size = {config.embd_size}" if config.embd_size > MAX_WIDTH else None


def is_unmodified(modules: Iterable[nn.Module]) -> bool:
    """Whether blocks and norms have no hooks, adapters, recomputation, or quantized, sharded or frozen weights."""
    return not _has_any_global_hook() and all(
        type(part) in (Block, Norm, Attention, MLP, nn.Linear)
        and not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
        and "forward" not in part.__dict__
        and all(p is None or (type(p) is nn.Parameter and p.requires_grad) for p in part._parameters.values())
        for module in modules
        for part in module.modules()
    )


def fused_blocks(
    blocks: Sequence[Block], norm: Norm, x_BTC: Tensor, masks: Sequence[Mask], fp8: DelayedScaling | None = None
) -> Tensor:
    """The residual stream after all blocks and the final norm; with `fp8`, this is the start of a micro-batch."""
    x_BTC, y_BTC, y_bias = x_BTC.contiguous(), None, None
    mlps = [None] * len(blocks) if fp8 is None else _fp8_mlps(fp8, blocks, x_BTC)
    for block, mask, fp8_mlp in zip(blocks, masks, mlps, strict=True):
        attention, mlp = block.attn, block.mlp
        x_BTC, q, k, v = fused_block.add_norm_qkv(
            x_BTC,
            y_BTC,
            y_bias,
            _norm_linear(block.ln_1, attention.c_attn),
            num_heads=attention.num_heads,
            eps=block.ln_1.eps,
        )
        attended_BTC = attention.attend(q, k, v, mask).transpose(1, 2).flatten(2)
        project = fused_block.project_mlp if fp8_mlp is None else partial(project_mlp_fp8, fp8=fp8_mlp)
        x_BTC, y_BTC = project(
            x_BTC,
            attended_BTC,
            (attention.c_proj.weight, attention.c_proj.bias),
            _norm_linear(block.ln_2, mlp.c_fc),
            mlp.c_proj.weight,
            scale=block.attention_scale,
            eps=block.ln_2.eps,
            activation=mlp.activation,
        )
        y_bias = mlp.c_proj.bias
    assert y_BTC is not None
    assert y_bias is not None
    assert norm.weight is not None
    assert norm.bias is not None
    return fused_block.add_norm(x_BTC, y_BTC, y_bias, norm.weight, norm.bias, norm.eps)


def _fp8_mlps(fp8: DelayedScaling, blocks: Sequence[Block], x_BTC: Tensor) -> list[Fp8MLP]:
    """Start a micro-batch, and cast the weights of all MLPs."""
    tokens = x_BTC.shape[0] * x_BTC.shape[1]
    if tokens % ALIGNMENT:
        raise PrecisionError(
            f"fp8_recipe = delayed: expected a multiple of {ALIGNMENT} tokens per micro-batch, got {tokens}: change "
            "train.micro_batch or data.sequence_length"
        )
    fp8.advance(x_BTC.device)
    weights = cast_weights([linear.weight for block in blocks for linear in (block.mlp.c_fc, block.mlp.c_proj)])
    pairs: Iterable[tuple[tuple[Fp8, Fp8], tuple[Fp8, Fp8]]] = zip(weights[::2], weights[1::2], strict=True)
    return [Fp8MLP(fp8, layer * len(MLP_CASTS), up, down) for layer, (up, down) in enumerate(pairs)]


def _norm_linear(norm: Norm, linear: nn.Linear) -> fused_block.NormLinear:
    assert norm.weight is not None
    assert norm.bias is not None
    return fused_block.NormLinear(norm.weight, norm.bias, linear.weight, linear.bias)
