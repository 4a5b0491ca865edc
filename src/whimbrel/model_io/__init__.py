"""Model directories: `load`, `load_model`, `load_tokenizer`, `save_model`, `finalize_model`."""

from whimbrel.model_io.adapter import Adapter, load_adapter, read_adapter, save_adapter
from whimbrel.model_io.finalize import FinalizeResult, HeldOutResult, finalize_adapter, finalize_model
from whimbrel.model_io.load import (
    GenerationConfig,
    LoadedModel,
    ModelSource,
    check_tokenizer,
    load,
    load_base_model,
    load_model,
    load_tokenizer,
    load_weights,
    open_model,
    read_architecture,
    read_config,
    read_generation_config,
)
from whimbrel.model_io.locate import ModelLocation, locate_model
from whimbrel.model_io.save import export_hf, merge_adapter, save_model
from whimbrel.model_io.weights import weight_state_dict

__all__ = [
    "Adapter",
    "FinalizeResult",
    "GenerationConfig",
    "HeldOutResult",
    "LoadedModel",
    "ModelLocation",
    "ModelSource",
    "check_tokenizer",
    "export_hf",
    "finalize_adapter",
    "finalize_model",
    "load",
    "load_adapter",
    "load_base_model",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "locate_model",
    "merge_adapter",
    "open_model",
    "read_adapter",
    "read_architecture",
    "read_config",
    "read_generation_config",
    "save_adapter",
    "save_model",
    "weight_state_dict",
]
