"""`CheckpointManager`: saves checkpoints, optionally in the background, loads the newest valid one, prunes old ones."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from whimbrel.base.errors import CheckpointError, ConfigError, WhimbrelError, WriteError
from whimbrel.base.files import check_empty, remove_stale
from whimbrel.base.lock import DirectoryLock
from whimbrel.checkpoint.component import (
    DirectoryStateful,
    PartialStateful,
    ReshardedStateful,
    SharingPattern,
    StateComponent,
    check_components,
    check_skipped,
    locate,
)
from whimbrel.checkpoint.manifest import (
    MANIFEST_FILE,
    TEMPORARY,
    Manifest,
    Retention,
    RetentionEntry,
    checkpoint_path,
    has_all_files,
    list_checkpoints,
    missing_components,
    missing_on_this_rank,
    read_manifest,
    remove_checkpoint,
    step_directories,
    verify_checkpoint,
)
from whimbrel.checkpoint.mirror import CheckpointMirror
from whimbrel.checkpoint.serialization import pack, read_component
from whimbrel.checkpoint.sharded import read_full_state, read_saved
from whimbrel.checkpoint.writer import (
    ComponentSnapshot,
    HostBuffers,
    check_replication,
    write_checkpoint,
)
from whimbrel.distributed.layout import ParallelConfig
from whimbrel.distributed.state import LazyGather
from whimbrel.distributed.world import World, join_world

__all__ = ["CheckpointManager", "SavedCheckpoint", "rank_by_metric"]

logger = logging.getLogger(__name__)

RETRY_DELAYS = (1.0, 5.0, 15.0)
"""Seconds to wait before each retry of a failed save."""


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is complete and on disk."""

    step: int
    path: Path


class CheckpointManager:
    """The checkpoints of one run, `RUN/checkpoints/step-00000500`.

    Retains the newest `keep` checkpoints (None: all) and the top `best` by metric. With `asynchronous`, a save blocks
    the caller only for the copy to host memory. All changes to the checkpoints of a run hold `lock`; a trainer holds it
    for the entire run. With several ranks, calls are collective, and all ranks must be able to write the run directory.
    Complete checkpoints are copied to `mirror`, a URL (see `CheckpointMirror`).

    An asynchronous save has two jobs on one writer thread: write the checkpoint, then prune old ones. The next save
    waits for the first job only, because it reuses the host buffers; pruning may overlap with training and with the
    next copy. The lock of the run directory is acquired by `save` and released by the pruning job. Writer threads of
    several ranks communicate through their own process group.
    """

    def __init__(
        self,
        run: Path,
        *,
        keep: int | None = None,
        best: int | None = None,
        greater_is_better: bool = False,
        asynchronous: bool = False,
        mirror: str | None = None,
        world: World | None = None,
        process_groups: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in {"keep": keep, "best": best}.items():
            if value is not None and value < 1:
                raise ConfigError(f"expected {name} >= 1 or None, got {value}")
        self.run = Path(run)
        self.lock = DirectoryLock(self.run)
        self._retention = Retention(keep, best or 0, greater_is_better)
        self._mirror = None if mirror is None else CheckpointMirror(mirror, self._retention)
        self._world = world or _current_world()
        self._groups = dict(process_groups or {})
        self._buffers = HostBuffers()
        self._writers = self._world.with_own_group()
        self._asynchronous = asynchronous
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._pruning: Future[None] | None = None
        self._error: Exception | None = None
        self._finished: deque[SavedCheckpoint] = deque()
        self._known_steps: set[int] = set()
        """Steps that this manager saved or loaded, unlike those left over from before the run was rolled back."""
        self._damaged: set[Path] = set()
        self._temporary: set[Path] = set()
        self._warned: set[Path] = set()

    # Saving

    def reserve(self, components: Sequence[StateComponent]) -> None:
        """Allocate host memory for saves in advance.

        The size is computed from the current state; most of an optimizer's state exists only after its first step.
        """
        check_components(components, self._groups)
        for component in components:
            state = component.stateful.state_dict()
            if locate(component, self._world, self._groups).is_writer:
                self._buffers.reserve(component.key, pack(state)[0])

    def save(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        metric: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        path: Path | None = None,
        temporary: bool = False,
    ) -> Path:
        """Save the current state as the checkpoint of `step`, or at `path`. Returns its directory.

        Waits for the previous save to be written. A step that this manager already saved, and whose files are still
        there, is not written again; anything else at that path (a damaged directory, a checkpoint from before a
        rollback) is replaced. A `temporary` checkpoint is removed once a newer one exists, and `keep` does not count
        it. Raises the error of a failed synchronous save; `wait` raises the error of an asynchronous one.
        """
        check_components(components, self._groups)
        stored = _as_json({**(metadata or {}), **({TEMPORARY: True} if temporary else {})})
        self._wait_for_write()
        target = checkpoint_path(self.run, step)
        if path is not None and Path(path) != target:
            self._save(Path(path), step, components, metric, stored)
            return Path(path)
        self._acquire()
        thread_releases = False
        try:
            is_temporary = target in self._temporary
            saved = step in self._known_steps and has_all_files(target) and (temporary or not is_temporary)
            if not self._world.broadcast(saved):
                thread_releases = self._save(target, step, components, metric, stored)
        finally:
            if not thread_releases:
                self._release()
        return target

    def _save(
        self,
        target: Path,
        step: int,
        components: Sequence[StateComponent],
        metric: float | None,
        metadata: dict[str, Any],
    ) -> bool:
        """Copy the state and write it. Returns whether the writer thread will release the lock."""
        in_run = target == checkpoint_path(self.run, step)
        packed: list[tuple[dict[str, Tensor | LazyGather], Any]] = []

        def prepare() -> None:
            if not in_run:
                check_empty(target)
            packed.extend(pack(component.stateful.state_dict()) for component in components)

        self._world.run(prepare)
        snapshots = [self._snapshot(component, *state) for component, state in zip(components, packed, strict=True)]
        validated = [item for item in snapshots if item.component.validate_replication]
        if self._world.size > 1 and validated:
            self._buffers.synchronize()
            for item in validated:
                assert item.snapshot is not None
                check_replication(item.component, item.snapshot, self._world)
        write = partial(self._write, target, step, snapshots, None if metric is None else float(metric), metadata)
        self._error = None
        if not self._asynchronous:
            self._run_write(write)
            if in_run:
                self._run_prune(step, release=False)
            self.wait()
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = self._thread.submit(self._run_write, write)
        if in_run:
            self._pruning = self._thread.submit(self._run_prune, step, release=True)
        return in_run

    def _snapshot(
        self, component: StateComponent, tensors: dict[str, Tensor | LazyGather], tree: Any
    ) -> ComponentSnapshot:
        location = locate(component, self._world, self._groups)
        is_partial = any(isinstance(tensor, LazyGather) for tensor in tensors.values())
        if not (location.is_writer or component.validate_replication or is_partial):
            return ComponentSnapshot(component, location, None)
        return ComponentSnapshot(component, location, self._buffers.copy(component.key, tensors, tree))

    def _write(
        self,
        target: Path,
        step: int,
        snapshots: list[ComponentSnapshot],
        metric: float | None,
        metadata: dict[str, Any],
    ) -> None:
        """Write the checkpoint, retrying after I/O errors."""
        self._buffers.synchronize()
        snapshots = [item.gather(self._writers) for item in snapshots]
        in_run = target == checkpoint_path(self.run, step)
        if in_run and self._world.is_main:
            self._remove_stale(self.run / "checkpoints")

        def attempt() -> None:
            self._writers.run(partial(_check_free_space, target, snapshots))
            write_checkpoint(target, step, snapshots, metric, metadata, self._writers)

        for delay in RETRY_DELAYS:
            try:
                attempt()
                break
            except OSError as error:
                logger.warning("saving step %d failed: %s; retrying in %g s", step, error, delay)
                time.sleep(delay)
        else:
            attempt()
        if in_run:
            self._known_steps.add(step)
            self._damaged.discard(target)
            (self._temporary.add if TEMPORARY in metadata else self._temporary.discard)(target)
        self._finished.append(SavedCheckpoint(step, target))

    def _run_write(self, write: Callable[[], None]) -> None:
        """Run the write job; an error is logged and stored for `wait`."""
        try:
            write()
        except Exception as error:
            self._error = error
            logger.warning("could not save a checkpoint: %s", error)

    def _run_prune(self, step: int, *, release: bool) -> None:
        """Run the pruning job if `step` was saved, and then release the lock. An error is logged, but does not fail
        the save, which is complete.
        """
        try:
            if step in self._known_steps:
                self._prune(step)
                self._upload(step)
        except Exception as error:
            logger.warning("could not remove old checkpoints: %s", error)
        finally:
            if release:
                self._release()

    def _acquire(self) -> None:
        """Lock the run directory; rank 0 does it for all ranks."""
        self._world.run_on_main(self.lock.acquire)

    def _release(self) -> None:
        if self._world.is_main:
            self.lock.release()

    # Waiting

    def finished(self) -> list[SavedCheckpoint]:
        """The saves that completed since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def wait(self) -> None:
        """Wait for pending saves. Raises the error of the last save if it failed after all retries."""
        self.drain()
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Wait for pending saves and removals, without raising if one failed."""
        self._wait_for_write()
        if self._pruning is not None:
            wait_for([self._pruning])
            self._pruning = None

    def close(self) -> None:
        """Wait for pending saves and uploads and free all memory, without raising if one failed."""
        self.drain()
        if self._mirror is not None:
            self._mirror.close()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._buffers.release()

    def _wait_for_write(self) -> None:
        """Wait for the pending write: the next save reuses its host buffers."""
        if self._writing is not None:
            wait_for([self._writing])
            self._writing = None

    # Loading

    def load(
        self,
        components: Sequence[StateComponent],
        path: Path | None = None,
        *,
        skip: Collection[str] = (),
        check: Callable[[Path, Manifest], None] | None = None,
    ) -> Manifest:
        """Restore all components from the checkpoint at `path`, after verifying every file.

        Default: the valid checkpoint of the highest step. Newer ones that are damaged, or removed while being read,
        are skipped with a warning. `check` may raise to reject the checkpoint before anything is changed.
        """
        check_components(components, self._groups)
        check_skipped(skip, components)
        self.drain()
        selected = [component for component in components if component.key not in skip]
        optional = [component.key for component in components if not component.required]
        while True:
            chosen, manifest = self._world.run_on_main(partial(self._choose, path, selected, optional))
            try:
                if check is not None:
                    check(chosen, manifest)
                self._restore(chosen, manifest, selected)
                break
            except CheckpointError as error:
                vanished = not (chosen / MANIFEST_FILE).is_file()
                if path is not None or not self._world.broadcast(vanished):
                    raise
                self._damaged.add(chosen)
                logger.warning("skipped %s, which was removed while it was being loaded (%s)", chosen, error)
        if chosen.parent == checkpoint_path(self.run, 0).parent:
            self._known_steps = {step for step in self._known_steps if step < manifest.step} | {manifest.step}
        return manifest

    def load_component(self, component: StateComponent, path: Path) -> None:
        """Restore one component from a checkpoint. Unlike `load`, does not make it the run's current checkpoint."""
        self.drain()
        manifest = self._world.run_on_main(partial(_verify, path, [component], ()))
        self._world.run(partial(self._restore_component, component, path, manifest))

    def _choose(
        self, path: Path | None, selected: Sequence[StateComponent], optional: Collection[str]
    ) -> tuple[Path, Manifest]:
        """The checkpoint to load: the one at `path`, or the newest valid one."""
        if path is not None:
            return Path(path), _verify(Path(path), selected, optional)
        errors = []
        for candidate in reversed(step_directories(self.run).values()):
            try:
                return candidate, _verify(candidate, selected, optional)
            except CheckpointError as error:
                errors.append(str(error))
                self._damaged.add(candidate)
                logger.warning("skipped: %s", error)
        damaged = f" ({len(errors)} damaged; the first: {errors[0]})" if errors else ""
        raise CheckpointError(
            f"{self.run} has no valid checkpoint{damaged}: start over with --overwrite_output_dir=true"
        )

    def _restore(self, chosen: Path, manifest: Manifest, selected: Sequence[StateComponent]) -> None:
        stems = {component.key: self._saved_stem(component, manifest) for component in selected}
        sharded = {key for key, saved in manifest.components.items() if saved.pattern == SharingPattern.SHARDED.value}
        missing = missing_on_this_rank(chosen, manifest, stems)
        missing |= sharded.intersection(missing_components(chosen, manifest))
        resharded = {part.key for part in selected if self._has_other_ranks(part, manifest)}
        missing -= resharded

        def check_required() -> None:
            for component in selected:
                if component.required and component.key in missing:
                    count = len(manifest.components[component.key].ranks)
                    raise CheckpointError(
                        f"{chosen} has no '{component.key}' for this rank, since {count} ranks wrote it: resume with "
                        "the same number of processes"
                    )

        def restore() -> None:
            for component in selected:
                if component.key in missing:
                    logger.warning("%s has no '%s': continuing without its state", chosen, component.key)
                elif component.key in resharded:
                    assert isinstance(component.stateful, ReshardedStateful)
                    component.stateful.load_resharded(len(manifest.components[component.key].ranks), manifest.step)
                else:
                    self._restore_component(component, chosen, manifest)

        self._world.run(check_required)
        self._world.run(restore)

    def _restore_component(self, component: StateComponent, path: Path, manifest: Manifest) -> None:
        stem, stateful = self._saved_stem(component, manifest), component.stateful
        try:
            if isinstance(stateful, PartialStateful):
                stateful.load_parts(read_saved(path, stem))
            elif manifest.components[component.key].pattern == SharingPattern.SHARDED.value:
                stateful.load_state_dict(read_full_state(read_saved(path, stem)))
            elif isinstance(stateful, DirectoryStateful):
                stateful.load_directory(path / stem)
            else:
                stateful.load_state_dict(read_component(path, stem))
        except WhimbrelError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path}: cannot load the state of '{component.key}': {reason}") from error

    def _stem(self, component: StateComponent) -> str:
        return locate(component, self._world, self._groups).stem

    def _saved_stem(self, component: StateComponent, manifest: Manifest) -> str:
        """The files to load: of the same rank, or of rank 0 if that rank saved none or the state is now shared."""
        saved = manifest.components.get(component.key)
        if saved is None or not isinstance(component.stateful, PartialStateful):
            return self._stem(component)
        if saved.pattern != SharingPattern.PER_RANK.value:
            return component.key
        is_own = component.sharing_pattern is SharingPattern.PER_RANK and self._world.rank in saved.ranks
        return f"{component.key}.rank-{self._world.rank if is_own else 0:05d}"

    def _has_other_ranks(self, component: StateComponent, manifest: Manifest) -> bool:
        """Whether each rank saved its own state, on a different number of ranks, and the component supports that."""
        saved = manifest.components.get(component.key)
        return (
            saved is not None
            and saved.pattern == component.sharing_pattern.value == SharingPattern.PER_RANK.value
            and len(saved.ranks) != self._world.size
            and isinstance(component.stateful, ReshardedStateful)
        )

    # Queries

    def best(self) -> Path | None:
        """The checkpoint with the best metric; None if none has a metric."""
        self.drain()
        ranked = self._ranked()
        return ranked[0][1] if ranked else None

    def _ranked(self) -> list[tuple[float, Path]]:
        return rank_by_metric(self.run, greater_is_better=self._retention.greater_is_better)

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest step that is not known to be damaged."""
        intact = [path for path in list_checkpoints(self.run).values() if path not in self._damaged]
        return intact[-1] if intact else None

    def current(self) -> Path | None:
        """The newest checkpoint that this manager saved or loaded, whatever else is in the run directory.

        A temporary one only if there is no other: when those are written depends on the clock.
        """
        paths = [checkpoint_path(self.run, step) for step in sorted(self._known_steps)]
        complete = [path for path in paths if has_all_files(path)]
        permanent = [path for path in complete if path not in self._temporary]
        return next(reversed(permanent or complete), None)

    def invalidate(self, step: int) -> None:
        """Make the next save of `step` overwrite the existing checkpoint instead of skipping it."""
        self.drain()
        self._known_steps.discard(step)

    # Removing

    def clean_up(self, step: int) -> None:
        """Remove what a killed process left behind: partial writes, and old checkpoints that saving `step` would have
        pruned.
        """
        self.drain()
        self._acquire()
        try:
            if self._world.is_main:
                self._temporary.clear()
                for path in list_checkpoints(self.run).values():
                    with contextlib.suppress(CheckpointError):  # reported when it is loaded
                        if read_manifest(path).metadata.get(TEMPORARY):
                            self._temporary.add(path)
                self._remove_stale(self.run)
                self._remove_stale(self.run / "checkpoints")
            self._prune(step)
            self._upload(step)
        finally:
            self._release()

    def _prune(self, newest: int) -> None:
        """Remove checkpoints up to step `newest` that `keep` and `best` do not retain.

        Temporary ones are removed as soon as there is a newer one; with `keep` None they are the only ones removed.
        Checkpoints after `newest` are from before a rollback and are left alone. A failed removal is warned about once
        and retried after every save.
        """
        if not self._world.is_main or (self._retention.keep is None and not self._temporary):
            return
        directories = {step: path for step, path in step_directories(self.run).items() if step <= newest}
        metrics = {} if not self._retention.best else {path: metric for metric, path in self._ranked()}
        complete = {
            step: RetentionEntry(metrics.get(path), path in self._temporary)
            for step, path in list_checkpoints(self.run).items()
            if step in directories and path not in self._damaged
        }
        dropped = set(self._retention.dropped(complete))
        if self._retention.keep is not None:
            dropped |= directories.keys() - complete.keys()  # damaged, or partly removed
        for path in (directories[step] for step in sorted(dropped)):
            try:
                remove_checkpoint(path)
            except OSError as error:
                if path not in self._warned:
                    self._warned.add(path)
                    logger.warning("cannot remove the old checkpoint %s: %s", path, error.strerror)

    # The mirror

    def fetch(self, *, resume: bool, overwrite: bool) -> None:
        """Download the newest checkpoint of the mirror if the run directory has none. Call it on rank 0.

        Raises ConfigError if the mirror has a run that is neither resumed nor overwritten. One that is overwritten is
        removed.
        """
        if self._mirror is None or (step_directories(self.run) and not overwrite):
            return
        if overwrite:
            self._mirror.clear()
        elif resume:
            self._mirror.download_newest(self.run)
        elif steps := self._mirror.steps():
            raise ConfigError(
                f"{self._mirror.url} already contains a run at step {steps[-1]}: set resume_from_checkpoint=True to "
                "resume it, overwrite_output_dir=True to restart, or choose another mirror"
            )

    def _upload(self, step: int) -> None:
        if self._mirror is not None and self._world.is_main:
            self._mirror.upload(self.run, step)

    def _remove_stale(self, directory: Path) -> None:
        """Remove partial files of interrupted writes."""
        try:
            remove_stale(directory)
        except OSError as error:
            if directory not in self._warned:
                self._warned.add(directory)
                logger.warning("cannot remove partial files of an interrupted save: %s", error)


def _current_world() -> World:
    """The processes of torch.distributed, if it is initialized."""
    if not dist.is_available() or not dist.is_initialized():
        return World()
    return join_world(ParallelConfig(), "cuda" if torch.cuda.is_available() else "cpu")


def rank_by_metric(run: Path, *, greater_is_better: bool) -> list[tuple[float, Path]]:
    """The checkpoints of a run whose metric is not NaN, best first; of equal ones, the older first."""
    entries = {}
    for step, path in list_checkpoints(run).items():
        with contextlib.suppress(CheckpointError):  # reported when it is loaded
            entries[step] = Retention.entry(read_manifest(path))
    ranked = Retention(greater_is_better=greater_is_better).ranked(entries)
    return [(entries[step].metric or 0.0, checkpoint_path(run, step)) for step in ranked]


def _check_free_space(target: Path, snapshots: Sequence[ComponentSnapshot]) -> None:
    """Raise before writing a checkpoint that cannot fit: its size is nearly the size of its tensors."""
    written = (item.snapshot for item in snapshots if item.location.is_writer and item.snapshot is not None)
    needed = sum(tensor.nbytes for snapshot in written for tensor in snapshot.tensors.values())
    directory = next(path for path in (target, *target.parents) if path.exists())
    try:
        free = shutil.disk_usage(directory).free
    except OSError:  # unknown: the write itself fails if there is not enough space
        return
    if free < needed:
        raise WriteError(f"cannot write {target}: it needs {needed:,} bytes, but only {free:,} are free on the disk")


def _verify(path: Path, selected: Sequence[StateComponent], optional: Collection[str]) -> Manifest:
    manifest = verify_checkpoint(path, optional)
    for component in selected:
        if component.required and component.key not in manifest.components:
            raise CheckpointError(f"{path} was written without the component '{component.key}'")
    return manifest


def _as_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(json.dumps(dict(metadata)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected `metadata` to be JSON-serializable: {error}") from error
    return table
