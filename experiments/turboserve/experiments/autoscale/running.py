"""The sessions that run on the modeled workers, and the latencies of their chunks."""

from __future__ import annotations

from collections.abc import Sequence

from turboserve.experiments.autoscale.outcome import ScalingOutcome


class RunningSessions:
    """Counts sessions by worker, and workers by sessions.

    The scheduler's `Cluster` holds what the scheduler knows. It may still count sessions that run no more.
    """

    def __init__(self, latency_s: Sequence[float], lowered: Sequence[int]) -> None:
        """`latency_s`, `lowered`: of a chunk, and chunks below their best, by sessions of a worker."""
        self._latency_s, self._lowered = latency_s, lowered
        self._worker: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._workers = [0] * len(latency_s)
        """Number of workers by number of sessions."""
        self.seconds = [0.0] * len(latency_s)
        """Session-seconds by sessions of the worker."""

    def start(self, session: str, worker: str) -> None:
        self._worker[session] = worker
        self._change(worker, 1)

    def stop(self, session: str) -> None:
        """End a session. Does nothing if it does not run."""
        worker = self._worker.pop(session, None)
        if worker is not None:
            self._change(worker, -1)

    def on(self, worker: str) -> int:
        return self._counts.get(worker, 0)

    def add(self, elapsed_s: float, outcome: ScalingOutcome) -> None:
        """Add the chunks of this time to the totals."""
        for sessions, workers in enumerate(self._workers):
            if sessions and workers:
                latency_s = self._latency_s[sessions]
                session_s = elapsed_s * sessions * workers
                self.seconds[sessions] += session_s
                outcome.session_s += session_s
                outcome.latency_sum += session_s * latency_s
                outcome.lowered_s += elapsed_s * workers * self._lowered[sessions]
                if latency_s > outcome.worst_served_s:
                    outcome.worst_served_s = latency_s

    def _change(self, worker: str, by: int) -> None:
        before = self._counts.get(worker, 0)
        after = self._counts[worker] = before + by
        if before:
            self._workers[before] -= 1
        if after:
            self._workers[after] += 1
        else:
            del self._counts[worker]
