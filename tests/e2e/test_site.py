"""The documentation site builds without warnings, describes every public name, and makes no external requests."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.documentation import ROOT

import whimbrel

if TYPE_CHECKING:
    from selenium import webdriver

API = sorted(path.stem for path in (ROOT / "docs/api").glob("*.md") if path.stem not in {"hf", "index"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. With --strict, broken links, unknown anchors and pages outside the navigation fail the build."""
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("package", API)
def test_every_public_name_is_described(site: Path, package: str) -> None:
    html = (site / "api" / f"{package}.html").read_text(encoding="utf-8")
    names = importlib.import_module(f"whimbrel.{package}").__all__
    # A function that has the name of its module (model_io.load) is described under its full name.
    described = set(re.findall(rf'id="whimbrel\.{package}\.(?:(\w+)\.)?(\w+)"', html))
    assert [name for name in names if not {("", name), (name, name)} & described] == []


def test_names_of_whimbrel_are_in_the_overview(site: Path) -> None:
    html = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert [name for name in whimbrel.__all__ if f"<code>{name}</code>" not in html] == ["__version__"]


def test_nothing_is_requested_from_other_hosts(site: Path) -> None:
    tag = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert {found for page in site.rglob("*.html") for found in tag.findall(page.read_text(encoding="utf-8"))} == set()
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\W?(?:https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_search_works_in_pages_opened_from_disk(site: Path, browser: webdriver.Chrome) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get_log("browser")  # drop the messages of pages that other tests opened
    browser.get(f"file://{site}/index.html")
    browser.execute_script("document.querySelector('.md-search__input').focus()")
    browser.find_element(By.CLASS_NAME, "md-search__input").send_keys("gradient accumulation")
    WebDriverWait(browser, 60).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, ".md-search-result__link"))
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


def test_the_colors_follow_the_system(site: Path, browser: webdriver.Chrome) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    for system, expected in (("light", "default"), ("dark", "slate"), ("light", "default")):
        features = [{"name": "prefers-color-scheme", "value": system}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(f"file://{site}/index.html")
        WebDriverWait(browser, 60).until(
            lambda driver, expected=expected: (
                driver.execute_script("return document.body.dataset.mdColorScheme") == expected
            )
        )
        assert browser.execute_script("return document.body.dataset.mdColorPrimary") == "custom"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts/reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    for page in reference.PAGES:
        current = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert reference.render(page) == current, f"docs/{page} is out of date: run python scripts/reference.py"
