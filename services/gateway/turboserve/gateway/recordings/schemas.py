"""Schemas of recordings in REST answers."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field

from turboserve.contracts.recordings import RecordingRecord
from turboserve.gateway.public import ModelName, PublicOutput, Timestamp


class PublicRecordingState(StrEnum):
    """Where a recording is in its life."""

    RECORDING = "recording"
    """The session's video is stored as it is generated."""
    STOPPING = "stopping"
    """The recording has been stopped, and its last chunks are being stored."""
    COMPLETE = "complete"
    """The recording does not change any more."""


class RecordingLinks(PublicOutput):
    """Paths of the recording's resources."""

    self: str = Field(description="The recording.", examples=["/v1/recordings/rec_5f3a9c"])
    session: str = Field(description="The session.", examples=["/v1/sessions/ses_5f3a9c"])
    video: str = Field(
        description="The video as one MP4 file.", examples=["/v1/recordings/rec_5f3a9c/video.mp4"]
    )
    playlist: str = Field(
        description="The video as an HLS playlist.", examples=["/v1/recordings/rec_5f3a9c/playlist.m3u8"]
    )
    poster: str = Field(description="The first frame.", examples=["/v1/recordings/rec_5f3a9c/poster.jpg"])
    contact_sheet: str = Field(
        description="Frames of the whole video in one picture.",
        examples=["/v1/recordings/rec_5f3a9c/contact-sheet.jpg"],
    )

    @classmethod
    def of(cls, record: RecordingRecord) -> Self:
        base = f"/v1/recordings/{record.id}"
        return cls(
            self=base,
            session=f"/v1/sessions/{record.session}",
            video=f"{base}/video.mp4",
            playlist=f"{base}/playlist.m3u8",
            poster=f"{base}/poster.jpg",
            contact_sheet=f"{base}/contact-sheet.jpg",
        )


class Recording(PublicOutput):
    """One recording as its tenant sees it."""

    id: str = Field(description="Id of the recording.", examples=["rec_5f3a9c"])
    session: str = Field(description="The recorded session.", examples=["ses_5f3a9c"])
    model: ModelName = Field(description="Model of the session.", examples=["toyworld"])
    prompt: str = Field(
        description="The session's prompt when the recording started.", examples=["a red circle moving left"]
    )
    state: PublicRecordingState = Field(
        description="`recording`: the video is stored as it is generated. `stopping`: the last chunks are "
        "being stored. `complete`: the recording does not change any more.",
        examples=["complete"],
    )
    from_chunk: int = Field(description="Index of the first chunk of the recording.", examples=[0])
    chunks: int = Field(description="Number of stored chunks.", examples=[480])
    missing_chunks: int = Field(
        description="Number of chunks that the log dropped before they were stored. The video goes on behind "
        "them without a gap.",
        examples=[0],
    )
    bytes: int = Field(description="Size of the stored video, bytes.", examples=[24_000_000])
    duration_s: float = Field(description="Length of the stored video, seconds.", examples=[360.0])
    parts: int = Field(
        description="Number of videos. More than one: the encoder's settings changed, and `video.mp4?part=2` "
        "is the video from there on.",
        examples=[1],
    )
    reason: str | None = Field(
        description="Why the recording stopped, if its user did not stop it. `null`: no such reason.",
        examples=[None],
    )
    session_failed: bool = Field(
        description="Whether the recording ended because its session failed. `reason` is then the session's.",
        examples=[False],
    )
    created_at: Timestamp = Field(description="When the recording started.")
    updated_at: Timestamp = Field(description="When the recording last changed.")
    completed_at: Timestamp | None = Field(
        description="When the last chunk was stored. `null`: not yet.",
        examples=["2026-11-22T21:04:05.250000Z"],
    )
    expires_at: Timestamp | None = Field(
        description="When the recording is deleted. `null`: it is not complete, or is kept until deleted.",
        examples=["2026-12-22T21:04:05.250000Z"],
    )
    links: RecordingLinks = Field(description="Where the recording's resources are.")

    @classmethod
    def of(cls, record: RecordingRecord) -> Self:
        return cls(**record.model_dump(include=set(cls.model_fields)), links=RecordingLinks.of(record))


class RecordingList(PublicOutput):
    """A page of a tenant's recordings, newest first."""

    recordings: list[Recording] = Field(description="The recordings.")
    next: int | None = Field(
        description="Cursor of the next page, for `after`. `null`: this is the last page.", examples=[None]
    )
