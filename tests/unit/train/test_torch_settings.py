"""Attention kernels, matmul precision, activation offloading and anomaly mode apply only during a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from whimbrel.base.errors import PrecisionError, TrainingError
from whimbrel.train import BaseTrainer, RunConfig, train

Make = Callable[..., Any]
SWITCHES: dict[str, Any] = {
    "sdpa_backend": ("flash", "math"),
    "sdpa_set_priority": True,
    "float32_matmul_precision": "medium",
    "enable_activation_offloading": True,
    "detect_anomaly": True,
}


def torch_settings() -> dict[str, Any]:
    """The global torch settings; the last is whether saved tensors go through hooks."""
    return {
        "kernels": _cur_sdpa_kernel_backends(with_priority=True),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision),
        "anomaly": torch.is_anomaly_enabled(),
        "offloaded": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
    }


class RecordingNet(nn.Module):
    """Wraps a model and records the torch settings in each forward pass; raises if `fails`."""

    def __init__(self, net: nn.Module, fails: bool) -> None:
        super().__init__()
        self.net, self.fails, self.seen = net, fails, []  # type: ignore[var-annotated]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.seen.append(torch_settings())
        if self.fails:
            raise OSError("out of luck")
        return self.net(x, labels)


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("verb", ["train", "evaluate", "predict"])
def test_settings_apply_during_a_run_and_are_restored_after_it(
    args: Make, net: Make, data: Make, verb: str, fails: bool
) -> None:
    before, model = torch_settings(), RecordingNet(net(), fails)
    trainer = BaseTrainer(args(max_steps=1, **SWITCHES), model, train_dataset=data(), eval_dataset=data())
    work = trainer.train if verb == "train" else lambda: getattr(trainer, verb)(data())
    if fails:
        with pytest.raises(OSError, match="out of luck"):
            work()
    else:
        work()
    assert model.seen[0] == {
        "kernels": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "matmul": ("medium", "tf32"), "anomaly": True,
        "offloaded": True,
    }  # fmt: skip
    assert torch_settings() == before
    assert not before["offloaded"]


# Warning by torch with the line of the forward call
@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_anomaly_mode_names_the_operation_before_the_update(args: Make, fit: Make, net: Make) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        zeros = outputs[1] - outputs[1].detach()
        return (zeros.sqrt() * 0).sum()  # 0 * inf in backward

    model = net()
    weights = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(TrainingError, match="NaN in gradient 0 of SqrtBackward0"):
        fit(args(detect_anomaly=True), model=model, compute_loss_func=loss)
    assert all(map(torch.equal, model.parameters(), weights))
    assert not torch.is_anomaly_enabled()


def test_unavailable_attention_kernels_raise(make_run: Callable[..., RunConfig]) -> None:
    before = torch_settings()
    with pytest.raises(PrecisionError, match="sdpa_backend = efficient does not support this attention"):
        train(make_run(train__sdpa_backend="efficient"))  # not available on a CPU
    assert torch_settings() == before


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # warning by torch.compile about its inputs
def test_activations_of_compiled_blocks_are_offloaded(
    make_run: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []

    class Host(torch.autograd.graph.save_on_cpu):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (packed.append(tensor.numel()), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Host)
    settings = {"train__steps": 2, "train__compile": True, "train__compile_backend": "aot_eager"}
    plain = train(make_run(**settings)).training_loss
    assert packed == []
    run = make_run(**settings, train__activation_offloading=True, output_dir=tmp_path / "offloaded")
    assert train(run).training_loss == plain
    mlp = 4 * 32 * 128  # batch, tokens and width of the MLP activations of a block
    assert packed.count(mlp) >= 2 * 2 * 2  # blocks, micro-batches, steps
