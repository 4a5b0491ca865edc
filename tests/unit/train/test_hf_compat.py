"""Arguments, datasets, metrics and saves compatible with `transformers.Trainer`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from whimbrel.base.errors import CheckpointError, ConfigError, DataError
from whimbrel.checkpoint import CheckpointManager, list_checkpoints
from whimbrel.data import TokenDataLoader, read_shard, write_shard
from whimbrel.data.prepare import prepare
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import train_tokenizer
from whimbrel.train import BaseTrainer, Trainer, TrainerCallback, TrainingArguments
from whimbrel.train.callbacks import DivergenceCallback, ProgressCallback, TensorBoardCallback

Make = Callable[..., Any]


def accuracy(prediction: Any) -> dict[str, Any]:
    predictions, labels = prediction
    assert isinstance(predictions, np.ndarray)
    assert predictions is prediction.predictions
    return {"accuracy": np.mean(predictions.argmax(-1) == labels)}


def test_every_constructor_argument_of_transformers_is_accepted(args: Make, net: Make) -> None:
    theirs = pytest.importorskip("transformers").Trainer
    ours = inspect.signature(BaseTrainer).parameters
    assert [name for name in inspect.signature(theirs.__init__).parameters if name not in (*ours, "self")] == []
    with pytest.raises(ConfigError, match="BaseTrainer has no argument 'tokenizer': pass processing_class"):
        BaseTrainer(args(), net(), tokenizer=object())
    with pytest.raises(ConfigError, match=r"'train_datasets': did you mean 'train_dataset'"):
        BaseTrainer(args(), net(), train_datasets=[])


def test_optimizer_class_and_keywords(args: Make, fit: Make, net: Make) -> None:
    trainer, _ = fit(args(max_steps=1), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}))
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    with pytest.raises(ConfigError, match="expected optimizers or optimizer_cls_and_kwargs, got both"):
        BaseTrainer(args(), net(), optimizers=("adamw", None), optimizer_cls_and_kwargs=(torch.optim.SGD, {}))


def test_compute_metrics_sees_all_predictions_and_labels(args: Make, net: Make, data: Make) -> None:
    trainer = BaseTrainer(args(), net(), compute_metrics=accuracy)
    rows = data(10)
    metrics = trainer.evaluate(rows)
    logits = trainer.model(torch.stack([row["x"] for row in rows]))
    expected = float((logits.argmax(-1) == torch.tensor([row["labels"] for row in rows])).float().mean())
    assert metrics == {"eval_loss": metrics["eval_loss"], "eval_accuracy": pytest.approx(expected)}
    assert type(metrics["eval_accuracy"]) is float
    assert metrics["eval_loss"] == pytest.approx(BaseTrainer(args(), net()).evaluate(rows)["eval_loss"], rel=1e-6)
    assert trainer.predict(rows).metrics["test_accuracy"] == pytest.approx(expected)
    assert set(trainer.predict(rows, metric_key_prefix="held").metrics) == {"held_loss", "held_accuracy"}
    assert trainer.state.log_history[0]["eval_accuracy"] == pytest.approx(expected)


def test_logits_are_preprocessed_before_they_are_gathered(args: Make, net: Make, data: Make) -> None:
    shapes: list[Any] = []

    def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(logits.shape), tuple(labels.shape)))
        return logits.argmax(-1)

    trainer = BaseTrainer(
        args(per_device_eval_batch_size=4), net(), preprocess_logits_for_metrics=argmax,
        compute_metrics=lambda prediction: {"kept": list(prediction.predictions.shape)},
    )  # fmt: skip
    assert trainer.evaluate(data(6))["eval_kept"] == [6]
    assert shapes == [((4, 3), (4,)), ((2, 3), (2,))]


def test_compute_metrics_without_labels_raises(args: Make, net: Make, data: Make) -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": F.mse_loss(self.layer(x), x), "logits": self.layer(x)}

    trainer = BaseTrainer(args(), Autoencoder(), compute_metrics=accuracy)
    with pytest.raises(DataError, match=r"compute_metrics needs .* the batches have no labels \(labels\)"):
        trainer.evaluate([{"x": row["x"]} for row in data(4)])


def test_metrics_of_several_eval_datasets_include_their_names(args: Make, net: Make, data: Make) -> None:
    sets = {"near": data(6), "far": data(9)}
    settings = args(eval_strategy="steps", eval_steps=4, metric_for_best_model="far_loss", load_best_model_at_end=True,
                    save_strategy="steps", save_steps=4)  # fmt: skip
    trainer = BaseTrainer(settings, net(), train_dataset=data(), eval_dataset=sets)
    trainer.train()
    metrics = trainer.evaluate()
    assert set(metrics) == {"eval_near_loss", "eval_far_loss"}
    assert trainer.evaluate("far") == {"eval_loss": metrics["eval_far_loss"]}
    alone = BaseTrainer(args(), trainer.model)
    assert metrics["eval_far_loss"] == alone.evaluate(sets["far"])["eval_loss"]
    assert set(trainer.evaluate({"other": data(4)}, metric_key_prefix="test")) == {"test_other_loss"}
    assert trainer.state.best_metric is not None
    with pytest.raises(ConfigError, match=r"near, far.* got 'fra'"):
        trainer.evaluate("fra")
    plain = BaseTrainer(args(eval_strategy="epoch", output_dir=str(Path(args().output_dir) / "b")), net(),
                        train_dataset=data(), eval_dataset=sets)  # fmt: skip
    plain.train()  # the best model is not needed
    with pytest.raises(ConfigError, match=r"= 'loss': .*eval_near_loss, eval_far_loss"):
        BaseTrainer(args(eval_strategy="epoch", preserve_best_model=True), net(), eval_dataset=sets)


@pytest.mark.parametrize("asked", [{"best_model_metric": "accuracy"}, {"metric_for_best_model": "eval_accuracy"}])
def test_an_unknown_best_model_metric_raises_in_the_constructor(
    asked: dict[str, Any], args: Make, net: Make, data: Make
) -> None:
    settings = args(eval_strategy="steps", eval_steps=4, **asked)
    keywords = {"train_dataset": data(), "eval_dataset": data(8)}
    with pytest.raises(ConfigError, match=r"accuracy': expected one of the evaluation metrics \(eval_loss\)"):
        BaseTrainer(settings, net(), **keywords)
    BaseTrainer(settings, net(), **keywords, compute_metrics=accuracy).train()


def test_the_best_model_is_loaded_when_training_ends(args: Make, net: Make, data: Make) -> None:
    losses = iter([0.5, 0.1, 0.3, 0.4])

    class Scripted(BaseTrainer):
        def _eval_loop(self) -> dict[str, float]:
            return {"eval_loss": next(losses)}

    settings = args(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_total_limit=1,
                    load_best_model_at_end=True)  # fmt: skip
    trainer = Scripted(settings, net(), train_dataset=data(), eval_dataset=data(8))
    kept: dict[int, Any] = {}

    class Keep(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            kept[event["state"].global_step] = {k: v.clone() for k, v in event["model"].state_dict().items()}

    trainer.add_callback(Keep())
    trainer.train()
    assert list(list_checkpoints(Path(settings.output_dir))) == [4, 8]
    assert trainer.state.global_step == 8
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, kept[4][name])
    assert Path(trainer.state.best_model_checkpoint).name == "step-00000004"


def test_reported_batch_size_is_that_of_a_passed_dataloader(tmp_path: Path, net: Make, data: Make) -> None:
    summaries = []

    class Keep(TrainerCallback):
        def on_train_begin(self, **event: Any) -> None:
            summaries.append(event["summary"])

    trainer = Trainer(
        TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=1, gradient_accumulation_steps=3, use_cpu=True),
        net(), train_dataset=DataLoader(data(12), batch_size=2), callbacks=[Keep()],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.train_batch_size == 2
    assert summaries[0].samples_per_step == 6


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_dataloader_is_trained_on_and_resumed_exactly(
    own_generator: bool, args: Make, net: Make, data: Make, fit: Make
) -> None:
    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(7) if own_generator else None
        return DataLoader(data(12), batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]

    class Stop(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_training_stop |= event["state"].global_step == 5

    folder = Path(args().output_dir)
    save = {"save_strategy": "steps", "save_steps": 100, "max_steps": 8, "eval_strategy": "epoch"}
    _, uninterrupted = fit(
        args(**save), net(0.2), train_dataset=loader(), eval_dataset=DataLoader(data(6), batch_size=3)
    )
    interrupted = args(**save, output_dir=str(folder / "interrupted"))
    _, first = fit(interrupted, net(0.2), train_dataset=loader(), eval_dataset=loader(), callbacks=[Stop()])
    trainer, second = fit(interrupted, net(0.2), train_dataset=loader(), eval_dataset=loader(), resume=True)
    assert first.hex + second.hex == uninterrupted.hex
    assert len(set(uninterrupted.hex)) > 6  # orders differ between epochs
    assert trainer.state.epoch == pytest.approx(8 / 3)
    with pytest.raises(ConfigError, match="batch size 4.* got 5"):
        fit(args(per_device_train_batch_size=5, overwrite_output_dir=True), train_dataset=loader())
    with pytest.raises(ConfigError, match="data_collator has no effect on a DataLoader"):
        fit(args(), train_dataset=loader(), data_collator=list)
    with pytest.raises(ConfigError, match=r"loader.workers = 1 has no effect on a DataLoader.* dataloader_num_workers"):
        fit(args(dataloader_num_workers=1, overwrite_output_dir=True), train_dataset=loader())

    class Once(BaseTrainer):
        def get_train_dataloader(self) -> Any:
            return (row for row in data())

    with pytest.raises(ConfigError, match="can be iterated once per epoch, got generator"):
        Once(args(overwrite_output_dir=True), net()).train()


def test_data_seed_and_sampling_strategy_determine_the_order(args: Make, fit: Make) -> None:
    def losses(**changes: Any) -> list[str]:
        folder = str(Path(args().output_dir) / json.dumps(changes).replace('"', ""))
        return fit(args(output_dir=folder, max_steps=4, **changes))[1].hex

    plain = losses()
    assert losses(data_seed=42) == plain
    assert losses(data_seed=1) != plain
    assert losses(seed=7, data_seed=42) == plain
    assert losses(train_sampling_strategy="sequential") == losses(train_sampling_strategy="sequential", data_seed=5)
    assert losses(train_sampling_strategy="sequential") != plain


def test_label_names_are_gathered_as_labels(args: Make, data: Make) -> None:
    class Spans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> Any:
            first, last = self.layer(x).chunk(2, dim=-1)
            loss = F.cross_entropy(first, start) + F.cross_entropy(last, end)
            return {"loss": loss, "start_logits": first, "end_logits": last, "hidden": x}

    def measure(prediction: Any) -> dict[str, Any]:
        return {"shapes": [part.shape for part in (*prediction.predictions, *prediction.label_ids)]}

    rows = [{"x": row["x"], "start": row["labels"], "end": row["labels"]} for row in data(10)]
    trainer = BaseTrainer(args(label_names=["start", "end"]), Spans(), compute_metrics=measure)
    metrics = trainer.evaluate(rows, ignore_keys=["hidden"])
    assert metrics["eval_shapes"] == [(10, 3), (10, 3), (10,), (10,)]
    assert np.isfinite(metrics["eval_loss"])
    assert len(trainer.evaluate(rows)["eval_shapes"]) == 5


def test_remove_unused_columns_can_be_disabled(args: Make, net: Make) -> None:
    dataset = pytest.importorskip("datasets").Dataset.from_dict(
        {"x": [[0.0] * 4] * 4, "labels": [0] * 4, "weight": [1.0] * 4}
    )
    seen: list[list[str]] = []

    def collator(rows: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(sorted(rows[0]))
        return {"x": torch.tensor([row["x"] for row in rows]), "labels": torch.tensor([row["labels"] for row in rows])}

    for remove in (True, False):
        BaseTrainer(args(remove_unused_columns=remove), net(), data_collator=collator).evaluate(dataset)
    assert seen == [["labels", "x"], ["labels", "weight", "x"]]


def test_report_to_and_disable_tqdm_select_callbacks(args: Make, net: Make) -> None:
    pytest.importorskip("tensorboard")

    def kinds(**changes: Any) -> set[type]:
        return {type(callback) for callback in Trainer(args(**changes), net()).callbacks}

    assert ProgressCallback in kinds()
    assert TensorBoardCallback not in kinds(report_to="none")
    assert TensorBoardCallback in kinds(report_to="tensorboard")
    assert ProgressCallback not in kinds(disable_tqdm=True)


def test_run_name_is_the_name_in_the_tracker(args: Make, fit: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    module = SimpleNamespace(init=lambda **given: opened.append(given) or run)
    monkeypatch.setitem(__import__("sys").modules, "trackio", module)
    fit(args(max_steps=1, report_to=["trackio"], run_name="first try"))
    assert opened[0]["name"].startswith("first try-")


def test_process_flags_are_attributes_and_methods(args: Make, net: Make) -> None:
    trainer = BaseTrainer(args(), net())
    assert trainer.is_world_process_zero
    assert trainer.is_world_process_zero() is True
    assert trainer.is_local_process_zero() is True
    assert trainer.is_world_process_zero == True  # noqa: E712


def test_train_accepts_the_keywords_of_transformers(args: Make, net: Make, data: Make) -> None:
    seen: list[Any] = []

    class Child(BaseTrainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            seen.append(ignore_keys)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    trainer = Child(args(max_steps=1, eval_strategy="epoch"), net(), train_dataset=data(4), eval_dataset=data(4))
    trainer.train(resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=["hidden"])
    trainer.evaluate(ignore_keys=["other"])
    assert seen == [["hidden"], ["other"]]
    with pytest.raises(ConfigError, match="expected trial=None"):
        trainer.train(trial=object())


def test_epochs_that_stop_early_are_not_repeated(args: Make, fit: Make) -> None:
    class EndEpoch(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_epoch_stop = event["state"].global_step % 2 == 0

    trainer, _ = fit(args(max_steps=-1, num_train_epochs=3), callbacks=[EndEpoch()])
    assert (trainer.state.global_step, trainer.state.raw_epoch) == (6, 3)


class Saves:
    """A callback that does not derive from ours, like those written for transformers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, str, Any]] = []

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.seen.append((state.global_step, kwargs["step"], kwargs["checkpoint"].name, weights))


class OwnSaves(Saves, TrainerCallback):
    pass


@pytest.mark.parametrize("kind", [Saves, OwnSaves])
def test_on_save_has_the_state_of_the_saved_step(
    kind: type[Saves], args: Make, fit: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is blocked until two more steps are done, unless the trainer waits for it."""
    saves, finished = kind(), CheckpointManager.finished
    held: list[Any] = []

    def late(self: CheckpointManager) -> list[Any]:
        held.extend(finished(self))
        ready = [saved for saved in held if kind is Saves or saved.step + 2 <= trainer.state.global_step]
        held[:] = [saved for saved in held if saved not in ready]
        return ready

    monkeypatch.setattr(CheckpointManager, "finished", late)

    class CaptureTrainer(TrainerCallback):
        def on_train_begin(self, **event: Any) -> None:
            nonlocal trainer
            trainer = event["trainer"]

    trainer: Any = None
    fit(args(save_strategy="steps", save_steps=2, max_steps=6), callbacks=[CaptureTrainer(), saves])
    steps = [2, 4, 6] if kind is Saves else [2, 4]
    assert [seen[:3] for seen in saves.seen] == [(step, step, f"step-{step:08}") for step in steps]
    if kind is Saves:
        from safetensors.torch import load_file

        for step, _, name, weights in saves.seen:
            stored = load_file(Path(args().output_dir) / "checkpoints" / name / "model" / "model.safetensors")
            assert all(torch.equal(stored[key], weights[key]) for key in stored), step


def test_checkpoint_paths_of_transformers_are_accepted(args: Make, fit: Make) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4}
    fit(args(**settings))
    name = str(Path(args().output_dir) / "checkpoint-4")
    _, losses = fit(args(**settings, max_steps=9), resume=name)
    assert len(losses.values) == 5
    trainer, losses = fit(args(**settings, max_steps=6, resume_from_checkpoint=name))
    assert len(losses.values) == 2
    assert trainer.resumed_from.name == "step-00000004"


def test_resuming_with_the_same_shapes_but_another_config_raises(args: Make) -> None:
    def fit(heads: int, **changes: Any) -> None:
        shape = GPTConfig(vocab_size=32, context_length=8, num_layers=1, embd_size=16, num_heads=heads)
        ids = torch.randint(0, 32, (8, 9), generator=torch.Generator().manual_seed(0))
        rows = [(row[:-1], row[1:]) for row in ids]
        settings = args(save_strategy="steps", save_steps=2, max_steps=2) if not changes else args(max_steps=3)
        BaseTrainer(settings, GPT(shape), train_dataset=rows).train(**changes)

    fit(2)
    with pytest.raises(CheckpointError, match=r"num_heads = 4, got 2 in .*step-00000002"):
        fit(4, resume_from_checkpoint=True)
    fit(2, resume_from_checkpoint=True)


def test_resuming_with_other_examples_raises(args: Make, fit: Make, data: Make) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4}
    fit(args(**settings))
    other = data()
    other[0] = {**other[0], "labels": (other[0]["labels"] + 1) % 3}
    with pytest.raises(DataError, match=r"differ from the checkpoint's.*resume_skip=\('dataset',\)"):
        fit(args(**settings, max_steps=9), train_dataset=other, resume=True)
    fit(args(**settings, max_steps=9, resume_skip=("dataset",)), train_dataset=other, resume=True)


def test_resume_allows_datasets_with_random_augmentation(args: Make, fit: Make, data: Make) -> None:
    class Augmented(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            noise = np.random.default_rng().normal()
            return {**super().__getitem__(index), "x": super().__getitem__(index)["x"] + noise}

    settings = {"save_strategy": "steps", "save_steps": 4}
    fit(args(**settings), train_dataset=Augmented(data()))
    trainer, _ = fit(args(**settings, max_steps=9), train_dataset=Augmented(data()), resume=True)
    assert trainer.state.global_step == 9


def test_a_checkpoint_that_disappears_while_loading_is_skipped(
    args: Make, fit: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    settings = {"save_strategy": "steps", "save_steps": 4}
    fit(args(**settings))
    newest = Path(args().output_dir) / "checkpoints" / "step-00000008"
    load = BaseTrainer.load_state_dict

    def vanish(self: BaseTrainer, state: dict[str, Any]) -> None:
        load(self, state)
        shutil.rmtree(newest, ignore_errors=True)

    monkeypatch.setattr(BaseTrainer, "load_state_dict", vanish)
    trainer, losses = fit(args(**settings, max_steps=9), resume=True)
    assert len(losses.values) == 5
    assert trainer.resumed_from.name == "step-00000004"
    assert "was removed while it was being loaded" in caplog.text
    shutil.rmtree(newest.with_name("step-00000009"), ignore_errors=True)


def test_float_labels_for_a_model_that_returns_logits_raise(args: Make, fit: Make, data: Make) -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    rows = [{"x": row["x"], "labels": float(row["labels"])} for row in data()]
    with pytest.raises(
        DataError, match=r"expected integer class ids .*, got torch.float32: return a loss from the model"
    ):
        fit(args(), Logits(), train_dataset=rows)


def test_divergence_callback_accepts_keywords() -> None:
    callback = DivergenceCallback(action="abort", detector="window", window=3)
    control = SimpleNamespace(should_abort_without_save=False, should_training_stop=False)
    callback.on_train_metrics(metrics={"step": 1, "loss": float("nan")}, control=control)
    assert control.should_abort_without_save
    with pytest.raises(ConfigError, match="divergence.windo"):
        DivergenceCallback(windo=3)


@pytest.mark.parametrize("kind", ["tokens", "tokenizer"])
def test_resuming_with_other_shards_raises(
    kind: str, make_run: Make, shards: Path, shakespeare: str, tmp_path: Path
) -> None:
    def refuse(folder: Path, words: str) -> None:
        with pytest.raises(DataError, match=f"expected {words}.* got .*resume with the same data"):
            Trainer.from_config(make_run(train__steps=4, data__path=str(folder))).train()

    Trainer.from_config(make_run(train__steps=3)).train()
    if kind == "tokenizer":
        text = tmp_path / "text.txt"
        text.write_text(shakespeare[:40_000])
        tokenizer = train_tokenizer([shakespeare[40_000:80_000]], 300)
        prepare([str(text)], tmp_path / "other", tokenizer, name="tiny", separator="\n\n", val_tokens=1500)
        refuse(tmp_path / "other", "shards with the tokenizer of the checkpoint")
        return
    for path in shards.iterdir():
        if path.name != "manifest.json":
            (tmp_path / "other").mkdir(exist_ok=True)
            (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    (changed,) = (tmp_path / "other").glob("*_train_*.bin")
    tokens = read_shard(changed).copy()
    tokens[1:200] = tokens[200:399]
    changed.unlink()
    write_shard(changed, tokens)
    refuse(tmp_path / "other", "shards with the tokens of the checkpoint")


def test_compute_loss_gets_pairs_of_token_shards(args: Make, shards: Path) -> None:
    class Child(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            assert isinstance(inputs, tuple)
            return 0.5 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def losses(kind: type[BaseTrainer]) -> list[float]:
        torch.manual_seed(0)
        network = GPT(GPTConfig(vocab_size=300, context_length=16, num_layers=1, embd_size=16, num_heads=2))
        loader = TokenDataLoader(shards, B=4, T=16, documents="mask")
        trainer = kind(args(max_steps=2, logging_steps=1, learning_rate=0.0), network, train_dataset=loader)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history]

    assert losses(Child) == pytest.approx([0.5 * loss for loss in losses(BaseTrainer)], rel=1e-6)
