"""The decode step of one sequence on a GPU, with the kernels of `ops/decode_triton.py`.

Decoding a token reads every weight once, so a step should take as long as reading them. PyTorch takes longer: it
launches many small kernels, and dequantizes low-bit weights in kernels of their own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from whimbrel.inference.paged_cache import BlockPool
from whimbrel.models import GPT
from whimbrel.models.gpt import embed
from whimbrel.models.layers import MLP, Attention, Block, Norm, rope_frequencies
from whimbrel.precision import QuantizedWeight

__all__ = ["CudaDecoder", "unsupported_reason"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODULES = (GPT, nn.Embedding, nn.Linear, Block, Attention, MLP, Norm)


class CudaDecoder:
    """Runs the decode step of one sequence. It reads parameters where they are, so changes in place are seen."""

    def __init__(self, model: GPT, pool: BlockPool) -> None:
        from whimbrel.ops import decode_triton  # needs triton

        self._ops: Any = decode_triton
        self._model, self._pool = model, pool
        config, device = model.config, pool.device

        def allocate(size: int, dtype: torch.dtype = pool.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._qkv = allocate((config.num_heads + 2 * config.kv_heads) * config.head_dim)
        self._attended = allocate(config.num_heads * config.head_dim)
        self._hidden = allocate(config.intermediate_size)
        self._logits, self._argmax = allocate(config.vocab_size, torch.float32), allocate(1, torch.int32)
        self._scratch = decode_triton.Scratch(config.num_heads, config.head_dim, device)
        self._frequencies = rope_frequencies(config, device).contiguous() if config.position == "rope" else None

    def step(self, tokens: Tensor, tables: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The logits (1, vocabulary) of the next token, and their argmax (1,), -1 if they are not finite.

        `tokens` (1, 1) and `starts` (1,) become the inputs of the next step. The next step overwrites the result.
        """
        model, config = self._model, self._model.config
        x = x0 = embed(model.transformer, config, tokens, starts[:, None]).flatten()
        values = [table(tokens).flatten().to(x.dtype) for table in model.value_embeddings]
        for layer, block in enumerate(model.blocks):
            if block.skip is not None:
                x = block.skip[0] * x + block.skip[1] * x0
            self._linear(block.attn.c_attn, x, self._qkv, norm=block.ln_1)
            if (index := config.value_embedding_of(layer)) is not None:
                self._mix_values(block.attn, values[index])
            self._attend(block.attn, layer, tables, starts, counts)
            residual, x = x, torch.empty_like(x)
            out, mlp, scale = block.attn.c_proj, block.mlp, block.attention_scale
            self._linear(out, self._attended, x, residual=residual, residual_scale=scale)
            self._linear(mlp.c_fc, x, self._hidden, norm=block.ln_2, activation=mlp.activation, gated=mlp.gated)
            self._linear(mlp.c_proj, self._hidden, x, residual=x)
        norm = cast(Norm, model.transformer["ln_f"])
        self._linear(model.lm_head, x, self._logits, norm=norm, softcap=config.logit_softcap)
        self._ops.next_token(self._logits, tokens, starts, counts, self._argmax, self._scratch)
        return self._logits[None], self._argmax

    def _linear(self, linear: nn.Linear, x: Tensor, y: Tensor, *, norm: Norm | None = None, **settings: Any) -> None:
        ops, weight = self._ops, linear.weight
        matrix = ops.LinearWeight(weight)
        if isinstance(weight, QuantizedWeight):
            kind, quantizes_input = weight.format, weight.format.activations == "fp8"
            matrix = ops.LinearWeight(weight.codes, weight.scales, kind.codes, kind.group_size or 0, quantizes_input)
        normed = None if norm is None else ops.Norm(norm.kind, norm.eps, norm.weight, norm.bias)
        ops.linear(x, matrix, y, bias=linear.bias, norm=normed, **settings)

    def _mix_values(self, attention: Attention, embedded: Tensor) -> None:
        """Mix the values with those of the token's value embedding."""
        assert attention.value_mix is not None
        values = self._qkv[-len(embedded) :]
        values.copy_(attention.value_mix[0] * values + attention.value_mix[1] * embedded)

    def _attend(self, attention: Attention, layer: int, tables: Tensor, starts: Tensor, counts: Tensor) -> None:
        cache, config, norms = self._pool.layers[layer], self._model.config, (attention.q_norm, attention.k_norm)
        query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
        self._ops.attention(
            self._qkv, cache["keys"], cache["values"], tables, starts, counts, self._attended, self._scratch,
            query_norm=query_norm, key_norm=key_norm, norms_heads=norms[0] is not None, eps=config.norm_eps,
            frequencies=self._frequencies, window=config.windows[layer],
        )  # fmt: skip


def unsupported_reason(model: GPT, pool: BlockPool) -> str | None:
    """Why `CudaDecoder` cannot run a model; None if it can."""
    head_size = model.config.head_dim
    if pool.codec is not None or pool.dtype not in DTYPES:
        return "quantized KV caches are not supported"
    if head_size < 32 or head_size & (head_size - 1):
        return f"expected a head size that is a power of 2, at least 32, got {head_size}"
    for name, module in model.named_modules():
        known = isinstance(module, (nn.ModuleDict, nn.ModuleList)) or type(module) in MODULES
        if not known or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return f"{name} is a {type(module).__name__}, or has hooks"
    for name, parameter in model.named_parameters():
        if (reason := _unsupported_parameter(parameter)) is not None:
            return f"{name}: {reason}"
    return None


def _unsupported_parameter(parameter: Tensor) -> str | None:
    if not isinstance(parameter, QuantizedWeight):
        dense = type(parameter) in (Tensor, nn.Parameter) and parameter.is_contiguous()
        return None if dense and parameter.dtype in DTYPES else "expected a contiguous fp32, bf16 or fp16 tensor"
    weight_format = parameter.format
    if weight_format.activations != ("fp8" if weight_format.codes == "fp8" else None):
        return f"{weight_format.name} is not supported"
    contiguous = parameter.codes.is_contiguous() and parameter.scales.is_contiguous()
    return "expected contiguous codes that are not transposed" if parameter.transposed or not contiguous else None
