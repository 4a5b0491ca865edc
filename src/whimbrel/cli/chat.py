"""`whimbrel chat MODEL`: chat with a model in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.cli.model_options import (
    Cache,
    Compile,
    Device,
    DraftModel,
    MaxNewTokens,
    MinP,
    Model,
    RepetitionPenalty,
    Seed,
    StopStrings,
    Temperature,
    TokenizerPath,
    TopK,
    TopP,
    Weights,
    draft_factory,
    sampling_params,
)
from whimbrel.cli.terminal import escape_controls, print_text

if TYPE_CHECKING:
    from whimbrel.inference import Conversation, Draft
    from whimbrel.tokenization import ChatTemplate

__all__ = ["chat"]

COMMANDS = "/reset starts over, /exit quits, Ctrl-C stops an answer"


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="A Jinja file, or the name of one of the model's chat templates. (default: the model's)"),
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: StopStrings = None,
    draft: DraftModel = None,
    weights: Weights = None,
    cache: Cache = "none",
    compile: Compile = False,  # noqa: A002
    seed: Seed = None,
    device: Device = None,
    tokenizer: TokenizerPath = None,
) -> None:
    """Chat with a model.

    The oldest messages are dropped if the conversation exceeds the model's context. /reset starts over, /exit or Ctrl-D
    quits, and Ctrl-C stops an answer.
    """
    from whimbrel.inference import LLM, Conversation
    from whimbrel.model_io import open_model
    from whimbrel.train.device import choose_device

    opened = open_model(model, tokenizer)
    sampling, limit = sampling_params(
        opened.generation_config,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    chat_template = _load_template(opened.path, template)
    new_draft = draft_factory(draft, device)
    llm = LLM(opened, device=choose_device(device), quantize=weights, cache=cache, compile=compile, max_batch=1)
    conversation = Conversation(
        llm, chat_template, sampling, max_new_tokens=limit, system=system, stop=tuple(stop or ()), seed=seed
    )
    _print_notice(COMMANDS)
    while (line := _read_line()) is not None and line != "/exit":
        if line == "/reset":
            conversation.reset()
            _print_notice("new conversation")
        elif line.startswith("/"):
            _print_notice(f"unknown command '{line}': {COMMANDS}")
        elif line:
            try:
                _print_answer(conversation, line, new_draft())
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
    before = signal.getsignal(signal.SIGINT)
    pressed: list[int] = []

    def handle(number: int, _: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _read_line() -> str | None:
    """Return the next line of input, or None at end of file."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            _print_notice(f"\n{COMMANDS}")


def _print_notice(text: str) -> None:
    """Print to standard error, so that standard output has only the answers."""
    typer.echo(escape_controls(text), err=True)


def _load_template(directory: Path, name: str | None) -> ChatTemplate:
    """Load a template file, or one of the model's templates by name. Models without one use DEFAULT_CHAT_TEMPLATE."""
    from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, ChatTemplate, load_chat_template, read_special_tokens
    from whimbrel.tokenization.chat_template import read_template

    if name is not None and Path(name).is_file():
        template = ChatTemplate(read_template(Path(name)), read_special_tokens(directory))
        template.check()
        return template
    try:
        found = load_chat_template(directory, "default" if name is None else name)
    except ConfigError as error:
        raise ConfigError(f"no such file: '{name}'; {error}") from error
    if found is None:
        _print_notice('the model has no chat template: using a plain "User:/Assistant:" format')
    return found or DEFAULT_CHAT_TEMPLATE
