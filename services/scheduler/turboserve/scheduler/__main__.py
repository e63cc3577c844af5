"""`python -m turboserve.scheduler`."""

from __future__ import annotations

from turboserve import service
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.lead import serve
from turboserve.scheduler.placement import PLACEMENTS, MinMax, MinMaxRebalancer, Weights
from turboserve.scheduler.settings import SchedulerSettings


def main() -> None:
    settings = service.load("scheduler", SchedulerSettings)
    lease = settings.leadership()

    def core() -> Scheduler:
        rebalancer = MinMaxRebalancer(Weights(eta=settings.move_weight, moves_at_once=settings.moves_at_once))
        policy = settings.policy()
        placement = MinMax(rebalancer) if policy.rebalance else PLACEMENTS[settings.placement]()
        return Scheduler(placement, policy, rebalancer, rebalancer.links)

    async def start(runtime: service.Runtime) -> None:
        await serve(runtime, lease, core, settings.tick_s)

    service.run("scheduler", settings, start)


if __name__ == "__main__":
    main()
