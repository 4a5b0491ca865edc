"""The predicted peak memory of a training step equals the measured one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.finetuning import run_config, save_base_model
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import apply_activation_checkpointing
from whimbrel.optim import GroupConfig, OptimConfig
from whimbrel.precision import sdpa_backends
from whimbrel.train import RunConfig
from whimbrel.train.build import create_optimizer
from whimbrel.train.config import EmaConfig
from whimbrel.train.initial_model import init_model
from whimbrel.train.memory import (
    CUBLAS_WORKSPACE_BYTES,
    MemoryPrediction,
    build_dry_run_step,
    empty_model,
    optimizer_names,
    predict_memory,
    resolve,
    with_optimizer,
)
from whimbrel.train.memory_tracker import simulated_device
from whimbrel.train.run_config import build_run_config

MakeRun = Callable[..., RunConfig]
LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}


def make(tmp_path: Path, model: dict[str, Any], optim: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    shape = {"context_length": 64, "vocab_size": 1000, "num_layers": 2, "embd_size": 128, "num_heads": 4}
    settings = {"steps": 9, "micro_batch": 4, "accumulation": 2, "clip": 1.0, **train}
    return build_run_config(
        {
            "output_dir": str(tmp_path), "data": {"path": "unused"}, "model": shape | model, "optim": optim or {},
            "train": settings,
        }
    )  # fmt: skip


def predict(config: RunConfig, device: str = "cpu") -> MemoryPrediction:
    (found,) = predict_memory(config, device)
    return found


def make_steps(config: RunConfig, device: torch.device, steps: int = 2) -> None:
    is_dense = config.train.weight_dtype is None and config.lora is None
    with device:
        model = init_model(config) if is_dense else empty_model(config, device)
    apply_activation_checkpointing(model, config.train.recompute)
    optimizer = create_optimizer(model, config, None, accumulation=config.train.accumulation or 1)
    loop = build_dry_run_step(config, model, device, optimizer)
    for number in range(steps):
        loop.run(number + 1)


def peak_allocated(config: RunConfig, steps: int = 2) -> int:
    """Measured by the memory events of torch's profiler."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        make_steps(config, torch.device("cpu"), steps)
    assert profiler.profiler is not None
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("name", optimizer_names())
def test_the_prediction_is_exact_for_every_optimizer(tmp_path: Path, name: str):
    config = with_optimizer(make(tmp_path, {}, {"name": "galore_warm", "rank": 16}), name)
    assert predict(config).peak == pytest.approx(peak_allocated(config), rel=0.01)


@pytest.mark.parametrize(
    ("model", "train"),
    [
        (LLAMA, {}),
        (LLAMA | {"num_kv_heads": 2}, {"accumulation": 1}),
        (LLAMA, {"recompute": "full"}),
        ({}, {"recompute": "selective"}),
        ({}, {"precision": "bf16"}),
        (LLAMA, {"default_dtype": "bfloat16"}),
        ({}, {"sdpa_backend": "math"}),
        ({"sliding_window": 16}, {}),
    ],
)
def test_the_prediction_is_exact_for_every_kind_of_forward_and_backward(
    tmp_path: Path, model: dict[str, Any], train: dict[str, Any]
):
    config = make(tmp_path, model, **train)
    with sdpa_backends(config.train.sdpa_backend):
        measured = peak_allocated(config)
    assert predict(config).peak == pytest.approx(measured, rel=0.01)


LORA = {"lora": {"rank": 8}}


@pytest.mark.parametrize(
    ("objective", "sections"),
    [
        ({}, LORA),
        ({}, {**LORA, "data": {"packing": False}}),
        ({}, {"lora": {"rank": 8, "dropout": 0.1, "use_dora": True, "modules": ["layers.1.self_attn.q_proj"]}}),
        ({}, {**LORA, "model": {"weights": "int8"}, "train": {"recompute": "full"}}),
        ({"name": "dpo"}, LORA),
        ({"name": "dpo"}, {**LORA, "data": {"packing": False}, "train": {"recompute": "full"}}),
        ({"name": "dpo"}, {}),
        ({"name": "dpo", "reference": "precomputed"}, {**LORA, "model": {"weights": "int4"}}),
        ({"name": "orpo"}, LORA),
        ({"name": "orpo"}, {"data": {"packing": False}}),
        ({"name": "distill", "teacher": "unused", "k": 16}, LORA),
    ],
    ids=str,
)
def test_the_prediction_is_exact_for_fine_tuning(
    tmp_path: Path, objective: dict[str, Any], sections: dict[str, Any]
) -> None:
    base = save_base_model(tmp_path / "base", embd_size=128, num_layers=3)
    sections = {**sections, "objective": objective, "model": {"path": str(base), **sections.get("model", {})}}
    config = run_config(base, tmp_path / "chats.jsonl", tmp_path / "run", **sections)
    assert predict(config).peak == pytest.approx(peak_allocated(resolve(config, "cpu")), rel=0.01)


def test_the_reference_of_dpo_is_computed_before_activations_are_kept(tmp_path: Path) -> None:
    """It needs no memory of its own, unlike the pairs of a padded batch, which has twice as many sequences."""
    base = save_base_model(tmp_path / "base", embd_size=128)

    def peak(name: str, **data: Any) -> int:
        config = run_config(
            base, tmp_path / "pairs.jsonl", tmp_path / "run", objective={"name": name}, data=data, **LORA
        )
        return predict(config, "cuda").peak - CUBLAS_WORKSPACE_BYTES

    assert peak("dpo") == pytest.approx(peak("orpo"), rel=0.02)
    assert peak("dpo", packing=False) > 1.5 * peak("dpo")


@pytest.mark.parametrize(
    ("optim", "train"),
    [
        ({"name": "galore_warm", "rank": 16, "gap": 6}, {}),
        ({"name": "galore_warm", "rank": 16, "gap": 6, "store": "int8"}, {"projected_linears": True}),
        ({"name": "adamw"}, {"accumulation": 1, "clip": None}),
    ],
)
def test_optimizers_in_backward_keep_fewer_gradients(tmp_path: Path, optim: dict[str, Any], train: dict[str, Any]):
    settings = {"micro_batch": 1, "recompute": "full", **train}
    within = make(tmp_path, {"embd_size": 256, "num_layers": 4}, optim, optimizer_in_backward=True, **settings)
    beside = replace(within, train=replace(within.train, optimizer_in_backward=False, projected_linears=False))
    predicted, otherwise = predict(within), predict(beside)
    assert predicted.in_backward
    assert predicted.gradients < 0.7 * otherwise.gradients
    assert predicted.peak < 0.9 * otherwise.peak
    assert predicted.peak == pytest.approx(peak_allocated(within, steps=20), rel=0.03)


def test_optimizer_states_are_predicted_per_parameter(tmp_path: Path):
    config = make(tmp_path, {"vocab_size": 1024})
    predicted = predict(config)
    parameters = sum(p.numel() for p in init_model(config).parameters())
    count = sum(row.count for row in predicted.parameters)
    assert predicted.states == 8 * parameters + 4 * count == sum(row.state_bytes or 0 for row in predicted.parameters)
    assert predicted.weights == pytest.approx(4 * parameters, rel=1e-3)
    assert predicted.gradients == pytest.approx(4 * parameters, rel=1e-2)


def test_ema_weights_are_counted(tmp_path: Path):
    config = make(tmp_path, {}, default_dtype="bfloat16")
    averaged, plain = predict(replace(config, ema=EmaConfig(decay=0.9))), predict(config)
    assert (
        averaged.peak - plain.peak
        == averaged.at_peak["EMA weights"]
        == 2 * sum(row.weight_bytes for row in plain.parameters)
    )


def test_recomputation_and_offloading_reduce_predicted_activations(tmp_path: Path):
    config = make(tmp_path, {**LLAMA, "num_layers": 4}, micro_batch=8, precision="bf16")

    def activations(**train: Any) -> int:
        return predict(replace(config, train=replace(config.train, **train)), "cuda").activations

    plain = activations()
    assert activations(micro_batch=4, accumulation=4) < 0.6 * plain
    assert activations(recompute="full") < activations(recompute="selective") < plain
    assert activations(activation_offloading=True) < 0.5 * plain


def test_gpu_kernels_are_predicted_without_a_gpu(tmp_path: Path):
    """On a GPU, RMSNorm saves only its input, and fp32 has no fused attention for grouped heads."""
    config = make(tmp_path, {**LLAMA, "context_length": 512, "num_kv_heads": 2}, micro_batch=1)
    grouped = predict(config, "cuda")
    ungrouped = predict(make(tmp_path, {**LLAMA, "context_length": 512}, micro_batch=1), "cuda")
    assert grouped.activations > ungrouped.activations + 4 * 512 * 512 * 4
    half = replace(config, train=replace(config.train, precision="bf16"))
    assert predict(half, "cuda").activations < ungrouped.activations
    normed = replace(config, train=replace(config.train, sdpa_backend="math"))
    assert predict(normed, "cuda").activations < predict(normed, "cpu").activations
    assert grouped.at_peak["workspace"] == CUBLAS_WORKSPACE_BYTES


def test_predicting_a_large_model_allocates_nothing(tmp_path: Path):
    wide = {**LLAMA, "embd_size": 8192, "num_heads": 64, "mlp_size": 28672, "context_length": 4096, "num_layers": 5}
    predicted = predict(make(tmp_path, wide, default_dtype="bfloat16", recompute="full"), "cuda")
    assert predicted.weights == sum(row.weight_bytes for row in predicted.parameters) > 8 * 2**30
    assert predicted.states == pytest.approx(2 * predicted.weights, rel=1e-6)


@pytest.mark.parametrize("name", ["adamw8bit", "galore_warm"])
@pytest.mark.parametrize("in_backward", [True, False])
def test_the_prediction_covers_int8_weights(tmp_path: Path, name: str, in_backward: bool):
    steps = {"accumulation": 1, "clip": None} if name == "adamw8bit" else {}
    optim = {"name": name} | ({"rank": 16, "side": "cheapest"} if name == "galore_warm" else {})
    settings = {"weight_dtype": "int8", "optimizer_in_backward": in_backward, "default_dtype": "bfloat16"} | steps
    config = make(tmp_path, {**LLAMA, "embd_size": 256}, optim, **settings)
    predicted = predict(config)
    assert predicted.weights < 0.8 * predict(make(tmp_path, {**LLAMA, "embd_size": 256}, optim)).weights / 2
    assert predicted.weights == sum(row.weight_bytes for row in predicted.parameters)
    assert predicted.peak == pytest.approx(peak_allocated(config), rel=0.02)


def test_fp8_and_qat_are_rejected(tmp_path: Path):
    with pytest.raises(ConfigError, match="train.fp8_recipe.* got tensorwise"):
        predict(make(tmp_path, {}, fp8_recipe="tensorwise"))


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_a_tied_head_are_summed_in_place(tmp_path: Path, tied: bool):
    config = make(tmp_path, {"vocab_size": 20_000, "tied_head": tied}, micro_batch=1)
    assert predict(config).peak == pytest.approx(peak_allocated(config), rel=0.01)


@pytest.mark.parametrize("settings", [{}, {"neuron_beta": 0.9, "cautious_decay": True}])
def test_temporaries_that_grow_with_every_block_are_measured_on_all_blocks(tmp_path: Path, settings: dict[str, Any]):
    config = make(tmp_path, {"num_layers": 9, "vocab_size": 5000}, {"name": "muon", **settings}, micro_batch=1)
    predicted = predict(config)
    assert predicted.phase == "step"
    assert predicted.temporaries > predicted.weights
    assert predicted.peak == pytest.approx(peak_allocated(config), rel=0.01)


def test_temporaries_that_stop_growing_are_extrapolated_from_a_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Muon updates the matrices of at most six blocks at once: its temporaries stop growing after six of the nine."""
    monkeypatch.setattr("whimbrel.optim.rules.MAX_MUON_ELEMENTS", 6 * 4 * 128 * 128)
    config = make(tmp_path, {"num_layers": 9, "embd_size": 128, "vocab_size": 1000}, {"name": "muon"}, micro_batch=1)
    predicted = predict(config)
    monkeypatch.setattr("whimbrel.train.memory.SAMPLED_BLOCKS", 9)
    assert predicted.temporaries == predict(config).temporaries


def test_a_prediction_leaves_torch_and_its_rng_state_unchanged(tmp_path: Path):
    functions, state = (F.rms_norm, F.scaled_dot_product_attention), torch.get_rng_state()
    predict(make(tmp_path, LLAMA), "cuda")
    assert (F.rms_norm, F.scaled_dot_product_attention) == functions
    assert torch.equal(torch.get_rng_state(), state)
    assert type(torch.ones(2)) is torch.Tensor


def test_the_tracker_counts_live_bytes_by_category():
    with simulated_device("cuda") as tracker:
        x = torch.empty(1000)
        assert tracker.live == {"activations": 4096}
        tracker.mark([x], "weights")
        y = x.view(10, 100)[2:] * 2
        assert (tracker.live["weights"], tracker.live["activations"], tracker.peak) == (4096, 3584, 7680)
        del y
        assert tracker.live.total() == 4096
        (x + 1).add_(1)
        assert (tracker.peak, tracker.max["activations"]) == (8192, 4096)


def test_simulated_gpu_tensors_select_gpu_kernels():
    assert not torch.ones(2).is_cuda
    with simulated_device("cuda"):
        assert torch.ones(2).is_cuda
        weight = torch.nn.Parameter(torch.ones(2, 2))
        assert weight.split(1)[0].is_cuda
        seen: list[bool] = []
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.is_cuda))
        weight.sum().backward()
        assert seen == [True]
    with simulated_device("cpu"):
        assert not torch.ones(2).is_cuda
    assert not torch.ones(2).is_cuda


def test_scalars_computed_from_constants_have_values():
    with simulated_device("cpu"):
        step = torch.zeros((), dtype=torch.int64)
        for _ in range(3):
            step += 1
        due = torch.tensor(5)
        assert (int(step), int(due), bool(step >= due)) == (3, 5, False)
        due.copy_(step + 1)
        assert int(due) == 4
        norm = torch.randn(9).norm()
        assert (norm.item(), bool(norm.isfinite())) == (1.0, True)
        due.copy_(norm)
        assert int(due) == 1


def test_with_optimizer_keeps_only_the_settings_of_the_new_optimizer(tmp_path: Path):
    groups = [{"pattern": "attn", "rank": 4}, {"pattern": "mlp", "rank": 4, "lr": 1e-4}]
    config = make(tmp_path, {}, {"name": "galore_warm", "lr": 1e-2, "rank": 8, "store": "int8", "groups": groups})
    assert with_optimizer(config, "galore_warm") == config
    assert with_optimizer(config, "muon").optim == OptimConfig(
        name="muon", lr=1e-2, groups=(GroupConfig(pattern="mlp", lr=1e-4),)
    )
    other = with_optimizer(config, "galore").optim
    assert (other.rank, other.store, other.groups) == (8, None, config.optim.groups)
    for name in optimizer_names():
        assert with_optimizer(config, name).optim.lr == 1e-2


def test_optimizers_that_do_not_support_backward_are_predicted_without_it(tmp_path: Path):
    config = make(tmp_path, {}, {"name": "galore_warm", "rank": 8}, optimizer_in_backward=True)
    found = predict_memory(config, "cuda", ["galore_warm", "muon"])
    assert [(row.optimizer, row.in_backward) for row in found] == [("galore_warm", True), ("muon", False)]
    with pytest.raises(ConfigError, match="does not work with 2 micro-batches"):
        predict_memory(with_optimizer(config, "adamw"), "cuda", ["adamw"])


def test_the_micro_batch_is_chosen_only_for_the_local_device(make_run: MakeRun):
    config = make_run()
    unset = replace(config, train=replace(config.train, micro_batch=None))
    assert predict(unset).micro_batch == 8
    with pytest.raises(ConfigError, match="--train.micro_batch=N"):
        predict(unset, "cuda")


def test_document_masks_are_counted(tmp_path: Path):
    config = make(tmp_path, {"context_length": 512, "num_layers": 1}, micro_batch=2)
    masked = replace(config, data=replace(config.data, documents="mask"))
    assert predict(masked).activations >= predict(config).activations + 2 * 512 * 512


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "muon", "galore_warm"])
def test_the_prediction_matches_a_gpu(tmp_path: Path, name: str):
    model = {"num_layers": 8, "embd_size": 1024, "num_heads": 16, "vocab_size": 32_000, "context_length": 1024, **LLAMA}
    config = with_optimizer(make(tmp_path, model, micro_batch=8, precision="bf16"), name)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make_steps(config, torch.device("cuda"))
    assert predict(config, "cuda").peak == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05)
