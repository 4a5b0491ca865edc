"""GGUF export: a model and its tokenizer in one file for llama.cpp, Ollama and other readers of the format."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from whimbrel.base.errors import CheckpointError, ConfigError, MissingExtraError, PrecisionError, WriteError
from whimbrel.base.files import atomic_file
from whimbrel.model_io.load import load_tokenizer, read_config, read_generation_config
from whimbrel.model_io.locate import ModelLocation
from whimbrel.model_io.save import merged_directory
from whimbrel.model_io.weights import CODES, SCALES, StoredTensor, TensorFiles, match_tensors, read_json, stored_dtype
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.families import tensor_mappings
from whimbrel.models.layers import rope_frequencies
from whimbrel.precision import QuantizedWeight, WeightFormat
from whimbrel.tokenization import Tokenizer
from whimbrel.tokenization.chat_template import TEMPLATE_FILE
from whimbrel.tokenization.tokenizer import TOKENIZER_CONFIG_FILE

try:
    from gguf import (
        MODEL_ARCH,
        GGMLQuantizationType,
        GGUFWriter,
        LlamaFileType,
        RopeScalingType,
        TokenType,
        get_tensor_name_map,
    )
except ImportError as error:
    raise MissingExtraError("GGUF export", "gguf", "gguf") from error

__all__ = ["export_gguf"]

SUFFIX = ".gguf"
ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The GGUF architecture of each model type; llama.cpp runs Mistral as Llama."""


class GGUFDtype(NamedTuple):
    """A dtype in GGUF: the tensor type, the file type, and the numpy dtype of the same width."""

    tensor: GGMLQuantizationType
    file: LlamaFileType
    numpy: np.dtype[np.generic]


DTYPES = {
    torch.float32: GGUFDtype(GGMLQuantizationType.F32, LlamaFileType.ALL_F32, np.dtype(np.float32)),
    torch.float16: GGUFDtype(GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16, np.dtype(np.float16)),
    torch.bfloat16: GGUFDtype(GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16, np.dtype(np.uint16)),
}


class TensorEntry(NamedTuple):
    """A tensor of the GGUF file and how to build it from the model directory."""

    stored_name: str
    weight_format: WeightFormat | None
    name: str
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool
    rope_head_size: int | None
    """The head size if the rows of each head are reordered for llama.cpp's pairing of rotary dimensions."""


def export_gguf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model and tokenizer of a run, checkpoint or model directory as one GGUF file, atomically.

    Matrices have `dtype` (fp32, fp16, bf16) or their stored dtype; norms, biases and position embeddings are fp32.
    Quantized weights are dequantized, and adapters merged. Raises ConfigError if no GGUF architecture computes the
    model exactly, or if llama.cpp would tokenize differently.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise ConfigError(f"expected a file name that ends in {SUFFIX}, got {target}")
    if target.exists():
        raise WriteError(f"{target} already exists: remove it or choose another name")
    with merged_directory(source, base=base, dtype=dtype) as directory:
        _export_directory(directory, target, dtype)


def _export_directory(directory: Path, target: Path, dtype: torch.dtype | None) -> None:
    model_type, config, weight_format = read_config(directory)
    arch = _architecture(model_type, config)
    files = TensorFiles(directory)
    matches = match_tensors(files, tensor_mappings(model_type, config), weight_format)
    dtype = dtype or stored_dtype(files, matches)
    if dtype not in DTYPES:
        raise ConfigError(f"expected one of {', '.join(map(str, DTYPES))} for GGUF, got {dtype}: pass --dtype")
    writer = GGUFWriter(None, arch)
    writer.add_type("model")
    writer.add_name(target.stem)
    writer.add_file_type(DTYPES[dtype].file)
    _add_hyperparameters(writer, config)
    _add_tokenizer(writer, directory, load_tokenizer(directory), config.vocab_size)
    entries = list(_tensor_entries(arch, config, matches, weight_format, dtype))
    _write_file(writer, target, entries, files, _rope_factors(config))
    if ignored := list(_ignored_by_transformers(arch, config)):
        logging.getLogger(__name__).warning(
            "transformers does not read %s from %s: pass config=AutoConfig.from_pretrained(%r) to from_pretrained",
            " and ".join(ignored),
            target,
            str(directory),
        )


# Architecture and hyperparameters


def _architecture(model_type: str, config: GPTConfig) -> str:
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"GGUF has no architecture for model_type '{model_type}': export it with --format hf, or train a config of "
            f"{', '.join(ARCHITECTURES)}"
        )
    arch = ARCHITECTURES[model_type]
    for unsupported in _unsupported(arch, config):
        raise ConfigError(f"GGUF architecture '{arch}' does not support {unsupported}: export it with --format hf")
    return arch


def _unsupported(arch: str, config: GPTConfig) -> Iterator[str]:
    activation = "gelu_tanh" if arch == "gpt2" else "silu"
    if config.activation != activation:
        yield f"activation {config.activation} (only {activation})"
    windows = [window for window in config.windows if window is not None and window < config.context_length]
    if windows:
        yield f"a sliding window of {windows[0]} tokens with context_length {config.context_length}"
    if arch == "qwen3" and config.bias != "none":
        yield f"biases ({config.bias})"
    if arch != "llama" and config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        yield "rope scaling of kind llama3"


def _ignored_by_transformers(arch: str, config: GPTConfig) -> Iterator[str]:
    """Hyperparameters that llama.cpp reads, but that transformers silently replaces by defaults."""
    if config.rope_scaling is not None:
        yield "rope scaling"
    if arch == "llama" and config.bias != "none":
        yield "biases"
    if arch == "gpt2" and config.intermediate_size != 4 * config.embd_size:
        yield "the MLP width"
    if config.head_dim != {"qwen2": config.embd_size // config.num_heads, "qwen3": 128}.get(arch, config.head_dim):
        yield "the head size"


def _add_hyperparameters(writer: GGUFWriter, config: GPTConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.embd_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.position == "rope":
        writer.add_head_count_kv(config.kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)


def _rope_factors(config: GPTConfig) -> Tensor | None:
    """Divisors of the rotary frequencies for llama3 scaling, which GGUF stores as a tensor."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    device = torch.device("cpu")
    return rope_frequencies(replace(config, rope_scaling=None), device) / rope_frequencies(config, device)


# Tensors


def _tensor_entries(
    arch: str, config: GPTConfig, matches: list[StoredTensor], weight_format: WeightFormat | None, dtype: torch.dtype
) -> Iterator[TensorEntry]:
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], config.num_layers)
    with torch.device("meta"):
        parameters = dict(GPT(config).named_parameters())
    for mapping, stored_name, quantized in matches:
        name = names.get_name(mapping.hf_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConfigError(f"GGUF architecture '{arch}' has no tensor for '{mapping.hf_name}'")
        shape = parameters[mapping.name][mapping.rows].shape
        reordered = arch == "llama" and ("attn_q." in name or "attn_k." in name)
        in_fp32 = len(shape) == 1 or mapping.name == "transformer.wpe.weight"
        yield TensorEntry(
            stored_name=stored_name,
            weight_format=weight_format if quantized else None,
            name=name,
            shape=shape,
            dtype=torch.float32 if in_fp32 else dtype,
            transposed=mapping.transposed and not quantized,
            rope_head_size=config.head_dim if reordered else None,
        )


def _write_file(
    writer: GGUFWriter, target: Path, entries: list[TensorEntry], files: TensorFiles, rope_factors: Tensor | None
) -> None:
    """Write header and metadata, then one tensor at a time, so that only one is in memory."""
    if rope_factors is not None:
        writer.add_tensor_info("rope_freqs.weight", rope_factors.shape, np.dtype(np.float32), rope_factors.nbytes)
    for entry in entries:
        dtype, size = DTYPES[entry.dtype], entry.shape.numel() * entry.dtype.itemsize
        writer.add_tensor_info(entry.name, entry.shape, dtype.numpy, size, raw_dtype=dtype.tensor)
    with atomic_file(target) as file, contextlib.closing(writer):
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if rope_factors is not None:
            writer.write_tensor_data(rope_factors.numpy())
        for entry in entries:
            writer.write_tensor_data(_read_tensor(entry, files))


def _read_tensor(entry: TensorEntry, files: TensorFiles) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if entry.weight_format is None:
        stored = files.read(entry.stored_name)
    else:
        codes, scales = (files.read(entry.stored_name + part) for part in (CODES, SCALES))
        try:
            stored = QuantizedWeight(codes, scales, entry.weight_format).dequantize()
        except PrecisionError as error:
            raise CheckpointError(f"{files.directory}: '{entry.stored_name}' is damaged: {error}") from error
    tensor = stored.T if entry.transposed else stored
    if tensor.shape != entry.shape:
        expected = list(entry.shape[::-1] if entry.transposed else entry.shape)
        raise CheckpointError(
            f"{files.directory}: expected '{entry.stored_name}' of shape {expected} (from config.json), got "
            f"{list(stored.shape)}"
        )
    if entry.rope_head_size is not None:  # we pair rows (i, i + size / 2) of a head, llama.cpp's Llama (2i, 2i + 1)
        halves = tensor.view(-1, 2, entry.rope_head_size // 2, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    cast = tensor.to(entry.dtype).contiguous()
    if entry.dtype is torch.float16 and not cast.isfinite().all():
        raise ConfigError(f"'{entry.stored_name}' has values beyond the range of fp16: export it as bf16 or fp32")
    return (cast.view(torch.uint16) if entry.dtype is torch.bfloat16 else cast).numpy()


# Tokenizer

CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = rf"{CONTRACTIONS_AND_WORDS}\p{{N}}{{1,3}}{REST}", rf"{CONTRACTIONS_AND_WORDS}\p{{N}}{REST}"

PRE_TOKENIZERS = {
    (None, "gpt2", False): "gpt-2",
    ("NFC", "gpt2", False): "olmo",
    (None, "digits, gpt2", False): "smollm",
    (None, LLAMA3, True): "llama-bpe",
    (None, LLAMA3, False): "dbrx",
    (None, QWEN2, False): "qwen2",
    ("NFC", QWEN2, False): "qwen2",
}
"""llama.cpp's pre-tokenizer names by (normalizer, regex, `ignore_merges`).

llama.cpp does not normalize: with an NFC tokenizer, ids differ for text that is not in NFC.
"""
UNSUPPORTED_BPE = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
"""BPE options that llama.cpp does not support."""
END_TOKENS = ("eos", "eot", "eom")
"""Names in GGUF for tokens that end a sequence."""


def _add_tokenizer(writer: GGUFWriter, directory: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Add the tokenizer, padded with unused tokens to the `vocab_size` rows of the embedding."""
    content: dict[str, Any] = json.loads(tokenizer.to_json())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer_name(content))
    _add_tokens(writer, tokenizer, content, vocab_size)
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in content["model"]["merges"])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    _add_special_tokens(writer, directory, tokenizer, vocab_size)
    file, config = directory / TEMPLATE_FILE, directory / TOKENIZER_CONFIG_FILE
    if file.is_file():
        writer.add_chat_template(file.read_text(encoding="utf-8"))
    elif config.is_file() and (template := read_json(config).get("chat_template")) is not None:
        writer.add_chat_template(template)


def _pre_tokenizer_name(content: Mapping[str, Any]) -> str:
    model = content["model"]
    options = [option for option in UNSUPPORTED_BPE if model.get(option)]
    if model["type"] != "BPE" or options:
        kind = f"{model['type']} with {', '.join(options)}" if options else model["type"]
        remedy = ", then convert it with llama.cpp's convert_hf_to_gguf.py" if options == ["byte_fallback"] else ""
        raise ConfigError(
            f"expected a byte-level BPE tokenizer for GGUF export, got {kind}: export a directory instead{remedy}"
        )
    normalizer, pre_tokenizer = (content[part] or {} for part in ("normalizer", "pre_tokenizer"))
    kind = (normalizer.get("type"), _regex(pre_tokenizer), bool(model.get("ignore_merges")))
    if kind not in PRE_TOKENIZERS:
        raise ConfigError(
            f"unknown pre-tokenizer for llama.cpp (normalizer {json.dumps(content['normalizer'])}, pre_tokenizer "
            f"{json.dumps(content['pre_tokenizer'])}, ignore_merges {json.dumps(kind[2])}): expected one of "
            f"{', '.join(sorted(set(PRE_TOKENIZERS.values())))}"
        )
    return PRE_TOKENIZERS[kind]


def _regex(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The regex of a byte-level pre-tokenizer, or a name for it; None for any other pre-tokenizer."""
    *before, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True):
        if not before:
            return "gpt2"
        digits = len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits")
        return "digits, gpt2" if digits else None
    if len(before) != 1 or before[0].get("type") != "Split" or before[0].get("behavior") != "Isolated":
        return None
    pattern = before[0]["pattern"].get("Regex")
    return pattern if isinstance(pattern, str) and not before[0].get("invert") else None


def _add_tokens(writer: GGUFWriter, tokenizer: Tokenizer, content: Mapping[str, Any], vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"expected a tokenizer of at most {vocab_size} tokens for this model, got {tokenizer.vocab_size}"
        )
    special = {token["id"]: token["special"] for token in content["added_tokens"]}
    tokens: list[str] = []
    types: list[TokenType] = []
    for index in range(vocab_size):
        token = tokenizer.pipeline.id_to_token(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            types.append(TokenType.UNUSED)
        elif index in special:
            types.append(TokenType.CONTROL if special[index] else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL)
    writer.add_token_list(tokens)
    writer.add_token_types(types)


def _add_special_tokens(writer: GGUFWriter, directory: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Add BOS and EOS. Always, because readers would use their own defaults for missing ones."""
    generation = read_generation_config(ModelLocation(directory), tokenizer, vocab_size)
    prefix, suffix = _added_tokens(tokenizer)
    eos_ids = generation.eos_token_ids
    if len(prefix) > 1 or (suffix and suffix != eos_ids[:1]):
        raise ConfigError(
            f"the tokenizer adds ids {prefix} before and {suffix} after a text, but GGUF supports one BOS token before "
            f"and the EOS token {eos_ids[0]} after it: change its post_processor"
        )
    writer.add_bos_token_id(prefix[0] if prefix else generation.bos_token_id)
    for name, index in zip(END_TOKENS, eos_ids, strict=False):
        getattr(writer, f"add_{name}_token_id")(index)
    if len(eos_ids) > len(END_TOKENS):
        logging.getLogger(__name__).warning(
            "GGUF stores %d EOS tokens, omitting %s", len(END_TOKENS), eos_ids[len(END_TOKENS) :]
        )
    writer.add_add_bos_token(bool(prefix))
    writer.add_add_eos_token(bool(suffix))


def _added_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer's post-processor adds before and after a text."""
    text = tokenizer.pipeline.encode("a", add_special_tokens=False).ids
    ids = tokenizer.pipeline.encode("a").ids
    start = next(index for index in range(len(ids)) if ids[index : index + len(text)] == text)
    return tuple(ids[:start]), tuple(ids[start + len(text) :])
