"""Typed controls on the bus: their values, and the declarations that workers report."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from turboserve.contracts.base import NUMBER_LIMIT, storable
from turboserve.contracts.control_declarations import (
    VALUE_LIMIT,
    ControlDeclaration,
    ControlName,
    value_text,
    within,
)

CONTROLS_LIMIT = 16
"""Maximum number of controls of a model."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""An escaped NUL in JSON, which Postgres does not store."""


def _storable_text(text: str) -> None:
    storable(text)
    if _NUL.search(text):
        raise ValueError("must not contain the character NUL")


def _check_numbers(value: object) -> None:
    """Raise ValueError for a whole number that JavaScript does not have exactly."""
    if isinstance(value, dict):
        for each in value.values():
            _check_numbers(each)
    elif isinstance(value, list):
        for each in value:
            _check_numbers(each)
    elif isinstance(value, int) and abs(value) > NUMBER_LIMIT:
        raise ValueError(f"must have no whole number beyond {NUMBER_LIMIT}")


def bounded(value: JsonValue) -> JsonValue:
    """Return a value that can be stored and has at most `VALUE_LIMIT` characters. Raises ValueError."""
    _storable_text(within(value, VALUE_LIMIT))
    _check_numbers(value)
    return value


def _storable_declarations(declared: tuple[ControlDeclaration, ...]) -> tuple[ControlDeclaration, ...]:
    for each in declared:
        _storable_text(value_text([each.description, each.value_schema]))
        _check_numbers(each.value_schema)
    return declared


ControlValue = Annotated[JsonValue, AfterValidator(bounded)]
"""Value of a control, at most `VALUE_LIMIT` characters as JSON. None: the model's own, as if never set."""
ControlValues = Annotated[dict[ControlName, ControlValue], Field(max_length=CONTROLS_LIMIT)]
"""Values by the name of their control."""
ControlDeclarations = Annotated[
    tuple[ControlDeclaration, ...],
    Field(max_length=CONTROLS_LIMIT),
    AfterValidator(_storable_declarations),
]
"""The controls that a model takes, as its workers report them."""
