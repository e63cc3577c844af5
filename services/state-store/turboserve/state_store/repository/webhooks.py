"""Rows of webhooks and of their deliveries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Text,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.webhooks import (
    DeliveryPage,
    DeliveryRecord,
    DeliveryState,
    ListDeliveries,
    WebhookRecord,
)
from turboserve.state_store.access_tables import key_editions
from turboserve.state_store.core.paging import first_page
from turboserve.state_store.core.webhooks import ORDERED_ATTEMPTS
from turboserve.state_store.ports.records import DueDelivery, WebhookPurge
from turboserve.state_store.ports.webhooks import GIVEN_UP, PURGE_ROWS, WEBHOOK_FIXED
from turboserve.state_store.webhook_tables import webhook_deliveries, webhooks

NAME = "webhooks"
"""Name of the row of `key_editions` that serves as a lock."""

_RECORD = [webhooks.c[name] for name in WebhookRecord.model_fields]
_DELIVERY = [webhook_deliveries.c[name] for name in DeliveryRecord.model_fields]
_OUTCOME = {"state", "attempts", "due_at", "attempted_at", "status", "error", "finished_at"}
_COLUMNS = webhook_deliveries.c
_WAITS = _COLUMNS.state == DeliveryState.WAITING.value

FROM_OUTBOX = text(
    """
    with removed as (
        delete from outbox
        where number = any(:numbers) and set_config('synchronous_commit', 'off', true) = 'off'
        returning number, event_id, subject, body, created_at, traceparent, tenant, type
    )
    insert into webhook_deliveries
        (webhook, event, type, session, body, created_at, due_at, traceparent)
    select w.id, r.event_id, r.type, split_part(r.subject, '.', 2), r.body, r.created_at, r.created_at,
        r.traceparent
    from removed r join webhooks w on w.tenant = r.tenant
    where w.enabled and w.created_at <= r.created_at and (
        w.types = '[]'::jsonb
        or jsonb_exists_any(w.types, array[r.type, split_part(r.type, '.', 1) || '.*'])
    )
    order by r.number, w.number
    on conflict do nothing
    """
).bindparams(bindparam("numbers", type_=ARRAY(BigInteger)))
"""Removes events from the outbox and inserts their deliveries, as one statement."""

_DUE = text(
    """
    select d.* from unnest(cast(:ids as text[]), cast(:places as bigint[])) with ordinality
        as w(id, places, place)
    cross join lateral (
        select one.*, row_number() over (order by one.due_at, one.number) as turn
        from webhook_deliveries one
        where one.webhook = w.id and one.state = 'waiting' and one.due_at <= :now
        and (one.claimed_until is null or one.claimed_until <= :now)
        and not exists (
            select 1 from webhook_deliveries earlier
            where earlier.webhook = one.webhook and earlier.session = one.session
            and earlier.state = 'waiting' and earlier.number < one.number
            and earlier.attempts < :ordered_attempts
        )
        order by one.due_at, one.number limit w.places
    ) d
    order by d.turn, w.place
    """
).bindparams(
    bindparam("ids", type_=ARRAY(Text)),
    bindparam("places", type_=ARRAY(BigInteger)),
    ordered_attempts=ORDERED_ATTEMPTS,
)

_LOCK_TENANTS = text(
    """
    select pg_advisory_xact_lock(hashtextextended('webhooks of ' || tenant, 0))
    from unnest(cast(:tenants as text[])) as t(tenant)
    """
).bindparams(bindparam("tenants", type_=ARRAY(Text)))

_GIVE_UP = text(
    """
    with overfull as (
        select webhook from webhook_deliveries where state = 'waiting'
        group by webhook having count(*) > :backlog
    ), surplus as (
        select number from (
            select d.number, row_number() over (partition by d.webhook order by d.number desc) as place
            from webhook_deliveries d join overfull o on o.webhook = d.webhook where d.state = 'waiting'
        ) ranked where place > :backlog order by number limit :rows
    ), locked as (
        select number from webhook_deliveries
        where number in (select number from surplus) and state = 'waiting' for update skip locked
    )
    update webhook_deliveries d set state = 'failed', error = :reason, finished_at = :now,
        claim = null, claimed_until = null
    from locked where d.number = locked.number
    """
)

_DELETE_OLD = text(
    """
    delete from webhook_deliveries where number in (
        select number from webhook_deliveries where finished_at < :before limit :rows for update skip locked
    )
    """
)

_DELETE_ORPHANS = text(
    """
    with recursive named as (
        (select webhook from webhook_deliveries order by webhook limit 1)
        union all
        select (
            select d.webhook from webhook_deliveries d where d.webhook > n.webhook order by d.webhook limit 1
        ) from named n where n.webhook is not null
    ), orphans as materialized (
        select n.webhook from named n
        where n.webhook is not null and not exists (select 1 from webhooks w where w.id = n.webhook)
    )
    delete from webhook_deliveries where number in (
        select d.number from webhook_deliveries d join orphans o on o.webhook = d.webhook
        limit :rows for update of d skip locked
    )
    """
)
"""Reads one entry of the index for each webhook instead of all deliveries."""


class SqlWebhooks:
    """`WebhookRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self) -> None:
        first = pg_insert(key_editions).values(name=NAME, salt="", version=0)
        await self._db.execute(first.on_conflict_do_nothing(index_elements=[key_editions.c.name]))
        query = select(key_editions.c.version).where(key_editions.c.name == NAME)
        await self._db.execute(query.with_for_update())

    async def get(self, webhook: str, *, lock: bool = False) -> WebhookRecord | None:
        query = select(*_RECORD).where(webhooks.c.id == webhook)
        if lock:
            query = query.with_for_update(key_share=True)
        row = (await self._db.execute(query)).mappings().first()
        return None if row is None else WebhookRecord.model_validate(dict(row))

    async def of_tenant(self, tenant: str) -> list[WebhookRecord]:
        query = select(*_RECORD).where(webhooks.c.tenant == tenant).order_by(webhooks.c.number)
        return [WebhookRecord.model_validate(dict(row)) for row in (await self._db.execute(query)).mappings()]

    async def insert(self, record: WebhookRecord) -> None:
        await self._db.execute(insert(webhooks).values(record.model_dump(mode="json")))

    async def write(self, record: WebhookRecord) -> None:
        values = record.model_dump(mode="json", exclude=set(WEBHOOK_FIXED))
        await self._db.execute(update(webhooks).where(webhooks.c.id == record.id).values(values))

    async def delete(self, webhook: str) -> None:
        await self._db.execute(delete(webhooks).where(webhooks.c.id == webhook))
        first = select(_COLUMNS.number).where(_COLUMNS.webhook == webhook).limit(PURGE_ROWS)
        await self._db.execute(delete(webhook_deliveries).where(_COLUMNS.number.in_(first)))

    async def deliver(self, record: DeliveryRecord, body: str) -> None:
        values = record.model_dump(mode="json") | {"body": body}
        await self._db.execute(pg_insert(webhook_deliveries).values(values).on_conflict_do_nothing())

    async def delivery(self, webhook: str, event: str) -> tuple[DeliveryRecord, str | None] | None:
        query = select(*_DELIVERY, _COLUMNS.claim).where(_COLUMNS.webhook == webhook, _COLUMNS.event == event)
        row = (await self._db.execute(query.with_for_update())).mappings().first()
        return None if row is None else (DeliveryRecord.model_validate(dict(row)), row["claim"])

    async def write_delivery(self, record: DeliveryRecord) -> None:
        values = record.model_dump(mode="json", include=_OUTCOME) | {"claim": None, "claimed_until": None}
        this = (_COLUMNS.webhook == record.webhook) & (_COLUMNS.event == record.event)
        await self._db.execute(update(webhook_deliveries).where(this).values(values))

    async def page(self, request: ListDeliveries) -> DeliveryPage:
        query = (
            select(_COLUMNS.number, *_DELIVERY)
            .where(_COLUMNS.webhook == request.webhook)
            .order_by(_COLUMNS.number.desc())
            .limit(request.limit + 1)
        )
        if request.state is not None:
            query = query.where(_COLUMNS.state == request.state.value)
        if request.after is not None:
            query = query.where(_COLUMNS.number < request.after)
        rows = (await self._db.execute(query)).mappings().all()
        shown, after = first_page(rows, request.limit, itemgetter("number"))
        return DeliveryPage(
            deliveries=tuple(DeliveryRecord.model_validate(dict(row)) for row in shown),
            next=after,
        )

    async def ready(self, now: float, limit: int) -> list[WebhookRecord]:
        free = or_(_COLUMNS.claimed_until.is_(None), _COLUMNS.claimed_until <= now)
        due = exists().where(_COLUMNS.webhook == webhooks.c.id, _WAITS, _COLUMNS.due_at <= now, free)
        query = (
            select(*_RECORD)
            .where(webhooks.c.enabled, due)
            .order_by(webhooks.c.taken_at, webhooks.c.number)
            .limit(limit)
            .with_for_update(key_share=True, skip_locked=True)
        )
        return [WebhookRecord.model_validate(dict(row)) for row in (await self._db.execute(query)).mappings()]

    async def turn(self, names: Sequence[str], now: float) -> None:
        await self._db.execute(update(webhooks).where(webhooks.c.id.in_(list(names))).values(taken_at=now))

    async def lock_tenants(self, tenants: Collection[str]) -> None:
        # In one order, so that two transactions do not wait for each other.
        await self._db.execute(_LOCK_TENANTS, {"tenants": sorted(tenants)})

    async def claimed(self, tenants: Collection[str], now: float) -> dict[str, dict[str, int]]:
        query = (
            select(webhooks.c.tenant, webhooks.c.id, func.count())
            .join_from(webhooks, webhook_deliveries, _COLUMNS.webhook == webhooks.c.id)
            .where(webhooks.c.tenant.in_(list(tenants)), _WAITS, _COLUMNS.claimed_until > now)
            .group_by(webhooks.c.tenant, webhooks.c.id)
        )
        found: dict[str, dict[str, int]] = {tenant: {} for tenant in tenants}
        for tenant, webhook, count in await self._db.execute(query):
            found[tenant][webhook] = count
        return found

    async def due(self, places: Sequence[tuple[str, int]], now: float) -> list[DueDelivery]:
        values: dict[str, Any] = {
            "ids": [webhook for webhook, _ in places],
            "places": [count for _, count in places],
            "now": now,
        }
        rows = (await self._db.execute(_DUE, values)).mappings()
        return [
            DueDelivery(
                row["number"], DeliveryRecord.model_validate(dict(row)), row["body"], row["traceparent"]
            )
            for row in rows
        ]

    async def claim(self, numbers: Sequence[int], claim: str, until: float, now: float) -> None:
        query = (
            update(webhook_deliveries)
            .where(_COLUMNS.number.in_(list(numbers)), _WAITS)
            .values(claim=claim, claimed_until=until)
            .returning(_COLUMNS.webhook)
        )
        found = set((await self._db.execute(query)).scalars())
        await self.turn(sorted(found), now)

    async def give_up(self, webhook: str, reason: str, now: float) -> None:
        ended = {"state": DeliveryState.FAILED.value, "error": reason, "finished_at": now}
        query = update(webhook_deliveries).where(_COLUMNS.webhook == webhook, _WAITS)
        await self._db.execute(query.values(claim=None, claimed_until=None, **ended))

    async def purge(self, before: float, backlog: int, now: float) -> WebhookPurge:
        limit = {"rows": PURGE_ROWS}
        old = await self._db.execute(_DELETE_OLD, {"before": before} | limit)
        orphans = await self._db.execute(_DELETE_ORPHANS, limit)
        values = {"backlog": backlog, "reason": GIVEN_UP, "now": now}
        given_up = await self._db.execute(_GIVE_UP, values | limit)
        return WebhookPurge(old.rowcount + orphans.rowcount, given_up.rowcount)
