"""What an autoscaler begins with: the size of its pool, by what runs already, and the loop that decides."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from turboserve import logs
from turboserve.autoscaler.composition_loop import CompositionLoop
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.composition_goal import GoalAnswered, GoalProblem
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.policy import default_table
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import SizesWanted, SizeWanted
from turboserve.autoscaler.pool_members import parts_of
from turboserve.autoscaler.providers.base import PoolProvider, ProviderWorker
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.store_link import drained
from turboserve.bus import Bus

log = logs.get("autoscaler")
PROVIDER_S = 30.0
"""Time-out of a request to the provider, in seconds. A request without an answer by then is repeated."""
RETRY_S = 1.0
"""Time between two attempts to learn which workers run, in seconds."""


class FoundWorkers:
    """Workers that run before the pool begins, and which of them drain."""

    def __init__(self, bus: Bus, provider: PoolProvider) -> None:
        self._bus, self._provider = bus, provider
        self.workers: list[ProviderWorker] = []
        """The provider's workers."""
        self.leaving: frozenset[str] = frozenset()
        """Workers that drain."""
        self.provider_error: str | None = None
        """Why the provider's last list failed; None if it did not."""
        self.waits: str | None = None
        """Why the pool does not begin although the provider has listed its workers."""

    async def learn(self) -> None:
        """Wait until the provider lists its workers, and the state store says which of them drain."""
        while True:
            await self._list()
            # A worker that drains must not count: another one would be started in its place.
            leaving = await drained(self._bus) if self.workers else frozenset()
            if leaving is not None:
                break
            self.waits = "waiting for the state store to say which workers drain"
            await asyncio.sleep(RETRY_S)
        self.waits, self.leaving = None, leaving

    async def _list(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PROVIDER_S):
                    self.workers = await self._provider.adopt()
                break
            except Exception as error:
                # A provider may be third-party code. No error of it may end the pool; the status shows it.
                self.waits, self.provider_error = None, str(error) or type(error).__name__
                log.warning("provider listing failed", error=repr(error))
                await asyncio.sleep(RETRY_S)
        self.provider_error = None


def first_size(
    settings: AutoscalerSettings, workers: Collection[ProviderWorker], leaving: Collection[str]
) -> SizeWanted | SizesWanted:
    """Return the initial size.

    It is the number of workers that do not drain (`leaving`), so that a restart under load does not shrink
    the pool. If none are running, it is the configured size.
    """
    staying = [worker for worker in workers if worker.worker not in leaving]
    reason = f"{len(staying)} already running" if workers else "configured"
    if settings.pool_file is not None and settings.pool_file.composed:
        return SizesWanted(_first_sizes(settings, staying), reason)
    least, most = settings.limits
    return SizeWanted(min(max(len(staying) if workers else settings.pool_size, least), most), reason)


def _first_sizes(settings: AutoscalerSettings, staying: Iterable[ProviderWorker]) -> dict[str, int]:
    """Return the workers of each offer that run, and the minimum of each where its kind has room.

    A minimum for which another offer's worker has to end is left to the controller: it switches that one.
    """
    assert settings.pool_file is not None
    parts = [parts_of(worker.member, settings.pool_name) for worker in staying]
    found = Counter(part[0] for part in parts if part is not None)
    sizes = {offer.name: found[offer.name] for offer in settings.pool_file.offers}
    for kind, terms in settings.pool_file.terms.items():
        offers = [offer for offer in settings.pool_file.offers if offer.kind == kind]
        while sum(sizes[offer.name] for offer in offers) > terms.most:
            # An earlier file had a higher limit.
            most = max(offers, key=lambda offer: sizes[offer.name] - offer.least)
            sizes[most.name] -= 1
        for offer in offers:
            room = terms.most - sum(sizes[offer.name] for offer in offers)
            sizes[offer.name] += min(max(offer.least - sizes[offer.name], 0), room)
    return sizes


def control_of(
    settings: AutoscalerSettings,
    first: SizeWanted | SizesWanted,
    pool: Pool,
    feed: Callable[[SizeWanted | SizesWanted], None],
    solve: Callable[[GoalProblem, Callable[[GoalAnswered, float], None]], None],
) -> ControlLoop:
    """Return the loop that decides about `pool` and feeds its decisions to it.

    `solve`: see `CompositionLoop`.
    """
    shipped = default_table()
    policy = settings.control_policy(shipped)
    if isinstance(first, SizesWanted):
        assert settings.pool_file is not None
        return CompositionLoop(
            CompositionController(
                policy, shipped, settings.pool_file.pool_offers, settings.pool_file.terms, first.sizes
            ),
            shipped,
            settings.pool_override,
            lambda sizes, reason, switches: feed(SizesWanted(sizes, reason, switches)),
            lambda: pool.members.values() if pool.adopted else None,
            solve,
        )
    return ControlLoop(
        Controller(policy, shipped, first.size),
        settings.models[0],
        shipped,
        settings.pool_override,
        lambda target, reason: feed(SizeWanted(target, reason)),
        settings.models[1:],
    )
