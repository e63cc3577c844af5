"""The interface of all pool providers. The core decides which worker to start or end, never a provider."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from turboserve.contracts.errors import TurboServeError


class ProviderError(TurboServeError):
    """The provider failed. `retry_after_s` is the time after which to try again."""

    code, status, title = "provider", 503, "Pool provider failed"


class NoResourcesError(ProviderError):
    """There are no resources left to run a worker."""

    code, title = "no_resources", "No resources"


class LaunchError(ProviderError):
    """The worker's process could not be started."""

    code, title = "launch_failed", "Launch failed"


class StuckError(ProviderError):
    """A worker did not end although it was forced to."""

    code, title = "stuck", "Worker does not end"


@dataclass(frozen=True)
class ProviderWorker:
    """One worker that the provider has started and that has not ended."""

    member: str
    worker: str
    pid: int | None = None
    """Process id, if the worker is a process of this host."""


@dataclass(frozen=True)
class Health:
    """Whether the provider itself works, and the reason if it does not."""

    ok: bool
    reason: str | None = None


OnExit = Callable[[str, str], None]
"""Called with a worker's id and a description of how it ended."""


class PoolProvider(abc.ABC):
    """Starts and ends workers somewhere: processes here, actors of a Ray cluster, pods.

    The autoscaler's core decides *which* pool member gets or loses its worker and *when*. A provider only
    carries this out. The life of a member is `reserve → launch → (load) → (ready) → (drain) → release`;
    `release` may come at any time.

    Rules for every implementation, checked by the contract suite in the tests:

    - *Idempotent.* A repeated `reserve`, `launch` of the same worker, `drain` or `release` succeeds and
      changes nothing. `release` of a worker that does not exist succeeds.
    - *One worker per member.* `launch` raises `LaunchError` and starts nothing if the member's worker lives,
      whichever process has started it: of two autoscalers that share a pool, one may have been suspended in
      the midst of a launch.
    - *Bounded.* Every method returns or raises `ProviderError` within its own deadline. After an error the
      outcome may be unknown; the core releases the member and begins again.
    - *No lost workers.* `adopt` finds each worker that `launch` has started, in this process and in any later
      one with the same pool name, even if the autoscaler was killed during `launch`.
    - *Exits are reported once.* The provider calls the callback given to `watch` as soon as it knows that a
      launched or adopted worker has ended, also if `release` ended it. The callback runs on the event loop
      that called `watch`.
    - *Names.* The worker runs with its id in `TURBOSERVE_WORKER_ID` and the member's name in
      `TURBOSERVE_POOL_MEMBER`. A worker id is used once.
    - *Complete lists.* If the provider cannot list all living workers, `adopt` raises.
    """

    name: ClassVar[str]
    managed: ClassVar[bool] = True
    """Whether the pool starts and ends its workers. If False, another system does, and the pool only
    observes."""

    @abc.abstractmethod
    def watch(self, on_exit: OnExit) -> None:
        """Report exits to `on_exit`. Called once, before all other methods, on the running event loop."""

    @abc.abstractmethod
    async def adopt(self) -> list[ProviderWorker]:
        """Return all living workers of this pool and watch them. Called at start and then repeatedly."""

    @abc.abstractmethod
    async def reserve(self, member: str) -> None:
        """Reserve what a worker in `member` needs. Raises `NoResourcesError`."""

    @abc.abstractmethod
    async def launch(self, member: str, worker: str) -> ProviderWorker:
        """Start a worker in a reserved member. Returns when the worker is started, not when it serves."""

    @abc.abstractmethod
    async def ready(self, worker: str) -> bool:
        """Whether a probe finds the worker serving. False if the worker does not exist."""

    @abc.abstractmethod
    async def drain(self, worker: str) -> None:
        """Prepare the platform for the worker's end, if it needs preparation."""

    @abc.abstractmethod
    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        """End the member's worker and give its reservation back. `worker` is None if there is none.

        A worker that was adopted beside another one of its member is released under a member of its own.

        Asks the worker to end, and after `grace_s` forces it. Returns when it has ended. Raises `StuckError`
        if it does not end.
        """

    @abc.abstractmethod
    async def health(self) -> Health:
        """Return whether the provider itself could start a worker now."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop watching. The workers continue."""
