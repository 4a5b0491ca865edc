"""The JSON endpoint of `whimbrel watch`, and its access control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("httpx", reason="needs the package 'httpx'")

from starlette.testclient import TestClient

from whimbrel.base.errors import DataError
from whimbrel.server import ServeConfig, run_page
from whimbrel.server.run_curves import MAX_POINTS, MAX_SAMPLES
from whimbrel.server.run_page import RunPage
from whimbrel.train.control import ControlServer, Endpoint
from whimbrel.train.run_directory import log_line

KEY = "a-key-for-tests"


def write_steps(run: Path, first: int, last: int, **fields: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / "log.jsonl").open("a") as file:
        for step in range(first, last + 1):
            numbers = {"loss": 1 / step, "lr": 1e-3, "grad_norm": 1.0, "seconds": 0.5, "tokens": 64}
            file.write(log_line("step", step, {"total": last, **numbers, **fields}))


@pytest.fixture
def client(workdir: Path) -> TestClient:
    write_steps(Path("runs/a"), 1, 6)
    page = RunPage([Path("runs")], ServeConfig(port=0, api_key=KEY))
    return TestClient(page.app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {KEY}"})


@pytest.fixture
def actions() -> Iterator[list[str]]:
    received: list[str] = []

    def answer(action: str) -> dict[str, Any]:
        if action == "status":
            return {"status": {"tokens_per_second": 7.0, "eta_seconds": 9.0}}
        received.append(action)
        return {"message": "saves after the current step", "step": 6}

    control = ControlServer(Path("runs/a"), answer)
    yield received
    control.close()


def test_curves_are_sent_once_and_again_when_the_log_changes(client: TestClient) -> None:
    first = client.get("/api/runs").json()
    assert first["curves"] == {}
    [row] = first["runs"]
    assert (row["name"], row["state"], row["step"], row["total"]) == ("runs/a", "finished", 6, 6)
    assert row["tokens_per_second"] == 128
    assert "checkpoint" not in row  # not shown, and it would be searched for at every poll
    query = {"run": "runs/a", "smoothing": 0}
    reply = client.get("/api/runs", params=query).json()
    curve = reply["curves"]["runs/a"]
    assert curve["step"] == [1, 2, 3, 4, 5, 6]
    assert (curve["tokens"][-1], curve["seconds"][-1]) == (384, 3.0)
    assert curve["smoothed"] == curve["loss"] == [float(f"{1 / step:.6g}") for step in range(1, 7)]
    assert curve["peak_memory"] == [None] * 6  # a log without it
    query["since"] = reply["version"]
    assert client.get("/api/runs", params=query).json()["curves"] == {}
    with Path("runs/a/log.jsonl").open("a") as file:
        file.write(log_line("validation", 6, {"loss": 2.5}) + log_line("sample", 6, {"text": "Ay, me!"}))
    write_steps(Path("runs/a"), 7, 7, resumed=True)
    reply = client.get("/api/runs", params=query).json()
    curve = reply["curves"]["runs/a"]
    assert curve["validation"] == {"step": [6], "tokens": [384], "seconds": [3.0], "loss": [2.5]}
    assert curve["resumes"] == {"step": [6], "tokens": [384], "seconds": [3.0]}
    assert curve["samples"] == [{"step": 6, "text": "Ay, me!"}]
    assert reply["runs"][0]["validation"] == 2.5


def test_long_runs_are_thinned_but_keep_their_spikes_and_last_step(client: TestClient) -> None:
    write_steps(Path("runs/long"), 1, 5000)
    write_steps(Path("runs/long"), 5001, 5001, loss=99.0)
    write_steps(Path("runs/long"), 5002, 5999)
    write_steps(Path("runs/long"), 6000, 6000, loss=float("nan"))
    with Path("runs/long/log.jsonl").open("a") as file:
        for step in range(MAX_SAMPLES + 5):
            file.write(log_line("sample", 6000 + step, {"text": "x"}))
    curve = client.get("/api/runs", params={"run": "runs/long"}).json()["curves"]["runs/long"]
    assert len(curve["step"]) == len(curve["loss"]) == MAX_POINTS
    assert curve["step"] == sorted(curve["step"])
    assert curve["loss"][curve["step"].index(5001)] == 99.0
    assert (curve["step"][-1], curve["loss"][-1]) == (6000, None)
    assert curve["span"] == 120
    assert [sample["step"] for sample in curve["samples"][:2]] == [6024, 6023]
    assert len(curve["samples"]) == MAX_SAMPLES


def test_curves_that_are_no_longer_requested_are_dropped(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(Path("runs/a"), 1, 6)
    page = RunPage([Path("runs")], ServeConfig(port=0))
    client = TestClient(page.app, base_url="http://127.0.0.1")
    reply = client.get("/api/runs", params={"run": "runs/a"}).json()
    client.get("/api/runs")
    assert page._curves.keys() == {"runs/a"}
    monkeypatch.setattr(run_page, "KEEP_SECONDS", 0)
    client.get("/api/runs")
    assert page._curves == {}
    query = {"run": "runs/a", "since": reply["version"]}
    assert client.get("/api/runs", params=query).json()["curves"] == reply["curves"]


def test_an_unreadable_log_does_not_hide_other_runs(client: TestClient) -> None:
    write_steps(Path("runs/b"), 1, 2)
    with Path("runs/b/log.jsonl").open("a") as file:
        file.write("nonsense\n")
    reply = client.get("/api/runs", params={"run": ["runs/a", "runs/b"]}).json()
    states = {row["name"]: (row["state"], "is not JSON" in row.get("error", "")) for row in reply["runs"]}
    assert states == {"runs/a": ("finished", False), "runs/b": ("unreadable", True)}
    assert reply["curves"].keys() == {"runs/a"}
    Path("runs/b/log.jsonl").unlink()
    assert [row["name"] for row in client.get("/api/runs", params={"run": "runs/b"}).json()["runs"]] == ["runs/a"]


def test_a_running_run_reports_its_status_and_can_be_controlled(client: TestClient, actions: list[str]) -> None:
    [row] = client.get("/api/runs").json()["runs"]
    assert (row["state"], row["tokens_per_second"], row["eta_seconds"]) == ("running", 7.0, 9.0)
    reply = client.post("/api/control", json={"run": "runs/a", "action": "save"})
    assert reply.json() == {"step": 6, "message": "saves after the current step"}
    assert actions == ["save"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"run": "runs/nope", "action": "save"}, 404, "unknown run 'runs/nope'"),
        ({"run": "../runs/a", "action": "save"}, 404, "unknown run"),
        ({"run": "runs/a", "action": "abort"}, 400, "'save' or 'stop'"),
        ({"run": "runs/a"}, 400, "action is required"),
    ],
)
def test_invalid_control_requests(
    client: TestClient, actions: list[str], body: dict[str, str], status: int, words: str
) -> None:
    reply = client.post("/api/control", json=body)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]
    assert actions == []


def test_control_needs_the_key_of_the_page_and_the_token_of_the_run(client: TestClient, actions: list[str]) -> None:
    body = {"run": "runs/a", "action": "stop"}
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
        assert client.get("/api/runs", headers=headers).status_code == 401
        assert client.post("/api/control", json=body, headers=headers).status_code == 401
    assert client.post("/api/control", json=body, headers={"Host": "evil.example"}).status_code == 421
    endpoint = Endpoint.read(Path("runs/a"))
    assert endpoint is not None
    Endpoint(host=endpoint.host, port=endpoint.port, token="other", pid=endpoint.pid).write(Path("runs/a"))
    reply = client.post("/api/control", json=body)
    assert reply.status_code == 400
    assert "wrong token" in reply.json()["error"]["message"]
    assert actions == []
    endpoint.write(Path("runs/a"))
    assert client.post("/api/control", json=body).status_code == 200


def test_static_files_need_no_key_and_load_nothing_from_elsewhere(client: TestClient) -> None:
    reply = client.get("/", headers={"Authorization": ""})
    assert reply.status_code == 200
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    for path in ("/page/uplot.js", "/page/watch.js", "/page/watch.css", "/page/theme.css", "/page/icon.svg"):
        assert client.get(path, headers={"Authorization": ""}).status_code == 200
        assert path in reply.text or path.endswith("icon.svg")


def test_missing_directory_is_reported(workdir: Path) -> None:
    with pytest.raises(DataError, match="no such directory: nope"):
        RunPage([Path("nope")], ServeConfig(port=0, api_key=KEY))
