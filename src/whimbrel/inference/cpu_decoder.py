"""Decoding on a CPU with `cpu_decoder.cpp`, which is compiled once with the machine's C++ compiler.

PyTorch launches hundreds of small operations per token and has no fast matrix-vector products for most formats; here
the entire forward pass is one call.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError, DataError, WriteError
from whimbrel.base.files import atomic_file, cache_directory, is_private
from whimbrel.inference.block_manager import BlockTable
from whimbrel.inference.paged_cache import BlockPool
from whimbrel.models import GPT
from whimbrel.models.layers import MLP, Attention, Block, Norm, rope_frequencies
from whimbrel.ops.compiler import find_compiler
from whimbrel.precision import QuantizedWeight

__all__ = ["CpuDecoder", "create_decoder", "unsupported_module"]

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++20", "-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODE_KINDS = {"int8": 3, "int4": 4}
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu2")
INT4_GROUPS = (32, 64, 128)
"""int4 group sizes that divide the kernel's block of columns."""
MODULES = (GPT, nn.Embedding, nn.Linear, Block, Attention, MLP, Norm)
MAX_TOKENS = (64, 16, 2**31, 16, 64)
"""Longest prompt that is prefilled faster here than in PyTorch, by kind of weight. Measured with SmolLM2 135M on a
CPU with bf16 instructions; PyTorch's fp16 matmuls are slow on any CPU."""

logger = logging.getLogger(__name__)
_LOCK = threading.Lock()


class _Vector(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_int64))


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "group")),
        ("bias", _Vector),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _Vector), ("bias", _Vector))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("attention_norm", "mlp_norm")),
        *((name, _Vector) for name in ("query_norm", "key_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "fc", "proj")),
        ("skip", _Vector),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


_SIZES = ("width", "num_layers", "heads", "kv_heads", "head_size", "mlp_size", "vocab_size", "context_length")
_OPTIONS = ("is_rms", "activation", "is_gated", "norms_heads", "block_size", "cache_kind")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in (*_SIZES, *_OPTIONS)),
        *((name, ctypes.c_float) for name in ("eps", "softcap", "attention_scale")),
        ("frequencies", ctypes.c_void_p),
        *((name, _Matrix) for name in ("embedding", "positions", "head")),
        *((name, _Norm) for name in ("embedding_norm", "final_norm")),
        ("layers", ctypes.c_void_p),
    )


class CpuDecoder:
    """Runs a model on sequences of a block pool, a few tokens at a time.

    It reads parameters where they are, so changes in place are seen; `is_current` is False once something was replaced.
    """

    def __init__(self, model: GPT, pool: BlockPool, library: ctypes.CDLL) -> None:
        self._model, self._library = model, library
        self._config, self._num_threads = model.config, torch.get_num_threads()
        self._modules = [(module._modules, *item) for module in model.modules() for item in module._modules.items()]
        self._parameters = [
            (module._parameters, name, parameter, _pointers(parameter))
            for module in model.modules()
            for name, parameter in module._parameters.items()
        ]
        description, self._referenced = _describe(model, pool)
        self.max_tokens = MAX_TOKENS[_matrix(next(iter(model.blocks)).attn.c_attn.weight).kind]
        """Tokens up to which a prompt is read faster here than by PyTorch."""
        self._decoder = ctypes.c_void_p(library.whimbrel_create(ctypes.byref(description), self._num_threads))
        finalizer = weakref.finalize(self, library.whimbrel_destroy, self._decoder)
        finalizer.atexit = False  # a daemon thread may still be running it

    @property
    def is_current(self) -> bool:
        """Whether the model has the same modules and parameters as before, and PyTorch as many threads."""
        if self._model.config is not self._config or torch.get_num_threads() != self._num_threads:
            return False
        for owner, name, module in self._modules:
            if owner.get(name) is not module or (module is not None and _is_overridden(module)):
                return False
        for values, name, parameter, pointers in self._parameters:
            if values.get(name) is not parameter or _pointers(parameter) != pointers:
                return False
        return True

    def run(self, chunks: Sequence[tuple[BlockTable, list[int]]], offsets: Sequence[Sequence[int]]) -> list[Tensor]:
        """Process the next tokens of each sequence; return fp32 logits (offsets, vocabulary) for those at `offsets`."""
        counts = [len(tokens) for _, tokens in chunks]
        width = max(len(table.blocks) for table, _ in chunks)
        tokens = np.concatenate([np.asarray(new, dtype=np.int32) for _, new in chunks])
        positions = np.concatenate(
            [np.arange(table.num_tokens, table.num_tokens + len(new), dtype=np.int32) for table, new in chunks]
        )
        tables = np.zeros((len(tokens), width), dtype=np.int32)
        starts = np.cumsum([0, *counts[:-1]])
        for start, (table, new) in zip(starts, chunks, strict=True):
            tables[start : start + len(new), : len(table.blocks)] = table.blocks
        config = self._config
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise DataError(
                f"expected token ids from 0 to {config.vocab_size - 1}, got {tokens.min()} to {tokens.max()}"
            )
        if positions.max() >= config.context_length:
            raise ConfigError(
                f"expected at most context_length = {config.context_length} tokens, got {positions.max() + 1}"
            )
        rows = [start + offset for start, each in zip(starts, offsets, strict=True) for offset in each]
        wanted = np.array(rows, dtype=np.int32)
        logits = torch.empty(len(wanted), config.vocab_size, dtype=torch.float32, device="cpu")
        arrays = [array.ctypes.data for array in (tokens, positions, tables)]
        self._library.whimbrel_run(
            self._decoder, len(tokens), *arrays, width, len(wanted), wanted.ctypes.data, logits.data_ptr()
        )
        return list(logits.split([len(each) for each in offsets]))


def create_decoder(model: GPT, pool: BlockPool) -> CpuDecoder | None:
    """A decoder for a model on a CPU; None if something is not supported, or there is no compiler."""
    reason = unsupported_reason(model, pool)
    library = None if reason else _load_library()
    if library is None:
        logger.debug("decoding with PyTorch: %s", reason or "no C++ compiler")
        return None
    return CpuDecoder(model, pool, library)


def unsupported_reason(model: GPT, pool: BlockPool) -> str | None:
    """Why a model cannot run here; None if it can."""
    if pool.device.type != "cpu" or pool.codec is not None or pool.dtype not in KINDS:
        return "only unquantized KV caches on a CPU are supported"
    if model.config.value_embeddings:
        return "value_embeddings are not supported"
    if (reason := unsupported_module(model)) is not None:
        return reason
    for name, parameter in model.named_parameters():
        if (reason := _unsupported_parameter(parameter)) is not None:
            return f"{name}: {reason}"
    if model.config.position == "learned" and isinstance(model.transformer["wpe"].weight, QuantizedWeight):
        return "quantized position embeddings are not supported"
    return None


def unsupported_module(model: GPT) -> str | None:
    """Why code that replaces the forward pass cannot run a model: an unknown module, or one that was changed."""
    for name, module in model.named_modules():
        known = isinstance(module, (nn.ModuleDict, nn.ModuleList)) or type(module) in MODULES
        if not known or _is_overridden(module):
            return f"{name} is a {type(module).__name__}, or has hooks"
    return None


def _is_overridden(module: nn.Module) -> bool:
    """Whether calling a module does more, or something else, than its class does."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__


def _unsupported_parameter(parameter: Tensor) -> str | None:
    if parameter.device.type != "cpu":
        return f"expected a parameter on the CPU, got {parameter.device}"
    if not isinstance(parameter, QuantizedWeight):
        dense = type(parameter) in (Tensor, nn.Parameter) and parameter.is_contiguous()
        return None if dense and parameter.dtype in KINDS else "expected a contiguous fp32, bf16 or fp16 tensor"
    weight_format = parameter.format
    groups = {"int8": (None,), "int4": INT4_GROUPS}.get(weight_format.codes, ())
    if weight_format.activations is not None or weight_format.group_size not in groups:
        return f"{weight_format.name} (groups of {weight_format.group_size}) is not supported"
    contiguous = parameter.codes.is_contiguous() and parameter.scales.is_contiguous()
    if parameter.transposed or not contiguous or parameter.dtype not in KINDS:
        return "expected contiguous codes that are not transposed, with scales in fp32, bf16 or fp16"
    return None


def _pointers(parameter: Tensor | None) -> tuple[Any, ...]:
    """The addresses of the data of a parameter, and its dtype."""
    if isinstance(parameter, QuantizedWeight):
        return parameter.codes.data_ptr(), parameter.scales.data_ptr(), parameter.dtype
    return () if parameter is None else (parameter.data_ptr(), parameter.dtype)


def _describe(model: GPT, pool: BlockPool) -> tuple[_Model, list[Any]]:
    """The structs that describe a model, and the objects they point to."""
    config = model.config
    parts = cast("dict[str, Any]", model.transformer)
    blocks = cast("list[Block]", list(model.blocks))
    caches = pool.layers
    layers = (_Layer * config.num_layers)(*(_layer(*each) for each in zip(blocks, caches, config.windows, strict=True)))
    frequencies = rope_frequencies(config, torch.device("cpu")).contiguous() if config.position == "rope" else None
    description = _Model(
        width=config.embd_size,
        num_layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.kv_heads,
        head_size=config.head_dim,
        mlp_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        is_rms=config.norm == "rms",
        activation=ACTIVATIONS.index(config.activation),
        is_gated=config.gated_mlp,
        norms_heads=config.qk_norm != "none",
        block_size=pool.block_size,
        cache_kind=KINDS[pool.dtype],
        eps=config.norm_eps,
        softcap=config.logit_softcap or 0.0,
        attention_scale=blocks[0].attention_scale,
        frequencies=None if frequencies is None else frequencies.data_ptr(),
        embedding=_matrix(parts["wte"].weight),
        positions=_matrix(parts["wpe"].weight) if "wpe" in parts else _Matrix(),
        head=_matrix(model.lm_head.weight, model.lm_head.bias),
        embedding_norm=_norm(parts["ln_e"]) if "ln_e" in parts else _Norm(),
        final_norm=_norm(parts["ln_f"]),
        layers=ctypes.addressof(layers),
    )
    return description, [layers, frequencies, *caches]


def _layer(block: Block, cache: dict[str, Tensor], window: int | None) -> _Layer:
    attention, mlp = block.attn, block.mlp
    return _Layer(
        attention_norm=_norm(block.ln_1),
        mlp_norm=_norm(block.ln_2),
        query_norm=_vector(None if attention.q_norm is None else attention.q_norm.weight),
        key_norm=_vector(None if attention.k_norm is None else attention.k_norm.weight),
        qkv=_matrix(attention.c_attn.weight, attention.c_attn.bias),
        out=_matrix(attention.c_proj.weight, attention.c_proj.bias),
        fc=_matrix(mlp.c_fc.weight, mlp.c_fc.bias),
        proj=_matrix(mlp.c_proj.weight, mlp.c_proj.bias),
        skip=_vector(block.skip),
        keys=cache["keys"].data_ptr(),
        values=cache["values"].data_ptr(),
        window=window or 0,
    )


def _vector(tensor: Tensor | None) -> _Vector:
    return _Vector() if tensor is None else _Vector(tensor.data_ptr(), KINDS[tensor.dtype])


def _norm(norm: Norm) -> _Norm:
    return _Norm(_vector(norm.weight), _vector(norm.bias))


def _matrix(weight: Tensor, bias: Tensor | None = None) -> _Matrix:
    rows, columns = weight.shape
    if not isinstance(weight, QuantizedWeight):
        return _Matrix(weight.data_ptr(), None, KINDS[weight.dtype], 0, rows, columns, columns, _vector(bias))
    kind, scale_kind = CODE_KINDS[weight.format.codes], KINDS[weight.scales.dtype]
    group = weight.format.group_size or columns
    pointers = weight.codes.data_ptr(), weight.scales.data_ptr()
    return _Matrix(*pointers, kind, scale_kind, rows, columns, group, _vector(bias))


# Compilation


def _load_library() -> ctypes.CDLL | None:
    """The compiled code, from a cache on disk; None if it cannot be compiled or loaded."""
    with _LOCK:
        return _find_library()


@cache
def _find_library() -> ctypes.CDLL | None:
    try:
        system = platform.machine(), platform.libc_ver(), _cpu_features()
        key = hashlib.sha256(repr((SOURCE.read_bytes(), FLAGS, *system)).encode()).hexdigest()[:16]
        path = cache_directory() / f"cpu-decoder-{key}.so"
        with contextlib.suppress(OSError, AttributeError):  # damaged: compile it again
            if is_private(path):
                return _open_library(path)
        return _compile(path)
    except (OSError, RuntimeError) as error:  # for example no home directory, or one whose files cannot be executed
        logger.warning("Decoding with PyTorch, which is slower: cannot load the CPU decoder: %s", error)
        return None


def _open_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.whimbrel_create.argtypes, library.whimbrel_create.restype = (pointer, ctypes.c_int32), pointer
    library.whimbrel_destroy.argtypes, library.whimbrel_destroy.restype = (pointer,), None
    library.whimbrel_run.argtypes = (pointer, integer, pointer, pointer, pointer, integer, integer, pointer, pointer)
    library.whimbrel_run.restype = None
    return library


def _compile(path: Path) -> ctypes.CDLL | None:
    """Compile the source, store the result as `path` and load it; None without a working compiler."""
    compiler = find_compiler()
    if compiler is None:
        return None
    logger.info("Compiling the CPU decoder (once)")
    with tempfile.TemporaryDirectory(prefix="whimbrel-") as folder:
        target = Path(folder) / path.name
        command = [compiler, *FLAGS, "-o", str(target), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
            logger.warning("Decoding with PyTorch, which is slower: %s cannot compile the decoder: %s", compiler, error)
            return None
        try:
            with atomic_file(path) as file:
                file.write(target.read_bytes())
            for each in (path, path.parent):
                if each.stat().st_uid == os.getuid():
                    each.chmod(0o700)
            problem = None if is_private(path) else f"other users can write to {path.parent}"
        except (WriteError, OSError) as error:
            problem = str(error)
        if problem is None:
            return _open_library(path)
        logger.warning("The CPU decoder is compiled again in every process: %s", problem)
        return _open_library(target)


def _cpu_features() -> str:
    """The instruction sets of this machine, as several machines may share a cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return platform.processor() + platform.release()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
