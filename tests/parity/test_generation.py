"""Generation beside `transformers.generate` on the same models: greedy, penalised, padded, beams."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

import whimbrel
from whimbrel.inference import LLM, NgramDraft, SamplingParams, beam_search, generate
from whimbrel.models import GPT

FEW = pytest.mark.parametrize("theirs", ["gpt2", "llama3-rope", "mistral", "qwen3"], indirect=True)


@pytest.fixture
def ours(theirs, directory) -> GPT:
    theirs.save_pretrained(directory)
    return whimbrel.load_model(directory)


def peer(model: transformers.PreTrainedModel, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    """What `transformers` writes after prompts that are padded at the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    usual = {"do_sample": False, "pad_token_id": 0, "attention_mask": seen}
    return model.generate(ids, **usual | settings)[:, longest:].tolist()


def test_greedy_text_is_theirs(theirs, ours, ids):
    prompt = ids[0, :9].tolist()
    for penalty in (1.0, 1.3):
        [expected] = peer(theirs, [prompt], max_new_tokens=24, repetition_penalty=penalty)
        assert generate(ours, prompt, max_new_tokens=24, temperature=0, repetition_penalty=penalty) == expected
    [plain] = peer(theirs, [prompt], max_new_tokens=24)
    greedy = SamplingParams(temperature=0)
    assert list(LLM(ours).stream_tokens(prompt, greedy, max_new_tokens=24, draft=NgramDraft())) == plain


@FEW
def test_prompts_of_different_lengths_are_theirs(theirs, ours, ids):
    prompts = [ids[0, :3].tolist(), ids[1, :17].tolist(), ids[0, 5:16].tolist()]
    expected = peer(theirs, prompts, max_new_tokens=24)
    found = LLM(ours).generate(prompts, SamplingParams(temperature=0), max_new_tokens=24)
    assert [output.outputs[0].tokens for output in found] == expected


@pytest.mark.parametrize("theirs", ["gpt2", "mistral"], indirect=True)
def test_beams_and_their_scores_are_theirs(theirs, ours, ids):
    prompt = ids[0, :8].tolist()
    likely = generate(ours, prompt, max_new_tokens=10, temperature=0)
    ended = 0
    for beams, penalty, eos in [
        (2, 1.0, []), (5, 0.0, likely[4:5]), (2, 2.5, likely[3:7]), (5, 1.0, likely[3:7]), (3, -1.0, likely[2:4]),
    ]:  # fmt: skip
        output = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 8), do_sample=False, pad_token_id=0, max_new_tokens=10,
            num_beams=beams, num_return_sequences=beams, length_penalty=penalty, eos_token_id=eos or None,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        found = beam_search(ours, prompt, beams=beams, max_new_tokens=10, length_penalty=penalty, eos_id=eos)
        # They leave the end in place and pad what follows it.
        assert [beam.tokens for beam in found] == [before(eos, row[8:]) for row in output.sequences.tolist()]
        assert [beam.score for beam in found] == pytest.approx(output.sequences_scores.tolist(), abs=1e-4)
        ended += sum(len(beam.tokens) < 10 for beam in found)
    assert ended > 5


def before(ends: list[int], tokens: list[int]) -> list[int]:
    """The tokens before the first that ends a text."""
    return list(itertools.takewhile(lambda token: token not in ends, tokens))
