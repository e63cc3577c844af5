"""A WebSocket client that follows no rules: frames byte by byte, and every way to violate the protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from tests.helpers.hostile import Hostile

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
PATIENCE_S = 120.0


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    last: bool = True,
    reserved: int = 0,
    masked: bool = True,
    length: int | None = None,
    wide: int | None = None,
) -> bytes:
    """Build one frame. `length` replaces the payload's own length; `wide` encodes it in 16 or 64 bits."""
    said = len(payload) if length is None else length
    head = bytes([(0x80 if last else 0) | (reserved << 4) | opcode])
    mask = 0x80 if masked else 0
    if wide == 64 or (wide is None and said > 0xFFFF):
        head += bytes([mask | 127]) + struct.pack(">Q", said)
    elif wide == 16 or said > 125:
        head += bytes([mask | 126]) + struct.pack(">H", said)
    else:
        head += bytes([mask | said])
    if not masked:
        return head + payload
    key = b"\x11\x22\x33\x44"
    repeated = key * (len(payload) // 4 + 1)
    return head + key + bytes(a ^ b for a, b in zip(payload, repeated, strict=False))


class RawSocket:
    """One connection after its handshake. Received data is discarded, or not read at all."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, reads: bool) -> None:
        self._reader, self._writer = reader, writer
        self._reading = asyncio.create_task(self._read()) if reads else None

    @classmethod
    async def open(cls, address: str, *, reads: bool = True) -> RawSocket:
        """Connect to `http://…` as a WebSocket. Raises AssertionError if that is refused."""
        parts = urlsplit(address)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 101"), head
        return cls(reader, writer, reads=reads)

    async def send(self, data: bytes) -> bool:
        """Send data. Returns False once the other side is gone."""
        try:
            self._writer.write(data)
            await asyncio.wait_for(self._writer.drain(), PATIENCE_S)
        except (OSError, TimeoutError):
            return False
        return self._reading is None or not self._reading.done()

    async def closed(self) -> None:
        """Wait until the other side has closed."""
        if self._reading is not None:
            await asyncio.wait_for(asyncio.shield(self._reading), PATIENCE_S)

    async def leave(self, *, abruptly: bool) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if abruptly:
            self._writer.transport.abort()
        self._writer.close()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), PATIENCE_S)

    async def _read(self) -> None:
        with suppress(OSError):
            while await self._reader.read(1 << 16):
                pass


def lawful(source: random.Random) -> bytes:
    """Return one or more valid frames."""
    ping = json.dumps({"type": "ping", "id": "p"}).encode()
    cut = source.randint(0, len(ping))
    return source.choice(
        (
            frame(PING, source.randbytes(source.randint(0, 125))),
            frame(PONG, source.randbytes(source.randint(0, 125))),
            frame(TEXT, ping),
            frame(TEXT, ping[:cut], last=False) + frame(PING) + frame(CONTINUATION, ping[cut:]),
            frame(TEXT, b"", last=False) + frame(CONTINUATION, b"", last=False) + frame(CONTINUATION, ping),
            b"".join(
                frame(TEXT if n == 0 else 0, ping[n : n + 1], last=n == len(ping) - 1)
                for n in range(len(ping))
            ),
        )
    )


def cut(text: bytes) -> bytes:
    """Return `text` as a message of two frames, cut after its first byte."""
    return frame(TEXT, text[:1], last=False) + frame(CONTINUATION, text[1:])


def breaches(source: random.Random) -> Iterator[Callable[[], bytes]]:
    """Yield each way to break the protocol, once."""
    payload = source.randbytes(source.randint(0, 60))
    for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15):
        yield partial(frame, opcode, payload)
    for reserved in (1, 2, 3, 4, 5, 6, 7):
        yield partial(frame, TEXT, b"{}", reserved=reserved)
    for opcode in (CLOSE, PING, PONG):
        yield partial(frame, opcode, b"x", last=False)
        yield partial(frame, opcode, b"x" * 126)
        yield partial(frame, opcode, b"x", reserved=1)
    yield lambda: frame(TEXT, b"{}", masked=False)
    yield lambda: frame(CONTINUATION, b"{}")
    yield lambda: frame(TEXT, b"{", last=False) + frame(TEXT, b"}")
    yield lambda: frame(TEXT, b"{", last=False) + frame(BINARY, b"}")
    yield lambda: frame(TEXT, b'{"type":"ping"}', wide=16)
    yield lambda: frame(TEXT, b'{"type":"ping"}', wide=64)
    for length in (2**20 + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1):
        yield partial(frame, TEXT, payload, length=length, wide=64)
    yield lambda: frame(TEXT, b"x" * 40_000, last=False) + 30 * frame(CONTINUATION, b"x" * 40_000, last=False)
    for text in (
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xf5\x80\x80\x80",
        b"\xc0\x80",
        b'{"type":"ping","id":"\xe2\x82"}',
    ):
        yield partial(frame, TEXT, text)
        yield partial(cut, text)
    for code in (0, 999, 1004, 1005, 1006, 1012, 1014, 1015, 1016, 2_000, 2_999, 5_000, 65_535):
        yield partial(frame, CLOSE, struct.pack(">H", code) + b"why")
    yield lambda: frame(CLOSE, b"\x03")
    yield lambda: frame(CLOSE, struct.pack(">H", 1000) + b"\xff\xff")
    yield lambda: frame(CLOSE, struct.pack(">H", 1000)) + frame(TEXT, b'{"type":"ping"}')
    yield lambda: 3 * frame(CLOSE, struct.pack(">H", 1000))
    yield lambda: frame(TEXT, b"{}")[:1]
    yield lambda: frame(TEXT, b'{"type":"ping"}')[:-4]
    yield lambda: source.randbytes(source.randint(1, 400))
    yield lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield lambda: b"\x16\x03\x01\x02\x00\x01\x00"


def message(hostile: Hostile, schema: dict[str, object]) -> bytes:
    """Return a text or binary frame with a changed message of the protocol, or without a message."""
    data = hostile.encoded(hostile.mutated(hostile.document(schema), most=2))[:60_000]
    return frame(hostile.random.choice((TEXT, TEXT, TEXT, BINARY)), data.decode(errors="replace").encode())
