"""Randomly damaged checkpoints: damage is detected before anything is loaded, and the previous checkpoint is used."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent, checkpoint_path

STEPS = (10, 20, 30)
OPTIONAL = "optimizer"


class Spy:
    """A stateful object that records what it loads."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.loaded_states: list[float] = []

    def state_dict(self) -> Any:
        return {"w": torch.full((40,), self.value), "value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.loaded_states.append(state["value"])


class DirectoryValues(Spy):
    def save_directory(self, state: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text('{"the same": "at every step"}')
        (folder / "weights.bin").write_bytes(state["w"].numpy().tobytes())

    def load_directory(self, folder: Path) -> None:
        self.loaded_states.append(
            float(torch.frombuffer(bytearray((folder / "weights.bin").read_bytes()), dtype=torch.float32)[0])
        )


def make_components(value: float) -> list[StateComponent]:
    return [
        StateComponent("model", DirectoryValues(value), SharingPattern.GLOBAL),
        StateComponent(OPTIONAL, Spy(value), SharingPattern.GLOBAL, required=False),
        StateComponent("trainer", Spy(value), SharingPattern.GLOBAL),
        StateComponent("rng", Spy(value), SharingPattern.PER_RANK),
    ]


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def edit_file(edit: Callable[[bytearray, random.Random], bytearray | bytes]) -> Callable[[Path, random.Random], None]:
    def damage(run: Path, rng: random.Random) -> None:
        file = _any_file(_any_step(run, rng), rng)
        file.write_bytes(edit(bytearray(file.read_bytes()), rng))

    return damage


def _any_step(run: Path, rng: random.Random) -> Path:
    return checkpoint_path(run, rng.choice((*STEPS, *STEPS[-1:] * 3)))  # the newest more often


def _any_file(path: Path, rng: random.Random) -> Path:
    return rng.choice([file for file in sorted(path.rglob("*")) if file.is_file()])


def flip(content: bytearray, rng: random.Random) -> bytearray:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def clear(content: bytearray, rng: random.Random) -> bytearray:
    start = rng.randrange(len(content))
    content[start : start + rng.randint(1, 64)] = bytes(len(content[start : start + 64]))
    return content


def swap(run: Path, rng: random.Random) -> None:
    one, other = (checkpoint_path(run, step) for step in rng.sample(STEPS, 2))
    name = _any_file(one, rng).relative_to(one)
    content = (one / name).read_bytes()
    (one / name).write_bytes((other / name).read_bytes())
    (other / name).write_bytes(content)


def swap_manifests(run: Path, rng: random.Random) -> None:
    one, other = (checkpoint_path(run, step) / "manifest.json" for step in rng.sample(STEPS, 2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def rename(run: Path, rng: random.Random) -> None:
    _any_step(run, rng).rename(checkpoint_path(run, rng.choice((5, 15, 25, 31, 99_999_999))))


def exchange(run: Path, rng: random.Random) -> None:
    one, other = (checkpoint_path(run, step) for step in rng.sample(STEPS, 2))
    aside = one.rename(one.with_name("aside"))
    other.rename(one)
    aside.rename(other)


def copy_as_newer(run: Path, rng: random.Random) -> None:
    shutil.copytree(_any_step(run, rng), checkpoint_path(run, 40))


DAMAGE: dict[str, Callable[[Path, random.Random], Any]] = {
    "truncate": edit_file(lambda content, rng: content[: rng.randrange(len(content))]),
    "flip": edit_file(flip),
    "append": edit_file(lambda content, rng: content + rng.randbytes(rng.randint(1, 9))),
    "clear": edit_file(clear),
    "remove": lambda run, rng: _any_file(_any_step(run, rng), rng).unlink(),
    "swap": swap,
    "swap manifests": swap_manifests,
    "rename": rename,
    "exchange": exchange,
    "copy as newer": copy_as_newer,
}


def expected(run: Path, pristine: dict[str, dict[str, bytes]]) -> tuple[int, bool]:
    """The newest step whose directory is unchanged, and whether its optional component is complete."""
    for path in sorted((run / "checkpoints").iterdir(), reverse=True):
        was, now = pristine.get(path.name), contents(path)
        lost = set(was or ()) - set(now)
        only_optional = all(name.startswith(f"{OPTIONAL}.") for name in lost)
        if (
            was is not None
            and only_optional
            and now == {name: content for name, content in was.items() if name not in lost}
        ):
            return int(path.name.removeprefix("step-")), not lost
    raise LookupError("no valid checkpoint is left")


@pytest.mark.timeout(1800)
def test_damaged_checkpoint_is_never_loaded(
    tmp_path: Path, corruptions: int, caplog: pytest.LogCaptureFixture, record_property
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    for step in STEPS:
        CheckpointManager(base).save(step, make_components(float(step)))
    pristine = {path.name: contents(path) for path in (base / "checkpoints").iterdir()}
    seen = dict.fromkeys(DAMAGE, 0)
    for number in range(corruptions):
        rng = random.Random(number)
        how = list(DAMAGE)[number % len(DAMAGE)]
        shutil.copytree(base, run)
        DAMAGE[how](run, rng)
        step, with_optional = expected(run, pristine)
        _check(run, step, with_optional, caplog, f"{how}, seed {number}")
        seen[how] += step != STEPS[-1] or not with_optional
        shutil.rmtree(run)
    record_property("faults", f"corruption: {corruptions} points; the newest was lost to {sum(seen.values())}")
    assert [how for how, count in seen.items() if count == 0 and how != "copy as newer"] == []


def _check(run: Path, step: int, with_optional: bool, caplog: pytest.LogCaptureFixture, what: str) -> None:
    caplog.clear()
    components = make_components(0.0)
    with caplog.at_level(logging.WARNING):
        loaded = CheckpointManager(run).load(components)
    loaded_states = [component.stateful.loaded_states for component in components]
    assert loaded.step == step, what
    assert loaded_states == [[step], [step] if with_optional else [], [step], [step]], what
    newer = [path for path in (run / "checkpoints").iterdir() if int(path.name.removeprefix("step-")) > step]
    assert len(caplog.records) == len(newer) + (not with_optional), what
    for path in newer:
        assert str(path) in caplog.text, what
        untouched = make_components(0.0)
        with pytest.raises(CheckpointError) as caught:
            CheckpointManager(run).load(untouched, path)
        assert "\n" not in str(caught.value), what
        assert [component.stateful.loaded_states for component in untouched] == [[], [], [], []], what
