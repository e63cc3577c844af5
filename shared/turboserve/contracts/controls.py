"""Typed controls on the bus: their values, and the declarations that workers report."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from turboserve.contracts.base import NUMBER_LIMIT, storable
from turboserve.contracts.control_declarations import (
    FIXED_VALUE_LIMIT,
    VALUE_LIMIT,
    ControlDeclaration,
    ControlName,
    value_text,
    within,
)

CONTROLS_LIMIT = 16
"""Maximum number of controls of a model."""
DEPTH_LIMIT = 64
"""Maximum number of lists and objects in each other in a value. Validation ends at a few hundred."""
INITIAL_VALUES_LIMIT = FIXED_VALUE_LIMIT + CONTROLS_LIMIT * VALUE_LIMIT
"""Maximum number of characters of all values that a session begins with, as JSON."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""An escaped NUL in JSON, which Postgres does not store."""


def _storable_text(text: str) -> None:
    storable(text)
    if _NUL.search(text):
        raise ValueError("must not contain the character NUL")


def _check_numbers(value: object, depth: int = 0) -> None:
    """Raise ValueError for a whole number that JavaScript does not have exactly, and for too deep a value."""
    if isinstance(value, dict | list) and depth == DEPTH_LIMIT:
        raise ValueError(f"must be nested at most {DEPTH_LIMIT} deep")
    if isinstance(value, dict):
        for each in value.values():
            _check_numbers(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            _check_numbers(each, depth + 1)
    elif isinstance(value, int) and abs(value) > NUMBER_LIMIT:
        raise ValueError(f"must have no whole number beyond {NUMBER_LIMIT}")


def bounded(value: JsonValue) -> JsonValue:
    """Return a value that can be stored and has at most `VALUE_LIMIT` characters. Raises ValueError."""
    _storable_text(within(value, VALUE_LIMIT))
    _check_numbers(value)
    return value


def _stored(value: JsonValue) -> JsonValue:
    _storable_text(within(value, FIXED_VALUE_LIMIT))
    _check_numbers(value)
    return value


def initial(values: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return values with which a session may begin. Raises ValueError if they cannot be stored."""
    within(values, INITIAL_VALUES_LIMIT)
    for name, value in values.items():
        try:
            _stored(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return values


def _storable_declarations(declared: tuple[ControlDeclaration, ...]) -> tuple[ControlDeclaration, ...]:
    for each in declared:
        _storable_text(value_text([each.description, each.value_schema]))
        _check_numbers(each.value_schema)
    return declared


ControlValue = Annotated[JsonValue, AfterValidator(bounded)]
"""Value of a control, at most `VALUE_LIMIT` characters as JSON. None: the model's own, as if never set."""
ControlValues = Annotated[
    dict[ControlName, Annotated[JsonValue, AfterValidator(_stored)]], Field(max_length=CONTROLS_LIMIT)
]
"""Values by the name of their control, each of at most `FIXED_VALUE_LIMIT` characters as JSON."""
InitialValues = Annotated[ControlValues, AfterValidator(initial)]
"""Values with which a session begins."""
ControlDeclarations = Annotated[
    tuple[ControlDeclaration, ...],
    Field(max_length=CONTROLS_LIMIT),
    AfterValidator(_storable_declarations),
]
"""The controls that a model takes, as its workers report them."""
