"""Fine-tuning runs from a configuration: settings, samples in the run directory, adapters, objectives, checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.finetuning import (
    CHAT_TOKENS,
    reversal_task,
    run_config,
    save_base_model,
    write_chats,
    write_preferences,
)

from whimbrel.base.errors import CheckpointError, ConfigError, DataError
from whimbrel.checkpoint import latest_checkpoint
from whimbrel.config import dump_toml, to_table
from whimbrel.model_io import finalize_adapter, load_adapter, load_model, load_tokenizer, open_model
from whimbrel.models.lora import find_lora_config
from whimbrel.precision import QuantizedWeight
from whimbrel.tokenization import load_chat_template
from whimbrel.train import Trainer, load_run_config, read_log, train
from whimbrel.train.memory import predict_memory
from whimbrel.train.samples import prepare_samples

LORA: dict[str, Any] = {"lora": {"rank": 4}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl", reversal_task()[0])


@pytest.fixture
def preferences(tmp_path: Path) -> Path:
    return write_preferences(tmp_path / "pairs.jsonl", reversal_task()[0][:40])


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in read_log(output / "log.jsonl") if line["kind"] == "step"]


# Settings


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"weights": "int4"}}, r"model.weights = int4 needs \[lora\]"),
        ({**LORA, "ema": {"decay": 0.9}}, r"ema.decay does not work with \[lora\]"),
        ({**LORA, "train": {"weight_dtype": "int8"}}, r"train.weight_dtype = int8 does not work with \[lora\]"),
        ({**LORA, "parallel": {"tp": 2}}, r"parallel.tp = 2 does not work with \[lora\]"),
        ({"data": {"documents": "mask"}}, "data.documents = 'mask' needs a directory of token shards"),
        ({"data": {"sequence_length": 65}}, "exceeds model.context_length = 64: lower it"),
        ({"data": {"val": 1.5}}, "expected data.val between 0 and 1"),
        ({"data": {"val": 0.1}, "validation": {"path": "x.jsonl"}}, "data.val or validation.path"),
        ({"data": {"format": "chatml"}}, "data.format: expected one of messages"),
        ({"data": {"train_on": "user"}}, "data.train_on: expected one of assistant"),
        ({"validation": {"tokens": 100}}, "validation.tokens = 100 needs token shards"),
        ({"loader": {"label_names": ["labels"]}}, "loader.label_names"),
        ({"sample": {"every": 2}}, "sample.every needs sample.prompt"),
        ({"objective": {"name": "sft", "beta": 0.2}}, "objective.beta = 0.2 needs objective.name = dpo or orpo"),
        ({"objective": {"name": "orpo", "loss": "ipo"}}, "objective.loss = 'ipo' needs objective.name = dpo"),
        ({"objective": {"name": "dpo", "reference": "base"}}, r"objective.reference = base needs \[lora\]"),
        ({"objective": {"name": "distill"}}, "needs objective.teacher"),
        ({"objective": {"name": "dpo"}, "data": {"packing": False}}, "needs data.packing = true"),
        ({"objective": {"name": "dpo", "loss": "ipo", "label_smoothing": 0.1}}, "objective.label_smoothing"),
        ({"lora": {"rank": 0}}, "expected lora.rank >= 1"),
        ({"lora": {"modules": ["query"]}}, "lora.modules: this model has no module 'query'"),
        ({"lora": {"rnak": 4}}, "unknown setting 'lora.rnak': did you mean 'lora.rank'"),
    ],
)
def test_settings_without_effect_are_refused(
    base: Path, chats: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(base, chats, tmp_path / "run", **sections)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"template": "chatml"}}, "data.template = 'chatml' needs samples in data.path"),
        ({"objective": {"name": "sft"}}, "objective.name = sft needs samples"),
        ({"loader": {"workers": 2}}, "has no effect on token shards"),
    ],
)
def test_settings_for_samples_are_refused_with_token_shards(
    base: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(base, tmp_path / "shards", tmp_path / "run", **sections)


def test_adapters_and_samples_need_a_model(base: Path, chats: Path, tmp_path: Path) -> None:
    table = to_table(run_config(base, chats, tmp_path / "run", **LORA))
    table["model"] = {"num_layers": 1}
    with pytest.raises(ConfigError, match="fine-tuning needs model.path: pass --model.path=PATH"):
        load_run_config(write(tmp_path, table))
    del table["lora"]
    with pytest.raises(ConfigError, match="tokenizer and chat template of model.path"):
        load_run_config(write(tmp_path, table))


def write(folder: Path, table: dict[str, Any]) -> Path:
    file = folder / "config.toml"
    file.write_text(dump_toml(table))
    return file


def test_a_run_is_not_written_into_the_model_it_starts_from(base: Path, chats: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected output_dir to differ from model.path"):
        run_config(base, chats, base)
    train(run_config(base, chats, tmp_path / "run", train={"steps": 1}, **LORA))
    for model in (tmp_path / "run", latest_checkpoint(tmp_path / "run")):
        assert model is not None
        with pytest.raises(ConfigError, match="expected output_dir to differ from model.path"):
            run_config(model, chats, tmp_path / "run", **LORA)


def test_a_config_survives_toml_and_overrides(base: Path, chats: Path, tmp_path: Path) -> None:
    config = run_config(
        base, [str(chats), "owner/dataset"], tmp_path / "run", model={"path": str(base), "weights": "int4"},
        lora={"rank": 8, "modules": ["q_proj", "v_proj"]}, objective={"name": "dpo", "beta": 0.3},
    )  # fmt: skip
    file = write(tmp_path, to_table(config))
    assert load_run_config(file) == config
    assert config.data.sources == (str(chats), "owner/dataset")
    changed = load_run_config(file, ["--lora.rank=2", "--model.weights=int8", "--objective.name=orpo"])
    assert (changed.lora and changed.lora.rank, changed.model.weights, changed.objective.name) == (2, "int8", "orpo")
    plain = load_run_config(file, ["--lora=none", "--model.weights=none", "--objective.reference=precomputed"])
    assert plain.lora is None


def test_defaults_for_samples_are_short_sequences_and_small_steps(base: Path, chats: Path, tmp_path: Path) -> None:
    config = run_config(base, chats, tmp_path / "run", train={"tokens_per_step": 192})
    assert config.sequence_length == 64  # the model's context
    model = replace(config.model.architecture, context_length=131_072)
    config = replace(config, model=replace(config.model, path=Path("gone"), context_length=model.context_length))
    config = replace(config, train=replace(config.train, tokens_per_step=None))
    assert (config.sequence_length, config.tokens_per_step) == (2048, 16_384)


# Samples in the run directory


def test_samples_are_tokenized_once_and_checked_on_resume(base: Path, chats: Path, tmp_path: Path) -> None:
    config = run_config(base, chats, tmp_path / "run", data={"val": 0.1}, **LORA)
    first = prepare_samples(config)
    ids = next((tmp_path / "run" / "samples").glob("train/ids.npy"))
    written = ids.stat().st_mtime_ns
    assert prepare_samples(config).train.fingerprint == first.train.fingerprint
    assert ids.stat().st_mtime_ns == written
    assert first.val is not None
    assert first.stats.samples == first.train.stats.samples + first.val.stats.samples == len(reversal_task()[0])

    train(config)
    with pytest.raises(DataError, match="data.val has changed since the run"):
        prepare_samples(run_config(base, chats, tmp_path / "run", data={"val": 0.2}, **LORA))
    with pytest.raises(DataError, match=r"the objective has changed .* \(name was \w+, now lm\): "):
        prepare_samples(run_config(base, chats, tmp_path / "run", data={"val": 0.1}, objective={"name": "lm"}, **LORA))
    content = chats.read_text()
    chats.write_text(content.replace("0123", "3210"))
    with pytest.raises(DataError, match=rf"the content of data.path .*\({chats.name} is not the same\)"):
        prepare_samples(config)
    other = chats.with_name("other.jsonl")
    other.write_text(content)
    with pytest.raises(DataError, match=rf'\(expected "{chats.name}", got "other.jsonl"\)'):
        prepare_samples(run_config(base, other, tmp_path / "run", data={"val": 0.1}, **LORA))
    chats.unlink()  # a resumed run does not need it
    assert prepare_samples(config).train.fingerprint == first.train.fingerprint
    chats.write_text(content + content.replace("0", "1"))
    assert len(prepare_samples(replace(config, overwrite_output_dir=True)).train) > len(first.train)


def test_a_run_resumes_from_another_directory_and_with_a_moved_base(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_base_model(tmp_path / "base")
    train(run_config(Path("base"), chats, tmp_path / "run", train={"steps": 2}, **LORA))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    chats.unlink()
    train(run_config(Path("../base"), chats, tmp_path / "run", train={"steps": 4}, **LORA))
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    train(run_config(moved, chats, tmp_path / "run", train={"steps": 6}, **LORA))
    assert len(losses(tmp_path / "run")) == 6
    load_model(tmp_path / "run")
    (moved / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(DataError, match=r"the chat template has changed since the run in \S+ was started: restore it"):
        train(run_config(moved, chats, tmp_path / "run", train={"steps": 8}, **LORA))


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (LORA, {}, r"has adapters, but this run trains all weights: add \[lora\] .* omit --full"),
        ({}, LORA, r"has all weights, but this run trains adapters: remove \[lora\] .* pass --full"),
    ],
)
def test_a_run_does_not_resume_with_all_weights_instead_of_adapters_or_the_reverse(
    base: Path, chats: Path, tmp_path: Path, first: dict[str, Any], then: dict[str, Any], message: str
) -> None:
    train(run_config(base, chats, tmp_path / "run", train={"steps": 1}, **first))
    with pytest.raises(CheckpointError, match=message):
        train(run_config(base, chats, tmp_path / "run", train={"steps": 2}, **then))


def test_a_started_directory_without_checkpoint_gets_new_samples(base: Path, chats: Path, tmp_path: Path) -> None:
    before = prepare_samples(run_config(base, chats, tmp_path / "run"))
    after = prepare_samples(run_config(base, chats, tmp_path / "run", data={"train_on": "all"}))
    assert after.stats.supervised_tokens > before.stats.supervised_tokens


def test_a_validation_file_is_tokenized_like_the_training_data(base: Path, chats: Path, tmp_path: Path) -> None:
    held_out = write_chats(tmp_path / "val.jsonl", reversal_task()[1])
    config = run_config(base, chats, tmp_path / "run", validation={"path": str(held_out)}, **LORA)
    samples = prepare_samples(config)
    assert samples.val is not None
    assert samples.val.stats.samples == len(reversal_task()[1])
    train(config)
    lines = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "validation"]
    assert len(lines) == 1


def test_bad_rows_name_their_line_or_are_counted(base: Path, chats: Path, tmp_path: Path) -> None:
    with chats.open("a") as file:
        file.write('{"messages": []}\n')
    number = len(chats.read_text().splitlines())
    with pytest.raises(DataError, match=f"line {number}"):
        prepare_samples(run_config(base, chats, tmp_path / "run"))
    samples = prepare_samples(run_config(base, chats, tmp_path / "run", data={"skip_bad": True}))
    assert samples.report.num_skipped == 1
    assert samples.stats.samples == number - 1


@pytest.mark.parametrize(("name", "data"), [("sft", "preferences"), ("dpo", "chats"), ("lm", "chats")])
def test_data_of_another_kind_than_the_objective_is_refused(
    request: pytest.FixtureRequest, base: Path, tmp_path: Path, name: str, data: str
) -> None:
    config = run_config(base, request.getfixturevalue(data), tmp_path / "run", objective={"name": name}, **LORA)
    with pytest.raises(ConfigError, match=f"objective.name = {name}"):
        prepare_samples(config)


def test_a_model_without_template_needs_one(chats: Path, tmp_path: Path) -> None:
    plain = save_base_model(tmp_path / "plain", special=("<|endoftext|>",), template=None)
    with pytest.raises(ConfigError, match=r"data.template = chatml .* --template chatml"):
        prepare_samples(run_config(plain, chats, tmp_path / "run"))
    with pytest.raises(ConfigError, match="unknown template"):
        prepare_samples(run_config(plain, chats, tmp_path / "run", data={"template": "chatlm"}))


# Training


def test_full_fine_tuning_with_a_new_template_saves_a_complete_chat_model(chats: Path, tmp_path: Path) -> None:
    plain = save_base_model(tmp_path / "plain", special=("<|endoftext|>",), template=None)
    config = run_config(plain, chats, tmp_path / "run", data={"template": "chatml"}, train={"steps": 4})
    train(config)
    saved = latest_checkpoint(tmp_path / "run") / "model"
    opened = open_model(saved)
    before, after = load_model(plain), load_model(saved)
    assert after.config.vocab_size == before.config.vocab_size + 2 == opened.tokenizer.vocab_size
    assert opened.tokenizer.eot_token == "<|im_end|>"
    assert opened.generation_config.eos_token_ids == (opened.tokenizer.eot_id, load_tokenizer(plain).eot_id)
    template, trained = opened.chat_template(), prepare_samples(config)
    assert template is not None
    question, answer = reversal_task()[0][0]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids, mask = trained.train[0]
    assert template.encode(opened.tokenizer, messages, add_generation_prompt=False) == ids.tolist()
    assert ids[mask].tolist() == [*opened.tokenizer.encode(answer), opened.tokenizer.eot_id]

    rows = config.output_dir / "resumed"
    shutil.copytree(tmp_path / "run", rows)
    shutil.rmtree(plain)  # a checkpoint has all weights
    chats.unlink()
    longer = replace(config, output_dir=rows, train=replace(config.train, steps=6))
    train(longer)
    assert len(losses(rows)) == 6


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_lora_saves_an_adapter_that_loads_on_its_base(
    base: Path, chats: Path, tmp_path: Path, weights: str | None
) -> None:
    model = {"path": str(base)} | ({} if weights is None else {"weights": weights})
    config = run_config(base, chats, tmp_path / "run", model=model, train={"steps": 6}, **LORA)
    trainer = Trainer.from_config(config)
    trainer.train()
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    ours = trainer.unwrapped_model()
    is_quantized = any(isinstance(parameter, QuantizedWeight) for parameter in ours.parameters())
    assert is_quantized == (weights is not None)
    saved = latest_checkpoint(tmp_path / "run") / "model"
    assert {file.name for file in saved.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "base_model.json", "chat_template.jinja",
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert load_chat_template(saved) is not None
    loaded = load_model(base, quantize=weights)
    assert load_adapter(loaded, saved).rank == 4
    assert find_lora_config(ours) == config.lora
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, ours.eval()(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_lora_trains_the_special_tokens_of_a_new_template(
    chats: Path, tmp_path: Path, tied: bool, weights: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    plain = save_base_model(tmp_path / "plain", special=("<|endoftext|>",), template=None, tied_head=tied)
    model = {"path": str(plain)} | ({} if weights is None else {"weights": weights})
    sections = {"model": model, "data": {"template": "chatml", "val": 0.1}, "validation": {"every": 2}, **LORA}
    config = run_config(plain, chats, tmp_path / "run", train={"steps": 6}, **sections)
    trainer = Trainer.from_config(config)
    trainer.train()
    saved = latest_checkpoint(tmp_path / "run") / "model"
    indices = json.loads((saved / "adapter_config.json").read_text())["trainable_token_indices"]
    assert indices == ([257, 258] if tied else {"embed_tokens": [257, 258], "lm_head": [257, 258]})

    ours, loaded = trainer.unwrapped_model().eval(), load_model(saved)
    assert loaded.config.vocab_size == 259
    ids = torch.tensor([[257, 1, 258, 2, 257, 258]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)
    mean = load_model(plain).token_embedding.weight[:257].mean(0)
    rows = ours.token_embedding.trainable_tokens
    assert all((row - mean).abs().max() > 1e-4 for row in rows)
    assert (rows[0] - rows[1]).abs().max() > 1e-4
    finalize_adapter(tmp_path / "run", tmp_path / "peft")
    eos_ids = [
        json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        for folder in (saved, tmp_path / "peft")
    ]
    assert eos_ids[0] == eos_ids[1]
    assert "ignoring eos_token_id" not in caplog.text

    interrupted = run_config(plain, chats, tmp_path / "resumed", train={"steps": 3}, **sections)
    train(interrupted)
    train(replace(interrupted, train=replace(interrupted.train, steps=6)))
    resumed = latest_checkpoint(tmp_path / "resumed") / "model"
    name = "adapter_model.safetensors"
    assert (resumed / name).read_bytes() == (saved / name).read_bytes()


def test_the_reference_of_dpo_has_the_initial_rows_of_new_tokens(preferences: Path, tmp_path: Path) -> None:
    plain = save_base_model(tmp_path / "plain", special=("<|endoftext|>",), template=None)
    train(
        run_config(
            plain, preferences, tmp_path / "run", data={"template": "chatml"}, objective={"name": "dpo"},
            train={"steps": 8}, **LORA,
        )
    )  # fmt: skip
    steps = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "step"]
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]


def test_a_quantized_directory_is_refused_without_adapters(base: Path, chats: Path, tmp_path: Path) -> None:
    from whimbrel.model_io import finalize_model

    finalize_model(base, tmp_path / "int8", recipe="int8")
    with pytest.raises(ConfigError, match="or train adapters"):
        Trainer.from_config(run_config(tmp_path / "int8", chats, tmp_path / "run"))
    train(run_config(tmp_path / "int8", chats, tmp_path / "lora", **LORA))


def test_packed_and_padded_runs_have_the_same_first_loss(base: Path, chats: Path, tmp_path: Path) -> None:
    found = []
    for packing in (True, False):
        output = tmp_path / f"packing-{packing}"
        samples = len(reversal_task()[0])
        train_settings = {"steps": 1, "micro_batch": samples, "tokens_per_step": samples * 64}
        train(run_config(base, chats, output, data={"packing": packing}, train=train_settings, **LORA))
        found.append(losses(output)[0])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_epochs_see_every_row(base: Path, chats: Path, tmp_path: Path) -> None:
    config = run_config(base, chats, tmp_path / "run", train={"epochs": 2.0}, **LORA)
    trainer = Trainer.from_config(config)
    trainer.train()
    rows = len(trainer.train_dataset)
    assert trainer.state.global_step == 2 * -(-rows // 8)
    lines = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "step"]
    supervised = sum(line["supervised_tokens"] for line in lines)
    assert supervised == 2 * prepare_samples(config).train.stats.supervised_tokens


def test_an_objective_from_python_replaces_that_of_the_config(base: Path, chats: Path, tmp_path: Path) -> None:
    def doubled(model: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        targets = batch.pop("targets")
        return 2 * model(**batch, targets=targets, num_items_in_batch=1).loss, (targets != -100).sum()

    settings = {"train": {"steps": 1}, **LORA}
    train(run_config(base, chats, tmp_path / "sft", **settings))
    Trainer.from_config(run_config(base, chats, tmp_path / "doubled", **settings), objective=doubled).train()
    assert losses(tmp_path / "doubled")[0] == pytest.approx(2 * losses(tmp_path / "sft")[0], rel=1e-5)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_preference_objectives_prefer_the_chosen_answers(
    base: Path, preferences: Path, tmp_path: Path, name: str, lora: bool
) -> None:
    config = run_config(
        base, preferences, tmp_path / "run", objective={"name": name}, data={"val": 0.2}, train={"steps": 12},
        **(LORA if lora else {}),
    )  # fmt: skip
    train(config)
    lines = read_log(tmp_path / "run" / "log.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    [validation] = [line for line in lines if line["kind"] == "validation"]
    if name == "dpo":
        assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)  # the model is its own reference
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    assert any("accuracies" in key for key in validation)
    assert (tmp_path / "run" / "samples" / "reference-train").exists() == (name == "dpo" and not lora)


def test_distillation_approaches_the_teacher(base: Path, chats: Path, tmp_path: Path) -> None:
    teacher = save_base_model(tmp_path / "teacher", num_layers=1)
    objective = {"name": "distill", "teacher": str(teacher), "k": 16}
    config = run_config(base, chats, tmp_path / "run", objective=objective, train={"steps": 8}, **LORA)
    train(config)
    found = losses(tmp_path / "run")
    assert 0 < found[-1] < found[0]
    small = save_base_model(tmp_path / "small", special=("<|endoftext|>",))
    other = run_config(base, chats, tmp_path / "other", objective=objective | {"teacher": str(small)}, **LORA)
    with pytest.raises(ConfigError, match="the model's vocabulary"):
        Trainer.from_config(other)


def test_text_is_trained_on_completely(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(20)))
    config = run_config(base, file, tmp_path / "run", objective={"name": "lm"}, **LORA)
    train(config)
    stats = prepare_samples(config).stats
    assert stats.supervised_tokens == stats.tokens - stats.samples


def test_samples_of_the_model_are_answers(base: Path, chats: Path, tmp_path: Path) -> None:
    sample = {"every": 3, "prompt": "012", "max_new_tokens": 4}
    train(run_config(base, chats, tmp_path / "run", sample=sample, **LORA))
    assert [line["kind"] for line in read_log(tmp_path / "run" / "log.jsonl")].count("sample") == 1


# Memory


def test_memory_prediction_counts_trained_parameters_only(base: Path, chats: Path, tmp_path: Path) -> None:
    def predict(**sections: Any) -> Any:
        config = run_config(base, chats, tmp_path / "run", train={"steps": 1, "accumulation": 2, "micro_batch": 2,
                            "tokens_per_step": None} | sections.pop("train", {}), **sections)  # fmt: skip
        [prediction] = predict_memory(config)
        return config, prediction

    def parts(config: Any) -> tuple[int, int, int]:
        """Bytes of all weights, of gradients, and of Adam's moments in a real run."""
        trainer = Trainer.from_config(config)
        trainer.train()
        model = trainer.unwrapped_model()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert trainer.optimizer is not None
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        return (
            sum(p.numel() * p.element_size() for p in model.parameters() if not isinstance(p, QuantizedWeight)),
            sum(p.numel() * 4 for p in trained),
            sum(value.numel() * value.element_size() for value in states if torch.is_tensor(value) and value.ndim),
        )

    _, full = predict()
    config, lora = predict(**LORA)
    weights, gradients, moments = parts(config)
    assert lora.weights == pytest.approx(weights, rel=0.01)
    assert lora.gradients == gradients < full.gradients / 4
    assert lora.states == pytest.approx(moments, rel=0.01)
    _, qlora = predict(model={"path": str(base), "weights": "int4"}, **LORA)
    assert qlora.weights < lora.weights
    assert (qlora.gradients, qlora.states) == (lora.gradients, lora.states)
    data = {"path": str(chats), "template": "gemma"}  # two special tokens that the model does not have
    config, tokens = predict(data=data, **LORA)
    shutil.rmtree(tmp_path / "run")
    weights, gradients, moments = parts(config)
    assert tokens.gradients == gradients == lora.gradients + 2 * 2 * 4 * config.model.embd_size
    assert (tokens.weights, tokens.states) == (pytest.approx(weights, rel=0.01), pytest.approx(moments, rel=0.01))


def test_special_tokens_of_the_base_are_kept(base: Path, chats: Path, tmp_path: Path) -> None:
    samples = prepare_samples(run_config(base, chats, tmp_path / "run", **LORA))
    assert samples.tokenizer.vocab_size == 256 + len(CHAT_TOKENS)
    assert samples.added_tokens == ()
    assert load_tokenizer(samples.directory).fingerprint == load_tokenizer(base).fingerprint
