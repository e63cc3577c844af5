"""Errors of requests about a pool."""

from __future__ import annotations

from turboserve.contracts.errors import ConflictError, NotFoundError


class PoolNotFoundError(NotFoundError):
    """No autoscaler has reported a pool with this id. `detail` names the known pools."""

    code, title = "pool_not_found", "Pool not found"


class PoolNotManagedError(ConflictError):
    """The autoscaler does not start the workers of this pool, so the pool accepts no orders."""

    code, title = "pool_not_managed", "Pool not managed"
