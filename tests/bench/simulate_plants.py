"""What tests of planted faults share: how a fault is looked for, and some of the plants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from turboserve.bench.runtime.broker.stream import Stream
from turboserve.bench.simulate.faults import Faults
from turboserve.bench.simulate.scenario import run_scenario
from turboserve.scheduler.placement import Choice, Cluster, Demand, MinMax

SHORT_S = 10.0
BUSY = Faults(crash={"worker": 0.05}, cut={"worker": 0.1}, freeze={"worker": 0.1}, late_request=0.1)


def violations(seeds: Iterable[int], faults: Faults | None = None, seconds: float = SHORT_S) -> set[str]:
    """Names of the invariants that are violated in any of these seeds; stops at the first seed with one."""
    for seed in seeds:
        outcome = run_scenario(seed, seconds=seconds, faults=faults)
        if outcome.violations:
            return set(outcome.violations)
    return set()


def without_fence(prefix: str) -> Callable[..., float]:
    """`Stream._check` that does not look at the expected sequence of what is appended on `prefix`."""
    check = Stream._check

    def checked(self: Stream, subject: str, headers: Mapping[str, str]) -> float:
        if subject.startswith(prefix):
            headers = {name: value for name, value in headers.items() if "Expected" not in name}
        return check(self, subject, headers)

    return checked


def all_on_the_first(self: MinMax, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
    """`MinMax.assign` that looks at nothing."""
    names = [candidate.worker for candidate in cluster.candidates()]
    return [Choice(demand.session, names[0] if names else None, "the first") for demand in demands]


def patched(target: Any, name: str, before: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls `before` with the method itself and its arguments."""
    original = getattr(target, name)

    def method(*args: Any, **options: Any) -> Any:
        return before(original, *args, **options)

    return method
