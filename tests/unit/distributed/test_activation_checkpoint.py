"""Activation checkpointing and offload: gradients are bit-identical, and memory is saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import (
    activation_memory_budget,
    apply_activation_checkpointing,
    find_blocks,
    offload_activations,
)
from whimbrel.models import GPT, GPTConfig

CONFIG = GPTConfig(context_length=16, vocab_size=64, num_layers=3, embd_size=32, num_heads=4)
IDS = torch.arange(24).reshape(2, 12) % 64


class Stack(nn.Module):
    """A model that is not a GPT: blocks with dropout in a ModuleList, and a smaller ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList([nn.Linear(8, 8)])
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.small, *self.layers):
            x = part(x)
        return x


def gpt_gradients(mode: str | None, *, compiled: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    if mode is not None:
        apply_activation_checkpointing(model, mode)
    if compiled:
        for block in find_blocks(model):
            block.compile(backend="aot_eager")
    loss = model(IDS, targets=IDS).loss
    assert loss is not None
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def saved_bytes(model: nn.Module, run: Any) -> int:
    """Bytes that a forward pass saves for backward, without weights."""
    weights = {p.data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes.values())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gpt_gradients_are_bit_identical(mode: str) -> None:
    plain, again = gpt_gradients(None), gpt_gradients(mode)
    assert len(plain) == len(again)
    assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_dropout_uses_the_same_mask(mode: str) -> None:
    torch.manual_seed(0)
    plain = Stack()
    again = copy.deepcopy(plain)
    apply_activation_checkpointing(again, mode)
    for model in (plain, again):
        torch.manual_seed(1)
        model(torch.ones(4, 8)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), again.parameters(), strict=True))


def test_full_checkpointing_saves_memory() -> None:
    def size(mode: str | None) -> int:
        model = GPT(CONFIG)
        if mode is not None:
            apply_activation_checkpointing(model, mode)
        return saved_bytes(model, lambda: model.hidden_states(IDS))

    assert size("full") < size(None) / 3


def test_parameter_names_are_unchanged_and_blocks_wrapped_once() -> None:
    model = GPT(CONFIG)
    names = list(model.state_dict())
    apply_activation_checkpointing(model, "full")
    kinds = {type(block) for block in find_blocks(model)}
    apply_activation_checkpointing(model, "full")
    assert {type(block) for block in find_blocks(model)} == kinds
    assert len(kinds) == 1  # so that compiled blocks share their code
    assert list(model.state_dict()) == names
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, copy.deepcopy(model)(IDS).logits)


@pytest.mark.parametrize("mode", ["full", "selective"])
# Warning by torch.compile about its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_share_one_graph(mode: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(gpt_gradients(mode, compiled=True), gpt_gradients(None))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def hf_model(kind: str) -> Any:
    """A stock model of transformers with its default `use_cache`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config).train()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_transformers_models_have_the_same_gradients(kind: str, mode: str) -> None:
    plain, again = hf_model(kind), hf_model(kind)
    assert plain.config.use_cache
    apply_activation_checkpointing(again, mode)
    apply_activation_checkpointing(again, mode)  # a second time changes nothing
    assert again.is_gradient_checkpointing == (mode == "full")
    for model, settings in ((plain, {"use_cache": False}), (again, {})):  # a cache changes the memory layout of keys
        torch.manual_seed(1)  # GPT-2 has dropout
        model(input_ids=IDS, labels=IDS, **settings).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_selective_checkpointing_does_not_affect_generation(kind: str) -> None:
    model = hf_model(kind).eval()
    apply_activation_checkpointing(model, "selective")
    with torch.no_grad():
        assert model(input_ids=IDS).past_key_values.get_seq_length() == 12
        cache = model(input_ids=IDS[:, :8]).past_key_values
        logits = model(input_ids=IDS[:, 8:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(input_ids=IDS).logits[:, 8:])
        cache = model(input_ids=IDS[:, :8]).past_key_values
    with pytest.raises(ConfigError, match="recompute does not support past_key_values"):
        model(input_ids=IDS[:, 8:], past_key_values=cache)


def test_find_blocks() -> None:
    model = GPT(CONFIG)
    assert find_blocks(model) == list(model.blocks)
    stack = Stack()
    assert find_blocks(stack) == list(stack.layers)
    with pytest.raises(ConfigError, match="Linear has no blocks"):
        apply_activation_checkpointing(nn.Linear(2, 2), "full")


def test_memory_budget_needs_the_compiler() -> None:
    with pytest.raises(ConfigError, match="recompute = 0.5 needs torch.compile"):
        apply_activation_checkpointing(Stack(), 0.5)
    apply_activation_checkpointing(Stack(), 0.5, compiled=True)
    before = functorch.activation_memory_budget
    with activation_memory_budget(0.5):
        assert functorch.activation_memory_budget == 0.5
    with activation_memory_budget("full"):
        assert functorch.activation_memory_budget == before
    assert functorch.activation_memory_budget == before


def test_unknown_mode_is_rejected() -> None:
    with pytest.raises(ConfigError, match="recompute: expected .* got 'half'"):
        apply_activation_checkpointing(Stack(), "half")


def test_offloaded_activations_give_the_same_gradients() -> None:
    plain = gpt_gradients(None)
    with offload_activations(torch.device("cpu")):
        assert all(map(torch.equal, gpt_gradients(None), plain))
    with offload_activations(torch.device("cpu"), enabled=False):
        assert all(map(torch.equal, gpt_gradients("full"), plain))


@pytest.mark.gpu
def test_offloaded_activations_free_gpu_memory() -> None:
    device = torch.device("cuda")
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))).to(device)
    x = torch.ones(4096, 64, device=device)

    def memory_and_grads(enabled: bool) -> tuple[int, list[Tensor]]:
        layers.zero_grad()
        with offload_activations(device, enabled=enabled):
            loss = layers(x).sum()
        torch.cuda.synchronize()
        size = torch.cuda.memory_allocated()
        loss.backward()
        return size, [p.grad.clone() for p in layers.parameters() if p.grad is not None]

    (plain_memory, plain), (offloaded_memory, offloaded) = memory_and_grads(False), memory_and_grads(True)
    assert offloaded_memory < plain_memory - 8 * x.nbytes / 2
    assert all(map(torch.equal, plain, offloaded))
