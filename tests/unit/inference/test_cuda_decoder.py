"""The decode step in Triton computes the logits of the model, for the architectures and weight formats it supports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.devices import TRITON_DEVICES

from whimbrel.base.errors import ConfigError
from whimbrel.inference import Engine, EngineConfig, Request, SamplingParams
from whimbrel.inference.cuda_decoder import CudaDecoder, unsupported_reason
from whimbrel.inference.paged_cache import BlockPool, PagedBatch
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora
from whimbrel.precision import quantize_

BASE: dict[str, Any] = {
    "context_length": 64, "vocab_size": 97, "num_layers": 2, "embd_size": 128, "num_heads": 4, "init_std": 0.1,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "position": "rope", "norm": "rms", "bias": "none", "activation": "silu", "gated_mlp": True, "num_kv_heads": 2,
    "tied_head": False, "mlp_size": 352,
}  # fmt: skip
SHAPES = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen3": LLAMA | {"qk_norm": "weighted", "bias": "qkv", "activation": "gelu", "tied_head": True},
    "sliding-window": LLAMA | {"sliding_window": 20},
    "gpt2-fast": LLAMA
    | {"activation": "relu2", "gated_mlp": False, "norm_affine": False, "qk_norm": "unweighted", "embedding_skip": True}
    | {"logit_softcap": 15.0, "residual_scale": "attention", "value_embeddings": 1},
}


def random_model(shape: str, device: str, dtype: torch.dtype = torch.float32, weights: str | None = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(BASE | SHAPES[shape]))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.zero_padding()
    model.to(dtype).to(device)
    if weights is not None:
        quantize_(model, weights)
    return model


@torch.inference_mode()
def largest_difference(model: GPT, steps: int) -> float:
    """The largest difference to the logits of PyTorch, relative to the largest logit, over the steps."""
    device, dtype = model.lm_head.weight.device, model.token_embedding.weight.dtype
    pools = [BlockPool(model.config, 12, 8, dtype=dtype, device=device) for _ in range(2)]
    assert unsupported_reason(model, pools[0]) is None
    decoder = CudaDecoder(model, pools[0])
    table = torch.tensor([[3, 5, 1, 7, 2, 9, 4, 6]], dtype=torch.int32, device=device)
    tokens, starts, counts = (torch.full(size, 1, dtype=torch.int32, device=device) for size in ((1, 1), (1,), (1,)))
    starts.zero_()
    differences = []
    for step in range(steps):
        batch = PagedBatch(pools[1], table, starts.clone(), counts)
        expected = model(tokens, cache=batch).logits[:, -1].float()
        logits, argmax = decoder.step(tokens, table, starts, counts)
        differences.append(float((logits - expected).abs().max() / expected.abs().max()))
        assert argmax.tolist() == logits.argmax(-1).tolist() == tokens[0].tolist()
        assert starts.tolist() == [step + 1]
    return max(differences)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_pytorch(shape: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from whimbrel.ops import decode_triton

    for name, value in {"MIN_TOKENS": 8, "SPLITS": 4, "TILE": 16, "VOCAB_PARTS": 4}.items():  # several parts each
        monkeypatch.setattr(decode_triton, name, value)
    assert largest_difference(random_model(shape, device), 28) < 1e-5


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_quantized_weights(weights: str, device: str) -> None:
    assert largest_difference(random_model("llama", device, weights=weights), 3) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, weights: str | None) -> None:
    model = random_model("llama", "cuda", dtype, weights)
    assert largest_difference(model, 8) < 16 * torch.finfo(dtype).eps


@pytest.mark.gpu
def test_engine_generates_the_same_tokens() -> None:
    model = random_model("llama", "cuda")

    def greedy(**options: Any) -> list[int]:
        engine = Engine(model, EngineConfig(max_batch=1, **options))
        sampling = SamplingParams(temperature=0)
        engine.add_request(Request(prompt_ids=(1, 2, 3), max_new_tokens=40, sampling=sampling))
        tokens: list[int] = []
        while engine.busy:
            tokens += [event.token for event in engine.step() if event.token is not None]
        return tokens

    assert greedy(gpu_kernels=True) == greedy()


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_kernels: needs a GPU"):
        Engine(random_model("llama", "cpu"), EngineConfig(gpu_kernels=True))
    model = random_model("llama", "cpu")
    pool = BlockPool(model.config, 4, 8)
    assert unsupported_reason(model, BlockPool(model.config, 4, 8, codec="int8")) is not None
    quantized = random_model("llama", "cpu", weights="int8-dynamic")
    assert "int8-dynamic is not supported" in str(unsupported_reason(quantized, pool))
    apply_lora(model, LoraConfig(rank=2))
    assert "is a " in str(unsupported_reason(model, pool))
