"""What one worker's broker user can do to another worker: each identity has an account of its own.

Tried on a real broker, and on a real state store behind it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from tests.helpers.broker_clients import connected_client, processed
from tests.helpers.broker_refusals import refusals
from tests.helpers.broker_subjects import ID, NEEDS, USERS, every_api_subject, every_application_subject
from tests.helpers.chunk_headers import chunk_header
from tests.helpers.ports import free_ports
from tests.helpers.service_process import Service, connected, state_store
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.broker_accounts import worker_user
from turboserve.bus import Bus, Owners, append
from turboserve.bus.chunk_log import ChunkLog, StreamStart
from turboserve.cli.embedded import Layout, NatsServer, Ports
from turboserve.cli.embedded.running import running
from turboserve.contracts.chunks import ChunkHeader, LatentsHeader
from turboserve.contracts.errors import (
    DeadlineError,
    ForbiddenError,
    NotFoundError,
    StaleEpochError,
    TurboServeError,
)
from turboserve.contracts.requests import (
    CreateSession,
    FailSession,
    GetLatents,
    ListWorkers,
    PlaceSession,
    Renew,
    SessionRef,
)
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.weights import FindWeights
from turboserve.contracts.workers import Assignment, LoadReport
from turboserve.ids import new_id
from turboserve.subject_types import identity_of
from turboserve.subjects import ASSIGN, CHUNK, CHUNKS, LATENTS, LOAD, OWN, WEIGHTS

PATIENCE_S = 60.0
MINE, OTHER = "wk1", "wk2"
"""The attacker's identity and the victim's."""
FOREIGN_LATENTS = "turboserve_state_store_foreign_latents_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A broker without a user for all workers."""
    layout = Layout(tmp_path_factory.mktemp("identities"))
    layout.create()
    services = [service for service in subjects.SERVICES if service != "worker"]
    users = (*services, subjects.ADMIN, *map(worker_user, (MINE, OTHER)))
    nats_server = NatsServer(
        layout.server("nats"),
        Ports(layout.ports).get("nats"),
        {user: layout.secret(f"nats.{user}") for user in users},
    )
    with running([nats_server], layout.logs / "nats.log"):
        yield nats_server


@pytest.fixture(scope="module")
def store(
    server: NatsServer, postgres_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    log: Path = tmp_path_factory.mktemp("logs") / "state-store.log"
    [port] = free_ports(1)
    service = state_store(server, log, postgres_url, redis_url, TURBOSERVE_HEALTH_PORT=str(port))
    service.start()
    yield service
    service.end()


def of_identity(name: str, identity: str) -> str:
    """Return a subject of the shared user as `identity` has it: with itself in place of any identity."""
    for topic in (LOAD, ASSIGN, LATENTS, WEIGHTS):
        if topic.by_worker and name == topic.of(ID):
            return topic.of(f"{identity}_{ID}")
    if name == CHUNK.by(ID, ID):
        return CHUNK.by(ID, identity)
    name = name.replace(".from.worker", f".from.worker.{identity}")
    return name.replace("_INBOX_worker.", f"_INBOX_worker_{identity}.")


@pytest.mark.parametrize("verb", ["publish", "subscribe"])
async def test_the_broker_refuses_every_subject_of_other_identities(server: NatsServer, verb: str) -> None:
    needed = {of_identity(name, MINE) for name in NEEDS["worker"][verb]}
    names = [*every_api_subject(), *every_application_subject(), *needed]
    names += [of_identity(name, OTHER) for name in (*NEEDS["worker"][verb], *needed)]
    names += [topic.of(f"{OTHER}_{ID}") for topic in (LOAD, ASSIGN, LATENTS, WEIGHTS)]
    names += [CHUNK.by(ID, OTHER), CHUNK.of(ID), CHUNK.every, "chunk.*.x1", f"chunk.{ID}.{OTHER}.{MINE}"]
    # An identity may name another identity's worker on its own subjects; the reader checks that.
    names = list(dict.fromkeys(names))
    allowed = set(names) - await refusals(server, worker_user(MINE), verb, names)
    assert allowed == needed
    assert not {name for name in allowed if OTHER in name}


async def test_no_pattern_reaches_another_identity(server: NatsServer) -> None:
    names = [
        *("load.>", "load.*.*", "load.*.x1", "assign.>", "assign.*.*", f"assign.*.{OTHER}_{ID}", "latents.>"),
        *("latents.*.*", "_INBOX_worker_wk2.>", "_INBOX.>", "*.*.*", ">", "state.>", "$SYS.>", "$JS.>"),
    ]
    assert await refusals(server, worker_user(MINE), "subscribe", names) == set(names)


async def bare(server: NatsServer, user: str) -> Client:
    async def ignore(_: Exception) -> None:
        """Ignore the broker's reports of refusals."""

    inbox = subjects.inbox_prefix(user).encode()
    return await connected_client(server.url(user), error_cb=ignore, inbox_prefix=inbox)


async def test_answers_cannot_be_sent_into_another_worker(server: NatsServer) -> None:
    """The broker and the services answer to any reply subject, but in the account of the requester."""
    admin = await bare(server, "admin")
    attacker, victim = [await bare(server, worker_user(identity)) for identity in (MINE, OTHER)]
    target = ASSIGN.of(f"{OTHER}_a")
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(raw: Msg) -> None:
        heard.put_nowait(raw.data)

    async def answer(raw: Msg) -> None:
        await admin.publish(raw.reply, b"forged by the service")

    jetstream = admin.jetstream(timeout=PATIENCE_S)
    try:
        await jetstream.add_stream(
            api.StreamConfig(name=CHUNKS, subjects=[CHUNK.every, OWN.every], allow_direct=True)
        )
        await jetstream.publish(CHUNK.by("bait", OTHER), b"forged by the broker")
        await admin.subscribe(subjects.GET_LATENTS.every, cb=answer)
        for name in (target, f"{subjects.inbox_prefix(worker_user(OTHER))}.>", "playhead.*"):
            await victim.subscribe(name, cb=hear)
        await processed(admin, victim)
        request = json.dumps({"last_by_subj": CHUNK.of("bait")}).encode()
        direct = f"$JS.API.DIRECT.GET.{CHUNKS}"
        latents = subjects.GET_LATENTS.request_subject(worker_user(MINE))
        for reply in (target, f"{subjects.inbox_prefix(worker_user(OTHER))}.x", "playhead.ses_a"):
            await attacker.publish(
                direct, json.dumps({"last_by_subj": CHUNK.of("bait")}).encode(), reply=reply
            )
            await attacker.publish(latents, b"{}", reply=reply)
        # The same requests to itself, after all of those: the answers have come.
        assert (await attacker.request(direct, request, timeout=PATIENCE_S)).data == b"forged by the broker"
        assert (await attacker.request(latents, b"{}", timeout=PATIENCE_S)).data == b"forged by the service"
        await admin.publish(target, b"from the state store")
        async with asyncio.timeout(PATIENCE_S):
            assert await heard.get() == b"from the state store"
        assert heard.empty()
    finally:
        await jetstream.delete_stream(CHUNKS)
        for client in (attacker, victim, admin):
            await client.close()


@pytest.fixture
async def buses(server: NatsServer, store: Service) -> AsyncIterator[dict[str, Bus]]:
    users = ("gateway", "scheduler", worker_user(MINE), worker_user(OTHER))
    found = {user.removeprefix("worker."): await connected_as(server, user) for user in users}

    async def answers() -> bool:
        try:
            await found["gateway"].call(subjects.LIST_WORKERS, ListWorkers())
        except TurboServeError:
            return False
        return True

    await eventually(answers)
    yield found
    for bus in found.values():
        await bus.close()


async def connected_as(server: NatsServer, user: str) -> Bus:
    return await connected(server, user, PATIENCE_S)


def load(worker: str, capacity: int = 4) -> LoadReport:
    return LoadReport(worker=worker, model="toyworld", capacity=capacity)


async def owned(buses: dict[str, Bus], worker: str) -> SessionRecord:
    """Create a session that `worker` of the victim's identity owns."""
    await buses[OTHER].call(subjects.RENEW, Renew(load=load(worker)))
    create = CreateSession(id=new_id("ses"), tenant="alice", model="toyworld", prompt="secret", seed=1)
    record = await buses["gateway"].call(subjects.CREATE_SESSION, create)
    decision = Decision(session=record.id, epoch=0, kind="place", reason="test")
    request = PlaceSession(
        session=record.id, expected_version=record.version, worker=worker, decision=decision
    )
    return await buses["scheduler"].call(subjects.PLACE_SESSION, request)


async def test_a_worker_registers_and_asks_only_as_its_identity(buses: dict[str, Bus]) -> None:
    victim = new_id(OTHER)
    record = await owned(buses, victim)
    attacker = buses[MINE]
    with pytest.raises(ForbiddenError) as refused:
        await attacker.call(subjects.RENEW, Renew(load=load(victim)))
    assert (refused.value.field, refused.value.limit) == ("worker", MINE)
    for made_up in (new_id("wrk"), "wk10_a", f"x{MINE}_a"):
        with pytest.raises(ForbiddenError):
            await attacker.call(subjects.RENEW, Renew(load=load(made_up, 1_000)))
    fail = FailSession(session=record.id, epoch=record.epoch, worker=victim, reason="x")
    with pytest.raises(ForbiddenError):
        await attacker.call(subjects.FAIL_SESSION, fail)
    mine = new_id(MINE)
    assert (await attacker.call(subjects.RENEW, Renew(load=load(mine)))).assigned == ()
    with pytest.raises(StaleEpochError):
        await attacker.call(subjects.FAIL_SESSION, fail.model_copy(update={"worker": mine}))
    for worker in (victim, mine, None):
        with pytest.raises(ForbiddenError):
            await attacker.call_raw(
                subjects.GET_LATENTS, GetLatents(session=record.id, index=0, worker=worker)
            )
    for worker in (victim, new_id("wrk")):
        with pytest.raises(ForbiddenError):
            await attacker.call(subjects.FIND_WEIGHTS, FindWeights(worker=worker, model="toyworld"))
    [assigned] = (await buses[OTHER].call(subjects.RENEW, Renew(load=load(victim)))).assigned
    assert (assigned.id, assigned.phase.value) == (record.id, "active")
    named = {row.id for row in (await buses["gateway"].call(subjects.LIST_WORKERS, ListWorkers())).workers}
    assert {victim, mine} <= named
    assert not {name for name in named if identity_of(name) not in (MINE, OTHER)}


def foreign_latents(store: Service) -> float:
    """Return how many latents the store has dropped because their worker never owned the session."""
    url = f"http://127.0.0.1:{store.variables['TURBOSERVE_HEALTH_PORT']}/metrics"
    lines = httpx.get(url, timeout=PATIENCE_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(FOREIGN_LATENTS))


async def test_latents_of_another_workers_session_are_not_kept(buses: dict[str, Bus], store: Service) -> None:
    victim, mine = new_id(OTHER), new_id(MINE)
    record = await owned(buses, victim)
    header = LatentsHeader(
        session=record.id,
        index=0,
        epoch=record.epoch,
        worker=victim,
        dtype="float16",
        shape=(1, 2, 2),
        first_latent=0,
    )

    async def kept(index: int) -> tuple[LatentsHeader, bytes] | None:
        request = GetLatents(session=record.id, index=index, worker=victim)
        try:
            return await buses[OTHER].call_raw(subjects.GET_LATENTS, request)
        except NotFoundError:
            return None

    async def keeps(index: int) -> bool:
        own = header.model_copy(update={"index": index})
        await buses[OTHER].publish(LATENTS, victim, own, b"latents")
        return await kept(index) == (own, b"latents")

    await eventually(lambda: keeps(0))
    dropped_before = await asyncio.to_thread(foreign_latents, store)
    attacker = buses[MINE]
    forged = header.model_copy(update={"worker": mine})
    # Under its own name, at another epoch, and with the victim's name in its own subject.
    await attacker.publish(LATENTS, mine, forged, b"forged")
    await attacker.publish(LATENTS, mine, forged.model_copy(update={"epoch": 10**6}), b"forged")
    await attacker.publish(LATENTS, mine, header, b"forged")
    await attacker.publish(LATENTS, victim, header, b"forged")
    await attacker.flush()

    async def dropped() -> bool:
        """Return whether the broker refused the last forgery and the store dropped the one before it."""
        return await asyncio.to_thread(foreign_latents, store) == dropped_before + 2

    await eventually(dropped)
    # Everything sent before this has been processed.
    await eventually(lambda: keeps(1))
    assert await kept(0) == (header, b"latents")
    assert await asyncio.to_thread(foreign_latents, store) == dropped_before + 2


async def test_assignments_and_loads_carry_the_identity(buses: dict[str, Bus]) -> None:
    """Each worker receives its own assignments, and a load report counts under its sender's name alone."""
    victim, mine = new_id(OTHER), new_id(MINE)
    told: asyncio.Queue[str] = asyncio.Queue()
    heard: asyncio.Queue[LoadReport] = asyncio.Queue()

    async def assigned(message: Assignment, _: bytes) -> None:
        told.put_nowait(message.record.id)

    async def loaded(message: LoadReport, _: bytes) -> None:
        heard.put_nowait(message)

    await buses[OTHER].subscribe(ASSIGN, victim, assigned)
    await buses["scheduler"].subscribe(LOAD, "*", loaded)
    for bus in buses.values():
        await bus.flush()
    record = await owned(buses, victim)
    async with asyncio.timeout(PATIENCE_S):
        assert await told.get() == record.id
        await buses[MINE].publish(LOAD, victim, load(victim, 1_000))
        await buses[MINE].publish(LOAD, mine, load(victim, 1_000))
        await buses[MINE].publish(LOAD, mine, load(mine, 3))
        assert (await heard.get()).capacity == 3
        await buses[OTHER].publish(LOAD, victim, load(victim, 2))
        assert (await heard.get()).capacity == 2


FORGED = 500
"""More than the log keeps of one subject."""


async def test_forged_chunks_neither_bear_anothers_name_nor_displace_its_history(
    buses: dict[str, Bus],
) -> None:
    victim, mine = new_id(OTHER), new_id(MINE)
    record = await owned(buses, victim)
    session, kept = record.id, 400
    made = kept + 50

    def header(index: int) -> ChunkHeader:
        return chunk_header(session, index, record.epoch, victim, began=0)

    async def make(index: int) -> None:
        assert record.own_revision is not None
        await append(
            buses[OTHER],
            CHUNK.by(session, victim),
            b"video",
            message_id=new_id("x"),
            headers=header(index).to_headers(),
            expect=(OWN.of(session), record.own_revision),
            deadline_s=PATIENCE_S,
        )

    async def forge(number: int) -> None:
        # Also with the headers of the broker's answers. Incident: with these a reader took the log to end
        # there.
        status = {1: {"Status": "404"}, 2: {"Status": "503"}}.get(number % 3, {})
        headers = {**header(made + number % 5).to_headers(), **status}
        body = b"" if status else b"no video"
        subject = CHUNK.by(session, mine)
        await append(
            buses[MINE], subject, body, message_id=new_id("x"), headers=headers, deadline_s=PATIENCE_S
        )

    log = ChunkLog(buses["gateway"])
    await log.listen()
    early = asyncio.create_task(watched(log, session, StreamStart(0, 0.0, 0), made + 1))
    for index in range(made):
        await make(index)
    await asyncio.gather(*(forge(number) for number in range(FORGED)))
    with pytest.raises(DeadlineError):
        await append(
            buses[MINE],
            CHUNK.by(session, victim),
            b"no video",
            message_id=new_id("x"),
            headers=header(made + 4).to_headers(),
            deadline_s=1.0,
        )

    row = await buses["gateway"].call(subjects.GET_SESSION, SessionRef(session=session))
    start = await log.at(row, 0.0)
    assert (start.index, start.made_s) == (made - kept, header(made - 1).end_s)
    assert await watched(log, session, start, kept) == list(range(made - kept, made))
    await make(made)
    assert await early == list(range(made + 1))
    # A worker that takes over continues behind the owner's newest chunk.
    foreign: list[None] = []
    newest = await Owners(buses[OTHER], lambda: foreign.append(None)).newest(session)
    assert newest is not None
    assert newest[0].index == made

    async def counted() -> bool:
        found = await buses["gateway"].call(subjects.GET_SESSION, SessionRef(session=session))
        assert found.next_chunk <= made + 1
        return found.next_chunk == made + 1

    await eventually(counted)


async def watched(log: ChunkLog, session: str, start: StreamStart, count: int) -> list[int]:
    """Return the indices that a viewer gets."""

    async def made() -> int:
        raise AssertionError("the log was not lost")

    found: list[int] = []
    now = asyncio.get_running_loop().time
    async with asyncio.timeout(2 * PATIENCE_S) as limit:
        async for chunk in log.follow(session, start, asyncio.Event(), made):
            # Per chunk: hundreds are appended while the first viewer watches.
            limit.reschedule(now() + 2 * PATIENCE_S)
            assert chunk.payload == b"video"
            found.append(chunk.header.index)
            if len(found) == count:
                break
    return found


async def test_there_is_no_user_for_all_workers(server: NatsServer) -> None:
    assert set(server.passwords) & set(USERS) == set(USERS) - {"worker"}
    for password in (server.passwords[worker_user(MINE)], ""):
        with pytest.raises(nats.errors.Error):
            await nats.connect(server.address, user="worker", password=password, allow_reconnect=False)
