"""The growing cache."""

from __future__ import annotations

import torch

from whimbrel.cache import DynamicCache, DynamicLayer


def test_update_appends_and_hands_back_everything():
    cache, pieces = DynamicCache(), [torch.randn(2, 3, tokens, 4) for tokens in (5, 1, 100, 1)]
    assert cache.get_seq_length() == 0
    for piece in pieces:
        keys, values = cache.update(piece, -piece, layer_idx=1)
    torch.testing.assert_close(keys, torch.cat(pieces, dim=2))
    torch.testing.assert_close(values, -torch.cat(pieces, dim=2))
    assert cache.get_seq_length(1) == 107
    assert cache.get_seq_length(0) == cache.get_seq_length(7) == 0


def test_memory_is_taken_a_logarithmic_number_of_times():
    layer, addresses = DynamicLayer(), set()
    for _ in range(1000):
        keys, _ = layer.update(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
        addresses.add((keys.data_ptr(), keys.stride()))
    assert len(addresses) <= 7


def test_a_layer_takes_dtype_from_its_first_update_and_keeps_no_graph():
    layer = DynamicLayer()
    assert layer.keys is None
    assert repr(layer) == "DynamicLayer"
    states = torch.randn(1, 1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    keys, _ = layer.update(states * 2, states)
    assert keys.dtype == torch.bfloat16
    assert not keys.requires_grad
