"""Validation and derived sizes of `GPTConfig`, and the presets."""

from __future__ import annotations

import json

import pytest
import torch

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, to_table
from whimbrel.models import GPT, GPTConfig, RopeScaling, preset, preset_names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embd_size": 768, "num_heads": 10}, "multiple of num_heads = 10, got 768"),
        ({"num_heads": 12, "num_kv_heads": 5}, "multiple of num_kv_heads = 5, got 12"),
        ({"num_layers": 3, "layer_types": ("full_attention",) * 2}, "expected 3 layer_types .*, got 2"),
        ({"num_layers": 1, "layer_types": ("sliding_attention",)}, "set sliding_window"),
        ({"num_layers": 0}, "num_layers >= 1, got 0"),
        ({"position": "rope", "head_size": 7}, "even head size .* got 7"),
        ({"rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "requires position = 'rope'"),
        ({"zero_init_head": True}, "set tied_head = false"),
        ({"logit_softcap": 0.0}, "logit_softcap > 0"),
        ({"norm_eps": 0.0}, "norm_eps > 0, got 0.0"),
        ({"rope_theta": -1.0}, "rope_theta > 0, got -1.0"),
        ({"init_std": -1.0}, "init_std >= 0, got -1.0"),
        ({"init_std": float("nan")}, "init_std >= 0, got nan"),
        ({"embd_init_std": -0.1}, "embd_init_std >= 0, got -0.1"),
        ({"norm": "lyer"}, "did you mean 'layer'"),
        ({"num_layers": 10**5}, "num_layers <= 10,000, got 100000"),
        ({"embd_size": 10**12}, "expected embd_size <="),
        ({"activation": "swish"}, "expected one of gelu, gelu_tanh, silu, relu2"),
    ],
)
def test_invalid_configs_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "linear", "factor": 0.5}, "factor >= 1, got 0.5"),
        ({"kind": "llama3", "factor": 8.0, "low_freq_factor": 0.0}, "low_freq_factor > 0, got 0.0"),
        ({"kind": "llama3", "factor": 8.0, "original_context_length": 0}, "context_length > 0, got 0"),
        ({"kind": "yarn", "factor": 2.0}, "expected one of linear, llama3"),
        ({"kind": "llama3", "factor": 8.0, "high_freq_factor": 1.0}, "high_freq_factor > .* = 1.0, got 1.0"),
    ],
)
def test_invalid_rope_scaling_is_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        RopeScaling(**settings)


def test_derived_sizes():
    config = GPTConfig(embd_size=48, num_heads=4, vocab_size=130)
    assert (config.kv_heads, config.head_dim, config.intermediate_size, config.padded_vocab_size) == (4, 12, 192, 256)
    config = GPTConfig(num_layers=2, sliding_window=5, layer_types=("full_attention", "sliding_attention"))
    assert config.windows == (None, 5)
    assert GPTConfig(num_layers=2, sliding_window=5).windows == (5, 5)


def test_json_round_trip():
    config = preset("llama3.1-8b")
    table = json.loads(config.to_json_string())
    assert table["rope_scaling"]["factor"] == 8.0
    assert build(GPTConfig, table) == config == build(GPTConfig, to_table(config))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("qwen2-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        assert GPT(preset(name)).num_parameters() == parameters


def test_every_preset_builds():
    assert {"gpt2-baseline", "gpt2-fast"} <= set(preset_names())
    for name in preset_names():
        with torch.device("meta"):
            assert GPT(preset(name)).num_parameters() > 1e8


def test_unknown_preset_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown preset.*did you mean 'gpt2'"):
        preset("gtp2")


@pytest.mark.parametrize("name", preset_names())
def test_most_parameters_are_matrices(name: str) -> None:
    with torch.device("meta"):
        built = GPT(preset(name)).num_parameters()
    assert 0.99 * built <= preset(name).matrix_parameters <= built
