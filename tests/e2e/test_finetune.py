"""`whimbrel finetune` on a made task: the model answers held-out prompts and stops by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.commands import whimbrel
from tests.support.finetuning import Pair, reversal_task, save_base_model, write_chats, write_preferences

from whimbrel.inference import generate
from whimbrel.model_io import load, load_model, save_model
from whimbrel.model_io import load_tokenizer as load_model_tokenizer
from whimbrel.models import GPT
from whimbrel.tokenization import ChatTemplate, Tokenizer
from whimbrel.train import load_run_config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_ANSWER = 12
OPTIONS = ("--train.device=cpu", "--train.micro_batch=16", "--train.tokens_per_step=1024", "--plain")


def answer_all(
    model: GPT,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    eos: tuple[int, ...],
    held_out: Sequence[Pair] = reversal_task()[1],
) -> tuple[float, float]:
    """The share of held-out questions that are answered exactly, and of answers that end before the limit."""
    exact = stopped = 0
    for question, expected in held_out:
        prompt = template.encode(tokenizer, [{"role": "user", "content": question}])
        ids = generate(model, prompt, max_new_tokens=MAX_ANSWER, temperature=0.0, stop_ids=eos)
        exact += tokenizer.decode(ids) == expected
        stopped += len(ids) < MAX_ANSWER
    return exact / len(held_out), stopped / len(held_out)


def test_a_base_model_learns_a_task_and_to_stop(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_base_model(Path("base"), special=SPECIAL[:1], template=None, embd_size=64)
    trained, _ = reversal_task()
    write_chats(Path("chats.jsonl"), trained, repeat=30)
    command = ("finetune", "base", "chats.jsonl", "--out-dir", "run", "--full", "--template", "chatml")
    assert whimbrel(*command, "--lr", "3e-3", "--epochs", "1", "--val", "0.05", *OPTIONS) == 0
    printed = capsys.readouterr().out
    for expected in (
        "chats.jsonl (messages)", "chatml (built-in), 2 special tokens added", "sft, all weights", " peak (",
        "Held out", f"[[{trained[0][1]}<|im_end|>]]", "learning rate 0.003",
        "Next: whimbrel chat run (or generate, ",
    ):  # fmt: skip
        assert expected in printed
    loaded = load("run")
    assert loaded.chat_template is not None
    exact, stopped = answer_all(
        loaded.model, loaded.tokenizer, loaded.chat_template, loaded.generation_config.eos_token_ids
    )
    assert exact >= 0.95
    assert stopped >= 0.99

    # The written config is the same run: it resumes at the last step, with nothing left to do.
    steps = [path.name for path in Path("run/checkpoints").iterdir()]
    assert whimbrel("train", "run/config.toml", "--plain") == 0
    assert [path.name for path in Path("run/checkpoints").iterdir()] == steps


def test_a_pretrained_model_learns_a_task_and_to_stop(workdir: Path, shared_data: Path) -> None:
    """A real model of 260K parameters that has never seen a chat."""
    numbers = list(range(100, 1000))
    random.Random(0).shuffle(numbers)
    pairs = [(f"Is {number} odd or even?", "odd" if number % 2 else "even") for number in numbers]
    models = shared_data / "models"
    tokenizer = load_model_tokenizer(models / "aidreams_tok512.bin")
    save_model(load_model(models / "aidreams260K.bin"), Path("base"), tokenizer)
    write_chats(Path("chats.jsonl"), pairs[100:])
    assert whimbrel("finetune", "base", "chats.jsonl", "--out-dir", "run", "--full", "--template", "chatml",
                    "--lr", "3e-3", "--epochs", "3", "--train.device=cpu", "--train.micro_batch=8",
                    "--train.tokens_per_step=1024", "--plain") == 0  # fmt: skip
    loaded = load("run")
    assert loaded.chat_template is not None
    eos = loaded.generation_config.eos_token_ids
    exact, stopped = answer_all(loaded.model, loaded.tokenizer, loaded.chat_template, eos, pairs[:100])
    assert exact >= 0.95
    assert stopped >= 0.99


def test_dry_run_writes_the_config_and_trains_nothing(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_base_model(Path("base"))
    write_preferences(Path("pairs.jsonl"), reversal_task()[0])
    command = ("finetune", "base", "pairs.jsonl", "--out-dir", "run", "--objective", "dpo", "--weights", "int4")
    assert whimbrel(*command, "--dry-run", "--lora.use_rslora=true", "--train.device=cpu") == 0
    printed = capsys.readouterr().out
    assert "pairs.jsonl (preference)" in printed
    assert "Rejected" in printed
    assert "dpo, LoRA rank 16 on all linear layers, int4 weights" in printed
    assert not Path("run/checkpoints").exists()
    config = load_run_config(Path("run/config.toml"))
    assert (config.objective.name, config.model.weights) == ("dpo", "int4")
    assert config.model.path == Path("base").resolve()
    assert config.lora is not None
    assert config.lora.use_rslora


def test_memory_of_several_ranks_is_predicted(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_base_model(Path("base"))
    write_chats(Path("chats.jsonl"), reversal_task()[0], repeat=4)
    command = ("finetune", "base", "chats.jsonl", "--out-dir", "run", "--dry-run", "--train.device=cpu", "--nproc", "2")
    assert whimbrel(*command, "--parallel.strategy=fsdp", "--train.micro_batch=32") == 0
    assert "peak per rank" in capsys.readouterr().out
    assert load_run_config(Path("run/config.toml")).tokens_per_step == 32 * 2 * 64


def test_skipped_rows_and_long_samples_are_reported(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_base_model(Path("base"))
    chats = write_chats(Path("chats.jsonl"), [*reversal_task()[0][:30], ("0" * 30, "1" * 60)])
    with chats.open("a") as file:
        file.write("not JSON\n")
    command = ("finetune", "base", "chats.jsonl", "--out-dir", "run", "--dry-run", "--train.device=cpu")
    assert whimbrel(*command) == 2
    assert "chats.jsonl, line 32" in capsys.readouterr().err
    assert whimbrel(*command, "--skip-bad", "--too-long", "drop") == 0
    printed = capsys.readouterr().out
    assert "1 sample dropped" in printed
    assert "1 sample skipped" in printed
    assert "chats.jsonl, line 32" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--full", "--lora-rank", "8"), "--lora-rank 8 applies to LoRA"),
        (("--full", "--weights", "int4"), "--weights int4 applies to LoRA"),
        (("--full", "--lora.alpha=4"), "--lora.alpha=4 applies to LoRA"),
        (("--objective", "dop"), "--objective: expected one of"),
        (("--weights", "int3"), "model.weights: expected one of int8, int4, fp8"),
        (("--template", "chatlm"), "unknown template"),
    ],
)
def test_wrong_options_are_one_line(
    workdir: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    save_base_model(Path("base"))
    write_chats(Path("chats.jsonl"), reversal_task()[0][:30])
    assert whimbrel("finetune", "base", "chats.jsonl", "--out-dir", "run", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_model_that_does_not_exist_is_one_line(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chats(Path("chats.jsonl"), reversal_task()[0][:30])
    for name, message in (("nowhere", "no run or model at nowhere"), ("owner/model", "HF_HUB_OFFLINE is set")):
        assert whimbrel("finetune", name, "chats.jsonl", "--out-dir", "run") == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
