"""The trainer: what it takes, the mathematics of its loop, whom it tells, and what it saves."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError, ConfigError, TrainingError
from whimbrel.checkpoint import SharingPattern, list_checkpoints
from whimbrel.train import BaseTrainer, Trainer, TrainerCallback, TrainingArguments
from whimbrel.train.callback import EVENTS
from whimbrel.train.callbacks import ControlCallback

Args = Callable[..., TrainingArguments]


class Net(nn.Module):
    """A classifier with dropout, which makes every random number count."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(x)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def data(count: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(count, 4, generator=generator)
    return [{"x": row, "labels": int(row.sum() > 0) + int(row[0] > 1)} for row in rows]


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


@pytest.fixture
def args(tmp_path: Path) -> Args:
    def make(**changes: Any) -> TrainingArguments:
        settings = {
            "output_dir": str(tmp_path / "run"), "max_steps": 8, "per_device_train_batch_size": 4,
            "learning_rate": 0.05, "use_cpu": True, "logging_steps": 2, "save_strategy": "no",
            "lr_scheduler_type": "constant",
        }  # fmt: skip
        return TrainingArguments(**settings | changes)

    return make


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.hex: list[str] = []
        self.values: list[float] = []

    def on_train_metrics(self, **event: Any) -> None:
        self.values.append(event["metrics"]["loss"])
        self.hex.append(event["metrics"]["loss"].hex())


def fit(args: TrainingArguments, model: nn.Module | None = None, **keywords: Any) -> tuple[BaseTrainer, Losses]:
    losses = Losses()
    callbacks = [losses, *keywords.pop("callbacks", ())]
    resume = keywords.pop("resume", None)
    trainer = BaseTrainer(
        args, model or net(), train_dataset=keywords.pop("train_dataset", data()), callbacks=callbacks, **keywords
    )
    trainer.train(resume)
    return trainer, losses


def test_a_plain_module_and_a_list_of_dicts(args: Args) -> None:
    trainer, losses = fit(args(max_steps=40), eval_dataset=data(8))
    assert losses.values[-1] < 0.5 * losses.values[0]
    output = trainer.evaluate()
    assert output["eval_loss"] < 1.0
    assert trainer.state.global_step == 40
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == list(range(2, 41, 2))
    assert trainer.state.epoch == pytest.approx(40 / 6)


def test_train_returns_what_was_reached(args: Args) -> None:
    trainer = BaseTrainer(args(), net(), train_dataset=data(), callbacks=[losses := Losses()])
    output = trainer.train()
    assert output.global_step == 8
    assert output.training_loss == pytest.approx(sum(losses.values) / 8)
    assert output.metrics["num_input_tokens_seen"] == 32
    assert output.metrics["total_flos"] == 6 * sum(p.numel() for p in net().parameters()) * 32


@pytest.mark.parametrize("sizes", [(12, 1), (4, 3), (2, 6), (5, 3)])
def test_accumulation_equals_one_big_batch(args: Args, tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Also with ignored labels, and with a short last micro-batch."""
    batch, accumulation = sizes
    rows = data(12)
    for row in rows[::3]:
        row["labels"] = -100
    whole, _ = fit(
        args(per_device_train_batch_size=12, max_steps=3, max_grad_norm=0, output_dir=str(tmp_path / "a")),
        train_dataset=rows,
    )
    parts, _ = fit(
        args(
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=3, max_grad_norm=0,
            output_dir=str(tmp_path / "b"),
        ),
        train_dataset=rows,
    )  # fmt: skip
    for a, b in zip(whole.unwrapped_model().parameters(), parts.unwrapped_model().parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_leftover_micro_batches_make_a_step(args: Args) -> None:
    trainer, losses = fit(
        args(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=4, logging_strategy="no"),
        train_dataset=data(24),
    )
    assert len(losses.values) == trainer.state.global_step == trainer.state.max_steps == 4  # 6 batches: 4 and 2
    assert trainer.state.epoch == trainer.state.raw_epoch == 2
    assert trainer.state.epoch_start_step == 4


def test_the_epoch_fraction_is_right_under_accumulation(args: Args) -> None:
    seen: list[float] = []

    class Epochs(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            seen.append(event["state"].epoch)

    fit(args(max_steps=5, gradient_accumulation_steps=4), train_dataset=data(24), callbacks=[Epochs])
    assert seen == pytest.approx([4 / 6, 1.0, 1 + 4 / 6, 2.0, 2 + 4 / 6])


def test_max_steps_overrides_epochs_and_an_epoch_can_be_ended(args: Args) -> None:
    trainer, _ = fit(args(max_steps=3, num_train_epochs=100))
    assert trainer.state.global_step == 3

    class EndEpoch(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_epoch_stop = event["state"].global_step == 2

    trainer, _ = fit(args(max_steps=5, output_dir=str(Path(args().output_dir or "") / "b")), callbacks=[EndEpoch()])
    assert (trainer.state.raw_epoch, trainer.state.epoch_start_step) == (1, 2)
    assert trainer.state.epoch == pytest.approx(1.5)


def test_evaluation_is_weighted_by_targets(args: Args) -> None:
    rows = data(10)
    rows[0]["labels"] = rows[7]["labels"] = -100
    losses = [
        BaseTrainer(args(per_device_eval_batch_size=size), net(), eval_dataset=rows).evaluate()["eval_loss"]
        for size in (1, 3, 10)
    ]
    assert losses[1:] == pytest.approx(losses[:1] * 2, abs=1e-6)
    capped = BaseTrainer(args(per_device_eval_batch_size=3, max_eval_steps=1), net(), eval_dataset=rows)
    assert capped.evaluate()["eval_loss"] != pytest.approx(losses[0], abs=1e-6)


def test_evaluate_after_train_scores_the_trained_weights(args: Args) -> None:
    made = []

    def init() -> Net:
        made.append(net())
        return made[-1]

    trainer = BaseTrainer(args(max_steps=30), model_init=init, train_dataset=data(), eval_dataset=data())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
    assert len(made) == 1
    assert trainer.predict(data()).metrics["test_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])


def test_predict_gives_logits_and_labels_in_order(args: Args) -> None:
    model, rows = net(), data(6)
    found = BaseTrainer(args(per_device_eval_batch_size=4), model).predict(rows)
    assert torch.allclose(found.predictions, model(torch.stack([row["x"] for row in rows])))
    assert found.label_ids is not None
    assert found.label_ids.tolist() == [row["labels"] for row in rows]


def test_every_event_is_dispatched_with_its_keywords(args: Args) -> None:
    heard: dict[str, set[str]] = {}

    class All:
        def __getattr__(self, name: str) -> Any:
            if name in EVENTS:
                return lambda **event: heard.update({name: set(event)})
            raise AttributeError(name)

    trainer, _ = fit(
        args(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=4, gradient_accumulation_steps=2),
        callbacks=[All()], eval_dataset=data(4),
    )  # fmt: skip
    trainer.predict(data(4))
    shared = {
        "args", "state", "control", "model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader",
        "eval_dataloader", "trainer",
    }  # fmt: skip
    assert set(heard) == set(EVENTS) - {"on_rewind", "on_sample"}
    assert all(shared <= keywords for keywords in heard.values())
    assert "logs" in heard["on_log"] & heard["on_log_step"]
    assert "metrics" in heard["on_evaluate"] & heard["on_train_metrics"] & heard["on_predict"]


def test_logs_may_be_changed_before_they_are_logged(args: Args) -> None:
    class Adds(TrainerCallback):
        def on_log_step(self, **event: Any) -> None:
            event["logs"]["extra"] = 7

    trainer, _ = fit(args(max_steps=2), callbacks=[Adds()])
    assert trainer.state.log_history[0]["extra"] == 7
    assert trainer.log({"own": 1}) is trainer.control
    assert trainer.state.log_history[-1] == {"own": 1, "epoch": trainer.state.epoch, "step": 2}


def test_an_abort_saves_and_logs_nothing(args: Args) -> None:
    class Abort(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_abort_without_save = event["state"].global_step == 3

    settings = args(save_strategy="steps", save_steps=2, logging_steps=3, eval_strategy="steps", eval_steps=3)
    trainer, _ = fit(settings, callbacks=[Abort()], eval_dataset=data(4))
    assert trainer.state.global_step == 3
    assert trainer.state.log_history == []
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2]
    assert trainer.stopped_by == ("Abort", "on_step_end", "abort")


def test_a_stop_ends_with_log_evaluation_and_save(args: Args) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_training_stop = event["state"].global_step == 3

    settings = args(save_strategy="steps", save_steps=100, eval_strategy="steps", eval_steps=100)
    trainer, _ = fit(settings, callbacks=[Stop()], eval_dataset=data(4))
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [3]
    assert {"loss", "eval_loss"} <= {key for line in trainer.state.log_history for key in line}


def test_callbacks_can_call_off_what_is_due(args: Args) -> None:
    class CallOff(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            if event["state"].global_step == 4:
                event["control"].should_save = False

    settings = args(save_strategy="steps", save_steps=2)
    fit(settings, callbacks=[CallOff()])
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2, 6, 8]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_is_bit_identical_with_dropout_and_epochs(args: Args, tmp_path: Path, workers: int) -> None:
    """Broken in the middle of an epoch, twice; losses, weights, moments, log and every random number agree."""

    def settings(name: str, **changes: Any) -> TrainingArguments:
        return args(
            output_dir=str(tmp_path / name), max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=2,
            save_strategy="steps", save_steps=2, lr_scheduler_type="cosine", warmup_steps=2, logging_steps=3,
            eval_strategy="steps", eval_steps=3, dataloader_num_workers=workers, seed=5, **changes,
        )  # fmt: skip

    class Break(TrainerCallback):
        def __init__(self, at: int) -> None:
            self.at = at

        def on_step_begin(self, **event: Any) -> None:
            if event["state"].global_step == self.at:
                raise KeyboardInterrupt

    whole, reference = fit(settings("whole"), net(0.3), train_dataset=data(22), eval_dataset=data(6))
    drawn = (random.random(), np.random.rand(), torch.rand(1))
    for at in (3, 7):
        with pytest.raises(KeyboardInterrupt):
            fit(
                settings("broken"), net(0.3), train_dataset=data(22), eval_dataset=data(6), callbacks=[Break(at)],
                resume=True,
            )  # fmt: skip
    random.seed(99)
    torch.manual_seed(99)
    broken, last = fit(settings("broken"), net(0.3), train_dataset=data(22), eval_dataset=data(6), resume=True)
    assert last.hex == reference.hex[6:]
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn
    for a, b in zip(whole.unwrapped_model().parameters(), broken.unwrapped_model().parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.optimizer is not None
    assert broken.optimizer is not None
    theirs = broken.optimizer.state_dict()["state"]
    for index, state in whole.optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, theirs[index][name]) for name, tensor in state.items())
    assert broken.state.log_history == whole.state.log_history
    assert broken.state.total_flos == whole.state.total_flos


def test_resume_takes_true_latest_or_a_path(args: Args, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    _, reference = fit(args(**settings, output_dir=str(tmp_path / "whole")))
    for resume, first in ((True, 8), ("latest", 8), (str(tmp_path / "whole/checkpoints/step-00000004"), 4)):
        again, losses = fit(args(**settings, output_dir=str(tmp_path / "whole")), resume=resume)
        assert again.resumed_from is not None
        assert again.resumed_from.name == f"step-{first:08d}"
        assert losses.hex[: 8 - first] == reference.hex[first:]
    with pytest.raises(ConfigError, match=r"holds a run at step 8: resume_from_checkpoint=True goes on"):
        fit(args(**settings, output_dir=str(tmp_path / "whole")))
    _, losses = fit(args(**settings, output_dir=str(tmp_path / "whole"), overwrite_output_dir=True))
    assert losses.hex == reference.hex
    with pytest.raises(CheckpointError, match="no whole checkpoint|cannot be read"):
        fit(args(output_dir=str(tmp_path / "none")), resume=str(tmp_path / "none" / "checkpoints"))


def test_a_component_can_be_left_out(args: Args, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    fit(args(**settings))
    folder = Path(args().output_dir or "") / "checkpoints" / "step-00000004"
    for path in folder.glob("optimizer.*"):
        path.unlink()
    again, _ = fit(args(**settings | {"max_steps": 5}), resume=True)
    assert "holds no 'optimizer'" in caplog.text
    assert again.optimizer is not None
    assert {int(state["step"]) for state in again.optimizer.state.values()} == {1}
    (folder / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fit(args(**settings), resume=str(folder))


def test_components_are_those_of_one_device(args: Args) -> None:
    trainer, _ = fit(args(max_steps=1))
    parts = trainer.get_state_components()
    assert [part.key for part in parts] == ["model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks"]
    assert {part.key for part in parts if part.sharing_pattern is not SharingPattern.GLOBAL} == {"rng"}
    assert {part.key for part in parts if part.required} == {"model", "trainer"}
    assert trainer.get_process_groups() == {}
    state = trainer.state_dict()
    assert {"global_step", "epoch_start_step", "raw_epoch", "num_input_tokens_seen", "total_flos"} <= set(state)
    trainer.load_state_dict({
        "global_step": 5, "epoch_start_step": 4, "raw_epoch": 2, "num_input_tokens_seen": 9, "total_flos": 1.0
    })  # fmt: skip
    assert (trainer.state.global_step, trainer.state.raw_epoch) == (5, 2)


def test_the_best_checkpoint_is_kept_and_named(args: Args) -> None:
    values = iter([0.5, 0.0, 0.7, 0.3])

    class Scripted(BaseTrainer):
        def _eval_loop(self, dataset: Any) -> dict[str, float]:
            return {"eval_loss": next(values)}

    settings = args(
        save_strategy="steps", save_steps=2, save_total_limit=1, preserve_best_model=True, eval_on_save=True
    )
    trainer = Scripted(settings, net(), train_dataset=data(), eval_dataset=data(4), callbacks=[])
    trainer.train()
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [4, 8]
    assert trainer.state.best_metric == 0.0
    assert (trainer.state.best_model_checkpoint or "").endswith("step-00000004")


def poisoned(*bad: int) -> Callable[..., Tensor]:
    """A loss that is NaN at the given calls."""
    calls = 0

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = nn.functional.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch
        return value * float("nan") if calls in bad else value

    return loss


def test_nonfinite_stop_names_the_step_and_saves_nothing(args: Args) -> None:
    settings = args(save_strategy="steps", save_steps=2)
    with pytest.raises(TrainingError, match="step 4 has the loss nan and the gradient norm nan: lower"):
        fit(settings, compute_loss_func=poisoned(4))
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2]


def test_nonfinite_skip_leaves_the_weights_alone(args: Args) -> None:
    weights: dict[int, Tensor] = {}

    class Keep(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            weights[event["state"].global_step] = event["model"].layers[0].weight.detach().clone()

    trainer, losses = fit(args(on_nonfinite="skip"), compute_loss_func=poisoned(4), callbacks=[Keep()])
    assert trainer.state.global_step == 8
    assert torch.equal(weights[3], weights[4])
    assert not torch.equal(weights[4], weights[5])
    assert [str(value) for value in losses.values].count("nan") == 1
    assert torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line]).isfinite().all()


def test_nonfinite_rollback_goes_back_and_on_with_other_data(args: Args) -> None:
    went: list[int] = []

    class Rewound(TrainerCallback):
        def on_rewind(self, **event: Any) -> None:
            went.append(event["step"])

    settings = args(on_nonfinite="rollback", save_strategy="steps", save_steps=3)
    trainer, losses = fit(settings, compute_loss_func=poisoned(5), callbacks=[Rewound()])
    assert went == [3]
    assert trainer.state.global_step == 8
    assert torch.tensor(losses.values).isfinite().all()
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [3, 6, 8]
    with pytest.raises(TrainingError, match="after going back 3 times"):
        fit(args(on_nonfinite="rollback", save_strategy="steps", save_steps=3, output_dir=settings.output_dir + "2"),
            compute_loss_func=poisoned(*range(5, 99)))  # fmt: skip
    with pytest.raises(TrainingError, match="no checkpoint to go back to"):
        fit(args(on_nonfinite="rollback", output_dir=settings.output_dir + "3"), compute_loss_func=poisoned(2))


def test_fp16_overflow_is_a_skip_and_the_scale_is_saved(args: Args) -> None:
    settings = args(mixed_precision="fp16", save_strategy="steps", save_steps=8)
    trainer, losses = fit(settings)
    scaler = trainer.precision.scaler
    assert scaler is not None
    assert torch.tensor(losses.values).isfinite().all()
    scaler._scale = torch.tensor(4.0)
    assert trainer.state_dict()["grad_scaler"]["scale"] == 4.0
    again, _ = fit(args(mixed_precision="fp16", max_steps=9), resume=True)
    assert again.state.global_step == 9


def test_optimizer_and_scheduler_by_name_or_object(args: Args) -> None:
    model = net()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(own, 4, 0.5)
    trainer, _ = fit(args(), model, optimizers=(own, schedule))
    assert trainer.optimizer is own
    assert own.param_groups[0]["lr"] == pytest.approx(0.025)
    named, _ = fit(args(output_dir=args().output_dir + "b"), optimizers=("muon", "linear"))
    assert type(named.optimizer).__name__ == "Muon"
    made, _ = fit(args(output_dir=args().output_dir + "c"), optimizers=(lambda ps: torch.optim.SGD(ps, lr=0.1), None))
    assert isinstance(made.optimizer, torch.optim.SGD)


def test_the_optimizer_can_step_in_backward(args: Args, tmp_path: Path) -> None:
    plain, _ = fit(args(max_grad_norm=0.0))
    inside, _ = fit(args(max_grad_norm=0.0, optimizer_in_backward=True, output_dir=str(tmp_path / "b")))
    for a, b in zip(plain.unwrapped_model().parameters(), inside.unwrapped_model().parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="optimizer_in_backward"):
        fit(args(max_grad_norm=1.0, optimizer_in_backward=True, output_dir=str(tmp_path / "c")))


def test_torch_switches_are_put_back(args: Args) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            seen.append((torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()))

    fit(args(float32_matmul_precision="medium", detect_anomaly=True, max_steps=1), callbacks=[Look()])
    assert seen == [("medium", True)]
    assert (torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()) == ("highest", False)


def test_save_model_writes_weights_only_and_asks_before_it_replaces(args: Args, tmp_path: Path) -> None:
    trainer, _ = fit(args(max_steps=1))
    trainer.save_model(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigError, match="holds a model already"):
        trainer.save_model(tmp_path / "out")
    trainer.save_model()
    assert (trainer.config.output_dir / "model.safetensors").exists()


def test_what_a_trainer_cannot_do_is_said(args: Args) -> None:
    with pytest.raises(ConfigError, match="needs a model: give model, or model_init"):
        BaseTrainer(args())
    with pytest.raises(ConfigError, match=r"train\(\) needs train_dataset"):
        BaseTrainer(args(), net()).train()
    with pytest.raises(ConfigError, match=r"evaluate\(\) needs eval_dataset"):
        BaseTrainer(args(), net()).evaluate()
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        args(gradient_accumulation_steps=0)


def test_two_jobs_do_not_share_a_directory(args: Args) -> None:
    class Second(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            with pytest.raises(ConfigError, match="directory of a run that is running: name another output_dir"):
                fit(args(overwrite_output_dir=True))

    settings = args(max_steps=1, save_strategy="steps", save_steps=1)
    fit(settings, callbacks=[ControlCallback(), Second()])
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [1]


def test_given_callbacks_replace_the_default_ones(args: Args) -> None:
    assert BaseTrainer.default_callbacks() == []
    names = [type(callback).__name__ for callback in Trainer(args(), net()).callbacks]
    assert names == [type(callback).__name__ for callback in Trainer.default_callbacks()] != []
    assert len(Trainer(args(), net(), callbacks=[]).callbacks) == 0
