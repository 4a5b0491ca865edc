"""A tiny chat model with random weights, and chats of a task that it can learn in seconds."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import CHATML, CHATML_GENERATION
from tests.support.models import small_preset

from whimbrel.model_io import save_model
from whimbrel.models import GPT
from whimbrel.tokenization import Tokenizer, train_tokenizer
from whimbrel.train import RunConfig
from whimbrel.train.run_config import build_run_config

CHAT_TOKENS = ("<|im_end|>", "<|im_start|>")
Pair = tuple[str, str]


def save_base_model(
    directory: Path,
    *,
    tokenizer: Tokenizer | None = None,
    special: Sequence[str] = CHAT_TOKENS,
    template: str | None = CHATML_GENERATION,
    **sizes: Any,
) -> Path:
    """A Llama-shaped model, by default with a byte tokenizer, whose first special token ends a turn."""
    tokenizer = tokenizer or byte_tokenizer(special)
    sizes = {"vocab_size": tokenizer.vocab_size, "context_length": 64, "num_layers": 2, **sizes}
    torch.manual_seed(0)
    save_model(GPT(small_preset("llama3-8b", **sizes)), directory, tokenizer)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def save_small_chat_model(directory: Path, *, is_base: bool = False) -> Path:
    """A model in the place of one on the Hub, with a BPE tokenizer; a base model has no template and no chat tokens."""
    words = "You sort support tickets. Where is order 1234? system user assistant shipping returns billing account "
    tokenizer, sizes = train_tokenizer([words * 4], 320), {"context_length": 512, "embd_size": 64}
    if is_base:
        return save_base_model(directory, tokenizer=tokenizer, template=None, **sizes)
    tokenizer = tokenizer.with_special_tokens(CHAT_TOKENS, eot_token=CHAT_TOKENS[0])
    return save_base_model(directory, tokenizer=tokenizer, template=CHATML, **sizes)


def reversal_task(digits: str = "0123", max_length: int = 4, held_out: int = 60) -> tuple[list[Pair], list[Pair]]:
    """Strings and their reversals, for training and held out."""
    strings = ["".join(s) for n in range(1, max_length + 1) for s in itertools.product(digits, repeat=n)]
    random.Random(0).shuffle(strings)
    pairs = [(text, text[::-1]) for text in strings]
    return pairs[held_out:], pairs[:held_out]


def write_chats(path: Path, pairs: Iterable[Pair], repeat: int = 1) -> Path:
    """A jsonl file of conversations of one question and one answer."""
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(repeat) for row in rows))
    return path


def write_preferences(path: Path, pairs: Iterable[Pair]) -> Path:
    """A jsonl file in which the reversal is preferred to the string itself."""
    rows = [{"prompt": question, "chosen": answer, "rejected": question + "!"} for question, answer in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_config(model: Path, data: Path | Sequence[str], output: Path, /, **sections: dict[str, Any]) -> RunConfig:
    """A short run on the CPU; `sections` add to or replace settings."""
    table: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"path": str(data) if isinstance(data, Path) else list(data)},
        "train": {"micro_batch": 4, "tokens_per_step": 512, "device": "cpu", "clip": 1.0},
        "optim": {"lr": 3e-3},
    }
    for name, settings in sections.items():
        table[name] = table.get(name, {}) | settings
    if not {"steps", "epochs", "tokens"} & table["train"].keys():
        table["train"]["steps"] = 3
    return build_run_config({"output_dir": str(output), **table})
