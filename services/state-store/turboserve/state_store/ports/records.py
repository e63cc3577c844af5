"""Records that repositories take and return, for which the contracts have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from turboserve import logs
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.pool import LEARNED_LIMIT, PoolOrders
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerRecord
from turboserve.state_store.core.tenants import TenantUse
from turboserve.state_store.core.workers import ModelCapacity

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
WORKER_FIELDS = tuple(name for name in WorkerRecord.model_fields if name not in WORKER_COUNTED)
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
class AdmissionCounts:
    """The counts that admission checks, at one moment."""

    taken: bool
    """Whether there is a session with the requested id."""
    live: int
    """Sessions that have not ended, over all models."""
    room: ModelCapacity
    use: TenantUse
    """What the requesting tenant uses."""


@dataclass(frozen=True)
class LogProgress:
    """The progress of one session in the log."""

    session: str
    next_chunk: int
    control_seq: int
    playhead_s: float | None


@dataclass(frozen=True)
class UsageShare:
    """What is added to the usage of a tenant and a key."""

    tenant: str
    key: str | None
    chunks: int = 0
    viewer_seconds: float = 0.0


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
