"""DPO, ORPO and SFT against TRL: loss, metrics and gradients of the same batch, in fp32."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.parity.conftest import LLAMA_SHAPE
from tests.support.finetuning import run_config, save_base_model
from tests.support.models import add_noise
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import whimbrel
from whimbrel.train import DPO, ORPO, precompute_reference, read_log
from whimbrel.train import train as whimbrel_train
from whimbrel.train.objectives import ModelObjective, Objective

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
REWARDS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
PAIRS = [("w5 w6 w7", "w8 w9 w10 w11", "w12"), ("w1", "w2 w3", "w4 w5 w6"), ("w7 w8", "w1 w1 w2", "w30 w31 w2 w3")]
"""Prompts with chosen and rejected completions; each word is a token."""

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl", reason="needs the package 'trl': pip install trl")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per word: w1 is token 1; 97 pads and 98 ends a completion."""
    words = {f"w{index}": index for index in range(97)} | {"<pad>": 97, "<eos>": 98}
    words_tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    words_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words_tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )


def make_llama(seed: int) -> Any:
    torch.manual_seed(seed)
    return add_noise(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_SHAPE)).eval(), 0.1)


@pytest.fixture
def convert(tmp_path: Path) -> Callable[[Any], nn.Module]:
    """Our model with the weights of a transformers model."""

    def run(model: Any) -> nn.Module:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        return whimbrel.load_model(folder)

    return run


@pytest.fixture
def assert_equal_gradients(convert: Any) -> Callable[[nn.Module, Any], None]:
    """Compares all gradients of our model, or of a transformers model, with those of a transformers model."""

    def check(ours: nn.Module, theirs: Any) -> None:
        gradients = copy.deepcopy(theirs)
        with torch.no_grad():
            for parameter, source in zip(gradients.parameters(), theirs.parameters(), strict=True):
                parameter.copy_(source.grad)
        if type(ours) is not type(theirs):
            gradients = convert(gradients)
        for (name, parameter), expected in zip(ours.named_parameters(), gradients.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")

    return check


def shifted(input_ids: Tensor, is_completion: Tensor) -> Tensor:
    labels = input_ids.masked_fill(is_completion == 0, -100)
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def as_pairs(input_ids: Tensor, attention_mask: Tensor, is_completion: Tensor) -> dict[str, Tensor]:
    """The layout (pairs, 2, tokens), of rows of which the first half are chosen."""
    rows = {
        "input_ids": input_ids, "attention_mask": attention_mask, "targets": shifted(input_ids, is_completion),
    }  # fmt: skip
    return {name: torch.stack(value.chunk(2), dim=1) for name, value in rows.items()}


def as_packed(pairs: dict[str, Tensor], pairs_per_row: int = 2) -> dict[str, Tensor]:
    """The packed layout, with documents of the lengths of the samples and padding at the end of rows."""
    rows: list[dict[str, list[Tensor]]] = []
    for index, masks in enumerate(pairs["attention_mask"].bool()):
        if index % pairs_per_row == 0:
            rows.append({"input_ids": [], "targets": [], "documents": []})
        for side, mask in enumerate(masks):
            for name in ("input_ids", "targets"):
                rows[-1][name].append(pairs[name][index, side][mask])
            rows[-1]["documents"].append(torch.full((int(mask.sum()),), 2 * (index % pairs_per_row) + side))
    length = max(sum(map(len, row["documents"])) for row in rows) + 3
    packed = {}
    for name, fill in (("input_ids", 0), ("targets", -100), ("documents", -1)):
        parts = [torch.cat(row[name]) for row in rows]
        packed[name] = torch.stack([nn.functional.pad(part, (0, length - len(part)), value=fill) for part in parts])
    return packed


def run(objective: Objective, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, float]]:
    """The loss and the metrics of a step with one micro-batch; computes gradients."""
    model.zero_grad()
    output = objective(model, batch, objective.count(model, batch))
    assert output.loss is not None
    output.loss.backward()
    return output.loss.detach(), {name: float(value) for name, value in output.metrics.items()}


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "gradient_checkpointing": False, "logging_strategy": "no", "save_strategy": "no", **options,
    }  # fmt: skip


def preference_data(pairs: list[tuple[str, str, str]]) -> Any:
    import datasets

    keys = ("prompt", "chosen", "rejected")
    return datasets.Dataset.from_list(
        [{k: f" {v}" if k != "prompt" else v for k, v in zip(keys, p, strict=True)} for p in pairs]
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "count"),
    [
        ({"loss_type": "sigmoid"}, {"loss": "sigmoid"}, 3),
        ({"loss_type": "ipo"}, {"loss": "ipo"}, 3),
        ({"loss_type": "robust", "label_smoothing": 0.2}, {"loss": "robust", "label_smoothing": 0.2}, 3),
        # For one pair, AOT is DPO with label smoothing, which this version of TRL has under no other name.
        ({"loss_type": "aot", "label_smoothing": 0.2}, {"loss": "sigmoid", "label_smoothing": 0.2}, 1),
    ],
)
def test_dpo(
    trl: Any,
    tokenizer: Any,
    tmp_path: Path,
    convert: Any,
    assert_equal_gradients: Any,
    theirs: Any,
    ours: Any,
    count: int,
) -> None:
    policy, reference = make_llama(0), make_llama(1)
    trainer = trl.DPOTrainer(
        copy.deepcopy(policy), copy.deepcopy(reference),
        args=trl.DPOConfig(**settings(tmp_path / "trl", beta=0.3, max_length=None, **theirs)),
        train_dataset=preference_data(PAIRS[:count]), processing_class=tokenizer,
    )  # fmt: skip
    batch = trainer.data_collator(list(trainer.train_dataset))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    expected = {name: trainer._metrics["train"][name][-1] for name in REWARDS}

    pairs = as_pairs(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    gpt, gpt_reference = convert(policy), convert(reference)
    for model, frozen, inputs in (
        (policy, reference, pairs), (gpt, gpt_reference, pairs), (gpt, gpt_reference, as_packed(pairs)),
    ):  # fmt: skip
        found, metrics = run(DPO(beta=0.3, reference=frozen, **ours), model, inputs)
        torch.testing.assert_close(found, loss.detach(), **CLOSE)
        assert metrics == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert_equal_gradients(model, trainer.model)

    rows = [{name: value[row] for name, value in as_packed(pairs).items()} for row in range((count + 1) // 2)]
    stored = precompute_reference(gpt_reference, rows, tmp_path / "reference", batch_size=1)
    inputs = {name: torch.stack([row[name] for row in stored]) for name in stored[0]}
    found, metrics = run(DPO(beta=0.3, **ours), gpt, inputs)
    torch.testing.assert_close(found, loss.detach(), **CLOSE)
    assert metrics == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert_equal_gradients(gpt, trainer.model)


def test_orpo(trl: Any, tokenizer: Any, tmp_path: Path, convert: Any, assert_equal_gradients: Any) -> None:
    """TRL adds the loss of the prompt, and averages over tokens instead of pairs: prompts here have one token, which is
    not predicted, and chosen completions have one length.
    """
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    policy = make_llama(0)
    data = [("w5", "w8 w9 w10", "w12"), ("w1", "w2 w3 w9", "w4 w5 w6 w20")]
    trainer = ORPOTrainer(
        copy.deepcopy(policy), args=ORPOConfig(**settings(tmp_path / "trl", beta=0.3, remove_unused_columns=False)),
        train_dataset=preference_data(data), processing_class=tokenizer,
    )  # fmt: skip
    batch = trainer.data_collator(list(trainer.train_dataset))
    trainer.model.train()
    loss, expected = trainer.get_batch_loss_metrics(trainer.model, dict(batch))
    loss.backward()

    inputs = trainer.concatenated_inputs(batch, padding_value=tokenizer.pad_token_id)
    is_completion = inputs["concatenated_labels"] != -100
    attention_mask = inputs["concatenated_attention_mask"]
    assert torch.equal(attention_mask.sum(1), is_completion.sum(1) + 1)
    pairs = as_pairs(inputs["concatenated_input_ids"], attention_mask, is_completion)
    gpt = convert(policy)
    for model, rows in ((policy, pairs), (gpt, pairs), (gpt, as_packed(pairs))):
        found, metrics = run(ORPO(beta=0.3), model, rows)
        torch.testing.assert_close(found, loss.detach(), **CLOSE)
        assert metrics == pytest.approx({name: expected[name] for name in metrics}, abs=1e-5, rel=1e-5)
        assert_equal_gradients(model, trainer.model)


def test_sft_on_completions(
    trl: Any, tokenizer: Any, tmp_path: Path, convert: Any, assert_equal_gradients: Any
) -> None:
    import datasets

    policy = make_llama(0)
    data = datasets.Dataset.from_list([{"prompt": prompt, "completion": f" {text}"} for prompt, text, _ in PAIRS])
    trainer = trl.SFTTrainer(
        copy.deepcopy(policy), args=trl.SFTConfig(**settings(tmp_path / "trl", max_length=None)),
        train_dataset=data, processing_class=tokenizer,
    )  # fmt: skip
    batch = trainer.data_collator(list(trainer.train_dataset))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    assert (batch["labels"] == -100).any()
    assert (batch["labels"] == tokenizer.eos_token_id).sum() == len(PAIRS)

    gpt = convert(policy)
    pairs = as_pairs(*(torch.cat((value, value)) for value in (
        batch["input_ids"], batch["attention_mask"], (batch["labels"] != -100).long(),
    )))  # fmt: skip
    for inputs in (
        {name: batch[name] for name in ("input_ids", "attention_mask", "labels")},
        as_packed(pairs),  # every sample twice: the mean is the same
    ):
        found, _ = run(ModelObjective(), gpt, inputs)
        torch.testing.assert_close(found, loss.detach(), **CLOSE)
        assert_equal_gradients(gpt, trainer.model)


CHATS = [
    [("user", "one and two"), ("assistant", "three")],
    [("system", "Be brief."), ("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "")],
    [("user", "x" * 20), ("assistant", "yes\n")],
    [("user", "hé"), ("assistant", "ñ and more")],
]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_sft_run_on_assistant_turns(trl: Any, tmp_path: Path, packing: bool) -> None:
    """From a jsonl file to the loss of the first step, with our tokens, masks, rows and trainer."""
    import datasets

    directory = save_base_model(tmp_path / "model", context_length=128)
    rows = [{"messages": [{"role": role, "content": text or "-"} for role, text in chat]} for chat in CHATS]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    options = settings(tmp_path / "trl", max_length=None, assistant_only_loss=True)
    trainer = trl.SFTTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(directory), args=trl.SFTConfig(**options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(directory, pad_token="<|im_end|>"),
    )  # fmt: skip
    batch = trainer.data_collator(list(trainer.train_dataset))
    trainer.model.train()
    expected = trainer.compute_loss(trainer.model, dict(batch))

    step = {"steps": 1, "micro_batch": len(rows), "tokens_per_step": len(rows) * 128, "clip": 1e9}
    config = run_config(directory, data, tmp_path / "run", data={"packing": packing}, train=step)
    whimbrel_train(config)
    [first, *_] = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "step"]
    assert first["supervised_tokens"] == int((batch["labels"] != -100).sum())
    torch.testing.assert_close(torch.tensor(first["loss"]), expected.detach(), **CLOSE)
