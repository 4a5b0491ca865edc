"""GPT gives the same logits with every kind of cache as without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.models import add_noise
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.cache import Cache, DynamicCache, SinkLayer, StaticCache
from whimbrel.models import GPT, GPTConfig

SHAPE = {"context_length": 64, "vocab_size": 97, "num_layers": 3, "embd_size": 32, "num_heads": 4, "num_kv_heads": 2}
WINDOWED = {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention", "sliding_attention")}
CONFIGS = {
    "learned": GPTConfig(**SHAPE),
    "rope": GPTConfig(**SHAPE, position="rope"),
    "windows": GPTConfig(**SHAPE, position="rope", **WINDOWED),
}
CACHES: dict[str, Callable[..., Cache]] = {
    "dynamic": DynamicCache,
    "lazy": lambda config, **options: DynamicCache(**options),
    "static": lambda config, **options: StaticCache(config, max_cache_len=40, **options),
}
PIECES = [7, 1, 1, 1, 9, 1, 2, 12, 1, 1]


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> GPT:
    torch.manual_seed(0)
    return add_noise(GPT(CONFIGS[request.param]).eval(), 0.1)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(97, (3, sum(PIECES)), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def read(model: GPT, tokens: Tensor, cache: Cache | None, pieces: list[int]) -> Tensor:
    return torch.cat([model(part, cache=cache).logits for part in tokens.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("make", CACHES)
def test_chunked_prefill_matches_a_single_forward_pass(model: GPT, tokens: Tensor, make: str):
    cache = CACHES[make](model.config)
    expected = read(model, tokens, None, [tokens.size(1)])
    torch.testing.assert_close(read(model, tokens, cache, PIECES), expected, atol=2e-5, rtol=0)
    assert cache.get_seq_length() == tokens.size(1)


@pytest.mark.parametrize("make", CACHES)
def test_a_left_padded_sequence_matches_the_sequence_alone(model: GPT, tokens: Tensor, make: str):
    padding = [0, 3, 8]
    cache = CACHES[make](model.config, padding=padding)
    padded = torch.stack([sequence.roll(count) for sequence, count in zip(tokens, padding, strict=True)])
    together = read(model, padded, cache, PIECES)
    for row, (sequence, count) in enumerate(zip(tokens, padding, strict=True)):
        alone = sequence[None, : sequence.numel() - count]
        expected = read(model, alone, None, [alone.size(1)])
        torch.testing.assert_close(together[row : row + 1, count:], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("codec", "off"), [("fp8", 0.08), ("int8", 0.02), ("int4", 0.3)])
def test_quantized_caches_are_close_for_any_chunking(model: GPT, tokens: Tensor, codec: str, off: float):
    exact = read(model, tokens, None, [tokens.size(1)])
    coded = read(model, tokens, DynamicCache(model.config, codec=codec), PIECES)
    assert 0 < (coded - exact).abs().mean() / exact.abs().mean() < off
    token_by_token = read(model, tokens, DynamicCache(model.config, codec=codec), [1] * tokens.size(1))
    assert (token_by_token - coded).abs().mean() / exact.abs().mean() < off


def test_forked_cropped_and_reordered_caches_continue_correctly(model: GPT, tokens: Tensor):
    cache = DynamicCache(model.config)
    cache.activate_past_recording()
    read(model, tokens, cache, [20, 16])
    other = cache.fork()
    other.reorder([2, 0])
    cache.crop(20)
    expected = read(model, tokens, None, [36])[:, 20:]
    torch.testing.assert_close(read(model, tokens[:, 20:], cache, [1] * 16), expected, atol=2e-5, rtol=0)
    more = torch.cat((tokens, tokens[:, :5]), dim=1)[[2, 0]]
    expected = read(model, more, None, [41])[:, 36:]
    torch.testing.assert_close(read(model, more[:, 36:], other, [3, 1, 1]), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("pieces", [PIECES, [12, 1, 1, 1, 3, *[1] * 18], [9] * 4])
def test_the_sinks_of_a_padded_sequence_are_its_first_real_tokens(model: GPT, tokens: Tensor, pieces: list[int]):
    padding = [0, 3, 7]
    layers = [SinkLayer(2, 6) for _ in range(3)]
    padded = torch.stack([sequence.roll(count) for sequence, count in zip(tokens, padding, strict=True)])
    together = read(model, padded, Cache(layers, padding=padding), pieces)
    for row, (sequence, count) in enumerate(zip(tokens, padding, strict=True)):
        alone = sequence[None, : sequence.numel() - count]
        cuts = torch.tensor(pieces).cumsum(0).sub(count).clamp(min=0)
        parts = [part for part in cuts.diff(prepend=torch.tensor([0])).tolist() if part]
        expected = read(model, alone, Cache([SinkLayer(2, 6) for _ in range(3)]), parts)
        torch.testing.assert_close(together[row : row + 1, count:], expected, atol=2e-5, rtol=0)


def test_padding_for_another_batch_size_is_rejected(model: GPT, tokens: Tensor):
    cache = DynamicCache(model.config, padding=[0, 2])
    with pytest.raises(ConfigError, match="padding of 2 .*batch of 1"):
        read(model, tokens[:1], cache, [tokens.size(1)])
    assert cache.get_seq_length() == 0


def test_a_token_attends_to_sinks_and_the_newest_tokens():
    """With one layer, changing a token outside of sinks and window must not change the output."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE | {"num_layers": 1}, position="rope")).eval()
    text = torch.randint(97, (1, 30))
    cache = Cache([SinkLayer(2, 6)])
    logits = read(model, text, cache, [1] * 30)
    for changed, same in ((10, True), (0, False), (1, False), (24, False), (23, True)):
        other = text.clone()
        other[0, changed] = (other[0, changed] + 1) % 97
        last = read(model, other, Cache([SinkLayer(2, 6)]), [1] * 30)[:, -1]
        assert torch.equal(last, logits[:, -1]) is same, changed
    full = read(model, text[:, :8], None, [8])
    torch.testing.assert_close(logits[:, :8], full, atol=2e-5, rtol=0)
