"""What the state store appends to each stream again and again, so that services know that it is stored."""

from __future__ import annotations

from enum import StrEnum

from turboserve.contracts.base import Contract


class SpaceLevel(StrEnum):
    """How much room is left for the log, best first."""

    ENOUGH = "enough"
    LOW = "low"
    """Finished sessions are removed from the log before their retention is over."""
    SCARCE = "scarce"
    """The old chunks of live sessions are removed too."""
    FULL = "full"
    """No session is admitted or resumed."""


class Canary(Contract):
    """`space` is the worst level that the sending instance of the state store knows of."""

    instance: str
    number: int
    space: SpaceLevel = SpaceLevel.ENOUGH
