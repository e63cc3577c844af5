"""Many followers of one subject in one process: one subscription, and each gets every message once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.broker_scene import Scene
from turboserve.bus import Entry, follow
from turboserve.bus.feeds import BACKLOG, Backlog
from turboserve.bus.follower import Cursor
from turboserve.subjects import CHUNK, CHUNKS


class Reader:
    """A stream, and a follower of `chunk.a.*` that has joined at `position`. Each turn is one step of it."""

    def __init__(self, position: int = 0) -> None:
        self.entries: list[Entry] = []
        self.sequence, self.position = 0, position
        self.got: list[int] = []
        self._joined = position
        self._backlog, self._cursor = Backlog[Entry](), Cursor("chunk.a.*")

    def publish(self, owner: int, arrives: bool = True) -> None:
        """Store a message of this owner. It names the one before it on its own subject only."""
        self.sequence += 1
        subject = f"chunk.a.w{owner}"
        last = max((entry.sequence for entry in self.entries if entry.subject == subject), default=0)
        entry = Entry(subject, self.sequence, b"", {"Nats-Last-Sequence": str(last)})
        self.entries.append(entry)
        if arrives:
            self._backlog.put(entry)

    def silence(self) -> None:
        """The follower has waited for a live message in vain, if none waits for it."""
        if not self._backlog:
            self._cursor.caught_up = False

    def turn(self) -> None:
        if self._cursor.asks(self._backlog, self.position):
            entry = next((entry for entry in self.entries if entry.sequence > self.position), None)
            self._cursor.read(entry)
        elif (entry := self._backlog.first) is not None:
            self._backlog.drop_first()
            if not self._cursor.takes(entry, self.position):
                return
        if entry is not None:
            self.position = entry.sequence
            self.got.append(entry.sequence)

    def check(self) -> None:
        """It has everything so far, in order and once, and gets the rest."""
        wanted = [entry.sequence for entry in self.entries if entry.sequence > self._joined]
        assert self.got == wanted[: len(self.got)]
        for _ in range(3 * len(self.entries) + BACKLOG + 2):
            self.silence()
            self.turn()
        assert self.got == wanted


steps = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2), st.booleans()),
        st.sampled_from(["elsewhere", "turn", "silence"]),
    ),
    max_size=80,
)


@given(steps, st.integers(0, 20))
def test_log_and_live_messages_join_without_gap_or_repetition(
    steps: list[tuple[int, bool] | str], joined: int
) -> None:
    """For any order of messages, losses, silence and turns of the follower, from any place in the log on.

    A pair is a message of that owner, and whether it arrives live. Owners may return.
    """

    async def check() -> None:
        reader = Reader(joined)
        for step in steps:
            match step:
                case "elsewhere":
                    reader.sequence += 1
                case "silence":
                    reader.silence()
                case "turn":
                    reader.turn()
                case (int(owner), bool(arrives)):
                    reader.publish(owner, arrives)
        reader.check()

    asyncio.run(check())


@given(st.lists(st.one_of(st.integers(0, 1), st.sampled_from(["turn", "silence"])), max_size=60))
def test_a_busy_follower_joins_live_messages_where_an_owner_returns(steps: list[int | str]) -> None:
    """A number is a message of that owner. All arrive live, as far as the backlog has room."""

    async def check() -> None:
        reader = Reader()
        for step in steps:
            if isinstance(step, int):
                reader.publish(step)
            elif step == "silence":
                reader.silence()
            else:
                reader.turn()
        reader.check()

    asyncio.run(check())


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
