"""Hugging Face `config.json` tables to `GPTConfig` and back, one reader and one writer per family.

A family can hold a model exactly when writing its shape and reading it back changes nothing; so there is no second list
of rules that says which models are plain Llama and which are not. What no family can hold is `model_type: "whimbrel"`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, not_one_of, to_table
from whimbrel.models.config import GPTConfig

__all__ = ["canonical", "config_from_hf", "config_to_hf"]

Table = Mapping[str, Any]


class Family(NamedTuple):
    """How one `model_type` spells a shape."""

    architecture: str
    read: Callable[[Table], GPTConfig]
    write: Callable[[GPTConfig], dict[str, Any]]


def config_from_hf(table: Table) -> GPTConfig:
    """The shape that a `config.json` describes; what we cannot run faithfully is refused by name."""
    name = _one_of("model_type", table.get("model_type"), FAMILIES)
    if table.get("quantization_config") is not None:
        raise ConfigError("the model has a quantization_config: load its unquantised weights instead")
    return FAMILIES[name].read(table)


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """The `config.json` of the first family that can hold this shape; `whimbrel` can hold all."""
    name = next(name for name, family in FAMILIES.items() if name == "whimbrel" or _holds(family, config))
    return {"model_type": name, "architectures": [FAMILIES[name].architecture], **FAMILIES[name].write(config)}


def _holds(family: Family, config: GPTConfig) -> bool:
    try:
        return canonical(family.read(family.write(config))) == canonical(config)
    except ConfigError:  # what the family's spelling leaves out makes no model at all
        return False


def canonical(config: GPTConfig) -> GPTConfig:
    """The same function spelled one way: derived sizes written out, settings that change nothing at their defaults."""
    default = GPTConfig()
    windows = config.windows
    return replace(
        config,
        num_kv_heads=config.kv_heads,
        head_size=config.head_width,
        mlp_size=config.mlp_width,
        sliding_window=next((window for window in windows if window), None),
        layer_types=tuple("sliding_attention" if window else "full_attention" for window in windows),
        rope_theta=config.rope_theta if config.position == "rope" else default.rope_theta,
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
"""Their names of non-linearities and ours."""


def _read_gpt2(table: Table) -> GPTConfig:
    for key, needed in {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}.items():
        _only(table, key, needed)
    settings = {
        "context_length": _needed(table, "n_positions"),
        "vocab_size": _needed(table, "vocab_size"),
        "num_layers": _needed(table, "n_layer"),
        "embd_size": _needed(table, "n_embd"),
        "num_heads": _needed(table, "n_head"),
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
        "activation_function": _their_activation(config.activation),
        "tie_word_embeddings": config.tied_head,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _read_llama(table: Table, **own: Any) -> GPTConfig:
    """The tree that Llama, Mistral and Qwen share; `own` is what a family adds."""
    theta, rope_scaling = _read_rope(table)
    if "bias" not in own:
        biases = (bool(table.get("attention_bias", False)), bool(table.get("mlp_bias", False)))
        if biases == (False, True):
            raise ConfigError("mlp_bias without attention_bias is not supported: a model has both or neither")
        own["bias"] = {(False, False): "none", (True, False): "attention", (True, True): "all"}[biases]
    settings = {
        "context_length": _needed(table, "max_position_embeddings"),
        "vocab_size": _needed(table, "vocab_size"),
        "num_layers": _needed(table, "num_hidden_layers"),
        "embd_size": _needed(table, "hidden_size"),
        "num_heads": _needed(table, "num_attention_heads"),
        "num_kv_heads": table.get("num_key_value_heads"),
        "head_size": table.get("head_dim"),
        "mlp_size": _needed(table, "intermediate_size"),
        "norm": "rms",
        "norm_eps": table.get("rms_norm_eps", 1e-6),
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": rope_scaling,
        "activation": _activation(table, "hidden_act", "silu"),
        "gated_mlp": True,
        "tied_head": table.get("tie_word_embeddings", False),
    }
    return build(GPTConfig, settings | own, "model")


def _write_llama(config: GPTConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": config.context_length,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embd_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp_width,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": _their_activation(config.activation),
        "attention_bias": config.bias in ("all", "attention"),
        "mlp_bias": config.bias == "all",
        "tie_word_embeddings": config.tied_head,
        "attention_dropout": 0.0,
        **_write_rope(config),
    }


def _read_mistral(table: Table) -> GPTConfig:
    return _read_llama(table, bias="none", sliding_window=table.get("sliding_window", 4096))


def _write_mistral(config: GPTConfig) -> dict[str, Any]:
    return _write_llama(config) | {"sliding_window": config.sliding_window}


def _read_qwen2(table: Table) -> GPTConfig:
    return _read_llama(table, bias="qkv", **_read_qwen_windows(table))


def _read_qwen3(table: Table) -> GPTConfig:
    return _read_llama({"head_dim": 128, **table}, qk_norm="weighted", **_read_qwen_windows(table))


def _read_qwen_windows(table: Table) -> dict[str, Any]:
    if not table.get("use_sliding_window", False):
        return {}
    layers, first = _count(table, "num_hidden_layers"), _count({"max_window_layers": 28, **table}, "max_window_layers")
    types = table.get("layer_types") or [
        "full_attention" if layer < first else "sliding_attention" for layer in range(layers)
    ]
    return {"sliding_window": _needed(table, "sliding_window"), "layer_types": types}


def _write_qwen(config: GPTConfig) -> dict[str, Any]:
    types = ["sliding_attention" if window else "full_attention" for window in config.windows]
    slides = "sliding_attention" in types
    windows = {"use_sliding_window": slides, "sliding_window": config.sliding_window, "layer_types": types}
    return _write_llama(config) | windows | {"max_window_layers": types.count("full_attention")}


def _read_whimbrel(table: Table) -> GPTConfig:
    return build(GPTConfig, _object(_needed(table, "gpt"), "gpt"), "gpt")


def _write_whimbrel(config: GPTConfig) -> dict[str, Any]:
    return {"gpt": to_table(config), "tie_word_embeddings": config.tied_head, "vocab_size": config.vocab_size}


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, _write_gpt2),
    "llama": Family("LlamaForCausalLM", _read_llama, _write_llama),
    "mistral": Family("MistralForCausalLM", _read_mistral, _write_mistral),
    "qwen2": Family("Qwen2ForCausalLM", _read_qwen2, _write_qwen),
    "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _write_qwen),
    "whimbrel": Family("WhimbrelForCausalLM", _read_whimbrel, _write_whimbrel),
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
"""Their names of what each kind of rotary stretching needs, and ours."""


def _read_rope(table: Table) -> tuple[Any, dict[str, Any] | None]:
    """Base and stretching, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    spelling = "rope_parameters" if table.get("rope_parameters") else "rope_scaling"
    rope = _object(table.get(spelling) or {}, spelling)
    theta = rope.get("rope_theta", table.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", table.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("partial_rotary_factor is not supported: every dimension of a head must be rotated")
    kind = _one_of("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default", *ROPE_SETTINGS))
    if kind == "default":
        return theta, None
    return theta, {"kind": kind} | {ours: _needed(rope, theirs) for theirs, ours in ROPE_SETTINGS[kind].items()}


def _write_rope(config: GPTConfig) -> dict[str, Any]:
    """Both spellings, the newer and the one that older readers know."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None:
        stretch = to_table(config.rope_scaling)
        rope["rope_type"] = stretch["kind"]
        rope |= {theirs: stretch[ours] for theirs, ours in ROPE_SETTINGS[stretch["kind"]].items()}
    stretched = config.rope_scaling is not None
    return {"rope_parameters": rope, "rope_theta": config.rope_theta} | ({"rope_scaling": rope} if stretched else {})


def _activation(table: Table, key: str, default: str) -> str:
    return ACTIVATIONS[_one_of(key, table.get(key, default), ACTIVATIONS)]


def _their_activation(name: str) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


def _needed(table: Table, key: str) -> Any:
    if table.get(key) is None:
        raise ConfigError(f"config.json lacks '{key}', which a model of this kind needs")
    return table[key]


def _count(table: Table, key: str) -> int:
    value = _needed(table, key)
    if type(value) is not int:
        raise ConfigError(f"{key} = {value!r} must be a whole number")
    return value


def _object(value: Any, key: str) -> Table:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} = {value!r} must be an object")
    return value


def _one_of(key: str, value: Any, known: Collection[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(not_one_of(key, value, known))
    return value


def _only(table: Table, key: str, needed: Any) -> None:
    if table.get(key, needed) != needed:
        raise ConfigError(f"{key} = {table[key]!r} is not supported: only {needed!r} is")
