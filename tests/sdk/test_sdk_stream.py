"""The client's stream against a gateway that breaks, refuses and repeats."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from tests.sdk.scripted_gateway import Connection, chunks, plays, scripted, watch
from turboserve.client import (
    AsyncClient,
    ChunkGoneError,
    GatewayUnreachableError,
    NoCapacityError,
    NotFoundError,
    ProblemError,
    ProtocolError,
)
from turboserve.client.models import Event


async def test_a_stream_gives_the_chunks_and_ends_with_the_session() -> None:
    async with scripted(plays(range(3), init=b"the init segment")) as gateway:
        stream = watch(gateway, after=-1)
        async with stream:
            found = [chunk async for chunk in stream]
    assert [chunk.index for chunk in found] == [0, 1, 2]
    assert found[1].mp4 == b"the init segmentfragment 1"
    assert found[1].end_s == 2.0
    assert stream.end is not None
    assert stream.end.reason == "ended by its user"
    [connection] = gateway.connections
    assert connection.query == {"after": "-1"}
    assert connection.socket.request is not None
    assert connection.socket.request.headers["Authorization"] == "Bearer secret"


async def test_a_broken_connection_loses_and_repeats_nothing() -> None:
    async def breaks(connection: Connection) -> None:
        await connection.begin()
        await connection.event(4)
        await connection.chunk(0)
        await connection.chunk(1)
        # The client may still read what was sent before the connection vanished, or lose the end of it.
        await connection.vanish()

    async def goes_on(connection: Connection) -> None:
        after = int(connection.query.get("after", -1))
        await connection.begin(range(after + 1, 5), start=after + 1)
        await connection.end(4)

    async with scripted(breaks, goes_on) as gateway:
        stream = watch(gateway)
        assert await chunks(stream) == [0, 1, 2, 3, 4]
    assert stream.connections == 2
    assert gateway.connections[1].query.get("events_after") in ("0", "4")


async def test_lost_chunks_raise_an_error_that_says_where_the_video_continues() -> None:
    async def gone(connection: Connection) -> None:
        await connection.refuse(4410, status=410, code="chunk_gone", detail="chunk 3 is gone", limit=40)

    async with scripted(gone) as gateway:
        with pytest.raises(ChunkGoneError, match="chunk 3 is gone") as refused:
            await chunks(watch(gateway, after=2))
        assert refused.value.continues_at == 40
    async with scripted(gone, plays([40], start=40)) as gateway:
        assert await chunks(watch(gateway, after=2, skip_lost=True)) == [40]
    assert gateway.connections[1].query["after"] == "39"


async def test_a_session_that_does_not_exist_is_not_tried_again() -> None:
    async def unknown(connection: Connection) -> None:
        await connection.refuse(4404, status=404, code="session_not_found", detail="no session ses_1")

    async with scripted(unknown) as gateway:
        with pytest.raises(NotFoundError, match="no session ses_1"):
            await chunks(watch(gateway))
    assert len(gateway.connections) == 1


async def test_a_full_gateway_is_tried_until_the_time_is_up() -> None:
    async def full(connection: Connection) -> None:
        await connection.refuse(1013, status=429, code="too_many_streams", detail="full", retry_after_s=0.05)

    async with scripted(full) as gateway:
        with pytest.raises(NoCapacityError, match="full"):
            await chunks(watch(gateway, reconnect_within_s=0.5))
    assert len(gateway.connections) > 1


async def test_a_gateway_that_is_away_is_an_error_after_the_given_time() -> None:
    async with scripted() as gateway:
        pass
    with pytest.raises(GatewayUnreachableError, match=gateway.url.removeprefix("http")):
        await chunks(watch(gateway, reconnect_within_s=0.3))


async def test_another_protocol_version_is_refused() -> None:
    async def newer(connection: Connection) -> None:
        await connection.hello(protocol_version=2)
        await connection.socket.wait_closed()

    async with scripted(newer) as gateway:
        with pytest.raises(ProtocolError, match="version 2"):
            await chunks(watch(gateway))


async def test_the_playhead_follows_the_chunks_that_the_caller_takes() -> None:
    async with scripted(plays(range(3), ends=False)) as gateway:
        stream = watch(gateway)
        async with stream:
            taken = aiter(stream)
            for index in range(3):
                assert (await anext(taken)).index == index
                [connection] = gateway.connections
                # While the caller has a chunk, the playhead is at its start.
                await eventually(
                    lambda: connection.messages[-1:] and connection.messages[-1]["playhead_s"] == index  # noqa: B023
                )
            stream.playhead_s = 1.5
            await eventually(lambda: connection.messages[-1]["playhead_s"] == 1.5)
            assert connection.messages[-1]["buffered_s"] == 1.5


async def test_messages_of_a_newer_gateway_are_skipped() -> None:
    async def newer(connection: Connection) -> None:
        await connection.hello(from_the_future=1)
        await connection.send(type="weather", is_="fine")
        await connection.init()
        await connection.chunk(0)
        await connection.end(0)

    async with scripted(newer) as gateway:
        assert await chunks(watch(gateway)) == [0]


async def test_events_and_chunks_come_in_their_order() -> None:
    async def play(connection: Connection) -> None:
        await connection.begin()
        await connection.event(1)
        await connection.chunk(0)
        await connection.event(2, "session.suspended")
        await connection.end(0)

    async with scripted(play) as gateway, watch(gateway) as stream:
        found = [item async for item in stream.items()]
    assert [item.type if isinstance(item, Event) else item.index for item in found] == [
        "session.placed",
        0,
        "session.suspended",
    ]


async def test_a_stream_that_was_left_does_not_connect_again() -> None:
    async with scripted(plays([0], ends=False)) as gateway:
        stream = watch(gateway)
        async with stream:
            taken = aiter(stream)
            await anext(taken)
            waiting = asyncio.ensure_future(anext(taken, None))
            await asyncio.sleep(0)
        assert await asyncio.wait_for(waiting, 30) is None
        with pytest.raises(RuntimeError, match="async with"):
            await anext(aiter(watch(gateway)))
    assert len(gateway.connections) == 1


async def test_a_gateway_that_asks_for_a_long_wait_is_not_waited_for() -> None:
    async def full(connection: Connection) -> None:
        await connection.refuse(
            1013, status=429, code="too_many_wrong_keys", detail="wait", retry_after_s=3600
        )

    async with scripted(full) as gateway:
        with pytest.raises(ProblemError, match="wait"):
            await chunks(watch(gateway, reconnect_within_s=0.5))


async def test_a_refused_recording_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    async def unknown(connection: Connection) -> None:
        await connection.refuse(4404, status=404, code="session_not_found", detail="no session ses_1")

    async def late(connection: Connection) -> None:
        await connection.refuse(4410, status=410, code="chunk_gone", detail="gone", limit=40)

    file = tmp_path / "old.mp4"
    file.write_bytes(b"earlier")
    async with scripted(unknown) as gateway:
        with pytest.raises(NotFoundError):
            await AsyncClient(gateway.url).session("ses_1").record(file)
    assert file.read_bytes() == b"earlier"
    # The log keeps a part of a long session: the recording begins with what is kept.
    async with scripted(late, plays([40], start=40)) as gateway:
        assert (await AsyncClient(gateway.url).session("ses_1").record(file)).chunks == 1
    assert file.read_bytes() == b"initfragment 40"


async def test_phases_of_a_newer_gateway_are_texts() -> None:
    """Incident: `phase: hibernating` ended the stream with pydantic's ValidationError."""

    async def newer(connection: Connection) -> None:
        await connection.hello(phase="hibernating", activity="dreaming")
        await connection.init()
        await connection.event(1, "session.hibernated", phase="hibernating", activity="dreaming")
        await connection.chunk(0)
        await connection.send(type="end", phase="archived", reason=None, last=0)
        await connection.socket.close(1000)

    async with scripted(newer) as gateway:
        stream = watch(gateway)
        async with stream:
            assert stream.hello is not None
            assert (stream.hello.phase, stream.hello.activity) == ("hibernating", "dreaming")
            event, _ = [item async for item in stream.items()]
    assert isinstance(event, Event)
    assert event.phase == "hibernating"
    assert stream.end is not None
    assert stream.end.phase == "archived"


async def test_a_refused_handshake_that_names_a_wait_is_tried_again() -> None:
    refused = 0

    def full(connection: Any, _: Any) -> Any:
        nonlocal refused
        if refused == 2:
            return None
        refused += 1
        response = connection.respond(429 if refused == 1 else 503, "full")
        response.headers["Retry-After"] = "0"
        return response

    async with scripted(plays([0]), process_request=full) as gateway:
        assert await chunks(watch(gateway)) == [0]
    assert refused == 2
