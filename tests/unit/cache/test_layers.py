"""Every kind of cache layer: its contract, what it rejects, and what attention reads from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache import Cache, CacheLayerMixin, DynamicLayer, SinkLayer, SlidingLayer, StaticLayer

KINDS = {
    "DynamicLayer": DynamicLayer,
    "StaticLayer": lambda **options: StaticLayer(64, **options),
    "SlidingLayer": lambda **options: SlidingLayer(5, **options),
    "SinkLayer": lambda **options: SinkLayer(2, 5, **options),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def states(tokens: int, *, batch: int = 2, heads: int = 3, size: int = 4) -> Tensor:
    return torch.randn(batch, heads, tokens, size)


class Minimal(CacheLayerMixin):
    """Only the two required methods."""

    def lazy_initialization(self, key_states: Tensor) -> None:
        self.keys = self.values = key_states[:, :, :0]
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        self.given = cache_kwargs
        self.keys = torch.cat((self.keys, key_states), dim=2)
        self.values = torch.cat((self.values, value_states), dim=2)
        return self.keys, self.values


def test_a_layer_takes_dtype_device_and_shape_from_its_first_update(kind: str):
    layer = KINDS[kind]()
    assert repr(layer) == kind
    assert (layer.keys, layer.values, layer.dtype, layer.device) == (None, None, None, None)
    assert (layer.is_initialized, layer.get_seq_length(), layer.nbytes, layer.batch_size) == (False, 0, 0, None)
    new = states(3).to(torch.bfloat16)
    keys, values = layer.update(new, -new)
    assert torch.equal(keys[:, :, :3], new)
    assert torch.equal(values[:, :, :3], -new)
    assert (layer.dtype, layer.device) == (torch.bfloat16, new.device)
    assert layer.keys.shape == layer.values.shape == keys.shape == (2, 3, 64 if kind == "StaticLayer" else 3, 4)
    assert (layer.is_initialized, layer.get_seq_length(), layer.batch_size) == (True, 3, 2)


def test_the_mixin_is_abstract():
    with pytest.raises(TypeError, match="lazy_initialization.*update"):
        CacheLayerMixin()
    assert CacheLayerMixin.__abstractmethods__ == {"lazy_initialization", "update"}


def test_lazy_initialization_fixes_the_shape_of_updates(kind: str):
    layer = KINDS[kind]()
    layer.lazy_initialization(states(7))
    assert (layer.dtype, layer.get_seq_length(), layer.is_initialized) == (torch.float32, 0, True)
    assert layer.keys.shape == layer.values.shape == (2, 3, 64 if kind == "StaticLayer" else 0, 4)
    assert not layer.keys.any()
    with pytest.raises(CacheError, match="expected .* batch 2"):
        layer.update(states(1, batch=4), states(1, batch=4))
    keys, _ = layer.update(new := states(2), states(2))
    assert torch.equal(keys[:, :, :2], new)


def test_keys_and_values_may_have_different_heads(kind: str):
    layer = KINDS[kind]()
    for tokens in (2, 1, 9, 1):
        keys, values = layer.update(states(tokens, heads=1, size=6), states(tokens, heads=3, size=2))
    assert keys.shape[1::2] == (1, 6)
    assert values.shape[1::2] == (3, 2)
    assert keys.size(2) == values.size(2)


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        (states(1, batch=3), states(1, batch=3), "expected .*batch 2.* got .*batch 3"),
        (states(1, heads=2), states(1, heads=2), "expected .*3 heads of 4.* got .*2 heads of 4"),
        (states(1, size=8), states(1), "got .*3 heads of 8 .values 3 heads of 4."),
        (states(2), states(1), r"got \(2, 3, 2, 4\) and \(2, 3, 1, 4\)"),
        (states(1)[0], states(1)[0], r"expected .* \(batch, heads, tokens, head size\)"),
        (states(1).to("meta"), states(1), "one dtype and device, got .*on meta and .*on cpu"),
    ],
)
def test_mismatched_states_are_rejected_and_change_nothing(kind: str, keys: Tensor, values: Tensor, words: str):
    layer = KINDS[kind]()
    first, _ = layer.update(states(3), states(3))
    before = first.clone()
    with pytest.raises(CacheError, match=words) as caught:
        layer.update(keys, values)
    assert "\n" not in str(caught.value)
    assert layer.get_seq_length() == 3
    assert torch.equal(layer.keys, before)


def test_unknown_cache_kwargs_are_ignored(kind: str):
    layer = KINDS[kind]()
    layer.update(states(1), states(1), {"sin": 1, "cache_position": torch.arange(1)})
    assert layer.get_seq_length() == 1


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_layer_filled_in_inference_mode_can_be_used_outside_and_back(kind: str, codec: str):
    layer = KINDS[kind](codec=codec)
    with torch.inference_mode():
        layer.update(states(3), states(3))
        layer.reorder(torch.tensor([1, 0]))
    layer.update(states(9), states(9))
    layer.reorder(torch.tensor([1, 0]))
    other = layer.fork()
    with torch.inference_mode():
        layer.update(states(1), states(1))
        other.update(states(1), states(1))
    for each in (layer, other):
        keys, _ = each.update(states(1), states(1))
        assert not keys.is_inference()
        assert each.get_seq_length() == 14


def test_the_memory_of_a_static_layer_never_moves():
    layer, addresses = StaticLayer(64), set()
    for tokens in (1, 7, 30):
        keys, values = layer.update(states(tokens), states(tokens))
        addresses.add((keys.data_ptr(), values.data_ptr()))
        layer.reorder(torch.tensor([1, 0]))
        layer.crop(-2)
    layer.reset()
    assert layer.get_seq_length() == 0
    assert not layer.keys.any()
    keys, values = layer.update(states(64), states(64))
    assert {(keys.data_ptr(), values.data_ptr())} == addresses
    assert layer.nbytes == 2 * keys.nbytes
    assert layer.get_max_length() == 64


def test_a_static_layer_returns_its_buffer_from_update_and_filled_slots_from_append():
    layer, tokens = StaticLayer(8), states(6)
    assert layer.get_mask_sizes(6) == (8, 0)
    keys, values = layer.update(tokens, -tokens)
    assert torch.equal(keys[:, :, :6], tokens)
    assert torch.equal(values[:, :, :6], -tokens)
    assert not keys[:, :, 6:].any()
    assert torch.equal(layer.view().keys, tokens)
    view = layer.append(tokens[:, :, :1], tokens[:, :, :1])
    assert (view.keys.size(2), view.key_positions) == (7, None)
    layer.update(torch.full_like(tokens[:, :, :1], float("nan")), tokens[:, :, :1])
    layer.crop(3)
    assert not layer.keys[:, :, 3:].any()  # masked slots must be finite: 0 * NaN is NaN


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_compiled_code_advances_the_length_of_a_static_layer(codec: str):
    torch._dynamo.reset()
    layer, eager_layer, tokens = StaticLayer(16, codec=codec), StaticLayer(16, codec=codec), states(12)
    update = torch.compile(lambda new: layer.update(new, -new), backend="eager", fullgraph=True)
    append = torch.compile(lambda new: layer.append(new, -new), backend="eager", fullgraph=True)
    for start, step in ((0, layer.update), (5, update), (6, update), (7, append), (8, layer.append), (9, update)):
        new = tokens[:, :, start : start + 1] if start else tokens[:, :, :5]
        step(new) if step in (update, append) else step(new, -new)
        eager_layer.update(new, -new)
    assert torch.equal(layer.keys, eager_layer.keys)
    assert layer.fork().get_seq_length() == layer.get_seq_length() == eager_layer.get_seq_length() == 10
    layer.crop(-3)
    eager_layer.crop(-3)
    keys, values = update(tokens[:, :, 10:11])
    for got, expected in zip(
        (keys, values), eager_layer.update(tokens[:, :, 10:11], -tokens[:, :, 10:11]), strict=True
    ):
        assert torch.equal(got, expected)
    positions = append(tokens[:, :, 11:]).key_positions
    assert positions.tolist() == [*range(9), *[-1] * 7]
    with pytest.raises(CacheError, match="at most 7 .*got 8"):
        layer.update(states(8), states(8))
    layer.reset()
    assert layer.get_seq_length() == 0


def test_a_window_slides_over_updates_of_any_length():
    layer, tokens = SlidingLayer(5), states(60)
    start = 0
    for count in (1, 1, 9, 1, 2, 7, 3, 20, 1, 15):
        before = min(start, 4)
        keys, _ = layer.update(tokens[:, :, start : start + count], tokens[:, :, start : start + count])
        start += count
        assert torch.equal(keys, tokens[:, :, start - count - before : start])
        assert torch.equal(layer.keys, tokens[:, :, max(0, start - 5) : start])
    assert layer.get_max_length() == 5


def test_a_window_can_crop_one_token_always_and_more_after_past_recording():
    layer, tokens = SlidingLayer(5), states(40)
    layer.update(tokens[:, :, :20], tokens[:, :, :20])
    layer.crop(-1)
    with pytest.raises(CacheError, match="evicted tokens .* length 18 of 19"):
        layer.crop(-1)
    layer.activate_past_recording()
    keys, _ = layer.update(tokens[:, :, 19:30], tokens[:, :, 19:30])
    assert torch.equal(keys, tokens[:, :, 15:30])
    layer.crop(21)
    keys, _ = layer.update(tokens[:, :, 21:22], tokens[:, :, 21:22])
    assert torch.equal(keys, tokens[:, :, 17:22])


def test_sinks_stay_and_report_their_positions():
    layer, tokens = SinkLayer(2, 3), states(30)
    assert layer.append(tokens[:, :, :4], tokens[:, :, :4]).key_positions is None
    start = 4
    for count in (1, 1, 1, 3, 1, 6, 1):
        view = layer.append(tokens[:, :, start : start + count], tokens[:, :, start : start + count])
        start += count
        positions = view.key_positions
        expected = list(range(start)) if start <= 5 else [0, 1, *range(start - count - 2, start)]
        assert (list(range(view.keys.size(2))) if positions is None else positions.tolist()) == expected
        assert torch.equal(view.keys, tokens[:, :, expected])
    assert torch.equal(layer.keys, tokens[:, :, [0, 1, start - 3, start - 2, start - 1]])


def test_sinks_are_kept_when_an_update_exceeds_the_window():
    layer, tokens = SinkLayer(3, 4), states(30)
    layer.update(tokens[:, :, :2], tokens[:, :, :2])
    keys, _ = layer.update(tokens[:, :, 2:20], tokens[:, :, 2:20])
    assert torch.equal(keys, tokens[:, :, :20])
    assert torch.equal(layer.keys, tokens[:, :, [0, 1, 2, 16, 17, 18, 19]])
    with pytest.raises(CacheError, match="expected at least 1 token, got 0"):
        layer.update(tokens[:, :, :0], tokens[:, :, :0])
    with pytest.raises(CacheError, match="SinkLayer does not support crop"):
        layer.activate_past_recording()


@pytest.mark.parametrize("empty", [lambda layer: layer.crop(-99), lambda layer: layer.reset()])
def test_an_emptied_layer_saves_new_sinks(empty: Any):
    layer, tokens = SinkLayer(2, 3), states(40)
    layer.update(tokens[:, :, :20], tokens[:, :, :20])
    empty(layer)
    for token in tokens[:, :, 20:].split(1, dim=2):
        keys, _ = layer.update(token, token)
    assert torch.equal(keys, tokens[:, :, [20, 21, 37, 38, 39]])


def test_an_update_without_tokens_changes_nothing():
    layer = DynamicLayer()
    layer.update(new := states(2), new)
    keys, _ = layer.update(new[:, :, :0], new[:, :, :0])
    assert torch.equal(keys, new)


def test_a_custom_layer_rejects_operations_it_does_not_implement():
    layer = Minimal()
    cache = Cache([DynamicLayer(), layer])
    for index in (0, 1):
        cache.update(states(3), states(3), index, {"mine": 1})
    assert layer.given == {"mine": 1}
    assert cache.append(states(1), states(1), 1).keys.shape == (2, 3, 4, 4)
    assert cache.get_mask_sizes(2, 1) == (6, 0)
    assert (layer.batch_size, layer.get_max_length(), repr(layer)) == (2, -1, "Minimal")
    assert layer.nbytes == 2 * layer.keys.nbytes
    for operation in (
        lambda: cache.crop(1),
        lambda: cache.reorder([1, 0]),
        lambda: cache.repeat(2),
        cache.activate_past_recording,
    ):
        with pytest.raises(CacheError, match="Minimal does not support"):
            operation()
    assert (cache.get_seq_length(0), cache.layers[0].batch_size, cache.layers[0].record_past) == (3, 2, False)
    other = cache.fork()
    cache.reset()
    assert (layer.keys, cache.get_seq_length(1), other.get_seq_length(1)) == (None, 0, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StaticLayer(0), "max_cache_len: expected at least 1, got 0"),
        (lambda: StaticLayer(2.5), "max_cache_len: expected an integer, got 2.5"),
        (lambda: StaticLayer(True), "max_cache_len: expected an integer, got True"),
        (lambda: SlidingLayer(0), "sliding_window: expected at least 1, got 0"),
        (lambda: SlidingLayer(torch.ones(2)), r"expected an integer, got torch.float32 of shape \(2,\)"),
        (lambda: SinkLayer(0, 4), "sinks: expected at least 1, got 0"),
        (lambda: SinkLayer(1, 0), "sliding_window: expected at least 1, got 0"),
        (lambda: DynamicLayer(codec="int5"), "codec: expected .* got 'int5'"),
    ],
)
def test_invalid_settings_are_rejected(make: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        make()


def test_the_view_of_an_empty_layer_is_rejected(kind: str):
    layer = KINDS[kind]()
    with pytest.raises(CacheError, match=f"{kind} is empty"):
        layer.view()
    layer.crop(3)
    layer.reorder(torch.tensor([0, 1]))
    assert layer.fork().get_seq_length() == 0
