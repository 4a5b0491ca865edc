"""Errors, atomic files, directory locks, progress and lazy imports. Imports neither torch nor any package of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose names are imported on first use.

    `exports` maps submodules to the names that they export; the submodules themselves are attributes, too.
    """
    modules = {name: module for module, names in exports.items() for name in names}

    def get_attribute(name: str) -> Any:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        if name in exports:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_attributes() -> list[str]:
        return sorted(import_module(package).__all__)

    return get_attribute, list_attributes
