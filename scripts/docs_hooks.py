"""Hooks of the documentation site (mkdocs.yml): pages outside docs/, and links to files outside docs/.

Pages link to other files of the repository by relative path, as on GitHub. On the site, README.md is the home page,
CONTRIBUTING.md and CHANGELOG.md are pages, and links to other files point to `repo_url`; without one, only their text
is shown.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ADDED = {"CONTRIBUTING.md": "dev/contributing.md", "CHANGELOG.md": "dev/changelog.md"}
PAGES = ADDED | {"README.md": "index.md"}
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^()\s:]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, path in ADDED.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    original = next((source for source, added in ADDED.items() if added == path), f"docs/{path}")

    def rewrite(match: re.Match[str]) -> str:
        text, (target, hash_sign, anchor) = match[1], match[2].partition("#")
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(original), target)) if target else original
        if (ROOT / linked / "README.md").is_file():
            linked += "/README.md"
        if not (linked in PAGES or linked.startswith("docs/")):
            return f"[{text}]({config.repo_url}/blob/main/{linked})" if config.repo_url else text
        on_site = PAGES.get(linked, linked.removeprefix("docs/"))
        return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(path))}{hash_sign}{anchor})"

    return LINK.sub(rewrite, markdown)
