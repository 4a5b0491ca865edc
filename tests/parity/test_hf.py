"""`whimbrel.hf`: every keyword that `transformers` hands a model is honoured or refused."""

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


def test_parts_of_a_batch_add_up_to_its_loss(model, ids):
    labels = ids.clone()
    labels[0, :25] = -100
    whole = model(ids, labels=labels).loss
    count = (labels[:, 1:] != -100).sum()
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=count).loss for i in (0, 1)]
    torch.testing.assert_close(sum(parts), whole)


def test_their_trainer_counts_the_labels_of_the_whole_step(model, ids, tmp_path):
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
def test_their_generate_writes_what_plain_forwards_write(model, ids, options):
    prompt = ids[:1, :9]
    written = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)
    for _ in range(12):
        prompt = torch.cat((prompt, model(prompt).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(written, prompt)


def test_a_cache_is_begun_where_one_is_asked_for(model, ids):
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=False).past_key_values is None
    first = model(ids[:, :30], use_cache=True)
    rest = model(
        ids[:, 30:], past_key_values=first.past_key_values, position_ids=torch.arange(30, 40)[None], use_cache=True
    )
    torch.testing.assert_close(rest.logits, model(ids).logits[:, 30:], atol=1e-5, rtol=0)


def test_a_tuple_comes_where_no_dict_is_wanted(model, ids):
    loss, logits = model(ids, labels=ids, return_dict=False)
    assert loss.shape == ()
    assert logits.shape == (2, 40, 99)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.arange(40).expand(2, 40) > 2}, "attention_mask hides tokens"),
        (
            {"position_ids": torch.arange(40).remainder(20)[None]},
            "position_ids must count 0, 1, ... over the 40 tokens",
        ),
        ({"position_ids": torch.arange(1, 41)[None]}, "position_ids must count"),
        ({"position_ids": torch.arange(39)[None]}, "position_ids must count"),
        ({"cache_position": torch.arange(1, 41)}, "cache_position must count"),
        ({"output_attentions": True}, "output_attentions and output_hidden_states are not supported"),
        ({"output_hidden_states": True}, "output_attentions and output_hidden_states are not supported"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(model, ids, given, message):
    with pytest.raises(RequestError, match=message):
        model(ids, **given)


@pytest.mark.parametrize("name", ["inputs_embeds", "head_mask", "lables"])
def test_an_unknown_keyword_is_refused(model, ids, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        model(ids, **{name: ids})
