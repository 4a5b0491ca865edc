"""Write the generated parts of docs/settings.md, docs/cli.md and docs/recipes.md; a test compares them with the code.

A generated part is between the comments `<!-- generated -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from whimbrel.cli.main import build_app
from whimbrel.cli.recipes import recipe_rows
from whimbrel.cli.train import run_settings
from whimbrel.config import Setting, field_docs
from whimbrel.train import RunConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
GENERATED = re.compile(r"(<!-- generated -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    columns = list(columns)
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(escape(cell) for cell in row)} |"
    yield ""


def escape(text: str) -> str:
    """Text for a cell: pipes and tags outside of code would end the cell or disappear."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([|<])", r"\\\1", part) for part in parts[::2]]
    return "".join(part.replace("|", "&#124;") if "|" in part and part[0] == "`" else part for part in parts)


def settings() -> Iterator[str]:
    docs, sections = field_docs(RunConfig), dict[str, list[Setting]]()
    for setting in run_settings():
        sections.setdefault(setting.name.rpartition(".")[0], []).append(setting)
    for section, members in sections.items():
        yield f"## {section or 'Run'}\n"
        if section in docs:
            yield f"{docs[section]}\n"
        elif section.endswith("[]"):
            yield f"You can add any number of `[[{section.removesuffix('[]')}]]` tables.\n"
        yield from table(("setting", "type", "default", "description"), map(setting_row, members))


def setting_row(setting: Setting) -> tuple[str, ...]:
    description, _, in_words = re.sub(r"[;.] default: ", "\0", setting.doc, flags=re.IGNORECASE).partition("\0")
    default = setting.default_text()
    shown = "required" if setting.is_required else f"`{default}`" if default else in_words.removesuffix(".")
    return f"`{setting.name}`", setting.type, shown, f"{description.removesuffix('.')}."


def commands() -> Iterator[str]:
    app: Any = get_command(build_app())
    context = app.context_class(app, info_name="whimbrel")
    for name in app.list_commands(context):
        command = app.get_command(context, name)
        yield from describe(command, command.context_class(command, info_name=name, parent=context))


def describe(command: Any, context: Any, level: str = "##") -> Iterator[str]:
    yield f"{level} {context.command_path}\n"
    usage = command.get_usage(context).removeprefix(f"Usage: {context.command_path}")
    arguments = " ".join(usage.split())
    yield f"```text\n{context.command_path} {arguments}\n```\n"
    yield f"{command.help}\n"
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            yield from describe(member, member.context_class(member, info_name=name, parent=context), f"{level}#")
        return
    records = [(parameter, parameter.get_help_record(context)) for parameter in command.get_params(context)]
    rows = [
        (f"`{names if parameter.param_type_name == 'option' else names.split()[0]}`", text)
        for parameter, (names, text) in ((each, record) for each, record in records if record is not None)
        if parameter.name != "help"
    ]
    if rows:
        yield from table(("argument or option", "description"), rows)


def recipes() -> Iterator[str]:
    rows = [(f"`{name}`", *figures, summary) for name, *figures, summary in recipe_rows()]
    yield from table(("recipe", "model", "data", "loss", "memory", "time", "description"), rows)


PAGES: dict[str, Callable[[], Iterator[str]]] = {"settings.md": settings, "cli.md": commands, "recipes.md": recipes}


def render(page: str) -> str:
    """The text of a page with its generated part renewed."""
    text = (DOCS / page).read_text(encoding="utf-8")
    content = "\n".join(PAGES[page]())
    renewed, count = GENERATED.subn(lambda match: f"{match[1]}\n{content}\n", text)
    if count != 1:
        raise ValueError(f"docs/{page}: expected one generated part, got {count}")
    return renewed


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(render(page), encoding="utf-8")
        typer.echo(f"docs/{page}")
