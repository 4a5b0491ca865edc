"""Copies of checkpoints in object storage: what is uploaded, what a failure leaves, and what is downloaded."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from whimbrel.base.errors import CheckpointError, ConfigError, MissingExtraError
from whimbrel.checkpoint import CheckpointManager, list_checkpoints
from whimbrel.checkpoint import mirror as mirror_module
from whimbrel.checkpoint.mirror import CheckpointMirror

pytestmark = pytest.mark.usefixtures("no_retry_delay", "no_transfer_delay")


@pytest.fixture
def no_transfer_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "RETRY_SECONDS", (0.0,))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/prefix"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on a local S3 server."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield "s3://bucket/prefix"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def fail(mirror: CheckpointMirror, monkeypatch: pytest.MonkeyPatch, error: Exception, after: int = 0) -> None:
    """Let every upload after the first `after` files raise `error`."""
    put, sent = mirror._fs.put_file, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        if len(sent) >= after:
            raise error
        sent.append(args)
        return put(*args, **kwargs)

    monkeypatch.setattr(mirror._fs, "put_file", broken)


def save(run: Path, url: str, parts: Callable[..., Any], steps: dict[int, float | None], **options: Any) -> None:
    manager = CheckpointManager(run, mirror=url, **options)
    for step, metric in steps.items():
        manager.save(step, parts(float(step)), metric=metric)
    manager.close()


def restored(run: Path, url: str, parts: Callable[..., Any]) -> tuple[int, float]:
    manager, fresh = CheckpointManager(run, mirror=url), parts(0.0)
    manager.fetch(resume=True, overwrite=False)
    return manager.load(fresh).step, float(fresh[0].stateful.state["w"][0])


def mirror_of(manager: CheckpointManager) -> CheckpointMirror:
    assert manager._mirror is not None
    return manager._mirror


def test_lost_run_directory_is_restored_from_the_newest_copy(tmp_path: Path, url: str, parts) -> None:
    run = tmp_path / "run"
    save(run, url, parts, {1: None, 2: None})
    shutil.rmtree(run)
    assert restored(run, url, parts) == (2, 2.0)
    assert list(list_checkpoints(run)) == [2]


def test_local_checkpoints_are_preferred(tmp_path: Path, url: str, parts) -> None:
    run = tmp_path / "run"
    save(run, url, parts, {1: None, 2: None})
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    assert restored(run, url, parts) == (1, 1.0)


def test_retention_is_that_of_local_checkpoints(tmp_path: Path, url: str, parts) -> None:
    run = tmp_path / "run"
    metrics: dict[int, float | None] = {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0}
    save(run, url, parts, metrics, keep=1, best=1)
    assert CheckpointMirror(url).steps() == list(list_checkpoints(run)) == [2, 4]


def test_best_remote_checkpoint_survives_the_loss_of_local_ones(tmp_path: Path, url: str, parts) -> None:
    run = tmp_path / "run"
    save(run, url, parts, {1: 1.0, 2: 3.0}, keep=1, best=1)
    shutil.rmtree(run)
    assert restored(run, url, parts) == (2, 2.0)
    save(run, url, parts, {3: 2.0}, keep=1, best=1)
    assert CheckpointMirror(url).steps() == [1, 3]


def test_killed_upload_is_ignored(tmp_path: Path, url: str, parts) -> None:
    """A process that is killed has not uploaded the manifest, which is last."""
    run = tmp_path / "run"
    save(run, url, parts, {1: None, 2: None})
    (tmp_path / "bucket" / "prefix" / "step-00000002" / "manifest.json").unlink()
    shutil.rmtree(run)
    assert restored(run, url, parts) == (1, 1.0)


def test_damaged_copy_is_skipped(tmp_path: Path, url: str, parts, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    save(run, url, parts, {1: None, 2: None})
    (tmp_path / "bucket" / "prefix" / "step-00000002" / "trainer.json").write_text("{}")
    shutil.rmtree(run)
    assert restored(run, url, parts) == (1, 1.0)
    assert "trainer.json has changed" in caplog.text


def test_failed_upload_warns_once_and_is_repeated_with_the_next(
    tmp_path: Path, url: str, parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    manager = CheckpointManager(run, mirror=url)
    mirror = mirror_of(manager)
    with monkeypatch.context() as patch:
        fail(mirror, patch, ConnectionRefusedError(111, "Connection refused"), after=2)
        for step in (1, 2):
            manager.save(step, parts(float(step)))
            mirror.close()
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [text for text in warnings if "Connection refused" in text] == [
            f"cannot upload checkpoints to {url}: [Errno 111] Connection refused; the next save tries again"
        ]
        assert mirror.steps() == []
    manager.save(3, parts(3.0))
    manager.close()
    assert mirror.steps() == [1, 2, 3]
    caplog.clear()
    shutil.rmtree(run)
    assert restored(run, url, parts) == (3, 3.0)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_end_of_the_run_says_that_the_last_checkpoint_is_only_local(
    tmp_path: Path, url: str, parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path / "run", mirror=url, asynchronous=True)
    fail(mirror_of(manager), monkeypatch, OSError("500 Internal Server Error"))
    manager.save(1, parts(1.0))
    manager.wait()
    manager.close()
    assert f"{url} lacks the last checkpoint" in caplog.text


def test_checkpoint_that_was_written_again_is_uploaded_again(tmp_path: Path, url: str, parts) -> None:
    run = tmp_path / "run"
    save(run, url, parts, {1: None})
    manager = CheckpointManager(run, mirror=url)
    manager.save(1, parts(7.0))
    manager.close()
    shutil.rmtree(run)
    assert restored(run, url, parts) == (1, 7.0)


def test_another_run_on_the_mirror_is_neither_mixed_nor_overwritten_silently(tmp_path: Path, url: str, parts) -> None:
    save(tmp_path / "run", url, parts, {5: None})
    other = CheckpointManager(tmp_path / "other", mirror=url)
    with pytest.raises(ConfigError, match="already contains a run at step 5"):
        other.fetch(resume=False, overwrite=False)
    other.fetch(resume=False, overwrite=True)
    assert CheckpointMirror(url).steps() == []


def test_unusable_urls_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a URL such as s3://bucket/prefix"):
        CheckpointMirror("nonsense://bucket")
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"checkpoint.mirror needs the package 'fsspec'.*whimbrel\[remote\]"):
        CheckpointManager(tmp_path, mirror="s3://bucket/prefix")


def test_s3_round_trip_with_failures(
    tmp_path: Path, bucket: str, parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    save(run, bucket, parts, {1: None, 2: None}, keep=1)
    mirror = CheckpointMirror(bucket)
    assert mirror.steps() == [2]
    manager = CheckpointManager(run, mirror=bucket)
    with monkeypatch.context() as patch:  # killed after two files
        fail(mirror_of(manager), patch, OSError("killed"), after=2)
        manager.save(3, parts(3.0))
        manager.close()
    assert mirror._fs.exists("bucket/prefix/step-00000003")
    assert mirror.steps() == [2]
    shutil.rmtree(run)
    assert restored(run, bucket, parts) == (2, 2.0)


class ServerError(BaseHTTPRequestHandler):
    """Answers every request with status 500."""

    def do_GET(self) -> None:
        self.send_error(500)

    do_PUT = do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(params=["connection refused", "status 500"])
def broken_bucket(request: pytest.FixtureRequest, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import s3fs

    with ThreadingHTTPServer(("127.0.0.1", 0), ServerError) as server:
        port = server.server_port
        if request.param == "status 500":
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.socket.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        yield bucket
        if request.param == "status 500":
            server.shutdown()


def test_broken_server_fails_neither_a_save_nor_starts_a_new_run(
    tmp_path: Path, broken_bucket: str, parts, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path / "run", mirror=broken_bucket)
    with pytest.raises(CheckpointError, match=f"cannot read checkpoint.mirror = {broken_bucket}"):
        manager.fetch(resume=True, overwrite=False)
    manager.save(1, parts(1.0))
    manager.close()
    assert list(list_checkpoints(tmp_path / "run")) == [1]
    assert f"cannot upload checkpoints to {broken_bucket}" in caplog.text
