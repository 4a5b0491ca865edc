"""Greedy decoding, penalties, batches and beam search against `generate` of transformers."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

import whimbrel
from whimbrel.inference import LLM, NgramDraft, SamplingParams, beam_search, generate
from whimbrel.models import GPT

SOME_FAMILIES = pytest.mark.parametrize("hf_model", ["gpt2", "llama3-rope", "mistral", "qwen3"], indirect=True)


@pytest.fixture
def ours(hf_model, directory) -> GPT:
    hf_model.save_pretrained(directory)
    return whimbrel.load_model(directory)


def hf_generate(model: transformers.PreTrainedModel, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    """Greedy continuations by transformers of left-padded prompts."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    attention_mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    defaults = {"do_sample": False, "pad_token_id": 0, "attention_mask": attention_mask}
    return model.generate(ids, **defaults | settings)[:, longest:].tolist()


def test_greedy_tokens_equal_transformers(hf_model, ours, ids):
    prompt = ids[0, :9].tolist()
    for penalty in (1.0, 1.3):
        [expected] = hf_generate(hf_model, [prompt], max_new_tokens=24, repetition_penalty=penalty)
        assert generate(ours, prompt, max_new_tokens=24, temperature=0, repetition_penalty=penalty) == expected
    [expected] = hf_generate(hf_model, [prompt], max_new_tokens=24)
    greedy = SamplingParams(temperature=0)
    assert list(LLM(ours).stream_tokens(prompt, greedy, max_new_tokens=24, draft=NgramDraft())) == expected


@SOME_FAMILIES
def test_batches_of_different_lengths_equal_transformers(hf_model, ours, ids):
    prompts = [ids[0, :3].tolist(), ids[1, :17].tolist(), ids[0, 5:16].tolist()]
    expected = hf_generate(hf_model, prompts, max_new_tokens=24)
    results = LLM(ours).generate(prompts, SamplingParams(temperature=0), max_new_tokens=24)
    assert [output.outputs[0].tokens for output in results] == expected


@pytest.mark.parametrize("hf_model", ["gpt2", "mistral"], indirect=True)
def test_beams_and_scores_equal_transformers(hf_model, ours, ids):
    prompt = ids[0, :8].tolist()
    likely = generate(ours, prompt, max_new_tokens=10, temperature=0)
    ended = 0
    for num_beams, penalty, eos in [
        (2, 1.0, []), (5, 0.0, likely[4:5]), (2, 2.5, likely[3:7]), (5, 1.0, likely[3:7]), (3, -1.0, likely[2:4]),
    ]:  # fmt: skip
        output = hf_model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 8), do_sample=False, pad_token_id=0, max_new_tokens=10,
            num_beams=num_beams, num_return_sequences=num_beams, length_penalty=penalty, eos_token_id=eos or None,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        beams = beam_search(ours, prompt, num_beams=num_beams, max_new_tokens=10, length_penalty=penalty, stop_ids=eos)
        # transformers keeps the EOS token and pads after it.
        assert [beam.tokens for beam in beams] == [cut_at_eos(eos, row[8:]) for row in output.sequences.tolist()]
        assert [beam.score for beam in beams] == pytest.approx(output.sequences_scores.tolist(), abs=1e-4)
        ended += sum(len(beam.tokens) < 10 for beam in beams)
    assert ended > 5


def cut_at_eos(eos_ids: list[int], tokens: list[int]) -> list[int]:
    """The tokens before the first EOS token."""
    return list(itertools.takewhile(lambda token: token not in eos_ids, tokens))
