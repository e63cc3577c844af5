"""What operators may be refused."""

from __future__ import annotations

from turboserve.contracts.errors import ConflictError, TurboServeError


class NotAnOperatorError(TurboServeError):
    """This tenant may look at the pool and not order anything of it."""

    code, status, title = "not_an_operator", 403, "Not an operator"


class PoolNotManagedError(ConflictError):
    """Its workers are started by someone else: no order is possible."""

    code, title = "pool_not_managed", "Pool not managed"
