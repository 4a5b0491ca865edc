"""A forward pass over sequences in blocks gives the logits of each alone."""

from __future__ import annotations

import pytest
import torch

from whimbrel.cache.buffer import find_codec
from whimbrel.inference.paged_cache import BlockPool, PagedBatch
from whimbrel.models import GPT, GPTConfig
from whimbrel.ops import attend

SMALL = {"context_length": 32, "vocab_size": 50, "num_layers": 2, "embd_size": 32, "num_heads": 4, "init_std": 0.3}
MODELS = {
    "learned": {},
    "rope, grouped": {"position": "rope", "num_kv_heads": 2, "tied_head": False},
    "windows": {
        "position": "rope",
        "sliding_window": 5,
        "layer_types": ("sliding_attention", "full_attention"),
    },
}
TABLES = [[7, 3, 9, 5, 4], [8, 2, 0, 0, 0], [6, 1, 0, 0, 0]]
"""Block tables of three sequences, four tokens per block."""


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **request.param})).eval()


def batch(pool: BlockPool, starts: list[int], counts: list[int], tables: list[list[int]] = TABLES) -> PagedBatch:
    return PagedBatch(pool, *(torch.tensor(each, dtype=torch.int32) for each in (tables, starts, counts)))


@torch.inference_mode()
def test_ragged_chunks_match_the_logits_of_each_sequence_alone(model):
    texts = torch.randint(50, (3, 20))
    whole = model(texts).logits
    pool = BlockPool(model.config, 10, 4)
    starts = [0, 0, 0]
    for counts in ([7, 3, 1], [6, 0, 4], [1, 1, 1], [5, 4, 0], [1, 0, 1]):
        tokens = torch.zeros(3, max(counts), dtype=torch.long)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            tokens[row, :count] = texts[row, start : start + count]
        logits = model(tokens, cache=batch(pool, starts, counts)).logits
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            torch.testing.assert_close(logits[row, :count], whole[row, start : start + count], rtol=0, atol=2e-5)
        assert logits.isfinite().all()
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


@torch.inference_mode()
def test_padding_is_written_to_block_0_only(model):
    texts = torch.randint(50, (1, 20))
    pool = BlockPool(model.config, 10, 4)
    model(texts[:, :19], cache=batch(pool, [0], [19], TABLES[:1]))
    before = [tensor.clone() for tensor in pool.tensors]
    tokens = torch.tensor([[int(texts[0, 19])], [0], [0]])
    padded = model(tokens, cache=batch(pool, [19, 0, 0], [1, 0, 0], [TABLES[0], [0] * 5, [0] * 5])).logits
    torch.testing.assert_close(padded[0, -1], model(texts).logits[0, -1], rtol=0, atol=2e-5)
    for tensor, held in zip(pool.tensors, before, strict=True):
        written = [index for index in range(10) if not torch.equal(tensor[index], held[index])]
        assert written == [0, 4]


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_pass_does_not_synchronize_with_the_device(codec):
    """On the meta device, reading a number fails."""
    meta = torch.device("meta")
    pool = BlockPool(GPTConfig(**SMALL), 10, 4, device=meta, codec=codec)
    tables, starts, counts = (torch.zeros(shape, dtype=torch.int32, device=meta) for shape in ((3, 5), (3,), (3,)))
    for tokens in (1, 6):
        paged = PagedBatch(pool, tables, starts, counts)
        positions = paged.positions(tokens, meta)
        states = torch.zeros(3, 4, tokens, 8, device=meta)
        assert attend(states, paged.append(states, states, 0), positions, window=3).shape == states.shape


@torch.inference_mode()
def test_a_batch_can_be_reused_with_new_values(model):
    texts = torch.randint(50, (3, 6))
    pool = BlockPool(model.config, 10, 4)
    reused = batch(pool, [0, 0, 0], [5, 5, 5])
    model(texts[:, :5], cache=reused)
    reused.starts.fill_(5)
    reused.counts.fill_(1)
    logits = model(texts[:, 5:], cache=reused).logits
    torch.testing.assert_close(logits[:, -1], model(texts).logits[:, -1], rtol=0, atol=2e-5)


def test_a_view_has_the_length_of_each_sequence():
    """Including new tokens; padding rows have length 1, since attention over zero keys is NaN."""
    paged = batch(BlockPool(GPTConfig(**SMALL), 10, 4), [9, 0, 0], [2, 3, 0])
    view = paged.append(*torch.randn(2, 3, 4, 3, 8), 0)
    assert view.lengths.tolist() == [11, 3, 1]
    assert view.block_tables is paged.tables


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_quantized_blocks_store_codes_that_never_change(codec):
    config = GPTConfig(**SMALL)
    pool = BlockPool(config, 10, 4, codec=codec)
    states = torch.randn(3, 4, 7, 8)
    view = batch(pool, [0, 0, 0], [7, 7, 7]).append(states, 2 * states, 1)
    keys, values = view.dense(torch.float32)
    coder = find_codec(codec)
    for found, given in ((keys, states), (values, 2 * states)):
        assert torch.equal(found[:, :, :7], coder.decode(*coder.encode(given), torch.float32))
    before = [tensor[[7, 8, 6]].clone() for tensor in pool.tensors]
    batch(pool, [7, 7, 7], [1, 1, 1]).append(1e4 * torch.randn(3, 4, 1, 8), torch.randn(3, 4, 1, 8), 1)
    assert all(torch.equal(tensor[[7, 8, 6]], held) for tensor, held in zip(pool.tensors, before, strict=True))
    assert pool.nbytes == 10 * BlockPool.block_nbytes(config, 4, dtype=torch.float32, codec=codec)
    assert pool.nbytes < 0.6 * BlockPool(config, 10, 4).nbytes


def test_a_block_is_copied_and_cleared_with_its_scales_in_every_layer():
    pool = BlockPool(GPTConfig(**SMALL), 10, 4, codec="int8")
    for layer in range(2):
        batch(pool, [0, 0, 0], [4, 4, 4]).append(torch.randn(3, 4, 4, 8), torch.randn(3, 4, 4, 8), layer)
    pool.copy(7, 5)
    assert all(torch.equal(tensor[5], tensor[7]) for tensor in pool.tensors)
    assert all(tensor[5].any() for tensor in pool.tensors)
    pool.clear(7)
    assert not any(tensor[7].any() for tensor in pool.tensors)
    assert all(tensor[5].any() for tensor in pool.tensors)
    # Compiled code that writes to several views of one tensor would copy all of it in every step.
    assert len({tensor.untyped_storage().data_ptr() for tensor in pool.tensors}) == len(pool.tensors)
