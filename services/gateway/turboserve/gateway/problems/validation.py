"""Converts pydantic's validation errors to one error that names the field and the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turboserve.contracts.errors import InvalidInputError

PART_SHOWN = 80
_LIMITS = ("max_length", "min_length", "le", "lt", "ge", "gt", "pattern", "expected", "expected_tags")


def invalid_input(errors: Sequence[Mapping[str, Any]], skip: Sequence[str] = ()) -> InvalidInputError:
    """Convert the first of pydantic's `errors`. The field omits a first part in `skip`, such as `body`."""
    first = errors[0]
    where = [str(part) for part in first["loc"]]
    if len(where) > 1 and where[0] in skip:
        where.pop(0)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "invalid")
        return InvalidInputError(f"the body is not JSON: {reason}", field="body", limit="JSON")
    key = None
    if where[-1:] == ["[key]"]:
        _, key = where.pop(), where.pop()
    field = ".".join(map(_short, where)) or "body"
    context = first.get("ctx", {})
    limit = next((context[name] for name in _LIMITS if name in context), None)
    message = str(first["msg"]).removeprefix("Value error, ")
    about = field if key is None else f"{field}: key {_short(key)!r}"
    return InvalidInputError(f"{about}: {message}", field=field, limit=limit)


def _short(part: str) -> str:
    # The client chooses the names of members, which may have any length.
    return part if len(part) <= PART_SHOWN else f"{part[:PART_SHOWN]}…"
