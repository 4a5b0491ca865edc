"""`whimbrel chat MODEL`: a conversation in the terminal."""

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
    Stops,
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

COMMANDS = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer"


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="What the model is told before anything else.")] = None,
    template: Annotated[
        str | None, typer.Option(help="A Jinja file, or the name of one of the model's own chat templates.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stops = None,
    draft: DraftModel = None,
    weights: Weights = None,
    cache: Cache = "none",
    compile: Compile = False,  # noqa: A002
    seed: Seed = None,
    device: Device = None,
    tokenizer: TokenizerPath = None,
) -> None:
    """Talk with a model.

    It remembers what was said, as far as its context reaches. /reset begins anew, /exit or Ctrl-D leaves, and Ctrl-C
    stops an answer.
    """
    from whimbrel.inference import LLM, Conversation
    from whimbrel.model_io import open_model
    from whimbrel.train.device import choose_device

    opened = open_model(model, tokenizer)
    sampling, most = sampling_params(
        opened.generation_config,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    chosen = _template(opened.path, template)
    drafts = draft_factory(draft, device)
    llm = LLM(opened, device=choose_device(device), quantize=weights, cache=cache, compile=compile, max_batch=1)
    talk = Conversation(llm, chosen, sampling, max_new_tokens=most, system=system, stop=tuple(stop or ()), seed=seed)
    _say(COMMANDS)
    while (line := _ask()) is not None and line != "/exit":
        if line == "/reset":
            talk.reset()
            _say("the conversation begins anew")
        elif line.startswith("/"):
            _say(f"'{line}' is no command: {COMMANDS}")
        elif line:
            try:
                _answer(talk, line, drafts())
            except RequestError as error:
                _say(str(error))


def _answer(talk: Conversation, line: str, draft: Draft | None) -> None:
    """Print the answer to a line as it comes; Ctrl-C ends it."""
    pieces, forgotten = talk.ask(line, draft)
    if forgotten:
        _say(f"the model's context is full: it no longer knows of the oldest {forgotten} messages")
    begun = False
    with _interrupts() as interrupted, closing(pieces):
        for piece in pieces:
            shown = piece if begun else piece.lstrip()
            begun = begun or bool(shown)
            print_text(shown)
            if interrupted():
                break
    print("\n")


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: once is asked for, between tokens, and twice ends the program as ever."""
    before = signal.getsignal(signal.SIGINT)
    pressed: list[int] = []

    def note(number: int, _: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _ask() -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            _say(f"\n{COMMANDS}")


def _say(words: str) -> None:
    """A word of the program itself, apart from those of the model."""
    typer.echo(escape_controls(words), err=True)


def _template(source: Path, asked: str | None) -> ChatTemplate:
    """The template asked for, or the model's own, or a plain one."""
    from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, ChatTemplate, load_chat_template, read_special_tokens
    from whimbrel.tokenization.chat_template import read_template

    if asked is not None and Path(asked).is_file():
        given = ChatTemplate(read_template(Path(asked)), read_special_tokens(source))
        given.check()
        return given
    try:
        own = load_chat_template(source, "default" if asked is None else asked)
    except ConfigError as error:
        raise ConfigError(f"there is no file '{asked}', and {error}") from error
    if own is None:
        _say("the model has no chat template: it is shown the conversation as a play")
    return own or DEFAULT_CHAT_TEMPLATE
