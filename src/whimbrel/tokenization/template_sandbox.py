"""Renders chat templates, which are Jinja programs that come with a model, in a child process with limits.

Jinja's sandbox prevents a template from reading files or running code, but not from looping forever or building a
string of gigabytes. Such a template would hang its process or exhaust its memory, and a thread cannot be killed. So
templates run in a child process with limited CPU time, memory and output: one that exceeds a limit is killed with its
process, and the next rendering starts a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = [
    "GENERATION_MARKERS",
    "InvalidTemplateError",
    "LimitExceededError",
    "Markers",
    "RenderError",
    "RenderedChat",
    "TemplateFeatures",
    "TemplateSandbox",
    "child_main",
    "compile_in_process",
    "map_strings",
    "render_chats_in_process",
    "render_in_process",
    "sandbox",
]

CPU_SECONDS = 2
"""CPU time limit for one rendering; thousands of messages take milliseconds."""
MEMORY_BYTES = 512 * 1024**2
"""Memory that a child process may allocate beyond its initial size."""
MAX_CHARACTERS = 16 * 1024**2
"""Maximum length of a rendered conversation in characters."""
WALL_SECONDS = 120.0
"""Wall-clock limit, for systems that cannot limit CPU time."""

INHERITED_VARIABLES = ("DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TZ")
"""Environment variables passed to the child process; API keys are not among them."""

GENERATION_MARKERS = ("\udffe", "\udfff")
"""Surrogate code points around the output of a `{% generation %}` block, while its position is being determined."""

NON_ASCII = re.compile("[\x80-\ud7ff\ue000-\U0010ffff]+")
"""All non-ASCII characters except surrogates, which `Markers` uses."""


class InvalidTemplateError(Exception):
    """A template that is not valid Jinja."""


class RenderError(Exception):
    """A template failed on its messages or rejected them."""


class LimitExceededError(Exception):
    """A template exceeded its time, memory or output limit."""


class Markers(NamedTuple):
    """Characters of messages that are replaced by markers, to distinguish them from those the template writes.

    A marker is a surrogate code point, which cannot occur in valid text. Both tables are for `str.translate`.
    """

    to_marker: Mapping[int, str]
    to_character: Mapping[int, str]

    def mark(self, text: str) -> str:
        """The text of a message with its characters replaced."""
        marked = text.translate(self.to_marker)
        return text if marked == text else _MarkedText.of(marked, self)


class TemplateFeatures(NamedTuple):
    """What a template uses."""

    reads_tools: bool
    has_generation_blocks: bool


class RenderedChat(NamedTuple):
    """A conversation as text, and where its parts are, in characters."""

    text: str
    generated: list[tuple[int, int]] | None
    """Start and end of the output of each `{% generation %}` block; None if the template has no such blocks."""
    prefixes: list[int | None]
    """Length of the rendering of each requested prefix; None if `text` does not start with that rendering."""


def map_strings(value: Any, function: Callable[[str], str], max_depth: int | None = None) -> Any:
    """Apply `function` to every string in nested lists and mappings, keys included.

    Raises RecursionError for more than `max_depth` levels.
    """
    if isinstance(value, str):
        return function(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if max_depth == 0:
        raise RecursionError
    inner = functools.partial(map_strings, function=function, max_depth=None if max_depth is None else max_depth - 1)
    if isinstance(value, Mapping):
        return {inner(key): inner(entry) for key, entry in value.items()}
    return type(value)(inner(entry) for entry in value)


def compile_in_process(source: str) -> TemplateFeatures:
    """Compile a template in this process, without limits (Jinja evaluates constant expressions when it compiles)."""
    _cached_template(source)
    reads_tools = "tools" in meta.find_undeclared_variables(_environment(mark_generation=False).parse(source))
    return TemplateFeatures(reads_tools, _has_generation_blocks(source))


@functools.lru_cache(maxsize=8)
def _cached_template(source: str, *, mark_generation: bool = False) -> Template:
    try:
        return _environment(mark_generation=mark_generation).from_string(source)
    except TemplateSyntaxError as error:
        raise InvalidTemplateError(f"on line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise InvalidTemplateError(f"({type(error).__name__}: {error})") from error


def render_in_process(source: str, variables: Mapping[str, Any], markers: Markers | None = None) -> str:
    """Render in this process, without time and memory limits: for templates of this package, and in the child."""
    return _render(_cached_template(source), _mark_chat(variables, markers))


def render_chats_in_process(
    source: str,
    variables: Mapping[str, Any],
    chats: Iterable[Mapping[str, Any]],
    markers: Markers | None = None,
    before_render: Callable[[], None] | None = None,
) -> Iterator[RenderedChat | Exception]:
    """Render conversations for training; for each, in order, its text or the error that it raised.

    A chat has `messages`, `tools` and `prefixes`, a list of `(num_messages, add_generation_prompt)`. Its text has no
    generation prompt. `before_render` is called before each rendering.
    """
    for chat in chats:
        try:
            named = {**variables, "messages": chat["messages"], "tools": chat["tools"]}
            yield _render_chat(source, named, chat["prefixes"], markers, before_render or (lambda: None))
        except (InvalidTemplateError, LimitExceededError, RenderError) as error:
            yield error
        except MemoryError:
            yield LimitExceededError(f"{MEMORY_BYTES // 1024**2} MiB of memory")


def _render_chat(
    source: str,
    variables: Mapping[str, Any],
    prefixes: Iterable[tuple[int, bool]],
    markers: Markers | None,
    before_render: Callable[[], None],
) -> RenderedChat:
    template, has_generation = _cached_template(source), _has_generation_blocks(source)
    marked = _mark_chat(variables, markers)
    messages = marked["messages"]

    def render(template: Template, num_messages: int, *, add_generation_prompt: bool = False) -> str:
        before_render()
        values = {**marked, "messages": messages[:num_messages], "add_generation_prompt": add_generation_prompt}
        return _render(template, values)

    text, generated = render(template, len(messages)), None
    lengths: list[int | None] = []
    for num_messages, add_generation_prompt in prefixes:
        if num_messages == len(messages) and not add_generation_prompt:
            lengths.append(len(text))
            continue
        prefix = render(template, num_messages, add_generation_prompt=add_generation_prompt)
        # Not `text.startswith`, which marked text overrides to search for characters of messages.
        lengths.append(len(prefix) if str.startswith(text, prefix) else None)
    if has_generation:
        template = _cached_template(source, mark_generation=True)
        with_blocks, generated = _find_generation_blocks(render(template, len(messages)))
        if not str.__eq__(with_blocks, text):
            raise RenderError("it transforms the output of a {% generation %} block: write the block's output as it is")
    return RenderedChat(text, generated, lengths)


def _find_generation_blocks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the markers of generation blocks, and the span of each outermost block."""
    spans: list[tuple[int, int]] = []
    pieces, depth, start, length = [], 0, 0, 0
    for piece in re.split(f"([{''.join(GENERATION_MARKERS)}])", marked):
        if piece == GENERATION_MARKERS[0]:
            start, depth = length if depth == 0 else start, depth + 1
        elif piece == GENERATION_MARKERS[1]:
            depth -= 1
            if depth == 0:
                spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans


def _mark_chat(variables: Mapping[str, Any], markers: Markers | None) -> Mapping[str, Any]:
    """The variables with the characters of messages and tools replaced by markers."""
    if markers is None:
        return variables
    chat = {name: map_strings(variables[name], markers.mark) for name in ("messages", "tools") if name in variables}
    return {**variables, **chat}


def _render(template: Template, variables: Mapping[str, Any]) -> str:
    try:
        text = template.render(variables)
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())
        if not isinstance(error, TemplateError):
            reason = f"{type(error).__name__}: {reason}"
        raise RenderError(reason) from error
    if len(text) > MAX_CHARACTERS:
        raise LimitExceededError(f"{MAX_CHARACTERS} characters of output")
    return text


class TemplateSandbox:
    """Renders in a child process; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def compile(self, source: str) -> TemplateFeatures:
        """What a template uses; raises `InvalidTemplateError` if it is not valid."""
        return TemplateFeatures(*self._call({"source": source}))

    def render(self, source: str, variables: Mapping[str, Any], markers: Markers | None = None) -> str:
        """Render a template; `variables` must be JSON values."""
        return str(self._call({"source": source, "variables": variables, "markers": _tables(markers)}))

    def render_chats(
        self,
        source: str,
        variables: Mapping[str, Any],
        chats: Sequence[Mapping[str, Any]],
        markers: Markers | None = None,
    ) -> list[RenderedChat | Exception]:
        """`render_chats_in_process` in the child process, with one round trip; limits apply to each rendering."""
        results: list[RenderedChat | Exception] = []
        request = {"source": source, "variables": variables, "markers": _tables(markers)}
        while len(results) < len(chats):
            remaining = chats[len(results) :]
            try:
                message = _pack({**request, "chats": remaining})
            except (TypeError, ValueError) as error:
                if len(remaining) == 1:
                    return [*results, RenderError(f"expected messages with only JSON values: {error}")]
                return [*results, *(self.render_chats(source, variables, [chat], markers)[0] for chat in remaining)]
            answers, exit_code = self._exchange(message, len(remaining))
            for kind, value in answers:
                results.append(RenderedChat(*value) if kind == "text" else _ERRORS[kind](value))
            if len(answers) < len(remaining):  # a rendering was killed; continue with the chat after it
                results.append(_killed(exit_code))
        return results

    def close(self) -> None:
        """Stop the child process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            _kill(process)

    def _call(self, request: Mapping[str, Any]) -> Any:
        try:
            message = _pack(request)
        except (TypeError, ValueError) as error:
            raise RenderError(f"expected messages with only JSON values: {error}") from error
        answers, exit_code = self._exchange(message, 1)
        if not answers:
            raise _killed(exit_code)
        [(kind, value)] = answers
        if kind != "text":
            raise _ERRORS[kind](value)
        return value

    def _exchange(self, message: bytes, count: int) -> tuple[list[Any], int | None]:
        """Send a request and read its `count` answers; fewer, and the child's exit code, if the child dies."""
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # after a fork, the child belongs to the parent
                self._process, self._owner = _start(), os.getpid()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            answers: list[Any] = []
            try:
                with _watchdog(process) as reset, contextlib.suppress(BrokenPipeError):  # the child has exited
                    process.stdin.write(message)
                    process.stdin.flush()
                    while len(answers) < count and (answer := _read_message(process.stdout)) is not None:
                        answers.append(answer)
                        reset()
            finally:  # also when interrupted: the next call must not read the answers to this one
                if len(answers) < count:
                    self._process = None
                    _kill(process)
        return answers, process.returncode


_ERRORS: dict[str, type[Exception]] = {
    "invalid": InvalidTemplateError,
    "error": RenderError,
    "limit": LimitExceededError,
}


def _killed(exit_code: int | None) -> LimitExceededError:
    return LimitExceededError(f"{CPU_SECONDS} s of CPU time (or crashed: exit code {exit_code})")


def _tables(markers: Markers | None) -> list[list[Any]] | None:
    return None if markers is None else [list(table.items()) for table in markers]


@contextlib.contextmanager
def _watchdog(process: subprocess.Popen[bytes]) -> Iterator[Callable[[], None]]:
    """Kill the process if `WALL_SECONDS` pass without a call of the yielded function."""
    deadline, finished = time.monotonic() + WALL_SECONDS, threading.Event()

    def reset() -> None:
        nonlocal deadline
        deadline = time.monotonic() + WALL_SECONDS

    def watch() -> None:
        while not finished.wait(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                process.kill()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield reset
    finally:
        finished.set()


sandbox = TemplateSandbox()
"""The sandbox of this process; its child process is started on first use."""


def child_main() -> None:
    """Main loop of the child process: handle requests until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory()
    while (request := _read_message(requests)) is not None:
        for answer in _answers(request):
            results.write(_pack(answer))
            results.flush()  # so that answers before a rendering that is killed are not lost


def _answers(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The kind and value of each answer to a request."""
    source, variables = request["source"], request.get("variables")
    markers = request.get("markers") and Markers(*(dict(pairs) for pairs in request["markers"]))
    if "chats" in request:
        for result in render_chats_in_process(source, variables or {}, request["chats"], markers, _limit_cpu_time):
            yield _as_answer(result)
        return
    _limit_cpu_time()
    try:
        if variables is None:
            yield "text", compile_in_process(source)
        else:
            yield "text", render_in_process(source, variables, markers)
    except (InvalidTemplateError, LimitExceededError, RenderError) as error:
        yield _as_answer(error)
    except MemoryError:
        yield "limit", f"{MEMORY_BYTES // 1024**2} MiB of memory"


def _as_answer(result: RenderedChat | Exception) -> tuple[str, Any]:
    if not isinstance(result, Exception):
        return "text", result
    return next(kind for kind, error in _ERRORS.items() if type(result) is error), str(result)


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ} | {"PYTHONPATH": path}
    command = [sys.executable, "-c", f"from {__name__} import child_main; child_main()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # closing flushes what was not sent
                pipe.close()


def _limit_memory() -> None:
    """Limit the address space; where its size is unknown, as outside Linux, only the output is limited."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    import resource

    limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    _lower_limit(resource.RLIMIT_AS, limit)
    _lower_limit(resource.RLIMIT_CORE, 0)


def _limit_cpu_time() -> None:
    """SIGXCPU kills this process after `CPU_SECONDS` more seconds of CPU time."""
    if sys.platform != "win32":
        import resource

        _lower_limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + CPU_SECONDS)


def _lower_limit(kind: int, limit: int) -> None:
    import resource

    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _pack(value: Any) -> bytes:
    """A message between the processes: its length, then JSON. `surrogatepass` lets markers through."""
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(body)) + body


def _read_message(file: IO[bytes]) -> Any:
    """The next message; None at the end of the file."""
    head = file.read(8)
    if len(head) < 8:
        return None
    [length] = struct.unpack("<Q", head)
    body = file.read(length)
    return json.loads(body.decode("utf-8", "surrogatepass")) if len(body) == length else None


class _MarkedText(str):
    """The text of a message with markers in it, which a template can search as if there were none.

    Templates search in messages (`'</think>' in content`, `content.split('<tool>')`). They search for characters, which
    the message no longer has, so every method in `_WRAPPED_METHODS` first marks what it searches for; and its results,
    like those of slicing and case changes, are marked text too, so that the template can search those again. All other
    operations are those of `str` and move markers like any other character.
    """

    _markers: Markers

    @classmethod
    def of(cls, text: str, markers: Markers) -> _MarkedText:
        """Wrap a string that has markers in it already."""
        marked = cls(text)
        marked._markers = markers
        return marked

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        """Equal to the hash of the unmarked text, which `__eq__` treats as equal: for dictionary keys."""
        return hash(self.translate(self._markers.to_character))


_WRAPPED_METHODS = (
    *("__contains__", "__eq__", "__getitem__", "__ne__", "count", "endswith", "find", "index", "lower", "lstrip"),
    *("partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
    *("split", "splitlines", "startswith", "strip", "upper"),
)


def _wrapped_method(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def wrapper(self: _MarkedText, *args: Any, **kwargs: Any) -> Any:
        target = map_strings(args[:1], lambda text: text.translate(self._markers.to_marker))
        result = method(self, *target, *args[1:], **kwargs)
        return map_strings(result, lambda text: _MarkedText.of(text, self._markers))

    return wrapper


for _name in _WRAPPED_METHODS:
    setattr(_MarkedText, _name, _wrapped_method(_name))


def _concat(parts: Iterable[str]) -> str:
    """Jinja's concatenation for blocks and macros; the result is marked text if any part is."""
    strings = list(parts)
    marked = next((part for part in strings if isinstance(part, _MarkedText)), None)
    return "".join(strings) if marked is None else _MarkedText.of("".join(strings), marked._markers)


@functools.lru_cache(maxsize=8)
def _has_generation_blocks(source: str) -> bool:
    template = _environment(mark_generation=True).parse(source)
    return any(node.data == GENERATION_MARKERS[0] for node in template.find_all(nodes.TemplateData))


@functools.cache
def _environment(*, mark_generation: bool) -> ImmutableSandboxedEnvironment:
    """The Jinja environment that templates expect, with the same settings, filters and globals as in transformers."""
    block = _MarkedGenerationBlock if mark_generation else _GenerationBlock
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[block, "jinja2.ext.loopcontrols"]
    )
    environment.concat = _concat  # type: ignore[method-assign]
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's tokens for training; rendering keeps only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Parse the block as its own scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _MarkedGenerationBlock(_GenerationBlock):
    """`{% generation %}` with its output between `GENERATION_MARKERS`."""

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the block as its own scope."""
        line = parser.stream.current.lineno
        block = super().parse(parser)
        start, end = (nodes.Output([nodes.TemplateData(marker)]).set_lineno(line) for marker in GENERATION_MARKERS)
        return [start, *(block if isinstance(block, list) else [block]), end]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    # json's own ensure_ascii would also escape the markers, which could then not be replaced.
    return NON_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)
