"""Attacks on a worker's transfer port: a peer without the migration's key gets nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, cast

import psutil
import pytest
import torch

from tests.helpers.waiting import eventually
from tests.worker.transfer.transfer_peer import (
    KEY,
    MIGRATION,
    MODEL,
    SESSION,
    TARGET,
    Giver,
    Room,
    State,
    Steps,
)
from turboserve.worker.transfer import half_open_connections, handshake
from turboserve.worker.transfer.channel import FRAME_LIMIT, ByteReader, ByteWriter, Channel
from turboserve.worker.transfer.errors import AuthenticationError, PeerLostError, TransferError
from turboserve.worker.transfer.frames import (
    Challenge,
    Denied,
    Frame,
    Hello,
    Open,
    Proof,
    Refuse,
    Verified,
    Wait,
)
from turboserve.worker.transfer.links import Links
from turboserve.worker.transfer.network import listen
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.source import Source
from turboserve.worker.transfer.target import Target

HOST = "127.0.0.1"
SIZE = 2_000
PATIENCE_S = 60.0
OTHER_KEY = b"o" * 32
OTHER_SESSION = "ses_other"


class Worker(Giver):
    """Gives away two sessions, and notes every request beyond their keys."""

    def __init__(self) -> None:
        super().__init__(SIZE, Steps(cast(Any, None), None), quiesced=False)
        self.asked: list[str] = []

    def key(self, session: str, migration: int) -> bytes | None:
        return {(SESSION, MIGRATION): KEY, (OTHER_SESSION, MIGRATION): OTHER_KEY}.get((session, migration))

    def check(self, session: str, migration: int, target: str) -> None:
        self.asked.append(session)


class Port:
    """The transfer port of one worker."""

    def __init__(self, worker: Worker, source: Source, port: int) -> None:
        self.worker, self.source, self.port = worker, source, port

    async def connect(self) -> Channel:
        return Channel(*await asyncio.open_connection(HOST, self.port))


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    worker = Worker()
    links = Links(["gloo"], torch.device("cpu"), MODEL)
    source = Source(worker, links, CopyLimits(most_s=PATIENCE_S))
    server, number = await listen(source.serve, HOST, 0)
    yield Port(worker, source, number)
    source.close()
    server.close()
    links.close()


@pytest.fixture
async def fetch(port: Port) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """The rightful target fetches the state. Returns whether it arrived, bit for bit."""
    links = Links(["gloo"], torch.device("cpu"), MODEL)
    target = Target(TARGET, links, PATIENCE_S)

    async def run() -> bool:
        room = Room(SIZE)
        address = f"tcp://{HOST}:{port.port}"
        await target.fetch(SESSION, MIGRATION, KEY, [address], room, PATIENCE_S)
        return room.holds(State(SIZE))

    yield run
    links.close()


def opening(session: str = SESSION, migration: int = MIGRATION) -> Open:
    return Open(session=session, migration=migration, worker=TARGET, nonce=handshake.new_nonce())


@pytest.mark.parametrize(
    ("session", "migration", "key"),
    [
        (SESSION, MIGRATION, bytes(32)),
        (SESSION, MIGRATION, OTHER_KEY),
        (OTHER_SESSION, MIGRATION, KEY),
        (SESSION, MIGRATION + 1, KEY),
        ("ses_unknown", MIGRATION, KEY),
    ],
    ids=[
        "no key",
        "another session's key",
        "for another session",
        "for another migration",
        "unknown session",
    ],
)
async def test_who_does_not_prove_the_key_learns_nothing(
    port: Port, session: str, migration: int, key: bytes
) -> None:
    """Incident: naming a session and a migration of a row was enough to get its state.

    Every refusal is alike.
    """
    channel = await port.connect()
    with pytest.raises(AuthenticationError, match="the source refused it"):
        await handshake.authenticate(channel, opening(session, migration), key, PATIENCE_S)
    with pytest.raises(PeerLostError):
        await channel.receive(PATIENCE_S)
    assert port.worker.asked == []
    channel.abort()


async def test_a_recorded_handshake_is_worth_nothing_again(port: Port) -> None:
    said: list[bytes] = []

    class Recorded(Channel):
        async def send(self, frame: Frame, seconds: float) -> None:
            said.append(frame.model_dump_json().encode())
            await super().send(frame, seconds)

    first = Recorded(*await asyncio.open_connection(HOST, port.port))
    await handshake.authenticate(first, opening(), KEY, PATIENCE_S)
    assert len(said) == 2
    assert not any(KEY.hex().encode() in data or KEY in data for data in said)

    reader, writer = await asyncio.open_connection(HOST, port.port)
    replayed = Channel(reader, writer)
    for data in said:
        writer.write(struct.pack(">I", len(data)) + data)
    assert (await replayed.receive(PATIENCE_S)).type == "challenge"
    assert isinstance(await replayed.receive(PATIENCE_S), Denied)
    assert port.worker.asked == []
    writer.close()
    first.abort()


async def test_a_source_that_does_not_prove_the_key_gets_no_word_more() -> None:
    """A process at the source's address could otherwise feed any state to the target."""
    heard: list[Frame] = []

    async def impostor(reader: ByteReader, writer: ByteWriter) -> None:
        channel = Channel(reader, writer)
        with contextlib.suppress(TransferError):
            heard.append(await channel.receive(PATIENCE_S))
            await channel.send(Challenge(nonce=handshake.new_nonce()), PATIENCE_S)
            proof = await channel.receive(PATIENCE_S)
            heard.append(proof)
            # The target's own proof, sent back.
            await channel.send(proof, PATIENCE_S)
            heard.append(await channel.receive(PATIENCE_S))
        channel.abort()

    server, number = await listen(impostor, HOST, 0)
    links = Links(["gloo"], torch.device("cpu"), MODEL)
    target = Target(TARGET, links, 0.0)
    with pytest.raises(AuthenticationError, match="did not prove"):
        await target.fetch(SESSION, MIGRATION, KEY, [f"tcp://{HOST}:{number}"], Room(SIZE), PATIENCE_S)
    assert [frame.type for frame in heard] == ["open", "proof"]
    links.close()
    server.close()


@pytest.mark.parametrize("attack", ["changed", "repeated", "left out", "sent back", "without a mac"])
async def test_a_frame_that_is_not_the_peers_ends_the_connection(attack: str) -> None:
    """An attacker on the path can read and write everything, but has no key."""
    ends: asyncio.Queue[Channel] = asyncio.Queue()
    server, number = await listen(_keep(ends), HOST, 0)
    reader, writer = await asyncio.open_connection(HOST, number)
    sender, receiver = Channel(reader, writer), await ends.get()
    keys = handshake.derive(KEY, opening(), Challenge(nonce=handshake.new_nonce()))
    receiver.protect(sends=keys.source_frames, receives=keys.target_frames)

    written: list[bytes] = []
    recorder = Channel(reader, cast(asyncio.StreamWriter, _Recorder(written)))
    recorder.protect(sends=keys.target_frames, receives=keys.source_frames)
    for digest in ("a", "b"):
        await recorder.send(Verified(digest=digest), PATIENCE_S)
    first, second = written
    writer.write(first)
    assert await receiver.receive(PATIENCE_S) == Verified(digest="a")
    if attack == "sent back":
        echoed: list[bytes] = []
        mirror = Channel(reader, cast(asyncio.StreamWriter, _Recorder(echoed)))
        mirror.protect(sends=keys.source_frames, receives=keys.target_frames)
        for _ in range(2):
            await mirror.send(Wait(), PATIENCE_S)
        writer.write(echoed[1])
    elif attack == "without a mac":
        await sender.send(Verified(digest="b"), PATIENCE_S)
        writer.write_eof()
    else:
        forged = {"changed": second.replace(b'"b"', b'"c"'), "repeated": first, "left out": b""}[attack]
        third: list[bytes] = []
        if attack == "left out":
            recorder._writer = cast(asyncio.StreamWriter, _Recorder(third))
            await recorder.send(Verified(digest="c"), PATIENCE_S)
        writer.write(forged + b"".join(third))
    with pytest.raises((AuthenticationError, PeerLostError)) as caught:
        await receiver.receive(PATIENCE_S)
    assert caught.type is (PeerLostError if attack == "without a mac" else AuthenticationError)
    for channel in (sender, receiver):
        channel.abort()
    server.close()


class _Recorder:
    """A writer that keeps what is written."""

    def __init__(self, written: list[bytes]) -> None:
        self._written = written

    def write(self, data: bytes) -> None:
        self._written.append(data)

    async def drain(self) -> None:
        return


def _keep(ends: asyncio.Queue[Channel]) -> Callable[..., Awaitable[None]]:
    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.put_nowait(Channel(reader, writer))

    return keep


def framed(content: Any) -> bytes:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack(">I", len(data)) + data


OPEN = {
    "type": "open",
    "version": 2,
    "session": SESSION,
    "migration": MIGRATION,
    "worker": TARGET,
    "nonce": "0" * 64,
}


@pytest.mark.parametrize(
    "said",
    [
        framed(b"no json"),
        framed(b"\xff" * 100),
        framed({"type": "seal", "header": {}, "pages": [], "digest": ""}),
        framed({"type": "hello", "model": MODEL, "backends": ["gloo"]}),
        framed({**OPEN, "session": "a.b"}),
        framed({**OPEN, "version": 99}),
        framed({**OPEN, "migration": -1}),
        framed({**OPEN, "migration": 2**70}),
        framed({**OPEN, "nonce": "0"}),
        framed({**OPEN, "padding": "x" * handshake.OPEN_LIMIT}),
        struct.pack(">I", FRAME_LIMIT),
        struct.pack(">I", 0xFFFFFFFF),
        framed(OPEN) + framed({"type": "proof", "mac": "0" * 64}),
        framed(OPEN) + framed({"type": "proof", "mac": "zz"}),
        framed(OPEN) + framed({"type": "hello", "model": MODEL, "backends": ["gloo"]}),
    ],
)
async def test_what_is_no_handshake_gets_no_explanation(port: Port, said: bytes) -> None:
    reader, writer = await asyncio.open_connection(HOST, port.port)
    writer.write(said)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    assert b"refuse" not in answer
    assert port.worker.asked == []
    await eventually(lambda: len(port.source._half_open) == 0)
    writer.close()


async def test_a_silent_peer_is_hung_up_on(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turboserve.worker.transfer.source.ADMIT_S", 0.3)
    silent, writer = await asyncio.open_connection(HOST, port.port)
    slow, slow_writer = await asyncio.open_connection(HOST, port.port)
    slow_writer.write(framed(OPEN)[:20])
    async with asyncio.timeout(PATIENCE_S):
        assert await silent.read() == b""
        assert await slow.read() == b""
    for one in (writer, slow_writer):
        one.close()


async def test_a_flood_neither_keeps_the_target_out_nor_costs_descriptors(
    port: Port, fetch: Callable[[], Awaitable[bool]]
) -> None:
    """Incident: 64 connections that sent nothing for 5 s each kept every target out."""
    me = psutil.Process()
    before = me.num_fds()
    strangers: list[asyncio.StreamWriter] = []
    served = 0

    async def flood() -> None:
        nonlocal served
        while True:
            _, writer = await asyncio.open_connection(HOST, port.port)
            served += 1
            strangers.append(writer)
            if len(strangers) > 300:
                strangers.pop(0).close()

    floods = [asyncio.create_task(flood()) for _ in range(4)]
    await eventually(lambda: served > 2 * half_open_connections.ADDRESS_LIMIT)
    fetched: list[int] = []
    for _ in range(3):
        fetched.append(served)
        assert await fetch()
        assert len(port.source._half_open) <= half_open_connections.ADDRESS_LIMIT
        await eventually(lambda: served > fetched[-1])
    # Both ends of each are in this process; the worker's share is still bounded.
    assert me.num_fds() < before + 300 + half_open_connections.ADDRESS_LIMIT + 200
    for task in floods:
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    for writer in strangers:
        writer.close()
    await eventually(lambda: len(port.source._half_open) == 0)
    assert await fetch()


async def test_one_address_makes_room_by_its_own_connections() -> None:
    """Connections of any other address are kept."""
    gate = half_open_connections.HalfOpenConnections(total=4, per_address=3)
    dropped: list[str] = []
    with contextlib.ExitStack() as stack:
        for number, address in enumerate(["a", "b", "b", "b", "b", "c"]):
            name = f"{address}{number}"
            stack.enter_context(gate.held(address, partial(dropped.append, name)))
        # The fourth `b` removes the first, and `c` one of the address with most connections.
        assert dropped == ["b1", "b2"]
        assert len(gate) == 4
    assert len(gate) == 0


async def test_an_authenticated_target_still_hears_why_it_is_refused(port: Port) -> None:
    channel = await port.connect()
    await handshake.authenticate(channel, opening(), KEY, PATIENCE_S)
    await channel.send(Hello(model="other", backends=("gloo",)), PATIENCE_S)
    answer = await channel.receive(PATIENCE_S)
    assert isinstance(answer, Refuse)
    assert answer.code == "wrong_layout"
    channel.abort()


def test_proofs_depend_on_everything_that_names_the_connection() -> None:
    """No key of one connection equals that of another, nor are the two keys of one connection equal."""
    one = opening()
    challenge = Challenge(nonce=handshake.new_nonce())
    others = [
        handshake.derive(KEY, one, challenge),
        handshake.derive(OTHER_KEY, one, challenge),
        handshake.derive(KEY, one.model_copy(update={"session": "ses_2"}), challenge),
        handshake.derive(KEY, one.model_copy(update={"migration": MIGRATION + 1}), challenge),
        handshake.derive(KEY, one.model_copy(update={"worker": "wrk_2"}), challenge),
        handshake.derive(KEY, one.model_copy(update={"nonce": handshake.new_nonce()}), challenge),
        handshake.derive(KEY, one, Challenge(nonce=handshake.new_nonce())),
    ]
    found = [key for keys in others for key in vars(keys).values()]
    assert len(set(found)) == len(found) == 5 * len(others)
    assert handshake.derive(KEY, one, challenge) == others[0]
    assert Proof(mac=others[0].target_proof.hex()).mac not in repr(challenge)
