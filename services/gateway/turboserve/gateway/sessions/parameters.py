"""Parameters that several operations have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Path

SessionId = Annotated[str, Path(description="Id of the session.", examples=["ses_5f3a9c"])]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="Makes a repeat harmless: a second request with the same key gets the answer of the "
        "first. The same key with another request is refused.",
        examples=["order-17"],
    ),
]
