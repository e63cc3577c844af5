"""Copies of objects that only a type checker protects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

import pytest

from turboserve.static_frozen import statically_frozen, with_fields


@statically_frozen()
class Place:
    name: str
    rows: int = 3
    sizes: Mapping[str, int] = field(default_factory=dict)


def test_a_copy_has_the_changed_fields_and_all_others() -> None:
    before = Place("first", 4, {"a": 1})
    after = with_fields(before, rows=5, name="second")
    assert after == replace(before, rows=5, name="second") == Place("second", 5, {"a": 1})
    assert before == Place("first", 4, {"a": 1})


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(AttributeError, match="columns"):
        with_fields(Place("first"), columns=5)
