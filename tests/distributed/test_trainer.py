"""`Trainer` under every layout: the curve of one process, with masked targets, a short last batch and clipping."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import trainer_jobs as jobs
from tests.distributed.pool import Pool
from tests.support.finetuning import reversal_task, run_config, save_base_model, write_chats

from whimbrel.base.errors import ConfigError
from whimbrel.config import to_table
from whimbrel.distributed.pipeline import check_micro_batches
from whimbrel.model_io import load_model
from whimbrel.train.config import CheckpointConfig, LoaderConfig, TrainerConfig, ValidationConfig

SOAK = os.environ.get("WHIMBREL_SOAK", "0") != "0"
STEPS = 50 if SOAK else 8
"""An epoch has six steps, of which the last is short."""
TOLERANCE = 1e-5
"""fp32 sums in another order; a few steps of AdamW amplify them little."""
EVALUATE = {"validation": ValidationConfig(every=4)}
Layout = tuple[int, dict[str, Any]]
DDP: Layout = (2, {})
FSDP: Layout = (2, {"strategy": "fsdp"})
TP: Layout = (2, {"tp": 2})
PP: Layout = (2, {"pp": 2})
ZERO_BUBBLE: Layout = (2, {"pp": 2, "pipeline_schedule": "zero-bubble"})
LAYOUTS: list[tuple[str, Layout]] = [
    ("gpt2", DDP),
    ("gpt2", FSDP),
    ("llama", (4, {"strategy": "hsdp", "dp_shard": 2})),
    ("gpt2", TP),
    ("gpt2", PP),
    ("llama", (2, {"pp": 2, "pipeline_schedule": "gpipe"})),
    ("gpt2", (2, {"pp": 2, "pipeline_schedule": "interleaved"})),
    ("llama", ZERO_BUBBLE),
    ("llama", (4, {"tp": 2, "dp_replicate": 2})),
    ("gpt2", (4, {"pp": 2, "dp_replicate": 2, "pipeline_schedule": "zero-bubble"})),
    ("frozen-embedding", PP),
    ("hf-llama", ZERO_BUBBLE),
    ("hf-llama", TP),
    ("dropout", TP),
]
if SOAK:
    LAYOUTS += [
        ("llama", TP),
        ("gpt2", (3, {"pp": 3})),
        ("gpt2", (4, {"tp": 2, "dp_shard": 2})),
        ("gpt2", (4, {"pp": 2, "dp_shard": 2, "pipeline_schedule": "interleaved"})),
        ("llama", (4, {"pp": 2, "tp": 2})),
        ("hf-gpt2", PP),
        ("hf-gpt2", FSDP),
    ]
RECOMPUTED = [(FSDP, {"recompute": "full"}), (PP, {"recompute": "selective"}), (TP, {"activation_offloading": True})]
if SOAK:
    options: list[dict[str, Any]] = [{"recompute": "full"}, {"recompute": "selective"}, {"activation_offloading": True}]
    RECOMPUTED = [(layout, option) for layout in (DDP, FSDP, TP, PP) for option in options]


class References:
    """The curves of one process, each computed once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._curves = folder, dict[str, jobs.Curve]()

    def __call__(self, kind: str, **train: Any) -> jobs.Curve:
        key = f"{kind} {train}"
        if key not in self._curves:
            folder = self._folder / str(len(self._curves))
            self._curves[key] = jobs.run(jobs.make_config(folder, {}, STEPS, train, **EVALUATE), kind)
        return self._curves[key]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


def assert_equal_curves(curve: jobs.Curve, expected: jobs.Curve, tolerance: float = TOLERANCE) -> None:
    assert [list(entry) for entry in curve] == [list(entry) for entry in expected]
    for entry, other in zip(curve, expected, strict=True):
        for name, value in entry.items():
            # Rounding errors of 50 steps show in gradients before they show in the loss, which is nearly stationary.
            allowed = 10 * tolerance if SOAK and name == "grad_norm" else tolerance
            assert value == pytest.approx(other[name], rel=allowed, abs=allowed), (name, entry)


def run(pool: Pool, folder: Path, layout: Layout, kind: str, **train: Any) -> list[jobs.Curve]:
    """Train on the ranks of a layout, with the global batch of one process; returns the curve of every rank."""
    world_size, settings = layout
    train = jobs.per_rank(world_size, settings) | train
    return pool.run(world_size, jobs.run, jobs.make_config(folder, settings, STEPS, train, **EVALUATE), kind)


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=str)
def test_layout_matches_a_single_process(
    pool: Pool, reference: References, tmp_path: Path, kind: str, layout: Layout
) -> None:
    for curve in run(pool, tmp_path, layout, kind):
        assert_equal_curves(curve, reference(kind))


@pytest.mark.parametrize(("layout", "option"), RECOMPUTED, ids=str)
def test_recomputed_and_offloaded_activations_do_not_change_the_curve(
    pool: Pool, reference: References, tmp_path: Path, layout: Layout, option: dict[str, Any]
) -> None:
    assert_equal_curves(run(pool, tmp_path, layout, "llama", **option)[0], reference("llama"))


@pytest.mark.parametrize("layout", [DDP, FSDP, PP] if SOAK else [FSDP, PP], ids=str)
def test_compiled_blocks_have_the_curve_of_one_process(
    pool: Pool, reference: References, tmp_path: Path, layout: Layout
) -> None:
    curve = run(pool, tmp_path, layout, "gpt2", compile=True, compile_scope="block", compile_backend="aot_eager")[0]
    assert_equal_curves(curve, reference("gpt2"))


def test_a_pipeline_computes_in_bf16(pool: Pool, reference: References, tmp_path: Path) -> None:
    """As autocast of one process does, up to the rounding of hidden states."""
    curve = run(pool, tmp_path, PP, "gpt2", precision="bf16")[0]
    assert_equal_curves(curve, reference("gpt2", precision="bf16"), tolerance=2**-8)
    with pytest.raises(AssertionError):
        assert_equal_curves(curve, reference("gpt2"))


def test_a_pipeline_keeps_the_schedules_of_few_lengths(pool: Pool, tmp_path: Path) -> None:
    data = LoaderConfig(shuffle=False)
    alone, _ = jobs.run_on_lengths(jobs.make_config(tmp_path / "alone", {}, 6, {}, loader=data), "gpt2", 2)
    config = jobs.make_config(tmp_path / "pipeline", PP[1], 6, {}, loader=data)
    for losses, schedules in pool.run(2, jobs.run_on_lengths, config, "gpt2", 2):
        torch.testing.assert_close(losses, alone, rtol=TOLERANCE, atol=TOLERANCE)
        assert schedules == 2


@pytest.mark.parametrize("layout", [DDP, FSDP, TP], ids=str)
def test_ema_norms_and_samples_are_those_of_one_process(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    """The EMA is also resumed from a checkpoint, and written as a complete model."""
    world_size, settings = layout

    def config(folder: Path, settings: dict[str, Any], steps: int, **train: int) -> TrainerConfig:
        return jobs.make_config(folder, settings, steps, train, checkpoint=CheckpointConfig())

    norms, samples = jobs.run_with_monitors(config(tmp_path / "alone", {}, 4), "llama")
    per_rank = jobs.per_rank(world_size, settings)
    pool.run(world_size, jobs.run_with_monitors, config(tmp_path / "several", settings, 2, **per_rank), "llama")
    results = pool.run(
        world_size, jobs.run_with_monitors, config(tmp_path / "several", settings, 4, **per_rank), "llama"
    )
    assert results[0][1] == (samples if layout is DDP else [])
    assert results[1][1] == []
    for found, _ in results:
        assert found == pytest.approx(norms, rel=TOLERANCE, abs=TOLERANCE)
    expected, state = (
        load_model(tmp_path / name / "ema" / "step-00000004").state_dict() for name in ("alone", "several")
    )
    last = load_model(tmp_path / "several").state_dict()
    assert not torch.allclose(last["lm_head.weight"], state["lm_head.weight"], rtol=0, atol=100 * TOLERANCE)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("saved", [TP, PP], ids=str)
def test_a_checkpoint_of_a_split_model_resumes_under_other_layouts(pool: Pool, tmp_path: Path, saved: Layout) -> None:
    def resume(folder: Path, layout: Layout, until: int | None = None) -> jobs.Curve:
        world_size, settings = layout
        train = jobs.per_rank(world_size, settings)
        arguments = (folder, settings, "llama", STEPS, until, train)
        if world_size == 1:
            return jobs.run_in_parts(*arguments)
        return list(pool.run(world_size, jobs.run_in_parts, *arguments)[0])

    alone: Layout = (1, {})
    expected = resume(tmp_path / "alone", alone)
    unbroken = resume(tmp_path / "unbroken", saved)
    resume(tmp_path / "saved", saved, until=5)
    for number, layout in enumerate([alone, DDP, TP, ZERO_BUBBLE, saved] if SOAK else [alone, saved]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "saved", folder)
        curve = resume(folder, layout)
        assert_equal_curves(curve, expected)
    assert curve == unbroken


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "message"),
    [
        ("1f1b", 3, "needs at least 4 micro-batches per step, got 3"),
        ("interleaved", 6, "needs a multiple of 4 micro-batches per step, got 6"),
        ("zero-bubble", 7, "at least 8 micro-batches"),
    ],
)
def test_too_few_micro_batches_for_a_schedule_are_rejected(schedule: Any, micro_batches: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_micro_batches(schedule, 4, micro_batches)
    check_micro_batches("gpipe", 4, 1)


@pytest.mark.parametrize(
    ("layout", "train", "options", "message"),
    [
        (PP, {"precision": "fp16"}, {}, "fp16 does not work with pipeline parallelism .*: use bf16"),
        (PP, {"accumulation": 1}, {}, "needs at least 2 micro-batches per step, got 1: set train.accumulation"),
        (PP, {}, {"compute_loss_func": print}, "compute_loss_func does not work with pipeline parallelism"),
        (PP, {}, {"compute_metrics": print}, "compute_metrics does not work with pipeline parallelism"),
        (PP, {}, {"ema": True}, "ema.decay .EmaCallback. does not work with a model that is split across ranks"),
        (TP, {}, {"sample": True}, "sample.every .SampleCallback. does not work with a model that is split across"),
        (TP, {"precision": "fp16"}, {}, "fp16 does not work with parallel.tp = 2: use bf16"),
        (PP, {}, {"model": "value-embeddings"}, "value embeddings: set parallel.pp = 1 and use fsdp"),
        (TP, {}, {"model": "value-embeddings"}, "does not split value embeddings: set parallel.tp = 1 and use fsdp"),
        (TP, {}, {"model": "one-kv-head"}, "parallel.tp that divides kv_heads = 1, got 2"),
        (TP, {}, {"model": "hf-one-kv-head"}, "parallel.tp that divides num_key_value_heads = 1, got 2"),
        (
            (2, {"pp": 2, "strategy": "fsdp", "dp_shard": 1, "pipeline_schedule": "zero-bubble"}),
            {}, {}, "zero-bubble does not work with fsdp",
        ),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_unsupported_settings_are_rejected_at_startup(
    pool: Pool, tmp_path: Path, layout: Layout, train: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    world_size, settings = layout
    config = jobs.make_config(tmp_path, settings, STEPS, train)
    for error in pool.run(world_size, jobs.rejection, config, options):
        assert error.count("\n") == 0
        with pytest.raises(ConfigError, match=message):
            raise ConfigError(error)


LORA_NEW_TOKENS = {"lora": {"rank": 4}, "data": {"template": "gemma"}}
"""Two special tokens, for which the embedding is resized, unless it has rows that the tokenizer does not use."""


@pytest.mark.parametrize(("ranks", "parallel"), [DDP, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(
    "lora",
    [{"lora": {"rank": 4}}, LORA_NEW_TOKENS, LORA_NEW_TOKENS | {"vocab_size": 320}, {}],
    ids=["lora", "lora-new-tokens", "lora-unused-tokens", "full"],
)
def test_fine_tuning_on_samples_is_that_of_one_process(
    pool: Pool, tmp_path: Path, lora: dict[str, Any], ranks: int, parallel: dict[str, Any]
) -> None:
    sizes = {"vocab_size": lora["vocab_size"]} if "vocab_size" in lora else {}
    base = save_base_model(tmp_path / "base", **sizes)
    chats = write_chats(tmp_path / "chats.jsonl", reversal_task()[0][:60])
    train = {"steps": 6, "micro_batch": 4, "tokens_per_step": 512}
    sections = {"validation": {"every": 3}, "train": train, **lora}
    sections["data"] = {"val": 0.2} | sections.get("data", {})
    sections.pop("vocab_size", None)
    one, several = (
        to_table(run_config(base, chats, tmp_path / name, **sections)) for name in ("one", "several")
    )  # fmt: skip
    expected = jobs.finetune(one, {})
    found = pool.run(ranks, jobs.finetune, several, parallel)[0]
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=TOLERANCE)
