"""The results of one run: violations, times, and what each fault did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turboserve.bench.report import percentile
from turboserve.experiments.chaos.invariants import Violations
from turboserve.experiments.chaos.plan import WORKER, Fault, FaultKind
from turboserve.experiments.chaos.simulated_clients import SimulatedClient


@dataclass(frozen=True)
class InjectedFault:
    """A fault and its monotonic times."""

    fault: Fault
    began_s: float
    ended_s: float
    stall_s: float | None = None
    """For processes that froze, and for what slows down: the longest stall of a client from the beginning
    until after the end."""
    states: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Service → names of the conditions and warnings of /readyz during what slows down."""
    ready_again_s: float | None = None
    """For what slows down: time from the end until every service was ready without a warning. None: it took
    longer than `readiness.READY_S`."""

    @property
    def recovers_from_s(self) -> float:
        """Time from which recovery counts: the end of a lasting fault, else the beginning."""
        return self.ended_s if self.fault.lasts else self.began_s


@dataclass
class Run:
    """Results of one run."""

    violations: Violations = field(default_factory=Violations)
    hits: list[InjectedFault] = field(default_factory=list)
    """Faults that hit a process."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Groups of faults that are not possible on this machine, and why."""
    oldest: dict[str, int] = field(default_factory=dict)
    """Session → index of the oldest chunk that the last full disk left in its log; 0 if absent."""
    missed: int = 0
    clients: list[SimulatedClient] = field(default_factory=list)
    chunks: int = 0
    owners: int = 0
    """Changes of owner in the log."""
    takeovers: list[float] = field(default_factory=list)
    settle_s: float | None = None
    decoded_apart: int | None = None
    """Chunks that decode workers have decoded since their last start. None: there are none."""

    def report(self) -> dict[str, Any]:
        waits = [(hit.fault, self._recovery(hit.recovers_from_s)) for hit in self.hits]
        known = [(fault, wait) for fault, wait in waits if wait is not None]
        actions: Counter[str] = sum((client.done for client in self.clients), Counter())
        return {
            "violations": dict(self.violations.counts),
            "messages": self.violations.messages,
            "recovery_s": _spread([wait for fault, wait in known if not fault.lasts]),
            "playing_again_s": _spread([wait for fault, wait in known if fault.lasts]),
            "worker_recovery_s": _spread([wait for fault, wait in known if fault.target == WORKER]),
            "takeover_s": _spread(self.takeovers),
            "frozen_stall_s": {
                kind.value: _spread(
                    [hit.stall_s for hit in self.hits if hit.fault.kind is kind and hit.stall_s is not None]
                )
                for kind in (FaultKind.ONE_FROZEN, FaultKind.TWO_FROZEN)
            },
            "ready_again_s": _spread(
                [hit.ready_again_s for hit in self.hits if hit.ready_again_s is not None]
            ),
            "settle_s": self.settle_s,
            "chunks_lost": sum(client.viewer.player.lost for client in self.clients),
            "chunks_repeated": sum(client.viewer.player.repeated for client in self.clients),
            "chunks": self.chunks,
            "decoded_apart": self.decoded_apart,
            "owner_changes": self.owners,
            "skips": sum(len(client.viewer.skips) for client in self.clients),
            "reconnects": sum(client.viewer.connections for client in self.clients) - len(self.clients),
            "stall_s": sum(client.viewer.player.stall_s for client in self.clients),
            "faults": dict(sorted(Counter(_name(hit.fault) for hit in self.hits).items())),
            "faults_missed": self.missed,
            "left_out": self.left_out,
            "deeds": dict(sorted(actions.items())),
            "timeline": [
                {
                    "fault": hit.fault.describe(),
                    "recovery_s": _rounded(wait),
                    **({} if hit.stall_s is None else {"stall_s": round(hit.stall_s, 3)}),
                    **(
                        {"readyz": hit.states, "ready_again_s": _rounded(hit.ready_again_s)}
                        if hit.fault.degrades
                        else {}
                    ),
                }
                for hit, (_, wait) in zip(self.hits, waits, strict=True)
            ],
        }

    def _recovery(self, at_s: float) -> float | None:
        """Return the time until all clients that wanted to play had a new chunk."""
        waits = [wait for client in self.clients if (wait := client.wait_after(at_s)) is not None]
        return max(waits, default=None)


def _name(fault: Fault) -> str:
    return fault.kind.value if fault.lasts else f"{fault.kind.value} {fault.target}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _spread(values: list[float]) -> dict[str, float | None]:
    return {"p50": percentile(values, 0.5), "max": max(values, default=None)}
