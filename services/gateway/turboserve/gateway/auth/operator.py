"""FastAPI dependency for operations that only operators may call."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from turboserve.contracts.errors import TurboServeError
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.middleware import Caller


class NotAnOperatorError(TurboServeError):
    """The tenant may read the state of a pool but may not control it."""

    code, status, title = "not_an_operator", 403, "Not an operator"


def _operator(caller: Caller) -> Identity:
    if not caller.operator:
        raise NotAnOperatorError(f"Tenant {caller.tenant} is not an operator.", field="tenant")
    return caller


Operator = Annotated[Identity, Depends(_operator)]
"""The sender's identity. A sender that is no operator gets 403 before its body is validated."""
