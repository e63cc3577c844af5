"""The paid time of each worker, from launch to end, as reported to the state store."""

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
    """Present workers of the pool, and ended ones whose end is not acknowledged.

    Times are the core's monotonic seconds. Reports contain ages instead, because the store has another clock.
    """

    def __init__(self, kind: str | None, gpus: float) -> None:
        self._kind, self._gpus = kind, gpus
        self._usage: dict[str, _UsageRecord] = {}
        self.start_up_s: float | None = None
        """Seconds from launch to ready of the last worker that this process launched."""

    def look(self, members: Iterable[PoolMember], now: float) -> None:
        """Note the present workers. A known worker that is not among them has ended by `now`."""
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
        """Return the usage of all workers as of `now`."""
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
        """Forget ended workers that the store has acknowledged."""
        for rental in rentals:
            if rental.ended_ago_s is not None:
                self._usage.pop(rental.worker, None)
