"""Copies of checkpoints in object storage: uploaded in the background, downloaded when the local ones are gone.

The manifest is uploaded last and removed first, so a remote checkpoint with a manifest is complete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

from whimbrel.base.errors import CheckpointError, ConfigError, MissingExtraError
from whimbrel.base.files import atomic_directory
from whimbrel.checkpoint.manifest import MANIFEST_FILE, checkpoint_path, list_checkpoints, parse_step

__all__ = ["CheckpointMirror"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 4.0, 16.0, 60.0)
"""Waiting times between attempts of a transfer that failed."""
T = TypeVar("T")


class CheckpointMirror:
    """Checkpoints of one run at `url`, such as `s3://bucket/prefix`; any file system of fsspec.

    A failed upload is logged and never stops training; the next one may succeed.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise MissingExtraError("checkpoint.mirror", "fsspec", "remote") from error
        self.url = url
        try:
            self._fs, root = fsspec.url_to_fs(url)
        except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is not installed
            raise ConfigError(f"checkpoint.mirror = '{url}': {error} (pip install 'whimbrel[remote]')") from error
        self._root = PurePosixPath(root)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._pending: list[Future[None]] = []
        self._closing = threading.Event()

    def upload(self, run: Path, checkpoint: Path) -> None:
        """Start to upload a checkpoint, and to remove remote ones that the run no longer has."""
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._thread.submit(self._upload_and_prune, run, checkpoint))

    def steps(self) -> list[int]:
        """Steps of the complete remote checkpoints, in order."""
        found = self._try(lambda: self._fs.glob(str(self._root / "*" / MANIFEST_FILE)))
        steps = (parse_step(Path(name).parent) for name in found)
        return sorted(step for step in steps if step is not None)

    def download(self, step: int, run: Path) -> Path:
        """Copy a remote checkpoint to its place in the run directory and return its path."""
        target = checkpoint_path(run, step)
        source = self._root / target.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(target) as directory:
            for name in self._try(lambda: self._fs.find(str(source))):
                local = directory / PurePosixPath(name).relative_to(source)
                local.parent.mkdir(parents=True, exist_ok=True)
                self._try(lambda name=name, local=local: self._fs.get_file(name, str(local)))  # type: ignore[misc]
        return target

    def close(self) -> None:
        """Wait for the uploads; those that still fail are not retried again."""
        self._closing.set()
        self._thread.shutdown()

    def _upload_and_prune(self, run: Path, checkpoint: Path) -> None:
        try:
            self._upload(checkpoint)
            kept = {path.name for path in list_checkpoints(run).values()} | {checkpoint.name}
            for step in self.steps():
                name = checkpoint_path(run, step).name
                if name not in kept:
                    self._remove(name)
        except Exception as error:  # whatever the file system raises: the checkpoint still exists locally
            logger.warning("cannot upload %s to %s: %s", checkpoint.name, self.url, " ".join(str(error).split()))

    def _upload(self, checkpoint: Path) -> None:
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
        for path in (*files, checkpoint / MANIFEST_FILE):
            target = str(self._root / checkpoint.name / path.relative_to(checkpoint).as_posix())
            if not path.is_file():
                raise CheckpointError(f"{checkpoint} was removed while it was uploaded")
            self._try(lambda path=path, target=target: self._put(path, target))  # type: ignore[misc]

    def _put(self, path: Path, target: str) -> None:
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), target)

    def _remove(self, name: str) -> None:
        self._try(lambda: self._fs.rm(str(self._root / name / MANIFEST_FILE)))
        self._try(lambda: self._fs.rm(str(self._root / name), recursive=True))

    def _try(self, action: Callable[[], T]) -> T:
        """Run `action`, again after a while if it fails."""
        for seconds in RETRY_SECONDS:
            try:
                self._fs.invalidate_cache()
                return action()
            except Exception as error:
                if isinstance(error, CheckpointError | FileNotFoundError | PermissionError) or self._closing.is_set():
                    raise
                logger.info("%s: %s; retrying in %g s", self.url, error, seconds)
                time.sleep(seconds)
        return action()
