"""How the two ends of a connection make its links. A connection without links carries payloads itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from turboserve.worker.remote_decoding.frames import DecodeChannel, TensorSpec
from turboserve.worker.remote_decoding.payload_links import PayloadLinks
from turboserve.worker.transfer.channel import unexpected
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import DigestMismatchError, TransferError, TransferProtocolError
from turboserve.worker.transfer.frames import Hello, Welcome
from turboserve.worker.transfer.link import Link
from turboserve.worker.transfer.links import Links

LINK_S = 15.0
"""Longest time until both links of a connection are made, seconds. No chunk waits for it."""
PROBE = bytes(range(64))
"""The first payload over each link. A link that does not work fails before a chunk needs it."""


def offered(table: Links | None, peer: str, backends: Sequence[str]) -> Hello | None:
    """What a worker says of its links to `peer`. None: it has none of these backends."""
    if table is None or not backends:
        return None
    return table.hello(peer, LINK_S).model_copy(update={"backends": tuple(backends)})


async def make_links(
    table: Links,
    channel: DecodeChannel,
    theirs: Hello,
    peer: str,
    key: bytes,
    *,
    first: bool,
    failed: Callable[[str], object] = lambda _: None,
) -> None:
    """Make both links of a connection, and send a payload over each.

    Args:
        theirs: What the other end has said. Both ends have the same backends.
        peer: The other end, as this one names it.
        key: Key of the MACs on new links (`handshake.Keys.link`).
        first: Whether the link from this end to the other one is made first.
        failed: Called with the backend that could not be used.

    Raises:
        TransferError: Nothing of the links is left. The connection cannot be used.
    """
    if not theirs.backends:
        raise TransferProtocolError("links: no backend")
    deadline, made, backend = Deadline(LINK_S), dict[bool, Link](), theirs.backends[0]
    try:
        for gives in (first, not first):
            if gives:
                made[gives] = await table.give(channel, theirs, peer, key, True, deadline)
                continue
            welcome = await channel.receive(deadline.left())
            if not isinstance(welcome, Welcome):
                raise unexpected(welcome)
            backend = welcome.backend
            made[gives] = await table.take(channel, welcome, peer, key, deadline)
        channel.links = PayloadLinks(table, made[True], made[False])
        probe = torch.frombuffer(bytearray(PROBE), dtype=torch.uint8)
        for gives in (first, not first):
            if gives:
                await channel.post_linked((probe,), deadline.left())
                continue
            [found] = await channel.payloads([(TensorSpec.of(probe), tuple(probe.shape))], deadline.left())
            if not torch.equal(found, probe):
                raise DigestMismatchError(bytes(found.tolist()).hex(), PROBE.hex())
    except BaseException as error:
        for link in made.values():
            link.close()
        if isinstance(error, TransferError):
            failed(backend)
        raise
