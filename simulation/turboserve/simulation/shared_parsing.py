"""Messages are parsed once in a run: a parsed message is frozen, so that all its receivers share it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from turboserve.contracts.base import Contract

MESSAGES = 2_048
"""Newest messages whose parsed form is kept."""


@contextmanager
def shared_parsing() -> Iterator[None]:
    """Parse each body once for all processes of the run. Errors are raised to every receiver."""
    parse = Contract.__dict__["from_bytes"].__func__
    cached = functools.lru_cache(MESSAGES)(parse)

    def from_bytes(kind: type[Contract], data: bytes) -> Contract:
        return cached(kind, data)  # type: ignore[no-any-return]

    Contract.from_bytes = classmethod(from_bytes)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Contract.from_bytes = classmethod(parse)  # type: ignore[assignment, method-assign]
