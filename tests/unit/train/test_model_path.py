"""Runs that start from existing weights: `[model] path = DIR`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import latest_checkpoint
from whimbrel.config import dump_toml, to_table
from whimbrel.data import TokenDataLoader
from whimbrel.model_io import load_model
from whimbrel.models import GPT
from whimbrel.train import RunConfig, Trainer, TrainerCallback, TrainingArguments, load_run_config, read_log, train
from whimbrel.train.run_config import ModelConfig, build_run_config

MakeRun = Callable[..., RunConfig]


def make_model(family: str, vocab_size: int = 300) -> Any:
    torch.manual_seed(0)
    if family == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes, max_position_embeddings=32))


@pytest.fixture
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_model(getattr(request, "param", "llama")).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def make(make_run: MakeRun, directory: Path) -> MakeRun:
    """A run that starts from `directory`."""

    def continued(**changes: object) -> RunConfig:
        table = to_table(make_run(**{name: value for name, value in changes.items() if not name.startswith("model__")}))
        own = {name.removeprefix("model__"): value for name, value in changes.items() if name.startswith("model__")}
        return build_run_config(table | {"model": {"path": str(directory), **own}})

    return continued


def test_dropout_can_be_set_for_existing_weights(make: MakeRun) -> None:
    config = make(model__dropout=0.5)
    assert config.model.dropout == 0.5
    model = Trainer.from_config(config).model
    assert isinstance(model, GPT)
    assert [model.config.dropout, *(block.dropout for block in model.blocks)] == [0.5] * 3
    assert make().model.dropout == 0
    with pytest.raises(ConfigError, match="num_layers = 3 conflicts with model.path"):
        make(model__dropout=0.5, model__num_layers=3)


@pytest.mark.parametrize("directory", ["llama", "gpt2"], indirect=True)
def test_the_first_loss_is_that_of_transformers_on_the_same_tokens(make: MakeRun, directory: Path) -> None:
    config = make(train__tokens_per_step=128)
    train(config)
    x, y = TokenDataLoader(config.data.path, 4, 32, seed=config.data.shuffle_seed).next_batch()
    logits = AutoModelForCausalLM.from_pretrained(directory)(x).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    first = read_log(config.output_dir / "log.jsonl")[0]
    assert first["after"] == 1
    assert first["loss"] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("directory", ["llama", "gpt2"], indirect=True)
def test_checkpoints_are_directories_of_the_same_family(make: MakeRun, directory: Path) -> None:
    config = make()
    train(config)
    saved = config.output_dir / "checkpoints" / "step-00000006" / "model"
    before = json.loads((directory / "config.json").read_text())
    assert json.loads((saved / "config.json").read_text())["model_type"] == before["model_type"]
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert type(model) is type(make_model(before["model_type"]))


def test_a_run_starts_from_the_checkpoint_of_another_run(make_run: MakeRun, tmp_path: Path) -> None:
    first = make_run(output_dir=tmp_path / "first")
    train(first)
    config = build_run_config(
        {
            "output_dir": str(tmp_path / "second"), "model": {"path": str(first.output_dir)},
            "data": {"path": str(first.data.path)},
            "train": {"steps": 2, "tokens_per_step": 256, "micro_batch": 4, "device": "cpu"},
        }
    )  # fmt: skip
    assert config.model.architecture == first.model.architecture
    trainer = Trainer.from_config(config)
    trained = Trainer.from_config(first)
    trained.load_checkpoint()
    theirs = trained.unwrapped_model().state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in trainer.unwrapped_model().state_dict().items())


def test_the_run_records_the_path_and_resumes_from_its_own_checkpoint(make: MakeRun, directory: Path) -> None:
    config = make(train__steps=6, checkpoint__every=3)
    train(replace(config, train=replace(config.train, steps=3)))
    recorded = load_run_config(config.output_dir / "config.toml")
    assert recorded.model == config.model
    shutil.rmtree(directory)  # a resumed run does not need it
    resumed = load_run_config(config.output_dir / "config.toml", ["--train.steps=6"])
    trainer = Trainer.from_config(resumed)
    assert trainer.train().global_step == 6
    assert trainer.resumed_from == config.output_dir / "checkpoints" / "step-00000003"


def test_a_missing_directory_is_an_error(make: MakeRun, directory: Path) -> None:
    config = make()
    shutil.rmtree(directory)
    with pytest.raises(CheckpointError, match="source"):
        Trainer.from_config(config)
    with pytest.raises(CheckpointError, match="source"):
        make()


def test_settings_that_contradict_the_directory_are_rejected(make: MakeRun) -> None:
    assert make(model__num_layers=2, model__embd_size=32).model.num_layers == 2
    with pytest.raises(ConfigError, match=r"model\.num_layers = 3 conflicts with model\.path .* has 2"):
        make(model__num_layers=3)
    with pytest.raises(ConfigError, match=r"model\.path or model\.preset, got both"):
        make(model__preset="gpt2")
    with pytest.raises(ConfigError, match=r"unknown setting 'model\.layers'"):
        make(model__layers=2)


def test_shards_of_a_larger_vocabulary_are_rejected(make_run: MakeRun, tmp_path: Path) -> None:
    make_model("llama", vocab_size=299).save_pretrained(tmp_path / "small")
    config = build_run_config(to_table(make_run()) | {"model": {"path": str(tmp_path / "small")}})
    with pytest.raises(ConfigError, match=r"expected shards .*299 tokens.* got 300 .* --tokenizer"):
        Trainer.from_config(config)


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_metrics(self, **event: Any) -> None:
        self.values.append(event["metrics"]["loss"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_our_model_trains_on_rows_with_input_ids_and_labels(tmp_path: Path, accumulation: int) -> None:
    """Padded and masked rows; losses and evaluation equal those of the transformers model."""
    source = make_model("llama")
    source.save_pretrained(tmp_path / "source")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(8):
        ids = torch.randint(0, 300, (16,), generator=generator)
        mask, labels = torch.ones(16, dtype=torch.int64), ids.clone()
        mask[16 - index :], labels[16 - index :] = 0, -100
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    found = []
    for number, model in enumerate((source, load_model(tmp_path / "source"))):
        args = TrainingArguments(
            output_dir=str(tmp_path / str(number)), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3,
            gradient_accumulation_steps=accumulation, use_cpu=True, save_strategy="no", lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(args, model, train_dataset=rows, eval_dataset=rows, callbacks=[losses := Losses()])
        trainer.train()
        prediction = trainer.predict(rows)
        found.append([*losses.values, trainer.evaluate()["eval_loss"], prediction.metrics["test_loss"]])
        assert tuple(prediction.predictions.shape) == (8, 16, 300)
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_the_path_can_be_set_on_the_command_line(make_run: MakeRun, directory: Path, tmp_path: Path) -> None:
    table = {name: value for name, value in to_table(make_run()).items() if name != "model"}
    (tmp_path / "run.toml").write_text(dump_toml(table))
    config = load_run_config(tmp_path / "run.toml", [f"--model.path={directory}"])
    assert (config.model.path, config.model.num_layers) == (directory, 2)


def test_a_path_from_python_sets_the_architecture(make_run: MakeRun, directory: Path) -> None:
    config = replace(make_run(), model=ModelConfig(path=directory))
    assert config.model == build_run_config(to_table(make_run()) | {"model": {"path": str(directory)}}).model
    train(config)
    assert load_run_config(config.output_dir / "config.toml").model == config.model
    with pytest.raises(ConfigError, match=r"model\.num_layers = 3 conflicts with model\.path"):
        replace(config, model=ModelConfig(path=directory, num_layers=3))


def test_adapters_are_trained_on_token_shards(make: MakeRun, directory: Path) -> None:
    config = build_run_config(to_table(make()) | {"lora": {"rank": 4, "modules": ["q_proj", "v_proj"]}})
    trainer = Trainer.from_config(config)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "adapters" in name}
    assert (latest_checkpoint(config.output_dir) / "model" / "adapter_config.json").is_file()
