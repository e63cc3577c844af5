"""Which workers are paid for, from launch to end: what the pool tells the state store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from turboserve.autoscaler.pool_members import PoolMember
from turboserve.contracts.cost import Rental


@dataclass
class _UsageRecord:
    member: str
    launched_at: float
    ready_at: float | None = None
    ended_at: float | None = None


class WorkerUsage:
    """Every worker that is in a slot, and those that were and whose end is not acknowledged. Times are the
    core's monotonic ones, and go out as ages: the store has a clock of its own."""

    def __init__(self, kind: str | None, gpus: float) -> None:
        self._kind, self._gpus = kind, gpus
        self._usage: dict[str, _UsageRecord] = {}
        self.start_up_s: float | None = None
        """How long the last worker took from its launch to being ready."""

    def look(self, members: Iterable[PoolMember], now: float) -> None:
        """Take note of who is there; whoever was there before has ended by `now`."""
        there = set()
        for member in members:
            if member.worker is None:
                continue
            there.add(member.worker)
            usage_record = self._usage.setdefault(
                member.worker, _UsageRecord(member.name, member.launched_at)
            )
            if usage_record.ready_at is None and member.ready_at is not None:
                usage_record.ready_at = member.ready_at
                if not member.adopted:
                    self.start_up_s = member.ready_at - member.launched_at
        for worker, usage_record in self._usage.items():
            if worker not in there and usage_record.ended_at is None:
                usage_record.ended_at = now

    def rentals(self, now: float) -> tuple[Rental, ...]:
        """All of them as of `now`."""
        return tuple(
            Rental(
                worker=worker,
                member=usage_record.member[:64],
                kind=self._kind,
                gpus=self._gpus,
                age_s=max(now - usage_record.launched_at, 0.0),
                ready_ago_s=None if usage_record.ready_at is None else max(now - usage_record.ready_at, 0.0),
                ended_ago_s=None if usage_record.ended_at is None else max(now - usage_record.ended_at, 0.0),
            )
            for worker, usage_record in self._usage.items()
        )

    def acknowledged(self, rentals: Iterable[Rental]) -> None:
        """The store has these: ends among them need not be told again."""
        for rental in rentals:
            if rental.ended_ago_s is not None:
                self._usage.pop(rental.worker, None)
