"""Attention over contiguous and paged caches, against a query-by-query reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.devices import TRITON_DEVICES
from torch import Tensor

from whimbrel.cache.buffer import find_codec
from whimbrel.ops import KVView, attend, attend_reference, cumulative_lengths, packed_attention, write_blocks


def reference(q: Tensor, k: Tensor, v: Tensor, position: int, key_positions: list[int], window: int | None) -> Tensor:
    """One query (heads, head size) over the keys (heads, slots, head size) that it may see."""
    seen = [s for s, p in enumerate(key_positions) if 0 <= p <= position and (window is None or position - p < window)]
    group = q.size(0) // k.size(0)
    k, v = (x[:, seen].repeat_interleave(group, 0) for x in (k, v))
    weights = (torch.einsum("hd,hsd->hs", q, k) * q.size(-1) ** -0.5).softmax(-1)
    return torch.einsum("hs,hsd->hd", weights, v)


def states(*shape: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device=device)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (1, 9), (4, 4), (3, 9), (9, 9)])
def test_contiguous_keys_match_the_reference(tokens: int, slots: int, window: int | None) -> None:
    q, k, v = states(2, 4, tokens, 8), states(2, 2, slots, 8), states(2, 2, slots, 8) + 1
    positions = torch.arange(20 - tokens, 20)  # the keys are the newest `slots` of 20
    got = attend(q, KVView(k, v), positions, window=window)
    for b in range(2):
        for t in range(tokens):
            expected = reference(q[b, :, t], k[b], v[b], 20 - tokens + t, list(range(20 - slots, 20)), window)
            torch.testing.assert_close(got[b, :, t], expected)


@pytest.mark.parametrize("window", [None, 4])
def test_permuted_and_empty_slots_match_the_reference(window: int | None) -> None:
    q, k, v = states(2, 4, 2, 8), states(2, 2, 6, 8), states(2, 2, 6, 8) + 1
    slot_positions = [[4, 5, -1, 1, 2, 3], [-2, -1, 0, 3, 2, 1]]
    positions = torch.tensor([[4, 5], [2, 3]])
    got = attend(q, KVView(k, v, key_positions=torch.tensor(slot_positions)), positions, window=window)
    for b in range(2):
        for t in range(2):
            expected = reference(q[b, :, t], k[b], v[b], int(positions[b, t]), slot_positions[b], window)
            torch.testing.assert_close(got[b, :, t], expected)


def test_a_padding_query_is_finite() -> None:
    view = KVView(states(1, 1, 3, 4), states(1, 1, 3, 4), key_positions=torch.tensor([[-1, 0, 1]]))
    got = attend(states(1, 1, 3, 4), view, torch.tensor([[-1, 0, 1]]))
    assert got.isfinite().all()


def paged(
    lengths: list[int], block_size: int, kv_heads: int, width: int, capacity: int, device: str = "cpu"
) -> tuple[KVView, Tensor, Tensor]:
    """Blocks in random order, and the same keys and values contiguously (batch, kv heads, capacity, width)."""
    blocks = -(-capacity // block_size)
    order = torch.randperm(len(lengths) * blocks, generator=torch.Generator().manual_seed(1)) + 1
    table = order.view(len(lengths), blocks).int().to(device)
    shape = (len(lengths), blocks * block_size, kv_heads, width)
    k, v = states(*shape, device=device), states(*shape, device=device) + 1
    pools = [
        torch.full((len(order) + 1, block_size, kv_heads, width), 1e4, dtype=x.dtype, device=device) for x in (k, v)
    ]
    for pool, rows in zip(pools, (k, v), strict=True):
        pool[table.long()] = rows.unflatten(1, (blocks, block_size))
    view = KVView(*pools, lengths=torch.tensor(lengths, device=device), block_tables=table)
    return view, k.transpose(1, 2), v.transpose(1, 2)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 21), min_size=1, max_size=4), st.sampled_from([1, 4, 16]), st.sampled_from([None, 1, 5]))
def test_paged_attention_matches_contiguous_attention(lengths: list[int], block_size: int, window: int | None) -> None:
    view, k, v = paged(lengths, block_size, 2, 8, 24)
    q = states(len(lengths), 4, 1, 8)
    got = attend(q, view, torch.tensor(lengths)[:, None] - 1, window=window)
    for b, length in enumerate(lengths):
        expected = reference(q[b, :, 0], k[b], v[b], length - 1, list(range(k.size(2))), window)
        torch.testing.assert_close(got[b, :, 0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(12, 12, 64), (8, 2, 128), (3, 1, 80), (32, 32, 128), (9, 3, 64)]
)
def test_the_paged_attention_kernel_matches_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> None:
    for lengths in ([1], [5, 900, 33, 0, 512], [700] * 70):
        for window in (None, 40):
            view, _, _ = paged(lengths, 16, kv_heads, width, 912, "cuda")
            view = replace(view, keys=view.keys.to(dtype), values=view.values.to(dtype))
            q = states(len(lengths), 1, heads, width, device="cuda").transpose(1, 2).to(dtype)  # strided, as in a model
            positions = view.lengths[:, None] - 1
            got, expected = (
                attend(q, view, positions, window=window),
                attend_reference(q, view, positions, window=window),
            )
            read = view.lengths > 0
            close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
            torch.testing.assert_close(got[read], expected[read], rtol=close, atol=close)
            assert got.isfinite().all()


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("codec", ["none", "fp8", "int8", "int4"])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (2, 2, 128), (3, 1, 80)])
@pytest.mark.parametrize("programs", [1, 256])
def test_paged_attention_decodes_quantized_caches(
    programs: int, codec: str, heads: int, kv_heads: int, width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part per sequence, and in several."""
    from whimbrel.ops.attention_triton import paged_attention

    monkeypatch.setattr("whimbrel.ops.attention_triton.PROGRAMS", programs)
    view, _, _ = paged([37, 1, 90], 16, kv_heads, width, 96, device)
    keys, values, group_size = view.keys.float(), view.values.float(), 0
    if (kind := find_codec(codec)) is not None:
        (keys, key_scales), (values, value_scales) = kind.encode(keys), kind.encode(values)
        view, group_size = replace(view, key_scales=key_scales, value_scales=value_scales, codec=kind), kind.group_size
    view = replace(view, keys=keys, values=values)
    assert view.block_tables is not None
    assert view.lengths is not None
    q = states(3, heads, 1, width, device=device).float()
    for window in (None, 20):
        expected = attend_reference(q, view, view.lengths[:, None] - 1, window=window)
        scales = view.key_scales, view.value_scales
        got = paged_attention(q, keys, values, view.block_tables, view.lengths, window, *scales, codec, group_size or 0)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (3, 80), (32, 128)])
def test_write_blocks_stores_keys_and_values(device: str, dtype: torch.dtype, heads: int, width: int) -> None:
    made = (states(5, 3 * heads, width, device=device) * 50).to(dtype)  # strided, as in a model
    _, new_keys, new_values = made.split(heads, dim=1)
    slots = torch.tensor([7, 0, 39, 16, 8], device=device)
    keys, values = (torch.full((10, 4, heads, width), fill, dtype=dtype, device=device) for fill in (1, 2))
    write_blocks(keys, values, new_keys, new_values, slots)
    for blocks, new, fill in ((keys, new_keys, 1), (values, new_values, 2)):
        expected = torch.full((40, heads, width), fill, dtype=dtype, device=device)
        for slot, row in zip(slots.tolist(), new, strict=True):
            expected[slot] = row
        assert torch.equal(blocks, expected.view_as(blocks))


def test_cumulative_lengths_of_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 1], [1, 2, 2, 0]])
    assert cumulative_lengths(documents).tolist() == [0, 3, 4, 5, 7, 8]
    assert cumulative_lengths(documents).dtype == torch.int32


@pytest.mark.parametrize("window", [None, 2])
def test_packed_attention_has_the_shape_and_gradients_of_its_queries(window: int | None) -> None:
    """On the meta device, where the CUDA kernel's signature is checked without a GPU."""
    q, k = (torch.empty(2, heads, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2))
    cu_seqlens = cumulative_lengths(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])).to("meta")
    y = packed_attention(q, k, k, cu_seqlens, window)
    assert y.shape == q.shape
    y.sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
