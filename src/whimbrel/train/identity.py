"""Identity of a model beyond its parameter shapes: its config, compared on resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import Manifest

__all__ = ["check_model", "model_identity"]

FREE = ("architectures", "dtype", "problem_type", "torch_dtype", "transformers_version", "use_cache")
"""Config entries that may change on resume: they do not affect the function that the model computes."""
FREE_PARTS = ("drop", "token_id", "output_", "return_dict", "label2id", "id2label", "initializer")
"""Substrings of the names of such entries; a different dropout rate changes the training, not the model."""


def model_identity(model: nn.Module) -> dict[str, Any]:
    """A hash of the parameter shapes, and the `config` as plain JSON if the model has one."""
    base = getattr(model, "get_base_model", lambda: model)()  # under an adapter
    config: Any = getattr(base, "config", None)
    table: dict[str, Any] = {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        table = dataclasses.asdict(config)
    elif hasattr(config, "to_dict"):
        table = config.to_dict()
    kept = {name: value for name, value in table.items() if not _is_free(name)}
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return {"shapes": digest, "settings": json.loads(json.dumps(kept, default=str))}


def check_model(model: nn.Module, path: Path, manifest: Manifest) -> None:
    """Raise if the checkpoint's model has the same shapes but a different config; loading detects other shapes."""
    theirs, ours = manifest.about.get("model"), model_identity(model)
    if not isinstance(theirs, dict) or theirs["shapes"] != ours["shapes"]:
        return
    there, here = theirs["settings"], ours["settings"]
    for name in (name for name in sorted(there.keys() & here.keys()) if there[name] != here[name]):
        raise CheckpointError(
            f"{path} holds a model of {name} = {there[name]}; this one has {here[name]}: give that model, or name "
            "another output_dir"
        )


def _is_free(name: str) -> bool:
    return name.startswith("_") or name in FREE or any(part in name for part in FREE_PARTS)
