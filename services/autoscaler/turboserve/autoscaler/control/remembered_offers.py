"""What a restart of the autoscaler keeps of a pool with several offers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from turboserve.autoscaler.control.learned_state import LearnedStateError
from turboserve.autoscaler.control.pool_offers import OfferWorkers, PoolOffer

Known = Annotated[int, Field(ge=1)]


class RememberedOffer(BaseModel):
    """n_j of an offer, and the offer as the pool file had it."""

    kind: str
    declared: dict[str, int]
    """n_j by model."""
    sessions: dict[str, Known]
    """n_j by model, as last reported."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_model(cls, value: Any) -> Any:
        """Read what an earlier version has kept of an offer, whose workers had one model."""
        if not isinstance(value, dict) or "model" not in value:
            return value
        model, declared, sessions = (value.get(name) for name in ("model", "declared", "sessions"))
        return {"kind": value.get("kind"), "declared": {model: declared}, "sessions": {model: sessions}}

    def is_of(self, offer: PoolOffer) -> bool:
        """Whether the pool file still has the offer."""
        same = list(self.declared.items()) == list(offer.sessions.items())
        return self.kind == offer.kind and same and self.sessions.keys() == self.declared.keys()


class Remembered(BaseModel):
    """What a restart of the autoscaler keeps."""

    version: Literal[2, 3] = 3
    offers: dict[str, RememberedOffer]


def remembered(workers: OfferWorkers) -> str:
    """Return n_j of each offer as text."""
    found = {
        name: RememberedOffer(kind=offer.kind, declared=dict(offer.sessions), sessions=workers.capacity[name])
        for name, offer in workers.offers.items()
    }
    return Remembered(offers=found).model_dump_json()


def recall_offers(text: str, workers: OfferWorkers) -> None:
    """Set n_j to what `remembered` returned. Raises LearnedStateError.

    n_j of an offer that the pool file has changed is not used.
    """
    try:
        known = Remembered.model_validate_json(text).offers
    except ValidationError as error:
        raise LearnedStateError(f"it has no K by offer: {error.errors()[0]['msg']}") from None
    for name, offer in workers.offers.items():
        if name in known and known[name].is_of(offer):
            workers.capacity[name].update(known[name].sessions)
