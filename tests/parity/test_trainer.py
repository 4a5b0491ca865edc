"""Our trainer beside `transformers`' own: the same steps, and callbacks that were written for theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import Trainer as TheirTrainer
from transformers import TrainerCallback as TheirCallback
from transformers import TrainingArguments as TheirArguments

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import list_checkpoints
from whimbrel.train import BaseTrainer, TrainerCallback, TrainingArguments


def rows(count: int = 12) -> Dataset:
    """Sequences of one length, the first half of some masked, and a column that the model does not take.

    The first label is masked in all of them: theirs counts it among the targets though the shift drops it.
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
def test_the_same_losses_rates_norms_and_weights(tmp_path: Path, schedule: str, batch: int) -> None:
    """A step over all data, so that its order does not matter; theirs in one micro-batch, ours also in four."""
    ours, theirs = model(), model()
    their_args = TheirArguments(
        output_dir=str(tmp_path / "theirs"), lr_scheduler_type=schedule, report_to=[], disable_tqdm=True, **SETTINGS
    )
    their = TheirTrainer(theirs, their_args, train_dataset=rows())
    their.train()
    arguments = SETTINGS | {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 12 // batch}
    own = BaseTrainer(
        TrainingArguments(output_dir=str(tmp_path / "ours"), lr_scheduler_type=schedule, **arguments),
        ours,
        train_dataset=rows(),
    )
    own.train()
    for key in ("loss", "grad_norm", "learning_rate"):
        expected = [line[key] for line in their.state.log_history if key in line]
        assert [line[key] for line in own.state.log_history if key in line] == pytest.approx(expected, rel=1e-3)
    assert len(own.state.log_history) == 12
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3), name
    assert own.evaluate(rows())["eval_loss"] == pytest.approx(their.evaluate(rows())["eval_loss"], abs=2e-3)


def test_their_early_stopping_stops_ours(tmp_path: Path) -> None:
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


def test_their_tensorboard_and_printer_see_our_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import PrinterCallback
    from transformers.integrations import TensorBoardCallback

    class Watch(TheirCallback):
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


def test_an_hf_run_resumes_exactly_with_dropout(tmp_path: Path) -> None:
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

    whole = trainer("whole")
    whole.train()
    trainer("broken", stop=5).train()
    again = trainer("broken")
    again.train(resume_from_checkpoint=True)
    assert again.state.log_history == whole.state.log_history
    for a, b in zip(whole.unwrapped_model().parameters(), again.unwrapped_model().parameters(), strict=True):
        assert torch.equal(a, b)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "broken" / "checkpoints" / "step-00000012" / "model")
    for a, b in zip(whole.unwrapped_model().parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_another_architecture_or_size_is_refused_by_name(tmp_path: Path) -> None:
    def fit(network: Any, **changes: Any) -> None:
        settings = SETTINGS | {"save_strategy": "steps", "save_steps": 12} | changes
        arguments = TrainingArguments(output_dir=str(tmp_path), **settings)
        BaseTrainer(arguments, network, train_dataset=rows()).train(resume_from_checkpoint=True)

    fit(model())
    tiny = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**tiny, intermediate_size=64))
    with pytest.raises(CheckpointError, match="holds a model of the type gpt2 and this one is llama: give that model"):
        fit(llama, max_steps=13)
    wider = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    with pytest.raises(CheckpointError, match=r"another size .* is .96. there and .192. here"):
        fit(wider, max_steps=13)
