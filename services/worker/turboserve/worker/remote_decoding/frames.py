"""The frames between a worker and a decode worker or text worker: JSON with MACs, and payloads."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor

from turboserve.contracts.base import Id
from turboserve.worker.engine.streams import bytes_of
from turboserve.worker.remote_decoding.payload_links import PayloadLinks
from turboserve.worker.transfer.channel import MAC_BYTES, Channel, limited, mac_of, unexpected
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import AuthenticationError, TransferProtocolError
from turboserve.worker.transfer.frames import (
    Challenge,
    Denied,
    Hello,
    Linked,
    Open,
    Proof,
    Refuse,
    StoreEntry,
    Welcome,
)

PURPOSE = "decode"
"""Name of what is asked for, in the place of a migration's session in the handshake."""
TEXT_PURPOSE = "text"
"""As `PURPOSE`, for embeddings of prompts."""
PROMPT_LIMIT = 65_536
"""Maximum length of a prompt, characters: more than the API takes."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "uint8")}
LARGE_BYTES = 1 << 20
"""Payloads from this size are copied and authenticated on a thread: 14 MB take about 15 ms each. Smaller ones
pass over the connection: threads to wait for a link take more time than their copies."""
T = TypeVar("T")

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Sizes = Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 20)], ...], Field(max_length=5)]


class _DecodeFrame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TensorSpec(_DecodeFrame):
    """A tensor whose elements follow the frame as a payload."""

    dtype: str = Field(max_length=16)
    shape: Sizes

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The frame's part for a tensor."""
        return cls(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


class DecodeHello(_DecodeFrame):
    """worker → decode worker, the first frame after authentication."""

    type: Literal["decode_hello"] = "decode_hello"
    model: str = Field(max_length=64)
    """`state_fingerprint` of the worker's model: both must have the same weights."""
    capacity: int = Field(ge=1, le=1 << 20)
    """The worker's K, as far as it is not the decode workers that limit it."""
    link: Hello | None = None
    """How the worker can transfer payloads over links. None: not at all, or an earlier version."""


class DecodeWelcome(_DecodeFrame):
    """decode worker → worker: chunks may follow."""

    type: Literal["decode_welcome"] = "decode_welcome"
    worker: Id
    """Id of the decode worker."""
    link: Hello | None = None
    """With it, both ends make links now, of these backends. None: payloads pass over the connection."""


class AskAllotment(_DecodeFrame):
    """worker → decode worker, every 2 s: asks for the worker's allotment, and shows that the worker runs."""

    type: Literal["ask_allotment"] = "ask_allotment"


class Allotment(_DecodeFrame):
    """decode worker → worker: answers `AskAllotment`."""

    type: Literal["allotment"] = "allotment"
    sessions: int = Field(ge=0, le=1 << 20)
    """Sessions of this worker whose chunks are decoded in real time."""
    carried: int = Field(default=0, ge=0, le=1 << 20)
    """Sessions of all workers whose chunks are decoded in real time. 0: none, or an earlier version."""
    used: int = Field(default=0, ge=0, le=1 << 20)
    """Sessions of all workers of which it has decoded a chunk within `SESSION_S`."""


class DecodeChunk(_DecodeFrame):
    """worker → decode worker: decode these latents. Their payload follows, then that of the context."""

    type: Literal["decode_chunk"] = "decode_chunk"
    number: int = Field(ge=0, lt=1 << 63)
    """Number of the question within its connection."""
    session: Id
    index: int = Field(ge=0)
    base: Digest | None
    """See `DecodeJob.base`."""
    digest: Digest
    """See `DecodeJob.digest`."""
    latents: TensorSpec
    context: TensorSpec | None = None
    """Latents of the chunks before, [chunks, F, C, h, w]. None: they do not come along."""


class ChunkFrames(_DecodeFrame):
    """decode worker → worker: the frames follow as a payload."""

    type: Literal["chunk_frames"] = "chunk_frames"
    number: int
    frames: TensorSpec


class NoCache(_DecodeFrame):
    """decode worker → worker: the session's cache is not here. Ask again with the context."""

    type: Literal["no_cache"] = "no_cache"
    number: int


class NoRoom(_DecodeFrame):
    """decode worker → worker: there is no room for the session's cache."""

    type: Literal["no_room"] = "no_room"
    number: int


class TensorsFollow(_DecodeFrame):
    """Either direction, on a connection with links: the payloads of the frame before come now."""

    type: Literal["tensors_follow"] = "tensors_follow"
    offer: dict[str, Any] | None = None
    """The backend's description of the memory (`Link.offer`). None: they come over the connection."""
    digest: str = Field(default="", max_length=128)
    """See `Announced.digest`."""


class EncodePrompt(_DecodeFrame):
    """worker → text worker: encode this prompt."""

    type: Literal["encode_prompt"] = "encode_prompt"
    number: int = Field(ge=0, lt=1 << 63)
    """Number of the question within its connection."""
    prompt: str = Field(max_length=PROMPT_LIMIT)


class PromptEmbedding(_DecodeFrame):
    """text worker → worker: the embedding follows as a payload."""

    type: Literal["prompt_embedding"] = "prompt_embedding"
    number: int
    embedding: TensorSpec


DecodeFrame = Annotated[
    Open
    | Challenge
    | Proof
    | Denied
    | Refuse
    | DecodeHello
    | DecodeWelcome
    | AskAllotment
    | Allotment
    | DecodeChunk
    | ChunkFrames
    | NoCache
    | NoRoom
    | Hello
    | Welcome
    | StoreEntry
    | Linked
    | TensorsFollow
    | EncodePrompt
    | PromptEmbedding,
    Field(discriminator="type"),
]


class DecodeChannel(Channel):
    """A connection between a worker and a decode worker: frames, and payloads between them."""

    frames: ClassVar[TypeAdapter[Any]] = TypeAdapter(DecodeFrame)
    links: PayloadLinks | None = None
    """Over which payloads pass. None: over the connection."""

    @property
    def left(self) -> bool:
        """Whether the peer has closed the connection, as far as is known without reading."""
        reader = self._reader
        return isinstance(reader, asyncio.StreamReader) and (
            reader.at_eof() or reader.exception() is not None
        )

    def abort(self) -> None:
        """See `Channel.abort`. Closes the links as well."""
        if self.links is not None:
            self.links.close()
        super().abort()

    async def close(self) -> None:
        """See `Channel.close`. Closes the links as well."""
        if self.links is not None:
            self.links.close()
        await super().close()

    async def post(self, frame: DecodeFrame, payloads: tuple[Tensor, ...], seconds: float) -> None:
        """Send one frame and its payloads. Raises the errors of `Channel.send` and of the links."""
        async with limited(seconds, "payload: not within"):
            await self._send(frame, seconds)
            if payloads and self.links is not None:
                if sum(tensor.nbytes for tensor in payloads) >= LARGE_BYTES:
                    await self.post_linked(payloads, seconds)
                    return
                await self._send(TensorsFollow(), seconds)
            for tensor in payloads:
                data = await _beside(tensor.nbytes, partial(bytes_of, tensor))
                mac = await self._seal(data)
                self._writer.write(data)
                self._writer.write(mac)
                await self._writer.drain()

    async def post_linked(self, payloads: Sequence[Tensor], seconds: float) -> None:
        """Send payloads over the link. Raises `TransferError`."""
        assert self.links is not None
        deadline = Deadline(seconds)
        announced = await self.links.announce(payloads, deadline)
        await self._send(TensorsFollow(offer=dict(announced.offer), digest=announced.digest), seconds)
        if announced.left is not None:
            await self.links.send(announced.left, deadline)

    async def next(self, seconds: float) -> DecodeFrame:
        """Receive the next frame. Raises the errors of `Channel.receive`."""
        return cast(DecodeFrame, await self.receive(seconds))

    async def payload(self, spec: TensorSpec, shape: tuple[int, ...], seconds: float) -> Tensor:
        """Receive the payload of `spec`, which must have this shape. Raises the errors of `payloads`."""
        [found] = await self.payloads([(spec, shape)], seconds)
        return found

    async def payloads(
        self, wanted: Sequence[tuple[TensorSpec, tuple[int, ...]]], seconds: float
    ) -> list[Tensor]:
        """Receive all payloads of a frame, which must have these shapes.

        Raises the errors of `receive` and of the links.
        """
        for spec, shape in wanted:
            if spec.shape != shape or spec.dtype not in DTYPES:
                raise TransferProtocolError(f"payload: {spec.dtype} {spec.shape}, need {shape}")
        async with limited(seconds, "payload: not within"):
            follow = TensorsFollow() if self.links is None else await self.next(seconds)
            if not isinstance(follow, TensorsFollow):
                raise unexpected(follow)
            if self.links is None or follow.offer is None:
                return [await self._payload(DTYPES[spec.dtype], shape) for spec, shape in wanted]
            found = [torch.empty(shape, dtype=DTYPES[spec.dtype]) for spec, shape in wanted]
            await self.links.receive(follow.offer, follow.digest, found, Deadline(seconds))
            return found

    async def _payload(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        data = await self._reader.readexactly(size)
        mac = await self._reader.readexactly(MAC_BYTES)
        assert self._receive_key is not None
        wanted = await _beside(size, partial(mac_of, self._receive_key, self._received, data))
        if not hmac.compare_digest(mac, wanted):
            raise AuthenticationError(f"payload: number {self._received} fails its MAC")
        self._received += 1
        copied = await _beside(size, partial(bytearray, data))
        return torch.frombuffer(copied, dtype=dtype).view(shape)

    async def _seal(self, data: bytes) -> bytes:
        """The MAC of the next payload."""
        assert self._send_key is not None
        number, self._sent = self._sent, self._sent + 1
        return await _beside(len(data), partial(mac_of, self._send_key, number, data))


async def _beside(size: int, call: Callable[[], T]) -> T:
    """Return the result of a call over so many bytes, without stopping the event loop for long."""
    return await asyncio.to_thread(call) if size >= LARGE_BYTES else call()
