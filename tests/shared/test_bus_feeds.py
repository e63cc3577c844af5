"""Many followers of one subject in one process: one subscription, and each gets every message once."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.broker_scene import Scene
from turboserve.bus import Entry, follow
from turboserve.bus.feeds import BACKLOG
from turboserve.bus.follower import Cursor
from turboserve.subjects import CHUNK, CHUNKS


class Log:
    """A stream, and what a follower has received of it live."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.live: deque[Entry] = deque()
        self.sequence = 0
        self._owner = self._last = 0

    def publish(self, moves: bool, arrives: bool) -> None:
        """`moves`: the message is the first of another owner, on a subject of its own."""
        self.sequence += 1
        if moves:
            self._owner, self._last = self._owner + 1, 0
        headers = {"Nats-Last-Sequence": str(self._last)}
        entry = Entry(f"chunk.a.w{self._owner}", self.sequence, b"", headers)
        self._last = self.sequence
        self.entries.append(entry)
        if arrives and len(self.live) < BACKLOG:
            self.live.append(entry)

    def after(self, position: int) -> Entry | None:
        return next((entry for entry in self.entries if entry.sequence > position), None)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.booleans(), st.booleans()),
        st.tuples(st.just("other"), st.none(), st.none()),
        st.tuples(st.just("follow"), st.none(), st.none()),
        st.tuples(st.just("silence"), st.none(), st.none()),
    ),
    max_size=80,
)


@given(steps, st.integers(0, 20))
def test_log_and_live_messages_join_without_gap_or_repetition(
    steps: list[tuple[str, bool, bool]], joined: int
) -> None:
    """For any order of messages, losses, silence and turns of the follower, from any place in the log on."""
    log, cursor, got = Log(), Cursor("chunk.a.*"), []
    position = joined

    def follow() -> None:
        nonlocal position
        if cursor.caught_up:
            entry = log.live.popleft() if log.live else None
            if entry is None or not cursor.takes(entry, position):
                return
        else:
            entry = log.after(position)
            cursor.read(entry)
        if entry is not None:
            position = entry.sequence
            got.append(entry.sequence)

    for step, moves, arrives in steps:
        if step == "publish":
            log.publish(moves, arrives)
        elif step == "other":
            log.sequence += 1
        elif step == "silence":
            cursor.caught_up = cursor.caught_up and bool(log.live)
        else:
            follow()
    wanted = [entry.sequence for entry in log.entries if entry.sequence > joined]
    assert got == wanted[: len(got)]
    for _ in range(3 * len(log.entries) + BACKLOG + 2):
        if not log.live:
            cursor.caught_up = False
        follow()
    assert got == wanted


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    scene.connect("state-store")
    scene.connect("gateway")
    scene.make_stream()
    yield scene
    scene.close()


class Follower:
    """A task that follows the session `a`, and takes `pause_s` for each message."""

    def __init__(self, scene: Scene, pause_s: float = 0.0, after: int = 0) -> None:
        self.got: list[int] = []
        self.times: list[float] = []
        self._scene, self._pause_s, self._after = scene, pause_s, after
        self.task = scene.spawn("gateway", self._run())

    async def _run(self) -> None:
        bus = self._scene.buses["gateway"]
        entries = follow(bus, CHUNKS, CHUNK.of("a"), CHUNK.live("a"), after_sequence=self._after)
        async for entry in entries:
            self.got.append(int(entry.data))
            self.times.append(self._scene.loop.time())
            await asyncio.sleep(self._pause_s)


def subscriptions(scene: Scene) -> int:
    """Return how often the gateway's client subscribes to the session's live chunks."""
    subs = scene.buses["gateway"].client._subs  # type: ignore[attr-defined]
    return sum(sub.subject == CHUNK.live("a") for sub in subs.values())


def publish(scene: Scene, numbers: range, every_s: float = 0.5) -> None:
    async def send() -> None:
        for number in numbers:
            await scene.buses["state-store"].client.publish(CHUNK.by("a", "w1"), b"%d" % number)
            await asyncio.sleep(every_s)

    scene.run("state-store", send())


def test_however_many_follow_there_is_one_subscription(scene: Scene) -> None:
    followers = [Follower(scene) for _ in range(50)]
    publish(scene, range(10))
    followers += [Follower(scene), Follower(scene, after=5)]
    publish(scene, range(10, 20))
    scene.loop.advance(1.0)
    assert subscriptions(scene) == 1
    for follower in followers[:51]:
        assert follower.got == list(range(20))
    assert followers[51].got == list(range(5, 20))
    for follower in followers[1:]:
        follower.task.cancel()
    publish(scene, range(20, 23))
    assert (followers[0].got, subscriptions(scene)) == (list(range(23)), 1)
    followers[0].task.cancel()
    scene.loop.advance(1.0)
    assert subscriptions(scene) == 0
    late = Follower(scene)
    publish(scene, range(23, 25))
    scene.loop.advance(1.0)
    assert (late.got, subscriptions(scene)) == (list(range(25)), 1)


def test_a_slow_follower_delays_no_other_and_loses_nothing(scene: Scene) -> None:
    slow, fast = Follower(scene, pause_s=3.0), Follower(scene)
    publish(scene, range(40), every_s=0.25)
    scene.loop.advance(0.1)
    assert fast.got == list(range(40))
    assert max(later - sooner for sooner, later in zip(fast.times, fast.times[1:], strict=False)) < 0.3
    assert len(slow.got) < 8
    scene.loop.advance(130.0)
    assert slow.got == list(range(40))


def test_followers_of_a_quiet_subject_share_their_questions(scene: Scene) -> None:
    asked = 0
    request = scene.broker.jetstream.request

    def counted(message: object) -> bool:
        nonlocal asked
        asked += ".DIRECT.GET." in message.subject  # type: ignore[attr-defined]
        return request(message)  # type: ignore[arg-type]

    followers = [Follower(scene) for _ in range(50)]
    publish(scene, range(1))
    scene.loop.advance(1.0)
    scene.broker.jetstream.request = counted  # type: ignore[method-assign]
    scene.loop.advance(60.0)
    assert 5 <= asked <= 40
    assert all(follower.got == [0] for follower in followers)


@pytest.mark.parametrize("seed", range(4))
def test_followers_that_come_and_go_miss_nothing(scene: Scene, seed: int) -> None:
    draw = random.Random(seed)
    followers: list[tuple[Follower, int]] = []
    made = 0
    for _ in range(60):
        match draw.randrange(4):
            case 0:
                after = draw.randrange(made + 1)
                followers.append((Follower(scene, draw.choice((0.0, 0.0, 2.0)), after), after))
            case 1 if followers:
                follower, after = followers.pop(draw.randrange(len(followers)))
                follower.task.cancel()
                assert follower.got == list(range(after, after + len(follower.got)))
            case _:
                count = draw.randrange(1, 8)
                publish(scene, range(made, made + count), every_s=draw.choice((0.01, 0.5)))
                made += count
    scene.loop.advance(700.0)
    for follower, after in followers:
        assert follower.got == list(range(after, made))
    assert subscriptions(scene) == bool(followers)
