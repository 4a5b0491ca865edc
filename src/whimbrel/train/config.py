"""The settings of a run: what a TOML file describes, and what the training arguments are translated to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whimbrel.base.errors import ConfigError
from whimbrel.config import apply_overrides, build, check_unused, load_toml, to_table
from whimbrel.models import GPTConfig, preset
from whimbrel.optim import OptimConfig, ScheduleConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DivergenceConfig",
    "EarlyStoppingConfig",
    "EmaConfig",
    "Fp8Recipe",
    "LoaderConfig",
    "LogConfig",
    "QatRecipe",
    "ResumeConfig",
    "RunConfig",
    "SampleConfig",
    "SdpaBackend",
    "TrainConfig",
    "TrainerConfig",
    "ValidationConfig",
    "load_run_config",
    "run_config",
]

SdpaBackend = Literal["math", "flash", "efficient", "cudnn"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
QatRecipe = Literal["int8-dynamic-act-int4-weight", "int4-weight-only"]
DEFAULT_TOKENS_PER_STEP = 524_288


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, how large, how precise."""

    steps: int | None = None
    """Optimizer steps of the whole run; give this, tokens or epochs."""
    tokens: int | None = None
    """Training tokens of the whole run, a multiple of tokens_per_step; give this, steps or epochs."""
    epochs: float | None = None
    """Passes over the training data, also a part of one; give this, steps or tokens."""
    tokens_per_step: int | None = None
    """Tokens of one optimizer step, reached by accumulating micro-batches; not given: 524,288, or by accumulation."""
    accumulation: int | None = None
    """Micro-batches of one optimizer step; give this with micro_batch, or tokens_per_step."""
    micro_batch: int | None = None
    """Sequences in one forward pass; not given: as many as fit in free memory."""
    clip: float | None = None
    """Largest norm of all gradients together; not given: no clipping."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 run the products of forward and backward in 16 bits (autocast); weights and optimizer stay fp32."""
    fp8_recipe: Fp8Recipe | None = None
    """Run the products of linear layers in fp8, scaled by tensor or by row; gw_hp: weight gradients are not."""
    fp8_dim_alignment: int = 16
    """Linear layers with a dimension that is no multiple of this are left out by fp8_recipe."""
    qat_recipe: QatRecipe | None = None
    """Train with linear layers rounded as they will be when the model is quantised."""
    weights: Literal["int8"] | None = None
    """Store the weights of linear layers in 8 bits while they are trained, each step rounded by chance."""
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of fp32 products: high lets a GPU use TF32; not given: torch's own, highest."""
    default_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """The dtype that a model is built in; not given: torch's own, float32."""
    compile: bool = False
    """Compile with torch.compile, cached on disk between runs."""
    compile_scope: Literal["block", "model"] = "block"
    """block: one block once, the rest reuse it; model: the whole model in one graph."""
    compile_backend: str = "inductor"
    """The backend of torch.compile."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """The mode of torch.compile."""
    recompile_limit: int | None = None
    """How often torch.compile may compile one function anew; not given: torch's own."""
    recompute: Literal["none", "full", "selective"] | float = "none"
    """Activations computed again in backward: full; selective (all but products); or the share of memory to keep."""
    activation_offloading: bool = False
    """Keep activations in host memory between forward and backward."""
    optimizer_in_backward: bool = False
    """Free each gradient in backward: projected, by an optimizer in a subspace; else used, which bars clip and more."""
    projected_linears: bool = False
    """Linear layers make the projection of their weight gradient and never itself; needs optimizer_in_backward."""
    sdpa_backend: SdpaBackend | tuple[SdpaBackend, ...] | None = None
    """Which attention kernels may be used; not given: torch chooses."""
    sdpa_set_priority: bool = False
    """Try the kernels of sdpa_backend in the order given."""
    detect_anomaly: bool = False
    """Name the operation whose gradient is NaN; slow."""
    deterministic: bool = False
    """Only kernels that give the same bits every time, which a bit-exact resume on a GPU needs."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """After a loss or gradient norm that is not finite: stop, skip the step, or go back to the last checkpoint."""
    device: str | None = None
    """cuda, mps or cpu; not given: the best this machine has."""
    seed: int = 0
    """Seed of the initial weights, of the order of a dataset, and of whatever else is drawn."""

    def __post_init__(self) -> None:
        if (self.steps, self.tokens, self.epochs).count(None) != 2:
            raise ConfigError(
                "the length of the run is given by exactly one of train.steps, train.tokens and train.epochs"
            )
        check_positive(
            "train", self, "steps", "tokens", "epochs", "tokens_per_step", "accumulation", "micro_batch", "clip"
        )
        check_positive("train", self, "recompile_limit", "fp8_dim_alignment")
        self._check_linears()
        if self.accumulation is not None and self.tokens_per_step is not None:
            raise ConfigError("train.accumulation and train.tokens_per_step both say how large a step is: give one")
        if isinstance(self.recompute, float) and not 0 <= self.recompute <= 1:
            raise ConfigError(f"train.recompute = {self.recompute} must be none, full, selective or between 0 and 1")
        if self.sdpa_set_priority and self.sdpa_backend is None:
            raise ConfigError("train.sdpa_set_priority = true needs train.sdpa_backend, the order to try: give it")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"train.seed = {self.seed} must be at least 0 and below 2**63")
        if not self.optimizer_in_backward:
            check_unused("train", self, ("projected_linears",), "train.optimizer_in_backward = true")
        if not self.compile:
            names = ("compile_scope", "compile_backend", "compile_mode", "recompile_limit")
            check_unused("train", self, names, "train.compile = true")

    @property
    def linears(self) -> str | None:
        """The recipe that linear layers are prepared by."""
        return self.fp8_recipe or self.qat_recipe or self.weights

    def _check_linears(self) -> None:
        """A linear layer can be but one thing besides a plain one."""
        names = ("fp8_recipe", "qat_recipe", "weights", "projected_linears")
        given = [f"train.{name} = {getattr(self, name)}" for name in names if getattr(self, name)]
        alike = self.weights is not None and self.projected_linears  # a linear that projects may have such a weight
        if len(given) > (2 if alike else 1):
            raise ConfigError(f"{' and '.join(given)} each make linear layers something else: give one")
        if self.fp8_recipe is None:
            check_unused("train", self, ("fp8_dim_alignment",), "train.fp8_recipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Loss on held-out data, always the same."""

    path: Path | None = None
    """Directory of the held-out shards; not given: those of split val in data.path, if there are any."""
    every: int | float | None = None
    """Validate after this many steps, or below 1 this share of the run; not given: at the end only."""
    each_epoch: bool = False
    """Validate after each pass over the training data."""
    delay: float = 0.0
    """No validation before this many steps; with each_epoch, epochs."""
    at_end: bool = True
    """Validate after the last step."""
    tokens: int | None = None
    """How many held-out tokens, rounded down to whole sequences; not given: all of them."""
    batches: int | None = None
    """How many held-out batches at most; not given: all of them."""
    micro_batch: int | None = None
    """Sequences in one validation pass; not given: as in training."""

    def __post_init__(self) -> None:
        check_interval("validation.every", self.every)
        check_positive("validation", self, "tokens", "batches", "micro_batch")
        if self.delay < 0:
            raise ConfigError(f"validation.delay = {self.delay} must not be negative")
        if self.delay and self.every is None and not self.each_epoch:
            raise ConfigError(f"validation.delay = {self.delay} puts off validation.every or each_epoch: set one")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the whole state is saved, and what stays of it."""

    every: int | float | None = None
    """Save after this many steps, or below 1 this share of the run; not given: at the end only."""
    every_minutes: float | None = 10.0
    """Also save when this many minutes have passed since the last save; removed once a newer checkpoint exists."""
    each_epoch: bool = False
    """Save after each pass over the training data."""
    when_best: bool = False
    """Save after each validation that is better than all before."""
    at_end: bool = True
    """Save after the last step, and when a signal stops the run."""
    keep: int | None = None
    """How many of the newest checkpoints stay, besides the best; not given: all."""
    best: int | None = None
    """How many of the best checkpoints stay whatever their age; not given: none is kept for being good."""
    metric: str = "loss"
    """What best is measured by, a metric of validation."""
    greater_is_better: bool | None = None
    """Whether a greater metric is better; not given: not for names with loss or perplexity in them, else yes."""
    evaluate: bool = False
    """Validate before each save."""
    asynchronous: bool = True
    """Write on a thread of its own: training waits only for the copy of its state."""

    def __post_init__(self) -> None:
        check_interval("checkpoint.every", self.every)
        check_positive("checkpoint", self, "every_minutes", "keep", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged, and where. Every step's numbers are in log.jsonl whatever is set here."""

    every: int | float | None = None
    """Log the mean loss after this many steps, or below 1 this share of the run, for on_log; not given: never."""
    first: bool = False
    """Log the first step too."""
    each_epoch: bool = False
    """Log after each pass over the training data."""
    dir: Path | None = None
    """Where TensorBoard's events go; not given: runs/ and a name of their own in output_dir, reused on resume."""
    tensorboard: bool = False
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases, if it is installed."""
    trackio: bool = False
    """Log to trackio, if it is installed."""
    run_name: str | None = None
    """Run name in Weights & Biases and trackio; default: the name of the run directory."""
    progress: bool = True
    """Show the progress of the run."""
    norms: int | None = None
    """Log the norm of each parameter and its gradient every so many steps; not given: never."""
    profile: tuple[int, int] | None = None
    """Record a trace of the steps from the first to before the second, for a browser's trace viewer."""

    def __post_init__(self) -> None:
        check_interval("log.every", self.every)
        check_positive("log", self, "norms")
        if self.profile is not None and not 0 <= self.profile[0] < self.profile[1]:
            raise ConfigError(f"log.profile = {list(self.profile)} must be a step and a later one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """What of a checkpoint is taken up."""

    path: Path | None = None
    """The checkpoint to go on from; not given: as latest says."""
    latest: bool = True
    """Go on from the newest whole checkpoint in output_dir, if there is one."""
    skip: tuple[str, ...] = ()
    """Components to leave as they are: optimizer, scheduler, dataset, rng, callbacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """How batches of a dataset (not of token shards, which need no workers) are fetched."""

    workers: int = 0
    """Processes that fetch batches; 0: the training process itself."""
    pin_memory: bool = True
    """Copy batches into pinned memory on the way to a GPU."""
    prefetch_factor: int | None = None
    """Batches that each worker fetches ahead; not given: 2."""
    drop_last: bool = False
    """Leave out a last batch that is not full."""
    shuffle: bool = True
    """Reshuffle the training examples every epoch; false: keep the dataset's order."""
    seed: int | None = None
    """Seed for shuffling; default: train.seed."""
    remove_unused_columns: bool = True
    """Drop columns of a `datasets` dataset that the model's forward does not accept."""
    label_names: tuple[str, ...] | None = None
    """Names of the inputs that are labels; default: arguments of the model's forward whose names contain "label"."""

    def __post_init__(self) -> None:
        check_positive("loader", self, "prefetch_factor")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"loader.seed = {self.seed} must be at least 0 and below 2**63")
        if self.workers < 0:
            raise ConfigError(f"loader.workers = {self.workers} must not be negative")
        if self.prefetch_factor is not None and not self.workers:
            raise ConfigError(f"loader.prefetch_factor = {self.prefetch_factor} is for workers: set loader.workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStoppingConfig:
    """Ends a run whose validation no longer gets better."""

    patience: int | None = None
    """Validations without improvement before the run ends; not given: off."""
    threshold: float = 0.0
    """How much better counts as better."""

    def __post_init__(self) -> None:
        check_positive("early_stopping", self, "patience")
        if self.threshold < 0:
            raise ConfigError(f"early_stopping.threshold = {self.threshold} must not be negative")
        if self.patience is None:
            check_unused("early_stopping", self, ("threshold",), "early_stopping.patience")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
    """A running mean of the weights, saved beside them."""

    decay: float | None = None
    """Share of the mean that stays at each update; not given: off."""
    every: int = 1
    """Steps between updates."""

    def __post_init__(self) -> None:
        check_positive("ema", self, "every")
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"ema.decay = {self.decay} must be between 0 and 1")
        if self.decay is None:
            check_unused("ema", self, ("every",), "ema.decay")


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceConfig:
    """Notices a loss that runs away."""

    action: Literal["stop", "abort"] | None = None
    """What to do about it: stop (with a save) or abort (without); not given: do not look."""
    detector: Literal["ema", "window"] = "ema"
    """ema: a fast mean far above a slow one; window: the mean of the last steps far above the best so far."""
    threshold: float = 2.0
    """How far above counts as running away, in units of the loss."""
    fast: float = 0.1
    """Weight of the newest loss in the fast mean."""
    slow: float = 0.01
    """Weight of the newest loss in the slow mean."""
    window: int = 10
    """Steps of a window."""

    def __post_init__(self) -> None:
        check_positive("divergence", self, "threshold", "fast", "slow", "window")
        if not self.slow < self.fast <= 1:
            raise ConfigError(f"divergence.fast = {self.fast} must be above divergence.slow = {self.slow}, at most 1")
        if self.action is None:
            names = ("detector", "threshold", "fast", "slow", "window")
            check_unused("divergence", self, names, "divergence.action")
        if self.detector == "ema":
            check_unused("divergence", self, ("window",), "divergence.detector = window")
        else:
            check_unused("divergence", self, ("fast", "slow"), "divergence.detector = ema")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Everything about a run but its model and data."""

    output_dir: Path
    """The run directory: resolved configuration, log and checkpoints; a run found there is resumed."""
    overwrite_output_dir: bool = False
    """Begin anew: remove the run that is in output_dir."""
    train: TrainConfig
    """How long, how large, how precise."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the run."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Loss on held-out data."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    """What of a checkpoint is taken up."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How batches of a dataset are fetched."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is logged, and where."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """Ends a run that no longer gets better."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    """A running mean of the weights."""
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    """Notices a loss that runs away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    path: Path
    """Directory of token shards, as `whimbrel prepare` writes it."""
    sequence_length: int | None = None
    """Tokens of a training sequence; not given: the model's context length."""
    shuffle_seed: int | None = None
    """Shuffle the order of blocks in each epoch from this seed; not given: the order on disk."""
    documents: Literal["join", "mask", "pack"] = "join"
    """join: attention crosses documents; mask: it does not; pack: as mask, and each sequence opens with a document."""
    eot_id: int | None = None
    """Id of the token that starts a document; default: from the manifest, or GPT-2's or Llama 3's without one."""
    verify: bool = False
    """Check the SHA-256 of each shard against the manifest when it is first read."""

    def __post_init__(self) -> None:
        check_positive("data", self, "sequence_length")
        if self.eot_id is not None and self.eot_id < 0:
            raise ConfigError(f"expected data.eot_id of at least 0, got {self.eot_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Text written by the model during training, for people to read."""

    every: int | None = None
    """Write a sample after this many steps; not given: none."""
    prompt: str = ""
    """What the sample continues; empty: the start of a document."""
    max_new_tokens: int = 64
    """Length of the sample in tokens."""
    temperature: float = 0.8
    """Randomness of the sample."""
    top_k: int | None = None
    """Draw among this many most likely tokens; not given: among all."""

    def __post_init__(self) -> None:
        check_positive("sample", self, "every", "max_new_tokens", "top_k")
        if self.temperature < 0:
            raise ConfigError(f"sample.temperature = {self.temperature} must not be negative")
        if self.every is None:
            check_unused("sample", self, ("prompt", "max_new_tokens", "temperature", "top_k"), "sample.every")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(TrainerConfig):
    """A whole training run: the settings of the trainer, and the model and data it is given."""

    model: GPTConfig
    """The model: `preset = NAME` and any field of GPTConfig."""
    data: DataConfig
    """Where the tokens come from."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Text written during training."""

    def __post_init__(self) -> None:
        train = self.train
        if self.sequence_length > self.model.context_length:
            raise ConfigError(
                f"data.sequence_length = {self.sequence_length} is longer than model.context_length = "
                f"{self.model.context_length}: lower one or raise the other"
            )
        if self.loader != LoaderConfig():
            raise ConfigError("[loader] is for datasets in Python: token shards are read without workers; leave it out")
        if train.accumulation is not None and train.micro_batch is None:
            raise ConfigError("train.accumulation counts micro-batches: give train.micro_batch with it")
        if train.tokens is not None and train.tokens % self.tokens_per_step:
            below = train.tokens // self.tokens_per_step * self.tokens_per_step
            raise ConfigError(
                f"train.tokens = {train.tokens} is not a multiple of train.tokens_per_step = {self.tokens_per_step}: "
                f"the nearest are {below} and {below + self.tokens_per_step}"
            )

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence."""
        return self.model.context_length if self.data.sequence_length is None else self.data.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        train = self.train
        if train.accumulation is not None and train.micro_batch is not None:
            return train.accumulation * train.micro_batch * self.sequence_length
        return DEFAULT_TOKENS_PER_STEP if train.tokens_per_step is None else train.tokens_per_step


def load_run_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The run that a TOML file and `--a.b=c` overrides describe, its model preset filled in."""
    return run_config(apply_overrides(load_toml(path), overrides))


def run_config(table: dict[str, Any]) -> RunConfig:
    """The run that a table describes."""
    model = table.get("model", {})
    if isinstance(model, dict) and "preset" in model:
        if not isinstance(model["preset"], str):
            raise ConfigError(f"model.preset = {model['preset']!r} must be a string")
        own = {key: value for key, value in model.items() if key != "preset"}
        table = table | {"model": to_table(preset(model["preset"])) | own}
    return build(RunConfig, table)


def check_positive(section: str, settings: object, *names: str) -> None:
    """Refuse values that are there but not above zero."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{section}.{name} = {value} must be greater than 0")


def check_interval(name: str, value: int | float | None) -> None:
    """Refuse what is neither a number of steps nor a share of the run."""
    if value is not None and (value <= 0 or (isinstance(value, float) and value >= 1)):
        raise ConfigError(f"{name} = {value} must be a whole number of steps above 0, or a share of the run below 1")
