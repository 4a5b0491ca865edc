"""Copies of checkpoints in object storage: uploaded in the background, downloaded when the local ones are gone.

The manifest is uploaded last and removed first, so a remote checkpoint with a manifest is complete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from whimbrel.base.errors import CheckpointError, ConfigError, MissingExtraError
from whimbrel.base.files import atomic_directory
from whimbrel.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    Retention,
    checkpoint_path,
    list_checkpoints,
    parse_manifest,
    parse_step,
    verify_checkpoint,
)

__all__ = ["CheckpointMirror"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 4.0, 16.0)
"""Delays between retries of a failed transfer."""
CLOSE_SECONDS = 600.0
"""How long the end of a run waits for the last upload."""
T = TypeVar("T")


class CheckpointMirror:
    """Checkpoints of one run at `url`, such as `s3://bucket/prefix`; any file system of fsspec.

    Credentials come from the environment, as the file system documents them. A failed upload never stops training: it
    is logged once, and the next upload transfers whatever is missing. `retention` applies as to local checkpoints.
    """

    def __init__(self, url: str, retention: Retention | None = None) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise MissingExtraError("checkpoint.mirror", "fsspec", "remote") from error
        self.url, self._retention = url, retention or Retention()
        try:
            self._fs, root = fsspec.url_to_fs(url)
        except ImportError as error:
            raise MissingExtraError(f"checkpoint.mirror = {url}", url.partition(":")[0] + "fs", "remote") from error
        except ValueError as error:
            raise ConfigError(f"expected a URL such as s3://bucket/prefix in checkpoint.mirror, got {url}") from error
        self._root = PurePosixPath(root)
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._request: tuple[Path, int] | None = None
        self._failed = False
        self._manifests: dict[int, bytes] = {}
        """Manifests of the complete remote checkpoints, as far as they are known."""

    def upload(self, run: Path, newest: int) -> None:
        """Start to upload what the mirror lacks, and to remove what is no longer retained at step `newest`."""
        with self._guard:
            self._request = run, newest
            if self._thread is None:
                # A daemon: a transfer that hangs must not keep the process alive (see `close`).
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the uploads, for a limited time."""
        thread = self._thread
        if thread is not None:
            logger.info("Waiting for the upload of checkpoints to %s", self.url)
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                logger.warning("gave up on the upload to %s, which did not finish within %g s", self.url, CLOSE_SECONDS)
        if self._failed:
            logger.warning("%s lacks the last checkpoint, which exists only in the run directory", self.url)

    def steps(self) -> list[int]:
        """Steps of the complete remote checkpoints, in order."""
        try:
            found = self._try(lambda: self._fs.glob(str(self._root / "*" / MANIFEST_FILE)))
        except Exception as error:
            raise CheckpointError(f"cannot read checkpoint.mirror = {self.url}: {_reason(error)}") from error
        steps = (parse_step(Path(name).parent) for name in found)
        return sorted(step for step in steps if step is not None)

    def download_newest(self, run: Path) -> Path | None:
        """Copy the newest valid checkpoint to its place in the run directory; None if the mirror has none.

        A damaged one is skipped with a warning; raises CheckpointError if all are.
        """
        steps, error = self.steps(), None
        for step in reversed(steps):
            logger.info("Downloading the checkpoint of step %d from %s", step, self.url)
            try:
                return self._download(step, run)
            except CheckpointError as failure:
                error = failure
                logger.warning("skipped: %s", failure)
        if error is not None:
            raise CheckpointError(f"{self.url} has no valid checkpoint (last error: {error})")
        return None

    def clear(self) -> None:
        """Remove all checkpoints: the run starts over."""
        for step in self.steps():
            self._remove(step)

    def _download(self, step: int, run: Path) -> Path:
        target = checkpoint_path(run, step)
        source = self._root / target.name
        with atomic_directory(target) as directory:
            try:
                for name in self._try(lambda: self._fs.find(str(source))):
                    local = directory / PurePosixPath(name).relative_to(source)
                    local.parent.mkdir(parents=True, exist_ok=True)
                    self._try(lambda name=name, local=local: self._fs.get_file(name, str(local)))  # type: ignore[misc]
            except Exception as error:
                raise CheckpointError(f"cannot download {self.url}/{target.name}: {_reason(error)}") from error
            verify_checkpoint(directory)
        return target

    # The thread

    def _work(self) -> None:
        while True:
            with self._guard:
                request, self._request = self._request, None
                if request is None:
                    self._thread = None
                    return
            try:
                self._synchronize(*request)
                self._failed = False
            except Exception as error:  # whatever the file system raises: the checkpoints still exist locally
                if not self._failed:
                    logger.warning(
                        "cannot upload checkpoints to %s: %s; the next save tries again", self.url, _reason(error)
                    )
                self._failed = True

    def _synchronize(self, run: Path, newest: int) -> None:
        remote = {step: self._remote_manifest(step) for step in self.steps()}
        for step, path in reversed(list_checkpoints(run).items()):
            try:
                content = (path / MANIFEST_FILE).read_bytes()
                if remote.get(step) != content:
                    self._upload(step, path)
                    remote[step] = self._manifests[step] = content
            except FileNotFoundError:
                if (path / MANIFEST_FILE).exists():
                    raise
                # It was removed while it was uploaded.
        entries = {step: Retention.entry(_parse(content)) for step, content in remote.items() if step <= newest}
        for step in self._retention.dropped(entries):
            self._remove(step)

    def _remote_manifest(self, step: int) -> bytes:
        if step not in self._manifests:
            file = self._file(step, MANIFEST_FILE)
            self._manifests[step] = self._try(lambda: bytes(self._fs.cat_file(file)))
        return self._manifests[step]

    def _upload(self, step: int, checkpoint: Path) -> None:
        self._remove_manifest(step)
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
        for path in (*files, checkpoint / MANIFEST_FILE):
            target = self._file(step, path.relative_to(checkpoint).as_posix())
            self._try(lambda path=path, target=target: self._put(path, target))  # type: ignore[misc]

    def _put(self, path: Path, target: str) -> None:
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), target)

    def _remove(self, step: int) -> None:
        self._remove_manifest(step)
        self._try(lambda: self._fs.rm(self._file(step), recursive=True))

    def _remove_manifest(self, step: int) -> None:
        self._manifests.pop(step, None)
        file = self._file(step, MANIFEST_FILE)
        if self._try(lambda: self._fs.exists(file)):
            self._try(lambda: self._fs.rm(file))

    def _file(self, step: int, name: str = "") -> str:
        return str(self._root / checkpoint_path(Path(), step).name / name)

    def _try(self, action: Callable[[], T]) -> T:
        """Run `action`, again after a while if it fails."""
        for seconds in RETRY_SECONDS:
            try:
                self._fs.invalidate_cache()
                return action()
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:
                logger.debug("%s: %s; retrying in %g s", self.url, _reason(error), seconds)
                time.sleep(seconds)
        return action()


def _parse(content: bytes) -> Manifest | None:
    try:
        return parse_manifest(content, "a remote checkpoint")
    except CheckpointError:
        return None


def _reason(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())
