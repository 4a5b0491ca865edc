"""Decoding on a GPU with `cuda_decoder.cu`: the step of one or a few sequences as a single persistent kernel.

Decoding a token reads every weight once, so a step should take as long as reading them. PyTorch takes longer: it
launches many kernels, each of which waits for the one before, and dequantizes low-bit weights in separate kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError
from whimbrel.inference.cpu_decoder import unsupported_module
from whimbrel.inference.paged_cache import BlockPool
from whimbrel.models import GPT
from whimbrel.models.gpt import embed
from whimbrel.models.layers import Norm, rope_frequencies
from whimbrel.ops.lowbit import BF16_MARGIN
from whimbrel.precision import QuantizedWeight

__all__ = ["BATCH_SIZES", "CudaDecoder", "GpuLimits", "create_cuda_decoder", "unsupported_reason"]

SOURCE = Path(__file__).with_suffix(".cu")
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
FORMATS = {"int8": 1, "fp8": 2, "int4": 3}
NORMS = {"layer": 1, "rms": 2}
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu2")
MATRICES = ("qkv", "out", "fc", "down", "head")
BATCH_SIZES = (1, 2, 4, 8)
"""Batch sizes that the kernel can be compiled for."""
WARPS = 8
"""Warps per block."""
MAX_SLOTS = 32
"""Chunks of 2 KiB that a warp loads ahead, if they fit into shared memory."""
MIN_SPLIT_TOKENS = 256
"""Attention over more tokens than this is split between blocks."""

logger = logging.getLogger(__name__)

Launch = Callable[..., None]
"""Launches a compiled kernel: `launch(blocks, threads, *arguments)`."""


class GpuLimits(NamedTuple):
    """The number of multiprocessors of a GPU, and the bytes of shared memory that a block can use."""

    blocks: int
    shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> GpuLimits:
        """The limits of a device."""
        properties: Any = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, properties.shared_memory_per_block_optin)


class CudaDecoder:
    """Runs the decode step for one batch size. It reads parameters in place, so in-place changes take effect."""

    def __init__(
        self,
        model: GPT,
        pool: BlockPool,
        batch_size: int = 1,
        *,
        limits: GpuLimits | None = None,
        compile_kernel: Callable[[str, str, int], Launch] | None = None,
    ) -> None:
        self._model = model
        self._limits = limits or GpuLimits.of(pool.device)
        config, device, dtype = model.config, pool.device, pool.dtype
        if compile_kernel is None:
            from whimbrel.ops.nvrtc import CudaKernel

            compile_kernel = CudaKernel
        definitions = _definitions(model, pool, batch_size, self._limits)
        prelude = "".join(f"#define {name} {value}\n" for name, value in definitions.items())
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._launch = compile_kernel(prelude + SOURCE.read_text("utf-8"), "decode_step", self._limits.shared_bytes)

        def allocate(size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch_size * size, dtype=dtype, device=device)

        heads, kv_heads, head_size, parts = config.num_heads, config.kv_heads, config.head_dim, model.transformer
        positions = cast(nn.Embedding, parts["wpe"]).weight if "wpe" in parts else None
        # the kernel looks up dense embeddings itself
        tables = model.token_embedding.weight, positions
        self._embeds = not config.embedding_skip and not any(isinstance(each, QuantizedWeight) for each in tables)
        self._x, self._x0 = allocate(config.embd_size), allocate(config.embd_size)
        self._values = [allocate(kv_heads * head_size) for _ in model.value_embeddings]
        self._logits = allocate(config.vocab_size, torch.float32).view(batch_size, -1)
        self._argmax = allocate(1, torch.int32)
        frequencies = rope_frequencies(config, device).contiguous() if config.position == "rope" else None
        blocks, norm = self._limits.blocks, cast(Norm, parts["ln_f"])
        tensors: list[Tensor | None] = [
            *_codes_and_scales(model.lm_head.weight),
            model.lm_head.bias,
            norm.weight,
            norm.bias,
            model.token_embedding.weight if self._embeds else None,
            positions if self._embeds else None,
            frequencies,
            self._x,
            self._x0,
            allocate((heads + 2 * kv_heads) * head_size),
            allocate(heads * head_size),
            allocate(config.intermediate_size),
            self._logits,
            self._argmax,
            torch.empty(blocks * 2 * head_size, device=device),  # partial results of attention: two heads per block
            torch.empty(blocks * 2 * 2, device=device),
            allocate(blocks, torch.float32),
            allocate(blocks, torch.int32),
            torch.zeros(2 + batch_size * heads, dtype=torch.int32, device=device),  # counters
        ]
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        for layer, block in enumerate(model.blocks):
            attention, mlp, cache = block.attn, block.mlp, pool.layers[layer]
            linears = attention.c_attn, attention.c_proj, mlp.c_fc, mlp.c_proj
            index = config.value_embedding_of(layer)
            codes, scales = zip(*(_codes_and_scales(linear.weight) for linear in linears), strict=True)
            norms = block.ln_1, block.ln_2
            layer_tensors: list[Tensor | None] = [
                *codes,
                *scales,
                *(linear.bias for linear in linears),
                *(norm.weight for norm in norms),
                *(norm.bias for norm in norms),
                *(None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm)),
                block.skip,
                attention.value_mix,
                None if index is None else self._values[index],
                *(cache.get(name) for name in ("keys", "values", "key_scales", "value_scales")),
            ]
            pointers += [0 if tensor is None else tensor.data_ptr() for tensor in layer_tensors]
            pointers.append(config.windows[layer] or 0)
        self._referenced = tensors
        self._pointers = torch.tensor(pointers, dtype=torch.int64).to(device)

    def step(self, tokens: Tensor, tables: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The logits (batch, vocabulary) of the next tokens, and their argmax (batch,), -1 if they are not finite.

        `tokens` (batch, 1) and `starts` (batch,) become the inputs of the next step, which overwrites the result.
        """
        model = self._model
        if not self._embeds:
            self._x.copy_(embed(model.transformer, model.config, tokens, starts[:, None]).flatten())
            self._x0.copy_(self._x)
        for table, buffer in zip(model.value_embeddings, self._values, strict=True):
            buffer.copy_(table(tokens).flatten())
        arguments = self._pointers, tokens, tables, tables.stride(0), starts, counts
        self._launch(self._limits.blocks, WARPS * 32, *arguments)
        return self._logits, self._argmax


def create_cuda_decoder(model: GPT, pool: BlockPool, batch_size: int) -> CudaDecoder | None:
    """A decoder for this batch size; None if it does not support the model, or cannot be compiled."""
    if pool.device.type != "cuda" or batch_size not in BATCH_SIZES:
        return None
    if (reason := unsupported_reason(model, pool)) is not None:
        logger.debug("decoding with PyTorch: %s", reason)
        return None
    try:
        return CudaDecoder(model, pool, batch_size)
    except ConfigError as error:  # no NVRTC, or a model that needs too much shared memory
        logger.warning("Decoding with PyTorch, which is slower: cannot compile the CUDA decoder: %s", error)
        return None


def _definitions(model: GPT, pool: BlockPool, batch_size: int, limits: GpuLimits) -> dict[str, object]:
    """What the kernel is compiled for."""
    config, block = model.config, next(iter(model.blocks))
    matrices = block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj, model.lm_head
    formats: dict[str, object] = {}
    for name, linear in zip(MATRICES, matrices, strict=True):
        weight = linear.weight
        formats[f"{name.upper()}_FORMAT"] = FORMATS[weight.format.codes] if isinstance(weight, QuantizedWeight) else 0
    return formats | {
        "DTYPE": DTYPES[pool.dtype],
        "KV_CODES": 0 if pool.codec is None else FORMATS[pool.codec.name],
        "BF16_MARGIN": f"{BF16_MARGIN!r}f",
        "BATCH": batch_size,
        "LAYERS": config.num_layers,
        "WIDTH": config.embd_size,
        "HIDDEN": config.intermediate_size,
        "HEADS": config.num_heads,
        "KV_HEADS": config.kv_heads,
        "HEAD_SIZE": config.head_dim,
        "VOCAB": config.vocab_size,
        "NORM": NORMS[config.norm],
        "ACTIVATION": ACTIVATIONS.index(config.activation),
        "GATED": int(config.gated_mlp),
        "NORMS_HEADS": int(config.qk_norm != "none"),
        "EPS": f"{config.norm_eps!r}f",
        "SOFTCAP": f"{config.logit_softcap or 0.0!r}f",
        "ATTENTION_SCALE": f"{block.attention_scale!r}f",
        "BLOCK_SIZE": pool.block_size,
        "MIN_SPLIT_TOKENS": MIN_SPLIT_TOKENS,
        "BLOCKS": limits.blocks,
        "WARPS": WARPS,
        "MAX_SLOTS": MAX_SLOTS,
        "SHARED_BYTES": limits.shared_bytes,
    }


def _codes_and_scales(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, QuantizedWeight):
        return weight.codes, weight.scales
    return weight, None


def unsupported_reason(model: GPT, pool: BlockPool) -> str | None:
    """Why `CudaDecoder` cannot run a model; None if it can."""
    config, lanes = model.config, model.config.head_dim * pool.dtype.itemsize // 16
    if pool.device.type == "cuda" and torch.cuda.get_device_capability(pool.device) < (8, 0):
        return "the GPU has no asynchronous copies: they need compute capability 8.0"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    if pool.dtype not in DTYPES:
        return f"expected bf16 or fp16, got {pool.dtype}"
    if pool.codec is not None and config.head_dim > 64 and config.head_dim % 64:
        return f"a quantized KV cache with a head size of {config.head_dim} is not supported"
    if lanes not in (2, 4, 8, 16, 32):
        return f"a head size of {config.head_dim} is not supported"
    if (reason := unsupported_module(model)) is not None:
        return reason
    for name, parameter in model.named_parameters():
        if (reason := _unsupported_parameter(parameter, pool.dtype)) is not None:
            return f"{name}: {reason}"
    linears = [(each.attn.c_attn, each.attn.c_proj, each.mlp.c_fc, each.mlp.c_proj) for each in model.blocks]
    for same_matrix in zip(*linears, strict=True):
        if len({getattr(linear.weight, "format", None) for linear in same_matrix}) > 1:
            return "the formats of weights differ between layers"
    return None


def _unsupported_parameter(parameter: Tensor, dtype: torch.dtype) -> str | None:
    if parameter.dtype != dtype:
        return f"expected {dtype} as the KV cache, got {parameter.dtype}"
    codes, scales = parameter, None
    if isinstance(parameter, QuantizedWeight):
        weight_format = parameter.format
        if weight_format.activations != ("fp8" if weight_format.codes == "fp8" else None):
            return f"{weight_format.name} is not supported"
        if parameter.transposed:
            return "a transposed quantized weight is not supported"
        if weight_format.codes == "int4" and (weight_format.group_size != 128 or parameter.size(1) % 256):
            return "expected groups of 128 columns and a multiple of 256 columns"
        codes, scales = parameter.codes, parameter.scales
    elif type(parameter) not in (Tensor, nn.Parameter):
        return f"{type(parameter).__name__} is not supported"
    if not codes.is_contiguous() or (scales is not None and not scales.is_contiguous()):
        return "expected a contiguous tensor"
    if codes.dim() == 2 and codes.size(1) * codes.element_size() % 16:
        return "rows are not a multiple of 16 bytes"
    return None
