"""A run with adapters gives the same greedy text everywhere: our commands, PEFT, transformers and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from tests.support.commands import whimbrel as command
from torch import Tensor

import whimbrel
from whimbrel.inference import LLM, SamplingParams
from whimbrel.model_io import load_tokenizer, save_model
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora
from whimbrel.tokenization import Tokenizer, train_tokenizer
from whimbrel.train import Trainer, TrainingArguments

peft = pytest.importorskip("peft", reason="needs the package 'peft': pip install 'whimbrel[hf]'")

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}
PROMPT, NEW_TOKENS = "First Citizen:\nBefore we proceed", 30


class Tuned(NamedTuple):
    """A run with adapters that memorized a passage, and its greedy continuation of the prompt."""

    run: Path
    base: Path
    tokenizer: Tokenizer
    continuation: list[int]

    @property
    def prompt_ids(self) -> list[int]:
        return self.tokenizer.encode(PROMPT)


def fit(model: GPT, ids: Tensor, run: Path, tokenizer: Tokenizer, steps: int) -> None:
    rows = [{"input_ids": ids, "labels": ids}] * 2
    args = TrainingArguments(
        output_dir=str(run), max_steps=steps, save_strategy="no", learning_rate=1e-2, lr_scheduler_type="constant",
        per_device_train_batch_size=1, report_to="none", use_cpu=True, weight_decay=0.0, disable_tqdm=True,
        logging_strategy="no", async_save=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_checkpoint()


@pytest.fixture(scope="module", params=["dense", "dora", "int8"])
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Tuned:
    folder = tmp_path_factory.mktemp("tuned")
    tokenizer = train_tokenizer([shakespeare[:50_000]], 320)
    shape = {"context_length": 128, "vocab_size": tokenizer.vocab_size, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    base = GPT(GPTConfig(**shape, embd_size=64, num_kv_heads=2, mlp_size=96, init_std=0.1, **LLAMA))
    save_model(base, folder / "base", tokenizer)
    model = whimbrel.load_model(folder / "base", quantize="int8" if request.param == "int8" else None)
    apply_lora(model, LoraConfig(rank=16, alpha=32, use_dora=request.param == "dora"))
    ids = torch.tensor(tokenizer.encode(shakespeare[:140]))
    fit(model, ids, folder / "run", tokenizer, steps=60)
    continuation = whimbrel.generate(model, tokenizer.encode(PROMPT), max_new_tokens=NEW_TOKENS, temperature=0)
    assert shakespeare.startswith(PROMPT + tokenizer.decode(continuation)), "the adapter did not memorize the passage"
    return Tuned(folder / "run", folder / "base", tokenizer, continuation)


def greedy(model: torch.nn.Module, tuned: Tuned) -> list[int]:
    ids = torch.tensor([tuned.prompt_ids])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, ids.size(1) :].tolist()


def test_generate_and_llm(tuned, capfd):
    assert (
        command("generate", tuned.run, PROMPT, "--temperature", 0, "--max-new-tokens", NEW_TOKENS, "--device", "cpu")
        == 0
    )
    assert capfd.readouterr().out == PROMPT + tuned.tokenizer.decode(tuned.continuation) + "\n"
    sampling = SamplingParams(temperature=0)
    [output] = LLM(tuned.run, device="cpu").generate([tuned.prompt_ids], sampling, max_new_tokens=NEW_TOKENS)
    assert output.outputs[0].tokens == tuned.continuation


def test_peft_on_transformers(tuned, tmp_path):
    assert command("finalize", tuned.run, tmp_path / "adapter") == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(tuned.base)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert greedy(model, tuned) == tuned.continuation


def test_merged_directory_in_transformers(tuned, tmp_path):
    assert command("finalize", tuned.run, tmp_path / "merged", "--merge", "--device", "cpu") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert greedy(model, tuned) == tuned.continuation
    assert load_tokenizer(tmp_path / "merged").fingerprint == tuned.tokenizer.fingerprint


def test_gguf_in_llama_cpp(tuned, llama_cpp, tmp_path):
    pytest.importorskip("gguf", reason="needs the package 'gguf': pip install 'whimbrel[gguf]'")
    assert command("export", tuned.run, tmp_path / "model.gguf") == 0
    request = {"model": str(tmp_path / "model.gguf"), "texts": [PROMPT], "prompt": PROMPT, "count": NEW_TOKENS}
    [answer] = llama_cpp([request])
    assert answer["ids"] == [tuned.prompt_ids]
    assert answer["tokens"] == tuned.continuation
