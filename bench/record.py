"""Write benchmark results as JSON with hardware, versions and commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["record"]

PACKAGES = ("torch", "torchao", "transformers", "triton", "numpy", "tokenizers", "tiktoken", "pyarrow")


def record(name: str, results: dict[str, Any], out: Path | None = None) -> dict[str, Any]:
    """Add hardware, versions, commit and time to `results`, and write them to `out` if given."""
    document = {
        "name": name,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "gpu": _gpu()},
        "versions": {"python": platform.python_version(), **_versions()},
        "results": results,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def _versions() -> dict[str, str]:
    installed = {distribution.name.lower(): distribution.version for distribution in metadata.distributions()}
    return {package: installed[package] for package in PACKAGES if package in installed}


def _commit() -> str | None:
    """The current commit, or WHIMBREL_COMMIT in a copy without git history."""
    if commit := os.environ.get("WHIMBREL_COMMIT"):
        return commit
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
