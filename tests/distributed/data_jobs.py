"""Jobs for test_data.py: datasets, evaluation and random numbers of a trainer on several ranks."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from whimbrel.base.errors import WhimbrelError
from whimbrel.distributed.layout import ParallelConfig
from whimbrel.distributed.world import World, join_world
from whimbrel.models import GPT, GPTConfig
from whimbrel.train import DPO, BaseTrainer, Trainer, TrainingArguments
from whimbrel.train.callbacks import EarlyStoppingCallback
from whimbrel.train.evaluation import EvalPrediction
from whimbrel.train.random_state import rank_seed, seed_everything
from whimbrel.train.run_config import build_run_config

LENGTH, VOCAB = 8, 32
Example = dict[str, Tensor]


class Stream(IterableDataset[Example]):
    """Examples without a length."""

    def __init__(self, examples: list[Example]) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)


class Regressor(nn.Module):
    """A model without labels in its batches: it returns a loss, the mean over samples."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(LENGTH, 1), nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        predicted = self.linear(self.dropout(x)).squeeze(-1)
        return {"loss": (predicted - y).square().mean(), "logits": predicted}


class Classifier(nn.Module):
    """A model that does not declare whether it returns a loss for labels: its first forward pass shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(LENGTH, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.linear(x)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def mean_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The default objective as a function: sums over targets, and their number."""
    targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    output = model(batch["input_ids"], targets=targets, num_items_in_batch=1.0, return_logits=True)
    correct = (output.logits.argmax(-1) == targets).sum()
    return output.loss, (targets != -100).sum(), {"accuracy": correct}


OBJECTIVES: dict[str, Any] = {
    "preferences": DPO(),
    "self-preferences": DPO(reference=nullcontext),
    "function": mean_loss,
}
"""The reference of self-preferences is the model itself, in a forward pass of its own."""


def make_model(kind: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    if kind == "regressor":
        return Regressor(dropout)
    if kind == "classifier":
        return Classifier()
    sizes = {"num_layers": 2, "num_heads": 2, "embd_size": 16, "vocab_size": VOCAB, "context_length": LENGTH}
    return GPT(GPTConfig(**sizes))


def make_examples(count: int, kind: str) -> list[dict[str, Tensor]]:
    """Examples with between 1 and 7 targets each."""
    generator = torch.Generator().manual_seed(count)
    if kind == "regressor":
        return [{"x": row, "y": row.sum()} for row in torch.randn(count, LENGTH, generator=generator)]
    if kind == "classifier":
        rows = torch.randn(count, LENGTH, generator=generator)
        return [{"x": row, "labels": (row[0] > 0).long() + (row[1] > 0)} for row in rows]
    ids = torch.randint(0, VOCAB, (2, count, LENGTH), generator=generator)
    if kind == "self-preferences":
        return [{"input_ids": pair, "targets": pair.roll(-1, 1)} for pair in ids.transpose(0, 1)]
    if kind == "preferences":
        reference = -torch.rand(count, 2, LENGTH, generator=generator)
        return [
            {"input_ids": pair, "targets": pair.roll(-1, 1), "reference_log_probs": row}
            for pair, row in zip(ids.transpose(0, 1), reference, strict=True)
        ]
    examples = []
    for number, row in enumerate(ids[0]):
        labels = row.clone()
        labels[: number % 7] = -100
        examples.append({"input_ids": row, "labels": labels})
    return examples


def make_dataset(examples: list[Any], source: str, batch_size: int) -> Any:
    if source == "iterable":
        return Stream(examples)
    return examples if source == "list" else DataLoader(examples, batch_size=batch_size, shuffle=True)


class ComputeLossTrainer(BaseTrainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_kwargs: Any) -> Any:
        return model(**inputs)[0]


class TrainingStepTrainer(BaseTrainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = model(**inputs)[0]
        self.accelerator.backward(loss)
        return loss.detach()


def fit_plain_means(method: str, parallel: dict[str, Any], arguments: dict[str, Any]) -> list[list[float]]:
    """Train on three equal examples with a loss that is a mean of the batch; returns loss and gradient norm by step."""
    world = join_world(ParallelConfig(**parallel), "cpu")
    args = TrainingArguments(
        use_cpu=True, logging_steps=1, learning_rate=1e-12, save_strategy="no", num_train_epochs=1,
        per_device_train_batch_size=1, max_grad_norm=0, **arguments,
    )  # fmt: skip
    classes = {"compute_loss": ComputeLossTrainer, "training_step": TrainingStepTrainer}
    trainer = classes.get(method, BaseTrainer)(
        args, make_model("classifier"), world=world, train_dataset=make_examples(1, "classifier") * 3,
        compute_loss_func=_mean_of_batch if method == "compute_loss_func" else None,
    )  # fmt: skip
    trainer.train()
    return [[entry[name] for name in ("loss", "grad_norm")] for entry in trainer.state.log_history if "loss" in entry]


def _mean_of_batch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels)


def make_trainer(settings: dict[str, Any], *, world: World | None = None, **arguments: Any) -> BaseTrainer:
    """A trainer for the settings of a test, in the processes of the group or, with a world of one, alone."""
    kind, count = settings.get("kind", "gpt"), settings.get("count", 25)
    batch_size, source = arguments["per_device_train_batch_size"], settings.get("source", "list")
    if world is None:
        world = join_world(ParallelConfig(**settings.get("parallel", {})), "cpu")
    args = TrainingArguments(
        **{
            "use_cpu": True, "logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
            "save_strategy": "no", "per_device_eval_batch_size": batch_size, **arguments,
        }
    )  # fmt: skip
    return BaseTrainer(
        args, make_model(kind, settings.get("dropout", 0.0)), world=world,
        train_dataset=make_dataset(make_examples(count, kind), source, batch_size),
        eval_dataset=make_examples(count + 8, kind),
        objective=OBJECTIVES.get(kind),
        compute_metrics=hash_predictions if settings.get("metrics") else None,
    )  # fmt: skip


def hash_predictions(evaluation: EvalPrediction) -> dict[str, float]:
    """Numbers that depend on every prediction and label, and on their order."""
    predictions, labels = torch.as_tensor(evaluation.predictions), torch.as_tensor(evaluation.label_ids)
    place = torch.arange(1, len(labels) + 1).double()
    return {
        "count": len(predictions),
        "labels": float((labels.double().sum(-1) * place).sum()),
        "logits": float((predictions.double().abs().mean((1, 2)) * place).sum()),
    }


def fit(settings: dict[str, Any], arguments: dict[str, Any], alone: bool = False) -> dict[str, Any]:
    """Train; returns what was logged, and the final state."""
    trainer = make_trainer(settings, world=World() if alone else None, **arguments)
    trainer.train()
    state, weights = trainer.state, trainer.unwrapped_model().state_dict()
    names = [
        name
        for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "accuracy")
        if name in state.log_history[0]
    ]
    found = {
        "curve": [[entry[name] for name in names] for entry in state.log_history if "loss" in entry],
        "epochs": [entry["epoch"] for entry in state.log_history if "loss" in entry],
        "tokens": state.num_input_tokens_seen,
        "steps": state.max_steps,
        "weights": [float(_full(value).double().square().sum()) for value in weights.values() if not value.is_meta],
    }
    found["eval"] = trainer.evaluate()
    return found


def _full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def predict(settings: dict[str, Any], arguments: dict[str, Any], count: int, alone: bool = False) -> Any:
    trainer = make_trainer(settings, world=World() if alone else None, **arguments)
    found = trainer.predict(make_examples(count, "gpt"))
    return found.predictions, found.label_ids, found.metrics


def refused(kind: str, folder: str) -> str:
    """The error for data that was split before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    examples: Any = make_examples(12, "gpt")
    if kind == "sampler":
        sampler = torch.utils.data.DistributedSampler(examples, num_replicas=size, rank=rank)
        examples = DataLoader(examples, batch_size=2, sampler=sampler)
    elif kind == "shard":
        examples = examples[rank::size]
    elif kind == "generator":
        examples = DataLoader(examples, 2, shuffle=True, generator=torch.Generator().manual_seed(rank))
    elif kind == "stream":
        examples = Stream(examples[rank::size])
    try:
        trainer = make_trainer({}, per_device_train_batch_size=2, max_steps=2, output_dir=folder)
        trainer.train_dataset = examples
        trainer.train()
    except WhimbrelError as error:
        return str(error)
    return "no error"


def resume(settings: dict[str, Any], arguments: dict[str, Any]) -> tuple[list[float], list[float], str]:
    """Train from the newest checkpoint, if `resume` is set; returns losses, epochs, and where it was resumed."""
    trainer = make_trainer(settings, **arguments)
    try:
        trainer.train(resume_from_checkpoint=True if settings.get("resume") else None)
    except WhimbrelError as error:
        return [], [], str(error)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    resumed = "" if trainer.resumed_from is None else trainer.resumed_from.name
    return [entry["loss"] for entry in history], [entry["epoch"] for entry in history], resumed


def resume_with_messages(settings: dict[str, Any], arguments: dict[str, Any]) -> tuple[str, list[str], list[float]]:
    """Where `resume` resumed, what it said about random numbers, and random numbers after it."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("whimbrel.train.random_state")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return resume(settings, arguments)[2], messages, torch.rand(2).tolist()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def train_tokens(table: dict[str, Any], steps: int) -> tuple[list[float], float, int, str]:
    """Train a run from a configuration up to `steps`; returns losses, the validation loss and tokens, or an error."""
    try:
        trainer = Trainer.from_config(build_run_config(table))
        trainer.config = replace(trainer.config, train=replace(trainer.config.train, steps=steps))
        trainer.train()
    except WhimbrelError as error:
        return [], 0.0, 0, str(error)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], trainer.state.num_input_tokens_seen, ""


def first_numbers(parallel: dict[str, Any]) -> tuple[int, list[float], float]:
    """The data rank, random numbers of this rank, and a weight that is initialized at random."""
    world = join_world(ParallelConfig(**parallel), "cpu")
    seed_everything(rank_seed(3, world))
    return world.dp_rank, torch.rand(4).tolist(), float(next(make_model("gpt").parameters()).sum())


def stop_early(arguments: dict[str, Any]) -> tuple[int, int | None, float | None, float, float]:
    """Train until evaluations get worse, then load the best weights; returns steps, best step and metric, weights."""
    trainer = make_trainer({}, **arguments)
    trainer.add_callback(EarlyStoppingCallback(2))
    trainer.train()
    weights = sum(float(_full(value).double().sum()) for value in trainer.unwrapped_model().state_dict().values())
    state = trainer.state
    return state.global_step, state.best_global_step, state.best_metric, weights, trainer.evaluate()["eval_loss"]


class Interrupting(list[Any]):
    """Examples of which reading one sends SIGTERM to a rank, once."""

    def __init__(self, examples: list[Any], rank: int) -> None:
        super().__init__(examples)
        self.armed = dist.get_rank() == rank

    def __getitem__(self, index: Any) -> Any:
        if self.armed and index > 8:
            self.armed = False
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def evaluate_and_stop(arguments: dict[str, Any], signaled: int) -> tuple[int, set[str], list[float], list[float]]:
    """Train with evaluations; rank `signaled` gets a signal during the first one."""
    trainer = make_trainer({}, **arguments)
    trainer.eval_dataset = Interrupting(trainer.eval_dataset, signaled)
    trainer.train()
    losses, evaluated = ([e[name] for e in trainer.state.log_history if name in e] for name in ("loss", "eval_loss"))
    return trainer.state.global_step, trainer.deferred, losses, evaluated


def different_weights(folder: str) -> str:
    trainer = make_trainer({}, per_device_train_batch_size=2, max_steps=1, output_dir=folder)
    torch.manual_seed(dist.get_rank())
    assert trainer.model is not None
    nn.init.normal_(trainer.model.get_parameter("transformer.h.1.mlp.c_fc.weight"))
    try:
        trainer.train()
    except WhimbrelError as error:
        return str(error)
    return "no error"


def summarize(folder: str) -> tuple[int, int | None, int | None]:
    """Samples and tokens of a step, and tokens of a micro-batch, as printed at the start."""
    arguments = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = make_trainer({}, output_dir=folder, **arguments)
    trainer.train()
    summary = trainer._summary()
    return summary.samples_per_step, summary.tokens_per_step, summary.tokens_per_micro_batch
