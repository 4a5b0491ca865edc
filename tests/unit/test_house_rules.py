"""The rules of the house, held by tests: sizes, names, public lists, documented settings, safe loading, links."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from whimbrel.config import field_docs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "whimbrel"
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())
CODE = [*MODULES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "corpora").glob("*.md"))]

BROUGHT_BY = {
    "jinja2": "torch",
    "pydantic": "fastapi",
    "pydantic_core": "fastapi",
    "starlette": "fastapi",
    "tiktoken_ext": "tiktoken",
    "triton": "torch, in its CUDA builds",
}

MAX_LINES = 800
MOST_FUNCTION_LINES = 80
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
UNFINISHED = re.compile(
    "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "Not" + "ImplementedError", "assert " + "True"])
)


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in paths]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call whose callee is a plain or dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), node


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tracked_files() -> list[Path]:
    """The files of the repository; in an unpacked archive, which has no git, the project's own folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [path for folder in ("src", "tests", "docs", "configs", "scripts") for path in (ROOT / folder).rglob("*.*")]


@pytest.mark.parametrize("path", named(CODE))
def test_a_file_is_short_and_named_for_what_it_is(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, "split it by concept"
    assert not VAGUE_NAMES & set(path.with_suffix("").relative_to(ROOT).parts), "name it for what it is"


@pytest.mark.parametrize("path", named(CODE))
def test_a_function_is_short_and_named_for_what_it_is(path: Path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or node.lineno) - first + 1
            assert lines < MOST_FUNCTION_LINES, f"{node.name} has {lines} lines"
            assert node.name.strip("_") not in VAGUE_NAMES


@pytest.mark.parametrize("path", named([*MODULES, *sorted((ROOT / "bench").rglob("*.py"))]))
def test_no_unsafe_loading(path: Path):
    """No pickle, no eval, no torch.load of anything but tensors."""
    tree = parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not modules & {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
    for name, call in calls(tree):
        assert name not in {"eval", "exec", "yaml.load"}, f"line {call.lineno}"
        if name == "torch.load":
            safe = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}.get("weights_only")
            assert safe == "True", f"line {call.lineno}: torch.load without weights_only=True"


@pytest.mark.parametrize("path", named([path for path in MODULES if "cli" not in path.parts]))
def test_only_the_command_line_prints_or_exits(path: Path):
    for name, call in calls(parse(path)):
        assert name not in {"print", "sys.exit", "exit", "quit", "os._exit"}, f"{name} in line {call.lineno}"


@pytest.mark.parametrize("path", named(CODE))
def test_nothing_is_left_unfinished(path: Path):
    found = UNFINISHED.search(path.read_text(encoding="utf-8"))
    assert found is None, f"{found and found.group()}: finish it"


@pytest.mark.parametrize("path", named([path for path in MODULES if not path.name.startswith("__main__")]))
def test_public_names_are_listed_sorted_and_exist(path: Path):
    """`__init__` must list its names; any other module that lists them lists them sorted, and each exists."""
    lists = [
        node.value
        for node in parse(path).body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    ]
    if not lists:
        assert path.name != "__init__.py" or not path.read_text().split('"""', 2)[2].strip(), (
            "a public module needs __all__"
        )
        return
    names = ast.literal_eval(lists[0])
    assert names == sorted(set(names)), "plain sorted() order"
    if any(required in path.stem for required in ("triton", "hf")):
        return  # imports a package that this machine may not have
    module = importlib.import_module(module_name(path))
    assert [name for name in names if not hasattr(module, name)] == []


def settings_classes() -> Iterator:
    """The dataclasses that hold settings: named *Config or *Settings, or living in the config.py of a room."""
    for path in MODULES:
        for node in parse(path).body:
            is_dataclass = isinstance(node, ast.ClassDef) and "dataclass" in " ".join(
                map(ast.unparse, node.decorator_list)
            )
            if is_dataclass and (node.name.endswith(("Config", "Settings")) or path.name == "config.py"):
                yield pytest.param(module_name(path), node.name, id=node.name)


@pytest.mark.parametrize(("module", "name"), list(settings_classes()))
def test_settings_are_frozen_and_every_one_is_documented(module: str, name: str):
    cls = getattr(importlib.import_module(module), name)
    docs = field_docs(cls)
    assert [field.name for field in dataclasses.fields(cls) if not docs.get(field.name, "").strip()] == []
    assert [field.name for field in dataclasses.fields(cls) if not field.kw_only] == []
    assert cls.__dataclass_params__.frozen
    assert "__slots__" in vars(cls)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_tests(room: str):
    assert list((ROOT / "tests" / "unit" / room).glob("test_*.py"))


def test_the_rooms_page_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in ROOMS if f"| `{room}` |" not in page] == []


def test_at_most_eight_core_dependencies_with_floors():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert len(dependencies) <= 8
    assert [requirement for requirement in dependencies if ">=" not in requirement] == []
    assert [requirement for requirement in dependencies if "<" in requirement] == ["torch>=2.11,<2.14"]


@pytest.mark.parametrize("path", named(MODULES))
def test_only_declared_packages_are_imported(path: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {re.match(r"[\w-]+", requirement).group().replace("-", "_") for requirement in requirements}
    imported = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(str(node.module).partition(".")[0])
    assert imported <= declared | BROUGHT_BY.keys() | sys.stdlib_module_names | {"whimbrel"}


def test_the_pins_are_plain_and_bring_no_cuda():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", pin)] == []
    assert [pin for pin in pins if re.match(r"nvidia|cuda|triton", pin)] == []


def test_import_whimbrel_is_cheap():
    heavy = "{'torch', 'numpy', 'pyarrow', 'transformers', 'tokenizers'}"
    code = f"import sys, whimbrel; print(*sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.split() == []


def test_no_paths_of_one_machine_in_the_repository():
    """A home folder, a workspace, or an address from which packages are fetched belongs to one machine."""
    forbidden = re.compile(
        r"(?<![\w.])/(?:home|root|work|Users|opt)/\w|--(?:extra-)?index-url|--find-links|https?://\S*/simple"
    )
    found = []
    for path in tracked_files():
        if path.suffix in {".gz", ".png", ".parquet", ".bin"} or path == Path(__file__):
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [
            f"{path.relative_to(ROOT)}:{n}: {line[:80]}" for n, line in enumerate(lines, 1) if forbidden.search(line)
        ]
    assert found == []


@pytest.mark.parametrize("page", named(PAGES))
def test_every_link_of_a_page_resolves(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and not target.startswith(("http:", "https:"))]
    assert [target for target in local if not (page.parent / target).exists()] == []
