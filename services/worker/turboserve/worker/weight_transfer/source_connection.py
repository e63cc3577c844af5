"""A starting worker's connection to one worker that holds the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from torch import Tensor

from turboserve.contracts.weights import WeightHolder
from turboserve.worker.model.weight_manifest import PIECE_BYTES, WeightManifest, WeightManifestError
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, Channel, unexpected
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    AuthenticationError,
    DeadlineExceededError,
    LayoutMismatchError,
    PeerLostError,
)
from turboserve.worker.transfer.frames import (
    AskManifest,
    AskShard,
    NotNow,
    Open,
    ShardOffer,
    ShardTaken,
    WeightManifestText,
    Welcome,
)
from turboserve.worker.transfer.link import Link, LocalPages, RemotePages
from turboserve.worker.transfer.network import LinkTable
from turboserve.worker.transfer.target import parse_address
from turboserve.worker.weight_transfer.manifest_text import from_text

CONNECT_S = 5.0
ANSWER_S = 10.0
"""Longest time to an answer that needs no transfer, seconds."""
SHARD_S = 60.0
"""Longest time of one shard, seconds."""
ADMISSIONS = 10
"""Attempts to be admitted: the source's news of the key may come after the receiver's."""
ADMIT_AGAIN_S = 0.2
T = TypeVar("T")


class PostponedError(Exception):
    """The source sends nothing now. Ask again after `retry_s`."""

    def __init__(self, retry_s: float) -> None:
        super().__init__(f"the source sends nothing for {retry_s:g} s")
        self.retry_s = retry_s


class SourceConnection:
    """One authenticated connection with its link. After a `TransferError` only `close` may be called."""

    def __init__(self, host: str, channel: Channel, link: Link, links: LinkTable) -> None:
        self.host = host
        self._channel, self._link, self._links = channel, link, links
        self._turn = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        holder: WeightHolder,
        worker: str,
        grant: str,
        key: bytes,
        links: LinkTable,
        connect: Callable[[str, int], Awaitable[tuple[ByteReader, ByteWriter]]],
    ) -> SourceConnection:
        """Connect to a holder. `worker`: id of the receiver. Raises `TransferError`."""
        if not holder.addresses:
            raise PeerLostError(f"worker {holder.worker}: it has no transfer address")
        for attempt in range(1, ADMISSIONS + 1):
            try:
                return await cls._open(holder, worker, grant, key, links, connect)
            except AuthenticationError:
                if attempt == ADMISSIONS:
                    raise
            await asyncio.sleep(ADMIT_AGAIN_S)
        raise AssertionError

    @classmethod
    async def _open(
        cls,
        holder: WeightHolder,
        worker: str,
        grant: str,
        key: bytes,
        links: LinkTable,
        connect: Callable[[str, int], Awaitable[tuple[ByteReader, ByteWriter]]],
    ) -> SourceConnection:
        address = holder.addresses[0]
        deadline = Deadline(CONNECT_S)
        try:
            async with asyncio.timeout(deadline.left()):
                reader, writer = await connect(*parse_address(address))
        except TimeoutError:
            raise DeadlineExceededError(f"{address}: no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise PeerLostError(f"{address}: {error}") from error
        channel = Channel(reader, writer)
        try:
            opened = Open(session=grant, migration=0, worker=worker, nonce=handshake.new_nonce())
            keys = await handshake.authenticate(channel, opened, key, deadline.left())
            await channel.send(links.hello(address, SHARD_S), deadline.left())
            welcome = await channel.receive(deadline.left())
            if not isinstance(welcome, Welcome):
                raise unexpected(welcome)
            link = await links.take(channel, welcome, address, keys.link, deadline)
        except BaseException:
            channel.abort()
            raise
        return cls(holder.host, channel, link, links)

    async def manifest(self, digest: str) -> WeightManifest:
        """The source's manifest, which has this digest. Raises `TransferError` and `WeightManifestError`."""
        await self._channel.send(AskManifest(digest=digest), ANSWER_S)
        answer = await self._channel.receive(ANSWER_S)
        if not isinstance(answer, WeightManifestText):
            raise unexpected(answer)
        manifest = from_text(answer.text, digest)
        # The digest does not cover it: with another size, the bytes of all sources would seem corrupt.
        if manifest.piece_bytes != PIECE_BYTES:
            raise WeightManifestError(f"piece_bytes: {manifest.piece_bytes}, need {PIECE_BYTES}")
        return manifest

    async def fetch(self, shard: int, parts: Sequence[Tensor]) -> None:
        """Receive a shard into `parts`. Raises `PostponedError` and `TransferError`.

        The bytes are not verified. After an error or a cancellation, nothing is written to `parts` any more.
        """
        async with self._turn:
            deadline = Deadline(SHARD_S)
            await self._channel.send(AskShard(shard=shard), deadline.left())
            offer = await self._channel.receive(deadline.left(ANSWER_S))
            if isinstance(offer, NotNow):
                raise PostponedError(offer.retry_s)
            if not isinstance(offer, ShardOffer) or offer.shard != shard:
                raise unexpected(offer)
            memory, pages = LocalPages([parts]), RemotePages(offer.offer)
            size = memory.size(range(1))
            if offer.size is not None and offer.size != size:
                # gloo ends the process that receives a piece of another length than it expects.
                raise LayoutMismatchError(f"shard {shard}: {offer.size} bytes, need {size}")
            await self._links.blocking(
                lambda: self._link.transfer("weights", pages, memory, range(1), deadline),
                deadline,
                self._link,
            )
            await self._channel.send(ShardTaken(shard=shard), deadline.left())

    async def blocking(self, call: Callable[[], T]) -> T:
        """Run `call` on a thread of the transfers."""
        return await self._links.blocking(call, Deadline(SHARD_S))

    async def close(self) -> None:
        """Close the link and the connection."""
        self._link.close()
        await self._channel.close()
