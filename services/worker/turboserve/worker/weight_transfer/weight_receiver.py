"""Get the weights of a starting worker from other workers, shard by shard, as `TransferPlan` says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from turboserve import logs
from turboserve.contracts.weights import WeightHolder
from turboserve.worker.model.weight_manifest import WeightManifest, WeightManifestError, WeightShard
from turboserve.worker.model.weights import named_weights, piece_digest
from turboserve.worker.replicas.weight_filler import WeightsUnavailableError
from turboserve.worker.transfer.channel import ByteReader, ByteWriter
from turboserve.worker.transfer.errors import TransferError
from turboserve.worker.transfer.network import LinkTable
from turboserve.worker.weight_transfer.plan import TransferPlan
from turboserve.worker.weight_transfer.plan_messages import (
    CancelShard,
    PlanCommand,
    PlanEvent,
    PlanLimits,
    ReadFromDisk,
    SendShard,
    ShardFailed,
    ShardVerified,
    SlackChanged,
    TimePassed,
    WeightsComplete,
    WorkerJoined,
    WorkerLost,
)
from turboserve.worker.weight_transfer.source_connection import PostponedError, SourceConnection
from turboserve.worker.weight_transfer.weight_source import parts_of

LIMITS = PlanLimits(sends=1, receives=2)
"""A connection carries one shard at a time."""
TICK_S = 1.0
SELF = "self"
"""The receiving worker's name in its own plan."""

log = logs.get("weights")
Connect = Callable[[str, int], Awaitable[tuple[ByteReader, ByteWriter]]]


@dataclass(frozen=True)
class WeightGrant:
    """What the state store answers to a worker that looks for weights."""

    grant: str
    key: bytes
    holders: Sequence[WeightHolder]


class WeightReceiver:
    """Gets one model's weights. Use it on the event loop's thread."""

    def __init__(
        self, worker: str, grant: WeightGrant, host: str, links: LinkTable, connect: Connect
    ) -> None:
        """`host`: see `LoadReport.host`."""
        self._worker, self._grant, self._host = worker, grant, host
        self._links, self._connect = links, connect
        self._events: asyncio.Queue[PlanEvent] = asyncio.Queue()
        self._sources: dict[str, SourceConnection] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._later: set[asyncio.Task[None]] = set()
        self.received_bytes: dict[str, int] = {}
        """Verified bytes by source."""

    async def fill(self, networks: Mapping[str, nn.Module], details: str, digest: str) -> WeightManifest:
        """Overwrite the weights of `networks` by those of the manifest with this digest.

        Every byte is verified. Raises `WeightsUnavailableError`; nothing writes to the weights any more.
        """
        tensors = named_weights(networks)
        try:
            manifest = await self._open(digest)
            check_layout(manifest, tensors, details)
            await self._fetch(manifest.shards(), tensors)
        except WeightManifestError as error:
            raise WeightsUnavailableError(str(error)) from error
        finally:
            await self._close()
        return manifest

    async def _open(self, digest: str) -> WeightManifest:
        """Connect to all holders. Returns the manifest, which is the same at all that stay."""
        opening = [self._open_source(holder, digest) for holder in self._grant.holders]
        found = [manifest for manifest in await asyncio.gather(*opening) if manifest is not None]
        if not found:
            raise WeightsUnavailableError(
                f"no worker has the weights {digest}, of {len(opening)} that were asked"
            )
        return found[0]

    async def _open_source(self, holder: WeightHolder, digest: str) -> WeightManifest | None:
        try:
            source = await SourceConnection.open(
                holder, self._worker, self._grant.grant, self._grant.key, self._links, self._connect
            )
            try:
                manifest = await source.manifest(digest)
            except BaseException:
                await source.close()
                raise
        except (TransferError, WeightManifestError) as error:
            log.info("worker sends no weights", source=holder.worker, error=str(error))
            return None
        self._sources[holder.worker] = source
        return manifest

    async def _fetch(self, shards: Sequence[WeightShard], tensors: Mapping[str, Tensor]) -> None:
        plan = TransferPlan([shard.size for shard in shards], LIMITS)
        everything = range(len(shards))
        for name, source in self._sources.items():
            plan.handle(WorkerJoined(name, source.host, everything), time.monotonic())
        event: PlanEvent = WorkerJoined(SELF, self._host, receives=True)
        while True:
            for command in plan.handle(event, time.monotonic()):
                if isinstance(command, WeightsComplete):
                    return
                self._carry_out(command, shards, tensors)
            try:
                async with asyncio.timeout(TICK_S):
                    event = await self._events.get()
            except TimeoutError:
                event = TimePassed()

    def _carry_out(
        self, command: PlanCommand, shards: Sequence[WeightShard], tensors: Mapping[str, Tensor]
    ) -> None:
        match command:
            case SendShard(source=source, shard=number):
                shard = shards[number]
                fetching = self._fetch_shard(self._sources[source], source, shard, parts_of(shard, tensors))
                self._tasks[source, number] = asyncio.create_task(fetching)
            case CancelShard(source=source, shard=number):
                # It stays in the table: `_close` waits until its thread writes nothing any more.
                self._tasks[source, number].cancel()
            case ReadFromDisk(shard=number):
                raise WeightsUnavailableError(f"no worker sends shard {number} of {len(shards)}")

    async def _fetch_shard(
        self, connection: SourceConnection, source: str, shard: WeightShard, parts: list[Tensor]
    ) -> None:
        try:
            await connection.fetch(shard.number, parts)
            verified = await connection.blocking(lambda: _verified(shard, parts))
        except PostponedError as error:
            self._events.put_nowait(SlackChanged(source, 0))
            self._events.put_nowait(ShardFailed(SELF, shard.number, "postponed"))
            later = asyncio.create_task(self._ask_again(source, error.retry_s))
            self._later.add(later)
            later.add_done_callback(self._later.discard)
            return
        except TransferError as error:
            # A link or a connection that has failed is not used again.
            log.warning("source of weights lost", source=source, error=str(error))
            self._events.put_nowait(WorkerLost(source))
            return
        except Exception:
            # The plan waits for the end of every transfer.
            log.exception("source of weights lost", source=source)
            self._events.put_nowait(WorkerLost(source))
            return
        if verified:
            self.received_bytes[source] = self.received_bytes.get(source, 0) + shard.size
            self._events.put_nowait(ShardVerified(SELF, shard.number))
        else:
            log.warning("weights with another digest", source=source, shard=shard.number)
            self._events.put_nowait(ShardFailed(SELF, shard.number, "corrupt"))

    async def _ask_again(self, source: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._events.put_nowait(SlackChanged(source, LIMITS.sends))

    async def _close(self) -> None:
        ending = [*self._tasks.values(), *self._later]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*(source.close() for source in self._sources.values()))
        self._sources.clear()


def check_layout(manifest: WeightManifest, tensors: Mapping[str, Tensor], details: str) -> None:
    """Check that a manifest is of these tensors. Raises `WeightManifestError`, which names the tensor."""
    if manifest.details != details:
        raise WeightManifestError("details: those of the model's files are different")
    theirs = {one.name: (one.dtype, one.shape) for one in manifest.tensors}
    for name, tensor in tensors.items():
        ours = str(tensor.dtype), tuple(tensor.shape)
        if theirs.get(name) != ours:
            raise WeightManifestError(f"tensor {name}: {theirs.get(name)}, need {ours}")
        if not tensor.is_contiguous():
            raise WeightManifestError(f"tensor {name}: not contiguous in memory")
    if extra := sorted(theirs.keys() - tensors.keys()):
        raise WeightManifestError(f"tensor {extra[0]}: not one of the model's")


def _verified(shard: WeightShard, parts: Sequence[Tensor]) -> bool:
    return all(piece_digest(part) == piece.digest for piece, part in zip(shard.pieces, parts, strict=True))
