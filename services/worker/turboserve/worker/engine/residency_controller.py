"""Exchanges an engine's sessions between slabs and host memory, as `residency.decide` chooses."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from turboserve.worker.engine.activity import Offloaded, Running, Transferring
from turboserve.worker.engine.admission import SessionTable
from turboserve.worker.engine.backend import Backend
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import EngineOptions, Event
from turboserve.worker.engine.pacing import Pacing
from turboserve.worker.engine.residency import (
    Decision,
    NoExchange,
    Offload,
    ResidencyOptions,
    ResidencyView,
    Return,
    decide,
    returns_s,
)
from turboserve.worker.engine.session import ContextTask, Session
from turboserve.worker.engine.stages import Fail
from turboserve.worker.engine.state_transfer import Transfer, TransferDirection, TransferPurpose
from turboserve.worker.engine.streams import DEVICE_LOST

FIRST_COPY_BYTES_PER_S = 2e9
"""Assumed rate of a copy before one is measured."""
PAGES_READ_S = 10.0
"""Time after a migration has read a session's pages for which the session stays where it is."""
NO_DEADLINE_S = 5.0
"""Time in which a session gets a slab whose work has no deadline: no viewer waits for it."""
POLL_S = 0.1
"""Longest time between two decisions while a session waits outside."""
_WEIGHT = 0.2
"""Weight of a new copy's time in its mean."""


@dataclass
class ResidencyCounts:
    """Numbers of exchanges since the engine began."""

    offloads: int = 0
    returns: int = 0
    late_returns: int = 0
    """Returns that began after their latest time."""
    returned: int = 0
    """Returns whose session may compute: the first layer is there."""
    return_s: float = 0.0
    """Sum of their times, from the begin of the copy on."""


class ResidencyController:
    """Belongs to the engine's thread. Without `EngineOptions.host_sessions` it never does anything."""

    def __init__(
        self,
        backend: Backend,
        table: SessionTable,
        pacing: Pacing,
        forward: LatencyProfile,
        options: EngineOptions,
    ) -> None:
        """`forward`: L(b) of a forward."""
        self._backend, self._table, self._pacing, self._forward = backend, table, pacing, forward
        self._rows = options.max_batch
        first_s = backend.state_host_bytes / FIRST_COPY_BYTES_PER_S
        self._copy_out_s = self._copy_in_s = first_s
        self._arrival: tuple[Transfer, float] | None = None
        """The newest return, and when it began."""
        self._since_s: dict[str, float] = {}
        """When each session got its slab."""
        self._late_from_s: dict[str, float] = {}
        self._wants_from_s: dict[str, float] = {}
        self.counts = ResidencyCounts()

    @property
    def options(self) -> ResidencyOptions:
        """Limits by the present measurements."""
        exchange_s = self._copy_out_s + self._copy_in_s
        chunk_s, media_s = self._chunk_seconds, self._backend.config.chunk_media_s
        return ResidencyOptions(
            self._copy_out_s,
            self._copy_in_s,
            least_residence_s=max(2 * exchange_s, chunk_s),
            least_gain_s=max(2 * exchange_s, media_s / 2),
        )

    def waits(self, now: float) -> bool:
        """Whether `exchange` would do something."""
        return self._possible and not isinstance(self._decision(now), NoExchange)

    def next_at(self, now: float) -> float | None:
        """When `exchange` should be called again at the latest. None: not before a session changes."""
        if not self._possible:
            return None
        decision = self._decision(now)
        wait_s = decision.seconds if isinstance(decision, NoExchange) else 0.0
        return now + min(wait_s, POLL_S)

    def exchange(self, now: float, fail: Fail) -> list[Event]:
        """Begin what is to be done now. Call it between two steps.

        `fail`: ends a session whose return raises an error. Raises only `DEVICE_LOST` errors.
        """
        if not self._possible:
            return []
        match self._decision(now):
            case Return(name):
                session = self._table.sessions[name]
                try:
                    self._table.bring_back(session)
                except DEVICE_LOST:
                    raise
                except Exception as error:
                    return [fail(session, error)]
                self.counts.returns += 1
                self.counts.late_returns += name in self._late_from_s
                self._since_s[name] = now
                if isinstance(session.activity, Transferring):
                    self._arrival = session.activity.transfer, now
            case Offload(name):
                self.counts.offloads += 1
                self._table.sessions[name].offloading = True
            case NoExchange():
                pass
        return []

    def left(self, transfer: Transfer, now: float) -> None:
        """Learn from a finished copy to the host."""
        if transfer.purpose is TransferPurpose.RESIDENCY:
            self._copy_out_s = _mean(self._copy_out_s, now - transfer.began_s)

    def came(self, transfer: Transfer, now: float) -> None:
        """Learn from a copy to a slab whose session may compute."""
        if self._arrival is not None and self._arrival[0] is transfer:
            took_s = now - self._arrival[1]
            self._copy_in_s = _mean(self._copy_in_s, took_s)
            self._arrival = None
            self.counts.returned += 1
            self.counts.return_s += took_s

    def returns_s(self, now: float) -> dict[str, float]:
        """Earliest time at which each session without its state in a slab may compute, seconds from now.

        The copy in progress ends first. Sessions that do not return (suspended, quiesced, with nothing to
        generate) are left out.
        """
        free, busy_s = self._table.pool.free, 0.0
        found: dict[str, float] = {}
        turns: list[tuple[float, str]] = []
        for session in self._table.sessions.values():
            match session.activity:
                case Transferring(transfer=transfer) if transfer.way is TransferDirection.ARRIVING:
                    began_s = now
                    if self._arrival is not None and self._arrival[0] is transfer:
                        began_s = self._arrival[1]
                    found[session.name] = max(0.0, self._copy_in_s - (now - began_s))
                    busy_s = max(busy_s, found[session.name])
                case Transferring(transfer=transfer) if transfer.purpose is TransferPurpose.RESIDENCY:
                    free += 1
                    busy_s = max(busy_s, self._copy_out_s - (now - transfer.began_s))
                    turns.append(self._turn(session, now))
                case Offloaded(quiesced=False) if not session.suspending and not session.ended:
                    turns.append(self._turn(session, now))
                case _:
                    pass
        waiting = [turn for turn in turns if turn[0] < inf]
        return found | returns_s(waiting, free, self.options, busy_s) if waiting else found

    def _turn(self, session: Session, now: float) -> tuple[float, str]:
        """See `ResidencyView.turn`."""
        by_s = self._return_by_s(session, now)
        if session.name in self._wants_from_s:
            by_s = min(by_s, self._wants_from_s[session.name] + NO_DEADLINE_S - now)
        return by_s - (now - self._late_from_s.get(session.name, now)), session.name

    def _return_by_s(self, session: Session, now: float) -> float:
        """See `ResidencyView.return_by_s`."""
        if not self._pacing.shrinks(session) or session.ended:
            return inf
        return self._pacing.slack(session, now) - self._copy_in_s - self._own_s

    @property
    def _own_s(self) -> float:
        """Time of a session's own forwards. The batch in progress ends first, and the copy is noticed after
        another one."""
        return self._chunk_seconds + 2 * self._forward(self._rows)

    @property
    def _possible(self) -> bool:
        """Whether a session waits outside and no exchange is in progress."""
        sessions = self._table.sessions.values()
        exchanging = any(
            session.offloading
            or session.arriving is not None
            or (isinstance(session.activity, Transferring) and session.has_slab)
            for session in sessions
        )
        return not exchanging and any(isinstance(session.activity, Offloaded) for session in sessions)

    @property
    def _chunk_seconds(self) -> float:
        """Time of a chunk in a full batch."""
        forwards = self._backend.config.chunk_forwards
        return self._forward(self._rows) * forwards + self._pacing.after_forwards

    def _decision(self, now: float) -> Decision:
        here = self._table.sessions
        for known in (self._since_s, self._late_from_s, self._wants_from_s):
            for name in known.keys() - here.keys():
                del known[name]
        views = [view for each in here.values() if (view := self._view(each, now)) is not None]
        return decide(views, self._table.pool.free, self.options)

    def _view(self, session: Session, now: float) -> ResidencyView | None:
        name, outside = session.name, session.activity
        if isinstance(outside, Transferring) or (isinstance(outside, Offloaded) and outside.quiesced):
            return None
        resident = not isinstance(outside, Offloaded)
        wants = self._wants(session, now)
        by_s = self._return_by_s(session, now)
        if wants and not resident:
            since_s = self._wants_from_s.setdefault(name, now)
            by_s = min(by_s, since_s + NO_DEADLINE_S - now)
        else:
            self._wants_from_s.pop(name, None)
        if resident or by_s > 0:
            self._late_from_s.pop(name, None)
        else:
            self._late_from_s.setdefault(name, now)
        return ResidencyView(
            name,
            resident,
            credit_s=inf if by_s == inf else self._pacing.slack(session, now) - self._own_s,
            return_by_s=by_s,
            wants=wants,
            late_s=now - self._late_from_s.get(name, now),
            resident_s=now - self._since_s.get(name, -inf),
            movable=resident and self._movable(session, now),
        )

    def _wants(self, session: Session, now: float) -> bool:
        if session.controls or session.suspending or session.quiesce_request is not None:
            return True
        if session.busy or (isinstance(session.activity, Offloaded) and session.activity.state is None):
            return True
        return not (session.paused or session.ended) and self._pacing.may_generate(session, now)

    def _movable(self, session: Session, now: float) -> bool:
        leaves = session.suspending or session.quiesce_request is not None
        starts = session.controls or session.warming or isinstance(session.task, ContextTask)
        return (
            isinstance(session.activity, Running)
            and not leaves
            and not starts
            and not session.isolated
            and now - session.pages_read_at_s >= PAGES_READ_S
            and not self._backend.borrows(session)
        )


def _mean(before: float, sample: float) -> float:
    """A mean that follows a slower copy at once, and a faster one slowly: a late return costs more."""
    return sample if sample > before else before + _WEIGHT * (sample - before)
