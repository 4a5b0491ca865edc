"""`GPT`: loss, logits, masks, padding, initialization, compilation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.models import KINDS, add_noise
from torch._dynamo.utils import counters
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.cache import DynamicCache
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora, preset

TINY = GPTConfig(context_length=32, vocab_size=97, num_layers=3, embd_size=32, num_heads=4)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ids(batch: int = 2, tokens: int = 20, vocab: int = 97) -> torch.Tensor:
    return torch.randint(vocab, (batch, tokens))


def test_initial_loss_matches_a_tied_normal_initialization():
    model = GPT(GPTConfig(num_layers=2, context_length=1024))
    x = torch.randint(50257, (4, 1025))
    with torch.no_grad():
        loss = model(x[:, :-1], targets=x[:, 1:]).loss
    assert loss.item() == pytest.approx(math.log(50257) + 768 * 0.02**2 / 2, abs=0.02)


def test_parameter_names_are_those_of_gpt2():
    names = {name for name, _ in GPT(replace(TINY, num_layers=1)).named_parameters()}
    pieces = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    expected = {f"transformer.h.0.{piece}.{kind}" for piece in pieces for kind in ("weight", "bias")}
    expected |= {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}
    assert names == expected
    assert "lm_head.weight" in GPT(TINY).state_dict()


def test_initialization():
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
def test_loss_is_the_mean_over_targets_that_are_not_ignored(kind):
    model = add_noise(GPT(KINDS[kind]))
    x, y = ids(), ids()
    y[0, :7] = -100
    loss, logits = model(x, targets=y)
    assert logits is None
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model(x, targets=y, num_items_in_batch=100).loss, expected * (y != -100).sum() / 100)


def test_loss_is_zero_if_all_targets_are_ignored():
    assert GPT(TINY)(ids(), targets=torch.full((2, 20), -100)).loss.item() == 0


def test_return_logits_and_logits_to_keep():
    model, x = GPT(TINY), ids()
    output = model(x)
    assert output.loss is None
    assert output.logits.shape == (2, 20, 97)
    both = model(x, targets=x, return_logits=True)
    torch.testing.assert_close(both.logits, output.logits)
    assert both.loss is not None
    assert model(x, return_logits=False) == (None, None)
    torch.testing.assert_close(model(x, logits_to_keep=3).logits, output.logits[:, -3:])


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_shifted_as_in_transformers(kind):
    model, x = add_noise(GPT(KINDS[kind])), ids()
    labels = x.clone()
    labels[0, :7] = -100
    output = model(input_ids=x, labels=labels)
    torch.testing.assert_close(output.logits, model(x).logits)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    total = model(x, labels=labels, num_items_in_batch=1, return_logits=False)
    torch.testing.assert_close(total.loss, expected * (labels[:, 1:] != -100).sum())
    assert total.logits is None


def test_output_supports_the_access_patterns_of_transformers():
    model, x = GPT(TINY), ids()
    output = model(x, labels=x)
    loss, logits = output
    assert output[0] is output["loss"] is output.loss is loss
    assert output[1] is output.get("logits") is logits
    assert output[:2] == output.to_tuple() == (loss, logits)
    assert output.keys() == ["loss", "logits"]
    output = model(x)
    assert output[0] is output["logits"] is output.logits
    assert "loss" not in output
    assert output.get("loss") is None
    with pytest.raises(KeyError):
        output["loss"]


PADDING_MASK = torch.tensor([[1] * 20, [0] * 7 + [1] * 13, [1] * 13 + [0] * 7])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_affect_the_logits_of_other_tokens(kind):
    model, x = add_noise(GPT(KINDS[kind])), ids(3)
    with torch.no_grad():
        padded = model(x, attention_mask=PADDING_MASK).logits
        assert padded.isfinite().all()
        for sequence, mask, logits in zip(x, PADDING_MASK.bool(), padded, strict=True):
            expected = model(sequence[mask][None]).logits[0]
            torch.testing.assert_close(logits[mask], expected, atol=1e-5, rtol=1e-5)


def test_attention_mask_without_padding_is_ignored():
    model, x = GPT(TINY), ids()
    assert torch.equal(model(x, attention_mask=torch.ones_like(x)).logits, model(x).logits)


def test_padding_and_documents_can_be_combined():
    model, x = add_noise(GPT(KINDS["llama3"])), ids(1)
    mask, documents = PADDING_MASK[1:2], torch.tensor([[0] * 12 + [1] * 8])
    with torch.no_grad():
        logits = model(x, attention_mask=mask, documents=documents).logits
        torch.testing.assert_close(logits[:, 7:12], model(x[:, 7:12]).logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits[:, 12:], model(x[:, 12:]).logits, atol=1e-4, rtol=1e-4)


def test_invalid_attention_masks_and_labels_are_rejected():
    model, x = GPT(TINY), ids()
    with pytest.raises(DataError, match=r"attention_mask of shape \[2, 20\], got \[2, 19\]"):
        model(x, attention_mask=torch.ones(2, 19))
    with pytest.raises(ConfigError, match="pass the padding to the cache"):
        model(x, attention_mask=PADDING_MASK[1:], cache=DynamicCache())
    with pytest.raises(ConfigError, match="expected labels .* or targets .* got both"):
        model(x, labels=x, targets=x)


def test_gradients_of_the_fused_loss_equal_those_of_full_logits():
    model, x, y = add_noise(GPT(KINDS["gpt2-fast"])), ids(), ids()
    model(x, targets=y).loss.backward()
    fused = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(fused[name], parameter.grad, msg=name)


def test_a_loss_function_gets_hidden_states_and_head():
    model = GPT(KINDS["gpt2"])
    ids = torch.randint(0, 97, (2, 6))
    output = model(ids, loss_fn=lambda hidden, head: (hidden @ head.T)[:, :97])
    assert output.logits is None
    logits = model(ids).logits
    torch.testing.assert_close(output.loss.view_as(logits), logits)
    assert model(ids, loss_fn=lambda hidden, head: hidden.sum(), return_logits=True).logits is not None
    for names in ("labels", "targets"):
        with pytest.raises(ConfigError, match="expected loss_fn, or labels or targets"):
            model(ids, loss_fn=lambda hidden, head: hidden, **{names: ids})


def test_vocabulary_padding_does_not_affect_outputs():
    padded, unpadded = (GPT(replace(TINY, vocab_multiple=multiple)) for multiple in (128, 1))
    state = padded.state_dict()
    unpadded.load_state_dict({name: tensor[: unpadded.state_dict()[name].shape[0]] for name, tensor in state.items()})
    with torch.no_grad():
        padded.lm_head.weight[97:] = 50.0
    x, y = ids(), ids()
    torch.testing.assert_close(padded(x, targets=y, return_logits=True), unpadded(x, targets=y, return_logits=True))
    assert padded.num_parameters() == unpadded.num_parameters() == sum(p.numel() for p in unpadded.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_causal(kind):
    model, x = add_noise(GPT(KINDS[kind])), ids()
    changed = x.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 97
    torch.testing.assert_close(model(x).logits[:, :12], model(changed).logits[:, :12])


def test_sliding_window_limits_attention():
    model = add_noise(GPT(replace(KINDS["mistral"], num_layers=1, sliding_window=5)))
    x = ids(1, 20)
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    differs = (model(x).logits != model(changed).logits).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [9, 10, 11, 12, 13]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[20], [1] * 20, [7, 1, 5, 7]])
def test_cached_logits_equal_uncached_ones(kind, steps):
    model, x, cache = add_noise(GPT(KINDS[kind])), ids(), DynamicCache()
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in x.split(steps, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(x).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama3", "mistral", "gpt2-fast"])
def test_tokens_attend_only_within_their_document(kind):
    model, x = add_noise(GPT(KINDS[kind])), ids(2, 20)
    together = model(x, documents=torch.tensor([[0] * 8 + [1] * 12, [5] * 13 + [6] * 7])).logits
    for row, cut in enumerate((8, 13)):
        apart = [model(part).logits[0] for part in x[row : row + 1].tensor_split([cut], dim=1)]
        torch.testing.assert_close(together[row], torch.cat(apart), atol=1e-4, rtol=1e-4)
    reused = torch.tensor([[0] * 8 + [1] * 12, [5] * 13 + [6] * 4 + [5] * 3])  # a new document where the number changes
    apart = [model(part).logits[0] for part in x[1:].split([13, 4, 3], dim=1)]
    torch.testing.assert_close(model(x, documents=reused).logits[1], torch.cat(apart), atol=1e-4, rtol=1e-4)


def test_token_ids_outside_the_vocabulary_are_rejected():
    model = GPT(TINY)
    assert model.config.padded_vocab_size > model.config.vocab_size
    with pytest.raises(DataError, match=f"token ids from 0 to .*, got {TINY.vocab_size}"):
        model(torch.tensor([[0, TINY.vocab_size]]))


def test_invalid_inputs_are_rejected():
    model = GPT(TINY)
    with pytest.raises(ConfigError, match="context_length = 32 tokens, got 33"):
        model(ids(1, 33))
    cache = DynamicCache()
    model(ids(1, 30), cache=cache)
    with pytest.raises(ValueError, match="context_length = 32 tokens, got 33"):
        model(ids(1, 3), cache=cache)
    with pytest.raises(ConfigError, match="documents cannot be combined with a cache"):
        model(ids(), cache=DynamicCache(), documents=torch.zeros(2, 20))


def test_residual_scale_of_the_attention_branch():
    baseline = add_noise(GPT(KINDS["gpt2-baseline"]))
    unscaled = GPT(replace(baseline.config, residual_scale="none"))
    state = baseline.state_dict()
    for name in state:
        if ".attn.c_proj." in name:
            state[name] = state[name] / math.sqrt(2 * baseline.config.num_layers)
    unscaled.load_state_dict(state)
    x = ids()
    torch.testing.assert_close(unscaled(x).logits, baseline(x).logits)


def test_value_embeddings_are_mixed_into_the_values():
    config = replace(TINY, num_layers=5, value_embeddings=2)
    assert [config.value_embedding_of(layer) for layer in range(5)] == [0, 1, None, 0, 1]
    model, plain, x = add_noise(GPT(config)), GPT(replace(config, value_embeddings=0)), ids()
    model.value_embeddings[1].weight.requires_grad_(False)
    assert model.num_parameters() == sum(
        p[: config.vocab_size].numel() if "wte" in name or "value_emb" in name else p.numel()
        for name, p in model.named_parameters()
    )
    for block in model.blocks:
        if block.attn.value_mix is not None:
            block.attn.value_mix.data = torch.tensor([1.0, 0.0])
    plain.load_state_dict({name: p for name, p in model.state_dict().items() if "value_" not in name})
    torch.testing.assert_close(model(x).logits, plain(x).logits)
    block = list(model.blocks)[4]
    block.attn.value_mix.data = torch.tensor([0.0, 1.0])
    rows = model.value_embeddings[1].weight
    before = model(x).logits
    rows.data[x[0, 0]] += 1
    changed = (model(x).logits != before).any(-1)
    assert changed[0].all()  # the first token is a key of all later ones
    with pytest.raises(ConfigError, match="value_embeddings from 0 to 2 .*, got 3"):
        replace(config, value_embeddings=3)


def test_dropout_applies_to_embedding_attention_and_mlp_in_training_only():
    model, plain, x = add_noise(GPT(replace(TINY, dropout=0.25))), GPT(TINY), ids()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(x).logits, plain(x).logits, rtol=0, atol=0)
    streams: list[torch.Tensor] = []
    branches = [model.token_embedding(x) + model.transformer["wpe"](torch.arange(20))]
    for block in model.train().blocks:
        for norm, branch in ((block.ln_1, block.attn), (block.ln_2, block.mlp)):
            norm.register_forward_hook(lambda _, args, __: streams.append(args[0]))
            branch.register_forward_hook(lambda _, __, y: branches.append(y))
    model(x)
    streams.insert(0, torch.zeros_like(streams[0]))
    for before, after, branch in zip(streams, streams[1:], branches, strict=False):
        kept = (after != before).float()
        torch.testing.assert_close(after - before, kept * branch / 0.75, rtol=1e-3, atol=1e-5)
        assert 0.15 < 1 - kept.mean().item() < 0.35  # 1,280 units: a standard deviation of 0.012
    assert len(streams) == 7
    with pytest.raises(ConfigError, match="dropout from 0 to below 1, got 1.0"):
        replace(TINY, dropout=1.0)


def test_logit_softcap():
    uncapped, x = add_noise(GPT(TINY)), ids()
    capped = GPT(replace(TINY, logit_softcap=0.5))
    capped.load_state_dict(uncapped.state_dict())
    torch.testing.assert_close(capped(x).logits, 0.5 * torch.tanh(uncapped(x).logits / 0.5))


def test_autocast_casts_the_residual_stream_but_not_the_loss():
    model, x, dtypes = GPT(TINY), ids(), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x, targets=x).loss
    assert set(dtypes) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(x, targets=x).loss.item(), abs=0.02)


# Warning by torch.compile about its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["gpt2-baseline", "gpt2-fast", "qwen3"])
def test_compiled_blocks_share_one_graph(kind):
    model, x = add_noise(GPT(KINDS[kind])), ids()
    expected = model(x, targets=x).loss
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        loss = model(x, targets=x).loss
        loss.backward()
    assert counters["stats"]["unique_graphs"] == (2 if model.config.value_embeddings else 1)
    torch.testing.assert_close(loss, expected)


@torch.no_grad()
def test_compiled_blocks_accept_any_length():
    model, x = add_noise(GPT(TINY)), ids()
    expected = {length: model(x[:, :length]).logits for length in (16, 12, 9, 1)}
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for length, logits in expected.items():
        torch.testing.assert_close(model(x[:, :length]).logits, logits)
    assert counters["stats"]["unique_graphs"] <= 3  # the first length, any other, a single token


def test_flops_per_token():
    model = GPT(replace(TINY, position="rope", tied_head=False))
    multiplied = model.num_parameters() - 97 * 32
    assert model.flops_per_token(20) == 6 * multiplied + 12 * 3 * 32 * 20
    windowed = GPT(replace(model.config, sliding_window=4))
    assert windowed.flops_per_token(20) == 6 * multiplied + 12 * 3 * 32 * 4


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_of_frozen_weights(tied: bool):
    """A forward product and the gradient of its input, but not that of the weight; padding is not counted."""
    model = GPT(replace(TINY, position="rope", tied_head=tied))
    before, frozen = model.num_parameters(), model.flops_per_token(20)
    apply_lora(model, LoraConfig(rank=2))
    assert model.num_parameters(trainable=False) == before
    adapters = model.num_parameters(trainable=True)
    assert model.num_parameters() == before + adapters
    attention = 12 * 3 * 32 * 20
    assert model.flops_per_token(20) == (frozen - attention) * 4 // 6 + 6 * adapters + attention
