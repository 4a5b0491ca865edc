"""What a checkpoint contains: model, optimizer, scheduler, trainer state, dataset position, RNG and callbacks.

The model component is a directory that `transformers` can load, if it supports the architecture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from whimbrel.base.errors import CheckpointError, ConfigError, PrecisionError
from whimbrel.base.files import atomic_directory
from whimbrel.checkpoint import (
    CheckpointManager,
    DirectoryStateful,
    Manifest,
    SharingPattern,
    StateComponent,
    step_directories,
    write_tensors,
)
from whimbrel.checkpoint import checkpoint_path as find_checkpoint
from whimbrel.config import to_table
from whimbrel.distributed import DiLoCo, World, unwrap
from whimbrel.distributed.state import (
    LazyGather,
    canonical_names,
    full_state,
    full_tensor,
    is_distributed_model,
    lazy_gather_state,
    load_full_,
)
from whimbrel.model_io import load_weights, save_model, weight_state_dict
from whimbrel.model_io.adapter import ADAPTER_CONFIG, adapter_config, base_values, load_adapter_weights, save_adapter
from whimbrel.models import GPT
from whimbrel.models.lora import find_lora_config, lora_parameters
from whimbrel.precision import MixedPrecision, QuantizedWeight
from whimbrel.tokenization import Tokenizer
from whimbrel.train.batches import DatasetBatches, check_samples_per_step
from whimbrel.train.callback import Callbacks, RunningTotals, TrainerControl, TrainerState
from whimbrel.train.config import TrainerConfig
from whimbrel.train.hf_compat import accepted_kwargs, overrides
from whimbrel.train.optimizer_state import OptimizerState, SchedulerState
from whimbrel.train.random_state import RankRNGState
from whimbrel.train.run_config import RunConfig
from whimbrel.train.run_directory import clear_directory, events_folder, record_settings
from whimbrel.train.step import Scheduler

__all__ = ["CheckpointMixin", "check_savable", "model_state"]

logger = logging.getLogger(__name__)

_base_records: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

REQUIRED_STATE = ("global_step", "epoch_start_step", "raw_epoch", "num_input_tokens_seen", "total_flos")
"""Fields of TrainerState that a resume needs."""
OPTIONAL_STATE = ("epoch", "best_metric", "best_global_step", "best_model_checkpoint")
"""Fields that a resume restores if the checkpoint has them."""
IGNORED_ENTRIES = ("architectures", "dtype", "problem_type", "torch_dtype", "transformers_version", "use_cache")
"""Config entries that may change on resume: they do not affect the function that the model computes."""
IGNORED_SUBSTRINGS = ("drop", "token_id", "output_", "return_dict", "label2id", "id2label", "initializer")
"""Substrings of the names of such entries; a different dropout rate changes the training, not the model."""


class CheckpointMixin(ABC):
    """The methods of a trainer that save and load: `BaseTrainer` inherits them and sets the attributes below."""

    config: TrainerConfig
    args: Any
    device: torch.device
    world: World
    model: nn.Module | None
    processing_class: Any
    optimizer: Optimizer | None
    lr_scheduler: Scheduler | None
    train_dataloader: Any
    precision: MixedPrecision
    callbacks: Callbacks
    state: TrainerState
    control: TrainerControl
    totals: RunningTotals
    checkpoint_manager: CheckpointManager
    resumed_from: Path | None = None
    """The checkpoint that this trainer was loaded from."""
    deferred: set[str]
    """Actions due at this step ("evaluate", "save") that were deferred because the run had to stop immediately."""

    _recorded_config: TrainerConfig
    """What `config.toml` records."""
    _from_config: bool
    """Whether the trainer was constructed from a config (resumes by default) instead of TrainingArguments."""
    _last_metric: tuple[int, float] | None = None
    """The step and the value of the last best-model metric."""
    _optimizer_states: tuple[OptimizerState, SchedulerState] | None = None
    _history_lines: list[str]
    """`state.log_history` as JSON, so that a save encodes only new entries."""
    _states_being_saved: dict[int, TrainerState]
    _outer: DiLoCo | None = None

    @abstractmethod
    def dispatch(self, event: str, *, state: TrainerState | None = None, **kwargs: Any) -> TrainerControl:
        """Dispatch an event to the callbacks; see BaseTrainer."""

    @abstractmethod
    def flush_metrics(self) -> None:
        """Wait for the metrics of all steps so far; see BaseTrainer."""

    def unwrapped_model(self) -> nn.Module:
        """The model as it was passed in, without wrappers from compiling or sharding."""
        if self.model is None:
            raise ConfigError("expected a model, got none yet: model_init is called when training or evaluation starts")
        return unwrap(self.model)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write only the weights and processing_class; existing files are replaced only with overwrite_output_dir.

        `_internal_call` is ignored; overrides may pass it on.
        """
        del _internal_call
        target = self.config.output_dir if output_dir is None else Path(output_dir)
        with self._outer_parameters():
            component = model_state(self.unwrapped_model(), self.processing_class)
            state = full_state(component.state_dict(), self.world)  # all ranks have parts of it, and rank 0 writes it
        if self.world.is_main:
            export_model(component, state, target, overwrite=self.config.overwrite_output_dir)

    def save_checkpoint(self, checkpoint_path: str | Path | None = None, *, temporary: bool = False) -> Path:
        """Save the complete state. With async_save, files are written in the background; `on_save` follows.

        Waits for the metrics of all steps so far, so that no non-finite state is saved. A step is saved only once. A
        temporary checkpoint is removed once a newer one exists, and is never best.
        """
        self.flush_metrics()
        metric = None
        if self._last_metric is not None and self._last_metric[0] == self.state.global_step and not temporary:
            metric = self._last_metric[1]
        path, step = None if checkpoint_path is None else Path(checkpoint_path), self.state.global_step
        if self.state.best_global_step == step and not temporary:
            self.state.best_model_checkpoint = str(path or find_checkpoint(self.checkpoint_manager.run, step))
        while len(self._states_being_saved) > 3:  # failed saves never remove theirs
            del self._states_being_saved[min(self._states_being_saved)]
        self._states_being_saved[step] = dataclasses.replace(self.state, log_history=list(self.state.log_history))
        settings = json.dumps(to_table(self.config), sort_keys=True)
        metadata: dict[str, Any] = {
            "config_hash": hashlib.sha256(settings.encode()).hexdigest(),
            "model": model_identity(self.unwrapped_model()),
        }
        if isinstance(self.config, RunConfig):
            metadata["micro_batch"] = self.config.train.micro_batch
        if isinstance(self.train_dataloader, DatasetBatches):
            metadata["samples_per_step"] = self.train_dataloader.samples_per_step(self.config.train.accumulation or 1)
        with self._outer_parameters():
            saved = self.checkpoint_manager.save(
                step, self.get_state_components(), metric=metric, metadata=metadata, path=path, temporary=temporary
            )
        if self.callbacks.waits_for_save:
            self.checkpoint_manager.drain()
        return saved

    def load_checkpoint(self, checkpoint_path: str | Path | None = None) -> Path:
        """Load the complete state (None: from the newest complete checkpoint); raises if a component does not match."""
        manager, path = self.checkpoint_manager, None if checkpoint_path is None else Path(checkpoint_path)
        manifest = manager.load(
            self.get_state_components(), path, skip=self.config.resume.skip, check=self._check_checkpoint
        )
        self.resumed_from = path or find_checkpoint(manager.run, manifest.step)
        return self.resumed_from

    def _check_checkpoint(self, path: Path, manifest: Manifest) -> None:
        check_model(self.unwrapped_model(), path, manifest)
        rng, train = manifest.components.get("rng"), self.config.train
        if train.steps is None and rng is not None and len(rng.ranks) != self.world.size:
            saved = manifest.metadata.get("samples_per_step")
            check_samples_per_step(saved, self.train_dataloader, train.accumulation or 1)

    def get_state_components(self) -> list[StateComponent]:
        """All components of a checkpoint, in order. Files from an overridden `save_model` go to their own folder."""
        shared, per_rank = SharingPattern.GLOBAL, SharingPattern.PER_RANK
        components = [StateComponent("model", model_state(self.unwrapped_model(), self.processing_class), shared)]
        if self.optimizer is not None and self.lr_scheduler is not None:
            optimizer, scheduler = self._optimizer_components()
            pattern = shared if self._outer is None else per_rank
            pattern = SharingPattern.SHARDED if optimizer.is_sharded else pattern
            components.append(StateComponent("optimizer", optimizer, pattern, required=False))
            components.append(StateComponent("scheduler", scheduler, shared, required=False))
        if (scales := getattr(self.unwrapped_model(), "fp8", None)) is not None:
            components.append(StateComponent("fp8_scales", scales, shared, required=False))
        if self._outer is not None:  # after the model
            components.append(StateComponent("outer_optimizer", self._outer.outer_state, shared, required=False))
            components.append(StateComponent("worker", self._outer.worker_state, per_rank, required=False))
        components.append(StateComponent("trainer", self, shared))
        if self.train_dataloader is not None:
            pattern = self._get_dataset_sharing_pattern()
            components.append(StateComponent("dataset", self.train_dataloader, pattern, required=False))
        rng = RankRNGState(self.config.train.seed, self.world, self.state)
        components.append(StateComponent("rng", rng, per_rank, required=False))
        components.append(StateComponent("callbacks", self.callbacks, shared, required=False))
        if overrides(self, "save_model"):
            save = partial(self.save_model, **accepted_kwargs(self.save_model, {"_internal_call": True}))
            files = SaveModelFiles(save, self.config.output_dir)
            components.append(StateComponent("save_model", files, shared, required=False))
        return components

    def _outer_parameters(self) -> contextlib.AbstractContextManager[None]:
        """The parameters to evaluate and save: under DiLoCo, those that all workers have in common."""
        return contextlib.nullcontext() if self._outer is None else self._outer.outer_parameters()

    def _start_outer(self) -> None:
        """After a rollback, continue from the outer parameters that were loaded."""
        if self._outer is not None:
            self._outer.start()

    def _finish_outer(self) -> None:
        """At the end of training, leave the parameters that were saved in the model."""
        if self._outer is not None:
            self._outer.finish()
            self._outer = None

    def _optimizer_components(self) -> tuple[OptimizerState, SchedulerState]:
        """The components of optimizer and scheduler, which record their initial settings when they are created."""
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        states = self._optimizer_states
        if states is None or states[0].optimizer is not self.optimizer or states[1].scheduler is not self.lr_scheduler:
            optimizer = OptimizerState(self.optimizer, self.unwrapped_model(), self.world)
            states = self._optimizer_states = optimizer, SchedulerState(self.lr_scheduler)
        return states

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        return SharingPattern.GLOBAL

    def get_process_groups(self) -> dict[str, Any]:
        """Process groups by name, for components with SharingPattern.PER_GROUP."""
        return dict(self.world.groups())

    def state_dict(self) -> dict[str, Any]:
        """Progress, log history (as lines of JSON), running sums and, under fp16, the loss scale."""
        state: dict[str, Any] = {name: getattr(self.state, name) for name in (*REQUIRED_STATE, *OPTIONAL_STATE)}
        history = self.state.log_history
        del self._history_lines[len(history) :]
        self._history_lines += [json.dumps(entry) for entry in history[len(self._history_lines) :]]
        state["log_history"] = "\n".join(self._history_lines)  # one string: a long history does not slow down a save
        state["tally"] = dataclasses.asdict(self.totals)
        if self.deferred:
            state["deferred"] = sorted(self.deferred)
        if self.precision.scaler is not None:
            state["grad_scaler"] = self.precision.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        for name in (*REQUIRED_STATE, *(name for name in OPTIONAL_STATE if name in state)):
            setattr(self.state, name, state[name])
        self._history_lines = state.get("log_history", "").splitlines()
        self.state.log_history = [json.loads(line) for line in self._history_lines]
        self.totals = RunningTotals(**state.get("tally", {}))
        self.deferred = set(state.get("deferred", ()))
        if self.precision.scaler is not None and "grad_scaler" in state:
            self.precision.load_state_dict(state["grad_scaler"])

    def _resume(self) -> None:
        """Load the requested checkpoint, or clear the directory for a restart; record the settings."""
        config = self.config
        if config.resume.path is not None:
            self.load_checkpoint(self._resolve_checkpoint(config.resume.path))
        elif config.overwrite_output_dir and (self._from_config or not config.resume.latest):
            self.world.run_on_main(partial(clear_directory, config.output_dir))
        elif self.world.run_on_main(lambda: bool(step_directories(config.output_dir))):
            self.load_checkpoint()
        if config.log.dir is None:
            self.args.logging_dir = events_folder(config.output_dir) or self.args.logging_dir
        self.checkpoint_manager.clean_up(self.state.global_step)
        if self.state.global_step < self.state.max_steps:
            resumed = self.resumed_from is not None
            self.world.run_on_main(partial(record_settings, self._recorded_config, resumed=resumed))

    def _fetch_from_mirror(self) -> None:
        """Download a checkpoint to resume from if the run directory is gone."""
        config = self.config
        overwrite = config.overwrite_output_dir and (self._from_config or not config.resume.latest)
        if config.resume.path is None:
            self.checkpoint_manager.fetch(resume=config.resume.latest, overwrite=overwrite)

    def _resolve_checkpoint(self, path: Path) -> Path:
        """A checkpoint path, also by its name in `transformers`: `output_dir/checkpoint-500`."""
        run = self.config.output_dir
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match is None or path.exists() or path.parent != run:
            return path
        checkpoint = find_checkpoint(run, int(match[1]))
        return checkpoint if checkpoint.exists() else path

    def _reserve_save_memory(self) -> None:
        """Allocate the pinned memory of asynchronous saves once the optimizer has its state, so that no save waits."""
        if self.config.checkpoint.asynchronous and self.device.type == "cuda":
            self.checkpoint_manager.reserve([c for c in self.get_state_components() if c.key != "save_model"])

    def _dispatch_finished_saves(self) -> bool:
        """Dispatch `on_save` for completed saves, with the state of the saved step; returns whether there were any."""
        finished = list(self.checkpoint_manager.finished())
        for saved in finished:
            state = self._states_being_saved.pop(saved.step, None)
            self.dispatch("on_save", state=state, checkpoint=saved.path, step=saved.step)
        return bool(finished)

    def _load_best(self) -> None:
        """Load the weights of the best checkpoint, if it is not the last step."""
        best = self.checkpoint_manager.best()
        if best is not None and best != find_checkpoint(self.checkpoint_manager.run, self.state.global_step):
            logger.info("Loading the best model from %s", best)
            (model,) = (component for component in self.get_state_components() if component.key == "model")
            self.checkpoint_manager.load_component(model, best)


# Model


def model_state(model: nn.Module, processing_class: Any = None) -> DirectoryStateful:
    """The checkpoint component for a model: a GPT, a transformers or PEFT model, or any other module."""
    check_savable(model)
    if isinstance(model, GPT):
        has_adapters = find_lora_config(model) is not None
        return (GPTAdapterState if has_adapters else GPTState)(model, processing_class)
    if not hasattr(model, "save_pretrained"):
        return ModuleState(model, processing_class)
    if _has_adapters(model):
        return AdapterState(model, processing_class)
    is_transformers_model = any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(model).__mro__
    )
    return (PretrainedState if is_transformers_model else ThirdPartyState)(model, processing_class)


def _has_adapters(model: nn.Module) -> bool:
    """Whether it is a PEFT model, or a transformers model with an adapter."""
    return hasattr(model, "peft_config") and hasattr(model, "save_pretrained")


def check_savable(model: nn.Module) -> None:
    """Raise PrecisionError for quantized weights in a model other than GPT: its own library could not load them.

    Under an adapter they are frozen, and not saved.
    """
    for name, parameter in () if isinstance(model, GPT) else model.named_parameters():
        if isinstance(parameter, QuantizedWeight) and (parameter.requires_grad or not _has_adapters(model)):
            raise PrecisionError(
                f"expected unquantized weights in a {type(model).__name__}, got {parameter.format.name} for {name}: "
                "call dequantize_ on the model, or train a GPT (whimbrel.load_model)"
            )


def export_model(component: DirectoryStateful, state: Any, target: Path, *, overwrite: bool) -> None:
    """Write a model directory to `target`; existing files are replaced only with `overwrite`.

    A new directory appears atomically.
    """
    if not target.exists():
        with atomic_directory(target) as folder:
            component.save_directory(state, folder)
        return
    staged = target / ".model"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        with atomic_directory(staged) as folder:
            component.save_directory(state, folder)
        existing = [path.name for path in staged.iterdir() if (target / path.name).exists()]
        if existing and not overwrite:
            raise ConfigError(
                f"{target} already contains a model ({existing[0]}): set overwrite_output_dir=True to replace it, or "
                "choose another directory"
            )
        for path in sorted(staged.iterdir()):
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


class GPTState:
    """A GPT, written in the Hugging Face layout of its family."""

    def __init__(self, model: GPT, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def state_dict(self) -> dict[str, Tensor | LazyGather]:
        """Parameters; tied parameters appear once, quantized ones as codes and scales."""
        return lazy_gather_state(self._model, weight_state_dict(self._model))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy parameters in place."""
        for name, parameter in weight_state_dict(self._model).items():
            parameter.copy_(state[name])

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write a model directory with the weights in `state`."""
        tokenizer = self._tokenizer if isinstance(self._tokenizer, Tokenizer) else None
        save_model(self._model, folder, tokenizer, state=state)
        if tokenizer is None:
            _save_processing_class(self._tokenizer, folder)

    def load_directory(self, folder: Path) -> None:
        """Load the weights of a model directory in place."""
        load_weights(self._model, folder)


class ModuleState:
    """Any `nn.Module`: its state dict in one safetensors file.

    `save_directory` may run in another thread while the model trains, so it must not call `model.state_dict()`: under
    FSDP2 that reshards the parameters that the forward pass is using.
    """

    FILE = "model.safetensors"

    def __init__(self, model: nn.Module, processing_class: Any) -> None:
        self._model, self._processing_class = model, processing_class
        self._written_names: list[str] = []
        """Names of the saved tensors, shared ones once."""

    def state_dict(self) -> dict[str, Tensor | LazyGather]:
        """Parameters and buffers."""
        state = self._saved()
        self._written_names = self._without_duplicates(state)
        return lazy_gather_state(self._model, state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore parameters and buffers."""
        self._load(state, strict=True)

    def _load(self, state: Mapping[str, Tensor], *, strict: bool = False) -> None:
        if is_distributed_model(self._model):
            load_full_(self._model, state)
        else:
            self._model.load_state_dict(state, strict=strict)

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write one file; shared tensors are written once."""
        folder.mkdir(exist_ok=True)
        write_tensors(folder / self.FILE, {name: state[name] for name in self._written_names})
        _save_processing_class(self._processing_class, folder)

    def load_directory(self, folder: Path) -> None:
        """Load the file; raises CheckpointError if names or shapes differ."""
        stored = load_file(folder / self.FILE)
        if mismatched := sorted(set(stored) ^ set(self._without_duplicates(self._saved()))):
            raise CheckpointError(f"{folder} does not match this model: '{mismatched[0]}' is missing from one of them")
        try:
            self._load(stored)
        except RuntimeError as error:
            raise CheckpointError(f"{folder} does not match this model: {' '.join(str(error).split())}") from error

    def _saved(self) -> dict[str, Tensor]:
        """The tensors that are saved, of which other ranks may have parts."""
        return dict(self._model.state_dict())

    def _without_duplicates(self, state: Mapping[str, Tensor]) -> list[str]:
        """The names in `state`, of each shared tensor only the first."""
        seen: set[int] = set()
        names = []
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if name in state and id(tensor) not in seen:
                names.append(name)
                seen.add(id(tensor))
        return names


class PretrainedState(ModuleState):
    """A `transformers` model, written by its own `save_pretrained`."""

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Call `save_pretrained` with `state` instead of the current weights."""
        self._model.save_pretrained(str(folder), state_dict=dict(state))  # type: ignore[operator]
        _save_processing_class(self._processing_class, folder)

    def load_directory(self, folder: Path) -> None:
        """Load the weights bit-exactly; if the file layout differs from the module's, via `from_pretrained`."""
        stored: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            stored |= load_file(path)
        current = self._model.state_dict()
        self._check_model_type_and_shapes(folder, stored, current)
        names = canonical_names(self._model)
        loaded_names = {names.get(name, name) for name in stored if name in current}
        if set(stored) <= set(current) and {names.get(name, name) for name in current} == loaded_names:
            self._load(stored)
            return
        loaded = type(self._model).from_pretrained(str(folder), dtype="auto")  # type: ignore[attr-defined]
        self.load_state_dict(loaded.state_dict())

    def _check_model_type_and_shapes(
        self, folder: Path, stored: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> None:
        """Called before `from_pretrained`, which would build another model from the files."""
        remedy = "pass the same model, or choose another output_dir"
        saved_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        model_type = getattr(self._model.config, "model_type", None)
        if saved_type != model_type:
            raise CheckpointError(
                f"expected a checkpoint of model_type {model_type}, got {saved_type} in {folder}: {remedy}"
            )
        for name in (name for name in stored if name in current and stored[name].shape != current[name].shape):
            shapes = f"expected {list(current[name].shape)}, got {list(stored[name].shape)}"
            raise CheckpointError(f"{folder} has a model of a different size ('{name}': {shapes}): {remedy}")


class ThirdPartyState(ModuleState):
    """A model with a third-party `save_pretrained`: its files plus our safetensors file of the weights."""

    def state_dict(self) -> dict[str, Tensor | LazyGather]:
        """Parameters and buffers."""
        if is_distributed_model(self._model):
            raise ConfigError(
                f"{type(self._model).__name__}.save_pretrained cannot write parameters that are split across ranks: "
                "use parallel.strategy = ddp"
            )
        return super().state_dict()

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Call the model's `save_pretrained`, then write `model.safetensors` with `state`, which resume loads."""
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

    def state_dict(self) -> dict[str, Tensor | LazyGather]:
        """Trainable parameters and buffers."""
        self._base_record = self._identify_base()  # collective: here, all ranks take part
        self._base_state = {} if is_distributed_model(self._model) else self._model.state_dict()
        return super().state_dict()

    def _saved(self) -> dict[str, Tensor]:
        buffers = {name for name, _ in self._model.named_buffers(remove_duplicate=False)}
        trained = {name for name, p in self._model.named_parameters(remove_duplicate=False) if p.requires_grad}
        return {name: tensor for name, tensor in self._model.state_dict().items() if name in trained | buffers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the trained weights and buffers."""
        self._load(state)

    def save_directory(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapter files, all trained weights, and the fingerprint of the base model."""
        self._save_weights(state, folder)
        formats = {p.format.name for p in self._model.parameters() if isinstance(p, QuantizedWeight)}
        weights = formats.pop() if len(formats) == 1 else None
        base = {**self._base_record, "adapters": self._adapters(), "weights": weights}
        (folder / self.BASE).write_text(json.dumps(base, indent=2) + "\n", encoding="utf-8")
        _save_processing_class(self._processing_class, folder)

    def _save_weights(self, state: Mapping[str, Tensor], folder: Path) -> None:
        self._model.save_pretrained(str(folder), state_dict={**self._base_state, **state})  # type: ignore[operator]
        write_tensors(folder / self.FILE, {name: state[name] for name in self._written_names})

    def _load_weights(self, folder: Path) -> None:
        super().load_directory(folder)

    def load_directory(self, folder: Path) -> None:
        """Load the trained weights; raises if the adapters or the base model differ."""
        base = json.loads((folder / self.BASE).read_text(encoding="utf-8"))
        adapters = self._adapters()
        if mismatched := sorted(base["adapters"].keys() ^ adapters.keys()):
            raise CheckpointError(
                f"{folder} does not match this model: adapter '{mismatched[0]}' exists in only one of them"
            )
        for adapter, settings in adapters.items():
            saved = base["adapters"][adapter]
            for name in (name for name in settings | saved if settings.get(name) != saved.get(name)):
                raise CheckpointError(
                    f"{folder} has an adapter with {name} = {saved.get(name)!r}, but this model has "
                    f"{settings.get(name)!r}: use the same adapter settings, or choose another output_dir"
                )
        if base["fingerprint"] != self._identify_base()["fingerprint"]:
            file = folder / "adapter_config.json"  # PEFT models with several adapters do not have it
            name = (
                json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path") if file.exists() else None
            )
            named = "" if name is None else f" ({name})"
            raise CheckpointError(
                f"{folder} was trained on a base model with different weights: load the same base model{named}, in "
                "the same dtype, or choose another output_dir"
            )
        self._load_weights(folder)

    def _adapters(self) -> dict[str, dict[str, Any]]:
        """The JSON config of every adapter."""
        configs: Mapping[str, Any] = self._model.peft_config  # type: ignore[assignment]
        tables = {name: config.to_dict() for name, config in configs.items()}
        return {
            name: json.loads(
                json.dumps({k: v for k, v in table.items() if k not in self.IGNORED}, default=_json_default)
            )
            for name, table in tables.items()
        }

    def _identify_base(self) -> dict[str, Any]:
        """Entries of `base_model.json` that identify the base model.

        Collective if the model is sharded, and then computed once: it gathers every parameter.
        """
        if self._model not in _base_records or not is_distributed_model(self._model):
            _base_records[self._model] = {"fingerprint": self._base_fingerprint(), **self._base_values()}
        return _base_records[self._model]

    def _base_values(self) -> dict[str, Any]:
        return {}

    def _base_fingerprint(self) -> str:
        """A hash of a few values of each frozen parameter."""
        digest = hashlib.sha256()
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                full = full_tensor(parameter.detach())
                values = (full.codes if isinstance(full, QuantizedWeight) else full).flatten()
                # A copy: FSDP cannot free a gathered parameter whose memory is shared with NumPy.
                sample = values[:: max(1, len(values) // 64)].clone().cpu()
                digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
                digest.update(sample.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class GPTAdapterState(AdapterState):
    """A GPT with LoRA adapters: a PEFT directory with the adapters only, and a fingerprint of the base model."""

    _model: GPT

    def _saved(self) -> dict[str, Tensor]:
        saved = super()._saved()
        if extra := sorted(saved.keys() - {name for name, _ in lora_parameters(self._model)}):
            raise ConfigError(f"expected only adapters to be trained, got '{extra[0]}', which an adapter cannot store")
        return saved

    def _base_values(self) -> dict[str, Any]:
        return {"values": base_values(self._model, full_tensor)}

    def _save_weights(self, state: Mapping[str, Tensor], folder: Path) -> None:
        save_adapter(self._model, folder, state=state)

    def _load_weights(self, folder: Path) -> None:
        load_adapter_weights(self._model, folder)

    def _adapters(self) -> dict[str, dict[str, Any]]:
        table = adapter_config(self._model)
        return {"default": {name: value for name, value in table.items() if name not in self.IGNORED}}


def _json_default(value: Any) -> Any:
    """JSON encoding for other types in adapter configs: sets of names, enums, dtypes."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _save_processing_class(processing_class: Any, folder: Path) -> None:
    """Write the tokenizer or processor to the model directory."""
    if isinstance(processing_class, Tokenizer):
        processing_class.save(folder)
    elif processing_class is not None:
        processing_class.save_pretrained(str(folder))


class SaveModelFiles:
    """Checkpoint component with the files of an overridden `save_model`, in addition to the training state.

    `save_model` runs when the state is captured, since training continues during an asynchronous save; the files are
    then copied into the checkpoint.
    """

    def __init__(self, save: Callable[[str], object], run_dir: Path) -> None:
        self._save, self._run_dir = save, run_dir
        self._staged: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Write the files to a staging folder."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._staged = mkdtemp(prefix=".save_model-", dir=self._run_dir)
        weakref.finalize(self, shutil.rmtree, self._staged, ignore_errors=True)  # a retried save still needs the files
        self._save(self._staged)
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Does nothing: the model component restores the weights."""

    def save_directory(self, state: Any, folder: Path) -> None:
        """Copy the files."""
        del state
        assert self._staged is not None
        shutil.copytree(self._staged, folder, dirs_exist_ok=True)

    def load_directory(self, folder: Path) -> None:
        """Does nothing: see load_state_dict."""


# Identity of the model


def model_identity(model: nn.Module) -> dict[str, Any]:
    """A hash of the parameter shapes, and the model's `config` as JSON; recorded in the manifest for `check_model`."""
    base = getattr(model, "get_base_model", lambda: model)()  # under an adapter
    config: Any = getattr(base, "config", None)
    table: dict[str, Any] = {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        table = dataclasses.asdict(config)
    elif hasattr(config, "to_dict"):
        table = config.to_dict()
    kept = {
        name: value
        for name, value in table.items()
        if not (name.startswith("_") or name in IGNORED_ENTRIES or any(part in name for part in IGNORED_SUBSTRINGS))
    }
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return {"shapes": digest, "settings": json.loads(json.dumps(kept, default=str))}


def check_model(model: nn.Module, path: Path, manifest: Manifest) -> None:
    """Raise if only one of the models has adapters, or if both have the same shapes but different configs.

    Loading detects other shapes.
    """
    saved_adapters = (path / "model" / ADAPTER_CONFIG).is_file()
    if isinstance(model, GPT) and saved_adapters != (find_lora_config(model) is not None):
        expected, remedy = ("adapters", "add") if saved_adapters else ("all weights", "remove")
        raise CheckpointError(
            f"{path} has {expected}, but this run trains {'all weights' if saved_adapters else 'adapters'}: {remedy} "
            f"[lora] (with `whimbrel finetune`, {'omit' if saved_adapters else 'pass'} --full), or choose another "
            "output_dir"
        )
    saved, current = manifest.metadata.get("model"), model_identity(model)
    if not isinstance(saved, dict) or saved["shapes"] != current["shapes"]:
        return
    saved_config, config = saved["settings"], current["settings"]
    for name in (name for name in sorted(saved_config.keys() & config.keys()) if saved_config[name] != config[name]):
        raise CheckpointError(
            f"expected a checkpoint of a model with {name} = {config[name]}, got {saved_config[name]} in {path}: pass "
            "the same model, or choose another output_dir"
        )
