"""Takes part in leadership, and runs what the leader does in each term that this process wins.

Each term has a run of its own, which keeps nothing of earlier terms. `leadership` decides; this is its shell.
"""

from __future__ import annotations

import abc
import asyncio
from typing import Generic, Protocol, TypeVar

from turboserve import logs, subjects
from turboserve.contracts import leading
from turboserve.contracts.errors import StaleTermError, TurboServeError
from turboserve.leadership import Ask, Leadership, ReadLeader, RenewLead, TakeLead
from turboserve.service import Runtime

STEP_S = 0.05
REPEATED = 3
"""After so many requests in a row without an answer, a warning is logged."""
FINAL_REPORT_TIMEOUT_S = 3.0
"""Time-out of the request to step down, in seconds. If the request fails, the next leader waits for
`leader_timeout_s`."""


class TermRun(Protocol):
    """What runs in one term."""

    @property
    def term(self) -> int | None: ...

    async def start(self) -> None:
        """Start what the leader does."""

    async def stop(self) -> None:
        """End it, because the term is over or the process stops."""


R = TypeVar("R", bound=TermRun)


class TermLeader(abc.ABC, Generic[R]):
    """The leadership of this process in the row `name`."""

    def __init__(self, runtime: Runtime, name: str, leadership: Leadership) -> None:
        self.runtime, self.leadership = runtime, leadership
        self.running: R | None = None
        """The run of the present term; None in a standby."""
        self._name = name
        self._log = logs.get(runtime.name)
        self._leaving = False
        self._asking = asyncio.Lock()
        """Held while a request is under way."""
        self._unanswered = 0
        """Requests in a row without an answer."""

    @abc.abstractmethod
    def of_term(self, term: int) -> R:
        """Return the run of a term that this process has won. It is not started yet."""

    @property
    def role(self) -> str:
        return "leader" if self.leadership.leads(self.now()) else "standby"

    def now(self) -> float:
        return self.runtime.clock.monotonic()

    def on_leadership_lost(self, term: int) -> None:
        """Give up the lead of `term`: the store has refused a request of this term.

        Does nothing if this process leads in another term by now.
        """
        if self.leadership.term == term:
            self.leadership.on_leadership_lost(self.now())

    async def run(self) -> None:
        """Take part in leadership until the service stops."""
        while not self._stops:
            ask = self.leadership.tick(self.now())
            # A term that is over by the clock ends now, not after the answer.
            await self._follow()
            if ask is not None and not self._stops:
                async with self._asking:
                    await self._ask(ask)
                await self._follow()
            await asyncio.sleep(STEP_S)

    @property
    def _stops(self) -> bool:
        return self._leaving or self.runtime.stopping.is_set()

    async def leave(self) -> None:
        """End the run and give up the lead, so that the next leader need not wait for the time-out."""
        self._leaving = True
        running, self.running = self.running, None
        if running is not None:
            await running.stop()
        # A request that is under way may still win the lead.
        async with self._asking:
            term = self.leadership.term
        if term is None:
            return
        request = leading.StepDown(name=self._name, holder=self.leadership.me, term=term)
        try:
            await self.runtime.bus.call(subjects.STEP_DOWN, request, deadline_s=FINAL_REPORT_TIMEOUT_S)
        except TurboServeError as error:
            self._log.info("leadership not released", error=error.detail)

    async def _ask(self, ask: Ask) -> None:
        leadership, me, name = self.leadership, self.leadership.me, self._name
        call = self.runtime.bus.call
        # The lease counts from the request. After a lost request, time for another one must remain.
        deadline_s = leadership.lease.lease_s / 3
        try:
            match ask:
                case ReadLeader():
                    record = await call(
                        subjects.GET_LEADER, leading.GetLeader(name=name), deadline_s=deadline_s
                    )
                    leadership.answered(record, self.now())
                case TakeLead(term, beat):
                    campaign = leading.Campaign(name=name, holder=me, term=term, beat=beat)
                    result = await call(subjects.CAMPAIGN, campaign, deadline_s=deadline_s)
                    leadership.answered(result.record, self.now(), granted=result.granted)
                case RenewLead(term):
                    keep = leading.KeepLead(name=name, holder=me, term=term)
                    kept = await call(subjects.KEEP_LEAD, keep, deadline_s=deadline_s)
                    leadership.answered(kept, self.now())
            self._unanswered = 0
        except StaleTermError as error:
            self._unanswered = 0
            self._log.info("another process leads", error=error.detail)
            leadership.refused(self.now())
        except TurboServeError as error:
            self._unanswered += 1
            # One lost request means nothing. A broker that denies the subject answers none.
            say = self._log.warning if self._unanswered == REPEATED else self._log.debug
            say("campaign for leadership failed", ask=type(ask).__name__, error=error.detail)
            leadership.failed(self.now())

    async def _follow(self) -> None:
        """End the run of a term that is over, and start one for a term that this process has won."""
        term = self.leadership.term
        if self.running is not None and self.running.term != term:
            self._log.warning("leadership lost", term=self.running.term, instance=self.leadership.me)
            running, self.running = self.running, None
            await running.stop()
        # A process that was suspended may have won a term that is over by now.
        leads = self.leadership.leads(self.now())
        if self.running is None and term is not None and leads and not self._stops:
            self._log.info("leads", term=term, instance=self.leadership.me)
            self.running = self.of_term(term)
            await self.running.start()
