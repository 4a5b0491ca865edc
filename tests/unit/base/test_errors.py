"""The error tree and its messages."""

from __future__ import annotations

import pytest

from whimbrel.base import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_in_the_documented_tree(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.WhimbrelError)
    assert name in (errors.__doc__ or "")
    if kind is not errors.WhimbrelError:
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        assert builtin not in (Exception, object)


def test_missing_extra_error_names_the_pip_command() -> None:
    assert str(errors.MissingExtraError("a picture", "matplotlib", "plot")).endswith(
        "pip install 'whimbrel[plot]', or pip install '.[plot]' in a clone"
    )
