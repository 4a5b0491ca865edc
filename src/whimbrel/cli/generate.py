"""`whimbrel generate MODEL [PROMPT]` and `whimbrel chat MODEL`: continue a prompt, or chat in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.cli.model_options import GenerationOptions, Model, ParseSpecial, with_generation_options
from whimbrel.cli.terminal import escape_controls, print_text

if TYPE_CHECKING:
    from whimbrel.inference import Conversation, Draft
    from whimbrel.model_io import ModelSource
    from whimbrel.tokenization import ChatTemplate

__all__ = ["chat", "generate"]

CHAT_COMMANDS = {
    "/help": "list the commands",
    "/reset": "start a new conversation",
    "/exit": "quit, as Ctrl-D does",
    "Ctrl-C": "stop the answer",
}
CHAT_HELP = "\n".join(f"{command:<8} {effect}" for command, effect in CHAT_COMMANDS.items())
CHAT_HINT = "/help lists the commands, /exit quits"


@with_generation_options
def generate(
    model: Model,
    text: Annotated[
        str | None,
        typer.Argument(
            help="The prompt; - reads it from standard input, which is the default if that is not a terminal. Without "
            "a prompt, generation starts from BOS.",
            metavar="PROMPT",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Number of completions.")] = 1,
    num_beams: Annotated[
        int | None, typer.Option(help="Use beam search with this many beams instead of sampling.")
    ] = None,
    parse_special: ParseSpecial = True,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue generating after the end-of-text token.")
    ] = False,
    *,
    options: GenerationOptions,
) -> None:
    """Continue a prompt, streaming the output.

    Sampling options default to the model's generation_config.json.
    """
    from whimbrel.inference import encode_prompt, stream_text
    from whimbrel.model_io import open_model

    _check_combination(n, num_beams, options)
    text = _read_prompt() if text == "-" or (text is None and not _is_terminal(sys.stdin)) else text or ""
    opened = open_model(model, options.tokenizer, base=options.base)
    bos_id = opened.generation_config.bos_token_id
    prompt = encode_prompt(opened.tokenizer, text, parse_special=parse_special, bos_id=bos_id).ids
    sampling, limit = options.sampling_params(opened.generation_config)
    llm = options.load_llm(opened, max_batch=max(n, num_beams or 1))
    if num_beams is None and len(prompt) >= (context := llm.engine.context_length):
        typer.echo(
            f"The prompt has {len(prompt):,} tokens and the context holds {context:,}: using only its last tokens",
            err=True,
        )
    stops, seed = options.stop or (), options.seed
    texts: Iterable[Iterable[str]]
    if num_beams is not None:
        best = llm.beam_search(prompt, num_beams=num_beams, max_new_tokens=limit, ignore_eos=ignore_eos)
        texts = [stream_text(opened.tokenizer, prompt, beam.tokens, stops) for beam in best[:n]]
    elif n > 1:
        [output] = llm.generate(
            [prompt], sampling, n=n, max_new_tokens=limit, seed=seed, stop=stops, ignore_eos=ignore_eos
        )
        texts = [[completion.text or ""] for completion in output.outputs]
    else:
        texts = [
            llm.stream(
                prompt, sampling, max_new_tokens=limit, seed=seed, stop=stops, ignore_eos=ignore_eos,
                draft=options.load_draft(),
            )
        ]  # fmt: skip
    for index, pieces in enumerate(texts):
        print_text("\n" * bool(index) + text)
        for piece in pieces:
            print_text(piece)
        print()


def _is_terminal(file: TextIO | None) -> bool:
    """Whether `file` is a terminal, or missing or closed, as standard input is for some services."""
    return file is None or file.closed or file.isatty()


def _read_prompt() -> str:
    """Standard input, without the final newline, which `echo` and editors add."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"expected UTF-8 on standard input, got byte {error.object[error.start]:#x}") from error


def _check_combination(n: int, num_beams: int | None, options: GenerationOptions) -> None:
    if n < 1:
        raise ConfigError(f"expected --n of at least 1, got {n}")
    if n > 1 and options.draft is not None:
        raise ConfigError("--draft cannot be combined with --n: omit one of them")
    if num_beams is None:
        return
    unused = {**options.sampling, "seed": options.seed, "draft": options.draft}
    conflicting = [name for name, value in unused.items() if value is not None]
    if conflicting:
        option = conflicting[0].replace("_", "-")
        raise ConfigError(f"--{option} cannot be combined with --num-beams: omit one of them")
    if n > num_beams:
        raise ConfigError(f"expected --n of at most --num-beams {num_beams}, got {n}: use more beams")


@with_generation_options
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="A Jinja file, or the name of one of the model's chat templates. (default: the model's)"),
    ] = None,
    *,
    options: GenerationOptions,
) -> None:
    """Chat with a model.

    The oldest messages are dropped if the conversation exceeds the model's context. /help lists the commands.
    """
    from whimbrel.inference import Conversation
    from whimbrel.model_io import open_model

    opened = open_model(model, options.tokenizer, base=options.base)
    sampling, limit = options.sampling_params(opened.generation_config)
    chat_template = _load_template(opened, template)
    draft = options.load_draft()
    llm, stop = options.load_llm(opened, max_batch=1), tuple(options.stop or ())
    conversation = Conversation(
        llm, chat_template, sampling, max_new_tokens=limit, system=system, stop=stop, seed=options.seed
    )
    _print_notice(CHAT_HINT)
    while (line := _read_line()) is not None and line != "/exit":
        if line == "/reset":
            conversation.reset()
            _print_notice("new conversation")
        elif line == "/help":
            _print_notice(CHAT_HELP)
        elif line.startswith("/"):
            _print_notice(f"unknown command '{line}': type /help for the commands")
        elif line:
            try:
                _print_answer(conversation, line, draft)
            except RequestError as error:
                _print_notice(str(error))


def _print_answer(conversation: Conversation, line: str, draft: Draft | None) -> None:
    """Stream the answer, without leading whitespace; Ctrl-C stops it."""
    pieces, num_dropped = conversation.ask(line, draft)
    if num_dropped:
        _print_notice(f"the context is full: dropped the {num_dropped} oldest messages")
    started = False
    with _catch_interrupt() as interrupted, closing(pieces):
        for piece in pieces:
            text = piece if started else piece.lstrip()
            started = started or bool(text)
            print_text(text)
            if interrupted():
                break
    print("\n")


@contextmanager
def _catch_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt as usual."""
    previous_handler = signal.getsignal(signal.SIGINT)
    pressed: list[int] = []

    def handle(signum: int, _: object) -> None:
        pressed.append(signum)
        signal.signal(signal.SIGINT, previous_handler)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _read_line() -> str | None:
    """Return the next line of input, or None at end of file."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            _print_notice(f"\n{CHAT_HINT}")


def _print_notice(text: str) -> None:
    """Print to standard error, so that standard output has only the answers."""
    typer.echo(escape_controls(text), err=True)


def _load_template(opened: ModelSource, name: str | None) -> ChatTemplate:
    """Load a template file, or one of the model's templates by name. Models without one use DEFAULT_CHAT_TEMPLATE."""
    from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, ChatTemplate, read_special_tokens
    from whimbrel.tokenization.chat_template import read_template

    if name is not None and Path(name).is_file():
        template = ChatTemplate(
            read_template(Path(name)), read_special_tokens(opened.location.tokenizer_directory or opened.path)
        )
        template.check()
        return template
    try:
        chat_template = opened.chat_template("default" if name is None else name)
    except ConfigError as error:
        if name is None:
            raise ConfigError(f"{error}: choose one with --template") from error
        raise ConfigError(f"no such file: '{name}'; {error}") from error
    if chat_template is None:
        _print_notice('the model has no chat template: using a plain "User:/Assistant:" format')
    return chat_template or DEFAULT_CHAT_TEMPLATE
