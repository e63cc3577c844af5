"""Policies that choose the configuration of a session's next chunk.

A policy is pure: it holds nothing between two calls. All of them share one interface, so that a baseline
differs from the default in nothing else.
"""

from __future__ import annotations

from typing import Protocol

from turboserve.policies import Policies
from turboserve.worker.engine.fidelity_forecast import EngineLoad
from turboserve.worker.engine.fidelity_in_time import LeastLossInTime


class FidelityPolicy(Protocol):
    """Chooses configurations.

    The engine lowers no session below its `StreamLoad.lowest`, whatever the policy returns.
    """

    def choose(self, session: str, load: EngineLoad) -> int:
        """Return the place on the ladder of the session's next chunk, which begins now. The session is in
        `load.streams`."""
        ...


class BestFidelity:
    """Every chunk at the best configuration."""

    def choose(self, session: str, load: EngineLoad) -> int:
        """See `FidelityPolicy.choose`."""
        return 0


FIDELITY_POLICIES: Policies[FidelityPolicy] = Policies(
    "fidelity", {"best": BestFidelity, "in-time": LeastLossInTime}
)
"""Policies by the name that the settings use."""
