"""Our Trainer against `transformers.Trainer`: the same losses and weights, and compatibility with its callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import Trainer as HFTrainer
from transformers import TrainerCallback as HFTrainerCallback
from transformers import TrainingArguments as HFTrainingArguments

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import list_checkpoints
from whimbrel.train import BaseTrainer, TrainerCallback, TrainingArguments


def rows(count: int = 12) -> Dataset:
    """Sequences of equal length, some with half of the labels masked, and a column that the model does not accept.

    The first label is always masked: transformers counts it as a target although the shift drops it.
    """
    ids = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[::3, :8] = -100
    labels[:, 0] = -100
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist(), "name": ["a"] * count})


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )  # fmt: skip


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 12, "max_steps": 12, "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 3,
    "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "adam_beta2": 0.95,
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("batch", [12, 3])
def test_losses_learning_rates_norms_and_weights_match_transformers(tmp_path: Path, schedule: str, batch: int) -> None:
    """Each step sees all data, so the order does not matter; transformers uses one micro-batch, ours one or four."""
    ours, theirs = model(), model()
    hf_args = HFTrainingArguments(
        output_dir=str(tmp_path / "theirs"), lr_scheduler_type=schedule, report_to=[], disable_tqdm=True, **SETTINGS
    )
    hf_trainer = HFTrainer(theirs, hf_args, train_dataset=rows())
    hf_trainer.train()
    arguments = SETTINGS | {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 12 // batch}
    trainer = BaseTrainer(
        TrainingArguments(output_dir=str(tmp_path / "ours"), lr_scheduler_type=schedule, **arguments),
        ours,
        train_dataset=rows(),
    )
    trainer.train()
    for key in ("loss", "grad_norm", "learning_rate"):
        expected = [line[key] for line in hf_trainer.state.log_history if key in line]
        assert [line[key] for line in trainer.state.log_history if key in line] == pytest.approx(expected, rel=1e-3)
    assert len(trainer.state.log_history) == 12
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3), name
    assert trainer.evaluate(rows())["eval_loss"] == pytest.approx(hf_trainer.evaluate(rows())["eval_loss"], abs=2e-3)


def test_early_stopping_callback_of_transformers_works(tmp_path: Path) -> None:
    values = iter([0.9, 0.8, 0.85, 0.84, 0.1])

    class Scripted(BaseTrainer):
        def _eval_loop(self) -> dict[str, float]:
            return {"eval_loss": next(values)}

    arguments = SETTINGS | {"save_strategy": "steps", "save_steps": 1, "max_steps": 9}
    trainer = Scripted(
        TrainingArguments(
            output_dir=str(tmp_path), eval_strategy="steps", eval_steps=1, preserve_best_model=True,
            save_total_limit=1, **arguments,
        ),
        model(), train_dataset=rows(), eval_dataset=rows(), callbacks=[EarlyStoppingCallback(2)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.stopped_by == ("EarlyStoppingCallback", "on_evaluate", "stop")
    assert trainer.state.best_metric == 0.8
    assert list(list_checkpoints(tmp_path)) == [2, 4]


def test_tensorboard_and_printer_callbacks_of_transformers_work(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import PrinterCallback
    from transformers.integrations import TensorBoardCallback

    class Watch(HFTrainerCallback):
        seen: set[str]

        def __init__(self) -> None:
            self.seen = set()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            assert isinstance(model, GPT2LMHeadModel)
            self.seen |= set(kwargs)

    watch = Watch()
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), logging_dir=str(tmp_path / "events"), **SETTINGS)
    trainer = BaseTrainer(
        arguments, model(), train_dataset=rows(), callbacks=[TensorBoardCallback(), PrinterCallback(), watch]
    )
    trainer.train()
    assert {"optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader", "processing_class"} <= watch.seen
    folders = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    steps = []
    for folder in folders:
        accumulator = EventAccumulator(str(folder)).Reload()
        if "train/loss" in accumulator.Tags()["scalars"]:
            steps = [event.step for event in accumulator.Scalars("train/loss")]
    assert steps == list(range(1, 13))


def test_a_transformers_model_with_dropout_resumes_bit_identically(tmp_path: Path) -> None:
    def trainer(name: str, stop: int | None = None) -> BaseTrainer:
        class Stop(TrainerCallback):
            def on_step_end(self, **event: Any) -> None:
                event["control"].should_training_stop |= event["state"].global_step == stop

        torch.manual_seed(0)
        network = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
        arguments = SETTINGS | {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 100}
        return BaseTrainer(
            TrainingArguments(output_dir=str(tmp_path / name), **arguments), network, train_dataset=rows(),
            callbacks=[Stop()],
        )  # fmt: skip

    uninterrupted = trainer("uninterrupted")
    uninterrupted.train()
    trainer("interrupted", stop=5).train()
    resumed = trainer("interrupted")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history == uninterrupted.state.log_history
    for a, b in zip(uninterrupted.unwrapped_model().parameters(), resumed.unwrapped_model().parameters(), strict=True):
        assert torch.equal(a, b)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "interrupted" / "checkpoints" / "step-00000012" / "model")
    for a, b in zip(uninterrupted.unwrapped_model().parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_resuming_with_another_architecture_or_size_raises(tmp_path: Path) -> None:
    def fit(network: Any, **changes: Any) -> None:
        settings = SETTINGS | {"save_strategy": "steps", "save_steps": 12} | changes
        arguments = TrainingArguments(output_dir=str(tmp_path), **settings)
        BaseTrainer(arguments, network, train_dataset=rows()).train(resume_from_checkpoint=True)

    fit(model())
    tiny = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**tiny, intermediate_size=64))
    with pytest.raises(CheckpointError, match="expected .* llama, got gpt2"):
        fit(llama, max_steps=13)
    wider = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    with pytest.raises(CheckpointError, match="different size"):
        fit(wider, max_steps=13)


def train_both(
    tmp_path: Path,
    *,
    mixin: type | None = None,
    callbacks: Any = (),
    keywords: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[BaseTrainer, HFTrainer]:
    """Train with both trainers, each with the methods of `mixin`."""
    arguments = SETTINGS | {"max_steps": 4} | changes
    mixins = () if mixin is None else (mixin,)
    trainer_class, hf_trainer_class = type("Own", (*mixins, BaseTrainer), {}), type("Their", (*mixins, HFTrainer), {})
    shared = {"train_dataset": rows(), "eval_dataset": rows(6), **(keywords or {})}
    trainer = trainer_class(
        TrainingArguments(output_dir=str(tmp_path / "ours"), **arguments), model(), callbacks=list(callbacks), **shared
    )
    quiet = {"report_to": [], "disable_tqdm": True}
    hf_args = HFTrainingArguments(output_dir=str(tmp_path / "theirs"), **quiet, **arguments)
    hf_trainer = hf_trainer_class(model(), hf_args, callbacks=list(callbacks), **shared)
    trainer.train()
    hf_trainer.train()
    return trainer, hf_trainer


def assert_same_weights(trainer: BaseTrainer, hf_trainer: HFTrainer) -> None:
    for (name, a), b in zip(trainer.unwrapped_model().named_parameters(), hf_trainer.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3), name


class SmoothedLoss:
    """A custom loss, overridden as users do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.3)
        return (loss, outputs) if return_outputs else loss


class CustomOptimizer:
    """Always uses SGD, regardless of the arguments."""

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        return self.optimizer


class CountedSteps:
    """Counts the calls of `training_step`."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().training_step(model, inputs, num_items_in_batch)


class FirstRows:
    """Trains on the first rows only, in one batch."""

    def get_train_dataloader(self) -> Any:
        dataset = self.train_dataset.remove_columns("name").with_format("torch")
        return torch.utils.data.DataLoader(dataset.select(range(5)), batch_size=5)


@pytest.mark.parametrize("mixin", [SmoothedLoss, CustomOptimizer, CountedSteps, FirstRows])
def test_overridden_methods_train_the_same_model(tmp_path: Path, mixin: type) -> None:
    trainer, hf_trainer = train_both(tmp_path, mixin=mixin)
    assert_same_weights(trainer, hf_trainer)
    if mixin is not FirstRows:
        default, _ = train_both(tmp_path / "default")
        pairs = zip(trainer.unwrapped_model().parameters(), default.unwrapped_model().parameters(), strict=True)
        assert mixin is CountedSteps or any(not torch.allclose(a, b, atol=1e-3) for a, b in pairs)
    assert getattr(trainer, "steps", 4) == getattr(hf_trainer, "steps", 4) == 4
    assert trainer.evaluate()["eval_loss"] == pytest.approx(hf_trainer.evaluate()["eval_loss"], rel=0.1)


def test_metrics_and_predictions_match_transformers(tmp_path: Path) -> None:
    def argmax(logits: Any, labels: Any) -> Any:
        return logits.argmax(-1)

    def compute_metrics(prediction: Any) -> dict[str, float]:
        predictions, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
        return {"accuracy": float((predictions == labels)[labels != -100].mean()), "count": float(labels.size)}

    keywords = {"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": argmax}
    trainer, hf_trainer = train_both(tmp_path, keywords=keywords, eval_strategy="steps", eval_steps=2)
    for prefix in ("eval", "held"):
        ours = trainer.evaluate(rows(9), ignore_keys=None, metric_key_prefix=prefix)
        theirs = hf_trainer.evaluate(rows(9), ignore_keys=None, metric_key_prefix=prefix)
        assert ours[f"{prefix}_count"] == theirs[f"{prefix}_count"]
        assert ours[f"{prefix}_accuracy"] == pytest.approx(theirs[f"{prefix}_accuracy"], abs=0.02)
    several = {"a": rows(4), "b": rows(7)}
    assert {key for key in hf_trainer.evaluate(several) if "loss" in key} == {"eval_a_loss", "eval_b_loss"}
    assert set(trainer.evaluate(several)) >= {"eval_a_loss", "eval_b_loss", "eval_b_accuracy"}
    ours, theirs = trainer.predict(rows(5)), hf_trainer.predict(rows(5))
    assert tuple(ours.predictions.shape) == theirs.predictions.shape
    assert tuple(ours.label_ids.shape) == theirs.label_ids.shape


def test_should_epoch_stop_ends_epochs_as_in_transformers(tmp_path: Path) -> None:
    class EndEpoch(HFTrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = state.global_step % 2 == 0
            return control

    changes = {"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 2}
    trainer, hf_trainer = train_both(tmp_path, callbacks=[EndEpoch()], **changes)
    assert trainer.state.global_step == hf_trainer.state.global_step == 6


def test_load_best_model_at_end_matches_transformers(tmp_path: Path) -> None:
    """The learning rate is so high that the loss rises after the first steps: the best checkpoint is not the last."""
    changes = {
        "learning_rate": 0.3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 3,
    }  # fmt: skip
    trainer, hf_trainer = train_both(tmp_path, **changes)
    for current in (trainer, hf_trainer):
        measured = [line["eval_loss"] for line in current.state.log_history if "eval_loss" in line]
        assert measured.index(min(measured)) < len(measured) - 1
        assert current.evaluate()["eval_loss"] == pytest.approx(min(measured), rel=1e-5)


def test_on_save_of_a_transformers_callback_gets_the_saved_step_and_weights(tmp_path: Path) -> None:
    saves: list[tuple[int, str]] = []

    class Upload(HFTrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            stored = GPT2LMHeadModel.from_pretrained(kwargs["checkpoint"] / "model")
            assert all(torch.equal(a, b) for a, b in zip(stored.parameters(), model.parameters(), strict=True))
            saves.append((state.global_step, kwargs["checkpoint"].name))

    arguments = SETTINGS | {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    BaseTrainer(
        TrainingArguments(output_dir=str(tmp_path), **arguments), model(), train_dataset=rows(), callbacks=[Upload()]
    ).train()
    assert saves == [(step, f"step-{step:08}") for step in (2, 4, 5)]


def test_resuming_with_another_number_of_heads_raises(tmp_path: Path) -> None:
    def fit(heads: int, steps: int) -> None:
        network = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=heads))
        settings = SETTINGS | {"save_strategy": "steps", "save_steps": 2, "max_steps": steps}
        arguments = TrainingArguments(output_dir=str(tmp_path), **settings)
        BaseTrainer(arguments, network, train_dataset=rows()).train(resume_from_checkpoint=True)

    fit(2, 2)
    with pytest.raises(CheckpointError, match="n_head = 4, got 2"):
        fit(4, 3)
    fit(2, 3)
