"""`config.json` conversion and tensor names of each model family."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from whimbrel.models import GPT, GPTConfig, preset, preset_names
from whimbrel.models.families import canonical, config_from_hf, config_to_hf, tensor_mappings

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}
SMALL = GPTConfig(context_length=16, vocab_size=50, num_layers=2, embd_size=16, num_heads=2, **LLAMA)


@pytest.mark.parametrize("name", preset_names())
def test_presets_round_trip_through_config_json(name):
    config = preset(name)
    table = config_to_hf(config)
    assert canonical(config_from_hf(json.loads(json.dumps(table)))) == canonical(config)
    in_transformers = name not in ("gpt2-baseline", "gpt2-fast")
    assert (table["model_type"] != "whimbrel") == in_transformers


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_softcap": 5.0},
        {"qk_norm": "unweighted"},
        {"gated_mlp": False},
        {"norm_affine": False},
        {"bias": "qkv", "qk_norm": "weighted"},
        {"position": "learned"},
    ],
)
def test_other_configs_have_model_type_whimbrel(changes):
    assert config_to_hf(SMALL)["model_type"] == "llama"
    assert config_to_hf(replace(SMALL, **changes))["model_type"] == "whimbrel"


@pytest.mark.parametrize("name", ["gpt2", "gpt2-fast", "llama3-8b", "qwen2-0.5b", "qwen3-0.6b"])
def test_tensor_mappings_cover_every_row_once(name):
    config = preset(name)
    with torch.device("meta"):
        sizes = {key: list(parameter.shape) for key, parameter in GPT(config).named_parameters()}
    covered = dict.fromkeys(sizes, 0)
    for mapping in tensor_mappings(config_to_hf(config)["model_type"], config):
        covered[mapping.name] += len(range(*mapping.rows.indices(sizes[mapping.name][0])))
    vocabulary = ("transformer.wte.weight", "lm_head.weight")
    for key, shape in sizes.items():
        assert covered[key] == (config.vocab_size if key in vocabulary or "value_embeddings" in key else shape[0]), key
