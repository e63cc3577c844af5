"""Counts the releases of the software that workers run, for an operator who upgrades them one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

NOT_REPORTED = "not reported"


class WorkerReleases:
    """The releases that workers report with their load."""

    def __init__(self) -> None:
        self._releases: dict[str, str | None] = {}

    def reported(self, worker: str, release: str | None) -> None:
        """Note a worker's release. None: its schema version is below 1.1."""
        self._releases[worker] = release

    def mixed(self, workers: Collection[str]) -> str | None:
        """Return how many of `workers` run which release, or None if all run the same one.

        Other workers are forgotten.
        """
        self._releases = {name: one for name, one in self._releases.items() if name in workers}
        counts = Counter(self._releases.values())
        if len(counts) < 2:
            return None
        return ", ".join(
            f"{NOT_REPORTED if release is None else release} ({counts[release]})"
            for release in sorted(counts, key=lambda release: (release is None, release or ""))
        )
