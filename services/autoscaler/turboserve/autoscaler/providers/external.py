"""Workers that someone else starts, such as compose or a person: this pool only looks on."""

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
    """Owns no worker. That a worker died is found by the scheduler, which no longer hears it."""

    name: ClassVar[str] = "external"
    managed: ClassVar[bool] = False

    def watch(self, on_exit: OnExit) -> None:
        """There is nothing to watch."""

    async def adopt(self) -> list[ProviderWorker]:
        return []

    async def reserve(self, member: str) -> None:
        raise NoResourcesError("workers are started by someone else", field=member)

    async def launch(self, member: str, worker: str) -> ProviderWorker:
        raise LaunchError("workers are started by someone else", field=member)

    async def ready(self, worker: str) -> bool:
        return False

    async def drain(self, worker: str) -> None:
        """Whoever started it ends it."""

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        """Whoever started it ends it."""

    async def health(self) -> Health:
        return Health(True)

    async def close(self) -> None:
        """There is nothing to close."""
