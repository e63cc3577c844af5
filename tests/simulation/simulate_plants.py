"""Shared parts of tests with planted faults: the search for a fault, and some of the plants."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from turboserve.scheduler.placement import Choice, Cluster, Demand, MinMax
from turboserve.simulation.faults import Faults
from turboserve.simulation.invariants import Checker
from turboserve.simulation.runtime.broker.stream import Stream
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.scenario import run_scenario
from turboserve.simulation.settings import Scale

SHORT_S = 10.0


class StaleSeedWarning(UserWarning):
    """A seed does not find its planted fault any more: the test searches others, which takes long."""


def warn_if_stale(finds: int | None, seed: int) -> None:
    """Warn if `seed` found what `finds` should have found: pytest lists warnings after a run."""
    if finds not in (None, seed):
        warnings.warn(f"finds={finds} is stale: seed {seed} finds the fault", StaleSeedWarning, stacklevel=3)


BUSY = Faults(crash={"worker": 0.05}, cut={"worker": 0.1}, freeze={"worker": 0.1}, late_request=0.1)


def violations(
    seeds: Iterable[int],
    faults: Faults | None = None,
    seconds: float = SHORT_S,
    scale: Scale | None = None,
    finds: int | None = None,
) -> set[str]:
    """Return the invariants violated in any of these seeds. Stops at the first seed with a violation.

    `finds` is a seed that is tried before the others: the one that found the fault when the test was written.
    The code under test may change what a seed does, so the others follow.
    """
    for seed in seeds if finds is None else (finds, *seeds):
        outcome = run_scenario(seed, seconds=seconds, faults=faults, scale=scale)
        if outcome.violations:
            warn_if_stale(finds, seed)
            return set(outcome.violations)
    return set()


def is_found(
    wanted: str,
    seeds: Iterable[int],
    faults: Faults | None = None,
    seconds: float = SHORT_S,
    scale: Scale | None = None,
    finds: int | None = None,
) -> bool:
    """Return whether the first of these seeds with a violation violates `wanted`: see `violations`.

    A run ends as soon as it does: a world with a planted fault often never settles, which takes long to see.
    """
    stopped: list[VirtualLoop] = []
    fail = Checker.fail

    def fails(self: Checker, name: str, message: str) -> None:
        fail(self, name, message)
        if name == wanted:
            stopped.append(self._world.loop)
            self._world.loop.stop()

    with patch.object(Checker, "fail", fails):
        for seed in seeds if finds is None else (finds, *seeds):
            try:
                outcome = run_scenario(seed, seconds=seconds, faults=faults, scale=scale)
            except RuntimeError:
                # The loop was stopped before the end of the run.
                if not stopped:
                    raise
                stopped[0].close()
                warn_if_stale(finds, seed)
                return True
            if outcome.violations:
                return wanted in outcome.violations
    return False


def without_fence(prefix: str) -> Callable[..., float]:
    """Return a `Stream._check` that ignores the expected sequence of messages on `prefix`."""
    check = Stream._check

    def checked(self: Stream, subject: str, headers: Mapping[str, str]) -> float:
        if subject.startswith(prefix):
            headers = {name: value for name, value in headers.items() if "Expected" not in name}
        return check(self, subject, headers)

    return checked


def all_on_the_first(self: MinMax, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
    """Replace `MinMax.assign`: assign every session to the first worker."""
    names = [candidate.worker for candidate in cluster.candidates()]
    return [Choice(demand.session, names[0] if names else None, "the first") for demand in demands]


def patched(target: Any, name: str, before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `before` with the original method and its arguments."""
    original = getattr(target, name)

    def method(*args: Any, **options: Any) -> Any:
        return before(original, *args, **options)

    return method
