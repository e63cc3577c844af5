"""Acknowledgments and announcements of WebRTC viewers wait, and checks for consent are answered as bytes."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from aioice import stun
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCSessionDescription
from aiortc.rtcsctptransport import DataChunk, parse_packet
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.conftest import StartSession
from tests.helpers.chunk_headers import chunk_header
from tests.helpers.waiting import eventually
from tests.helpers.whep_client import PATIENCE_S, WhepViewer, offer_of
from turboserve.clock import SystemClock
from turboserve.contracts.chunks import ChunkHeader
from turboserve.gateway.whep import consent
from turboserve.gateway.whep.announcements import TOGETHER_S, Announcements
from turboserve.gateway.whep.connection import ViewerConnection
from turboserve.gateway.whep.frame_sender import FrameSender
from turboserve.gateway.whep.frame_times import FrameTimes
from turboserve.gateway.whep.offer import check_offer
from turboserve.gateway.whep.pacing import Pacer
from turboserve.gateway.whep.second_socket import ACKNOWLEDGMENT_BYTES, second_socket

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux sorts datagrams of one address")
REPORT = bytes([0x81, 201, 0, 7])
"""Head of a report of reception with one block: 32 bytes, of which encryption adds up to 20."""


@ON_LINUX
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_only_acknowledgments_and_reports_of_reception_can_wait(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.socket(family, socket.SOCK_DGRAM) as first,
        socket.socket(family, socket.SOCK_DGRAM) as sender,
    ):
        try:
            first.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        second = second_socket(first)
        assert second is not None
        first.setblocking(False)
        with second:

            def waits(datagram: bytes) -> bool:
                sender.sendto(datagram, first.getsockname())
                select.select((first, second), (), (), PATIENCE_S)
                got = []
                for number, one in enumerate((first, second)):
                    try:
                        got.append((number, one.recv(2_000)))
                    except BlockingIOError:
                        continue
                [(number, data)] = got
                assert data == datagram
                return bool(number)

            # Encrypted SCTP: an acknowledgment, one that names a gap, and the shortest request.
            assert waits(bytes([23]) + bytes(64))
            assert not waits(bytes([23]) + bytes(68))
            assert not waits(bytes([23]) + bytes(72))
            # The end of a handshake of SCTP.
            assert not waits(bytes([23]) + bytes(52))
            assert waits(bytes([23]) + bytes(53))
            # A handshake, and a goodbye.
            assert not waits(bytes([22]) + bytes(60))
            assert not waits(bytes([21]) + bytes(38))
            # A report of reception with either encryption, and one with lost packets after it.
            assert waits(REPORT + bytes(28 + 20))
            assert waits(REPORT + bytes(28 + 14))
            assert not waits(REPORT + bytes(28 + 14 + 16))
            assert not waits(REPORT + bytes(28 + 20 + 16))
            assert not waits(bytes([0x81, 205, 0, 3]) + bytes(12 + 20))
            # A check for consent, and what is malformed.
            assert not waits(bytes([0, 1]) + bytes(40))
            assert not waits(b"\x81")


@asynccontextmanager
async def connected_viewer() -> AsyncIterator[tuple[ViewerConnection, RTCDataChannel, list[str]]]:
    """Connect a viewer to the gateway's side. Yields that, the viewer's end, and what it got."""
    clock, times = SystemClock(), FrameTimes()
    side = ViewerConnection(FrameSender(Pacer(0.05), clock, times, lambda _: None), (), clock, times)
    viewer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    got: list[str] = []
    try:
        viewer.addTransceiver("video", direction="recvonly")
        channel = viewer.createDataChannel("messages")
        channel.on("message", got.append)
        answer = await side.answer(check_offer(await offer_of(viewer), candidates=False), ["127.0.0.1"])
        await viewer.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        async with asyncio.timeout(PATIENCE_S):
            await side.opened.wait()
        yield side, channel, got
    finally:
        await side.close()
        await viewer.close()


@ON_LINUX
async def test_an_acknowledgment_does_not_wake_the_gateway_up_and_a_request_does() -> None:
    async with connected_viewer() as (side, channel, got):
        transport = side._incoming._transport
        assert transport is not None
        [protocol] = transport.transport._connection._protocols
        sctp = side._pc.sctp
        assert sctp is not None
        await eventually(lambda: not sctp._sent_queue)
        received, at_once = protocol.datagram_received, []

        def noted(data: bytes | str, address: tuple[str, int]) -> None:
            at_once.append(len(data))
            received(data, address)

        protocol.datagram_received = noted  # type: ignore[method-assign, assignment]
        for number in range(3):
            side.send(f"{number}")
            await eventually(lambda: not sctp._sent_queue)
        assert got == ["0", "1", "2"]
        assert not any(size <= ACKNOWLEDGMENT_BYTES for size in at_once)
        await eventually(lambda: channel.readyState == "open")
        channel.send('{"type":"ping"}')
        async with asyncio.timeout(PATIENCE_S):
            assert await side.messages.get() == '{"type":"ping"}'
        assert at_once


@ON_LINUX
async def test_a_report_of_another_address_does_not_take_the_place_of_the_viewers() -> None:
    async with connected_viewer() as (side, _, _):
        incoming = side._incoming
        assert incoming._second is not None
        await eventually(lambda: not incoming._reads_soon)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(REPORT + bytes(28 + 14), incoming._second.getsockname())
            stranger = other.getsockname()
            incoming._read()
        waiting = incoming._report_of_reception
        assert waiting is None or waiting[1][:2] != stranger


async def test_many_messages_do_not_wait_for_acknowledgments_that_wait() -> None:
    texts = [f"{number:03}" + "x" * 900 for number in range(100)]
    async with connected_viewer() as (side, _, got):
        sctp, incoming = side._pc.sctp, side._incoming
        assert sctp is not None
        side.send(*texts)
        assert sctp._outbound_queue
        assert incoming._hurries == (incoming._second is not None)
        await eventually(lambda: len(got) == len(texts) and not sctp._sent_queue)
        assert got == texts
        assert not incoming._hurries


async def test_messages_of_one_moment_come_in_one_datagram() -> None:
    async with connected_viewer() as (side, _, got):
        sctp = side._pc.sctp
        assert sctp is not None
        send, packets = sctp.transport._send_data, []

        async def noted(data: bytes) -> None:
            packets.append(sum(isinstance(one, DataChunk) for one in parse_packet(data)[3]))
            await send(data)

        sctp.transport._send_data = noted  # type: ignore[method-assign]
        side.send("a" * 400, "b" * 400, "c" * 400)
        await eventually(lambda: len(got) == 3)
        assert got == ["a" * 400, "b" * 400, "c" * 400]
        assert packets[:2] == [2, 1]
        # A message that the viewer does not take ends its connection alone.
        side.send("x" * (sctp._remote_max_message_size + 1))
        assert side.gone.is_set()


def header(index: int, control_seq: int = 0, epoch: int = 1) -> ChunkHeader:
    return chunk_header("ses_1", index, epoch, "wk_1", control_seq=control_seq)


def test_a_chunk_that_says_something_new_is_announced_at_once_with_those_that_wait() -> None:
    waiting = Announcements()
    assert waiting.add("0", header(0), 0.0, 10.0)
    assert waiting.take() == ["0"]
    assert not waiting.add("1", header(1), 0.75, 10.75)
    assert not waiting.are_due(11.9)
    assert not waiting.add("2", header(2), 1.5, 11.5)
    assert waiting.are_due(12.0)
    assert waiting.take() == ["1", "2"]
    assert not waiting.are_due(14.0)
    assert not waiting.add("3", header(3), 2.25, 12.25)
    assert not waiting.add("4", header(4), 3.0, 13.0)
    # Another prompt, another owner, and a chunk that is late or was skipped to.
    assert waiting.add("5", header(5, control_seq=1), 3.75, 13.1)
    assert waiting.take() == ["3", "4", "5"]
    assert waiting.add("6", header(6, control_seq=1, epoch=2), 4.5, 14.5)
    waiting.take()
    assert waiting.add("7", header(7, control_seq=1, epoch=2), 6.0, 16.0)
    assert waiting.take() == ["7"]
    assert waiting.take() == []


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.3, 2.0]), st.booleans()), max_size=30))
def test_no_announcement_waits_for_longer_than_allowed(chunks: list[tuple[float, bool]]) -> None:
    waiting, since, taken, control = Announcements(), {}, [], 0
    begins = [
        (0.75 * (number + 1) + sum(late for late, _ in chunks[: number + 1])) for number in range(len(chunks))
    ]
    times = sorted([*((at, 0) for at in begins), *((float(second), 1) for second in range(200))])
    index = 0
    for now, is_check in times:
        if is_check:
            due = waiting.take() if waiting.are_due(now) else []
        else:
            control += chunks[index][1]
            since[str(index)] = now
            due = waiting.take() if waiting.add(str(index), header(index, control), now, now) else []
            index += 1
        assert all(now - since[one] <= TOGETHER_S for one in due)
        taken += due
    assert taken == list(since)


@given(
    username=st.text("abcXYZ09:", min_size=1, max_size=40),
    password=st.text("abcXYZ09", min_size=1, max_size=70),
    port=st.integers(1, 65_535),
)
def test_a_check_for_consent_is_answered_as_aioice_does(username: str, password: str, port: int) -> None:
    request = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
    request.attributes["USERNAME"] = username
    request.attributes["PRIORITY"] = port
    request.attributes["ICE-CONTROLLING"] = 77
    request.add_message_integrity(password.encode())
    address = "192.0.2.7", port
    expected = stun.Message(stun.Method.BINDING, stun.Class.RESPONSE, request.transaction_id)
    expected.attributes["XOR-MAPPED-ADDRESS"] = address
    expected.add_message_integrity(password.encode())
    data = bytes(request)
    assert consent.answer(data, address, password.encode()) == bytes(expected)
    # Whoever does not know the password gets no answer, nor does anything else.
    assert consent.answer(data, address, b"another") is None
    assert consent.answer(bytes(expected), address, password.encode()) is None
    assert consent.answer(data, ("2001:db8::7", port), password.encode()) is None
    for place in (9, len(data) // 2, len(data) - 20, len(data) - 1):
        changed = bytes([*data[:place], data[place] ^ 1, *data[place + 1 :]])
        assert consent.answer(changed, address, password.encode()) is None
    for size in (0, 19, 40, len(data) - 4):
        assert consent.answer(data[:size], address, password.encode()) is None


async def test_chunks_that_say_nothing_new_are_announced_together(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start("a red circle")
    viewer = WhepViewer(api, session["id"])
    messages = viewer.connection.sctp
    assert messages is not None
    handle, together = messages._handle_data, 0

    async def count(data: bytes) -> None:
        nonlocal together
        parts = [one.user_data for one in parse_packet(data)[3] if isinstance(one, DataChunk)]
        found = [json.loads(part)["type"] for part in parts if part.startswith(b"{") and part.endswith(b"}")]
        together += found.count("chunk") >= 2
        await handle(data)

    messages._handle_data = count  # type: ignore[method-assign]
    async with viewer:
        await eventually(lambda: together >= 2)
        indexes = [message["index"] for message in viewer.messages if message["type"] == "chunk"]
        assert indexes == list(range(len(indexes)))
