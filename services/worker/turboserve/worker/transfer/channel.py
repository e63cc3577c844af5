"""The control channel: length-prefixed frames, each with a MAC once both sides are authenticated.

    before    length (4 bytes, big endian), JSON
    after     length, JSON, MAC (32 bytes): HMAC-SHA256 over the frame's number in its direction and the JSON

A frame that was changed, left out, repeated, moved or taken from another connection fails its MAC.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Protocol

from pydantic import TypeAdapter, ValidationError

from turboserve import logs
from turboserve.worker.transfer.errors import (
    AuthenticationError,
    DeadlineExceededError,
    PeerLostError,
    TransferError,
    TransferProtocolError,
    error_of,
)
from turboserve.worker.transfer.frames import FRAME, Frame, Refuse

FRAME_LIMIT = 4 << 20
"""Largest frame, bytes. A round over 10,000 pages takes a quarter of it."""
MAC_BYTES = 32
log = logs.get("transfer")
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class ByteReader(Protocol):
    """The part of `asyncio.StreamReader` that a channel uses."""

    async def readexactly(self, n: int, /) -> bytes: ...


class Connection(Protocol):
    """The part of a stream's transport that a channel uses."""

    def abort(self) -> None: ...


class ByteWriter(Protocol):
    """The part of `asyncio.StreamWriter` that a channel uses."""

    @property
    def transport(self) -> Connection: ...

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...

    def get_extra_info(self, name: str, /) -> Any: ...


class SentFrame(Protocol):
    """A frame to send."""

    @property
    def type(self) -> str:
        """Name of the frame's type, for errors."""
        ...

    def model_dump_json(self) -> str:
        """The frame as JSON."""
        ...


class Channel:
    """One connection. Raises `PeerLostError`, `DeadlineExceededError`, `TransferProtocolError`,
    `AuthenticationError`."""

    frames: ClassVar[TypeAdapter[Any]] = FRAME
    """The frames that are received."""

    def __init__(self, reader: ByteReader, writer: ByteWriter) -> None:
        self._reader, self._writer = reader, writer
        self._send_key: bytes | None = None
        self._receive_key: bytes | None = None
        self._sent = self._received = 0
        """Frames sent and received since the channel was protected."""

    @property
    def peer(self) -> str:
        """The other side's address; empty if the connection is already closed."""
        found = self._writer.get_extra_info("peername")
        return str(found[0]) if found else ""

    def protect(self, *, sends: bytes, receives: bytes) -> None:
        """Protect every later frame in each direction with a MAC under that direction's key."""
        self._send_key, self._receive_key = sends, receives

    async def send(self, frame: Frame, seconds: float) -> None:
        """Send one frame. Raises `PeerLostError` or `DeadlineExceededError`."""
        await self._send(frame, seconds)

    async def _send(self, frame: SentFrame, seconds: float) -> None:
        data = frame.model_dump_json().encode()
        if len(data) > FRAME_LIMIT:
            raise TransferProtocolError(f"frame: {len(data)} bytes, at most {FRAME_LIMIT}")
        mac = b""
        if self._send_key is not None:
            mac = mac_of(self._send_key, self._sent, data)
            self._sent += 1
        try:
            self._writer.write(_LENGTH.pack(len(data)) + data + mac)
            # `wait_for` can swallow a cancellation before Python 3.12, here and below.
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except TimeoutError:
            raise DeadlineExceededError(f"{frame.type}: not taken within {seconds:.3g} s") from None
        except OSError as error:
            raise PeerLostError(f"{frame.type}: {error}") from error

    async def receive(self, seconds: float, limit: int = FRAME_LIMIT) -> Frame:
        """Receive the next frame, of at most `limit` bytes."""
        async with limited(seconds, "no message for"):
            return await self._next(limit)

    async def close(self) -> None:
        """Close the connection; abort it if that takes more than 1 s."""
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def abort(self) -> None:
        """Close the connection at once and drop unsent data."""
        self._writer.transport.abort()

    async def _next(self, limit: int) -> Frame:
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if size > limit:
            raise TransferProtocolError(f"frame: {size} bytes, at most {limit}")
        data = await self._reader.readexactly(size)
        if self._receive_key is not None:
            mac = await self._reader.readexactly(MAC_BYTES)
            if not hmac.compare_digest(mac, mac_of(self._receive_key, self._received, data)):
                raise AuthenticationError(f"frame: number {self._received} fails its MAC")
            self._received += 1
        try:
            frame: Frame = self.frames.validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise TransferProtocolError(f"frame: {where or 'text'}: {first['msg']}") from None
        return frame


def mac_of(key: bytes, number: int, data: bytes) -> bytes:
    """The MAC of the data with this number in its direction. Data of any size are not copied."""
    hasher = hmac.new(key, _NUMBER.pack(number), "sha256")
    hasher.update(data)
    return hasher.digest()


@asynccontextmanager
async def limited(seconds: float, late: str) -> AsyncIterator[None]:
    """Limit the body's time, and raise its errors as a channel's. `late`: begins the text of the time-out."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceededError(f"{late} {seconds:.3g} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise PeerLostError("the peer closed the connection") from error


async def refuse(channel: Channel, code: str, detail: str) -> None:
    """Send the peer the reason why the transfer ends, if the peer still listens."""
    try:
        await channel.send(Refuse(code=code, detail=detail[:2_000]), 1.0)
    except TransferError:
        log.debug("no peer left to refuse", code=code)


async def explained(channel: Channel, error: TransferError, seconds: float) -> TransferError:
    """Return why the other side has ended the transfer, if it says so within `seconds`; else `error`.

    It closes its end of the link first, which may be noticed before its reason arrives.
    """
    with suppress(TransferError, TimeoutError):
        async with asyncio.timeout(seconds):
            while not isinstance(frame := await channel.receive(seconds), Refuse):
                pass
            return error_of(frame.code, frame.detail)
    return error


def unexpected(frame: SentFrame) -> TransferError:
    """Return the error of a frame that must not come now: the peer's own reason if it refuses."""
    if isinstance(frame, Refuse):
        return error_of(frame.code, frame.detail)
    return TransferProtocolError(f"{frame.type}: not now")
