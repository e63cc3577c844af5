"""The gateway's copy of the keys in the database, in virtual time: what is lost, and for how long."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.config import Settings
from turboserve.contracts.keys import CreateKey, GetValidKeys, KeyRef
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.hashing import KeySet
from turboserve.gateway.auth.stored import LOOK_EVERY_S, KeyFollower
from turboserve.gateway.keys.first import ensure_over
from turboserve.simulation.runtime.broker import FaultyNetwork, MemoryBroker, Rates
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.rows.behavior import PostgresBehavior
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.state_store.endpoints import serve_keys
from turboserve.state_store.service.keys import Keys as StoreKeys

EFFECTIVE_S = 2.0
"""A change of the keys is effective within this time, also when its hint is lost."""
START_S = 1_700_000_000.0


class LoopClock:
    """The loop's virtual time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return START_S + self._loop.time()


class Deployment:
    """A state store and two gateways on one broker and one database in memory."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.clock = loop, LoopClock(loop)
        self.rates = Rates()
        network = FaultyNetwork(random.Random(1), self.rates)
        self.broker = MemoryBroker(random.Random(1), network, loop=loop)
        self.postgres = MemoryPostgres(PostgresBehavior(random.Random(1)), loop)
        self.gateways = [Keys(None, clock=self.clock, stored=True) for _ in range(2)]
        self.followers: list[KeyFollower] = []
        self.tasks: list[Any] = []
        self.buses: dict[str, Bus] = {}

    async def connect(self, service: str) -> Bus:
        settings = Settings(nats_url=f"nats://{service}@memory")
        return await Bus.connect(service, settings, self.broker.connect)

    async def start(self) -> None:
        store = self.buses["store"] = await self.connect("state-store")
        await serve_keys(store, self.clock, StoreKeys(MemoryDatabase(self.postgres), store, self.clock))
        for keys in self.gateways:
            bus = self.buses["gateway"] = await self.connect("gateway")
            follower = KeyFollower(bus, self.clock, keys)
            await follower.listen()
            self.followers.append(follower)
            self.tasks.append(self.loop.create_task(follower.run()))

    async def create(self, name: str, **more: Any) -> str:
        """Create a key. Returns its text."""
        text = f"text-of-{name}"
        salt = (await self.buses["gateway"].call(subjects.GET_VALID_KEYS, GetValidKeys())).salt
        request = {"id": name, "tenant": "acme", "scopes": ("sessions:read",), **more}
        request["hash"] = KeySet(salt=salt).hash_of(text)
        await self.buses["gateway"].call(subjects.CREATE_KEY, CreateKey.model_validate(request))
        return text

    async def revoke(self, name: str) -> None:
        await self.buses["gateway"].call(subjects.REVOKE_KEY, KeyRef(key=name))

    def known(self, text: str) -> list[bool]:
        """Return whether each gateway accepts the key."""
        return [keys.identify(text) is not None for keys in self.gateways]

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    loop = VirtualLoop(1)
    found = Deployment(loop)
    found.run(found.start())
    loop.advance(1.0)
    yield found
    loop.close()


@pytest.mark.parametrize("hints", [True, False])
def test_a_change_is_effective_in_every_gateway_in_time(deployment: Deployment, hints: bool) -> None:
    deployment.rates.lost_hint = 0.0 if hints else 1.0
    text = deployment.run(deployment.create("k1"))
    deployment.loop.advance(EFFECTIVE_S)
    assert deployment.known(text) == [True, True]
    held = [keys.identify(text) for keys in deployment.gateways]
    deployment.run(deployment.revoke("k1"))
    deployment.loop.advance(EFFECTIVE_S)
    assert deployment.known(text) == [False, False]
    pairs = zip(deployment.gateways, held, strict=True)
    assert [identity and keys.holds(identity) for keys, identity in pairs] == [False, False]


def test_a_hint_makes_a_change_effective_at_once(deployment: Deployment) -> None:
    text = deployment.run(deployment.create("k1"))
    deployment.loop.advance(0.05)
    assert deployment.known(text) == [True, True]


@pytest.mark.parametrize("moment_s", [0.0, 0.2, 0.4, 0.6])
def test_the_time_holds_with_a_lost_answer_as_well(deployment: Deployment, moment_s: float) -> None:
    deployment.rates.lost_hint = 1.0
    deployment.loop.advance(moment_s)
    text = deployment.run(deployment.create("k1"))
    deployment.rates.lost_answer = 1.0
    deployment.loop.advance(LOOK_EVERY_S)
    deployment.rates.lost_answer = 0.0
    assert deployment.known(text) == [False, False]
    deployment.loop.advance(EFFECTIVE_S - LOOK_EVERY_S)
    assert deployment.known(text) == [True, True]


def test_without_the_state_store_the_known_keys_stay_and_expire(deployment: Deployment) -> None:
    lasting = deployment.run(deployment.create("lasting"))
    ending = deployment.run(deployment.create("ending", expires_at=deployment.clock.wall() + 30.0))
    deployment.loop.advance(EFFECTIVE_S)
    deployment.run(deployment.buses["store"].close())
    deployment.loop.advance(20.0)
    assert (deployment.known(lasting), deployment.known(ending)) == ([True, True], [True, True])
    deployment.loop.advance(20.0)
    assert (deployment.known(lasting), deployment.known(ending)) == ([True, True], [False, False])


def test_uses_are_written_in_batches_at_most_once_a_minute(deployment: Deployment) -> None:
    text = deployment.run(deployment.create("k1"))
    other = deployment.run(deployment.create("k2"))
    deployment.loop.advance(EFFECTIVE_S)
    rows = deployment.postgres.tables.api_keys.rows
    follower = deployment.followers[0]
    written = []
    for _ in range(13):
        deployment.known(text)
        deployment.run(follower.note_uses())
        written.append(rows["k1"].record.last_used_at)
        deployment.loop.advance(10.0)
    assert len(set(written)) == 3
    assert rows["k2"].record.last_used_at is None
    used_at = deployment.clock.wall()
    deployment.known(other)
    deployment.run(follower.note_uses())
    assert rows["k2"].record.last_used_at == used_at


def test_another_database_replaces_the_keys(deployment: Deployment) -> None:
    """A restored or new database may have the same version by chance. Its salt differs."""
    text = deployment.run(deployment.create("k1"))
    deployment.loop.advance(EFFECTIVE_S)
    assert deployment.known(text) == [True, True]
    tables = deployment.postgres.tables
    edition = tables.key_editions.rows["api_keys"]
    tables.api_keys.set("k1", None)
    tables.key_editions.set("api_keys", type(edition)("ab" * 16, edition.version))
    deployment.loop.advance(EFFECTIVE_S)
    assert deployment.known(text) == [False, False]


@pytest.mark.parametrize("lost", [0, 1, 3, 1_000])
def test_the_first_key_keeps_its_text_when_answers_are_lost(
    deployment: Deployment, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that creates the key, and whose answer is lost, is repeated: no later start shows it."""
    bus, calls = deployment.buses["gateway"], 0
    call = bus.call

    async def counted(endpoint: Any, request: Any, **options: Any) -> Any:
        nonlocal calls
        calls += endpoint is subjects.CREATE_KEY
        deployment.rates.lost_answer = 1.0 if 0 < calls <= lost else 0.0
        return await call(endpoint, request, **options)

    monkeypatch.setattr(bus, "call", counted)
    # The followers share this bus, and they must not end the losses.
    for task in deployment.tasks:
        task.cancel()
    made = deployment.run(ensure_over(bus))
    assert made.confirmed == (lost < 1_000)
    assert calls > min(lost, 1)
    rows = deployment.postgres.tables.api_keys.rows
    assert list(rows) == [made.id]
    assert made.text is not None
    monkeypatch.undo()
    deployment.rates.lost_answer = 0.0
    salt = deployment.run(bus.call(subjects.GET_VALID_KEYS, GetValidKeys())).salt
    assert rows[made.id].hash == KeySet(salt=salt).hash_of(made.text)
    again = deployment.run(ensure_over(bus))
    assert (again.id, again.text) == (made.id, None)
