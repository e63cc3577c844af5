"""Which decode worker decodes a chunk: the one with the session's cache, and another one after it fails."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from turboserve.worker.remote_decoding.routing import (
    AFFINITY_S,
    FULL_S,
    LATE_RECONNECT_S,
    RECONNECT_S,
    SESSION_S,
    SETTLED_S,
    WORKERS_PER_CHUNK,
    AllotmentKnown,
    AskFailed,
    AskWorker,
    CacheMissed,
    ChunkAbandoned,
    ChunkDecoded,
    ChunkWaits,
    DecodeHere,
    DecoderConnected,
    DecoderDisconnected,
    DecodeRouter,
    RoomRefused,
    RoutingCommand,
    next_pause_s,
)


class Scene:
    """A router under a clock of its own. Jobs have numbers in their order."""

    def __init__(self, *workers: str) -> None:
        self.router, self.now, self.jobs = DecodeRouter(), 100.0, 0
        for worker in workers:
            self.tell(DecoderConnected(worker))

    def tell(self, event: Any) -> RoutingCommand | None:
        return self.router.handle(event, self.now)

    def waits(self, session: str) -> RoutingCommand | None:
        self.jobs += 1
        return self.tell(ChunkWaits(self.jobs, session))

    def decoded(self, session: str) -> str:
        """Have a chunk decoded at once. Returns the worker."""
        asked = self.waits(session)
        assert isinstance(asked, AskWorker)
        assert not asked.with_context
        self.tell(ChunkDecoded(self.jobs))
        return asked.worker


def test_without_decode_workers_a_chunk_is_decoded_here() -> None:
    scene = Scene()
    assert scene.waits("a") == DecodeHere(1)
    scene.tell(DecoderConnected("w"))
    assert scene.waits("a") == AskWorker(2, "w")


def test_a_session_stays_with_its_worker_and_a_new_one_goes_to_the_emptiest() -> None:
    scene = Scene("v", "w")
    first = scene.decoded("a")
    second = scene.decoded("b")
    assert {first, second} == {"v", "w"}
    for _ in range(3):
        assert [scene.decoded("a"), scene.decoded("b")] == [first, second]
    scene.decoded("c")
    assert scene.router.workers == 2


def test_unlike_decode_workers_get_sessions_as_they_have_time() -> None:
    scene = Scene("v", "w")
    scene.tell(AllotmentKnown("v", 1))
    scene.tell(AllotmentKnown("w", 3))
    placed = [scene.decoded(session) for session in "abcd"]
    assert sorted(placed) == ["v", "w", "w", "w"]


def test_a_decode_worker_that_comes_back_has_said_nothing_yet() -> None:
    scene = Scene("v", "w")
    scene.tell(AllotmentKnown("v", 1))
    scene.tell(AllotmentKnown("w", 3))
    assert scene.decoded("a") == "w"
    scene.tell(DecoderDisconnected("w"))
    scene.tell(AllotmentKnown("w", 3))
    scene.tell(DecoderConnected("w"))
    assert scene.decoded("b") == "v"


def test_a_worker_without_the_cache_is_asked_again_with_the_context_and_only_once() -> None:
    scene = Scene("w")
    assert scene.waits("a") == AskWorker(1, "w")
    assert scene.tell(CacheMissed(1)) == AskWorker(1, "w", with_context=True)
    assert scene.tell(CacheMissed(1)) == DecodeHere(1)


def test_a_failed_worker_is_followed_by_another_and_then_by_this_one() -> None:
    scene = Scene("u", "v", "w")
    first = scene.waits("a")
    assert isinstance(first, AskWorker)
    second = scene.tell(AskFailed(1))
    assert isinstance(second, AskWorker)
    assert second.worker != first.worker
    # Each has taken a whole deadline: the viewer waits for no third one.
    assert WORKERS_PER_CHUNK == 2
    assert scene.tell(AskFailed(1)) == DecodeHere(1)


def test_a_worker_that_left_is_not_asked_and_one_that_comes_back_is() -> None:
    scene = Scene("v", "w")
    before = scene.decoded("a")
    [other] = {"v", "w"} - {before}
    scene.tell(DecoderDisconnected(before))
    assert scene.decoded("a") == other
    scene.tell(DecoderDisconnected(other))
    assert isinstance(scene.waits("a"), DecodeHere)
    scene.tell(DecoderConnected(before))
    assert scene.decoded("a") == before


def test_a_full_worker_gets_no_new_session_for_a_while_and_keeps_those_it_has() -> None:
    scene = Scene("w")
    scene.decoded("a")
    scene.waits("b")
    assert scene.tell(RoomRefused(2)) == DecodeHere(2)
    assert isinstance(scene.waits("c"), DecodeHere)
    assert scene.decoded("a") == "w"
    scene.now += FULL_S
    assert scene.decoded("c") == "w"


def test_a_session_that_ended_counts_no_more_and_a_paused_one_returns() -> None:
    scene = Scene("v", "w")
    # The sessions on `v` end, and one on `w` plays on.
    placed = {name: scene.decoded(name) for name in "abcd"}
    assert sorted(placed.values()) == ["v", "v", "w", "w"]
    scene.now += SESSION_S + 1
    lasting = next(name for name, worker in placed.items() if worker == "w")
    scene.decoded(lasting)
    assert [scene.decoded(name) for name in ("e", "f", "g")] == ["v", "v", "w"]
    paused = next(name for name, worker in placed.items() if worker == "v")
    assert scene.decoded(paused) == "v"
    scene.now += AFFINITY_S + 1
    scene.decoded("h")
    assert scene.router.sessions == 1


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "wait", "miss", "full", "fail", "done", "abandon", "later"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(STEPS)
def test_every_chunk_has_one_route_at_a_time_and_an_end(steps: list[Step]) -> None:
    scene, connected = Scene(), set[str]()
    asked: dict[int, AskWorker] = {}
    tried: dict[int, set[str]] = {}

    def follow(job: int, command: RoutingCommand | None) -> None:
        if isinstance(command, AskWorker):
            assert command.job == job
            assert command.worker in connected or command.with_context
            if not command.with_context:
                assert command.worker not in tried[job]
                tried[job].add(command.worker)
                assert len(tried[job]) <= WORKERS_PER_CHUNK
            else:
                assert command.worker == asked[job].worker
                assert not asked[job].with_context
            asked[job] = command
        else:
            assert command == DecodeHere(job)
            asked.pop(job, None)

    for kind, number in steps:
        worker = f"w{number % 3}"
        jobs = sorted(asked)
        job = jobs[number % len(jobs)] if jobs else None
        if kind == "join":
            connected.add(worker)
            scene.tell(DecoderConnected(worker))
        elif kind == "leave":
            connected.discard(worker)
            scene.tell(DecoderDisconnected(worker))
        elif kind == "later":
            scene.now += 7.0 * number
        elif kind == "wait":
            command = scene.waits(f"s{number}")
            tried[scene.jobs] = set()
            follow(scene.jobs, command)
        elif job is not None and kind == "abandon":
            assert scene.tell(ChunkAbandoned(job)) is None
            del asked[job]
        elif job is not None and kind == "done":
            assert scene.tell(ChunkDecoded(job)) is None
            del asked[job]
        elif job is not None:
            events: dict[str, Any] = {"miss": CacheMissed, "full": RoomRefused, "fail": AskFailed}
            follow(job, scene.tell(events[kind](job)))
    # Whatever happens from here on, every chunk comes to an end.
    for job in list(asked):
        for _ in range(WORKERS_PER_CHUNK):
            if job in asked:
                follow(job, scene.tell(AskFailed(job)))
    assert not asked
    assert scene.router.jobs == 0


def test_a_chunk_that_is_no_longer_waited_for_leaves_nothing() -> None:
    scene = Scene("w")
    scene.waits("a")
    assert scene.router.jobs == 1
    for _ in range(2):
        assert scene.tell(ChunkAbandoned(1)) is None
        assert scene.router.jobs == 0


def test_a_worker_that_is_late_again_and_again_is_asked_more_and_more_rarely() -> None:
    pauses, pause_s = [], RECONNECT_S
    for _ in range(8):
        pause_s = next_pause_s(pause_s, 1.0, late=True)
        pauses.append(pause_s)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (2 * RECONNECT_S, LATE_RECONNECT_S)
    # One that is lost costs nothing until it is back, and one late chunk in a long time is forgotten.
    assert next_pause_s(pause_s, 1.0, late=False) == RECONNECT_S
    assert next_pause_s(pause_s, SETTLED_S, late=True) == RECONNECT_S


def test_the_first_sessions_of_several_workers_do_not_meet_on_one_decode_worker() -> None:
    workers = ("v", "w", "x")
    chosen: Counter[str] = Counter()
    for home in range(60):
        router = DecodeRouter()
        for name in workers:
            router.handle(DecoderConnected(name), 0.0)
            router.handle(AllotmentKnown(name, 1, 20, 0), 0.0)
        command = router.handle(ChunkWaits(0, f"ses_{home}"), 0.0)
        assert isinstance(command, AskWorker)
        chosen[command.worker] += 1
    assert min(chosen[name] for name in workers) >= 10


def test_sessions_of_other_workers_take_room() -> None:
    router = DecodeRouter()
    for name in ("v", "w"):
        router.handle(DecoderConnected(name), 0.0)
    # Allotted is the same. Five of eight are taken at `v`, and none of four at `w`.
    router.handle(AllotmentKnown("v", 3, 8, 5), 0.0)
    router.handle(AllotmentKnown("w", 3, 4, 0), 0.0)
    asked = [router.handle(ChunkWaits(number, f"s{number}"), 0.0) for number in range(2)]
    assert asked[0] == AskWorker(0, "w")
    # Its own sessions do not count twice: with the one that it has now, `w` has room for three, as `v` has.
    for number in range(2):
        router.handle(ChunkDecoded(number), 0.0)
    taken = sum(command == AskWorker(number, "w") for number, command in enumerate(asked))
    router.handle(AllotmentKnown("w", 3, 4, taken), 1.0)
    assert router.handle(ChunkWaits(9, "s9"), 1.0) == AskWorker(9, "w" if taken == 1 else "v")
