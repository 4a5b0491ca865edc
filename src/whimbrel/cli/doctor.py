"""`whimbrel doctor`: check the environment: what is installed, what works, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from whimbrel.base.errors import MissingExtraError

__all__ = ["doctor"]

MIN_TORCH, MAX_TORCH = (2, 11), (2, 14)
EXTRAS = {  # extra of pyproject.toml: (package that it installs, purpose)
    "accelerate": ("accelerate", "train with Accelerate (AccelTrainer)"),
    "gguf": ("gguf", "write GGUF files for llama.cpp"),
    "hf": ("transformers", "load Whimbrel models in transformers"),
    "hub": ("datasets", "use Hub models and datasets by name"),
    "lm-eval": ("lm-eval", "run lm-eval tasks"),
    "lowbit": ("torchao", "fp8 training and QAT"),
    "plot": ("matplotlib", "plot loss curves"),
    "ray": ("ray", "prepare data on a cluster"),
    "remote": ("s3fs", "mirror checkpoints to object storage"),
    "serve": ("fastapi", "serve a model over HTTP"),
    "tensorboard": ("tensorboard", "log to TensorBoard"),
    "trackio": ("trackio", "log to Trackio"),
    "wandb": ("wandb", "log to Weights & Biases"),
}
GIB = 1024**3
NVIDIA_DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A compute device."""

    name: str
    kind: str
    memory_gib: float | None = None
    capability: str | None = None
    bf16: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something Whimbrel can do, whether it works on this machine, and what to install if not."""

    name: str
    works: bool
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of `whimbrel doctor`."""

    machine: dict[str, str]
    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    features: tuple[Feature, ...]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check the machine: what is installed, what works, and what to install for the rest."""
    report = build_report()
    if as_json:
        print(json.dumps(asdict(report), indent=2))
        return
    console = Console()
    if console.is_terminal:
        _print_table(console, report)
    else:
        for _, name, value in _rows(report):
            print(f"{name}: {value}")


def build_report() -> Report:
    """Inspect the machine. A broken torch is reported, not raised: that is when people run this command."""
    problem = _torch_problem()
    devices = tuple(_devices()) if problem is None else ()
    packages = ("whimbrel", "torch", "triton", *(package for package, _ in EXTRAS.values()))
    return Report(
        machine=_machine(problem),
        versions={package: _version(package) for package in packages},
        devices=devices,
        features=tuple(_features(problem, devices)),
    )


def _machine(problem: str | None) -> dict[str, str]:
    from whimbrel.data.prepare import available_cores

    if problem is None:
        from whimbrel.ops.compiler import find_compiler

        name = find_compiler()
        compiler = "not found" if name is None else shutil.which(name) or name
    else:
        compiler = "unknown without torch"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(available_cores()),
        "memory": f"{memory:.1f} GiB",
        "free disk": f"{shutil.disk_usage(Path.cwd()).free / GIB:.1f} GiB",
        "C++ compiler": compiler,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_problem() -> str | None:
    """Return why torch cannot be used, or None."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return str(error).splitlines()[0]
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if not MIN_TORCH <= version < MAX_TORCH:
        allowed = ">={}.{},<{}.{}".format(*MIN_TORCH, *MAX_TORCH)
        return f"torch {torch.__version__} is outside {allowed}: pip install 'torch{allowed}'"
    return None


def _devices() -> Iterator[Device]:
    """Yield the devices that torch sees, fastest first; the CPU is always last."""
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Device(
            name=properties.name,
            kind="cuda",
            memory_gib=round(properties.total_memory / GIB, 1),
            capability=f"{properties.major}.{properties.minor}",
            bf16=properties.major >= 8,
        )
    if torch.backends.mps.is_available():
        yield Device(name="Apple GPU", kind="mps")
    name = platform.processor() or platform.machine()
    yield Device(name=name, kind="cpu", capability=torch.backends.cpu.get_cpu_capability())


def _features(problem: str | None, devices: tuple[Device, ...]) -> Iterator[Feature]:
    yield Feature(name="prepare local text", works=True, note="txt, md, jsonl, ndjson, parquet; gz, zst; folders")
    if problem is None:
        best = devices[0]
        precision = "bf16" if best.bf16 else "fp32 (no bf16 before compute capability 8.0)"
        yield Feature(name="train and generate", works=True, note=f"on {best.kind}, {precision}")
        has_nvidia_driver = NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None
        if best.kind != "cuda" and has_nvidia_driver:
            yield _nvidia_feature()
        yield _compile_feature(best)
    else:
        yield Feature(name="train and generate", works=False, note=problem)
    for extra, (package, purpose) in EXTRAS.items():
        version = _version(package)
        note = f"{package} {version}" if version else MissingExtraError.install_command(extra)
        yield Feature(name=purpose, works=version is not None, note=note)


def _nvidia_feature() -> Feature:
    """Explain why torch sees no GPU although the driver is installed."""
    import torch

    if torch.version.cuda is None:
        note = f"torch {torch.__version__} is built without CUDA: install a CUDA build (pytorch.org)"
    else:
        note = f"torch is built for CUDA {torch.version.cuda} but sees no GPU: run nvidia-smi"
    return Feature(name="use the NVIDIA GPU", works=False, note=note)


def _compile_feature(best: Device) -> Feature:
    """`torch.compile` needs a C++ compiler everywhere and Triton on CUDA."""
    from whimbrel.ops.compiler import missing_compiler

    missing = [package for kind in dict.fromkeys(("cpu", best.kind)) if (package := missing_compiler(kind))]
    remedy = f"install {' and '.join(missing)}, or train with --train.compile=false (generation is slower too)"
    note = remedy if missing else f"on {best.kind}"
    return Feature(name="compile", works=not missing, note=note)


def _rows(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield the report as (section, name, value)."""
    yield from (("machine", name, value) for name, value in report.machine.items())
    yield from (("versions", name, value or "not installed") for name, value in report.versions.items())
    for device in report.devices:
        facts = [device.name]
        facts += [f"{device.memory_gib} GiB"] if device.memory_gib is not None else []
        if device.capability is not None:
            facts.append(f"{'compute capability ' * (device.kind == 'cuda')}{device.capability}")
        facts += ["bf16"] if device.bf16 else ["no bf16"]
        yield "devices", device.kind, ", ".join(facts)
    for feature in report.features:
        yield "features", feature.name, f"{'yes' if feature.works else 'no'}, {feature.note}"


def _print_table(console: Console, report: Report) -> None:
    table, current = Table(show_header=False, box=None, padding=(0, 2, 0, 0)), ""
    for section, name, value in _rows(report):
        if section != current:
            table.add_row(f"[bold]{section}[/bold]", "")
            current = section
        style = {"yes": "green", "no": "red"}.get(value.partition(",")[0], "default")
        table.add_row(f"  {escape(name)}", f"[{style}]{escape(value)}[/{style}]")
    console.print(table)
