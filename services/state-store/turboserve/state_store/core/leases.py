"""What this process knows of workers' leases beyond their rows: whether a lease may still hold.

A worker continues while the state store confirms its lease. It also continues while no state store answers or
the database is away, since no other worker can take its sessions then. So a worker may be declared gone for
its silence only if the silence is certain. Rows do not show:

- a renewal that could not be written;
- a renewal that a crash of Postgres took back;
- a time without any state store that could answer renewals.
"""

from __future__ import annotations

from turboserve.contracts.errors import ConflictError
from turboserve.contracts.workers import WorkerRecord


class Leases:
    """The memory of one instance. `now` is monotonic seconds.

    Renewals with another instance appear only in the row. While an instance answers, no worker finds that
    none is there.
    """

    def __init__(self, lease_s: float, worker_timeout_s: float, now: float) -> None:
        self._limit_s = (lease_s + worker_timeout_s) / 2
        """A lease plus half of the margin, since clocks differ and the current chunk takes some time."""
        self._renewed: dict[str, float] = {}
        """Worker → time of its last request to renew, whatever the answer was."""
        self._connection: int | None = None
        self._since = now
        """Time since which workers have reached this process."""

    def connected(self, connection: int | None, now: float) -> None:
        """Note the number of the connection over which workers reach this process; None while there is none.

        Call this before `renewed` and `check_silent`: messages may have been lost on the former connection.
        """
        if connection is None or connection != self._connection:
            self._connection, self._since = connection, now

    def renewed(self, worker: str, now: float) -> None:
        """Note a request to renew. Call this when it arrives: the lease counts from when it was sent."""
        self._renewed[worker] = now

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._renewed.pop(worker, None)

    def check_silent(self, record: WorkerRecord, renewed_at: float, now: float) -> None:
        """Raise ConflictError unless the worker is certainly silent. The caller holds the lock of its row.

        `renewed_at` is what the scheduler that declares it gone has read. A renewal that comes later finds
        that the worker is gone.
        """
        self._renewed = {name: at for name, at in self._renewed.items() if now - at < self._limit_s}
        heard_at = max(self._since, self._renewed.get(record.id, self._since))
        if record.renewed_at > renewed_at:
            raise ConflictError(f"worker {record.id} has renewed since its row was read", field="renewed_at")
        if now - heard_at < self._limit_s:
            raise ConflictError(
                f"worker {record.id} may have renewed its lease {now - heard_at:.1f} s ago, "
                f"limit {self._limit_s:g} s",
                field="worker",
                limit=self._limit_s,
                retry_after_s=self._limit_s - (now - heard_at),
            )
