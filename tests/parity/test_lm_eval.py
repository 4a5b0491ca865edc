"""Evaluation results against lm-eval on the same model, with its task definitions and local copies of the datasets.

Compares lm-eval with transformers, lm-eval with our adapter, and `whimbrel.evaluate`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.lm_eval_tasks import TASK_FILES, arguments, published, records, write_spec

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.evaluate import TASKS, Scorer, evaluate_tasks, perplexity
from whimbrel.evaluate.tasks import read_items
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import train_tokenizer

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": True}
TOLERANCE = 1e-3
TEMPLATE = (
    "{% for turn in messages %}{{ bos_token }}{{ turn.role }}: {{ turn.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def directory(fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model overfitted to a few passages, so that some answers are correct and greedy."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((fixtures / "eval").glob("*.jsonl"))]
    passages = [record["context"] + " " + record["continuation"] for record in records(fixtures, "lambada")[:6]]
    tokenizer = train_tokenizer(texts, 1500)
    torch.manual_seed(0)
    shape = {"vocab_size": tokenizer.vocab_size, "num_layers": 2, "embd_size": 48, "num_heads": 4, "num_kv_heads": 2}
    model = GPT(GPTConfig(context_length=128, **shape, **LLAMA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [torch.tensor(tokenizer.encode(text))[-129:] for text in passages]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    for _ in range(60):
        loss = model(batch[:, :-1].clamp(min=0), targets=batch[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(model, folder, tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def specs(lm_eval: ModuleType, fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """lm-eval's own task definitions, pointed at local files, which are stored next to them."""
    folder, paths = tmp_path_factory.mktemp("tasks"), {}
    for name, task_file in TASK_FILES.items():
        lines = [json.dumps(published(name, record)) for record in records(fixtures, name)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        files = dict.fromkeys(("train", "validation", "test"), folder / f"{name}.jsonl")
        paths[name] = write_spec(folder / f"{name}.yaml", task_file, files)
    return paths


@pytest.fixture(scope="module")
def hf_lm(lm_eval: ModuleType, directory: Path) -> Any:
    """The model as `transformers` runs it for lm-eval."""
    return lm_eval.models.huggingface.HFLM(pretrained=str(directory), device="cpu", batch_size=8, dtype="float32")


@pytest.fixture(scope="module")
def adapter(lm_eval: ModuleType, directory: Path) -> Any:
    """The model as we run it for lm-eval."""
    from whimbrel.evaluate.lm_eval import WhimbrelLM

    return WhimbrelLM(str(directory), device="cpu")


@pytest.fixture(scope="module")
def results(lm_eval: ModuleType, specs: dict[str, str], hf_lm: Any, directory: Path) -> dict[str, dict[str, Any]]:
    """Results of lm-eval with transformers and with `--model whimbrel`."""
    import whimbrel.evaluate.lm_eval  # noqa: F401 (registers)

    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    tasks = list(manager.load(list(specs.values()))["tasks"].values())
    options = {"tasks": tasks, "task_manager": manager, "bootstrap_iters": 10, "log_samples": True}
    run = lm_eval.evaluator.simple_evaluate
    return {
        "hf": run(model=hf_lm, **options),
        "adapter": run(model="whimbrel", model_args=f"pretrained={directory}", device="cpu", batch_size=7, **options),
    }


def instances(lm_eval: ModuleType, kind: str, arguments: list[tuple]) -> list[Any]:
    make = lm_eval.api.instance.Instance
    return [make(request_type=kind, doc={}, arguments=args, idx=index) for index, args in enumerate(arguments)]


@pytest.mark.parametrize("name", TASKS)
def test_published_and_short_records_are_equal(specs, fixtures, name):
    short = read_items(TASKS[name], fixtures / "eval" / f"{TASKS[name].file}.jsonl")
    assert read_items(TASKS[name], Path(specs[name]).with_suffix(".jsonl")) == short


@pytest.mark.parametrize("name", TASKS)
def test_questions_equal_lm_eval(results, specs, name):
    """The context and continuation of every choice that lm-eval passed to the model."""
    items = read_items(TASKS[name], Path(specs[name]).with_suffix(".jsonl"))
    requested = [tuple(map(tuple, arguments(sample))) for sample in results["hf"]["samples"][name]]
    assert [item.pairs for item in items] == requested


@pytest.mark.parametrize("name", TASKS)
def test_loglikelihoods_equal_lm_eval(results, specs, directory, name):
    scorer = Scorer.load(directory)
    items = read_items(TASKS[name], Path(specs[name]).with_suffix(".jsonl"))
    ours = scorer.score(scorer.encode_pairs([pair for item in items for pair in item.pairs]))
    for source in ("hf", "adapter"):
        answers = [each for sample in results[source]["samples"][name] for each in sample["filtered_resps"]]
        assert [score.loglikelihood for score in ours] == pytest.approx([each[0] for each in answers], abs=TOLERANCE)
        assert [score.is_greedy for score in ours] == [each[1] for each in answers]


@pytest.mark.parametrize("name", TASKS)
def test_metrics_and_standard_errors_equal_lm_eval(results, fixtures, directory, name):
    [ours] = evaluate_tasks(Scorer.load(directory), [name], fixtures / "eval").values()
    for source in ("hf", "adapter"):
        reported = results[source]["results"][name]
        expected = {key.removesuffix(",none"): value for key, value in reported.items() if key.endswith(",none")}
        assert {metric for metric in expected if not metric.endswith("_stderr")} == set(ours.metrics)
        for metric, (value, stderr) in ours.metrics.items():
            assert value == pytest.approx(expected[metric], rel=1e-4)
            if metric != "perplexity":
                assert stderr == pytest.approx(expected[f"{metric}_stderr"], rel=1e-9)


def test_model_answers_are_not_trivial(results):
    reported = results["hf"]["results"]
    assert 0 < reported["lambada"]["acc,none"] < 1
    assert 0 < reported["hellaswag"]["acc,none"] != reported["hellaswag"]["acc_norm,none"]
    assert any(
        reported[name]["acc,none"] != reported[name]["acc_norm,none"] for name in ("arc_easy", "arc_challenge", "piqa")
    )


def test_long_contexts_are_truncated_as_in_lm_eval(results, fixtures, directory):
    """The other tests compare truncated scores; this one checks that truncation happened."""
    found = evaluate_tasks(Scorer.load(directory), list(TASKS), fixtures / "eval")
    assert found["hellaswag"].truncated > 0
    assert found["winogrande"].truncated == 0


def test_unusual_pairs_are_tokenized_as_in_lm_eval(lm_eval, hf_lm, adapter):
    pairs = [
        ("", "To be"),
        ("", " To be or not"),
        ("To be ", "or not"),
        ("To be  \n", " or not"),
        ("naïve café", " résumé 日本語"),
        ("a", "b c d"),
        ("word " * 300, "the end of it"),
    ]
    ours = adapter.loglikelihood(instances(lm_eval, "loglikelihood", pairs))
    expected = hf_lm.loglikelihood(instances(lm_eval, "loglikelihood", pairs), disable_tqdm=True)
    for (log, greedy), (their_log, their_greedy) in zip(ours, expected, strict=True):
        assert log == pytest.approx(their_log, abs=TOLERANCE)
        assert greedy == their_greedy


def test_rolling_loglikelihood_equals_lm_eval(lm_eval, hf_lm, adapter, directory, shakespeare):
    tokenizer, sizes = adapter.scorer.tokenizer, (1, 20, 127, 128, 129, 256, 300)
    texts = [tokenizer.decode(tokenizer.encode(shakespeare[:3000])[:size]) for size in sizes]
    ours = adapter.loglikelihood_rolling(instances(lm_eval, "loglikelihood_rolling", [(text,) for text in texts]))
    expected = hf_lm.loglikelihood_rolling(instances(lm_eval, "loglikelihood_rolling", [(text,) for text in texts]))
    assert ours == pytest.approx(expected, abs=TOLERANCE)
    weighted = [(log, len(text.encode())) for log, text in zip(expected, texts, strict=True)]
    from lm_eval.api.metrics import bits_per_byte

    assert perplexity(Scorer.load(directory), texts).bits_per_byte == pytest.approx(bits_per_byte(weighted), rel=1e-6)


def test_generate_until_equals_lm_eval(lm_eval, hf_lm, adapter, fixtures):
    contexts = [record["context"][:120] for record in records(fixtures, "lambada")[:6]]
    for settings in ({"until": ["\n\n", "the"]}, {"until": "."}, {"until": [], "do_sample": False, "temperature": 0.7}):
        requests = [(context, {"max_gen_toks": 24, **settings}) for context in contexts]
        ours = adapter.generate_until(instances(lm_eval, "generate_until", requests))
        assert ours == hf_lm.generate_until(instances(lm_eval, "generate_until", requests), disable_tqdm=True)


def test_temperature_enables_sampling(lm_eval, adapter):
    requests = instances(lm_eval, "generate_until", [("To be", {"temperature": 5.0, "max_gen_toks": 20})] * 4)
    assert len(set(adapter.generate_until(requests))) > 1


def test_unknown_options_are_rejected(lm_eval, adapter, directory):
    from whimbrel.evaluate.lm_eval import WhimbrelLM

    with pytest.raises(RequestError, match="unknown generation_kwargs: num_beams"):
        adapter.generate_until(instances(lm_eval, "generate_until", [("To be", {"num_beams": 4})]))
    with pytest.raises(ConfigError, match="dtype: expected one of auto, float32, .* got 'float8'"):
        WhimbrelLM(str(directory), dtype="float8")
    with pytest.raises(ConfigError, match="batch_size: expected .* got 'many'"):
        WhimbrelLM(str(directory), batch_size="many")


def test_chat_template_equals_lm_eval(lm_eval, hf_lm, adapter):
    """Special tokens are parsed although lm-eval passes the prompt as text."""
    turns = [{"role": "user", "content": " To be? "}, {"role": "assistant", "content": "Or not"}]
    texts = [adapter.apply_chat_template(turns[:1]), adapter.apply_chat_template(turns, add_generation_prompt=False)]
    assert texts[0] == hf_lm.apply_chat_template(turns[:1])
    assert texts[1] == hf_lm.apply_chat_template(turns, add_generation_prompt=False)
    assert adapter.chat_template(chat_template=True) == hf_lm.chat_template(chat_template=True)
    assert adapter.scorer.encode_prompt(texts[0]) == hf_lm.tok_encode(texts[0])
    assert adapter.scorer.encode_prompt(texts[0]).count(adapter.scorer.bos_id) == 2
    ours = adapter.loglikelihood(instances(lm_eval, "loglikelihood", [(text, " to be") for text in texts]))
    expected = hf_lm.loglikelihood(instances(lm_eval, "loglikelihood", [(text, " to be") for text in texts]))
    assert [log for log, _ in ours] == pytest.approx([log for log, _ in expected], abs=TOLERANCE)


def test_perplexity_stderr_approximates_the_bootstrap(lm_eval):
    """lm-eval bootstraps over the items; ours is the delta-method estimate, accurate for moderate variance."""
    from lm_eval.api.metrics import bootstrap_stderr
    from lm_eval.api.metrics import perplexity as their_perplexity

    logs = torch.randn(400, generator=torch.Generator().manual_seed(0)).mul(2).sub(3).tolist()
    estimate = TASKS["lambada"].metrics["perplexity"].aggregate(logs)
    assert estimate.value == pytest.approx(their_perplexity(logs))
    assert estimate.stderr == pytest.approx(bootstrap_stderr(their_perplexity, logs, iters=2000), rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_default_device_of_lm_eval_is_ignored_without_a_gpu(lm_eval, directory):
    from whimbrel.evaluate.lm_eval import WhimbrelLM

    assert WhimbrelLM(str(directory), device="cuda:0").scorer.model.lm_head.weight.device.type == "cpu"
    with pytest.raises(ConfigError, match="not available"):
        WhimbrelLM(str(directory), device="cuda:1")
