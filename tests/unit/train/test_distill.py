"""Distillation: loss, teacher values on disk, and a student that learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.models import GPT, GPTConfig
from whimbrel.train import BaseTrainer, Distillation, TrainingArguments, precompute_teacher, read_log
from whimbrel.train.batches import collate

VOCAB, TOKENS = 53, 12


def make_model(seed: int, scale: float = 1.0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=VOCAB, context_length=16, num_layers=1, embd_size=32, num_heads=2))
    with torch.no_grad():
        model.token_embedding.weight.mul_(scale)
        model.zero_padding()
    return model


def make_llama(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).eval()


def make_rows(count: int) -> list[dict[str, Tensor]]:
    """Rows whose first tokens are a prompt, of another length in every row."""
    ids = torch.randint(0, VOCAB, (count, TOKENS), generator=torch.Generator().manual_seed(0))
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    for index, row in enumerate(targets):
        row[: 1 + index % 4] = -100
    return [{"input_ids": a, "targets": b} for a, b in zip(ids, targets, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("make", [make_model, make_llama])
def test_distillation_with_the_whole_vocabulary_is_the_kl_divergence(
    tmp_path: Path, make: Any, temperature: float
) -> None:
    """Of the targets only, of our model and of one that returns logits."""
    teacher, student, rows = make(0), make(1), make_rows(5)
    data = precompute_teacher(teacher, rows, tmp_path / "teacher", k=VOCAB, temperature=temperature, batch_size=2)
    batch = collate([data[index] for index in range(5)])
    objective = Distillation(temperature=temperature)
    count = objective.count(student, batch)
    assert count == (batch["targets"] != -100).sum()
    loss = objective(student, batch, count).loss
    assert loss is not None

    def log_probs(model: Any) -> Tensor:
        return torch.log_softmax(model(batch["input_ids"]).logits[batch["targets"] != -100] / temperature, dim=-1)

    divergence = F.kl_div(log_probs(student), log_probs(teacher).detach(), log_target=True, reduction="batchmean")
    expected = divergence * temperature**2
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    parameters = list(student.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), atol=1e-5, rtol=1e-4
    )
    same = objective(teacher, batch, count).loss
    assert same is not None
    assert abs(float(same.detach())) < 1e-5


def test_logits_are_outputs_if_needed() -> None:
    model, rows = make_model(0), make_rows(2)
    batch = collate(rows) | {
        "teacher_ids": torch.zeros(2, TOKENS, 1, dtype=torch.int32), "teacher_log_probs": torch.zeros(2, TOKENS, 1),
    }  # fmt: skip
    one = torch.tensor(1)
    assert Distillation()(model, batch, one).outputs.logits is None
    outputs = Distillation()(model, batch, one, with_logits=True).outputs
    torch.testing.assert_close(outputs.logits, model(batch["input_ids"]).logits)


def test_a_student_learns_the_teachers_distribution(tmp_path: Path) -> None:
    teacher, rows = make_model(0, scale=20.0), make_rows(40)
    data = precompute_teacher(teacher, rows, tmp_path / "teacher", k=8)
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=60, per_device_train_batch_size=10, learning_rate=1e-2,
        use_cpu=True, save_strategy="no",
    )  # fmt: skip
    trainer = BaseTrainer(args, make_model(1), train_dataset=data, eval_dataset=data, objective=Distillation())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    steps = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "step"]
    assert steps[0]["loss"] == pytest.approx(before, rel=0.2)
    supervised = [line["supervised_tokens"] for line in steps[:4]]  # an epoch
    assert sum(supervised) == sum(int((row["targets"] != -100).sum()) for row in rows)
    assert trainer.evaluate()["eval_loss"] < 0.5 * before


def test_wrong_settings_and_batches_raise(tmp_path: Path) -> None:
    model, batch = make_model(0), collate(make_rows(2))
    with pytest.raises(ConfigError, match="positive temperature, got 0"):
        Distillation(temperature=0.0)
    with pytest.raises(DataError, match="expected k from 1 to the 53 tokens"):
        precompute_teacher(model, make_rows(2), tmp_path / "teacher", k=54)
    assert not (tmp_path / "teacher").exists()
    with pytest.raises(DataError, match="expected teacher_ids in the batch, got none: .* precompute_teacher"):
        Distillation().count(model, batch)
    values = {"teacher_ids": torch.zeros(2, TOKENS, 3), "teacher_log_probs": torch.zeros(2, TOKENS, 4)}
    with pytest.raises(DataError, match=r"of shape \[2, 12, 'k'\], got \[2, 12, 3\] and \[2, 12, 4\]"):
        Distillation().count(model, batch | values)
