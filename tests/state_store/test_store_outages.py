"""Servers die, hang and come back under a running store: bounded errors meanwhile, no repair by hand."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NotFoundError as StreamNotFound
from pydantic import SecretStr
from sqlalchemy import text

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import PATIENT, Harness, Machine, Process, Store, machine
from turboserve import subjects
from turboserve.bus import append
from turboserve.cli.embedded import Layout, NatsServer, Ports, PostgresServer, RedisServer
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import ForbiddenError, NotFoundError, UnavailableError
from turboserve.contracts.requests import GetLatents
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Playhead
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.settings import Settings
from turboserve.tasks import stop

OUTAGES = True
WITHOUT_DISK = ("fsync=off", "full_page_writes=off")
"""Safe if the server is killed, not the machine: a commit is written before it is answered."""
WAITS: dict[str, Any] = {**PATIENT, "sweep_s": 0.2, "canary_timeout_s": 60.0, "worker_timeout_s": 3_600.0}
"""For tests whose outage ends by itself: a busy machine is only slow."""


async def test_postgres_dies_hangs_and_comes_back(
    nats_url: str, redis_url: str, layout: Layout, ports: Ports, tmp_path: Path
) -> None:
    server = PostgresServer(
        layout.server("mortal-postgres"), ports.get("mortal"), "admin", "secret", WITHOUT_DISK
    )
    settings = Settings(
        nats_url=nats_url,
        redis_url=SecretStr(redis_url),
        postgres_url=SecretStr(server.url()),
        **{**WAITS, "transaction_deadline_s": 1.0},
    )
    async with (
        machine(server, tmp_path) as postgres,
        Store.running(settings) as store,
        Harness.connected(settings) as api,
    ):
        record = await with_retry(lambda: api.running("mortal"))

        async def refused_in_time() -> None:
            started = time.monotonic()
            results = await asyncio.gather(
                *(api.get(record.id) for _ in range(30)), api.create("mortal"), return_exceptions=True
            )
            for result in results:
                assert isinstance(result, UnavailableError), result
                assert result.code == "unavailable"
                assert result.retry_after_s is not None
            # The wait ends by the deadline of the transaction and its rollback, not by the caller's deadline.
            assert time.monotonic() - started < settings.request_deadline_s

        async def serves() -> bool:
            try:
                await api.prompt(record.id, "once more")
            except UnavailableError:
                return False
            return store.runtime.checks()["postgres"]

        for round_ in range(2):
            await postgres.kill()
            await refused_in_time()
            await eventually(lambda: not store.runtime.checks()["postgres"])
            await api.chunk(record, round_)
            await postgres.start()
            await eventually(serves)

        postgres.signal(signal.SIGSTOP)
        pids = [int(pid) for pid in await children(postgres)]
        for pid in pids:
            signal_quietly(pid, signal.SIGSTOP)
        try:
            await refused_in_time()
        finally:
            for pid in pids:
                signal_quietly(pid, signal.SIGCONT)
            postgres.signal(signal.SIGCONT)
        await eventually(serves)

        async def counted() -> bool:
            return (await with_retry(lambda: api.get(record.id))).next_chunk == 2

        await eventually(counted)

        async def all_is_published() -> bool:
            prompts = (await with_retry(lambda: api.get(record.id))).control_seq
            accepted = ["prompt.accepted"] * prompts
            return await api.event_types(record.id) == ["session.created", "session.placed", *accepted]

        await eventually(all_is_published)
        assert not store.runtime.stopping.is_set()


async def test_a_server_that_waits_for_its_clients_to_disconnect_ends(
    layout: Layout, ports: Ports, tmp_path: Path
) -> None:
    """Incident: after SIGTERM, Postgres refused new connections for six minutes, since it waited for those of
    the pool and of a leader, and its supervisor could not start it again."""
    server = PostgresServer(
        layout.server("leaving-postgres"), ports.get("leaving"), "admin", "secret", WITHOUT_DISK
    )
    settings = Settings(postgres_url=SecretStr(server.url()), postgres_pool=4, **PATIENT)
    async with machine(server, tmp_path) as postgres:
        database = PostgresDatabase(settings)
        await eventually(lambda: migrated(database))
        async with database.session_lock(7, 60.0) as lock:
            assert await lock.acquire()
            await asyncio.gather(*(slept(database, 0.2) for _ in range(2)))
            pid = int(postgres.server.pid_file.read_text())
            os.kill(pid, signal.SIGTERM)
            # The connections that it has still work. Only a further one is refused.
            await slept(database, 0.0)
            await lock.confirm()
            used = asyncio.create_task(slept(database, 1.0))
            await eventually(lambda: refused(database))
            with pytest.raises(UnavailableError):
                await lock.confirm()
            await used
        await eventually(lambda: not alive(pid))
        await database.close()


async def test_one_transaction_fails_when_the_server_has_left_all_connections(
    layout: Layout, ports: Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each connection of the pool would cost a transaction and its deadline."""
    server = PostgresServer(
        layout.server("lost-postgres"), ports.get("lost"), "admin", "secret", WITHOUT_DISK
    )
    settings = Settings(postgres_url=SecretStr(server.url()), postgres_pool=4, **PATIENT)
    async with machine(server, tmp_path):
        database = PostgresDatabase(settings)
        await eventually(lambda: migrated(database))
        left = await backends(database, 4)
        try:
            for pid in left:
                os.kill(pid, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(database, "_deadline_s", 1.0)
                with pytest.raises(UnavailableError):
                    await backends(database, 1)
            assert not await backends(database, 4) & left
        finally:
            for pid in left:
                signal_quietly(pid, signal.SIGCONT)
            await database.close()


async def backends(database: PostgresDatabase, count: int) -> set[int]:
    """Return the server's processes that serve transactions which are open at the same time."""
    async with AsyncExitStack() as stack:
        units = [await stack.enter_async_context(database.transaction()) for _ in range(count)]
        query = text("select pg_backend_pid()")
        return {int((await unit.connection.execute(query)).scalar_one()) for unit in units}


async def migrated(database: PostgresDatabase) -> bool:
    with suppress(UnavailableError):
        await database.migrate()
        return True
    return False


async def slept(database: PostgresDatabase, seconds: float) -> None:
    async with database.statement() as unit:
        await unit.connection.execute(text(f"select pg_sleep({seconds})"))


async def refused(database: PostgresDatabase) -> bool:
    results = await asyncio.gather(*(slept(database, 0.1) for _ in range(3)), return_exceptions=True)
    return any(isinstance(result, UnavailableError) for result in results)


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def with_retry(ask: Callable[[], Awaitable[SessionRecord]]) -> SessionRecord:
    """Ask until it is answered: on a busy machine a transaction may exceed its deadline."""
    async with asyncio.timeout(60):
        while True:
            with suppress(UnavailableError):
                return await ask()
            await asyncio.sleep(0.1)


async def children(machine: Machine) -> list[str]:
    pid = int(machine.server.pid_file.read_text())
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(path.parent.name)
    return found


def signal_quietly(pid: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, sign)


async def test_without_redis_sessions_go_on(
    nats_url: str, postgres_url: str, layout: Layout, ports: Ports, tmp_path: Path
) -> None:
    server = RedisServer(layout.server("mortal-redis"), ports.get("mortal_redis"), "secret")
    settings = Settings(
        nats_url=nats_url, redis_url=SecretStr(server.url), postgres_url=SecretStr(postgres_url), **WAITS
    )
    async with (
        machine(server, tmp_path) as redis,
        Store.running(settings) as store,
        Harness.connected(settings) as api,
    ):
        record = await api.running("hot")
        header = LatentsHeader(
            session=record.id,
            index=0,
            epoch=1,
            worker=record.worker,
            dtype="float16",
            shape=(3, 16, 8, 8),
            first_latent=0,
        )

        latents = GetLatents(session=record.id, index=0, worker=record.worker)

        async def kept() -> bool:
            await api.bus.publish(subjects.LATENTS, str(record.worker), header, b"latents" * 100)
            try:
                answer, data = await api.bus.call_raw(subjects.GET_LATENTS, latents)
            except NotFoundError:
                return False
            return (answer, data) == (header, b"latents" * 100)

        async def watched() -> bool:
            playhead = Playhead(session=record.id, playhead_s=2.5, viewers=1)
            await api.bus.publish(subjects.PLAYHEAD, record.id, playhead)
            return (await api.get(record.id)).playhead_s == 2.5

        async def known() -> bool:
            return (await api.get(record.id)).unwatched_s is not None

        await eventually(kept)
        await eventually(watched)
        await eventually(known)

        await redis.kill()
        with pytest.raises(NotFoundError):
            await api.bus.call_raw(subjects.GET_LATENTS, latents)
        assert (await api.get(record.id)).unwatched_s is None
        paused = await api.pause(record.id)
        resumed = await api.resume(record.id)
        again = await api.place(resumed, str(paused.worker))
        await api.prompt(record.id, "without Redis")
        [assigned] = (await api.renew(str(paused.worker), "hot")).assigned
        assert (assigned.epoch, assigned.playhead_s) == (again.epoch, 2.5)
        await eventually(lambda: all(store.runtime.checks().values()))

        await redis.start()
        await eventually(kept)
        await eventually(watched)
        await eventually(known)
        await api.end(record.id)
        with pytest.raises(ForbiddenError):
            await api.bus.call_raw(subjects.GET_LATENTS, latents)


def broker(layout: Layout, ports: Ports, name: str) -> NatsServer:
    users = {user: f"secret-{user}" for user in (*subjects.SERVICES, "admin")}
    return NatsServer(layout.server(name), ports.get(name), users)


async def test_the_broker_dies_while_sessions_change(
    postgres_url: str, redis_url: str, layout: Layout, ports: Ports, tmp_path: Path
) -> None:
    """With the store's own permissions: the table of subjects covers all that it needs of the broker."""
    server = broker(layout, ports, "mortal-nats")
    settings = Settings(
        nats_url=server.url("state-store"),
        redis_url=SecretStr(redis_url),
        postgres_url=SecretStr(postgres_url),
        **WAITS,
    )
    admin = settings.model_copy(update={"nats_url": server.url()})
    async with (
        machine(server, tmp_path) as nats,
        Store.running(settings) as store,
        Harness.connected(admin) as api,
    ):
        record = await api.running("broker")
        for index in range(3):
            await nats.kill()
            await nats.start()

            async def back() -> bool:
                return await api.answered() and all(store.runtime.checks().values())

            await eventually(back)
            await api.chunk(record, index)
            await api.prompt(record.id, f"after {index}")
        await api.until_events(record.id, "session.created", "session.placed", *["prompt.accepted"] * 3)

        async def counted() -> bool:
            return (await api.get(record.id)).next_chunk == 3

        await eventually(counted)


async def test_a_broker_that_lost_its_disk_gets_streams_and_owners_again(
    postgres_url: str, redis_url: str, layout: Layout, ports: Ports, tmp_path: Path
) -> None:
    server = broker(layout, ports, "forgetful-nats")
    settings = Settings(
        nats_url=server.url(), redis_url=SecretStr(redis_url), postgres_url=SecretStr(postgres_url), **WAITS
    )
    async with (
        machine(server, tmp_path) as nats,
        Store.running(settings),
        Harness.connected(settings) as api,
    ):
        record = await api.running("forgetful")
        other = await api.running("forgetful2")
        await nats.kill()
        shutil.rmtree(server.directory / "jetstream")
        await nats.start()

        async def owned() -> bool:
            if not await api.answered():
                return False
            rows = [await api.get(session.id) for session in (record, other)]
            if any(row.version <= record.version or row.own_revision is None for row in rows):
                # The store has made the streams before it writes the fences.
                return False
            try:
                logged = [await api.history(subjects.OWN.of(row.id)) for row in rows]
            except StreamNotFound:
                return False
            return all(log and log[-1][0] == row.own_revision for row, log in zip(rows, logged, strict=True))

        await eventually(owned)
        row = await api.get(record.id)
        assert (row.epoch, row.worker) == (record.epoch, record.worker)
        assert row.version > record.version
        await api.chunk(row, 0)
        await api.end(record.id)
        await append(api.bus, "event.ses_probe", b"{}", message_id="probe")


async def test_the_store_waits_for_servers_that_are_not_there_yet(
    layout: Layout, ports: Ports, redis_url: str, tmp_path: Path
) -> None:
    nats_server = broker(layout, ports, "late-nats")
    postgres_server = PostgresServer(
        layout.server("late-postgres"), ports.get("late_postgres"), "admin", "secret", WITHOUT_DISK
    )
    settings = Settings(
        nats_url=nats_server.url(),
        redis_url=SecretStr(redis_url),
        postgres_url=SecretStr(postgres_server.url()),
        **WAITS,
    )
    nats_machine = Machine(nats_server, tmp_path / "nats.log")
    postgres_machine = Machine(postgres_server, tmp_path / "postgres.log")
    # Its limit is for its own start, not for a disk on which a cluster is created.
    for server in (nats_server, postgres_server):
        await server.prepare()
    starting = asyncio.ensure_future(_serves(settings))
    try:
        await asyncio.sleep(1.0)
        await nats_machine.start()
        await asyncio.sleep(1.0)
        await postgres_machine.start()
        await starting
    finally:
        await stop(starting)
        await nats_machine.stop()
        await postgres_machine.stop()


async def _serves(settings: Settings) -> None:
    async with Process.running(settings), Harness.connected(settings) as api:
        await api.running("late")


async def test_a_server_without_the_services_password_is_waited_for(postgres_url: str) -> None:
    """Its supervisor sets the password a moment after it answers."""
    wrong = re.sub(r":[^:@]+@", ":not-set-yet@", postgres_url)
    assert wrong != postgres_url
    database = PostgresDatabase(Settings(postgres_url=SecretStr(wrong)))
    with pytest.raises(UnavailableError):
        await database.migrate()
    await database.engine.dispose()
