"""The timeline: the playhead and the playout slack of every watched session.

Pure: its methods take events with their times, and return what to publish. Times are monotonic seconds.
Playheads and buffers are seconds of media.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cachetools import FIFOCache

from turboserve.contracts.fidelity import Tier
from turboserve.gateway.timeline.playback import Command, Publish, Recovered, Stalled, View

EMPTY_BUFFER_S = 0.2
"""A viewer with a smaller buffer (about three frames) that does not advance has stalled."""

PLAYHEAD_RATE = 1.05
"""Maximum increase of a published playhead per second. Workers generate a few seconds ahead of the playhead,
so a client that reports a later one cannot make them generate faster than in real time. The rate is above 1
because the clocks of players differ."""
REMEMBERED = 16_384
"""Number of sessions whose bound is kept after their last viewer has left, for viewers that return."""


@dataclass
class _Viewer:
    playhead_s: float
    delivered_s: float
    """Media time up to which video was delivered to this viewer. Its playhead never exceeds it."""
    start_s: float
    """`delivered_s` when the viewer joined."""
    self_paced: bool
    """The viewer cannot report (plain HTTP). It is assumed to play what it was sent at speed 1."""
    seen_at: float
    advancing: bool = False
    """Whether the newest report shows that the viewer plays. Then it is assumed to play on."""
    started: bool = False
    stalled_at: float | None = None
    skipped_to_s: float = 0.0
    """Media time before which the viewer discards the video."""

    def plays_for_s(self, now: float) -> float:
        """Time for which the viewer has played on since its playhead was observed, seconds."""
        return min(now - self.seen_at, self.delivered_s - self.playhead_s) if self.advancing else 0.0


@dataclass
class _Session:
    viewers: dict[str, _Viewer] = field(default_factory=dict)
    playhead_s: float = 0.0
    advances_from: float | None = None
    """Time at which a viewer that plays was at `playhead_s`. None: `playhead_s` does not advance."""
    playing: bool = True
    compute_s: float = 0.0
    urgency: tuple[float | None, Tier | None] = None, None
    """Credit and tier of the newest chunk that was sent, by its worker."""
    stalls: int = 0
    published_at: float = float("-inf")
    bound_s: float = 0.0
    """Upper bound of the published playhead. While the session plays, it rises with time to `delivered_s`."""
    bound_at: float = 0.0
    """Time for which `bound_s` holds."""
    delivered_s: float = 0.0
    """Media time up to which at least one viewer was sent the video."""

    def raise_bound(self, now: float) -> None:
        """Advance `bound_s` to `now`. Call this before `playing` or `delivered_s` changes."""
        if self.playing:
            risen_s = self.bound_s + (now - self.bound_at) * PLAYHEAD_RATE
            self.bound_s = max(self.bound_s, min(risen_s, self.delivered_s))
        self.bound_at = now


class Timeline:
    """All watched sessions. Publishes every `interval_s`. A viewer silent for `timeout_s` is stale."""

    def __init__(self, interval_s: float, timeout_s: float) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._sessions: dict[str, _Session] = {}
        self._bounds: FIFOCache[str, tuple[float, float]] = FIFOCache(REMEMBERED)
        """Formerly watched session → the bound of its playhead, and the time for which it holds."""

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
        """Add `viewer`, which will be sent the video from media time `start_s` on and has all before it.

        `made_s` is the end of the newest chunk. `reached_s` is a playhead that the session has had.
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

    def oldest_viewer(self, session: str) -> str | None:
        """Return the viewer that came first, of those that watch the session."""
        state = self._sessions.get(session)
        return None if state is None else next(iter(state.viewers), None)

    def _bound_after_absence(self, session: str, made_s: float, now: float) -> float:
        """Return the bound of a session without viewers.

        If it was never watched here, the bound is `made_s`: its viewer may start anywhere in the existing
        video. A viewer that returns gains no more than one that stays.
        """
        remembered = self._bounds.pop(session, None)
        if remembered is None:
            return made_s
        bound_s, at = remembered
        return max(bound_s, min(bound_s + (now - at) * PLAYHEAD_RATE, made_s))

    def left(self, session: str, viewer: str, now: float) -> list[Command]:
        """Remove `viewer`. If it was the last one, publish once with `viewers` 0."""
        state = self._sessions.get(session)
        if state is None or state.viewers.pop(viewer, None) is None:
            return []
        if not state.viewers:
            del self._sessions[session]
            state.raise_bound(now)
            self._bounds[session] = (state.bound_s, now)
            return [Publish(session, state.playhead_s, 0)]
        return [self._publish(session, state, now)]

    def delivered(
        self,
        session: str,
        viewer: str,
        end_s: float,
        compute_s: float,
        now: float,
        urgency: tuple[float | None, Tier | None] = (None, None),
    ) -> list[Command]:
        """Note that `viewer` was sent a chunk. It ends at media time `end_s` and took `compute_s` to make.

        `urgency`: the session's credit and tier when the chunk was published, by its worker.
        """
        state = self._sessions.get(session)
        if state is None or viewer not in state.viewers:
            return []
        state.compute_s = compute_s
        one = state.viewers[viewer]
        commands = self._advance(session, state, one, now) if one.self_paced else []
        one.delivered_s = max(one.delivered_s, end_s)
        state.raise_bound(now)
        if end_s >= state.delivered_s:
            state.urgency = urgency
        state.delivered_s = max(state.delivered_s, end_s)
        return commands

    def skipped(self, session: str, viewer: str, start_s: float, now: float) -> list[Command]:
        """Note that `viewer` discards the video before media time `start_s`, where its video goes on.

        The session's owner asked for that with a prompt. So it may move the playhead faster than `bound_s`
        allows, by at most what the session is ahead, and as often as prompts are accepted.
        """
        state = self._sessions.get(session)
        one = state.viewers.get(viewer) if state else None
        if state is None or one is None or one.self_paced:
            return []
        state.raise_bound(now)
        state.bound_s = max(state.bound_s, start_s)
        one.playhead_s, one.delivered_s = max(one.playhead_s, start_s), max(one.delivered_s, start_s)
        one.skipped_to_s, one.advancing = start_s, False
        return [self._publish(session, state, now)]

    def reported(
        self, session: str, viewer: str, playhead_s: float, buffered_s: float, now: float
    ) -> list[Command]:
        """Note the playhead and the buffer that `viewer` reports.

        Its playhead is limited to what it was sent. The published playhead is also limited by `bound_s`.
        """
        state = self._sessions.get(session)
        one = state.viewers.get(viewer) if state else None
        if state is None or one is None or one.self_paced:
            return []
        if buffered_s < EMPTY_BUFFER_S and one.delivered_s <= one.start_s:
            # The viewer waits for its first chunk, whatever the clock of its player shows. With a playhead of
            # 0, the worker would wait for the viewer as well.
            playhead_s = max(playhead_s, one.start_s)
        # A report from before the skip shows what the viewer discards since.
        playhead_s = min(max(playhead_s, one.skipped_to_s), one.delivered_s)
        advanced_s, elapsed_s = playhead_s - one.playhead_s, now - one.seen_at
        one.playhead_s, one.seen_at = playhead_s, now
        one.advancing = state.playing and advanced_s > 0
        one.started = one.started or advanced_s > 0
        starved = buffered_s < EMPTY_BUFFER_S and advanced_s < elapsed_s / 2
        commands = self._judge(session, state, one, starved, now)
        self._move(state, now)
        if now - state.published_at >= self._interval_s:
            commands.append(self._publish(session, state, now))
        return commands

    def playing(self, session: str, playing: bool, now: float) -> list[Command]:
        """Note that the session was paused or ended (False), or generates again. A pause is no stall."""
        state = self._sessions.get(session)
        if state is None or state.playing == playing:
            return []
        commands: list[Command] = []
        for one in state.viewers.values():
            if one.self_paced:
                commands += self._advance(session, state, one, now)
            if not playing:
                commands += self._judge(session, state, one, False, now)
            one.seen_at, one.advancing = now, False
        state.raise_bound(now)
        state.playing = playing
        return commands

    def tick(self, now: float) -> list[Command]:
        """Advance self-paced viewers and publish playheads that are due. Call this every `interval_s`."""
        commands: list[Command] = []
        for session, state in self._sessions.items():
            for one in state.viewers.values():
                if one.self_paced:
                    commands += self._advance(session, state, one, now)
            self._move(state, now)
            # Half an interval of tolerance, so that ticks and reports of the same rate do not interfere.
            if now - state.published_at >= self._interval_s / 2:
                commands.append(self._publish(session, state, now))
        return commands

    def view(self, session: str) -> View | None:
        """Return the playback of the session; None if it has no viewer."""
        state = self._sessions.get(session)
        if state is None:
            return None
        slack_s = min((one.delivered_s - one.playhead_s for one in state.viewers.values()), default=0.0)
        credit_s = slack_s - state.compute_s
        viewers = len(state.viewers)
        return View(state.playhead_s, viewers, slack_s, credit_s, state.stalls, *state.urgency)

    def sessions(self) -> list[str]:
        """Return every watched session."""
        return list(self._sessions)

    def _advance(self, session: str, state: _Session, one: _Viewer, now: float) -> list[Command]:
        target_s = one.playhead_s + (now - one.seen_at)
        one.started = one.started or one.delivered_s > one.playhead_s
        starved = target_s > one.delivered_s
        one.playhead_s, one.seen_at = min(target_s, one.delivered_s), now
        one.advancing = not starved
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
        """Update the session's playhead. Returns whether a viewer moves it."""
        live = [
            (one.playhead_s + one.plays_for_s(now), one.plays_for_s(now))
            for one in state.viewers.values()
            if one.self_paced or now - one.seen_at <= self._timeout_s
        ]
        if live:
            state.raise_bound(now)
            position_s, played_s = max(live)
            # The worker adds the age to the playhead: the sum is bounded, too.
            played_s = max(0.0, played_s - max(0.0, position_s - state.bound_s))
            state.playhead_s = min(position_s, state.bound_s) - played_s
            state.advances_from = now - played_s if played_s else None
        return bool(live)

    def _publish(self, session: str, state: _Session, now: float) -> Publish:
        live = self._move(state, now)
        state.published_at = now
        age_s = now - state.advances_from if live and state.advances_from is not None else 0.0
        return Publish(session, state.playhead_s, len(state.viewers), live, age_s)
