"""Whether the models of an offer fit into the memory of its workers, and how many sessions of each do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

Bytes = int


class ModelMemory(BaseModel):
    """Memory that a model takes of its worker's device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight_bytes: Bytes = Field(ge=0)
    """Of the weights of all its networks."""
    workspace_bytes: Bytes = Field(default=0, ge=0)
    """Of what does not depend on the number of sessions, beside the weights."""
    state_bytes: Bytes = Field(ge=1)
    """Of one session's state."""


class OfferMemoryError(ValueError):
    """The models of an offer do not fit into its worker. The file has to change: a retry fails again."""

    def __init__(
        self, offer: str, needed: Bytes, memory: Bytes, model: str, path: Path | None = None
    ) -> None:
        """`needed`: bytes for the weights of all models, and as many for one session of each as `model`
        needs, since models have equal parts of what the weights leave."""
        self.offer, self.needed, self.memory, self.model = offer, needed, memory, model
        place = "" if path is None else f"{path}: "
        super().__init__(
            f"{place}offers: {offer} needs {needed} bytes for its models and one session of each, with equal "
            f"parts as large as {model} needs; memory_bytes of its kind is {memory}"
        )

    def of_file(self, path: Path) -> OfferMemoryError:
        """Return the error with the file that has the offer."""
        return OfferMemoryError(self.offer, self.needed, self.memory, self.model, path)


def within_memory(
    offer: str, sessions: Mapping[str, int], memory_bytes: Bytes | None, models: Mapping[str, ModelMemory]
) -> dict[str, int]:
    """Return the sessions of each model alone: `sessions`, and no more than the worker's memory holds.

    A worker divides what the weights leave equally among its models. So Σ x_j / n_j ≤ 1 also keeps the
    states within its memory. Nothing is limited without `memory_bytes`, or without the size of a model.
    Raises OfferMemoryError if a model has no room for one session.
    """
    if memory_bytes is None or not sessions.keys() <= models.keys():
        return dict(sessions)
    weights = sum(models[model].weight_bytes for model in sessions)
    one_session = {model: models[model].workspace_bytes + models[model].state_bytes for model in sessions}
    largest = max(one_session, key=lambda model: one_session[model])
    part = (memory_bytes - weights) // len(sessions)
    if part < one_session[largest]:
        needed = weights + len(sessions) * one_session[largest]
        raise OfferMemoryError(offer, needed, memory_bytes, largest)
    return {
        model: min(most, (part - models[model].workspace_bytes) // models[model].state_bytes)
        for model, most in sessions.items()
    }
