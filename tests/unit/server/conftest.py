"""A small model to serve."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from whimbrel.inference import Engine, EngineConfig
from whimbrel.model_io.llama2c import load_llama2c_tokenizer
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from whimbrel.server.served_model import ServedModel


@pytest.fixture(scope="session")
def served() -> ServedModel:
    """Random weights, large enough that greedy decoding does not repeat one token."""
    from whimbrel.server.served_model import ServedModel

    torch.manual_seed(0)
    size = {"context_length": 128, "num_layers": 1, "embd_size": 16, "num_heads": 2}
    model = GPT(GPTConfig(**size, tied_head=False, init_std=0.3, embd_init_std=0.3)).eval()
    return ServedModel(model=model, tokenizer=load_tokenizer("gpt2"), name="tiny", eos_ids=frozenset({50256}))


@pytest.fixture
def engine(served: ServedModel) -> Engine:
    return Engine(served.model, EngineConfig(num_blocks=256, max_batch=16))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece-style tokenizer: adds `<s>` and a leading space, which decoding drops."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), " ", "a", "b", "ab", " ab"]
    packed = b"".join(
        struct.pack("<fi", float(-index), len(piece)) + piece.encode() for index, piece in enumerate(pieces)
    )
    file: Path = tmp_path_factory.mktemp("pieces") / "tokenizer.bin"
    file.write_bytes(struct.pack("<i", 8) + packed)
    return load_llama2c_tokenizer(file)
