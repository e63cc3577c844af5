"""What is said on the control channel: JSON frames behind a length, each checked before it is believed."""

from __future__ import annotations

import asyncio
import struct
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from turboserve.contracts.base import Id
from turboserve.worker.transfer.errors import DeadlinePassed, PeerLost, ProtocolBroken

FRAME_LIMIT = 4 << 20
"""Bytes of one frame: a round over 10,000 pages takes a quarter of it."""
PAGES_LIMIT = 16_384
VERSION = 1
_LENGTH = struct.Struct(">I")


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Hello(_Frame):
    """target → source, first of all: give me this session, as your row says."""

    type: Literal["hello"] = "hello"
    version: int = VERSION
    session: Id
    move: int = Field(ge=0)
    worker: Id
    """The target."""
    model: str = Field(max_length=64)
    """Fingerprint of its model's configuration."""
    backends: tuple[str, ...] = Field(max_length=16)
    """Those it has, the one it likes best first."""
    warm: tuple[str, ...] = Field(default=(), max_length=64)
    """Names of its links to this source that are free."""
    machine: str = Field(default="", max_length=128)
    """See `shm.machine`."""
    limit_s: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """The target gives up after this long."""
    device: str = Field(default="cpu", max_length=16)


class Welcome(_Frame):
    """source → target: over this link."""

    type: Literal["welcome"] = "welcome"
    backend: str
    link: Id
    warm: bool = False
    """One that both have already; else both make it now."""
    store: tuple[str, int] | None = None
    """Where the source serves the rendezvous of a group of two."""


class Refuse(_Frame):
    """either way: no, and why; the connection ends."""

    type: Literal["refuse"] = "refuse"
    code: str = Field(max_length=64)
    detail: str = Field(max_length=2_000)


class PageSpec(_Frame):
    """One page of a round."""

    name: str = Field(max_length=160)
    size: int = Field(ge=0)
    dtype: str = ""
    shape: tuple[int, ...] = Field(default=(), max_length=8)


class Round(_Frame):
    """source → target: these pages come next, in this order."""

    type: Literal["round"] = "round"
    number: int
    pages: tuple[PageSpec, ...] = Field(max_length=PAGES_LIMIT)
    offer: dict[str, Any] = {}
    """What the backend says of them (`Link.offer`)."""


class Taken(_Frame):
    """target → source: the round's pages are here."""

    type: Literal["taken"] = "taken"
    number: int
    size: int


class Wait(_Frame):
    """source → target: I live, and am not done yet: with waiting for the chunk boundary, or with hashing."""

    type: Literal["wait"] = "wait"


class Seal(_Frame):
    """source → target: that was all; the session stands still, and the log has all its chunks."""

    type: Literal["seal"] = "seal"
    header: dict[str, Any]
    pages: tuple[str, ...] = Field(max_length=PAGES_LIMIT)
    """All pages of the state: what came in earlier rounds and is not among them is dropped."""
    digest: str = Field(max_length=128)


class Verified(_Frame):
    """target → source: the state is here, bit for bit."""

    type: Literal["verified"] = "verified"
    digest: str = Field(max_length=128)


Frame = Annotated[
    Hello | Welcome | Refuse | Round | Taken | Wait | Seal | Verified, Field(discriminator="type")
]
_FRAME: TypeAdapter[Frame] = TypeAdapter(Frame)


class Channel:
    """One connection. Raises `PeerLost`, `DeadlinePassed`, `ProtocolBroken`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def host(self) -> str:
        """This side's address."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def send(self, frame: Frame, seconds: float) -> None:
        """Raises `PeerLost` or `DeadlinePassed`."""
        data = frame.model_dump_json().encode()
        if len(data) > FRAME_LIMIT:
            raise ProtocolBroken(f"frame: {len(data)} bytes, at most {FRAME_LIMIT}")
        try:
            self._writer.write(_LENGTH.pack(len(data)) + data)
            # Not wait_for, here and below: before Python 3.12 it can swallow a cancellation.
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except TimeoutError:
            raise DeadlinePassed(f"{frame.type}: not taken within {seconds:.3g} s") from None
        except OSError as error:
            raise PeerLost(f"{frame.type}: {error}") from error

    async def receive(self, seconds: float) -> Frame:
        """The next frame."""
        try:
            async with asyncio.timeout(seconds):
                return await self._next()
        except TimeoutError:
            raise DeadlinePassed(f"nothing was said for {seconds:.3g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PeerLost("the other side has hung up") from error

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    async def _next(self) -> Frame:
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if size > FRAME_LIMIT:
            raise ProtocolBroken(f"frame: {size} bytes, at most {FRAME_LIMIT}")
        data = await self._reader.readexactly(size)
        try:
            return _FRAME.validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ProtocolBroken(f"frame: {where or 'text'}: {first['msg']}") from None
