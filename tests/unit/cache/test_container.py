"""Caches of complete models: construction, layouts, padding, crop and reorder."""

from __future__ import annotations

import copy
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, CacheIndexError, ConfigError, WhimbrelError
from whimbrel.cache import Cache, DynamicCache, DynamicLayer, SinkLayer, SlidingLayer, StaticCache, StaticLayer
from whimbrel.models import GPTConfig


def states(tokens: int, *, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, tokens, 4)


def filled(cache: Cache, tokens: int = 6, layers: int = 2) -> Cache:
    for layer in range(layers):
        cache.update(new := states(tokens), -new, layer)
    return cache


def test_a_cache_needs_exactly_one_of_layers_and_a_class():
    layers = [DynamicLayer()]
    assert Cache(layers).layers is layers
    for kwargs, word in (({}, "neither"), ({"layers": layers, "layer_class_to_replicate": DynamicLayer}, "both")):
        with pytest.raises(ValueError, match=f"expected exactly one .* got {word}"):
            Cache(**kwargs)
    assert Cache(layers=[]).layers == []


def test_layers_are_created_as_they_are_first_written_to():
    cache = Cache(layer_class_to_replicate=partial(SlidingLayer, 4))
    assert (len(cache), cache.get_seq_length(), cache.get_mask_sizes(5, 0)) == (0, 0, (5, 0))
    cache.update(states(3), states(3), 2)
    assert [layer.get_seq_length() for layer in cache.layers] == [0, 0, 3]
    assert repr(cache) == "Cache(layers=[SlidingLayer, SlidingLayer, SlidingLayer])"
    assert (cache.get_seq_length(2), cache.get_seq_length(7)) == (3, 0)
    with pytest.raises(CacheError):
        cache.update(states(3), states(2), 4)
    assert len(cache) == 3


@pytest.mark.parametrize("layer_idx", [2, 9, -1])
def test_a_layer_past_a_fixed_list_is_an_index_error_that_names_both(layer_idx: int):
    cache = Cache([DynamicLayer(), DynamicLayer()])
    for call in (cache.update, cache.append):
        with pytest.raises(IndexError, match=f"cache of 2 layers, got {layer_idx}") as caught:
            call(states(1), states(1), layer_idx)
        assert isinstance(caught.value, WhimbrelError)
    with pytest.raises(IndexError, match="cache of 0 layers, got -1"):
        DynamicCache().update(states(1), states(1), -1)


@pytest.mark.parametrize(("layout", "out_layout"), [("bhsd", None), ("bshd", None), ("bshd", "bhsd"), ("bhsd", "bshd")])
def test_input_and_output_layouts(layout: str, out_layout: str | None):
    cache, new = DynamicCache(layout=layout, out_layout=out_layout), states(5)
    given = new if layout == "bhsd" else new.transpose(1, 2)
    for part in given.split(2, dim=layout.index("s")):
        keys, values = cache.update(part, -part, 0)
    expected = new if (out_layout or layout) == "bhsd" else new.transpose(1, 2)
    assert torch.equal(keys, expected)
    assert torch.equal(values, -expected)
    assert torch.equal(cache.layers[0].keys, new)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_states_must_have_four_dimensions_in_any_layout(layout: str):
    cache = DynamicCache(layout=layout)
    for shape in ((4,), (3, 4), (2, 3, 4)):
        with pytest.raises(CacheError, match=f"got {re.escape(str(shape))}"):
            cache.update(torch.zeros(shape), torch.zeros(shape), 0)
    assert cache.layers == []


def test_numpy_bshd_in_bhsd_out_with_copies():
    cache = DynamicCache(layout="bshd", out_layout="bhsd", copy=True)
    given = np.random.default_rng(0).random((2, 5, 3, 4), dtype=np.float32)
    keys, values = cache.update(given, 2 * given, 0)
    assert np.array_equal(values, 2 * keys)
    assert isinstance(keys, np.ndarray)
    assert np.array_equal(keys, given.transpose(0, 2, 1, 3))
    keys[:] = 0
    assert np.array_equal(cache.update(given[:, :1], given[:, :1], 0)[0][:, :, :5], given.transpose(0, 2, 1, 3))


def test_copy_returns_new_memory():
    for copied in (True, False):
        cache = DynamicCache(copy=copied)
        keys, _ = cache.update(states(2), states(2), 0)
        assert (keys.data_ptr() == cache.layers[0].keys.data_ptr()) is not copied


def test_an_operation_that_one_layer_rejects_changes_no_layer():
    cache = filled(Cache([DynamicLayer(), SlidingLayer(3)]), tokens=8)
    with pytest.raises(CacheError, match="SlidingLayer has evicted"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [8, 8]
    cache = filled(Cache([DynamicLayer(), StaticLayer(9)]))
    before = cache.layers[0].keys.clone()
    for change in (lambda: cache.reorder([0]), lambda: cache.repeat(2)):
        with pytest.raises(CacheError, match="expected 2 sequences"):
            change()
        assert torch.equal(cache.layers[0].keys, before)
    cache = filled(Cache([DynamicLayer(), SinkLayer(1, 2)], padding=[0, 0]))
    with pytest.raises(CacheError, match="SinkLayer does not support crop"):
        cache.activate_past_recording()
    assert not cache.is_recording_past(0)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([0, 2], "batch of 2.*got 2"),
        ([-1], "batch of 2.*got -1"),
        ([0.5], "expected a list of integer indices"),
        ([True, False], "expected a list of integer indices"),
        ([[0, 1]], "expected a list of integer indices"),
    ],
)
def test_invalid_indices_are_rejected(index: list[Any], words: str):
    cache = filled(DynamicCache(padding=[0, 1]))
    before = cache.layers[0].keys.clone()
    with pytest.raises(CacheError, match=words) as caught:
        cache.reorder(index)
    assert isinstance(caught.value, CacheIndexError) is ("batch" in words)
    assert torch.equal(cache.layers[0].keys, before)
    with pytest.raises(CacheError, match="count: expected at least 1, got 0"):
        cache.repeat(0)


def test_crop_keeps_or_removes_a_number_of_tokens():
    cache = filled(DynamicCache())
    for length, left in ((9, 6), (0, 6), (-1, 5), (4, 4), (-9, 0)):
        cache.crop(length)
        assert cache.get_seq_length() == left
    assert cache.layers[0].keys.shape == (2, 3, 0, 4)


@pytest.mark.parametrize("make", [torch.tensor, np.int64, np.array, lambda length: torch.tensor([length])])
@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding"])
def test_crop_accepts_any_kind_of_integer_without_keeping_a_reference(make: Any, kind: str):
    layers = {"dynamic": DynamicLayer, "static": partial(StaticLayer, 20), "sliding": partial(SlidingLayer, 20)}
    cache, given = filled(Cache([layers[kind](), layers[kind]()])), make(4)
    cache.crop(given)
    for layer in (0, 1):
        cache.update(states(1), states(1), layer)
    assert given == 4
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [5, 5]
    cache.crop(make(-2))
    assert [type(layer.get_seq_length()) for layer in cache.layers] == [int, int]
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 3]


@pytest.mark.parametrize("value", [2.0, True, None, "2", torch.tensor(2.0), torch.tensor(True), torch.ones(2), [2]])
def test_non_integer_arguments_raise_and_change_nothing(value: Any):
    cache = filled(DynamicCache())
    calls = [
        lambda: cache.crop(value),
        lambda: cache.layers[0].crop(value),
        lambda: cache.repeat(value),
        lambda: cache.get_mask_sizes(value, 0),
        lambda: cache.get_mask_sizes(1, value),
        lambda: cache.get_seq_length(value),
        lambda: cache.update(states(1), states(1), value),
    ]
    for call in calls:
        with pytest.raises(CacheError, match="expected an integer, got") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert [layer.get_seq_length() for layer in cache.layers] == [6, 6]
    for make in (lambda: StaticCache(max_cache_len=value), lambda: SlidingLayer(value), lambda: SinkLayer(value, 4)):
        with pytest.raises(ConfigError, match="expected an integer, got"):
            make()


def test_padding_is_copied_from_the_argument():
    given = torch.tensor([0, 2])
    cache = DynamicCache(padding=given)
    given += 5
    assert cache.positions(1, torch.device("cpu")).tolist() == [[0], [-2]]


@pytest.mark.parametrize("layer", [DynamicLayer, partial(SinkLayer, 1, 2)])
def test_padding_must_match_the_batch_of_every_update(layer: Any):
    cache = Cache([layer()], padding=[0, 2])
    with pytest.raises(CacheError, match="each of the 1 sequences, got 2"):
        cache.update(states(3, batch=1), states(3, batch=1), 0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("batch", [1, 2])
def test_sink_layers_require_padding(batch: int):
    cache, new = Cache([SinkLayer(1, 2)]), states(3, batch=batch)
    with pytest.raises(CacheError, match="padding: expected .* got none"):
        cache.update(new, new, 0)
    assert cache.get_seq_length() == 0
    cache.padding = torch.zeros(batch, dtype=torch.long)
    cache.update(new, new, 0)


def test_padding_shifts_the_positions_of_each_sequence():
    cache = DynamicCache(padding=torch.tensor([0, 2]))
    assert cache.positions(3, torch.device("cpu")).tolist() == [[0, 1, 2], [-2, -1, 0]]
    view = cache.append(states(3), states(3), 0)
    assert view.key_positions.tolist() == [[0, 1, 2], [-2, -1, 0]]
    assert cache.positions(1, torch.device("cpu")).tolist() == [[3], [1]]
    cache.reorder([1, 1, 0])
    assert cache.append(states(1, batch=3), states(1, batch=3), 0).key_positions.tolist() == [
        [-2, -1, 0, 1], [-2, -1, 0, 1], [0, 1, 2, 3],
    ]  # fmt: skip
    cache.repeat(2)
    assert cache.padding.tolist() == [2, 2, 2, 2, 0, 0]
    other = cache.fork()
    other.reorder([5])
    assert (cache.padding.numel(), other.padding.tolist()) == (6, [0])
    with pytest.raises(CacheError, match="each of the 2 sequences, got 6"):
        cache.append(states(1), states(1), 0)
    assert cache.get_seq_length() == 4


def test_padding_with_windows_and_sinks():
    cache = Cache([SlidingLayer(3), SinkLayer(1, 2)], padding=[0, 2])
    for layer in (0, 1):
        cache.append(states(6), states(6), layer)
    assert cache.append(states(1), states(1), 0).key_positions.tolist() == [[4, 5, 6], [2, 3, 4]]
    assert cache.append(states(1), states(1), 1).key_positions.tolist() == [[0, 5, 6], [0, 3, 4]]


def test_without_padding_positions_are_one_dimensional():
    cache = filled(DynamicCache())
    assert cache.positions(2, torch.device("cpu")).tolist() == [6, 7]
    assert cache.append(states(1), states(1), 0).key_positions is None


@pytest.mark.parametrize("padding", [[-1, 0], [0.5], [[1]], torch.tensor(3)])
def test_invalid_padding_is_rejected(padding: Any):
    with pytest.raises(ConfigError, match="expected one token count"):
        DynamicCache(padding=padding)


@pytest.mark.parametrize("options", [{"layout": "bsdh"}, {"out_layout": "sbhd"}])
def test_unknown_layouts_are_rejected(options: dict[str, Any]):
    with pytest.raises(ConfigError, match="expected 'bhsd' or 'bshd'"):
        Cache([], **options)


def test_nbytes_sums_all_layers():
    cache = filled(StaticCache(max_cache_len=10))
    assert cache.nbytes == 2 * 2 * (2 * 3 * 10 * 4 * 4)
    quantized = filled(DynamicCache(codec="int8"))
    assert quantized.nbytes == 2 * 2 * (2 * 3 * 16 * (4 + 2))
    assert DynamicCache().nbytes == 0


def test_forks_and_deep_copies_are_independent():
    cache = filled(DynamicCache(padding=[0, 1]))
    for other in (cache.fork(), copy.deepcopy(cache)):
        assert other.layers is not cache.layers
        before = cache.layers[0].keys.clone()
        other.update(states(1), states(1), 0)
        other.reorder([1])
        assert torch.equal(cache.layers[0].keys, before)
        assert cache.get_seq_length() == 6
        assert other.get_seq_length() == 7


def test_cache_implements_the_transformers_interface():
    cache = filled(Cache([DynamicLayer(), SlidingLayer(4)]))
    assert (cache.is_sliding, cache.is_compileable, cache.is_initialized, cache.is_croppable) == (
        [False, True], False, True, True,
    )  # fmt: skip
    assert (cache.get_query_offset(), cache.get_max_length(0), cache.get_max_length(1), cache.get_max_length()) == (
        6,
        -1,
        4,
        4,
    )
    assert (cache.get_max_length(5), DynamicCache().get_max_length()) == (-1, -1)
    first = cache.layers[0].keys[1].clone()
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0]))
    assert cache.layers[0].keys.shape[0] == 2
    assert torch.equal(cache.layers[0].keys[1], first)
    cache.activate_past_recording()
    assert cache.is_recording_past(1)
    assert not DynamicCache().is_initialized
    empty = DynamicCache(padding=[1, 0])
    empty.repeat(2)
    assert empty.padding.tolist() == [1, 1, 0, 0]


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
def test_layers_follow_the_config(config: Any, expected: list[tuple[str, int]]):
    assert kinds(DynamicCache(config)) == expected
    static = [("StaticLayer", 12) if limit in (-1, 16) else (name, limit) for name, limit in expected]
    assert kinds(StaticCache(config, max_cache_len=12)) == static


def test_layers_created_without_a_config_use_the_codec():
    assert DynamicCache().layers == StaticCache(max_cache_len=4).layers == []
    for cache in (DynamicCache(codec="int8"), StaticCache(max_cache_len=4, codec="int8")):
        assert cache.layer_class_to_replicate().codec.name == "int8"
    config = GPTConfig(num_layers=3, sliding_window=8, layer_types=MIXED)
    for cache in (DynamicCache(config, codec="fp8"), StaticCache(config, max_cache_len=12, codec="fp8")):
        assert {layer.codec.name for layer in cache.layers} == {"fp8"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SimpleNamespace(), "num_hidden_layers .* got SimpleNamespace"),
        (
            SimpleNamespace(num_hidden_layers=1, layer_types=["mamba"]),
            "got 'mamba', which has no keys and values: use transformers.DynamicCache",
        ),
        (SimpleNamespace(num_hidden_layers=2, layer_types=["full_attention"]), "layer_types: expected 2 entries"),
        (
            SimpleNamespace(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=None),
            "sliding_window: expected an integer",
        ),
        (
            SimpleNamespace(num_hidden_layers=1, layer_types=["chunked_attention"]),
            "attention_chunk_size: expected an integer",
        ),
        (SimpleNamespace(num_hidden_layers=2, num_kv_shared_layers=3), "num_kv_shared_layers: expected at most 2"),
    ],
)
def test_incomplete_configs_are_rejected(config: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        DynamicCache(config)


@pytest.mark.parametrize("config", [None, GPTConfig(num_layers=1)], ids=["lazy", "config"])
def test_invalid_layer_settings_are_rejected_by_the_constructor(config: Any):
    with pytest.raises(ConfigError, match="codec: expected .* got 'int3'"):
        DynamicCache(config, codec="int3")
    with pytest.raises(ConfigError, match="max_cache_len: expected at least 1, got 0"):
        StaticCache(config, max_cache_len=0)
