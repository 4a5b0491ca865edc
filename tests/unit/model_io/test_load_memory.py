"""Peak memory of loading and quantizing a model, measured in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from whimbrel.model_io import load_model, save_model, weight_state_dict
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import quantize_

SHAPE = GPTConfig(
    context_length=16, vocab_size=512, num_layers=8, embd_size=1024, num_heads=8, num_kv_heads=4, mlp_size=3072,
    norm="rms", position="rope", activation="silu", gated_mlp=True, bias="none", tied_head=False,
)  # fmt: skip
LARGEST = 2 * 2 * 3072 * 1024
"""Bytes of the largest weight: the fused gate and up projection."""

FORMS = ("int8", "int4")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Makes the allocator return freed memory to the OS, so that it is counted again in the next measurement."""

MEASURE = """
import gc, sys, threading, time
from whimbrel.model_io import load_model
from whimbrel.precision import quantize_

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

def streamed(path, weight_format):
    return load_model(path, quantize=weight_format)

def naive(path, weight_format):
    model = load_model(path)
    quantize_(model, weight_format)
    return model

large, small, mode, *forms = sys.argv[1:]
load = globals()[mode]
for weight_format in forms:
    load(small, weight_format)  # so that memory which torch allocates on first use is not counted
    gc.collect()
    before = peak = anonymous()
    done = False
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(large, weight_format)
    done = True
    watcher.join()
    print(peak - before)
    del model
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    """A model of 200 MB and a small one, in bf16."""
    folder = tmp_path_factory.mktemp("models")
    small = GPT(GPTConfig(context_length=16, vocab_size=50, num_layers=1, embd_size=128, num_heads=4))
    save_model(small.bfloat16(), folder / "small")
    large = on_meta().to_empty(device="cpu")
    with torch.no_grad():
        for parameter in large.parameters():
            parameter.copy_(torch.randn(1).expand(parameter.shape))
    save_model(large, folder / "large", max_shard_size=100 * 10**6)
    return folder / "large", folder / "small"


def on_meta() -> GPT:
    with torch.device("meta"):
        return GPT(SHAPE).bfloat16()


def size(weight_format: str | None) -> int:
    model = on_meta()
    if weight_format is not None:
        quantize_(model, weight_format)
    return sum(tensor.nbytes for tensor in weight_state_dict(model).values())


def peaks(directories: tuple[Path, Path], mode: str) -> list[int]:
    """Peak anonymous memory of loading, in bytes for each format; memory-mapped files are not counted."""
    command = [sys.executable, "-c", MEASURE, *map(str, directories), mode, *FORMS]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | MALLOC)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_quantizing_on_load_never_has_the_unquantized_model_in_memory(directories):
    for weight_format, streamed, naive in zip(
        FORMS, peaks(directories, "streamed"), peaks(directories, "naive"), strict=True
    ):
        assert naive > 0.9 * size(None), "the unquantized model was not in memory: the measurement is wrong"
        assert (
            0.8 * size(weight_format) < streamed <= size(weight_format) + LARGEST
        )  # four times LARGEST would be acceptable
        assert streamed <= 0.65 * naive


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMS)
def test_quantizing_on_load_limits_gpu_memory(directories, weight_format):
    def peak(load: Callable[[], GPT]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = load()
        assert next(model.parameters()).is_cuda
        return torch.cuda.max_memory_allocated() - before

    def naive() -> GPT:
        model = load_model(directories[0], device="cuda")
        quantize_(model, weight_format)
        return model

    streamed = peak(lambda: load_model(directories[0], device="cuda", quantize=weight_format))
    assert size(weight_format) <= streamed <= size(weight_format) + 4 * LARGEST
    assert streamed <= 0.65 * peak(naive)
