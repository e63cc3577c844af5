"""Observed cores: the product's own instances, whose decisions are also shown to the checker."""

from __future__ import annotations

from turboserve.autoscaler.composition_loop import CompositionLoop
from turboserve.autoscaler.messages import Command as PoolCommand
from turboserve.autoscaler.messages import Event as PoolEvent
from turboserve.autoscaler.messages import SizesWanted, SizeWanted
from turboserve.autoscaler.shell import Shell
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import Command, Event
from turboserve.simulation.invariants import Checker


def scheduler(core: Scheduler, name: str, checker: Checker) -> Scheduler:
    """Show the checker what `core` decides."""
    handle = core.handle

    def observed(event: Event, now: float) -> list[Command]:
        commands = handle(event, now)
        if commands:
            checker.decisions.scheduler_report(name, core, commands)
        return commands

    core.handle = observed  # type: ignore[method-assign]
    return core


def autoscaler(shell: Shell, name: str, checker: Checker) -> None:
    """Show the checker what the pool's core and its controller decide."""
    pool = shell.pool
    handle = pool.handle

    def observed(event: PoolEvent, now: float) -> list[PoolCommand]:
        control = shell.control
        if isinstance(event, SizeWanted) and control is not None and control.orders is not None:
            hearing = control.controller.advisor.feedback_monitor
            stale_s = control.controller.policy.stale_s
            heard = hearing.heard_at, stale_s, hearing.feedback
            checker.decisions.resized(pool, event.size, event.reason, *heard)
        if isinstance(event, SizesWanted) and isinstance(control, CompositionLoop):
            hearing = control.controller.advisor.feedback_monitor
            heard = hearing.heard_at, control.controller.policy.stale_s, hearing.feedback
            checker.decisions.resized(pool, sum(event.sizes.values()), event.reason, *heard)
            checker.decisions.composed(pool, event, control.accepted(now))
        commands = handle(event, now)
        if commands:
            checker.decisions.pool_report(name, shell.term, pool, commands)
        return commands

    pool.handle = observed  # type: ignore[method-assign]
