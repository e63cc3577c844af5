"""The subjects that each broker user may publish and subscribe to, tried one by one on a real broker."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import api

from tests.helpers.broker_clients import PATIENCE_S, processed
from tests.helpers.broker_refusals import connected, refusals
from tests.helpers.broker_subjects import (
    ID,
    NEEDS,
    USERS,
    WILDCARDS,
    WILDCARDS_NEEDED,
    every_api_subject,
    every_application_subject,
)
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.cli.embedded import NatsServer


@pytest.mark.parametrize("verb", ["publish", "subscribe"])
@pytest.mark.parametrize("service", subjects.SERVICES)
async def test_the_broker_refuses_every_subject_outside_a_services_needs(
    nats_server: NatsServer, nats_url: str, service: str, verb: str
) -> None:
    names = list(dict.fromkeys([*every_api_subject(), *every_application_subject()]))
    needed = NEEDS[service][verb]
    assert needed <= set(names)
    allowed = set(names) - await refusals(nats_server, service, verb, names)
    assert allowed == needed


@pytest.mark.parametrize("service", subjects.SERVICES)
async def test_the_broker_refuses_subscriptions_that_reach_further(
    nats_server: NatsServer, nats_url: str, service: str
) -> None:
    """A pattern that covers a permitted subject does not give access to forbidden ones."""
    names = list(dict.fromkeys(WILDCARDS))
    allowed = set(names) - await refusals(nats_server, service, "subscribe", names)
    assert allowed == WILDCARDS_NEEDED[service]


async def test_the_needs_name_every_endpoint_topic_and_log() -> None:
    """A subject missing from the needs would never be tried, so the table must be complete."""
    sent = {name for needs in NEEDS.values() for name in needs["publish"]}
    heard = {name for needs in NEEDS.values() for name in needs["subscribe"]}
    for endpoint in subjects.ENDPOINTS:
        callers = {user for user in USERS if endpoint.request_subject(user) in sent}
        assert callers == set(endpoint.callers)
        assert endpoint.request_subject(endpoint.callers[0]) in heard
    for topic in subjects.TOPICS:
        assert topic.of(ID) in sent & heard
    for log in subjects.LOGS:
        assert log.by(ID, ID) in sent


async def test_what_a_service_needs_arrives_where_it_is_needed(
    nats_server: NatsServer, nats_url: str
) -> None:
    """Each topic from each sender to each reader, each live message, each request and its answer: once.

    The admin may also send and receive everything, because tools and tests stand in for services. Only what
    one service's processes send to each other stays in its account.
    """
    clients = {user: await connected(nats_server, user, set()) for user in USERS}
    heard: Counter[tuple[str, str]] = Counter()
    wanted: Counter[tuple[str, str]] = Counter()
    try:
        jetstream = clients[subjects.ADMIN].jetstream(timeout=PATIENCE_S)
        for stream in (subjects.CHUNKS, subjects.EVENTS):
            names = [log.every for log in subjects.LOGS if log.stream == stream]
            republish = api.RePublish(src=">", dest="live.>")
            await jetstream.add_stream(api.StreamConfig(name=stream, subjects=names, republish=republish))

        def listener(service: str) -> Callable[[Msg], Awaitable[None]]:
            async def hear(raw: Msg) -> None:
                heard[service, raw.subject] += 1
                if raw.reply:
                    await clients[service].publish(raw.reply, b"answer")

            return hear

        for service in subjects.SERVICES:
            for name in NEEDS[service]["subscribe"]:
                if not name.startswith("_INBOX"):
                    await clients[service].subscribe(name, cb=listener(service))
            await processed(clients[service])
        for topic in subjects.TOPICS:
            await clients[subjects.ADMIN].subscribe(topic.of(ID), cb=listener(subjects.ADMIN))
        await processed(clients[subjects.ADMIN])
        for topic in subjects.TOPICS:
            admin = () if topic.internal else (subjects.ADMIN,)
            for sender in (*topic.senders, *admin):
                await clients[sender].publish(topic.of(ID), b"{}")
                wanted.update((reader, topic.of(ID)) for reader in (*topic.readers, *admin))
        for log in subjects.LOGS:
            for writer in (*log.writers, subjects.ADMIN):
                stored = await clients[writer].request(log.by(ID, ID), b"{}", timeout=PATIENCE_S)
                assert "error" not in json.loads(stored.data), (writer, stored.data)
                wanted.update((reader, f"live.{log.by(ID, ID)}") for reader in log.readers)
        await eventually(lambda: not (wanted - heard), PATIENCE_S)
        for endpoint in subjects.ENDPOINTS:
            for caller in (*endpoint.callers, subjects.ADMIN):
                subject = endpoint.request_subject(caller)
                inbox = f"{subjects.inbox_prefix(caller)}.{ID}.{endpoint.subject}"
                await clients[caller].subscribe(inbox, cb=listener(caller))
                await clients[caller].publish(subject, b"{}", reply=inbox)
                wanted.update([(endpoint.server, subject), (caller, inbox)])
                # One after the other: nats-server 2.15 may lose the answer to one of the first requests that
                # an account gets at the same time. It hands out reply subjects before it listens to them.
                async with asyncio.timeout(PATIENCE_S):
                    while wanted - heard:
                        await asyncio.sleep(0)
        await processed(*clients.values())
        assert heard == wanted
    except TimeoutError:
        connections = {user: (client.is_connected, client.last_error) for user, client in clients.items()}
        pytest.fail(f"did not arrive: {wanted - heard}; {connections}")
    finally:
        for stream in (subjects.CHUNKS, subjects.EVENTS):
            with suppress(nats.errors.Error):
                await jetstream.delete_stream(stream)
        for client in clients.values():
            await client.close()
