"""The parameter that asks for the next page of numbered entries."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from turboserve.contracts.base import NUMBER_LIMIT

AfterNumber = Annotated[
    int | None,
    Query(ge=0, le=NUMBER_LIMIT, description="The `next` of the page before.", examples=[1024]),
]
