"""What a model declares of a typed control. It uses no other contract, so that engines can use it, too."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints

VALUE_LIMIT = 1_024
"""Maximum number of characters of a value as JSON."""
FIXED_VALUE_LIMIT = 12_288
"""Maximum number of characters of the value of a fixed control as JSON: room for a small image."""
SCHEMA_LIMIT = 8_192
"""Maximum number of characters of a control's schema as JSON."""
NAME_PATTERN = r"^[a-z][a-z0-9_]{0,31}$"
"""Pattern of a control's name."""


def value_text(value: JsonValue) -> str:
    """Return a value as JSON, as it is stored and counted."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def within(value: JsonValue, limit: int) -> str:
    """Return a value as JSON. Raises ValueError if it is none, or has more than `limit` characters."""
    try:
        text = value_text(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("must be JSON without NaN and infinity") from error
    if len(text) > limit:
        raise ValueError(f"must have at most {limit} characters as JSON")
    return text


def _bounded_schema(schema: dict[str, Any]) -> dict[str, Any]:
    within(schema, SCHEMA_LIMIT)
    return schema


ControlName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class ControlDeclaration(BaseModel):
    """A control that a model takes."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    name: ControlName
    description: str = Field(max_length=500)
    """What the control does, for people."""
    value_schema: Annotated[dict[str, Any], AfterValidator(_bounded_schema)]
    """JSON schema (draft 2020-12) of a value. It has only the keywords of `control_values.KEYWORDS`."""
    fixed: bool = False
    """Whether the value is set when the session is created, and never again. Otherwise it may be set at any
    time."""
