"""A small model on disk, a server on it, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium import webdriver
    from tests.e2e.serving import ServerProcess


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: random weights, large enough that its output does not repeat one token."""
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    import torch

    import whimbrel
    from whimbrel.models import GPT, GPTConfig

    torch.manual_seed(0)
    size = {"context_length": 4096, "num_layers": 2, "embd_size": 32, "num_heads": 2}
    llama = {"position": "rope", "norm": "rms", "bias": "none", "activation": "silu", "gated_mlp": True}
    model = GPT(GPTConfig(**size, **llama, tied_head=False, init_std=0.2, embd_init_std=0.2))
    folder = tmp_path_factory.mktemp("served") / "tiny"
    whimbrel.save_model(model, folder, whimbrel.load_tokenizer("gpt2"))
    return folder


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[ServerProcess]:
    """One server for many tests; it requires an API key."""
    from tests.e2e.serving import serving

    with serving(tiny) as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    pytest.importorskip("selenium", reason="needs the package 'selenium'")
    from selenium import webdriver

    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Chromium and its driver: scripts/install-chromium")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()
