"""What the view says of workers that serve several classes: their entries in the cluster, and their room."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from math import ceil

from turboserve.contracts.worker_offers import ServedClass
from turboserve.scheduler.placement import Choice, Cluster, Demand, Migration, SessionState, WorkerState
from turboserve.scheduler.session_view import SessionView
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_classes import WorkerClasses, beside, entry_name, worker_of
from turboserve.scheduler.worker_view import WorkerView


def counts_on(view: View, worker: WorkerView, besides: str | None = None) -> Mapping[str, int]:
    """Return how many sessions of each class `WorkerView.load` counts."""
    if besides is None and not worker.reserved and not worker.incoming:
        # The usual case. Load feedback reads the load of all workers after every decision.
        return worker.used_of
    counts = worker.used_of.copy()
    for name in (worker.reserved | worker.incoming) - worker.used:
        if name in view.sessions:
            counts[view.sessions[name].record.model] += 1
    if besides in view.sessions and besides in worker.load_names:
        counts[view.sessions[besides].record.model] -= 1
    return counts


def is_full(view: View, worker: str, session: SessionView) -> bool:
    """Whether a worker that serves several classes lacks room for the session.

    Decisions that are made together count only those of their own class. So each is checked again.
    """
    known = view.workers.get(worker)
    if known is None or known.classes is None:
        return False
    return free_of(view, known, session.record.model, session.id) < 1


def free_of(view: View, worker: WorkerView, model: str, besides: str | None = None) -> int:
    """Return how many more sessions of a class the worker takes. Not above 0: none."""
    if worker.classes is None:
        return worker.capacity - worker.load
    one = worker.classes.of(model)
    if one is None:
        return 0
    counts = counts_on(view, worker, besides)
    return one.capacity - counts.get(model, 0) - worker.classes.taken(model, counts)


def with_entries(view: View, state: SessionState) -> SessionState:
    """Return the state with the entries of its class in the place of workers that serve several."""
    named = (state.worker, state.target, state.reserved, *state.excluded, *state.left)
    names = _entries(view, named, state.model)
    if not names:
        return state
    return replace(
        state,
        worker=names.get(state.worker, state.worker),
        target=names.get(state.target, state.target),
        reserved=names.get(state.reserved, state.reserved),
        excluded=frozenset(names.get(one, one) for one in state.excluded),
        left={names.get(worker, worker): stamp for worker, stamp in state.left.items()},
    )


def demand_with_entries(view: View, demand: Demand) -> Demand:
    """As `with_entries`, for a demand."""
    names = _entries(view, (demand.holder, demand.counted_on, *demand.excluded), demand.model)
    if not names:
        return demand
    return replace(
        demand,
        holder=names.get(demand.holder, demand.holder),
        counted_on=names.get(demand.counted_on, demand.counted_on),
        excluded=frozenset(names.get(one, one) for one in demand.excluded),
    )


def _entries(view: View, workers: Iterable[str | None], model: str) -> dict[str | None, str]:
    """Return the entry of each of these workers that serves several classes, for a session of `model`."""
    return {name: entry_name(name, model) for name in several_of(view, filter(None, workers))}


def several_of(view: View, workers: Iterable[str]) -> list[str]:
    """Return those of the workers that serve several classes."""
    return [
        name
        for name in workers
        if (known := view.workers.get(name)) is not None and known.classes is not None
    ]


def shared_workers(cluster: Cluster, sessions: Iterable[str]) -> set[str]:
    """Return the workers of several classes on which these sessions count, by the cluster."""
    states = (state for name in sessions if (state := cluster.sessions.get(name)) is not None)
    names = {name for one in states for name in (one.worker, one.target, one.reserved) if name}
    return {worker_of(name) for name in names if "/" in name}


def choice_of_worker(choice: Choice) -> Choice:
    """Return the choice of an entry as that of its worker."""
    if choice.worker is None or "/" not in choice.worker:
        return choice
    reason = _of_workers(choice.reason, choice.worker)
    return replace(choice, worker=worker_of(choice.worker), reason=reason)


def migration_of_workers(migration: Migration) -> Migration:
    """Return the migration between two entries as that between their workers. A worker of one class may be
    either."""
    if "/" not in migration.source and "/" not in migration.target:
        return migration
    source, target = worker_of(migration.source), worker_of(migration.target)
    reason = _of_workers(migration.reason, migration.source, migration.target)
    return replace(migration, source=source, target=target, reason=reason)


def _of_workers(reason: str, *entries: str) -> str:
    """Return the reason with workers in the place of all entries of this class."""
    model = next(one.partition("/")[2] for one in entries if "/" in one)
    return re.sub(rf"/{re.escape(model)}(?![\w-])", "", reason)


def worker_states(view: View, worker: WorkerView, state: WorkerState) -> dict[str, WorkerState]:
    """Return the entries of a worker by name: `state` alone, or one for each of its classes."""
    if worker.classes is None:
        return {worker.id: state}
    counts = counts_on(view, worker)
    return {
        entry_name(worker.id, one.model): _entry(state, worker.classes, one.model, counts)
        for one in worker.classes.served
    }


def _entry(state: WorkerState, classes: WorkerClasses, model: str, counts: Mapping[str, int]) -> WorkerState:
    one = classes.of(model)
    assert one is not None
    taken = classes.taken(model, counts)
    return replace(
        state,
        id=entry_name(state.id, model),
        model=model,
        capacity=max(0, one.capacity - taken),
        weights_digest=one.weights_digest,
        chunk_latency_s=beside(one.chunk_latency_s, one.capacity, taken),
        absorbs=False,
    )


class ClassLoad:
    """Numbers of sessions for the load feedback of a class, in sessions of that class.

    Sessions of other classes count where workers serve both: n_c / n_j each. Sums over workers are exact.
    """

    def __init__(self, view: View) -> None:
        self._view = view

    @cached_property
    def _kinds(self) -> list[WorkerClasses]:
        """The workers' classes, once for each set of n_j."""
        several = (worker.classes for worker in self._view.workers.values() if worker.classes is not None)
        return list({classes.capacities: classes for classes in several}.values())

    def part(self, worker: WorkerView, model: str, slots: int) -> float:
        """Part of these slots of a class that `WorkerView.load` takes."""
        if worker.classes is None:
            return worker.load / slots
        units = worker.classes.units
        return units.of(model, counts_on(self._view, worker)) / (units.whole * slots)

    def slots(self, cluster: Cluster, worker: WorkerView, model: str) -> int:
        """Slots of a worker for sessions of a class, those in use included."""
        if worker.classes is None:
            return cluster.slots(worker.id)
        taken = worker.classes.taken(model, counts_on(self._view, worker))
        return cluster.slots(entry_name(worker.id, model)) + taken

    def floor_slots(self, cluster: Cluster, worker: WorkerView, model: str) -> int:
        """As `slots`, at the least fidelity. Workers of several classes lower none."""
        if worker.classes is None:
            return cluster.floor_slots(worker.id)
        return self.slots(cluster, worker, model)

    def of_all(self, model: str, counts: Mapping[str, int]) -> Fraction:
        """Slots of a class that these sessions will take, those of other classes included."""
        wanted = ((name, count) for name, count in counts.items() if count)
        return sum((_wanted(self._kinds, model, name, count) for name, count in wanted), Fraction())


def _wanted(kinds: Iterable[WorkerClasses], model: str, other: str, count: int) -> Fraction:
    """Return the slots of a class that sessions of another one take where they take most. 0: nowhere any.

    If all workers that serve both classes have n_j = 0 of the other, as where its slabs hold paused sessions,
    its sessions take a whole worker together: none of these workers takes one, and a new worker will say how
    many it takes.
    """
    if other == model:
        return Fraction(count)
    both = [(mine.capacity, its.capacity) for mine, its in _pairs(kinds, model, other)]
    costs = [Fraction(mine, its) for mine, its in both if its]
    return count * max(costs) if costs else Fraction(max((mine for mine, _ in both), default=0))


def _pairs(
    kinds: Iterable[WorkerClasses], model: str, other: str
) -> Iterator[tuple[ServedClass, ServedClass]]:
    """Yield two classes of each worker that serves both."""
    for one in kinds:
        mine, its = one.of(model), one.of(other)
        if mine is not None and its is not None:
            yield mine, its


def most_slots(view: View, model: str, counts: Mapping[str, int]) -> int:
    """Return how many slots of a class these sessions take at most."""
    return ceil(ClassLoad(view).of_all(model, counts))


def classes_of(worker: WorkerView) -> list[tuple[str, str | None]]:
    """Return model and digest of each class that the worker serves."""
    if worker.classes is None:
        return [(worker.model, worker.weights_digest)]
    return [(one.model, one.weights_digest) for one in worker.classes.served]
