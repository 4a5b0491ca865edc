"""Few-shot prompts, chat templates and generated answers against lm-eval on the same model and local files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from tests.support.lm_eval_tasks import TASK_FILES, arguments, published, records, write_spec

from whimbrel.evaluate import (
    GENERATIVE_TASKS,
    TASKS,
    GenerationOptions,
    PromptOptions,
    Scorer,
    TaskResult,
    evaluate_tasks,
)
from whimbrel.evaluate.prompts import sample_examples
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import load_tokenizer, train_tokenizer

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": True}
TOLERANCE = 1e-3
NUM_ITEMS = 6
MAX_NEW_TOKENS = 40
TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FILTERS = {"exact_match_strict": "strict-match", "exact_match_flexible": "flexible-extract", "exact_match": "none"}
"""Our metrics, and the filters of lm-eval."""
NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Joe", "Kim", "Lee")
QUESTIONS = [
    {
        "question": f"{name} has {number} coins of ${price:,}. How much is it?",
        "answer": f"{number} * {price} = {number * price} dollars.\n#### {number * price:,}",
    }
    for name, number, price in zip(NAMES, range(2, 14), range(150, 1350, 100), strict=True)
]
PLAIN = [
    {"prompt": f"Spell {name}:", "answer": " ".join(name.upper()) + (" . " if name == "Hal" else "")} for name in NAMES
]


class Setting(NamedTuple):
    """How both sides build prompts."""

    shots: int
    from_training_split: bool = False
    chat: bool = False
    multiturn: bool = True


SETTINGS = {
    "zero-shot": Setting(0),
    "two-shot": Setting(2),
    "training-split": Setting(3, from_training_split=True),
    "chat": Setting(0, chat=True),
    "chat-multiturn": Setting(1, chat=True),
    "chat-single-turn": Setting(2, from_training_split=True, chat=True, multiturn=False),
}


@pytest.fixture(scope="module")
def directory(fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned some of the questions; its tokenizer adds BOS, and EOS is not the end-of-turn token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [path.read_text(encoding="utf-8") for path in sorted((fixtures / "eval").glob("*.jsonl"))]
    trained = train_tokenizer([*texts, json.dumps(QUESTIONS), json.dumps(PLAIN)], 800)
    trained.save(folder)
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bos, bos_id = trained.eot_token, trained.eot_id
    pipeline.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
    )
    pipeline.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    conversations = [
        *(
            f"{bos}Question: {each['question']}\nAnswer: {each['answer']}{end}"
            for each, end in zip(QUESTIONS[:4], [bos, "\n\nQuestion: "] * 2, strict=True)
        ),
        *(
            f"{bos}<|im_start|>user\nQuestion: {each['question']}\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
            f"{each['answer']}<|im_end|>\n"
            for each in QUESTIONS[:3]
        ),
        *(f"{bos}{each['prompt']} {each['answer']}\n\n" for each in PLAIN[:3]),
        *(
            f"{bos}<|im_start|>user\n{each['prompt']}<|im_end|>\n<|im_start|>assistant\n{each['answer']}<|im_end|>\n"
            for each in PLAIN[:3]
        ),
    ]
    rows = [torch.tensor(tokenizer.encode_prompt(text, add_special_tokens=False).ids) for text in conversations]
    torch.manual_seed(0)
    shape = {"vocab_size": tokenizer.vocab_size, "num_layers": 2, "embd_size": 48, "num_heads": 4, "num_kv_heads": 2}
    model = GPT(GPTConfig(context_length=256, **shape, **LLAMA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    for _ in range(80):
        loss = model(batch[:, :-1].clamp(min=0), targets=batch[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(model, folder, tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Data(NamedTuple):
    """Directories of local files, and lm-eval's task definitions for them."""

    questions: Path
    training: Path
    same_file: list[str]
    """Examples come from the file of the questions."""
    training_split: list[str]


@pytest.fixture(scope="module")
def data(lm_eval: ModuleType, fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Files of a few questions, and training splits with the others."""
    folders = Data(*(tmp_path_factory.mktemp(name) for name in ("questions", "training")), [], [])
    specs = {name: tmp_path_factory.mktemp(name) for name in ("same", "split")}
    rows = {name: [published(name, record) for record in records(fixtures, name)] for name in TASKS}
    plain = {"doc_to_text": "prompt", "doc_to_target": "answer", "fewshot_split": None, "num_fewshot": None}
    plain |= {"generation_kwargs": {"until": ["\n\n"], "do_sample": False}}
    plain |= {
        "filter_list": [
            {"name": "none", "filter": [{"function": name} for name in ("remove_whitespace", "take_first")]}
        ]
    }
    plain |= {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    for name, questions, task_file, changes in (
        *((name, rows[name], TASK_FILES[name], {}) for name in TASKS),
        ("gsm8k", QUESTIONS, "gsm8k/gsm8k", {}),
        ("plain", PLAIN, "gsm8k/gsm8k", plain),
    ):
        file = TASKS[name].file if name in TASKS else f"{name}_test"
        own, training = folders.questions / f"{file}.jsonl", folders.training / f"{name}_train.jsonl"
        own.write_text("\n".join(map(json.dumps, questions[:NUM_ITEMS])))
        training.write_text("\n".join(map(json.dumps, questions[NUM_ITEMS:])))
        # lm-eval leaves the question itself out only if both splits have the same name in the definition.
        same = {} if name in ("hellaswag", "piqa", "winogrande") else {"fewshot_split": "test"}
        files = {"train": own, "validation": own, "test": own}
        folders.same_file.append(write_spec(specs["same"] / f"{name}.yaml", task_file, files, **changes | same))
        split = {"training_split": "train"}
        spec = write_spec(specs["split"] / f"{name}.yaml", task_file, files | {"train": training}, **changes | split)
        folders.training_split.append(spec)
    return folders


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Setting:
    return SETTINGS[request.param]


@pytest.fixture(scope="module")
def hf_lm(lm_eval: ModuleType, directory: Path) -> Any:
    """The model as `transformers` runs it for lm-eval. In a batch, it continues after stop tokens other than EOS."""
    return lm_eval.models.huggingface.HFLM(pretrained=str(directory), device="cpu", batch_size=1, dtype="float32")


@pytest.fixture(scope="module")
def expected(lm_eval: ModuleType, hf_lm: Any, data: Data, setting: Setting) -> dict[str, Any]:
    """Results of lm-eval with transformers."""
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    tasks = manager.load(data.training_split if setting.from_training_split else data.same_file)["tasks"]
    return lm_eval.evaluator.simple_evaluate(
        model=hf_lm,
        tasks=list(tasks.values()),
        task_manager=manager,
        num_fewshot=setting.shots,
        apply_chat_template=setting.chat,
        fewshot_as_multiturn=setting.multiturn,
        gen_kwargs=f"max_gen_toks={MAX_NEW_TOKENS}",
        bootstrap_iters=10,
        log_samples=True,
    )


@pytest.fixture(scope="module")
def results(directory: Path, data: Data, setting: Setting) -> dict[str, TaskResult]:
    """Our results, by the names of lm-eval's tasks."""
    shots_data = data.training if setting.from_training_split else None
    prompts = PromptOptions(shots=setting.shots, shots_data=shots_data, chat=setting.chat, multiturn=setting.multiturn)
    scorer, plain = Scorer.load(directory), str(data.questions / "plain_test.jsonl")
    generation = GenerationOptions(max_new_tokens=MAX_NEW_TOKENS)
    found = evaluate_tasks(scorer, [*TASKS, "gsm8k"], data.questions, prompts=prompts, generation=generation)
    if shots_data is not None:
        prompts = replace(prompts, shots_data=shots_data / "plain_train.jsonl")
    # lm-eval has the same stop strings with and without a chat template.
    generation = replace(generation, stop=["\n\n"])
    return found | {"plain": evaluate_tasks(scorer, [], files=[plain], prompts=prompts, generation=generation)[plain]}


def test_choices_equal_lm_eval(expected, results):
    """Every prompt and continuation, and its log-likelihood."""
    for name in TASKS:
        assert len(results[name].samples) == NUM_ITEMS
        for sample, theirs in zip(results[name].samples, expected["samples"][name], strict=True):
            choices = sample["choices"]
            assert [(each["context"], each["continuation"]) for each in choices] == [*map(tuple, arguments(theirs))]
            logs = [each[0] for each in theirs["filtered_resps"]]
            assert [each["loglikelihood"] for each in choices] == pytest.approx(logs, abs=TOLERANCE)
            assert [each["is_greedy"] for each in choices] == [each[1] for each in theirs["filtered_resps"]]


def test_generated_answers_equal_lm_eval(expected, results):
    """Every prompt and answer, and what the filters extract."""
    for name in ("gsm8k", "plain"):
        for index, sample in enumerate(results[name].samples):
            for metric, extracted in sample["extracted"].items():
                [theirs] = [
                    each
                    for each in expected["samples"][name]
                    if each["doc_id"] == index and each["filter"] == FILTERS[metric]
                ]
                assert sample["prompt"] == arguments(theirs)[0][0]
                assert sample["output"] == theirs["resps"][0][0]
                assert extracted == theirs["filtered_resps"][0]
                assert sample[metric] == theirs["exact_match"]


def test_metrics_and_standard_errors_equal_lm_eval(expected, results):
    for name, result in results.items():
        theirs = expected["results"][name]
        for metric, (value, stderr) in result.metrics.items():
            if metric not in ("ended", "perplexity"):  # lm-eval has no such metric; bootstraps its standard error
                key, filtered = ("exact_match", FILTERS[metric]) if metric in FILTERS else (metric, "none")
                assert value == pytest.approx(theirs[f"{key},{filtered}"], rel=1e-9)
                assert stderr == pytest.approx(theirs[f"{key}_stderr,{filtered}"], rel=1e-9)


def test_answers_are_not_trivial(results, setting):
    if setting.shots == 0:
        assert 0 < results["gsm8k"].metrics["exact_match_strict"].value < 1
        assert 0 < results["plain"].metrics["exact_match"].value < 1
        assert results["gsm8k"].metrics["ended"].value > 0
    reasons = {sample["finish_reason"] for name in ("gsm8k", "plain") for sample in results[name].samples}
    assert len(reasons) > 1


def test_stop_strings_that_are_special_tokens_equal_lm_eval(lm_eval, hf_lm, directory):
    """Text does not contain special tokens; the adapter has to stop at the token."""
    from whimbrel.evaluate.lm_eval import WhimbrelLM

    adapter = WhimbrelLM(str(directory), device="cpu")
    question = f"Question: {QUESTIONS[0]['question']}\nAnswer:"
    context = adapter.apply_chat_template([{"role": "user", "content": question}])
    answers = []
    for until in (["<|im_end|>"], []):
        request = lm_eval.api.instance.Instance(
            request_type="generate_until", doc={}, arguments=(context, {"until": until, "max_gen_toks": 40}), idx=0
        )
        answers += adapter.generate_until([request])
        assert answers[-1:] == hf_lm.generate_until([request], disable_tqdm=True)
    assert answers[0] == QUESTIONS[0]["answer"]
    assert answers[1] != answers[0]


def test_bos_is_added_once(hf_lm, directory):
    scorer = Scorer.load(directory)
    chat = scorer.chat_template.render([{"role": "user", "content": "To be?"}])
    for text in ("To be?", chat):
        ids = scorer.encode_prompt(text)
        assert ids == hf_lm.tok_encode(text)
        assert (ids[0], ids.count(scorer.bos_id)) == (scorer.bos_id, 1)


@pytest.mark.parametrize("draw_one_more", [True, False])
def test_examples_are_sampled_as_in_lm_eval(lm_eval, draw_one_more):
    """Also if the pool has several copies of the question, which lm-eval replaces in a second draw."""
    from lm_eval.api.samplers import ContextSampler

    for size, count in ((6, 3), (9, 2), (40, 5), (300, 8)):
        pool = [{"id": number % (size - 2 if draw_one_more else size)} for number in range(size)]
        sampler = ContextSampler(pool, rnd=1234)
        expected = [sampler.sample(count, eval_doc=doc if draw_one_more else None) for doc in pool]
        found = sample_examples(pool, pool, count, draw_one_more=draw_one_more, name="pool")
        assert [[pool[index] for index in indices] for indices in found] == expected
        if draw_one_more:
            assert not any(doc in examples for doc, examples in zip(pool, expected, strict=True))


def test_extraction_and_normalization_equal_lm_eval(lm_eval):
    import yaml
    from lm_eval.api.metrics import exact_match_fn
    from lm_eval.filters.extraction import RegexFilter

    spec = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml").read_text())
    task = GENERATIVE_TASKS["gsm8k"]
    texts = [
        "#### 12",
        "#### -1,234.50.",
        "a\n####  7",
        "is $1,000. or 3",
        "3, or 4.",
        "1.",
        "-5",
        "none",
        "",
        "#### .",
    ]
    texts += ["#### 7\n#### 8", "the 2 dogs, 3 cats", "...", "$", "x #### 12 apples", "#### 7 #### 8 $9", "١٢"]
    metric = next(each for each in spec["metric_list"])
    options = {name: metric[name] for name in ("regexes_to_ignore", "ignore_case", "ignore_punctuation")}
    answers = ["so\n#### 12", "#### -1,234.50", "#### 7", "#### $1000.", "#### 3 Cats"]
    for each, (name, extract) in zip(spec["filter_list"], task.filters.items(), strict=True):
        settings = {key: value for key, value in each["filter"][0].items() if key != "function"}
        [expected] = RegexFilter(**settings).apply([texts], [{}])
        assert [extract(text) for text in texts] == expected, name
        for text in expected:
            matches = [task.normalize(text) == task.normalize(answer) for answer in answers]
            theirs = [exact_match_fn(predictions=[text], references=[answer], **options) for answer in answers]
            assert matches == [bool(each["exact_match"]) for each in theirs]
    assert tuple(spec["generation_kwargs"]["until"]) == task.stop == task.chat_stop
    assert spec["num_fewshot"] == task.shots
