"""The decoder on its own: loss, logits, masks, initial weights, compilation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.cache import DynamicCache
from whimbrel.models import GPT, GPTConfig, preset

TINY = GPTConfig(context_length=32, vocab_size=97, num_layers=3, embd_size=32, num_heads=4)
SHRUNK = {
    "context_length": 32,
    "vocab_size": 97,
    "num_layers": 3,
    "embd_size": 32,
    "num_heads": 4,
    "vocab_multiple": 16,
}


def shrunk(name: str, **settings: object) -> GPTConfig:
    """A preset's kind of block at a size that runs in a millisecond."""
    config = preset(name)
    small = {**SHRUNK, "head_size": None, "mlp_size": None, "num_kv_heads": 2 if config.num_kv_heads else None}
    return replace(config, **small | settings)


KINDS = {
    "gpt2": shrunk("gpt2"),
    "gpt2-baseline": shrunk("gpt2-baseline"),
    "gpt2-fast": shrunk("gpt2-fast", zero_init_head=False, zero_init_projections=False),
    "llama3": shrunk("llama3-8b"),
    "mistral": shrunk("mistral-7b", sliding_window=5),
    "qwen3": shrunk("qwen3-0.6b", head_size=12),
    "alternating": replace(
        shrunk("gpt2"), sliding_window=4, layer_types=("full_attention", "sliding_attention", "full_attention")
    ),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ids(batch: int = 2, tokens: int = 20, vocab: int = 97) -> torch.Tensor:
    return torch.randint(vocab, (batch, tokens))


def spread(model: GPT) -> GPT:
    """Wider weights than the initial ones, so that every part of the model matters in the output."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.zero_padding()
    return model


def test_the_first_loss_is_that_of_a_tied_normal_initialisation():
    model = GPT(GPTConfig(num_layers=2, context_length=1024))
    x = torch.randint(50257, (4, 1025))
    with torch.no_grad():
        loss = model(x[:, :-1], x[:, 1:]).loss
    assert loss.item() == pytest.approx(math.log(50257) + 768 * 0.02**2 / 2, abs=0.02)


def test_parameter_names_are_those_of_gpt2():
    names = {name for name, _ in GPT(replace(TINY, num_layers=1)).named_parameters()}
    pieces = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    expected = {f"transformer.h.0.{piece}.{kind}" for piece in pieces for kind in ("weight", "bias")}
    expected |= {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}
    assert names == expected
    assert "lm_head.weight" in GPT(TINY).state_dict()


def test_initial_weights():
    model = GPT(replace(preset("gpt2-fast"), embd_init_std=0.02))
    assert model.token_embedding.weight[:50257].std().item() == pytest.approx(0.02, rel=0.01)
    assert not model.token_embedding.weight[50257:].any()
    assert not model.lm_head.weight.any()
    block = next(model.blocks)
    assert not block.attn.c_proj.weight.any()
    assert not block.mlp.c_proj.weight.any()
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert block.skip.tolist() == [1, 0]
    assert not next(GPT(TINY).blocks).mlp.c_fc.bias.any()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_mean_over_targets_that_count(kind):
    model = spread(GPT(KINDS[kind]))
    x, y = ids(), ids()
    y[0, :7] = -100
    loss, logits = model(x, y)
    assert logits is None
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model(x, y, loss_divisor=100).loss, expected * (y != -100).sum() / 100)


def test_loss_without_a_target_that_counts_is_zero():
    assert GPT(TINY)(ids(), torch.full((2, 20), -100)).loss.item() == 0


def test_logits_come_when_asked_for():
    model, x = GPT(TINY), ids()
    output = model(x)
    assert output.loss is None
    assert output.logits.shape == (2, 20, 97)
    both = model(x, x, return_logits=True)
    torch.testing.assert_close(both.logits, output.logits)
    assert both.loss is not None
    assert model(x, return_logits=False) == (None, None)
    torch.testing.assert_close(model(x, logits_to_keep=3).logits, output.logits[:, -3:])


def test_gradients_equal_those_of_full_logits():
    model, x, y = spread(GPT(KINDS["gpt2-fast"])), ids(), ids()
    model(x, y).loss.backward()
    fused = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(fused[name], parameter.grad, msg=name)


def test_padding_rows_change_nothing():
    padded, plain = (GPT(replace(TINY, vocab_multiple=multiple)) for multiple in (128, 1))
    state = padded.state_dict()
    plain.load_state_dict({name: tensor[: plain.state_dict()[name].shape[0]] for name, tensor in state.items()})
    with torch.no_grad():
        padded.lm_head.weight[97:] = 50.0
    x, y = ids(), ids()
    torch.testing.assert_close(padded(x, y, return_logits=True), plain(x, y, return_logits=True))
    assert padded.num_parameters() == plain.num_parameters() == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one(kind):
    model, x = spread(GPT(KINDS[kind])), ids()
    changed = x.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 97
    torch.testing.assert_close(model(x).logits[:, :12], model(changed).logits[:, :12])


def test_a_window_hides_what_lies_further_back():
    model = spread(GPT(replace(KINDS["mistral"], num_layers=1, sliding_window=5)))
    x = ids(1, 20)
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    differs = (model(x).logits != model(changed).logits).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [9, 10, 11, 12, 13]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[20], [1] * 20, [7, 1, 5, 7]])
def test_cached_logits_equal_uncached_ones(kind, steps):
    model, x, cache = spread(GPT(KINDS[kind])), ids(), DynamicCache()
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in x.split(steps, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(x).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama3", "mistral", "gpt2-fast"])
def test_documents_do_not_see_each_other(kind):
    model, x = spread(GPT(KINDS[kind])), ids(2, 20)
    together = model(x, documents=torch.tensor([[0] * 8 + [1] * 12, [5] * 13 + [6] * 7])).logits
    for row, cut in enumerate((8, 13)):
        apart = [model(part).logits[0] for part in x[row : row + 1].tensor_split([cut], dim=1)]
        torch.testing.assert_close(together[row], torch.cat(apart), atol=1e-4, rtol=1e-4)


def test_ids_of_padding_rows_are_refused():
    model = GPT(TINY)
    assert model.config.padded_vocab_size > model.config.vocab_size
    with pytest.raises(DataError, match=f"token id {TINY.vocab_size} is outside the vocabulary"):
        model(torch.tensor([[0, TINY.vocab_size]]))


def test_what_cannot_be_read_is_refused():
    model = GPT(TINY)
    with pytest.raises(ConfigError, match="33 tokens is longer than context_length = 32"):
        model(ids(1, 33))
    cache = DynamicCache()
    model(ids(1, 30), cache=cache)
    with pytest.raises(ValueError, match="33 tokens is longer than context_length = 32"):
        model(ids(1, 3), cache=cache)
    with pytest.raises(ConfigError, match="give either cache or documents"):
        model(ids(), cache=DynamicCache(), documents=torch.zeros(2, 20))


def test_the_baseline_scales_its_attention_branch():
    baseline = spread(GPT(KINDS["gpt2-baseline"]))
    plain = GPT(replace(baseline.config, residual_scale="none"))
    state = baseline.state_dict()
    for name in state:
        if ".attn.c_proj." in name:
            state[name] = state[name] / math.sqrt(2 * baseline.config.num_layers)
    plain.load_state_dict(state)
    x = ids()
    torch.testing.assert_close(plain(x).logits, baseline(x).logits)


def test_a_soft_cap_bounds_the_logits():
    plain, x = spread(GPT(TINY)), ids()
    capped = GPT(replace(TINY, logit_softcap=0.5))
    capped.load_state_dict(plain.state_dict())
    torch.testing.assert_close(capped(x).logits, 0.5 * torch.tanh(plain(x).logits / 0.5))


def test_the_stream_is_low_precision_under_autocast_and_the_loss_is_not():
    model, x, dtypes = GPT(TINY), ids(), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x, x).loss
    assert set(dtypes) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(x, x).loss.item(), abs=0.02)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile on its inputs
@pytest.mark.parametrize("kind", ["gpt2-baseline", "gpt2-fast", "qwen3"])
def test_compiled_blocks_share_one_graph(kind):
    model, x = spread(GPT(KINDS[kind])), ids()
    expected = model(x, x).loss
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        loss = model(x, x).loss
        loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(loss, expected)


@torch.no_grad()
def test_compiled_blocks_take_any_length():
    model, x = spread(GPT(TINY)), ids()
    expected = {length: model(x[:, :length]).logits for length in (16, 12, 9, 1)}
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for length, logits in expected.items():
        torch.testing.assert_close(model(x[:, :length]).logits, logits)
    assert counters["stats"]["unique_graphs"] <= 3  # the first length, any other, a single token


def test_operations_per_token():
    model = GPT(replace(TINY, position="rope", tied_head=False))
    multiplied = model.num_parameters() - 97 * 32
    assert model.flops_per_token(20) == 6 * multiplied + 12 * 3 * 32 * 20
    windowed = GPT(replace(model.config, sliding_window=4))
    assert windowed.flops_per_token(20) == 6 * multiplied + 12 * 3 * 32 * 4
