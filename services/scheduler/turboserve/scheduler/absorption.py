"""Whether workers may hold more than K sessions."""

from __future__ import annotations

POOL_SILENT_S = 5.0
"""Listening time without a pool's report after which its workers take no more than K sessions. Autoscalers
report every second."""


class Absorption:
    """Whether workers may hold more than K sessions, by the reports of the pools. A silent pool ends it."""

    def __init__(self) -> None:
        self._absorbing: dict[str, tuple[str, float]] = {}
        """Pool → its model, and the listening time at which the pool last reported that it absorbs."""

    def put(self, pool: str, model: str, absorbs: bool, listened: float) -> None:
        if absorbs:
            self._absorbing[pool] = model, listened
        else:
            self._absorbing.pop(pool, None)

    def of(self, model: str, listened: float) -> bool:
        """Whether workers of a model may hold more than K sessions."""
        return any(its == model and listened - at <= POOL_SILENT_S for its, at in self._absorbing.values())
