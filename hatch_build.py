"""Build hook: the README as PyPI shows it, where links relative to the repository do not work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def pypi_readme(text: str, repository: str | None) -> str:
    """Make relative links and images absolute; without a repository, keep the text of links and drop images."""

    def replace(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        if repository is None:
            return "" if image else label
        return f"{image}[{label}]({repository.rstrip('/')}/{'raw' if image else 'blob'}/HEAD/{path})"

    return RELATIVE_LINK.sub(replace, text)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": pypi_readme(text, repository)}
