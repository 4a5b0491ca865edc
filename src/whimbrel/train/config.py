"""The settings of a `Trainer`: everything in the config of a run except its model, data and objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from whimbrel.base.errors import ConfigError
from whimbrel.config import check_unused
from whimbrel.distributed.layout import ParallelConfig
from whimbrel.optim import OptimConfig, ScheduleConfig

__all__ = [
    "CheckpointConfig",
    "DivergenceConfig",
    "EarlyStoppingConfig",
    "EmaConfig",
    "Fp8Recipe",
    "LoaderConfig",
    "LogConfig",
    "QatRecipe",
    "ResumeConfig",
    "SdpaBackend",
    "TrainConfig",
    "TrainerConfig",
    "ValidationConfig",
    "check_interval",
]

SdpaBackend = Literal["math", "flash", "efficient", "cudnn"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
QatRecipe = Literal["int8-dynamic-act-int4-weight", "int4-weight-only"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Run length, batch size, precision and memory."""

    steps: int | None = None
    """Number of optimizer steps. Set exactly one of steps, tokens and epochs."""
    tokens: int | None = None
    """Number of training tokens, a multiple of tokens_per_step. Set exactly one of steps, tokens and epochs."""
    epochs: float | None = None
    """Number of passes over the training data; may be fractional. Set exactly one of steps, tokens and epochs."""
    tokens_per_step: int | None = None
    """Number of tokens per optimizer step, reached by gradient accumulation; default: 524,288, or about 16,384 for
    fine-tuning samples."""
    accumulation: int | None = None
    """Number of micro-batches per optimizer step; an alternative to tokens_per_step that requires micro_batch."""
    micro_batch: int | None = None
    """Number of sequences per forward pass; default: as many as fit in free memory."""
    clip: float | None = None
    """Maximum gradient norm; default: no clipping."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 use autocast for forward and backward; weights and optimizer state stay fp32."""
    fp8_recipe: Fp8Recipe | None = None
    """Run linear layers in fp8, with a scale per tensor or per row; gw_hp keeps weight gradients in high precision.
    `delayed` (experimental): MLPs and head of a GPT-2 on an NVIDIA GPU, with scales from earlier micro-batches."""
    fp8_dim_alignment: int = 16
    """fp8_recipe skips linear layers with a dimension that is not a multiple of this."""
    qat_recipe: QatRecipe | None = None
    """Quantization-aware training: fake-quantize linear layers in the format that they will have after training."""
    weight_dtype: Literal["int8"] | None = None
    """Store the weights of linear layers in int8 during training, updated with stochastic rounding."""
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of fp32 matmuls: high lets a GPU use TF32; default: the torch default, highest."""
    default_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """Dtype in which parameters are created; default: the torch default, float32."""
    compile: bool = False
    """Use torch.compile; compiled code is cached on disk between runs."""
    compile_scope: Literal["block", "model"] = "block"
    """block: compile one block and reuse it for all; model: compile the model as one graph."""
    compile_backend: str = "inductor"
    """torch.compile backend."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile mode."""
    recompile_limit: int | None = None
    """Maximum number of recompilations of one function; default: the torch default."""
    recompute: Literal["none", "full", "selective"] | float = "none"
    """Activation checkpointing: full, selective (keep the outputs of matmuls and attention), or the fraction of
    activations to keep."""
    activation_offloading: bool = False
    """Move activations to host memory between forward and backward."""
    optimizer_in_backward: bool = False
    """Free each gradient during backward: project it (low-rank optimizers) or apply it immediately (no clipping)."""
    projected_linears: bool = False
    """Let linear layers compute the projected weight gradient directly; requires optimizer_in_backward."""
    sdpa_backend: SdpaBackend | tuple[SdpaBackend, ...] | None = None
    """Allowed attention kernels; default: chosen by torch."""
    sdpa_set_priority: bool = False
    """Try the kernels of sdpa_backend in the given order."""
    detect_anomaly: bool = False
    """Report the operation that produces a NaN gradient; slow."""
    deterministic: bool = False
    """Use only deterministic kernels, which a bit-identical resume on a GPU requires; slower."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """After a non-finite loss or gradient norm: stop, skip the step, or roll back to the last checkpoint."""
    device: str | None = None
    """cuda, cuda:N, mps or cpu; default: the best available device."""
    seed: int = 0
    """Seed for weight initialization and all other random numbers, except the order of token shards (see
    data.shuffle_seed)."""

    def __post_init__(self) -> None:
        if (self.steps, self.tokens, self.epochs).count(None) != 2:
            raise ConfigError("expected exactly one of train.steps, train.tokens and train.epochs")
        check_positive(
            "train", self, "steps", "tokens", "epochs", "tokens_per_step", "accumulation", "micro_batch", "clip"
        )
        check_positive("train", self, "recompile_limit", "fp8_dim_alignment")
        recipes = ("fp8_recipe", "qat_recipe", "weight_dtype", "projected_linears")
        enabled = [f"train.{name} = {getattr(self, name)}" for name in recipes if getattr(self, name)]
        combined = self.weight_dtype is not None and self.projected_linears  # these two work together
        if len(enabled) > (2 if combined else 1):
            raise ConfigError(f"{' and '.join(enabled)} are mutually exclusive: set only one")
        if self.fp8_recipe is None:
            check_unused("train", self, ("fp8_dim_alignment",), "train.fp8_recipe")
        if self.accumulation is not None and self.tokens_per_step is not None:
            raise ConfigError("train.accumulation and train.tokens_per_step are mutually exclusive: set only one")
        if isinstance(self.recompute, float) and not 0 <= self.recompute <= 1:
            raise ConfigError(
                f"expected train.recompute = none, full, selective or a fraction from 0 to 1, got {self.recompute}"
            )
        if self.sdpa_set_priority and self.sdpa_backend is None:
            raise ConfigError("train.sdpa_set_priority = True needs train.sdpa_backend: set it")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"expected train.seed from 0 to 2**63 - 1, got {self.seed}")
        if not self.optimizer_in_backward:
            check_unused("train", self, ("projected_linears",), "train.optimizer_in_backward = true")
        if not self.compile:
            names = ("compile_scope", "compile_backend", "compile_mode", "recompile_limit")
            check_unused("train", self, names, "train.compile = true")

    @property
    def linear_recipe(self) -> str | None:
        """The recipe for converting linear layers before training, if any."""
        return self.fp8_recipe or self.qat_recipe or self.weight_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Loss on held-out data."""

    path: Path | None = None
    """Directory of validation shards, or a file of validation samples; default: the val split of data.path, if it has
    one, or the samples held out by data.val."""
    every: int | float | None = None
    """Validate every N steps, or a fraction of the run if below 1; default: only at the end."""
    each_epoch: bool = False
    """Validate after each epoch."""
    delay: float = 0.0
    """Do not validate before this many steps (with each_epoch: epochs) have passed."""
    at_end: bool = True
    """Validate after the last step."""
    tokens: int | None = None
    """Number of validation tokens to use, rounded down to complete sequences; default: all."""
    batches: int | None = None
    """Maximum number of validation batches; default: all."""
    micro_batch: int | None = None
    """Number of sequences per forward pass in validation; default: train.micro_batch."""

    def __post_init__(self) -> None:
        check_interval("validation.every", self.every)
        check_positive("validation", self, "tokens", "batches", "micro_batch")
        if self.delay < 0:
            raise ConfigError(f"expected validation.delay >= 0, got {self.delay}")
        if self.delay and self.every is None and not self.each_epoch:
            raise ConfigError(
                f"validation.delay = {self.delay} needs validation.every or validation.each_epoch: set one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints and which to keep."""

    every: int | float | None = None
    """Save every N steps, or a fraction of the run if below 1; default: only at the end."""
    every_minutes: float | None = 10.0
    """Also save whenever this many minutes have passed since the last save; such a checkpoint is deleted once a newer
    one exists."""
    each_epoch: bool = False
    """Save after each epoch."""
    when_best: bool = False
    """Save after each validation with a new best metric."""
    at_end: bool = True
    """Save after the last step, even if the run stops early; a run stopped by a signal always saves."""
    keep: int | None = None
    """Number of newest checkpoints to keep, in addition to the best; default: all."""
    best: int | None = None
    """Number of best checkpoints to keep; default: none."""
    metric: str = "loss"
    """Validation metric that determines the best checkpoint."""
    greater_is_better: bool | None = None
    """Whether a higher metric is better; default: false if the metric's name contains loss or perplexity, else true."""
    evaluate: bool = False
    """Validate before each save."""
    asynchronous: bool = True
    """Write checkpoints in a background thread; training waits only while its state is copied."""
    mirror: str | None = None
    """URL to copy checkpoints to, such as s3://bucket/prefix; a run without local checkpoints resumes from there.
    Requires the `remote` extra; credentials come from the environment."""

    def __post_init__(self) -> None:
        check_interval("checkpoint.every", self.every)
        if self.mirror is not None and "://" not in self.mirror:
            raise ConfigError(f"expected a URL such as s3://bucket/prefix in checkpoint.mirror, got '{self.mirror}'")
        if not self.metric:
            raise ConfigError("expected the name of a metric for checkpoint.metric, such as loss, got ''")
        check_positive("checkpoint", self, "every_minutes", "keep", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logging. log.jsonl always has the metrics of every step."""

    every: int | float | None = None
    """Log the mean loss (event on_log) every N steps, or a fraction of the run if below 1; default: never."""
    first: bool = False
    """Also log the first step."""
    each_epoch: bool = False
    """Log after each epoch."""
    dir: Path | None = None
    """Directory for TensorBoard events; default: a new directory in OUTPUT_DIR/runs, reused on resume."""
    tensorboard: bool = False
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases; requires the `wandb` extra."""
    trackio: bool = False
    """Log to Trackio; requires the `trackio` extra."""
    run_name: str | None = None
    """Name of the run in Weights & Biases and Trackio; default: the name of the run directory."""
    progress: bool = True
    """Print progress."""
    norms: int | None = None
    """Log the norms of each parameter and its gradient every N steps; default: never."""
    profile: tuple[int, int] | None = None
    """FIRST,END: record a profiler trace of the steps from FIRST to END - 1."""

    def __post_init__(self) -> None:
        check_interval("log.every", self.every)
        check_positive("log", self, "norms")
        if self.profile is not None and not 0 <= self.profile[0] < self.profile[1]:
            raise ConfigError(f"expected log.profile = FIRST,END with 0 <= FIRST < END, got {list(self.profile)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """Which checkpoint to resume from, and what to restore."""

    path: Path | None = None
    """Checkpoint to resume from; default: the newest one (see resume.latest)."""
    latest: bool = True
    """Resume from the newest complete checkpoint in output_dir, if there is one."""
    skip: tuple[str, ...] = ()
    """Components not to restore: optimizer, scheduler, dataset, rng, callbacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Data loading for Python datasets; has no effect on token shards."""

    workers: int = 0
    """Number of worker processes; with 0, the training process loads the data."""
    pin_memory: bool = True
    """Copy batches through pinned memory when training on a GPU."""
    prefetch_factor: int | None = None
    """Number of batches that each worker prefetches; default: 2."""
    drop_last: bool = False
    """Drop the last incomplete batch of an epoch."""
    shuffle: bool = True
    """Reshuffle the training examples every epoch; false: keep the dataset's order."""
    seed: int | None = None
    """Seed for shuffling; default: train.seed."""
    remove_unused_columns: bool = True
    """Drop columns of a `datasets` dataset that the model's forward does not accept."""
    label_names: tuple[str, ...] | None = None
    """Names of the label inputs; default: arguments of the model's forward whose names contain "label"."""

    def __post_init__(self) -> None:
        check_positive("loader", self, "prefetch_factor")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"expected loader.seed from 0 to 2**63 - 1, got {self.seed}")
        if self.workers < 0:
            raise ConfigError(f"expected loader.workers >= 0, got {self.workers}")
        if self.prefetch_factor is not None and not self.workers:
            raise ConfigError(f"loader.prefetch_factor = {self.prefetch_factor} needs loader.workers: set it")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStoppingConfig:
    """Stop when the validation metric stops improving."""

    patience: int | None = None
    """Stop after this many validations without improvement; default: off."""
    threshold: float = 0.0
    """Minimum change that counts as an improvement."""

    def __post_init__(self) -> None:
        check_positive("early_stopping", self, "patience")
        if self.threshold < 0:
            raise ConfigError(f"expected early_stopping.threshold >= 0, got {self.threshold}")
        if self.patience is None:
            check_unused("early_stopping", self, ("threshold",), "early_stopping.patience")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
    """Exponential moving average of the weights, saved next to the model."""

    decay: float | None = None
    """Decay rate of the average per update; default: off."""
    every: int = 1
    """Number of steps between updates."""

    def __post_init__(self) -> None:
        check_positive("ema", self, "every")
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"expected ema.decay between 0 and 1, got {self.decay}")
        if self.decay is None:
            check_unused("ema", self, ("every",), "ema.decay")


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceConfig:
    """Detect a diverging training loss."""

    action: Literal["stop", "abort"] | None = None
    """What to do if the loss diverges: stop (save and end) or abort (end without saving); default: do not check."""
    detector: Literal["ema", "window"] = "ema"
    """How to detect divergence: ema (a fast moving average of the loss is far above a slow one) or window (the last
    window is far above the best one)."""
    threshold: float = 2.0
    """Increase in the loss (as an absolute difference) that counts as divergence."""
    fast: float = 0.1
    """Weight of the latest loss in the fast average."""
    slow: float = 0.01
    """Weight of the latest loss in the slow average."""
    window: int = 10
    """Number of steps per window."""

    def __post_init__(self) -> None:
        check_positive("divergence", self, "threshold", "fast", "slow", "window")
        if not self.slow < self.fast <= 1:
            raise ConfigError(
                f"expected divergence.slow < divergence.fast <= 1, got slow = {self.slow} and fast = {self.fast}"
            )
        if self.action is None:
            names = ("detector", "threshold", "fast", "slow", "window")
            check_unused("divergence", self, names, "divergence.action")
        if self.detector == "ema":
            check_unused("divergence", self, ("window",), "divergence.detector = window")
        else:
            check_unused("divergence", self, ("fast", "slow"), "divergence.detector = ema")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """All settings except the model and data."""

    output_dir: Path
    """Run directory for config.toml, logs and checkpoints; an existing run in it is resumed."""
    overwrite_output_dir: bool = False
    """Delete an existing run in output_dir and start over."""
    train: TrainConfig
    """Run length, batch size, precision and memory."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and its hyperparameters."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate schedule."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Loss on held-out data."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save checkpoints and which to keep."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    """Which checkpoint to resume from, and what to restore."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Data loading for Python datasets; has no effect on token shards."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging; log.jsonl always has the metrics of every step."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """Stop when the validation metric stops improving."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    """Exponential moving average of the weights."""
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    """Detect a diverging training loss."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Distributed training: strategy and device mesh."""


def check_positive(section: str, settings: object, *names: str) -> None:
    """Raise for values that are set and not above zero."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ConfigError(f"expected {section}.{name} > 0, got {value}")


def check_interval(name: str, value: int | float | None) -> None:
    """Raise for a value that is neither a number of steps nor a fraction of the run."""
    if value is not None and (value <= 0 or (isinstance(value, float) and value >= 1)):
        raise ConfigError(f"expected {name} as a number of steps or a fraction of the run below 1, got {value}")
