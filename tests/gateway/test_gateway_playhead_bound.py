"""No client makes a worker generate faster than in real time, whatever playhead it reports."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.gateway.timeline.playback import Command, Publish
from turboserve.gateway.timeline.timeline import PLAYHEAD_RATE, Timeline

INTERVAL_S, TIMEOUT_S = 0.25, 5.0
LEAD_S, CHUNK_S = 3.0, 0.75


class Greedy:
    """A session whose worker generates in no time, and viewers that report any playhead.

    The worker keeps the rule of the real one: no chunk starts `LEAD_S` or more ahead of the playhead.
    """

    def __init__(self) -> None:
        self.timeline = Timeline(INTERVAL_S, TIMEOUT_S)
        self.now = 100.0
        self.made_s = 0.0
        self.viewers: set[str] = set()
        self.playhead_s = 0.0

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Publish):
                self.playhead_s = command.playhead_s
                if command.viewers:
                    self._generate()

    def _generate(self) -> None:
        while self.made_s < self.playhead_s + LEAD_S:
            self.made_s += CHUNK_S
            for viewer in sorted(self.viewers):
                self.do(self.timeline.delivered("s", viewer, self.made_s, 0.0, self.now))

    def join(self, viewer: str, start_s: float, *, self_paced: bool = False) -> None:
        if viewer in self.viewers:
            return
        self.viewers.add(viewer)
        start_s = min(start_s, self.made_s)
        self.do(
            self.timeline.joined(
                "s",
                viewer,
                start_s,
                self.now,
                self_paced=self_paced,
                made_s=self.made_s,
                reached_s=self.playhead_s,
            )
        )
        # Chunks made before are sent at once.
        self.do(self.timeline.delivered("s", viewer, self.made_s, 0.0, self.now))

    def leave(self, viewer: str) -> None:
        if viewer in self.viewers:
            self.viewers.remove(viewer)
            self.do(self.timeline.left("s", viewer, self.now))

    def claim(self, viewer: str, playhead_s: float) -> None:
        self.do(self.timeline.reported("s", viewer, playhead_s, 0.0, self.now))


names = st.sampled_from(["v1", "v2", "v3"])
media = st.one_of(st.just(1e9), st.floats(0, 500))
acts = st.one_of(
    st.tuples(st.just("join"), names, media, st.booleans()),
    st.tuples(st.just("leave"), names),
    st.tuples(st.just("claim"), names, media),
    st.tuples(st.just("playing"), st.booleans()),
    st.tuples(st.just("tick")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), acts), max_size=80))
def test_whatever_viewers_claim_the_worker_makes_no_more_than_time_allows(
    steps: list[tuple[float, tuple[Any, ...]]],
) -> None:
    world = Greedy()
    unpaused_s = 0.0
    first_at: float | None = None
    playing = True
    for pause_s, (what, *given_) in steps:
        world.now += pause_s
        # A pause counts only while a client watches: otherwise nothing is generated or reported.
        if first_at is not None and (playing or not world.viewers):
            unpaused_s += pause_s
        match what:
            case "join":
                viewer, start_s, self_paced = given_
                world.join(viewer, start_s, self_paced=self_paced)
                first_at = world.now if first_at is None else first_at
            case "leave":
                world.leave(given_[0])
                playing = playing if world.viewers else True
            case "claim":
                world.claim(*given_)
            case "playing":
                if world.viewers:
                    playing = given_[0]
                world.do(world.timeline.playing("s", given_[0], world.now))
            case "tick":
                world.do(world.timeline.tick(world.now))
        assert world.playhead_s <= unpaused_s * PLAYHEAD_RATE + 1e-6
        assert world.made_s <= unpaused_s * PLAYHEAD_RATE + LEAD_S + CHUNK_S + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.05, 1.0), min_size=5, max_size=60), st.floats(0, 2))
def test_a_player_that_tells_the_truth_is_never_held_back(pauses: list[float], start_up_s: float) -> None:
    world = Greedy()
    world.join("v", 0.0)
    begun = world.now + start_up_s
    for pause_s in pauses:
        world.now += pause_s
        position_s = max(0.0, min(world.now - begun, world.made_s))
        world.claim("v", position_s)
        view = world.timeline.view("s")
        assert view is not None
        assert view.playhead_s >= position_s - 1e-6


def test_reconnecting_at_the_newest_chunk_again_and_again_gains_nothing() -> None:
    """Incident: `?after=` was taken for the playhead, so each new connection moved it to the newest chunk."""
    world = Greedy()
    for _ in range(1_000):
        world.join("v", world.made_s)
        world.claim("v", 1e9)
        world.now += 0.01
        world.leave("v")
    assert world.made_s <= 10.0 * PLAYHEAD_RATE + LEAD_S + CHUNK_S


def test_a_viewer_may_go_anywhere_in_what_was_made_before_it_came() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v", 0.0, 100.0, made_s=300.0)
    timeline.delivered("s", "v", 300.0, 0.1, 100.0)
    assert timeline.reported("s", "v", 299.0, 1.0, 101.0) == [Publish("s", 299.0, 1)]


def test_who_waits_at_a_playhead_saves_no_time_for_later() -> None:
    world = Greedy()
    world.join("v", 0.0)
    for _ in range(3_600):
        world.now += 1.0
        world.claim("v", 0.0)
    made_s = world.made_s
    for _ in range(100):
        world.claim("v", 1e9)
    assert world.made_s <= made_s + LEAD_S + CHUNK_S


def test_where_another_gateway_left_the_playhead_is_no_claim() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v", 0.0, 0.0)
    timeline.left("s", "v", 1.0)
    timeline.joined("s", "v", 0.0, 5.0, made_s=103.0, reached_s=100.0)
    timeline.delivered("s", "v", 103.0, 0.1, 5.0)
    assert timeline.reported("s", "v", 100.0, 3.0, 6.0) == [Publish("s", 100.0, 1)]
