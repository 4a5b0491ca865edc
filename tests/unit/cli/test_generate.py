"""`whimbrel generate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer

from whimbrel.base.errors import CheckpointError, ConfigError, RequestError
from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent
from whimbrel.cli.generate import chat, generate
from whimbrel.inference import generate as tokens_after
from whimbrel.inference import stream_text
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.train.checkpointing import model_state

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(context_length=32, vocab_size=257, num_layers=1, embd_size=16, num_heads=2, tied_head=False))


@pytest.fixture(scope="module")
def directory(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(model, folder, TOKENIZER)
    return folder


def test_prompt_is_continued(model, directory, capsys):
    generate(directory, "Once upon", max_new_tokens=20, temperature=0, device="cpu")
    generated = tokens_after(model, TOKENIZER.encode("Once upon"), max_new_tokens=20, temperature=0)
    printed = capsys.readouterr().out
    assert printed.startswith("Once upon")
    assert ("Once upon" + TOKENIZER.decode(generated)).startswith(printed.removesuffix("\n"))


def test_a_prompt_longer_than_the_context_is_reported(directory, capsys):
    generate(directory, "x" * 31, max_new_tokens=2, temperature=0, device="cpu")
    assert capsys.readouterr().err == ""
    generate(directory, "x" * 40, max_new_tokens=2, temperature=0, device="cpu")
    assert "40 tokens and the context holds 32" in capsys.readouterr().err


def test_special_tokens_in_the_prompt_are_parsed_by_default(model, directory, capsys):
    text = f"a{TOKENIZER.eot_token}b"
    for parse_special, prompt in ((True, [64, TOKENIZER.eot_id, 65]), (False, TOKENIZER.encode(text))):
        generate(directory, text, max_new_tokens=8, temperature=0, device="cpu", parse_special=parse_special)
        generated = tokens_after(model, prompt, max_new_tokens=8, temperature=0)
        assert capsys.readouterr().out == "".join([text, *stream_text(TOKENIZER, prompt, generated), "\n"])


def test_equal_seeds_generate_equal_text(directory, capsys):
    outputs = []
    for seed in (3, 3, 4):
        generate(directory, "", max_new_tokens=10, seed=seed, top_k=40, top_p=0.9, device="cpu")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_run_directory_resolves_to_its_newest_checkpoint(model, directory, tmp_path, capsys):
    older = GPT(model.config)
    for step, saved in ((5, older), (10, model)):
        component = StateComponent("model", model_state(saved, TOKENIZER), SharingPattern.GLOBAL)
        CheckpointManager(tmp_path).save(step, [component])
    for source in (tmp_path, directory):
        generate(source, "To be", max_new_tokens=8, temperature=0, device="cpu")
    from_run, from_model = capsys.readouterr().out.split("To be")[1:]
    assert from_run == from_model


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("nowhere", CheckpointError, "no run or model at nowhere"),
        ("empty", CheckpointError, "run empty has no complete checkpoint yet"),
        ("bare", ConfigError, "bare has no tokenizer: .*--tokenizer"),
        ("model.bin", ConfigError, "model.bin has no tokenizer: .*--tokenizer"),
        ("model.gguf", CheckpointError, "model.gguf is a GGUF file, which cannot be loaded"),
        ("notes.txt", CheckpointError, "expected a run, .*, got the file notes.txt$"),
        ("bare/config.json", CheckpointError, "expected a run, .*, got the file bare/config.json: did you mean bare"),
    ],
)
def test_missing_model_or_tokenizer_is_rejected(model, workdir, path, error, message):
    Path("empty/checkpoints").mkdir(parents=True)
    Path("model.bin").write_bytes(bytes(28))
    Path("model.gguf").write_bytes(b"GGUF")
    Path("notes.txt").write_text("not a model")
    save_model(model, "bare")
    with pytest.raises(error, match=message):
        generate(Path(path), "text", device="cpu")


def test_tokenizer_larger_than_the_vocabulary_is_rejected_before_loading_weights(directory, tmp_path):
    file = tmp_path / "model.bin"
    np.array([16, 32, 1, 2, 2, 257, 32], dtype="<i4").tofile(file)  # a llama2.c header without weights
    continue_prompt = partial(generate, text="a")
    for command, source in ((continue_prompt, directory), (chat, directory), (continue_prompt, file)):
        with pytest.raises(ConfigError, match="at most 257 tokens .* got 50257"):
            command(source, tokenizer=Path("gpt2"), device="cpu")


def test_vocabulary_may_be_larger_than_the_tokenizer(tmp_path, capsys):
    save_model(GPT(GPTConfig(context_length=16, vocab_size=300, num_layers=1, embd_size=16, num_heads=2)), tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer")
    generate(tmp_path, "To be", max_new_tokens=1, tokenizer=tmp_path / "tokenizer", device="cpu")
    assert capsys.readouterr().out.startswith("To be")


def test_prompt_with_a_lone_surrogate_is_rejected(directory):
    with pytest.raises(RequestError, match="lone surrogate at character 3"):
        generate(directory, "caf\udce9", device="cpu")


def test_ignore_eos_continues_after_the_end_of_text_token(model, directory, capsys, monkeypatch):
    end = TOKENIZER.eot_id
    generated = iter([72, end, 73])
    monkeypatch.setattr("whimbrel.inference.engine.sample", lambda *_, **__: torch.tensor([next(generated)]))
    generate(directory, "x", max_new_tokens=3, ignore_eos=True, device="cpu")
    assert capsys.readouterr().out == f"x{TOKENIZER.decode([72])}\n\n{TOKENIZER.decode([73])}\n"
    generated = iter([72, end])
    generate(directory, "x", max_new_tokens=3, device="cpu")
    assert capsys.readouterr().out == f"x{TOKENIZER.decode([72])}\n"
