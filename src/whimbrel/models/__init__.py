"""The decoder and its configs: `GPT(preset("gpt2"))`."""

from whimbrel.models.config import GPTConfig, RopeScaling
from whimbrel.models.gpt import GPT, IGNORE_INDEX, GPTOutput, resize_vocabulary
from whimbrel.models.layers import Block, KVCache
from whimbrel.models.lora import LoraConfig, apply_lora, lora_disabled, lora_parameters, merge_lora
from whimbrel.models.presets import preset, preset_names

__all__ = [
    "GPT",
    "IGNORE_INDEX",
    "Block",
    "GPTConfig",
    "GPTOutput",
    "KVCache",
    "LoraConfig",
    "RopeScaling",
    "apply_lora",
    "lora_disabled",
    "lora_parameters",
    "merge_lora",
    "preset",
    "preset_names",
    "resize_vocabulary",
]
