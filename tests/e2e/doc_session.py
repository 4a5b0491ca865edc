"""Runs the examples of a page of the documentation in the working directory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import whimbrel
from tests.support.documentation import ROOT, code_blocks, commands

from whimbrel.train.run_config import build_run_config

SHORTER = {
    "quickstart": "--minutes=0.02 --depth=1 --plain",
    "train": "--train.epochs=none --train.tokens=none --train.steps=4 --plain",
    "finetune": "--train.epochs=none --train.steps=2 --train.micro_batch=2 --plain",
    "generate": "--max-new-tokens=8",
    "chat": "--max-new-tokens=8",
    "eval": "--limit=3",
    "memory": "--optimizer=adamw",
    "bench/checkpoint.py": "--saves=2",
}
"""Options added to a command, so that it takes seconds."""
PORTS = {"serve": 8000, "watch": 8001}
"""Commands that run until they are stopped, and their ports."""
TYPED = "Who are you?\n/reset\nAnd you?\n"
"""What the user of a chat types."""
SETTINGS: dict[str, Any] = {
    "output_dir": "runs/settings",
    "data": {"path": "shards"},
    "model": {"context_length": 32, "vocab_size": 300, "num_layers": 1, "embd_size": 128, "num_heads": 4},
}
"""A config that makes a fragment of one complete."""


@dataclass(frozen=True)
class Example:
    """A Python or TOML block, or one command of a bash block."""

    page: str
    line: int
    language: str
    code: str
    output: str | None = None

    def __str__(self) -> str:
        words = re.findall(r"[\w.-]+", self.code)[:2] if self.language == "bash" else [self.language]
        return "-".join([str(self.line), *words])


def examples(page: str) -> list[Example]:
    """What the reader of a page runs, in order."""
    found = list[Example]()
    for block in code_blocks(page):
        if block.not_run:
            continue
        if block.language == "bash":
            found += [Example(page, line, "bash", command) for line, command in commands(block)]
        elif block.language in ("python", "toml"):
            found.append(Example(page, block.line, block.language, block.code, block.output))
    return found


@dataclass
class RunningServer:
    """A server in a thread of this process."""

    target: Callable[[], object]
    server: Any = None
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def start(self) -> None:
        from whimbrel.server.http import Server

        original = Server.run_on

        def run_on(server: Server, sock: socket.socket, on_ready: Callable[[], object] | None = None) -> None:
            self.server = server
            original(server, sock, on_ready)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Server, "run_on", run_on)
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()
            while self.server is None or not self.server.started:
                assert self.thread.is_alive(), f"the server stopped: {self.error}"
                time.sleep(0.01)

    def _run(self) -> None:
        try:
            self.target()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        """Stop as after a signal, and wait."""
        self.server.should_exit = True
        self.thread.join()
        assert self.error is None, self.error


@dataclass
class PageSession:
    """What the examples of a page share: the working directory, Python variables and servers."""

    page: str
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "example"})
    ports: dict[int, int] = field(default_factory=dict)
    """The port in use for each port that the page shows."""
    servers: dict[int, RunningServer] = field(default_factory=dict)
    printed: str = ""
    """Output of the last Python block or `whimbrel` command."""
    remaining: list[Example] = field(init=False)
    """Examples that have not run."""
    is_broken: bool = False
    """Whether an example has failed, so that the rest of the page cannot run."""

    def __post_init__(self) -> None:
        self.remaining = examples(self.page)

    def run_until(self, example: Example) -> None:
        """Run an example after all those before it, which have run already if all tests of the page were selected."""
        if self.is_broken:
            pytest.skip("an earlier example of this page failed")
        self.is_broken = True
        for each in self.remaining[: self.remaining.index(example) + 1]:
            self.run(each)
        del self.remaining[: self.remaining.index(example) + 1]
        self.is_broken = False

    def run(self, example: Example) -> None:
        if example.language == "toml":
            self.save_config(example)
        elif example.language == "python":
            self.run_python(example)
        else:
            self.run_command(example.code)

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()

    def run_python(self, example: Example) -> None:
        # With the lines before it, so that tracebacks have the line numbers of the page.
        code = "\n" * example.line + self.with_ports(example.code)
        program = compile(code, example.page, "exec", dont_inherit=True)
        if "run_on(" in code:
            port = int(re.findall(r"port=(\d+)", example.code)[0])
            self.start_server(port, lambda: exec(program, self.names))  # noqa: S102
            return
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        with self.capture():
            exec(program, self.names)  # noqa: S102
        assert torch.__future__.get_swap_module_params_on_conversion() is swaps, "a global setting was not restored"
        if example.output is not None:
            pattern = ".*".join(re.escape(part) for part in example.output.split("..."))
            assert re.fullmatch(pattern, self.printed, re.DOTALL), f"{self.printed}\nexpected:\n{example.output}"

    def save_config(self, example: Example) -> None:
        """Check the settings, and save a complete config as the file that the next command with a config reads."""
        table = tomllib.loads(example.code)
        train = table.get("train", {})
        length = {} if {"epochs", "steps", "tokens"} & train.keys() else {"steps": 1}
        build_run_config({**SETTINGS, **table, "train": train | length})
        commands = " ".join(
            each.code for each in self.remaining if each.language == "bash" and each.line > example.line
        )
        name = re.search(r"[\w./-]+\.toml\b", commands)
        if "output_dir" in table and name is not None:
            Path(name[0]).write_text(example.code)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Keep what is printed, and print it again, for pytest."""
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                yield
        finally:
            self.printed = output.getvalue()
            sys.stdout.write(self.printed)

    def run_command(self, command: str) -> None:
        program, *arguments = shlex.split(command.removesuffix("&"))
        if program == "pip":
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            named = ",".join(re.findall(r"(?:\.|whimbrel)\[([\w,-]+)\]", command))
            assert set(filter(None, named.split(","))) <= set(project["optional-dependencies"])
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(arguments) <= set(targets)
        elif program == "whimbrel" and arguments[0] in PORTS:
            self.serve(arguments)
        elif program == "whimbrel" and not arguments[0].startswith("-") and not needs_shell(command):
            with pytest.MonkeyPatch.context() as patch, self.capture():
                patch.setattr("sys.stdin", io.StringIO(TYPED))
                assert whimbrel(*arguments, *SHORTER.get(arguments[0], "").split()) == 0
        else:
            run_in_shell(self.with_ports(command))

    def serve(self, arguments: list[str]) -> None:
        """Start a server and load its page. It runs until the end of the page, or the next one on the same port."""
        given = re.search(r"--port[= ](\d+)", " ".join(arguments))
        port = int(given[1]) if given else PORTS[arguments[0]]

        def run() -> None:
            assert whimbrel(*arguments, f"--port={self.ports[port]}") == 0

        self.start_server(port, run)
        url = f"http://127.0.0.1:{self.ports[port]}"
        with urllib.request.urlopen(url, timeout=60) as response:
            assert b"<title>Whimbrel" in response.read()
        if arguments[0] == "serve":
            with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
                assert json.load(response)["data"]

    def start_server(self, port: int, target: Callable[[], object]) -> None:
        if port in self.servers:
            self.servers.pop(port).stop()
        if port not in self.ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.ports[port] = free.getsockname()[1]
        server = RunningServer(target)
        server.start()
        self.servers[port] = server

    def with_ports(self, code: str) -> str:
        """An example with the ports in use."""
        shown = re.compile(r"(127\.0\.0\.1:|localhost:|\bport=)(\d+)")
        return shown.sub(lambda found: found[1] + str(self.ports.get(int(found[2]), found[2])), code)


def needs_shell(command: str) -> bool:
    unquoted = re.sub(r"'[^']*'|\"[^\"$`]*\"", "", command)
    return re.search(r"[|&;<>$`*?~]", unquoted) is not None


def run_in_shell(command: str) -> None:
    """Run a command in bash, with the package under test and a home directory of its own."""
    found = re.search(r"(?:whimbrel|python) ([\w./]+)", command)
    head, operator, tail = re.match(r"(.*?)(\s[|&;<>]|$)(.*)", command, re.DOTALL).groups()  # type: ignore[union-attr]
    command = f"{head} {SHORTER.get(found[1], '') if found else ''}{operator}{tail}"
    Path("home/bin").mkdir(parents=True, exist_ok=True)
    program = Path("home/bin/whimbrel")
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m whimbrel "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent.resolve()), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env=os.environ | {"PATH": path, "HOME": str(Path("home").resolve())},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
