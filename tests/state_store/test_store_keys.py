"""The state store's endpoints of API keys, on Postgres and in memory."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.clock import SystemClock
from turboserve.contracts.errors import ConflictError, InvalidInputError, KeyLimitError, NotFoundError
from turboserve.contracts.keys import (
    KEYS_LIMIT,
    CreatedKey,
    CreateKey,
    GetValidKeys,
    KeyChange,
    KeyRecord,
    KeyRef,
    KeyUse,
    ListKeys,
    NoteKeyUses,
    Scope,
    ValidKeys,
)
from turboserve.ids import new_id, random_token
from turboserve.state_store.core import keys as rules

SERVERS = ("real", "memory")


def request(**fields: Any) -> CreateKey:
    values = {
        "id": new_id("key"),
        "tenant": "acme",
        "scopes": (Scope.SESSIONS_READ,),
        "hash": random_token(32),
    }
    return CreateKey.model_validate({**values, **fields})


def used(key: str, at: float) -> NoteKeyUses:
    return NoteKeyUses(uses=(KeyUse(key=key, at=at),))


async def create(api: Harness, **fields: Any) -> CreatedKey:
    return await api.bus.call(subjects.CREATE_KEY, request(**fields))


async def read(api: Harness, key: str) -> KeyRecord:
    return await api.bus.call(subjects.GET_KEY, KeyRef(key=key))


async def revoke(api: Harness, key: str) -> KeyRecord:
    return await api.bus.call(subjects.REVOKE_KEY, KeyRef(key=key))


async def valid(api: Harness, version: int | None = None) -> ValidKeys:
    return await api.bus.call(subjects.GET_VALID_KEYS, GetValidKeys(version=version))


async def valid_ids(api: Harness) -> set[str]:
    return {key.id for key in (await valid(api)).keys or ()}


async def test_a_key_is_valid_until_it_is_revoked(api: Harness) -> None:
    wanted = request(scopes=("sessions:write", "admin", "admin"), label="CI of acme", expires_at=9e9)
    made = await api.bus.call(subjects.CREATE_KEY, wanted)
    assert made.created
    assert made.key == await read(api, wanted.id)
    assert made.key.scopes == ("admin", "sessions:write")
    [found] = [key for key in (await valid(api)).keys or () if key.id == wanted.id]
    assert (found.hash, found.tenant, found.expires_at) == (wanted.hash, "acme", 9e9)
    revoked = await revoke(api, wanted.id)
    assert revoked.revoked_at is not None
    assert await revoke(api, wanted.id) == revoked == await read(api, wanted.id)
    assert wanted.id not in await valid_ids(api)


async def test_no_answer_but_that_to_gateways_about_valid_keys_has_a_hash(api: Harness) -> None:
    made = await create(api)
    page = await api.bus.call(subjects.LIST_KEYS, ListKeys())
    for answer in (made, page, await read(api, made.key.id), await revoke(api, made.key.id)):
        assert "hash" not in answer.to_text()


async def test_a_repeat_creates_no_second_key(api: Harness) -> None:
    first = request(label="one")
    made = await api.bus.call(subjects.CREATE_KEY, first)
    again = await api.bus.call(subjects.CREATE_KEY, first.model_copy(update={"hash": random_token(32)}))
    assert (again.key, again.created) == (made.key, False)
    [found] = [key for key in (await valid(api)).keys or () if key.id == first.id]
    assert found.hash == first.hash
    for change in ({"label": "two"}, {"tenant": "other"}, {"scopes": ("admin",)}, {"expires_at": 9e9}):
        with pytest.raises(ConflictError) as caught:
            await api.bus.call(subjects.CREATE_KEY, first.model_copy(update=change))
        assert caught.value.field == "id"


async def test_every_change_raises_the_version_and_nothing_else_does(api: Harness) -> None:
    before = await valid(api)
    made = await create(api)
    created = await valid(api, before.version)
    assert created.version == before.version + 1
    assert created.keys is not None
    unchanged = await valid(api, created.version)
    assert (unchanged.keys, unchanged.version, unchanged.salt) == (None, created.version, before.salt)
    await api.bus.call(subjects.NOTE_KEY_USES, used(made.key.id, 1.0))
    with pytest.raises(NotFoundError):
        await revoke(api, "no_key")
    assert (await valid(api, created.version)).keys is None
    await revoke(api, made.key.id)
    await revoke(api, made.key.id)
    assert (await valid(api)).version == created.version + 1


async def test_an_expired_key_is_not_valid(api: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await create(api, expires_at=time.time() - 1.0)
    limit = caught.value.limit
    assert caught.value.field == "expires_at"
    assert isinstance(limit, str)
    assert datetime.fromisoformat(limit).timestamp() == pytest.approx(time.time(), abs=600.0)
    assert limit.endswith("Z")
    assert limit in caught.value.detail
    made = await create(api, expires_at=time.time() + 600.0)
    assert made.key.id in await valid_ids(api)
    monkeypatch.setattr(SystemClock, "wall", staticmethod(lambda: time.time() + 601.0))
    assert made.key.id not in await valid_ids(api)
    assert (await read(api, made.key.id)).revoked_at is None


async def test_gateways_get_a_hint_of_each_change(api: Harness) -> None:
    hints: list[KeyChange] = []

    async def hear(hint: KeyChange, _body: bytes) -> None:
        hints.append(hint)

    await api.bus.subscribe(subjects.KEY, "*", hear)
    await api.bus.flush()
    made = await create(api)
    await eventually(lambda: len(hints) == 1)
    await revoke(api, made.key.id)
    await eventually(lambda: len(hints) == 2)
    assert {hint.key for hint in hints} == {made.key.id}
    assert hints[1].version == hints[0].version + 1 == (await valid(api)).version


async def test_the_last_use_is_kept(api: Harness) -> None:
    made = await create(api)
    now = time.time()
    for at, written in ((now - 200.0, now - 200.0), (now - 150.0, now - 200.0), (now - 100.0, now - 100.0)):
        await api.bus.call(subjects.NOTE_KEY_USES, used(made.key.id, at))
        assert (await read(api, made.key.id)).last_used_at == written
    await api.bus.call(subjects.NOTE_KEY_USES, used(made.key.id, now + 3_600.0))
    assert (await read(api, made.key.id)).last_used_at == now - 100.0


async def test_the_keys_are_listed_by_page_newest_first(api: Harness) -> None:
    tenant = new_id("ten")
    made = [(await create(api, tenant=tenant)).key.id for _ in range(5)]
    found: list[str] = []
    after = None
    while True:
        page = await api.bus.call(subjects.LIST_KEYS, ListKeys(tenant=tenant, limit=2, after=after))
        found += [key.id for key in page.keys]
        if page.next is None:
            break
        after = page.next
    assert found == made[::-1]
    everything = await api.bus.call(subjects.LIST_KEYS, ListKeys(limit=1_000))
    assert set(made) <= {key.id for key in everything.keys}


async def test_keys_that_are_created_at_once_have_versions_of_their_own(api: Harness) -> None:
    before = (await valid(api)).version
    made = await asyncio.gather(*(create(api) for _ in range(8)))
    after = await valid(api)
    assert after.version == before + 8
    assert {one.key.id for one in made} <= {key.id for key in after.keys or ()}


def test_there_is_a_limit_of_valid_keys() -> None:
    assert rules.created(request(), KEYS_LIMIT - 1, 1.0).created_at == 1.0
    with pytest.raises(KeyLimitError) as caught:
        rules.created(request(), KEYS_LIMIT, 1.0)
    assert (caught.value.field, caught.value.limit) == ("keys", KEYS_LIMIT)
