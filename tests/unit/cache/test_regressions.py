"""Regressions: bugs that public KV caches have had."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whimbrel.base.errors import CacheError
from whimbrel.cache import CacheLayerMixin, DynamicCache, DynamicLayer, SinkLayer, SlidingLayer, StaticLayer, find_codec

TOKENS = 1000
WINDOW = 8


def token(value: float = 0.0, *, tokens: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((1, 2, tokens, 4), value, dtype=dtype)


def every_kind(codec: str = "none") -> list[CacheLayerMixin]:
    return [
        DynamicLayer(codec=codec),
        StaticLayer(2 * TOKENS, codec=codec),
        SlidingLayer(WINDOW, codec=codec),
        SinkLayer(2, WINDOW, codec=codec),
    ]


class Copies(TorchDispatchMode):
    """Counts copied elements, and forbids concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.numbers += args[0].numel()
        assert func not in (torch.ops.aten.cat.default, torch.ops.aten.clone.default)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("make", [lambda: SlidingLayer(WINDOW), lambda: SlidingLayer(WINDOW, codec="int8")])
def test_a_window_is_not_ignored(make: Any):
    layer = make()
    layer.update(token(tokens=5), token(tokens=5))
    assert layer.keys.shape == (1, 2, 5, 4)
    for value in range(20):
        keys, values = layer.update(token(value), token(value))
    assert layer.keys.shape == layer.values.shape == keys.shape == (1, 2, WINDOW, 4)
    assert values[0, 0, :, 0].round().tolist() == [12, 13, 14, 15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    "make",
    [
        DynamicLayer,
        lambda: StaticLayer(TOKENS),
        *(partial(SlidingLayer, window) for window in (1, 2, 15, 16, 17, 64, 100)),
    ],
)
def test_the_cost_of_an_append_does_not_grow(make: Any):
    layer = make()
    with Copies() as copies:
        for _ in range(TOKENS):
            layer.update(token(), token())
    assert copies.numbers <= 4 * TOKENS * token().numel() * 2, "keys and values, each copied 4 times at most"


def test_memory_is_allocated_a_logarithmic_number_of_times():
    layer = DynamicLayer()
    strides = {layer.update(token(), token())[0].stride() for _ in range(TOKENS)}
    assert len(strides) == 7  # reallocated at capacity 16, 32, ..., 1024


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (token(2), token(2, dtype=torch.bfloat16)),
        (token(2, dtype=torch.bfloat16), token(2, dtype=torch.bfloat16)),
        (token(2, dtype=torch.float64), token(2)),
    ],
)
def test_mixed_dtypes_are_rejected_and_change_nothing(kind: int, keys: Tensor, values: Tensor):
    layer = every_kind()[kind]
    layer.update(token(1), token(1))
    with pytest.raises(CacheError, match=r"^[^\n]*float32[^\n]*(bfloat16|float64)|(bfloat16|float64)[^\n]*float32"):
        layer.update(keys, values)
    assert layer.get_seq_length() == 1
    assert layer.dtype == layer.keys.dtype == torch.float32
    assert torch.equal(layer.view().keys, token(1))


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("kind", range(4))
def test_no_autograd_graph_is_retained_without_gradients(kind: int, codec: str):
    layer = every_kind(codec)[kind]
    weight = torch.ones(1, 2, 40, 4, requires_grad=True)
    with torch.no_grad():
        for states in (weight, weight * 2, weight[:, :, :1] * 2):
            for tensor in (*layer.update(states, states), layer.keys, layer.values):
                assert not tensor.requires_grad
                assert tensor.grad_fn is None


@pytest.mark.parametrize("kind", [0, 2, 3])
def test_gradients_reach_every_visible_token(kind: int):
    """Tokens outside of the window get no gradient from later ones."""
    layer = every_kind()[kind]
    tokens = torch.randn(1, 2, 14, 4, requires_grad=True)
    weights = torch.arange(1.0, 15)
    seen_by = torch.zeros(14)
    total, start = torch.zeros(()), 0
    for count in (3, 1, 6, 1, 1, 2):
        part = tokens[:, :, start : start + count]
        view = layer.append(part, 2 * part)
        start += count
        positions = view.key_positions
        if positions is None:
            positions = torch.arange(start - view.keys.size(2), start)
        total = total + weights[start - 1] * (view.keys.sum() + view.values.sum())
        seen_by[positions] += weights[start - 1]
    total.backward()
    torch.testing.assert_close(tokens.grad, (3 * seen_by)[None, None, :, None].expand_as(tokens))


@pytest.mark.parametrize("kind", [0, 2, 3])
def test_updates_without_gradients_work_after_updates_with_gradients(kind: int):
    layer, tokens = every_kind()[kind], torch.randn(1, 2, 14, 4, requires_grad=True)
    keys, _ = layer.update(tokens, tokens)
    loss = keys.square().sum()
    layer.crop(-1)
    with torch.no_grad():
        later, _ = layer.update(token(7), token(7))
    assert not later.requires_grad
    assert later[0, 0, -1, 0] == 7
    loss.backward()  # no tensor saved for backward was overwritten
    torch.testing.assert_close(tokens.grad, 2 * tokens.detach())


@pytest.mark.parametrize(
    ("kind", "codec"), [(1, "none"), *((kind, codec) for kind in range(4) for codec in ("int8", "int4"))]
)
def test_unsupported_gradients_are_rejected_and_change_nothing(kind: int, codec: str):
    layer = every_kind(codec)[kind]
    weight = torch.ones(1, 2, 3, 4, requires_grad=True)
    with pytest.raises(CacheError, match="does not support gradients"):
        layer.update(weight * 2, token(tokens=3))
    assert (layer.keys, layer.get_seq_length(), layer.is_initialized) == (None, 0, False)
    layer.update(token(tokens=3), token(tokens=3))
    assert layer.get_seq_length() == 3


def test_an_array_is_returned_as_a_view_not_as_a_copy():
    cache, states = DynamicCache(), np.ones((1, 2, 1, 4), dtype=np.float32)
    first, _ = cache.update(states, states, 0)
    second, _ = cache.update(2 * states, states, 0)
    assert isinstance(second, np.ndarray)
    assert np.shares_memory(first, second)
    assert second.ctypes.data == cache.layers[0].keys.data_ptr()
    assert second[0, 0, :, 0].tolist() == [1, 2]


def test_an_overflowing_update_is_rejected_before_anything_changes():
    layer = StaticLayer(4)
    with pytest.raises(CacheError, match="at most 4 more tokens .* got 5"):
        layer.update(token(tokens=5), token(tokens=5))
    assert layer.keys is None
    layer.update(token(1, tokens=3), token(1, tokens=3))
    with pytest.raises(CacheError, match="at most 1 more tokens .* got 2"):
        layer.update(token(2, tokens=2), token(2, tokens=2))
    assert layer.get_seq_length() == 3
    keys, _ = layer.update(token(3), token(3))
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 3]


@pytest.mark.parametrize("codec", ["none", "fp8"])
def test_a_cropped_layer_frees_memory(codec: str):
    layer = DynamicLayer(codec=codec)
    layer.update(token(1, tokens=TOKENS), token(1, tokens=TOKENS))
    before = layer.nbytes
    layer.crop(10)
    assert layer.keys.untyped_storage().nbytes() <= 16 * layer.keys.nbytes / 10
    assert layer.nbytes <= before / 50
    keys, _ = layer.update(token(3), token(3))
    assert keys[0, 0, :, 0].tolist() == pytest.approx([1] * 10 + [3], rel=4e-3)


@pytest.mark.parametrize("codec", ["none", "fp8"])
@pytest.mark.parametrize(
    ("make", "slots"), [(SlidingLayer, WINDOW), (lambda w, codec: SinkLayer(2, w, codec=codec), 10)]
)
def test_a_sliding_layer_frees_memory(make: Any, slots: int, codec: str):
    layer = make(WINDOW, codec=codec)
    for tokens in (TOKENS, 1, 1, TOKENS, *[1] * 50, 3, TOKENS):
        layer.update(token(tokens=tokens), token(tokens=tokens))
        assert layer.keys.size(2) == slots
        assert layer.keys.untyped_storage().nbytes() <= 1.5 * layer.keys.nbytes
    assert layer.nbytes <= 2 * 1.5 * layer.keys.nbytes * (1 if codec == "none" else 2) + 4 * 2 * 2 * 2 * 4


def test_past_recording_frees_memory_after_crop():
    layer = SlidingLayer(WINDOW)
    layer.activate_past_recording()
    layer.update(token(tokens=TOKENS), token(tokens=TOKENS))
    assert layer.keys.size(2) == TOKENS
    layer.crop(-3)
    assert layer.get_seq_length() == TOKENS - 3
    assert layer.keys.size(2) == WINDOW
    assert layer.nbytes <= 2 * 2 * 16 * 2 * 4 * 4


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_a_late_outlier_clips_nothing_and_old_codes_stay(codec: str):
    layer = DynamicLayer(codec=codec)
    layer.update(token(0.01, tokens=3), token(0.01, tokens=3))
    early = layer.view()
    before = [t.clone() for t in (early.keys, early.values, early.key_scales, early.value_scales)]
    keys, values = layer.update(token(1e4), token(-1e4))
    torch.testing.assert_close(keys[:, :, 3:], token(1e4), rtol=0.01, atol=0)
    torch.testing.assert_close(values[:, :, 3:], token(-1e4), rtol=0.01, atol=0)
    torch.testing.assert_close(keys[:, :, :3], token(0.01, tokens=3), rtol=0.01, atol=0)
    late = layer.view()
    for old, new in zip(before, (late.keys, late.values, late.key_scales, late.value_scales), strict=True):
        assert torch.equal(old, new[:, :, :3])
    assert late.keys.dtype == find_codec(codec).code_dtype
