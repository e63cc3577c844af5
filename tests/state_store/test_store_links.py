"""The state store's endpoints of links and signing keys, on Postgres and in memory."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.clock import SystemClock
from turboserve.contracts.base import Secret
from turboserve.contracts.errors import (
    ConflictError,
    InvalidInputError,
    LinkLimitError,
    NotFoundError,
    SessionNotFoundError,
)
from turboserve.contracts.links import (
    SESSION_LINKS_LIMIT,
    CreateLink,
    GetSigning,
    LinkChange,
    LinkRecord,
    LinkRef,
    ListLinks,
    Role,
    Signing,
    SigningKey,
)
from turboserve.ids import new_id, random_token
from turboserve.state_store.core.links import CLOCK_SKEW_S, LinkCounts, LinkRules

SERVERS = ("real", "memory")
RULES = LinkRules(lifetime_s=100.0, lifetime_max_s=1_000.0, signing_key_lifetime_s=500.0)


async def make(api: Harness, session: str, **fields: Any) -> LinkRecord:
    values = {"id": new_id("lnk"), "session": session, "tenant": "t", "role": Role.VIEWER, **fields}
    return await api.bus.call(subjects.CREATE_LINK, CreateLink.model_validate(values))


async def revoke(api: Harness, link: LinkRecord) -> LinkRecord:
    ref = LinkRef(link=link.id, session=link.session, tenant=link.tenant)
    return await api.bus.call(subjects.REVOKE_LINK, ref)


async def signing(api: Harness, version: int | None = None) -> Signing:
    return await api.bus.call(subjects.GET_SIGNING, GetSigning(version=version))


@pytest.fixture
async def session(api: Harness) -> str:
    await api.worker("links", capacity=4)
    return (await api.create("links", tenant="t")).id


async def test_a_link_is_listed_until_it_expires(
    api: Harness, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await make(api, session, label="review", created_by="k1")
    assert first.expires_at == pytest.approx(first.created_at + 86_400.0)
    second = await make(api, session, role=Role.CONTROLLER, expires_at=time.time() + 600.0)
    found = await api.bus.call(subjects.LIST_LINKS, ListLinks(session=session, tenant="t"))
    assert found.links == (second, first)
    monkeypatch.setattr(SystemClock, "wall", staticmethod(lambda: time.time() + 601.0))
    found = await api.bus.call(subjects.LIST_LINKS, ListLinks(session=session, tenant="t"))
    assert found.links == (first,)


async def test_a_repeat_creates_no_second_link(api: Harness, session: str) -> None:
    first = await make(api, session)
    assert await make(api, session, id=first.id) == first
    for change in ({"role": Role.CONTROLLER}, {"label": "x"}, {"expires_at": time.time() + 60.0}):
        with pytest.raises(ConflictError):
            await make(api, session, id=first.id, **change)


async def test_a_link_of_another_tenant_does_not_exist(api: Harness, session: str) -> None:
    link = await make(api, session)
    with pytest.raises(SessionNotFoundError):
        await make(api, session, tenant="other")
    with pytest.raises(SessionNotFoundError):
        await api.bus.call(subjects.LIST_LINKS, ListLinks(session=session, tenant="other"))
    other = (await api.create("links", tenant="other")).id
    for ref in (
        LinkRef(link=link.id, session=session, tenant="other"),
        LinkRef(link=link.id, session=other, tenant="other"),
        LinkRef(link="no_link", session=session, tenant="t"),
    ):
        with pytest.raises(NotFoundError):
            await api.bus.call(subjects.REVOKE_LINK, ref)
    assert link.id not in (await signing(api)).revoked


async def test_a_revocation_raises_the_version_and_is_announced(api: Harness, session: str) -> None:
    hints: list[LinkChange] = []
    await signing(api)

    async def heard(change: LinkChange, _body: bytes) -> None:
        hints.append(change)

    await api.bus.subscribe(subjects.LINK, "*", heard)
    link = await make(api, session)
    before = await signing(api)
    assert before.keys
    assert (await signing(api, before.version)).keys is None
    revoked = await revoke(api, link)
    assert revoked.revoked_at is not None
    assert await revoke(api, link) == revoked
    after = await signing(api, before.version)
    assert after.version == before.version + 1
    assert link.id in after.revoked
    assert after.keys == before.keys
    await eventually(lambda: hints == [LinkChange(link=link.id, version=after.version)])


async def test_limits_and_lifetimes_are_named(api: Harness, session: str) -> None:
    for expires_at in (time.time() - 1.0, time.time() + 31 * 86_400.0):
        with pytest.raises(InvalidInputError) as caught:
            await make(api, session, expires_at=expires_at)
        assert caught.value.field == "expires_at"
        assert str(caught.value.limit) in caught.value.detail
    for _ in range(SESSION_LINKS_LIMIT):
        await make(api, session)
    with pytest.raises(LinkLimitError) as full:
        await make(api, session)
    assert (full.value.field, full.value.limit) == ("session", SESSION_LINKS_LIMIT)


def key(number: int, created_at: float) -> SigningKey:
    secret: Secret = random_token(32)  # type: ignore[assignment]
    return SigningKey(id=f"{number:016x}", secret=secret, created_at=created_at)


def test_a_key_is_replaced_and_verifies_until_its_links_have_expired() -> None:
    old, new = key(1, 0.0), key(2, 500.0)
    assert RULES.is_new_key_due([], 0.0)
    assert not RULES.is_new_key_due([old], 499.0)
    assert RULES.is_new_key_due([old], 500.0)
    last = CreateLink(id="l", session="s", tenant="t", role=Role.VIEWER, expires_at=500.0 + 1_000.0)
    # The last link that the old key may have signed, by a gateway that did not know the new one yet.
    expires_at = RULES.created(last, LinkCounts(0, 0, 0), 500.0).expires_at
    assert RULES.unused_keys([old, new], expires_at + CLOCK_SKEW_S) == []
    assert RULES.unused_keys([old, new], expires_at + 2 * CLOCK_SKEW_S) == [old]
    assert RULES.unused_keys([new], 1e9) == []


def test_no_message_shows_a_secret() -> None:
    made = key(1, 0.0)
    answer = Signing(database=random_token(16), version=1, keys=(made,))
    assert made.secret.get_secret_value() not in repr(answer)
    assert Signing.from_bytes(answer.to_bytes()) == answer
