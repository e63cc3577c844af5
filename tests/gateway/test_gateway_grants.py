"""Links and tickets: what a signature protects, and for how long a revoked link works, in virtual time."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.test_gateway_key_follower import EFFECTIVE_S, LoopClock
from turboserve import subjects
from turboserve.bus import Bus
from turboserve.config import Settings
from turboserve.contracts.errors import UnauthorizedError
from turboserve.contracts.links import CreateLink, LinkRef, Role, SigningKey
from turboserve.contracts.requests import CreateSession
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.grants import ROLE_SCOPES, Grant, GrantKind, signed, verified
from turboserve.gateway.auth.hashing import KeySet, StoredKey
from turboserve.gateway.auth.middleware import Authenticator
from turboserve.gateway.auth.signing import GrantSigner
from turboserve.gateway.auth.stored import LOOK_EVERY_S
from turboserve.gateway.problems.errors import KeysUnreadError, LinkEndedError, TicketExpiredError
from turboserve.simulation.runtime.broker import FaultyNetwork, MemoryBroker, Rates
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.rows.behavior import PostgresBehavior
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.state_store.core.links import LinkRules
from turboserve.state_store.core.sessions import create
from turboserve.state_store.endpoints import serve_links
from turboserve.state_store.service.links import Links

GRANT = Grant("ses_1", "acme", Role.VIEWER, 2_000_000_000.0, link="lnk_1")
KEY = SigningKey.model_validate({"id": "0" * 16, "secret": "ab" * 32, "created_at": 1.0})
OTHER = SigningKey.model_validate({"id": "1" * 16, "secret": "cd" * 32, "created_at": 2.0})
KNOWN = {key.id: key for key in (KEY, OTHER)}
RULES = LinkRules(lifetime_s=3_600.0, lifetime_max_s=86_400.0, signing_key_lifetime_s=7_200.0)


@pytest.mark.parametrize("kind", list(GrantKind))
def test_a_text_grants_what_was_signed(kind: GrantKind) -> None:
    for grant in (
        GRANT,
        Grant("s", "t", Role.CONTROLLER, 1.5, key="k1"),
        replace(GRANT, link_expires_at=3.0),
    ):
        assert verified(kind, signed(kind, grant, KEY), KNOWN) == grant


def test_a_ticket_is_no_link_and_the_other_way_round() -> None:
    ticket, link = signed(GrantKind.TICKET, GRANT, KEY), signed(GrantKind.LINK, GRANT, KEY)
    assert verified(GrantKind.LINK, ticket, KNOWN) is None
    assert verified(GrantKind.LINK, link.replace("tsl_", "tst_"), KNOWN) is None
    assert verified(GrantKind.LINK, ticket.replace("tst_", "tsl_"), KNOWN) is None


@given(position=st.integers(0, 400), letter=st.sampled_from("AZaz09-_.=\0é"))
def test_no_changed_text_grants_anything(position: int, letter: str) -> None:
    text = signed(GrantKind.LINK, GRANT, KEY)
    at = position % len(text)
    changed = text[:at] + letter + text[at + 1 :]
    assert (verified(GrantKind.LINK, changed, KNOWN) is None) == (changed != text)


def test_another_payload_needs_another_signature() -> None:
    head, payload, mac = signed(GrantKind.LINK, GRANT, KEY).split(".")
    values = json.loads(base64.urlsafe_b64decode(payload + "=="))
    wider = base64.urlsafe_b64encode(json.dumps(values | {"r": "controller"}).encode()).decode().rstrip("=")
    # The signature of the former payload, none, and one of the key that is named but not the one that signed.
    for text in (f"{head}.{wider}.{mac}", f"{head}.{wider}.", f"{head}.{wider}"):
        assert verified(GrantKind.LINK, text, KNOWN) is None
    assert verified(GrantKind.LINK, f"tsl_{OTHER.id}.{payload}.{mac}", KNOWN) is None
    assert verified(GrantKind.LINK, signed(GrantKind.LINK, GRANT, KEY), {OTHER.id: OTHER}) is None


class Deployment:
    """A state store and two gateways on one broker and one database in memory."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.clock = loop, LoopClock(loop)
        self.rates = Rates()
        network = FaultyNetwork(random.Random(1), self.rates)
        self.broker = MemoryBroker(random.Random(1), network, loop=loop)
        self.database = MemoryDatabase(MemoryPostgres(PostgresBehavior(random.Random(1)), loop))
        self.signers: list[GrantSigner] = []
        self.tasks: list[Any] = []

    async def connect(self, service: str) -> Bus:
        settings = Settings(nats_url=f"nats://{service}@memory")
        return await Bus.connect(service, settings, self.broker.connect)

    async def start(self) -> None:
        self.store = await self.connect("state-store")
        self.bus = await self.connect("gateway")
        await serve_links(self.store, self.clock, Links(self.database, self.store, self.clock, RULES))
        async with self.database.transaction() as db:
            record = CreateSession(id="ses_1", tenant="acme", model="m", prompt="p", seed=1)
            await db.changes.create(create(record, self.clock.wall()))
        for _ in range(2):
            signer = GrantSigner(await self.connect("gateway"), self.clock)
            await signer.listen()
            self.signers.append(signer)
            self.tasks.append(self.loop.create_task(signer.run()))

    async def link(self, name: str) -> str:
        """Create a link. Returns its text."""
        request = CreateLink(id=name, session="ses_1", tenant="acme", role=Role.VIEWER)
        made = await self.bus.call(subjects.CREATE_LINK, request)
        grant = Grant(made.session, made.tenant, made.role, made.expires_at, made.id)
        return await self.signers[0].sign(GrantKind.LINK, grant)

    async def revoke(self, name: str) -> None:
        await self.bus.call(subjects.REVOKE_LINK, LinkRef(link=name, session="ses_1", tenant="acme"))

    def admits(self, text: str) -> list[bool]:
        """Return whether each gateway admits the link."""
        return [self.run(admits(signer, text)) for signer in self.signers]

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)


async def admits(signer: GrantSigner, text: str) -> bool:
    try:
        return await signer.check(GrantKind.LINK, text) is not None
    except LinkEndedError:
        return False


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    loop = VirtualLoop(1)
    found = Deployment(loop)
    found.run(found.start())
    yield found
    loop.close()


@pytest.mark.parametrize("hints", [True, False])
def test_a_link_works_at_once_and_its_revocation_in_time(deployment: Deployment, hints: bool) -> None:
    deployment.rates.lost_hint = 0.0 if hints else 1.0
    text = deployment.run(deployment.link("lnk_1"))
    assert deployment.admits(text) == [True, True]
    grant = verified(GrantKind.LINK, text, deployment.signers[0]._keys)
    assert grant is not None
    ticket = replace(grant, link_expires_at=grant.expires_at)
    deployment.run(deployment.revoke("lnk_1"))
    deployment.loop.advance(EFFECTIVE_S if not hints else 0.05)
    # Streams that are open end as well, also those of tickets that the link has made.
    for one in (grant, ticket):
        assert [signer.holds(one) for signer in deployment.signers] == [False, False]
    assert deployment.admits(text) == [False, False]


@pytest.mark.parametrize("moment_s", [0.0, 0.2, 0.4, 0.6])
def test_the_time_holds_with_a_lost_answer_as_well(deployment: Deployment, moment_s: float) -> None:
    text = deployment.run(deployment.link("lnk_1"))
    assert deployment.admits(text) == [True, True]
    deployment.rates.lost_hint = 1.0
    deployment.loop.advance(moment_s)
    deployment.run(deployment.revoke("lnk_1"))
    deployment.rates.lost_answer = 1.0
    deployment.loop.advance(LOOK_EVERY_S)
    deployment.rates.lost_answer = 0.0
    deployment.loop.advance(EFFECTIVE_S - LOOK_EVERY_S)
    assert deployment.admits(text) == [False, False]


def test_without_the_state_store_known_links_work_and_expire(deployment: Deployment) -> None:
    text = deployment.run(deployment.link("lnk_1"))
    assert deployment.admits(text) == [True, True]
    fresh = GrantSigner(deployment.bus, deployment.clock)
    deployment.run(deployment.store.close())
    assert deployment.admits(text) == [True, True]
    with pytest.raises(KeysUnreadError):
        deployment.run(fresh.check(GrantKind.LINK, text))
    deployment.loop.advance(RULES.lifetime_s)
    assert deployment.admits(text) == [False, False]


def test_a_new_key_signs_in_time_and_the_former_one_verifies(deployment: Deployment) -> None:
    first = deployment.run(deployment.link("lnk_1"))
    assert deployment.admits(first) == [True, True]
    deployment.loop.advance(RULES.signing_key_lifetime_s - RULES.lifetime_s / 2)
    second = deployment.run(deployment.link("lnk_2"))
    assert second[:20] == first[:20]
    deployment.loop.advance(RULES.lifetime_s / 2 + EFFECTIVE_S)
    third = deployment.run(deployment.link("lnk_3"))
    assert third[:20] != first[:20]
    assert deployment.admits(second) == deployment.admits(third) == [True, True]


def test_an_operator_ends_all_links_by_deleting_the_signing_keys(deployment: Deployment) -> None:
    text = deployment.run(deployment.link("lnk_1"))
    assert deployment.admits(text) == [True, True]

    async def delete() -> None:
        async with deployment.database.transaction() as db:
            edition = await db.links.lock("0" * 32)
            await db.links.delete_keys(key.id for key in await db.links.keys())
            await db.links.change(edition.version + 1)

    held = verified(GrantKind.LINK, text, deployment.signers[0]._keys)
    assert held is not None
    ticket = replace(held, link=None)
    assert [signer.holds(one) for signer in deployment.signers for one in (held, ticket)] == [True] * 4
    deployment.run(delete())
    deployment.loop.advance(EFFECTIVE_S)
    assert deployment.admits(text) == [False, False]
    # Streams that are open end as well.
    assert [signer.holds(one) for signer in deployment.signers for one in (held, ticket)] == [False] * 4
    assert deployment.admits(deployment.run(deployment.link("lnk_2"))) == [True, True]


def keyed(*keys: StoredKey) -> KeySet:
    return KeySet(keys=keys)


def test_a_ticket_lasts_a_minute_and_ends_with_its_key(deployment: Deployment) -> None:
    stored = StoredKey(id="k1", tenant="acme", scopes=("sessions:read",), hash="0" * 64)
    keys = Keys(keyed(stored), clock=deployment.clock)
    signer = deployment.signers[1]
    authenticator = Authenticator(keys, signer, deployment.clock, 30)
    now = deployment.clock.wall()
    viewer = Grant("ses_1", "acme", Role.VIEWER, now + 60.0, key="k1")

    async def identify(grant: Grant) -> Any:
        return await authenticator.identify(None, await signer.sign(GrantKind.TICKET, grant), None)

    identity = deployment.run(identify(viewer))
    assert (identity.tenant, identity.scopes) == ("acme", ROLE_SCOPES[Role.VIEWER])
    # A ticket has no rights that its key lacks, names its key, and the key's tenant.
    for grant in (
        replace(viewer, role=Role.CONTROLLER),
        replace(viewer, key=None),
        replace(viewer, key="k2"),
        replace(viewer, tenant="other"),
    ):
        with pytest.raises(UnauthorizedError):
            deployment.run(identify(grant))
    assert authenticator.holds(identity)
    deployment.loop.advance(60.0)
    # The stream that it has opened goes on.
    assert authenticator.holds(identity)
    with pytest.raises(TicketExpiredError):
        deployment.run(identify(viewer))
    keys.replace(KeySet())
    assert not authenticator.holds(identity)
