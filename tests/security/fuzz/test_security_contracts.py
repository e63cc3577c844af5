"""Every message that crosses a process boundary: limits on the contents of a readable message."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from annotated_types import BaseMetadata
from pydantic import ValidationError

from tests.helpers.hostile import Hostile, attacks
from turboserve import subjects
from turboserve.contracts.base import NUMBER_LIMIT, TEXT_LIMIT, Contract
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.sessions import SEED_LIMIT
from turboserve.contracts.versions import SchemaVersionError

MESSAGES = sorted(
    {endpoint.request for endpoint in subjects.ENDPOINTS}
    | {topic.message for topic in subjects.TOPICS}
    | {ChunkHeader, Ownership},
    key=lambda one: one.__name__,
)


def hold(contract: type[Contract], examples: int) -> None:
    """Check that a document is refused, or that all its values are bounded and survive being sent on."""
    schema = contract.model_json_schema()

    @attacks(examples)
    def each(hostile: Hostile) -> None:
        document = hostile.versioned(hostile.mutated(hostile.document(schema), most=2))
        try:
            message = contract.from_bytes(json.dumps(document).encode())
        except (SchemaVersionError, ValidationError, InvalidInputError):
            return
        check(message.model_dump())
        assert contract.from_bytes(message.to_bytes()) == message, document


def check(value: Any, name: str = "") -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            check(key)
            check(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            check(inner, name)
    elif isinstance(value, str):
        assert "\0" not in value, name
        assert len(value) <= TEXT_LIMIT, name
        value.encode()
    elif isinstance(value, float):
        assert math.isfinite(value), name
    elif isinstance(value, int):
        assert abs(value) <= (SEED_LIMIT if name == "seed" else NUMBER_LIMIT), name


def test_no_bound_is_hidden_by_another() -> None:
    """Of two bounds of one kind, one in the annotation and one in the field, pydantic applies the first."""
    kinds, seen = [Contract], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        for name, field in kind.model_fields.items():
            kinds_of = [type(one) for one in field.metadata if isinstance(one, BaseMetadata)]
            assert len(kinds_of) == len(set(kinds_of)), (kind.__name__, name, field.metadata)
            seen.add(name)
    assert len(seen) > 100


@pytest.mark.parametrize("contract", MESSAGES, ids=lambda one: one.__name__)
def test_what_can_be_read_is_bounded(contract: type[Contract]) -> None:
    hold(contract, 50)


@pytest.mark.soak
@pytest.mark.parametrize("contract", MESSAGES, ids=lambda one: one.__name__)
def test_what_can_be_read_is_bounded_at_length(contract: type[Contract]) -> None:
    hold(contract, 20_000)
