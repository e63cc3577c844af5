"""Indirect publishing through the broker or a service, on subjects that the user may not publish.

Permissions name the subjects that a user publishes itself. The broker publishes on a consumer's deliver
subject, a stream's source or republished subject, a reply subject and a trace's destination; a service
publishes its answer. Each of these ways is tried here with each stolen credential.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg as NatsMsg
from nats.js import api

from tests.helpers.broker_clients import PATIENCE_S, connected_client, processed
from turboserve import subjects
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.config import Settings
from turboserve.contracts.errors import ForbiddenError
from turboserve.contracts.requests import EndSession, SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.subject_types import Caller
from turboserve.subjects import CHUNKS, EVENTS

STOLEN = ("gateway", "scheduler", "autoscaler", "worker")
VICTIM = "victim"
FORGED = EndSession(session=VICTIM).to_bytes()


class Broker:
    """The two streams, a state store that notes its requests, and listeners in every account."""

    def __init__(self, server: NatsServer, stack: AsyncExitStack) -> None:
        self._server, self._stack = server, stack
        self.asked: list[tuple[str, str]] = []
        """(server, subject) of each request."""
        self.heard: list[tuple[str, str]] = []
        """(receiver, subject) of each received message."""
        self._services: list[Client] = []

    async def connect(self, user: str) -> Client:
        """Connect a bare client, as an attacker with this user's password. Refusals are ignored."""

        async def ignore(_: Exception) -> None:
            """Ignore the broker's reports of refusals."""

        client = await connected_client(
            self._server.url(user),
            error_cb=ignore,
            inbox_prefix=subjects.inbox_prefix(user).encode(),
        )
        self._stack.push_async_callback(client.close)
        return client

    async def start(self) -> None:
        self.admin = await self.connect("admin")
        self.jetstream = self.admin.jetstream(timeout=PATIENCE_S)
        for stream in (CHUNKS, EVENTS):
            await self.jetstream.add_stream(
                api.StreamConfig(
                    name=stream,
                    subjects=[log.every for log in subjects.LOGS if log.stream == stream],
                    allow_direct=True,
                    republish=api.RePublish(src=">", dest="live.>"),
                )
            )
        # Every stream has a message whose body an attacker chose: workers write chunks, users write prompts.
        for subject in ("chunk.bait.bait", "event.bait", "worker-event.bait"):
            await self.jetstream.publish(subject, FORGED)
        for service in subjects.SERVICES:
            await self._listen(service)

    async def _listen(self, service: str) -> None:
        """Listen as the service does. The state store answers latents with a body that workers chose."""
        client = await self.connect(service)

        async def note(raw: NatsMsg) -> None:
            self.asked.append((service, raw.subject))
            endpoint = raw.subject.partition(".from.")[0]
            if endpoint == subjects.GET_LATENTS.subject:
                await client.publish(raw.reply, FORGED)
            elif raw.reply:
                await client.publish(raw.reply, b"{}")

        async def hear(raw: NatsMsg) -> None:
            self.heard.append((service, raw.subject))

        for endpoint in subjects.ENDPOINTS:
            if endpoint.server == service:
                await client.subscribe(endpoint.every, queue=service, cb=note)
        for topic in subjects.TOPICS:
            if service in topic.readers:
                await client.subscribe(topic.every, cb=hear)
        for log in subjects.LOGS:
            if service in log.readers:
                await client.subscribe(log.live("*"), cb=hear)
        await processed(client)
        self._services.append(client)

    async def settled(self, *clients: Client) -> None:
        """Wait until everything that `clients` sent was processed, also by the services."""
        await processed(*clients)
        before = None
        while before != (before := await self._state()):
            await asyncio.sleep(0.3)
            # What the broker sent to a service lies before the answer to the service's ping.
            await processed(*self._services)

    async def _state(self) -> tuple[int, int, int, int]:
        sequences = [(await self.jetstream.stream_info(name)).state.last_seq for name in (CHUNKS, EVENTS)]
        return len(self.asked), len(self.heard), sequences[0], sequences[1]

    async def written(self) -> dict[str, int]:
        """Count the messages in the logs by subject, without the bait."""
        found: dict[str, int] = {}
        for stream in (CHUNKS, EVENTS):
            state = (await self.jetstream.stream_info(stream, subjects_filter=">")).state
            found |= {name: n for name, n in (state.subjects or {}).items() if not name.endswith(".bait")}
        return found


@pytest.fixture
async def broker(nats_url: str, nats_server: NatsServer) -> AsyncIterator[Broker]:
    async with AsyncExitStack() as stack:
        broker = Broker(nats_server, stack)
        await broker.start()
        yield broker
        for stream in await broker.jetstream.streams_info():
            await broker.jetstream.delete_stream(stream.config.name or "")


def targets() -> Iterator[str]:
    """Yield subjects on which a forged message would do harm: requests, topics, logs, answers."""
    for endpoint in subjects.ENDPOINTS:
        yield endpoint.subject
        yield from (endpoint.request_subject(caller) for caller in (*endpoint.callers, subjects.ADMIN))
    yield from (topic.of(VICTIM) for topic in subjects.TOPICS)
    for log in subjects.LOGS:
        yield log.by(VICTIM, VICTIM)
        yield f"live.{log.by(VICTIM, VICTIM)}"
    yield from (f"{subjects.inbox_prefix(user)}.{VICTIM}" for user in (*subjects.SERVICES, subjects.ADMIN))


def own(service: str) -> set[str]:
    """Return what `service` may send anyway: no indirect way may give it more."""
    sent = {e.request_subject(service) for e in subjects.ENDPOINTS if service in e.callers}
    sent |= {topic.of(VICTIM) for topic in subjects.TOPICS if service in topic.senders}
    return sent | {log.by(VICTIM, VICTIM) for log in subjects.LOGS if service in log.writers}


def assert_nothing_forged(broker: Broker, service: str, written: dict[str, int]) -> None:
    """Check that other services received only what `service` may send itself.

    Its own account is at its mercy.
    """
    assert {subject for server, subject in broker.asked if server != service} <= own(service)
    assert set(written) <= own(service)
    live = {f"live.{name}" for name in own(service)}
    assert {subject for listener, subject in broker.heard if listener != service} <= own(service) | live


@pytest.mark.parametrize("service", STOLEN)
async def test_a_push_consumer_delivers_no_forged_requests(broker: Broker, service: str) -> None:
    """The original attack: `deliver_subject: state.session.end`, `deliver_group: state-store`."""
    thief = await broker.connect(service)
    inbox = f"{subjects.inbox_prefix(service)}.answers"
    answers: list[bytes] = []

    async def hear(raw: NatsMsg) -> None:
        answers.append(raw.data)

    await thief.subscribe(inbox, cb=hear)
    for stream in (CHUNKS, EVENTS):
        for number, target in enumerate(targets()):
            for group in ("state-store", None):
                name = f"thief-{number}-{group}"
                config: dict[str, Any] = {
                    "name": name,
                    "deliver_subject": target,
                    "deliver_policy": "all",
                    "ack_policy": "none",
                    "replay_policy": "instant",
                }
                if group is not None:
                    config["deliver_group"] = group
                unnamed = {key: value for key, value in config.items() if key != "name"}
                durable = {**unnamed, "durable_name": name}
                create = "$JS.API.CONSUMER"
                for subject, wanted in (
                    (f"{create}.CREATE.{stream}", unnamed),
                    (f"{create}.CREATE.{stream}.{name}", config),
                    (
                        f"{create}.CREATE.{stream}.{name}.chunk.bait.bait",
                        {**config, "filter_subject": "chunk.bait.bait"},
                    ),
                    (f"{create}.DURABLE.CREATE.{stream}.{name}", durable),
                ):
                    body = json.dumps({"stream_name": stream, "config": wanted}).encode()
                    await thief.publish(subject, body, reply=inbox)
    await broker.settled(thief)
    assert answers == []
    for stream in (CHUNKS, EVENTS):
        assert await broker.jetstream.consumers_info(stream) == []
    assert (broker.asked, broker.heard, await broker.written()) == ([], [], {})


@pytest.mark.parametrize("service", STOLEN)
async def test_no_stream_is_made_or_changed_to_copy_messages_elsewhere(broker: Broker, service: str) -> None:
    thief = await broker.connect(service)
    before = [(await broker.jetstream.stream_info(name)).config for name in (CHUNKS, EVENTS)]
    for number, target in enumerate(targets()):
        copies: list[dict[str, object]] = [
            {"republish": {"src": ">", "dest": target}, "subjects": [f"thief{number}.>"]},
            {
                "sources": [
                    {"name": CHUNKS, "subject_transforms": [{"src": "chunk.bait.bait", "dest": target}]}
                ]
            },
            {"mirror": {"name": CHUNKS}},
            {"subjects": [target]},
        ]
        for copy in copies:
            stolen = {"name": "STOLEN", "storage": "memory", **copy}
            await thief.publish("$JS.API.STREAM.CREATE.STOLEN", json.dumps(stolen).encode())
        for stream in (CHUNKS, EVENTS):
            changed = {
                "name": stream,
                "subjects": ["own.*", "chunk.*.*"],
                "republish": {"src": ">", "dest": target},
            }
            for verb in ("CREATE", "UPDATE"):
                await thief.publish(f"$JS.API.STREAM.{verb}.{stream}", json.dumps(changed).encode())
    await broker.settled(thief)
    assert {info.config.name for info in await broker.jetstream.streams_info()} == {CHUNKS, EVENTS}
    assert [(await broker.jetstream.stream_info(name)).config for name in (CHUNKS, EVENTS)] == before
    assert (broker.asked, broker.heard, await broker.written()) == ([], [], {})


@pytest.mark.parametrize("service", STOLEN)
async def test_an_answer_of_jetstream_is_no_message_of_anybody_else(broker: Broker, service: str) -> None:
    """Its body may be any stored message, without a header that would reveal it.

    The broker does not check whether the requester may publish to the reply subject.
    """
    thief = await broker.connect(service)
    requests: list[tuple[str, bytes]] = []
    for stream, bait in ((CHUNKS, "chunk.bait.bait"), (EVENTS, "event.bait")):
        requests += [
            (f"$JS.API.DIRECT.GET.{stream}", b'{"seq": 1}'),
            (f"$JS.API.DIRECT.GET.{stream}", b'{"seq": 1, "no_hdr": true}'),
            (f"$JS.API.DIRECT.GET.{stream}", b'{"seq": 1, "batch": 2, "no_hdr": true}'),
            (f"$JS.API.DIRECT.GET.{stream}", json.dumps({"last_by_subj": bait, "no_hdr": True}).encode()),
            (f"$JS.API.DIRECT.GET.{stream}", json.dumps({"multi_last": [bait]}).encode()),
            (f"$JS.API.DIRECT.GET.{stream}.{bait}", b'{"no_hdr": true}'),
            (f"$JS.API.STREAM.INFO.{stream}", b""),
        ]
    # An acknowledgement is an answer too.
    requests.append(("chunk.victim.victim", FORGED))
    for target in targets():
        for subject, body in requests:
            await thief.publish(subject, body, reply=target)
    await broker.settled(thief)
    assert_nothing_forged(broker, service, await broker.written())


@pytest.mark.parametrize("service", STOLEN)
async def test_a_services_answer_is_no_message_of_anybody_else(broker: Broker, service: str) -> None:
    """A service answers with its own permissions, to a subject that the requester chose."""
    thief = await broker.connect(service)
    asked = 0
    for endpoint in subjects.ENDPOINTS:
        for caller in endpoint.callers:
            for target in targets():
                await thief.publish(endpoint.request_subject(caller), FORGED, reply=target)
            asked += caller == service
    await broker.settled(thief)
    assert len(broker.asked) >= asked
    assert_nothing_forged(broker, service, await broker.written())


@pytest.mark.parametrize("service", STOLEN)
async def test_a_trace_goes_nowhere_else(broker: Broker, service: str) -> None:
    """The broker reports the route of a message to the subject that the message names."""
    thief = await broker.connect(service)
    mine = sorted(own(service))
    for target in targets():
        if target not in own(service):
            for subject in mine:
                await thief.publish(subject, FORGED, headers={"Nats-Trace-Dest": target})
    await broker.settled(thief)
    assert_nothing_forged(broker, service, await broker.written())


async def test_a_server_looks_at_the_caller_and_at_where_it_is_to_answer(nats_url: str) -> None:
    """This holds even if the broker has other rules: here it limits neither side."""
    admin = Settings(nats_url=nats_url)
    server, client = await Bus.connect("admin", admin), await Bus.connect("admin", admin)
    callers: list[Caller] = []

    async def answer(ref: SessionRef, caller: Caller) -> SessionRecord:
        callers.append(caller)
        raise ForbiddenError("for the test", field=caller.token)

    async def ask(caller: str, inbox: str) -> str:
        """Return the code of the error in the answer. An unanswered request would be a failure."""
        answers: asyncio.Queue[NatsMsg] = asyncio.Queue()
        subscription = await client.client.subscribe(inbox, cb=answers.put)
        subject = subjects.END_SESSION.request_subject(caller)
        await client.client.publish(subject, FORGED, reply=inbox)
        try:
            raw = await asyncio.wait_for(answers.get(), PATIENCE_S)
        finally:
            await subscription.unsubscribe()
        return str(json.loads((raw.headers or {})["Ts-Error"]).get("field"))

    try:
        await server.serve(subjects.END_SESSION, answer)
        await server.flush()
        assert await ask("gateway", "_INBOX_gateway.a") == "gateway"
        assert await ask("admin", "_INBOX_admin.a") == "admin"
        for caller in ("worker", "scheduler", "worker.wk_1"):
            assert await ask(caller, f"{subjects.inbox_prefix(caller)}.a") == "caller"
        assert callers == [Caller("gateway"), Caller("admin")]
        strays: list[str] = []

        async def stray(raw: NatsMsg) -> None:
            strays.append(raw.subject)

        for inbox in ("own.victim", "state.session.get.from.gateway", "_INBOX_admin.a", "_INBOX_gatewayx.a"):
            subscription = await client.client.subscribe(inbox, cb=stray)
            await client.client.publish("state.session.end.from.gateway", FORGED, reply=inbox)
            assert isinstance(client.client, Client)
            await processed(client.client)
            # An answer would come before that of a later request.
            assert await ask("gateway", "_INBOX_gateway.b") == "gateway"
            await subscription.unsubscribe()
        assert strays == []
    finally:
        await client.close()
        await server.close()
