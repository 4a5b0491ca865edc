"""The server with OpenAI's client, synchronous and asynchronous, complete and streaming."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.serving import ServerProcess

openai = pytest.importorskip("openai", reason="needs the package 'openai'")

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as sync_client:
        yield sync_client


@pytest.fixture(scope="module")
def tokenizer(tiny: Path):
    import whimbrel

    return whimbrel.load_tokenizer(tiny)


@pytest.fixture(scope="module")
def greedy(tiny: Path, tokenizer) -> list[int]:
    """The greedy continuation of the prompt by `generate`."""
    import whimbrel

    model = whimbrel.load_model(tiny)
    return whimbrel.generate(model, tokenizer.encode(PROMPT), max_new_tokens=24, temperature=0)


def collect_stream(stream) -> dict[int, str]:
    texts: dict[int, str] = defaultdict(str)
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.text
    return dict(texts)


def test_models_are_listed(client, server):
    assert [model.id for model in client.models.list()] == [server.model]
    card = client.models.retrieve(server.model)
    assert card.context_length == 4096
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
        client.models.retrieve("other")


def test_greedy_text_equals_generate(client, tokenizer, greedy):
    params = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    response = client.completions.create(**params)
    assert response.choices[0].text == tokenizer.decode(greedy)
    assert response.choices[0].finish_reason == "length"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (4, 24, 28)
    assert collect_stream(client.completions.create(**params, stream=True)) == {0: response.choices[0].text}


def test_all_four_prompt_formats_give_the_same_text(client, tokenizer):
    texts = [PROMPT, "The end of"]
    ids = [tokenizer.encode(text) for text in texts]
    params = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    expected = [client.completions.create(prompt=text, **params).choices[0].text for text in texts]
    assert [client.completions.create(prompt=row, **params).choices[0].text for row in ids] == expected
    for prompts in (texts, ids):
        response = client.completions.create(prompt=prompts, **params)
        assert [(choice.index, choice.text) for choice in response.choices] == list(enumerate(expected))
        assert response.usage.prompt_tokens == sum(map(len, ids))
        assert collect_stream(client.completions.create(prompt=prompts, stream=True, **params)) == dict(
            enumerate(expected)
        )


def test_an_empty_prompt_starts_a_document(client, tokenizer):
    empty, marked = (
        client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0).choices[0].text
        for prompt in ("", [tokenizer.eot_id])
    )
    assert empty == marked


def test_samples_differ_and_a_seed_reproduces_them(client):
    params = {"model": "tiny", "prompt": [PROMPT, "The"], "max_tokens": 8, "n": 3, "seed": 7, "temperature": 1.0}
    first, repeated = (client.completions.create(**params) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == list(range(6))
    assert texts == [choice.text for choice in repeated.choices]
    assert len(set(texts)) == 6
    assert texts != [choice.text for choice in client.completions.create(**(params | {"seed": 8})).choices]
    assert collect_stream(client.completions.create(**params, stream=True)) == dict(enumerate(texts))
    assert first.usage.completion_tokens == 48


def test_a_stop_string_ends_the_text_before_it(client, tokenizer, greedy):
    pieces = [tokenizer.decode([token]) for token in greedy]
    stop = pieces[5] + pieces[6]
    before = "".join(pieces).split(stop)[0]
    params = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    for stops in (stop, [stop, "no such text"]):
        response = client.completions.create(**params, stop=stops, logprobs=0)
        assert (response.choices[0].text, response.choices[0].finish_reason) == (before, "stop")
        assert "".join(response.choices[0].logprobs.tokens) == before
        assert response.usage.completion_tokens < 24
    assert collect_stream(client.completions.create(**params, stop=stop, stream=True)) == {0: before}


def test_a_stop_string_ends_one_sample_and_not_the_others(client):
    params = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "n": 3, "seed": 1}
    baseline = [choice.text for choice in client.completions.create(**params).choices]
    stop = baseline[1][6:10]
    response = client.completions.create(**params, stop=stop)
    assert [choice.text for choice in response.choices] == [text.split(stop)[0] for text in baseline]
    assert response.choices[1].finish_reason == "stop"


def test_stream_usage_comes_last_and_only_on_request(client):
    params = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    events = list(client.completions.create(**params, stream_options={"include_usage": True}))
    assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].choices == []
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (4, 3)
    assert all(event.choices for event in client.completions.create(**params))


def test_completion_logprobs(client, tokenizer, greedy):
    params = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 3}
    result = client.completions.create(**params).choices[0]
    scores = result.logprobs
    assert scores.tokens == [tokenizer.decode([token]) for token in greedy[:5]]
    assert [len(PROMPT) + result.text.index(token) for token in scores.tokens[:3]] == scores.text_offset[:3]
    for token, own, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert len(top) == 3
        assert own == top[token] == max(top.values()) < 0
    pieces = [event.choices[0].logprobs for event in client.completions.create(**params, stream=True)]
    assert [token for piece in pieces for token in piece.tokens] == scores.tokens
    assert [value for piece in pieces for value in piece.token_logprobs] == scores.token_logprobs


def test_echo_returns_prompt_logprobs(client, tokenizer):
    params = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "logprobs": 1, "echo": True}
    for length in (0, 2):
        result = client.completions.create(**params, max_tokens=length).choices[0]
        assert result.text.startswith(PROMPT)
        assert result.logprobs.tokens[:4] == [tokenizer.decode([token]) for token in tokenizer.encode(PROMPT)]
        assert (result.logprobs.token_logprobs[0], result.logprobs.top_logprobs[0]) == (None, None)
        assert all(value < 0 for value in result.logprobs.token_logprobs[1:])
        assert "".join(result.logprobs.tokens) == result.text
        for token, at in zip(result.logprobs.tokens, result.logprobs.text_offset, strict=True):
            assert result.text.startswith(token, at)
        assert len(result.logprobs.tokens) == 4 + length
        assert collect_stream(client.completions.create(**params, max_tokens=length, stream=True)) == {0: result.text}
    baseline = client.completions.create(model="tiny", prompt=tokenizer.encode(PROMPT), max_tokens=0, echo=True)
    assert baseline.choices[0].text == PROMPT


def test_penalties_and_logit_bias_change_the_output(client, tokenizer, greedy):
    params = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    other = client.completions.create(**params, logit_bias={str(greedy[0]): -100}).choices[0].text
    assert other != tokenizer.decode(greedy[:1])
    [forced] = tokenizer.encode(" lighthouse")[:1]
    long = params | {"max_tokens": 6, "logit_bias": {str(forced): 60}}
    assert client.completions.create(**long).choices[0].text == tokenizer.decode([forced]) * 6
    penalized = client.completions.create(**(long | {"frequency_penalty": 2.0, "presence_penalty": 2.0}))
    assert penalized.usage.completion_tokens == 6
    extra = client.completions.create(
        **(long | {"logit_bias": None}), extra_body={"repetition_penalty": 1.5, "top_k": 1}
    )
    assert extra.usage.completion_tokens == 6
    filtered = client.completions.create(**(params | {"temperature": 2.0}), extra_body={"min_p": 1.0}).choices[0].text
    assert filtered == tokenizer.decode(greedy[:1])


def test_chat_completion(client):
    params = {
        "model": "tiny",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
        ],
        "temperature": 0,
        "max_completion_tokens": 8,
    }
    response = client.chat.completions.create(**params)
    [choice] = response.choices
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    events = list(client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == choice.message.content
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage == response.usage
    baseline = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    params |= {"messages": baseline, "max_tokens": 8, "max_completion_tokens": openai.omit}
    assert client.chat.completions.create(**params).choices[0].message.content == choice.message.content
    repeated = [*baseline, choice.message, {"role": "user", "content": "And then?"}]
    longer = client.chat.completions.create(**(params | {"messages": repeated}))
    assert longer.usage.prompt_tokens > response.usage.prompt_tokens


def test_chat_logprobs(client):
    messages = [{"role": "user", "content": "Hello"}]
    params = {"model": "tiny", "messages": messages, "max_tokens": 4, "n": 2, "seed": 3, "logprobs": True}
    response = client.chat.completions.create(**params, top_logprobs=2)
    for choice in response.choices:
        content_bytes = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes)
        assert content_bytes.decode(errors="replace") == choice.message.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 2
            assert entry.logprob <= entry.top_logprobs[0].logprob + 1e-6 < 1e-3
            assert math.exp(entry.logprob) <= 1
    streamed = list(client.chat.completions.create(**params, stream=True))
    names = defaultdict(list)
    for event in streamed:
        for choice in event.choices:
            names[choice.index] += [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
    assert names == {choice.index: [entry.token for entry in choice.logprobs.content] for choice in response.choices}
    assert all(
        entry.top_logprobs == [] for entry in client.chat.completions.create(**params).choices[0].logprobs.content
    )


def test_concurrent_async_clients(server, client):
    prompts = [f"Chapter {number}:" for number in range(8)]
    params = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    expected = [client.completions.create(prompt=prompt, **params).choices[0].text for prompt in prompts]

    async def run_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as async_client:

            async def one(prompt: str) -> str:
                stream = await async_client.completions.create(prompt=prompt, stream=True, **params)
                return "".join([event.choices[0].text async for event in stream])

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(run_all()) == expected


def test_errors_raise_the_client_exceptions(client):
    user = [{"role": "user", "content": "Hello"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError) as excinfo:
        client.chat.completions.create(model="tiny", messages=user, tools=[tool])
    assert (excinfo.value.param, excinfo.value.code) == ("tools", "invalid_value")
    assert "does not support tools: remove them, or fine-tune the model with --template chatml" in str(excinfo.value)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(openai.BadRequestError, match="does not support tool calls"):
        client.chat.completions.create(model="tiny", messages=[*user, {"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(openai.BadRequestError, match="response_format is not supported"):
        client.chat.completions.create(model="tiny", messages=user, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        client.completions.create(model="tiny", prompt="a", suffix="b")
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        client.completions.create(model="tiny", prompt="a", extra_body={"temperatur": 1})
    with pytest.raises(openai.BadRequestError) as excinfo:
        client.completions.create(model="tiny", prompt=[1] * 4096)
    assert excinfo.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-4'.* 'tiny'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
