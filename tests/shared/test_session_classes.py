"""Names of session classes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.allocation.classes import SessionClass
from turboserve.contracts.base import is_id

SIDES = st.integers(1, 16_384)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("longlive-1-3b", SessionClass("longlive-1-3b")),
        ("longlive-1-3b_480x832", SessionClass("longlive-1-3b", 480, 832)),
        ("a_1x1_2x2", SessionClass("a_1x1", 2, 2)),
        ("a_0x64", SessionClass("a_0x64")),
        ("a_064x64", SessionClass("a_064x64")),
        ("_64x64", SessionClass("_64x64")),
        ("a-64x64", SessionClass("a-64x64")),
    ],
)
def test_a_name_ends_in_a_size_or_is_the_models_own(name: str, expected: SessionClass) -> None:
    found = SessionClass.of_name(name)
    assert (found, found.name) == (expected, name)


@given(st.from_regex(r"\A[A-Za-z0-9_-]{1,50}\Z"), SIDES, SIDES)
def test_every_size_can_be_named(model: str, width: int, height: int) -> None:
    one = SessionClass(model, width, height)
    assert SessionClass.of_name(one.name) == one
    assert is_id(one.name), "a subject may have it"
