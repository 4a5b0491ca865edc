"""Run the blocks of a GPT with hand-written forward and backward passes (`ops.fused_block`) where they apply.

They apply to training a GPT-2 in bf16 on a GPU, and replace compiled blocks there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from whimbrel.models.config import GPTConfig
from whimbrel.models.layers import MLP, Attention, Block, Mask, Norm
from whimbrel.ops import fused_block

__all__ = ["can_fuse", "fused_blocks", "is_unmodified", "unsupported_setting"]

MAX_WIDTH = 1024
"""The norm kernels have a row in the registers of one program; they were not measured with wider rows."""


def can_fuse(config: GPTConfig, modules: Iterable[nn.Module], x: Tensor) -> bool:
    """Whether `fused_blocks` computes what these blocks and the final norm compute for the residual stream `x`."""
    # A simulated tensor, as in a memory prediction, is of another type. The kernels are for NVIDIA GPUs.
    applies = type(x) is Tensor and x.is_cuda and torch.version.hip is None and x.dtype is torch.bfloat16
    if not applies or not x.requires_grad or torch.compiler.is_compiling():
        return False
    return unsupported_setting(config) is None and is_unmodified(modules)


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
        "gated_attention": (False,),
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


def fused_blocks(blocks: Sequence[Block], norm: Norm, x_BTC: Tensor, masks: Sequence[Mask]) -> Tensor:
    """The residual stream after all blocks and the final norm."""
    x_BTC, y_BTC, y_bias = x_BTC.contiguous(), None, None
    for block, mask in zip(blocks, masks, strict=True):
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
        x_BTC, y_BTC = fused_block.project_mlp(
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


def _norm_linear(norm: Norm, linear: nn.Linear) -> fused_block.NormLinear:
    assert norm.weight is not None
    assert norm.bias is not None
    return fused_block.NormLinear(norm.weight, norm.bias, linear.weight, linear.bias)
