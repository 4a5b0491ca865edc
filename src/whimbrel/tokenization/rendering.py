"""Runs chat templates, which are Jinja programs that come with a model, within limits.

Jinja's sandbox keeps a template from reading files or running code, but not from looping, or from building a string of
gigabytes. Such a template would hang or exhaust the process that runs it, and a thread cannot be stopped. So templates
run in a child process with limited CPU time, memory and output: one that exceeds them ends with it, and the next
rendering starts another child.
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
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = [
    "LimitExceededError",
    "Marks",
    "RefusedError",
    "Renderer",
    "SourceError",
    "compile_here",
    "each_text",
    "render_here",
    "renderer",
    "serve",
]

CPU_SECONDS = 2
"""CPU time limit for one rendering; thousands of messages take milliseconds."""
MEMORY_BYTES = 512 * 1024**2
"""Memory that a child process may allocate beyond its initial size."""
MAX_CHARACTERS = 16 * 1024**2
"""Maximum length of a rendered conversation in characters."""
WALL_SECONDS = 120.0
"""Wall-clock limit, for systems that cannot limit CPU time."""

KEPT_VARIABLES = ("DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TZ")
"""Environment variables passed to the child process: API keys are not among them."""

NOT_ASCII = re.compile("[\x80-\ud7ff\ue000-\U0010ffff]+")

SEARCHING = (
    *("__contains__", "__eq__", "__getitem__", "__ne__", "count", "endswith", "find", "index", "lower", "lstrip"),
    *("partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
    *("split", "splitlines", "startswith", "strip", "upper"),
)
"""What templates do with a message to look into it, or to take a part of it."""


class SourceError(Exception):
    """A template that is not valid Jinja."""


class RefusedError(Exception):
    """A template failed on its messages or rejected them."""


class LimitExceededError(Exception):
    """A template exceeded its time, memory or output limit."""


class Marks(NamedTuple):
    """Letters of messages that are replaced, each by a mark of its own, so that what they say can be told apart."""

    marks: Mapping[int, str]
    letters: Mapping[int, str]

    def mark(self, text: str) -> str:
        """A text of a message, its letters replaced."""
        marked = text.translate(self.marks)
        return text if marked == text else _Said.of(marked, self)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A value with each text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {each_text(key, change): each_text(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(each_text(entry, change) for entry in value)
    return value


def compile_here(source: str) -> Template:
    """Compile a template in this process, without limits: Jinja evaluates constants when it compiles."""
    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise SourceError(f"in line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise SourceError(f"({type(error).__name__}: {error})") from error


def render_here(source: str, given: Mapping[str, Any], marks: Marks | None = None) -> str:
    """Render in this process, without limits: for templates that come with this package, and in a child."""
    template = _compiled(source)
    if marks is not None:
        given = {**given, "messages": each_text(given["messages"], marks.mark)}
    try:
        text = template.render(given)
    except MemoryError:
        raise
    except Exception as error:  # a program may fail in any way
        said = " ".join(str(error).split())
        raise RefusedError(said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}") from error
    if len(text) > MAX_CHARACTERS:
        raise LimitExceededError(f"{MAX_CHARACTERS} characters of output")
    return text


class Renderer:
    """Renders in a child process, one conversation at a time; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def compile(self, source: str) -> None:
        """Raise `SourceError` if a template is not valid."""
        self._ask({"source": source})

    def render(self, source: str, given: Mapping[str, Any], marks: Marks | None = None) -> str:
        """The text of a conversation; `given` are JSON values."""
        table = None if marks is None else [list(marks.marks.items()), list(marks.letters.items())]
        return str(self._ask({"source": source, "given": given, "marks": table}))

    def close(self) -> None:
        """Stop the child process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            _end(process)

    def _ask(self, question: Mapping[str, Any]) -> Any:
        try:
            message = _packed(question)
        except (TypeError, ValueError) as error:
            raise RefusedError(f"expected messages of JSON values: {error}") from error
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # after a fork the child is another's
                self._process, self._owner = _start(), os.getpid()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            guard = threading.Timer(WALL_SECONDS, process.kill)
            guard.daemon = True
            guard.start()
            answer = None
            try:
                with contextlib.suppress(BrokenPipeError):  # it has ended
                    process.stdin.write(message)
                    process.stdin.flush()
                    answer = _unpacked(process.stdout)
            finally:  # also when interrupted: the next answer would be that of this question
                guard.cancel()
                if answer is None:
                    self._process = None
                    _end(process)
        if answer is None:
            raise LimitExceededError(f"{CPU_SECONDS} s of CPU time, or crashes (exit code {process.returncode})")
        kind, text = answer
        if kind != "text":
            raise {"source": SourceError, "refused": RefusedError, "limit": LimitExceededError}[kind](text)
        return text


renderer = Renderer()
"""The one of this process; its child starts with the first template."""


def serve() -> None:
    """Main loop of the child process: render requests until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory()
    while (question := _unpacked(source)) is not None:
        _limit_time()
        try:
            answer = _packed(("text", _answer(question)))
        except SourceError as error:
            answer = _packed(("source", str(error)))
        except RefusedError as error:
            answer = _packed(("refused", str(error)))
        except LimitExceededError as error:
            answer = _packed(("limit", str(error)))
        except MemoryError:
            answer = _packed(("limit", f"{MEMORY_BYTES // 1024**2} MiB of memory"))
        answers.write(answer)
        answers.flush()


def _answer(question: Mapping[str, Any]) -> str:
    if "given" not in question:
        _compiled(question["source"])
        return ""
    marks = question["marks"] and Marks(*(dict(pairs) for pairs in question["marks"]))
    return render_here(question["source"], question["given"], marks)


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | {"PYTHONPATH": path}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not sent is of no use
                pipe.close()


def _limit_memory() -> None:
    """Limit the address space; where that is not known, as outside of Linux, only the output is limited."""
    size = Path("/proc/self/statm")
    if not size.exists():
        return
    import resource

    limit = int(size.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    _lower(resource.RLIMIT_AS, limit)
    _lower(resource.RLIMIT_CORE, 0)


def _limit_time() -> None:
    """Have SIGXCPU kill this process after `CPU_SECONDS` more of CPU time."""
    if sys.platform != "win32":
        import resource

        _lower(resource.RLIMIT_CPU, math.ceil(time.process_time()) + CPU_SECONDS)


def _lower(kind: int, limit: int) -> None:
    import resource

    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _packed(value: Any) -> bytes:
    """A message: its length, then JSON, in which marks, which are halves of surrogate pairs, stay as they are."""
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(body)) + body


def _unpacked(file: IO[bytes]) -> Any:
    """The next message; None at the end."""
    head = file.read(8)
    if len(head) < 8:
        return None
    [length] = struct.unpack("<Q", head)
    body = file.read(length)
    return json.loads(body.decode("utf-8", "surrogatepass")) if len(body) == length else None


class _Said(str):
    """What a message says, marked: a template that looks for something in it finds it as if there were no marks."""

    _marks: Marks

    @classmethod
    def of(cls, text: str, marks: Marks) -> _Said:
        """A text that has marks in it already."""
        said = cls(text)
        said._marks = marks
        return said

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self.translate(self._marks.letters))


def _searching(name: str) -> Callable[..., Any]:
    """A method of texts that looks for its first argument as it is when marked."""
    method = getattr(str, name)

    def search(self: _Said, *given: Any, **named: Any) -> Any:
        sought = each_text(given[:1], lambda text: text.translate(self._marks.marks))
        return each_text(method(self, *sought, *given[1:], **named), lambda text: _Said.of(text, self._marks))

    return search


for _name in SEARCHING:
    setattr(_Said, _name, _searching(_name))


def _joined(texts: Iterable[str]) -> str:
    """What a block or macro gives: something that was said, where that is in it."""
    parts = list(texts)
    said = next((part for part in parts if isinstance(part, _Said)), None)
    return "".join(parts) if said is None else _Said.of("".join(parts), said._marks)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return compile_here(source)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as templates expect it: blocks leave no blank lines, JSON is not escaped for HTML."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.concat = _joined  # type: ignore[method-assign]
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant wrote for training: here its text and no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    # All but the marks, which would be there to stay.
    return NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
