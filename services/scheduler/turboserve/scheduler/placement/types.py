"""What placement reads and returns: workers, sessions, demands, choices, migrations, parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.contracts.fidelity import TIER_ALPHA
from turboserve.static_frozen import statically_frozen

SESSIONS_TRIED = 8
"""Number of sessions of one worker that are tried, if some are barred from the targets with room."""


@statically_frozen()
class WorkerState:
    """One worker that is not gone."""

    id: str
    model: str
    capacity: int
    """Slots that the worker's memory and its own limit allow. The target chunk latency may allow fewer."""
    floor_capacity: int = 0
    """K_floor: sessions that the worker carries if chunks get lower fidelity. 0: it lowers none."""
    absorbs: bool = False
    """Whether the worker may hold up to K_floor sessions for now, since capacity is on its way."""
    floor_chunk_latency_s: Mapping[int, float] = field(default_factory=dict)
    """As `chunk_latency_s`, at the floor's configuration. Empty: not measured."""
    weights_digest: str | None = None
    """Digest of the weights. Sessions migrate only between workers of equal weights. None: not known."""
    ready: bool = True
    """Whether the worker may get sessions: serving, not draining, not being declared gone, not reported
    full."""
    draining: bool = False
    """Whether all sessions of the worker, suspended ones too, must go to other workers."""
    suspect: bool = False
    """Whether the worker's report is overdue. The worker then gets sessions only as a last resort, and the
    rebalancer proposes no migration to or from it."""
    chunk_latency_s: Mapping[int, float] = field(default_factory=dict)
    """Measured profile L(b): seconds of a chunk by sessions in the batch. Empty: not measured."""
    changed_outside: int = 0
    """Stamp of the last change of the worker or its sessions that the rebalancer did not cause. Compared only
    with `SessionState.left`."""
    host: str = ""
    """The worker's machine, `HOST` or `NODE/HOST` (see `links`). Empty: not known, far from all others."""
    capability: Capability | None = None
    """What the worker serves of each class. None: `capacity` sessions of its model, whatever their class."""
    lends: bool = False
    """Whether it computes half of each forward of another worker's session. The loan ends when its own
    sessions need the device, so it takes no slot."""
    class_latency_s: Mapping[SessionClass, Mapping[int, float]] = field(default_factory=dict)
    """As `chunk_latency_s`, by class. A missing class takes equal parts of a chunk's playing time."""


@statically_frozen()
class SessionState:
    """One session that has not ended."""

    id: str
    model: str
    worker: str | None = None
    """Owner by the session's row. The owner of a suspended session holds its state in host memory."""
    suspended: bool = False
    """Whether the session holds only host memory on `worker`, and no slot."""
    target: str | None = None
    """Target of the session's migration, from the decision until the row shows the end. The session counts at
    source and target; unless it is suspended, it has a slot at both."""
    reserved: str | None = None
    """Worker with a slot reserved for the session by a decision that is not confirmed yet."""
    state_bytes: int = 0
    """Bytes that a migration of the session transfers. 0: not known; only the fixed cost counts."""
    weights_digest: str | None = None
    """Digest of the weights that made the session's state. None: no state yet, or not known."""
    movable: bool = True
    """Whether a migration may begin. False while a command is under way or the row is in doubt."""
    rests_until: float = 0.0
    """The session is not migrated for balance before this time (clock of `now` in `Rebalancer.propose`),
    because a migration of it has just ended. A drain does not wait for this time."""
    retries_at: float = 0.0
    """As `rests_until`, because its last migrations have failed. Other sessions of its worker do not wait."""
    excluded: frozenset[str] = frozenset()
    """Workers that have refused the session, or to which a migration of it has failed."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Worker → stamp at which the rebalancer's migration from there ended. While slack is used, the session
    does not return before an outside change (see `Planner.barred`). Drains and placements ignore this."""
    session_class: SessionClass | None = None
    """None: not declared. The session is then of the class that only its model tells."""

    @property
    def known_class(self) -> SessionClass:
        return self.session_class or SessionClass(self.model)


def class_counts(worker: WorkerState, sessions: Iterable[SessionState]) -> Counter[SessionClass]:
    """Count a worker's sessions by class; empty if the worker declares no capability."""
    return Counter() if worker.capability is None else Counter(one.known_class for one in sessions)


@dataclass(frozen=True)
class Candidate:
    """One worker that may get sessions."""

    worker: str
    model: str
    capacity: int
    """K: number of slots."""
    load: int
    """Number of sessions that hold a slot or have one reserved."""
    suspect: bool = False
    """Whether the worker's report is overdue, so that it is only a last resort."""
    chunk_latency_s: Mapping[int, float] = field(default_factory=dict)
    """Measured profile L(b): seconds of a chunk by batch size. It may be empty."""
    leaving: int = 0
    """Number of sessions in `load` that migrate to another worker."""
    weights_digest: str | None = None
    floor_capacity: int = 0
    """Sessions that the worker may hold as a last resort; K if it does not absorb."""
    capability: Capability | None = None
    """See `WorkerState.capability`."""
    class_latency_s: Mapping[SessionClass, Mapping[int, float]] = field(default_factory=dict)
    """See `WorkerState.class_latency_s`."""
    counts: Mapping[SessionClass, int] = field(default_factory=dict)
    """Sessions in `load` by class. Only workers with a `capability` have counts."""
    lends: bool = False
    """See `WorkerState.lends`."""

    def serves(self, demand: Demand) -> bool:
        """Whether the worker has the session's model and, if the session needs certain weights, these."""
        return self.model == demand.model and demand.weights_digest in (None, self.weights_digest)


@statically_frozen()
class Demand:
    """One session that needs a worker."""

    session: str
    model: str
    kind: str
    """Why the session needs a worker: place, resume, recover, rebuild or migrate."""
    holder: str | None = None
    """Worker with the session's state in host memory. To resume the session there needs no transfer."""
    counted_on: str | None = None
    """The candidate whose `load` already includes the session."""
    excluded: frozenset[str] = frozenset()
    """Workers that must not get the session: they have refused it, or a migration to them has failed."""
    weights_digest: str | None = None
    """Weights that the session's worker must have. None: any weights will do."""
    session_class: SessionClass | None = None
    """See `SessionState.session_class`."""

    @property
    def kind_of_worker(self) -> tuple[str, str | None]:
        """Model and weights. Demands with equal values have the same serving candidates."""
        return self.model, self.weights_digest

    @property
    def known_class(self) -> SessionClass:
        return self.session_class or SessionClass(self.model)


@statically_frozen()
class Choice:
    """A placement's answer for one session: a worker (None: the session waits), the reason, the numbers."""

    session: str
    worker: str | None
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class MigrationKind(StrEnum):
    """Why a session should migrate."""

    BALANCE = "balance"
    """The worst chunk latency of the model falls by more than the migration costs."""
    SPREAD = "spread"
    """Too many workers share the bottleneck for it to fall. The migration relieves one of them, and the
    target stays no slower than the source becomes. So new workers get sessions."""
    RESCUE = "rescue"
    """Fewer chunks are expected to be late (SlackServe: re-homing)."""
    DRAIN = "drain"
    """The session's worker is draining. The migration is proposed whatever it gains."""


@statically_frozen()
class Migration:
    """A proposal to migrate one session."""

    session: str
    source: str
    target: str
    gain_s: float
    """Γ = L − L′ − η κ, seconds; positive except for drains and rescues. Migrations that lower the bottleneck
    only together share their gain equally. For a spread or a rescue, L is taken over source and target."""
    cost_s: float
    """κ: expected seconds of the transfer, by the α–β model."""
    reason: str
    """A sentence for the decision log."""
    kind: MigrationKind = MigrationKind.BALANCE
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Latencies, sessions and bytes behind the proposal, for the decision log."""


@dataclass(frozen=True)
class Weights:
    """Minimum gain and maximum number of migrations."""

    eta: float = 0.1
    """η: seconds of bottleneck latency that one second of transfer must save. It is small, since a migration
    hardly interrupts the session (7.5)."""
    least_gain: float = 0.01
    """Minimum gain of a migration, relative to the latency that it lowers. Less is noise of the profiles."""
    migrations_at_once: int = 8
    """Maximum number of sessions of one pool that migrate at the same time, without drains."""
    horizon: int = 128
    """Maximum number of migrations in a plan. A plan with more than `migrations_at_once` takes several
    decisions."""
    spreads: bool = True
    """Whether sessions also migrate if the overall bottleneck stays and only the source becomes faster."""
    rescue_horizon_s: float = 0.0
    """Sessions also migrate to save chunks that are expected to be late within this time, seconds. And no
    migration for balance may make further chunks late within it. 0: slack is not used."""
    tier_alpha: float = TIER_ALPHA
    """α: a session with a slack of α T is urgent (SlackServe, 3.1)."""
    least_saved: int = 1
    """Minimum number of late chunks that a rescue saves."""
