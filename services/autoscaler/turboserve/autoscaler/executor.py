"""Runs the core's commands at the provider and the state store, and returns their outcomes as events."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from turboserve import logs, subjects
from turboserve.autoscaler.messages import (
    Command,
    DeclareGone,
    Done,
    Drain,
    Event,
    Failed,
    Launch,
    ListProviderWorkers,
    ListWorkers,
    ProviderWorkersListed,
    Release,
    Reserve,
    RunningWorker,
    WorkersListed,
)
from turboserve.autoscaler.pool_term import UNSHARED, PoolTerm
from turboserve.autoscaler.providers.base import LaunchError, PoolProvider, ProviderError, ProviderWorker
from turboserve.bus import Bus
from turboserve.contracts import requests
from turboserve.contracts.base import is_id
from turboserve.contracts.errors import NotFoundError, StaleTermError, TurboServeError, WorkerGoneError

log = logs.get("autoscaler")
PROVIDER_LIMIT_S = 60.0
"""Time-out of a command in seconds, beside the grace period. A provider call without a bound of its own fails
the command instead of blocking the pool member forever."""
GONE_GRACE_S = 1.0
"""Grace period of a worker that was declared gone, in seconds."""


class Executor:
    """Runs one command and returns one event. Errors become `Failed`."""

    def __init__(self, bus: Bus, provider: PoolProvider, grace_s: float, term: PoolTerm = UNSHARED) -> None:
        self._bus, self._provider, self._grace_s, self._term = bus, provider, grace_s, term

    async def run(self, command: Command) -> Event:
        try:
            async with asyncio.timeout(PROVIDER_LIMIT_S + self._grace_s):
                return await self._run(command)
        except (NotFoundError, WorkerGoneError) as error:
            return Failed(command.ticket, error.detail, missing=True)
        except LaunchError as error:
            # By the provider's contract, a LaunchError means that nothing was started.
            return Failed(command.ticket, error.detail, missing=True)
        except StaleTermError as error:
            self._term.on_lost()
            return Failed(command.ticket, error.detail)
        except (TurboServeError, ValidationError, OSError) as error:
            log.info("command failed", command=type(command).__name__, error=str(error))
            return Failed(command.ticket, str(error))
        except TimeoutError:
            return Failed(command.ticket, f"did not end within {PROVIDER_LIMIT_S + self._grace_s:g} s")
        except Exception as error:
            # A provider may be third-party code. A bug in it must not stop the pool.
            log.exception("command crashed", command=type(command).__name__)
            return Failed(command.ticket, repr(error))

    async def _run(self, command: Command) -> Event:
        provider, call = self._provider, self._bus.call
        match command:
            case Reserve(ticket, member):
                await provider.reserve(member)
            case Launch(ticket, member, worker):
                provider_worker = await provider.launch(member, worker)
                return Done(ticket, provider_worker.pid)
            case Drain(ticket, _, worker):
                await call(subjects.DRAIN_WORKER, requests.DrainWorker(worker=worker, **self._term.fence))
                await provider.drain(worker)
            case Release(ticket, member, release_worker, _, declared_gone):
                # A frozen worker ignores a request to stop, and its replacement waits for the pool member.
                grace_s = min(self._grace_s, GONE_GRACE_S) if declared_gone else self._grace_s
                await provider.release(member, release_worker, grace_s)
            case DeclareGone(ticket, worker, reason):
                gone = requests.WorkerGone(worker=worker, reason=reason, **self._term.fence)
                await call(subjects.WORKER_GONE, gone)
            case ListProviderWorkers(ticket):
                return ProviderWorkersListed(ticket, _living(await provider.adopt()))
            case ListWorkers(ticket):
                page = await call(subjects.LIST_WORKERS, requests.ListWorkers())
                return WorkersListed(ticket, page.workers)
        return Done(ticket)


def _living(provider_workers: list[ProviderWorker]) -> tuple[RunningWorker, ...]:
    """Convert the provider's list. An invalid id raises ProviderError, so that the whole list is refused."""
    for provider_worker in provider_workers:
        for field, name in (("member", provider_worker.member), ("worker", provider_worker.worker)):
            if not is_id(name):
                raise ProviderError(f"the list has an invalid {field}: {name!r}", field=field)
    return tuple(
        RunningWorker(provider_worker.member, provider_worker.worker, provider_worker.pid)
        for provider_worker in provider_workers
    )
