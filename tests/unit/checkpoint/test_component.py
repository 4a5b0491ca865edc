"""Components: what is refused, and where each sharing pattern is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from whimbrel.base.errors import ConfigError, ParallelError
from whimbrel.checkpoint import CheckpointManager, DirectoryStateful, RNGState, SharingPattern, StateComponent
from whimbrel.checkpoint.component import locate
from whimbrel.checkpoint.serialization import pack
from whimbrel.checkpoint.writer import Snapshot, check_replication
from whimbrel.distributed import World


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key": "a/b"}, "expected a component key .* got 'a/b'"),
        ({"key": "manifest"}, "expected a component key .* got 'manifest'"),
        ({"validation_level": "some"}, "none, quick, tensor, full, got 'some'"),
        ({"validate_replication": True}, "needs REPLICATED, got GLOBAL"),
        ({"sharing_pattern": SharingPattern.PER_GROUP}, "PER_GROUP and process_group_name"),
        ({"process_group_name": "tensor"}, "PER_GROUP and process_group_name"),
    ],
)
def test_invalid_component_is_rejected(settings: dict, message: str) -> None:
    given = {"key": "x", "stateful": RNGState(), "sharing_pattern": SharingPattern.GLOBAL} | settings
    with pytest.raises(ConfigError, match=message):
        StateComponent(**given)


def test_duplicate_keys_and_unknown_groups_are_rejected(tmp_path: Path) -> None:
    one = StateComponent("rng", RNGState(), SharingPattern.PER_RANK)
    group = StateComponent("model", RNGState(), SharingPattern.PER_GROUP, process_group_name="tensr")
    manager = CheckpointManager(tmp_path, process_groups={"tensor": None, "pipe": None})
    for act in (lambda given: manager.save(1, given), manager.load, manager.reserve):
        with pytest.raises(ConfigError, match="duplicate component key 'rng'"):
            act([one, one])
        with pytest.raises(ConfigError, match="unknown process group 'tensr': did you mean 'tensor'"):
            act([one, group])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("pattern", "group", "stem"),
    [
        (SharingPattern.GLOBAL, None, "x"),
        (SharingPattern.REPLICATED, None, "x"),
        (SharingPattern.PER_RANK, None, "x.rank-00000"),
        (SharingPattern.PER_NODE, None, "x.node-00000"),
        (SharingPattern.PER_GROUP, "g", "x.group-00000"),
    ],
)
def test_single_process_writes_every_sharing_pattern(
    pattern: SharingPattern, group: str | None, stem: str, tmp_path
) -> None:
    component = StateComponent("x", torch.nn.Linear(2, 1), pattern, process_group_name=group)
    assert locate(component, World(), {"g": None}) == (stem, True)
    manager = CheckpointManager(tmp_path, process_groups={"g": None})
    path = manager.save(1, [component])
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", f"{stem}.json", f"{stem}.safetensors"]
    fresh = torch.nn.Linear(2, 1)
    manager.load([StateComponent("x", fresh, pattern, process_group_name=group)])
    assert torch.equal(fresh.weight, component.stateful.weight)


def test_directory_stateful_is_recognized_by_its_methods() -> None:
    class Plain:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class DirectoryValues(Plain):
        def save_directory(self, state, folder):
            pass

        def load_directory(self, folder):
            pass

    assert not isinstance(Plain(), DirectoryStateful)
    assert isinstance(DirectoryValues(), DirectoryStateful)


@pytest.mark.parametrize("other", [{"values": torch.ones(2), "note": "x"}, {"values": torch.zeros(2), "note": "y"}])
def test_replication_check_compares_tensors_of_any_name_and_other_values(other: dict) -> None:
    component = StateComponent(
        "x", RNGState(), SharingPattern.REPLICATED, validate_replication=True, validation_level="full"
    )

    class TwoRanks(World):
        def __init__(self) -> None:
            super().__init__()
            self.gathered: list = []

        def all_gather_object(self, value):
            self.gathered.append(value)
            return self.gathered

    ranks = TwoRanks()
    check_replication(component, Snapshot(*pack({"values": torch.zeros(2), "note": "x"})), ranks)
    with pytest.raises(ParallelError, match="differs between rank 0 and rank 1"):
        check_replication(component, Snapshot(*pack(other)), ranks)
