"""Parameters that several operations have."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Path
from pydantic import AfterValidator, Field

from turboserve.contracts.control_declarations import NAME_PATTERN
from turboserve.contracts.controls import CONTROLS_LIMIT, initial

INDEX_LIMIT = 2**53
"""Index above that of any chunk. JavaScript's numbers are exact up to it."""

InitialControls = Annotated[
    dict[Annotated[str, Field(pattern=NAME_PATTERN)], Any],
    Field(
        max_length=CONTROLS_LIMIT,
        description="Values of the model's controls, by name, from the first chunk on. `/v1/models` has the "
        "controls with their schemas. Those marked `fixed` can be set only here.",
        examples=[{"steer": "left"}],
    ),
    AfterValidator(initial),
]
SessionId = Annotated[str, Path(description="Id of the session.", examples=["ses_5f3a9c"])]


def idempotency_header(description: str, alias: str | None = None) -> Any:
    """The header `Idempotency-Key`, with what a repeat gets."""
    return Header(
        alias=alias,
        min_length=1,
        max_length=255,
        description=f"Makes a repeat harmless: {description}",
        examples=["order-17"],
    )


IdempotencyKey = Annotated[
    str | None,
    idempotency_header(
        "a second request with the same key gets the answer of the first. The same key with another request "
        "is refused."
    ),
]
