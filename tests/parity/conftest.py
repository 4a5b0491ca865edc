"""Small random transformers models of each family."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.models import add_noise

transformers = pytest.importorskip(
    "transformers", reason="needs the package 'transformers': pip install 'whimbrel[hf]'"
)

LLAMA_SHAPE = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {
    "vocab_size": 99,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}

SHAPES = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt2-untied-exact-gelu": (
        "GPT2Config",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 100},
    ),
    "llama2": ("LlamaConfig", LLAMA_SHAPE | {"num_key_value_heads": 4}),
    "llama3-rope": ("LlamaConfig", LLAMA_SHAPE | {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "LlamaConfig",
        LLAMA_SHAPE | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-attention-bias": ("LlamaConfig", LLAMA_SHAPE | {"attention_bias": True}),
    "llama-all-bias": ("LlamaConfig", LLAMA_SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "smollm": (
        "LlamaConfig",
        LLAMA_SHAPE | {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "mistral": ("MistralConfig", LLAMA_SHAPE | {"sliding_window": 7, "head_dim": 20}),
    "mistral-no-window": ("MistralConfig", LLAMA_SHAPE | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", LLAMA_SHAPE | {"tie_word_embeddings": True}),
    "qwen2-windows": (
        "Qwen2Config",
        LLAMA_SHAPE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", LLAMA_SHAPE | {"head_dim": 24}),
    "qwen3-tied": ("Qwen3Config", LLAMA_SHAPE | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(params=SHAPES)
def hf_model(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    """A transformers model with noise added to every parameter, so that each one affects the output."""
    name, settings = SHAPES[request.param]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).eval()
    return add_noise(model, 0.1)


@pytest.fixture
def ids() -> torch.Tensor:
    """Two random sequences, longer than every sliding window."""
    return torch.randint(99, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def logits() -> Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]:
    """A function that returns the logits of a model, ours or transformers'."""

    def run(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids).logits

    return run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A path to save a model to."""
    return tmp_path / "model"


@pytest.fixture(scope="module")
def torchao() -> Iterator[ModuleType]:
    """The torchao package with its submodules; warnings about missing kernels are ignored."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = pytest.importorskip("torchao", reason="needs the package 'torchao': pip install 'whimbrel[lowbit]'")
        for part in ("float8", "optim", "quantization", "quantization.granularity", "quantization.qat"):
            importlib.import_module(f"torchao.{part}")
        yield package
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The lm_eval package, with warnings ignored and a temporary datasets cache."""
    pytest.importorskip("lm_eval", reason="needs the package 'lm-eval': pip install 'whimbrel[lm-eval]'")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("DISABLE_MULTIPROC", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        import lm_eval
        import lm_eval.api.instance
        import lm_eval.evaluator
        import lm_eval.models.huggingface
        import lm_eval.tasks

        yield lm_eval


@pytest.fixture(scope="session")
def llama_cpp(root: Path) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Run requests (see llama_cpp.mjs) with the llama.cpp that `make test` installs, or that at WHIMBREL_LLAMA_CPP."""
    folder = Path(os.environ.get("WHIMBREL_LLAMA_CPP", root / ".venv" / "llama.cpp"))
    if not folder.is_dir():
        pytest.skip("no llama.cpp: scripts/install-llama-cpp FOLDER, then WHIMBREL_LLAMA_CPP=FOLDER")

    def run(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        command = ["node", str(Path(__file__).with_name("llama_cpp.mjs")), str(folder)]
        done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers

    return run
