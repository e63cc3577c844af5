"""Parameters of requests that need more than their value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from turboserve.client.models import Quality


class Unchanged(Enum):
    """Type of `UNCHANGED`."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED
"""Leaves a member as it is, where None has a meaning of its own."""


def as_json(value: Any) -> Any:
    """Return a quality as the API takes it, and any other value as it is."""
    if isinstance(value, Quality):
        return value.model_dump()
    return dict(value) if isinstance(value, Mapping) else value
