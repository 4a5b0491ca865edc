"""From a model directory to a GGUF file, one tensor at a time."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, LlamaFileType, get_tensor_name_map
from torch import Tensor

from whimbrel.base.errors import CheckpointError, ConfigError, PrecisionError, WriteError
from whimbrel.base.files import atomic_file
from whimbrel.model_io.directory import describe
from whimbrel.model_io.gguf.shape import architecture, rope_factors, unread_by_transformers, write_shape
from whimbrel.model_io.gguf.vocabulary import write_vocabulary
from whimbrel.model_io.plain import exported_directory
from whimbrel.model_io.quantized import CODES, SCALES
from whimbrel.model_io.sources import load_tokenizer
from whimbrel.model_io.tensors import TensorFiles
from whimbrel.model_io.weights import Stored, match, stored_dtype
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.families import tensor_mappings
from whimbrel.precision import QuantizedWeight, WeightFormat

__all__ = ["export_gguf"]

SUFFIX = ".gguf"


class Storage(NamedTuple):
    """How GGUF spells a dtype: for a tensor, for the whole file, and as numpy can hold it."""

    tensor: GGMLQuantizationType
    file: LlamaFileType
    bits: np.dtype[np.generic]


STORAGE = {
    torch.float32: Storage(GGMLQuantizationType.F32, LlamaFileType.ALL_F32, np.dtype(np.float32)),
    torch.float16: Storage(GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16, np.dtype(np.float16)),
    torch.bfloat16: Storage(GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16, np.dtype(np.uint16)),
}


class Entry(NamedTuple):
    """One tensor of the file: what it is in the model directory, and what becomes of it."""

    stored: str
    form: WeightFormat | None
    name: str
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool
    rotated_head: int | None
    """The head size, where the rows of a head must be reordered for llama.cpp's way to rotate them."""


def export_gguf(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write the model and tokenizer of a run, a checkpoint or a model directory as one GGUF file, whole or not at all.

    Matrices have `dtype` (fp32, fp16, bf16), or the one they are stored in; norms, biases and position embeddings are
    always fp32. Quantised weights become the numbers that they stand for. A model that no GGUF architecture computes
    exactly is refused, and so is a tokenizer that llama.cpp would not split text like.
    """
    target = _target(path)
    directory = exported_directory(source)
    model_type, config, form = describe(directory)
    arch = architecture(model_type, config)
    files = TensorFiles(directory)
    found = match(files, tensor_mappings(model_type, config), form)
    dtype = dtype or stored_dtype(files, found)
    if dtype not in STORAGE:
        raise ConfigError(f"a GGUF of dtype {dtype} cannot be written: give {', '.join(map(str, STORAGE))}")
    writer = GGUFWriter(None, arch)
    writer.add_type("model")
    writer.add_name(target.stem)
    writer.add_file_type(STORAGE[dtype].file)
    write_shape(writer, config)
    write_vocabulary(writer, directory, load_tokenizer(directory), config.vocab_size)
    entries = list(_entries(arch, config, found, form, dtype))
    _write(writer, target, entries, files, rope_factors(config))
    if unread := list(unread_by_transformers(arch, config)):
        logging.getLogger(__name__).warning(
            "transformers does not read %s in %s: give it config=AutoConfig.from_pretrained(%r) there",
            " and ".join(unread),
            target,
            str(directory),
        )


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != SUFFIX:
        raise ConfigError(f"{target} is no name for a GGUF file: let it end in {SUFFIX}")
    if target.exists():
        raise WriteError(f"{target} exists: name another file or remove it first")
    return target


def _entries(
    arch: str, config: GPTConfig, found: list[Stored], form: WeightFormat | None, dtype: torch.dtype
) -> Iterator[Entry]:
    """What the file holds, in the order of the model."""
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], config.num_layers)
    with torch.device("meta"):
        parameters = dict(GPT(config).named_parameters())
    for place, stored, quantized in found:
        name = names.get_name(place.hf_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConfigError(f"GGUF's architecture '{arch}' has no name for the tensor '{place.hf_name}'")
        shape = parameters[place.name][place.rows].shape
        rotated = arch == "llama" and ("attn_q." in name or "attn_k." in name)
        plain = len(shape) == 1 or place.name == "transformer.wpe.weight"
        yield Entry(
            stored=stored,
            form=form if quantized else None,
            name=name,
            shape=shape,
            dtype=torch.float32 if plain else dtype,
            transposed=place.transposed and not quantized,
            rotated_head=config.head_width if rotated else None,
        )


def _write(writer: GGUFWriter, target: Path, entries: list[Entry], files: TensorFiles, factors: Tensor | None) -> None:
    """Header and metadata first, then tensor after tensor: no more than one is in memory."""
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, np.dtype(np.float32), factors.nbytes)
    for entry in entries:
        kind, size = STORAGE[entry.dtype], entry.shape.numel() * entry.dtype.itemsize
        writer.add_tensor_info(entry.name, entry.shape, kind.bits, size, raw_dtype=kind.tensor)
    with atomic_file(target) as file, contextlib.closing(writer):
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
        for entry in entries:
            writer.write_tensor_data(_content(entry, files))


def _content(entry: Entry, files: TensorFiles) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """A tensor as the file holds it."""
    if entry.form is None:
        stored = files.read(entry.stored)
    else:
        codes, scales = (files.read(entry.stored + part) for part in (CODES, SCALES))
        try:
            stored = QuantizedWeight(codes, scales, entry.form).dequantize()
        except PrecisionError as error:
            raise CheckpointError(f"{files.directory} holds '{entry.stored}' damaged: {error}") from error
    tensor = stored.T if entry.transposed else stored
    if tensor.shape != entry.shape:
        raise CheckpointError(
            f"{files.directory} holds '{entry.stored}' of shape {list(stored.shape)}; its config.json says "
            f"{list(entry.shape[::-1] if entry.transposed else entry.shape)}"
        )
    if entry.rotated_head is not None:
        tensor = _neighbours(tensor, entry.rotated_head)
    cast = tensor.to(entry.dtype).contiguous()
    if entry.dtype is torch.float16 and not cast.isfinite().all():
        raise ConfigError(f"'{entry.stored}' has values that fp16 cannot hold: export it as bf16 or fp32")
    return (cast.view(torch.uint16) if entry.dtype is torch.bfloat16 else cast).numpy()


def _neighbours(rows: Tensor, head_size: int) -> Tensor:
    """Reorder the rows of each head: we rotate halves (i, i + size / 2), llama.cpp's Llama neighbours (2i, 2i + 1)."""
    return rows.view(-1, 2, head_size // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
