"""What a restart of the autoscaler keeps of a pool with several offers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from turboserve.autoscaler.control.pool_offers import PoolOffer


class RememberedOffer(BaseModel):
    """K of an offer, and the offer as the pool file had it."""

    kind: str
    model: str
    declared: int
    sessions: int = Field(ge=1)
    """K, as last reported."""

    def is_of(self, offer: PoolOffer) -> bool:
        """Whether the pool file still has the offer."""
        return (self.kind, self.model, self.declared) == (offer.kind, offer.model, offer.sessions)


class Remembered(BaseModel):
    """What a restart of the autoscaler keeps."""

    version: Literal[2] = 2
    offers: dict[str, RememberedOffer]
