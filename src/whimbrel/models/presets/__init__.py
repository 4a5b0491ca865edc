"""Configs of well-known models, as TOML files in this directory."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, did_you_mean, load_toml
from whimbrel.models.config import GPTConfig

__all__ = ["preset", "preset_names"]


def preset(name: str) -> GPTConfig:
    """The config of a model by name, for instance `gpt2` or `qwen3-0.6b`."""
    if name not in preset_names():
        raise ConfigError(f"unknown preset '{name}'{did_you_mean(name, preset_names())}")
    with resources.as_file(resources.files(__name__) / f"{name}.toml") as path:
        return build(GPTConfig, load_toml(path), name)


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(Path(file.name).stem for file in resources.files(__name__).iterdir() if file.name.endswith(".toml"))
