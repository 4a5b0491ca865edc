"""The run config: checks, presets, recipes, and the batch sizes derived from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from whimbrel.base.errors import ConfigError
from whimbrel.config import list_settings
from whimbrel.models import GPT, GPTConfig, preset
from whimbrel.train import RunConfig, load_run_config
from whimbrel.train.build import accumulation_steps, classified_parameters, default_micro_batch
from whimbrel.train.device import choose_device

MakeRun = Callable[..., RunConfig]


def test_the_baseline_recipe_uses_default_adamw() -> None:
    config = load_run_config("gpt2-baseline-20m")
    assert config.model.architecture == preset("gpt2-baseline")
    assert (config.train.steps, config.tokens_per_step) == (38, 524_288)
    assert (config.optim.lr, config.optim.betas, config.optim.eps) == (3e-4, (0.9, 0.999), 1e-8)
    assert (config.optim.weight_decay, config.optim.decay_params) == (0.01, "all")
    assert (config.train.clip, config.schedule.name, config.schedule.warmup_steps) == (None, "constant", 0)


def test_both_20m_recipes_read_the_same_tokens() -> None:
    baseline, fast = [load_run_config(f"gpt2-{name}-20m") for name in ("baseline", "fast")]
    assert (baseline.train.steps or 0) * baseline.tokens_per_step == fast.train.tokens == 19_922_944


def test_a_preset_is_filled_in_and_can_be_changed() -> None:
    config = load_run_config("gpt2-baseline-20m", ["--model.num_layers=3", "--optim.lr=1e-3"])
    assert (config.model.num_layers, config.model.residual_scale, config.optim.lr) == (3, "attention", 1e-3)
    with pytest.raises(ConfigError, match="gpt2-fast"):
        load_run_config("gpt2-baseline-20m", ["--model.preset=gpt2-fats"])


def test_resume_skip_accepts_a_comma_separated_list() -> None:
    for override, parts in (
        ("optimizer", ("optimizer",)),
        ("optimizer,rng", ("optimizer", "rng")),
        ('["rng"]', ("rng",)),
    ):
        assert load_run_config("shakespeare-cpu", [f"--resume.skip={override}"]).resume.skip == parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__tokens": 512}, "exactly one of train.steps, train.tokens and train.epochs"),
        ({"train__steps": 0}, "expected train.steps > 0, got 0"),
        ({"train__micro_batch": -1}, "train.micro_batch > 0, got -1"),
        ({"data__sequence_length": 64}, "data.sequence_length = 64 exceeds model.context_length = 32"),
        ({"checkpoint__keep": 0}, "checkpoint.keep > 0, got 0"),
        ({"checkpoint__metric": ""}, "checkpoint.metric.* got ''"),
        ({"validation__every": 0}, "validation.every .*steps.* got 0"),
        ({"data__sequence_length": 0}, "data.sequence_length > 0, got 0"),
        ({"validation__tokens": -5}, "validation.tokens > 0, got -5"),
        ({"validation__delay": 5.0, "validation__every": None}, "validation.delay = 5.0 needs validation.every"),
        ({"sample__temperature": -1.0}, "sample.temperature >= 0, got -1.0"),
        ({"sample__max_new_tokens": 0}, "sample.max_new_tokens > 0, got 0"),
        ({"train__seed": 2**64}, "train.seed .* got 18446744073709551616"),
        ({"model__preset": 3}, "model.preset, got 3"),
        ({"train__precision": "fp8"}, "train.precision.*fp32, bf16, fp16"),
        ({"train__accumulation": 2}, "train.accumulation and train.tokens_per_step are mutually exclusive"),
        ({"train__sdpa_set_priority": True}, "train.sdpa_set_priority = True needs train.sdpa_backend"),
        ({"train__recompute": 1.5}, "train.recompute .* got 1.5"),
        ({"train__fp8_recipe": "rowwise", "train__qat_recipe": "int4-weight-only"}, "are mutually exclusive"),
        ({"ema__decay": 1.0}, "ema.decay between 0 and 1, got 1.0"),
        ({"log__profile": [3, 2]}, r"log.profile .* got \[3, 2\]"),
        ({"divergence__slow": 0.5}, "divergence.slow < divergence.fast <= 1, got slow = 0.5"),
        ({"optim__name": "adam"}, "optim.name.*'adamw'"),
    ],
)
def test_invalid_settings_raise_an_error_that_names_them(
    make_run: MakeRun, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__compile_mode": "max-autotune"}, "train.compile_mode = 'max-autotune' needs train.compile = true"),
        ({"train__compile_backend": "eager"}, "train.compile_backend = 'eager' needs train.compile = true"),
        ({"train__compile_scope": "model"}, "train.compile_scope = 'model' needs train.compile = true"),
        ({"train__recompile_limit": 3}, "train.recompile_limit = 3 needs train.compile = true"),
        ({"optim__momentum": 0.5}, "optim.momentum = 0.5 needs optim.name = muon: set that, or remove momentum"),
        ({"schedule__cooldown": 0.5}, "schedule.cooldown = 0.5 needs schedule.name = wsd"),
        (
            {"schedule__name": "constant", "schedule__min_lr_ratio": 0.5},
            "schedule.min_lr_ratio = 0.5 needs schedule.name = linear or",
        ),
        (
            {"schedule__warmup_steps": 0, "schedule__warmup_start": 0.5},
            "warmup_start = 0.5 needs schedule.warmup_steps",
        ),
        ({"ema__every": 5}, "ema.every = 5 needs ema.decay"),
        ({"divergence__threshold": 5.0}, "divergence.threshold = 5.0 needs divergence.action"),
        ({"divergence__action": "stop", "divergence__window": 5}, "window = 5 needs divergence.detector = window"),
        (
            {"divergence__action": "stop", "divergence__detector": "window", "divergence__fast": 0.5},
            "divergence.fast = 0.5 needs divergence.detector = ema",
        ),
        ({"early_stopping__threshold": 5.0}, "early_stopping.threshold = 5.0 needs early_stopping.patience"),
        ({"sample__prompt": "O"}, "sample.prompt = 'O' needs sample.every"),
        ({"log__norms": 2, "train__optimizer_in_backward": True}, "log.norms .* train.optimizer_in_backward"),
    ],
)
def test_settings_without_effect_raise_an_error(make_run: MakeRun, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run(**changes)


def test_train_tokens_must_be_a_multiple_of_tokens_per_step(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="98304 and 114688"):
        load_run_config("gpt2-fast-20m", ["--train.tokens=100000"])


def test_tokens_per_step_must_be_a_multiple_of_the_micro_batch() -> None:
    assert accumulation_steps(524_288, 32, 1024) == 16
    with pytest.raises(ConfigError, match="491520 or 524288"):
        accumulation_steps(500_000, 32, 1024)
    with pytest.raises(ConfigError, match="32768"):
        accumulation_steps(1000, 32, 1024)
    with pytest.raises(ConfigError, match="multiple of the sequence length 256: use 256$"):
        default_micro_batch(GPTConfig(), 100, 256, torch.device("cpu"), itemsize=2, reserve=0)


def test_the_default_micro_batch_divides_the_step_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from whimbrel.train import build

    def chosen(free: int | None, tokens: int = 524_288) -> int:
        monkeypatch.setattr(build, "free_memory", lambda device: free)
        return default_micro_batch(GPTConfig(), tokens, 1024, torch.device("cpu"), itemsize=2, reserve=3 * 2**30)

    assert chosen(None) == 4
    assert chosen(140 * 2**30) == 64
    assert chosen(140 * 2**30, tokens=3 * 1024) == 3
    assert 1 <= chosen(4 * 2**30) < chosen(16 * 2**30) < 64
    assert chosen(1) == 1
    with pytest.raises(ConfigError, match="524288 or 525312"):
        chosen(None, tokens=524_289)


def test_settings_that_describe_their_default_have_none() -> None:
    assert all(s.default is None or "default:" not in s.doc for s in list_settings(RunConfig))


def test_none_turns_off_what_a_preset_sets(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('output_dir = "r"\n[model]\npreset = "llama3.1-8b"\n[data]\npath = "d"\n[train]\nsteps = 1\n')
    assert load_run_config(file).model.rope_scaling is not None
    assert load_run_config(file, ["--model.rope_scaling=none"]).model.rope_scaling is None
    assert load_run_config(file, ["--model.preset=none"]).model.num_layers == GPTConfig().num_layers


def test_unknown_and_unavailable_devices_raise_an_error() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="cuda, cuda:N, mps.* got 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="'cuda' is not available"):
            choose_device("cuda")


def test_every_parameter_is_routed() -> None:
    config = GPTConfig(
        num_layers=1, embd_size=32, num_heads=4, num_kv_heads=2, vocab_size=100, context_length=8, tied_head=False,
        gated_mlp=True, mlp_size=48,
    )  # fmt: skip
    classified = {item.name: item for item in classified_parameters(GPT(config))}
    assert classified["transformer.wte.weight"].role == classified["transformer.wpe.weight"].role == "embedding"
    assert classified["lm_head.weight"].role == "head"
    assert classified["transformer.h.0.ln_1.weight"].role == "scalar"
    attention, mlp = classified["transformer.h.0.attn.c_attn.weight"], classified["transformer.h.0.mlp.c_fc.weight"]
    assert (attention.role, attention.splits) == ("hidden", (32, 16, 16))
    assert (mlp.role, mlp.splits) == ("hidden", (48, 48))
    assert all(sum(item.splits) in (0, item.parameter.shape[0]) for item in classified.values())
