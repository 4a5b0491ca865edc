"""The complete app over HTTP: limits, errors, health, authentication, shutdown, metrics."""

from __future__ import annotations

import copy
import json
import logging
import re
import threading
from dataclasses import replace

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

import httpx
import torch
from tests.unit.server.running_server import running, wait_for

from whimbrel.precision import quantize_
from whimbrel.server.app import ENCODER_THREADS
from whimbrel.server.served_model import ServedModel
from whimbrel.server.worker import MAX_STEP_FAILURES
from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, ChatTemplate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COMPLETION_BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 3}


def error(response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_requests_over_the_limit_get_429(served: ServedModel):
    with running(served, max_requests=2) as run:
        run.engine.unblock.clear()
        threads = [
            threading.Thread(target=run.client.post, args=[COMPLETIONS], kwargs={"json": COMPLETION_BODY})
            for _ in range(2)
        ]
        for each in threads:
            each.start()
        wait_for(lambda: run.service.requests.active == 2)
        response = run.client.post(COMPLETIONS, json=COMPLETION_BODY)
        assert error(response) == (429, "too_many_requests")
        assert response.headers["Retry-After"] == "1"
        assert run.client.get("/health").status_code == 200
        run.engine.unblock.set()
        for each in threads:
            each.join()
        assert run.client.post(COMPLETIONS, json=COMPLETION_BODY).status_code == 200


def test_a_slow_prompt_does_not_block_other_requests(served: ServedModel, monkeypatch: pytest.MonkeyPatch):
    started, unblock, read = threading.Event(), threading.Event(), ServedModel.encode_prompts

    def slow_encode(*arguments):
        started.set()
        unblock.wait(30)
        return read(*arguments)

    monkeypatch.setattr(ServedModel, "encode_prompts", slow_encode)
    with running(served) as run:
        thread = threading.Thread(target=run.client.post, args=[COMPLETIONS], kwargs={"json": COMPLETION_BODY})
        thread.start()
        started.wait(30)
        assert run.client.get("/health").status_code == 200
        assert thread.is_alive()
        unblock.set()
        thread.join()


def test_special_tokens_in_a_prompt_are_parsed_unless_parse_special_is_false(served: ServedModel):
    text = "a<|endoftext|>b"
    with running(served) as run:
        for options, tokens in (({}, 3), ({"parse_special": True}, 3), ({"parse_special": False}, 9)):
            body = {"model": "tiny", "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 0, **options}
            response = run.client.post(COMPLETIONS, json=body).json()
            assert response["usage"]["prompt_tokens"] == tokens
            [choice] = response["choices"]
            assert choice["text"].startswith(text)
            offsets, names = choice["logprobs"]["text_offset"][:tokens], choice["logprobs"]["tokens"][:tokens]
            assert all(text.startswith(name, at) for name, at in zip(names, offsets, strict=True))
            assert "".join(names) == text


def test_an_endless_chat_template_does_not_block_completions(served: ServedModel):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages | length > 1 %}" + endless + "{% endif %}" + DEFAULT_CHAT_TEMPLATE.source)
    with running(replace(served, chat_template=template)) as run:
        long_chat = CHAT_BODY | {"messages": CHAT_BODY["messages"] * 2}
        for _ in range(7):
            with pytest.raises(httpx.ReadTimeout):
                run.client.post(CHAT, json=long_chat, timeout=0.1)
        assert run.client.post(COMPLETIONS, json=COMPLETION_BODY).status_code == 200
        assert run.client.get("/health").status_code == 200
        assert run.client.post(CHAT, json=CHAT_BODY, timeout=120).status_code == 200
        response = run.client.post(CHAT, json=long_chat, timeout=120)
        assert error(response) == (400, "invalid_value")
        assert "CPU time" in response.json()["error"]["message"]


def test_prompts_are_encoded_by_a_bounded_number_of_threads(served: ServedModel, monkeypatch: pytest.MonkeyPatch):
    running_now, maximum, lock, read = [0], [0], threading.Lock(), ServedModel.encode_prompts
    full = threading.Event()

    def slow_encode(*arguments):
        with lock:
            running_now[0] += 1
            maximum[0] = max(running_now[0], maximum[0])
            if running_now[0] == ENCODER_THREADS:
                full.set()
        full.wait(30)
        with lock:
            running_now[0] -= 1
        return read(*arguments)

    monkeypatch.setattr(ServedModel, "encode_prompts", slow_encode)
    with running(served) as run:
        threads = [
            threading.Thread(target=run.client.post, args=[COMPLETIONS], kwargs={"json": COMPLETION_BODY})
            for _ in range(8)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert maximum[0] == ENCODER_THREADS


def test_an_expensive_body_is_rejected_before_parsing(served: ServedModel, monkeypatch: pytest.MonkeyPatch):
    parsed: list[int] = []
    loads = json.loads

    def note(text, *arguments, **named):
        parsed.append(len(text))
        return loads(text, *arguments, **named)

    monkeypatch.setattr(json, "loads", note)
    body = b'{"model": "tiny", "prompt": [' + b"[1]," * 830_000 + b"[1]]}"
    with running(served) as run:
        response = run.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert error(response) == (400, "invalid_value")
    assert max(parsed) < 1000


def test_configured_limits_apply(served: ServedModel):
    with running(served, max_prompt_tokens=4, max_choices=3, max_body_bytes=200) as run:
        assert error(run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"prompt": [1] * 5})) == (
            400,
            "context_length_exceeded",
        )
        assert run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"prompt": [1] * 4}).status_code == 200
        assert error(run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"prompt": ["a", "b"], "n": 2})) == (
            400,
            "invalid_value",
        )
        assert error(run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"prompt": "a" * 200})) == (413, "too_large")


CHAT_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


LONG_CHAT = [{"role": role, "content": "so " * 20} for role in ("system", *("user", "assistant") * 4, "user")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "prompt", "field", "dropped"),
    [
        (COMPLETIONS, {"prompt": "so " * 150}, "truncated", True),
        (COMPLETIONS, {"prompt": [[1] * 150, [1]]}, "truncated", True),
        (COMPLETIONS, {"prompt": "so"}, "truncated", False),
        (CHAT, {"messages": LONG_CHAT}, "dropped_messages", 8),
        (CHAT, {"messages": LONG_CHAT[:2]}, "dropped_messages", 0),
    ],
)
def test_truncation_drops_the_beginning_of_a_long_prompt(
    served: ServedModel, stream: bool, route: str, prompt: dict[str, object], field: str, dropped: int
):
    body = {"model": "tiny", "max_tokens": 3, "stream": stream, **prompt}
    with running(served) as run:
        for truncation in ({}, {"truncation": None}, {"truncation": "disabled"}):
            response = run.client.post(route, json=body | truncation)
            if dropped:
                assert error(response) == (400, "context_length_exceeded")
            else:
                assert response.status_code == 200
                assert field not in response.text
        response = run.client.post(route, json=body | {"truncation": "auto"})
    assert response.status_code == 200
    if stream:
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        assert {event[field] for event in events} == {dropped}
    else:
        assert response.json()[field] == dropped
        assert response.json()["usage"]["prompt_tokens"] <= 65


def test_truncation_stays_within_the_limit_of_the_server(served: ServedModel):
    body = {"model": "tiny", "max_tokens": 3, "prompt": "so " * 150, "truncation": "auto"}
    with running(served, max_prompt_tokens=10) as run:
        assert run.client.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens"] == 10
        chat = {"model": "tiny", "max_tokens": 3, "messages": LONG_CHAT, "truncation": "auto"}
        assert error(run.client.post(CHAT, json=chat)) == (400, "context_length_exceeded")


def test_the_pages_can_ask_whether_their_key_is_accepted(served: ServedModel):
    for settings in ({}, {"api_key": "k"}):
        with running(served, **settings) as run:
            for value, accepted in (("Bearer k", True), ("Bearer wrong", False), ("Bearer", False), ("k", False)):
                response = run.client.get("/page/access", headers={"Authorization": value})
                assert response.json() == {"authorized": accepted or not settings}
                status = run.client.get("/v1/models", headers={"Authorization": value}).status_code
                assert (status == 200) == (accepted or not settings)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (COMPLETIONS, COMPLETION_BODY | {"logit_bias": {"50257": 1}}, "logit_bias"),
        (CHAT, CHAT_BODY | {"logit_bias": {"50257": 1}}, "logit_bias"),
        (COMPLETIONS, COMPLETION_BODY | {"n": 17}, "n"),
        (COMPLETIONS, COMPLETION_BODY | {"prompt": [50257]}, "prompt"),
        (COMPLETIONS, COMPLETION_BODY | {"prompt": [1] * 128}, "prompt"),
        (CHAT, CHAT_BODY | {"messages": [{"role": "user", "content": "so " * 128}]}, "messages"),
        (CHAT, CHAT_BODY | {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (CHAT, CHAT_BODY | {"messages": [{"role": "system", "content": "refuse"}]}, "messages"),
    ],
)
def test_errors_name_the_parameter(served: ServedModel, route: str, body: dict[str, object], param: str):
    template = ChatTemplate(
        "{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}" + DEFAULT_CHAT_TEMPLATE.source
    )
    with running(replace(served, chat_template=template)) as run:
        response = run.client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_model_cards_describe_base_and_chat_models(served: ServedModel):
    with running(served) as run:
        card = run.client.get("/v1/models/tiny").json()
    assert card["num_parameters"] == served.model.num_parameters()
    assert (card["dtype"], card["vocab_size"], card["parent"]) == ("float32", 50257, None)
    assert (card["has_chat_template"], card["supports_tools"], card["generation_config"]) == (False, False, {})
    for call, has_parser in (('<tool_call>{"name": ...}', True), ("[TOOL_CALLS]", False)):
        template = ChatTemplate(f"{{{{ tools }}}}{call}{DEFAULT_CHAT_TEMPLATE.source}")
        chat = replace(served, chat_template=template, default_sampling={"temperature": 0.6}, max_new_tokens=99)
        with running(chat) as run:
            card = run.client.get("/v1/models/tiny").json()
        assert (card["has_chat_template"], card["supports_tools"]) == (True, has_parser)
        assert card["generation_config"] == {"temperature": 0.6, "max_new_tokens": 99}


def test_model_cards_name_the_format_of_quantized_weights(served: ServedModel):
    model = copy.deepcopy(served.model)
    quantize_(model, "int8")
    with running(replace(served, model=model)) as run:
        card = run.client.get("/v1/models/tiny").json()
    assert (card["dtype"], card["num_parameters"]) == ("int8", served.model.num_parameters())


def test_generation_stops_at_the_capacity_of_the_kv_cache(served: ServedModel):
    with running(served, num_blocks=5) as run:
        assert run.client.get("/v1/models/tiny").json()["context_length"] == 64
        body = CHAT_BODY | {"logit_bias": {"50256": -100}}
        response = run.client.post(CHAT, json=body).json()
        assert (response["usage"]["total_tokens"], response["choices"][0]["finish_reason"]) == (64, "length")
        assert error(run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"prompt": [1] * 64})) == (
            400,
            "context_length_exceeded",
        )


def test_generation_stops_at_the_context_length(served: ServedModel):
    with running(served) as run:
        body = COMPLETION_BODY | {"prompt": [1] * 120, "max_tokens": 100, "logit_bias": {"50256": -100}}
        response = run.client.post(COMPLETIONS, json=body).json()
        assert (response["usage"]["completion_tokens"], response["choices"][0]["finish_reason"]) == (8, "length")
        assert error(run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"prompt": [1] * 128})) == (
            400,
            "context_length_exceeded",
        )
        scored = run.client.post(
            COMPLETIONS, json=COMPLETION_BODY | {"prompt": [1] * 128, "max_tokens": 0, "echo": True}
        )
        assert scored.json()["usage"] == {"prompt_tokens": 128, "completion_tokens": 0, "total_tokens": 128}


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_failure_returns_an_error(served: ServedModel, stream: bool):
    with running(served) as run:
        run.engine.failing = 1
        response = run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"stream": stream})
        assert response.status_code == (200 if stream else 500)
        assert json.loads(response.text.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert run.client.get("/health").status_code == 200
        assert run.client.post(COMPLETIONS, json=COMPLETION_BODY).status_code == 200


def test_health_returns_503_while_the_engine_keeps_failing(served: ServedModel):
    with running(served) as run:
        run.engine.failing = 3
        assert [run.client.post(COMPLETIONS, json=COMPLETION_BODY).status_code for _ in range(3)] == [500] * 3
        assert error(run.client.get("/health")) == (503, "engine_failed")
        assert run.client.post(COMPLETIONS, json=COMPLETION_BODY).status_code == 200
        assert run.client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_logits_fail_requests_and_health(served: ServedModel, value: float, caplog):
    weight = served.model.lm_head.weight
    original = weight.detach().clone()
    with running(served) as run, caplog.at_level(logging.ERROR):
        try:
            with torch.no_grad():
                weight.fill_(value)
            for failures in range(MAX_STEP_FAILURES):
                assert run.client.get("/health").status_code == 200
                response = run.client.post(COMPLETIONS, json=COMPLETION_BODY)
                assert error(response) == (500, "engine_failed")
                assert "non-finite logits" in response.json()["error"]["message"]
                assert caplog.text.count("the model produced non-finite logits") == failures + 1
        finally:
            with torch.no_grad():
                weight.copy_(original)
        assert error(run.client.get("/health")) == (503, "engine_failed")
        assert run.client.post(COMPLETIONS, json=COMPLETION_BODY).status_code == 200
        assert run.client.get("/health").status_code == 200


def access_log(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the server's log, without durations."""
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("whimbrel.server")]
    return [re.sub(r"[0-9.]+ ms", "T", line) for line in lines]


def test_access_log_has_one_line_per_request(served: ServedModel, caplog):
    with caplog.at_level(logging.INFO, "whimbrel.server"), running(served) as run:
        run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"logit_bias": {"50256": -100}, "user": "a\nb"})
        run.client.post(CHAT, json=CHAT_BODY | {"max_tokens": 2, "stream": True, "logit_bias": {"50256": -100}})
        run.client.get("/v1/nothing%0Ahere?key=secret")
        run.client.get("/v1/models")
    lines = access_log(caplog)
    prompt = len(served.encode_chat(CHAT_BODY["messages"], 100).ids)
    assert sorted(lines) == [
        "127.0.0.1 GET /v1/models 200 T",
        "127.0.0.1 GET /v1/nothing%0Ahere 404 T",
        f"127.0.0.1 POST /v1/chat/completions 200 T prompt_tokens={prompt} completion_tokens=2",
        r"127.0.0.1 POST /v1/completions 200 T prompt_tokens=1 completion_tokens=3 user='a\nb'",
    ]


def test_files_of_the_pages_and_polling_are_logged_only_at_level_debug(served: ServedModel, caplog):
    paths = ["/", "/page/chat.js", "/health", "/metrics"]
    for level, expected in ((logging.INFO, []), (logging.DEBUG, [f"127.0.0.1 GET {path} 200 T" for path in paths])):
        caplog.clear()
        with caplog.at_level(level, "whimbrel.server"), running(served) as run:
            for path in paths:
                assert run.client.get(path).status_code == 200
        assert access_log(caplog) == expected
    caplog.clear()
    with caplog.at_level(logging.INFO, "whimbrel.server"), running(served) as run:
        run.client.post("/page/chat.js")
        run.service.requests.draining = True
        run.client.get("/health")
    assert access_log(caplog) == ["127.0.0.1 POST /page/chat.js 405 T", "127.0.0.1 GET /health 503 T"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/health", "/", "/nothing"])
def test_options_requires_the_key(served: ServedModel, path: str):
    with running(served, api_key="k") as run:
        rejected = run.client.options(path, headers={"Authorization": "Bearer wrong"})
        assert error(rejected) == (401, "invalid_api_key")
        assert run.client.options(path).status_code in (404, 405)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (COMPLETIONS, COMPLETION_BODY | {"\ud800": 1}),
        (COMPLETIONS, COMPLETION_BODY | {"stream": True, "stream_options": {"\ud800": 1}}),
        (COMPLETIONS, COMPLETION_BODY | {"logit_bias": {"\ud800": 1}}),
        (COMPLETIONS, COMPLETION_BODY | {"user": "\ud800"}),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "a", "\ud800": 1}]}),
        (CHAT, {"model": "tiny", "messages": [{"role": "\ud800", "content": "a"}]}),
    ],
)
def test_a_lone_surrogate_anywhere_in_a_body_is_a_bad_request(served: ServedModel, route: str, body: dict[str, object]):
    with running(served) as run:
        response = run.client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert error(response)[0] == 400


@pytest.mark.parametrize("digits", [20, 400, 4300, 4301])
@pytest.mark.parametrize("field", ["prompt", "n", "seed", "max_tokens", "temperature", "model"])
def test_an_integer_of_any_length_is_a_bad_request(served: ServedModel, field: str, digits: int):
    body = json.dumps(COMPLETION_BODY | {field: "X"}).replace('"X"', "9" * digits)
    with running(served) as run:
        response = run.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert error(response)[0] == 400
        assert len(response.text) < 500


def test_allowed_hosts_on_loopback(served: ServedModel):
    for allowed, name, status in (((), "box.lan", 421), (("box.lan",), "BOX.lan:80", 200), (("*",), "any", 200)):
        with running(served, allowed_hosts=allowed) as run:
            assert run.client.get("/health", headers={"Host": name}).status_code == status
            assert run.client.get("/health", headers={"Host": "localhost"}).status_code == 200


def test_allowed_hosts_on_other_addresses(served: ServedModel):
    with running(served, host="0.0.0.0", api_key="k") as run:
        assert run.client.get("/v1/models", headers={"Host": "box.lan"}).status_code == 200
    with running(served, host="0.0.0.0", api_key="k", allowed_hosts=("box.lan",)) as run:
        assert run.client.get("/v1/models", headers={"Host": "box.lan"}).status_code == 200
        assert run.client.get("/v1/models", headers={"Host": "localhost"}).status_code == 421


def test_no_route_requires_a_key_if_none_is_configured(served: ServedModel):
    with running(served) as run:
        assert run.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        document = run.client.get("/openapi.json").json()
        assert "securitySchemes" not in document["components"]
        assert run.client.get("/").headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert (
            "Access-Control-Allow-Origin" not in run.client.get("/v1/models", headers={"Origin": "http://a.b"}).headers
        )


def test_shutdown_stops_requests_after_drain_seconds(served: ServedModel):
    with running(served, drain_seconds=0.1) as run:
        run.engine.unblock.clear()
        with run.client.stream("POST", COMPLETIONS, json=COMPLETION_BODY | {"stream": True}) as response:
            loop = run.service.worker._loop
            loop.call_soon_threadsafe(run.server.stop)
            wait_for(lambda: run.server.should_exit)
            run.engine.unblock.set()
            lines = [line for line in response.iter_lines() if line]
        assert "engine_stopped" in lines[-1] or lines[-1] == "data: [DONE]"
        run.thread.join(20)
        assert not run.thread.is_alive()


def test_metrics_count_requests_and_tokens(served: ServedModel):
    with running(served) as run:
        run.client.post(COMPLETIONS, json=COMPLETION_BODY | {"logit_bias": {"50256": -100}})
        run.client.get("/v1/no-such-thing")
        text = run.client.get("/metrics").text
        assert "whimbrel_engine_new_tokens_total 3.0" in text
        blocks = re.findall(r"^whimbrel_kv_cache_(?:free_)?blocks (\S+)$", text, flags=re.MULTILINE)
        assert len(blocks) == 2
        assert blocks[0] == blocks[1]
        assert "whimbrel_engine_healthy 1.0" in text
        assert "page" not in text
        assert 'whimbrel_requests_total{route="/v1/completions",status="200"} 1.0' in text
        assert 'whimbrel_requests_total{route="other",status="404"} 1.0' in text
    with running(served) as other:
        assert "whimbrel_engine_new_tokens_total 0.0" in other.client.get("/metrics").text
