"""Chat templates: from messages to the prompt format that a model was trained on.

A template is a Jinja program that comes with a model and has the interface of transformers' chat templates. It runs in
a sandbox with limits (`template_sandbox`); a template that fails or exceeds a limit raises RequestError.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import ConfigError, DataError, RequestError
from whimbrel.base.files import atomic_file
from whimbrel.config import not_one_of
from whimbrel.tokenization.template_sandbox import (
    GENERATION_MARKERS,
    InvalidTemplateError,
    LimitExceededError,
    Markers,
    RenderedChat,
    RenderError,
    compile_in_process,
    map_strings,
    render_chats_in_process,
    render_in_process,
    sandbox,
)
from whimbrel.tokenization.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer, read_json_object, read_special_tokens

__all__ = [
    "DEFAULT_CHAT_TEMPLATE",
    "Chat",
    "ChatTemplate",
    "Message",
    "SupervisedTokens",
    "TrainOn",
    "load_chat_template",
    "read_template",
]

Message = Mapping[str, Any]
"""A message of a conversation: `role` (system, user, assistant), `content`, and any other fields a template uses."""

TEMPLATE_FILE, TEMPLATE_DIRECTORY = "chat_template.jinja", "additional_chat_templates"

SURROGATES = range(0xD800, ord(GENERATION_MARKERS[0]))
"""Code points that never occur in valid text; used as markers."""

MAX_DEPTH = 64
"""Maximum nesting depth of messages."""


BATCH_CHATS, BATCH_CHARACTERS = 256, 1 << 20
"""Limits of a batch that is rendered and encoded at once for training."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

TrainOn = Literal["assistant", "last", "all"]
"""Supervised tokens: all assistant turns, the last one, or all tokens."""


class Chat(NamedTuple):
    """A conversation to train on."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    supervised: Collection[int] | None = None
    """Indices of the messages that may be supervised, for prompts that contain answers; None: all assistant turns."""


class SupervisedTokens(NamedTuple):
    """A conversation as token ids."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """True for supervised tokens."""
    turn_ends: Sequence[int]
    """Number of tokens up to the end of each assistant turn: where the conversation can be truncated."""
    terminated: bool
    """Whether the last supervised turn ends with a special token, so that the model learns to stop."""
    aligned: bool
    """Whether every supervised turn starts with a new token; else prompts end with other tokens than in training."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        stop_strings: Sequence[str] = (),
        writes_bos: bool = True,
        trusted: bool = False,
    ) -> None:
        """Compile `source`; DataError if it is not valid Jinja or exceeds a limit.

        `stop_strings` end a response in addition to the end-of-text token. If the template does not write
        the BOS token itself (`writes_bos=False`), the tokenizer adds it. A `trusted` template runs in this process
        without limits: only for those that come with this package.
        """
        self._trusted = trusted
        self.source, self.stop_strings, self.writes_bos = source, tuple(stop_strings), writes_bos
        self.special_tokens = dict(special_tokens or {})
        try:
            self.features = (compile_in_process if trusted else sandbox.compile)(source)
        except InvalidTemplateError as error:
            raise DataError(f"the chat template is not valid Jinja {error}") from error
        except LimitExceededError as error:
            raise DataError(f"the chat template takes more than {error} to compile: simplify it") from error

    def check(self) -> None:
        """Render one short message; DataError if that exceeds a limit, a warning if the template rejects it."""
        try:
            self._render([{"role": "user", "content": "Hello"}], None, add_generation_prompt=True, markers=None)
        except LimitExceededError as error:
            raise DataError(
                f"the chat template takes more than {error} to render one short message: simplify it"
            ) from error
        except RenderError as error:
            logging.getLogger(__name__).warning("the chat template rejects a single user message: %r", str(error))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation, by default up to the start of the assistant's response."""
        self._check(messages, tools)
        return self._render_or_raise(_map_strings(messages, str), tools, add_generation_prompt, None)

    def save(self, directory: str | Path) -> None:
        """Write the template to a model directory as `chat_template.jinja`."""
        with atomic_file(Path(directory) / TEMPLATE_FILE, "w") as file:
            file.write(self.source)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation; if it has more than `max_tokens`, encoding stops once that is certain.

        Only special tokens that the template itself writes become special ids. Any that contains a character of a
        message is encoded as plain text, whatever the template did to the message, so that messages cannot end their
        turn or impersonate another role.

        Implementation: in messages, the characters of special tokens are replaced by markers before the template runs
        (see `_SpecialTokens`). Afterwards the original characters are restored, and a special token in the text is
        genuine only if there was no marker at its position.
        """
        self._check(messages, tools)
        special = _special_tokens(tokenizer)
        valid, valid_tools = _map_strings((messages, tools), _check_unicode)
        marked = self._render_or_raise(valid, valid_tools, add_generation_prompt, special.markers)
        ids: list[int] = []
        for segment in special.find(marked).segments():
            if max_tokens is not None and len(ids) > max_tokens:
                break
            if segment.forged:
                ids += tokenizer.encode(segment.text)
            else:
                add_bos = segment.first and not self.writes_bos
                ids += tokenizer.encode_prompt(segment.text, add_special_tokens=add_bos, max_tokens=max_tokens).ids
        return ids

    def encode_for_training(
        self, tokenizer: Tokenizer, chats: Iterable[Chat], train_on: TrainOn = "assistant"
    ) -> Iterator[SupervisedTokens | RequestError]:
        """For each conversation, in order, its tokens, or the reason why it cannot be trained on, as an error.

        The ids are the same as from `encode` without a generation prompt. If the template has `{% generation %}`
        blocks, their tokens are supervised, as in transformers. Otherwise an assistant turn starts after the messages
        before it, rendered with a generation prompt, and ends with the special token that ends it, if it has one. This
        needs a template that renders the start of a conversation in the same way regardless of what follows; others are
        rejected unless `train_on="last"`, which omits messages after the last assistant turn.
        """
        if train_on not in get_args(TrainOn):
            raise ConfigError(not_one_of("train_on", train_on, get_args(TrainOn)))
        for batch in _batches(chats):
            jobs = [self._training_job(chat, train_on) for chat in batch]
            valid = [job for job in jobs if not isinstance(job, RequestError)]
            results = iter(self._encode_jobs(tokenizer, valid, train_on))
            for job in jobs:
                yield job if isinstance(job, RequestError) else next(results)

    def _training_job(self, chat: Chat, train_on: TrainOn) -> _TrainingJob | RequestError:
        """What to render for a conversation."""
        try:
            self._check(chat.messages, chat.tools)
            messages, tools = _map_strings((chat.messages, chat.tools), _check_unicode)
        except RequestError as error:
            return error
        allowed = range(len(messages)) if chat.supervised is None else chat.supervised
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index in allowed]
        if not turns:
            return _request_error("expected an assistant turn to train on")
        if turns[0] == 0 and not self.features.has_generation_blocks:
            return _request_error("expected a message before the first assistant turn")
        if train_on == "last":
            turns, messages = turns[-1:], messages[: turns[-1] + 1]
        if train_on == "all":
            prefixes = [(turn + 1, False) for turn in turns]
        elif self.features.has_generation_blocks and train_on == "assistant" and chat.supervised is None:
            prefixes = []
        else:
            prefixes = [prefix for turn in turns for prefix in ((turn, True), (turn + 1, False))]
        return _TrainingJob([_with_reasoning(message) for message in messages], tools, prefixes)

    def _encode_jobs(
        self, tokenizer: Tokenizer, jobs: Sequence[_TrainingJob], train_on: TrainOn
    ) -> Iterator[SupervisedTokens | RequestError]:
        special = _special_tokens(tokenizer)
        variables, chats = self._variables(), [job._asdict() for job in jobs]
        if self._trusted:
            rendered = list(render_chats_in_process(self.source, variables, chats, special.markers))
        else:
            rendered = sandbox.render_chats(self.source, variables, chats, special.markers)
        found = [self._find_special_tokens(result, special) for result in rendered]
        texts = [result for result in found if isinstance(result, _RenderedText)]
        encoded = iter(_encode_batch(tokenizer, texts, add_bos=not self.writes_bos))
        for result, text in zip(rendered, found, strict=True):
            if isinstance(result, Exception) or isinstance(text, RequestError):
                assert isinstance(text, RequestError)
                yield text
                continue
            ids, spans = next(encoded)
            try:
                yield _supervise(ids, spans, result, text, train_on)
            except RequestError as error:
                yield error

    def _find_special_tokens(
        self, result: RenderedChat | Exception, special: _SpecialTokens
    ) -> _RenderedText | RequestError:
        if isinstance(result, Exception):
            return self._render_failure(result, special.markers)
        try:
            return special.find(result.text)
        except RequestError as error:
            return error

    def _render_or_raise(self, messages: Any, tools: Any, add_generation_prompt: bool, markers: Markers | None) -> str:
        try:
            return self._render(messages, tools, add_generation_prompt, markers)
        except (RenderError, LimitExceededError) as error:
            raise self._render_failure(error, markers) from error

    def _render_failure(self, error: Exception, markers: Markers | None) -> RequestError:
        if isinstance(error, LimitExceededError):
            return _request_error(f"the model's chat template takes more than {error} to render these messages")
        reason = str(error).translate({} if markers is None else markers.to_character)
        return _request_error(f"the model's chat template rejects these messages: {reason}")

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool, markers: Markers | None) -> str:
        variables = self._variables(messages, tools, add_generation_prompt)
        return (render_in_process if self._trusted else sandbox.render)(self.source, variables, markers)

    def _variables(
        self, messages: Any = None, tools: Any = None, add_generation_prompt: bool = False
    ) -> dict[str, Any]:
        return {
            **self.special_tokens,
            "messages": messages and [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _check(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
        _check_messages(messages)
        if tools and not self.features.reads_tools:
            raise RequestError(
                "the model's chat template does not support tools: remove them, or fine-tune the model with "
                "--template chatml",
                field="tools",
            )
        if "tool_calls" not in self.source and any(message.get("tool_calls") for message in messages):
            raise _request_error(
                "the model's chat template does not support tool calls: remove them, or use a template that does"
            )


def load_chat_template(directory: str | Path, name: str = "default") -> ChatTemplate | None:
    """The chat template of a model directory, or one of its other named templates; None if it has no template."""
    directory = Path(directory)
    settings = read_json_object(directory / TOKENIZER_CONFIG_FILE)
    templates = _templates_by_name(settings.get("chat_template"), directory / TOKENIZER_CONFIG_FILE)
    for file in [*directory.glob(f"{TEMPLATE_DIRECTORY}/*.jinja"), *directory.glob(TEMPLATE_FILE)]:
        templates["default" if file.name == TEMPLATE_FILE else file.stem] = _read_text(file)
    if name not in templates:
        if name == "default" and not templates:
            return None
        available = ", ".join(sorted(templates)) or "none"
        raise ConfigError(f"{directory} has no chat template '{name}' (available: {available})")
    try:
        template = ChatTemplate(templates[name], read_special_tokens(directory))
        template.check()
        return template
    except DataError as error:
        raise DataError(f"{directory}: {error}") from error


def read_template(file: Path) -> str:
    """The text of a Jinja file that a user chose; raises DataError for a file that would render to itself."""
    text = _read_text(file)
    if "{{" not in text and "{%" not in text:
        raise DataError(f"expected a Jinja file with {{{{ }}}} or {{% %}}, got {file}, which has neither")
    return text


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"expected a Jinja file, got {file}, which is not UTF-8 at byte {error.start}") from error


def _templates_by_name(value: object, file: Path) -> dict[str, str]:
    """The templates of `chat_template` in tokenizer_config.json: one string, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{file}: expected chat_template to be a string or a list of objects with name and template"
        ) from error


def _check_messages(messages: Sequence[Any]) -> None:
    if not messages:
        raise _request_error("expected at least one message, with role and content")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _request_error(f"expected message {index} to be an object with role and content, got {message!r}")


def _request_error(message: str) -> RequestError:
    return RequestError(message, field="messages")


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under all names that templates read, as transformers passes it."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer, and the markers for the characters they consist of.

    Each such character has its own marker, and per token only its punctuation (or first letter) is marked, so that a
    template may slice, reverse and join messages, but no character of a message is taken for one of the template's.
    """

    pattern: re.Pattern[str]
    markers: Markers

    def find(self, marked: str) -> _RenderedText:
        """Replace the markers in a rendered text and find its special tokens."""
        to_character = self.markers.to_character
        text = str(marked).translate(to_character)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _request_error("expected messages of valid Unicode, got a lone surrogate") from error
        genuine, forged = set(), []
        for match in self.pattern.finditer(text):
            if to_character.keys().isdisjoint(map(ord, marked[match.start() : match.end()])):
                genuine.add(match.end())
            else:
                forged.append(match.span())
        return _RenderedText(text, genuine, forged)


class _RenderedText(NamedTuple):
    text: str
    special_ends: set[int]
    """Where special tokens end that the template wrote."""
    forged: list[tuple[int, int]]
    """Start and end of special tokens that contain a character of a message."""

    def segments(self) -> Iterator[_Segment]:
        """The text as pieces that alternate between ordinary text and forged special tokens."""
        bounds = (0, *itertools.chain.from_iterable(self.forged), len(self.text))
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            yield _Segment(self.text[start:end], bool(number % 2), number == 0)


class _Segment(NamedTuple):
    text: str
    forged: bool
    first: bool


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: Tokenizer) -> _SpecialTokens:
    added = tokenizer.pipeline.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    # Punctuation such as < | > [ ]. A token that is a plain word is marked by its first letter, in both cases, because
    # a template may change the case.
    characters: set[str] = set()
    for token in special:
        characters.update(re.findall(r"[^\w\s]", token) or token[:1] + token[:1].swapcase())
    to_marker = {
        ord(character): chr(surrogate) for surrogate, character in zip(SURROGATES, sorted(characters), strict=False)
    }
    return _SpecialTokens(
        pattern, Markers(to_marker, {ord(marker): chr(character) for character, marker in to_marker.items()})
    )


def _check_unicode(text: str) -> str:
    """Reject a lone surrogate, which would be mistaken for a marker."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _request_error("expected messages of valid Unicode, got a lone surrogate") from error
    return text


def _map_strings(messages: Any, function: Callable[[str], str]) -> Any:
    try:
        return map_strings(messages, function, max_depth=MAX_DEPTH + 1)
    except RecursionError:
        raise _request_error(f"messages: expected fewer than {MAX_DEPTH} levels of nesting") from None


# Training


class _TrainingJob(NamedTuple):
    messages: Any
    tools: Any
    prefixes: list[tuple[int, bool]]


def _batches(chats: Iterable[Chat]) -> Iterator[list[Chat]]:
    batch: list[Chat] = []
    characters = 0
    for chat in chats:
        batch.append(chat)
        characters += len(str(chat.messages))
        if len(batch) == BATCH_CHATS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_batch(
    tokenizer: Tokenizer, texts: Sequence[_RenderedText], *, add_bos: bool
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Ids and spans of each text, as `ChatTemplate.encode` encodes it, but all texts in a few batches."""
    segments = [list(text.segments()) for text in texts]
    by_kind: dict[tuple[bool, bool], list[str]] = {}
    for segment in itertools.chain.from_iterable(segments):
        by_kind.setdefault((segment.forged, segment.first and add_bos), []).append(segment.text)
    encoded = {
        (forged, bos): iter(tokenizer.encode_with_spans(same, parse_special=not forged, add_special_tokens=bos))
        for (forged, bos), same in by_kind.items()
    }
    for pieces in segments:
        parts, offset = [], 0
        for segment in pieces:
            ids, spans = next(encoded[segment.forged, segment.first and add_bos])
            parts.append((ids, spans + offset))
            offset += len(segment.text)
        yield np.concatenate([ids for ids, _ in parts]), np.concatenate([spans for _, spans in parts])


def _supervise(
    ids: NDArray[np.int64],
    spans: NDArray[np.int64],
    rendered: RenderedChat,
    text: _RenderedText,
    train_on: TrainOn,
) -> SupervisedTokens:
    if train_on == "all":
        turns = [_trim((0, end), text) for end in rendered.prefixes if end is not None]
    else:
        lengths = [_check_prefix(length, train_on) for length in rendered.prefixes]
        turns = [_trim(turn, text) for turn in zip(lengths[::2], lengths[1::2], strict=True)]
        if rendered.generated is not None:
            allowed = turns if rendered.prefixes else [(0, len(text.text))]
            turns = [
                (start, end)
                for start, end in rendered.generated
                if start < end and any(start < limit and end > first for first, limit in allowed)
            ]
    starts, ends = spans.T
    mask = np.full(len(ids), train_on == "all")
    if train_on != "all":
        for start, end in turns:  # tokens that overlap with the turn
            mask |= (starts < end) & (ends > start)
    if not mask.any():
        raise _request_error("the chat template renders no tokens for an assistant turn: there is nothing to train on")
    return SupervisedTokens(
        ids,
        mask,
        turn_ends=tuple(int(np.count_nonzero(starts < end)) for _, end in turns),
        terminated=bool(turns) and turns[-1][1] in text.special_ends,
        aligned=not any(((starts < start) & (ends > start)).any() for start, _ in turns),
    )


def _trim(turn: tuple[int, int], text: _RenderedText) -> tuple[int, int]:
    """The turn without whitespace after the special token that ends it."""
    start, end = turn
    for position in range(end, start, -1):
        if position in text.special_ends:
            return start, position
        if not text.text[position - 1].isspace():
            break
    return turn


def _check_prefix(length: int | None, train_on: TrainOn) -> int:
    if length is not None:
        return length
    if train_on == "last":
        raise _request_error(
            "the chat template renders an answer differently from its generation prompt: mark answers with "
            "{% generation %} blocks, or choose another template"
        )
    raise _request_error(
        'the chat template renders earlier turns differently once later ones follow: set train_on = "last", or mark '
        "answers in the template with {% generation %} blocks"
    )


DEFAULT_CHAT_TEMPLATE = ChatTemplate(
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    stop_strings=("\nUser:",),
    writes_bos=False,
    trusted=True,
)
"""For models without a chat template: plain "User:" and "Assistant:" lines."""
