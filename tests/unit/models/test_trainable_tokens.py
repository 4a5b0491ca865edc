"""Trained rows of embedding and head under LoRA, against a model whose weights have the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.models import KINDS, add_noise
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora, lora_disabled, lora_parameters, merge_lora
from whimbrel.models.lora import initialize_lora, remove_lora, token_modules, trainable_tokens
from whimbrel.ops import linear_log_probs
from whimbrel.optim import classify_parameters
from whimbrel.precision import quantize_

LLAMA = replace(KINDS["llama3"], embd_size=64, num_heads=4, num_kv_heads=2, mlp_size=96, logit_softcap=5.0)
TOKENS = (96, 3, 50)
CLOSE = {"atol": 3e-5, "rtol": 1e-4}
"""For sums of about a hundred terms of size 1 in fp32."""


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def config(request: pytest.FixtureRequest) -> GPTConfig:
    return replace(LLAMA, tied_head=request.param)


@pytest.fixture
def ids() -> Tensor:
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 2:5] = torch.tensor(TOKENS)
    return ids


def make(config: GPTConfig, **options: object) -> GPT:
    torch.manual_seed(0)
    model = add_noise(GPT(config))
    tokens = dict.fromkeys(token_modules(config), TOKENS)
    apply_lora(model, LoraConfig(rank=2), tokens=tokens, **options)
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def dense(model: GPT) -> GPT:
    """The same adapters on weights that have the rows, all of which require gradients."""
    rows = {name: module.trainable_tokens.detach() for name, module in trainable_tokens(model).items()}
    copy = add_noise(GPT(model.config))
    copy.load_state_dict({k: v for k, v in model.state_dict().items() if "adapters" not in k and "tokens" not in k})
    with torch.no_grad():
        for name, values in rows.items():
            copy.get_parameter(f"{name}.weight")[list(TOKENS)] = values
    apply_lora(copy, LoraConfig(rank=2))
    copy.load_state_dict({k: v for k, v in model.state_dict().items() if "adapters" in k}, strict=False)
    for name in rows:
        copy.get_parameter(f"{name}.weight").requires_grad_()
    return copy


LOSSES = {
    "labels": lambda model, ids: model(ids, labels=ids).loss,
    "targets": lambda model, ids: model(ids, targets=ids.roll(-1, 1)).loss,
    "loss_fn": lambda model, ids: model(
        ids, loss_fn=lambda hidden, weight: linear_log_probs(hidden, weight, ids.flatten(), vocab_size=97)
    ).loss.sum(),
    "logits": lambda model, ids: model(ids).logits.square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_are_those_of_the_weights(config, ids, loss):
    model = make(config)
    expected = dense(model)
    losses = [LOSSES[loss](each, ids) for each in (model, expected)]
    torch.testing.assert_close(losses[0], losses[1])
    for each in losses:
        each.backward()
    for name, module in trainable_tokens(model).items():
        gradient = expected.get_parameter(f"{name}.weight").grad[list(TOKENS)]
        assert gradient.abs().max() > 0
        torch.testing.assert_close(module.trainable_tokens.grad, gradient, **CLOSE)
    trained = dict(lora_parameters(expected))
    for name, parameter in lora_parameters(model):
        if "trainable_tokens" not in name:
            torch.testing.assert_close(parameter.grad, trained[name].grad, **CLOSE, msg=name)


def test_rows_start_with_those_of_the_weights_and_only_they_are_trained(config, ids):
    torch.manual_seed(0)
    model = add_noise(GPT(config))
    before = model(ids).logits
    names = token_modules(config)
    apply_lora(model, LoraConfig(rank=2), tokens=dict.fromkeys(names, TOKENS))
    torch.testing.assert_close(model(ids).logits, before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in lora_parameters(model)}
    assert {f"{name}.trainable_tokens" for name in names} <= trained
    roles = {item.name: item.role for item in classify_parameters(model)}
    assert roles["transformer.wte.trainable_tokens"] == "embedding"
    assert roles.get("lm_head.trainable_tokens", "head") == "head"


def test_disabled_merged_and_removed(config, ids):
    model, base = make(config), make(config)
    remove_lora(base)
    assert [type(module) for module in (base.token_embedding, base.lm_head)] == [torch.nn.Embedding, torch.nn.Linear]
    expected = model(ids).logits
    assert not torch.allclose(expected, base(ids).logits, atol=1e-3)
    with lora_disabled(model):
        torch.testing.assert_close(model(ids).logits, base(ids).logits)
        torch.testing.assert_close(model(ids, targets=ids).loss, base(ids, targets=ids).loss)
    torch.testing.assert_close(model(ids).logits, expected)
    merge_lora(model)
    torch.testing.assert_close(model(ids).logits, expected, **CLOSE)
    assert (model.lm_head.weight is model.token_embedding.weight) == config.tied_head
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_quantized_embeddings(config, ids):
    torch.manual_seed(0)
    model = add_noise(GPT(config))
    quantize_(model, "int8", embeddings=True)
    before = model(ids).logits
    apply_lora(model, LoraConfig(rank=2), tokens=dict.fromkeys(token_modules(config), TOKENS))
    torch.testing.assert_close(model(ids).logits, before)
    with torch.no_grad():
        for module in trainable_tokens(model).values():
            module.trainable_tokens.add_(0.1)
    expected = model(ids).logits
    torch.testing.assert_close(model(ids, targets=ids, return_logits=True).logits, expected)
    merge_lora(model)
    torch.testing.assert_close(model(ids).logits, expected, **CLOSE)


def test_a_meta_model_is_initialized_after_loading(config, ids):
    expected = make(config)
    with torch.device("meta"):
        model = GPT(config)
    apply_lora(model, LoraConfig(rank=2), tokens=dict.fromkeys(token_modules(config), TOKENS))
    model.to_empty(device="cpu")
    model.tie_head()
    remove_lora(expected)
    model.load_state_dict(expected.state_dict(), strict=False)
    initialize_lora(model)
    torch.testing.assert_close(model(ids).logits, expected(ids).logits)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # warning by dynamo
def test_compiled_forward_and_autocast(config, ids):
    model = make(config)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    torch.testing.assert_close(compiled(ids, targets=ids).loss, model(ids, targets=ids).loss)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, targets=ids).loss
    loss.backward()
    assert all(module.trainable_tokens.grad.dtype == torch.float32 for module in trainable_tokens(model).values())
    torch.testing.assert_close(loss, model(ids, targets=ids).loss, atol=0.05, rtol=0.02)  # bf16 has 8 bits


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"transformer.wte": [5, 5]}, "expected unique ids"),
        ({"transformer.wte": [1000]}, "expected unique ids from 0 to"),
        ({"lm_head": [5]}, "expected one of .*wte.*, got 'lm_head'"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens, message):
    with pytest.raises(ConfigError, match=message):
        apply_lora(GPT(replace(LLAMA, tied_head=True)), LoraConfig(rank=2), tokens=tokens)
