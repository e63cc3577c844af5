"""Errors of requests that control the pool."""

from __future__ import annotations

from turboserve.contracts.errors import ConflictError, TurboServeError


class NotAnOperatorError(TurboServeError):
    """The tenant may read the state of the pool but may not control it."""

    code, status, title = "not_an_operator", 403, "Not an operator"


class PoolNotManagedError(ConflictError):
    """The autoscaler does not start the workers of this pool, so the pool accepts no orders."""

    code, title = "pool_not_managed", "Pool not managed"
