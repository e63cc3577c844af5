"""Rows of webhooks and of their deliveries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from turboserve.contracts.webhooks import (
    DeliveryPage,
    DeliveryRecord,
    DeliveryState,
    ListDeliveries,
    WebhookRecord,
)
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.webhook_entries import DeliveryEntry, WebhookEntry
from turboserve.state_store.core.paging import first_page
from turboserve.state_store.core.webhooks import holds_back, wants
from turboserve.state_store.ports.records import DueDelivery, PendingEvent, WebhookPurge
from turboserve.state_store.ports.webhooks import GIVEN_UP, PURGE_ROWS, WEBHOOK_FIXED

NAME = "webhooks"


def insert_deliveries(db: Session, event: PendingEvent) -> None:
    """Insert the deliveries of an event that leaves the outbox."""
    if event.tenant is None or event.type is None:
        return
    entries = [entry for _, entry in db.find(db.tables.webhooks, "tenant", event.tenant)]
    for entry in sorted(entries, key=lambda entry: entry.number):
        record = entry.record
        if record.enabled and record.created_at <= event.created_at and wants(record.types, event.type):
            delivery = DeliveryRecord(
                webhook=record.id,
                event=event.event_id,
                type=event.type,
                session=event.subject.split(".")[1],
                created_at=event.created_at,
                due_at=event.created_at,
            )
            _insert(db, delivery, event.body, event.traceparent)


def _insert(db: Session, record: DeliveryRecord, body: str, traceparent: str | None) -> None:
    table = db.tables.webhook_deliveries
    entry = DeliveryEntry(db.tables.number(table), record, body, traceparent=traceparent)
    db.insert_if_absent(table, (record.webhook, record.event), entry)


class MemoryWebhooks:
    """`WebhookRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db = session
        self._rows, self._deliveries = session.tables.webhooks, session.tables.webhook_deliveries

    async def lock(self) -> None:
        await self._db.lock_or_insert(self._db.tables.webhook_locks, NAME, 0)

    async def get(self, webhook: str, *, lock: bool = False) -> WebhookRecord | None:
        def run() -> WebhookRecord | None:
            if lock:
                entry = self._db.lock(self._rows, webhook, LockMode.NO_KEY_UPDATE)
            else:
                entry = self._db.get(self._rows, webhook)
            return None if entry is None else entry.record

        return await self._db.execute(run)

    async def of_tenant(self, tenant: str) -> list[WebhookRecord]:
        def run() -> list[WebhookRecord]:
            entries = [entry for _, entry in self._db.find(self._rows, "tenant", tenant)]
            return [entry.record for entry in sorted(entries, key=lambda entry: entry.number)]

        return await self._db.execute(run)

    async def insert(self, record: WebhookRecord) -> None:
        def run() -> None:
            entry = WebhookEntry(record, self._db.tables.number(self._rows))
            self._db.insert(self._rows, record.id, entry)

        await self._db.execute(run)

    async def write(self, record: WebhookRecord) -> None:
        def run() -> None:
            entry = self._db.lock(self._rows, record.id, LockMode.NO_KEY_UPDATE)
            if entry is not None:
                kept = {name: getattr(entry.record, name) for name in WEBHOOK_FIXED}
                self._db.update(self._rows, record.id, replace(entry, record=record.model_copy(update=kept)))

        await self._db.execute(run)

    async def delete(self, webhook: str) -> None:
        def run() -> None:
            self._db.delete(self._rows, webhook)

        def run_deliveries() -> None:
            for key, _ in self._db.find(self._deliveries, "webhook", webhook)[:PURGE_ROWS]:
                self._db.delete(self._deliveries, key)

        await self._db.execute(run)
        await self._db.execute(run_deliveries)

    async def deliver(self, record: DeliveryRecord, body: str) -> None:
        await self._db.execute(lambda: _insert(self._db, record, body, None))

    async def delivery(self, webhook: str, event: str) -> tuple[DeliveryRecord, str | None] | None:
        def run() -> tuple[DeliveryRecord, str | None] | None:
            entry = self._db.lock(self._deliveries, (webhook, event))
            return None if entry is None else (entry.record, entry.claim)

        return await self._db.execute(run)

    async def write_delivery(self, record: DeliveryRecord) -> None:
        def run() -> None:
            key = record.webhook, record.event
            entry = self._db.lock(self._deliveries, key, LockMode.NO_KEY_UPDATE)
            if entry is not None:
                after = replace(entry, record=record, claim=None, claimed_until=None)
                self._db.update(self._deliveries, key, after)

        await self._db.execute(run)

    async def page(self, request: ListDeliveries) -> DeliveryPage:
        def run() -> DeliveryPage:
            found = [
                entry
                for _, entry in self._db.find(self._deliveries, "webhook", request.webhook)
                if request.state in (None, entry.record.state)
                and (request.after is None or entry.number < request.after)
            ]
            found.sort(key=lambda entry: -entry.number)
            shown, after = first_page(found, request.limit, lambda entry: entry.number)
            return DeliveryPage(
                deliveries=tuple(entry.record for entry in shown),
                next=after,
            )

        return await self._db.execute(run)

    async def ready(self, now: float, limit: int) -> list[WebhookRecord]:
        def run() -> list[WebhookRecord]:
            due = {entry.record.webhook for _, entry in self._waiting() if _is_due(entry, now)}
            found = [entry for key, entry in self._db.all(self._rows) if entry.record.enabled and key in due]
            found.sort(key=lambda entry: (entry.taken_at, entry.number))
            # Postgres skips rows that are locked. Here the transaction waits for them, in a fixed order.
            for entry in sorted(found[:limit], key=lambda entry: entry.number):
                self._db.lock(self._rows, entry.record.id, LockMode.NO_KEY_UPDATE)
            return [entry.record for entry in found[:limit]]

        return await self._db.execute(run)

    async def turn(self, names: Sequence[str], now: float) -> None:
        def run() -> None:
            for name in names:
                entry = self._db.get(self._rows, name)
                if entry is not None:
                    self._db.update(self._rows, name, replace(entry, taken_at=now))

        await self._db.execute(run)

    async def lock_tenants(self, tenants: Collection[str]) -> None:
        for tenant in sorted(tenants):
            await self._db.lock_or_insert(self._db.tables.webhook_locks, f"tenant {tenant}", 0)

    async def claimed(self, tenants: Collection[str], now: float) -> dict[str, dict[str, int]]:
        def run() -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = {tenant: {} for tenant in tenants}
            for _, entry in self._waiting():
                until, name = entry.claimed_until, entry.record.webhook
                webhook = self._db.get(self._rows, name)
                if webhook is None or until is None or until <= now:
                    continue
                if (counts := found.get(webhook.record.tenant)) is not None:
                    counts[name] = counts.get(name, 0) + 1
            return found

        return await self._db.execute(run)

    async def due(self, places: Sequence[tuple[str, int]], now: float) -> list[DueDelivery]:
        def run() -> list[DueDelivery]:
            found: list[tuple[int, int, DeliveryEntry]] = []
            for place, (webhook, count) in enumerate(places):
                waiting = [entry for _, entry in self._waiting() if entry.record.webhook == webhook]
                free = [
                    entry
                    for entry in waiting
                    if _is_due(entry, now) and not any(holds_back(other, entry) for other in waiting)
                ]
                free.sort(key=lambda entry: (entry.record.due_at, entry.number))
                found += [(turn, place, one) for turn, one in enumerate(free[:count])]
            found.sort(key=lambda one: one[:2])
            return [DueDelivery(one.number, one.record, one.body, one.traceparent) for *_, one in found]

        return await self._db.execute(run)

    async def claim(self, numbers: Sequence[int], claim: str, until: float, now: float) -> None:
        def run() -> None:
            wanted = set(numbers)
            for key, entry in self._waiting():
                if entry.number not in wanted:
                    continue
                self._db.lock(self._deliveries, key, LockMode.NO_KEY_UPDATE)
                self._db.update(self._deliveries, key, replace(entry, claim=claim, claimed_until=until))
                webhook = self._db.get(self._rows, entry.record.webhook)
                if webhook is not None:
                    self._db.update(self._rows, entry.record.webhook, replace(webhook, taken_at=now))

        await self._db.execute(run)

    async def give_up(self, webhook: str, reason: str, now: float) -> None:
        def run() -> None:
            for key, entry in self._waiting():
                if entry.record.webhook == webhook:
                    self._end(key, entry, reason, now)

        await self._db.execute(run)

    async def purge(self, before: float, backlog: int, now: float) -> WebhookPurge:
        def delete() -> int:
            old = [
                key
                for key, entry in self._db.all(self._deliveries)
                if (entry.record.finished_at is not None and entry.record.finished_at < before)
                or self._db.get(self._rows, entry.record.webhook) is None
            ][:PURGE_ROWS]
            for key in old:
                self._db.delete(self._deliveries, key)
            return len(old)

        def end() -> int:
            of_webhook: dict[str, list[tuple[tuple[str, str], DeliveryEntry]]] = {}
            for key, entry in self._waiting():
                of_webhook.setdefault(entry.record.webhook, []).append((key, entry))
            ended = 0
            for waiting in of_webhook.values():
                waiting.sort(key=lambda one: -one[1].number)
                for key, entry in waiting[backlog:][: PURGE_ROWS - ended]:
                    self._end(key, entry, GIVEN_UP, now)
                    ended += 1
            return ended

        return WebhookPurge(await self._db.execute(delete), await self._db.execute(end))

    def _waiting(self) -> list[tuple[tuple[str, str], DeliveryEntry]]:
        return self._db.find(self._deliveries, "waiting", True)

    def _end(self, key: tuple[str, str], entry: DeliveryEntry, reason: str, now: float) -> None:
        self._db.lock(self._deliveries, key, LockMode.NO_KEY_UPDATE)
        ended = {"state": DeliveryState.FAILED, "error": reason, "finished_at": now}
        after = replace(entry, record=entry.record.model_copy(update=ended), claim=None, claimed_until=None)
        self._db.update(self._deliveries, key, after)


def _is_due(entry: DeliveryEntry, now: float) -> bool:
    claimed = entry.claimed_until is not None and entry.claimed_until > now
    return entry.record.due_at <= now and not claimed
