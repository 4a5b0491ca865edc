"""`CheckpointManager`: saves, in the background if asked to, keeps what is worth keeping, and loads what is whole."""

from __future__ import annotations

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

from whimbrel.base.errors import CheckpointError, ConfigError, WhimbrelError, WriteError
from whimbrel.base.files import remove_stale
from whimbrel.base.lock import DirectoryLock
from whimbrel.checkpoint.component import (
    DirectoryStateful,
    StateComponent,
    check_components,
    check_skipped,
)
from whimbrel.checkpoint.layout import checkpoint_path, list_checkpoints, place_of, step_folders
from whimbrel.checkpoint.manifest import MANIFEST, Manifest
from whimbrel.checkpoint.ranks import Ranks
from whimbrel.checkpoint.reading import absent_components, has_all_files, read_component, verify_checkpoint
from whimbrel.checkpoint.replication import check_replication
from whimbrel.checkpoint.retention import TEMPORARY, best_first, prune_checkpoints, temporary_checkpoints
from whimbrel.checkpoint.snapshot import HostMemory
from whimbrel.checkpoint.writing import Piece, write_checkpoint

__all__ = ["CheckpointManager", "Saved"]

logger = logging.getLogger(__name__)

RETRY_PAUSES = (1.0, 5.0, 15.0)
"""Seconds to wait before each further attempt of a save that failed."""


class Saved(NamedTuple):
    """A checkpoint that is whole and on disk."""

    step: int
    path: Path


class CheckpointManager:
    """The checkpoints of one run, `RUN/checkpoints/step-00000500`.

    Keeps the `keep` newest (None: all) and, besides them, the `best` best by metric. With `asynchronous`, a save holds
    the caller up for the copy to host memory only; several ranks save together and always synchronously. Whatever
    changes the run's checkpoints holds `lock`; a trainer holds it for its whole run.
    """

    def __init__(
        self,
        run: Path,
        *,
        keep: int | None = None,
        best: int | None = None,
        greater_is_better: bool = False,
        asynchronous: bool = False,
        ranks: Ranks | None = None,
        process_groups: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in {"keep": keep, "best": best}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} checkpoints: give 1 or more, or None")
        self.run = Path(run)
        self.lock = DirectoryLock(self.run)
        self._keep, self._best, self._greater_is_better = keep, best or 0, greater_is_better
        self._ranks = ranks or Ranks()
        self._groups = dict(process_groups or {})
        self._memory = HostMemory()
        self._background = asynchronous and self._ranks.world_size == 1
        self._writer: ThreadPoolExecutor | None = None
        self._flight: Future[None] | None = None
        self._pruning: Future[None] | None = None
        self._failure: Exception | None = None
        self._finished: deque[Saved] = deque()
        self._own: set[int] = set()
        self._damaged: set[Path] = set()
        self._temporary: set[Path] = set()
        self._reported: set[Path] = set()

    def reserve(self, components: Sequence[StateComponent]) -> None:
        """Take the host memory that saves will need now, so that none has to wait for it.

        Sizes are those of the state as it is: an optimizer has most of its own only after its first step.
        """
        check_components(components, self._groups)
        for component in components:
            self._memory.reserve(component.key, component.stateful.state_dict())

    def save(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        metric: float | None = None,
        about: Mapping[str, Any] | None = None,
        path: Path | None = None,
        temporary: bool = False,
    ) -> Path:
        """Save the state as it is now, as the checkpoint of `step` or at another `path`; say where.

        Waits for a save in flight, though not for what it removes afterwards. A step that was saved before, and still
        looks whole, is not written again; what else has its name (a damaged folder, a checkpoint of a course that the
        run has left) is replaced. A `temporary` checkpoint is removed as soon as there is a later one, and `keep` does
        not count it.
        """
        check_components(components, self._groups)
        remembered = _plain({**(about or {}), **({TEMPORARY: True} if temporary else {})})
        self._await_write()
        if path is not None:
            self._save(Path(path), step, components, metric, remembered)
            return Path(path)
        target = checkpoint_path(self.run, step)
        self._acquire()
        writer_releases = False
        try:
            saved = step in self._own and has_all_files(target) and (temporary or target not in self._temporary)
            if not self._ranks.broadcast(saved):
                writer_releases = self._save(target, step, components, metric, remembered)
        finally:
            if not writer_releases:
                self._release()
        return target

    def _save(
        self,
        target: Path,
        step: int,
        components: Sequence[StateComponent],
        metric: float | None,
        about: dict[str, Any],
    ) -> bool:
        """Copy the state and write it, now or in the background; whether the writer thread releases the lock then."""
        in_run = target == checkpoint_path(self.run, step)
        pieces: list[Piece] = []
        self._ranks.together(lambda: None if in_run else _refuse_taken(target))
        self._ranks.together(lambda: pieces.extend(self._take(component) for component in components))
        self._check_replication(pieces)
        job = partial(self._write, target, step, pieces, None if metric is None else float(metric), about)
        prune = partial(self._prune_after, step)
        self._failure = None
        if not self._background:
            self._attend(job)
            if in_run:
                self._attend(prune)
            self.wait()
            return False
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._flight = self._writer.submit(self._attend, job)
        if in_run:
            self._pruning = self._writer.submit(self._attend_and_release, prune)
        return in_run

    def _acquire(self) -> None:
        """Take the lock of the run directory, on the first rank for all."""
        self._ranks.together(lambda: self.lock.acquire() if self._ranks.first else None)

    def _release(self) -> None:
        if self._ranks.first:
            self.lock.release()

    def finished(self) -> list[Saved]:
        """The saves that became whole and durable since the last call."""
        if not self._finished:
            return []
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def wait(self) -> None:
        """Return when nothing is in flight; raise what the last save failed with, if it did for good."""
        self._settle()
        if self._failure is not None:
            raise self._failure

    def load(
        self,
        components: Sequence[StateComponent],
        path: Path | None = None,
        *,
        skip: Collection[str] = (),
        check: Callable[[Path, Manifest], None] | None = None,
    ) -> Manifest:
        """Put every component into the state of a checkpoint, of which every file has been verified before.

        Without a path: the whole one of the highest step; those past it that are damaged, or that vanish while they
        are read, are warned about. `check` may refuse the checkpoint before anything is changed.
        """
        check_components(components, self._groups)
        check_skipped(skip, components)
        self._settle()
        wanted = [component for component in components if component.key not in skip]
        optional = [component.key for component in components if not component.required]
        while True:
            choose = partial(self._choose, path, wanted, optional)
            chosen, manifest = self._ranks.together(lambda: choose() if self._ranks.first else None)[0]  # type: ignore[misc] # noqa: B023
            try:
                if check is not None:
                    check(chosen, manifest)
                self._take_over(chosen, manifest, wanted)
                break
            except CheckpointError as error:
                vanished = not (chosen / MANIFEST).is_file()
                if path is not None or not self._ranks.broadcast(vanished):
                    raise
                self._damaged.add(chosen)
                logger.warning("passed over: %s was removed while it was loaded (%s)", chosen, error)
        if chosen.parent == checkpoint_path(self.run, 0).parent:
            self._own = {step for step in self._own if step < manifest.step} | {manifest.step}
        return manifest

    def load_component(self, component: StateComponent, path: Path) -> None:
        """Put one component into the state of a checkpoint, without making that the course of the run."""
        self._settle()
        _verify(path, [component], ())
        _load(component, path, place_of(component, self._ranks, self._groups).stem)

    def best(self) -> Path | None:
        """The checkpoint with the best metric; None where none has one."""
        self._settle()
        found = best_first(self.run, greater_is_better=self._greater_is_better)
        return found[0][1] if found else None

    def settle(self) -> None:
        """Wait for saves in progress without raising if one failed; use `wait` for that."""
        self._settle()

    def _take_over(self, chosen: Path, manifest: Manifest, wanted: Sequence[StateComponent]) -> None:
        """Put the components into the state of the checkpoint."""
        stems = {component.key: place_of(component, self._ranks, self._groups).stem for component in wanted}
        absent = absent_components(chosen, manifest, stems)
        self._ranks.together(partial(_refuse_absent, chosen, manifest, wanted, absent))

        def take_over() -> None:
            for component in wanted:
                if component.key in absent:
                    logger.warning("%s holds no '%s': going on without its state", chosen, component.key)
                else:
                    _load(component, chosen, stems[component.key])

        self._ranks.together(take_over)

    def tidy(self, step: int) -> None:
        """Clear away what a killed process left: unfinished writes, and what its save of `step` was to remove."""
        self._settle()
        self._acquire()
        try:
            if self._ranks.first:
                self._temporary = temporary_checkpoints(self.run)
                self._sweep(self.run)
                self._sweep(self.run / "checkpoints")
            self._prune(step)
        finally:
            self._release()

    def newest(self) -> Path | None:
        """The checkpoint of the highest step, but for those that are known to be damaged."""
        found = [path for path in list_checkpoints(self.run).values() if path not in self._damaged]
        return found[-1] if found else None

    def current(self) -> Path | None:
        """The newest checkpoint that this manager wrote or loaded: of this course, whatever else lies in the run.

        A temporary one only where there is no other: when those are written depends on the clock.
        """
        own = [checkpoint_path(self.run, step) for step in sorted(self._own)]
        whole = [path for path in own if has_all_files(path)]
        lasting = [path for path in whole if path not in self._temporary]
        return next(reversed(lasting or whole), None)

    def forget(self, step: int) -> None:
        """Have the next save of `step` write it again, though it was saved before."""
        self._settle()
        self._own.discard(step)

    def close(self) -> None:
        """Let the save in flight end and give all memory back. Raises nothing: `wait` is how to learn of a failure."""
        self._settle()
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        self._memory.release()

    def _take(self, component: StateComponent) -> Piece:
        """This rank's piece as it is now."""
        place = place_of(component, self._ranks, self._groups)
        state = component.stateful.state_dict()
        needed = place.writes or component.validate_replication
        return Piece(component, place, self._memory.copy(component.key, state) if needed else None)

    def _check_replication(self, pieces: Sequence[Piece]) -> None:
        if self._ranks.world_size == 1:
            return
        self._memory.arrived()
        for piece in pieces:
            if piece.component.validate_replication and piece.snapshot is not None:
                check_replication(piece.component, piece.snapshot, self._ranks)

    def _write(self, target: Path, step: int, pieces: list[Piece], metric: float | None, about: dict[str, Any]) -> None:
        """Write until it works, or has failed too often."""
        self._memory.arrived()
        in_run = target == checkpoint_path(self.run, step)
        if in_run and self._ranks.first:
            self._sweep(self.run / "checkpoints")

        def attempt() -> None:
            self._ranks.together(partial(_check_free_space, target, pieces))
            write_checkpoint(target, step, pieces, metric, about, self._ranks)

        for pause in RETRY_PAUSES:
            try:
                attempt()
                break
            except OSError as error:
                logger.warning("the save of step %d failed: %s; trying again in %g s", step, error, pause)
                time.sleep(pause)
        else:
            attempt()
        if in_run:
            self._own.add(step)
            self._damaged.discard(target)
            (self._temporary.add if TEMPORARY in about else self._temporary.discard)(target)
        self._finished.append(Saved(step, target))

    def _prune_after(self, step: int) -> None:
        """Prune, if the save of `step` went well."""
        if step in self._own:
            self._prune(step)

    def _prune(self, newest: int) -> None:
        """Remove what need not be kept beside the checkpoint of step `newest`."""
        if self._ranks.first and (self._keep is not None or self._temporary):
            prune_checkpoints(
                self.run,
                newest,
                keep=self._keep,
                best=self._best,
                greater_is_better=self._greater_is_better,
                damaged=self._damaged,
                temporary=self._temporary,
                reported=self._reported,
            )

    def _sweep(self, folder: Path) -> None:
        """Remove what interrupted writes left."""
        try:
            remove_stale(folder)
        except OSError as error:
            if folder not in self._reported:
                self._reported.add(folder)
                logger.warning("cannot remove what an interrupted write left: %s", error)

    def _await_write(self) -> None:
        """Wait for the save in flight: its memory is needed for the next."""
        if self._flight is not None:
            wait_for([self._flight])
            self._flight = None

    def _settle(self) -> None:
        """Wait until nothing is written or removed any more."""
        self._await_write()
        if self._pruning is not None:
            wait_for([self._pruning])
            self._pruning = None

    def _attend(self, job: Callable[[], None]) -> None:
        """Do a save; a failure is kept for `wait`, and nothing else comes of it."""
        try:
            job()
        except Exception as error:
            self._failure = error
            logger.warning("gave up on a checkpoint: %s", error)

    def _attend_and_release(self, job: Callable[[], None]) -> None:
        try:
            self._attend(job)
        finally:
            self._release()

    def _choose(
        self, path: Path | None, wanted: Sequence[StateComponent], optional: Collection[str]
    ) -> tuple[Path, Manifest]:
        """The checkpoint to load: the one named, or the newest that is whole."""
        if path is not None:
            return Path(path), _verify(Path(path), wanted, optional)
        faults = []
        for candidate in reversed(step_folders(self.run).values()):
            try:
                return candidate, _verify(candidate, wanted, optional)
            except CheckpointError as error:
                faults.append(str(error))
                self._damaged.add(candidate)
                logger.warning("passed over: %s", error)
        told = f": {len(faults)} are damaged, first {faults[0]}" if faults else ""
        raise CheckpointError(f"{self.run} has no whole checkpoint{told}; begin anew with overwrite_output_dir=true")


def _check_free_space(target: Path, pieces: Sequence[Piece]) -> None:
    """Raise before writing a checkpoint that cannot fit: its size is nearly that of its tensors."""
    written = (piece.snapshot for piece in pieces if piece.place.writes and piece.snapshot is not None)
    needed = sum(tensor.nbytes for snapshot in written for tensor in snapshot.tensors.values())
    folder = next(path for path in (target, *target.parents) if path.exists())
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # unknown: the write itself fails if there is not enough space
        return
    if free < needed:
        raise WriteError(f"cannot write {target}: it needs {needed:,} bytes, but only {free:,} are free on the disk")


def _refuse_taken(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WriteError(f"{target} exists and is not empty: name another directory or remove it first")


def _verify(path: Path, wanted: Sequence[StateComponent], optional: Collection[str]) -> Manifest:
    manifest = verify_checkpoint(path, optional)
    for component in wanted:
        if component.required and component.key not in manifest.components:
            raise CheckpointError(f"{path} was written without the component '{component.key}'")
    return manifest


def _refuse_absent(path: Path, manifest: Manifest, wanted: Sequence[StateComponent], absent: Collection[str]) -> None:
    """Every rank must find its piece of what is required."""
    for component in wanted:
        if component.required and component.key in absent:
            count = len(manifest.components[component.key].ranks)
            raise CheckpointError(f"{path} holds no '{component.key}' for this rank: {count} ranks wrote it")


def _load(component: StateComponent, path: Path, stem: str) -> None:
    try:
        if isinstance(component.stateful, DirectoryStateful):
            component.stateful.load_directory(path / stem)
        else:
            component.stateful.load_state_dict(read_component(path, stem))
    except WhimbrelError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise CheckpointError(f"{path}: the state of '{component.key}' does not fit: {words}") from error


def _plain(about: Mapping[str, Any]) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(json.dumps(dict(about)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"what a checkpoint is to remember about its run must be plain JSON: {error}") from error
    return table
