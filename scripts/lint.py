"""Check the house rules that ruff, mypy and import-linter do not know; print one line per violation."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MIN_SINGLE_IMPORTER_LINES = 60
MAX_DEPENDENCIES = 8
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
# Written in two parts so that this file passes its own rule.
UNFINISHED = re.compile(
    "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "Not" + "ImplementedError", "assert " + "True"])
)
# Paths and package indexes that exist on one machine only.
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:home|root|work|Users|opt)/\w|--(?:extra-)?index-url|--find-links|https?://\S*/simple"
)
BINARY = {".gz", ".png", ".parquet", ".bin"}
# Imported packages that come with a declared dependency.
TRANSITIVE_DEPENDENCIES = {
    "huggingface_hub": "tokenizers",
    "jinja2": "torch",
    "pydantic": "fastapi",
    "pydantic_core": "fastapi",
    "starlette": "fastapi",
    "tiktoken_ext": "tiktoken",
    "triton": "torch, in its CUDA builds",
}


@dataclasses.dataclass(frozen=True)
class File:
    path: Path
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT / "src").with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(*folders: str) -> list[File]:
    paths = itertools.chain.from_iterable(sorted((ROOT / folder).rglob("*.py")) for folder in folders)
    return [File(path, path.read_text(encoding="utf-8")) for path in paths]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call whose callee is a plain or dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), node


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def check_length_and_names(file: File) -> Iterator[str]:
    lines = len(file.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{lines} lines, expected at most {MAX_FILE_LINES}: split it by concept"
    if VAGUE_NAMES & set(file.path.with_suffix("").parts[-2:]):
        yield "vague file name: name it for its content"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            length = (node.end_lineno or node.lineno) - first + 1
            if length >= MAX_FUNCTION_LINES:
                yield f"{node.name} has {length} lines, expected fewer than {MAX_FUNCTION_LINES}"
            if node.name.strip("_") in VAGUE_NAMES:
                yield f"vague function name {node.name}"


def check_unfinished(file: File) -> Iterator[str]:
    if found := UNFINISHED.search(file.text):
        yield f"unfinished: {found.group()}"


def check_safe_loading(file: File) -> Iterator[str]:
    """No pickle, no eval, no torch.load of anything but tensors."""
    tree = file.tree
    if unsafe := UNSAFE_MODULES & set(imported_modules(tree)):
        yield f"imports {', '.join(sorted(unsafe))}"
    for name, call in calls(tree):
        if name in {"eval", "exec", "yaml.load"}:
            yield f"line {call.lineno}: {name}"
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name == "torch.load" and keywords.get("weights_only") != "True":
            yield f"line {call.lineno}: torch.load without weights_only=True"


def check_output(file: File) -> Iterator[str]:
    """Only the command line prints or exits, and a rank whose peer failed."""
    for name, call in calls(file.tree):
        if name in {"print", "sys.exit", "exit", "quit", "os._exit"}:
            yield f"line {call.lineno}: {name} outside whimbrel.cli"


def check_public_names(file: File) -> Iterator[str]:
    """`__init__` lists its public names, and each listed name exists. (ruff sorts the lists.)"""
    lists = [
        node.value
        for node in file.tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    ]
    if not lists:
        if file.path.name == "__init__.py" and file.text.split('"""', 2)[2].strip():
            yield "missing __all__"
        return
    names = ast.literal_eval(lists[0])
    if any(part in file.path.stem for part in ("triton", "hf")):
        return  # imports a package that this machine may not have
    module = importlib.import_module(file.module)
    if missing := [name for name in names if not hasattr(module, name)]:
        yield f"__all__ lists unknown names: {', '.join(missing)}"


def check_settings(file: File) -> Iterator[str]:
    """Settings are frozen, keyword-only dataclasses with slots, and every field has a docstring."""
    from whimbrel.config import field_docs

    for node in file.tree.body:
        if not isinstance(node, ast.ClassDef) or "dataclass" not in " ".join(map(ast.unparse, node.decorator_list)):
            continue
        if not node.name.endswith(("Config", "Settings")) and file.path.name != "config.py":
            continue
        cls = getattr(importlib.import_module(file.module), node.name)
        docs = field_docs(cls)
        for field in dataclasses.fields(cls):
            if not docs.get(field.name, "").strip():
                yield f"{node.name}.{field.name} has no docstring"
            if not field.kw_only:
                yield f"{node.name}.{field.name} is not keyword-only"
        if not cls.__dataclass_params__.frozen or "__slots__" not in vars(cls):
            yield f"{node.name} is not a frozen dataclass with slots"


def check_declared_packages(file: File) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in requirements}
    imported = {name.partition(".")[0] for name in imported_modules(file.tree)}
    if undeclared := imported - declared - TRANSITIVE_DEPENDENCIES.keys() - sys.stdlib_module_names - {"whimbrel"}:
        yield f"imports undeclared packages: {', '.join(sorted(undeclared))}"


def check_small_files(files: list[File]) -> Iterator[str]:
    """A small file with one importer belongs to its importer."""
    importers = Counter(name for file in files for name in set(imported_modules(file.tree)))
    for file in files:
        lines = len(file.text.splitlines())
        is_package = file.path.name in ("__init__.py", "__main__.py")
        if lines < MIN_SINGLE_IMPORTER_LINES and importers[file.module] == 1 and not is_package:
            yield f"{file.path.relative_to(ROOT)}: {lines} lines and one importer: merge it into the importer"


def check_packages(folder: Path) -> Iterator[str]:
    """Every package has unit tests and a row in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in sorted(path.name for path in folder.iterdir() if (path / "__init__.py").exists()):
        if not list((ROOT / "tests" / "unit" / name).glob("test_*.py")):
            yield f"src/whimbrel/{name}: no tests in tests/unit/{name}"
        if f"| `{name}` |" not in page:
            yield f"docs/architecture.md: no row for `{name}`"


def check_dependencies() -> Iterator[str]:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    if len(dependencies) > MAX_DEPENDENCIES:
        yield f"pyproject.toml: {len(dependencies)} core dependencies, expected at most {MAX_DEPENDENCIES}"
    for requirement in dependencies:
        if ">=" not in requirement:
            yield f"pyproject.toml: {requirement} has no lower bound"
        if "<" in requirement and not requirement.startswith("torch"):
            yield f"pyproject.toml: {requirement} has an upper bound"
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    for pin in pins:
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", pin):
            yield f"constraints.txt: expected NAME==VERSION, got {pin!r}"
        if re.match(r"nvidia|cuda|triton", pin):
            yield f"constraints.txt: {pin} belongs to a CUDA build"
    if "torch==2.13.0" not in pins:
        yield "constraints.txt: torch==2.13.0 is not pinned"


def check_machine_paths() -> Iterator[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in (ROOT / name for name in listed.split("\0") if name):
        if path.suffix in BINARY or path == Path(__file__).resolve() or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                yield f"{path.relative_to(ROOT)}:{number}: machine-specific path: {line.strip()[:80]}"


def check_links() -> Iterator[str]:
    for page in (
        path
        for folder in (".", "docs", "tests")
        for path in (ROOT / folder).glob("**/*.md" if folder == "docs" else "*.md")
    ):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            local = target.partition("#")[0]
            if local and not local.startswith(("http:", "https:")) and not (page.parent / local).exists():
                yield f"{page.relative_to(ROOT)}: broken link {target}"


def violations() -> Iterator[str]:
    source, bench = python_files("src"), python_files("bench")
    rules = [
        (check_length_and_names, [*source, *bench, *python_files("tests")]),
        (check_unfinished, [*source, *bench, *python_files("tests")]),
        (check_safe_loading, [*source, *bench]),
        (check_output, [file for file in source if not {"cli", "failure.py"} & set(file.path.parts)]),
        (check_public_names, [file for file in source if file.path.name != "__main__.py"]),
        (check_settings, source),
        (check_declared_packages, source),
    ]
    for rule, files in rules:
        for file in files:
            yield from (f"{file.path.relative_to(ROOT)}: {problem}" for problem in rule(file))
    yield from check_small_files(source)
    yield from check_packages(ROOT / "src" / "whimbrel")
    yield from check_dependencies()
    yield from check_machine_paths()
    yield from check_links()


if __name__ == "__main__":
    found = list(violations())
    print("\n".join(found) or "House rules: no violations")
    sys.exit(bool(found))
