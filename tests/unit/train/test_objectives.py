"""Objectives: model outputs, target counts, and a step loss that is one mean over its targets."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.train import (
    BaseTrainer,
    LossOutput,
    Objective,
    TrainerCallback,
    logits_from_outputs,
    loss_and_logits_from_outputs,
    loss_from_outputs,
    read_log,
)
from whimbrel.train.objectives import ModelObjective

LOSS, LOGITS = torch.tensor(1.5), torch.randn(2, 3)


@pytest.mark.parametrize("outputs", [LOGITS, (LOSS, LOGITS), SimpleNamespace(logits=LOGITS), {"logits": LOGITS}])
def test_logits_from_outputs_accepts_tensors_pairs_attributes_and_keys(outputs: Any) -> None:
    assert logits_from_outputs(outputs) is LOGITS


@pytest.mark.parametrize("outputs", [(LOSS,), (LOSS, LOGITS), (LOSS, LOGITS, 3), SimpleNamespace(loss=LOSS)])
def test_loss_from_outputs_accepts_tuples_and_attributes(outputs: Any) -> None:
    assert loss_from_outputs(outputs) is LOSS


@pytest.mark.parametrize(
    "outputs", [(LOSS, LOGITS), SimpleNamespace(loss=LOSS, logits=LOGITS), {"loss": LOSS, "logits": LOGITS}]
)
def test_loss_and_logits_from_outputs_accepts_pairs_attributes_and_keys(outputs: Any) -> None:
    assert loss_and_logits_from_outputs(outputs) == (LOSS, LOGITS)


@pytest.mark.parametrize(
    ("find", "outputs"),
    [
        (loss_from_outputs, LOSS),
        (loss_from_outputs, ("loss", LOGITS)),
        (loss_from_outputs, SimpleNamespace(logits=LOGITS)),
        (logits_from_outputs, SimpleNamespace(loss=LOSS)),
        (logits_from_outputs, (LOSS, LOGITS, 3)),
        (loss_and_logits_from_outputs, LOGITS),
        (loss_and_logits_from_outputs, SimpleNamespace(loss=LOSS)),
        (loss_and_logits_from_outputs, (LOSS, LOGITS, 3)),
    ],
)
def test_missing_loss_or_logits_raises(find: Any, outputs: Any) -> None:
    with pytest.raises(DataError, match="expected .* in the model outputs"):
        find(outputs)


class Tagger(nn.Module):
    """Logits for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


class Mean(Tagger):
    """Returns the mean of its shifted loss and declares it, as transformers models do."""

    loss_type = "ForCausalLM"

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.table(input_ids)
        if labels is None:
            return SimpleNamespace(loss=None, logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (4, 6), generator=generator)
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[3] = -100  # no target in this row
    return [{"input_ids": ids[i : i + 1], "labels": labels[i : i + 1]} for i in range(4)]


@pytest.mark.parametrize("kind", [Tagger, Mean])
@pytest.mark.parametrize("compute", [False, True])
def test_micro_batch_losses_add_up_to_one_large_batch(kind: type[Tagger], compute: bool) -> None:
    """Also with masked targets, and with a micro-batch without targets."""

    def custom_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = logits_from_outputs(outputs)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    torch.manual_seed(0)
    model = kind()
    if compute:
        model.loss_type = "ForCausalLM"
    objective = ModelObjective(custom_loss if compute else None)
    small = batches()
    big = {key: torch.cat([batch[key] for batch in small]) for key in small[0]}
    expected = F.cross_entropy(model.table(big["input_ids"])[:, :-1].flatten(0, 1), big["labels"][:, 1:].flatten())
    expected.backward()
    gradient = model.table.weight.grad
    assert gradient is not None
    model.zero_grad()
    counts = [objective.count(model, batch) for batch in small]
    assert sum(map(int, counts)) == int(objective.count(model, big)) == 11
    total = torch.stack(counts).sum()
    loss = 0.0
    for batch in small:
        part = objective(model, batch, total).loss
        assert part is not None
        part.backward()
        loss += part.item()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(model.table.weight.grad, gradient, atol=1e-7)  # type: ignore[arg-type]


class MaskedMean(Tagger):
    """Divides by the number of targets: 0/0 in forward and backward for a batch without targets."""

    loss_type = "ForTokenClassification"

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.table(input_ids)
        return logits if labels is None else (masked_mean(logits, labels), logits)


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    losses = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


class MaskedMeanTrainer(BaseTrainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        logits = model(inputs["input_ids"])
        loss = masked_mean(logits, inputs["labels"])
        return (loss, logits) if return_outputs else loss


class MaskedMeanStepTrainer(BaseTrainer):
    def training_step(self, *args: Any, **keywords: Any) -> Tensor:
        return super().training_step(*args, **keywords)


@pytest.mark.parametrize(
    ("trainer", "model"),
    [(BaseTrainer, MaskedMean), (MaskedMeanTrainer, Tagger), (MaskedMeanStepTrainer, MaskedMean)],
)
def test_a_micro_batch_without_targets_does_not_change_the_step(
    args: Any, trainer: type[BaseTrainer], model: type[Tagger]
) -> None:
    """Even if the user's loss divides by the number of targets, so that its gradients are NaN."""
    examples = [{"input_ids": batch["input_ids"][0], "labels": batch["labels"][0]} for batch in batches()]

    def fit(order: list[int]) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        net = model()
        settings = args(
            max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=len(order),
            train_sampling_strategy="sequential",
        )  # fmt: skip
        run = trainer(settings, net, train_dataset=[examples[i] for i in order])
        return run.train().training_loss, net.table.weight.detach()

    loss, weight = fit([0, 1, 2])
    assert math.isfinite(loss)
    for order in ([3, 0, 1, 2], [0, 1, 3, 2]):
        other_loss, other_weight = fit(order)
        assert other_loss == loss
        assert torch.equal(other_weight, weight)


def test_a_step_without_targets_has_zero_gradients(args: Any) -> None:
    empty = [{"input_ids": torch.arange(6), "labels": torch.full((6,), -100)}]
    settings = args(max_steps=1, per_device_train_batch_size=1, weight_decay=0.0)
    torch.manual_seed(0)
    net = MaskedMean()
    before = net.table.weight.detach().clone()
    assert BaseTrainer(settings, net, train_dataset=empty).train().training_loss == 0.0
    assert torch.equal(net.table.weight, before)


class Scored(Tagger):
    """Token classification: the mean loss over labels that are not masked, unshifted."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.table(input_ids)
        return logits if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Column(nn.Module):
    """A classifier with labels of shape (batch, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layer(x)
        return F.cross_entropy(logits, labels.squeeze(1)), logits


class ColumnLogits(Column):
    """The same without a loss: sequences of length one."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.layer(x).unsqueeze(1)


@pytest.mark.parametrize("kind", [Scored, Column, ColumnLogits])
def test_accumulation_is_exact_for_unshifted_labels(args: Any, fit: Any, kind: type[nn.Module]) -> None:
    """Eight steps over four micro-batches of two give the losses and weights of eight over one batch of eight."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(8):
        labels = torch.randint(0, 3, (6,), generator=generator)
        labels[1 + i % 5 :] = -100
        tokens = {"input_ids": torch.randint(0, 11, (6,), generator=generator), "labels": labels}
        rows.append(tokens if kind is Scored else {"x": torch.randn(4, generator=generator), "labels": labels[:1]})
    found = []
    for size in (8, 2):
        torch.manual_seed(0)
        model = kind()
        before = [p.detach().clone() for p in model.parameters()]
        settings = args(per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
        _, losses = fit(settings, model, train_dataset=rows)
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        found.append((losses.values, list(model.parameters())))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-6)
    for p, q in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(p, q, atol=1e-6)


@pytest.mark.parametrize(("kind", "shift"), [(None, 1), ("ForCausalLM", 1), ("ForTokenClassification", 0)])
def test_logits_of_sequences_are_scored_against_the_next_token(kind: str | None, shift: int) -> None:
    """Also if the model accepts labels and returns only logits; it runs once."""

    class ReturnsLogits(Tagger):
        loss_type, calls = kind, 0

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
            self.calls += 1
            return self.table(input_ids)

    batch, one, model = batches()[1], torch.tensor(1), ReturnsLogits()
    logits = model.table(batch["input_ids"])[0, : 6 - shift]
    expected = F.cross_entropy(logits, batch["labels"][0, shift:], reduction="sum")
    objective = ModelObjective()
    assert int(objective.count(model, batch)) == 6 - shift
    assert torch.allclose(objective(model, batch, one).loss, expected)
    assert model.calls == 1


class BatchNormNet(nn.Module):
    """A classifier with batch norm, whose statistics change with each forward in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.training_calls, self.calls = 0, 0

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        self.training_calls += self.training
        logits = self.layers(x)
        return F.cross_entropy(logits, labels), logits


def test_each_micro_batch_runs_through_the_model_once(args: Any, data: Any) -> None:
    model = BatchNormNet()
    settings = args(max_steps=3, gradient_accumulation_steps=2, per_device_eval_batch_size=4)
    trainer = BaseTrainer(settings, model, train_dataset=data(), eval_dataset=data(8))
    trainer.train()
    assert (model.calls, model.training_calls) == (6, 6)
    assert int(model.layers[1].num_batches_tracked) == 6
    trainer.evaluate()
    assert (model.calls, model.training_calls) == (8, 6)
    trainer.predict(data(8))
    assert (model.calls, model.training_calls) == (10, 6)


def test_batch_norm_and_dropout_resume_bit_identically(args: Any, fit: Any, data: Any, tmp_path: Path) -> None:
    """Batch norm statistics, weights, losses and the evaluation loss."""
    found = []
    for name, stops in (("uninterrupted", (8,)), ("interrupted", (3, 5, 8))):
        losses: list[str] = []
        for stop in stops:
            torch.manual_seed(0)
            settings = args(
                output_dir=str(tmp_path / name), max_steps=stop, save_strategy="steps", save_steps=1,
                gradient_accumulation_steps=2,
            )  # fmt: skip
            trainer, watched = fit(settings, BatchNormNet(), eval_dataset=data(10), resume=True)
            losses += watched.hex
        found.append((losses, trainer.evaluate()["eval_loss"].hex(), trainer.unwrapped_model().state_dict()))
    assert len(found[0][0]) == 8
    assert found[1][:2] == found[0][:2]
    assert all(torch.equal(tensor, found[1][2][name]) for name, tensor in found[0][2].items())


def test_the_first_forward_runs_under_autocast(args: Any, fit: Any, data: Any) -> None:
    """Weights of two dtypes: without autocast their matmul raises."""

    class Mixed(BatchNormNet):
        def __init__(self) -> None:
            super().__init__()
            self.layers[3].bfloat16()

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            loss, logits = super().forward(x, labels)
            return {"loss": loss, "logits": logits}

    trainer, losses = fit(args(max_steps=2, mixed_precision="bf16"), Mixed(), eval_dataset=data(6))
    assert len(losses.values) == 2
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(data(6)).predictions.shape == (6, 3)


class Autoencoder(nn.Module):
    """Its loss needs no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return {"loss": F.mse_loss(self.layer(x), x)}


def test_batches_without_labels_are_weighted_by_samples(args: Any, fit: Any, data: Any) -> None:
    """A short last batch has less weight, in evaluation and in a step of several micro-batches."""
    rows = [{"x": row["x"] * (1 + i)} for i, row in enumerate(data(5))]
    found = []
    for size in (5, 4):
        torch.manual_seed(0)
        settings = args(
            per_device_train_batch_size=size, gradient_accumulation_steps=-(-5 // size), max_steps=2,
            per_device_eval_batch_size=size,
        )  # fmt: skip
        trainer, losses = fit(settings, Autoencoder(), train_dataset=rows, eval_dataset=rows)
        found.append([*losses.values, trainer.evaluate()["eval_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


TINY: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "max_position_embeddings": 16,
}  # fmt: skip


class Wrapped(GPT2LMHeadModel):  # type: ignore[misc]
    """A user's subclass with its own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


TINY_GPT2 = GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2)


@pytest.mark.parametrize(
    ("model", "shift"),
    [
        (GPT2LMHeadModel(TINY_GPT2), 1),
        (Wrapped(TINY_GPT2), 1),
        (LlamaForCausalLM(LlamaConfig(**TINY)), 1),
        (BertForMaskedLM(BertConfig(**TINY)), 0),
        (BertForTokenClassification(BertConfig(**TINY, num_labels=11)), 0),
    ],
)
def test_target_counts_match_the_losses_of_transformers_models(model: nn.Module, shift: int) -> None:
    """The model's mean loss times our count equals the sum over its targets."""
    model.eval()
    batch = {"input_ids": torch.arange(12).reshape(2, 6) % 11, "labels": torch.arange(12).reshape(2, 6) % 11}
    batch["labels"][0, 3:] = -100
    objective, one = ModelObjective(), torch.tensor(1)
    count = objective.count(model, batch)
    logits = model(batch["input_ids"]).logits[:, : 6 - shift]
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, shift:].flatten(), reduction="sum")
    assert int(count) == 9 - 2 * shift
    assert torch.allclose(objective(model, batch, one).loss, expected)


def test_labels_of_an_encoder_decoder_are_not_shifted() -> None:
    sizes: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
    ids = torch.arange(12).reshape(2, 6) % 11
    objective, one = ModelObjective(), torch.tensor(1)
    batch = {"input_ids": ids, "labels": ids}
    assert int(objective.count(model, batch)) == 12
    expected = F.cross_entropy(model(**batch).logits.flatten(0, 1), ids.flatten(), reduction="sum")
    assert torch.allclose(objective(model, batch, one).loss, expected)


@pytest.mark.parametrize("parts", [1, 3])
def test_tuples_other_than_pairs_raise(parts: int) -> None:
    batch: Any = (torch.zeros(1, 2, dtype=torch.int64),) * parts
    with pytest.raises(DataError, match=f"expected .* got a tuple of {parts} parts"):
        ModelObjective().count(Tagger(), batch)
    with pytest.raises(DataError, match="expected .* got a Tensor"):
        ModelObjective().count(Tagger(), batch[0])


def test_class_labels_are_not_shifted() -> None:
    model = nn.Linear(3, 5)

    class Classifier(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(x)

    batch = {"x": torch.randn(4, 3), "labels": torch.tensor([0, 4, -100, 2])}
    wrapped = Classifier()
    wrapped.inner = model
    objective = ModelObjective()
    assert int(objective.count(wrapped, batch)) == 3
    expected = F.cross_entropy(model(batch["x"]), batch["labels"])
    assert torch.allclose(objective(wrapped, batch, torch.tensor(3)).loss, expected)


def test_unknown_inputs_and_missing_labels_raise() -> None:
    objective = ModelObjective()
    with pytest.raises(DataError, match="input_ids.* got 'tokens'"):
        objective(Tagger(), {"tokens": torch.zeros(1, 2, dtype=torch.int64)}, torch.tensor(1))
    with pytest.raises(DataError, match="without labels"):
        objective(Tagger(), {"input_ids": torch.zeros(1, 2, dtype=torch.int64)}, torch.tensor(1))


class Margin(Objective):
    """Twice the cross-entropy, and the accuracy as a metric."""

    def __call__(self, model: nn.Module, batch: Any, num_items: Tensor, *, with_logits: bool = False) -> LossOutput:
        outputs = model(batch["x"])
        loss = 2 * F.cross_entropy(outputs, batch["labels"], reduction="sum") / num_items
        correct = (outputs.argmax(-1) == batch["labels"]).sum() / num_items
        return LossOutput(loss, outputs, {"accuracy": correct})


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_custom_objective_is_trained_evaluated_and_its_metrics_logged(
    args: Any, net: Any, data: Any, accumulation: int
) -> None:
    seen: list[dict[str, Any]] = []

    class RecordMetrics(TrainerCallback):
        def on_train_metrics(self, **event: Any) -> None:
            seen.append(event["metrics"])

    model, rows = net(), data(12)
    x, labels = torch.stack([row["x"] for row in rows]), torch.tensor([row["labels"] for row in rows])
    logits = model(x)
    loss, accuracy = 2 * F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).double().mean()
    settings = args(
        max_steps=2, per_device_train_batch_size=12 // accumulation, gradient_accumulation_steps=accumulation
    )
    trainer = BaseTrainer(
        settings, model, train_dataset=rows, eval_dataset=rows, objective=Margin(), callbacks=[RecordMetrics()]
    )
    trainer.train()
    assert seen[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert seen[0]["accuracy"] == pytest.approx(accuracy.item(), abs=1e-6)
    logged = trainer.state.log_history[-1]  # both steps
    assert logged["accuracy"] == pytest.approx((seen[0]["accuracy"] + seen[1]["accuracy"]) / 2)
    lines = read_log(Path(settings.output_dir) / "log.jsonl")
    assert [line["accuracy"] for line in lines if line["kind"] == "step"] == [line["accuracy"] for line in seen]
    expected = 2 * F.cross_entropy(model(x), labels)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(expected.item(), abs=1e-6)
    accuracy = (model(x).argmax(-1) == labels).double().mean()
    assert metrics["eval_accuracy"] == pytest.approx(accuracy.item(), abs=1e-6)
    assert trainer.predict(rows).metrics["test_loss"] == pytest.approx(expected.item(), abs=1e-6)


def test_objective_and_compute_loss_func_exclude_each_other(args: Any, net: Any, data: Any) -> None:
    with pytest.raises(ConfigError, match="objective or compute_loss_func, got both"):
        BaseTrainer(args(), net(), train_dataset=data(), objective=Margin(), compute_loss_func=lambda *_: None)


def margin(model: nn.Module, batch: Any) -> Any:
    """`Margin` as a function."""
    outputs = model(batch.pop("x"))
    labels = batch.pop("labels")
    loss = 2 * F.cross_entropy(outputs, labels, reduction="sum")
    return loss, len(labels), {"accuracy": (outputs.argmax(-1) == labels).sum(), "constant": 7.0 * len(labels)}


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_a_function_is_an_objective(args: Any, net: Any, data: Any, clip: float) -> None:
    """Of micro-batches with 5, 5 and 2 samples: the same steps, metrics and evaluation as an `Objective`."""
    rows, found = data(12), []
    for objective in (Margin(), margin):
        settings = args(
            max_steps=4, per_device_train_batch_size=5, gradient_accumulation_steps=3, max_grad_norm=clip,
            logging_steps=1,
        )  # fmt: skip
        trainer = BaseTrainer(settings, net(), train_dataset=rows, eval_dataset=rows, objective=objective)
        trainer.train()
        logs = [[entry[k] for k in ("loss", "grad_norm", "accuracy")] for entry in trainer.state.log_history]
        metrics = trainer.evaluate()
        found.append((logs, metrics["eval_loss"], metrics["eval_accuracy"], list(trainer.model.parameters())))
    assert metrics["eval_constant"] == pytest.approx(7.0)
    assert trainer.state.log_history[0]["constant"] == pytest.approx(7.0)
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


def test_a_function_is_called_once_per_batch(args: Any, net: Any, data: Any) -> None:
    calls = 0

    def counted(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        return margin(model, batch)[:2]

    settings = args(max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    trainer = BaseTrainer(settings, net(), train_dataset=data(12), eval_dataset=data(8), objective=counted)
    trainer.train()
    assert calls == 6
    trainer.evaluate()
    assert calls == 7


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: loss, "from the objective wrong, got Tensor"),
        (lambda loss: (loss, 1, {}, None), "from the objective wrong, got 4 values"),
        (lambda loss: (loss.repeat(2), 1), "scalar loss tensor from the objective wrong, got a tensor of shape"),
        (lambda loss: (loss, torch.ones(2)), "count and metrics from the objective wrong as scalars"),
    ],
)
def test_wrong_results_of_a_function_raise(args: Any, net: Any, data: Any, result: Any, message: str) -> None:
    def wrong(model: nn.Module, batch: Any) -> Any:
        return result(model(batch["x"]).sum())

    with pytest.raises(DataError, match=message):
        BaseTrainer(args(), net(), train_dataset=data(), objective=wrong).train()


def test_what_is_no_objective_is_refused(args: Any, net: Any, data: Any) -> None:
    for wrong, got in ((Margin, "the class Margin"), ("dpo", "str")):
        with pytest.raises(ConfigError, match=f"expected an Objective or a function .* got {got}"):
            BaseTrainer(args(), net(), train_dataset=data(), objective=wrong)
    with pytest.raises(ConfigError, match="a function as objective does not work with train.optimizer_in_backward"):
        BaseTrainer(args(optimizer_in_backward=True), net(), train_dataset=data(), objective=margin)


def test_logged_metrics_include_the_steps_before_a_resume(args: Any, net: Any, data: Any) -> None:
    settings = {"max_steps": 4, "logging_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = BaseTrainer(args(**settings), net(), train_dataset=data(), objective=Margin())
    trainer.train()
    expected = trainer.state.log_history[-1]
    folder = Path(trainer.config.output_dir)
    resumed = BaseTrainer(args(**settings), net(), train_dataset=data(), objective=Margin())
    resumed.train(resume_from_checkpoint=folder / "checkpoints" / "step-00000002")
    assert resumed.state.log_history[-1]["accuracy"] == expected["accuracy"]
    assert resumed.state.log_history[-1]["loss"] == expected["loss"]
