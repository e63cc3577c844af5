"""Thousands of frames that break WebSocket's protocol or ours, while another client watches a session."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from pydantic import TypeAdapter
from websockets.sync.client import connect

from tests.helpers.attack_target import KEYS, Target
from tests.helpers.hostile import Hostile, attacks
from tests.helpers.raw_socket import RawSocket, breaches, lawful, message
from turboserve.gateway.stream.client_messages import ClientMessage

FRAMES = 1_000
"""Minimum number of frames."""
MANY_FRAMES = 100_000
FRAMES_EACH = 100
"""Minimum number of frames of a round, which mostly sends hundreds: see `attacks`."""
CONCURRENT = 8
MESSAGES_EACH = 60
GROWTH_BYTES = 64 << 20
PATIENCE_S = 120.0
SCHEMA = TypeAdapter(ClientMessage).json_schema()


class Viewer(threading.Thread):
    """Watches a session of alice's in its own thread: `indices` are the received chunks, in order."""

    def __init__(self, target: Target, session: str) -> None:
        super().__init__(daemon=True)
        address = f"{target.url.replace('http', 'ws', 1)}/v1/sessions/{session}/stream"
        self._address = f"{address}?after=-1"
        self._leaving = threading.Event()
        self.indices: list[int] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with connect(
                self._address,
                additional_headers={"Authorization": f"Bearer {KEYS['alice']}"},
                max_size=None,
                open_timeout=PATIENCE_S,
                ping_interval=None,
            ) as socket:
                while not self._leaving.is_set():
                    said = socket.recv(timeout=PATIENCE_S)
                    if isinstance(said, str) and (chunk := json.loads(said))["type"] == "chunk":
                        self.indices.append(chunk["index"])
                        socket.send(json.dumps({"type": "playhead", "playhead_s": chunk["start_s"]}))
        except BaseException as error:
            self.failure = error

    def leave(self) -> None:
        self._leaving.set()
        self.join(PATIENCE_S)

    def more(self, count: int) -> None:
        """Wait for `count` more chunks."""
        wanted, deadline = len(self.indices) + count, time.monotonic() + PATIENCE_S
        while len(self.indices) < wanted:
            assert self.failure is None, repr(self.failure)
            assert time.monotonic() < deadline, f"of chunks the viewer got {len(self.indices)}, not {wanted}"
            time.sleep(0.02)


class Gateway:
    """Resources of the process under attack."""

    def __init__(self, target: Target) -> None:
        self._process = psutil.Process(target.pids()["attacked"])
        self._port = int(target.url.rpartition(":")[2])

    def connections(self) -> int:
        found = self._process.net_connections("tcp")
        return sum(one.laddr.port == self._port and one.status == psutil.CONN_ESTABLISHED for one in found)

    def resident(self) -> int:
        return int(self._process.memory_info().rss)


@contextmanager
def watched(target: Target, session: str) -> Iterator[Viewer]:
    """Watch meanwhile and get each chunk once. Afterwards the gateway keeps nothing of the attack."""
    gateway = Gateway(target)
    viewer = Viewer(target, session)
    viewer.start()
    viewer.more(2)
    before, resident = gateway.connections(), gateway.resident()
    yield viewer
    viewer.more(3)
    deadline = time.monotonic() + PATIENCE_S
    while gateway.connections() > before:
        assert time.monotonic() < deadline, f"{gateway.connections() - before} connections are left"
        time.sleep(0.1)
    assert gateway.resident() < resident + GROWTH_BYTES
    viewer.leave()
    assert viewer.failure is None
    assert viewer.indices == list(range(len(viewer.indices)))


@pytest.fixture(scope="module")
def session(target: Target) -> Iterator[str]:
    """A session of alice's that is watched."""
    name = target.session()
    yield name
    target.end(name)


@pytest.fixture(scope="module")
def other(target: Target) -> Iterator[str]:
    """A session of bob's, who attacks."""
    name = target.session("bob")
    yield name
    target.end(name, tenant="bob")


def address(target: Target, session: str, tenant: str) -> str:
    with target.client(tenant) as client:
        ticket = client.post(f"/v1/sessions/{session}/tickets").json()["ticket"]
    return f"{target.url}/v1/sessions/{session}/stream?ticket={ticket}&after=-1"


async def break_rules(where: str, source: random.Random, breach: bytes) -> int:
    """Open a connection that keeps the rules for a while and then breaks one. Returns the frames sent."""
    socket = await RawSocket.open(where, reads=source.random() < 0.9)
    sent = 0
    try:
        for _ in range(source.randint(0, 40)):
            if not await socket.send(lawful(source)):
                break
            sent += 1
        await socket.send(breach)
        sent += 1
    finally:
        await socket.leave(abruptly=source.random() < 0.5)
    return sent


def raw_frames(target: Target, session: str, frames: int) -> int:
    sent = 0
    with asyncio.Runner() as runner:

        async def round_(source: random.Random) -> int:
            ways = [way() for way in breaches(source)]
            source.shuffle(ways)
            done = 0
            for start in range(0, len(ways), CONCURRENT):
                some = (break_rules(where, source, way) for way in ways[start : start + CONCURRENT])
                done += sum(await asyncio.gather(*some))
            return done

        where = address(target, session, "alice")

        @attacks(frames // FRAMES_EACH)
        def each(hostile: Hostile) -> None:
            nonlocal sent
            if sent < frames:
                sent += runner.run(round_(hostile.random))

    return sent


def structured_messages(target: Target, session: str, frames: int) -> int:
    sent = 0
    with asyncio.Runner() as runner:
        where = address(target, session, "bob")

        async def talk(hostile: Hostile) -> int:
            socket = await RawSocket.open(where)
            said = 0
            try:
                while said < MESSAGES_EACH and await socket.send(message(hostile, SCHEMA)):
                    said += 1
                    if said % 8 == 0:
                        await asyncio.sleep(0)
            finally:
                await socket.leave(abruptly=hostile.random.random() < 0.5)
            return said

        async def several(hostile: Hostile) -> int:
            each = (Hostile(hostile.random.getrandbits(64)) for _ in range(CONCURRENT))
            return sum(await asyncio.gather(*map(talk, each)))

        @attacks(frames // FRAMES_EACH)
        def some(hostile: Hostile) -> None:
            nonlocal sent
            if sent < frames:
                sent += runner.run(several(hostile))

    return sent


def test_frames_that_break_the_protocol(target: Target, session: str) -> None:
    with watched(target, session):
        assert raw_frames(target, session, FRAMES // 2) >= FRAMES // 2


def test_messages_that_are_none(target: Target, session: str, other: str) -> None:
    with watched(target, session):
        assert structured_messages(target, other, FRAMES // 2) >= FRAMES // 2


@pytest.mark.soak
def test_many_more_of_both(target: Target, session: str, other: str) -> None:
    with watched(target, session):
        raw_frames(target, session, MANY_FRAMES)
        structured_messages(target, other, MANY_FRAMES)
