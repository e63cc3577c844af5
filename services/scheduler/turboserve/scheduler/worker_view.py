"""One worker in the scheduler's view, its states, and how silence makes it suspect, looked up or gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from turboserve.contracts.decoding import DecodeCapacity
from turboserve.contracts.loans import WorkerLoan
from turboserve.contracts.workers import LoadReport, MigrationReport, WorkerPhase, WorkerRecord
from turboserve.scheduler.profiles import curves_differ, profiles_differ
from turboserve.scheduler.worker_classes import WorkerClasses, newest_classes

LONGEST_GAP_S = 1.0
"""Longest gap between two events that counts in full. In a longer one the scheduler itself was delayed."""
SUSPECT_AFTER = 1 / 3
"""Part of the time-out after which a silent worker is suspect: it gets sessions only as a last resort."""
LOOK_AFTER = 1 / 6
"""Part of the time-out after which a silent worker's row is read."""
LOOK_EVERY = 1 / 4
"""Part of the time-out between two reads of a silent worker's row."""


class ListeningTime:
    """Seconds during which this process was able to receive workers' reports.

    Listening time does not advance while the broker is disconnected, and a gap between two events counts for
    at most `LONGEST_GAP_S`. So no pause of the scheduler makes a worker time out. Listening time is never
    faster than real time, so a worker's lease always ends before the worker is declared gone.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._last: float | None = None
        self._connected = False

    def advance(self, now: float, connected: bool | None = None) -> None:
        """Advance to monotonic time `now`. `connected`: new connection state; None: unchanged."""
        if self._last is not None and self._connected:
            self.now += min(max(now - self._last, 0.0), LONGEST_GAP_S)
        self._last = now if self._last is None else max(now, self._last)
        if connected is not None:
            self._connected = connected


class ChangeTracked:
    """Calls `changed` whenever a field in `TRACKED_FIELDS` is set.

    So the cluster projection reads only what has changed. A change inside a field's value is not noticed.
    """

    TRACKED_FIELDS: ClassVar[frozenset[str]] = frozenset()
    changed: Callable[[], None] | None

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in self.TRACKED_FIELDS and (changed := self.__dict__.get("changed")) is not None:
            changed()


_READY = WorkerPhase.READY


@dataclass(frozen=True)
class Serving:
    """The worker's process serves, or will once it has loaded its model."""

    phase: WorkerPhase
    """As last reported. A late report of an earlier process may show any phase."""
    started_at: float = 0.0
    """Start of the process, wall-clock seconds; compared only with its other values."""


@dataclass(frozen=True)
class Draining:
    """The worker's process drains. That lasts until the process ends."""

    phase: WorkerPhase
    """As last reported. A report from before the drain may arrive late."""
    started_at: float = 0.0
    """See `Serving`."""


WorkerProcess = Serving | Draining
"""What the worker's process does with sessions. A new process under the same id serves again."""


@dataclass(frozen=True)
class Undeclared:
    """No declaration that the worker is gone is under way."""

    until: float = 0.0
    """The worker is not declared gone before this time, because a declaration has failed."""


@dataclass(frozen=True)
class Declaring:
    """A command that declares the worker gone is under way."""


Declaration = Undeclared | Declaring


@dataclass
class WorkerView(ChangeTracked):
    """One worker that is not gone."""

    TRACKED_FIELDS = frozenset(
        {"capacity", "process", "declaration", "full_until", "host", "provides_state", "chunk_latency_s"}
        | {"weights_digest", "floor_capacity", "floor_chunk_latency_s", "changed_outside", "classes"}
        | {"quality_debt", "deficit", "decoding", "loan"}
    )

    id: str
    model: str
    capacity: int
    process: WorkerProcess
    heard_at: float
    """Listening time (see `ListeningTime`) of the worker's last report, or of its addition to the view."""
    looked_at: float
    """Listening time at which the newest read of the worker's row was requested."""
    renewed_at: float
    """`renewed_at` of the worker's row, by the store's clock; compared only with its other values."""
    renewal_seen_at: float = 0.0
    """Listening time at which a read first showed the newest renewal."""
    known_since: int = 0
    """Stamp of the worker's addition to the view."""
    declaration: Declaration = field(default_factory=Undeclared)
    host: str = ""
    weights_digest: str | None = None
    """Digest of the worker's weights. None: not known."""
    classes: WorkerClasses | None = None
    """The classes of a worker that serves several. None: it serves `model` alone."""
    provides_state: bool = False
    """Whether other workers can request the state of sessions from the worker."""
    chunk_latency_s: dict[int, float] = field(default_factory=dict)
    """Measured profile: seconds of a chunk by number of sessions in the batch."""
    known_latency_s: Mapping[int, float] = field(default_factory=dict)
    """`chunk_latency_s` when the curve through it last changed by more than `NOISE`."""
    floor_capacity: int = 0
    """K_floor as last reported. 0: the worker lowers no quality, or its row alone is known."""
    floor_chunk_latency_s: dict[int, float] = field(default_factory=dict)
    """As `chunk_latency_s`, at the floor's configuration."""
    quality_debt: float = 0.0
    """Share of the worker's chunks of the last minute that the load has lowered."""
    deficit: float = 0.0
    """Number of late chunks that the worker expects."""
    loan: WorkerLoan | None = None
    """The loan in which the worker takes part, as last reported."""
    decoding: DecodeCapacity | None = None
    """The decode workers that may limit `capacity`. None: none are known."""
    used: set[str] = field(default_factory=set)
    """Sessions whose rows hold a slot on the worker."""
    used_of: Counter[str] = field(default_factory=Counter)
    """Class → number of sessions in `used`."""
    reserved: set[str] = field(default_factory=set)
    """Sessions with a slot reserved on the worker by a decision that is not confirmed yet."""
    incoming: set[str] = field(default_factory=set)
    """Sessions that hold a slot and whose rows name the worker as migration target."""
    arrivals: dict[str, MigrationReport] = field(default_factory=dict)
    """Session → the worker's last report about the session's migration to it."""
    holding: set[str] = field(default_factory=set)
    """Suspended sessions whose rows name the worker as owner."""
    full_until: float = 0.0
    """The worker gets no session before this time, because the store reported it full."""
    changed_outside: int = 0
    """Stamp of the last change of the worker or of its sessions that the rebalancer did not cause."""
    changed: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def __setattr__(self, name: str, value: object) -> None:
        # Each report repeats most fields.
        if name not in self.TRACKED_FIELDS or name not in (known := self.__dict__) or known[name] != value:
            super().__setattr__(name, value)

    @property
    def speed(self) -> tuple[object, ...]:
        """What decides how many sessions the worker can run."""
        return self.process, self.capacity, self.known_latency_s, self.classes and self.classes.speed

    def serves(self, model: str) -> bool:
        """Whether the worker serves sessions of this class."""
        return self.model == model if self.classes is None else self.classes.of(model) is not None

    def digest_of(self, model: str) -> str | None:
        """Digest of the weights that sessions of a class run on. None: not known."""
        one = None if self.classes is None else self.classes.of(model)
        return self.weights_digest if one is None else one.weights_digest

    def declares(self, weights_digest: str | None, of: LoadReport | WorkerRecord) -> None:
        """Apply the weights and the classes of a report or a row, after its phase (`reported`)."""
        self.weights_digest = weights_digest
        late = of.phase is WorkerPhase.STARTING or 0.0 < of.started_at < self.process.started_at
        if (newest := newest_classes(of.classes, self.classes, late=late)) is not self.classes:
            self.classes = newest

    def hold(self, session: str, model: str) -> None:
        """Add a session to `used`."""
        if session not in self.used:
            self.used.add(session)
            self.used_of[model] += 1

    def unhold(self, session: str, model: str) -> None:
        """Remove a session from `used`."""
        if session in self.used:
            self.used.remove(session)
            self.used_of[model] -= 1

    @property
    def load(self) -> int:
        """Number of sessions that hold a slot, migrate to the worker or have a slot reserved."""
        if not self.reserved and not self.incoming:
            # The usual case.
            return len(self.used)
        return len(self.load_names)

    @property
    def load_names(self) -> set[str]:
        """The sessions that `load` counts."""
        return self.used | self.reserved | self.incoming

    @property
    def draining(self) -> bool:
        return isinstance(self.process, Draining)

    @property
    def ready(self) -> bool:
        """Whether the worker may get sessions."""
        process = self.process
        return (
            process.phase is _READY
            and isinstance(process, Serving)
            and isinstance(self.declaration, Undeclared)
        )

    def measured(self, chunk_latency_s: Mapping[int, float]) -> None:
        """Apply a profile (seconds of a chunk by batch size) if it differs by more than `NOISE`."""
        if profiles_differ(chunk_latency_s, self.chunk_latency_s):
            self.chunk_latency_s = dict(chunk_latency_s)
            if curves_differ(self.chunk_latency_s, self.known_latency_s):
                self.known_latency_s = self.chunk_latency_s

    def reported_limits(self, report: LoadReport) -> None:
        """Apply what a load report says about lower fidelity, decode workers and loans."""
        self.decoding, self.loan = report.decoding, report.loan
        self.floor_capacity = report.floor_capacity or 0
        if profiles_differ(report.floor_chunk_latency_s, self.floor_chunk_latency_s):
            self.floor_chunk_latency_s = dict(report.floor_chunk_latency_s)
        self.quality_debt, self.deficit = report.quality_debt, report.deficit

    def reported(self, phase: WorkerPhase, started_at: float) -> None:
        """Apply the phase of a report or a row. `started_at`: start of the process; 0.0 if not reported."""
        process = self.process
        if phase is process.phase is not WorkerPhase.DRAINING and started_at in (0.0, process.started_at):
            return  # The usual case: nothing has changed.
        if started_at > process.started_at:
            drains = phase is WorkerPhase.DRAINING
        else:
            of_this_process = started_at in (0.0, process.started_at)
            drains = self.draining or (phase is WorkerPhase.DRAINING and of_this_process)
            started_at = process.started_at
        self.process = Draining(phase, started_at) if drains else Serving(phase, started_at)

    def looked(self, renewed_at: float, asked_at: float, listened: float) -> None:
        """Note a read of the worker's row, requested at `asked_at` and answered at `listened`.

        Both are listening times. A changed `renewed_at` shows that the worker has renewed since the last
        read, even if no report arrived. Values of `renewed_at` (the store's wall clock) are compared only
        with each other.
        """
        self.looked_at = max(self.looked_at, asked_at)
        if renewed_at > self.renewed_at:
            self.renewed_at, self.renewal_seen_at = renewed_at, listened

    def is_suspect(self, listened: float, timeout_s: float) -> bool:
        return listened - self.heard_at > timeout_s * SUSPECT_AFTER

    def is_dead(self, listened: float, timeout_s: float, lease_s: float) -> bool:
        """Whether the worker is silent for the time-out and its row, read later, shows no renewal.

        So a worker that renews is not declared gone because its load reports are lost. A worker that does not
        renew has stopped its sessions, because its lease is over, before other workers get them.
        """
        return (
            listened - self.heard_at >= timeout_s
            and self.looked_at >= self.heard_at + timeout_s
            and self.looked_at - self.renewal_seen_at >= lease_s
        )

    def wants_look(self, listened: float, timeout_s: float) -> bool:
        """Whether to read the worker's row because the worker is silent."""
        silent_s = listened - self.heard_at
        if silent_s < timeout_s * LOOK_AFTER:
            return False
        if silent_s >= timeout_s and self.looked_at < self.heard_at + timeout_s:
            return True
        return listened - self.looked_at >= timeout_s * LOOK_EVERY
