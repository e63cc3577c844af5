"""The canary: the state store appends it to each stream repeatedly, to prove that appends are stored."""

from __future__ import annotations

from enum import StrEnum

from turboserve.contracts.base import Contract


class SpaceLevel(StrEnum):
    """Space left for the log, most space first."""

    ENOUGH = "enough"
    LOW = "low"
    """Finished sessions are removed from the log before their retention is over."""
    SCARCE = "scarce"
    """Old chunks of live sessions are removed, too."""
    FULL = "full"
    """No session is admitted or resumed."""


class Canary(Contract):
    """state store → all services, repeatedly on each stream: the stream stores appends."""

    instance: str
    number: int
    space: SpaceLevel = SpaceLevel.ENOUGH
    """The worst level that the sending instance of the state store knows."""
