"""Reads the whole chunk log from the broker: fence and chunks in their common order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress

import nats
from nats.js import api
from nats.js.errors import NotFoundError

from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.experiments.chaos.invariants import Logged, Owned
from turboserve.subjects import CHUNK, CHUNKS, OWN

FETCH = 200
ANSWER_S = 10.0


async def read(nats_url: str) -> dict[str, list[Owned | Logged]]:
    """Return session → its entries in the log's order. `nats_url` is of a user who may read all subjects."""
    client = await nats.connect(nats_url, connect_timeout=5)
    try:
        jetstream = client.jetstream(timeout=ANSWER_S)
        config = api.ConsumerConfig(ack_policy=api.AckPolicy.NONE, mem_storage=True)
        subscription = await jetstream.pull_subscribe("", stream=CHUNKS, config=config)
        left = (await jetstream.stream_info(CHUNKS)).state.messages
        found: dict[str, list[Owned | Logged]] = {}
        while left > 0:
            for message in await subscription.fetch(min(FETCH, left), timeout=ANSWER_S):
                left -= 1
                sequence, at = message.metadata.sequence.stream, message.metadata.timestamp.timestamp()
                if OWN.takes(message.subject):
                    own = Ownership.from_bytes(message.data)
                    found.setdefault(own.session, []).append(Owned(sequence, own.epoch, own.worker, at))
                elif CHUNK.takes(message.subject):
                    header = ChunkHeader.from_headers(message.headers or {})
                    digest = digest_of(message.data[header.init_bytes :])
                    found.setdefault(header.session, []).append(
                        Logged(sequence, header.index, header.epoch, header.worker, digest, at)
                    )
        return found
    finally:
        await client.close()


async def oldest(nats_url: str, sessions: Iterable[str]) -> dict[str, int]:
    """Return session → index of the oldest chunk in its log; sessions without a chunk are left out.

    Raises nats.errors.Error, OSError or TimeoutError if the broker does not answer.
    """
    client = await nats.connect(nats_url, connect_timeout=5, allow_reconnect=False)
    try:
        jetstream = client.jetstream(timeout=ANSWER_S)
        found: dict[str, int] = {}
        for session in sessions:
            with suppress(NotFoundError):
                message = await jetstream.get_msg(
                    CHUNKS, seq=1, subject=CHUNK.of(session), direct=True, next=True
                )
                found[session] = ChunkHeader.from_headers(message.headers or {}).index
        return found
    finally:
        await client.close()


def digest_of(fragment: bytes) -> str:
    return hashlib.sha256(fragment).hexdigest()[:24]
