"""Webhooks: their rows, their deliveries, and what senders take and report."""

from __future__ import annotations

import asyncio
import json
from itertools import compress

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.audit import AuditEntry
from turboserve.contracts.errors import ConflictError, NotFoundError, TurboServeError
from turboserve.contracts.requests import Done
from turboserve.contracts.webhooks import (
    DISABLED_TYPE,
    TEST_TYPE,
    ChangeWebhook,
    CreateWebhook,
    DeliveryPage,
    DeliveryRecord,
    DeliveryRef,
    DeliveryState,
    ListDeliveries,
    ListWebhooks,
    ReportDelivery,
    RotateSecret,
    SendTestEvent,
    TakeDeliveries,
    TakenDeliveries,
    TakenDelivery,
    WebhookList,
    WebhookRecord,
    WebhookRef,
)
from turboserve.ids import new_id, random_bits
from turboserve.state_store import metrics
from turboserve.state_store.core import webhooks as rules
from turboserve.state_store.ports.database import Database, UnitOfWork
from turboserve.state_store.ports.records import DueDelivery
from turboserve.state_store.ports.webhooks import PURGE_ROWS
from turboserve.state_store.settings import Settings

READY_LIMIT = 64
"""Maximum number of webhooks of which one request takes deliveries."""
ANSWER_BYTES = 400_000
"""Maximum size of the events in one answer to a sender. It fits into a message of any broker."""
DISABLED = "disable_webhook"
"""Operation in the audit log."""
_BITS = 32

log = logs.get("webhooks")


class Webhooks:
    """The endpoints of webhooks, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database, clock: Clock, settings: Settings) -> None:
        self._database, self._clock, self._settings = database, clock, settings
        self._rules = settings.webhook_rules

    # Requests of users

    async def create(self, request: CreateWebhook) -> WebhookRecord:
        """Create a webhook. Raises WebhookLimitError and ConflictError."""
        async with self._database.transaction() as db:
            await db.webhooks.lock()
            found = await db.webhooks.get(request.id)
            if found is not None:
                return rules.repeated(found, request)
            count = len(await db.webhooks.of_tenant(request.tenant))
            record = self._rules.created(request, count, self._clock.wall())
            await db.webhooks.insert(record)
        log.info("webhook created", webhook=record.id, tenant=record.tenant)
        return record

    async def get(self, request: WebhookRef) -> WebhookRecord:
        """Return the webhook. Raises NotFoundError."""
        async with self._database.statement() as db:
            return _visible(await db.webhooks.get(request.webhook), request)

    async def list(self, request: ListWebhooks) -> WebhookList:
        async with self._database.statement() as db:
            return WebhookList(webhooks=tuple(await db.webhooks.of_tenant(request.tenant)))

    async def change(self, request: ChangeWebhook) -> WebhookRecord:
        """Change the webhook. Raises NotFoundError."""
        async with self._database.transaction() as db:
            before = _visible(await db.webhooks.get(request.webhook, lock=True), request)
            after = rules.changed(before, request)
            await db.webhooks.write(after)
            if before.enabled and not after.enabled:
                await db.webhooks.give_up(after.id, "the webhook was disabled", self._clock.wall())
        return after

    async def delete(self, request: WebhookRef) -> Done:
        """Delete the webhook and its deliveries. Raises NotFoundError."""
        async with self._database.transaction() as db:
            _visible(await db.webhooks.get(request.webhook, lock=True), request)
            await db.webhooks.delete(request.webhook)
        log.info("webhook deleted", webhook=request.webhook, tenant=request.tenant)
        return Done()

    async def rotate(self, request: RotateSecret) -> WebhookRecord:
        """Use a new secret. Raises NotFoundError."""
        async with self._database.transaction() as db:
            before = _visible(await db.webhooks.get(request.webhook, lock=True), request)
            after = self._rules.rotated(before, request, self._clock.wall())
            await db.webhooks.write(after)
        return after

    async def deliveries(self, request: ListDeliveries) -> DeliveryPage:
        """Return a page of deliveries. Raises NotFoundError."""
        async with self._database.transaction(durable=False) as db:
            _visible(await db.webhooks.get(request.webhook), request)
            return await db.webhooks.page(request)

    async def redeliver(self, request: DeliveryRef) -> DeliveryRecord:
        """Send an event again, under its id. Raises NotFoundError and ConflictError."""
        async with self._database.transaction() as db:
            _enabled(_visible(await db.webhooks.get(request.webhook, lock=True), request))
            found = await db.webhooks.delivery(request.webhook, request.event)
            if found is None:
                raise NotFoundError(f"this webhook has no delivery {request.event}", field="event")
            delivery, claim = found
            if claim is not None and delivery.state is DeliveryState.WAITING:
                # A sender attempts it now.
                return delivery
            after = rules.redelivered(delivery, self._clock.wall())
            await db.webhooks.write_delivery(after)
        return after

    async def test(self, request: SendTestEvent) -> DeliveryRecord:
        """Send an event `webhook.test`. Raises NotFoundError and ConflictError."""
        now = self._clock.wall()
        async with self._database.transaction() as db:
            record = _enabled(_visible(await db.webhooks.get(request.webhook, lock=True), request))
            made = DeliveryRecord(
                webhook=record.id, event=request.event, type=TEST_TYPE, created_at=now, due_at=now
            )
            await db.webhooks.deliver(made, json.dumps({"webhook": record.id}))
            found = await db.webhooks.delivery(record.id, request.event)
            assert found is not None
        return found[0]

    # Requests of senders

    async def take(self, request: TakeDeliveries) -> TakenDeliveries:
        """Claim deliveries that are due: at most `request.limit`, within the limits of webhook and tenant."""
        now = self._clock.wall()
        async with self._database.transaction(durable=False) as db:
            ready = {record.id: record for record in await db.webhooks.ready(now, READY_LIMIT)}
            if not ready:
                return TakenDeliveries()
            if len(ready) == READY_LIMIT:
                # What these have may be held back, or all their places taken. Then others are next.
                await db.webhooks.turn(list(ready), now)
            tenants = {record.tenant for record in ready.values()}
            # Another request may take deliveries of other webhooks of a tenant at the same time.
            await db.webhooks.lock_tenants(tenants)
            claimed = await db.webhooks.claimed(tenants, now)
            places = [
                (record.id, count)
                for record in ready.values()
                if (count := self._rules.places(record, claimed[record.tenant].get(record.id, 0)))
            ]
            found = await db.webhooks.due(places, now)
            shared = self._rules.shared(
                [ready[one.record.webhook].tenant for one in found],
                {tenant: sum(counts.values()) for tenant, counts in claimed.items()},
            )
            due = _fitting(list(compress(found, shared))[: request.limit])
            if not due:
                return TakenDeliveries()
            claim = new_id("clm")
            until = now + self._settings.webhook_claim_s
            await db.webhooks.claim([one.number for one in due], claim, until, now)
        return TakenDeliveries(
            deliveries=tuple(_taken(ready[one.record.webhook], one, claim, now) for one in due)
        )

    async def report(self, request: ReportDelivery) -> Done:
        """Write the outcome of an attempt.

        A claim that is over changes nothing, unless its attempt succeeded: then no further one is needed.
        """
        now, jitter = self._clock.wall(), random_bits(_BITS) / 2**_BITS
        async with self._database.transaction() as db:
            before = await db.webhooks.get(request.webhook, lock=True)
            found = await db.webhooks.delivery(request.webhook, request.event)
            if before is None or found is None:
                return Done()
            delivery, claim = found
            succeeded = request.status is not None and 200 <= request.status < 300
            if delivery.state is not DeliveryState.WAITING or (claim != request.claim and not succeeded):
                return Done()
            after, outcome = self._rules.attempted(before, delivery, request, now, jitter)
            await db.webhooks.write_delivery(outcome)
            if after != before:
                await db.webhooks.write(after)
            if before.enabled and not after.enabled:
                await self._disabled(db, after, now)
        if outcome.state is DeliveryState.FAILED:
            log.warning("event not delivered", webhook=after.id, tenant=after.tenant, event_id=outcome.event)
        return Done()

    async def _disabled(self, db: UnitOfWork, record: WebhookRecord, now: float) -> None:
        """Tell the audit log and the tenant's other webhooks, and end the deliveries that wait."""
        reason = record.disabled_reason or ""
        log.warning("webhook disabled", webhook=record.id, tenant=record.tenant, reason=reason)
        metrics.webhooks_disabled.add(1)
        await db.webhooks.give_up(record.id, f"the webhook was disabled: {reason}", now)
        entry = AuditEntry(
            id=new_id("aud"),
            at=now,
            operation=DISABLED,
            tenant=record.tenant,
            path=f"/v1/webhooks/{record.id}",
            target=record.id,
            change=json.dumps({"enabled": False, "disabled_reason": reason}),
            status=200,
        )
        await db.audit.add([entry])
        # Without the URL, whose path or query may be a secret between the tenant and that receiver.
        body = json.dumps({"webhook": record.id, "label": record.label, "reason": reason})
        event = new_id("ev")
        for other in await db.webhooks.of_tenant(record.tenant):
            if other.enabled and rules.wants(other.types, DISABLED_TYPE):
                made = DeliveryRecord(
                    webhook=other.id, event=event, type=DISABLED_TYPE, created_at=now, due_at=now
                )
                await db.webhooks.deliver(made, body)

    # Retention

    async def run(self) -> None:
        """Delete old deliveries at intervals; never returns."""
        while True:
            try:
                await self.purge()
            except TurboServeError as error:
                log.warning("retention delayed", error=error.detail)
            await asyncio.sleep(self._settings.purge_s)

    async def purge(self) -> None:
        """Delete deliveries that ended long ago, and end those beyond the limit of each webhook."""
        now = self._clock.wall()
        before, given_up = now - self._settings.webhook_retention_s, 0
        has_more = True
        while has_more:
            async with self._database.transaction(durable=False) as db:
                done = await db.webhooks.purge(before, self._settings.webhook_backlog, now)
            given_up += done.given_up
            has_more = max(done.deleted, done.given_up) >= PURGE_ROWS
        if given_up:
            log.warning("deliveries given up", deliveries=given_up)


def _visible(record: WebhookRecord | None, ref: WebhookRef) -> WebhookRecord:
    """Return the record. Raises NotFoundError if there is none, or it is another tenant's."""
    if record is None or record.tenant != ref.tenant:
        raise NotFoundError(f"there is no webhook {ref.webhook}", field="webhook")
    return record


def _enabled(record: WebhookRecord) -> WebhookRecord:
    if not record.enabled:
        raise ConflictError(f"the webhook is disabled: {record.disabled_reason}", field="enabled")
    return record


def _fitting(due: list[DueDelivery]) -> list[DueDelivery]:
    """Return the first deliveries whose events fit into one answer; always one if there is any."""
    size = 0
    fitting: list[DueDelivery] = []
    for one in due:
        size += len(one.body.encode())
        if fitting and size > ANSWER_BYTES:
            break
        fitting.append(one)
    return fitting


def _taken(record: WebhookRecord, due: DueDelivery, claim: str, now: float) -> TakenDelivery:
    return TakenDelivery(
        claim=claim,
        webhook=record.id,
        url=record.url,
        salts=rules.signing_salts(record, now),
        event=due.record.event,
        type=due.record.type,
        session=due.record.session,
        attempt=due.record.attempts + 1,
        body=due.body,
        created_at=due.record.created_at,
        traceparent=due.traceparent,
    )
