"""Tool calls: a model is trained to call a function, and OpenAI's client uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.serving import ServerProcess, serving
from tests.support.chat_templates import QWEN_TOOLS, TOOL_CHAT, WEATHER
from tests.support.commands import whimbrel
from tests.support.finetuning import save_base_model
from tests.support.models import small_preset

from whimbrel.inference import LLM, SamplingParams
from whimbrel.model_io import save_model
from whimbrel.models import GPT
from whimbrel.server.schema import ChatCompletionRequest
from whimbrel.server.served_model import load_served_model
from whimbrel.server.tool_calls import END, START
from whimbrel.tokenization import BUILTIN_TEMPLATES, train_tokenizer

openai = pytest.importorskip("openai", reason="needs the package 'openai'")
transformers = pytest.importorskip("transformers", reason="needs the package 'transformers'")

TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": {"properties": {"city": {"type": "string"}}}}}]
QUESTIONS = {"Bern": "What is the colour of the sky in Bern?", "Oslo": "Oslo: grey, blue, red or black?"}
SKIES = {"Bern": "grey", "Oslo": "blue"}
HELLO = [{"role": "user", "content": "Hello"}]

LLAMA3_JSON = """
{%- if tools %}{{ 'Answer with {"name": function, "parameters": arguments}:\\n' ~ tools | tojson(indent=4) }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.tool_calls %}
        {%- set function = message.tool_calls[0].function %}
        {{- '{"name": "' + function.name + '", "parameters": ' + function.arguments | tojson + '}' }}
    {%- else %}{{ message.content }}{% endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def conversation(city: str) -> list[dict[str, Any]]:
    """A question, a call, its result and the answer; the call as OpenAI's API writes it."""
    function = {"name": "sky", "arguments": json.dumps({"city": city, "now": True})}
    return [
        {"role": "user", "content": QUESTIONS[city]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": SKIES[city]},
        {"role": "assistant", "content": f"It is {SKIES[city]}."},
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model fine-tuned on conversations with and without calls, with the built-in chatml template."""
    folder = tmp_path_factory.mktemp("tools")
    chats = [*map(conversation, SKIES), [*HELLO, {"role": "assistant", "content": "Hi!"}]]
    rows = "".join(json.dumps({"messages": messages, "tools": TOOLS}) + "\n" for messages in chats)
    (folder / "chats.jsonl").write_text(rows * 100)
    tokenizer = train_tokenizer([BUILTIN_TEMPLATES["chatml"].source, rows], 512)
    torch.manual_seed(0)
    shape = small_preset(
        "llama3-8b", vocab_size=tokenizer.vocab_size, context_length=512, num_layers=2, embd_size=64, init_std=0.2
    )
    save_model(GPT(shape), folder / "base", tokenizer)
    command = ("finetune", folder / "base", folder / "chats.jsonl", "--out-dir", folder / "sky", "--full", "--plain")
    options = ("--template", "chatml", "--lr", "5e-3", "--epochs", "1", "--sequence-length", "256")
    assert whimbrel(*command, *options, "--train.device=cpu", "--train.tokens_per_step=1024") == 0
    return folder / "sky"


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[ServerProcess]:
    with serving(run) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as sync_client:
        yield sync_client


def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    options = {"tools": TOOLS, "temperature": 0, "max_tokens": 100} | options
    return client.chat.completions.create(model="sky", messages=messages, **options)


@pytest.mark.parametrize("city", SKIES)
def test_the_model_calls_a_function_and_uses_its_result(client, city: str):
    messages = [{"role": "user", "content": QUESTIONS[city]}]
    [choice] = ask(client, messages).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [tool_call] = choice.message.tool_calls
    assert (tool_call.type, tool_call.function.name) == ("function", "sky")
    assert json.loads(tool_call.function.arguments) == {"city": city, "now": True}
    messages += [choice.message, {"role": "tool", "tool_call_id": tool_call.id, "content": SKIES[city]}]
    [choice] = ask(client, messages).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", f"It is {SKIES[city]}.")
    assert choice.message.tool_calls is None


def test_streams_have_the_call_in_a_delta(client):
    chunks = list(ask(client, conversation("Oslo")[:1], stream=True, n=2, logprobs=True))
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        [tool_call] = [each for choice in choices for each in choice.delta.tool_calls or ()]
        assert (tool_call.index, tool_call.type, tool_call.function.name) == (0, "function", "sky")
        assert json.loads(tool_call.function.arguments) == {"city": "Oslo", "now": True}
        assert not any(choice.delta.content for choice in choices)
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
        tokens = [token.token for choice in choices if choice.logprobs for token in choice.logprobs.content]
        assert "".join(tokens).startswith(START)
    content = [chunk.choices[0].delta.content or "" for chunk in ask(client, HELLO, stream=True)]
    assert "".join(content) == "Hi!"


def test_tool_choice(client):
    question = conversation("Bern")[:1]
    assert ask(client, question, tool_choice="auto").choices[0].finish_reason == "tool_calls"
    without = ask(client, question, tool_choice="none")
    assert without.choices[0].message.tool_calls is None
    assert without.usage.prompt_tokens == ask(client, question, tools=[]).usage.prompt_tokens
    for choice in ("required", {"type": "function", "function": {"name": "sky"}}):
        with pytest.raises(openai.BadRequestError, match="expected tool_choice to be 'auto' or 'none'") as excinfo:
            ask(client, question, tool_choice=choice)
        assert (excinfo.value.param, excinfo.value.type) == ("tool_choice", "invalid_request_error")


def test_invalid_calls_get_a_400(client):
    *_, last = messages = conversation("Bern")[:3]
    for arguments, message in (
        ("{", "a JSON object"),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", "levels of nesting"),
    ):
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        with pytest.raises(openai.BadRequestError, match=message) as excinfo:
            ask(client, messages)
        assert excinfo.value.param == "messages"
    del last["tool_call_id"]
    with pytest.raises(openai.BadRequestError):
        ask(client, messages)


def test_tools_are_in_the_openapi_document(server: ServerProcess):
    with server.client() as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert "tools" in schemas["ChatCompletionRequest"]["properties"]
    assert "tool_calls" in schemas["Message"]["properties"]


def test_llm_chat_renders_the_same_prompt(client, run: Path):
    question = conversation("Bern")[:1]
    output = LLM(run, device="cpu").chat(question, SamplingParams(temperature=0), tools=TOOLS, max_new_tokens=100)
    assert len(output.prompt_ids) == ask(client, question).usage.prompt_tokens
    text = output.outputs[0].text
    assert text == f'{START}\n{{"name": "sky", "arguments": {{"city": "Bern", "now": true}}}}\n{END}'


def served_ids(directory: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
    """The prompt of a request, with the arguments of calls as JSON strings."""
    body = json.loads(json.dumps({"model": "m", "messages": messages, "tools": tools}))
    for message in body["messages"]:
        for number, each in enumerate(message.get("tool_calls", ())):
            arguments = json.dumps(each["function"]["arguments"])
            message["tool_calls"][number] = {
                "id": "1",
                **each,
                "function": {**each["function"], "arguments": arguments},
            }
        if message["role"] == "tool":
            message["tool_call_id"] = "1"
    request = ChatCompletionRequest.model_validate(body)
    rendered = [message.for_template() for message in request.messages]
    return list(load_served_model(directory).encode_chat(rendered, 2000, request.tools).ids)


@pytest.mark.parametrize("template", ["chatml", "qwen", "llama3"])
def test_prompts_equal_those_of_transformers(run: Path, tmp_path: Path, template: str):
    if template == "chatml":
        directory = max((run / "checkpoints").iterdir()) / "model"
    else:
        source = QWEN_TOOLS if template == "qwen" else LLAMA3_JSON
        directory = save_base_model(tmp_path / "model", template=source, context_length=2048)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    tools = json.loads(json.dumps(WEATHER).replace("<|im_end|>", ""))  # transformers parses special tokens in messages
    for length in (2, 4):
        messages = TOOL_CHAT[:length]
        expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
        assert served_ids(directory, messages, tools) == expected
