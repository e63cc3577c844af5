"""Records that repositories take and return, for which the contracts have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from turboserve import logs
from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.pool import LEARNED_LIMIT, PoolOrders
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.webhooks import DeliveryRecord
from turboserve.contracts.workers import Incoming, MigrationKey, WorkerRecord
from turboserve.state_store.core.tenants import Tenant, TenantUse
from turboserve.state_store.core.workers import ModelCapacity
from turboserve.static_frozen import statically_frozen

SESSION_MEASURED = ("unwatched_s", "waiting_s", "rates")
"""Fields of a session's record that are measured for each answer."""
SESSION_FIELDS = tuple(name for name in SessionRecord.model_fields if name not in SESSION_MEASURED)
"""Fields of a session's record that its row keeps."""
SESSION_FIXED = frozenset({"id", "tenant", "model", "seed", "metadata", "created_at", "key"})
"""Fields that stay as they were created."""
SESSION_COUNTED = frozenset({"next_chunk", "applied_control_seq", "playhead_s"})
"""Fields that the log decides: only `ProgressRepository.count` writes them."""
SESSION_CHANGING = frozenset(SESSION_FIELDS) - SESSION_FIXED - SESSION_COUNTED
"""Fields that a change writes."""
WORKER_COUNTED = ("sessions", "suspended", "incoming")
"""Fields of a worker's record that are counted when it is listed."""
WORKER_LISTED = (*WORKER_COUNTED, "price")
"""Fields of a worker's record that only a listing has."""
WORKER_FIELDS = tuple(name for name in WorkerRecord.model_fields if name not in WORKER_LISTED)
"""Fields of a worker's record that its row keeps."""
GONE_LISTED = 500
"""Maximum number of gone workers that are listed. A worker that dies at every start leaves more rows than fit
into one message."""

log = logs.get("pools")

_warned: set[tuple[str, int]] = set()


@dataclass(frozen=True)
class SessionRow:
    """A record, and the greatest revision that its `own` subject ever had, lost ones included (0: none)."""

    record: SessionRecord
    fence_revision: int


@dataclass(frozen=True)
class LockedPlacement:
    """The rows that a placement or a migration depends on, each as it is since it is locked."""

    leader: LeaderRecord
    """The leader, whose term cannot change. Without a holder if there has been no leader yet."""
    worker: WorkerRecord | None
    session: SessionRow | None


@dataclass(frozen=True)
class WorkerSessions:
    """What a worker's renewal lists, each oldest first."""

    assigned: list[SessionRecord]
    """Sessions that the worker owns, as far as `listed_in_renewal`."""
    incoming: list[Incoming]
    """Sessions that migrate to this worker, with their sources' addresses."""
    keys: list[MigrationKey]
    """Keys of live migrations from or to this worker."""


@dataclass(frozen=True)
class AdmissionCounts:
    """The counts that admission checks, at one moment."""

    taken: bool
    """Whether there is a session with the requested id."""
    live: int
    """Sessions that have not ended, over all models."""
    room: ModelCapacity
    use: TenantUse
    """What the requesting tenant uses."""
    tenant: Tenant | None = None
    """Row of the requesting tenant, if it is locked. None: it is not, or does not exist."""


@statically_frozen()
class LogProgress:
    """The progress of one session in the log."""

    session: str
    next_chunk: int
    control_seq: int
    playhead_s: float | None


@statically_frozen()
class UsageShare:
    """What is added to the usage of a tenant, a key and a model."""

    tenant: str
    key: str | None
    model: str
    chunks: int = 0
    video_seconds: float = 0.0
    viewer_seconds: float = 0.0
    delivered_bytes: int = 0

    def __add__(self, other: UsageShare) -> UsageShare:
        """Return the sum of two shares of one tenant, key and model. Counts stay within `NUMBER_LIMIT`."""
        return UsageShare(
            self.tenant,
            self.key,
            self.model,
            min(self.chunks + other.chunks, NUMBER_LIMIT),
            self.video_seconds + other.video_seconds,
            self.viewer_seconds + other.viewer_seconds,
            min(self.delivered_bytes + other.delivered_bytes, NUMBER_LIMIT),
        )

    @classmethod
    def by_owner(cls, shares: Iterable[UsageShare]) -> list[UsageShare]:
        """Return one sum for each tenant, key and model, in the order of their rows."""
        sums: dict[tuple[str, str, str], UsageShare] = {}
        for share in shares:
            owner = share.tenant, share.key or "", share.model
            sums[owner] = sums[owner] + share if owner in sums else share
        return [sums[owner] for owner in sorted(sums)]


@statically_frozen()
class ViewerUse:
    """What viewers of one session have used since the report before."""

    seconds: float = 0.0
    """Time of all viewers together."""
    delivered_bytes: int = 0
    """Video that they were sent."""

    def __add__(self, other: ViewerUse) -> ViewerUse:
        delivered_bytes = min(self.delivered_bytes + other.delivered_bytes, NUMBER_LIMIT)
        return ViewerUse(self.seconds + other.seconds, delivered_bytes)

    def share(self, tenant: str, key: str | None, model: str) -> UsageShare:
        """Return what is added to the usage of the session's tenant, key and model."""
        return UsageShare(
            tenant, key, model, viewer_seconds=self.seconds, delivered_bytes=self.delivered_bytes
        )


@dataclass(frozen=True)
class PendingEvent:
    """An event that is committed and not yet removed from the outbox."""

    number: int
    """Rows of one subject have increasing numbers in the order of their commits."""
    event_id: str
    subject: str
    body: str
    created_at: float
    """Time of the event, Unix seconds."""
    traceparent: str | None = None
    """Trace context of the change. None: it was not traced."""
    tenant: str | None = None
    """Tenant of the session. None: an event of a worker, or of a version without webhooks."""
    type: str | None = None
    """Type of the event. None: as for `tenant`."""


@dataclass(frozen=True)
class DueDelivery:
    """A delivery that a sender may attempt."""

    number: int
    record: DeliveryRecord
    body: str
    traceparent: str | None


@dataclass(frozen=True)
class WebhookPurge:
    """What a purge has removed or ended."""

    deleted: int
    given_up: int


@dataclass(frozen=True)
class KeyEdition:
    """The salt of all hashes of API keys, and the version of the set of keys."""

    salt: str
    version: int


@dataclass(frozen=True)
class SigningEdition:
    """The version of what gateways need to check links, and the database that it is of."""

    database: str
    version: int


def with_learned(orders: PoolOrders, learned: str | None) -> PoolOrders:
    """Return the answer to a report that recalls what was learned. A text above the limit counts as none."""
    if learned is None or len(learned) > LEARNED_LIMIT:
        return orders
    return orders.model_copy(update={"learned": learned})


def pool_orders(values: Mapping[str, Any]) -> PoolOrders:
    """Return the orders in a pool's row. A profile table that cannot be read counts as none."""
    try:
        return PoolOrders.model_validate(values)
    except (ValidationError, InvalidInputError) as error:
        if values["table"] is None:
            raise
        orders = PoolOrders.model_validate({**values, "table": None})
        if (orders.pool, orders.version) not in _warned:
            # Reports read the row every second, so log only one line for each table.
            _warned.add((orders.pool, orders.version))
            log.warning(
                "the stored profile table cannot be read: the shipped one is in force",
                pool=orders.pool,
                version=orders.version,
                error=str(error)[:500],
            )
        return orders
