"""Weights of models: which workers a starting worker may get them from, and the key between them."""

from __future__ import annotations

from hashlib import blake2b

from pydantic import SecretStr

from turboserve.bus import Bus
from turboserve.contracts.weights import (
    HOLDERS_LIMIT,
    FindWeights,
    WeightHolder,
    WeightHolders,
    WeightKey,
)
from turboserve.contracts.workers import WorkerPhase
from turboserve.ids import new_id, random_token
from turboserve.state_store.ports.database import Database
from turboserve.subjects import WEIGHTS

KEY_BYTES = 32


class Weights:
    """The endpoint of starting workers, without its transport. May raise UnavailableError."""

    def __init__(self, database: Database, bus: Bus) -> None:
        self._database, self._bus = database, bus

    async def find(self, request: FindWeights) -> WeightHolders:
        """Return workers that serve the model, and send each of them the new key.

        The key is stored nowhere. A holder that does not get it refuses the receiver, which costs that
        source. Any worker may ask for any model: the broker's users of workers share their models' weights.
        """
        async with self._database.transaction(durable=False) as db:
            workers = await db.workers.page(include_gone=False)
        serving = [
            one
            for one in workers
            if one.model == request.model
            and one.id != request.worker
            and one.phase is WorkerPhase.READY
            and one.transfer
        ]
        # Each of many starting workers gets others.
        serving.sort(key=lambda one: blake2b(f"{request.worker} {one.id}".encode()).digest())
        serving = serving[:HOLDERS_LIMIT]
        grant, key = new_id("wgt"), SecretStr(random_token(KEY_BYTES))
        for one in serving:
            message = WeightKey(worker=one.id, receiver=request.worker, grant=grant, key=key)
            await self._bus.publish(WEIGHTS, one.id, message)
        return WeightHolders(
            grant=grant,
            key=key,
            holders=tuple(
                WeightHolder(worker=one.id, addresses=one.transfer, host=one.host) for one in serving
            ),
        )
