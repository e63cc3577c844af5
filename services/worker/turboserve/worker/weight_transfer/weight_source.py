"""Send this worker's weights to workers that start, while its viewers can spare the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from turboserve import logs
from turboserve.worker.model.weight_manifest import WeightManifest, WeightShard
from turboserve.worker.model.weights import weight_memory
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import Channel, unexpected
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import LayoutMismatchError, PeerLostError, TransferProtocolError
from turboserve.worker.transfer.frames import (
    AskManifest,
    AskShard,
    Hello,
    NotNow,
    Open,
    ShardOffer,
    ShardTaken,
    WeightManifestText,
)
from turboserve.worker.transfer.link import Link, LocalPages, RemotePages
from turboserve.worker.transfer.network import LinkTable
from turboserve.worker.weight_transfer.manifest_text import to_text

FIRST_FRAME_S = 3.0
IDLE_S = 60.0
"""Longest time between two requests of a receiver, seconds."""
SHARD_S = 60.0
"""Longest time of one shard, seconds."""
SENDS_LIMIT = 2
"""Number of shards that are sent at once."""
RETRY_S = 0.5
"""Time after which a receiver that was put off may ask again, seconds."""

log = logs.get("weights")


def parts_of(shard: WeightShard, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The memory of a shard's pieces, in order: uint8 [n] each."""
    return [
        weight_memory(tensors[piece.tensor])[piece.offset : piece.offset + piece.size]
        for piece in shard.pieces
    ]


class WeightSource:
    """Serves one connection after authentication. Use it on the event loop's thread."""

    def __init__(
        self,
        manifest: WeightManifest,
        tensors: Mapping[str, Tensor],
        links: LinkTable,
        has_slack: Callable[[], bool],
    ) -> None:
        """`tensors`: the weights of `manifest`. `has_slack`: whether the viewers can spare the time of a
        shard."""
        self._manifest, self._tensors, self._links = manifest, tensors, links
        self._shards = manifest.shards()
        self._has_slack = has_slack
        self._sending = 0
        self.sent_bytes = 0

    async def serve(self, channel: Channel, opened: Open, keys: handshake.Keys) -> None:
        """Send what the receiver asks for until it closes the connection. Raises `TransferError`."""
        hello = await channel.receive(FIRST_FRAME_S)
        if not isinstance(hello, Hello):
            raise TransferProtocolError(f"{hello.type}: the first frame must be hello")
        on_host = all(tensor.device.type == "cpu" for tensor in self._tensors.values())
        connecting = Deadline(min(hello.limit_s, SHARD_S))
        link = await self._links.give(channel, hello, opened.worker, keys.link, on_host, connecting)
        try:
            while True:
                try:
                    request = await channel.receive(IDLE_S)
                except PeerLostError:
                    # A receiver that has everything closes the connection.
                    return
                match request:
                    case AskManifest(digest=digest):
                        await self._send_manifest(channel, digest)
                    case AskShard(shard=number):
                        await self._answer(channel, link, number)
                    case other:
                        raise unexpected(other)
        finally:
            link.close()

    async def _send_manifest(self, channel: Channel, digest: str) -> None:
        if digest != self._manifest.digest:
            raise LayoutMismatchError(f"weights: {digest}, {self._manifest.digest} are loaded here")
        await channel.send(WeightManifestText(text=to_text(self._manifest)), SHARD_S)

    async def _answer(self, channel: Channel, link: Link, number: int) -> None:
        if number >= len(self._shards):
            raise TransferProtocolError(f"shard: {number}, there are {len(self._shards)}")
        if self._sending >= SENDS_LIMIT or not self._has_slack():
            await channel.send(NotNow(retry_s=RETRY_S), SHARD_S)
            return
        self._sending += 1
        try:
            await self._send(channel, link, self._shards[number])
        finally:
            self._sending -= 1

    async def _send(self, channel: Channel, link: Link, shard: WeightShard) -> None:
        deadline, everything = Deadline(SHARD_S), range(1)
        memory = LocalPages([parts_of(shard, self._tensors)])
        offer = await self._links.blocking(lambda: link.offer(memory, everything, deadline), deadline, link)
        self.sent_bytes += shard.size
        size = memory.size(everything)
        sent = ShardOffer(shard=shard.number, size=size, offer=offer, sent_bytes=self.sent_bytes)
        await channel.send(sent, deadline.left())
        await self._links.blocking(
            lambda: link.transfer("weights", memory, RemotePages(), everything, deadline), deadline, link
        )
        taken = await channel.receive(deadline.left())
        if not isinstance(taken, ShardTaken) or taken.shard != shard.number:
            raise unexpected(taken)
        link.settle()
