"""Time on a virtual device, and the jobs beside the engine's own work."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from typing import Generic, TypeVar

from turboserve.clock import Clock
from turboserve.worker.engine.streams import Job, Wakeup

J = TypeVar("J", bound=Job)


class DeviceClock:
    """The engine's clock. While a step computes, it is ahead of the event loop's clock by the computed time.

    The results of the step are delivered, and the next step begins, once the loop reaches that time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now = clock.monotonic()
        self.ends: list[float] | None = None
        """Times at which jobs of stream executors end or have results, as a heap, for a runner that looks at
        them itself. None: each job wakes the engine's runner at its end."""

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self.now

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self._clock.wall() + self.now - self._clock.monotonic()

    def advance(self, seconds: float) -> None:
        """Let `seconds` of computation pass."""
        self.now += seconds

    def catch_up(self) -> None:
        """Set the time to the loop's. Called when no computation is under way."""
        self.now = max(self.now, self._clock.monotonic())

    def wake_at(self, when: float) -> None:
        """Wake a runner that looks at the ends of jobs itself at `when`. Others are woken when a job ends."""
        if self.ends is not None:
            heapq.heappush(self.ends, when)

    def next_end(self) -> float:
        """Return the time at which the next job ends; infinity if none is under way."""
        ends = self.ends
        while ends and ends[0] <= self.now:
            heapq.heappop(ends)
        return ends[0] if ends else math.inf


class VirtualStreamExecutor(Generic[J]):
    """A stream executor (`backend.JobExecutor`) whose jobs advance the clock by their duration.

    A threaded one sets the clock back after a job: its jobs pass beside what the engine's thread computes.
    """

    def __init__(
        self, clock: DeviceClock, loop: asyncio.AbstractEventLoop, wakeup: Wakeup, threaded: bool = True
    ) -> None:
        self.threaded = threaded
        self._clock, self._loop, self._wakeup = clock, loop, wakeup
        self._free_at = 0.0
        self._jobs: deque[tuple[float, J]] = deque()
        """Submitted jobs, each with the time at which it is done."""
        self._failure: BaseException | None = None

    @property
    def load(self) -> int:
        """See `JobExecutor.load`."""
        return len(self._jobs)

    @property
    def finished(self) -> bool:
        """See `JobExecutor.finished`."""
        return self._failure is not None or bool(self._jobs and self._jobs[0][0] <= self._clock.now)

    def submit(self, job: J) -> None:
        """See `JobExecutor.submit`. The job's results stay in the job until it is collected."""
        began = self._clock.now
        self._clock.now = max(began, self._free_at)
        try:
            job.run()
        except Exception as error:
            self._failure = error
        self._free_at = self._clock.now
        if self.threaded:
            self._clock.now = began
        self._jobs.append((self._free_at, job))
        if self._free_at > self._loop.time():
            if self._clock.ends is not None:
                heapq.heappush(self._clock.ends, self._free_at)
                return
            self._loop.call_at(self._free_at, self._wakeup.notify_done)
        else:
            self._wakeup.notify_done()

    def collect(self) -> list[J]:
        """See `JobExecutor.collect`."""
        if self._failure is not None:
            raise RuntimeError("a stream executor has failed") from self._failure
        done: list[J] = []
        while self._jobs and self._jobs[0][0] <= self._clock.now:
            done.append(self._jobs.popleft()[1])
        return done
