"""The invariant of loans: a worker that lends its device can still make its own sessions' chunks in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from turboserve.contracts.loans import LoanRole
from turboserve.simulation.runtime.device.backend import VirtualBackend
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.service import ServiceProcess
from turboserve.simulation.settings import Scale
from turboserve.simulation.virtual_worker import VirtualWorker
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.parallel_forward import LentForwards
from turboserve.worker.engine.sequence_parallel import Exchange, ForwardSpec

ROUNDING_S = 1e-6


class LoanReports(Protocol):
    """Where the checks of loans report to."""

    def fail(self, name: str, message: str) -> None:
        """Report a violation of the invariant `name`."""

    def note(self, *what: object) -> None:
        """Write one line of the trace."""


class LendingDeployment(Protocol):
    """The deployment as the checks of loans use it."""

    loop: VirtualLoop
    scale: Scale
    on_lent: Callable[[ServiceProcess, ServiceProcess, float], None]

    def worker(self, name: str | None) -> VirtualWorker | None: ...


class LoanChecks:
    """Checks each forward that a worker computes for another one.

    The engine of the donor does nothing else meanwhile, and no command reaches it. So what its own sessions
    have lost by the end of the forward, they have lost by the loan.
    """

    def __init__(self, reports: LoanReports, deployment: LendingDeployment) -> None:
        self._reports, self._deployment = reports, deployment
        self.forwards = self.broken = self.beside_own = 0
        """Number of forwards that donors have begun with a home, of those that broke, and of those beside a
        session of the donor whose viewer plays."""

    def lends(self, worker: VirtualWorker, engine: Engine, backend: VirtualBackend) -> None:
        """Watch the forwards that a worker computes for others."""
        lend = backend.parallel.lend

        def watched(loan: int, memory: None, exchange: Exchange) -> LentForwards:
            return WatchedForwards(lend(loan, memory, exchange), self, worker, engine)

        backend.parallel.lend = watched  # type: ignore[method-assign, assignment]

    def begins(self, worker: VirtualWorker, engine: Engine) -> float:
        """Note that a worker accepts a forward. Returns the time."""
        self.forwards += 1
        assert worker.worker is not None
        assert worker.service is not None
        loan = worker.worker.loan()
        home = None if loan is None else self._deployment.worker(loan.peer)
        if home is not None and home.service is not None and loan is not None:
            assert loan.role is LoanRole.DONOR
            self._reports.note("lends", worker.name, loan.peer)
            self._deployment.on_lent(worker.service, home.service, engine.pacing.chunk_seconds)
        return self._deployment.loop.time()

    def ends(self, worker: VirtualWorker, engine: Engine, began_s: float, *, broke: bool) -> None:
        """Check the donor's own sessions after a forward, which it has computed or which broke."""
        self.broken += broke
        assert worker.service is not None
        if worker.service.process.frozen_until > began_s:
            # The sessions have lost time by the freeze.
            return
        now = self._deployment.loop.time()
        most_s = self._deployment.scale.exchange_limit_s + worker.slowdown * engine.pacing.chunk_seconds
        if now - began_s > most_s:
            # A donor's sessions are counted on to outlast so much, and no more.
            lent = f"{worker.name} lends its device for {now - began_s:.3f} s"
            self._reports.fail("loans_harmless", f"{lent}, and for {most_s:.3f} s at most by its settings")
        own = engine.playouts(now)
        self.beside_own += any(one.playing for one in own.values())
        for session, playout in own.items():
            if playout.playing and (playout.credit_s < -ROUNDING_S or playout.lateness_s > ROUNDING_S):
                self._reports.fail(
                    "loans_harmless",
                    f"{worker.name} lends its device for {now - began_s:.3f} s, and then {session} has a "
                    f"credit of {playout.credit_s:.3f} s and will be {playout.lateness_s:.3f} s late",
                )


class WatchedForwards:
    """See `LentForwards`."""

    def __init__(
        self, forwards: LentForwards, checks: LoanChecks, worker: VirtualWorker, engine: Engine
    ) -> None:
        self._forwards, self._checks, self._worker, self._engine = forwards, checks, worker, engine

    @property
    def loan(self) -> int:
        """See `LentForwards.loan`."""
        return self._forwards.loan

    def __call__(self, spec: ForwardSpec, *, accept: bool = True) -> None:
        """See `LentForwards.__call__`."""
        if not accept:
            self._forwards(spec, accept=False)
            return
        began_s = self._checks.begins(self._worker, self._engine)
        try:
            self._forwards(spec, accept=True)
        except Exception:
            self._checks.ends(self._worker, self._engine, began_s, broke=True)
            raise
        self._checks.ends(self._worker, self._engine, began_s, broke=False)
