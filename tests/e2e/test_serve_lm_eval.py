"""lm-eval's `local-completions` on the server gives the model's own log-likelihoods."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from tests.e2e.serving import ServerProcess

pytest.importorskip("lm_eval", reason="needs the package 'lm-eval'")
pytest.importorskip("transformers", reason="lm-eval reads the tokenizer with transformers")

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a small town in the north"),
    ("Once upon a time there was", " a king, and he had three daughters."),
    ("naïve café –", " 北京 is a city"),
]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[tuple[float, bool]]:
    """The sum of log-probabilities of each continuation, and whether each of its tokens is the most likely."""
    import whimbrel

    model, tokenizer = whimbrel.load_model(tiny), whimbrel.load_tokenizer(tiny)
    results = []
    for context, continuation in PAIRS:
        ids = tokenizer.encode(context + continuation)
        first = len(tokenizer.encode(context))
        with torch.inference_mode():
            scores = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        targets = torch.tensor(ids[first:])
        rows = scores[first - 1 : -1]
        logprobs = rows.gather(1, targets[:, None])[:, 0]
        results.append((logprobs.sum().item(), bool((rows.argmax(-1) == targets).all())))
    return results


@pytest.fixture
def api(server: ServerProcess, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    """Creates lm-eval's model for the server, which sends token ids or text."""
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.openai_completions import LocalCompletionsAPI

    def make(*, tokenized: bool, concurrent: int) -> LocalCompletionsAPI:
        return LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            pretrained=server.model,
            tokenizer=str(tiny),
            tokenizer_backend="huggingface",
            tokenized_requests=tokenized,
            num_concurrent=concurrent,
            batch_size=2 if tokenized else 1,
            max_length=4096,
            max_retries=1,
        )

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tokenized", [True, False], ids=["token ids", "text"])
@pytest.mark.parametrize("concurrent", [1, 3])
def test_log_likelihoods_agree(api, expected, tokenized: bool, concurrent: int):
    from lm_eval.api.instance import Instance

    model = api(tokenized=tokenized, concurrent=concurrent)
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    for (logprob, greedy), (expected_logprob, expected_greedy) in zip(
        model.loglikelihood(requests), expected, strict=True
    ):
        assert logprob == pytest.approx(expected_logprob, abs=2e-3)
        assert greedy == expected_greedy


@pytest.mark.filterwarnings("ignore")
def test_generation_stops_at_a_stop_string(api, server: ServerProcess):
    from lm_eval.api.instance import Instance

    with server.client() as client:
        body = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[12:16]
    arguments = ("Once upon a time", {"until": [stop], "max_gen_toks": 12, "do_sample": False})
    model = api(tokenized=False, concurrent=1)
    assert model.generate_until([Instance("generate_until", {}, arguments, 0)]) == [text.split(stop)[0]]
