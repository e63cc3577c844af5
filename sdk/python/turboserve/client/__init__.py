"""Client of TurboServe: `AsyncClient`, and `Client` for code without `async`."""

from turboserve.client.client import AsyncClient
from turboserve.client.errors import (
    ChunkGoneError,
    ControlSupersededError,
    GatewayUnreachableError,
    NoCapacityError,
    NotFoundError,
    ProblemError,
    PromptSupersededError,
    ProtocolError,
    SessionEndedError,
    TurboServeError,
    UnauthorizedError,
)
from turboserve.client.models import (
    Chunk,
    ControlReceipt,
    Event,
    Quality,
    Receipt,
    SessionInfo,
    Skip,
    VideoFormat,
)
from turboserve.client.recording import AsyncRecording, RecordedFile, RecordingInfo
from turboserve.client.session import AsyncSession
from turboserve.client.stream import VideoStream
from turboserve.client.sync import Client, Session, Stream
from turboserve.client.sync_recording import Recording
from turboserve.client.video import Frame, MissingExtraError, decode, frames

__all__ = [
    "AsyncClient",
    "AsyncRecording",
    "AsyncSession",
    "Chunk",
    "ChunkGoneError",
    "Client",
    "ControlReceipt",
    "ControlSupersededError",
    "Event",
    "Frame",
    "GatewayUnreachableError",
    "MissingExtraError",
    "NoCapacityError",
    "NotFoundError",
    "ProblemError",
    "PromptSupersededError",
    "ProtocolError",
    "Quality",
    "Receipt",
    "RecordedFile",
    "Recording",
    "RecordingInfo",
    "Session",
    "SessionEndedError",
    "SessionInfo",
    "Skip",
    "Stream",
    "TurboServeError",
    "UnauthorizedError",
    "VideoFormat",
    "VideoStream",
    "decode",
    "frames",
]
