"""Weights that a starting worker gets from workers that serve its model."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from turboserve.contracts.base import Contract, Id, Text
from turboserve.contracts.workers import Addresses, TransferSecret

HOLDERS_LIMIT = 16
"""Largest number of workers that one starting worker gets weights from."""


class FindWeights(Contract):
    """worker → state store: which workers have the weights of the model that this worker loads?"""

    worker: Id
    model: Id


class WeightHolder(Contract):
    """A worker that serves the model."""

    worker: Id
    addresses: Addresses
    """See `LoadReport.transfer`."""
    host: Text = Field(default="", max_length=255)
    """See `LoadReport.host`."""


class WeightKey(Contract):
    """state store → a worker with weights, at most once: `receiver` may have them, and proves this key.

    No row, event, log or answer of the REST API contains the key. Without the message the receiver is not
    admitted, and loads its model from its files.
    """

    worker: Id
    """The worker with the weights."""
    receiver: Id
    grant: Id
    """Names the key between the two workers."""
    key: TransferSecret

    # A refused key must not be shown either.
    model_config = ConfigDict(hide_input_in_errors=True)


class WeightHolders(Contract):
    """Answer to `FindWeights`. The holders know the key, or will know it in a moment."""

    grant: Id
    key: TransferSecret
    holders: Annotated[tuple[WeightHolder, ...], Field(max_length=HOLDERS_LIMIT)] = ()

    model_config = ConfigDict(hide_input_in_errors=True)
