"""`whimbrel COMMAND`: the commands, and how errors are printed.

Only the module of the command that is run is imported (all of them for `--help`), and commands import torch when they
need it, so that `whimbrel runs` and `--help` start quickly.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import CompletionItem, TyperArgument, TyperCommand, TyperGroup  # type: ignore[attr-defined]

from whimbrel import __version__
from whimbrel.base.errors import ConfigError, WhimbrelError
from whimbrel.cli.terminal import escape_controls

__all__ = ["build_app", "main"]

COMMANDS = {
    "quickstart": "quickstart:quickstart",
    "prepare": "data:prepare",
    "tokenizer": "data:tokenizer_app",
    "verify": "data:verify",
    "recipes": "recipes:recipes",
    "init": "recipes:init",
    "train": "train:train",
    "finetune": "finetune:finetune",
    "memory": "train:memory",
    "runs": "runs:runs",
    "watch": "watch:watch",
    "control": "runs:control",
    "plot": "plot:plot",
    "compare": "runs:compare",
    "eval": "eval:evaluate",
    "finalize": "export:finalize",
    "export": "export:export",
    "push": "export:push",
    "generate": "generate:generate",
    "chat": "generate:chat",
    "serve": "serve:serve",
    "doctor": "doctor:doctor",
    "bench": "bench:bench",
}
"""Commands in the order of the help page, each as MODULE:FUNCTION below `whimbrel.cli`."""
DISTRIBUTED = {"train", "memory", "verify", "runs", "compare", "doctor"}
"""Commands that several processes may run: training, and those that only read."""
OPTION_NAMES = {"num_blocks": "kv_blocks", "allowed_hosts": "allow_host"}
"""Options that have another name than the parameter in Python."""
WITH_OVERRIDES = {"train", "finetune", "memory"}
"""Commands that accept settings as `--section.name=value` or `--section.name value`."""


class _Group(TyperGroup):
    """Lists commands in the order of COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return [name for name in COMMANDS if name in names]


class _Command(TyperCommand):
    """Shows arguments as MODEL, in usage errors too, where Typer has model or {model}."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for argument in (each for each in self.params if isinstance(each, TyperArgument) and each.metavar is None):
            argument.metavar = f"{argument.name.upper()}{'...' * (argument.nargs != 1)}"

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"[{}]|\.\.\.(?=[\]}])", "", piece) for piece in pieces]


class CommandWithOverrides(_Command):
    """Moves overrides of settings from the arguments to `context.args`, each as `--section.name=value`.

    An override is any argument that starts with -- and is not an option of the command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        remaining, overrides, pending = [], [], list(args)
        while pending:
            argument = pending.pop(0)
            name, equals, _ = argument.partition("=")
            if not name.startswith("--") or name == "--" or name.replace("_", "-") in options:
                remaining.append(argument)
            elif equals or not pending or pending[0].startswith("--"):
                overrides.append(argument)
            else:
                overrides.append(f"{argument}={pending.pop(0)}")
        try:
            rest = super().parse_args(ctx, remaining)
        except typer.TyperException:
            _check_overrides(overrides, options)  # for example --train.compile CONFIG, which takes CONFIG for its value
            raise
        if not ctx.resilient_parsing:  # True for completion
            _check_resume(overrides)
            if any("=" not in override for override in overrides):
                _check_overrides(overrides, options)
        ctx.args = overrides
        return rest

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        completed = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("--") and "." in incomplete:  # listing the settings imports torch, which takes seconds
            from whimbrel.cli.train import run_settings

            names = [f"--{setting.name}" for setting in run_settings() if "[]" not in setting.name]
            completed += [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return completed


def _check_resume(overrides: list[str]) -> None:
    """Raise for --resume, which other programs have; here it is a section, and resuming is the default."""
    for override in overrides:
        typed = override.partition("=")[0]
        if typed.replace("_", "-") in ("--resume", "--resume-from-checkpoint"):
            raise ConfigError(
                f"unknown option {typed}: rerun the same command to resume from the newest checkpoint of the run, or "
                "pass --resume.path=CHECKPOINT"
            )


def _check_overrides(overrides: list[str], options: set[str]) -> None:
    """Raise for an override of an unknown setting or without a value, and for a switch that is neither on nor off."""
    from whimbrel.cli.train import run_settings
    from whimbrel.config import suggest

    settings = {f"--{setting.name}": setting.default for setting in run_settings()}
    sections = {name.rpartition(".")[0] for name in settings}
    for override in overrides:
        typed, equals, value = override.partition("=")
        name = typed.replace("-", "_").replace("__", "--", 1)
        if name not in settings and name not in sections:
            names = {known.removeprefix("--") for known in (*settings, *options) if known.startswith("--")}
            close = suggest(name.removeprefix("--"), names)
            hint = "; `whimbrel train --settings` lists the settings" if close is None else f": did you mean --{close}?"
            raise ConfigError(f"unknown option {typed}{hint}")
        if isinstance(settings.get(name), bool) and value not in ("true", "false", "none"):
            raise ConfigError(f"expected {typed}=true or {typed}=false, got {override.replace('=', ' ')}")
        if name in sections and not equals:
            example = next(setting for setting in settings if setting.startswith(f"{name}."))
            raise ConfigError(f"{typed} is a section, expected one of its settings, such as {example}=VALUE")
        if not equals:
            raise ConfigError(f"expected a value for {typed}: pass {typed}=VALUE")


def build_app(command: str | None = None) -> typer.Typer:
    """The command line with one command, or with all if `command` is None or unknown."""
    app = typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        rich_markup_mode=None,  # its tables cut off option names in narrow terminals
        context_settings={
            "token_normalize_func": lambda name: name.replace("_", "-"),
            "help_option_names": ["-h", "--help"],
            "max_content_width": 120,
        },
    )
    app.callback()(_options)
    for name in [command] if command in COMMANDS else COMMANDS:
        module, _, attribute = COMMANDS[name].partition(":")
        function = getattr(importlib.import_module(f"whimbrel.cli.{module}"), attribute)
        if isinstance(function, typer.Typer):
            for each in function.registered_commands:
                each.cls = _Command
                each.help, each.short_help = _help_texts(each.callback)
            app.add_typer(function, name=name)
        else:
            kind = CommandWithOverrides if name in WITH_OVERRIDES else _Command
            text, short_text = _help_texts(function)
            app.command(name, cls=kind, help=text, short_help=short_text)(function)
    return app


def _help_texts(function: Any) -> tuple[str, str]:
    """The docstring of a command and its first paragraph, without the line breaks that Typer would keep."""
    paragraphs = [" ".join(text.split()) for text in inspect.cleandoc(function.__doc__).split("\n\n")]
    return "\n\n".join(paragraphs), paragraphs[0]


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"whimbrel {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, fine-tune, quantize, evaluate and serve language models on the hardware you have."""
    del version  # handled by its callback


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    User errors print one line and exit with 2, unexpected ones with 1 (--trace prints the traceback), Ctrl-C with 130.
    """
    _set_passive_waiting()
    args = list(sys.argv[1:] if arguments is None else arguments)
    trace = "--trace" in args
    args = [argument for argument in args if argument != "--trace"]
    if invalid := next((argument for argument in args if not _is_utf8(argument)), None):
        typer.echo(f"whimbrel: expected UTF-8 arguments, got {invalid!a}", err=True)
        sys.exit(2)
    try:
        _check_processes(args)
        code = build_app(args[0] if args else None)(args, prog_name="whimbrel", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:
        if trace:
            raise
        code = _report(error, args)
    _exit(code if isinstance(code, int) else 0)


def _check_processes(args: Sequence[str]) -> None:
    """Raise if torchrun started several processes of a command that is not made for it."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and "RANK" in os.environ and args and args[0] in COMMANDS.keys() - DISTRIBUTED:
        raise ConfigError(f"whimbrel {args[0]} runs in one process, got WORLD_SIZE={size}: start it without torchrun")


def _report(error: Exception, args: Sequence[str]) -> int:
    """Print an error in one line and return the exit code; of several processes, only the first that failed prints."""
    is_first, prefix, code = True, "", None
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from whimbrel.distributed import failure

        prefix = failure.rank_prefix()
        is_first, code = failure.report_failure(error)
        error = failure.explain(error)
    if isinstance(error, WhimbrelError | OSError | typer.TyperException):
        line, own_code = _error_line(error, args), 2
    elif _is_out_of_memory(error):
        line, own_code = _memory_line(error, args), 2
    else:
        message = escape_controls(" ".join(str(error).split()))
        line = f"whimbrel: unexpected {type(error).__name__}: {message} (--trace prints the traceback)"
        own_code = 1
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help page
        typer.echo(str(error))
    elif is_first:
        typer.echo(f"{prefix}{line}", err=True)
    return own_code if is_first else code or own_code


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation on a GPU or a CPU failed; torch has no exception class for the latter."""
    return isinstance(error, MemoryError) or any(
        text in str(error) for text in ("out of memory", "can't allocate memory")
    )


def _memory_line(error: Exception, args: Sequence[str]) -> str:
    """What was allocated, and what to do about it."""
    tried = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    allocation = f" (tried to allocate {tried[1]})" if tried else ""
    remedies = {
        ("train", "finetune"): "set --train.micro_batch=1, then --train.recompute=full (see docs/memory.md)",
        ("generate", "chat", "serve", "eval"): "quantize the weights (--quantize int8), or choose another --device",
        ("quickstart",): "pass a smaller --depth",
    }
    remedy = next((text for verbs, text in remedies.items() if args and args[0] in verbs), "free some memory")
    return f"whimbrel: out of memory{allocation}: {remedy}"


def _exit(code: int) -> NoReturn:
    if "whimbrel.distributed.failure" in sys.modules:
        sys.modules["whimbrel.distributed.failure"].end_process(code)
    sys.exit(code)


def _set_passive_waiting() -> None:
    """Let OpenMP threads sleep at barriers instead of spinning, unless the user chose otherwise.

    If another process occupies a core, spinning threads take CPU time from the very thread they wait for, and training
    slows down several times over. libgomp reads the setting when torch loads it, so it must be set before that.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _is_utf8(argument: str) -> bool:
    """False for arguments that Python could not decode: their bytes arrive as surrogates, which cannot be encoded."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _error_line(error: Exception, args: Sequence[str]) -> str:
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "whimbrel")
    if not isinstance(error, typer.TyperException):
        text = _with_option(str(error), args)
    elif hasattr(error, "possibilities"):
        text = _unknown_option(error, args)
    else:
        text = _usage_error(error, context)
    return f"{command}: {escape_controls(' '.join(text.split()))}"


def _with_option(text: str, args: Sequence[str]) -> str:
    """The message with the option in place of the Python parameter that it starts with (`num_blocks: expected ...`)."""
    name, _, rest = text.partition(": expected ")
    option = f"--{OPTION_NAMES.get(name, name).replace('_', '-')}"
    if not rest or not name.isidentifier() or not args or args[0] not in COMMANDS:
        return text
    command = typer.main.get_command(build_app(args[0])).commands[args[0]]  # type: ignore[attr-defined]
    for each in getattr(command, "commands", {"": command}).values():
        if any(option in parameter.opts for parameter in each.params):
            return f"{option}: expected {rest}"
    return text


def _usage_error(error: Any, context: Any) -> str:
    """The message of an error found by the argument parser, with what to do."""
    text: str = error.format_message().removesuffix(".").replace("Value error, ", "")
    if (expected := re.search(r"Input should be (a valid \w+|(greater|less) than [^,]+)", text)) is not None:
        value = error.__cause__.errors()[0]["input"]  # a pydantic.ValidationError
        kind = expected[1] if expected[1].startswith("a ") else f"a value {expected[1]}"
        text = f"{text[: expected.start()]}expected {kind}, got {value!r}"
    extra = re.search(r"unexpected extra argument.*\(([\w.-]+)(=\S*)\)", text)
    if extra is not None and (similar := _similar_options(extra[1], context)):
        return f"{text}: write {_either([f'{option}{extra[2]}' for option in similar])}"
    if "Invalid value" in text or text.endswith("?") or context is None:
        return text
    if "unexpected extra argument" in text and context.command.name == "generate":
        return f"{text}: quote a prompt that contains spaces"
    return f"{text}; see {context.command_path} --help"


def _unknown_option(error: Any, args: Sequence[str]) -> str:
    """The message for an unknown option, with similar ones."""
    name = error.option_name
    if not name.startswith("--"):  # of -steps, the parser reports only -s
        name = next((arg.partition("=")[0] for arg in args if arg.startswith(name)), name)
    similar = _similar_options(name.lstrip("-"), error.ctx)
    hint = f": did you mean {_either(similar)}?" if similar else f"; see {error.ctx.command_path} --help"
    return f"unknown option {name}{hint}"


def _similar_options(name: str, context: Any) -> list[str]:
    """The options and settings of a command that a name may stand for; for one letter, the options that start with
    it.
    """
    from whimbrel.config import suggest

    command, typed = context.command, name.replace("_", "-")
    options = [option for parameter in command.get_params(context) for option in parameter.opts]
    known = {option for option in options if option.startswith("--")}  # not the arguments
    similar = sorted(option for option in known if len(typed) == 1 and option.startswith(f"--{typed.lower()}"))
    if isinstance(command, CommandWithOverrides) and not similar:
        from whimbrel.cli.train import run_settings

        settings = [f"--{setting.name}" for setting in run_settings() if "[]" not in setting.name]
        similar = [setting for setting in settings if re.split("[-.]", setting)[-1] == typed.replace("-", "_")]
        known.update(settings)
    if not similar and len(typed) > 1:
        names = {option.removeprefix("--"): option for option in known}  # common dashes would count as similar
        similar = [names[close] for close in [suggest(typed, names)] if close is not None]
    return similar


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
