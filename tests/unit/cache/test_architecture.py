"""The layers of a cache by the config of a model, ours or of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.cache import DynamicCache, StaticCache
from whimbrel.models import GPTConfig


def kinds(cache: DynamicCache | StaticCache) -> list[tuple[str, int]]:
    return [(repr(layer), layer.get_max_length()) for layer in cache.layers]


GROWS, SLIDES = ("DynamicLayer", -1), ("SlidingLayer", 8)
MIXED = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTConfig(num_layers=2), [GROWS] * 2),
        (GPTConfig(num_layers=2, sliding_window=8), [SLIDES] * 2),
        (GPTConfig(num_layers=3, sliding_window=8, layer_types=MIXED), [GROWS, SLIDES, GROWS]),
        (SimpleNamespace(num_hidden_layers=2), [GROWS] * 2),
        (SimpleNamespace(num_hidden_layers=2, sliding_window=8), [SLIDES] * 2),
        (SimpleNamespace(num_hidden_layers=2, sliding_window=None, attention_chunk_size=8), [SLIDES] * 2),
        (
            SimpleNamespace(
                num_hidden_layers=3,
                layer_types=["chunked_attention", "full_attention", "sliding_attention"],
                attention_chunk_size=16,
                sliding_window=8,
            ),
            [("SlidingLayer", 16), GROWS, SLIDES],
        ),
        (SimpleNamespace(num_hidden_layers=3, num_kv_shared_layers=2, sliding_window=8), [SLIDES]),
        (SimpleNamespace(num_hidden_layers=3, num_kv_shared_layers=0), [GROWS] * 3),
        (SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2)), [GROWS] * 2),
    ],
)
def test_layers_are_those_of_the_config(config: Any, expected: list[tuple[str, int]]):
    assert kinds(DynamicCache(config)) == expected
    static = [("StaticLayer", 12) if limit in (-1, 16) else (name, limit) for name, limit in expected]
    assert kinds(StaticCache(config, max_cache_len=12)) == static


def test_without_a_config_layers_appear_and_take_the_codec():
    assert DynamicCache().layers == StaticCache(max_cache_len=4).layers == []
    for cache in (DynamicCache(codec="int8"), StaticCache(max_cache_len=4, codec="int8")):
        assert cache.layer_class_to_replicate().codec.name == "int8"
    config = GPTConfig(num_layers=3, sliding_window=8, layer_types=MIXED)
    for cache in (DynamicCache(config, codec="fp8"), StaticCache(config, max_cache_len=12, codec="fp8")):
        assert {layer.codec.name for layer in cache.layers} == {"fp8"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SimpleNamespace(), "SimpleNamespace has no num_hidden_layers"),
        (
            SimpleNamespace(num_hidden_layers=1, layer_types=["mamba"]),
            "got 'mamba', whose state is not keys and values: use transformers.DynamicCache",
        ),
        (SimpleNamespace(num_hidden_layers=2, layer_types=["full_attention"]), "names 1 layers and the model has 2"),
        (
            SimpleNamespace(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=None),
            "'sliding_attention' and sliding_window = None: give sliding_window",
        ),
        (SimpleNamespace(num_hidden_layers=1, layer_types=["chunked_attention"]), "give attention_chunk_size"),
        (SimpleNamespace(num_hidden_layers=2, num_kv_shared_layers=3), "shared_layers = 3 of a model with 2 layers"),
    ],
)
def test_configs_that_say_too_little_are_refused(config: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        DynamicCache(config)


@pytest.mark.parametrize("config", [None, GPTConfig(num_layers=1)], ids=["lazy", "config"])
def test_what_no_layer_can_be_is_refused_at_once(config: Any):
    with pytest.raises(ConfigError, match="codec: expected .* got 'int3'"):
        DynamicCache(config, codec="int3")
    with pytest.raises(ConfigError, match="max_cache_len: expected at least 1, got 0"):
        StaticCache(config, max_cache_len=0)
