"""Messages of the WebSocket. Video is binary: each binary message follows the JSON that announces it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic_core import to_json

from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.fidelity import Tier
from turboserve.contracts.links import Role
from turboserve.contracts.public_types import written
from turboserve.contracts.sessions import Phase
from turboserve.gateway.problems.schemas import Problem
from turboserve.gateway.public import (
    ModelName,
    PublicActivity,
    PublicMessage,
    PublicOutput,
    Timestamp,
)
from turboserve.gateway.sessions.schemas import ControlValues

VERSION = 1

ClientId = Annotated[
    str | None, Field(description="The `id` of the client's message, if it had one.", examples=["my-1"])
]


class Hello(PublicMessage):
    """The first message: the state of the session, and where this stream begins."""

    type: Literal["hello"] = Field(default="hello", description="The type of the message.")
    protocol_version: int = Field(
        description="Version of this protocol. A change that breaks clients raises it.", examples=[VERSION]
    )
    session: str = Field(description="Id of the session.", examples=["ses_5f3a9c"])
    phase: Phase = Field(description="The session's phase.", examples=["active"])
    activity: PublicActivity = Field(description="What the user wants of the session.", examples=["watching"])
    prompt: str = Field(description="The newest accepted prompt.", examples=["a red circle moving left"])
    model: ModelName = Field(description="The session's model.", examples=["toyworld"])
    seed: int = Field(description="The session's seed.", examples=[7])
    epoch: int = Field(description="Number of the session's current ownership.", examples=[1])
    worker: str | None = Field(description="The worker that owns the session.", examples=["wk_5f3a9c"])
    target: str | None = Field(
        description="The worker that the session is migrating to.", examples=["wk_77d1e0"]
    )
    controls: ControlValues
    control_seq: int = Field(description="Number of the newest accepted prompt or control.", examples=[1])
    applied_control_seq: int = Field(
        description="Number of the newest prompt or control that a chunk was generated under.", examples=[1]
    )
    next: int = Field(description="Index of the first chunk of this stream.", examples=[42])
    start_s: float = Field(
        description="Media time of the first frame of this stream, seconds.", examples=[31.35]
    )
    events_after: int = Field(
        description="The stream sends the events with a greater `sequence`.", examples=[4]
    )
    newest_event: int = Field(
        description="Events up to this `sequence` are history: this message shows what they changed.",
        examples=[4],
    )
    max_message_bytes: int = Field(description="Maximum size of a client's message.", examples=[65536])
    report_interval_s: float = Field(
        description="Interval at which the client should report its playhead, seconds.", examples=[0.25]
    )
    role: Role = Field(
        description="What this client may do. A `viewer`'s controls are refused.", examples=["controller"]
    )
    gateways: tuple[str, ...] = Field(
        default=(),
        description="Addresses of all gateways. They serve the same sessions, so a client may leave one "
        "that is silent for another. Empty: one address serves all clients.",
        examples=[["https://a.example.com", "https://b.example.com"]],
    )


class Init(PublicMessage):
    """Announces an init segment: the first, and every change. One binary message follows."""

    type: Literal["init"] = Field(default="init", description="The type of the message.")
    mime: str = Field(
        description="MIME type of the video, for a `SourceBuffer`.",
        examples=['video/mp4; codecs="avc1.64000a"'],
    )
    bytes: int = Field(description="Size of the binary message that follows.", examples=[742])
    width: int = Field(description="Width of the video, pixels.", examples=[832])
    height: int = Field(description="Height of the video, pixels.", examples=[480])
    fps: float = Field(description="Frames per second.", examples=[16.0])


class ChunkFidelity(PublicOutput):
    """The configuration of a chunk that is not of the best quality."""

    steps: int = Field(description="Number of denoising steps.", examples=[3])
    window_chunks: int = Field(
        description="Number of newest chunks that attention reads, the chunk itself included.", examples=[3]
    )
    sparsity: float = Field(description="Share of the key blocks that attention skips.", examples=[0.0])
    fast_decoder: bool = Field(
        description="Whether the model's second, faster decoder has decoded it.", examples=[False]
    )
    quality: float | None = Field(
        description="Measured quality, where 1 is the best configuration's. `null`: not measured.",
        examples=[0.97],
    )


class ChunkMessage(PublicMessage):
    """Announces a chunk. One binary message follows: one closed fMP4 fragment."""

    type: Literal["chunk"] = Field(default="chunk", description="The type of the message.")
    index: int = Field(description="Index of the chunk: 0, 1, 2, …, each once.", examples=[42])
    epoch: int = Field(description="Number of the ownership that it was generated under.", examples=[1])
    worker: str = Field(description="The worker that generated it.", examples=["wk_5f3a9c"])
    start_s: float = Field(description="Media time of its first frame, seconds.", examples=[31.35])
    duration_s: float = Field(description="Its duration, seconds.", examples=[0.75])
    control_seq: int = Field(
        description="Number of the newest prompt or control that it was generated under.", examples=[1]
    )
    compute_s: float = Field(description="Time to generate it, seconds.", examples=[0.31])
    slack_s: float | None = Field(
        description="Playout slack when it was published: seconds of video that the viewer had left. Below "
        "0: the chunk was late.",
        examples=[1.9],
    )
    credit_s: float | None = Field(
        description="Service credit then: the slack less the time of the next chunk, seconds.",
        examples=[1.5],
    )
    tier: Tier | None = Field(description="Urgency of the session then.", examples=["relaxed"])
    fidelity: ChunkFidelity | None = Field(
        description="Its configuration. `null`: the best.",
        examples=[{"steps": 3, "window_chunks": 3, "sparsity": 0.0, "fast_decoder": False, "quality": 0.97}],
    )
    published_at: Timestamp = Field(description="When the worker published it.")
    bytes: int = Field(description="Size of the binary message that follows.", examples=[48213])
    rtp_time: int | None = Field(
        default=None,
        description="Over WebRTC, where no binary message follows: the RTP timestamp of its first frame less "
        "that of the stream's first frame, in 1/90000 s. `null` over WebSocket.",
        examples=[135000],
    )

    @staticmethod
    def text_of(header: ChunkHeader, size: int) -> str:
        """Return the message about a chunk as `text` does, in a third of the time.

        Each chunk needs it for each viewer. The header was validated when it was read.
        """
        fields = {
            "type": "chunk",
            "index": header.index,
            "epoch": header.epoch,
            "worker": header.worker,
            "start_s": header.start_s,
            "duration_s": header.frames / header.fps,
            "control_seq": header.control_seq,
            "compute_s": header.compute_s,
            "slack_s": header.slack_s,
            "credit_s": header.credit_s,
            "tier": header.tier,
            "fidelity": header.fidelity and ChunkFidelity(**header.fidelity.model_dump()),
            "published_at": written(header.published_at),
            "bytes": size,
        }
        return to_json(
            {name: value for name, value in fields.items() if value is not None}, exclude_none=True
        ).decode()


class Skip(PublicMessage):
    """The next chunk is the first under a prompt or control with `drop_buffer`: discard video before it."""

    type: Literal["skip"] = Field(default="skip", description="The type of the message.")
    index: int = Field(description="Index of the chunk to skip to, which follows.", examples=[42])
    start_s: float = Field(description="Media time of its first frame, seconds.", examples=[31.35])
    control_seq: int = Field(description="Number of the newest prompt or control in it.", examples=[1])


class ReceiptMessage(PublicMessage):
    """Answer to the client's `prompt`: the prompt is accepted."""

    type: Literal["receipt"] = Field(default="receipt", description="The type of the message.")
    id: ClientId
    prompt_id: str = Field(
        description="Id of the prompt. `prompt.applied` or `prompt.superseded` with this id follows.",
        examples=["prm_5f3a9c"],
    )
    control_seq: int = Field(description="Number of the prompt in the session.", examples=[1])
    accepted_at: Timestamp = Field(description="When the prompt was accepted.")


class ControlReceiptMessage(PublicMessage):
    """Answer to the client's `control`: the value is accepted."""

    type: Literal["control_receipt"] = Field(
        default="control_receipt", description="The type of the message."
    )
    id: ClientId
    control_id: str = Field(
        description="Id of the value. `control.applied` or `control.superseded` with this id follows.",
        examples=["ctl_5f3a9c"],
    )
    control_seq: int = Field(
        description="Number of the value among the session's prompts and controls.", examples=[2]
    )
    accepted_at: Timestamp = Field(description="When the value was accepted.")


class Pong(PublicMessage):
    """Answer to the client's `ping`."""

    type: Literal["pong"] = Field(default="pong", description="The type of the message.")
    id: ClientId = None


class End(PublicMessage):
    """The last message: the session has ended and all its video was sent. The socket closes with 1000."""

    type: Literal["end"] = Field(default="end", description="The type of the message.")
    phase: Phase = Field(description="`terminated` or `failed`.", examples=["terminated"])
    reason: str | None = Field(description="Why the session ended.", examples=["ended by its user"])
    last: int = Field(description="Index of the last chunk; -1: there was none.", examples=[57])


class ErrorMessage(Problem):
    """A problem, as REST would answer it. The stream continues unless the socket closes."""

    type: Literal["error"] = Field(default="error", description="The type of the message.")
    id: ClientId = None

    @classmethod
    def of_problem(cls, problem: Problem, message_id: str | None = None) -> ErrorMessage:
        return cls(**problem.model_dump(exclude={"type"}), id=message_id)

    def text(self) -> str:
        return self.model_dump_json(exclude_none=True)


SERVER_MESSAGES = (
    Hello,
    Init,
    Skip,
    ChunkMessage,
    ReceiptMessage,
    ControlReceiptMessage,
    Pong,
    End,
    ErrorMessage,
)
"""What the gateway sends besides events and video."""
