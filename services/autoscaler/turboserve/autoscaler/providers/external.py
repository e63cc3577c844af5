"""Provider for workers that another system starts, such as compose. The pool only observes them."""

from __future__ import annotations

from typing import ClassVar

from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    NoResourcesError,
    OnExit,
    PoolProvider,
    ProviderWorker,
)


class ExternalProvider(PoolProvider):
    """Owns no workers. The scheduler detects the end of a worker by its missing reports."""

    name: ClassVar[str] = "external"
    managed: ClassVar[bool] = False

    def watch(self, on_exit: OnExit) -> None:
        """Do nothing: there is nothing to watch."""

    async def adopt(self) -> list[ProviderWorker]:
        return []

    async def reserve(self, member: str) -> None:
        raise NoResourcesError("another system starts the workers", field=member)

    async def launch(self, member: str, worker: str) -> ProviderWorker:
        raise LaunchError("another system starts the workers", field=member)

    async def ready(self, worker: str) -> bool:
        return False

    async def drain(self, worker: str) -> None:
        """Do nothing: the system that started the worker ends it."""

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        """Do nothing: the system that started the worker ends it."""

    async def health(self) -> Health:
        return Health(True)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
