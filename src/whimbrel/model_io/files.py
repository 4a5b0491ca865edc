"""Files of a model directory: JSON, and tensors in one safetensors file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import parse_json
from whimbrel.checkpoint import write_tensors

__all__ = ["CONFIG", "GENERATION_CONFIG", "TensorFiles", "read_json", "write_json", "write_tensor_files"]

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


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
        remedy = f", only {pickled} (pickle): save it again as safetensors" if pickled else ""
        raise CheckpointError(f"{directory} has no weights: expected {WEIGHTS} or {INDEX}{remedy}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: expected 'weight_map' to map tensor names to file names")
    names = {file: _tensor_names(_shard_path(index, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in names[file]:
            raise CheckpointError(f"{directory / file} has no tensor '{name}', which {INDEX} lists: download it again")
        yield name, directory / file


def _shard_path(index: Path, file: str) -> Path:
    if Path(file).name != file or not index.with_name(file).is_file():
        raise CheckpointError(f"{index} lists '{file}', which is not in its directory: download the model again")
    return index.with_name(file)


def _tensor_names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
