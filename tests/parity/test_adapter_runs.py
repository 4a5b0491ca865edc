"""A model fine-tuned with adapters gives the same greedy answers everywhere, and stops by itself.

LoRA, DoRA and QLoRA runs of `whimbrel finetune` on a made task, with held-out prompts: `chat`, `generate`, `serve` with
OpenAI's client, PEFT, the merged directory in transformers and the GGUF file in llama.cpp. Also LoRA with a template
whose special tokens the base model does not have.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tests.support.chat_templates import CHATML
from tests.support.commands import whimbrel
from tests.support.finetuning import reversal_task, save_base_model, write_chats

from whimbrel.inference import LLM, SamplingParams
from whimbrel.model_io import load_tokenizer
from whimbrel.tokenization import train_tokenizer

peft = pytest.importorskip("peft", reason="needs the package 'peft': pip install 'whimbrel[hf]'")

SPECIAL = ("<|im_start|>", "<|im_end|>")
TRAINED, HELD_OUT = reversal_task()
PROMPTS = [question for question, _ in HELD_OUT]
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0)
OPTIONS = ("--epochs", "1", "--lr", "5e-3", "--train.device=cpu", "--train.micro_batch=16")
OPTIONS += ("--train.tokens_per_step=1024", "--plain")
ADAPTERS = {
    "lora": (),
    "dora": ("--lora.use_dora=true",),
    "int8": ("--weights", "int8"),
    "new-tokens": ("--template", "chatml"),
}
PLAIN = """
{%- for message in messages %}
    {{- '<' + message['role'] + '\\n' + message['content'] + ';' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant\\n' }}{% endif %}
"""
"""A format without special tokens."""


class Answers(NamedTuple):
    """The answers to the held-out prompts, and how many ended before the limit."""

    texts: list[str]
    num_stopped: int

    @property
    def accuracy(self) -> float:
        return sum(text == expected for text, (_, expected) in zip(self.texts, HELD_OUT, strict=True)) / len(HELD_OUT)


class Tuned(NamedTuple):
    """A run with adapters, its base model, and its answers."""

    run: Path
    base: Path
    answers: Answers


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(path: Path) -> Answers:
    llm = LLM(path, device="cpu")
    outputs = [llm.chat(user(text), GREEDY, max_new_tokens=MAX_TOKENS).outputs[0] for text in PROMPTS]
    return Answers([output.text or "" for output in outputs], sum(output.finish_reason == "stop" for output in outputs))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama model with its own chat template that has seen too little of the task to answer correctly."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(["user assistant " * 4], 270).with_special_tokens(SPECIAL, eot_token=SPECIAL[1])
    shape = {"embd_size": 64, "init_std": 0.05, "embd_init_std": 0.05}
    save_base_model(folder / "random", tokenizer=tokenizer, template=CHATML, **shape)
    chats = write_chats(folder / "chats.jsonl", TRAINED, repeat=4)
    assert whimbrel("finetune", folder / "random", chats, "--out-dir", folder / "run", "--full", *OPTIONS) == 0
    assert whimbrel("finalize", folder / "run", folder / "base", "--device", "cpu") == 0
    assert ask(folder / "base").accuracy < 0.5
    return folder / "base"


@pytest.fixture(scope="module")
def plain_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama model that has seen the task in a format without special tokens."""
    folder = tmp_path_factory.mktemp("plain")
    shape = {"embd_size": 64, "init_std": 0.05, "embd_init_std": 0.05}
    tokenizer = train_tokenizer(["user assistant " * 4], 270)
    save_base_model(folder / "random", tokenizer=tokenizer, template=PLAIN, **shape)
    chats = write_chats(folder / "chats.jsonl", TRAINED, repeat=8)
    assert whimbrel("finetune", folder / "random", chats, "--out-dir", folder / "run", "--full", *OPTIONS) == 0
    assert whimbrel("finalize", folder / "run", folder / "base", "--device", "cpu") == 0
    (folder / "base" / "chat_template.jinja").unlink()
    return folder / "base"


@pytest.fixture(scope="module", params=ADAPTERS)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    base = request.getfixturevalue("plain_base" if request.param == "new-tokens" else "base")
    folder = tmp_path_factory.mktemp(request.param)
    chats = write_chats(folder / "chats.jsonl", TRAINED, repeat=13)
    assert whimbrel("finetune", base, chats, "--out-dir", folder / "run", *ADAPTERS[request.param], *OPTIONS) == 0
    return Tuned(folder / "run", base, ask(folder / "run"))


def test_held_out_prompts_are_answered(tuned: Tuned):
    assert tuned.answers.accuracy >= 0.95
    assert tuned.answers.num_stopped >= 0.99 * len(PROMPTS)


@pytest.mark.parametrize("tuned", ["new-tokens"], indirect=True)
def test_new_tokens_need_their_trained_rows(tuned: Tuned):
    llm = LLM(tuned.run, device="cpu")
    tokens = [token for token in range(llm.tokenizer.vocab_size) if llm.tokenizer.decode([token]) in SPECIAL]
    assert len(tokens) == len(SPECIAL)
    with torch.no_grad():
        for weight in (llm.model.token_embedding.weight, llm.model.lm_head.weight):
            weight[tokens] = weight[: min(tokens)].mean(0)
    answers = [llm.chat(user(text), GREEDY, max_new_tokens=MAX_TOKENS).outputs[0].text for text in PROMPTS[:20]]
    assert sum(a == b for a, b in zip(answers, tuned.answers.texts, strict=False)) < 10


def test_chat_and_generate(tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    options = ("--temperature", 0, "--max-new-tokens", MAX_TOKENS, "--device", "cpu")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n/reset\n".join(PROMPTS) + "\n"))
    assert whimbrel("chat", tuned.run, *options) == 0
    assert capfd.readouterr().out.split() == tuned.answers.texts
    prompt = f"<|im_start|>user\n{PROMPTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert whimbrel("generate", tuned.run, prompt, *options) == 0
    assert capfd.readouterr().out == f"{prompt}{tuned.answers.texts[0]}\n"


@pytest.mark.parametrize("tuned", ["lora"], indirect=True)
def test_serve_with_the_client_of_openai(tuned: Tuned):
    openai = pytest.importorskip("openai", reason="needs the package 'openai'")
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    from tests.e2e.serving import serving

    with serving(tuned.run) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key) as client:

        def complete(text: str) -> Any:
            options = {"temperature": 0, "max_tokens": MAX_TOKENS}
            return client.chat.completions.create(model="run", messages=user(text), **options).choices[0]

        with ThreadPoolExecutor(8) as pool:
            choices = list(pool.map(complete, PROMPTS))
    answers = Answers(
        [choice.message.content for choice in choices], sum(choice.finish_reason == "stop" for choice in choices)
    )
    assert answers == tuned.answers


def ask_transformers(model: Any, directory: Path) -> Answers:
    """Greedy answers with the template, tokenizer and generation config of the directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer.apply_chat_template(user(text), add_generation_prompt=True)["input_ids"] for text in PROMPTS]
    generated: dict[int, list[int]] = {}
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for length, group in groupby(by_length, key=lambda index: len(prompts[index])):
        indices = list(group)
        ids = torch.tensor([prompts[index] for index in indices])
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[:, length:]
        generated |= dict(zip(indices, output.tolist(), strict=True))
    return decode(tokenizer, [generated[index] for index in range(len(prompts))], tokenizer.eos_token_id)


def decode(tokenizer: Any, answers: Sequence[list[int]], end: int) -> Answers:
    texts = [tokenizer.decode(ids[: ids.index(end)] if end in ids else ids) for ids in answers]
    return Answers(texts, sum(end in ids for ids in answers))


def test_peft_on_transformers(tuned: Tuned, tmp_path: Path):
    assert whimbrel("finalize", tuned.run, tmp_path / "adapter") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned.base)
    if (vocab_size := load_tokenizer(tuned.run).vocab_size) > model.config.vocab_size:
        assert f"model.resize_token_embeddings({vocab_size})" in (tmp_path / "adapter" / "README.md").read_text()
        model.resize_token_embeddings(vocab_size)
    assert ask_transformers(peft.PeftModel.from_pretrained(model, tmp_path / "adapter"), tmp_path / "adapter") == (
        tuned.answers
    )


def test_merged_directory_in_transformers(tuned: Tuned, tmp_path: Path):
    assert whimbrel("finalize", tuned.run, tmp_path / "merged", "--merge", "--device", "cpu") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert ask_transformers(model, tmp_path / "merged") == tuned.answers


def test_gguf_in_llama_cpp(tuned: Tuned, llama_cpp, tmp_path: Path):
    """llama.cpp renders the template in the file, and stops at its end-of-text token."""
    pytest.importorskip("gguf", reason="needs the package 'gguf': pip install 'whimbrel[gguf]'")
    assert whimbrel("export", tuned.run, tmp_path / "model.gguf") == 0
    [answer] = llama_cpp([{"model": str(tmp_path / "model.gguf"), "chats": PROMPTS, "count": MAX_TOKENS}])
    assert whimbrel("finalize", tuned.run, tmp_path / "adapter") == 0
    tokenizer = load_tokenizer(tmp_path / "adapter")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")
    rendered = [theirs.apply_chat_template(user(text), add_generation_prompt=True)["input_ids"] for text in PROMPTS]
    assert [chat["ids"] for chat in answer["chats"]] == rendered
    assert decode(tokenizer, [chat["tokens"] for chat in answer["chats"]], tokenizer.eot_id) == tuned.answers
