"""The chat page and the API page in a real browser."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from tests.e2e.serving import ServerProcess, serving
from tests.support.models import save_with_adapters

pytest.importorskip("selenium", reason="needs the package 'selenium'")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

TIMEOUT_SECONDS = 60


class Page:
    """Page object: reads and operates the chat page."""

    def __init__(self, browser: webdriver.Chrome, server: ServerProcess) -> None:
        self.browser = browser
        browser.get(server.url)
        browser.execute_script("sessionStorage.clear()")
        browser.get(server.url)

    def find(self, id: str):  # noqa: A002
        return self.browser.find_element(By.ID, id)

    def until(self, condition):
        return WebDriverWait(self.browser, TIMEOUT_SECONDS, 0.05).until(lambda _: condition())

    def turns(self) -> list[tuple[str, str]]:
        found = self.browser.find_elements(By.CSS_SELECTOR, "#turns li")
        return [
            (turn.get_attribute("class"), turn.find_element(By.TAG_NAME, "p").get_property("textContent"))
            for turn in found
        ]

    def set(self, id: str, value: str) -> None:  # noqa: A002
        # opened automatically if the key is missing
        self.browser.execute_script("document.getElementById('settings').open = true")
        field = self.find(id)
        field.clear()
        field.send_keys(value, Keys.TAB)

    def enter(self, key: str) -> None:
        self.set("key", key)
        self.until(lambda: self.find("model").text == "tiny")

    def send(self, text: str) -> None:
        self.find("text").send_keys(text, Keys.ENTER)

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
def page(browser: webdriver.Chrome, server: ServerProcess) -> Page:
    return Page(browser, server)


def test_the_page_asks_for_the_key_and_then_shows_the_model(page: Page, server: ServerProcess):
    page.until(lambda: "API key" in page.find("status").text)
    page.enter(server.key)
    assert not page.find("model").is_enabled()  # it is the only one
    assert page.find("status").text == ""
    assert page.browser.execute_script("return sessionStorage.getItem('whimbrel.key')") == server.key
    assert page.browser.execute_script("return localStorage.length") == 0


def test_a_conversation_streams_and_survives_a_reload(page: Page, server: ServerProcess):
    page.enter(server.key)
    page.set("temperature", "0")
    page.set("tokens", "12")
    page.set("system", "Be brief.")
    page.send("Hello")
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    assert page.find("status").text == "Stopped at the token limit."
    (_, sent), (_, first) = page.turns()
    assert sent == "Hello"
    assert page.browser.find_element(By.CSS_SELECTOR, "#turns .assistant p").is_displayed()
    page.send("And then?")
    page.until(lambda: page.is_idle() and len(page.turns()) == 4)
    assert [role for role, _ in page.turns()] == ["user", "assistant"] * 2
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
    with server.client() as client:
        first_reply = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert first == first_reply
        messages += [{"role": "assistant", "content": first_reply}, {"role": "user", "content": "And then?"}]
        second_reply = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert page.turns()[3][1] == second_reply
    page.browser.refresh()
    page.until(lambda: page.find("model").text == "tiny")
    assert len(page.turns()) == 4
    page.find("new").click()
    assert page.turns() == []
    page.browser.refresh()
    assert page.turns() == []


def test_the_stop_button_stops_generation(page: Page, server: ServerProcess):
    page.enter(server.key)
    page.set("temperature", "0")  # sampling could end the reply early
    page.send("Tell me everything")
    page.until(lambda: len(page.turns()) == 2 and len(page.turns()[1][1]) > 20)
    server.process.send_signal(signal.SIGSTOP)  # it must not finish before the click
    try:
        assert page.find("stop").is_displayed()
        assert not page.find("send").is_displayed()
        page.find("stop").click()
        page.until(page.is_idle)
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert page.find("status").text == "Stopped."
    assert page.find("send").is_displayed()
    server.wait_until_idle()
    assert len(page.turns()) == 2


def test_markup_is_shown_as_text(page: Page, server: ServerProcess):
    page.enter(server.key)
    page.set("tokens", "2")
    text = "<img src=x onerror=\"document.title='injected'\"><b>bold</b> &amp; done"
    page.send(text)
    page.until(lambda: page.is_idle() and len(page.turns()) == 2)
    assert page.turns()[0] == ("user", text)
    assert page.browser.find_elements(By.CSS_SELECTOR, "#turns img, #turns b") == []
    assert page.browser.title == "Whimbrel"


def test_an_error_is_shown_and_the_message_restored(page: Page, server: ServerProcess):
    page.enter(server.key)
    page.set("temperature", "9")
    page.send("Hello")
    page.until(lambda: "temperature" in page.find("status").text)
    assert page.turns() == []
    assert page.find("text").get_attribute("value") == "Hello"


def test_no_external_resources_and_all_fields_are_labelled(page: Page, server: ServerProcess):
    loaded = page.browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded
    assert [name for name in loaded if not name.startswith(server.url)] == []
    unnamed = page.browser.execute_script(
        "const fields = [...document.querySelectorAll('input, select, textarea')];"
        "return fields.filter((field) => !field.labels.length).length"
    )
    assert unnamed == 0
    assert page.browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
    colors = []
    for scheme in ("light", "dark"):
        wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
        colors.append(page.browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color"))
    assert colors[0] != colors[1]
    severe = [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"]
    # 4xx responses are logged as errors too; anything else is a bug
    assert [entry for entry in severe if " 40" not in entry["message"]] == []


def test_one_of_several_models_is_chosen(browser: webdriver.Chrome, adapter_server: ServerProcess):
    page = Page(browser, adapter_server)
    page.set("key", adapter_server.key)
    page.until(lambda: [option.text for option in Select(page.find("model")).options] == ["base", "first", "second"])
    page.set("temperature", "0")
    page.set("tokens", "12")
    with adapter_server.client() as client:
        for name in ("second", "base"):
            Select(page.find("model")).select_by_value(name)
            page.browser.refresh()
            page.until(lambda: page.find("model").get_property("value"))
            assert page.find("model").get_property("value") == name
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
            assert page.turns()[1] == ("assistant", expected)
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


def test_the_docs_page_says_where_to_enter_the_key(page: Page, server: ServerProcess):
    page.browser.get(f"{server.url}/docs")
    page.until(lambda: "API key" in page.find("routes").text)


def test_a_conversation_longer_than_the_context_drops_its_oldest_messages(page: Page, server: ServerProcess):
    page.enter(server.key)
    page.set("tokens", "2")
    page.browser.execute_script(
        "const long = 'so '.repeat(5000);"
        "const messages = [{role: 'user', content: long}, {role: 'assistant', content: long}];"
        "sessionStorage.setItem('whimbrel.conversation', JSON.stringify(messages))"
    )
    page.browser.refresh()
    page.until(lambda: page.find("model").text == "tiny")
    page.send("Hello")
    page.until(lambda: page.is_idle() and len(page.turns()) == 4)
    assert "oldest messages were left out" in page.find("status").text
