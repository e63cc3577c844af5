"""Which release each worker runs, by its load reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from cachetools import FIFOCache

NOT_REPORTED = "not reported"
REMEMBERED = 4_096
"""Workers whose releases are kept, although no health check asks for them."""


class WorkerReleases:
    """The releases that workers report with their load."""

    def __init__(self) -> None:
        self._releases: FIFOCache[str, str | None] = FIFOCache(REMEMBERED)

    def reported(self, worker: str, release: str | None) -> None:
        """Note a worker's release. None: its schema version is below 1.1."""
        self._releases[worker] = release

    def mixed(self, workers: Collection[str]) -> str | None:
        """Return how many of `workers` run which release, or None if all run the same one.

        Other workers are forgotten.
        """
        for name in [name for name in self._releases if name not in workers]:
            del self._releases[name]
        counts = Counter(self._releases.values())
        if len(counts) < 2:
            return None
        return ", ".join(
            f"{NOT_REPORTED if release is None else release} ({counts[release]})"
            for release in sorted(counts, key=lambda release: (release is None, release or ""))
        )
