"""Topics and logs with invalid messages, from the permitted service: no reader ends or is misled."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from nats.aio.client import Client

from tests.helpers.attack_target import KEYS, Target
from tests.helpers.broker_clients import connected_client, processed
from tests.helpers.hostile import NOT_DOCUMENTS, Hostile, attacks
from turboserve import subjects
from turboserve.bus.requests import META_HEADER
from turboserve.contracts.chunks import HEADER
from turboserve.contracts.versions import MEMBER, SCHEMA_VERSION
from turboserve.subject_types import Topic

PATIENCE_S = 120.0


class Speaker:
    """Publishes as any service, about a session that plays and its worker."""

    def __init__(self, runner: asyncio.Runner, target: Target, session: str) -> None:
        self.runner, self.target, self.session = runner, target, session
        self.worker = ""
        self._clients: dict[str, Client] = {}

    async def open(self) -> None:
        for service in subjects.SERVICES:
            self._clients[service] = await connected_client(self.target.pool.nats.url(service))
        async with httpx.AsyncClient(base_url=self.target.url, timeout=PATIENCE_S) as client:
            headers = {"Authorization": f"Bearer {KEYS['alice']}"}
            row = await client.get(f"/v1/sessions/{self.session}", headers=headers)
            self.worker = row.json()["worker"]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def say(
        self, service: str, subject: str, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        await self._clients[service].publish(subject, data, headers=headers)

    async def flush(self) -> None:
        await processed(*self._clients.values())


@pytest.fixture(scope="module")
def session(target: Target) -> Iterator[str]:
    name = target.session()
    yield name
    target.end(name)


@pytest.fixture(scope="module")
def speaker(target: Target, session: str) -> Iterator[Speaker]:
    with asyncio.Runner() as runner:
        speaker = Speaker(runner, target, session)
        runner.run(speaker.open())
        yield speaker
        runner.run(speaker.close())


def token(topic: Topic[Any], speaker: Speaker) -> str:
    names = {"load": speaker.worker, "assign": speaker.worker, "feedback": "toyworld", "pool": "status"}
    return names.get(topic.pattern.partition(".")[0], speaker.session)


def in_header(data: bytes) -> str:
    """Return `data` as the value of a header, which holds neither line ends nor all of Unicode."""
    return data.decode("latin-1")[:9_000].replace("\r", " ").replace("\n", " ") or " "


def names(speaker: Speaker) -> dict[str, list[Any]]:
    return {
        "session": [speaker.session, "ses_other"],
        "worker": [speaker.worker, "wrk_other"],
        "model": ["toyworld"],
        "pool": ["local", "other"],
        "at": [time.time(), 0.0],
    }


def chunks(target: Target, session: str, after: int, count: int) -> int:
    """Watch until `count` chunks after `after` have come, none missing. Returns the index of the last."""
    from websockets.sync.client import connect

    address = f"{target.url.replace('http', 'ws', 1)}/v1/sessions/{session}/stream"
    with connect(
        f"{address}?after={after}",
        additional_headers={"Authorization": f"Bearer {KEYS['alice']}"},
        max_size=None,
        open_timeout=PATIENCE_S,
        ping_interval=None,
    ) as socket:
        last = after
        while last < after + count:
            message = socket.recv(timeout=PATIENCE_S)
            if isinstance(message, bytes):
                continue
            said = json.loads(message)
            if said["type"] == "chunk":
                assert said["index"] == last + 1
                last = said["index"]
                socket.send(json.dumps({"type": "playhead", "playhead_s": said["start_s"]}))
            assert said["type"] not in ("error", "end"), said
    return int(last)


@pytest.mark.parametrize("examples", [60, pytest.param(600, marks=pytest.mark.soak)])
@pytest.mark.parametrize("topic", subjects.TOPICS, ids=lambda one: one.pattern)
def test_topics(target: Target, speaker: Speaker, topic: Topic[Any], examples: int) -> None:
    pids = target.pids()
    last = chunks(target, speaker.session, -1, 1)
    schema = topic.message.model_json_schema()
    subject, sender = topic.of(token(topic, speaker)), topic.senders[0]

    @attacks(examples)
    def each(hostile: Hostile) -> None:
        document = hostile.versioned(hostile.mutated(hostile.document(schema, names(speaker))))
        data = hostile.encoded(document)
        headers: dict[str, str] | None = None
        if hostile.random.random() < 0.3:
            headers, data = {META_HEADER: in_header(data)}, hostile.random.randbytes(20)
        speaker.runner.run(speaker.say(sender, subject, data, headers))

    for data in NOT_DOCUMENTS:
        speaker.runner.run(speaker.say(sender, subject, data))
        speaker.runner.run(
            speaker.say(
                sender, subject, b"x", {META_HEADER: data.decode("latin-1")[:9_000].replace("\n", "") or " "}
            )
        )
    speaker.runner.run(speaker.flush())
    chunks(target, speaker.session, last, 3)
    assert target.pids() == pids
    assert target.alive()


RAW_HEADERS = (
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0\r\nTs-Chunk\r\n\r\n",
    b"NATS/1.0\r\n: x\r\n\r\n",
    b"NATS/1.0\r\nTs-Meta: \xff\xfe\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe: \x00\r\n\r\n",
    b"NATS/1.0\r\nTs-Meta: {}\r\nTs-Meta: []\r\n\r\n",
    b"NATS/1.0\r\ntraceparent: 00-\xff-00-zz\r\ntracestate: \x00=\r\n\r\n",
    b"NATS/9.9\r\nx: y\r\n\r\n",
    b"\x00" * 40,
    b"NATS/1.0\r\n" + b"k: v\r\n" * 5_000 + b"\r\n",
)


async def publish_raw(target: Target, service: str, subject: str, head: bytes, data: bytes) -> None:
    """Publish one message with raw headers, which a client library would refuse to send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.pool.nats.port)
    login = {"verbose": False, "headers": True, "user": service, "pass": target.pool.nats.passwords[service]}
    writer.write(b"CONNECT " + json.dumps(login).encode() + b"\r\n")
    writer.write(f"HPUB {subject} {len(head)} {len(head) + len(data)}\r\n".encode() + head + data + b"\r\n")
    writer.write(b"PING\r\n")
    while (line := await asyncio.wait_for(reader.readline(), PATIENCE_S)).strip() not in (b"PONG", b""):
        pass
    del line
    writer.close()
    await writer.wait_closed()


def test_headers_that_are_none(target: Target, speaker: Speaker) -> None:
    last = chunks(target, speaker.session, -1, 1)
    for topic in subjects.TOPICS:
        for head in RAW_HEADERS:
            subject = topic.of(token(topic, speaker))
            speaker.runner.run(publish_raw(target, topic.senders[0], subject, head, b"{}"))
    chunks(target, speaker.session, last, 3)


def headers_of(session: str, worker: str, **changes: Any) -> dict[str, str]:
    """Return a chunk's headers, with `changes`."""
    header = {
        MEMBER: str(SCHEMA_VERSION),
        "session": session,
        "index": 0,
        "epoch": 1,
        "worker": worker,
        "control_seq": 0,
        "first_frame": 0,
        "frames": 9,
        "fps": 16.0,
        "width": 64,
        "height": 64,
        "codec": "avc1.42c01e",
        "init_bytes": 0,
    }
    return {HEADER: json.dumps(header | changes)}


POISON: tuple[dict[str, Any], ...] = (
    {"index": 2**70},
    {"index": -1},
    {"index": 2**63 - 1},
    {"index": "x"},
    {"fps": 0.0},
    {"fps": float("nan")},
    {"fps": 5e-324},
    {"frames": 0},
    {"frames": -(2**70)},
    {"first_frame": 10**400},
    {"control_seq": 2**64},
    {"init_bytes": 2**40},
    {"codec": 'x"; evil="'},
    {"published_at": float("inf")},
    {"compute_s": -1e308},
)


def test_chunks_that_cannot_be(target: Target, speaker: Speaker) -> None:
    """A worker's credentials let it write to any chunk log.

    Invalid entries there stop neither the counting of all sessions' chunks nor a viewer.
    """
    # A session of its own, because forged assignments and playheads of other tests are believed.
    session = target.session()
    last = chunks(target, session, -1, 2)
    poison = [headers_of(session, speaker.worker, **changes) for changes in POISON]
    # Chunks of one session in another's log must not be counted for either.
    poison.append(headers_of("ses_other", speaker.worker, index=5))
    poison += [{}, {HEADER: ""}, {HEADER: "{}"}, {HEADER: "[" * 5_000}, {HEADER: "x" * 30_000}]
    own = headers_of(session, speaker.worker, index=-1)
    poison += [
        own | {"Nats-Sequence": "x"},
        own | {"Nats-Last-Sequence": "x"},
        own | {"Nats-Subject": "own.x"},
        own | {"Status": "404"},
        own | {"Status": "503"},
    ]

    async def all_of_it() -> None:
        for headers in poison:
            await speaker.say(
                "worker", subjects.CHUNK.by(session, speaker.worker), b"no video", headers or None
            )
        for head in RAW_HEADERS:
            await publish_raw(target, "worker", subjects.CHUNK.by(session, speaker.worker), head, b"no video")
        await speaker.flush()

    speaker.runner.run(all_of_it())
    # At once, while the newest entry of the log is unreadable; and for a while.
    last = chunks(target, session, last, 1)
    chunks(target, session, -1, last + 3)
    with target.client("alice") as client:
        receipt = client.post(f"/v1/sessions/{session}/prompts", json={"prompt": "a green square"})
        assert receipt.status_code == 202
        applied = receipt.json()["control_seq"]
        with client.stream("GET", f"/v1/sessions/{session}/stream.mp4") as video:
            for _ in video.iter_bytes():
                row = client.get(f"/v1/sessions/{session}").json()
                if row["applied_control_seq"] >= applied:
                    break
        assert row["next_chunk"] < 10_000
    target.end(session)
    with target.client("bob") as client:
        assert client.get("/v1/sessions").json()["sessions"] == []
