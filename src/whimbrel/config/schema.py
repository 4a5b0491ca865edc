"""Strict conversion between tables (nested dicts, as TOML produces them) and dataclasses.

Field types: bool, int, float, str, Path, Literal, tuple[X, ...], unions of those with None, nested dataclasses, and
tuples of dataclasses (arrays of tables in TOML). An int is accepted for a float; nothing else is converted.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from whimbrel.base.errors import ConfigError
from whimbrel.config.toml import Override

__all__ = [
    "Setting",
    "build",
    "check_choices",
    "check_known",
    "check_unused",
    "convert",
    "did_you_mean",
    "did_you_mean_path",
    "field_docs",
    "list_settings",
    "not_one_of",
    "resolve_none",
    "suggest",
    "to_table",
]

MAX_NAMES = 5
"""Maximum number of directories that an error message lists."""

T = TypeVar("T")
Table = Mapping[str, Any]


def build(cls: type[T], table: Table, where: str = "") -> T:
    """Create a `cls` from `table`. `where` is the dotted name of the table, used in error messages."""
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls)) if field.init}
    hints = typing.get_type_hints(cls)
    check_known(where, table, fields, _fields_of_sections(hints))
    table = resolve_none(cls, table)
    values = {name: convert(hints[name], value, _join(where, name)) for name, value in table.items()}
    required = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    missing = [_join(where, name) for name in required if name not in values]
    if missing:
        raise ConfigError(f"missing setting {', '.join(missing)}: add it to the file or pass --{missing[0]}=VALUE")
    return cls(**values)


def to_table(value: object) -> dict[str, Any]:
    """The inverse of `build`: nested dataclasses become nested dicts.

    TOML has no null. A field that is None is omitted if that is its default, and "none" otherwise.
    """
    table: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, value)):
        item = getattr(value, field.name)
        if item is not None:
            table[field.name] = _to_value(item)
        elif field.default is not None:
            table[field.name] = "none"
    return table


def resolve_none(cls: type, table: Table) -> dict[str, Any]:
    """Replace the value "none" by None in a table for `cls`.

    `--name=none` restores the default of a field that cannot be None. A field with the choice "none" keeps it, and in
    a file "none" is a string where a string is allowed.
    """
    hints = typing.get_type_hints(cls)
    resolved: dict[str, Any] = {}
    for name, value in table.items():
        hint = hints.get(name)
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if value != "none" or any("none" in get_args(kind) for kind in kinds if get_origin(kind) is Literal):
            resolved[name] = value
        elif type(None) in kinds and (isinstance(value, Override) or not {str, Path} & {*kinds}):
            resolved[name] = None
        elif not isinstance(value, Override):
            resolved[name] = value
    return resolved


def _to_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_table(value)
    if isinstance(value, tuple):
        return [_to_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def check_known(
    section: str, names: Iterable[str], known: Collection[str], nested: Mapping[str, list[str]] | None = None
) -> None:
    """Raise for keys that are not in `known`; `nested` has the full names of settings by their last part."""
    for name in names:
        if name not in known:
            similar = (nested or {}).get(name) or [close for close in [suggest(name, known)] if close is not None]
            full_names = [f"'{_join(section, each)}'" for each in similar]
            hint = f": did you mean {' or '.join(full_names)}?" if full_names else did_you_mean(name, known)
            raise ConfigError(f"unknown setting '{_join(section, name)}'{hint}")


def _fields_of_sections(hints: Mapping[str, Any]) -> dict[str, list[str]]:
    """`section.name` of the fields of nested dataclasses, by name."""
    names: dict[str, list[str]] = {}
    for section, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                names.setdefault(field.name, []).append(f"{section}.{field.name}")
    return names


def check_unused(section: str, settings: object, names: Iterable[str], needs: str) -> None:
    """Raise for settings that differ from their defaults but have no effect, because they need `needs`."""
    defaults = {field.name: field.default for field in dataclasses.fields(cast(Any, settings))}
    for name in names:
        value = getattr(settings, name)
        if value != defaults[name]:
            raise ConfigError(f"{_join(section, name)} = {value!r} needs {needs}: set that, or remove {name}")


def check_choices(section: str, settings: object) -> None:
    """Raise for values of `Literal` fields that are not among their choices, as `build` does for tables."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(cast(Any, settings)):
        kind = hints[field.name]
        if any(get_origin(part) is Literal for part in (kind, *get_args(kind))):
            convert(kind, getattr(settings, field.name), _join(section, field.name))


def suggest(name: str, known: Iterable[str], similarity: float = 0.5) -> str | None:
    """The known name closest to a misspelled one, or None if the similarity (0 to 1) of all of them is lower."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=similarity)
    return close[0] if close else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of an error message about an unknown name: the closest known name, or all of them."""
    close = suggest(name, known)
    return f" (choose from: {', '.join(sorted(known))})" if close is None else f": did you mean '{close}'?"


def did_you_mean_path(path: Path, contents: Collection[str]) -> str:
    """The end of an error message about a missing directory that contains one of `contents`.

    Names the closest directory next to it, or all of them; empty if there are none.
    """
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    names = sorted(each.name for each in siblings if any((each / name).exists() for name in contents))
    close = suggest(path.name, names)
    if close is not None:
        return f": did you mean {path.parent / close}?"
    if not names or path.parent == Path():
        return ""
    return f" ({path.parent} has {', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''})"


def not_one_of(setting: str, value: object, choices: Collection[str]) -> str:
    """The error message for a value that is not among the choices of a setting."""
    close = suggest(value, choices) if isinstance(value, str) else None
    hint = "" if close is None else f": did you mean '{close}'?"
    expected = f"one of {', '.join(choices)}" if len(choices) > 1 else next(iter(choices))
    return f"{setting}: expected {expected}, got {value!r}{hint}"


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, inherited fields included."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        body = cast(ast.ClassDef, tree).body
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = inspect.cleandoc(doc).replace("\n", " ")
    return docs


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a configuration: dotted name, type in words, default (None if unset) and description."""

    name: str
    type: str
    default: Any
    doc: str
    is_required: bool = False

    def default_text(self) -> str:
        """The default as on the command line; empty if there is none."""
        if self.default in (None, "", ()):
            return ""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


def list_settings(cls: type, section: str = "") -> Iterator[Setting]:
    """All settings of a dataclass and its nested dataclasses, in order of definition."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        name, kind = _join(section, field.name), hints[field.name]
        nested = next((k for k in (kind, *get_args(kind)) if dataclasses.is_dataclass(k)), None)
        if nested is not None:
            yield from list_settings(cast(type, nested), f"{name}[]" if get_origin(kind) is tuple else name)
        else:
            is_required = field.default is field.default_factory is dataclasses.MISSING
            default = None if field.default is dataclasses.MISSING else field.default
            yield Setting(name, _type_in_words(kind), default, docs.get(field.name, ""), is_required)


def _type_in_words(kind: Any) -> str:
    """For example "integer", "fp32, bf16 or fp16", "list of strings"; None is omitted."""
    parts = list(_type_names(kind))
    if parts == ["a list of them"]:  # the description of the setting names the choices
        return "list of strings"
    return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _type_names(kind: Any) -> Iterator[str]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for part in arguments:
            yield from _type_names(part)
    elif origin is Literal:
        yield from arguments
    elif origin is tuple and get_origin(arguments[0]) is Literal:
        yield "a list of them"
    elif origin is tuple:
        names = f"{_type_in_words(arguments[0])}s"
        yield f"list of {names}" if arguments[-1] is Ellipsis else f"{len(arguments)} {names}"
    elif kind is not type(None):
        yield {bool: "true or false", int: "integer", float: "number", str: "string", Path: "path"}[kind]


def convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as the type `kind`. Raises ConfigError with the setting `where`, the value and the expected type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(value, Override) and origin not in (Union, types.UnionType):
        value = value.text() if kind in (str, Path) else value.items() if origin is tuple else value.parsed()
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is Literal:
        if value in arguments and type(value) in {type(a) for a in arguments}:
            return value
        raise ConfigError(not_one_of(where, value, [str(a) for a in arguments]))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _type_error(where, value, "a list")
        items = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(items) != len(value):
            raise _type_error(where, value, f"a list of {len(items)} values")
        return tuple(convert(item, v, f"{where}[{i}]") for i, (item, v) in enumerate(zip(items, value, strict=True)))
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            first = next(iter(dataclasses.fields(kind))).name
            raise _type_error(where, value, f"a table of settings such as {_join(where, first)}")
        return build(cast(Any, kind), value, where)
    return _convert_scalar(kind, value, where)


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}
        raise _type_error(where, value, names.get(kind, str(kind)))
    if kind is float and not math.isfinite(value):
        raise _type_error(where, value, "a finite number")
    return value


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    if not isinstance(value, Mapping) and all(map(dataclasses.is_dataclass, {*arguments} - {type(None)})):
        raise _type_error(where, value, "a table of settings, or none")
    listed = isinstance(value, list | tuple) or (isinstance(value, Override) and len(value.items()) != 1)
    errors: dict[bool, ConfigError] = {}
    for kind in sorted(arguments, key=_is_list):  # try scalars first: "x" is a string, not a list of one
        try:
            if kind is not type(None):
                return convert(kind, value, where)
        except ConfigError as error:
            errors[_is_list(kind)] = error
    raise errors.get(listed) or next(iter(errors.values()))


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _type_error(where: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{where}: expected {expected}, got {value!r}")


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
