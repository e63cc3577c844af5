"""Who may say what: the table of subjects, enforced by a real broker."""

from __future__ import annotations

import asyncio

import pytest

from turboserve import subjects
from turboserve.cli.embedded import NatsServer
from turboserve.subjects import ENDPOINTS, LOGS, SERVICES, TOPICS, permissions


def test_every_subject_stands_once_and_names_services_that_exist() -> None:
    names = [endpoint.subject for endpoint in ENDPOINTS]
    names += [topic.pattern for topic in TOPICS] + [log.pattern for log in LOGS]
    assert len(set(names)) == len(names)
    named = {endpoint.server for endpoint in ENDPOINTS}
    named |= {service for endpoint in ENDPOINTS for service in endpoint.callers}
    named |= {service for topic in TOPICS for service in (*topic.senders, *topic.readers)}
    named |= {service for log in LOGS for service in (*log.writers, *log.readers)}
    assert named <= set(SERVICES)


def test_nobody_else_listens_to_a_services_answers() -> None:
    for service in SERVICES:
        for other in SERVICES:
            prefix = subjects.inbox_prefix(other)
            listens = any(name.startswith(prefix) for name in permissions(service)["subscribe"])
            assert listens == (service == other)
    with pytest.raises(ValueError, match="stranger"):
        permissions("stranger")


def test_only_the_state_store_writes_the_fence_and_events() -> None:
    for service in SERVICES:
        publish = permissions(service)["publish"]
        writes = any(name in publish for name in ("own.*", "event.*", "worker-event.*"))
        assert writes == (service == "state-store")
        assert ("chunk.*" in publish) == (service == "worker")


@pytest.mark.parametrize(
    ("service", "subject"),
    [
        ("worker", "own.s"),
        ("worker", "event.s"),
        ("worker", subjects.PLACE_SESSION.subject),
        ("gateway", "chunk.s"),
        ("gateway", subjects.RENEW.subject),
        ("scheduler", "own.s"),
        ("scheduler", "assign.w"),
        ("autoscaler", subjects.CREATE_SESSION.subject),
        ("gateway", "$JS.API.STREAM.DELETE.CHUNKS"),
        ("worker", "$JS.API.STREAM.PURGE.CHUNKS"),
        ("gateway", "_INBOX_worker.reply"),
    ],
)
async def test_the_broker_refuses_what_the_table_does_not_allow(
    nats_server: NatsServer, service: str, subject: str
) -> None:
    import nats

    refused: asyncio.Queue[str] = asyncio.Queue()

    async def failed(error: Exception) -> None:
        await refused.put(str(error).lower())

    client = await nats.connect(nats_server.url(service), error_cb=failed)
    try:
        await client.publish(subject, b"{}")
        await client.flush()
        assert "permissions violation" in await asyncio.wait_for(refused.get(), 10)
    finally:
        await client.close()
