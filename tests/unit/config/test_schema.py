"""Tables to dataclasses: strict types, overrides, TOML, and error messages with a suggestion."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.base.errors import ConfigError
from whimbrel.config import apply_overrides, build, dump_toml, field_docs, list_settings, load_toml, to_table
from whimbrel.config.schema import convert


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Inner."""

    rate: float = 0.5
    """A rate."""
    kind: Literal["linear", "cosine"] = "linear"
    """A kind."""
    pair: tuple[float, float] = (0.9, 0.99)
    """A pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Outer."""

    path: Path
    """A path."""
    steps: int | None = None
    """How many
    steps."""
    names: tuple[str, ...] = ()
    """Names."""
    kinds: tuple[Literal["linear", "cosine"], ...] | Literal["linear", "cosine"] | None = None
    """Kinds."""
    on: bool = False
    """A switch."""
    minutes: float | None = 10.0
    """Minutes."""
    label: str | None = None
    """A label."""
    mode: Literal["none", "full"] = "full"
    """A mode."""
    inner: Inner = field(default_factory=Inner)
    """A part."""
    optional: Inner | None = None
    """A part that can be turned off."""
    parts: tuple[Inner, ...] = ()
    """Parts."""


def test_table_round_trips_through_a_dataclass() -> None:
    table = {"path": "a/b", "steps": 3, "names": ["x", "y"], "on": True, "inner": {"rate": 1, "kind": "cosine"}}
    value = build(Outer, table)
    assert value == Outer(path=Path("a/b"), steps=3, names=("x", "y"), on=True, inner=Inner(rate=1.0, kind="cosine"))
    assert build(Outer, to_table(value)) == value
    assert build(Outer, tomllib.loads(dump_toml(to_table(value)))) == value


def test_array_of_tables_round_trips_through_a_tuple_of_dataclasses() -> None:
    text = 'path = "p"\n\n[[parts]]\nrate = 1\n\n[[parts]]\nkind = "cosine"\n'
    value = build(Outer, tomllib.loads(text))
    assert value.parts == (Inner(rate=1.0), Inner(kind="cosine"))
    assert build(Outer, tomllib.loads(dump_toml(to_table(value)))) == value
    names = [setting.name for setting in list_settings(Outer)]
    assert {"inner.rate", "parts[].rate"} <= set(names)
    with pytest.raises(ConfigError, match=r"parts\[1\].rate: expected a number, got 'x'"):
        build(Outer, {"path": "p", "parts": [{}, {"rate": "x"}]})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"path": "p", "stesp": 3}, r"unknown setting 'stesp': did you mean 'steps'\?"),
        ({"path": "p", "inner": {"kid": "x"}}, r"unknown setting 'inner.kid': did you mean 'inner.kind'\?"),
        (
            {"path": "p", "qqqqqq": 1},
            r"unknown setting 'qqqqqq' \(choose from: inner, kinds",
        ),
        ({"path": "p", "steps": "3"}, r"steps: expected an integer, got '3'"),
        ({"path": "p", "steps": True}, r"steps: expected an integer, got True"),
        ({"path": "p", "steps": 3.0}, r"steps: expected an integer, got 3.0"),
        ({"path": "p", "on": 1}, r"on: expected true or false, got 1"),
        ({"path": 3}, r"path: expected a path, got 3"),
        ({"path": "p", "names": "x"}, r"names: expected a list, got 'x'"),
        ({"path": "p", "names": ["x", 3]}, r"names\[1\]: expected a string, got 3"),
        ({"path": "p", "inner": {"pair": [1.0]}}, r"inner.pair: expected a list of 2 values, got \[1.0\]"),
        (
            {"path": "p", "inner": {"kind": "cosin"}},
            r"inner.kind: expected one of linear, cosine.* got 'cosin': did you mean",
        ),
        ({"path": "p", "inner": {"rate": math.inf}}, r"inner.rate: expected a finite number, got inf"),
        ({"path": "p", "inner": 3}, r"inner: expected a table .* such as inner.rate, got 3"),
        ({"path": "p", "optional": "off"}, r"optional: expected a table .*or none, got 'off'"),
        ({}, r"missing setting path: add it to the file or pass --path=VALUE"),
    ],
)
def test_invalid_table_is_a_one_line_error(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(Outer, table)
    assert "\n" not in str(caught.value)


def test_field_docs_include_inherited_fields() -> None:
    docs = field_docs(Outer)
    assert docs["steps"] == "How many steps."
    assert set(docs) == {
        "path",
        "steps",
        "names",
        "kinds",
        "on",
        "minutes",
        "label",
        "mode",
        "inner",
        "optional",
        "parts",
    }


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--inner.rate=3e-3", Outer(path=Path("p"), inner=Inner(rate=3e-3))),
        ("--steps=524_288", Outer(path=Path("p"), steps=524288)),
        ("--on=true", Outer(path=Path("p"), on=True)),
        ("--path=some/where=x", Outer(path=Path("some/where=x"))),
        ("--path=2026-11-15", Outer(path=Path("2026-11-15"))),
        ('--path="a b"', Outer(path=Path("a b"))),
        ("--names=['a','b']", Outer(path=Path("p"), names=("a", "b"))),
        ("--names=a", Outer(path=Path("p"), names=("a",))),
        ("--names=a, b", Outer(path=Path("p"), names=("a", "b"))),
        ("--names=2024", Outer(path=Path("p"), names=("2024",))),
        ("--names=", Outer(path=Path("p"))),
        ("--kinds=cosine", Outer(path=Path("p"), kinds="cosine")),
        ("--kinds=cosine,linear", Outer(path=Path("p"), kinds=("cosine", "linear"))),
        ("--inner.pair=0.5,0.75", Outer(path=Path("p"), inner=Inner(pair=(0.5, 0.75)))),
        ("--inner.kind=cosine", Outer(path=Path("p"), inner=Inner(kind="cosine"))),
    ],
)
def test_override_is_parsed_by_the_type_of_its_setting(override: str, expected: Outer) -> None:
    assert build(Outer, apply_overrides({"path": "p"}, [override])) == expected


def test_override_of_the_wrong_type_is_rejected() -> None:
    with pytest.raises(ConfigError, match="steps: expected an integer, got 'many'"):
        build(Outer, apply_overrides({"path": "p"}, ["--steps=many"]))
    with pytest.raises(ConfigError, match=r"inner.pair\[1\]: expected a number, got 'x'"):
        build(Outer, apply_overrides({"path": "p"}, ["--inner.pair=1,x"]))
    with pytest.raises(ConfigError, match="kinds: expected .* got 'cosin': did you mean 'cosine'"):
        build(Outer, apply_overrides({"path": "p"}, ["--kinds=cosin"]))
    with pytest.raises(ConfigError, match=r"kinds\[1\]: expected .* got 'cosin': did you mean 'cosine'"):
        build(Outer, apply_overrides({"path": "p"}, ["--kinds=linear,cosin"]))


def test_override_changes_only_its_setting() -> None:
    table = {"inner": {"rate": 1.0, "kind": "linear"}}
    assert apply_overrides(table, ["--inner.rate=2"]) == {"inner": {"rate": "2", "kind": "linear"}}
    assert table == {"inner": {"rate": 1.0, "kind": "linear"}}


def test_override_none_is_none_or_else_the_default() -> None:
    table = {"path": "p", "steps": 3, "names": ["a"], "label": "x", "inner": {"rate": 1.0, "kind": "cosine"}}

    def overridden(*overrides: str) -> Outer:
        return build(Outer, apply_overrides(table, overrides))

    assert overridden("--steps=none").steps is None
    assert overridden("--minutes=none").minutes is None
    assert overridden("--label=none").label is None
    assert overridden('--label="none"').label == "none"
    assert overridden("--mode=none").mode == "none"
    assert overridden("--names=none").names == ()
    assert overridden("--inner.rate=none").inner == Inner(kind="cosine")
    assert overridden("--inner=none").inner == Inner()
    assert overridden("--inner=none", "--inner.rate=2").inner == Inner(rate=2.0)


def test_none_survives_a_file() -> None:
    for value in (Outer(path=Path("p"), minutes=None), Outer(path=Path("p"), label="none", mode="none")):
        text = dump_toml(to_table(value))
        assert build(Outer, tomllib.loads(text)) == value
        assert build(Outer, apply_overrides(tomllib.loads(text), ["--on=true"])).minutes == value.minutes


@pytest.mark.parametrize("override", ["inner.rate=1", "--=1", "--a..b=1", "-x=1"])
def test_malformed_override_is_rejected(override: str) -> None:
    with pytest.raises(ConfigError, match="expected --section.name=value"):
        apply_overrides({}, [override])


def test_override_without_a_value_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"expected a value for --inner\.rate"):
        apply_overrides({}, ["--inner.rate"])


def test_override_below_a_scalar_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'steps' is a single value"):
        apply_overrides({"steps": 3}, ["--steps.x=1"])


def test_toml_syntax_error_names_the_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("a = 1\nb = = 2\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML: .*line 2"):
        load_toml(tmp_path / "bad.toml")
    (tmp_path / "bin.toml").write_bytes(b"caf\x85")
    with pytest.raises(ConfigError, match=r"bin\.toml is not valid TOML: not UTF-8 at byte 3$"):
        load_toml(tmp_path / "bin.toml")
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="TOML file, got a directory"):
        load_toml(tmp_path)


scalars = st.one_of(
    st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
keys = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
tables = st.recursive(
    st.dictionaries(keys, st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=3),
    lambda inner: st.dictionaries(keys, st.one_of(scalars, inner), max_size=3),
    max_leaves=8,
)


@given(tables)
def test_toml_round_trips(table: dict[str, object]) -> None:
    assert tomllib.loads(dump_toml(table)) == table


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 50_000, "a = " + "9" * 5000, "a = 'x", b"\xff"], ids=["deep", "digits", "open", "bytes"]
)
def test_unreadable_toml_is_a_config_error(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML"):
        load_toml(file)


def test_path_with_a_null_character_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a path"):
        convert(Path, "a\0b", "output_dir")
