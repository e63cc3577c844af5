"""Committed rows by key, with indexes. Rows are frozen and shared between readers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from turboserve.contracts.audit import AuditEntry
from turboserve.contracts.cost import Correction, Cost
from turboserve.contracts.keys import KeyRecord
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.links import LinkRecord, SigningKey
from turboserve.contracts.pool_history import PoolDecision, PoolSample
from turboserve.contracts.recordings import RecordingRecord
from turboserve.contracts.sessions import ControlReceipt, Decision, Phase, SessionRecord
from turboserve.contracts.usage import UsageDay, UsageGroup
from turboserve.contracts.webhooks import DeliveryState
from turboserve.contracts.workers import WorkerRecord
from turboserve.simulation.runtime.rows.webhook_entries import DeliveryEntry, WebhookEntry
from turboserve.state_store.core.aging import Aging
from turboserve.state_store.core.chunk_history import ChunkRow
from turboserve.state_store.core.key_limits import KeyRates
from turboserve.state_store.core.receipts import Receipt, receipt_id
from turboserve.state_store.core.rentals import RentalRow
from turboserve.state_store.core.tenants import Tenant
from turboserve.state_store.ports.records import KeyEdition, PendingEvent, SigningEdition
from turboserve.static_frozen import statically_frozen

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Index = Callable[[Any], Hashable | None]
"""Returns the value by which a row is found; None if the index does not contain the row."""


class Table(Generic[K, V]):
    """Committed rows. No two rows may have the same value in an index of `unique`."""

    def __init__(
        self, name: str, indexes: Mapping[str, Index] | None = None, unique: tuple[str, ...] = ()
    ) -> None:
        self.name, self.unique = name, unique
        self.rows: dict[K, V] = {}
        self.indexes = dict(indexes or {})
        self._found: dict[str, dict[Hashable, dict[K, None]]] = {index: {} for index in self.indexes}

    def keys(self, index: str, value: Hashable) -> Mapping[K, None]:
        """Return the keys of the rows that have `value`."""
        return self._found[index].get(value, {})

    def values(self, index: str) -> Mapping[Hashable, Mapping[K, None]]:
        """Return the keys of all rows in `index`, by value."""
        return self._found[index]

    def set(self, key: K, row: V | None) -> V | None:
        """Insert or replace a row, or delete it if `row` is None. Returns the row before."""
        before = self.rows.get(key)
        for index, value_of in self.indexes.items():
            old = None if before is None else value_of(before)
            new = None if row is None else value_of(row)
            if old == new:
                continue
            found = self._found[index]
            if old is not None:
                found[old].pop(key)
                if not found[old]:
                    del found[old]
            if new is not None:
                found.setdefault(new, {})[key] = None
        if row is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = row
        return before


@statically_frozen()
class SessionEntry:
    """A row of `sessions`."""

    record: SessionRecord
    number: int
    first_prompt: str
    controls_bytes: int
    migration_key: str | None = None
    fence_revision: int = 0
    ended_at: float | None = None
    suspended_at: float | None = None
    purged_at: float | None = None

    def with_record(self, record: SessionRecord) -> SessionEntry:
        """Return the row with another record. Cheaper than `replace`: counting changes each row often."""
        return SessionEntry(
            record,
            self.number,
            self.first_prompt,
            self.controls_bytes,
            self.migration_key,
            self.fence_revision,
            self.ended_at,
            self.suspended_at,
            self.purged_at,
        )


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A row of `workers`."""

    record: WorkerRecord
    gone_at: float | None = None


@dataclass(frozen=True, slots=True)
class ControlEntry:
    """A row of `controls`."""

    receipt: Receipt
    applied_at: float | None = None
    chunk_index: int | None = None
    superseded_by: int | None = None

    @property
    def name(self) -> str | None:
        """Name of the control. None: a prompt."""
        return self.receipt.name if isinstance(self.receipt, ControlReceipt) else None

    @property
    def settled(self) -> bool:
        """Whether a chunk has applied or superseded it."""
        return self.applied_at is not None or self.superseded_by is not None


@dataclass(frozen=True, slots=True)
class DecisionEntry:
    """A row of `decisions`."""

    decision: Decision
    version: int | None


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A row of `pools`."""

    model: str
    maximum: int
    reported_at: float
    absorbs: bool = False
    absorbs_at_maximum: bool = False
    decode_sessions: int | None = None
    orders: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the orders that are not at their default, as JSON."""
    process: str | None = None
    former: tuple[str, ...] = ()
    learned: str | None = None


@dataclass(frozen=True, slots=True)
class CorrectionEntry:
    """A row of `cost_corrections`."""

    correction: Correction
    number: int


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A row of `api_keys`."""

    record: KeyRecord
    hash: str
    number: int


@dataclass(frozen=True, slots=True)
class RecordingEntry:
    """A row of `recordings`."""

    record: RecordingRecord
    number: int


def _live(entry: SessionEntry) -> str | None:
    return entry.record.model if entry.ended_at is None else None


def _unfenced(entry: SessionEntry) -> bool | None:
    record = entry.record
    return True if record.own_revision is None and record.epoch > 0 and entry.purged_at is None else None


def _suspended(entry: SessionEntry) -> bool | None:
    return True if entry.record.phase is Phase.SUSPENDED and entry.ended_at is None else None


def _ended(entry: SessionEntry) -> bool | None:
    """Return whether the chunks of an ended session were purged; None if the session has not ended."""
    return None if entry.ended_at is None else entry.purged_at is not None


def _version(entry: DecisionEntry) -> tuple[str, int] | None:
    return None if entry.version is None else (entry.decision.session, entry.version)


class Tables:
    """All tables, and the counters of their identity columns."""

    def __init__(self) -> None:
        self.sessions: Table[str, SessionEntry] = Table(
            "sessions",
            {
                "worker": lambda entry: entry.record.worker if entry.ended_at is None else None,
                "target": lambda entry: entry.record.target,
                "live": _live,
                "tenant": lambda entry: entry.record.tenant if entry.ended_at is None else None,
                "key": lambda entry: entry.record.key if entry.ended_at is None else None,
                "unfenced": _unfenced,
                "suspended": _suspended,
                "ended": _ended,
            },
        )
        self.controls: Table[tuple[str, int], ControlEntry] = Table(
            "controls",
            {
                "receipt_id": lambda entry: receipt_id(entry.receipt),
                "session": lambda entry: entry.receipt.session,
                "unsettled": lambda entry: None if entry.settled else entry.receipt.session,
            },
            ("receipt_id",),
        )
        self.decisions: Table[int, DecisionEntry] = Table(
            "decisions",
            {"session": lambda entry: entry.decision.session, "version": _version},
            ("version",),
        )
        self.workers: Table[str, WorkerEntry] = Table(
            "workers",
            {
                "model": lambda entry: entry.record.model,
                "several": lambda entry: None if entry.record.classes is None else True,
            },
        )
        self.outbox: Table[int, PendingEvent] = Table(
            "outbox", {"event_id": lambda event: event.event_id}, ("event_id",)
        )
        self.cursors: Table[str, int] = Table("cursors")
        self.leaders: Table[str, LeaderRecord] = Table("leaders")
        self.pools: Table[str, PoolEntry] = Table("pools", {"model": lambda entry: entry.model})
        self.rentals: Table[str, RentalRow] = Table("rentals")
        self.session_costs: Table[str, Cost] = Table("session_costs")
        self.corrections: Table[str, CorrectionEntry] = Table(
            "cost_corrections", {"session": lambda entry: entry.correction.session}
        )
        self.tenants: Table[str, Tenant] = Table("tenants")
        self.clocks: Table[str, Aging] = Table("clocks")
        self.api_keys: Table[str, KeyEntry] = Table("api_keys", {"hash": lambda entry: entry.hash}, ("hash",))
        self.key_rates: Table[str, KeyRates] = Table("key_rates")
        self.usage_days: Table[tuple[int, str, str], UsageDay] = Table("usage_days")
        self.usage_hours: Table[tuple[int, str, str, str], UsageGroup] = Table("usage_hours")
        self.key_editions: Table[str, KeyEdition] = Table("key_editions")
        self.session_links: Table[str, LinkRecord] = Table(
            "session_links", {"session": lambda record: record.session}
        )
        self.signing_keys: Table[str, SigningKey] = Table("signing_keys")
        self.signing_editions: Table[str, SigningEdition] = Table("signing_editions")
        self.recordings: Table[str, RecordingEntry] = Table(
            "recordings",
            {
                "session": lambda entry: entry.record.session,
                "tenant": lambda entry: entry.record.tenant,
                "state": lambda entry: entry.record.state,
            },
        )
        self.webhooks: Table[str, WebhookEntry] = Table(
            "webhooks", {"tenant": lambda entry: entry.record.tenant}
        )
        self.webhook_deliveries: Table[tuple[str, str], DeliveryEntry] = Table(
            "webhook_deliveries",
            {
                "webhook": lambda entry: entry.record.webhook,
                "waiting": lambda entry: True if entry.record.state is DeliveryState.WAITING else None,
            },
        )
        self.webhook_locks: Table[str, int] = Table("webhook_locks")
        self.audit_log: Table[int, AuditEntry] = Table("audit_log")
        self.pool_samples: Table[tuple[str, int], PoolSample] = Table("pool_samples")
        self.pool_decisions: Table[tuple[str, str, int], tuple[int, PoolDecision]] = Table("pool_decisions")
        self.worker_chunks: Table[tuple[str, int], ChunkRow] = Table("worker_chunks")
        self.pool_costs: Table[tuple[str, str, int], Cost] = Table("pool_costs")
        self.pool_model_costs: Table[tuple[str, str, int], Cost] = Table("pool_model_costs")
        self._numbers: dict[str, int] = {}

    def __iter__(self) -> Iterator[Table[Any, Any]]:
        return (value for value in vars(self).values() if isinstance(value, Table))

    def number(self, table: Table[Any, Any]) -> int:
        """Return the next number of the table's identity column. A rolled-back transaction leaves a gap."""
        self._numbers[table.name] = self._numbers.get(table.name, 0) + 1
        return self._numbers[table.name]
