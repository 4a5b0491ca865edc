"""The error tree is drawn as it is."""

from __future__ import annotations

import pytest

from whimbrel.base import errors
from whimbrel.base.seeds import derive_seed


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_in_the_drawn_tree(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.WhimbrelError)
    assert name in (errors.__doc__ or "")
    if kind is not errors.WhimbrelError:
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        assert builtin not in (Exception, object)


def test_a_missing_extra_says_how_to_get_it() -> None:
    assert str(errors.MissingExtraError("a picture", "matplotlib", "plot")).endswith("pip install 'whimbrel[plot]'")


def test_seeds_differ_by_name_and_stay_the_same() -> None:
    assert derive_seed(1, "order", 0) == derive_seed(1, "order", 0)
    assert len({derive_seed(1), derive_seed(2), derive_seed(1, "order"), derive_seed(1, "order", 1)}) == 4
    assert 0 <= derive_seed(7, "x") < 2**63
