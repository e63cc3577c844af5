"""The audit log at the state store, on Postgres and in memory."""

from __future__ import annotations

import time
from typing import Any

from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.contracts.audit import AuditEntry, AuditPage, ListAudit, NoteAudit
from turboserve.ids import new_id

SERVERS = ("real", "memory")


def entry(tenant: str, **fields: Any) -> AuditEntry:
    values = {
        "id": new_id("aud"),
        "at": time.time(),
        "operation": "create_key",
        "tenant": tenant,
        "key": "k1",
        "address": "127.0.0.1",
        "path": "/v1/keys",
        "status": 201,
        **fields,
    }
    return AuditEntry.model_validate(values)


async def note(api: Harness, *entries: AuditEntry) -> None:
    await api.bus.call(subjects.NOTE_AUDIT, NoteAudit(entries=entries))


async def page(api: Harness, **filters: Any) -> AuditPage:
    return await api.bus.call(subjects.LIST_AUDIT, ListAudit(**filters))


async def test_entries_are_read_by_page_newest_first_and_written_once(api: Harness) -> None:
    tenant = new_id("t")
    made = [entry(tenant) for _ in range(5)]
    await note(api, *made[:3])
    # The answer was lost, and the gateway sends again.
    await note(api, *made)
    first = await page(api, tenant=tenant, limit=3)
    assert first.entries == (made[4], made[3], made[2])
    second = await page(api, tenant=tenant, limit=3, after=first.next)
    assert (second.entries, second.next) == ((made[1], made[0]), None)


async def test_filters_narrow_the_log(api: Harness) -> None:
    tenant = new_id("t")
    old = entry(tenant, at=time.time() - 100.0, key="k2")
    refused = entry(tenant, operation="revoke_key", status=403, code="missing_scope", key=None)
    new = entry(tenant)
    await note(api, old, refused, new, entry(new_id("t")))
    cut = old.at + 50.0
    for filters, wanted in (
        ({}, (new, refused, old)),
        ({"refused": True}, (refused,)),
        ({"refused": False}, (new, old)),
        ({"operation": "revoke_key"}, (refused,)),
        ({"key": "k2"}, (old,)),
        ({"since": cut}, (new, refused)),
        ({"until": cut}, (old,)),
        ({"until": cut, "refused": True}, ()),
    ):
        assert (await page(api, tenant=tenant, **filters)).entries == wanted, filters


async def test_entries_beyond_the_retention_are_deleted(start_store: StartStore, api: Harness) -> None:
    tenant = new_id("t")
    kept, due = entry(tenant, at=time.time() - 364 * 86_400.0), entry(tenant, at=time.time() - 366 * 86_400.0)
    await note(api, due, kept)
    await note(api, entry(tenant))
    found = (await page(api, tenant=tenant)).entries
    assert kept in found
    assert due not in found
