"""A gateway that does not hear its broker sends its viewers on, and a process that was stopped does not."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.helpers.waiting import eventually
from turboserve.bus.round_trip import RoundTrip
from turboserve.contracts.errors import UnavailableError
from turboserve.gateway import broker_silence, other_gateways
from turboserve.gateway.broker_silence import (
    CONFIRMATIONS,
    CUT_OFF_S,
    LOOK_S,
    BrokerSilence,
    ask_others,
    watch_silence,
)
from turboserve.gateway.context import Streams
from turboserve.gateway.other_gateways import MAX_ANSWER_BYTES, OtherGateways, delivers
from turboserve.health import HealthServer
from turboserve.tasks import stop

DELIVERS = b'{"checks": {"delivery": true}, "warnings": {}}'


@asynccontextmanager
async def another_gateway(warnings: dict[str, str]) -> AsyncIterator[str]:
    """Serve /readyz over HTTP, with `warnings` as they are when it is asked. Yields the address."""
    server = HealthServer("127.0.0.1", 0, lambda: {"delivery": True}, warnings=lambda: dict(warnings))
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


@asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    """Serve `answer` to each connection; None: no answer. Yields the address."""
    writers = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        if answer is not None:
            writer.write(answer)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()


def http(status: str, body: bytes, header: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{header}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_two_seconds_without_an_answer_cut_a_gateway_off_until_the_next_answer() -> None:
    silence = BrokerSilence(0.0)
    looks = [(n * LOOK_S, silence.look(max(0.0, n * LOOK_S - 1.0), n * LOOK_S)) for n in range(1, 20)]
    assert {cut for at, cut in looks if at < 1.0 + CUT_OFF_S} == {False}
    assert {cut for at, cut in looks if at >= 1.0 + CUT_OFF_S} == {True}
    text = "no answer of the broker for 3.8 s"
    assert silence.warning() == f"{text}: viewers wait, as no other gateway answers that it can deliver"
    for _ in range(CONFIRMATIONS):
        assert not silence.confirmed
        silence.answered(True)
    assert silence.warning() == f"{text}: viewers go to another gateway"
    silence.answered(False)
    assert not silence.confirmed
    assert not silence.look(0.0, 5.0)
    assert silence.warning() is None


def test_a_gateway_that_was_stopped_itself_is_not_cut_off() -> None:
    silence = BrokerSilence(0.0)
    assert not silence.look(0.0, 1.0)
    # Stopped for 20 s: the answer is in its socket, but not read yet.
    assert not silence.look(19.0, 21.0)
    assert not silence.look(19.25, 21.25)
    assert not silence.look(0.0, 21.5)


def test_no_stream_begins_while_viewers_are_sent_on() -> None:
    streams = Streams(4)
    with streams.place("t"):
        streams.send_on()
        assert streams.leaving.is_set()
        assert streams.count == 1
        with pytest.raises(UnavailableError, match="use another one") as refused, streams.place("t"):
            pass
        # Without a time, a client's request is not repeated, at no gateway.
        assert refused.value.retry_after_s is not None
    streams.admit_again()
    with streams.place("t"):
        assert not streams.leaving.is_set()


async def test_a_viewer_that_has_not_left_yet_stays_if_the_broker_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.uniform", lambda *_: 0.05)
    streams, others = Streams(4), Streams(4)
    viewer = asyncio.create_task(streams.until_sent_on())
    streams.send_on()
    await asyncio.sleep(0)  # It waits for its moment.
    streams.admit_again()
    others.send_on()
    await others.until_sent_on()  # Its moment is the later one.
    assert not viewer.done()
    await streams.close()
    await viewer


async def test_a_gateway_that_stops_admits_no_stream_again() -> None:
    streams = Streams(4)
    await streams.close()
    streams.admit_again()
    with pytest.raises(UnavailableError), streams.place("t"):
        pass


def test_a_gateway_says_early_that_its_broker_is_silent_and_a_new_silence_is_confirmed_anew() -> None:
    silence = BrokerSilence(0.0)
    for n in range(1, 4):
        silence.look(n * LOOK_S, n * LOOK_S)
    assert silence.warning() == "no answer of the broker for 0.8 s"
    for n in range(4, 12):
        silence.look(n * LOOK_S, n * LOOK_S)
        silence.answered(True)
    assert silence.confirmed
    silence.look(0.0, 12 * LOOK_S)
    assert not silence.confirmed


async def test_viewers_wait_while_no_gateway_hears_the_broker_and_go_when_another_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All gateways closed their streams when the broker was away, and no client had a place to go to."""
    monkeypatch.setattr(broker_silence, "LOOK_S", 0.05)
    monkeypatch.setattr(broker_silence, "ASK_S", 0.01)
    warnings = {"delivery": "no answer of the broker for 1.0 s"}
    trip, streams, silence = RoundTrip(), Streams(4), BrokerSilence(0.0)
    seconds = (n * 0.1 for n in itertools.count(1))
    asked = 0

    class CountedQuestions(OtherGateways):
        async def can_deliver(self) -> bool:
            nonlocal asked
            asked += 1
            return await super().can_deliver()

    async with another_gateway(warnings) as url:
        trip.asked(0.0)
        work = [
            asyncio.create_task(watch_silence(silence, trip, streams, lambda: next(seconds))),
            asyncio.create_task(ask_others(silence, CountedQuestions([url]))),
        ]
        try:
            await eventually(lambda: silence.silent_s >= CUT_OFF_S)
            before = asked
            await eventually(lambda: asked > before + CONFIRMATIONS)
            assert not streams.leaving.is_set()
            viewer = asyncio.create_task(streams.until_sent_on())
            warnings.clear()
            await eventually(streams.leaving.is_set)
            await viewer
            trip.answered(next(seconds))
            await eventually(lambda: not streams.leaving.is_set())
            before = asked
            await eventually(lambda: silence.silent_s == 0 and not silence.confirmed)
            assert asked == before
        finally:
            await stop(*work)


async def test_only_a_gateway_that_answers_briefly_that_it_hears_its_broker_can_deliver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The test serves the answers itself, also on a busy machine.
    monkeypatch.setattr(other_gateways, "ASK_TIMEOUT_S", 60.0)
    async with another_gateway({}) as good:
        assert await asyncio.to_thread(delivers, good)
        answers = (
            http("302 Found", b"", f"Location: {good}/readyz\r\n"),
            http("503 Service Unavailable", DELIVERS),
            http("200 OK", DELIVERS + b" " * MAX_ANSWER_BYTES),
            http("200 OK", b"[]"),
            http("200 OK", b"ready"),
            http("200 OK", json.dumps({"checks": {"delivery": False}, "warnings": {}}).encode()),
            http("200 OK", json.dumps({"checks": {}, "warnings": {}}).encode()),
            b"none\r\n\r\n",
        )
        for answer in answers:
            async with answering(answer) as url:
                assert not await asyncio.to_thread(delivers, url), answer
        async with answering(http("200 OK", DELIVERS)) as url:
            assert await asyncio.to_thread(delivers, url)
        # One that is not there, and one that is silent, do not hide the one that answers.
        async with answering(None) as silent:
            monkeypatch.setattr(other_gateways, "ASK_TIMEOUT_S", 0.5)
            assert not await asyncio.to_thread(delivers, silent)
            assert not await OtherGateways([silent]).can_deliver()
            others = OtherGateways([silent, "http://127.0.0.1:1", good])
            await eventually(others.can_deliver)
