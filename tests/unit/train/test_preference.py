"""DPO and ORPO: layouts of pairs, references, weighting and metrics."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.synchronization import forbid_synchronization
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.models import GPT, GPTConfig
from whimbrel.ops import cross_entropy
from whimbrel.train import DPO, ORPO, BaseTrainer, Objective, TrainingArguments, precompute_reference, read_log
from whimbrel.train.preference import _pairs, token_log_probs

VOCAB, LENGTHS = 61, [(3, 9, 5), (2, 4, 7), (4, 6, 6)]
"""The lengths of prompt, chosen sample and rejected sample of each pair."""


def make_model(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    sizes = {"context_length": 64, "num_layers": 2, "embd_size": 32, "num_heads": 4, "vocab_multiple": 16}
    return GPT(GPTConfig(vocab_size=VOCAB, position="rope", **sizes))


def make_samples() -> list[list[tuple[Tensor, Tensor]]]:
    """Token ids and shifted targets of chosen and rejected samples."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for prompt_length, *lengths in LENGTHS:
        prompt = torch.randint(0, VOCAB, (prompt_length,), generator=generator)
        pair = []
        for length in lengths:
            ids = torch.cat((prompt, torch.randint(0, VOCAB, (length - prompt_length,), generator=generator)))
            targets = F.pad(ids[1:], (0, 1), value=-100)
            targets[: prompt_length - 1] = -100
            pair.append((ids, targets))
        pairs.append(pair)
    return pairs


def pairs_batch() -> dict[str, Tensor]:
    """All pairs in the layout (pairs, 2, tokens), padded."""
    samples = make_samples()

    def stack(part: int, fill: int) -> Tensor:
        return torch.stack(
            [torch.stack([F.pad(s[part], (0, 9 - len(s[part])), value=fill) for s in pair]) for pair in samples]
        )

    ids, targets = stack(0, 0), stack(1, -100)
    return {"input_ids": ids, "targets": targets}


def packed_batch() -> dict[str, Tensor]:
    """The first two pairs in one row, the third in another, with padding between samples and at the end."""
    samples, rows = make_samples(), []
    for pairs in (samples[:2], samples[2:]):
        row: dict[str, list[Tensor]] = {"input_ids": [], "targets": [], "documents": []}
        for number, (ids, targets) in enumerate(sample for pair in pairs for sample in pair):
            row["input_ids"].append(ids)
            row["targets"].append(targets)
            row["documents"].append(torch.full_like(ids, number))
        fills = {"input_ids": 0, "targets": -100, "documents": len(rows) - 1}  # padding is document -1, or 0
        joined = {name: torch.cat(parts) for name, parts in row.items()}
        rows.append({name: F.pad(part, (0, 27 - len(part)), value=fills[name]) for name, part in joined.items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def select(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in batch.items()}


def gradients(objective: Objective, model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """The loss of an optimizer step over micro-batches, and its gradient."""
    model.zero_grad()
    total = torch.stack([objective.count(model, batch) for batch in batches]).sum().clamp(min=1)
    loss = torch.zeros(())
    for batch in batches:
        output = objective(model, batch, total).loss
        assert output is not None
        output.backward()
        loss += output.detach()
    return loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


OBJECTIVES: list[Callable[[], Objective]] = [
    lambda: DPO(reference=make_model(1)),
    lambda: DPO(loss="ipo", reference=make_model(1)),
    lambda: ORPO(beta=0.5),
]


@pytest.mark.parametrize("make_objective", OBJECTIVES)
def test_packed_pairs_and_micro_batches_give_the_same_step(make_objective: Any) -> None:
    model, objective = make_model(), make_objective()
    loss, gradient = gradients(objective, model, [pairs_batch()])
    assert gradient.norm() > 0.01
    pairs, packed = pairs_batch(), packed_batch()
    for batches in (
        [select(pairs, slice(0, 1)), select(pairs, slice(1, 3))],
        [packed],
        [select(packed, slice(0, 1)), select(packed, slice(1, 2))],
    ):
        found, found_gradient = gradients(objective, model, batches)
        torch.testing.assert_close(found, loss, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found_gradient, gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("make_objective", OBJECTIVES)
def test_only_complete_pairs_count(make_objective: Any) -> None:
    """A row of padding, and a pair whose rejected completion has no targets."""
    model, objective = make_model(), make_objective()
    expected = gradients(objective, model, [select(pairs_batch(), slice(0, 2))])
    pairs = pairs_batch()
    pairs["targets"][2, 1] = -100
    packed = packed_batch()
    packed["targets"][1, 6:] = -100
    empty = {"input_ids": torch.zeros(1, 27, dtype=torch.long), "documents": torch.zeros(1, 27, dtype=torch.long)}
    empty["targets"] = torch.full((1, 27), -100)
    with_empty = {name: torch.cat((packed[name], empty[name])) for name in packed}
    for batch in (pairs, packed, with_empty):
        assert objective.count(model, batch) == 2
        torch.testing.assert_close(gradients(objective, model, [batch]), expected, atol=1e-6, rtol=1e-5)
    loss, gradient = gradients(objective, model, [empty])
    assert loss == 0
    assert not gradient.any()


@torch.no_grad()
def test_losses_are_those_of_the_papers() -> None:
    model, reference, batch = make_model(), make_model(1), pairs_batch()
    ratios, means = [], []
    for pair in make_samples():
        log_probs = []
        for ids, targets in pair:
            kept = targets != -100
            both = [
                torch.log_softmax(m(ids[None]).logits[0], -1)[kept].gather(1, targets[kept, None]).double().squeeze(1)
                for m in (model, reference)
            ]
            log_probs.append((both[0].sum() - both[1].sum(), both[0].mean(), len(both[0])))
        ratios.append([value[0] for value in log_probs] + [value[2] for value in log_probs])
        means.append([value[1] for value in log_probs])
    num_pairs, beta = torch.tensor(3), 0.1
    expected: dict[Any, float] = {}
    for smoothing in (0.0, 0.25):
        margins = [beta * float(chosen - rejected) for chosen, rejected, *_ in ratios]
        log_sigmoid = [(-math.log1p(math.exp(-m)), -math.log1p(math.exp(m))) for m in margins]
        expected["sigmoid", smoothing] = sum(-(1 - smoothing) * a - smoothing * b for a, b in log_sigmoid) / 3
        expected["robust", smoothing] = (
            sum((-(1 - smoothing) * a + smoothing * b) / (1 - 2 * smoothing) for a, b in log_sigmoid) / 3
        )
    expected["ipo", 0.0] = sum(float(c / nc - r / nr - 1 / (2 * beta)) ** 2 for c, r, nc, nr in ratios) / 3
    for (name, smoothing), value in expected.items():
        objective = DPO(beta=beta, loss=name, label_smoothing=smoothing, reference=reference)
        assert float(objective(model, batch, num_pairs).loss) == pytest.approx(value, rel=1e-5), (name, smoothing)
    orpo = 0.0
    for chosen, rejected in means:
        odds = [math.exp(float(mean)) / (1 - math.exp(float(mean))) for mean in (chosen, rejected)]
        orpo += (-float(chosen) + 0.5 * math.log1p(odds[1] / odds[0])) / 3
    assert float(ORPO(beta=0.5)(model, batch, num_pairs).loss) == pytest.approx(orpo, rel=1e-5)


class Adapter(nn.Module):
    """A GPT whose embeddings are changed by an adapter, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                attention_dropout=0.3,
            )
        )  # fmt: skip
        self.scale, self.enabled = nn.Parameter(torch.tensor(0.5)), True

    def forward(self, input_ids: Tensor) -> Any:
        embeddings = self.model.get_input_embeddings()(input_ids)
        return self.model(inputs_embeds=embeddings * (1 + self.scale) if self.enabled else embeddings)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        self.enabled = False
        yield
        self.enabled = True


def test_the_reference_may_be_the_model_with_adapters_off() -> None:
    """In evaluation mode and without gradients, as a second model."""
    torch.manual_seed(0)
    model, batch = Adapter(), pairs_batch()
    frozen = copy.deepcopy(model)
    frozen.enabled = False
    model.train()
    expected = token_log_probs(frozen.eval(), batch)
    found = DPO(reference=model.disabled).reference_log_probs(model, batch)
    assert torch.equal(found, expected)
    assert (model.enabled, model.training, found.requires_grad) == (True, True, False)
    by_model = DPO(reference=frozen)
    assert torch.equal(by_model.reference_log_probs(model, batch), expected)
    assert not any(p.requires_grad for p in frozen.parameters())


def test_log_probs_of_a_transformers_model_equal_those_of_a_gpt_interface() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    )
    found = token_log_probs(model, pairs_batch())
    ids, targets = make_samples()[1][0]
    log_probs = torch.log_softmax(model(ids[None]).logits[0], -1)
    assert found[1, 0].nonzero().flatten().tolist() == [1, 2]  # targets of a prompt of 2 and a completion of 2 tokens
    for position in (1, 2):
        torch.testing.assert_close(found[1, 0, position], log_probs[position, targets[position]])
    with pytest.raises(DataError, match="one sample per row for LlamaForCausalLM, got packed rows"):
        token_log_probs(model, packed_batch())


def test_metrics_are_means_over_the_pairs_of_a_step() -> None:
    model, objective = make_model(), DPO(beta=0.5, reference=make_model(1))
    pairs = pairs_batch()
    parts = [select(pairs, slice(0, 1)), select(pairs, slice(1, 3))]
    whole = objective(model, pairs, torch.tensor(3)).metrics
    sums = [objective(model, part, torch.tensor(3)).metrics for part in parts]
    assert {name: float(sums[0][name] + sums[1][name]) for name in whole} == pytest.approx(
        {name: float(value) for name, value in whole.items()}, abs=1e-6
    )
    alone = [objective(model, select(pairs, slice(i, i + 1)), torch.tensor(1)).metrics for i in range(3)]
    for metrics in (whole, *alone):
        margin = float(metrics["rewards/chosen"] - metrics["rewards/rejected"])
        assert float(metrics["rewards/margins"]) == pytest.approx(margin, abs=1e-5)
    accuracies = [float(metrics["rewards/margins"] > 0) for metrics in alone]
    assert float(whole["rewards/accuracies"]) == pytest.approx(sum(accuracies) / 3)
    assert not any(value.requires_grad for value in whole.values())


@pytest.mark.parametrize("make_objective", OBJECTIVES)
def test_all_logits_are_never_materialized(make_objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK_TOKENS", 4)
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 4 * 64 * 4)
    model, objective, batch = make_model(), make_objective(), pairs_batch()
    width, largest = model.config.padded_vocab_size, 0

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() and out.shape[-1] in (width, VOCAB):
                largest = max(largest, out.numel() // out.shape[-1])
            return out

    with Record():  # type: ignore[no-untyped-call]
        loss = objective(model, batch, torch.tensor(3)).loss
        assert loss is not None
        loss.backward()
    assert 0 < largest <= 32 < batch["input_ids"].numel()  # 32: the transposed weight of the head


def preference_rows(count: int) -> list[dict[str, Tensor]]:
    """Pairs in which the chosen completion repeats the prompt."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        prompt = torch.randint(1, VOCAB, (2,), generator=generator)
        other = torch.randint(1, VOCAB, (2,), generator=generator)
        ids = torch.stack((torch.cat((prompt, prompt)), torch.cat((prompt, other))))
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        targets[:, 0] = -100
        rows.append({"input_ids": ids, "targets": targets})
    return rows


@pytest.mark.parametrize("kind", ["dpo", "orpo"])
def test_training_raises_the_margin_and_logs_it(tmp_path: Path, kind: str) -> None:
    model, rows = make_model(), preference_rows(40)
    objective: Objective = ORPO(beta=1.0) if kind == "orpo" else DPO(beta=0.5)
    if kind == "dpo":
        data: Any = precompute_reference(model, rows, tmp_path / "reference")
    else:
        data = rows
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=20, per_device_train_batch_size=5, gradient_accumulation_steps=2,
        learning_rate=3e-3, use_cpu=True, logging_steps=10, save_strategy="no", eval_strategy="steps", eval_steps=10,
        load_best_model_at_end=False,
    )  # fmt: skip
    trainer = BaseTrainer(args, model, train_dataset=data, eval_dataset=data, objective=objective)
    trainer.train()
    lines = read_log(tmp_path / "run" / "log.jsonl")
    steps, evaluations, logs = ([line for line in lines if line["kind"] == k] for k in ("step", "validation", "log"))
    margins = [line["rewards/margins"] for line in steps]
    if kind == "dpo":
        assert margins[0] == pytest.approx(0.0, abs=1e-5)  # the model is its own reference
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert margins[-1] > margins[0]
    assert {(line["pairs"], line["tokens"]) for line in steps} == {(10, 80)}
    assert evaluations[-1]["eval_rewards/accuracies"] > 0.9
    assert [line["rewards/margins"] for line in logs] == pytest.approx([sum(margins[:10]) / 10, sum(margins[10:]) / 10])


def test_columns_of_pairs_are_kept(tmp_path: Path) -> None:
    import datasets

    model = make_model()
    rows = [row | {"reference_log_probs": torch.zeros(2, 4), "text": 0.0} for row in preference_rows(8)]
    data = datasets.Dataset.from_list(
        [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in r.items()} for r in rows]
    )
    args = TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=2, use_cpu=True, save_strategy="no")
    trainer = BaseTrainer(args, model, train_dataset=data, objective=DPO())
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "hinge"}, "expected a DPO loss .* got 'hinge'"),
        ({"beta": 0.0}, "positive beta, got 0.0"),
        ({"label_smoothing": 0.5}, "label_smoothing from 0 to below 0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "does not apply to the ipo loss"),
    ],
)
def test_wrong_settings_raise(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DPO(**settings)


def test_wrong_batches_raise() -> None:
    model, packed, pairs = make_model(), packed_batch(), pairs_batch()
    one = torch.tensor(1)
    with pytest.raises(DataError, match="expected reference_log_probs in the batch, or DPO"):
        DPO()(model, pairs, one)
    with pytest.raises(DataError, match=r"reference_log_probs of the shape of the targets, \[3, 2, 9\], got \[3, 2\]"):
        DPO()(model, pairs | {"reference_log_probs": torch.zeros(3, 2)}, one)
    with pytest.raises(DataError, match="documents numbered from 0 in each row, got document 103"):
        ORPO().count(model, packed | {"documents": packed["documents"] + 100})
    with pytest.raises(
        DataError, match=r"shape \(pairs, 2, tokens\), .* got targets of shape \[2, 27\] and no documents"
    ):
        ORPO().count(model, {name: packed[name] for name in ("input_ids", "targets")})
    with pytest.raises(DataError, match="with input_ids and targets, got the keys input_ids"):
        ORPO().count(model, {"input_ids": pairs["input_ids"]})


@pytest.mark.gpu
def test_packed_pairs_are_bit_identical_on_a_gpu() -> None:
    """The sums over tokens must not depend on the order of atomic additions."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.arange(4096).div(512, rounding_mode="floor").expand(4, -1).cuda()
    targets = torch.zeros_like(documents)
    values = torch.randn(documents.shape, generator=generator).cuda()
    batch = {"input_ids": targets, "targets": targets, "documents": documents}
    with forbid_synchronization():
        sums = [_pairs(batch, values).log_probs for _ in range(20)]
    assert all(torch.equal(found, sums[0]) for found in sums)
    expected = values.double().view(4, 8, 512).sum(-1).view(4, 4, 2)
    torch.testing.assert_close(sums[0][:, :4].double(), expected, atol=1e-4, rtol=1e-4)
