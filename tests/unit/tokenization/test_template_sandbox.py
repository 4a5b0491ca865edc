"""Limits of the template sandbox, and its child process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from whimbrel.base.errors import DataError, RequestError
from whimbrel.tokenization import ChatTemplate, load_chat_template, template_sandbox
from whimbrel.tokenization.template_sandbox import LimitExceededError, TemplateSandbox

MESSAGES = [{"role": "user", "content": "Hello"}]
VARIABLES = {"messages": MESSAGES}
PLAIN = "{{ messages[0].content }}"
DOUBLING = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
NESTING = "{% set ns = namespace(s=[]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{{ 10 ** 1000000000 }}"  # evaluated when it is compiled

if not Path("/proc/self/statm").exists():
    pytest.skip("memory is limited on Linux only", allow_module_level=True)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    made = TemplateSandbox()
    yield made
    made.close()


@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        POWER,
        DOUBLING,
        NESTING,
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * messages[0].content | length * 10 ** 10 }}",
        "{{ messages[0].content.center(10 ** 10) }}",
        "{{ messages[0].content | center(10 ** 10) }}",
        "{{ '{:>10000000000}'.format(messages[0].role) }}",
        "{{ lipsum(n=99999, min=99999, max=999999) }}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}",
        "(" * 100_000 + "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    ],
    ids=range(13),
)
def test_an_unbounded_template_is_killed_and_the_next_renders(sandbox: TemplateSandbox, source: str):
    with pytest.raises((LimitExceededError, template_sandbox.InvalidTemplateError)):
        sandbox.render(source, VARIABLES)
    assert sandbox.render(PLAIN, VARIABLES) == "Hello"


def test_limits_reject_a_request_or_a_model_directory(tmp_path: Path):
    sometimes = "{% if messages | length > 1 %}" + LOOPS + "{% endif %}" + PLAIN
    template = ChatTemplate(sometimes)
    with pytest.raises(RequestError, match="more than 2 s of CPU time.* to render these messages"):
        template.render(MESSAGES * 2)
    assert template.render(MESSAGES) == "Hello"
    (tmp_path / "chat_template.jinja").write_text(LOOPS)
    with pytest.raises(DataError, match="chat template takes more than 2 s .* to render one short message"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(POWER)
    with pytest.raises(DataError, match="chat template takes more than .* to compile"):
        load_chat_template(tmp_path)


def test_a_template_that_rejects_a_single_message_loads_with_a_warning(tmp_path: Path, caplog):
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only\x1btools') }}")
    assert load_chat_template(tmp_path) is not None
    assert "rejects a single user message: 'only\\x1btools'" in caplog.text


def test_a_template_that_is_not_utf8_is_rejected(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template\.jinja.* not UTF-8 at byte 0"):
        load_chat_template(tmp_path)


def test_threads_receive_their_own_results(sandbox: TemplateSandbox):
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = sandbox.render("{{ number }}", {"number": number})

    threads = [threading.Thread(target=ask, args=[number]) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {number: str(number) for number in range(4)}


def test_a_killed_child_is_replaced(sandbox: TemplateSandbox):
    assert sandbox.render(PLAIN, VARIABLES) == "Hello"
    os.kill(sandbox._process.pid, signal.SIGKILL)
    with pytest.raises(LimitExceededError, match="exit code -9"):
        sandbox.render(PLAIN, VARIABLES)
    assert sandbox.render(PLAIN, VARIABLES) == "Hello"


def test_an_interrupted_call_does_not_leak_its_result(sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch):
    def interrupted(file) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(template_sandbox, "_read_message", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sandbox.render("{{ 'first' }}", {})
    assert sandbox.render("{{ 'second' }}", {}) == "second"


def test_the_child_does_not_inherit_secrets(sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WHIMBREL_API_KEY", "secret")
    sandbox.close()
    sandbox.render(PLAIN, VARIABLES)
    known = Path(f"/proc/{sandbox._process.pid}/environ").read_bytes()
    assert b"secret" not in known


def test_messages_must_be_json(sandbox: TemplateSandbox):
    with pytest.raises(template_sandbox.RenderError, match="expected messages with only JSON values"):
        sandbox.render(PLAIN, {"messages": [object()]})
    text = json.dumps(["é\u2028", "\ud800"])
    assert sandbox.render("{{ text }}", {"text": text}) == text
