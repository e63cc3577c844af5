"""The interface of all pool providers. Which worker to start or end is never decided here."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from turboserve.contracts.errors import TurboServeError


class ProviderError(TurboServeError):
    """The provider could not do it; `retry_after_s` says when to try again."""

    code, status, title = "provider", 503, "Pool provider failed"


class NoResourcesError(ProviderError):
    """There is nothing left to run a worker on."""

    code, title = "no_resources", "No resources"


class LaunchError(ProviderError):
    """The worker's process could not be started."""

    code, title = "launch_failed", "Launch failed"


class StuckError(ProviderError):
    """A worker did not end although it was made to."""

    code, title = "stuck", "Worker does not end"


@dataclass(frozen=True)
class ProviderWorker:
    """One worker that the provider has started and that has not ended."""

    member: str
    worker: str
    pid: int | None = None
    """Its process on this host, if it is one."""


@dataclass(frozen=True)
class Health:
    """Whether the provider itself works; `reason` in words if not."""

    ok: bool
    reason: str | None = None


OnExit = Callable[[str, str], None]
"""Called with a worker's id and, in words, how it ended."""


class PoolProvider(abc.ABC):
    """Starts and ends workers somewhere: processes here, actors of a Ray cluster, pods.

    The autoscaler's core decides *which* slot gets or loses its worker and *when*; a provider only does it. A
    slot's life is `reserve → launch → (load) → (ready) → (drain) → release`; `release` may come at any time.

    Rules for every implementation, held by the contract suite in the tests:

    - *Idempotent.* A repeated `reserve`, `launch` of the same worker, `drain` or `release` succeeds and
      changes nothing. `release` of what is not there succeeds.
    - *One worker per slot.* `launch` in a slot whose worker lives raises `LaunchError` and starts nothing.
    - *Bounded.* Every method returns or raises `ProviderError` within its own deadline. After an error the
      outcome may be unknown; the core releases the slot and begins again.
    - *No orphans without an owner.* What `launch` has started is found by `adopt`, in this process and in any
      later one with the same pool name, even if the autoscaler was killed in the middle of `launch`.
    - *Exits are told once*, by the callback given to `watch`, for every worker that was launched or adopted
      and has ended, including those that `release` ended, as soon as the provider knows. The callback runs on
      the event loop that called `watch`.
    - *Names.* The worker runs with `TURBOSERVE_WORKER_ID` = the worker id and `TURBOSERVE_POOL_SLOT` = the
      slot; a worker id is used once.
    - *Nothing is lost by silence.* If the provider cannot find out what lives, `adopt` raises; it never
      returns a part.

    A Kubernetes provider, for example: `reserve` creates nothing (or a placeholder pod); `launch` creates a
    pod labelled with pool, slot and worker, restart policy Never; `adopt` lists pods by label; `watch`
    follows the API server's watch; `ready` reads the pod's condition; `release` deletes it with grace.
    """

    name: ClassVar[str]
    managed: ClassVar[bool] = True
    """False: workers are started by someone else, and this pool only looks on."""

    @abc.abstractmethod
    def watch(self, on_exit: OnExit) -> None:
        """Tell exits to `on_exit`. Called once, before everything else, on the running event loop."""

    @abc.abstractmethod
    async def adopt(self) -> list[ProviderWorker]:
        """Everything of this pool that lives; watches it from now on. Called at start and then repeatedly."""

    @abc.abstractmethod
    async def reserve(self, member: str) -> None:
        """Set aside what a worker in `member` needs. Raises `NoResourcesError`."""

    @abc.abstractmethod
    async def launch(self, member: str, worker: str) -> ProviderWorker:
        """Start a worker in a reserved slot; returns when it is started, not when it serves."""

    @abc.abstractmethod
    async def ready(self, worker: str) -> bool:
        """Whether the platform sees the worker serving (a probe). False if it is not there."""

    @abc.abstractmethod
    async def drain(self, worker: str) -> None:
        """Prepare the platform for the worker's end; nothing to do where there is nothing to prepare."""

    @abc.abstractmethod
    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        """End the slot's worker and give back what was reserved.

        Asks it to end, and after `grace_s` makes it. Returns when it is gone. `worker` None: there is none.
        Raises `StuckError` if it does not end.
        """

    @abc.abstractmethod
    async def health(self) -> Health:
        """Whether the provider itself could start a worker now."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop watching; leaves the workers alone."""
