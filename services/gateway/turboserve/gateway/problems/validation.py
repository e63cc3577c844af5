"""Converts pydantic's validation errors to one error that names all fields and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turboserve.contracts.errors import FieldError, InvalidInputError, TurboServeError
from turboserve.gateway.problems.errors import MalformedRequestError
from turboserve.wording import counted

PART_SHOWN = 80
ERRORS_SHOWN = 32
"""Maximum number of errors in an answer, which is not to be much larger than the request."""
_LIMITS = ("max_length", "min_length", "le", "lt", "ge", "gt", "pattern", "expected", "expected_tags")


def invalid_input(
    errors: Sequence[Mapping[str, Any]], skip: Sequence[str] = (), whole: str = "body"
) -> TurboServeError:
    """Convert pydantic's `errors`. A field omits a first part in `skip`, and is `whole` without any part.

    The result is a MalformedRequestError if the input is not JSON.
    """
    if errors[0]["type"] == "json_invalid":
        reason = errors[0].get("ctx", {}).get("error", "invalid")
        return MalformedRequestError(f"the {whole} is not JSON: {reason}", field=whole)
    found = tuple(_field_error(error, skip, whole) for error in errors[:ERRORS_SHOWN])
    first, more = found[0], len(errors) - 1
    also = f" ({more} more)" if more else ""
    problem = InvalidInputError(f"{first.field}: {first.message}{also}", field=first.field, limit=first.limit)
    problem.errors = found
    return problem


def _field_error(error: Mapping[str, Any], skip: Sequence[str], whole: str) -> FieldError:
    where = [str(part) for part in error["loc"]]
    if where and where[0] in skip:
        where.pop(0)
    key = None
    if where[-1:] == ["[key]"]:
        _, key = where.pop(), where.pop()
    context = error.get("ctx", {})
    message = _length_in_words(error.get("input"), context) or str(error["msg"]).removeprefix("Value error, ")
    return FieldError(
        field=".".join(map(_short, where)) or whole,
        message=message if key is None else f"key {_short(key)!r}: {message}",
        limit=next((context[name] for name in _LIMITS if name in context), None),
    )


def _length_in_words(value: object, context: Mapping[str, Any]) -> str:
    """Say how long a text has to be, where pydantic speaks of items. Empty: it is about something else."""
    if not isinstance(value, str) or "actual_length" not in context:
        return ""
    name, bound = ("max_length", "at most") if "max_length" in context else ("min_length", "at least")
    return f"must have {bound} {counted(context[name], 'character')}, not {context['actual_length']}"


def _short(part: str) -> str:
    # The client chooses the names of members, which may have any length.
    return part if len(part) <= PART_SHOWN else f"{part[:PART_SHOWN]}…"
