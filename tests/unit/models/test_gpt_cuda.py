"""The decoder on a CUDA device: compiled, in bf16, with every kind of mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from whimbrel.cache import DynamicCache
from whimbrel.distributed.activation_checkpoint import apply_activation_checkpointing
from whimbrel.models import GPT, LoraConfig, apply_lora, lora_parameters, preset
from whimbrel.precision import quantize_

pytestmark = pytest.mark.gpu

SMALL = {"context_length": 256, "vocab_size": 1000, "num_layers": 3, "embd_size": 256, "num_heads": 4}


def build(name: str, **settings: object) -> GPT:
    torch.manual_seed(0)
    config = preset(name)
    kv_heads = 2 if config.num_kv_heads else None
    return GPT(replace(config, **SMALL, num_kv_heads=kv_heads, head_size=None, mlp_size=None, **settings))


# Warning by torch.compile about its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["gpt2-baseline", "gpt2-fast", "llama3-8b"])
def test_compiled_low_precision_training_follows_plain_fp32(name):
    losses = {}
    for device in ("cpu", "cuda"):
        model = build(name, embd_init_std=0.02).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randint(1000, (4, 257), generator=torch.Generator().manual_seed(1)).to(device)
        if device == "cuda":
            torch._dynamo.reset()
            counters.clear()
            for block in model.blocks:
                block.compile()
        losses[device] = []
        for _ in range(5):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = model(x[:, :-1], targets=x[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[device].append(loss.item())
    fused = name == "gpt2-baseline"  # its blocks have kernels of their own
    assert counters["stats"]["unique_graphs"] == (0 if fused else 1)
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=0.03)
    assert losses["cuda"][-1] < losses["cuda"][0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("weight_format", [None, "int8", "int4", "fp8"])
def test_compiled_low_precision_adapters_follow_plain_fp32(weight_format):
    losses = {}
    for device in ("cpu", "cuda"):
        model = build("llama3-8b", embd_init_std=0.02)
        if weight_format is not None:
            quantize_(model, weight_format)
        apply_lora(model, LoraConfig())
        model.to(device)
        optimizer = torch.optim.AdamW([parameter for _, parameter in lora_parameters(model)], lr=1e-3)
        x = torch.randint(1000, (4, 257), generator=torch.Generator().manual_seed(1)).to(device)
        if device == "cuda":
            torch._dynamo.reset()
            apply_activation_checkpointing(model, "full", compiled=True)
            for block in model.blocks:
                block.compile(fullgraph=True)
        losses[device] = []
        for _ in range(5):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = model(x[:, :-1], targets=x[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[device].append(loss.item())
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=0.03)
    assert losses["cuda"][-1] < losses["cuda"][0]


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mistral-7b", "qwen3-0.6b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_and_caches_agree_with_the_cpu(name, dtype):
    windows = {"sliding_window": 50} if name == "mistral-7b" else {}
    model = build(name, **windows)
    x = torch.randint(1000, (2, 200), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(200) // 70).expand(2, 200)
    tolerance = {"atol": 1e-3 if dtype == torch.float32 else 0.05, "rtol": 0}
    with torch.no_grad():
        expected, apart = model(x).logits, model(x, documents=documents).logits
        model, x, cache = model.to("cuda", dtype), x.cuda(), DynamicCache()
        torch.testing.assert_close(model(x).logits.float().cpu(), expected, **tolerance)
        torch.testing.assert_close(model(x, documents=documents.cuda()).logits.float().cpu(), apart, **tolerance)
        parts = [model(part, cache=cache).logits for part in x.split([150, 1, 49], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1).float().cpu(), expected, **tolerance)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("window", [None, 50])
def test_packed_attention_has_the_gradients_of_masked_attention(window, recompute, compiled):
    """Flash attention over documents against the mask of all pairs of tokens, for any number of documents."""
    torch._dynamo.reset()
    counters.clear()
    model, reference = (build("llama3-8b", embd_init_std=0.02, sliding_window=window).to("cuda") for _ in range(2))
    apply_activation_checkpointing(model, recompute, compiled=compiled)
    for block in model.blocks if compiled else ():
        block.compile(fullgraph=True)
    generator = torch.Generator().manual_seed(1)
    for num_documents in (1, 3, 10):
        x = torch.randint(1000, (2, 256), generator=generator).cuda()
        documents = torch.randint(num_documents, (2, 256), generator=generator).sort(dim=1).values.cuda()
        gradients = []
        for module, kernel in ((model, SDPBackend.FLASH_ATTENTION), (reference, SDPBackend.MATH)):
            module.zero_grad()
            with sdpa_kernel(kernel), torch.autocast("cuda", dtype=torch.bfloat16):
                module(x, targets=x, documents=documents).loss.backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))
        assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()
    assert counters["stats"]["unique_graphs"] <= (2 if compiled else 0)  # the first block may have its own
