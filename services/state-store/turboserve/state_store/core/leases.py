"""What this process knows of workers' leases beyond their rows: whether one may still hold.

A worker goes on while the state store confirms it, and also while none is there or the database is away, for
then nobody could take its sessions either. So who takes a worker for dead by its silence has to be sure of
that silence. Rows do not show a renewal that could not be written, nor one that a crash of Postgres took
back, nor that nobody was there to be renewed with.
"""

from __future__ import annotations

from turboserve.contracts.errors import ConflictError
from turboserve.contracts.workers import WorkerRecord


class Leases:
    """One instance's memory; `now` is monotonic seconds.

    Of renewals with another instance only the row tells; while one answers, nobody hears that none is there.
    """

    def __init__(self, lease_s: float, worker_timeout_s: float, now: float) -> None:
        self._limit_s = (lease_s + worker_timeout_s) / 2
        """A lease, and half of the margin: clocks differ, and the chunk in work takes a while."""
        self._renewed: dict[str, float] = {}
        """Worker → when it last asked to renew, whatever it was answered."""
        self._connection: int | None = None
        self._since = now
        """Since when workers have reached this process."""

    def connected(self, connection: int | None, now: float) -> None:
        """The number of the connection over which workers reach us, None while there is none.

        To be told before each of the two below: nobody knows what went over the former one, and what did not.
        """
        if connection is None or connection != self._connection:
            self._connection, self._since = connection, now

    def renewed(self, worker: str, now: float) -> None:
        """It asks to renew. To be told when the question arrives: it counts from when it was sent."""
        self._renewed[worker] = now

    def forget(self, worker: str) -> None:
        """It is gone."""
        self._renewed.pop(worker, None)

    def check_silent(self, record: WorkerRecord, renewed_at: float, now: float) -> None:
        """Whether a worker is surely silent, whose row was read with `renewed_at` by who says so.

        With the row locked: a renewal that comes later finds that it is gone. Raises ConflictError.
        """
        self._renewed = {name: at for name, at in self._renewed.items() if now - at < self._limit_s}
        heard_at = max(self._since, self._renewed.get(record.id, self._since))
        if record.renewed_at > renewed_at:
            raise ConflictError(f"worker {record.id} has renewed since its row was read", field="renewed_at")
        if now - heard_at < self._limit_s:
            raise ConflictError(
                f"worker {record.id} may have been told to go on {now - heard_at:.1f} s ago, "
                f"limit {self._limit_s:g} s",
                field="worker",
                limit=self._limit_s,
                retry_after_s=self._limit_s - (now - heard_at),
            )
