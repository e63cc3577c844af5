"""Two workers of one host that lend each other their devices, in virtual time.

Engines, pacing, forecasts, the protocol of loans and its policy are the worker's own. Modelled are the
messages, which take a while, and the exchange of a forward: both devices compute for a declared share of the
forward's time. A worker may die or freeze in the middle of a layer.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import cast

from torch import Tensor

from turboserve.simulation.runtime.device.backend import DTYPE, VirtualReplica
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.contents import Embedding
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.device.work import VirtualChunk
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.service import HostClock
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.work import Work
from turboserve.worker.sequence_parallel.loan_messages import (
    BeginBorrowing,
    DropPeer,
    LoanBroken,
    LoanEvent,
    PeerJoined,
    PeerLeft,
    Received,
    ReturnDonor,
    Send,
)
from turboserve.worker.sequence_parallel.loans import Loans
from turboserve.worker.sequence_parallel.policy import Measured, measure_engine
from turboserve.worker.sequence_parallel.service import MEASURE_S

HOME_SESSIONS = 8
MESSAGE_S = 0.001
IDLE_S = 0.01
DEVICES = ((0.02, 8.0), (0.05, 4.0), (0.1, 2.0), (0.1, 2.0))
"""Time of one session's forward, and how many times longer that of all sessions of the home takes."""
COMPUTED = cast(Tensor, Embedding())


@dataclass
class Viewer:
    """Plays one session without ever waiting: a chunk that it needs before it exists is late."""

    chunk_s: float
    made: int = 0
    began_at: float | None = None
    late: list[int] = field(default_factory=list)

    def got(self, index: int, now: float) -> None:
        """Note a chunk that is ready now."""
        self.made += 1
        if self.made == 1:
            self.began_at = now
        elif self.began_at is not None and now > self.began_at + index * self.chunk_s + 1e-9:
            self.late.append(index)


class LendingWorker:
    """One worker: its engine, its part in loans and the viewers of its sessions."""

    def __init__(
        self, host: LoanHost, name: str, profile: DeviceProfile, sessions: int, lead_s: float
    ) -> None:
        loop = VirtualLoop(0)
        self.name, self._host = name, host
        self.clock = DeviceClock(HostClock(loop))
        replica = VirtualReplica(profile, self.clock, loop, DeviceFaults())
        slab = SlabLayout.of(profile.config, DTYPE).total_bytes
        options = EngineOptions(
            profile.slabs * slab, max_lead_s=lead_s, max_batch=profile.slabs, policy="step"
        )
        self.engine = Engine(replica, options, self.clock, profile.stages())
        self.loans = Loans()
        self.alive = True
        self.borrowed: tuple[int, str, str] | None = None
        """Loan, session and donor."""
        self.viewers: dict[str, Viewer] = {}
        for number in range(sessions):
            session = f"{name}{number}"
            self.engine.admit(SessionSpec(session, "a", number + 1), 0.0)
            self.viewers[session] = Viewer(profile.config.chunk_media_s)
        self._measure_at = 0.0
        self._forward = self.engine.backend.forward
        self.engine.backend.forward = self._with_donor  # type: ignore[method-assign]

    def measured(self) -> Measured:
        """Measure as `LoanService` does."""
        return measure_engine(self.engine, self.clock.now, self.engine.sessions, self._host.limit_s)

    def handle(self, event: LoanEvent) -> None:
        """Take an event of the protocol, and carry out its commands as `LoanService` does."""
        for command in self.loans.handle(event, self.clock.now):
            match command:
                case Send(peer=peer, message=message):
                    self._host.post(self.name, peer, Received(self.name, message), self.clock.now)
                case BeginBorrowing(loan=loan, session=session, donor=donor):
                    self.borrowed = loan, session, donor
                    self._host.counts["loans"] += 1
                case ReturnDonor():
                    self.borrowed = None
                case DropPeer(peer=peer):
                    self._host.disconnect(self.name, peer, self.clock.now)

    def turn(self) -> None:
        """Take one turn of the engine's loop, at the engine's time."""
        now = self.clock.now
        for name, viewer in self.viewers.items():
            if viewer.began_at is not None:
                self.engine.playhead(name, now - viewer.began_at, now=now)
        if now >= self._measure_at:
            self._measure_at = now + MEASURE_S
            self.handle(self.measured())
        for event in self.engine.step(now):
            if isinstance(event, ChunkReady):
                self.viewers[event.session].got(event.index, self.clock.now)
        if self.clock.now == now:
            self.clock.advance(IDLE_S)

    def _with_donor(self, works: Sequence[Work]) -> list[Tensor]:
        """Compute a batch, with the donor's help for the row of the borrowed session."""
        names = [cast(VirtualChunk, work).session for work in works]
        if self.borrowed is None or self.borrowed[1] not in names:
            return self._forward(works)
        place = names.index(self.borrowed[1])
        rest = [*works[:place], *works[place + 1 :]]
        if not self._host.exchange(self, self.borrowed):
            return self._forward(works)
        if rest:
            # The other rows follow, on this device alone.
            self._forward(rest)
        # A virtual device's results are never read.
        return [COMPUTED] * len(works)


class LoanHost:
    """A home in deficit and a donor on one host."""

    def __init__(self, seed: int, limit_s: float, *, lends: bool = True, breaks: float | None = None) -> None:
        """Draw devices, sessions and faults.

        Args:
            limit_s: Longest time of one exchange.
            lends: Whether the workers know each other.
            breaks: Probability that a forward breaks, on fast devices with little lead. None: drawn.
        """
        chance = Random(seed)
        device = chance.choice(DEVICES)
        forward_s, gain = DEVICES[0] if breaks is not None else device
        profile = DeviceProfile(
            forward_s={1: forward_s, HOME_SESSIONS: forward_s * gain},
            text_s={1: 0.0},
            decode_s={1: 0.0},
            package_s=0.0,
            slabs=HOME_SESSIONS,
        )
        lead_s = chance.choice((0.75, 1.5, 3.0)) if breaks is None else 0.3
        self.limit_s, self._share = limit_s, chance.choice((0.55, 0.8))
        self._forward_s = forward_s
        self._faults = Random(f"faults {seed}")
        self._breaks = chance.choice((0.0, 0.02, 0.2)) if breaks is None else breaks
        self.counts: Counter[str] = Counter()
        self._posts: list[tuple[float, int, str, LoanEvent]] = []
        self._numbers = count()
        # The home's chunks together take longer than they play, so it is in deficit.
        self.home = LendingWorker(self, "home", profile, HOME_SESSIONS, lead_s)
        self.donor = LendingWorker(self, "donor", profile, chance.choice((1, 2, 3)), lead_s)
        self.workers = {worker.name: worker for worker in (self.home, self.donor)}
        if lends:
            self.home.handle(PeerJoined("donor"))
            self.donor.handle(PeerJoined("home"))

    def post(self, sender: str, receiver: str, event: LoanEvent, now: float) -> None:
        """Deliver an event to the other worker soon."""
        if self.workers[sender].alive:
            heapq.heappush(self._posts, (now + MESSAGE_S, next(self._numbers), receiver, event))

    def disconnect(self, one: str, other: str, now: float) -> None:
        """Close the connection of the two. They connect again after a while."""
        self._posts.clear()
        for name, peer in ((one, other), (other, one)):
            heapq.heappush(self._posts, (now + MESSAGE_S, next(self._numbers), name, PeerLeft(peer)))
            if self.workers[peer].alive:
                heapq.heappush(self._posts, (now + 2.0, next(self._numbers), name, PeerJoined(peer)))

    def run(self, seconds: float) -> None:
        """Let both workers take their turns, in the order of their times."""
        while True:
            turns = [(worker.clock.now, worker.name) for worker in self.workers.values() if worker.alive]
            now, name = min(turns)
            if now >= seconds:
                return
            while self._posts and self._posts[0][0] <= now:
                _, _, receiver, event = heapq.heappop(self._posts)
                if self.workers[receiver].alive:
                    self.workers[receiver].handle(event)
            self.workers[name].turn()

    def exchange(self, home: LendingWorker, loan: tuple[int, str, str]) -> bool:
        """Compute a forward of the home together with the donor. Returns whether it is complete."""
        number, _, name = loan
        donor, now = self.workers[name], home.clock.now
        if not donor.alive or donor.clock.now - now > self.limit_s:
            home.clock.advance(self.limit_s if donor.alive else 0.0)
            return self._broken(home, name, number, lost=True)
        # The donor takes part between two of its own steps.
        joined_at = max(now, donor.clock.now)
        home.clock.now = donor.clock.now = joined_at
        if not donor.measured().lends:
            self.counts["declined"] += 1
            return self._broken(home, name, number, lost=False)
        forward_s = self._share * self._forward_s
        if self._faults.random() < self._breaks:
            self._break(home, donor, joined_at + self._faults.random() * forward_s)
            return self._broken(home, name, number, lost=True)
        home.clock.now = donor.clock.now = joined_at + forward_s
        self.counts["forwards"] += 1
        return True

    def _break(self, home: LendingWorker, donor: LendingWorker, at: float) -> None:
        """Let one of the two freeze, or the donor die, in the middle of a layer."""
        kind = self._faults.choice(("home freezes", "home freezes", "donor freezes", "donor dies"))
        self.counts[kind] += 1
        home.clock.now = donor.clock.now = at
        if kind == "home freezes":
            donor.clock.advance(self.limit_s)
            home.clock.advance(2.0)
        elif kind == "donor freezes":
            home.clock.advance(self.limit_s)
            # Its sessions are late because of the freeze, not because of the loan.
            donor.viewers.clear()
            donor.alive = False
        else:
            donor.alive = False

    def _broken(self, home: LendingWorker, donor: str, loan: int, *, lost: bool) -> bool:
        home.borrowed = None
        home.handle(LoanBroken(donor, loan, lost))
        return False

    def late(self) -> dict[str, list[int]]:
        """Late chunks of the donor's own sessions."""
        return {name: viewer.late for name, viewer in self.donor.viewers.items() if viewer.late}
