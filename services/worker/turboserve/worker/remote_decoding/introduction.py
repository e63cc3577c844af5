"""The beginning of a connection to a decode worker or a text worker."""

from __future__ import annotations

from turboserve.worker.remote_decoding.frames import DecodeChannel, DecodeHello, DecodeWelcome
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import unexpected
from turboserve.worker.transfer.frames import Open


async def introduce(
    channel: DecodeChannel, purpose: str, worker: str, hello: DecodeHello, key: bytes, limit_s: float
) -> tuple[DecodeWelcome, handshake.Keys]:
    """Prove the key, and say what this worker has. Returns the answer, and the keys of the connection.

    `purpose`: what is asked for there. `worker`: id of this one. `limit_s`: limit of each answer, seconds.
    Raises `TransferError`. The channel is aborted then.
    """
    opened = Open(session=purpose, migration=0, worker=worker, nonce=handshake.new_nonce())
    try:
        keys = await handshake.authenticate(channel, opened, key, limit_s)
        await channel.post(hello, (), limit_s)
        welcome = await channel.next(limit_s)
        if not isinstance(welcome, DecodeWelcome):
            raise unexpected(welcome)
    except BaseException:
        channel.abort()
        raise
    return welcome, keys
