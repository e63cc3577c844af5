"""Keeps the quotas of workers up to date: solves again on a change, and not too often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from turboserve.allocation.classes import SessionClass
from turboserve.allocation.linear import SolverError
from turboserve.scheduler.placement.quotas import Quotas, Worker, quotas_of
from turboserve.scheduler.placement.shares import Cells, Demand, Kind, Shares, solve_shares
from turboserve.scheduler.placement.types import Candidate

LEAST_INTERVAL_S = 1.0
"""Least time between two solutions."""
OLD_S = 5.0
"""Quotas that lack a change for longer than this are not used: placement is then min-max alone."""

Solve = Callable[[Sequence[Kind], Demand, Cells], Shares]
"""Decides the shares: kinds, demand and present placement. Baselines replace it."""


@dataclass
class ShareKeeper:
    """Keeps the quotas of the workers. Solves again on a change, at most once in `least_interval_s`."""

    solve: Solve = solve_shares
    least_interval_s: float = LEAST_INTERVAL_S
    old_s: float = OLD_S
    solved: int = 0
    """Number of programs solved."""
    failed: str | None = None
    """Why the last program was not solved; None: it was."""
    shares: Shares | None = None
    _quotas: Quotas = field(default_factory=dict)
    _input: tuple[object, ...] | None = None
    _at: float = -inf
    _since: float | None = None
    """Time of the first change that the quotas lack. None: they are of the present input."""

    def update(self, candidates: Sequence[Candidate], waiting: Iterable[SessionClass], now: float) -> None:
        """Note the present workers and sessions, and solve if it is time. `now`: monotonic seconds."""
        workers = [
            Worker(c.worker, c.capability, dict(c.counts))
            for c in candidates
            if c.capability is not None and not c.suspect
        ]
        more = Counter(waiting)
        given = (tuple((w.name, w.capability, tuple(sorted(w.counts.items()))) for w in workers), more)
        if given == self._input:
            return
        if self._since is None:
            self._since = now
        if now < self._at + self.least_interval_s:
            return
        self._at = now
        try:
            self.shares, self._quotas = solve_quotas(self.solve, workers, more)
        except SolverError as error:
            self.failed = str(error)
            return
        self.failed, self._input, self._since = None, given, None
        self.solved += 1

    def quotas(self, now: float) -> Quotas:
        """Return the quotas by worker and class; empty if they are too old to be used."""
        if self._since is not None and now - self._since > self.old_s:
            return {}
        return self._quotas


@dataclass(frozen=True)
class ShareProblem:
    """Workers and sessions for which shares are wanted."""

    workers: tuple[Worker, ...]
    """Workers that may get sessions, with those that they have."""
    waiting: Mapping[SessionClass, int]
    """Further sessions by class."""


def quotas_of_problems(solve: Solve, problems: Iterable[ShareProblem]) -> Quotas:
    """Return the quotas of all workers. The problems have different workers. Raises SolverError."""
    quotas: Quotas = {}
    for problem in problems:
        quotas |= solve_quotas(solve, problem.workers, problem.waiting)[1]
    return quotas


def solve_quotas(
    solve: Solve, workers: Sequence[Worker], waiting: Mapping[SessionClass, int]
) -> tuple[Shares, Quotas]:
    """Return the shares and the quotas. With one class there are no quotas. Raises SolverError."""
    by_kind = kinds_of(workers)
    kinds = [Kind(name, len(of_kind), of_kind[0].capability) for name, of_kind in by_kind.items()]
    placed: Counter[tuple[str, SessionClass]] = Counter()
    demand = Counter(waiting)
    for kind, of_kind in by_kind.items():
        for worker in of_kind:
            demand.update(worker.counts)
            for one, count in worker.counts.items():
                placed[kind, one] += count
    shares = solve(kinds, demand, placed)
    if len(demand) < 2:
        # Min-max is the optimum of one class.
        return shares, {}
    return shares, quotas_of(by_kind, kinds, shares, demand)


def kinds_of(workers: Iterable[Worker]) -> dict[str, list[Worker]]:
    """Group workers of equal capability. A kind has the name of its first worker."""
    names: dict[object, str] = {}
    found: dict[str, list[Worker]] = {}
    for worker in workers:
        capability = worker.capability
        key = (
            tuple(sorted(capability.sessions.items())),
            tuple(sorted(capability.state_bytes.items())),
            capability.memory_bytes,
        )
        found.setdefault(names.setdefault(key, worker.name), []).append(worker)
    return found
