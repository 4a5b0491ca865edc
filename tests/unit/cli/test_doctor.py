"""`whimbrel doctor`: results match the machine, and missing packages come with install commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from whimbrel.cli import doctor as module
from whimbrel.cli.doctor import EXTRAS, MAX_TORCH, MIN_TORCH, Report, build_report, doctor


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """Pretend that a package is not installed."""

    def hide(package: str) -> None:
        real = metadata.version

        def version(name: str) -> str:
            if name == package:
                raise metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(metadata, "version", version)

    return hide


def feature(report: Report, name: str):
    (found,) = [feature for feature in report.features if feature.name == name]
    return found


def test_devices_match_torch():
    report = build_report()
    assert [device.kind for device in report.devices].count("cuda") == torch.cuda.device_count()
    assert report.devices[-1].kind == "cpu"
    assert feature(report, "train and generate").works
    assert report.devices[0].kind in feature(report, "train and generate").note


def test_json_contains_the_complete_report(capsys: pytest.CaptureFixture[str]):
    doctor(as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"machine", "versions", "devices", "features"}
    assert printed["versions"]["torch"] == metadata.version("torch")
    assert printed["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_output_is_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]):
    doctor()
    out = capsys.readouterr().out
    assert f"torch: {metadata.version('torch')}\n" in out
    assert "\x1b[" not in out
    assert all(": " in line for line in out.splitlines())


def test_output_is_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    doctor()
    out = capsys.readouterr().out
    assert "\x1b[" in out
    assert "features" in out


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_missing_extra_names_its_install_command(extra: str, without):
    package, purpose = EXTRAS[extra]
    without(package)
    report = build_report()
    assert report.versions[package] is None
    assert not feature(report, purpose).works
    assert f"pip install 'whimbrel[{extra}]'" in feature(report, purpose).note


@inductor.patch({"cpp.cxx": "no-such-compiler"})
def test_missing_compiler_names_the_remedy():
    report = build_report()
    assert report.machine["C++ compiler"] == "not found"
    assert not feature(report, "compile").works
    assert "C++ compiler" in feature(report, "compile").note


def test_compiler_is_the_one_torch_finds(tmp_path: Path):
    compiler = tmp_path / "my-cxx"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    with inductor.patch({"cpp.cxx": str(compiler)}):
        report = build_report()
    assert report.machine["C++ compiler"] == str(compiler)
    assert feature(report, "compile").works or report.devices[0].kind == "cuda"


def test_broken_torch_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    report = build_report()
    assert report.devices == ()
    assert report.machine["C++ compiler"].startswith("unknown")
    assert not feature(report, "train and generate").works
    assert "torch" in feature(report, "train and generate").note
    assert feature(report, "prepare local text").works


def test_unsupported_torch_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    note = feature(build_report(), "train and generate").note
    assert "2.9.1+cu128" in note
    assert ">=2.11,<2.14" in note


def test_old_gpu_trains_without_bf16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        module, "_devices", lambda: [module.Device(name="old", kind="cuda", capability="7.5", bf16=False)]
    )
    assert "no bf16" in feature(build_report(), "train and generate").note


@pytest.mark.parametrize(
    ("cuda", "advice"), [(None, "install a CUDA build"), ("13.0", "built for CUDA 13.0 but sees no GPU")]
)
@pytest.mark.parametrize("trace", ["driver", "nvidia-smi"])
def test_gpu_invisible_to_torch_is_explained(cuda, advice, trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(module, "NVIDIA_DRIVER", tmp_path if trace == "driver" else tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == trace else None)
    found = feature(build_report(), "use the NVIDIA GPU")
    assert not found.works
    assert advice in found.note


def test_no_gpu_advice_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(module, "NVIDIA_DRIVER", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "use the NVIDIA GPU" not in [feature.name for feature in build_report().features]


def test_extras_and_torch_range_match_pyproject(root: Path):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert "torch>={}.{},<{}.{}".format(*MIN_TORCH, *MAX_TORCH) in project["dependencies"]
    offered = project["optional-dependencies"]
    assert set(EXTRAS) == set(offered) - {"dev", "docs"}
    for extra, (package, _) in EXTRAS.items():
        assert any(requirement.startswith(package) for requirement in offered[extra])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ({"GOMP_SPINCOUNT": "1000"}, "None"),
        ({"KMP_BLOCKTIME": "200"}, "None"),
    ],
)
def test_openmp_wait_policy_defaults_to_passive(given: dict[str, str], expected: str) -> None:
    code = """
import os, sys
from whimbrel.cli.main import main
try:
    main(["--version"])
except SystemExit:
    print(os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)
"""
    ignored = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    environment = {name: value for name, value in os.environ.items() if name not in ignored} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{expected} False"
