"""Pages of the documentation and their code blocks.

tests/e2e/test_docs.py does what the reader of a page does: it runs the blocks from top to bottom in one directory.

- `bash`: commands. Training and generation are shortened; servers run until the end of the page.
- `python`: a program. All of a page share their variables.
- `toml`: settings. A complete config is saved as the file that the next command with a `.toml` file names.
- `text` directly after `python`: exactly what that block prints; `...` stands for any text.
- other `text`, `json`, `yaml`: output and fragments, not checked.

`<!-- not run: REASON -->` on the line before a block excludes it, and `<!-- not compared: REASON -->` the output of a
Python block.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN, SHOWN = ("bash", "python", "toml"), ("text", "json", "yaml")
FENCE = re.compile(
    r"""(?:^\ *<!--\ not\ (?:run|compared):\ (?P<reason>[^\n]+?)\ -->\n\n?)?
    ^(?P<indent>\ *)```(?P<language>.*)\n
    (?P<code>(?s:.*?))
    ^\ *```\n""",
    re.MULTILINE | re.VERBOSE,
)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: str
    """Its path in the repository."""
    line: int
    """The line of the page before its first line of code, from 1."""
    language: str
    code: str
    not_run: str | None = None
    """The reason why it is not run."""
    output: str | None = None
    """What a Python block prints, if the page shows it."""


def pages() -> list[str]:
    """The README and the pages of the documentation, without those for developers."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", *(page for page in found if not page.startswith("docs/dev/"))]


def read_page(page: str) -> str:
    """A page, given by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def code_blocks(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    text, blocks, end = read_page(page), list[Block](), 0
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        code = re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
        is_output = found["language"] == "text" and not text[end : found.start()].strip() and not found["reason"]
        if is_output and blocks and blocks[-1].language == "python":
            last = blocks.pop()
            blocks.append(Block(page, last.line, "python", last.code, last.not_run, code))
        blocks.append(Block(page, line, found["language"], code, found["reason"]))
        end = found.end()
    return blocks


def commands(block: Block) -> list[tuple[int, str]]:
    """The commands of a bash block with their lines in the page, without comments.

    A command continues after a backslash, inside quotes and until the end of a here-document.
    """
    found, pending, start = list[tuple[int, str]](), "", 0
    for number, line in enumerate(block.code.splitlines(), block.line + 1):
        start = start if pending else number
        pending += line + "\n"
        if is_complete(pending):
            command = pending.replace("\\\n", " ").strip()
            if shlex.split(command, comments=True):
                found.append((start, command if "<<" in command else without_comment(command)))
            pending = ""
    if pending:
        raise ValueError(f"{block.page}, line {start}: expected a complete command, got {pending!r}")
    return found


def is_complete(command: str) -> bool:
    here_document = re.search(r"<<-?\s*(['\"]?)(\w+)\1", command)
    if here_document:
        return re.search(rf"^{here_document[2]}$", command, re.MULTILINE) is not None
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\\n")


def without_comment(command: str) -> str:
    """A command without the comment after it; a # inside quotes is not one."""
    for found in re.finditer(r"(^|\s+)#", command):
        try:
            shlex.split(command[: found.start()])
        except ValueError:
            continue
        return command[: found.start()].strip()
    return command
