"""The control channel: frames behind a length, and behind a MAC once both sides are authenticated.

    before    length (4 bytes, big endian), JSON
    after     length, JSON, MAC (32 bytes): HMAC-SHA256 over the frame's number in its direction and the JSON

A frame that was changed, left out, repeated, moved or taken from another connection fails its MAC.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from typing import Any, Protocol

from pydantic import ValidationError

from turboserve.worker.transfer.errors import (
    AuthenticationError,
    DeadlineExceededError,
    PeerLostError,
    TransferProtocolError,
)
from turboserve.worker.transfer.frames import FRAME, Frame

FRAME_LIMIT = 4 << 20
"""Bytes of one frame: a round over 10,000 pages takes a quarter of it."""
MAC_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class ByteReader(Protocol):
    """What is needed of `asyncio.StreamReader`."""

    async def readexactly(self, n: int, /) -> bytes: ...


class Connection(Protocol):
    """What is needed of a stream's transport."""

    def abort(self) -> None: ...


class ByteWriter(Protocol):
    """What is needed of `asyncio.StreamWriter`."""

    @property
    def transport(self) -> Connection: ...

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...

    def get_extra_info(self, name: str, /) -> Any: ...


class Channel:
    """One connection. Raises `PeerLostError`, `DeadlineExceededError`, `TransferProtocolError`,
    `AuthenticationError`."""

    def __init__(self, reader: ByteReader, writer: ByteWriter) -> None:
        self._reader, self._writer = reader, writer
        self._send_key: bytes | None = None
        self._receive_key: bytes | None = None
        self._sent = self._received = 0
        """Frames in each direction since the channel is protected."""

    @property
    def peer(self) -> str:
        """The other side's address; empty if it is gone already."""
        found = self._writer.get_extra_info("peername")
        return str(found[0]) if found else ""

    def protect(self, *, sends: bytes, receives: bytes) -> None:
        """From the next frame on, every frame in each direction carries a MAC under that direction's key."""
        self._send_key, self._receive_key = sends, receives

    async def send(self, frame: Frame, seconds: float) -> None:
        """Raises `PeerLostError` or `DeadlineExceededError`."""
        data = frame.model_dump_json().encode()
        if len(data) > FRAME_LIMIT:
            raise TransferProtocolError(f"frame: {len(data)} bytes, at most {FRAME_LIMIT}")
        mac = b""
        if self._send_key is not None:
            mac = _mac(self._send_key, self._sent, data)
            self._sent += 1
        try:
            self._writer.write(_LENGTH.pack(len(data)) + data + mac)
            # Not wait_for, here and below: before Python 3.12 it can swallow a cancellation.
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except TimeoutError:
            raise DeadlineExceededError(f"{frame.type}: not taken within {seconds:.3g} s") from None
        except OSError as error:
            raise PeerLostError(f"{frame.type}: {error}") from error

    async def receive(self, seconds: float, limit: int = FRAME_LIMIT) -> Frame:
        """The next frame, of at most `limit` bytes."""
        try:
            async with asyncio.timeout(seconds):
                return await self._next(limit)
        except TimeoutError:
            raise DeadlineExceededError(f"nothing was said for {seconds:.3g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PeerLostError("the other side has hung up") from error

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def abort(self) -> None:
        """Hang up at once; what was not sent yet is dropped."""
        self._writer.transport.abort()

    async def _next(self, limit: int) -> Frame:
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if size > limit:
            raise TransferProtocolError(f"frame: {size} bytes, at most {limit}")
        data = await self._reader.readexactly(size)
        if self._receive_key is not None:
            mac = await self._reader.readexactly(MAC_BYTES)
            if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, data)):
                raise AuthenticationError(f"frame: number {self._received} fails its MAC")
            self._received += 1
        try:
            return FRAME.validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise TransferProtocolError(f"frame: {where or 'text'}: {first['msg']}") from None


def _mac(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + data, "sha256")
