"""A follower without messages polls less and less often, and still finds a lost message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.helpers.broker_scene import Scene
from turboserve.bus import follow
from turboserve.bus.follower import QUIET_LIMIT_S
from turboserve.simulation.runtime.broker import Message
from turboserve.subjects import CHUNK, CHUNKS


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    scene.connect("state-store")
    scene.connect("gateway")
    scene.make_stream()
    yield scene
    scene.close()


def following(scene: Scene) -> tuple[list[tuple[float, bytes]], list[float]]:
    """Return the gateway's follower's messages, and the times at which it polls the log."""
    got: list[tuple[float, bytes]] = []
    asked: list[float] = []
    request = scene.broker.jetstream.request

    def counted(message: Message) -> bool:
        if ".DIRECT.GET." in message.subject:
            asked.append(scene.loop.time())
        return request(message)

    scene.broker.jetstream.request = counted  # type: ignore[method-assign]

    async def read() -> None:
        async for entry in follow(scene.buses["gateway"], CHUNKS, CHUNK.of("a"), CHUNK.live("a")):
            got.append((scene.loop.time(), entry.data))

    scene.spawn("gateway", read())
    return got, asked


def test_a_follower_of_a_quiet_subject_asks_seldom(scene: Scene) -> None:
    _, asked = following(scene)
    scene.loop.advance(60.0)
    assert 8 <= len(asked) <= 14
    assert max(after - before for before, after in pairwise(asked)) < QUIET_LIMIT_S + 1.0


def test_a_lost_message_is_found_after_long_silence(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live copy of a subject's newest message did not arrive, and no later message shows the gap."""
    got, _ = following(scene)
    scene.loop.advance(60.0)
    with monkeypatch.context() as patch:
        patch.setattr(scene.broker.jetstream, "_republish", lambda *_: None)
        scene.publish("state-store", CHUNK.by("a", "w1"), b"lost")
    sent_at = scene.loop.time()
    scene.loop.advance(2 * QUIET_LIMIT_S)
    [(at, data)] = got
    assert data == b"lost"
    assert at - sent_at < QUIET_LIMIT_S + 1.0


def test_messages_make_it_ask_soon_again(scene: Scene) -> None:
    got, asked = following(scene)
    scene.loop.advance(60.0)

    async def send() -> None:
        for number in range(40):
            await scene.buses["state-store"].client.publish(CHUNK.by("a", "w1"), b"%d" % number)
            await asyncio.sleep(0.75)

    del asked[:]
    scene.run("state-store", send())
    assert len(got) == 40
    # While messages come in time, there is no poll.
    assert len(asked) <= 1
    del asked[:]
    scene.loop.advance(2.0)
    assert len(asked) == 1
