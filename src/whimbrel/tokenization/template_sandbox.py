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
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = [
    "InvalidTemplateError",
    "LimitExceededError",
    "Markers",
    "RenderError",
    "TemplateSandbox",
    "child_main",
    "compile_in_process",
    "map_strings",
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


def compile_in_process(source: str) -> Template:
    """Compile a template in this process, without limits (Jinja evaluates constant expressions when it compiles)."""
    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise InvalidTemplateError(f"on line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise InvalidTemplateError(f"({type(error).__name__}: {error})") from error


def render_in_process(source: str, variables: Mapping[str, Any], markers: Markers | None = None) -> str:
    """Render in this process, without time and memory limits: for templates of this package, and in the child."""
    template = _cached_template(source)
    if markers is not None:
        variables = {**variables, "messages": map_strings(variables["messages"], markers.mark)}
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
    """Renders in a child process, one conversation at a time; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def compile(self, source: str) -> None:
        """Raise `InvalidTemplateError` if a template is not valid."""
        self._call({"source": source})

    def render(self, source: str, variables: Mapping[str, Any], markers: Markers | None = None) -> str:
        """Render a template; `variables` must be JSON values."""
        tables = None if markers is None else [list(table.items()) for table in markers]
        return str(self._call({"source": source, "variables": variables, "markers": tables}))

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
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # after a fork, the child belongs to the parent
                self._process, self._owner = _start(), os.getpid()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(WALL_SECONDS, process.kill)
            timer.daemon = True
            timer.start()
            result = None
            try:
                with contextlib.suppress(BrokenPipeError):  # the child has exited
                    process.stdin.write(message)
                    process.stdin.flush()
                    result = _read_message(process.stdout)
            finally:  # also when interrupted: the next call must not read the result of this one
                timer.cancel()
                if result is None:
                    self._process = None
                    _kill(process)
        if result is None:
            raise LimitExceededError(f"{CPU_SECONDS} s of CPU time (or crashed: exit code {process.returncode})")
        kind, text = result
        if kind != "text":
            raise {"invalid": InvalidTemplateError, "error": RenderError, "limit": LimitExceededError}[kind](text)
        return text


sandbox = TemplateSandbox()
"""The sandbox of this process; its child process is started on first use."""


def child_main() -> None:
    """Main loop of the child process: handle requests until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory()
    while (request := _read_message(requests)) is not None:
        _limit_cpu_time()
        try:
            result = _pack(("text", _handle(request)))
        except InvalidTemplateError as error:
            result = _pack(("invalid", str(error)))
        except RenderError as error:
            result = _pack(("error", str(error)))
        except LimitExceededError as error:
            result = _pack(("limit", str(error)))
        except MemoryError:
            result = _pack(("limit", f"{MEMORY_BYTES // 1024**2} MiB of memory"))
        results.write(result)
        results.flush()


def _handle(request: Mapping[str, Any]) -> str:
    if "variables" not in request:
        _cached_template(request["source"])
        return ""
    markers = request["markers"] and Markers(*(dict(pairs) for pairs in request["markers"]))
    return render_in_process(request["source"], request["variables"], markers)


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
        """Equal to that of the unmarked text, which `__eq__` treats as equal: for dictionary keys."""
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
def _cached_template(source: str) -> Template:
    return compile_in_process(source)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment that templates expect, with the settings, filters and globals of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.concat = _concat  # type: ignore[method-assign]
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's tokens for training; rendering keeps only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as its own scope."""
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
    # json's own ensure_ascii would also escape the markers, which could then not be replaced.
    return NON_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)
