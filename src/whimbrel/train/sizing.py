"""Choose vocabulary, model size, batch size and steps from the amount of text, the speed and the time available.

Used by `whimbrel quickstart`. The depth of the model is the one dial: it sets width, heads and context length. Speeds
are measured by the caller; everything here is arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from whimbrel.base.errors import ConfigError
from whimbrel.models import GPTConfig

__all__ = [
    "DEPTHS",
    "Measurement",
    "Plan",
    "choose_depth",
    "choose_plan",
    "choose_vocab_size",
    "config_text",
    "dropout",
    "model_of_depth",
    "predict_loss",
    "tokens_per_step",
]

DEPTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Depths to choose from; each has 1.6 to 3.4 times the parameters of the one before."""
MAX_DEPTH = 64
HEAD_SIZE = 64
"""Width of a head, and of the model per layer."""
MIN_STEPS = 20
MIN_TOKENS_PER_STEP, MAX_TOKENS_PER_STEP = 1024, 524_288
MAX_VALIDATIONS, VALIDATION_SHARE = 5, 0.05
"""Validations of a run: at most this many, and in this share of the time."""
FORWARD_SHARE = 1 / 3
"""Cost of a validation token relative to a training token: a forward pass without its backward pass."""

LEARNING_RATE, EMBEDDING_LR, HEAD_LR = 0.04, 0.3, 0.01

# The scaling law, in nats per token: E + A / N^0.34 + B / D^0.34 + overfitting, where N is the number of parameters in
# the blocks and D the number of training tokens; E depends on the text and is omitted, as only differences matter.
# Equal exponents near those of Hoffmann et al. (2022) make a fixed number of tokens per parameter optimal; A / B sets
# it to their 20. B is fitted to runs on tinyshakespeare: 3 times as many tokens lower the loss of depth 2 by 0.39.
EXPONENT = 0.34
SCALE_B = 87.0
SCALE_A = SCALE_B * 20**-EXPONENT
REPEATED_EPOCHS = 6.0
"""Repeated tokens are worth less than new ones: U tokens seen for 1 + r epochs count as U (1 + R (1 - exp(-r / R)))
tokens. Muennighoff et al. (2023) found R = 15 for web text; with 300 kB of plays (4 parameters per token), the loss is
0.03 higher after 20 epochs than after 10."""
OVERFITTING = 0.002
"""Loss increase per epoch, times the number of parameters per unique token: a model with many more parameters than
tokens memorizes the text, and its held-out loss increases again. Measured with depth 2 on 50 kB of text (17 parameters
per token, dropout 0.3): the loss is constant from epoch 5 to 10, and 0.2 higher after 20."""
DROPOUT = ((1.5, 0.0), (5.0, 0.1), (10.0, 0.2))
"""Dropout probability for runs of at most this many epochs."""
MAX_DROPOUT = 0.3
"""Dropout probability for longer runs."""
BATCH_EPOCHS = 3
"""Epochs beyond this number do not increase the batch size: with 300 kB of plays, 10 epochs in steps of 1024 tokens
have a lower loss than in steps of 2048, by 0.04."""


def choose_vocab_size(text_bytes: int) -> int:
    """Vocabulary of a tokenizer for this much text: 2048 for 1 MB, doubling with every fivefold increase.

    A larger vocabulary means fewer tokens per text, but each of its tokens occurs less often, and a model memorizes
    where the rare ones occur in a small text. In small models, the output layer also takes most of the time.
    """
    return int(2 ** min(max(round(11 + math.log(max(text_bytes, 1) / 1e6, 5)), 9), 15))


def dropout(epochs: float) -> float:
    """Dropout probability for a run of this many epochs: the more often text is repeated, the higher."""
    return next((probability for limit, probability in DROPOUT if epochs <= limit), MAX_DROPOUT)


def model_of_depth(depth: int, vocab_size: int) -> GPTConfig:
    """The Llama-shaped model for a depth, with 64 units of width and one head per layer."""
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"expected --depth from 1 to {MAX_DEPTH}, got {depth}")
    width = HEAD_SIZE * depth
    return GPTConfig(
        context_length=256 if depth < 6 else 512 if depth < 10 else 1024,
        vocab_size=vocab_size,
        num_layers=depth,
        embd_size=width,
        num_heads=depth,
        mlp_size=-(-8 * width // (3 * HEAD_SIZE)) * HEAD_SIZE,
        norm="rms",
        position="rope",
        activation="silu",
        gated_mlp=True,
        bias="none",
        tied_head=False,
        zero_init_projections=True,
        zero_init_head=True,
    )


def block_parameters(model: GPTConfig) -> int:
    """Number of parameters in the blocks, excluding embedding and head."""
    return model.matrix_parameters - 2 * model.vocab_size * model.embd_size


def flops_per_token(model: GPTConfig) -> float:
    """FLOPs of a training step per token, for extrapolating speed from one depth to another."""
    attention = 6 * model.num_layers * model.embd_size * model.context_length
    return 6 * (block_parameters(model) + model.vocab_size * model.embd_size) + attention


def tokens_per_step(tokens: float) -> int:
    """Batch size, a power of two, for a run of `tokens`: 2048 for a million, four times as much for each tenfold run.

    Larger batches train faster on a GPU, smaller ones learn more from each token.
    """
    exponent = round(math.log2(2048) + 0.6 * math.log2(max(tokens, 1.0) / 1e6))
    return int(min(max(2**exponent, MIN_TOKENS_PER_STEP), MAX_TOKENS_PER_STEP))


def predict_loss(parameters: float, tokens: float, unique_tokens: float) -> float:
    """Held-out loss by the scaling law, up to a constant that depends on the text."""
    repeats = max(tokens / unique_tokens - 1, 0.0)
    worth = min(tokens, unique_tokens) + unique_tokens * REPEATED_EPOCHS * (1 - math.exp(-repeats / REPEATED_EPOCHS))
    overfitting = OVERFITTING * tokens / unique_tokens * parameters / unique_tokens
    return SCALE_A / math.pow(parameters, EXPONENT) + SCALE_B / math.pow(worth, EXPONENT) + overfitting


def best_tokens(parameters: float, max_tokens: float, unique_tokens: float) -> float:
    """Number of training tokens, at most `max_tokens`, with the lowest predicted loss; fewer if it would overfit."""
    low, high = min(unique_tokens, max_tokens), max_tokens
    for _ in range(60):  # the predicted loss has one minimum: ternary search
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if predict_loss(parameters, first, unique_tokens) <= predict_loss(parameters, second, unique_tokens):
            high = second
        else:
            low = first
    return max_tokens if max_tokens - high < 0.01 * max_tokens else high


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The speed of training steps of one depth."""

    depth: int
    tokens_per_step: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size and length of a run."""

    model: GPTConfig
    tokens_per_step: int
    steps: int
    validations: int
    seconds: float
    """Predicted time of all steps and validations."""
    epochs: float
    loss: float
    """Predicted loss, to compare plans."""
    is_data_limited: bool
    """Whether the run ends before the time is up, because more epochs would overfit."""


def choose_plan(measured: Measurement, vocab_size: int, *, train_tokens: int, val_tokens: int, seconds: float) -> Plan:
    """A run at the measured depth that takes `seconds`, or less if there is too little text to train longer."""
    model, batch, speed = (
        model_of_depth(measured.depth, vocab_size),
        measured.tokens_per_step,
        measured.tokens_per_second,
    )
    parameters = block_parameters(model)
    validation = val_tokens * FORWARD_SHARE / speed
    validations = min(max(int(VALIDATION_SHARE * seconds / max(validation, 1e-9)), 1), MAX_VALIDATIONS)
    available = max((seconds - validations * validation) * speed, MIN_STEPS * batch)
    tokens = best_tokens(parameters, available, train_tokens)
    steps = max(int(tokens / batch), MIN_STEPS)
    return Plan(
        model=replace(model, dropout=dropout(steps * batch / train_tokens)),
        tokens_per_step=batch,
        steps=steps,
        validations=validations,
        seconds=steps * batch / speed + validations * validation,
        epochs=steps * batch / train_tokens,
        loss=predict_loss(parameters, steps * batch, train_tokens),
        is_data_limited=tokens < available,
    )


def choose_depth(
    measure: Callable[[GPTConfig, int], float | None],
    vocab_size: int,
    *,
    train_tokens: int,
    seconds: float,
    flops: float,
    depths: Sequence[int] = DEPTHS,
) -> list[Measurement]:
    """All measurements, starting with the depth that has the lowest predicted loss after `seconds`.

    `measure(model, tokens_per_step)` returns tokens per second, or None if the model does not fit in memory, which also
    rules out larger depths. `flops`, a guess of the device's speed, only decides which depth is measured first. The
    speed of other depths is extrapolated from the nearest measured one. Small models use a device less efficiently than
    large ones, so this underestimates larger ones: the search ends once the next larger depth is measured too.
    """
    measured: dict[int, Measurement] = {}

    def run_tokens(depth: int) -> float:
        """Tokens of the best run of a depth, at the estimated speed."""
        model, rate = model_of_depth(depth, vocab_size), flops
        if measured:
            nearest = measured[min(measured, key=lambda other: abs(math.log(other / depth)))]
            rate = nearest.tokens_per_second * flops_per_token(model_of_depth(nearest.depth, vocab_size))
        return best_tokens(block_parameters(model), seconds * rate / flops_per_token(model), train_tokens)

    def loss(depth: int) -> float:
        return predict_loss(block_parameters(model_of_depth(depth, vocab_size)), run_tokens(depth), train_tokens)

    candidate: int | None = min(depths, key=loss)
    while candidate is not None:
        tokens = run_tokens(candidate)
        batch = tokens_per_step(min(tokens, BATCH_EPOCHS * train_tokens))
        model = model_of_depth(candidate, vocab_size)
        speed = measure(replace(model, dropout=dropout(tokens / train_tokens)), batch)
        if speed is None:
            depths = [depth for depth in depths if depth < candidate]
            if not depths:
                raise ConfigError(f"expected a --depth that fits in memory, got {candidate}: choose a smaller one")
        else:
            measured[candidate] = Measurement(depth=candidate, tokens_per_step=batch, tokens_per_second=speed)
            _correct_speeds(measured)
        best = min(depths, key=loss)
        larger = depths[min(depths.index(best) + 1, len(depths) - 1)]
        candidate = next((depth for depth in (best, larger) if depth not in measured), None)
    return sorted(measured.values(), key=lambda measurement: loss(measurement.depth))


def _correct_speeds(measured: dict[int, Measurement]) -> None:
    """A model is at least as fast as deeper ones: other programs slowed it down if it was measured to be slower."""
    fastest = 0.0
    for depth in sorted(measured, reverse=True):
        fastest = max(fastest, measured[depth].tokens_per_second)
        measured[depth] = replace(measured[depth], tokens_per_second=fastest)


def config_text(
    plan: Plan, *, output_dir: Path, data: Path, device_settings: Mapping[str, str], header: Sequence[str]
) -> str:
    """The run as a commented TOML file for `whimbrel train`.

    `device_settings` are further lines of [train], as TOML values; `header` are lines of a comment above everything.
    """
    model, warmup = plan.model, max(MIN_STEPS // 2, round(0.02 * plan.steps))
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header)
    checkpoint_minutes = round(min(max(plan.seconds / 600, 0.5), 10.0), 1)
    settings = "".join(f"{name} = {value}\n" for name, value in device_settings.items())
    return f"""{comment}
output_dir = {json.dumps(str(output_dir), ensure_ascii=False)}  # an existing run there is resumed

[model]  # Llama: exports to GGUF, loads in transformers, vLLM and llama.cpp
num_layers = {model.num_layers}  # the depth; width and heads follow from it
embd_size = {model.embd_size}
num_heads = {model.num_heads}
mlp_size = {model.mlp_size}
context_length = {model.context_length}
vocab_size = {model.vocab_size}  # same as the tokenizer's
norm = "rms"
position = "rope"
activation = "silu"
gated_mlp = true
bias = "none"
tied_head = false
zero_init_projections = true  # each block starts as the identity
zero_init_head = true         # the first prediction is uniform
dropout = {model.dropout}  # higher if the text is repeated more often

[data]
path = {json.dumps(str(data), ensure_ascii=False)}
shuffle_seed = 0

[train]
steps = {plan.steps}  # {plan.epochs:.2g} epochs
tokens_per_step = {plan.tokens_per_step}
{settings}
[optim]
name = "muon"  # for the matrices of the blocks; Adam with the learning rates below for the rest
lr = {LEARNING_RATE}
weight_decay = 0.05
betas = [0.8, 0.95]
eps = 1e-10
embedding_lr = {EMBEDDING_LR}
head_lr = {HEAD_LR}
scalar_lr = 0.01

[schedule]
name = "wsd"  # warm up, stay constant, decay
warmup_steps = {min(warmup, plan.steps // 2)}
cooldown = 0.6  # decay during the last 60% of the steps

[checkpoint]
every_minutes = {checkpoint_minutes:g}  # the most training time that a crash can lose

[validation]
every = {-(-plan.steps // plan.validations)}

[sample]  # generate text during training
every = {-(-plan.steps // 3)}
max_new_tokens = 64
"""
