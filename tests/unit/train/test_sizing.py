"""The sizes that `whimbrel quickstart` chooses follow the amount of text, the speed and the time."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.models import GPTConfig
from whimbrel.models.families import config_to_hf
from whimbrel.train.run_config import build_run_config
from whimbrel.train.sizing import (
    DEPTHS,
    Measurement,
    Plan,
    best_tokens,
    block_parameters,
    choose_depth,
    choose_plan,
    choose_vocab_size,
    config_text,
    dropout,
    flops_per_token,
    model_of_depth,
    predict_loss,
    tokens_per_step,
)

VOCAB_SIZE = 2048
BILLION = 10**9


class Machine:
    """Runs every model at a fixed number of FLOPs per second, and remembers which depths were measured."""

    def __init__(self, flops: float) -> None:
        self.flops = flops
        self.measured: list[int] = []

    def measure(self, model: GPTConfig, batch: int) -> float:
        assert batch > 0
        self.measured.append(model.num_layers)
        return self.flops / flops_per_token(model)


def choose(flops: float, seconds: float, train_tokens: int = BILLION, guess: float | None = None) -> Plan:
    machine = Machine(flops)
    best, *_ = choose_depth(
        machine.measure, VOCAB_SIZE, train_tokens=train_tokens, seconds=seconds, flops=guess or flops
    )
    return choose_plan(best, VOCAB_SIZE, train_tokens=train_tokens, val_tokens=1000, seconds=seconds)


def test_vocabulary_grows_with_the_text():
    sizes = [choose_vocab_size(10**exponent) for exponent in range(3, 13)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[3], sizes[-1]) == (512, 2048, 32_768)


def test_batch_grows_with_the_run():
    batches = [tokens_per_step(10**exponent) for exponent in range(3, 13)]
    assert batches == sorted(batches)
    assert batches[3] == 2048
    assert all(batch % 1024 == 0 for batch in batches)  # a multiple of every context length


def test_models_are_llamas_of_growing_size():
    models = [model_of_depth(depth, VOCAB_SIZE) for depth in DEPTHS]
    assert {config_to_hf(model)["model_type"] for model in models} == {"llama"}
    sizes = [block_parameters(model) for model in models]
    assert sizes == sorted(sizes)


def test_more_time_means_a_larger_model_or_more_tokens_and_a_lower_loss():
    plans = [choose(1e11, seconds) for seconds in (30, 120, 600, 3600, 36_000)]
    assert [plan.model.num_layers for plan in plans] == sorted(plan.model.num_layers for plan in plans)
    assert plans[-1].model.num_layers > plans[0].model.num_layers
    losses = [plan.loss for plan in plans]
    assert losses == sorted(losses, reverse=True)


def test_faster_machine_means_a_larger_model_and_a_lower_loss():
    plans = [choose(flops, 600) for flops in (1e10, 1e11, 1e12, 1e14)]
    assert [plan.model.num_layers for plan in plans] == sorted(plan.model.num_layers for plan in plans)
    losses = [plan.loss for plan in plans]
    assert losses == sorted(losses, reverse=True)


def test_more_text_means_a_lower_loss():
    plans = [choose(1e12, 600, train_tokens) for train_tokens in (10**4, 10**5, 10**6, 10**7, 10**8)]
    losses = [plan.loss for plan in plans]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("seconds", [60, 600, 7200])
def test_steps_take_the_time_available(seconds: float):
    plan = choose(1e11, seconds)
    assert plan.seconds == pytest.approx(seconds, rel=0.02)
    assert plan.seconds <= seconds
    assert not plan.is_data_limited


def test_run_ends_early_where_more_epochs_would_overfit():
    plan = choose(1e14, 3600, train_tokens=100_000)
    assert plan.is_data_limited
    assert plan.seconds < 3600
    parameters = block_parameters(plan.model)
    assert predict_loss(parameters, 2 * plan.epochs * 100_000, 100_000) > plan.loss


@pytest.mark.parametrize("seconds", [60, 3600, 100_000])
def test_little_text_means_a_small_model(seconds: float):
    """However much time there is: a large model would memorize the text in one epoch."""
    plan = choose(1e11, seconds, train_tokens=4000)
    assert plan.model.num_layers == min(DEPTHS)
    assert plan.is_data_limited


def test_dropout_grows_with_the_number_of_epochs():
    plans = [choose(1e11, 600, train_tokens) for train_tokens in (10**9, 10**6, 10**5)]
    assert [plan.epochs for plan in plans] == sorted(plan.epochs for plan in plans)
    rates = [plan.model.dropout for plan in plans]
    assert rates == sorted(set(rates))
    assert rates[0] == 0
    assert [dropout(epochs) for epochs in (1.0, 3.0, 7.0, 30.0)] == [0, 0.1, 0.2, 0.3]


def test_repeated_tokens_are_worth_less_than_new_ones():
    assert predict_loss(1e6, 1e7, 1e7) < predict_loss(1e6, 1e7, 1e6) < predict_loss(1e6, 1e6, 1e6)


def test_no_more_tokens_than_the_time_allows():
    assert best_tokens(1e6, 5e5, 1e7) == 5e5


@pytest.mark.parametrize("guess", [1e8, 1e11, 1e15])
def test_result_does_not_depend_on_the_guessed_speed(guess: float):
    assert choose(1e11, 600, guess=guess).model == choose(1e11, 600).model


def test_few_depths_are_measured():
    machine = Machine(1e11)
    choose_depth(machine.measure, VOCAB_SIZE, train_tokens=BILLION, seconds=600, flops=3e10)
    assert len(machine.measured) == len(set(machine.measured)) <= 4


def test_larger_depth_is_found_although_small_models_are_slow():
    """On a GPU, small models are limited by kernel launches: all depths up to 8 take the same time per token."""

    def measure(model: GPTConfig, batch: int) -> float:
        assert batch > 0
        return 1e12 / flops_per_token(model_of_depth(max(model.num_layers, 8), VOCAB_SIZE))

    best, *_ = choose_depth(measure, VOCAB_SIZE, train_tokens=BILLION, seconds=600, flops=1e9)
    assert best.depth >= 8


def test_a_small_model_is_not_taken_to_be_slower_than_a_larger_one():
    """Other programs disturbed some of these measurements."""
    measured = {2: 409.0, 3: 455.0, 4: 1531.0, 5: 112.0}

    def choose(speeds: Mapping[int, float]) -> dict[int, float]:
        results = choose_depth(
            lambda model, batch: speeds[model.num_layers],
            VOCAB_SIZE, train_tokens=300_000, seconds=90, flops=1e10, depths=tuple(speeds),
        )  # fmt: skip
        return {result.depth: result.tokens_per_second for result in results}

    speeds = choose(measured)
    assert len(speeds) > 1
    assert [speeds[depth] for depth in sorted(speeds)] == sorted(speeds.values(), reverse=True)
    assert max(speeds.values()) == max(measured[depth] for depth in speeds)


def test_requested_depth_is_the_only_one_measured():
    machine = Machine(1e11)
    [best] = choose_depth(machine.measure, VOCAB_SIZE, train_tokens=10**6, seconds=60, flops=1e11, depths=(7,))
    assert best.depth == 7
    with pytest.raises(ConfigError, match="expected --depth from 1 to"):
        model_of_depth(0, VOCAB_SIZE)


def test_models_that_do_not_fit_in_memory_rule_out_larger_ones():
    machine = Machine(1e15)

    def measure(model: GPTConfig, batch: int) -> float | None:
        return machine.measure(model, batch) if model.num_layers <= 6 else None

    def best_depth(depths: Sequence[int]) -> int:
        best, *_ = choose_depth(measure, VOCAB_SIZE, train_tokens=BILLION, seconds=3600, flops=1e15, depths=depths)
        return best.depth

    assert best_depth(DEPTHS) == max(depth for depth in DEPTHS if depth <= 6)
    with pytest.raises(ConfigError, match="fits in memory, got 8"):
        best_depth((8,))


def test_config_is_that_of_the_plan(tmp_path: Path):
    measured = Measurement(depth=3, tokens_per_step=2048, tokens_per_second=5000.0)
    plan = choose_plan(measured, VOCAB_SIZE, train_tokens=400_000, val_tokens=20_000, seconds=100.0)
    run, data = tmp_path / 'run "1"', tmp_path / "data"
    text = config_text(plan, output_dir=run, data=data, device_settings={"precision": '"bf16"'}, header=["a", "", "b"])
    assert text.startswith("# a\n#\n# b\n")
    config = build_run_config(tomllib.loads(text))
    assert config.model.architecture == plan.model
    assert (config.output_dir, config.data.path) == (run, data)
    assert (config.train.steps, config.tokens_per_step, config.train.precision) == (plan.steps, 2048, "bf16")
    assert plan.steps * 2048 / 5000 < 100
