"""What the autoscaler sees of the scheduler's view: the load of each model's workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.decoding import DecodeCapacity
from turboserve.contracts.loans import LoanRole
from turboserve.contracts.pool import LoadFeedback
from turboserve.scheduler.class_views import ClassLoad
from turboserve.scheduler.messages import SendFeedback
from turboserve.scheduler.placement import Cluster
from turboserve.scheduler.projections import ClusterProjection
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_view import WorkerView


class Feedback:
    """Decides when to send load feedback, by what was last sent and when."""

    def __init__(self, view: View, projection: ClusterProjection, every_s: float) -> None:
        self._view, self._projection = view, projection
        self._every_s = every_s
        self._sent_at: float | None = None
        self._sent: list[LoadFeedback] = []
        self._loads = WorkerLoads(view)

    def reports(self, cluster: Cluster, decisions: int, now: float, quiet: bool) -> list[SendFeedback]:
        """Return the load feedback to send now: if it has changed, or if `every_s` has passed.

        `cluster` knows K and K_floor of the workers. `quiet`: nothing was decided, so the load is not
        computed before `every_s` has passed.
        """
        due = self._sent_at is None or now >= self._sent_at + self._every_s
        if quiet and not due:
            return []
        self._loads.update(cluster, self._projection.changed_loads)
        self._projection.changed_loads.clear()
        load = load_feedback(self._view, self._loads, decisions)
        if not due and load == self._sent:
            return []
        self._sent_at, self._sent = now, load
        return [SendFeedback(one) for one in load]


@dataclass(frozen=True, slots=True)
class ClassRoom:
    """Load and room of one worker for sessions of one class, in sessions of that class."""

    model: str
    rho: float
    """Part of `slots` that sessions of all classes hold or reserve, also for migrations to the worker."""
    used: int
    """Sessions of all classes that hold a slot."""
    required: int
    """Slots in use, times `whole`."""
    whole: int
    """1, or `SlotUnits.whole` of a worker that serves several classes."""
    own: int
    """Sessions of the class that hold a slot."""
    slots: int
    """K, or 0 if the worker gets no sessions."""
    floor_slots: int
    """K_floor, or 0 if the worker gets no sessions."""
    lowers: bool
    """Whether the worker reports K_floor."""
    denoised: int
    """`slots` without the limit of decode workers."""
    decoding: DecodeCapacity | None
    """The worker's decode workers. None: none are known."""
    debt: float
    """The worker's quality debt, weighted with `used`."""
    deficit: float
    borrows: bool
    """Whether the worker borrows another one's device."""


class WorkerLoads:
    """The `ClassRoom` of each worker, read again only where something has changed."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._rooms: dict[str, list[ClassRoom]] = {}

    def update(self, cluster: Cluster, changed: Iterable[str]) -> None:
        """Read the workers named `changed` again, or remove those that are gone."""
        workers, shared = self._view.workers, ClassLoad(self._view)
        for name in changed:
            if (worker := workers.get(name)) is not None:
                self._rooms[name] = list(_rooms(cluster, shared, worker))
        # In the order of the view: sums of floats depend on the order.
        self._rooms = {name: self._rooms[name] for name in workers}

    def by_model(self) -> defaultdict[str, list[ClassRoom]]:
        """Return the rooms of each model."""
        found: defaultdict[str, list[ClassRoom]] = defaultdict(list)
        for rooms in self._rooms.values():
            for room in rooms:
                found[room.model].append(room)
        return found


def _rooms(cluster: Cluster, shared: ClassLoad, worker: WorkerView) -> Iterator[ClassRoom]:
    used, ready = len(worker.used), worker.ready
    served = (worker.model,) if worker.classes is None else tuple(one.model for one in worker.classes.served)
    for model in served:
        slots = max(shared.slots(cluster, worker, model), 0) if ready else 0
        yield ClassRoom(
            model=model,
            rho=shared.part(worker, model, slots) if slots else 0.0,
            used=used,
            required=used if worker.classes is None else worker.classes.units.of(model, worker.used_of),
            whole=1 if worker.classes is None else worker.classes.units.whole,
            own=used if worker.classes is None else worker.used_of[model],
            slots=slots,
            floor_slots=shared.floor_slots(cluster, worker, model) if ready else 0,
            lowers=bool(worker.floor_capacity),
            denoised=_denoised(worker, slots),
            decoding=worker.decoding if slots else None,
            debt=used * worker.quality_debt,
            deficit=worker.deficit,
            borrows=worker.loan is not None and worker.loan.role is LoanRole.HOME,
        )


def _denoised(worker: WorkerView, slots: int) -> int:
    # Fewer slots than the worker reports are a limit of its latency, which no decode worker lifts.
    if worker.decoding is None or slots < worker.capacity:
        return slots
    return max(slots, worker.decoding.denoised)


def load_feedback(view: View, loads: WorkerLoads, decisions: int) -> list[LoadFeedback]:
    """Return one message per model that a worker serves or a session wants, ordered by name."""
    shared = ClassLoad(view)
    rooms = loads.by_model()
    waiting: Counter[str] = Counter()
    homeless: Counter[str] = Counter()
    """Sessions that need a worker and have no slot."""
    for name in view.wanting:
        session = view.sessions[name]
        if view.kind(session) is not None:
            waiting[session.record.model] += 1
            # A session that its worker refused still holds that worker's slot, and is counted there.
            owner = view.workers.get(session.record.worker or "")
            homeless[session.record.model] += owner is None or name not in owner.used
    models = {worker.model for worker in view.workers.values()} | rooms.keys() | homeless.keys()
    return [
        feedback_of(
            model,
            rooms[model],
            homeless[model],
            shared.of_all(model, homeless),
            ceil(shared.of_all(model, waiting)),
            decisions,
        )
        for model in sorted(models)
    ]


def feedback_of(
    model: str, rooms: list[ClassRoom], own_homeless: int, homeless: Fraction, waiting: int, decisions: int
) -> LoadFeedback:
    """Return the feedback about one model.

    `rooms`: of its workers. `homeless`: sessions without a slot, in sessions of the model; `own_homeless`:
    those of the model itself. `waiting`: sessions that want a worker.
    """
    # Each playing session makes the same number of chunks in a minute, so sessions are the weights.
    chunks = sum([room.used for room in rooms])
    debt = sum([room.debt for room in rooms]) / chunks if chunks else 0.0
    lowers = any(room.lowers for room in rooms)
    parts = (
        Fraction(sum([room.required for room in rooms if room.whole == whole]), whole)
        for whole in {room.whole for room in rooms}
    )
    required = ceil(sum(parts, homeless))
    own = own_homeless + sum([room.own for room in rooms])
    return LoadFeedback(
        model=model,
        rho_max=max([room.rho for room in rooms], default=0.0),
        required=required,
        own_required=None if own == required else own,
        # A session of another class may hold a slot of a worker where it takes less than on others.
        waiting=min(waiting, required),
        capacity=sum([room.slots for room in rooms]),
        workers=sum([room.slots > 0 for room in rooms]),
        quality_debt=min(debt, 1.0),
        deficit=sum([room.deficit for room in rooms]),
        floor_capacity=sum([room.floor_slots for room in rooms]) if lowers else None,
        decoding=_decoding(rooms),
        borrowing=sum([room.borrows for room in rooms]),
        decisions=decisions,
    )


def _decoding(rooms: list[ClassRoom]) -> DecodeCapacity | None:
    """Count by worker: some may decode themselves, and the others may ask different decode workers, or not
    know all of theirs yet."""
    known = [room.decoding for room in rooms if room.decoding is not None]
    if not known:
        return None
    each: dict[str, int] = {}
    for one in known:
        for worker, sessions in one.each.items():
            each[worker] = max(each.get(worker, 0), sessions)
    # A worker that names none asks the same ones.
    unnamed = [(one.workers, one.sessions) for one in known if not one.each]
    workers, sessions = max([(len(each), sum(each.values())), *unnamed])
    # One false report must not end the scheduler. The autoscaler refuses numbers of this size.
    return DecodeCapacity(
        workers=workers,
        sessions=min(sessions, NUMBER_LIMIT),
        denoised=min(sum([room.denoised for room in rooms]), NUMBER_LIMIT),
        own=sum([room.slots for room in rooms if room.decoding is None]),
    )
