"""The timeline: for every watched session, where playback is and how much slack that leaves.

A core: told what happened and when, it says what to publish. Times are monotonic seconds, playheads and
buffers are seconds of media.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

EMPTY_BUFFER_S = 0.2
"""A viewer with less than this to play (about three frames) who does not advance has stalled."""

PLAYHEAD_RATE = 1.05
"""A published playhead gains at most this much per second. Workers generate a few seconds ahead of it, so a
client that claims to be further cannot make them generate faster than in real time. More than 1 because the
clocks of players differ."""
REMEMBERED = 16_384
"""Sessions whose bound is kept after their last viewer has left: who comes back goes on under it."""


@dataclass(frozen=True)
class Publish:
    """Tell worker and state store. `viewers` 0: the last one left."""

    session: str
    playhead_s: float
    viewers: int
    live: bool = True
    """Whether one of them has said lately where it is; else `playhead_s` is where one last was."""


@dataclass(frozen=True)
class Stalled:
    """A viewer of `session` ran out of video while it should play."""

    session: str


@dataclass(frozen=True)
class Recovered:
    """It plays again, `seconds` after it stalled."""

    session: str
    seconds: float


Command = Publish | Stalled | Recovered


@dataclass(frozen=True)
class View:
    """A session as its viewers have it now."""

    playhead_s: float
    viewers: int
    slack_s: float
    """Playout slack: media delivered ahead of the playhead (SlackServe, 3.1: P)."""
    credit_s: float
    """Service credit: slack less the time that the next chunk takes (SlackServe, eq. 1, with R = 0)."""
    stalls: int


@dataclass
class _Viewer:
    playhead_s: float
    delivered_s: float
    """Media time up to which video was delivered to this viewer: no playhead lies beyond it."""
    start_s: float
    """`delivered_s` when it came."""
    self_paced: bool
    """It cannot report (plain HTTP): it is taken to play at speed 1 whatever it was sent."""
    seen_at: float
    started: bool = False
    stalled_at: float | None = None


@dataclass
class _Session:
    viewers: dict[str, _Viewer] = field(default_factory=dict)
    playhead_s: float = 0.0
    playing: bool = True
    compute_s: float = 0.0
    stalls: int = 0
    published_at: float = float("-inf")
    bound_s: float = 0.0
    """No published playhead lies beyond this. It rises with time up to `delivered_s`, while the session
    plays."""
    bound_at: float = 0.0
    """When `bound_s` was as it is."""
    delivered_s: float = 0.0
    """Media time up to which some viewer was sent the video."""

    def raise_bound(self, now: float) -> None:
        """Bring `bound_s` up to `now`. Needed before `playing` or `delivered_s` changes."""
        if self.playing:
            risen_s = self.bound_s + (now - self.bound_at) * PLAYHEAD_RATE
            self.bound_s = max(self.bound_s, min(risen_s, self.delivered_s))
        self.bound_at = now


class Timeline:
    """All watched sessions. Published every `interval_s`; a viewer silent for `timeout_s` is stale."""

    def __init__(self, interval_s: float, timeout_s: float) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._sessions: dict[str, _Session] = {}
        self._bounds: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Of sessions that were watched: the bound of their playhead, and when it was that."""

    def joined(
        self,
        session: str,
        viewer: str,
        start_s: float,
        now: float,
        *,
        self_paced: bool = False,
        made_s: float = 0.0,
        reached_s: float = 0.0,
    ) -> list[Command]:
        """`viewer` will be sent the video from media time `start_s` on; it has all before that.

        `made_s` is where the newest chunk ends, and `reached_s` where playback is known to have been.
        """
        made_s = max(made_s, start_s)
        state = self._sessions.get(session)
        if state is None:
            state = self._sessions[session] = _Session(bound_at=now)
            state.bound_s = self._bound_after_absence(session, made_s, now)
        state.raise_bound(now)
        state.bound_s = max(state.bound_s, reached_s)
        state.delivered_s = max(state.delivered_s, start_s)
        if not state.viewers:
            state.playhead_s = min(start_s, state.bound_s)
        state.viewers[viewer] = _Viewer(start_s, start_s, start_s, self_paced, now)
        return [self._publish(session, state, now)]

    def _bound_after_absence(self, session: str, made_s: float, now: float) -> float:
        """The bound of a session that nobody watched. For one that was never watched here it is what is made:
        its viewer may go anywhere in that. Coming back gains no more than staying would have."""
        remembered = self._bounds.pop(session, None)
        if remembered is None:
            return made_s
        bound_s, at = remembered
        return max(bound_s, min(bound_s + (now - at) * PLAYHEAD_RATE, made_s))

    def left(self, session: str, viewer: str, now: float) -> list[Command]:
        """Its connection is over. Says so once with `viewers` 0 if it was the last."""
        state = self._sessions.get(session)
        if state is None or state.viewers.pop(viewer, None) is None:
            return []
        if not state.viewers:
            del self._sessions[session]
            state.raise_bound(now)
            self._bounds[session] = (state.bound_s, now)
            while len(self._bounds) > REMEMBERED:
                self._bounds.popitem(last=False)
            return [Publish(session, state.playhead_s, 0)]
        return [self._publish(session, state, now)]

    def delivered(
        self, session: str, viewer: str, end_s: float, compute_s: float, now: float
    ) -> list[Command]:
        """A chunk that ends at media time `end_s` and took `compute_s` to make went out to `viewer`."""
        state = self._sessions.get(session)
        if state is None or viewer not in state.viewers:
            return []
        state.compute_s = compute_s
        one = state.viewers[viewer]
        commands = self._advance(session, state, one, now) if one.self_paced else []
        one.delivered_s = max(one.delivered_s, end_s)
        state.raise_bound(now)
        state.delivered_s = max(state.delivered_s, end_s)
        return commands

    def reported(
        self, session: str, viewer: str, playhead_s: float, buffered_s: float, now: float
    ) -> list[Command]:
        """The viewer says where it is and how much it can still play. Never beyond what it was sent, and what
        is published of it not beyond what time allows."""
        state = self._sessions.get(session)
        one = state.viewers.get(viewer) if state else None
        if state is None or one is None or one.self_paced:
            return []
        if buffered_s < EMPTY_BUFFER_S and one.delivered_s <= one.start_s:
            # It waits for the first chunk that it is sent, wherever its player's clock stands. Were it taken
            # to be at 0, the worker would wait for it too.
            playhead_s = max(playhead_s, one.start_s)
        playhead_s = min(playhead_s, one.delivered_s)
        advanced_s, elapsed_s = playhead_s - one.playhead_s, now - one.seen_at
        one.playhead_s, one.seen_at = playhead_s, now
        one.started = one.started or advanced_s > 0
        starved = buffered_s < EMPTY_BUFFER_S and advanced_s < elapsed_s / 2
        commands = self._judge(session, state, one, starved, now)
        self._move(state, now)
        if now - state.published_at >= self._interval_s:
            commands.append(self._publish(session, state, now))
        return commands

    def playing(self, session: str, playing: bool, now: float) -> list[Command]:
        """The session was paused or ended (False), or makes video again. Waiting while paused is no stall."""
        state = self._sessions.get(session)
        if state is None or state.playing == playing:
            return []
        commands: list[Command] = []
        for one in state.viewers.values():
            if one.self_paced:
                commands += self._advance(session, state, one, now)
            if not playing:
                commands += self._judge(session, state, one, False, now)
            one.seen_at = now
        state.raise_bound(now)
        state.playing = playing
        return commands

    def tick(self, now: float) -> list[Command]:
        """Call this every `interval_s`."""
        commands: list[Command] = []
        for session, state in self._sessions.items():
            for one in state.viewers.values():
                if one.self_paced:
                    commands += self._advance(session, state, one, now)
            self._move(state, now)
            # Half an interval of tolerance: ticks and reports of the same rate must not beat.
            if now - state.published_at >= self._interval_s / 2:
                commands.append(self._publish(session, state, now))
        return commands

    def view(self, session: str) -> View | None:
        """The session's timeline, or None if nobody watches."""
        state = self._sessions.get(session)
        if state is None:
            return None
        slack_s = min((one.delivered_s - one.playhead_s for one in state.viewers.values()), default=0.0)
        return View(state.playhead_s, len(state.viewers), slack_s, slack_s - state.compute_s, state.stalls)

    def sessions(self) -> list[str]:
        """Every session that someone watches."""
        return list(self._sessions)

    def _advance(self, session: str, state: _Session, one: _Viewer, now: float) -> list[Command]:
        target_s = one.playhead_s + (now - one.seen_at)
        one.started = one.started or one.delivered_s > one.playhead_s
        starved = target_s > one.delivered_s
        one.playhead_s, one.seen_at = min(target_s, one.delivered_s), now
        return self._judge(session, state, one, starved, now)

    def _judge(self, session: str, state: _Session, one: _Viewer, starved: bool, now: float) -> list[Command]:
        if starved and state.playing and one.started and one.stalled_at is None:
            one.stalled_at = now
            state.stalls += 1
            return [Stalled(session)]
        if not starved and one.stalled_at is not None:
            began, one.stalled_at = one.stalled_at, None
            return [Recovered(session, now - began)]
        return []

    def _move(self, state: _Session, now: float) -> bool:
        """Whether some viewer moves the playhead."""
        live = [
            one.playhead_s
            for one in state.viewers.values()
            if one.self_paced or now - one.seen_at <= self._timeout_s
        ]
        if live:
            state.raise_bound(now)
            state.playhead_s = min(max(live), state.bound_s)
        return bool(live)

    def _publish(self, session: str, state: _Session, now: float) -> Publish:
        live = self._move(state, now)
        state.published_at = now
        return Publish(session, state.playhead_s, len(state.viewers), live)
