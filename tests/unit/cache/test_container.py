"""The layers of a cache as one: how it is built, laid out, padded, cropped and reordered."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, CacheIndexError, ConfigError, WhimbrelError
from whimbrel.cache import Cache, DynamicCache, DynamicLayer, SinkLayer, SlidingLayer, StaticCache, StaticLayer


def states(tokens: int, *, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, tokens, 4)


def filled(cache: Cache, tokens: int = 6, layers: int = 2) -> Cache:
    for layer in range(layers):
        cache.update(new := states(tokens), -new, layer)
    return cache


def test_exactly_one_of_layers_and_a_class():
    layers = [DynamicLayer()]
    assert Cache(layers).layers is layers
    for given, word in (({}, "neither"), ({"layers": layers, "layer_class_to_replicate": DynamicLayer}, "both")):
        with pytest.raises(
            ValueError, match=f"{word} of layers and layer_class_to_replicate was given: give exactly one"
        ):
            Cache(**given)
    assert Cache(layers=[]).layers == []


def test_layers_of_a_class_appear_as_they_are_written():
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
        with pytest.raises(IndexError, match=f"layer_idx = {layer_idx} is no layer of a cache of 2") as caught:
            call(states(1), states(1), layer_idx)
        assert isinstance(caught.value, WhimbrelError)
    with pytest.raises(IndexError, match="layer_idx = -1 is no layer of a cache of 0"):
        DynamicCache().update(states(1), states(1), -1)


@pytest.mark.parametrize(("layout", "out_layout"), [("bhsd", None), ("bshd", None), ("bshd", "bhsd"), ("bhsd", "bshd")])
def test_layouts_in_and_out(layout: str, out_layout: str | None):
    cache, new = DynamicCache(layout=layout, out_layout=out_layout), states(5)
    given = new if layout == "bhsd" else new.transpose(1, 2)
    for part in given.split(2, dim=layout.index("s")):
        keys, values = cache.update(part, -part, 0)
    expected = new if (out_layout or layout) == "bhsd" else new.transpose(1, 2)
    assert torch.equal(keys, expected)
    assert torch.equal(values, -expected)
    assert torch.equal(cache.layers[0].keys, new)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_states_that_are_not_of_four_dimensions_are_refused_in_any_layout(layout: str):
    cache = DynamicCache(layout=layout)
    for shape in ((4,), (3, 4), (2, 3, 4)):
        with pytest.raises(CacheError, match=f"keys of shape {re.escape(str(shape))}"):
            cache.update(torch.zeros(shape), torch.zeros(shape), 0)
    assert cache.layers == []


def test_the_reference_contract_with_numpy():
    cache = DynamicCache(layout="bshd", out_layout="bhsd", copy=True)
    given = np.random.default_rng(0).random((2, 5, 3, 4), dtype=np.float32)
    keys, values = cache.update(given, 2 * given, 0)
    assert np.array_equal(values, 2 * keys)
    assert isinstance(keys, np.ndarray)
    assert np.array_equal(keys, given.transpose(0, 2, 1, 3))
    keys[:] = 0
    assert np.array_equal(cache.update(given[:, :1], given[:, :1], 0)[0][:, :, :5], given.transpose(0, 2, 1, 3))


def test_a_copy_is_nobody_elses():
    for copied in (True, False):
        cache = DynamicCache(copy=copied)
        keys, _ = cache.update(states(2), states(2), 0)
        assert (keys.data_ptr() == cache.layers[0].keys.data_ptr()) is not copied


def test_what_is_refused_by_one_layer_is_done_to_none():
    cache = filled(Cache([DynamicLayer(), SlidingLayer(3)]), tokens=8)
    with pytest.raises(CacheError, match="SlidingLayer has let go"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [8, 8]
    cache = filled(Cache([DynamicLayer(), StaticLayer(9)]))
    before = cache.layers[0].keys.clone()
    for change in (lambda: cache.reorder([0]), lambda: cache.repeat(2)):
        with pytest.raises(CacheError, match="memory for 2 rows"):
            change()
        assert torch.equal(cache.layers[0].keys, before)
    cache = filled(Cache([DynamicLayer(), SinkLayer(1, 2)], padding=[0, 0]))
    with pytest.raises(CacheError, match="SinkLayer cannot take tokens back"):
        cache.activate_past_recording()
    assert not cache.is_recording_past(0)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([0, 2], "row 2 is not in a cache of 2 rows"),
        ([-1], "row -1 is not in a cache of 2 rows"),
        ([0.5], "named by a list of whole numbers"),
        ([True, False], "named by a list of whole numbers"),
        ([[0, 1]], "named by a list of whole numbers"),
    ],
)
def test_rows_that_are_not_there_are_refused(index: list[Any], words: str):
    cache = filled(DynamicCache(padding=[0, 1]))
    before = cache.layers[0].keys.clone()
    with pytest.raises(CacheError, match=words) as caught:
        cache.reorder(index)
    assert isinstance(caught.value, CacheIndexError) is ("not in" in words)
    assert torch.equal(cache.layers[0].keys, before)
    with pytest.raises(CacheError, match="count: expected at least 1, got 0"):
        cache.repeat(0)


def test_crop_keeps_so_many_or_takes_back_so_many():
    cache = filled(DynamicCache())
    for length, left in ((9, 6), (0, 6), (-1, 5), (4, 4), (-9, 0)):
        cache.crop(length)
        assert cache.get_seq_length() == left
    assert cache.layers[0].keys.shape == (2, 3, 0, 4)


@pytest.mark.parametrize("make", [torch.tensor, np.int64, np.array, lambda length: torch.tensor([length])])
@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding"])
def test_crop_takes_integers_of_any_kind_and_keeps_none_of_them(make: Any, kind: str):
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


@pytest.mark.parametrize("given", [2.0, True, None, "2", torch.tensor(2.0), torch.tensor(True), torch.ones(2), [2]])
def test_non_integer_arguments_raise_and_change_nothing(given: Any):
    cache = filled(DynamicCache())
    calls = [
        lambda: cache.crop(given),
        lambda: cache.layers[0].crop(given),
        lambda: cache.repeat(given),
        lambda: cache.get_mask_sizes(given, 0),
        lambda: cache.get_mask_sizes(1, given),
        lambda: cache.get_seq_length(given),
        lambda: cache.update(states(1), states(1), given),
    ]
    for call in calls:
        with pytest.raises(CacheError, match="expected an integer, got") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert [layer.get_seq_length() for layer in cache.layers] == [6, 6]
    for make in (lambda: StaticCache(max_cache_len=given), lambda: SlidingLayer(given), lambda: SinkLayer(given, 4)):
        with pytest.raises(ConfigError, match="expected an integer, got"):
            make()


def test_padding_is_a_copy_of_the_tensor_that_was_given():
    given = torch.tensor([0, 2])
    cache = DynamicCache(padding=given)
    given += 5
    assert cache.positions(1, torch.device("cpu")).tolist() == [[0], [-2]]


@pytest.mark.parametrize("layer", [DynamicLayer, partial(SinkLayer, 1, 2)])
def test_padding_counts_the_rows_of_every_update(layer: Any):
    cache = Cache([layer()], padding=[0, 2])
    with pytest.raises(CacheError, match="expected one count for each of the 1 rows of the keys, got 2"):
        cache.update(states(3, batch=1), states(3, batch=1), 0)
    assert cache.get_seq_length() == 0


def test_sinks_of_several_rows_have_to_know_the_padding():
    cache = Cache([SinkLayer(1, 2)])
    with pytest.raises(CacheError, match=r"keeps the first tokens of each row and got 2 rows: give the cache padding"):
        cache.update(states(3), states(3), 0)
    assert cache.get_seq_length() == 0
    cache.update(states(3, batch=1), states(3, batch=1), 0)


def test_padding_moves_positions_row_by_row():
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
    with pytest.raises(CacheError, match="padding: expected one count for each of the 2 rows of the keys, got 6"):
        cache.append(states(1), states(1), 0)
    assert cache.get_seq_length() == 4


def test_padding_and_windows_and_sinks():
    cache = Cache([SlidingLayer(3), SinkLayer(1, 2)], padding=[0, 2])
    for layer in (0, 1):
        cache.append(states(6), states(6), layer)
    assert cache.append(states(1), states(1), 0).key_positions.tolist() == [[4, 5, 6], [2, 3, 4]]
    assert cache.append(states(1), states(1), 1).key_positions.tolist() == [[0, 5, 6], [0, 3, 4]]


def test_without_padding_positions_are_a_list():
    cache = filled(DynamicCache())
    assert cache.positions(2, torch.device("cpu")).tolist() == [6, 7]
    assert cache.append(states(1), states(1), 0).key_positions is None


@pytest.mark.parametrize("padding", [[-1, 0], [0.5], [[1]], torch.tensor(3)])
def test_padding_that_cannot_be_is_refused(padding: Any):
    with pytest.raises(ConfigError, match="one count of tokens for each row"):
        DynamicCache(padding=padding)


@pytest.mark.parametrize("options", [{"layout": "bsdh"}, {"out_layout": "sbhd"}])
def test_layouts_that_are_not_known_are_refused(options: dict[str, Any]):
    with pytest.raises(ConfigError, match="is not known: give 'bhsd' or 'bshd'"):
        Cache([], **options)


def test_bytes_are_those_of_all_layers():
    cache = filled(StaticCache(max_cache_len=10))
    assert cache.nbytes == 2 * 2 * (2 * 3 * 10 * 4 * 4)
    quantized = filled(DynamicCache(codec="int8"))
    assert quantized.nbytes == 2 * 2 * (2 * 3 * 16 * (4 + 2))
    assert DynamicCache().nbytes == 0


def test_a_fork_and_a_deep_copy_go_on_alone():
    cache = filled(DynamicCache(padding=[0, 1]))
    for other in (cache.fork(), copy.deepcopy(cache)):
        assert other.layers is not cache.layers
        before = cache.layers[0].keys.clone()
        other.update(states(1), states(1), 0)
        other.reorder([1])
        assert torch.equal(cache.layers[0].keys, before)
        assert cache.get_seq_length() == 6
        assert other.get_seq_length() == 7


def test_the_names_of_transformers():
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
