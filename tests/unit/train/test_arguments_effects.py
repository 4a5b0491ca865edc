"""The effect of training arguments on a run."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils.data import DataLoader

from whimbrel.checkpoint import list_checkpoints
from whimbrel.train import BaseTrainer, TrainerCallback
from whimbrel.train.arguments import to_config
from whimbrel.train.batches import collate, make_batches

Make = Callable[..., Any]


def logged(trainer: BaseTrainer, name: str) -> list[int]:
    """The steps after which `name` was logged."""
    return [line["step"] for line in trainer.state.log_history if name in line]


def saved(trainer: BaseTrainer) -> list[int]:
    """The steps that have a checkpoint."""
    return list(list_checkpoints(trainer.config.output_dir))


class RecordingNet(nn.Module):
    """Wraps `net` and records `look()` in every training forward pass."""

    def __init__(self, net: nn.Module, look: Callable[[], Any]) -> None:
        super().__init__()
        self.net = net
        self.look = look
        self.seen: list[Any] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training:
            self.seen.append(self.look())
        return self.net(x, labels)


class Scripted(BaseTrainer):
    """Evaluations return scripted losses."""

    script: Iterator[float]

    def _eval_loop(self, *_: Any, **__: Any) -> dict[str, float]:
        return {"eval_loss": next(self.script)}


def test_logging_first_step_logs_the_first_step(args: Make, fit: Make) -> None:
    trainer, _ = fit(args(logging_steps=4, logging_first_step=True))
    assert logged(trainer, "loss") == [1, 4, 8]
    trainer, _ = fit(args(logging_steps=4))
    assert logged(trainer, "loss") == [4, 8]


def test_eval_delay_counts_steps_or_epochs(args: Make, fit: Make, data: Make) -> None:
    trainer, _ = fit(args(eval_strategy="steps", eval_steps=2, eval_delay=5), eval_dataset=data(4))
    assert logged(trainer, "eval_loss") == [6, 8]
    passes = {"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 12}
    trainer, _ = fit(args(eval_strategy="epoch", eval_delay=2, **passes), eval_dataset=data(4))
    assert logged(trainer, "eval_loss") == [4, 6]  # two steps an epoch


def test_epoch_strategies_log_evaluate_and_save_once_per_epoch(args: Make, fit: Make, data: Make) -> None:
    by_epoch = {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}
    run = args(max_steps=-1, num_train_epochs=2.5, logging_steps=500, **by_epoch)
    trainer, _ = fit(run, eval_dataset=data(4))
    assert logged(trainer, "loss") == logged(trainer, "eval_loss") == [6, 12, 15]
    assert saved(trainer) == [6, 12, 15]


def test_save_strategy_best_saves_after_each_improvement(args: Make, net: Make, data: Make) -> None:
    trainer = Scripted(
        args(max_steps=6, save_strategy="best", eval_strategy="steps", eval_steps=1),
        net(), train_dataset=data(), eval_dataset=data(4), callbacks=[],
    )  # fmt: skip
    trainer.script = iter([5.0, 1.0, 4.0, 2.0, 0.5, 6.0])
    trainer.train()
    assert saved(trainer) == [1, 2, 5]
    assert trainer.state.best_global_step == 5


def test_preserve_n_best_keeps_the_best_checkpoints(args: Make, net: Make, data: Make) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = Scripted(
        args(max_steps=6, eval_strategy="steps", eval_steps=1, preserve_best_model=True, preserve_n_best=2, **saving),
        net(), train_dataset=data(), eval_dataset=data(4), callbacks=[],
    )  # fmt: skip
    trainer.script = iter([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    trainer.train()
    assert saved(trainer) == [2, 4, 6]  # the two best, and the newest


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux for the file of a descriptor")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_async_save_writes_in_another_thread(
    args: Make, fit: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    writers, fsync = set(), os.fsync

    def spy(handle: Any) -> None:
        if "checkpoints" in os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}"):
            writers.add(threading.current_thread() is threading.main_thread())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", spy)
    trainer, _ = fit(args(save_strategy="steps", save_steps=4, async_save=asynchronous))
    assert saved(trainer) == [4, 8]
    assert writers == {not asynchronous}


def test_data_loader_arguments_are_passed_on(
    args: Make, fit: Make, data: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, make = [], DataLoader.__init__

    def spy(self: DataLoader[Any], *given: Any, **settings: Any) -> None:
        seen.append(settings)
        make(self, *given, **settings | {"pin_memory": False})  # there may be no GPU to pin it for

    monkeypatch.setattr(DataLoader, "__init__", spy)
    _, expected = fit(args(max_steps=4))
    assert (seen[-1]["num_workers"], seen[-1]["prefetch_factor"]) == (0, None)
    fetched = args(max_steps=4, dataloader_num_workers=1, dataloader_prefetch_factor=3)
    _, losses = fit(fetched)
    assert (seen[-1]["num_workers"], seen[-1]["prefetch_factor"], seen[-1]["pin_memory"]) == (1, 3, False)
    assert losses.hex == expected.hex
    for pinned in (True, False):
        loader = to_config(args(dataloader_pin_memory=pinned)).loader
        batches = make_batches(
            data(), 4, torch.device("cuda"), collate=collate, seed=0, shuffle=True, loader=loader
        )  # fmt: skip
        assert not batches.exhausted()
        assert seen[-1]["pin_memory"] is pinned


def test_activation_offloading_moves_activations_to_the_host(
    args: Make, fit: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    class Host(torch.autograd.graph.save_on_cpu):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (kept.append(tensor.numel()), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Host)
    _, plain = fit(args())
    assert kept == []
    _, offloaded = fit(args(enable_activation_offloading=True))
    assert len(kept) >= 8  # some in each step
    assert offloaded.hex == plain.hex


def test_sdpa_backends_and_their_priority_are_applied(args: Make, fit: Make, net: Make) -> None:
    def allowed(**arguments: Any) -> list[SDPBackend]:
        model = RecordingNet(net(), lambda: _cur_sdpa_kernel_backends(with_priority=True))
        fit(args(max_steps=1, **arguments), model=model)
        return model.seen[0]

    before = _cur_sdpa_kernel_backends(with_priority=True)
    assert allowed(sdpa_backend="math") == [SDPBackend.MATH]
    both = ("math", "flash")
    assert set(allowed(sdpa_backend=both)) == {SDPBackend.MATH, SDPBackend.FLASH_ATTENTION}
    for order in (both, both[::-1]):
        names = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
        assert allowed(sdpa_backend=order, sdpa_set_priority=True) == [names[name] for name in order]
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_torch_flags_are_restored_after_a_failed_run(args: Make, fit: Make, net: Make) -> None:
    before, seen = torch.get_float32_matmul_precision(), []

    def look() -> None:
        seen.append(torch.get_float32_matmul_precision())
        raise RuntimeError("out of luck")

    assert before == "highest"
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(args(float32_matmul_precision="medium"), model=RecordingNet(net(), look))
    assert seen == ["medium"]
    assert torch.get_float32_matmul_precision() == before


class Block(nn.Module):
    """A block with its own class, since torch.nn classes cannot be compiled in place."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Stack(nn.Module):
    """Three equal blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits, labels), logits


@pytest.fixture
def backend() -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """A compile backend named `counting` that records the number of linears and the options of each graph."""
    dynamo = pytest.importorskip("torch._dynamo")
    graphs: list[tuple[int, dict[str, Any]]] = []

    def counting(graph: torch.fx.GraphModule, _: Any, **settings: Any) -> Any:
        linear = [node for node in graph.graph.nodes if node.op == "call_function" and "linear" in str(node.target)]
        graphs.append((len(linear), settings))
        return graph.forward

    registry = dynamo.backends.registry
    dynamo.reset()
    dynamo.register_backend(counting, name="counting")
    yield graphs
    registry._BACKENDS.pop("counting", None)
    registry._COMPILER_FNS.pop("counting", None)
    dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # inside torch.compile
def test_compile_scope_compiles_blocks_or_the_model(args: Make, fit: Make, backend: Any) -> None:
    _, plain = fit(args(), model=Stack())
    assert backend == []
    _, blocks = fit(args(torch_compile_backend="counting"), model=Stack())
    assert {linear for linear, _ in backend} == {1}  # not the head, and one block per graph
    assert {str(settings) for _, settings in backend} == {"{}"}
    backend.clear()
    _, whole = fit(
        args(torch_compile_backend="counting", torch_compile_mode="max-autotune", compile_scope="model"), model=Stack()
    )
    assert {linear for linear, _ in backend} == {4}
    assert {settings["mode"] for _, settings in backend} == {"max-autotune"}
    assert blocks.values == pytest.approx(plain.values, rel=1e-6)
    assert whole.values == pytest.approx(plain.values, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # inside torch.compile
@pytest.mark.parametrize("scope", ["block", "model"])
def test_torch_compile_backends_run(args: Make, fit: Make, backend: Any, scope: str) -> None:
    _, plain = fit(args(), model=Stack())
    for name in ("eager", "aot_eager"):
        _, compiled = fit(args(torch_compile_backend=name, compile_scope=scope), model=Stack())
        assert compiled.values == pytest.approx(plain.values, rel=1e-6)
    assert backend == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # inside torch.compile
def test_the_recompile_limit_is_applied(args: Make, fit: Make, backend: Any) -> None:
    """Blocks of different widths share their code, so each one triggers a recompilation."""

    class Uneven(Stack):
        def __init__(self) -> None:
            super().__init__()
            widths = [4, 5, 6, 7, 8, 4]
            self.blocks = nn.ModuleList(Block(a, b) for a, b in itertools.pairwise(widths))

    before = torch._dynamo.config.recompile_limit
    _, plain = fit(args(max_steps=2), model=Uneven())
    few = {"torch_compile_backend": "counting", "max_steps": 2, "dynamo_recompile_limit": 2}
    _, compiled = fit(args(**few), model=Uneven())
    assert len(backend) == 2
    assert compiled.values == pytest.approx(plain.values, rel=1e-6)
    assert torch._dynamo.config.recompile_limit == before
    torch._dynamo.reset()
    backend.clear()
    fit(args(**few | {"dynamo_recompile_limit": None}), model=Uneven())
    assert len(backend) > 2


def test_a_removed_callback_gets_no_events(args: Make, net: Make, data: Make) -> None:
    class Counting(TrainerCallback):
        def __init__(self) -> None:
            self.steps = 0

        def on_step_end(self, **event: Any) -> None:
            self.steps += 1

    first, second, third = Counting(), Counting(), Counting()
    trainer = BaseTrainer(args(max_steps=2), net(), train_dataset=data(), callbacks=[first, second, third])
    trainer.remove_callback(second)
    trainer.remove_callback(Counting)
    trainer.remove_callback(TrainerCallback)  # which is not installed
    trainer.train()
    assert (first.steps, second.steps, third.steps) == (0, 0, 2)


def test_values_of_any_type_can_be_logged_and_saved(args: Make, fit: Make) -> None:
    from whimbrel.train.run_directory import read_log

    class Measures(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            if event["state"].global_step == 2:
                event["trainer"].log({"eval_accuracy": torch.tensor(0.5), "judgement": "good"})

    trainer, _ = fit(args(max_steps=4, save_strategy="steps", save_steps=4), callbacks=[Measures()])
    lines = read_log(Path(trainer.config.output_dir) / "log.jsonl")
    assert [line for line in lines if "judgement" in line] == [
        {"kind": "log", "after": 2, "eval_accuracy": 0.5, "judgement": "good", "epoch": pytest.approx(2 / 6)}
    ]
    assert saved(trainer) == [4]
