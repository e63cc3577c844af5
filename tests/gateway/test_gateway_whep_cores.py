"""What WebRTC needs besides the network: access units, the time of each frame, checked offers, TURN names."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import itertools
from functools import partial
from types import SimpleNamespace

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.helpers.waiting import eventually
from tests.helpers.whep_client import an_offer, digest
from turboserve.gateway.ice_servers import ice_servers, own_addresses
from turboserve.gateway.settings import Settings
from turboserve.gateway.timeline.timeline import Timeline
from turboserve.gateway.whep.access_units import AccessUnit, ChunkFormatError, access_units
from turboserve.gateway.whep.frame_times import FrameTimes
from turboserve.gateway.whep.offer import check_offer
from turboserve.gateway.whep.pacing import PacedFrame, Pacer
from turboserve.gateway.whep.peer import Peer
from turboserve.worker.media import EncodedChunk, FragmentEncoder

FPS = 16
START = b"\0\0\0\1"
RNG = np.random.default_rng(7)
FRAMES = RNG.integers(0, 256, (12, 64, 96, 3), np.uint8)


def chunk(count: int = 12, first_frame: int = 9) -> EncodedChunk:
    return FragmentEncoder().encode(FRAMES[:count], index=1, first_frame=first_frame, fps=FPS)


CHUNK = chunk()


@pytest.mark.parametrize("count", [1, 2, 12])
def test_access_units_decode_to_the_pixels_of_the_file(count: int) -> None:
    made = chunk(count)
    with av.open(io.BytesIO(made.init + made.fragment), "r") as container:
        expected = [digest(frame) for frame in container.decode(video=0)]
    decoder = av.CodecContext.create("h264", "r")
    units = access_units(made.init, made.fragment)
    seen = [
        digest(frame)
        for unit in units
        for frame in decoder.decode(av.Packet(START + START.join(unit.nal_units)))
    ]
    seen += [digest(frame) for frame in decoder.decode(None)]
    assert seen == expected
    assert len(units) == count
    for number, unit in enumerate(units):
        assert unit.start_s == pytest.approx((9 + number) / FPS)
        assert unit.duration_s == pytest.approx(1 / FPS)


def test_a_key_frame_has_its_parameter_sets_and_no_note_of_the_encoder() -> None:
    first, *others = access_units(CHUNK.init, CHUNK.fragment)
    kinds = [[part[0] & 0x1F for part in unit.nal_units] for unit in (first, *others)]
    assert kinds == [[7, 8, 5], *([1] for _ in others)]


@given(st.data())
def test_broken_chunks_are_refused(data: st.DataObject) -> None:
    init, fragment = bytearray(CHUNK.init), bytearray(CHUNK.fragment)
    part = data.draw(st.sampled_from((init, fragment)))
    if data.draw(st.booleans()):
        del part[data.draw(st.integers(0, len(part) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            part[data.draw(st.integers(0, min(len(part), 800) - 1))] = data.draw(st.integers(0, 255))
    try:
        units = access_units(bytes(init), bytes(fragment))
    except ChunkFormatError:
        return
    assert sum(len(part) for unit in units for part in unit.nal_units) < 2 * len(CHUNK.fragment) + 12 * len(
        CHUNK.init
    )


def units(start_s: float, count: int = 12) -> list[AccessUnit]:
    return [AccessUnit((b"x",), start_s + number / FPS, 1 / FPS) for number in range(count)]


def play(pacer: Pacer, now: float, until: float) -> list[tuple[float, PacedFrame]]:
    """Take every frame at its time. Returns when each was sent."""
    sent = []
    while (at_s := pacer.send_at_s) is not None and max(now, at_s) <= until:
        now = max(now, at_s)
        sent += [(now, frame) for frame in pacer.take(now)]
    return sent


def test_frames_are_sent_at_the_rate_of_the_video_whenever_chunks_come() -> None:
    pacer = Pacer(0.05)
    assert pacer.send_at_s is None
    assert pacer.take(10.0) == []
    pacer.add(3, units(2.0), 10.0)
    pacer.add(4, units(2.75), 10.1)
    assert pacer.queued_s == pytest.approx(1.5)
    sent = play(pacer, 10.1, 99)
    assert sent[0][0] == pytest.approx(10.1)  # It was due at 10.0625, and is taken late.
    assert [at for at, _ in sent[1:]] == pytest.approx([10.0625 + number / FPS for number in range(1, 24)])
    assert [frame.presentation_s for _, frame in sent] == pytest.approx([n / FPS for n in range(24)])
    assert [frame.chunk.index for _, frame in sent if frame.first] == [3, 4]
    assert pacer.playhead_s(10.0625 + 0.5) == pytest.approx(2.5)
    assert pacer.playhead_s(99) == pytest.approx(3.5)


def test_after_a_late_chunk_presentation_time_has_gone_on() -> None:
    pacer = Pacer(0.05)
    pacer.add(0, units(0.0), 0.0)
    play(pacer, 0.0, 99)
    pacer.add(1, units(0.75), 2.0)
    [(at, frame), *_] = play(pacer, 2.0, 99)
    assert (at, frame.presentation_s) == pytest.approx((2.0625, 2.0))
    # A chunk in time keeps the rhythm, however much later.
    pacer.add(2, units(1.5), 2.0625 + 0.75)
    assert pacer.send_at_s == pytest.approx(2.8125)


def test_all_viewers_are_sent_frames_at_the_same_times() -> None:
    times = set()
    for number in range(20):
        now = 50.0 + number * 0.0173
        pacer = Pacer(0.05)
        pacer.add(0, units(number * 0.75), now)
        sent = play(pacer, now, now + 0.5)
        pacer.add(1, units(number * 0.75 + 3), now + 0.5, skip=True)
        first, *others = play(pacer, now + 0.5, 99)
        # The first frame after a skip does not wait for the grid.
        assert first[0] == now + 0.5
        assert 0.5 / FPS <= others[0][0] - first[0] <= 1.5 / FPS
        # The frame before the skip may have been sent just now.
        shown_s = others[0][1].presentation_s - first[1].presentation_s
        assert shown_s == pytest.approx(others[0][0] - first[0], abs=0.25 / FPS)
        times |= {round(at * FPS, 6) for at, _ in (*sent, *others)}
        assert abs(sent[0][0] - now - 0.05) <= 0.5 / FPS
    assert all(at == int(at) for at in times)


async def test_one_timer_wakes_all_that_wait_for_one_time() -> None:
    times, loop = FrameTimes(), asyncio.get_running_loop()
    calls: list[int | str] = []
    at_s = loop.time() + 0.05
    for number in range(8):
        times.call_at(at_s, partial(calls.append, number))
    times.call_at(at_s + 0.02, partial(calls.append, "later"))
    timers = [timer for timer in loop._scheduled if timer.when() in (at_s, at_s + 0.02)]  # type: ignore[attr-defined]
    assert len(timers) == 2
    await asyncio.sleep(0.06)
    assert calls[:8] == list(range(8))
    # Who is called may wait for another time, or for the same again.
    times.call_at(at_s, partial(calls.append, "again"))
    await eventually(lambda: len(calls) == 10)
    assert calls[8:] in (["later", "again"], ["again", "later"])


async def test_a_call_that_fails_keeps_no_other_viewer_waiting() -> None:
    times, loop = FrameTimes(), asyncio.get_running_loop()
    failed, called = asyncio.Event(), asyncio.Event()
    loop.set_exception_handler(lambda *_: failed.set())
    at_s = loop.time()

    def fails() -> None:
        raise ValueError

    times.call_at(at_s, fails)
    times.call_at(at_s, called.set)
    async with asyncio.timeout(60.0):
        await called.wait()
        await failed.wait()


WINDOW_S = 0.25


def test_the_frames_of_a_window_are_sent_together_at_its_beginning() -> None:
    for number in range(20):
        now = 50.0 + number * 0.0173
        together, alone = Pacer(0.05, WINDOW_S), Pacer(0.05)
        for pacer in (together, alone):
            pacer.add(0, units(0.0), now)
            pacer.add(1, units(0.75), now + 0.1)
        sent, one_by_one = play(together, now, 99), play(alone, now, 99)
        # What the viewer's player shows is the same, at the same times.
        assert [frame.presentation_s for _, frame in sent] == [
            frame.presentation_s for _, frame in one_by_one
        ]
        assert [frame.due_s for _, frame in sent] == [frame.due_s for _, frame in one_by_one]
        times = sorted({at for at, _ in sent})
        assert now <= times[0] <= now + 0.05 + 0.5 / FPS
        assert all(at % WINDOW_S == 0.0 for at in times[1:])
        assert len(times) <= 1 + 1.5 / WINDOW_S
        assert all(0.0 <= frame.due_s - at < WINDOW_S + 0.05 + 0.5 / FPS for at, frame in sent)


def test_a_skip_does_not_wait_for_a_window() -> None:
    pacer = Pacer(0.05, WINDOW_S)
    pacer.add(0, units(0.0), 10.0)
    before = play(pacer, 10.0, 10.3)
    pacer.add(1, units(3.0), 10.3, skip=True)
    after = play(pacer, 10.3, 99)
    # With the frames that are due in the rest of its window.
    assert [at for at, _ in after[:3]] == [10.3] * 3
    assert {at for at, _ in after[3:]} == {10.5, 10.75, 11.0}
    times = [frame.presentation_s for _, frame in (*before, *after)]
    assert times == sorted(set(times))
    # Frames that were sent before stay on the screen until the last of them: less than a window.
    assert after[0][1].presentation_s - (10.3 - before[0][1].due_s) < WINDOW_S


def test_a_skip_shows_its_chunk_at_once_and_presentation_time_increases() -> None:
    pacer = Pacer(0.05)
    for index in range(4):
        pacer.add(index, units(index * 0.75), 0.0)
    before = play(pacer, 0.0, 0.4)
    pacer.add(4, units(3.0), 0.4, skip=True)
    after = play(pacer, 0.4, 99)
    assert after[0][0] == 0.4
    assert [frame.chunk.index for _, frame in after] == [4] * 12
    times = [frame.presentation_s for _, frame in (*before, *after)]
    assert times == sorted(set(times))
    assert pacer.playhead_s(0.4) == pytest.approx(3.0, abs=0.5 / FPS)


@pytest.mark.parametrize(
    ("environment", "first_s", "further_s"),
    [({}, 0.25, 0.5), ({"WINDOW": "0"}, 0.0, 0.5), ({"WINDOW": "0.4", "SHARED_WINDOW": "0.1"}, 0.4, 0.4)],
)
def test_a_viewer_that_came_after_another_one_has_longer_windows(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], first_s: float, further_s: float
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"TURBOSERVE_WHEP_{name}_S", value)
    timeline = Timeline(1.0, 5.0)
    gateway = SimpleNamespace(settings=Settings(), timeline=timeline)

    def joins(viewer: str) -> Peer:
        timeline.joined("ses", viewer, 0.0, 10.0)
        peer = Peer.__new__(Peer)
        vars(peer).update(
            session="ses", _gateway=gateway, _watch=SimpleNamespace(viewer=viewer), _pacer=Pacer(0.05)
        )
        peer._choose_window()
        return peer

    first, further = joins("one"), joins("two")
    assert (first._pacer.window_s, further._pacer.window_s) == (first_s, further_s)
    timeline.left("ses", "one", 11.0)
    further._choose_window()
    assert further._pacer.window_s == first_s


@given(
    st.lists(
        st.tuples(st.floats(0.02, 3), st.booleans(), st.sampled_from([0.0, WINDOW_S, 2 * WINDOW_S])),
        min_size=1,
        max_size=30,
    ),
)
def test_presentation_times_only_increase_and_no_frame_is_early(
    arrivals: list[tuple[float, bool, float]],
) -> None:
    pacer, now, sent = Pacer(0.05), 0.0, []
    longest_s = max(window_s for _, _, window_s in arrivals)
    for index, (pause_s, skip, window_s) in enumerate(arrivals):
        sent += play(pacer, now, now + pause_s)
        pacer.window_s = window_s
        now += pause_s
        pacer.add(index, units(index * 0.75), now, skip=skip and index > 0)
    sent += play(pacer, now, now + 999)
    times = [frame.presentation_s for _, frame in sent]
    assert all(before < after for before, after in itertools.pairwise(times))
    for at, frame in sent:
        assert at - sent[0][1].due_s >= frame.presentation_s - 0.02 - longest_s
        assert at >= frame.due_s - 0.02 - max(longest_s, 0.05 + 0.5 / FPS)


def test_candidates_are_kept_only_if_they_are_addresses() -> None:
    text = an_offer()
    name = "a=candidate:1 1 udp 1 0a.local 9 typ host\r\na=candidate:2 1 udp 1 host.example 9 typ host\r\n"
    literal = "a=candidate:3 1 udp 1 192.0.2.9 9 typ host\r\n"
    text += name + literal
    assert "a=candidate" in text
    assert "a=candidate" not in check_offer(text, candidates=False).sdp
    kept = check_offer(text, candidates=True)
    assert literal in kept.sdp
    assert ".local" not in kept.sdp
    assert "host.example" not in kept.sdp
    assert kept.messages


def test_each_viewer_gets_a_password_that_the_turn_server_can_check() -> None:
    [stun, turn] = ice_servers(("stun:a", "turn:b"), "secret", "peer_1", 1000.0)
    assert (stun.username, stun.credential) == (None, None)
    assert turn.username == "87400:peer_1"
    expected = hmac.new(b"secret", b"87400:peer_1", hashlib.sha1).digest()
    assert turn.credential == base64.b64encode(expected).decode()


def test_settings_name_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(servers: str) -> Settings:
        monkeypatch.setenv("TURBOSERVE_ICE_SERVERS", servers)
        return Settings()

    with pytest.raises(ValidationError, match="needs TURBOSERVE_TURN_SECRET"):
        settings("turn:a")
    monkeypatch.setenv("TURBOSERVE_TURN_SECRET", "x")
    found = settings("stun:a.example, turns:[::1]:443?transport=tcp")
    assert found.ice_servers == ("stun:a.example", "turns:[::1]:443?transport=tcp")
    for wrong in ("http://a", "stun:a?transport=udp", "turn:a b", "turn:"):
        with pytest.raises(ValidationError, match="is no server such as"):
            settings(wrong)


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", ("127.0.0.1",)),
        ("localhost", ("127.0.0.1",)),
        ("[::1]", ("::1",)),
        ("192.0.2.7", ("192.0.2.7",)),
        ("0.0.0.0", None),
        ("::", None),
        ("video.example", None),
    ],
)
def test_media_comes_from_where_the_api_listens(host: str, addresses: tuple[str, ...] | None) -> None:
    assert own_addresses(host) == addresses
