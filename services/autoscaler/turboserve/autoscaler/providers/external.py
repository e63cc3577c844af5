"""Workers that someone else starts, such as compose or a person: this pool only looks on."""

from __future__ import annotations

from typing import ClassVar

from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    Member,
    NoResourcesError,
    OnExit,
    PoolProvider,
)


class ExternalProvider(PoolProvider):
    """Owns no worker. That a worker died is found by the scheduler, which no longer hears it."""

    name: ClassVar[str] = "external"
    managed: ClassVar[bool] = False

    def watch(self, on_exit: OnExit) -> None:
        """There is nothing to watch."""

    async def adopt(self) -> list[Member]:
        return []

    async def reserve(self, slot: str) -> None:
        raise NoResourcesError("workers are started by someone else", field=slot)

    async def launch(self, slot: str, worker: str) -> Member:
        raise LaunchError("workers are started by someone else", field=slot)

    async def ready(self, worker: str) -> bool:
        return False

    async def drain(self, worker: str) -> None:
        """Whoever started it ends it."""

    async def release(self, slot: str, worker: str | None, grace_s: float) -> None:
        """Whoever started it ends it."""

    async def health(self) -> Health:
        return Health(True)

    async def close(self) -> None:
        """There is nothing to close."""
