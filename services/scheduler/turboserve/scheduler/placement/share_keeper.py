"""Keeps the quotas of workers up to date by solving at once what `ShareRefresh` has due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from turboserve.allocation.classes import SessionClass
from turboserve.allocation.linear import SolverError
from turboserve.scheduler.placement.quotas import Quotas, ShareProblem, Worker, quotas_of
from turboserve.scheduler.placement.share_refresh import ShareRefresh
from turboserve.scheduler.placement.shares import Cells, Demand, Kind, Shares, solve_shares
from turboserve.scheduler.placement.types import Candidate

Solve = Callable[[Sequence[Kind], Demand, Cells], Shares]
"""Decides the shares: kinds, demand and present placement. Baselines replace it."""


class ShareKeeper:
    """Keeps the quotas of the workers, where nothing else happens while they are solved."""

    def __init__(self, solve: Solve = solve_shares) -> None:
        self.solve = solve
        self.solved = 0
        """Number of problems solved."""
        self._refresh = ShareRefresh()
        self._quotas: Quotas = {}
        self._seen: ShareProblem | None = None

    @property
    def failed(self) -> str | None:
        """Why the last problem was not solved; None: it was."""
        return self._refresh.failed

    def update(self, candidates: Sequence[Candidate], waiting: Iterable[SessionClass], now: float) -> None:
        """Note the present workers and sessions, and solve if it is time. `now`: monotonic seconds."""
        workers = tuple(
            Worker(c.worker, c.capability, dict(c.counts))
            for c in candidates
            if c.capability is not None and not c.suspect
        )
        present = ShareProblem(workers, Counter(waiting))
        if present != self._seen:
            self._seen = present
            self._refresh.changed(now)
        problems = self._refresh.next(lambda: (present,), now)
        if problems is None:
            return
        try:
            self._quotas = quotas_of_problems(self.solve, problems)
        except SolverError as error:
            self._refresh.not_solved(str(error))
            return
        self._refresh.solved()
        self.solved += 1

    def quotas(self, now: float) -> Quotas:
        """Return the quotas by worker and class; empty if they are too old to be used."""
        return {} if self._refresh.are_old(now) else self._quotas


def quotas_of_problems(solve: Solve, problems: Iterable[ShareProblem]) -> Quotas:
    """Return the quotas of all workers. The problems have different workers. Raises SolverError."""
    quotas: Quotas = {}
    for problem in problems:
        quotas |= solve_quotas(solve, problem.workers, problem.waiting)
    return quotas


def solve_quotas(solve: Solve, workers: Sequence[Worker], waiting: Mapping[SessionClass, int]) -> Quotas:
    """Return the quotas. With one class there are none. Raises SolverError."""
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
        return {}
    return quotas_of(by_kind, kinds, shares, demand)


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
