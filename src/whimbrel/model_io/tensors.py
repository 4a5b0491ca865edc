"""Named tensors in safetensors files, one file or several with an index, read and written one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import write_tensors
from whimbrel.model_io.tables import read_table, write_table

__all__ = ["TensorFiles", "write_tensor_files"]

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFiles:
    """The tensors of a model directory by name; nothing is read before it is asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = dict(_locate(directory))

    @property
    def names(self) -> set[str]:
        """Every tensor there is."""
        return set(self._files)

    def num_bytes(self) -> int:
        """Total size of all files."""
        return sum(path.stat().st_size for path in set(self._files.values()))

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as it is stored."""
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except SafetensorError as error:
            raise CheckpointError(f"{path} does not hold '{name}' as its index says: {error}") from error


def write_tensor_files(directory: Path, tensors: Mapping[str, Tensor], *, max_shard_size: int) -> None:
    """Write tensors, views of any stride, in files of at most `max_shard_size` bytes each."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    shards = list(_shards(sizes, max_shard_size))
    names = [WHOLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    for shard, name in zip(shards, names, strict=True):
        write_tensors(directory / name, {tensor: tensors[tensor] for tensor in shard})
    if len(shards) > 1:
        weight_map = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
        write_table(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _locate(directory: Path) -> Iterator[tuple[str, Path]]:
    whole, index = directory / WHOLE, directory / INDEX
    if whole.is_file():
        yield from ((name, whole) for name in _names_in(whole))
        return
    if not index.is_file():
        other = next((path.name for path in directory.glob("pytorch_model*")), None)
        found = f"only {other}, which is pickled: save it again as safetensors" if other else "no weights"
        raise CheckpointError(f"{directory} has neither {WHOLE} nor {INDEX}, {found}")
    weight_map = read_table(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' from tensor to file")
    held = {file: _names_in(_sibling(index, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise CheckpointError(f"{directory / file} does not hold '{name}' as {INDEX} says")
        yield name, directory / file


def _sibling(index: Path, file: str) -> Path:
    if Path(file).name != file or not index.with_name(file).is_file():
        raise CheckpointError(f"{index} names '{file}', which is not a file beside it: fetch the whole model again")
    return index.with_name(file)


def _names_in(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    shard: list[str] = []
    held = 0
    for name, size in sizes.items():
        if shard and held + size > limit:
            yield shard
            shard, held = [], 0
        shard.append(name)
        held += size
    yield shard


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"
