"""Hugging Face model families: `config.json` to `GPTConfig` and back, and the names of their tensors.

A family can represent a model if converting its config to the family and back changes nothing. This round trip is the
only rule; there is no separate list of conditions per family. A model that no family can represent has
`model_type: "whimbrel"`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, not_one_of, to_table
from whimbrel.models.config import GPTConfig
from whimbrel.models.gpt import GPT

__all__ = ["TensorMapping", "canonical", "config_from_hf", "config_to_hf", "tensor_mappings"]

Table = Mapping[str, Any]


class Family(NamedTuple):
    """Converts between `GPTConfig` and the `config.json` of one `model_type`."""

    architecture: str
    read: Callable[[Table], GPTConfig]
    write: Callable[[GPTConfig], dict[str, Any]]


def config_from_hf(table: Table) -> GPTConfig:
    """Convert a `config.json`; raises ConfigError for settings that `GPT` does not implement."""
    name = _one_of("model_type", table.get("model_type"), FAMILIES)
    if table.get("quantization_config") is not None:
        raise ConfigError("quantization_config is not supported: load the unquantized model instead")
    return FAMILIES[name].read(table)


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """The `config.json` of the first family that can represent this config; `whimbrel` represents all."""
    name = next(name for name, family in FAMILIES.items() if name == "whimbrel" or _round_trips(family, config))
    return {"model_type": name, "architectures": [FAMILIES[name].architecture], **FAMILIES[name].write(config)}


def _round_trips(family: Family, config: GPTConfig) -> bool:
    try:
        return canonical(family.read(family.write(config))) == canonical(config)
    except ConfigError:  # without the settings that the family lacks, the config is invalid
        return False


def canonical(config: GPTConfig) -> GPTConfig:
    """A normalized config, equal for all models that compute the same function.

    Derived sizes are filled in; settings without effect on the function (initialization, dropout, padding) get their
    defaults.
    """
    default = GPTConfig()
    windows = config.windows
    return replace(
        config,
        num_kv_heads=config.kv_heads,
        head_size=config.head_dim,
        mlp_size=config.intermediate_size,
        sliding_window=next((window for window in windows if window), None),
        layer_types=tuple("sliding_attention" if window else "full_attention" for window in windows),
        rope_theta=config.rope_theta if config.position == "rope" else default.rope_theta,
        dropout=0.0,
        init_std=default.init_std,
        embd_init_std=default.embd_init_std,
        zero_init_projections=False,
        zero_init_head=False,
        vocab_multiple=default.vocab_multiple,
    )


ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "relu2": "relu2",
}
"""Activation names: transformers to ours."""


def _read_gpt2(table: Table) -> GPTConfig:
    for key, supported in {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}.items():
        if table.get(key, supported) != supported:
            raise ConfigError(f"expected {key} = {supported!r} (other values are not supported), got {table[key]!r}")
    settings = {
        "context_length": _required(table, "n_positions"),
        "vocab_size": _required(table, "vocab_size"),
        "num_layers": _required(table, "n_layer"),
        "embd_size": _required(table, "n_embd"),
        "num_heads": _required(table, "n_head"),
        "mlp_size": table.get("n_inner"),
        "norm_eps": table.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(table, "activation_function", "gelu_new"),
        "tied_head": table.get("tie_word_embeddings", True),
    }
    return build(GPTConfig, settings, "model")


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "n_positions": config.context_length,
        "vocab_size": config.vocab_size,
        "n_layer": config.num_layers,
        "n_embd": config.embd_size,
        "n_head": config.num_heads,
        "n_inner": config.mlp_size,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": _hf_activation(config.activation),
        "tie_word_embeddings": config.tied_head,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _read_llama(table: Table, **family_settings: Any) -> GPTConfig:
    """The config shared by Llama, Mistral and Qwen; `family_settings` are the settings specific to a family."""
    theta, rope_scaling = _read_rope(table)
    if "bias" not in family_settings:
        biases = (bool(table.get("attention_bias", False)), bool(table.get("mlp_bias", False)))
        if biases == (False, True):
            raise ConfigError("mlp_bias without attention_bias is not supported: set both or neither")
        family_settings["bias"] = {(False, False): "none", (True, False): "attention", (True, True): "all"}[biases]
    settings = {
        "context_length": _required(table, "max_position_embeddings"),
        "vocab_size": _required(table, "vocab_size"),
        "num_layers": _required(table, "num_hidden_layers"),
        "embd_size": _required(table, "hidden_size"),
        "num_heads": _required(table, "num_attention_heads"),
        "num_kv_heads": table.get("num_key_value_heads"),
        "head_size": table.get("head_dim"),
        "mlp_size": _required(table, "intermediate_size"),
        "norm": "rms",
        "norm_eps": table.get("rms_norm_eps", 1e-6),
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": rope_scaling,
        "activation": _activation(table, "hidden_act", "silu"),
        "gated_mlp": True,
        "tied_head": table.get("tie_word_embeddings", False),
    }
    return build(GPTConfig, settings | family_settings, "model")


def _write_llama(config: GPTConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": config.context_length,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embd_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": _hf_activation(config.activation),
        "attention_bias": config.bias in ("all", "attention"),
        "mlp_bias": config.bias == "all",
        "tie_word_embeddings": config.tied_head,
        "attention_dropout": 0.0,
        **_write_rope(config),
    }


def _read_qwen_windows(table: Table) -> dict[str, Any]:
    if not table.get("use_sliding_window", False):
        return {}
    num_layers = _required_int(table, "num_hidden_layers")
    num_full_layers = _required_int({"max_window_layers": 28, **table}, "max_window_layers")
    types = table.get("layer_types") or [
        "full_attention" if layer < num_full_layers else "sliding_attention" for layer in range(num_layers)
    ]
    return {"sliding_window": _required(table, "sliding_window"), "layer_types": types}


def _write_qwen(config: GPTConfig) -> dict[str, Any]:
    types = ["sliding_attention" if window else "full_attention" for window in config.windows]
    sliding = "sliding_attention" in types
    windows = {"use_sliding_window": sliding, "sliding_window": config.sliding_window, "layer_types": types}
    return _write_llama(config) | windows | {"max_window_layers": types.count("full_attention")}


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, _write_gpt2),
    "llama": Family("LlamaForCausalLM", _read_llama, _write_llama),
    "mistral": Family(
        "MistralForCausalLM",
        lambda table: _read_llama(table, bias="none", sliding_window=table.get("sliding_window", 4096)),
        lambda config: _write_llama(config) | {"sliding_window": config.sliding_window},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", lambda table: _read_llama(table, bias="qkv", **_read_qwen_windows(table)), _write_qwen
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        lambda table: _read_llama({"head_dim": 128, **table}, qk_norm="weighted", **_read_qwen_windows(table)),
        _write_qwen,
    ),
    "whimbrel": Family(
        "WhimbrelForCausalLM",
        lambda table: replace(build(GPTConfig, _object(_required(table, "gpt"), "gpt"), "gpt"), dropout=0.0),
        lambda config: {
            "gpt": to_table(replace(config, dropout=0.0)),
            "tie_word_embeddings": config.tied_head,
            "vocab_size": config.vocab_size,
        },
    ),
}


ROPE_SETTINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_context_length",
    },
}
"""Settings of each kind of RoPE scaling: transformers names to ours."""


def _read_rope(table: Table) -> tuple[Any, dict[str, Any] | None]:
    """Theta and scaling, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if table.get("rope_parameters") else "rope_scaling"
    rope = _object(table.get(key) or {}, key)
    theta = rope.get("rope_theta", table.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", table.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("expected partial_rotary_factor = 1 (partial rotation is not supported)")
    kind = _one_of("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default", *ROPE_SETTINGS))
    if kind == "default":
        return theta, None
    return theta, {"kind": kind} | {ours: _required(rope, hf_name) for hf_name, ours in ROPE_SETTINGS[kind].items()}


def _write_rope(config: GPTConfig) -> dict[str, Any]:
    """Both `rope_parameters` and the keys that older versions of transformers read."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = to_table(config.rope_scaling)
        rope["rope_type"] = scaling["kind"]
        rope |= {hf_name: scaling[ours] for hf_name, ours in ROPE_SETTINGS[scaling["kind"]].items()}
    scaled = config.rope_scaling is not None
    return {"rope_parameters": rope, "rope_theta": config.rope_theta} | ({"rope_scaling": rope} if scaled else {})


def _activation(table: Table, key: str, default: str) -> str:
    return ACTIVATIONS[_one_of(key, table.get(key, default), ACTIVATIONS)]


def _hf_activation(name: str) -> str:
    return next(hf_name for hf_name, ours in ACTIVATIONS.items() if ours == name)


def _required(table: Table, key: str) -> Any:
    if table.get(key) is None:
        raise ConfigError(f"missing key '{key}'")
    return table[key]


def _required_int(table: Table, key: str) -> int:
    value = _required(table, key)
    if type(value) is not int:
        raise ConfigError(f"expected an integer for {key}, got {value!r}")
    return value


def _object(value: Any, key: str) -> Table:
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected an object for {key}, got {value!r}")
    return value


def _one_of(key: str, value: Any, known: Collection[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(not_one_of(key, value, known))
    return value


class TensorMapping(NamedTuple):
    """Maps a checkpoint tensor to `rows` of a `GPT` parameter; transposed for the Conv1D layers of GPT-2."""

    hf_name: str
    name: str
    rows: slice = slice(None)
    transposed: bool = False


@functools.cache
def tensor_mappings(model_type: str, config: GPTConfig) -> list[TensorMapping]:
    """Every tensor in a checkpoint of this family; a tied head is stored once, as the embedding."""
    with torch.device("meta"):
        parameters = [name for name, _ in GPT(config).named_parameters()]
    if model_type in ("gpt2", "whimbrel"):
        return [_gpt2_tensor(name, config, conv1d=model_type == "gpt2") for name in parameters]
    return [mapping for name in parameters for mapping in _llama_tensors(name, config)]


def _gpt2_tensor(name: str, config: GPTConfig, *, conv1d: bool) -> TensorMapping:
    """Our parameters have the names of GPT-2; its linear layers (Conv1D) store their weights transposed."""
    if name in ("transformer.wte.weight", "lm_head.weight") or name.startswith("transformer.value_embeddings."):
        return TensorMapping(name, name, slice(config.vocab_size))
    return TensorMapping(name, name, transposed=conv1d and ".c_" in name and name.endswith("weight"))


def _llama_tensors(name: str, config: GPTConfig) -> Iterator[TensorMapping]:
    if name == "lm_head.weight":
        yield TensorMapping(name, name, slice(config.vocab_size))
    elif name == "transformer.wte.weight":
        yield TensorMapping("model.embed_tokens.weight", name, slice(config.vocab_size))
    elif name == "transformer.ln_f.weight":
        yield TensorMapping("model.norm.weight", name)
    else:
        _, _, layer, part = name.split(".", 3)
        module, kind = part.rsplit(".", 1)
        start = 0
        for hf_module, size in _llama_modules(module, config):
            rows = slice(None) if size is None else slice(start, start + size)
            yield TensorMapping(f"model.layers.{layer}.{hf_module}.{kind}", name, rows)
            start += size or 0


def _llama_modules(module: str, config: GPTConfig) -> list[tuple[str, int | None]]:
    """The Llama modules that one of ours fuses, with the number of output rows of each; None: all rows."""
    queries, keys = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
    fused: dict[str, list[tuple[str, int | None]]] = {
        "ln_1": [("input_layernorm", None)],
        "attn.c_attn": [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)],
        "attn.q_norm": [("self_attn.q_norm", None)],
        "attn.k_norm": [("self_attn.k_norm", None)],
        "attn.c_proj": [("self_attn.o_proj", None)],
        "ln_2": [("post_attention_layernorm", None)],
        "mlp.c_fc": [("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)],
        "mlp.c_proj": [("mlp.down_proj", None)],
    }
    return fused[module]
