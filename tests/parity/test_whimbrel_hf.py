"""`whimbrel.hf`: every keyword that transformers passes to a model is supported or rejected."""

from __future__ import annotations

import pytest
import torch
import transformers

from whimbrel.base.errors import RequestError
from whimbrel.hf import WhimbrelConfig, WhimbrelForCausalLM


@pytest.fixture
def model() -> WhimbrelForCausalLM:
    torch.manual_seed(0)
    shape = {"num_layers": 2, "vocab_size": 99, "embd_size": 48, "num_heads": 4, "context_length": 64, "init_std": 0.1}
    return WhimbrelForCausalLM(WhimbrelConfig(gpt=shape))


def test_losses_of_micro_batches_add_up(model, ids):
    labels = ids.clone()
    labels[0, :25] = -100
    full_loss = model(ids, labels=labels).loss
    count = (labels[:, 1:] != -100).sum()
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=count).loss for i in (0, 1)]
    torch.testing.assert_close(sum(parts), full_loss)


def test_transformers_trainer_averages_over_accumulated_batches(model, ids, tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs the package 'accelerate'")
    texts = [{"input_ids": row, "labels": row.clone()} for row in ids]
    texts[0]["labels"][:25] = -100
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = []
    for size in (1, 2):
        model.load_state_dict(weights)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=2 // size,
            max_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        losses.append(transformers.Trainer(model, arguments, train_dataset=texts).train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}])
def test_generate_equals_greedy_decoding_without_a_cache(model, ids, options):
    prompt = ids[:1, :9]
    generated = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)
    for _ in range(12):
        prompt = torch.cat((prompt, model(prompt).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generated, prompt)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_supports_left_padded_batches(model, ids, use_cache):
    prompts, mask = ids[:, :9].clone(), torch.ones(2, 9, dtype=torch.int64)
    prompts[1, :4], mask[1, :4] = 0, 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    batch = model.generate(prompts, attention_mask=mask, **options)
    for sequence, prompt in zip(batch, (ids[:1, :9], ids[1:, 4:9]), strict=True):
        assert torch.equal(sequence[9:], model.generate(prompt, **options)[0, prompt.size(1) :])


def test_use_cache_creates_a_cache(model, ids):
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=False).past_key_values is None
    first = model(ids[:, :30], use_cache=True)
    rest = model(
        ids[:, 30:], past_key_values=first.past_key_values, position_ids=torch.arange(30, 40)[None], use_cache=True
    )
    torch.testing.assert_close(rest.logits, model(ids).logits[:, 30:], atol=1e-5, rtol=0)


def test_return_dict_false_returns_a_tuple(model, ids):
    loss, logits = model(ids, labels=ids, return_dict=False)
    assert loss.shape == ()
    assert logits.shape == (2, 40, 99)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"position_ids": torch.arange(40).remainder(20)[None]},
            "position_ids = 0, 1, ... without gaps between non-padding tokens",
        ),
        ({"position_ids": torch.arange(1, 41)[None]}, "expected position_ids = 0"),
        ({"position_ids": torch.arange(39)[None]}, "expected position_ids = 0"),
        ({"cache_position": torch.arange(1, 41)}, "expected cache_position = 0"),
        ({"output_attentions": True}, "output_attentions and output_hidden_states are not supported"),
        ({"output_hidden_states": True}, "output_attentions and output_hidden_states are not supported"),
    ],
)
def test_unsupported_arguments_are_rejected(model, ids, kwargs, message):
    with pytest.raises(RequestError, match=message):
        model(ids, **kwargs)


@pytest.mark.parametrize("name", ["inputs_embeds", "head_mask", "lables"])
def test_unknown_keywords_are_rejected(model, ids, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        model(ids, **{name: ids})
