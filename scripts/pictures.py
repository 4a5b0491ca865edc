"""Make the pictures of the documentation from real runs: `make pictures`, or a part of it with names as arguments.

    python scripts/pictures.py                 # everything, in about 25 minutes on two CPU cores
    python scripts/pictures.py watch chat      # after an earlier run in the same --work directory

recording: a folder of text, `whimbrel quickstart` and `whimbrel generate` in a terminal (quickstart.svg)
watch: the runs page, while a second run trains (watch.png, watch-phone.png)
complete, chat: the chat page with that model, and with a chat model (complete.png, chat.png, chat-phone.png)
plot: the curves of the two runs (plot.png)

Needs the extras `dev`, `plot` and `serve`, Chromium and its driver (scripts/install-chromium). --chat-model is a model
directory or a model on the Hub.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from terminal_svg import Scene, record, to_svg

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
FILES = 12
COLUMNS, LINES = 96, 27
DESKTOP, CHAT, PHONE = (1280, 1180), (1000, 800), (390, 844)
TIMEOUT_SECONDS = 600
RUN, SECOND_RUN = "runs/shakespeare", "runs/adamw"
CHAT_PROMPTS = ("Write a Python function that checks whether a number is even.", "What is the capital of France?")
COMPLETE_PROMPT = "ROMEO:\nO, she doth teach the torches to burn bright!"


def write_texts(folder: Path) -> None:
    """The text of the package as a folder of files."""
    text = gzip.decompress((ROOT / "src" / "whimbrel" / "data" / "shakespeare.txt.gz").read_bytes()).decode()
    speeches = text.split("\n\n")
    size = -(-len(speeches) // FILES)
    folder.mkdir(parents=True)
    for index in range(FILES):
        part = "\n\n".join(speeches[index * size : (index + 1) * size])
        (folder / f"part-{index + 1:02}.txt").write_text(part, encoding="utf-8")


def make_recording(work: Path) -> None:
    for name in ("data", "runs", "shakespeare"):
        shutil.rmtree(work / name, ignore_errors=True)
    write_texts(work / "shakespeare")
    scenes = [
        Scene("ls shakespeare", seconds=0.5),
        Scene("whimbrel quickstart shakespeare --minutes 10", seconds=14, pause=3),
        Scene(f'whimbrel generate {RUN} "ROMEO:" --max-new-tokens 120', seconds=5),
    ]
    frames = record(scenes, work, COLUMNS, LINES)
    title = (
        "A terminal: whimbrel quickstart trains a model on a folder of text, and whimbrel generate continues a prompt"
    )
    (PICTURES / "quickstart.svg").write_text(to_svg(frames, COLUMNS, LINES, title), encoding="utf-8")


@contextlib.contextmanager
def program(*command: str, work: Path, output: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """Run a command in the background until the block ends; it waits if nobody reads what it prints."""
    process = subprocess.Popen(command, cwd=work, stdout=output, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_SECONDS)


def printed_link(process: subprocess.Popen[str]) -> str:
    """The link that a server prints once it accepts requests."""
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        if found := re.search(r"http://\S+", line):
            return found.group()
        output.append(line)
    raise SystemExit("no link in the output:\n" + "".join(output))


class Browser:
    """Chromium, and screenshots of its window."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for option in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--hide-scrollbars",
        ):
            options.add_argument(option)
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))

    def look(self, size: tuple[int, int], scheme: str) -> None:
        """Set the size of the window and the color scheme."""
        is_phone = size == PHONE  # shown at its own width by all viewers
        scale = 1 if is_phone else 1.5
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": is_phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def until(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.driver, TIMEOUT_SECONDS, 0.2, [Exception]).until(lambda _: condition())

    def element(self, name: str) -> webdriver.remote.webelement.WebElement:
        return self.driver.find_element(By.ID, name)

    def save(self, name: str) -> None:
        """A PNG with 256 colors, which is enough for a page and a third of the size."""
        self.driver.execute_script("scrollTo(0, 0)")
        time.sleep(1)  # for the next frame of the charts
        image = Image.open(BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            PICTURES / name, optimize=True
        )


def steps_done(log: Path) -> int:
    return sum('"kind": "step"' in line for line in log.read_text().splitlines()) if log.exists() else 0


def wait_for_steps(process: subprocess.Popen[str], log: Path, goal: float) -> None:
    while steps_done(log) < goal:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with exit code {process.returncode} before step {goal:.0f}")
        time.sleep(0.5)


def take_watch(work: Path, browser: Browser) -> None:
    """The second run uses another optimizer, and is stopped and resumed once."""
    shutil.rmtree(work / SECOND_RUN, ignore_errors=True)
    log, steps = work / SECOND_RUN / "log.jsonl", steps_done(work / RUN / "log.jsonl")
    command = (
        "whimbrel", "train", f"{RUN}.toml", "--optim.name=adamw", "--optim.lr=0.003", f"--output_dir={SECOND_RUN}",
    )  # fmt: skip
    with program(*command, work=work, output=subprocess.DEVNULL) as training:
        wait_for_steps(training, log, 0.4 * steps)
    with (
        program(*command, work=work, output=subprocess.DEVNULL) as training,
        program("whimbrel", "watch", "--port=0", work=work) as watching,
    ):
        link = printed_link(watching)
        wait_for_steps(training, log, 0.75 * steps)
        browser.look(DESKTOP, "light")
        browser.driver.get(link)
        browser.until(lambda: browser.element("samples").text)
        browser.save("watch.png")
        browser.look(PHONE, "dark")
        browser.save("watch-phone.png")
        browser.driver.get("about:blank")


def open_chat(browser: Browser, link: str) -> None:
    browser.driver.get(link)
    browser.until(lambda: browser.element("model").text)


def ask(browser: Browser, prompt: str) -> None:
    """Send a prompt on the chat page and wait for the answer."""
    field = browser.element("text")
    for line in prompt.split("\n")[:-1]:
        field.send_keys(line, Keys.SHIFT + Keys.ENTER + Keys.NULL)
    field.send_keys(prompt.split("\n")[-1], Keys.ENTER)
    time.sleep(1)
    browser.until(lambda: browser.element("turns").get_attribute("aria-busy") == "false")


def take_complete(work: Path, browser: Browser) -> None:
    with program("whimbrel", "serve", RUN, "--port=0", work=work) as server:
        browser.look(CHAT, "light")
        open_chat(browser, printed_link(server))
        ask(browser, COMPLETE_PROMPT)
        browser.save("complete.png")


def take_chat(work: Path, browser: Browser, model: str) -> None:
    with program("whimbrel", "serve", model, "--port=0", work=work) as server:
        browser.look(CHAT, "light")
        open_chat(browser, printed_link(server))
        browser.driver.execute_script("document.getElementById('settings').open = true")
        browser.element("temperature").send_keys("0", Keys.TAB)  # the same answers every time
        browser.driver.execute_script("document.getElementById('settings').open = false")
        for prompt in CHAT_PROMPTS:
            ask(browser, prompt)
        browser.save("chat.png")
        browser.look(PHONE, "dark")
        browser.save("chat-phone.png")


def make_plot(work: Path) -> None:
    out = PICTURES / "plot.png"
    subprocess.run(["whimbrel", "plot", RUN, SECOND_RUN, "--panels", "loss", "--out", str(out)], cwd=work, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("recording", "watch", "complete", "chat", "plot")
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "pictures", help="directory of the runs")
    parser.add_argument("--chat-model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    if unknown := set(args.pictures) - set(names):
        parser.error(f"unknown picture '{unknown.pop()}' (choose from: {', '.join(names)})")
    chosen = args.pictures or names
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if "recording" in chosen:
        make_recording(work)
    if {"watch", "complete", "chat"} & set(chosen):
        browser = Browser()
        try:
            if "watch" in chosen:
                take_watch(work, browser)
            if "complete" in chosen:
                take_complete(work, browser)
            if "chat" in chosen:
                take_chat(work, browser, args.chat_model)
        finally:
            browser.driver.quit()
    if "plot" in chosen:
        make_plot(work)


if __name__ == "__main__":
    main()
