"""Shares of classes in the running scheduler: the problems of its view, and the quotas in force.

`ShareRefresh` says when they are solved. The core asks by a command, and the shell solves in a thread. So no
event waits for the solver. Until an answer comes, the former quotas hold. Sessions come between two
solutions: quotas have room for a few more sessions of each class (`AHEAD`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import ceil

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.scheduler.class_views import counts_on
from turboserve.scheduler.messages import SharesSolved, SolveShares
from turboserve.scheduler.placement import Cluster
from turboserve.scheduler.placement.pool import LatencyCurve, slots
from turboserve.scheduler.placement.quotas import Quotas, ShareProblem, Worker
from turboserve.scheduler.placement.share_refresh import ShareRefresh
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_classes import entry_name
from turboserve.scheduler.worker_view import WorkerView

AHEAD = 0.1
"""Part of a class's sessions for which quotas have room beyond the present ones. At least one session."""


class LiveShares:
    """Keeps the quotas of a cluster. Its only input beside the view are solutions and the time."""

    def __init__(self, view: View, timeout_s: float, target_chunk_s: float | None) -> None:
        """`timeout_s`: a worker is suspect by this time-out. `target_chunk_s`: see `Cluster`."""
        self._view, self._timeout_s, self._target_s = view, timeout_s, target_chunk_s
        self._refresh = ShareRefresh()
        self._ticket: int | None = None
        """Of the command under way."""
        self._seen = -1
        """`Cluster.changes` when changes were last noted."""

    @property
    def failed(self) -> str | None:
        """Why the last problem was not solved. None: it was."""
        return self._refresh.failed

    def update(self, cluster: Cluster, now: float, listened: float) -> list[SolveShares]:
        """Note changes of the cluster, and drop old quotas. Returns the command to send now, if any."""
        self._note(cluster, now)
        commands: list[SolveShares] = []
        problems = self._refresh.next(
            lambda: tuple(problems_of(self._view, listened, self._timeout_s, self._target_s)), now
        )
        if problems:
            self._ticket = self._view.stamp()
            commands.append(SolveShares(self._ticket, problems))
        elif problems is not None:
            # Min-max is the optimum of one class.
            self._put(cluster, {})
        if self._refresh.are_old(now):
            self._put(cluster, {})
            self._refresh.check_answer(now)
        return commands

    def solved(self, event: SharesSolved, cluster: Cluster, now: float) -> None:
        """Apply a solution. After a failure the former quotas hold until they are old."""
        if event.ticket != self._ticket:
            return
        # Changes since `update`: of migrations that began after it, and of workers that are suspect by now.
        self._note(cluster, now)
        self._ticket = None
        if event.quotas is None:
            self._refresh.not_solved(event.error)
            return
        self._refresh.solved()
        self._put(cluster, self._by_entry(event.quotas))

    def _note(self, cluster: Cluster, now: float) -> None:
        """Note whether the cluster has changed since this was last called."""
        if cluster.changes != self._seen:
            self._seen = cluster.changes
            self._refresh.changed(now)

    def _put(self, cluster: Cluster, quotas: Mapping[str, Mapping[str, int]]) -> None:
        cluster.put_quotas(quotas)
        # Quotas are no change that they depend on.
        self._seen = cluster.changes

    def _by_entry(self, quotas: Quotas) -> dict[str, dict[str, int]]:
        """Return quotas by class and by entry of the cluster."""
        found: dict[str, dict[str, int]] = {}
        for name, counts in quotas.items():
            worker = self._view.workers.get(name)
            if worker is None:
                continue
            for one, count in counts.items():
                entry = name if worker.classes is None else entry_name(name, one.name)
                found.setdefault(one.name, {})[entry] = count
        return found


def problems_of(
    view: View, listened: float, timeout_s: float, target_chunk_s: float | None = None
) -> Iterator[ShareProblem]:
    """Yield the problems of all workers that share classes, directly or through others.

    Only those with sessions of several classes count, and of these only the classes with sessions.
    """
    if all(worker.classes is None for worker in view.workers.values()):
        return
    waiting = _waiting(view)
    usable = [
        worker
        for worker in view.workers.values()
        if worker.ready and not worker.is_suspect(listened, timeout_s)
    ]
    for workers in _connected(usable):
        served = {model for worker in workers for model in _capacities(worker)}
        counts = {worker.id: counts_on(view, worker) for worker in workers}
        wanted = Counter({model: waiting[model] for model in served if waiting[model]})
        for held in counts.values():
            wanted.update({model: count for model, count in held.items() if count and model in served})
        if len(wanted) < 2:
            continue
        ahead = {model: waiting[model] + max(1, ceil(AHEAD * count)) for model, count in wanted.items()}
        yield ShareProblem(
            tuple(_worker_of(worker, counts[worker.id], target_chunk_s) for worker in workers),
            {SessionClass.of_name(model): count for model, count in sorted(ahead.items())},
        )


def _waiting(view: View) -> Counter[str]:
    """Count by class the sessions that need a worker and have no slot."""
    waiting: Counter[str] = Counter()
    for name in view.wanting:
        session = view.sessions[name]
        owner = view.workers.get(session.record.worker or "")
        if view.kind(session) is not None and session.reserved_on is None:
            waiting[session.record.model] += owner is None or name not in owner.used
    return waiting


def _connected(workers: Iterable[WorkerView]) -> list[list[WorkerView]]:
    """Group workers that serve a class in common, directly or through other workers, in order of id."""
    groups: list[tuple[set[str], list[WorkerView]]] = []
    for worker in sorted(workers, key=lambda worker: worker.id):
        models, members = set(_capacities(worker)), [worker]
        apart = []
        for group in groups:
            if group[0] & models:
                models |= group[0]
                members = [*group[1], *members]
            else:
                apart.append(group)
        groups = [*apart, (models, members)]
    return [sorted(members, key=lambda worker: worker.id) for _, members in groups]


def _capacities(worker: WorkerView) -> Mapping[str, int]:
    return {worker.model: worker.capacity} if worker.classes is None else dict(worker.classes.capacities)


def _worker_of(worker: WorkerView, counts: Mapping[str, int], target_s: float | None) -> Worker:
    profiles: dict[str, Mapping[int, float]] = {worker.model: worker.chunk_latency_s}
    if worker.classes is not None:
        profiles = {one.model: one.chunk_latency_s for one in worker.classes.served}
    sessions = {
        SessionClass.of_name(model): slots(LatencyCurve(profiles[model], alone), alone, target_s)
        for model, alone in _capacities(worker).items()
    }
    held = {SessionClass.of_name(model): count for model, count in counts.items() if count}
    return Worker(worker.id, Capability(sessions), held)
