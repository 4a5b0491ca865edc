"""Our own models read every kind of cache: the text they see is the text without a cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
    model = GPT(CONFIGS[request.param]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture
def texts() -> Tensor:
    return torch.randint(97, (3, sum(PIECES)), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def read(model: GPT, texts: Tensor, cache: Cache | None, pieces: list[int]) -> Tensor:
    return torch.cat([model(part, cache=cache).logits for part in texts.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("make", CACHES)
def test_a_text_read_in_pieces_is_the_text_read_at_once(model: GPT, texts: Tensor, make: str):
    cache = CACHES[make](model.config)
    expected = read(model, texts, None, [texts.size(1)])
    torch.testing.assert_close(read(model, texts, cache, PIECES), expected, atol=2e-5, rtol=0)
    assert cache.get_seq_length() == texts.size(1)


@pytest.mark.parametrize("make", CACHES)
def test_a_row_that_is_padded_at_the_left_reads_as_it_does_alone(model: GPT, texts: Tensor, make: str):
    padding = [0, 3, 8]
    cache = CACHES[make](model.config, padding=padding)
    padded = torch.stack([text.roll(count) for text, count in zip(texts, padding, strict=True)])
    together = read(model, padded, cache, PIECES)
    for row, (text, count) in enumerate(zip(texts, padding, strict=True)):
        alone = text[None, : text.numel() - count]
        expected = read(model, alone, None, [alone.size(1)])
        torch.testing.assert_close(together[row : row + 1, count:], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("codec", "off"), [("fp8", 0.08), ("int8", 0.02), ("int4", 0.3)])
def test_codes_are_read_nearly_as_numbers_and_alike_in_any_pieces(model: GPT, texts: Tensor, codec: str, off: float):
    exact = read(model, texts, None, [texts.size(1)])
    coded = read(model, texts, DynamicCache(model.config, codec=codec), PIECES)
    assert 0 < (coded - exact).abs().mean() / exact.abs().mean() < off
    token_by_token = read(model, texts, DynamicCache(model.config, codec=codec), [1] * texts.size(1))
    assert (token_by_token - coded).abs().mean() / exact.abs().mean() < off


def test_forks_crops_and_reorders_go_on_from_where_they_are(model: GPT, texts: Tensor):
    cache = DynamicCache(model.config)
    cache.activate_past_recording()
    read(model, texts, cache, [20, 16])
    other = cache.fork()
    other.reorder([2, 0])
    cache.crop(20)
    expected = read(model, texts, None, [36])[:, 20:]
    torch.testing.assert_close(read(model, texts[:, 20:], cache, [1] * 16), expected, atol=2e-5, rtol=0)
    more = torch.cat((texts, texts[:, :5]), dim=1)[[2, 0]]
    expected = read(model, more, None, [41])[:, 36:]
    torch.testing.assert_close(read(model, more[:, 36:], other, [3, 1, 1]), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("pieces", [PIECES, [12, 1, 1, 1, 3, *[1] * 18], [9] * 4])
def test_sinks_of_a_padded_row_are_its_first_real_tokens(model: GPT, texts: Tensor, pieces: list[int]):
    padding = [0, 3, 7]
    layers = [SinkLayer(2, 6) for _ in range(3)]
    padded = torch.stack([text.roll(count) for text, count in zip(texts, padding, strict=True)])
    together = read(model, padded, Cache(layers, padding=padding), pieces)
    for row, (text, count) in enumerate(zip(texts, padding, strict=True)):
        alone = text[None, : text.numel() - count]
        cuts = torch.tensor(pieces).cumsum(0).sub(count).clamp(min=0)
        parts = [part for part in cuts.diff(prepend=torch.tensor([0])).tolist() if part]
        expected = read(model, alone, Cache([SinkLayer(2, 6) for _ in range(3)]), parts)
        torch.testing.assert_close(together[row : row + 1, count:], expected, atol=2e-5, rtol=0)


def test_padding_of_more_rows_than_the_batch_has_is_refused(model: GPT, texts: Tensor):
    cache = DynamicCache(model.config, padding=[0, 2])
    with pytest.raises(ConfigError, match="built for 2 rows .its padding. and the batch has 1"):
        read(model, texts[:1], cache, [texts.size(1)])
    assert cache.get_seq_length() == 0


def test_sinks_and_the_newest_are_what_a_token_sees():
    """One layer, so that what a token sees can be checked: a text with the tokens between left out of attention."""
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
