"""The Python client leaves a gateway that is silent, breaks or does not listen, for another one."""

from __future__ import annotations

import httpx
import pytest

from tests.helpers.waiting import eventually
from tests.sdk.scripted_gateway import Connection, chunks, scripted
from turboserve.client import AsyncClient, GatewayUnreachableError, gateways
from turboserve.client.gateways import Gateways, SilenceWatch
from turboserve.free_ports import any_free

SILENT_S = 60.0
"""A real silence of a busy machine is shorter."""


class Moment:
    """The time by which gateways are silent. It does not pass by itself."""

    now = 0.0


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Moment:
    moment = Moment()
    asked, silent = SilenceWatch.asked, SilenceWatch.silent
    monkeypatch.setattr(SilenceWatch, "asked", lambda watch, _: asked(watch, moment.now))
    monkeypatch.setattr(SilenceWatch, "silent", lambda watch, _: silent(watch, moment.now))
    for limit in ("SILENT_S", "LONGEST_SILENT_S"):
        monkeypatch.setattr(gateways, limit, SILENT_S)
    return moment


async def goes_on(connection: Connection) -> None:
    after = int(connection.query.get("after", -1))
    await connection.begin(range(after + 1, 4), start=after + 1)
    await connection.end(3)


async def test_a_stream_leaves_a_silent_gateway_and_repeats_nothing(moment: Moment) -> None:
    got: list[int] = []

    async def freezes(connection: Connection) -> None:
        """Send two chunks and answer no ping: the process is stopped and its connections stay."""
        await connection.begin(range(2))
        await eventually(lambda: got == [0, 1] and not stream._silence.wants_ping)
        moment.now += SILENT_S
        await connection.socket.wait_closed()

    async with scripted(freezes) as silent, scripted(goes_on) as other:
        client = AsyncClient([silent.url, other.url])
        stream = client.session("ses_1").watch()
        async with stream:
            async for chunk in stream:
                got.append(chunk.index)
        assert got == [0, 1, 2, 3]
        assert client.base_url == other.url
    [first], [second] = silent.connections, other.connections
    assert any(message["type"] == "ping" for message in first.messages)
    assert second.query["after"] == "1"


@pytest.mark.usefixtures("moment")
async def test_a_gateway_that_sends_its_viewers_on_is_left_at_once() -> None:
    """Each first attempt at another gateway waited for as long as the gateway before had asked for."""

    async def sends_on(connection: Connection) -> None:
        await connection.begin(range(2))
        await connection.socket.close(1012)

    async def is_full(connection: Connection) -> None:
        await connection.refuse(1013, status=503, code="unavailable", retry_after_s=3_600.0)

    async with scripted(sends_on) as first, scripted(is_full) as second, scripted(goes_on) as third:
        client = AsyncClient([first.url, second.url, third.url])
        assert await chunks(client.session("ses_1").watch()) == [0, 1, 2, 3]
        assert client.base_url == third.url
    assert [len(one.connections) for one in (first, second, third)] == [1, 1, 1]
    assert third.connections[0].query["after"] == "1"


@pytest.mark.usefixtures("moment")
async def test_the_greeting_names_the_other_gateways() -> None:
    async with scripted(goes_on) as other:

        async def greets(connection: Connection) -> None:
            await connection.hello(gateways=[other.url, "ftp://never", "https://another.scheme"])
            await connection.init()
            await connection.chunk(0)
            await connection.vanish()

        async with scripted(greets) as first:
            assert await chunks(AsyncClient(first.url).session("ses_1").watch()) == [0, 1, 2, 3]
        assert len(first.connections) == len(other.connections) == 1


async def test_a_gateway_that_answers_pings_is_kept_however_long_it_sends_no_video(moment: Moment) -> None:
    async def waits(connection: Connection) -> None:
        await connection.begin([0])

        def asked() -> int:
            return sum(message["type"] == "ping" for message in connection.messages)

        for answered in range(5):
            await eventually(lambda: asked() > answered)  # noqa: B023
            moment.now += 0.8 * SILENT_S
            await connection.send(type="pong")
        await connection.end(0)

    async with scripted(waits) as first, scripted(goes_on) as other:
        assert await chunks(AsyncClient([first.url, other.url]).session("ses_1").watch()) == [0]
    assert len(first.connections) == 1
    assert not other.connections


async def test_a_request_goes_to_the_gateway_that_listens() -> None:
    async with scripted(goes_on) as other:
        nobody = f"http://127.0.0.1:{any_free()}"
        async with AsyncClient([nobody, other.url], attempts=2) as client:
            # The scripted gateway answers no plain request. What matters is whom the client asks.
            with pytest.raises(Exception, match="Upgrade") as answered:
                await client.models()
            assert not isinstance(answered.value, GatewayUnreachableError)
            assert client.base_url == other.url


async def test_a_request_that_a_gateway_cannot_pass_on_is_repeated_at_another_one() -> None:
    """Of a gateway that is cut off from its broker, only streams were moved."""
    asked = []

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "here":
            return httpx.Response(200, json={"models": [], "default": "m"})
        return httpx.Response(504 if request.url.host == "slow" else 503, json={"retry_after_s": 0.01})

    urls = ["http://slow", "http://away", "http://here"]
    async with AsyncClient(urls, transport=httpx.MockTransport(answers)) as client:
        await client.transport.request("GET", "/v1/models")
        assert client.base_url == "http://here"
    assert asked == ["slow", "away", "here"]


def test_addresses() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Gateways([])
    with pytest.raises(ValueError, match="must begin with http"):
        Gateways(["http://a", "b"])
    known = Gateways(["https://a/", "https://b"])
    known.learn(["http://c", "https://b/", "https://d"])
    known.leave("https://b")
    assert known.current == "https://a"
    visited = []
    for _ in range(3):
        visited.append(known.current)
        known.leave(known.current)
    assert visited == ["https://a", "https://b", "https://d"]
    assert known.current == "https://a"


def test_a_slow_network_gets_more_time_until_video_arrives() -> None:
    watch = SilenceWatch()
    limits = []
    for _ in range(5):
        watch.asked(10.0)
        assert not watch.silent(10.0 + watch.limit_s - 0.01)
        assert watch.silent(10.0 + watch.limit_s)
        limits.append(watch.limit_s)
        watch.left()
    assert limits == [2.0, 4.0, 8.0, 16.0, 16.0]
    watch.heard()
    assert watch.limit_s == 16.0
    assert watch.wants_ping
    assert not watch.silent(1e9)
    watch.heard(video=True)
    assert watch.limit_s == 2.0
