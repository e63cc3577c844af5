"""The frames between two workers of one host: JSON over a socket, validated before use."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from turboserve.contracts.base import Id
from turboserve.worker.engine.sequence_parallel import ForwardSpec
from turboserve.worker.sequence_parallel.loan_messages import Accept, Ask, Decline, End, Message, Offer
from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.frames import Hex32, Linked, Refuse, StoreEntry

VERSION = 1


class _PeerFrame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Greeting(_PeerFrame):
    """Both directions, the first frame: who connects. The first to connect chooses key and name."""

    type: Literal["greeting"] = "greeting"
    version: int = VERSION
    worker: Id
    model: str = Field(max_length=64)
    """`state_fingerprint` of the worker's model: both must have the same weights."""
    device: str = Field(max_length=16)
    """Kind of device, such as `cuda`."""
    key: Hex32
    """Key by which the ends of the group recognize each other."""
    group: Hex32
    """Name of the group."""


class LoanFrame(_PeerFrame):
    """Either direction: a message of the protocol of loans."""

    type: Literal["loan"] = "loan"
    kind: Literal["ask", "offer", "decline", "accept", "end"]
    loan: int = Field(ge=0, lt=1 << 63)
    credit_s: float = Field(default=0.0, allow_inf_nan=False)
    """Only of an offer."""


class ForwardFrame(_PeerFrame):
    """home → donor: the home begins this forward; the exchange follows over the group."""

    type: Literal["forward"] = "forward"
    spec: ForwardSpec


PeerFrame = Annotated[
    Greeting | LoanFrame | ForwardFrame | StoreEntry | Linked | Refuse, Field(discriminator="type")
]

_KINDS: dict[str, type[Ask | Decline | Accept | End]] = {
    "ask": Ask,
    "decline": Decline,
    "accept": Accept,
    "end": End,
}


def frame_of(message: Message) -> LoanFrame:
    """The message as a frame."""
    if isinstance(message, Offer):
        return LoanFrame(kind="offer", loan=message.loan, credit_s=message.credit_s)
    kind = next(name for name, one in _KINDS.items() if isinstance(message, one))
    return LoanFrame(kind=cast(Any, kind), loan=message.loan)


def message_of(frame: LoanFrame) -> Message:
    """The message of a frame."""
    if frame.kind == "offer":
        return Offer(frame.loan, frame.credit_s)
    return _KINDS[frame.kind](frame.loan)


class PeerChannel(Channel):
    """A connection between two workers of one host."""

    frames: ClassVar[TypeAdapter[Any]] = TypeAdapter(PeerFrame)

    async def post(self, frame: PeerFrame, seconds: float) -> None:
        """Send one frame. Raises the errors of `Channel.send`."""
        await self._send(frame, seconds)

    async def next(self, seconds: float) -> PeerFrame:
        """Receive the next frame. Raises the errors of `Channel.receive`."""
        return cast(PeerFrame, await self.receive(seconds))
