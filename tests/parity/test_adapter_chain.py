"""SFT with LoRA, then DPO with LoRA on the result: all commands and transformers give the same greedy answers."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.commands import whimbrel as command
from tests.support.finetuning import reversal_task, run_config, save_base_model, write_chats, write_preferences

import whimbrel
from whimbrel.checkpoint import latest_checkpoint
from whimbrel.inference import LLM, SamplingParams
from whimbrel.models import lora_disabled
from whimbrel.train import Trainer, read_log

QUESTIONS = [question for question, _ in reversal_task()[1][:12]]
MAX_ANSWER = 8
OPTIONS = ("--lora-rank", "8", "--train.device=cpu", "--train.micro_batch=8", "--train.tokens_per_step=512", "--plain")
IDS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base model, a run that was trained on chats, and a run that was trained on pairs on top of it."""
    folder = tmp_path_factory.mktemp("chain")
    save_base_model(folder / "base", init_std=0.2, embd_init_std=0.2)
    write_chats(folder / "chats.jsonl", reversal_task()[0], repeat=2)
    write_preferences(folder / "pairs.jsonl", reversal_task()[0])
    before = Path.cwd()
    os.chdir(folder)
    assert command("finetune", "base", "chats.jsonl", "--out-dir", "sft", "--lr", "3e-3", *OPTIONS) == 0
    dpo = ("finetune", "sft", "pairs.jsonl", "--out-dir", "dpo", "--objective", "dpo", "--lr", "1e-3", "--epochs", "1")
    assert command(*dpo, *OPTIONS) == 0
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[str]:
    """The answers of the loaded run."""
    return answer(folder / "dpo")


def answer(path: Path) -> list[str]:
    llm, greedy = LLM(path, device="cpu"), SamplingParams(temperature=0)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [llm.chat(chat, greedy, max_new_tokens=MAX_ANSWER).outputs[0].text for chat in chats]


def test_the_reference_is_the_first_run(folder):
    steps = [line for line in read_log(folder / "dpo" / "log.jsonl") if line["kind"] == "step"]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["rewards/margins"] == 0
    assert steps[-1]["rewards/margins"] > 0
    trained = load_logits(folder / "dpo"), load_logits(folder / "sft"), load_logits(folder / "base")
    for first, second in ((0, 1), (1, 2)):
        assert (trained[first] - trained[second]).abs().max() > 0.01  # both stages changed the model


def load_logits(path: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return whimbrel.load_model(path, **options)(IDS).logits


def test_the_base_model_is_not_the_base_of_the_second_run(folder, tmp_path, capsys):
    options = ("--merge", "--device", "cpu", "--base", folder / "base")
    assert command("finalize", folder / "dpo", tmp_path / "merged", *options) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert "was trained on a base model with different weights than" in error
    assert "(--base)" in error


def test_chat(folder, answers, monkeypatch, capsys):
    assert len(set(answers)) > 1
    for question, expected in zip(QUESTIONS, answers, strict=True):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{question}\n"))
        options = ("--temperature", 0, "--max-new-tokens", MAX_ANSWER, "--device", "cpu")
        assert command("chat", folder / "dpo", *options) == 0
        assert capsys.readouterr().out.strip() == expected.strip()


@pytest.mark.parametrize("how", ["finalize", "export"])
def test_merged_directory_in_transformers(folder, answers, tmp_path, how):
    options = ("--merge", "--device", "cpu") if how == "finalize" else ()
    assert command(how, folder / "dpo", tmp_path / "merged", *options) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    found = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**inputs, max_new_tokens=MAX_ANSWER, do_sample=False, pad_token_id=0)
        found.append(tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True))
    assert found == answers


def test_an_unmerged_copy_names_the_first_run(folder, answers, tmp_path):
    assert command("finalize", folder / "dpo", tmp_path / "peft") == 0
    assert answer(tmp_path / "peft") == answers


@pytest.mark.parametrize(
    ("first", "second", "lora"),
    [(None, None, True), ("int8", None, True), (None, "int8", True), ("int4", "int8", True), ("int8", None, False)],
)
def test_a_loaded_chain_is_the_model_that_was_trained(folder, tmp_path, first, second, lora):
    """With quantized weights in either run: the first adapter is merged, then the result is quantized if asked."""

    def config(name: str, path: Path, data: str, weights: str | None, **sections: Any) -> Any:
        model = {"path": str(path)} | ({} if weights is None else {"weights": weights})
        return run_config(path, folder / data, tmp_path / name, model=model, train={"steps": 4}, **sections)

    adapters = {"lora": {"rank": 4}}
    Trainer.from_config(config("sft", folder / "base", "chats.jsonl", first, **adapters)).train()
    sections = {"objective": {"name": "dpo"}, **(adapters if lora else {})}
    trainer = Trainer.from_config(config("dpo", tmp_path / "sft", "pairs.jsonl", second, **sections))
    start = trainer.unwrapped_model()
    with torch.no_grad(), lora_disabled(start):
        reference = start.eval()(IDS).logits
    trainer.train()
    with torch.no_grad():
        trained = trainer.unwrapped_model().eval()(IDS).logits
    assert (trained - reference).abs().max() > 1e-3
    if second is None:
        torch.testing.assert_close(load_logits(tmp_path / "sft"), reference, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(load_logits(tmp_path / "dpo"), trained, atol=1e-5, rtol=1e-5)
    if lora:
        merged = load_logits(latest_checkpoint(tmp_path / "dpo") / "model", base=tmp_path / "sft", merge=True)
        torch.testing.assert_close(merged, trained, atol=1e-5, rtol=1e-5)
