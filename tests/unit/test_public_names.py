"""`import whimbrel`: lazy, and with the names it promises."""

from __future__ import annotations

import pytest

import whimbrel


def test_every_public_name_is_there():
    assert dir(whimbrel) == sorted(whimbrel.__all__)
    for name in whimbrel.__all__:
        value = getattr(whimbrel, name)
        assert isinstance(value, str) if name == "__version__" else callable(value), name


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'load_modle'"):
        whimbrel.load_modle  # noqa: B018
