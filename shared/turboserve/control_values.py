"""Checks the declarations of typed controls, and values against them. Needs the extra `controls`."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, validators
from jsonschema import ValidationError as SchemaMismatchError
from pydantic import JsonValue

from turboserve.contracts.control_declarations import ControlDeclaration, value_text

KEYWORDS = frozenset(
    {
        "$schema",
        "additionalProperties",
        "const",
        "contentEncoding",
        "contentMediaType",
        "default",
        "description",
        "enum",
        "examples",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "multipleOf",
        "prefixItems",
        "properties",
        "required",
        "title",
        "type",
    }
)
"""Keywords of a control's schema. No other is allowed: a pattern could take for ever, a reference would load
another document, and a refusal has to name one field and one limit."""
BASE64 = "base64"
"""The `contentEncoding` whose values are checked."""
LIMIT_CHARACTERS = 300
"""Maximum number of characters of a limit in a refusal."""


class InvalidControlError(ValueError):
    """A declaration or a value is invalid. `field` and `limit` name the invalid part and its bound."""

    def __init__(self, detail: str, field: str, limit: str | int | float | None = None) -> None:
        super().__init__(detail)
        self.detail, self.field, self.limit = detail, field, limit


def _check_encoding(
    validator: object, encoding: object, value: object, schema: object
) -> Iterator[SchemaMismatchError]:
    """Check the keyword `contentEncoding`, which the standard has as a remark only."""
    if encoding != BASE64 or not isinstance(value, str):
        return
    try:
        base64.b64decode(value, validate=True)
    except ValueError:
        yield SchemaMismatchError(f"is not {BASE64}")


_Validator = validators.extend(Draft202012Validator, {"contentEncoding": _check_encoding})  # type: ignore[no-untyped-call]


def check_declarations(declarations: Iterable[ControlDeclaration]) -> None:
    """Raise InvalidControlError if a declaration is repeated, or its schema is invalid or has other words."""
    names: set[str] = set()
    for declared in declarations:
        if declared.name in names:
            raise InvalidControlError(f"controls: {declared.name} is declared twice", field="name")
        names.add(declared.name)
        try:
            Draft202012Validator.check_schema(declared.value_schema)
        except SchemaError as error:
            raise InvalidControlError(
                f"control {declared.name}: {error.message}", field=_path("value_schema", error.absolute_path)
            ) from None
        _check_keywords(declared.name, "value_schema", declared.value_schema)


def check_value(declarations: Iterable[ControlDeclaration], name: str, value: JsonValue, model: str) -> None:
    """Raise InvalidControlError, with field and limit, unless the model takes this value.

    None is always allowed: it resets the control. `model` is the model's name, for the error.
    """
    known = {declared.name: declared for declared in declarations}
    if name not in known:
        limit = ", ".join(sorted(known)) or "none"
        raise InvalidControlError(
            f"name: {model} has no control {name}; its controls: {limit}", field="name", limit=limit
        )
    if value is None:
        return
    mismatches = _Validator(known[name].value_schema).iter_errors(value)
    first = min(mismatches, key=lambda error: [str(part) for part in error.absolute_path], default=None)
    if first is not None:
        field = _path("value", first.absolute_path)
        detail = f"{field}: {first.message}"
        raise InvalidControlError(detail[: 2 * LIMIT_CHARACTERS], field=field, limit=_limit(first))


def allowed_values(
    declarations: Iterable[ControlDeclaration], values: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return those of `values` that the declarations allow."""
    declared = {each.name: _Validator(each.value_schema) for each in declarations}
    return {
        name: value for name, value in values.items() if name in declared and declared[name].is_valid(value)
    }


def _limit(error: SchemaMismatchError) -> str | int | float:
    bound: object = error.validator_value
    if isinstance(bound, int | float) and not isinstance(bound, bool):
        return bound
    if error.validator == "enum" and isinstance(bound, list):
        text = ", ".join(each if isinstance(each, str) else value_text(each) for each in bound)
    elif isinstance(bound, str):
        text = bound
    else:
        text = str(error.validator)
    return text[:LIMIT_CHARACTERS]


def _path(root: str, parts: Iterable[str | int]) -> str:
    return ".".join([root, *(str(part) for part in parts)])[:LIMIT_CHARACTERS]


def _check_keywords(name: str, field: str, schema: Any) -> None:
    if not isinstance(schema, dict):
        return
    if other := sorted(schema.keys() - KEYWORDS):
        raise InvalidControlError(
            f"control {name}: the keyword {other[0]} is not allowed in {field}",
            field=field,
            limit=", ".join(sorted(KEYWORDS)),
        )
    for key, each in schema.get("properties", {}).items():
        _check_keywords(name, f"{field}.{key}", each)
    for each in schema.get("prefixItems", []):
        _check_keywords(name, f"{field}.prefixItems", each)
    for key in ("items", "additionalProperties"):
        _check_keywords(name, f"{field}.{key}", schema.get(key))
