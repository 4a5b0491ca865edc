"""`whimbrel quickstart SOURCE`: from text to a trained model, with sizes to suit text, machine and time budget.

Everything it does is a command of its own (`tokenizer train`, `prepare`, `train`, `eval`, `generate`); the config it
writes lists them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shlex
import shutil
import statistics
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whimbrel.cli.data import Encoding, Separator, SkipBad, TextKey, load_named_tokenizer
from whimbrel.cli.terminal import ProgressBar, configure_logging, escape_controls, format_escapes, print_text, warn_once
from whimbrel.cli.train import Plain, Watch, is_finished, run_training
from whimbrel.train.callback import TrainerCallback

if TYPE_CHECKING:
    from whimbrel.data.manifest import Manifest
    from whimbrel.models import GPTConfig
    from whimbrel.tokenization import Tokenizer
    from whimbrel.train.sizing import Measurement, Plan

__all__ = ["quickstart"]

PREPARE_SHARE = 0.1
"""Maximum share of the time for tokenizing."""
ENCODED_BYTES_PER_SECOND = 1_000_000
"""Low estimate of how much text one core tokenizes per second."""
BYTES_PER_TOKEN = 3
"""Low estimate for the vocabulary sizes chosen here."""
TOKENIZER_BYTES = 32_000_000
"""Text to train a tokenizer on; more hardly changes the vocabulary."""
VAL_SHARE, MIN_VAL_TOKENS, MAX_VAL_TOKENS = 0.05, 1100, 20_000
MIN_TEXT_BYTES, MIN_TRAIN_TOKENS = 10_000, 2048
MEASURE_SHARE, MIN_MEASURE_SECONDS, MAX_MEASURE_SECONDS = 0.02, 0.2, 10.0
"""Time for measuring the speed of one depth."""
WARMUP_STEPS = 3
"""Steps before a measurement: the first ones allocate memory and start threads."""
CLOSING_SECONDS = 5.0
"""Reserved for starting training, the last checkpoint, and the final evaluation and sample."""
SPEED_MARGIN = 0.93
"""Expected speed of the run relative to the measurement: over minutes, other programs and heat slow a machine down."""
MAX_MINUTES = 1_000_000
COMPILE_MINUTES = 30.0
"""Compiling takes up to a minute for each depth that is measured, which pays off in runs of this length."""
BYTES_PER_PARAMETER = 16
"""At most: weight, gradient and two moments in fp32."""
SAMPLE_TOKENS = 150
FLOPS = {"cpu": 3e10, "mps": 1e12, "cuda": 5e13}
"""Guesses that decide which depth is measured first."""


def quickstart(
    source: Annotated[
        list[str],
        typer.Argument(
            help="Text or jsonl files (also as .gz or .zst), parquet files, directories, globs, or Hub datasets as "
            "owner/dataset[:config]; or shakespeare, a text that comes with the package."
        ),
    ],
    minutes: Annotated[
        float, typer.Option(help="Time budget, from reading the text to the last training step.")
    ] = 10.0,
    depth: Annotated[
        int | None,
        typer.Option(help="Number of layers, which also sets the width. (default: chosen for the time budget)"),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(help="Run directory; the shards are written to data/ under the same name. (default: runs/NAME)"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="gpt2, a tokenizer.json, a directory with one, or owner/name on the Hub. (default: train a new one)"
        ),
    ] = None,
    text_key: TextKey = "text",
    separator: Separator = None,
    encoding: Encoding = "utf-8",
    skip_bad: SkipBad = False,
    plain: Plain = False,
    watch: Watch = None,
) -> None:
    """Train a model on your text, at a size that suits the text, the machine and the time budget.

    Trains a tokenizer, measures the training speed of a few model sizes, chooses the one with the lowest predicted
    loss, writes the config to OUT_DIR.toml, trains the model, evaluates it on held-out text and generates a sample.
    Rerun the same command to resume.
    """
    start = time.monotonic()
    from whimbrel.base.errors import ConfigError
    from whimbrel.data.sources import source_name
    from whimbrel.train.sizing import model_of_depth

    configure_logging()
    if not 0 < minutes <= MAX_MINUTES:
        raise ConfigError(f"expected --minutes > 0 and <= {MAX_MINUTES:,}, got {minutes:g}")
    if depth is not None:
        model_of_depth(depth, vocab_size=1)  # raises for an invalid depth
    run = out_dir or Path("runs") / source_name(source[0])
    _check_run_directory(run)
    reading = {"text_key": text_key, "separator": separator, "encoding": encoding, "skip_bad": skip_bad}
    options = {"--minutes": f"{minutes:g}", "--depth": depth, "--out-dir": out_dir, "--tokenizer": tokenizer}
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    command = _one_line(shlex.join(["whimbrel", "quickstart", *source, *given, *_reading_options(reading)]))
    job = _Job(source, run, start, 60 * minutes, depth, tokenizer, reading, command)
    with warn_once("whimbrel.data.sources"):  # the text is read to train the tokenizer, then to encode it
        if not job.config_exists():
            job.write_config()
    from whimbrel.train import load_run_config

    trainer = run_training(
        load_run_config(job.config_file),
        job.config_file,
        (),
        plain=plain,
        exit_143=False,
        nproc=1,
        max_restarts=0,
        watch=watch,
        print_next=False,
        to_continue=job.to_continue,
    )
    if not is_finished(trainer):
        raise typer.Exit
    _evaluate(run, job.data)
    _print_sample(run)
    print(f"\nDone in {_duration(time.monotonic() - start)}. Next:", flush=True)
    for line in _next_commands(run):
        print(f"  {line}")


def _check_run_directory(run: Path) -> None:
    """Raise if the name of the run cannot also be the name of its shards, or if its path is not a directory."""
    from whimbrel.base.errors import ConfigError
    from whimbrel.data.prepare import is_valid_name

    if not is_valid_name(run.name):
        raise ConfigError(
            "expected --out-dir to end in a name of letters, digits, '_', '.', '-', without _train or _val, got "
            f"'{run}'"
        )
    parent = next(path for path in (run, *run.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise ConfigError(f"expected a directory for --out-dir, got {run}: {parent} is a file")


def _reading_options(reading: Mapping[str, Any]) -> list[str]:
    """The options for reading text that are not the default."""
    options = ["--text-key", reading["text_key"]] if reading["text_key"] != "text" else []
    if reading["separator"] is not None:
        options += ["--separator", format_escapes(reading["separator"])]
    if reading["encoding"] != "utf-8":
        options += ["--encoding", reading["encoding"]]
    return [*options, *["--skip-bad"] * reading["skip_bad"]]


@dataclass(frozen=True, slots=True)
class _Job:
    """What to do, and where the results are."""

    source: Sequence[str]
    run: Path
    start: float
    seconds: float
    depth: int | None
    tokenizer: str | None
    reading: Mapping[str, Any]
    command: str

    @property
    def config_file(self) -> Path:
        return self.run.with_name(f"{self.run.name}.toml")

    @property
    def to_continue(self) -> str:
        """How to continue a finished run."""
        train = f"whimbrel train {_one_line(shlex.quote(str(self.config_file)))} --train.steps=N"
        return f"choose another --out-dir for a new run, or continue with {train}"

    @property
    def data(self) -> Path:
        return Path("data") / self.run.name

    @property
    def depths(self) -> Sequence[int]:
        """The depths to choose from, in ascending order."""
        from whimbrel.train.sizing import DEPTHS

        return DEPTHS if self.depth is None else (self.depth,)

    def remaining(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def config_exists(self) -> bool:
        """Whether this command has written its config; raises if another command did, or if the directory has a run."""
        from whimbrel.base.errors import ConfigError
        from whimbrel.checkpoint.manifest import step_directories

        if not self.config_file.exists():
            if (self.run / "config.toml").exists():
                raise ConfigError(f"{self.run} contains a run that quickstart did not start: choose another --out-dir")
            return False
        with self.config_file.open(encoding="utf-8", errors="replace") as file:
            written_by = file.readline().removeprefix("# Written by: ").strip()
        if written_by != self.command:
            raise ConfigError(
                f"{self.config_file} is from another command ({written_by}): run that to resume, or choose another "
                "--out-dir"
            )
        self._check_text()
        started = "Resuming" if step_directories(self.run) else "Starting"
        print(f"{started} {self.run} with {self.config_file}", flush=True)
        return True

    def _check_text(self) -> None:
        """Raise if the text is not what the shards were made from. Without the text, the shards suffice."""
        from whimbrel.base.errors import ConfigError, DataError
        from whimbrel.data.manifest import read_manifest
        from whimbrel.data.sources import resolve_sources

        manifest = read_manifest(self.data)
        if manifest is None:  # deleted since: prepare the same shards again
            self._prepare()
            return
        try:
            current = {source.record("train") for source in resolve_sources(self.source)}
        except DataError:  # moved or deleted since
            return
        if (before := set(manifest.sources)) != current:
            counts = f"{_count(len(before), 'source')} then, {_count(len(current), 'source')} now"
            raise ConfigError(
                f"the text has changed since {self.config_file} was written ({counts}): choose another --out-dir to "
                "train on it"
            )

    def write_config(self) -> None:
        """Prepare the text, choose the model and its training steps, and write the config."""
        from whimbrel.base.files import atomic_file
        from whimbrel.train.sizing import config_text

        manifest = self._prepare()
        plan, measured = self._choose(manifest)
        reasons = list(self._explain(plan, measured, manifest))
        print("\n".join(reasons), flush=True)
        header = [f"Written by: {self.command}", "", *reasons, "", *map(_one_line, self._commands(manifest))]
        text = config_text(
            plan, output_dir=self.run, data=self.data, device_settings=_device_settings(self.seconds), header=header
        )
        self.config_file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.config_file) as file:
            file.write(text.encode())
        print(f"Config: {self.config_file}", flush=True)

    def _prepare(self) -> Manifest:
        """Train a tokenizer unless one is given, and tokenize as much text as there is time for."""
        from whimbrel.base.errors import DataError
        from whimbrel.data.prepare import available_cores, prepare
        from whimbrel.data.sources import check_encoding, check_separator, resolve_sources
        from whimbrel.train.sizing import choose_vocab_size, model_of_depth

        sources = resolve_sources(self.source)
        check_separator(self.reading["separator"], sources)
        check_encoding(self.reading["encoding"], sources)
        sizes = [source.text_bytes() for source in sources]
        limit = int(PREPARE_SHARE * self.seconds * available_cores() * ENCODED_BYTES_PER_SECOND)
        size = limit if None in sizes else sum(size for size in sizes if size is not None)
        if size < MIN_TEXT_BYTES:
            raise DataError(f"expected at least {MIN_TEXT_BYTES // 1000} kB of text, got {_megabytes(size)}: add more")
        amount = "of unknown size" if None in sizes else f"about {_megabytes(size)}"
        print(f"Text: {_count(len(sources), 'source')}, {amount}", flush=True)
        if self.tokenizer is not None:
            loaded = load_named_tokenizer(self.tokenizer)
        else:
            vocab_size = choose_vocab_size(min(size, limit))
            print(f"Tokenizer: training one with {vocab_size:,} tokens", flush=True)
            loaded = self._train_tokenizer(vocab_size)
        val_tokens = min(max(int(VAL_SHARE * size / BYTES_PER_TOKEN), MIN_VAL_TOKENS), MAX_VAL_TOKENS)
        is_new = not self.data.exists()
        manifest = prepare(
            self.source,
            self.data,
            loaded,
            name=self.data.name,
            total_tokens=None
            if size <= limit and None not in sizes
            else max(limit // BYTES_PER_TOKEN, MIN_TRAIN_TOKENS),
            val_tokens=val_tokens,
            progress=ProgressBar(),
            **self.reading,
        )
        context = model_of_depth(self.depths[0], vocab_size=1).context_length
        for split, minimum in (("training", MIN_TRAIN_TOKENS), ("validation", context + 1)):
            if (tokens := manifest.tokens("train" if split == "training" else "val")) < minimum:
                if is_new:
                    shutil.rmtree(self.data)  # so that the same command works with more text
                raise DataError(f"expected at least {minimum:,} {split} tokens, got {tokens:,}: add more text")
        return manifest

    def _train_tokenizer(self, vocab_size: int) -> Tokenizer:
        from whimbrel.base.errors import DataError
        from whimbrel.data.sources import iter_documents, with_skip_hint
        from whimbrel.tokenization import train_tokenizer

        def skip(error: DataError) -> None:
            if not self.reading["skip_bad"]:
                raise with_skip_hint(error) from error

        text_key, separator, encoding = (self.reading[name] for name in ("text_key", "separator", "encoding"))
        documents = iter_documents(self.source, text_key, separator, encoding, skip, TOKENIZER_BYTES)
        return train_tokenizer(documents, vocab_size)

    def _choose(self, manifest: Manifest) -> tuple[Plan, list[Measurement]]:
        """The plan, and the measured speeds, starting with the chosen depth."""
        from whimbrel.train.device import choose_device, reset_peak_memory
        from whimbrel.train.sizing import choose_depth, choose_plan, model_of_depth

        vocab_size, train_tokens, val_tokens = manifest.tokenizer.vocab_size, *map(manifest.tokens, ("train", "val"))
        depths = [
            depth
            for depth in _depths_in_memory(self.depths, vocab_size)
            if model_of_depth(depth, vocab_size).context_length < val_tokens
        ]
        device = choose_device(None)
        measured = choose_depth(
            self._measure_speed,
            vocab_size,
            train_tokens=train_tokens,
            seconds=max(SPEED_MARGIN * (self.remaining() - CLOSING_SECONDS), 1.0),
            flops=FLOPS[device.type],
            depths=depths,
        )
        reset_peak_memory(device)
        plan = choose_plan(
            measured[0],
            vocab_size,
            train_tokens=train_tokens,
            val_tokens=val_tokens,
            seconds=SPEED_MARGIN * (self.remaining() - CLOSING_SECONDS),
        )
        return plan, measured

    def _measure_speed(self, model: GPTConfig, tokens_per_step: int) -> float | None:
        """Tokens per second of training steps with the settings of the run, in a temporary run directory.

        None if they do not fit in the memory of the GPU.
        """
        import torch

        from whimbrel.train import Trainer
        from whimbrel.train.run_config import build_run_config
        from whimbrel.train.sizing import Plan, config_text

        print(f"Measuring the training speed at depth {model.num_layers}", flush=True)
        plan = Plan(
            model=model, tokens_per_step=tokens_per_step, steps=100_000, validations=1, seconds=0.0, epochs=0.0,
            loss=0.0, is_data_limited=False,
        )  # fmt: skip
        window = min(max(MEASURE_SHARE * self.seconds, MIN_MEASURE_SECONDS), MAX_MEASURE_SECONDS)
        timer = _SpeedTimer(window, tokens_per_step)
        settings = _device_settings(self.seconds)
        with tempfile.TemporaryDirectory(prefix="whimbrel-") as folder, _only_warnings():
            text = config_text(
                plan, output_dir=Path(folder) / "run", data=self.data, device_settings=settings, header=()
            )
            table = tomllib.loads(text) | {"log": {"progress": False}}
            table["checkpoint"] = {"at_end": False, "every_minutes": None}
            del table["validation"], table["sample"]
            trainer = Trainer.from_config(build_run_config(table), callbacks=[timer])
            try:
                trainer.train()
            except torch.OutOfMemoryError:
                print(f"Depth {model.num_layers} does not fit in memory", flush=True)
                return None
        if trainer.received_signal is not None:
            raise KeyboardInterrupt
        return timer.tokens_per_second

    def _explain(self, plan: Plan, measured: Sequence[Measurement], manifest: Manifest) -> Iterator[str]:
        """What was chosen and why; printed, and written to the config."""
        from whimbrel.train.sizing import block_parameters

        model = plan.model
        blocks, total = block_parameters(model), model.matrix_parameters
        yield (
            f"Text: {manifest.tokens('train'):,} training tokens, {manifest.tokens('val'):,} held out, "
            f"vocabulary {manifest.tokenizer.vocab_size:,}"
        )
        by_depth = sorted(measured, key=lambda item: item.depth)
        speeds = (f"{item.tokens_per_second:,.0f} at depth {item.depth}" for item in by_depth)
        yield f"Speed in tokens/s: {', '.join(speeds)}"
        reason = "as requested" if self.depth is not None else "lowest predicted loss in the time available"
        sizes = f"{total / 1e6:.2f}M parameters, {blocks / 1e6:.2f}M of them in the blocks"
        yield f"Model: depth {model.num_layers} ({reason}), {sizes}"
        yield (
            f"Training: {plan.steps:,} steps of {plan.tokens_per_step:,} tokens, {plan.epochs:.1f} epochs, about "
            f"{_duration(plan.seconds)}"
        )
        if plan.is_data_limited:
            yield "Shorter than --minutes: more epochs on so little text would overfit"
        elif plan.seconds > max(self.remaining(), 0) * 1.2:
            if plan.seconds <= self.seconds:
                spent = _duration(self.seconds - self.remaining())
                yield f"Longer than --minutes: preparing the text and measuring the speed took {spent}"
            else:
                yield "Longer than --minutes: this text needs more time on this machine"

    def _commands(self, manifest: Manifest) -> Iterator[str]:
        """The equivalent separate commands."""
        settings, vocab_size = manifest.settings, manifest.tokenizer.vocab_size
        source = shlex.join([*self.source, *_reading_options(self.reading)])
        data, run = shlex.quote(str(self.data)), shlex.quote(str(self.run))
        total = [] if settings.total_tokens is None else [f"--total-tokens {settings.total_tokens}"]
        yield "The same in separate commands:"
        if self.tokenizer is None:
            size = f"--vocab-size {vocab_size} --max-bytes {TOKENIZER_BYTES}"
            yield f"  whimbrel tokenizer train {source} {size} --out-dir {data}"
        tokenizer = data if self.tokenizer is None else shlex.quote(self.tokenizer)
        lengths = " ".join([*total, f"--val-tokens {settings.val_tokens}"])
        yield f"  whimbrel prepare {source} --tokenizer {tokenizer} {lengths} --name {settings.name} --out-dir {data}"
        yield f"  whimbrel train {shlex.quote(str(self.config_file))}"
        yield f"  whimbrel eval {run} --text {data}"


class _SpeedTimer(TrainerCallback):
    """Measures the speed in a time window after a few warm-up steps, then stops training."""

    def __init__(self, seconds: float, tokens_per_step: int) -> None:
        self._seconds, self._tokens_per_step = seconds, tokens_per_step
        self._times: list[float] = []

    @property
    def tokens_per_second(self) -> float:
        """Speed of the median step, so that a few slow steps do not matter."""
        return self._tokens_per_step / statistics.median(end - start for start, end in itertools.pairwise(self._times))

    def on_step_end(self, **event: Any) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif torch.mps.is_available():
            torch.mps.synchronize()
        if event["state"].global_step < WARMUP_STEPS:
            return
        self._times.append(time.perf_counter())
        if len(self._times) > 1 and self._times[-1] - self._times[0] >= self._seconds:
            event["control"].should_abort_without_save = True


@contextlib.contextmanager
def _only_warnings() -> Iterator[None]:
    logger = logging.getLogger("whimbrel")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _device_settings(seconds: float) -> dict[str, str]:
    """Lines of [train] for the device: one GPU, bf16 where it is supported, and compilation in long runs."""
    import torch

    from whimbrel.train.device import choose_device

    if choose_device(None).type != "cuda":
        return {}
    settings = {"device": '"cuda:0"  # without this line, all GPUs'} if torch.cuda.device_count() > 1 else {}
    if torch.cuda.is_bf16_supported():
        settings["precision"] = '"bf16"'
    if seconds >= 60 * COMPILE_MINUTES:
        settings["compile"] = "true"
    return settings


def _depths_in_memory(depths: Sequence[int], vocab_size: int) -> list[int]:
    """The depths whose weights, gradients and optimizer state fit in the memory of the device; raises if none does."""
    import torch

    from whimbrel.base.errors import ConfigError
    from whimbrel.base.files import format_bytes
    from whimbrel.train.device import choose_device
    from whimbrel.train.sizing import model_of_depth

    if choose_device(None).type == "cuda":
        memory, _ = torch.cuda.mem_get_info(0)
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = {depth: BYTES_PER_PARAMETER * model_of_depth(depth, vocab_size).matrix_parameters for depth in depths}
    if fitting := [depth for depth in depths if needed[depth] <= memory]:
        return fitting
    raise ConfigError(
        f"expected a model that fits in {format_bytes(memory)} of memory, got depth {min(depths)}, which needs "
        f"{format_bytes(needed[min(depths)])}: choose a smaller --depth"
    )


def _evaluate(run: Path, data: Path) -> None:
    """Print the loss on the held-out text."""
    from whimbrel.evaluate import Scorer, shard_perplexity
    from whimbrel.train.device import choose_device

    result = shard_perplexity(Scorer.load(run, device=choose_device(None)), data)
    nats = -result.loglikelihood / result.tokens
    print(
        f"\nHeld-out text: loss {nats:.3f} per token, perplexity {result.perplexity:.1f}, "
        f"{result.bits_per_byte:.3f} bits per byte",
        flush=True,
    )


def _print_sample(run: Path) -> None:
    """Generate the beginning of a document."""
    from whimbrel.inference import LLM, SamplingParams
    from whimbrel.train.device import choose_device

    llm = LLM(run, device=choose_device(None), max_batch=1)
    sampling = SamplingParams(temperature=0.7, min_p=0.05)
    print("\nSample:")
    for piece in llm.stream("", sampling, max_new_tokens=SAMPLE_TOKENS, seed=0, ignore_eos=True):
        print_text(piece)
    print()


def _next_commands(run: Path) -> list[str]:
    name = shlex.quote(str(run))
    file = shlex.quote(f"{run.name}.gguf")
    return [
        f'whimbrel generate {name} "Your opening words"',
        f"whimbrel serve {name}  # a page to try it, and an OpenAI-compatible API",
        f"whimbrel export {name} {file}  # for llama.cpp and Ollama",
    ]


def _one_line(text: str) -> str:
    return escape_controls(text).replace("\n", "\\n")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
