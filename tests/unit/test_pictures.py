"""Terminal recordings, the pictures of the documentation, and the README as PyPI shows it."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
MAX_SVG_BYTES, MAX_TOTAL_BYTES = 300_000, 1_500_000
SVG = "{http://www.w3.org/2000/svg}"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def images(page: Path) -> list[tuple[str, str]]:
    """Alternative text and path of the images of a page."""
    return re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))


def test_recording_shows_the_screen_of_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("pyte", reason="needs the package 'pyte'")
    terminal = load(ROOT / "scripts" / "terminal_svg.py")
    # A progress bar that overwrites its line, color, and characters that XML escapes.
    command = r"for i in 1 2 3; do printf '\rstep %s/3' $i; sleep 0.2; done; printf '\n\033[32mdone\033[0m <a & b>\n'"
    frames = terminal.record([terminal.Scene(command, seconds=5.0)], tmp_path, columns=120, lines=6)
    shown = [["".join(text for _, text, *_ in row) for row in frame.rows[1:4]] for frame in frames]
    assert shown[-1] == ["step 3/3", "done<a & b>", "$█"]
    root = ET.fromstring(terminal.to_svg(frames, 120, 6, "A & B"))
    assert root.find(f"{SVG}title").text == "A & B"
    last = [text for group in root.findall(f"{SVG}g") if group.get("class") == "end" for text in group]
    assert {"step 3/3", "<a & b>", "█"} < {text.text for text in last}
    assert [text.get("fill") for text in last if text.text == "done"] == [terminal.COLORS["green"]]


def test_waits_are_shortened_and_scaled() -> None:
    pytest.importorskip("pyte", reason="needs the package 'pyte'")
    terminal = load(ROOT / "scripts" / "terminal_svg.py")
    assert terminal.shortened([1.0, 2.0, 60.0, 61.0], longest_wait=2.0, seconds=2.5) == [0.5, 1.0, 2.0, 2.5]
    assert terminal.shortened([0.5], longest_wait=2.0, seconds=2.5) == [0.5]


def test_failed_commands_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("pyte", reason="needs the package 'pyte'")
    terminal = load(ROOT / "scripts" / "terminal_svg.py")
    with pytest.raises(SystemExit, match="exit code 3"):
        terminal.record([terminal.Scene("exit 3", seconds=1.0)], tmp_path, columns=40, lines=4)


def test_pictures_are_small_and_used() -> None:
    files = {path.resolve() for path in PICTURES.iterdir()}
    used = {(page.parent / target).resolve() for page in pages() for _, target in images(page)}
    assert files <= used, f"pictures that no page shows: {sorted(path.name for path in files - used)}"
    assert sum(path.stat().st_size for path in files) <= MAX_TOTAL_BYTES


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_images_have_alternative_text(page: Path) -> None:
    assert [target for alt, target in images(page) if len(alt.split()) < 3] == []


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_svg_files_work_in_an_img_element(path: Path) -> None:
    """No scripts and nothing external, which browsers do not load there."""
    assert path.stat().st_size <= MAX_SVG_BYTES
    text = path.read_text(encoding="utf-8")
    tags = {element.tag for element in ET.fromstring(text).iter()}
    assert not tags & {f"{SVG}script", f"{SVG}foreignObject", f"{SVG}image"}
    links = re.findall(r"(?:href=\"|url\()([^\")]+)", text)
    assert [link for link in links if not link.startswith("#")] == []
    assert "@import" not in text
    assert "@font-face" not in text


def test_readme_on_pypi_has_no_relative_links() -> None:
    pytest.importorskip("hatchling", reason="needs the package 'hatchling'")
    hook = load(ROOT / "hatch_build.py")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https?:|#)", text)
    absolute = hook.pypi_readme(text, "https://example.org/whimbrel/")
    assert re.findall(r"\]\((?!https?:|#)", absolute) == []
    assert "](https://example.org/whimbrel/raw/HEAD/docs/pictures/quickstart.svg)" in absolute
    assert "[serving](https://example.org/whimbrel/blob/HEAD/docs/serving.md)" in absolute
    without = hook.pypi_readme(text, None)
    assert "](" not in re.sub(r"\]\(https?:", "", without)
    assert "serving" in without
    assert "![" not in without
