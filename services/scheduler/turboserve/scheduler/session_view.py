"""One session in the scheduler's view, and its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from turboserve.contracts.fidelity import SessionSlack
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.scheduler.placement.urgency import ReportedSlack
from turboserve.scheduler.worker_view import ChangeTracked

Share = tuple[str, str]
"""Model and tenant: tenants share the slots of one model."""


def slack_reported(slack: SessionSlack, at: float) -> ReportedSlack:
    """Return the slack of a load report that arrived at monotonic time `at`."""
    return ReportedSlack(slack.slack_s, slack.credit_s, at, slack.tier, slack.playing)


def slot_on(record: SessionRecord) -> str | None:
    """Return the worker on which the session holds a slot."""
    return record.worker if record.phase.holds_slot else None


class TenantSlots:
    """Sums the costs of the slots that rows of sessions hold, by model and tenant."""

    def __init__(self) -> None:
        self._slots: Counter[Share] = Counter()

    def add(self, record: SessionRecord, sign: int = 1) -> None:
        if record.phase.holds_slot:
            share = record.model, record.tenant
            self._slots[share] += sign * record.slot_cost
            if not self._slots[share]:
                del self._slots[share]

    def remove(self, record: SessionRecord) -> None:
        self.add(record, -1)

    def counts(self) -> Counter[Share]:
        """Return a copy of the sums."""
        return self._slots.copy()


@dataclass(frozen=True)
class Settled:
    """The row is certain, and no command is under way."""


@dataclass(frozen=True)
class Writing:
    """The row is certain, and a command that changes it is under way."""

    ticket: int


@dataclass(frozen=True)
class InDoubt:
    """A command may have changed the row, so the row must be read before anything is decided."""


@dataclass(frozen=True)
class Reading:
    """The row is in doubt, and a command that reads it is under way."""

    ticket: int


RowState = Settled | Writing | InDoubt | Reading
"""What is known of a session's row. At most one command per session is under way."""


@dataclass(frozen=True)
class Retry:
    """The last commands for the session have failed."""

    failures: int
    """Number of failed commands in a row."""
    not_before: float
    """No command is sent for the session before this time."""


@dataclass(frozen=True)
class Placing:
    """A placement is decided and not confirmed yet. A slot is reserved on `worker`."""

    worker: str


@dataclass(frozen=True)
class Migrating:
    """A migration of a session that holds a slot is decided and not confirmed yet. A slot is reserved."""

    worker: str
    """The target."""


@dataclass(frozen=True)
class MigratingSuspended:
    """A migration of a suspended session is decided and not confirmed yet. It needs no slot."""

    worker: str
    """The target."""


Pending = Placing | Migrating | MigratingSuspended
"""A decision that is not confirmed yet."""


@dataclass(frozen=True)
class AwaitingLimit:
    """The migration's target has not reported a time limit, so that of the policy applies."""

    migration: int
    since: float
    """Listening time at which the migration was first seen."""


@dataclass(frozen=True)
class Copying:
    """The migration's target has reported how long the copy may take."""

    migration: int
    since: float
    """Listening time at which the target first reported a limit."""
    timeout_s: float
    """The migration is abandoned this long after `since`."""


@dataclass(frozen=True)
class Uncommittable:
    """The migration can no longer be committed and is to be abandoned."""

    migration: int
    reason: str


MigrationProgress = AwaitingLimit | Copying | Uncommittable
"""Progress of the migration that the session's row names."""


@dataclass(frozen=True)
class Waiting:
    """The session needs a worker."""

    since: float
    noted: str | None = None
    """The last recorded reason for waiting."""


@dataclass
class SessionView(ChangeTracked):
    """One session that has not ended."""

    # `refusals` and `migration_failures` change in place, always with `refused_epoch` or `rests_until`.
    TRACKED_FIELDS = frozenset(
        {"record", "row_state", "pending", "retry", "rests_until", "refused_epoch", "left"}
    )

    record: SessionRecord
    touched: int
    """Stamp at which the row was last confirmed or replaced."""
    watched_at: float
    """Listening time from which idleness counts: the last viewer, or the moment at which the session was
    added, activated or wanted again."""
    row_state: RowState = field(default_factory=Settled)
    retry: Retry | None = None
    """None: the last command succeeded, or none was sent."""
    pending: Pending | None = None
    """None: all decisions about the session are confirmed."""
    migration: MigrationProgress | None = None
    """Progress of the last migration that was seen; None if none was seen."""
    waiting: Waiting | None = None
    """None: the session needs no worker."""
    rests_until: float = 0.0
    """The session is not migrated for balance before this time; set when a migration ends."""
    retries_at: float = 0.0
    """As `rests_until`, by the number of migrations that have failed in a row."""
    failed_in_epoch: tuple[int, int] | None = None
    """Epoch of the last failed migration, and number of failed ones in a row in this epoch."""
    migration_failures: dict[str, float] = field(default_factory=dict)
    """Worker → time before which no migration to it is tried, because one has failed."""
    refused_epoch: int | None = None
    """The epoch that the session's worker refused to run."""
    leaves_epoch: int | None = None
    """The epoch in which the session must leave a draining worker without its state (see `hand_over`)."""
    rebalanced_to: str | None = None
    """Target of the session's last migration, if the rebalancer began it for balance or to save chunks."""
    left: dict[str, int] = field(default_factory=dict)
    """Worker → stamp at which a migration of the rebalancer from there ended. Replaced, never changed."""
    reported: tuple[int, int, bool] | None = None
    """Epoch, number of control inputs and whether a viewer plays, by the owner's last report with a slack.
    A new owner's reports replace the first and the last only once a viewer plays: see `acted`."""
    refusals: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Worker → number of its refusals of this session, and the time before which it does not get it again."""
    slack: ReportedSlack | None = None
    """Playout slack by the owner's last report. None: the session does not run, or it is not reported."""
    changed: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def share(self) -> Share:
        return self.record.model, self.record.tenant

    @property
    def ticket(self) -> int | None:
        """Ticket of the one command under way for the session."""
        return self.row_state.ticket if isinstance(self.row_state, Writing | Reading) else None

    @property
    def in_doubt(self) -> bool:
        """Whether the row must be read again."""
        return isinstance(self.row_state, InDoubt | Reading)

    @property
    def reserved_on(self) -> str | None:
        """Worker on which a slot is reserved for the session."""
        return self.pending.worker if isinstance(self.pending, Placing | Migrating) else None

    @property
    def begun_to(self) -> str | None:
        """Target of a migration that is decided and not confirmed yet."""
        return self.pending.worker if isinstance(self.pending, Migrating | MigratingSuspended) else None

    def acted(self, epoch: int, inputs: int, plays: bool) -> bool:
        """Note what the owner reports of the viewer; returns whether the viewer has done something."""
        before = self.reported
        if before is not None and before[0] != epoch and not plays:
            # A new owner learns only with its first playhead whether the viewer plays.
            self.reported = before[0], inputs, before[2]
            return before[1] != inputs
        self.reported = epoch, inputs, plays
        return before is not None and before[1:] != (inputs, plays)

    def need(self, is_gone: Callable[[str], bool]) -> str | None:
        """Return why the session needs a worker: place, resume, recover or rebuild; None if it needs none.

        `is_gone`: whether a worker is gone.
        """
        record = self.record
        if record.activity is not Activity.WATCHING or record.phase.ended:
            return None
        if record.phase is Phase.REQUESTED:
            return "place"
        lost = record.worker is not None and is_gone(record.worker)
        if record.phase is Phase.SUSPENDED:
            # While its state migrates, the session waits. The migration has a time limit.
            waits = record.migration is not None and not lost
            return None if waits else "recover" if lost else "resume"
        if lost or record.worker is None:
            return "recover"
        if self.refused_epoch == record.epoch:
            return "place"
        return "rebuild" if self.leaves_epoch == record.epoch else None

    def may_send(self, now: float) -> bool:
        """Whether no command is under way and the wait after a failed one is over."""
        return isinstance(self.row_state, Settled | InDoubt) and (
            self.retry is None or self.retry.not_before <= now
        )

    def may_change(self, now: float) -> bool:
        """Whether a command that changes the row may be sent: the row is certain, too."""
        return isinstance(self.row_state, Settled) and (self.retry is None or self.retry.not_before <= now)

    def command_sent(self, ticket: int) -> None:
        """Note that the session's next command is under way: a read if the row is in doubt."""
        match self.row_state:
            case Settled():
                self.row_state = Writing(ticket)
            case InDoubt():
                self.row_state = Reading(ticket)
            case Writing() | Reading():
                raise AssertionError(f"{self.id}: two commands at the same time")
            case _:
                assert_never(self.row_state)

    def command_answered(self) -> None:
        """Note that the command under way has an answer. The row's state is that from before the command."""
        match self.row_state:
            case Writing():
                self.row_state = Settled()
            case Reading():
                self.row_state = InDoubt()
            case Settled() | InDoubt():
                pass
            case _:
                assert_never(self.row_state)

    def waited_s(self, now: float) -> float:
        """Return for how long the session has needed a worker, in seconds."""
        return 0.0 if self.waiting is None else now - self.waiting.since
