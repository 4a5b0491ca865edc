"""Finding the files of a model: runs, checkpoints, model directories, and adapters with their base model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import list_checkpoints, rank_by_metric, verify_component
from whimbrel.config import load_toml
from whimbrel.model_io.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_INFO
from whimbrel.model_io.hub import EXPECTED_PATH, RUN_OR_MODEL, cached_model, is_hub_id, resolve_path
from whimbrel.model_io.weights import CONFIG, read_json
from whimbrel.tokenization import ChatTemplate, load_chat_template

__all__ = ["ModelLocation", "choose_checkpoint", "find_run", "locate_model", "model_path"]

NO_CHECKPOINT = "has no complete checkpoint yet: train it until it saves one"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The directory of a model or of an adapter, or a llama2.c file."""

    directory: Path
    base: ModelLocation | None = None
    """The base model of an adapter."""

    @property
    def is_adapter(self) -> bool:
        return self.base is not None

    @property
    def chain(self) -> Iterator[ModelLocation]:
        """This location, its base model, and so on, in the order in which files are looked up."""
        yield self
        if self.base is not None:
            yield from self.base.chain

    @property
    def root(self) -> Path:
        """The directory with `config.json`, or the llama2.c file."""
        return self.directory if self.base is None else self.base.root

    @property
    def tokenizer_directory(self) -> Path | None:
        """The directory of the tokenizer: the adapter's if it has one, else the base model's."""
        return self.find("tokenizer.json")

    @property
    def base_weights(self) -> str | None:
        """The format that the base model of an adapter was quantized to in training."""
        file = self.directory / BASE_INFO
        return read_json(file).get("weights") if self.is_adapter and file.is_file() else None

    @property
    def num_bytes(self) -> int:
        """The size of the weight files."""
        return sum(
            file.stat().st_size
            for location in self.chain
            for file in location.directory.glob(ADAPTER_WEIGHTS if location.is_adapter else "*.safetensors")
        )

    def find(self, name: str) -> Path | None:
        """The first directory of the chain that has a file of this name."""
        return next((each.directory for each in self.chain if (each.directory / name).is_file()), None)

    def chat_template(self, name: str = "default") -> ChatTemplate | None:
        """The chat template of that name: the adapter's if it has any, else the base model's."""
        for location in self.chain:
            last = location.base is None
            if location.directory.is_dir() and (last or load_chat_template(location.directory) is not None):
                return load_chat_template(location.directory, name)
        return None


def locate_model(
    path: str | os.PathLike[str], base: str | os.PathLike[str] | ModelLocation | None = None
) -> ModelLocation:
    """The model directory of a run or checkpoint, or the path itself; raises CheckpointError if there is none.

    `owner/name` is a model on the Hugging Face Hub, unless it is a local path; it is downloaded if it is not in the
    cache. The base model of an adapter is `base`, else the one named in `adapter_config.json`, else `model.path` of the
    run that trained it. A base model is downloaded only if `base` or the adapter is given by its Hub id.
    """
    return _locate(path, base, ())


def _locate(
    path: str | os.PathLike[str], base: str | os.PathLike[str] | ModelLocation | None, seen: tuple[Path, ...]
) -> ModelLocation:
    directory = model_path(path)
    if directory.is_file():
        _check_file(directory)
    if directory.is_file() or (directory / CONFIG).is_file():
        if base is not None:
            raise ConfigError(f"--base is for adapters, but {path} is a complete model: omit it")
        return ModelLocation(directory)
    if not (directory / ADAPTER_CONFIG).is_file():
        if (directory / "config.toml").is_file():
            raise CheckpointError(f"run {directory} {NO_CHECKPOINT}")
        raise CheckpointError(f"{directory} has no {CONFIG}: {EXPECTED_PATH}")
    if directory.resolve() in seen:
        raise CheckpointError(f"{directory} is recorded as its own base model: pass the base model (--base)")
    if isinstance(base, ModelLocation):
        return ModelLocation(directory, base)
    found = _find_base(path, directory) if base is None else base
    return ModelLocation(directory, _locate(found, None, (*seen, directory.resolve())))


def _check_file(file: Path) -> None:
    """Raise for a file that cannot be a llama2.c model."""
    with file.open("rb") as stream:
        if stream.read(4) == b"GGUF":
            raise CheckpointError(f"{file} is a GGUF file, which cannot be loaded: pass the model directory")
    if file.suffix != ".bin":
        is_inside = any((file.parent / name).exists() for name in RUN_OR_MODEL)
        hint = f": did you mean {file.parent}?" if is_inside else ""
        raise CheckpointError(f"{EXPECTED_PATH}, got the file {file}{hint}")


def _find_base(path: str | os.PathLike[str], directory: Path) -> Path:
    """The base model of the adapter in `directory`, which `path` was resolved to: a path or a Hub id."""
    run = find_run(path) or find_run(directory)
    settings: Any = load_toml(run / "config.toml") if run is not None and (run / "config.toml").is_file() else {}
    table = read_json(directory / ADAPTER_CONFIG)
    names = [name for name in (table.get("base_model_name_or_path"), settings.get("model", {}).get("path")) if name]
    for name in names:
        if Path(name).exists():
            return Path(name)
        if (cached := cached_model(str(name), table.get("revision"))) is not None:
            return cached
    if not names:
        raise CheckpointError(f"{directory} is an adapter without a recorded base model: pass the base model (--base)")
    if is_hub_id(names[0]):
        if not Path(path).exists():  # the adapter was given by its Hub id
            return Path(names[0] if table.get("revision") is None else f"{names[0]}@{table['revision']}")
        raise CheckpointError(
            f"{directory} is an adapter of {names[0]}, which is not in the local cache: pass --base {names[0]} to "
            "download it"
        )
    raise CheckpointError(
        f"{directory} is an adapter of {names[0]}, which does not exist: pass its base model (--base)"
    )


def model_path(path: str | os.PathLike[str]) -> Path:
    """The model directory inside a run or checkpoint, or the path itself, whatever it contains.

    `owner/name` is downloaded from the Hub if there is no such path (`resolve_path`).
    """
    source = resolve_path(path)
    if _is_run(source):
        source = _newest_checkpoint(source)
    elif (source / "manifest.json").is_file() and (source / "model").is_dir():
        verify_component(source, "model")
    else:
        return source
    return source / "model"


def find_run(path: str | os.PathLike[str]) -> Path | None:
    """The run directory at `path`, or the run that contains this checkpoint or its model; None for other models."""
    source = Path(path)
    if not source.exists():  # a Hub id
        return None
    return next((directory for directory in (source, *source.absolute().parents[1:3]) if _is_run(directory)), None)


def choose_checkpoint(run: Path, which: str, *, greater_is_better: bool = False) -> Path:
    """A checkpoint of a run: `latest`, `best` by the metric it was saved with, or a step."""
    if not _is_run(run):
        raise ConfigError(f"--checkpoint {which} needs a run, got {run}: omit it or pass a run")
    if which == "latest":
        return _newest_checkpoint(run)
    if which == "best":
        ranked = rank_by_metric(run, greater_is_better=greater_is_better)
        if not ranked:
            raise CheckpointError(f"no checkpoint of {run} was saved with a metric: choose 'latest' or a step")
        return ranked[0][1]
    checkpoints = list_checkpoints(run)
    if not which.isdecimal() or int(which) not in checkpoints:
        steps = ", ".join(map(str, checkpoints)) or "none yet"
        raise CheckpointError(f"expected latest, best or a saved step of {run} ({steps}), got {which}")
    return checkpoints[int(which)]


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() and not (path / CONFIG).exists()


def _newest_checkpoint(run: Path) -> Path:
    """The newest checkpoint whose model passes verification; skips damaged ones with a warning."""
    checkpoints = list_checkpoints(run)
    for path in reversed(checkpoints.values()):
        try:
            verify_component(path, "model")
        except CheckpointError as error:
            logging.getLogger(__name__).warning("skipping damaged checkpoint: %s", error)
        else:
            return path
    if checkpoints:
        raise CheckpointError(
            f"run {run} has only damaged checkpoints (whimbrel verify {run} says what is wrong): restore one from a "
            "copy, or train the run again"
        )
    raise CheckpointError(f"run {run} {NO_CHECKPOINT}")
