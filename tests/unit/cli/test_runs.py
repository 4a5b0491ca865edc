"""`whimbrel runs`."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from whimbrel.cli.main import main
from whimbrel.train.control import ControlServer, Endpoint
from whimbrel.train.run_directory import log_line


def write_run(folder: Path, steps: int, total: int) -> None:
    folder.mkdir(parents=True)
    lines = [
        log_line("step", n, {"step": n - 1, "total": total, "loss": 3 / n, "tokens": 1}) for n in range(1, steps + 1)
    ]
    if steps == total:
        lines.append(log_line("validation", steps, {"loss": 0.75}))
    (folder / "log.jsonl").write_text("".join(lines))


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    with pytest.raises(SystemExit) as ended:
        main(["runs", *arguments])
    assert not ended.value.code
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "state", "step", "loss", "validation", "checkpoint", "age"]
    return {line[0]: line[1:] for line in lines[1:]}


def test_every_state_of_a_run_is_listed(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps in {"done": 6, "stopped": 3, "new": 0, "killed": 2, "alive": 1, "far": 1}.items():
        write_run(workdir / "runs" / name, steps, total=6)
    log = workdir / "runs" / "done" / "log.jsonl"
    os.utime(log, (time.time() - 7300,) * 2)
    Endpoint(host="other.example", port=9, token="t", pid=1).write(workdir / "runs" / "far")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Endpoint(host=socket.gethostname(), port=port, token="t", pid=1).write(workdir / "runs" / "killed")
    server = ControlServer(workdir / "runs" / "alive", lambda verb: {"status": {}})
    try:
        found = rows(capsys)
    finally:
        server.close()
    assert found["runs/done"] == ["finished", "6/6", "0.5000", "0.7500", "-", "2 h"]
    states = {name: (row[0], row[1]) for name, row in found.items()}
    assert states == {
        "runs/done": ("finished", "6/6"),
        "runs/stopped": ("stopped", "3/6"),
        "runs/new": ("stopped", "0/?"),
        "runs/killed": ("dead", "2/6"),
        "runs/alive": ("running", "1/6"),
        "runs/far": ("other host", "1/6"),
    }


def test_run_of_another_user_is_listed(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("theirs", "mine"):
        write_run(workdir / "runs" / name, 3, total=6)
    Endpoint(host=socket.gethostname(), port=9, token="t", pid=1).write(workdir / "runs" / "theirs")
    read_text = Path.read_text

    def read(path: Path, **how: Any) -> str:
        if path.name == "endpoint.json" and path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))  # mode 0600: unreadable for other users
        return read_text(path, **how)

    monkeypatch.setattr(Path, "read_text", read)
    found = rows(capsys)
    assert {name: row[:2] for name, row in found.items()} == {
        "runs/mine": ["stopped", "3/6"],
        "runs/theirs": ["other user", "3/6"],
    }
    with pytest.raises(SystemExit) as ended:
        main(["control", "runs/theirs", "status"])
    assert ended.value.code == 2
    assert "runs/theirs belongs to another user" in capsys.readouterr().err


def test_accepts_directories_and_runs(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(workdir / "a" / "one", 1, 1)
    write_run(workdir / "a" / "group" / "two", 1, 1)
    write_run(workdir / "b", 1, 1)
    assert rows(capsys, "a", "b", "a/one").keys() == {"a/one", "a/group/two", "b"}


def test_empty_and_missing_directories(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["runs", "empty"])
    assert not ended.value.code
    assert capsys.readouterr().out == "no runs in empty\n"
    with pytest.raises(SystemExit) as ended:
        main(["runs"])
    assert ended.value.code == 2
    assert "no such directory: runs" in capsys.readouterr().err
