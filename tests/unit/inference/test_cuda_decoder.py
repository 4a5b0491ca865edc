"""The CUDA kernel of the decode step computes the logits of PyTorch: on a GPU, and on a CPU in an emulator."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.cuda_emulator import EMULATED, compile_for_cpu
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError
from whimbrel.inference import Engine, EngineConfig, Request, SamplingParams, cuda_decoder, model_runner
from whimbrel.inference.cuda_decoder import CudaDecoder, GpuLimits, Launch, create_cuda_decoder, unsupported_reason
from whimbrel.inference.paged_cache import BlockPool, PagedBatch
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora
from whimbrel.ops import nvrtc
from whimbrel.ops.compiler import find_compiler
from whimbrel.precision import QuantizedWeight, WeightFormat, quantize_

BF16, FP16 = torch.bfloat16, torch.float16
BASE: dict[str, Any] = {
    "context_length": 64, "vocab_size": 97, "num_layers": 2, "embd_size": 128, "num_heads": 4, "init_std": 0.1,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "position": "rope", "norm": "rms", "bias": "none", "activation": "silu", "gated_mlp": True, "num_kv_heads": 2,
    "tied_head": False, "mlp_size": 352,  # not a multiple of 128 bytes, the unit in which rows are read
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "llama-256": LLAMA | {"embd_size": 256, "mlp_size": 768, "num_heads": 8},  # int4: multiples of 256 columns
    "qwen3": LLAMA | {"qk_norm": "weighted", "bias": "qkv", "activation": "gelu", "tied_head": True},
    "sliding-window": LLAMA | {"sliding_window": 20},
    "gpt2-fast": LLAMA
    | {"activation": "relu2", "gated_mlp": False, "norm_affine": False, "qk_norm": "unweighted", "embedding_skip": True}
    | {"logit_softcap": 15.0, "residual_scale": "attention", "value_embeddings": 1},
}
BLOCK_SIZE = 8
STARTS = (18, 0, 37, 5, 9, 26, 1, 50)
"""Tokens in the cache per sequence: from none to most of the context. 18 reaches a sliding window of 20 in step 3."""


class Target(NamedTuple):
    """Where the kernel runs."""

    device: str
    limits: GpuLimits | None
    compile_kernel: Callable[[str, str, int], Launch] | None

    def decoder(self, model: GPT, pool: BlockPool, batch_size: int = 1) -> CudaDecoder:
        return CudaDecoder(model, pool, batch_size, limits=self.limits, compile_kernel=self.compile_kernel)


@pytest.fixture(scope="session")
def compile_emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Launch]:
    """Compiles equal sources once."""

    @cache
    def compile_kernel(source: str, name: str, shared_bytes: int) -> Launch:
        return compile_for_cpu(tmp_path_factory.mktemp("kernel"), source)

    return compile_kernel


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "cuda":
        return Target("cuda", None, None)
    if sys.platform != "linux" or find_compiler() is None:
        pytest.skip("needs Linux and a C++ compiler")
    return Target("cpu", EMULATED, request.getfixturevalue("compile_emulated"))


def random_model(
    shape: str, device: str = "cpu", dtype: torch.dtype = BF16, weights: str | None = None, **options: Any
) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(BASE | SHAPES[shape]))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.zero_padding()
    model.to(dtype).to(device)
    if weights is not None:
        quantize_(model, weights, **options)
    return model


def tolerance(dtype: torch.dtype, weights: str | None) -> float:
    """The largest difference of logits, relative to the largest logit.

    Every intermediate result is rounded to the dtype. A sum in another order can round to a neighbor, eps away; the
    layers amplify that to 1 to 3 eps. With fp8 weights, activations are rounded to fp8 as well, whose neighbors are up
    to 2**-3 apart: PyTorch's own logits differ by 0.07 to 0.15 if the embeddings are changed by eps.
    """
    return 0.2 if weights == "fp8" else 8 * torch.finfo(dtype).eps


class Decoding(NamedTuple):
    """Sequences with a random KV cache."""

    pool: BlockPool
    tokens: Tensor
    tables: Tensor
    starts: Tensor
    counts: Tensor


def start(model: GPT, starts: Sequence[int], padding: int = 0, codec: str = "none") -> Decoding:
    """The state of sequences with these lengths; the last `padding` ones are padding."""
    batch, device = len(starts), model.lm_head.weight.device
    width = BASE["context_length"] // BLOCK_SIZE
    num_blocks, dtype = 1 + batch * width, model.token_embedding.weight.dtype
    pool = BlockPool(model.config, num_blocks, BLOCK_SIZE, dtype=dtype, device=device, codec=codec)
    generator, slots = torch.Generator().manual_seed(1), torch.arange(num_blocks * BLOCK_SIZE, device=device)
    for layer in range(model.config.num_layers):
        size = 2, len(slots), model.config.kv_heads, model.config.head_dim
        pool.write(*torch.randn(size, generator=generator).to(device, dtype), slots, layer)
    tables = 1 + torch.randperm(batch * width, generator=generator).view(batch, width)
    counts = [1] * (batch - padding) + [0] * padding
    tokens = torch.tensor([[7 * i + 1] for i in range(batch)])
    numbers = (each.to(device, torch.int32) for each in (tokens, tables, torch.tensor(starts), torch.tensor(counts)))
    return Decoding(pool, *numbers)


@torch.inference_mode()
def largest_difference(
    target: Target, model: GPT, starts: Sequence[int], *, steps: int = 4, padding: int = 0, codec: str = "none"
) -> float:
    """The largest difference to the logits and the KV cache of PyTorch, relative to the largest value of each.

    Of quantized KV caches, only the logits of the following steps are compared.
    """
    ours, theirs = (start(model, starts, padding, codec) for _ in range(2))
    assert unsupported_reason(model, ours.pool) is None
    decoder = target.decoder(model, ours.pool, len(starts))
    active, differences = slice(len(starts) - padding), []
    before = [tensor.clone() for tensor in ours.pool.tensors]

    def compare(actual: Tensor, expected: Tensor) -> None:
        differences.append(float((actual - expected).abs().max() / expected.abs().max()))

    for step in range(steps):
        batch = PagedBatch(theirs.pool, ours.tables, ours.starts.clone(), ours.counts)
        expected = model(ours.tokens, cache=batch).logits[:, -1].float()
        logits, argmax = decoder.step(ours.tokens, ours.tables, ours.starts, ours.counts)
        compare(logits[active], expected[active])
        assert argmax.tolist() == logits.argmax(-1).tolist() == ours.tokens[:, 0].tolist()
        assert ours.starts.tolist() == [
            length + (step + 1) * count for length, count in zip(starts, ours.counts.tolist(), strict=True)
        ]
    for mine, other, old in zip(ours.pool.tensors, theirs.pool.tensors, before, strict=True):
        written = ours.tables[active].flatten()
        if codec == "none":
            compare(mine[written].float(), other[written].float())
        kept = [block for block in range(len(old)) if block not in written.tolist()]  # padding included
        assert torch.equal(mine[kept], old[kept])
    return max(differences)


CASES = [  # shape, dtype, weights, batch size, sequences that are padding
    ("gpt2", FP16, None, 1, 0),
    ("gpt2", BF16, "int8", 2, 0),
    ("llama", BF16, None, 1, 0),
    ("llama", FP16, None, 8, 1),
    ("llama", FP16, "int8", 4, 0),
    ("llama", BF16, "fp8", 1, 0),
    ("llama", FP16, "fp8", 8, 1),
    ("llama-256", FP16, "int4", 1, 0),
    ("llama-256", BF16, "int4", 8, 3),
    ("qwen3", BF16, None, 4, 1),
    ("sliding-window", FP16, None, 2, 0),
    ("gpt2-fast", FP16, None, 1, 0),
    ("gpt2-fast", BF16, "fp8", 2, 1),
]


@pytest.mark.parametrize(("shape", "dtype", "weights", "batch", "padding"), CASES)
def test_logits_and_cache_are_those_of_pytorch(
    target: Target, shape: str, dtype: torch.dtype, weights: str | None, batch: int, padding: int
) -> None:
    model = random_model(shape, target.device, dtype, weights)
    assert largest_difference(target, model, STARTS[:batch], padding=padding) < tolerance(dtype, weights)


def test_quantized_embeddings(target: Target) -> None:
    """The embedding, tied to the head, is then looked up by PyTorch."""
    model = random_model("qwen3", target.device, FP16, "int8", embeddings=True)
    assert largest_difference(target, model, STARTS[:2]) < tolerance(FP16, "int8")


def test_quantized_positions(target: Target) -> None:
    model = random_model("gpt2", target.device, FP16)
    positions = model.transformer["wpe"]
    positions.weight = nn.Parameter(QuantizedWeight.quantize(positions.weight, "int8"))
    assert largest_difference(target, model, STARTS[:2]) < tolerance(FP16, "int8")


@pytest.mark.parametrize(("codec", "dtype"), [("int8", FP16), ("fp8", BF16), ("int4", FP16)])
def test_quantized_kv_caches(target: Target, codec: str, dtype: torch.dtype) -> None:
    model = random_model("llama", target.device, dtype)
    difference = largest_difference(target, model, STARTS[:4], padding=1, codec=codec)
    # A number that is rounded to the next of the 16 steps of int4 differs by a fifteenth of the range of its group.
    assert difference < (0.03 if codec == "int4" else tolerance(dtype, None))


@pytest.mark.parametrize("shape", ["llama", "sliding-window"])
def test_attention_is_split_between_blocks(target: Target, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_decoder, "MIN_SPLIT_TOKENS", 8)
    if target.limits is not None:
        target = target._replace(limits=target.limits._replace(blocks=24))
    model = random_model(shape, target.device, BF16)
    assert largest_difference(target, model, (37, 7), steps=3) < tolerance(BF16, None)


@torch.inference_mode()
def test_changed_parameters_are_seen_and_the_first_of_equal_tokens_is_chosen(target: Target) -> None:
    model = random_model("llama", target.device, FP16)
    state = start(model, STARTS[:1])
    decoder = target.decoder(model, state.pool)
    arguments = state.tokens, state.tables, state.starts, state.counts
    best = int(decoder.step(*arguments)[1])
    weight = model.lm_head.weight
    for equal in ([17, 60, 95], [3, 4], list(range(model.config.vocab_size))):
        weight[equal] = weight[best].clone()
        state.tokens.fill_(1)
        state.starts.fill_(STARTS[0])
        logits, argmax = decoder.step(*arguments)
        assert logits[0, equal].unique().tolist() == [float(logits.max())]
        assert argmax.tolist() == state.tokens[0].tolist() == [min(best, *equal)]


@pytest.mark.parametrize("case", ["sequence", "nan", "inf"])
@torch.inference_mode()
def test_logits_that_are_not_finite_have_no_argmax(target: Target, case: str) -> None:
    """Only of the sequence that has them; the tokens stay valid, since the next step looks them up."""
    model = random_model("llama", target.device, FP16)
    state = start(model, STARTS[:2])
    decoder = target.decoder(model, state.pool, 2)
    if case == "sequence":
        model.token_embedding.weight[state.tokens[0]] = float("nan")
    elif case == "nan":
        model.lm_head.weight[40] = float("nan")  # one logit
    else:
        model.lm_head.weight[:, 0] = float("inf")  # of either sign
    logits, argmax = decoder.step(state.tokens, state.tables, state.starts, state.counts)
    finite = case == "sequence"
    assert logits[1].isfinite().all() == finite
    assert not logits[0].isfinite().all()
    assert argmax.tolist() == [-1, int(logits[1].argmax()) if finite else -1]
    assert all(0 <= token < model.config.vocab_size for token in state.tokens.flatten().tolist())


def test_models_that_it_cannot_run() -> None:
    def reason(model: GPT, **options: Any) -> str:
        return str(unsupported_reason(model, BlockPool(model.config, 4, 8, **({"dtype": BF16} | options))))

    model = random_model("llama")
    assert reason(model) == "None"
    assert reason(model, codec="int8") == "None"
    assert "as the KV cache" in reason(model, dtype=FP16)
    assert "float32" in reason(random_model("llama", dtype=torch.float32), dtype=torch.float32)
    assert "head size of 24" in reason(GPT(GPTConfig(**(BASE | LLAMA | {"head_size": 24}))).to(BF16))
    assert "multiple of 16 bytes" in reason(GPT(GPTConfig(**(BASE | LLAMA | {"mlp_size": 100}))).to(BF16))
    assert "int8-dynamic is not supported" in reason(random_model("llama", weights="int8-dynamic"))
    assert "multiple of 256 columns" in reason(random_model("llama", weights="int4"))
    in_groups = random_model("llama-256")
    quantize_(in_groups, WeightFormat("groups", "int4", group_size=64))
    assert "groups of 128" in reason(in_groups)
    mixed = random_model("llama")
    quantize_(next(iter(mixed.blocks)), "int8")
    assert "differ between layers" in reason(mixed)
    hooked = random_model("llama")
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert "has hooks" in reason(hooked)
    apply_lora(model, LoraConfig(rank=2))
    assert "LoraLinear" in reason(model)
    assert create_cuda_decoder(model, BlockPool(model.config, 4, 8, dtype=BF16), 1) is None


def generated(model: GPT, requests: int, **settings: Any) -> list[list[int]]:
    """The prompt and tokens of requests of different lengths, so that the batch becomes smaller and smaller."""
    engine = Engine(model, EngineConfig(max_batch=7, block_size=8, **settings))
    tokens = {}
    for i in range(requests):
        prompt = tuple(range(i, 3 * i + 4))
        request = Request(prompt_ids=prompt, max_new_tokens=8 + 4 * i, sampling=SamplingParams(temperature=0))
        tokens[engine.add_request(request)] = list(prompt)
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                tokens[event.request_id].append(event.token)
    return list(tokens.values())


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "weights"), [("llama", None), ("qwen3", "int8"), ("gpt2-fast", None)])
@torch.inference_mode()
def test_the_engine_generates_the_tokens_of_pytorch(
    shape: str, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def create(model: GPT, pool: BlockPool, batch_size: int) -> CudaDecoder | None:
        sizes.append(batch_size)
        decoder = create_cuda_decoder(model, pool, batch_size)
        assert decoder is not None
        return decoder

    monkeypatch.setattr(model_runner, "create_cuda_decoder", create)
    model = random_model(shape, "cuda", FP16, weights)
    ours = generated(model, 7)
    assert sorted(sizes) == [1, 2, 4, 8]  # a batch of 7 is padded
    theirs = generated(model, 7, gpu_kernels=False)
    assert [len(ids) for ids in ours] == [len(ids) for ids in theirs]
    for i, ids in enumerate(ours):  # equal up to rounding: each token has the largest logit, or nearly so
        logits = model(torch.tensor([ids], device="cuda")).logits[0].float()
        for position in range(2 * i + 3, len(ids) - 1):
            gap = logits[position].max() - logits[position, ids[position + 1]]
            assert gap < 2 * tolerance(FP16, weights) * logits[position].abs().max()


@pytest.mark.gpu
def test_without_nvrtc_pytorch_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> Any:
        raise ConfigError("libnvrtc.so.13 was not found")

    monkeypatch.setattr(nvrtc, "_library", missing)
    with caplog.at_level(logging.WARNING):
        tokens = generated(random_model("llama", "cuda"), 1)
    assert len(tokens[0]) == 4 + 8
    assert "Decoding with PyTorch" in caplog.text
    assert "libnvrtc.so.13" in caplog.text
