"""The model in a checkpoint: always a directory that `transformers` opens, where the model is of a kind it knows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError, ConfigError, PrecisionError
from whimbrel.base.files import atomic_directory
from whimbrel.checkpoint import DirectoryStateful, write_tensors
from whimbrel.model_io import load_weights, save_model, weight_state
from whimbrel.models import GPT
from whimbrel.precision import QuantizedWeight
from whimbrel.tokenization import Tokenizer

__all__ = ["check_can_be_saved", "export_model", "model_state"]


def model_state(model: nn.Module, processing_class: Any = None) -> DirectoryStateful:
    """The state of a model as a checkpoint keeps it."""
    check_can_be_saved(model)
    if isinstance(model, GPT):
        return GPTState(model, processing_class)
    if not hasattr(model, "save_pretrained"):
        return ModuleState(model, processing_class)
    if _has_adapters(model):
        return AdapterState(model, processing_class)
    return (PretrainedState if _is_of_transformers(model) else SelfSavingState)(model, processing_class)


def _has_adapters(model: nn.Module) -> bool:
    """Whether it is a PEFT model, or a transformers model with an adapter."""
    return hasattr(model, "peft_config") and hasattr(model, "save_pretrained")


def _is_of_transformers(model: nn.Module) -> bool:
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


def check_can_be_saved(model: nn.Module) -> None:
    """Refuse weights stored as codes in a model that is not ours: nobody else would read them.

    Under an adapter they are frozen, and not saved.
    """
    for name, parameter in () if isinstance(model, GPT) else model.named_parameters():
        if isinstance(parameter, QuantizedWeight) and (parameter.requires_grad or not _has_adapters(model)):
            raise PrecisionError(
                f"{name} is stored as {parameter.format.name} codes, and a checkpoint of a {type(model).__name__} "
                "holds plain weights: dequantize_ the model, or train a GPT (whimbrel.load_model)"
            )


def export_model(model: nn.Module, processing_class: Any, target: Path, *, overwrite: bool) -> None:
    """Put the files of a model directory into `target`; files of these names are replaced only if told to.

    A directory that is not there yet appears whole.
    """
    state = model_state(model, processing_class)
    if not target.exists():
        with atomic_directory(target) as folder:
            state.save_directory(state.state_dict(), folder)
        return
    staged = target / ".model"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        with atomic_directory(staged) as folder:
            state.save_directory(state.state_dict(), folder)
        taken = [path.name for path in staged.iterdir() if (target / path.name).exists()]
        if taken and not overwrite:
            raise ConfigError(
                f"{target} holds a model already ({taken[0]}): set overwrite_output_dir=True to replace it, or name "
                "another directory"
            )
        for path in sorted(staged.iterdir()):
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


class GPTState:
    """Our model: written in the layout of its family."""

    def __init__(self, model: GPT, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters, a tied one once, a quantised one as its codes and its scales."""
        return weight_state(self._model)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over parameters."""
        for name, own in weight_state(self._model).items():
            own.copy_(state[name])

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """A model directory of `state`."""
        own = self._tokenizer if isinstance(self._tokenizer, Tokenizer) else None
        save_model(self._model, folder, own, state=state)
        if own is None:
            _save_processing(self._tokenizer, folder)

    def load_directory(self, folder: Path) -> None:
        """The weights of a model directory, in place."""
        load_weights(self._model, folder)


class ModuleState:
    """Any other module: its state dict in one safetensors file."""

    FILE = "model.safetensors"

    def __init__(self, model: nn.Module, processing_class: Any) -> None:
        self._model, self._processing_class = model, processing_class

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        return dict(self._model.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over parameters and buffers."""
        self._model.load_state_dict(state)

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """One file; tensors that share their memory are written once."""
        folder.mkdir(exist_ok=True)
        write_tensors(folder / self.FILE, self._once(state))
        _save_processing(self._processing_class, folder)

    def load_directory(self, folder: Path) -> None:
        """Fill the module; a file of another shape is refused."""
        stored = load_file(folder / self.FILE)
        if odd := sorted(set(stored) ^ set(self._once(self.state_dict()))):
            raise CheckpointError(f"{folder} is not of this model: '{odd[0]}' is in one and not in the other")
        try:
            self._model.load_state_dict(stored, strict=False)
        except RuntimeError as error:
            raise CheckpointError(f"{folder} is not of this model: {' '.join(str(error).split())}") from error

    def _once(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`state` without the later names of a tensor that has several."""
        seen: set[int] = set()
        names = []
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if name in state and id(tensor) not in seen:
                names.append(name)
                seen.add(id(tensor))
        return {name: state[name] for name in names}


class PretrainedState(ModuleState):
    """A model of `transformers`: written and named by itself."""

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """What `save_pretrained` writes, of `state` instead of the weights in use."""
        self._model.save_pretrained(str(folder), state_dict=dict(state))  # type: ignore[operator]
        _save_processing(self._processing_class, folder)

    def load_directory(self, folder: Path) -> None:
        """The weights, bit for bit; a layout that differs from the module's is read by `from_pretrained`."""
        stored: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            stored |= load_file(path)
        own = self._model.state_dict()
        self._check_shape(folder, stored, own)
        places = {name: tensor.data_ptr() for name, tensor in own.items()}
        filled = {places[name] for name in stored if name in places}
        if set(stored) <= set(own) and set(places.values()) == filled:
            self._model.load_state_dict(stored, strict=False)
            return
        loaded = type(self._model).from_pretrained(str(folder), dtype="auto")  # type: ignore[attr-defined]
        self._model.load_state_dict(loaded.state_dict())

    def _check_shape(self, folder: Path, stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Refuse another architecture or size before anything is built of it."""
        remedy = "give that model, or name another output_dir"
        theirs = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        ours = getattr(self._model.config, "model_type", None)
        if theirs != ours:
            raise CheckpointError(f"{folder} holds a model of the type {theirs} and this one is {ours}: {remedy}")
        for name in (name for name in stored if name in own and stored[name].shape != own[name].shape):
            shapes = f"{list(stored[name].shape)} there and {list(own[name].shape)} here"
            raise CheckpointError(f"{folder} holds a model of another size ('{name}' is {shapes}): {remedy}")


class SelfSavingState(ModuleState):
    """A model with another library's `save_pretrained`: its files, and our own file with the weights."""

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write its own files, for its library, then `model.safetensors` with `state`, which is loaded on resume."""
        folder.mkdir(exist_ok=True)
        self._model.save_pretrained(str(folder))  # type: ignore[operator]
        super().save_directory(state, folder)


class AdapterState(ModuleState):
    """A model with PEFT adapters: only trained weights are saved, not the frozen base model.

    `PeftModel.from_pretrained(base, directory)` loads the directory. Adapter files lack some of what an exact resume
    needs (prompt encoders, buffers, manually unfrozen parameters), so all trained weights are also written separately,
    with a fingerprint of the base model.
    """

    FILE, BASE = "trained.safetensors", "base_model.json"
    IGNORED = ("inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "task_type")
    """Entries of `adapter_config.json` that do not change what an adapter computes."""

    def state_dict(self) -> dict[str, Tensor]:
        """Trainable parameters and buffers."""
        buffers = {name for name, _ in self._model.named_buffers(remove_duplicate=False)}
        trained = {name for name, p in self._model.named_parameters(remove_duplicate=False) if p.requires_grad}
        return {name: tensor for name, tensor in self._model.state_dict().items() if name in trained | buffers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the trained weights and buffers."""
        self._model.load_state_dict(state, strict=False)

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapter files, all trained weights, and the fingerprint of the base model."""
        self._model.save_pretrained(str(folder), state_dict={**self._model.state_dict(), **state})  # type: ignore[operator]
        write_tensors(folder / self.FILE, self._once(state))
        base = {"fingerprint": self._base_fingerprint(), "adapters": self._adapters()}
        (folder / self.BASE).write_text(json.dumps(base, indent=2) + "\n", encoding="utf-8")
        _save_processing(self._processing_class, folder)

    def load_directory(self, folder: Path) -> None:
        """Load the trained weights; raises if the adapters or the base model differ."""
        base = json.loads((folder / self.BASE).read_text(encoding="utf-8"))
        own = self._adapters()
        if odd := sorted(base["adapters"].keys() ^ own.keys()):
            raise CheckpointError(
                f"{folder} is not of this model: the adapter '{odd[0]}' is in one and not in the other"
            )
        for adapter, settings in own.items():
            saved = base["adapters"][adapter]
            for name in (name for name in settings | saved if settings.get(name) != saved.get(name)):
                raise CheckpointError(
                    f"{folder} has an adapter with {name} = {saved.get(name)!r}, but this model has "
                    f"{settings.get(name)!r}: make them equal, or choose another output_dir"
                )
        if base["fingerprint"] != self._base_fingerprint():
            raise CheckpointError(
                f"{folder} was trained on a base model with other weights: load the same base model, in the same "
                "dtype, or choose another output_dir"
            )
        super().load_directory(folder)

    def _adapters(self) -> dict[str, dict[str, Any]]:
        """The JSON config of every adapter."""
        configs: Mapping[str, Any] = self._model.peft_config  # type: ignore[assignment]
        tables = {name: config.to_dict() for name, config in configs.items()}
        return {
            name: json.loads(json.dumps({k: v for k, v in table.items() if k not in self.IGNORED}, default=_as_json))
            for name, table in tables.items()
        }

    def _base_fingerprint(self) -> str:
        """A hash of a few values of each frozen parameter, to tell base models apart."""
        digest = hashlib.sha256()
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                held = (parameter.codes if isinstance(parameter, QuantizedWeight) else parameter).detach().flatten()
                sample = held[:: max(1, len(held) // 64)].contiguous().cpu()
                digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
                digest.update(sample.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _as_json(value: Any) -> Any:
    """JSON encoding for other types in adapter configs: sets of names, enums, dtypes."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _save_processing(processing_class: Any, folder: Path) -> None:
    """Write what prepares inputs beside the model, in its own layout."""
    if isinstance(processing_class, Tokenizer):
        processing_class.save(folder)
    elif processing_class is not None:
        processing_class.save_pretrained(str(folder))
