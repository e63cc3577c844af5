"""Every endpoint on the bus under mutated requests, from the permitted service: typed errors only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import asyncpg
import pytest

from tests.helpers.hostile import NOT_DOCUMENTS, Hostile, attacks
from tests.helpers.service_process import Service, connected, state_store
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.bus import Bus
from turboserve.bus.requests import ERROR_HEADER
from turboserve.cli.embedded import NatsServer
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import ErrorBody, TurboServeError
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.requests import CreateSession, ListWorkers, PlaceSession, Renew
from turboserve.contracts.sessions import Decision
from turboserve.contracts.workers import LoadReport
from turboserve.ids import new_id
from turboserve.subject_types import Endpoint

STORE = [endpoint for endpoint in subjects.ENDPOINTS if endpoint.server == "state-store"]
ROWS = ("sessions", "controls", "decisions", "workers", "leaders", "pools", "api_keys")
"""Tables that only requests change while no chunk is made. A refusal must not change them."""
LATER = "'{own_revision,fence_revision,purged_at}'::text[]"
"""Columns that the store writes after its answer, to match the log."""
RECORD_CHANGES = f"""
create table changes (id bigserial primary key, what text not null);
create function record_change() returns trigger language plpgsql as $$
declare
  before jsonb := case when tg_op <> 'INSERT' then to_jsonb(old) - {LATER} end;
  after jsonb := case when tg_op <> 'DELETE' then to_jsonb(new) - {LATER} end;
begin
  if before is distinct from after then
    insert into changes (what) values (concat(tg_op, ' ', tg_table_name, ' ', before, ' -> ', after));
  end if;
  return null;
end $$;
""" + "".join(
    f"create trigger record_change after insert or update or delete on {table} "
    "for each row execute function record_change();"
    for table in ROWS
)
"""Records each change of a row in `ROWS` in its transaction, so that a check reads only what changed."""
CHANGES = "select id, what from changes where id > $1 order by id"
PATIENCE_S = 60.0
NO_TENANT_LIMITS = {
    f"TURBOSERVE_TENANT_{limit}": "0"
    for limit in (
        *("SESSIONS", "SUSPENDED", "SLOTS", "SLOTS_FACTOR"),
        *("CREATIONS_PER_MINUTE", "PROMPTS_PER_MINUTE", "STORED_BYTES"),
    )
}
"""All requests are one tenant's. `test_security_tenants` tests the limits."""
FRESH = 40
"""Requests until new sessions and workers are created, because the earlier ones have ended by then."""


NAMES: dict[str, list[Any]] = {
    "session": ["@session0@", "@session1@", "@session2@"],
    "worker": ["@worker0@", "@worker1@"],
    "target": ["@worker0@", "@worker1@"],
    "tenant": ["alice", None],
    "model": ["toyworld"],
    "pool": ["local"],
    "expected_version": [1, 2, 3],
    "version": [1, 2],
    "term": [0],
    "epoch": [0, 1],
    "phase": ["ready"],
}
"""Values that bring a request far. Placeholders stand for ids that exist at that time."""


class Store:
    """A state store process and a caller for each service, in one event loop."""

    def __init__(self, runner: asyncio.Runner, service: Service, nats: NatsServer, postgres_url: str) -> None:
        self.runner, self.service = runner, service
        self._nats, self._postgres_url = nats, postgres_url
        self._buses: dict[str, Bus] = {}
        self._stack = AsyncExitStack()
        self._asked = 0
        self._names: dict[str, str] = {}
        self._last: int | None = None
        """Number of the last change before the first of the latest refusals."""

    async def open(self) -> None:
        for service in subjects.SERVICES:
            self._buses[service] = await connected(self._nats, service, PATIENCE_S)
            self._stack.push_async_callback(self._buses[service].close)
        await eventually(self._answers)
        self._database = await asyncpg.connect(self._postgres_url)
        self._stack.push_async_callback(self._database.close)
        await self._database.execute(RECORD_CHANGES)

    async def close(self) -> None:
        await self._stack.aclose()

    async def _answers(self) -> bool:
        try:
            await self._buses["gateway"].call(subjects.LIST_WORKERS, ListWorkers())
        except TurboServeError:
            return False
        return True

    async def prepare(self, anew: bool = False) -> None:
        """Create one session that waits for a worker and two that have one.

        They are created again from time to time, because attacks that are carried out end them.
        """
        if anew or self._asked % FRESH == 0:
            self._last = None
            gateway, scheduler = self._buses["gateway"], self._buses["scheduler"]
            workers = [new_id("wrk"), new_id("wrk")]
            for worker in workers:
                load = LoadReport(worker=worker, model="toyworld", capacity=1_000)
                await self._buses["worker"].call(subjects.RENEW, Renew(load=load))
            await self._buses["autoscaler"].call(
                subjects.REPORT_POOL, PoolReport(pool="local", model="toyworld", maximum=2_000)
            )
            sessions = []
            for number in range(3):
                create = CreateSession(
                    id=new_id("ses"), tenant="alice", model="toyworld", prompt="a red circle", seed=1
                )
                record = await gateway.call(subjects.CREATE_SESSION, create)
                sessions.append(record.id)
                if number:
                    decision = Decision(session=record.id, epoch=0, kind="place", reason="test")
                    await scheduler.call(
                        subjects.PLACE_SESSION,
                        PlaceSession(
                            session=record.id,
                            expected_version=record.version,
                            worker=workers[0],
                            decision=decision,
                        ),
                    )
            self._names = {
                **{f"@session{n}@": session for n, session in enumerate(sessions)},
                **{f"@worker{n}@": worker for n, worker in enumerate(workers)},
            }
        self._asked += 1

    def about(self, data: bytes) -> bytes:
        """Return `data` with the placeholders of `NAMES` replaced by existing ids."""
        for placeholder, name in self._names.items():
            data = data.replace(placeholder.encode(), name.encode())
        return data

    async def last_change(self) -> int:
        """Return the number of the last recorded change."""
        return int(await self._database.fetchval("select coalesce(max(id), 0) from changes"))

    async def changes(self, since: int) -> list[str]:
        """Return the changes of rows in `ROWS` after number `since`."""
        return [row["what"] for row in await self._database.fetch(CHANGES, since)]

    @contextmanager
    def no_traceback(self) -> Iterator[None]:
        """Check that no exception is logged meanwhile."""
        before = len(self.service.logged())
        yield
        assert "Traceback" not in self.service.logged()[before:]

    async def ask(self, endpoint: Endpoint[Contract, Contract], data: bytes) -> ErrorBody | None:
        """Send `data` as a permitted service. Returns the refusal; None if it was carried out."""
        bus = self._buses[endpoint.callers[0]]
        reply = await bus.client.request(endpoint.request_subject(bus.user), data, timeout=PATIENCE_S)
        problem = (reply.headers or {}).get(ERROR_HEADER)
        if problem is None:
            return None
        return ErrorBody.from_bytes(problem.encode())

    async def attack(self, endpoint: Endpoint[Contract, Contract], data: bytes) -> None:
        """Send one request: it is carried out or refused with a typed error, and a refusal changes no row."""
        last = await self.last_change() if self._last is None else self._last
        refusal = await self.ask(endpoint, data)
        self._last = None if refusal is None else last
        if refusal is None:
            return
        assert refusal.code not in ("internal", "deadline", "unavailable"), (endpoint.subject, data, refusal)
        assert len(refusal.detail) < 2_000
        assert await self.changes(last) == [], (endpoint.subject, data, refusal)


@pytest.fixture(scope="module")
def store(
    nats_server: NatsServer,
    nats_url: str,
    postgres_url: str,
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Store]:
    log = tmp_path_factory.mktemp("logs") / "state-store.log"
    service = state_store(
        nats_server,
        log,
        postgres_url,
        redis_url,
        TURBOSERVE_MAX_SESSIONS="1000000",
        TURBOSERVE_SWEEP_S="3600",
        # A busy machine is only slow: an operation that exceeds this was stuck.
        TURBOSERVE_TRANSACTION_DEADLINE_S="60",
        TURBOSERVE_REQUEST_DEADLINE_S="90",
        TURBOSERVE_CANARY_TIMEOUT_S="60",
        **NO_TENANT_LIMITS,
    )
    service.start()
    try:
        with asyncio.Runner() as runner:
            store = Store(runner, service, nats_server, postgres_url)
            runner.run(store.open())
            yield store
            runner.run(store.close())
    finally:
        service.end()


def attack(store: Store, endpoint: Endpoint[Contract, Contract], examples: int) -> None:
    schema = endpoint.request.model_json_schema()

    @attacks(examples)
    def each(hostile: Hostile) -> None:
        data = hostile.encoded(hostile.versioned(hostile.mutated(hostile.document(schema, NAMES))))
        store.runner.run(store.prepare())
        store.runner.run(store.attack(endpoint, store.about(data)))


def test_changes_of_rows_are_recorded(store: Store) -> None:
    async def changed() -> set[str]:
        last = await store.last_change()
        await store.prepare(anew=True)
        return {" ".join(what.split()[:2]) for what in await store.changes(last)}

    assert store.runner.run(changed()) >= {"INSERT sessions", "UPDATE sessions", "INSERT workers"}


@pytest.mark.parametrize("endpoint", STORE, ids=lambda one: one.subject)
def test_mutated_requests_are_carried_out_or_refused(store: Store, endpoint: Endpoint[Any, Any]) -> None:
    with store.no_traceback():
        attack(store, endpoint, 20)


@pytest.mark.soak
@pytest.mark.parametrize("endpoint", STORE, ids=lambda one: one.subject)
def test_mutated_requests_at_length(store: Store, endpoint: Endpoint[Any, Any]) -> None:
    with store.no_traceback():
        attack(store, endpoint, 1_000)


@pytest.mark.parametrize("endpoint", STORE, ids=lambda one: one.subject)
def test_what_is_no_document_is_refused(store: Store, endpoint: Endpoint[Any, Any]) -> None:
    async def each() -> None:
        await store.prepare()
        for data in NOT_DOCUMENTS:
            await store.attack(endpoint, data)

    with store.no_traceback():
        store.runner.run(each())
