"""What the engine will do for each session's next chunk: time, credit, tier and lateness. Pure.

Service credit is C = P − (R + T) (SlackServe, 3.1). The paper's T is the time of a chunk on an idle worker.
Here T is its time in the batches that the worker's gather policy forms of its present queue, and lateness
counts the turns of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal

from turboserve.static_frozen import statically_frozen
from turboserve.worker.engine.gather import ALPHA, Candidate

FORECAST_TURNS = 64
"""Number of batches that a forecast simulates. What is left then is spread over the last batch's rate."""

Tier = Literal["urgent", "normal", "relaxed"]
Part = tuple[int, int, int]
"""Forwards of one kind: frames of each, number done, number in all."""


@statically_frozen()
class Playout:
    """Playout slack of one session, seconds, at the time of its measurement."""

    slack_s: float
    """P: see `Pacing.slack`."""
    rest_s: float
    """R: time for the rest of the chunk in work, without the turns of others."""
    next_s: float
    """T: time of the next chunk, without the turns of others."""
    lateness_s: float = 0.0
    """How late the next chunk will be, with the turns of others."""
    playing: bool = True
    """Whether the slack shrinks with time."""
    alpha: float = ALPHA
    """Width of a tier, as a multiple of T."""

    @property
    def credit_s(self) -> float:
        """C = P − (R + T)."""
        return self.slack_s - (self.rest_s + self.next_s)

    @property
    def tier(self) -> Tier:
        """The session's urgency."""
        return tier_of(self.credit_s, self.next_s, self.alpha)

    def after(self, seconds: float) -> Playout:
        """The same session later, if it has got no chunk meanwhile."""
        if not self.playing or seconds <= 0:
            return self
        slack_s = self.slack_s - seconds
        return Playout(slack_s, self.rest_s, self.next_s, self.lateness_s, self.playing, self.alpha)


def tier_of(credit_s: float, next_s: float, alpha: float = ALPHA) -> Tier:
    """Urgent below α T, relaxed above 2 α T."""
    if credit_s < alpha * next_s:
        return "urgent"
    return "normal" if credit_s <= 2 * alpha * next_s else "relaxed"


def candidate_of(
    session: str,
    part: Part,
    waiting_s: float,
    slack_s: float,
    forward_s: float,
    chunk_s: float,
    after_s: float,
    left_s: float,
    alpha: float,
) -> Candidate:
    """The next forward of `part`, for a gather policy.

    Args:
        session: Its name.
        part: The forwards of its chunk in work, or those before it.
        waiting_s: Time since the part became due; not negative.
        slack_s: P.
        forward_s: Time of a chunk's forward alone, for R.
        chunk_s: T, alone.
        after_s: Time from clean latents to a fragment that can be sent.
        left_s: See `Candidate`, as is the next one.
        alpha: Width of the worker's tiers.

    Returns:
        The candidate. R counts only for a part that has begun.
    """
    frames, done, total = part
    rest_s = forward_s * (total - done) + after_s if done else 0.0
    # By position, in the order of the class.
    return Candidate(
        session,
        frames,
        done,
        total - done,
        max(0.0, waiting_s),
        slack_s,
        slack_s - rest_s - chunk_s,
        False,
        left_s,
        alpha,
    )


@statically_frozen()
class Upcoming:
    """The forwards up to and with a session's next chunk. Times are seconds from the forecast's start."""

    session: str
    parts: Sequence[Part]
    """The last part is the chunk's. Its last forward is the pass over the clean latents, for which no viewer
    waits."""
    due_s: float
    """When the first forward may begin; negative if it waits already."""
    slack_s: float
    chunk_s: float
    """Time of one chunk alone."""
    after_s: float
    """Time from clean latents to a fragment that can be sent."""
    playing: bool
    left_s: float = inf
    """See `Candidate`, as is the next one."""
    alpha: float = ALPHA


@statically_frozen()
class Forecast:
    """What the gather policy does to one session's forwards."""

    clean_s: float
    """When the latents of the next chunk are clean, seconds from the forecast's start."""
    forward_s: float
    """Mean duration of the batches with the session's forwards, seconds."""


class _Queued:
    """A session in the simulated queue."""

    __slots__ = (
        "_alone_s",
        "_done",
        "_frames",
        "_parts",
        "_total",
        "busy_s",
        "clean_s",
        "forwards",
        "left",
        "upcoming",
    )

    def __init__(self, upcoming: Upcoming, forward_s: float) -> None:
        self.upcoming = upcoming
        self._alone_s = forward_s
        self.left = sum(total - done for _, done, total in upcoming.parts)
        """Forwards of all parts that are not done."""
        self._parts = list(upcoming.parts)
        self._frames, self._done, self._total = self._parts.pop(0)
        self.clean_s = 0.0 if self._is_clean else inf
        self.busy_s = 0.0
        self.forwards = 0

    @property
    def _is_clean(self) -> bool:
        return not self._parts and self._done >= self._total - 1

    def candidate(self, at_s: float) -> Candidate:
        """The next forward, as the gather policy will see it."""
        one = self.upcoming
        slack_s = one.slack_s - at_s if one.playing else one.slack_s
        part = self._frames, self._done, self._total
        return candidate_of(
            one.session,
            part,
            at_s - one.due_s,
            slack_s,
            self._alone_s,
            one.chunk_s,
            one.after_s,
            one.left_s,
            one.alpha,
        )

    def advance(self, now_s: float, seconds: float) -> bool:
        """Do one forward, which took `seconds` up to `now_s`. Returns whether the latents are clean now."""
        self.left -= 1
        self._done += 1
        self.busy_s += seconds
        self.forwards += 1
        if self._done >= self._total and self._parts:
            self._frames, self._done, self._total = self._parts.pop(0)
        if self.clean_s == inf and self._is_clean:
            self.clean_s = now_s
            return True
        return False


def forecast(
    upcoming: Sequence[Upcoming],
    choose: Callable[[Sequence[Candidate]], Sequence[Candidate]],
    seconds: Callable[[int, int], float],
    busy_s: float = 0.0,
) -> dict[str, Forecast]:
    """Simulate the gather rule over the present queue until each session has its next chunk.

    Chunks after the next one are not simulated: a session leaves the queue with its chunk.

    Args:
        upcoming: The sessions that generate, each once.
        choose: The gather rule: the candidates of one forward → its rows.
        seconds: Frames and number of rows → duration of a forward.
        busy_s: Time until the first forward may begin: prompts are encoded before.

    Returns:
        The forecast of each session of `upcoming`.
    """
    queue = {one.session: _Queued(one, seconds(one.parts[-1][0], 1)) for one in upcoming}
    now, last = busy_s, 0.0
    waiting = [one for one in queue.values() if one.left]
    unclean = sum(one.clean_s == inf for one in waiting)
    for _ in range(FORECAST_TURNS):
        if not unclean:
            break
        ready = [one for one in waiting if one.upcoming.due_s <= now]
        if not ready:
            now = min(one.upcoming.due_s for one in waiting)
            continue
        batch = choose([one.candidate(now) for one in ready])
        took = seconds(batch[0].frames, len(batch))
        now, last = now + took, took / len(batch)
        ended = False
        for row in batch:
            one = queue[row.session]
            unclean -= one.advance(now, took)
            ended = ended or not one.left
        if ended:
            waiting = [one for one in waiting if one.left]
    rest = [one for one in queue.values() if one.clean_s == inf]
    end = now + last * sum(one.left for one in rest)
    return {
        one.upcoming.session: Forecast(
            clean_s=end if one.clean_s == inf else one.clean_s,
            forward_s=one.busy_s / one.forwards if one.forwards else seconds(one.upcoming.parts[-1][0], 1),
        )
        for one in queue.values()
    }
