"""Models of transformers as pipeline stages: chained, they compute the loss and the gradients of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.pipeline import CausalLMStage, check_stages

VOCAB, LENGTH = 61, 12
RANGES = [range(1), range(1, 3), range(3, 4)]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
HEAD: dict[str, Any] = {"head_dim": 4}
SUPPORTED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": HEAD,
    "Mistral": {"sliding_window": 4},
    "Gemma": HEAD,
    "Gemma2": HEAD | {"sliding_window": 4, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    "Gemma3": HEAD | {"sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 4},
    "GPTNeoX": {},
    "Phi3": {},
    "Olmo2": {},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "GPT2": {},
}
REFUSED: dict[str, dict[str, Any]] = {
    "Bloom": {},
    "Falcon": {},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "Bert": {},
}


def make_model(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**SIZES | SUPPORTED.get(family, REFUSED.get(family, {})) | settings)
    suffix = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM"}.get(family, "ForCausalLM")
    model = getattr(transformers, f"{family}{suffix}")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def chain(model: nn.Module, input_ids: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """The mean loss of the stages, each on the output of the one before."""
    targets, x = F.pad(labels[:, 1:], (0, 1), value=-100), input_ids
    for layers in RANGES:
        x = CausalLMStage(model, layers)(x, targets=targets, attention_mask=mask)
    return x.sum() / (targets != -100).sum()


def loss_and_gradients(model: Any, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", SUPPORTED)
def test_chained_stages_have_the_loss_and_gradients_of_the_model(family: str) -> None:
    """With padding on the right; what the model does outside of its layers happens once."""
    model = make_model(family).eval()
    before = dict(model.named_modules())
    input_ids = torch.randint(1, VOCAB, (2, LENGTH))
    labels, mask = input_ids.clone(), torch.ones_like(input_ids)
    labels[1, 8:], mask[1, 8:] = -100, 0
    expected, gradients = loss_and_gradients(model, model(input_ids, attention_mask=mask, labels=labels).loss)
    loss, found = loss_and_gradients(model, chain(model, input_ids, labels, mask))
    torch.testing.assert_close(loss, expected)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    check_stages(model, RANGES)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_split_are_refused(family: str) -> None:
    model = make_model(family)
    with pytest.raises(ConfigError, match=f"{type(model).__name__} cannot be split .*: set parallel.pp = 1") as raised:
        check_stages(model, RANGES)
    assert "\n" not in str(raised.value)


def test_parameters_that_would_be_in_several_stages_are_refused() -> None:
    class Biased(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.extra = nn.Linear(VOCAB, VOCAB)

    with pytest.raises(ConfigError, match=r"\(extra.weight is in 3 stages\)"):
        check_stages(Biased(transformers.LlamaConfig(**SIZES)), RANGES)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Mixtral", {"output_router_logits": True}, "output_router_logits = True adds an auxiliary loss"),
        ("OPT", {"layerdrop": 0.1}, "layerdrop = 0.1 skips layers at random"),
    ],
)
def test_settings_that_a_pipeline_ignores_are_refused(family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_stages(make_model(family, **settings), RANGES)


def test_the_check_needs_no_weights_and_no_random_numbers() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    state = torch.get_rng_state()
    check_stages(model, RANGES)
    assert torch.equal(torch.get_rng_state(), state)


def test_only_the_first_stage_applies_the_dropout_of_the_embedding() -> None:
    model = make_model("GPT2", embd_pdrop=0.5, resid_pdrop=0.0, attn_pdrop=0.0).train()
    first, second, _ = (CausalLMStage(model, layers) for layers in RANGES)
    input_ids = torch.randint(1, VOCAB, (2, LENGTH))
    hidden_states = first(input_ids, targets=input_ids)
    assert not torch.equal(hidden_states, first(input_ids, targets=input_ids))
    assert torch.equal(second(hidden_states, targets=input_ids), second(hidden_states, targets=input_ids))
