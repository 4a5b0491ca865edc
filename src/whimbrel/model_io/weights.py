"""The weights of a model directory: tensor files, quantized tensors, and their conversion to and from parameters.

A stored tensor is some rows of a parameter, dense or quantized (codes and scales, described by `quantization_config` in
`config.json`). Tensors are read and converted one at a time, so that loading needs little memory besides the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError, ConfigError, PrecisionError
from whimbrel.base.files import parse_json
from whimbrel.checkpoint import write_tensors
from whimbrel.config import not_one_of
from whimbrel.distributed.state import is_dtensor, local_part, row_orders
from whimbrel.models.families import TensorMapping
from whimbrel.precision import FORMATS, RECIPES, QuantizedWeight, Recipe, WeightFormat, with_embeddings

__all__ = [
    "CODES",
    "CONFIG",
    "GENERATION_CONFIG",
    "METHOD",
    "QUANTIZATION",
    "SCALES",
    "TRANSFORMERS_WEIGHTS",
    "StoredTensor",
    "TensorFiles",
    "dense_linears",
    "format_of",
    "load_tensors",
    "match_tensors",
    "quantization_config",
    "quantization_entries",
    "read_json",
    "stored_dtype",
    "stored_format",
    "stored_tensors",
    "weight_recipe",
    "weight_state_dict",
    "write_json",
    "write_tensor_files",
]

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

QUANTIZATION = "quantization_config"
METHOD, VERSION = "whimbrel", 1
CODES, SCALES = ".codes", ".scales"
"""Suffixes, appended to the name of the weight, of the two tensors that store a quantized weight."""

TRANSFORMERS_WEIGHTS = "transformers_weights"
IMPORT_HINT = "import whimbrel.hf first: these weights are quantized by whimbrel"
"""`transformers` skips an unknown `quant_method` and initializes the weights randomly. It expects a file name in this
entry, so it raises an error that quotes this text. `whimbrel.hf` removes the entry when it loads the config.
"""

PREFIXES = ("transformer.", "model.")
"""Prefixes that checkpoints of the bare model (without a head) omit."""
IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "lm_head.weight")
"""Suffixes of tensors that may be in a file without being used: buffers of older versions, and a tied head."""
CHUNK_SIZE, MAX_CHUNKS = 2**18, 16
"""Weights are quantized in chunks of at least this many elements, in at most this many chunks, to limit peak memory."""


# Files: JSON, and tensors in one safetensors file or in shards with an index


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: expected a Hugging Face model directory (config.json, safetensors)"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class TensorFiles:
    """The tensors of a model directory by name; each is read from disk on demand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = dict(_locate_tensors(directory))

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def num_bytes(self) -> int:
        """Total size of all files."""
        return sum(path.stat().st_size for path in set(self._files.values()))

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in its stored dtype."""
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except SafetensorError as error:
            raise CheckpointError(f"cannot read tensor '{name}' from {path}: {error}") from error


def write_tensor_files(directory: Path, tensors: Mapping[str, Tensor], *, max_shard_size: int) -> None:
    """Write tensors of any stride, in files of at most `max_shard_size` bytes each."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    shards = list(_shards(sizes, max_shard_size))
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for shard, name in zip(shards, names, strict=True):
        write_tensors(directory / name, {tensor: tensors[tensor] for tensor in shard})
    if count > 1:
        weight_map = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
        write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    shard: list[str] = []
    total = 0
    for name, size in sizes.items():
        if shard and total + size > limit:
            yield shard
            shard, total = [], 0
        shard.append(name)
        total += size
    yield shard


def _locate_tensors(directory: Path) -> Iterator[tuple[str, Path]]:
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file():
        yield from ((name, single) for name in _tensor_names(single))
        return
    if not index.is_file():
        pickled = next((path.name for path in directory.glob("pytorch_model*")), None)
        hint = f", found only {pickled} (pickle): convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{directory} has no weights: expected {WEIGHTS} or {INDEX}{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: expected 'weight_map' to map tensor names to file names")
    names = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or not (directory / file).is_file():
            raise CheckpointError(f"{index} lists '{file}', which is not in its directory: download the model again")
        names[file] = _tensor_names(directory / file)
    for name, file in weight_map.items():
        if name not in names[file]:
            raise CheckpointError(f"{directory / file} has no tensor '{name}', which {INDEX} lists: download it again")
        yield name, directory / file


def _tensor_names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error


# Quantized weights: `quantization_config` in `config.json`, and the tensor names of codes and scales


def quantization_entries(weight_format: WeightFormat | None) -> dict[str, Any]:
    """The `config.json` entries for weights of this format; empty for unquantized weights."""
    if weight_format is None:
        return {}
    return {QUANTIZATION: quantization_config(weight_format), TRANSFORMERS_WEIGHTS: IMPORT_HINT}


def quantization_config(weight_format: WeightFormat) -> dict[str, Any]:
    """The `quantization_config` for this format; `format` contains the details that the name in `recipe` implies."""
    details = {
        "codes": weight_format.codes,
        "group": weight_format.group_size,
        "activations": weight_format.activations,
    }
    return {"quant_method": METHOD, "version": VERSION, "recipe": weight_format.name, "format": details}


def stored_format(hf_config: Mapping[str, Any]) -> WeightFormat | None:
    """The weight format in a `config.json`; None if it is unquantized or was quantized by another tool."""
    entry = hf_config.get(QUANTIZATION)
    if not isinstance(entry, Mapping) or entry.get("quant_method") != METHOD:
        return None
    if entry.get("version") != VERSION:
        raise ConfigError(
            f"expected {QUANTIZATION} version {VERSION}, got {entry.get('version')!r}: install a newer whimbrel"
        )
    weight_format = FORMATS.get(str(entry.get("recipe")))
    if weight_format is None:
        raise ConfigError(f"expected a {QUANTIZATION} recipe from {', '.join(FORMATS)}, got {entry.get('recipe')!r}")
    expected = quantization_config(weight_format)
    if dict(entry) != expected:
        raise ConfigError(
            f"expected {QUANTIZATION} format {expected['format']} for recipe {weight_format.name}, got "
            f"{entry.get('format')!r}"
        )
    return weight_format


def weight_recipe(argument: str, name: str, *, embeddings: bool = False) -> Recipe:
    """The weight-quantization recipe called `name`; `argument` is the option to name in error messages.

    With `embeddings` it also quantizes the token embedding and the head.
    """
    known = {recipe.name: recipe for recipe in RECIPES.values() if recipe.finalize is not None}
    if name not in known:
        raise PrecisionError(not_one_of(argument, name, known))
    return with_embeddings(known[name]) if embeddings else known[name]


def format_of(model: nn.Module) -> WeightFormat | None:
    """The format of a model's quantized weights, None if there are none; a directory can store only one format."""
    weights = [weight for weight in model.parameters() if isinstance(weight, QuantizedWeight)]
    unknown = sorted(weight.format.name for weight in weights if not _is_known_format(weight))
    if unknown:
        raise CheckpointError(
            f"expected weights in one of {', '.join(FORMATS)}, got {unknown[0]}, which cannot be saved"
        )
    formats = {FORMATS[weight.format.name] for weight in weights}
    if len(formats) > 1:
        names = " and ".join(sorted(weight_format.name for weight_format in formats))
        raise CheckpointError(f"expected weights in one format, got {names}: quantize all to the same format")
    return next(iter(formats), None)


def _is_known_format(weight: QuantizedWeight) -> bool:
    """Whether its format, with the group size fitted to its shape, is one of FORMATS."""
    named = FORMATS.get(weight.format.name)
    return named is not None and weight.format == named.fit_to(weight.format.weight_shape(weight.codes))


def weight_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name as detached tensors, tied ones once; a quantized weight is two tensors, codes and scales."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            state |= {name + CODES: parameter.codes, name + SCALES: parameter.scales}
        else:
            state[name] = parameter.detach()
    return state


# Stored tensors to parameters and back


class StoredTensor(NamedTuple):
    """A mapping matched to a stored tensor; if `quantized`, `name` is the prefix of its codes and scales."""

    mapping: TensorMapping
    name: str
    quantized: bool


def match_tensors(
    files: TensorFiles, mappings: Iterable[TensorMapping], weight_format: WeightFormat | None
) -> list[StoredTensor]:
    """Find the stored tensor of each mapping; raises CheckpointError for missing or unexpected tensors."""
    names, matches, used = files.names, [], set()
    for mapping in mappings:
        candidates = [mapping.hf_name, *(mapping.hf_name.removeprefix(prefix) for prefix in PREFIXES)]
        dense = next((name for name in candidates if name in names), None)
        quantized = next((name for name in candidates if {name + CODES, name + SCALES} & names), None)
        if weight_format is not None and quantized is not None:
            matches.append(StoredTensor(mapping, quantized, quantized=True))
            parts = {quantized + CODES, quantized + SCALES}
        else:
            matches.append(StoredTensor(mapping, dense or mapping.hf_name, quantized=False))
            parts = {dense or mapping.hf_name}
        for missing in sorted(parts - names):
            raise CheckpointError(f"{files.directory} has no tensor '{missing}', which its config.json requires")
        used |= parts
    extra = sorted(name for name in names - used if not name.endswith(IGNORED_SUFFIXES))
    if extra:
        raise CheckpointError(
            f"{files.directory} has {len(extra)} tensors that do not match its config.json, first '{extra[0]}'"
        )
    return matches


def stored_dtype(files: TensorFiles, matches: list[StoredTensor]) -> torch.dtype:
    """The dtype of the first dense tensor, usually the embedding."""
    return _read_float(files, next(stored.name for stored in matches if not stored.quantized)).dtype


def dense_linears(model: nn.Module, files: TensorFiles, matches: list[StoredTensor]) -> tuple[str, ...]:
    """Linear layers that are stored unquantized in a quantized directory."""
    quantized = {stored.mapping.name for stored in matches if stored.quantized}
    if not quantized:
        raise CheckpointError(f"{files.directory} has no quantized tensors, but a quantization_config in config.json")
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return tuple(name for name in linears if f"{name}.weight" not in quantized)


@torch.no_grad()
def load_tensors(
    model: nn.Module, files: TensorFiles, matches: list[StoredTensor], weight_format: WeightFormat | None
) -> None:
    """Copy stored tensors into parameters, quantizing or dequantizing where the two differ."""
    parameters = dict(model.named_parameters())
    if any(map(is_dtensor, parameters.values())):
        _load_sharded(model, files, matches)
        return
    for mapping, name, quantized in matches:
        if parameters[mapping.name].is_meta:
            continue  # another pipeline stage has it
        rows = parameters[mapping.name][mapping.rows]
        if quantized and weight_format is not None:
            stored: Tensor = _read_quantized(files, name, weight_format, rows)
        else:
            stored = _read_float(files, name)
            _check_shape(files, name, stored, _transposed(rows, mapping).shape)
            stored = _transposed(stored, mapping)
        if isinstance(rows, QuantizedWeight) and not quantized:
            # Rows are quantized independently, so quantizing in chunks yields the same codes with less memory.
            step = max(1, max(CHUNK_SIZE, rows.numel() // MAX_CHUNKS) // rows.shape[1])
            for target, chunk in zip(torch.split(rows, step), torch.split(stored, step), strict=True):
                target.copy_(chunk.to(device=target.device, dtype=target.dtype))
        else:
            rows.copy_(stored)


def _load_sharded(model: nn.Module, files: TensorFiles, matches: list[StoredTensor]) -> None:
    """Copy stored tensors into parameters that are sharded over ranks.

    Files are mapped into memory, so that a rank reads only its parts.
    """
    orders, by_parameter = row_orders(model), dict[str, list[StoredTensor]]()
    for match in matches:
        by_parameter.setdefault(match.mapping.name, []).append(match)
    # Those that are not in the files are adapters.
    for name, parameter in ((n, p) for n, p in model.named_parameters() if n in by_parameter and not p.is_meta):
        part = local_part(parameter.detach())
        part.local.zero_()  # rows beyond the vocabulary
        for mapping, stored_name, _ in by_parameter[name]:
            stored = _transposed(_read_float(files, stored_name), mapping)
            first, last, _ = mapping.rows.indices(len(parameter))
            _check_shape(files, stored_name, stored, (last - first, *parameter.shape[1:]))
            for start, stop, offset in part.pieces(orders.get(name)):
                low, high = max(offset[0], first), min(offset[0] + stop - start, last)
                if low < high:
                    columns = (slice(o, o + n) for o, n in zip(offset[1:], part.local.shape[1:], strict=True))
                    rows = part.local[start + low - offset[0] : start + high - offset[0]]
                    rows.copy_(stored[(slice(low - first, high - first), *columns)])


def stored_tensors(mappings: Iterable[TensorMapping], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a `weight_state_dict` by their names in a file: views, transposed where the family requires it."""
    tensors: dict[str, Tensor] = {}
    for mapping in mappings:
        if mapping.name in state:
            tensors[mapping.hf_name] = _transposed(state[mapping.name][mapping.rows], mapping)
        else:
            tensors |= {mapping.hf_name + part: state[mapping.name + part][mapping.rows] for part in (CODES, SCALES)}
    return tensors


def _read_float(files: TensorFiles, name: str) -> Tensor:
    tensor = files.read(name)
    if not tensor.is_floating_point():
        raise CheckpointError(f"{files.directory}: expected floating-point weights, got {tensor.dtype} in '{name}'")
    return tensor


def _read_quantized(files: TensorFiles, name: str, weight_format: WeightFormat, rows: Tensor) -> QuantizedWeight:
    weight_format = weight_format.fit_to(rows.shape)
    if isinstance(rows, QuantizedWeight) and rows.format != weight_format:
        raise CheckpointError(
            f"{files.directory}: expected '{name}' in {rows.format.name}, got {weight_format.name}: quantize the "
            "unquantized model instead"
        )
    codes, scales = files.read(name + CODES), files.read(name + SCALES)
    for part, tensor, shape in zip(
        (CODES, SCALES), (codes, scales), weight_format.part_shapes(rows.shape), strict=True
    ):
        _check_shape(files, name + part, tensor, shape)
    if codes.dtype != weight_format.dtype or not scales.is_floating_point():
        raise CheckpointError(
            f"{files.directory}: expected '{name}' in {weight_format.name} with {weight_format.dtype} codes and "
            f"floating-point scales, got {codes.dtype} and {scales.dtype}"
        )
    return QuantizedWeight(codes, scales, weight_format)


def _check_shape(files: TensorFiles, name: str, stored: Tensor, expected: Iterable[int]) -> None:
    if list(stored.shape) != list(expected):
        raise CheckpointError(
            f"{files.directory}: expected '{name}' of shape {list(expected)} (from config.json), got "
            f"{list(stored.shape)}"
        )


def _transposed(tensor: Tensor, mapping: TensorMapping) -> Tensor:
    return tensor.t() if mapping.transposed else tensor
