"""The page of `whimbrel watch` in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.pages import AXIS_CONTRAST, LOW_CONTRAST, LOW_CONTROL_CONTRAST

from whimbrel.train.control import ControlServer
from whimbrel.train.run_directory import log_line

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("selenium", reason="needs the package 'selenium'")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT_SECONDS = 60


def write_steps(run: Path, first: int, last: int, loss: float = 9.0) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / "log.jsonl").open("a") as file:
        for step in range(first, last + 1):
            numbers = {"lr": 1e-3, "grad_norm": 1.0, "seconds": 0.5, "tokens": 64, "peak_memory": 2**30}
            resumed = {"resumed": True} if step == 5 else {}
            file.write(log_line("step", step, {"total": 20, "loss": loss / step, **numbers, **resumed}))
            if step % 4 == 0:
                file.write(log_line("validation", step, {"loss": loss / step + 0.5}))


class Page:
    """Page object."""

    def __init__(self, browser: webdriver.Chrome, link: str, actions: list[str]) -> None:
        self.browser, self.link, self.actions = browser, link, actions
        browser.get(link)

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def cell(self, run: str, field: str) -> str:
        return self.find(f'tr[data-name="{run}"] [data-field="{field}"]').text

    def until(self, condition: Any) -> Any:
        return WebDriverWait(self.browser, TIMEOUT_SECONDS, 0.05, [Exception]).until(lambda _: condition())

    def charts(self) -> list[str]:
        return [chart.get_attribute("aria-label") for chart in self.browser.find_elements(By.CSS_SELECTOR, "figure")]

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)


@contextmanager
def open_page(browser: webdriver.Chrome, actions: list[str]) -> Iterator[Page]:
    """Starts a server on the directory `runs`, and opens its page."""
    environment = {name: value for name, value in os.environ.items() if name != "WHIMBREL_API_KEY"}
    command = [sys.executable, "-m", "whimbrel", "watch", "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        yield Page(browser, re.search(r"http://\S+", line).group(), actions)
    finally:
        browser.get("about:blank")  # before the page loses its server
        browser.get_log("browser")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


@pytest.fixture
def page(browser: webdriver.Chrome, workdir: Path) -> Iterator[Page]:
    """The page with two runs, of which one is running."""
    write_steps(Path("runs/done"), 1, 20)
    write_steps(Path("runs/live"), 1, 8, loss=7.0)
    actions: list[str] = []

    def answer(action: str) -> dict[str, Any]:
        if action == "status":
            return {"status": {"tokens_per_second": 1234.0, "eta_seconds": 125.0}}
        actions.append(action)
        return {"message": f"will {action}", "step": 8}

    control = ControlServer(Path("runs/live"), answer)
    try:
        with open_page(browser, actions) as opened:
            yield opened
    finally:
        control.close()


def test_runs_and_new_steps_appear_without_a_reload(page: Page) -> None:
    page.until(lambda: len(page.charts()) == 5)
    assert page.charts()[0] == "Loss by step"
    assert (page.cell("runs/done", "state"), page.cell("runs/done", "loss")) == ("finished", "0.4500")
    assert page.cell("runs/done", "validation") == "0.9500"
    assert page.cell("runs/live", "state") == "running"
    assert (page.cell("runs/live", "tokens_per_second"), page.cell("runs/live", "eta_seconds")) == (
        "1.23K",
        "2 min 5 s",
    )
    assert page.cell("runs/live", "peak_memory") == "1 GiB"
    assert "live, step 8: train 0.8750, validation 1.3750" in page.find("figure .values").text
    assert "#key" not in page.browser.current_url
    page.run("document.body.dataset.loaded = 'once'")
    write_steps(Path("runs/live"), 9, 12, loss=7.0)
    with Path("runs/live/log.jsonl").open("a") as file:
        file.write(log_line("sample", 12, {"text": "<img src=x onerror=\"document.title='injected'\">Hark"}))
    write_steps(Path("runs/new"), 1, 2)
    page.until(lambda: "live, step 12: train 0.5833, validation 1.0833" in page.find("figure .values").text)
    page.until(lambda: page.find("article p").text.endswith("Hark"))
    assert page.find("article h3").text == "runs/live, step 12"
    assert page.browser.find_elements(By.CSS_SELECTOR, "article img") == []
    assert page.browser.title == "Whimbrel runs"
    page.until(lambda: page.cell("runs/new", "state") == "stopped")
    assert page.run("return document.body.dataset.loaded") == "once"


def test_each_run_has_the_step_of_its_last_values_below_the_charts(page: Page) -> None:
    page.until(lambda: len(page.charts()) == 5)

    def values() -> list[list[str]]:
        spans = "[...figure.querySelectorAll('.values > span')].map((span) => span.textContent)"
        return page.run(f"return [...document.querySelectorAll('figure')].map((figure) => {spans})")

    loss, rate, *_ = values()
    assert loss == ["done, step 20: train 0.4500, validation 0.9500", "live, step 8: train 0.8750, validation 1.3750"]
    assert rate == ["done, step 20: 0.001", "live, step 8: 0.001"]
    for _ in range(8):  # to step 12
        page.find("figure").send_keys(Keys.ARROW_LEFT)
    page.until(lambda: values()[0][0].startswith("done, step 12: train 0.7500"))
    assert values()[0][1] == loss[1]


def test_smoothed_losses_are_labelled(page: Page) -> None:
    page.until(lambda: "step 20: train 0.4500" in page.find("figure .values").text)
    page.find("#smoothing").send_keys("10")
    smoothed = (9 / 19 + 9 / 20) / 2  # over 2 steps
    page.until(lambda: f"step 20: train (smoothed) {smoothed:.4f}" in page.find("figure .values").text)
    assert page.cell("runs/done", "loss") == "0.4500"


def test_the_first_run_is_drawn_when_it_appears(browser: webdriver.Chrome, workdir: Path) -> None:
    Path("runs").mkdir()
    with open_page(browser, []) as page:
        page.until(lambda: page.find("#status").text == "No runs yet.")
        write_steps(Path("runs/first"), 1, 8)
        page.until(lambda: "first, step 8: train 1.125" in page.find("figure .values").text)


def test_later_runs_are_drawn_until_there_are_no_more_colors(page: Page) -> None:
    page.until(lambda: len(page.charts()) == 5)
    page.find('tr[data-name="runs/done"] input').send_keys(Keys.SPACE)
    for number in range(9):
        write_steps(Path(f"runs/new{number}"), 1, 2)
    page.until(lambda: page.run("return document.querySelectorAll('tbody input:checked').length") == 8)
    assert not page.find('tr[data-name="runs/done"] input').is_selected()
    colors = "[...document.querySelectorAll('figure.main .values .swatch')].map((swatch) => swatch.style.background)"
    page.until(lambda: page.run(f"return new Set({colors}).size") == 8)


def test_a_deleted_run_disappears_and_can_come_back(page: Page) -> None:
    page.until(lambda: "done, step 20" in page.find("figure .values").text)
    with Path("runs/done/log.jsonl").open("a") as file:
        file.write(log_line("sample", 20, {"text": "Hark"}))
    page.until(lambda: page.find("article h3").text == "runs/done, step 20")
    shutil.rmtree("runs/done")
    page.until(lambda: "done" not in page.find("main").text)
    assert "live, step 8" in page.find("figure .values").text
    write_steps(Path("runs/done"), 1, 4)
    page.until(lambda: "done, step 4: train 2.25" in page.find("figure .values").text)


def test_the_samples_of_the_running_run_are_first_and_every_run_has_one(page: Page) -> None:
    def write_samples(run: str, steps: range) -> None:
        write_steps(Path(run), 1, 2)
        with Path(run, "log.jsonl").open("a") as file:
            for step in steps:
                file.write(log_line("sample", step, {"text": f"text {step}"}))

    def titles(id: str) -> list[str]:  # noqa: A002
        script = f"return [...document.querySelectorAll('#{id} h3')].map((title) => title.textContent)"
        return [title.removeprefix("runs/") for title in page.run(script)]

    write_samples("runs/done", range(100, 1200, 100))
    write_samples("runs/live", range(5, 8))
    live = ["live, step 7", "live, step 6", "live, step 5"]
    page.until(lambda: titles("samples") == [*live, *(f"done, step {step}" for step in ("1,100", "1,000", "900"))])
    assert titles("older-samples") == [f"done, step {step}" for step in range(800, 0, -100)]
    write_samples("runs/new", range(1, 2))
    page.until(lambda: len(titles("samples")) == 6 and "new, step 1" in titles("samples"))
    assert titles("samples")[:3] == live
    page.find('tr[data-name="runs/live"] input').send_keys(Keys.SPACE)
    page.until(lambda: titles("samples")[0] == "new, step 1")


def test_save_and_stop_are_sent_to_the_run(page: Page) -> None:
    page.until(lambda: len(page.charts()) == 5)
    assert page.browser.find_elements(By.CSS_SELECTOR, 'tr[data-name="runs/done"] button') == []
    save, stop = page.browser.find_elements(By.CSS_SELECTOR, 'tr[data-name="runs/live"] button')
    assert (save.text, stop.text) == ("Save", "Stop")
    save.click()
    page.until(lambda: page.actions == ["save"])
    page.until(lambda: page.find("#status").text == "runs/live (step 8) will save")
    stop.click()
    page.browser.switch_to.alert.dismiss()
    stop.click()
    page.browser.switch_to.alert.accept()
    page.until(lambda: page.actions == ["save", "stop"])


def test_the_page_without_its_key_asks_for_it(page: Page) -> None:
    url, key = page.link.split("/#key=")
    page.run("sessionStorage.clear()")
    page.browser.get(url)
    page.until(lambda: "requires a key" in page.find("#status").text)
    assert page.charts() == []
    assert [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    for wrong, words in (("wrong", "is incorrect"), ("ключ", "printable ASCII")):
        page.find("#key").clear()
        page.find("#key").send_keys(wrong, Keys.ENTER)
        page.until(lambda words=words: words in page.find("#status").text)
        assert page.find("#login").is_displayed()
    page.find("#key").clear()
    page.find("#key").send_keys(key, Keys.ENTER)
    page.until(lambda: len(page.charts()) == 5)
    assert not page.find("#login").is_displayed()


def test_only_a_lost_connection_is_reported_as_one(page: Page) -> None:
    page.until(lambda: len(page.charts()) == 5)
    page.run("window.join = uPlot.join; uPlot.join = () => { throw new TypeError('a bug'); }")
    write_steps(Path("runs/live"), 9, 9)
    page.until(lambda: page.find("#status").text == "a bug")
    page.run("uPlot.join = window.join; window.fetch = async () => { throw new TypeError('Failed to fetch'); }")
    page.until(lambda: page.find("#status").text.endswith("whimbrel watch runs/done runs/live"))


def test_everything_works_with_the_keyboard(page: Page) -> None:
    page.until(lambda: len(page.charts()) == 5)
    box = page.find('tr[data-name="runs/done"] input')
    box.send_keys(Keys.SPACE)
    page.until(lambda: "done" not in page.find("figure .values").text)
    box.send_keys(Keys.SPACE)
    page.until(lambda: "done, step 20: train 0.4500" in page.find("figure .values").text)
    page.find("#axis").send_keys("T")
    page.until(lambda: page.charts()[0] == "Loss by tokens")
    page.find("#log").send_keys(Keys.SPACE)
    chart = page.find("figure")
    chart.send_keys(Keys.ARROW_LEFT)
    page.until(lambda: "tokens 1.22K" in page.find("figure .values").text)  # 19 steps of 64
    tabs = page.run(
        "return [...document.querySelectorAll('input, select, button, figure, summary')]"
        ".filter((node) => node.checkVisibility() && node.tabIndex < 0).length"
    )
    assert tabs == 0


def test_resumes_are_marked(page: Page) -> None:
    page.until(lambda: len(page.charts()) == 5)
    # Columns of pixels that have the color of a run at the top of the chart, where there are no curves.
    marked = page.run(
        "const canvas = document.querySelector('canvas'), context = canvas.getContext('2d');"
        "let count = 0;"
        "for (let x = 0; x < canvas.width; x++) {"
        "  const { data } = context.getImageData(x, 0, 1, Math.floor(canvas.height / 8));"
        "  let colored = 0;"
        "  for (let i = 0; i < data.length; i += 4)"
        "    if (Math.max(...data.slice(i, i + 3)) - Math.min(...data.slice(i, i + 3)) > 60) colored++;"
        "  if (colored > 4) count++;"
        "}"
        "return count;"
    )
    assert 1 <= marked <= 6


def test_numbers_stay_with_their_units_and_progress_is_below_the_step_on_a_phone(page: Page) -> None:
    # The boxes of the text of each cell, and the top of its progress bar.
    script = """
    return [...document.querySelectorAll('#runs td')].filter((cell) => cell.checkVisibility()).map((cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell.firstChild ?? cell);
      const boxes = [...range.getClientRects()].map(({ top, bottom }) => [top, bottom]);
      return [cell.dataset.field, boxes, cell.querySelector('progress')?.getBoundingClientRect().top];
    });
    """
    page.until(lambda: len(page.charts()) == 5)
    try:
        for width in (390, 270):  # in the narrower one, labels and values do not fit on one line
            screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True}
            page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
            cells = page.run(script)
            assert [len(boxes) for field, boxes, _ in cells if field == "peak_memory"] == [1, 1]
            gaps = [bar - boxes[-1][1] for field, boxes, bar in cells if field == "step"]
            assert len(gaps) == 2
            assert gaps[0] == gaps[1] >= 0
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize(("width", "height"), [(1400, 1000), (390, 844)])
def test_no_errors_external_requests_overflow_or_low_contrast(page: Page, width: int, height: int) -> None:
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    try:
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        for scheme in ("light", "dark"):
            wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
            page.browser.get("about:blank")
            page.browser.get(page.link)
            page.until(lambda: len(page.charts()) == 5)
            assert page.run(LOW_CONTRAST) == []
            assert page.run(LOW_CONTROL_CONTRAST) == []
            labels = page.run(AXIS_CONTRAST)
            assert len(labels) == 10
            assert min(labels) >= 4.5
            assert page.run("return document.documentElement.scrollWidth") <= width
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(loaded) > 5
    assert [name for name in loaded if not name.startswith(page.link.split("/#")[0])] == []
    unnamed = page.run(
        "return [...document.querySelectorAll('input, select')].filter((field) => !field.labels.length).length"
    )
    assert unnamed == 0
    assert [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"] == []
