"""RTP packets as bytes: read by aiortc's parser, and repaired over a network that loses some."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from contextlib import suppress

import av
import httpx
import pytest
from aiortc.rtcrtpparameters import RTCRtpHeaderExtensionParameters, RTCRtpParameters
from aiortc.rtp import (
    HeaderExtensionsMap,
    RtcpPacket,
    RtcpSdesPacket,
    RtcpSrPacket,
    RtpPacket,
    is_rtcp,
    unwrap_rtx,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.conftest import StartSession
from tests.helpers.waiting import eventually
from tests.helpers.whep_client import WhepViewer, digest
from turboserve.clock import SystemClock
from turboserve.gateway.whep.access_units import AccessUnit
from turboserve.gateway.whep.frame_sender import FrameSender
from turboserve.gateway.whep.frame_times import FrameTimes
from turboserve.gateway.whep.pacing import PacedFrame, Pacer
from turboserve.gateway.whep.rtp_stream import HISTORY, REPORT_S, RtpFormat, RtpStream

MID = "urn:ietf:params:rtp-hdrext:sdes:mid"
SEND_TIME = "http://www.webrtc.org/experiments/rtp-hdrext/abs-send-time"
NOW = 1_700_000_000.25
FORMATS = st.builds(
    RtpFormat,
    ssrc=st.integers(1, 2**32 - 1),
    payload_type=st.integers(96, 127),
    cname=st.text("abc{}-", max_size=40),
    retransmission=st.none() | st.tuples(st.integers(1, 2**32 - 1), st.integers(96, 127)),
    mid=st.none() | st.tuples(st.just(1), st.text("ab0", min_size=1, max_size=16)),
    send_time=st.none() | st.just(3),
)
FRAMES = st.lists(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), min_size=1, max_size=8
)


def extensions() -> HeaderExtensionsMap:
    found = HeaderExtensionsMap()
    known = [RTCRtpHeaderExtensionParameters(1, MID), RTCRtpHeaderExtensionParameters(3, SEND_TIME)]
    found.configure(RTCRtpParameters(headerExtensions=known))
    return found


@given(form=FORMATS, frames=FRAMES, sequence=st.integers(0, 2**16 - 1), origin=st.integers(0, 2**32 - 1))
def test_a_parser_reads_what_was_sent(
    form: RtpFormat, frames: list[list[bytes]], sequence: int, origin: int
) -> None:
    stream = RtpStream(form, sequence, origin)
    number = sequence
    for turn, payloads in enumerate(frames):
        sent = stream.frames([(payloads, turn / 16)], NOW + turn)
        assert len(sent) == len(payloads)
        for place, (data, payload) in enumerate(zip(sent, payloads, strict=True)):
            assert not is_rtcp(data)
            packet = RtpPacket.parse(data, extensions())
            assert (packet.ssrc, packet.payload_type, packet.payload) == (
                form.ssrc,
                form.payload_type,
                payload,
            )
            assert packet.sequence_number == number % 2**16
            assert packet.timestamp == (origin + turn * 5625) % 2**32
            assert packet.marker == (place == len(payloads) - 1)
            assert packet.extensions.mid == (form.mid[1] if form.mid else None)
            time = int((NOW + turn) * 2**18) % 2**24 if form.send_time else None
            assert packet.extensions.abs_send_time == time
            [again] = stream.retransmissions([number % 2**16], NOW + number)
            if form.retransmission is None:
                assert again == data
            else:
                repeated = RtpPacket.parse(again, extensions())
                assert (repeated.ssrc, repeated.payload_type) == form.retransmission
                original = unwrap_rtx(repeated, form.payload_type, form.ssrc)
                assert original.serialize(extensions()) == packet.serialize(extensions())
            number += 1
    assert stream.retransmissions([(number + 5) % 2**16], NOW + number) == []


def test_only_the_newest_packets_are_kept() -> None:
    stream = RtpStream(RtpFormat(1, 96, "x"), 65_000, 0)
    for turn in range(HISTORY + 1):
        stream.frames([([b"a"], turn / 16)], NOW)
    assert stream.retransmissions([65_000], 0.0) == []
    assert len(stream.retransmissions([65_001], 0.0)) == 1


def test_a_report_of_many_losses_gets_a_bounded_answer() -> None:
    """One packet may name thousands, and a viewer may send many."""
    stream = RtpStream(RtpFormat(1, 96, "x"), 0, 0)
    for turn in range(HISTORY):
        stream.frames([([b"a"], turn / 16)], NOW)
    lost = [*range(HISTORY), *range(HISTORY)]
    assert len(stream.retransmissions(lost[:10] * 99, 5.0)) == 10
    assert len(stream.retransmissions(lost, 5.5)) == HISTORY - 10
    assert stream.retransmissions(lost, 5.9) == []
    assert len(stream.retransmissions(lost, 6.0)) == HISTORY


@given(form=FORMATS)
def test_reports_count_what_was_sent(form: RtpFormat) -> None:
    stream = RtpStream(form, 7, 1000)
    stream.frames([([b"abc", b"de"], 0.0)], NOW)
    data = stream.report(0.0, NOW)
    assert data is not None
    assert is_rtcp(data)
    report, description = RtcpPacket.parse(data)
    assert isinstance(report, RtcpSrPacket)
    assert isinstance(description, RtcpSdesPacket)
    info = report.sender_info
    assert (report.ssrc, info.packet_count, info.octet_count, info.rtp_timestamp) == (form.ssrc, 2, 5, 1000)
    assert info.ntp_timestamp / 2**32 == pytest.approx(NOW + 2_208_988_800)
    assert [(one.ssrc, one.items) for one in description.chunks] == [(form.ssrc, [(1, form.cname.encode())])]
    assert stream.report(0.5, NOW + REPORT_S / 2) is None
    assert stream.report(1.0, NOW + REPORT_S) is not None


STALL_S = 3.0
"""aiortc remembers the loss of the newest 128 packets: those of less than eight seconds."""


async def test_lost_packets_are_sent_again(start: StartSession, api: httpx.AsyncClient) -> None:
    for _ in range(3):
        seen, expected, stall_s = await with_losses(start, api)
        if stall_s < STALL_S or (len(seen) >= 60 and seen == expected[: len(seen)]):
            break
        # The viewer of a busy machine got no packet for so long that it could not ask again.
    assert len(seen) >= 60
    assert seen == expected[: len(seen)]


async def with_losses(start: StartSession, api: httpx.AsyncClient) -> tuple[list[str], list[str], float]:
    """Watch a session over a network that loses packets.

    Returns the frames that were decoded, those of the session, and the longest time without a packet.
    """
    session = await start("a red circle")
    arrivals = [time.monotonic()]
    async with WhepViewer(api, session["id"]) as viewer:
        [transport] = {one.receiver.transport for one in viewer.connection.getTransceivers()}
        deliver, numbers, lost = transport._handle_rtp_data, itertools.count(), []

        async def lossy(data: bytes, arrival_time_ms: int) -> None:
            arrivals.append(time.monotonic())
            if next(numbers) % 7 == 3:
                lost.append(data)
                return
            await deliver(data, arrival_time_ms=arrival_time_ms)

        transport._handle_rtp_data = lossy  # type: ignore[method-assign]
        with suppress(TimeoutError):
            await viewer.decoded(60)
            assert len(lost) >= 5
        arrivals.append(time.monotonic())
    await api.delete(f"/v1/sessions/{session['id']}")
    video = (await api.get(f"/v1/sessions/{session['id']}/stream.mp4", params={"after": -1})).content
    with av.open(io.BytesIO(video), "r") as container:
        expected = [digest(frame) for frame in container.decode(video=0)]
    stall_s = max(later - earlier for earlier, later in itertools.pairwise(arrivals))
    return [pixels for _, pixels in viewer.frames], expected, stall_s


async def test_frames_that_cannot_be_sent_do_not_hold_up_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error at the time of a frame, no further frame was sent to the viewer."""
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    failed: list[object] = []
    sent: list[bytes] = []

    def begins(frame: PacedFrame) -> None:
        if frame.chunk.index == 0:
            raise ValueError("a message that is too long")

    clock, pacer = SystemClock(), Pacer(0.05)
    sender = FrameSender(pacer, clock, FrameTimes(), begins)
    sender._stream = RtpStream(RtpFormat(7, 96, "c", None, None, None), 0, 0)
    monkeypatch.setattr(sender, "_transmit", lambda packets, report: sent.extend(packets))
    for index in range(2):
        pacer.add(index, [AccessUnit((b"x",), index / 16, 1 / 16)], clock.monotonic())
        sender.queued()
    await eventually(sender.dry.is_set)
    assert len(failed) == len(sent) == 1
