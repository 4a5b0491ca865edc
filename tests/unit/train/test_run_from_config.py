"""Runs from a configuration: losses, log, checkpoints, exact resume."""

from __future__ import annotations

import math
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.utils import clear_inductor_caches

from whimbrel.base.errors import CheckpointError, ConfigError, DataError, TrainingError
from whimbrel.checkpoint import latest_checkpoint, list_checkpoints, read_component
from whimbrel.data import write_shard
from whimbrel.model_io import load_model, locate_model
from whimbrel.models import GPT
from whimbrel.tokenization import Tokenizer, load_tokenizer
from whimbrel.train import RunConfig, Trainer, TrainerCallback, read_log, train
from whimbrel.train.callbacks.progress import RunSummary

MakeRun = Callable[..., RunConfig]


class RecordMetrics(TrainerCallback):
    """Records the metrics of a run; with `stop_after`, stops it after that many steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.validation: list[tuple[int, float]] = []
        self.samples: list[tuple[int, str]] = []
        self.summary: RunSummary | None = None
        self.stop_after = stop_after

    @property
    def losses(self) -> list[str]:
        return [record["loss"].hex() for record in self.records]

    def on_train_begin(self, **event: Any) -> None:
        self.summary = event["summary"]

    def on_step_end(self, **event: Any) -> None:
        if event["state"].global_step == self.stop_after:
            event["control"].should_training_stop = True

    def on_train_metrics(self, **event: Any) -> None:
        self.records.append(event["metrics"])

    def on_evaluate(self, **event: Any) -> None:
        self.validation.append((event["state"].global_step, event["metrics"]["eval_loss"]))

    def on_sample(self, **event: Any) -> None:
        self.samples.append((event["step"], event["text"]))


def run(config: RunConfig, seen: RecordMetrics | None = None, **keywords: Any) -> RecordMetrics:
    seen = seen or RecordMetrics()
    train(config, callbacks=[seen], **keywords)
    return seen


def weights(directory: Path) -> dict[str, torch.Tensor]:
    newest = latest_checkpoint(directory)
    assert newest is not None
    return load_model(newest / "model").state_dict()


def without_timings(log: Path) -> list[dict[str, Any]]:
    timed = {"seconds", "peak_memory", "resumed"}
    return [{key: value for key, value in line.items() if key not in timed} for line in read_log(log)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stopped_and_resumed_run_is_bit_identical(make_run: MakeRun, tmp_path: Path, optimizer: str) -> None:
    settings = {"optim__name": optimizer, "train__clip": 1.0, "validation__every": 3, "checkpoint__every": 2}
    uninterrupted = run(make_run(output_dir=tmp_path / "uninterrupted", **settings))
    interrupted = make_run(output_dir=tmp_path / "interrupted", **settings)
    first = run(interrupted, RecordMetrics(stop_after=3))
    assert len(first.losses) == 3
    second = run(interrupted)
    assert first.losses + second.losses == uninterrupted.losses
    assert without_timings(tmp_path / "interrupted" / "log.jsonl") == without_timings(
        tmp_path / "uninterrupted" / "log.jsonl"
    )
    a, b = weights(tmp_path / "uninterrupted"), weights(tmp_path / "interrupted")
    assert all(torch.equal(a[name], b[name]) for name in a)
    states = [
        read_component(list_checkpoints(tmp_path / name)[6], "optimizer")["state"]
        for name in ("uninterrupted", "interrupted")
    ]
    for index, state in states[0].items():
        assert all(torch.equal(tensor, states[1][index][name]) for name, tensor in state.items())


def test_a_run_that_crashed_between_checkpoints_repeats_its_steps_and_log_lines(
    make_run: MakeRun, tmp_path: Path
) -> None:
    settings = {"checkpoint__every": 2, "validation__every": 2}
    run(make_run(output_dir=tmp_path / "uninterrupted", **settings))

    class Crash(RecordMetrics):
        def on_train_metrics(self, **event: Any) -> None:
            if event["metrics"]["step"] == 5:
                raise KeyboardInterrupt

    config = make_run(output_dir=tmp_path / "interrupted", **settings)
    with pytest.raises(KeyboardInterrupt):
        run(config, Crash())
    assert list(list_checkpoints(config.output_dir)) == [2, 4]
    with (config.output_dir / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "aft')  # the line that was being written
    run(config)
    assert without_timings(config.output_dir / "log.jsonl") == without_timings(tmp_path / "uninterrupted" / "log.jsonl")


@pytest.mark.parametrize("documents", ["join", "mask", "pack"])
def test_accumulation_does_not_change_the_losses(make_run: MakeRun, tmp_path: Path, documents: str) -> None:
    """Also with masked targets: losses are weighted by tokens, not by batches."""
    losses = []
    for micro_batch in (1, 2, 8):
        config = make_run(
            output_dir=tmp_path / str(micro_batch), train__micro_batch=micro_batch, data__documents=documents,
            model__position="rope", train__steps=3,
        )  # fmt: skip
        seen = run(config)
        assert seen.summary is not None
        assert seen.summary.accumulation == 8 // micro_batch
        losses.append([record["loss"] for record in seen.records])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5)


def test_training_and_validation_loss_decrease(make_run: MakeRun) -> None:
    seen = run(make_run(train__steps=60, optim__lr=1e-2, validation__every=30))
    assert seen.records[0]["loss"] == pytest.approx(math.log(300), abs=0.2)
    assert seen.records[-1]["loss"] < seen.records[0]["loss"] - 1
    assert [step for step, _ in seen.validation] == [30, 60]
    assert seen.validation[1][1] < seen.validation[0][1] < math.log(300)


@pytest.mark.parametrize("documents", ["join", "pack"])
def test_validation_does_not_depend_on_the_batch_size(make_run: MakeRun, tmp_path: Path, documents: str) -> None:
    losses = []
    for size in (1, 4, 7, 500):
        config = make_run(
            output_dir=tmp_path / str(size), train__steps=1, validation__micro_batch=size, data__documents=documents
        )
        losses.append(run(config).validation[-1][1])
    assert losses[1:] == pytest.approx(losses[:1] * 3, abs=1e-6)
    short = run(make_run(output_dir=tmp_path / "short", train__steps=1, validation__tokens=64))
    assert short.validation[-1][1] != pytest.approx(losses[0], abs=1e-6)
    with pytest.raises(ConfigError, match="validation.tokens = 31 is less than one sequence of 32"):
        run(make_run(output_dir=tmp_path / "none", validation__tokens=31))


def test_validation_shards_must_have_one_sequence(make_run: MakeRun, tmp_path: Path) -> None:
    """The message counts the tokens in the shards, not validation.tokens."""
    write_shard(tmp_path / "held-out" / "held-out_val_000000.bin", np.arange(32, dtype=np.uint16))
    config = make_run(
        output_dir=tmp_path / "run", validation__path=str(tmp_path / "held-out"), validation__tokens=64,
        validation__micro_batch=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="at least 33 validation tokens .* got 32"):
        run(config)


def test_the_log_has_every_metric_of_every_step(make_run: MakeRun) -> None:
    config = make_run(train__clip=1.0, validation__every=3)
    seen = run(config)
    lines = read_log(config.output_dir / "log.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["after"] for line in steps] == list(range(1, 7))
    assert [line["loss"].hex() for line in steps] == seen.losses
    assert steps[0]["lr"] == pytest.approx(0.5e-3)
    assert all(line["grad_norm"] > 0 for line in steps)
    assert [line["after"] for line in lines if line["kind"] == "validation"] == [3, 6]


@pytest.mark.parametrize("clip", [None, 0.125])
def test_clipping_bounds_the_gradients_of_the_optimizer(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    norms = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *args: Any) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    seen = run(make_run(**{"train__clip": clip} if clip else {}))
    reported = [record["grad_norm"] for record in seen.records]
    assert min(reported) > 0.125
    assert norms == pytest.approx([0.125] * 6 if clip else reported, rel=1e-4)


def test_the_recorded_config_reproduces_the_run(make_run: MakeRun) -> None:
    from whimbrel.train.run_config import build_run_config

    config = make_run()
    run(config)
    written = build_run_config(tomllib.loads((config.output_dir / "config.toml").read_text()))
    assert written == config
    free = make_run(train__micro_batch=2, output_dir=config.output_dir.with_name("free"))
    free = replace(free, train=replace(free.train, micro_batch=None))
    run(free)
    recorded = build_run_config(tomllib.loads((free.output_dir / "config.toml").read_text()))
    assert recorded.train.micro_batch == 8


def test_a_finished_run_does_nothing_and_a_longer_one_resumes(make_run: MakeRun) -> None:
    run(make_run(schedule__name="constant"))
    written = (make_run().output_dir / "config.toml").read_text()
    assert run(make_run(schedule__name="constant", train__steps=3, optim__lr=1.0)).losses == []
    assert (make_run().output_dir / "config.toml").read_text() == written
    longer = run(make_run(schedule__name="constant", train__steps=8))
    assert [record["step"] for record in longer.records] == [7, 8]


def test_only_the_newest_checkpoints_are_kept(make_run: MakeRun) -> None:
    config = make_run(checkpoint__every=1, checkpoint__keep=2)
    run(config)
    assert list(list_checkpoints(config.output_dir)) == [5, 6]


def test_a_checkpoint_contains_a_complete_model_directory(make_run: MakeRun, shards: Path) -> None:
    config = make_run()
    run(config)
    newest = latest_checkpoint(config.output_dir)
    assert newest is not None
    assert load_model(newest / "model").config.num_layers == 2
    assert load_tokenizer(newest / "model").fingerprint == load_tokenizer(shards).fingerprint


def test_samples_come_from_the_model_in_training(make_run: MakeRun) -> None:
    def sampler(model: GPT, tokenizer: Tokenizer, step: int) -> str:
        assert isinstance(model, GPT)
        return f"{tokenizer.vocab_size} after {step}"

    seen = run(make_run(sample__every=3), sample_func=sampler)
    assert seen.samples == [(3, "300 after 3"), (6, "300 after 6")]


def test_samples_come_from_the_engine_by_default(make_run: MakeRun, tmp_path: Path) -> None:
    options = {"sample__every": 3, "sample__prompt": "So", "sample__max_new_tokens": 5}
    first, again = (run(make_run(**options, output_dir=tmp_path / name)).samples for name in ("first", "again"))
    assert [step for step, _ in first] == [3, 6]
    assert all(text.startswith("So") for _, text in first)
    assert first == again


def test_a_non_finite_loss_stops_before_a_save(make_run: MakeRun) -> None:
    config = make_run(optim__lr=1e30, train__steps=20, schedule__name="constant", checkpoint__every=20)
    with pytest.raises(TrainingError, match=r"step \d+: loss \S+, gradient norm (nan|inf)"):
        run(config)
    assert list_checkpoints(config.output_dir) == {}


def test_resuming_with_another_model_raises(make_run: MakeRun) -> None:
    run(make_run())
    with pytest.raises(CheckpointError, match="num_layers"):
        run(make_run(model__num_layers=3))


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(
    make_run: MakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make_run(output_dir=tmp_path / "uninterrupted"))
    config = make_run(checkpoint__every=4)
    run(config)
    newest = latest_checkpoint(config.output_dir)
    assert newest is not None
    (newest / "optimizer.safetensors").write_bytes(b"x")
    again = run(config)
    assert [record["step"] for record in again.records] == [5, 6]
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"changed!")
    assert locate_model(config.output_dir).directory == list_checkpoints(config.output_dir)[4] / "model"
    with pytest.raises(CheckpointError, match=r"is damaged: model/model\.safetensors has changed"):
        load_model(newest)
    assert "optimizer.safetensors" in caplog.text
    assert without_timings(config.output_dir / "log.jsonl") == without_timings(tmp_path / "uninterrupted" / "log.jsonl")
    for path in list_checkpoints(config.output_dir).values():
        (path / "manifest.json").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        run(config)


def test_a_vocabulary_too_small_raises_before_anything_is_written(make_run: MakeRun, shards: Path) -> None:
    config = make_run(model__vocab_size=299)
    with pytest.raises(ConfigError, match=r"300 tokens .*vocab_size is 299"):
        run(config)
    assert not config.output_dir.exists()


def test_a_tokenizer_that_does_not_match_the_shards_raises(make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    load_tokenizer("gpt2").save(copy)
    with pytest.raises(DataError, match=r"tokenizer\.json is not the tokenizer"):
        run(make_run(data__path=str(copy)))


def test_a_stop_during_validation_is_saved(make_run: MakeRun) -> None:
    class StopThere(RecordMetrics):
        def on_evaluate(self, **event: Any) -> None:
            event["control"].should_training_stop = True

    config = make_run(validation__every=2)
    assert train(config, callbacks=[StopThere()]).global_step == 2
    assert list(list_checkpoints(config.output_dir)) == [2]


def test_a_resumed_run_uses_its_new_optimizer_settings(make_run: MakeRun) -> None:
    run(make_run(schedule__name="constant", optim__lr=1e-3))
    changed = make_run(schedule__name="constant", optim__lr=1e-5, optim__weight_decay=0.5, train__steps=8)
    trainer, seen = Trainer.from_config(changed, callbacks=[]), RecordMetrics()
    trainer.add_callback(seen)
    trainer.train()
    assert trainer.optimizer is not None
    assert {(g["lr"], g["peak_lr"]) for g in trainer.optimizer.param_groups} == {(1e-5, 1e-5)}
    assert {g["weight_decay"] for g in trainer.optimizer.param_groups} == {0.0, 0.5}
    assert [record["lr"] for record in seen.records] == [1e-5] * 2


def test_resuming_with_another_optimizer_raises(make_run: MakeRun) -> None:
    run(make_run())
    with pytest.raises(CheckpointError, match="expected .* whimbrel:Muon, got torch:AdamW"):
        run(make_run(optim__name="muon", train__steps=8))


def test_a_resumed_run_keeps_its_automatic_micro_batch(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(steps: int) -> RunConfig:
        config = make_run(train__steps=steps, schedule__name="constant")
        return replace(config, train=replace(config.train, micro_batch=None))

    first = run(free(6)).summary
    for path in list_checkpoints(make_run().output_dir).values():
        shutil.copytree(path, path.with_name("step-00000007"))
        (path.with_name("step-00000007") / "manifest.json").write_text("damaged")
    monkeypatch.setattr("whimbrel.train.build.CPU_MICRO_BATCH_TOKENS", 32)
    second = run(free(8)).summary
    assert first is not None
    assert second is not None
    assert first.tokens_per_micro_batch == second.tokens_per_micro_batch == 8 * 32


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiling_ahead_does_not_change_the_weights(make_run: MakeRun) -> None:
    """Also if the optimizer steps in backward."""
    config = make_run(train__compile=True, train__compile_backend="eager", train__optimizer_in_backward=True,
                      train__tokens_per_step=128)  # fmt: skip
    trainer = Trainer.from_config(config, callbacks=[])
    before = {name: weight.clone() for name, weight in trainer.unwrapped_model().state_dict().items()}
    trainer._prepare_model()
    trainer._prepare_training()
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.unwrapped_model().state_dict().items())
    assert trainer.optimizer is not None
    assert len(trainer.optimizer.state) == 0


@inductor.patch({"cpp.cxx": "no-such-compiler"})
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_missing_compiler_raises_before_the_first_step(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"^train.compile \(torch_compile\) needs a .*C\+\+ compiler"):
        run(make_run(train__compile=True, train__steps=1))
    run(make_run(train__compile=True, train__compile_backend="eager", train__steps=1))


def test_the_seed_determines_the_initial_weights(make_run: MakeRun, tmp_path: Path) -> None:
    losses = [run(make_run(output_dir=tmp_path / str(i), train__seed=seed)).losses for i, seed in enumerate((0, 0, 1))]
    assert losses[0] == losses[1] != losses[2]


def test_bf16_losses_are_close_to_fp32(make_run: MakeRun, tmp_path: Path) -> None:
    fp32 = run(make_run(output_dir=tmp_path / "fp32"))
    bf16 = run(make_run(output_dir=tmp_path / "bf16", train__precision="bf16"))
    assert fp32.losses != bf16.losses
    for a, b in zip(fp32.records, bf16.records, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=0.02)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_give_the_same_losses_and_are_cached_on_disk(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "put back after the test")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.compiler.reset()  # graphs compiled by an earlier test would not be written to the cache again
    clear_inductor_caches()
    compiled = run(make_run(output_dir=tmp_path / "compiled", train__steps=3, train__compile=True))
    plain = run(make_run(output_dir=tmp_path / "plain", train__steps=3))
    assert compiled.summary is not None
    assert compiled.summary.compile_seconds > 0
    assert any((tmp_path / "cache" / "whimbrel" / "compiled").rglob("*.so"))
    for a, b in zip(plain.records, compiled.records, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)


def test_tokens_per_step_far_beyond_the_corpus_raises(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"tokens_per_step = .* more than 16 epochs"):
        train(make_run(train__tokens_per_step=2**40, train__micro_batch=None))


def test_a_model_larger_than_memory_raises_before_it_is_built(make_run: MakeRun) -> None:
    config = make_run()
    config = replace(config, model=replace(config.model, embd_size=2**20, num_layers=1000))
    with pytest.raises(ConfigError, match="more than this machine's memory"):
        train(config)


def test_shards_with_another_end_of_text_token_are_trained_on(make_run: MakeRun, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 4000).astype(np.uint16)
    for split in ("train", "val"):
        write_shard(tmp_path / "foreign" / f"x_{split}.bin", tokens)
    config = make_run(data__path=str(tmp_path / "foreign"), data__documents="pack", data__eot_id=3)
    assert train(config).global_step == config.train.steps
    with pytest.raises(DataError, match="no manifest"):
        train(replace(config, data=replace(config.data, verify=True), output_dir=tmp_path / "verified"))
