"""Exported GGUF files generate the same text in transformers and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pipeline
from tokenizers.processors import TemplateProcessing

import whimbrel
from whimbrel.model_io import export_hf
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.config import RopeScaling
from whimbrel.tokenization import Tokenizer, load_tokenizer, train_tokenizer

gguf = pytest.importorskip("gguf", reason="needs the package 'gguf': pip install 'whimbrel[gguf]'")
from whimbrel.model_io.gguf import (  # noqa: E402
    LLAMA3,
    QWEN2,
    export_gguf,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LLAMA = {
    "norm": "rms",
    "norm_eps": 1e-6,
    "position": "rope",
    "activation": "silu",
    "gated_mlp": True,
    "bias": "none",
    "tied_head": False,
    "num_kv_heads": 2,
    "mlp_size": 96,
}
LLAMA3_ROPE = RopeScaling(kind="llama3", factor=8.0, original_context_length=16)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2-untied-narrow": {"tied_head": False, "mlp_size": 100},
    "llama": LLAMA,
    "llama-tied-wide-heads": LLAMA | {"tied_head": True, "head_size": 32},
    "llama-biases": LLAMA | {"bias": "all"},
    "llama3-rope": LLAMA | {"rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
    "linear-rope": LLAMA | {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
    "qwen2": LLAMA | {"bias": "qkv"},
    "qwen3": LLAMA | {"qk_norm": "weighted", "head_size": 128},
}
NEEDS_CONFIG_JSON = ("gpt2-untied-narrow", "llama-biases", "llama3-rope", "linear-rope")
"""Families with settings that transformers does not read from GGUF metadata; it needs their `config.json`."""
CASES = [(family, dtype) for family in FAMILIES for dtype in DTYPES]
NEW_TOKENS = 40


class Trained(NamedTuple):
    """A small model overfitted to one passage, with a prompt and its greedy continuation."""

    directory: Path
    prompt: str
    continuation: list[int]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> dict[str, Trained]:
    """One model directory per family; the vocabulary has three ids more than the tokenizer."""
    tokenizer = train_tokenizer([shakespeare[:100_000]], 384)
    passage = shakespeare[:150]
    ids = torch.tensor(tokenizer.encode(passage))[None]
    prompt = "First Citizen:\nBefore we proceed"
    assert passage.startswith(prompt)
    trained_models = {}
    for family, settings in FAMILIES.items():
        shape = {"context_length": 128, "vocab_size": tokenizer.vocab_size + 3, "num_layers": 2, "num_heads": 4}
        torch.manual_seed(0)
        model = GPT(GPTConfig(**shape | {"embd_size": 64} | settings))
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        for _ in range(300):
            optimizer.zero_grad()
            loss = model(ids[:, :-1], targets=ids[:, 1:]).loss
            loss.backward()
            optimizer.step()
            if loss < 0.01:
                break
        folder = tmp_path_factory.mktemp("gguf") / family
        whimbrel.save_model(model, folder, tokenizer)
        generated = whimbrel.generate(model, tokenizer.encode(prompt), max_new_tokens=NEW_TOKENS, temperature=0)
        assert passage.startswith(prompt + tokenizer.decode(generated)), "the model did not memorize the passage"
        trained_models[family] = Trained(folder, prompt, generated)
    return trained_models


@pytest.fixture(scope="module")
def files(trained: dict[str, Trained], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every model as a GGUF of every dtype."""
    folder = tmp_path_factory.mktemp("files")
    paths = {case: folder / f"{'-'.join(case)}.gguf" for case in CASES}
    for (family, dtype), path in paths.items():
        export_gguf(trained[family].directory, path, dtype=DTYPES[dtype])
    return paths


@pytest.fixture(scope="module")
def answers(files, trained, llama_cpp) -> dict[tuple[str, str], dict[str, Any]]:
    """The output of llama.cpp for every file, from one process."""
    requests = [
        {"model": str(path), "texts": [trained[case[0]].prompt], "prompt": trained[case[0]].prompt, "count": NEW_TOKENS}
        for case, path in files.items()
    ]
    return dict(zip(files, llama_cpp(requests), strict=True))


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_llama_cpp_generates_equal_text(answers, trained, family, dtype):
    tokenizer = load_tokenizer(trained[family].directory)
    answer = answers[family, dtype]
    assert answer["ids"] == [tokenizer.encode(trained[family].prompt)]
    assert answer["tokens"] == trained[family].continuation
    assert answer["text"] == tokenizer.decode(trained[family].continuation)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_transformers_generates_equal_text(files, trained, family, dtype):
    path, (directory, prompt, continuation) = files[family, dtype], trained[family]
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config = {"config": transformers.AutoConfig.from_pretrained(directory)} if family in NEEDS_CONFIG_JSON else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, **config, dtype=DTYPES[dtype])
    for name, tensor in transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(DTYPES[dtype])), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    inputs = tokenizer(prompt, return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
    assert generated.tolist() == load_tokenizer(directory).encode(prompt) + continuation
    assert tokenizer.decode(generated) == prompt + load_tokenizer(directory).decode(continuation)


def test_transformers_loads_a_dequantized_export(trained, tmp_path):
    directory, prompt, continuation = trained["llama"]
    tokenizer = load_tokenizer(directory)
    whimbrel.save_model(whimbrel.load_model(directory, quantize="int8"), tmp_path / "int8", tokenizer)
    export_hf(tmp_path / "int8", tmp_path / "unquantized", dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "unquantized")
    assert model.dtype == torch.bfloat16
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "unquantized")(prompt, return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
    assert generated.tolist() == tokenizer.encode(prompt) + continuation


def train_bpe(text: str, split: Any, *, ignore_merges: bool = False, normalizer: Any = None) -> Pipeline:
    """A byte-level BPE tokenizer trained with this pre-tokenizer."""
    pipeline = Pipeline(models.BPE(ignore_merges=ignore_merges))
    pipeline.pre_tokenizer, pipeline.normalizer = split, normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pipeline.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    pipeline.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    pipeline.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return pipeline


def split_by(pattern: str) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
SPLITS: dict[str, dict[str, Any]] = {
    "gpt-2": {"split": BYTES},
    "olmo": {"split": BYTES, "normalizer": normalizers.NFC()},
    "smollm": {"split": DIGITS},
    "llama-bpe": {"split": split_by(LLAMA3), "ignore_merges": True},
    "dbrx": {"split": split_by(LLAMA3)},
    "qwen2": {"split": split_by(QWEN2), "normalizer": normalizers.NFC()},
}
TEXTS = [
    "In 1984, 12345678 people paid $3.50 or 1,000,000 marks; it's WE'LL they'RE don't.",
    "  two spaces\tand\ttabs   \n\n\n  three line ends\r\n and a return ",
    "def f(x):\n    return x ** 2  # x²\n\n\n",
    "Grüße, naïve café: ½ Ⅷ ٣٤ 日本語の文 한국어 русский עברית 🙂👩‍🔬",
    "<think>a thought</think> <|endoftext|> written out",
    "",
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> dict[str, Path]:
    """A GGUF file for each supported pre-tokenizer, and one with the full GPT-2 tokenizer."""
    training_text = shakespeare[:50_000] + "".join(TEXTS) * 20 + " 10 1984 2024 123 300"
    trained_tokenizers = {name: Tokenizer(train_bpe(training_text, **settings)) for name, settings in SPLITS.items()}
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, tokenizer in (trained_tokenizers | {"gpt-2-full": load_tokenizer("gpt2")}).items():
        config = GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=1, embd_size=4, num_heads=1, context_length=8)
        whimbrel.save_model(GPT(config), folder / name, tokenizer)
        export_gguf(folder / name, folder / f"{name}.gguf", dtype=torch.float16)
    return {name: folder / f"{name}.gguf" for name in (*trained_tokenizers, "gpt-2-full")}


@pytest.fixture(scope="module")
def split_ids(tokenizers, llama_cpp) -> dict[str, list[list[int]]]:
    """The token ids by llama.cpp of each text."""
    requests = [{"model": str(path), "texts": TEXTS, "prompt": None, "count": 0} for path in tokenizers.values()]
    return {name: answer["ids"] for name, answer in zip(tokenizers, llama_cpp(requests), strict=True)}


@pytest.mark.parametrize("name", [*SPLITS, "gpt-2-full"])
def test_llama_cpp_gives_the_same_token_ids(tokenizers, split_ids, name):
    ours = load_tokenizer(tokenizers[name].with_suffix(""))
    assert split_ids[name] == [ours.encode(text) for text in TEXTS]


@pytest.mark.parametrize("name", [*SPLITS, "gpt-2-full"])
def test_transformers_gives_the_same_token_ids(tokenizers, name):
    path = tokenizers[name]
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_tokenizer(path.with_suffix(""))
    for text in TEXTS[:-2]:  # transformers parses special tokens in text
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


def test_llama_cpp_adds_the_same_bos_token(tmp_path, llama_cpp, shakespeare):
    pipeline = train_bpe(shakespeare[:20_000], BYTES)
    bos_id = pipeline.token_to_id("<|endoftext|>")
    pipeline.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos_id)])
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=602, num_layers=1, embd_size=32, num_heads=2, context_length=32, init_std=0.5))
    whimbrel.save_model(model, tmp_path / "model", Tokenizer(pipeline))
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    [answer] = llama_cpp([{"model": str(tmp_path / "model.gguf"), "texts": ["To be"], "prompt": "To be", "count": 6}])
    ids = pipeline.encode("To be").ids
    assert ids == [bos_id, *answer["ids"][0]]
    assert answer["tokens"] == whimbrel.generate(model, ids, max_new_tokens=6, temperature=0)
    assert answer["tokens"] != whimbrel.generate(model, ids[1:], max_new_tokens=6, temperature=0)
