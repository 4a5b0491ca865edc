"""The chat page and the API page in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.pages import LOW_CONTRAST, LOW_CONTROL_CONTRAST
from tests.e2e.serving import ServerProcess, serving
from tests.support.models import save_with_adapters

pytest.importorskip("selenium", reason="needs the package 'selenium'")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

TIMEOUT_SECONDS = 60
CARD = {
    "id": "helper",
    "parent": None,
    "context_length": 2048,
    "num_parameters": 135_000_000,
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "has_chat_template": True,
    "supports_tools": True,
    "generation_config": {"temperature": 0.6, "top_p": 0.9},
}
# Replaces the API: `replies` are the deltas of one response each; the bodies of the requests are kept in `sent`.
FAKE_API = """
const [card, replies] = %s;
window.sent = [];
const encode = (event) => `data: ${JSON.stringify(event)}\\n\\n`;
window.fetch = async (path, options) => {
  if (path === "/page/access") return new Response(JSON.stringify({ authorized: true }));
  if (path === "/v1/models") return new Response(JSON.stringify({ data: [card] }));
  window.sent.push(JSON.parse(options.body));
  const choice = (delta, finish_reason = null) => ({ choices: [{ index: 0, delta, finish_reason }] });
  const usage = { prompt_tokens: 20, completion_tokens: 10, total_tokens: 30 };
  const events = [...replies.shift().map((delta) => choice(delta)), choice({}, "stop"), { choices: [], usage }];
  return new Response(events.map(encode).join("") + "data: [DONE]\\n\\n");
};
"""


class Page:
    """Page object: reads and operates the chat page."""

    def __init__(self, browser: webdriver.Chrome, server: ServerProcess) -> None:
        self.browser = browser
        browser.get(f"{server.url}/health")  # the chat page itself could save its state after this
        browser.execute_script("sessionStorage.clear()")
        browser.get_log("browser")  # of earlier tests
        browser.get(server.url)

    def find(self, id: str):  # noqa: A002
        return self.browser.find_element(By.ID, id)

    def until(self, condition):
        return WebDriverWait(self.browser, TIMEOUT_SECONDS, 0.05).until(lambda _: condition())

    def turns(self) -> list[tuple[str, str]]:
        """Role and text of each turn; read at once, since they are replaced while a response streams."""
        script = "return [...document.querySelectorAll('#turns article')].map((turn) => [turn.className, {}])"
        return [(role, text) for role, text in self.run(script.format("turn.querySelector('.content').textContent"))]

    def last(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, f"#turns article:last-of-type {selector}")

    def press(self, name: str, turn: int = -1) -> None:
        """Press a button of a turn."""
        turns = self.browser.find_elements(By.CSS_SELECTOR, "#turns article")
        [button] = [each for each in turns[turn].find_elements(By.TAG_NAME, "button") if each.text == name]
        button.send_keys(Keys.ENTER)

    def mode(self, name: str) -> None:
        self.browser.find_element(By.CSS_SELECTOR, f"label[for=mode-{name}]").click()

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def set(self, id: str, value: str) -> None:  # noqa: A002
        # opened automatically if the key is missing
        self.browser.execute_script("document.getElementById('settings').open = true")
        field = self.find(id)
        field.clear()
        field.send_keys(value, Keys.TAB)

    def in_chat(self, server: ServerProcess, **settings: str) -> None:
        """Enter the key, choose Chat and change settings."""
        self.enter(server.key)
        self.mode("chat")
        for name, value in settings.items():
            self.set(name, value)

    def enter(self, key: str) -> None:
        self.set("key", key)
        self.until(lambda: self.find("model").text == "tiny")

    def send(self, text: str) -> None:
        self.find("text").send_keys(text, Keys.ENTER)

    def messages(self) -> list[dict[str, str]]:
        """The conversation, before Markdown."""
        chat = json.loads(self.run("return sessionStorage.getItem('whimbrel.state')"))["chat"]
        return [{name: message[name] for name in ("role", "content")} for message in chat]

    def replies(self) -> list[str]:
        """The text of the assistant's messages."""
        return [message["content"] for message in self.messages() if message["role"] == "assistant"]

    def problems(self) -> list[str]:
        """Errors in the console since the last call."""
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def is_idle(self) -> bool:
        return self.find("turns").get_attribute("aria-busy") == "false"


@pytest.fixture(scope="module")
def adapter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model and two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    save_with_adapters(folder, ["first", "second"])
    with serving(folder / "base", *(f"--adapter={name}={folder / name}" for name in ("first", "second"))) as process:
        yield process


@pytest.fixture
def fake_page(browser: webdriver.Chrome, server: ServerProcess) -> Iterator[Any]:
    """Opens the page with a fake API: `fake_page(replies, **card)`. Checks that it logs no errors, as do the others."""
    scripts, pages = [], []

    def open_page(replies: list[list[dict[str, Any]]], **card: Any) -> Page:
        source = FAKE_API % json.dumps([CARD | card, replies])
        result = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
        scripts.append(result["identifier"])
        page = Page(browser, server)
        pages.append(page)
        page.until(lambda: page.find("model").text == "helper")
        return page

    yield open_page
    assert [problem for page in pages for problem in page.problems()] == []
    for identifier in scripts:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": identifier})


@pytest.fixture
def adapter_page(browser: webdriver.Chrome, adapter_server: ServerProcess) -> Iterator[Page]:
    """The page of the server with adapters, whose context has 128 tokens; the model is chosen."""
    page = Page(browser, adapter_server)
    page.set("key", adapter_server.key)
    page.until(lambda: page.find("model").get_property("value") == "base")
    yield page
    assert page.problems() == []


@pytest.fixture
def page(browser: webdriver.Chrome, server: ServerProcess) -> Iterator[Page]:
    page = Page(browser, server)
    yield page
    assert page.problems() == []


def test_the_page_asks_for_the_key_and_then_shows_the_model(page: Page, server: ServerProcess):
    page.until(lambda: "API key" in page.find("status").text)
    page.enter(server.key)
    assert not page.find("model").is_enabled()  # it is the only one
    assert page.find("status").text == ""
    assert page.browser.execute_script("return sessionStorage.getItem('whimbrel.key')") == server.key
    assert page.browser.execute_script("return localStorage.length") == 0
    page.set("key", "wrong")
    page.until(lambda: page.find("status").text == "The API key is incorrect.")


def test_a_key_that_cannot_be_sent_is_explained(page: Page, server: ServerProcess):
    page.until(lambda: "API key" in page.find("status").text)
    page.set("key", "ключ")
    page.until(lambda: "printable ASCII" in page.find("status").text)
    page.browser.get(f"{server.url}/docs")
    page.until(lambda: "printable ASCII" in page.find("routes").text)
    page.browser.get(server.url)
    page.enter(server.key)
    assert page.find("status").text == ""


def test_a_base_model_opens_in_complete_mode(page: Page, server: ServerProcess):
    page.enter(server.key)
    assert page.find("mode-complete").is_selected()
    assert "base model" in page.find("introduction").text
    facts = page.find("facts").text.split("\n")
    assert facts[facts.index("Context") + 1] == "4,096 tokens"
    assert facts[facts.index("Type") + 1] == "Base model"
    page.set("temperature", "0")
    page.set("max_tokens", "12")
    assert page.find("greeting").text == "Complete text with tiny"
    assert "The text may be wrong." in page.browser.find_element(By.CSS_SELECTOR, ".hint").text
    example = page.browser.find_element(By.CSS_SELECTOR, "#examples button")
    assert example.text == "Once upon a time"
    example.send_keys(Keys.ENTER)
    page.until(lambda: page.is_idle() and len(page.turns()) == 1)
    body = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
    with server.client() as client:
        first = body["prompt"] + client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert page.turns() == [("completion", first)]
        page.press("Continue")
        page.until(lambda: page.is_idle() and len(page.turns()[0][1]) > len(first))
        body["prompt"] = first
        second = first + client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert page.turns() == [("completion", second)]
    assert not page.find("welcome").is_displayed()
    page.press("Edit")
    field = page.last("textarea")
    assert field.get_property("value") == second
    field.clear()
    field.send_keys("Once upon a time", Keys.ENTER)  # the same text as before
    page.until(lambda: page.is_idle() and page.turns() == [("completion", first)])


def test_a_conversation_streams_and_survives_a_reload(page: Page, server: ServerProcess):
    page.in_chat(server, temperature="0", max_tokens="12", system="Be brief.")
    page.send("Hello")
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    assert page.find("status").text == "Stopped at the token limit."
    assert page.last(".stats").text.startswith("12 tokens · ")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
    with server.client() as client:
        first = client.post("/v1/chat/completions", json=body).json()
        reply = first["choices"][0]["message"]["content"]
        assert page.replies() == [reply]
        assert page.find("used").text == f"{first['usage']['total_tokens']} of 4,096 tokens"
        page.send("And then?")
        page.until(lambda: page.is_idle() and len(page.turns()) == 4)
        assert [role for role, _ in page.turns()] == ["user", "assistant"] * 2
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
        second_reply = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert page.replies() == [reply, second_reply]
    page.browser.refresh()
    page.until(lambda: page.find("model").text == "tiny")
    assert page.find("mode-chat").is_selected()
    assert len(page.turns()) == 4
    page.find("new").click()
    assert page.turns() == []
    page.browser.refresh()
    page.until(lambda: page.find("model").text == "tiny")
    assert page.turns() == []
    assert page.find("welcome").is_displayed()


def test_replies_are_regenerated_and_messages_edited(fake_page: Any):
    page = fake_page([[{"content": text}] for text in ("one", "two", "three", "four", "five")])
    page.send("Count")
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    page.send("Go on")
    page.until(lambda: page.is_idle() and len(page.turns()) == 4)
    page.press("Regenerate")
    page.until(lambda: page.is_idle() and page.turns()[3][1].strip() == "three")
    page.press("Edit", turn=0)
    field = page.browser.find_element(By.CSS_SELECTOR, "article textarea")
    field.send_keys(Keys.ESCAPE)
    assert len(page.turns()) == 4  # cancelled
    assert page.run("return document.activeElement.textContent") == "Edit"
    page.press("Edit", turn=0)
    page.browser.find_element(By.CSS_SELECTOR, "article textarea").send_keys(" down", Keys.ENTER)
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    assert [text.strip() for _, text in page.turns()] == ["Count down", "four"]
    assert page.run("return sent.map(({ messages }) => messages.map(({ content }) => content))") == [
        ["Count"],
        ["Count", "one", "Go on"],
        ["Count", "one", "Go on"],
        ["Count down"],
    ]


def test_texts_are_continued_regenerated_and_edited(fake_page: Any):
    replies = [[{"content": text}] for text in (" one", " two", " three", " four", " five")]
    page = fake_page(replies, has_chat_template=False)

    def until_texts(*texts: str) -> None:
        page.until(lambda: page.is_idle() and [text for _, text in page.turns()] == list(texts))

    page.send("A")
    until_texts("A one")
    page.press("Continue")
    until_texts("A one two")
    page.press("Regenerate")  # only what Continue has added
    until_texts("A one three")
    page.send("B")
    until_texts("A one three", "B four")
    page.press("Edit", turn=0)
    page.browser.find_element(By.CSS_SELECTOR, "article textarea").send_keys(Keys.ENTER)
    until_texts("B four", "A one three five")
    assert page.run("return sent.map(({ prompt }) => prompt)") == ["A", "A one", "A one", "B", "A one three"]


def test_the_examples_for_a_base_model_are_texts_to_continue(fake_page: Any):
    page = fake_page([[{"content": ", a bird"}]], has_chat_template=False)
    examples = page.find("examples").text
    page.mode("chat")
    assert page.find("greeting").text == "Chat with helper"
    assert page.find("examples").text == examples
    page.browser.find_element(By.CSS_SELECTOR, "#examples button").send_keys(Keys.ENTER)
    page.until(lambda: page.is_idle() and page.turns() == [("completion", "Once upon a time, a bird")])
    assert page.find("mode-complete").is_selected()
    assert page.run("return sent.map(({ prompt }) => prompt)") == ["Once upon a time"]


def test_the_status_belongs_to_the_mode(fake_page: Any):
    page = fake_page([[{"content": " one"}]], has_chat_template=False)
    page.send("A")
    page.until(lambda: page.find("status").text == "The model ended the text.")
    page.mode("chat")
    assert page.find("status").text == ""
    page.mode("complete")
    assert page.find("status").text == ""


def test_an_empty_answer_is_explained_and_the_focus_stays(fake_page: Any):
    page = fake_page([[]])
    page.send("Hello")
    page.until(lambda: page.find("status").text == "The answer is empty: the model stopped immediately.")
    assert page.run("return document.activeElement.id") == "text"


def test_defaults_are_those_of_the_model(fake_page: Any):
    page = fake_page([[{"content": "Hi"}], [{"content": "Hi"}]])
    assert page.find("mode-chat").is_selected()
    assert page.find("greeting").text == "Chat with helper"
    assert "Answers may be wrong." in page.browser.find_element(By.CSS_SELECTOR, ".hint").text
    page.send("Hello")
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    page.set("top_p", "0.5")
    page.send("Hello")
    page.until(lambda: page.is_idle() and len(page.turns()) == 4)
    first, second = page.run("return sent")
    assert {name: first[name] for name in ("temperature", "top_p", "max_tokens")} == {
        "temperature": 0.6,
        "top_p": 0.9,
        "max_tokens": 1024,  # half of the context
    }
    assert second["top_p"] == 0.5
    assert "top_k" not in first
    page.find("defaults").click()
    assert page.find("top_p").get_property("value") == ""


def test_markdown_is_rendered_and_sanitized(fake_page: Any):
    text = (
        "# Title\n\n**bold** <b>raw</b> <img src=x onerror=\"document.title='injected'\">\n\n"
        "```python\nprint('<i>')\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "![picture](https://example.com/x.png) [site](https://example.com) [bad](javascript:alert(1))\n\n"
        "<script>document.title='injected'</script>\n<div style='color: red'>styled</div>"
    )
    page = fake_page([[{"content": piece} for piece in (text[:40], text[40:])]])
    page.browser.execute_script("document.getElementById('text').value = arguments[0]", text)
    page.send("")
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    assert page.turns()[0] == ("user", text)
    count = "return document.querySelectorAll('#turns article {}').length"
    assert page.run(count.format("img, #turns script, #turns b, #turns div[style], #turns [onerror]")) == 0
    assert page.run(count.format("h1, #turns strong, #turns th, #turns pre code")) == 5
    assert page.last("strong").text == "bold"
    assert "<b>raw</b>" in page.last(".content").text
    assert page.last("pre").text == "print('<i>')"
    assert page.last(".code-header span").text == "python"
    links = page.run("return [...document.querySelectorAll('#turns a')].map((a) => [a.textContent, a.href, a.rel])")
    assert ["site", "https://example.com/", "noopener noreferrer"] in links
    assert not [href for _, href, _ in links if "javascript" in href]
    assert "injected" not in page.browser.title
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.last(".code-header button").send_keys(Keys.ENTER)
    page.until(lambda: page.run("return window.copied") == "print('<i>')\n")
    page.last(".actions button").send_keys(Keys.ENTER)
    page.until(lambda: page.run("return window.copied") == text)
    assert page.problems() == []


def test_an_answer_that_cannot_be_rendered_is_shown_as_text(fake_page: Any):
    nested = ">" * 9000
    page = fake_page([[{"content": nested}], [{"content": "**Fine**"}]])
    page.send("Quote")
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    assert page.turns()[1] == ("assistant", nested)
    page.send("And now?")
    page.until(lambda: page.is_idle() and len(page.turns()) == 4)
    assert page.last("strong").text == "Fine"
    page.browser.refresh()
    page.until(lambda: len(page.turns()) == 4)
    assert page.replies() == [nested, "**Fine**"]
    assert page.problems() == []


def test_a_conversation_that_cannot_be_stored_continues(fake_page: Any):
    page = fake_page([[{"content": "One"}], [{"content": "Two"}]])
    page.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    for turns in (2, 4):
        page.send("Count")
        page.until(lambda turns=turns: page.is_idle() and len(page.turns()) == turns)
        assert "will be lost" in page.find("status").text
    page.press("Edit", turn=0)  # the buttons are shown once an answer is complete
    assert page.problems() == []


def test_enter_of_an_input_method_does_not_send(fake_page: Any):
    page = fake_page([[{"content": "Hi"}]])
    page.find("text").send_keys("こん")
    enter = (
        "document.getElementById('text').dispatchEvent("
        "new KeyboardEvent('keydown', {{key: 'Enter', keyCode: {}, bubbles: true, cancelable: true}}))"
    )
    page.run(enter.format(229))  # as in Safari, where isComposing is already false
    assert page.find("text").get_property("value") == "こん"
    page.run(enter.format(13))
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)


def test_tool_calls_are_shown_and_their_results_sent(fake_page: Any):
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    page = fake_page([[{"content": ""}, {"tool_calls": [call]}], [{"content": "It rains."}]])
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    page.set("tools", json.dumps(tools))
    page.send("Is it raining in Oslo?")
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    assert page.last(".call code").text == "get_weather"
    assert json.loads(page.last(".call pre").text) == {"city": "Oslo"}
    assert page.find("text-label").get_property("textContent") == "Result of get_weather"
    page.send("rain")
    page.until(lambda: page.is_idle() and len(page.turns()) == 4)
    first, second = page.run("return sent")
    assert first["tools"] == second["tools"] == tools
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{name: call[name] for name in ("id", "type", "function")}]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "get_weather"},
    ]


@pytest.mark.parametrize("key", [None, Keys.ESCAPE], ids=["button", "escape"])
def test_generation_is_stopped(page: Page, server: ServerProcess, key: str | None):
    page.in_chat(server, temperature="0", max_tokens="4000")  # sampling could end the reply early
    page.send("Tell me everything")
    page.until(lambda: len(page.turns()) == 2 and len(page.turns()[1][1]) > 20)
    server.process.send_signal(signal.SIGSTOP)  # it must not finish before the click
    try:
        assert page.find("stop").is_displayed()
        assert not page.find("send").is_displayed()
        if key:
            page.find("text").send_keys(key)
        else:
            page.find("stop").click()
        page.until(page.is_idle)
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert page.find("status").text == "Stopped."
    assert page.find("send").is_displayed()
    server.wait_until_idle()
    assert len(page.turns()) == 2
    assert page.last(".stats").text.startswith("about ")


def test_an_error_is_shown_and_the_message_restored(page: Page, server: ServerProcess):
    page.in_chat(server, temperature="9")
    page.send("Hello")
    page.until(lambda: "temperature" in page.find("status").text)
    assert page.turns() == []
    assert page.find("text").get_attribute("value") == "Hello"
    [problem] = page.problems()
    assert "400" in problem


def test_a_message_that_fails_does_not_replace_the_next_one(fake_page: Any):
    page = fake_page([])
    page.run("window.fetch = () => new Promise((_, reject) => { window.fail = () => reject(new TypeError('x')); })")
    page.send("First")
    page.until(lambda: page.run("return window.fail !== undefined"))
    page.find("text").send_keys("Second")
    page.run("window.fail()")
    page.until(page.is_idle)
    assert page.find("text").get_property("value") == "First\n\nSecond"
    assert page.turns() == []


@pytest.mark.parametrize("screen", [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_no_errors_external_requests_overflow_or_low_contrast(fake_page: Any, server: ServerProcess, screen):
    code = "```python\n" + "x = 1  # long\n" * 3 + "y" * 200 + "\n```\n"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    page = fake_page(
        [[{"content": code + "> quote\n\n`code` [link](https://example.com)"}, {"tool_calls": [call | {"index": 0}]}]]
    )
    width, height = screen
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    try:
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for turns in (0, 2):
            if turns:
                page.send("word " * 50 + "long" * 50)
                page.until(lambda: page.is_idle() and len(page.turns()) == 2)
            page.run("document.getElementById('settings').open = true")
            colors = set()
            for scheme in ("light", "dark"):
                wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
                colors.add(page.browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color"))
                assert page.run(LOW_CONTRAST) == []
                assert page.run(LOW_CONTROL_CONTRAST) == []
                assert page.run("return document.documentElement.scrollWidth") <= width
            assert len(colors) == 2
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(loaded) > 5
    assert [name for name in loaded if not name.startswith(server.url)] == []
    unnamed = (
        "const fields = [...document.querySelectorAll('input, select, textarea, progress')]; return fields.filter("
    )
    assert page.run(unnamed + "(field) => !field.labels.length).length") == 0
    skipped = "return [...document.querySelectorAll('input, select, textarea, button, a, summary, pre')].filter("
    assert (
        page.run(skipped + "(node) => node.checkVisibility() && node.tabIndex < 0 && !node.closest('.call')).length")
        == 0
    )
    assert page.browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
    assert page.problems() == []


def test_the_tab_key_reaches_everything_in_order_and_shows_the_focus(fake_page: Any):
    page = fake_page([])
    order: list[str] = []
    while "mode-chat" not in order:
        assert len(order) < 20, order
        name, outline = page.run(
            "const node = document.activeElement;"
            "const shown = node.type === 'radio' ? node.nextElementSibling : node;"  # the radio buttons are invisible
            "return [node.id === 'text' ? 'text' : node.textContent || node.id, getComputedStyle(shown).outlineStyle]"
        )
        assert outline == "solid", name
        order.insert(0, name.strip())
        page.browser.switch_to.active_element.send_keys(Keys.SHIFT, Keys.TAB)
    examples = [button.text for button in page.browser.find_elements(By.CSS_SELECTOR, "#examples button")]
    assert len(examples) == 3
    assert order == ["mode-chat", "New", "Settings", *examples, "text"]


def test_one_of_several_models_is_chosen(browser: webdriver.Chrome, adapter_server: ServerProcess):
    page = Page(browser, adapter_server)
    page.set("key", adapter_server.key)
    page.until(lambda: [option.text for option in Select(page.find("model")).options] == ["base", "first", "second"])
    page.set("temperature", "0")
    page.set("max_tokens", "12")
    with adapter_server.client() as client:
        for name in ("second", "base"):
            Select(page.find("model")).select_by_value(name)
            assert page.find("status").text == ""  # no longer that of the other model's answer
            page.browser.refresh()
            page.until(lambda: page.find("model").get_property("value"))
            assert page.find("model").get_property("value") == name
            page.mode("chat")
            page.find("new").click()
            page.send("Hello")
            page.until(lambda: page.is_idle() and len(page.turns()) == 2)
            body = {
                "model": name,
                "messages": [{"role": "user", "content": "Hello"}],
                "temperature": 0,
                "max_tokens": 12,
            }
            expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            assert page.replies() == [expected]
            assert page.last(".author").text == name
            body["model"] = "first"
            assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] != expected


def test_the_docs_page_shows_every_route_and_field(page: Page, server: ServerProcess):
    page.enter(server.key)
    page.browser.get(f"{server.url}/docs")
    page.until(lambda: page.browser.find_elements(By.CSS_SELECTOR, "section h2"))
    headings = [heading.text for heading in page.browser.find_elements(By.CSS_SELECTOR, "section h2")]
    assert {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "GET /health"} <= set(headings)
    fields = {field.text for field in page.browser.find_elements(By.CSS_SELECTOR, "section th")}
    assert {"prompt", "messages", "max_tokens", "stop", "seed", "logprobs", "stream_options"} <= fields
    assert "number (> 0, ≤ 1)" in page.find("routes").text  # top_p
    commands = [code.text for code in page.browser.find_elements(By.CSS_SELECTOR, "pre")]
    [command] = [each for each in commands if "/v1/chat/completions" in each]
    environment = os.environ | {"WHIMBREL_API_KEY": server.key}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout)["object"] == "chat.completion"
    assert page.problems() == []


def test_the_docs_page_says_where_to_enter_the_key(page: Page, server: ServerProcess):
    page.browser.get(f"{server.url}/docs")
    page.until(lambda: "API key" in page.find("routes").text)


def test_a_conversation_longer_than_the_context_drops_its_oldest_messages(page: Page, server: ServerProcess):
    page.in_chat(server, max_tokens="2")
    page.run(
        "const long = 'so '.repeat(5000);"
        "const chat = [{role: 'user', content: long}, {role: 'assistant', content: long, model: 'tiny'}];"
        "sessionStorage.setItem('whimbrel.state', JSON.stringify({mode: 'chat', chat}))"
    )
    page.browser.refresh()
    page.until(lambda: page.find("model").text == "tiny")
    page.send("Hello")
    page.until(lambda: page.is_idle() and len(page.turns()) == 4)
    assert "Older messages were left out" in page.find("status").text
    divider = page.browser.find_element(By.CSS_SELECTOR, "#turns .divider + article")
    assert divider.find_element(By.CLASS_NAME, "content").text == "Hello"


def test_only_messages_that_do_not_fit_are_dropped(adapter_page: Page, adapter_server: ServerProcess):
    """A token is a byte: the first message has more of them per character than the others."""
    page = adapter_page
    page.mode("chat")
    page.set("temperature", "0")
    page.set("max_tokens", "2")
    shown, expected = [], []
    with adapter_server.client() as client:
        for turn, first_kept in ((1, 0), (2, 0), (3, 4)):
            page.send("☃" * 8 if turn == 1 else "a" * 30)
            page.until(lambda turn=turn: page.is_idle() and len(page.turns()) == 2 * turn)
            shown.append((page.find("used").text, len(page.browser.find_elements(By.CLASS_NAME, "divider"))))
            messages = page.messages()[first_kept:-1]
            body = {"model": "base", "messages": messages, "temperature": 0, "max_tokens": 2}
            usage = client.post("/v1/chat/completions", json=body).json()["usage"]
            expected.append((f"{usage['total_tokens']} of 128 tokens", int(first_kept > 0)))
    assert shown == expected
    requests = page.run("return performance.getEntriesByType('resource').map(({ name }) => name)")
    assert len([name for name in requests if name.endswith("/v1/chat/completions")]) == 3


def test_a_long_conversation_drops_messages_again_and_again(adapter_page: Page):
    page = adapter_page
    page.mode("chat")
    page.set("max_tokens", "2")
    starts = []
    for turn in range(1, 8):
        page.send("a" * 30)
        page.until(lambda turn=turn: page.is_idle() and len(page.turns()) == 2 * turn)
        starts.append(json.loads(page.run("return sessionStorage.getItem('whimbrel.state')"))["start"])
    assert starts == sorted(starts)
    assert len(set(starts) - {0}) > 1
    assert len(page.browser.find_elements(By.CLASS_NAME, "divider")) == 1
    index = page.run("return [...document.querySelectorAll('#turns > *')].findIndex((e) => e.className === 'divider')")
    assert index == starts[-1]


@pytest.mark.parametrize(("max_tokens", "longest"), [(20, 108), (100, 64)])
def test_only_text_that_does_not_fit_is_dropped(adapter_page: Page, max_tokens: int, longest: int):
    """At most half of the context is reserved for the continuation."""
    page = adapter_page
    page.set("temperature", "0")  # a sampled continuation could be empty
    page.set("max_tokens", str(max_tokens))
    for length in (longest, longest + 1):
        page.find("new").click()
        page.send(("a " * length)[: length - 1] + "a")
        page.until(lambda: page.is_idle() and len(page.turns()) == 1)
        sent = int(page.find("used").text.split()[0]) - int(page.last(".stats").text.split()[0])
        assert (sent == length) == (length == longest)
        assert ("only saw the end" in page.find("status").text) == (length > longest)


def test_only_the_end_of_a_long_text_is_the_prompt(page: Page, server: ServerProcess):
    page.enter(server.key)
    page.set("max_tokens", "2")
    page.run("document.getElementById('text').value = 'so '.repeat(6000) + 'the end'")
    page.send("")
    page.until(lambda: page.is_idle() and len(page.turns()) == 1)
    assert "only saw the end" in page.find("status").text
    assert page.turns()[0][1].startswith("so so so")
