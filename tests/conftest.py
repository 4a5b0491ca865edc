"""Fixtures for all tests. They need neither the network nor files outside the repository."""

from __future__ import annotations

import gzip
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before any test imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose hardware or package is missing."""
    reasons = {}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            reasons["gpu"] = "needs a CUDA device"
    if importlib.util.find_spec("ray") is None:
        reasons["ray"] = "needs the package 'ray': pip install 'whimbrel[ray]'"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def default_logging() -> Iterator[None]:
    """Start each test with the default logging configuration, which commands and some libraries change."""

    def reset() -> None:
        logger = logging.getLogger("whimbrel")
        logger.setLevel(logging.NOTSET)
        logger.handlers.clear()
        logging.disable(logging.NOTSET)
        for name in ("whimbrel", *logging.root.manager.loggerDict):
            if name.partition(".")[0] == "whimbrel":
                logging.getLogger(name).disabled = False

    reset()  # fixtures of modules and sessions have already run
    yield
    reset()


def _leave_process_group() -> Iterator[None]:
    """Leave a process group that was joined meanwhile, as by a run in this process with `[parallel]` settings."""

    def is_joined() -> bool:
        return "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()

    before = is_joined()
    yield
    if is_joined() and not before:
        sys.modules["torch.distributed"].destroy_process_group()


leave_group_of_module = pytest.fixture(autouse=True, scope="module", name="leave_group_of_module")(_leave_process_group)
leave_group_of_test = pytest.fixture(autouse=True, name="leave_group_of_test")(_leave_process_group)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Small files that are committed with the tests."""
    return ROOT / "tests" / "fixtures"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Larger datasets in WHIMBREL_SHARED_DATA or ../shared/data; tests that use it are skipped if it does not exist."""
    configured = os.environ.get("WHIMBREL_SHARED_DATA")
    folder = Path(configured) if configured else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        if configured:
            pytest.fail(f"WHIMBREL_SHARED_DATA={configured} is not a folder")
        pytest.skip("no shared data: set WHIMBREL_SHARED_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def shakespeare() -> str:
    """The text of the bundled corpus."""
    with gzip.open(
        ROOT / "src" / "whimbrel" / "data" / "shakespeare.txt.gz", "rt", encoding="utf-8", newline=""
    ) as file:
        return file.read()


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
