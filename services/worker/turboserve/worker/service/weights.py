"""Weights between workers in the worker's shell: what a starting worker gets, and what a ready one sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError

from cachetools import TTLCache
from torch import nn

from turboserve import logs
from turboserve.bus import Bus
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.weights import FindWeights, WeightKey
from turboserve.subjects import FIND_WEIGHTS, WEIGHTS
from turboserve.worker import metrics
from turboserve.worker.model.weight_manifest import WeightManifest, WeightManifestError
from turboserve.worker.replicas.weight_filler import WeightsUnavailableError
from turboserve.worker.service.ports import Platform, StoredWeights
from turboserve.worker.service.worker import Worker
from turboserve.worker.settings import Settings
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.errors import MigrationNotOfferedError, TransferError
from turboserve.worker.transfer.frames import Open
from turboserve.worker.weight_transfer.weight_receiver import WeightGrant, WeightReceiver
from turboserve.worker.weight_transfer.weight_source import WeightSource

GRANTS_LIMIT = 64
GRANT_S = 600.0
"""Time for which a key admits its receiver, seconds."""
LEAST_CREDIT_S = 1.0
"""Credit of a session with which a shard may be sent whatever its lead, seconds."""
LEAST_CREDIT_SHARE = 1 / 3
"""Credit of a session with which a shard may be sent, as a share of its lead."""

log = logs.get("weights")


class PeerWeights:
    """See `WeightFiller`: brings the weights that the state store finds at other workers."""

    def __init__(self, worker: str, settings: Settings, bus: Bus, platform: Platform) -> None:
        """Call it on the event loop on which the transfer runs."""
        self._worker, self._settings, self._bus, self._platform = worker, settings, bus, platform
        self._loop = asyncio.get_running_loop()

    def fill(self, networks: Mapping[str, nn.Module], details: str) -> WeightManifest:
        """See `WeightFiller.fill`. Call it on another thread than the event loop's."""
        filling = asyncio.run_coroutine_threadsafe(self._fill(networks, details), self._loop)
        try:
            return filling.result()
        except (WeightsUnavailableError, CancelledError):
            raise
        except (TurboServeError, TransferError, OSError) as error:
            raise WeightsUnavailableError(repr(error)) from error
        except Exception as error:
            log.exception("weights not received")
            raise WeightsUnavailableError(repr(error)) from error

    async def _fill(self, networks: Mapping[str, nn.Module], details: str) -> WeightManifest:
        settings = self._settings
        assert settings.weights_digest is not None
        found = await self._bus.call(FIND_WEIGHTS, FindWeights(worker=self._worker, model=settings.model))
        key = bytes.fromhex(found.key.get_secret_value())
        network = self._platform.weight_network()
        try:
            receiver = WeightReceiver(
                self._worker,
                WeightGrant(found.grant, key, found.holders),
                network.machine,
                network.links,
                network.connect,
            )
            manifest = await receiver.fill(networks, details, settings.weights_digest)
        finally:
            network.links.close()
        metrics.weights_received.add(manifest.size)
        log.info("weights received", bytes=manifest.size, sources=receiver.received_bytes)
        return manifest


class WeightServer:
    """See `SideTransfers`: sends this worker's weights to receivers that the state store has named."""

    def __init__(self, source: WeightSource, now: Callable[[], float]) -> None:
        """`now`: monotonic seconds."""
        self._source = source
        self._grants: TTLCache[str, WeightKey] = TTLCache(GRANTS_LIMIT, GRANT_S, now)

    async def granted(self, message: WeightKey, _: bytes) -> None:
        """The state store has given a receiver the key."""
        self._grants[message.grant] = message

    def key(self, grant: str) -> bytes | None:
        """See `SideTransfers.key`."""
        found = self._grants.get(grant)
        return None if found is None else bytes.fromhex(found.key.get_secret_value())

    async def serve(self, channel: Channel, opened: Open, keys: handshake.Keys) -> None:
        """See `SideTransfers.serve`."""
        found = self._grants.get(opened.session)
        if found is None or found.receiver != opened.worker:
            raise MigrationNotOfferedError(f"weights: {opened.session} is not of {opened.worker}")
        log.info("worker gets weights", receiver=opened.worker)
        await self._source.serve(channel, opened, keys)


def least_credit_s(lead_s: float) -> float:
    """Credit that a session with this lead has at least while its worker sends a shard, seconds.

    A session begins a chunk when it has its lead, and has its least credit when the chunk is done: the lead,
    less the times of two chunks. So a third of the lead is there whenever a chunk takes no more than a third
    of it. A fixed credit would never be there with a lead below it.
    """
    return min(LEAST_CREDIT_S, LEAST_CREDIT_SHARE * lead_s)


async def send_weights(worker: Worker, weights: StoredWeights, bus: Bus, now: Callable[[], float]) -> None:
    """Send a worker's weights to others from the time at which they ask. Call it before the worker is ready:
    a key comes at any time from then on."""

    def least_s(session: str) -> float:
        entry = worker.table.entries.get(session)
        wanted_s = None if entry is None else entry.record.max_lead_s
        default_s = worker.engine.options.max_lead_s
        return least_credit_s(worker.engine.pacing.lead(default_s if wanted_s is None else wanted_s))

    def has_slack() -> bool:
        return worker.slack.all_have(least_s, now())

    try:
        source = WeightSource(weights.manifest, weights.tensors, worker.migrations.links, has_slack)
    except WeightManifestError as error:
        log.warning("other workers cannot have the weights of this one", reason=str(error))
        return
    server = WeightServer(source, now)
    worker.migrations.source.side_transfers = server
    await bus.subscribe(WEIGHTS, worker.id, server.granted)
